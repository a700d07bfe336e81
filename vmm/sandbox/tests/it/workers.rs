//! Tests of workers: forbidden calls, resource limits, the reported termination status, and the
//! start of the next worker. The process with the keeper and the workers is a child process that
//! runs this test program again.
#![expect(unsafe_code, reason = "system calls that the filters are to stop")]

use std::ffi::c_long;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use sandbox::{
    ProcessConfinement, SeccompMode, WorkerExit, WorkerKeeper, WorkerLimits, WorkerProcess, WorkerStartError,
};
use test_support::child::child_command;

/// Environment variable with the task of the child.
const TASK: &str = "WORKERS_TEST_TASK";
/// Line that a child prints when it has completed its task.
const DONE: &str = "all of it is done";
const LIMITS: WorkerLimits = WorkerLimits {
    memory_bytes: 256 << 20,
    cpu_seconds: 1,
};

/// Body of a worker. The letter that the worker reads from its socket selects what it does.
fn work(mut socket: UnixStream, number: u32) {
    let mut letter = [0];
    socket.read_exact(&mut letter).unwrap();
    match letter[0] {
        b'n' => socket.write_all(&number.to_le_bytes()).unwrap(),
        b'p' => panic!("over\na table"),
        b'm' => {
            let mut all: Vec<Vec<u8>> = Vec::new();
            loop {
                all.push(vec![1; 1 << 20]);
            }
        }
        b't' => loop {
            std::hint::black_box(number);
        },
        b'h' => {
            socket.write_all(&std::process::id().to_le_bytes()).unwrap();
            // This read blocks until the worker is terminated.
            let _ = socket.read(&mut letter);
        }
        b's' => {
            socket
                .write_all(&endless(u64::from(number)).to_le_bytes())
                .unwrap();
        }
        b'o' => {
            ordinary();
            socket.write_all(b"o").unwrap();
        }
        tried => {
            let at = usize::from(tried - b'A');
            let (_, call, arguments) = FORBIDDEN[at];
            let [a, b, c, d, e, f] = arguments;
            // SAFETY: the arguments are numbers, null or out of range. None of the calls harms this
            // process if it is permitted.
            unsafe { libc::syscall(call, a, b, c, d, e, f) };
        }
    }
}

/// Recurses without end.
#[expect(unconditional_recursion, reason = "it is to end the process")]
fn endless(number: u64) -> u64 {
    std::hint::black_box(endless(std::hint::black_box(number + 1)) + number)
}

/// Calls that workers may not make.
const FORBIDDEN: [(&str, c_long, [c_long; 6]); 18] = [
    (
        "a new file",
        libc::SYS_openat,
        [
            libc::AT_FDCWD as c_long,
            0,
            (libc::O_RDWR | libc::O_CREAT) as c_long,
            0o600,
            0,
            0,
        ],
    ),
    ("execve", libc::SYS_execve, [0; 6]),
    (
        "a process",
        libc::SYS_clone,
        [libc::SIGCHLD as c_long, 0, 0, 0, 0, 0],
    ),
    ("clone3", libc::SYS_clone3, [0; 6]),
    (
        "a socket",
        libc::SYS_socket,
        [libc::AF_UNIX as c_long, 1, 0, 0, 0, 0],
    ),
    (
        "a pair",
        libc::SYS_socketpair,
        [libc::AF_UNIX as c_long, 1, 0, 0, 0, 0],
    ),
    ("a descriptor that comes", libc::SYS_recvmsg, [0; 6]),
    ("a descriptor that goes", libc::SYS_sendmsg, [0; 6]),
    ("ptrace", libc::SYS_ptrace, [-1, 0, 0, 0, 0, 0]),
    (
        "the memory of others",
        libc::SYS_process_vm_readv,
        [1, 0, 0, 0, 0, 0],
    ),
    ("a signal", libc::SYS_kill, [1, 0, 0, 0, 0, 0]),
    ("another's thread", libc::SYS_tgkill, [1, 1, 0, 0, 0, 0]),
    ("a namespace", libc::SYS_unshare, [0; 6]),
    (
        "a filter",
        libc::SYS_seccomp,
        [libc::SECCOMP_SET_MODE_FILTER as c_long, 0, 0, 0, 0, 0],
    ),
    (
        "other limits",
        libc::SYS_prlimit64,
        [0, libc::RLIMIT_AS as c_long, 0, 0, 0, 0],
    ),
    (
        "code",
        libc::SYS_mmap,
        [
            0,
            4096,
            (libc::PROT_READ | libc::PROT_EXEC) as c_long,
            (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as c_long,
            -1,
            0,
        ],
    ),
    ("events", libc::SYS_perf_event_open, [0, -1, 0, -1, 8, 0]),
    ("a request", libc::SYS_ioctl, [0; 6]),
];

/// Performs operations that every worker may perform: it uses memory, a hash table, and a caught
/// panic, without files or new descriptors.
fn ordinary() {
    for _ in 0..3 {
        let big: Vec<u64> = (0..1 << 22).collect();
        assert_eq!(big.last(), Some(&((1 << 22) - 1)));
    }
    let map: std::collections::HashMap<u32, u32> = (0..100_000).map(|n| (n, n)).collect();
    assert_eq!(map.len(), 100_000);
    let caught = std::panic::catch_unwind(|| panic!("caught"));
    assert!(caught.is_err());
    fs::File::open("/proc/self/status").unwrap_err();
}

fn workers(mode: SeccompMode) -> WorkerKeeper {
    let confinement = ProcessConfinement {
        seccomp: mode,
        landlock: sandbox::has_landlock(),
    };
    WorkerKeeper::start(confinement, LIMITS, || true, work).unwrap()
}

fn begun(workers: &WorkerKeeper, letter: u8) -> WorkerProcess<'_> {
    let mut worker = workers.begin().unwrap();
    worker.socket().write_all(&[letter]).unwrap();
    worker
}

