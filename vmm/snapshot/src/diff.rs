//! Differential snapshots, which contain the pages that differ from a base.
//!
//! The base is a full snapshot. A diff names it by the checksum of its state file, never by a path,
//! and lists its own ranges of memory. Elsewhere, memory is that of the base. The memory file of a
//! diff has the size of guest memory, and holes outside its ranges.
//!
//! [`DiffWriter`] compares all memory with the base, so it does not depend on who wrote a page: the
//! guest, KVM or the VMM.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::format::{FormatError, decode, encode};
use crate::memory::{self, CHUNK_BYTES, MemoryFileError, checksum};
use crate::state::{SavedBase, SavedMachine, SavedMemory};

/// Maximum number of ranges in a diff.
pub const MAX_RUNS: usize = 1 << 18;
/// Number of ranges from which on whole chunks are written, so that [`MAX_RUNS`] is not reached.
const MANY_RUNS: usize = MAX_RUNS / 2;
/// Granularity of the comparison, in bytes.
const PAGE_BYTES: usize = 4096;

/// Reason for rejecting a base or a diff.
#[derive(Debug, thiserror::Error)]
pub enum DiffError {
    /// The base is itself a diff.
    #[error("it is a diff itself; name the full snapshot that it is based on")]
    BaseIsDiff,
    /// The base is of a machine of another shape or with other options.
    #[error("it is a snapshot of another VM: the options or the size of memory differ")]
    OtherMachine,
    /// The base is not the snapshot that the diff names.
    #[error("it is not the base of this diff: its checksum is {have:08x}, expected {need:08x}")]
    OtherBase {
        /// Checksum of the state file of the given base.
        have: u32,
        /// Checksum in the diff.
        need: u32,
    },
    /// The ranges are unsorted, empty, not of whole pages, too many, or beyond the end of memory.
    #[error("the diff has ranges of memory that no diff can have")]
    Runs,
    /// Memory is not given in order and in whole chunks.
    #[error("the VM sends memory in another order than expected")]
    Order,
    /// The base's memory file is unusable.
    #[error("its memory file cannot be used")]
    Memory(#[from] MemoryFileError),
    /// A state is unusable.
    #[error(transparent)]
    State(#[from] FormatError),
}

/// The full snapshot on which a diff is based.
#[derive(Debug)]
pub struct BaseSnapshot {
    machine: SavedMachine,
    memory: File,
    state_crc: u32,
}

impl BaseSnapshot {
    /// Opens a base from its state file and its memory file.
    ///
    /// # Errors
    /// Returns [`DiffError::State`] or [`DiffError::Memory`] if a file is unusable, and
    /// [`DiffError::BaseIsDiff`] if the snapshot is not a full one.
    pub fn new(state: &[u8], memory: File) -> Result<Self, DiffError> {
        let machine = decode(state)?;
        if machine.memory.base.is_some() {
            return Err(DiffError::BaseIsDiff);
        }
        memory::check_size(&memory, &machine.memory)?;
        let crc = state.last_chunk().copied().unwrap_or_default();
        Ok(Self {
            machine,
            memory,
            state_crc: u32::from_le_bytes(crc),
        })
    }

    /// Returns the memory file if this is the base of a diff with this memory. With `verify`, all
    /// memory of the base is compared with its checksums.
    ///
    /// # Errors
    /// Returns [`DiffError::OtherBase`] or [`DiffError::OtherMachine`] for another snapshot, and
    /// [`DiffError::Memory`] for damage.
    pub fn memory_of(self, diff: &SavedMemory, need: u32, verify: bool) -> Result<File, DiffError> {
        let have = self.state_crc;
        if have != need {
            return Err(DiffError::OtherBase { have, need });
        }
        if diff.bytes != self.machine.memory.bytes {
            return Err(DiffError::OtherMachine);
        }
        if verify {
            memory::verify(&self.memory, &self.machine.memory)?;
        }
        Ok(self.memory)
    }
}

/// Compares the memory of a VM with a base.
#[derive(Debug)]
pub struct DiffWriter {
    base: BaseSnapshot,
    runs: Vec<(u64, u64)>,
    next: u64,
    buffer: Vec<u8>,
    /// Checksum of a chunk of zeros, computed once.
    zeros_crc: Option<u32>,
}

impl DiffWriter {
    /// Creates the comparison with `base` of a VM with `memory_bytes` of memory.
    ///
    /// # Errors
    /// Returns [`DiffError::OtherMachine`] if the base has another size of memory.
    pub fn new(base: BaseSnapshot, memory_bytes: u64) -> Result<Self, DiffError> {
        if base.machine.memory.bytes != memory_bytes {
            return Err(DiffError::OtherMachine);
        }
        Ok(Self {
            base,
            runs: Vec::new(),
            next: 0,
            buffer: Vec::new(),
            zeros_crc: None,
        })
    }

    /// Compares the chunk at `offset`, which consists of zeros, without reading the base. Returns
    /// `false`, and does not go on to the next chunk, unless the base has a hole there.
    ///
    /// # Errors
    /// Returns the errors of [`DiffWriter::compare`].
    pub fn skip_hole(&mut self, offset: u64) -> Result<bool, DiffError> {
        let end = offset.saturating_add(CHUNK_BYTES);
        if offset != self.next || end > self.base.machine.memory.bytes {
            return Ok(false);
        }
        // ENXIO: there is no data up to the end of the file.
        let is_hole = match seek(&self.base.memory, SeekFrom::Data(offset)) {
            Ok(data) => data >= end,
            Err(Errno::NXIO) => true,
            Err(_) => false,
        };
        if is_hole {
            let zeros = || checksum(&vec![0; usize::try_from(CHUNK_BYTES).unwrap_or(0)]);
            let zeros = *self.zeros_crc.get_or_insert_with(zeros);
            self.check_crc(offset, CHUNK_BYTES, zeros)?;
            self.next = end;
        }
        Ok(is_hole)
    }

    /// Compares the checksum of the base's chunk at `offset`.
    fn check_crc(&self, offset: u64, len: u64, crc: u32) -> Result<(), DiffError> {
        let chunk = usize::try_from(offset / CHUNK_BYTES).unwrap_or(usize::MAX);
        if self.base.machine.memory.crcs.get(chunk) == Some(&crc) {
            return Ok(());
        }
        let (start, end) = (offset, offset + len);
        Err(MemoryFileError::Damaged { start, end }.into())
    }

    /// Compares the chunk at `offset`, and returns its ranges that belong into the diff.
    ///
    /// # Errors
    /// Returns [`DiffError::Order`] unless `data` is the next chunk, and [`DiffError::Memory`] if the
    /// base cannot be read or is damaged.
    pub fn compare(&mut self, offset: u64, data: &[u8]) -> Result<Vec<Range<usize>>, DiffError> {
        let bytes = self.base.machine.memory.bytes;
        let len = CHUNK_BYTES.min(bytes.saturating_sub(offset));
        if offset != self.next || len == 0 || data.len() as u64 != len {
            return Err(DiffError::Order);
        }
        self.next += len;
        self.buffer.resize(data.len(), 0);
        let read = self.base.memory.read_exact_at(&mut self.buffer, offset);
        read.map_err(MemoryFileError::from)?;
        self.check_crc(offset, len, checksum(&self.buffer))?;
        let ranges = if data == self.buffer {
            Vec::new()
        } else if self.runs.len() >= MANY_RUNS {
            std::iter::once(0..data.len()).collect()
        } else {
            changed_ranges(data, &self.buffer)
        };
        for range in &ranges {
            let (start, len) = (offset + range.start as u64, range.len() as u64);
            match self.runs.last_mut() {
                Some((first, bytes)) if *first + *bytes == start => *bytes += len,
                _ => self.runs.push((start, len)),
            }
        }
        Ok(ranges)
    }

    /// Returns the state file of the diff from the one of the VM, and the number of bytes in its
    /// ranges.
    ///
    /// # Errors
    /// Returns [`DiffError::Order`] before the end of memory, [`DiffError::OtherMachine`] if the base
    /// is of another VM, and [`DiffError::State`] if the state is invalid or too large.
    pub fn finish(self, state: &[u8]) -> Result<(Vec<u8>, u64), DiffError> {
        let mut machine = decode(state)?;
        let base = &self.base.machine;
        if self.next != base.memory.bytes || machine.memory.bytes != self.next {
            return Err(DiffError::Order);
        }
        if machine.shape.pmu != base.shape.pmu
            || machine.shape.max_vcpus != base.shape.max_vcpus
            || machine.kernel.format != base.kernel.format
        {
            return Err(DiffError::OtherMachine);
        }
        let changed = self.runs.iter().map(|(_, bytes)| bytes).sum();
        machine.memory.base = Some(SavedBase {
            state_crc: self.base.state_crc,
            runs: self.runs,
        });
        Ok((encode(&machine)?, changed))
    }
}

/// Returns the ranges of pages in which two chunks differ.
fn changed_ranges(data: &[u8], base: &[u8]) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let pages = data.chunks(PAGE_BYTES).zip(base.chunks(PAGE_BYTES));
    for (page, (new, _)) in pages.enumerate().filter(|(_, (new, old))| new != old) {
        let start = page * PAGE_BYTES;
        match ranges.last_mut() {
            Some(last) if last.end == start => last.end += new.len(),
            _ => ranges.push(start..start + new.len()),
        }
    }
    ranges
}

/// Checks the ranges of a diff.
///
/// # Errors
/// Returns [`DiffError::Runs`] if they are unsorted, empty, not of whole pages, too many, or beyond the
/// end of memory.
pub fn check_runs(base: &SavedBase, memory_bytes: u64) -> Result<(), DiffError> {
    let is_aligned = |value: u64| value.is_multiple_of(PAGE_BYTES as u64);
    let mut end = 0;
    let fits = base.runs.iter().all(|&(start, len)| {
        let fits = start >= end && len > 0 && is_aligned(start) && is_aligned(len);
        end = start.saturating_add(len);
        fits && end <= memory_bytes
    });
    (fits && base.runs.len() <= MAX_RUNS)
        .then_some(())
        .ok_or(DiffError::Runs)
}

/// Reads all memory of a diff, which is `file` in the ranges of `diff` and `base` elsewhere, and
/// compares its checksums.
///
/// # Errors
/// Returns [`MemoryFileError`] if a file cannot be read or a chunk does not match.
pub fn verify(
    file: &File,
    base: &File,
    diff: &SavedBase,
    memory: &SavedMemory,
) -> Result<(), MemoryFileError> {
    memory::verify_by(memory, |buffer, at| read(file, base, diff, buffer, at))
}

/// Reads memory of a diff at offset `at`.
fn read(file: &File, base: &File, diff: &SavedBase, buffer: &mut [u8], at: u64) -> io::Result<()> {
    base.read_exact_at(buffer, at)?;
    let end = at + buffer.len() as u64;
    let first = diff.runs.partition_point(|(start, len)| start + len <= at);
    for (start, len) in diff.runs[first..].iter().take_while(|(start, _)| *start < end) {
        let (from, to) = (at.max(*start), end.min(start + len));
        let range = usize::try_from(from - at).unwrap_or(0)..usize::try_from(to - at).unwrap_or(0);
        file.read_exact_at(&mut buffer[range], from)?;
    }
    Ok(())
}
