//! RDPMC outside the kernel's text: in programs, and in code made at run time. Served where KVM lets it
//! fault; where KVM answers it itself with counters that do not count, as on AMD-V in Linux 6.1, the VMM says
//! so with -v, and `check` does.

use std::sync::{MutexGuard, OnceLock};

use guest_images::linux::KernelChoice;
use integration::artefacts;
use integration::guest::{GuestRun, LinuxGuest};
use integration::lab::LabOptions;
use integration::limit::Limit;
use integration::measure::skipped;
use integration::parse::parse_tap;
use integration::place::{Kvm, Place, probe_kvm};
use integration::process::Command;

const LIMIT: Limit = Limit::GENEROUS;
const MODELS: [&str; 5] = ["intel-v1", "intel-v4", "amd-k7", "amd", "amd-v2"];
const RDPMC_FAULTS: &str = "/kvm/Ok/rdpmc_faults";
/// The newest kernel in the lab, as a guest's.
const NEWEST: &str = "guest/newest-vmlinux";

/// A lab with the newest kernel, whose KVM lets RDPMC fault; this machine where it has a real KVM. `None`
/// where Debian's archive, its backports out of reach, has no newer kernel than 6.1.
fn newest() -> Option<&'static Place> {
    static PLACE: OnceLock<Result<Place, String>> = OnceLock::new();
    let place = PLACE
        .get_or_init(|| {
            let kernel = KernelChoice::Newest;
            let images = artefacts::images_of(&kernel).map_err(|error| error.to_string())?;
            let options = LabOptions {
                kernel,
                files: vec![(NEWEST.to_owned(), images.vmlinux)],
                ..LabOptions::default()
            };
            Place::choose(&options).map_err(|error| artefacts::describe(&error))
        })
        .as_ref()
        .unwrap_or_else(|error| panic!("{error}"));
    if place.describe().contains("Linux 6.1.") && !says(place, RDPMC_FAULTS) {
        // The archive may be out of reach; whether it is cannot be told from a release without a newer
        // kernel.
        skipped(&format!("no newer kernel, {}", place.describe()), false);
        return None;
    }
    Some(place)
}

fn shared() -> MutexGuard<'static, Place> {
    Place::shared().unwrap_or_else(|error| panic!("{error}"))
}

fn says(place: &Place, pointer: &str) -> bool {
    place.check(pointer).unwrap_or_else(|error| panic!("{error}"))
}

/// By the exit in the guest's handler of #GP, and by a breakpoint there where those stop.
fn code_made_at_run_time_reads_counters(place: &Place) {
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
            let command = Command::new(perfvisor)
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
            // What the guest's file has is found in it.
            let in_file = output.stderr_text().matches("info: rdpmc at ").count();
            assert_eq!(in_file, 3, "{mode}, {model}: {}", output.stderr_text());
        }
    }
}

