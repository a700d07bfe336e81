//! Making a vCPU leave KVM_RUN: the signals, and why none of them can be lost.
//!
//! Two signals reach a vCPU thread. The *kick* asks it to look at its run state (pause, stop, a PMI that
//! waits). The *overflow* signal is sent by the host kernel when a perf event of this vCPU overflows. Both
//! handlers set `kvm_run.immediate_exit` of the vCPU that their thread runs ([`crate::kvm::armed`]). The run
//! loop clears that byte *before* it looks at what the signals announce, so a signal that arrives after the
//! look makes the next KVM_RUN return at once.
//!
//! Both are standard signals, not real-time ones: those queue, and the queue, one for all processes of a
//! user, can be full, which would lose a kick. Standard signals of a kind merge while one is pending, which
//! loses nothing, because what they announce is looked up and not counted.
//!
//! Overflow signals that come often are not handled but held and fetched, which costs less:
//! [`OverflowSignals`].
#![expect(unsafe_code, reason = "signals, their masks and timers")]

use std::cell::Cell;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use libc::{c_int, c_void, siginfo_t};
use vmm_sys_util::signal::{create_sigset, register_signal_handler};

use crate::kvm::armed::request_exit_of_this_thread;
use crate::kvm::signal_mask;
use crate::kvm::vcpu_fd::VcpuFd;
use crate::pmu::overflow_signal;
use crate::pmu::remote_open::open_in_handler;

thread_local! {
    /// An overflow signal came since the last [`take_overflow`].
    static OVERFLOW: AtomicBool = const { AtomicBool::new(false) };
}

/// The signal that kicks a vCPU thread.
pub fn kick_signal() -> c_int {
    libc::SIGUSR1
}

extern "C" fn on_kick(_: c_int, _: *mut siginfo_t, _: *mut c_void) {
    request_exit_of_this_thread();
    open_in_handler();
}

extern "C" fn on_overflow(_: c_int, _: *mut siginfo_t, _: *mut c_void) {
    OVERFLOW.with(|flag| flag.store(true, Ordering::Relaxed));
    request_exit_of_this_thread();
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

/// A timer that kicks the thread that made it: for what must be looked at again although the guest may not
/// exit, such as a PMI that waits for the guest to unmask LVTPC.
#[derive(Debug)]
pub struct KickTimer {
    timer: libc::timer_t,
    /// When it kicks; in the past: it has.
    due: Cell<Option<Instant>>,
}

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
            0 => Ok(Self {
                timer,
                due: Cell::new(None),
            }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Who asks again has read the clock anew: what is due so little later is what was asked for.
    const SLACK: Duration = Duration::from_micros(200);

    /// Kicks once, after `delay`, or before: who asked for a kick that is due earlier gets that one. All look
    /// then, and who finds nothing has to ask again, for the time that is left. That is no system call as
    /// long as a kick is due by then, or so little later. A zero delay counts as one nanosecond.
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
        // SAFETY: the timer was made by `for_current_thread` and is deleted only here.
        unsafe { libc::timer_delete(self.timer) };
    }
}

/// At most so many exits from one overflow signal to the next, and the signals are held.
const FEW_EXITS: u32 = 8;
/// After more exits than this without an overflow signal they are handled again.
const MANY_EXITS: u32 = 32;

/// How the overflow signals of one vCPU end KVM_RUN.
///
/// *Handled*: by their handler, as above. To run a handler costs the kernel more than a system call does, and
/// several times that on an emulated host. *Held*: blocked in the thread, let through by
/// `KVM_SET_SIGNAL_MASK` while it is in KVM_RUN, which then ends with EINTR and leaves them pending; they are
/// fetched by one system call. A signal that comes earlier ends the next KVM_RUN at once, so this loses none
/// either. But KVM then changes the thread's mask twice in each KVM_RUN, under a lock of the whole process.
/// So they are held only while they are a good part of what ends it, as they are for a vCPU that is sampled.
#[derive(Debug)]
pub struct OverflowSignals {
    held: bool,
    /// KVM or the thread refused.
    stays: bool,
    /// Exits since the last overflow signal.
    exits: u32,
}

