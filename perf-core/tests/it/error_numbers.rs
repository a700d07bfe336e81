//! Invalid requests and their error numbers.

use perf_core::attr::EventType;
use perf_core::*;

use crate::common::test_core::*;

fn errno(m: &TestCore, session: &Session, attr: Attr, target: OpenTarget, group: Option<&Handle>) -> i32 {
    m.core
        .open(session, attr, target, group, OpenFlags::default())
        .map_or_else(|e| e.errno(), |_| 0)
}

const V0: OpenTarget = OpenTarget::Vcpu(VcpuId(0));

/// P37: all combinations of paranoid levels, requests and roles.
#[test]
fn p37_the_permission_table() {
    for paranoid in -1..=2 {
        for role in [Role::Operator, Role::Admin] {
            let m = TestCore::with(4, |c| {
                c.paranoid = paranoid;
                c.mlock_kb = 4;
                c.host_cpus = 1;
                c.memlock_kb = 0;
            });
            let _v = m.vcpu(0);
            let session = m.core.session(0, role);
            let free = role == Role::Admin;
            let harmless = Attr {
                exclude_host: true,
                ..hw()
            };
            let expect = |allowed: bool, errno: i32| if allowed || free { 0 } else { errno };
            let case = format!("paranoid {paranoid} {role:?}");
            assert_eq!(errno(&m, &session, harmless.clone(), V0, None), 0, "{case}");
            assert_eq!(
                errno(&m, &session, harmless.clone(), OpenTarget::Vm, None),
                expect(paranoid <= 0, libc::EACCES),
                "vm, {case}"
            );
            assert_eq!(
                errno(&m, &session, hw(), V0, None),
                expect(paranoid <= 1, libc::EACCES),
                "host kernel, {case}"
            );
            let raw = Attr {
                sample_type: SampleType::RAW,
                exclude_host: true,
                ..Attr::sampling(EventType::VMM, 0, 1)
            };
            assert_eq!(
                errno(&m, &session, raw, V0, None),
                expect(paranoid <= -1, libc::EPERM),
                "raw, {case}"
            );
            let e = m
                .core
                .open(&session, harmless, V0, None, OpenFlags::default())
                .unwrap();
            let mapped = e.map(1, true).map_or_else(|e| e.errno(), |_| 0);
            assert_eq!(mapped, expect(paranoid <= -1, libc::EPERM), "mlock, {case}");
        }
    }
}

#[test]
fn other_users_need_the_admin_role() {
    let m = TestCore::with(4, |c| c.owner_uid = 1000);
    let _v = m.vcpu(0);
    let attr = Attr {
        exclude_host: true,
        ..hw()
    };
    assert_eq!(
        errno(&m, &m.core.session(1001, Role::Operator), attr.clone(), V0, None),
        libc::EACCES
    );
    assert_eq!(
        errno(&m, &m.core.session(1000, Role::Operator), attr.clone(), V0, None),
        0
    );
    assert_eq!(errno(&m, &m.core.session(1001, Role::Admin), attr, V0, None), 0);
}

/// A user without access to single vCPUs has no access to the VM as a whole.
#[test]
fn vm_events_need_the_same_permissions_as_vcpu_events() {
    let m = TestCore::with(4, |c| {
        c.owner_uid = 1000;
        c.paranoid = -1;
    });
    let _v = m.vcpu(0);
    for inherit in [false, true] {
        let attr = Attr { inherit, ..hw() };
        let open = |uid, role| errno(&m, &m.core.session(uid, role), attr.clone(), OpenTarget::Vm, None);
        assert_eq!(open(1001, Role::Operator), libc::EACCES);
        assert_eq!(open(1000, Role::Operator), 0);
        assert_eq!(open(1001, Role::Admin), 0);
    }
}

