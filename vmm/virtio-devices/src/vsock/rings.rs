//! Tests of the vsock device with valid and invalid rings, and across activation and reset.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Instant;

use virtio_bindings::bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use virtio_queue::mock::MockSplitQueue;
use virtio_queue::{Queue, QueueOwnedT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::timerfd::TimerFd;

use super::muxer::ConnectionMuxer;
use super::packet::{HEADER_BYTES, HOST_CID, MAX_DATA, PacketHeader, STREAM, VsockOp};
use super::queues::{FIRST_TOKEN, VsockQueues};
use super::*;
use crate::device::{ActiveQueue, ConfigChangeNotifier, DeviceInterrupt, FatalErrorCallback};
use crate::serve::testing::Driver;

const CID: u64 = 3;

/// The driver's end of the device: guest memory with two queues, processed without a thread.
struct RingDriver {
    queues: VsockQueues,
    _directory: tempfile::TempDir,
}

const RX_QUEUE: GuestAddress = GuestAddress(0x1000);
const TX_QUEUE: GuestAddress = GuestAddress(0x4000);
const BUFFERS: u64 = 0x10000;

fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x4_0000)]).unwrap()
}

fn active(queue: Queue) -> ActiveQueue {
    ActiveQueue {
        queue,
        kick: Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()),
        interrupt: DeviceInterrupt::new(Some(Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()))),
    }
}

fn driver(memory: &GuestMemoryMmap, rx: Queue, tx: Queue) -> RingDriver {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v");
    let listener = Arc::new(UnixListener::bind(&path).unwrap());
    let queues = VsockQueues::new(
        memory.clone(),
        active(rx),
        active(tx),
        listener,
        ConnectionMuxer::new(CID, path, FIRST_TOKEN),
        TimerFd::new().unwrap(),
    );
    RingDriver {
        queues,
        _directory: directory,
    }
}

fn descriptor(address: u64, len: u32, flags: u32) -> RawDescriptor {
    RawDescriptor::from(Descriptor::new(address, len, u16::try_from(flags).unwrap(), 0))
}

/// Links consecutive descriptors that have the NEXT flag.
fn linked(descriptors: &[RawDescriptor]) -> Vec<RawDescriptor> {
    let numbered = (1..).zip(descriptors);
    let linked = numbered.map(|(next, raw)| {
        let one = Descriptor::from(*raw);
        RawDescriptor::from(Descriptor::new(one.addr().0, one.len(), one.flags(), next))
    });
    linked.collect()
}

/// Writes a packet for an unused port to memory.
fn put_packet(memory: &GuestMemoryMmap, at: u64, len: u32) {
    let mut raw = [0_u8; HEADER_BYTES];
    raw[0..8].copy_from_slice(&CID.to_le_bytes());
    raw[8..16].copy_from_slice(&HOST_CID.to_le_bytes());
    raw[16..20].copy_from_slice(&9_u32.to_le_bytes());
    raw[20..24].copy_from_slice(&5_u32.to_le_bytes());
    raw[24..28].copy_from_slice(&len.to_le_bytes());
    raw[28..30].copy_from_slice(&STREAM.to_le_bytes());
    raw[30..32].copy_from_slice(&(VsockOp::Data as u16).to_le_bytes());
    memory.write_slice(&raw, GuestAddress(at)).unwrap();
}

