//! Tests of the filters in threads of each kind. Permitted operations succeed, and others terminate
//! the process. Each attempt runs in a child process that runs this test program again.
#![expect(unsafe_code, reason = "system calls that the filters are to stop")]

use std::fs::File;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::process::Output;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Builder;

use sandbox::{PerfEventAccess, SandboxedThreadKind, SeccompMode, SeccompTerminationActions};
use test_support::child::child_command;

/// Environment variable with the mode, thread kind and attempt of the child.
const TASK: &str = "SANDBOX_TEST_TASK";
/// Exit status of a process that a filter has terminated.
const STATUS: u8 = 77;
/// Line that a thread prints when it has completed.
const DONE: &str = "the thread is done";

static RESTORED: AtomicBool = AtomicBool::new(false);

/// Operation that a thread attempts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Attempt {
    /// Operations permitted to every thread.
    Ordinary,
    NewFile,
    Execute,
    Socket,
    Trace,
    Fork,
    Namespace,
    Code,
    CountCpu,
    OtherProcess,
    /// Calls that libraries attempt but do not require, and that fail with an error.
    Refused,
    /// Writing cached data of an image back when its disk is reset.
    Image,
}

/// Disk image that is opened before the filters are applied.
static IMAGE: OnceLock<File> = OnceLock::new();

impl Attempt {
    /// Operations forbidden to all threads.
    const FORBIDDEN: [(Self, &str); 9] = [
        (Self::NewFile, "openat"),
        (Self::Execute, "execve"),
        (Self::Socket, "socket"),
        (Self::Trace, "ptrace"),
        (Self::Fork, "clone"),
        (Self::Namespace, "unshare"),
        (Self::Code, "mmap"),
        (Self::CountCpu, "perf_event_open"),
        (Self::OtherProcess, "tgkill"),
    ];

    fn run(self) {
        match self {
            Self::Ordinary => ordinary(),
            Self::Refused => refused(),
            Self::Image => image(),
            // SAFETY: the calls have valid arguments: strings that outlive them, numbers, and null
            // where that is permitted. None of them harms this process if it is permitted.
            _ => unsafe {
                match self {
                    Self::Ordinary | Self::Refused | Self::Image => 0,
                    Self::NewFile => libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CREAT, 0o600),
                    Self::Execute => libc::execve(
                        c"/does/not/exist".as_ptr(),
                        [std::ptr::null()].as_ptr(),
                        std::ptr::null(),
                    ),
                    Self::Socket => libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0),
                    Self::Trace => libc::syscall(libc::SYS_ptrace, -1, 0, 0, 0) as i32,
                    Self::Fork => libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as i32,
                    Self::Namespace => libc::unshare(0),
                    Self::Code => {
                        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                        let prot = libc::PROT_READ | libc::PROT_EXEC;
                        libc::mmap(std::ptr::null_mut(), 4096, prot, flags, -1, 0) as i32
                    }
                    Self::CountCpu => {
                        libc::syscall(libc::SYS_perf_event_open, std::ptr::null::<u8>(), -1, 0, -1, 8) as i32
                    }
                    Self::OtherProcess => libc::syscall(libc::SYS_tgkill, 1, 1, 0) as i32,
                };
            },
        }
    }
}

/// Performs ordinary operations: memory, locks, time, and a caught panic.
fn ordinary() {
    let big: Vec<u64> = (0..1 << 18).collect();
    assert_eq!(big.iter().sum::<u64>(), (1 << 17) * ((1 << 18) - 1));
    std::thread::sleep(std::time::Duration::from_millis(1));
    let map: std::collections::HashMap<u32, u32> = (0..1000).map(|n| (n, n)).collect();
    assert_eq!(map.len(), 1000);
    let caught = std::panic::catch_unwind(|| std::panic::resume_unwind(Box::new("caught")));
    assert!(caught.is_err());
}

fn image() {
    let file = IMAGE.get().unwrap();
    file.set_len(1 << 20).unwrap();
    file.write_all_at(b"data", 4096).unwrap();
    file.sync_data().unwrap();
    file.sync_all().unwrap();
    let mut back = [0; 4];
    file.read_exact_at(&mut back, 4096).unwrap();
    assert_eq!((&back, file.metadata().unwrap().len()), (b"data", 1 << 20));
}

