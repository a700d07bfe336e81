//! Builds the Linux guest and the lab host.
//!
//! All contents except two init scripts and a test program come from Debian packages. The result is
//! a directory of files, described by [`GuestImages`], and a manifest of the package versions.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use kernel_images::{KernelImageError, bzimage};

use crate::closure::{self, LibraryClosureError};
use crate::cpio;
use crate::deb::{DebError, DebianArchive};
use crate::modules::{self, ModuleError};
use crate::progress::ProgressLog;

const GUEST_INIT: &str = include_str!("../init/guest");
const LAB_INIT: &str = include_str!("../init/lab");
const PVLOAD_SOURCE: &str = include_str!("../programs/pvload.c");
const KNOWN_SOURCE: &str = include_str!("../programs/known.S");
/// Names and contents of the scripts in the guest's search path.
const SCRIPTS: [(&str, &str); 7] = [
    ("beside-cpu-clock", include_str!("../scripts/beside-cpu-clock")),
    ("cycles", include_str!("../scripts/cycles")),
    ("demo", include_str!("../scripts/demo")),
    ("multiplexing", include_str!("../scripts/multiplexing")),
    ("sampling-cost", include_str!("../scripts/sampling-cost")),
    ("smoke", include_str!("../scripts/smoke")),
    ("validate", include_str!("../scripts/validate")),
];

/// Names of the workloads in `pvload`. Each is installed as a symbolic link to `pvload`.
const PROGRAMS: [&str; 10] = [
    "spin", "three", "branches", "syscalls", "faults", "chase", "threads", "idle", "selfread", "gate",
];

/// Modules of the lab host that are not built into Debian's cloud kernel: KVM, a virtio serial port
/// for the test runner, and the host side of the guests' network devices.
const LAB_MODULES: [&str; 7] = [
    "irqbypass",
    "kvm_amd",
    "virtio_pci",
    "virtio_console",
    "virtio_blk",
    "tun",
    "vhost_net",
];

/// Drivers of the power button and its input events, which the guest's scripts may load.
const BUTTON_MODULES: [&str; 2] = ["evdev", "button"];

/// Modules that guest scripts can load: virtio device drivers and a file system.
const GUEST_MODULES: [&str; 10] = [
    "virtio_pci",
    "virtio_balloon",
    "virtio_blk",
    "virtio_console",
    "virtio_net",
    "virtio_rng",
    "vmw_vsock_virtio_transport",
    "virtiofs",
    "crc32c_generic",
    "ext4",
];

/// Names of the file system programs from e2fsprogs in the guest.
const EXT_PROGRAMS: [&str; 2] = ["mke2fs", "e2fsck"];

/// A program with Debian's default build options: shared libraries, no frame pointers.
const PLAIN_PROGRAM: &str = "usr/bin/xz";
const PLAIN_PACKAGE: &str = "xz-utils";

/// Compiler flags of the test program: frame pointers and no inlining, so that profiles show all
/// functions.
const PVLOAD_FLAGS: [&str; 8] = [
    "-O1",
    "-g",
    "-static",
    "-pthread",
    "-fno-omit-frame-pointer",
    "-fno-optimize-sibling-calls",
    "-Wall",
    "-Wextra",
];

/// Linker options of the test program with a known instruction count.
const KNOWN_FLAGS: [&str; 3] = ["-nostdlib", "-static", "-no-pie"];