#[test]
fn packets_pass_through_queues() {
    let memory = memory();
    let rx = MockSplitQueue::create(&memory, RX_QUEUE, 16);
    let tx = MockSplitQueue::create(&memory, TX_QUEUE, 16);
    put_packet(&memory, BUFFERS, 4);
    // Separate descriptors for header and data, as in Linux before 6.2.
    tx.add_desc_chains(
        &linked(&[
            descriptor(BUFFERS, 44, VRING_DESC_F_NEXT),
            descriptor(BUFFERS + 0x100, 4, 0),
        ]),
        0,
    )
    .unwrap();
    rx.add_desc_chains(&[descriptor(BUFFERS + 0x1000, 0x1000, VRING_DESC_F_WRITE)], 0)
        .unwrap();
    let mut driver = driver(&memory, rx.create_queue().unwrap(), tx.create_queue().unwrap());
    driver.queues.pump(Instant::now());
    assert_eq!((rx.used().idx().load(), tx.used().idx().load()), (1, 1));
    let op: u16 = memory.read_obj(GuestAddress(BUFFERS + 0x1000 + 30)).unwrap();
    assert_eq!(op, VsockOp::Reset as u16);
    // No further chain is used, and none is used twice.
    driver.queues.pump(Instant::now());
    assert_eq!((rx.used().idx().load(), tx.used().idx().load()), (1, 1));
}

/// A chain without a complete header is returned as used. A chain with a header but incomplete data
/// also resets its connection, because the stream has lost these bytes.
#[test]
fn broken_chains_reset_connection() {
    let memory = memory();
    let broken: [(&[RawDescriptor], u16); 6] = [
        // Too short, outside memory, and device-writable.
        (&[descriptor(BUFFERS, 43, 0)], 0),
        (&[descriptor(u64::MAX - 10, 44, 0)], 0),
        (&[descriptor(BUFFERS, 44, VRING_DESC_F_WRITE)], 0),
        // Missing data, a wrong length, and data outside memory.
        (&[descriptor(BUFFERS, 44, 0)], 1),
        (
            &[
                descriptor(BUFFERS, 44, VRING_DESC_F_NEXT),
                descriptor(BUFFERS, 3, 0),
            ],
            1,
        ),
        (
            &[
                descriptor(BUFFERS, 44, VRING_DESC_F_NEXT),
                descriptor(u64::MAX - 10, 4, 0),
            ],
            1,
        ),
    ];
    for (at, (chain, resets)) in broken.iter().enumerate() {
        let rx = MockSplitQueue::create(&memory, RX_QUEUE, 16);
        let tx = MockSplitQueue::create(&memory, TX_QUEUE, 16);
        put_packet(&memory, BUFFERS, 4);
        let (before, rx_before) = (tx.used().idx().load(), rx.used().idx().load());
        let queue: Queue = tx.create_queue().unwrap();
        tx.add_desc_chains(&linked(chain), 0).unwrap();
        rx.add_desc_chains(&[descriptor(BUFFERS + 0x1000, 0x1000, VRING_DESC_F_WRITE)], 0)
            .unwrap();
        let mut driver = driver(&memory, rx.create_queue().unwrap(), queue);
        driver.queues.pump(Instant::now());
        assert_eq!(tx.used().idx().load().wrapping_sub(before), 1, "chain {at}");
        assert_eq!(
            rx.used().idx().load().wrapping_sub(rx_before),
            *resets,
            "chain {at}"
        );
        if *resets > 0 {
            let op: u16 = memory.read_obj(GuestAddress(BUFFERS + 0x1000 + 30)).unwrap();
            assert_eq!(op, VsockOp::Reset as u16, "chain {at}");
        }
        memory.write_slice(&[0; 0x8000], GuestAddress(0)).unwrap();
    }
}

