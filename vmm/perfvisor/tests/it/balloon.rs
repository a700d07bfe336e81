//! `run --balloon` and `ctl balloon`, with guests that have no balloon driver.

use std::process::{Command, Stdio};

use control_api::client::Client;
use control_api::request;
use serde_json::{Value, json};

use crate::common::vm::{
    PROGRAM, SpinningVm, VmProcess, assert_contains, eventually, refusal, run_and_read_stderr, stdout_of,
};

fn balloon_json(vm: &VmProcess, name: &str) -> Value {
    let text = stdout_of(&mut vm.command(&["ctl", name, "balloon", "--json"]));
    serde_json::from_str(&text).unwrap()
}

/// The initial size of the balloon is that of the command line. The size can be changed while the
/// VM runs, and a snapshot preserves it.
#[test]
fn balloon_is_shown_changed_and_restored() {
    let options = "--balloon=size=4,deflate-on-oom=on,stats=60,free-page-reporting=on";
    let Some(vm) = SpinningVm::start("one", &[options]) else {
        return;
    };
    let status = stdout_of(&mut vm.operator(&["ctl", "one", "status"]));
    assert!(
        status.ends_with("\nballoon 0 MiB, target 4 MiB, 0 MiB released so far\n"),
        "{status}"
    );
    let balloon =
        |args: &[&str]| run_and_read_stderr(&mut vm.operator(&[&["ctl", "one", "balloon"], args].concat()));
    let line = "one: balloon 0 MiB, target 16 MiB, 0 MiB released so far\n";
    assert_eq!(balloon(&["16M"]), (Some(0), line.to_owned()));
    assert_eq!(balloon(&[]), (Some(0), line.to_owned()));
    let (status, text) = balloon(&["33"]);
    assert_eq!(status, Some(2));
    assert_contains(
        &text,
        "a balloon of 33 MiB is larger than the guest's memory of 32 MiB",
    );
    assert_eq!(balloon(&["1K"]).0, Some(2));

    let dir = vm.runtime.path().join("saved");
    stdout_of(&mut vm.operator(&["ctl", "one", "snapshot", dir.to_str().unwrap()]));
    let args = ["--restore", dir.to_str().unwrap()];
    let restored = VmProcess::spawn(Command::new(PROGRAM), "two", &args, Stdio::null()).unwrap();
    eventually("it runs", || {
        run_and_read_stderr(&mut restored.command(&["ctl", "two", "status"])).0 == Some(0)
    });
    let expected = json!({
        "target_bytes": 16 << 20, "actual_bytes": 0, "released_bytes": 0, "deflate_on_oom": true,
        "free_page_reporting": true, "statistics_interval_s": 60,
    });
    assert_eq!(balloon_json(&restored, "two"), expected);
}

/// Requests to enable statistics after the start of the VM, and to change the balloon of a VM
/// without one, are rejected.
#[test]
fn refused_changes_of_the_balloon_are_explained() {
    let Some(vm) = SpinningVm::start("plain", &["--balloon"]) else {
        return;
    };
    let connect = |vm: &VmProcess, name: &str| {
        let sockets = vm.runtime.path().join("perfvisor");
        Client::connect_in(&sockets, Some(name)).unwrap()
    };
    let mut client = connect(&vm, "plain");
    let refused = client
        .call(request::BalloonStatistics { interval_s: 1 })
        .unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("statistics cannot be enabled or disabled after the start"),
        "{refused}"
    );
    drop(vm);
    let vm = SpinningVm::start("without", &[]).unwrap();
    let mut client = connect(&vm, "without");
    let refused = client.call(request::Balloon { size_mib: 1 }).unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("no balloon; start it with --balloon"),
        "{refused}"
    );
    let (status, text) = run_and_read_stderr(&mut vm.operator(&["ctl", "without", "balloon"]));
    assert_eq!(status, Some(2));
    assert!(text.contains("no balloon; start it with --balloon"), "{text}");
}

#[test]
fn invalid_balloons_are_refused_before_the_start() {
    for (options, reason) in [
        (
            "--memory=32M --balloon=size=33",
            "larger than the guest's memory of 32 MiB",
        ),
        ("--balloon=size=x", "the size of a balloon must be between 0 and"),
        (
            "--balloon=size=1,oom=on",
            "unknown option 'oom=on'; known are size=MIB",
        ),
        ("--balloon --hugepages=2M", "use --hugepages transparent or off"),
        ("--balloon --restore=d", "cannot be used with"),
    ] {
        let runtime = tempfile::tempdir().unwrap();
        let mut command = Command::new(PROGRAM);
        command
            .args(["run", "--name", "refused"])
            .args(options.split(' '))
            .env("XDG_RUNTIME_DIR", runtime.path());
        let text = refusal(&mut command);
        assert!(text.contains(reason), "{options}: {text}");
    }
}
