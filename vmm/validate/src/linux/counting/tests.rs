//! Tests of rows from perf's counts in a Linux guest. Each row passes if all sources are correct
//! and fails if one is not.

use super::*;
use crate::host::HostProperties;
use crate::host::tests::{clock_host, hardware_host};
use crate::linux::tests::{ScriptedValues, perf_line};
use crate::measure::MEASUREMENTS;

fn row(of_time: bool, verdict: Verdict) -> ValidationRow {
    ValidationRow {
        of_time,
        verdict,
        ..ValidationRow::new(ValidationCheckKind::Counting, "cycles", "clock", "busy")
    }
}

/// The first line of an event is used, with its share of running time.
#[test]
fn event_is_found_by_its_name() {
    let counted = super::super::counts("5,,cycles,10,50.00,,\n6,,cycles:u,10,100.00,,\n");
    assert_eq!(of(&counted, "cycles").unwrap().value, Some(5));
    assert_eq!(of(&counted, "cycles:u").unwrap().value, Some(6));
    assert!(of(&counted, "cycles:k").is_none());
    let shown = with_share(row(true, Verdict::Pass), of(&counted, "cycles"));
    assert_eq!(shown.running_percent, Some(50.0));
}

/// Returns the scripted values of a guest in which a program takes one second of CPU time. The
/// host's count of the program's cycles is `host`, and perf in the guest prints `perf`.
fn second(perf: u64, host: u64) -> ScriptedValues {
    let told = ScriptedValues {
        cpu_ns: 1_000_000_000,
        moved: vec![host],
        operator: Some(vec![host]),
        ..ScriptedValues::default()
    };
    told.prints("*-e*cycles*", perf_line("cycles", perf))
}

const SECOND: u64 = 1_000_000_000;

fn cycles(told: &ScriptedValues, host: &HostProperties, backing: &'static str) -> ValidationRow {
    told.seen(host, |linux, guest| {
        linux.ticks_of(guest, backing, "cycles", "spin 1", "busy loop")
    })
}

/// With `--backing clock`, the count of cycles in the guest equals the program's CPU time, and is
/// exactly the host's count.
#[test]
fn cycles_by_the_clock_are_the_programs_time() {
    let row = |perf, host| cycles(&second(perf, host), &clock_host(), "clock");
    let good = row(SECOND, SECOND);
    assert_eq!(
        (good.verdict, good.guest, good.host),
        (Verdict::Pass, Some(SECOND), Some(SECOND))
    );
    assert_eq!((good.running_percent, good.basis), (Some(100.0), GUEST_CPU_TIME));
    assert_eq!(
        row(SECOND + SECOND / 50, SECOND + SECOND / 50).verdict,
        Verdict::Pass,
        "2 % are allowed"
    );
    let late = row(SECOND + SECOND / 40, SECOND + SECOND / 40);
    assert_eq!(
        (late.verdict, late.of_time),
        (Verdict::Fail, true),
        "more are a matter of time"
    );
    let apart = row(SECOND, SECOND + 1);
    assert_eq!(apart.reason.as_deref(), Some("guest and host differ"));
    assert!(!apart.of_time, "no other measurement makes that right");
}

/// With `--backing hardware`, the count of cycles is compared with the host's own event on the
/// vCPU, because the processor's clock is not the TSC.
#[test]
fn cycles_on_hardware_are_the_hosts_own_count() {
    let host = hardware_host(&["cycles"]);
    let row = |perf| cycles(&second(perf, 3 * SECOND), &host, "hardware");
    assert_eq!(row(3 * SECOND).verdict, Verdict::Pass);
    assert_eq!(row(SECOND).verdict, Verdict::Fail, "the TSC's ticks are not it");
    let mut unread = second(SECOND, SECOND);
    unread.operator = None;
    let row = cycles(&unread, &host, "hardware");
    assert_eq!(
        (row.expected, row.verdict),
        (None, Verdict::Pass),
        "then the host's view of the counter is all"
    );
}

fn verdicts(rows: &[ValidationRow]) -> Vec<Verdict> {
    rows.iter().map(|row| row.verdict).collect()
}

