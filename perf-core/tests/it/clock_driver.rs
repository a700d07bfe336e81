//! Tests of the `clock` driver with threads of this machine. No test depends on the machine's
//! speed: each test compares with another clock that is read at the same time, or checks a property
//! that holds at any speed.
#![expect(unsafe_code, reason = "calls of the system")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use perf_core::attr::Attr;
use perf_core::pmu::clock::{CYCLES, ClockPmu, GUEST_NS, VcpuRunTimeClock};
use perf_core::pmu::{Pmu, PmuError, PmuEvent, PmuEventTarget, VcpuId};

use crate::common::thread::{
    burn, catch, catch_signals, clock_attr, signals_of_this_thread, this_tid, thread_cpu_ns,
};

const MHZ: u32 = 1_000;
/// TSC frequency in kHz: two cycles per nanosecond.
const TSC_KHZ: u32 = 2_000 * MHZ;

fn one_vcpu(signal: Option<i32>) -> (Arc<VcpuRunTimeClock>, ClockPmu) {
    let clock = Arc::new(VcpuRunTimeClock::for_current_thread(TSC_KHZ));
    let pmu = ClockPmu::new(signal);
    pmu.add_vcpu(VcpuId(0), Arc::clone(&clock));
    (clock, pmu)
}

fn target(tid: i32) -> PmuEventTarget {
    PmuEventTarget::Vcpu { vcpu: VcpuId(0), tid }
}

fn open(pmu: &ClockPmu, config: u64) -> Box<dyn PmuEvent> {
    pmu.open(&clock_attr(config), target(this_tid())).unwrap()
}

/// Runs the simulated guest for `ns` nanoseconds.
fn run_guest(clock: &VcpuRunTimeClock, ns: u64) {
    clock.guest_enter();
    burn(ns);
    clock.guest_exit();
}

/// Runs the simulated guest until this thread has received more than `handled` signals.
fn run_until_signal(clock: &VcpuRunTimeClock, handled: u64) {
    clock.guest_enter();
    wait_for_signal(handled);
    clock.guest_exit();
}

/// Starts a vCPU thread that runs `work` with a new clock. Returns a `clock` driver with this vCPU.
fn vcpu_thread<T: Send + 'static>(
    signal: Option<i32>,
    work: impl FnOnce(&Arc<VcpuRunTimeClock>, mpsc::Sender<Arc<VcpuRunTimeClock>>) -> T + Send + 'static,
) -> (thread::JoinHandle<T>, Arc<VcpuRunTimeClock>, ClockPmu) {
    let (send, receive) = mpsc::channel();
    let thread = thread::spawn(move || {
        let clock = Arc::new(VcpuRunTimeClock::for_current_thread(TSC_KHZ));
        work(&clock, send)
    });
    let clock: Arc<VcpuRunTimeClock> = receive.recv().unwrap();
    let pmu = ClockPmu::new(signal);
    pmu.add_vcpu(VcpuId(0), Arc::clone(&clock));
    (thread, clock, pmu)
}

/// Uses CPU time until this thread has received more than `handled` signals.
fn wait_for_signal(handled: u64) {
    let began = Instant::now();
    while signals_of_this_thread() == handled {
        // Fails if no signal arrives within ten minutes.
        assert!(began.elapsed() < Duration::from_secs(600));
        burn(1_000);
    }
}

