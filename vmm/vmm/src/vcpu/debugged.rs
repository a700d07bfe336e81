//! Debugger support of a vCPU on its own thread. While the debugger stops the machine, the vCPU
//! waits outside the guest and publishes its registers. Otherwise it stops at the debugger's
//! breakpoints.

use kvm_bindings::kvm_debug_exit_arch;
use perf_core::guest_log;

use super::control::VmStopReason;
use super::debugger::{ChangedRegisters, DebugStop, DebugStopCause, Debugger, ResumeAction, VcpuRegisters};
use super::failure::VcpuFailure;
use super::internal_error::InternalError;
use super::running::{ExitAction, LoopAction, Running};
use super::step::debug::EntryDebugState;
use crate::kvm::call::KvmIoctlError;

impl Running {
    /// Returns the state shared with the debugger if a debugger is attached, and `None` otherwise.
    fn attached(&self) -> Option<&Debugger> {
        self.control.debugger().filter(|debugger| debugger.is_attached())
    }

    /// Returns `true` if a debugger is attached.
    pub(super) fn is_debugger_attached(&self) -> bool {
        self.attached().is_some()
    }

    /// Returns `true` if the debugger lets this vCPU run.
    pub(super) fn may_run(&self) -> bool {
        self.control
            .debugger()
            .is_none_or(|debugger| debugger.resume_action(self.id) != ResumeAction::Stay)
    }

    /// Returns `true` if the debugger has asked this vCPU for its registers.
    pub(super) fn are_registers_requested(&self) -> bool {
        self.control
            .debugger()
            .is_some_and(|debugger| debugger.are_registers_requested_from(self.id))
    }

    /// Returns `true` if KVM has not completed the last exit, which may still change registers.
    pub(super) fn has_open_exit(&self) -> bool {
        self.exit_is_open
    }

    /// Makes KVM complete the last exit without executing guest code.
    pub(super) fn complete_open_exit(&mut self) -> Result<LoopAction, VcpuFailure> {
        self.fd.request_exit();
        let next = self.enter();
        self.serve(next)
    }

    /// Publishes this vCPU's registers to the debugger.
    pub(super) fn publish_registers(&mut self) -> Result<(), VcpuFailure> {
        self.apply_debugger_registers()?;
        let registers = VcpuRegisters {
            general: self.fd.get_regs().map_err(VcpuFailure::Debug)?,
            system: self.fd.get_sregs().map_err(VcpuFailure::Debug)?,
            fpu: self.fd.get_fpu().map_err(VcpuFailure::Debug)?,
        };
        if let Some(debugger) = self.control.debugger() {
            debugger.show(self.id, registers);
        }
        Ok(())
    }

    /// Writes to KVM the registers that the debugger has changed.
    pub(super) fn apply_debugger_registers(&mut self) -> Result<(), VcpuFailure> {
        let debugger = self.control.debugger();
        let Some((registers, changed)) = debugger.and_then(|debugger| debugger.take_changes(self.id)) else {
            return Ok(());
        };
        self.registers.forget();
        self.fd.set_regs(&registers.general).map_err(VcpuFailure::Debug)?;
        if changed == ChangedRegisters::Fpu {
            self.fd.set_fpu(&registers.fpu).map_err(VcpuFailure::Debug)?;
        }
        Ok(())
    }

    /// Returns the debug state that the debugger needs at the next entry. Also passes new hardware
    /// breakpoints to the owner of the debug registers.
    pub(super) fn debugger_request(&mut self) -> EntryDebugState {
        let Some(debugger) = self.control.debugger() else {
            return EntryDebugState::default();
        };
        if let Some((version, points)) = debugger.hardware_breakpoints_since(self.debugger_version) {
            self.debugger_version = version;
            self.debug
                .set_debugger_breakpoints(debugger.is_attached().then_some(points));
        }
        let step = debugger.is_attached() && debugger.resume_action(self.id) == ResumeAction::Step;
        EntryDebugState {
            step,
            block_interrupts: step && debugger.blocks_interrupts(),
            ..EntryDebugState::default()
        }
    }

    /// Stops the machine and returns `true` if the debug exit `stop` was caused by the debugger's
    /// breakpoint or step. Returns `false` otherwise.
    pub(super) fn stop_for_debugger(&self, stop: &kvm_debug_exit_arch) -> bool {
        let first = self.debug.sites();
        let why = |debugger: &Debugger| debugger.stop_cause(self.id, first, stop);
        match self.attached().and_then(why) {
            Some(why) => {
                self.stop_all(why);
                true
            }
            None => false,
        }
    }

    /// Handles an instruction that KVM's emulator does not support. If the instruction is the
    /// debugger's INT3, which some emulators do not support either, reports a breakpoint.
    pub(super) fn handle_emulation_failure(&mut self) -> Result<LoopAction, VcpuFailure> {
        let planted = |debugger: &Debugger| -> Result<bool, KvmIoctlError> {
            let address = self.fd.get_sregs()?.cs.base.wrapping_add(self.fd.get_regs()?.rip);
            Ok(debugger.is_planted(address))
        };
        if self
            .attached()
            .map_or(Ok(false), planted)
            .map_err(VcpuFailure::Debug)?
        {
            self.stop_all(DebugStopCause::SoftwareBreakpoint);
            return Ok(LoopAction::Repeat);
        }
        let error = InternalError::of(&mut self.fd).map_err(VcpuFailure::Debug)?;
        if error.is_at_reset_vector() {
            guest_log!(
                Error,
                "vcpu{}: the guest sent it an INIT; without firmware at the reset vector, this resets the machine",
                self.id
            );
            return Ok(LoopAction::Stop(VmStopReason::Reset));
        }
        Err(VcpuFailure::Internal(error))
    }

    fn stop_all(&self, why: DebugStopCause) {
        if let Some(debugger) = self.control.debugger() {
            let vcpu = self.id;
            debugger.record_stop(&*self.control, DebugStop { vcpu, cause: why });
        }
    }

    /// Performs the action `next` that an exit requires, and returns what the run loop must do.
    pub(super) fn serve(&mut self, next: ExitAction) -> Result<LoopAction, VcpuFailure> {
        match next {
            ExitAction::Continue => Ok(LoopAction::Repeat),
            ExitAction::TrapPort(byte) => self.trap_port_exit(byte),
            ExitAction::Debug(stop) => self.debug_exit(&stop),
            ExitAction::DebugControl(value) => self.debug_control_exit(value),
            ExitAction::EmulationFailed => self.handle_emulation_failure(),
            ExitAction::Stop(reason) => Ok(LoopAction::Stop(reason)),
            ExitAction::Fail(failure) => Err(failure),
        }
    }
}
