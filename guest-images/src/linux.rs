//! The Linux guest and the lab host: what is in them and how they are built.
//!
//! Everything but two init scripts and a test program comes from Debian packages. The result is a
//! directory of files, described by [`Images`], and a manifest of the package versions.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use crate::closure::{self, ClosureError};
use crate::cpio;
use crate::deb::{Archive, DebError};
use crate::kernel::{self, KernelError};
use crate::modules::{self, ModuleError};
use crate::progress::Progress;

const GUEST_INIT: &str = include_str!("../init/guest");
const LAB_INIT: &str = include_str!("../init/lab");
const PVLOAD_SOURCE: &str = include_str!("../programs/pvload.c");
const KNOWN_SOURCE: &str = include_str!("../programs/known.S");
/// Scripts that the guest finds by name.
const SCRIPTS: [(&str, &str); 7] = [
    ("beside-cpu-clock", include_str!("../scripts/beside-cpu-clock")),
    ("cycles", include_str!("../scripts/cycles")),
    ("demo", include_str!("../scripts/demo")),
    ("multiplexing", include_str!("../scripts/multiplexing")),
    ("sampling-cost", include_str!("../scripts/sampling-cost")),
    ("smoke", include_str!("../scripts/smoke")),
    ("validate", include_str!("../scripts/validate")),
];

/// Names under which `pvload` is called.
const PROGRAMS: [&str; 9] = [
    "spin", "three", "syscalls", "faults", "chase", "threads", "idle", "selfread", "gate",
];

/// What the lab host needs beyond what is built into Debian's cloud kernel: KVM, a serial port over virtio to
/// talk to the test runner, and what guests' network devices use of it.
const LAB_MODULES: [&str; 7] = [
    "irqbypass",
    "kvm_amd",
    "virtio_pci",
    "virtio_console",
    "virtio_blk",
    "tun",
    "vhost_net",
];

/// Drivers of the power button and of what its key comes by, which the guest's scripts may load.
const BUTTON_MODULES: [&str; 2] = ["evdev", "button"];

/// What a script in the guest can load: drivers of virtio devices, and a file system.
const GUEST_MODULES: [&str; 9] = [
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "virtio_net",
    "virtio_rng",
    "vmw_vsock_virtio_transport",
    "virtiofs",
    "crc32c_generic",
    "ext4",
];

/// Programs of e2fsprogs in the guest.
const EXT_PROGRAMS: [&str; 2] = ["mke2fs", "e2fsck"];

/// A program as Debian builds them, with shared libraries and without frame pointers, and its package.
const PLAIN_PROGRAM: &str = "usr/bin/xz";
const PLAIN_PACKAGE: &str = "xz-utils";

/// Flags for the test program: frame pointers and real calls, so that profiles show what ran.
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

/// Flags for the program whose every instruction is known.
const KNOWN_FLAGS: [&str; 3] = ["-nostdlib", "-static", "-no-pie"];

/// Why images could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A package could not be had.
    #[error(transparent)]
    Deb(#[from] DebError),
    /// perf's libraries could not be completed.
    #[error(transparent)]
    Closure(#[from] ClosureError),
    /// The lab's modules could not be collected.
    #[error(transparent)]
    Module(#[from] ModuleError),
    /// The kernel image could not be unpacked.
    #[error("{path}")]
    Kernel {
        /// The kernel image.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: KernelError,
    },
    /// The package is not a kernel image.
    #[error("package {0} holds no boot/vmlinuz-*: not a kernel image package")]
    NoKernel(String),
    /// The archive has no kernel of the kind asked for.
    #[error("the configured apt sources offer no {0} (try: sudo apt-get update)")]
    NoneOffered(&'static str),
    /// The C compiler is missing or failed.
    #[error("cannot build the guest's test program: {0} (try: sudo apt-get install gcc libc6-dev)")]
    Compiler(String),
    /// A file could not be read or written.
    #[error("{path}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        #[source]
        source: io::Error,
    },
}

/// Which of Debian's kernels to build images from.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub enum KernelChoice {
    /// The release's cloud kernel, what `linux-image-cloud-amd64` stands for.
    #[default]
    Cloud,
    /// The release's general kernel, what `linux-image-amd64` stands for.
    Generic,
    /// The highest version among all cloud kernels that the configured sources and, where they can be
    /// reached, the release's backports offer.
    Newest,
    /// This package, or the kernel this metapackage depends on.
    Package(String),
    /// A kernel of Debian 13, on whatever release of Debian.
    Debian13(Debian13),
}

/// Kernels of Debian 13.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Debian13 {
    /// The release's cloud kernel.
    Cloud,
    /// The release's general kernel.
    Generic,
    /// The release's real-time kernel.
    Rt,
    /// The cloud kernel of the highest version in its backports.
    Backports,
}

