//! Differential snapshots, which contain the pages that differ from a base.
//!
//! The base is a full snapshot or another diff. Up to [`MAX_DIFFS`] diffs may follow a full
//! snapshot. A diff identifies its base by the checksum of its state file, never by a path, and
//! lists the ranges of memory that it contains itself. All other memory comes from the base. The
//! memory file of a diff has the size of guest memory, with holes outside its ranges.
//!
//! [`SnapshotBaseChain`] is the memory of a base. [`SnapshotDiffWriter`] compares all memory with
//! it, so that pages are found regardless of whether the guest, KVM or the VMM wrote them.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::format::{SnapshotFormatError, decode, encode};
use crate::memory::{self, CHUNK_BYTES, MemoryFileError, checksum};
use crate::state::{SavedDiffBase, SavedMachine, SavedMemoryFile};

/// Maximum number of diffs on top of a full snapshot. A restore reads all diffs and keeps their
/// files open.
pub const MAX_DIFFS: usize = 16;
/// Maximum number of ranges in a diff.
pub const MAX_RUNS: usize = 1 << 18;
/// Number of ranges at which [`SnapshotDiffWriter`] begins to store each changed chunk as a whole
/// instead of only its changed pages, so that [`MAX_RUNS`] is not reached.
const MANY_RUNS: usize = MAX_RUNS / 2;
/// Granularity at which memory is compared with the base, in bytes.
const PAGE_BYTES: usize = 4096;