/// Guest time is exactly the thread's CPU time between guest entry and exit. The VMM's own work
/// outside this interval and a halt inside it are not counted.
#[test]
fn only_time_in_the_guest_counts() {
    let (clock, pmu) = one_vcpu(None);
    let mut ns = open(&pmu, GUEST_NS);
    let mut cycles = open(&pmu, CYCLES);
    ns.start(None).unwrap();
    cycles.start(None).unwrap();

    let (mut outer, mut inner) = (0, 0);
    for _ in 0..5 {
        let t0 = thread_cpu_ns();
        clock.guest_enter();
        let t1 = thread_cpu_ns();
        burn(2_000_000);
        thread::sleep(Duration::from_millis(5));
        let t2 = thread_cpu_ns();
        clock.guest_exit();
        let t3 = thread_cpu_ns();
        burn(10_000_000);
        inner += t2 - t1;
        outer += t3 - t0;
    }
    let (ns, cycles) = (ns.read(), cycles.read());
    assert!(
        (inner..=outer).contains(&ns),
        "{ns} ns, between {inner} and {outer} expected"
    );
    assert!(
        (2 * inner..=2 * outer).contains(&cycles),
        "{cycles} cycles for {ns} ns at 2 GHz"
    );
}

/// For a short exit, the clock reads the thread's CPU time only once, at the exit. The count still
/// includes all time in the guest and no time between two stays in the guest.
#[test]
fn short_exits_are_not_counted_but_guest_time_between_is() {
    const SHORT: Duration = Duration::from_micros(4);
    let (clock, pmu) = one_vcpu(None);
    let mut ns = open(&pmu, GUEST_NS);
    ns.start(None).unwrap();

    let (mut in_short_exits, mut in_exits) = (Duration::ZERO, Duration::ZERO);
    let before = thread_cpu_ns();
    clock.guest_enter();
    let first = thread_cpu_ns();
    for _ in 0..2_000 {
        burn(20_000);
        let exit = Instant::now();
        clock.guest_exit();
        let left = Instant::now();
        while left.elapsed() < SHORT {
            std::hint::spin_loop();
        }
        let out = left.elapsed();
        clock.guest_enter();
        in_exits += exit.elapsed();
        // A much longer exit means that another thread had the CPU, so this thread's time did not
        // advance.
        if out < 2 * SHORT {
            in_short_exits += out;
        }
    }
    let last = thread_cpu_ns();
    clock.guest_exit();
    let after = thread_cpu_ns();

    let counted = ns.read();
    let least = (last - first).saturating_sub(in_exits.as_nanos() as u64);
    let most = after - before - in_short_exits.as_nanos() as u64;
    assert!(
        (least..=most).contains(&counted),
        "{counted} ns, between {least} and {most} expected"
    );
}

#[test]
fn stopped_event_keeps_count_and_resumes() {
    let (clock, pmu) = one_vcpu(None);
    let mut ev = open(&pmu, GUEST_NS);
    run_guest(&clock, 1_000_000);
    assert_eq!(ev.read(), 0, "never started");

    ev.start(None).unwrap();
    run_guest(&clock, 1_000_000);
    ev.stop();
    let stopped = ev.read();
    assert!(stopped >= 1_000_000);

    run_guest(&clock, 1_000_000);
    assert_eq!(ev.read(), stopped);

    ev.start(None).unwrap();
    assert_eq!(ev.read(), stopped);
    run_guest(&clock, 1_000_000);
    assert!(ev.read() >= stopped + 1_000_000);
}

/// An operator's thread may start an event while the guest runs, and read it meanwhile. The count
/// advances immediately, never decreases, and never exceeds the vCPU thread's CPU time.
#[test]
fn another_thread_starts_and_reads_while_the_guest_runs() {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let (vcpu, clock, pmu) = vcpu_thread(None, move |clock, send| {
        clock.guest_enter();
        send.send(Arc::clone(clock)).unwrap();
        while !stopped.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        }
        clock.guest_exit();
        thread_cpu_ns()
    });
    let mut ev = pmu.open(&clock_attr(GUEST_NS), target(clock.tid())).unwrap();
    ev.start(None).unwrap();
    let (mut last, mut moved) = (0, 0);
    while moved < 300 {
        let now = ev.read();
        assert!(now >= last, "{now} after {last}");
        moved += u32::from(now > last);
        last = now;
    }
    stop.store(true, Ordering::Relaxed);
    let cpu_ns = vcpu.join().unwrap();
    assert!(ev.read() <= cpu_ns);
    assert!(ev.read() >= last);
}