/// The split of a packet into descriptors is arbitrary. Linux 6.17 and later use three for packets
/// larger than 32 KiB, and a header may span two.
#[test]
fn descriptor_layout_is_arbitrary() {
    use super::chains::{PacketBuffer, take};
    let memory = memory();
    const DATA: u64 = BUFFERS + 0x1000;
    let len = 40_000_u32;
    let bytes: Vec<u8> = (0..len).map(|n| (n % 251) as u8).collect();
    put_packet(&memory, BUFFERS, len);
    memory.write_slice(&bytes, GuestAddress(DATA)).unwrap();
    let next = VRING_DESC_F_NEXT;
    let layouts: [&[RawDescriptor]; 3] = [
        &[
            descriptor(BUFFERS, 44, next),
            descriptor(DATA, 32_768, next),
            descriptor(DATA + 32_768, len - 32_768, 0),
        ],
        &[
            descriptor(BUFFERS, 10, next),
            descriptor(BUFFERS + 10, 34, next),
            descriptor(DATA, 1, next),
            descriptor(DATA + 1, len - 1, 0),
        ],
        // The buffer is longer than the packet.
        &[descriptor(BUFFERS, 44, next), descriptor(DATA, len + 7, 0)],
    ];
    for layout in layouts {
        let tx = MockSplitQueue::create(&memory, TX_QUEUE, 16);
        let mut queue: Queue = tx.create_queue().unwrap();
        tx.add_desc_chains(&linked(layout), 0).unwrap();
        let chain = queue.iter(&memory).unwrap().next().unwrap();
        let mut buffer = vec![0; MAX_DATA];
        let (header, count) = take(&memory, chain, &mut buffer).unwrap();
        assert_eq!((header.len, count.unwrap()), (len, bytes.len()));
        assert_eq!(buffer[..bytes.len()], bytes);
        memory.write_slice(&[0; 0x8000], GuestAddress(0)).unwrap();
    }
    // To the guest: header and data across three descriptors.
    let rx = MockSplitQueue::create(&memory, RX_QUEUE, 16);
    let mut queue: Queue = rx.create_queue().unwrap();
    let write = VRING_DESC_F_WRITE;
    let pieces = [
        descriptor(DATA, 50, next | write),
        descriptor(DATA + 0x1000, 0, next | write),
        descriptor(DATA + 0x2000, 100, write),
    ];
    rx.add_desc_chains(&linked(&pieces), 0).unwrap();
    let room = PacketBuffer::of(queue.iter(&memory).unwrap().next().unwrap()).unwrap();
    assert_eq!(room.data(), 106);
    let header = PacketHeader {
        len: 106,
        ..PacketHeader::default()
    };
    assert_eq!(room.put(&memory, &header, &bytes[..106]).unwrap(), 150);
    let mut there = [0; 106];
    memory
        .read_slice(&mut there[..6], GuestAddress(DATA + 44))
        .unwrap();
    memory
        .read_slice(&mut there[6..], GuestAddress(DATA + 0x2000))
        .unwrap();
    assert_eq!(there[..], bytes[..106]);
}

#[test]
fn oversized_available_index_breaks_queue() {
    let memory = memory();
    let rx = MockSplitQueue::create(&memory, RX_QUEUE, 16);
    let tx = MockSplitQueue::create(&memory, TX_QUEUE, 16);
    let mut driver = driver(&memory, rx.create_queue().unwrap(), tx.create_queue().unwrap());
    memory
        .write_obj(0x8000_u16, GuestAddress(tx.avail_addr().0 + 2))
        .unwrap();
    driver.queues.pump(Instant::now());
    assert_eq!(tx.used().idx().load(), 0);
}

#[test]
fn stopped_device_removes_socket() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v");
    let mut device = VsockDevice::new(3, &path).unwrap();
    assert!(matches!(VsockDevice::new(3, &path), Err(VsockError::Taken(_))));
    let mut cid = [0; 8];
    device.read_config(0, &mut cid);
    assert_eq!(u64::from_le_bytes(cid), 3);
    let memory = memory();
    for _ in 0..2 {
        let rx = MockSplitQueue::create(&memory, RX_QUEUE, 16);
        let tx = MockSplitQueue::create(&memory, TX_QUEUE, 16);
        let queue: Queue = rx.create_queue().unwrap();
        let activation = |queues| Activation {
            memory: memory.clone(),
            features: 0,
            queues,
            resumed: false,
            config_change: ConfigChangeNotifier::default(),
            fatal_error_callback: FatalErrorCallback::default(),
        };
        assert!(matches!(
            device.activate(activation(vec![None, None, None])),
            Err(ActivateError::Driver(_))
        ));
        device
            .activate(activation(vec![
                Some(active(queue)),
                Some(active(tx.create_queue().unwrap())),
                None,
            ]))
            .unwrap();
        // The thread serves host programs. This one sends an invalid request and is disconnected.
        let mut program = UnixStream::connect(&path).unwrap();
        program.write_all(b"nonsense\n").unwrap();
        assert_eq!(program.read(&mut [0]).unwrap_or(0), 0);
        device.reset();
    }
    drop(device);
    assert!(!path.exists());
    // A stale socket of a killed VM is replaced, but another kind of file is not.
    drop(UnixListener::bind(&path).unwrap());
    drop(VsockDevice::new(3, &path).unwrap());
    std::fs::write(&path, "mine").unwrap();
    assert!(matches!(VsockDevice::new(3, &path), Err(VsockError::Taken(_))));
    let long = directory.path().join("x".repeat(100));
    assert!(matches!(VsockDevice::new(3, &long), Err(VsockError::TooLong(_))));
}