/// Error returned when guest images cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum GuestImageError {
    /// A Debian package could not be fetched or unpacked.
    #[error(transparent)]
    Deb(#[from] DebError),
    /// Failure to find the libraries of a program.
    #[error(transparent)]
    Closure(#[from] LibraryClosureError),
    /// The lab's kernel modules could not be collected.
    #[error(transparent)]
    Module(#[from] ModuleError),
    /// The kernel image could not be unpacked.
    #[error(transparent)]
    Kernel(#[from] KernelImageError),
    /// The named package contains no kernel image.
    #[error("package {0} holds no boot/vmlinuz-*: not a kernel image package")]
    NoKernel(String),
    /// The archive offers no kernel of the requested type.
    #[error("package {0} not found in the configured apt sources; run `sudo apt-get update`")]
    NoneOffered(&'static str),
    /// The C compiler is missing or failed.
    #[error("cannot build the guest's test program: {0}; run `sudo apt-get install gcc libc6-dev`")]
    Compiler(String),
    /// A file could not be read or written.
    #[error("{path}")]
    Io {
        /// Path of the file that could not be read or written.
        path: PathBuf,
        /// Error returned by the operating system.
        #[source]
        source: io::Error,
    },
}

/// A Debian kernel to build images from.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub enum KernelChoice {
    /// Cloud kernel of the release, as selected by `linux-image-cloud-amd64`.
    #[default]
    Cloud,
    /// General-purpose kernel of the release, as selected by `linux-image-amd64`.
    Generic,
    /// Cloud kernel with the highest version in the configured sources and, if reachable, in the
    /// release's backports.
    Newest,
    /// The named kernel package, or the named metapackage that depends on one.
    Package(String),
    /// Kernel of Debian 13, on any Debian release.
    Debian13(Debian13),
}

/// A kernel of Debian 13.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Debian13 {
    /// Cloud kernel of the Debian 13 release.
    Cloud,
    /// General-purpose kernel of the Debian 13 release.
    Generic,
    /// Real-time kernel of the Debian 13 release.
    Rt,
    /// Cloud kernel with the highest version in the backports of Debian 13.
    Backports,
}

impl Debian13 {
    /// All kernels of Debian 13.
    pub const ALL: [Self; 4] = [Self::Cloud, Self::Generic, Self::Rt, Self::Backports];

    /// Returns the name of this kernel on command lines, such as `debian13-cloud`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cloud => "debian13-cloud",
            Self::Generic => "debian13-generic",
            Self::Rt => "debian13-rt",
            Self::Backports => "debian13-backports",
        }
    }

    /// Returns the Debian suite that contains the kernel.
    fn suite(self) -> &'static str {
        match self {
            Self::Backports => "trixie-backports",
            _ => "trixie",
        }
    }
}

impl KernelChoice {
    /// Parses a kernel choice from a command line: `cloud`, `generic`, `newest`, `debian13-…` or a
    /// package name.
    pub fn parse(text: &str) -> Self {
        if let Some(kernel) = Debian13::ALL.into_iter().find(|kernel| kernel.name() == text) {
            return Self::Debian13(kernel);
        }
        match text {
            "cloud" => Self::Cloud,
            "generic" => Self::Generic,
            "newest" => Self::Newest,
            package => Self::Package(package.to_owned()),
        }
    }

    /// Returns the name of the image directory for this choice.
    fn directory(&self) -> &str {
        match self {
            Self::Cloud => "cloud",
            Self::Generic => "generic",
            Self::Newest => "newest",
            Self::Package(name) => name,
            Self::Debian13(kernel) => kernel.name(),
        }
    }
}

/// Paths of the files that make up the Linux guest and the lab host.
#[derive(Debug, Clone)]
pub struct GuestImages {
    /// Directory that contains all files of the images.
    pub directory: PathBuf,
    /// Kernel as an ELF image, unpacked from the bzImage.
    pub vmlinux: PathBuf,
    /// Kernel as packaged (bzImage).
    pub bz_image: PathBuf,
    /// `System.map` of the kernel, or `None` if the package contains only a placeholder.
    pub system_map: Option<PathBuf>,
    /// Initrd of the guest, with busybox, perf, test programs and init.
    pub initrd: PathBuf,
    /// Initrd of the lab host, without Perfvisor and guests.
    pub lab_initrd: PathBuf,
    /// Separate archive of perf and its libraries, which can be appended to an initrd.
    pub perf_cpio: PathBuf,
    /// Test program of the guest, a static binary with symbols.
    pub pvload: PathBuf,
    /// Names and versions of the packages used for the images, one per line.
    pub manifest: PathBuf,
}

impl GuestImages {
    /// Returns the paths of the images of `choice` below Cargo's target directory. The files need
    /// not exist.
    pub fn locate(target_dir: &Path, choice: &KernelChoice) -> Self {
        let directory = target_dir.join("guest").join(choice.directory());
        let file = |name: &str| directory.join(name);
        let system_map = Some(file("System.map")).filter(|path| path.exists());
        Self {
            vmlinux: file("vmlinux"),
            bz_image: file("bzImage"),
            system_map,
            initrd: file("initrd"),
            lab_initrd: file("lab-initrd"),
            perf_cpio: file("perf.cpio"),
            pvload: file("pvload"),
            manifest: file("packages.txt"),
            directory,
        }
    }

