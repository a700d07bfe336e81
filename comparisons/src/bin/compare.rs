//! Compares Perfvisor's vPMU with KVM's own vPMU (`make compare`).
//!
//! KVM's vPMU needs a host PMU, which a Perfvisor guest has. A Linux guest with `--nested`
//! therefore runs in the lab and starts a second Linux guest, alternately with `--backing hardware`
//! and `--backing kvm`. The comparison measures the number of exits, which determines the cost of a
//! vPMU, and the accuracy of perf in the guest. `docs/measurements.md` has the results.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, value_parser};
use comparisons::{ComparisonError, context, exit_code, median, write_figures};
use integration::artefacts;
use integration::guest::{GuestRun, LinuxGuest};
use integration::lab::LabOptions;
use integration::limit::ProcessTimeLimits;
use integration::test_host::TestHost;
use serde_json::{Value, json};

/// Time limits of the outer guest's run. They are long because, on a loaded machine, a single VM
/// exit of the nested guest can take more than half a millisecond.
const LIMIT: ProcessTimeLimits = ProcessTimeLimits {
    silent: Duration::from_secs(3000),
    overall: Duration::from_secs(4 * 3600),
    ..ProcessTimeLimits::GENEROUS
};
/// Assumed cost of a VM exit on hardware, in microseconds, for the projection of the results.
const EXIT_US: f64 = 1.5;
/// Number of counters of the guest's PMU, which limits the number of events that can be sampled
/// simultaneously.
const COUNTERS: f64 = 6.0;
/// Sampling frequency of each event in the projection of the results, in Hz.
const HZ: f64 = 1000.0;
/// Multiplexing interval of events in the inner guest, in milliseconds.
const TURN_MS: f64 = 250.0;
/// Default multiplexing interval of the Linux kernel, for the projection of the results, in
/// milliseconds.
const KERNEL_TURN_MS: f64 = 4.0;
/// Values of `--backing` that the program compares.
const WAYS: [&str; 2] = ["hardware", "kvm"];
/// Shell script that runs in the inner guest.
///
/// The script prints the name of each phase and sleeps before the phase begins, so the outer guest
/// can read KVM's statistics in between. All phases do the same work.
const INNER: &str = r#"
phase() {
	echo "@@phase $1 pmi=$(awk '/PMI:/ {print $2}' /proc/interrupts) ctxt=$(awk '/^ctxt/ {print $2}' /proc/stat)"
	sleep 1
}
w=WORKx
# In turns of 4 ms the guest would do nothing but take turns: one costs more than that here.
echo TURN >/sys/bus/event_source/devices/cpu/perf_event_mux_interval_ms
ten=cycles,cycles,cycles,cycles,cycles,cycles,cycles,cycles,cycles,cycles
result() { grep -h "^spin" | sed "s/^/@@result $1 /"; }
count() { sed "s/^/@@result $1 /"; }
phase alone; spin $w | result alone
phase quiet; perf record -q -c 100000000000 -e cycles -o /tmp/q spin $w 2>&1 | result quiet
phase one; perf record -q -c PERIOD -e cycles -o /tmp/1 spin $w 2>&1 | result one
phase tenquiet; perf record -q -c 100000000000 -e $ten -o /tmp/q spin $w 2>&1 | result tenquiet
phase ten; perf record -q -c PERIOD -e $ten -o /tmp/10 spin $w 2>&1 | result ten
phase count; perf stat -x, -e cycles:u -o /tmp/s spin $w | result count; grep cycles /tmp/s | count counted
phase mux; perf stat -x, -e $ten -o /tmp/m spin $w | result mux; grep cycles /tmp/m | count turn
phase unswitched; perf stat -x, -i -e task-clock -o /tmp/b perf bench sched pipe -l SWITCHES >/dev/null 2>&1
phase switched; perf stat -x, -i -e cycles -o /tmp/b perf bench sched pipe -l SWITCHES >/dev/null 2>&1
phase end
for f in 1 10; do perf script -i /tmp/$f -F comm 2>/dev/null | wc -l | sed "s/^/@@result samples $f /"; done
dmesg | sed -n 's/.*tsc: Detected \([0-9.]*\) MHz.*/@@result tsc_mhz \1/p'
"#;