impl Debian13 {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Cloud, Self::Generic, Self::Rt, Self::Backports];

    /// Its name on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cloud => "debian13-cloud",
            Self::Generic => "debian13-generic",
            Self::Rt => "debian13-rt",
            Self::Backports => "debian13-backports",
        }
    }

    /// Where it is in Debian's archive.
    fn suite(self) -> &'static str {
        match self {
            Self::Backports => "trixie-backports",
            _ => "trixie",
        }
    }
}

impl KernelChoice {
    /// Reads a choice as given on a command line: `cloud`, `generic`, `newest`, `debian13-…` or a package
    /// name.
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

    /// Name of the directory the images of this choice live in.
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

/// The files that make the Linux guest and the lab host.
#[derive(Debug, Clone)]
pub struct Images {
    /// Directory of all of them.
    pub directory: PathBuf,
    /// The kernel as an ELF image, unpacked from the bzImage.
    pub vmlinux: PathBuf,
    /// The kernel as packaged.
    pub bz_image: PathBuf,
    /// `System.map` of the kernel, when the package has a real one.
    pub system_map: Option<PathBuf>,
    /// Initrd of the guest: busybox, perf, test programs, init.
    pub initrd: PathBuf,
    /// Initrd of the lab host, without Perfvisor and guests.
    pub lab_initrd: PathBuf,
    /// perf and its libraries as an archive of their own, to append to an initrd.
    pub perf_cpio: PathBuf,
    /// The guest's test program, a static binary with symbols.
    pub pvload: PathBuf,
    /// Package names and versions the images were built from, one per line.
    pub manifest: PathBuf,
}

impl Images {
    /// Where the images of `choice` are or will be, below Cargo's target directory.
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

