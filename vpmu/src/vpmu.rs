//! [`Vpmu`]: the PMU of one vCPU with its registers, counters and pending PMI.
//!
//! A guest write changes registers and marks the affected counters. [`Vpmu::reconcile`] applies the
//! changes to the events that count for the marked counters, just before the guest runs again. For
//! each counter, `value` is the counter's value at the time when the count of its event was `base`.
//! While the event is running, the counter's current value is therefore `value` plus the event's
//! counts since `base`. *Folding* updates this pair and detects overflows arithmetically. Each
//! overflow is therefore accounted for exactly once, regardless of whether a read, a write or the
//! host's notification occurs first.

mod backing_change;
mod branches;
mod losses;
mod paused;
mod pmi;
mod svme;
mod view;

use std::sync::Arc;

use crate::branches::BranchRecords;
use crate::counter_events::{CounterEnableOutcome, CounterEvents};
use crate::dialect::EventDialect;
use crate::events::{ArchEvent, CounterBacking, CounterEventRequest, DecodedCounterEvent};
use crate::filter::EventFilter;
use crate::index::{CounterIndex, MAX_COUNTERS, MsrAddress, RdpmcIndex, counters_in};
use crate::limit::{DEFAULT_PMI_LIMIT, RateLimit};
use crate::lost::UncountedCounters;
use crate::model::PmuModel;
use crate::registers;
use crate::share::{PmiShare, ShareLimit};
use crate::vendor::{PmuRegister, PmuRegisters, RegisterWriteEffect, VendorOps, selector};

pub use backing_change::CounterBackingChange;
pub use branches::BranchCollectionRequest;
pub(crate) use pmi::{DuePmi, RestoredPmi};
pub use pmi::{PmiCounts, PmiReadiness};
pub use view::GuestCounterStatus;

/// Result of a guest RDMSR or RDPMC that [`Vpmu`] handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MsrReadOutcome {
    /// The instruction returns this value in EDX:EAX.
    Value(u64),
    /// The instruction faults: the VMM must inject a general-protection fault.
    InjectGp,
}

/// Result of a guest WRMSR that [`Vpmu`] handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MsrWriteOutcome {
    /// The write completed or was ignored.
    Done,
    /// The instruction faults: the VMM must inject a general-protection fault.
    InjectGp,
}

/// Current privilege level, 0 to 3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cpl(pub u8);

/// Divisor that determines the tolerated delay of a PMI: the armed period divided by this number.
/// Each call of [`Vpmu::count_emulated_instruction`] advances the counter but not the host event,
/// so the armed overflow occurs one count later than it should. Because re-arming the host event
/// costs system calls, it is re-armed only when the delay exceeds this limit, which is within the
/// normal PMI skid.
const MAX_DELAY_DIVISOR: u64 = 256;

/// Event that a counter must count once the guest's register writes have been applied.
#[derive(Clone, Copy, Debug)]
enum TargetEvent {
    /// No event. `enabled` is `true` if the guest has enabled the counter nevertheless.
    Nothing { enabled: bool },
    /// The event with which the counter is already programmed.
    Same,
    /// An event with which the counter is not programmed yet.
    Other(CounterEventRequest),
}

/// Value, current event and statistics of one guest counter.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counter {
    /// Counter value when the event's count was `base`.
    pub(crate) value: u64,
    base: u64,
    /// Number of counts since the current event was programmed.
    counted: u64,
    /// Request with which the counter is programmed, and the backing that counts for it.
    programmed: Option<(CounterEventRequest, CounterBacking)>,
    /// Number of counts until overflow for which the event was last armed, and number of
    /// instructions that have since retired outside guest mode.
    armed: u64,
    outside: u64,
    /// Number of counts during pauses since the event was last armed. These counts do not belong to
    /// the counter's value.
    left_out: u64,
    pub(crate) overflows: u64,
    pub(crate) pmi_requests: u64,
}

