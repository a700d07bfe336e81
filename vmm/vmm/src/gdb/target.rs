//! The machine as a gdbstub target: vCPUs are threads of one process, numbered from 1.

use std::sync::Arc;
use std::time::Duration;

use gdbstub::common::{Signal, Tid};
use gdbstub::stub::MultiThreadStopReason;
use gdbstub::target::ext::base::BaseOps;
use gdbstub::target::ext::base::multithread::{
    MultiThreadBase, MultiThreadResume, MultiThreadResumeOps, MultiThreadSchedulerLocking,
    MultiThreadSchedulerLockingOps, MultiThreadSingleStep, MultiThreadSingleStepOps,
};
use gdbstub::target::ext::breakpoints::{
    Breakpoints, BreakpointsOps, HwBreakpoint, HwBreakpointOps, HwWatchpoint, HwWatchpointOps, SwBreakpoint,
    SwBreakpointOps, WatchKind,
};
use gdbstub::target::ext::thread_extra_info::{ThreadExtraInfo, ThreadExtraInfoOps};
use gdbstub::target::{Target, TargetError, TargetResult};
use vm_memory::GuestMemoryMmap;

use super::arch::{GdbX86, PacketRegisters};
use super::{memory, registers};
use crate::vcpu::control::VmRunControl;
use crate::vcpu::debugger::{
    BreakpointAccess, DebugStop, DebugStopCause, Debugger, HardwareBreakpoint, ResumeAction, VcpuRegisters,
    VcpuStopError,
};
use crate::vcpu::registry::VcpuRegistry;

/// Maximum time to wait until the vCPUs have stopped for the debugger.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of the debugger's INT3s in guest memory.
const MAX_INT3S: usize = 1024;
/// Error number for gdb: invalid address.
const EFAULT: u8 = 14;
/// Error number for gdb: invalid argument.
const EINVAL: u8 = 22;

/// The machine, as the gdb stub controls it.
pub struct GdbTarget {
    control: Arc<VmRunControl>,
    registry: Arc<VcpuRegistry>,
    memory: GuestMemoryMmap,
    /// Maximum number of hardware breakpoints that the debugger may set.
    max_hardware_points: usize,
    /// Number of the vCPU that stopped last, whose page tables translate the addresses of
    /// breakpoints.
    current: u8,
    /// Actions for the next resume: vCPU number and action.
    actions: Vec<(u8, ResumeAction)>,
    /// `true` if a vCPU without an entry in `actions` stays stopped at the next resume.
    locked: bool,
}

fn tid(vcpu: u8) -> Tid {
    Tid::new(usize::from(vcpu) + 1).expect("it is above 0")
}

fn vcpu(tid: Tid) -> Option<u8> {
    u8::try_from(tid.get() - 1).ok()
}

impl GdbTarget {
    /// Creates the gdb target for a VM.
    pub fn new(
        control: Arc<VmRunControl>,
        registry: Arc<VcpuRegistry>,
        memory: GuestMemoryMmap,
        max_hardware_points: usize,
    ) -> Self {
        Self {
            control,
            registry,
            memory,
            max_hardware_points,
            current: 0,
            actions: Vec::new(),
            locked: false,
        }
    }

    fn debugger(&self) -> Option<&Debugger> {
        self.control.debugger()
    }

    fn present(&self) -> Vec<u8> {
        self.registry.present_slots().map(|slot| slot.id()).collect()
    }

    fn registers(&self, vcpu: u8) -> Option<VcpuRegisters> {
        self.debugger()?.registers(vcpu)
    }

    /// Returns the registers of the stopped vCPU that is gdb's thread `tid`, or the error to report
    /// to gdb.
    fn registers_of(&self, tid: Tid) -> TargetResult<VcpuRegisters, Self> {
        vcpu(tid)
            .and_then(|vcpu| self.registers(vcpu))
            .ok_or(TargetError::Errno(EINVAL))
    }