/// Another thread reads the clock continuously during many short stays in the guest. The readings
/// are monotonic, and the last one equals the reading of the vCPU's own thread.
#[test]
fn readings_are_monotonic_during_guest_entries_and_exits() {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let (vcpu, clock, pmu) = vcpu_thread(None, move |clock, send| {
        send.send(Arc::clone(clock)).unwrap();
        while !stopped.load(Ordering::Relaxed) {
            run_guest(clock, 500);
        }
    });
    let attr = clock_attr(GUEST_NS);
    let mut events: Vec<_> = (0..3)
        .map(|_| pmu.open(&attr, target(clock.tid())).unwrap())
        .collect();
    let mut last = [0; 3];
    for round in 0..3_000 {
        for (ev, last) in events.iter_mut().zip(&mut last) {
            match round % 100 {
                0 => ev.start(None).unwrap(),
                90 => ev.stop(),
                _ => {}
            }
            let now = ev.read();
            assert!(now >= *last);
            *last = now;
        }
    }
    stop.store(true, Ordering::Relaxed);
    vcpu.join().unwrap();
}

/// The signal of an overflow arrives at the vCPU's thread. `take_overflows` does not report the
/// overflow before the event has reached the overflow point, although time in the VMM makes the
/// timer expire early each time.
#[test]
fn overflow_is_reported_at_its_count_and_not_before() {
    let signal = catch_signals();
    let (clock, pmu) = one_vcpu(Some(signal));
    let mut ev = open(&pmu, GUEST_NS);
    const PERIOD: u64 = 3_000_000;
    let mut handled = signals_of_this_thread();
    ev.start(Some(PERIOD)).unwrap();
    let mut due = PERIOD;
    let mut early = 0;
    for _ in 0..4 {
        loop {
            // Uses VMM time while the timer runs, so that the timer expires early.
            run_guest(&clock, 0);
            burn(1_500_000);
            run_until_signal(&clock, handled);
            // Saved before the timer is re-armed, because the next signal arrives first if this
            // thread then loses its CPU.
            handled = signals_of_this_thread();
            let count = ev.read();
            match ev.take_overflows() {
                0 => {
                    assert!(ev.read() >= count && count < due);
                    early += 1;
                }
                n => {
                    assert_eq!(n, 1);
                    assert!(ev.read() >= due);
                    assert_eq!(ev.take_overflows(), 0, "the same overflow, twice");
                    break;
                }
            }
        }
        due = ev.read() + PERIOD;
        ev.arm(PERIOD).unwrap();
    }
    assert!(early > 0, "the timer never rang early");
}

/// Several events of a vCPU share its timer. Each overflow is reported when its deadline is
/// reached, even if events are stopped, re-armed or closed meanwhile.
#[test]
fn events_with_different_deadlines_share_the_timer() {
    let signal = catch_signals();
    let (clock, pmu) = one_vcpu(Some(signal));
    let periods = [3_000_000, 1_000_000, 2_000_000, 700_000, 900_000];
    let mut events: Vec<_> = periods.iter().map(|_| open(&pmu, GUEST_NS)).collect();
    let mut handled = signals_of_this_thread();
    for (event, &period) in events.iter_mut().zip(&periods) {
        event.start(Some(period)).unwrap();
    }
    // Closes the event with the earliest deadline and stops the one with the next deadline.
    drop(events.pop());
    events[3].stop();
    let mut order = Vec::new();
    while order.len() < 3 {
        run_until_signal(&clock, handled);
        handled = signals_of_this_thread();
        for (at, event) in events.iter_mut().enumerate() {
            if event.take_overflows() == 1 {
                assert!(event.read() >= periods[at]);
                order.push(at);
            }
        }
    }
    assert_eq!(order, [1, 2, 0]);
    // The event that was stopped can be started again.
    let before = events[3].read();
    events[3].start(Some(500_000)).unwrap();
    events[0].arm(1 << 40).unwrap();
    while events[3].take_overflows() == 0 {
        run_until_signal(&clock, handled);
        handled = signals_of_this_thread();
    }
    assert!(events[3].read() >= before + 500_000);
    assert_eq!(events[0].take_overflows(), 0);
}

