//! The run state of a VM, shared by its vCPU threads and whoever starts, pauses and stops it.

use std::io;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::debugger::{Debugger, RunSwitch};
use crate::devices::cpu_plug::VcpuSet;
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
    /// The guest reset the machine, which cannot start again, for instance because its kernel's file is
    /// gone; the reason was logged.
    NotRestarted,
}

impl StopReason {
    /// Whether a machine that restarts goes on after this: a processor that shuts down resets a PC, too.
    fn is_reset(self) -> bool {
        matches!(self, StopReason::Reset | StopReason::TripleFault)
    }
}

/// What a reset of the machine by its guest leads to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnReset {
    /// The VM ends.
    #[default]
    Exit,
    /// The VM starts again.
    Restart,
}

/// Not one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be exit (the VM ends) or restart (the guest boots again)")]
pub struct NotOnReset;

impl std::str::FromStr for OnReset {
    type Err = NotOnReset;

    fn from_str(text: &str) -> Result<Self, NotOnReset> {
        match text {
            "exit" => Ok(OnReset::Exit),
            "restart" => Ok(OnReset::Restart),
            _ => Err(NotOnReset),
        }
    }
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
    /// Leave the guest, which starts again: see `meeting.rs`.
    Resetting = 3,
    /// Wait outside the guest for a debugger, unless that lets this vCPU alone run: see `debugger.rs`.
    Held = 4,
}

/// Run state and end of one VM.
#[derive(Debug)]
pub struct RunControl {
    state: AtomicU8,
    /// vCPU threads that are waiting in [`RunControl::wait_until_not_paused`].
    parked: AtomicUsize,
    /// A guest that resets the machine runs again.
    on_reset: OnReset,
    ends: Mutex<Ends>,
    changed: Condvar,
    stopped: EventFd,
    /// Somebody has to look at a reset.
    reset: EventFd,
    /// A debugger may come.
    debugger: Option<Debugger>,
}

/// What is behind the lock.
#[derive(Debug, Default)]
pub(super) struct Ends {
    reason: Option<StopReason>,
    /// An operator wants it paused.
    paused: bool,
    /// A debugger has stopped it.
    held: bool,
    /// The vCPUs of a reset.
    pub(super) meeting: Meeting,
}

/// The vCPUs of a reset, see `meeting.rs`.
#[derive(Debug, Default)]
pub(super) struct Meeting {
    /// Those outside the guest, that wait.
    pub(super) arrived: VcpuSet,
    /// Those that are to go on and have not been restored.
    pub(super) missing: VcpuSet,
    /// The machine was made anew: those that are missing may start again.
    pub(super) ready: bool,
}

impl RunControl {
    /// A VM that may run.
    ///
    /// # Errors
    /// The error of `eventfd(2)`.
    pub fn new(on_reset: OnReset) -> io::Result<Self> {
        Ok(Self {
            state: AtomicU8::new(RunState::Running as u8),
            parked: AtomicUsize::new(0),
            on_reset,
            ends: Mutex::default(),
            changed: Condvar::new(),
            stopped: EventFd::new(EFD_NONBLOCK)?,
            reset: EventFd::new(EFD_NONBLOCK)?,
            debugger: None,
        })
    }

    /// With a place for a debugger.
    pub fn with_debugger(self, debugger: Option<Debugger>) -> Self {
        Self { debugger, ..self }
    }

    /// The place for a debugger, if one may come.
    pub fn debugger(&self) -> Option<&Debugger> {
        self.debugger.as_ref()
    }

    /// The current run state; one relaxed load.
    pub fn state(&self) -> RunState {
        match self.state.load(Ordering::Relaxed) {
            0 => RunState::Running,
            1 => RunState::Paused,
            3 => RunState::Resetting,
            4 => RunState::Held,
            _ => RunState::Stopped,
        }
    }

    /// Ends the VM. The first reason counts; later calls change nothing.
    pub fn stop(&self, reason: StopReason) {
        let mut ends = self.lock();
        ends.reason.get_or_insert(reason);
        self.set(RunState::Stopped);
        drop(ends);
        self.changed.notify_all();
        if let Err(e) = self.stopped.write(1) {
            log::error!("cannot announce the end of the VM: {e}");
        }
    }

    /// A vCPU has done what ends the VM, or starts it again where a reset does.
    pub fn guest_ends(&self, reason: StopReason) {
        if self.on_reset == OnReset::Exit || !reason.is_reset() {
            return self.stop(reason);
        }
        let ends = self.lock();
        match self.state() {
            RunState::Running | RunState::Paused | RunState::Held => self.set(RunState::Resetting),
            RunState::Stopped | RunState::Resetting => {}
        }
        drop(ends);
        self.changed.notify_all();
        self.look_at_reset();
    }

    /// Wakes the main loop, so that it looks how far a reset is.
    pub(super) fn look_at_reset(&self) {
        if let Err(e) = self.reset.write(1) {
            log::error!("cannot announce a reset: {e}");
        }
    }

    /// Readable when there is something to do for a reset.
    pub fn reset_event(&self) -> &EventFd {
        &self.reset
    }

    /// Whether the VM starts again when its guest resets it.
    pub fn restarts(&self) -> bool {
        self.on_reset == OnReset::Restart
    }

