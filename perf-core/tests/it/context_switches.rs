//! Context switches of one host thread that runs several vCPUs.

use std::sync::Arc;

use perf_core::record::{Record, RecordFormat};
use perf_core::ring::RingReader;
use perf_core::*;
use proptest::prelude::*;

use crate::common::machine::*;

/// Creates two vCPUs on host thread 7. The driver counts threads, so vCPU 0's driver events count
/// whatever the thread runs while they are on.
fn pair(m: &Machine) -> [Arc<VcpuContext>; 2] {
    [0, 1].map(|n| m.core.add_vcpu(VcpuId(n), 7).unwrap())
}

fn starts(m: &Machine) -> u64 {
    m.hw.starts()
}

/// Runs the thread for `n` units of work, on either vCPU.
fn thread_works(m: &Machine, n: u64) {
    m.clock.advance(n);
    m.hw.work(0, n);
    m.hw.work(1, n);
}

#[test]
fn equivalent_contexts_are_exchanged_without_touching_the_pmu() {
    let m = Machine::new(4);
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

/// The switch is counted while the events are still on: events that then wait for a slot do not
/// count it.
#[test]
fn the_context_switch_is_raised_before_the_vcpu_goes_out() {
    let m = Machine::new(1);
    let [a, b] = pair(&m);
    let switches = Attr::counting(EventType::VMM, SoftwareEventId::ContextSwitches as u64);
    let _holds_the_slot = m.open_vcpu(Attr { pinned: true, ..hw() }, None);
    let leader = m.open_vcpu(hw(), None);
    let waits = m.open_vcpu(switches.clone(), Some(&leader));
    let on = m.open_vcpu(switches, None);
    a.sched_in();
    let states = || [&leader, &waits, &on].map(Handle::state);
    assert_eq!(
        states(),
        [EventState::Inactive, EventState::Inactive, EventState::Active]
    );
    a.sched_out();
    assert_eq!([&waits, &on].map(|e| e.read().unwrap().value), [0, 1]);
    a.sched_in();
    assert!(!a.switch_to(&b));
    assert_eq!([&waits, &on].map(|e| e.read().unwrap().value), [0, 2]);
}

/// A guest reset may change the state of one of two clones, so it ends the clone relation.
#[test]
fn a_reset_ends_the_clone_relation() {
    let m = Machine::new(4);
    let _e = m.open(
        Attr {
            inherit: true,
            ..hw()
        },
        OpenTarget::Vm,
        None,
    );
    let [a, b] = pair(&m);
    a.sched_in();
    assert!(a.switch_to(&b));
    assert!(b.switch_to(&a));
    b.exec();
    assert!(!a.switch_to(&b));
}

#[test]
fn p19_pinned_and_uncloned_contexts_are_not_exchanged() {
    let m = Machine::new(4);
    let _e = m.open(
        Attr {
            inherit: true,
            ..hw()
        },
        OpenTarget::Vm,
        None,
    );
    let [a, b] = pair(&m);
    a.sched_in();
    let pin = b.pin();
    assert!(!a.switch_to(&b));
    assert_eq!(
        (a.stats().active, b.stats().active),
        (0, 1),
        "handed over the ordinary way"
    );
    drop(pin);
    assert!(b.switch_to(&a));
    let own = m.open_vcpu(soft(), None);
    assert!(!a.switch_to(&b), "vCPU 0 has an event of its own");
    drop(own);
    assert!(!b.switch_to(&a), "and is no clone any more");
    let c = m.core.add_vcpu(VcpuId(2), 8).unwrap();
    assert!(!a.switch_to(&c), "another thread");
    let _late = m.open(
        Attr {
            inherit: true,
            ..hw()
        },
        OpenTarget::Vm,
        None,
    );
    let d = m.core.add_vcpu(VcpuId(3), 8).unwrap();
    c.sched_in();
    assert!(!c.switch_to(&d), "another generation");
}

proptest! {
    /// P18: sums never change, and with inherit_stat neither do the vCPUs' own values, as the READ
    /// records at exit show.
    #[test]
    fn p18_exchanges_keep_sums_and_per_vcpu_values(steps in prop::collection::vec((any::<bool>(), 1u64..100), 1..30)) {
        use perf_core::record::{RecordFormat, Record};
        let m = Machine::new(4);
        let attr = Attr {
            inherit: true,
            inherit_stat: true,
            read_format: ReadFormat::TOTAL_TIME_ENABLED | ReadFormat::TOTAL_TIME_RUNNING,
            ..hw()
        };
        let e = m.open(attr.clone(), OpenTarget::Vm, None);
        let ring = e.map(8, true).unwrap();
        // Both vCPUs have the same thread id in records, so the order of exits tells them apart.
        let vcpus = pair(&m);
        vcpus[0].sched_in();
        let (mut at, mut work) = (0, [0u64; 2]);
        for (switch, n) in steps {
            if switch {
                prop_assert!(vcpus[at].switch_to(&vcpus[1 - at]));
                at = 1 - at;
            }
            thread_works(&m, n);
            work[at] += n;
            prop_assert_eq!(e.read().unwrap().value, work[0] + work[1]);
        }
        for n in 0..2 {
            m.core.remove_vcpu(VcpuId(n)).unwrap();
        }
        let mut reader = perf_core::ring::RingReader::map(ring.memfd()).unwrap();
        let format = RecordFormat::from(&attr);
        let mut last = Vec::new();
        while let Some(raw) = reader.next_record().unwrap() {
            if let Record::Read(r) = Record::decode(raw, format).unwrap() {
                last.push((r.values.entries.iter().next().unwrap().value, r.values.time_enabled_ns, r.values.time_running_ns));
            }
        }
        prop_assert_eq!(last, work.map(|w| (w, w, w)).to_vec());
        prop_assert_eq!(e.read().unwrap().value, work[0] + work[1]);
    }
}

/// The estimate of a multiplexed event uses the slices of its vCPU, in whichever context the event
/// was at the time.
#[test]
fn exchanges_keep_estimates() {
    let m = Machine::new(1);
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

/// Returns the vCPU and time of each SWITCH record in `ring`, and `true` for a vCPU that goes out.
fn switches(ring: &mut RingReader, attr: &Attr) -> Vec<(u32, bool, u64)> {
    let mut switches = Vec::new();
    while let Some(raw) = ring.next_record().unwrap() {
        if let Record::Switch(record) = Record::decode(raw, RecordFormat::from(attr)).unwrap() {
            switches.push((record.sample_id.cpu, record.out, record.sample_id.time_ns));
        }
    }
    switches
}

/// Calls without effect write no record. Switches by exchange and by scheduling write the same ones.
#[test]
fn switch_records_bracket_time_scheduled_in() {
    for exchanged in [true, false] {
        let m = Machine::new(4);
        let attr = Attr {
            context_switch: true,
            sample_id_all: true,
            sample_type: SampleType::TIME | SampleType::CPU,
            ..Attr::counting(EventType::VMM, SoftwareEventId::Exits as u64)
        };
        let wide = Attr {
            inherit: true,
            ..attr.clone()
        };
        let wide = m.open(wide, OpenTarget::Vm, None);
        let [a, b] = pair(&m);
        let own = (!exchanged).then(|| m.open_vcpu(attr.clone(), None));
        let read = |event: &Handle| RingReader::of(event.map(1, true).unwrap());
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
