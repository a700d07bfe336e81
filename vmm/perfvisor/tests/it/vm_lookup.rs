//! `ps --all` and control socket paths find VMs independently of the environment.

use std::process::Output;

use crate::common::operator::{TestVm, value_of};
use crate::common::vm::eventually;

/// Runs a command with a different runtime directory.
fn elsewhere(vm: &TestVm, args: &[&str]) -> Output {
    let other = tempfile::tempdir().unwrap();
    vm.vm
        .operator(args)
        .env("XDG_RUNTIME_DIR", other.path())
        .output()
        .unwrap()
}

#[test]
fn vm_is_reachable_by_socket_path() {
    let Some(mut vm) = TestVm::spinning(1) else { return };
    let socket = vm.sockets().join("test.sock");
    let socket = socket.to_str().unwrap();
    let said = |args: &[&str]| {
        let out = elsewhere(&vm, args);
        assert!(
            out.status.success(),
            "{args:?}: {}",
            String::from_utf8_lossy(&out.stderr)
        );
        String::from_utf8(out.stdout).unwrap()
    };
    let refused = elsewhere(&vm, &["ctl", "test", "status"]);
    assert_eq!(refused.status.code(), Some(2));

    assert!(said(&["ctl", "--socket", socket, "status"]).contains("running"));
    assert_eq!(said(&["ctl", "--socket", socket, "pause"]), "test: paused\n");
    assert_eq!(said(&["ctl", "--socket", socket, "resume"]), "test: running\n");
    let line = said(&["stat", "--socket", socket, "-d", "0.1", "-j", "-e", "kvm:exits"]);
    assert_eq!(value_of(&line)["event"], "kvm:exits");
    assert!(said(&["top", "--socket", socket, "--once", "-d", "0.3"]).contains("test"));
    let file = vm.vm.runtime.path().join("perf.data");
    said(&[
        "record",
        "--socket",
        socket,
        "-d",
        "0.2",
        "-q",
        "-N",
        "-o",
        file.to_str().unwrap(),
    ]);
    assert!(file.metadata().unwrap().len() > 0);

    let both = elsewhere(&vm, &["stat", "test", "--socket", socket]);
    let line = String::from_utf8_lossy(&both.stderr).into_owned();
    assert!(
        both.status.code() == Some(2) && line.contains("--socket"),
        "{line}"
    );
    let none = elsewhere(&vm, &["stat", "--socket", "/nonexistent.sock", "-d", "0.1"]);
    let line = String::from_utf8_lossy(&none.stderr).into_owned();
    assert!(
        none.status.code() == Some(2) && line.contains("/nonexistent.sock"),
        "{line}"
    );
    let _ = vm.vm.child.kill();
}

/// Returns the output of `ps` once this VM has answered; other VMs of the host may not answer.
fn ps_until_vm_answers(vm: &TestVm, args: &[&str]) -> String {
    let socket = vm.sockets().join("test.sock");
    let mut text = String::new();
    eventually("the VM is in the list, and has answered", || {
        text = vm.run_for_stderr(args);
        let line = text.lines().find(|line| line.contains(socket.to_str().unwrap()));
        line.is_some_and(|line| !line.contains("not_responding") && !line.contains("not responding"))
    });
    text
}

#[test]
fn ps_all_lists_owner_and_socket() {
    let Some(vm) = TestVm::spinning(1) else { return };
    let socket = vm.sockets().join("test.sock");
    let text = ps_until_vm_answers(&vm, &["ps", "--all", "--json"]);
    let line = text
        .lines()
        .map(value_of)
        .find(|line| line["socket"] == socket.to_str().unwrap());
    let line = line.unwrap_or_else(|| panic!("not in {text}"));
    assert_eq!(
        (line["name"].as_str(), line["pid"].as_u64()),
        (Some("test"), Some(vm.vm.child.id().into()))
    );
    assert!(line["user"].is_u64(), "{line}");
    let table = ps_until_vm_answers(&vm, &["ps", "--all"]);
    let row = table.lines().find(|row| row.ends_with(socket.to_str().unwrap()));
    assert!(row.is_some_and(|row| row.starts_with("test ")), "{table}");
    // Without `--all`, `ps` prints neither the socket nor the user.
    assert!(
        !vm.run_for_stderr(&["ps", "--json"]).contains("socket")
            && !vm.run_for_stderr(&["ps"]).contains("USER")
    );
}
