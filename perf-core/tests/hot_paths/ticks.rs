//! Tests that ticks and other hot paths do not allocate memory, and that the number of driver calls
//! per tick does not grow with the number of groups.

use perf_core::*;

use crate::allocations;
use crate::common::test_core::*;
use test_support::skip;
use test_support::steps;

#[test]
fn tick_read_overflow_and_raise_do_not_allocate() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let wide = m.open(hw().with_inherit(), EventOpenTarget::Vm, None);
    let flexible: Vec<_> = (0..20).map(|_| m.open_vcpu(hw(), None)).collect();
    let group = m.open_vcpu(soft(), None);
    let _siblings: Vec<_> = (0..7).map(|_| m.open_vcpu(soft(), Some(&group))).collect();
    let flags = OpenFlags::with_cookie(1);
    let attr = Attr::sampling(EventType::SIM, 1, 10).with_pinned();
    let counter = m
        .core
        .open(&m.guest, attr, EventOpenTarget::Vcpu(VcpuId(0)), None, flags)
        .unwrap();
    let sampling = |ty, config| {
        Attr::sampling(ty, config, 10)
            .with_sample_type(SampleType::all())
            .with_read_format(ReadFormat::GROUP)
    };
    let sampled = m.open_vcpu(sampling(SOFT, 1), None);
    let raised = m.open_vcpu(sampling(EventType::VMM, SoftwareEventId::Exits as u64), None);
    let _rings = [&sampled, &raised].map(|e| e.map(16, false).unwrap());
    let mut buf = [0; 64];
    let mut served = 0;
    let n = allocations(|| {
        for _ in 0..200 {
            m.run(0, 25);
            m.core.tick();
            v.tick();
            let _ = m.core.needs_tick();
            v.service_overflows(&mut UnavailableRegs, &mut |o| served += o.times);
            v.software_event(
                SoftwareEventId::Exits,
                25,
                Some(&mut UnavailableRegs),
                &mut |_| {},
            );
            counter.read().unwrap();
            counter.count().unwrap();
            counter.arm(7).unwrap();
            flexible[3].read_bytes(&mut buf).unwrap();
            assert_eq!(group.read_group().unwrap().len(), 8);
            wide.read().unwrap();
            v.sched_out();
            v.sched_in();
            counter.disable(EventOrGroup::Event).unwrap();
            counter.enable(EventOrGroup::Event).unwrap();
        }
    });
    assert!(served > 0);
    assert_eq!(n, 0);
}

#[test]
fn tick_driver_calls_are_independent_of_group_count() {
    for n in [10, 1000] {
        let m = TestCore::new(4);
        let _v = m.vcpu(0);
        let _events: Vec<_> = (0..n).map(|_| m.open_vcpu(hw(), None)).collect();
        let before = m.hw.starts();
        for _ in 0..100 {
            m.run(0, 1);
            m.core.tick();
        }
        assert_eq!(m.hw.starts() - before, 100, "one start for each tick, {n} groups");
    }
}

/// The number of instructions that a tick executes does not depend on the number of groups.
#[test]
fn tick_instructions_are_independent_of_group_count() {
    let of = |n: usize| {
        let m = TestCore::new(4);
        let v = m.vcpu(0);
        let _events: Vec<_> = (0..n).map(|_| m.open_vcpu(hw(), None)).collect();
        let ticks = |n: u64| {
            for _ in 0..n {
                perf_core::time::ManualClock::advance(&m.clock, 10);
                v.tick();
            }
        };
        // Schedules each group once before the measurement, because the first interval of a group
        // ends no slice and is therefore cheaper.
        ticks(n as u64 + 10);
        steps::instructions(|| ticks(16))
    };
    let (Some(few), Some(many)) = (of(10), of(2000)) else {
        skip::skipped("processes may not be traced here", false);
        return;
    };
    assert!(few > 1000, "{few} instructions for 16 ticks");
    assert!(
        many.abs_diff(few) * 10 <= few,
        "{few} instructions with 10 groups, {many} with 2000"
    );
}

/// The number of instructions that a tick executes does not depend on the number of sampling events
/// that need no slot. Ticks do not process events with a fixed period, and process only some of the
/// events with a frequency.
#[test]
fn tick_instructions_are_independent_of_sampling_event_count() {
    for freq in [false, true] {
        let of = |n: usize| {
            let m = TestCore::new(4);
            let v = m.vcpu(0);
            let attr = Attr {
                freq,
                ..Attr::sampling(EventType::VMM, SoftwareEventId::Exits as u64, 1000)
            };
            let _events: Vec<_> = (0..n).map(|_| m.open_vcpu(attr.clone(), None)).collect();
            let ticks = |n: u64| {
                for _ in 0..n {
                    perf_core::time::ManualClock::advance(&m.clock, 10);
                    v.tick();
                }
            };
            ticks(4);
            steps::instructions(|| ticks(4))
        };
        let (Some(few), Some(many)) = (of(100), of(4000)) else {
            return skip::skipped("processes may not be traced here", false);
        };
        assert!(few > 200, "{few} instructions for 4 ticks");
        assert!(
            many.abs_diff(few) * 10 <= few,
            "{few} instructions with 100 events, {many} with 4000; by frequency: {freq}"
        );
    }
}
