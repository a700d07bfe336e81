//! Finds the user registers of a sample in the kernel's entry code, where no `pt_regs` is complete
//! and ORC tables have no entries.
//!
//! The kernel itself never unwinds from these addresses, but a profiler on the host must. The entry
//! code keeps the user registers in known locations (Linux `arch/x86/entry/entry_64.S`):
//!
//! | interrupted code | location of ip | location of the stack pointer |
//! |---|---|---|
//! | just after SYSCALL, or before SYSRET | rcx | rsp |
//! | after SYSCALL, on the task's stack, saving registers | rcx | `sp2` of the TSS |
//! | exit path, on the entry stack | the old stack, at rdi | the old stack, at rdi |
//! | exit path, after the page-table switch | the copied frame; for SYSRET rcx | the entry stack |
//!
//! In all of this code, rbp contains the user's value. Results based on rcx are marked as guessed,
//! because the state of the entry code is inferred only from the instruction address and the
//! registers.

use super::parts::{KernelUnwinder, OtherRegs, RFLAGS_IF, UserRegs, plausible_user};
use crate::paging::AddressSpace;
use crate::{GuestMemoryReadBudget, GuestPhys, GuestRegs};
use kernel_images::orc::OrcFrameKind;

/// Offsets of two TSS fields (SDM vol. 3 §8.7): the field with the end of the entry stack, and the
/// field in which Linux saves the user's stack pointer.
const TSS_SP0: u64 = 4;
const TSS_SP2: u64 = 20;
/// Maximum number of bytes that the kernel uses on the entry stack: an interrupt frame of five
/// words, and rdi.
const MAX_ON_ENTRY_STACK: u64 = 48;
/// Offset in bytes from the saved rdi to the interrupt frame on the old stack, and size of the
/// frame in bytes. On the exit path, rdi contains the address of the saved rdi.
const FRAME_FROM_RDI: u64 = 16;
const FRAME_BYTES: u64 = 40;
/// RFLAGS bit 1, which is always set, and number of RFLAGS bits that may be set (bits above 21 are
/// always clear).
const RFLAGS_FIXED: u64 = 1 << 1;
const RFLAGS_BITS: u32 = 22;

/// User registers found in the kernel's entry code, with a flag that shows whether they are
/// guessed.
pub(super) struct EntryUserRegs {
    pub regs: UserRegs,
    pub guessed: bool,
}

/// Returns whether the interrupted instruction is in entry code from which neither the unwind
/// tables nor the frame pointer lead to the caller.
pub(super) fn without_regs(kernel: &KernelUnwinder<'_>, regs: &GuestRegs) -> bool {
    let at = regs.rip.wrapping_sub(kernel.slide);
    if !(kernel.entry_text.0..kernel.entry_text.1).contains(&at) {
        return false;
    }
    match kernel.orc {
        Some(orc) => orc
            .find(at)
            .is_none_or(|entry| matches!(entry.kind, OrcFrameKind::End | OrcFrameKind::Undefined)),
        // If rbp pointed to a kernel frame or a `pt_regs`, it would be in the upper half.
        None => regs.rbp >> 63 == 0,
    }
}

/// Returns the user registers of a sample in entry code ([`without_regs`]), or `None` if they are
/// implausible.
pub(super) fn user_regs<M: GuestPhys + ?Sized>(
    space: &mut AddressSpace<'_, M>,
    regs: &GuestRegs,
    budget: &mut GuestMemoryReadBudget,
) -> Option<EntryUserRegs> {
    if space.is_user_half(regs.rsp) {
        return regs_saved_by_syscall(space, regs, regs.rsp);
    }
    let entry_stack = word(space, regs.tss_base.wrapping_add(TSS_SP0), budget)?;
    let used = entry_stack.wrapping_sub(regs.rsp);
    if used > MAX_ON_ENTRY_STACK {
        let sp = word(space, regs.tss_base.wrapping_add(TSS_SP2), budget)?;
        return regs_saved_by_syscall(space, regs, sp);
    }
    if let Some(found) = frame(space, regs, regs.rdi.wrapping_add(FRAME_FROM_RDI), budget) {
        return Some(found);
    }
    if used >= FRAME_BYTES
        && let Some(found) = frame(space, regs, entry_stack.wrapping_sub(FRAME_BYTES), budget)
    {
        return Some(found);
    }
    // On the path to SYSRET, the entry stack contains only the user's stack pointer, in its first
    // word.
    let sp = word(space, entry_stack.wrapping_sub(8), budget)?;
    regs_saved_by_syscall(space, regs, sp)
}

fn word<M: GuestPhys + ?Sized>(
    space: &mut AddressSpace<'_, M>,
    at: u64,
    budget: &mut GuestMemoryReadBudget,
) -> Option<u64> {
    if !space.is_kernel_half(at) {
        return None;
    }
    space.read_u64(at, budget).ok()
}

/// Reads the user registers from the interrupt frame (five words) at `at`.
fn frame<M: GuestPhys + ?Sized>(
    space: &mut AddressSpace<'_, M>,
    regs: &GuestRegs,
    at: u64,
    budget: &mut GuestMemoryReadBudget,
) -> Option<EntryUserRegs> {
    let mut words = [0; 5];
    for (i, to) in (0u64..).zip(&mut words) {
        *to = word(space, at.wrapping_add(8 * i), budget)?;
    }
    let regs = plausible_user(space, words, regs.rbp, OtherRegs::InVcpu)?;
    Some(EntryUserRegs { regs, guessed: false })
}

/// Returns the user's registers that SYSCALL saved in rcx (ip) and r11 (flags), if r11 is a
/// plausible RFLAGS value of user mode.
fn regs_saved_by_syscall<M: GuestPhys + ?Sized>(
    space: &AddressSpace<'_, M>,
    regs: &GuestRegs,
    sp: u64,
) -> Option<EntryUserRegs> {
    let flags = regs.r11;
    let plausible = flags & RFLAGS_FIXED != 0
        && flags & RFLAGS_IF != 0
        && flags >> RFLAGS_BITS == 0
        && regs.rcx != 0
        && space.is_user_half(regs.rcx)
        && space.is_user_half(sp);
    plausible.then_some(EntryUserRegs {
        regs: UserRegs {
            ip: regs.rcx,
            sp,
            bp: regs.rbp,
            wide: true,
            exact_ip: false,
            others: OtherRegs::InVcpu,
        },
        guessed: true,
    })
}
