//! Tests that guest actions never make the PMU allocate.
//!
//! This is a separate test program because the `allocation_counter` crate installs a global
//! allocator.

use std::sync::Arc;

use perf_core::pmu::VcpuId;
use perf_core::pmu::vmm_pmu::{VmmPmu, VmmPmuCounts};
use perf_core::{PerfCore, PerfCoreConfig, UnavailableRegs};
use vpmu::registers::*;
use vpmu::sim::SimCounterEvents;
use vpmu::*;

fn allocations(work: impl FnOnce()) -> u64 {
    allocation_counter::measure(work).count_total
}

#[test]
fn counter_counts() {
    assert_eq!(allocations(|| drop(std::hint::black_box(vec![1u8; 100]))), 1);
}

#[test]
fn register_access_does_not_allocate() {
    let model = |generation, general, fixed| {
        PmuModel::new(generation, Some(RequestedCounters { general, fixed }), None).unwrap()
    };
    let v2 = model(PmuGeneration::AmdV2, 15, None);
    let v5 = model(PmuGeneration::Intel(5), 8, Some(4));
    for model in [PmuModel::INTEL, PmuModel::AMD, v2, v5] {
        let mut vpmu = Vpmu::new(model);
        vpmu.set_pmi_share(PmiShare::default_of(model.vendor()));
        let mut events = SimCounterEvents::default();
        let addresses: Vec<u32> = model.trapped_msrs().into_iter().flatten().collect();
        let mut pmis = 0;
        let mut state = 1u64;
        let walk = |n: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let random = state >> 20;
            let msr = MsrAddress(addresses[random as usize % addresses.len()]);
            // Enabled selectors with the interrupt bit, and values just before the overflow.
            let value = match random % 3 {
                0 => 0x53_0000 | random & 0xFFFF,
                1 => u64::MAX >> 16 & !(random & 0xFF),
                _ => random,
            };
            vpmu.write_msr(msr, value, &mut events);
            vpmu.reconcile(&mut events);
            vpmu.read_msr(msr, &mut events);
            vpmu.rdpmc(
                RdpmcIndex(random as u32 & 0x4000_000F),
                Cpl(0),
                false,
                &mut events,
            );
            events.run(random & 0x1FF);
            for counter in events.take_notified() {
                vpmu.overflowed(counter, &mut events);
            }
            vpmu.reconcile(&mut events);
            // The PMI rate limit permits one PMI per step.
            events.wait(100_000);
            let now_ns = events.now_ns();
            if vpmu.needs_handler_state(&mut events) {
                vpmu.observe_handler(n & 1 == 0, now_ns);
            }
            if vpmu.pmi_ready(now_ns) == PmiReadiness::Now {
                pmis += 1;
                vpmu.pmi_delivered(now_ns);
            }
        };
        assert_eq!(allocations(|| (0..200_000).for_each(walk)), 0, "{model}");
        assert!(
            pmis > 100,
            "{model}: only {pmis} PMIs, so the paths were not walked"
        );
    }
}

/// Once a guest's events are open, sampling does not allocate memory, neither in the PMU nor in the
/// perf core nor in its driver.
#[test]
fn sampling_on_perf_core_does_not_allocate() {
    let vcpu = VcpuId(0);
    let core = PerfCore::new(PerfCoreConfig::default());
    let vmm_counts = Arc::new(VmmPmuCounts::new(vmm_counts::SELECTORS));
    let driver = VmmPmu::new();
    driver.add_vcpu(vcpu, vmm_counts.clone());
    core.register(Arc::new(driver));
    let context = core.add_vcpu(vcpu, 0).unwrap();
    context.sched_in();
    let mut vpmu = Vpmu::new(PmuModel::INTEL);
    let mut events = PerfCoreEvents::new(
        core,
        vcpu,
        CounterBackingSelector::new(CounterBackingPolicy::Exact, None, |_| None),
    );
    let mut sampled = 0;
    let mut round = |vpmu: &mut Vpmu, n: u64| {
        for (msr, value) in [
            (IA32_PERF_GLOBAL_CTRL, 0),
            (
                IA32_PERFEVTSEL0,
                if n.is_multiple_of(2) { 0x53_00C0 } else { 0x52_00C0 },
            ),
            (IA32_A_PMC0, (1 << 48) - 3),
            (IA32_PERF_GLOBAL_CTRL, 0xF),
        ] {
            vpmu.write_msr(MsrAddress(msr), value, &mut events);
            vpmu.reconcile(&mut events);
        }
        for _ in 0..3 {
            vmm_counts.add(0, 0, 1);
        }
        let mut overflowed = [None; 4];
        let mut reports = 0;
        context.service_overflows(&mut UnavailableRegs, &mut |report| {
            overflowed[reports] = PerfCoreEvents::counter_of(report.cookie);
            reports += 1;
        });
        for counter in overflowed.into_iter().flatten() {
            sampled += u64::from(vpmu.overflowed(counter, &mut events));
        }
        vpmu.reconcile(&mut events);
        vpmu.read_msr(MsrAddress(IA32_PMC0), &mut events);
        vpmu.pmi_delivered(n);
    };
    // The first rounds open the two events, which allocates.
    (0..4).for_each(|n| round(&mut vpmu, n));
    assert_eq!(allocations(|| (4..2_004).for_each(|n| round(&mut vpmu, n))), 0);
    assert_eq!(sampled, 2_004);
}
