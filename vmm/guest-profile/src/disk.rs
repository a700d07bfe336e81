//! The guest's files, read out of its disk: an ext4 file system on the whole disk or on a partition.
//!
//! Nothing is mounted and nothing is written. The file system is parsed by the crate `ext4-view`, which knows
//! neither pointers nor `unsafe`. Still the bytes are the guest's, who may have made them to keep us busy or
//! to fill our memory. So:
//!
//! - a thread of its own reads, and an answer that takes longer than [`PATIENCE`] is not waited for; nor is
//!   anything asked again then, or when all answers took five minutes in all
//! - what opening a file system, or reading a file, may read of the disk is limited
//! - links are followed here, as the crate takes as much memory for a link's target as its inode says
//! - what a superblock says of its size must fit the disk, as tables are allocated by it
//! - a file is read up to the size that the caller can use
//!
//! A guest that runs goes on writing. What it has written lately is in the journal, which is read too, or
//! still in its memory. A file that changes while it is read may come out wrong: who uses it must check it,
//! as by a build-id.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use ext4_view::{Ext4, Ext4Error, Ext4Read, PathBuf as Ext4Path};
use kernel_images::le::{u16_at, u32_at, u64_at};

/// How long an answer may take.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// How long all answers of a disk may take together: a guest can have each take nearly as long as one may.
const PATIENCE_FOR_ALL: Duration = Duration::from_secs(300);
/// Most that is read of the disk to open a file system: descriptors of groups, and the journal's part that is
/// not in place yet.
const MOST_TO_OPEN: u64 = 256 << 20;
/// Most that is read of the disk for a file, besides what is in it.
const MOST_BESIDES: u64 = 64 << 20;
/// Most partitions that are looked at.
const MOST_PARTITIONS: u32 = 128;
/// Most groups of blocks: those of 128 TiB.
const MOST_GROUPS: u64 = 1 << 20;
/// Most links that are followed for a path, and the longest path, as in Linux (path_resolution(7)).
const MOST_LINKS: u32 = 40;
const LONGEST_PATH: usize = 4096;
/// Most parts of a path, those of links with them.
const MOST_LOOKS: u32 = 1000;
/// Bytes of a sector, in which partition tables count.
const SECTOR: u64 = SECTOR_BYTES as u64;
const SECTOR_BYTES: usize = 512;

/// The bytes of a disk.
pub trait DiskBytes {
    /// How many there are.
    fn len(&self) -> u64;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `to` from byte `at` on.
    ///
    /// # Errors
    /// That of the host, or of the image's format.
    fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()>;

    /// Sees what was written meanwhile, where [`Self::read`] does not.
    ///
    /// # Errors
    /// As [`Self::read`]; it is seen as before.
    fn reload(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Why there is no file.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// No file system that can be read.
    #[error("the disk has no ext4 file system that can be read{}", .0.as_ref().map_or_else(String::new, |why| format!(": {why}")))]
    NoFileSystem(Option<String>),
    /// The file system has no such file, or it cannot be read.
    #[error("{0}")]
    File(String),
    /// It is larger than is read.
    #[error("it is larger than {} MiB", .0 >> 20)]
    TooLarge(u64),
    /// It took too long, now or before.
    #[error(
        "reading the disk took longer than {} s, or {} s in all; it is not read any more",
        PATIENCE.as_secs(),
        PATIENCE_FOR_ALL.as_secs()
    )]
    Slow,
    /// The reader stumbled over what is on the disk.
    #[error("what is on the disk made its reader fail; it is not read any more")]
    Stumbled,
    /// There is no thread for it.
    #[error("no thread to read the disk")]
    Thread(#[source] io::Error),
}

/// What the thread is asked.
enum Ask {
    Read { path: String, most: u64 },
    LookAgain,
}

/// A disk of the guest's. Its thread ends with it.
#[derive(Debug)]
pub struct GuestDisk {
    ask: SyncSender<Ask>,
    answers: Receiver<Result<Vec<u8>, DiskError>>,
    /// How long all answers took.
    waited: Duration,
    /// Nothing is asked any more.
    over: bool,
}

