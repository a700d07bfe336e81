//! Metrics of one scrape: names, labels and values.

use std::collections::{HashMap, HashSet};
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use control_api::counts::{ContextCounts, VcpuCounts};
use control_api::protocol::{EventReading, OpenedEvent, VcpuView, VmInfo, VmState};

/// Event from which the steal metric is computed.
const STEAL_EVENT: &str = "steal-ns";

/// Events given by `--events`, with their readings.
pub type EventReadings = Vec<(OpenedEvent, EventReading)>;
/// Steal time of each vCPU, in nanoseconds, for the vCPUs that report it.
pub type StealTimes = Vec<(u32, u64)>;

/// Metrics of one VM at one moment.
#[derive(Clone, Debug)]
pub struct MetricsSnapshot {
    /// Value of the label `vm`.
    pub label: String,
    /// Description of the VM.
    pub vm: VmInfo,
    /// Statistics of the vCPU loops, by vCPU index.
    pub vcpus: Vec<VcpuCounts>,
    /// Guest-programmed counters of the vCPUs that answered in time.
    pub views: Vec<VcpuView>,
    /// Events given by `--events`, with their readings.
    pub events: EventReadings,
    /// Steal time of each vCPU, in nanoseconds, for the vCPUs that report it.
    pub steal_ns: StealTimes,
}

/// Returns the event list `events` with [`STEAL_EVENT`] prepended.
pub fn with_steal(events: &str) -> String {
    format!("{STEAL_EVENT},{events}")
}

/// Removes duplicate events from `opened`, because they would produce duplicate series. Returns the
/// events given by `--events` that cannot be counted, each with the reason.
pub fn remove_duplicates(opened: &mut Vec<OpenedEvent>) -> Vec<(String, String)> {
    let mut seen = HashSet::new();
    opened.retain(|o| seen.insert((o.index > 0, o.vcpu, o.name.clone())));
    let told = opened.iter().filter(|o| o.index > 0);
    told.filter_map(|o| Some((o.name.clone(), o.unsupported.clone()?)))
        .collect()
}

/// Splits the readings of the events opened for [`with_steal`] into the events given by `--events`
/// and the steal times.
///
/// An event has one series per vCPU, or a single series if the event counts for the whole VM. The
/// steal time of a vCPU is in nanoseconds.
pub fn by_vcpu(opened: &[OpenedEvent], readings: &[EventReading]) -> (EventReadings, StealTimes) {
    let (mut events, mut steal_ns) = (Vec::new(), Vec::new());
    for event in opened {
        let Some(reading) = readings.iter().find(|r| Some(r.handle) == event.handle) else {
            continue;
        };
        if event.index == 0 {
            steal_ns.extend(reading.vcpus.iter().map(|part| (part.vcpu, part.value)));
            continue;
        }
        let parts = reading.vcpus.iter().filter_map(|part| {
            let vcpu = Some(part.vcpu);
            Some((
                OpenedEvent {
                    vcpu,
                    ..event.clone()
                },
                reading.for_vcpu(part.vcpu)?,
            ))
        });
        events.extend(parts);
        if reading.vcpus.is_empty() {
            events.push((event.clone(), reading.clone()));
        }
    }
    (events, steal_ns)
}

/// Encodes metrics in the OpenMetrics text format: first `families`, then the snapshots of several
/// VMs. The labels of the snapshots must be unique.
///
/// Encodes and drops one snapshot at a time, because the labels of all series would occupy several
/// times the memory of the text.
pub fn encode(families: MetricFamilies, snapshots: impl IntoIterator<Item = MetricsSnapshot>) -> String {
    let mut text = FamilyTexts::default();
    text.add(&families.into_text(None));
    for snapshot in snapshots {
        let mut families = MetricFamilies::default();
        snapshot.add_to(&mut families);
        text.add(&families.into_text(Some(snapshot.label)));
    }
    text.join()
}

