//! Tests of scheduling with counter constraints, on simulated hosts with general-purpose and
//! fixed-function counters.

use std::sync::Arc;

use perf_core::pmu::sim::{SimPmu, SimPmuConfig};
use perf_core::*;
use proptest::prelude::*;

/// A core on a simulated host, with one scheduled-in vCPU.
struct SimulatedCore {
    core: PerfCore,
    pmu: SimPmu,
    vcpu: Arc<VcpuEventContext>,
    session: Session,
}

impl SimulatedCore {
    fn new(config: SimPmuConfig) -> Self {
        let core = PerfCore::new(PerfCoreConfig::default());
        let pmu = SimPmu::new(config);
        core.register(Arc::new(pmu.clone()));
        let vcpu = core.add_vcpu(VcpuId(0), 1).unwrap();
        vcpu.sched_in();
        let session = core.session(0, SessionRole::Admin);
        Self {
            core,
            pmu,
            vcpu,
            session,
        }
    }

    fn open(&self, attr: Attr, leader: Option<&EventHandle>) -> Result<EventHandle, PerfEventOpenError> {
        let target = EventOpenTarget::Vcpu(VcpuId(0));
        self.core
            .open(&self.session, attr, target, leader, OpenFlags::default())
    }

    fn pinned(&self, config: u64) -> EventHandle {
        let attr = Attr::counting(EventType::SIM, config).with_pinned();
        self.open(attr, None).unwrap()
    }
}

/// Events that fit a fixed-function counter take no general-purpose counter, for any order of
/// starts, and starting them does not stop running events.
#[test]
fn fixed_function_events_take_no_general_counters() {
    use perf_core::pmu::sim::SimHostPmu;
    for (host, general) in [
        (SimHostPmu::intel(4), 4),
        (SimHostPmu::intel(4).with_taken(1), 3),
        (SimHostPmu::intel(8), 8),
    ] {
        let m = SimulatedCore::new(host.config());
        let branches = || m.pinned(SimHostPmu::BRANCHES);
        let mut on: Vec<EventHandle> = (0..2).map(|_| branches()).collect();
        on.extend(
            [
                SimHostPmu::CYCLES,
                SimHostPmu::INSTRUCTIONS,
                SimHostPmu::REF_CYCLES,
            ]
            .map(|config| m.pinned(config)),
        );
        on.extend((2..general).map(|_| branches()));
        assert!(on.iter().all(|e| e.state() == EventState::Active), "{host:?}");
        assert_eq!(branches().state(), EventState::Error);
        // Reference cycles fit only their own counter.
        assert_eq!(m.pinned(SimHostPmu::REF_CYCLES).state(), EventState::Error);
        assert_eq!(m.pmu.calls().stops, 0);
    }
}

/// If the NMI watchdog holds the fixed-function counter of cycles, an event that counts cycles
/// takes a general-purpose counter.
#[test]
fn cycles_take_a_general_counter_while_the_watchdog_has_theirs() {
    use perf_core::pmu::sim::SimHostPmu;
    let m = SimulatedCore::new(SimHostPmu::intel(4).with_watchdog().config());
    let cycles = m.pinned(SimHostPmu::CYCLES);
    let branches: Vec<_> = (0..4).map(|_| m.pinned(SimHostPmu::BRANCHES)).collect();
    let on = |e: &&EventHandle| e.state() == EventState::Active;
    assert_eq!(
        (cycles.state(), branches.iter().filter(on).count()),
        (EventState::Active, 3)
    );
}

#[test]
fn amd_hosts_have_as_many_slots_as_the_watchdog_leaves() {
    use perf_core::pmu::sim::SimHostPmu;
    for (host, slots) in [
        (SimHostPmu::amd(6), 6),
        (SimHostPmu::amd(6).with_watchdog(), 5),
        (SimHostPmu::amd(15), 15),
    ] {
        let m = SimulatedCore::new(host.config());
        let events: Vec<_> = (0..=slots).map(|n| m.pinned(n)).collect();
        let on = events.iter().filter(|e| e.state() == EventState::Active);
        assert_eq!(on.count() as u64, slots);
        assert_eq!(m.pmu.active_events(VcpuId(0)) as u64, slots);
    }
}

