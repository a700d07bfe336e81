//! All operations concurrently from many threads: no deadlock, no driver call out of order, no lost
//! count.

use std::sync::atomic::{AtomicU64, Ordering};

use perf_core::*;

use crate::common::test_core::*;

/// A small deterministic generator; only thread timing varies.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
}

#[test]
fn concurrent_calls_from_all_threads() {
    const ROUNDS: u64 = 2000;
    let m = TestCore::new(2);
    let exits = Attr::counting(EventType::VMM, SoftwareEventId::Exits as u64);
    let pinned_wide = m.open(
        Attr {
            inherit: true,
            inherit_stat: true,
            pinned: true,
            ..hw()
        },
        OpenTarget::Vm,
        None,
    );
    let ring = pinned_wide.map(8, false).unwrap();
    let wide_exits = m.open(
        Attr {
            inherit: true,
            ..exits.clone()
        },
        OpenTarget::Vm,
        None,
    );
    let (work, raised) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|s| {
        // Two vCPUs that are added, run, and removed.
        for n in 0..2u32 {
            let (m, work, raised) = (&m, &work, &raised);
            s.spawn(move || {
                let mut rng = Rng(u64::from(n) + 1);
                for _ in 0..ROUNDS / 10 {
                    let v = m.vcpu(n);
                    for _ in 0..10 {
                        let amount = rng.below(50) + 1;
                        // Pinned and first in order, so always on while the vCPU is scheduled in.
                        m.run(n, amount);
                        work.fetch_add(amount, Ordering::Relaxed);
                        v.software_event(
                            SoftwareEventId::Exits,
                            amount,
                            Some(&mut UnavailableRegs),
                            &mut |_| {},
                        );
                        raised.fetch_add(amount, Ordering::Relaxed);
                        v.service_overflows(&mut UnavailableRegs, &mut |_| {});
                        v.sched_out();
                        v.sched_in();
                    }
                    m.core.remove_vcpu(VcpuId(n)).unwrap();
                }
            });
        }
        // Operators that open, use and close random events.
        for n in 0..2 {
            let (m, exits) = (&m, &exits);
            s.spawn(move || {
                let mut rng = Rng(n + 100);
                let session = m.core.session(0, Role::Admin);
                let mut handles: Vec<Handle> = Vec::new();
                for _ in 0..ROUNDS {
                    let target = match rng.below(3) {
                        0 => OpenTarget::Vm,
                        n => OpenTarget::Vcpu(VcpuId(n as u32 - 1)),
                    };
                    let attr = match rng.below(4) {
                        0 => Attr {
                            sample_period: 7,
                            sample_type: SampleType::IP,
                            ..exits.clone()
                        },
                        1 => soft(),
                        2 => Attr {
                            sample_period: 13,
                            sample_type: SampleType::IP,
                            ..hw()
                        },
                        _ => hw(),
                    };
                    let attr = Attr {
                        inherit: target == OpenTarget::Vm,
                        ..attr
                    };
                    let leader = handles.last().filter(|_| rng.below(3) == 0);
                    // The vCPU may be removed, or the leader may belong to another context.
                    if let Ok(handle) = m.core.open(&session, attr, target, leader, OpenFlags::default()) {
                        if rng.below(4) == 0 {
                            let _ = handle.map(1, true);
                        }
                        handles.push(handle);
                    }
                    if let Some(handle) = handles.get(rng.below(8) as usize) {
                        let scope = if rng.below(2) == 0 {
                            ControlScope::Event
                        } else {
                            ControlScope::Group
                        };
                        match rng.below(7) {
                            0 => handle.disable(scope).unwrap(),
                            1 => handle.enable(scope).unwrap(),
                            2 => handle.reset(scope).unwrap(),
                            3 => drop(handle.read_group().unwrap()),
                            4 => drop(handle.estimate().unwrap()),
                            // Counting events have no period.
                            5 => drop(handle.set_period(1 + rng.below(40))),
                            _ => {
                                let _ = handle.set_output(handles.first());
                            }
                        }
                        let r = handle.read().unwrap();
                        assert!(r.time_running_ns <= r.time_enabled_ns, "{r:?}");
                    }
                    if handles.len() > 8 {
                        handles.swap_remove(rng.below(8) as usize);
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
    assert_eq!(
        m.core.vm_stats().events,
        0,
        "the operators' sessions took theirs along"
    );
    assert_eq!(m.core.ring_pages(0), 0);
}
