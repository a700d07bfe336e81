//! Tests of counters that are set closer to their overflow than the minimum period of the host
//! allows, as on Intel processors, where Linux rejects periods below 2, 32 or 128 for some events.

use perf_core::pmu::VcpuId;
use perf_core::pmu::sim::{SimPmu, SimPmuConfig};
use vpmu::registers::*;
use vpmu::*;

use crate::backing_loss::PerfCoreGuest;
use crate::common::overflowed_counters;

const VCPU: VcpuId = VcpuId(0);
/// Selector for branch instructions at all privilege levels, interrupting and enabled.
const BRANCHES: u64 = 0x53_00C4;
const MINIMUMS: [u64; 4] = [1, 2, 32, 128];

/// Returns a guest that samples branches, with `distance` counts until the first overflow, on a
/// host with the minimum period `min_period`.
fn sampling(min_period: u64, distance: u64) -> PerfCoreGuest {
    let pmu = SimPmu::new(SimPmuConfig {
        slots: Some(4),
        min_period,
        ..SimPmuConfig::default()
    });
    let mut rig = PerfCoreGuest::on(pmu, CounterBackingPolicy::Hardware);
    rig.guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    rig.guest.write(IA32_PERFEVTSEL0, BRANCHES);
    rig.guest.write(IA32_A_PMC0, (1 << 48) - distance);
    rig.guest.write(IA32_PERF_GLOBAL_CTRL, 1);
    rig
}

impl PerfCoreGuest {
    /// Passes the overflows that the host has reported to the PMU.
    fn notice(&mut self) {
        let counters = overflowed_counters(&self.context);
        self.guest.overflowed(counters);
    }

    /// Executes `branches` branches and returns whether a PMI is due. Overflows are detected only
    /// when the host reports them.
    fn branches(&mut self, branches: u64) -> bool {
        self.pmu.advance(VCPU, |_| branches);
        self.notice();
        self.guest.vpmu.pmi_pending()
    }
}

/// The PMI is raised after the requested number of counts, or after the host's minimum period if
/// that is longer.
#[test]
fn short_distance_overflows_within_the_minimum_period() {
    for minimum in MINIMUMS {
        for distance in [1, 2, 5, 31, 32, 33, 200] {
            let mut rig = sampling(minimum, distance);
            let announced = distance.max(minimum);
            assert!(!rig.branches(announced - 1), "{distance} on a host of {minimum}");
            assert!(rig.branches(1), "{distance} on a host of {minimum}");
        }
    }
}

/// If a guest samples a rare event with a period below the host's minimum, a timer polls for the
/// overflow. The event itself would reach the minimum period much later.
#[test]
fn short_distance_of_a_rare_event_is_polled() {
    for minimum in MINIMUMS {
        let mut rig = sampling(minimum, 3);
        for counted in 1..=3u64 {
            rig.branches(1);
            rig.pmu.poll_late_overflows(VCPU);
            rig.notice();
            assert_eq!(
                rig.guest.vpmu.pmi_pending(),
                counted == 3,
                "{counted} on {minimum}"
            );
        }
    }
}

/// While an event counts, a guest can reduce the number of counts until overflow to 1. rr does
/// this: it starts with a period of 0xFFFFFFFF and later sets it to 1.
#[test]
fn distance_is_shortened_to_one_while_counting() {
    for minimum in MINIMUMS {
        let mut rig = sampling(minimum, 0xFFFF_FFFF);
        assert!(!rig.branches(1000));
        rig.guest.write(IA32_A_PMC0, (1 << 48) - 1);
        assert!(rig.branches(minimum), "a host of {minimum}");
        rig.guest.vpmu.pmi_delivered(0);
        rig.guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 1);
        // Each further overflow is armed in the same way.
        for _ in 0..3 {
            rig.guest.write(IA32_A_PMC0, (1 << 48) - 1);
            assert!(rig.branches(minimum), "a host of {minimum}");
            rig.guest.vpmu.pmi_delivered(0);
            rig.guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 1);
        }
        // After a PMI, the counter is 2^48 branches away from its next overflow.
        assert!(!rig.branches(minimum));
    }
}
