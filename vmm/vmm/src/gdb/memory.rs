//! Accesses guest memory for a debugger, through the page tables of a vCPU. Reads hide the
//! debugger's own breakpoints.

use guest_profile::memory::{GuestMemoryReadBudget, GuestRegs};
use guest_profile::paging::{AddressSpace, UnsupportedPaging};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::vcpu::debugger::{SoftwareBreakpoint, VcpuRegisters};

const PAGE: u64 = 4096;
/// Maximum number of guest memory reads for one request. A packet covers at most 4 KiB, on two
/// pages.
const MAX_READS: u32 = 256;
/// Opcode of INT3.
pub const INT3: u8 = 0xcc;

/// Translates the linear address `address` through the page tables of a vCPU with these registers.
/// Returns `None` if the address is unmapped or the vCPU uses 32-bit or PAE paging, which are
/// unsupported.
pub fn physical(memory: &GuestMemoryMmap, registers: &VcpuRegisters, address: u64) -> Option<u64> {
    let system = &registers.system;
    let regs = GuestRegs {
        cr0: system.cr0,
        cr3: system.cr3,
        cr4: system.cr4,
        efer: system.efer,
        ..GuestRegs::default()
    };
    match AddressSpace::of(memory, &regs) {
        Ok(mut space) => space
            .physical(address, &mut GuestMemoryReadBudget::new(MAX_READS, None))
            .ok(),
        Err(UnsupportedPaging::PagingOff) => Some(address),
        Err(UnsupportedPaging::Legacy | UnsupportedPaging::Pae) => None,
    }
}

/// Splits the linear range of `length` bytes at `address` at page boundaries. Returns for each part
/// its offsets in the range and its guest-physical address. Ends at the first unmapped page.
fn pieces<'m>(
    memory: &'m GuestMemoryMmap,
    registers: &'m VcpuRegisters,
    address: u64,
    length: usize,
) -> impl Iterator<Item = (std::ops::Range<usize>, u64)> + 'm {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == length {
            return None;
        }
        let at = address.checked_add(done as u64)?;
        let left_in_page = usize::try_from(PAGE - at % PAGE).unwrap_or(usize::MAX);
        let count = left_in_page.min(length - done);
        let physical = physical(memory, registers, at)?;
        let range = done..done + count;
        done = range.end;
        Some((range, physical))
    })
}

/// Reads guest memory at the linear address `address`. Returns the number of bytes read.
pub fn read(
    memory: &GuestMemoryMmap,
    registers: &VcpuRegisters,
    planted: &[SoftwareBreakpoint],
    address: u64,
    data: &mut [u8],
) -> usize {
    let mut done = 0;
    for (range, physical) in pieces(memory, registers, address, data.len()) {
        let piece = &mut data[range];
        if memory.read_slice(piece, GuestAddress(physical)).is_err() {
            break;
        }
        for (at, byte) in (physical..).zip(piece.iter_mut()) {
            if let Some(planted) = planted.iter().find(|planted| planted.physical == at) {
                *byte = planted.replaced;
            }
        }
        done += piece.len();
    }
    done
}

/// Writes `data` at the linear address `address`. Returns `false` if a part of the range is
/// unmapped or not memory. The bytes before that part are written.
pub fn write(
    memory: &GuestMemoryMmap,
    registers: &VcpuRegisters,
    planted: &mut [SoftwareBreakpoint],
    address: u64,
    data: &[u8],
) -> bool {
    let mut done = 0;
    for (range, physical) in pieces(memory, registers, address, data.len()) {
        let mut piece = data[range].to_vec();
        for (at, byte) in (physical..).zip(piece.iter_mut()) {
            if let Some(planted) = planted.iter_mut().find(|planted| planted.physical == at) {
                planted.replaced = std::mem::replace(byte, INT3);
            }
        }
        if memory.write_slice(&piece, GuestAddress(physical)).is_err() {
            return false;
        }
        done += piece.len();
    }
    done == data.len()
}

/// Inserts an INT3 at a linear address. Returns `None` if the address is unmapped or not memory.
pub fn insert_int3(
    memory: &GuestMemoryMmap,
    registers: &VcpuRegisters,
    address: u64,
) -> Option<SoftwareBreakpoint> {
    let physical = physical(memory, registers, address)?;
    let replaced = memory.read_obj(GuestAddress(physical)).ok()?;
    memory.write_obj(INT3, GuestAddress(physical)).ok()?;
    Some(SoftwareBreakpoint {
        address,
        physical,
        replaced,
    })
}

