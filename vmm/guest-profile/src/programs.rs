//! Symbolizes addresses of user programs with the guest's files.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use crate::demangle::readable;
use crate::disk::{DiskError, GuestDisk};
use crate::jit::{JitMap, MAX_MAP};
use kernel_images::build_id::BuildId;
use object::{Object, ObjectSection, ObjectSegment, ObjectSymbol};
use perf_core::error_line;
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, fstat, open, openat2};
use rustix::io::Errno;

/// Function of a user program that contains an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserSymbol {
    /// Demangled name of the function.
    pub name: String,
    /// Offset of the address from the start of the function, in bytes.
    pub offset: u64,
    /// Length of the function in bytes; 1 if the file does not contain the length.
    pub length: u64,
}

/// Error returned when a guest file provides no symbols.
#[derive(Debug, thiserror::Error)]
pub enum GuestFileError {
    /// The file cannot be read on the host.
    #[error("cannot read {path}")]
    Read {
        /// Path of the file on the host, below the directory in which the guest's files are
        /// mounted.
        path: PathBuf,
        /// I/O error of the host.
        #[source]
        source: std::io::Error,
    },
    /// The file exceeds the maximum size of a guest file.
    #[error("{path} is larger than {} MiB", .most >> 20)]
    TooLarge {
        /// Path of the file on the host, below the directory in which the guest's files are
        /// mounted.
        path: PathBuf,
        /// Maximum size of the file, in bytes.
        most: u64,
    },
    /// The file cannot be read from the guest's disk.
    #[error("cannot read {path} on the guest's disk")]
    Disk {
        /// Path of the file in the guest.
        path: String,
        /// Error that occurred while reading the guest's disk.
        #[source]
        source: DiskError,
    },
    /// The memory limit is exhausted by the symbols of other files.
    #[error("{path} is not read: symbols exceed {} MiB", MAX_TOTAL_MEMORY >> 20)]
    MemoryLimit {
        /// Path of the file in the guest.
        path: String,
    },
    /// The file is not a valid ELF file.
    #[error("{path} is not an ELF file")]
    Elf {
        /// Path of the invalid file.
        path: PathBuf,
        /// Error of the ELF parser.
        #[source]
        source: object::Error,
    },
}

const MAX_FILE: u64 = 1 << 30;
/// Maximum memory for the function names and addresses of one file, in bytes. The size of the file
/// is no sufficient limit, because many symbols may share one long name in the file.
const MAX_FILE_MEMORY: u64 = 512 << 20;
/// Maximum memory for the functions of all files of a guest, in bytes.
const MAX_TOTAL_MEMORY: u64 = 2 << 30;
/// Maximum number of attempts to look up a path, which must be repeated if the guest renames
/// directories concurrently.
const MAX_LOOKUPS: u32 = 16;

struct UserFunction {
    start: u64,
    end: u64,
    name: String,
}

/// The functions of one user program or library.
pub struct ProgramSymbols {
    functions: Vec<UserFunction>,
    /// File offset, size and link-time address of each loadable segment.
    segments: Vec<(u64, u64, u64)>,
    build_id: Option<BuildId>,
    lines: Option<addr2line::Context<gimli::EndianArcSlice<gimli::RunTimeEndian>>>,
    /// Approximate memory used by the functions and the debug information, in bytes.
    bytes: u64,
}

/// Yields functions until they occupy `most` bytes of memory, and drops the rest. The guest
/// controls the number of functions and their names.
fn bounded<F>(
    functions: impl Iterator<Item = F>,
    most: u64,
    name: impl Fn(&F) -> &str,
) -> impl Iterator<Item = F> {
    let mut left = most;
    functions.map_while(move |function| {
        let bytes = size_of::<F>() + name(&function).len();
        left = left.checked_sub(bytes as u64)?;
        Some(function)
    })
}

