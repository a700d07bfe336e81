//! Tests PMIs with Linux's late acknowledgment.
//!
//! On Intel models since Haswell, Linux's PMI handler unmasks LVTPC at its end, after it has
//! handled all overflows. If the virtual APIC kept a PMI pending while LVTPC is masked, it would
//! deliver the PMI after its overflow has been handled, and Linux would report an unknown NMI.

use std::time::Duration;

use integration::guest::{GuestRun, LinuxGuest};
use integration::limit::ProcessTimeLimits;
use integration::test_host::{KvmGuestSupport, TestHost, probe_kvm};

/// Guest script in which two events overflow at different rates while `$WORK` runs, in addition to
/// the event of the NMI watchdog. The events have different periods, because both count the same on
/// the clock backing, which derives counts from the vCPU's clock.
const SCRIPT: &str = r#"
section cpu grep -E -m 3 "^(cpu family|model|stepping)" /proc/cpuinfo
section flags sh -c 'grep -o -w -m 1 x2apic /proc/cpuinfo || echo none'
section watchdog sh -c 'echo 1 >/proc/sys/kernel/nmi_watchdog; cat /proc/sys/kernel/nmi_watchdog'
section record sh -c 'perf record -q -o /tmp/perf.data -e cycles/period=40000000/,ref-cycles/period=27000000/ -- $WORK &&
	perf script -i /tmp/perf.data -F event | sort | uniq -c'
section nmis grep -E "NMI|PMI" /proc/interrupts
"#;

/// Guest script that runs a test of perf's own test suite. The test evaluates values derived from
/// CPUID, including the TSC frequency (`#system_tsc_freq`).
const FREQUENCY: &str = r#"
section expressions perf test "Simple expression parser"
"#;

/// Guest script that prints the number of PIT interrupts, the name of the clock event device, and
/// Linux's message that it does not trust the APIC timer, if any.
const TIMER: &str = r#"
section timer sh -c 'grep -E "^ *0:" /proc/interrupts; cat /sys/devices/system/clockevents/clockevent0/current_device'
section distrust sh -c 'dmesg | grep "APIC timer disabled due to verification failure" || echo none'
"#;

/// Guest script that lists the top-down events. Linux lists them on the tested models, because no
/// CPUID bit hides them.
const TOPDOWN: &str =
    "section topdown sh -c 'ls /sys/bus/event_source/devices/cpu/events | grep topdown || echo none'\n";

/// CPUID model number of a Skylake CPU, on which Linux acknowledges PMIs late.
const SKYLAKE: u32 = 94;
const SKYLAKE_SERVER: u32 = 85;

/// Workload of 600,000,000 instructions. Takes several seconds in an emulated guest, and at least
/// 0.1 s on any host.
const SHORT: &str = "spin 300000000x";

/// Number of parts of the long test. Each part prints a line to show progress.
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

/// Runs `script` in a guest in which two events and the NMI watchdog overflow. [`LinuxGuest::run`]
/// fails if the kernel reports an NMI for an unknown reason.
fn two_events_and_the_watchdog(
    name: &str,
    model: u32,
    words: &str,
    script: &str,
    work: &str,
    limit: ProcessTimeLimits,
) -> GuestRun {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
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
fn late_ack_causes_no_unknown_nmi() {
    let run = two_events_and_the_watchdog(
        "late-ack",
        SKYLAKE,
        "nmi_watchdog=1",
        &format!("{SCRIPT}{TOPDOWN}"),
        SHORT,
        ProcessTimeLimits::GENEROUS,
    );
    // Only an Intel host PMU supports these events.
    let counted = probe_kvm() == KvmGuestSupport::Hardware && !run.section("topdown").contains("none");
    assert!(counted || run.section("topdown").trim() == "none", "{run}");
}

/// Late acknowledgment in xAPIC mode causes no unknown NMI. In this mode, the VMM cannot read
/// LVTPC's mask bit and tracks it internally. Because the guest has no TSC-deadline timer, Linux
/// calibrates the APIC timer with the PIT, whose interrupt must be delivered.
#[test]
fn late_ack_in_xapic_mode_causes_no_unknown_nmi() {
    let run = two_events_and_the_watchdog(
        "late-ack-xapic",
        SKYLAKE_SERVER,
        "nmi_watchdog=1 nox2apic lapic=notscdeadline",
        &format!("{SCRIPT}{FREQUENCY}{TIMER}"),
        SHORT,
        ProcessTimeLimits::GENEROUS,
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
    // Linux compares 100 ms of the APIC timer with the PIT. If they differ by three ticks, for
    // example because the host is delayed, Linux falls back to the PIT and reports this. The PIT's
    // ticks are sufficient.
    let distrusts = run.section("distrust").trim() != "none";
    if distrusts {
        eprintln!("the host was held up while Linux measured the APIC's timer; the PIT gives the ticks");
    }
    assert!(
        timer.contains(if distrusts { "pit" } else { "lapic" }),
        "the clock events' device: {timer}\n{run}"
    );
    // On an Intel processor, perf's test fails if the frequency is 0, which would be the case
    // without CPUID 15H and 16H.
    assert!(
        run.section("expressions")
            .lines()
            .any(|line| line.contains("Simple expression parser") && line.trim_end().ends_with("Ok")),
        "{run}"
    );
}

/// Late acknowledgment causes no unknown NMI in a long run with many PMIs. Run with `make late-ack
/// SECONDS=600`, in seconds of guest time.
#[test]
#[ignore = "minutes; make late-ack"]
fn late_ack_soak_causes_no_unknown_nmi() {
    let seconds: u32 = match std::env::var("PERFVISOR_LATE_ACK_SECONDS") {
        Ok(seconds) => seconds
            .parse()
            .unwrap_or_else(|error| panic!("PERFVISOR_LATE_ACK_SECONDS={seconds}: {error}")),
        Err(_) => 600,
    };
    let part = f64::from(seconds) / LONG_PARTS as f64;
    // The ratio of guest time to host time is unknown, so only silence indicates a hang.
    let limit = ProcessTimeLimits {
        overall: Duration::from_secs(u64::from(seconds) * 20 + 600),
        ..ProcessTimeLimits::GENEROUS
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
