//! Tests RDPMC in guest programs and in code generated at run time.
//!
//! Perfvisor emulates RDPMC if KVM lets the instruction fault. On some hosts, such as AMD-V with
//! Linux 6.1, KVM handles RDPMC itself, and programs read counters that do not count. `perfvisor
//! check` and the VMM (with `-v`) report such hosts.

use std::sync::OnceLock;

use guest_images::linux::KernelChoice;
use integration::artefacts;
use integration::guest::{GuestRun, LinuxGuest};
use integration::lab::LabOptions;
use integration::lease::{TestHostLease, TestHostLeaseMode};
use integration::limit::ProcessTimeLimits;
use integration::measure::skipped;
use integration::parse::parse_tap;
use integration::process::HostCommand;
use integration::test_host::{KvmGuestSupport, TestHost, probe_kvm};

use crate::nested::{self, GuestTests};
use crate::shared_guests::{self, GuestPart, is_selected};

const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;
const MODELS: [&str; 5] = ["intel-v1", "intel-v4", "amd-k7", "amd", "amd-v2"];
const RDPMC_FAULTS: &str = "/kvm/Ok/rdpmc_faults";
/// Path of the newest kernel's image in the lab, from which guests can boot.
const NEWEST: &str = "guest/newest-vmlinux";

/// Leases this machine if its KVM has hardware virtualization, and otherwise a lab that runs the
/// newest kernel, whose KVM lets RDPMC fault. Returns `None` if Debian's archive provides no kernel
/// newer than 6.1.
fn newest() -> Option<TestHostLease> {
    let kernel = KernelChoice::Newest;
    let images = artefacts::images_of(&kernel).unwrap_or_else(|error| panic!("{error}"));
    let options = LabOptions {
        kernel,
        files: vec![(NEWEST.to_owned(), images.vmlinux)],
        ..LabOptions::default()
    };
    let place =
        TestHost::lease(&options, TestHostLeaseMode::Shared).unwrap_or_else(|error| panic!("{error}"));
    if place.describe().contains("Linux 6.1.") && !says(&place, RDPMC_FAULTS) {
        // An unreachable archive cannot be distinguished from a release without a newer kernel.
        skipped(&format!("no newer kernel, {}", place.describe()), false);
        return None;
    }
    Some(place)
}

fn here() -> TestHostLease {
    TestHost::for_bare_metal(TestHostLeaseMode::Shared).unwrap_or_else(|error| panic!("{error}"))
}

fn says(place: &TestHost, pointer: &str) -> bool {
    place.check(pointer).unwrap_or_else(|error| panic!("{error}"))
}

/// Both ways to intercept RDPMC in code generated at run time work: an exit in the guest's #GP
/// handler, and a breakpoint in the handler on hosts that support it.
fn code_made_at_run_time_reads_counters(place: &TestHost) {
    assert!(says(place, RDPMC_FAULTS), "{}", place.describe());
    let breakpoints = says(place, "/stepping/breakpoints");
    let kernel = place
        .bare_metal_guest("rdpmc")
        .unwrap_or_else(|error| panic!("{error}"));
    for mode in if breakpoints {
        &["trap", "hwbp"][..]
    } else {
        &["trap"]
    } {
        for model in MODELS {
            let perfvisor = place.perfvisor().unwrap_or_else(|error| panic!("{error}"));
            let command = HostCommand::new(perfvisor)
                .args(["run", "--kernel", &kernel, "--pmu", model, "--rdpmc", mode])
                .args(["--cpus", "2", "-v"]);
            let output = place
                .run(&command, LIMIT)
                .unwrap_or_else(|error| panic!("{error}"));
            let text = output.stdout_text();
            let tap = parse_tap(&text);
            eprintln!(
                "rdpmc.elf, {mode}, {model}, {}: {} passed, {:.1?}",
                place.describe(),
                tap.passed.len(),
                output.elapsed
            );
            assert!(
                output.success() && tap.all_passed() && tap.passed.len() == 20 && tap.skipped.is_empty(),
                "{mode}, {model}: {:?}\n{text}\n{}",
                output.ended,
                output.stderr_text()
            );
            // Perfvisor finds the three RDPMC instructions of the guest's file by scanning this
            // file.
            let in_file = output.stderr_text().matches("info: rdpmc at ").count();
            assert_eq!(in_file, 3, "{mode}, {model}: {}", output.stderr_text());
        }
    }
}

/// In a guest other than Linux, RDPMC in code generated at run time is not intercepted by default,
/// because Perfvisor must not modify the guest's #GP handler. RDPMC instructions in the guest's
/// file are emulated.
fn code_made_at_run_time_is_left_alone_by_default(place: &TestHost) {
    let kernel = place
        .bare_metal_guest("rdpmc")
        .unwrap_or_else(|error| panic!("{error}"));
    for (only, tests) in [
        ("rdpmc:-in-the-file", 3),
        ("rdpmc:-made-at-run-time,-it-is-served", 1),
    ] {
        let perfvisor = place.perfvisor().unwrap_or_else(|error| panic!("{error}"));
        let words = format!("auto only={only}");
        let command = HostCommand::new(perfvisor).args([
            "run",
            "--kernel",
            &kernel,
            "--pmu",
            "amd",
            "--cmdline",
            &words,
        ]);
        let output = place
            .run(&command, LIMIT)
            .unwrap_or_else(|error| panic!("{error}"));
        let text = output.stdout_text();
        let tap = parse_tap(&text);
        assert!(
            output.success() && tap.all_passed() && tap.passed.len() == tests,
            "{only}: {:?}\n{text}\n{}",
            output.ended,
            output.stderr_text()
        );
    }
}

