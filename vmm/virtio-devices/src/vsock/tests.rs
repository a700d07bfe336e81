//! Tests of the vsock device with conforming and misbehaving guests and host programs.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::timerfd::TimerFd;

use super::connection::BUFFER;
use super::muxer::{ConnectionMuxer, DescriptorWatchChange, MAX_CONNECTIONS, port_path};
use super::packet::{HOST_CID, MAX_DATA, NO_RECEIVE, NO_SEND, STREAM, VsockOp, VsockPacketHeader};
use super::queues::{FIRST_TOKEN, VsockQueues};
use super::*;
use crate::serve::testing::{Driver, GOOD, HOSTILE, memory};

const CID: u64 = 3;

/// A muxer under test. The test acts as the driver and as the event loop.
struct MuxerTest {
    muxer: ConnectionMuxer,
    now: Instant,
    directory: tempfile::TempDir,
    tokens: Vec<u32>,
}

impl MuxerTest {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self {
            muxer: ConnectionMuxer::new(CID, directory.path().join("v"), FIRST_TOKEN),
            now: Instant::now(),
            directory,
            tokens: Vec::new(),
        }
    }

    /// Reports an event for each descriptor that the muxer monitors.
    fn events(&mut self) {
        for watch in self.muxer.take_watches() {
            match watch {
                DescriptorWatchChange::Add(_, token) => self.tokens.push(token),
                DescriptorWatchChange::Remove(_, token) => self.tokens.retain(|t| *t != token),
            }
        }
        for token in self.tokens.clone() {
            self.muxer.host_event(token, true, true, false, self.now);
        }
    }

    fn program(&mut self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        self.muxer.accepted(ours, self.now);
        self.events();
        theirs
    }

    fn next(&mut self) -> Option<(VsockPacketHeader, Vec<u8>)> {
        let mut buffer = vec![0; MAX_DATA];
        let header = self.muxer.next(&mut buffer, self.now)?;
        buffer.truncate(header.len as usize);
        Some((header, buffer))
    }

    fn send(&mut self, packet: VsockPacketHeader, data: &[u8]) {
        self.muxer.from_guest(&packet, data, self.now);
    }

    /// Sends a packet from the guest and returns the reset packet that the muxer must reply with.
    fn send_and_expect_reset(&mut self, packet: VsockPacketHeader) -> VsockPacketHeader {
        self.send(packet, &[]);
        self.expect(VsockOp::Reset)
    }

    /// Returns the next packet for the guest. Panics if it has another operation than `op`.
    #[track_caller]
    fn expect(&mut self, op: VsockOp) -> VsockPacketHeader {
        let (packet, _) = self.next().expect("a packet");
        assert_eq!(packet.op, op as u16);
        packet
    }

    /// Connects a host program that writes `line` (a request for guest port 5). Returns the
    /// program's socket and the connection request to the guest.
    fn requested(&mut self, line: &[u8]) -> (UnixStream, VsockPacketHeader) {
        let mut program = self.program();
        program.write_all(line).unwrap();
        self.events();
        let request = self.expect(VsockOp::Request);
        assert_eq!(request.dst_port, 5);
        (program, request)
    }

    /// Connects a host program to guest port 5 and accepts the connection in the guest.
    fn connected(&mut self) -> (UnixStream, VsockPacketHeader) {
        let (mut program, request) = self.requested(b"CONNECT 5\n");
        let guest = answer(&request);
        self.send(of(guest, VsockOp::Response), &[]);
        let ok = format!("OK {}\n", request.src_port);
        assert_eq!(read(&mut program), ok.as_bytes());
        (program, guest)
    }
}

/// Returns the header of a guest packet that replies to `packet`.
fn answer(packet: &VsockPacketHeader) -> VsockPacketHeader {
    VsockPacketHeader {
        src_cid: packet.dst_cid,
        dst_cid: packet.src_cid,
        src_port: packet.dst_port,
        dst_port: packet.src_port,
        kind: STREAM,
        buf_alloc: 1 << 20,
        ..VsockPacketHeader::default()
    }
}

/// Returns the header of a guest's request to connect to host port `dst_port`.
fn guest_request(dst_port: u32) -> VsockPacketHeader {
    VsockPacketHeader {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: 9,
        dst_port,
        kind: STREAM,
        op: VsockOp::Request as u16,
        buf_alloc: 4096,
        ..VsockPacketHeader::default()
    }
}

