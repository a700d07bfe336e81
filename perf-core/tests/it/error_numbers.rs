//! Tests of invalid requests and their error numbers.

use perf_core::attr::EventType;
use perf_core::*;

use crate::common::test_core::*;

fn errno(
    m: &TestCore,
    session: &Session,
    attr: Attr,
    target: EventOpenTarget,
    group: Option<&EventHandle>,
) -> i32 {
    let opened = m.try_open(session, attr, target, group);
    opened.map_or_else(|e| e.errno(), |_| 0)
}

/// Returns the attributes of a hardware event that does not count the host.
fn harmless() -> Attr {
    Attr {
        exclude_host: true,
        ..hw()
    }
}

/// Behavior P37: permissions are correct for all combinations of paranoid levels, requests and
/// roles.
#[test]
fn p37_the_permission_table() {
    for paranoid in -1..=2 {
        for role in [SessionRole::Operator, SessionRole::Admin] {
            let m = TestCore::with(4, |c| {
                c.paranoid = paranoid;
                c.mlock_kb = 4;
                c.host_cpus = 1;
                c.memlock_kb = 0;
            });
            let _v = m.vcpu(0);
            let session = m.core.session(0, role);
            let free = role == SessionRole::Admin;
            let raw = Attr {
                exclude_host: true,
                ..Attr::sampling(EventType::VMM, 0, 1).with_sample_type(SampleType::RAW)
            };
            let expect = |allowed: bool, errno: i32| if allowed || free { 0 } else { errno };
            let case = format!("paranoid {paranoid} {role:?}");
            for (attr, target, expected) in [
                (harmless(), V0, 0),
                (
                    harmless(),
                    EventOpenTarget::Vm,
                    expect(paranoid <= 0, libc::EACCES),
                ),
                (hw(), V0, expect(paranoid <= 1, libc::EACCES)),
                (raw, V0, expect(paranoid <= -1, libc::EPERM)),
            ] {
                assert_eq!(
                    errno(&m, &session, attr, target, None),
                    expected,
                    "{target:?}, {case}"
                );
            }
            let e = m.try_open(&session, harmless(), V0, None).unwrap();
            let mapped = e.map(1, true).map_or_else(|e| e.errno(), |_| 0);
            assert_eq!(mapped, expect(paranoid <= -1, libc::EPERM), "mlock, {case}");
        }
    }
}

/// A user without the admin role who does not own the VM may attach neither to a vCPU nor to the
/// VM.
#[test]
fn other_users_need_the_admin_role() {
    for (paranoid, attr, target) in [
        (1, harmless(), V0),
        (-1, hw(), EventOpenTarget::Vm),
        (-1, hw().with_inherit(), EventOpenTarget::Vm),
    ] {
        let m = TestCore::with(4, |c| (c.owner_uid, c.paranoid) = (1000, paranoid));
        let _v = m.vcpu(0);
        let open = |uid, role| errno(&m, &m.core.session(uid, role), attr.clone(), target, None);
        assert_eq!(open(1001, SessionRole::Operator), libc::EACCES, "{target:?}");
        assert_eq!(open(1000, SessionRole::Operator), 0, "{target:?}");
        assert_eq!(open(1001, SessionRole::Admin), 0, "{target:?}");
    }
}

#[test]
fn conflicting_attributes_are_rejected() {
    let m = TestCore::new(4);
    let _v = m.vcpu(0);
    let reads = sim(0)
        .with_sample_type(SampleType::READ)
        .with_read_format(ReadFormat::GROUP);
    for (attr, expected) in [
        (sim(100_001).with_freq(), libc::EINVAL),
        (sim(100_000).with_freq(), 0),
        (sim(1 << 63), libc::EINVAL),
        (reads.clone().with_inherit(), libc::EINVAL),
        (reads, 0),
        // An event type without a driver, and an event that its driver does not know.
        (Attr::counting(EventType(77), 0), libc::EINVAL),
        (Attr::counting(EventType::SIM, 0), libc::ENOENT),
    ] {
        assert_eq!(errno(&m, &m.admin, attr.clone(), V0, None), expected, "{attr:?}");
    }
    assert_eq!(
        errno(&m, &m.admin, hw(), EventOpenTarget::Vcpu(VcpuId(5)), None),
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
    let join = |attr, group: &EventHandle| errno(&m, &m.admin, attr, V0, Some(group));
    assert_eq!(join(hw(), &member), libc::EINVAL, "not a leader");
    assert_eq!(join(soft().with_pinned(), &leader), libc::EINVAL);
    assert_eq!(join(soft().with_exclusive(), &leader), libc::EINVAL);
    assert_eq!(
        errno(
            &m,
            &m.admin,
            hw(),
            EventOpenTarget::Vcpu(VcpuId(1)),
            Some(&leader)
        ),
        libc::EINVAL,
        "another context"
    );
    // A group of three hardware events never fits two slots.
    assert_eq!(join(hw(), &leader), libc::EINVAL);
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
        .try_open(&m.admin, hw(), EventOpenTarget::Vcpu(VcpuId(9)), None)
        .unwrap_err();
    assert_eq!(error.to_string(), "vCPU 9 not found");
    let leader = m.open_vcpu(hw(), None);
    let error = m.try_open(&m.admin, hw(), V0, Some(&leader)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "2 events of the group need counters of a kind of which the PMU has 1"
    );
}

/// Returns the attributes of a disabled event that the next guest reset enables.
fn late() -> Attr {
    Attr {
        disabled: true,
        enable_on_exec: true,
        ..hw()
    }
}

#[test]
fn enable_on_exec_enables_once_and_siblings_too() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let leader = m.open_vcpu(hw(), None);
    let sibling = m.open_vcpu(late(), Some(&leader));
    let wide = m.open_vm(late().with_inherit());
    assert!(m.core.name_vcpu(VcpuId(0), "renamed"));
    assert_eq!(sibling.state(), EventState::Off, "a name is no reset");
    v.exec();
    assert_eq!(sibling.state(), EventState::Active);
    m.run(0, 3);
    assert_eq!(wide.read().unwrap().value, 3);
    sibling.disable(EventOrGroup::Event).unwrap();
    v.exec();
    assert_eq!(sibling.state(), EventState::Off, "once");
    assert_eq!(
        [&leader, &sibling, &wide].map(|e| e.read().unwrap().value),
        [3, 3, 3],
        "a reset keeps counts"
    );
}

