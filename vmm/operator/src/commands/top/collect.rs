//! Collects the data that `perfvisor top` displays for one VM, over its control socket.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use perf_core::record::{DecodedRecord, Sample};

use super::args::TopArgs;
use super::names::{CodeLocation, LiveSymbols, MAX_LOCATIONS};
use super::rows::{EventRateCell, TopExitRow, TopSymbolRow, TopVcpuRow, TopVmData};
use crate::commands::exits::ExitObserver;
use crate::commands::exits::sums::{ExitMaxima, ExitTotals};
use crate::commands::migrate::find_moved;
use crate::commands::{NAP, OperatorCommandError, one_line};
use crate::sampling::{VcpuRing, check_sampling_support, sample_mappings, wait_for_kernel};
use control_api::client::{Client, ClientError};
use control_api::protocol::{
    EventReading, KernelState, OpenedEvent, PluggedVcpuEvents, RingLoss, SamplingParams, SnapshotId,
    VcpuView, VmGuestCounters, VmInfo,
};
use control_api::request;
use guest_profile::export::NO_PID;
use guest_profile::sample::SampleRawData;

/// Events counted on each vCPU in addition to sampling, in column order.
const COUNTED: &str = "task-clock,steal-ns,cycles,kvm:exits";
/// Size of the ring of each vCPU, in pages.
const RING_PAGES: u32 = 64;
/// Factor by which each update reduces the weights of earlier samples.
const DECAY: f64 = 7.0 / 8.0;
/// Weight of samples below which a code location is dropped.
const MIN_WEIGHT: f64 = 1e-3;
/// Maximum number of processes whose names are kept.
const MAX_PROCESS_NAMES: usize = 1 << 14;
/// Timeout for the VM to find the guest kernel before the first update.
const KERNEL_PATIENCE: Duration = Duration::from_secs(10);
/// Timeout for the vCPUs to report their guest counters.
const VIEW_PATIENCE: Duration = Duration::from_millis(500);

/// Result of a data collection: new data, or the end of the VM.
pub(super) enum CollectResult {
    Screen(Box<TopVmData>),
    Gone,
}

/// The connection to a VM and the collected data.
pub(super) struct Collector {
    client: Client,
    rings: Vec<VcpuRing>,
    counted: Vec<OpenedEvent>,
    names: LiveSymbols,
    /// Decayed weight and number of samples of each location.
    places: HashMap<CodeLocation, (f64, u64)>,
    /// Process names by process ID.
    processes: HashMap<u32, String>,
    /// Number of samples of each vCPU since the last update.
    by_vcpu: BTreeMap<u32, u64>,
    samples: u64,
    lost: u64,
    before: Vec<EventReading>,
    before_at: Instant,
    exits: ExitObserver,
    exits_before: ExitTotals,
    longest: ExitMaxima,
    /// vCPUs selected by the user; `None` for all.
    only: Option<Vec<u32>>,
}

impl Collector {
    /// Opens and enables the events, unless `stop` is set.
    pub(super) fn open(
        mut client: Client,
        args: &TopArgs,
        stop: &AtomicBool,
    ) -> Result<Self, OperatorCommandError> {
        let vcpus = args.vcpu.as_ref().map(|list| list.0.clone());
        let sampling = SamplingParams {
            rate: args.frequency,
            frequency: true,
            chain_every: 1,
            ..SamplingParams::default()
        };
        let sampled: Vec<OpenedEvent> = client.call(request::Open {
            events: args.event.clone(),
            vcpus: vcpus.clone(),
            whole: false,
            sampling: Some(sampling),
        })?;
        check_sampling_support(&sampled)?;
        let counted: Vec<OpenedEvent> = client.call(request::Open {
            events: COUNTED.into(),
            // A VM-wide event also counts vCPUs that are hot-plugged later, from their first
            // instruction.
            whole: vcpus.is_none(),
            vcpus: vcpus.clone(),
            sampling: None,
        })?;
        let exits = ExitObserver::begin(&mut client)?;
        let kernel = wait_for_kernel(&mut client, KERNEL_PATIENCE, || {
            std::thread::sleep(NAP);
            match stop.load(Ordering::Relaxed) {
                true => Err(OperatorCommandError::Interrupted),
                false => Ok(()),
            }
        })?;
        if kernel.state == KernelState::NotFound {
            log::info!("no task names: {}", kernel.detail);
        }
        let names = LiveSymbols::of(&mut client, args)?;
        let rings = VcpuRing::open_all(&mut client, &sampled, RING_PAGES, false)?;
        let () = client.call(request::Enable)?;
        let before = client.call(request::Read)?;
        Ok(Self {
            client,
            rings,
            counted,
            names,
            places: HashMap::new(),
            processes: HashMap::new(),
            by_vcpu: BTreeMap::new(),
            samples: 0,
            lost: 0,
            before,
            before_at: Instant::now(),
            exits,
            exits_before: ExitTotals::default(),
            longest: ExitMaxima::default(),
            only: vcpus,
        })
    }

