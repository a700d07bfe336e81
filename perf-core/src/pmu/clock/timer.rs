//! The timers whose signals announce overflows of clock events, or ask for the guest's privilege level.
//!
//! A POSIX timer, not a host perf event. A perf event's signal is sent by an interrupt of its own that
//! follows the timer's (`irq_work`), and which may come as late as the next scheduler tick on an emulated
//! host; and a perf clock event goes on ringing at its period until it is given another, which at short
//! periods is enough for the host kernel to see its timer interrupt hang. A POSIX timer signals from the
//! timer's interrupt itself, rings once, and takes one system call to set; whether it has rung is told by the
//! time on the wall, without one. Its time is the wall's, which passes at least as fast as the guest's.
#![expect(unsafe_code, reason = "system calls, and memory shared with the kernel")]

use std::io;
use std::mem::MaybeUninit;
use std::ptr;

/// The shortest time an overflow timer is set to, ns.
pub const MIN_TIMER_NS: u64 = 10_000;

/// A timer that signals one thread of this process.
#[derive(Debug)]
pub(super) struct Timer {
    id: libc::timer_t,
    /// When [`Timer::set`] has it ring, by the wall's clock, or before that by no more than the call took
    /// that set it; never later. Past: it has rung, or is not set.
    due_ns: u64,
}

// SAFETY: a POSIX timer id is a number of the process; its calls may come from any thread.
unsafe impl Send for Timer {}

impl Timer {
    /// A timer that sends `signal` to thread `tid`, not set.
    pub(super) fn open(tid: i32, signal: i32) -> io::Result<Self> {
        // SAFETY: an all-zero sigevent is a valid value of that plain C struct.
        let mut event: libc::sigevent = unsafe { MaybeUninit::zeroed().assume_init() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = signal;
        event.sigev_notify_thread_id = tid;
        let mut id = ptr::null_mut();
        // SAFETY: both pointers are to live locals of the right types.
        match unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut id) } {
            0 => Ok(Self { id, due_ns: 0 }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Rings once, `ns` from now (at least 1), instead of when it was to ring before. One system call.
    pub(super) fn set(&mut self, ns: u64) -> io::Result<()> {
        // Read before the call, so that the timer cannot ring before this.
        self.due_ns = wall_ns().saturating_add(ns);
        self.settime(ns.max(1), 0)
    }

    /// Rings `ns` from now (at least 1), and then every `again_ns`. One system call.
    pub(super) fn set_repeating(&self, ns: u64, again_ns: u64) -> io::Result<()> {
        self.settime(ns.max(1), again_ns)
    }

    /// Does not ring any more. One system call.
    pub(super) fn stop(&self) -> io::Result<()> {
        self.settime(0, 0)
    }

    /// Whether it has rung since it was set, or is about to.
    pub(super) fn rang(&self) -> bool {
        wall_ns() >= self.due_ns
    }

    /// How long until it rings, ns; 0: it has rung, or is not set.
    pub(super) fn left_ns(&self) -> u64 {
        self.due_ns.saturating_sub(wall_ns())
    }

    /// Sets it, or stops it with 0.
    fn settime(&self, ns: u64, again_ns: u64) -> io::Result<()> {
        // At most 2^64 ns are 585 years: both parts fit.
        let time = |ns: u64| libc::timespec {
            tv_sec: (ns / 1_000_000_000).cast_signed(),
            tv_nsec: (ns % 1_000_000_000).cast_signed(),
        };
        let spec = libc::itimerspec {
            it_interval: time(again_ns),
            it_value: time(ns),
        };
        // SAFETY: the timer lives as long as `self`; `spec` is a live local, and the former time is not asked
        // for.
        match unsafe { libc::timer_settime(self.id, 0, &spec, ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: the timer was made by `open` and is deleted only here.
        unsafe { libc::timer_delete(self.id) };
    }
}

/// Time on the wall, ns. No system call where the kernel's clock can be read without one (`vdso(7)`).
pub(super) fn wall_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

/// What the clock `id` shows, ns; 0 if there is none.
pub(super) fn clock_ns(id: libc::clockid_t) -> u64 {
    let mut ts = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `ts` is a writable timespec; a clock id that names nothing fails with EINVAL.
    if unsafe { libc::clock_gettime(id, &mut ts) } != 0 {
        return 0;
    }
    ts.tv_sec.cast_unsigned() * 1_000_000_000 + ts.tv_nsec.cast_unsigned()
}
