//! Tests of the agent over a pair of Unix sockets, with conforming, disconnected and hostile hosts.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use guest_agent::request::{AgentOperation, AgentRequest, CommandExit, ExecRequest, Terminal, VERSION};
use guest_agent::wire::{Frame, FrameKind, INPUT_WINDOW, read_frame, write_frame};

use super::*;

fn agent() -> (UnixStream, JoinHandle<()>) {
    // The program also resets signals. nohup(1) ignores signals, and child processes inherit this.
    crate::signals::reset_ignored();
    let (host, agent) = UnixStream::pair().unwrap();
    (
        host,
        std::thread::spawn(move || handle_connection(agent).unwrap()),
    )
}

fn ask(host: &mut UnixStream, job: AgentOperation) {
    let request = AgentRequest {
        version: VERSION,
        job,
    };
    write_frame(host, FrameKind::Request, &serde_json::to_vec(&request).unwrap()).unwrap();
}

fn exec(argv: &[&str], terminal: Option<Terminal>) -> AgentOperation {
    AgentOperation::Exec(ExecRequest {
        argv: argv.iter().map(|&arg| arg.to_owned()).collect(),
        env: vec![("GREETING".into(), "hello".into())],
        cwd: Some("/".into()),
        terminal,
    })
}

/// What a test received from the agent: the command's output, the number of acknowledged input
/// bytes, and the last frame.
struct Outcome {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    taken: u32,
    last: Frame,
}

impl Outcome {
    fn exit(&self) -> CommandExit {
        assert_eq!(self.last.kind, FrameKind::Exit, "{}", self.last.text());
        serde_json::from_slice(&self.last.payload).unwrap()
    }
}

fn outcome(host: &mut UnixStream) -> Outcome {
    let (mut stdout, mut stderr, mut taken) = (Vec::new(), Vec::new(), 0);
    loop {
        let frame = read_frame(host).unwrap().expect("an end of the command");
        match frame.kind {
            FrameKind::Accepted => {}
            FrameKind::Stdout => stdout.extend(frame.payload),
            FrameKind::Stderr => stderr.extend(frame.payload),
            FrameKind::Taken => taken += frame.number().unwrap(),
            _ => {
                let last = frame;
                return Outcome {
                    stdout,
                    stderr,
                    taken,
                    last,
                };
            }
        }
    }
}

fn run(argv: &[&str]) -> Outcome {
    let (mut host, agent) = agent();
    ask(&mut host, exec(argv, None));
    let outcome = outcome(&mut host);
    drop(host);
    agent.join().unwrap();
    outcome
}

#[test]
fn stdout_stderr_and_status_are_separate() {
    let outcome = run(&["sh", "-c", "echo $GREETING; pwd; echo bad >&2; exit 7"]);
    assert_eq!(outcome.stdout, b"hello\n/\n");
    assert_eq!(outcome.stderr, b"bad\n");
    assert_eq!(outcome.exit(), CommandExit::Status(7));
    assert_eq!(run(&["sh", "-c", "kill -9 $$"]).exit(), CommandExit::Signal(9));
}

#[test]
fn unrunnable_command_is_reported() {
    for (argv, why) in [
        (&["/no/such/program"][..], "command not found"),
        (&["/etc/passwd"], "/etc/passwd"),
        (&[], "no command"),
    ] {
        let outcome = run(argv);
        assert_eq!(outcome.last.kind, FrameKind::Refused);
        assert!(outcome.last.text().contains(why), "{}", outcome.last.text());
    }
}

#[test]
fn output_is_complete_and_orphans_are_not_awaited() {
    let outcome = run(&["sh", "-c", "head -c 1000000 /dev/zero; sleep 60 & exit 0"]);
    assert_eq!(
        (outcome.stdout.len(), outcome.exit()),
        (1_000_000, CommandExit::Status(0))
    );
}

