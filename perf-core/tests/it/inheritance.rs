//! VM-wide events while vCPUs are added and removed.

use perf_core::*;

use crate::common::test_core::*;

fn wide() -> Attr {
    Attr {
        inherit: true,
        ..hw()
    }
}

#[test]
fn groups_are_inherited_whole_and_read_as_sums() {
    let m = TestCore::new(4);
    let v0 = m.vcpu(0);
    let format = ReadFormat::GROUP | ReadFormat::ID;
    let leader = m.open(
        Attr {
            read_format: format,
            ..wide()
        },
        OpenTarget::Vm,
        None,
    );
    // The leader's `inherit` flag decides, not the member's.
    let twice = m.open(Attr { config: 2, ..hw() }, OpenTarget::Vm, Some(&leader));
    let v1 = m.vcpu(1);
    assert_eq!((v0.stats().events, v1.stats().events), (2, 2));
    m.run(0, 10);
    m.run(1, 7);
    let r = twice.read_group().unwrap();
    assert_eq!(
        r.iter().map(|r| (r.id, r.value)).collect::<Vec<_>>(),
        [(leader.id(), 17), (twice.id(), 34)]
    );
    m.core.remove_vcpu(VcpuId(0)).unwrap();
    leader.disable(ControlScope::Group).unwrap();
    m.run(1, 1000);
    let r = leader.read_group().unwrap();
    assert_eq!((r[0].value, r[1].value), (17, 34));
    let mut buf = [0; 40];
    assert_eq!(leader.read_bytes(&mut buf).unwrap(), 40);
    assert_eq!(
        u64::from_ne_bytes(buf[..8].try_into().unwrap()),
        2,
        "number of members first"
    );
}

#[test]
fn failed_hot_add_leaves_nothing_behind() {
    let m = TestCore::new(4);
    let ok = m.open(wide(), OpenTarget::Vm, None);
    // The event does not exist, but without a vCPU this is not detected.
    let _bad = m.open(Attr { config: 0, ..wide() }, OpenTarget::Vm, None);
    let error = m.core.add_vcpu(VcpuId(0), 1).unwrap_err();
    assert_eq!(error.errno(), libc::ENOENT);
    assert!(m.core.vcpu(VcpuId(0)).is_none());
    assert_eq!((ok.children(), ok.read().unwrap().value), (0, 0));
}

#[test]
fn p41_a_handle_outlives_its_vcpu_and_keeps_the_last_value() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let e = m.open_vcpu(hw(), None);
    m.run(0, 12);
    m.core.remove_vcpu(VcpuId(0)).unwrap();
    let last = e.read().unwrap();
    assert_eq!((last.value, last.time_running_ns), (12, 12));
    m.run(0, 5);
    e.disable(ControlScope::Event).unwrap();
    e.enable(ControlScope::Event).unwrap();
    v.sched_in();
    m.run(0, 5);
    assert_eq!(e.read().unwrap(), last, "nothing goes on on a vCPU that is gone");
    assert!(e.poll().contains(PollState::HUP));
    let target = OpenTarget::Vcpu(VcpuId(0));
    let error = m
        .core
        .open(&m.admin, hw(), target, None, OpenFlags::default())
        .unwrap_err();
    assert_eq!(error.errno(), libc::ESRCH);
    assert_eq!(m.core.remove_vcpu(VcpuId(0)).unwrap_err().errno(), libc::ESRCH);
}

#[test]
fn p40_a_package_count_is_returned_unmodified_and_never_multiplied() {
    let m = TestCore::new(4);
    for n in 0..3 {
        m.vcpu(n);
    }
    let e = m.open(
        Attr {
            config: PACKAGE,
            ..wide()
        },
        OpenTarget::Vm,
        None,
    );
    assert_eq!(
        e.children(),
        0,
        "one event, or three vCPUs would count the package three times"
    );
    *m.hw.package.lock().unwrap() = 1234;
    *m.hw.package_age_ns.lock().unwrap() = 77;
    assert_eq!(e.read().unwrap().value, 1234);
    assert_eq!(e.count_age_ns().unwrap(), Some(77), "and says how old it is");
    let fresh = m.open(Attr { config: 3, ..wide() }, OpenTarget::Vm, None);
    assert_eq!(fresh.count_age_ns().unwrap(), None);
    m.vcpu(3);
    m.run(0, 50);
    e.reset(ControlScope::Event).unwrap();
    assert_eq!(e.read().unwrap().value, 1234);
    m.core.remove_vcpu(VcpuId(0)).unwrap();
    assert_eq!(e.read().unwrap().value, 1234);
    let on_vcpu = m.open(
        Attr {
            config: PACKAGE,
            ..hw()
        },
        OpenTarget::Vcpu(VcpuId(1)),
        None,
    );
    assert_eq!(on_vcpu.read().unwrap().value, 1234);
}

#[test]
fn closing_session_closes_only_its_events() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let mine = m.open_vcpu(hw(), None);
    let other = m.core.session(0, Role::Admin);
    let theirs = m
        .core
        .open(&other, wide(), OpenTarget::Vm, None, OpenFlags::default())
        .unwrap();
    other.disable_all();
    m.run(0, 3);
    other.enable_all();
    m.run(0, 4);
    assert_eq!((mine.read().unwrap().value, theirs.read().unwrap().value), (7, 4));
    drop(other);
    assert_eq!(theirs.read().unwrap_err().errno(), libc::EBADF);
    assert_eq!(v.stats().events, 1);
    assert_eq!(mine.read().unwrap().value, 7);
}