impl Counter {
    /// Records that the event was armed to overflow after `until_overflow` further counts.
    fn armed_for(&mut self, until_overflow: u64) {
        self.armed = until_overflow;
        self.outside = 0;
        self.left_out = 0;
    }

    /// Creates a counter without an event from saved values.
    pub(crate) fn restored(value: u64, overflows: u64, pmi_requests: u64) -> Self {
        Self {
            value,
            overflows,
            pmi_requests,
            ..Self::default()
        }
    }
}

/// Returns whether the event counts instructions but misses instructions that the hypervisor
/// completes for the guest. The exact backing misses none, because it decodes them.
fn misses_emulated((request, backing): (CounterEventRequest, CounterBacking)) -> bool {
    backing == CounterBacking::Hardware
        && request.event == DecodedCounterEvent::Architectural(ArchEvent::Instructions)
        && !request.is_modified()
}

/// Mask of paused counters, and the number of reconcile passes until the pause ends.
#[derive(Clone, Copy, Debug, Default)]
struct PausedCounters {
    counters: u64,
    passes_left: u32,
}

/// Guest-visible PMU of one vCPU.
#[derive(Debug)]
pub struct Vpmu {
    pub(crate) model: PmuModel,
    vendor: &'static dyn VendorOps,
    filter: Arc<EventFilter>,
    dialect: EventDialect,
    pub(crate) registers: PmuRegisters,
    pub(crate) counters: [Counter; MAX_COUNTERS],
    /// Branch records of the vCPU; `None` if the model has none.
    pub(crate) branches: Option<Box<BranchRecords>>,
    /// Mask of counters whose event may no longer match the registers.
    dirty: u64,
    /// Mask of counters whose own control register or event filter changed after their event was
    /// programmed.
    stale: u64,
    /// `true` if the count of an enabled selector depends on EFER.SVME, whose value must be set
    /// again.
    needs_svme: bool,
    /// Mask of counters whose event has not been enabled since it was programmed. The initial count
    /// of such an event is unknown.
    fresh: u64,
    /// Mask of counters whose event is counting.
    running: u64,
    /// Paused counters: the guest has stopped them, but their events keep their slots.
    paused: PausedCounters,
    /// Accounting of counters that the guest has enabled and that are either uncounted or counted
    /// by a fallback backing.
    lost: UncountedCounters,
    /// Mask of running counters whose event must be re-armed, because it is armed for a number of
    /// counts that no longer matches the counter's value.
    rearm: u64,
    /// Mask of running instruction counters whose event misses instructions that exit to the
    /// hypervisor.
    misses_emulated: u64,
    /// Number of overflows of all counters together.
    overflows: u64,
    pmi_due: bool,
    /// Mask of counters that requested the due PMI and whose overflows the guest has not yet
    /// served.
    pmi_sources: u64,
    /// Set if an attempt to deliver the due PMI failed. The PMI then stays due until the guest has
    /// served the overflows of all counters that requested it.
    pmi_deferred: bool,
    /// `true` if the statistics already count the due PMI as throttled.
    pmi_throttled: bool,
    /// Time at which the share limit of PMI handlers started to delay the due PMI, in nanoseconds.
    pmi_held_since_ns: Option<u64>,
    pmi_limit: RateLimit,
    pub(crate) pmi_share: ShareLimit,
    pmi_counts: PmiCounts,
    throttle_logged_ns: Option<u64>,
    /// Mask of events for which the log already states that no backing can count them: bit n for
    /// architectural event n, the top bit for all others.
    warned: u32,
}

