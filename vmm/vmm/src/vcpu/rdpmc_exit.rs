//! Emulates RDPMC at the exits that its traps cause. A PMI that would be delivered directly after
//! an RDPMC is delivered before that RDPMC instead.

use std::time::Duration;

use kvm_bindings::{KVM_VCPUEVENT_VALID_NMI_PENDING, Msrs, kvm_msr_entry, kvm_regs};
use perf_core::guest_log;
use vpmu::MsrReadOutcome;
use vpmu::exact::SteppedGuestMemory;

use super::control::VmStopReason;
use super::rdpmc::{CR4_PCE, EmulatedRdpmc, PrivilegeState};
use super::running::{ExitCompletion, LoopAction, Running};
use super::step::state::VcpuState;
use crate::kvm::call::KvmIoctlError;
use crate::kvm::vcpu_fd::VcpuFd;
use guest_patching::finder::{MAX_INSTRUCTION_BYTES, is_out};
use guest_patching::gate::{
    GpHandlerCheckResult, GpHandlerStopReason, RFLAGS_TF, TriggeredHandlerTrap, rdpmc_length,
};
use guest_patching::linear_memory::LinearMemory;
use guest_patching::registers as patching;
use guest_patching::sites::TriggeredRdpmcSite;
use guest_profile::GuestRegs;

/// Time after an RDPMC in which the guest is expected to have processed the value: the duration of
/// an entry and of about a dozen instructions.
const READ_SETTLE_TIME: Duration = Duration::from_micros(50);
/// Time for which a PMI is delayed, so that the guest executes more instructions after an RDPMC.
const PMI_DELAY: Duration = Duration::from_millis(1);
/// IA32_LSTAR: target of SYSCALL in 64-bit mode (SDM vol. 4).
const IA32_LSTAR: u32 = 0xC000_0082;
/// RFLAGS.RF: suppresses a breakpoint at the next instruction (SDM vol. 3 §2.3).
const RFLAGS_RF: u64 = 1 << 16;
/// DR6.BS: the debug exception was caused by a single step (SDM vol. 3 §17.2.3).
const DR6_BS: u64 = 1 << 14;

impl Running {
    /// Handles a write of `byte` to the trap port. Emulates the RDPMC or handles the trap at the
    /// #GP handler that has caused the write. Forwards a write of the guest's own code to the
    /// device bus.
    ///
    /// # Errors
    /// Returns an error if a KVM call fails. A guest cannot cause such a failure.
    pub(super) fn trap_port(&mut self, byte: u8) -> Result<LoopAction, KvmIoctlError> {
        let regs = self.registers.general(&mut self.fd)?;
        let planted = self
            .rdpmc
            .as_ref()
            .and_then(|rdpmc| rdpmc.gate.as_ref()?.planted_at(regs.rip));
        match planted {
            Some(TriggeredHandlerTrap::Installed(at)) => {
                self.registers.forget();
                self.fd.complete_exit()?;
                return self.at_gate(at);
            }
            Some(TriggeredHandlerTrap::Removed(at)) if !self.is_out(&[at, regs.rip])? => {
                self.fd.complete_exit()?;
                self.go_to(at)?;
                return Ok(LoopAction::Repeat);
            }
            _ => {}
        }
        let site = match &mut self.rdpmc {
            Some(rdpmc) => rdpmc.site_at(&regs, &self.fd)?,
            None => None,
        };
        // For the stepper, the end of the exit is the end of the instruction, so the ambiguity
        // check must not complete the exit.
        let site = site.map(|(hit, level)| {
            let ambiguous = hit.ambiguous && self.stepper.is_none();
            (TriggeredRdpmcSite { ambiguous, ..hit }, level)
        });
        if let Some((hit, level)) = site
            && (!hit.ambiguous || self.is_of(hit, regs.rip)?)
        {
            self.answer(hit, level, regs)?;
            return Ok(LoopAction::Repeat);
        }
        Ok(self.forward_port_write(byte))
    }

    /// Returns `true` if there is an OUT instruction of the guest's own code at one of the
    /// addresses `rips`.
    fn is_out(&self, rips: &[u64]) -> Result<bool, KvmIoctlError> {
        let Some(rdpmc) = &self.rdpmc else {
            return Ok(false);
        };
        let state = VcpuState::read(&self.fd)?;
        let mut memory = LinearMemory::new(&rdpmc.memory, &state);
        Ok(rips.iter().any(|&rip| {
            let mut code = [0; MAX_INSTRUCTION_BYTES];
            let readable = memory.read(rip, &mut code);
            is_out(&code[..readable], 64)
        }))
    }

