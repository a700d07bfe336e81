//! Tests the built-in guests on this machine's KVM, with or without hardware virtualization, and in
//! the lab.

use integration::lease::{TestHostLease, TestHostLeaseMode};
use integration::limit::ProcessTimeLimits;
use integration::measure::{measured_in_parts, skipped};
use integration::parse::parse_tap;
use integration::process::{HostCommand, ProcessOutput};
use integration::test_host::{KvmGuestSupport, TestHost, probe_kvm};

const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;

const MODELS: [&str; 5] = ["intel-v2", "intel-v4", "amd", "amd-k7", "amd-v2"];

/// Leases a test host with any KVM, exclusively, because the guests compare counts with the clock.
fn here() -> TestHostLease {
    TestHost::for_bare_metal(TestHostLeaseMode::Exclusive).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs `perfvisor run` with `arguments` on the test host.
#[track_caller]
fn run(place: &TestHost, arguments: &[&str]) -> ProcessOutput {
    let perfvisor = place.perfvisor().unwrap_or_else(|error| panic!("{error}"));
    let command = HostCommand::new(perfvisor)
        .arg("run")
        .args(arguments.iter().copied());
    place
        .run(&command, LIMIT)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Formats the exit status and the output of a failed run.
fn shown(output: &ProcessOutput) -> String {
    format!(
        "status {:?}\n{}\n--- standard error\n{}",
        output.ended,
        output.stdout_text(),
        output.stderr_text()
    )
}

fn check_built_in_guest(place: &TestHost) {
    for model in ["intel", "amd"] {
        // The guest reports measurements that host load made inconclusive. Actual errors fail
        // immediately.
        let untold = measured_in_parts(|| {
            let output = run(place, &["--pmu", model, "--cmdline", "selftest lines"]);
            let text = output.stdout_text();
            eprintln!(
                "built-in guest, {model}, {}: {:.1?}",
                place.describe(),
                output.elapsed
            );
            let results: Vec<_> = text
                .lines()
                .filter_map(|line| line.strip_prefix("result "))
                .collect();
            assert!(!results.is_empty(), "{}", shown(&output));
            let mut parts = Vec::new();
            for line in &results {
                assert!(!line.contains("verdict=failed"), "{line}\n{}", shown(&output));
                let row = line.split(' ').next().unwrap_or_default().to_owned();
                parts.push((row, !line.contains("verdict=busy")));
            }
            let all_told = parts.iter().all(|(_, told)| *told);
            assert!(!all_told || output.success(), "{}", shown(&output));
            // Every backing supports cycles.
            let cycles = |line: &&str| line.contains("cycles") && line.contains("verdict=ok");
            parts.push(("cycles".to_owned(), results.iter().any(cycles)));
            parts
        });
        assert!(!untold.contains(&"cycles".to_owned()), "{model}: {untold:?}");
        if !untold.is_empty() {
            skipped(&format!("{model}: too busy to tell: {untold:?}"), false);
        }
    }
}

fn the_vpmu_test_kernel_passes(place: &TestHost) {
    let kernel = place
        .bare_metal_guest("vpmu")
        .unwrap_or_else(|error| panic!("{error}"));
    // PMI delivery differs in xAPIC mode, especially on Intel models.
    let kinds = MODELS.map(|model| (model, "")).into_iter();
    for (model, apic) in kinds.chain([("intel-v2", " xapic"), ("amd", " xapic")]) {
        // Only the clock backing is supported on every host.
        let words = format!("model={model} backing=clock{apic}");
        let output = run(
            place,
            &[
                "--kernel",
                &kernel,
                "--pmu",
                model,
                "--backing",
                "clock",
                // A delayed PMI is withdrawn if the guest clears the cause of the PMI.
                "--pmi-share",
                "off",
                "--cpus",
                "2",
                "--cmdline",
                &words,
            ],
        );
        let tap = parse_tap(&output.stdout_text());
        eprintln!(
            "vpmu.elf, {model}{apic}, {}: {} passed, {} skipped, {:.1?}",
            place.describe(),
            tap.passed.len(),
            tap.skipped.len(),
            output.elapsed
        );
        assert!(
            tap.all_passed(),
            "{model}{apic}: failed {:?}\n{}",
            tap.failed,
            shown(&output)
        );
        assert!(
            output.success() && tap.passed.len() > 10,
            "{model}: {}",
            shown(&output)
        );
    }
}

#[test]
fn built_in_guest_reports_expected_counts() {
    check_built_in_guest(&here());
}

#[test]
fn vpmu_test_kernel_passes_here() {
    the_vpmu_test_kernel_passes(&here());
}

/// The built-in guest passes on a KVM with hardware virtualization: this machine's KVM if it has
/// one, otherwise the lab's kvm_amd.
#[test]
fn builtin_guest_passes_on_hardware_kvm() {
    if probe_kvm() == KvmGuestSupport::Hardware {
        return skipped("this machine's own KVM is a real one, and was tested", false);
    }
    let place = TestHost::exclusive().unwrap_or_else(|error| panic!("{error}"));
    check_built_in_guest(&place);
}

#[test]
fn vpmu_test_kernel_passes_on_a_real_kvm() {
    if probe_kvm() == KvmGuestSupport::Hardware {
        return skipped("this machine's own KVM is a real one, and was tested", false);
    }
    let place = TestHost::exclusive().unwrap_or_else(|error| panic!("{error}"));
    the_vpmu_test_kernel_passes(&place);
}

#[test]
fn built_in_guest_reports_missing_pmu() {
    let output = run(&here(), &["--pmu", "off"]);
    assert!(output.success(), "{}", shown(&output));
}

/// Start of the log message that reports the guest's first instruction.
const FIRST: &str = "first guest instruction ";
/// Maximum number of system calls that the VMM makes before the first guest instruction. Measured:
/// about 850.
const MOST_CALLS: usize = 1500;
/// Maximum number of VMs that the VMM creates during start-up: one to probe KVM and one for the
/// guest. Each creation waits for all processors several times.
const MOST_VMS: usize = 2;
/// Size from which a memory mapping counts as large, in bytes. Thread stacks are smaller.
const LARGE: u64 = 4 << 20;

/// The VMM makes a limited number of system calls before the first guest instruction, and does not
/// sleep. The test counts operations, because the start-up time depends on the machine
/// (docs/measurements.md).
#[test]
fn startup_makes_few_system_calls_and_no_sleep() {
    let place = here();
    if !matches!(*place, TestHost::Direct(_)) {
        return skipped("strace is of this machine, which has no KVM", false);
    }
    let strace = |options: &[&str]| {
        let mut strace = std::process::Command::new("strace");
        strace.args(["-f", "-qq", "-s", "200"]).args(options);
        strace.stdin(std::process::Stdio::null()).output()
    };
    if !strace(&["-o", "/dev/null", "true"]).is_ok_and(|out| out.status.success()) {
        return skipped("no strace here, or nobody may trace", false);
    }
    let perfvisor = place.perfvisor().unwrap_or_else(|error| panic!("{error}"));
    let trace = tempfile::NamedTempFile::new().unwrap();
    let file = trace.path().to_str().unwrap();
    let out = strace(&[
        "-o",
        file,
        &perfvisor,
        "-v",
        "run",
        "--memory",
        "64M",
        "--cmdline",
        "quiet",
    ])
    .unwrap();
    let log = String::from_utf8_lossy(&out.stderr);
    let time_ms = first_instruction_ms(&log).unwrap_or_else(|| panic!("not told\n{log}"));
    let trace = std::fs::read_to_string(file).unwrap();
    // The log message itself is a system call and ends the counted part of the trace. A call that
    // is interrupted by another thread's call takes two lines.
    let before = trace.lines().take_while(|line| !line.contains(FIRST));
    let calls: Vec<&str> = before.filter(|line| !line.contains("<... ")).collect();
    let of = |name: &str| calls.iter().filter(|line| line.contains(name)).count();
    let (vms, sleeps) = (of("KVM_CREATE_VM"), of("nanosleep("));
    eprintln!(
        "first guest instruction after {} calls, {vms} VMs; traced, {time_ms} ms",
        calls.len()
    );
    assert!(calls.len() < trace.lines().count(), "its end is not in the trace");
    assert!(calls.len() <= MOST_CALLS, "{} calls", calls.len());
    assert!((1..=MOST_VMS).contains(&vms), "{vms} VMs");
    assert_eq!(sleeps, 0);
    // The program releases its start-up memory once, when all threads have started.
    let lets_go = |line: &&str| {
        let (_, arguments) = line.split_once("madvise(")?;
        let (length, advice) = arguments.split_once(", ")?.1.split_once(", ")?;
        let large = length.parse::<u64>().is_ok_and(|bytes| bytes >= LARGE);
        (large && advice.starts_with("MADV_DONTNEED")).then_some(())
    };
    let all = trace.lines().filter(|line| !line.contains("<... "));
    assert_eq!(all.filter_map(|line| lets_go(&line)).count(), 1);
}

/// Parses the time in milliseconds from a message such as "first guest instruction 12.3 ms after
/// exec".
fn first_instruction_ms(log: &str) -> Option<f64> {
    let (_, rest) = log.split_once(FIRST)?;
    rest.split_whitespace().next()?.parse().ok()
}
