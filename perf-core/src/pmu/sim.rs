//! The `sim` driver: a simulated PMU that counts exactly as a test specifies.
//!
//! Counts advance only in [`SimPmu::advance`]. The simulation covers the constraints of real PMUs:
//! few slots, events that fit only some slots ([`SimPmuConfig::allowed_slots`]), slots that another
//! user holds (`taken`), skid between an overflow and its notification, failing opens and starts,
//! and slots that are taken away from running events and returned. [`SimHostPmu`] describes the
//! counters of real PMUs.
//!
//! An active event keeps its slot unless a newly started event fits only if the active one moves to
//! another slot.
//!
//! Clones of a [`SimPmu`] are handles to the same simulated PMU, so a test keeps one and passes
//! another to the core.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::attr::{Attr, EventType};
use crate::pmu::period_floor::PeriodFloor;
use crate::pmu::{CounterMask, Pmu, PmuCounterCapacity, PmuError, PmuEvent, PmuEventTarget, VcpuId};

mod hosts;

pub use hosts::{SimFixedCounter, SimHostPmu};

/// Maximum number of slots of a simulated PMU.
pub const MAX_SLOTS: usize = CounterMask::MAX_COUNTERS;

/// Configuration of a simulated PMU.
#[derive(Clone, Debug, Default)]
pub struct SimPmuConfig {
    /// Number of slots per vCPU, or `None` for a software driver, which has no slots.
    pub slots: Option<usize>,
    /// For each `config`, the mask of slots that can hold the event. A `config` without an entry
    /// fits all slots in `general`.
    pub allowed_slots: BTreeMap<u64, u64>,
    /// Value of [`PmuEvent::lost_ns`] for an event that lost its slot, in nanoseconds.
    pub late_ns: u64,
    /// Mask of slots that can hold events without an entry in `allowed_slots`, or `None` for all
    /// slots.
    pub general: Option<u64>,
    /// Hides slot constraints from the core, so that only a failed start reveals that an event does
    /// not fit. Models a host kernel with constraints that are unknown to this crate.
    pub untold: bool,
    /// Mask of slots that another user of the PMU holds. No event is assigned to these slots.
    pub taken: u64,
    /// Skid: number of counts between an overflow and its notification.
    pub skid: u64,
    /// Minimum period of the simulated host. Shorter periods are rejected with `EINVAL`, as Linux
    /// does on some Intel processors. 0 accepts every period.
    pub min_period: u64,
    /// Values of `config` for which opening an event fails because the event does not exist.
    pub unknown: Vec<u64>,
    /// Values of `config` that are package counts ([`PmuEvent::count`]).
    pub package: Vec<u64>,
}

#[derive(Debug, Default)]
struct SimCounter {
    vcpu: Option<VcpuId>,
    config: u64,
    on: bool,
    slot: Option<usize>,
    count: u64,
    /// Count at which the simulated hardware announces the overflow. If the requested period is
    /// below the minimum, this count is after `wanted_at`.
    armed_at: Option<u64>,
    /// Count at which the core requested that the event overflow.
    wanted_at: u64,
    floor: PeriodFloor,
    overflows: u32,
    /// Loss of the slot while the event was active: `None` if the slot was not lost, `Some(false)`
    /// before the core has noticed the loss, `Some(true)` afterwards.
    lost: Option<bool>,
}

impl SimCounter {
    /// Arms the simulated counter to overflow, on a host whose minimum period is `min_period`.
    fn arm(&mut self, overflow_in: u64, min_period: u64) -> Result<(), PmuError> {
        let overflow_in = overflow_in.max(1);
        let set = |period| match period < min_period {
            true => Err(io::Error::from_raw_os_error(libc::EINVAL)),
            false => Ok(()),
        };
        let period = self.floor.set(overflow_in, set).map_err(|source| PmuError::Os {
            what: "setting the period of a simulated event",
            source,
        })?;
        self.wanted_at = self.count.saturating_add(overflow_in);
        self.armed_at = Some(self.count.saturating_add(period));
        Ok(())
    }
}

