//! `perfvisor stat --replay`: counts the same time window after a snapshot in several passes.
//!
//! Each pass restores the snapshot and counts some of the events while the guest runs for the
//! duration of the window. A PMU has few counters, so a pass counts only as many events as can be
//! counted without multiplexing. Further passes count the remaining events. Unlike with
//! multiplexing, no count is scaled.

use std::collections::BTreeMap;
use std::io::{self, Read as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use control_api::client::{Client, ClientError, REPLY_TIMEOUT};
use control_api::counts::VcpuCounts;
use control_api::events::list::{EventListError, group_texts};
use control_api::protocol::{EventReading, OpenedEvent, VmInfo, VmState};
use control_api::{request, socket_dir};

use super::args::StatArgs;
use super::lines::final_table;
use super::totals::totals;
use super::{OperatorCommandError, WaitResult, print, wait_until};
use crate::signals::StopSignals;

/// Polling interval for the start and stop of a VM.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Maximum number of bytes that are read of the messages of a VM.
const MAX_MESSAGES: u64 = 64 << 10;

/// Offset between the event handles of consecutive passes, which makes the handles of all passes
/// unique.
const HANDLES_PER_PASS: u32 = 1 << 16;

/// Errors of `perfvisor stat --replay`.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    #[error("--replay requires --duration")]
    NoDuration,
    #[error("--replay")]
    Start(#[source] io::Error),
    /// The restored VM of a pass terminated before its events were counted.
    #[error("--replay: {0}")]
    Restore(String),
    #[error("the guest ended {} ms after the snapshot; choose a shorter --duration", .0.as_millis())]
    Ended(Duration),
    #[error("interrupted before every event was counted")]
    Interrupted,
    /// Single-stepping does not count an event. Contains the event and the reason.
    #[error("--backing exact: cannot count {0}: {1}")]
    NotExact(String, String),
    #[error("--backing exact: the snapshot has {0} vCPUs, of which one can be counted exactly")]
    SeveralVcpus(u32),
    #[error(transparent)]
    Events(#[from] EventListError),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Command(#[from] OperatorCommandError),
}

/// Counts the events of `args` from the snapshot in `directory`, [`StatArgs::repeat`] times.
pub(super) fn replay(args: &StatArgs, directory: &Path, signals: &StopSignals) -> Result<(), ReplayError> {
    let window = args.duration.ok_or(ReplayError::NoDuration)?;
    let replay = Replay {
        args,
        directory,
        window,
        signals,
    };
    let groups = group_texts(&args.events)?;
    let passes = cover(groups.len(), |now| {
        let pass = replay.pass(&groups, now)?;
        let shares = pass.shares();
        Ok::<_, ReplayError>((pass, shares))
    })?;
    let mut first = Run::default();
    let mut plan: Vec<Vec<usize>> = Vec::new();
    for (pass, complete) in passes {
        first.add(pass, &complete);
        plan.push(complete);
    }
    let mut runs = vec![first];
    for _ in 1..args.repeat {
        let mut run = Run::default();
        for groups_of_pass in &plan {
            run.add(replay.pass(&groups, groups_of_pass)?, groups_of_pass);
        }
        runs.push(run);
    }
    log::info!("passes per run: {}", plan.len());
    for (name, why) in runs
        .iter()
        .flat_map(|run| &run.opened)
        .filter_map(refusal)
        .collect::<BTreeMap<_, _>>()
    {
        log::info!("cannot count {name}: {why}");
    }
    let elapsed: Vec<f64> = runs.iter().map(Run::mean_window).collect();
    let counts: Vec<_> = runs
        .iter()
        .map(|run| totals(&run.opened, &run.readings, &[], args.per_vcpu))
        .collect();
    let table = final_table(&directory.display().to_string(), &counts, &elapsed, args);
    print(&table).map_err(OperatorCommandError::from)?;
    Ok(())
}

/// Share of the time in which each event group was counted, by index of the group.
type GroupShares = BTreeMap<usize, f64>;

/// Measures event groups in passes until each group has been counted all the time in one pass.
/// Returns each pass with the indices of the groups whose counts are taken from it.
///
/// `groups` is the number of groups. `measure` runs a pass with the groups of the given indices. It
/// returns the pass and, for each group that can be counted, the share of time in which the group
/// was counted. A group that is not counted all the time even in a pass of its own keeps the counts
/// from that pass.
fn cover<P, E>(
    groups: usize,
    mut measure: impl FnMut(&[usize]) -> Result<(P, GroupShares), E>,
) -> Result<Vec<(P, Vec<usize>)>, E> {
    let mut passes = Vec::new();
    let mut waiting: Vec<usize> = (0..groups).collect();
    let mut at_once = groups;
    while !waiting.is_empty() {
        let now: Vec<usize> = waiting.iter().copied().take(at_once).collect();
        let (pass, mut shares) = measure(&now)?;
        shares.retain(|_, share| *share < 1.0);
        if now.len() > 1 && !shares.is_empty() {
            at_once = groups_per_pass(shares.values().sum(), shares.len());
        } else {
            shares.clear();
        }
        let complete: Vec<usize> = now
            .into_iter()
            .filter(|group| !shares.contains_key(group))
            .collect();
        if !complete.is_empty() {
            waiting.retain(|group| !complete.contains(group));
            passes.push((pass, complete));
        }
    }
    Ok(passes)
}

/// Returns the number of groups for the next pass. In the previous pass, `incomplete` groups shared
/// `slots` counters of the PMU by multiplexing. The result is at least 1 and otherwise less than
/// `incomplete`, which bounds the number of passes.
fn groups_per_pass(slots: f64, incomplete: usize) -> usize {
    let most = incomplete.saturating_sub(1).max(1);
    (1..=most).rev().find(|&n| n as f64 <= slots).unwrap_or(1)
}

fn refusal(event: &OpenedEvent) -> Option<(&str, &str)> {
    Some((&event.name, event.unsupported.as_deref()?))
}

/// Parameters that are common to all passes.
struct Replay<'a> {
    args: &'a StatArgs,
    directory: &'a Path,
    window: Duration,
    signals: &'a StopSignals,
}

/// Events of one pass and their final readings. An event index is a position in the list of the
/// events of all passes.
struct Pass {
    opened: Vec<OpenedEvent>,
    readings: Vec<EventReading>,
    /// Index of each event's group, by the index of the event.
    group_of: BTreeMap<u32, usize>,
    window: Duration,
}

/// One run of a measurement, whose passes together count every event once.
#[derive(Default)]
struct Run {
    opened: Vec<OpenedEvent>,
    readings: Vec<EventReading>,
    windows: Vec<Duration>,
}

impl Run {
    /// Adds the events of `groups` from a pass.
    fn add(&mut self, pass: Pass, groups: &[usize]) {
        let base = u32::try_from(self.windows.len())
            .unwrap_or(u32::MAX)
            .saturating_mul(HANDLES_PER_PASS);
        let wanted = |event: &OpenedEvent| {
            pass.group_of
                .get(&event.index)
                .is_some_and(|g| groups.contains(g))
        };
        for mut event in pass.opened.iter().filter(|event| wanted(event)).cloned() {
            let reading = pass.readings.iter().find(|r| Some(r.handle) == event.handle);
            event.handle = event.handle.map(|handle| base.saturating_add(handle));
            self.readings.extend(reading.cloned().map(|reading| EventReading {
                handle: base.saturating_add(reading.handle),
                ..reading
            }));
            self.opened.push(event);
        }
        self.windows.push(pass.window);
    }

    fn mean_window(&self) -> f64 {
        let sum: Duration = self.windows.iter().sum();
        sum.as_secs_f64() / self.windows.len().max(1) as f64
    }
}

impl Pass {
    /// Returns, for each group, the share of time in which its least-counted event was counted.
    /// Events that cannot be counted are ignored.
    fn shares(&self) -> GroupShares {
        let mut shares = GroupShares::new();
        for event in &self.opened {
            let (Some(group), Some(handle)) = (self.group_of.get(&event.index), event.handle) else {
                continue;
            };
            let Some(reading) = self.readings.iter().find(|r| r.handle == handle) else {
                continue;
            };
            let share = if reading.running_ns >= reading.enabled_ns {
                1.0
            } else {
                reading.running_ns as f64 / reading.enabled_ns as f64
            };
            let least: &mut f64 = shares.entry(*group).or_insert(1.0);
            *least = least.min(share);
        }
        shares
    }
}

impl Replay<'_> {
    /// Performs a pass: restores the snapshot, lets the guest run for the window, and counts the
    /// groups whose indices are in `now`.
    fn pass(&self, groups: &[(&str, usize)], now: &[usize]) -> Result<Pass, ReplayError> {
        let is_exact = self.args.backing.is_some();
        let mut vm = RestoredVm::start(self.directory, is_exact)?;
        if is_exact {
            vm.check_is_steppable()?;
        }
        let texts: Vec<&str> = now.iter().map(|&group| groups[group].0).collect();
        let events = texts.join(",");
        log::info!("counting {events}");
        let mut opened: Vec<OpenedEvent> = vm.client.call(request::Open {
            events,
            vcpus: self.args.vcpu.as_ref().map(|list| list.0.clone()),
            whole: self.args.vcpu.is_none() && !self.args.per_vcpu,
            sampling: None,
        })?;
        if let Some((name, why)) = opened.iter().find_map(refusal).filter(|_| is_exact) {
            return Err(ReplayError::NotExact(name.to_owned(), why.to_owned()));
        }
        let positions = positions(groups, now);
        for event in &mut opened {
            event.index = positions.get(event.index as usize).map_or(event.index, |at| at.0);
        }
        let () = vm.client.call(request::Enable)?;
        let start = Instant::now();
        let _: VmInfo = vm.client.call(request::Resume)?;
        let woken = wait_until(start + self.window, self.signals);
        // Pausing the VM stops all events at the same time.
        vm.pause(start)?;
        let window = start.elapsed();
        if woken == WaitResult::Signal {
            return Err(ReplayError::Interrupted);
        }
        let () = vm.client.call(request::Disable)?;
        if is_exact {
            vm.report_lost_steps()?;
        }
        Ok(Pass {
            readings: vm.client.call(request::Read)?,
            opened,
            group_of: positions.into_iter().collect(),
            window,
        })
    }
}

