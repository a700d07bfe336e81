//! Tests of VM-wide events while vCPUs are added and removed.

use std::sync::Arc;

use perf_core::*;

use crate::common::test_core::*;
use crate::nothing::NoopPmu;

fn wide() -> Attr {
    hw().with_inherit()
}

/// Returns the contribution of each vCPU to the count of `event`: vCPU number and count.
fn counts(event: &EventHandle) -> Vec<(u32, u64)> {
    let parts = event.read_by_vcpu().unwrap();
    parts.iter().map(|p| (p.vcpu.0, p.reading.value)).collect()
}

/// A reset clears the counts and keeps the times of exited children, so the contributions of the
/// vCPUs still add up to the total.
#[test]
fn reset_family_keeps_times_of_exited_children() {
    let m = TestCore::new(4);
    let (_v0, _v1) = (m.vcpu(0), m.vcpu(1));
    let e = m.open_vm(wide());
    m.run(0, 1000);
    m.core.remove_vcpu(VcpuId(1)).unwrap();
    e.reset(EventOrGroup::Event).unwrap();
    m.run(0, 500);
    let whole = e.read().unwrap();
    assert_eq!((whole.value, whole.time_enabled_ns), (500, 2500));
    let parts = e.read_by_vcpu().unwrap();
    assert_eq!(counts(&e), [(0, 500), (1, 0)]);
    let sum = |part: fn(&Reading) -> u64| parts.iter().map(|p| part(&p.reading)).sum::<u64>();
    assert_eq!(sum(|r| r.time_enabled_ns), whole.time_enabled_ns);
    assert_eq!(sum(|r| r.time_running_ns), whole.time_running_ns);
    m.core.remove_vcpu(VcpuId(0)).unwrap();
    e.reset(EventOrGroup::Event).unwrap();
    assert_eq!(e.read().unwrap().estimate(), Some(0));
    let estimate = e.estimate().unwrap().unwrap();
    assert_eq!((estimate.value, estimate.exact), (0, true));
}

/// A detailed reading reads the driver once per vCPU, so its count, its estimate and the
/// contributions of the vCPUs agree although the events are counting. The count of an event of
/// `NoopPmu` is the number of times that the event was read.
#[test]
fn detailed_reading_reads_each_vcpu_once() {
    let core = PerfCore::new(PerfCoreConfig::default());
    core.register(Arc::new(NoopPmu { slots: 4 }));
    let vcpus = [0, 1, 2].map(|n| core.add_vcpu(VcpuId(n), 0).unwrap());
    vcpus.iter().for_each(|vcpu| vcpu.sched_in());
    let session = core.session(0, SessionRole::Admin);
    let open = |target, inherit| {
        let attr = Attr {
            inherit,
            ..Attr::counting(EventType::SIM, 0)
        };
        core.open(&session, attr, target, None, OpenFlags::default())
            .unwrap()
    };
    for (event, vcpus) in [
        (open(EventOpenTarget::Vm, true), 3),
        (open(EventOpenTarget::Vcpu(VcpuId(0)), false), 1),
    ] {
        let mut before = event.read_in_detail().unwrap().reading.value;
        for _ in 0..3 {
            let all = event.read_in_detail().unwrap();
            assert_eq!(all.reading.value - before, vcpus);
            assert_eq!(
                all.estimate.map(|estimate| estimate.value),
                Some(all.reading.value)
            );
            let parts: u64 = all.vcpus.iter().map(|part| part.reading.value).sum();
            assert!(parts == all.reading.value || all.vcpus.is_empty());
            before = all.reading.value;
        }
    }
}

/// The contributions of a removed vCPU and of a later vCPU with the same number are reported in one
/// entry.
#[test]
fn readings_by_vcpu_are_merged_and_ordered() {
    let m = TestCore::new(4);
    let e = m.open_vm(wide());
    for n in [3, 1, 2, 1, 3] {
        let _vcpu = m.vcpu(n);
        m.run(n, u64::from(n));
        if n != 2 {
            m.core.remove_vcpu(VcpuId(n)).unwrap();
        }
    }
    let _again = m.vcpu(1);
    m.run(1, 10);
    assert_eq!(counts(&e), [(1, 12), (2, 2), (3, 6)]);
}

