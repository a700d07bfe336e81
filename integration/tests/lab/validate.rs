//! Tests `perfvisor validate`. All checks pass with the built-in guest on this machine's KVM, and
//! with a Linux guest on a KVM with hardware virtualization. The command fails if a measurement is
//! outside its tolerance.

use integration::lease::{TestHostLease, TestHostLeaseMode};
use integration::limit::ProcessTimeLimits;
use integration::measure::skipped;
use integration::process::{HostCommand, ProcessOutput};
use integration::test_host::{KvmGuestSupport, TestHost, probe_kvm};
use serde_json::Value;

/// Time limits of `perfvisor validate`, which prints nothing until it has finished.
const LIMIT: ProcessTimeLimits = ProcessTimeLimits {
    silent: ProcessTimeLimits::GENEROUS.overall,
    ..ProcessTimeLimits::GENEROUS
};

fn validate(place: &TestHost, arguments: &[&str]) -> ProcessOutput {
    let perfvisor = place.perfvisor().unwrap_or_else(|error| panic!("{error}"));
    let command = HostCommand::new(perfvisor)
        .arg("validate")
        .args(arguments.iter().copied());
    place
        .run(&command, LIMIT)
        .unwrap_or_else(|error| panic!("{error}"))
}

fn here(access: TestHostLeaseMode) -> TestHostLease {
    TestHost::for_bare_metal(access).unwrap_or_else(|error| panic!("{error}"))
}

fn report(output: &ProcessOutput) -> Value {
    serde_json::from_str(&output.stdout_text())
        .unwrap_or_else(|e| panic!("{e}: {}\n{}", output.stdout_text(), output.stderr_text()))
}

fn rows(report: &Value) -> &[Value] {
    report["rows"].as_array().map_or(&[], Vec::as_slice)
}

fn find<'a>(report: &'a Value, wanted: &'a [(&str, &str)]) -> impl Iterator<Item = &'a Value> {
    rows(report)
        .iter()
        .filter(|row| wanted.iter().all(|(key, value)| row[*key] == *value))
}

/// Checks that the report contains a row which matches `wanted`, and that all matching rows passed.
#[track_caller]
fn passed(report: &Value, wanted: &[(&str, &str)]) {
    let found: Vec<&Value> = find(report, wanted).collect();
    assert!(!found.is_empty(), "no row with {wanted:?}");
    for row in found {
        assert_eq!(row["verdict"], "PASS", "{row:#}");
    }
}

/// Checks the rows of the built-in guest for properties that hold on every host.
#[track_caller]
fn the_built_in_rows_are_right(report: &Value) {
    let failed: Vec<&Value> = rows(report)
        .iter()
        .filter(|row| row["verdict"] == "FAIL")
        .collect();
    assert!(failed.is_empty(), "{failed:#?}");
    assert_eq!(report["failed"], 0);
    let built_in = ("guest_kind", "built-in");
    passed(report, &[built_in, ("event", "cycles"), ("check", "counting")]);
    passed(report, &[built_in, ("check", "multiplexing")]);
    for policy in ["guest-first", "operator-first", "strict"] {
        let workload = format!("--share {policy}");
        passed(report, &[built_in, ("workload", &workload)]);
    }
    passed(
        report,
        &[
            built_in,
            ("check", "sampling"),
            ("workload", "operator's samples"),
        ],
    );
    passed(
        report,
        &[
            built_in,
            ("check", "sampling"),
            ("workload", "PMIs, one a period"),
        ],
    );
    // A spurious interrupt is an error regardless of timing.
    passed(
        report,
        &[
            built_in,
            ("check", "sampling"),
            ("workload", "PMIs without an overflow"),
        ],
    );
    for event in ["io-exits", "mmio-exits", "halts", "msr-exits"] {
        passed(report, &[("backing", "paravirtual"), ("event", event)]);
    }
    // For exact counting, the guest's count, the host's count and the known count are equal.
    for event in ["instructions", "branches", "loads", "stores"] {
        let exact = [built_in, ("backing", "exact"), ("event", event)];
        passed(report, &exact);
        for row in find(report, &exact) {
            assert_eq!(row["guest"], row["expected"], "{row:#}");
            assert_eq!(row["guest"], row["host"], "{row:#}");
        }
    }
    for row in rows(report) {
        let passed = row["verdict"] == "PASS";
        assert_eq!(passed, row["reason"].is_null(), "{row:#}");
    }
}

fn validate_passes_here(pmu: &str) {
    let output = validate(
        &here(TestHostLeaseMode::Exclusive),
        &["--no-linux", "--json", "--pmu", pmu],
    );
    let report = report(&output);
    the_built_in_rows_are_right(&report);
    assert!(output.success(), "{:?}", output.ended);
    print_results(pmu, &report);
}

