//! The exact backing: single-steps a vCPU while a counter needs exact counts.
//!
//! Before each entry, the stepper decodes the next instruction. When KVM reports that the step is
//! complete, the stepper adds the events of the instruction to the counters (see [`vpmu::exact`]
//! for the rules). An exit for I/O or an MSR occurs in the middle of an instruction and does not
//! end its step.
//!
//! Stepping uses the trap flag. A processor clears the flag when it enters a handler, after it has
//! saved the flag where the guest can see it. The stepper has two modes to deal with this:
//!
//! - If CPL 0 is counted, every instruction is stepped. Interrupts are blocked during a step
//!   (`KVM_GUESTDBG_BLOCKIRQ`) and delivered between two steps, without the trap flag, up to a
//!   breakpoint on their gate. Breakpoints on the gates of faults detect instructions that do not
//!   complete. SYSCALL is emulated. The trap flag is removed from flags that an instruction or a
//!   fault has saved.
//! - If only CPL 1 to 3 are counted, the guest's kernel runs freely. The trap flag is part of the
//!   flags that the kernel entry saves and is restored on return. If counting is enabled inside the
//!   kernel, no such flags exist, and the kernel is stepped until it returns.
//!
//! A KVM that emulates CPL 0 stops after each instruction there, regardless of the trap flag, but
//! cannot step CPL 3. If hardware breakpoints work, a straight-line run of instructions needs only
//! one stop (`runs.rs`).

pub mod debug;
mod decoded;
mod interrupts;
mod runs;
pub(super) mod state;
mod stepper;
mod system_calls;

use kvm_bindings::kvm_debug_exit_arch;
use perf_core::guest_log;
use vm_memory::{Bytes, GuestMemoryBackend};
use vpmu::PrivilegeLevels;
use vpmu::exact::{InstructionClass, RetiredCounts, SingleStepOutcome, SteppedCpuState};

use crate::kvm::kickable_vcpu::KickableVcpu;
use crate::kvm::vcpu_fd::VcpuFd;
use debug::{EntryDebugState, GuestDebug};
use guest_patching::finder::TRAP;
use guest_patching::linear_memory::LinearMemory;
use interrupts::is_halted;
use state::{UnreadableMemory, VcpuState};
use stepper::{
    CurrentStep, RFLAGS_IF, RFLAGS_TF, RedecodeReason, SteppingMode, UserCodeState, UserResumeMethod, apply,
};
pub use stepper::{SingleStepError, StepStats, Stepper};
use system_calls::end_step;

const STI: u8 = 0xfb;
const SYSRETQ: [u8; 3] = [0x48, 0x0f, 0x07];
/// Exceptions that an ordinary instruction may raise, from the most to the least likely: page
/// fault, general protection, invalid opcode, device not available, divide error, stack fault,
/// segment not present, SIMD, x87, alignment check, bound range, invalid TSS.
const FAULTS: [u8; 12] = [14, 13, 6, 7, 0, 12, 11, 19, 16, 17, 5, 10];
/// Maximum number of steps through the guest's kernel while the stepper looks for the return to
/// user code. The search is then abandoned.
const MAX_WALKED_STEPS: u32 = 200_000;

/// Next action of the caller of [`Stepper::prepare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VcpuStepAction {
    /// Enter the guest with KVM_RUN.
    Enter,
    /// Account for the step of an emulated instruction, and call [`Stepper::prepare`] again.
    Executed(SingleStepOutcome),
}

impl Stepper {
    /// Ends the current step if the last exit has completed its instruction without a debug exit.
    /// On a KVM that emulates the code, an instruction that exits for a write ends in this way.
    /// Must be called before overflows are checked.
    ///
    /// # Errors
    /// Returns [`SingleStepError`] if a KVM call fails.
    pub fn settle(&mut self, fd: &VcpuFd) -> Result<Option<SingleStepOutcome>, SingleStepError> {
        if self.current_run.is_some() {
            let state = self.read(fd)?;
            return Ok((!self.cancel_unstarted_run(&state)).then(|| self.end(&state)));
        }
        let Some(CurrentStep {
            initial_state: before,
            ..
        }) = self.present.filter(|_| self.mode != SteppingMode::Rest)
        else {
            return Ok(None);
        };
        let state = self.read(fd)?;
        if (state.regs.rip, state.cpl()) == (before.rip, before.cpl) || self.is_in_kernel_uncounted(&state) {
            return Ok(None);
        }
        Ok(Some(self.end(&state)))
    }

