//! Time enabled over random histories, against a minimal model: time passes while the vCPU is
//! scheduled in and both the event and its leader are enabled, whether or not the event has a slot.

use perf_core::*;
use proptest::prelude::*;

use crate::common::test_core::*;

#[derive(Clone, Debug)]
enum Step {
    Run(u64),
    In,
    Out,
    Tick,
    Enable(usize),
    Disable(usize),
    EnableGroup(usize),
    DisableGroup(usize),
    /// Opens an event, alone or in the group of another, enabled or disabled.
    Open(Option<usize>, bool),
    Close(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let n = 0..8usize;
    prop_oneof![
        4 => (1..1000u64).prop_map(Step::Run),
        1 => Just(Step::In),
        1 => Just(Step::Out),
        1 => Just(Step::Tick),
        2 => n.clone().prop_map(Step::Enable),
        2 => n.clone().prop_map(Step::Disable),
        1 => n.clone().prop_map(Step::EnableGroup),
        1 => n.clone().prop_map(Step::DisableGroup),
        3 => (prop::option::of(n.clone()), any::<bool>()).prop_map(|(leader, on)| Step::Open(leader, on)),
        1 => n.prop_map(Step::Close),
    ]
}

/// The model's state of an event.
struct Model {
    handle: Handle,
    /// Number of the event's group.
    group: u64,
    leads: bool,
    enabled: bool,
    time_enabled_ns: u64,
}

fn leader_enabled(events: &[Model], group: u64) -> bool {
    events.iter().any(|e| e.group == group && e.leads && e.enabled)
}

proptest! {
    #[test]
    fn time_enabled_matches_model(slots in 1..4usize, steps in prop::collection::vec(step(), 1..80)) {
        let m = TestCore::new(slots);
        let v = m.vcpu(0);
        let (mut inside, mut events, mut groups) = (true, Vec::<Model>::new(), 0u64);
        for step in steps {
            match step {
                Step::Run(n) => {
                    m.run(0, n);
                    if inside {
                        for at in 0..events.len() {
                            if events[at].enabled && leader_enabled(&events, events[at].group) {
                                events[at].time_enabled_ns += n;
                            }
                        }
                    }
                }
                Step::In if !inside => { v.sched_in(); inside = true; }
                Step::Out if inside => { v.sched_out(); inside = false; }
                Step::In | Step::Out => {}
                Step::Tick => m.core.tick(),
                Step::Enable(n) | Step::Disable(n) if n < events.len() => {
                    let on = matches!(step, Step::Enable(_));
                    let done = if on { events[n].handle.enable(ControlScope::Event) } else { events[n].handle.disable(ControlScope::Event) };
                    prop_assert!(done.is_ok());
                    events[n].enabled = on;
                }
                Step::EnableGroup(n) | Step::DisableGroup(n) if n < events.len() => {
                    let on = matches!(step, Step::EnableGroup(_));
                    let done = if on { events[n].handle.enable(ControlScope::Group) } else { events[n].handle.disable(ControlScope::Group) };
                    prop_assert!(done.is_ok());
                    let group = events[n].group;
                    for e in events.iter_mut().filter(|e| e.group == group) {
                        e.enabled = on;
                    }
                }
                Step::Open(leader, on) if events.len() < 8 => {
                    let leader = leader.filter(|n| *n < events.len() && events[*n].leads);
                    let attr = Attr { disabled: !on, ..hw() };
                    let opened = m.core.open(
                        &m.admin,
                        attr,
                        OpenTarget::Vcpu(VcpuId(0)),
                        leader.map(|n| &events[n].handle),
                        OpenFlags::default(),
                    );
                    // The group is full.
                    let Ok(handle) = opened else { continue };
                    let group = leader.map_or_else(|| { groups += 1; groups }, |n| events[n].group);
                    events.push(Model { handle, group, leads: leader.is_none(), enabled: on, time_enabled_ns: 0 });
                }
                Step::Close(n) if n < events.len() => {
                    let gone = events.swap_remove(n);
                    gone.handle.close();
                    if gone.leads {
                        // The remaining members are no longer a group.
                        for e in events.iter_mut().filter(|e| e.group == gone.group) {
                            groups += 1;
                            (e.group, e.leads) = (groups, true);
                        }
                    }
                }
                _ => {}
            }
            for e in &events {
                let reading = e.handle.read().unwrap();
                prop_assert_eq!(reading.time_enabled_ns, e.time_enabled_ns, "event {}", e.handle.id());
                prop_assert!(reading.time_running_ns <= reading.time_enabled_ns);
                // One unit of work per nanosecond, counted while on.
                prop_assert_eq!(reading.value, reading.time_running_ns);
            }
        }
    }
}
