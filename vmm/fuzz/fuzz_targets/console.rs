//! Fuzzes the virtio console queues with a hostile guest. Each round must complete, output must be
//! bounded, and input may be written only to guest memory.
//!
//! Input: guest memory from address 0, with descriptors at 0x100 and the available ring at 0x1100.
//! Bit 1 of the first byte selects the queue.
#![no_main]

use std::io::{self, Write};
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use virtio_devices::console::port::ConsolePort;
use virtio_devices::console::queues::{MAX_OUTPUT_BYTES, ConsoleQueues};
use virtio_devices::device::{ActiveQueue, DeviceInterrupt};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const MEMORY_BYTES: usize = 1 << 18;
const QUEUE_SIZE: u16 = 256;

struct Counts(usize);

impl Write for Counts {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn queue(event_idx: bool) -> ActiveQueue {
    let mut queue = Queue::new(QUEUE_SIZE).expect("a size");
    queue.set_desc_table_address(Some(0x100), None);
    queue.set_avail_ring_address(Some(0x1100), None);
    queue.set_used_ring_address(Some(0x2000), None);
    queue.set_event_idx(event_idx);
    queue.set_ready(true);
    ActiveQueue {
        queue,
        kick: Arc::new(EventFd::new(EFD_NONBLOCK).expect("eventfd")),
        interrupt: DeviceInterrupt::default(),
    }
}

fuzz_target!(|data: &[u8]| {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).expect("memory");
    let data = &data[..data.len().min(MEMORY_BYTES)];
    memory.write_slice(data, GuestAddress(0)).expect("it fits");
    let first = data.first().copied().unwrap_or(0);
    let mut queues = ConsoleQueues {
        input: queue(first & 1 != 0),
        output: queue(first & 1 != 0),
    };
    if first & 2 == 0 {
        let mut counts = Counts(0);
        let _ = queues.serve_output(&memory, &mut counts);
        assert!(counts.0 <= usize::from(QUEUE_SIZE) * MAX_OUTPUT_BYTES);
    } else {
        let port = ConsolePort::new(None).expect("eventfds");
        let sent = port.send(&[0x69; 1000]);
        let _ = queues.serve_input(&memory, &port);
        assert_eq!(sent, 1000);
    }
});