/// An event without a count or without a line is a failure.
#[test]
fn event_without_a_count_fails() {
    for text in [
        "<not counted>,,cycles,0,0.00,,\n",
        "<not supported>,,cycles,0,100.00,,\n",
        "",
        "spin: 5\n",
    ] {
        let told = ScriptedValues {
            cpu_ns: SECOND,
            moved: vec![SECOND],
            operator: Some(vec![SECOND]),
            ..ScriptedValues::default()
        };
        let row = cycles(&told.prints("*", text), &clock_host(), "clock");
        assert_eq!(
            row.reason.as_deref(),
            Some("the guest did not count it"),
            "{text}"
        );
    }
}

/// The cycles of an idle guest may be at most a tenth of the TSC ticks.
#[test]
fn idle_guest_uses_hardly_any_cycles() {
    let row = |ticks| {
        let told = second(ticks, ticks);
        told.seen(&clock_host(), |linux, guest| linux.idle(guest, "clock"))
    };
    assert_eq!(row(2 * SECOND / 10).verdict, Verdict::Pass);
    assert_eq!(
        row(2 * SECOND / 10 + 1).reason.as_deref(),
        Some("off the expectation")
    );
}

const NUMBERS: [&str; 5] = [
    "instructions",
    "branches",
    "branch-misses",
    "cache-references",
    "cache-misses",
];

/// Returns the rows for a guest in which perf prints `lines`, in the order of `NUMBERS`, and the
/// host sees the counter increase by `moved`.
fn numbers(host: &HostProperties, backing: &'static str, moved: u64, lines: [&str; 5]) -> Vec<ValidationRow> {
    let mut told = ScriptedValues {
        moved: vec![moved],
        ..ScriptedValues::default()
    };
    let patterns = [
        "*-e\\ instructions*",
        "*-e\\ branches*",
        "*-e\\ branch-misses*",
        "*references*",
        "*cache-misses*",
    ];
    for (pattern, line) in patterns.into_iter().zip(lines) {
        told = told.prints(pattern, line);
    }
    told.rows(host, |linux, guest, rows| linux.numbers(guest, backing, rows))
}

/// With `--backing clock`, no instructions are counted. "Not supported" and 0 pass, and any other
/// count or a missing line fails.
#[test]
fn clock_backing_must_not_count_instructions() {
    let rows = numbers(
        &clock_host(),
        "clock",
        0,
        [
            "<not supported>,,instructions,0,100.00,,\n",
            "0,,branches,10,100.00,,\n",
            "5,,branch-misses,10,100.00,,\n",
            "",
            "<not counted>,,cache-misses,0,0.00,,\n",
        ],
    );
    assert_eq!(
        rows.iter().map(|row| row.event.as_str()).collect::<Vec<_>>(),
        NUMBERS
    );
    use Verdict::{Fail, NotSupported};
    assert_eq!(
        verdicts(&rows),
        [NotSupported, NotSupported, Fail, Fail, NotSupported]
    );
    assert_eq!(rows[2].guest, Some(5), "the number that gives it away is shown");
    assert!(
        rows[3].reason.as_ref().unwrap().contains("no line"),
        "{:?}",
        rows[3]
    );
}

/// The loop's instructions and branches are known for both guest and host. For other events, guest
/// and host must agree.
#[test]
fn numbers_on_hardware_are_those_of_the_loop() {
    let host = hardware_host(&["instructions", "cache-misses"]);
    let rows = numbers(
        &host,
        "hardware",
        100_000_000,
        [
            "100000000,,instructions,10,100.00,,\n",
            "<not supported>,,branches,0,100.00,,\n",
            "0,,branch-misses,10,100.00,,\n",
            "0,,cache-references,10,100.00,,\n",
            "7,,cache-misses,10,100.00,,\n",
        ],
    );
    use Verdict::{Fail, NotSupported, Pass};
    assert_eq!(
        verdicts(&rows),
        [Pass, NotSupported, NotSupported, NotSupported, Fail]
    );
    assert_eq!(rows[4].reason.as_deref(), Some("guest and host differ"));
    let fewer = "97000000,,instructions,10,100.00,,\n";
    let rows = numbers(&host, "hardware", 97_000_000, [fewer, "", "", "", ""]);
    assert_eq!(
        rows[0].reason.as_deref(),
        Some("off the expectation"),
        "3 % are not 2 %"
    );
    assert!(!rows[0].of_time, "instructions do not depend on time");
}