fn of(packet: VsockPacketHeader, op: VsockOp) -> VsockPacketHeader {
    VsockPacketHeader {
        op: op as u16,
        ..packet
    }
}

/// Returns the bytes that can be read from `stream` without waiting.
fn read(stream: &mut UnixStream) -> Vec<u8> {
    let mut all = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = stream.read(&mut buffer) {
        all.extend(&buffer[..count]);
    }
    all
}

fn at_end(stream: &mut UnixStream) -> bool {
    matches!(stream.read(&mut [0]), Ok(0))
}

#[test]
fn host_program_connects_to_guest() {
    let mut bench = MuxerTest::new();
    let (mut program, guest) = bench.connected();
    bench.send(of(guest, VsockOp::Data), b"from the guest");
    assert_eq!(read(&mut program), b"from the guest");
    program.write_all(b"from the host").unwrap();
    bench.events();
    let (packet, data) = bench.next().unwrap();
    assert_eq!(
        (packet.op, &data[..]),
        (VsockOp::Data as u16, &b"from the host"[..])
    );
    // The credit counts the bytes that the program has read, without the greeting.
    assert_eq!((packet.fwd_cnt, packet.buf_alloc), (14, BUFFER));
    assert!(bench.next().is_none());
}

#[test]
fn data_after_connect_line_reaches_guest() {
    let mut bench = MuxerTest::new();
    let (_program, request) = bench.requested(b"CONNECT 5\nhello");
    bench.send(of(answer(&request), VsockOp::Response), &[]);
    assert_eq!(bench.next().unwrap().1, b"hello");
}

#[test]
fn invalid_connect_line_closes_connection() {
    for line in [
        &b"CONNECT\n"[..],
        b"CONNECT -1\n",
        b"CONNECT +1\n",
        b"CONNECT 4294967296\n",
        b"connect 5\n",
        b"\n",
        b"CONNECT \xff\n",
        &[b'x'; 100],
    ] {
        let mut bench = MuxerTest::new();
        let mut program = bench.program();
        program.write_all(line).unwrap();
        bench.events();
        drop(bench.muxer.take_watches());
        assert!(!matches!(program.read(&mut [0]), Err(e) if e.kind() == io::ErrorKind::WouldBlock));
        assert!(bench.next().is_none(), "{line:?}");
    }
}

#[test]
fn silent_program_times_out() {
    let mut bench = MuxerTest::new();
    let mut program = bench.program();
    assert!(bench.muxer.has_deadlines());
    bench.muxer.tick(bench.now + Duration::from_secs(4));
    drop(bench.muxer.take_watches());
    assert!(!at_end(&mut program));
    bench.muxer.tick(bench.now + Duration::from_secs(6));
    drop(bench.muxer.take_watches());
    assert!(at_end(&mut program));
    assert!(!bench.muxer.has_deadlines());
}

/// If the guest does not answer a connection request, the host program is disconnected after the
/// timeout, even if the guest receives no packets.
#[test]
fn unanswered_request_times_out() {
    let mut bench = MuxerTest::new();
    let (mut program, request) = bench.requested(b"CONNECT 5\n");
    assert!(bench.muxer.has_deadlines() && !at_end(&mut program));
    bench.muxer.tick(bench.now + Duration::from_secs(31));
    assert!(at_end(&mut program));
    bench.expect(VsockOp::Reset);
    bench.events();
    // The response arrives too late.
    bench.send_and_expect_reset(of(answer(&request), VsockOp::Response));
}

#[test]
fn refused_port_closes_program_socket() {
    let mut bench = MuxerTest::new();
    let (mut program, request) = bench.requested(b"CONNECT 5\n");
    bench.send(of(answer(&request), VsockOp::Reset), &[]);
    bench.events();
    assert!(at_end(&mut program));
    assert!(bench.next().is_none(), "a reset is not answered");
}

