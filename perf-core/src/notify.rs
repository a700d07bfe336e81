//! Notification of an event's readers through a poll state and an eventfd.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use bitflags::bitflags;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::ring::borrowed;

bitflags! {
    /// The poll state of an event: what its reader has not been notified of yet.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct PollState: u32 {
        /// Samples are available in the ring, or an event without a ring has overflowed.
        const IN = 1;
        /// The event reached its overflow limit and was disabled, its vCPU was removed, or it has
        /// no ring.
        const HUP = 2;
    }
}

/// Poll state of one event, with an eventfd that is created on first use.
///
/// [`PollNotifier::signal`] sets the state before it signals the eventfd, and
/// [`PollNotifier::take`] drains the eventfd before it takes the state, so a reader cannot miss a
/// notification between its check and its sleep. `HUP` has its own bit, so a later `IN` cannot hide
/// it.
#[derive(Debug, Default)]
pub(crate) struct PollNotifier {
    state: AtomicU32,
    fd: OnceLock<EventFd>,
}

impl PollNotifier {
    /// Adds `what` to the poll state and wakes the pollers. Takes one system call, or none if the
    /// eventfd was never requested.
    pub fn signal(&self, what: PollState) {
        self.state.fetch_or(what.bits(), Ordering::Release);
        if let Some(fd) = self.fd.get() {
            // A write fails only if the eventfd counter is at its maximum. The descriptor is
            // already readable in this case, so no wakeup is lost.
            let _ = fd.write(1);
        }
    }

    /// Returns the poll state and clears it.
    pub fn take(&self) -> PollState {
        if let Some(fd) = self.fd.get() {
            // The eventfd is non-blocking. An error only means that nothing was signaled.
            let _ = fd.read();
        }
        PollState::from_bits_retain(self.state.swap(0, Ordering::AcqRel))
    }

    /// Returns the eventfd, which becomes readable when the poll state is set.
    pub fn fd(&self) -> io::Result<BorrowedFd<'_>> {
        if let Some(fd) = self.fd.get() {
            return Ok(borrowed(fd));
        }
        let new = EventFd::new(EFD_NONBLOCK)?;
        let fd = self.fd.get_or_init(|| new);
        // The first poll must also report state that was signaled before the descriptor existed.
        if self.state.load(Ordering::Acquire) != 0 {
            let _ = fd.write(1);
        }
        Ok(borrowed(fd))
    }
}
