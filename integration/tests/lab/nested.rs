//! Tests the hardware backing, which counts with perf events of the host, on machines without a
//! host PMU.
//!
//! The tests run in a Linux guest of Perfvisor, whose virtual PMU serves as the host PMU. The guest
//! runs perf-core's driver tests, and then a second Perfvisor, whose nested guest is backed by
//! events of the first guest's kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use integration::artefacts;
use integration::guest::{GuestConsoleLog, GuestRun, LinuxGuest};
use integration::lease::TestHostLease;
use integration::limit::ProcessTimeLimits;
use integration::measure::skipped;
use integration::parse::{judge_detail, judge_kernel_log, parse_stat_csv, parse_tap, tsc_hz};
use integration::test_host::{TestHost, TestHostError};

use crate::shared_guests::{self, GuestPart};

/// Time limits of a guest on a loaded machine. An idle machine takes 30 to 60 s.
const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;

/// A set of perf-core's tests to run in a guest: a test program and the common prefix of the test
/// names.
pub struct GuestTests {
    name: &'static str,
    pub program: &'static str,
    pub prefix: &'static str,
}

impl GuestTests {
    /// Builds the test program as a static binary for guests and returns its contents.
    pub fn build(&self) -> Vec<u8> {
        let programs =
            artefacts::static_tests("perf-core", &[self.program]).unwrap_or_else(|error| panic!("{error}"));
        read(&programs[0])
    }
}

/// Tests of perf-core that require a kernel with a hardware PMU.
pub const HARDWARE: GuestTests = GuestTests {
    name: "host_hardware",
    program: "host_pmu",
    prefix: "host_hardware::",
};

/// Tests of perf-core's driver that run on any kernel.
const DRIVER: GuestTests = GuestTests {
    name: "host_driver",
    program: "host_pmu",
    prefix: "host_driver::",
};

const DRIVER_TESTS: [GuestTests; 2] = [HARDWARE, DRIVER];

/// Name of the test in [`HARDWARE`] that reads counters with RDPMC from user space, where possible.
pub const USER_READS: &str = "user_space_reads_are_used_only_if_correct";

/// Builds the test programs that [`DRIVER_TESTS`] need. Returns their contents by name.
fn driver_programs() -> &'static BTreeMap<&'static str, Vec<u8>> {
    static PROGRAMS: OnceLock<BTreeMap<&'static str, Vec<u8>>> = OnceLock::new();
    PROGRAMS.get_or_init(|| {
        let names: BTreeSet<&str> = DRIVER_TESTS.iter().map(|tests| tests.program).collect();
        let names: Vec<&str> = names.into_iter().collect();
        let files = artefacts::static_tests("perf-core", &names).unwrap_or_else(|error| panic!("{error}"));
        names
            .into_iter()
            .zip(files.iter().map(|file| read(file)))
            .collect()
    })
}

/// Shell function `each PROGRAM PREFIX`, which runs each test of PROGRAM whose name contains PREFIX
/// in a separate process.
const EACH: &str = r#"
export PERFVISOR_EXPECT_PMU=guest RUST_BACKTRACE=1
each() {
	status=0
	for test in $("$1" --list "$2" | sed -n 's/: test$//p'); do
		"$1" --exact "$test" --nocapture || status=1
	done
	return $status
}
"#;

