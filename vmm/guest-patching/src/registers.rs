//! vCPU registers that the emulation and patching of RDPMC read and change. The vCPU loop converts
//! them from and to KVM's structures.

/// EFER.LMA: long mode is active (SDM vol. 3 §2.2.1).
const EFER_LMA: u64 = 1 << 10;

/// General-purpose registers, RIP and RFLAGS of a vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the architecture's names")]
pub struct GeneralRegisters {
    pub rip: u64,
    pub rsp: u64,
    pub rax: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rflags: u64,
}

/// Segment register of a vCPU: selector, base, limit and attributes (SDM vol. 3 §3.4.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the architecture's names")]
pub struct Segment {
    pub base: u64,
    pub limit: u32,
    pub selector: u16,
    pub type_: u8,
    pub present: u8,
    pub dpl: u8,
    pub db: u8,
    pub s: u8,
    pub l: u8,
    pub g: u8,
    pub avl: u8,
    pub unusable: u8,
}

/// Linear address and limit of a descriptor table (IDT or GDT).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DescriptorTableRegister {
    /// Linear address of the first byte of the table.
    pub base: u64,
    /// Offset of the last byte of the table.
    pub limit: u16,
}

/// Control registers and segment registers of a vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the architecture's names")]
pub struct SystemRegisters {
    pub cr0: u64,
    pub cr3: u64,
    pub cr4: u64,
    pub efer: u64,
    pub cs: Segment,
    pub ss: Segment,
    pub ldt: Segment,
    pub gdt: DescriptorTableRegister,
    pub idt: DescriptorTableRegister,
}

/// Registers of a vCPU while it is stopped between two VM entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VcpuState {
    /// General-purpose registers, RIP and RFLAGS of the vCPU.
    pub regs: GeneralRegisters,
    /// Control registers and segment registers of the vCPU.
    pub sregs: SystemRegisters,
}

impl VcpuState {
    /// Returns the CPL, which is SS.DPL in every mode (SDM vol. 3 §5.5).
    pub fn cpl(&self) -> u8 {
        self.sregs.ss.dpl & 3
    }

    /// Returns `true` if the vCPU is executing 64-bit code.
    pub fn is_64bit(&self) -> bool {
        self.sregs.efer & EFER_LMA != 0 && self.sregs.cs.l != 0
    }
}