#[test]
fn conflicting_attributes_are_rejected() {
    let m = TestCore::new(4);
    let _v = m.vcpu(0);
    let open = |attr| errno(&m, &m.admin, attr, V0, None);
    assert_eq!(
        open(Attr {
            freq: true,
            sample_period: 100_001,
            ..hw()
        }),
        libc::EINVAL,
        "above the rate limit"
    );
    assert_eq!(
        open(Attr {
            freq: true,
            sample_period: 100_000,
            ..hw()
        }),
        0
    );
    assert_eq!(
        open(Attr {
            sample_period: 1 << 63,
            ..hw()
        }),
        libc::EINVAL
    );
    let reads = Attr {
        sample_type: SampleType::READ,
        read_format: ReadFormat::GROUP,
        ..hw()
    };
    assert_eq!(
        open(Attr {
            inherit: true,
            ..reads.clone()
        }),
        libc::EINVAL
    );
    assert_eq!(open(reads), 0);
    assert_eq!(open(Attr::counting(EventType(77), 0)), libc::EINVAL, "no driver");
    assert_eq!(
        open(Attr { config: 0, ..hw() }),
        libc::ENOENT,
        "the driver knows no such event"
    );
    assert_eq!(
        errno(&m, &m.admin, hw(), OpenTarget::Vcpu(VcpuId(5)), None),
        libc::ESRCH
    );
    assert_eq!(m.core.add_vcpu(VcpuId(0), 1).unwrap_err().errno(), libc::EEXIST);
}

#[test]
fn invalid_groups_are_rejected() {
    let m = TestCore::new(2);
    let _v = m.vcpu(0);
    let _w = m.vcpu(1);
    let leader = m.open_vcpu(hw(), None);
    let member = m.open_vcpu(hw(), Some(&leader));
    let join = |attr, group: &Handle| errno(&m, &m.admin, attr, V0, Some(group));
    assert_eq!(join(hw(), &member), libc::EINVAL, "not a leader");
    assert_eq!(
        join(
            Attr {
                pinned: true,
                ..soft()
            },
            &leader
        ),
        libc::EINVAL
    );
    assert_eq!(
        join(
            Attr {
                exclusive: true,
                ..soft()
            },
            &leader
        ),
        libc::EINVAL
    );
    assert_eq!(
        errno(&m, &m.admin, hw(), OpenTarget::Vcpu(VcpuId(1)), Some(&leader)),
        libc::EINVAL,
        "another context"
    );
    assert_eq!(
        join(hw(), &leader),
        libc::EINVAL,
        "three events never fit two slots"
    );
    assert_eq!(join(soft(), &leader), 0);
    leader.close();
    assert_eq!(join(soft(), &leader), libc::EINVAL, "closed");
    let flags = OpenFlags {
        no_group: true,
        ..OpenFlags::default()
    };
    let alone = m.core.open(&m.admin, hw(), V0, Some(&leader), flags).unwrap();
    assert_eq!(alone.read_group().unwrap().len(), 1);
    let flags = OpenFlags {
        output: true,
        ..OpenFlags::default()
    };
    let error = m.core.open(&m.admin, hw(), V0, None, flags).unwrap_err();
    assert_eq!(error.errno(), libc::EINVAL, "no handle to write to");
}

#[test]
fn errors_describe_the_problem() {
    let m = TestCore::new(1);
    let _v = m.vcpu(0);
    let error = m
        .core
        .open(
            &m.admin,
            hw(),
            OpenTarget::Vcpu(VcpuId(9)),
            None,
            OpenFlags::default(),
        )
        .unwrap_err();
    assert_eq!(error.to_string(), "no vCPU 9");
    let leader = m.open_vcpu(hw(), None);
    let error = m
        .core
        .open(&m.admin, hw(), V0, Some(&leader), OpenFlags::default())
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "2 events of the group need counters of a kind of which the PMU has 1"
    );
}

#[test]
fn enable_on_exec_enables_once_and_siblings_too() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let leader = m.open_vcpu(hw(), None);
    let late = Attr {
        disabled: true,
        enable_on_exec: true,
        ..hw()
    };
    let sibling = m.open_vcpu(late.clone(), Some(&leader));
    let wide = m.open(
        Attr {
            inherit: true,
            ..late
        },
        OpenTarget::Vm,
        None,
    );
    assert!(m.core.name_vcpu(VcpuId(0), "renamed"));
    assert_eq!(sibling.state(), EventState::Off, "a name is no reset");
    v.exec();
    assert_eq!(sibling.state(), EventState::Active);
    m.run(0, 3);
    assert_eq!(wide.read().unwrap().value, 3);
    sibling.disable(ControlScope::Event).unwrap();
    v.exec();
    assert_eq!(sibling.state(), EventState::Off, "once");
    assert_eq!(
        [&leader, &sibling, &wide].map(|e| e.read().unwrap().value),
        [3, 3, 3],
        "a reset keeps counts"
    );
}