    /// Returns whether all images exist and have been built with the current build instructions.
    pub fn is_current(&self) -> bool {
        fs::read_to_string(self.stamp()).is_ok_and(|stamp| stamp == recipe())
            && [
                &self.vmlinux,
                &self.bz_image,
                &self.initrd,
                &self.lab_initrd,
                &self.perf_cpio,
            ]
            .iter()
            .all(|path| path.exists())
    }

    fn stamp(&self) -> PathBuf {
        self.directory.join(".stamp")
    }
}

/// Returns a fingerprint of the build instructions. It does not depend on package versions.
fn recipe() -> String {
    let mut hasher = DefaultHasher::new();
    // Increase this number when the code of this crate changes the images.
    let layout = 5u32;
    (
        layout,
        GUEST_INIT,
        LAB_INIT,
        PVLOAD_SOURCE,
        KNOWN_SOURCE,
        KNOWN_FLAGS,
        SCRIPTS,
        PROGRAMS,
        LAB_MODULES,
        BUTTON_MODULES,
        (GUEST_MODULES, EXT_PROGRAMS, PLAIN_PROGRAM),
        PVLOAD_FLAGS,
    )
        .hash(&mut hasher);
    format!("{:016x}\n", hasher.finish())
}

/// Builds the images of `choice` below `target_dir` unless they exist. If `refresh` is `true`,
/// checks the archive for newer packages.
///
/// Concurrent calls from several processes are safe: the second process waits for the first.
pub fn ensure(
    target_dir: &Path,
    choice: &KernelChoice,
    refresh: bool,
    progress: &ProgressLog,
) -> Result<GuestImages, GuestImageError> {
    let base = target_dir.join("guest");
    fs::create_dir_all(&base).map_err(io_error(&base))?;
    let lock_path = base.join(".lock");
    let lock = fs::File::create(&lock_path).map_err(io_error(&lock_path))?;
    {
        let _waiting = progress.tick("waiting for another build of the images");
        lock.lock().map_err(io_error(&lock_path))?;
    }
    let images = GuestImages::locate(target_dir, choice);
    if refresh || !images.is_current() {
        build(&base, &images, choice, progress)?;
    }
    // Locate the images again, because the build may have created a System.map.
    Ok(GuestImages::locate(target_dir, choice))
}

fn build(
    base: &Path,
    images: &GuestImages,
    choice: &KernelChoice,
    progress: &ProgressLog,
) -> Result<(), GuestImageError> {
    let directory = &images.directory;
    fs::create_dir_all(directory).map_err(io_error(directory))?;
    // Incomplete images must not be mistaken for complete ones if the build fails later.
    match fs::remove_file(images.stamp()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(io_error(&images.stamp())(error));
        }
        _ => {}
    }
    let root = directory.join("root");
    if root.exists() {
        fs::remove_dir_all(&root).map_err(io_error(&root))?;
    }
    let mut archive = DebianArchive::new(&base.join("debs"), progress)?;

    let (package, mut elsewhere) = choose_kernel(&mut archive, base, choice, progress)?;
    let source = elsewhere.as_mut().unwrap_or(&mut archive);
    let mut debs = fetch_kernel(source, &package)?;
    debs.extend(archive.fetch(&["busybox-static", "e2fsprogs", "linux-perf", PLAIN_PACKAGE])?);
    let unpacking = progress.begin("unpacking packages");
    for deb in debs {
        archive.unpack(&deb, &root)?;
    }
    drop(unpacking);
    let collecting = progress.begin("collecting perf's libraries");
    let libraries = collect_libraries(&mut archive, &root)?;
    drop(collecting);

    let unpacking = progress.begin("unpacking the kernel");
    let release = unpack_kernel(&root, &package, images)?;

    drop(unpacking);

    let compiling = progress.begin("compiling the test programs");
    compile(
        directory,
        "pvload.c",
        PVLOAD_SOURCE,
        &PVLOAD_FLAGS,
        &images.pvload,
    )?;
    let known = directory.join("known");
    compile(directory, "known.S", KNOWN_SOURCE, &KNOWN_FLAGS, &known)?;

    drop(compiling);

    let _writing = progress.begin("writing the initrds of the guest and of the lab host");
    let perf = perf_archive(&root, &libraries)?;
    write(&images.perf_cpio, &perf)?;
    let module_dir =
        module_directory(&root, &release).ok_or_else(|| GuestImageError::NoKernel(package.clone()))?;
    let mut initrd = guest_archive(&root, &module_dir, &images.pvload, &known)?;
    initrd.extend_from_slice(&module_archive(&module_dir)?);
    initrd.extend_from_slice(&perf);
    write(&images.initrd, &initrd)?;

    write(&images.lab_initrd, &lab_archive(&root, &module_dir)?)?;

    let manifest: String = archive
        .versions()
        .iter()
        .chain(elsewhere.iter().flat_map(DebianArchive::versions))
        .map(|(name, version)| format!("{name} {version}\n"))
        .collect();
    write(&images.manifest, manifest.as_bytes())?;
    // The unpacked packages take 200 MB and are no longer needed, because the images are complete.
    fs::remove_dir_all(&root).map_err(io_error(&root))?;
    write(&images.stamp(), recipe().as_bytes())
}