#[test]
fn stdin_and_eof_are_forwarded() {
    let (mut host, agent) = agent();
    ask(&mut host, exec(&["sh", "-c", "wc -c; echo after"], None));
    for _ in 0..4 {
        write_frame(&mut host, FrameKind::Stdin, &[b'x'; 50_000]).unwrap();
    }
    write_frame(&mut host, FrameKind::Stdin, &[]).unwrap();
    let outcome = outcome(&mut host);
    assert_eq!(
        String::from_utf8(outcome.stdout.clone()).unwrap().trim(),
        "200000\nafter"
    );
    assert_eq!((outcome.taken, outcome.exit()), (200_000, CommandExit::Status(0)));
    drop(host);
    agent.join().unwrap();
}

#[test]
fn signals_reach_command_that_does_not_read() {
    let (mut host, agent) = agent();
    ask(&mut host, exec(&["sleep", "60"], None));
    for _ in 0..INPUT_WINDOW / (64 << 10) {
        write_frame(&mut host, FrameKind::Stdin, &[0; 64 << 10]).unwrap();
    }
    write_frame(&mut host, FrameKind::Signal, &15_u32.to_le_bytes()).unwrap();
    assert_eq!(outcome(&mut host).exit(), CommandExit::Signal(15));
    drop(host);
    agent.join().unwrap();
}

#[test]
fn disconnect_terminates_command() {
    let (mut host, agent) = agent();
    ask(&mut host, exec(&["sleep", "600"], None));
    assert_eq!(read_frame(&mut host).unwrap().unwrap().kind, FrameKind::Accepted);
    drop(host);
    // Without a disconnect, the command would run for ten minutes.
    agent.join().unwrap();
}

/// A command that is writing when its host disconnects has time to exit cleanly, for example to
/// complete a recording.
#[test]
fn writing_command_exits_cleanly_on_disconnect() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ended");
    let script = format!(
        "trap 'echo x; sleep 0.5; echo x; touch {}; exit' HUP; while :; do echo y; sleep 0.05; done",
        file.display()
    );
    let (mut host, agent) = agent();
    ask(&mut host, exec(&["sh", "-c", &script], None));
    let mut frames = std::iter::from_fn(|| read_frame(&mut host).unwrap());
    assert!(frames.any(|frame| frame.kind == FrameKind::Stdout));
    drop(host);
    agent.join().unwrap();
    assert!(file.exists());
}

/// A connection slot is released even if its thread panics.
#[test]
fn connection_slot_is_released_on_panic() {
    let busy = Arc::new(AtomicUsize::new(1));
    let place = ConnectionSlot(busy.clone());
    let ended = std::thread::spawn(move || {
        let _place = place;
        panic!("as it must not");
    });
    assert!(ended.join().is_err());
    assert_eq!(busy.load(Ordering::Acquire), 0);
}

#[test]
fn terminal_has_size_and_handles_ctrl_c() {
    let (mut host, agent) = agent();
    let size = Terminal {
        rows: 33,
        columns: 44,
    };
    let script = "stty size; test -t 1 && echo terminal; cat; exit 9";
    ask(&mut host, exec(&["sh", "-c", script], Some(size)));
    let mut text = String::new();
    while !text.contains("terminal") {
        let frame = read_frame(&mut host).unwrap().unwrap();
        text.push_str(&String::from_utf8_lossy(&frame.payload));
    }
    assert!(text.contains("33 44"), "{text:?}");
    // Wait for output of cat before sending Ctrl-C. A shell that receives the signal while it
    // starts a command may wait for the command, which did not receive the signal.
    write_frame(&mut host, FrameKind::Stdin, b"line\n").unwrap();
    while text.matches("line").count() < 2 {
        let frame = read_frame(&mut host).unwrap().unwrap();
        if frame.kind == FrameKind::Stdout {
            text.push_str(&String::from_utf8_lossy(&frame.payload));
        }
    }
    write_frame(&mut host, FrameKind::Stdin, &[3]).unwrap();
    assert_eq!(outcome(&mut host).exit(), CommandExit::Signal(2));
    drop(host);
    agent.join().unwrap();
}

