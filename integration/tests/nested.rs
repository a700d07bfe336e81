//! The hardware backing, proven although no machine here has a PMU: to whatever runs inside our Linux guest, the virtual PMU
//! is one. perf-core's driver tests run there, and then a second Perfvisor, whose guest's counters are events of the
//! first guest's kernel.

use std::fs;
use std::path::Path;

use integration::artefacts;
use integration::guest::{GuestRun, LinuxGuest};
use integration::limit::Limit;
use integration::measure::skipped;
use integration::parse::{parse_stat_csv, parse_tap};
use integration::place::Place;

/// For a machine that does other things too: half a minute to a minute where it does not.
const LIMIT: Limit = Limit::GENEROUS;

/// perf-core's tests that need a kernel with a hardware PMU, and those of its driver for any kernel.
const DRIVER_TESTS: [&str; 2] = ["host_hardware", "host_driver"];

/// Runs each test of a program by itself, once.
const EACH: &str = r#"
export PERFVISOR_EXPECT_PMU=guest RUST_BACKTRACE=1
each() {
	status=0
	for test in $("$1" --list | sed -n 's/: test$//p'); do
		"$1" --exact "$test" --nocapture || status=1
	done
	return $status
}
"#;

/// The guest's kernel does not let programs execute RDPMC: nobody tries.
const USER_READS_REFUSED: &str = "sh -c 'echo 0 >/sys/bus/event_source/devices/cpu/rdpmc && PERFVISOR_EXPECT_USER_READ=no \
    /tests/host_hardware --exact user_space_reads_are_used_where_they_work_and_refused_cleanly_elsewhere --nocapture'";

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The tests' names with what became of them, from libtest's output.
fn results(text: &str) -> Vec<(&str, &str)> {
    // What a test prints may stand between its name and its result.
    let mut found = Vec::new();
    let mut name = None;
    for line in text.lines() {
        if let Some((_, rest)) = line.split_once("test ")
            && let Some((test, _)) = rest.split_once(" ... ")
        {
            name = Some(test);
        }
        for result in ["ok", "FAILED"] {
            if line.ends_with(result)
                && let Some(test) = name.take()
            {
                found.retain(|(other, _)| *other != test);
                found.push((test, result));
            }
        }
    }
    found
}

fn the_driver_tests_pass_in_the_guest(pmu: &str) {
    let programs =
        artefacts::static_tests("perf-core", &DRIVER_TESTS).unwrap_or_else(|error| panic!("{error}"));
    let place = Place::shared().unwrap_or_else(|error| panic!("{error}"));
    let faults = place
        .check("/kvm/Ok/rdpmc_faults")
        .unwrap_or_else(|error| panic!("{error}"));
    // Where this host's KVM answers the guest's RDPMC itself, it is offered and reads something else.
    let works = if faults { "yes" } else { "no" };
    let mut script = format!("export PERFVISOR_EXPECT_USER_READ={works}\n{EACH}");
    let mut guest = LinuxGuest::new(format!("driver-tests-{pmu}"), pmu).limit(LIMIT);
    for (name, program) in DRIVER_TESTS.iter().zip(&programs) {
        guest = guest.file(&format!("tests/{name}"), 0o755, read(program));
        // One at a time: they count the CPU they share.
        script.push_str(&format!("section {name} each /tests/{name}\n"));
    }
    script.push_str(&format!("section user-reads-refused {USER_READS_REFUSED}\n"));
    let run = guest
        .script(script)
        .args(["--stats"])
        .run(&place)
        .unwrap_or_else(|error| panic!("{error}"));
    for name in DRIVER_TESTS {
        let text = run.section(name);
        let results = results(text);
        eprintln!("{pmu}, {name}: {} tests passed in the guest", results.len());
        assert!(results.len() >= 8, "{name} ran only {results:?}\n{run}");
        assert!(
            results.iter().all(|(_, result)| *result == "ok"),
            "{results:?}\n{run}"
        );
        // A driver that finds the kernel multiplexing says so.
        assert!(
            !text.contains("took the counter of a pinned event away"),
            "{text}"
        );
        assert!(!text.contains("skipped:") && !text.contains("SKIP:"), "{text}");
    }
    let refused = results(run.section("user-reads-refused"));
    assert!(matches!(refused[..], [(_, "ok")]), "{refused:?}\n{run}");
    run.expect_success();
    eprintln!("{pmu}: {:.1?}; console: {}", run.elapsed, run.log().display());
}

#[test]
fn the_driver_tests_pass_in_an_intel_guest() {
    the_driver_tests_pass_in_the_guest("intel");
}

#[test]
fn the_driver_tests_pass_in_an_amd_guest() {
    the_driver_tests_pass_in_the_guest("amd");
}

/// Parts of the vPMU's test kernel that a second-level guest runs with each counter an event of the first level's kernel.
const SECOND_LEVEL_TESTS: [&str; 5] = [
    "counting:-cycles",
    "counting:-a-counter-without-EN",
    "counting:-a-counter-counts-on",
    "overflow:-the-counter-goes-on",
    "rdpmc:-an-index",
];

/// Those that a second-level guest runs with KVM's own vPMU, each counter an event of the first level's kernel too.
const OWN_VPMU_TESTS: [&str; 3] = [
    "counting:-cycles",
    "overflow:-the-counter-goes-on",
    "rdpmc:-an-index",
];