/// Returns the directory with the modules of the kernel `release`.
fn module_directory(root: &Path, release: &str) -> Option<PathBuf> {
    ["lib/modules", "usr/lib/modules"]
        .map(|directory| root.join(directory).join(release))
        .into_iter()
        .find(|directory| directory.exists())
}

/// Fetches the packages of the libraries that the programs of the images need. Returns the paths of
/// the libraries.
fn collect_libraries(
    archive: &mut DebianArchive<'_>,
    root: &Path,
) -> Result<BTreeMap<String, PathBuf>, GuestImageError> {
    // The package contains the program as usr/bin/perf. Older packages contain perf_6.1 and a
    // wrapper.
    let mut libraries = closure::complete(archive, "linux-perf", root, "usr/bin/perf")?;
    for program in EXT_PROGRAMS {
        let program = ext_program(root, program);
        libraries.extend(closure::complete(archive, "e2fsprogs", root, &program)?);
    }
    libraries.extend(closure::complete(archive, PLAIN_PACKAGE, root, PLAIN_PROGRAM)?);
    Ok(libraries)
}

/// Selects the package of the requested kernel. If the package comes from an archive other than
/// `archive`, also returns that archive.
fn choose_kernel<'p>(
    archive: &mut DebianArchive<'p>,
    base: &Path,
    choice: &KernelChoice,
    progress: &'p ProgressLog,
) -> Result<(String, Option<DebianArchive<'p>>), GuestImageError> {
    if let KernelChoice::Debian13(kernel) = choice {
        let lists = base.join(kernel.suite());
        let mut suite = DebianArchive::of_suite(&base.join("debs"), &lists, kernel.suite(), progress)?;
        let package = kernel_package(&mut suite, choice)?;
        return Ok((package, Some(suite)));
    }
    let package = kernel_package(archive, choice);
    match newer_in_backports(base, choice, package.as_deref().ok(), progress) {
        Some((archive, newer)) => Ok((newer, Some(archive))),
        None => Ok((package?, None)),
    }
}

/// Fetches the packages of a kernel. Since Linux 7.1, the kernel package depends on separate
/// packages with the image, the modules and the list of built-in modules.
fn fetch_kernel(source: &mut DebianArchive<'_>, package: &str) -> Result<Vec<PathBuf>, GuestImageError> {
    let parts = ["linux-base-", "linux-binary-", "linux-modules-"];
    let is_part = |name: &String| parts.iter().any(|kind| name.starts_with(kind));
    let others = source.dependencies([package])?.into_iter().filter(is_part);
    let packages: Vec<String> = [package.to_owned()].into_iter().chain(others).collect();
    let packages: Vec<&str> = packages.iter().map(String::as_str).collect();
    Ok(source.fetch(&packages)?)
}

