//! Tests of the vsock device with conforming and misbehaving guests and host programs.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::timerfd::TimerFd;

use super::connection::BUFFER;
use super::muxer::{MAX_CONNECTIONS, Muxer, Watch, port_path};
use super::packet::{HOST_CID, Header, MAX_DATA, NO_RECEIVE, NO_SEND, Op, STREAM};
use super::queues::{FIRST_TOKEN, Queues};
use super::*;
use crate::serve::testing::{Driver, GOOD, HOSTILE, memory};

const CID: u64 = 3;

/// A muxer with a simulated driver and event loop.
struct Bench {
    muxer: Muxer,
    now: Instant,
    directory: tempfile::TempDir,
    tokens: Vec<u32>,
}

impl Bench {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self {
            muxer: Muxer::new(CID, directory.path().join("v"), FIRST_TOKEN),
            now: Instant::now(),
            directory,
            tokens: Vec::new(),
        }
    }

    /// Reports all descriptors as ready.
    fn events(&mut self) {
        for watch in self.muxer.take_watches() {
            match watch {
                Watch::Add(_, token) => self.tokens.push(token),
                Watch::Remove(_, token) => self.tokens.retain(|t| *t != token),
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

    fn next(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut buffer = vec![0; MAX_DATA];
        let header = self.muxer.next(&mut buffer, self.now)?;
        buffer.truncate(header.len as usize);
        Some((header, buffer))
    }

    fn send(&mut self, packet: Header, data: &[u8]) {
        self.muxer.from_guest(&packet, data, self.now);
    }

    /// Connects a host program to guest port 5 and accepts the connection in the guest.
    fn connected(&mut self) -> (UnixStream, Header) {
        let mut program = self.program();
        program.write_all(b"CONNECT 5\n").unwrap();
        self.events();
        let (request, _) = self.next().expect("a request");
        assert_eq!((request.op, request.dst_port), (Op::Request as u16, 5));
        let guest = answer(&request);
        self.send(of(guest, Op::Response), &[]);
        let ok = format!("OK {}\n", request.src_port);
        assert_eq!(read(&mut program), ok.as_bytes());
        (program, guest)
    }
}

/// Returns the header of the guest's answer to a packet.
fn answer(packet: &Header) -> Header {
    Header {
        src_cid: packet.dst_cid,
        dst_cid: packet.src_cid,
        src_port: packet.dst_port,
        dst_port: packet.src_port,
        kind: STREAM,
        buf_alloc: 1 << 20,
        ..Header::default()
    }
}

fn of(packet: Header, op: Op) -> Header {
    Header {
        op: op as u16,
        ..packet
    }
}

/// Returns the bytes that are currently readable.
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
fn a_program_reaches_the_guest_and_both_speak() {
    let mut bench = Bench::new();
    let (mut program, guest) = bench.connected();
    bench.send(of(guest, Op::Data), b"from the guest");
    assert_eq!(read(&mut program), b"from the guest");
    program.write_all(b"from the host").unwrap();
    bench.events();
    let (packet, data) = bench.next().unwrap();
    assert_eq!((packet.op, &data[..]), (Op::Data as u16, &b"from the host"[..]));
    // The credit counts the bytes that the program has read, without the greeting.
    assert_eq!((packet.fwd_cnt, packet.buf_alloc), (14, BUFFER));
    assert!(bench.next().is_none());
}

#[test]
fn data_right_behind_the_line_reaches_the_guest() {
    let mut bench = Bench::new();
    let mut program = bench.program();
    program.write_all(b"CONNECT 5\nhello").unwrap();
    bench.events();
    let (request, _) = bench.next().unwrap();
    bench.send(of(answer(&request), Op::Response), &[]);
    assert_eq!(bench.next().unwrap().1, b"hello");
}

#[test]
fn a_line_that_is_none_ends_the_connection() {
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
        let mut bench = Bench::new();
        let mut program = bench.program();
        program.write_all(line).unwrap();
        bench.events();
        drop(bench.muxer.take_watches());
        assert!(!matches!(program.read(&mut [0]), Err(e) if e.kind() == io::ErrorKind::WouldBlock));
        assert!(bench.next().is_none(), "{line:?}");
    }
}

#[test]
fn a_program_that_says_nothing_is_let_go() {
    let mut bench = Bench::new();
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

#[test]
fn a_guest_that_does_not_answer_loses_the_connection() {
    let mut bench = Bench::new();
    let mut program = bench.program();
    program.write_all(b"CONNECT 5\n").unwrap();
    bench.events();
    let (request, _) = bench.next().unwrap();
    bench.muxer.tick(bench.now + Duration::from_secs(31));
    assert_eq!(bench.next().unwrap().0.op, Op::Reset as u16);
    bench.events();
    assert!(at_end(&mut program));
    // The response arrives too late.
    bench.send(of(answer(&request), Op::Response), &[]);
    assert_eq!(bench.next().unwrap().0.op, Op::Reset as u16);
}

#[test]
fn a_port_nobody_listens_on_closes_the_program_s_socket() {
    let mut bench = Bench::new();
    let mut program = bench.program();
    program.write_all(b"CONNECT 5\n").unwrap();
    bench.events();
    let (request, _) = bench.next().unwrap();
    bench.send(of(answer(&request), Op::Reset), &[]);
    bench.events();
    assert!(at_end(&mut program));
    assert!(bench.next().is_none(), "a reset is not answered");
}

#[test]
fn the_guest_reaches_a_program_or_is_refused() {
    let mut bench = Bench::new();
    let listener = UnixListener::bind(port_path(&bench.directory.path().join("v"), 77)).unwrap();
    let request = Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: 9,
        dst_port: 77,
        kind: STREAM,
        op: Op::Request as u16,
        buf_alloc: 4096,
        ..Header::default()
    };
    bench.send(request, &[]);
    let (mut program, _) = listener.accept().unwrap();
    program.set_nonblocking(true).unwrap();
    assert_eq!(bench.next().unwrap().0.op, Op::Response as u16);
    bench.send(of(request, Op::Data), b"x");
    assert_eq!(read(&mut program), b"x");
    for (packet, why) in [
        (
            Header {
                dst_port: 78,
                ..request
            },
            "nobody listens",
        ),
        (
            Header {
                kind: 2,
                src_port: 8,
                ..request
            },
            "no stream",
        ),
        (
            of(
                Header {
                    src_port: 10,
                    ..request
                },
                Op::Data,
            ),
            "unknown",
        ),
        (
            Header {
                op: 99,
                src_port: 10,
                ..request
            },
            "no operation",
        ),
    ] {
        bench.send(packet, &[]);
        let (reset, _) = bench.next().expect(why);
        assert_eq!(
            (reset.op, reset.dst_port),
            (Op::Reset as u16, packet.src_port),
            "{why}"
        );
    }
    for stranger in [
        Header {
            src_cid: 4,
            ..request
        },
        Header {
            dst_cid: 1,
            ..request
        },
    ] {
        bench.send(stranger, &[]);
        assert!(bench.next().is_none());
    }
}

#[test]
fn a_program_that_does_not_read_holds_the_guest_back_and_no_more() {
    let mut bench = Bench::new();
    let (mut program, guest) = bench.connected();
    let piece = vec![7; MAX_DATA];
    let mut sent: u32 = 0;
    let mut told = 0;
    // A conforming driver never exceeds its credit.
    while sent.wrapping_sub(told) + (MAX_DATA as u32) <= BUFFER {
        bench.send(of(guest, Op::Data), &piece);
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
        bench.send(of(guest, Op::Data), &piece);
    }
    assert!(std::iter::from_fn(|| bench.next()).any(|(packet, _)| packet.op == Op::Reset as u16));
}

#[test]
fn a_guest_without_room_is_asked_once_and_gets_the_rest_later() {
    let mut bench = Bench::new();
    let (mut program, mut guest) = bench.connected();
    guest.buf_alloc = 10;
    bench.send(of(guest, Op::CreditUpdate), &[]);
    program.write_all(&[1; 25]).unwrap();
    bench.events();
    assert_eq!(bench.next().unwrap().1.len(), 10);
    assert_eq!(bench.next().unwrap().0.op, Op::CreditRequest as u16);
    bench.events();
    let again = bench.next().map(|(packet, _)| packet.op);
    assert!(again.is_none_or(|op| op == Op::CreditRequest as u16));
    guest.fwd_cnt = 10;
    bench.send(of(guest, Op::CreditUpdate), &[]);
    assert_eq!(bench.next().unwrap().1.len(), 10);
    // A guest with contradictory credit values has no buffer space.
    guest.fwd_cnt = 1000;
    bench.send(of(guest, Op::CreditUpdate), &[]);
    assert!(std::iter::from_fn(|| bench.next()).all(|(packet, _)| packet.len == 0));
}

#[test]
fn a_buffer_without_room_for_data_takes_none_and_ends() {
    let mut bench = Bench::new();
    let (mut program, _) = bench.connected();
    program.write_all(b"hello").unwrap();
    bench.events();
    // Only the header fits. A retry loop would not terminate.
    assert!(bench.muxer.next(&mut [], bench.now).is_none());
    let (packet, data) = bench.next().unwrap();
    assert_eq!((packet.op, &data[..]), (Op::Data as u16, &b"hello"[..]));
}

#[test]
fn each_side_can_end_its_own_direction() {
    let mut bench = Bench::new();
    let (mut program, guest) = bench.connected();
    program.shutdown(Shutdown::Write).unwrap();
    bench.events();
    let (packet, _) = bench.next().unwrap();
    assert_eq!((packet.op, packet.flags), (Op::Shutdown as u16, NO_SEND));
    bench.send(of(guest, Op::Data), b"still");
    assert_eq!(read(&mut program), b"still");
    let end = Header {
        flags: NO_SEND,
        ..of(guest, Op::Shutdown)
    };
    bench.send(end, &[]);
    assert!(at_end(&mut program));
    // The guest closes the connection.
    bench.send(
        Header {
            flags: NO_SEND | NO_RECEIVE,
            ..end
        },
        &[],
    );
    assert_eq!(bench.next().unwrap().0.op, Op::Reset as u16);
    assert!(bench.next().is_none());
}

#[test]
fn ends_that_are_never_completed_are() {
    let mut bench = Bench::new();
    let (program, guest) = bench.connected();
    program.shutdown(Shutdown::Write).unwrap();
    bench.events();
    assert_eq!(bench.next().unwrap().0.op, Op::Shutdown as u16);
    bench.send(
        Header {
            flags: NO_SEND,
            ..of(guest, Op::Shutdown)
        },
        &[],
    );
    assert!(bench.muxer.has_deadlines());
    bench.muxer.tick(bench.now + Duration::from_secs(31));
    assert!(std::iter::from_fn(|| bench.next()).any(|(packet, _)| packet.op == Op::Reset as u16));
}

#[test]
fn a_program_that_dies_ends_the_guest_s_side() {
    let mut bench = Bench::new();
    let (program, guest) = bench.connected();
    drop(program);
    bench.send(of(guest, Op::Data), b"x");
    assert_eq!(bench.next().unwrap().0.op, Op::Reset as u16);
}

#[test]
fn there_are_only_so_many_connections() {
    let mut bench = Bench::new();
    let mut programs: Vec<_> = (0..MAX_CONNECTIONS).map(|_| bench.program()).collect();
    assert!(programs.iter_mut().all(|program| !at_end(program)));
    assert!(at_end(&mut bench.program()));
    let _listener = UnixListener::bind(port_path(&bench.directory.path().join("v"), 77)).unwrap();
    bench.send(
        Header {
            src_cid: CID,
            dst_cid: HOST_CID,
            src_port: 9,
            dst_port: 77,
            kind: STREAM,
            op: Op::Request as u16,
            ..Header::default()
        },
        &[],
    );
    assert_eq!(bench.next().unwrap().0.op, Op::Reset as u16);
}

#[test]
fn a_flood_waits_until_its_answers_are_taken() {
    let mut bench = Bench::new();
    let flood = Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        kind: STREAM,
        op: Op::Data as u16,
        ..Header::default()
    };
    let mut taken = 0;
    while bench.muxer.takes_packets() {
        bench.send(flood, &[]);
        taken += 1;
        assert!(taken < 10_000, "answers without a limit");
    }
    assert!(bench.next().is_some() && bench.muxer.takes_packets());
}