/// A reset of the machine enables a VM-wide event as a whole: vCPUs that are added later count too.
#[test]
fn machine_reset_affects_present_and_future_vcpus() {
    let m = TestCore::new(4);
    let _v = m.vcpu(0);
    let late = Attr {
        disabled: true,
        enable_on_exec: true,
        inherit: true,
        ..hw()
    };
    let wide = m.open(late, OpenTarget::Vm, None);
    m.run(0, 5);
    m.core.vm_reset();
    assert_eq!(wide.state(), EventState::Inactive, "enabled; its children count");
    let _late = m.vcpu(1);
    m.run(0, 3);
    m.run(1, 4);
    assert_eq!(wide.read().unwrap().value, 7);
    wide.disable(ControlScope::Event).unwrap();
    m.core.vm_reset();
    assert_eq!(wide.state(), EventState::Off, "once");
}

#[test]
fn settings_take_numbers_in_their_range_and_gate_at_once() {
    let m = TestCore::new(2);
    let _v = m.vcpu(0);
    for (knob, bad) in [
        (Knob::Paranoid, "3"),
        (Knob::SampleRateHz, "0"),
        (Knob::MlockKb, "-1"),
        (Knob::ReservedSlots, "3"),
        (Knob::Overcommit, "2"),
        (Knob::Overcommit, "yes"),
        (Knob::Paranoid, ""),
    ] {
        let before = m.core.knob(knob);
        let error = m.core.set_knob(knob, bad).unwrap_err();
        assert!(error.to_string().contains(" to "), "it names the range: {error}");
        assert_eq!(m.core.knob(knob), before);
    }
    let events: Vec<_> = (0..2).map(|_| m.open_vcpu(hw(), None)).collect();
    let on = || events.iter().filter(|e| e.state() == EventState::Active).count();
    assert_eq!(on(), 2);
    m.core.set_knob(Knob::ReservedSlots, "1\n").unwrap();
    assert_eq!((m.core.knob(Knob::ReservedSlots).as_str(), on()), ("1\n", 1));
    m.core.set_knob(Knob::ReservedSlots, "0").unwrap();
    assert_eq!(on(), 2);
    m.core.set_knob(Knob::Overcommit, "0").unwrap();
    assert_eq!(errno(&m, &m.admin, hw(), V0, None), libc::EBUSY);
    m.core.set_knob(Knob::SampleRateHz, "50").unwrap();
    assert_eq!(
        errno(
            &m,
            &m.admin,
            Attr {
                freq: true,
                sample_period: 51,
                ..soft()
            },
            V0,
            None
        ),
        libc::EINVAL
    );
    let user = m.core.session(0, Role::Operator);
    assert_eq!(errno(&m, &user, soft(), V0, None), 0);
    m.core.set_knob(Knob::Paranoid, "2").unwrap();
    assert_eq!(errno(&m, &user, soft(), V0, None), libc::EACCES);
}

#[test]
fn open_flags_that_are_not_known_are_refused() {
    for bits in 0..64u64 {
        match OpenFlags::from_bits(bits) {
            Ok(flags) => {
                assert!(bits < 4);
                assert_eq!((flags.no_group, flags.output), (bits & 1 != 0, bits & 2 != 0));
            }
            Err(error) => assert!(bits >= 4 && error.errno() == libc::EINVAL),
        }
    }
}

/// The output flag combined with joining a group. If redirection fails, the partially opened event
/// is closed.
#[test]
fn output_flag_redirects_group_member_or_leaves_no_event() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let flags = OpenFlags {
        output: true,
        ..OpenFlags::default()
    };
    let sampling = || Attr {
        sample_type: SampleType::IP,
        ..Attr::sampling(EventType::SIM, 1, 5)
    };
    let leader = m.open_vcpu(hw(), None);
    let ring = leader.map(1, true).unwrap();
    let member = m
        .core
        .open(&m.admin, sampling(), V0, Some(&leader), flags)
        .unwrap();
    assert_eq!(leader.read_group().unwrap().len(), 2);
    m.run(0, 5);
    assert_eq!(v.service_overflows(&mut UnavailableRegs, &mut |_| {}), 1);
    assert_eq!(ring.published(), 16, "one sample with its header");
    // An event that writes to another event's ring is not a valid target.
    let alone = OpenFlags {
        no_group: true,
        ..flags
    };
    let error = m
        .core
        .open(&m.admin, sampling(), V0, Some(&member), alone)
        .unwrap_err();
    assert_eq!(error.errno(), libc::EINVAL);
    assert_eq!(v.stats().events, 2);
    drop((leader, member, ring));
    assert_eq!((v.stats().events, m.core.ring_pages(0)), (0, 0));
}
