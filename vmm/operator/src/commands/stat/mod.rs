//! `perfvisor stat`: counts events on a VM's vCPUs, with the output format of `perf stat`.

mod args;
mod counted;
mod guest;
mod lines;
mod metrics;
mod replay;
mod totals;

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::all::for_each_vm;
use super::select::{ControlGroup, name_or_pid};
use super::{DONE, OperatorCommandError, WaitResult, connect, is_reader_closed, print, wait_until};
use crate::exit::ExitStatus;
use crate::signals::StopSignals;
use crate::vendor;
pub use args::StatArgs;
use control_api::client::Client;
use control_api::protocol::EventReading;
use control_api::request;
use counted::CountedEvents;
use lines::{final_table, interval_lines};
pub use replay::ReplayError;
use totals::{Total, totals};

/// Interval at which the events are read. If the VM terminates, the last readings are printed.
const READ_INTERVAL: Duration = Duration::from_millis(250);

/// Errors of `perfvisor stat`.
#[derive(Debug, thiserror::Error)]
pub enum StatError {
    #[error(transparent)]
    Command(#[from] OperatorCommandError),
    #[error("--repeat requires --duration and cannot be used with --interval")]
    Repeat,
    #[error(transparent)]
    Replay(#[from] ReplayError),
}

/// Counts events of a VM and prints the counts.
///
/// # Errors
/// Returns [`StatError`] if the events cannot be counted.
pub fn stat(args: &StatArgs) -> Result<ExitStatus, StatError> {
    let args = &StatArgs {
        events: vendor::resolve_vendor_events(&args.events).map_err(OperatorCommandError::from)?,
        ..args.clone()
    };
    if let Some(directory) = &args.replay {
        let signals = StopSignals::block().map_err(OperatorCommandError::Signals)?;
        replay::replay(args, directory, &signals)?;
        return Ok(DONE);
    }
    if args.repeat > 1 && (args.duration.is_none() || args.interval.is_some()) {
        return Err(StatError::Repeat);
    }
    Ok(count(args)?)
}

fn count(args: &StatArgs) -> Result<ExitStatus, OperatorCommandError> {
    let signals = StopSignals::block().map_err(OperatorCommandError::Signals)?;
    let cgroup = args.cgroup.as_deref().map(ControlGroup::parse).transpose()?;
    if args.all || cgroup.is_some() {
        if wants_header(args) {
            print(&format!("{:<16} {}", "# VM", header(args)))?;
        }
        let (signals, tables) = (signals.visible_to_all_threads(), Mutex::new(BTreeMap::new()));
        let status = for_each_vm(|vm, client| {
            let pid = client.info().pid;
            if cgroup.as_ref().is_some_and(|cgroup| !cgroup.contains(pid)) {
                return Ok(DONE);
            }
            let table = count_one(args, client, &signals, Some(&vm.label()))?;
            let mut tables = tables.lock().unwrap_or_else(PoisonError::into_inner);
            tables.insert(vm.label(), table);
            Ok::<_, OperatorCommandError>(DONE)
        })?;
        let tables = tables.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(cgroup) = args.cgroup.as_ref().filter(|_| tables.is_empty()) {
            return Err(OperatorCommandError::NoVmInCgroup(cgroup.clone()));
        }
        print(&tables.into_values().collect::<String>())?;
        return Ok(status);
    }
    let name = name_or_pid(args.name.as_deref(), args.pid);
    let mut client = connect(name.as_deref(), args.socket.as_deref())?;
    if args.guest_view {
        return guest::view(&mut client, args);
    }
    print(&count_one(args, client, &signals, None)?)?;
    Ok(DONE)
}

/// Returns whether the intervals are printed as a text table, which has a header line.
fn wants_header(args: &StatArgs) -> bool {
    args.interval.is_some() && !args.json && !args.metric_only && args.field_separator.is_none()
}

/// Returns the header line of the interval table.
fn header(args: &StatArgs) -> String {
    let vcpu = if args.per_vcpu { " VCPU      " } else { "" };
    format!("#           time{vcpu}             counts unit events\n")
}

/// Prefixes each line of output with the VM's label, if several VMs are counted.
fn label_lines(lines: &str, label: Option<&str>, args: &StatArgs) -> String {
    let Some(label) = label else {
        return lines.to_owned();
    };
    let tag = |line: &str| match (line.strip_prefix('{'), &args.field_separator) {
        (Some(rest), _) if args.json => format!("{{\"vm\":\"{label}\",{rest}\n"),
        (_, Some(separator)) => format!("{label}{separator}{line}\n"),
        _ => format!("{label:<16} {line}\n"),
    };
    lines.lines().map(tag).collect()
}

/// Counts events on one VM and returns the final output. With several VMs, `label` is the label of
/// this VM.
fn count_one(
    args: &StatArgs,
    mut client: Client,
    signals: &StopSignals,
    label: Option<&str>,
) -> Result<String, OperatorCommandError> {
    let mut runs: Vec<Vec<Total>> = Vec::new();
    let mut elapsed = Vec::new();
    let mut gone = false;
    let mut unsupported = BTreeMap::new();
    for _ in 0..args.repeat {
        let mut events = CountedEvents::open(&mut client, args)?;
        let run = measure_once(&mut client, args, &mut events, signals, label)?;
        unsupported.extend(events.unsupported());
        elapsed.push(run.elapsed.as_secs_f64());
        runs.push(run.totals);
        gone = run.gone;
        if gone || run.woken == WaitResult::Signal {
            break;
        }
        let () = client.call(request::Close)?;
    }
    let table = match args.interval {
        Some(_) => String::new(),
        None => {
            let table = final_table(label.unwrap_or(&client.info().name), &runs, &elapsed, args);
            let for_programs = args.json || args.field_separator.is_some();
            label_lines(&table, label.filter(|_| for_programs), args)
        }
    };
    for (name, why) in unsupported {
        log::info!("cannot count {name}: {why}");
    }
    if gone {
        log::warn!(
            "the VM has exited; the counts are at most {} ms older than its end",
            READ_INTERVAL.as_millis()
        );
    }
    Ok(table)
}

struct StatMeasurement {
    totals: Vec<Total>,
    elapsed: Duration,
    woken: WaitResult,
    gone: bool,
}

/// Performs one measurement and prints its intervals.
fn measure_once(
    client: &mut Client,
    args: &StatArgs,
    events: &mut CountedEvents,
    signals: &StopSignals,
    label: Option<&str>,
) -> Result<StatMeasurement, OperatorCommandError> {
    let () = client.call(request::Enable)?;
    let start = Instant::now();
    log::info!("counting of {} has started", client.info().name);
    let end = args.duration.map(|d| start + d);
    let mut next_interval = args.interval.map(|i| start + i);
    let mut before: Vec<EventReading> = Vec::new();
    let mut printed = Duration::ZERO;
    if label.is_none() && wants_header(args) {
        print(&header(args))?;
    }
    loop {
        let look = Instant::now() + READ_INTERVAL;
        let until = [end, next_interval]
            .into_iter()
            .flatten()
            .fold(look, Instant::min);
        let woken = wait_until(until, signals);
        let now = Instant::now();
        let over = woken == WaitResult::Signal || end.is_some_and(|end| now >= end) || is_reader_closed();
        if over {
            // Stop all events before the first one is read, so that they cover the same period.
            match client.call(request::Disable) {
                Err(e) if !e.is_gone() => return Err(e.into()),
                _ => {}
            }
        }
        if args.per_vcpu && args.vcpu.is_none() {
            events.join(client)?;
        }
        let gone = match events.read(client) {
            Ok(()) => false,
            Err(e) if e.is_gone() => !(woken != WaitResult::Signal && events.follow(client, args)?),
            Err(e) => return Err(e.into()),
        };
        let at = now.duration_since(start);
        if let (Some(due), Some(interval)) = (next_interval, args.interval)
            && (now >= due || over || gone)
        {
            let growth = totals(events.opened(), events.readings(), &before, args.per_vcpu);
            let lines = interval_lines(at, at.saturating_sub(printed), &growth, args);
            print(&label_lines(&lines, label, args))?;
            events.readings().clone_into(&mut before);
            printed = at;
            // Keep the schedule after a late reading, but do not catch up on intervals that were
            // missed completely.
            next_interval = Some((due + interval).max(now));
        }
        if over || gone {
            return Ok(StatMeasurement {
                totals: totals(events.opened(), events.readings(), &[], args.per_vcpu),
                elapsed: at,
                woken,
                gone,
            });
        }
    }
}