/// Returns the name of the package that contains the kernel image.
fn kernel_package(archive: &mut DebianArchive<'_>, choice: &KernelChoice) -> Result<String, GuestImageError> {
    let name = match choice {
        KernelChoice::Cloud => "linux-image-cloud-amd64",
        KernelChoice::Generic => "linux-image-amd64",
        KernelChoice::Package(name) => name,
        KernelChoice::Newest | KernelChoice::Debian13(Debian13::Backports) => {
            return newest(archive.names(IMAGE)?)
                .ok_or(GuestImageError::NoneOffered("linux-image-*-cloud-amd64"));
        }
        KernelChoice::Debian13(Debian13::Cloud) => "linux-image-cloud-amd64",
        KernelChoice::Debian13(Debian13::Generic) => "linux-image-amd64",
        KernelChoice::Debian13(Debian13::Rt) => "linux-image-rt-amd64",
    };
    let depends = archive.dependencies([name])?;
    let real = depends.into_iter().find(|dependency| {
        dependency
            .strip_prefix(IMAGE)
            .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    });
    Ok(real.unwrap_or_else(|| name.to_owned()))
}

/// Prefix of the names of Debian's kernel packages.
const IMAGE: &str = "linux-image-";

/// Returns the kernel package with the highest version among `packages`.
fn newest(names: Vec<String>) -> Option<String> {
    names
        .into_iter()
        .filter(|name| name.ends_with("-cloud-amd64"))
        .filter(|name| {
            name.strip_prefix(IMAGE)
                .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        })
        // Metapackages of a series, such as 6.12-cloud-amd64, have no patch level.
        .filter(|name| numbers(name).len() >= 3)
        .max_by_key(|name| numbers(name))
}

/// Returns the newest kernel package of Debian's backports, and the backports archive.
///
/// Returns `None` unless `choice` requests the newest kernel and the backports contain a newer one
/// than `offered`.
fn newer_in_backports<'p>(
    base: &Path,
    choice: &KernelChoice,
    offered: Option<&str>,
    progress: &'p ProgressLog,
) -> Option<(DebianArchive<'p>, String)> {
    if *choice != KernelChoice::Newest {
        return None;
    }
    let found = DebianArchive::backports(&base.join("debs"), &base.join("backports"), progress)
        .and_then(|mut archive| archive.names(IMAGE).map(|names| (archive, names)));
    match found {
        Ok((archive, names)) => {
            let Some(name) = newest(names) else {
                progress.step("the release's backports have no kernel, or cannot be reached");
                return None;
            };
            let newer = offered.is_none_or(|offered| numbers(&name) > numbers(offered));
            newer.then_some((archive, name))
        }
        Err(error) => {
            progress.step(&error.to_string());
            None
        }
    }
}

