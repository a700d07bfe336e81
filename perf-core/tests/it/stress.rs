//! Tests that run all operations concurrently on many threads, without a deadlock, an out-of-order
//! driver call or a lost count.

use std::sync::atomic::{AtomicU64, Ordering};

use fastrand::Rng;
use perf_core::*;

use crate::common::test_core::*;

#[test]
fn concurrent_calls_from_all_threads() {
    const ROUNDS: u64 = 2000;
    let m = TestCore::new(2);
    let exits = vmm(SoftwareEventId::Exits);
    let pinned_wide = m.open_vm(Attr {
        inherit_stat: true,
        ..hw().with_inherit().with_pinned()
    });
    let ring = pinned_wide.map(8, false).unwrap();
    let wide_exits = m.open_vm(exits.clone().with_inherit());
    let (work, raised) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|s| {
        // Two vCPUs that are added, run, and removed.
        for n in 0..2u32 {
            let (m, work, raised) = (&m, &work, &raised);
            s.spawn(move || {
                let mut rng = Rng::with_seed(u64::from(n) + 1);
                for _ in 0..ROUNDS / 10 {
                    let v = m.vcpu(n);
                    for _ in 0..10 {
                        let amount = rng.u64(1..=50);
                        // The pinned VM-wide event counts all of this work, because it has
                        // precedence and is active whenever the vCPU is scheduled in.
                        m.run(n, amount);
                        work.fetch_add(amount, Ordering::Relaxed);
                        raise(&v, amount);
                        raised.fetch_add(amount, Ordering::Relaxed);
                        serve(&v);
                        v.sched_out();
                        v.sched_in();
                    }
                    m.core.remove_vcpu(VcpuId(n)).unwrap();
                }
            });
        }
        // Operators that open, use and close random events.
        for n in 0..2 {
            let m = &m;
            let sampling = exits.clone().with_sample_type(SampleType::IP);
            s.spawn(move || {
                // The operations are deterministic. Only the timing of the threads varies.
                let mut rng = Rng::with_seed(n + 100);
                let session = m.core.session(0, SessionRole::Admin);
                let mut handles: Vec<EventHandle> = Vec::new();
                for _ in 0..ROUNDS {
                    let target = match rng.u32(0..3) {
                        0 => EventOpenTarget::Vm,
                        n => EventOpenTarget::Vcpu(VcpuId(n - 1)),
                    };
                    let mut attr = match rng.u32(0..4) {
                        0 => Attr {
                            sample_period: 7,
                            ..sampling.clone()
                        },
                        1 => soft(),
                        2 => sim(13).with_sample_type(SampleType::IP),
                        _ => hw(),
                    };
                    attr.inherit = target == EventOpenTarget::Vm;
                    let leader = handles.last().filter(|_| rng.u32(0..3) == 0);
                    // The open fails if the vCPU was removed or the leader belongs to another
                    // context.
                    if let Ok(handle) = m.try_open(&session, attr, target, leader) {
                        if rng.u32(0..4) == 0 {
                            let _ = handle.map(1, true);
                        }
                        handles.push(handle);
                    }
                    if let Some(handle) = handles.get(rng.usize(0..8)) {
                        let scope = [EventOrGroup::Event, EventOrGroup::Group][rng.usize(0..2)];
                        match rng.u32(0..7) {
                            0 => handle.disable(scope).unwrap(),
                            1 => handle.enable(scope).unwrap(),
                            2 => handle.reset(scope).unwrap(),
                            3 => drop(handle.read_group().unwrap()),
                            4 => drop(handle.estimate().unwrap()),
                            // Fails for a counting event, which has no period.
                            5 => drop(handle.set_period(rng.u64(1..=40))),
                            _ => {
                                let _ = handle.set_output(handles.first());
                            }
                        }
                        let r = handle.read().unwrap();
                        assert!(r.time_running_ns <= r.time_enabled_ns, "{r:?}");
                    }
                    if handles.len() > 8 {
                        handles.swap_remove(rng.usize(0..8));
                    }
                }
            });
        }
        // The timer and a reader.
        s.spawn(|| {
            let mut last = 0;
            for _ in 0..ROUNDS {
                m.core.tick();
                let _ = (m.core.needs_tick(), m.core.next_turn_ns());
                let now = pinned_wide.read().unwrap().value;
                assert!(now >= last);
                last = now;
                std::thread::yield_now();
            }
        });
    });
    assert_eq!(wide_exits.read().unwrap().value, raised.load(Ordering::Relaxed));
    assert_eq!(pinned_wide.read().unwrap().value, work.load(Ordering::Relaxed));
    assert_eq!(pinned_wide.children(), 0);
    drop((pinned_wide, wide_exits, ring));
    // No event is left, because dropping the operators' sessions closed their events.
    assert_eq!(m.core.vm_stats().events, 0);
    assert_eq!(m.core.ring_pages(0), 0);
}
