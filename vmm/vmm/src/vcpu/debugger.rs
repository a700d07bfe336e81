//! State that a debugger shares with the vCPU threads: which vCPUs may run, breakpoints, and the
//! registers of stopped vCPUs.
//!
//! While a debugger stops the machine, the run state is `Held` (see `control.rs`). Each vCPU waits
//! outside the guest, as in a pause by an operator, and publishes its registers when asked
//! ([`Debugger::collect`]). Changes to the registers are written to KVM when the vCPU resumes. Only
//! the thread of the vCPU makes these KVM calls.
//!
//! A vCPU that hits a breakpoint or completes a single step stops all vCPUs with
//! `Debugger::record_stop`. If several vCPUs do so at the same time, only the first stop is
//! reported. The other vCPUs repeat their instruction when they resume, and stop again if the
//! breakpoint is still set.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use kvm_bindings::{kvm_debug_exit_arch, kvm_fpu, kvm_regs, kvm_sregs};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::kicker::Kicker;
use crate::kvm::stepping::BREAKPOINTS;

/// Vector of INT3 (SDM vol. 3 §6.15).
const BREAKPOINT: u32 = 3;
/// DR6.BS: the debug exception was caused by a single step (SDM vol. 3 §19.2.3).
const DR6_STEP: u64 = 1 << 14;
/// Interval at which a thread that waits for registers checks whether vCPU threads have ended.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Registers of a vCPU that a debugger can read. Changes to `system` have no effect.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct VcpuRegisters {
    /// General-purpose registers.
    pub general: kvm_regs,
    /// Segment and control registers.
    pub system: kvm_sregs,
    /// x87 and SSE registers.
    pub fpu: kvm_fpu,
}

/// Action of a vCPU when the debugger resumes the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ResumeAction {
    /// The vCPU runs freely.
    Run = 0,
    /// The vCPU executes one instruction and then stops.
    Step = 1,
    /// The vCPU stays stopped.
    Stay = 2,
}

/// Kind of access at which a hardware breakpoint stops (SDM vol. 3 §19.2.4: R/W of DR7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakpointAccess {
    /// Stops before the instruction at the address is executed.
    Execute = 0,
    /// Stops after a write to the address.
    Write = 1,
    /// Stops after a read or a write of the address.
    Any = 3,
}

/// A hardware breakpoint of the debugger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HardwareBreakpoint {
    /// Linear address, a multiple of `length`.
    pub address: u64,
    /// Length in bytes: 1, 2, 4 or 8.
    pub length: u8,
    /// Kind of access at which the breakpoint stops.
    pub access: BreakpointAccess,
}

/// A software breakpoint: an INT3 in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoftwareBreakpoint {
    /// Linear address of the INT3, in the address space of the vCPU through which it was written.
    pub address: u64,
    /// Guest-physical address of the INT3.
    pub physical: u64,
    /// Byte that the INT3 has replaced.
    pub replaced: u8,
}

/// Reason why a vCPU has stopped the machine for the debugger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DebugStopCause {
    /// An INT3 of the debugger.
    SoftwareBreakpoint,
    /// A hardware breakpoint of the debugger.
    HardwareBreakpoint(HardwareBreakpoint),
    /// A single step that the debugger requested has completed.
    Step,
}

/// A stop of the machine caused by one vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DebugStop {
    /// Number of the vCPU that stopped.
    pub vcpu: u8,
    /// Reason why the vCPU stopped.
    pub cause: DebugStopCause,
}

/// Error when stopping the machine for a debugger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VcpuStopError {
    /// The VM has ended, so its vCPUs cannot stop.
    #[error("the VM has exited")]
    Ended,
    /// The thread of this vCPU does not respond.
    #[error("vCPU {0} does not stop")]
    Slow(u8),
}

/// Interface with which a debugger changes the run state of a machine.
pub trait DebuggerRunControl {
    /// Stops the machine for a debugger if the argument is `true`, and resumes it otherwise.
    fn set_held(&self, held: bool);

    /// Wakes the vCPU threads that wait outside the guest, so that they check for requests.
    fn wake_parked(&self);

    /// Returns `true` if the VM has ended.
    fn has_ended(&self) -> bool;
}

