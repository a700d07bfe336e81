//! Tests of the `clock` driver with a real `KVM_RUN`. Without /dev/kvm, the tests print a message
//! and pass.

use std::sync::Arc;

use perf_core::pmu::clock::{ClockPmu, GUEST_NS, VcpuRunTimeClock};
use perf_core::pmu::{Pmu, PmuEventTarget, VcpuId};

use crate::common::guest::RealModeVm;
use crate::common::thread::{
    burn, catch_signals, clock_attr, signals_of_this_thread, this_tid, thread_cpu_ns,
};
use test_support::skip;

/// Machine code of `jmp .`, an endless loop.
const JUMP_TO_SELF: [u8; 2] = [0xeb, 0xfe];

/// Creates a guest that loops endlessly on this thread, and a `clock` driver with its vCPU.
fn spinning_guest() -> Option<(RealModeVm, Arc<VcpuRunTimeClock>, ClockPmu, PmuEventTarget)> {
    let Some(guest) = RealModeVm::new(1, &JUMP_TO_SELF) else {
        skip::skipped("no usable /dev/kvm", false);
        return None;
    };
    let clock = Arc::new(VcpuRunTimeClock::for_current_thread(2_000_000));
    let pmu = ClockPmu::new(Some(catch_signals()));
    pmu.add_vcpu(VcpuId(0), Arc::clone(&clock));
    let (vcpu, tid) = (VcpuId(0), this_tid());
    Some((guest, clock, pmu, PmuEventTarget::Vcpu { vcpu, tid }))
}

/// Each overflow forces a guest that never exits by itself out of `KVM_RUN`, with EINTR. The clock
/// counts the guest's time but not the VMM's time in between.
#[test]
fn overflows_take_a_spinning_guest_out_of_kvm_run() {
    let Some((mut guest, clock, pmu, target)) = spinning_guest() else {
        return;
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
        // Saved before the timer is re-armed, because the next signal arrives first if this thread
        // then loses its CPU.
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

/// All time of a guest that never leaves privilege level 0 is attributed to level 0, regardless of
/// how the host reports guest time.
#[test]
fn time_is_attributed_to_current_guest_level() {
    let Some((mut guest, clock, pmu, target)) = spinning_guest() else {
        return;
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
        // The guest never exits by itself, so a signal caused the exit.
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