impl ProgramSymbols {
    /// Parses an ELF file: its symbol tables, including the dynamic one, and its line table if it
    /// has one.
    pub fn parse(data: &[u8]) -> Result<Self, object::Error> {
        let file = object::File::parse(data)?;
        let found = file
            .symbols()
            .chain(file.dynamic_symbols())
            .filter(|s| s.kind() == object::SymbolKind::Text && s.is_definition())
            .filter_map(|s| {
                let name = readable(s.name().ok()?);
                (!name.is_empty()).then(|| UserFunction {
                    start: s.address(),
                    end: s.address().saturating_add(s.size().max(1)),
                    name,
                })
            });
        let mut functions: Vec<UserFunction> = bounded(found, MAX_FILE_MEMORY, |f| &f.name).collect();
        functions.sort_by_key(|f| (f.start, f.end));
        functions.dedup_by(|a, b| a.start == b.start && a.end == b.end);
        let segments = file
            .segments()
            .map(|s| (s.file_range().0, s.file_range().1, s.address()))
            .collect();
        let has_lines = file.section_by_name(".debug_info").is_some();
        let names: usize = functions
            .iter()
            .map(|f| size_of::<UserFunction>() + f.name.len())
            .sum();
        // The debug information is copied from the file, and the file's size is an upper bound for
        // the copies.
        let tables = if has_lines { data.len() } else { 0 };
        let lines = gimli::Dwarf::load(|id| -> Result<_, gimli::Error> {
            let data = file
                .section_by_name(id.name())
                .and_then(|s| s.uncompressed_data().ok())
                .unwrap_or_default();
            Ok(gimli::EndianArcSlice::new(
                data.into_owned().into(),
                gimli::RunTimeEndian::Little,
            ))
        })
        .ok()
        .filter(|_| has_lines)
        .and_then(|dwarf| addr2line::Context::from_dwarf(dwarf).ok());
        Ok(Self {
            functions,
            segments,
            build_id: file.build_id().ok().flatten().and_then(BuildId::new),
            lines,
            bytes: (names + tables) as u64,
        })
    }

    /// Returns the link-time address of a file offset, according to the loadable segments.
    pub fn address_of_file_offset(&self, offset: u64) -> Option<u64> {
        let (from, _, address) = self
            .segments
            .iter()
            .find(|(from, size, _)| offset >= *from && offset - from < *size)?;
        address.checked_add(offset - from)
    }

    /// Returns the build ID of the program or library.
    pub fn build_id(&self) -> Option<BuildId> {
        self.build_id
    }

    /// Returns the function that contains the link-time address `address`, and the offset of the
    /// address in the function.
    pub fn resolve(&self, address: u64) -> Option<UserSymbol> {
        let after = self.functions.partition_point(|f| f.start <= address);
        let f = self.functions[..after]
            .iter()
            .rev()
            .take(8)
            .find(|f| address < f.end)?;
        Some(UserSymbol {
            name: f.name.clone(),
            offset: address - f.start,
            length: f.end - f.start,
        })
    }

    /// Returns "file:line" for link-time address `address`, if the file has a line table.
    pub fn line(&self, address: u64) -> Option<String> {
        let location = self.lines.as_ref()?.find_location(address).ok()??;
        Some(format!("{}:{}", location.file?, location.line?))
    }
}

/// Source from which files of the guest are read.
#[derive(Debug)]
pub enum GuestFilesystemSource {
    /// Directory on the host in which the guest's files are mounted or unpacked.
    Directory(PathBuf),
    /// A disk of the guest, whose files are read without mounting it.
    Disk(GuestDisk),
}