/// Starts a worker with the given letter. Returns all of its output and its termination status.
fn read_all(workers: &WorkerKeeper, letter: u8) -> (Vec<u8>, WorkerExit) {
    let mut worker = begun(workers, letter);
    let mut said = Vec::new();
    // Reading fails if the worker closes its socket while data in it is unread.
    let _ = worker.socket().read_to_end(&mut said);
    (said, worker.end().unwrap())
}

fn every_end(mode: SeccompMode) {
    let workers = workers(mode);
    let mut number = 0u32;
    let mut next_one_works = |workers: &WorkerKeeper, before: u32| {
        number += before;
        let (said, ended) = read_all(workers, b'n');
        assert_eq!((said, ended), (number.to_le_bytes().to_vec(), WorkerExit::Done));
        number += 1;
    };
    next_one_works(&workers, 0);
    for (letter, expected) in [(b'm', WorkerExit::Memory), (b't', WorkerExit::Time)] {
        assert_eq!(read_all(&workers, letter), (Vec::new(), expected));
        next_one_works(&workers, 1);
    }
    match read_all(&workers, b'p').1 {
        WorkerExit::Panicked(words) => {
            assert!(
                words.starts_with("at ") && words.ends_with(": over a table"),
                "{words}"
            );
        }
        other => panic!("{other:?}"),
    }
    next_one_works(&workers, 1);
    match read_all(&workers, b's').1 {
        WorkerExit::Aborted(words) => assert!(words.contains("overflowed its stack"), "{words}"),
        other => panic!("{other:?}"),
    }
    next_one_works(&workers, 1);
    // The worker is killed, or receives the signal that the runtime raises on memory exhaustion.
    for (option, signal) in [("-KILL", libc::SIGKILL), ("-ABRT", libc::SIGABRT)] {
        let mut worker = begun(&workers, b'h');
        let pid = pid_of(&mut worker);
        let killed = Command::new("kill").args([option, &pid.to_string()]).status();
        assert!(killed.unwrap().success());
        assert_eq!(worker.socket().read(&mut [0]).unwrap(), 0);
        assert_eq!(worker.end().unwrap(), WorkerExit::Signal(signal));
        next_one_works(&workers, 1);
    }
    // The worker blocks or is stopped, and the VM terminates it.
    for stopped in [false, true] {
        let mut worker = begun(&workers, b'h');
        let pid = pid_of(&mut worker);
        if stopped {
            let stop = Command::new("kill").args(["-STOP", &pid.to_string()]).status();
            assert!(stop.unwrap().success());
        }
        assert_eq!(worker.end().unwrap(), WorkerExit::Signal(libc::SIGKILL));
        next_one_works(&workers, 1);
    }
    // Drop the worker without a message to the keeper.
    drop(begun(&workers, b'h'));
    next_one_works(&workers, 1);
    // The keeper is killed together with the current worker, and no further worker can be started.
    let mut worker = begun(&workers, b'h');
    let keeper = parent(pid_of(&mut worker));
    let killed = Command::new("kill").args(["-9", &keeper.to_string()]).status();
    assert!(killed.unwrap().success());
    assert_eq!(worker.socket().read(&mut [0]).unwrap(), 0);
    worker.end().unwrap_err();
    for _ in 0..2 {
        let gone = workers.begin().unwrap_err();
        assert!(matches!(gone, WorkerStartError::NoKeeper(_)), "{gone}");
    }
}

fn pid_of(worker: &mut WorkerProcess<'_>) -> u32 {
    let mut pid = [0; 4];
    worker.socket().read_exact(&mut pid).unwrap();
    u32::from_le_bytes(pid)
}

fn forbidden() {
    let workers = workers(SeccompMode::On);
    assert_eq!(read_all(&workers, b'o'), (b"o".to_vec(), WorkerExit::Done));
    for (at, (what, ..)) in FORBIDDEN.iter().enumerate() {
        let (said, ended) = read_all(&workers, b'A' + at as u8);
        assert_eq!((said, ended), (Vec::new(), WorkerExit::Forbidden), "{what}");
    }
    assert_eq!(read_all(&workers, b'n').1, WorkerExit::Done);
}