/// Makes each call that must fail with an error, and checks that it fails and that the thread
/// continues.
fn refused() {
    let kind = sandbox::kind().unwrap();
    let is_refused = |error: &std::io::Error| error.raw_os_error() == Some(libc::EPERM);
    // The starter may create threads, and so may the threads that it starts until they have their
    // own filter. The main thread may open files.
    if kind != SandboxedThreadKind::Starter {
        let started = Builder::new().spawn(|| ());
        assert!(started.is_err_and(|e| is_refused(&e)), "{kind}: a thread");
    }
    if !matches!(kind, SandboxedThreadKind::Main | SandboxedThreadKind::Starter) {
        let opened = std::fs::File::open("/proc/sys/vm/overcommit_memory");
        assert!(opened.is_err_and(|e| is_refused(&e)), "{kind}: a file");
    }
    let link = std::fs::read_link("/proc/self/exe");
    assert!(link.is_err_and(|e| is_refused(&e)), "{kind}: a link");
    // SAFETY: the call writes only through its result pointer, which may be null.
    let limit = unsafe { libc::syscall(libc::SYS_prlimit64, 0, libc::RLIMIT_STACK, 0, 0) };
    assert!(
        limit == -1 && is_refused(&std::io::Error::last_os_error()),
        "{kind}: a limit"
    );
    // The status of an open descriptor is available. SAFETY: standard error is open, and
    // ManuallyDrop prevents its closing.
    let here = std::mem::ManuallyDrop::new(unsafe { std::fs::File::from_raw_fd(libc::STDERR_FILENO) });
    assert!(here.metadata().is_ok(), "{kind}");
}

fn start_another() {
    let (send, receive) = std::sync::mpsc::channel();
    let builder = Builder::new().name("another".into());
    let other = sandbox::spawn(SandboxedThreadKind::Profiler, builder, move || {
        send.send(7).unwrap()
    });
    assert_eq!(receive.recv(), Ok(7));
    other.unwrap().join().unwrap();
}

#[test]
#[ignore = "a child of the tests below"]
fn as_a_child() {
    let task = std::env::var(TASK).unwrap();
    let mut words = task.split(' ');
    let mut next = || words.next().unwrap();
    let mode: SeccompMode = next().parse().unwrap();
    let kind = next();
    let kind = SandboxedThreadKind::ALL
        .into_iter()
        .find(|known| known.name() == kind)
        .unwrap();
    let name = next();
    let tries = Attempt::FORBIDDEN.map(|(what, _)| what);
    let tried = tries
        .into_iter()
        .chain([Attempt::Ordinary, Attempt::Refused, Attempt::Image]);
    let tried = tried
        .into_iter()
        .find(|known| format!("{known:?}") == name)
        .unwrap();
    let will = SeccompTerminationActions {
        first: || RESTORED.store(true, Ordering::Relaxed),
        log: Some(libc::STDOUT_FILENO),
        status: STATUS,
    };
    IMAGE.set(tempfile::tempfile().unwrap()).unwrap();
    sandbox::begin(mode, PerfEventAccess::Broker, will).unwrap();
    let done = move || {
        tried.run();
        // Threads of these kinds are confined before the starter exists and start no threads.
        if tried == Attempt::Ordinary
            && !matches!(kind, SandboxedThreadKind::Console | SandboxedThreadKind::Signals)
        {
            start_another();
        }
        println!("{DONE}");
    };
    // Cover threads that exist before the main thread is confined, and threads started later.
    let builder = Builder::new().name("tries".into());
    let thread = match kind {
        SandboxedThreadKind::Console | SandboxedThreadKind::Signals => builder.spawn(move || {
            sandbox::enter(kind);
            done();
        }),
        SandboxedThreadKind::Main => builder.spawn(move || {
            sandbox::confine().unwrap();
            done();
        }),
        // The starter's filter applies to new threads until they have their own.
        SandboxedThreadKind::Starter => builder.spawn(move || {
            sandbox::confine().unwrap();
            let builder = Builder::new().name("tries".into());
            let started = sandbox::spawn_prepared(SandboxedThreadKind::Device, builder, done, || ());
            started.unwrap().join().unwrap();
        }),
        _ => builder.spawn(move || {
            sandbox::confine().unwrap();
            let builder = Builder::new().name("tries".into());
            sandbox::spawn(kind, builder, done).unwrap().join().unwrap();
        }),
    };
    thread.unwrap().join().unwrap();
    // Otherwise, the next calls of the test harness's own threads would terminate them.
    std::process::exit(0);
}

