//! Tests of the socket broker. Threads that may not call `connect(2)` can reach the registered
//! sockets and no others, and the VM's own sockets are removed regardless of how the VM exits. The
//! process with the broker is a child process that runs this test program again.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::Builder;

use sandbox::{
    AccessibleFiles, PerfEventAccess, ProcessConfinement, SandboxedThreadKind, SeccompMode,
    SeccompTerminationActions, SocketBroker, SocketDestination,
};
use test_support::child::child_command;

/// Environment variable that passes the directory of the sockets to the child process.
const DIRECTORY: &str = "BROKER_TEST_DIRECTORY";
/// Line that the child prints when its threads are confined.
const CONFINED: &str = "all threads are confined";
/// Exit status of the child process when a filter terminates it because a thread tried to connect.
const STATUS: u8 = 77;

fn start_broker(directory: &Path) -> (Arc<SocketBroker>, SocketDestination, SocketDestination) {
    let confinement = ProcessConfinement {
        seccomp: SeccompMode::On,
        landlock: sandbox::has_landlock(),
    };
    let broker = SocketBroker::start(confinement, || true).unwrap();
    let ports = broker.add_numbered(&directory.join("v")).unwrap();
    let exact = broker.add(&directory.join("back-end")).unwrap();
    (broker, ports, exact)
}

/// Confines this process like a VM and performs the actions requested on standard input.
#[test]
#[ignore = "a child of the tests below"]
fn as_a_child() {
    let directory = PathBuf::from(std::env::var_os(DIRECTORY).unwrap());
    let (broker, ports, exact) = start_broker(&directory);
    let own = UnixListener::bind(directory.join("own")).unwrap();
    broker.remove_at_end(&directory.join("own")).unwrap();
    broker.seal().unwrap();
    let late = broker.add(&directory.join("back-end"));
    assert!(late.is_err(), "no name is taken after the seal");
    let will = SeccompTerminationActions {
        first: || {},
        log: None,
        status: STATUS,
    };
    sandbox::begin(SeccompMode::On, PerfEventAccess::Broker, will).unwrap();
    if sandbox::has_landlock() {
        sandbox::begin_files().unwrap();
        sandbox::only_files(&AccessibleFiles::default()).unwrap();
    }
    sandbox::confine().unwrap();
    println!("\n{CONFINED}");
    std::io::stdout().flush().unwrap();
    let mut word = String::new();
    std::io::stdin().read_line(&mut word).unwrap();
    let path = directory.join("v_7");
    let job = move || match word.trim() {
        "broker" => connections(&ports, &exact),
        "direct" => drop(UnixStream::connect(path)),
        _ => {}
    };
    let thread = sandbox::spawn(SandboxedThreadKind::Socket, Builder::new(), job);
    thread.unwrap().join().unwrap();
    broker.finish();
    assert!(exact_socket_is_removed(&broker), "a broker that has ended");
    drop(own);
    std::process::exit(0);
}

fn exact_socket_is_removed(broker: &Arc<SocketBroker>) -> bool {
    broker.seal().is_err()
}

fn connections(ports: &SocketDestination, exact: &SocketDestination) {
    let greeted = |stream: UnixStream| {
        stream.set_nonblocking(false).unwrap();
        let mut word = [0; 2];
        (&stream).read_exact(&mut word).unwrap();
        word
    };
    assert_eq!(greeted(ports.connect(7).unwrap()), *b"v7");
    assert_eq!(greeted(exact.connect(0).unwrap()), *b"be");
    // These ports have no listener, a link to another user's socket, a regular file, and a stale
    // socket.
    for port in [1, 2, 3, 4] {
        assert!(ports.connect(port).is_err(), "port {port}");
    }
}

/// Creates sockets in `directory` that send a greeting to each client, and a file that is not a
/// socket.
fn sockets(directory: &Path) {
    for (name, greeting) in [("v_7", b"v7"), ("back-end", b"be"), ("docker", b"no")] {
        let listener = UnixListener::bind(directory.join(name)).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let _ = stream.unwrap().write_all(greeting);
            }
        });
    }
    symlink(directory.join("docker"), directory.join("v_2")).unwrap();
    fs::write(directory.join("v_3"), "").unwrap();
    drop(UnixListener::bind(directory.join("v_4")).unwrap());
}

/// Starts a child process that confines itself like a VM.
fn confined(directory: &Path) -> Child {
    let mut child = child_command(module_path!(), DIRECTORY, directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let confined = lines.any(|line| line.unwrap() == CONFINED);
    if !confined {
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        panic!("the child is not confined: {said}");
    }
    child
}

fn ends(mut child: Child, word: &str) -> (Option<i32>, String) {
    let _ = writeln!(child.stdin.take().unwrap(), "{word}");
    let out = child.wait_with_output().unwrap();
    (
        out.status.code(),
        String::from_utf8_lossy(&out.stderr).into_owned(),
    )
}

/// Waits without a timeout until the file has been removed.
fn goes(path: &Path) {
    while path.symlink_metadata().is_ok() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn broker_connects_to_named_sockets_only() {
    let dir = tempfile::tempdir().unwrap();
    sockets(dir.path());
    let child = confined(dir.path());
    let (status, said) = ends(child, "broker");
    assert_eq!(status, Some(0), "{said}");
    assert!(!dir.path().join("own").exists(), "the VM's socket goes with it");
    assert!(dir.path().join("v_7").exists(), "sockets of others stay");
}

#[test]
fn connect_in_confined_thread_terminates_process() {
    let dir = tempfile::tempdir().unwrap();
    sockets(dir.path());
    let (status, said) = ends(confined(dir.path()), "direct");
    assert_eq!(status, Some(STATUS.into()), "{said}");
    assert!(said.contains("asked the kernel for socket ("), "{said}");
    goes(&dir.path().join("own"));
}

#[test]
fn socket_of_a_killed_vm_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    sockets(dir.path());
    let mut child = confined(dir.path());
    assert!(dir.path().join("own").exists());
    child.kill().unwrap();
    child.wait().unwrap();
    goes(&dir.path().join("own"));
}

/// When the VM exits, the broker does not remove a socket that has been replaced, because it may
/// belong to another VM.
#[test]
fn replaced_socket_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    sockets(dir.path());
    let child = confined(dir.path());
    let own = dir.path().join("own");
    fs::remove_file(&own).unwrap();
    let _other = UnixListener::bind(&own).unwrap();
    let (status, said) = ends(child, "nothing");
    assert_eq!(status, Some(0), "{said}");
    assert!(own.exists());
}

/// The broker ignores termination signals, which a service manager sends to all processes of a
/// service. The VM can therefore still connect until it exits.
#[test]
fn broker_survives_termination_signals() {
    if Command::new("ps").output().is_err() {
        return eprintln!("SKIP: no ps here");
    }
    let dir = tempfile::tempdir().unwrap();
    sockets(dir.path());
    let child = confined(dir.path());
    let id = child.id().to_string();
    let out = Command::new("ps")
        .args(["--ppid", &id, "-o", "pid=,comm="])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let broker = text.lines().find(|line| line.contains("socket-broker"));
    let pid = broker.and_then(|line| line.split_whitespace().next());
    let pid = pid.unwrap_or_else(|| panic!("no broker among {text}"));
    let sent = Command::new("kill").args(["-TERM", pid]).status().unwrap();
    assert!(sent.success());
    let (status, said) = ends(child, "broker");
    assert_eq!(status, Some(0), "{said}");
}