    /// Returns `true` if the RDPMC at `hit` has caused the port write, and `false` if an adjacent
    /// instruction has. `rip` is the RIP at the exit. Makes KVM complete the exit.
    fn is_of(&mut self, hit: TriggeredRdpmcSite, rip: u64) -> Result<bool, KvmIoctlError> {
        self.registers.forget();
        self.fd.complete_exit()?;
        let now = self.fd.get_regs()?.rip;
        Ok(now == hit.next_rip() && (rip == hit.start || rip == now))
    }

    /// Emulates an RDPMC: reads the counter that ECX selects into EDX:EAX, and skips the
    /// instruction.
    #[expect(clippy::cast_possible_truncation, reason = "ECX")]
    fn answer(
        &mut self,
        hit: TriggeredRdpmcSite,
        level: PrivilegeState,
        mut regs: kvm_regs,
    ) -> Result<(), KvmIoctlError> {
        if self.is_nmi_pending()? {
            self.fd.complete_exit()?;
            return self.go_to(hit.start);
        }
        self.slot.stats().rdpmc.inc();
        let Some(pmu) = &mut self.pmu else { return Ok(()) };
        let MsrReadOutcome::Value(value) = pmu.rdpmc_at(regs.rcx as u32, level.cpl, level.pce) else {
            self.slot.stats().gp_injected.inc();
            self.fd.complete_exit()?;
            self.go_to(hit.start)?;
            return self.raise_general_protection();
        };
        self.completed = ExitCompletion::AtAnyCpl;
        self.last_read.now(hit.start, hit.next_rip());
        regs.rax = value & 0xffff_ffff;
        regs.rdx = value >> 32;
        if hit.ambiguous {
            // The ambiguity check has already completed the exit in KVM.
            regs.rip = hit.next_rip();
            return self.fd.set_regs(&regs);
        }
        self.registers.set_general(&mut self.fd, &regs)
    }

    /// Sets RIP to `rip`.
    fn go_to(&mut self, rip: u64) -> Result<(), KvmIoctlError> {
        self.registers.forget();
        let mut regs = self.fd.get_regs()?;
        regs.rip = rip;
        self.fd.set_regs(&regs)
    }

    /// Checks whether the guest's kernel or its #GP handler has changed, if a check is due.
    pub(super) fn check_guest_kernel(&mut self) -> Result<(), KvmIoctlError> {
        let Some(rdpmc) = self.rdpmc.as_mut().filter(|rdpmc| rdpmc.kernel_check.due) else {
            return Ok(());
        };
        let state = VcpuState::read(&self.fd)?;
        let mut changed = false;
        if let Some(gate) = &mut rdpmc.gate
            && let GpHandlerCheckResult::Changed(breakpoint) = gate.intercept(&(&state).into())
        {
            changed = true;
            if let Some(breakpoint) = breakpoint {
                self.debug.replace_last_site(breakpoint);
            }
        }
        if let Some(running) = &rdpmc.running
            && state.is_64bit()
            && let Some(lstar) = lstar(&self.fd)
        {
            let mut regs = GuestRegs::default();
            crate::kvm::registers::set_system(&mut regs, &state.sregs);
            changed |= running.patch_if_new(&regs, lstar);
        }
        rdpmc.kernel_check.looked(changed);
        Ok(())
    }

    /// Handles a trap at `at`, the start of the guest's #GP handler. Emulates the instruction if
    /// RDPMC has caused the fault. Otherwise lets the handler run.
    fn at_gate(&mut self, at: u64) -> Result<LoopAction, KvmIoctlError> {
        let is_nmi_pending = self.is_nmi_pending()?;
        let (Some(rdpmc), Some(pmu)) = (&mut self.rdpmc, &mut self.pmu) else {
            return Ok(LoopAction::Repeat);
        };
        let Some(gate) = &rdpmc.gate else {
            return Ok(LoopAction::Repeat);
        };
        self.slot.stats().gp_intercepted.inc();
        self.registers.forget();
        let mut state = VcpuState::read(&self.fd)?;
        let mut patched = patching::VcpuState::from(&state);
        if let GpHandlerStopReason::Rdpmc(read) = gate.stop_reason(&patched, |gpa| rdpmc.sites.length_at(gpa))
        {
            if is_nmi_pending {
                read.execute_again(&mut patched);
                state.update(&patched);
                self.leave_handler(read.cpl, &state)?;
                return Ok(LoopAction::Repeat);
            }
            let pce = state.sregs.cr4 & CR4_PCE != 0;
            if let MsrReadOutcome::Value(value) = pmu.rdpmc_at(read.index, read.cpl, pce || read.cpl == 0) {
                self.slot.stats().rdpmc.inc();
                self.completed = ExitCompletion::AtAnyCpl;
                read.complete(value, &mut patched);
                state.update(&patched);
                self.leave_handler(read.cpl, &state)?;
                if read.traps() {
                    self.raise_single_step()?;
                } else {
                    let (at, behind) = read.rips();
                    self.last_read.now(at, behind);
                }
                return Ok(LoopAction::Repeat);
            }
            self.slot.stats().gp_injected.inc();
        }
        if gate.enter_handler(at, &mut patched).is_none() {
            guest_log!(
                Error,
                "vcpu{}: the guest's #GP handler cannot push at {:#x}",
                self.id,
                state.regs.rsp
            );
            return Ok(LoopAction::Stop(VmStopReason::TripleFault));
        }
        state.update(&patched);
        self.fd.set_regs(&state.regs)?;
        Ok(LoopAction::Repeat)
    }