/// A program at one privilege level counts only at that level. The row reports whether the CPU had
/// a timer tick.
#[test]
fn level_filter_counts_only_its_level() {
    let rows = |user: u64, kernel: u64, nohz: &str| {
        let lines = perf_line("cycles:u", user) + &perf_line("cycles:k", kernel) + &perf_line("cycles", 1000);
        let told = ScriptedValues {
            cpu_ns: 1000,
            moved: vec![0],
            ..ScriptedValues::default()
        };
        let told = told.prints("*nohz_full*", nohz).prints("*-C*cycles:u*", lines);
        told.rows(&clock_host(), |linux, guest, rows| {
            linux.levels(guest, "clock", rows)
        })
    };
    let good = rows(960, 40, "1\n");
    assert!(
        good.iter()
            .all(|row| row.verdict == Verdict::Pass && row.measurements == MEASUREMENTS),
        "{good:?}"
    );
    assert!(good[0].basis.ends_with("its CPU has no tick"));
    let leaking = rows(900, 100, "(null)\n");
    assert!(
        leaking
            .iter()
            .all(|row| row.verdict == Verdict::Fail && row.measurements == MEASUREMENTS),
        "{leaking:?}"
    );
    assert!(leaking[0].basis.contains("keeps its tick"));
}

/// Swapped counts of two CPUs are detected.
#[test]
fn swapped_cpu_counts_fail() {
    let rows = |first: u64, second: u64| {
        let lines = format!("CPU0,{first},,cycles,10,100.00,,\nCPU1,{second},,cycles,10,100.00,,\n");
        let told = ScriptedValues {
            moved: vec![500, 700],
            operator: Some(vec![500, 700]),
            ..ScriptedValues::default()
        };
        let told = told.prints("*-A*", lines);
        told.rows(&hardware_host(&["cycles"]), |linux, guest, rows| {
            linux.two_cpus(guest, "hardware", rows)
        })
    };
    let good = rows(500, 700);
    assert!(good.iter().all(|row| row.verdict == Verdict::Pass), "{good:?}");
    for row in rows(700, 500) {
        assert_eq!(
            (row.reason.as_deref(), row.measurements),
            (Some("guest and host differ"), 1),
            "{row:?}"
        );
    }
}

/// The scaled count with the largest error is judged. The row fails if perf prints too few lines,
/// if the event had a counter all the time, or if the operator's reference count is missing.
#[test]
fn worst_scaled_count_is_judged() {
    let scaled = |lines: String, operator: Option<u64>| {
        let told = ScriptedValues {
            moved: vec![0],
            operator: operator.map(|count| vec![count]),
            ..ScriptedValues::default()
        };
        let told = told.prints("*mux_interval*", lines);
        told.seen(&clock_host(), |linux, guest| linux.scaled(guest, "clock"))
    };
    let line = |value: u64, percent: u32| format!("{value},,cycles,10,{percent}.00,,\n");
    let good = scaled(line(1000, 44).repeat(TOO_MANY), Some(1000));
    assert_eq!((good.verdict, good.running_percent), (Verdict::Pass, Some(44.0)));
    let worst = scaled(line(1000, 44).repeat(TOO_MANY - 1) + &line(940, 50), Some(1000));
    assert_eq!(
        (worst.verdict, worst.guest, worst.running_percent),
        (Verdict::Fail, Some(940), Some(50.0))
    );
    let uncounted = line(1000, 44).repeat(TOO_MANY - 1) + "<not counted>,,cycles,0,0.00,,\n";
    assert_eq!(
        scaled(uncounted, Some(1000)).reason.as_deref(),
        Some("the guest did not count it")
    );
    for (lines, operator, why) in [
        (
            line(1000, 100).repeat(TOO_MANY),
            Some(1000),
            "there were counters for all of them",
        ),
        (
            line(1000, 44).repeat(TOO_MANY - 1),
            Some(1000),
            "perf printed 8 counts",
        ),
        (
            line(1000, 44).repeat(TOO_MANY),
            None,
            "the operator's event was not counted",
        ),
    ] {
        let row = scaled(lines, operator);
        assert_eq!((row.verdict, row.reason.as_deref()), (Verdict::Fail, Some(why)));
    }
}