#[derive(Debug, Default)]
struct SimState {
    counters: BTreeMap<u64, SimCounter>,
    next_id: u64,
    package: BTreeMap<u64, u64>,
    refuse_starts: u32,
    /// Number of slots of each vCPU that another user of the PMU holds, starting with slot 0.
    taken: usize,
    starts: u64,
    stops: u64,
    arms: u64,
}

#[derive(Debug)]
struct SimShared {
    config: SimPmuConfig,
    state: Mutex<SimState>,
}

impl SimShared {
    fn lock(&self) -> MutexGuard<'_, SimState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A simulated PMU. Clones are handles to the same PMU.
#[derive(Clone, Debug)]
pub struct SimPmu {
    shared: Arc<SimShared>,
}

/// Numbers of calls to a simulated PMU, by type of call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimCalls {
    /// Number of times that a stopped event was started successfully.
    pub starts: u64,
    /// Number of times that a started event was stopped.
    pub stops: u64,
    /// Number of times that an event was armed to overflow.
    pub arms: u64,
}

impl SimPmu {
    /// Creates a simulated PMU.
    ///
    /// # Panics
    /// Panics if `config` has more than [`MAX_SLOTS`] slots.
    #[must_use]
    pub fn new(config: SimPmuConfig) -> Self {
        assert!(
            config.slots.is_none_or(|n| n <= MAX_SLOTS),
            "at most {MAX_SLOTS} simulated slots"
        );
        Self {
            shared: Arc::new(SimShared {
                config,
                state: Mutex::new(SimState::default()),
            }),
        }
    }

    /// Creates a simulated PMU with `slots` slots and default configuration.
    ///
    /// # Panics
    /// Panics if `slots` is larger than [`MAX_SLOTS`].
    #[must_use]
    pub fn with_slots(slots: usize) -> Self {
        Self::new(SimPmuConfig {
            slots: Some(slots),
            ..SimPmuConfig::default()
        })
    }

    /// Adds `counts(config)` counts to each active event of `vcpu`, where `config` is that of the
    /// event, and to each package count.
    pub fn advance(&self, vcpu: VcpuId, counts: impl Fn(u64) -> u64) {
        let mut state = self.shared.lock();
        let skid = self.shared.config.skid;
        let SimState {
            counters, package, ..
        } = &mut *state;
        for counter in counters.values_mut().filter(|c| c.on) {
            if counter.vcpu == Some(vcpu) {
                counter.count += counts(counter.config);
            }
            if let Some(at) = counter.armed_at
                && counter.count >= at.saturating_add(skid)
            {
                counter.armed_at = None;
                counter.overflows += 1;
            }
        }
        for (config, total) in package {
            *total += counts(*config);
        }
    }

    /// Simulates expiry of the timers that poll for late overflows on `vcpu`. Each event that has
    /// reached the requested count reports its overflow, even if the simulated hardware would
    /// announce it later because of its minimum period.
    pub fn poll_late_overflows(&self, vcpu: VcpuId) {
        let mut state = self.shared.lock();
        for counter in state.counters.values_mut() {
            if counter.on
                && counter.vcpu == Some(vcpu)
                && counter.armed_at.is_some_and(|at| at > counter.wanted_at)
                && counter.count >= counter.wanted_at
            {
                counter.armed_at = None;
                counter.overflows += 1;
            }
        }
    }

    /// Makes the next `n` starts of events fail as if all counters were in use.
    pub fn refuse_starts(&self, n: u32) {
        self.shared.lock().refuse_starts = n;
    }

    /// Takes the first `n` slots of each vCPU away from the core's events, as another user of the
    /// PMU would.
    ///
    /// Running events move to other slots if possible. The most recently opened events for which
    /// no slot remains stop counting, and the core notices this only when it checks their counters.
    pub fn take_slots(&self, n: usize) {
        let config = &self.shared.config;
        let mut state = self.shared.lock();
        state.taken = n;
        let on: Vec<u64> = state
            .counters
            .iter()
            .filter(|(_, c)| c.on)
            .map(|(&id, _)| id)
            .collect();
        for &id in &on {
            state.counter(id).on = false;
        }
        for id in on {
            let stays = state.assign_slot(id, config);
            let counter = state.counter(id);
            counter.on = stays;
            if !stays {
                counter.slot = None;
                counter.armed_at = None;
                counter.lost = Some(false);
            }
        }
    }

