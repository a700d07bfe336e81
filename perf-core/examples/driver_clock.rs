//! The `clock` driver without a VM: this thread acts as a vCPU with a busy guest and handles an
//! overflow.
//!
//! `cargo run --example driver_clock`
#![expect(unsafe_code, reason = "calls of the system")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use perf_core::attr::{Attr, EventType};
use perf_core::pmu::clock::{CYCLES, ClockPmu, GUEST_NS, VcpuClock};
use perf_core::pmu::{Pmu, PmuError, PmuEvent, PmuTarget, VcpuId};

static KICKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn on_kick(_: libc::c_int) {
    KICKS.fetch_add(1, Ordering::Relaxed);
}

/// Spins until `done`, as a guest would.
fn spin_until(done: impl Fn() -> bool) {
    while !done() {
        std::hint::spin_loop();
    }
}

fn main() -> Result<(), PmuError> {
    let signal = libc::SIGUSR2;
    // SAFETY: the handler only adds to an atomic; a zeroed sigaction is valid and has no
    // SA_RESTART.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_kick as extern "C" fn(libc::c_int) as usize;
        libc::sigaction(signal, &action, std::ptr::null_mut());
    }
    let clock = Arc::new(VcpuClock::for_current_thread(2_000_000));
    let pmu = ClockPmu::new(Some(signal));
    pmu.add_vcpu(VcpuId(0), Arc::clone(&clock));
    let open = |config| -> Result<Box<dyn PmuEvent>, PmuError> {
        let attr = Attr {
            ty: EventType::CLOCK,
            config,
            exclude_host: true,
            ..Attr::default()
        };
        let target = PmuTarget::Vcpu {
            vcpu: VcpuId(0),
            tid: clock.tid(),
        };
        pmu.open(&attr, target)
    };
    let mut cycles = open(CYCLES)?;
    let mut ns = open(GUEST_NS)?;
    cycles.start(Some(40_000_000))?;
    ns.start(None)?;

    // The kick may be slightly early: then no overflow is reported, and the timer is armed for the
    // remainder.
    loop {
        let kicks = KICKS.load(Ordering::Relaxed);
        clock.guest_enter();
        spin_until(|| KICKS.load(Ordering::Relaxed) > kicks);
        clock.guest_exit();
        let overflows = cycles.take_overflows();
        println!("kicked after {} cycles, overflows: {overflows}", cycles.read());
        if overflows > 0 {
            break;
        }
    }

    // Neither the VMM's own work nor a halted vCPU is counted.
    let (before, start) = (ns.read(), Instant::now());
    spin_until(|| start.elapsed() > Duration::from_millis(20));
    clock.guest_enter();
    std::thread::sleep(Duration::from_millis(20));
    clock.guest_exit();
    println!(
        "20 ms of VMM work and 20 ms halted added {} us of guest time",
        (ns.read() - before) / 1_000
    );
    println!(
        "{} ns of guest time, {} cycles at 2 GHz",
        ns.read(),
        cycles.read()
    );
    println!("privilege levels: {:?}", pmu.level_source(VcpuId(0)));
    Ok(())
}