    /// Pauses or resumes; returns false when the VM has ended. One that is resetting is paused behind that.
    pub fn set_paused(&self, paused: bool) -> bool {
        let mut ends = self.lock();
        ends.paused = paused;
        match self.state() {
            RunState::Stopped => return false,
            RunState::Resetting => return true,
            RunState::Running | RunState::Paused | RunState::Held => self.set_as_wanted(&ends),
        }
        drop(ends);
        self.changed.notify_all();
        true
    }

    /// Whether an operator wants it paused.
    pub fn is_to_pause(&self) -> bool {
        self.lock().paused
    }

    /// Running, paused or held, as the operator and a debugger want it.
    pub(super) fn set_as_wanted(&self, ends: &Ends) {
        self.set(if ends.paused {
            RunState::Paused
        } else if ends.held {
            RunState::Held
        } else {
            RunState::Running
        });
    }

    fn set(&self, state: RunState) {
        self.state.store(state as u8, Ordering::SeqCst);
    }

    /// Waits for a change.
    pub(super) fn wait<'a>(&self, ends: MutexGuard<'a, Ends>) -> MutexGuard<'a, Ends> {
        self.changed.wait(ends).unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells all who wait.
    pub(super) fn tell(&self) {
        self.changed.notify_all();
    }

    /// Blocks a vCPU thread while the VM is paused or held and it has no `mail`. Who sends it some calls
    /// [`RunControl::wake_parked`] after that.
    pub fn wait_until_not_paused(&self, mail: impl Fn() -> bool) {
        let mut guard = self.lock();
        self.parked.fetch_add(1, Ordering::SeqCst);
        while matches!(self.state(), RunState::Paused | RunState::Held) && !mail() {
            guard = self.wait(guard);
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
        self.lock().reason
    }

    /// Becomes readable when the VM has ended.
    pub fn stopped_event(&self) -> &EventFd {
        &self.stopped
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Ends> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RunSwitch for RunControl {
    /// An operator's pause comes before that.
    fn set_held(&self, held: bool) {
        let mut ends = self.lock();
        ends.held = held;
        match self.state() {
            RunState::Stopped | RunState::Resetting => {}
            RunState::Running | RunState::Paused | RunState::Held => self.set_as_wanted(&ends),
        }
        drop(ends);
        self.changed.notify_all();
    }

    fn wake_parked(&self) {
        RunControl::wake_parked(self);
    }

    fn has_ended(&self) -> bool {
        self.reason().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first reason is the one that is reported, and a stopped VM cannot be resumed.
    #[test]
    fn first_stop_reason_wins_and_is_final() {
        let control = RunControl::new(OnReset::Exit).unwrap();
        assert!(control.set_paused(true));
        control.stop(StopReason::Reset);
        control.stop(StopReason::PowerOff);
        assert_eq!(control.reason(), Some(StopReason::Reset));
        assert!(!control.set_paused(false));
        assert_eq!(control.state(), RunState::Stopped);
        assert_eq!(control.stopped_event().read().unwrap(), 2);
    }

    /// A reset ends a VM that does not restart, and nothing but a reset is survived by one that does.
    #[test]
    fn only_resets_are_survived_and_only_if_asked() {
        let exits = RunControl::new(OnReset::Exit).unwrap();
        exits.guest_ends(StopReason::Reset);
        assert_eq!(exits.reason(), Some(StopReason::Reset));
        let restarts = RunControl::new(OnReset::Restart).unwrap();
        restarts.guest_ends(StopReason::TripleFault);
        assert_eq!((restarts.reason(), restarts.state()), (None, RunState::Resetting));
        assert!(restarts.set_paused(true));
        assert_eq!(restarts.state(), RunState::Resetting, "the pause comes after it");
        restarts.guest_ends(StopReason::PowerOff);
        assert_eq!(restarts.reason(), Some(StopReason::PowerOff));
        restarts.guest_ends(StopReason::Reset);
        assert_eq!(restarts.state(), RunState::Stopped);
    }

    /// Mail gets a parked thread out without ending the pause.
    #[test]
    fn mail_wakes_a_parked_thread() {
        use std::sync::atomic::AtomicBool;
        let shared = std::sync::Arc::new((RunControl::new(OnReset::Exit).unwrap(), AtomicBool::new(false)));
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

    /// An operator's pause and a debugger's stop each hold the machine, whoever of the two ends first.
    #[test]
    fn a_pause_and_a_debugger_do_not_undo_each_other() {
        let control = RunControl::new(OnReset::Restart).unwrap();
        control.set_held(true);
        assert_eq!(control.state(), RunState::Held);
        control.set_paused(true);
        assert_eq!(control.state(), RunState::Paused);
        control.set_held(false);
        assert_eq!(control.state(), RunState::Paused);
        control.set_held(true);
        control.set_paused(false);
        assert_eq!(control.state(), RunState::Held);
        control.guest_ends(StopReason::Reset);
        control.set_held(false);
        assert_eq!(control.state(), RunState::Resetting);
        control.stop(StopReason::Operator);
        control.set_held(true);
        assert_eq!(control.state(), RunState::Stopped);
    }

    /// A stop releases threads that wait in a pause.
    #[test]
    fn stop_releases_paused_threads() {
        let control = std::sync::Arc::new(RunControl::new(OnReset::Exit).unwrap());
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
