//! Tests of `stat --all` and `record --all`.

use std::process::{Command, Output, Stdio};

use crate::common::host::Host;
use crate::common::vm::PROGRAM;
use serde_json::Value;

fn command(host: &Host, args: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command
        .args(args)
        .env("XDG_RUNTIME_DIR", host.runtime.path())
        .current_dir(host.runtime.path());
    command
}

fn text(out: &Output) -> String {
    String::from_utf8_lossy(&[&out.stdout[..], &out.stderr[..]].concat()).into_owned()
}

/// For several VMs, each machine-readable line of `stat` contains the name of its VM, and the text
/// output has one table per VM.
#[test]
fn stat_counts_all_vms_at_once() {
    let Some(host) = Host::start(&[("a", &[]), ("b", &[])]) else {
        return;
    };
    let events = ["-e", "task-clock,kvm:exits", "-d", "0.3"];
    let run = |more: &[&str]| {
        let out = command(&host, &[&["stat", "--all"], &events[..], more].concat())
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", text(&out));
        String::from_utf8(out.stdout).unwrap()
    };
    let json = run(&["-j"]);
    let lines: Vec<Value> = json.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    for vm in ["a", "b"] {
        for event in ["task-clock", "kvm:exits"] {
            let its = lines.iter().filter(|l| l["vm"] == vm && l["event"] == event);
            assert_eq!(its.count(), 1, "{vm} {event}: {json}");
        }
    }
    let csv = run(&["-x", ";"]);
    assert!(
        csv.lines().any(|l| l.starts_with("a;")) && csv.lines().any(|l| l.starts_with("b;")),
        "{csv}"
    );
    let table = run(&[]);
    let at = |vm: &str| table.find(&format!("for VM '{vm}'"));
    assert!(at("a").is_some() && at("a") < at("b"), "{table}");
    let intervals = run(&["-I", "100"]);
    assert!(intervals.starts_with("# VM "), "{intervals}");
    assert_eq!(
        intervals.lines().filter(|l| l.starts_with('#')).count(),
        1,
        "{intervals}"
    );
    assert!(intervals.lines().any(|l| l.starts_with("b ")), "{intervals}");

    let both = command(&host, &["stat", "a", "--all"]).output().unwrap();
    assert!(
        both.status.code() == Some(2) && text(&both).contains("--all"),
        "{}",
        text(&both)
    );
}

/// `record` writes a separate file for each VM and reports an unresponsive VM. One signal stops all
/// recordings.
#[test]
fn record_writes_a_file_for_each_vm() {
    let Some(host) = Host::start(&[("a", &[]), ("b", &[]), ("c", &[])]) else {
        return;
    };
    let record = ["record", "--all", "-N", "-o", "p"];
    host.signal("c", "-STOP");
    let out = command(&host, &[&record[..], &["-d", "0.5"]].concat())
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(1), "{}", text(&out));
    assert!(
        text(&out).contains("c: the VM does not respond"),
        "{}",
        text(&out)
    );
    let file = |name: &str| host.runtime.path().join(name);
    for name in ["p.a", "p.b"] {
        let report = command(&host, &["report", "-i", name]).output().unwrap();
        assert!(report.status.success(), "{name}: {}", text(&report));
        assert!(file(name).exists());
    }
    assert!(!file("p.c").exists());
    host.signal("c", "-CONT");

    let mut recorder = command(&host, &[&record[..], &["-q"]].concat())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    crate::common::vm::eventually("all are recorded", || {
        file("p.a.old").exists() && file("p.b.old").exists() && file("p.c").exists()
    });
    let pid = recorder.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-INT", &pid])
            .status()
            .unwrap()
            .success()
    );
    assert!(recorder.wait().unwrap().success());
}
