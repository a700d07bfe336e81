//! Observes the exit of a lab's QEMU, and collects the lab's logs for diagnosis.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::process::last_lines;

/// The exit status of a lab's QEMU, set by the thread that waits for QEMU to exit.
#[derive(Default)]
pub(super) struct QemuExit {
    pub(super) how: Mutex<Option<String>>,
    pub(super) changed: Condvar,
    /// `true` if the lab is no longer needed. The thread that waits for QEMU then kills it.
    pub(super) abandoned: AtomicBool,
}

impl QemuExit {
    pub(super) fn report(&self, how: String) {
        *self.how.lock().unwrap_or_else(PoisonError::into_inner) = Some(how);
        self.changed.notify_all();
    }

    pub(super) fn has_come(&self) -> bool {
        self.how.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Waits up to `limit` for QEMU to exit. Returns a description of the exit status, or `None` if
    /// QEMU is still running.
    pub(super) fn wait(&self, limit: Duration) -> Option<String> {
        let how = self.how.lock().unwrap_or_else(PoisonError::into_inner);
        let (how, _) = self
            .changed
            .wait_timeout_while(how, limit, |how| how.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        how.clone()
    }
}

/// Logs of a lab, from which its end can be diagnosed.
pub(super) struct LabLogs {
    pub(super) ending: Arc<QemuExit>,
    pub(super) console: PathBuf,
    pub(super) qemu_log: PathBuf,
}

impl LabLogs {
    /// Returns the last lines of the lab's console and of QEMU's output.
    pub(super) fn tail(&self) -> String {
        let console = fs::read(&self.console).unwrap_or_default();
        let said = fs::read(&self.qemu_log).unwrap_or_default();
        let mut tail = last_lines(&String::from_utf8_lossy(&console), 15);
        tail.push_str(&last_lines(&String::from_utf8_lossy(&said), 5));
        tail
    }

    /// Describes why a lab ended, with QEMU's exit status and the end of the lab's console.
    /// `reason` states why the connection to the agent was closed.
    pub(super) fn describe_end(&self, reason: &str) -> String {
        let how = self
            .ending
            .wait(Duration::from_secs(3))
            .unwrap_or_else(|| "still runs".to_owned());
        format!(
            "{reason}; QEMU: {how}; its console is in {}, and ends with:\n{}",
            self.console.display(),
            self.tail()
        )
    }
}
