//! Context switches of one host thread that runs several vCPUs.

use std::sync::Arc;

use perf_core::*;

use crate::common::test_core::*;

/// Creates two vCPUs on host thread 7. The driver counts threads, so vCPU 0's driver events count
/// whatever the thread runs while they are on.
fn pair(m: &TestCore) -> [Arc<VcpuContext>; 2] {
    [0, 1].map(|n| m.core.add_vcpu(VcpuId(n), 7).unwrap())
}

fn starts(m: &TestCore) -> u64 {
    m.hw.starts()
}

/// Runs the thread for `n` units of work, on either vCPU.
fn thread_works(m: &TestCore, n: u64) {
    m.clock.advance(n);
    m.hw.work(0, n);
    m.hw.work(1, n);
}

#[test]
fn equivalent_contexts_are_exchanged_without_touching_the_pmu() {
    let m = TestCore::new(4);
    let e = m.open(
        Attr {
            inherit: true,
            ..hw()
        },
        OpenTarget::Vm,
        None,
    );
    let [a, b] = pair(&m);
    a.sched_in();
    thread_works(&m, 10);
    let before = starts(&m);
    assert!(a.switch_to(&b));
    assert_eq!(starts(&m), before);
    thread_works(&m, 5);
    assert_eq!((a.stats().active, b.stats().active), (0, 1));
    assert!(b.switch_to(&a));
    thread_works(&m, 1);
    assert_eq!(e.read().unwrap().value, 16);
    assert_eq!((a.id(), b.id()), (VcpuId(0), VcpuId(1)), "vCPUs keep their names");
}

/// The estimate of a multiplexed event uses the slices of its vCPU, in whichever context the event
/// was at the time.
#[test]
fn exchanges_keep_estimates() {
    let m = TestCore::new(1);
    let attr = Attr {
        inherit: true,
        inherit_stat: true,
        ..hw()
    };
    let events = [(); 2].map(|()| m.open(attr.clone(), OpenTarget::Vm, None));
    let vcpus = pair(&m);
    vcpus[0].sched_in();
    let (mut at, mut work) = (0, 0);
    for step in 0..110 {
        thread_works(&m, 50);
        work += 50;
        m.core.tick();
        if step % 10 == 9 {
            assert!(vcpus[at].switch_to(&vcpus[1 - at]));
            at = 1 - at;
        }
    }
    for e in &events {
        let r = e.read().unwrap();
        assert_eq!(r.time_enabled_ns, work);
        assert!(r.time_running_ns < work, "it took turns");
        let estimate = e.estimate().unwrap().unwrap();
        assert!(
            estimate.value.abs_diff(work) <= work / 50,
            "{} estimated of {work}, {} counted",
            estimate.value,
            r.value
        );
    }
}
