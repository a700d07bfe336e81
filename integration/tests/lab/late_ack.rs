//! PMIs in front of Linux's late acknowledge: on models from Haswell on its handler of the PMI unmasks LVTPC
//! at its end, after it has served what overflowed meanwhile. A PMI that was kept behind the mask all the
//! same would be an NMI that nobody knows.

use std::time::Duration;

use integration::guest::{GuestRun, LinuxGuest};
use integration::limit::Limit;
use integration::place::Place;

/// Two events that overflow at rates of their own (by the clock both count alike, so their periods differ)
/// while `$WORK` is done, beside the watchdog's, which is the third.
const SCRIPT: &str = r#"
section cpu grep -E -m 3 "^(cpu family|model|stepping)" /proc/cpuinfo
section flags sh -c 'grep -o -w -m 1 x2apic /proc/cpuinfo || echo none'
section watchdog sh -c 'echo 1 >/proc/sys/kernel/nmi_watchdog; cat /proc/sys/kernel/nmi_watchdog'
section record sh -c 'perf record -q -o /tmp/perf.data -e cycles/period=40000000/,ref-cycles/period=27000000/ -- $WORK &&
	perf script -i /tmp/perf.data -F event | sort | uniq -c'
section nmis grep -E "NMI|PMI" /proc/interrupts
"#;

/// perf's own test of what it reads in CPUID, the TSC's frequency among it (`#system_tsc_freq`).
const FREQUENCY: &str = r#"
section expressions perf test "Simple expression parser"
"#;

/// Interrupts of the PIT, what gives the ticks, and what Linux says where it does not trust the APIC's timer.
const TIMER: &str = r#"
section timer sh -c 'grep -E "^ *0:" /proc/interrupts; cat /sys/devices/system/clockevents/clockevent0/current_device'
section distrust sh -c 'dmesg | grep "APIC timer disabled due to verification failure" || echo none'
"#;

/// Models that acknowledge late.
const SKYLAKE: u32 = 94;
const SKYLAKE_SERVER: u32 = 85;

/// 600,000,000 instructions: seconds where guests are emulated, and less than a tenth of one nowhere.
const SHORT: &str = "spin 300000000x";

/// Parts of the long form. Each ends with a line, which shows that the guest gets on.
const LONG_PARTS: usize = 20;

fn samples(run: &GuestRun, event: &str) -> u64 {
    run.section("record")
        .lines()
        .find_map(|line| {
            let (count, name) = line.trim().split_once(' ')?;
            (name.trim().split(['/', ':']).next() == Some(event)).then(|| count.parse().ok())?
        })
        .unwrap_or_else(|| panic!("no samples of {event}\n{run}"))
}

/// What [`LinuxGuest::run`] makes of the kernel's log decides: an NMI for "unknown reason" is an error.
fn two_events_and_the_watchdog(
    name: &str,
    model: u32,
    words: &str,
    script: &str,
    work: &str,
    limit: Limit,
) -> GuestRun {
    let place = Place::shared().unwrap_or_else(|error| panic!("{error}"));
    let run = LinuxGuest::new(name, "intel")
        .args(["--cpu-signature".into(), format!("6/{model}/3"), "--stats".into()])
        .cmdline(words)
        .script(script.replace("$WORK", work))
        .limit(limit)
        .run(&place)
        .unwrap_or_else(|error| panic!("{error}"));
    run.expect_success();
    assert!(run.section("cpu").contains(&format!(": {model}\n")), "{run}");
    assert_eq!(run.section("watchdog").trim(), "1", "{run}");
    let (cycles, ref_cycles) = (samples(&run, "cycles"), samples(&run, "ref-cycles"));
    eprintln!(
        "{name}: {cycles} samples of cycles, {ref_cycles} of ref-cycles, {:.1?}\n{}",
        run.elapsed,
        run.section("nmis")
    );
    assert!(cycles >= 5 && ref_cycles >= 5, "{run}");
    run
}

#[test]
fn a_late_acknowledge_meets_no_pmi_that_was_served() {
    two_events_and_the_watchdog(
        "late-ack",
        SKYLAKE,
        "nmi_watchdog=1",
        SCRIPT,
        SHORT,
        Limit::GENEROUS,
    );
}

/// In xAPIC mode the VMM cannot show the mask bit, and keeps to it by itself. The guest's timer is not the
/// TSC deadline's either: Linux measures the APIC's timer by the PIT, whose interrupt must come.
#[test]
fn neither_does_one_of_a_guest_without_x2apic() {
    let run = two_events_and_the_watchdog(
        "late-ack-xapic",
        SKYLAKE_SERVER,
        "nmi_watchdog=1 nox2apic lapic=notscdeadline",
        &format!("{SCRIPT}{FREQUENCY}{TIMER}"),
        SHORT,
        Limit::GENEROUS,
    );
    assert_eq!(run.section("flags").trim(), "none", "{run}");
    let timer = run.section("timer");
    let ticks = timer
        .split_whitespace()
        .nth(1)
        .and_then(|n| n.parse::<u64>().ok());
    assert!(
        ticks.is_some_and(|ticks| ticks > 0),
        "interrupts of the PIT: {timer}\n{run}"
    );
    // Linux lets the APIC's timer ring for 100 ms of the PIT's and leaves it to the PIT where they differ by
    // three ticks, as they do when the host is held up meanwhile. It says so, and the PIT's ticks suffice.
    let distrusts = run.section("distrust").trim() != "none";
    if distrusts {
        eprintln!("the host was held up while Linux measured the APIC's timer; the PIT gives the ticks");
    }
    assert!(
        timer.contains(if distrusts { "pit" } else { "lapic" }),
        "the clock events' device: {timer}\n{run}"
    );
    // On an Intel processor it fails where the frequency is 0, as without CPUID 15H and 16H.
    assert!(
        run.section("expressions")
            .lines()
            .any(|line| line.contains("Simple expression parser") && line.trim_end().ends_with("Ok")),
        "{run}"
    );
}

/// What happens seldom needs many PMIs. `make late-ack SECONDS=600`; the time is the guest's.
#[test]
#[ignore = "minutes; make late-ack"]
fn nor_one_in_many_minutes() {
    let seconds: u32 = match std::env::var("PERFVISOR_LATE_ACK_SECONDS") {
        Ok(seconds) => seconds
            .parse()
            .unwrap_or_else(|error| panic!("PERFVISOR_LATE_ACK_SECONDS={seconds}: {error}")),
        Err(_) => 600,
    };
    let part = f64::from(seconds) / LONG_PARTS as f64;
    // The guest's time may pass faster or slower than that outside, by how much nobody knows: what is silent
    // too long is hung.
    let limit = Limit {
        overall: Duration::from_secs(u64::from(seconds) * 20 + 600),
        ..Limit::GENEROUS
    };
    let spins = vec![format!("spin {part}"); LONG_PARTS].join("; ");
    let work = format!("sh -c \"{spins}\"");
    let run = two_events_and_the_watchdog("late-ack-long", SKYLAKE, "nmi_watchdog=1", SCRIPT, &work, limit);
    let parts = run
        .section("record")
        .lines()
        .filter(|line| line.contains("cpu_seconds="))
        .count();
    assert_eq!(parts, LONG_PARTS, "{run}");
}
