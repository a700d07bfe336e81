//! Signals that force a vCPU out of KVM_RUN, delivered without loss.
//!
//! A vCPU thread receives two signals. The *kick* makes the thread check for changes such as a
//! pause, a stop or a pending PMI. The *overflow* signal comes from the host kernel when a perf
//! event of the vCPU overflows. Both signal handlers set `kvm_run.immediate_exit` of the vCPU that
//! the thread runs ([`crate::kvm::kickable_vcpu`]). The run loop clears that byte and *then* checks
//! for changes. After a signal that arrives later, the next KVM_RUN therefore returns immediately.
//!
//! Kick and overflow are standard signals, which coalesce while pending. Nothing is lost, because
//! the receiver checks for changes and does not count signals. Real-time signals would be queued.
//! The length of the queue is limited per user, so a kick could be lost.
//!
//! A vCPU that receives many overflow signals blocks them and fetches them with a system call,
//! which costs less than a signal handler; see [`OverflowSignalDelivery`].
#![expect(unsafe_code, reason = "signals, their masks and timers")]

use std::cell::Cell;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use libc::{c_int, c_void, siginfo_t};
use vmm_sys_util::signal::{create_sigset, register_signal_handler};

use crate::kvm::kickable_vcpu::request_exit_of_current_vcpu;
use crate::kvm::signal_mask;
use crate::kvm::vcpu_fd::VcpuFd;
use crate::pmu::overflow_signal;
use crate::pmu::remote_open::open_in_handler;

thread_local! {
    /// `true` if this thread has received an overflow signal since the last [`take_overflow`].
    static OVERFLOW: AtomicBool = const { AtomicBool::new(false) };
}

/// Returns the signal that kicks a vCPU thread.
pub fn kick_signal() -> c_int {
    libc::SIGUSR1
}

extern "C" fn on_kick(_: c_int, _: *mut siginfo_t, _: *mut c_void) {
    request_exit_of_current_vcpu();
    open_in_handler();
}

extern "C" fn on_overflow(_: c_int, _: *mut siginfo_t, _: *mut c_void) {
    OVERFLOW.with(|flag| flag.store(true, Ordering::Relaxed));
    request_exit_of_current_vcpu();
}

/// Installs the handlers for the kick and the overflow signal.
///
/// # Errors
/// Returns an error if `sigaction(2)` fails.
pub fn install_handlers() -> io::Result<()> {
    for (signal, handler) in [
        (kick_signal(), on_kick as _),
        (overflow_signal(), on_overflow as _),
    ] {
        register_signal_handler(signal, handler).map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
    }
    Ok(())
}

/// Timer that kicks its own vCPU thread. Used for conditions that must be checked again even if the
/// guest does not exit, such as a PMI that waits until the guest unmasks LVTPC.
#[derive(Debug)]
pub struct KickTimer {
    timer: libc::timer_t,
    /// Time at which the timer fires or has fired; `None` before it is first armed.
    due: Cell<Option<Instant>>,
}