/// In a guest that is not Linux nothing changes at run time unless the user asks for it: there the exit in
/// the handler of #GP is not Perfvisor's to plant. What is in the file is served all the same.
fn code_made_at_run_time_is_left_alone_by_default(place: &Place) {
    let kernel = place
        .bare_metal_guest("rdpmc")
        .unwrap_or_else(|error| panic!("{error}"));
    for (only, tests) in [
        ("rdpmc:-in-the-file", 3),
        ("rdpmc:-made-at-run-time,-it-is-served", 1),
    ] {
        let perfvisor = place.perfvisor().unwrap_or_else(|error| panic!("{error}"));
        let words = format!("auto only={only}");
        let command =
            Command::new(perfvisor).args(["run", "--kernel", &kernel, "--pmu", "amd", "--cmdline", &words]);
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
    if probe_kvm() == Kvm::None {
        return skipped("no KVM here", false);
    }
    code_made_at_run_time_reads_counters(&Place::direct().unwrap_or_else(|error| panic!("{error}")));
}

#[test]
fn what_is_not_linux_keeps_its_handler_unless_asked() {
    if probe_kvm() == Kvm::None {
        return skipped("no KVM here", false);
    }
    code_made_at_run_time_is_left_alone_by_default(
        &Place::direct().unwrap_or_else(|error| panic!("{error}")),
    );
}

#[test]
fn code_made_at_run_time_reads_counters_on_a_real_kvm() {
    if let Some(place) = newest() {
        code_made_at_run_time_reads_counters(place);
    }
}

/// The number after `key` in what `selfread` printed.
#[track_caller]
fn field(run: &GuestRun, section: &str, key: &str) -> u64 {
    let text = run.section(section);
    text.split_whitespace()
        .find_map(|word| word.strip_prefix(key)?.parse().ok())
        .unwrap_or_else(|| panic!("no {key} in {text:?}\n{run}"))
}

/// What a program reads by RDPMC, as perf_event_open(2) describes it, lies between what it reads by read(2)
/// before and after: with either vendor, and in kernels whose handler of #GP begins with CLAC, with what
/// stands there without SMAP, or with ENDBR64.
#[test]
fn programs_of_a_linux_guest_read_their_counters() {
    let Some(place) = newest() else { return };
    for (pmu, kernel) in [("intel", None), ("amd", None), ("amd-v2", Some(NEWEST))] {
        let mut guest = LinuxGuest::new(format!("selfread-{pmu}"), pmu)
            .script("section selfread selfread 200\n")
            .args(["--stats", "-v"])
            .limit(LIMIT);
        if let (Some(kernel), Place::Lab(_)) = (kernel, place) {
            guest = guest.kernel(format!("/{kernel}"));
        }
        let run = guest.run(place).unwrap_or_else(|error| panic!("{error}"));
        eprintln!("{pmu}: {}", run.section("selfread").trim());
        let [reads, in_order, width] =
            ["reads=", "in_order=", "width="].map(|key| field(&run, "selfread", key));
        assert_eq!(width, 48, "{run}");
        // Not all: the event may be off the PMU for a moment.
        assert!(reads > 190 && in_order == reads, "{run}");
        run.expect_success();
    }
}

/// A Perfvisor in the guest finds that programs can read counters, and does: its host driver takes them for
/// what the kernel counts.
#[test]
fn the_host_driver_reads_counters_in_a_guest() {
    let Some(place) = newest() else { return };
    let programs =
        artefacts::static_tests("perf-core", &["host_pmu"]).unwrap_or_else(|error| panic!("{error}"));
    let program = std::fs::read(&programs[0]).unwrap_or_else(|error| panic!("{error}"));
    let run = LinuxGuest::new("user-reads", "intel")
        .file("tests/host_pmu", 0o755, program)
        .script(
            "section test sh -c 'PERFVISOR_EXPECT_PMU=guest PERFVISOR_EXPECT_USER_READ=yes /tests/host_pmu --exact \
             host_hardware::user_space_reads_are_used_where_they_work_and_refused_cleanly_elsewhere'\n",
        )
        .limit(LIMIT)
        .run(place)
        .unwrap_or_else(|error| panic!("{error}"));
    assert!(run.section("test").contains("1 passed"), "{run}");
    run.expect_success();
}

/// Numbers that nobody counted are announced, and there is a way out.
#[test]
fn the_vmm_says_where_rdpmc_in_programs_does_not_count() {
    let place = shared();
    let faults = says(&place, RDPMC_FAULTS);
    let run = LinuxGuest::new("rdpmc-answered", "amd")
        .script("section selfread sh -c 'echo 0 >/sys/bus/event_source/devices/cpu/rdpmc; selfread 20'\n")
        .args(["-v"])
        .limit(LIMIT)
        .run(&place)
        .unwrap_or_else(|error| panic!("{error}"));
    let said = run
        .vmm_log
        .contains("programs of the guest that use RDPMC read counters that do not count");
    assert_eq!(said, !faults, "{run}");
    assert_eq!(field(&run, "selfread", "reads="), 0, "{run}");
    run.expect_success();
}
