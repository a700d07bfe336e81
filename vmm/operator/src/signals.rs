//! Signals as file descriptors: SIGTERM, SIGINT and SIGHUP for an orderly shutdown, SIGWINCH, and
//! SIGCHLD.
//!
//! A thread waits for the signals instead of a signalfd. The kernel wakes the waiters of a signalfd
//! on every signal of the process, and vCPUs are kicked by signals a thousand times per second.
#![expect(
    unsafe_code,
    reason = "blocks signals and waits for them by system calls, and borrows the eventfd"
)]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;

use sandbox::SandboxedThreadKind;
use sandbox::privileges;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Signals that request the termination of the VM.
const STOP_SIGNALS: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// Set when the waiting thread has received a stop signal.
static STOP_SIGNAL_RECEIVED: AtomicBool = AtomicBool::new(false);

/// Returns whether a stop signal has arrived since the signals were blocked.
///
/// This function is for code that has no [`StopSignals`]. A signal that is not blocked terminates
/// the process.
pub fn is_end_requested() -> bool {
    if STOP_SIGNAL_RECEIVED.load(Ordering::SeqCst) {
        return true;
    }
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigpending initializes the set or fails, and sigismember receives an initialized set.
    unsafe {
        libc::sigpending(set.as_mut_ptr()) == 0
            && STOP_SIGNALS
                .iter()
                .any(|signal| libc::sigismember(set.as_ptr(), *signal) == 1)
    }
}

/// Numbers of stop signals that the VM's process received directly and through its supervisor. The
/// VM's process receives a signal twice if a service manager or a terminal sends the signal to the
/// VM's process and to the supervisor.
#[derive(Default)]
struct StopSignalCounts([[u64; 2]; STOP_SIGNALS.len()]);

impl StopSignalCounts {
    /// Records a signal that arrived directly or, if `forwarded` is set, through the supervisor.
    /// Returns `false` if the same signal has already arrived through the other path.
    fn is_new(&mut self, signal: libc::c_int, forwarded: bool) -> bool {
        let at = STOP_SIGNALS.iter().position(|other| *other == signal);
        let Some(counts) = at.and_then(|at| self.0.get_mut(at)) else {
            return true;
        };
        let [own, other] = if forwarded { [1, 0] } else { [0, 1] };
        counts[own] += 1;
        counts[own] > counts[other]
    }
}

/// Blocked stop signals, and a descriptor that becomes readable when a signal arrives.
#[derive(Debug)]
pub struct StopSignals {
    came: EventFd,
    last: Arc<AtomicI32>,
    resized: EventFd,
    child_ended: EventFd,
    user: EventFd,
    /// `true` if the descriptor stays readable after the first signal, for all threads.
    stays: bool,
}

/// Signals blocked in the calling thread and its future child threads. The signals stay pending
/// until [`BlockedSignals::wait`] starts a thread that receives them.
pub struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    /// Blocks the signals that a VM process handles: the stop signals, SIGWINCH
    /// ([`StopSignals::resized`]) and SIGCHLD ([`StopSignals::child_ended`]).
    ///
    /// # Errors
    /// Returns the error of the system call.
    pub fn of_vm() -> io::Result<Self> {
        let [a, b, c] = STOP_SIGNALS;
        Self::all(&[a, b, c, libc::SIGWINCH, libc::SIGCHLD])
    }

    fn all(signals: &[libc::c_int]) -> io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initializes the set, and the later calls receive the initialized set.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in signals {
                libc::sigaddset(set.as_mut_ptr(), *signal);
            }
            let error = libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
            if error != 0 {
                return Err(io::Error::from_raw_os_error(error));
            }
            Ok(Self(set.assume_init()))
        }
    }

    /// Returns whether a stop signal is pending that [`BlockedSignals::wait`] has not received yet.
    #[must_use]
    pub fn is_stop_pending(&self) -> bool {
        let mut pending = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigpending initializes the set if it succeeds, and sigismember only reads it.
        unsafe {
            libc::sigpending(pending.as_mut_ptr()) == 0
                && STOP_SIGNALS
                    .iter()
                    .any(|signal| libc::sigismember(pending.as_ptr(), *signal) == 1)
        }
    }

    /// Starts a thread that receives the signals for the lifetime of the process.
    ///
    /// # Errors
    /// Returns the error of the system call.
    pub fn wait(self) -> io::Result<StopSignals> {
        let set = self.0;
        let came = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let resized = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let child_ended = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let user = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let (tell_child, tell_user) = (child_ended.try_clone()?, user.try_clone()?);
        let last = Arc::new(AtomicI32::new(0));
        let (tell, store, tell_size) = (came.try_clone()?, last.clone(), resized.try_clone()?);
        thread::Builder::new().name("signals".into()).spawn(move || {
            privileges::drop_thread_capabilities();
            sandbox::enter(SandboxedThreadKind::Signals);
            let mut received = StopSignalCounts::default();
            loop {
                // SAFETY: a zeroed siginfo_t is valid.
                let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
                // SAFETY: both pointers refer to valid values of this thread during the call.
                let signal = unsafe { libc::sigwaitinfo(&set, &mut info) };
                if signal < 0 {
                    continue;
                }
                // A failed write means that the eventfd counter is full and therefore readable.
                let tell_other = match signal {
                    libc::SIGWINCH => Some(&tell_size),
                    libc::SIGCHLD => Some(&tell_child),
                    libc::SIGUSR2 => Some(&tell_user),
                    _ => None,
                };
                if let Some(tell_other) = tell_other {
                    let _ = tell_other.write(1);
                    continue;
                }
                if !received.is_new(signal, sandbox::is_forwarded(&info)) {
                    continue;
                }
                store.store(signal, Ordering::SeqCst);
                STOP_SIGNAL_RECEIVED.store(true, Ordering::SeqCst);
                let _ = tell.write(1);
            }
        })?;
        Ok(StopSignals {
            came,
            last,
            resized,
            child_ended,
            user,
            stays: false,
        })
    }
}

