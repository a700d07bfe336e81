//! `perfvisor stat`: counts of a VM's vCPUs, in the form `perf stat` has.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;

use super::{DONE, VcpuList, Woken, parse_seconds, parse_vcpus, print, wait_until};
use crate::cli::ExitStatus;
use crate::control::client::Client;
use crate::control::protocol::{Call, EventReading, Generation, GuestViews, Opened, VcpuView};
use crate::events::format::{Counted, Unit, csv_line, mean_and_error, running_percent, stat_line, thousands};
use crate::events::list;
use crate::signals::StopSignals;

/// What is counted when nothing is asked for.
const DEFAULT_EVENTS: &str = "task-clock,context-switches,cpu-migrations,page-faults,cycles,instructions,branches,branch-misses,kvm:exits";
/// Between two readings that are kept in case the VM ends.
const LOOK: Duration = Duration::from_millis(250);
/// How long the vCPUs may take to show what their guest counts.
const VIEW_PATIENCE: Duration = Duration::from_secs(2);

/// `perfvisor stat`.
#[derive(Clone, Debug, Args)]
pub struct StatArgs {
    /// The VM; may be left out when only one is running.
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// Events in perf's syntax: names, {groups}, modifiers, rNNN, cpu/event=N,umask=N/, kvm:STATISTIC, pv/NAME/.
    #[arg(short, long = "event", value_name = "LIST", default_value = DEFAULT_EVENTS)]
    pub events: String,
    /// How long to count; until Ctrl-C if not given.
    #[arg(short, long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub duration: Option<Duration>,
    /// A line for each vCPU and event.
    #[arg(short = 'A', long)]
    pub per_vcpu: bool,
    /// Only these vCPUs, as in 0,2-3.
    #[arg(long, value_name = "LIST", value_parser = parse_vcpus)]
    pub vcpu: Option<VcpuList>,
    /// Print what was counted in each interval of so many milliseconds.
    #[arg(short = 'I', long, value_name = "MS", value_parser = parse_interval)]
    pub interval: Option<Duration>,
    /// Print fields with this separator, for programs.
    #[arg(short = 'x', long, value_name = "SEPARATOR", conflicts_with = "json")]
    pub field_separator: Option<String>,
    /// Print JSON objects, for programs.
    #[arg(short, long)]
    pub json: bool,
    /// Measure so many times; print the mean and its error. Needs --duration.
    #[arg(short, long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub repeat: u32,
    /// Show what the guest has programmed into its PMU instead.
    #[arg(long)]
    pub guest_view: bool,
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    match text.parse::<u64>() {
        Ok(ms) if (10..=86_400_000).contains(&ms) => Ok(Duration::from_millis(ms)),
        _ => Err("must be a number of milliseconds, at least 10".into()),
    }
}

/// Counts.
///
/// # Errors
/// One line for the user.
pub fn stat(args: &StatArgs) -> Result<ExitStatus, String> {
    list::parse(&args.events).map_err(|e| e.to_string())?;
    if args.repeat > 1 && (args.duration.is_none() || args.interval.is_some()) {
        return Err("--repeat needs --duration, and goes with no --interval".into());
    }
    let signals = StopSignals::block().map_err(|e| format!("the signals that end it: {e}"))?;
    let mut client = Client::connect(args.name.as_deref()).map_err(|e| e.to_string())?;
    if args.guest_view {
        return guest_view(&mut client, args);
    }
    let mut runs: Vec<Vec<Total>> = Vec::new();
    let mut elapsed = Vec::new();
    let mut gone = false;
    let mut unsupported = BTreeMap::new();
    for _ in 0..args.repeat {
        let opened: Vec<Opened> = client
            .call(Call::Open {
                events: args.events.clone(),
                vcpus: args.vcpu.as_ref().map(|list| list.0.clone()),
                sampling: None,
            })
            .map_err(|e| e.to_string())?;
        for o in &opened {
            if let Some(why) = &o.unsupported {
                unsupported.insert(o.name.clone(), why.clone());
            }
        }
        let run = one_run(&mut client, args, &opened, &signals)?;
        elapsed.push(run.elapsed.as_secs_f64());
        runs.push(run.totals);
        gone = run.gone;
        if gone || run.woken == Woken::Signal {
            break;
        }
        let () = client.call(Call::Close).map_err(|e| e.to_string())?;
    }
    if args.interval.is_none() {
        print(&final_table(client.info().name.as_str(), &runs, &elapsed, args))?;
    }
    for (name, why) in unsupported {
        log::info!("{name} cannot be counted: {why}");
    }
    if gone {
        log::warn!(
            "the VM ended; the counts are as they were at most {} ms before",
            LOOK.as_millis()
        );
    }
    Ok(DONE)
}