/// A reset of the machine enables a VM-wide event as a whole, including on vCPUs that are added
/// later.
#[test]
fn machine_reset_affects_present_and_future_vcpus() {
    let m = TestCore::new(4);
    let _v = m.vcpu(0);
    let wide = m.open_vm(late().with_inherit());
    m.run(0, 5);
    m.core.vm_reset();
    assert_eq!(wide.state(), EventState::Inactive, "enabled; its children count");
    let _late = m.vcpu(1);
    m.run(0, 3);
    m.run(1, 4);
    assert_eq!(wide.read().unwrap().value, 7);
    wide.disable(EventOrGroup::Event).unwrap();
    m.core.vm_reset();
    assert_eq!(wide.state(), EventState::Off, "once");
}

#[test]
fn settings_take_numbers_in_their_range_and_gate_at_once() {
    let m = TestCore::new(2);
    let _v = m.vcpu(0);
    for (knob, bad) in [
        (PerfCoreSetting::Paranoid, "3"),
        (PerfCoreSetting::SampleRateHz, "0"),
        (PerfCoreSetting::MlockKb, "-1"),
        (PerfCoreSetting::ReservedSlots, "3"),
        (PerfCoreSetting::Overcommit, "2"),
        (PerfCoreSetting::Overcommit, "yes"),
        (PerfCoreSetting::Paranoid, ""),
    ] {
        let before = m.core.knob(knob);
        let error = m.core.set_knob(knob, bad).unwrap_err();
        assert!(error.to_string().contains(" to "), "it names the range: {error}");
        assert_eq!(m.core.knob(knob), before);
    }
    let events: Vec<_> = (0..2).map(|_| m.open_vcpu(hw(), None)).collect();
    let on = || active(&events);
    assert_eq!(on(), 2);
    m.core.set_knob(PerfCoreSetting::ReservedSlots, "1\n").unwrap();
    assert_eq!(
        (m.core.knob(PerfCoreSetting::ReservedSlots).as_str(), on()),
        ("1\n", 1)
    );
    m.core.set_knob(PerfCoreSetting::ReservedSlots, "0").unwrap();
    assert_eq!(on(), 2);
    m.core.set_knob(PerfCoreSetting::Overcommit, "0").unwrap();
    assert_eq!(errno(&m, &m.admin, hw(), V0, None), libc::EBUSY);
    m.core.set_knob(PerfCoreSetting::SampleRateHz, "50").unwrap();
    let fast = Attr::sampling(SOFT, 1, 51).with_freq();
    assert_eq!(errno(&m, &m.admin, fast, V0, None), libc::EINVAL);
    let user = m.core.session(0, SessionRole::Operator);
    assert_eq!(errno(&m, &user, soft(), V0, None), 0);
    m.core.set_knob(PerfCoreSetting::Paranoid, "2").unwrap();
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

/// The output flag can be combined with joining a group. If the redirection fails, the event that
/// was opened is closed again.
#[test]
fn output_flag_redirects_group_member_or_leaves_no_event() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let sampling = || sim(5).with_sample_type(SampleType::IP);
    let flags = OpenFlags {
        output: true,
        ..OpenFlags::default()
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
    // An event whose own output is redirected is not a valid output target.
    let refused = m.open_redirected(sampling(), &member).unwrap_err();
    assert_eq!(refused.errno(), libc::EINVAL);
    assert_eq!(v.stats().events, 2);
    drop((leader, member, ring));
    assert_eq!((v.stats().events, m.core.ring_pages(0)), (0, 0));
}
