//! Fuzzes the network device queues with a hostile guest and host frames of any length. The device
//! may access only guest memory and the tap device, and each pass over the queues must terminate.
//!
//! Input: one byte of options, followed by chunks of guest memory, which are written sequentially
//! from 0x1000. The tables of the receive queue begin at 0x1000, and those of the transmit queue at
//! 0x2000.
#![no_main]

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use virtio_devices::net::frames::{NetFrameReceiver, NetFrameTransmitter};
use virtio_devices::net::tap::Tap;
use virtio_devices::rate_limiter::RateLimiter;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const MEMORY: usize = 0x1_0000;
const ENTRIES: u16 = 16;

/// Returns a queue whose descriptor table is at guest address `at`, followed by the available ring
/// and the used ring.
fn queue(at: u32, event_idx: bool) -> Queue {
    let mut queue = Queue::new(ENTRIES).expect("a size");
    queue.set_size(ENTRIES);
    queue.set_desc_table_address(Some(at), Some(0));
    queue.set_avail_ring_address(Some(at + 0x100), Some(0));
    queue.set_used_ring_address(Some(at + 0x200), Some(0));
    queue.set_event_idx(event_idx);
    queue.set_ready(true);
    queue
}

fuzz_target!(|data: &[u8]| {
    let Some((choices, data)) = data.split_first() else {
        return;
    };
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory");
    let (host, ours) = UnixDatagram::pair().expect("a pair of sockets");
    for socket in [&host, &ours] {
        socket.set_nonblocking(true).expect("a socket");
    }
    let tap = Tap::on(OwnedFd::from(ours));
    let event_idx = choices & 1 != 0;
    let limiter = (choices & 4 != 0).then(|| {
        let limits = "bandwidth=10000/1,ops=2/1".parse().expect("limits");
        Arc::new(RateLimiter::new(limits).expect("a timer"))
    });
    let mut receiver =
        NetFrameReceiver::new(queue(0x1000, event_idx), choices & 2 != 0).with_limiter(limiter.clone());
    let mut sender = NetFrameTransmitter::new(queue(0x2000, event_idx)).with_limiter(limiter);
    let (mut receives, mut sends) = (true, true);
    let mut frame = vec![0; 70_000];
    for piece in data.chunks(0x2000) {
        memory.write_slice(piece, GuestAddress(0x1000)).expect("it fits");
        let bytes = usize::from(piece[0]) * 270 + 12;
        let _ = host.send(&frame[..bytes]);
        // The device, too, stops processing a queue after an error.
        receives = receives && receiver.run(&memory, &tap, None).is_ok();
        sends = sends && sender.run(&memory, Some(&tap), None).is_ok();
        while host.recv(&mut frame).is_ok() {}
        frame.fill(piece[0]);
    }
});
