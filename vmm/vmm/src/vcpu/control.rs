//! Run state of a VM, shared by its vCPU threads, the main loop and the control server.

use std::io;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::debugger::{Debugger, DebuggerRunControl};
use crate::devices::cpu_plug::VcpuSet;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Reason why a VM has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmStopReason {
    /// The guest powered off.
    PowerOff,
    /// The guest has reset the machine, through the keyboard controller, port CF9H or the ACPI
    /// reset register.
    Reset,
    /// A triple fault of a vCPU, which shuts the processor down.
    TripleFault,
    /// The guest has written to the debug-exit port. The value is the resulting exit status.
    DebugExit(u8),
    /// A stop by the operator (Ctrl-A x, control socket).
    Operator,
    /// The process received SIGTERM or SIGINT.
    Signal(i32),
    /// A fatal error of KVM or of the VMM, which is already logged.
    Failed,
    /// A reset by the guest after which the machine could not be restarted, for example because the
    /// kernel file was removed. The error is already logged.
    NotRestarted,
}

impl VmStopReason {
    /// Returns `true` if this reason restarts the VM under [`ResetPolicy::Restart`]: a reset, or a
    /// triple fault, which resets a PC.
    fn is_reset(self) -> bool {
        matches!(self, VmStopReason::Reset | VmStopReason::TripleFault)
    }
}

/// Policy for a reset of the machine by its guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResetPolicy {
    /// The VM ends.
    #[default]
    Exit,
    /// The VM restarts.
    Restart,
}

/// Error when parsing a [`ResetPolicy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be exit (the VM exits) or restart (the guest boots again)")]
pub struct ParseResetPolicyError;

impl std::str::FromStr for ResetPolicy {
    type Err = ParseResetPolicyError;

    fn from_str(text: &str) -> Result<Self, ParseResetPolicyError> {
        match text {
            "exit" => Ok(ResetPolicy::Exit),
            "restart" => Ok(ResetPolicy::Restart),
            _ => Err(ParseResetPolicyError),
        }
    }
}

/// Run state that the vCPU threads follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum VmRunState {
    /// vCPUs execute guest code.
    Running = 0,
    /// vCPUs wait outside the guest.
    Paused = 1,
    /// vCPU threads terminate.
    Stopped = 2,
    /// vCPUs leave the guest and wait until the machine is reset; see `reset_barrier.rs`.
    Resetting = 3,
    /// vCPUs wait outside the guest for a debugger, see `debugger.rs`. The debugger may let
    /// individual vCPUs run.
    Held = 4,
}

/// Run state and stop reason of a VM, shared by its threads.
#[derive(Debug)]
pub struct VmRunControl {
    state: AtomicU8,
    /// Number of vCPU threads blocked in [`VmRunControl::wait_until_not_paused`].
    parked: AtomicUsize,
    on_reset: ResetPolicy,
    ends: Mutex<RunControlState>,
    changed: Condvar,
    stopped: EventFd,
    /// Eventfd that tells the main loop to perform the next step of a reset.
    reset: EventFd,
    /// State shared with a debugger; `None` if debugging is disabled.
    debugger: Option<Debugger>,
}

/// State of [`VmRunControl`] that its lock protects.
#[derive(Debug, Default)]
pub(super) struct RunControlState {
    reason: Option<VmStopReason>,
    /// `true` if an operator has paused the VM.
    paused: bool,
    /// `true` if a debugger has stopped the VM.
    held: bool,
    pub(super) reset_barrier: ResetBarrier,
}

/// vCPUs that are taking part in a reset, and how far they are; see `reset_barrier.rs`.
#[derive(Debug, Default)]
pub(super) struct ResetBarrier {
    /// vCPUs that have left the guest and wait for the reset.
    pub(super) arrived: VcpuSet,
    /// vCPUs that must still return to their initial state before any vCPU may run.
    pub(super) missing: VcpuSet,
    /// `true` if memory and devices are reset, so that vCPUs may return to their initial state.
    pub(super) ready: bool,
}

impl VmRunControl {
    /// Creates the run control of a VM that is in state [`VmRunState::Running`].
    ///
    /// # Errors
    /// Returns an error if `eventfd(2)` fails.
    pub fn new(on_reset: ResetPolicy) -> io::Result<Self> {
        Ok(Self {
            state: AtomicU8::new(VmRunState::Running as u8),
            parked: AtomicUsize::new(0),
            on_reset,
            ends: Mutex::default(),
            changed: Condvar::new(),
            stopped: EventFd::new(EFD_NONBLOCK)?,
            reset: EventFd::new(EFD_NONBLOCK)?,
            debugger: None,
        })
    }

