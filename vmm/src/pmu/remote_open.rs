//! Opening of a perf event on another thread, by that thread: in the handler of the signal that
//! kicks it. The signal interrupts the thread wherever it is, and `perf_event_open(2)` is one
//! system call that needs no lock of ours.
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

use perf_core::pmu::host::{DirectOpener, EventOpener, OpenRequest};

/// How long a thread may take to open an event for another one. It needs a moment on a processor.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often the thread is signalled again: it may have ended before it came to the request.
const AGAIN: Duration = Duration::from_millis(50);
/// How often the result is looked for.
const LOOK: Duration = Duration::from_micros(50);

/// No request.
const IDLE: u64 = 0;
/// The lowest bits of the state: the thread has not come to the request; its handler works on it;
/// the result is there. The other bits are the thread's id, so that no thread takes another one's
/// request.
const POSTED: u64 = 1;
const TAKEN: u64 = 2;
const DONE: u64 = 3;

fn state(tid: i32, phase: u64) -> u64 {
    u64::from(tid.unsigned_abs()) << 2 | phase
}

/// The state of the one request that there may be.
static STATE: AtomicU64 = AtomicU64::new(IDLE);
/// The request, valid while the state is posted or taken.
static REQUEST: AtomicPtr<RemoteOpen<'static>> = AtomicPtr::new(ptr::null_mut());
/// One request at a time.
static TURN: Mutex<()> = Mutex::new(());

/// The id of the calling thread.
pub(super) fn current_tid() -> i32 {
    // SAFETY: gettid takes nothing and cannot fail.
    unsafe { libc::gettid() }
}

/// A request to open an event on the thread that handles it.
pub(super) struct RemoteOpen<'a> {
    request: &'a OpenRequest<'a>,
    result: Option<io::Result<OwnedFd>>,
}

impl RemoteOpen<'_> {
    /// Makes thread `tid` of this process open an event on itself, as soon as the handler of
    /// `signal` runs there.
    ///
    /// # Errors
    /// The error of `perf_event_open(2)`; `ESRCH`: there is no such thread; `TimedOut`: it does not run.
    pub(super) fn run(request: &OpenRequest<'_>, tid: i32, signal: i32) -> io::Result<OwnedFd> {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut remote = RemoteOpen {
            request,
            result: None,
        };
        // The handler uses the request only between posted and done, which this function waits for.
        REQUEST.store((&raw mut remote).cast(), Ordering::Relaxed);
        STATE.store(state(tid, POSTED), Ordering::Release);
        if let Err(e) = signal_until_done(tid, signal) {
            let taken_back =
                STATE.compare_exchange(state(tid, POSTED), IDLE, Ordering::AcqRel, Ordering::Acquire);
            if taken_back.is_ok() {
                return Err(e);
            }
        }
        // A handler that has taken it needs one system call more.
        while STATE.load(Ordering::Acquire) != state(tid, DONE) {
            std::thread::sleep(LOOK);
        }
        STATE.store(IDLE, Ordering::Relaxed);
        let missing = || Err(io::Error::from_raw_os_error(libc::ESRCH));
        remote.result.take().unwrap_or_else(missing)
    }
}

/// Signals thread `tid` until it has opened the event.
fn signal_until_done(tid: i32, signal: i32) -> io::Result<()> {
    let pid = std::process::id();
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        // SAFETY: the call takes numbers.
        if unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, signal) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let again = Instant::now() + AGAIN;
        while Instant::now() < again {
            if STATE.load(Ordering::Acquire) == state(tid, DONE) {
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

/// Opens the event that another thread wants on this one, if there is such a request. For a signal
/// handler: it makes system calls only, and leaves `errno` as it is.
pub(crate) fn open_in_handler() {
    if STATE.load(Ordering::Acquire) & 3 != POSTED {
        return;
    }
    // SAFETY: errno's place is the thread's own and lives as long as the thread.
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
    // SAFETY: the request was posted for this thread and is taken now: its owner waits until it is done, and
    // neither moves nor uses it before, and no other thread takes it.
    let remote = unsafe { &mut *remote };
    remote.result = Some(DirectOpener.open(remote.request));
    STATE.store(state(tid, DONE), Ordering::Release);
}
