//! Timers with signals that announce overflows of clock events, poll for late overflows of host
//! events, or request a sample of the guest's privilege level.
//!
//! These are POSIX timers rather than host perf events. A perf event sends its signal from a
//! separate interrupt (`irq_work`), which an emulated host may delay until the next scheduler tick.
//! A perf clock event also repeats at its period until it is reprogrammed, and at short periods the
//! host kernel may mistake this for a hung timer interrupt. A POSIX timer sends its signal directly
//! from the timer interrupt, is one-shot, and takes one system call to arm. Whether it has expired
//! is determined from the monotonic clock, without a system call. Timers run on wall-clock time,
//! which advances at least as fast as guest time.
#![expect(unsafe_code, reason = "system calls, and memory shared with the kernel")]

use std::io;
use std::mem::MaybeUninit;
use std::ptr;

/// A POSIX timer that sends a signal to one thread of this process.
#[derive(Debug)]
pub(super) struct Timer {
    id: libc::timer_t,
    /// Expiry time on the monotonic clock, in nanoseconds. The timer may expire early by at most
    /// the duration of the [`Timer::set`] call, and never expires late. A time in the past means
    /// expired or disarmed.
    expiry_ns: u64,
}

// SAFETY: a POSIX timer id is a number that is valid in the whole process, and any thread may use
// it.
unsafe impl Send for Timer {}

impl Timer {
    /// Creates a disarmed timer that sends `signal` to thread `tid` when it expires.
    pub(super) fn open(tid: i32, signal: i32) -> io::Result<Self> {
        // SAFETY: an all-zero `sigevent` is a valid value of this plain C struct.
        let mut event: libc::sigevent = unsafe { MaybeUninit::zeroed().assume_init() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = signal;
        event.sigev_notify_thread_id = tid;
        let mut id = ptr::null_mut();
        // SAFETY: both pointers refer to live locals of the right types.
        match unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut id) } {
            0 => Ok(Self { id, expiry_ns: 0 }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Arms the timer to expire once, `ns` nanoseconds from now (at least 1), and replaces any
    /// earlier setting. Takes one system call.
    pub(super) fn set(&mut self, ns: u64) -> io::Result<()> {
        // Read before the call, so that the timer cannot expire before the computed time.
        self.expiry_ns = wall_ns().saturating_add(ns);
        self.settime(ns.max(1), 0)
    }

    /// Arms the timer to expire `ns` nanoseconds from now (at least 1), and then every
    /// `interval_ns` nanoseconds. Takes one system call.
    #[cfg(feature = "clock")]
    pub(super) fn set_repeating(&self, ns: u64, interval_ns: u64) -> io::Result<()> {
        self.settime(ns.max(1), interval_ns)
    }

    /// Disarms the timer. Takes one system call.
    pub(super) fn stop(&self) -> io::Result<()> {
        self.settime(0, 0)
    }

    /// Returns `true` if the timer has expired since it was armed, or its expiry is imminent.
    pub(super) fn has_expired(&self) -> bool {
        wall_ns() >= self.expiry_ns
    }

    /// Returns the time until the timer expires, in nanoseconds, or 0 if the timer has expired or
    /// is disarmed.
    #[cfg(feature = "clock")]
    pub(super) fn left_ns(&self) -> u64 {
        self.expiry_ns.saturating_sub(wall_ns())
    }

    /// Arms the timer for `ns` nanoseconds, or disarms it if `ns` is 0.
    fn settime(&self, ns: u64, interval_ns: u64) -> io::Result<()> {
        // Neither conversion overflows, because 2^64 ns are only 585 years.
        let time = |ns: u64| libc::timespec {
            tv_sec: (ns / 1_000_000_000).cast_signed(),
            tv_nsec: (ns % 1_000_000_000).cast_signed(),
        };
        let spec = libc::itimerspec {
            it_interval: time(interval_ns),
            it_value: time(ns),
        };
        // SAFETY: the timer exists as long as `self`, `spec` is a live local, and a null pointer is
        // allowed for the previous setting.
        match unsafe { libc::timer_settime(self.id, 0, &spec, ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: the timer was created by `open` and is deleted only here.
        unsafe { libc::timer_delete(self.id) };
    }
}

/// Returns the monotonic clock in nanoseconds. Takes no system call if the vDSO provides this clock
/// (`vdso(7)`).
pub(super) fn wall_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

/// Returns the CPU time of the calling thread, in nanoseconds (CLOCK_THREAD_CPUTIME_ID,
/// `clock_gettime(2)`).
#[must_use]
pub fn thread_run_time_ns() -> u64 {
    clock_ns(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Returns the time of clock `id` in nanoseconds, or 0 if the clock does not exist.
pub(super) fn clock_ns(id: libc::clockid_t) -> u64 {
    let mut ts = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `ts` is a writable timespec, and an invalid clock id fails with EINVAL.
    if unsafe { libc::clock_gettime(id, &mut ts) } != 0 {
        return 0;
    }
    ts.tv_sec.cast_unsigned() * 1_000_000_000 + ts.tv_nsec.cast_unsigned()
}