    /// Continues to collect data in the destination process if the VM has moved, keeping the
    /// samples and symbols collected so far. Returns `false` if the VM has not moved.
    pub(super) fn follow(&mut self, args: &TopArgs, stop: &AtomicBool) -> Result<bool, OperatorCommandError> {
        let Some(moved) = find_moved(&self.client) else {
            return Ok(false);
        };
        let left = std::mem::replace(self, Self::open(moved, args, stop)?);
        self.names = left.names;
        self.places = left.places;
        self.processes = left.processes;
        self.samples = left.samples;
        self.lost = left.lost;
        Ok(true)
    }

    /// Discards the collected samples.
    pub(super) fn reset(&mut self) {
        self.places.clear();
        self.samples = 0;
        self.lost = 0;
    }

    /// Collects the data since the last update.
    pub(super) fn take(&mut self, now: Instant) -> Result<CollectResult, OperatorCommandError> {
        for (weight, _) in self.places.values_mut() {
            *weight *= DECAY;
        }
        self.places.retain(|_, (weight, _)| *weight >= MIN_WEIGHT);
        self.by_vcpu.clear();
        self.drain();
        match self.client.call(request::Joined) {
            Ok(joined) => self.join(&joined)?,
            Err(e) if e.is_gone() => return Ok(CollectResult::Gone),
            Err(e) => return Err(e.into()),
        }
        match self.query(now) {
            Ok(screen) => Ok(CollectResult::Screen(Box::new(screen))),
            Err(e) if e.is_gone() => Ok(CollectResult::Gone),
            Err(e) => Err(e.into()),
        }
    }

    /// Adds the rings of hot-plugged vCPUs. Replaces the ring of a removed vCPU with the same
    /// index, which has already been drained.
    fn join(&mut self, joined: &[PluggedVcpuEvents]) -> Result<(), OperatorCommandError> {
        for of_vcpu in joined {
            self.rings.retain(|ring| ring.info.vcpu != of_vcpu.vcpu);
            match &of_vcpu.refused {
                Some(why) => log::warn!("vCPU {} was added but is not sampled: {why}", of_vcpu.vcpu),
                None => {
                    let rings = VcpuRing::open_all(&mut self.client, &of_vcpu.events, RING_PAGES, false)?;
                    self.rings.extend(rings);
                }
            }
        }
        Ok(())
    }

    fn drain(&mut self) {
        let mut rings = std::mem::take(&mut self.rings);
        for ring in &mut rings {
            let drained = ring.drain(log::Level::Debug, |info, record| {
                match record {
                    Some(DecodedRecord::Sample(sample)) => self.add(info.vcpu, &sample),
                    Some(DecodedRecord::Lost(lost)) => self.lost += lost.lost,
                    _ => {}
                }
                Ok::<(), Infallible>(())
            });
            drained.unwrap_or_else(|never| match never {});
        }
        self.rings = rings;
    }