/// If another thread arms an event while the guest runs, the timer is armed immediately, not at the
/// next guest entry.
#[test]
fn another_thread_arms_while_the_guest_runs() {
    let (vcpu, clock, pmu) = vcpu_thread(Some(catch_signals()), |clock, send| {
        clock.guest_enter();
        send.send(Arc::clone(clock)).unwrap();
        wait_for_signal(0);
        clock.guest_exit();
    });
    let mut event = pmu.open(&clock_attr(GUEST_NS), target(clock.tid())).unwrap();
    event.start(Some(200_000)).unwrap();
    vcpu.join().unwrap();
    assert!(event.read() > 0);
}

/// The timer is deleted with the vCPU, even while events are armed. The events keep their counts.
#[test]
fn removed_vcpu_has_timer_disarmed() {
    let signal = catch_signals();
    let (clock, pmu) = one_vcpu(Some(signal));
    let mut event = open(&pmu, GUEST_NS);
    event.start(Some(1_000_000)).unwrap();
    run_guest(&clock, 0);
    let quiet = signals_of_this_thread();
    pmu.remove_vcpu(VcpuId(0));
    let count = event.read();
    run_guest(&clock, 3_000_000);
    // No signal is sent after the vCPU was removed.
    assert_eq!(signals_of_this_thread(), quiet);
    assert!(event.read() > count);
    // A new thread for the same vCPU has a new clock.
    let again = Arc::new(VcpuRunTimeClock::for_current_thread(TSC_KHZ));
    pmu.add_vcpu(VcpuId(0), Arc::clone(&again));
    let mut event = open(&pmu, GUEST_NS);
    event.start(Some(1_000_000)).unwrap();
    run_until_signal(&again, quiet);
}

/// The timer sends no signals for a stopped event, or for an event that was not re-armed after its
/// overflow.
#[test]
fn no_signals_without_an_armed_event() {
    let signal = catch_signals();
    let (clock, pmu) = one_vcpu(Some(signal));
    let mut ev = open(&pmu, GUEST_NS);
    run_guest(&clock, 0);
    ev.start(Some(100_000)).unwrap();
    run_guest(&clock, 1_000_000);
    assert_eq!(ev.take_overflows(), 1);
    assert_eq!(ev.take_overflows(), 0);
    // Disarms the timer, which otherwise repeats occasionally although no event is armed.
    clock.quiesce();
    let quiet = signals_of_this_thread();
    run_guest(&clock, 2_000_000);
    assert_eq!(signals_of_this_thread(), quiet, "left armed after its overflow");

    ev.arm(100_000).unwrap();
    ev.stop();
    clock.quiesce();
    let quiet = signals_of_this_thread();
    run_guest(&clock, 2_000_000);
    assert_eq!(signals_of_this_thread(), quiet, "stopped, yet armed");
    assert_eq!(ev.take_overflows(), 0);
}

/// The guest makes progress even if the VMM needs longer to re-enter it than the time left until
/// the overflow.
#[test]
fn slow_vmm_reaches_overflow() {
    let signal = catch_signals();
    let (clock, pmu) = one_vcpu(Some(signal));
    let mut ev = open(&pmu, GUEST_NS);
    let mut handled = signals_of_this_thread();
    ev.start(Some(200_000)).unwrap();
    for round in 0.. {
        assert!(round < 1_000, "rung out a thousand times without an overflow");
        burn(100_000);
        // Does not enter the guest if a signal arrived before the entry, as KVM with
        // `immediate_exit`.
        if signals_of_this_thread() == handled {
            run_until_signal(&clock, handled);
        }
        handled = signals_of_this_thread();
        if ev.take_overflows() == 1 {
            break;
        }
    }
    assert!(ev.read() >= 200_000);
}