/// P14 with threads: readers see a monotonic sum while vCPUs are added and removed.
#[test]
fn p14_concurrent_readers_see_a_monotonic_sum() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let m = TestCore::new(4);
    let e = m.open(wide(), OpenTarget::Vm, None);
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                let mut last = 0;
                while !done.load(Ordering::Relaxed) {
                    let now = e.read().unwrap().value;
                    assert!(now >= last, "{now} after {last}");
                    last = now;
                    std::thread::yield_now();
                }
            });
        }
        let workers: Vec<_> = (0..3)
            .map(|n| {
                let m = &m;
                s.spawn(move || {
                    for _ in 0..100 {
                        m.vcpu(n);
                        m.run(n, 10);
                        m.core.tick();
                        m.core.remove_vcpu(VcpuId(n)).unwrap();
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(e.read().unwrap().value, 3 * 100 * 10);
}

/// The sum would be too low without the vCPU on which the event never ran.
#[test]
fn family_waiting_on_one_vcpu_has_no_estimate() {
    let m = TestCore::new(1);
    let (_v0, _v1) = (m.vcpu(0), m.vcpu(1));
    let pinned = Attr { pinned: true, ..hw() };
    let rival = m.open(pinned, OpenTarget::Vcpu(VcpuId(1)), None);
    let e = m.open(wide(), OpenTarget::Vm, None);
    m.run(0, 5);
    m.run(1, 7);
    assert_eq!(rival.read().unwrap().value, 7);
    assert_eq!(e.read().unwrap().value, 5);
    assert_eq!(e.estimate().unwrap(), None);
    let parts = e.read_by_vcpu().unwrap();
    assert_eq!(parts[0].estimate.map(|e| e.value), Some(5));
    assert_eq!(parts[1].estimate, None);
    assert!(!e.has_failed());
    drop(rival);
    m.run(1, 2);
    assert!(e.estimate().unwrap().is_some(), "it has a place everywhere now");
}

/// Hot-add refuses what opening refuses: groups that can never be on, and more events than slots if
/// multiplexing is off.
#[test]
fn hot_add_applies_open_checks() {
    let errno = |m: &TestCore, leader: Option<&Handle>| {
        m.core
            .open(&m.admin, wide(), OpenTarget::Vm, leader, OpenFlags::default())
            .map_err(|e| e.errno())
    };
    // No vCPU exists yet.
    let m = TestCore::new(2);
    let leader = errno(&m, None).unwrap();
    let _second = errno(&m, Some(&leader)).unwrap();
    assert_eq!(
        errno(&m, Some(&leader)).unwrap_err(),
        libc::EINVAL,
        "3 on 2 slots"
    );
    let _alone = errno(&m, None).unwrap();
    assert_eq!(m.vcpu(0).stats().events, 3);

    let m = TestCore::with(2, |c| c.share = SharePolicy::Strict);
    let _both = [errno(&m, None).unwrap(), errno(&m, None).unwrap()];
    assert_eq!(errno(&m, None).unwrap_err(), libc::EBUSY);
    assert_eq!(m.vcpu(0).stats().active, 2);

    // Opened while multiplexing was on.
    let m = TestCore::new(2);
    let mut events: Vec<_> = (0..3).map(|_| errno(&m, None).unwrap()).collect();
    m.core.set_share(SharePolicy::Strict);
    let error = m.core.add_vcpu(VcpuId(0), 1).unwrap_err();
    assert_eq!(error.errno(), libc::EBUSY, "{error}");
    assert!(events.iter().all(|e| e.children() == 0), "nothing is left behind");
    events.pop();
    assert_eq!(m.vcpu(0).stats().active, 2);
}

/// Opening for the whole VM applies to all vCPUs or none: if the second refuses, nothing remains on
/// the first.
#[test]
fn failed_fan_out_leaves_no_event() {
    let m = TestCore::with(1, |c| c.share = SharePolicy::Strict);
    let (v0, v1) = (m.vcpu(0), m.vcpu(1));
    let own = m.open(hw(), OpenTarget::Vcpu(VcpuId(1)), None);
    let before = (v0.stats(), v1.stats(), m.core.vm_stats(), m.hw.starts());
    let refused = m
        .core
        .open(&m.admin, wide(), OpenTarget::Vm, None, OpenFlags::default())
        .unwrap_err();
    assert!(
        matches!(refused, OpenError::Overcommitted { vcpu: VcpuId(1), .. }),
        "{refused}"
    );
    assert_eq!(
        (v0.stats(), v1.stats(), m.core.vm_stats()),
        (before.0, before.1, before.2)
    );
    assert_eq!((m.hw.on(0), m.hw.on(1)), (0, 1));
    // The freed slots can be used on both vCPUs.
    own.close();
    let e = m.open(wide(), OpenTarget::Vm, None);
    m.run(0, 3);
    m.run(1, 4);
    assert_eq!((e.children(), e.read().unwrap().value), (2, 7));
}