#[test]
fn command_inherits_no_descriptors() {
    let script = "ls -l /proc/self/fd | grep -c -e ptmx -e socket";
    // Exclude descriptors inherited from the test runner.
    let plain = std::process::Command::new("sh")
        .args(["-c", script])
        .output()
        .unwrap();
    let plain = String::from_utf8_lossy(&plain.stdout);
    for terminal in [None, Some(Terminal { rows: 3, columns: 4 })] {
        let (mut host, agent) = agent();
        ask(&mut host, exec(&["sh", "-c", script], terminal));
        let outcome = outcome(&mut host);
        let text = String::from_utf8_lossy(&outcome.stdout);
        assert_eq!(text.trim(), plain.trim(), "with {terminal:?}");
        drop(host);
        agent.join().unwrap();
    }
}

#[test]
fn trees_are_copied_both_ways() {
    let temp = tempfile::tempdir().unwrap();
    let path = |name: &str| temp.path().join(name);
    std::fs::create_dir_all(path("from/d")).unwrap();
    std::fs::write(path("from/d/f"), "text").unwrap();
    let text = |path: std::path::PathBuf| path.to_str().unwrap().to_owned();

    let (mut host, agent_thread) = agent();
    ask(
        &mut host,
        AgentOperation::Put {
            path: text(path("copy")),
            name: "from".into(),
        },
    );
    assert_eq!(read_frame(&mut host).unwrap().unwrap().kind, FrameKind::Accepted);
    send_tree(&path("from"), &mut |kind, payload| {
        write_frame(&mut host, kind, payload)
    })
    .unwrap();
    assert_eq!(read_frame(&mut host).unwrap().unwrap().kind, FrameKind::Done);
    drop(host);
    agent_thread.join().unwrap();
    assert_eq!(std::fs::read(path("copy/d/f")).unwrap(), b"text");

    let (mut host, agent_thread) = agent();
    ask(
        &mut host,
        AgentOperation::Get {
            path: text(path("copy")),
        },
    );
    assert_eq!(read_frame(&mut host).unwrap().unwrap().kind, FrameKind::Accepted);
    let mut receiver = FileTreeReceiver::new(&path("back"), None).unwrap();
    loop {
        let frame = read_frame(&mut host).unwrap().unwrap();
        if receiver.take(&frame).unwrap() == FileTreeCopyProgress::Done {
            break;
        }
    }
    drop(host);
    agent_thread.join().unwrap();
    assert_eq!(std::fs::read(path("back/d/f")).unwrap(), b"text");

    for job in [
        AgentOperation::Get {
            path: text(path("nowhere")),
        },
        AgentOperation::Put {
            path: text(path("no/where")),
            name: "x".into(),
        },
    ] {
        let (mut host, agent_thread) = agent();
        ask(&mut host, job);
        assert_eq!(read_frame(&mut host).unwrap().unwrap().kind, FrameKind::Refused);
        drop(host);
        agent_thread.join().unwrap();
    }
}

#[test]
fn invalid_request_closes_connection_only() {
    let (mut host, agent_thread) = agent();
    write_frame(&mut host, FrameKind::Request, br#"{"version":2,"job":"later"}"#).unwrap();
    let refused = read_frame(&mut host).unwrap().unwrap();
    assert!(refused.text().contains("version 1"), "{}", refused.text());
    agent_thread.join().unwrap();
    for bytes in [
        &b"\x01\x04\0\0\0null"[..],
        b"\xff\xff\xff\xff\xff",
        b"\x0c\0\0\0\0",
        b"\x01",
    ] {
        let (mut host, agent_thread) = agent();
        host.write_all(bytes).unwrap();
        drop(host);
        agent_thread.join().unwrap();
    }
}
