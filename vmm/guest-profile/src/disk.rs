//! Reads files of the guest from its disk, which contains an ext4 file system on the whole disk or
//! on a partition.
//!
//! The disk is not mounted and never written. The crate `ext4-view`, which contains no `unsafe`
//! code, parses the file system. The guest controls the contents of the disk and may try to exhaust
//! CPU time or memory. Therefore:
//!
//! - a separate thread reads the disk, and a request that takes longer than [`REQUEST_TIMEOUT`]
//!   fails; after such a failure, or when all requests together have taken five minutes, further
//!   requests fail immediately
//! - the number of bytes read to open a file system or to read a file is bounded
//! - this module follows symbolic links itself, because the crate allocates as much memory for the
//!   target of a link as the inode claims
//! - the file system size in the superblock must not exceed the size of the disk, because it
//!   determines the size of tables
//! - the caller sets the maximum size of a file
//!
//! A running guest continues to write. Recent writes may be in the journal, which is also read, or
//! still in the guest's memory. A file that changes while it is read may be inconsistent, so the
//! caller must verify it, for example by its build ID.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use ext4_view::{Ext4, Ext4Error, Ext4Read, PathBuf as Ext4Path};
use kernel_images::le::{u16_at, u32_at, u64_at};

/// Timeout of one request to read a guest's disk.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout for all requests to one disk together. Without this limit, a guest could delay every
/// request by almost [`REQUEST_TIMEOUT`].
const TOTAL_TIMEOUT: Duration = Duration::from_secs(300);
/// Maximum number of bytes read to open a file system: its group descriptors, and the journal
/// entries that have not been checkpointed.
const MAX_OPEN_BYTES: u64 = 256 << 20;
/// Maximum number of metadata bytes read from the disk for one file.
const MAX_METADATA_BYTES: u64 = 64 << 20;
/// Maximum number of entries of a partition table that are read.
const MAX_PARTITIONS: u32 = 128;
/// Maximum number of block groups of a file system. The limit corresponds to 128 TiB.
const MAX_GROUPS: u64 = 1 << 20;
/// Maximum number of symbolic links followed for one path, and maximum length of a path in bytes.
/// Linux has the same limits (path_resolution(7)).
const MAX_LINKS: u32 = 40;
const LONGEST_PATH: usize = 4096;
/// Maximum number of components resolved for one path, including components of symbolic links.
const MAX_COMPONENTS: u32 = 1000;
/// Size of a sector, the unit of partition tables, in bytes.
const SECTOR: u64 = SECTOR_BYTES as u64;
const SECTOR_BYTES: usize = 512;

/// Read access to the bytes of a guest's disk.
pub trait GuestDiskReader {
    /// Returns the size of the disk, in bytes.
    fn len(&self) -> u64;

    /// Returns `true` if the disk is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `to` with the bytes at offset `at`.
    ///
    /// # Errors
    /// Returns an I/O error of the host, or an error in the format of the disk image.
    fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()>;

    /// Refreshes cached metadata, so that later writes of the guest are visible to [`Self::read`].
    ///
    /// # Errors
    /// Returns the same errors as [`Self::read`]. The cached metadata is then unchanged.
    fn reload(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Error returned when a file cannot be read from the guest's disk.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The disk has no readable ext4 file system.
    #[error("the disk has no readable ext4 file system{}", .0.as_ref().map_or_else(String::new, |why| format!(": {why}")))]
    NoFileSystem(Option<String>),
    /// The file does not exist or cannot be read. The value is a message with the reason.
    #[error("{0}")]
    File(String),
    /// The file is larger than the caller permits. The value is that limit, in bytes.
    #[error("larger than {} MiB", .0 >> 20)]
    TooLarge(u64),
    /// A request took too long, or all requests together did. All later requests then fail as well.
    #[error(
        "reading the disk took longer than {} s, or {} s in total; the disk is no longer read",
        REQUEST_TIMEOUT.as_secs(),
        TOTAL_TIMEOUT.as_secs()
    )]
    TimedOut,
    /// The reader thread panicked on the contents of the disk.
    #[error("the reader of the disk failed; the disk is no longer read")]
    ReaderPanicked,
    /// The reader thread could not be started.
    #[error("cannot start the thread that reads the disk")]
    Thread(#[source] io::Error),
}