/// Loads KVM, looks at the machine as Perfvisor sees it, and runs guests. The built-in guest is ended after what it
/// counts: its overflow interrupts take longer than the periods between them here (docs/guests.md).
fn second_level_script() -> String {
    let mut script = String::from(
        "section modules sh -c 'while read -r m; do insmod /lib/modules/$m || exit 1; done </lib/modules/order; ls /dev/kvm'\n\
         section check perfvisor check\n\
         section counts perf stat -x, -o /tmp/outer -e cycles,task-clock sh -c \"timeout 40 perfvisor run --pmu amd \
         --backing hardware --memory 32M --cmdline 'selftest lines'; true\"\n\
         section outer cat /tmp/outer\n",
    );
    for (n, only) in SECOND_LEVEL_TESTS.iter().enumerate() {
        script.push_str(&format!(
            "section tap{n} timeout 40 perfvisor run --kernel /tests/vpmu.elf --pmu amd --pmu-counters 6 --backing hardware --memory 32M \
             --cmdline 'model=amd backing=hardware only={only}'\n"
        ));
    }
    for (n, only) in OWN_VPMU_TESTS.iter().enumerate() {
        script.push_str(&format!(
            "section own{n} timeout 60 perfvisor run --kernel /tests/vpmu.elf --pmu amd --backing kvm --memory 32M \
             --cmdline 'model=amd backing=hardware only={only}'\n"
        ));
    }
    // KVM's filter is ours translated; and what it cannot be is refused.
    script.push_str(
        "printf 'action = \"deny\"\\nevents = [{ select = 0x76 }]\\n' >/tmp/deny.toml\n\
         section own-filter timeout 60 perfvisor run --kernel /tests/vpmu.elf --pmu amd --backing kvm --memory 32M \
         --pmu-filter /tmp/deny.toml --cmdline 'model=amd backing=hardware deny=0x76 only=filter'\n\
         section own-intel sh -c 'perfvisor run --backing kvm --pmu intel; echo status $?'\n",
    );
    script
}

/// A figure of the built-in guest's result lines.
fn figure(run: &GuestRun, line: &str, key: &str) -> f64 {
    line.split_whitespace()
        .find_map(|word| word.strip_prefix(key)?.strip_prefix('=')?.parse().ok())
        .unwrap_or_else(|| panic!("no {key} in {line:?}\n{run}"))
}

#[test]
fn a_second_level_guest_counts_with_the_first_levels_pmu() {
    let place = Place::shared().unwrap_or_else(|error| panic!("{error}"));
    if !matches!(*place, Place::Lab(_)) {
        let why = format!(
            "made for the lab's nested AMD-V, and this is {}",
            place.describe()
        );
        return skipped(&why, false);
    }
    let images = artefacts::images().unwrap_or_else(|error| panic!("{error}"));
    let binaries = artefacts::binaries().unwrap_or_else(|error| panic!("{error}"));
    let bare_metal = artefacts::bare_metal_dir().unwrap_or_else(|error| panic!("{error}"));
    let run = LinuxGuest::new("second-level", "amd")
        // The lab's initrd has KVM's modules for the same kernel.
        .laid_over(read(&images.lab_initrd))
        .file("bin/perfvisor", 0o755, read(&binaries.perfvisor))
        .file("tests/vpmu.elf", 0o644, read(&bare_metal.join("vpmu.elf")))
        .memory_mib(768)
        .script(second_level_script())
        .args(["--nested", "--stats"])
        .limit(LIMIT)
        .run(&place)
        .unwrap_or_else(|error| panic!("{error}"));
    let check = run.section("check");
    assert!(check.contains("AMD-V"), "{check}");
    assert!(
        check.contains("KVM's own vPMU: emulated, amd with 6 counters of 48 bits"),
        "{check}"
    );

    // The second level's cycles are events of the first level's kernel, which the outer vPMU counts.
    let counts = run.section("counts");
    let inner = counts
        .lines()
        .find(|line| line.starts_with("result cycles.cpl0"))
        .unwrap_or_else(|| panic!("{counts}\n{run}"));
    let (saw, expected) = (figure(&run, inner, "saw"), figure(&run, inner, "expected"));
    let outer = parse_stat_csv(run.section("outer"));
    let outer = outer
        .value("cycles")
        .unwrap_or_else(|error| panic!("{error}\n{run}"));
    eprintln!(
        "second level: {saw} cycles in {expected} of its TSC ({:.3}); the first level's perf counted {outer} for all of it",
        saw / expected
    );
    // What the first level does for the second is counted with it, but nothing is missing.
    assert!(
        saw > 0.9 * expected && saw < outer,
        "{inner}, outer {outer}\n{run}"
    );

    let passed: usize = (0..SECOND_LEVEL_TESTS.len())
        .map(|n| {
            let tap = parse_tap(run.section(&format!("tap{n}")));
            assert!(
                tap.all_passed() && !tap.passed.is_empty(),
                "{}: {tap:?}\n{run}",
                SECOND_LEVEL_TESTS[n]
            );
            tap.passed.len()
        })
        .sum();
    let own = (0..OWN_VPMU_TESTS.len()).map(|n| format!("own{n}"));
    for name in own.chain(["own-filter".to_owned()]) {
        let tap = parse_tap(run.section(&name));
        assert!(
            tap.all_passed() && !tap.passed.is_empty(),
            "{name}: {tap:?}\n{run}"
        );
    }
    let refused = run.section("own-intel");
    assert!(
        refused.contains("KVM's own vPMU is AMD's on this host") && refused.contains("status 2"),
        "{refused}"
    );
    eprintln!(
        "second level: {passed} tests of the vPMU passed; {:.1?}; console: {}",
        run.elapsed,
        run.log().display()
    );
    run.expect_success();
}

#[test]
fn results_are_read_from_libtests_output() {
    let text = "running 3 tests\ntest a ... FAILED\nrunning 3 tests\ntest a ... ok\ntest b ... some\nwords\nok\ntest c ... x\nFAILED\n\ntest result: ok. 3 passed\n";
    assert_eq!(results(text), [("a", "ok"), ("b", "ok"), ("c", "FAILED")]);
}
