//! Handling of vCPU exits.
//!
//! [`Running::enter`] calls KVM_RUN. It handles most exits at once, while the exit data is borrowed
//! from the `kvm_run` page ([`ExitHandler`]). For an exit that needs the whole vCPU, it returns the
//! required action ([`ExitAction`]).

use kvm_bindings::kvm_debug_exit_arch;
use perf_core::{error_line, guest_log};
use vpmu::registers::IA32_DEBUGCTL;
use vpmu::{MsrReadOutcome, MsrWriteOutcome, ParavirtualEvent};

use super::control::VmStopReason;
use super::debugctl::DebugControl;
use super::failure::VcpuFailure;
use super::kick;
use super::rdpmc::RdpmcEmulator;
use super::running::{ExitAction, ExitCompletion, LoopAction, Running};
use super::stats::VcpuStats;
use super::step::{self, Stepper};
use crate::devices::{DeviceBus, DeviceWriteOutcome};
use crate::kvm::kickable_vcpu::ReadMsrExit;
use crate::kvm::kickable_vcpu::RunResult;
use crate::kvm::kickable_vcpu::VcpuExit;
use crate::kvm::kickable_vcpu::WriteMsrExit;
use crate::pmu::VcpuPmu;
use guest_patching::finder::TRAP_PORT;

/// CR0.PE: protected mode (SDM vol. 3 §2.5). Clear after a reset.
const CR0_PE: u64 = 1 << 0;
/// Vector of INT3 (SDM vol. 3 §6.15).
const BREAKPOINT: u32 = 3;
/// DR6.B0 to B3: breakpoint conditions that were met (SDM vol. 3 §19.2.3).
const DR6_BREAKPOINTS: u64 = 0xf;
/// DR6.BS: the debug exception was caused by a single step.
const DR6_SINGLE_STEP: u64 = 1 << 14;

/// Parts of a vCPU that are needed to handle an exit. The file descriptor is not among them,
/// because the exit data is borrowed from it.
struct ExitHandler<'v> {
    pmu: Option<&'v mut VcpuPmu>,
    debug_control: Option<&'v DebugControl>,
    rdpmc: Option<&'v mut RdpmcEmulator>,
    stepper: Option<&'v mut Stepper>,
    bus: &'v DeviceBus,
    stats: &'v VcpuStats,
    completed: &'v mut ExitCompletion,
}

impl ExitHandler<'_> {
    /// Returns `true` if a write to [`TRAP_PORT`] may come from code that the VMM has placed in the
    /// guest: a replaced RDPMC, a trap at the guest's #GP handler, or a trap of the stepper.
    fn has_trap_port(&self) -> bool {
        self.rdpmc.is_some() || self.stepper.is_some()
    }

    /// Handles RDMSR for a trapped register.
    fn read_msr(&mut self, msr: ReadMsrExit<'_>) -> ExitAction {
        self.stats.rdmsr.inc();
        let others = match self.debug_control {
            Some(control) if msr.index == IA32_DEBUGCTL => control.read(),
            _ => 0,
        };
        let read = match &mut self.pmu {
            Some(pmu) => pmu.read_msr(msr.index),
            None => MsrReadOutcome::InjectGp,
        };
        match read {
            MsrReadOutcome::Value(value) => {
                *self.completed = ExitCompletion::AtCpl0;
                *msr.data = value | others;
            }
            MsrReadOutcome::InjectGp => {
                self.stats.gp_injected.inc();
                *msr.error = 1;
            }
        }
        ExitAction::Continue
    }

    /// Handles an exit other than a triple fault. `io_width` is the operand size of a port access.
    fn handle(&mut self, exit: VcpuExit<'_>, io_width: usize) -> ExitAction {
        match exit {
            VcpuExit::X86Rdmsr(msr) => self.read_msr(msr),
            VcpuExit::X86Wrmsr(msr) => self.write_msr(msr),
            VcpuExit::IoOut(TRAP_PORT, &[byte]) if self.has_trap_port() => ExitAction::TrapPort(byte),
            VcpuExit::IoOut(port, data) => self.port_write(port, io_width, data),
            VcpuExit::IoIn(port, data) => self.port_read(port, io_width, data),
            VcpuExit::MmioRead(address, data) => self.memory_read(address, data),
            VcpuExit::MmioWrite(address, data) => self.memory_write(address, data),
            VcpuExit::Debug(stop) => {
                self.stats.debug.inc();
                ExitAction::Debug(stop)
            }
            VcpuExit::Intr => ExitAction::Continue,
            VcpuExit::Hlt => {
                self.stats.hlt.inc();
                ExitAction::Continue
            }
            VcpuExit::InternalError => ExitAction::EmulationFailed,
            VcpuExit::SystemEvent(kind, _) => ExitAction::Stop(system_event(kind)),
            exit => ExitAction::Fail(VcpuFailure::Unserved(format!("{exit:?}"))),
        }
    }

    /// Handles WRMSR for a trapped register.
    fn write_msr(&mut self, msr: WriteMsrExit<'_>) -> ExitAction {
        self.stats.wrmsr.inc();
        if let Some(stepper) = &mut self.stepper {
            stepper.registers_changed();
        }
        if let Some(rdpmc) = &mut self.rdpmc {
            rdpmc.wrote();
        }
        let control = self.debug_control.filter(|_| msr.index == IA32_DEBUGCTL);
        let pmu_part = control.map_or(Some(msr.data), |control| control.pmu_part(msr.data));
        let written = match (&mut self.pmu, pmu_part) {
            (Some(pmu), Some(part)) => pmu.write_msr(msr.index, part),
            _ => MsrWriteOutcome::InjectGp,
        };
        match written {
            MsrWriteOutcome::Done if control.is_some() => ExitAction::DebugControl(msr.data),
            MsrWriteOutcome::Done => {
                *self.completed = ExitCompletion::AtCpl0;
                ExitAction::Continue
            }
            MsrWriteOutcome::InjectGp => {
                self.stats.gp_injected.inc();
                *msr.error = 1;
                ExitAction::Continue
            }
        }
    }

    fn port_write(&mut self, port: u16, io_width: usize, data: &[u8]) -> ExitAction {
        self.stats.io_out.inc();
        self.device_access(ParavirtualEvent::IoExits);
        stop_of(self.bus.io_out_string(port, io_width, data)).map_or(ExitAction::Continue, ExitAction::Stop)
    }

    fn port_read(&mut self, port: u16, io_width: usize, data: &mut [u8]) -> ExitAction {
        self.stats.io_in.inc();
        self.device_access(ParavirtualEvent::IoExits);
        self.bus.io_in_string(port, io_width, data);
        ExitAction::Continue
    }

    fn memory_read(&mut self, address: u64, data: &mut [u8]) -> ExitAction {
        self.stats.mmio.inc();
        self.device_access(ParavirtualEvent::MmioExits);
        self.bus.mmio_read(address, data);
        ExitAction::Continue
    }

    fn memory_write(&mut self, address: u64, data: &[u8]) -> ExitAction {
        self.stats.mmio.inc();
        self.device_access(ParavirtualEvent::MmioExits);
        self.bus.mmio_write(address, data);
        ExitAction::Continue
    }

    /// Counts a device access with the paravirtual event `event`, and notes that the next entry
    /// completes an instruction.
    fn device_access(&mut self, event: ParavirtualEvent) {
        *self.completed = ExitCompletion::AtAnyCpl;
        if let Some(pmu) = &mut self.pmu {
            pmu.count_event(event);
        }
    }
}