/// What came out for an event, on one vCPU or on all.
#[derive(Clone, Debug)]
struct Total {
    name: String,
    vcpu: Option<u32>,
    unit: Unit,
    counted: Counted,
    /// Standard error of a scaled count, or of repeated runs, in percent of it.
    error_percent: Option<f64>,
    backing: String,
    estimate: bool,
}

struct Run {
    totals: Vec<Total>,
    elapsed: Duration,
    woken: Woken,
    gone: bool,
}

/// Counts once, printing intervals as they pass.
fn one_run(
    client: &mut Client,
    args: &StatArgs,
    opened: &[Opened],
    signals: &StopSignals,
) -> Result<Run, String> {
    let () = client.call(Call::Enable).map_err(|e| e.to_string())?;
    let start = Instant::now();
    let end = args.duration.map(|d| start + d);
    let mut next_interval = args.interval.map(|i| start + i);
    let (mut last, mut before): (Vec<EventReading>, Vec<EventReading>) = Default::default();
    let mut printed = Duration::ZERO;
    if args.interval.is_some() && !args.json && args.field_separator.is_none() {
        let vcpu = if args.per_vcpu { " VCPU      " } else { "" };
        print(&format!(
            "#           time{vcpu}             counts unit events\n"
        ))?;
    }
    loop {
        let look = Instant::now() + LOOK;
        let until = [end, next_interval]
            .into_iter()
            .flatten()
            .fold(look, Instant::min);
        let woken = wait_until(until, signals);
        let now = Instant::now();
        let over = woken == Woken::Signal || end.is_some_and(|end| now >= end);
        if over {
            // So that no event counts on while others are read.
            match client.call::<()>(Call::Disable) {
                Err(e) if !e.is_gone() => return Err(e.to_string()),
                _ => {}
            }
        }
        let gone = match client.call::<Vec<EventReading>>(Call::Read) {
            Ok(readings) => {
                last = readings;
                false
            }
            Err(e) if e.is_gone() => true,
            Err(e) => return Err(e.to_string()),
        };
        let at = now.duration_since(start);
        if let (Some(due), Some(interval)) = (next_interval, args.interval)
            && (now >= due || over || gone)
        {
            let growth = totals(opened, &last, &before, args.per_vcpu);
            print(&interval_lines(at, at.saturating_sub(printed), &growth, args))?;
            before.clone_from(&last);
            printed = at;
            // A late reading does not make the next interval short.
            next_interval = Some((due + interval).max(now));
        }
        if over || gone {
            return Ok(Run {
                totals: totals(opened, &last, &[], args.per_vcpu),
                elapsed: at,
                woken,
                gone,
            });
        }
    }
}

/// The event's place in the list, and the vCPU unless all are summed.
type Row = (u32, Option<u32>);
/// What goes into a row.
type Parts<'o> = Vec<(&'o Opened, Part)>;

