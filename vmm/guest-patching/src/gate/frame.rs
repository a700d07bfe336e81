//! Exception frame of the guest's #GP handler, and the return to the code that faulted.

use iced_x86::{Code, Decoder, DecoderOptions};
use vpmu::exact::SteppedGuestMemory;

use crate::finder::{MAX_INSTRUCTION_BYTES, RDPMC};
use crate::linear_memory::LinearMemory;
use crate::registers::{Segment, SystemRegisters, VcpuState};

/// RFLAGS bit 1, which is always set (SDM vol. 3 §2.3).
const RFLAGS_ONE: u64 = 1 << 1;
/// RFLAGS.TF, the trap flag: the processor raises #DB after each instruction (SDM vol. 3 §2.3).
pub const RFLAGS_TF: u64 = 1 << 8;
/// RFLAGS bits that are restored from the frame on return to 64-bit code: all defined bits except
/// RF and VM (SDM vol. 3 §2.3).
const RFLAGS_RETURNED: u64 = 0x3c_7fd5;
/// CR4.LA57: 57-bit linear addresses (SDM vol. 3 §2.5).
pub(super) const CR4_LA57: u64 = 1 << 12;

/// Stack frame that the processor pushes when it enters the #GP handler from 64-bit or
/// compatibility mode (SDM vol. 3 §6.14.2).
#[derive(Clone, Copy, Debug)]
pub(super) struct FaultFrame {
    pub rip: u64,
    /// Length of the faulting instruction in bytes.
    length: u8,
    rflags: u64,
    rsp: u64,
    /// Code segment of the faulting code.
    pub cs: Segment,
    ss: Segment,
}

impl FaultFrame {
    /// Reads the exception frame of a #GP that RDPMC has raised. The vCPU must be at the first
    /// instruction of the #GP handler. Returns `None` if another instruction faulted or the
    /// segments in the frame are invalid.
    ///
    /// `replaced` returns the length of the RDPMC that a trap has replaced at a guest-physical
    /// address. The trap, which is a port write, also raises #GP in code without permission to
    /// write to ports.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a selector is the lower half of what was pushed"
    )]
    pub fn of_rdpmc(
        state: &VcpuState,
        memory: &mut LinearMemory<'_>,
        replaced: impl FnOnce(u64) -> Option<u8>,
    ) -> Option<Self> {
        if !state.is_64bit() || state.cpl() != 0 {
            return None;
        }
        let mut pushed = [0u64; 6];
        for (n, quad) in pushed.iter_mut().enumerate() {
            *quad = memory.quad(state.regs.rsp.wrapping_add(8 * n as u64))?;
        }
        let [error, rip, cs, rflags, rsp, ss] = pushed;
        if error != 0 {
            return None;
        }
        let (cs, ss) = match cs as u16 {
            same if same == state.sregs.cs.selector => (state.sregs.cs, state.sregs.ss),
            cs if cs & 3 == 3 => (
                segment(&state.sregs, cs, memory).filter(is_user_code)?,
                segment(&state.sregs, ss as u16, memory).filter(is_user_data)?,
            ),
            _ => return None,
        };
        let linear = if cs.l == 0 { cs.base.wrapping_add(rip) } else { rip };
        let mut code = [0; MAX_INSTRUCTION_BYTES];
        let readable = memory.read(linear, &mut code);
        let length = rdpmc_length(&code[..readable], &cs).or_else(|| replaced(memory.physical(linear)?))?;
        let behind = rip.wrapping_add(length.into());
        // A non-canonical RIP would make the VM entry fail and end the VM. A guest program must not
        // be able to cause this.
        (cs.l == 0 || is_canonical(behind, &state.sregs)).then_some(Self {
            rip,
            length,
            rflags,
            rsp,
            cs,
            ss,
        })
    }

    pub fn cpl(&self) -> u8 {
        self.cs.selector.to_le_bytes()[0] & 3
    }

    /// Returns the RIP of the instruction after the RDPMC.
    pub fn next_rip(&self) -> u64 {
        let behind = self.rip.wrapping_add(self.length.into());
        if self.cs.l == 0 {
            behind & 0xffff_ffff
        } else {
            behind
        }
    }

    /// Returns `true` if the faulting code is being single-stepped (RFLAGS.TF is set), in which
    /// case a #DB must follow the RDPMC.
    pub fn traps(&self) -> bool {
        self.rflags & RFLAGS_TF != 0
    }

    /// Completes the RDPMC with `value` in EDX:EAX, and resumes the guest after it.
    pub fn resume(&self, value: u64, state: &mut VcpuState) {
        self.execute_again(state);
        state.regs.rip = self.next_rip();
        state.regs.rax = value & 0xffff_ffff;
        state.regs.rdx = value >> 32;
    }

    /// Resumes the guest at the RDPMC with the state before the fault, so that the RDPMC is
    /// executed again.
    pub fn execute_again(&self, state: &mut VcpuState) {
        state.regs.rip = self.rip;
        state.regs.rflags = self.rflags & RFLAGS_RETURNED | RFLAGS_ONE;
        state.regs.rsp = self.rsp;
        state.sregs.cs = self.cs;
        state.sregs.ss = self.ss;
    }
}

