//! Tests of counters that lose and regain their slots on the host while the guest counts. All
//! uncounted time must be reported.
//!
//! A simulation tick is one nanosecond of the vCPU's event time.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use perf_core::pmu::clock::{ClockPmu, VcpuRunTimeClock};
use perf_core::pmu::sim::SimPmu;
use perf_core::pmu::vmm_pmu::{VmmPmu, VmmPmuCounts};
use perf_core::pmu::{Pmu, PmuCounterCapacity, PmuError, PmuEvent, PmuEventTarget, VcpuId};
use perf_core::time::ManualClock;
use perf_core::{Attr, EventType, PerfCore, PerfCoreConfig, SharePolicy, VcpuEventContext};
use vpmu::registers::*;
use vpmu::*;

use crate::common::Guest;

const MS: u64 = 1_000_000;
/// Event selector values for cycles and for instructions, at all privilege levels and enabled.
const CYCLES: u64 = 0x43_003C;
const INSTRUCTIONS: u64 = 0x43_00C0;
const COUNTERS: u64 = 3;

/// Returns a guest that counts instructions and cycles on general-purpose counters 0 and 1.
fn counting() -> Guest {
    let mut guest = Guest::of("intel", Some("4+3"));
    guest.start_counting();
    guest
}

impl<E: CounterEvents> Guest<E> {
    fn start_counting(&mut self) {
        self.write(IA32_PERF_GLOBAL_CTRL, 0);
        self.write(IA32_PERFEVTSEL0, INSTRUCTIONS);
        self.write(IA32_PERFEVTSEL0 + 1, CYCLES);
        self.write(IA32_PERF_GLOBAL_CTRL, COUNTERS);
    }
}

impl Guest {
    /// Runs the guest for `ticks` ticks, with a VM exit after every `step` ticks.
    fn run_with_exits(&mut self, ticks: u64, step: u64) {
        for _ in 0..ticks / step {
            self.run(step);
        }
    }
}

#[test]
fn lost_counter_resumes_and_gap_is_accounted() {
    let mut guest = counting();
    guest.run(5 * MS);
    assert_eq!((guest.uncounted_ns(), guest.vpmu.slot_losses()), (0, 0));
    guest.events.set_slots(Some(1));
    // The loss of the slots is detected at an exit 3 ms later, but the uncounted time starts at the
    // actual loss.
    guest.run(3 * MS);
    assert_eq!(guest.uncounted_ns(), 3 * MS);
    guest.run_with_exits(97 * MS, MS);
    assert_eq!(guest.uncounted_ns(), 100 * MS);
    let (kept, lost) = (guest.view(0), guest.view(1));
    assert!(kept.counting && kept.uncounted_ns == 0 && kept.counted == 105 * MS);
    assert!(lost.enabled && !lost.counting && !lost.fallback);
    assert_eq!(
        (lost.counted, lost.value, lost.uncounted_ns),
        (5 * MS, 5 * MS, 100 * MS)
    );
    assert_eq!(
        (lost.times.time_enabled_ns, lost.times.time_running_ns),
        (105 * MS, 5 * MS)
    );
    guest.events.set_slots(None);
    // All slots are free again. The counter obtains one at its next retry, after at most 256 ms.
    guest.run_with_exits(300 * MS, MS);
    let back = guest.view(1);
    assert!(back.counting && back.counted > 40 * MS, "{back:?}");
    // All time is either counted or reported as uncounted.
    assert_eq!(back.counted + guest.uncounted_ns(), 405 * MS);
    assert_eq!(guest.vpmu.slot_losses(), 1);
}

