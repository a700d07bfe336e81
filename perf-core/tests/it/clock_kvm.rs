//! The `clock` driver around a real `KVM_RUN`. Needs /dev/kvm; passes without it, saying so.

use std::sync::Arc;

use perf_core::pmu::clock::{ClockPmu, GUEST_NS, VcpuClock};
use perf_core::pmu::{Pmu, Target, VcpuId};

use crate::common::guest::Guest;
use crate::common::skip;
use crate::common::thread::{
    burn, catch_signals, clock_attr, signals_of_this_thread, this_tid, thread_cpu_ns,
};

/// `jmp .`
const JUMP_TO_SELF: [u8; 2] = [0xeb, 0xfe];

/// A guest that never exits by itself is taken out of `KVM_RUN` by each overflow, with EINTR, and the clock
/// counts the time it ran and not what the VMM used in between.
#[test]
fn overflows_take_a_spinning_guest_out_of_kvm_run() {
    let Some(mut guest) = Guest::new(1, &JUMP_TO_SELF) else {
        skip::skipped("no usable /dev/kvm", false);
        return;
    };
    let signal = catch_signals();
    let clock = Arc::new(VcpuClock::for_current_thread(2_000_000));
    let pmu = ClockPmu::new(Some(signal));
    pmu.add_vcpu(VcpuId(0), Arc::clone(&clock));
    let target = Target::Vcpu {
        vcpu: VcpuId(0),
        tid: this_tid(),
    };
    let mut ev = pmu.open(&clock_attr(GUEST_NS), target).unwrap();
    const PERIOD: u64 = 1_000_000;
    let mut due = PERIOD;
    let (mut outer, mut overflows) = (0, 0);
    let mut handled = signals_of_this_thread();
    ev.start(Some(PERIOD)).unwrap();
    while overflows < 10 {
        let before = thread_cpu_ns();
        clock.guest_enter();
        let exit = guest.run_until_signal(handled).map(|exit| format!("{exit:?}"));
        clock.guest_exit();
        outer += thread_cpu_ns() - before;
        match exit {
            Err(e) => assert_eq!(e.errno(), libc::EINTR),
            Ok(exit) => panic!("the guest left by {exit}"),
        }
        assert!(signals_of_this_thread() > handled, "EINTR with no signal");
        // Before the timer is set again: if this thread loses its CPU right after that, the next signal comes
        // before anything else does.
        handled = signals_of_this_thread();
        burn(200_000);
        if ev.take_overflows() == 1 {
            assert!(ev.read() >= due);
            due = ev.read() + PERIOD;
            ev.arm(PERIOD).unwrap();
            overflows += 1;
        }
    }
    let counted = ev.read();
    assert!(counted >= 10 * PERIOD);
    assert!(counted <= outer, "{counted} ns counted, {outer} ns run");
}

/// A guest that never leaves level 0: all time that is attributed goes to level 0, whichever way the host
/// shows it.
#[test]
fn time_goes_to_the_level_the_guest_is_at() {
    let Some(mut guest) = Guest::new(1, &JUMP_TO_SELF) else {
        skip::skipped("no usable /dev/kvm", false);
        return;
    };
    let signal = catch_signals();
    let clock = Arc::new(VcpuClock::for_current_thread(2_000_000));
    let pmu = ClockPmu::new(Some(signal));
    pmu.add_vcpu(VcpuId(0), Arc::clone(&clock));
    let target = Target::Vcpu {
        vcpu: VcpuId(0),
        tid: this_tid(),
    };
    let open = |exclude_user, exclude_kernel| {
        let attr = perf_core::attr::Attr {
            exclude_user,
            exclude_kernel,
            ..clock_attr(GUEST_NS)
        };
        pmu.open(&attr, target).unwrap()
    };
    let mut all = open(false, false);
    let (mut user, mut kernel) = (open(false, true), open(true, false));
    user.start(None).unwrap();
    kernel.start(None).unwrap();
    const PERIOD: u64 = 5_000_000;
    let mut handled = signals_of_this_thread();
    all.start(Some(PERIOD)).unwrap();
    for _ in 0..400 {
        clock.guest_enter();
        // It only ever leaves by a signal.
        let left = guest.run_until_signal(handled).is_err();
        clock.guest_exit();
        assert!(left);
        handled = signals_of_this_thread();
        if clock.wants_ticks() {
            clock.tick(Some(0));
        }
        if all.take_overflows() == 1 {
            all.arm(PERIOD).unwrap();
        }
        if kernel.read() > 50_000_000 {
            break;
        }
    }
    assert!(
        kernel.read() > 50_000_000,
        "{} of {} ns",
        kernel.read(),
        all.read()
    );
    assert_eq!(user.read(), 0);
    assert!(kernel.read() <= all.read() + 1_000_000);
}
