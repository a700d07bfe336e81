//! Tests of the vsock device with valid and invalid rings, and across activation and reset.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Instant;

use virtio_queue::QueueOwnedT;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::timerfd::TimerFd;

use super::muxer::ConnectionMuxer;
use super::packet::{HOST_CID, MAX_DATA, STREAM, VsockOp, VsockPacketHeader};
use super::queues::{FIRST_TOKEN, VsockQueues};
use super::*;
use crate::serve::testing::{BUFFERS, Driver, activation, memory};

const CID: u64 = 3;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// Guest address of the buffer for a packet from the device.
const ANSWER: u64 = BUFFERS + 0x1000;

/// A vsock device and its driver. The test calls the device's event handler itself, without a
/// thread.
struct RingTest<'m> {
    queues: VsockQueues,
    rx: Driver<'m>,
    tx: Driver<'m>,
    _directory: tempfile::TempDir,
}

impl<'m> RingTest<'m> {
    fn new(memory: &'m GuestMemoryMmap) -> Self {
        let [rx, tx] = [0x1000, 0x4000].map(|start| Driver::at(memory, 16, start));
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("v");
        let listener = Arc::new(UnixListener::bind(&path).unwrap());
        let muxer = ConnectionMuxer::new(CID, path, FIRST_TOKEN);
        let timer = TimerFd::new().unwrap();
        Self {
            queues: VsockQueues::new(memory.clone(), rx.active(), tx.active(), listener, muxer, timer),
            rx,
            tx,
            _directory: directory,
        }
    }

    fn pump(&mut self) {
        self.queues.pump(Instant::now());
    }
}

/// Returns a descriptor chain that consists of `pieces` and starts at index 0.
fn linked<const N: usize>(pieces: [(u64, u32); N], flags: u16) -> [Descriptor; N] {
    std::array::from_fn(|n| {
        let (address, len) = pieces[n];
        let next = if n + 1 < N { NEXT } else { 0 };
        Descriptor::new(address, len, flags | next, n as u16 + 1)
    })
}

/// Writes a packet to guest memory. It is addressed to an unused port, and `len` is its data
/// length.
fn put_packet(memory: &GuestMemoryMmap, len: u32) {
    let header = VsockPacketHeader {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: 9,
        dst_port: 5,
        len,
        kind: STREAM,
        op: VsockOp::Data as u16,
        ..VsockPacketHeader::default()
    };
    memory
        .write_slice(&header.to_bytes(), GuestAddress(BUFFERS))
        .unwrap();
}

fn answered_operation(memory: &GuestMemoryMmap) -> u16 {
    memory.read_obj(GuestAddress(ANSWER + 30)).unwrap()
}

#[test]
fn packets_pass_through_queues() {
    let memory = memory();
    let mut bench = RingTest::new(&memory);
    put_packet(&memory, 4);
    // Use separate descriptors for header and data, as in Linux before 6.2.
    bench
        .tx
        .offer_chain(0, &linked([(BUFFERS, 44), (BUFFERS + 0x100, 4)], 0));
    bench.rx.offer_chain(0, &linked([(ANSWER, 0x1000)], WRITE));
    // In the second round no further chain is used, and none is used twice.
    for _ in 0..2 {
        bench.pump();
        assert_eq!((bench.rx.used(), bench.tx.used()), (vec![(0, 44)], vec![(0, 0)]));
        assert_eq!(answered_operation(&memory), VsockOp::Reset as u16);
    }
}

/// A chain without a complete header is returned to the driver. If the header is complete but the
/// data is not, the connection is also reset, because the stream has lost data.
#[test]
fn broken_chains_reset_connection() {
    let broken: [(&[Descriptor], usize); 6] = [
        // Chains without a header: too short, outside memory, and device-writable.
        (&linked([(BUFFERS, 43)], 0), 0),
        (&linked([(u64::MAX - 10, 44)], 0), 0),
        (&linked([(BUFFERS, 44)], WRITE), 0),
        // Headers without valid data: missing data, a wrong length, and data outside memory.
        (&linked([(BUFFERS, 44)], 0), 1),
        (&linked([(BUFFERS, 44), (BUFFERS, 3)], 0), 1),
        (&linked([(BUFFERS, 44), (u64::MAX - 10, 4)], 0), 1),
    ];
    for (at, (chain, resets)) in broken.iter().enumerate() {
        let memory = memory();
        let mut bench = RingTest::new(&memory);
        put_packet(&memory, 4);
        bench.tx.offer_chain(0, chain);
        bench.rx.offer_chain(0, &linked([(ANSWER, 0x1000)], WRITE));
        bench.pump();
        assert_eq!(
            (bench.tx.used().len(), bench.rx.used().len()),
            (1, *resets),
            "chain {at}"
        );
        let expected = if *resets > 0 { VsockOp::Reset as u16 } else { 0 };
        assert_eq!(answered_operation(&memory), expected, "chain {at}");
    }
}