/// If a counter is reprogrammed while no slot is available, the count of its new event starts from
/// zero when the event obtains a slot, regardless of the count of the previous event.
#[test]
fn counter_reprogrammed_without_slot_counts_from_zero() {
    let mut guest = counting();
    guest.run(50 * MS);
    guest.events.set_slots(Some(0));
    guest.run(1);
    guest.write(IA32_PERFEVTSEL0, CYCLES);
    guest.run(1);
    assert!(!guest.view(0).counting);
    guest.events.set_slots(None);
    guest.run_with_exits(300 * MS, MS);
    let value = guest.view(0).value;
    guest.run(7 * MS);
    let after = guest.view(0);
    assert!(after.counting);
    assert_eq!(after.value - value, 7 * MS);
    assert_eq!(after.counted, after.times.time_running_ns);
}

/// The times at which an uncounted counter is retried depend only on the clock. A vCPU that does
/// not exit must be kicked for each retry.
#[test]
fn retries_back_off_and_request_a_kick() {
    let mut guest = counting();
    guest.events.lack = UnavailableReason::Refused(libc::EMFILE);
    guest.events.set_slots(Some(1));
    guest.run(1);
    let mut tries = 0;
    let mut ran_ns = 0;
    while ran_ns < 5_000 * MS {
        let wait_ns = guest.vpmu.retry_in_ns(&mut guest.events).unwrap();
        guest.events.calls = 0;
        // An exit before the time of the retry does not cause a retry.
        guest.run(wait_ns - 1);
        assert_eq!(guest.events.calls, 0);
        guest.run(1);
        assert!(guest.events.calls > 0);
        (tries, ran_ns) = (tries + 1, ran_ns + wait_ns);
    }
    assert!((20..40).contains(&tries), "{tries} tries in 5 s");
    guest.events.set_slots(None);
    let wait_ns = guest.vpmu.retry_in_ns(&mut guest.events).unwrap();
    guest.run(wait_ns);
    assert_eq!(guest.vpmu.retry_in_ns(&mut guest.events), None);
    assert!(guest.view(1).counting);
}

/// A guest that restarts or reprograms its counter on each exit while no slot is available does not
/// cause a request to the host on each exit.
#[test]
fn frequent_reprogramming_is_rate_limited() {
    for reprograms in [false, true] {
        let mut guest = counting();
        guest.run(MS);
        guest.events.set_slots(Some(0));
        guest.run(1);
        let mut tries = 0;
        for n in 0..10_000u64 {
            let asked = guest.events.enables;
            guest.write(IA32_PERF_GLOBAL_CTRL, 0);
            if reprograms {
                guest.write(IA32_PERFEVTSEL0, [INSTRUCTIONS, CYCLES][n as usize % 2]);
            }
            guest.write(IA32_PERF_GLOBAL_CTRL, 1);
            guest.run(MS / 100);
            tries += guest.events.enables - asked;
        }
        assert!((90..=101).contains(&tries), "{tries} tries in 100 ms");
        // All time without a slot is reported as uncounted.
        assert_eq!(
            guest.view(0).counted + guest.view(1).counted,
            if reprograms { MS } else { 2 * MS }
        );
        assert!(guest.uncounted_ns() >= 100 * MS, "{}", guest.uncounted_ns());
        // When slots are free again, the counter soon obtains one.
        guest.events.set_slots(None);
        guest.run(MS);
        assert!(guest.view(0).counting);
    }
}

#[test]
fn cycles_fall_back_to_clock_and_return() {
    let mut guest = counting();
    guest.events.clock = true;
    let counter = CounterIndex::from_bit(1).unwrap();
    guest.run(10 * MS);
    let mut ran = 10 * MS;
    for round in 0..3 {
        guest.events.set_slots(Some(1));
        guest.notice();
        let before = guest.read(IA32_PMC0 + 1);
        guest.run_with_exits(20 * MS, MS);
        ran += 20 * MS;
        assert!(guest.events.is_on_clock(counter));
        let view = guest.view(1);
        assert_eq!(
            (view.backing, view.fallback, view.counting),
            (Some(CounterBacking::Clock), true, true)
        );
        assert_eq!(guest.read(IA32_PMC0 + 1), before + 20 * MS);
        guest.events.set_slots(None);
        guest.run_with_exits(300 * MS, MS);
        ran += 300 * MS;
        let view = guest.view(1);
        assert_eq!(
            (view.backing, view.fallback),
            (Some(CounterBacking::Hardware), false)
        );
        assert_eq!(
            (view.value, view.counted, guest.uncounted_ns()),
            (ran, ran, 0),
            "round {round}"
        );
    }
}