/// Request to the thread that reads a guest's disk.
enum DiskRequest {
    Read { path: String, most: u64 },
    LookAgain,
}

/// Disk of the guest and the thread that reads it. The thread exits when this value is dropped.
#[derive(Debug)]
pub struct GuestDisk {
    ask: SyncSender<DiskRequest>,
    answers: Receiver<Result<Vec<u8>, DiskError>>,
    /// Total time that requests have waited for the reader thread.
    waited: Duration,
    /// `true` after a timeout or a panic of the reader thread, when all further requests are
    /// rejected.
    over: bool,
}

impl GuestDisk {
    /// Opens the file systems of the disk.
    ///
    /// # Errors
    /// Returns a [`DiskError`] if the disk has no readable file system or the reader thread fails.
    pub fn open(bytes: Box<dyn GuestDiskReader + Send>) -> Result<Self, DiskError> {
        let (ask, asked) = sync_channel::<DiskRequest>(1);
        let (answer, answers) = sync_channel(1);
        let serve = move || {
            let bytes: Rc<dyn GuestDiskReader> = Rc::from(bytes as Box<dyn GuestDiskReader>);
            let mut open = FileSystems::open(&bytes);
            let opened = open.as_ref().map(|_| Vec::new()).map_err(|e| match e {
                DiskError::NoFileSystem(why) => DiskError::NoFileSystem(why.clone()),
                other => DiskError::File(other.to_string()),
            });
            if answer.send(opened).is_err() {
                return;
            }
            for ask in asked {
                let result = match (ask, &open) {
                    (DiskRequest::LookAgain, _) => {
                        // If the refresh fails, the previous view of the disk is opened again.
                        let seen = bytes.reload();
                        open = FileSystems::open(&bytes);
                        seen.map(|()| Vec::new())
                            .map_err(|e| DiskError::File(perf_core::error_line(&e)))
                    }
                    (DiskRequest::Read { path, most }, Ok(systems)) => systems.read(&path, most),
                    (DiskRequest::Read { .. }, Err(e)) => Err(DiskError::File(e.to_string())),
                };
                if answer.send(result).is_err() {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("guest-disk".into());
        thread.spawn(serve).map_err(DiskError::Thread)?;
        let mut disk = Self {
            ask,
            answers,
            waited: Duration::ZERO,
            over: false,
        };
        disk.answer()?;
        Ok(disk)
    }

    fn answer(&mut self) -> Result<Vec<u8>, DiskError> {
        let asked = Instant::now();
        let answer = self.answers.recv_timeout(REQUEST_TIMEOUT);
        self.waited = self.waited.saturating_add(asked.elapsed());
        self.over |= answer.is_err() || self.waited > TOTAL_TIMEOUT;
        answer.unwrap_or_else(|e| {
            Err(match e {
                RecvTimeoutError::Timeout => DiskError::TimedOut,
                RecvTimeoutError::Disconnected => DiskError::ReaderPanicked,
            })
        })
    }

    fn asked(&mut self, ask: DiskRequest) -> Result<Vec<u8>, DiskError> {
        if self.over {
            return Err(DiskError::TimedOut);
        }
        if self.ask.send(ask).is_err() {
            self.over = true;
            return Err(DiskError::ReaderPanicked);
        }
        self.answer()
    }

    /// Reads the guest's file `path`. Follows symbolic links within the file system. The file may
    /// have at most `most` bytes.
    ///
    /// # Errors
    /// Returns a [`DiskError`] if the file is missing, unreadable or too large, or if the request
    /// times out.
    pub fn read(&mut self, path: &str, most: u64) -> Result<Vec<u8>, DiskError> {
        let path = path.to_owned();
        self.asked(DiskRequest::Read { path, most })
    }

    /// Refreshes the view of the disk, so that recent writes of the guest are visible.
    ///
    /// # Errors
    /// Returns a [`DiskError`] if the disk cannot be read or the request times out.
    pub fn reload(&mut self) -> Result<(), DiskError> {
        self.asked(DiskRequest::LookAgain).map(|_| ())
    }
}

/// Budget for reads from a disk: the number of bytes that may still be read.
#[derive(Clone, Default)]
struct ReadBudget(Rc<RefCell<ReadState>>);

#[derive(Default)]
struct ReadState {
    left: u64,
    /// Contents of each sector at its first read, by byte offset. `None` while sectors are not
    /// cached. The cache prevents a concurrent write by the guest from invalidating checks that
    /// have already been made.
    kept: Option<HashMap<u64, [u8; SECTOR_BYTES]>>,
}

impl ReadBudget {
    fn allow(&self, bytes: u64) {
        self.0.borrow_mut().left = bytes;
    }

    /// Starts or stops caching sectors. While sectors are cached, repeated reads of a sector return
    /// the contents of the first read.
    fn keep(&self, keep: bool) {
        self.0.borrow_mut().kept = keep.then(HashMap::new);
    }

    fn take(&self, bytes: u64) -> Result<(), &'static str> {
        let left = &mut self.0.borrow_mut().left;
        let after = left.checked_sub(bytes);
        *left = after.ok_or("it takes more reading than a file system in order")?;
        Ok(())
    }

    /// Replaces the contents of `bytes`, which were read at offset `at`, with the cached contents
    /// of the same sectors. All sectors are complete, because path lookups read whole file system
    /// blocks.
    fn apply_cached_sectors(&self, at: u64, bytes: &mut [u8]) {
        let Some(kept) = &mut self.0.borrow_mut().kept else {
            return;
        };
        for (n, sector) in bytes.as_chunks_mut::<SECTOR_BYTES>().0.iter_mut().enumerate() {
            *sector = *kept.entry(at + n as u64 * SECTOR).or_insert(*sector);
        }
    }
}

/// A contiguous range of a disk, such as a partition.
struct DiskRange {
    disk: Rc<dyn GuestDiskReader>,
    start: u64,
    len: u64,
    budget: ReadBudget,
}

impl Ext4Read for DiskRange {
    fn read(&mut self, at: u64, to: &mut [u8]) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let count = to.len() as u64;
        let inside = at.checked_add(count).is_some_and(|end| end <= self.len);
        if !inside {
            return Err("it leads beyond the end of the disk".into());
        }
        self.budget.take(count)?;
        self.disk.read(self.start + at, to)?;
        self.budget.apply_cached_sectors(self.start + at, to);
        Ok(())
    }
}

/// The ext4 file systems of a disk.
struct FileSystems {
    /// File systems of the disk, starting with the one that appears to be the guest's root.
    systems: Vec<Ext4>,
    budget: ReadBudget,
}

impl FileSystems {
    fn open(disk: &Rc<dyn GuestDiskReader>) -> Result<Self, DiskError> {
        let budget = ReadBudget::default();
        let mut why = None;
        let mut systems = Vec::new();
        for (start, len) in partitions(&**disk) {
            let part = |disk: &Rc<dyn GuestDiskReader>| DiskRange {
                disk: disk.clone(),
                start,
                len,
                budget: budget.clone(),
            };
            match is_ext4(&**disk, start, len) {
                Ok(true) => {}
                Ok(false) => continue,
                Err(e) => {
                    why = Some(e.to_string());
                    continue;
                }
            }
            budget.allow(MAX_OPEN_BYTES);
            match Ext4::load(Box::new(part(disk))) {
                Ok(system) => systems.push(system),
                Err(e) => why = Some(error_text(&e)),
            }
        }
        if systems.is_empty() {
            return Err(DiskError::NoFileSystem(why));
        }
        budget.allow(MAX_METADATA_BYTES);
        // The root file system has `/etc`. The search does not follow a symbolic link with this
        // name, because its target is read without a size limit.
        systems.sort_by_key(|system| system.symlink_metadata("/etc").is_err());
        Ok(Self { systems, budget })
    }

