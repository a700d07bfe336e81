//! Tests of the number of system calls on the hot paths of the `clock` driver, counted with ptrace.
//! Clock reads are not counted, because they take no system call if the vDSO provides the clock.
//! Guest exit and entry have separate tests.

use std::sync::Arc;
use std::time::{Duration, Instant};

use perf_core::Attr;
use perf_core::pmu::clock::{ClockPmu, GUEST_NS, VcpuRunTimeClock};
use perf_core::pmu::{Pmu, PmuEvent, PmuEventTarget, VcpuId};

use crate::common::thread::{burn, catch_signals, clock_attr, signals_of_this_thread, this_tid};
use crate::{calls, must};

const SET: u64 = libc::SYS_timer_settime as u64;
/// Two periods of a timer that expires sixteen times per second.
const SECOND_RING: Duration = Duration::from_millis(125);

/// The calling thread as a vCPU with one event of the `clock` driver.
struct ClockFixture {
    clock: Arc<VcpuRunTimeClock>,
    event: Box<dyn PmuEvent>,
}

impl ClockFixture {
    fn armed(overflow_in: u64) -> Self {
        Self::of(&clock_attr(GUEST_NS), Some(overflow_in))
    }

    fn of(attr: &Attr, overflow_in: Option<u64>) -> Self {
        let clock = Arc::new(VcpuRunTimeClock::for_current_thread(1_000_000));
        let pmu = ClockPmu::new(Some(catch_signals()));
        pmu.add_vcpu(VcpuId(0), Arc::clone(&clock));
        let target = PmuEventTarget::Vcpu {
            vcpu: VcpuId(0),
            tid: this_tid(),
        };
        let mut event = pmu.open(attr, target).unwrap();
        event.start(overflow_in).unwrap();
        Self { clock, event }
    }

    /// Returns a fixture with an event that has overflowed.
    fn overflowed() -> Self {
        let before = signals_of_this_thread();
        let scene = Self::armed(100_000);
        scene.clock.guest_enter();
        while signals_of_this_thread() == before {
            burn(200_000);
        }
        scene.clock.guest_exit();
        scene
    }
}

fn timer_calls(setup: impl FnOnce() -> ClockFixture, work: impl FnOnce(&mut ClockFixture)) -> Vec<u64> {
    let mut calls = calls(setup, work);
    calls.retain(|&call| call != libc::SYS_clock_gettime as u64);
    calls
}

/// Enters and exits the guest once.
fn turn(scene: &ClockFixture) {
    scene.clock.guest_enter();
    scene.clock.guest_exit();
}

#[test]
fn overflow_arms_timer_once() {
    let calls = timer_calls(ClockFixture::overflowed, |scene| {
        let count = scene.event.overflowed();
        must(count.is_some());
        must(scene.event.rearm(count.unwrap_or(0), 1_000_000).is_ok());
        turn(scene);
        turn(scene);
    });
    assert_eq!(calls, [SET]);
}

/// A guest PMI arms the timer once. After its overflow, the counter continues towards a distant
/// overflow. The guest's handler then stops and restarts the counter, with an exit for each step.
#[test]
fn guest_pmi_arms_timer_once() {
    let calls = timer_calls(ClockFixture::overflowed, |scene| {
        let count = scene.event.overflowed();
        must(count.is_some());
        must(scene.event.rearm(count.unwrap_or(0), 1 << 47).is_ok());
        turn(scene);
        scene.event.stop();
        turn(scene);
        must(scene.event.start(Some(1_000_000)).is_ok());
        turn(scene);
    });
    assert_eq!(calls, [SET]);
}

/// A guest that stops and starts its counter repeatedly, as if it switched between tasks
/// continuously, arms the timer at most twice.
#[test]
fn repeated_starts_arm_timer_at_most_twice() {
    let calls = timer_calls(
        || ClockFixture::armed(1 << 40),
        |scene| {
            for _ in 0..20 {
                turn(scene);
                scene.event.stop();
                burn(20_000);
                must(scene.event.start(Some(1 << 40)).is_ok());
            }
        },
    );
    assert_eq!(calls, [SET, SET]);
}

#[test]
fn early_timer_is_armed_once_more() {
    let setup = || {
        let before = signals_of_this_thread();
        let scene = ClockFixture::armed(100_000);
        turn(&scene);
        // The timer expires outside the guest, and therefore early.
        while signals_of_this_thread() == before {
            burn(1_000);
        }
        scene
    };
    let calls = timer_calls(setup, |scene| {
        must(scene.event.overflowed().is_none());
        turn(scene);
    });
    assert_eq!(calls, [SET]);
}

/// A check whether an event has overflowed, after a signal for another event, makes no system call.
#[test]
fn overflow_check_makes_no_system_call() {
    let setup = || {
        let scene = ClockFixture::armed(1 << 47);
        turn(&scene);
        scene
    };
    let calls = timer_calls(setup, |scene| {
        must(scene.event.overflowed().is_none());
        turn(scene);
    });
    assert!(calls.is_empty(), "{calls:?}");
}

/// The timer of a closed event is not disarmed immediately, because the next event may use it. The
/// timer expires at most twice.
///
/// On a busy machine, the first signal may be handled shortly before the second expiry. The timer
/// is then disarmed without a second signal.
#[test]
fn unused_timer_is_disarmed_at_second_expiry() {
    let calls = timer_calls(
        || ClockFixture::armed(100_000),
        |scene| {
            turn(scene);
            scene.event.stop();
            for _ in 0..2 {
                let (before, since) = (signals_of_this_thread(), Instant::now());
                while signals_of_this_thread() == before && since.elapsed() < SECOND_RING {
                    burn(1_000);
                }
                scene.clock.after_signal();
                turn(scene);
            }
            scene.clock.after_signal();
        },
    );
    assert_eq!(calls, [SET, SET]);
}

/// Stopping and starting an event that counts a single privilege level takes at most one system
/// call. The kick timer keeps running while the event is stopped, and is re-armed only after a long
/// stop, for example on a busy machine.
#[test]
fn event_of_one_level_is_stopped_and_started_with_one_call_at_most() {
    let mut attr = clock_attr(GUEST_NS);
    attr.exclude_kernel = true;
    let mut calls = timer_calls(
        || {
            let scene = ClockFixture::of(&attr, None);
            turn(&scene);
            scene
        },
        |scene| {
            scene.event.stop();
            turn(scene);
            must(scene.event.start(None).is_ok());
            turn(scene);
        },
    );
    // Ignores the ioctls that stop and start the host kernel's samples.
    calls.retain(|&call| call != libc::SYS_ioctl as u64);
    assert!(calls.is_empty() || calls == [SET], "{calls:?}");
}

/// The overflow timer does not expire while the vCPU is paused.
#[test]
fn paused_vcpu_has_timer_disarmed() {
    let calls = timer_calls(
        || {
            let scene = ClockFixture::armed(1 << 40);
            turn(&scene);
            scene
        },
        |scene| {
            scene.event.stop();
            scene.clock.quiesce();
            scene.clock.quiesce();
            must(scene.event.start(Some(1 << 40)).is_ok());
            turn(scene);
        },
    );
    assert_eq!(calls, [SET, SET]);
}
