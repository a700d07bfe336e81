//! Straight-line runs: while a vCPU is stepped, several instructions without a branch are executed
//! in one entry, up to a breakpoint after the last of them.
//!
//! Only a fault can leave a run before its end, because interrupts are blocked. Breakpoints stop
//! the vCPU at the handlers of the faults that the run can raise. The handler of double faults,
//! which does not return, has one too if a breakpoint register is free. After KVM_RUN, the position
//! of the vCPU gives the number of completed instructions: n if the vCPU is before instruction n of
//! the run (from 0), or the number of instructions before the faulting address if the vCPU is at a
//! fault handler. At any other position, and if the code has changed since it was decoded, the
//! outcome is unknown.
//!
//! Runs are used only if KVM emulates CPL 0, where stepping needs no trap flag, and if hardware
//! breakpoints work.

use kvm_bindings::kvm_vcpu_events;
use vpmu::exact::{RetiredCounts, SingleStepOutcome, SteppedCpuState, SteppedGuestMemory};

use super::debug::{EntryDebugState, GuestDebug};
use super::decoded::{CurrentStraightRun, MIN_RUN_LENGTH, is_at};
use super::state::{UnreadableMemory, VcpuState};
use super::stepper::{RFLAGS_TF, SingleStepError, Stepper, SteppingMode, UserCodeState};
use crate::kvm::stepping::BREAKPOINTS;
use crate::kvm::vcpu_fd::VcpuFd;
use guest_patching::linear_memory::LinearMemory;

/// DR7.L0 to G3: enable bits of the breakpoints (SDM vol. 3 §19.2.4).
const DR7_ENABLED: u64 = 0xff;
const DOUBLE_FAULT: u8 = 8;
const STACK_FAULT: u8 = 12;
const PROTECTION_FAULT: u8 = 13;
const PAGE_FAULT: u8 = 14;

/// Returns `true` if there is no interrupt shadow and no pending SMI.
fn is_quiet(events: &kvm_vcpu_events) -> bool {
    events.interrupt.shadow == 0 && events.smi.pending == 0
}

impl Stepper {
    /// Begins a straight-line run at the current position of the vCPU, `state`. Returns `None` if
    /// no run is possible there. `room` returns the counts that may be added at CPL 0 before a
    /// counter overflows.
    pub(super) fn begin_run(
        &mut self,
        fd: &VcpuFd,
        debug: &GuestDebug,
        state: &VcpuState,
        room: &dyn Fn() -> RetiredCounts,
    ) -> Result<Option<EntryDebugState>, SingleStepError> {
        if !self.has_runs
            || self.mode != SteppingMode::Emulated(UserCodeState::Away)
            || debug.free() < BREAKPOINTS
            || !state.is_64bit()
            || state.regs.rflags & RFLAGS_TF != 0
        {
            return Ok(None);
        }
        let at = state.regs.rip;
        let mut memory = LinearMemory::new(&self.memory, state);
        let Some(run) = self.runs.find(at, &mut self.meter, &mut memory) else {
            return Ok(None);
        };
        let count = run.instructions_within(&room());
        if count < MIN_RUN_LENGTH {
            return Ok(None);
        }
        let events = fd.get_vcpu_events()?;
        if !is_quiet(&events)
            || self.deliverable(fd, state, &events, true)?.is_some()
            || fd.get_debug_regs()?.dr7 & DR7_ENABLED != 0
        {
            return Ok(None);
        }
        let Some(end) = at.checked_add(run.end_of(count) as u64) else {
            return Ok(None);
        };
        let mut want = EntryDebugState {
            block_interrupts: true,
            ..EntryDebugState::default()
        };
        want.entry_breakpoints[0] = Some(end);
        self.gates.watched.clear();
        let last = if run.uses_stack() {
            STACK_FAULT
        } else {
            DOUBLE_FAULT
        };
        let vectors = [PAGE_FAULT, PROTECTION_FAULT, last];
        for (slot, vector) in want.entry_breakpoints[1..].iter_mut().zip(vectors) {
            let Some(handler) = memory.gate(vector) else {
                continue;
            };
            if (at..=end).contains(&handler) {
                // A stop at this address could mean either the fault or normal progress of the run.
                self.gates.watched.clear();
                return Ok(None);
            }
            self.gates.watched.push((handler, vector));
            *slot = Some(handler);
        }
        self.current_run = Some(CurrentStraightRun {
            address: at,
            run,
            count,
        });
        Ok(Some(want))
    }

    /// Cancels the current straight-line run if the vCPU is still at the start of the run. Returns
    /// whether the run was cancelled. If KVM has not completed the last exit, the next entry
    /// completes it.
    pub(super) fn cancel_unstarted_run(&mut self, state: &VcpuState) -> bool {
        let is_there = |run: &mut CurrentStraightRun| run.address == state.regs.rip && state.cpl() == 0;
        let forgotten = self.current_run.take_if(is_there).is_some();
        if forgotten {
            self.gates.watched.clear();
        }
        forgotten
    }

    /// Accounts for the instructions of a straight-line run. `state` contains the registers with
    /// which the vCPU has left the run.
    pub(super) fn end_run(&mut self, under_way: &CurrentStraightRun, state: &VcpuState) -> SingleStepOutcome {
        let CurrentStraightRun {
            address: at,
            run,
            count,
        } = under_way;
        let cpu = state.cpu();
        let mut memory = LinearMemory::new(&self.memory, state);
        let in_handler = cpu.cpl == 0 && self.gates.vector_at(cpu.rip).is_some();
        self.gates.watched.clear();
        self.tally.runs += 1;
        // Each of the watched faults pushes an error code, below the return address (SDM vol. 3
        // §6.13).
        let reached = if in_handler {
            memory.quad(cpu.gpr[4].wrapping_add(8))
        } else {
            Some(cpu.rip)
        };
        let reached = reached.filter(|_| cpu.cpl == 0);
        let completed = reached.and_then(|rip| run.completed_at(rip.wrapping_sub(*at)));
        let is_same = is_at(&run.code()[..run.end_of(*count)], *at, &mut memory);
        if !is_same {
            self.runs.mark_self_modifying(*at, run, *count);
        }
        let (Some(rip), Some(n)) = (reached, completed.filter(|n| n <= count && is_same)) else {
            self.tally.lost += 1;
            log::debug!(
                "lost track: {count} instructions from {at:#x} led to {:#x} at CPL {}, their code {}",
                cpu.rip,
                cpu.cpl,
                if is_same { "is the same" } else { "has changed" }
            );
            return SingleStepOutcome {
                event: true,
                lost: true,
                ..SingleStepOutcome::default()
            };
        };
        self.tally.instructions_in_runs += n as u64;
        let mut step = SingleStepOutcome {
            kernel: run.counts(n),
            ..SingleStepOutcome::default()
        };
        if in_handler {
            // The instruction at this position raised the fault, so it began and retired nothing.
            self.meter
                .begin(&SteppedCpuState { rip, ..cpu }, &mut UnreadableMemory);
            let fault = self.meter.end(&cpu, &mut memory);
            step.kernel.add(fault.kernel);
            (step.event, step.lost) = (fault.event, fault.lost);
        }
        step
    }
}
