//! Tests of groups, slots, rotation and event states.

use perf_core::pmu::sim::{SimPmu, SimPmuConfig};
use perf_core::*;
use proptest::prelude::*;

use crate::common::test_core::*;

fn pinned() -> Attr {
    hw().with_pinned()
}

#[test]
fn tick_stops_one_and_starts_one() {
    let m = TestCore::new(4);
    let _v = m.vcpu(0);
    let events: Vec<_> = (0..10).map(|_| m.open_vcpu(hw(), None)).collect();
    let states = || events.iter().map(EventHandle::state).collect::<Vec<_>>();
    let before = states();
    m.core.tick();
    assert_eq!(before.iter().zip(states()).filter(|(a, b)| *a != b).count(), 2);
    assert_eq!(m.hw.on(0), 4);
}

#[test]
fn timer_is_needed_only_while_groups_wait() {
    let m = TestCore::new(2);
    let v = m.vcpu(0);
    let _a = m.open_vcpu(hw(), None);
    let _b = m.open_vcpu(hw(), None);
    assert!(!m.core.needs_tick());
    let c = m.open_vcpu(hw(), None);
    assert!(m.core.needs_tick());
    v.sched_out();
    assert!(!m.core.needs_tick(), "nothing rotates on a vCPU that is out");
    v.sched_in();
    drop(c);
    assert!(!m.core.needs_tick());
}

#[test]
fn pinned_groups_precede_flexible_groups() {
    let m = TestCore::new(4);
    let _v = m.vcpu(0);
    let vm = |attr: Attr| m.open_vm(attr.with_inherit());
    let flexible_vcpu = m.open_vcpu(hw(), None);
    let flexible_vm: Vec<_> = (0..2).map(|_| vm(hw())).collect();
    let pinned_vcpu = m.open_vcpu(pinned(), None);
    let pinned_vm = vm(pinned());
    assert_eq!(pinned_vcpu.state(), EventState::Active);
    // The four slots hold the pinned VM event, the pinned vCPU event and both flexible VM events.
    assert_eq!(flexible_vcpu.state(), EventState::Inactive);
    m.run(0, 10);
    assert_eq!(pinned_vm.read().unwrap().value, 10);
    assert!(flexible_vm.iter().all(|e| e.read().unwrap().value == 10));
    assert_eq!(flexible_vcpu.read().unwrap().time_running_ns, 0);
    // The event never ran, so it has no estimate.
    assert_eq!(flexible_vcpu.read().unwrap().estimate(), None);
}

#[test]
fn pinned_event_without_a_slot_is_in_error_until_enabled() {
    let m = TestCore::new(1);
    let v = m.vcpu(0);
    let first = m.open_vcpu(pinned(), None);
    let errors = v.errors();
    let second = m.open_vcpu(pinned(), None);
    assert_eq!(
        (first.state(), second.state()),
        (EventState::Active, EventState::Error)
    );
    assert_eq!(v.errors(), errors + 1);
    assert_eq!(second.read_bytes(&mut [0; 64]).unwrap(), 0, "end of file");
    drop(first);
    assert_eq!(second.state(), EventState::Error, "it does not heal by itself");
    second.enable(EventOrGroup::Event).unwrap();
    assert_eq!(second.state(), EventState::Active);
}

#[test]
fn guest_counters_take_precedence_unless_operator_first() {
    use EventState::{Active, Error, Inactive};
    for (share, states) in [
        (SharePolicy::GuestFirst, (Active, Inactive)),
        (SharePolicy::OperatorFirst, (Error, Active)),
    ] {
        let m = TestCore::with(1, |c| c.share = share);
        let _v = m.vcpu(0);
        let guest = m.try_open(&m.guest, pinned(), V0, None).unwrap();
        let operator = m.open_vcpu(hw(), None);
        assert_eq!((guest.state(), operator.state()), states);
        // A new share policy applies immediately.
        m.core.set_share(SharePolicy::OperatorFirst);
        assert_eq!(operator.state(), Active);
    }
}

/// After a change to strict sharing, open events stay open and only new events that do not fit are
/// rejected.
#[test]
fn strict_sharing_rejects_events_that_do_not_fit() {
    let m = TestCore::new(2);
    let _v = m.vcpu(0);
    let events = [(); 3].map(|()| m.open_vcpu(hw(), None));
    m.core.set_share(SharePolicy::Strict);
    assert_eq!((m.core.share(), active(&events)), (SharePolicy::Strict, 2));
    let [a, b, _waiting] = events;
    b.close();
    let refused = || m.try_open(&m.admin, hw(), V0, None).unwrap_err().errno();
    assert_eq!(refused(), libc::EBUSY);
    let _soft = m.open_vcpu(soft(), None);
    a.close();
    let _c = m.open_vcpu(hw(), None);
    assert_eq!(refused(), libc::EBUSY);
}

