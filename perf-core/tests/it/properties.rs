//! Invariants of scheduling, families and overflows, for random configurations and histories.

use std::sync::Arc;

use perf_core::record::{Record, RecordFormat};
use perf_core::ring::{Ring, RingReader};
use perf_core::*;
use proptest::prelude::*;

use crate::common::test_core::*;

fn wide() -> Attr {
    Attr {
        inherit: true,
        ..hw()
    }
}

fn sampling(ty: EventType, config: u64, period: u64) -> Attr {
    Attr {
        sample_type: SampleType::TID,
        ..Attr::sampling(ty, config, period)
    }
}

fn exits(period: u64) -> Attr {
    sampling(EventType::VMM, SoftwareEventId::Exits as u64, period)
}

fn is_on(e: &Handle) -> bool {
    e.state() == EventState::Active
}

/// Registers whose evaluation raises an event of the next vCPU at the next level.
struct NestedRegs<'a> {
    vcpus: &'a [Arc<VcpuContext>],
    levels: &'a [RaiseLevel],
    delivered: &'a mut Vec<bool>,
}

impl NestedRegs<'_> {
    fn raise(&mut self) {
        let ([vcpu, vcpus @ ..], [level, levels @ ..]) = (self.vcpus, self.levels) else {
            return;
        };
        let at = self.delivered.len();
        self.delivered.push(false);
        let mut inner = NestedRegs {
            vcpus,
            levels,
            delivered: self.delivered,
        };
        let delivered =
            vcpu.software_event_at(*level, SoftwareEventId::Exits, 1, Some(&mut inner), &mut |_| {});
        self.delivered[at] = delivered;
    }
}

impl SampleRegs for NestedRegs<'_> {
    fn mode(&mut self) -> CpuMode {
        CpuMode::GuestKernel
    }
    fn ip(&mut self) -> u64 {
        self.raise();
        0
    }
}