impl Vpmu {
    /// Creates a PMU in its reset state. The PMU allows all events, limits PMIs to
    /// [`DEFAULT_PMI_LIMIT`], and does not limit the share of PMI handlers.
    pub fn new(model: PmuModel) -> Self {
        let vendor = registers::of(model.vendor());
        Self {
            model,
            vendor,
            filter: Arc::new(EventFilter::allow_all()),
            dialect: EventDialect::default(),
            registers: vendor.at_reset(&model),
            counters: [Counter::default(); MAX_COUNTERS],
            branches: model.has_branch_records().then(Box::default),
            dirty: 0,
            stale: 0,
            needs_svme: false,
            fresh: 0,
            running: 0,
            paused: PausedCounters::default(),
            lost: UncountedCounters::default(),
            rearm: 0,
            misses_emulated: 0,
            overflows: 0,
            pmi_due: false,
            pmi_sources: 0,
            pmi_deferred: false,
            pmi_throttled: false,
            pmi_held_since_ns: None,
            pmi_limit: RateLimit::new(DEFAULT_PMI_LIMIT),
            pmi_share: ShareLimit::new(PmiShare::UNLIMITED),
            pmi_counts: PmiCounts::default(),
            throttle_logged_ns: None,
            warned: 0,
        }
    }

    /// Copies the set of logged warnings from `before`, the PMU before a machine reset. A guest
    /// therefore cannot flood the log by resetting itself.
    pub fn inherit_warnings(&mut self, before: &Self) {
        self.warned = before.warned;
        self.throttle_logged_ns = before.throttle_logged_ns;
    }

    /// Returns the PMU model.
    pub fn model(&self) -> &PmuModel {
        &self.model
    }

    /// Replaces the event filter. The change applies to programmed counters at the next
    /// [`Self::reconcile`].
    pub fn set_filter(&mut self, filter: Arc<EventFilter>) {
        self.filter = filter;
        self.mark_stale(self.model.counters_mask());
    }

    /// Limits the rate to `per_second` PMIs per second (0 counts as 1).
    pub fn set_pmi_limit(&mut self, per_second: u32) {
        self.pmi_limit = RateLimit::new(per_second);
    }

    /// Limits the share of time for PMI handlers. All times that are passed to this PMU afterwards
    /// must be on the clock of [`CounterEvents::now_ns`].
    pub fn set_pmi_share(&mut self, share: PmiShare) {
        self.pmi_share.set_share(share);
    }

    /// Handles a guest RDMSR of the register `msr`.
    pub fn read_msr(&mut self, msr: MsrAddress, events: &mut dyn CounterEvents) -> MsrReadOutcome {
        let Some(register) = self.vendor.register(&self.model, msr) else {
            return self.read_branch_register(msr);
        };
        MsrReadOutcome::Value(match register {
            PmuRegister::Selector(counter) => self.registers.selectors[counter.slot()],
            PmuRegister::Counter(counter) | PmuRegister::FullWidthCounter(counter) => {
                self.value(counter, events)
            }
            PmuRegister::FixedControl => self.registers.fixed_control,
            PmuRegister::GlobalStatus => {
                // Folds first. Otherwise, the guest could read a counter that has wrapped while its
                // overflow bit is still clear.
                self.fold_all(events);
                self.registers.global_status
            }
            PmuRegister::GlobalControl => self.registers.global_control,
            PmuRegister::GlobalInUse => self.vendor.in_use(&self.model, &self.registers),
            PmuRegister::Capabilities => self.vendor.capabilities(&self.model),
            PmuRegister::DebugControl => self.registers.debug_control,
            PmuRegister::GlobalStatusReset | PmuRegister::GlobalStatusSet | PmuRegister::Absent => 0,
        })
    }

