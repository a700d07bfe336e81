//! Initial registers of the boot processor and initial local APIC state.

use kvm_bindings::{kvm_dtable, kvm_fpu, kvm_regs, kvm_segment};
use vm_memory::{Bytes, GuestAddress};

use super::error::BootError;
use super::layout;
use crate::kvm::vcpu_fd::VcpuFd;
use crate::memory::GuestRam;

/// Initial execution state of the boot processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BootProcessorState {
    /// 64-bit mode with paging, for Linux. The first 4 GiB are identity-mapped.
    Long64 {
        /// Guest-physical entry point below 4 GiB.
        rip: u64,
        /// Guest-physical address of boot_params.
        rsi: u64,
        /// Guest-physical address of the top-level page table.
        cr3: u64,
    },
    /// 32-bit protected mode with flat segments and without paging, for multiboot and PVH kernels.
    Protected32 {
        /// Guest-physical entry point.
        eip: u32,
        /// Magic number of multiboot. PVH defines no value.
        eax: u32,
        /// Guest-physical address of the multiboot information or of PVH's start_info.
        ebx: u32,
    },
}

/// CR0.PE: protection enable.
const CR0_PE: u64 = 1 << 0;
/// CR0.ET: extension type.
const CR0_ET: u64 = 1 << 4;
/// CR0.NE: numeric error.
const CR0_NE: u64 = 1 << 5;
/// CR0.PG: paging.
const CR0_PG: u64 = 1 << 31;
/// CR4.PAE: physical address extension.
const CR4_PAE: u64 = 1 << 5;
/// EFER.LME: long mode enable.
const EFER_LME: u64 = 1 << 8;
/// EFER.LMA: long mode active.
const EFER_LMA: u64 = 1 << 10;
/// Initial value of RFLAGS: only bit 1, which is always set. Interrupts are disabled.
const RFLAGS_RESERVED: u64 = 1 << 1;
/// Page table entry bits: present and writable.
const PRESENT_WRITABLE: u64 = 0x3;
/// Page directory entry bit: the entry maps a 2 MiB page.
const LARGE: u64 = 1 << 7;

/// Selector of the code segment, as Linux's 64-bit entry expects it. The GDT consists of two null
/// descriptors, code, data and task.
const CODE_SELECTOR: u16 = 0x10;
/// Selector of the data segment, as Linux's 64-bit entry expects it.
const DATA_SELECTOR: u16 = 0x18;
/// Selector of the task state segment.
const TASK_SELECTOR: u16 = 0x20;
const CODE_64: u64 = 0x00AF_9B00_0000_FFFF;
const CODE_32: u64 = 0x00CF_9B00_0000_FFFF;
const DATA: u64 = 0x00CF_9300_0000_FFFF;
const TASK: u64 = 0x0000_8B00_0000_0067;

fn gdt(entry: &BootProcessorState) -> [u64; 5] {
    let code = match entry {
        BootProcessorState::Long64 { .. } => CODE_64,
        BootProcessorState::Protected32 { .. } => CODE_32,
    };
    [0, 0, code, DATA, TASK]
}

#[expect(clippy::cast_possible_truncation, reason = "20 bits of it")]
fn segment(descriptor: u64, selector: u16) -> kvm_segment {
    let bit = |n: u32| ((descriptor >> n) & 1) as u8;
    let granular = bit(55);
    let limit = ((descriptor & 0xFFFF) | ((descriptor >> 32) & 0xF_0000)) as u32;
    kvm_segment {
        base: ((descriptor >> 16) & 0xFF_FFFF) | ((descriptor >> 32) & 0xFF00_0000),
        limit: if granular == 1 {
            (limit << 12) | 0xFFF
        } else {
            limit
        },
        selector,
        type_: ((descriptor >> 40) & 0xF) as u8,
        present: bit(47),
        dpl: ((descriptor >> 45) & 3) as u8,
        db: bit(54),
        s: bit(44),
        l: bit(53),
        g: granular,
        avl: bit(52),
        unusable: 0,
        padding: 0,
    }
}

/// Writes the boot processor's GDT and, for 64-bit entry, its page tables to guest memory.
pub(crate) fn write_tables(ram: &GuestRam, entry: &BootProcessorState) -> Result<(), BootError> {
    let put = |what: &'static str, address: u64, values: &[u64]| {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        ram.memory()
            .write_slice(&bytes, GuestAddress(address))
            .map_err(|e| BootError::memory(what, address, e))
    };
    put("the descriptor table", layout::GDT, &gdt(entry))?;
    if let BootProcessorState::Long64 { .. } = entry {
        put("page tables", layout::PML4, &[layout::PDPT | PRESENT_WRITABLE])?;
        let directories: Vec<u64> = (0..4)
            .map(|i| (layout::PAGE_DIRECTORIES + i * 4096) | PRESENT_WRITABLE)
            .collect();
        put("page tables", layout::PDPT, &directories)?;
        let pages: Vec<u64> = (0..4 * 512u64)
            .map(|i| (i << 21) | PRESENT_WRITABLE | LARGE)
            .collect();
        put("page tables", layout::PAGE_DIRECTORIES, &pages)?;
    }
    Ok(())
}