/// Returns the type and thread of every record of `ring`.
fn records(ring: &Ring) -> Vec<(&'static str, u32)> {
    let format = RecordFormat {
        sample_type: SampleType::TID,
        read_format: ReadFormat::empty(),
        ..RecordFormat::default()
    };
    let mut reader = RingReader::map(ring.memfd()).unwrap();
    let mut out = Vec::new();
    while let Some(raw) = reader.next_record().unwrap() {
        out.push(match Record::decode(raw, format).unwrap() {
            Record::Sample(s) => ("sample", s.tid),
            Record::Exit(t) => ("exit", t.tid),
            Record::Read(r) => ("read", r.tid),
            Record::Fork(t) => ("fork", t.tid),
            _ => ("other", 0),
        });
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// P8: each of several equal groups is on for its exact share of intervals.
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

    /// P10: after as many intervals as there are groups, the same groups are on.
    #[test]
    fn p10_full_rotation_restores_active_groups(slots in 1usize..6, more in 1usize..8, start in 0usize..20) {
        let n = slots + more;
        let m = TestCore::new(slots);
        let _v = m.vcpu(0);
        let events: Vec<_> = (0..n).map(|_| m.open_vcpu(hw(), None)).collect();
        let turns = |n| (0..n).for_each(|_| { m.run(0, 1); m.core.tick() });
        let on = || events.iter().map(is_on).collect::<Vec<_>>();
        turns(start);
        let before = on();
        prop_assert_eq!(before.iter().filter(|on| **on).count(), slots);
        turns(n);
        prop_assert_eq!(on(), before);
    }

    /// P12: a leader stops its running siblings and restarts exactly those that are not off.
    #[test]
    fn p12_leader_restarts_enabled_siblings(members in prop::collection::vec((any::<bool>(), any::<bool>()), 0..6), pinned: bool, inside: bool) {
        let m = TestCore::new(8);
        let v = m.vcpu(0);
        let leader = m.open_vcpu(Attr { pinned, ..hw() }, None);
        let open = |&(software, disabled): &(bool, bool)| {
            let base = if software { soft() } else { hw() };
            m.open_vcpu(Attr { disabled, ..base }, Some(&leader))
        };
        let siblings: Vec<_> = members.iter().map(open).collect();
        if !inside {
            v.sched_out();
        }
        let states = || siblings.iter().map(Handle::state).collect::<Vec<_>>();
        let expected = |enabled| members.iter().map(|m| if m.1 { EventState::Off } else { enabled }).collect::<Vec<_>>();
        let there = if inside { EventState::Active } else { EventState::Inactive };
        prop_assert_eq!((leader.state(), states()), (there, expected(there)));
        leader.disable(ControlScope::Event).unwrap();
        prop_assert_eq!((leader.state(), states()), (EventState::Off, expected(EventState::Inactive)));
        m.run(0, 10);
        leader.enable(ControlScope::Event).unwrap();
        prop_assert_eq!((leader.state(), states()), (there, expected(there)));
    }

    /// P13: after their leader is closed, siblings lead groups of one, keep their counts and times,
    /// and continue.
    #[test]
    fn p13_siblings_of_closed_leader_run_alone(members in prop::collection::vec((any::<bool>(), any::<bool>()), 0..6), leader_off: bool, work in 1u64..100) {
        let m = TestCore::new(8);
        let v = m.vcpu(0);
        let leader = m.open_vcpu(hw(), None);
        let open = |&(software, disabled): &(bool, bool)| {
            let base = if software { soft() } else { hw() };
            m.open_vcpu(Attr { disabled, ..base }, Some(&leader))
        };
        let siblings: Vec<_> = members.iter().map(open).collect();
        m.run(0, work);
        if leader_off {
            leader.disable(ControlScope::Event).unwrap();
        }
        let readings = || siblings.iter().map(|s| s.read().unwrap()).collect::<Vec<_>>();
        let before = readings();
        leader.close();
        prop_assert_eq!(readings(), before.clone());
        prop_assert_eq!(v.stats().events, siblings.len());
        leader.close();
        prop_assert_eq!(v.stats().events, siblings.len(), "removed twice is removed once");
        m.run(0, work);
        for ((sibling, before), (_, off)) in siblings.iter().zip(before).zip(members) {
            let more = if off { 0 } else { work };
            let r = sibling.read().unwrap();
            prop_assert_eq!((r.value, r.time_running_ns), (before.value + more, before.time_running_ns + more));
            prop_assert_eq!(sibling.read_group().unwrap().len(), 1);
        }
    }

    /// P15: the times of a family are those of its live and exited children, each of which is
    /// enabled while its vCPU is scheduled in.
    #[test]
    fn p15_times_are_those_of_all_children(ops in prop::collection::vec((0u8..7, 0u32..3, 1u64..100), 1..60)) {
        let m = TestCore::new(1);
        let e = m.open(wide(), OpenTarget::Vm, None);
        // Alternates with the first on every vCPU; together they are always on.
        let rival = m.open(wide(), OpenTarget::Vm, None);
        let mut vcpus: [Option<(Arc<VcpuContext>, bool)>; 3] = Default::default();
        let mut enabled = 0;
        for (op, n, amount) in ops {
            let vcpu = &mut vcpus[n as usize];
            match (op, vcpu.as_mut()) {
                (0, None) => *vcpu = Some((m.vcpu(n), true)),
                (1, Some(_)) => { m.core.remove_vcpu(VcpuId(n)).unwrap(); *vcpu = None; }
                (2, Some((v, inside))) => { v.sched_out(); *inside = false; }
                (3, Some((v, inside))) => { v.sched_in(); *inside = true; }
                (4, _) => m.core.tick(),
                _ => {
                    m.run(n, amount);
                    enabled += amount * vcpus.iter().flatten().filter(|(_, inside)| *inside).count() as u64;
                }
            }
            let (a, b) = (e.read().unwrap(), rival.read().unwrap());
            prop_assert_eq!((a.time_enabled_ns, b.time_enabled_ns), (enabled, enabled));
            prop_assert_eq!(a.time_running_ns + b.time_running_ns, enabled);
        }
    }

    /// P16 and P17: a family has one child on each existing vCPU and no grandchildren; a failed
    /// hot-add leaves none.
    #[test]
    fn p16_p17_a_family_has_one_child_for_each_vcpu(ops in prop::collection::vec((0u8..5, 0u32..4), 1..60)) {
        let m = TestCore::new(4);
        let e = m.open(wide(), OpenTarget::Vm, None);
        let (mut there, mut impossible) = ([false; 4], None);
        let mut work = 0;
        for (op, n) in ops {
            match op {
                0 | 1 if !there[n as usize] => {
                    let added = m.core.add_vcpu(VcpuId(n), 1).map(|v| v.sched_in());
                    prop_assert_eq!(added.is_ok(), impossible.is_none());
                    there[n as usize] = added.is_ok();
                }
                2 if there[n as usize] => { m.core.remove_vcpu(VcpuId(n)).unwrap(); there[n as usize] = false; }
                3 if there == [false; 4] && impossible.is_none() => {
                    impossible = Some(m.open(Attr { config: 0, ..wide() }, OpenTarget::Vm, None));
                }
                _ => impossible = None,
            }
            m.run(n, 3);
            work += if there[n as usize] { 3 } else { 0 };
            let live = there.iter().filter(|t| **t).count();
            prop_assert_eq!((e.children(), e.read().unwrap().value), (live, work));
            let events = |n: u32| m.core.vcpu_stats(VcpuId(n)).map_or(0, |s| s.events);
            prop_assert_eq!((0..4).map(events).sum::<usize>(), live);
        }
        drop((e, impossible));
        prop_assert_eq!((0..4).filter_map(|n| m.core.vcpu_stats(VcpuId(n))).map(|s| s.events).sum::<usize>(), 0);
        prop_assert_eq!(m.core.vm_stats().events, 0);
    }

    /// P19: contexts are exchanged if and only if neither is pinned and both are clones, and then
    /// no event is started.
    #[test]
    fn p19_only_unpinned_clones_are_exchanged(ops in prop::collection::vec((0u8..12, 0usize..2), 1..40)) {
        let m = TestCore::new(4);
        let e = m.open(wide(), OpenTarget::Vm, None);
        let vcpus = [0, 1].map(|n| m.core.add_vcpu(VcpuId(n), 7).unwrap());
        vcpus[0].sched_in();
        let (mut at, mut work) = (0, 0);
        let (mut pins, mut own, mut clone) = ([Vec::new(), Vec::new()], Vec::new(), [true; 2]);
        for (op, n) in ops {
            match op {
                0 | 1 => pins[n].push(vcpus[n].pin()),
                2..=5 => { pins[n].pop(); }
                6 if own.len() < 2 => {
                    own.push(m.open(soft(), OpenTarget::Vcpu(VcpuId(n as u32)), None));
                    clone[n] = false;
                }
                _ => {
                    let starts = m.hw.starts();
                    let exchanged = vcpus[at].switch_to(&vcpus[1 - at]);
                    prop_assert_eq!(exchanged, pins.iter().all(Vec::is_empty) && clone == [true; 2]);
                    prop_assert_eq!(m.hw.starts() == starts, exchanged);
                    at = 1 - at;
                }
            }
            m.clock.advance(5);
            m.hw.work(0, 5);
            m.hw.work(1, 5);
            work += 5;
            prop_assert_eq!(e.read().unwrap().value, work);
        }
    }

    /// P24: an event raised inside its own level is dropped, an event of another level is not, and
    /// all levels are free afterwards.
    #[test]
    fn p24_only_events_nested_in_own_level_are_dropped(nest in prop::collection::vec(0usize..4, 1..7)) {
        const LEVELS: [RaiseLevel; 4] = [RaiseLevel::Thread, RaiseLevel::Deferred, RaiseLevel::Signal, RaiseLevel::Nmi];
        let m = TestCore::new(1);
        let vcpus: Vec<_> = (0..nest.len() as u32).map(|n| m.vcpu(n)).collect();
        let events: Vec<_> = vcpus.iter().map(|v| {
            let attr = Attr { sample_type: SampleType::IP, ..exits(1) };
            let e = m.open(attr, OpenTarget::Vcpu(v.id()), None);
            e.map(1, true).unwrap();
            e
        }).collect();
        let levels: Vec<_> = nest.iter().map(|n| LEVELS[*n]).collect();
        let mut delivered = Vec::new();
        NestedRegs { vcpus: &vcpus, levels: &levels, delivered: &mut delivered }.raise();
        // Up to the first level that repeats.
        let depth = (0..levels.len()).take_while(|n| !levels[..*n].contains(&levels[*n])).count();
        let expected: Vec<_> = (0..levels.len().min(depth + 1)).map(|n| n < depth).collect();
        prop_assert_eq!(&delivered, &expected);
        let counts: Vec<_> = events.iter().map(|e| e.read().unwrap().value).collect();
        prop_assert_eq!(counts, (0..levels.len()).map(|n| u64::from(n < depth)).collect::<Vec<_>>());
        for level in LEVELS {
            prop_assert!(vcpus[0].software_event_at(level, SoftwareEventId::Exits, 1, None, &mut |_| {}), "{:?} is free", level);
        }
    }

    /// P38: a context without running events or pending overflows claims no signal.
    #[test]
    fn p38_inactive_context_claims_no_signal(period in 1u64..20, ops in prop::collection::vec((0u8..6, 1u64..50), 1..60)) {
        let m = TestCore::new(2);
        let v = m.vcpu(0);
        let events = [m.open_vcpu(sampling(EventType::SIM, 1, period), None), m.open_vcpu(sampling(SOFT, 1, period), None)];
        let serve = || v.service_overflows(&mut UnavailableRegs, &mut |_| {});
        for (op, n) in ops {
            match op {
                0 => events[n as usize % 2].disable(ControlScope::Event).unwrap(),
                1 => events[n as usize % 2].enable(ControlScope::Event).unwrap(),
                2 => v.sched_out(),
                3 => v.sched_in(),
                _ => m.run(0, n),
            }
            let passed = serve();
            prop_assert!(passed <= 2);
            prop_assert_eq!(serve(), 0, "served once");
            if v.stats().active == 0 {
                m.run(0, 1000);
                prop_assert_eq!(serve(), 0, "nothing is on");
            }
        }
    }

    /// P39: after a vCPU's EXIT record no ring contains a sample of it, regardless of pending
    /// overflows and references to its context. READ records may follow.
    #[test]
    fn p39_no_sample_follows_an_exit(work in 0u64..30, served: bool, raised in 0u64..30, inherit_stat: bool) {
        let m = TestCore::new(4);
        let v = m.vcpu(0);
        let marked = |attr| Attr { task: true, inherit_stat, ..attr };
        let own = [
            m.open_vcpu(marked(sampling(EventType::SIM, 1, 5)), None),
            m.open_vcpu(marked(exits(3)), None),
        ];
        let vm = [
            m.open(marked(Attr { inherit: true, ..sampling(EventType::SIM, 1, 5) }), OpenTarget::Vm, None),
            m.open(marked(exits(3)), OpenTarget::Vm, None),
        ];
        let rings: Vec<_> = own.iter().chain(&vm).map(|e| e.map(16, true).unwrap()).collect();
        let happen = || {
            m.run(0, work);
            v.software_event(SoftwareEventId::Exits, raised, Some(&mut UnavailableRegs), &mut |_| {});
        };
        happen();
        if served {
            v.service_overflows(&mut UnavailableRegs, &mut |_| {});
        }
        let values = || own.iter().chain(&vm).map(|e| e.read().unwrap().value).collect::<Vec<_>>();
        m.core.remove_vcpu(VcpuId(0)).unwrap();
        let last = values();
        prop_assert_eq!(&last, &[work, raised, work, raised]);
        happen();
        v.service_overflows(&mut UnavailableRegs, &mut |_| {});
        v.sched_in();
        v.sched_out();
        prop_assert_eq!(values(), last, "a vCPU that is gone counts nothing");
        for ring in &rings {
            let all = records(ring);
            let exit = all.iter().position(|r| *r == ("exit", 1000)).expect("an EXIT record");
            prop_assert!(all[exit + 1..].iter().all(|r| *r == ("read", 1000)), "{:?}", all);
        }
    }
}

/// The leader's flag decides: siblings with `inherit` are not inherited if their leader is not.
#[test]
fn group_without_inherit_on_leader_is_not_inherited() {
    let m = TestCore::new(4);
    let _v0 = m.vcpu(0);
    let leader = m.open(hw(), OpenTarget::Vm, None);
    let sibling = m.open(wide(), OpenTarget::Vm, Some(&leader));
    let v1 = m.vcpu(1);
    assert_eq!(v1.stats().events, 0);
    m.run(0, 3);
    m.run(1, 100);
    assert_eq!(
        (leader.read().unwrap().value, sibling.read().unwrap().value),
        (3, 3)
    );
}
