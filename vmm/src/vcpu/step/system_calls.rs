//! SYSCALL and SYSRET under stepping: executed here, where the flags they save and load carry no trap flag.

use vpmu::exact::{CpuState, Step, StepMeter};

use super::debug::{GuestDebug, Want};
use super::state::{Linear, Nothing, State};
use super::stepper::{AfterKernel, Present, RFLAGS_RF, RFLAGS_TF, StepError, Stepper, apply};
use crate::kvm::call::CallError;
use crate::kvm::vcpu_fd::VcpuFd;

/// EFER.SCE: SYSCALL and SYSRET exist.
const EFER_SCE: u64 = 1;
const IA32_STAR: u32 = 0xc000_0081;
const IA32_LSTAR: u32 = 0xc000_0082;
const IA32_FMASK: u32 = 0xc000_0084;
/// The flags that SYSRET loads from R11.
const SYSRET_FLAGS: u64 = 0x3c_7fd7;

impl Stepper {
    /// Executes SYSRET to 64-bit code, after which some processors do not stop: the flags it loads have no
    /// trap flag. False when it would fault.
    pub(super) fn system_return(&self, fd: &VcpuFd, mut state: State) -> Result<bool, StepError> {
        let target = state.regs.rcx;
        let user_half = target >> 47 == 0;
        if !state.is_64bit() || state.sregs.efer & EFER_SCE == 0 || !user_half {
            return Ok(false);
        }
        let [star, ..] = system_call_registers(fd)?;
        let selector = (star >> 48) as u16;
        state.regs.rip = target;
        state.regs.rflags = state.regs.r11 & SYSRET_FLAGS & !RFLAGS_TF | 2;
        state.sregs.cs = flat_segment(selector.wrapping_add(16) | 3, 0xb, 3);
        state.sregs.ss = flat_segment(selector.wrapping_add(8) | 3, 3, 3);
        fd.set_sregs(&state.sregs)?;
        fd.set_regs(&state.regs)?;
        Ok(true)
    }

    /// User code, which alone is counted, is about to call its kernel: the SYSCALL is executed and counted
    /// here, because what comes next need not be its return. The kernel may switch to another task, which
    /// ends the counting, or the task may end. The trap flag waits in the flags that the kernel saves.
    /// `None`: the processor must execute it.
    pub(super) fn call_kernel(
        &mut self,
        fd: &VcpuFd,
        debug: &mut GuestDebug,
        state: &State,
    ) -> Result<Option<Step>, StepError> {
        let events = fd.get_vcpu_events()?;
        let before_it = events.exception.injected | events.exception.pending | events.nmi.injected;
        if before_it | events.interrupt.injected != 0 {
            return Ok(None);
        }
        // KVM ties the trap flag to the present address, where the vCPU will not be any more.
        let want = Want {
            step: true,
            ..Want::default()
        };
        apply(fd, debug, want)?;
        self.strays = true;
        let mut traced = *state;
        traced.regs.rflags |= RFLAGS_TF;
        if !self.system_call(fd, traced)? {
            return Ok(None);
        }
        let called = state.cpu();
        let in_kernel = CpuState {
            rip: 0,
            cpl: 0,
            ..called
        };
        let step = self.meter.end(&in_kernel, &mut Nothing);
        self.tally.steps += 1;
        let mut behind = called;
        behind.rip = called.rip.wrapping_add(2);
        behind.gpr[1] = behind.rip;
        behind.gpr[11] = called.rflags;
        let ahead = self.meter.begin(&behind, &mut Linear::new(&self.memory, state));
        self.present = Some(Present {
            before: behind,
            ahead,
            after_kernel: Some(AfterKernel::Called),
        });
        Ok(Some(step))
    }

    /// Executes SYSCALL (SDM vol. 2B, APM vol. 3), which in 64-bit mode touches no memory. The trap flag goes
    /// into the saved flags only. False when it would fault.
    #[expect(clippy::cast_possible_truncation, reason = "bits 47:32")]
    pub(super) fn system_call(&self, fd: &VcpuFd, mut state: State) -> Result<bool, StepError> {
        if !state.is_64bit() || state.sregs.efer & EFER_SCE == 0 {
            return Ok(false);
        }
        let [star, lstar, mask] = system_call_registers(fd)?;
        let flags = state.regs.rflags & !RFLAGS_RF;
        state.regs.rcx = state.regs.rip.wrapping_add(2);
        state.regs.r11 = flags;
        state.regs.rip = lstar;
        state.regs.rflags = flags & !mask & !RFLAGS_TF | 2;
        let selector = (star >> 32) as u16 & 0xfffc;
        state.sregs.cs = flat_segment(selector, 0xb, 0);
        state.sregs.ss = flat_segment(selector.wrapping_add(8), 3, 0);
        fd.set_sregs(&state.sregs)?;
        fd.set_regs(&state.regs)?;
        Ok(true)
    }
}

/// User code called its kernel, by SYSCALL or INT, and is back. The trap flag came back with its flags, so
/// the instruction behind the call was executed too.
pub(super) fn came_back(
    meter: &mut StepMeter,
    called: &CpuState,
    cpu: &CpuState,
    memory: &mut Linear<'_>,
) -> Step {
    let behind = meter.next_ip().unwrap_or(called.rip);
    let mut step = meter.end(
        &CpuState {
            rip: 0,
            cpl: 0,
            ..*cpu
        },
        &mut Nothing,
    );
    if cpu.rip != behind {
        let from = CpuState {
            rip: behind,
            rflags: cpu.rflags,
            ..*called
        };
        meter.begin(&from, memory);
        let next = meter.end(cpu, memory);
        if next.event || next.lost {
            step.lost = true;
        } else {
            step.user.add(next.user);
        }
    }
    step
}

/// STAR, LSTAR and FMASK.
fn system_call_registers(fd: &VcpuFd) -> Result<[u64; 3], StepError> {
    let none = || CallError::with_errno("KVM_GET_MSRS", libc::EINVAL);
    let entry = |index| kvm_bindings::kvm_msr_entry {
        index,
        ..Default::default()
    };
    let mut msrs =
        kvm_bindings::Msrs::from_entries(&[entry(IA32_STAR), entry(IA32_LSTAR), entry(IA32_FMASK)])
            .map_err(|_| none())?;
    match (fd.get_msrs(&mut msrs)?, msrs.as_slice()) {
        (3, [star, lstar, mask]) => Ok([star.data, lstar.data, mask.data]),
        _ => Err(none().into()),
    }
}

/// A segment as SYSCALL and SYSRET load it: code (type 11, 64-bit) or data (type 3).
fn flat_segment(selector: u16, type_: u8, dpl: u8) -> kvm_bindings::kvm_segment {
    let l = u8::from(type_ == 0xb);
    kvm_bindings::kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        dpl,
        db: 1 - l,
        s: 1,
        l,
        g: 1,
        ..Default::default()
    }
}
