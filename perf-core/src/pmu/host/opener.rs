//! Opening of host perf events, in the calling process or by another process on its behalf. Only
//! this file calls `perf_event_open(2)`.
//!
//! A process that drops the privilege to call `perf_event_open(2)` first installs an
//! [`HostEventOpener`] that requests each event from another process. Events that are open are
//! read, armed and enabled through their file descriptors, without the opener.

#![expect(unsafe_code, reason = "system calls")]

use std::fmt::Debug;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use perf_event_open_sys as sys;
use sys::bindings::{PERF_FLAG_FD_CLOEXEC, perf_event_attr};

/// Constants of `fcntl(2)`: `F_SETSIG`, `F_SETOWN_EX` and `F_OWNER_TID`.
const F_SETSIG: libc::c_int = 10;
const F_SETOWN_EX: libc::c_int = 15;
const F_OWNER_TID: libc::c_int = 0;

/// The type `struct f_owner_ex` of `fcntl(2)`.
#[repr(C)]
struct FOwnerEx {
    kind: libc::c_int,
    pid: libc::pid_t,
}

/// The thread or CPU on which a host perf event counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HostEventTarget {
    /// A thread, identified by its ID (0 is the calling thread), on any CPU.
    Thread(i32),
    /// A CPU, including all code that runs on it.
    Cpu(i32),
}

/// The signal that each overflow of a host event sends, and the thread that receives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverflowSignal {
    /// ID of the thread that receives the signal.
    pub tid: i32,
    /// Number of the signal.
    pub signal: i32,
}

/// A request to open one host perf event.
#[derive(Clone, Copy, Debug)]
pub struct EventOpenRequest<'a> {
    /// Bytes of the event's `struct perf_event_attr`.
    pub attr: &'a [u8],
    /// Thread or CPU on which the event counts.
    pub counted: HostEventTarget,
    /// Leader of the event's group, or `None` for an event that leads its own group.
    pub leader: Option<BorrowedFd<'a>>,
    /// Overflow signal of the event, or `None` for an event that sends no signal.
    pub overflow: Option<OverflowSignal>,
}

/// A means of opening host perf events for this process.
pub trait HostEventOpener: Debug + Send + Sync {
    /// Opens one event with its overflow signal.
    ///
    /// # Errors
    /// Returns the error of `perf_event_open(2)` or `fcntl(2)`, or an error of the opener itself.
    fn open(&self, request: &EventOpenRequest<'_>) -> io::Result<OwnedFd>;

    /// Makes each overflow of `event` send a signal.
    ///
    /// # Errors
    /// Returns the error of `fcntl(2)`, or an error of the opener itself.
    fn set_overflow_signal(&self, event: BorrowedFd<'_>, overflow: OverflowSignal) -> io::Result<()>;
}

/// The default opener, which calls `perf_event_open(2)` in the calling thread.
#[derive(Clone, Copy, Debug, Default)]
pub struct SyscallOpener;

impl HostEventOpener for SyscallOpener {
    /// Opens one event. A signal handler may call this method, because it makes only system calls.
    fn open(&self, request: &EventOpenRequest<'_>) -> io::Result<OwnedFd> {
        let event = perf_event_open(request)?;
        if let Some(overflow) = request.overflow {
            set_overflow_signal(event.as_fd(), overflow)?;
        }
        Ok(event)
    }

    fn set_overflow_signal(&self, event: BorrowedFd<'_>, overflow: OverflowSignal) -> io::Result<()> {
        set_overflow_signal(event, overflow)
    }
}

/// Calls `perf_event_open(2)` with the attributes, target and group of a request.
fn perf_event_open(request: &EventOpenRequest<'_>) -> io::Result<OwnedFd> {
    let (pid, cpu) = match request.counted {
        HostEventTarget::Thread(tid) => (tid, -1),
        HostEventTarget::Cpu(cpu) => (-1, cpu),
    };
    let group: RawFd = request.leader.map_or(-1, |leader| leader.as_raw_fd());
    let mut attr = perf_event_attr::default();
    let length = request.attr.len().min(size_of::<perf_event_attr>());
    // SAFETY: the structure is made of integers, so any bytes are valid for it; both ranges have
    // `length` bytes and do not overlap.
    unsafe {
        std::ptr::copy_nonoverlapping(request.attr.as_ptr(), (&raw mut attr).cast::<u8>(), length);
    }
    // SAFETY: `attr` is a live, fully initialized attribute block with a correct size field; the
    // kernel writes at most its `size` field.
    let fd = unsafe {
        sys::perf_event_open(
            &raw mut attr,
            pid,
            cpu,
            group,
            libc::c_ulong::from(PERF_FLAG_FD_CLOEXEC),
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just returned this file descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes each overflow of `event` send a signal to a thread, with `fcntl(2)`.
fn set_overflow_signal(event: BorrowedFd<'_>, overflow: OverflowSignal) -> io::Result<()> {
    let fd = event.as_raw_fd();
    let owner = FOwnerEx {
        kind: F_OWNER_TID,
        pid: overflow.tid,
    };
    // SAFETY: `owner` has the layout fcntl(2) documents for F_SETOWN_EX and outlives the call.
    check(unsafe { libc::fcntl(fd, F_SETOWN_EX, &raw const owner) })?;
    // SAFETY: F_SETSIG takes a signal number by value.
    check(unsafe { libc::fcntl(fd, F_SETSIG, overflow.signal) })?;
    // SAFETY: F_GETFL takes no argument.
    let flags = check(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    // SAFETY: F_SETFL takes flags by value.
    check(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_ASYNC) })?;
    Ok(())
}

fn check(rc: libc::c_int) -> io::Result<libc::c_int> {
    if rc < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(rc)
    }
}

/// The opener that was installed in this process. Without one, [`SyscallOpener`] is used.
static OPENER: OnceLock<Box<dyn HostEventOpener>> = OnceLock::new();

/// Sets the opener of all host perf events that this process opens from now on.
///
/// Only the first call has an effect. Returns `true` for that call.
pub fn set_event_opener(opener: impl HostEventOpener + 'static) -> bool {
    OPENER.set(Box::new(opener)).is_ok()
}

/// Returns the opener that this process uses: the installed one, or [`SyscallOpener`].
pub(super) fn current() -> &'static dyn HostEventOpener {
    OPENER.get().map_or(&SyscallOpener, |opener| &**opener)
}
