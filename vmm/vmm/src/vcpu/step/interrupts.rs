//! Handles interrupts and faults while a vCPU is single-stepped: finds the event that the next
//! entry would deliver, stops at its handler, and emulates HLT and STI.

use kvm_bindings::{KVM_MP_STATE_HALTED, KVM_VCPUEVENT_VALID_SHADOW, kvm_mp_state, kvm_vcpu_events};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};
use vpmu::exact::{SingleStepOutcome, SteppedGuestMemory};

use super::debug::{EntryDebugState, GuestDebug};
use super::state::VcpuState;
use super::stepper::{GateStopMethod, NMI, RFLAGS_IF, SingleStepError, Stepper};
use crate::kvm::stepping::BREAKPOINTS;
use crate::kvm::vcpu_fd::VcpuFd;
use guest_patching::finder::TRAP;
use guest_patching::linear_memory::LinearMemory;

/// Minimum number of steps between two interrupts of the local APIC timer. Stepped code is three to
/// five orders of magnitude slower than real time. Without the limit, the guest would execute
/// nothing but its timer handler. A processor at full speed executes some millions of instructions
/// between two timer interrupts of Linux.
pub(super) const STEPS_PER_TICK: u64 = 1_000_000;
/// First vector that is used for interrupts (SDM vol. 3 §6.2). Lower vectors are exceptions.
const FIRST_INTERRUPT: u8 = 32;
/// Value of KVM's interrupt shadow field after STI (KVM_X86_SHADOW_INT_STI).
const SHADOW_STI: u8 = 2;

impl Stepper {
    /// Sets breakpoints or traps for one entry on the handlers of `vectors`, as found in the
    /// interrupt descriptor table.
    pub(super) fn watch_gates(
        &mut self,
        state: &VcpuState,
        vectors: &[u8],
        debug: &GuestDebug,
        want: &mut EntryDebugState,
    ) {
        self.gates.watched.clear();
        let mut memory = LinearMemory::new(&self.memory, state);
        let room = match self.gate_stops {
            GateStopMethod::Code => usize::MAX,
            GateStopMethod::Breakpoints => debug.free().min(BREAKPOINTS),
            GateStopMethod::Nowhere => 0,
        };
        for &vector in vectors {
            if self.gates.watched.len() >= room {
                break;
            }
            if let Some(handler) = memory.gate(vector)
                && handler != state.regs.rip
                && !self.gates.watched.iter().any(|&(at, _)| at == handler)
            {
                self.gates.watched.push((handler, vector));
            }
        }
        if self.gate_stops != GateStopMethod::Code {
            for (slot, &(at, _)) in want.entry_breakpoints.iter_mut().zip(&self.gates.watched) {
                *slot = Some(at);
            }
            return;
        }
        // The trap must lie within one page. A handler that already begins with an RDPMC trap needs
        // no second trap.
        for &(at, _) in self.gates.watched.iter().filter(|(at, _)| at & 0xfff != 0xfff) {
            if let Some(gpa) = memory.physical(at).map(GuestAddress)
                && let Ok(there) = self.memory.get_slice(gpa, TRAP.len())
                && let Ok(code) = there.read_obj::<[u8; 2]>(0)
                && code != TRAP
                && there.write_obj(TRAP, 0).is_ok()
            {
                self.gates.planted.push((gpa, code));
            }
        }
    }

    /// Returns the vector of the exception, NMI or interrupt that the next entry would deliver.
    pub(super) fn deliverable(
        &self,
        fd: &VcpuFd,
        state: &VcpuState,
        events: &kvm_vcpu_events,
        between: bool,
    ) -> Result<Option<u8>, SingleStepError> {
        if events.exception.injected != 0 || events.exception.pending != 0 {
            return Ok(Some(events.exception.nr));
        }
        if events.nmi.injected != 0 {
            return Ok(Some(NMI));
        }
        if events.interrupt.injected != 0 {
            return Ok(Some(events.interrupt.nr));
        }
        // An exit in the middle of an instruction must be completed first, and MOV SS and STI block
        // events for one instruction.
        if !between || events.interrupt.shadow != 0 {
            return Ok(None);
        }
        if events.nmi.pending != 0 && events.nmi.masked == 0 {
            return Ok(Some(NMI));
        }
        if state.regs.rflags & RFLAGS_IF == 0 || self.holds_interrupts {
            return Ok(None);
        }
        let lapic = fd.get_lapic()?;
        let request = highest_request(&lapic.regs);
        Ok(request.filter(|&vector| self.tally.steps >= self.timer_waits || !is_timer(&lapic.regs, vector)))
    }

    /// Delays the next interrupt of the local APIC timer if the interrupt that is being delivered,
    /// `vector`, comes from the timer.
    pub(super) fn pace_timer(&mut self, fd: &VcpuFd, vector: u8) -> Result<(), SingleStepError> {
        if vector >= FIRST_INTERRUPT {
            let lapic = fd.get_lapic()?;
            if is_timer(&lapic.regs, vector) {
                self.timer_waits = self.tally.steps + STEPS_PER_TICK;
            }
        }
        Ok(())
    }