    /// Returns from the #GP handler to the code that has faulted, at privilege level `cpl`.
    fn leave_handler(&self, cpl: u8, state: &VcpuState) -> Result<(), KvmIoctlError> {
        if cpl != 0 {
            self.fd.set_sregs(&state.sregs)?;
        }
        self.fd.set_regs(&state.regs)
    }

    /// Emulates the RDPMC at which the vCPU has stopped by a hardware breakpoint.
    #[expect(clippy::cast_possible_truncation, reason = "ECX")]
    pub(super) fn handle_rdpmc_breakpoint(&mut self) -> Result<LoopAction, KvmIoctlError> {
        let regs = self.fd.get_regs()?;
        let gate = self.rdpmc.as_ref().and_then(|rdpmc| rdpmc.gate.as_ref());
        if gate.is_some_and(|gate| gate.breaks_at(regs.rip)) {
            return self.at_gate(regs.rip);
        }
        // The breakpoint triggers again after the NMI.
        if self.is_nmi_pending()? {
            return Ok(LoopAction::Repeat);
        }
        let Some(rdpmc) = &mut self.rdpmc else {
            return Ok(LoopAction::Repeat);
        };
        self.registers.forget();
        let mut state = VcpuState {
            regs,
            sregs: self.fd.get_sregs()?,
        };
        // The breakpoint is set at a linear address, which may meanwhile contain a different
        // instruction.
        let mut code = [0; MAX_INSTRUCTION_BYTES];
        let readable = LinearMemory::new(&rdpmc.memory, &state).read(regs.rip, &mut code);
        let Some(length) = rdpmc_length(&code[..readable], &patching::VcpuState::from(&state).sregs.cs)
        else {
            state.regs.rflags |= RFLAGS_RF;
            self.fd.set_regs(&state.regs)?;
            return Ok(LoopAction::Repeat);
        };
        self.slot.stats().rdpmc.inc();
        let Some(pmu) = &mut self.pmu else {
            return Ok(LoopAction::Repeat);
        };
        let level = PrivilegeState::of(&state);
        let regs = &mut state.regs;
        let MsrReadOutcome::Value(value) = pmu.rdpmc_at(regs.rcx as u32, level.cpl, level.pce) else {
            self.slot.stats().gp_injected.inc();
            self.raise_general_protection()?;
            return Ok(LoopAction::Repeat);
        };
        self.completed = ExitCompletion::AtAnyCpl;
        let behind = regs.rip.wrapping_add(length.into());
        let at = regs.rip;
        (regs.rax, regs.rdx, regs.rip) = (value & 0xffff_ffff, value >> 32, behind);
        self.fd.set_regs(regs)?;
        if regs.rflags & RFLAGS_TF != 0 {
            self.raise_single_step()?;
        } else {
            self.last_read.now(at, behind);
        }
        Ok(LoopAction::Repeat)
    }

    fn raise_general_protection(&self) -> Result<(), KvmIoctlError> {
        self.raise(13, Some(0))
    }

    /// Injects a #DB after an instruction was emulated for a guest that has set the trap flag.
    fn raise_single_step(&self) -> Result<(), KvmIoctlError> {
        let mut debug = self.fd.get_debug_regs()?;
        debug.dr6 |= DR6_BS;
        self.fd.set_debug_regs(&debug)?;
        self.raise(1, None)
    }

