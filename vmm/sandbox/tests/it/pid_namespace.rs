//! Tests of a PID namespace and its supervisor. The process that becomes the supervisor must be
//! single-threaded, so it is a child process that runs this test program again.
#![expect(unsafe_code, reason = "signals and process IDs")]

use std::io::{BufRead, BufReader, Lines};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, ExitStatus, Stdio};

use sandbox::{PidNamespaceSupervisor, ProcessConfinement, SeccompMode};
use test_support::child::child_command;

/// Environment variable with the task of the process in the namespace.
const TASK: &str = "PID_NAMESPACE_TEST_TASK";
/// Exit status of the child process if this user may not create the namespace.
const NOT_PERMITTED: i32 = 99;

#[test]
#[ignore = "a child of the tests below"]
fn as_a_child() {
    let task = std::env::var(TASK).unwrap();
    // SAFETY: the harness runs one test, and its other thread waits for this one and holds no lock.
    let supervisor = unsafe { libc::fork() };
    if supervisor != 0 {
        let mut status = 0;
        // SAFETY: `status` is valid for writes during the call.
        assert_eq!(unsafe { libc::waitpid(supervisor, &mut status, 0) }, supervisor);
        return println!("\nstatus {status}");
    }
    // Act as a shell job: create a process group whose parent process, the child of the test, is in
    // the same session.
    // SAFETY: the call passes only integers.
    unsafe { libc::setpgid(0, 0) };
    let (reports, sink) = std::io::pipe().unwrap();
    let supervisor = PidNamespaceSupervisor {
        confinement: ProcessConfinement {
            seccomp: SeccompMode::On,
            landlock: sandbox::has_landlock(),
        },
        give_up: || true,
        terminal: false,
        kept: Some(sink.as_fd()),
        report: &|report| drop(std::io::Write::write_all(&mut &sink, &[report])),
    };
    let Some(link) = supervisor.start().unwrap() else {
        std::process::exit(NOT_PERMITTED);
    };
    // SAFETY: the calls take no arguments.
    let ids = unsafe { (libc::getpid(), libc::getppid(), libc::getpgrp()) };
    assert_eq!(ids, (1, 0, 1));
    let own = [sandbox::starter_pid(), sandbox::host_pid(), sandbox::host_tid()];
    println!("\nids {} {} {}", own[0], own[1], own[2]);
    match task.as_str() {
        "exit" => std::process::exit(7),
        "report" => {
            drop(sink);
            link.report(b'x').unwrap();
            let mut heard = [0];
            std::io::Read::read_exact(&mut &reports, &mut heard).unwrap();
            std::process::exit(i32::from(heard[0]));
        }
        "abort" => std::process::abort(),
        // SAFETY: the instruction ends the process, which is the purpose.
        "fault" => unsafe {
            libc::signal(libc::SIGILL, libc::SIG_DFL);
            std::arch::asm!("ud2")
        },
        "wait" => std::process::exit(next_stop_signal()),
        _ => loop {
            std::thread::park();
        },
    }
}

/// Waits for a stop signal that the supervisor forwards, and returns its number.
fn next_stop_signal() -> i32 {
    // SAFETY: zeroed sets and siginfo structures are valid, and all pointers refer to live locals.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        let mut info: libc::siginfo_t = std::mem::zeroed();
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            libc::sigaddset(&mut set, signal);
        }
        let signal = libc::sigwaitinfo(&set, &mut info);
        assert!(sandbox::is_forwarded(&info));
        signal
    }
}

/// A supervisor process, and the first process of the PID namespace that it supervises.
struct Supervised {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    supervisor: i32,
    first: i32,
}

