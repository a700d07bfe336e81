//! What the meter must know of a vCPU, and what a VMM must know of the instruction ahead.

/// Size of the code that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeSize {
    /// CS.L = 0, CS.D = 0.
    Bits16,
    /// CS.L = 0, CS.D = 1.
    Bits32,
    /// CS.L = 1.
    Bits64,
}

impl CodeSize {
    pub(super) const fn bits(self) -> u32 {
        match self {
            Self::Bits16 => 16,
            Self::Bits32 => 32,
            Self::Bits64 => 64,
        }
    }
}

/// The part of a vCPU's state that decides where an instruction leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuState {
    /// Instruction pointer, relative to the code segment.
    pub rip: u64,
    /// Flags.
    pub rflags: u64,
    /// Current privilege level.
    pub cpl: u8,
    /// Size of the code.
    pub size: CodeSize,
    /// RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
    pub gpr: [u64; 16],
    /// Bases of ES, CS, SS, DS, FS, GS.
    pub segment_bases: [u64; 6],
}

/// What the meter must see of the guest's memory.
pub trait GuestMemory {
    /// Reads at a linear address, through the guest's page tables, as the code that runs now could. Returns
    /// how many bytes at the front of `buffer` were read.
    fn read(&mut self, linear: u64, buffer: &mut [u8]) -> usize;

    /// Where the interrupt descriptor table sends `vector` (RIP, relative to the gate's code segment); `None`
    /// for a vector without a gate.
    fn gate(&mut self, vector: u8) -> Option<u64>;
}

/// Format of an interrupt descriptor table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateFormat {
    /// CR0.PE = 0: four bytes a vector, offset and segment.
    Real,
    /// Protected mode: eight bytes a gate.
    Protected,
    /// EFER.LMA = 1: sixteen bytes a gate.
    Long,
}

/// Where the table at `base` with `limit` sends `vector`, for implementing [`GuestMemory::gate`]; `None` for
/// a vector outside the table, or whose gate is not present or is a task gate. Intel SDM vol. 3, "IDT
/// Descriptors".
pub fn gate_in_table(
    format: GateFormat,
    base: u64,
    limit: u16,
    vector: u8,
    memory: &mut dyn GuestMemory,
) -> Option<u64> {
    let size = match format {
        GateFormat::Real => 4,
        GateFormat::Protected => 8,
        GateFormat::Long => 16,
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
    if format == GateFormat::Real {
        return Some(word(0));
    }
    // Byte 5: present bit, type in the low five bits (interrupt and trap gates of 16 bits: 6, 7; others: 14,
    // 15).
    let (present, kind) = (gate[5] & 0x80 != 0, gate[5] & 0x1F);
    let low = match kind {
        6 | 7 if format == GateFormat::Protected => word(0),
        14 | 15 => word(0) | word(6) << 16,
        _ => return None,
    };
    let high = if format == GateFormat::Long {
        (word(8) | word(10) << 16) << 32
    } else {
        0
    };
    present.then_some(high | low)
}

/// What the next instruction is, for a VMM that must prepare for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// Nothing special: a step stops after it.
    Plain,
    /// The step may stop only after the instruction behind it (MOV SS, POP SS; LFENCE, MFENCE, SFENCE and
    /// SWAPGS where KVM emulates them).
    Shadow,
    /// It enters the kernel through a register (SYSCALL, SYSENTER), which may clear the trap flag.
    SystemCall,
    /// It enters the kernel through the gate of this vector, which clears the trap flag.
    Interrupt(u8),
    /// It returns from an interrupt and loads the flags.
    InterruptReturn,
    /// It halts until an interrupt.
    Halt,
    /// It writes the flags, the trap flag among them (POPF), or shows them to the guest (PUSHF).
    Flags,
    /// Its bytes cannot be read or are no instruction: it will fault.
    Unreadable,
}