/// Texts of metric families in order of first use. OpenMetrics requires the series of a family to
/// be contiguous.
#[derive(Default)]
struct FamilyTexts {
    list: Vec<String>,
    /// Position of each family in `list`, by its `HELP` line, which contains the name and the unit.
    index: HashMap<String, usize>,
}

impl FamilyTexts {
    /// Adds the series in `text` to their families.
    fn add(&mut self, text: &str) {
        let (mut at, mut is_new) = (0, false);
        // Newlines in label values are escaped.
        for line in text.split_inclusive('\n') {
            if line.starts_with("# HELP ") {
                at = *self.index.entry(line.to_owned()).or_insert(self.list.len());
                is_new = at == self.list.len();
                if is_new {
                    self.list.push(String::new());
                }
            }
            if is_new || !line.starts_with('#') {
                self.list[at].push_str(line);
            }
        }
    }

    fn join(self) -> String {
        const END: &str = "# EOF\n";
        let bytes = self.list.iter().map(String::len).sum::<usize>() + END.len();
        let mut out = String::with_capacity(bytes);
        // Each family is dropped after its text is copied.
        for family in self.list {
            out.push_str(&family);
        }
        out.push_str(END);
        out
    }
}

/// Returns the unit of time metrics.
pub fn seconds() -> Unit {
    Unit::Seconds
}