    /// Prepares the next entry. Must be called directly before the entry, after the PMU registers
    /// were reconciled. `levels` are the privilege levels at which events are counted by stepping.
    /// `room` returns the counts that may be added at CPL 0 before a counter overflows.
    ///
    /// # Errors
    /// Returns [`SingleStepError`] if a KVM call fails.
    pub fn prepare(
        &mut self,
        fd: &mut KickableVcpu,
        debug: &mut GuestDebug,
        levels: PrivilegeLevels,
        room: &dyn Fn() -> RetiredCounts,
    ) -> Result<VcpuStepAction, SingleStepError> {
        let fresh = self.cached_state.take();
        self.synced.want(fd, levels.any());
        if !levels.any() {
            return self.rest(fd, debug).map(|()| VcpuStepAction::Enter);
        }
        self.mode = match self.mode {
            same @ SteppingMode::Emulated(_) if self.emulated => same,
            _ if self.emulated => SteppingMode::Emulated(UserCodeState::Away),
            same @ SteppingMode::All { .. } if levels.kernel => same,
            _ if levels.kernel => SteppingMode::All { may_wait: true },
            same @ SteppingMode::UserOnly(_) => same,
            // If counting starts inside the kernel, the flags that the kernel has saved lack the
            // trap flag.
            _ => SteppingMode::UserOnly(UserResumeMethod::Walked(0)),
        };
        let state = match fresh {
            Some(state) => state,
            None => self.read(fd)?,
        };
        if self.emulated {
            self.prepare_emulated(fd, debug, levels, &state, room)
        } else if levels.kernel {
            self.prepare_all(fd, debug, state)
        } else {
            self.prepare_user(fd, debug, &state)
        }
    }

    /// Stops stepping the vCPU.
    fn rest(&mut self, fd: &VcpuFd, debug: &mut GuestDebug) -> Result<(), SingleStepError> {
        if self.mode != SteppingMode::Rest {
            self.mode = SteppingMode::Rest;
            self.drop_step();
        }
        let want = EntryDebugState {
            watch: self.strays,
            ..EntryDebugState::default()
        };
        apply(fd, debug, want)
    }

    fn prepare_emulated(
        &mut self,
        fd: &VcpuFd,
        debug: &mut GuestDebug,
        levels: PrivilegeLevels,
        state: &VcpuState,
        room: &dyn Fn() -> RetiredCounts,
    ) -> Result<VcpuStepAction, SingleStepError> {
        if state.cpl() != 0 {
            self.drop_step();
            if self.mode != SteppingMode::Emulated(UserCodeState::Runs) {
                self.mode = SteppingMode::Emulated(UserCodeState::Runs);
                self.count_unstepped(levels);
            }
        } else if !self.meter.in_step() {
            if let Some(want) = self.begin_run(fd, debug, state, room)? {
                apply(fd, debug, want)?;
                return Ok(VcpuStepAction::Enter);
            }
            if self.begin(state) == InstructionClass::Halt {
                return self.halt(fd, *state).map(VcpuStepAction::Executed);
            }
        }
        let mut want = EntryDebugState {
            step: true,
            without_flag: true,
            ..EntryDebugState::default()
        };
        if state.cpl() != 0 {
            debug.apply_without_flag(fd, &state.regs, want)?;
            return Ok(VcpuStepAction::Enter);
        }
        if self.current_class() == Some(InstructionClass::InterruptReturn) {
            // KVM's emulator does not stop directly after IRET, and does not stop at all if IRET
            // returns to user code.
            let target = self.meter.known_target();
            let selector = LinearMemory::new(&self.memory, state).quad(state.regs.rsp.wrapping_add(8));
            if state.is_64bit() && selector.is_some_and(|cs| cs & 3 != 0) {
                if let Some(at) = target {
                    self.mode = SteppingMode::Emulated(UserCodeState::Entered { at });
                }
                self.count_unstepped(levels);
            } else {
                want.entry_breakpoints[0] = target;
            }
        }
        apply(fd, debug, want)?;
        Ok(VcpuStepAction::Enter)
    }

    /// Counts a section of user code that runs without being stepped.
    fn count_unstepped(&mut self, levels: PrivilegeLevels) {
        if levels.user {
            if self.tally.unstepped == 0 {
                guest_log!(
                    Warn,
                    "user-mode code of the guest is not counted, because this host's KVM cannot \
                    single-step it"
                );
            }
            self.tally.unstepped += 1;
        }
    }