    /// Handles a guest WRMSR of `value` to the register `msr`.
    #[expect(clippy::too_many_lines, reason = "one arm per register")]
    pub fn write_msr(
        &mut self,
        msr: MsrAddress,
        value: u64,
        events: &mut dyn CounterEvents,
    ) -> MsrWriteOutcome {
        let Some(register) = self.vendor.register(&self.model, msr) else {
            return self.write_branch_register(msr, value);
        };
        let value = match self.vendor.write(&self.model, register, value) {
            RegisterWriteEffect::Store(value) => value,
            RegisterWriteEffect::Dropped => return MsrWriteOutcome::Done,
            RegisterWriteEffect::Fault => return MsrWriteOutcome::InjectGp,
        };
        match register {
            PmuRegister::Selector(counter) => {
                let differing = self.registers.selectors[counter.slot()] ^ value;
                if differing != 0 {
                    let same_event = differing & !(selector::INT | selector::EN) == 0;
                    // Counts up to this write belong to the old selector, as does its interrupt bit.
                    if self.running & counter.mask() == 0 || differing == selector::INT {
                        self.fold(counter, events);
                    } else if same_event {
                        self.pause_or_stop(counter, events);
                    } else {
                        self.stop(counter, events);
                    }
                    self.registers.selectors[counter.slot()] = value;
                    self.note_svme(value);
                    if !same_event {
                        self.mark_stale(counter.mask());
                    } else if differing & selector::INT != 0 {
                        self.changed(counter.mask());
                    } else if !self.stays_paused(counter) {
                        self.dirty |= counter.mask();
                    }
                }
            }
            PmuRegister::Counter(counter) | PmuRegister::FullWidthCounter(counter) => {
                self.fold_for(counter, value, events);
                if !self.vendor.has_status(&self.model) {
                    // Without a status register, a handler serves a counter by writing it.
                    self.served(counter.mask(), events);
                }
                self.counters[counter.slot()].value = value;
                self.rearm |= self.paused.counters & counter.mask();
            }
            PmuRegister::FixedControl => {
                let differing = self.registers.fixed_control ^ value;
                let mut changed = 0;
                for counter in counters_in(self.model.counters_mask() & !u64::from(u32::MAX)) {
                    let field = counter.bit() % 32 * 4;
                    if differing >> field & 0xF != 0 {
                        self.fold(counter, events);
                        changed |= counter.mask();
                    }
                }
                self.registers.fixed_control = value;
                self.changed(changed);
                self.mark_stale(changed);
            }
            PmuRegister::GlobalControl => {
                // With freeze-on-PMI, an overflow that occurred before this write has stopped the
                // counters, even if it has not been notified. It must therefore be detected first.
                if self.registers.freezes_counters() {
                    self.fold_all(events);
                }
                self.change_globals(|registers| registers.global_control = value);
            }
            PmuRegister::GlobalStatusReset => {
                // This write also clears overflows that occurred before it.
                self.fold_all(events);
                self.served(value & self.model.counters_mask(), events);
                self.change_globals(|registers| registers.global_status &= !value);
            }
            PmuRegister::GlobalStatusSet => self.change_globals(|registers| registers.global_status |= value),
            PmuRegister::DebugControl => {
                self.fold_all(events);
                self.registers.debug_control = value;
            }
            // The write fails or is ignored for these registers, so there is no value to store.
            PmuRegister::GlobalStatus
            | PmuRegister::GlobalInUse
            | PmuRegister::Capabilities
            | PmuRegister::Absent => {}
        }
        if self.pmi_share.is_running() {
            self.detect_handler_end(events);
        }
        MsrWriteOutcome::Done
    }

    /// Handles RDPMC with ECX = `index` at privilege level `cpl`. `cr4_pce` is CR4.PCE, without
    /// which RDPMC faults outside CPL 0 (Intel SDM vol. 2 and AMD APM vol. 3, RDPMC).
    pub fn rdpmc(
        &mut self,
        index: RdpmcIndex,
        cpl: Cpl,
        cr4_pce: bool,
        events: &mut dyn CounterEvents,
    ) -> MsrReadOutcome {
        if cpl > Cpl(0) && !cr4_pce {
            return MsrReadOutcome::InjectGp;
        }
        match self.vendor.rdpmc(&self.model, index) {
            Some(counter) => MsrReadOutcome::Value(self.value(counter, events)),
            None => MsrReadOutcome::InjectGp,
        }
    }