/// Under strict sharing, a vCPU without slots for all VM-wide events cannot be added, and the
/// failed call has no effect. With enough slots, the vCPU can be added.
#[test]
fn strict_sharing_refuses_a_vcpu_on_which_events_of_the_vm_do_not_fit() {
    let m = TestCore::new(2);
    let _v = m.vcpu(0);
    let events = [(); 3].map(|()| m.open_vm(hw().with_inherit()));
    m.core.set_share(SharePolicy::Strict);
    let refused = m.core.add_vcpu(VcpuId(1), 2).unwrap_err();
    assert_eq!(refused.errno(), libc::EBUSY, "{refused}");
    assert!(refused.to_string().contains("vCPU 1"), "{refused}");
    assert!(m.core.remove_vcpu(VcpuId(1)).is_err(), "it is not there");
    let [_first, _second, third] = events;
    drop(third);
    let _late = m.core.add_vcpu(VcpuId(1), 2).unwrap();
}

#[test]
fn reserved_slots_are_for_vm_wide_events() {
    let m = TestCore::with(2, |c| c.reserved_slots = 1);
    let _v = m.vcpu(0);
    let a = m.open_vcpu(pinned(), None);
    let b = m.open_vcpu(pinned(), None);
    assert_eq!((a.state(), b.state()), (EventState::Active, EventState::Error));
    let vm = m.open_vm(pinned().with_inherit());
    m.run(0, 7);
    assert_eq!(vm.read().unwrap().value, 7);
}

#[test]
fn p5_an_exclusive_group_is_alone_on_the_pmu() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let a = m.open_vcpu(hw(), None);
    let x = m.open_vcpu(hw().with_exclusive(), None);
    let s = m.open_vcpu(soft(), None);
    let mut seen = 0;
    for _ in 0..10 {
        let (a, x) = (a.state() == EventState::Active, x.state() == EventState::Active);
        assert!(!(a && x));
        assert!(a || x);
        seen |= u32::from(a) | u32::from(x) << 1;
        assert_eq!(s.state(), EventState::Active);
        assert_eq!(v.stats().active_hardware, 1);
        m.core.tick();
    }
    assert_eq!(seen, 3, "both get their turn");
}

#[test]
fn p12_leader_schedules_its_group() {
    let m = TestCore::new(4);
    let _v = m.vcpu(0);
    let leader = m.open_vcpu(hw(), None);
    let on = m.open_vcpu(hw(), Some(&leader));
    let off = m.open_vcpu(hw().with_disabled(), Some(&leader));
    use EventState::{Active, Inactive, Off};
    let states = || [leader.state(), on.state(), off.state()];
    assert_eq!(states(), [Active, Active, Off]);
    leader.disable(EventOrGroup::Event).unwrap();
    assert_eq!(states(), [Off, Inactive, Off]);
    m.run(0, 50);
    let enabled_ns = on.read().unwrap().time_enabled_ns;
    assert_eq!(enabled_ns, 0, "time stands still under a leader that is off");
    leader.enable(EventOrGroup::Event).unwrap();
    assert_eq!(states(), [Active, Active, Off]);
    leader.disable(EventOrGroup::Group).unwrap();
    assert_eq!(states(), [Off; 3]);
    off.enable(EventOrGroup::Group).unwrap();
    assert_eq!(states(), [Active; 3]);
}

#[test]
fn p13_closing_a_leader_leaves_its_siblings_running() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let leader = m.open_vcpu(hw(), None);
    let siblings: Vec<_> = (0..3).map(|_| m.open_vcpu(hw(), Some(&leader))).collect();
    m.run(0, 5);
    leader.close();
    assert_eq!(v.stats().events, 3);
    leader.close();
    assert_eq!(v.stats().events, 3, "closed twice is closed once");
    m.run(0, 5);
    for sibling in &siblings {
        assert_eq!(
            sibling.read().unwrap(),
            Reading {
                value: 10,
                time_enabled_ns: 10,
                time_running_ns: 10,
                id: sibling.id()
            }
        );
        assert_eq!(sibling.read_group().unwrap().len(), 1);
    }
    assert_eq!(leader.read().unwrap_err().errno(), libc::EBADF);
}

