//! The PMU of one vCPU: its registers, its counters, its pending PMI.
//!
//! A guest's write changes registers and marks the counters it concerns; [`Vpmu::reconcile`] turns the marks
//! into calls to the counting events just before the guest runs again. A counter's value is kept as a pair:
//! the value it had when its event's count was `base`. While it runs, its value is that plus what the event
//! counted since. Bringing the pair up to date is called *folding*, and is where overflows are found: by
//! arithmetic, so that each is accounted exactly once no matter whether a read, a write or the host's
//! notification comes first.

mod paused;
mod places;
mod pmi;
mod view;

use std::sync::Arc;

use crate::events::{ArchEvent, Backing, EventRequest, GuestEvent};
use crate::filter::EventFilter;
use crate::index::{CounterIndex, MAX_COUNTERS, MsrAddress, RdpmcIndex, counters_in};
use crate::limit::{DEFAULT_PMI_LIMIT, RateLimit};
use crate::lost::Lost;
use crate::model::Model;
use crate::registers;
use crate::source::{CounterEvents, Enabled};
use crate::vendor::{Register, Registers, VendorOps, Written, selector};

pub use pmi::{PmiCounts, PmiReady};
pub use view::CounterView;

/// Outcome of a guest's RDMSR or RDPMC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MsrRead {
    /// The value for EDX:EAX.
    Value(u64),
    /// The guest gets a general protection fault.
    InjectGp,
}

/// Outcome of a guest's WRMSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MsrWrite {
    /// The instruction completes.
    Done,
    /// The guest gets a general protection fault.
    InjectGp,
}

/// Current privilege level: 0 to 3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cpl(pub u8);

/// An instruction of [`Vpmu::retired_outside`] puts off a PMI by one instruction. Up to this part of the way
/// to the overflow that is let be, because arming the host's event anew costs system calls: within the skid
/// that PMIs have anyway.
const LATE_PART: u64 = 256;

/// What the event of a counter must count now, beside what it was programmed for.
#[derive(Clone, Copy, Debug)]
enum Wanted {
    /// Nothing; whether the guest has the counter enabled all the same.
    Nothing { enabled: bool },
    /// What it was programmed for.
    Same,
    /// Something else.
    Other(EventRequest),
}

/// A counter's value and its event.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counter {
    /// Value when the event's count was `base`.
    pub(crate) value: u64,
    base: u64,
    /// What was counted since the event was programmed.
    counted: u64,
    /// The event's request and who counts it.
    programmed: Option<(EventRequest, Backing)>,
    /// Counts to the overflow when the host's event was last armed for it, and how many came otherwise
    /// since.
    armed: u64,
    outside: u64,
    /// What the event counted in pauses since it was armed.
    left_out: u64,
    pub(crate) overflows: u64,
    pub(crate) pmi_requests: u64,
}

impl Counter {
    /// The host's event was armed.
    fn armed_for(&mut self, until_overflow: u64) {
        self.armed = until_overflow;
        self.outside = 0;
        self.left_out = 0;
    }

    /// A counter without an event.
    pub(crate) fn restored(value: u64, overflows: u64, pmi_requests: u64) -> Self {
        Self {
            value,
            overflows,
            pmi_requests,
            ..Self::default()
        }
    }
}

/// Whether this event, counted by this backing, counts instructions but not those that a hypervisor completes
/// for the guest. The single-stepper decodes these too.
fn misses_exits((request, backing): (EventRequest, Backing)) -> bool {
    backing == Backing::Hardware
        && request.event == GuestEvent::Architectural(ArchEvent::Instructions)
        && !request.is_modified()
}

/// The counters that pause, and passes until that ends.
#[derive(Clone, Copy, Debug, Default)]
struct Paused {
    counters: u64,
    passes_left: u32,
}

