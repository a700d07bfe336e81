//! Access to guest memory by linear addresses, which are translated with the page tables of a vCPU.

use guest_profile::paging::AddressSpace;
use guest_profile::{GuestMemoryReadBudget, GuestPhys, GuestRegs};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::exact::{IdtGateFormat, SteppedGuestMemory, gate_in_table};

use crate::registers::{DescriptorTableRegister, VcpuState};

/// Maximum number of guest memory reads per check of the #GP handler. Sufficient for all 256 IDT
/// gates and their first instructions, each with a five-level page walk.
const MAX_READS: u32 = 8192;
const PAGE: u64 = 4096;
const CR0_PE: u64 = 1;
const CR0_PG: u64 = 1 << 31;
const EFER_LMA: u64 = 1 << 10;

/// Registers of a vCPU that determine the translation of linear addresses and the location of the
/// interrupt descriptor table.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the architecture's names")]
pub struct AddressRegisters {
    pub cr0: u64,
    pub cr3: u64,
    pub cr4: u64,
    pub efer: u64,
    /// Current privilege level of the vCPU.
    pub cpl: u8,
    /// CS.L of the vCPU: `true` for a 64-bit code segment.
    pub code64: bool,
    pub idt: DescriptorTableRegister,
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
            idt: sregs.idt,
        }
    }
}

/// Method by which linear addresses are translated to guest-physical addresses.
#[expect(clippy::large_enum_variant, reason = "one look has one, on the stack")]
enum AddressTranslation<'m> {
    /// The paging mode of the vCPU has not been examined yet.
    Unknown,
    /// The paging mode of the vCPU is unsupported, so no address can be translated.
    Nowhere,
    /// Paging is disabled, so linear addresses are guest-physical addresses.
    Flat,
    /// Linear addresses are translated by page tables.
    Paged(AddressSpace<'m, GuestMemoryMmap>),
}

/// Guest memory at linear addresses, read through the page tables of a vCPU. A value caches
/// translations, so callers must create a new value for each check of guest memory.
pub struct LinearMemory<'m> {
    memory: &'m GuestMemoryMmap,
    registers: AddressRegisters,
    space: AddressTranslation<'m>,
    budget: GuestMemoryReadBudget,
}

impl<'m> LinearMemory<'m> {
    /// Creates a view of guest memory at the linear addresses that are valid for these registers.
    pub fn new(memory: &'m GuestMemoryMmap, registers: impl Into<AddressRegisters>) -> Self {
        Self {
            memory,
            registers: registers.into(),
            space: AddressTranslation::Unknown,
            budget: GuestMemoryReadBudget::new(MAX_READS, None),
        }
    }

    /// Returns the address translation and the remaining read budget. Determines the translation on
    /// first use.
    fn space(&mut self) -> (&mut AddressTranslation<'m>, &mut GuestMemoryReadBudget) {
        if matches!(self.space, AddressTranslation::Unknown) {
            let AddressRegisters {
                cr0,
                cr3,
                cr4,
                efer,
                cpl,
                code64,
                ..
            } = self.registers;
            let regs = GuestRegs {
                cr0,
                cr3,
                cr4,
                efer,
                cpl,
                code64,
                ..GuestRegs::default()
            };
            self.space = match AddressSpace::of(self.memory, &regs) {
                Ok(space) => AddressTranslation::Paged(space),
                Err(_) if cr0 & CR0_PG == 0 => AddressTranslation::Flat,
                Err(_) => AddressTranslation::Nowhere,
            };
        }
        (&mut self.space, &mut self.budget)
    }

    /// Translates a linear address to a guest-physical address. Returns `None` for an unmapped
    /// address.
    pub fn physical(&mut self, linear: u64) -> Option<u64> {
        match self.space() {
            (AddressTranslation::Paged(space), budget) => space.physical(linear, budget).ok(),
            (AddressTranslation::Flat, _) => Some(linear & 0xffff_ffff),
            (AddressTranslation::Unknown | AddressTranslation::Nowhere, _) => None,
        }
    }