/// A VM-wide event does not count the work of threads that are not vCPUs, whether they were added
/// before or after the event was opened.
#[test]
fn vm_wide_events_do_not_count_plain_threads() {
    let m = TestCore::new(4);
    let before = m.core.add_thread(1).unwrap();
    let counted = m.open_vm(wide());
    let exits = vmm(SoftwareEventId::Exits);
    let raised = m.open_vm(exits.clone());
    let after = m.core.add_thread(2).unwrap();
    let _vcpu = m.vcpu(0);
    m.run(0, 1);
    for thread in [&before, &after] {
        thread.sched_in();
        let own = m.open(hw(), EventOpenTarget::Vcpu(thread.id()), None);
        let own_exits = m.open(exits.clone(), EventOpenTarget::Vcpu(thread.id()), None);
        m.run(thread.id().0, 100);
        thread.software_event(SoftwareEventId::Exits, 100, None, &mut |_| {});
        assert_eq!(own.read().unwrap().value, 100);
        assert_eq!(own_exits.read().unwrap().value, 100);
    }
    assert_eq!((counted.children(), counted.read().unwrap().value), (1, 1));
    assert_eq!(raised.read().unwrap().value, 0);
    m.core.remove_vcpu(before.id()).unwrap();
    assert_eq!(counted.read_by_vcpu().unwrap().len(), 1);
}

#[test]
fn added_thread_gets_first_free_number() {
    let m = TestCore::new(4);
    let _vcpu = m.vcpu(7);
    let first = PerfCore::FIRST_THREAD.0;
    let add = || m.core.add_thread(1).unwrap().id().0 - first;
    assert_eq!([add(), add(), add(), add()], [0, 1, 2, 3]);
    for gone in [0, 2] {
        m.core.remove_vcpu(VcpuId(first + gone)).unwrap();
    }
    m.core.add_cpu(0).unwrap();
    assert_eq!([add(), add(), add()], [0, 2, 4]);
}

#[test]
fn groups_are_inherited_whole_and_read_as_sums() {
    let m = TestCore::new(4);
    let v0 = m.vcpu(0);
    let format = ReadFormat::GROUP | ReadFormat::ID;
    let leader = m.open_vm(wide().with_read_format(format));
    // The sibling is inherited with its leader, although its own `inherit` flag is not set.
    let twice = m.open(Attr { config: 2, ..hw() }, EventOpenTarget::Vm, Some(&leader));
    let v1 = m.vcpu(1);
    assert_eq!((v0.stats().events, v1.stats().events), (2, 2));
    m.run(0, 10);
    m.run(1, 7);
    let r: Vec<_> = twice
        .read_group()
        .unwrap()
        .iter()
        .map(|r| (r.id, r.value))
        .collect();
    assert_eq!(r, [(leader.id(), 17), (twice.id(), 34)]);
    m.core.remove_vcpu(VcpuId(0)).unwrap();
    leader.disable(EventOrGroup::Group).unwrap();
    m.run(1, 1000);
    let r = leader.read_group().unwrap();
    assert_eq!((r[0].value, r[1].value), (17, 34));
    let mut buf = [0; 40];
    assert_eq!(leader.read_bytes(&mut buf).unwrap(), 40);
    assert_eq!(buf[..8], 2u64.to_ne_bytes(), "number of members first");
}

#[test]
fn failed_hot_add_leaves_nothing_behind() {
    let m = TestCore::new(4);
    let ok = m.open_vm(wide());
    // The driver does not know this event, but this remains undetected until a vCPU is added.
    let _bad = m.open(Attr { config: 0, ..wide() }, EventOpenTarget::Vm, None);
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
    e.disable(EventOrGroup::Event).unwrap();
    e.enable(EventOrGroup::Event).unwrap();
    v.sched_in();
    m.run(0, 5);
    assert_eq!(e.read().unwrap(), last, "nothing goes on on a vCPU that is gone");
    assert!(e.poll().contains(PollState::HUP));
    let error = m.try_open(&m.admin, hw(), V0, None).unwrap_err();
    assert_eq!(error.errno(), libc::ESRCH);
    assert_eq!(m.core.remove_vcpu(VcpuId(0)).unwrap_err().errno(), libc::ESRCH);
}

#[test]
fn p40_a_package_count_is_returned_unmodified_and_never_multiplied() {
    let m = TestCore::new(4);
    for n in 0..3 {
        m.vcpu(n);
    }
    let package = Attr::counting(EventType::SIM, PACKAGE);
    let e = m.open_vm(package.clone().with_inherit());
    // A package count has no children. Otherwise three vCPUs would count the package three times.
    assert_eq!(e.children(), 0);
    *m.hw.package.lock().unwrap() = 1234;
    *m.hw.package_age_ns.lock().unwrap() = 77;
    assert_eq!(e.read().unwrap().value, 1234);
    assert_eq!(e.count_age_ns().unwrap(), Some(77), "and says how old it is");
    let fresh = m.open_vm(Attr { config: 3, ..wide() });
    assert_eq!(fresh.count_age_ns().unwrap(), None);
    m.vcpu(3);
    m.run(0, 50);
    e.reset(EventOrGroup::Event).unwrap();
    assert_eq!(e.read().unwrap().value, 1234);
    m.core.remove_vcpu(VcpuId(0)).unwrap();
    assert_eq!(e.read().unwrap().value, 1234);
    let on_vcpu = m.open(package, EventOpenTarget::Vcpu(VcpuId(1)), None);
    assert_eq!(on_vcpu.read().unwrap().value, 1234);
}

