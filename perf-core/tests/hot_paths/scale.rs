//! Tests of operations whose cost must not grow with the number of events, or must grow at most
//! linearly. The cost is the number of executed instructions, counted by single-stepping.

use perf_core::*;
use test_support::skip;
use test_support::steps;

use crate::common::test_core::*;

/// Checks that the number of executed instructions of an operation grows at most by the factor
/// `factor` if the number of objects grows from `few` to `many`. `of` returns the number of
/// instructions for a given number of objects.
fn grows_at_most(factor: u64, (few, many): (u32, u32), of: impl Fn(u32) -> Option<u64>) {
    let (Some(with_few), Some(with_many)) = (of(few), of(many)) else {
        return skip::skipped("processes may not be traced here", false);
    };
    assert!(with_few > 100, "{with_few} instructions with {few}");
    assert!(
        with_many <= factor * with_few,
        "{with_few} instructions with {few}, {with_many} with {many}"
    );
}

fn raised() -> Attr {
    Attr::sampling(EventType::VMM, SoftwareEventId::Exits as u64, 1000)
}

#[test]
fn close_instructions_are_independent_of_raised_event_count() {
    grows_at_most(2, (100, 10_000), |n| {
        let m = TestCore::new(4);
        let _v = m.vcpu(0);
        let mut events: Vec<_> = (0..n).map(|_| m.open_vcpu(raised(), None)).collect();
        let closed = events.swap_remove(0);
        steps::instructions(|| closed.close())
    });
}

#[test]
fn service_instructions_are_independent_of_raised_event_count() {
    grows_at_most(2, (100, 10_000), |n| {
        let m = TestCore::new(4);
        let v = m.vcpu(0);
        let _counter = m.open_vcpu(Attr::sampling(EventType::SIM, 1, 1000), None);
        let _events: Vec<_> = (0..n).map(|_| m.open_vcpu(raised(), None)).collect();
        m.run(0, 1000);
        steps::instructions(|| {
            v.service_overflows(&mut UnavailableRegs, &mut |_| {});
        })
    });
}

#[test]
fn thread_addition_instructions_grow_at_most_linearly() {
    grows_at_most(10, (30, 300), |n| {
        let m = TestCore::new(4);
        for tid in 1..=n {
            m.core.add_thread(tid.cast_signed()).unwrap();
        }
        steps::instructions(|| drop(m.core.add_thread(1)))
    });
}

#[test]
fn read_by_vcpu_instructions_grow_linearly() {
    grows_at_most(20, (20, 300), |n| {
        let m = TestCore::new(4);
        for vcpu in 0..n {
            m.vcpu(vcpu);
        }
        let attr = raised().with_inherit();
        let event = m.open(attr, EventOpenTarget::Vm, None);
        steps::instructions(|| drop(event.read_by_vcpu()))
    });
}