    /// Whether a build from the present recipe is complete.
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

/// Changes whenever what goes into the images changes, package versions aside.
fn recipe() -> String {
    let mut hasher = DefaultHasher::new();
    // Raise the number when the code of this crate changes what it builds.
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

/// Builds the images of `choice` below `target_dir`, unless they are there already.
///
/// `refresh` asks the archive again for newer packages. Safe to call from several processes at
/// once: the second waits for the first.
pub fn ensure(
    target_dir: &Path,
    choice: &KernelChoice,
    refresh: bool,
    progress: &Progress,
) -> Result<Images, BuildError> {
    let base = target_dir.join("guest");
    fs::create_dir_all(&base).map_err(io_error(&base))?;
    let lock_path = base.join(".lock");
    let lock = fs::File::create(&lock_path).map_err(io_error(&lock_path))?;
    {
        let _waiting = progress.tick("waiting for another build of the images");
        lock.lock().map_err(io_error(&lock_path))?;
    }
    let images = Images::locate(target_dir, choice);
    if refresh || !images.is_current() {
        build(&base, &images, choice, progress)?;
    }
    // A System.map may have come to exist.
    Ok(Images::locate(target_dir, choice))
}

fn build(base: &Path, images: &Images, choice: &KernelChoice, progress: &Progress) -> Result<(), BuildError> {
    let directory = &images.directory;
    fs::create_dir_all(directory).map_err(io_error(directory))?;
    // Whatever happens next, half-built images must not pass for complete ones.
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
    let mut archive = Archive::new(&base.join("debs"), progress)?;

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
    // The package holds the program as usr/bin/perf, older ones as perf_6.1 behind a wrapper.
    let mut libraries = closure::complete(&mut archive, "linux-perf", &root, "usr/bin/perf")?;
    for program in EXT_PROGRAMS {
        let program = ext_program(&root, program);
        libraries.extend(closure::complete(&mut archive, "e2fsprogs", &root, &program)?);
    }
    libraries.extend(closure::complete(
        &mut archive,
        PLAIN_PACKAGE,
        &root,
        PLAIN_PROGRAM,
    )?);

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
    let module_dir = ["lib/modules", "usr/lib/modules"]
        .map(|directory| root.join(directory).join(&release))
        .into_iter()
        .find(|directory| directory.exists())
        .ok_or_else(|| BuildError::NoKernel(package.clone()))?;
    let mut initrd = guest_archive(&root, &module_dir, &images.pvload, &known)?;
    initrd.extend_from_slice(&module_archive(&module_dir)?);
    initrd.extend_from_slice(&perf);
    write(&images.initrd, &initrd)?;

    write(&images.lab_initrd, &lab_archive(&root, &module_dir)?)?;

    let manifest: String = archive
        .versions()
        .iter()
        .chain(elsewhere.iter().flat_map(Archive::versions))
        .map(|(name, version)| format!("{name} {version}\n"))
        .collect();
    write(&images.manifest, manifest.as_bytes())?;
    // Unpacked packages are 200 MB; all that is needed of them is in the images now.
    fs::remove_dir_all(&root).map_err(io_error(&root))?;
    write(&images.stamp(), recipe().as_bytes())
}

/// The package of the kernel that is asked for, and the archive that has it, if that is not `archive`.
fn choose_kernel<'p>(
    archive: &mut Archive<'p>,
    base: &Path,
    choice: &KernelChoice,
    progress: &'p Progress,
) -> Result<(String, Option<Archive<'p>>), BuildError> {
    if let KernelChoice::Debian13(kernel) = choice {
        let lists = base.join(kernel.suite());
        let mut suite = Archive::of_suite(&base.join("debs"), &lists, kernel.suite(), progress)?;
        let package = kernel_package(&mut suite, choice)?;
        return Ok((package, Some(suite)));
    }
    let package = kernel_package(archive, choice);
    match newer_in_backports(base, choice, package.as_deref().ok(), progress) {
        Some((archive, newer)) => Ok((newer, Some(archive))),
        None => Ok((package?, None)),
    }
}

/// The packages of a kernel. From 7.1 on the image, its modules and the list of those built in are packages
/// of their own, which the kernel's depends on.
fn fetch_kernel(source: &mut Archive<'_>, package: &str) -> Result<Vec<PathBuf>, BuildError> {
    let parts = ["linux-base-", "linux-binary-", "linux-modules-"];
    let is_part = |name: &String| parts.iter().any(|kind| name.starts_with(kind));
    let others = source.dependencies([package])?.into_iter().filter(is_part);
    let packages: Vec<String> = [package.to_owned()].into_iter().chain(others).collect();
    let packages: Vec<&str> = packages.iter().map(String::as_str).collect();
    Ok(source.fetch(&packages)?)
}

/// The package that holds the kernel itself.
fn kernel_package(archive: &mut Archive<'_>, choice: &KernelChoice) -> Result<String, BuildError> {
    let name = match choice {
        KernelChoice::Cloud => "linux-image-cloud-amd64",
        KernelChoice::Generic => "linux-image-amd64",
        KernelChoice::Package(name) => name,
        KernelChoice::Newest | KernelChoice::Debian13(Debian13::Backports) => {
            return newest(archive.names(IMAGE)?).ok_or(BuildError::NoneOffered("linux-image-*-cloud-amd64"));
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

/// How names of kernel packages begin.
const IMAGE: &str = "linux-image-";

/// The kernel of the highest version among package names.
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

/// The backports and their newest kernel, where the newest is wanted and it is newer than `offered`.
fn newer_in_backports<'p>(
    base: &Path,
    choice: &KernelChoice,
    offered: Option<&str>,
    progress: &'p Progress,
) -> Option<(Archive<'p>, String)> {
    if *choice != KernelChoice::Newest {
        return None;
    }
    let found = Archive::backports(&base.join("debs"), &base.join("backports"), progress)
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

/// The version and ABI numbers in a kernel package's name, for comparing.
fn numbers(name: &str) -> Vec<u64> {
    name.trim_end_matches("-cloud-amd64")
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

/// Puts the kernel's files in place and returns its release string.
fn unpack_kernel(root: &Path, package: &str, images: &Images) -> Result<String, BuildError> {
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
    // Beside its modules from 7.1 on.
    let modules = root.join("usr/lib/modules");
    let (packaged, release) = in_boot
        .or_else(|| {
            let with_image = |release: String| (modules.join(&release).join("vmlinuz"), release);
            names(&modules)
                .into_iter()
                .map(with_image)
                .find(|(image, _)| image.exists())
        })
        .ok_or_else(|| BuildError::NoKernel(package.to_owned()))?;
    let bz_image = fs::read(&packaged).map_err(io_error(&packaged))?;
    let vmlinux = kernel::extract_vmlinux(&bz_image).map_err(|source| BuildError::Kernel {
        path: packaged,
        source,
    })?;
    write(&images.bz_image, &bz_image)?;
    write(&images.vmlinux, &vmlinux)?;
    // Debian ships a one-line placeholder; the real one is in the debug package.
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
) -> Result<(), BuildError> {
    let source = directory.join(file);
    write(&source, text.as_bytes())?;
    let compiler = std::env::var("CC").unwrap_or_else(|_| "gcc".to_owned());
    let output = Command::new(&compiler)
        .args(flags)
        .arg("-o")
        .arg(program)
        .arg(&source)
        .output()
        .map_err(|error| BuildError::Compiler(format!("{compiler}: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let message = stderr
        .lines()
        .find(|line| line.contains("error"))
        .unwrap_or("no message");
    Err(BuildError::Compiler(format!("{compiler}: {message}")))
}

/// Busybox, init, scripts and test programs.
fn guest_archive(root: &Path, module_dir: &Path, pvload: &Path, known: &Path) -> Result<Vec<u8>, BuildError> {
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

/// The modules that scripts can load: each with a list of what it needs, itself the last. A kernel that lacks
/// one has no list for it; one that is built in has an empty list.
fn module_archive(module_dir: &Path) -> Result<Vec<u8>, BuildError> {
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

/// Where `program` of e2fsprogs is below `root`: in sbin, or from Debian 13 on in usr/sbin.
fn ext_program(root: &Path, program: &str) -> String {
    let merged = format!("usr/sbin/{program}");
    if root.join(&merged).exists() {
        merged
    } else {
        format!("sbin/{program}")
    }
}

/// perf and the programs of the ext file systems, with their libraries.
fn perf_archive(root: &Path, libraries: &BTreeMap<String, PathBuf>) -> Result<Vec<u8>, BuildError> {
    let perf = read(&root.join("usr/bin/perf"))?;
    let tips = read(&root.join("usr/share/doc/linux-perf/tips.txt"))?;
    let mut ext = Vec::new();
    for program in EXT_PROGRAMS {
        ext.push((program, read(&root.join(ext_program(root, program)))?));
    }
    let plain = read(&root.join(PLAIN_PROGRAM))?;
    let mut contents = Vec::new();
    for (soname, path) in libraries {
        contents.push((soname, read(path)?));
    }
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
        // The name is what makes it write that file system; busybox has one of the other name.
        archive.symlink("usr/bin/mkfs.ext4", "mke2fs")?;
        // perf report ends with one of these.
        archive.file("usr/share/doc/linux-perf/tips.txt", 0o644, &tips)?;
        for (soname, data) in &contents {
            // The interpreter's path is part of the programs; the rest is searched for.
            let directory = if soname.starts_with("ld-linux") {
                "lib64"
            } else {
                "usr/lib/x86_64-linux-gnu"
            };
            archive.file(&format!("{directory}/{soname}"), 0o755, data)?;
        }
        Ok(())
    })
}

/// Busybox, init and KVM's modules.
fn lab_archive(root: &Path, module_dir: &Path) -> Result<Vec<u8>, BuildError> {
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

/// An archive built in memory, so that only reading and writing files can fail.
fn archive_in_memory(
    fill: impl FnOnce(&mut cpio::Archive<Vec<u8>>) -> io::Result<()>,
) -> Result<Vec<u8>, BuildError> {
    let mut archive = cpio::Archive::new(Vec::new());
    fill(&mut archive)
        .and_then(|()| archive.finish())
        .map_err(io_error(Path::new("initramfs archive")))
}

fn io_error(path: &Path) -> impl Fn(io::Error) -> BuildError + use<> {
    let path = path.to_owned();
    move |source| BuildError::Io {
        path: path.clone(),
        source,
    }
}

fn read(path: &Path) -> Result<Vec<u8>, BuildError> {
    fs::read(path).map_err(io_error(path))
}

/// Writes a file so that it is either the old one or the new one, never half of it.
fn write(path: &Path, data: &[u8]) -> Result<(), BuildError> {
    let partial = path.with_extension("part");
    fs::write(&partial, data).map_err(io_error(&partial))?;
    fs::rename(&partial, path).map_err(io_error(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_kernel_is_found_by_number_not_by_letter() {
        let names = [
            "linux-image-6.1.0-9-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64",
            // None of these: another kind of kernel, a metapackage of a series, one without a version, debug
            // symbols.
            "linux-image-6.9.0-1-rt-amd64",
            "linux-image-6.12-cloud-amd64",
            "linux-image-cloud-amd64",
            "linux-image-6.1.0-57-cloud-amd64-dbg",
        ];
        let newest = newest(names.map(str::to_owned).to_vec());
        assert_eq!(newest.as_deref(), Some("linux-image-6.1.0-56-cloud-amd64"));
        assert!(
            numbers("linux-image-6.12.117+deb12-cloud-amd64") > numbers("linux-image-6.1.0-56-cloud-amd64")
        );
    }

    #[test]
    fn images_without_a_stamp_are_not_current() {
        let dir = tempfile::tempdir().unwrap();
        let images = Images::locate(dir.path(), &KernelChoice::Cloud);
        assert!(!images.is_current());
        fs::create_dir_all(&images.directory).unwrap();
        for path in [&images.vmlinux, &images.bz_image, &images.initrd] {
            fs::write(path, "x").unwrap();
        }
        fs::write(images.stamp(), recipe()).unwrap();
        assert!(!images.is_current(), "the lab's initrd is missing");
        for path in [&images.lab_initrd, &images.perf_cpio] {
            fs::write(path, "x").unwrap();
        }
        assert!(images.is_current());
        fs::write(images.stamp(), "another recipe\n").unwrap();
        assert!(!images.is_current());
    }

    #[test]
    fn kernel_choices_are_read_from_the_command_line() {
        assert_eq!(KernelChoice::parse("newest"), KernelChoice::Newest);
        assert_eq!(
            KernelChoice::parse("linux-image-rt-amd64"),
            KernelChoice::Package("linux-image-rt-amd64".into())
        );
    }
}