/// Shell script that runs in the outer guest. The script starts the inner guest and reads KVM's
/// statistics at each phase.
const OUTER: &str = r#"
mount -t debugfs none /sys/kernel/debug
while read -r m; do insmod /lib/modules/$m || exit 1; done </lib/modules/order
section check perfvisor check
kexits() { cat /sys/kernel/debug/kvm/exits; }
inner() {
	perfvisor run --backing $1 --pmu amd --pmu-counters 6 --kernel /inner/vmlinux --initrd /inner/initrd --memory 400M --stats \
		--cmdline "console=ttyS0 tsc=reliable no_timer_check quiet nokaslr nowatchdog pv.script=compare" </dev/null 2>/tmp/stats |
	while read -r line; do
		# Its own markers would end this section.
		case $line in *@@phase*|*@@result*)
			read -r up _ </proc/uptime
			echo "$line exits=$(kexits) up=$up" ;;
		esac
	done
	cat /tmp/stats
}
for round in ROUNDS; do
	section hardware-$round inner hardware
	section kvm-$round inner kvm
done
"#;

/// Compares Perfvisor's vPMU with KVM's own in a nested guest in the lab.
#[derive(clap::Parser)]
#[command(name = "compare")]
struct Options {
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=20))]
    rounds: u32,
    /// Set the number of iterations of the measured loop
    #[arg(long, value_name = "N", default_value_t = 1_500_000_000,
        value_parser = value_parser!(u64).range(1..=1 << 40))]
    work: u64,
    /// Set the number of messages of perf bench sched pipe
    #[arg(long, value_name = "N", default_value_t = 50,
        value_parser = value_parser!(u32).range(1..=1_000_000))]
    switches: u32,
    // A PMI in a nested guest takes tens of milliseconds, including the work of the L1 hypervisor.
    // A shorter period would leave no time for the guest.
    /// Set the sampling period of perf record, in cycles
    #[arg(long, value_name = "N", default_value_t = 1_000_000_000,
        value_parser = value_parser!(u64).range(1..=1 << 40))]
    period: u64,
}

fn main() -> ExitCode {
    exit_code("compare", compare(&Options::parse()))
}

fn compare(options: &Options) -> Result<bool, ComparisonError> {
    let place = TestHost::choose(&LabOptions {
        memory_mib: 4096,
        ..LabOptions::default()
    })?;
    if !matches!(place, TestHost::Lab(_)) {
        println!(
            "compare: skipped: made for the lab's nested AMD-V, and this is {}",
            place.describe()
        );
        return Ok(true);
    }
    let run = measure(options, &place)?;
    print!("{}", run.section("check"));
    let mut ways = Vec::new();
    for way in WAYS {
        let rounds: Vec<Figures> = (1..=options.rounds)
            .filter_map(|round| run.console.sections.get(&format!("{way}-{round}")))
            .filter_map(|section| figures(&section.text))
            .collect();
        if rounds.len() != options.rounds as usize {
            println!(
                "compare: --backing {way}: {} of {} rounds gave all figures; console: {}",
                rounds.len(),
                options.rounds,
                run.log().display()
            );
            return Ok(false);
        }
        ways.push((way, rounds));
    }
    print!("{}", table(&ways));
    println!("console: {}", run.log().display());
    write_figures("compare", &as_json(options, &ways))?;
    Ok(true)
}