/// Reason for rejecting a base or a diff.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotDiffError {
    /// The base of a diff is missing.
    #[error("it is a diff, and its base, of checksum {0:08x}, is not given; name its directory as well")]
    MissingBase(u32),
    /// A snapshot passed as a base is not one on which the diff depends.
    #[error("no diff that is given is based on it; omit it")]
    Unneeded,
    /// The chain has more than [`MAX_DIFFS`] diffs, including the diff that is based on the given
    /// snapshots.
    #[error(
        "there would be more than {MAX_DIFFS} diffs one above the other; name an earlier snapshot, or take \
         a full one"
    )]
    TooManyDiffs,
    /// The base is of a machine with a different shape or different options.
    #[error("it is a snapshot of another VM: the options or the size of memory differ")]
    OtherMachine,
    /// The base is not the snapshot that the diff names.
    #[error("it is not the base of this diff: its checksum is {have:08x}, expected {need:08x}")]
    OtherBase {
        /// Checksum of the state file of the given base.
        have: u32,
        /// Checksum of the state file of the base that the diff names.
        need: u32,
    },
    /// The ranges are unsorted, empty, not of whole pages, too many, or beyond the end of memory.
    #[error("the diff has ranges of memory that no diff can have")]
    Runs,
    /// The caller of [`SnapshotDiffWriter`] did not pass guest memory in order and in whole chunks.
    #[error("the VM sends memory in another order than expected")]
    Order,
    /// The base's memory file is unusable.
    #[error("its memory file cannot be used")]
    Memory(#[from] MemoryFileError),
    /// A state file is unusable.
    #[error(transparent)]
    State(#[from] SnapshotFormatError),
}

/// Error in a snapshot that is given as a base.
#[derive(Debug, thiserror::Error)]
#[error("the snapshot {}", path.display())]
pub struct BaseSnapshotError {
    /// Directory of the snapshot.
    pub path: PathBuf,
    /// Reason for rejecting the snapshot.
    pub source: SnapshotDiffError,
}

impl BaseSnapshotError {
    fn new(path: &Path, source: impl Into<SnapshotDiffError>) -> Self {
        Self {
            path: path.to_owned(),
            source: source.into(),
        }
    }
}

/// A full snapshot or a diff on which another diff is based.
#[derive(Debug)]
pub struct BaseSnapshot {
    path: PathBuf,
    machine: SavedMachine,
    memory: File,
    state_crc: u32,
}

impl BaseSnapshot {
    /// Opens a base from the contents of its state file and from its memory file. Errors contain
    /// `path`.
    ///
    /// # Errors
    /// Returns [`SnapshotDiffError::State`] or [`SnapshotDiffError::Memory`] if a file is unusable,
    /// and [`SnapshotDiffError::Runs`] if the ranges of a diff are invalid.
    pub fn new(path: &Path, state: &[u8], memory: File) -> Result<Self, BaseSnapshotError> {
        let failed = |source| BaseSnapshotError::new(path, source);
        let machine = decode(state).map_err(|e| failed(e.into()))?;
        memory::check_size(&memory, &machine.memory).map_err(|e| failed(e.into()))?;
        if let Some(diff) = &machine.memory.base {
            check_runs(diff, machine.memory.bytes).map_err(failed)?;
        }
        let crc = state.last_chunk().copied().unwrap_or_default();
        Ok(Self {
            path: path.to_owned(),
            machine,
            memory,
            state_crc: u32::from_le_bytes(crc),
        })
    }

    /// Returns the checksum that identifies this base in a diff.
    #[must_use]
    pub fn state_crc(&self) -> u32 {
        self.state_crc
    }

    /// Returns the memory ranges that this snapshot itself contains if it is a diff. Empty for a
    /// full snapshot.
    fn runs(&self) -> &[(u64, u64)] {
        self.machine.memory.base.as_ref().map_or(&[], |diff| &diff.runs)
    }
}

/// Base of a diff, with all snapshots on which the base itself depends.
#[derive(Debug)]
pub struct SnapshotBaseChain {
    full: BaseSnapshot,
    /// The diffs from the lowest to the highest. The first is based on the full snapshot, and each
    /// further one on its predecessor.
    diffs: Vec<BaseSnapshot>,
}

impl SnapshotBaseChain {
    /// Finds the base with checksum `need`, and the snapshots on which that base depends, in
    /// `given`, which may be in any order. Errors contain `diff`, the path of the snapshot that is
    /// based on them.
    ///
    /// # Errors
    /// Returns [`SnapshotDiffError::MissingBase`], [`SnapshotDiffError::OtherBase`] or
    /// [`SnapshotDiffError::Unneeded`] if `given` does not consist of exactly the required
    /// snapshots, [`SnapshotDiffError::TooManyDiffs`] if there are more than [`MAX_DIFFS`] diffs
    /// including `diff`, and [`SnapshotDiffError::OtherMachine`] if their memory sizes differ.
    pub fn new(diff: &Path, need: u32, mut given: Vec<BaseSnapshot>) -> Result<Self, BaseSnapshotError> {
        let mut diffs: Vec<BaseSnapshot> = Vec::new();
        let (mut above, mut need) = (diff.to_owned(), need);
        let full = loop {
            if diffs.len() >= MAX_DIFFS {
                return Err(BaseSnapshotError::new(&above, SnapshotDiffError::TooManyDiffs));
            }
            let Some(at) = given.iter().position(|base| base.state_crc == need) else {
                return Err(match given.first() {
                    None => BaseSnapshotError::new(&above, SnapshotDiffError::MissingBase(need)),
                    Some(other) => {
                        let have = other.state_crc;
                        BaseSnapshotError::new(&other.path, SnapshotDiffError::OtherBase { have, need })
                    }
                });
            };
            let base = given.remove(at);
            let Some(below) = &base.machine.memory.base else {
                break base;
            };
            (above, need) = (base.path.clone(), below.state_crc);
            diffs.push(base);
        };
        if let Some(other) = given.first() {
            return Err(BaseSnapshotError::new(&other.path, SnapshotDiffError::Unneeded));
        }
        let bytes = full.machine.memory.bytes;
        if let Some(other) = diffs.iter().find(|diff| diff.machine.memory.bytes != bytes) {
            return Err(BaseSnapshotError::new(
                &other.path,
                SnapshotDiffError::OtherMachine,
            ));
        }
        diffs.reverse();
        Ok(Self { full, diffs })
    }

    /// Returns the last snapshot of the chain, on which a new diff would be based.
    fn top(&self) -> &BaseSnapshot {
        self.diffs.last().unwrap_or(&self.full)
    }

    /// Returns the size of guest memory in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.full.machine.memory.bytes
    }

    /// Returns the memory file of the full snapshot.
    #[must_use]
    pub fn full_memory(&self) -> &File {
        &self.full.memory
    }

    /// Returns the memory file and the ranges of each diff, from the lowest to the highest.
    pub fn layers(&self) -> impl Iterator<Item = (&File, &[(u64, u64)])> {
        self.diffs.iter().map(|diff| (&diff.memory, diff.runs()))
    }

    /// Verifies the checksums of all memory in the chain.
    ///
    /// # Errors
    /// Returns [`SnapshotDiffError::Memory`] for the lowest snapshot that cannot be read or is
    /// damaged.
    pub fn verify(&self) -> Result<(), BaseSnapshotError> {
        let full = &self.full;
        memory::verify(&full.memory, &full.machine.memory)
            .map_err(|e| BaseSnapshotError::new(&full.path, e))?;
        let mut below = &full.machine.memory;
        for (number, diff) in self.diffs.iter().enumerate() {
            let layers: Vec<_> = self.layers().take(number + 1).collect();
            let memory = &diff.machine.memory;
            verify_above(below, memory, &full.memory, &layers)
                .map_err(|e| BaseSnapshotError::new(&diff.path, e))?;
            below = memory;
        }
        Ok(())
    }

    /// Verifies the checksums `memory` of a diff on top of this base. The base must already be
    /// verified. `file` is the memory file of the diff, and only the ranges in `diff` are read from
    /// it.
    ///
    /// # Errors
    /// Returns [`MemoryFileError`] if a file cannot be read or a chunk does not match.
    pub fn verify_diff(
        &self,
        file: &File,
        diff: &SavedDiffBase,
        memory: &SavedMemoryFile,
    ) -> Result<(), MemoryFileError> {
        let layers: Vec<_> = self.layers().chain([(file, &*diff.runs)]).collect();
        let below = &self.top().machine.memory;
        verify_above(below, memory, &self.full.memory, &layers)
    }

    /// Returns whether the whole of `range` is a hole in the memory file of the full snapshot and
    /// overlaps no range of a diff.
    fn is_hole(&self, range: Range<u64>) -> bool {
        // ENXIO: the file has no more data after this offset.
        let is_hole = match seek(&self.full.memory, SeekFrom::Data(range.start)) {
            Ok(data) => data >= range.end,
            Err(Errno::NXIO) => true,
            Err(_) => false,
        };
        is_hole && !self.layers().any(|(_, runs)| overlaps(runs, &range))
    }

    fn read(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        let layers: Vec<_> = self.layers().collect();
        read(&self.full.memory, &layers, buffer, at)
    }
}