impl KickTimer {
    /// Creates a timer for the current thread, which is not armed yet.
    ///
    /// # Errors
    /// Returns an error if `timer_create(2)` fails.
    pub fn for_current_thread() -> io::Result<Self> {
        // SAFETY: an all-zero `sigevent` is a valid value of that plain C struct.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = kick_signal();
        // SAFETY: `gettid` has no arguments and cannot fail.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        let mut timer = ptr::null_mut();
        // SAFETY: both pointers refer to live locals of the correct types.
        match unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer) } {
            0 => Ok(Self {
                timer,
                due: Cell::new(None),
            }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Tolerance when the same kick is requested again. Each request reads the clock, so the
    /// resulting times differ slightly.
    const SLACK: Duration = Duration::from_micros(200);

    /// Arms the timer to kick the thread after `delay`, or after one nanosecond if `delay` is zero.
    ///
    /// An earlier kick that is already armed stays armed. After a kick, all parts of the run loop
    /// that wait for a kick request one again, with the remaining delay. A request for a time at
    /// which the timer fires anyway, within a small tolerance, makes no system call.
    pub fn kick_in(&self, delay: Duration) {
        let now = Instant::now();
        let soon = now + delay + Self::SLACK;
        if self.due.get().is_some_and(|due| now < due && due <= soon) {
            return;
        }
        self.due.set(Some(now + delay));
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
        if unsafe { libc::timer_settime(self.timer, 0, &spec, ptr::null_mut()) } != 0 {
            log::error!("timer_settime: {}", io::Error::last_os_error());
        }
    }
}

impl Drop for KickTimer {
    fn drop(&mut self) {
        // SAFETY: the timer was created by `for_current_thread` and is deleted only here.
        unsafe { libc::timer_delete(self.timer) };
    }
}

/// Maximum number of exits between two overflow signals at which overflow signals are switched from
/// handled to held mode.
const MAX_EXITS_TO_HOLD: u32 = 8;
/// Maximum number of exits since the last overflow signal at which overflow signals stay in held
/// mode.
const MAX_EXITS_WHILE_HELD: u32 = 32;

/// Delivery mode of the overflow signals of one vCPU.
///
/// *Handled*: the signal interrupts the thread and its handler runs. A signal handler costs more
/// than a system call, and several times more on an emulated host.
///
/// *Held*: the thread blocks the signal, except during KVM_RUN (`KVM_SET_SIGNAL_MASK`). KVM_RUN
/// then returns EINTR and leaves the signal pending, and the thread fetches the signal with one
/// system call. A signal that arrives outside KVM_RUN ends the next KVM_RUN immediately, so no
/// signal is lost.
///
/// In held mode, KVM changes the thread's signal mask twice per KVM_RUN under a process-wide lock.
/// The mode is therefore used only while a substantial share of the exits is due to overflow
/// signals, as on a sampled vCPU.
#[derive(Debug)]
pub struct OverflowSignalDelivery {
    held: bool,
    /// `true` if the delivery mode must not be switched any more, because a switch has failed.
    stays: bool,
    /// Number of exits since the last overflow signal.
    exits: u32,
}

impl Default for OverflowSignalDelivery {
    fn default() -> Self {
        Self {
            held: false,
            stays: false,
            exits: u32::MAX,
        }
    }
}

impl OverflowSignalDelivery {
    /// Records that KVM_RUN has returned. `by_signal` states whether a signal ended the call. If
    /// the signal was the overflow signal, [`take_overflow`] then returns `true`. Makes at most one
    /// system call.
    pub fn after_exit(&mut self, by_signal: bool) {
        self.exits = self.exits.saturating_add(1);
        if self.held && by_signal {
            fetch();
        }
    }

    /// Selects the delivery mode for the next entry. `signalled` is the result of
    /// [`take_overflow`]. Makes two system calls if the mode changes, and none otherwise.
    pub fn before_entry(&mut self, vcpu: &VcpuFd, signalled: bool) {
        let hold = if signalled {
            self.held || self.exits <= MAX_EXITS_TO_HOLD
        } else {
            self.held && self.exits <= MAX_EXITS_WHILE_HELD
        };
        if signalled {
            self.exits = 0;
        }
        if hold == self.held || self.stays {
            return;
        }
        let changed = if hold {
            hold_signals(vcpu)
        } else {
            handle_signals(vcpu)
        };
        match changed {
            Ok(()) => self.held = hold,
            Err(e) => {
                log::debug!("overflow signals stay as they are: {e}");
                self.stays = true;
            }
        }
    }

    /// Switches back to handled mode, because the vCPU moves to another thread.
    pub fn restore_handled_mode(&mut self, vcpu: &VcpuFd) {
        if self.held
            && let Err(e) = handle_signals(vcpu)
        {
            log::warn!("cannot unblock overflow signals in a vCPU thread: {e}");
        }
        *self = Self::default();
    }
}

/// Switches to held mode: this thread blocks the overflow signal, except during KVM_RUN.
fn hold_signals(vcpu: &VcpuFd) -> io::Result<()> {
    let overflow = only_overflow()?;
    let mut before = overflow;
    // SAFETY: both pointers refer to live signal sets.
    check(unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &overflow, &mut before) })?;
    if let Err(refused) = signal_mask::set(vcpu, &before) {
        // SAFETY: `overflow` is a live signal set, and a null pointer is allowed for the old mask.
        check(unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &overflow, ptr::null_mut()) })?;
        return Err(refused);
    }
    Ok(())
}

