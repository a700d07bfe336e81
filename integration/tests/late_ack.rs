//! PMIs in front of Linux's late acknowledge: on models from Haswell on its handler of the PMI unmasks LVTPC at its end, after it
//! has served what overflowed meanwhile. A PMI that was kept behind the mask all the same would be an NMI that nobody knows.

use integration::guest::{GuestRun, LinuxGuest};
use integration::limit::Limit;
use integration::place::Place;

/// Two events that overflow at rates of their own, beside the watchdog's, which is the third.
const SCRIPT: &str = r#"
section cpu grep -E -m 3 "^(cpu family|model|stepping)" /proc/cpuinfo
section flags sh -c 'grep -o -w -m 1 x2apic /proc/cpuinfo || echo none'
section watchdog sh -c 'echo 1 >/proc/sys/kernel/nmi_watchdog; cat /proc/sys/kernel/nmi_watchdog'
section record sh -c 'perf record -q -o /tmp/perf.data -c 40000000 -e cycles,ref-cycles -- spin 300000000x &&
	perf script -i /tmp/perf.data -F event | sort | uniq -c'
section nmis grep -E "NMI|PMI" /proc/interrupts
"#;

fn samples(run: &GuestRun, event: &str) -> u64 {
    run.section("record")
        .lines()
        .find_map(|line| {
            let (count, name) = line.trim().split_once(' ')?;
            (name.trim().trim_end_matches(':') == event).then(|| count.parse().ok())?
        })
        .unwrap_or_else(|| panic!("no samples of {event}\n{run}"))
}

/// What [`LinuxGuest::run`] makes of the kernel's log decides: an NMI for "unknown reason" is an error.
fn two_events_and_the_watchdog(name: &str, words: &str) -> GuestRun {
    let place = Place::shared().unwrap_or_else(|error| panic!("{error}"));
    let run = LinuxGuest::new(name, "intel")
        .args(["--cpu-signature", "6/94/3", "--stats"])
        .cmdline(words)
        .script(SCRIPT)
        .limit(Limit::GENEROUS)
        .run(&place)
        .unwrap_or_else(|error| panic!("{error}"));
    run.expect_success();
    assert!(run.section("cpu").contains(": 94"), "{run}");
    assert_eq!(run.section("watchdog").trim(), "1", "{run}");
    let (cycles, ref_cycles) = (samples(&run, "cycles"), samples(&run, "ref-cycles"));
    eprintln!(
        "{name}: {cycles} samples of cycles, {ref_cycles} of ref-cycles, {:.1?}",
        run.elapsed
    );
    // The work is 600,000,000 instructions: seconds where guests are emulated, and less than a tenth of one nowhere.
    assert!(cycles >= 5 && ref_cycles >= 5, "{run}");
    run
}

#[test]
fn a_late_acknowledge_meets_no_pmi_that_was_served() {
    two_events_and_the_watchdog("late-ack", "nmi_watchdog=1");
}

/// In xAPIC mode the VMM cannot show the mask bit, and keeps to it by itself.
#[test]
fn neither_does_one_of_a_guest_without_x2apic() {
    let run = two_events_and_the_watchdog("late-ack-xapic", "nmi_watchdog=1 nox2apic");
    assert_eq!(run.section("flags").trim(), "none", "{run}");
}
