//! Fuzzes disk requests from a hostile guest. The device may access only the disk and guest memory,
//! and must complete each request.
//!
//! Input: guest memory from address 0, with descriptors at 0x100 and the available ring at 0x1100.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use virtio_devices::device::{ActiveQueue, DeviceInterrupt};
use virtio_devices::disk::config::DiskConfig;
use virtio_devices::disk::image::DiskImage;
use virtio_devices::disk::request::DiskBackend;
use virtio_devices::serve::serve_queue;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const MEMORY_BYTES: usize = 1 << 18;

fn image() -> Arc<DiskImage> {
    let path = std::env::temp_dir().join(format!("perfvisor-fuzz-disk-{}", std::process::id()));
    std::fs::write(&path, [0x5A; 32 * 512]).expect("a file in the temporary directory");
    let image = DiskImage::open(&DiskConfig::raw(&path)).expect("it is a disk");
    // The image keeps the file open, so the device can still access it.
    let _ = std::fs::remove_file(&path);
    Arc::new(image)
}

fuzz_target!(|data: &[u8]| {
    thread_local!(static IMAGE: Arc<DiskImage> = image());
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).expect("memory");
    let data = &data[..data.len().min(MEMORY_BYTES)];
    memory.write_slice(data, GuestAddress(0)).expect("it fits");
    let mut queue = Queue::new(256).expect("a size");
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
    let disk = DiskBackend {
        image: IMAGE.with(Arc::clone),
        serial: [0x41; 20],
        write_through: false,
    };
    let mut served = 0;
    let _ = serve_queue(&mut active, &memory, |chain| {
        served += 1;
        disk.serve(&memory, chain).written
    });
    assert!(served <= 256, "one round has at most the queue's size");
});