/// Counts of events, or their growth since `before`, for each vCPU or summed over all of them.
fn totals(opened: &[Opened], now: &[EventReading], before: &[EventReading], per_vcpu: bool) -> Vec<Total> {
    let find = |list: &[EventReading], handle| list.iter().find(|r| Some(r.handle) == handle).cloned();
    let mut sums: BTreeMap<Row, Parts<'_>> = BTreeMap::new();
    for o in opened {
        let part = match (o.handle, find(now, o.handle)) {
            (None, _) => Part::NotSupported,
            (Some(_), None) => Part::NotCounted,
            (Some(_), Some(now)) => Part::of(&now, find(before, o.handle).as_ref()),
        };
        let key = (o.index, per_vcpu.then_some(o.vcpu));
        sums.entry(key).or_default().push((o, part));
    }
    let total = |((_, vcpu), parts): (Row, Parts<'_>)| {
        let first = parts.first()?.0;
        let (counted, error_percent) = sum(parts.iter().map(|(_, p)| p));
        let unit = if first.nanoseconds {
            Unit::Nanoseconds
        } else {
            Unit::Count
        };
        Some(Total {
            name: first.name.clone(),
            vcpu,
            unit,
            counted,
            error_percent,
            backing: first.backing.clone(),
            estimate: first.estimate,
        })
    };
    sums.into_iter().filter_map(total).collect()
}

/// What one vCPU counted of an event.
#[derive(Clone, Copy, Debug)]
enum Part {
    NotSupported,
    NotCounted,
    Value {
        count: u64,
        enabled_ns: u64,
        running_ns: u64,
        standard_error: Option<f64>,
    },
}

impl Part {
    fn of(now: &EventReading, before: Option<&EventReading>) -> Self {
        let Some(estimate) = now.estimate.filter(|_| !now.failed) else {
            return Self::NotCounted;
        };
        let Some(before) = before else {
            return Self::Value {
                count: estimate,
                enabled_ns: now.enabled_ns,
                running_ns: now.running_ns,
                standard_error: now.standard_error,
            };
        };
        let value = now.value.saturating_sub(before.value);
        let enabled_ns = now.enabled_ns.saturating_sub(before.enabled_ns);
        let running_ns = now.running_ns.saturating_sub(before.running_ns);
        if running_ns == 0 {
            return Self::NotCounted;
        }
        // The interval's own share, as perf scales it.
        let count = u128::from(value) * u128::from(enabled_ns.max(running_ns)) / u128::from(running_ns);
        Self::Value {
            count: u64::try_from(count).unwrap_or(u64::MAX),
            enabled_ns,
            running_ns,
            standard_error: None,
        }
    }
}

/// The sum over vCPUs. One that is not counted leaves no sum: it would be short.
fn sum<'p>(parts: impl Iterator<Item = &'p Part>) -> (Counted, Option<f64>) {
    let (mut count, mut enabled, mut running) = (0u64, 0u64, 0u64);
    let mut variance = Some(0.0);
    for part in parts {
        match *part {
            Part::NotSupported => return (Counted::NotSupported, None),
            Part::NotCounted => return (Counted::NotCounted, None),
            Part::Value {
                count: n,
                enabled_ns,
                running_ns,
                standard_error,
            } => {
                count = count.saturating_add(n);
                enabled = enabled.saturating_add(enabled_ns);
                running = running.saturating_add(running_ns);
                variance = variance
                    .zip(standard_error)
                    .map(|(sum, error)| sum + error * error);
            }
        }
    }
    let error = variance
        .filter(|v| running < enabled && *v > 0.0 && count > 0)
        .map(|v: f64| 100.0 * v.sqrt() / count as f64);
    let counted = Counted::Value {
        count,
        enabled_ns: enabled,
        running_ns: running,
    };
    (counted, error)
}

/// What came in `length` before `at`.
fn interval_lines(at: Duration, length: Duration, totals: &[Total], args: &StatArgs) -> String {
    let mut out = String::new();
    let seconds = length.as_secs_f64();
    for total in totals {
        let time = format!("{}.{:09}", at.as_secs(), at.subsec_nanos());
        if args.json {
            let line = json_line(total, totals, seconds, Some(at.as_secs_f64()));
            let _ = writeln!(out, "{line}");
        } else if let Some(separator) = &args.field_separator {
            let line = csv_total(total, totals, seconds, args, separator);
            let _ = writeln!(out, "{time}{separator}{line}");
        } else {
            let line = plain(total, note(total, totals, seconds).as_deref());
            let _ = writeln!(out, "{time:>16} {}{line}", vcpu_column(total));
        }
    }
    out
}

fn vcpu_column(total: &Total) -> String {
    total
        .vcpu
        .map_or_else(String::new, |v| format!("{:<10} ", format!("VCPU{v}")))
}

