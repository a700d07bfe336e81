//! `stat --replay`: every pass counts the same window of a snapshot.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::vm::{PROGRAM, SpinningVm, said, stdout_of};

/// Takes a snapshot of a VM with a spinning guest, which ends.
fn snapshot() -> Option<(SpinningVm, PathBuf)> {
    let mut vm = SpinningVm::start("one", &["--cpus", "2"])?;
    let dir = vm.runtime.path().join("saved");
    stdout_of(&mut vm.operator(&["ctl", "one", "snapshot", dir.to_str().unwrap(), "--stop"]));
    assert_eq!(vm.wait(), Some(0));
    Some((vm, dir))
}

fn replay(runtime: &Path, dir: &Path, options: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command
        .args(["stat", "--replay", dir.to_str().unwrap()])
        .args(options)
        .env("XDG_RUNTIME_DIR", runtime);
    command
}

/// Each event has one line with the mean of the runs and its spread, was counted all the time, and no
/// VM remains.
#[test]
fn replayed_events_are_counted_all_the_time() {
    let Some((vm, dir)) = snapshot() else { return };
    let runtime = vm.runtime.path();
    let options = [
        "-d",
        "0.3",
        "-r",
        "2",
        "-j",
        "-e",
        "cycles,{task-clock,cycles:u},pv/vm-exits/,instructions:k",
    ];
    let text = stdout_of(&mut replay(runtime, &dir, &options));
    let rows: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let names: Vec<&str> = rows.iter().map(|row| row["event"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        [
            "cycles",
            "task-clock",
            "cycles:u",
            "pv/vm-exits/",
            "instructions:k"
        ],
        "{text}"
    );
    for row in &rows[..3] {
        assert!(
            row["counter-value"].as_str().unwrap().parse::<f64>().unwrap() > 0.0,
            "{text}"
        );
        assert_eq!(row["pcnt-running"], 100.0, "{text}");
        assert!(row["variance"].is_f64(), "{text}");
    }
    assert_eq!(stdout_of(&mut vm.operator(&["ps", "--names"])), "");

    // One line for each vCPU, and three runs by default.
    let text = stdout_of(&mut replay(runtime, &dir, &["-d", "0.1", "-A", "-e", "cycles"]));
    assert!(text.contains(" (3 runs)"), "{text}");
    assert!(text.contains("VCPU0 ") && text.contains("VCPU1 "), "{text}");
}

#[test]
fn bad_replays_are_refused() {
    let Some((vm, dir)) = snapshot() else { return };
    let runtime = vm.runtime.path();
    let line = |dir: &Path, options: &[&str]| {
        let (status, text) = said(&mut replay(runtime, dir, options));
        assert_eq!(status, Some(2), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        text
    };
    assert_eq!(
        line(&dir, &[]),
        "perfvisor: error: --replay requires --duration\n"
    );
    let missing = line(&dir.join("none"), &["-d", "1"]);
    assert!(
        missing.starts_with("perfvisor: error: --replay: ") && missing.contains("none/state"),
        "{missing}"
    );
    assert!(line(&dir, &["-d", "1", "-e", "nonsense"]).contains("'nonsense'"));
    std::fs::write(dir.join("state"), "damaged").unwrap();
    assert!(line(&dir, &["-d", "1"]).starts_with("perfvisor: error: --replay: "));
}
