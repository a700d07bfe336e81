//! How an event tells its reader that there is something to look at.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use bitflags::bitflags;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::ring::borrowed;

bitflags! {
    /// What poll reports.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Poll: u32 {
        /// There are samples to read.
        const IN = 1;
        /// The event disabled itself at its limit, its vCPU is gone, or it has no ring.
        const HUP = 2;
    }
}

/// The poll state of one event, with an eventfd made when first asked for.
///
/// The state is set before the eventfd is signalled and taken after it was waited for, so no notification
/// falls between a reader's look and its sleep. `HUP` is a bit of its own: a later `IN` cannot overtake it.
#[derive(Debug, Default)]
pub(crate) struct Notify {
    state: AtomicU32,
    fd: OnceLock<EventFd>,
}

impl Notify {
    /// Sets `what` and wakes whoever polls. One system call, none if nobody ever asked for the descriptor.
    pub fn signal(&self, what: Poll) {
        self.state.fetch_or(what.bits(), Ordering::Release);
        if let Some(fd) = self.fd.get() {
            // The counter saturates at 2^64-1: a full one is readable already, so a failure loses nothing.
            let _ = fd.write(1);
        }
    }

    /// Takes and clears the state.
    pub fn take(&self) -> Poll {
        if let Some(fd) = self.fd.get() {
            // Non-blocking: an error only says that nothing was signalled.
            let _ = fd.read();
        }
        Poll::from_bits_retain(self.state.swap(0, Ordering::AcqRel))
    }

    /// The descriptor to poll for reading.
    pub fn fd(&self) -> io::Result<BorrowedFd<'_>> {
        if let Some(fd) = self.fd.get() {
            return Ok(borrowed(fd));
        }
        let new = EventFd::new(EFD_NONBLOCK)?;
        let fd = self.fd.get_or_init(|| new);
        // What was signalled before the descriptor existed must wake its first poll too.
        if self.state.load(Ordering::Acquire) != 0 {
            let _ = fd.write(1);
        }
        Ok(borrowed(fd))
    }
}