/// A vsock packet may be split into descriptors arbitrarily. For example, a header may span two.
/// Linux 6.17 and later use three descriptors for packets larger than 32 KiB.
#[test]
fn descriptor_layout_is_arbitrary() {
    use super::chains::{VsockPacketBuffer, take};
    const DATA: u64 = BUFFERS + 0x1000;
    let memory = memory();
    let len = 40_000_u32;
    let bytes: Vec<u8> = (0..len).map(|n| (n % 251) as u8).collect();
    put_packet(&memory, len);
    memory.write_slice(&bytes, GuestAddress(DATA)).unwrap();
    let half = DATA + 32_768;
    let layouts: [&[Descriptor]; 3] = [
        &linked([(BUFFERS, 44), (DATA, 32_768), (half, len - 32_768)], 0),
        &linked(
            [(BUFFERS, 10), (BUFFERS + 10, 34), (DATA, 1), (DATA + 1, len - 1)],
            0,
        ),
        // Use a buffer that is longer than the packet.
        &linked([(BUFFERS, 44), (DATA, len + 7)], 0),
    ];
    for layout in layouts {
        let mut tx = Driver::new(&memory, 16);
        tx.offer_chain(0, layout);
        let chain = tx.active.queue.iter(&memory).unwrap().next().unwrap();
        let mut buffer = vec![0; MAX_DATA];
        let (header, count) = take(&memory, chain, &mut buffer).unwrap();
        assert_eq!((header.len, count.unwrap()), (len, bytes.len()));
        assert_eq!(buffer[..bytes.len()], bytes);
    }
    // Send a packet to the guest, with header and data across three descriptors.
    let mut rx = Driver::new(&memory, 16);
    rx.offer_chain(
        0,
        &linked([(DATA, 50), (DATA + 0x1000, 0), (DATA + 0x2000, 100)], WRITE),
    );
    let room = VsockPacketBuffer::of(rx.active.queue.iter(&memory).unwrap().next().unwrap()).unwrap();
    assert_eq!(room.data(), 106);
    let header = VsockPacketHeader {
        len: 106,
        ..VsockPacketHeader::default()
    };
    assert_eq!(room.put(&memory, &header, &bytes[..106]).unwrap(), 150);
    let mut there = [0; 106];
    let (first, rest) = there.split_at_mut(6);
    memory.read_slice(first, GuestAddress(DATA + 44)).unwrap();
    memory.read_slice(rest, GuestAddress(DATA + 0x2000)).unwrap();
    assert_eq!(there[..], bytes[..106]);
}

#[test]
fn oversized_available_index_breaks_queue() {
    let memory = memory();
    let mut bench = RingTest::new(&memory);
    bench.tx.mock.avail().idx().store(0x8000_u16.to_le());
    bench.pump();
    assert!(bench.queues.is_broken() && bench.tx.used().is_empty());
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
        let [rx, tx] = [0x1000, 0x4000].map(|start| Driver::at(&memory, 16, start));
        let (without_queues, _view) = activation(&memory, vec![None, None, None]);
        assert!(matches!(
            device.activate(without_queues),
            Err(ActivateError::Driver(_))
        ));
        let queues = vec![Some(rx.active()), Some(tx.active()), None];
        device.activate(activation(&memory, queues).0).unwrap();
        assert_invalid_request_is_disconnected(&path);
        device.reset();
    }
    drop(device);
    assert!(!path.exists());
    // A stale socket of a killed VM is replaced, but a file of another type is not.
    drop(UnixListener::bind(&path).unwrap());
    drop(VsockDevice::new(3, &path).unwrap());
    std::fs::write(&path, "mine").unwrap();
    assert!(matches!(VsockDevice::new(3, &path), Err(VsockError::Taken(_))));
    let long = directory.path().join("x".repeat(100));
    assert!(matches!(VsockDevice::new(3, &long), Err(VsockError::TooLong(_))));
}

/// Checks that the thread of the vsock device at `path` is running. A running thread disconnects a
/// host program that sends an invalid request.
pub(super) fn assert_invalid_request_is_disconnected(path: &Path) {
    let mut program = UnixStream::connect(path).unwrap();
    program.write_all(b"nonsense\n").unwrap();
    assert_eq!(program.read(&mut [0]).unwrap_or(0), 0);
}

/// A descriptor index outside the vsock queue marks the queue as broken. The used ring, which
/// cannot hold this index, is not changed.
#[test]
fn head_index_beyond_queue_breaks_it() {
    let memory = memory();
    for broken_tx in [false, true] {
        let mut bench = RingTest::new(&memory);
        put_packet(&memory, 4);
        if broken_tx {
            bench.tx.offer(16);
        } else {
            bench.tx.offer_chain(0, &linked([(BUFFERS, 48)], 0));
            bench.rx.offer(16);
        }
        bench.pump();
        assert!(bench.queues.is_broken(), "tx: {broken_tx}");
        let broken = if broken_tx { &bench.tx } else { &bench.rx };
        assert_eq!(broken.used(), []);
    }
}

/// After a snapshot, the driver is notified exactly once that its vsock connections have ended, if
/// it has provided an event buffer.
#[test]
fn vsock_connections_are_reset_and_listeners_stay() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v");
    let mut device = VsockDevice::new(3, &path).unwrap();
    let memory = memory();
    for (offered, resumed, expected) in [(2, true, 1), (0, true, 0), (2, false, 0)] {
        let [rx, tx, mut events] = [0x1000, 0x4000, 0x8000].map(|start| Driver::at(&memory, 16, start));
        memory.write_obj(u64::MAX, GuestAddress(BUFFERS)).unwrap();
        for n in 0..offered {
            events.offer_chain(n, &[Descriptor::new(BUFFERS + 8 * u64::from(n), 8, WRITE, 0)]);
        }
        let queues = [&rx, &tx, &events].map(|queue| Some(queue.active()));
        let activation = DeviceActivation {
            resumed,
            ..activation(&memory, queues.into()).0
        };
        device.activate(activation).unwrap();
        let used: Vec<(u32, u32)> = (0..expected).map(|head| (head, 4)).collect();
        assert_eq!(events.used(), used, "{offered} buffers, {resumed}");
        let event: u64 = memory.read_obj(GuestAddress(BUFFERS)).unwrap();
        assert_eq!(event, u64::MAX << (32 * expected));
        assert_eq!(events.vector.read().is_ok(), expected == 1);
        assert_invalid_request_is_disconnected(&path);
        device.reset();
    }
}
