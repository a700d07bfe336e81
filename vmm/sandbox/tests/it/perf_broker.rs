//! Tests of the perf event broker: the events that it opens for a VM, and the events of a VM whose
//! broker has exited. The process with the broker is a child process that runs this test program
//! again.
#![expect(unsafe_code, reason = "perf_event_open(2), and reads of its descriptor")]

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sandbox::{PerfBroker, PerfBrokerError, ProcessConfinement, SeccompMode};
use test_support::child::child_command;

/// A process outside the VM, as the target of an attack. The broker must not open events on it.
struct Victim(Child);

impl Victim {
    fn start() -> Self {
        let child = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn();
        Self(child.unwrap())
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Environment variable with the task of the child.
const TASK: &str = "ISOLATION_TEST_TASK";

/// Runs `task` in a separate process, which may fork.
fn run_in_child(task: &str) {
    let child = child_command(module_path!(), TASK, task).output().unwrap();
    let said = String::from_utf8_lossy(&child.stdout) + String::from_utf8_lossy(&child.stderr);
    eprint!("{said}");
    assert!(child.status.success(), "{said}");
}

#[test]
#[ignore = "run by others, in a process of its own"]
fn as_a_child() {
    match std::env::var(TASK).unwrap_or_default().as_str() {
        "requests" => requests_outside_vm_are_denied(),
        "end" => events_outlive_the_broker(),
        "time" => time_of_opens(),
        _ => {}
    }
}

#[test]
fn perf_broker_opens_events_of_own_threads_only() {
    run_in_child("requests");
}

#[test]
fn events_survive_broker_exit() {
    run_in_child("end");
}

/// Prints the time that the broker takes to open an event. Run with `cargo test -p sandbox --test
/// it -- --ignored --nocapture event_open_time`.
#[test]
#[ignore = "a measurement"]
fn event_open_time_is_printed() {
    run_in_child("time");
}

const SOFTWARE: u32 = 1;
const TASK_CLOCK: u64 = 1;
const PAGE_FAULTS: u64 = 2;

/// Returns the `struct perf_event_attr` of a disabled event.
fn attr(kind: u32, config: u64) -> [u8; 144] {
    let mut attr = [0; 144];
    attr[..4].copy_from_slice(&kind.to_ne_bytes());
    attr[4..8].copy_from_slice(&144u32.to_ne_bytes());
    attr[8..16].copy_from_slice(&config.to_ne_bytes());
    attr[40] = 1;
    attr
}

fn broker() -> PerfBroker {
    let confinement = ProcessConfinement {
        seccomp: SeccompMode::On,
        landlock: sandbox::has_landlock(),
    };
    PerfBroker::start(confinement, libc::SIGUSR2, || true).unwrap()
}

fn own_tid() -> i32 {
    // SAFETY: the call takes no arguments and cannot fail.
    unsafe { libc::gettid() }
}

fn refusal(opened: Result<OwnedFd, PerfBrokerError>) -> Option<i32> {
    match opened {
        Err(PerfBrokerError::Refused(e)) => e.raw_os_error(),
        other => panic!("{other:?}"),
    }
}

fn requests_outside_vm_are_denied() {
    let broker = broker();
    let tid = own_tid();
    let faults = attr(SOFTWARE, PAGE_FAULTS);
    if let Err(PerfBrokerError::Refused(e)) = broker.open(&faults, tid, None, None) {
        return eprintln!("SKIP: this user may not count: {e}");
    }
    let victim = Victim::start();
    let outside = victim.0.id().cast_signed();
    for other in [outside, 1, std::os::unix::process::parent_id().cast_signed()] {
        assert_eq!(
            refusal(broker.open(&faults, other, None, None)),
            Some(libc::ESRCH),
            "{other}"
        );
        // Use a signal receiver outside the VM.
        let opened = broker.open(&faults, tid, None, Some(other));
        assert_eq!(refusal(opened), Some(libc::ESRCH), "{other}");
    }
    // Open events on any process, and on the broker itself.
    for none in [-1, 0] {
        assert_eq!(
            refusal(broker.open(&faults, none, None, None)),
            Some(libc::EINVAL)
        );
    }
    let uprobe = fs::read_to_string("/sys/bus/event_source/devices/uprobe/type");
    let uprobe = uprobe.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(9);
    // Open a uprobe, whose reference counter is written in another process, a breakpoint, and a
    // tracepoint.
    for kind in [uprobe, 5, 2] {
        assert_eq!(
            refusal(broker.open(&attr(kind, 1), tid, None, None)),
            Some(libc::EPERM),
            "{kind}"
        );
    }
    // Request samples of user registers and stack, and a signal for each sample (sigtrap).
    let (mut stack, mut trap) = (attr(SOFTWARE, 0), attr(SOFTWARE, 0));
    stack[24..32].copy_from_slice(&(1u64 << 12 | 1 << 13).to_ne_bytes());
    trap[44] = 1 << 5;
    for bad in [stack, trap] {
        assert_eq!(refusal(broker.open(&bad, tid, None, None)), Some(libc::EPERM));
    }
    // Use a group leader that is not an event.
    let file = fs::File::open("/dev/null").unwrap();
    let opened = broker.open(&faults, tid, Some(std::os::fd::AsFd::as_fd(&file)), None);
    assert_eq!(refusal(opened), Some(libc::EBADF));
    // The broker still works after all denied requests.
    broker.open(&faults, tid, None, Some(tid)).unwrap();
}

fn children() -> Vec<PathBuf> {
    let own = format!("/proc/self/task/{}/children", std::process::id());
    let all = fs::read_to_string(own).unwrap() + &fs::read_to_string("/proc/thread-self/children").unwrap();
    all.split_whitespace()
        .map(|pid| Path::new("/proc").join(pid))
        .collect()
}

fn count(event: &OwnedFd) -> u64 {
    let mut value = [0; 8];
    // SAFETY: the buffer has eight bytes, and the event has no read format.
    let read = unsafe { libc::read(event.as_raw_fd(), value.as_mut_ptr().cast(), 8) };
    assert_eq!(read, 8);
    u64::from_ne_bytes(value)
}

fn events_outlive_the_broker() {
    let broker = broker();
    let mut clock = attr(SOFTWARE, TASK_CLOCK);
    clock[40] = 0;
    let event = match broker.open(&clock, own_tid(), None, None) {
        Ok(event) => event,
        Err(e) => return eprintln!("SKIP: this user may not count: {e}"),
    };
    let is_broker =
        |pid: &&PathBuf| fs::read_to_string(pid.join("comm")).is_ok_and(|c| c.trim() == "perf-broker");
    let all = children();
    let pid = all.iter().find(is_broker).expect("a broker");
    let pid = pid.file_name().unwrap().to_str().unwrap();
    assert!(Command::new("kill").args(["-9", pid]).status().unwrap().success());
    for _ in 0..2 {
        let opened = broker.open(&clock, own_tid(), None, None);
        assert!(matches!(opened, Err(PerfBrokerError::Gone(_))), "{opened:?}");
    }
    let before = count(&event);
    // The event counts the CPU time of this thread.
    while count(&event) == before {
        std::hint::spin_loop();
    }
}

fn time_of_opens() {
    const OPENS: usize = 2000;
    let broker = broker();
    let faults = attr(SOFTWARE, PAGE_FAULTS);
    let tid = own_tid();
    let direct = || {
        // SAFETY: the attributes outlive the call and contain their own size.
        let fd = unsafe { libc::syscall(libc::SYS_perf_event_open, faults.as_ptr(), tid, -1, -1, 8) };
        // SAFETY: the descriptor has just been opened and is not owned elsewhere.
        unsafe { libc::close(i32::try_from(fd).unwrap()) };
    };
    let asked = || drop(broker.open(&faults, tid, None, Some(tid)).unwrap());
    let print = |name: &str, open: &dyn Fn()| {
        let mut times: Vec<Duration> = (0..OPENS)
            .map(|_| {
                let start = Instant::now();
                open();
                start.elapsed()
            })
            .collect();
        times.sort();
        let at = |part: usize| times[OPENS * part / 100];
        eprintln!(
            "{name}: median {:?}, 10 % {:?}, 90 % {:?}",
            at(50),
            at(10),
            at(90)
        );
    };
    for _ in 0..3 {
        print("directly", &direct);
        print("by the broker", &asked);
    }
}
