//! Registers of a single-stepped vCPU, in the forms that the step meter and the patches of the
//! guest's kernel need.

use guest_patching::linear_memory::AddressRegisters;
use guest_patching::registers::{
    self as patching, DescriptorTableRegister, GeneralRegisters, Segment, SystemRegisters,
};
use kvm_bindings::{kvm_dtable, kvm_regs, kvm_segment, kvm_sregs};
use vpmu::exact::{CodeSegmentMode, SteppedCpuState, SteppedGuestMemory};

use crate::kvm::call::KvmIoctlError;
use crate::kvm::kickable_vcpu::{KickableVcpu, SyncReg};
use crate::kvm::vcpu_fd::VcpuFd;

const EFER_LMA: u64 = 1 << 10;

/// Registers of a vCPU that is outside the guest.
#[derive(Clone, Copy, Debug)]
pub struct VcpuState {
    /// General-purpose registers.
    pub regs: kvm_regs,
    /// Segment and control registers.
    pub sregs: kvm_sregs,
}

impl VcpuState {
    /// Reads the registers from KVM.
    ///
    /// # Errors
    /// Returns an error if the KVM call fails.
    pub fn read(fd: &VcpuFd) -> Result<Self, KvmIoctlError> {
        Ok(Self {
            regs: fd.get_regs()?,
            sregs: fd.get_sregs()?,
        })
    }

    /// Returns the CPL, which is SS.DPL in every mode (SDM vol. 3 §5.5).
    pub fn cpl(&self) -> u8 {
        self.sregs.ss.dpl & 3
    }

    /// Returns `true` if 64-bit code is executing.
    pub fn is_64bit(&self) -> bool {
        self.sregs.efer & EFER_LMA != 0 && self.sregs.cs.l != 0
    }

    /// Returns the registers that the step meter needs.
    pub fn cpu(&self) -> SteppedCpuState {
        let (regs, sregs) = (&self.regs, &self.sregs);
        let long = self.is_64bit();
        // In 64-bit code these segment bases are treated as 0, regardless of the descriptors.
        let flat = |segment: &kvm_segment| if long { 0 } else { segment.base };
        SteppedCpuState {
            rip: regs.rip,
            rflags: regs.rflags,
            cpl: self.cpl(),
            size: match (long, sregs.cs.db) {
                (true, _) => CodeSegmentMode::Bits64,
                (false, 0) => CodeSegmentMode::Bits16,
                (false, _) => CodeSegmentMode::Bits32,
            },
            gpr: [
                regs.rax, regs.rcx, regs.rdx, regs.rbx, regs.rsp, regs.rbp, regs.rsi, regs.rdi, regs.r8,
                regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
            ],
            segment_bases: [
                flat(&sregs.es),
                flat(&sregs.cs),
                flat(&sregs.ss),
                flat(&sregs.ds),
                sregs.fs.base,
                sregs.gs.base,
            ],
        }
    }
}

impl From<&VcpuState> for AddressRegisters {
    fn from(state: &VcpuState) -> Self {
        let sregs = &state.sregs;
        Self {
            cr0: sregs.cr0,
            cr3: sregs.cr3,
            cr4: sregs.cr4,
            efer: sregs.efer,
            cpl: state.cpl(),
            code64: sregs.cs.l != 0,
            idt: DescriptorTableRegister {
                base: sregs.idt.base,
                limit: sregs.idt.limit,
            },
        }
    }
}

/// Copies the registers that patches of the guest's kernel read and change.
impl From<&VcpuState> for patching::VcpuState {
    fn from(VcpuState { regs, sregs }: &VcpuState) -> Self {
        let table = |table: &kvm_dtable| DescriptorTableRegister {
            base: table.base,
            limit: table.limit,
        };
        Self {
            regs: GeneralRegisters {
                rip: regs.rip,
                rsp: regs.rsp,
                rax: regs.rax,
                rcx: regs.rcx,
                rdx: regs.rdx,
                rflags: regs.rflags,
            },
            sregs: SystemRegisters {
                cr0: sregs.cr0,
                cr3: sregs.cr3,
                cr4: sregs.cr4,
                efer: sregs.efer,
                cs: segment(&sregs.cs),
                ss: segment(&sregs.ss),
                ldt: segment(&sregs.ldt),
                gdt: table(&sregs.gdt),
                idt: table(&sregs.idt),
            },
        }
    }
}