/// Restores the byte that an INT3 has replaced, unless the guest has overwritten the INT3.
pub fn remove_int3(memory: &GuestMemoryMmap, planted: &SoftwareBreakpoint) {
    let at = GuestAddress(planted.physical);
    if memory.read_obj::<u8>(at).is_ok_and(|byte| byte == INT3) {
        // The preceding read of this address succeeded, so this write cannot fail.
        let _ = memory.write_obj(planted.replaced, at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap()
    }

    /// Fills page tables and returns the registers of a vCPU that uses them. Linear page 0x40_0000
    /// is at physical address 0x5000 and the next page at 0x3000.
    fn paged(memory: &GuestMemoryMmap) -> VcpuRegisters {
        let entries = [
            (0x1_0000, 0x1_1007u64),
            (0x1_1000, 0x1_2007),
            (0x1_2010, 0x1_3007),
            (0x1_3000, 0x5007),
            (0x1_3008, 0x3007),
        ];
        for (at, entry) in entries {
            memory.write_obj(entry, GuestAddress(at)).unwrap();
        }
        let mut registers = VcpuRegisters::default();
        registers.system.cr0 = 1 << 31;
        registers.system.cr3 = 0x1_0000;
        registers.system.cr4 = 1 << 5;
        registers.system.efer = 1 << 10;
        registers
    }

    #[test]
    fn memory_is_read_and_written_through_the_page_tables() {
        let memory = memory();
        let registers = paged(&memory);
        assert!(write(&memory, &registers, &mut [], 0x40_0ffe, b"abcd"));
        let mut there = [0; 2];
        memory.read_slice(&mut there, GuestAddress(0x5ffe)).unwrap();
        assert_eq!(&there, b"ab");
        memory.read_slice(&mut there, GuestAddress(0x3000)).unwrap();
        assert_eq!(&there, b"cd");
        let mut data = [0; 4];
        assert_eq!(read(&memory, &registers, &[], 0x40_0ffe, &mut data), 4);
        assert_eq!(&data, b"abcd");
    }

    #[test]
    fn unmapped_memory_is_not_accessed() {
        let memory = memory();
        let registers = paged(&memory);
        let mut data = [0; 16];
        assert_eq!(
            read(&memory, &registers, &[], 0x40_1ff8, &mut data),
            8,
            "the page ends"
        );
        assert!(!write(&memory, &registers, &mut [], 0x40_1ff8, &data));
        for hole in [0, 0x60_0000, u64::MAX - 3, 0x8000_0000_0000_0000] {
            assert_eq!(read(&memory, &registers, &[], hole, &mut data), 0);
            assert_eq!(insert_int3(&memory, &registers, hole), None);
        }
        // Without paging, linear addresses are physical addresses, valid up to the end of memory.
        let off = VcpuRegisters::default();
        assert_eq!(read(&memory, &off, &[], 0xf_fff8, &mut data), 8);
        let mut pae = registers;
        pae.system.efer = 0;
        assert_eq!(read(&memory, &pae, &[], 0x40_0000, &mut data), 0);
    }

    /// Reads show the bytes that the debugger's INT3s have replaced. A write to such a byte takes
    /// effect when the INT3 is removed.
    #[test]
    fn breakpoint_is_hidden_from_reads_and_removed() {
        let memory = memory();
        let registers = paged(&memory);
        assert!(write(&memory, &registers, &mut [], 0x40_0000, &[0x90, 0xf4]));
        let mut planted = [insert_int3(&memory, &registers, 0x40_0000).unwrap()];
        let byte = || memory.read_obj::<u8>(GuestAddress(0x5000)).unwrap();
        assert_eq!(byte(), INT3);
        let mut data = [0; 2];
        read(&memory, &registers, &planted, 0x40_0000, &mut data);
        assert_eq!(data, [0x90, 0xf4]);
        assert!(write(&memory, &registers, &mut planted, 0x40_0000, &[0x50]));
        assert_eq!(byte(), INT3);
        remove_int3(&memory, &planted[0]);
        assert_eq!(byte(), 0x50);
        // The guest has overwritten the INT3 in the meantime.
        remove_int3(&memory, &planted[0]);
        assert_eq!(byte(), 0x50);
    }
}
