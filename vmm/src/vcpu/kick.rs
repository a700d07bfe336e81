//! Making a vCPU leave KVM_RUN: the signals, and why none of them can be lost.
//!
//! Two signals reach a vCPU thread. The *kick* asks it to look at its run state (pause, stop, a PMI that
//! waits). The *overflow* signal is sent by the host kernel when a perf event of this vCPU overflows. Both handlers
//! set `kvm_run.immediate_exit` of the thread they run on. The run loop clears that byte *before* it looks at what the
//! signals announce, so a signal that arrives after the look makes the next KVM_RUN return at once.
//!
//! Both are standard signals, not real-time ones: those queue, and the queue, one for all processes of a user, can be
//! full, which would lose a kick. Standard signals of a kind merge while one is pending, which loses nothing, because
//! what they announce is looked up and not counted.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence};
use std::time::Duration;

use kvm_bindings::kvm_run;
use kvm_ioctls::VcpuFd;
use libc::{c_int, c_void, siginfo_t};
use vmm_sys_util::signal::register_signal_handler;

thread_local! {
    /// `immediate_exit` of the vCPU this thread runs; null while it runs none.
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
    /// An overflow signal came since the last [`take_overflow`].
    static OVERFLOW: AtomicBool = const { AtomicBool::new(false) };
}

/// The signal that kicks a vCPU thread.
pub fn kick_signal() -> c_int {
    libc::SIGUSR1
}

/// The signal that host perf events send to the vCPU thread at an overflow.
pub fn overflow_signal() -> c_int {
    libc::SIGUSR2
}

extern "C" fn on_kick(_: c_int, _: *mut siginfo_t, _: *mut c_void) {
    request_exit();
}

extern "C" fn on_overflow(_: c_int, _: *mut siginfo_t, _: *mut c_void) {
    OVERFLOW.with(|flag| flag.store(true, Ordering::Relaxed));
    request_exit();
}

/// Async-signal-safe: only touches const-initialised thread-locals without destructors and one byte of shared memory.
fn request_exit() {
    let byte = IMMEDIATE_EXIT.get();
    if !byte.is_null() {
        // SAFETY: a non-null pointer was stored by `Armed::new` from the mapping of the vCPU this very thread runs and is
        // cleared when that `Armed` is dropped, before the mapping goes. Volatile, because the kernel reads it.
        unsafe { byte.write_volatile(1) };
    }
}

/// Installs both handlers for the process.
///
/// # Errors
/// The system call's error.
pub fn install_handlers() -> io::Result<()> {
    for (signal, handler) in [
        (kick_signal(), on_kick as _),
        (overflow_signal(), on_overflow as _),
    ] {
        register_signal_handler(signal, handler).map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
    }
    Ok(())
}

/// This thread runs a vCPU: signals set its `immediate_exit` until this is dropped.
#[derive(Debug)]
pub struct Armed(*mut kvm_run);

impl Armed {
    /// Arms the current thread for `vcpu`, which must outlive the result.
    pub fn new(vcpu: &mut VcpuFd) -> Self {
        let run = vcpu.get_kvm_run();
        IMMEDIATE_EXIT.set(&mut run.immediate_exit);
        Self(run)
    }

    /// Clears the request to leave; to be called before looking at what a signal may have announced.
    pub fn clear(&self) {
        // SAFETY: `self.0` is the kvm_run mapping of the vCPU this thread runs, which outlives `self`.
        unsafe { (&raw mut (*self.0).immediate_exit).write_volatile(0) };
        // The handler runs on this thread, so program order is all that is needed.
        compiler_fence(Ordering::SeqCst);
    }

    /// Bytes of one access of the port I/O exit that is being handled; string instructions exit with several accesses in
    /// one buffer.
    pub fn io_width(&self) -> usize {
        // SAFETY: `self.0` is the kvm_run mapping of the vCPU this thread runs, which outlives `self`. Every bit pattern
        // of the union is a valid `io` (plain integers); the field is only written by KVM_RUN on this thread.
        usize::from(unsafe { (&raw const (*self.0).__bindgen_anon_1.io.size).read() })
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        IMMEDIATE_EXIT.set(ptr::null_mut());
    }
}

/// A timer that kicks the thread that made it: for what must be looked at again although the guest may not exit, such as
/// a PMI that waits for the guest to unmask LVTPC.
#[derive(Debug)]
pub struct KickTimer(libc::timer_t);

// SAFETY: a POSIX timer id belongs to the process; timer_settime and timer_delete may be called from any thread.
unsafe impl Send for KickTimer {}

impl KickTimer {
    /// A disarmed timer for the current thread.
    ///
    /// # Errors
    /// The error of `timer_create(2)`.
    pub fn for_current_thread() -> io::Result<Self> {
        // SAFETY: an all-zero sigevent is a valid value of that plain C struct.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = kick_signal();
        // SAFETY: gettid takes nothing and cannot fail.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        let mut timer = ptr::null_mut();
        // SAFETY: both pointers are to live locals of the right types.
        match unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer) } {
            0 => Ok(Self(timer)),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Kicks once, after `delay`; replaces an earlier request. A zero delay counts as one nanosecond.
    pub fn kick_in(&self, delay: Duration) {
        let delay = delay.max(Duration::from_nanos(1));
        let spec = libc::itimerspec {
            it_interval: libc::timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: libc::timespec {
                tv_sec: libc::time_t::try_from(delay.as_secs()).unwrap_or(libc::time_t::MAX),
                tv_nsec: libc::c_long::from(delay.subsec_nanos()),
            },
        };
        // SAFETY: the timer lives as long as `self`, and `spec` is a live local.
        if unsafe { libc::timer_settime(self.0, 0, &spec, ptr::null_mut()) } != 0 {
            log::error!("timer_settime: {}", io::Error::last_os_error());
        }
    }
}

impl Drop for KickTimer {
    fn drop(&mut self) {
        // SAFETY: the timer was made by `for_current_thread` and is deleted only here.
        unsafe { libc::timer_delete(self.0) };
    }
}

/// Whether an overflow signal waits for [`take_overflow`].
pub fn overflow_waits() -> bool {
    OVERFLOW.with(|flag| flag.load(Ordering::Relaxed))
}

/// Whether an overflow signal came since the last call on this thread.
pub fn take_overflow() -> bool {
    OVERFLOW.with(|flag| flag.load(Ordering::Relaxed) && flag.swap(false, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An overflow signal to this thread is seen once, and without a vCPU it touches nothing else.
    #[test]
    fn overflow_signal_is_taken_exactly_once() {
        install_handlers().unwrap();
        assert!(!take_overflow());
        // SAFETY: raise(3) with a signal whose handler was just installed.
        assert_eq!(unsafe { libc::raise(overflow_signal()) }, 0);
        assert!(take_overflow());
        assert!(!take_overflow());
    }
}