#[test]
fn guest_connects_to_program_or_is_reset() {
    let mut bench = MuxerTest::new();
    let listener = UnixListener::bind(port_path(&bench.directory.path().join("v"), 77)).unwrap();
    let request = guest_request(77);
    bench.send(request, &[]);
    let (mut program, _) = listener.accept().unwrap();
    program.set_nonblocking(true).unwrap();
    bench.expect(VsockOp::Response);
    bench.send(of(request, VsockOp::Data), b"x");
    assert_eq!(read(&mut program), b"x");
    // Requests for a port without a listener and for a socket type other than stream, a packet of
    // an unknown connection, and an unknown operation.
    for (src_port, dst_port, kind, op) in [
        (9, 78, STREAM, request.op),
        (8, 77, 2, request.op),
        (10, 77, STREAM, VsockOp::Data as u16),
        (10, 77, STREAM, 99),
    ] {
        let packet = VsockPacketHeader {
            src_port,
            dst_port,
            kind,
            op,
            ..request
        };
        assert_eq!(bench.send_and_expect_reset(packet).dst_port, src_port);
    }
    for (src_cid, dst_cid) in [(4, HOST_CID), (CID, 1)] {
        let stranger = VsockPacketHeader {
            src_cid,
            dst_cid,
            ..request
        };
        bench.send(stranger, &[]);
        assert!(bench.next().is_none());
    }
}

#[test]
fn slow_program_limits_guest_credit() {
    let mut bench = MuxerTest::new();
    let (mut program, guest) = bench.connected();
    let piece = vec![7; MAX_DATA];
    let mut sent: u32 = 0;
    let mut told = 0;
    // A conforming driver never exceeds its credit.
    while sent.wrapping_sub(told) + (MAX_DATA as u32) <= BUFFER {
        bench.send(of(guest, VsockOp::Data), &piece);
        sent += MAX_DATA as u32;
        while let Some((packet, _)) = bench.next() {
            told = packet.fwd_cnt;
        }
    }
    assert!(sent >= BUFFER);
    // The program receives all data, and the guest receives a credit update.
    let mut got = 0;
    while got < sent as usize {
        got += read(&mut program).len();
        bench.events();
    }
    let updates: Vec<_> = std::iter::from_fn(|| bench.next()).collect();
    assert_eq!(updates.last().unwrap().0.fwd_cnt, sent);
    // A connection that exceeds its credit is reset.
    for _ in 0..100 {
        bench.send(of(guest, VsockOp::Data), &piece);
    }
    assert!(std::iter::from_fn(|| bench.next()).any(|(packet, _)| packet.op == VsockOp::Reset as u16));
}

#[test]
fn full_guest_gets_one_credit_request() {
    let mut bench = MuxerTest::new();
    let (mut program, mut guest) = bench.connected();
    guest.buf_alloc = 10;
    bench.send(of(guest, VsockOp::CreditUpdate), &[]);
    program.write_all(&[1; 25]).unwrap();
    bench.events();
    assert_eq!(bench.next().unwrap().1.len(), 10);
    assert_eq!(bench.next().unwrap().0.op, VsockOp::CreditRequest as u16);
    bench.events();
    let again = bench.next().map(|(packet, _)| packet.op);
    assert!(again.is_none_or(|op| op == VsockOp::CreditRequest as u16));
    guest.fwd_cnt = 10;
    bench.send(of(guest, VsockOp::CreditUpdate), &[]);
    assert_eq!(bench.next().unwrap().1.len(), 10);
    // A guest with contradictory credit values has no buffer space.
    guest.fwd_cnt = 1000;
    bench.send(of(guest, VsockOp::CreditUpdate), &[]);
    assert!(std::iter::from_fn(|| bench.next()).all(|(packet, _)| packet.len == 0));
}

#[test]
fn header_only_buffer_carries_no_data() {
    let mut bench = MuxerTest::new();
    let (mut program, _) = bench.connected();
    program.write_all(b"hello").unwrap();
    bench.events();
    // The buffer has no space for data, only for the header. A retry loop would not terminate.
    assert!(bench.muxer.next(&mut [], bench.now).is_none());
    let (packet, data) = bench.next().unwrap();
    assert_eq!((packet.op, &data[..]), (VsockOp::Data as u16, &b"hello"[..]));
}

#[test]
fn half_close_works_in_both_directions() {
    let mut bench = MuxerTest::new();
    let (mut program, guest) = bench.connected();
    program.shutdown(Shutdown::Write).unwrap();
    bench.events();
    let (packet, _) = bench.next().unwrap();
    assert_eq!((packet.op, packet.flags), (VsockOp::Shutdown as u16, NO_SEND));
    bench.send(of(guest, VsockOp::Data), b"still");
    assert_eq!(read(&mut program), b"still");
    let end = VsockPacketHeader {
        flags: NO_SEND,
        ..of(guest, VsockOp::Shutdown)
    };
    bench.send(end, &[]);
    assert!(at_end(&mut program));
    // The guest closes the connection.
    let close = VsockPacketHeader {
        flags: NO_SEND | NO_RECEIVE,
        ..end
    };
    bench.send_and_expect_reset(close);
    assert!(bench.next().is_none());
}