/// Returns, for each event of the groups `now`, its position in the list of all events and the
/// index of its group.
fn positions(groups: &[(&str, usize)], now: &[usize]) -> Vec<(u32, usize)> {
    let mut before = 0u32;
    let mut positions = Vec::new();
    for (group, (_, events)) in groups.iter().enumerate() {
        let events = u32::try_from(*events).unwrap_or(0);
        if now.contains(&group) {
            positions.extend((before..before + events).map(|at| (at, group)));
        }
        before += events;
    }
    positions
}

/// A VM that was restored for one pass. The VM is killed when the value is dropped.
struct RestoredVm {
    child: Child,
    messages: Option<JoinHandle<String>>,
    client: Client,
}

impl RestoredVm {
    /// Restores the snapshot in `directory` to a paused VM without a console. The VM does not
    /// outlive the calling thread. If `is_exact` is set, the VM counts by single-stepping.
    fn start(directory: &Path, is_exact: bool) -> Result<Self, ReplayError> {
        let name = format!("replay-{}", std::process::id());
        // `/proc/self/exe` refers to the running program even if its file has been replaced.
        let mut child = Command::new("/proc/self/exe")
            .arg(format!("--parent={}", std::process::id()))
            .args(["run", "--restore-paused", "--console=none", "--stop-timeout=0"])
            .arg(format!("--name={name}"))
            .arg("--restore")
            .arg(directory)
            .args(
                is_exact
                    .then_some(["--backing=exact", "--operator-steps"])
                    .into_iter()
                    .flatten(),
            )
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(ReplayError::Start)?;
        let messages = child.stderr.take().map(|stderr| {
            thread::spawn(move || {
                let mut text = Vec::new();
                let _ = stderr.take(MAX_MESSAGES).read_to_end(&mut text);
                String::from_utf8_lossy(&text).into_owned()
            })
        });
        match wait_for_vm(&mut child, &name) {
            Ok(Some(client)) => Ok(Self {
                child,
                messages,
                client,
            }),
            ended => {
                let _ = child.kill();
                let _ = child.wait();
                let said = messages.and_then(|reader| reader.join().ok()).unwrap_or_default();
                ended?;
                Err(ReplayError::Restore(last_message(&said)))
            }
        }
    }

