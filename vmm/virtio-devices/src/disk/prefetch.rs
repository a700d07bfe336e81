//! Prefetches the data of queued reads, so that the host's disk processes them in parallel although
//! the disk's thread executes one request at a time.

use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::GuestMemoryMmap;

use super::request::DiskBackend;

/// Look-ahead in the queue of a disk.
///
/// After a read that had to wait for the host's disk, the host is asked to load the data of all
/// reads in the queue to its page cache.
pub(super) struct ReadPrefetcher {
    /// The queue of the disk, with the position of the next chain to look at. No chain is taken
    /// from it.
    queue: Queue,
    /// Position of the next chain that the disk's thread takes.
    taken: u16,
    /// `true` if the last request had to wait for the host's disk.
    missed: bool,
}

impl ReadPrefetcher {
    /// Creates a look-ahead in `queue`, or returns `None` if the queue is invalid.
    pub(super) fn new(queue: &Queue) -> Option<Self> {
        Some(Self {
            queue: Queue::try_from(queue.state()).ok()?,
            taken: queue.next_avail(),
            missed: false,
        })
    }

    /// Must be called for each chain that is taken from the queue, before it is executed. Calls
    /// `prefetch` with the byte offset and the length of the data of each read to prefetch.
    pub(super) fn before_request(
        &mut self,
        disk: &DiskBackend,
        memory: &GuestMemoryMmap,
        mut prefetch: impl FnMut(u64, u64),
    ) {
        self.taken = self.taken.wrapping_add(1);
        if !self.missed {
            return;
        }
        // The position is behind if requests did not miss the page cache meanwhile.
        if self.queue.next_avail().wrapping_sub(self.taken) > self.queue.size() {
            self.queue.set_next_avail(self.taken);
        }
        // The iterator is limited to the size of the queue. The device's own iterator reports
        // invalid rings.
        for chain in self.queue.iter(memory).into_iter().flatten() {
            if let Some((at, bytes)) = disk.prefetched_range(memory, chain) {
                prefetch(at, bytes);
            }
        }
    }

    /// Must be called after each request. `missed` is `true` if it had to wait for the host's disk.
    pub(super) fn after_request(&mut self, missed: bool) {
        self.missed = missed;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
    use virtio_queue::desc::split::Descriptor;
    use vm_memory::{Bytes, GuestAddress};

    use super::super::config::{DiskConfig, MAX_SERIAL};
    use super::super::image::DiskImage;
    use super::*;
    use crate::serve::testing::{BUFFERS, Driver, HOSTILE, memory};

    const DISK_BYTES: u64 = 1 << 20;
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;

    /// Offers a request of `kind` for 4 KiB at `n` times 4 KiB.
    fn offer(driver: &mut Driver<'_>, memory: &GuestMemoryMmap, head: u16, kind: u32, n: u64) {
        let header = BUFFERS + 16 * n;
        memory.write_obj(kind, GuestAddress(header)).unwrap();
        memory.write_obj(n * 8, GuestAddress(header + 8)).unwrap();
        let chain = [
            Descriptor::new(header, 16, NEXT, head + 1),
            Descriptor::new(BUFFERS + 0x1000, 4097, WRITE, 0),
        ];
        driver.offer_chain(head, &chain);
    }

    /// After a miss, the data of all queued reads is prefetched, once. Writes and hostile chains are
    /// ignored. Without a miss, nothing is prefetched.
    #[test]
    fn queued_reads_are_prefetched_after_a_miss() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(DISK_BYTES).unwrap();
        let memory = memory();
        let disk = DiskBackend {
            image: Arc::new(DiskImage::open(&DiskConfig::raw(file.path())).unwrap()),
            serial: [0; MAX_SERIAL],
            write_through: false,
        };
        let mut driver = Driver::new(&memory, 256);
        driver.offer_hostile(0);
        for (n, kind) in (0..).zip([VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_IN]) {
            offer(&mut driver, &memory, HOSTILE + 2 * n, kind, u64::from(n) + 1);
        }
        let mut prefetcher = ReadPrefetcher::new(&driver.active.queue).unwrap();
        let mut ranges_after = |missed| {
            let mut ranges = Vec::new();
            prefetcher.after_request(missed);
            prefetcher.before_request(&disk, &memory, |at, bytes| ranges.push((at, bytes)));
            ranges
        };
        assert_eq!(ranges_after(false), []);
        assert_eq!(ranges_after(true), [(4096, 4096), (3 * 4096, 4096)]);
        assert_eq!(ranges_after(true), []);
    }
}
