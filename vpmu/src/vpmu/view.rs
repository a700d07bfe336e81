//! Copies of the counters' state that the VMM shows to the operator.

use super::Vpmu;
use crate::counter_events::{CounterEvents, CounterTimes};
use crate::dialect::EventDialect;
use crate::events::{CounterBacking, CounterEventRequest};
use crate::index::{CounterIndex, MsrAddress, counters_in};
use crate::vendor::PmuRegister;

/// State of one guest counter, which the VMM shows to the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestCounterStatus {
    /// Number of the counter.
    pub counter: CounterIndex,
    /// Set if the guest has enabled the counter in the counter's own control register and globally.
    pub enabled: bool,
    /// Event request that the guest programmed, or `None` if its control selects no privilege
    /// level.
    pub request: Option<CounterEventRequest>,
    /// `true` if the event filter allows the requested event.
    pub allowed: bool,
    /// Backing (source of counts) of the counter, or `None` if the counter has never been enabled.
    pub backing: Option<CounterBacking>,
    /// Counter value that the guest would read.
    pub value: u64,
    /// Number of counts since the counter was programmed with its current event, regardless of
    /// guest writes to the counter. Does not decrease while the event stays the same.
    pub counted: u64,
    /// Time enabled and time running of the counter's current event.
    pub times: CounterTimes,
    /// `true` if an event is currently counting for the counter.
    pub counting: bool,
    /// Set if [`Self::backing`] is a fallback, because no slot was available for the preferred
    /// backing.
    pub fallback: bool,
    /// Time for which the current event was enabled but not counted, in nanoseconds. Included in
    /// the time enabled of [`Self::times`].
    pub uncounted_ns: u64,
    /// Number of overflows of the counter.
    pub overflows: u64,
    /// Number of overflows of the counter that requested a PMI.
    pub pmi_requests: u64,
}

impl Vpmu {
    /// Sets a register to the value that it has in another PMU of the same model, without the side
    /// effects of a guest write. Used to show or save the state of a PMU that KVM emulates; see
    /// [`PmuModel::state_msrs`](crate::PmuModel::state_msrs). Returns whether the model has this
    /// register.
    pub fn load_register(&mut self, msr: MsrAddress, value: u64) -> bool {
        let Some(register) = self.vendor.register(&self.model, msr) else {
            return false;
        };
        match register {
            PmuRegister::Selector(counter) => self.registers.selectors[counter.slot()] = value,
            PmuRegister::Counter(counter) | PmuRegister::FullWidthCounter(counter) => {
                self.counters[counter.slot()].value = value & self.model.width().mask();
            }
            PmuRegister::FixedControl => self.registers.fixed_control = value,
            PmuRegister::GlobalControl => self.registers.global_control = value,
            PmuRegister::GlobalStatus => self.registers.global_status = value,
            PmuRegister::DebugControl => self.registers.debug_control = value,
            PmuRegister::GlobalStatusReset
            | PmuRegister::GlobalStatusSet
            | PmuRegister::GlobalInUse
            | PmuRegister::Capabilities
            | PmuRegister::Absent => {}
        }
        self.mark_all();
        true
    }

    /// Returns the state of all existing counters as programmed by the guest.
    pub fn counters_view(&mut self, events: &mut dyn CounterEvents) -> Vec<GuestCounterStatus> {
        self.uncounted_ns(events);
        counters_in(self.model.counters_mask())
            .map(|counter| {
                let request = self.request(counter);
                let value = self.value(counter, events);
                let held = &self.counters[counter.slot()];
                let uncounted_ns = self.lost.of(counter);
                let mut times = if held.programmed.is_some() {
                    events.times(counter)
                } else {
                    CounterTimes::default()
                };
                times.time_enabled_ns = times.time_enabled_ns.saturating_add(uncounted_ns);
                GuestCounterStatus {
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

    /// Returns whether the guest has enabled the counter in the counter's own control register and
    /// globally.
    #[inline]
    pub(super) fn is_enabled(&self, counter: CounterIndex) -> bool {
        self.vendor.globally_enabled(&self.registers) & counter.mask() != 0
            && self.vendor.is_selected(&self.registers, counter)
    }

    /// Returns the event request that the control bits of `counter` encode, with its event number
    /// decoded for the guest's processor generation.
    #[inline]
    pub(super) fn request(&self, counter: CounterIndex) -> Option<CounterEventRequest> {
        let request = self.vendor.request(&self.registers, counter)?;
        Some(self.dialect.decode(request))
    }

    /// Sets the processor signature in the guest's CPUID (CPUID.01H:EAX), which determines the
    /// decoding of event numbers that differ between processor generations. The change applies at
    /// the next [`Self::reconcile`].
    pub fn set_signature(&mut self, eax: u32) {
        let dialect = EventDialect::of_signature(self.model.vendor(), eax);
        if self.dialect != dialect {
            self.dialect = dialect;
            self.mark_all();
        }
    }
}
