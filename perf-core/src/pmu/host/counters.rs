//! Detection of the host's general-purpose and fixed-function counters, by testing which events can
//! count together.
//!
//! The kernel does not report how many counters exist, which of them are fixed-function counters,
//! or which are in use. It reports only whether an event counts. A set of events is therefore
//! tested in two ways. If the events are opened as one *group*, the kernel rejects a group that the
//! hardware can never hold, regardless of other users. If they are opened as separate *pinned*
//! events, one of them enters the error state if no counter is free. A test with a group finds the
//! counters that exist, and a test with pinned events finds the counters that are free.
//!
//! An event that no fixed-function counter holds, such as branches, takes a general-purpose
//! counter. A fixed-function counter is detected if its event still counts in addition to the
//! maximum number of such events.

use perf_event_open_sys::bindings as b;
use serde::{Deserialize, Serialize};

use crate::attr::{Attr, EventType};
use crate::pmu::CounterMask;

/// Maximum number of counters for which a probe searches.
const MAX_COUNTERS: usize = 32;

/// Events that fixed-function counters hold (Intel SDM volume 3, "Fixed-Function Performance
/// Counters"): perf's name, the generic event, and the equivalent event select and unit mask.
const FIXED: [(&str, u32, u64); 3] = [
    ("instructions", b::PERF_COUNT_HW_INSTRUCTIONS, 0x00C0),
    ("cycles", b::PERF_COUNT_HW_CPU_CYCLES, 0x003C),
    // Pseudo event code that Linux uses for the third fixed-function counter.
    ("ref-cycles", b::PERF_COUNT_HW_REF_CPU_CYCLES, 0x0300),
];

/// Bits of a raw event that select the event rather than privilege levels or interrupts (Intel SDM
/// volume 3, `IA32_PERFEVTSELx`): event select, unit mask, edge, any thread, invert, counter mask.
const RAW_EVENT: u64 = 0xFFFF | 1 << 18 | 1 << 21 | 1 << 23 | 0xFF << 24;

/// An event that the probe opens to test whether a counter is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProbeEvent {
    /// Value of `perf_event_attr.type` for the event.
    pub ty: EventType,
    /// Value of `perf_event_attr.config` for the event.
    pub config: u64,
}

impl ProbeEvent {
    const fn generic(config: u32) -> Self {
        Self {
            ty: EventType::HARDWARE,
            config: config as u64,
        }
    }

    /// Events that no fixed-function counter holds, in order of preference. The last one is a raw
    /// event, which occupies a counter even of a virtual PMU that counts only cycles.
    const GENERAL: [Self; 4] = [
        Self::generic(b::PERF_COUNT_HW_BRANCH_INSTRUCTIONS),
        Self::generic(b::PERF_COUNT_HW_CACHE_REFERENCES),
        Self::generic(b::PERF_COUNT_HW_BRANCH_MISSES),
        Self {
            ty: EventType::RAW,
            config: 0x00C4,
        },
    ];
}

/// A PMU, real or simulated, that the probe tests with sets of events.
pub(super) trait ProbePmu {
    /// Returns `true` if all of `events` count at the same time, each opened as a separate pinned
    /// event.
    fn count_together(&mut self, events: &[ProbeEvent]) -> bool;

    /// Returns `true` if the PMU has enough counters for all of `events` in one group, whether or
    /// not the counters are in use.
    fn fit_one_group(&mut self, events: &[ProbeEvent]) -> bool;
}

/// A fixed-function counter of the host that the probe has found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FixedCounter {
    /// perf's name of the event that the counter holds.
    pub event: String,
    /// Value of `config` for the event that the counter holds.
    pub config: u64,
    /// `true` if no other user holds the counter.
    pub free: bool,
    /// `true` if general-purpose counters can hold the event of this counter too.
    pub general_too: bool,
}

/// The counters that are available to one thread of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostCounters {
    /// Number of free general-purpose counters of the thread.
    pub general: usize,
    /// Number of general-purpose counters that exist, including those in use.
    pub general_there: usize,
    /// Fixed-function counters that exist, including those in use.
    pub fixed: Vec<FixedCounter>,
}