/// Only the strict sharing policy may refuse an operator's event. In that case, only the guest's
/// count is judged.
#[test]
fn only_strict_may_refuse_the_operator() {
    let row = |operator: Option<u64>, policy: &str| {
        let mut told = second(SECOND, SECOND);
        told.operator = operator.map(|count| vec![count]);
        told.seen(&clock_host(), |linux, guest| {
            linux.contended(guest, "clock", policy)
        })
    };
    assert_eq!(row(None, "strict").verdict, Verdict::Pass);
    assert_eq!(
        row(None, "guest-first").reason.as_deref(),
        Some("the operator's event was not counted")
    );
    assert_eq!(row(Some(SECOND), "guest-first").verdict, Verdict::Pass);
    assert_eq!(
        row(Some(2 * SECOND), "operator-first").reason.as_deref(),
        Some("guest and host differ")
    );
}

/// The difference between the two runs of the known program must be exact. In each run,
/// single-stepping may miss two instructions around the loop.
#[test]
fn known_program_is_counted_to_the_last_instruction() {
    let rows = |few: [u64; 2], many: [u64; 2]| {
        let lines = |[instructions, branches]: [u64; 2]| {
            perf_line("instructions:u", instructions) + &perf_line("branches:u", branches)
        };
        let told = ScriptedValues::default()
            .prints("*known\\ 1000", lines(few))
            .prints("*known\\ 3000", lines(many));
        told.rows(&clock_host(), |linux, guest, rows| linux.exact(guest, rows))
    };
    use Verdict::{Fail, Pass};
    let whole = [2 * 1000 + 7 * 4 + 8, 1000 + 2 * 4 + 2];
    let more = |extra: u64| [whole[0] + 4000 + extra, whole[1] + 2000];
    assert_eq!(verdicts(&rows(whole, more(0))), [Pass; 4]);
    assert_eq!(verdicts(&rows(whole, more(1))), [Pass, Fail, Pass, Pass]);
    let missed = |n: u64| [whole[0] - n, whole[1]];
    assert_eq!(
        verdicts(&rows(missed(2), [more(0)[0] - 2, more(0)[1]])),
        [Pass; 4]
    );
    assert_eq!(
        verdicts(&rows(missed(3), [more(0)[0] - 3, more(0)[1]])),
        [Fail, Pass, Pass, Pass]
    );
    assert_eq!(
        verdicts(&rows([whole[0] + 1, whole[1]], more(1))),
        [Fail, Pass, Pass, Pass],
        "one too many"
    );
    assert_eq!(verdicts(&rows(more(0), whole))[1], Fail, "fewer for more rounds");
}

/// The AMD driver of the guest's kernel has no ref-cycles, so a count of them is a failure.
#[test]
fn amd_has_no_ref_cycles_in_linux() {
    let row = |line: &str| {
        let mut told = second(SECOND, SECOND);
        told.prints.insert(0, ("*ref-cycles*", line.to_owned()));
        let rows = told.rows(&clock_host(), |linux, guest, rows| {
            linux.counting(guest, "clock", true, rows)
        });
        rows.into_iter().find(|row| row.event == "ref-cycles").unwrap()
    };
    assert_eq!(
        row("<not supported>,,ref-cycles,0,100.00,,\n").verdict,
        Verdict::NotSupported
    );
    assert!(
        row("5,,ref-cycles,10,100.00,,\n")
            .reason
            .unwrap()
            .ends_with("but perf counted")
    );
    assert_eq!(row("").reason.as_deref(), Some("it was not measured"));
}