impl StopSignals {
    /// Blocks the stop signals in the calling thread and its future child threads, and starts a
    /// thread that receives them.
    ///
    /// # Errors
    /// Returns the error of the system call.
    pub fn block() -> io::Result<Self> {
        BlockedSignals::all(&STOP_SIGNALS)?.wait()
    }

    /// Blocks the stop signals and SIGUSR2, which [`StopSignals::take_user_signal`] reports.
    ///
    /// # Errors
    /// Returns the error of the system call.
    pub fn block_with_user_signal() -> io::Result<Self> {
        let [a, b, c] = STOP_SIGNALS;
        BlockedSignals::all(&[a, b, c, libc::SIGUSR2])?.wait()
    }

    /// Returns whether SIGUSR2 has arrived since the previous call. SIGUSR2 must be blocked.
    pub fn take_user_signal(&self) -> bool {
        self.user.read().is_ok()
    }

    /// Returns a descriptor that is readable after the terminal window has changed its size.
    ///
    /// # Errors
    /// Returns an error if the process has no free descriptor.
    pub fn resized(&self) -> io::Result<EventFd> {
        self.resized.try_clone()
    }

    /// Returns a descriptor that is readable after a child process has exited or stopped. SIGCHLD
    /// must be blocked ([`BlockedSignals::of_vm`]).
    ///
    /// # Errors
    /// Returns an error if the process has no free descriptor.
    pub fn child_ended(&self) -> io::Result<EventFd> {
        self.child_ended.try_clone()
    }

    /// Keeps the descriptor readable after the first signal. Several threads can then see this
    /// signal.
    #[must_use]
    pub fn visible_to_all_threads(self) -> Self {
        Self { stays: true, ..self }
    }

    /// Returns the number of the last stop signal that arrived since the previous call, if any.
    pub fn take(&self) -> Option<i32> {
        if self.stays {
            return Some(self.last.load(Ordering::SeqCst)).filter(|signal| *signal != 0);
        }
        self.came.read().ok()?;
        Some(self.last.load(Ordering::SeqCst))
    }
}

impl AsFd for StopSignals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the eventfd stays open for the lifetime of `self`, which the result borrows.
        unsafe { BorrowedFd::borrow_raw(self.came.as_raw_fd()) }
    }
}

impl AsRawFd for StopSignals {
    fn as_raw_fd(&self) -> RawFd {
        self.came.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_that_arrives_on_both_ways_counts_once() {
        let mut received = StopSignalCounts::default();
        assert!(received.is_new(libc::SIGTERM, false));
        assert!(!received.is_new(libc::SIGTERM, true));
        assert!(received.is_new(libc::SIGTERM, true), "the second");
        assert!(!received.is_new(libc::SIGTERM, false));
        assert!(received.is_new(libc::SIGINT, true), "another signal");
        // Without a supervisor, every signal counts.
        for _ in 0..3 {
            assert!(received.is_new(libc::SIGHUP, false));
        }
    }
}
