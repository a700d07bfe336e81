//! Drivers that refuse to restart an event: no event is reported on without counting, and events
//! that may be on later are retried.

use perf_core::*;

use crate::common::test_core::*;

fn sampling(ty: EventType, pinned: bool) -> Attr {
    Attr {
        pinned,
        sample_type: SampleType::IP,
        ..Attr::sampling(ty, 1, 10)
    }
}

/// Creates a machine on which two overflows per tick throttle.
fn quickly_throttled() -> TestCore {
    TestCore::with(2, |c| {
        c.tick_hz = 1;
        c.sample_rate_hz = 1;
    })
}

fn overflow_twice(m: &TestCore, v: &VcpuContext) {
    for _ in 0..2 {
        m.run(0, 10);
        v.service_overflows(&mut UnavailableRegs, &mut |_| {});
    }
}

fn refuse(m: &TestCore, refuse: bool) {
    for world in [&m.hw, &m.sw] {
        *world.refuse.lock().unwrap() = refuse;
    }
}

/// Turning overflows off and on again is a stop and a start. If the start fails, the event does not
/// count.
#[test]
fn event_is_off_if_restart_fails_around_throttling() {
    for (ty, lifting, pinned) in [
        (EventType::SIM, false, false),
        (EventType::SIM, false, true),
        (EventType::SIM, true, false),
        (EventType::SIM, true, true),
        (SOFT, false, false),
        (SOFT, true, false),
    ] {
        let m = quickly_throttled();
        let v = m.vcpu(0);
        let e = m.open_vcpu(sampling(ty, pinned), None);
        let sibling = m.open_vcpu(Attr::counting(ty, 1), Some(&e));
        let case = format!("{ty:?}, lifting: {lifting}, pinned: {pinned}");
        let counted = if lifting {
            overflow_twice(&m, &v);
            assert_eq!(v.stats().throttles, 1, "{case}");
            refuse(&m, true);
            m.core.tick();
            20
        } else {
            m.run(0, 10);
            v.service_overflows(&mut UnavailableRegs, &mut |_| {});
            refuse(&m, true);
            m.run(0, 10);
            v.service_overflows(&mut UnavailableRegs, &mut |_| {});
            20
        };
        let expected = if pinned {
            EventState::Error
        } else {
            EventState::Inactive
        };
        assert_eq!(
            (e.state(), sibling.state()),
            (expected, EventState::Inactive),
            "{case}"
        );
        assert_eq!((v.stats().active, m.hw.on(0) + m.sw.on(0)), (0, 0), "{case}");
        if pinned {
            assert_eq!(e.failure().unwrap().cause, EventFailureCause::Busy, "{case}");
        }
        m.run(0, 100);
        let r = e.read().unwrap();
        assert_eq!((r.value, r.time_running_ns), (counted, counted), "{case}");
        refuse(&m, false);
        if pinned {
            e.enable(ControlScope::Event).unwrap();
        } else {
            assert!(m.core.needs_tick(), "who would put it on again? {case}");
            m.core.tick();
        }
        assert_eq!(
            (e.state(), sibling.state()),
            (EventState::Active, EventState::Active),
            "{case}"
        );
        m.run(0, 5);
        assert_eq!(e.read().unwrap().value, counted + 5, "{case}");
    }
}

/// Ticks retry software groups that the driver refused, a few at a time.
#[test]
fn refused_software_group_is_retried() {
    let m = TestCore::new(1);
    let v = m.vcpu(0);
    refuse(&m, true);
    let events: Vec<_> = (0..20).map(|_| m.open_vcpu(soft(), None)).collect();
    let closed = m.open_vcpu(soft(), None);
    m.core.tick();
    assert!(events.iter().all(|e| e.state() == EventState::Inactive));
    assert!(m.core.needs_tick());
    drop(closed);
    events[3].disable(ControlScope::Event).unwrap();
    refuse(&m, false);
    for _ in 0..3 {
        m.core.tick();
    }
    let on = events.iter().filter(|e| e.state() == EventState::Active).count();
    assert_eq!((on, m.sw.on(0)), (19, 19));
    assert!(!m.core.needs_tick());
    // A vCPU that is scheduled in again retries all of them.
    v.sched_out();
    refuse(&m, true);
    v.sched_in();
    v.sched_out();
    assert!(!m.core.needs_tick());
    refuse(&m, false);
    v.sched_in();
    assert_eq!(m.sw.on(0), 19);
    assert!(!m.core.needs_tick());
}
