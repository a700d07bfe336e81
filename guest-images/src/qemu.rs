//! The QEMU that the lab runs in, and what an old one needs.
//!
//! Before 8.1 QEMU read code for its translations without a lock. A kernel that patches itself while another
//! processor translates just there, as Linux does when perf events come and go, may have its breakpoint
//! translated and kept after it is gone; that processor then takes the same breakpoint for ever. A plugin
//! (`programs/stale-code.c`) has such translations dropped. A newer QEMU would do as well, but 10.0 is slower
//! (docs/guide/lab.md).

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::linux::{BuildError, compile};

/// What the lab's QEMU is called.
const PROGRAM: &str = "qemu-system-x86_64";

/// Names another QEMU to use.
const OVERRIDE: &str = "PERFVISOR_QEMU";

/// The first version that translates only what it has locked.
const LOCKS_WHAT_IT_TRANSLATES: Version = Version(8, 1);

/// The first version whose CMPXCHG16B leaves all flags but ZF as they were. Before, they came from whatever
/// the translator had computed last, in another block, and Linux from 6.12 on, as a guest or not, branched
/// wrongly behind it and died.
const KNOWS_CMPXCHG16B: Version = Version(8, 0);

/// With XSAVE guests' kernels warn of sizes in CPUID leaf 0DH that do not fit their XCR0, and 7.3 panics
/// (docs/guide/lab.md). Tried with 7.2; it seems that KVM cannot intercept XSETBV there. So there is neither
/// XSAVE nor what needs it.
const NO_XSAVE: &str = ",-xsave,-xsaveopt,-xsavec,-xgetbv1,-avx,-avx2,-f16c,-fma";

const PLUGIN_SOURCE: &str = include_str!("../programs/stale-code.c");
const PLUGIN_FLAGS: [&str; 7] = [
    "-O1",
    "-g",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
];

/// Why there is no QEMU.
#[derive(Debug, thiserror::Error)]
pub enum QemuError {
    /// None is installed.
    #[error("no {PROGRAM}: install it with \"make setup\"")]
    Missing,
    /// The file that the environment names is not QEMU.
    #[error("{OVERRIDE}={0}: not a QEMU that runs")]
    Named(PathBuf),
    /// The plugin could not be built.
    #[error("cannot build QEMU's plugin")]
    Plugin(#[from] BuildError),
}

/// Major and minor version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32, u32);

/// A QEMU for x86-64 machines.
#[derive(Debug, Clone)]
pub struct Qemu {
    program: PathBuf,
    version: Version,
    plugin: Option<PathBuf>,
}

impl Qemu {
    /// Asks a program for its version.
    fn probe(program: &Path) -> Option<Self> {
        let version = parse_version(&output(program, &["--version".as_ref()])?)?;
        Some(Self {
            program: program.to_owned(),
            version,
            plugin: None,
        })
    }

    /// The program.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// What its command line must hold besides the machine.
    pub fn arguments(&self) -> impl Iterator<Item = &OsStr> {
        self.plugin
            .iter()
            .flat_map(|plugin| [OsStr::new("-plugin"), plugin.as_os_str()])
    }

    /// The processor it emulates for the lab: an AMD model that QEMU has since 2.12, with nested paging, less
    /// what it gets wrong.
    pub fn processor(&self) -> String {
        let cmpxchg16b = if self.version < KNOWS_CMPXCHG16B {
            ",-cx16"
        } else {
            ""
        };
        format!("EPYC,+svm{cmpxchg16b}{NO_XSAVE}")
    }

