//! Selection of the QEMU for the lab, with workarounds for old versions.
//!
//! [`ensure`] selects one of these: the installed QEMU; the QEMU that the environment variable
//! `OVERRIDE` names; or the QEMU from Debian's backports, which is unpacked below the target
//! directory and runs without installation. Older versions require workarounds (docs/guide/lab.md):
//! a QEMU plugin that discards translations of modified code (`programs/stale-code.c`), and a CPU
//! model without the instructions that these versions emulate incorrectly.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::deb::{DebError, DebianArchive};
use crate::linux::{GuestImageError, compile};
use crate::progress::ProgressLog;

/// Program name of the lab's QEMU.
const PROGRAM: &str = "qemu-system-x86_64";

/// Environment variable that selects a different QEMU: a program, or [`BACKPORTS`].
const OVERRIDE: &str = "PERFVISOR_QEMU";

/// Value of [`OVERRIDE`] that selects the QEMU of the release's backports.
const BACKPORTS: &str = "backports";

/// First version of QEMU that translates guest code only from locked pages. In earlier versions, a
/// vCPU could keep the translation of a breakpoint that Linux had set temporarily while patching
/// its own code, and hit this breakpoint forever.
const TRANSLATES_LOCKED_PAGES: QemuVersion = QemuVersion(8, 1);

/// First version of QEMU whose CMPXCHG16B preserves all flags except ZF. In earlier versions, the
/// other flags were those of an unrelated instruction, so Linux 6.12 and later, in the lab host or
/// in a guest, took a wrong branch afterwards and crashed.
const KNOWS_CMPXCHG16B: QemuVersion = QemuVersion(8, 0);

/// First version of QEMU known to emulate XSAVE in guests correctly. Versions between 7.2 and 10.0
/// have not been tested. With version 7.2, guest kernels warn about sizes in CPUID leaf 0DH that do
/// not match their XCR0, and Linux 7.3 panics.
const KNOWS_XSAVE: QemuVersion = QemuVersion(10, 0);

/// QEMU CPU options that hide XSAVE and the features that depend on it.
const NO_XSAVE: &str = ",-xsave,-xsaveopt,-xsavec,-xgetbv1,-avx,-avx2,-f16c,-fma";

/// Features of the emulated processor that a lab and its guests require.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum QemuCpuRequirement {
    /// No special features. The guests do not use XSAVE, so any version of QEMU is sufficient.
    #[default]
    Nothing,
    /// XSAVE and AVX, correctly emulated.
    Xsave,
}

/// QEMU packages that the lab needs.
const PACKAGES: [&str; 4] = [
    "qemu-system-x86",
    "qemu-system-common",
    "qemu-system-data",
    "seabios",
];

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