impl Running {
    /// Calls KVM_RUN and handles the exit (steps 5 and 6 of the run loop).
    pub(super) fn enter(&mut self) -> ExitAction {
        self.exit_clock.end_exit();
        // Single steps for the guest's branch records are not part of the guest's time.
        if let Some(pmu) = self.pmu.as_ref().filter(|_| !self.bursts.is_for_pmi()) {
            pmu.guest_enter();
        }
        let RunResult { exit: why, io_width } = self.fd.run();
        if let Some(pmu) = &self.pmu {
            pmu.guest_exit();
        }
        if let Some(stepper) = &mut self.stepper {
            stepper.after_run();
        }
        let by_signal =
            matches!(&why, Ok(VcpuExit::Intr)) || matches!(&why, Err(e) if e.errno() == libc::EINTR);
        self.exit_is_open = !by_signal;
        self.registers.after_run(by_signal);
        self.overflow_signals.after_exit(by_signal);
        self.exit_clock.record_exit(&why, self.pmu.is_some());
        if !by_signal {
            self.last_read.record_progress();
        }
        let stats = self.slot.stats();
        stats.exits.inc();
        let mut handler = ExitHandler {
            pmu: self.pmu.as_mut(),
            debug_control: self.debug_control.as_ref(),
            rdpmc: self.rdpmc.as_mut(),
            stepper: self.stepper.as_mut(),
            bus: &self.bus,
            stats,
            completed: &mut self.completed,
        };
        match why {
            Ok(VcpuExit::Shutdown) => {
                self.report_triple_fault();
                ExitAction::Stop(VmStopReason::TripleFault)
            }
            Ok(exit) => handler.handle(exit, io_width),
            Err(e) if e.errno() == libc::EINTR => {
                if !kick::is_overflow_pending() {
                    stats.interrupted.inc();
                }
                ExitAction::Continue
            }
            Err(e) if e.errno() == libc::EAGAIN => ExitAction::Continue,
            Err(e) => ExitAction::Fail(VcpuFailure::Run(e)),
        }
    }

    /// Handles a write to the trap port, which comes from a trap of the stepper, a replaced RDPMC,
    /// a trap at the guest's #GP handler, or the guest itself.
    pub(super) fn trap_port_exit(&mut self, byte: u8) -> Result<LoopAction, VcpuFailure> {
        if let (Some(stepper), Some(pmu)) = (&mut self.stepper, &mut self.pmu)
            && let Some(step) = stepper.trapped(&mut self.fd)?
        {
            pmu.feed_step(&step);
            return Ok(LoopAction::Repeat);
        }
        self.trap_port(byte).map_err(VcpuFailure::Read)
    }