impl Default for OverflowSignals {
    fn default() -> Self {
        Self {
            held: false,
            stays: false,
            exits: u32::MAX,
        }
    }
}

impl OverflowSignals {
    /// KVM_RUN has ended, `by_signal` or otherwise. Afterwards [`take_overflow`] knows of every overflow
    /// signal that ended it. At most one system call.
    pub fn after_exit(&mut self, by_signal: bool) {
        self.exits = self.exits.saturating_add(1);
        if self.held && by_signal {
            fetch();
        }
    }

    /// To be called before the next entry, with what [`take_overflow`] has said. Rarely two system calls,
    /// otherwise none.
    pub fn before_entry(&mut self, vcpu: &VcpuFd, signalled: bool) {
        let hold = if signalled {
            self.held || self.exits <= FEW_EXITS
        } else {
            self.held && self.exits <= MANY_EXITS
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

    /// As before the first overflow: for a vCPU that goes to another thread.
    pub fn handle_again(&mut self, vcpu: &VcpuFd) {
        if self.held
            && let Err(e) = handle_signals(vcpu)
        {
            log::warn!("overflow signals of a vCPU stay blocked in its thread: {e}");
        }
        *self = Self::default();
    }
}

/// Blocks the overflow signal in this thread, but not while it is in KVM_RUN.
fn hold_signals(vcpu: &VcpuFd) -> io::Result<()> {
    let overflow = only_overflow()?;
    let mut before = overflow;
    // SAFETY: both are live sets of signals.
    check(unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &overflow, &mut before) })?;
    if let Err(refused) = signal_mask::set(vcpu, &before) {
        // SAFETY: `overflow` is a live set; what was set before is not asked for.
        check(unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &overflow, ptr::null_mut()) })?;
        return Err(refused);
    }
    Ok(())
}

/// Takes [`hold_signals`] back. An overflow signal that waits is handled within this call.
fn handle_signals(vcpu: &VcpuFd) -> io::Result<()> {
    signal_mask::clear(vcpu)?;
    let overflow = only_overflow()?;
    // SAFETY: `overflow` is a live set; what was set before is not asked for.
    check(unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &overflow, ptr::null_mut()) })
}

/// Takes a held overflow signal, if there is one, for what its handler would have been told. One system call.
fn fetch() {
    let Ok(overflow) = only_overflow() else { return };
    let at_once = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the set and the time are live locals, and nothing is asked about the signal.
    if unsafe { libc::sigtimedwait(&overflow, ptr::null_mut(), &at_once) } == overflow_signal() {
        OVERFLOW.with(|flag| flag.store(true, Ordering::Relaxed));
    }
}

/// The set of the overflow signal alone.
fn only_overflow() -> io::Result<libc::sigset_t> {
    create_sigset(&[overflow_signal()]).map_err(io::Error::from)
}

/// A pthread function's error, which is what it returns.
fn check(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
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

    /// The time until the timer expires; zero: it is not armed.
    fn left(timer: &KickTimer) -> Duration {
        // SAFETY: an all-zero itimerspec is a valid value of that plain C struct.
        let mut spec: libc::itimerspec = unsafe { std::mem::zeroed() };
        // SAFETY: the timer lives, and `spec` is a live local.
        assert_eq!(unsafe { libc::timer_gettime(timer.timer, &mut spec) }, 0);
        Duration::new(
            spec.it_value.tv_sec.try_into().unwrap(),
            spec.it_value.tv_nsec.try_into().unwrap(),
        )
    }

    /// Of several who want to be kicked the most urgent decides, in whatever order they ask.
    #[test]
    fn a_later_request_does_not_put_off_an_earlier_kick() {
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

    /// Who asks again for the same moment costs no system call: the timer stays as it was set.
    #[test]
    fn who_asks_again_for_the_same_moment_changes_nothing() {
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