    /// Applies register changes to the counting events. Must be called before every guest entry.
    /// Costs a single test if nothing changed.
    #[inline]
    pub fn reconcile(&mut self, events: &mut dyn CounterEvents) {
        if events.may_have_lost() {
            self.detect_losses(events);
        }
        if self.dirty | self.paused.counters != 0 || self.lost.is_retrying() {
            self.pass(events);
        }
    }

    /// Reconciles all marked counters with the registers.
    fn pass(&mut self, events: &mut dyn CounterEvents) {
        let mut due = 0;
        if self.lost.is_retrying() {
            due = self.lost.take_due(events.now_ns());
            self.dirty |= due;
        }
        // Folding may detect an overflow that freezes other counters, so the pass repeats. The loop
        // terminates because only an overflow marks counters again, and nothing counts outside
        // guest mode.
        while self.dirty != 0 {
            let dirty = std::mem::take(&mut self.dirty);
            let dirty = self.pause_and_resume(dirty, events);
            for counter in counters_in(dirty) {
                self.reconcile_counter(counter, due & counter.mask() != 0, events);
            }
        }
        self.count_pass(events);
    }

    /// Handles an overflow notification from the host for `counter`. Returns whether this call
    /// detected an overflow of the counter. Returns `false` if the notification is early, in which
    /// case the event is re-armed for the remaining counts, or late, in which case the overflow was
    /// already accounted for.
    pub fn overflowed(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) -> bool {
        let before = self.counters[counter.slot()].overflows;
        self.fold(counter, events);
        // The notification disarmed the host event.
        if self.running & counter.mask() != 0 {
            self.changed(counter.mask());
        }
        self.end_pause(counter, events);
        self.counters[counter.slot()].overflows != before
    }

    /// Returns whether the caller must call [`Self::count_emulated_instruction`] for instructions
    /// that complete outside guest mode. The second flag is `true` if the privilege level of these
    /// instructions matters, because a counter counts at only one level.
    #[inline]
    pub fn needs_emulated_instructions(&self) -> (bool, bool) {
        if self.misses_emulated == 0 {
            return (false, false);
        }
        let one_level = |counter: CounterIndex| {
            self.counters[counter.slot()]
                .programmed
                .is_some_and(|(request, _)| request.user != request.kernel)
        };
        (true, counters_in(self.misses_emulated).any(one_level))
    }

    /// Counts an instruction that exited at `cpl` and was completed by the hypervisor. The
    /// processor did not retire the instruction, so no host event has counted it. Instruction
    /// counters include it, as on a physical processor and as in KVM's `kvm_pmu_trigger_event`.
    /// Branch counters do not, because no instruction that exits is a branch.
    ///
    /// Call this method after [`Self::reconcile`], so that the WRMSR that enables a counter is
    /// counted and the WRMSR that disables it is not. Call [`Self::reconcile`] again afterwards.
    pub fn count_emulated_instruction(&mut self, cpl: Cpl, events: &mut dyn CounterEvents) {
        for counter in counters_in(self.misses_emulated) {
            let held = &mut self.counters[counter.slot()];
            let counts = held.programmed.is_some_and(|(request, _)| {
                if cpl == Cpl(0) {
                    request.kernel
                } else {
                    request.user
                }
            });
            if !counts {
                continue;
            }
            // The result does not depend on whether the event's counts since `base` are added to
            // the value before or after this count.
            let advanced = self.model.width().advance(held.value, 1);
            held.value = advanced.value;
            held.counted = held.counted.saturating_add(1);
            held.outside += 1;
            if advanced.overflows > 0 {
                self.account_overflows(counter, 1);
                self.fold(counter, events);
            } else if held.outside > held.armed / MAX_DELAY_DIVISOR
                && self.vendor.interrupts(&self.registers, counter)
            {
                self.fold(counter, events);
                self.changed(counter.mask());
            }
        }
    }

