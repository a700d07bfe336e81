//! Builds guest images and static binaries for tests, on demand and once per process.

use std::io::{BufRead, BufReader, IsTerminal, Read, stderr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;

use guest_images::linux::{self, GuestImages, KernelChoice};
use guest_images::progress::ProgressLog;
use guest_images::qemu::{self, Qemu, QemuCpuRequirement};
use guest_images::rr;

/// Target triple of the statically linked binaries. The lab has no shared libraries.
const STATIC_TARGET: &str = "x86_64-unknown-linux-gnu";

/// Error returned when a guest image or a static binary cannot be built. The message names the
/// artefact, the cause and the remedy.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct BuildArtefactError(String);

/// Returns the top directory of the source tree.
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("."))
}

/// Returns the output of `cargo metadata` for the workspace with additional arguments, without
/// network access.
///
/// # Panics
/// Panics with cargo's output if cargo fails.
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

/// Returns cargo's target directory.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(directory) => workspace().join(directory),
        None => workspace().join("target"),
    }
}

/// Returns the directory for consoles and logs of test runs.
///
/// # Errors
/// Returns an error if the directory cannot be created.
pub fn log_dir() -> Result<PathBuf, BuildArtefactError> {
    let directory = target_dir().join("integration");
    std::fs::create_dir_all(&directory)
        .map_err(|error| BuildArtefactError(format!("{}: {error}", directory.display())))?;
    Ok(directory)
}

/// Returns the images of the default kernel and builds them if necessary.
///
/// # Errors
/// Returns an error if the images cannot be built, for example without network access.
pub fn images() -> Result<&'static GuestImages, BuildArtefactError> {
    static IMAGES: OnceLock<Result<GuestImages, BuildArtefactError>> = OnceLock::new();
    IMAGES
        .get_or_init(|| images_of(&KernelChoice::default()))
        .as_ref()
        .map_err(Clone::clone)
}

/// Returns the images of the given kernel and builds them if necessary.
///
/// # Errors
/// Returns an error if the images cannot be built.
pub fn images_of(choice: &KernelChoice) -> Result<GuestImages, BuildArtefactError> {
    linux::ensure(&target_dir(), choice, false, &ProgressLog::new("guest")).map_err(|error| {
        BuildArtefactError(format!(
            "cannot build the Linux guest: {} (see docs/guide/guest-images.md)",
            describe(&error)
        ))
    })
}

/// Returns the lab's QEMU with its plugin.
///
/// # Errors
/// Returns an error if QEMU is not installed or its plugin cannot be built.
pub fn qemu() -> Result<&'static Qemu, BuildArtefactError> {
    qemu_with(QemuCpuRequirement::Nothing)
}

/// Returns a QEMU that satisfies `needs`.
///
/// # Errors
/// Returns an error if QEMU is not installed, cannot be fetched, or its plugin cannot be built.
pub fn qemu_with(needs: QemuCpuRequirement) -> Result<&'static Qemu, BuildArtefactError> {
    static ANY: OnceLock<Result<Qemu, BuildArtefactError>> = OnceLock::new();
    static XSAVE: OnceLock<Result<Qemu, BuildArtefactError>> = OnceLock::new();
    let selected = match needs {
        QemuCpuRequirement::Nothing => &ANY,
        QemuCpuRequirement::Xsave => &XSAVE,
    };
    let ensure = || qemu::ensure(&target_dir(), needs, &ProgressLog::new("lab"));
    selected
        .get_or_init(|| ensure().map_err(|error| BuildArtefactError(describe(&error))))
        .as_ref()
        .map_err(Clone::clone)
}

/// Returns the archive with rr and gdb for guests.
///
/// # Errors
/// Returns an error if a package cannot be fetched.
pub fn rr_archive() -> Result<PathBuf, BuildArtefactError> {
    rr::ensure(&target_dir(), &ProgressLog::new("rr")).map_err(|error| BuildArtefactError(describe(&error)))
}

/// Returns a directory that contains each bare-metal guest as `NAME.elf`.
///
/// # Errors
/// Returns an error if the files cannot be written.
pub fn bare_metal_dir() -> Result<&'static Path, BuildArtefactError> {
    static DIRECTORY: OnceLock<Result<PathBuf, BuildArtefactError>> = OnceLock::new();
    let directory = DIRECTORY.get_or_init(|| {
        let directory = log_dir()?.join("bare-metal");
        // Do not rewrite unchanged files, because another process may be reading them.
        let current = guest_images::bare_metal::GUESTS.iter().all(|guest| {
            std::fs::read(directory.join(format!("{}.elf", guest.name)))
                .is_ok_and(|data| data == guest.image())
        });
        if !current {
            guest_images::bare_metal::write_all(&directory)
                .map_err(|error| BuildArtefactError(error.to_string()))?;
        }
        Ok(directory)
    });
    directory.as_deref().map_err(Clone::clone)
}

/// Paths of the static binaries that run in the lab or its guests.
#[derive(Debug, Clone)]
pub struct LabBinaries {
    /// Path of the `perfvisor` binary.
    pub perfvisor: PathBuf,
    /// Path of the lab's agent.
    pub lab_agent: PathBuf,
    /// Path of the guest agent for `perfvisor exec` and `cp`.
    pub guest_agent: PathBuf,
}

/// Builds the static binaries unless they are up to date.
///
/// Uses the release profile and shares the results of `make build`. `PERFVISOR_STATIC_DIR` names a
/// directory with prebuilt binaries.
///
/// # Errors
/// Returns an error if the build fails.
pub fn binaries() -> Result<&'static LabBinaries, BuildArtefactError> {
    static BINARIES: OnceLock<Result<LabBinaries, BuildArtefactError>> = OnceLock::new();
    BINARIES
        .get_or_init(build_binaries)
        .as_ref()
        .map_err(Clone::clone)
}