impl GuestDisk {
    /// Opens the file systems of the disk.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn open(bytes: Box<dyn DiskBytes + Send>) -> Result<Self, DiskError> {
        let (ask, asked) = sync_channel::<Ask>(1);
        let (answer, answers) = sync_channel(1);
        let serve = move || {
            let bytes: Rc<dyn DiskBytes> = Rc::from(bytes as Box<dyn DiskBytes>);
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
                    (Ask::LookAgain, _) => {
                        // What is on the disk as it was seen before is better than nothing.
                        let seen = bytes.reload();
                        open = FileSystems::open(&bytes);
                        seen.map(|()| Vec::new())
                            .map_err(|e| DiskError::File(perf_core::error_line(&e)))
                    }
                    (Ask::Read { path, most }, Ok(systems)) => systems.read(&path, most),
                    (Ask::Read { .. }, Err(e)) => Err(DiskError::File(e.to_string())),
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
        let answer = self.answers.recv_timeout(PATIENCE);
        self.waited = self.waited.saturating_add(asked.elapsed());
        self.over |= answer.is_err() || self.waited > PATIENCE_FOR_ALL;
        answer.unwrap_or_else(|e| {
            Err(match e {
                RecvTimeoutError::Timeout => DiskError::Slow,
                RecvTimeoutError::Disconnected => DiskError::Stumbled,
            })
        })
    }

    fn asked(&mut self, ask: Ask) -> Result<Vec<u8>, DiskError> {
        if self.over {
            return Err(DiskError::Slow);
        }
        if self.ask.send(ask).is_err() {
            self.over = true;
            return Err(DiskError::Stumbled);
        }
        self.answer()
    }

    /// The file that the guest calls `path`, of at most `most` bytes. Links are followed in the file system.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn read(&mut self, path: &str, most: u64) -> Result<Vec<u8>, DiskError> {
        let path = path.to_owned();
        self.asked(Ask::Read { path, most })
    }

    /// Looks at what the guest has written since the disk was opened.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn reload(&mut self) -> Result<(), DiskError> {
        self.asked(Ask::LookAgain).map(|_| ())
    }
}

/// How much may still be read of a disk.
#[derive(Clone, Default)]
struct Budget(Rc<RefCell<State>>);

#[derive(Default)]
struct State {
    left: u64,
    /// What was read of each sector, if that is what is read of it again: a guest that writes meanwhile shall
    /// not make something else of what was found to be in order.
    kept: Option<HashMap<u64, [u8; SECTOR_BYTES]>>,
}

impl Budget {
    fn allow(&self, bytes: u64) {
        self.0.borrow_mut().left = bytes;
    }

    /// Whether what is read from now on stays as it is, or nothing does.
    fn keep(&self, keep: bool) {
        self.0.borrow_mut().kept = keep.then(HashMap::new);
    }

    fn take(&self, bytes: u64) -> Result<(), &'static str> {
        let left = &mut self.0.borrow_mut().left;
        let after = left.checked_sub(bytes);
        *left = after.ok_or("it takes more reading than a file system in order")?;
        Ok(())
    }

    /// `bytes` were read at `at`. In the blocks of a file system, which are read while a path is followed,
    /// all sectors are whole.
    fn settle(&self, at: u64, bytes: &mut [u8]) {
        let Some(kept) = &mut self.0.borrow_mut().kept else {
            return;
        };
        for (n, sector) in bytes.as_chunks_mut::<SECTOR_BYTES>().0.iter_mut().enumerate() {
            *sector = *kept.entry(at + n as u64 * SECTOR).or_insert(*sector);
        }
    }
}

/// A part of a disk.
struct Part {
    disk: Rc<dyn DiskBytes>,
    start: u64,
    len: u64,
    budget: Budget,
}

impl Ext4Read for Part {
    fn read(&mut self, at: u64, to: &mut [u8]) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let count = to.len() as u64;
        let inside = at.checked_add(count).is_some_and(|end| end <= self.len);
        if !inside {
            return Err("it leads beyond the end of the disk".into());
        }
        self.budget.take(count)?;
        self.disk.read(self.start + at, to)?;
        self.budget.settle(self.start + at, to);
        Ok(())
    }
}

