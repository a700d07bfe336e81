//! Broker process for perf events. It consists of a single thread with one socket and the right to
//! open perf events.
#![expect(unsafe_code, reason = "system calls")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use super::attr;
use super::datagram;
use super::protocol::{MAX_ATTR_BYTES, MAX_REQUEST_BYTES, PerfRequest};

/// Flag `PERF_FLAG_FD_CLOEXEC` of `perf_event_open(2)`.
const CLOEXEC: libc::c_ulong = 8;
/// Command `F_SETSIG` of `fcntl(2)`.
const F_SETSIG: libc::c_int = 10;
const F_SETOWN_EX: libc::c_int = 15;
const F_OWNER_TID: libc::c_int = 0;

/// `struct f_owner_ex` of `fcntl(2)`.
#[repr(C)]
struct FOwnerEx {
    kind: libc::c_int,
    pid: libc::pid_t,
}

/// The VM that a broker serves.
#[derive(Clone, Copy, Debug)]
pub(super) struct BrokerClient {
    /// Process ID of the VM.
    pub(super) pid: libc::pid_t,
    /// The only signal that events opened for the VM may send.
    pub(super) signal: libc::c_int,
}

/// Maximum number of requests that may arrive at once. A guest that runs perf with multiplexing
/// needs a few hundred per vCPU. At the sustained rate, requests arrive at intervals of `INTERVAL`.
const BURST: u32 = 5_000;
const INTERVAL: Duration = Duration::from_micros(200);

/// Rate limiter that permits bursts of [`BURST`] requests, and delays further requests to one per
/// [`INTERVAL`]. A guest that reprograms its counters continuously therefore does not occupy a host
/// CPU.
struct RateLimit {
    /// Time at which all requests so far would have been executed at one request per `INTERVAL`.
    /// The next request is delayed if this time is more than `BURST` intervals in the future.
    next: Instant,
}

impl RateLimit {
    fn new() -> Self {
        Self { next: Instant::now() }
    }

    /// Returns the delay for a request that arrives at `now`.
    fn delay(&mut self, now: Instant) -> Duration {
        self.next = self.next.max(now) + INTERVAL;
        self.next
            .saturating_duration_since(now)
            .saturating_sub(INTERVAL * BURST)
    }
}

/// Serves requests until the VM closes the socket.
pub(super) fn serve(socket: &OwnedFd, client: BrokerClient) {
    let mut rate = RateLimit::new();
    let mut buffer = [0; MAX_REQUEST_BYTES];
    while let Ok((length, passed)) = datagram::receive(socket.as_fd(), &mut buffer) {
        if length == 0 {
            return;
        }
        let delay = rate.delay(Instant::now());
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
        let answer = buffer
            .get(..length)
            .and_then(PerfRequest::decode)
            .map_or(Err(libc::EINVAL), |request| {
                client.answer(request, passed.as_ref())
            });
        let (errno, event) = match answer {
            Ok(event) => (0, event),
            Err(errno) => (errno, None),
        };
        let event = event.as_ref().map(AsFd::as_fd);
        if datagram::send(socket.as_fd(), &errno.to_ne_bytes(), event).is_err() {
            return;
        }
    }
}

impl BrokerClient {
    /// Executes a request. Returns the descriptor of a new event.
    fn answer(self, request: PerfRequest<'_>, passed: Option<&OwnedFd>) -> Result<Option<OwnedFd>, i32> {
        match request {
            PerfRequest::Open { tid, receiver, attr } => {
                if !attr::is_allowed(attr) {
                    return Err(libc::EPERM);
                }
                self.check_thread(tid)?;
                let event = open(attr, tid, passed)?;
                if receiver != 0 {
                    self.set_signal(event.as_fd(), receiver)?;
                }
                // Check the thread again, because it may have exited before the event was opened,
                // and its ID may have been reused.
                self.check_thread(tid)?;
                Ok(Some(event))
            }
            PerfRequest::Signal { receiver } => {
                let event = passed.ok_or(libc::EBADF)?;
                self.set_signal(event.as_fd(), receiver)?;
                Ok(None)
            }
        }
    }