impl HostCounters {
    /// Detects the counters by testing events. If the NMI watchdog is enabled (`nmi_watchdog`) and
    /// the test finds no counter in use, one counter is still treated as in use, because the
    /// watchdog may not watch the CPU on which the test runs.
    pub(super) fn find(trial: &mut dyn ProbePmu, nmi_watchdog: bool) -> Self {
        let Some(general) = ProbeEvent::GENERAL
            .into_iter()
            .find(|&e| trial.fit_one_group(&[e]))
        else {
            return Self::default();
        };
        let general_there = max_accepted(|events| trial.fit_one_group(events), general);
        let general_free = max_accepted(|events| trial.count_together(events), general).min(general_there);

        let mut there = vec![general; general_there];
        let mut free = vec![general; general_free];
        let mut fixed = Vec::new();
        for (name, config, _) in FIXED {
            let event = ProbeEvent::generic(config);
            there.push(event);
            if !trial.fit_one_group(&there) {
                there.pop();
                continue;
            }
            free.push(event);
            let is_free = trial.count_together(&free);
            if !is_free {
                free.pop();
            }
            let general_too = trial.fit_one_group(&[event, event]);
            fixed.push(FixedCounter {
                event: name.to_owned(),
                config: event.config,
                free: is_free,
                general_too,
            });
        }
        let mut found = Self {
            general: general_free,
            general_there,
            fixed,
        };
        if nmi_watchdog && found.all_free() {
            found.reserve_for_watchdog();
        }
        found
    }

    fn all_free(&self) -> bool {
        self.general == self.general_there && self.fixed.iter().all(|f| f.free)
    }

    /// Marks the watchdog's counter as in use: the fixed-function counter of cycles or, if there is
    /// none, a general-purpose counter.
    fn reserve_for_watchdog(&mut self) {
        let cycles = u64::from(b::PERF_COUNT_HW_CPU_CYCLES);
        match self.fixed.iter_mut().find(|f| f.config == cycles) {
            Some(fixed) => fixed.free = false,
            None => self.general = self.general.saturating_sub(1),
        }
    }

    /// Returns the number of free counters, general-purpose and fixed-function.
    #[must_use]
    pub fn free(&self) -> usize {
        self.general + self.fixed.iter().filter(|f| f.free).count()
    }

    /// Returns the free counters as a set: general-purpose counters first, then free fixed-function
    /// counters in order.
    #[must_use]
    pub fn mask(&self) -> CounterMask {
        let fixed = self.fixed.iter().enumerate().filter(|(_, f)| f.free);
        fixed.fold(CounterMask::first(self.general), |mask, (n, _)| {
            mask | CounterMask::one(self.general + n)
        })
    }

    /// Returns the free counters that can hold an event with attributes `attr`, as in
    /// [`HostCounters::mask`].
    #[must_use]
    pub fn constraint(&self, attr: &Attr) -> CounterMask {
        let general = CounterMask::first(self.general);
        let config = match attr.ty {
            EventType::HARDWARE => attr.config,
            EventType::RAW => match FIXED.iter().find(|f| f.2 == attr.config & RAW_EVENT) {
                Some(&(_, config, _)) => u64::from(config),
                None => return general,
            },
            _ => return general,
        };
        match self.fixed.iter().position(|f| f.config == config) {
            None => general,
            Some(n) => {
                let own = CounterMask::one(self.general + n) & self.mask();
                if self.fixed[n].general_too {
                    own | general
                } else {
                    own
                }
            }
        }
    }

    /// Returns the number of events with attributes `attr` that can be scheduled at the same time.
    #[must_use]
    pub fn max_simultaneous(&self, attr: &Attr) -> usize {
        self.constraint(attr).len()
    }

    /// Returns `true` if `general` events that need general-purpose counters, and one event each of
    /// the generic events `fixed`, can be scheduled at the same time.
    #[must_use]
    pub fn can_schedule(&self, general: usize, fixed: &[u64]) -> bool {
        // An event takes a general-purpose counter only if it has no free fixed-function counter.
        let also: usize = fixed
            .iter()
            .map(|&config| {
                let attr = Attr::counting(EventType::HARDWARE, config);
                let all = self.constraint(&attr);
                if all.is_empty() {
                    return None;
                }
                let own = all.without(CounterMask::first(self.general));
                Some(usize::from(own.is_empty()))
            })
            .sum::<Option<usize>>()
            // `None` means that one of the events fits no counter.
            .unwrap_or(usize::MAX);
        general.saturating_add(also) <= self.general
    }
}