    /// Resets the PMU: sets registers and counters to their reset values, discards a due PMI, and
    /// releases all events.
    ///
    /// Must only be called when the whole machine is reset. INIT and SIPI, which guests use to
    /// start processors, do not change the PMU.
    pub fn reset(&mut self, events: &mut dyn CounterEvents) {
        self.release(events);
        self.registers = self.vendor.at_reset(&self.model);
        self.counters = [Counter::default(); MAX_COUNTERS];
        self.branches = self.model.has_branch_records().then(Box::default);
        self.dirty = 0;
        self.forget_pmi();
        self.pmi_share.reset();
    }

    /// Brings all counters up to date (folds them) and releases their events, because the vCPU is
    /// about to move to another thread or to pause for a long time. Counting continues at the next
    /// [`Self::reconcile`], possibly with other events.
    pub fn detach(&mut self, events: &mut dyn CounterEvents) {
        self.fold_all(events);
        self.release(events);
        self.mark_all();
    }

    /// Stops and releases the events of all counters.
    pub(crate) fn release(&mut self, events: &mut dyn CounterEvents) {
        for counter in counters_in(self.model.counters_mask()) {
            self.lost.end(counter, || events.now_ns());
            if (self.running | self.paused.counters) & counter.mask() != 0 {
                events.disable(counter);
            }
            if self.counters[counter.slot()].programmed.take().is_some() {
                events.program(counter, None);
            }
        }
        self.running = 0;
        self.paused = PausedCounters::default();
        self.misses_emulated = 0;
        self.rearm = 0;
    }

    /// Marks all counters for the next reconcile pass, because their events may be out of date.
    pub(crate) fn mark_all(&mut self) {
        self.mark_stale(self.model.counters_mask());
    }

    /// Marks the counters in the mask `counters` for the next reconcile pass, because their events
    /// may have to be programmed differently.
    fn mark_stale(&mut self, counters: u64) {
        self.dirty |= counters;
        self.stale |= counters;
    }

    /// Marks the counters in the mask `counters` for the next reconcile pass. The pass also re-arms
    /// the overflows of those that are running or paused.
    fn changed(&mut self, counters: u64) {
        self.dirty |= counters;
        self.rearm |= counters & (self.running | self.paused.counters);
    }

    /// Changes global registers and marks the counters that start or stop as a result.
    fn change_globals(&mut self, change: impl FnOnce(&mut PmuRegisters)) {
        let before = self.vendor.globally_enabled(&self.registers);
        change(&mut self.registers);
        let after = self.vendor.globally_enabled(&self.registers);
        self.dirty |= (before ^ after) & self.model.counters_mask();
    }

    /// Returns the current value of the counter.
    fn value(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) -> u64 {
        self.fold(counter, events);
        self.counters[counter.slot()].value
    }

    /// Brings the values of all running counters up to date (folds them).
    pub(crate) fn fold_all(&mut self, events: &mut dyn CounterEvents) {
        for counter in counters_in(self.running) {
            self.fold(counter, events);
        }
    }

    /// Updates the value of a running counter and accounts for an overflow, if any.
    fn fold(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) {
        if self.running & counter.mask() != 0 {
            let count = events.count(counter);
            self.fold_to(counter, count);
        }
    }

    /// Brings a counter up to date (folds it) before the guest sets it to `value`. If the counter
    /// is running and interrupts on overflow, its event is re-armed for `value` in the same
    /// operation.
    fn fold_for(&mut self, counter: CounterIndex, value: u64, events: &mut dyn CounterEvents) {
        let running = self.running & counter.mask() != 0;
        if !running || !self.vendor.interrupts(&self.registers, counter) {
            self.fold(counter, events);
            return;
        }
        let until_overflow = self.model.width().until_overflow(value);
        let count = events.arm(counter, until_overflow);
        self.counters[counter.slot()].armed_for(until_overflow);
        self.fold_to(counter, count);
    }