    /// Returns the number of active events of `vcpu`.
    #[must_use]
    pub fn active_events(&self, vcpu: VcpuId) -> usize {
        let state = self.shared.lock();
        state
            .counters
            .values()
            .filter(|c| c.on && c.vcpu == Some(vcpu))
            .count()
    }

    /// Returns the number of open events of this PMU.
    #[must_use]
    pub fn open_events(&self) -> usize {
        self.shared.lock().counters.len()
    }

    /// Returns the numbers of calls to this PMU so far.
    #[must_use]
    pub fn calls(&self) -> SimCalls {
        let state = self.shared.lock();
        SimCalls {
            starts: state.starts,
            stops: state.stops,
            arms: state.arms,
        }
    }
}

impl Default for SimPmu {
    /// Creates a simulated software PMU, which has no slots.
    fn default() -> Self {
        Self::new(SimPmuConfig::default())
    }
}

impl Pmu for SimPmu {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn supports_type(&self, ty: EventType) -> bool {
        ty == EventType::SIM
    }

    fn capacity(&self) -> PmuCounterCapacity {
        match self.shared.config.slots {
            Some(n) => {
                PmuCounterCapacity::Counters(CounterMask::first(n).without(self.shared.config.taken()))
            }
            None => PmuCounterCapacity::Unlimited,
        }
    }

    fn constraint(&self, attr: &Attr) -> CounterMask {
        let config = &self.shared.config;
        if config.untold {
            CounterMask::ALL
        } else {
            config.fits(attr.config)
        }
    }

    fn open(&self, attr: &Attr, target: PmuEventTarget) -> Result<Box<dyn PmuEvent>, PmuError> {
        let config = &self.shared.config;
        if config.unknown.contains(&attr.config) {
            return Err(PmuError::NoSuchEvent);
        }
        if attr.exclude_user && attr.exclude_kernel {
            return Err(PmuError::Unsupported("both levels excluded"));
        }
        let vcpu = match target {
            PmuEventTarget::Vcpu { vcpu, .. } => Some(vcpu),
            PmuEventTarget::Vm => None,
            PmuEventTarget::Cpu { .. } => {
                return Err(PmuError::Unsupported(
                    "simulated counters are vCPUs' and the VM's",
                ));
            }
        };
        let mut state = self.shared.lock();
        state.next_id += 1;
        let id = state.next_id;
        let package = config.package.contains(&attr.config);
        if package {
            state.package.entry(attr.config).or_insert(0);
        }
        state.counters.insert(
            id,
            SimCounter {
                vcpu,
                config: attr.config,
                ..SimCounter::default()
            },
        );
        Ok(Box::new(SimEvent {
            shared: Arc::clone(&self.shared),
            id,
            package,
        }))
    }
}

#[derive(Debug)]
struct SimEvent {
    shared: Arc<SimShared>,
    id: u64,
    package: bool,
}

impl SimState {
    fn counter(&mut self, id: u64) -> &mut SimCounter {
        match self.counters.get_mut(&id) {
            Some(counter) => counter,
            // Unreachable, because a counter is removed only when its event is dropped.
            None => unreachable!("a simulated event without its counter"),
        }
    }

