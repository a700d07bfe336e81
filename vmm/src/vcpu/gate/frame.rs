//! What is on the stack of the guest's handler of #GP, and the way back into the code that faulted.

use iced_x86::{Code, Decoder, DecoderOptions};
use kvm_bindings::{kvm_segment, kvm_sregs};
use vpmu::exact::GuestMemory;

use super::super::step::state::{Linear, State};
use kernel_images::rdpmc::{LONGEST, RDPMC};

/// Bit 1 of the flags is always set (SDM vol. 3 §2.3).
const RFLAGS_ONE: u64 = 1 << 1;
/// Trap flag: #DB behind each instruction (SDM vol. 3 §2.3).
pub(in super::super) const RFLAGS_TF: u64 = 1 << 8;
/// The flags that 64-bit code may return to: all that are defined but RF and VM (SDM vol. 3 §2.3). Bit 1 is
/// always set.
const RFLAGS_RETURNED: u64 = 0x3c_7fd5;
/// CR4.LA57: linear addresses of 57 bits (SDM vol. 3 §2.5).
pub(super) const CR4_LA57: u64 = 1 << 12;

/// What the processor pushed when it entered the handler of #GP from 64-bit or compatibility mode (SDM vol. 3
/// §6.14.2).
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    pub rip: u64,
    /// Bytes of the instruction.
    length: u8,
    rflags: u64,
    rsp: u64,
    /// Those of the code that faulted.
    pub cs: kvm_segment,
    ss: kvm_segment,
}

impl Frame {
    /// The frame of a fault at an RDPMC, with the vCPU at the first instruction of the handler. `None`: of
    /// another fault, or of code whose segments are not what they should be. `replaced`: the length of the
    /// replaced RDPMC at a physical address, which faults where port writes are not allowed.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a selector is the lower half of what was pushed"
    )]
    pub fn of_rdpmc(
        state: &State,
        memory: &mut Linear<'_>,
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
        let mut code = [0; LONGEST];
        let readable = memory.read(linear, &mut code);
        let length = rdpmc_length(&code[..readable], &cs).or_else(|| replaced(memory.physical(linear)?))?;
        let behind = rip.wrapping_add(length.into());
        // Going on at no address at all would be the end of the VM, and a program must not bring that about.
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

    /// RIP behind the RDPMC.
    pub fn behind(&self) -> u64 {
        let behind = self.rip.wrapping_add(self.length.into());
        if self.cs.l == 0 {
            behind & 0xffff_ffff
        } else {
            behind
        }
    }

    /// The code single-steps: #DB follows the RDPMC.
    pub fn traps(&self) -> bool {
        self.rflags & RFLAGS_TF != 0
    }

    /// Goes on behind the RDPMC, which gave `value`.
    pub fn resume(&self, value: u64, state: &mut State) {
        self.execute_again(state);
        state.regs.rip = self.behind();
        state.regs.rax = value & 0xffff_ffff;
        state.regs.rdx = value >> 32;
    }

    /// Goes back to the RDPMC as if it had not faulted.
    pub fn execute_again(&self, state: &mut State) {
        state.regs.rip = self.rip;
        state.regs.rflags = self.rflags & RFLAGS_RETURNED | RFLAGS_ONE;
        state.regs.rsp = self.rsp;
        state.sregs.cs = self.cs;
        state.sregs.ss = self.ss;
    }
}

/// The length of the RDPMC that `code` begins with, prefixes and all; `None`: it begins with something else.
/// LOCK raises #UD.
#[expect(
    clippy::cast_possible_truncation,
    reason = "an instruction has at most 15 bytes"
)]
pub(in super::super) fn rdpmc_length(code: &[u8], cs: &kvm_segment) -> Option<u8> {
    // As nearly all are.
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

/// The upper bits repeat the highest one that is translated (SDM vol. 1 §3.3.7.1).
pub(super) fn is_canonical(address: u64, sregs: &kvm_sregs) -> bool {
    let unused = if sregs.cr4 & CR4_LA57 != 0 {
        64 - 57
    } else {
        64 - 48
    };
    (address << unused).cast_signed() >> unused == address.cast_signed()
}

/// L and D together are reserved (SDM vol. 3 §5.2.1).
fn is_user_code(segment: &kvm_segment) -> bool {
    segment.dpl == 3 && segment.type_ & 8 != 0 && (segment.l == 0 || segment.db == 0)
}

fn is_user_data(segment: &kvm_segment) -> bool {
    segment.dpl == 3 && segment.selector & 3 == 3 && segment.type_ & 0xa == 2
}

/// The code or data segment that `selector` names (SDM vol. 3 §3.4.5).
#[expect(clippy::cast_possible_truncation, reason = "20 bits of it")]
fn segment(sregs: &kvm_sregs, selector: u16, memory: &mut Linear<'_>) -> Option<kvm_segment> {
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
    Some(kvm_segment {
        base: raw >> 16 & 0xff_ffff | raw >> 32 & 0xff00_0000,
        limit: if bit(55) == 1 { limit << 12 | 0xfff } else { limit },
        selector,
        // A segment in use has been accessed.
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