    /// Stops the machine for a debugger that has just connected.
    ///
    /// # Errors
    /// Returns a [`VcpuStopError`] if the vCPUs do not stop.
    pub fn attach(&mut self) -> Result<(), VcpuStopError> {
        if let Some(debugger) = self.debugger() {
            debugger.attach(true);
        }
        self.stop()
    }

    /// Stops the machine and collects the registers of all vCPUs.
    ///
    /// # Errors
    /// Returns a [`VcpuStopError`] if the vCPUs do not stop.
    pub fn stop(&mut self) -> Result<(), VcpuStopError> {
        let Some(debugger) = self.debugger() else {
            return Err(VcpuStopError::Ended);
        };
        debugger.stop_vcpus(&*self.control);
        debugger.collect(&*self.control, || self.present(), STOP_TIMEOUT)?;
        let present = self.present();
        if !present.contains(&self.current) {
            self.current = present.first().copied().unwrap_or(0);
        }
        Ok(())
    }

    /// Returns the stop reason to report to gdb after a vCPU has stopped the machine, or after the
    /// debugger has sent Ctrl-C.
    ///
    /// # Errors
    /// Returns a [`VcpuStopError`] if the vCPUs do not stop.
    pub fn stop_reason(&mut self) -> Result<MultiThreadStopReason<u64>, VcpuStopError> {
        self.stop()?;
        let stop = self.debugger().and_then(Debugger::take_stop);
        let Some(DebugStop { vcpu, cause: why }) = stop else {
            return Ok(MultiThreadStopReason::SignalWithThread {
                tid: tid(self.current),
                signal: Signal::SIGINT,
            });
        };
        self.current = vcpu;
        let tid = tid(vcpu);
        Ok(match why {
            DebugStopCause::SoftwareBreakpoint => MultiThreadStopReason::SwBreak(tid),
            DebugStopCause::Step => MultiThreadStopReason::SignalWithThread {
                tid,
                signal: Signal::SIGTRAP,
            },
            DebugStopCause::HardwareBreakpoint(point) => {
                let watch = |kind| MultiThreadStopReason::Watch {
                    tid,
                    kind,
                    addr: point.address,
                };
                match point.access {
                    BreakpointAccess::Execute => MultiThreadStopReason::HwBreak(tid),
                    BreakpointAccess::Write => watch(WatchKind::Write),
                    BreakpointAccess::Any => watch(WatchKind::ReadWrite),
                }
            }
        })
    }

    /// Removes all breakpoints of a debugger that has disconnected, and resumes the machine.
    pub fn detach(&mut self) {
        let Some(debugger) = self.control.debugger() else {
            return;
        };
        for planted in debugger.planted().drain(..) {
            memory::remove_int3(&self.memory, &planted);
        }
        debugger.clear_hardware_breakpoints();
        debugger.attach(false);
        debugger.release(&*self.control, |_| ResumeAction::Run);
    }

    fn set_action(&mut self, of: Tid, go: ResumeAction) {
        if let Some(vcpu) = vcpu(of) {
            self.actions.push((vcpu, go));
        }
    }

    fn add_hardware_breakpoint(&mut self, point: Option<HardwareBreakpoint>) -> bool {
        let most = self.max_hardware_points;
        match (self.debugger(), point) {
            (Some(debugger), Some(point)) => debugger.add_hardware_breakpoint(point, most),
            _ => false,
        }
    }

    fn remove_hardware_breakpoint(&mut self, point: Option<HardwareBreakpoint>) -> bool {
        match (self.debugger(), point) {
            (Some(debugger), Some(point)) => debugger.remove_hardware_breakpoint(point),
            _ => false,
        }
    }
}

impl Target for GdbTarget {
    type Arch = GdbX86;
    type Error = VcpuStopError;

    fn base_ops(&mut self) -> BaseOps<'_, Self::Arch, Self::Error> {
        BaseOps::MultiThread(self)
    }

    fn support_breakpoints(&mut self) -> Option<BreakpointsOps<'_, Self>> {
        Some(self)
    }
}

