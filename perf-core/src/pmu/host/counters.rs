//! The counters of the host, general and fixed ones apart, found out by trying which events go on together.
//!
//! The kernel does not say how many counters there are, which of them are fixed, and who holds some of them.
//! It says whether events are on. So a set of events is tried in two ways: as one *group*, which the kernel
//! refuses if the hardware could never hold it, whoever has counters now; and *pinned*, each by itself, of
//! which one is in error if it finds no counter now. The first tells what there is, the second what is free.
//!
//! A general counter is what an event takes that no fixed one holds, such as branches. A fixed one shows when
//! its event goes on beside as many of those as fit.

use perf_event_open_sys::bindings as b;
use serde::{Deserialize, Serialize};

use crate::attr::{Attr, EventType};
use crate::pmu::CounterMask;

/// Nobody has more counters than this per thread; bounds the probing.
const MOST: usize = 32;

/// Events that fixed counters hold (Intel SDM volume 3, "Fixed-Function Performance Counters"), with perf's
/// names, and the event select and unit mask that mean the same when programmed by hand.
const FIXED: [(&str, u32, u64); 3] = [
    ("instructions", b::PERF_COUNT_HW_INSTRUCTIONS, 0x00C0),
    ("cycles", b::PERF_COUNT_HW_CPU_CYCLES, 0x003C),
    // Linux's own number for the third fixed counter.
    ("ref-cycles", b::PERF_COUNT_HW_REF_CPU_CYCLES, 0x0300),
];

/// Bits of a raw event that say what is counted, not at which level or with which interrupt (Intel SDM volume
/// 3, `IA32_PERFEVTSELx`): event select, unit mask, edge, any thread, invert, counter mask.
const RAW_EVENT: u64 = 0xFFFF | 1 << 18 | 1 << 21 | 1 << 23 | 0xFF << 24;

/// An event to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tried {
    /// `perf_event_attr.type`.
    pub ty: EventType,
    /// `perf_event_attr.config`.
    pub config: u64,
}

impl Tried {
    const fn generic(config: u32) -> Self {
        Self {
            ty: EventType::HARDWARE,
            config: config as u64,
        }
    }

    /// Events that no fixed counter holds. Where the kernel counts none of the first, as on a virtual PMU
    /// that has cycles only, a raw event takes a counter all the same.
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

/// A PMU on which sets of events can be tried.
pub(super) trait Trial {
    /// Whether all of `events` are on at once, pinned, each by itself.
    fn on_at_once(&mut self, events: &[Tried]) -> bool;

    /// Whether the hardware could hold all of `events` in one group, whoever has counters now.
    fn in_a_group(&mut self, events: &[Tried]) -> bool;
}

/// A fixed counter of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FixedCounter {
    /// perf's name of the event it holds.
    pub event: String,
    /// The `config` of that event.
    pub config: u64,
    /// Nobody else holds it.
    pub free: bool,
    /// General counters can hold the event too.
    pub general_too: bool,
}

/// The counters that one thread of the host can have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostCounters {
    /// General counters that are free.
    pub general: usize,
    /// General counters there are, those in other hands included.
    pub general_there: usize,
    /// Fixed counters there are.
    pub fixed: Vec<FixedCounter>,
}

impl HostCounters {
    /// Finds them out. `nmi_watchdog`: the NMI watchdog is on. It holds a counter of each CPU it watches,
    /// which need not be the one where this is tried.
    pub(super) fn find(trial: &mut dyn Trial, nmi_watchdog: bool) -> Self {
        let Some(general) = Tried::GENERAL.into_iter().find(|&e| trial.in_a_group(&[e])) else {
            return Self::default();
        };
        let general_there = most(|events| trial.in_a_group(events), general);
        let general_free = most(|events| trial.on_at_once(events), general).min(general_there);

        let mut there = vec![general; general_there];
        let mut free = vec![general; general_free];
        let mut fixed = Vec::new();
        for (name, config, _) in FIXED {
            let event = Tried::generic(config);
            there.push(event);
            if !trial.in_a_group(&there) {
                there.pop();
                continue;
            }
            free.push(event);
            let is_free = trial.on_at_once(&free);
            if !is_free {
                free.pop();
            }
            let general_too = trial.in_a_group(&[event, event]);
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
            found.give_to_watchdog();
        }
        found
    }

    fn all_free(&self) -> bool {
        self.general == self.general_there && self.fixed.iter().all(|f| f.free)
    }

    /// The watchdog counts cycles.
    fn give_to_watchdog(&mut self) {
        let cycles = u64::from(b::PERF_COUNT_HW_CPU_CYCLES);
        match self.fixed.iter_mut().find(|f| f.config == cycles) {
            Some(fixed) => fixed.free = false,
            None => self.general = self.general.saturating_sub(1),
        }
    }

    /// Counters that are free.
    #[must_use]
    pub fn free(&self) -> usize {
        self.general + self.fixed.iter().filter(|f| f.free).count()
    }

