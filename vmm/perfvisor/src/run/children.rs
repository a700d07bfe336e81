//! Reaps child processes of a running VM that were killed.
//!
//! A running VM starts no processes. The supervisors of kernel readers and of virtiofsd are started
//! before the guest. They exit only with the VM unless they are killed.

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use perf_core::error_line;
use rustix::process::{WaitOptions, wait};
use vmm_sys_util::eventfd::EventFd;

/// Reaps children on SIGCHLD, so that no child remains a zombie while the VM runs.
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
        // Signals coalesce, so several children may have exited. The owner of each child reports
        // its exit status.
        while let Ok(Some((pid, _))) = wait(WaitOptions::NOHANG) {
            log::debug!("child process {pid} has ended");
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        if let Err(error) = ops.add(Events::new(&self.child_ended, EventSet::IN)) {
            log::warn!("cannot reap child processes: {}", error_line(&error));
        }
    }
}