    /// Checks that the VM has one vCPU, because the order in which several vCPUs are stepped
    /// differs in each pass.
    fn check_is_steppable(&mut self) -> Result<(), ReplayError> {
        let info: VmInfo = self.client.call(request::Status)?;
        match info.vcpus {
            1 => Ok(()),
            vcpus => Err(ReplayError::SeveralVcpus(vcpus)),
        }
    }

    /// Logs a warning if the VM lost track of the guest during single steps, because the
    /// instructions of these steps are not counted.
    fn report_lost_steps(&mut self) -> Result<(), ReplayError> {
        let counts: Vec<VcpuCounts> = self.client.call(request::Counts)?;
        let lost: u64 = counts.iter().map(|vcpu| vcpu.steps_lost).sum();
        if lost > 0 {
            log::warn!("{lost} single steps lost track; what they executed is not counted");
        }
        Ok(())
    }

    /// Pauses the VM and waits until no vCPU runs. `start` is the time at which the VM was resumed.
    fn pause(&mut self, start: Instant) -> Result<(), ReplayError> {
        let mut info: Result<VmInfo, ClientError> = self.client.call(request::Pause);
        loop {
            match info {
                Ok(info) if info.state == VmState::Paused && info.parked >= info.vcpus => return Ok(()),
                Ok(info) if info.state == VmState::Paused => {}
                Ok(_) => return Err(ReplayError::Ended(start.elapsed())),
                Err(e) if e.is_gone() => return Err(ReplayError::Ended(start.elapsed())),
                Err(e) => return Err(e.into()),
            }
            thread::sleep(POLL_INTERVAL);
            info = self.client.call(request::Status);
        }
    }
}

