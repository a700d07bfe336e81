//! A panicking thread, a fatal signal, or an instruction that KVM cannot emulate terminates the
//! whole VM with a one-line message, restores the terminal and leaves no vCPU running.

use std::process::{Command, Stdio};

use crate::common::console_vm::ConsoleVm;
use crate::common::test_lock;
use crate::common::vm::{PROGRAM, SpinningVm, assert_contains, eventually, has_kvm};

/// Runs a VM in which a thread of type `kind` panics when it starts. Returns the exit status and
/// the messages.
fn panicking(kind: &str) -> Option<(Option<i32>, String)> {
    if !has_kvm() {
        return None;
    }
    let _lock = test_lock::shared();
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
        // A panic must not print a backtrace even if one is requested, because that would open
        // files.
        .env("RUST_BACKTRACE", "1")
        .env_remove("RUST_LOG")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .output()
        .unwrap();
    Some((out.status.code(), String::from_utf8(out.stderr).unwrap()))
}

/// Checks that the output consists of lines about the panic, either one in total or one per vCPU.
#[track_caller]
fn assert_panic_lines(said: &str, thread: &str, most: usize) {
    let lines: Vec<&str> = said.lines().collect();
    assert!((1..=most).contains(&lines.len()), "{said}");
    for line in lines {
        let begins = format!("perfvisor: error: the thread {thread}");
        assert!(
            line.starts_with(&begins) && line.contains("panicked at"),
            "{said}"
        );
        assert!(
            line.contains("which terminates the VM: a test wants it"),
            "{said}"
        );
    }
}

#[test]
fn main_loop_panic_ends_vm_in_one_line() {
    let Some((status, said)) = panicking("main") else {
        return;
    };
    assert_eq!(status, Some(8), "{said}");
    assert_panic_lines(&said, "main", 1);
}

#[test]
fn vcpu_panic_ends_vm_in_one_line() {
    let Some((status, said)) = panicking("vcpu") else {
        return;
    };
    assert_eq!(status, Some(8), "{said}");
    assert_panic_lines(&said, "vcpu", 2);
}

/// A fault signal sent by another process terminates the VM with one line. Unlike a real fault, the
/// signal does not recur when the handler returns.
#[test]
fn sent_fault_signal_ends_vm_in_one_line() {
    for signal in ["SEGV", "BUS", "ILL", "FPE"] {
        let Some(mut vm) = SpinningVm::start("sent", &["--cpus", "2"]) else {
            return;
        };
        let id = vm.child.id().to_string();
        let kill = Command::new("/bin/kill")
            .args([&format!("-{signal}"), &id])
            .status();
        assert!(kill.unwrap().success());
        let status = vm.child.wait().unwrap();
        assert_eq!(status.code(), Some(8), "{status}: {:?}", vm.log_lines());
        let line = format!("was sent SIG{signal} by process ");
        let told = || {
            let said = vm.log_lines();
            said.iter().filter(|said| said.contains(&line)).count()
        };
        eventually("the line", || told() == 1);
    }
}

/// The error for an instruction that KVM's emulator lacks contains the instruction, for bug
/// reports.
#[test]
fn emulation_failure_names_instruction() {
    let Some(mut vm) = ConsoleVm::start(&["--cmdline", "unemulated"]) else {
        return;
    };
    vm.line_with("cmpxchg16b where nobody is");
    assert_eq!(vm.status(), Some(8), "{:?}", vm.log_lines());
    eventually("the line", || vm.count_log_lines("internal error") == 1);
    let said = vm.log_lines();
    let line = said.iter().find(|line| line.contains("internal error")).unwrap();
    assert_contains(line, "internal error 1 (it cannot emulate an instruction) at 0x");
    assert_contains(line, "CPL 0");
    // Since Linux 5.14, KVM reports the instruction bytes.
    assert!(
        line.contains("cmpxchg16b") || line.contains("does not say at which"),
        "{line}"
    );
}