/// Creates a diff by comparing the memory of a VM with a base.
#[derive(Debug)]
pub struct SnapshotDiffWriter {
    base: SnapshotBaseChain,
    runs: Vec<(u64, u64)>,
    next: u64,
    buffer: Vec<u8>,
    /// Checksum of a chunk of zeros, computed once.
    zeros_crc: Option<u32>,
}

impl SnapshotDiffWriter {
    /// Creates a writer that compares the memory of a VM, of `memory_bytes` bytes, with `base`.
    ///
    /// # Errors
    /// Returns [`SnapshotDiffError::OtherMachine`] if the memory size of the base differs.
    pub fn new(base: SnapshotBaseChain, memory_bytes: u64) -> Result<Self, SnapshotDiffError> {
        if base.memory_bytes() != memory_bytes {
            return Err(SnapshotDiffError::OtherMachine);
        }
        Ok(Self {
            base,
            runs: Vec::new(),
            next: 0,
            buffer: Vec::new(),
            zeros_crc: None,
        })
    }

    /// Compares the chunk at `offset`, which the caller knows to be zeros, without reading the
    /// base. If the base has a hole there, the chunk is unchanged: advances to the next chunk and
    /// returns `true`. Otherwise does not advance and returns `false`.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`SnapshotDiffWriter::compare`].
    pub fn skip_hole(&mut self, offset: u64) -> Result<bool, SnapshotDiffError> {
        let end = offset.saturating_add(CHUNK_BYTES);
        if offset != self.next || end > self.base.memory_bytes() {
            return Ok(false);
        }
        let is_hole = self.base.is_hole(offset..end);
        if is_hole {
            let zeros = || checksum(&vec![0; usize::try_from(CHUNK_BYTES).unwrap_or(0)]);
            let zeros = *self.zeros_crc.get_or_insert_with(zeros);
            self.check_crc(offset, CHUNK_BYTES, zeros)?;
            self.next = end;
        }
        Ok(is_hole)
    }

    /// Checks that `crc` is the checksum that the base has stored for its chunk at `offset`.
    fn check_crc(&self, offset: u64, len: u64, crc: u32) -> Result<(), SnapshotDiffError> {
        let chunk = usize::try_from(offset / CHUNK_BYTES).unwrap_or(usize::MAX);
        if self.base.top().machine.memory.crcs.get(chunk) == Some(&crc) {
            return Ok(());
        }
        let (start, end) = (offset, offset + len);
        Err(MemoryFileError::Damaged { start, end }.into())
    }