impl GuestFilesystemSource {
    /// Reads the guest's file `guest_path` of at most `most` bytes.
    ///
    /// # Errors
    /// Returns [`GuestFileError::Read`], [`GuestFileError::TooLarge`] or [`GuestFileError::Disk`]
    /// if the file cannot be read or exceeds the maximum size.
    pub fn read(&mut self, guest_path: &str, most: u64) -> Result<Vec<u8>, GuestFileError> {
        let root = match self {
            Self::Directory(root) => root,
            Self::Disk(disk) => {
                let failed = |source| GuestFileError::Disk {
                    path: guest_path.escape_debug().to_string(),
                    source,
                };
                return disk.read(guest_path, most).map_err(failed);
            }
        };
        let path = root.join(guest_path.trim_start_matches('/'));
        let read_error = |source| GuestFileError::Read {
            path: path.clone(),
            source,
        };
        let file = plain_file(root, guest_path).map_err(read_error)?;
        let meta = file.metadata().map_err(read_error)?;
        let mut bytes = Vec::new();
        let too_large = meta.len() > most || {
            let read = file.take(most.saturating_add(1)).read_to_end(&mut bytes);
            read.map_err(read_error)?;
            bytes.len() as u64 > most
        };
        if too_large {
            return Err(GuestFileError::TooLarge { path, most });
        }
        Ok(bytes)
    }

    /// Reads a program or library of the guest.
    ///
    /// # Errors
    /// Returns the same errors as [`Self::read`].
    pub fn program(&mut self, guest_path: &str) -> Result<Vec<u8>, GuestFileError> {
        self.read(guest_path, MAX_FILE)
    }

    /// Refreshes cached disk metadata, so that recent writes of the guest to its disk are visible.
    pub fn reload(&mut self) {
        if let Self::Disk(disk) = self {
            // The error is ignored, because the next read returns it again.
            let _ = disk.reload();
        }
    }
}

/// Symbolizes user addresses with the guest's files, and caches the parsed files.
pub struct GuestSymbols {
    files: GuestFilesystemSource,
    jit: HashMap<u32, JitMap>,
    objects: HashMap<String, Option<ProgramSymbols>>,
    /// Remaining memory for parsed files and perf maps, in bytes.
    left: u64,
    problems: Vec<String>,
}

impl GuestSymbols {
    /// Creates a symbolizer for the files below `root`, which corresponds to the guest's `/`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self::of(GuestFilesystemSource::Directory(root.into()))
    }

    /// Creates a symbolizer that reads the guest's files from `files`.
    pub fn of(files: GuestFilesystemSource) -> Self {
        Self {
            files,
            jit: HashMap::new(),
            objects: HashMap::new(),
            left: MAX_TOTAL_MEMORY,
            problems: Vec::new(),
        }
    }

    /// Returns the parsed file `guest_path`, which is read at first use. Returns `None` if the file
    /// is missing or unusable, and adds the reason to [`Self::problems`].
    pub fn object(&mut self, guest_path: &str) -> Option<&ProgramSymbols> {
        if !self.objects.contains_key(guest_path) {
            let object = match self.load(guest_path) {
                Ok(object) => Some(object),
                Err(e) => {
                    self.problems.push(error_line(&e));
                    None
                }
            };
            self.objects.insert(guest_path.to_owned(), object);
        }
        self.objects.get(guest_path)?.as_ref()
    }

    /// Returns the parsed file `guest_path`. Returns `None` if its build ID differs from `running`,
    /// the build ID of the file that the guest runs.
    pub fn object_of(&mut self, guest_path: &str, running: Option<BuildId>) -> Option<&ProgramSymbols> {
        let object = self.object(guest_path)?;
        let other = running
            .zip(object.build_id())
            .is_some_and(|(runs, has)| runs != has);
        (!other).then_some(object)
    }

    /// Returns one message for each file that could not be used so far.
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    fn load(&mut self, guest_path: &str) -> Result<ProgramSymbols, GuestFileError> {
        let no_room = || GuestFileError::MemoryLimit {
            path: guest_path.escape_debug().to_string(),
        };
        if self.left == 0 {
            return Err(no_room());
        }
        let data = self.files.program(guest_path)?;
        let path = PathBuf::from(guest_path);
        let object = ProgramSymbols::parse(&data).map_err(|source| GuestFileError::Elf { path, source })?;
        let left = self.left.checked_sub(object.bytes);
        self.left = left.unwrap_or(0);
        left.map(|_| object).ok_or_else(no_room)
    }

    /// Returns the build ID of the guest's file `guest_path`, or `None` if the file is missing,
    /// unusable ([`Self::problems`]) or has no build ID.
    pub fn build_id(&mut self, guest_path: &str) -> Option<BuildId> {
        self.object(guest_path)?.build_id()
    }

    /// Returns the source from which the guest's files are read.
    pub fn files(&mut self) -> &mut GuestFilesystemSource {
        &mut self.files
    }

    /// Returns the start, the end (exclusive) and the name of the JIT-compiled function of process
    /// `pid` at `address`.
    pub fn jit(&mut self, pid: u32, address: u64) -> Option<(u64, u64, &str)> {
        let map = self.jit.entry(pid).or_insert_with(|| {
            // Most processes have no perf map. The memory of all maps is limited, because several
            // processes may have the same large map.
            let bytes = match self.left {
                0 => Vec::new(),
                _ => self.files.read(&JitMap::path(pid), MAX_MAP).unwrap_or_default(),
            };
            let map = JitMap::parse(&bytes, self.left);
            self.left = self.left.saturating_sub(map.bytes());
            map
        });
        map.resolve(address)
    }
}