#[test]
fn driver_that_refuses_leaves_a_flexible_group_waiting_and_a_pinned_one_in_error() {
    let m = TestCore::new(4);
    let _v = m.vcpu(0);
    *m.hw.refuse.lock().unwrap() = true;
    let flexible = m.open_vcpu(hw(), None);
    let p = m.open_vcpu(pinned(), None);
    assert_eq!(
        (flexible.state(), p.state()),
        (EventState::Inactive, EventState::Error)
    );
    *m.hw.refuse.lock().unwrap() = false;
    m.core.tick();
    assert_eq!(flexible.state(), EventState::Active);
}

/// If the second member of a group receives no slot, the first member is stopped again, and another
/// event receives its slot.
#[test]
fn partially_fitting_group_is_off_as_a_whole() {
    let core = PerfCore::new(PerfCoreConfig::default());
    let pmu = SimPmu::new(SimPmuConfig {
        slots: Some(2),
        // Both events fit only slot 0, which the core does not know.
        allowed_slots: [(1, 1), (2, 1)].into(),
        untold: true,
        ..SimPmuConfig::default()
    });
    core.register(std::sync::Arc::new(pmu.clone()));
    let v = core.add_vcpu(VcpuId(0), 1).unwrap();
    v.sched_in();
    let session = core.session(0, SessionRole::Admin);
    let open = |config, leader: Option<&EventHandle>| {
        let attr = Attr::counting(EventType::SIM, config);
        let target = V0;
        core.open(&session, attr, target, leader, OpenFlags::default())
            .unwrap()
    };
    let leader = open(1, None);
    assert_eq!(leader.state(), EventState::Active);
    let sibling = open(2, Some(&leader));
    let free = open(3, None);
    for _ in 0..6 {
        assert_eq!(
            leader.state() == EventState::Active,
            sibling.state() == EventState::Active
        );
        pmu.advance(VcpuId(0), |_| 1);
        v.tick();
    }
    assert_eq!(
        (leader.state(), sibling.state()),
        (EventState::Inactive, EventState::Inactive)
    );
    assert_eq!(
        (sibling.read().unwrap().value, v.stats().active),
        (0, pmu.active_events(VcpuId(0)))
    );
    assert!(free.read().unwrap().value > 0);
    sibling.close();
    v.tick();
    assert_eq!(pmu.active_events(VcpuId(0)), 2, "alone it fits");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Behavior P8: each of several equal groups is active for its exact share of intervals.
    #[test]
    fn p8_each_of_equal_groups_has_its_share(slots in 1usize..6, n in 1usize..12, rounds in 20u64..60, turn in 1u64..10_000) {
        let m = TestCore::new(slots);
        let _v = m.vcpu(0);
        let events: Vec<_> = (0..n).map(|_| m.open_vcpu(hw(), None)).collect();
        let ticks = rounds * n as u64;
        for _ in 0..ticks {
            m.run(0, turn);
            m.core.tick();
        }
        for event in &events {
            let r = event.read().unwrap();
            prop_assert_eq!(r.time_enabled_ns, ticks * turn);
            let fair = ticks * turn * slots.min(n) as u64 / n as u64;
            prop_assert!(r.time_running_ns.abs_diff(fair) <= turn, "{} of {}", r.time_running_ns, fair);
            prop_assert_eq!(r.value, r.time_running_ns);
        }
    }

    /// Behavior P10: after as many intervals as there are groups, the same groups are active as at
    /// the start.
    #[test]
    fn p10_full_rotation_restores_active_groups(slots in 1usize..6, more in 1usize..8, start in 0usize..20) {
        let n = slots + more;
        let m = TestCore::new(slots);
        let _v = m.vcpu(0);
        let events: Vec<_> = (0..n).map(|_| m.open_vcpu(hw(), None)).collect();
                let turns = |n| (0..n).for_each(|_| { m.run(0, 1); m.core.tick() });
        let states = || events.iter().map(EventHandle::state).collect::<Vec<_>>();
        turns(start);
        let before = states();
        prop_assert_eq!(active(&events), slots);
        turns(n);
        prop_assert_eq!(states(), before);
    }
}