fn any_header() -> impl Strategy<Value = Header> {
    let cid = prop_oneof![9 => Just(CID), 1 => any::<u64>()];
    let port = prop_oneof![9 => 0..4_u32, 6 => (1_u32 << 30)..(1 << 30) + 4, 1 => any::<u32>()];
    let op = prop_oneof![9 => 0..9_u16, 1 => any::<u16>()];
    let count = || prop_oneof![Just(0), Just(BUFFER), any::<u32>()];
    (cid, port.clone(), port, op, any::<u32>(), count(), count()).prop_map(
        |(src_cid, src_port, dst_port, op, flags, buf_alloc, fwd_cnt)| Header {
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
enum Step {
    Guest(Header, usize),
    Program(Vec<u8>),
    Close,
    Tick(u64),
    Take,
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (any_header(), 0..MAX_DATA).prop_map(|(header, len)| Step::Guest(header, len)),
        2 => prop_oneof![
            Just(b"CONNECT 1\n".to_vec()),
            Just(b"CONNECT 2\nmore".to_vec()),
            proptest::collection::vec(any::<u8>(), 0..40)
        ].prop_map(Step::Program),
        1 => Just(Step::Close),
        1 => (0..40_u64).prop_map(Step::Tick),
        4 => Just(Step::Take),
    ]
}

proptest! {
    /// With arbitrary packets of guests and programs, the muxer stays within its limits, respects
    /// the guest's credit, and becomes idle.
    #[test]
    fn nothing_anyone_sends_breaks_the_bounds(steps in proptest::collection::vec(any_step(), 1..80)) {
        let mut bench = Bench::new();
        let mut programs = Vec::new();
        let listener = UnixListener::bind(port_path(&bench.directory.path().join("v"), 2)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let data = vec![1; MAX_DATA];
        for step in steps {
            match step {
                Step::Guest(header, len) if bench.muxer.takes_packets() => bench.send(header, &data[..len]),
                Step::Guest(..) => {}
                Step::Program(bytes) => {
                    let mut program = bench.program();
                    let _ = program.write(&bytes);
                    programs.push(program);
                }
                Step::Close => drop(programs.pop()),
                Step::Tick(seconds) => {
                    bench.now += Duration::from_secs(seconds);
                    bench.muxer.tick(bench.now);
                }
                Step::Take => {
                    if let Some((header, data)) = bench.next() {
                        prop_assert_eq!(header.len as usize, data.len());
                        prop_assert_eq!((header.src_cid, header.dst_cid), (HOST_CID, CID));
                        prop_assert!(data.is_empty() || header.op == Op::Data as u16);
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

/// Hostile chains (loops, indirect tables of 65,535 entries, nested tables, buffers outside RAM) in
/// both queues are returned as used, and the valid chain after them is processed.
#[test]
fn a_driver_of_hostile_chains_stops_no_packets() {
    let bench = Bench::new();
    let socket = bench.directory.path().join("listener");
    let listener = Arc::new(UnixListener::bind(socket).unwrap());
    let memory = memory();
    let (mut rx, mut tx) = (Driver::new(&memory, 64), Driver::at(&memory, 64, 0x8000));
    let timer = TimerFd::new().unwrap();
    let mut queues = Queues::new(
        memory.clone(),
        rx.active(),
        tx.active(),
        listener,
        bench.muxer,
        timer,
    );
    // The valid chain requests a port without a listener, so the guest receives a reset packet.
    let request = Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: 9,
        dst_port: 77,
        kind: STREAM,
        op: Op::Request as u16,
        ..Header::default()
    };
    memory
        .write_slice(&request.to_bytes(), GuestAddress(GOOD))
        .unwrap();
    tx.offer_hostile(0);
    rx.offer_hostile(2);
    queues.pump(bench.now);
    let heads: Vec<_> = (0..u32::from(HOSTILE)).map(|head| (head, 0)).collect();
    assert_eq!(tx.used(), heads);
    for _ in 0..2 * HOSTILE {
        // Overwritten in place by an answer.
        memory
            .write_slice(&request.to_bytes(), GuestAddress(GOOD))
            .unwrap();
        if rx.used().len() < usize::from(HOSTILE) {
            tx.offer(HOSTILE - 1);
        }
        queues.pump(bench.now);
    }
    let used = rx.used();
    assert!(
        used.iter().map(|(head, _)| *head).eq(0..u32::from(HOSTILE)),
        "{used:?}"
    );
    assert_eq!(
        [used[1].1, used[2].1, used[4].1, used[5].1, used[12].1],
        [0; 5],
        "{used:?}"
    );
    assert_eq!(used.last(), Some(&(13, 44)));
}

/// A host program sees the timeout of its connection even while the guest takes no packets.
#[test]
fn a_program_sees_the_end_of_a_connection_that_took_too_long() {
    let mut bench = Bench::new();
    let mut program = bench.program();
    program.write_all(b"CONNECT 5\n").unwrap();
    bench.events();
    assert!(bench.muxer.has_deadlines());
    assert!(!at_end(&mut program));
    bench.muxer.tick(bench.now + Duration::from_secs(3600));
    assert!(at_end(&mut program));
}

/// The socket of another VM that has replaced the device's own is not removed.
#[test]
fn a_device_removes_its_own_file_only() {
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
fn the_words_that_ask_for_a_device() {
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
    for bad in [
        "",
        "cid=2",
        "cid=4294967295",
        "cid=x",
        "socket=",
        "cid=3,",
        "cid=3,x",
        "port=1",
    ] {
        assert!(parse(bad).is_err(), "{bad:?}");
    }
}