    /// Adds a sample of `vcpu` to the collected data.
    fn add(&mut self, vcpu: u32, sample: &Sample<'_>) {
        let raw = SampleRawData::decode(sample.raw).unwrap_or_default();
        let pid = raw.task.map_or(NO_PID, |(pid, ..)| pid);
        if let Some((pid, tid, comm)) = raw.task
            && (self.processes.len() < MAX_PROCESS_NAMES || self.processes.contains_key(&pid))
        {
            let known = self.processes.entry(pid).or_default();
            // The name of the main thread takes precedence over the names of other threads.
            if pid == tid || known.is_empty() {
                *known = comm_of(&comm);
            }
        }
        for mapping in sample_mappings(sample.raw, pid, sample.time_ns) {
            self.names.mapping(mapping);
        }
        let place = CodeLocation {
            kernel: raw.cpl != 3,
            pid,
            ip: sample.ip,
        };
        self.samples += 1;
        *self.by_vcpu.entry(vcpu).or_default() += 1;
        if self.places.len() < MAX_LOCATIONS || self.places.contains_key(&place) {
            let entry = self.places.entry(place).or_default();
            entry.0 += sample.period as f64;
            entry.1 += 1;
        }
    }

    /// Requests the VM's state, event readings and guest counters, and returns the data to display.
    fn query(&mut self, now: Instant) -> Result<TopVmData, ClientError> {
        let vm: VmInfo = self.client.call(request::Status)?;
        let readings: Vec<EventReading> = self.client.call(request::Read)?;
        let losses: Vec<RingLoss> = self.client.call(request::RingLosses)?;
        let views = self.views()?;
        let elapsed = now.duration_since(self.before_at);
        let vcpus = self.vcpu_rows(&readings, elapsed);
        let exits = self.exit_rows(&readings, elapsed)?;
        self.before = readings;
        self.before_at = now;
        Ok(TopVmData {
            samples: self.samples,
            lost: self.lost + losses.iter().map(|l| l.lost).sum::<u64>(),
            symbols: self.symbol_rows(),
            vcpus,
            exits,
            views,
            vm,
        })
    }