/// The estimate of an event with a continuously increasing rate is close to the true count,
/// although the mean rate in the event's time slices differs from the overall mean.
#[test]
fn estimate_follows_rate_and_reports_exactness() {
    let m = TestCore::new(1);
    let v = m.vcpu(0);
    let events: Vec<_> = (0..4).map(|_| m.open_vcpu(hw(), None)).collect();
    assert_eq!(events[3].estimate().unwrap(), None, "never on: not counted");
    let mut truth = 0;
    for step in 0..40 {
        m.clock.advance(100);
        m.hw.work(0, step * 100);
        truth += step * 100;
        if step % 7 == 3 {
            // A pause of the vCPU does not interrupt the time slice.
            v.sched_out();
            m.clock.advance(1_000_000);
            v.sched_in();
        }
        m.core.tick();
    }
    for event in &events {
        let r = event.read().unwrap();
        assert_eq!(r.time_enabled_ns, 4000);
        let e = event.estimate().unwrap().unwrap();
        let (ours, linear) = (e.value.abs_diff(truth), r.estimate().unwrap().abs_diff(truth));
        // With one slot, a slice is one interval long and is not read in its middle. A rhythm in
        // phase with the intervals could then remain undetected, so no error is known.
        assert_eq!((e.exact, e.standard_error, e.bound), (false, None, None));
        assert!(ours <= linear.max(truth / 50), "{ours} {linear} of {truth}");
    }
    drop(events);
    let alone = m.open_vcpu(hw(), None);
    m.run(0, 10);
    let e = alone.estimate().unwrap().unwrap();
    assert_eq!((e.value, e.exact, e.standard_error), (10, true, Some(0.0)));
    alone.reset(EventOrGroup::Event).unwrap();
    let _other = m.open_vcpu(hw(), None);
    for _ in 0..100 {
        m.run(0, 10);
        m.core.tick();
    }
    let e = alone.estimate().unwrap().unwrap();
    // The count since the reset is estimated exactly, because the rate is constant.
    assert_eq!((e.value, e.exact), (1000, false));
}

#[test]
fn adaptive_turns_are_short_probe_steady_rates_and_starve_no_group() {
    let m = TestCore::with(1, |c| c.mux = perf_core::mux::MuxPolicy::Adaptive);
    let _v = m.vcpu(0);
    let events: Vec<_> = (0..5).map(|_| m.open_vcpu(hw(), None)).collect();
    let mut gaps = std::collections::BTreeMap::<u64, u32>::new();
    for _ in 0..500 {
        let now = perf_core::time::Clock::now_ns(&*m.clock);
        let due = m.core.next_turn_ns().unwrap();
        *gaps.entry(due - now).or_default() += 1;
        m.run(0, due - now);
        m.core.rotate();
    }
    // Expects intervals of two lengths: many of regular length, and a few longer ones that shift
    // the phase. The first call of `rotate` only starts the first interval, so the gap of 0 before
    // it is ignored.
    gaps.remove(&0);
    let [(short, often), (long, seldom)] = gaps.into_iter().collect::<Vec<_>>()[..] else {
        panic!("two lengths of turns");
    };
    assert!(long > short && long < 2 * short && often > 10 * seldom);
    for event in &events {
        let r = event.read().unwrap();
        assert_eq!(r.value, r.time_running_ns);
        assert!(r.time_running_ns * 6 > r.time_enabled_ns, "{r:?}");
    }
}

/// Groups that do not fit together with the pinned events do not block other groups, although they
/// would otherwise stay first in the queue indefinitely.
#[test]
fn unschedulable_groups_do_not_block_others() {
    let m = TestCore::new(2);
    let v = m.vcpu(0);
    let p = m.open_vcpu(pinned(), None);
    let pair = |_| {
        let leader = m.open_vcpu(hw(), None);
        let sibling = m.open_vcpu(hw(), Some(&leader));
        (leader, sibling)
    };
    let hopeless: Vec<_> = (0..20).map(pair).collect();
    let alone = m.open_vcpu(hw().with_exclusive(), None);
    let fits = [(); 3].map(|()| m.open_vcpu(hw(), None));
    let turns = |n| (0..n).for_each(|_| (m.run(0, 1), m.core.tick()).1);
    turns(600);
    for event in &fits {
        let on = event.read().unwrap().time_running_ns;
        assert!((180..=220).contains(&on), "{on} of 600");
    }
    let counted = |leader: &EventHandle| leader.read().unwrap().value;
    assert!(hopeless.iter().all(|(leader, _)| counted(leader) == 0));
    assert_eq!(alone.read().unwrap().estimate(), None);
    assert_eq!(v.stats().waiting_groups, 20 + 1 + 2);
    // Makes the groups fit: disables one of their members, and closes the pinned event.
    hopeless[7].1.disable(EventOrGroup::Event).unwrap();
    p.close();
    turns(200);
    assert!(hopeless.iter().all(|(leader, _)| counted(leader) > 0));
    assert!(counted(&alone) > 0);
}