    /// Stops a counter's event and brings the counter up to date (folds it).
    fn stop(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) {
        let count = events.disable(counter);
        self.fold_to(counter, count);
        self.running &= !counter.mask();
        self.misses_emulated &= !counter.mask();
        self.rearm &= !counter.mask();
    }

    /// Updates the counter's value for an event count of `count`, and accounts for overflows, if
    /// any.
    #[inline]
    fn fold_to(&mut self, counter: CounterIndex, count: u64) {
        let held = &mut self.counters[counter.slot()];
        let more = count.saturating_sub(held.base);
        if more == 0 {
            return;
        }
        let advanced = self.model.width().advance(held.value, more);
        held.counted = held.counted.saturating_add(more);
        held.base = count;
        held.value = advanced.value;
        if advanced.overflows > 0 {
            self.account_overflows(counter, advanced.overflows);
        }
    }

    /// Accounts for `overflows` overflows of the counter, and requests a PMI if the counter
    /// interrupts.
    fn account_overflows(&mut self, counter: CounterIndex, overflows: u64) {
        let held = &mut self.counters[counter.slot()];
        held.overflows = held.overflows.saturating_add(overflows);
        self.overflows = self.overflows.saturating_add(overflows);
        self.registers.global_status |= counter.mask();
        self.changed(counter.mask());
        if !self.vendor.interrupts(&self.registers, counter) {
            return;
        }
        self.counters[counter.slot()].pmi_requests += 1;
        self.pmi_due = true;
        self.pmi_sources |= counter.mask();
        if self.vendor.freeze(&self.model, &mut self.registers) {
            self.dirty |= self.running;
        }
    }

    /// Returns the event that the counter must count now. Decodes the counter's control only after
    /// the control or the filter has changed.
    fn target_event(&self, counter: CounterIndex) -> TargetEvent {
        if !self.is_enabled(counter) {
            return TargetEvent::Nothing { enabled: false };
        }
        let programmed = &self.counters[counter.slot()].programmed;
        if self.stale & counter.mask() == 0 && programmed.is_some() {
            return TargetEvent::Same;
        }
        match self.request(counter) {
            Some(request) if !self.filter.allows(request.selection) => TargetEvent::Nothing { enabled: true },
            Some(request) if programmed.is_some_and(|(before, _)| before == request) => TargetEvent::Same,
            Some(request) => TargetEvent::Other(request),
            // The guest has not selected any privilege level, so the counter does not count.
            None => TargetEvent::Nothing { enabled: false },
        }
    }