    /// Assigns event `id` to a slot. Moves other events if necessary, as a real scheduler would.
    /// Returns `false` if not all events fit.
    #[expect(clippy::cast_possible_truncation, reason = "a number of slots, 64 at most")]
    fn assign_slot(&mut self, id: u64, config: &SimPmuConfig) -> bool {
        let Some(slots) = config.slots else {
            return true;
        };
        let taken = 1u64
            .checked_shl(self.taken as u32)
            .map_or(u64::MAX, |bit| bit - 1);
        let vcpu = self.counter(id).vcpu;
        let mut ids: Vec<u64> = self
            .counters
            .iter()
            .filter(|(_, c)| c.on && c.vcpu == vcpu)
            .map(|(&i, _)| i)
            .collect();
        let mut slots_of = vec![None; slots];
        for (event, on) in ids.iter().enumerate() {
            if let Some(slot) = self.counters[on].slot {
                slots_of[slot] = Some(event);
            }
        }
        ids.push(id);
        let had = self.counter(id).slot;
        let masks: Vec<u64> = ids
            .iter()
            .map(|i| config.fits(self.counters[i].config).bits() & !taken)
            .collect();
        let event = ids.len() - 1;
        // Prefers the slot that the event held before, if it is free.
        let again = had.filter(|&slot| masks[event] & (1 << slot) != 0 && slots_of[slot].is_none());
        match again {
            Some(slot) => slots_of[slot] = Some(event),
            None if !find_slot(event, &masks, &mut slots_of) => return false,
            None => {}
        }
        for (slot, event) in slots_of.into_iter().enumerate() {
            if let Some(event) = event {
                self.counter(ids[event]).slot = Some(slot);
            }
        }
        true
    }
}

impl SimPmuConfig {
    fn taken(&self) -> CounterMask {
        CounterMask::from_bits(self.taken)
    }

    /// Returns the slots that can hold an event with `config` and that no other user of the PMU
    /// holds.
    fn fits(&self, config: u64) -> CounterMask {
        let general = self.general.unwrap_or(u64::MAX);
        let allowed = self.allowed_slots.get(&config).copied().unwrap_or(general);
        CounterMask::from_bits(allowed).without(self.taken())
    }
}

/// Assigns `event` to a slot in its mask that is free or can be freed by moving another event. If
/// there is no such slot, no event is moved.
fn find_slot(event: usize, masks: &[u64], slots_of: &mut [Option<usize>]) -> bool {
    fn hand_out_slots(event: usize, masks: &[u64], slots_of: &mut [Option<usize>], tried: &mut u64) -> bool {
        let free =
            (0..slots_of.len()).find(|&slot| masks[event] & (1 << slot) != 0 && slots_of[slot].is_none());
        if let Some(slot) = free {
            slots_of[slot] = Some(event);
            return true;
        }
        for slot in 0..slots_of.len() {
            if masks[event] & !*tried & (1 << slot) == 0 {
                continue;
            }
            *tried |= 1 << slot;
            if slots_of[slot].is_none_or(|other| hand_out_slots(other, masks, slots_of, tried)) {
                slots_of[slot] = Some(event);
                return true;
            }
        }
        false
    }
    hand_out_slots(event, masks, slots_of, &mut 0)
}

impl PmuEvent for SimEvent {
    fn start(&mut self, overflow_in: Option<u64>) -> Result<(), PmuError> {
        let mut state = self.shared.lock();
        if !state.counter(self.id).on {
            if state.refuse_starts > 0 {
                state.refuse_starts -= 1;
                return Err(PmuError::Busy);
            }
            if !state.assign_slot(self.id, &self.shared.config) {
                return Err(PmuError::Busy);
            }
            let counter = state.counter(self.id);
            (counter.on, counter.lost) = (true, None);
            state.starts += 1;
        }
        state.arms += u64::from(overflow_in.is_some());
        let counter = state.counter(self.id);
        match overflow_in {
            Some(n) => counter.arm(n, self.shared.config.min_period),
            None => {
                counter.armed_at = None;
                Ok(())
            }
        }
    }

    fn stop(&mut self) {
        let mut state = self.shared.lock();
        let counter = state.counter(self.id);
        let was_on = std::mem::replace(&mut counter.on, false);
        counter.slot = None;
        counter.armed_at = None;
        counter.overflows = 0;
        let was_lost = counter.lost.take().is_some();
        state.stops += u64::from(was_on || was_lost);
    }

    fn read(&mut self) -> u64 {
        self.check_counter();
        self.shared.lock().counter(self.id).count
    }

    fn check_counter(&mut self) {
        let mut state = self.shared.lock();
        if let Some(seen) = &mut state.counter(self.id).lost {
            *seen = true;
        }
    }