#[test]
fn incomplete_close_times_out() {
    let mut bench = MuxerTest::new();
    let (program, guest) = bench.connected();
    program.shutdown(Shutdown::Write).unwrap();
    bench.events();
    bench.expect(VsockOp::Shutdown);
    let end = VsockPacketHeader {
        flags: NO_SEND,
        ..of(guest, VsockOp::Shutdown)
    };
    bench.send(end, &[]);
    assert!(bench.muxer.has_deadlines());
    bench.muxer.tick(bench.now + Duration::from_secs(31));
    assert!(std::iter::from_fn(|| bench.next()).any(|(packet, _)| packet.op == VsockOp::Reset as u16));
}

#[test]
fn program_exit_resets_guest_connection() {
    let mut bench = MuxerTest::new();
    let (program, guest) = bench.connected();
    drop(program);
    bench.send(of(guest, VsockOp::Data), b"x");
    assert_eq!(bench.next().unwrap().0.op, VsockOp::Reset as u16);
}

#[test]
fn connection_count_is_limited() {
    let mut bench = MuxerTest::new();
    let mut programs: Vec<_> = (0..MAX_CONNECTIONS).map(|_| bench.program()).collect();
    assert!(programs.iter_mut().all(|program| !at_end(program)));
    assert!(at_end(&mut bench.program()));
    let _listener = UnixListener::bind(port_path(&bench.directory.path().join("v"), 77)).unwrap();
    bench.send_and_expect_reset(guest_request(77));
}

#[test]
fn packets_are_paused_while_replies_are_pending() {
    let mut bench = MuxerTest::new();
    let flood = of(guest_request(0), VsockOp::Data);
    let mut taken = 0;
    while bench.muxer.can_accept_packets() {
        bench.send(flood, &[]);
        taken += 1;
        assert!(taken < 10_000, "answers without a limit");
    }
    assert!(bench.next().is_some() && bench.muxer.can_accept_packets());
}

fn any_header() -> impl Strategy<Value = VsockPacketHeader> {
    let cid = prop_oneof![9 => Just(CID), 1 => any::<u64>()];
    let port = prop_oneof![9 => 0..4_u32, 6 => (1_u32 << 30)..(1 << 30) + 4, 1 => any::<u32>()];
    let op = prop_oneof![9 => 0..9_u16, 1 => any::<u16>()];
    let count = || prop_oneof![Just(0), Just(BUFFER), any::<u32>()];
    (cid, port.clone(), port, op, any::<u32>(), count(), count()).prop_map(
        |(src_cid, src_port, dst_port, op, flags, buf_alloc, fwd_cnt)| VsockPacketHeader {
            src_cid,
            dst_cid: HOST_CID,
            src_port,
            dst_port,
            len: 0,
            kind: STREAM,
            op,
            flags,
            buf_alloc,
            fwd_cnt,
        },
    )
}

#[derive(Debug, Clone)]
enum MuxerStep {
    Guest(VsockPacketHeader, usize),
    Program(Vec<u8>),
    Close,
    Tick(u64),
    Take,
}

fn any_step() -> impl Strategy<Value = MuxerStep> {
    prop_oneof![
        8 => (any_header(), 0..MAX_DATA).prop_map(|(header, len)| MuxerStep::Guest(header, len)),
        2 => prop_oneof![
            Just(b"CONNECT 1\n".to_vec()),
            Just(b"CONNECT 2\nmore".to_vec()),
            proptest::collection::vec(any::<u8>(), 0..40)
        ].prop_map(MuxerStep::Program),
        1 => Just(MuxerStep::Close),
        1 => (0..40_u64).prop_map(MuxerStep::Tick),
        4 => Just(MuxerStep::Take),
    ]
}