fn child(mode: SeccompMode, kind: SandboxedThreadKind, tried: Attempt) -> Output {
    child_command(module_path!(), TASK, format!("{mode} {kind} {tried:?}"))
        .output()
        .unwrap()
}

#[test]
fn forbidden_call_terminates_process_with_message() {
    for kind in SandboxedThreadKind::ALL {
        for (tried, call) in Attempt::FORBIDDEN {
            let out = child(SeccompMode::On, kind, tried);
            let said = String::from_utf8_lossy(&out.stderr);
            let lines: Vec<&str> = said
                .lines()
                .filter(|line| line.starts_with("perfvisor"))
                .collect();
            let begin = format!("perfvisor: error: thread tries ({kind}) asked the kernel for {call} (");
            assert!(
                lines.len() == 1 && lines[0].starts_with(&begin),
                "{kind} {tried:?}: {said}"
            );
            assert_eq!(out.status.code(), Some(STATUS.into()), "{kind} {tried:?}");
            let logged = String::from_utf8_lossy(&out.stdout);
            assert!(logged.contains(lines[0]) && !logged.contains(DONE), "{logged}");
        }
    }
}

#[test]
fn ordinary_calls_are_allowed_for_all_kinds() {
    for mode in [SeccompMode::On, SeccompMode::Log, SeccompMode::Off] {
        for kind in SandboxedThreadKind::ALL {
            let out = child(mode, kind, Attempt::Ordinary);
            let (said, err) = (
                String::from_utf8_lossy(&out.stdout),
                String::from_utf8_lossy(&out.stderr),
            );
            assert!(said.contains(DONE), "{mode} {kind}: {said}{err}");
            assert_eq!(out.status.code(), Some(0), "{mode} {kind}: {err}");
        }
    }
}

#[test]
fn refused_calls_do_not_stop_threads() {
    for kind in SandboxedThreadKind::ALL {
        let out = child(SeccompMode::On, kind, Attempt::Refused);
        let err = String::from_utf8_lossy(&out.stderr);
        assert!(
            String::from_utf8_lossy(&out.stdout).contains(DONE),
            "{kind}: {err}"
        );
        assert_eq!(out.status.code(), Some(0), "{kind}: {err}");
    }
}

/// The threads that reset a disk may write its cached data back to the image: a vCPU thread when
/// the guest's driver resets the disk, and the main thread when the VM ends.
#[test]
fn disk_reset_writes_image_back() {
    for kind in [
        SandboxedThreadKind::Main,
        SandboxedThreadKind::Vcpu,
        SandboxedThreadKind::Device,
    ] {
        let out = child(SeccompMode::On, kind, Attempt::Image);
        let err = String::from_utf8_lossy(&out.stderr);
        assert!(
            String::from_utf8_lossy(&out.stdout).contains(DONE),
            "{kind}: {err}"
        );
    }
}

/// In log mode and without filters, a forbidden system call does not terminate the process.
#[test]
fn log_and_off_modes_terminate_nothing() {
    for mode in [SeccompMode::Log, SeccompMode::Off] {
        for (tried, _) in Attempt::FORBIDDEN
            .iter()
            .filter(|(tried, _)| *tried != Attempt::Fork)
        {
            let out = child(mode, SandboxedThreadKind::Vcpu, *tried);
            let said = String::from_utf8_lossy(&out.stdout);
            assert!(said.contains(DONE), "{mode} {tried:?}: {said}");
        }
    }
}
