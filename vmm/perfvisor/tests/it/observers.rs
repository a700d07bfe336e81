//! Observers of a VM (`--observers`) can count events but cannot change the VM.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::common::host::Host;
use crate::common::vm::{
    PROGRAM, SpinningVm, assert_contains, has_kvm, put_program, refusal, run_and_read_stderr,
};
use control_api::client::{Client, REPLY_TIMEOUT};
use test_support::skip::skipped;

/// Starts a VM with an observer socket in a directory that all users may traverse.
fn observed(name: &str, mode: &str) -> Option<(SpinningVm, tempfile::TempDir, String)> {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let path = dir.path().join("look").to_str().unwrap().to_owned();
    let vm = SpinningVm::start(name, &["--observers", &format!("{path}{mode}")])?;
    Some((vm, dir, path))
}

/// Inserts `--socket path` after the command, which is the first of `args`.
fn observer_args<'a>(path: &'a str, args: &[&'a str]) -> Vec<&'a str> {
    [&args[..1], &["--socket", path], &args[1..]].concat()
}

#[test]
fn observer_can_only_count() {
    let Some((vm, _dir, path)) = observed("seen", "") else {
        return;
    };
    let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o660);
    for (args, word) in [
        (&["ctl", "status"][..], "running"),
        (&["stat", "-e", "cycles,task-clock", "-d", "0.2"], "cycles"),
        (&["stat", "-A", "-e", "task-clock", "-d", "0.2"], "task-clock"),
        (&["stat", "--guest-view"], "vcpu"),
    ] {
        let args = &observer_args(&path, args);
        let (status, text) = run_and_read_stderr(&mut vm.operator(args));
        assert_eq!(status, Some(0), "{args:?}: {text}");
        assert!(text.to_lowercase().contains(word), "{args:?}: {text}");
    }
    let filter = vm.runtime.path().join("filter.toml");
    fs::write(&filter, "action = \"allow\"\nevents = []\n").unwrap();
    let data = vm.runtime.path().join("perf.data");
    for args in [
        &["ctl", "pause"][..],
        &["ctl", "resume"],
        &["ctl", "stop"],
        &["ctl", "powerdown"],
        &["ctl", "vcpus", "1"],
        &["ctl", "share", "strict"],
        &["ctl", "filter", filter.to_str().unwrap()],
        &["record", "-d", "0.2", "-o", data.to_str().unwrap()],
    ] {
        let args = &observer_args(&path, args);
        let (status, text) = run_and_read_stderr(&mut vm.operator(args));
        assert_eq!(status, Some(2), "{args:?}: {text}");
        assert!(
            text.contains("an observer") && text.lines().count() == 1,
            "{args:?}: {text}"
        );
    }
    let (status, text) = run_and_read_stderr(&mut vm.operator(&["ctl", "seen", "status"]));
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("running"), "{text}");
    let (status, text) = run_and_read_stderr(&mut vm.operator(&["ctl", "seen", "stop"]));
    assert_eq!(status, Some(0), "{text}");
}

/// The maximum number of observers leaves connections available for operators.
#[test]
fn observers_do_not_exclude_operators() {
    let Some((vm, _dir, path)) = observed("crowded", "") else {
        return;
    };
    let come = || Client::connect_at(Path::new(&path), None, REPLY_TIMEOUT);
    let observers: Vec<Client> = (0..8).map(|_| come().unwrap()).collect();
    assert!(come().is_err(), "the limit of");
    for _ in 0..3 {
        let (status, text) = run_and_read_stderr(&mut vm.operator(&["ctl", "crowded", "status"]));
        assert_eq!(status, Some(0), "{text}");
    }
    drop(observers);
    crate::common::vm::eventually("there is room again", || come().is_ok());
}

#[test]
fn socket_mode_admits_other_observer() {
    let able = Command::new("setpriv")
        .args(["--reuid", "65534", "--clear-groups", "true"])
        .output();
    if !able.is_ok_and(|able| able.status.success()) {
        return skipped("only root can be another user", false);
    }
    for (mode, may) in [(",mode=0666", true), (",mode=0660", false)] {
        let Some((_vm, dir, path)) = observed("other", mode) else {
            return;
        };
        // Copy the program, because the other user may have no access to the build directory.
        let program = dir.path().join("program");
        put_program(&program);
        let (status, text) = run_and_read_stderr(
            Command::new("setpriv")
                .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
                .arg(&program)
                .args(["stat", "--socket", &path, "-e", "task-clock", "-d", "0.1"]),
        );
        assert_eq!(status == Some(0), may, "{mode}: {text}");
    }
}

/// An exporter of an unprivileged user serves the VMs of another user through their observer
/// sockets. Labels contain the owner's user ID, fake VMs are reported as down, and profiles are
/// refused.
#[test]
fn exporter_of_other_user_serves_observer_directory() {
    let able = Command::new("setpriv")
        .args(["--reuid", "65534", "--clear-groups", "true"])
        .output();
    if !able.is_ok_and(|able| able.status.success()) {
        return skipped("only root can be another user", false);
    }
    if !has_kvm() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let mode = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    mode(place.path(), 0o755);
    let vms = place.path().join("vms");
    fs::create_dir(&vms).unwrap();
    mode(&vms, 0o1777);
    // Copy the program, because the other user may have no access to the build directory.
    let program = place.path().join("program");
    put_program(&program);
    let mut other = Command::new("setpriv");
    other
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
        .arg(&program);
    let mut host = Host::with_exporter(other, &["--vms", vms.to_str().unwrap()]);
    let at = |name: &str| format!("{}/{name}.look,mode=0666", vms.display());
    host.add("a", &["--observers", &at("a")]);
    host.add("b", &["--observers", &at("b")]);
    // A socket without a listener, and a link to another directory's VM.
    drop(std::os::unix::net::UnixListener::bind(vms.join("dead.look")).unwrap());
    std::os::unix::fs::symlink(vms.join("a.look"), vms.join("link.look")).unwrap();
    let text = host.metrics_with(&["a@0", "b@0"]);
    let up: Vec<(String, bool)> = host.up(&text).into_iter().collect();
    let expected = [("a@0", true), ("b@0", true), ("dead@0", false)];
    assert_eq!(up, expected.map(|(name, up)| (name.to_owned(), up)), "{text}");
    assert_contains(&text, "perfvisor_vcpu_exits_total{vm=\"b@0\",vcpu=\"0\"}");
    assert!(text.contains("event=\"task-clock\""), "{text}");
    let (status, body) = host.get("/debug/pprof/profile?vm=a@0&seconds=1");
    let body = String::from_utf8_lossy(&body).into_owned();
    assert!(status == 403 && body.contains("--vms"), "{status} {body}");
}

/// A `--vms` directory that the exporter cannot read is reported in one line at startup.
#[test]
fn unreadable_directory_is_reported_in_one_line() {
    let none = ["exporter", "--listen", "127.0.0.1:0", "--vms", "/nowhere/at/all"];
    let text = refusal(Command::new(PROGRAM).args(none));
    assert_contains(&text, "--vms /nowhere/at/all");
}

#[test]
fn invalid_observer_socket_is_rejected_in_one_line() {
    let text = refusal(Command::new(PROGRAM).args(["run", "--observers", "/nowhere/at/all"]));
    assert_contains(&text, "--observers");
    assert_contains(&text, "/nowhere/at/all");
}
