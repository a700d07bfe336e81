//! What tests need built first: guest images and static binaries. Built on demand, once.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use guest_images::linux::{self, Images, KernelChoice};
use guest_images::progress::Progress;
use guest_images::qemu::{self, Qemu};

/// Target of the static binaries: the host's own, linked statically so that they run in the lab,
/// which has no shared libraries.
const STATIC_TARGET: &str = "x86_64-unknown-linux-gnu";

/// Something tests need could not be built. The text says what and why, with the remedy.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct ArtefactError(String);

/// Top of the source tree.
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("."))
}

/// What `cargo metadata` says of the workspace with these arguments besides, without a network.
///
/// # Panics
/// When cargo fails, with what it printed.
pub fn cargo_metadata(arguments: &[&str]) -> serde_json::Value {
    let output = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()))
        .current_dir(workspace())
        .args(["metadata", "--format-version", "1", "--offline"])
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("cargo metadata: {error}"));
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("cargo metadata: {error}"))
}

/// Cargo's target directory, where everything built is kept.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(directory) => workspace().join(directory),
        None => workspace().join("target"),
    }
}

/// Directory for consoles and logs of test runs.
///
/// # Errors
/// When it cannot be created.
pub fn log_dir() -> Result<PathBuf, ArtefactError> {
    let directory = target_dir().join("integration");
    std::fs::create_dir_all(&directory)
        .map_err(|error| ArtefactError(format!("{}: {error}", directory.display())))?;
    Ok(directory)
}

/// The images of the default kernel, built if need be.
///
/// # Errors
/// When they are not there and cannot be built, for instance without network.
pub fn images() -> Result<&'static Images, ArtefactError> {
    static IMAGES: OnceLock<Result<Images, ArtefactError>> = OnceLock::new();
    IMAGES
        .get_or_init(|| images_of(&KernelChoice::default()))
        .as_ref()
        .map_err(Clone::clone)
}

/// The images of a kernel of choice, built if need be.
///
/// # Errors
/// When they are not there and cannot be built.
pub fn images_of(choice: &KernelChoice) -> Result<Images, ArtefactError> {
    linux::ensure(&target_dir(), choice, false, &Progress::new("guest")).map_err(|error| {
        ArtefactError(format!(
            "cannot build the Linux guest: {} (see docs/guide/guest-images.md)",
            describe(&error)
        ))
    })
}

/// The lab's QEMU, with what it needs.
///
/// # Errors
/// When none is installed, or its plugin cannot be built.
pub fn qemu() -> Result<&'static Qemu, ArtefactError> {
    static QEMU: OnceLock<Result<Qemu, ArtefactError>> = OnceLock::new();
    QEMU.get_or_init(|| qemu::ensure(&target_dir()).map_err(|error| ArtefactError(describe(&error))))
        .as_ref()
        .map_err(Clone::clone)
}

/// Directory with the bare-metal guests as files, `NAME.elf`.
///
/// # Errors
/// When they cannot be written.
pub fn bare_metal_dir() -> Result<&'static Path, ArtefactError> {
    static DIRECTORY: OnceLock<Result<PathBuf, ArtefactError>> = OnceLock::new();
    let directory = DIRECTORY.get_or_init(|| {
        let directory = log_dir()?.join("bare-metal");
        // Files that are right are not written again: another process may be reading them.
        let current = guest_images::bare_metal::GUESTS.iter().all(|guest| {
            std::fs::read(directory.join(format!("{}.elf", guest.name)))
                .is_ok_and(|data| data == guest.image())
        });
        if !current {
            guest_images::bare_metal::write_all(&directory)
                .map_err(|error| ArtefactError(error.to_string()))?;
        }
        Ok(directory)
    });
    directory.as_deref().map_err(Clone::clone)
}

/// Static programs for the lab.
#[derive(Debug, Clone)]
pub struct Binaries {
    /// The VMM.
    pub perfvisor: PathBuf,
    /// The lab's agent.
    pub lab_agent: PathBuf,
    /// The agent of `perfvisor exec` and `cp`, for guests.
    pub guest_agent: PathBuf,
}

/// Builds the static binaries, or finds that they are up to date.
///
/// They are the release build: what `make build` has built is not built again.
/// `PERFVISOR_STATIC_DIR` names a directory with ready binaries.
///
/// # Errors
/// When the build fails.
pub fn binaries() -> Result<&'static Binaries, ArtefactError> {
    static BINARIES: OnceLock<Result<Binaries, ArtefactError>> = OnceLock::new();
    BINARIES
        .get_or_init(build_binaries)
        .as_ref()
        .map_err(Clone::clone)
}

fn build_binaries() -> Result<Binaries, ArtefactError> {
    let in_directory = |directory: &Path| Binaries {
        perfvisor: directory.join("perfvisor"),
        lab_agent: directory.join("lab-agent"),
        guest_agent: directory.join("perfvisor-agent"),
    };
    if let Some(directory) = std::env::var_os("PERFVISOR_STATIC_DIR") {
        return Ok(in_directory(Path::new(&directory)));
    }
    Progress::new("lab").step("building static binaries (a few minutes the first time)");
    // As `make build` has it: a package more would change features, and with them the product.
    build_static(&["build", "-p", "perfvisor", "-p", "guest-agent"])?;
    build_static(&["build", "-p", "integration", "--bin", "lab-agent"])?;
    Ok(in_directory(&target_dir().join(STATIC_TARGET).join("release")))
}

/// Runs `cargo` with `arguments` so that what it builds is static, and returns what it prints.
fn build_static(arguments: &[&str]) -> Result<String, ArtefactError> {
    let (verb, rest) = arguments.split_at(1);
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let output = Command::new(cargo)
        .current_dir(workspace())
        .args(verb)
        .args(["--quiet", "--release", "--target", STATIC_TARGET])
        .args(rest)
        .arg("--target-dir")
        .arg(target_dir())
        // Flags of the surrounding build, such as sanitizers, are not for the lab.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .output()
        .map_err(|error| ArtefactError(format!("cannot run cargo: {error}")))?;
    if !output.status.success() {
        return Err(ArtefactError(format!(
            "cannot build the static binaries for the lab:\n{}",
            String::from_utf8_lossy(&output.stderr)
        )));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Builds the integration tests `names` of `package` as static programs, to be run inside a guest. In their
/// order.
///
/// # Errors
/// When the build fails.
pub fn static_tests(package: &str, names: &[&str]) -> Result<Vec<PathBuf>, ArtefactError> {
    Progress::new("lab").step("building test programs for the guest");
    let mut arguments = vec!["test", "--no-run", "--message-format=json", "-p", package];
    for name in names {
        arguments.extend(["--test", name]);
    }
    let messages = build_static(&arguments)?;
    let executable = |name: &str| {
        messages.lines().find_map(|line| {
            let message: serde_json::Value = serde_json::from_str(line).ok()?;
            let wanted = message["target"]["name"] == name && message["profile"]["test"] == true;
            wanted.then(|| message["executable"].as_str().map(PathBuf::from))?
        })
    };
    names
        .iter()
        .map(|name| {
            executable(name).ok_or_else(|| ArtefactError(format!("cargo built no test program {name}")))
        })
        .collect()
}

/// The program `name` that was built with the one that runs, or else that of the search path.
pub fn beside(name: &str) -> PathBuf {
    let built = std::env::current_exe().map(|exe| exe.with_file_name(name));
    built
        .ok()
        .filter(|path| path.exists())
        .unwrap_or_else(|| name.into())
}

/// An error with its causes on one line.
pub fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