/// The PMU of one vCPU.
#[derive(Debug)]
pub struct Vpmu {
    pub(crate) model: Model,
    vendor: &'static dyn VendorOps,
    filter: Arc<EventFilter>,
    pub(crate) registers: Registers,
    pub(crate) counters: [Counter; MAX_COUNTERS],
    /// Counters whose event may no longer be what the registers ask for.
    dirty: u64,
    /// Counters whose own control, or the filter, changed since their event was programmed.
    stale: u64,
    /// Counters whose event has not counted yet since it was programmed: from where it does is not known.
    fresh: u64,
    /// Counters whose event is counting.
    running: u64,
    /// Counters whose event counts although the guest has stopped them.
    paused: Paused,
    /// Counters that the guest has enabled and nobody counts, or not who should.
    lost: Lost,
    /// Running counters whose armed overflow is out of date.
    rearm: u64,
    /// Running counters of instructions whose event does not see those that leave guest mode.
    misses_exits: u64,
    pub(crate) pmi_due: bool,
    /// Counters that asked for the due PMI and have not been served since.
    pub(crate) pmi_sources: u64,
    /// The due PMI could not be delivered when it was to be: from now on it is only kept while it has a
    /// source.
    pmi_waits: bool,
    /// The due PMI was already counted as throttled.
    pmi_held: bool,
    pmi_limit: RateLimit,
    pmi_counts: PmiCounts,
    throttle_logged_ns: Option<u64>,
    /// Events whose lack of a backing was logged: bit n for architectural event n, the top bit for all
    /// others.
    warned: u32,
}

impl Vpmu {
    /// A PMU in its reset state, that counts everything and limits PMIs to [`DEFAULT_PMI_LIMIT`].
    pub fn new(model: Model) -> Self {
        let vendor = registers::of(model.vendor());
        Self {
            model,
            vendor,
            filter: Arc::new(EventFilter::allow_all()),
            registers: vendor.at_reset(&model),
            counters: [Counter::default(); MAX_COUNTERS],
            dirty: 0,
            stale: 0,
            fresh: 0,
            running: 0,
            paused: Paused::default(),
            lost: Lost::default(),
            rearm: 0,
            misses_exits: 0,
            pmi_due: false,
            pmi_sources: 0,
            pmi_waits: false,
            pmi_held: false,
            pmi_limit: RateLimit::new(DEFAULT_PMI_LIMIT),
            pmi_counts: PmiCounts::default(),
            throttle_logged_ns: None,
            warned: 0,
        }
    }

    /// What was said of the PMU of the same vCPU before the machine was reset is not said again: a guest
    /// may do nothing but reset it.
    pub fn said_before(&mut self, before: &Self) {
        self.warned = before.warned;
        self.throttle_logged_ns = before.throttle_logged_ns;
    }

    /// The model this PMU is of.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Replaces the event filter. Counters that are already programmed follow at the next
    /// [`Self::reconcile`].
    pub fn set_filter(&mut self, filter: Arc<EventFilter>) {
        self.filter = filter;
        self.reprogrammed(self.model.counters_mask());
    }

    /// Limits PMIs to `per_second` (0 counts as 1).
    pub fn set_pmi_limit(&mut self, per_second: u32) {
        self.pmi_limit = RateLimit::new(per_second);
    }

    /// RDMSR.
    pub fn read_msr(&mut self, msr: MsrAddress, events: &mut dyn CounterEvents) -> MsrRead {
        let Some(register) = self.vendor.register(&self.model, msr) else {
            return MsrRead::InjectGp;
        };
        MsrRead::Value(match register {
            Register::Selector(counter) => self.registers.selectors[counter.slot()],
            Register::Counter(counter) | Register::FullWidthCounter(counter) => self.value(counter, events),
            Register::FixedControl => self.registers.fixed_control,
            Register::GlobalStatus => {
                // A counter whose overflow has not been notified yet must not be seen past it with its bit
                // clear.
                self.fold_all(events);
                self.registers.global_status
            }
            Register::GlobalControl => self.registers.global_control,
            Register::GlobalInUse => self.vendor.in_use(&self.model, &self.registers),
            Register::Capabilities => self.vendor.capabilities(),
            Register::DebugControl => self.registers.debug_control,
            Register::GlobalStatusReset | Register::GlobalStatusSet | Register::Absent => 0,
        })
    }