fn plain(total: &Total, note: Option<&str>) -> String {
    stat_line(&total.name, &total.counted, total.unit, note, total.error_percent)
}

fn csv_total(total: &Total, all: &[Total], seconds: f64, args: &StatArgs, separator: &str) -> String {
    let vcpu = total
        .vcpu
        .map_or_else(String::new, |v| format!("VCPU{v}{separator}"));
    // A field of repeated runs only, and then of every line, as with perf: programs count fields.
    let error = (args.repeat > 1).then(|| total.error_percent.unwrap_or(0.0));
    let derived = derived(total, all, seconds);
    let derived = derived.as_ref().map(|d| (d.value, d.unit.as_str()));
    vcpu + &csv_line(&total.name, &total.counted, total.unit, error, derived, separator)
}

/// The fields of `perf stat -j`, and who counted.
fn json_line(total: &Total, all: &[Total], seconds: f64, at_s: Option<f64>) -> String {
    let mut object = serde_json::Map::new();
    let mut put = |key: &str, value| object.insert(key.into(), value);
    if let Some(at) = at_s {
        put("interval", json!(at));
    }
    if let Some(vcpu) = total.vcpu {
        put("vcpu", json!(vcpu));
    }
    let (value, running, share) = match total.counted {
        Counted::NotSupported => ("<not supported>".to_owned(), 0, 100.0),
        Counted::NotCounted => ("<not counted>".to_owned(), 0, 0.0),
        Counted::Value {
            count,
            enabled_ns,
            running_ns,
        } => {
            let value = match total.unit {
                Unit::Count => count.to_string(),
                Unit::Nanoseconds => format!("{:.6}", count as f64 / 1e6),
            };
            let share = running_percent(enabled_ns, running_ns).unwrap_or(100.0);
            (value, running_ns, share)
        }
    };
    put("counter-value", json!(value));
    let unit = match total.unit {
        Unit::Count => "",
        Unit::Nanoseconds => "msec",
    };
    put("unit", json!(unit));
    put("event", json!(total.name));
    if let Some(error) = total.error_percent {
        put("variance", json!(error));
    }
    put("event-runtime", json!(running));
    put("pcnt-running", json!(share));
    if let Some(derived) = derived(total, all, seconds) {
        put("metric-value", json!(derived.value));
        put("metric-unit", json!(derived.unit));
    }
    put("backing", json!(total.backing));
    serde_json::Value::Object(object).to_string()
}

/// All runs as one: the mean of each count, and its error over the runs.
fn merge(runs: &[Vec<Total>]) -> Vec<Total> {
    let Some(first) = runs.first() else {
        return Vec::new();
    };
    if runs.len() == 1 {
        return first.clone();
    }
    let merged = |(at, total): (usize, &Total)| {
        let value = |run: &Vec<Total>| match run.get(at)?.counted {
            Counted::Value {
                count,
                enabled_ns,
                running_ns,
            } => Some((count, enabled_ns, running_ns)),
            _ => None,
        };
        let values: Option<Vec<_>> = runs.iter().map(value).collect();
        let (counted, error_percent) = match (values, total.counted) {
            (Some(values), _) => {
                let counts: Vec<f64> = values.iter().map(|v| v.0 as f64).collect();
                let (mean, error) = mean_and_error(&counts);
                let n = values.len() as u64;
                let counted = Counted::Value {
                    count: mean.round() as u64,
                    enabled_ns: values.iter().map(|v| v.1).sum::<u64>() / n,
                    running_ns: values.iter().map(|v| v.2).sum::<u64>() / n,
                };
                (counted, error)
            }
            (None, Counted::NotSupported) => (Counted::NotSupported, None),
            // Not counted in some run: no mean.
            (None, _) => (Counted::NotCounted, None),
        };
        Total {
            counted,
            error_percent,
            ..total.clone()
        }
    };
    first.iter().enumerate().map(merged).collect()
}