    /// Prepares the next entry if every instruction is stepped.
    fn prepare_all(
        &mut self,
        fd: &VcpuFd,
        debug: &mut GuestDebug,
        state: VcpuState,
    ) -> Result<VcpuStepAction, SingleStepError> {
        let events = fd.get_vcpu_events()?;
        let may_wait = self.mode == SteppingMode::All { may_wait: true };
        self.mode = SteppingMode::All { may_wait: false };
        let halted = may_wait && is_halted(fd)?;
        let between = !self.meter.in_step();
        if let Some(vector) = self.deliverable(fd, &state, &events, between)? {
            self.pace_timer(fd, vector)?;
            return self.deliver_event(fd, debug, &state, &[vector]);
        }
        if halted {
            self.mode = SteppingMode::All { may_wait: true };
            let all: Vec<u8> = (0..=255).collect();
            return self.deliver_event(fd, debug, &state, &all);
        }
        if between {
            match self.begin(&state) {
                InstructionClass::SystemCall if self.emulate_syscall(fd, state)? => {
                    let step = self.end(&self.read(fd)?);
                    return Ok(VcpuStepAction::Executed(step));
                }
                InstructionClass::Halt if state.cpl() == 0 => {
                    self.mode = SteppingMode::All { may_wait: true };
                    return self.halt(fd, state).map(VcpuStepAction::Executed);
                }
                _ if state.cpl() == 0
                    && self.code(&state) == Some(SYSRETQ)
                    && self.emulate_sysret(fd, state)? =>
                {
                    let step = self.end(&self.read(fd)?);
                    return Ok(VcpuStepAction::Executed(step));
                }
                _ if state.cpl() == 0
                    && state.regs.rflags & RFLAGS_IF == 0
                    && self.code(&state).is_some_and(|code| code[0] == STI) =>
                {
                    return self.emulate_sti(fd, state).map(VcpuStepAction::Executed);
                }
                _ => {}
            }
        }
        let mut want = EntryDebugState {
            block_interrupts: true,
            step: true,
            ..EntryDebugState::default()
        };
        if let Some(InstructionClass::Interrupt(vector)) = self.current_class() {
            want.step = false;
            self.watch_gates(&state, &[vector, 13, 14, 12], debug, &mut want);
        } else {
            self.watch_gates(&state, &FAULTS, debug, &mut want);
        }
        apply(fd, debug, want)?;
        Ok(VcpuStepAction::Enter)
    }

    /// Delivers an interrupt or exception to the guest without the trap flag. The vCPU stops at the
    /// first instruction of the handler.
    fn deliver_event(
        &mut self,
        fd: &VcpuFd,
        debug: &mut GuestDebug,
        state: &VcpuState,
        vectors: &[u8],
    ) -> Result<VcpuStepAction, SingleStepError> {
        // If the current instruction does not complete, it starts again after the handler.
        let cpu = state.cpu();
        self.meter.begin(&cpu, &mut UnreadableMemory);
        self.present = Some(CurrentStep {
            initial_state: cpu,
            class: InstructionClass::Plain,
            after_kernel: None,
        });
        let mut want = EntryDebugState::default();
        self.watch_gates(state, vectors, debug, &mut want);
        apply(fd, debug, want)?;
        Ok(VcpuStepAction::Enter)
    }