/// Returns the length of the RDPMC at the beginning of `code`, including prefixes, or `None` for
/// another instruction. RDPMC with LOCK raises #UD and is not accepted.
#[expect(
    clippy::cast_possible_truncation,
    reason = "an instruction has at most 15 bytes"
)]
pub fn rdpmc_length(code: &[u8], cs: &Segment) -> Option<u8> {
    // Fast path: RDPMC rarely has prefixes.
    if code.starts_with(&RDPMC) {
        return Some(RDPMC.len() as u8);
    }
    let mode = match (cs.l, cs.db) {
        (0, 0) => 16,
        (0, _) => 32,
        _ => 64,
    };
    let instruction = Decoder::new(mode, code, DecoderOptions::NONE).decode();
    (instruction.code() == Code::Rdpmc).then_some(instruction.len() as u8)
}

/// Returns `true` if the address is canonical, that is, if its upper bits repeat the highest
/// translated bit (SDM vol. 1 §3.3.7.1).
pub(super) fn is_canonical(address: u64, sregs: &SystemRegisters) -> bool {
    let unused = if sregs.cr4 & CR4_LA57 != 0 {
        64 - 57
    } else {
        64 - 48
    };
    (address << unused).cast_signed() >> unused == address.cast_signed()
}

/// Returns `true` for a user-mode code segment. L and D set together is a reserved combination (SDM
/// vol. 3 §5.2.1).
fn is_user_code(segment: &Segment) -> bool {
    segment.dpl == 3 && segment.type_ & 8 != 0 && (segment.l == 0 || segment.db == 0)
}

fn is_user_data(segment: &Segment) -> bool {
    segment.dpl == 3 && segment.selector & 3 == 3 && segment.type_ & 0xa == 2
}