impl MultiThreadBase for GdbTarget {
    fn read_registers(&mut self, regs: &mut PacketRegisters, tid: Tid) -> TargetResult<(), Self> {
        regs.all = registers::to_gdb(&self.registers_of(tid)?);
        Ok(())
    }

    fn write_registers(&mut self, regs: &PacketRegisters, tid: Tid) -> TargetResult<(), Self> {
        let mut changed = self.registers_of(tid)?;
        let taken = !regs.cut_short && registers::from_gdb(&regs.all, &mut changed);
        let set = |vcpu| {
            self.debugger()
                .is_some_and(|debugger| debugger.set_registers(vcpu, &changed))
        };
        if taken && vcpu(tid).is_some_and(set) {
            Ok(())
        } else {
            Err(TargetError::Errno(EINVAL))
        }
    }

    fn read_addrs(&mut self, start: u64, data: &mut [u8], tid: Tid) -> TargetResult<usize, Self> {
        let registers = self.registers_of(tid)?;
        let Some(debugger) = self.debugger() else {
            return Err(TargetError::NonFatal);
        };
        match memory::read(&self.memory, &registers, &debugger.planted(), start, data) {
            0 if !data.is_empty() => Err(TargetError::Errno(EFAULT)),
            count => Ok(count),
        }
    }

    fn write_addrs(&mut self, start: u64, data: &[u8], tid: Tid) -> TargetResult<(), Self> {
        let registers = self.registers_of(tid)?;
        let Some(debugger) = self.debugger() else {
            return Err(TargetError::NonFatal);
        };
        if memory::write(&self.memory, &registers, &mut debugger.planted(), start, data) {
            Ok(())
        } else {
            Err(TargetError::Errno(EFAULT))
        }
    }

    fn list_active_threads(&mut self, is_active: &mut dyn FnMut(Tid)) -> Result<(), VcpuStopError> {
        // gdb selects the first thread of the list, so the vCPU that stopped last must be first.
        let present = self.present();
        let others = present.iter().filter(|vcpu| **vcpu != self.current);
        let current = present.iter().filter(|vcpu| **vcpu == self.current);
        current.chain(others).for_each(|vcpu| is_active(tid(*vcpu)));
        Ok(())
    }

    fn support_resume(&mut self) -> Option<MultiThreadResumeOps<'_, Self>> {
        Some(self)
    }

    fn support_thread_extra_info(&mut self) -> Option<ThreadExtraInfoOps<'_, Self>> {
        Some(self)
    }
}

impl ThreadExtraInfo for GdbTarget {
    fn thread_extra_info(&self, tid: Tid, buffer: &mut [u8]) -> Result<usize, VcpuStopError> {
        let text = vcpu(tid).map_or_else(String::new, |vcpu| format!("vCPU {vcpu}"));
        let count = text.len().min(buffer.len());
        buffer[..count].copy_from_slice(&text.as_bytes()[..count]);
        Ok(count)
    }
}

impl MultiThreadResume for GdbTarget {
    fn resume(&mut self) -> Result<(), VcpuStopError> {
        let rest = if self.locked {
            ResumeAction::Stay
        } else {
            ResumeAction::Run
        };
        let action = |vcpu: u8| {
            let named = self.actions.iter().find(|(of, _)| *of == vcpu);
            named.map_or(rest, |(_, go)| *go)
        };
        if let Some(debugger) = self.control.debugger() {
            debugger.release(&*self.control, action);
        }
        Ok(())
    }

    fn clear_resume_actions(&mut self) -> Result<(), VcpuStopError> {
        self.actions.clear();
        self.locked = false;
        Ok(())
    }

    // The signal is ignored, because signals have no meaning for a machine.
    fn set_resume_action_continue(&mut self, tid: Tid, _: Option<Signal>) -> Result<(), VcpuStopError> {
        self.set_action(tid, ResumeAction::Run);
        Ok(())
    }

    fn support_single_step(&mut self) -> Option<MultiThreadSingleStepOps<'_, Self>> {
        Some(self)
    }

    fn support_scheduler_locking(&mut self) -> Option<MultiThreadSchedulerLockingOps<'_, Self>> {
        Some(self)
    }
}