/// Returns the largest number of copies of `event` that `go` accepts as a set.
fn max_accepted(mut go: impl FnMut(&[ProbeEvent]) -> bool, event: ProbeEvent) -> usize {
    let events = [event; MAX_COUNTERS];
    let (mut fits, mut fails) = (0, MAX_COUNTERS + 1);
    // Tries powers of two and then bisects, because the result is likely to be small.
    while fits + 1 < fails {
        let n = (2 * fits).max(1).min((fits + fails) / 2);
        if go(&events[..n]) {
            fits = n;
        } else {
            fails = n;
        }
    }
    fits
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pmu::sim::{SimFixedCounter, SimHostPmu, SimPmu};
    use crate::pmu::{Pmu, PmuEvent, PmuEventTarget, VcpuId};
    use proptest::prelude::*;

    /// A simulated host that the probe tests.
    struct SimulatedProbe(SimHostPmu);

    impl SimulatedProbe {
        fn go(host: &SimHostPmu, events: &[ProbeEvent]) -> bool {
            let pmu = SimPmu::new(host.config());
            let target = PmuEventTarget::Vcpu {
                vcpu: VcpuId(0),
                tid: 0,
            };
            let mut on: Vec<Box<dyn PmuEvent>> = Vec::new();
            events.iter().all(|event| {
                // Raw events are simulated as branches, which no fixed-function counter holds.
                let config = match event.ty {
                    EventType::RAW => SimHostPmu::BRANCHES,
                    _ => event.config,
                };
                let mut event = pmu.open(&Attr::counting(EventType::SIM, config), target).unwrap();
                let started = event.start(None).is_ok();
                on.push(event);
                started
            })
        }
    }

    impl ProbePmu for SimulatedProbe {
        fn count_together(&mut self, events: &[ProbeEvent]) -> bool {
            Self::go(&self.0, events)
        }

        fn fit_one_group(&mut self, events: &[ProbeEvent]) -> bool {
            Self::go(&self.0.clone().without_taken(), events)
        }
    }

    fn find(host: SimHostPmu, nmi_watchdog: bool) -> HostCounters {
        HostCounters::find(&mut SimulatedProbe(host), nmi_watchdog)
    }

    /// Returns the numbers of free and of existing general-purpose counters, and the event names of
    /// the fixed-function counters. The prefix `-` marks a counter in use.
    fn describe(found: &HostCounters) -> (usize, usize, Vec<String>) {
        let fixed = found.fixed.iter().map(|f| match f.free {
            true => f.event.clone(),
            false => format!("-{}", f.event),
        });
        (found.general, found.general_there, fixed.collect())
    }

    /// Probes `host` and compares the result of [`describe`] with the expected one.
    fn check(host: SimHostPmu, nmi_watchdog: bool, general: (usize, usize), fixed: &[&str]) -> HostCounters {
        let found = find(host, nmi_watchdog);
        let fixed = fixed.iter().map(|&name| name.to_owned()).collect();
        assert_eq!(describe(&found), (general.0, general.1, fixed));
        found
    }

    const FIXED: [&str; 3] = ["instructions", "cycles", "ref-cycles"];
    const WATCHED: [&str; 3] = ["instructions", "-cycles", "ref-cycles"];

    fn hardware(config: u64) -> Attr {
        Attr::counting(EventType::HARDWARE, config)
    }

    #[test]
    fn intel_host_with_two_threads_a_core() {
        let found = check(SimHostPmu::intel(4), false, (4, 4), &FIXED);
        assert_eq!(found.free(), 7);
        // Cycles fit every general-purpose counter and their fixed-function counter. Reference
        // cycles fit only their fixed-function counter.
        assert_eq!(found.max_simultaneous(&hardware(SimHostPmu::CYCLES)), 5);
        assert_eq!(found.max_simultaneous(&hardware(SimHostPmu::REF_CYCLES)), 1);
        assert_eq!(found.max_simultaneous(&hardware(SimHostPmu::BRANCHES)), 4);
        assert!(found.can_schedule(4, &[0, 1, 9]));
        assert!(!found.can_schedule(5, &[]));
    }

    #[test]
    fn watchdog_of_an_intel_host_takes_the_fixed_counter_of_cycles() {
        let found = check(SimHostPmu::intel(4).with_watchdog(), true, (4, 4), &WATCHED);
        assert_eq!(found.max_simultaneous(&hardware(SimHostPmu::CYCLES)), 4);
        assert!(found.can_schedule(3, &[0, 1, 9]));
        assert!(!found.can_schedule(4, &[0, 1, 9]));
    }

    /// If the watchdog does not watch the CPU on which the probe runs, it may still hold a counter
    /// on another CPU. One counter is therefore treated as in use.
    #[test]
    fn watchdog_on_other_cpus_reserves_a_counter() {
        check(SimHostPmu::intel(4), true, (4, 4), &WATCHED);
        check(SimHostPmu::amd(6), true, (5, 6), &[]);
    }

    #[test]
    fn taken_general_counter_is_not_free() {
        check(SimHostPmu::intel(4).with_taken(2), false, (3, 4), &FIXED);
    }

    /// Reference cycles cannot be counted if their counter is in use, because they fit no
    /// general-purpose counter.
    #[test]
    fn ref_cycles_do_not_fall_back_to_general_counters() {
        let found = check(
            SimHostPmu::intel(4).with_taken(6),
            false,
            (4, 4),
            &["instructions", "cycles", "-ref-cycles"],
        );
        assert!(found.constraint(&hardware(SimHostPmu::REF_CYCLES)).is_empty());
    }

    #[test]
    fn amd_host_with_the_watchdog_on() {
        let found = check(SimHostPmu::amd(6).with_watchdog(), true, (5, 6), &[]);
        assert_eq!(found.max_simultaneous(&hardware(SimHostPmu::CYCLES)), 5);
        assert!(!found.can_schedule(6, &[]));
    }

    #[test]
    fn version_two_of_amd_with_fifteen() {
        let found = check(SimHostPmu::amd(15), false, (15, 15), &[]);
        assert_eq!(found.free(), 15);
    }

    #[test]
    fn intel_host_with_eight_and_four() {
        let mut host = SimHostPmu::intel(8);
        // Adds a fourth fixed-function counter, for issue slots. The probe does not know this
        // event.
        host.fixed.push(SimFixedCounter {
            config: 0x400,
            general_too: false,
        });
        check(host, false, (8, 8), &FIXED);
    }

    #[test]
    fn host_without_counters() {
        let found = find(SimHostPmu::amd(0), false);
        assert_eq!(found, HostCounters::default());
        assert_eq!((found.free(), found.mask()), (0, CounterMask::NONE));
        assert!(!found.can_schedule(1, &[]) && found.can_schedule(0, &[]));
        assert!(!found.can_schedule(0, &[0]), "nothing counts cycles");
    }

    /// A raw event that is equivalent to a fixed-function event may use the fixed-function counter,
    /// whichever privilege levels it counts. A raw event with a different unit mask, or with edge
    /// detection, inversion or a counter mask, may not use it.
    #[test]
    fn equivalent_raw_events_use_fixed_counters() {
        let found = find(SimHostPmu::intel(4), false);
        let raw = |config| found.constraint(&Attr::counting(EventType::RAW, config));
        let instructions = found.constraint(&hardware(SimHostPmu::INSTRUCTIONS));
        assert_eq!(raw(0xC0), instructions);
        assert_eq!(raw(0xC0 | 0b11 << 16 | 1 << 22), instructions);
        for changed in [0x1C0, 0xC0 | 1 << 18, 0xC0 | 1 << 23, 0xC0 | 1 << 24] {
            assert_eq!(raw(changed), CounterMask::first(4), "{changed:#x}");
        }
        let cache = found.constraint(&Attr::counting(EventType::HW_CACHE, 0));
        // `config` 0 is cycles only among the generic events.
        assert_eq!(cache, CounterMask::first(4));
    }

    proptest! {
        /// On any host, with any counters in use, the number of events that the probe reports can
        /// count together, and no further event can.
        #[test]
        fn probed_capacity_is_exact(general in 0usize..9, fixed: bool, taken in 0u64..4096, watchdog: bool) {
            let mut host = if fixed { SimHostPmu::intel(general) } else { SimHostPmu::amd(general) };
            let there = general + host.fixed.len();
            host.taken = CounterMask::from_bits(taken) & CounterMask::first(there);
            let found = find(host.clone(), watchdog);
            prop_assert!(found.general <= found.general_there && found.general_there == general);
            let mut events = vec![ProbeEvent::GENERAL[0]; found.general];
            let free = found.fixed.iter().filter(|f| f.free);
            events.extend(free.map(|f| ProbeEvent { ty: EventType::HARDWARE, config: f.config }));
            prop_assert!(events.is_empty() || SimulatedProbe::go(&host, &events));
            prop_assert_eq!(events.len(), found.free());
            prop_assert_eq!(found.mask().len(), found.free());
            let missing = there - host.taken.len() - found.free();
            // The probe cannot detect any counter without a general-purpose counter.
            prop_assert!(general == 0 || missing <= usize::from(watchdog && host.taken.is_empty()), "{:?}", found);
            for config in [SimHostPmu::CYCLES, SimHostPmu::INSTRUCTIONS, SimHostPmu::REF_CYCLES, SimHostPmu::BRANCHES] {
                let n = found.max_simultaneous(&hardware(config));
                let tried = vec![ProbeEvent { ty: EventType::HARDWARE, config }; n + 1];
                prop_assert!(n == 0 || SimulatedProbe::go(&host, &tried[..n]));
                prop_assert!(watchdog || general == 0 || !SimulatedProbe::go(&host, &tried));
            }
        }
    }
}