    /// Its version, such as `7.2`.
    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// Whether a processor may go on executing code that another one has changed (the module says when).
    pub fn keeps_stale_code(&self) -> bool {
        self.version < LOCKS_WHAT_IT_TRANSLATES && self.plugin.is_none()
    }
}

/// The QEMU to use: the one that PERFVISOR_QEMU names, else the installed one, with the plugin if it needs
/// and knows plugins.
///
/// Safe to call from several processes at once.
///
/// # Errors
/// There is no QEMU, or the plugin cannot be compiled.
pub fn ensure(target_dir: &Path) -> Result<Qemu, QemuError> {
    let named = std::env::var_os(OVERRIDE).map(PathBuf::from);
    let mut qemu = match &named {
        Some(program) => Qemu::probe(program).ok_or_else(|| QemuError::Named(program.clone()))?,
        None => Qemu::probe(Path::new(PROGRAM)).ok_or(QemuError::Missing)?,
    };
    if qemu.keeps_stale_code() {
        let plugin = plugin(&target_dir.join("guest"))?;
        // Help lists the option in any case; a build without plugins refuses it.
        let takes_it = output(
            &qemu.program,
            &["-plugin".as_ref(), plugin.as_os_str(), "--version".as_ref()],
        );
        qemu.plugin = takes_it.map(|_| plugin);
    }
    Ok(qemu)
}

/// Compiles the plugin, unless the same was compiled before.
fn plugin(directory: &Path) -> Result<PathBuf, BuildError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| BuildError::Io { path, source }
    };
    fs::create_dir_all(directory).map_err(io(directory))?;
    let lock_path = directory.join(".plugin-lock");
    let lock = fs::File::create(&lock_path).map_err(io(&lock_path))?;
    lock.lock().map_err(io(&lock_path))?;
    let plugin = directory.join("stale-code.so");
    let stamp = directory.join(".plugin-stamp");
    let recipe = format!("{PLUGIN_FLAGS:?}\n{PLUGIN_SOURCE}");
    let current = plugin.exists() && fs::read_to_string(&stamp).is_ok_and(|built| built == recipe);
    if !current {
        // A QEMU that runs may have the old file mapped.
        let fresh = directory.join("stale-code.so.new");
        compile(directory, "stale-code.c", PLUGIN_SOURCE, &PLUGIN_FLAGS, &fresh)?;
        fs::rename(&fresh, &plugin).map_err(io(&plugin))?;
        fs::write(&stamp, recipe).map_err(io(&stamp))?;
    }
    // Without a slash it would be looked for among the system's libraries.
    fs::canonicalize(&plugin).map_err(io(&plugin))
}

/// What a program prints that ends well.
fn output(program: &Path, arguments: &[&OsStr]) -> Option<String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// From `QEMU emulator version 7.2.22 (Debian …)`.
fn parse_version(text: &str) -> Option<Version> {
    let (_, rest) = text.split_once("QEMU emulator version ")?;
    let mut numbers = rest.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    match (numbers.next()?, numbers.next()?) {
        (Ok(major), Ok(minor)) => Some(Version(major, minor)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_compared_by_number() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright";
        assert_eq!(parse_version(debian), Some(Version(7, 2)));
        let newer = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)";
        assert_eq!(parse_version(newer), Some(Version(10, 0)));
        assert_eq!(parse_version("QEMU emulator version 9.1\n"), Some(Version(9, 1)));
        assert_eq!(parse_version("QEMU emulator version x.y"), None);
        assert_eq!(parse_version("version 9.1"), None);
        let keeps_stale_code = |version, plugin| {
            let program = PROGRAM.into();
            Qemu {
                program,
                version,
                plugin,
            }
            .keeps_stale_code()
        };
        assert!(keeps_stale_code(Version(7, 2), None));
        assert!(keeps_stale_code(Version(8, 0), None));
        assert!(!keeps_stale_code(Version(7, 2), Some("p.so".into())));
        assert!(!keeps_stale_code(Version(8, 1), None));
        assert!(!keeps_stale_code(Version(10, 0), None));
    }

    #[test]
    fn cmpxchg16b_is_hidden_where_its_flags_are_wrong_and_xsave_everywhere() {
        let processor = |version| {
            let program = PROGRAM.into();
            let plugin = None;
            Qemu {
                program,
                version,
                plugin,
            }
            .processor()
        };
        assert_eq!(processor(Version(7, 2)), format!("EPYC,+svm,-cx16{NO_XSAVE}"));
        assert_eq!(processor(Version(8, 0)), format!("EPYC,+svm{NO_XSAVE}"));
        assert_eq!(processor(Version(10, 0)), format!("EPYC,+svm{NO_XSAVE}"));
    }

    #[test]
    fn a_program_that_is_no_qemu_is_none() {
        assert!(Qemu::probe(Path::new("/bin/true")).is_none());
        assert!(Qemu::probe(Path::new("/no/such/program")).is_none());
    }

    #[test]
    fn the_plugin_is_compiled_once() {
        let directory = tempfile::tempdir().unwrap();
        let first = plugin(directory.path()).unwrap();
        let modified = fs::metadata(&first).unwrap().modified().unwrap();
        assert_eq!(plugin(directory.path()).unwrap(), first);
        assert_eq!(fs::metadata(&first).unwrap().modified().unwrap(), modified);
        fs::write(directory.path().join(".plugin-stamp"), "another").unwrap();
        plugin(directory.path()).unwrap();
        assert_ne!(fs::metadata(&first).unwrap().modified().unwrap(), modified);
    }
}
