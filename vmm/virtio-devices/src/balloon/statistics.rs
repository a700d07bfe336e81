//! Memory statistics of the guest (virtio 1.2, 5.5.6.3). All values are reported by the driver and
//! not verified.

use vm_memory::{Bytes, GuestMemoryMmap};

use crate::serve::GuestDescriptorChain;

/// Number of memory statistics that the device knows. Those from [`BalloonStatisticTag::OomKills`]
/// onwards are newer than virtio 1.2.
const STATISTICS: usize = 16;
/// Size of one statistic in the driver's buffer, in bytes: a 16-bit tag and a 64-bit value, both
/// little-endian and unaligned.
const ENTRY_BYTES: usize = 10;
/// Maximum number of bytes read from a descriptor chain of the statistics queue.
const MAX_BYTES: usize = 64 * ENTRY_BYTES;

/// A statistic of the guest's memory. The discriminant is the tag in the driver's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum BalloonStatisticTag {
    /// Memory that the guest has swapped in, in bytes.
    SwapIn,
    /// Memory that the guest has swapped out, in bytes.
    SwapOut,
    /// Number of major page faults.
    MajorFaults,
    /// Number of minor page faults.
    MinorFaults,
    /// Unused memory of the guest, in bytes.
    FreeMemory,
    /// Total memory of the guest, in bytes.
    TotalMemory,
    /// Estimate of the guest's memory that is available without swapping, in bytes.
    AvailableMemory,
    /// Memory of the guest's disk caches that can be dropped without I/O, in bytes.
    DiskCaches,
    /// Number of successful huge page allocations.
    HugetlbAllocations,
    /// Number of failed huge page allocations.
    HugetlbFailures,
    /// Number of guest processes killed for lack of memory.
    OomKills,
    /// Number of memory allocations in the guest that had to wait for memory.
    AllocationStalls,
    /// Memory scanned by background reclaim in the guest, in bytes.
    AsyncScan,
    /// Memory scanned by direct reclaim in the guest, in bytes.
    DirectScan,
    /// Memory reclaimed in the background in the guest, in bytes.
    AsyncReclaim,
    /// Memory reclaimed directly by an allocation in the guest, in bytes.
    DirectReclaim,
}

/// The guest's memory statistics, indexed by [`BalloonStatisticTag`]. `None` for a statistic that
/// the driver has not sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestMemoryStatistics([Option<u64>; STATISTICS]);

impl GuestMemoryStatistics {
    /// Returns the value of the statistic `tag`, or `None` if the driver has not sent it.
    pub fn get(&self, tag: BalloonStatisticTag) -> Option<u64> {
        self.0[tag as usize]
    }

    /// Reads the statistics in a descriptor chain. Ignores unknown tags and uses the last value of
    /// a repeated tag. Stops at a buffer outside guest RAM.
    pub fn read(memory: &GuestMemoryMmap, chain: GuestDescriptorChain<'_>) -> Self {
        let mut bytes = [0; MAX_BYTES];
        let mut filled = 0;
        for buffer in chain.readable() {
            let count = (MAX_BYTES - filled).min(buffer.len() as usize);
            let part = &mut bytes[filled..filled + count];
            if memory.read_slice(part, buffer.addr()).is_err() {
                break;
            }
            filled += count;
            if filled == MAX_BYTES {
                break;
            }
        }
        let mut statistics = Self::default();
        for entry in bytes[..filled].chunks_exact(ENTRY_BYTES) {
            let (tag, value) = entry.split_at(2);
            let tag = tag.try_into().map_or(u16::MAX, u16::from_le_bytes);
            let value = value.try_into().map(u64::from_le_bytes).ok();
            if let Some(place) = statistics.0.get_mut(usize::from(tag)) {
                *place = value;
            }
        }
        statistics
    }
}
