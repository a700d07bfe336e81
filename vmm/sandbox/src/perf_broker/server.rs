//! The broker's side: a process with one socket, one thread and the right to open perf events.
#![expect(unsafe_code, reason = "system calls")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use super::attr;
use super::datagram;
use super::protocol::{MAX_ATTR_BYTES, MAX_REQUEST_BYTES, Request};

/// `PERF_FLAG_FD_CLOEXEC`.
const CLOEXEC: libc::c_ulong = 8;
/// `F_SETSIG`, `F_SETOWN_EX` and `F_OWNER_TID` of `fcntl(2)`.
const F_SETSIG: libc::c_int = 10;
const F_SETOWN_EX: libc::c_int = 15;
const F_OWNER_TID: libc::c_int = 0;

/// `struct f_owner_ex` of `fcntl(2)`.
#[repr(C)]
struct FOwnerEx {
    kind: libc::c_int,
    pid: libc::pid_t,
}

/// The VM that a broker works for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Client {
    /// Its process.
    pub(super) pid: libc::pid_t,
    /// The only signal that its events may send.
    pub(super) signal: libc::c_int,
}

/// Requests that may come at once, and the number that may come each second after that. A guest's perf that
/// takes turns among events needs some hundreds for each vCPU.
const BURST: u32 = 5_000;
const INTERVAL: Duration = Duration::from_micros(200);

/// Delays requests that come faster than [`INTERVAL`], so that a guest which changes its counters for ever
/// does not keep a processor of the host busy with it.
struct RateLimit {
    /// When a request may be served that comes after a full burst.
    next: Instant,
}

impl RateLimit {
    fn new() -> Self {
        Self { next: Instant::now() }
    }

    /// The time to wait before a request that comes at `now`.
    fn delay(&mut self, now: Instant) -> Duration {
        self.next = self.next.max(now) + INTERVAL;
        self.next
            .saturating_duration_since(now)
            .saturating_sub(INTERVAL * BURST)
    }
}

/// Serves requests until the VM closes the socket.
pub(super) fn serve(socket: &OwnedFd, client: Client) {
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
            .and_then(Request::decode)
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

impl Client {
    /// Does what is asked; the event comes back if it is a new one.
    fn answer(self, request: Request<'_>, passed: Option<&OwnedFd>) -> Result<Option<OwnedFd>, i32> {
        match request {
            Request::Open { tid, receiver, attr } => {
                if !attr::is_allowed(attr) {
                    return Err(libc::EPERM);
                }
                self.check_thread(tid)?;
                let event = open(attr, tid, passed)?;
                if receiver != 0 {
                    self.set_signal(event.as_fd(), receiver)?;
                }
                // The thread may have ended before the event was opened, and another process have its id.
                self.check_thread(tid)?;
                Ok(Some(event))
            }
            Request::Signal { receiver } => {
                let event = passed.ok_or(libc::EBADF)?;
                self.set_signal(event.as_fd(), receiver)?;
                Ok(None)
            }
        }
    }

    /// Checks that thread `tid` is one of the VM's.
    fn check_thread(self, tid: i32) -> Result<(), i32> {
        // SAFETY: the call takes numbers; signal 0 is sent to nobody.
        let found = unsafe { libc::syscall(libc::SYS_tgkill, self.pid, tid, 0) };
        // The kernel looks for the thread in that process first, and asks for rights afterwards.
        if found == 0 || last_errno() == libc::EPERM {
            Ok(())
        } else {
            Err(libc::ESRCH)
        }
    }

    /// Makes overflows of `event` send the signal to thread `receiver` of the VM. Another process's thread
    /// may have got the id meanwhile: the event then sends nothing.
    fn set_signal(self, event: BorrowedFd<'_>, receiver: i32) -> Result<(), i32> {
        let fd = event.as_raw_fd();
        let set_owner = |pid| {
            let owner = FOwnerEx {
                kind: F_OWNER_TID,
                pid,
            };
            // SAFETY: `owner` has the layout fcntl(2) documents for F_SETOWN_EX and outlives the call.
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
    // Aligned, and writable: the kernel may write the size that it knows.
    let mut block = [0u64; MAX_ATTR_BYTES / 8];
    let length = attr.len().min(MAX_ATTR_BYTES);
    // SAFETY: both ranges have `length` bytes and do not overlap; any bytes are valid for integers.
    unsafe { std::ptr::copy_nonoverlapping(attr.as_ptr(), block.as_mut_ptr().cast::<u8>(), length) };
    let group = leader.map_or(-1, AsRawFd::as_raw_fd);
    // SAFETY: the block is live and as long as its size field says, as `attr::is_allowed` has checked.
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
    // SAFETY: the kernel just returned this descriptor and nothing else owns it.
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
    fn a_burst_passes_and_more_requests_are_delayed_to_the_rate() {
        let start = Instant::now();
        let mut rate = RateLimit { next: start };
        for n in 0..BURST {
            assert_eq!(rate.delay(start), Duration::ZERO, "request {n}");
        }
        assert_eq!(rate.delay(start), INTERVAL);
        assert_eq!(rate.delay(start), INTERVAL * 2);
        // After a pause there is a burst again.
        let later = start + INTERVAL * (2 * BURST);
        for n in 0..BURST {
            assert_eq!(rate.delay(later), Duration::ZERO, "later request {n}");
        }
        assert_eq!(rate.delay(later), INTERVAL);
    }

    #[test]
    fn threads_of_other_processes_are_not_the_vm_s() {
        let pid = std::process::id().cast_signed();
        // SAFETY: gettid takes nothing and cannot fail.
        let own = unsafe { libc::gettid() };
        let client = Client {
            pid,
            signal: libc::SIGUSR2,
        };
        assert_eq!(client.check_thread(own), Ok(()));
        assert_eq!(client.check_thread(1), Err(libc::ESRCH));
        let parent = std::os::unix::process::parent_id().cast_signed();
        assert_eq!(client.check_thread(parent), Err(libc::ESRCH));
    }
}
