//! Tests of the register file with perf-core events: counts that the VMM supplies, the thread clock
//! and host software events.

use std::sync::Arc;
use std::time::{Duration, Instant};

use perf_core::pmu::VcpuId;
use perf_core::pmu::clock::{ClockPmu, VcpuRunTimeClock};
use perf_core::pmu::host::HostPmu;
use perf_core::pmu::vmm_pmu::{VmmPmu, VmmPmuCounts};
use perf_core::{PerfCore, PerfCoreConfig, VcpuEventContext};
use proptest::prelude::*;
use vpmu::registers::*;
use vpmu::*;

use crate::common::{Guest, overflowed_counters};

const VCPU: VcpuId = VcpuId(0);
const TSC_KHZ: u32 = 1_000_000;

struct Machine {
    guest: Guest<PerfCoreEvents>,
    context: Arc<VcpuEventContext>,
    vmm_counts: Arc<VmmPmuCounts>,
    clock: Arc<VcpuRunTimeClock>,
}

impl Machine {
    fn new(model: PmuModel, policy: CounterBackingPolicy) -> Self {
        let core = PerfCore::new(PerfCoreConfig::default());
        let vmm_counts = Arc::new(VmmPmuCounts::new(vmm_counts::SELECTORS));
        let fed_pmu = VmmPmu::new();
        fed_pmu.add_vcpu(VCPU, vmm_counts.clone());
        core.register(Arc::new(fed_pmu));
        core.register(Arc::new(HostPmu::software(None)));
        let clock = Arc::new(VcpuRunTimeClock::for_current_thread(TSC_KHZ));
        let clock_pmu = ClockPmu::new(None);
        clock_pmu.add_vcpu(VCPU, clock.clone());
        core.register(Arc::new(clock_pmu));
        let context = core.add_vcpu(VCPU, clock.tid()).unwrap();
        context.sched_in();
        let events = PerfCoreEvents::new(core, VCPU, CounterBackingSelector::new(policy, None, |_| None));
        let vpmu = Vpmu::new(model);
        Self {
            guest: Guest { vpmu, events },
            context,
            vmm_counts,
            clock,
        }
    }

    /// Retires `n` instructions at privilege level `cpl` one by one, and handles each overflow
    /// immediately.
    fn retire(&mut self, cpl: u8, n: u64) {
        for _ in 0..n {
            if self.vmm_counts.add(
                vmm_counts::exact_selector(ArchEvent::Instructions).unwrap(),
                cpl,
                1,
            ) {
                self.notice();
            }
        }
    }

    fn notice(&mut self) {
        let counters = overflowed_counters(&self.context);
        self.guest.overflowed(counters);
    }

    fn run_for(&mut self, time: Duration) {
        self.clock.guest_enter();
        let start = Instant::now();
        while start.elapsed() < time {
            std::hint::spin_loop();
        }
        self.clock.guest_exit();
    }
}

#[test]
fn exact_counts_respect_privilege_levels() {
    let mut m = Machine::new(PmuModel::INTEL, CounterBackingPolicy::Exact);
    m.guest.write(IA32_PERFEVTSEL0, 0x41_00C0); // USR
    m.guest.write(IA32_PERFEVTSEL0 + 1, 0x42_00C0); // OS
    m.guest.write(IA32_PERFEVTSEL0 + 2, 0x43_003C); // OS and USR, for a cycle event
    assert!(m.guest.events.needs_stepping());
    m.retire(0, 100);
    m.retire(3, 30);
    assert_eq!(
        [
            m.guest.read(IA32_PMC0),
            m.guest.read(IA32_PMC0 + 1),
            m.guest.read(IA32_PMC0 + 2)
        ],
        [30, 100, 130]
    );
    m.guest.write(IA32_PERF_GLOBAL_CTRL, 0b100);
    m.retire(3, 5);
    assert_eq!(
        [
            m.guest.read(IA32_PMC0),
            m.guest.read(IA32_PMC0 + 1),
            m.guest.read(IA32_PMC0 + 2)
        ],
        [30, 100, 135]
    );
    m.guest.write(IA32_PERFEVTSEL0 + 2, 0);
    assert!(!m.guest.events.needs_stepping());
}