/// Opening fails for a group that can never be active and, if counters may not be shared, for an
/// event without a free counter. The error contains the number of counters that could hold the
/// event.
#[test]
fn open_without_suitable_counter_reports_counter_count() {
    use perf_core::pmu::sim::SimHostPmu;
    let m = SimulatedCore::new(SimHostPmu::intel(2).config());
    let branches = || Attr::counting(EventType::SIM, SimHostPmu::BRANCHES);
    let leader = m.open(branches(), None).unwrap();
    let _second = m.open(branches(), Some(&leader)).unwrap();
    let third = m.open(branches(), Some(&leader)).unwrap_err();
    assert!(
        matches!(third, PerfEventOpenError::GroupTooLarge { needed: 3, slots: 2 }),
        "{third}"
    );
    let cycles = || Attr::counting(EventType::SIM, SimHostPmu::CYCLES);
    let _cycles = m.open(cycles(), Some(&leader)).unwrap();
    let more = m.open(cycles(), Some(&leader)).unwrap_err();
    assert!(
        matches!(more, PerfEventOpenError::GroupTooLarge { needed: 4, slots: 3 }),
        "{more}"
    );
    m.core.set_share(SharePolicy::Strict);
    let refused = m.open(branches(), None).unwrap_err();
    assert!(
        matches!(refused, PerfEventOpenError::Overcommitted { slots: 2, .. }),
        "{refused}"
    );
    let _instructions = m
        .open(Attr::counting(EventType::SIM, SimHostPmu::INSTRUCTIONS), None)
        .unwrap();
}

/// An event that fits a fixed-function counter is always active, even if many other events are
/// multiplexed on the general-purpose counters.
#[test]
fn event_with_dedicated_counter_is_never_multiplexed() {
    use perf_core::pmu::sim::SimHostPmu;
    let m = SimulatedCore::new(SimHostPmu::intel(2).config());
    let pinned = m.pinned(SimHostPmu::REF_CYCLES);
    let general: Vec<_> = (0..5)
        .map(|_| {
            m.open(Attr::counting(EventType::SIM, SimHostPmu::BRANCHES), None)
                .unwrap()
        })
        .collect();
    for _ in 0..20 {
        m.pmu.advance(VcpuId(0), |_| 1);
        m.vcpu.tick();
        assert_eq!(m.pmu.active_events(VcpuId(0)), 3);
    }
    assert_eq!(pinned.read().unwrap().value, 20);
    let sum: u64 = general.iter().map(|e| e.read().unwrap().value).sum();
    assert_eq!(sum, 40);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// On any host and for any counter constraints, the driver can start all events of a plan, and
    /// events that stay active are not stopped.
    #[test]
    fn driver_accepts_planned_assignments(
        slots in 1usize..7,
        masks in prop::collection::vec(1u64..64, 1..10),
        pinned in prop::collection::vec(prop::bool::weighted(0.3), 10),
        taken in 0u64..4,
        ticks in 1usize..20,
    ) {
        let m = SimulatedCore::new(SimPmuConfig {
            slots: Some(slots),
            allowed_slots: masks.iter().enumerate().map(|(n, mask)| (n as u64, *mask)).collect(),
            taken,
            ..SimPmuConfig::default()
        });
        let room = ((1u64 << slots) - 1) & !taken;
        let mut events = Vec::new();
        for (n, mask) in masks.iter().enumerate() {
            let attr = Attr { pinned: pinned[n], ..Attr::counting(EventType::SIM, n as u64) };
            match m.open(attr, None) {
                Ok(event) => {
                    prop_assert!(mask & room != 0);
                    events.push(event);
                }
                Err(e) => {
                    prop_assert!(matches!(e, PerfEventOpenError::GroupTooLarge { needed: 1, slots: 0 }), "{e}");
                    prop_assert_eq!(mask & room, 0);
                }
            }
        }
        let states = || events.iter().map(EventHandle::state).collect::<Vec<_>>();
        for _ in 0..ticks {
            let (before, calls) = (states(), m.pmu.calls());
            m.vcpu.tick();
            let after = states();
            let left = before.iter().zip(&after).filter(|(b, a)| **b == EventState::Active && **a != EventState::Active).count();
            prop_assert_eq!(m.pmu.calls().stops - calls.stops, left as u64);
            let on = after.iter().filter(|s| **s == EventState::Active).count();
            prop_assert_eq!(m.pmu.active_events(VcpuId(0)), on);
            prop_assert_eq!(m.vcpu.stats().active_hardware, on);
            // A flexible event waits only if a conflicting event is active.
            let flexible = events.iter().zip(&after).filter(|(e, _)| !e.attr().pinned);
            prop_assert!(on > 0 || flexible.count() == 0);
        }
    }
}