    /// Clears `bits` in the byte at the linear address `linear`. Used to hide the trap flag, which
    /// the VMM sets for single-stepping, from the guest. Returns `false` if the byte is not
    /// accessible.
    pub fn clear_bits(&mut self, linear: u64, bits: u8) -> bool {
        let Some(gpa) = self.physical(linear).map(GuestAddress) else {
            return false;
        };
        let Ok(byte) = self.memory.read_obj::<u8>(gpa) else {
            return false;
        };
        byte & bits == 0 || self.memory.write_obj(byte & !bits, gpa).is_ok()
    }

    fn read_piece(&mut self, linear: u64, piece: &mut [u8]) -> bool {
        match self.space() {
            (AddressTranslation::Paged(space), budget) => space.read(linear, piece, budget).is_ok(),
            (AddressTranslation::Flat, _) => GuestPhys::read(self.memory, linear & 0xffff_ffff, piece),
            (AddressTranslation::Unknown | AddressTranslation::Nowhere, _) => false,
        }
    }

    /// Reads eight bytes at a linear address.
    pub fn quad(&mut self, linear: u64) -> Option<u64> {
        self.bytes::<8>(linear).map(u64::from_le_bytes)
    }

    fn bytes<const N: usize>(&mut self, linear: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        (SteppedGuestMemory::read(self, linear, &mut bytes) == N).then_some(bytes)
    }
}

