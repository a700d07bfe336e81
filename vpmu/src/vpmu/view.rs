//! The counters as an operator sees them.

use super::Vpmu;
use crate::events::{Backing, EventRequest};
use crate::index::{CounterIndex, counters_in};
use crate::source::{CounterEvents, CounterTimes};

/// A counter, as the operator sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterView {
    /// Which counter.
    pub counter: CounterIndex,
    /// Whether the guest has it enabled, in its own control and globally.
    pub enabled: bool,
    /// What the guest asks it to count; `None` while its control selects no privilege level.
    pub request: Option<EventRequest>,
    /// Whether the event filter lets it count that.
    pub allowed: bool,
    /// Who counts; `None` before the counter was enabled for the first time.
    pub backing: Option<Backing>,
    /// The value the guest would read.
    pub value: u64,
    /// What the present event has counted since the counter was programmed for it, whatever the guest wrote
    /// into the counter meanwhile. Never decreases while the event is the same.
    pub counted: u64,
    /// How long the present event was enabled and counted.
    pub times: CounterTimes,
    /// Whether it is counted now.
    pub counting: bool,
    /// [`Self::backing`] counts only while the one that should has no place.
    pub fallback: bool,
    /// How long it was enabled for the present event and not counted, ns; part of the time enabled.
    pub uncounted_ns: u64,
    /// Overflows so far.
    pub overflows: u64,
    /// Overflows that asked for a PMI.
    pub pmi_requests: u64,
}

impl Vpmu {
    /// What the guest has programmed, for each existing counter.
    pub fn counters_view(&mut self, events: &mut dyn CounterEvents) -> Vec<CounterView> {
        self.uncounted_ns(events);
        counters_in(self.model.counters_mask())
            .map(|counter| {
                let request = self.vendor.request(&self.registers, counter);
                let value = self.value(counter, events);
                let held = &self.counters[counter.slot()];
                let uncounted_ns = self.lost.of(counter);
                let mut times = if held.programmed.is_some() {
                    events.times(counter)
                } else {
                    CounterTimes::default()
                };
                times.time_enabled_ns = times.time_enabled_ns.saturating_add(uncounted_ns);
                CounterView {
                    counter,
                    enabled: self.is_enabled(counter),
                    request,
                    allowed: request.is_none_or(|request| self.filter.allows(request.selection)),
                    backing: held.programmed.map(|(_, backing)| backing),
                    value,
                    counted: held.counted,
                    times,
                    counting: self.running & counter.mask() != 0,
                    fallback: self.lost.is_fallback(counter),
                    uncounted_ns,
                    overflows: held.overflows,
                    pmi_requests: held.pmi_requests,
                }
            })
            .collect()
    }
}