    /// WRMSR.
    pub fn write_msr(&mut self, msr: MsrAddress, value: u64, events: &mut dyn CounterEvents) -> MsrWrite {
        let Some(register) = self.vendor.register(&self.model, msr) else {
            return MsrWrite::InjectGp;
        };
        let value = match self.vendor.write(&self.model, register, value) {
            Written::Store(value) => value,
            Written::Dropped => return MsrWrite::Done,
            Written::Fault => return MsrWrite::InjectGp,
        };
        match register {
            Register::Selector(counter) => {
                let differing = self.registers.selectors[counter.slot()] ^ value;
                if differing != 0 {
                    let same_event = differing & !(selector::INT | selector::EN) == 0;
                    // What was counted belongs to the old selector, its interrupt bit included.
                    if self.running & counter.mask() == 0 || differing == selector::INT {
                        self.fold(counter, events);
                    } else if same_event {
                        self.halt_or_stop(counter, events);
                    } else {
                        self.stop(counter, events);
                    }
                    self.registers.selectors[counter.slot()] = value;
                    if !same_event {
                        self.reprogrammed(counter.mask());
                    } else if differing & selector::INT != 0 {
                        self.changed(counter.mask());
                    } else if !self.rests(counter) {
                        self.dirty |= counter.mask();
                    }
                }
            }
            Register::Counter(counter) | Register::FullWidthCounter(counter) => {
                self.fold_for(counter, value, events);
                if !self.vendor.has_status(&self.model) {
                    // Without a status register this is how a handler serves a counter.
                    self.served(counter.mask(), events);
                }
                self.counters[counter.slot()].value = value;
                self.rearm |= self.paused.counters & counter.mask();
            }
            Register::FixedControl => {
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
                self.reprogrammed(changed);
            }
            Register::GlobalControl => {
                // With freeze-on-PMI an overflow that was not notified yet has stopped the counters before
                // this write; without it the order does not show.
                if self.registers.debug_control != 0 {
                    self.fold_all(events);
                }
                self.change_globals(|registers| registers.global_control = value);
            }
            Register::GlobalStatusReset => {
                // An overflow from before this write is cleared by it.
                self.fold_all(events);
                self.served(value & self.model.counters_mask(), events);
                self.change_globals(|registers| registers.global_status &= !value);
            }
            Register::GlobalStatusSet => self.change_globals(|registers| registers.global_status |= value),
            Register::DebugControl => {
                self.fold_all(events);
                self.registers.debug_control = value;
            }
            // The vendors store nothing in these.
            Register::GlobalStatus | Register::GlobalInUse | Register::Capabilities | Register::Absent => {}
        }
        MsrWrite::Done
    }

    /// Takes over what a register of another PMU of the same model holds, as it is: nothing that a guest's
    /// write would do is done. For PMUs that others emulate, whose state is shown or saved by this one; see
    /// [`Model::state_msrs`]. Returns whether the model has that register.
    pub fn take_over(&mut self, msr: MsrAddress, value: u64) -> bool {
        let Some(register) = self.vendor.register(&self.model, msr) else {
            return false;
        };
        match register {
            Register::Selector(counter) => self.registers.selectors[counter.slot()] = value,
            Register::Counter(counter) | Register::FullWidthCounter(counter) => {
                self.counters[counter.slot()].value = value & self.model.width().mask();
            }
            Register::FixedControl => self.registers.fixed_control = value,
            Register::GlobalControl => self.registers.global_control = value,
            Register::GlobalStatus => self.registers.global_status = value,
            Register::DebugControl => self.registers.debug_control = value,
            Register::GlobalStatusReset
            | Register::GlobalStatusSet
            | Register::GlobalInUse
            | Register::Capabilities
            | Register::Absent => {}
        }
        self.all_changed();
        true
    }

    /// RDPMC with ECX = `index` at privilege level `cpl`; `cr4_pce` is CR4.PCE. Intel SDM vol. 2 and AMD APM
    /// vol. 3, RDPMC: outside CPL 0 it needs CR4.PCE.
    pub fn rdpmc(
        &mut self,
        index: RdpmcIndex,
        cpl: Cpl,
        cr4_pce: bool,
        events: &mut dyn CounterEvents,
    ) -> MsrRead {
        if cpl > Cpl(0) && !cr4_pce {
            return MsrRead::InjectGp;
        }
        match self.vendor.rdpmc(&self.model, index) {
            Some(counter) => MsrRead::Value(self.value(counter, events)),
            None => MsrRead::InjectGp,
        }
    }