    /// Reads the file `path` from the first file system that contains it.
    fn read(&self, path: &str, most: u64) -> Result<Vec<u8>, DiskError> {
        let mut missing = None;
        for system in &self.systems {
            self.budget.allow(MAX_METADATA_BYTES);
            self.budget.keep(true);
            let opened = resolve_links(system, path).and_then(|path| system.open(&path).map_err(failed));
            self.budget.keep(false);
            self.budget.allow(most.saturating_add(MAX_METADATA_BYTES));
            match opened.and_then(|file| read_file(file, most)) {
                Ok(bytes) => return Ok(bytes),
                Err(e @ DiskError::TooLarge(_)) => return Err(e),
                Err(e) => missing = missing.or(Some(e)),
            }
        }
        Err(missing.unwrap_or(DiskError::NoFileSystem(None)))
    }
}

/// Formats an error and its causes on one line.
fn error_text(error: &Ext4Error) -> String {
    perf_core::error_line(error)
}

fn failed(error: Ext4Error) -> DiskError {
    DiskError::File(error_text(&error))
}

/// Returns `path` with all symbolic links resolved.
fn resolve_links(system: &Ext4, path: &str) -> Result<Ext4Path, DiskError> {
    let not = |why: &str| DiskError::File(why.into());
    let no_path = |_| not("it is no path");
    let given = Ext4Path::try_from(path).map_err(no_path)?;
    if !given.is_absolute() {
        return Err(not("it is no absolute path"));
    }
    // Splits a path into components. The first component comes last, so that `pop` returns it.
    let parts = |path: &[u8]| -> Vec<Vec<u8>> {
        let parts = path.split(|byte| *byte == b'/').rev();
        parts
            .filter(|part| !part.is_empty() && *part != b".")
            .map(<[u8]>::to_vec)
            .collect()
    };
    let mut todo = parts(given.as_ref());
    let (mut done, mut links, mut looks) = (vec![b'/'], 0, 0);
    while let Some(part) = todo.pop() {
        looks += 1;
        if looks > MAX_COMPONENTS || done.len() + part.len() >= LONGEST_PATH {
            return Err(not("its path is too long"));
        }
        if part == b".." {
            done.truncate(
                done.iter()
                    .rposition(|byte| *byte == b'/')
                    .unwrap_or_default()
                    .max(1),
            );
            continue;
        }
        let mut here = done.clone();
        if here.len() > 1 {
            here.push(b'/');
        }
        here.extend(&part);
        let path = Ext4Path::try_from(here.as_slice()).map_err(no_path)?;
        let meta = system.symlink_metadata(&path).map_err(failed)?;
        if !meta.is_symlink() {
            done = here;
            continue;
        }
        links += 1;
        if links > MAX_LINKS || meta.len() > LONGEST_PATH as u64 {
            return Err(not(
                "it leads over more links, or a longer one, than Linux follows",
            ));
        }
        let target = system.read_link(&path).map_err(failed)?;
        if target.is_absolute() {
            done = vec![b'/'];
        }
        todo.extend(parts(target.as_ref()));
    }
    Ext4Path::try_from(done).map_err(no_path)
}

fn read_file(mut file: ext4_view::File, most: u64) -> Result<Vec<u8>, DiskError> {
    const CHUNK: usize = 64 << 10;
    if file.metadata().len() > most {
        return Err(DiskError::TooLarge(most));
    }
    let (mut bytes, mut chunk) = (Vec::new(), vec![0; CHUNK]);
    loop {
        match file.read_bytes(&mut chunk).map_err(failed)? {
            0 => return Ok(bytes),
            n => bytes.extend_from_slice(&chunk[..n]),
        }
        if bytes.len() as u64 > most {
            return Err(DiskError::TooLarge(most));
        }
    }
}

/// Reason a file system is rejected: its superblock claims impossible table sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum ImpossibleSize {
    #[error("invalid block size")]
    Blocks,
    #[error("the file system is larger than the disk")]
    System,
    #[error("too many block groups")]
    Groups,
}

