//! Reader notification through an eventfd whose count *is* the poll state.
//!
//! The state is not stored separately from the eventfd, so there is no race between checking and
//! waiting: a read of the eventfd returns and clears the state, and a later notification makes the
//! eventfd readable again. A reader in another process needs only this file descriptor.

#![expect(unsafe_code, reason = "system calls, and memory shared with the kernel")]

use std::io::Result;
use std::os::fd::{AsRawFd, BorrowedFd};

use vmm_sys_util::eventfd::EventFd;

/// Amount that a hang-up adds to the eventfd's count, larger than any reachable number of
/// notifications.
const HANG_UP: u64 = 1 << 48;

/// What happened to a ring since its poll state was last taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PollState {
    /// `true` if records are available, or if the event has overflowed.
    pub readable: bool,
    /// No more records will follow unless the event is refreshed: the event reached its overflow
    /// limit, or its vCPU was removed.
    pub hang_up: bool,
}

impl PollState {
    /// Decodes a count that was read from [`wakeup_fd`](super::Ring::wakeup_fd), for readers in
    /// another process.
    pub fn from_count(count: u64) -> Self {
        Self {
            readable: count & (HANG_UP - 1) != 0,
            hang_up: count >= HANG_UP,
        }
    }
}

pub(super) struct ReaderNotifier {
    fd: EventFd,
}

impl ReaderNotifier {
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            fd: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
        })
    }

    #[cold]
    pub(super) fn notify(&self) {
        // The only error is EAGAIN when the count would overflow. The eventfd is then readable,
        // which suffices.
        let _ = self.fd.write(1);
    }

    pub(super) fn hang_up(&self) {
        // The only error is EAGAIN when the count would overflow. The count then contains earlier
        // hang-ups that the reader has not read.
        let _ = self.fd.write(HANG_UP);
    }

    pub(super) fn take(&self) -> PollState {
        self.fd.read().map(PollState::from_count).unwrap_or_default()
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        borrowed(&self.fd)
    }
}

/// Borrows the file descriptor of an eventfd.
pub(crate) fn borrowed(fd: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the file descriptor stays open while `fd` is borrowed.
    unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }
}