/// Reads the code or data segment that `selector` refers to (SDM vol. 3 §3.4.5).
#[expect(clippy::cast_possible_truncation, reason = "20 bits of it")]
fn segment(sregs: &SystemRegisters, selector: u16, memory: &mut LinearMemory<'_>) -> Option<Segment> {
    let (base, limit) = if selector & 4 == 0 {
        (sregs.gdt.base, u32::from(sregs.gdt.limit))
    } else {
        (sregs.ldt.base, sregs.ldt.limit)
    };
    let offset = u32::from(selector & !7);
    if offset == 0 && selector & 4 == 0 || offset + 7 > limit {
        return None;
    }
    let raw = memory.quad(base.wrapping_add(offset.into()))?;
    let bit = |n: u32| (raw >> n & 1) as u8;
    if bit(44) == 0 || bit(47) == 0 {
        return None;
    }
    let limit = (raw & 0xffff | raw >> 32 & 0xf_0000) as u32;
    Some(Segment {
        base: raw >> 16 & 0xff_ffff | raw >> 32 & 0xff00_0000,
        limit: if bit(55) == 1 { limit << 12 | 0xfff } else { limit },
        selector,
        // The processor sets the accessed bit when it loads a segment.
        type_: (raw >> 40 & 0xf) as u8 | 1,
        present: 1,
        dpl: (raw >> 45 & 3) as u8,
        db: bit(54),
        s: 1,
        l: bit(53),
        g: bit(55),
        avl: bit(52),
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    use super::*;

    const GDT: u64 = 0x1000;
    const LDT: u64 = 0x2000;

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap()
    }

    /// Returns a state with identity-mapped linear addresses and with a GDT and an LDT.
    fn state(gdt_limit: u16, ldt_limit: u32) -> VcpuState {
        let mut state = VcpuState {
            regs: Default::default(),
            sregs: Default::default(),
        };
        (state.sregs.gdt.base, state.sregs.gdt.limit) = (GDT, gdt_limit);
        (state.sregs.ldt.base, state.sregs.ldt.limit) = (LDT, ldt_limit);
        state
    }

    /// Encodes the segment `of` as a descriptor-table entry (SDM vol. 3, figure 3-8).
    fn descriptor(of: &Segment) -> u64 {
        let limit = u64::from(if of.g == 1 { of.limit >> 12 } else { of.limit });
        let bits = [(of.type_, 40), (of.s, 44), (of.dpl, 45), (of.present, 47)];
        let more = [(of.avl, 52), (of.l, 53), (of.db, 54), (of.g, 55)];
        let flags = bits.into_iter().chain(more).map(|(bit, at)| u64::from(bit) << at);
        let base = (of.base & 0xff_ffff) << 16 | (of.base & 0xff00_0000) << 32;
        base | limit & 0xffff | (limit & 0xf_0000) << 32 | flags.sum::<u64>()
    }

    proptest! {
        /// `segment` reads the segment from the descriptor that the selector refers to. Bit 2 of
        /// the selector selects the table. In the result, the accessed bit is set.
        #[test]
        fn selector_loads_segment_of_descriptor(
            index in 1u16..32,
            local: bool,
            rpl in 0u16..4,
            base: u32,
            limit in 0u32..1 << 20,
            bits: u8,
            type_ in 0u8..16,
            dpl in 0u8..4,
        ) {
            let bit = |n: u8| bits >> n & 1;
            let pages = bit(0) == 1;
            let segment_there = Segment {
                base: base.into(),
                limit: if pages { limit << 12 | 0xfff } else { limit },
                selector: index << 3 | u16::from(local) << 2 | rpl,
                type_,
                present: 1,
                dpl,
                db: bit(1),
                s: 1,
                l: bit(2),
                g: bit(0),
                avl: bit(3),
                ..Default::default()
            };
            let memory = memory();
            let state = state(0xff, 0xff);
            let table = if local { LDT } else { GDT };
            let at = GuestAddress(table + 8 * u64::from(index));
            memory.write_obj(descriptor(&segment_there), at).unwrap();
            let found = segment(&state.sregs, segment_there.selector, &mut LinearMemory::new(&memory, &state));
            let used = Segment { type_: type_ | 1, ..segment_there };
            prop_assert_eq!(found, Some(used));
            // A descriptor that is not present or is a system descriptor is rejected.
            for without in [1u64 << 47, 1 << 44] {
                memory.write_obj(descriptor(&segment_there) & !without, at).unwrap();
                let found = segment(&state.sregs, segment_there.selector, &mut LinearMemory::new(&memory, &state));
                prop_assert_eq!(found, None);
            }
        }
    }

    /// A descriptor table ends exactly at its limit. Entry 0 is unusable in the GDT and valid in
    /// the LDT.
    #[test]
    fn descriptor_table_ends_at_limit() {
        let memory = memory();
        let code = Segment {
            limit: 0xf_ffff,
            type_: 0xb,
            present: 1,
            s: 1,
            ..Default::default()
        };
        for table in [GDT, LDT] {
            for index in 0..4 {
                memory
                    .write_obj(descriptor(&code), GuestAddress(table + 8 * index))
                    .unwrap();
            }
        }
        let is_there = |gdt, ldt, selector| {
            let state = state(gdt, ldt);
            segment(&state.sregs, selector, &mut LinearMemory::new(&memory, &state)).is_some()
        };
        for (gdt, ldt, selector, there) in [
            (0x1f, 0, 0x08, true),
            (0x0f, 0, 0x08, true),
            (0x0e, 0, 0x08, false),
            (0x1f, 0, 0x18, true),
            (0x1e, 0, 0x18, false),
            (0xffff, 0, 0x00, false),
            (0xffff, 0, 0x03, false),
            (0, 0x07, 0x04, true),
            (0, 0x06, 0x04, false),
            (0, 0x1f, 0x1f, true),
            (0xffff, 0, 0x0c, false),
            (0, u32::MAX, 0xffff, false),
        ] {
            assert_eq!(
                is_there(gdt, ldt, selector),
                there,
                "{gdt:#x} {ldt:#x} {selector:#x}"
            );
        }
        // The descriptor table is outside guest memory.
        let mut nowhere = state(0xff, 0);
        nowhere.sregs.gdt.base = 0x1_0000 - 8;
        let found = segment(&nowhere.sregs, 0x08, &mut LinearMemory::new(&memory, &nowhere));
        assert!(found.is_none());
    }

    /// A return address must be canonical in the guest's paging mode, because resuming at a
    /// noncanonical address would terminate the VM.
    #[test]
    fn canonical_check_follows_paging_mode() {
        let mut sregs = SystemRegisters::default();
        let four = [(1u64 << 47) - 1, 0xffff_8000_0000_0000, 0, u64::MAX];
        let five = [(1u64 << 56) - 1, 0xff00_0000_0000_0000, 1 << 47];
        let none = [1u64 << 56, 0xfeff_ffff_ffff_ffff, 1 << 63];
        for levels in [4, 5] {
            sregs.cr4 = if levels == 5 { CR4_LA57 } else { 0 };
            assert!(four.iter().all(|at| is_canonical(*at, &sregs)));
            assert!(five.iter().all(|at| is_canonical(*at, &sregs) == (levels == 5)));
            assert!(!none.iter().any(|at| is_canonical(*at, &sregs)));
        }
    }
}
