//! Samples in the kernel's entry code, where no `pt_regs` is complete and the unwind tables say nothing.
//!
//! A kernel cannot be asked for a chain there, so its tables need none. From outside it can: the user's
//! registers are still, or already, where the CPU and the entry code (Linux `arch/x86/entry/entry_64.S`) keep
//! them.
//!
//! | where | ip | stack pointer |
//! |---|---|---|
//! | SYSCALL has just been executed, or SYSRET is next | rcx | rsp |
//! | SYSCALL, on the task's stack, registers being saved | rcx | `sp2` of the TSS |
//! | on the way out, on the entry stack | the old stack, at rdi | there |
//! | there, after the page tables were changed | the copied frame; for SYSRET rcx | the entry stack |
//!
//! rbp is the user's own at all of them. What rests on rcx is marked as guessed, for the code is told by its
//! address and its registers only.

use super::parts::{KernelUnwind, Others, RFLAGS_IF, UserRegs, plausible_user};
use crate::paging::AddressSpace;
use crate::{Budget, GuestPhys, GuestRegs};
use kernel_images::orc::OrcFrameKind;

/// In the TSS (SDM vol. 3 §8.7): the entry stack's end, and the word where Linux keeps the user's stack
/// pointer meanwhile.
const TSS_SP0: u64 = 4;
const TSS_SP2: u64 = 20;
/// Most bytes on the entry stack: a frame of five words and rdi.
const MAX_ON_ENTRY_STACK: u64 = 48;
/// From where rdi points on the way out (the saved rdi) to the frame.
const FRAME_FROM_RDI: u64 = 16;
const FRAME_BYTES: u64 = 40;
/// RFLAGS: bit 1 is always set, and nothing above bit 21 ever.
const RFLAGS_FIXED: u64 = 1 << 1;
const RFLAGS_BITS: u32 = 22;

/// User registers, and whether they are likely and not certain.
pub(super) struct Found {
    pub regs: UserRegs,
    pub guessed: bool,
}

/// Whether the interrupted instruction is one of the entry code for which neither tables nor a frame pointer
/// have a caller.
pub(super) fn without_regs(kernel: &KernelUnwind<'_>, regs: &GuestRegs) -> bool {
    let at = regs.rip.wrapping_sub(kernel.slide);
    if !(kernel.entry_text.0..kernel.entry_text.1).contains(&at) {
        return false;
    }
    match kernel.orc {
        Some(orc) => orc
            .find(at)
            .is_none_or(|entry| matches!(entry.kind, OrcFrameKind::End | OrcFrameKind::Undefined)),
        // The kernel's own frames, or a `pt_regs`, are in the upper half.
        None => regs.rbp >> 63 == 0,
    }
}

/// The user's registers at such an instruction.
pub(super) fn user_regs<M: GuestPhys + ?Sized>(
    space: &mut AddressSpace<'_, M>,
    regs: &GuestRegs,
    budget: &mut Budget,
) -> Option<Found> {
    if space.is_user_half(regs.rsp) {
        return kept_by_syscall(space, regs, regs.rsp);
    }
    let entry_stack = word(space, regs.tss_base.wrapping_add(TSS_SP0), budget)?;
    let used = entry_stack.wrapping_sub(regs.rsp);
    if used > MAX_ON_ENTRY_STACK {
        let sp = word(space, regs.tss_base.wrapping_add(TSS_SP2), budget)?;
        return kept_by_syscall(space, regs, sp);
    }
    if let Some(found) = frame(space, regs, regs.rdi.wrapping_add(FRAME_FROM_RDI), budget) {
        return Some(found);
    }
    if used >= FRAME_BYTES
        && let Some(found) = frame(space, regs, entry_stack.wrapping_sub(FRAME_BYTES), budget)
    {
        return Some(found);
    }
    // SYSRET needs the stack pointer only, which was pushed first.
    let sp = word(space, entry_stack.wrapping_sub(8), budget)?;
    kept_by_syscall(space, regs, sp)
}

fn word<M: GuestPhys + ?Sized>(space: &mut AddressSpace<'_, M>, at: u64, budget: &mut Budget) -> Option<u64> {
    if !space.is_kernel_half(at) {
        return None;
    }
    space.read_u64(at, budget).ok()
}

/// By the five words of an interrupt's frame.
fn frame<M: GuestPhys + ?Sized>(
    space: &mut AddressSpace<'_, M>,
    regs: &GuestRegs,
    at: u64,
    budget: &mut Budget,
) -> Option<Found> {
    let mut words = [0; 5];
    for (i, to) in (0u64..).zip(&mut words) {
        *to = word(space, at.wrapping_add(8 * i), budget)?;
    }
    let regs = plausible_user(space, words, regs.rbp, Others::InVcpu)?;
    Some(Found { regs, guessed: false })
}

/// By rcx and r11, if r11 can be a program's flags.
fn kept_by_syscall<M: GuestPhys + ?Sized>(
    space: &AddressSpace<'_, M>,
    regs: &GuestRegs,
    sp: u64,
) -> Option<Found> {
    let flags = regs.r11;
    let plausible = flags & RFLAGS_FIXED != 0
        && flags & RFLAGS_IF != 0
        && flags >> RFLAGS_BITS == 0
        && regs.rcx != 0
        && space.is_user_half(regs.rcx)
        && space.is_user_half(sp);
    plausible.then_some(Found {
        regs: UserRegs {
            ip: regs.rcx,
            sp,
            bp: regs.rbp,
            wide: true,
            exact_ip: false,
            others: Others::InVcpu,
        },
        guessed: true,
    })
}