    fn raise(&self, vector: u8, error_code: Option<u32>) -> Result<(), KvmIoctlError> {
        let mut events = self.fd.get_vcpu_events()?;
        // With the flag clear, KVM keeps NMIs that are sent concurrently.
        events.flags &= !KVM_VCPUEVENT_VALID_NMI_PENDING;
        events.exception.injected = 1;
        events.exception.nr = vector;
        events.exception.has_error_code = error_code.is_some().into();
        events.exception.error_code = error_code.unwrap_or(0);
        self.fd.set_vcpu_events(&events)
    }

    /// Returns `true` if the NMI of a PMI is still pending although the guest has reached an RDPMC.
    ///
    /// In this case, KVM has let the guest execute something else before the NMI, for example the
    /// fault of this RDPMC or the entry of an interrupt. The NMI would be delivered directly after
    /// the RDPMC. The guest therefore repeats the RDPMC after the NMI; see
    /// [`Self::interrupt_before_read`]. An RDPMC is repeated once per NMI and only up to a limit,
    /// so that the guest makes progress.
    fn is_nmi_pending(&mut self) -> Result<bool, KvmIoctlError> {
        let Some(in_a_row) = self.sent_nmi.take_unseen() else {
            return Ok(false);
        };
        if self.stepper.is_some() {
            return Ok(false);
        }
        let nmi = self.registers.nmi_state(&mut self.fd)?;
        self.registers.set_nmi_sync(&mut self.fd, false);
        let waits = nmi.masked == 0 && nmi.pending | nmi.injected != 0;
        if waits {
            self.sent_nmi.record_repetition(in_a_row);
        }
        Ok(waits)
    }

    /// Prepares the delivery of a PMI to a guest that has just executed RDPMC. If the guest has not
    /// executed another instruction since, it repeats the RDPMC after the handler of the PMI.
    /// Returns the time for which the PMI must be delayed instead, if any.
    ///
    /// Linux updates an event in three steps: it reads the previous value, executes RDPMC, and
    /// exchanges the previous value with compare-and-exchange. A PMI handler between the last two
    /// steps restarts the period. The previous value may then be the same as before, so that the
    /// exchange succeeds, and the count is wrong by 2^48. On a processor, the time between RDPMC
    /// and the exchange is a few nanoseconds. With a trapped RDPMC, overflows are detected at its
    /// exit and timers fire before the next entry, so PMIs would often arrive in this time.
    pub(super) fn interrupt_before_read(&mut self) -> Result<Option<Duration>, KvmIoctlError> {
        let in_a_row = std::mem::take(&mut self.last_read.repeat_count);
        let Some(EmulatedRdpmc {
            address: at,
            next_address: behind,
            when,
        }) = self.last_read.read
        else {
            return Ok(None);
        };
        // During stepping, overflows are detected before the instruction. In an NMI handler, a
        // further NMI is blocked until the handler ends.
        if self.stepper.is_some() || self.fd.get_vcpu_events()?.nmi.masked != 0 {
            return Ok(None);
        }
        let mut regs = self.fd.get_regs()?;
        if regs.rip != at && regs.rip != behind {
            // The guest has progressed, but the value that RDPMC returned may still be in a
            // register.
            return Ok((when.elapsed() < READ_SETTLE_TIME).then_some(READ_SETTLE_TIME));
        }
        if !self.last_read.may_repeat(in_a_row) {
            // The limit of repetitions is reached: the counters overflow again each time that the
            // guest reaches this RDPMC.
            return Ok(Some(PMI_DELAY));
        }
        self.registers.forget();
        if regs.rip == at {
            // KVM has not yet advanced RIP past the trap OUT. Completing the exit leaves the exit
            // request set, so the next KVM_RUN returns without entering the guest and the loop
            // repeats.
            self.fd.complete_exit()?;
            regs = self.fd.get_regs()?;
        }
        if regs.rip == behind {
            regs.rip = at;
            // Some KVM versions advance RIP past the OUT before user space provides the result.
            // Pending register writes must not override the new RIP.
            self.registers.cancel_set_general(&mut self.fd);
            self.fd.set_regs(&regs)?;
        }
        self.last_read.record_progress();
        Ok(None)
    }
}

/// Returns the entry point of SYSCALL in the guest's kernel.
fn lstar(fd: &VcpuFd) -> Option<u64> {
    let mut msrs = Msrs::from_entries(&[kvm_msr_entry {
        index: IA32_LSTAR,
        ..Default::default()
    }])
    .ok()?;
    match fd.get_msrs(&mut msrs) {
        Ok(1) => msrs.as_slice().first().map(|msr| msr.data),
        _ => None,
    }
}