impl VcpuState {
    /// Copies the general-purpose registers, CS and SS from `patched`.
    pub fn update(&mut self, patched: &patching::VcpuState) {
        let GeneralRegisters {
            rip,
            rsp,
            rax,
            rcx,
            rdx,
            rflags,
        } = patched.regs;
        self.regs = kvm_regs {
            rip,
            rsp,
            rax,
            rcx,
            rdx,
            rflags,
            ..self.regs
        };
        self.sregs.cs = kvm_segment_of(&patched.sregs.cs);
        self.sregs.ss = kvm_segment_of(&patched.sregs.ss);
    }
}

fn segment(of: &kvm_segment) -> Segment {
    Segment {
        base: of.base,
        limit: of.limit,
        selector: of.selector,
        type_: of.type_,
        present: of.present,
        dpl: of.dpl,
        db: of.db,
        s: of.s,
        l: of.l,
        g: of.g,
        avl: of.avl,
        unusable: of.unusable,
    }
}

fn kvm_segment_of(of: &Segment) -> kvm_segment {
    kvm_segment {
        base: of.base,
        limit: of.limit,
        selector: of.selector,
        type_: of.type_,
        present: of.present,
        dpl: of.dpl,
        db: of.db,
        s: of.s,
        l: of.l,
        g: of.g,
        avl: of.avl,
        unusable: of.unusable,
        padding: 0,
    }
}

/// Registers that KVM copies to user space at each exit while the vCPU is stepped. Saves two KVM
/// calls per step.
#[derive(Debug, Default)]
pub(super) struct SyncedRegisters {
    /// `true` if KVM supports copying registers at exits.
    can: bool,
    /// `true` if KVM was asked to copy registers at each exit, `false` if not; `None` before the
    /// first request.
    come: Option<bool>,
    /// `true` if KVM has copied the registers at the last exit.
    came: bool,
}

impl SyncedRegisters {
    /// Creates the state for a KVM that supports copying registers at exits.
    pub(super) fn new() -> Self {
        Self {
            can: true,
            ..Self::default()
        }
    }

    /// Selects whether KVM copies the registers at exits from now on.
    pub(super) fn want(&mut self, fd: &mut KickableVcpu, wanted: bool) {
        let wanted = wanted && self.can;
        if self.come != Some(wanted) {
            for set in [SyncReg::Register, SyncReg::SystemRegister] {
                fd.sync_at_exit(set, wanted);
            }
            self.come = Some(wanted);
        }
    }

    /// Records that KVM_RUN has returned, so the copied registers are valid.
    #[inline]
    pub(super) fn after_run(&mut self) {
        self.came = self.come == Some(true);
    }

    /// Returns the registers that KVM copied at the last exit, if any. Must be called directly
    /// after the exit, at most once.
    pub(super) fn take(&mut self, fd: &mut KickableVcpu) -> Option<VcpuState> {
        std::mem::take(&mut self.came).then(|| {
            let synced = fd.sync_regs_mut();
            VcpuState {
                regs: synced.regs,
                sregs: synced.sregs,
            }
        })
    }
}

/// Guest memory that cannot be read. Stands for the guest's memory when no instruction is known to
/// have been executed.
pub struct UnreadableMemory;

impl SteppedGuestMemory for UnreadableMemory {
    fn read(&mut self, _: u64, _: &mut [u8]) -> usize {
        0
    }

    fn gate(&mut self, _: u8) -> Option<u64> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patched_registers_are_written_back() {
        let mut state = VcpuState {
            regs: kvm_regs {
                rip: 1,
                rsp: 2,
                rax: 3,
                rbx: 4,
                ..Default::default()
            },
            sregs: kvm_sregs::default(),
        };
        state.sregs.cs = kvm_segment {
            base: 5,
            limit: 6,
            selector: 7,
            type_: 11,
            present: 1,
            dpl: 3,
            s: 1,
            l: 1,
            g: 1,
            ..Default::default()
        };
        state.sregs.ss.unusable = 1;
        let before = state;
        let mut patched = patching::VcpuState::from(&state);
        state.update(&patched);
        assert_eq!((state.regs, state.sregs), (before.regs, before.sregs));
        (patched.regs.rip, patched.sregs.ss.selector) = (8, 9);
        state.update(&patched);
        assert_eq!((state.regs.rip, state.regs.rbx), (8, 4));
        assert_eq!((state.sregs.ss.selector, state.sregs.ss.unusable), (9, 1));
    }

    #[test]
    fn code_size_follows_processor_mode() {
        let state = VcpuState {
            regs: kvm_regs::default(),
            sregs: kvm_sregs::default(),
        };
        assert!(!state.is_64bit());
        assert_eq!(state.cpu().size, CodeSegmentMode::Bits16);
    }
}