fn build_binaries() -> Result<LabBinaries, BuildArtefactError> {
    let in_directory = |directory: &Path| LabBinaries {
        perfvisor: directory.join("perfvisor"),
        lab_agent: directory.join("lab-agent"),
        guest_agent: directory.join("perfvisor-agent"),
    };
    if let Some(directory) = std::env::var_os("PERFVISOR_STATIC_DIR") {
        return Ok(in_directory(Path::new(&directory)));
    }
    build_static(
        "perfvisor and the agents (a few minutes the first time)",
        // These are the packages of `make build` and the lab's agent, which enables no additional
        // features of their libraries. Other packages would cause a rebuild.
        &["build", "-p", "perfvisor", "-p", "guest-agent", "-p", "lab-agent"],
    )?;
    Ok(in_directory(&target_dir().join(STATIC_TARGET).join("release")))
}

/// Runs `cargo` with `arguments` to build static binaries, and returns its standard output.
/// Progress messages call the binaries `what`.
///
/// If standard error is a terminal, cargo displays its own progress. Otherwise, a progress line is
/// printed every ten seconds.
fn build_static(what: &str, arguments: &[&str]) -> Result<String, BuildArtefactError> {
    let progress = ProgressLog::new("lab");
    progress.step(&format!("building {what}"));
    let (verb, rest) = arguments.split_at(1);
    let is_terminal = stderr().is_terminal();
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let mut child = Command::new(cargo)
        .current_dir(workspace())
        .args(verb)
        .args(["--release", "--target", STATIC_TARGET])
        .args(rest)
        .arg("--target-dir")
        .arg(target_dir())
        // Flags of the outer build, such as sanitizers, do not apply to the lab.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTFLAGS")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(if is_terminal {
            Stdio::inherit()
        } else {
            Stdio::piped()
        })
        .spawn()
        .map_err(|error| BuildArtefactError(format!("cannot run cargo: {error}")))?;
    let messages = child.stderr.take();
    let follower =
        thread::spawn(move || messages.map_or_else(String::new, |pipe| follow_cargo(&progress, pipe)));
    let output = child
        .wait_with_output()
        .map_err(|error| BuildArtefactError(format!("cannot wait for cargo: {error}")))?;
    let messages = follower.join().unwrap_or_default();
    if !output.status.success() {
        return Err(BuildArtefactError(format!(
            "cannot build {what} for the lab; cargo's messages:\n{}",
            if is_terminal { "(above)" } else { &messages }
        )));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Reads cargo's standard error until it ends. Prints cargo's last line every ten seconds and
/// returns its warnings and errors.
fn follow_cargo(progress: &ProgressLog, messages: impl Read) -> String {
    let last = Arc::new(Mutex::new((0, String::from("starting"))));
    let shown = Arc::clone(&last);
    let _ticker = progress.tick_with(move || {
        let last = shown.lock().unwrap_or_else(PoisonError::into_inner);
        format!("cargo: {} ({} crates compiled)", last.1, last.0)
    });
    let mut kept = String::new();
    for line in BufReader::new(messages).lines().map_while(Result::ok) {
        // cargo's progress lines start with a right-aligned verb.
        let step = line.trim_start();
        if line.starts_with(' ') && step.starts_with(|c: char| c.is_ascii_uppercase()) {
            let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
            last.0 += u32::from(step.starts_with("Compiling"));
            step.clone_into(&mut last.1);
        } else {
            kept.push_str(&line);
            kept.push('\n');
        }
    }
    kept
}

/// Builds the integration tests `names` of `package` as static programs for a guest. Returns their
/// paths in the same order.
///
/// # Errors
/// Returns an error if the build fails.
pub fn static_tests(package: &str, names: &[&str]) -> Result<Vec<PathBuf>, BuildArtefactError> {
    let mut arguments = vec!["test", "--no-run", "--message-format=json", "-p", package];
    for name in names {
        arguments.extend(["--test", name]);
    }
    let messages = build_static("test programs for the guest", &arguments)?;
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
            executable(name).ok_or_else(|| BuildArtefactError(format!("cargo built no test program {name}")))
        })
        .collect()
}

/// Builds the client that uses a published SDK for Firecracker's API, and returns its path.
///
/// # Errors
/// Returns an error if the build fails.
pub fn sdk_client() -> Result<PathBuf, BuildArtefactError> {
    let manifest = "integration/sdk-client/Cargo.toml";
    build_static(
        "a client of Firecracker's API",
        &["build", "--locked", "--manifest-path", manifest],
    )?;
    Ok(target_dir().join(STATIC_TARGET).join("release/sdk-client"))
}

/// Returns the path of the program `name` in the directory of the running program. If there is no
/// such file, returns `name`, so that the program is searched for in PATH.
pub fn beside(name: &str) -> PathBuf {
    let built = std::env::current_exe().map(|exe| exe.with_file_name(name));
    built
        .ok()
        .filter(|path| path.exists())
        .unwrap_or_else(|| name.into())
}

/// Formats an error and its sources as one line.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_progress_is_filtered_from_messages() {
        let text = "   Compiling a v1.0.0\nwarning: unused\n --> src/lib.rs:1\n  |\n    Finished `release`\n";
        let kept = follow_cargo(&ProgressLog::quiet(), text.as_bytes());
        assert_eq!(kept, "warning: unused\n --> src/lib.rs:1\n  |\n");
    }
}