/// Results of one round of measurements with one value of `--backing`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Figures {
    /// Number of VM exits per PMI, with one event and with ten multiplexed events.
    ///
    /// Exits of the reference phase are subtracted. In the reference phase, the same events are
    /// active, but their period is never reached. NaN if not measurable.
    exits_per_pmi: [f64; 2],
    /// Number of VM exits per multiplexing interval, with ten events. NaN if not measurable.
    exits_per_turn: f64,
    exits_per_switch: f64,
    /// Increase of the guest's CPU time relative to the same work without events, with one event
    /// and with ten.
    slowdown: [f64; 2],
    /// Numbers of PMIs with one event and with ten multiplexed events.
    pmis: [f64; 2],
    /// Relative error of the `cycles:u` count compared with CPU time multiplied by the TSC
    /// frequency.
    count_error: f64,
    /// Relative errors of the counts of ten multiplexed events. The first value is the largest
    /// deviation of a count from the mean of the counts, and the second is the error of the mean.
    mux_error: [f64; 2],
}

/// KVM's statistics and guest counts, read at the start of a phase.
#[derive(Debug, Clone, Copy, Default)]
struct Mark {
    pmis: f64,
    switches: f64,
    exits: f64,
    up_seconds: f64,
}

/// Returns `value` if it is positive and finite, and NaN otherwise. A cost that is not positive is
/// lost in the variation of the guest's other activity.
fn cost(value: f64) -> f64 {
    if value.is_finite() && value > 0.0 {
        value
    } else {
        f64::NAN
    }
}

/// Returns the number that follows `key=` in `line`.
fn field(line: &str, key: &str) -> Option<f64> {
    line.split_whitespace()
        .find_map(|word| word.strip_prefix(key)?.strip_prefix('=')?.parse().ok())
}

/// Parses the output of the inner guest, which ends with KVM's statistics. Returns `None` if a line
/// is missing.
fn figures(text: &str) -> Option<Figures> {
    let mut marks: Vec<(&str, Mark)> = Vec::new();
    let mut seconds: BTreeMap<&str, f64> = BTreeMap::new();
    let mut lasted: BTreeMap<&str, f64> = BTreeMap::new();
    let (mut counted, mut turns, mut tsc_hz) = (None, Vec::new(), None);
    for line in text.lines() {
        if let Some((_, rest)) = line.split_once("@@phase ") {
            let mark = Mark {
                pmis: field(rest, "pmi")?,
                switches: field(rest, "ctxt")?,
                exits: field(rest, "exits")?,
                up_seconds: field(rest, "up")?,
            };
            marks.push((rest.split_whitespace().next()?, mark));
        } else if let Some((_, rest)) = line.split_once("@@result ") {
            let mut words = rest.split_whitespace();
            let (name, value) = (words.next()?, words.next()?);
            let csv = || value.split(',').next()?.parse::<f64>().ok();
            match name {
                "counted" => counted = csv(),
                // An event that was never scheduled has no count.
                "turn" => turns.push(csv()?),
                "tsc_mhz" => tsc_hz = value.parse::<f64>().ok().map(|mhz| mhz * 1e6),
                _ => {
                    if let Some(cpu) = field(rest, "cpu_seconds") {
                        seconds.insert(name, cpu);
                    }
                    if let Some(long) = field(rest, "seconds") {
                        lasted.insert(name, long);
                    }
                }
            }
        }
    }
    // Returns the increase of a value during a phase.
    let during = |name: &str, of: fn(&Mark) -> f64| {
        let at = marks.iter().position(|(phase, _)| *phase == name)?;
        Some(of(&marks.get(at + 1)?.1) - of(&marks[at].1))
    };
    let exits = |name| during(name, |mark| mark.exits);
    let pmis = |name| during(name, |mark| mark.pmis);
    let cpu = |name| seconds.get(name).copied().filter(|cpu| *cpu > 0.0);
    let long = |name| during(name, |mark| mark.up_seconds).filter(|seconds| *seconds > 0.0);
    // The reference phase may have a different duration.
    let more = |name, without| Some(exits(name)? - exits(without)? * long(name)? / long(without)?);
    let turns_of = |name| lasted.get(name).map(|long| long * 1e3 / TURN_MS);
    let slowdown = |name| Some(cpu(name)? / cpu("alone")? - 1.0);
    let error = |count: f64, name| Some(count / (cpu(name)? * tsc_hz?) - 1.0);
    let mean = turns.iter().sum::<f64>() / turns.len() as f64;
    let worst = turns.iter().copied().max_by(|a, b| {
        let off = |x: f64| (x - mean).abs();
        off(*a).total_cmp(&off(*b))
    })?;
    let all = Figures {
        exits_per_pmi: [
            cost(more("one", "quiet")? / pmis("one")?),
            cost(more("ten", "tenquiet")? / pmis("ten")?),
        ],
        exits_per_turn: cost(more("mux", "count")? / turns_of("mux")?),
        exits_per_switch: cost(more("switched", "unswitched")? / during("switched", |mark| mark.switches)?),
        slowdown: [slowdown("one")?, slowdown("ten")?],
        pmis: [pmis("one")?, pmis("ten")?],
        count_error: error(counted?, "count")?,
        mux_error: [error(worst, "mux")?, error(mean, "mux")?],
    };
    // Without a PMI the exits per PMI are undefined.
    all.pmis.iter().all(|n| *n >= 1.0).then_some(all)
}

