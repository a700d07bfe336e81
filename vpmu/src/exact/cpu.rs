//! vCPU state and guest memory access needed by [`super::SingleStepMeter`].

/// Code size (default operation mode) of the current code segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeSegmentMode {
    /// 16-bit code segment (CS.L = 0, CS.D = 0).
    Bits16,
    /// 32-bit code segment (CS.L = 0, CS.D = 1).
    Bits32,
    /// 64-bit code segment (CS.L = 1).
    Bits64,
}

impl CodeSegmentMode {
    pub(super) const fn bits(self) -> u32 {
        match self {
            Self::Bits16 => 16,
            Self::Bits32 => 32,
            Self::Bits64 => 64,
        }
    }
}

/// vCPU state that determines the control flow of the next instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SteppedCpuState {
    /// Instruction pointer of the vCPU, relative to the base of the code segment.
    pub rip: u64,
    /// RFLAGS of the vCPU.
    pub rflags: u64,
    /// Current privilege level of the vCPU.
    pub cpl: u8,
    /// Code size of the vCPU's current code segment.
    pub size: CodeSegmentMode,
    /// General-purpose registers RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
    pub gpr: [u64; 16],
    /// Segment bases of ES, CS, SS, DS, FS and GS.
    pub segment_bases: [u64; 6],
}

/// Access to the guest memory of the vCPU that is being single-stepped.
pub trait SteppedGuestMemory {
    /// Reads memory at a linear address through the guest's page tables, with the access rights of
    /// the code that the vCPU is executing. Returns the number of contiguous bytes read from the
    /// start of `buffer`.
    fn read(&mut self, linear: u64, buffer: &mut [u8]) -> usize;

    /// Returns the address of the handler of `vector` according to the interrupt descriptor table,
    /// as a RIP relative to the handler's code segment. Returns `None` if the vector has no gate.
    fn gate(&mut self, vector: u8) -> Option<u64>;
}

/// Format of the guest's interrupt descriptor table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdtGateFormat {
    /// Real mode (CR0.PE = 0): four bytes per vector, offset and segment.
    Real,
    /// Protected mode: eight bytes per gate.
    Protected,
    /// Long mode (EFER.LMA = 1): sixteen bytes per gate.
    Long,
}

/// Looks up the handler address of `vector` in the table at `base` with `limit`. Implements
/// [`SteppedGuestMemory::gate`]. Returns `None` if the vector is outside the table, or the gate is
/// not present or is a task gate. See Intel SDM vol. 3, "IDT Descriptors".
pub fn gate_in_table(
    format: IdtGateFormat,
    base: u64,
    limit: u16,
    vector: u8,
    memory: &mut dyn SteppedGuestMemory,
) -> Option<u64> {
    let size = match format {
        IdtGateFormat::Real => 4,
        IdtGateFormat::Protected => 8,
        IdtGateFormat::Long => 16,
    };
    let at = usize::from(vector) * size;
    if at + size - 1 > usize::from(limit) {
        return None;
    }
    let mut gate = [0; 16];
    let gate = &mut gate[..size];
    if memory.read(base.wrapping_add(at as u64), gate) != size {
        return None;
    }
    let word = |n: usize| u64::from(u16::from_le_bytes([gate[n], gate[n + 1]]));
    if format == IdtGateFormat::Real {
        return Some(word(0));
    }
    // Byte 5: present bit; gate type in the low five bits (16-bit interrupt and trap gates: 6, 7;
    // others: 14, 15).
    let (present, kind) = (gate[5] & 0x80 != 0, gate[5] & 0x1F);
    let low = match kind {
        6 | 7 if format == IdtGateFormat::Protected => word(0),
        14 | 15 => word(0) | word(6) << 16,
        _ => return None,
    };
    let high = if format == IdtGateFormat::Long {
        (word(8) | word(10) << 16) << 32
    } else {
        0
    };
    present.then_some(high | low)
}

/// Class of an instruction, by which a VMM decides how to single-step it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionClass {
    /// Ordinary instruction. A single step stops after it.
    Plain,
    /// Instruction with an interrupt shadow. A single step may stop only after the following
    /// instruction (MOV SS, POP SS; LFENCE, MFENCE, SFENCE and SWAPGS if KVM emulates them).
    Shadow,
    /// SYSCALL or SYSENTER, which may clear the trap flag.
    SystemCall,
    /// Software interrupt, whose delivery through the gate of this vector clears the trap flag.
    Interrupt(u8),
    /// Interrupt return, which loads the flags.
    InterruptReturn,
    /// HLT, which waits for an interrupt.
    Halt,
    /// Instruction that writes the flags, including the trap flag (POPF), or exposes them to the
    /// guest (PUSHF).
    Flags,
    /// Unreadable or invalid instruction, which will fault.
    Unreadable,
}