#[test]
fn closing_session_closes_only_its_events() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let mine = m.open_vcpu(hw(), None);
    let other = m.core.session(0, SessionRole::Admin);
    let theirs = m.try_open(&other, wide(), EventOpenTarget::Vm, None).unwrap();
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

/// Behavior P14 with threads: the sum that readers see never decreases while vCPUs are added and
/// removed.
#[test]
fn p14_concurrent_readers_see_a_monotonic_sum() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let m = TestCore::new(4);
    let e = m.open_vm(wide());
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

/// A family (a VM-wide event with children) that has not run on one of the vCPUs has no estimate,
/// because the count of that vCPU is unknown.
#[test]
fn family_waiting_on_one_vcpu_has_no_estimate() {
    let m = TestCore::new(1);
    let (_v0, _v1) = (m.vcpu(0), m.vcpu(1));
    let rival = m.open(hw().with_pinned(), EventOpenTarget::Vcpu(VcpuId(1)), None);
    let e = m.open_vm(wide());
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

/// Hot-add rejects the same events as opening: groups that can never be active, and more events
/// than slots if slots may not be shared.
#[test]
fn hot_add_applies_open_checks() {
    let errno = |m: &TestCore, leader: Option<&EventHandle>| {
        let opened = m.try_open(&m.admin, wide(), EventOpenTarget::Vm, leader);
        opened.map_err(|e| e.errno())
    };
    // Hot-add has no vCPU to check yet, so opening checks the group.
    let m = TestCore::new(2);
    let leader = errno(&m, None).unwrap();
    let _second = errno(&m, Some(&leader)).unwrap();
    let third = errno(&m, Some(&leader)).unwrap_err();
    assert_eq!(third, libc::EINVAL, "3 on 2 slots");
    let _alone = errno(&m, None).unwrap();
    assert_eq!(m.vcpu(0).stats().events, 3);

    let m = TestCore::with(2, |c| c.share = SharePolicy::Strict);
    let _both = [errno(&m, None).unwrap(), errno(&m, None).unwrap()];
    assert_eq!(errno(&m, None).unwrap_err(), libc::EBUSY);
    assert_eq!(m.vcpu(0).stats().active, 2);

    // Opens more events than slots while multiplexing is enabled, and then disables it.
    let m = TestCore::new(2);
    let mut events: Vec<_> = (0..3).map(|_| errno(&m, None).unwrap()).collect();
    m.core.set_share(SharePolicy::Strict);
    let error = m.core.add_vcpu(VcpuId(0), 1).unwrap_err();
    assert_eq!(error.errno(), libc::EBUSY, "{error}");
    assert!(events.iter().all(|e| e.children() == 0), "nothing is left behind");
    events.pop();
    assert_eq!(m.vcpu(0).stats().active, 2);
}

/// If a VM-wide event cannot be opened on the second vCPU, opening fails and no child remains on
/// the first vCPU.
#[test]
fn failed_fan_out_leaves_no_event() {
    let m = TestCore::with(1, |c| c.share = SharePolicy::Strict);
    let (v0, v1) = (m.vcpu(0), m.vcpu(1));
    let own = m.open(hw(), EventOpenTarget::Vcpu(VcpuId(1)), None);
    let stats = || (v0.stats(), v1.stats(), m.core.vm_stats());
    let before = stats();
    let refused = m
        .try_open(&m.admin, wide(), EventOpenTarget::Vm, None)
        .unwrap_err();
    assert!(
        matches!(refused, PerfEventOpenError::Overcommitted { vcpu: VcpuId(1), .. }),
        "{refused}"
    );
    assert_eq!(stats(), before);
    assert_eq!((m.hw.on(0), m.hw.on(1)), (0, 1));
    // After `own` was closed, the event can be opened on both vCPUs.
    own.close();
    let e = m.open_vm(wide());
    m.run(0, 3);
    m.run(1, 4);
    assert_eq!((e.children(), e.read().unwrap().value), (2, 7));
}