/// Switches to handled mode. The handler of a pending overflow signal runs within this call.
fn handle_signals(vcpu: &VcpuFd) -> io::Result<()> {
    signal_mask::clear(vcpu)?;
    let overflow = only_overflow()?;
    // SAFETY: `overflow` is a live signal set, and a null pointer is allowed for the old mask.
    check(unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &overflow, ptr::null_mut()) })
}

/// Fetches a pending overflow signal in held mode. Like the signal handler, sets [`OVERFLOW`].
fn fetch() {
    let Ok(overflow) = only_overflow() else { return };
    let at_once = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the set and the timeout are live locals, and a null pointer is allowed for the signal
    // information.
    if unsafe { libc::sigtimedwait(&overflow, ptr::null_mut(), &at_once) } == overflow_signal() {
        OVERFLOW.with(|flag| flag.store(true, Ordering::Relaxed));
    }
}

/// Returns a signal set that contains only the overflow signal.
fn only_overflow() -> io::Result<libc::sigset_t> {
    create_sigset(&[overflow_signal()]).map_err(io::Error::from)
}

/// Converts the return value of a pthread function, an error number or 0, to a `Result`.
fn check(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Returns `true` if [`take_overflow`] will return `true`.
pub fn is_overflow_pending() -> bool {
    OVERFLOW.with(|flag| flag.load(Ordering::Relaxed))
}

/// Returns `true` if this thread has received an overflow signal since the last call.
pub fn take_overflow() -> bool {
    OVERFLOW.with(|flag| flag.load(Ordering::Relaxed) && flag.swap(false, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overflow_signal_is_taken_exactly_once() {
        install_handlers().unwrap();
        assert!(!take_overflow());
        // SAFETY: `raise(3)` with a signal whose handler was just installed.
        assert_eq!(unsafe { libc::raise(overflow_signal()) }, 0);
        assert!(take_overflow());
        assert!(!take_overflow());
    }

    /// Returns the time until the timer fires, or zero if the timer is not armed.
    fn left(timer: &KickTimer) -> Duration {
        // SAFETY: an all-zero `itimerspec` is a valid value of that plain C struct.
        let mut spec: libc::itimerspec = unsafe { std::mem::zeroed() };
        // SAFETY: the timer is alive, and `spec` is a live local.
        assert_eq!(unsafe { libc::timer_gettime(timer.timer, &mut spec) }, 0);
        Duration::new(
            spec.it_value.tv_sec.try_into().unwrap(),
            spec.it_value.tv_nsec.try_into().unwrap(),
        )
    }

    /// If several kicks are requested, the timer fires at the earliest time, whatever the order of
    /// the requests.
    #[test]
    fn later_kick_request_does_not_delay_earlier() {
        let timer = KickTimer::for_current_thread().unwrap();
        assert_eq!(left(&timer), Duration::ZERO);
        timer.kick_in(Duration::from_secs(7200));
        assert!(left(&timer) > Duration::from_secs(3600));
        timer.kick_in(Duration::from_secs(3600));
        let urgent = left(&timer);
        assert!(
            !urgent.is_zero() && urgent <= Duration::from_secs(3600),
            "{urgent:?}"
        );
        timer.kick_in(Duration::from_secs(7200));
        assert!(left(&timer) <= urgent, "it is not put off");
    }

    /// If a kick is requested again for the same time, no system call is made and the timer does
    /// not change.
    #[test]
    fn repeated_kick_request_keeps_timer() {
        let timer = KickTimer::for_current_thread().unwrap();
        let hour = Duration::from_secs(3600);
        timer.kick_in(hour);
        let due = timer.due.get().unwrap();
        for _ in 0..1000 {
            timer.kick_in(due.saturating_duration_since(Instant::now()));
            assert_eq!(timer.due.get(), Some(due));
        }
        timer.kick_in(hour / 2);
        assert!(timer.due.get().unwrap() < due);
    }
}