/// Returns whether an ext2, ext3 or ext4 file system with plausible table sizes starts at `start`.
fn is_ext4(disk: &dyn GuestDiskReader, start: u64, len: u64) -> Result<bool, ImpossibleSize> {
    // Offset and magic number of the superblock (the kernel's Documentation/filesystems/ext4).
    const AT: u64 = 1024;
    const MAGIC: u16 = 0xef53;
    const LARGEST_BLOCK: u32 = 6;
    let mut block = [0; 1024];
    if len < AT + block.len() as u64 || disk.read(start + AT, &mut block).is_err() {
        return Ok(false);
    }
    let word = |at| u64::from(u32_at(&block, at).unwrap_or_default());
    if u16_at(&block, 0x38) != Some(MAGIC) {
        return Ok(false);
    }
    let size = u32_at(&block, 0x18).filter(|log| *log <= LARGEST_BLOCK);
    let block_bytes = 1024 << size.ok_or(ImpossibleSize::Blocks)?;
    let blocks = word(0x150) << 32 | word(4);
    let in_group = word(0x20).max(1);
    if blocks.checked_mul(block_bytes).is_none_or(|bytes| bytes > len) {
        return Err(ImpossibleSize::System);
    }
    if blocks / in_group > MAX_GROUPS {
        return Err(ImpossibleSize::Groups);
    }
    Ok(true)
}

