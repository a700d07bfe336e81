//! Tests of switches between vCPUs that run on one host thread.

use std::sync::Arc;

use perf_core::record::DecodedRecord;
use perf_core::ring::RingReader;
use perf_core::*;

use crate::common::test_core::*;

/// Creates two vCPUs on host thread 7. Driver events count the thread, so a driver event of vCPU 0
/// that is active also counts the work of vCPU 1.
fn pair(m: &TestCore) -> [Arc<VcpuEventContext>; 2] {
    [0, 1].map(|n| m.core.add_vcpu(VcpuId(n), 7).unwrap())
}

/// Performs `n` units of work on the thread. All active events of both vCPUs count this work.
fn thread_works(m: &TestCore, n: u64) {
    m.clock.advance(n);
    m.hw.work(0, n);
    m.hw.work(1, n);
}

#[test]
fn equivalent_contexts_are_exchanged_without_touching_the_pmu() {
    let m = TestCore::new(4);
    let e = m.open_vm(hw().with_inherit());
    let [a, b] = pair(&m);
    a.sched_in();
    thread_works(&m, 10);
    let before = m.hw.starts();
    assert!(a.switch_to(&b));
    assert_eq!(m.hw.starts(), before);
    thread_works(&m, 5);
    assert_eq!((a.stats().active, b.stats().active), (0, 1));
    assert!(b.switch_to(&a));
    thread_works(&m, 1);
    assert_eq!(e.read().unwrap().value, 16);
    assert_eq!((a.id(), b.id()), (VcpuId(0), VcpuId(1)), "vCPUs keep their names");
}

/// After contexts were swapped, the estimate of a multiplexed event still uses the time slices of
/// the event's own vCPU.
#[test]
fn exchanges_keep_estimates() {
    let m = TestCore::new(1);
    let attr = Attr {
        inherit_stat: true,
        ..hw().with_inherit()
    };
    let events = [(); 2].map(|()| m.open_vm(attr.clone()));
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

/// Returns one entry for each SWITCH record in `ring`: the vCPU, `true` if it was scheduled out,
/// and the time.
fn switches(ring: &mut RingReader, attr: &Attr) -> Vec<(u32, bool, u64)> {
    let mut switches = Vec::new();
    for_each_record(ring, attr, |record| {
        if let DecodedRecord::Switch(record) = record {
            switches.push((record.sample_id.cpu, record.out, record.sample_id.time_ns));
        }
    });
    switches
}

/// A SWITCH record is written only if a vCPU is actually scheduled in or out. A switch between
/// vCPUs writes the same records whether it swaps their contexts or stops and starts events.
#[test]
fn switch_records_bracket_time_scheduled_in() {
    for exchanged in [true, false] {
        let m = TestCore::new(4);
        let attr = Attr {
            context_switch: true,
            sample_id_all: true,
            sample_type: SampleType::TIME | SampleType::CPU,
            ..vmm(SoftwareEventId::Exits)
        };
        let wide = m.open_vm(attr.clone().with_inherit());
        let [a, b] = pair(&m);
        let own = (!exchanged).then(|| m.open_vcpu(attr.clone(), None));
        let read = |event: &EventHandle| RingReader::of(event.map(1, true).unwrap());
        let (mut wide_ring, own_ring) = (read(&wide), own.as_ref().map(read));
        m.clock.advance(10);
        a.sched_in();
        a.sched_in();
        m.clock.advance(5);
        assert_eq!(a.switch_to(&b), exchanged);
        m.clock.advance(7);
        b.sched_out();
        b.sched_out();
        m.core.remove_vcpu(a.id()).unwrap();
        a.sched_in();
        let expected = [(0, false, 10), (0, true, 15), (1, false, 15), (1, true, 22)];
        assert_eq!(switches(&mut wide_ring, &attr), expected);
        if let Some(mut ring) = own_ring {
            assert_eq!(switches(&mut ring, &attr), expected[..2]);
        }
    }
}
