//! A thread that panics ends the whole VM with one line, and leaves no terminal raw and no vCPU behind.

use std::path::Path;
use std::process::{Command, Stdio};

use common::skip::skipped;
use common::vm::PROGRAM;

mod common;

/// A VM in which a thread of this kind panics when it begins: its exit status and what it said.
fn panicking(kind: &str) -> Option<(Option<i32>, String)> {
    if !Path::new("/dev/kvm").exists() {
        skipped("no /dev/kvm here", false);
        return None;
    }
    let runtime = tempfile::tempdir().unwrap();
    let out = Command::new(PROGRAM)
        .args([
            "run",
            "--name",
            "panics",
            "--memory",
            "32M",
            "--cpus",
            "2",
            "--cmdline",
            "loop",
        ])
        .env("XDG_RUNTIME_DIR", runtime.path())
        .env("PERFVISOR_TEST_PANICS", kind)
        // A backtrace would open files.
        .env("RUST_BACKTRACE", "1")
        .env_remove("RUST_LOG")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .output()
        .unwrap();
    Some((out.status.code(), String::from_utf8(out.stderr).unwrap()))
}

/// Whether these are lines of that panic: one, or one for each of the vCPUs.
#[track_caller]
fn is_one_line_of(said: &str, thread: &str, most: usize) {
    let lines: Vec<&str> = said.lines().collect();
    assert!((1..=most).contains(&lines.len()), "{said}");
    for line in lines {
        let begins = format!("perfvisor: error: the thread {thread}");
        assert!(
            line.starts_with(&begins) && line.contains("panicked at"),
            "{said}"
        );
        assert!(line.contains("the VM ends with it: a test wants it"), "{said}");
    }
}

#[test]
fn a_main_loop_that_panics_ends_the_vm_in_one_line() {
    let Some((status, said)) = panicking("main") else {
        return;
    };
    assert_eq!(status, Some(8), "{said}");
    is_one_line_of(&said, "main", 1);
}

#[test]
fn a_vcpu_that_panics_ends_the_vm_in_one_line() {
    let Some((status, said)) = panicking("vcpu") else {
        return;
    };
    assert_eq!(status, Some(8), "{said}");
    is_one_line_of(&said, "vcpu", 2);
}