    /// Prepares the next entry if only user code is counted.
    fn prepare_user(
        &mut self,
        fd: &VcpuFd,
        debug: &mut GuestDebug,
        state: &VcpuState,
    ) -> Result<VcpuStepAction, SingleStepError> {
        let mut want = EntryDebugState {
            step: true,
            ..EntryDebugState::default()
        };
        if state.cpl() == 0 {
            let SteppingMode::UserOnly(UserResumeMethod::Walked(walked)) = &mut self.mode else {
                return Ok(VcpuStepAction::Enter);
            };
            *walked += 1;
            let too_far = *walked > MAX_WALKED_STEPS;
            if self.began_in_user() {
                self.drop_step();
            }
            if !self.meter.in_step() {
                self.begin(state);
            }
            // A stepped SYSRET stops only if the flags that it loads contain the trap flag.
            if self.code(state) == Some(SYSRETQ) && self.emulate_sysret(fd, *state)? {
                self.drop_step();
                return Ok(VcpuStepAction::Executed(SingleStepOutcome::default()));
            }
            if too_far || self.current_class() == Some(InstructionClass::Halt) {
                // The kernel waits for another task, so it is unknown which task returns to user
                // code next.
                log::debug!("no way back to user code was found from {:#x}", state.regs.rip);
                self.tally.lost += u64::from(too_far);
                self.mode = SteppingMode::UserOnly(UserResumeMethod::Saved);
                self.drop_step();
                self.strays = true;
                want = EntryDebugState {
                    watch: true,
                    ..EntryDebugState::default()
                };
            } else {
                want.block_interrupts = true;
            }
        } else {
            self.mode = SteppingMode::UserOnly(UserResumeMethod::Saved);
            if self.present.is_some_and(|step| step.initial_state.cpl == 0) {
                self.drop_step();
            }
            if !self.meter.in_step() {
                match self.begin(state) {
                    InstructionClass::SystemCall => {
                        if let Some(step) = self.emulate_user_syscall(fd, debug, state)? {
                            return Ok(VcpuStepAction::Executed(step));
                        }
                    }
                    InstructionClass::Unreadable => {
                        if let Some(step) = &mut self.present {
                            step.after_kernel = Some(RedecodeReason::Faults);
                        }
                    }
                    _ => {}
                }
            }
        }
        want.block_interrupts |= self.holds_interrupts && state.cpl() != 0;
        self.strays |= want.step;
        apply(fd, debug, want)?;
        Ok(VcpuStepAction::Enter)
    }

    /// Restores guest memory that was changed for one entry. Must be called after every KVM_RUN.
    #[inline]
    pub fn after_run(&mut self) {
        self.synced.after_run();
        for (at, code) in self.gates.planted.drain(..).rev() {
            // Restore the original code, unless the guest has overwritten the trap.
            if let Ok(there) = self.memory.get_slice(at, TRAP.len())
                && there.read_obj::<[u8; 2]>(0).is_ok_and(|code| code == TRAP)
            {
                let _ = there.write_obj(code, 0);
            }
        }
    }

    /// Handles a debug exit. Must be called directly after KVM_RUN. Returns `None` if stepping did
    /// not cause the exit; the caller must then inject the exception into the guest.
    ///
    /// # Errors
    /// Returns [`SingleStepError`] if a KVM call fails.
    pub fn handle_debug_exit(
        &mut self,
        fd: &mut KickableVcpu,
        stop: &kvm_debug_exit_arch,
    ) -> Result<Option<SingleStepOutcome>, SingleStepError> {
        let state = match self.synced.take(fd) {
            Some(state) => state,
            None => self.read(fd)?,
        };
        log::trace!(
            "stopped at {:#x}, CPL {}, flags {:#x}: exception {}, DR6 {:#x}, behind {:?}",
            state.regs.rip,
            state.cpl(),
            state.regs.rflags,
            stop.exception,
            stop.dr6,
            self.current_class()
        );
        // If the step began in the kernel, no instruction of user code has executed.
        let in_user = state.cpl() == 3 && (self.mode == SteppingMode::Rest || self.began_in_user());
        self.stopped_in_user = in_user.then_some(state);
        if stop.exception == 3 {
            return Ok(None);
        }
        if self.mode == SteppingMode::Rest {
            if !self.strays {
                return Ok(None);
            }
            let mut regs = state.regs;
            regs.rflags &= !RFLAGS_TF;
            fd.set_regs(&regs)?;
            return Ok(Some(SingleStepOutcome::default()));
        }
        if self.is_in_kernel_uncounted(&state) {
            return Ok(Some(SingleStepOutcome::default()));
        }
        self.hide_trap_flag(&state);
        self.cached_state = Some(state);
        Ok(Some(self.end(&state)))
    }

    /// Handles a write to the trap port. If the write comes from trap code that the stepper has
    /// placed at an interrupt handler, moves the vCPU back to the start of the handler. Returns
    /// `None` for any other write.
    ///
    /// # Errors
    /// Returns [`SingleStepError`] if a KVM call fails.
    pub fn trapped(&mut self, fd: &mut KickableVcpu) -> Result<Option<SingleStepOutcome>, SingleStepError> {
        if self.mode == SteppingMode::Rest || self.gates.watched.is_empty() {
            return Ok(None);
        }
        let mut state = self.read(fd)?;
        let length = TRAP.len() as u64;
        let handler = state.regs.rip;
        if self.gates.vector_at(handler).is_none() {
            return Ok(None);
        }
        // KVM would advance RIP past the OUT at the next entry if the vCPU were still there.
        state.regs.rip = handler.wrapping_add(length);
        fd.set_regs(&state.regs)?;
        fd.complete_exit()?;
        state = self.read(fd)?;
        state.regs.rip = handler;
        fd.set_regs(&state.regs)?;
        self.hide_trap_flag(&state);
        Ok(Some(self.end(&state)))
    }

