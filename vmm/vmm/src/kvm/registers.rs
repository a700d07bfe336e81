//! Converts KVM's register structures to [`GuestRegs`], the registers that are needed to walk guest
//! memory.

use guest_profile::GuestRegs;
use kvm_bindings::{kvm_regs, kvm_sregs};

/// Copies the general registers that a guest memory walk needs from KVM's structure.
#[inline]
pub fn set_general(to: &mut GuestRegs, regs: &kvm_regs) {
    to.rip = regs.rip;
    to.rsp = regs.rsp;
    to.rbp = regs.rbp;
    to.rcx = regs.rcx;
    to.rdx = regs.rdx;
    to.rdi = regs.rdi;
    to.r10 = regs.r10;
    to.r11 = regs.r11;
    to.r13 = regs.r13;
    to.rax = regs.rax;
    to.rbx = regs.rbx;
    to.rsi = regs.rsi;
    to.r8 = regs.r8;
    to.r9 = regs.r9;
    to.r12 = regs.r12;
    to.r14 = regs.r14;
    to.r15 = regs.r15;
    to.rflags = regs.rflags;
}

/// Copies the other registers that a guest memory walk needs from KVM's structure: control
/// registers, privilege level, and the bases of GS, TSS and IDT.
#[inline]
pub fn set_system(to: &mut GuestRegs, sregs: &kvm_sregs) {
    to.cr0 = sregs.cr0;
    to.cr3 = sregs.cr3;
    to.cr4 = sregs.cr4;
    to.efer = sregs.efer;
    // SS.DPL equals the CPL on both vendors in every mode; in real mode both are 0 (SDM vol. 3
    // §5.5). CS.RPL differs from the CPL in conforming segments.
    to.cpl = sregs.ss.dpl & 3;
    to.code64 = sregs.cs.l != 0;
    to.gs_base = sregs.gs.base;
    to.tss_base = sregs.tr.base;
    to.idt_base = sregs.idt.base;
}
