//! Debugger support of a vCPU: parks while held, publishes its registers, and stops at the
//! debugger's breakpoints.

use kvm_bindings::kvm_debug_exit_arch;
use perf_core::guest_log;

use super::control::StopReason;
use super::debugger::{Changed, Debugger, Go, Registers, Stop, Why};
use super::failure::VcpuFailure;
use super::internal_error::InternalError;
use super::running::{Next, Running, Turn};
use super::step::debug::Want;
use crate::kvm::call::CallError;

impl Running {
    /// Returns the debugger if one is attached.
    fn attached(&self) -> Option<&Debugger> {
        self.control.debugger().filter(|debugger| debugger.is_attached())
    }

    /// Returns `true` if a debugger that holds the machine lets this vCPU run.
    pub(super) fn is_let_go(&self) -> bool {
        self.control
            .debugger()
            .is_none_or(|debugger| debugger.go(self.id) != Go::Stay)
    }

    /// Returns `true` if a debugger requested this vCPU's registers.
    pub(super) fn is_asked_for_registers(&self) -> bool {
        self.control
            .debugger()
            .is_some_and(|debugger| debugger.is_asked(self.id))
    }

    /// Returns `true` if KVM must still complete the last exit. Until then, the registers may
    /// change.
    pub(super) fn has_open_exit(&self) -> bool {
        self.exit_is_open
    }

    /// Completes the last exit in KVM without executing guest code.
    pub(super) fn complete_open_exit(&mut self) -> Result<Turn, VcpuFailure> {
        self.fd.request_exit();
        let next = self.enter();
        self.serve(next)
    }

    /// Publishes the registers to the debugger that requested them.
    pub(super) fn show_registers(&mut self) -> Result<(), VcpuFailure> {
        self.take_registers_from_debugger()?;
        let registers = Registers {
            general: self.fd.get_regs().map_err(VcpuFailure::Debug)?,
            system: self.fd.get_sregs().map_err(VcpuFailure::Debug)?,
            fpu: self.fd.get_fpu().map_err(VcpuFailure::Debug)?,
        };
        if let Some(debugger) = self.control.debugger() {
            debugger.show(self.id, registers);
        }
        Ok(())
    }

    /// Applies the debugger's register changes.
    pub(super) fn take_registers_from_debugger(&mut self) -> Result<(), VcpuFailure> {
        let debugger = self.control.debugger();
        let Some((registers, changed)) = debugger.and_then(|debugger| debugger.take_changes(self.id)) else {
            return Ok(());
        };
        self.registers.forget();
        self.fd.set_regs(&registers.general).map_err(VcpuFailure::Debug)?;
        if changed == Changed::Fpu {
            self.fd.set_fpu(&registers.fpu).map_err(VcpuFailure::Debug)?;
        }
        Ok(())
    }

    /// Updates the debugger's breakpoints and returns the debug state for the next entry.
    pub(super) fn wanted_by_debugger(&mut self) -> Want {
        let Some(debugger) = self.control.debugger() else {
            return Want::default();
        };
        if let Some((version, points)) = debugger.news(self.debugger_version) {
            self.debugger_version = version;
            self.debug.set_points(debugger.is_attached().then_some(points));
        }
        let step = debugger.is_attached() && debugger.go(self.id) == Go::Step;
        Want {
            step,
            block_interrupts: step && debugger.blocks_interrupts(),
            ..Want::default()
        }
    }

    /// Stops the machine and returns `true` if the debug exit belongs to the debugger.
    pub(super) fn stops_for_debugger(&self, stop: &kvm_debug_exit_arch) -> bool {
        let first = self.debug.sites();
        let why = |debugger: &Debugger| debugger.why(self.id, first, stop);
        match self.attached().and_then(why) {
            Some(why) => {
                self.stop_all(why);
                true
            }
            None => false,
        }
    }

    /// Handles an instruction that KVM's emulator does not support. Some emulators lack INT3, so a
    /// debugger's INT3 is still reported as a breakpoint.
    pub(super) fn emulation_failed(&mut self) -> Result<Turn, VcpuFailure> {
        let planted = |debugger: &Debugger| -> Result<bool, CallError> {
            let address = self.fd.get_sregs()?.cs.base.wrapping_add(self.fd.get_regs()?.rip);
            Ok(debugger.is_planted(address))
        };
        if self
            .attached()
            .map_or(Ok(false), planted)
            .map_err(VcpuFailure::Debug)?
        {
            self.stop_all(Why::Planted);
            return Ok(Turn::Again);
        }
        let error = InternalError::of(&mut self.fd).map_err(VcpuFailure::Debug)?;
        if error.is_at_reset_vector() {
            guest_log!(
                Error,
                "vcpu{}: the guest sent it an INIT; without firmware at the reset vector, this resets the machine",
                self.id
            );
            return Ok(Turn::Stop(StopReason::Reset));
        }
        Err(VcpuFailure::Internal(error))
    }

    fn stop_all(&self, why: Why) {
        if let Some(debugger) = self.control.debugger() {
            let vcpu = self.id;
            debugger.stopped(&*self.control, Stop { vcpu, why });
        }
    }

    /// Handles the result of an exit and returns the next loop action.
    pub(super) fn serve(&mut self, next: Next) -> Result<Turn, VcpuFailure> {
        match next {
            Next::Continue => Ok(Turn::Again),
            Next::TrapPort(byte) => self.trap_port_exit(byte),
            Next::Debug(stop) => self.debug_exit(&stop),
            Next::DebugControl(value) => self.debug_control_exit(value),
            Next::EmulationFailed => self.emulation_failed(),
            Next::Stop(reason) => Ok(Turn::Stop(reason)),
            Next::Fail(failure) => Err(failure),
        }
    }
}
