//! Fuzzes the queues of a vsock device with arbitrary rings, descriptors and packets.
#![no_main]

use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::OnceLock;
use std::time::Instant;

use libfuzzer_sys::fuzz_target;
use virtio_devices::device::{ActiveQueue, DeviceInterrupt};
use virtio_devices::vsock::muxer::ConnectionMuxer;
use virtio_devices::vsock::queues::{FIRST_TOKEN, VsockQueues};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::timerfd::TimerFd;

const MEMORY: usize = 0x1_0000;
const ENTRIES: u16 = 16;

/// Returns a queue whose descriptor table is at guest address `at`, followed by the available ring
/// and the used ring.
fn queue(at: u32) -> ActiveQueue {
    let mut queue = Queue::new(ENTRIES).unwrap();
    queue.set_size(ENTRIES);
    queue.set_desc_table_address(Some(at), Some(0));
    queue.set_avail_ring_address(Some(at + 0x100), Some(0));
    queue.set_used_ring_address(Some(at + 0x200), Some(0));
    queue.set_ready(true);
    ActiveQueue {
        queue,
        kick: Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()),
        interrupt: DeviceInterrupt::default(),
    }
}

fuzz_target!(|data: &[u8]| {
    static LISTENER: OnceLock<Arc<UnixListener>> = OnceLock::new();
    let path = std::env::temp_dir().join(format!("vsock-fuzz-{}", std::process::id()));
    let listener = LISTENER.get_or_init(|| {
        let listener = UnixListener::bind(&path).unwrap();
        let _ = std::fs::remove_file(&path);
        Arc::new(listener)
    });
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
    let muxer = ConnectionMuxer::new(3, path, FIRST_TOKEN);
    let timer = TimerFd::new().unwrap();
    let mut queues = VsockQueues::new(memory.clone(), queue(0x1000), queue(0x2000), listener.clone(), muxer, timer);
    // Model a guest that modifies its memory while the device is running.
    for piece in data.chunks(0x2000) {
        memory.write_slice(piece, GuestAddress(0x1000)).unwrap();
        queues.pump(Instant::now());
    }
});