/// Prints the process IDs of a waiting worker and of its keeper, so that the test can examine these
/// processes.
fn shown() {
    let workers = workers(SeccompMode::On);
    let mut worker = begun(&workers, b'h');
    // The test harness has printed an incomplete line, so start a new one.
    println!("\n{}", pid_of(&mut worker));
    std::io::stdout().flush().unwrap();
    loop {
        std::thread::sleep(Duration::from_secs(1000));
    }
}

#[test]
#[ignore = "a child of the tests below"]
fn as_a_child() {
    match std::env::var(TASK).unwrap().as_str() {
        "ends" => every_end(SeccompMode::On),
        "ends without filters" => every_end(SeccompMode::Off),
        "ends logged" => every_end(SeccompMode::Log),
        "forbidden" => forbidden(),
        _ => shown(),
    }
    println!("{DONE}");
}

#[track_caller]
fn does(task: &str) {
    let Output {
        status,
        stdout,
        stderr,
    } = child_command(module_path!(), TASK, task).output().unwrap();
    let said = String::from_utf8_lossy(&stdout);
    let err = String::from_utf8_lossy(&stderr);
    assert!(status.success() && said.contains(DONE), "{said}{err}");
}

/// A worker that exhausts its memory, exceeds its CPU time limit, panics, is killed, or exits is
/// reported as such, and the next worker starts.
#[test]
fn worker_exit_is_reported_and_next_worker_starts() {
    does("ends");
}

#[test]
fn limits_hold_without_filters() {
    does("ends without filters");
    does("ends logged");
}

#[test]
fn forbidden_call_kills_worker_only() {
    does("forbidden");
}

/// Returns the parent process ID of process `pid`.
fn parent(pid: u32) -> u32 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"));
    line.unwrap().trim().parse().unwrap()
}

/// Returns the numbers of sockets and pipes that process `pid` has open in addition to its standard
/// streams, which must refer to pipes. No other descriptor may be open, except for the file
/// `other`.
fn sockets_and_pipes(pid: u32, other: Option<&str>) -> (usize, usize) {
    let mut found = (0, 0);
    for fd in fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let fd = fd.unwrap();
        let number: u32 = fd.file_name().to_str().unwrap().parse().unwrap();
        // The keeper may close a descriptor between the two calls.
        let Ok(target) = fs::read_link(fd.path()) else {
            continue;
        };
        let target = target.to_str().unwrap();
        match number {
            // Standard streams lead to a pipe without a reader.
            0..=2 => assert!(target.starts_with("pipe:"), "{target}"),
            _ if target.starts_with("socket:") => found.0 += 1,
            _ if target.starts_with("pipe:") => found.1 += 1,
            _ if Some(target) == other => {}
            _ => panic!("{pid}: {target}"),
        }
    }
    found
}

/// Returns the path of the OOM score adjustment of process `pid`.
fn oom_score_path(pid: u32) -> String {
    format!("/proc/{pid}/oom_score_adj")
}

/// A worker has only its socket and the pipe for its output, and cannot access the VM's files. Both
/// the worker and its keeper exit with the VM.
#[test]
fn worker_has_one_socket_and_exits_with_vm() {
    let mut vm = child_command(module_path!(), TASK, "shown")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(vm.stdout.take().unwrap()).lines();
    let worker = lines.find_map(|line| line.unwrap().trim().parse().ok());
    let worker: u32 = worker.expect("its number");
    let keeper = parent(worker);
    assert_eq!(parent(keeper), vm.id());
    // The worker's second socket descriptor is a copy of the first.
    assert_eq!(sockets_and_pipes(worker, None), (2, 1));
    // The keeper closes its copy of the worker's socket after it has sent it to the VM.
    let oom_score = oom_score_path(keeper);
    while sockets_and_pipes(keeper, Some(&oom_score)) == (2, 1) {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(sockets_and_pipes(keeper, Some(&oom_score)), (1, 1));
    for pid in [worker, keeper] {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        assert!(status.contains("\nSeccomp:\t2\n"), "{status}");
    }
    // When memory is low, the kernel kills the worker first. The keeper has the same priority as
    // the VM.
    let own = fs::read_to_string(oom_score_path(vm.id())).unwrap();
    assert_eq!(fs::read_to_string(oom_score_path(worker)).unwrap(), "1000\n");
    assert_eq!(fs::read_to_string(oom_score).unwrap(), own);
    vm.kill().unwrap();
    vm.wait().unwrap();
    for pid in [worker, keeper] {
        // The process may be a zombie.
        let there = || {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            Path::new(&format!("/proc/{pid}")).exists() && !status.contains("State:\tZ")
        };
        while there() {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
