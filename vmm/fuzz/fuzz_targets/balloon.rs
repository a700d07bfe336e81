//! Fuzzes the balloon's queues with a hostile guest. Processing of each descriptor chain must
//! terminate, page ranges in requests must be whole pages within bounds, and only RAM may be
//! released.
//!
//! Input: guest memory from address 0, with descriptors at 0x100 and the available ring at 0x1100.
//! Bits 1 and 2 of the first byte select the queue.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use virtio_devices::balloon::pages::{
    InflatedPages, MAX_CHAIN_BUFFERS, MAX_CHAIN_PAGES, PAGE_BYTES, PageRange, reported_ranges,
};
use virtio_devices::balloon::release::{PageReleaser, RamOrigin};
use virtio_devices::balloon::statistics::GuestMemoryStatistics;
use virtio_devices::device::{ActiveQueue, DeviceInterrupt};
use virtio_devices::serve::serve_queue;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const MEMORY_BYTES: usize = 1 << 18;

fuzz_target!(|data: &[u8]| {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).expect("memory");
    let data = &data[..data.len().min(MEMORY_BYTES)];
    memory.write_slice(data, GuestAddress(0)).expect("it fits");
    let first = data.first().copied().unwrap_or(0);
    let mut queue = Queue::new(128).expect("a size");
    queue.set_desc_table_address(Some(0x100), None);
    queue.set_avail_ring_address(Some(0x1100), None);
    queue.set_used_ring_address(Some(0x2000), None);
    queue.set_event_idx(first & 1 != 0);
    queue.set_ready(true);
    let mut active = ActiveQueue {
        queue,
        kick: Arc::new(EventFd::new(EFD_NONBLOCK).expect("eventfd")),
        interrupt: DeviceInterrupt::default(),
    };
    let (mut inflated, mut releaser) = (InflatedPages::default(), PageReleaser::new(RamOrigin::Empty));
    let mut release = |range: PageRange| {
        assert!(range.start.0 % PAGE_BYTES == 0 && range.bytes % PAGE_BYTES == 0 && range.bytes > 0);
        let released = releaser.release(&memory, range).expect("madvise");
        assert!(released <= range.bytes.min(MEMORY_BYTES as u64));
    };
    let mut served = 0;
    let _ = serve_queue(&mut active, &memory, |chain| {
        served += 1;
        match first >> 1 & 3 {
            0 | 1 => {
                let ranges: Vec<_> = inflated.read(&memory, chain).collect();
                let pages: u64 = ranges.iter().map(|range| range.bytes / PAGE_BYTES).sum();
                assert!(pages <= MAX_CHAIN_PAGES as u64);
                assert!(ranges.is_sorted_by(|a, b| a.start.0 + a.bytes < b.start.0));
                ranges.into_iter().for_each(&mut release);
            }
            2 => {
                let ranges: Vec<_> = reported_ranges(chain).collect();
                assert!(ranges.len() <= MAX_CHAIN_BUFFERS);
                ranges.into_iter().for_each(&mut release);
            }
            _ => {
                let _ = GuestMemoryStatistics::read(&memory, chain);
            }
        }
        0
    });
    assert!(served <= 128, "one round has at most the queue's size");
});
