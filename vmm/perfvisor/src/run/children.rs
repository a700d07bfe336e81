//! Reaps child processes of a running VM that somebody killed.
//!
//! A running VM starts no process. The children that it has were started before its guest: the keeper of
//! kernel readers, and the keepers of virtiofsd. None of them ends by itself while the VM runs.

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use perf_core::error_line;
use rustix::process::{WaitOptions, wait};
use vmm_sys_util::eventfd::EventFd;

/// Reaps children when SIGCHLD comes, so that none stays a zombie until the VM ends.
pub struct ChildReaper {
    child_ended: EventFd,
}

impl ChildReaper {
    /// Creates a reaper that acts when `child_ended` is readable.
    pub fn new(child_ended: EventFd) -> Self {
        Self { child_ended }
    }
}

impl MutEventSubscriber for ChildReaper {
    fn process(&mut self, _: Events, _: &mut EventOps) {
        let _ = self.child_ended.read();
        // One signal may stand for several children. The status says nothing that the users of the child
        // do not report themselves.
        while let Ok(Some((pid, _))) = wait(WaitOptions::NOHANG) {
            log::debug!("child process {pid} has ended");
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        if let Err(error) = ops.add(Events::new(&self.child_ended, EventSet::IN)) {
            log::warn!("child processes that end are not reaped: {}", error_line(&error));
        }
    }
}
