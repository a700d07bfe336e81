//! Closed pipes on standard output, as with `head`, cause neither failures nor panics.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::common::vm::PROGRAM;
use crate::common::vm::SpinningVm;

/// Returns the writing end of a pipe without a reader.
fn pipe_without_reader() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

#[test]
fn closed_pipe_is_no_failure() {
    for (arguments, status) in [
        (&["--help"][..], 0),
        (&["run", "--help"], 0),
        (&["--version"], 0),
        (&["check"], 0),
        (&["check", "--json"], 0),
        (&["report", "-i", "/dev/null"], 0),
        (&["report", "-i", "/nonexistent"], 2),
        (&["fly"], 2),
        (&["run", "--cpus", "0"], 2),
    ] {
        let ended = Command::new(PROGRAM)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(pipe_without_reader())
            .stderr(pipe_without_reader())
            .status()
            .unwrap();
        assert_eq!(ended.code(), Some(status), "{arguments:?}");
    }
}

/// A write error on standard output makes the command fail, unless the reader has closed the pipe.
#[test]
fn write_error_is_a_failure() {
    for arguments in [&["--help"][..], &["check"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = Command::new(PROGRAM)
            .args(arguments)
            .stdout(full)
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        let line = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line}");
        assert!(
            line.lines().count() == 1 && line.contains("No space left"),
            "{line}"
        );
    }
}

/// An endless command, as in `perfvisor stat -I 50 | head -n 3`, exits successfully when its reader
/// exits.
#[test]
fn endless_output_ends_with_its_reader() {
    let Some(vm) = SpinningVm::start("read", &[]) else {
        return;
    };
    let stat = ["stat", "read", "-I", "50", "-e", "task-clock"];
    for arguments in [
        &stat[..],
        &[&stat[..], &["-x,"]].concat(),
        &[&stat[..], &["-j"]].concat(),
        &["stat", "--all", "-I", "50", "-e", "task-clock"],
        &["exits", "read", "-i", "0.05"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        let mut command = vm.operator(arguments);
        command.stdin(Stdio::null());
        command.stdout(writer.try_clone().unwrap()).stderr(writer);
        let mut child = command.spawn().unwrap();
        // Close the copies of the pipe that `command` holds.
        drop(command);
        let mut lines = BufReader::new(reader).lines();
        for _ in 0..3 {
            lines.next().expect("a line").unwrap();
        }
        drop(lines);
        let code = child.wait().unwrap().code();
        // `--all` also finds the VMs of concurrent tests, and fails if one of them exits at that
        // time.
        let others_ended = arguments.contains(&"--all") && code == Some(1);
        assert!(code == Some(0) || others_ended, "{arguments:?}: {code:?}");
    }
}