    /// Makes one counter's event match the registers. `retry` is `true` if the counter was
    /// uncounted or counted by a fallback and its retry is due.
    #[expect(clippy::too_many_lines, reason = "one sequence of steps with early returns")]
    fn reconcile_counter(&mut self, counter: CounterIndex, retry: bool, events: &mut dyn CounterEvents) {
        let mask = counter.mask();
        let slot = counter.slot();
        let target_event = self.target_event(counter);
        let kept = matches!(target_event, TargetEvent::Same);
        let only_stops = matches!(target_event, TargetEvent::Nothing { enabled: false });
        if self.running & mask != 0 && (!kept || retry) {
            if only_stops {
                self.pause_or_stop(counter, events);
            } else {
                self.stop(counter, events);
            }
            if self.dirty & mask != 0 {
                // Stopping the counter detected an overflow, which may have frozen the counters.
                // The next iteration handles this.
                return;
            }
        }
        if !kept && !only_stops {
            self.end_pause(counter, events);
        }
        match target_event {
            TargetEvent::Nothing { enabled: false } => {
                self.lost.end(counter, || events.now_ns());
                return;
            }
            // The guest has enabled the counter, but the event filter denies its event.
            TargetEvent::Nothing { enabled: true } => {
                let now_ns = events.now_ns();
                self.lost.begin(counter, now_ns, now_ns);
                return;
            }
            TargetEvent::Same => {}
            TargetEvent::Other(request) => {
                let backing = events.program(counter, Some(&request));
                self.lost.reset_counter(counter, || events.now_ns());
                if backing == CounterBacking::None {
                    self.warn_uncountable(request.event);
                }
                let held = &mut self.counters[slot];
                held.programmed = Some((request, backing));
                held.counted = 0;
                self.fresh |= mask;
            }
        }
        self.stale &= !mask;
        if self.counters[slot]
            .programmed
            .is_none_or(|(_, backing)| backing == CounterBacking::None)
        {
            // No backing can count the event, so there is no retry.
            let now_ns = events.now_ns();
            self.lost.begin(counter, now_ns, now_ns);
            return;
        }
        let until_overflow = self.model.width().until_overflow(self.counters[slot].value);
        // Without an interrupt, a guest cannot observe when the status bit was set. The overflow is
        // then detected at the next access, so no overflow notification is requested.
        let interrupts = self.vendor.interrupts(&self.registers, counter);
        self.resume(counter, events);
        if self.running & mask == 0 {
            self.free_slots(events);
            let waits = kept && self.lost.waits(counter);
            if !waits && !self.lost.must_back_off(counter, || events.now_ns()) {
                self.enable(counter, interrupts.then_some(until_overflow), events);
                if self.running & mask != 0 {
                    if self.counters[slot].programmed.is_some_and(misses_emulated) {
                        self.misses_emulated |= mask;
                    }
                    self.counters[slot].armed_for(until_overflow);
                }
            }
        } else if self.rearm & mask != 0 && interrupts {
            events.arm(counter, until_overflow);
            self.counters[slot].armed_for(until_overflow);
        }
        self.rearm &= !mask;
    }

    /// Enables the counter's event with the best available backing.
    fn enable(&mut self, counter: CounterIndex, overflow_in: Option<u64>, events: &mut dyn CounterEvents) {
        let (enabled, count) = events.enable(counter, overflow_in);
        let Some((request, before)) = &mut self.counters[counter.slot()].programmed else {
            return;
        };
        let request = *request;
        if let CounterEnableOutcome::Counting(backing) | CounterEnableOutcome::Fallback(backing, _) = enabled
        {
            self.running |= counter.mask();
            if self.fresh & counter.mask() != 0 || *before != backing {
                // The backing has changed, and the new backing has its own count.
                *before = backing;
                self.fresh &= !counter.mask();
                self.counters[counter.slot()].base = count;
            }
        }
        match enabled {
            CounterEnableOutcome::Counting(_) => {
                self.lost.clear_refusal(counter);
                if self.lost.end(counter, || events.now_ns()) {
                    log::debug!("counter {counter} ({}) counts again", request.event);
                }
            }
            CounterEnableOutcome::Fallback(_, lack) => {
                let now_ns = events.now_ns();
                self.lost.fall_back(counter, now_ns);
                self.lost.retry(counter, now_ns);
                self.lost.warn(counter, &request.event, lack, true, now_ns);
            }
            CounterEnableOutcome::Refused(lack) => {
                let now_ns = events.now_ns();
                self.lost.begin(counter, now_ns, now_ns);
                self.lost.record_rejection(counter, now_ns);
                self.lost.warn(counter, &request.event, lack, false, now_ns);
            }
        }
    }

    /// Logs a warning that no backing can count `event`, once per event.
    fn warn_uncountable(&mut self, event: DecodedCounterEvent) {
        let bit = match event {
            DecodedCounterEvent::Architectural(arch) => 1 << arch as u32,
            DecodedCounterEvent::Paravirtual(_) | DecodedCounterEvent::Raw => 1 << 31,
        };
        if self.warned & bit == 0 {
            self.warned |= bit;
            log::warn!(
                "the guest programmed {event} events, which no backing supports; the counter does \
                not count"
            );
        }
    }
}