/// Prints the number of rows in the report, and the range of values of each row that was measured
/// several times.
fn print_results(pmu: &str, report: &Value) {
    eprintln!(
        "{pmu}: {} passed in {} s",
        report["passed"], report["summary"]["seconds"]
    );
    for row in rows(report).iter().filter(|row| row["measurements"] != 1) {
        eprintln!(
            "{pmu}: {} by {}, {}: {} in {}",
            row["event"], row["backing"], row["workload"], row["ratio"], row["spread"]
        );
    }
}

#[test]
fn intel_validation_passes_on_this_host() {
    validate_passes_here("intel");
}

#[test]
fn amd_validation_passes_on_this_host() {
    validate_passes_here("amd");
}

/// `perfvisor validate` with a tolerance of 0.00001 % fails, because no clock is that accurate. The
/// failure is reported in the rows and in the exit status.
#[test]
fn validate_fails_outside_tolerance() {
    let arguments = ["--no-linux", "--tolerance", "0.00001", "--pmu", "amd"];
    let output = validate(&here(TestHostLeaseMode::Shared), &arguments);
    let text = output.stdout_text();
    assert_eq!(output.code(), Some(1), "{text}");
    assert!(text.contains("off the expectation"), "{text}");
    let cycles = text
        .lines()
        .find(|line| line.contains("cycles") && line.contains("busy, CPL3") && line.contains("clock"));
    assert!(cycles.is_some_and(|line| line.contains("FAIL")), "{text}");
    // Exact counts are independent of the clock tolerance.
    let exact = text
        .lines()
        .find(|line| line.contains("instructions") && line.contains("exact"));
    assert!(exact.is_some_and(|line| line.contains("PASS")), "{text}");
    assert!(text.trim_end().ends_with("FAIL"), "{text}");
}

#[test]
fn bad_input_is_one_line() {
    for (arguments, word) in [
        (&["--pmu", "off"][..], "intel or amd"),
        (&["--pmu", "vax"], "vax"),
        (&["--tolerance", "lots"], "between 0 and 50"),
        (&["--kernel", "k"], "--initrd"),
        (
            &["--kernel", "/no/kernel", "--initrd", "/no/initrd"],
            "/no/kernel",
        ),
        (&["--kernel", "k", "--initrd", "i", "--no-linux"], "--no-linux"),
    ] {
        let output = validate(&here(TestHostLeaseMode::Shared), arguments);
        let stderr = output.stderr_text();
        assert_eq!(output.code(), Some(2), "{arguments:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{arguments:?}: {stderr}");
        assert!(stderr.contains(word), "{arguments:?}: {stderr}");
    }
}

/// `perfvisor validate` with a Linux guest fails on a host that cannot run Linux guests, before
/// anything starts.
#[test]
fn validate_rejects_linux_on_software_kvm() {
    if probe_kvm() != KvmGuestSupport::SoftwareOnly {
        return skipped("this machine's KVM can run Linux, or there is none", false);
    }
    let file = std::env::current_exe().unwrap();
    let file = file.to_string_lossy();
    let output = validate(
        &here(TestHostLeaseMode::Shared),
        &["--kernel", &file, "--initrd", &file],
    );
    assert_eq!(output.code(), Some(2));
    assert!(
        output.stderr_text().contains("make lab"),
        "{}",
        output.stderr_text()
    );
}

fn a_linux_guest_counts_right(pmu: &str) {
    let place = TestHost::exclusive().unwrap_or_else(|error| panic!("{error}"));
    let kernel = place.guest_file("vmlinux").unwrap();
    let initrd = place.guest_file("initrd").unwrap();
    let arguments = ["--json", "--pmu", pmu, "--kernel", &kernel, "--initrd", &initrd];
    let output = validate(&place, &arguments);
    let report = report(&output);
    let linux = ("guest_kind", "linux");
    for workload in ["busy loop", "pointer chase", "system calls", "page faults"] {
        passed(&report, &[linux, ("event", "cycles"), ("workload", workload)]);
    }
    passed(&report, &[linux, ("check", "contention")]);
    for event in ["instructions", "branches", "loads", "stores"] {
        for row in find(&report, &[("backing", "exact"), ("event", event)]) {
            assert_eq!(row["verdict"], "PASS", "{row:#}");
        }
    }
    the_built_in_rows_are_right(&report);
    assert!(output.success(), "{:?}", output.ended);
    print_results(pmu, &report);
}

#[test]
#[ignore = "two minutes each, on a machine that does nothing else: make validate-lab"]
fn linux_guest_counts_right_with_an_intel_pmu() {
    a_linux_guest_counts_right("intel");
}

#[test]
#[ignore = "two minutes each, on a machine that does nothing else: make validate-lab"]
fn linux_guest_counts_right_with_an_amd_pmu() {
    a_linux_guest_counts_right("amd");
}