/// Names and values of labels.
pub type MetricLabels = Vec<(&'static str, String)>;

/// The series of a metric family.
#[derive(Debug)]
enum MetricSeries {
    Counts(Vec<(MetricLabels, u64)>),
    /// Counters in nanoseconds, exported in seconds.
    Seconds(Vec<(MetricLabels, u64)>),
    Gauges(Vec<(MetricLabels, f64)>),
    Infos(Vec<MetricLabels>),
}

#[derive(Debug)]
struct MetricFamily {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    series: MetricSeries,
}

/// Metric families of one VM or of the exporter. Families without series are omitted.
#[derive(Debug, Default)]
pub struct MetricFamilies(Vec<MetricFamily>);

impl MetricFamilies {
    /// Adds a family of counters.
    pub fn counts(&mut self, name: &'static str, help: &'static str, series: Vec<(MetricLabels, u64)>) {
        self.add(name, help, None, MetricSeries::Counts(series));
    }

    /// Adds a family of counters in nanoseconds, exported in seconds.
    pub fn seconds(&mut self, name: &'static str, help: &'static str, series: Vec<(MetricLabels, u64)>) {
        self.add(name, help, Some(Unit::Seconds), MetricSeries::Seconds(series));
    }

    /// Adds a family of gauges.
    pub fn gauges(
        &mut self,
        name: &'static str,
        help: &'static str,
        unit: Option<Unit>,
        series: Vec<(MetricLabels, f64)>,
    ) {
        self.add(name, help, unit, MetricSeries::Gauges(series));
    }

    fn add(&mut self, name: &'static str, help: &'static str, unit: Option<Unit>, series: MetricSeries) {
        let is_empty = match &series {
            MetricSeries::Counts(list) | MetricSeries::Seconds(list) => list.is_empty(),
            MetricSeries::Gauges(list) => list.is_empty(),
            MetricSeries::Infos(list) => list.is_empty(),
        };
        if !is_empty {
            self.0.push(MetricFamily {
                name,
                help,
                unit,
                series,
            });
        }
    }

    /// Encodes the families without the end marker. Each series has the label `vm` if it is given.
    fn into_text(self, vm: Option<String>) -> String {
        let label = vm.map(|vm| ("vm".into(), vm.into()));
        let mut registry = Registry::with_prefix_and_labels("perfvisor", label.into_iter());
        registry.register_collector(Box::new(self));
        let mut out = String::new();
        // Writing to a string cannot fail, and no encoder used here returns an error.
        if let Err(e) = text::encode_registry(&mut out, &registry) {
            log::error!("metrics: {e}");
        }
        out
    }
}

/// Encodes a series. A series without labels has no braces.
fn labelled(
    out: &mut MetricEncoder<'_>,
    labels: &MetricLabels,
    encode: impl FnOnce(&mut MetricEncoder<'_>) -> fmt::Result,
) -> fmt::Result {
    if labels.is_empty() {
        return encode(out);
    }
    encode(&mut out.encode_family(labels)?)
}

impl Collector for MetricFamilies {
    fn encode(&self, mut out: DescriptorEncoder<'_>) -> fmt::Result {
        for family in &self.0 {
            let kind = match &family.series {
                MetricSeries::Counts(_) | MetricSeries::Seconds(_) => MetricType::Counter,
                MetricSeries::Gauges(_) => MetricType::Gauge,
                MetricSeries::Infos(_) => MetricType::Info,
            };
            let mut out = out.encode_descriptor(family.name, family.help, family.unit.as_ref(), kind)?;
            match &family.series {
                MetricSeries::Counts(series) => {
                    for (labels, value) in series {
                        labelled(&mut out, labels, |out| {
                            out.encode_counter::<NoLabelSet, _, u64>(value, None)
                        })?;
                    }
                }
                MetricSeries::Seconds(series) => {
                    for (labels, ns) in series {
                        labelled(&mut out, labels, |out| {
                            out.encode_counter::<NoLabelSet, _, u64>(&in_seconds(*ns), None)
                        })?;
                    }
                }
                MetricSeries::Gauges(series) => {
                    for (labels, value) in series {
                        labelled(&mut out, labels, |out| out.encode_gauge(value))?;
                    }
                }
                MetricSeries::Infos(series) => {
                    for labels in series {
                        out.encode_info(labels)?;
                    }
                }
            }
        }
        Ok(())
    }
}

fn in_seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// Returns the ratio of running time to enabled time; `None` if the event was never enabled.
fn share(enabled_ns: u64, running_ns: u64) -> Option<f64> {
    (enabled_ns > 0).then(|| (running_ns as f64 / enabled_ns as f64).min(1.0))
}

fn vcpu_label(vcpu: impl fmt::Display) -> (&'static str, String) {
    ("vcpu", vcpu.to_string())
}

impl MetricsSnapshot {
    fn add_to(&self, out: &mut MetricFamilies) {
        self.encode_vm(out);
        self.encode_balloon(out);
        self.encode_loop(out);
        self.encode_guest_counters(out);
        self.encode_events(out);
        self.encode_contexts(out);
    }

    fn encode_vm(&self, out: &mut MetricFamilies) {
        let vm = &self.vm;
        let info: MetricLabels = vec![
            ("version", vm.version.clone()),
            ("pmu", vm.pmu.clone()),
            ("guest", vm.guest.clone()),
        ];
        let infos = MetricSeries::Infos(vec![info]);
        out.add("vm", "The VM and what runs in it.", None, infos);
        let one = |value| vec![(MetricLabels::new(), value)];
        out.gauges(
            "vm_uptime",
            "Time since the VM was started.",
            Some(Unit::Seconds),
            one(vm.uptime_ms as f64 / 1e3),
        );
        let paused = if vm.state == VmState::Paused { 1.0 } else { 0.0 };
        out.gauges(
            "vm_paused",
            "1 while an operator has the VM paused.",
            None,
            one(paused),
        );
        out.gauges("vm_vcpus", "Number of vCPUs.", None, one(f64::from(vm.vcpus)));
        let help = "Maximum number of vCPUs.";
        out.gauges("vm_vcpus_max", help, None, one(f64::from(vm.max_vcpus)));
    }

    fn encode_balloon(&self, out: &mut MetricFamilies) {
        let settings = self.vm.settings.as_ref();
        let Some(balloon) = settings.and_then(|settings| settings.balloon.as_ref()) else {
            return;
        };
        let gauge = |bytes: u64| vec![(MetricLabels::new(), bytes as f64)];
        let help = "Requested size of the balloon.";
        let unit = Some(Unit::Bytes);
        out.gauges("vm_balloon_target", help, unit, gauge(balloon.target_bytes));
        let help = "Size of the balloon, as the guest's driver reports it.";
        let unit = Some(Unit::Bytes);
        out.gauges("vm_balloon_actual", help, unit, gauge(balloon.actual_bytes));
        out.counts(
            "vm_balloon_released_bytes",
            "Guest memory that the balloon has given back to the host.",
            vec![(MetricLabels::new(), balloon.released_bytes)],
        );
        let statistics = balloon.statistics.unwrap_or_default();
        let memory = [
            ("total", statistics.total_memory),
            ("free", statistics.free_memory),
            ("available", statistics.available_memory),
            ("caches", statistics.disk_caches),
        ];
        let memory = memory.into_iter().filter_map(|(kind, bytes)| {
            let labels = vec![("kind", kind.to_owned())];
            Some((labels, bytes? as f64))
        });
        let help = "Memory of the guest, as its driver reports it.";
        out.gauges("guest_memory", help, Some(Unit::Bytes), memory.collect());
        let faults = [
            ("major", statistics.major_faults),
            ("minor", statistics.minor_faults),
        ];
        let faults = faults
            .into_iter()
            .filter_map(|(kind, count)| Some((vec![("kind", kind.to_owned())], count?)));
        let help = "Page faults in the guest, as its driver reports them.";
        out.counts("guest_page_faults", help, faults.collect());
    }

    /// Returns one series per vCPU, whose value is the statistic that `of` selects.
    fn each(&self, of: impl Fn(&VcpuCounts) -> u64) -> Vec<(MetricLabels, u64)> {
        let series = |vcpu: &VcpuCounts| (vec![vcpu_label(vcpu.vcpu)], of(vcpu));
        self.vcpus.iter().map(series).collect()
    }

    fn encode_loop(&self, out: &mut MetricFamilies) {
        let help = "Returns of KVM_RUN to Perfvisor, for any reason.";
        out.counts("vcpu_exits", help, self.each(|c| c.exits));
        let mut kinds = Vec::new();
        for vcpu in &self.vcpus {
            let i = vcpu.vcpu;
            let series = vcpu.kinds.iter();
            kinds.extend(series.map(|(kind, n)| (vec![vcpu_label(i), ("kind", kind.clone())], *n)));
        }
        out.counts(
            "vcpu_exits_by_kind",
            "Exits to Perfvisor by what caused them.",
            kinds,
        );
        let help = "Accesses to PMU registers that raised a general protection fault.";
        out.counts("vcpu_register_faults", help, self.each(|c| c.register_faults));
        let mut pmis = Vec::new();
        for c in &self.vcpus {
            let i = c.vcpu;
            // The number of PMIs is unknown if KVM's own vPMU delivers them.
            let view = self.views.iter().find(|view| view.vcpu == i);
            if view.is_some_and(|view| view.pmis.is_none()) {
                continue;
            }
            for (how, n) in [("nmi", c.pmi_nmi), ("vector", c.pmi_vector), ("none", c.pmi_none)] {
                pmis.push((vec![vcpu_label(i), ("delivery", how.to_owned())], n));
            }
        }
        let help = "Performance monitoring interrupts by delivery; none: the delivery mode of the \
             guest's LVTPC delivers nothing.";
        out.counts("vcpu_pmis", help, pmis);
        let help = "Performance monitoring interrupts that the rate limit delayed.";
        out.counts("vcpu_pmis_throttled", help, self.each(|c| c.pmi_throttled));
        let help = "Performance monitoring interrupts that were held back until the guest had run long \
             enough outside its handler.";
        out.counts("vcpu_pmis_held", help, self.each(|c| c.pmi_held));
        let help = "Total delay of the held performance monitoring interrupts that were delivered.";
        out.seconds("vcpu_pmi_held", help, self.each(|c| c.pmi_held_ns));
        let help = "Guest entries at which a due interrupt waited because the guest had masked LVTPC.";
        out.counts("vcpu_pmi_masked_waits", help, self.each(|c| c.pmi_masked_waits));
        let help = "Performance monitoring interrupts that were withdrawn because the guest \
             handled their overflows, or stopped the counters, while they waited.";
        out.counts("vcpu_pmis_withdrawn", help, self.each(|c| c.pmi_withdrawn));
        let help = "Instructions that were single-stepped for the exact backing.";
        out.counts("vcpu_steps", help, self.each(|c| c.steps));
        let help = "Single steps with unknown outcome, for which nothing was counted.";
        out.counts("vcpu_steps_lost", help, self.each(|c| c.steps_lost));
        let help = "Sections of user code that could not be stepped.";
        out.counts("vcpu_unstepped_stretches", help, self.each(|c| c.unstepped));
        let steal = self
            .steal_ns
            .iter()
            .map(|(vcpu, ns)| (vec![vcpu_label(vcpu)], *ns))
            .collect();
        let help = "Time that the vCPU waited for a host CPU while ready to run, since its metrics began.";
        out.seconds("vcpu_steal", help, steal)
    }

    fn encode_guest_counters(&self, out: &mut MetricFamilies) {
        let (mut counted, mut enabled, mut running, mut shares) = (vec![], vec![], vec![], vec![]);
        let (mut on, mut overflows, mut requests) = (vec![], vec![], vec![]);
        let (mut uncounted, mut fallbacks, mut vcpu_uncounted, mut places_lost) =
            (vec![], vec![], vec![], vec![]);
        for view in &self.views {
            vcpu_uncounted.extend(view.uncounted_ns.map(|ns| (vec![vcpu_label(view.vcpu)], ns)));
            places_lost.extend(view.places_lost.map(|n| (vec![vcpu_label(view.vcpu)], n)));
            for c in &view.counters {
                let place: MetricLabels = vec![vcpu_label(view.vcpu), ("counter", c.counter.clone())];
                let is_on = c.enabled && c.allowed;
                on.push((place.clone(), if is_on { 1.0 } else { 0.0 }));
                overflows.extend(c.overflows.map(|n| (place.clone(), n)));
                requests.extend(c.pmi_requests.map(|n| (place.clone(), n)));
                uncounted.extend(c.uncounted_ns.map(|n| (place.clone(), n)));
                fallbacks.push((place.clone(), if c.fallback { 1.0 } else { 0.0 }));
                // A counter without backing has neither a count nor times.
                let (Some(event), Some(backing)) =
                    (&c.event, c.backing.as_ref().filter(|b| b.as_str() != "none"))
                else {
                    continue;
                };
                let mut labels = place;
                labels.push(("event", event.clone()));
                labels.push(("backing", backing.clone()));
                counted.extend(c.counted.map(|n| (labels.clone(), n)));
                let (Some(enabled_ns), Some(running_ns)) = (c.enabled_ns, c.running_ns) else {
                    continue;
                };
                enabled.push((labels.clone(), enabled_ns));
                running.push((labels.clone(), running_ns));
                shares.extend(share(enabled_ns, running_ns).map(|share| (labels, share)));
            }
        }
        out.gauges(
            "guest_counter_on",
            "1 while the guest has the counter enabled and the event filter allows its event.",
            None,
            on,
        );
        let help = "Time in which at least one enabled guest counter was not counted.";
        out.seconds("vcpu_uncounted", help, vcpu_uncounted);
        let help = "Number of times that a guest counter lost its host counter, or was enabled without an \
            available one.";
        out.counts("vcpu_places_lost", help, places_lost);
        let help = "Time that the counter was enabled for its current event but not counted.";
        out.seconds("guest_counter_uncounted", help, uncounted);
        let help = "1 while the clock backs the counter because no host counter is available.";
        out.gauges("guest_counter_fallback", help, None, fallbacks);
        let help = "Count of a guest counter since the guest programmed this event.";
        out.counts("guest_counter_events", help, counted);
        let help = "Time enabled of the counter's event.";
        out.seconds("guest_counter_enabled", help, enabled);
        let help = "Time running of the counter's event.";
        out.seconds("guest_counter_running", help, running);
        let help = "Time running over time enabled of the counter's event; below 1 if it was multiplexed.";
        let unit = Unit::Other("ratio".into());
        out.gauges("guest_counter_running", help, Some(unit), shares);
        out.counts("guest_counter_overflows", "Overflows of the counter.", overflows);
        let help = "Overflows of the counter that requested an interrupt.";
        out.counts("guest_counter_pmi_requests", help, requests);
    }

    fn encode_events(&self, out: &mut MetricFamilies) {
        let (mut counts, mut times) = (vec![], vec![]);
        let (mut enabled, mut running, mut shares) = (vec![], vec![], vec![]);
        for (event, reading) in &self.events {
            let mut labels: MetricLabels = event.vcpu.map(vcpu_label).into_iter().collect();
            labels.push(("event", event.name.clone()));
            labels.push(("backing", event.backing.clone()));
            if event.estimate {
                labels.push(("estimate", "true".to_owned()));
            }
            let values = if event.nanoseconds {
                &mut times
            } else {
                &mut counts
            };
            values.push((labels.clone(), reading.value));
            enabled.push((labels.clone(), reading.enabled_ns));
            running.push((labels.clone(), reading.running_ns));
            shares.extend(share(reading.enabled_ns, reading.running_ns).map(|s| (labels, s)));
        }
        let help = "Counts of the operator's events (--events), not scaled for multiplexing.";
        out.counts("event_count", help, counts);
        out.seconds(
            "event_time",
            "Events of the operator that measure time, likewise.",
            times,
        );
        let help = "Time enabled of the operator's event.";
        out.seconds("event_enabled", help, enabled);
        out.seconds("event_running", "Time running of the counter's event.", running);
        let help = "Time running over time enabled of the operator's event; below 1 if it was \
             multiplexed.";
        let unit = Unit::Other("ratio".into());
        out.gauges("event_running", help, Some(unit), shares);
    }

    fn encode_contexts(&self, out: &mut MetricFamilies) {
        let contexts: Vec<_> = self
            .vcpus
            .iter()
            .filter_map(|v| Some((v.vcpu, v.context?)))
            .collect();
        let each = |of: fn(&ContextCounts) -> u64| -> Vec<(MetricLabels, u64)> {
            contexts
                .iter()
                .map(|(i, c)| (vec![vcpu_label(i)], of(c)))
                .collect()
        };
        let help = "Samples written for operators.";
        out.counts("vcpu_samples", help, each(|c| c.samples));
        let help = "Samples lost because their ring was full.";
        out.counts("vcpu_lost_samples", help, each(|c| c.lost_samples));
        let help = "Number of times that an event that sampled too fast was throttled until the \
             next tick.";
        out.counts("vcpu_sampling_throttles", help, each(|c| c.throttles));
        let mut open = Vec::new();
        for (i, c) in &contexts {
            for (state, n) in [("open", c.events), ("on", c.active)] {
                open.push((vec![vcpu_label(i), ("state", state.to_owned())], n as f64));
            }
        }
        let help = "Events of the guest and of operators on the vCPU, by state: open, and \
             currently counting.";
        out.gauges("vcpu_events", help, None, open);
        let waiting = contexts
            .iter()
            .map(|(i, c)| (vec![vcpu_label(i)], c.waiting_groups as f64))
            .collect();
        let help = "Event groups that wait for a host counter.";
        out.gauges("vcpu_waiting_groups", help, None, waiting);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use control_api::balloon::{BalloonInfo, BalloonStatistics};
    use control_api::protocol::{GuestCounter, VmInfo, VmSettings};
    use test_support::alone::runs_alone;

    fn snapshot() -> MetricsSnapshot {
        let counter = |counter: &str, event: Option<&str>, backing: Option<&str>| GuestCounter {
            counter: counter.into(),
            enabled: event.is_some(),
            event: event.map(Into::into),
            allowed: true,
            backing: backing.map(Into::into),
            value: 0xffff_ffff_0000,
            counted: Some(1234),
            enabled_ns: Some(4_000_000_000),
            running_ns: Some(1_000_000_000),
            overflows: Some(5),
            pmi_requests: Some(4),
            counting: Some(event.is_some()),
            fallback: backing == Some("clock"),
            uncounted_ns: Some(500_000_000),
        };
        let counts = VcpuCounts {
            exits: 9,
            pmi_nmi: 3,
            pmi_throttled: 2,
            pmi_held: 4,
            pmi_held_ns: 1_500_000_000,
            pmi_withdrawn: 6,
            context: Some(ContextCounts {
                events: 3,
                active: 2,
                lost_samples: 7,
                ..ContextCounts::default()
            }),
            ..VcpuCounts::default()
        };
        let view = VcpuView {
            vcpu: 0,
            pmis: Some(3),
            uncounted_ns: Some(750_000_000),
            places_lost: Some(6),
            counters: vec![
                counter("gp0", Some("cycles:u"), Some("clock")),
                counter("gp1", Some("cache-misses"), Some("none")),
                counter("fixed0", None, None),
            ],
        };
        MetricsSnapshot {
            label: "a".into(),
            vm: VmInfo {
                version: "0".into(),
                guest: "a \"b\\c\"\nd".into(),
                state: VmState::Paused,
                ..VmInfo::default()
            },
            vcpus: vec![counts],
            views: vec![view],
            events: Vec::new(),
            steal_ns: vec![(0, 2_500_000_000)],
        }
    }

    /// Counts are exported with the enabled and running times. A guest counter without a backing
    /// has no times, and the value that the guest wrote to the counter is not exported as a count.
    #[test]
    fn guest_counters_include_times() {
        let text = encode(MetricFamilies::default(), [snapshot()]);
        let gp0 = "{vm=\"a\",vcpu=\"0\",counter=\"gp0\",event=\"cycles:u\",backing=\"clock\"}";
        for line in [
            format!("perfvisor_guest_counter_events_total{gp0} 1234"),
            format!("perfvisor_guest_counter_enabled_seconds_total{gp0} 4.0"),
            format!("perfvisor_guest_counter_running_seconds_total{gp0} 1.0"),
            format!("perfvisor_guest_counter_running_ratio{gp0} 0.25"),
            "perfvisor_guest_counter_pmi_requests_total{vm=\"a\",vcpu=\"0\",counter=\"gp1\"} 4".into(),
            "perfvisor_vcpu_pmis_throttled_total{vm=\"a\",vcpu=\"0\"} 2".into(),
            "perfvisor_vcpu_pmis_held_total{vm=\"a\",vcpu=\"0\"} 4".into(),
            "perfvisor_vcpu_pmi_held_seconds_total{vm=\"a\",vcpu=\"0\"} 1.5".into(),
            "perfvisor_vcpu_pmis_withdrawn_total{vm=\"a\",vcpu=\"0\"} 6".into(),
            "perfvisor_vcpu_pmis_total{vm=\"a\",vcpu=\"0\",delivery=\"nmi\"} 3".into(),
            "perfvisor_vcpu_steal_seconds_total{vm=\"a\",vcpu=\"0\"} 2.5".into(),
            "perfvisor_vcpu_lost_samples_total{vm=\"a\",vcpu=\"0\"} 7".into(),
            "perfvisor_vm_paused{vm=\"a\"} 1.0".into(),
            "perfvisor_vcpu_uncounted_seconds_total{vm=\"a\",vcpu=\"0\"} 0.75".into(),
            "perfvisor_vcpu_places_lost_total{vm=\"a\",vcpu=\"0\"} 6".into(),
            "perfvisor_guest_counter_uncounted_seconds_total{vm=\"a\",vcpu=\"0\",counter=\"gp1\"} 0.5".into(),
            "perfvisor_guest_counter_fallback{vm=\"a\",vcpu=\"0\",counter=\"gp0\"} 1.0".into(),
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("cache-misses") && !text.contains(&0xffff_ffff_0000u64.to_string()));
        assert!(text.ends_with("# EOF\n"));
    }

    /// Balloon statistics that the guest's driver does not send have no series in the metrics.
    #[test]
    fn balloon_and_guest_memory_are_exported() {
        let mut with_balloon = snapshot();
        let statistics = BalloonStatistics {
            free_memory: Some(8192),
            minor_faults: Some(3),
            ..BalloonStatistics::default()
        };
        with_balloon.vm.settings = Some(VmSettings {
            balloon: Some(BalloonInfo {
                target_bytes: 1 << 21,
                actual_bytes: 1 << 20,
                released_bytes: 4096,
                statistics: Some(statistics),
                ..BalloonInfo::default()
            }),
            ..VmSettings::default()
        });
        let text = encode(MetricFamilies::default(), [with_balloon]);
        for line in [
            "perfvisor_vm_balloon_target_bytes{vm=\"a\"} 2097152.0",
            "perfvisor_vm_balloon_actual_bytes{vm=\"a\"} 1048576.0",
            "perfvisor_vm_balloon_released_bytes_total{vm=\"a\"} 4096",
            "perfvisor_guest_memory_bytes{vm=\"a\",kind=\"free\"} 8192.0",
            "perfvisor_guest_page_faults_total{vm=\"a\",kind=\"minor\"} 3",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("kind=\"total\"") && !text.contains("kind=\"major\""));
        let without = encode(MetricFamilies::default(), [snapshot()]);
        assert!(!without.contains("balloon"));
    }

    /// OpenMetrics requires the series of a family to be contiguous.
    #[test]
    fn families_of_several_vms_are_contiguous() {
        let other = MetricsSnapshot {
            label: "b".into(),
            ..snapshot()
        };
        let mut own = MetricFamilies::default();
        own.gauges("up", "Up.", None, vec![(vec![("vm", "c".into())], 0.0)]);
        let text = encode(own, [snapshot(), other]);
        let families: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("# TYPE ")).collect();
        let once: HashSet<&str> = families.iter().copied().collect();
        assert_eq!(families.len(), once.len(), "{text}");
        assert!(text.starts_with("# HELP perfvisor_up Up.\n"), "{text}");
        for series in [
            "perfvisor_up{vm=\"c\"} 0.0",
            "perfvisor_vm_info{vm=\"b\",version=\"0\"",
            "perfvisor_vcpu_exits_total{vm=\"a\",vcpu=\"0\"} 9",
            "perfvisor_vcpu_exits_total{vm=\"b\",vcpu=\"0\"} 9",
        ] {
            assert!(
                text.lines().any(|l| l.starts_with(series)),
                "{series} is not in\n{text}"
            );
        }
    }

    /// The memory for encoding many VMs is at most four times the text. Runs in a separate
    /// process, because the kernel reports the peak memory per process.
    #[test]
    fn encoding_memory_is_bounded_by_text() {
        if !runs_alone("exporter::snapshot::tests::encoding_memory_is_bounded_by_text") {
            return;
        }
        let peak_kib = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix("VmHWM:"))
                .unwrap();
            line.split_whitespace().next().unwrap().parse::<usize>().unwrap()
        };
        let vms = (0..1000).map(|n| MetricsSnapshot {
            label: format!("vm-{n:04}"),
            ..snapshot()
        });
        let before = peak_kib();
        let text = encode(MetricFamilies::default(), vms);
        let (grown, text) = (peak_kib() - before, text.len() / 1024);
        assert!(grown < 4 * text, "{grown} KiB for {text} KiB of text");
    }

    /// Quotes and newlines in a label value are escaped.
    #[test]
    fn labels_are_escaped() {
        let text = encode(MetricFamilies::default(), [snapshot()]);
        let line = text.lines().find(|l| l.starts_with("perfvisor_vm_info")).unwrap();
        assert!(line.contains(r#"guest="a \"b\\c\"\nd""#), "{line}");
    }
}