    /// Makes the counting events follow the registers. Call it before every entry to the guest; with nothing
    /// changed it is one test.
    #[inline]
    pub fn reconcile(&mut self, events: &mut dyn CounterEvents) {
        if events.may_have_lost() {
            self.look_for_losses(events);
        }
        if self.dirty | self.paused.counters != 0 || self.lost.is_retrying() {
            self.pass(events);
        }
    }

    /// Brings all counters that were marked in line with the registers.
    fn pass(&mut self, events: &mut dyn CounterEvents) {
        let mut due = 0;
        if self.lost.is_retrying() {
            due = self.lost.take_due(events.now_ns());
            self.dirty |= due;
        }
        // A fold in the pass may find an overflow that freezes the other counters, hence the loop. It ends: a
        // counter is only marked again by an overflow, and nothing counts outside guest mode.
        while self.dirty != 0 {
            let dirty = std::mem::take(&mut self.dirty);
            let dirty = self.toggle(dirty, events);
            for counter in counters_in(dirty) {
                self.reconcile_counter(counter, due & counter.mask() != 0, events);
            }
        }
        self.passed(events);
    }

    /// The host notified an overflow of `counter`'s event. Returns whether the counter has overflowed:
    /// `false` when the notification is early (it is armed again for the rest), or late (the overflow is
    /// already accounted).
    pub fn overflowed(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) -> bool {
        let before = self.counters[counter.slot()].overflows;
        self.fold(counter, events);
        // Whatever the host armed is used up.
        if self.running & counter.mask() != 0 {
            self.changed(counter.mask());
        }
        self.end_pause(counter, events);
        self.counters[counter.slot()].overflows != before
    }

    /// Whether some counter that counts now wants to hear of instructions that complete outside guest mode,
    /// and whether it must know at which privilege level.
    #[inline]
    pub fn wants_retired_outside(&self) -> (bool, bool) {
        if self.misses_exits == 0 {
            return (false, false);
        }
        let one_level = |counter: CounterIndex| {
            self.counters[counter.slot()]
                .programmed
                .is_some_and(|(request, _)| request.user != request.kernel)
        };
        (true, counters_in(self.misses_exits).any(one_level))
    }

    /// The guest executed an instruction at `cpl` that left guest mode and was completed by its hypervisor:
    /// the processor did not retire it there, so no host event has counted it. Instructions count it, as on a
    /// processor (and as KVM's `kvm_pmu_trigger_event` does for its own vPMU); no such instruction is a
    /// branch.
    ///
    /// Call it after [`Self::reconcile`], so that the WRMSR that enables a counter counts and the one that
    /// disables it does not; and call that again afterwards.
    pub fn retired_outside(&mut self, cpl: Cpl, events: &mut dyn CounterEvents) {
        for counter in counters_in(self.misses_exits) {
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
            // What the event has counted since `base` comes on top of the value, now or later: the sum is the
            // same.
            let advanced = self.model.width().advance(held.value, 1);
            held.value = advanced.value;
            held.counted = held.counted.saturating_add(1);
            held.outside += 1;
            if advanced.overflows > 0 {
                held.overflows = held.overflows.saturating_add(1);
                self.account_overflow(counter);
                self.fold(counter, events);
            } else if held.outside > held.armed / LATE_PART
                && self.vendor.interrupts(&self.registers, counter)
            {
                self.fold(counter, events);
                self.changed(counter.mask());
            }
        }
    }

    /// RESET of the vCPU: registers and counters take their reset values, a due PMI is forgotten, events are
    /// released.
    ///
    /// Only for a machine that is reset as a whole. INIT and SIPI, with which guests start and restart
    /// processors, leave a PMU as it is, so starting a vCPU must not call this.
    pub fn reset(&mut self, events: &mut dyn CounterEvents) {
        self.release(events);
        self.registers = self.vendor.at_reset(&self.model);
        self.counters = [Counter::default(); MAX_COUNTERS];
        self.dirty = 0;
        self.forget_pmi();
    }