impl Supervised {
    /// Starts a process with `task`. Returns `None` if this user cannot create a namespace.
    fn start(task: &str) -> Option<Self> {
        let mut child = child_command(module_path!(), TASK, task)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut found = lines.by_ref().map_while(Result::ok);
        let line = found.find(|line| line.starts_with("ids ") || line.starts_with("status "));
        let line = line.expect("the child prints one of them");
        let Some(ids) = line.strip_prefix("ids ") else {
            child.wait().unwrap();
            assert_eq!(status_in(&line).code(), Some(NOT_PERMITTED));
            eprintln!("SKIP: only root creates a PID namespace without a user namespace");
            return None;
        };
        let ids: Vec<i32> = ids.split(' ').map(|id| id.parse().unwrap()).collect();
        assert_eq!(ids[1], ids[2], "the first thread has the number of its process");
        Some(Self {
            child,
            lines,
            supervisor: ids[0],
            first: ids[1],
        })
    }

    fn signal(&self, to: i32, signal: i32) {
        // SAFETY: the process has not been waited for, so it still has its ID.
        assert_eq!(unsafe { libc::kill(to, signal) }, 0);
    }

    /// Waits until the supervisor exits.
    fn wait(mut self) -> ExitStatus {
        let mut lines = self.lines.by_ref().map_while(Result::ok);
        let line = lines.find(|line| line.starts_with("status "));
        self.child.wait().unwrap();
        status_in(&line.unwrap())
    }
}

fn status_in(line: &str) -> ExitStatus {
    ExitStatus::from_raw(line.strip_prefix("status ").unwrap().parse().unwrap())
}

#[test]
fn supervisor_ends_like_first_process() {
    let Some(supervised) = Supervised::start("exit") else {
        return;
    };
    assert_eq!(supervised.wait().code(), Some(7));
    let supervised = Supervised::start("park").unwrap();
    supervised.signal(supervised.first, libc::SIGKILL);
    assert_eq!(supervised.wait().signal(), Some(libc::SIGKILL));
    let supervised = Supervised::start("fault").unwrap();
    assert_eq!(supervised.wait().signal(), Some(libc::SIGILL));
    // PID 1 ignores the SIGABRT that it sends to itself, and abort(3) then causes a fault.
    let supervised = Supervised::start("abort").unwrap();
    assert_eq!(supervised.wait().signal(), Some(libc::SIGSEGV));
}

#[test]
fn supervisor_forwards_stop_signals() {
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        let Some(supervised) = Supervised::start("wait") else {
            return;
        };
        supervised.signal(supervised.supervisor, signal);
        assert_eq!(supervised.wait().code(), Some(signal));
    }
}

#[test]
fn supervisor_handles_reports() {
    let Some(supervised) = Supervised::start("report") else {
        return;
    };
    assert_eq!(supervised.wait().code(), Some(b'x'.into()));
}

/// Returns the state of a process as in proc_pid_stat(5), or `None` if it does not exist.
fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

fn wait_until(what: &str, test: impl Fn() -> bool) {
    let until = std::time::Instant::now() + std::time::Duration::from_secs(300);
    while !test() {
        assert!(std::time::Instant::now() < until, "{what}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn first_process_ends_with_supervisor() {
    let Some(supervised) = Supervised::start("park") else {
        return;
    };
    let (supervisor, first) = (supervised.supervisor, supervised.first);
    supervised.signal(supervisor, libc::SIGKILL);
    assert_eq!(supervised.wait().signal(), Some(libc::SIGKILL));
    wait_until("the first process ends", || {
        state(first).is_none_or(|state| state == 'Z')
    });
}

/// If the shell stops or continues the job, the supervisor and the first process of the PID
/// namespace stop or continue together.
#[test]
fn first_process_stops_and_continues_with_supervisor() {
    let Some(supervised) = Supervised::start("park") else {
        return;
    };
    let both = [supervised.supervisor, supervised.first];
    supervised.signal(supervised.supervisor, libc::SIGTSTP);
    wait_until("both stop", || both.iter().all(|pid| state(*pid) == Some('T')));
    supervised.signal(supervised.supervisor, libc::SIGCONT);
    wait_until("both continue", || {
        both.iter()
            .all(|pid| state(*pid).is_some_and(|state| state != 'T'))
    });
    supervised.signal(supervised.first, libc::SIGKILL);
    supervised.wait();
}