/// A program file in memory, from which the code of functions is read.
pub struct ProgramFile<'d> {
    data: &'d [u8],
    file: object::File<'d>,
}

impl<'d> ProgramFile<'d> {
    /// Parses an ELF file for x86-64.
    ///
    /// # Errors
    /// Returns [`GuestFileError::Elf`] with `path` if the file is not valid.
    pub fn parse(path: &Path, data: &'d [u8]) -> Result<Self, GuestFileError> {
        let file = object::File::parse(data).map_err(|source| GuestFileError::Elf {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self { data, file })
    }

    /// Returns the build ID of the program file.
    pub fn build_id(&self) -> Option<BuildId> {
        self.file.build_id().ok().flatten().and_then(BuildId::new)
    }

    /// Returns the link-time address of the symbol `name`.
    pub fn address_of(&self, name: &str) -> Option<u64> {
        let symbol = self.file.symbols().find(|symbol| symbol.name() == Ok(name))?;
        Some(symbol.address())
    }

    /// Returns the bytes at file offset `offset`, at most `length` of them.
    pub fn at_offset(&self, offset: u64, length: usize) -> Option<&'d [u8]> {
        let from = self.data.get(usize::try_from(offset).ok()?..)?;
        let bytes = &from[..length.min(from.len())];
        (!bytes.is_empty()).then_some(bytes)
    }

    /// Returns the bytes that are loaded at the link-time address `address`, at most `length` of
    /// them.
    pub fn at_address(&self, address: u64, length: usize) -> Option<&'d [u8]> {
        let place = |start: u64, size: u64, (offset, in_file): (u64, u64)| {
            let at = address.checked_sub(start).filter(|at| *at < size.min(in_file))?;
            let left = usize::try_from(in_file - at).unwrap_or(usize::MAX);
            self.at_offset(offset.checked_add(at)?, length.min(left))
        };
        self.file
            .segments()
            .find_map(|s| place(s.address(), s.size(), s.file_range()))
            .or_else(|| {
                // A separate debug file contains sections but no segments with contents.
                let sections = self.file.sections();
                let mut code = sections.filter(|s| s.kind() == object::SectionKind::Text);
                code.find_map(|s| place(s.address(), s.size(), s.file_range()?))
            })
    }
}