/// If a fallback backing takes over, a sampling counter still overflows after the same number of
/// counts.
#[test]
fn sampling_period_continues_over_fallback() {
    let mut guest = Guest::of("intel", Some("4+3"));
    guest.events.clock = true;
    guest.write(IA32_PERFEVTSEL0, 0x53_003C);
    guest.write(IA32_A_PMC0, (1 << 48) - 100);
    guest.run(60);
    guest.events.set_slots(Some(0));
    guest.notice();
    guest.run(39);
    assert!(!guest.vpmu.pmi_pending());
    guest.run(1);
    assert!(guest.vpmu.pmi_pending());
    assert_eq!(guest.read(IA32_PERF_GLOBAL_STATUS) & 1, 1);
}

#[test]
fn unsupported_and_filtered_events_are_uncounted() {
    let mut guest = counting();
    guest.events.backing_of = |request| match request.event {
        DecodedCounterEvent::Raw => CounterBacking::None,
        _ => CounterBacking::Hardware,
    };
    guest.write(IA32_PERFEVTSEL0, 0x43_01D1);
    guest.run(7 * MS);
    assert_eq!(
        (guest.uncounted_ns(), guest.view(0).uncounted_ns),
        (7 * MS, 7 * MS)
    );
    // No counter waits for a retry, because no backing can ever count this event.
    assert_eq!(guest.vpmu.retry_in_ns(&mut guest.events), None);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    guest.run(MS);
    // A disabled counter does not add to the uncounted time.
    assert_eq!(guest.uncounted_ns(), 7 * MS);
    guest.write(IA32_PERFEVTSEL0, INSTRUCTIONS);
    guest.write(IA32_PERF_GLOBAL_CTRL, COUNTERS);
    guest.run(MS);
    assert_eq!(guest.uncounted_ns(), 7 * MS);
    let none = EventFilter::from_toml("action = \"allow\"\nevents = []\n").unwrap();
    guest.vpmu.set_filter(Arc::new(none));
    guest.notice();
    guest.run(2 * MS);
    assert_eq!(guest.uncounted_ns(), 9 * MS);
}

/// Driver of the PMU types for hardware events, with simulated slots. The driver rejects events
/// while a VM with a mediated vPMU uses the PMU.
#[derive(Debug)]
struct Hardware {
    pmu: SimPmu,
    mediated: Arc<AtomicBool>,
}

impl Pmu for Hardware {
    fn name(&self) -> &'static str {
        "hardware"
    }

    fn supports_type(&self, ty: EventType) -> bool {
        [EventType::HARDWARE, EventType::RAW].contains(&ty)
    }

    fn capacity(&self) -> PmuCounterCapacity {
        self.pmu.capacity()
    }

    fn open(&self, attr: &Attr, target: PmuEventTarget) -> Result<Box<dyn PmuEvent>, PmuError> {
        if self.mediated.load(Ordering::Relaxed) {
            let refused = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
            return Err(PmuError::Mediated(refused));
        }
        self.pmu.open(attr, target)
    }
}

const VCPU: VcpuId = VcpuId(0);

/// PMU of a vCPU whose events are perf-core events, on a simulated host PMU whose slots can be
/// revoked.
pub struct PerfCoreGuest {
    core: PerfCore,
    clock: Arc<ManualClock>,
    pub pmu: SimPmu,
    pub context: Arc<VcpuEventContext>,
    guest_clock: Arc<VcpuRunTimeClock>,
    pub guest: Guest<PerfCoreEvents>,
}