fn final_table(vm: &str, runs: &[Vec<Total>], elapsed: &[f64], args: &StatArgs) -> String {
    let totals = merge(runs);
    let mut out = String::new();
    let (seconds, error) = mean_and_error(elapsed);
    if args.json {
        for total in &totals {
            let _ = writeln!(out, "{}", json_line(total, &totals, seconds, None));
        }
        return out;
    }
    if let Some(separator) = &args.field_separator {
        for total in &totals {
            let _ = writeln!(out, "{}", csv_total(total, &totals, seconds, args, separator));
        }
        return out;
    }
    let repeated = match runs.len() {
        0 | 1 => String::new(),
        n => format!(" ({n} runs)"),
    };
    let _ = writeln!(out, "\n Performance counter stats for VM '{vm}'{repeated}:\n");
    for total in &totals {
        let note = note(total, &totals, seconds);
        let _ = writeln!(out, "{}{}", vcpu_column(total), plain(total, note.as_deref()));
    }
    let _ = writeln!(out, "\n{}\n", elapsed_line(seconds, error));
    out
}

/// The time, with its error over repeated runs in as many places as the error has meaning.
fn elapsed_line(seconds: f64, error_percent: Option<f64>) -> String {
    match error_percent {
        None => format!("{seconds:>18.9} seconds time elapsed"),
        Some(percent) => {
            let error = seconds * percent / 100.0;
            let places = if error > 0.0 {
                (2.0 - error.log10().floor()).clamp(2.0, 9.0) as usize
            } else {
                9
            };
            format!("{seconds:>18.places$} +- {error:.places$} seconds time elapsed  ( +-{percent:6.2}% )")
        }
    }
}

/// What perf makes of a count and another one.
struct Derived {
    value: f64,
    unit: String,
    /// As it stands behind `#`.
    text: String,
}

/// What is said behind `#`: what perf derives; else who counts, if that is not the PMU.
fn note(total: &Total, all: &[Total], seconds: f64) -> Option<String> {
    if !matches!(total.counted, Counted::Value { .. }) {
        return None;
    }
    if total.estimate {
        return Some("  estimate, from samples".into());
    }
    if total.backing == "clock" {
        return Some("  guest time x TSC frequency".into());
    }
    derived(total, all, seconds).map(|d| d.text)
}

/// Counts for a second of the vCPUs' time on a CPU, in perf's units.
fn rate(count: f64, task_clock_ns: f64) -> Derived {
    let mut value = count / (task_clock_ns / 1e9);
    let mut prefix = "";
    for larger in ["K", "M", "G"] {
        if value < 1000.0 {
            break;
        }
        value /= 1000.0;
        prefix = larger;
    }
    let unit = format!("{prefix}/sec");
    Derived {
        text: format!("{value:8.3} {unit}"),
        value,
        unit,
    }
}

/// What perf derives, where both of its counts are there.
fn derived(total: &Total, all: &[Total], seconds: f64) -> Option<Derived> {
    let value = |name: &str| {
        let same = |t: &&Total| t.name == name && t.vcpu == total.vcpu;
        match all.iter().find(same)?.counted {
            Counted::Value { count, .. } if count > 0 => Some(count as f64),
            _ => None,
        }
    };
    let own = match total.counted {
        Counted::Value { count, .. } => count as f64,
        _ => return None,
    };
    let derived = |value: f64, unit: &str, text: String| {
        Some(Derived {
            value,
            unit: unit.to_owned(),
            text,
        })
    };
    match total.name.as_str() {
        "task-clock" | "cpu-clock" if seconds > 0.0 => {
            let cpus = own / 1e9 / seconds;
            derived(cpus, "CPUs utilized", format!("{cpus:8.3} CPUs utilized"))
        }
        "instructions" if value("cycles").is_some() => {
            let ipc = own / value("cycles")?;
            derived(ipc, "insn per cycle", format!("{ipc:8.2}  insn per cycle"))
        }
        "branch-misses" if value("branches").is_some() => {
            let percent = 100.0 * own / value("branches")?;
            let text = format!("{percent:8.2}% of all branches");
            derived(percent, "of all branches", text)
        }
        "cycles" | "cpu-cycles" => {
            let ghz = own / value("task-clock")?;
            derived(ghz, "GHz", format!("{ghz:8.3} GHz"))
        }
        _ if total.unit == Unit::Nanoseconds => None,
        _ => Some(rate(own, value("task-clock")?)),
    }
}