/// Error returned when no suitable QEMU is available.
#[derive(Debug, thiserror::Error)]
pub enum QemuError {
    /// No QEMU is installed.
    #[error("{PROGRAM} not found; install it with `make setup`")]
    Missing,
    /// The file that the environment variable PERFVISOR_QEMU names is not QEMU.
    #[error("{OVERRIDE}={0}: not a working QEMU")]
    Named(PathBuf),
    /// The backports provide no QEMU that runs on this machine.
    #[error("{OVERRIDE}={BACKPORTS}: QEMU not found")]
    Fetch(#[from] PackageFetchError),
    /// The plugin could not be built.
    #[error("cannot build QEMU's plugin")]
    Plugin(#[from] GuestImageError),
}

/// Error returned when QEMU cannot be fetched from the backports.
#[derive(Debug, thiserror::Error)]
pub enum PackageFetchError {
    /// The archive cannot be used, or the packages cannot be fetched.
    #[error(transparent)]
    Deb(#[from] DebError),
    /// A file below the target directory cannot be accessed.
    #[error("{path}")]
    Io {
        /// Path of the file that cannot be accessed.
        path: PathBuf,
        /// Error returned by the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The named program from the backports does not start on this machine.
    #[error("{0} does not start; check for missing libraries with `ldd {0}`")]
    DoesNotStart(PathBuf),
}

/// Major and minor version number of a QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct QemuVersion(u32, u32);

/// A QEMU for x86-64 machines, which runs the lab.
#[derive(Debug, Clone)]
pub struct Qemu {
    program: PathBuf,
    version: QemuVersion,
    data: Vec<PathBuf>,
    plugin: Option<PathBuf>,
}

impl Qemu {
    /// Runs `program --version`. Returns `None` if the program is not QEMU.
    fn probe(program: &Path) -> Option<Self> {
        let version = parse_version(&output(program, &["--version".as_ref()])?)?;
        Some(Self {
            program: program.to_owned(),
            version,
            data: Vec::new(),
            plugin: None,
        })
    }

    /// Returns the path of the program.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Returns the additional command-line options that this QEMU needs.
    pub fn arguments(&self) -> impl Iterator<Item = &OsStr> {
        let data = self.data.iter().map(|directory| ("-L", directory));
        let plugin = self.plugin.iter().map(|plugin| ("-plugin", plugin));
        data.chain(plugin)
            .flat_map(|(option, value)| [OsStr::new(option), value.as_os_str()])
    }

    /// Returns the CPU model for the lab: an AMD processor with nested paging, which QEMU supports
    /// since 2.12. Features that this QEMU emulates incorrectly are disabled.
    pub fn processor(&self) -> String {
        let hide = |right_since, features| {
            if self.version < right_since { features } else { "" }
        };
        let cmpxchg16b = hide(KNOWS_CMPXCHG16B, ",-cx16");
        let xsave = hide(KNOWS_XSAVE, NO_XSAVE);
        format!("EPYC,+svm{cmpxchg16b}{xsave}")
    }

    /// Returns QEMU's version as text, such as `7.2`.
    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// Returns whether a vCPU of this QEMU may keep executing old code after another vCPU has
    /// modified the code. See the module documentation.
    pub fn keeps_stale_code(&self) -> bool {
        self.version < TRANSLATES_LOCKED_PAGES && self.plugin.is_none()
    }
}

/// Returns the QEMU to use: the one that PERFVISOR_QEMU names, or else the installed one. If the
/// version needs the plugin and supports plugins, the plugin is included.
/// `PERFVISOR_QEMU=backports` selects the QEMU of the release's backports, which is fetched once
/// into `target_dir`. The backports are also used if the selected QEMU lacks the features in
/// `needs`.
///
/// Concurrent calls from several processes are safe.
///
/// # Errors
/// Returns [`QemuError::Missing`] if there is no QEMU, [`QemuError::Named`] or [`QemuError::Fetch`]
/// if the QEMU selected by PERFVISOR_QEMU cannot be run, and [`QemuError::Plugin`] if the plugin
/// cannot be compiled.
pub fn ensure(
    target_dir: &Path,
    needs: QemuCpuRequirement,
    progress: &ProgressLog,
) -> Result<Qemu, QemuError> {
    let mut qemu = match std::env::var_os(OVERRIDE).map(PathBuf::from) {
        Some(program) if program == Path::new(BACKPORTS) => {
            of_backports(&target_dir.join("guest"), progress)?
        }
        Some(program) => Qemu::probe(&program).ok_or(QemuError::Named(program))?,
        None => Qemu::probe(Path::new(PROGRAM)).ok_or(QemuError::Missing)?,
    };
    if needs == QemuCpuRequirement::Xsave && qemu.version < KNOWS_XSAVE {
        qemu = of_backports(&target_dir.join("guest"), progress)?;
    }
    if qemu.keeps_stale_code() {
        let plugin = plugin(&target_dir.join("guest"))?;
        // The help text always lists `-plugin`, but a build without plugin support rejects the
        // option.
        let takes_it = output(
            &qemu.program,
            &["-plugin".as_ref(), plugin.as_os_str(), "--version".as_ref()],
        );
        qemu.plugin = takes_it.map(|_| plugin);
    }
    Ok(qemu)
}

/// Returns the QEMU of the release's backports, unpacked below `base`, and fetches it if needed.
fn of_backports(base: &Path, progress: &ProgressLog) -> Result<Qemu, PackageFetchError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| PackageFetchError::Io { path, source }
    };
    let directory = base.join("qemu");
    fs::create_dir_all(&directory).map_err(io(&directory))?;
    let lock_path = directory.join(".lock");
    let lock = fs::File::create(&lock_path).map_err(io(&lock_path))?;
    {
        let _waiting = progress.tick("waiting for another process that fetches QEMU");
        lock.lock().map_err(io(&lock_path))?;
    }
    let directory = fs::canonicalize(&directory).map_err(io(&directory))?;
    let root = directory.join("root");
    if !root.exists() {
        fetch(base, &directory, &root, progress)?;
    }
    unpacked(&root)
}

/// Fetches the QEMU packages of the backports and unpacks them into `root`. `root` exists only
/// after all packages have been unpacked.
fn fetch(
    base: &Path,
    directory: &Path,
    root: &Path,
    progress: &ProgressLog,
) -> Result<(), PackageFetchError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| PackageFetchError::Io { path, source }
    };
    let part = directory.join("root.part");
    if part.exists() {
        fs::remove_dir_all(&part).map_err(io(&part))?;
    }
    let mut archive = DebianArchive::backports(&base.join("debs"), &base.join("backports"), progress)?;
    let debs = archive.fetch(&PACKAGES)?;
    let _unpacking = progress.begin("unpacking QEMU");
    for deb in debs {
        archive.unpack(&deb, &part)?;
    }
    unpacked(&part)?;
    fs::rename(&part, root).map_err(io(root))
}