/// A head index outside the queue marks the queue as broken before anything is added to the used
/// ring, which could not hold the entry.
#[test]
fn head_index_beyond_queue_breaks_it() {
    let memory = memory();
    for broken_tx in [false, true] {
        let rx = MockSplitQueue::create(&memory, RX_QUEUE, 16);
        let tx = MockSplitQueue::create(&memory, TX_QUEUE, 16);
        put_packet(&memory, BUFFERS, 4);
        tx.add_desc_chains(&[descriptor(BUFFERS, 48, 0)], 0).unwrap();
        let broken = if broken_tx { &tx } else { &rx };
        broken.avail().ring().ref_at(0).unwrap().store(16_u16.to_le());
        broken.avail().idx().store(1_u16.to_le());
        let mut driver = driver(&memory, rx.create_queue().unwrap(), tx.create_queue().unwrap());
        driver.queues.pump(Instant::now());
        assert!(driver.queues.is_broken(), "tx: {broken_tx}");
        assert_eq!(broken.used().idx().load(), 0);
    }
}

/// After a snapshot, the driver is told once that its connections have ended, whatever else it has
/// offered. It may have offered nothing.
#[test]
fn vsock_connections_are_reset_and_listeners_stay() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v");
    let mut device = VsockDevice::new(3, &path).unwrap();
    let memory = memory();
    for (offered, resumed, expected) in [(2, true, 1), (0, true, 0), (2, false, 0)] {
        let [rx, tx] = [0x1000, 0x4000].map(|start| Driver::at(&memory, 16, start));
        let mut events = Driver::at(&memory, 16, 0x8000);
        memory.write_obj(u64::MAX, GuestAddress(BUFFERS)).unwrap();
        for n in 0..offered {
            let buffer = BUFFERS + 8 * u64::from(n);
            let writable = VRING_DESC_F_WRITE as u16;
            events.write(n, &[Descriptor::new(buffer, 8, writable, 0)]);
            events.offer(n);
        }
        let queues = [&rx, &tx, &events].map(|queue| Some(queue.active()));
        let activation = Activation {
            resumed,
            ..crate::serve::testing::activation(&memory, queues.into()).0
        };
        device.activate(activation).unwrap();
        let used: Vec<(u32, u32)> = (0..expected).map(|head| (head, 4)).collect();
        assert_eq!(events.used(), used, "{offered} buffers, {resumed}");
        let event: u64 = memory.read_obj(GuestAddress(BUFFERS)).unwrap();
        assert_eq!(
            event,
            if expected == 1 {
                0xFFFF_FFFF_0000_0000
            } else {
                u64::MAX
            }
        );
        assert_eq!(events.vector.read().is_ok(), expected == 1);
        let mut program = UnixStream::connect(&path).unwrap();
        program.write_all(b"nonsense\n").unwrap();
        assert_eq!(program.read(&mut [0]).unwrap_or(0), 0);
        device.reset();
    }
}