/// `--guest-view`.
fn guest_view(client: &mut Client, args: &StatArgs) -> Result<ExitStatus, String> {
    let asked: Generation = client.call(Call::GuestView).map_err(|e| e.to_string())?;
    let until = Instant::now() + VIEW_PATIENCE;
    let views = loop {
        let call = Call::GuestViewResult {
            generation: asked.generation,
        };
        let views: GuestViews = client.call(call).map_err(|e| e.to_string())?;
        if views.complete || Instant::now() > until {
            break views;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    if !views.complete {
        let (got, all) = (views.vcpus.len(), client.info().vcpus);
        log::warn!("only {got} of {all} vCPUs answered");
    }
    let wanted = |v: &&VcpuView| args.vcpu.as_ref().is_none_or(|list| list.0.contains(&v.vcpu));
    let mut out = String::new();
    for view in views.vcpus.iter().filter(wanted) {
        if args.json {
            let line = serde_json::to_string(view).map_err(|e| e.to_string())?;
            let _ = writeln!(out, "{line}");
        } else {
            out.push_str(&view_table(view));
        }
    }
    print(&out)?;
    Ok(DONE)
}

fn view_table(view: &VcpuView) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "vCPU {}: {} PMIs delivered", view.vcpu, thousands(view.pmis));
    let _ = writeln!(
        out,
        "  {:<8} {:<24} {:<8} {:<9} {:>24} {:>8} {:>10} {:>10}",
        "counter", "event", "state", "backing", "value", "running", "overflows", "PMIs asked"
    );
    for c in &view.counters {
        let state = match (c.enabled, c.allowed) {
            (_, false) => "filtered",
            (true, true) => "on",
            (false, true) => "off",
        };
        let backing = c.backing.as_deref().unwrap_or("-");
        let running = match c.enabled_ns {
            0 => "-".to_owned(),
            enabled => format!("{:.1}%", 100.0 * c.running_ns as f64 / enabled as f64),
        };
        // A counter that nobody counts for stays where the guest put it: its value is no count.
        let value = if backing == "none" {
            "<not supported>".to_owned()
        } else {
            thousands(c.value)
        };
        let _ = writeln!(
            out,
            "  {:<8} {:<24} {state:<8} {backing:<9} {value:>24} {running:>8} {:>10} {:>10}",
            c.counter,
            c.event.as_deref().unwrap_or("-"),
            thousands(c.overflows),
            thousands(c.pmi_requests)
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(index: u32, vcpu: u32, handle: Option<u32>) -> Opened {
        Opened {
            handle,
            unsupported: handle.is_none().then(|| "why".into()),
            name: format!("e{index}"),
            index,
            vcpu,
            backing: "hardware".into(),
            nanoseconds: false,
            estimate: false,
            id: 0,
            kind: 0,
            config: 0,
            ring: false,
            no_ring: None,
        }
    }

    fn reading(handle: u32, value: u64, enabled_ns: u64, running_ns: u64) -> EventReading {
        EventReading {
            handle,
            value,
            enabled_ns,
            running_ns,
            estimate: (running_ns > 0).then(|| value * enabled_ns / running_ns),
            standard_error: Some(if running_ns < enabled_ns { 3.0 } else { 0.0 }),
            failed: false,
        }
    }

    /// A sum with a vCPU missing would be short without saying so.
    #[test]
    fn a_sum_needs_every_vcpu() {
        let events = [
            opened(0, 0, Some(0)),
            opened(0, 1, Some(1)),
            opened(1, 0, None),
            opened(1, 1, None),
        ];
        let both = [reading(0, 5, 10, 10), reading(1, 7, 10, 10)];
        let sums = totals(&events, &both, &[], false);
        assert_eq!(sums.len(), 2);
        assert!(matches!(sums[0].counted, Counted::Value { count: 12, .. }));
        assert_eq!(sums[1].counted, Counted::NotSupported);
        let one = [reading(0, 5, 10, 10), reading(1, 0, 10, 0)];
        assert_eq!(totals(&events, &one, &[], false)[0].counted, Counted::NotCounted);
        let each = totals(&events, &one, &[], true);
        assert!(matches!(each[0].counted, Counted::Value { count: 5, .. }));
        assert_eq!(each[1].counted, Counted::NotCounted);
    }

    #[test]
    fn a_scaled_sum_carries_its_error() {
        let events = [opened(0, 0, Some(0)), opened(0, 1, Some(1))];
        let readings = [reading(0, 50, 10, 5), reading(1, 100, 10, 10)];
        let sums = totals(&events, &readings, &[], false);
        let expected = Counted::Value {
            count: 200,
            enabled_ns: 20,
            running_ns: 15,
        };
        assert_eq!(sums[0].counted, expected);
        assert!((sums[0].error_percent.unwrap() - 1.5).abs() < 1e-9);
    }

    #[test]
    fn an_interval_is_what_came_since_the_last() {
        let events = [opened(0, 0, Some(0))];
        let (before, now) = ([reading(0, 50, 100, 100)], [reading(0, 80, 200, 150)]);
        let expected = Counted::Value {
            count: 60,
            enabled_ns: 100,
            running_ns: 50,
        };
        assert_eq!(totals(&events, &now, &before, false)[0].counted, expected);
        assert_eq!(totals(&events, &now, &now, false)[0].counted, Counted::NotCounted);
    }

    #[test]
    fn repeated_runs_have_a_mean_only_if_all_were_counted() {
        let total = |counted| Total {
            name: "e".into(),
            vcpu: None,
            unit: Unit::Count,
            counted,
            error_percent: None,
            backing: "hardware".into(),
            estimate: false,
        };
        let value = |count| Counted::Value {
            count,
            enabled_ns: 1,
            running_ns: 1,
        };
        let merged = merge(&[vec![total(value(10))], vec![total(value(20))]]);
        assert!(matches!(merged[0].counted, Counted::Value { count: 15, .. }));
        assert!((merged[0].error_percent.unwrap() - 100.0 / 3.0).abs() < 1e-9);
        let merged = merge(&[vec![total(value(10))], vec![total(Counted::NotCounted)]]);
        assert_eq!(merged[0].counted, Counted::NotCounted);
    }

    fn count_of(name: &str, count: u64, unit: Unit) -> Total {
        Total {
            name: name.into(),
            vcpu: None,
            unit,
            counted: Counted::Value {
                count,
                enabled_ns: 1,
                running_ns: 1,
            },
            error_percent: None,
            backing: "software".into(),
            estimate: false,
        }
    }

    /// The lines that perf 6.1 printed for the same counts.
    #[test]
    fn notes_are_perf_s() {
        let all = [
            count_of("task-clock", 720_000, Unit::Nanoseconds),
            count_of("context-switches", 1, Unit::Count),
            count_of("page-faults", 75, Unit::Count),
            count_of("cycles", 2_160_000, Unit::Count),
        ];
        let line = |at: usize| plain(&all[at], note(&all[at], &all, 0.24).as_deref());
        assert_eq!(
            line(0),
            "              0.72 msec task-clock                       #    0.003 CPUs utilized"
        );
        assert_eq!(
            line(1),
            "                 1      context-switches                 #    1.389 K/sec"
        );
        assert_eq!(
            line(2),
            "                75      page-faults                      #  104.167 K/sec"
        );
        assert_eq!(
            line(3),
            "         2,160,000      cycles                           #    3.000 GHz"
        );
        // Who counted goes before what could be derived.
        let clock = Total {
            backing: "clock".into(),
            ..all[3].clone()
        };
        assert!(plain(&clock, note(&clock, &all, 0.24).as_deref()).contains("TSC frequency"));
    }

    #[test]
    fn elapsed_time_has_as_many_places_as_its_error_allows() {
        assert_eq!(
            elapsed_line(0.207_887_829, None),
            "       0.207887829 seconds time elapsed"
        );
        assert_eq!(
            elapsed_line(0.109_24, Some(1.318)),
            "           0.10924 +- 0.00144 seconds time elapsed  ( +-  1.32% )"
        );
    }
}
