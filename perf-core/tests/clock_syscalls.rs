//! System calls of an overflow with the `clock` driver, counted by ptrace. What a guest's PMI handler does comes from the
//! drivers of Linux: `vpmu` turns their writes into the calls made here.
#![allow(unsafe_code)]

mod common;
#[path = "machine/steps.rs"]
mod steps;

use std::sync::Arc;

use common::{burn, catch_signals, clock_attr, signals_of_this_thread};
use perf_core::pmu::clock::{ClockPmu, GUEST_NS, VcpuClock};
use perf_core::*;

/// Of the counter, ns. Long against what ptrace adds to a system call.
const PERIOD: u64 = 3_000_000;
/// What is left of a 48-bit counter that has just overflowed.
const AGES: u64 = (1 << 48) - 1_000;
/// Rings that are served, early ones included.
const RINGS: usize = 30;

struct Regs;

impl SampleRegs for Regs {
    fn mode(&mut self) -> CpuMode {
        CpuMode::GuestUser
    }
    fn ip(&mut self) -> u64 {
        0
    }
}

/// This thread as a vCPU with clock events of its guest's.
struct Scene {
    _core: Core,
    _session: Session,
    clock: Arc<VcpuClock>,
    vcpu: Arc<VcpuContext>,
    counters: Vec<Handle>,
}

impl Scene {
    fn new(counters: u64, change: impl Fn(&mut Attr)) -> Self {
        let clock = Arc::new(VcpuClock::for_current_thread(2_000_000));
        let pmu = ClockPmu::new(Some(catch_signals()));
        pmu.add_vcpu(VcpuId(0), Arc::clone(&clock));
        let core = Core::new(CoreConfig::default());
        core.register(Arc::new(pmu));
        let vcpu = core.add_vcpu(VcpuId(0), clock.tid()).unwrap();
        let session = core.session(0, Role::Guest);
        let mut attr = Attr {
            pinned: true,
            disabled: true,
            exclude_host: true,
            ..clock_attr(GUEST_NS)
        };
        change(&mut attr);
        let counters = (0..counters)
            .map(|counter| {
                let flags = OpenFlags {
                    cookie: Some(counter),
                    ..OpenFlags::default()
                };
                core.open(&session, attr.clone(), OpenTarget::Vcpu(VcpuId(0)), None, flags)
                    .unwrap()
            })
            .collect();
        vcpu.sched_in();
        let mut scene = Self {
            _core: core,
            _session: session,
            clock,
            vcpu,
            counters,
        };
        scene.start();
        // The first ring, so that everything that happens once has happened.
        scene.run_until_rung();
        scene
    }

    /// The guest enables its counters, the first with [`PERIOD`] to go and each with a little more than the one before.
    fn start(&mut self) {
        for (n, counter) in self.counters.iter().enumerate() {
            must(counter.arm(PERIOD + n as u64 * 700_000).is_ok());
            must(counter.enable(Scope::Event).is_ok());
        }
    }

    fn stop(&mut self) {
        for counter in &self.counters {
            must(counter.disable(Scope::Event).is_ok());
        }
    }

    /// An access to a register.
    fn exit(&mut self) {
        self.clock.guest_enter();
        self.clock.guest_exit();
    }

    fn run_until_rung(&mut self) {
        let before = signals_of_this_thread();
        self.clock.guest_enter();
        while signals_of_this_thread() == before {
            std::hint::spin_loop();
        }
        self.clock.guest_exit();
    }

    /// What follows a signal, up to the entry into the handler. Whether there was an overflow.
    fn serve(&mut self) -> bool {
        let mut overflowed = None;
        self.vcpu
            .service_overflows(&mut Regs, &mut |o| overflowed = Some(o.cookie));
        if let Some(counter) = overflowed {
            // It goes on from 0.
            must(self.counters[counter as usize].arm(AGES).is_ok());
        }
        overflowed.is_some()
    }

    /// A guest that stops its counters for its handler, as with intel-v2 and amd-v2.
    fn with_counters_stopped(&mut self) {
        for _ in 0..RINGS {
            self.run_until_rung();
            if self.serve() {
                self.exit();
                self.stop();
                (0..6).for_each(|_| self.exit());
                self.start();
            }
        }
    }

    /// A guest that writes its counter while it counts, as with amd.
    fn with_counters_on(&mut self) {
        for _ in 0..RINGS {
            self.run_until_rung();
            if self.serve() {
                self.exit();
                must(self.counters[0].arm(PERIOD).is_ok());
            }
        }
    }
}

/// Ends the child, so that its parent notices, unless `holds`.
fn must(holds: bool) {
    if !holds {
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(1) };
    }
}

/// The system calls of [`RINGS`] rings, without the bracket's: the thread's time, at each entry and each exit.
fn calls_of(counters: u64, change: impl Fn(&mut Attr), work: impl FnOnce(&mut Scene)) -> Vec<u64> {
    let mut calls =
        steps::system_calls(|| Scene::new(counters, change), work).expect("processes may be traced");
    assert!(calls.contains(&(libc::SYS_clock_gettime as u64)));
    calls.retain(|call| *call != libc::SYS_clock_gettime as u64);
    calls
}

#[track_caller]
fn only_the_timer_is_set(calls: &[u64], most: usize) {
    let others: Vec<_> = calls
        .iter()
        .filter(|call| **call != libc::SYS_timer_settime as u64)
        .collect();
    assert!(others.is_empty(), "system calls {others:?}");
    assert!(calls.len() <= most, "{} for {RINGS} rings", calls.len());
    assert!(calls.len() >= RINGS / 2, "{} for {RINGS} rings", calls.len());
}

#[test]
fn an_overflow_makes_one_system_call_where_the_handler_stops_the_counter() {
    only_the_timer_is_set(&calls_of(1, |_| (), Scene::with_counters_stopped), RINGS);
}

#[test]
fn an_overflow_makes_one_system_call_where_the_counter_goes_on() {
    only_the_timer_is_set(&calls_of(1, |_| (), Scene::with_counters_on), RINGS);
}

/// The others are waited for until the handler stops them.
#[test]
fn other_counters_make_it_two_however_many_they_are() {
    for counters in [2, 8] {
        let calls = calls_of(counters, |_| (), Scene::with_counters_stopped);
        only_the_timer_is_set(&calls, 2 * RINGS);
    }
}

/// A counter that only counts: the overflow that it is armed for is hours away.
#[test]
fn stopping_and_starting_a_counter_that_only_counts_makes_none() {
    let calls = calls_of(
        2,
        |_| (),
        |scene| {
            scene.stop();
            scene.counters.iter().for_each(|c| must(c.arm(AGES).is_ok()));
            for _ in 0..20 {
                for counter in &scene.counters {
                    must(counter.enable(Scope::Event).is_ok());
                }
                scene.clock.guest_enter();
                burn(20_000);
                scene.clock.guest_exit();
                scene.stop();
                scene.exit();
            }
        },
    );
    // Once for all of it.
    assert!(calls.len() <= 1, "system calls {calls:?}");
}