    /// Ends the step or run in progress with the vCPU in `state`, and returns what it executed.
    fn end(&mut self, state: &VcpuState) -> SingleStepOutcome {
        if let Some(under_way) = self.current_run.take() {
            return self.end_run(&under_way, state);
        }
        if let SteppingMode::Emulated(UserCodeState::Entered { at }) = self.mode {
            return self.end_user_entry(at, state);
        }
        let cpu = state.cpu();
        let mut memory = LinearMemory::new(&self.memory, state);
        if self.mode == SteppingMode::Emulated(UserCodeState::Runs) {
            if cpu.cpl != 0 {
                return SingleStepOutcome::default();
            }
            self.mode = SteppingMode::Emulated(UserCodeState::Away);
            // An event has interrupted the user code. The meter identifies the event by the current
            // RIP.
            self.meter
                .begin(&SteppedCpuState { cpl: 3, ..cpu }, &mut UnreadableMemory);
        }
        let from_user = self.began_in_user();
        let present = self.present.take();
        let mut step = end_step(&mut self.meter, present.as_ref(), from_user, &cpu, &mut memory);
        self.gates.watched.clear();
        self.tally.steps += 1;
        // Kernel steps during the search for the return to user code are not counted.
        if step.lost && (from_user || !matches!(self.mode, SteppingMode::UserOnly(_))) {
            self.tally.lost += 1;
            log::debug!(
                "lost track: {present:x?} led to {:#x} at CPL {}",
                cpu.rip,
                cpu.cpl
            );
            step.user = Default::default();
        }
        step
    }

    /// Ends a step with which the kernel entered user code at the address `at`, where KVM does not
    /// step. The user code may have been interrupted already.
    fn end_user_entry(&mut self, at: u64, state: &VcpuState) -> SingleStepOutcome {
        let cpu = state.cpu();
        let mut memory = LinearMemory::new(&self.memory, state);
        self.mode = SteppingMode::Emulated(UserCodeState::Away);
        let entered = SteppedCpuState {
            rip: at,
            cpl: 3,
            ..cpu
        };
        let mut step = self.meter.end(&entered, &mut memory);
        self.present = None;
        self.tally.steps += 1;
        if cpu.cpl != 0 {
            self.mode = SteppingMode::Emulated(UserCodeState::Runs);
            return step;
        }
        self.meter.begin(&entered, &mut UnreadableMemory);
        let back = self.meter.end(&cpu, &mut memory);
        self.tally.lost += u64::from(back.lost);
        step.event = true;
        step.lost |= back.lost;
        step.kernel.add(back.kernel);
        step
    }

    /// Clears the stepper's trap flag in flags that were just saved on the guest's stack.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "bit 8 of the flags is bit 0 of their second byte"
    )]
    fn hide_trap_flag(&mut self, state: &VcpuState) {
        if self.emulated || !state.is_64bit() {
            return;
        }
        let mut memory = LinearMemory::new(&self.memory, state);
        let bit = (RFLAGS_TF >> 8) as u8;
        let rsp = state.regs.rsp;
        if let Some(vector) = self.gates.vector_at(state.regs.rip) {
            // Stack layout: RIP, CS, RFLAGS, RSP, SS, with an error code below them for some
            // vectors (SDM vol. 3 §6.14.2, table 6-1).
            let error_code = matches!(vector, 8 | 10..=14 | 17 | 21 | 29 | 30);
            let flags = rsp.wrapping_add(16 + if error_code { 8 } else { 0 });
            memory.clear_bits(flags.wrapping_add(1), bit);
        } else if self.present.is_some_and(|step| {
            let old = step.initial_state.gpr[4];
            step.class == InstructionClass::Flags && old.wrapping_sub(rsp) < 9 && old != rsp
        }) {
            // PUSHF: the saved flags are at the top of the stack.
            memory.clear_bits(rsp.wrapping_add(1), bit);
        }
    }
}

#[cfg(test)]
mod tests;