/// Table row: label, value, unit, and a function that formats the projected cost on hardware.
type Measure = (
    &'static str,
    fn(&Figures) -> f64,
    &'static str,
    Option<fn(&Figures) -> String>,
);

const MEASURES: [Measure; 11] = [
    (
        "exits for each PMI, perf record of 1 event",
        |f| f.exits_per_pmi[0],
        "",
        Some(|f| at_price(f.exits_per_pmi[0])),
    ),
    (
        "exits for each PMI, perf record of 10 events",
        |f| f.exits_per_pmi[1],
        "",
        Some(|f| at_price(f.exits_per_pmi[1])),
    ),
    (
        "exits for each turn, perf stat of 10 events",
        |f| f.exits_per_turn,
        "",
        Some(|f| at_price(f.exits_per_turn)),
    ),
    (
        "exits for each context switch between a task with 1 event and one without",
        |f| f.exits_per_switch,
        "",
        Some(|f| at_price(f.exits_per_switch)),
    ),
    (
        "slowdown by perf record of 1 event (estimate: at 1000 Hz)",
        |f| f.slowdown[0] * 100.0,
        " %",
        Some(|f| slowed(f.exits_per_pmi[0], 1.0, 0.0)),
    ),
    (
        "slowdown by perf record of 10 events (estimate: six on at a time, 1000 Hz each, turns of 4 ms)",
        |f| f.slowdown[1] * 100.0,
        " %",
        Some(|f| slowed(f.exits_per_pmi[1], COUNTERS, f.exits_per_turn)),
    ),
    ("PMIs of 1 event", |f| f.pmis[0], "", None),
    ("PMIs of 10 events", |f| f.pmis[1], "", None),
    (
        "error of a count (cycles:u)",
        |f| f.count_error * 100.0,
        " %",
        None,
    ),
    (
        "error of 10 events in turns, mean",
        |f| f.mux_error[1] * 100.0,
        " %",
        None,
    ),
    (
        "error of 10 events in turns, farthest from the mean",
        |f| f.mux_error[0] * 100.0,
        " %",
        None,
    ),
];

/// Formats a value with its unit. Formats NaN as a dash.
fn shown(value: f64, unit: &str) -> String {
    if value.is_nan() {
        "-".to_owned()
    } else {
        format!("{value:.1}{unit}")
    }
}

/// Formats the projected time that `exits` VM exits take on hardware.
fn at_price(exits: f64) -> String {
    shown(exits * EXIT_US, " µs")
}

/// Formats the projected slowdown of a guest in which `events` events are sampled at [`HZ`] and
/// multiplexed at the kernel's default interval.
fn slowed(exits_per_pmi: f64, events: f64, exits_per_turn: f64) -> String {
    let a_second = exits_per_pmi * events * HZ + exits_per_turn * 1e3 / KERNEL_TURN_MS;
    shown(a_second * EXIT_US / 1e6 * 100.0, " %")
}