    fn lost_ns(&self) -> Option<u64> {
        let lost = self.shared.lock().counter(self.id).lost;
        (lost == Some(true)).then_some(self.shared.config.late_ns)
    }

    fn arm(&mut self, overflow_in: u64) -> Result<(), PmuError> {
        let mut state = self.shared.lock();
        state.arms += 1;
        state
            .counter(self.id)
            .arm(overflow_in, self.shared.config.min_period)
    }

    fn take_overflows(&mut self) -> u32 {
        std::mem::take(&mut self.shared.lock().counter(self.id).overflows)
    }

    fn count(&mut self) -> Option<u64> {
        if !self.package {
            return None;
        }
        let mut state = self.shared.lock();
        let config = state.counter(self.id).config;
        state.package.get(&config).copied()
    }

    #[expect(clippy::cast_possible_truncation, reason = "a number of slots, 64 at most")]
    fn user_index(&self) -> u32 {
        let slot = self.shared.lock().counter(self.id).slot;
        slot.map_or(0, |s| s as u32 + 1)
    }
}

impl Drop for SimEvent {
    fn drop(&mut self) {
        self.stop();
        self.shared.lock().counters.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VCPU: VcpuId = VcpuId(0);

    fn open_on(pmu: &SimPmu, config: u64, vcpu: VcpuId) -> Box<dyn PmuEvent> {
        let attr = Attr::counting(EventType::SIM, config);
        pmu.open(&attr, PmuEventTarget::Vcpu { vcpu, tid: 0 }).unwrap()
    }

    fn open(pmu: &SimPmu, config: u64) -> Box<dyn PmuEvent> {
        open_on(pmu, config, VCPU)
    }

    #[test]
    fn active_events_never_exceed_slots() {
        let pmu = SimPmu::with_slots(2);
        let mut events: Vec<_> = (0..3).map(|i| open(&pmu, i)).collect();
        events[0].start(None).unwrap();
        events[1].start(None).unwrap();
        assert!(matches!(events[2].start(None), Err(PmuError::Busy)));
        // An event on another vCPU does not compete for these slots.
        let mut other = open_on(&pmu, 9, VcpuId(1));
        other.start(None).unwrap();
        events[0].stop();
        events[2].start(None).unwrap();
        pmu.advance(VCPU, |config| config + 1);
        assert_eq!(events[0].read(), 0);
        assert_eq!(events[1].read(), 2);
        assert_eq!(events[2].read(), 3);
        assert_eq!(other.read(), 0);
    }

    #[test]
    fn constrained_events_move_others_to_free_slots() {
        let pmu = SimPmu::new(SimPmuConfig {
            slots: Some(2),
            allowed_slots: BTreeMap::from([(5, 0b01)]),
            ..SimPmuConfig::default()
        });
        let mut free = open(&pmu, 1);
        let mut picky = open(&pmu, 5);
        let mut picky_too = open(&pmu, 5);
        free.start(None).unwrap();
        picky.start(None).unwrap();
        assert_eq!((free.user_index(), picky.user_index()), (2, 1));
        free.stop();
        assert!(matches!(picky_too.start(None), Err(PmuError::Busy)));
    }

    #[test]
    fn configured_refusals_occur() {
        let pmu = SimPmu::new(SimPmuConfig {
            unknown: vec![3],
            ..SimPmuConfig::default()
        });
        let attr = Attr::counting(EventType::SIM, 3);
        assert!(matches!(
            pmu.open(&attr, PmuEventTarget::Vm),
            Err(PmuError::NoSuchEvent)
        ));
        let mut ev = open(&pmu, 1);
        pmu.refuse_starts(1);
        assert!(matches!(ev.start(None), Err(PmuError::Busy)));
        assert_eq!(pmu.active_events(VCPU), 0);
        ev.start(None).unwrap();
        drop(ev);
        assert_eq!(pmu.open_events(), 0);
    }

    /// Behavior P40: all events of a package count read the same value, which is independent of the
    /// counts of the single events.
    #[test]
    fn p40_a_package_count_is_shared() {
        let pmu = SimPmu::new(SimPmuConfig {
            package: vec![7],
            ..SimPmuConfig::default()
        });
        let mut events: Vec<_> = (0..3).map(|i| open_on(&pmu, 7, VcpuId(i))).collect();
        events[1].start(None).unwrap();
        pmu.advance(VcpuId(1), |_| 10);
        pmu.advance(VcpuId(2), |_| 5);
        for ev in &mut events {
            assert_eq!(ev.count(), Some(15));
        }
        assert_eq!(events[1].read(), 10);
        assert_eq!(open(&pmu, 1).count(), None);
    }

    #[test]
    fn skid_delays_notification_but_not_count() {
        let pmu = SimPmu::new(SimPmuConfig {
            skid: 3,
            ..SimPmuConfig::default()
        });
        let mut ev = open(&pmu, 1);
        ev.start(Some(10)).unwrap();
        for counted in 1..=20 {
            pmu.advance(VCPU, |_| 1);
            assert_eq!(ev.take_overflows(), u32::from(counted == 13));
        }
    }

    proptest! {
        /// Behavior P23 for drivers: an event that is armed with period P, and re-armed for the
        /// remaining counts after each read, overflows floor(total / P) times, and the distance to
        /// its next overflow never exceeds P.
        #[test]
        fn p23_overflows_are_total_over_period(period in 1u64..100, steps in prop::collection::vec(0u64..100, 0..200)) {
            let pmu = SimPmu::default();
            let mut ev = open(&pmu, 1);
            ev.start(Some(period)).unwrap();
            let (mut overflows, mut next) = (0, period);
            for step in steps {
                pmu.advance(VCPU, |_| step);
                let count = ev.read();
                if ev.take_overflows() > 0 {
                    let passed = (count - next) / period + 1;
                    overflows += passed;
                    next += passed * period;
                    ev.arm(next - count).unwrap();
                }
                prop_assert!(next > count && next - count <= period);
                prop_assert_eq!(overflows, count / period);
            }
        }

        /// Behavior P38: a stopped event reports no overflow.
        #[test]
        fn p38_stopped_event_reports_no_overflow(n in 1u64..100, counts in prop::collection::vec(0u64..200, 0..20)) {
            let pmu = SimPmu::default();
            let mut ev = open(&pmu, 1);
            ev.start(Some(n)).unwrap();
            ev.stop();
            for c in counts {
                pmu.advance(VCPU, |_| c);
                prop_assert_eq!(ev.take_overflows(), 0);
            }
            prop_assert_eq!(ev.read(), 0);
        }

        /// An assignment respects every mask and uses no slot twice, and a failure means that no
        /// assignment exists. A running event keeps its slot if a new event fits a free slot.
        #[test]
        fn placements_are_valid_and_complete(masks in prop::collection::vec(0u64..16, 0..6)) {
            fn possible(masks: &[u64], free: u64) -> bool {
                match masks.split_first() {
                    None => true,
                    Some((&m, rest)) => (0..4).any(|s| m & free & (1 << s) != 0 && possible(rest, free & !(1 << s))),
                }
            }
            let mut slots_of = vec![None; 4];
            let mut seated: Vec<u64> = Vec::new();
            for mask in masks {
                let with: Vec<u64> = seated.iter().copied().chain([mask]).collect();
                let before = slots_of.clone();
                let free = (0..4).any(|s: usize| mask & (1 << s) != 0 && before[s].is_none());
                if find_slot(seated.len(), &with, &mut slots_of) {
                    prop_assert!(possible(&with, 0b1111));
                    let moved = before.iter().zip(&slots_of).any(|(b, s)| b.is_some() && b != s);
                    prop_assert!(!(free && moved), "moved though there was a free slot");
                    seated = with;
                } else {
                    prop_assert!(!possible(&with, 0b1111));
                    prop_assert_eq!(&slots_of, &before);
                }
                let mut places = vec![0; seated.len()];
                for (slot, event) in slots_of.iter().enumerate() {
                    if let Some(e) = *event {
                        prop_assert!(seated[e] & (1 << slot) != 0);
                        places[e] += 1;
                    }
                }
                prop_assert!(places.iter().all(|&n| n == 1));
            }
        }
    }
}