/// While a thread blocks the overflow signal, signals do not accumulate, because they would fill a
/// queue that all processes of the user share. Afterwards the timer works again.
#[test]
fn blocked_signals_do_not_pile_up() {
    let signal = catch(libc::SIGRTMIN() + 3);
    let (clock, pmu) = one_vcpu(Some(signal));
    let mut ev = open(&pmu, GUEST_NS);
    let mask = |how| {
        // SAFETY: sigemptyset initializes the set before use; only this thread's mask changes.
        unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, signal);
            assert_eq!(libc::pthread_sigmask(how, &set, std::ptr::null_mut()), 0);
        }
    };
    let mut overflows = 0;
    for _ in 0..5 {
        let before = signals_of_this_thread();
        mask(libc::SIG_BLOCK);
        ev.start(Some(10_000)).unwrap();
        run_guest(&clock, 5_000_000);
        mask(libc::SIG_UNBLOCK);
        let came = signals_of_this_thread() - before;
        // Without blocking, 500 signals would have been sent. None is sent if the signal queue of
        // the user is full.
        assert!(came <= 40, "{came} signals");
        overflows += ev.take_overflows();
        ev.stop();
    }
    assert_eq!(overflows, 5);
}

#[test]
fn event_cannot_be_armed_without_a_signal() {
    let (_clock, pmu) = one_vcpu(None);
    let mut ev = open(&pmu, CYCLES);
    assert!(matches!(ev.start(Some(1_000)), Err(PmuError::Unsupported(_))));
    ev.start(None).unwrap();
}

#[test]
fn clock_driver_rejects_unsupported_events() {
    let (_clock, pmu) = one_vcpu(None);
    let here = target(this_tid());
    assert!(matches!(
        pmu.open(&clock_attr(3), here),
        Err(PmuError::NoSuchEvent)
    ));
    assert!(matches!(
        pmu.open(&clock_attr(CYCLES), PmuEventTarget::Vm),
        Err(PmuError::Unsupported(_))
    ));
    let host_only = Attr {
        exclude_guest: true,
        ..clock_attr(CYCLES)
    };
    assert!(matches!(
        pmu.open(&host_only, here),
        Err(PmuError::Unsupported(_))
    ));
    let stranger = PmuEventTarget::Vcpu {
        vcpu: VcpuId(7),
        tid: 0,
    };
    assert!(matches!(
        pmu.open(&clock_attr(CYCLES), stranger),
        Err(PmuError::Os { .. })
    ));
}

/// With one event per privilege level, neither count decreases, their sum never exceeds the total,
/// and an event that excludes both levels counts nothing. The API reports counts of a single level
/// as estimates.
#[test]
fn single_level_count_is_part_of_total() {
    let signal = catch_signals();
    let (clock, pmu) = one_vcpu(Some(signal));
    let here = target(this_tid());
    let level = |exclude_user, exclude_kernel| Attr {
        exclude_user,
        exclude_kernel,
        ..clock_attr(GUEST_NS)
    };
    assert!(ClockPmu::is_estimate(&level(true, false)));
    assert!(!ClockPmu::is_estimate(&level(false, false)));
    let mut all = pmu.open(&level(false, false), here).unwrap();
    let mut user = pmu.open(&level(false, true), here).unwrap();
    let mut kernel = pmu.open(&level(true, false), here).unwrap();
    let mut nothing = pmu.open(&level(true, true), here).unwrap();
    for ev in [&mut all, &mut user, &mut kernel, &mut nothing] {
        ev.start(None).unwrap();
    }
    let mut last = (0, 0);
    for i in 0..40 {
        run_guest(&clock, 500_000);
        if clock.wants_ticks() {
            clock.tick(Some(if i % 2 == 0 { 0 } else { 3 }));
        }
        let now = (user.read(), kernel.read());
        assert!(now.0 >= last.0 && now.1 >= last.1);
        assert!(now.0 + now.1 <= all.read());
        last = now;
    }
    assert_eq!(nothing.read(), 0);
}
