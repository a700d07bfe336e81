//! Finds guest memory that was never touched, without touching it.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use vm_memory::GuestMemoryBackend as _;

use super::GuestRam;

/// Page map of this process (proc_pid_pagemap(5)).
pub(super) const PAGEMAP: &str = "/proc/self/pagemap";
/// Size of a page in bytes.
const PAGE_BYTES: u64 = 4096;
/// Size of an entry of the pagemap in bytes.
pub(super) const ENTRY_BYTES: usize = 8;
/// Bits of a pagemap entry: the page is in RAM (bit 63) or swapped out (bit 62).
pub(super) const EXISTS: u64 = 3 << 62;

/// Finds the pages of guest RAM that were never touched.
#[derive(Debug)]
pub struct TouchedPages {
    /// Page map of this process. `None` if a page that is not in the page table may still have
    /// contents.
    pagemap: Option<File>,
    entries: Vec<u8>,
}

impl TouchedPages {
    /// Opens the page map of this process for `ram`. Without access to it, all memory counts as
    /// touched.
    #[must_use]
    pub fn of(ram: &GuestRam) -> Self {
        Self {
            pagemap: Self::is_known(ram).then(|| File::open(PAGEMAP).ok()).flatten(),
            entries: Vec::new(),
        }
    }

    /// Creates the finder for `ram`, which reads `pagemap`, the open page map of this process.
    pub(super) fn in_file(ram: &GuestRam, pagemap: File) -> Self {
        Self {
            pagemap: Self::is_known(ram).then_some(pagemap),
            entries: Vec::new(),
        }
    }

    /// Returns whether a page of `ram` that is not in the page table is known to be zero. Returns
    /// `false` for shared memory and for the memory file of a snapshot, because such a page has the
    /// contents of the file.
    fn is_known(ram: &GuestRam) -> bool {
        !ram.restored && !ram.kind.shared
    }

    /// Returns whether the `bytes` bytes of `ram` at `offset` are known to be zero, because they
    /// were never touched. The range must start at a page boundary and must not cross the hole
    /// below 4 GiB.
    pub fn is_untouched(&mut self, ram: &GuestRam, offset: u64, bytes: u64) -> bool {
        let Some(pagemap) = &self.pagemap else {
            return false;
        };
        let Ok(address) = ram.memory().get_host_address(ram.address_of(offset)) else {
            return false;
        };
        let pages = usize::try_from(bytes.div_ceil(PAGE_BYTES)).unwrap_or(0);
        self.entries.resize(pages * ENTRY_BYTES, 0);
        let at = address as u64 / PAGE_BYTES * ENTRY_BYTES as u64;
        if pages == 0 || pagemap.read_exact_at(&mut self.entries, at).is_err() {
            return false;
        }
        let (entries, _) = self.entries.as_chunks();
        entries
            .iter()
            .all(|entry| u64::from_le_bytes(*entry) & EXISTS == 0)
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes as _, GuestAddress};

    use super::*;

    #[test]
    fn only_untouched_memory_is_skipped() {
        const CHUNK: u64 = 2 << 20;
        let ram = GuestRam::new(16 << 20).unwrap();
        let mut touched = TouchedPages::of(&ram);
        assert!((0..8).all(|i| touched.is_untouched(&ram, i * CHUNK, CHUNK)));
        // Write the last byte of one chunk, and only read a page of another one.
        ram.memory().write_obj(7u8, GuestAddress(3 * CHUNK - 1)).unwrap();
        let _: u8 = ram.memory().read_obj(GuestAddress(5 * CHUNK)).unwrap();
        let found: Vec<bool> = (0..8)
            .map(|i| touched.is_untouched(&ram, i * CHUNK, CHUNK))
            .collect();
        assert_eq!(found, [true, true, false, true, true, false, true, true]);
        // A range beyond the end of RAM is never reported as untouched.
        assert!(!touched.is_untouched(&ram, 16 << 20, CHUNK));
    }

    /// Memory of a snapshot never counts as untouched, because a page of the file that was not read
    /// yet is not in the page table.
    #[test]
    fn memory_of_a_snapshot_is_never_skipped() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(16 << 20).unwrap();
        let mut ram = GuestRam::new(16 << 20).unwrap();
        ram.map_snapshot(&file).unwrap();
        assert!(!TouchedPages::of(&ram).is_untouched(&ram, 0, 2 << 20));
    }
}