fn table(ways: &[(&str, Vec<Figures>)]) -> String {
    let mut out = String::new();
    let _ = write!(out, "\n| medians of {} turn(s) |", ways[0].1.len());
    for (way, _) in ways {
        let _ = write!(out, " --backing {way} | at {EXIT_US} µs an exit (estimate) |");
    }
    let _ = writeln!(out, "\n|---|{}", "---|---|".repeat(ways.len()));
    for (name, of, unit, projected) in MEASURES {
        let _ = write!(out, "| {name} |");
        for (_, rounds) in ways {
            let value = median(rounds.iter().map(of));
            let of_each = |i: usize| median(rounds.iter().map(|f| f.exits_per_pmi[i]));
            let middle = Figures {
                exits_per_pmi: [of_each(0), of_each(1)],
                exits_per_switch: median(rounds.iter().map(|f| f.exits_per_switch)),
                exits_per_turn: median(rounds.iter().map(|f| f.exits_per_turn)),
                ..rounds[0]
            };
            let estimate = projected.map_or("-".to_owned(), |p| p(&middle));
            let _ = write!(out, " {} | {estimate} |", shown(value, unit));
        }
        out.push('\n');
    }
    out
}

fn as_json(options: &Options, ways: &[(&str, Vec<Figures>)]) -> Value {
    let round = |f: &Figures| {
        json!({
            "exits_per_pmi": f.exits_per_pmi,
            "exits_per_turn": f.exits_per_turn,
            "exits_per_context_switch": f.exits_per_switch,
            "slowdown_1_event": f.slowdown[0],
            "slowdown_10_events": f.slowdown[1],
            "pmis": f.pmis,
            "count_error": f.count_error,
            "mux_error_farthest_and_mean": f.mux_error,
        })
    };
    let ways: serde_json::Map<_, _> = ways
        .iter()
        .map(|(way, rounds)| ((*way).to_owned(), rounds.iter().map(round).collect()))
        .collect();
    json!({
        "rounds": options.rounds,
        "work_iterations": options.work,
        "sampling_period": options.period,
        "turn_ms": TURN_MS,
        "price_of_an_exit_us": EXIT_US,
        "ways": ways,
    })
}