impl Drop for RestoredVm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        drop(self.messages.take().map(JoinHandle::join));
    }
}

/// Waits until the VM answers. Returns `None` if the VM has terminated.
fn wait_for_vm(child: &mut Child, name: &str) -> Result<Option<Client>, ReplayError> {
    let socket = socket_dir::socket_path(&socket_dir::directory(), name);
    loop {
        if child.try_wait().map_err(ReplayError::Start)?.is_some() {
            return Ok(None);
        }
        match Client::connect_at(&socket, None, REPLY_TIMEOUT) {
            Ok(client) if client.info().pid == child.id() => return Ok(Some(client)),
            _ => thread::sleep(POLL_INTERVAL),
        }
    }
}

/// Returns the last line of a VM's messages without the name of the program.
fn last_message(said: &str) -> String {
    let line = said.lines().rfind(|line| !line.trim().is_empty());
    let line = line.unwrap_or("the VM ended without a message");
    let line = line.strip_prefix("perfvisor: ").unwrap_or(line);
    let line = line.strip_prefix("error: ").unwrap_or(line);
    line.strip_prefix("--restore: ").unwrap_or(line).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a pass with the groups `now` on a PMU with `slots` counters. Every third group
    /// does not need a counter.
    fn on_pmu(slots: usize, now: &[usize]) -> GroupShares {
        let counted = now.iter().filter(|group| **group % 3 != 0).count();
        let share = |group: &usize| match group % 3 {
            0 => 1.0,
            _ => (slots as f64 / counted as f64).min(1.0),
        };
        now.iter().map(|group| (*group, share(group))).collect()
    }

    proptest::proptest! {
        #[test]
        fn each_group_is_counted_once_and_completely(groups in 0usize..60, slots in 0usize..12) {
            let mut measured = 0;
            let passes = cover(groups, |now| {
                measured += 1;
                Ok::<_, ()>((on_pmu(slots, now), on_pmu(slots, now)))
            })
            .unwrap();
            let mut taken: Vec<usize> = passes.iter().flat_map(|(_, groups)| groups.clone()).collect();
            taken.sort_unstable();
            assert_eq!(taken, (0..groups).collect::<Vec<_>>());
            for (shares, complete) in &passes {
                assert!(complete.iter().all(|group| shares[group] >= 1.0 || slots == 0));
            }
            // After the first pass, which determines the number of counters, every pass uses all
            // counters.
            let least = (groups - groups.div_ceil(3)).div_ceil(slots.max(1));
            assert!(measured <= 2 * least + 2, "{measured} passes, {least} at least");
        }
    }

    #[test]
    fn events_keep_their_position_in_the_whole_list() {
        let groups = group_texts("cycles,{r1,r2}:u,cpu/event=3,umask=1/").unwrap();
        assert_eq!(positions(&groups, &[1, 2]), [(1, 1), (2, 1), (3, 2)]);
        assert_eq!(positions(&groups, &[0]), [(0, 0)]);
    }
}