#[test]
fn fed_event_overflow_raises_one_pmi() {
    for model in [PmuModel::INTEL, PmuModel::AMD] {
        let (select, counter) = if model == PmuModel::INTEL {
            (IA32_PERFEVTSEL0, IA32_A_PMC0)
        } else {
            (PERF_CTL0, PERF_CTR0)
        };
        let mut m = Machine::new(model, CounterBackingPolicy::Exact);
        m.guest.write(counter, (1 << 48) - 7);
        m.guest.write(select, 0x53_00C0);
        for round in 0..50u64 {
            m.retire(0, 6);
            assert!(!m.guest.vpmu.pmi_pending(), "{model}, round {round}");
            m.retire(0, 1);
            assert!(m.guest.vpmu.pmi_pending(), "{model}, round {round}");
            m.guest.vpmu.pmi_delivered(0);
            assert_eq!(m.guest.read(counter), 0);
            m.guest.write(counter, (1 << 48) - 7);
        }
        assert_eq!(m.guest.vpmu.pmi_counts().delivered, 50);
    }
}

#[test]
fn clock_counts_guest_time_only_and_a_disabled_counter_never_moves() {
    let mut m = Machine::new(PmuModel::AMD, CounterBackingPolicy::Auto);
    m.guest.write(PERF_CTL0, 0x43_0076);
    // Repeats the run, because another process on the host may occupy the CPU for an entire run.
    let (start, mut counted) = (Instant::now(), 0);
    while counted < 5_000_000 {
        assert!(start.elapsed() < Duration::from_secs(600), "{counted}");
        m.run_for(Duration::from_millis(5));
        counted = m.guest.read(PERF_CTR0);
    }
    // The counter and `Instant` use different clocks, whose speeds may differ slightly. The counter
    // counts at 1 GHz.
    let most = u64::try_from(start.elapsed().as_nanos()).unwrap();
    assert!(counted <= most + most / 50, "{counted} of {most}");
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(5) {}
    // The clock does not count the time that the thread spends outside the guest.
    assert_eq!(m.guest.read(PERF_CTR0), counted);
    m.guest.write(PERF_CTL0, 0);
    m.run_for(Duration::from_millis(5));
    assert_eq!(m.guest.read(PERF_CTR0), counted);
    // With a counter mask, the counter does not count, because the clock backing supports none.
    m.guest.write(PERF_CTL0 + 2, 0x0143_0076);
    m.run_for(Duration::from_millis(5));
    assert_eq!(m.guest.read(PERF_CTR0 + 2), 0);
    assert_eq!(m.guest.view(0).backing, Some(CounterBacking::Clock));
    assert_eq!(m.guest.view(1).backing, Some(CounterBacking::None));
}

#[test]
fn unsupported_event_does_not_count() {
    for policy in [
        CounterBackingPolicy::None,
        CounterBackingPolicy::Hardware,
        CounterBackingPolicy::Clock,
    ] {
        let mut m = Machine::new(PmuModel::INTEL, policy);
        m.guest.write(IA32_PERFEVTSEL0, 0x43_00C0);
        m.retire(0, 50);
        m.run_for(Duration::from_millis(1));
        assert_eq!(m.guest.read(IA32_PMC0), 0, "{policy:?}");
    }
}

