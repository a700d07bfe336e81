//! Releases pages of guest memory to the host.
//!
//! | memory | call |
//! |---|---|
//! | private anonymous | `madvise(MADV_DONTNEED)` |
//! | shared with vhost-user back ends (memfd) | `madvise(MADV_REMOVE)`, which punches a hole in the file |
//! | private mapping of a snapshot's memory file | the pages are replaced with anonymous memory |
//!
//! In a private mapping of a file, `MADV_DONTNEED` would restore the file's contents. The next
//! snapshot would contain them, and a later access would read them from disk.
//!
//! A released page reads as zeros and is allocated again when it is accessed. The guest can release
//! any page of its RAM, including those with its virtqueues. The effect is the same as if the guest
//! had written zeros, so the VMM needs no list of pages to protect.
#![expect(unsafe_code, reason = "madvise(2), mmap(2)")]

use std::collections::BTreeMap;
use std::io;

use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

use super::pages::PageRange;

/// Maximum number of mappings that replacing pages of a snapshot's memory file may add to the
/// process. The kernel allows 65,530 mappings per process by default (`vm.max_map_count`).
const MAX_MAPPINGS: usize = 16 << 10;

/// Origin of the guest's RAM, which determines how its pages are released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RamOrigin {
    /// New memory, filled with zeros.
    Empty,
    /// Private mapping of a snapshot's memory file.
    Snapshot,
}

/// Releases pages of guest memory to the host.
#[derive(Debug)]
pub struct PageReleaser {
    origin: RamOrigin,
    replaced: ReplacedRanges,
}

impl PageReleaser {
    /// Creates a releaser of pages for RAM of the given origin.
    pub fn new(origin: RamOrigin) -> Self {
        Self {
            origin,
            replaced: ReplacedRanges::default(),
        }
    }

    /// Releases the part of `range` that is RAM to the host. Returns the number of bytes released.
    ///
    /// # Errors
    /// Returns the error of the host's kernel. Part of the range may have been released.
    pub fn release(&mut self, memory: &GuestMemoryMmap, range: PageRange) -> io::Result<u64> {
        let end = range.start.0.saturating_add(range.bytes);
        let mut released = 0;
        for region in memory.iter() {
            let first = region.start_addr().raw_value();
            let (start, end) = (range.start.0.max(first), end.min(first + region.len()));
            if start < end {
                self.release_in(region, start, end)?;
                released += end - start;
            }
        }
        Ok(released)
    }

    /// Releases the guest-physical addresses from `start` to `end`, which are in `region`, to the
    /// host.
    fn release_in(&mut self, region: &GuestRegionMmap, start: u64, end: u64) -> io::Result<()> {
        if region.flags() & libc::MAP_SHARED != 0 {
            return advise(region, start, end, libc::MADV_REMOVE);
        }
        if self.origin == RamOrigin::Snapshot
            && !self.replaced.contains(start, end)
            && self.replaced.has_room(start, end)
            && replace(region, start, end).is_ok()
        {
            self.replaced.insert(start, end);
            return Ok(());
        }
        // If the pages cannot be replaced, free them nevertheless, although the file's contents
        // then reappear in them.
        advise(region, start, end, libc::MADV_DONTNEED)
    }
}

/// Returns the host address of the guest-physical address `start` in `region`, and the number of
/// bytes up to `end`.
#[expect(clippy::cast_possible_truncation, reason = "x86-64 only: usize has 64 bits")]
fn host_range(region: &GuestRegionMmap, start: u64, end: u64) -> (*mut libc::c_void, usize) {
    let first = region.start_addr().raw_value();
    debug_assert!(start >= first && end <= first + region.len() && start < end);
    let address = region.as_ptr().wrapping_add((start - first) as usize);
    (address.cast(), (end - start) as usize)
}

fn advise(region: &GuestRegionMmap, start: u64, end: u64, advice: libc::c_int) -> io::Result<()> {
    let (address, len) = host_range(region, start, end);
    // SAFETY: the range is part of a mapping of guest memory, without Rust references. The advice
    // values used here unmap nothing; the pages read as zeros, or as the contents of the file.
    match unsafe { libc::madvise(address, len, advice) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Replaces a range of a private file mapping with anonymous memory. The range then reads as zeros.
fn replace(region: &GuestRegionMmap, start: u64, end: u64) -> io::Result<()> {
    let (address, len) = host_range(region, start, end);
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: the range is part of a mapping of guest memory, without Rust references, and the new
    // mapping replaces it atomically. The owner unmaps the whole range as before.
    if unsafe { libc::mmap(address, len, prot, flags, -1, 0) } == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // Guest memory is mapped with MADV_DONTDUMP. A mapping without it would not merge with its
    // neighbours.
    let _ = advise(region, start, end, libc::MADV_DONTDUMP);
    Ok(())
}

/// Ranges of a snapshot's memory file mapping that have been replaced with anonymous memory.
///
/// Each isolated range adds two mappings to the process. Without a limit on their number, a hostile
/// guest could release every second page until the process has no mappings left for its own memory.
#[derive(Debug, Default)]
struct ReplacedRanges {
    /// Replaced ranges, as end address by start address. Adjacent ranges are merged.
    ranges: BTreeMap<u64, u64>,
    /// Upper bound of the number of mappings that the replaced ranges have added to the process.
    ///
    /// The kernel merges a new anonymous mapping with at least one anonymous neighbor. If both
    /// neighbors have been written, it does not merge them with each other.
    mappings: usize,
}

impl ReplacedRanges {
    fn contains(&self, start: u64, end: u64) -> bool {
        let before = self.ranges.range(..=start).next_back();
        before.is_some_and(|(_, last)| *last >= end)
    }

    /// Returns the start addresses of the replaced ranges that overlap or adjoin the range from
    /// `start` to `end`.
    fn touching(&self, start: u64, end: u64) -> impl Iterator<Item = u64> {
        let below = self.ranges.range(..=end).rev();
        below
            .take_while(move |(_, last)| **last >= start)
            .map(|(first, _)| *first)
    }

    fn has_room(&self, start: u64, end: u64) -> bool {
        self.mappings < MAX_MAPPINGS || self.touching(start, end).next().is_some()
    }

    fn insert(&mut self, start: u64, end: u64) {
        let touching: Vec<u64> = self.touching(start, end).collect();
        if touching.is_empty() {
            self.mappings += 2;
        }
        let (mut first, mut last) = (start, end);
        for start in touching {
            first = first.min(start);
            last = last.max(self.ranges.remove(&start).unwrap_or(last));
        }
        self.ranges.insert(first, last);
    }
}

#[cfg(test)]
mod tests;