/// The file systems of a disk.
struct FileSystems {
    /// That which looks like the guest's root first.
    systems: Vec<Ext4>,
    budget: Budget,
}

impl FileSystems {
    fn open(disk: &Rc<dyn DiskBytes>) -> Result<Self, DiskError> {
        let budget = Budget::default();
        let mut why = None;
        let mut systems = Vec::new();
        for (start, len) in partitions(&**disk) {
            let part = |disk: &Rc<dyn DiskBytes>| Part {
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
            budget.allow(MOST_TO_OPEN);
            match Ext4::load(Box::new(part(disk))) {
                Ok(system) => systems.push(system),
                Err(e) => why = Some(said(&e)),
            }
        }
        if systems.is_empty() {
            return Err(DiskError::NoFileSystem(why));
        }
        budget.allow(MOST_BESIDES);
        // What it is does not matter, so no link is followed.
        systems.sort_by_key(|system| system.symlink_metadata("/etc").is_err());
        Ok(Self { systems, budget })
    }

    /// Of the first file system that has it.
    fn read(&self, path: &str, most: u64) -> Result<Vec<u8>, DiskError> {
        let mut missing = None;
        for system in &self.systems {
            self.budget.allow(MOST_BESIDES);
            self.budget.keep(true);
            let opened = plain(system, path).and_then(|path| system.open(&path).map_err(failed));
            self.budget.keep(false);
            self.budget.allow(most.saturating_add(MOST_BESIDES));
            match opened.and_then(|file| read_file(file, most)) {
                Ok(bytes) => return Ok(bytes),
                Err(e @ DiskError::TooLarge(_)) => return Err(e),
                Err(e) => missing = missing.or(Some(e)),
            }
        }
        Err(missing.unwrap_or(DiskError::NoFileSystem(None)))
    }
}

/// An error and its cause: in one line, as a guest's disk has no say in it.
fn said(error: &Ext4Error) -> String {
    perf_core::error_line(error)
}

fn failed(error: Ext4Error) -> DiskError {
    DiskError::File(said(&error))
}

/// `path` without links.
fn plain(system: &Ext4, path: &str) -> Result<Ext4Path, DiskError> {
    let not = |why: &str| DiskError::File(why.into());
    let no_path = |_| not("it is no path");
    let given = Ext4Path::try_from(path).map_err(no_path)?;
    if !given.is_absolute() {
        return Err(not("it is no absolute path"));
    }
    // Parts still to go, the next one last.
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
        if looks > MOST_LOOKS || done.len() + part.len() >= LONGEST_PATH {
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
        if links > MOST_LINKS || meta.len() > LONGEST_PATH as u64 {
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

/// Why a file system is not read: its tables have a size that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum ImpossibleSize {
    #[error("its blocks are larger than any")]
    Blocks,
    #[error("it says that it is larger than the disk")]
    System,
    #[error("it has more groups of blocks than any")]
    Groups,
}

/// Whether there is an ext2, ext3 or ext4 file system there whose tables have a size that can be.
fn is_ext4(disk: &dyn DiskBytes, start: u64, len: u64) -> Result<bool, ImpossibleSize> {
    // Where the superblock is, and what it begins with (the kernel's Documentation/filesystems/ext4).
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
    if blocks / in_group > MOST_GROUPS {
        return Err(ImpossibleSize::Groups);
    }
    Ok(true)
}

/// Where there may be file systems, as first byte and length: the whole disk, and the partitions of a GUID
/// partition table (UEFI 2.10, 5.3) or the primary ones of an MBR (5.2).
fn partitions(disk: &dyn DiskBytes) -> Vec<(u64, u64)> {
    let mut found = vec![(0, disk.len())];
    let mut add = |first: u64, sectors: u64| {
        let (Some(start), Some(len)) = (first.checked_mul(SECTOR), sectors.checked_mul(SECTOR)) else {
            return;
        };
        // The table may say anything.
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
    for n in 0..count.min(MOST_PARTITIONS) {
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
