//! Helpers for tests in which the calling thread is a vCPU: CPU time, work of a known duration, and
//! a count of signals per thread.
#![expect(unsafe_code, reason = "calls of the system")]

use std::cell::Cell;
use std::ptr;

use perf_core::attr::{Attr, EventType};

thread_local! {
    static SIGNALS: Cell<u64> = const { Cell::new(0) };
    static FLAG: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
}

extern "C" fn on_signal(_: libc::c_int) {
    SIGNALS.with(|n| n.set(n.get() + 1));
    let flag = FLAG.with(Cell::get);
    if !flag.is_null() {
        // SAFETY: the caller of `raise_on_signals` guarantees that the byte stays writable.
        unsafe { flag.write_volatile(1) };
    }
}

/// Makes each signal of this thread set the byte `flag` to 1 from now on. If this is the
/// `immediate_exit` flag of a vCPU, a signal just before `KVM_RUN` is not lost.
///
/// # Safety
/// The byte must stay writable while this thread receives signals, or until the next call.
pub unsafe fn raise_on_signals(flag: *mut u8) {
    FLAG.with(|f| f.set(flag));
}

/// Installs a handler that counts the signals `signal` of each thread. System calls that the signal
/// interrupts are not restarted.
pub fn catch(signal: i32) -> i32 {
    perf_core::pmu::host::ignore_sigio().unwrap();
    // SAFETY: a zeroed sigaction is valid; the handler only accesses a constant-initialized thread
    // local.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_signal as extern "C" fn(libc::c_int) as usize;
        assert_eq!(libc::sigaction(signal, &action, std::ptr::null_mut()), 0);
    }
    signal
}

/// Installs the counting handler for the signal that most tests use. The signal is a standard one,
/// because the queue of real-time signals may be full.
pub fn catch_signals() -> i32 {
    catch(libc::SIGUSR2)
}

/// Returns the number of signals that the counting handler has received on this thread.
pub fn signals_of_this_thread() -> u64 {
    SIGNALS.with(Cell::get)
}

/// Returns the CPU time of this thread, in nanoseconds.
pub fn thread_cpu_ns() -> u64 {
    // SAFETY: the timespec is writable.
    unsafe {
        let mut ts: libc::timespec = std::mem::zeroed();
        assert_eq!(libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut ts), 0);
        ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64
    }
}

/// Uses `ns` nanoseconds of this thread's CPU time.
pub fn burn(ns: u64) {
    let end = thread_cpu_ns() + ns;
    while thread_cpu_ns() < end {
        for _ in 0..100 {
            std::hint::spin_loop();
        }
    }
}

/// Returns this thread's ID.
pub fn this_tid() -> i32 {
    // SAFETY: gettid cannot fail.
    unsafe { libc::syscall(libc::SYS_gettid) as i32 }
}

/// Returns the attributes of a counting event of the `clock` driver.
pub fn clock_attr(config: u64) -> Attr {
    Attr {
        ty: EventType::CLOCK,
        config,
        exclude_host: true,
        ..Attr::default()
    }
}
