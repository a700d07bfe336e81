//! Fuzzes entropy requests from a hostile guest. Each request must complete and write a bounded
//! number of bytes within guest memory.
//!
//! Input: guest memory from address 0, with descriptors at 0x100 and the available ring at 0x1100.
#![no_main]

use std::fs::File;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use virtio_devices::device::{ActiveQueue, DeviceInterrupt};
use virtio_devices::rng::{MAX_CHAIN_BYTES, fill};
use virtio_devices::serve::serve_queue;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const MEMORY_BYTES: usize = 1 << 16;

fuzz_target!(|data: &[u8]| {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).expect("memory");
    let data = &data[..data.len().min(MEMORY_BYTES)];
    memory.write_slice(data, GuestAddress(0)).expect("it fits");
    let mut queue = Queue::new(16).expect("a size");
    queue.set_desc_table_address(Some(0x100), None);
    queue.set_avail_ring_address(Some(0x1100), None);
    queue.set_used_ring_address(Some(0x2000), None);
    queue.set_event_idx(data.first().is_some_and(|byte| byte & 1 != 0));
    queue.set_ready(true);
    let mut active = ActiveQueue {
        queue,
        kick: Arc::new(EventFd::new(EFD_NONBLOCK).expect("eventfd")),
        interrupt: DeviceInterrupt::default(),
    };
    let mut source = File::open("/dev/zero").expect("/dev/zero");
    let mut served = 0;
    let _ = serve_queue(&mut active, &memory, |chain| {
        served += 1;
        let count = fill(&mut source, &memory, chain);
        assert!(count as usize <= MAX_CHAIN_BYTES);
        count
    });
    assert!(served <= 16, "one round has at most the queue's size");
});