fn measure(options: &Options, place: &TestHost) -> Result<GuestRun, ComparisonError> {
    let images = artefacts::images()?;
    let binaries = artefacts::binaries()?;
    let read = |path: &std::path::Path| fs::read(path).map_err(context(path.display()));
    let inner = INNER
        .replace("WORK", &options.work.to_string())
        .replace("PERIOD", &options.period.to_string())
        .replace("TURN", &TURN_MS.to_string())
        .replace("SWITCHES", &options.switches.to_string());
    let rounds: Vec<String> = (1..=options.rounds).map(|n| n.to_string()).collect();
    let outer = OUTER.replace("ROUNDS", &rounds.join(" "));
    // The initrd contains the inner guest's script.
    let mut initrd = read(&images.initrd)?;
    let mut archive = guest_images::cpio::CpioArchive::new(Vec::new());
    archive.file("scripts/compare", 0o644, inner.as_bytes())?;
    initrd.extend(archive.finish()?);
    let run = LinuxGuest::new("compare", "amd")
        .unpacked_over(read(&images.lab_initrd)?)
        .file("bin/perfvisor", 0o755, read(&binaries.perfvisor)?)
        .file("inner/vmlinux", 0o644, read(&images.vmlinux)?)
        .file("inner/initrd", 0o644, initrd)
        .memory_mib(1400)
        // The watchdog of the L1 guest would occupy a counter.
        .cmdline("nowatchdog")
        .script(outer)
        .args(["--nested", "--stats"])
        .limit(LIMIT)
        .run(place)?;
    Ok(run)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text() -> String {
        let phases = [
            ("alone", 0, 0, 100),
            ("quiet", 0, 10, 200),
            ("one", 0, 20, 260),
            ("tenquiet", 100, 30, 1520),
            ("ten", 100, 30, 1580),
            ("count", 300, 40, 3000),
            ("mux", 300, 50, 3100),
            ("unswitched", 300, 60, 3200),
            ("switched", 300, 160, 3300),
            ("end", 300, 260, 4200),
        ];
        let mut text = String::new();
        for (n, (name, pmi, ctxt, exits)) in phases.into_iter().enumerate() {
            let up = 10 * n;
            let _ = writeln!(text, "@@phase {name} pmi={pmi} ctxt={ctxt} exits={exits} up={up}");
            let cpu = if name == "one" { 1.5 } else { 1.0 };
            let _ = writeln!(
                text,
                "@@result {name} spin: iterations=5 seconds=2 cpu_seconds={cpu} exits=7 up=2"
            );
        }
        text + "@@result counted 990000000,,cycles:u,1,100.00,, exits=1 up=1\n\
                @@result turn 800000000,,cycles,1,60.00,, exits=1 up=1\n\
                @@result turn 900000000,,cycles,1,60.00,, exits=1 up=1\n\
                @@result tsc_mhz 1000.0 exits=1 up=1\n"
    }

    /// The VM exits of the reference phase are subtracted from those of a phase. The difference is
    /// divided by the count (such as PMIs) of the phase.
    #[test]
    fn figures_are_differences_of_phases() {
        let f = figures(&text()).unwrap();
        assert_eq!(f.exits_per_pmi, [12.0, (1420.0 - 60.0) / 200.0]);
        assert!(
            f.exits_per_turn.is_nan(),
            "ten events took no more exits than one"
        );
        assert_eq!(f.exits_per_switch, (900.0 - 100.0) / 100.0);
        assert_eq!(f.slowdown, [0.5, 0.0]);
        assert_eq!(slowed(f.exits_per_pmi[0], 1.0, 0.0), "1.8 %");
        assert_eq!(slowed(12.0, 1.0, 40.0), "3.3 %");
        assert!((f.count_error + 0.01).abs() < 1e-9);
        assert!((f.mux_error[1] + 0.15).abs() < 1e-9);
        let shown = table(&[("kvm", vec![f])]);
        assert!(
            shown.contains("| 12.0 | 18.0 µs |") && shown.contains("perf stat of 10 events | - | - |"),
            "{shown}"
        );
    }

    /// The exits of the reference phase are scaled to the duration of the measured phase before
    /// they are subtracted. A negative difference is reported as not measurable.
    #[test]
    fn phases_without_the_measured_are_scaled_to_the_time_of_those_with_it() {
        let longer = text().replace("exits=200 up=10", "exits=200 up=-10");
        // The reference phase has 60 exits in 30 seconds, and the phase with 100 PMIs has 1,260
        // exits in 10 seconds.
        assert_eq!(
            figures(&longer).unwrap().exits_per_pmi[0],
            (1260.0 - 20.0) / 100.0
        );
        let none = text().replace("exits=1520", "exits=300");
        let shown = table(&[("kvm", vec![figures(&none).unwrap()])]);
        assert!(shown.contains("record of 1 event | - | - |"), "{shown}");
    }

    /// `figures` returns `None`, not zeros, if a line is missing from the output.
    #[test]
    fn missing_line_gives_no_figures() {
        for word in [
            "@@phase end",
            "@@result counted",
            "@@result turn 8",
            "tsc_mhz",
            "@@result alone",
        ] {
            let without: String = text()
                .lines()
                .filter(|l| !l.contains(word))
                .map(|l| format!("{l}\n"))
                .collect();
            if word == "@@result turn 8" {
                assert!(figures(&without.replace("turn 900000000", "turn <not counted>")).is_none());
            } else {
                assert!(figures(&without).is_none(), "{word}");
            }
        }
    }
}