    /// Enables debugging with `debugger`.
    pub fn with_debugger(self, debugger: Option<Debugger>) -> Self {
        Self { debugger, ..self }
    }

    /// Returns the state shared with a debugger, or `None` if debugging is disabled.
    pub fn debugger(&self) -> Option<&Debugger> {
        self.debugger.as_ref()
    }

    /// Returns the current run state. Costs one relaxed load.
    pub fn state(&self) -> VmRunState {
        match self.state.load(Ordering::Relaxed) {
            0 => VmRunState::Running,
            1 => VmRunState::Paused,
            3 => VmRunState::Resetting,
            4 => VmRunState::Held,
            _ => VmRunState::Stopped,
        }
    }

    /// Stops the VM for `reason`. Has no effect if the VM has already stopped.
    pub fn stop(&self, reason: VmStopReason) {
        let mut ends = self.lock();
        ends.reason.get_or_insert(reason);
        self.set(VmRunState::Stopped);
        drop(ends);
        self.changed.notify_all();
        if let Err(e) = self.stopped.write(1) {
            log::error!("cannot announce the end of the VM: {e}");
        }
    }

    /// Handles a request by the guest to stop or reset the machine. If `reason` is a reset and
    /// [`ResetPolicy::Restart`] is set, starts a reset. Otherwise stops the VM.
    pub fn handle_guest_stop(&self, reason: VmStopReason) {
        if self.on_reset == ResetPolicy::Exit || !reason.is_reset() {
            return self.stop(reason);
        }
        let ends = self.lock();
        match self.state() {
            VmRunState::Running | VmRunState::Paused | VmRunState::Held => self.set(VmRunState::Resetting),
            VmRunState::Stopped | VmRunState::Resetting => {}
        }
        drop(ends);
        self.changed.notify_all();
        self.signal_reset();
    }

    /// Tells the main loop to perform the next step of a reset.
    pub(super) fn signal_reset(&self) {
        if let Err(e) = self.reset.write(1) {
            log::error!("cannot announce a reset: {e}");
        }
    }

    /// Returns the eventfd that is readable when the main loop must perform the next step of a
    /// reset.
    pub fn reset_event(&self) -> &EventFd {
        &self.reset
    }

    /// Returns `true` if a reset by the guest restarts the VM.
    pub fn restarts(&self) -> bool {
        self.on_reset == ResetPolicy::Restart
    }

    /// Pauses or resumes the VM. Returns `false` if the VM has ended. A pause during a reset takes
    /// effect after the reset.
    pub fn set_paused(&self, paused: bool) -> bool {
        let mut ends = self.lock();
        ends.paused = paused;
        match self.state() {
            VmRunState::Stopped => return false,
            VmRunState::Resetting => return true,
            VmRunState::Running | VmRunState::Paused | VmRunState::Held => self.apply_requested_state(&ends),
        }
        drop(ends);
        self.changed.notify_all();
        true
    }

    /// Returns `true` if an operator requested a pause.
    pub fn is_pause_requested(&self) -> bool {
        self.lock().paused
    }

    /// Sets the run state that the operator and the debugger have requested. If the operator has
    /// paused the VM, the debugger has no effect.
    pub(super) fn apply_requested_state(&self, ends: &RunControlState) {
        self.set(if ends.paused {
            VmRunState::Paused
        } else if ends.held {
            VmRunState::Held
        } else {
            VmRunState::Running
        });
    }

    fn set(&self, state: VmRunState) {
        self.state.store(state as u8, Ordering::SeqCst);
    }