/// Returns a guest script that disables RDPMC in user space and runs the test which checks that the
/// driver then does not use RDPMC.
fn user_reads_refused() -> String {
    let GuestTests { program, prefix, .. } = HARDWARE;
    format!(
        "sh -c 'echo 0 >/sys/bus/event_source/devices/cpu/rdpmc && PERFVISOR_EXPECT_USER_READ=no \
         /tests/{program} --exact {prefix}{USER_READS} --nocapture'"
    )
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Parses the output of a Rust test program into test names and results.
fn results(text: &str) -> Vec<(&str, &str)> {
    // Output of a test may appear between its name and its result.
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

/// Adds the test programs of perf-core's driver to a guest. Returns the guest and the script that
/// runs them.
fn driver_tests(place: &TestHost, mut guest: LinuxGuest) -> Result<(LinuxGuest, String), TestHostError> {
    // If the host's KVM handles the guest's RDPMC itself, the kernel offers RDPMC to programs, but
    // RDPMC returns wrong values.
    let works = if place.check("/kvm/Ok/rdpmc_faults")? {
        "yes"
    } else {
        "no"
    };
    let mut script = format!("export PERFVISOR_EXPECT_USER_READ={works}\n{EACH}");
    for (name, program) in driver_programs() {
        guest = guest.file(&format!("tests/{name}"), 0o755, program.clone());
    }
    for GuestTests {
        name,
        program,
        prefix,
    } in DRIVER_TESTS
    {
        // Run tests one at a time, because they count events of the shared CPU.
        script.push_str(&format!("section {name} each /tests/{program} '{prefix}'\n"));
    }
    script.push_str(&format!("section user-reads-refused {}\n", user_reads_refused()));
    Ok((guest, script))
}

/// The driver tests that run in `shared_guests::AMD`, a guest that several test modules share.
pub const AMD: GuestPart = GuestPart {
    tests: &["nested::driver_tests_pass_in_an_amd_guest"],
    prepare: || _ = driver_programs(),
    add: |place, guest| Ok(driver_tests(place, guest)?),
};

fn the_driver_tests_have_passed(pmu: &str, run: &GuestRun) {
    for GuestTests { name, .. } in DRIVER_TESTS {
        let text = run.section(name);
        let results = results(text);
        eprintln!("{pmu}, {name}: {} tests passed in the guest", results.len());
        assert!(results.len() >= 8, "{name} ran only {results:?}\n{run}");
        assert!(
            results.iter().all(|(_, result)| *result == "ok"),
            "{results:?}\n{run}"
        );
        // The driver prints this message if the kernel multiplexes.
        assert!(!text.contains("took the counter of a pinned event"), "{text}");
        assert!(!text.contains("skipped:") && !text.contains("SKIP:"), "{text}");
    }
    let refused = results(run.section("user-reads-refused"));
    assert!(matches!(refused[..], [(_, "ok")]), "{refused:?}\n{run}");
    run.expect_success();
    eprintln!("{pmu}: {:.1?}; console: {}", run.elapsed, run.log().display());
}

#[test]
fn driver_tests_pass_in_an_intel_guest() {
    driver_programs();
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    let guest = LinuxGuest::new("driver-tests-intel", "intel").limit(LIMIT);
    let (guest, script) = driver_tests(&place, guest).unwrap_or_else(|error| panic!("{error}"));
    let guest = guest.script(script).args(["--stats"]);
    let run = guest.run(&place).unwrap_or_else(|error| panic!("{error}"));
    the_driver_tests_have_passed("intel", &run);
}

#[test]
fn driver_tests_pass_in_an_amd_guest() {
    the_driver_tests_have_passed("amd", shared_guests::AMD.run());
}

/// Tests of the kernel `vpmu.elf` that run in a nested guest. Each counter of this guest is backed
/// by a perf event of the first-level guest's kernel (L1).
const SECOND_LEVEL_TESTS: [&str; 5] = [
    "counting:-cycles",
    "counting:-a-counter-without-EN",
    "counting:-a-counter-counts-on",
    "overflow:-the-counter-goes-on",
    "rdpmc:-an-index",
];

/// Tests that run in a nested guest with KVM's own vPMU, which is backed by perf events of the
/// first-level guest's kernel (L1).
const OWN_VPMU_TESTS: [&str; 3] = [
    "counting:-cycles",
    "overflow:-the-counter-goes-on",
    "rdpmc:-an-index",
];

/// Guest script that loads the KVM modules.
const MODULES: &str = "section modules sh -c 'while read -r m; do insmod /lib/modules/$m || exit 1; done </lib/modules/order; ls /dev/kvm'\n";

/// Guest script that runs the built-in guest five times as a nested guest, and kills it after it
/// has counted. In a nested guest, its overflow interrupts take longer than their periods
/// (docs/guide/guests.md).
const COUNTS: &str = r#"
for n in 1 2 3 4 5; do
	perfvisor run --pmu amd --backing hardware --memory 32M --cmdline 'selftest lines' </dev/null >/tmp/count$n &
	looks=0
	# With a line behind it, it is whole.
	until sed -n '$!p' /tmp/count$n | grep -q 'result cycles.cpl0' || [ $looks = 300 ]; do
		sleep 1
		looks=$((looks + 1))
	done
	kill -KILL $!
	sed -n '$!p' /tmp/count$n
done
"#;

/// Returns the part of the first-level guest's script that runs `perfvisor check` and the
/// bare-metal nested guests.
fn bare_metal_part() -> String {
    let mut script = format!(
        "section check perfvisor check\n\
         cat >/tmp/counts <<'END'\n{COUNTS}END\n\
         section counts perf stat -x, -o /tmp/outer -e cycles,task-clock sh /tmp/counts\n\
         section outer cat /tmp/outer\n",
    );
    for (n, only) in SECOND_LEVEL_TESTS.iter().enumerate() {
        script.push_str(&format!(
            "section tap{n} timeout 300 perfvisor run --kernel /tests/vpmu.elf --pmu amd --pmu-counters 6 --backing hardware --memory 32M \
             --cmdline 'model=amd backing=hardware only={only}'\n"
        ));
    }
    for (n, only) in OWN_VPMU_TESTS.iter().enumerate() {
        script.push_str(&format!(
            "section own{n} timeout 300 perfvisor run --kernel /tests/vpmu.elf --pmu amd --backing kvm --memory 32M \
             --cmdline 'model=amd backing=hardware only={only}'\n"
        ));
    }
    // Perfvisor's filter is translated to KVM's filter. A filter that cannot be translated is
    // rejected.
    script.push_str(
        "printf 'action = \"deny\"\\nevents = [{ select = 0x76 }]\\n' >/tmp/deny.toml\n\
         section own-filter timeout 300 perfvisor run --kernel /tests/vpmu.elf --pmu amd --backing kvm --memory 32M \
         --pmu-filter /tmp/deny.toml --cmdline 'model=amd backing=hardware deny=0x76 only=filter'\n\
         section own-intel sh -c 'perfvisor run --backing kvm --pmu intel; echo status $?'\n",
    );
    script
}

/// Returns the value of `key` in a result line that the built-in guest prints.
fn figure(run: &GuestRun, line: &str, key: &str) -> f64 {
    line.split_whitespace()
        .find_map(|word| word.strip_prefix(key)?.strip_prefix('=')?.parse().ok())
        .unwrap_or_else(|| panic!("no {key} in {line:?}\n{run}"))
}

/// Guest script that runs the guest of `perfvisor validate` as a nested guest, backed by the PMU of
/// the first-level guest (L1).
///
/// The first measurement is undisturbed. During the second one, perf occupies all counters of L1
/// with pinned per-CPU events, which the L1 kernel schedules before any task event.
const TAKEN: &str = r#"
# If the VM is gone, the script goes on and says why.
trap '' PIPE
mkfifo /tmp/in
perfvisor run --name taken --builtin validate --pmu amd --backing hardware --memory 128M </tmp/in >/tmp/out 2>/tmp/err &
vm=$!
exec 3>/tmp/in
jobs=0
# Lines with these words, so many of them. A look once a second takes little of the guest's time.
said() {
	until [ "$(grep -c "$1" /tmp/out)" -ge "$2" ]; do
		[ -d /proc/$vm ] || { cat /tmp/out /tmp/err; return 1; }
		sleep 1
	done
}
# Cycles, and umasks 12 and 11 of event FFFH: uncounted-ns and steal-ns.
begin() {
	jobs=$((jobs + 1))
	echo "measure work=busy n=$1 cpl=3 c=0x30076 c=0xf00030cff c=0xf00030bff f=0 period=0 cpus=1" >&3
	said ready $jobs && echo >&3
}
end() {
	said done $jobs && echo >&3 && said '"result".*}]}' $jobs && grep '"result"' /tmp/out | tail -n 1
}
measure() { begin $1 && end; }
number() { sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p" $2 | tail -n 1; }
said '"hello".*}' 1
section dmesg dmesg
hz=$(number tsc_hz /tmp/out)
measure 20000000 >/tmp/pace
second=$((20000000 * hz / $(number tsc /tmp/pace)))
section quiet measure $((second * 4))
e=cycles:D
taken() {
	begin $((second * $1)) || return 1
	sleep 2
	perf stat -a -x, -o /tmp/hogs -e $e,$e,$e,$e,$e,$e sh -c "sleep 4; perfvisor stat --guest-view --json taken >/tmp/view; sleep 5"
	# Given back; and that much later the guest is still to be counting.
	sleep 1
	early=$(grep -c done /tmp/out)
	end
	[ $early -lt $jobs ]
}
# The guest's pace is not the same all the time.
for seconds in 24 48 96; do
	section taken taken $seconds && break
done
section hogs cat /tmp/hogs
section view cat /tmp/view
echo end >&3
wait $vm
section ended echo $?
section told cat /tmp/err
"#;

/// A nested guest can detect that its host's kernel has temporarily taken all counters away. The
/// missing cycles correspond to the time that the event uncounted-ns reports.
#[test]
fn nested_guest_sees_uncounted_time() {
    /// Relative tolerance of the time reported by uncounted-ns.
    const OFF: f64 = 0.05;
    let Some(run) = second_levels() else { return };
    let parsed = |section: &str| -> serde_json::Value {
        let text = run.section(section);
        let line = text
            .lines()
            .find(|line| line.starts_with('{'))
            .unwrap_or_default();
        serde_json::from_str(line).unwrap_or_else(|error| panic!("{section}: {error}\n{run}"))
    };
    // The guest calibrates its TSC with a timer, which is late in this setup, so the TSC frequency
    // of the L1 kernel is used.
    let hz = tsc_hz(run.section("dmesg")).unwrap_or_else(|| panic!("{run}"));
    // Elapsed time, counted time, uncounted time as reported to the guest, and steal time, in
    // nanoseconds.
    let guest = |section: &str| {
        let result = parsed(section);
        let cpu = &result["cpus"][0];
        let number = |value: &serde_json::Value| value.as_f64().unwrap_or_else(|| panic!("{result}\n{run}"));
        let ns = |ticks: f64| ticks * 1e9 / hz;
        (
            ns(number(&cpu["tsc"])),
            ns(number(&cpu["c"][0])),
            number(&cpu["c"][1]),
            number(&cpu["c"][2]),
        )
    };
    let (quiet, counted, told, steal) = guest("quiet");
    assert_eq!(told, 0.0, "nothing was taken\n{run}");
    // Time in which the L1 VMM works for the guest is not counted either.
    let quiet_lack = (quiet - counted - steal) / quiet;

    let (passed, counted, told, steal) = guest("taken");
    let hogs = parse_stat_csv(run.section("hogs"));
    // The kernel's watchdog may hold one of the counters, so the last event may not get a counter.
    let times = hogs.counts.iter().filter(|hog| hog.value.is_some());
    let times: Vec<f64> = times
        .filter_map(|hog| hog.running_ns)
        .map(|ns| ns as f64)
        .collect();
    assert!(times.len() >= 4, "{hogs:?}\n{run}");
    let (least, most) = (
        times.iter().copied().fold(f64::MAX, f64::min),
        times.iter().copied().fold(0.0, f64::max),
    );
    let lacking = passed - counted - quiet_lack * (passed - told);
    eprintln!(
        "taken for {:.3} to {:.3} s; the guest was told {:.3} s, and its cycles lack {:.3} s of {:.3} s ({:.2} % without that), {:.3} s of them stolen at most",
        least / 1e9,
        most / 1e9,
        told / 1e9,
        lacking / 1e9,
        passed / 1e9,
        quiet_lack * 100.0,
        steal / 1e9
    );
    assert!(told >= least * (1.0 - OFF) && told <= most * (1.0 + OFF), "{run}");
    // Cycles may also be missing for steal time, in which another program ran. Part of the steal
    // time is included in the reported time.
    assert!(
        lacking >= told * (1.0 - OFF) && lacking <= told * (1.0 + OFF) + steal,
        "a silent gap\n{run}"
    );

    // The operator's view was taken while the guest's time was uncounted.
    let view = parsed("view");
    let cycles = view["counters"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|c| c["counter"] == "gp0");
    let cycles = cycles.unwrap_or_else(|| panic!("{view}\n{run}"));
    assert!(cycles["enabled"] == true && cycles["counting"] == false, "{view}");
    let seen = view["uncounted_ns"].as_f64().unwrap_or_else(|| panic!("{view}"));
    assert!(seen > 0.0 && seen < told, "{view}");
    let log = run.section("told");
    assert!(log.contains("not counted"), "{log}\n{run}");
    assert_eq!(run.section("ended").trim(), "0", "{run}");
    run.expect_success();
}

/// Script of a nested Linux guest that runs `perf stat -d`.
const DETAIL: &str = "section detail perf stat -x, -d sleep 1\n";
const DETAIL_MODELS: [&str; 2] = ["amd", "amd-k7"];

fn linux(model: &str) -> String {
    format!(
        "perfvisor run --backing hardware --pmu {model} --kernel /inner/vmlinux --initrd /inner/initrd --memory 400M --cmdline \
         'console=ttyS0 tsc=reliable no_timer_check quiet nokaslr nowatchdog pv.script=detail' </dev/null >/tmp/linux-out 2>/tmp/linux-err\n\
         section inner-{model} sed 's/@@pv/@@inner/' /tmp/linux-out\n\
         section inner-{model}-err cat /tmp/linux-err\n"
    )
}

/// Script of a nested Linux guest that uses its disk while perf counts with KVM's own vPMU.
const DISK: &str = "drivers\n\
     section detail perf stat -x, -d sleep 1\n\
     section stat perf stat -x, -e cycles sh -c 'head -c 1048576 /dev/vda >/tmp/first; dd if=/tmp/first of=/dev/vda bs=64k seek=16 conv=fsync 2>/dev/null'\n\
     section ro sh -c 'echo x | dd of=/dev/vdb conv=fsync 2>/dev/null'\n";
const LINUX_WITH_DISK: &str = "seq 1 400000 | head -c 1048576 >/tmp/first; cp /tmp/first /tmp/inner.img; truncate -s 2M /tmp/inner.img\n\
     perfvisor run --backing kvm --pmu amd --kernel /inner/vmlinux --initrd /inner/initrd --memory 400M \
     --disk /tmp/inner.img --disk /tmp/first,ro --cmdline \
     'console=ttyS0 tsc=reliable no_timer_check quiet nokaslr nowatchdog pv.script=disk' </dev/null >/tmp/disk-out 2>/tmp/disk-err\n\
     section disk sed 's/@@pv/@@inner/' /tmp/disk-out\n\
     section disk-err cat /tmp/disk-err\n\
     section disk-kept sh -c 'cat /tmp/first /tmp/first | cmp - /tmp/inner.img'\n";

/// A guest with KVM's own vPMU can use disks while its cycles are counted. Afterwards, the image
/// contains the data that the guest read and wrote back.
#[test]
fn guest_with_kvm_vpmu_uses_disks() {
    let Some(run) = second_levels() else { return };
    let inner = GuestConsoleLog::parse(&run.section("disk").replace("@@inner", "@@pv"));
    let section = |name: &str| inner.sections.get(name).unwrap_or_else(|| panic!("{run}"));
    let stat = parse_stat_csv(&section("stat").text);
    let cycles = stat
        .value("cycles")
        .unwrap_or_else(|error| panic!("{error}\n{run}"));
    assert!(cycles > 1e6, "{cycles}\n{run}");
    assert_ne!(section("ro").status, Some(0), "{run}");
    judge_kernel_log(&section("kernel-log").text).unwrap_or_else(|why| panic!("{why}\n{run}"));
    assert_eq!(inner.done, Some(1), "the last section fails\n{run}");
    run.section("disk-kept");
    eprintln!("{cycles} cycles beside a disk of 2 MiB");
    detail_is_counted("KVM's own vPMU", &inner, run);
}

/// `perf stat` without options in a nested Linux guest reports events that the host's PMU lacks as
/// not supported, instead of printing a number.
#[test]
fn perf_stat_in_nested_linux_shows_no_uncounted_numbers() {
    let Some(run) = second_levels() else { return };
    for model in DETAIL_MODELS {
        let section = run.section(&format!("inner-{model}"));
        let inner = GuestConsoleLog::parse(&section.replace("@@inner", "@@pv"));
        let log = inner.sections.get("kernel-log");
        let log = log.unwrap_or_else(|| panic!("{model}\n{run}"));
        judge_kernel_log(&log.text).unwrap_or_else(|why| panic!("{model}: {why}\n{run}"));
        assert_eq!(inner.done, Some(0), "{model}\n{run}");
        detail_is_counted(model, &inner, run);
    }
    run.expect_success();
}

/// Checks the output of `perf stat -d` that a nested guest has printed.
#[track_caller]
fn detail_is_counted(what: &str, inner: &GuestConsoleLog, run: &GuestRun) {
    let detail = inner
        .sections
        .get("detail")
        .unwrap_or_else(|| panic!("{what}\n{run}"));
    let events = judge_detail(&detail.text, &["cycles"]).unwrap_or_else(|why| panic!("{what}: {why}\n{run}"));
    eprintln!(
        "{what}: {events} hardware events of a Linux guest's guest, none a 0 of nobody's:\n{}",
        detail.text.trim()
    );
}

/// Leases a lab, whose KVM supports nesting. Returns `None` and prints a message if Linux guests
/// run on this machine instead of in a lab.
fn lab() -> Option<TestHostLease> {
    if runs_elsewhere() {
        return None;
    }
    Some(TestHost::shared().unwrap_or_else(|error| panic!("{error}")))
}

fn runs_elsewhere() -> bool {
    let is_direct = TestHost::is_direct().unwrap_or_else(|error| panic!("{error}"));
    if is_direct {
        skipped(
            "made for the lab's nested AMD-V, and guests run on this machine",
            false,
        );
    }
    is_direct
}

/// Returns a Linux guest that can run nested guests with the same Perfvisor binary. The guest loads
/// KVM's modules, which come from the lab's initrd.
fn second_level(name: &str) -> LinuxGuest {
    let images = artefacts::images().unwrap_or_else(|error| panic!("{error}"));
    let binaries = artefacts::binaries().unwrap_or_else(|error| panic!("{error}"));
    LinuxGuest::new(name, "amd")
        .unpacked_over(read(&images.lab_initrd))
        .file("bin/perfvisor", 0o755, read(&binaries.perfvisor))
        .memory_mib(768)
        .args(["--nested", "--stats"])
        .limit(LIMIT)
}

/// Returns the run of the first-level guest that all nested tests share. The guest runs the nested
/// guests one after the other. Returns `None` if the tests cannot run on this machine.
fn second_levels() -> Option<&'static GuestRun> {
    static RUN: OnceLock<Result<GuestRun, String>> = OnceLock::new();
    if runs_elsewhere() {
        return None;
    }
    let run = RUN.get_or_init(|| {
        let place = TestHost::shared().map_err(|error| error.to_string())?;
        run_second_levels(&place).map_err(|error| error.to_string())
    });
    Some(run.as_ref().unwrap_or_else(|error| panic!("{error}")))
}

fn run_second_levels(place: &TestHost) -> Result<GuestRun, TestHostError> {
    let bare_metal = artefacts::bare_metal_dir()?;
    let images = artefacts::images()?;
    let mut script = guest_images::cpio::CpioArchive::new(Vec::new());
    script.file("scripts/detail", 0o644, DETAIL.as_bytes()).unwrap();
    script.file("scripts/disk", 0o644, DISK.as_bytes()).unwrap();
    let mut initrd = read(&images.initrd);
    initrd.extend(script.finish().unwrap());
    let run = second_level("second-level")
        .file("tests/vpmu.elf", 0o644, read(&bare_metal.join("vpmu.elf")))
        .file("inner/vmlinux", 0o644, read(&images.vmlinux))
        .file("inner/initrd", 0o644, initrd)
        .memory_mib(1200)
        .script(
            [
                MODULES,
                &bare_metal_part(),
                TAKEN,
                &DETAIL_MODELS.map(linux).concat(),
                LINUX_WITH_DISK,
            ]
            .concat(),
        )
        .run(place)?;
    eprintln!(
        "second level: {:.1?}; console: {}",
        run.elapsed,
        run.log().display()
    );
    Ok(run)
}

#[test]
fn nested_guest_counts_with_first_level_pmu() {
    let Some(run) = second_levels() else { return };
    let check = run.section("check");
    assert!(check.contains("AMD-V"), "{check}");
    assert!(
        check.contains("KVM's own vPMU: emulated, amd with 6 counters of 48 bits"),
        "{check}"
    );

    // The nested guest's cycles are events of the L1 kernel, which the outer vPMU counts.
    let counts = run.section("counts");
    // The nested guest's TSC continues while the L1 guest is preempted, but the nested guest
    // executes no cycles during this time. This is a time measurement, so the best of five results
    // is used.
    let (saw, expected, inner) = counts
        .lines()
        .filter(|line| line.starts_with("result cycles.cpl0"))
        .map(|line| (figure(run, line, "saw"), figure(run, line, "expected"), line))
        .max_by(|one, other| (one.0 / one.1).total_cmp(&(other.0 / other.1)))
        .unwrap_or_else(|| panic!("{counts}\n{run}"));
    let outer = parse_stat_csv(run.section("outer"));
    let outer = outer
        .value("cycles")
        .unwrap_or_else(|error| panic!("{error}\n{run}"));
    eprintln!(
        "second level: {saw} cycles in {expected} of its TSC ({:.3}); the first level's perf counted {outer} for all of it",
        saw / expected
    );
    // The nested guest's count includes L1 work for this guest, but no cycles are missing.
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
    eprintln!("second level: {passed} tests of the vPMU passed");
    run.expect_success();
}

#[test]
fn results_are_read_from_libtests_output() {
    let text = "running 3 tests\ntest a ... FAILED\nrunning 3 tests\ntest a ... ok\ntest b ... some\nwords\nok\ntest c ... x\nFAILED\n\ntest result: ok. 3 passed\n";
    assert_eq!(results(text), [("a", "ok"), ("b", "ok"), ("c", "FAILED")]);
}

/// `perfvisor validate` completes with KVM's own vPMU in a nested guest.
#[test]
#[ignore = "minutes, and a quiet machine"]
fn validate_runs_with_kvms_own_vpmu() {
    let Some(place) = lab() else { return };
    let script = "while read -r m; do insmod /lib/modules/$m || exit 1; done </lib/modules/order\n\
                  section validate sh -c 'perfvisor validate --backing kvm --no-linux --pmu amd 2>&1; echo status $?'\n";
    let run = second_level("second-level-validate")
        .cmdline("nowatchdog")
        .script(script)
        .run(&place)
        .unwrap_or_else(|error| panic!("{error}"));
    let text = run.section("validate");
    eprintln!("{text}{:.1?}; console: {}", run.elapsed, run.log().display());
    assert!(text.contains(" passed, ") && text.contains("status "), "{run}");
    // Work of the lower virtualization levels affects other rows (docs/reference/accuracy.md), but
    // not the counts of a busy guest.
    let passed = |workload: &str| {
        text.lines().any(|line| {
            let row: Vec<_> = line.split_whitespace().collect();
            row.starts_with(&["cycles", "kvm"]) && row.contains(&"PASS") && row.join(" ").contains(workload)
        })
    };
    for workload in [
        "busy, CPL0",
        "busy, CPL3",
        "chase, CPL3",
        "PMIs without an overflow",
    ] {
        assert!(passed(workload), "{workload}: {text}");
    }
}