/// Data that the debugger and one vCPU exchange.
#[derive(Debug)]
struct VcpuDebugState {
    /// Action of the vCPU when the debugger resumes the machine: a [`ResumeAction`] as an integer.
    go: AtomicU8,
    /// `true` if the debugger has asked for the registers and the vCPU has not published them yet.
    asked: AtomicBool,
    view: Mutex<RegisterExchange>,
}

/// Registers of a stopped vCPU, as exchanged between the vCPU and the debugger.
#[derive(Debug, Default)]
struct RegisterExchange {
    /// Registers that the vCPU has published, with the changes that the debugger has made since.
    shown: Option<VcpuRegisters>,
    /// Sets of registers in `shown` that the debugger has changed, if any.
    changed: Option<ChangedRegisters>,
    /// Registers that the vCPU must write to KVM before it resumes, and which sets of them have
    /// changed.
    changes: Option<(VcpuRegisters, ChangedRegisters)>,
}

/// Sets of registers that a debugger has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChangedRegisters {
    /// General-purpose registers only.
    General,
    /// General-purpose, x87 and SSE registers. Not used if the x87 and SSE registers are unchanged,
    /// because some versions of KVM do not accept the FPU state that they have returned.
    Fpu,
}

/// State that a debugger shares with the vCPU threads of a machine.
#[derive(Debug)]
pub struct Debugger {
    cells: Vec<VcpuDebugState>,
    /// `true` if KVM can block interrupts during a single step.
    blocks_interrupts: bool,
    attached: AtomicBool,
    /// Version number that changes whenever `points` or `attached` changes.
    version: AtomicU64,
    points: Mutex<Vec<HardwareBreakpoint>>,
    planted: Mutex<Vec<SoftwareBreakpoint>>,
    stop: Mutex<Option<DebugStop>>,
    /// Eventfd that is readable when a vCPU has stopped the machine.
    event: EventFd,
    showing: Mutex<()>,
    shown: Condvar,
    kicker: OnceLock<Kicker>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Debugger {
    /// Creates the state for a machine with up to `vcpus` vCPUs. `blocks_interrupts` states whether
    /// KVM supports `KVM_GUESTDBG_BLOCKIRQ`.
    ///
    /// # Errors
    /// Returns an error if `eventfd(2)` fails.
    pub fn new(vcpus: u8, blocks_interrupts: bool) -> std::io::Result<Self> {
        let cell = |_| VcpuDebugState {
            go: AtomicU8::new(ResumeAction::Run as u8),
            asked: AtomicBool::new(false),
            view: Mutex::default(),
        };
        Ok(Self {
            cells: (0..vcpus).map(cell).collect(),
            blocks_interrupts,
            attached: AtomicBool::new(false),
            version: AtomicU64::new(0),
            points: Mutex::default(),
            planted: Mutex::default(),
            stop: Mutex::default(),
            event: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            showing: Mutex::default(),
            shown: Condvar::new(),
            kicker: OnceLock::new(),
        })
    }

    /// Sets the kicker with which the vCPU threads are kicked. Only the first call has an effect.
    pub fn kicks(&self, kicker: Kicker) {
        let _ = self.kicker.set(kicker);
    }

    fn kick(&self) {
        if let Some(kicker) = self.kicker.get() {
            kicker.kick();
        }
    }

    fn cell(&self, vcpu: u8) -> Option<&VcpuDebugState> {
        self.cells.get(usize::from(vcpu))
    }

    /// Records whether a debugger is attached.
    pub fn attach(&self, attached: bool) {
        self.attached.store(attached, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns the eventfd that is readable when a vCPU has stopped the machine.
    /// [`Debugger::take_stop`] then returns the reason.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// Returns the stop that a vCPU has reported, if any, and resets the eventfd.
    pub fn take_stop(&self) -> Option<DebugStop> {
        let _ = self.event.read();
        lock(&self.stop).take()
    }

    /// Stops the vCPUs for the debugger.
    pub fn stop_vcpus(&self, switch: &dyn DebuggerRunControl) {
        for cell in &self.cells {
            cell.go.store(ResumeAction::Stay as u8, Ordering::SeqCst);
        }
        switch.set_held(true);
        self.kick();
    }

    /// Resumes the vCPUs, each with the action that `go` returns for it.
    pub fn release(&self, switch: &dyn DebuggerRunControl, go: impl Fn(u8) -> ResumeAction) {
        lock(&self.stop).take();
        let _ = self.event.read();
        let mut any_stays = false;
        for (vcpu, cell) in (0..).zip(&self.cells) {
            let go = go(vcpu);
            any_stays |= go == ResumeAction::Stay;
            if go != ResumeAction::Stay {
                let mut view = lock(&cell.view);
                let (shown, changed) = (view.shown.take(), view.changed.take());
                view.changes = shown.zip(changed).or(view.changes.take());
            }
            cell.go.store(go as u8, Ordering::SeqCst);
        }
        switch.set_held(any_stays);
        switch.wake_parked();
    }

    /// Waits until the vCPUs that `present` lists, which must be stopped, have published their
    /// registers.
    ///
    /// # Errors
    /// Returns [`VcpuStopError::Ended`] if the VM ends, and [`VcpuStopError::Slow`] if a vCPU does
    /// not respond within `patience`.
    pub fn collect(
        &self,
        switch: &dyn DebuggerRunControl,
        present: impl Fn() -> Vec<u8>,
        patience: Duration,
    ) -> Result<(), VcpuStopError> {
        let end = std::time::Instant::now() + patience;
        for cell in &self.cells {
            // If a vCPU has published its registers, it has not run since.
            let hides = lock(&cell.view).shown.is_none();
            cell.asked.store(hides, Ordering::SeqCst);
        }
        switch.wake_parked();
        self.kick();
        let mut showing = lock(&self.showing);
        loop {
            let hides = |vcpu: &u8| {
                self.cell(*vcpu)
                    .is_some_and(|cell| lock(&cell.view).shown.is_none())
            };
            let Some(missing) = present().into_iter().find(hides) else {
                return Ok(());
            };
            if switch.has_ended() {
                return Err(VcpuStopError::Ended);
            }
            if std::time::Instant::now() >= end {
                return Err(VcpuStopError::Slow(missing));
            }
            showing = self
                .shown
                .wait_timeout(showing, CHECK_INTERVAL)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Returns the registers that a vCPU has published. Returns `None` if the debugger has not
    /// stopped the vCPU.
    pub fn registers(&self, vcpu: u8) -> Option<VcpuRegisters> {
        lock(&self.cell(vcpu)?.view).shown
    }

    /// Sets the registers of a stopped vCPU. Returns `false` if the debugger has not stopped the
    /// vCPU.
    pub fn set_registers(&self, vcpu: u8, registers: &VcpuRegisters) -> bool {
        let Some(cell) = self.cell(vcpu) else { return false };
        let mut view = lock(&cell.view);
        let Some(shown) = view.shown.replace(*registers) else {
            view.shown = None;
            return false;
        };
        if shown.fpu != registers.fpu || view.changed == Some(ChangedRegisters::Fpu) {
            view.changed = Some(ChangedRegisters::Fpu);
        } else {
            view.changed = Some(ChangedRegisters::General);
        }
        true
    }

    /// Sets a hardware breakpoint. Returns `false` if `most` breakpoints are already set.
    pub fn add_hardware_breakpoint(&self, point: HardwareBreakpoint, most: usize) -> bool {
        let mut points = lock(&self.points);
        if points.len() >= most.min(BREAKPOINTS) {
            return false;
        }
        points.push(point);
        self.version.fetch_add(1, Ordering::SeqCst);
        true
    }

    /// Removes a hardware breakpoint. Returns `false` if the breakpoint is not set.
    pub fn remove_hardware_breakpoint(&self, point: HardwareBreakpoint) -> bool {
        let mut points = lock(&self.points);
        let Some(at) = points.iter().position(|other| *other == point) else {
            return false;
        };
        points.remove(at);
        self.version.fetch_add(1, Ordering::SeqCst);
        true
    }

    /// Removes all hardware breakpoints.
    pub fn clear_hardware_breakpoints(&self) {
        lock(&self.points).clear();
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// Locks and returns the list of the debugger's INT3s in guest memory.
    pub fn planted(&self) -> MutexGuard<'_, Vec<SoftwareBreakpoint>> {
        lock(&self.planted)
    }

    /// Returns `true` if a debugger is attached. Costs one relaxed load.
    #[inline]
    pub fn is_attached(&self) -> bool {
        self.attached.load(Ordering::Relaxed)
    }

    /// Returns what a vCPU does when the debugger resumes the machine.
    pub(super) fn resume_action(&self, vcpu: u8) -> ResumeAction {
        match self.cell(vcpu).map(|cell| cell.go.load(Ordering::SeqCst)) {
            Some(1) => ResumeAction::Step,
            Some(2) => ResumeAction::Stay,
            _ => ResumeAction::Run,
        }
    }

    /// Returns `true` if the debugger has asked this vCPU for its registers.
    pub(super) fn are_registers_requested_from(&self, vcpu: u8) -> bool {
        self.cell(vcpu)
            .is_some_and(|cell| cell.asked.load(Ordering::SeqCst))
    }

    /// Publishes the registers of a vCPU. Before the caller reads them from KVM, it must have
    /// written the changes that [`Debugger::take_changes`] returned.
    pub(super) fn show(&self, vcpu: u8, registers: VcpuRegisters) {
        let Some(cell) = self.cell(vcpu) else { return };
        cell.asked.store(false, Ordering::SeqCst);
        lock(&cell.view).shown = Some(registers);
        drop(lock(&self.showing));
        self.shown.notify_all();
    }

    /// Returns the changes that the debugger has made to the registers of a vCPU, if any. The vCPU
    /// must write them to KVM before it resumes.
    pub(super) fn take_changes(&self, vcpu: u8) -> Option<(VcpuRegisters, ChangedRegisters)> {
        lock(&self.cell(vcpu)?.view).changes.take()
    }

    /// Returns the hardware breakpoints and their version, or `None` if the version is still
    /// `known`.
    pub(super) fn hardware_breakpoints_since(&self, known: u64) -> Option<(u64, Vec<HardwareBreakpoint>)> {
        let version = self.version.load(Ordering::SeqCst);
        (version != known).then(|| (version, lock(&self.points).clone()))
    }

    /// Returns `true` if KVM can block interrupts during a single step.
    pub(super) fn blocks_interrupts(&self) -> bool {
        self.blocks_interrupts
    }

    /// Returns `true` if there is an INT3 of the debugger at a linear address.
    pub(super) fn is_planted(&self, address: u64) -> bool {
        lock(&self.planted)
            .iter()
            .any(|planted| planted.address == address)
    }

    /// Returns why the debug exit `stop` belongs to the debugger, or `None` if it does not. The
    /// first hardware breakpoint of the debugger is in debug register number `first`.
    pub(super) fn stop_cause(
        &self,
        vcpu: u8,
        first: usize,
        stop: &kvm_debug_exit_arch,
    ) -> Option<DebugStopCause> {
        if stop.exception == BREAKPOINT {
            return self
                .is_planted(stop.pc)
                .then_some(DebugStopCause::SoftwareBreakpoint);
        }
        let hit = |n: usize| stop.dr6 & 1 << n != 0;
        let points = lock(&self.points);
        let numbered = (first..BREAKPOINTS).zip(points.iter());
        if let Some((_, point)) = numbered.into_iter().find(|(n, _)| hit(*n)) {
            return Some(DebugStopCause::HardwareBreakpoint(*point));
        }
        (stop.dr6 & DR6_STEP != 0 && self.resume_action(vcpu) == ResumeAction::Step)
            .then_some(DebugStopCause::Step)
    }

    /// Stops all vCPUs for the debugger, because the calling vCPU has caused `stop`. If another
    /// vCPU has already stopped the machine, the reason of that stop is kept.
    pub(super) fn record_stop(&self, switch: &dyn DebuggerRunControl, stop: DebugStop) {
        lock(&self.stop).get_or_insert(stop);
        self.stop_vcpus(switch);
        let _ = self.event.write(1);
    }
}

#[cfg(test)]
mod tests {
    use super::super::control::{ResetPolicy, VmRunControl, VmRunState};
    use super::*;

    const NOW: Duration = Duration::ZERO;

    fn machine() -> VmRunControl {
        let debugger = Debugger::new(2, false).unwrap();
        VmRunControl::new(ResetPolicy::Exit)
            .unwrap()
            .with_debugger(Some(debugger))
    }

    fn at(rip: u64) -> VcpuRegisters {
        let mut registers = VcpuRegisters::default();
        registers.general.rip = rip;
        registers
    }

    /// If other vCPUs run while a vCPU stays stopped, changes to its registers are kept. They are
    /// applied exactly once.
    #[test]
    fn register_changes_are_applied_on_resume() {
        let control = machine();
        let debugger = control.debugger().unwrap();
        debugger.stop_vcpus(&control);
        assert_eq!(
            debugger.collect(&control, || vec![0, 1], NOW),
            Err(VcpuStopError::Slow(0)),
            "nobody has answered"
        );
        debugger.show(0, at(1));
        debugger.show(1, at(2));
        debugger.collect(&control, || vec![0, 1], NOW).unwrap();
        assert!(debugger.set_registers(1, &at(3)));
        debugger.release(&control, |vcpu| {
            if vcpu == 0 {
                ResumeAction::Step
            } else {
                ResumeAction::Stay
            }
        });
        assert_eq!(
            (control.state(), debugger.resume_action(0)),
            (VmRunState::Held, ResumeAction::Step)
        );
        assert_eq!((debugger.take_changes(0), debugger.take_changes(1)), (None, None));
        assert!(!debugger.set_registers(0, &at(9)), "it runs");
        debugger.stop_vcpus(&control);
        assert_eq!(
            debugger.collect(&control, || vec![0, 1], NOW),
            Err(VcpuStopError::Slow(0))
        );
        assert!(!debugger.are_registers_requested_from(1), "it has not run since");
        assert_eq!(debugger.registers(1), Some(at(3)));
        debugger.release(&control, |_| ResumeAction::Run);
        assert_eq!(control.state(), VmRunState::Running);
        assert_eq!(debugger.take_changes(1), Some((at(3), ChangedRegisters::General)));
        assert_eq!(debugger.take_changes(1), None);
    }

    /// A debug exit that the guest caused is not reported to the debugger.
    #[test]
    fn guest_debug_exits_are_not_debugger_stops() {
        let control = machine();
        let debugger = control.debugger().unwrap();
        let stop = |exception, pc, dr6| kvm_debug_exit_arch {
            exception,
            pc,
            dr6,
            ..Default::default()
        };
        let point = HardwareBreakpoint {
            address: 0x10,
            length: 1,
            access: BreakpointAccess::Execute,
        };
        assert!(debugger.add_hardware_breakpoint(point, 1) && !debugger.add_hardware_breakpoint(point, 1));
        debugger.planted().push(SoftwareBreakpoint {
            address: 0x20,
            physical: 0x20,
            replaced: 0x90,
        });
        assert_eq!(
            debugger.stop_cause(0, 0, &stop(3, 0x20, 0)),
            Some(DebugStopCause::SoftwareBreakpoint)
        );
        assert_eq!(debugger.stop_cause(0, 0, &stop(3, 0x21, 0)), None);
        // DR0 and DR1 belong to another user of breakpoints, so the debugger's breakpoint is in
        // DR2.
        assert_eq!(
            debugger.stop_cause(0, 2, &stop(1, 0x10, 1 << 2)),
            Some(DebugStopCause::HardwareBreakpoint(point))
        );
        assert_eq!(debugger.stop_cause(0, 2, &stop(1, 0x10, 1 << 0)), None);
        assert_eq!(
            debugger.stop_cause(0, 0, &stop(1, 0x30, DR6_STEP)),
            None,
            "nobody asked for it"
        );
        debugger.stop_vcpus(&control);
        debugger.release(&control, |_| ResumeAction::Step);
        assert_eq!(
            debugger.stop_cause(0, 0, &stop(1, 0x30, DR6_STEP)),
            Some(DebugStopCause::Step)
        );
        // Only the first of these two stops is reported.
        debugger.record_stop(
            &control,
            DebugStop {
                vcpu: 1,
                cause: DebugStopCause::Step,
            },
        );
        debugger.record_stop(
            &control,
            DebugStop {
                vcpu: 0,
                cause: DebugStopCause::SoftwareBreakpoint,
            },
        );
        assert_eq!(
            debugger.take_stop(),
            Some(DebugStop {
                vcpu: 1,
                cause: DebugStopCause::Step
            })
        );
        assert_eq!(debugger.take_stop(), None);
    }
}