/// Opens the regular file `guest_path` of the guest. `root` is the host directory that corresponds
/// to the guest's `/`. The kernel resolves links and `..` as if `root` were the root directory
/// (`RESOLVE_IN_ROOT`, openat2(2)), so no path leads outside `root`, even if the guest modifies its
/// files concurrently.
///
/// Other file types are not opened, because opening a device may have side effects, and opening a
/// FIFO may block.
fn plain_file(root: &Path, guest_path: &str) -> io::Result<File> {
    let root = open(
        root,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let found = resolve_path(&root, guest_path).map_err(|e| match e {
        Errno::NOSYS => {
            io::Error::other("this kernel cannot open files below a directory (openat2, Linux 5.6)")
        }
        e => e.into(),
    })?;
    if FileType::from_raw_mode(fstat(&found)?.st_mode) != FileType::RegularFile {
        return Err(io::Error::other("not a regular file"));
    }
    // Open the file that was checked, even if its path now refers to another one.
    File::open(format!("/proc/self/fd/{}", found.as_raw_fd()))
}

/// Resolves the guest's path `guest_path` to an `O_PATH` descriptor, which refers to the file
/// without opening it. `root` is the guest's root directory.
fn resolve_path(root: &OwnedFd, guest_path: &str) -> Result<OwnedFd, Errno> {
    let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let look = || {
        openat2(
            root,
            guest_path,
            OFlags::PATH | OFlags::CLOEXEC,
            Mode::empty(),
            how,
        )
    };
    let mut looks = 1;
    loop {
        match look() {
            // During a concurrent rename, the kernel may be unable to verify that ".." stayed
            // inside the root, so the lookup is repeated.
            Err(Errno::AGAIN | Errno::INTR) if looks < MAX_LOOKUPS => looks += 1,
            found => return found,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_path_cannot_leave_mount() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir_all(root.join("etc")).unwrap();
        std::fs::create_dir(root.join("lib")).unwrap();
        for (at, text) in [
            ("file", "outside"),
            ("root/file", "inside"),
            ("root/etc/file", "etc"),
        ] {
            std::fs::write(dir.path().join(at), text).unwrap();
        }
        let absolute = dir.path().join("file");
        for (target, link) in [
            ("/file", "lib/absolute"),
            ("../../../file", "lib/up"),
            ("/etc", "lib/etc"),
            ("loop", "loop"),
            (absolute.to_str().unwrap(), "lib/host-s"),
            ("/proc/self/root", "lib/magic"),
        ] {
            std::os::unix::fs::symlink(target, root.join(link)).unwrap();
        }
        let mut files = GuestFilesystemSource::Directory(root);
        let mut read = |path: &str| {
            files
                .read(path, 100)
                .map(|bytes| String::from_utf8(bytes).unwrap())
        };
        for path in ["/file", "file", "/lib/../../../file", "/lib/absolute", "/lib/up"] {
            assert_eq!(read(path).unwrap(), "inside", "{path}");
        }
        assert_eq!(read("/lib/etc/file").unwrap(), "etc");
        for path in [
            "/loop",
            "/lib/host-s",
            "/lib/magic/etc/passwd",
            "/none",
            "",
            "a\0b",
        ] {
            read(path).unwrap_err();
        }
    }

    /// If a guest concurrently replaces a directory by a symbolic link that points outside the
    /// mount, no file outside the mount is read.
    #[test]
    fn concurrent_rename_cannot_leave_mount() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        for (at, text) in [
            ("out", "outside"),
            ("root/lib", "inside"),
            ("root/deep/lib", "inside"),
        ] {
            std::fs::create_dir_all(dir.path().join(at)).unwrap();
            std::fs::write(dir.path().join(at).join("file"), text).unwrap();
        }
        std::os::unix::fs::symlink(dir.path().join("out"), root.join("other")).unwrap();
        std::os::unix::fs::symlink("../../out", root.join("deep/other")).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        let ordering = std::sync::atomic::Ordering::Relaxed;
        std::thread::scope(|scope| {
            for at in [root.clone(), root.join("deep")] {
                let stop = &stop;
                scope.spawn(move || {
                    while !stop.load(ordering) {
                        let exchange = rustix::fs::RenameFlags::EXCHANGE;
                        let cwd = rustix::fs::CWD;
                        rustix::fs::renameat_with(cwd, at.join("lib"), cwd, at.join("other"), exchange)
                            .unwrap();
                    }
                });
            }
            let mut files = GuestFilesystemSource::Directory(root.clone());
            let mut inside = 0;
            let mut reads = 0;
            // Set if a read returned a file outside the mount, which must never happen.
            let mut led_out = false;
            while reads < 20_000 && !led_out {
                for path in ["/lib/file", "/deep/lib/file", "/deep/other/../lib/file"] {
                    reads += 1;
                    let read = files.read(path, 100);
                    inside += u32::from(read.is_ok());
                    led_out |= read.is_ok_and(|bytes| bytes != b"inside");
                }
            }
            stop.store(true, ordering);
            assert!(!led_out, "after {reads} reads");
            assert!(inside > 0);
        });
    }

    /// A device in place of a guest file is not opened, because opening a device can have side
    /// effects.
    #[test]
    fn guest_mount_does_not_open_devices() {
        let dir = tempfile::tempdir().unwrap();
        let pid = std::process::id();
        // Opening a device without a driver returns ENXIO or ENODEV.
        let path = dir.path().join("device");
        let made = std::process::Command::new("mknod")
            .arg(&path)
            .args(["c", "240", &(pid % 256).to_string()])
            .output();
        if !made.is_ok_and(|made| made.status.success()) {
            eprintln!("SKIP: only root can make a device");
            return;
        }
        let error = plain_file(dir.path(), "/device").unwrap_err();
        assert_eq!(error.to_string(), "not a regular file");
    }

    /// A FIFO in place of a program does not block the reader, and a device is not read.
    #[test]
    fn guest_mount_reads_regular_files_only() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        let made = std::process::Command::new("mkfifo").arg(&fifo).status();
        assert!(made.is_ok_and(|status| status.success()));
        std::fs::write(dir.path().join("file"), "1234").unwrap();
        let mut files = GuestFilesystemSource::Directory(dir.path().to_owned());
        assert!(matches!(
            files.read("/fifo", 100),
            Err(GuestFileError::Read { .. })
        ));
        assert!(matches!(files.read("/", 100), Err(GuestFileError::Read { .. })));
        assert_eq!(files.read("/file", 4).unwrap(), b"1234");
        let error = files.read("/file", 3).unwrap_err();
        assert!(
            matches!(error, GuestFileError::TooLarge { most: 3, .. }),
            "{error}"
        );
    }

    /// The memory for the symbols of all files is bounded, regardless of the number of processes
    /// and programs in the guest.
    #[test]
    fn guest_symbol_memory_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("tmp")).unwrap();
        let map: String = (1..100).map(|n| format!("{n:x}000 10 made\n")).collect();
        for pid in 1..=3 {
            std::fs::write(dir.path().join(JitMap::path(pid).trim_start_matches('/')), &map).unwrap();
        }
        std::fs::copy(std::env::current_exe().unwrap(), dir.path().join("program")).unwrap();
        let mut mount = GuestSymbols::new(dir.path());
        mount.left = JitMap::parse(map.as_bytes(), u64::MAX).bytes() * 3 / 2;
        assert!(mount.jit(1, 0x63000).is_some());
        assert!(mount.jit(2, 0x1000).is_some());
        assert!(mount.jit(2, 0x63000).is_none(), "there is room for half of it");
        assert!(mount.object("/program").is_none());
        assert!(
            mount.problems()[0].contains("symbols exceed"),
            "{:?}",
            mount.problems()
        );
        assert!(mount.jit(3, 0x1000).is_none());
        assert_eq!(mount.left, 0);
    }

    #[test]
    fn function_memory_is_bounded() {
        let names = ["aaaa", "bbbb", "cccc"].map(str::to_owned);
        let one = (size_of::<String>() + 4) as u64;
        let passed = |most| bounded(names.clone().into_iter(), most, |name| name).count();
        assert_eq!([0, one, 3 * one - 1, 3 * one].map(passed), [0, 1, 2, 3]);
    }

    #[test]
    #[inline(never)]
    fn functions_of_a_real_program_resolve() {
        let exe = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let object = ProgramSymbols::parse(&exe).unwrap();
        let f = object
            .functions
            .iter()
            .find(|f| f.name.contains("functions_of_a_real_program_resolve"))
            .unwrap();
        assert_eq!(object.resolve(f.start).unwrap().offset, 0);
    }
}