impl MultiThreadSingleStep for GdbTarget {
    fn set_resume_action_step(&mut self, tid: Tid, _: Option<Signal>) -> Result<(), VcpuStopError> {
        self.set_action(tid, ResumeAction::Step);
        Ok(())
    }
}

impl MultiThreadSchedulerLocking for GdbTarget {
    fn set_resume_action_scheduler_lock(&mut self) -> Result<(), VcpuStopError> {
        self.locked = true;
        Ok(())
    }
}

impl Breakpoints for GdbTarget {
    fn support_sw_breakpoint(&mut self) -> Option<SwBreakpointOps<'_, Self>> {
        Some(self)
    }

    fn support_hw_breakpoint(&mut self) -> Option<HwBreakpointOps<'_, Self>> {
        Some(self)
    }

    fn support_hw_watchpoint(&mut self) -> Option<HwWatchpointOps<'_, Self>> {
        Some(self)
    }
}

impl SwBreakpoint for GdbTarget {
    fn add_sw_breakpoint(&mut self, address: u64, _: usize) -> TargetResult<bool, Self> {
        let (Some(registers), Some(debugger)) = (self.registers(self.current), self.control.debugger())
        else {
            return Ok(false);
        };
        let mut planted = debugger.planted();
        if planted.iter().any(|other| other.address == address) {
            return Ok(true);
        }
        if planted.len() >= MAX_INT3S {
            return Ok(false);
        }
        let new = memory::insert_int3(&self.memory, &registers, address);
        planted.extend(new);
        Ok(new.is_some())
    }

    fn remove_sw_breakpoint(&mut self, address: u64, _: usize) -> TargetResult<bool, Self> {
        let Some(debugger) = self.control.debugger() else {
            return Ok(false);
        };
        let mut planted = debugger.planted();
        let Some(at) = planted.iter().position(|other| other.address == address) else {
            return Ok(false);
        };
        memory::remove_int3(&self.memory, &planted.remove(at));
        Ok(true)
    }
}

/// Returns a hardware breakpoint that stops before the instruction at `address`.
fn execution(address: u64) -> Option<HardwareBreakpoint> {
    Some(HardwareBreakpoint {
        address,
        length: 1,
        access: BreakpointAccess::Execute,
    })
}

/// Returns a hardware breakpoint that stops after data accesses of type `kind`, or `None` if `kind`
/// is reads only, which x86 does not support, or the length or the alignment is invalid.
fn data(address: u64, length: u64, kind: WatchKind) -> Option<HardwareBreakpoint> {
    let fits = matches!(length, 1 | 2 | 4 | 8) && address.is_multiple_of(length);
    let access = match kind {
        WatchKind::Write => BreakpointAccess::Write,
        WatchKind::ReadWrite => BreakpointAccess::Any,
        WatchKind::Read => return None,
    };
    fits.then_some(HardwareBreakpoint {
        address,
        length: u8::try_from(length).ok()?,
        access,
    })
}

impl HwBreakpoint for GdbTarget {
    fn add_hw_breakpoint(&mut self, address: u64, _: usize) -> TargetResult<bool, Self> {
        Ok(self.add_hardware_breakpoint(execution(address)))
    }

    fn remove_hw_breakpoint(&mut self, address: u64, _: usize) -> TargetResult<bool, Self> {
        Ok(self.remove_hardware_breakpoint(execution(address)))
    }
}

impl HwWatchpoint for GdbTarget {
    fn add_hw_watchpoint(&mut self, address: u64, length: u64, kind: WatchKind) -> TargetResult<bool, Self> {
        Ok(self.add_hardware_breakpoint(data(address, length, kind)))
    }

    fn remove_hw_watchpoint(
        &mut self,
        address: u64,
        length: u64,
        kind: WatchKind,
    ) -> TargetResult<bool, Self> {
        Ok(self.remove_hardware_breakpoint(data(address, length, kind)))
    }
}