    fn views(&mut self) -> Result<Vec<VcpuView>, ClientError> {
        if self.client.info().pmu == "off" {
            return Ok(Vec::new());
        }
        let asked: SnapshotId = self.client.call(request::GuestView)?;
        let until = Instant::now() + VIEW_PATIENCE;
        loop {
            let call = request::GuestViewResult {
                generation: asked.generation,
            };
            let views: VmGuestCounters = self.client.call(call)?;
            if views.complete || Instant::now() > until {
                return Ok(views.vcpus);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn symbol_rows(&mut self) -> Vec<TopSymbolRow> {
        let mut rows: HashMap<(u32, String, String, bool), (f64, u64)> = HashMap::new();
        for (place, (weight, samples)) in &self.places {
            let (object, symbol) = self.names.name(*place);
            let row = rows.entry((place.pid, object, symbol, place.kernel)).or_default();
            row.0 += weight;
            row.1 += samples;
        }
        let row = |((pid, object, symbol, kernel), (weight, samples))| TopSymbolRow {
            weight,
            samples,
            pid: Some(pid).filter(|pid| *pid != NO_PID),
            process: self.processes.get(&pid).cloned().unwrap_or_default(),
            object,
            symbol,
            kernel,
        };
        rows.into_iter().map(row).collect()
    }

    /// Returns the rates of exits since the last update.
    fn exit_rows(
        &mut self,
        readings: &[EventReading],
        elapsed: Duration,
    ) -> Result<Vec<TopExitRow>, ClientError> {
        let seconds = elapsed.as_secs_f64().max(1e-9);
        let seen = self.exits.with(readings, &mut self.client)?;
        let mut total = self.exits_before.clone();
        total.update_from(seen, &mut self.longest);
        if let Some(only) = &self.only {
            let asked = |vcpu: Option<u32>| vcpu.is_none_or(|vcpu| only.contains(&vcpu));
            total.ours.retain(|(vcpu, _), _| asked(*vcpu));
            total.kvms.retain(|(vcpu, _), _| asked(*vcpu));
        }
        let grown = total
            .difference_since(&self.exits_before, &std::mem::take(&mut self.longest))
            .summed();
        self.exits_before = total;
        let ours = grown.ours.iter().map(|((_, reason), of)| TopExitRow {
            kvm: false,
            what: one_line(reason),
            per_second: of.count as f64 / seconds,
            time_share: Some(of.time_ns as f64 / 1e9 / seconds),
            mean_ns: of.time_ns.checked_div(of.timed),
            longest_ns: Some(of.max_ns).filter(|_| of.timed > 0),
        });
        let kvms = grown.kvms.iter().filter(|(_, count)| **count > 0);
        let kvms = kvms.map(|((_, name), count)| TopExitRow {
            kvm: true,
            what: one_line(name),
            per_second: *count as f64 / seconds,
            time_share: None,
            mean_ns: None,
            longest_ns: None,
        });
        Ok(ours.chain(kvms).collect())
    }

    fn vcpu_rows(&self, readings: &[EventReading], elapsed: Duration) -> Vec<TopVcpuRow> {
        let seconds = elapsed.as_secs_f64().max(1e-9);
        // Includes all present and former vCPUs.
        let mut vcpus: BTreeSet<u32> = self.counted.iter().filter_map(|o| o.vcpu).collect();
        let parts = readings.iter().flat_map(|r| &r.vcpus);
        vcpus.extend(parts.map(|part| part.vcpu));
        let row = |vcpu: u32| {
            let of_vcpu = self.counted.iter().filter(|o| o.vcpu.is_none_or(|of| of == vcpu));
            let cell = |event: &OpenedEvent| {
                let find = |list: &[EventReading]| {
                    let reading = list.iter().find(|r| Some(r.handle) == event.handle)?;
                    match event.vcpu {
                        Some(_) => Some(reading.clone()),
                        None => reading.for_vcpu(vcpu),
                    }
                };
                match (event.handle, find(readings)) {
                    (None, _) => EventRateCell::NotSupported,
                    (Some(_), None) => EventRateCell::NotCounted,
                    (Some(_), Some(now)) => rate(&now, find(&self.before).as_ref(), seconds),
                }
            };
            TopVcpuRow {
                vcpu,
                samples: self.by_vcpu.get(&vcpu).copied().unwrap_or(0),
                cells: of_vcpu.map(cell).collect(),
            }
        };
        vcpus.into_iter().map(row).collect()
    }
}

/// Returns the rate of an event per second since the reading `before`. The count is scaled if the
/// event did not run all the time.
fn rate(now: &EventReading, before: Option<&EventReading>, seconds: f64) -> EventRateCell {
    let Some(growth) = now.since(before).filter(|g| g.running_ns > 0) else {
        return EventRateCell::NotCounted;
    };
    let share = (growth.running_ns as f64 / growth.enabled_ns.max(growth.running_ns) as f64).min(1.0);
    EventRateCell::Rate {
        per_second: growth.count as f64 / seconds,
        share,
    }
}

/// Returns a task name in printable form, because the guest controls the name.
fn comm_of(comm: &[u8]) -> String {
    let end = comm.iter().position(|b| *b == 0).unwrap_or(comm.len());
    one_line(&String::from_utf8_lossy(&comm[..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(value: u64, enabled_ns: u64, running_ns: u64) -> EventReading {
        EventReading {
            value,
            enabled_ns,
            running_ns,
            estimate: Some(2 * value),
            ..EventReading::default()
        }
    }

    /// Rates cover the interval only. An event that was not running has no rate, rather than a rate
    /// of zero.
    #[test]
    fn rates_cover_the_interval() {
        let before = reading(100, 1000, 1000);
        let cell = rate(&reading(300, 2000, 1500), Some(&before), 2.0);
        let expected = EventRateCell::Rate {
            per_second: 200.0,
            share: 0.5,
        };
        assert_eq!(cell, expected);
        assert_eq!(
            rate(&reading(100, 2000, 1000), Some(&before), 2.0),
            EventRateCell::NotCounted
        );
    }
}
