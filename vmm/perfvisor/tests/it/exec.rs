//! `perfvisor exec` with an unresponsive guest. Signals always let the user terminate the command.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::common::vm::PROGRAM;
use guest_agent::request::CommandExit;
use guest_agent::wire::{FrameKind, read_frame, write_frame};

fn exec(socket: &Path, words: &[&str]) -> Child {
    // Restore default signal actions, because nohup and background jobs of a shell ignore signals.
    Command::new("env")
        .args(["--default-signal=HUP,INT,TERM", PROGRAM])
        .args(["exec", "vm", "--socket"])
        .arg(socket)
        .args(words)
        .args(["--", "sleep", "1000"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill")
        .args([name, &child.id().to_string()])
        .status();
    assert!(sent.unwrap().success());
}

/// Accepts a connection, and acts as the agent of a guest up to the start of the command.
fn accept(listener: &UnixListener) -> UnixStream {
    let (mut stream, _) = listener.accept().unwrap();
    let mut byte = [0];
    while byte != *b"\n" {
        stream.read_exact(&mut byte).unwrap();
    }
    stream.write_all(b"OK 1\n").unwrap();
    assert_eq!(read_frame(&mut stream).unwrap().unwrap().kind, FrameKind::Request);
    write_frame(&mut stream, FrameKind::Accepted, &[]).unwrap();
    stream
}

/// If a signal arrives before the command has started, it terminates `perfvisor exec` itself.
#[test]
fn exec_ends_on_signal_while_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("vsock");
    let listener = UnixListener::bind(&socket).unwrap();
    for (name, number) in [
        ("-INT", libc::SIGINT),
        ("-TERM", libc::SIGTERM),
        ("-HUP", libc::SIGHUP),
    ] {
        let mut child = exec(&socket, &["--wait", "600"]);
        // Accept the connection but do not answer the request.
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 8]).unwrap();
        signal(&child, name);
        assert_eq!(child.wait().unwrap().signal(), Some(number));
    }
}

/// Starts a command and sends SIGTERM once. Returns the stub agent's stream and the program.
fn signalled(listener: &UnixListener, socket: &Path) -> (UnixStream, Child) {
    let child = exec(socket, &[]);
    let mut stream = accept(listener);
    assert_eq!(read_frame(&mut stream).unwrap().unwrap().kind, FrameKind::Stdin);
    signal(&child, "-TERM");
    assert_eq!(read_frame(&mut stream).unwrap().unwrap().kind, FrameKind::Signal);
    (stream, child)
}

/// One signal terminates `perfvisor exec` if the guest hangs, but not if the guest runs and only
/// the command ignores the signal.
#[test]
fn one_signal_ends_exec_of_hanging_guest() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("vsock");
    let listener = UnixListener::bind(&socket).unwrap();
    let (mut alive, mut slow) = signalled(&listener, &socket);
    write_frame(&mut alive, FrameKind::Taken, &0_u32.to_le_bytes()).unwrap();
    let (mut hanging, mut hung) = signalled(&listener, &socket);
    assert!(
        read_frame(&mut hanging).unwrap().is_none(),
        "the program has left"
    );
    let mut said = String::new();
    hung.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(hung.wait().unwrap().code(), Some(8), "{said}");
    assert!(
        said.contains("does not answer") && said.lines().count() == 1,
        "{said}"
    );
    // The program whose guest still sends frames continues to wait, although its signal is older.
    assert_eq!(slow.try_wait().unwrap(), None);
    let exit = serde_json::to_vec(&CommandExit::Status(3)).unwrap();
    write_frame(&mut alive, FrameKind::Exit, &exit).unwrap();
    assert_eq!(slow.wait().unwrap().code(), Some(3));
}

/// Signals are forwarded to the command. If the guest does not react, the third signal terminates
/// `perfvisor exec`.
#[test]
fn third_signal_ends_exec() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("vsock");
    let listener = UnixListener::bind(&socket).unwrap();
    let mut child = exec(&socket, &[]);
    let mut stream = accept(&listener);
    // The program forwards signals only after it has sent the input, which is empty.
    let begun = read_frame(&mut stream).unwrap().unwrap();
    assert_eq!((begun.kind, begun.payload.len()), (FrameKind::Stdin, 0));
    let mut forwarded = 0;
    // Three signals within five seconds terminate the program. Send more, because the host may be
    // slow.
    for _ in 0..100 {
        signal(&child, "-TERM");
        let Some(frame) = read_frame(&mut stream).unwrap() else {
            break;
        };
        let number = u32::try_from(libc::SIGTERM).unwrap().to_le_bytes();
        assert_eq!((frame.kind, &frame.payload[..]), (FrameKind::Signal, &number[..]));
        forwarded += 1;
    }
    assert!((2..100).contains(&forwarded), "{forwarded}");
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(8), "{said}");
    assert!(said.contains("left") && said.lines().count() == 1, "{said}");
}
