//! A guest of a few instructions in 64-bit mode, for probes of KVM.

use std::sync::Arc;

use kvm_bindings::kvm_segment;
use kvm_ioctls::Kvm;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::host::{KvmHostError, probe_vm};
use super::memslot::MemorySlots;
use super::vcpu_fd::VcpuFd;

const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PD: u64 = 0x3000;
/// Guest-physical address of the code.
pub(crate) const CODE: u64 = 0x5000;
/// Guest-physical address of a page for the code's data.
pub(crate) const DATA: u64 = 0x9000;
const SIZE: usize = 0x10000;
/// Page table entry bits: present, writable and user.
const TABLE: u64 = 7;
const LARGE: u64 = 1 << 7;

/// A VM with one vCPU for a probe. There is no interrupt descriptor table, so a fault shuts the
/// guest down.
#[derive(Debug)]
pub(crate) struct TinyGuest {
    pub(crate) vcpu: VcpuFd,
    _slots: MemorySlots,
    pub(crate) memory: GuestMemoryMmap,
}

impl TinyGuest {
    /// Creates a guest that is ready to run `code` at `cpl`.
    pub(crate) fn new(kvm: &Kvm, cpl: u8, code: &[u8]) -> Result<Self, KvmHostError> {
        let guest = Self::empty(kvm)?;
        guest.load(cpl, code)?;
        Ok(guest)
    }

    /// Creates a guest without code, whose CPUID table hides Intel TSX.
    pub(crate) fn empty(kvm: &Kvm) -> Result<Self, KvmHostError> {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), SIZE)])
            .map_err(|_| KvmHostError::Memory)?;
        let tables = [(PML4, PDPT | TABLE), (PDPT, PD | TABLE), (PD, TABLE | LARGE)];
        for (at, entry) in tables {
            memory
                .write_obj(entry, GuestAddress(at))
                .map_err(|_| KvmHostError::Memory)?;
        }
        let vm = Arc::new(probe_vm(kvm)?);
        let _ = vm.raw().set_tss_address(0xfffb_d000);
        let slots = MemorySlots::new(vm.clone(), memory.clone())?;
        let vcpu = vm.create_vcpu(0)?;
        let mut supported = super::cpuid::supported(kvm).map_err(|_| KvmHostError::Memory)?;
        super::cpuid::hide_transactions(&mut supported);
        vcpu.set_cpuid2(&supported)?;
        Ok(Self {
            vcpu,
            _slots: slots,
            memory,
        })
    }

    /// Prepares the guest to run `code` at `cpl` next. May be called again after the guest has shut
    /// down.
    pub(crate) fn load(&self, cpl: u8, code: &[u8]) -> Result<(), KvmHostError> {
        self.memory
            .write_slice(code, GuestAddress(CODE))
            .map_err(|_| KvmHostError::Memory)?;
        let mut sregs = self.vcpu.get_sregs()?;
        let segment = |selector: u16, type_: u8, l: u8| kvm_segment {
            base: 0,
            limit: u32::MAX,
            selector: selector | u16::from(cpl),
            type_,
            present: 1,
            dpl: cpl,
            db: 1 - l,
            s: 1,
            l,
            g: 1,
            ..Default::default()
        };
        sregs.cs = segment(8, 0xb, 1);
        sregs.ss = segment(16, 3, 0);
        (sregs.ds, sregs.es) = (sregs.ss, sregs.ss);
        sregs.idt.limit = 0;
        sregs.cr3 = PML4;
        sregs.cr4 = 1 << 5; // PAE
        sregs.cr0 = 1 << 31 | 1 << 5 | 1 << 4 | 1; // PG, NE, ET, PE
        sregs.efer = 1 << 10 | 1 << 8; // LMA, LME
        self.vcpu.set_sregs(&sregs)?;
        let mut regs = self.vcpu.get_regs()?;
        (regs.rip, regs.rsp, regs.rflags) = (CODE, 0x8000, 2);
        self.vcpu.set_regs(&regs)?;
        Ok(())
    }

    /// Returns the vCPU, the guest memory and its slots. The slots must outlive the vCPU.
    #[cfg(test)]
    pub(crate) fn into_parts(self) -> (VcpuFd, GuestMemoryMmap, MemorySlots) {
        (self.vcpu, self.memory, self._slots)
    }
}
