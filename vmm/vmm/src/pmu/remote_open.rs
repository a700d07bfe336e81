//! Opens a perf event on another thread. The target thread opens the event itself, in the handler
//! of its kick signal. The signal may interrupt the target thread anywhere, because
//! `perf_event_open(2)` is a single system call and needs no locks of the VMM.
#![expect(
    unsafe_code,
    reason = "system calls, and a signal handler that reads another thread's request"
)]

use std::io;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use perf_core::pmu::host::{EventOpenRequest, HostEventOpener, SyscallOpener};

/// Maximum time that a thread waits until another thread has opened an event.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between two signals to the target thread. A signal fails if the thread has exited
/// without handling the request.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);
/// Interval between checks of whether the target thread has handled the request.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Value of [`STATE`] while there is no request.
const IDLE: u64 = 0;
/// Phase of a request: posted. The phase is in the lowest two bits of [`STATE`]. The other bits
/// contain the ID of the target thread, so no other thread handles the request.
const POSTED: u64 = 1;
/// Phase of a request: the target thread is handling it.
const TAKEN: u64 = 2;
/// Phase of a request: the target thread has handled it.
const DONE: u64 = 3;

fn state(tid: i32, phase: u64) -> u64 {
    u64::from(tid.unsigned_abs()) << 2 | phase
}

/// Phase of the current request, and ID of its target thread.
static STATE: AtomicU64 = AtomicU64::new(IDLE);
/// Pointer to the current request. Valid while the phase in [`STATE`] is posted or being handled.
static REQUEST: AtomicPtr<RemoteOpen<'static>> = AtomicPtr::new(ptr::null_mut());
/// Lock that a thread holds while it makes a request, because there is only one request at a time.
static REQUEST_LOCK: Mutex<()> = Mutex::new(());

/// Returns the kernel thread ID of the calling thread.
pub(super) fn current_tid() -> i32 {
    // SAFETY: `gettid` has no arguments and cannot fail.
    unsafe { libc::gettid() }
}

/// Request to open an event on the thread that handles it.
pub(super) struct RemoteOpen<'a> {
    request: &'a EventOpenRequest<'a>,
    result: Option<io::Result<OwnedFd>>,
}

impl RemoteOpen<'_> {
    /// Makes thread `tid` of this process open an event in its handler of `signal`, and returns the
    /// event's file descriptor.
    ///
    /// # Errors
    /// Returns an error if `perf_event_open(2)` fails, `ESRCH` if the thread does not exist, or
    /// `TimedOut` if the thread does not run.
    pub(super) fn run(request: &EventOpenRequest<'_>, tid: i32, signal: i32) -> io::Result<OwnedFd> {
        let _turn = REQUEST_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let mut remote = RemoteOpen {
            request,
            result: None,
        };
        // The handler accesses the request only between the posted and done states, and this
        // function waits for the done state.
        REQUEST.store((&raw mut remote).cast(), Ordering::Relaxed);
        STATE.store(state(tid, POSTED), Ordering::Release);
        if let Err(e) = signal_until_done(tid, signal) {
            let taken_back =
                STATE.compare_exchange(state(tid, POSTED), IDLE, Ordering::AcqRel, Ordering::Acquire);
            if taken_back.is_ok() {
                return Err(e);
            }
        }
        // A handler that has taken the request only makes one more system call, so this wait is
        // short.
        while STATE.load(Ordering::Acquire) != state(tid, DONE) {
            std::thread::sleep(POLL_INTERVAL);
        }
        STATE.store(IDLE, Ordering::Relaxed);
        let missing = || Err(io::Error::from_raw_os_error(libc::ESRCH));
        remote.result.take().unwrap_or_else(missing)
    }
}

/// Signals thread `tid` until it has opened the event.
fn signal_until_done(tid: i32, signal: i32) -> io::Result<()> {
    let pid = std::process::id();
    let until = Instant::now() + TIMEOUT;
    while Instant::now() < until {
        // SAFETY: the call has only integer arguments.
        if unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, signal) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let again = Instant::now() + SIGNAL_INTERVAL;
        while Instant::now() < again {
            if STATE.load(Ordering::Acquire) == state(tid, DONE) {
                return Ok(());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

/// Opens an event on this thread, if another thread has requested this. Async-signal-safe: makes
/// only system calls and preserves `errno`.
pub(crate) fn open_in_handler() {
    if STATE.load(Ordering::Acquire) & 3 != POSTED {
        return;
    }
    // SAFETY: the location of `errno` belongs to this thread and lives as long as the thread.
    let errno = unsafe { *libc::__errno_location() };
    serve();
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

fn serve() {
    let tid = current_tid();
    let taken = STATE.compare_exchange(
        state(tid, POSTED),
        state(tid, TAKEN),
        Ordering::AcqRel,
        Ordering::Acquire,
    );
    if taken.is_err() {
        return;
    }
    let remote = REQUEST.load(Ordering::Relaxed);
    // SAFETY: the request was posted for this thread and is now taken. Its owner neither moves nor
    // accesses it before the done state, and no other thread takes it.
    let remote = unsafe { &mut *remote };
    remote.result = Some(SyscallOpener.open(remote.request));
    STATE.store(state(tid, DONE), Ordering::Release);
}
