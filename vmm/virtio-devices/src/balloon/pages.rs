//! Parses the pages that the driver gives to the device: page frame numbers in the inflate queue,
//! and buffers in the reporting queue.

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::serve::GuestDescriptorChain;

/// Size of a page of the balloon in bytes, on every architecture (virtio 1.2, 5.5.6).
pub const PAGE_BYTES: u64 = 4096;
/// Maximum number of page frame numbers read from one descriptor chain. Further pages are not
/// released. Linux sends at most 256, Windows 1024.
pub const MAX_CHAIN_PAGES: usize = 4096;
/// Maximum number of buffers processed in one descriptor chain of the reporting queue. Linux sends
/// at most 32.
pub const MAX_CHAIN_BUFFERS: usize = 256;

/// A range of guest-physical addresses in whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRange {
    /// First guest-physical address of the range.
    pub start: GuestAddress,
    /// Length of the range, in bytes.
    pub bytes: u64,
}

/// A reusable buffer for the page frame numbers of a descriptor chain in the inflate queue.
#[derive(Debug, Default)]
pub struct InflatedPages(Vec<u32>);

impl InflatedPages {
    /// Reads the page frame numbers in a descriptor chain and merges them into ascending ranges
    /// without overlaps. The untrusted numbers may be repeated, unordered or outside guest RAM.
    pub fn read(
        &mut self,
        memory: &GuestMemoryMmap,
        chain: GuestDescriptorChain<'_>,
    ) -> impl Iterator<Item = PageRange> {
        let mut bytes = [0; MAX_CHAIN_PAGES * size_of::<u32>()];
        self.0.clear();
        for buffer in chain.readable() {
            let count = (MAX_CHAIN_PAGES - self.0.len()).min(buffer.len() as usize / size_of::<u32>());
            let start = self.0.len();
            self.0.resize(start + count, 0);
            let bytes = &mut bytes[..count * size_of::<u32>()];
            if memory.read_slice(bytes, buffer.addr()).is_err() {
                // The buffer is outside guest RAM, which is a driver error.
                self.0.truncate(start);
                break;
            }
            for (pfn, bytes) in self.0[start..].iter_mut().zip(bytes.as_chunks().0) {
                *pfn = u32::from_le_bytes(*bytes);
            }
            if self.0.len() == MAX_CHAIN_PAGES {
                break;
            }
        }
        self.0.sort_unstable();
        self.0.dedup();
        self.0.chunk_by(|a, b| a + 1 == *b).map(|run| PageRange {
            start: GuestAddress(u64::from(run[0]) * PAGE_BYTES),
            bytes: run.len() as u64 * PAGE_BYTES,
        })
    }
}

/// Returns the ranges of whole pages in the buffers of a reporting queue chain, in chain order.
pub fn reported_ranges(chain: GuestDescriptorChain<'_>) -> impl Iterator<Item = PageRange> {
    let buffers = chain.writable().take(MAX_CHAIN_BUFFERS);
    buffers.filter_map(|buffer| {
        let start = buffer.addr().0.checked_next_multiple_of(PAGE_BYTES)?;
        let end = buffer.addr().0.checked_add(buffer.len().into())?;
        let bytes = end.checked_sub(start)? / PAGE_BYTES * PAGE_BYTES;
        (bytes > 0).then_some(PageRange {
            start: GuestAddress(start),
            bytes,
        })
    })
}
