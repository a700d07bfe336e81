//! `perfvisor exits` with a running VM.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use crate::common::operator::TestVm;
use crate::common::vm::assert_contains;
use serde_json::Value;

fn lines(text: &str) -> Vec<Value> {
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn count(of: &Value, list: &str, key: &str, name: &str) -> u64 {
    let all = of[list].as_array().unwrap();
    let named = all.iter().filter(|one| one[key] == name);
    named.map(|one| one["count"].as_u64().unwrap()).sum()
}

/// Exits caused by kicks of the vCPUs are counted and timed during the observation. Intervals add
/// up to the total, and KVM's statistics are also shown.
#[test]
fn exits_are_counted_and_timed_while_observed() {
    let Some(vm) = TestVm::spinning(2) else { return };
    // Each reading of the guest counters kicks both vCPUs, which produces exits.
    let mut watching = vm
        .vm
        .operator(&["exits", "test", "-i", "0.4", "--json", "-A"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(watching.stdout.take().unwrap());
    let mut text = String::new();
    // Each call is a separate observation.
    for _ in 0..3 {
        assert!(said.read_line(&mut text).unwrap() > 0, "{text}");
        vm.run_for_stderr(&["stat", "test", "--guest-view"]);
    }
    let interrupt = Command::new("kill")
        .args(["-INT", &watching.id().to_string()])
        .status();
    assert!(interrupt.unwrap().success());
    said.read_to_string(&mut text).unwrap();
    assert!(watching.wait().unwrap().success(), "{text}");
    let all = lines(&text);
    let (total, intervals) = all.split_last().unwrap();
    assert!(!intervals.is_empty(), "{text}");
    assert_eq!(
        (&total["total"], &intervals[0]["total"]),
        (&true.into(), &false.into())
    );
    let kicks = count(total, "exits", "reason", "kick");
    assert!(kicks > 0, "{text}");
    let in_intervals: u64 = intervals
        .iter()
        .map(|i| count(i, "exits", "reason", "kick"))
        .sum();
    assert_eq!(in_intervals, kicks, "{text}");
    for exits in total["exits"].as_array().unwrap() {
        let number = |key: &str| exits[key].as_u64().unwrap();
        assert!(number("timed") <= number("count"), "{text}");
        assert!(number("vcpu") < 2, "{text}");
        // The maximum is part of the sum.
        assert!(number("max_ns") <= number("time_ns"), "{text}");
        assert!(number("max_ns") * number("timed") >= number("time_ns"), "{text}");
    }
    let of_kvm = total["kvm"].as_array().unwrap();
    if of_kvm.is_empty() {
        return test_support::skip::skipped("this KVM has no binary statistics", false);
    }
    assert!(count(total, "kvm", "statistic", "exits") >= kicks, "{text}");
}

/// Checks that the output contains either the durations of KVM's exits or the reason they are
/// unavailable.
fn reports_kvm_exit_timing(text: &str) -> bool {
    text.contains("\n KVM's exits   ") != text.contains("KVM's exits are not timed: ")
}

#[test]
fn tables_report_untimed_exits() {
    let Some(vm) = TestVm::spinning(1) else { return };
    let text = vm.run_for_stderr(&["exits", "test", "-d", "0.3"]);
    for part in [
        "exits to Perfvisor",
        // The number in "all of N further reasons" depends on the host.
        "all of ",
        "mean (us)",
        "KVM_RUN",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    assert!(reports_kvm_exit_timing(&text), "{text}");
    let without = vm.run_for_stderr(&["exits", "test", "-d", "0.1", "--no-trace"]);
    assert_contains(&without, "KVM's exits are not timed: --no-trace");
    // A VM without a PMU can be observed too.
    let Some(vm) = crate::common::vm::SpinningVm::start("bare", &["--pmu", "off"]) else {
        return;
    };
    let out = vm.operator(&["exits", "bare", "-d", "0.2"]).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert_eq!(
        out.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    for part in ["exits to Perfvisor", "all of "] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    assert!(reports_kvm_exit_timing(&text), "{text}");
}

#[test]
fn invalid_intervals_are_rejected_in_one_line() {
    for value in ["-1", "0", "x"] {
        let mut command = Command::new(crate::common::vm::PROGRAM);
        let out = command.args(["exits", "vm", "-i", value]).output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(value) && stderr.contains("above 0"), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}