    /// The free ones as a set: the general ones first, then the fixed ones in their order, those in other
    /// hands left out.
    #[must_use]
    pub fn mask(&self) -> CounterMask {
        let fixed = self.fixed.iter().enumerate().filter(|(_, f)| f.free);
        fixed.fold(CounterMask::first(self.general), |mask, (n, _)| {
            mask | CounterMask::one(self.general + n)
        })
    }

    /// Those of [`HostCounters::mask`] that can hold `attr`.
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

    /// How many events like `attr` can be on at once.
    #[must_use]
    pub fn at_once(&self, attr: &Attr) -> usize {
        self.constraint(attr).len()
    }

    /// Whether `general` events of any kind and one each of the generic events `fixed` can be on at once.
    #[must_use]
    pub fn hold(&self, general: usize, fixed: &[u64]) -> bool {
        // An event that has a fixed counter to itself never takes a general one from anybody.
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
            // One of them has no counter at all.
            .unwrap_or(usize::MAX);
        general.saturating_add(also) <= self.general
    }
}

/// The largest number of `event`s for which `go` says yes.
fn most(mut go: impl FnMut(&[Tried]) -> bool, event: Tried) -> usize {
    let events = [event; MOST];
    let (mut fits, mut fails) = (0, MOST + 1);
    // Few are likely: 1, 2, 4, and so on first, then halves of what is left.
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
    use crate::pmu::sim::{SimFixed, SimHost, SimPmu};
    use crate::pmu::{Pmu, PmuEvent, Target, VcpuId};
    use proptest::prelude::*;

    /// Tries events on a simulated host.
    struct Simulated(SimHost);

    impl Simulated {
        fn go(host: &SimHost, events: &[Tried]) -> bool {
            let pmu = SimPmu::new(host.config());
            let target = Target::Vcpu {
                vcpu: VcpuId(0),
                tid: 0,
            };
            let mut on: Vec<Box<dyn PmuEvent>> = Vec::new();
            events.iter().all(|event| {
                // A raw event here is one that no fixed counter holds.
                let config = match event.ty {
                    EventType::RAW => SimHost::BRANCHES,
                    _ => event.config,
                };
                let mut event = pmu.open(&Attr::counting(EventType::SIM, config), target).unwrap();
                let started = event.start(None).is_ok();
                on.push(event);
                started
            })
        }
    }

    impl Trial for Simulated {
        fn on_at_once(&mut self, events: &[Tried]) -> bool {
            Self::go(&self.0, events)
        }

        fn in_a_group(&mut self, events: &[Tried]) -> bool {
            Self::go(&self.0.clone().untouched(), events)
        }
    }

    fn find(host: SimHost, nmi_watchdog: bool) -> HostCounters {
        HostCounters::find(&mut Simulated(host), nmi_watchdog)
    }

    /// General counters that are free and there, and the events of the fixed ones with `-` before those in
    /// other hands.
    fn shown(found: &HostCounters) -> (usize, usize, Vec<String>) {
        let fixed = found.fixed.iter().map(|f| match f.free {
            true => f.event.clone(),
            false => format!("-{}", f.event),
        });
        (found.general, found.general_there, fixed.collect())
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn hardware(config: u64) -> Attr {
        Attr::counting(EventType::HARDWARE, config)
    }

    #[test]
    fn an_intel_host_with_two_threads_a_core() {
        let found = find(SimHost::intel(4), false);
        assert_eq!(
            shown(&found),
            (4, 4, names(&["instructions", "cycles", "ref-cycles"]))
        );
        assert_eq!(found.free(), 7);
        // Cycles on every general counter and its own; reference cycles on theirs only.
        assert_eq!(found.at_once(&hardware(SimHost::CYCLES)), 5);
        assert_eq!(found.at_once(&hardware(SimHost::REF_CYCLES)), 1);
        assert_eq!(found.at_once(&hardware(SimHost::BRANCHES)), 4);
        assert!(found.hold(4, &[0, 1, 9]));
        assert!(!found.hold(5, &[]));
    }

    #[test]
    fn the_watchdog_of_an_intel_host_takes_the_fixed_counter_of_cycles() {
        let found = find(SimHost::intel(4).with_watchdog(), true);
        assert_eq!(
            shown(&found),
            (4, 4, names(&["instructions", "-cycles", "ref-cycles"]))
        );
        assert_eq!(found.at_once(&hardware(SimHost::CYCLES)), 4);
        assert!(found.hold(3, &[0, 1, 9]));
        assert!(!found.hold(4, &[0, 1, 9]));
    }

    /// Where the probe runs on a CPU that is not watched, another one is: the counter is not promised.
    #[test]
    fn a_watchdog_on_other_cpus_is_reckoned_with() {
        let intel = find(SimHost::intel(4), true);
        assert_eq!(
            shown(&intel),
            (4, 4, names(&["instructions", "-cycles", "ref-cycles"]))
        );
        let amd = find(SimHost::amd(6), true);
        assert_eq!(shown(&amd), (5, 6, vec![]));
    }

    #[test]
    fn a_general_counter_in_other_hands_is_missing() {
        let found = find(SimHost::intel(4).taking(2), false);
        assert_eq!(
            shown(&found),
            (3, 4, names(&["instructions", "cycles", "ref-cycles"]))
        );
    }

    /// Reference cycles whose counter is taken are counted nowhere; they take no general one.
    #[test]
    fn ref_cycles_without_their_counter_have_none() {
        let found = find(SimHost::intel(4).taking(6), false);
        assert_eq!(
            shown(&found),
            (4, 4, names(&["instructions", "cycles", "-ref-cycles"]))
        );
        assert!(found.constraint(&hardware(SimHost::REF_CYCLES)).is_empty());
    }

    #[test]
    fn an_amd_host_with_the_watchdog_on() {
        let found = find(SimHost::amd(6).with_watchdog(), true);
        assert_eq!(shown(&found), (5, 6, vec![]));
        assert_eq!(found.at_once(&hardware(SimHost::CYCLES)), 5);
        assert!(!found.hold(6, &[]));
    }

    #[test]
    fn version_two_of_amd_with_fifteen() {
        let found = find(SimHost::amd(15), false);
        assert_eq!(shown(&found), (15, 15, vec![]));
        assert_eq!(found.free(), 15);
    }

    #[test]
    fn an_intel_host_with_eight_and_four() {
        let mut host = SimHost::intel(8);
        // The fourth holds issue slots, an event that none of ours is.
        host.fixed.push(SimFixed {
            config: 0x400,
            general_too: false,
        });
        let found = find(host, false);
        assert_eq!(
            shown(&found),
            (8, 8, names(&["instructions", "cycles", "ref-cycles"]))
        );
    }

    #[test]
    fn a_host_without_counters() {
        let found = find(SimHost::amd(0), false);
        assert_eq!(found, HostCounters::default());
        assert_eq!((found.free(), found.mask()), (0, CounterMask::NONE));
        assert!(!found.hold(1, &[]) && found.hold(0, &[]));
        assert!(!found.hold(0, &[0]), "nothing counts cycles");
    }

    /// Raw events that are what a fixed counter holds may sit there, at whatever level they count; changed in
    /// any way they may not.
    #[test]
    fn raw_events_know_the_fixed_counters() {
        let found = find(SimHost::intel(4), false);
        let raw = |config| found.constraint(&Attr::counting(EventType::RAW, config));
        let instructions = found.constraint(&hardware(SimHost::INSTRUCTIONS));
        assert_eq!(raw(0xC0), instructions);
        assert_eq!(raw(0xC0 | 0b11 << 16 | 1 << 22), instructions);
        for changed in [0x1C0, 0xC0 | 1 << 18, 0xC0 | 1 << 23, 0xC0 | 1 << 24] {
            assert_eq!(raw(changed), CounterMask::first(4), "{changed:#x}");
        }
        let cache = found.constraint(&Attr::counting(EventType::HW_CACHE, 0));
        assert_eq!(
            cache,
            CounterMask::first(4),
            "0 is cycles among the generic events only"
        );
    }

    proptest! {
        /// On any host, with anything in other hands: what the probe promises does go on together, and what
        /// it says is full is full.
        #[test]
        fn what_is_promised_goes_on(general in 0usize..9, fixed: bool, taken in 0u64..4096, watchdog: bool) {
            let mut host = if fixed { SimHost::intel(general) } else { SimHost::amd(general) };
            let there = general + host.fixed.len();
            host.taken = CounterMask::from_bits(taken) & CounterMask::first(there);
            let found = find(host.clone(), watchdog);
            prop_assert!(found.general <= found.general_there && found.general_there == general);
            let mut events = vec![Tried::GENERAL[0]; found.general];
            let free = found.fixed.iter().filter(|f| f.free);
            events.extend(free.map(|f| Tried { ty: EventType::HARDWARE, config: f.config }));
            prop_assert!(events.is_empty() || Simulated::go(&host, &events));
            prop_assert_eq!(events.len(), found.free());
            prop_assert_eq!(found.mask().len(), found.free());
            let missing = there - host.taken.len() - found.free();
            // Where no general counter is there nothing is tried at all.
            prop_assert!(general == 0 || missing <= usize::from(watchdog && host.taken.is_empty()), "{:?}", found);
            for config in [SimHost::CYCLES, SimHost::INSTRUCTIONS, SimHost::REF_CYCLES, SimHost::BRANCHES] {
                let n = found.at_once(&hardware(config));
                let tried = vec![Tried { ty: EventType::HARDWARE, config }; n + 1];
                prop_assert!(n == 0 || Simulated::go(&host, &tried[..n]));
                prop_assert!(watchdog || general == 0 || !Simulated::go(&host, &tried));
            }
        }
    }
}
