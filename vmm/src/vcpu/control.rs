//! The run state of a VM, shared by its vCPU threads and whoever starts, pauses and stops it.

use std::io;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Why a VM ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The guest powered off.
    PowerOff,
    /// The guest asked for a reset (keyboard controller, port CF9H, ACPI reset register).
    Reset,
    /// A triple fault or shutdown cycle.
    TripleFault,
    /// The guest wrote to the debug-exit port; the value is the exit status it stands for.
    DebugExit(u8),
    /// The operator stopped the VM (Ctrl-A x, control socket).
    Operator,
    /// SIGTERM or SIGINT.
    Signal(i32),
    /// KVM or the VMM cannot go on; the reason was logged.
    Failed,
}

/// What the vCPU threads are to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RunState {
    /// Run guest code.
    Running = 0,
    /// Wait outside the guest.
    Paused = 1,
    /// Leave the thread.
    Stopped = 2,
}

/// Run state and end of one VM.
#[derive(Debug)]
pub struct RunControl {
    state: AtomicU8,
    /// vCPU threads that are waiting in [`RunControl::wait_until_not_paused`].
    parked: AtomicUsize,
    reason: Mutex<Option<StopReason>>,
    changed: Condvar,
    stopped: EventFd,
}

impl RunControl {
    /// A VM that may run.
    ///
    /// # Errors
    /// The error of `eventfd(2)`.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            state: AtomicU8::new(RunState::Running as u8),
            parked: AtomicUsize::new(0),
            reason: Mutex::new(None),
            changed: Condvar::new(),
            stopped: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// The current run state; one relaxed load.
    pub fn state(&self) -> RunState {
        match self.state.load(Ordering::Relaxed) {
            0 => RunState::Running,
            1 => RunState::Paused,
            _ => RunState::Stopped,
        }
    }

    /// Ends the VM. The first reason counts; later calls change nothing.
    pub fn stop(&self, reason: StopReason) {
        let mut first = self.lock();
        if first.is_none() {
            *first = Some(reason);
        }
        self.state.store(RunState::Stopped as u8, Ordering::SeqCst);
        drop(first);
        self.changed.notify_all();
        if let Err(e) = self.stopped.write(1) {
            log::error!("cannot announce the end of the VM: {e}");
        }
    }

    /// Pauses or resumes; returns false when the VM has ended.
    pub fn set_paused(&self, paused: bool) -> bool {
        let guard = self.lock();
        if self.state() == RunState::Stopped {
            return false;
        }
        let state = if paused {
            RunState::Paused
        } else {
            RunState::Running
        };
        self.state.store(state as u8, Ordering::SeqCst);
        drop(guard);
        self.changed.notify_all();
        true
    }

    /// Blocks a vCPU thread while the VM is paused and it has no `mail`. Who sends it some calls
    /// [`RunControl::wake_parked`] after that.
    pub fn wait_until_not_paused(&self, mail: impl Fn() -> bool) {
        let mut guard = self.lock();
        self.parked.fetch_add(1, Ordering::SeqCst);
        while self.state() == RunState::Paused && !mail() {
            guard = self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.parked.fetch_sub(1, Ordering::SeqCst);
    }

    /// Makes parked vCPU threads look for mail.
    pub fn wake_parked(&self) {
        // Under the lock no thread is between its look and its wait.
        drop(self.lock());
        self.changed.notify_all();
    }

    /// vCPU threads that are outside the guest because of a pause.
    pub fn parked(&self) -> usize {
        self.parked.load(Ordering::SeqCst)
    }

    /// Why the VM ended; `None` while it has not.
    pub fn reason(&self) -> Option<StopReason> {
        *self.lock()
    }

    /// Becomes readable when the VM has ended.
    pub fn stopped_event(&self) -> &EventFd {
        &self.stopped
    }

    fn lock(&self) -> MutexGuard<'_, Option<StopReason>> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first reason is the one that is reported, and a stopped VM cannot be resumed.
    #[test]
    fn first_stop_reason_wins_and_is_final() {
        let control = RunControl::new().unwrap();
        assert!(control.set_paused(true));
        control.stop(StopReason::Reset);
        control.stop(StopReason::PowerOff);
        assert_eq!(control.reason(), Some(StopReason::Reset));
        assert!(!control.set_paused(false));
        assert_eq!(control.state(), RunState::Stopped);
        assert_eq!(control.stopped_event().read().unwrap(), 2);
    }

    /// Mail gets a parked thread out without ending the pause.
    #[test]
    fn mail_wakes_a_parked_thread() {
        use std::sync::atomic::AtomicBool;
        let shared = std::sync::Arc::new((RunControl::new().unwrap(), AtomicBool::new(false)));
        shared.0.set_paused(true);
        let waiter = std::thread::spawn({
            let shared = shared.clone();
            move || shared.0.wait_until_not_paused(|| shared.1.load(Ordering::SeqCst))
        });
        while shared.0.parked() == 0 {
            std::thread::yield_now();
        }
        shared.1.store(true, Ordering::SeqCst);
        shared.0.wake_parked();
        waiter.join().unwrap();
        assert_eq!(shared.0.state(), RunState::Paused);
    }

    /// A stop releases threads that wait in a pause.
    #[test]
    fn stop_releases_paused_threads() {
        let control = std::sync::Arc::new(RunControl::new().unwrap());
        control.set_paused(true);
        let waiter = std::thread::spawn({
            let control = control.clone();
            move || control.wait_until_not_paused(|| false)
        });
        while control.parked() == 0 {
            std::thread::yield_now();
        }
        control.stop(StopReason::Operator);
        waiter.join().unwrap();
        assert_eq!(control.parked(), 0);
    }
}