proptest! {
    /// With arbitrary packets from the guest and host programs, the muxer stays within its limits,
    /// respects the guest's credit, and becomes idle in the end.
    #[test]
    fn arbitrary_packets_stay_within_limits(steps in proptest::collection::vec(any_step(), 1..80)) {
        let mut bench = MuxerTest::new();
        let mut programs = Vec::new();
        let listener = UnixListener::bind(port_path(&bench.directory.path().join("v"), 2)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let data = vec![1; MAX_DATA];
        for step in steps {
            match step {
                MuxerStep::Guest(header, len) if bench.muxer.can_accept_packets() => bench.send(header, &data[..len]),
                MuxerStep::Guest(..) => {}
                MuxerStep::Program(bytes) => {
                    let mut program = bench.program();
                    let _ = program.write(&bytes);
                    programs.push(program);
                }
                MuxerStep::Close => drop(programs.pop()),
                MuxerStep::Tick(seconds) => {
                    bench.now += Duration::from_secs(seconds);
                    bench.muxer.tick(bench.now);
                }
                MuxerStep::Take => {
                    if let Some((header, data)) = bench.next() {
                        prop_assert_eq!(header.len as usize, data.len());
                        prop_assert_eq!((header.src_cid, header.dst_cid), (HOST_CID, CID));
                        prop_assert!(data.is_empty() || header.op == VsockOp::Data as u16);
                    }
                }
            }
            bench.events();
            while let Ok((stream, _)) = listener.accept() {
                programs.push(stream);
            }
            prop_assert!(bench.tokens.len() <= MAX_CONNECTIONS);
        }
        // After all programs have exited and all timeouts have expired, every connection ends.
        drop(programs);
        for _ in 0..4 {
            for token in bench.tokens.clone() {
                bench.muxer.host_event(token, true, true, true, bench.now);
            }
            let taken = std::iter::from_fn(|| bench.next()).take(10_000).count();
            prop_assert!(taken < 10_000, "packets without end");
            bench.now += Duration::from_secs(40);
            bench.muxer.tick(bench.now);
        }
    }
}

/// Malformed chains (loops, indirect tables of 65,535 entries, nested tables, buffers outside RAM)
/// in the receive and transmit queues are returned to the driver, and the valid chain after them is
/// processed.
#[test]
fn hostile_chains_do_not_block_packets() {
    let bench = MuxerTest::new();
    let socket = bench.directory.path().join("listener");
    let listener = Arc::new(UnixListener::bind(socket).unwrap());
    let memory = memory();
    let (mut rx, mut tx) = (Driver::new(&memory, 64), Driver::at(&memory, 64, 0x8000));
    let timer = TimerFd::new().unwrap();
    let mut queues = VsockQueues::new(
        memory.clone(),
        rx.active(),
        tx.active(),
        listener,
        bench.muxer,
        timer,
    );
    // The valid chain requests a port without a listener, so the guest receives a reset packet.
    let request = guest_request(77).to_bytes();
    memory.write_slice(&request, GuestAddress(GOOD)).unwrap();
    tx.offer_hostile(0);
    rx.offer_hostile(2);
    queues.pump(bench.now);
    let heads: Vec<_> = (0..u32::from(HOSTILE)).map(|head| (head, 0)).collect();
    assert_eq!(tx.used(), heads);
    for _ in 0..2 * HOSTILE {
        // Write the request again, because an answer has overwritten it in place.
        memory.write_slice(&request, GuestAddress(GOOD)).unwrap();
        if rx.used().len() < usize::from(HOSTILE) {
            tx.offer(HOSTILE - 1);
        }
        queues.pump(bench.now);
    }
    rx.assert_hostile_used(44, 44);
    assert_eq!(rx.used()[1].1, 0);
}

/// A device does not remove the socket file of another VM that has replaced its own.
#[test]
fn device_removes_own_socket_only() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v");
    let device = VsockDevice::new(3, &path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let other = VsockDevice::new(3, &path).unwrap();
    drop(device);
    assert!(UnixStream::connect(&path).is_ok());
    drop(other);
    assert!(!path.exists());
}

#[test]
fn vsock_options_are_parsed() {
    let parse = |text: &str| text.parse::<VsockConfig>();
    let config = |cid, socket: Option<&str>| {
        Ok(VsockConfig {
            cid,
            socket: socket.map(PathBuf::from),
        })
    };
    assert_eq!(parse("cid=7"), config(7, None));
    assert_eq!(parse("socket=/a,b"), config(3, Some("/a,b")));
    assert_eq!(parse("cid=7,socket=x"), config(7, Some("x")));
    for bad in "|cid=2|cid=4294967295|cid=x|socket=|cid=3,|cid=3,x|port=1".split('|') {
        assert!(parse(bad).is_err(), "{bad:?}");
    }
}