    /// Compares the chunk at `offset`, and returns the ranges of it that belong in the diff.
    ///
    /// # Errors
    /// Returns [`SnapshotDiffError::Order`] unless `data` is the next chunk, and
    /// [`SnapshotDiffError::Memory`] if the base cannot be read or is damaged.
    pub fn compare(&mut self, offset: u64, data: &[u8]) -> Result<Vec<Range<usize>>, SnapshotDiffError> {
        let bytes = self.base.memory_bytes();
        let len = CHUNK_BYTES.min(bytes.saturating_sub(offset));
        if offset != self.next || len == 0 || data.len() as u64 != len {
            return Err(SnapshotDiffError::Order);
        }
        self.next += len;
        self.buffer.resize(data.len(), 0);
        let read = self.base.read(&mut self.buffer, offset);
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

    /// Returns the state file of the diff, derived from the state file of the VM, and the number of
    /// bytes in its ranges.
    ///
    /// # Errors
    /// Returns [`SnapshotDiffError::Order`] if the end of memory has not been reached,
    /// [`SnapshotDiffError::OtherMachine`] if the base belongs to a different VM, and
    /// [`SnapshotDiffError::State`] if the state is invalid or too large.
    pub fn finish(self, state: &[u8]) -> Result<(Vec<u8>, u64), SnapshotDiffError> {
        let mut machine = decode(state)?;
        let base = &self.base.top().machine;
        if self.next != base.memory.bytes || machine.memory.bytes != self.next {
            return Err(SnapshotDiffError::Order);
        }
        if machine.shape.pmu != base.shape.pmu
            || machine.shape.max_vcpus != base.shape.max_vcpus
            || machine.kernel.format != base.kernel.format
        {
            return Err(SnapshotDiffError::OtherMachine);
        }
        let changed = self.runs.iter().map(|(_, bytes)| bytes).sum();
        machine.memory.base = Some(SavedDiffBase {
            state_crc: self.base.top().state_crc,
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
/// Returns [`SnapshotDiffError::Runs`] if they are unsorted, empty, not of whole pages, too many,
/// or beyond the end of memory.
pub fn check_runs(base: &SavedDiffBase, memory_bytes: u64) -> Result<(), SnapshotDiffError> {
    let is_aligned = |value: u64| value.is_multiple_of(PAGE_BYTES as u64);
    let mut end = 0;
    let fits = base.runs.iter().all(|&(start, len)| {
        let fits = start >= end && len > 0 && is_aligned(start) && is_aligned(len);
        end = start.saturating_add(len);
        fits && end <= memory_bytes
    });
    (fits && base.runs.len() <= MAX_RUNS)
        .then_some(())
        .ok_or(SnapshotDiffError::Runs)
}

/// Verifies the checksums `memory` of the last of `layers`, a diff, on top of the already verified
/// memory `below`. Only chunks that may differ from `below` are read: those that overlap a range of
/// the diff and those whose checksums differ.
fn verify_above(
    below: &SavedMemoryFile,
    memory: &SavedMemoryFile,
    full: &File,
    layers: &[(&File, &[(u64, u64)])],
) -> Result<(), MemoryFileError> {
    let runs = layers.last().map_or(&[][..], |(_, runs)| *runs);
    let is_verified = |chunk: usize, range: &Range<u64>| {
        below.crcs.get(chunk) == memory.crcs.get(chunk) && !overlaps(runs, range)
    };
    memory::verify_by(memory, is_verified, |buffer, at| read(full, layers, buffer, at))
}

/// Returns those of a diff's ranges `runs` that overlap `range`.
fn within<'a>(runs: &'a [(u64, u64)], range: &Range<u64>) -> impl Iterator<Item = (u64, u64)> + 'a {
    let Range { start: from, end } = *range;
    let first = runs.partition_point(|(start, len)| start + len <= from);
    runs[first..]
        .iter()
        .copied()
        .take_while(move |(start, _)| *start < end)
}

fn overlaps(runs: &[(u64, u64)], range: &Range<u64>) -> bool {
    within(runs, range).next().is_some()
}

/// Reads guest memory at offset `at` into `buffer`. The contents come from the highest layer with a
/// range there, and otherwise from `full`.
fn read(full: &File, layers: &[(&File, &[(u64, u64)])], buffer: &mut [u8], at: u64) -> io::Result<()> {
    full.read_exact_at(buffer, at)?;
    let end = at + buffer.len() as u64;
    for (file, runs) in layers {
        for (start, len) in within(runs, &(at..end)) {
            let (from, to) = (at.max(start), end.min(start + len));
            let range = usize::try_from(from - at).unwrap_or(0)..usize::try_from(to - at).unwrap_or(0);
            file.read_exact_at(&mut buffer[range], from)?;
        }
    }
    Ok(())
}