    /// Handles a debug exit, which a breakpoint or a single step has caused.
    pub(super) fn debug_exit(&mut self, stop: &kvm_debug_exit_arch) -> Result<LoopAction, VcpuFailure> {
        if stop.exception != BREAKPOINT && stop.dr6 & DR6_BREAKPOINTS != 0 && self.debug.is_site(stop.pc) {
            return self.handle_rdpmc_breakpoint().map_err(VcpuFailure::Debug);
        }
        if self.stop_for_debugger(stop) {
            return Ok(LoopAction::Repeat);
        }
        if let (Some(stepper), Some(pmu)) = (&mut self.stepper, &mut self.pmu)
            && let Some(step) = stepper.handle_debug_exit(&mut self.fd, stop)?
        {
            pmu.feed_step(&step);
            // The trap flag may also have been set by a debugger in the guest.
            if stop.dr6 & DR6_SINGLE_STEP != 0
                && let Some(state) = stepper.stopped_in_user()
                && pmu.is_task_single_stepped(&self.fd, &state.regs, &state.sregs)
            {
                step::debug::inject_guest_exception(&self.fd, stop).map_err(VcpuFailure::Debug)?;
            }
            return Ok(LoopAction::Repeat);
        }
        // The exit belongs to the guest: INT3, trap flag, or a breakpoint that the guest set.
        step::debug::inject_guest_exception(&self.fd, stop).map_err(VcpuFailure::Debug)?;
        Ok(LoopAction::Repeat)
    }

    /// Writes the bits of IA32_DEBUGCTL that do not belong to the PMU to KVM.
    pub(super) fn debug_control_exit(&mut self, value: u64) -> Result<LoopAction, VcpuFailure> {
        if let Some(control) = &mut self.debug_control {
            control
                .write(&self.fd, value)
                .map_err(VcpuFailure::DebugControl)?;
        }
        self.completed = ExitCompletion::AtCpl0;
        Ok(LoopAction::Repeat)
    }

    /// Handles a one-byte write to the RDPMC trap port that comes from the guest itself.
    pub(super) fn forward_port_write(&mut self, byte: u8) -> LoopAction {
        self.slot.stats().io_out.inc();
        self.completed = ExitCompletion::AtAnyCpl;
        if let Some(pmu) = &mut self.pmu {
            pmu.count_event(ParavirtualEvent::IoExits);
        }
        stop_of(self.bus.io_out(TRAP_PORT, &[byte])).map_or(LoopAction::Repeat, LoopAction::Stop)
    }

    /// Logs that the guest has caused a triple fault, with the register state if KVM still has it.
    fn report_triple_fault(&self) {
        if !self.slot.should_log_triple_fault() {
            return;
        }
        let place = match (self.fd.get_regs(), self.fd.get_sregs()) {
            // With AMD-V the state is lost at the shutdown, and KVM resets the vCPU.
            (Ok(regs), Ok(sregs)) if sregs.cr0 & CR0_PE != 0 => format!(
                " at rip {:#x}, rsp {:#x}, cr2 {:#x}, cr3 {:#x}",
                regs.rip, regs.rsp, sregs.cr2, sregs.cr3
            ),
            _ => String::new(),
        };
        guest_log!(
            Error,
            "vcpu{}: shut down after a triple fault of the guest{place}",
            self.id
        );
    }

    /// Logs a fatal error of this vCPU with the register state.
    pub(super) fn report(&self, failure: &VcpuFailure) {
        log::error!("vcpu{}: cannot continue: {}", self.id, error_line(failure));
        if let Ok(regs) = self.fd.get_regs() {
            log::error!(
                "vcpu{}: rip {:#x} rsp {:#x} rflags {:#x} rax {:#x} rcx {:#x}",
                self.id,
                regs.rip,
                regs.rsp,
                regs.rflags,
                regs.rax,
                regs.rcx
            );
        }
    }
}

/// Returns the reason for which the VM stops after a device write, or `None` if it continues.
fn stop_of(outcome: DeviceWriteOutcome) -> Option<VmStopReason> {
    match outcome {
        DeviceWriteOutcome::Continue => None,
        DeviceWriteOutcome::Reset => Some(VmStopReason::Reset),
        DeviceWriteOutcome::PowerOff => Some(VmStopReason::PowerOff),
        DeviceWriteOutcome::Exit(status) => Some(VmStopReason::DebugExit(status)),
    }
}

fn system_event(kind: u32) -> VmStopReason {
    match kind {
        kvm_bindings::KVM_SYSTEM_EVENT_SHUTDOWN => VmStopReason::PowerOff,
        kvm_bindings::KVM_SYSTEM_EVENT_RESET => VmStopReason::Reset,
        _ => VmStopReason::Failed,
    }
}