    /// Emulates STI at CPL 0. A step would stop after STI on some processors, and after the next
    /// instruction on others.
    pub(super) fn emulate_sti(
        &mut self,
        fd: &VcpuFd,
        mut state: VcpuState,
    ) -> Result<SingleStepOutcome, SingleStepError> {
        state.regs.rip = state.regs.rip.wrapping_add(1);
        state.regs.rflags |= RFLAGS_IF;
        fd.set_regs(&state.regs)?;
        let mut events = fd.get_vcpu_events()?;
        events.flags = KVM_VCPUEVENT_VALID_SHADOW;
        events.interrupt.shadow = SHADOW_STI;
        fd.set_vcpu_events(&events)?;
        Ok(self.end(&state))
    }

    /// Emulates HLT at CPL 0. KVM would skip or delay the halt during a step. At the next entry,
    /// the vCPU waits for an event.
    pub(super) fn halt(
        &mut self,
        fd: &VcpuFd,
        mut state: VcpuState,
    ) -> Result<SingleStepOutcome, SingleStepError> {
        state.regs.rip = state.regs.rip.wrapping_add(1);
        fd.set_regs(&state.regs)?;
        let mut events = fd.get_vcpu_events()?;
        // HLT ends the interrupt shadow of a preceding STI. NMIs that are sent concurrently are
        // preserved.
        events.flags = KVM_VCPUEVENT_VALID_SHADOW;
        events.interrupt.shadow = 0;
        fd.set_vcpu_events(&events)?;
        let halted = kvm_mp_state {
            mp_state: KVM_MP_STATE_HALTED,
        };
        fd.set_mp_state(halted)?;
        let step = self.end(&state);
        self.halted = true;
        Ok(step)
    }
}

pub(super) fn is_halted(fd: &VcpuFd) -> Result<bool, SingleStepError> {
    let state = fd.get_mp_state()?;
    Ok(state.mp_state == KVM_MP_STATE_HALTED)
}

/// Returns `true` if `vector` is the vector of the local APIC timer and the timer is not masked
/// (SDM vol. 3 §11.5.1).
fn is_timer(page: &[std::ffi::c_char], vector: u8) -> bool {
    const LVT_TIMER: usize = 0x320;
    page.get(LVT_TIMER..LVT_TIMER + 4)
        .is_some_and(|entry| entry[0].cast_unsigned() == vector && entry[2] & 1 == 0)
}

/// Returns the vector of the interrupt that the local APIC would deliver now: the highest vector in
/// IRR, if its priority class exceeds those of TPR and of the highest vector in ISR (SDM vol. 3
/// §11.8.3).
fn highest_request(page: &[std::ffi::c_char]) -> Option<u8> {
    let bit_in = |base: usize, vector: usize| {
        page.get(base + vector / 32 * 16 + vector % 32 / 8)
            .is_some_and(|&byte| byte.cast_unsigned() >> (vector % 8) & 1 != 0)
    };
    let highest = |base| (16..256usize).rev().find(|&vector| bit_in(base, vector));
    const TPR: usize = 0x80;
    const ISR: usize = 0x100;
    const IRR: usize = 0x200;
    let request = highest(IRR)?;
    let task = usize::from(page.get(TPR).map_or(0, |&byte| byte.cast_unsigned()));
    let priority = highest(ISR).unwrap_or(0).max(task) >> 4;
    u8::try_from(request)
        .ok()
        .filter(|vector| usize::from(*vector) >> 4 > priority)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(irr: &[usize], isr: &[usize], tpr: u8) -> Vec<std::ffi::c_char> {
        let mut page = vec![0; 1024];
        for (base, vectors) in [(0x200, irr), (0x100, isr)] {
            for vector in vectors {
                page[base + vector / 32 * 16 + vector % 32 / 8] |=
                    1u8.wrapping_shl(*vector as u32 % 8) as std::ffi::c_char;
            }
        }
        page[0x80] = tpr as std::ffi::c_char;
        page
    }

    /// Only interrupts of the local APIC timer are delayed. An interrupt of another source with the
    /// same vector is not delayed while the timer is masked.
    #[test]
    fn timer_vector_is_recognized_unless_masked() {
        let mut page = page(&[0xec], &[], 0);
        page[0x320] = 0xecu8 as std::ffi::c_char;
        // Select TSC-deadline mode, which leaves the entry unmasked.
        page[0x322] = 4;
        assert!(is_timer(&page, 0xec) && !is_timer(&page, 0xed));
        page[0x322] = 5;
        assert!(!is_timer(&page, 0xec));
        assert!(!is_timer(&[], 0xec));
    }

    /// An interrupt can be delivered only if its priority class exceeds those of TPR and ISR.
    #[test]
    fn interrupt_is_deliverable_above_priority() {
        assert_eq!(highest_request(&page(&[], &[], 0)), None);
        assert_eq!(highest_request(&page(&[0x31, 0xec, 0x40], &[], 0)), Some(0xec));
        assert_eq!(highest_request(&page(&[0x45], &[0x41], 0)), None);
        assert_eq!(highest_request(&page(&[0x51], &[0x41], 0)), Some(0x51));
        assert_eq!(highest_request(&page(&[0x51], &[], 0x50)), None);
        assert_eq!(highest_request(&page(&[0x60], &[], 0x5f)), Some(0x60));
    }
}