/// Returns the offset and the length of each range of the disk that may contain a file system: the
/// whole disk, and the partitions of a GUID partition table (UEFI 2.10, 5.3) or the primary
/// partitions of an MBR (5.2).
fn partitions(disk: &dyn GuestDiskReader) -> Vec<(u64, u64)> {
    let mut found = vec![(0, disk.len())];
    let mut add = |first: u64, sectors: u64| {
        let (Some(start), Some(len)) = (first.checked_mul(SECTOR), sectors.checked_mul(SECTOR)) else {
            return;
        };
        // The partition table is untrusted, so a partition may extend beyond the disk.
        let inside = start.checked_add(len).is_some_and(|end| end <= disk.len());
        if inside && start > 0 && len > 0 {
            found.push((start, len));
        }
    };
    let mut sector = [0; SECTOR_BYTES];
    if disk.read(0, &mut sector).is_err() || sector[510..] != [0x55, 0xaa] {
        return found;
    }
    let entries: Vec<(u8, u64, u64)> = sector[446..510]
        .as_chunks::<16>()
        .0
        .iter()
        .map(|entry| {
            let number = |at| u64::from(u32_at(entry, at).unwrap_or_default());
            (entry[4], number(8), number(12))
        })
        .collect();
    const PROTECTIVE: u8 = 0xee;
    if !entries.iter().any(|(kind, ..)| *kind == PROTECTIVE) {
        for (_, first, sectors) in entries {
            add(first, sectors);
        }
        return found;
    }
    if disk.read(SECTOR, &mut sector).is_err() || !sector.starts_with(b"EFI PART") {
        return found;
    }
    let (Some(table), Some(count), Some(size)) =
        (u64_at(&sector, 72), u32_at(&sector, 80), u32_at(&sector, 84))
    else {
        return found;
    };
    let Some(table) = table.checked_mul(SECTOR).filter(|_| (128..=4096).contains(&size)) else {
        return found;
    };
    for n in 0..count.min(MAX_PARTITIONS) {
        let mut entry = [0; 128];
        let at = table.checked_add(u64::from(n) * u64::from(size));
        let Some(at) = at.filter(|at| *at < disk.len()) else {
            break;
        };
        if disk.read(at, &mut entry).is_err() {
            break;
        }
        if let (Some(first), Some(last)) = (u64_at(&entry, 32), u64_at(&entry, 40))
            && let Some(sectors) = last.checked_sub(first).and_then(|n| n.checked_add(1))
        {
            add(first, sectors);
        }
    }
    found
}

#[cfg(test)]
mod tests;
