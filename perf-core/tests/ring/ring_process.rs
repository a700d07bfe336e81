//! Tests of rings that two processes share. The test program starts itself as the reader or the
//! attacker in another process.
#![expect(unsafe_code, reason = "calls of the system")]

use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use perf_core::attr::WakeupCondition;
use perf_core::ring::{PAGE_SIZE, PollState, Ring, RingFullPolicy, RingReadError, RingReader};

use crate::common::ring::{CheckedRecord, DATA_HEAD, DATA_TAIL, check, drain, foreign, next, poke, write};

/// Number of the ring's memfd in the child process. [`WAKEUP`] is the number of the ring's eventfd.
const MEMFD: i32 = 100;
const WAKEUP: i32 = 101;
const ROLE: &str = "PERF_RING_TEST_ROLE";

/// Starts this test program again in the given role, and passes the ring's file descriptors.
fn start(role: &str, ring: &Ring) -> Child {
    let (memfd, wakeup) = (ring.memfd().as_raw_fd(), ring.wakeup_fd().as_raw_fd());
    let mut command = Command::new(std::env::current_exe().expect("this test"));
    let args = [
        "--exact",
        "ring_process::other_process",
        "--ignored",
        "--nocapture",
    ];
    command.args(args).env(ROLE, role);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    // SAFETY: dup2 may be called between fork and exec.
    unsafe {
        command.pre_exec(move || {
            for (from, to) in [(memfd, MEMFD), (wakeup, WAKEUP)] {
                if libc::dup2(from, to) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    command.spawn().expect("this binary runs")
}

/// Waits for a line of output that contains `what`, and returns the rest of the line.
fn expect(child: &mut Child, what: &str) -> String {
    let mut out = BufReader::new(child.stdout.as_mut().expect("piped"));
    let mut line = String::new();
    while out.read_line(&mut line).expect("readable") != 0 {
        // Ignores the output of the child's test harness around the text.
        if let Some(at) = line.find(what) {
            return line[at + what.len()..].trim().to_owned();
        }
        line.clear();
    }
    panic!("the other process ended without saying {what}");
}

/// Entry point of the other process, which the tests below start. Not a test itself.
#[test]
#[ignore = "started by the other tests of this file"]
fn other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    // SAFETY: the parent has placed these file descriptors for this process.
    let (memfd, wakeup) = unsafe { (OwnedFd::from_raw_fd(MEMFD), OwnedFd::from_raw_fd(WAKEUP)) };
    let say = |line: &str| println!("{line}");
    let map = || RingReader::map(memfd.as_fd()).expect("the parent's ring");
    match role.as_str() {
        "reader" => {
            let mut reader = map();
            say("ready: ");
            let (mut records, mut lost) = (0, 0);
            loop {
                let mut poll = libc::pollfd {
                    fd: wakeup.as_raw_fd(),
                    events: libc::POLLIN,
                    revents: 0,
                };
                // SAFETY: one pollfd, as the count says.
                assert_eq!(unsafe { libc::poll(&mut poll, 1, 60_000) }, 1, "woken");
                let mut count = 0u64;
                // SAFETY: reads 8 bytes into an 8-byte buffer.
                let read = unsafe { libc::read(wakeup.as_raw_fd(), (&raw mut count).cast(), 8) };
                assert_eq!(read, 8);
                drain(&mut reader, |record| match check(record) {
                    CheckedRecord::Lost(n) => lost += n,
                    CheckedRecord::Tagged(writer, number) => {
                        assert_eq!((writer, number), (7, records));
                        records += 1;
                    }
                });
                if PollState::from_count(count).hang_up {
                    break;
                }
            }
            say(&format!("seen: {records} {lost}"));
        }
        "dies" => {
            let mut reader = map();
            let _ = reader.next_record();
            say("ready: ");
            // Waits with a borrowed record until the parent kills this process.
            std::thread::sleep(std::time::Duration::from_secs(60));
        }
        "vandal" => {
            say("ready: ");
            let file = std::fs::File::from(memfd);
            let mut random = fastrand::Rng::with_seed(1);
            for round in 0..4000 {
                let value = random.u64(..if round % 3 == 0 { u64::MAX } else { 20_000 });
                let offset = match round % 4 {
                    0 => DATA_TAIL,
                    1 => DATA_HEAD,
                    2 => PAGE_SIZE as u64 + random.u64(..4000),
                    _ => 8 * random.u64(..512),
                };
                poke(&file, offset, value);
            }
            assert!(file.set_len(0).is_err(), "the size is sealed");
            say("done: ");
        }
        "observer" => {
            let mut reader = map();
            assert_eq!(reader.mode(), RingFullPolicy::Overwrite);
            // SAFETY: a mapping, if it succeeded, would be one page at an address chosen by the
            // kernel.
            let writable = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    PAGE_SIZE,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_SHARED,
                    memfd.as_raw_fd(),
                    0,
                )
            };
            assert_eq!(writable, libc::MAP_FAILED, "cannot be mapped writable");
            assert_eq!(next(&mut reader), CheckedRecord::Tagged(7, 0));
            say("ready: ");
            let (mut records, mut overruns, mut last) = (1u64, 0u64, Some(0));
            // Reads until the parent closes the pipe to signal that it has stopped writing.
            let stop = std::thread::spawn(|| std::io::stdin().read_line(&mut String::new()));
            while !stop.is_finished() {
                match reader.next_record() {
                    Ok(Some(record)) => {
                        let CheckedRecord::Tagged(7, number) = check(record) else {
                            panic!("not the parent's")
                        };
                        assert!(last.is_none_or(|last| number > last), "in order");
                        last = Some(number);
                        records += 1;
                    }
                    Ok(None) => {}
                    Err(RingReadError::Overrun { .. }) => overruns += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            let file = std::fs::File::from(memfd);
            assert!(file.write_all_at(&[1], DATA_HEAD).is_err(), "cannot be written");
            say(&format!("seen: {records} {overruns}"));
        }
        other => panic!("no role {other}"),
    }
}

#[test]
fn other_process_reads_all_records_and_hang_up() {
    let ring = Ring::new(4, RingFullPolicy::Writable).expect("a ring");
    ring.set_wakeup(WakeupCondition::Events(16));
    let mut child = start("reader", &ring);
    expect(&mut child, "ready:");
    let (mut number, mut refused) = (0, 0);
    while number < 10_000 {
        match write(&ring, 24 + 8 * (number as usize % 30), 7, number) {
            Ok(()) => number += 1,
            Err(_) => {
                refused += 1;
                std::thread::yield_now();
            }
        }
    }
    ring.hang_up();
    let seen = expect(&mut child, "seen:");
    assert_eq!(seen, format!("10000 {}", refused - ring.pending_lost()));
    assert!(child.wait().expect("ended").success());
}

#[test]
fn killed_reader_loses_only_records() {
    let ring = Ring::new(1, RingFullPolicy::Writable).expect("a ring");
    for number in 0..10 {
        write(&ring, 40, 7, number).expect("room");
    }
    let mut child = start("dies", &ring);
    expect(&mut child, "ready:");
    child.kill().expect("it is ours");
    child.wait().expect("ended");
    let written = (0..1000)
        .filter(|&number| write(&ring, 40, 7, number).is_ok())
        .count() as u64;
    assert_eq!(written, (4096 - 8) / 40 - 10);
    assert_eq!(ring.pending_lost(), 1000 - written);
    // The killed client had released no records, so a new client begins at the first.
    let mut reader = RingReader::map(ring.memfd()).expect("maps");
    assert_eq!(next(&mut reader), CheckedRecord::Tagged(7, 0));
}

#[test]
fn corrupting_process_cannot_harm_writer() {
    let ring = Ring::new(1, RingFullPolicy::Writable).expect("a ring");
    let mut child = start("vandal", &ring);
    expect(&mut child, "ready:");
    let (mut attempts, mut written) = (0u64, 0u64);
    // Writes at least once, because on a busy machine the child may already have exited.
    loop {
        let outer = ring.begin(40, true);
        written += u64::from(write(&ring, 24 + 8 * (attempts as usize % 60), 7, attempts).is_ok());
        written += u64::from(outer.is_ok());
        drop(outer);
        attempts += 2;
        if child.try_wait().expect("ours").is_some() {
            break;
        }
        std::thread::yield_now();
    }
    assert!(child.wait().expect("ended").success());
    assert!(written + ring.pending_lost() <= attempts);
    // Whatever the child wrote, the ring works again after its control page was restored.
    let page = foreign(&ring);
    let position = ring.published();
    poke(&page, DATA_HEAD, position);
    poke(&page, DATA_TAIL, position);
    poke(&page, 1040, PAGE_SIZE as u64);
    poke(&page, 1048, PAGE_SIZE as u64);
    write(&ring, 40, 7, 1).expect("room");
    let mut reader = RingReader::map(ring.memfd()).expect("maps");
    let mut last = None;
    drain(&mut reader, |record| last = Some(check(record)));
    assert_eq!(last, Some(CheckedRecord::Tagged(7, 1)));
}

#[test]
fn observer_of_an_overwrite_ring_never_sees_a_torn_record_and_cannot_write() {
    let ring = Ring::new(4, RingFullPolicy::Overwrite).expect("a ring");
    write(&ring, 24, 7, 0).expect("room");
    let mut child = start("observer", &ring);
    expect(&mut child, "ready:");
    for number in 1..50_000u64 {
        write(&ring, 24 + 8 * (number as usize % 30), 7, number).expect("never full");
        if number % 512 == 0 {
            std::thread::yield_now();
        }
    }
    // Closes the pipe, which ends the loop of the other process.
    drop(child.stdin.take());
    let seen = expect(&mut child, "seen:");
    assert!(child.wait().expect("ended").success(), "{seen}");
    assert_eq!(ring.pending_lost(), 0);
}