/// Returns the QEMU that is unpacked in `root`, if it runs on this machine.
fn unpacked(root: &Path) -> Result<Qemu, PackageFetchError> {
    let program = root.join("usr/bin").join(PROGRAM);
    let mut qemu = Qemu::probe(&program).ok_or(PackageFetchError::DoesNotStart(program))?;
    qemu.data = ["usr/share/qemu", "usr/share/seabios"]
        .map(|name| root.join(name))
        .to_vec();
    Ok(qemu)
}

/// Compiles the QEMU plugin that discards stale translations, unless it is up to date.
fn plugin(directory: &Path) -> Result<PathBuf, GuestImageError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| GuestImageError::Io { path, source }
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
        // Compile to a new file, because a running QEMU may have mapped the old file.
        let fresh = directory.join("stale-code.so.new");
        compile(directory, "stale-code.c", PLUGIN_SOURCE, &PLUGIN_FLAGS, &fresh)?;
        fs::rename(&fresh, &plugin).map_err(io(&plugin))?;
        fs::write(&stamp, recipe).map_err(io(&stamp))?;
    }
    // QEMU would search for a path without a slash in the system's library directories.
    fs::canonicalize(&plugin).map_err(io(&plugin))
}

/// Runs a program and returns its standard output, or `None` if the program fails.
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

/// Parses the version from a line such as `QEMU emulator version 7.2.22 (Debian …)`.
fn parse_version(text: &str) -> Option<QemuVersion> {
    let (_, rest) = text.split_once("QEMU emulator version ")?;
    let mut numbers = rest.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    match (numbers.next()?, numbers.next()?) {
        (Ok(major), Ok(minor)) => Some(QemuVersion(major, minor)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn qemu(version: QemuVersion) -> Qemu {
        Qemu {
            program: PROGRAM.into(),
            version,
            data: Vec::new(),
            plugin: None,
        }
    }

    #[test]
    fn versions_are_read_and_compared_by_number() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright";
        assert_eq!(parse_version(debian), Some(QemuVersion(7, 2)));
        let newer = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)";
        assert_eq!(parse_version(newer), Some(QemuVersion(10, 0)));
        assert_eq!(
            parse_version("QEMU emulator version 9.1\n"),
            Some(QemuVersion(9, 1))
        );
        assert_eq!(parse_version("QEMU emulator version x.y"), None);
        assert_eq!(parse_version("version 9.1"), None);
        let keeps_stale_code = |version, plugin| {
            Qemu {
                plugin,
                ..qemu(version)
            }
            .keeps_stale_code()
        };
        assert!(keeps_stale_code(QemuVersion(7, 2), None));
        assert!(keeps_stale_code(QemuVersion(8, 0), None));
        assert!(!keeps_stale_code(QemuVersion(7, 2), Some("p.so".into())));
        assert!(!keeps_stale_code(QemuVersion(8, 1), None));
        assert!(!keeps_stale_code(QemuVersion(10, 0), None));
    }

    #[test]
    fn cpu_model_hides_broken_instructions() {
        let processor = |version| qemu(version).processor();
        assert_eq!(processor(QemuVersion(7, 2)), format!("EPYC,+svm,-cx16{NO_XSAVE}"));
        assert_eq!(processor(QemuVersion(8, 0)), format!("EPYC,+svm{NO_XSAVE}"));
        assert_eq!(processor(QemuVersion(9, 2)), format!("EPYC,+svm{NO_XSAVE}"));
        assert_eq!(processor(QemuVersion(10, 0)), "EPYC,+svm");
    }

    #[test]
    fn unpacked_qemu_gets_its_own_firmware() {
        let root = tempfile::tempdir().unwrap();
        let bin = root.path().join("usr/bin");
        fs::create_dir_all(&bin).unwrap();
        assert!(matches!(
            unpacked(root.path()),
            Err(PackageFetchError::DoesNotStart(_))
        ));
        let program = bin.join(PROGRAM);
        fs::write(&program, "#!/bin/sh\necho QEMU emulator version 10.0.2\n").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let qemu = unpacked(root.path()).unwrap();
        assert_eq!(
            (qemu.version(), qemu.processor()),
            ("10.0".to_owned(), "EPYC,+svm".to_owned())
        );
        let arguments: Vec<_> = qemu.arguments().collect();
        let share = |name: &str| root.path().join("usr/share").join(name).into_os_string();
        let expected: [OsString; 4] = ["-L".into(), share("qemu"), "-L".into(), share("seabios")];
        assert_eq!(arguments, expected);
    }

    #[test]
    fn probe_rejects_other_programs() {
        assert!(Qemu::probe(Path::new("/bin/true")).is_none());
        assert!(Qemu::probe(Path::new("/no/such/program")).is_none());
    }

    #[test]
    fn plugin_is_compiled_once() {
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
