//! A guest without a PMU (`--pmu off`) can be counted and sampled from the host like any other.

use std::process::Command;

use crate::common::vm::{PROGRAM, SpinningVm, run_and_read_stderr};

#[test]
fn operator_counts_and_samples_guest_without_pmu() {
    let Some(vm) = SpinningVm::start("bare", &["--pmu", "off", "--cpus", "2"]) else {
        return;
    };
    vm.assert_counted_and_sampled("bare", "cycles,task-clock,io-exits");
}

#[test]
fn guest_pmu_options_are_rejected_in_one_line() {
    let Some(vm) = SpinningVm::start("bare", &["--pmu", "off"]) else {
        return;
    };
    let filter = vm.runtime.path().join("filter.toml");
    std::fs::write(&filter, "action = \"allow\"\nevents = []\n").unwrap();
    for args in [
        &["stat", "bare", "--guest-view"][..],
        &["ctl", "bare", "filter", filter.to_str().unwrap()],
    ] {
        let (status, text) = run_and_read_stderr(&mut vm.operator(args));
        assert_eq!(status, Some(2), "{args:?}: {text}");
        assert!(
            text.contains("guest has no PMU") && text.lines().count() == 1,
            "{args:?}: {text}"
        );
    }
    // A VM that requires a PMU does not start without one.
    for (option, value) in [
        ("--pmu-filter", filter.to_str().unwrap()),
        ("--pmi-limit", "5"),
        ("--pmi-share", "50%"),
        ("--backing", "clock"),
        ("--rdpmc", "trap"),
    ] {
        let mut run = Command::new(PROGRAM);
        let (status, text) = run_and_read_stderr(run.args(["run", "--pmu", "off", option, value]));
        assert_eq!(status, Some(2), "{option}: {text}");
        assert!(
            text.contains(&format!("{option} with --pmu off")) && text.lines().count() == 1,
            "{option}: {text}"
        );
    }
}
