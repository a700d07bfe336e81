//! Telling a reader: an eventfd whose count *is* the poll state.
//!
//! The state is not kept beside the eventfd, so there is no moment between looking at it and waiting for it:
//! reading the eventfd takes the state, atomically and once, and a notification after that makes it readable
//! again. This also holds for a reader in another process that was handed nothing but the descriptor.

#![expect(unsafe_code, reason = "system calls, and memory shared with the kernel")]

use std::io::Result;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering::AcqRel};

use vmm_sys_util::eventfd::EventFd;

/// Added to the count when the source is gone, above all notifications one could live to see.
const HANG_UP: u64 = 1 << 48;

/// What happened to a ring since its poll state was last taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PollState {
    /// Records are due to be read, or the event has overflowed.
    pub readable: bool,
    /// Nothing more will come: the event is exhausted or its source has gone.
    pub hang_up: bool,
}

impl PollState {
    /// The state that a count read from [`wakeup_fd`](super::Ring::wakeup_fd) stands for, for readers in
    /// another process.
    pub fn from_count(count: u64) -> Self {
        Self {
            readable: count & (HANG_UP - 1) != 0,
            hang_up: count >= HANG_UP,
        }
    }
}

pub(super) struct Wake {
    fd: EventFd,
    hung_up: AtomicBool,
}

impl Wake {
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            fd: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
            hung_up: AtomicBool::new(false),
        })
    }

    #[cold]
    pub(super) fn notify(&self) {
        // The only error is EAGAIN, when the count would overflow: it is readable then, which is all that is
        // wanted.
        let _ = self.fd.write(1);
    }

    pub(super) fn hang_up(&self) {
        // Once: a hang-up is kept until it is read, and later notifications cannot overwrite it.
        if !self.hung_up.swap(true, AcqRel) {
            let _ = self.fd.write(HANG_UP);
        }
    }

    pub(super) fn take(&self) -> PollState {
        self.fd.read().map(PollState::from_count).unwrap_or_default()
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        borrowed(&self.fd)
    }
}

/// The descriptor of an eventfd.
pub(crate) fn borrowed(fd: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open for as long as `fd` is borrowed.
    unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }
}