    /// Blocks the calling thread until another thread changes the state. May return earlier.
    pub(super) fn wait<'a>(&self, ends: MutexGuard<'a, RunControlState>) -> MutexGuard<'a, RunControlState> {
        self.changed.wait(ends).unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all threads that wait for a state change.
    pub(super) fn wake_waiters(&self) {
        self.changed.notify_all();
    }

    /// Blocks a vCPU thread while the VM is paused or held by a debugger. Returns early if `mail`
    /// returns `true`, which means that the thread has a request. The sender of a request must call
    /// [`VmRunControl::wake_parked`] after posting it.
    pub fn wait_until_not_paused(&self, mail: impl Fn() -> bool) {
        let mut guard = self.lock();
        self.parked.fetch_add(1, Ordering::SeqCst);
        while matches!(self.state(), VmRunState::Paused | VmRunState::Held) && !mail() {
            guard = self.wait(guard);
        }
        self.parked.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes the vCPU threads that are blocked by a pause or by a debugger, so that they check for
    /// requests.
    pub fn wake_parked(&self) {
        // Taking the lock ensures that no thread is between its check and its wait.
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Returns the number of vCPU threads that are blocked by a pause or by a debugger.
    pub fn parked(&self) -> usize {
        self.parked.load(Ordering::SeqCst)
    }

    /// Returns the stop reason, or `None` while the VM is running.
    pub fn reason(&self) -> Option<VmStopReason> {
        self.lock().reason
    }

    /// Returns the eventfd that is readable when the VM has stopped.
    pub fn stopped_event(&self) -> &EventFd {
        &self.stopped
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, RunControlState> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DebuggerRunControl for VmRunControl {
    /// Stops the VM for a debugger, or resumes it unless an operator has paused it.
    fn set_held(&self, held: bool) {
        let mut ends = self.lock();
        ends.held = held;
        match self.state() {
            VmRunState::Stopped | VmRunState::Resetting => {}
            VmRunState::Running | VmRunState::Paused | VmRunState::Held => self.apply_requested_state(&ends),
        }
        drop(ends);
        self.changed.notify_all();
    }

    fn wake_parked(&self) {
        VmRunControl::wake_parked(self);
    }

    fn has_ended(&self) -> bool {
        self.reason().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only the first stop reason is reported, and a stopped VM cannot be resumed.
    #[test]
    fn first_stop_reason_wins_and_is_final() {
        let control = VmRunControl::new(ResetPolicy::Exit).unwrap();
        assert!(control.set_paused(true));
        control.stop(VmStopReason::Reset);
        control.stop(VmStopReason::PowerOff);
        assert_eq!(control.reason(), Some(VmStopReason::Reset));
        assert!(!control.set_paused(false));
        assert_eq!(control.state(), VmRunState::Stopped);
        assert_eq!(control.stopped_event().read().unwrap(), 2);
    }

    /// A reset by the guest stops the VM unless [`ResetPolicy::Restart`] is set. All other reasons
    /// always stop the VM.
    #[test]
    fn only_reset_restarts_vm_if_enabled() {
        let exits = VmRunControl::new(ResetPolicy::Exit).unwrap();
        exits.handle_guest_stop(VmStopReason::Reset);
        assert_eq!(exits.reason(), Some(VmStopReason::Reset));
        let restarts = VmRunControl::new(ResetPolicy::Restart).unwrap();
        restarts.handle_guest_stop(VmStopReason::TripleFault);
        assert_eq!(
            (restarts.reason(), restarts.state()),
            (None, VmRunState::Resetting)
        );
        assert!(restarts.set_paused(true));
        assert_eq!(
            restarts.state(),
            VmRunState::Resetting,
            "the pause comes after it"
        );
        restarts.handle_guest_stop(VmStopReason::PowerOff);
        assert_eq!(restarts.reason(), Some(VmStopReason::PowerOff));
        restarts.handle_guest_stop(VmStopReason::Reset);
        assert_eq!(restarts.state(), VmRunState::Stopped);
    }

    /// A request wakes a vCPU thread that is blocked by a pause. The pause does not end.
    #[test]
    fn request_wakes_parked_thread() {
        use std::sync::atomic::AtomicBool;
        let shared = std::sync::Arc::new((
            VmRunControl::new(ResetPolicy::Exit).unwrap(),
            AtomicBool::new(false),
        ));
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
        assert_eq!(shared.0.state(), VmRunState::Paused);
    }

    /// The VM stays stopped until both the operator's pause and the debugger's stop have ended.
    #[test]
    fn pause_and_debugger_stop_are_independent() {
        let control = VmRunControl::new(ResetPolicy::Restart).unwrap();
        control.set_held(true);
        assert_eq!(control.state(), VmRunState::Held);
        control.set_paused(true);
        assert_eq!(control.state(), VmRunState::Paused);
        control.set_held(false);
        assert_eq!(control.state(), VmRunState::Paused);
        control.set_held(true);
        control.set_paused(false);
        assert_eq!(control.state(), VmRunState::Held);
        control.handle_guest_stop(VmStopReason::Reset);
        control.set_held(false);
        assert_eq!(control.state(), VmRunState::Resetting);
        control.stop(VmStopReason::Operator);
        control.set_held(true);
        assert_eq!(control.state(), VmRunState::Stopped);
    }

    #[test]
    fn stop_releases_paused_threads() {
        let control = std::sync::Arc::new(VmRunControl::new(ResetPolicy::Exit).unwrap());
        control.set_paused(true);
        let waiter = std::thread::spawn({
            let control = control.clone();
            move || control.wait_until_not_paused(|| false)
        });
        while control.parked() == 0 {
            std::thread::yield_now();
        }
        control.stop(VmStopReason::Operator);
        waiter.join().unwrap();
        assert_eq!(control.parked(), 0);
    }
}
