//! Tests of drivers that fail to start or restart an event. The event is not reported as active,
//! and is retried later if possible.

use perf_core::*;

use crate::common::test_core::*;

fn sampling(ty: EventType, pinned: bool) -> Attr {
    Attr {
        pinned,
        ..Attr::sampling(ty, 1, 10).with_sample_type(SampleType::IP)
    }
}

fn overflow(m: &TestCore, v: &VcpuEventContext) {
    m.run(0, 10);
    serve(v);
}

fn refuse(m: &TestCore, refuse: bool) {
    for world in [&m.hw, &m.sw] {
        *world.refuse.lock().unwrap() = refuse;
    }
}

/// To throttle or unthrottle an event, the core stops and restarts its driver event. If the restart
/// fails, the event does not count and is not reported as active.
#[test]
fn event_is_off_if_restart_fails_around_throttling() {
    use EventState::{Active, Error, Inactive};
    for (ty, lifting, pinned) in [
        (EventType::SIM, false, false),
        (EventType::SIM, false, true),
        (EventType::SIM, true, false),
        (EventType::SIM, true, true),
        (SOFT, false, false),
        (SOFT, true, false),
    ] {
        // Limits an event to one overflow per tick, so that the second throttles it.
        let m = TestCore::with(2, |c| (c.tick_hz, c.sample_rate_hz) = (1, 1));
        let v = m.vcpu(0);
        let e = m.open_vcpu(sampling(ty, pinned), None);
        let sibling = m.open_vcpu(Attr::counting(ty, 1), Some(&e));
        let case = format!("{ty:?}, lifting: {lifting}, pinned: {pinned}");
        overflow(&m, &v);
        if lifting {
            overflow(&m, &v);
            assert_eq!(v.stats().throttles, 1, "{case}");
            refuse(&m, true);
            m.core.tick();
        } else {
            refuse(&m, true);
            overflow(&m, &v);
        }
        let counted = 20;
        let states = || (e.state(), sibling.state());
        let expected = if pinned { Error } else { Inactive };
        assert_eq!(states(), (expected, Inactive), "{case}");
        assert_eq!((v.stats().active, m.hw.on(0) + m.sw.on(0)), (0, 0), "{case}");
        if pinned {
            assert_eq!(
                e.failure().unwrap().cause,
                PinnedEventFailureCause::Busy,
                "{case}"
            );
        }
        m.run(0, 100);
        let r = e.read().unwrap();
        assert_eq!((r.value, r.time_running_ns), (counted, counted), "{case}");
        refuse(&m, false);
        if pinned {
            e.enable(EventOrGroup::Event).unwrap();
        } else {
            assert!(m.core.needs_tick(), "who would put it on again? {case}");
            m.core.tick();
        }
        assert_eq!(states(), (Active, Active), "{case}");
        m.run(0, 5);
        assert_eq!(e.read().unwrap().value, counted + 5, "{case}");
    }
}

/// Ticks retry software groups that the driver rejected, a few at a time.
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
    events[3].disable(EventOrGroup::Event).unwrap();
    refuse(&m, false);
    for _ in 0..3 {
        m.core.tick();
    }
    assert_eq!((active(&events), m.sw.on(0)), (19, 19));
    assert!(!m.core.needs_tick());
    // Scheduling a vCPU in retries all rejected groups.
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