impl PerfCoreGuest {
    fn new(slots: usize, policy: CounterBackingPolicy) -> Self {
        Self::on(SimPmu::with_slots(slots), policy)
    }

    /// Creates a guest that counts instructions and cycles on the host PMU `pmu`.
    pub fn on(pmu: SimPmu, policy: CounterBackingPolicy) -> Self {
        Self::beside(pmu, policy, Arc::default())
    }

    /// Creates a guest whose backings `policy` selects, on a host with the PMU `pmu`. While
    /// `mediated` is `true`, another VM with a mediated vPMU exists on the host.
    fn beside(pmu: SimPmu, policy: CounterBackingPolicy, mediated: Arc<AtomicBool>) -> Self {
        let clock = Arc::new(ManualClock::new());
        let core = PerfCore::new(PerfCoreConfig {
            clock: clock.clone(),
            ..PerfCoreConfig::default()
        });
        core.register(Arc::new(Hardware {
            pmu: pmu.clone(),
            mediated,
        }));
        let clock_pmu = ClockPmu::new(None);
        let guest_clock = Arc::new(VcpuRunTimeClock::for_current_thread(1_000_000));
        clock_pmu.add_vcpu(VCPU, guest_clock.clone());
        core.register(Arc::new(clock_pmu));
        let vmm_pmu = VmmPmu::new();
        vmm_pmu.add_vcpu(VCPU, Arc::new(VmmPmuCounts::new(vpmu::vmm_counts::SELECTORS)));
        core.register(Arc::new(vmm_pmu));
        let context = core.add_vcpu(VCPU, guest_clock.tid()).unwrap();
        context.sched_in();
        let sources = CounterBackingSelector::new(policy, Some(Vendor::Intel), |_| None);
        let events = PerfCoreEvents::new(core.clone(), VCPU, sources);
        let vpmu = Guest::of("intel", Some("4+3")).vpmu;
        let mut rig = Self {
            core,
            clock,
            pmu,
            context,
            guest_clock,
            guest: Guest { vpmu, events },
        };
        rig.guest.start_counting();
        rig
    }

    fn read(&mut self, n: u32) -> u64 {
        self.guest.read(IA32_PMC0 + n)
    }

    /// Runs the guest for `ms` milliseconds, with an exit every millisecond. Each hardware event
    /// counts once per nanosecond.
    fn run(&mut self, ms: u64) {
        for _ in 0..ms {
            self.guest_clock.guest_enter();
            self.clock.advance(MS);
            self.pmu.advance(VCPU, |_| MS);
            self.guest_clock.guest_exit();
            self.core.tick();
            self.guest.vpmu.reconcile(&mut self.guest.events);
        }
    }
}

#[test]
fn revoked_slot_is_reported_and_regained() {
    let mut rig = PerfCoreGuest::new(2, CounterBackingPolicy::Hardware);
    rig.run(40);
    rig.pmu.take_slots(2);
    rig.run(100);
    rig.guest.vpmu.reconcile(&mut rig.guest.events);
    for n in 0..2 {
        let view = rig.guest.view(n);
        assert!(
            !view.counting && view.enabled && view.backing == Some(CounterBacking::Hardware),
            "{view:?}"
        );
        assert_eq!(view.counted, 40 * MS);
        // The loss is only detected at 20 ms ticks, so its exact time is unknown.
        assert!((80 * MS..=100 * MS).contains(&view.uncounted_ns), "{view:?}");
    }
    let uncounted_ns = rig.guest.uncounted_ns();
    assert!((80 * MS..=100 * MS).contains(&uncounted_ns), "{uncounted_ns}");
    rig.pmu.take_slots(0);
    rig.run(300);
    assert!(rig.guest.view(0).counting && rig.guest.view(1).counting);
    assert!(rig.read(0) > 60 * MS, "{}", rig.read(0));
    assert!(!rig.core.has_unhandled_errors());
}

