//! The timer whose signal takes a vCPU out of its guest.
//!
//! A POSIX timer, not a host perf event. A perf event's signal is sent by an interrupt of its own that follows the timer's
//! (`irq_work`), and which may come as late as the next scheduler tick on an emulated host; and a perf clock event goes on
//! ringing at its period until it is given another, which at short periods is enough for the host kernel to see its timer
//! interrupt hang. A POSIX timer signals from the timer's interrupt itself, and takes one system call to set. The kernel
//! starts its interval, if it has one, when the signal is delivered, so that nothing piles up while it is not.
#![allow(unsafe_code)]

use std::fmt::Debug;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;

/// What an alarm rings with. Times are those of `CLOCK_MONOTONIC`.
pub(super) trait Bell: Debug {
    /// Rings at `at_ns`, and every `again_ns` from there, instead of when it was to ring before. One system call.
    fn set(&mut self, at_ns: u64, again_ns: u64) -> io::Result<()>;

    /// Does not ring any more. One system call.
    fn stop(&mut self) -> io::Result<()>;
}

/// A timer that signals one thread of this process.
#[derive(Debug)]
pub(super) struct Timer(libc::timer_t);

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
            0 => Ok(Self(id)),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Sets it; a first time of 0 stops it.
    fn settime(&self, first_ns: u64, again_ns: u64) -> io::Result<()> {
        let spec = libc::itimerspec {
            it_interval: timespec(again_ns),
            it_value: timespec(first_ns),
        };
        // SAFETY: the timer lives as long as `self`, and `spec` is a live local. What was left of the former time is not asked.
        match unsafe { libc::timer_settime(self.0, libc::TIMER_ABSTIME, &spec, ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Bell for Timer {
    fn set(&mut self, at_ns: u64, again_ns: u64) -> io::Result<()> {
        self.settime(at_ns.max(1), again_ns)
    }

    fn stop(&mut self) -> io::Result<()> {
        self.settime(0, 0)
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: the timer was made by `open` and is deleted only here.
        unsafe { libc::timer_delete(self.0) };
    }
}

/// `CLOCK_MONOTONIC` now, ns. No system call where the kernel lets clocks be read from user space.
pub(super) fn monotonic_ns() -> u64 {
    let mut now = timespec(0);
    // SAFETY: `now` is a writable timespec. The clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn timespec(ns: u64) -> libc::timespec {
    libc::timespec {
        // At most 2^64 ns are 585 years: both parts fit.
        tv_sec: (ns / 1_000_000_000) as libc::time_t,
        tv_nsec: (ns % 1_000_000_000) as libc::c_long,
    }
}