#[test]
fn paravirtual_events_count_with_every_policy() {
    for policy in [
        CounterBackingPolicy::None,
        CounterBackingPolicy::Clock,
        CounterBackingPolicy::Exact,
        CounterBackingPolicy::Auto,
    ] {
        let mut m = Machine::new(PmuModel::INTEL, policy);
        m.guest.write(IA32_PERFEVTSEL0, 0x43_05FF); // host page faults
        m.guest.write(IA32_PERFEVTSEL0 + 1, 0x43_0AFF); // MSR exits
        let before = m.guest.read(IA32_PMC0);
        // Touching new memory faults at least once per 2 MiB. A block of this size is always newly
        // mapped.
        let mut memory = vec![0u8; 64 << 20];
        memory.iter_mut().step_by(1 << 12).for_each(|byte| *byte = 1);
        assert!(std::hint::black_box(memory)[0] == 1);
        m.vmm_counts
            .add(vmm_counts::paravirtual(ParavirtualEvent::MsrExits), 0, 3);
        assert!(m.guest.read(IA32_PMC0) >= before + 16, "{policy:?}");
        assert_eq!(m.guest.read(IA32_PMC0 + 1), 3, "{policy:?}");
    }
}

#[test]
fn rotated_events_are_reused() {
    let mut m = Machine::new(PmuModel::INTEL, CounterBackingPolicy::Exact);
    let selectors = [0x43_00C0, 0x41_00C0, 0x43_00C4, 0x42_81D0];
    for selector in selectors {
        m.guest.write(IA32_PERFEVTSEL0, selector);
    }
    assert_eq!(m.context.stats().events, 4);
    for n in 0..1000 {
        m.guest.write(IA32_PERFEVTSEL0, selectors[n % 4]);
    }
    assert_eq!(m.context.stats().events, 4);
    // The number of open events is bounded, regardless of how many events the guest tries.
    for umask in 1..=12 {
        for levels in [0x41_00FF, 0x42_00FF, 0x43_00FF] {
            m.guest.write(IA32_PERFEVTSEL0, levels | umask << 8);
        }
    }
    assert_eq!(m.context.stats().events, 4);
    m.guest.vpmu.reset(&mut m.guest.events);
    assert_eq!(m.context.stats().events, 0);
}

#[test]
fn restored_counters_resume() {
    let mut here = Machine::new(PmuModel::INTEL, CounterBackingPolicy::Exact);
    here.guest.write(IA32_PERFEVTSEL0, 0x53_00C0);
    here.guest.write(IA32_A_PMC0, (1 << 48) - 10);
    here.retire(0, 4);
    let bytes = here.guest.vpmu.save(&mut here.guest.events);
    let mut there = Machine::new(PmuModel::INTEL, CounterBackingPolicy::Exact);
    there.guest.vpmu.restore(&bytes, &mut there.guest.events).unwrap();
    there.guest.vpmu.reconcile(&mut there.guest.events);
    there.retire(0, 5);
    assert!(!there.guest.vpmu.pmi_pending());
    there.retire(0, 1);
    assert!(there.guest.vpmu.pmi_pending());
    assert_eq!(there.guest.read(IA32_PMC0), 0);
}

#[test]
fn vcpu_thread_change_keeps_counts_and_overflows() {
    let mut here = Machine::new(PmuModel::INTEL, CounterBackingPolicy::Exact);
    here.guest.write(IA32_PERFEVTSEL0, 0x53_00C0);
    here.guest.write(IA32_A_PMC0, (1 << 48) - 10);
    here.retire(0, 4);
    // The next thread uses its own context and events.
    here.guest.vpmu.detach(&mut here.guest.events);
    assert_eq!(here.context.stats().events, 0);
    let mut there = Machine::new(PmuModel::INTEL, CounterBackingPolicy::Exact);
    there.guest.vpmu = here.guest.vpmu;
    there.guest.vpmu.reconcile(&mut there.guest.events);
    there.retire(0, 5);
    assert!(!there.guest.vpmu.pmi_pending());
    there.retire(0, 1);
    assert!(there.guest.vpmu.pmi_pending());
    assert_eq!(there.guest.read(IA32_PMC0), 0);
}