/// Operator events that take all slots of the host PMU also take those of the guest's running
/// counters. After the operator events are closed, the guest's counters count again without any
/// guest access.
#[test]
fn operator_event_revokes_and_returns_slots() {
    let mut rig = PerfCoreGuest::new(2, CounterBackingPolicy::Hardware);
    rig.run(10);
    rig.core.set_share(SharePolicy::OperatorFirst);
    let admin = rig.core.session(0, perf_core::SessionRole::Admin);
    let open = || {
        let target = perf_core::EventOpenTarget::Vcpu(VCPU);
        let attr = Attr::counting(EventType::HARDWARE, 4);
        rig.core
            .open(&admin, attr, target, None, perf_core::OpenFlags::default())
            .unwrap()
    };
    let operators = [open(), open()];
    rig.run(50);
    assert_eq!(rig.guest.uncounted_ns(), 50 * MS, "known to the moment");
    assert_eq!((rig.read(0), rig.read(1)), (10 * MS, 10 * MS));
    drop(operators);
    rig.run(300);
    let missed = rig.guest.uncounted_ns();
    assert_eq!(
        rig.guest.view(0).counted.max(rig.guest.view(1).counted) + missed,
        360 * MS
    );
    assert!(missed < 200 * MS, "{missed}");
}

/// While the VMM pauses the vCPU, time is neither counted nor uncounted.
#[test]
fn vcpu_pause_is_not_uncounted_time() {
    let mut rig = PerfCoreGuest::new(1, CounterBackingPolicy::Hardware);
    rig.run(30);
    let before = rig.guest.uncounted_ns();
    assert_eq!(before, 30 * MS, "two counters on one slot");
    rig.context.sched_out();
    rig.clock.advance(1000 * MS);
    rig.context.sched_in();
    rig.run(10);
    assert_eq!(rig.guest.uncounted_ns(), 40 * MS);
}

#[test]
fn perf_core_cycles_fall_back_to_clock() {
    let mut rig = PerfCoreGuest::new(2, CounterBackingPolicy::Auto);
    rig.run(30);
    rig.pmu.take_slots(2);
    rig.run(100);
    let (instructions, cycles) = (rig.guest.view(0), rig.guest.view(1));
    assert!(
        !instructions.counting && cycles.counting && cycles.fallback,
        "{cycles:?}"
    );
    assert_eq!(
        (instructions.backing, cycles.backing),
        (Some(CounterBacking::Hardware), Some(CounterBacking::Clock))
    );
    assert!(cycles.value >= 30 * MS, "never backwards");
    let before = rig.read(1);
    rig.pmu.take_slots(0);
    rig.run(300);
    let cycles = rig.guest.view(1);
    assert!(!cycles.fallback && cycles.backing == Some(CounterBacking::Hardware));
    assert!(cycles.value > before + 40 * MS);
}

/// While another VM with a mediated vPMU exists, the clock counts cycles, and other events are
/// reported as uncounted. Afterwards, the host's PMU counts again without any action of the guest.
#[test]
fn mediated_neighbour_leaves_cycles_to_clock() {
    let mediated = Arc::new(AtomicBool::new(true));
    let mut rig = PerfCoreGuest::beside(
        SimPmu::with_slots(2),
        CounterBackingPolicy::Auto,
        mediated.clone(),
    );
    rig.run(50);
    let (instructions, cycles) = (rig.guest.view(0), rig.guest.view(1));
    assert!(cycles.counting && cycles.fallback && cycles.backing == Some(CounterBacking::Clock));
    assert!(!instructions.counting && instructions.counted == 0);
    assert_eq!(instructions.uncounted_ns, 50 * MS);
    mediated.store(false, Ordering::Relaxed);
    rig.run(300);
    for n in 0..2 {
        let view = rig.guest.view(n);
        assert!(
            view.counting && view.backing == Some(CounterBacking::Hardware),
            "{view:?}"
        );
    }
}