/// Returns the version and ABI numbers in a kernel package name, for comparison.
fn numbers(name: &str) -> Vec<u64> {
    name.trim_end_matches("-cloud-amd64")
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

/// Copies the kernel's files to their destination and returns the kernel release.
fn unpack_kernel(root: &Path, package: &str, images: &GuestImages) -> Result<String, GuestImageError> {
    let boot = root.join("boot");
    let names = |directory: &Path| -> Vec<String> {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect()
    };
    let in_boot = names(&boot)
        .iter()
        .find_map(|name| name.strip_prefix("vmlinuz-").map(str::to_owned))
        .map(|release| (boot.join(format!("vmlinuz-{release}")), release));
    // Since version 7.1, the file is located with the kernel's modules.
    let modules = root.join("usr/lib/modules");
    let (packaged, release) = in_boot
        .or_else(|| {
            let with_image = |release: String| (modules.join(&release).join("vmlinuz"), release);
            names(&modules)
                .into_iter()
                .map(with_image)
                .find(|(image, _)| image.exists())
        })
        .ok_or_else(|| GuestImageError::NoKernel(package.to_owned()))?;
    let bz_image = fs::read(&packaged).map_err(io_error(&packaged))?;
    let vmlinux = bzimage::extract_vmlinux(&packaged.display().to_string(), &bz_image)?;
    write(&images.bz_image, &bz_image)?;
    write(&images.vmlinux, &vmlinux)?;
    // Debian ships a one-line placeholder; the real System.map is in the debug package.
    let map = boot.join(format!("System.map-{release}"));
    match fs::read(&map) {
        Ok(text) if text.len() > 4096 => write(&images.directory.join("System.map"), &text)?,
        _ => {}
    }
    Ok(release)
}

pub(crate) fn compile(
    directory: &Path,
    file: &str,
    text: &str,
    flags: &[&str],
    program: &Path,
) -> Result<(), GuestImageError> {
    let source = directory.join(file);
    write(&source, text.as_bytes())?;
    let compiler = std::env::var("CC").unwrap_or_else(|_| "gcc".to_owned());
    let output = Command::new(&compiler)
        .args(flags)
        .arg("-o")
        .arg(program)
        .arg(&source)
        .output()
        .map_err(|error| GuestImageError::Compiler(format!("{compiler}: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let message = stderr
        .lines()
        .find(|line| line.contains("error"))
        .unwrap_or("no message");
    Err(GuestImageError::Compiler(format!("{compiler}: {message}")))
}

/// Builds the guest archive with busybox, init, scripts and test programs.
fn guest_archive(
    root: &Path,
    module_dir: &Path,
    pvload: &Path,
    known: &Path,
) -> Result<Vec<u8>, GuestImageError> {
    let modules = modules::collect(module_dir, &BUTTON_MODULES)?;
    let busybox = read(&root.join("bin/busybox"))?;
    let pvload = read(pvload)?;
    let known = read(known)?;
    archive_in_memory(|archive| {
        for directory in ["dev", "bin", "scripts", "root", "lib", "lib/modules"] {
            archive.directory(directory)?;
        }
        for module in &modules {
            archive.file(&format!("lib/modules/{}.ko", module.name), 0o644, &module.data)?;
        }
        // The kernel opens the console before init can mount devtmpfs.
        archive.char_device("dev/console", 5, 1)?;
        archive.file("init", 0o755, GUEST_INIT.as_bytes())?;
        archive.file("bin/busybox", 0o755, &busybox)?;
        archive.file("bin/pvload", 0o755, &pvload)?;
        archive.file("bin/known", 0o755, &known)?;
        for program in PROGRAMS {
            archive.symlink(&format!("bin/{program}"), "pvload")?;
        }
        for (name, text) in SCRIPTS {
            archive.file(&format!("scripts/{name}"), 0o644, text.as_bytes())?;
        }
        Ok(())
    })
}

/// Builds the archive of loadable kernel modules.
///
/// For each module, the archive contains a list of the modules to load, in order: its dependencies
/// and the module itself. The list is empty for a built-in module, and absent if the kernel lacks
/// the module.
fn module_archive(module_dir: &Path) -> Result<Vec<u8>, GuestImageError> {
    let mut data = BTreeMap::new();
    let mut lists = Vec::new();
    for name in GUEST_MODULES {
        let modules = match modules::collect(module_dir, &[name]) {
            Err(ModuleError::NotFound(_)) => continue,
            modules => modules?,
        };
        let list: String = modules
            .iter()
            .map(|module| format!("{}\n", module.name))
            .collect();
        lists.push((name, list));
        data.extend(modules.into_iter().map(|module| (module.name, module.data)));
    }
    archive_in_memory(|archive| {
        archive.directory("lib")?;
        archive.directory("lib/modules")?;
        for (name, list) in &lists {
            archive.file(&format!("lib/modules/{name}.need"), 0o644, list.as_bytes())?;
        }
        for (name, data) in &data {
            archive.file(&format!("lib/modules/{name}.ko"), 0o644, data)?;
        }
        Ok(())
    })
}

/// Returns the path of an e2fsprogs program below `root`, which is in sbin, or in usr/sbin since
/// Debian 13.
fn ext_program(root: &Path, program: &str) -> String {
    let merged = format!("usr/sbin/{program}");
    if root.join(&merged).exists() {
        merged
    } else {
        format!("sbin/{program}")
    }
}

/// Builds the archive of perf and the ext file system programs, with their libraries.
fn perf_archive(root: &Path, libraries: &BTreeMap<String, PathBuf>) -> Result<Vec<u8>, GuestImageError> {
    let perf = read(&root.join("usr/bin/perf"))?;
    let tips = read(&root.join("usr/share/doc/linux-perf/tips.txt"))?;
    let mut ext = Vec::new();
    for program in EXT_PROGRAMS {
        ext.push((program, read(&root.join(ext_program(root, program)))?));
    }
    let plain = read(&root.join(PLAIN_PROGRAM))?;
    let contents = read_libraries(libraries)?;
    archive_in_memory(|archive| {
        let directories = [
            "usr",
            "usr/bin",
            "usr/lib",
            "usr/lib/x86_64-linux-gnu",
            "usr/share",
            "usr/share/doc",
            "usr/share/doc/linux-perf",
            "lib64",
        ];
        for directory in directories {
            archive.directory(directory)?;
        }
        archive.file("usr/bin/perf", 0o755, &perf)?;
        archive.file(PLAIN_PROGRAM, 0o755, &plain)?;
        for (program, data) in &ext {
            archive.file(&format!("usr/bin/{program}"), 0o755, data)?;
        }
        // mke2fs selects the file system type by the name under which it is invoked. busybox
        // provides the other name.
        archive.symlink("usr/bin/mkfs.ext4", "mke2fs")?;
        // perf report prints one of these tips at the end.
        archive.file("usr/share/doc/linux-perf/tips.txt", 0o644, &tips)?;
        add_libraries(archive, &contents)
    })
}

/// Reads the shared libraries at the given paths. Returns the name and contents of each.
pub(crate) fn read_libraries(
    libraries: &BTreeMap<String, PathBuf>,
) -> Result<Vec<(String, Vec<u8>)>, GuestImageError> {
    let contents = libraries
        .iter()
        .map(|(soname, path)| Ok((soname.clone(), read(path)?)));
    contents.collect()
}

/// Adds shared libraries to an archive. Their directories must already be in the archive.
pub(crate) fn add_libraries(
    archive: &mut cpio::CpioArchive<Vec<u8>>,
    libraries: &[(String, Vec<u8>)],
) -> io::Result<()> {
    for (soname, data) in libraries {
        // The interpreter's path is fixed in the programs. The loader searches for the other
        // libraries.
        let directory = if soname.starts_with("ld-linux") {
            "lib64"
        } else {
            "usr/lib/x86_64-linux-gnu"
        };
        archive.file(&format!("{directory}/{soname}"), 0o755, data)?;
    }
    Ok(())
}

/// Builds the lab archive with busybox, init and KVM's modules.
fn lab_archive(root: &Path, module_dir: &Path) -> Result<Vec<u8>, GuestImageError> {
    let busybox = read(&root.join("bin/busybox"))?;
    let modules = modules::collect(module_dir, &LAB_MODULES)?;
    let order: String = modules
        .iter()
        .map(|module| format!("{}.ko\n", module.name))
        .collect();
    archive_in_memory(|archive| {
        for directory in ["dev", "bin", "lib", "lib/modules", "root"] {
            archive.directory(directory)?;
        }
        archive.char_device("dev/console", 5, 1)?;
        archive.file("init", 0o755, LAB_INIT.as_bytes())?;
        archive.file("bin/busybox", 0o755, &busybox)?;
        archive.file("lib/modules/order", 0o644, order.as_bytes())?;
        for module in &modules {
            archive.file(&format!("lib/modules/{}.ko", module.name), 0o644, &module.data)?;
        }
        Ok(())
    })
}

/// Builds a cpio archive in memory from the entries that `fill` adds.
pub(crate) fn archive_in_memory(
    fill: impl FnOnce(&mut cpio::CpioArchive<Vec<u8>>) -> io::Result<()>,
) -> Result<Vec<u8>, GuestImageError> {
    let mut archive = cpio::CpioArchive::new(Vec::new());
    fill(&mut archive)
        .and_then(|()| archive.finish())
        .map_err(io_error(Path::new("initramfs archive")))
}

pub(crate) fn io_error(path: &Path) -> impl Fn(io::Error) -> GuestImageError + use<> {
    let path = path.to_owned();
    move |source| GuestImageError::Io {
        path: path.clone(),
        source,
    }
}

pub(crate) fn read(path: &Path) -> Result<Vec<u8>, GuestImageError> {
    fs::read(path).map_err(io_error(path))
}

/// Writes a file and replaces it atomically.
pub(crate) fn write(path: &Path, data: &[u8]) -> Result<(), GuestImageError> {
    let partial = path.with_extension("part");
    fs::write(&partial, data).map_err(io_error(&partial))?;
    fs::rename(&partial, path).map_err(io_error(path))
}

#[cfg(test)]
mod tests;