/// Guest operation on its four instruction counters.
#[derive(Clone, Debug)]
enum CounterAccess {
    Global(u64),
    Select(u32, u64),
    Set(u32, u64),
    Read(u32),
    ClearStatus(u64),
    Run(u64),
}

fn accesses() -> impl Strategy<Value = Vec<CounterAccess>> {
    // Disabled, one or both privilege levels, with and without an interrupt, and another event.
    let selector = prop_oneof![
        3 => Just(0x53_00C0u64),
        3 => Just(0x13_00C0),
        1 => Just(0x43_00C0),
        1 => Just(0x03_00C0),
        1 => Just(0x53_00C4),
        1 => Just(0),
    ];
    let near = (1u64..40).prop_map(|left| (1 << 48) - left);
    let one = prop_oneof![
        4 => (0u64..16).prop_map(CounterAccess::Global),
        3 => (0u32..4, selector).prop_map(|(n, value)| CounterAccess::Select(n, value)),
        3 => (0u32..4, near).prop_map(|(n, value)| CounterAccess::Set(n, value)),
        2 => (0u32..4).prop_map(CounterAccess::Read),
        1 => (0u64..16).prop_map(CounterAccess::ClearStatus),
        6 => (0u64..30).prop_map(CounterAccess::Run),
        1 => (60u64..80).prop_map(CounterAccess::Run),
    ];
    proptest::collection::vec(one, 0..200)
}

proptest! {
    /// The guest observes no difference between events that stop during a pause (counts supplied by
    /// the VMM) and events that keep counting (host events).
    #[test]
    fn pausing_backings_are_indistinguishable(accesses in accesses(), freeze in any::<bool>()) {
        let mut vmm_counts = Machine::new(PmuModel::INTEL, CounterBackingPolicy::Exact);
        let mut host = Guest::new(PmuModel::INTEL);
        if freeze {
            vmm_counts.guest.write(IA32_DEBUGCTL, DEBUGCTL_FREEZE_ON_PMI);
            host.write(IA32_DEBUGCTL, DEBUGCTL_FREEZE_ON_PMI);
        }
        for access in accesses {
            let (msr, value) = match access {
                CounterAccess::Global(value) => (IA32_PERF_GLOBAL_CTRL, value),
                CounterAccess::Select(n, value) => (IA32_PERFEVTSEL0 + n, value),
                CounterAccess::Set(n, value) => (IA32_A_PMC0 + n, value),
                CounterAccess::ClearStatus(value) => (IA32_PERF_GLOBAL_STATUS_RESET, value),
                CounterAccess::Read(n) => {
                    prop_assert_eq!(vmm_counts.guest.read(IA32_PMC0 + n), host.read(IA32_PMC0 + n));
                    continue;
                }
                CounterAccess::Run(n) => {
                    // Each iteration of the loop retires an instruction and a branch.
                    for _ in 0..n {
                        vmm_counts.vmm_counts.add(vmm_counts::exact_selector(ArchEvent::Branches).unwrap(), 0, 1);
                        vmm_counts.retire(0, 1);
                        vmm_counts.notice();
                        host.run(1);
                    }
                    prop_assert_eq!(vmm_counts.guest.vpmu.pmi_pending(), host.vpmu.pmi_pending());
                    if vmm_counts.guest.vpmu.pmi_pending() {
                        vmm_counts.guest.vpmu.pmi_delivered(0);
                        host.vpmu.pmi_delivered(0);
                    }
                    continue;
                }
            };
            vmm_counts.guest.write(msr, value);
            host.write(msr, value);
            prop_assert_eq!(vmm_counts.guest.read(IA32_PERF_GLOBAL_STATUS), host.read(IA32_PERF_GLOBAL_STATUS));
        }
        for n in 0..4 {
            prop_assert_eq!(vmm_counts.guest.read(IA32_PMC0 + n), host.read(IA32_PMC0 + n), "counter {}", n);
        }
    }
}