impl SteppedGuestMemory for LinearMemory<'_> {
    #[expect(clippy::cast_possible_truncation, reason = "at most a page")]
    fn read(&mut self, linear: u64, buffer: &mut [u8]) -> usize {
        let in_page = (PAGE - linear % PAGE) as usize;
        let (first, second) = buffer.split_at_mut(in_page.min(buffer.len()));
        if !self.read_piece(linear, first) {
            return 0;
        }
        let read = first.len();
        let next = linear.wrapping_add(read as u64);
        if second.is_empty() || !self.read_piece(next, second) {
            return read;
        }
        read + second.len()
    }

    fn gate(&mut self, vector: u8) -> Option<u64> {
        let AddressRegisters { idt, efer, cr0, .. } = self.registers;
        let format = match (efer & EFER_LMA != 0, cr0 & CR0_PE != 0) {
            (true, _) => IdtGateFormat::Long,
            (false, true) => IdtGateFormat::Protected,
            (false, false) => IdtGateFormat::Real,
        };
        let target = gate_in_table(format, idt.base, idt.limit, vector, self)?;
        // Firmware may leave a real-mode vector table of zeros, which has no handlers.
        (format != IdtGateFormat::Real || target != 0).then_some(target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registers::{GeneralRegisters, SystemRegisters};

    const CR4_PAE: u64 = 1 << 5;
    const TABLES: u64 = 0x1000;
    /// Linear address of two pages that are in reverse order in physical memory. The addresses
    /// after them are unmapped.
    const LINEAR: u64 = 0x40_0000;
    const FIRST: u64 = 0x9000;
    const SECOND: u64 = 0x8000;

    fn memory() -> GuestMemoryMmap {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
        let entry = |table: u64, index: u64, value: u64| {
            memory
                .write_obj(value, GuestAddress(TABLES + table * PAGE + index * 8))
                .unwrap();
        };
        for table in 0..3 {
            let index = if table == 2 { LINEAR >> 21 } else { 0 };
            entry(table, index, (TABLES + (table + 1) * PAGE) | 3);
        }
        entry(3, 0, FIRST | 3);
        entry(3, 1, SECOND | 3);
        memory
    }

    fn state() -> VcpuState {
        let mut sregs = SystemRegisters {
            cr0: CR0_PE | CR0_PG,
            cr3: TABLES,
            cr4: CR4_PAE,
            efer: EFER_LMA | 1 << 8,
            ..Default::default()
        };
        sregs.cs.l = 1;
        VcpuState {
            regs: GeneralRegisters::default(),
            sregs,
        }
    }

    #[test]
    fn read_crosses_page_boundary() {
        let memory = memory();
        memory.write_slice(b"ab", GuestAddress(FIRST + PAGE - 2)).unwrap();
        memory.write_slice(b"cdefgh", GuestAddress(SECOND)).unwrap();
        let here = state();
        let mut linear = LinearMemory::new(&memory, &here);
        assert_eq!(linear.physical(LINEAR + PAGE), Some(SECOND));
        assert_eq!(
            linear.quad(LINEAR + PAGE - 2),
            Some(u64::from_le_bytes(*b"abcdefgh"))
        );
        // The read ends at the first unmapped page.
        let mut rest = [0; 8];
        assert_eq!(
            SteppedGuestMemory::read(&mut linear, LINEAR + 2 * PAGE - 3, &mut rest),
            3
        );
        assert_eq!(linear.quad(LINEAR + 2 * PAGE - 3), None);
        assert_eq!(
            SteppedGuestMemory::read(&mut linear, LINEAR + 2 * PAGE, &mut rest),
            0
        );
    }

    #[test]
    fn invalid_page_tables_are_unmapped() {
        let memory = memory();
        let mut beyond = state();
        beyond.sregs.cr3 = 1 << 40;
        let mut linear = LinearMemory::new(&memory, &beyond);
        assert_eq!(linear.physical(LINEAR), None);
        assert_eq!(linear.quad(LINEAR), None);
        assert!(!linear.clear_bits(LINEAR, 1));
    }

    #[test]
    fn memory_reads_are_bounded() {
        let memory = memory();
        let here = state();
        let mut linear = LinearMemory::new(&memory, &here);
        // Each access uses another page, so cached translations do not help.
        for n in 0..u64::from(MAX_READS) {
            linear.physical((n + 1) << 32);
        }
        assert_eq!(linear.physical(LINEAR), None, "it is done");
        assert_eq!(LinearMemory::new(&memory, &state()).physical(LINEAR), Some(FIRST));
    }

    #[test]
    fn clear_bits_uses_guest_mapping() {
        let memory = memory();
        let at = GuestAddress(SECOND + 5);
        memory.write_obj(0xFFu8, at).unwrap();
        assert!(LinearMemory::new(&memory, &state()).clear_bits(LINEAR + PAGE + 5, 1));
        assert_eq!(memory.read_obj::<u8>(at).unwrap(), 0xFE);
        assert!(LinearMemory::new(&memory, &state()).clear_bits(LINEAR + PAGE + 5, 1));
        assert_eq!(memory.read_obj::<u8>(at).unwrap(), 0xFE);
    }

    #[test]
    fn addresses_without_paging_are_physical() {
        let memory = memory();
        memory.write_obj(0x1234u16, GuestAddress(0x8002)).unwrap();
        let mut real = state();
        (real.sregs.cr0, real.sregs.efer, real.sregs.cs.l) = (0, 0, 0);
        let mut linear = LinearMemory::new(&memory, &real);
        assert_eq!(linear.physical(0x1_0000_8002), Some(0x8002));
        assert_eq!(linear.quad(0x8002).unwrap() as u16, 0x1234);
        assert!(!real.is_64bit());
    }

    #[test]
    fn gate_format_follows_processor_mode() {
        let memory = memory();
        // An interrupt gate of vector 2 to 0xFFFF_8000_1234_5678: selector 0x10, present, type 14.
        let (low, high) = (0x1234_8E00_0010_5678u64, 0xFFFF_8000u64);
        for (n, half) in [low, high].into_iter().enumerate() {
            memory
                .write_obj(half, GuestAddress(FIRST + 32 + 8 * n as u64))
                .unwrap();
        }
        let mut long = state();
        (long.sregs.idt.base, long.sregs.idt.limit) = (LINEAR, 3 * 16 - 1);
        let mut linear = LinearMemory::new(&memory, &long);
        assert_eq!(linear.gate(2), Some(0xFFFF_8000_1234_5678));
        assert_eq!(linear.gate(1), None, "not present");
        assert_eq!(linear.gate(3), None, "beyond the table");
        long.sregs.idt.limit -= 1;
        assert_eq!(
            LinearMemory::new(&memory, &long).gate(2),
            None,
            "not whole in the table"
        );

        let mut real = state();
        (real.sregs.cr0, real.sregs.efer, real.sregs.cs.l) = (0, 0, 0);
        (real.sregs.idt.base, real.sregs.idt.limit) = (0x8000, 0x3FF);
        memory
            .write_obj(0xF000_E987u32, GuestAddress(0x8000 + 4 * 8))
            .unwrap();
        let mut linear = LinearMemory::new(&memory, &real);
        assert_eq!(linear.gate(8), Some(0xE987));
        assert_eq!(linear.gate(9), None);
    }
}