    /// Checks that thread `tid` belongs to the VM.
    fn check_thread(self, tid: i32) -> Result<(), i32> {
        // SAFETY: the call passes only integers, and signal 0 is never delivered.
        let found = unsafe { libc::syscall(libc::SYS_tgkill, self.pid, tid, 0) };
        // EPERM also means that the thread belongs to the process, because the kernel looks it up
        // before it checks permissions.
        if found == 0 || last_errno() == libc::EPERM {
            Ok(())
        } else {
            Err(libc::ESRCH)
        }
    }

    /// Makes the kernel send the broker's signal to thread `receiver` of the VM when `event`
    /// overflows. If another process has reused the thread ID, the event sends no signal.
    fn set_signal(self, event: BorrowedFd<'_>, receiver: i32) -> Result<(), i32> {
        let fd = event.as_raw_fd();
        let set_owner = |pid| {
            let owner = FOwnerEx {
                kind: F_OWNER_TID,
                pid,
            };
            // SAFETY: `owner` has the layout that fcntl(2) documents for F_SETOWN_EX and outlives
            // the call.
            checked(unsafe { libc::fcntl(fd, F_SETOWN_EX, &raw const owner) })
        };
        self.check_thread(receiver)?;
        set_owner(receiver)?;
        if let Err(errno) = self.check_thread(receiver) {
            set_owner(0)?;
            return Err(errno);
        }
        // SAFETY: F_SETSIG takes a signal number by value.
        checked(unsafe { libc::fcntl(fd, F_SETSIG, self.signal) })?;
        // SAFETY: F_GETFL takes no argument.
        let flags = checked(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
        // SAFETY: F_SETFL takes flags by value.
        checked(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_ASYNC) }).map(drop)
    }
}

/// Opens an event on one thread, never on a whole CPU.
fn open(attr: &[u8], tid: i32, leader: Option<&OwnedFd>) -> Result<OwnedFd, i32> {
    // The block must be aligned and writable, because the kernel may write the size that it
    // supports.
    let mut block = [0u64; MAX_ATTR_BYTES / 8];
    let length = attr.len().min(MAX_ATTR_BYTES);
    // SAFETY: both ranges have `length` bytes and do not overlap, and any bytes are valid integers.
    unsafe { std::ptr::copy_nonoverlapping(attr.as_ptr(), block.as_mut_ptr().cast::<u8>(), length) };
    let group = leader.map_or(-1, AsRawFd::as_raw_fd);
    // SAFETY: the block is live and as long as its size field states, as `attr::is_allowed` has
    // checked.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            block.as_mut_ptr(),
            tid,
            -1,
            group,
            CLOEXEC,
        )
    };
    let fd = i32::try_from(fd).unwrap_or(-1);
    if fd < 0 {
        return Err(last_errno());
    }
    // SAFETY: the kernel has just returned this descriptor, and it is not owned elsewhere.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn checked(result: libc::c_int) -> Result<libc::c_int, i32> {
    if result < 0 { Err(last_errno()) } else { Ok(result) }
}

fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_beyond_burst_are_rate_limited() {
        let start = Instant::now();
        let mut rate = RateLimit { next: start };
        for n in 0..BURST {
            assert_eq!(rate.delay(start), Duration::ZERO, "request {n}");
        }
        assert_eq!(rate.delay(start), INTERVAL);
        assert_eq!(rate.delay(start), INTERVAL * 2);
        // A pause restores the burst allowance.
        let later = start + INTERVAL * (2 * BURST);
        for n in 0..BURST {
            assert_eq!(rate.delay(later), Duration::ZERO, "later request {n}");
        }
        assert_eq!(rate.delay(later), INTERVAL);
    }

    #[test]
    fn threads_of_other_processes_are_rejected() {
        let pid = std::process::id().cast_signed();
        // SAFETY: gettid takes no arguments and cannot fail.
        let own = unsafe { libc::gettid() };
        let client = BrokerClient {
            pid,
            signal: libc::SIGUSR2,
        };
        assert_eq!(client.check_thread(own), Ok(()));
        assert_eq!(client.check_thread(1), Err(libc::ESRCH));
        let parent = std::os::unix::process::parent_id().cast_signed();
        assert_eq!(client.check_thread(parent), Err(libc::ESRCH));
    }
}