/// Sets the general-purpose, segment, control and FPU registers of the boot processor. The vCPU's
/// CPUID table must be set before this call.
#[expect(clippy::cast_possible_truncation, reason = "a table of a few entries")]
pub(crate) fn configure_bsp(entry: &BootProcessorState, vcpu: &VcpuFd) -> Result<(), BootError> {
    let refused = |what| move |source| BootError::VcpuState { what, source };
    let table = gdt(entry);
    let mut sregs = vcpu.get_sregs().map_err(refused("segment registers"))?;
    sregs.gdt = kvm_dtable {
        base: layout::GDT,
        limit: (table.len() * 8 - 1) as u16,
        padding: [0; 3],
    };
    sregs.idt = kvm_dtable {
        base: layout::IDT,
        limit: 0,
        padding: [0; 3],
    };
    sregs.cs = segment(table[2], CODE_SELECTOR);
    let data = segment(table[3], DATA_SELECTOR);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = segment(table[4], TASK_SELECTOR);
    let mut regs = kvm_regs {
        rflags: RFLAGS_RESERVED,
        ..Default::default()
    };
    match *entry {
        BootProcessorState::Long64 { rip, rsi, cr3 } => {
            sregs.cr0 = CR0_PE | CR0_ET | CR0_NE | CR0_PG;
            sregs.cr3 = cr3;
            sregs.cr4 = CR4_PAE;
            sregs.efer = EFER_LME | EFER_LMA;
            regs.rip = rip;
            regs.rsi = rsi;
            regs.rsp = layout::BOOT_STACK;
            regs.rbp = layout::BOOT_STACK;
        }
        BootProcessorState::Protected32 { eip, eax, ebx } => {
            sregs.cr0 = CR0_PE | CR0_ET;
            sregs.cr3 = 0;
            sregs.cr4 = 0;
            sregs.efer = 0;
            regs.rip = u64::from(eip);
            regs.rax = u64::from(eax);
            regs.rbx = u64::from(ebx);
        }
    }
    vcpu.set_sregs(&sregs).map_err(refused("segment registers"))?;
    vcpu.set_regs(&regs).map_err(refused("general registers"))?;
    // State after FNINIT, with every SIMD exception masked.
    let fpu = kvm_fpu {
        fcw: 0x37F,
        mxcsr: 0x1F80,
        ..Default::default()
    };
    vcpu.set_fpu(&fpu).map_err(refused("FPU"))
}

/// Offset of LVT LINT0 in the local APIC page (SDM vol. 3, table 12-1).
const LVT_LINT0: usize = 0x350;
/// Offset of LVT LINT1 in the local APIC page.
const LVT_LINT1: usize = 0x360;
/// Delivery mode "NMI" of a local vector table entry (bits 10:8).
const MODE_NMI: u32 = 4 << 8;
/// Delivery mode "ExtINT" of a local vector table entry: the PIC supplies the vector.
const MODE_EXTINT: u32 = 7 << 8;

/// Configures the local interrupt pins of a vCPU as firmware does: LINT0 receives interrupts from
/// the PIC, LINT1 receives NMIs.
pub fn configure_local_apic(vcpu: &VcpuFd) -> Result<(), BootError> {
    let refused = |source| BootError::VcpuState {
        what: "local APIC",
        source,
    };
    let mut lapic = vcpu.get_lapic().map_err(refused)?;
    for (offset, mode) in [(LVT_LINT0, MODE_EXTINT), (LVT_LINT1, MODE_NMI)] {
        for (slot, byte) in lapic.regs[offset..offset + 4].iter_mut().zip(mode.to_le_bytes()) {
            *slot = byte.cast_signed();
        }
    }
    vcpu.set_lapic(&lapic).map_err(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_decode_to_flat_segments() {
        let code = segment(CODE_64, CODE_SELECTOR);
        assert_eq!(
            (code.base, code.limit, code.l, code.db, code.type_),
            (0, 0xFFFF_FFFF, 1, 0, 0xB)
        );
        let code = segment(CODE_32, CODE_SELECTOR);
        assert_eq!((code.l, code.db, code.present, code.s), (0, 1, 1, 1));
        let task = segment(TASK, TASK_SELECTOR);
        assert_eq!((task.limit, task.type_, task.s), (0x67, 0xB, 0));
    }

    #[test]
    fn page_tables_identity_map_four_gib() {
        let ram = GuestRam::new(16 << 20).unwrap();
        let entry = BootProcessorState::Long64 {
            rip: 0x10_0000,
            rsi: layout::ZERO_PAGE,
            cr3: layout::PML4,
        };
        write_tables(&ram, &entry).unwrap();
        let at = |a: u64| ram.memory().read_obj::<u64>(GuestAddress(a)).unwrap();
        for address in [0u64, 0x20_0000, 0x4000_0000, 0xFEE0_0000] {
            let pdpt = at(layout::PML4) & !0xFFF;
            let directory = at(pdpt + 8 * (address >> 30)) & !0xFFF;
            let page = at(directory + 8 * ((address >> 21) & 511));
            assert_eq!(page & !0xFFF, address & !0x1F_FFFF);
            assert_eq!(page & 0x83, 0x83);
        }
    }
}