    /// Folds the counters and releases their events, because the vCPU goes to another thread or pauses for
    /// long. Counters go on at the next [`Self::reconcile`], with whatever events it is given.
    pub fn detach(&mut self, events: &mut dyn CounterEvents) {
        self.fold_all(events);
        self.release(events);
        self.all_changed();
    }

    /// Stops and releases every event.
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
        self.paused = Paused::default();
        self.misses_exits = 0;
        self.rearm = 0;
    }

    /// Marks every counter, so that the next reconcile brings its event in line.
    pub(crate) fn all_changed(&mut self) {
        self.reprogrammed(self.model.counters_mask());
    }

    /// Marks counters for the next reconcile whose event may be another one now.
    fn reprogrammed(&mut self, counters: u64) {
        self.dirty |= counters;
        self.stale |= counters;
    }

    /// Marks counters for the next reconcile, including what they are armed with.
    fn changed(&mut self, counters: u64) {
        self.dirty |= counters;
        self.rearm |= counters & (self.running | self.paused.counters);
    }

    /// Changes global registers and marks the counters that count, or no longer count, because of it.
    fn change_globals(&mut self, change: impl FnOnce(&mut Registers)) {
        let before = self.vendor.globally_enabled(&self.registers);
        change(&mut self.registers);
        let after = self.vendor.globally_enabled(&self.registers);
        self.dirty |= (before ^ after) & self.model.counters_mask();
    }

    /// The counter's value now.
    fn value(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) -> u64 {
        self.fold(counter, events);
        self.counters[counter.slot()].value
    }

    /// Folds every running counter.
    pub(crate) fn fold_all(&mut self, events: &mut dyn CounterEvents) {
        for counter in counters_in(self.running) {
            self.fold(counter, events);
        }
    }

    /// Brings a running counter's value up to date and accounts the overflow it may have had on the way.
    fn fold(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) {
        if self.running & counter.mask() != 0 {
            let count = events.count(counter);
            self.fold_to(counter, count);
        }
    }

    /// Folds a counter that is about to be set to `value`. A running one that interrupts is armed for that
    /// at once: what came before it is accounted by the same reading of its event.
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

    /// Stops a running counter's event, with its value brought up to date.
    fn stop(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) {
        let count = events.disable(counter);
        self.fold_to(counter, count);
        self.running &= !counter.mask();
        self.misses_exits &= !counter.mask();
        self.rearm &= !counter.mask();
    }

    /// The counter's event has counted `count`.
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
            held.overflows = held.overflows.saturating_add(advanced.overflows);
            self.account_overflow(counter);
        }
    }

    /// A counter passed its highest value.
    fn account_overflow(&mut self, counter: CounterIndex) {
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

    /// Whether the guest has the counter enabled, in its own control and globally.
    fn is_enabled(&self, counter: CounterIndex) -> bool {
        self.vendor.globally_enabled(&self.registers) & counter.mask() != 0
            && self.vendor.is_selected(&self.registers, counter)
    }

    /// What the counter's event must count now. Its control is decoded only after that or the filter has
    /// changed.
    fn wanted(&self, counter: CounterIndex) -> Wanted {
        if !self.is_enabled(counter) {
            return Wanted::Nothing { enabled: false };
        }
        let programmed = &self.counters[counter.slot()].programmed;
        if self.stale & counter.mask() == 0 && programmed.is_some() {
            return Wanted::Same;
        }
        match self.vendor.request(&self.registers, counter) {
            Some(request) if !self.filter.allows(request.selection) => Wanted::Nothing { enabled: true },
            Some(request) if programmed.is_some_and(|(before, _)| before == request) => Wanted::Same,
            Some(request) => Wanted::Other(request),
            // At no privilege level.
            None => Wanted::Nothing { enabled: false },
        }
    }

    /// Brings one counter's event in line with the registers. `retry`: its time to look for a place has come.
    fn reconcile_counter(&mut self, counter: CounterIndex, retry: bool, events: &mut dyn CounterEvents) {
        let mask = counter.mask();
        let slot = counter.slot();
        let wanted = self.wanted(counter);
        let kept = matches!(wanted, Wanted::Same);
        let only_stops = matches!(wanted, Wanted::Nothing { enabled: false });
        if self.running & mask != 0 && (!kept || retry) {
            if only_stops {
                self.halt_or_stop(counter, events);
            } else {
                self.stop(counter, events);
            }
            if self.dirty & mask != 0 {
                // It had overflowed, which may have frozen the counters; the next round sees to it.
                return;
            }
        }
        if !kept && !only_stops {
            self.end_pause(counter, events);
        }
        match wanted {
            Wanted::Nothing { enabled: false } => {
                self.lost.end(counter, || events.now_ns());
                return;
            }
            // The guest counts what it may not.
            Wanted::Nothing { enabled: true } => {
                let now_ns = events.now_ns();
                self.lost.begin(counter, now_ns, now_ns);
                return;
            }
            Wanted::Same => {}
            Wanted::Other(request) => {
                let backing = events.program(counter, Some(&request));
                self.lost.forget(counter, || events.now_ns());
                if backing == Backing::None {
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
            .is_none_or(|(_, backing)| backing == Backing::None)
        {
            // Nothing that passes.
            let now_ns = events.now_ns();
            self.lost.begin(counter, now_ns, now_ns);
            return;
        }
        let until_overflow = self.model.width().until_overflow(self.counters[slot].value);
        // Nobody can tell when exactly a status bit was set unless an interrupt tells it: without one the
        // overflow is found when the guest looks, and the host need not be bothered.
        let interrupts = self.vendor.interrupts(&self.registers, counter);
        self.resume(counter, events);
        if self.running & mask == 0 {
            self.make_room(events);
            let waits = kept && self.lost.waits(counter);
            if !waits && !self.lost.is_too_soon(counter, || events.now_ns()) {
                self.enable(counter, interrupts.then_some(until_overflow), events);
                if self.running & mask != 0 {
                    if self.counters[slot].programmed.is_some_and(misses_exits) {
                        self.misses_exits |= mask;
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

    /// Starts the counter's event, as well as can be.
    fn enable(&mut self, counter: CounterIndex, overflow_in: Option<u64>, events: &mut dyn CounterEvents) {
        let (enabled, count) = events.enable(counter, overflow_in);
        let Some((request, before)) = &mut self.counters[counter.slot()].programmed else {
            return;
        };
        let request = *request;
        if let Enabled::Counting(backing) | Enabled::Fallback(backing, _) = enabled {
            self.running |= counter.mask();
            if self.fresh & counter.mask() != 0 || *before != backing {
                // Another counts than before, from a count of its own.
                *before = backing;
                self.fresh &= !counter.mask();
                self.counters[counter.slot()].base = count;
            }
        }
        match enabled {
            Enabled::Counting(_) => {
                self.lost.placed(counter);
                if self.lost.end(counter, || events.now_ns()) {
                    log::debug!("counter {counter} ({}) counts again", request.event);
                }
            }
            Enabled::Fallback(_, lack) => {
                let now_ns = events.now_ns();
                self.lost.fall_back(counter, now_ns);
                self.lost.retry(counter, now_ns);
                self.lost.warn(counter, &request.event, lack, true, now_ns);
            }
            Enabled::Refused(lack) => {
                let now_ns = events.now_ns();
                self.lost.begin(counter, now_ns, now_ns);
                self.lost.refused(counter, now_ns);
                self.lost.warn(counter, &request.event, lack, false, now_ns);
            }
        }
    }

    /// Logs once for each kind of event that it will not count.
    fn warn_uncountable(&mut self, event: GuestEvent) {
        let bit = match event {
            GuestEvent::Architectural(arch) => 1 << arch as u32,
            GuestEvent::Paravirtual(_) | GuestEvent::Raw => 1 << 31,
        };
        if self.warned & bit == 0 {
            self.warned |= bit;
            log::warn!(
                "the guest counts {event} events, which nothing here can count: the counter stays as it is"
            );
        }
    }
}