#[test]
fn code_made_at_run_time_reads_counters_here() {
    if probe_kvm() == KvmGuestSupport::None {
        return skipped("no KVM here", false);
    }
    code_made_at_run_time_reads_counters(&here());
}

#[test]
fn non_linux_guest_handler_is_not_patched_by_default() {
    if probe_kvm() == KvmGuestSupport::None {
        return skipped("no KVM here", false);
    }
    code_made_at_run_time_is_left_alone_by_default(&here());
}

#[test]
fn code_made_at_run_time_reads_counters_on_a_real_kvm() {
    if let Some(place) = newest() {
        code_made_at_run_time_reads_counters(&place);
    }
}

/// Guest script that runs a program which reads its own counters two hundred times.
const SELFREAD: &str = "section selfread selfread 200\n";

/// Returns the number after `key` in the output of `selfread`.
#[track_caller]
fn field(run: &GuestRun, section: &str, key: &str) -> u64 {
    let text = run.section(section);
    text.split_whitespace()
        .find_map(|word| word.strip_prefix(key)?.parse().ok())
        .unwrap_or_else(|| panic!("no {key} in {text:?}\n{run}"))
}

/// A value that a program reads with RDPMC is between two values that it reads with read(2), as
/// perf_event_open(2) describes. The test covers both vendors and the possible first instructions
/// of the #GP handler: CLAC, its replacement without SMAP, and ENDBR64.
#[test]
fn linux_programs_read_counters_by_rdpmc() {
    let Some(intel) = intel_guest() else { return };
    the_program_reads_its_counters("intel", intel);
    let Some(place) = newest() else { return };
    for (pmu, kernel) in [("amd", None), ("amd-v2", Some(NEWEST))] {
        let mut guest = LinuxGuest::new(format!("selfread-{pmu}"), pmu)
            .script(SELFREAD)
            .args(["--stats", "-v"])
            .limit(LIMIT);
        if let (Some(kernel), TestHost::Lab(_)) = (kernel, &*place) {
            guest = guest.kernel(format!("/{kernel}"));
        }
        let run = guest.run(&place).unwrap_or_else(|error| panic!("{error}"));
        the_program_reads_its_counters(pmu, &run);
    }
}

fn the_program_reads_its_counters(pmu: &str, run: &GuestRun) {
    eprintln!("{pmu}: {}", run.section("selfread").trim());
    let [reads, in_order, width] = ["reads=", "in_order=", "width="].map(|key| field(run, "selfread", key));
    assert_eq!(width, 48, "{run}");
    // Some reads may fail, because the event may be temporarily off the PMU.
    assert!(reads > 190 && in_order == reads, "{run}");
    run.expect_success();
}

/// A Perfvisor that runs in the guest detects that RDPMC works in programs, and uses RDPMC to read
/// the counters of its host events.
#[test]
fn host_driver_reads_counters_in_a_guest() {
    let Some(run) = intel_guest() else { return };
    assert!(run.section("test").contains("1 passed"), "{run}");
    run.expect_success();
}

/// Returns the run of an Intel guest that several tests share. The guest executes only the parts of
/// the selected tests. Returns `None` if [`newest`] does.
fn intel_guest() -> Option<&'static GuestRun> {
    static RUN: OnceLock<Option<Result<GuestRun, String>>> = OnceLock::new();
    let run = RUN.get_or_init(|| {
        let tests = is_selected("user_rdpmc::host_driver_reads_counters_in_a_guest")
            .then(|| nested::HARDWARE.build());
        let place = newest()?;
        let mut guest = LinuxGuest::new("selfread-intel", "intel")
            .args(["--stats", "-v"])
            .limit(LIMIT);
        let mut script = String::new();
        if is_selected("user_rdpmc::linux_programs_read_counters_by_rdpmc") {
            script.push_str(SELFREAD);
        }
        if let Some(program) = tests {
            let GuestTests {
                program: name,
                prefix,
                ..
            } = nested::HARDWARE;
            guest = guest.file(&format!("tests/{name}"), 0o755, program);
            script.push_str(&format!(
                "section test sh -c 'PERFVISOR_EXPECT_PMU=guest PERFVISOR_EXPECT_USER_READ=yes /tests/{name} \
                 --exact {prefix}{}'\n",
                nested::USER_READS
            ));
        }
        Some(
            guest
                .script(script)
                .run(&place)
                .map_err(|error| error.to_string()),
        )
    });
    let run = run.as_ref()?;
    Some(run.as_ref().unwrap_or_else(|error| panic!("{error}")))
}

/// The RDPMC test that runs in `shared_guests::AMD`, a guest that several test modules share.
pub const ANSWERED: GuestPart = GuestPart {
    tests: &["user_rdpmc::vmm_warns_about_non_counting_user_rdpmc"],
    prepare: || {},
    add: |place, guest| {
        let script = format!(
            "section announced cat /sys/bus/event_source/devices/cpu/rdpmc\n\
             section answered selfread 20\n\
             section faults echo {}\n",
            place.check(RDPMC_FAULTS)?
        );
        Ok((guest, script))
    },
};

/// If KVM handles RDPMC itself, the VMM warns that the counters that programs read do not count,
/// and the guest's kernel does not set `cap_user_rdpmc`.
#[test]
fn vmm_warns_about_non_counting_user_rdpmc() {
    let run = shared_guests::AMD.run();
    let faults = run.section("faults").trim() == "true";
    let said = run
        .vmm_log
        .contains("programs of the guest that use RDPMC read counters that do not count");
    assert_eq!(said, !faults, "{run}");
    assert_eq!(run.section("announced").trim() == "1", faults, "{run}");
    assert_eq!(field(run, "answered", "reads=") > 0, faults, "{run}");
    run.expect_success();
}
