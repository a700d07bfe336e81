//! Straight runs: instructions in a row that lead nowhere but on, so that a VMM may let the vCPU pass all of
//! them with one stop behind the last.
//!
//! Where a vCPU is inside such a run says which of its instructions have completed: all before that place,
//! once each. What belongs into a run is a list, and what is not on it ends the run: branches, what changes
//! the level or the flags that stepping goes by, what leaves to the host by itself, what repeats, and what
//! can raise another exception than a page fault, a general protection or a stack fault.

use iced_x86::{CpuidFeature, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register};

use super::cpu::CodeSize;
use super::{Counts, StepMeter};

/// The most instructions in a run.
pub const LONGEST_RUN: usize = 64;
/// As many bytes of code are to be looked at for a run.
pub const MOST_RUN_BYTES: usize = 256;

/// What lies behind one more instruction of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Passed {
    /// Bytes from the beginning of the run.
    end: u16,
    /// Instructions up to here that load, and that store.
    loads: u8,
    stores: u8,
}

/// A straight run, perhaps of no instruction at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StraightRun {
    /// Its bytes, and those of the instruction that ends it.
    code: Box<[u8]>,
    passed: Box<[Passed]>,
    uses_stack: bool,
}

impl StraightRun {
    /// The bytes that made it what it is, those of the instruction that ends it included: where these are,
    /// it is.
    pub fn code(&self) -> &[u8] {
        &self.code
    }

    /// How many instructions it has.
    pub fn len(&self) -> usize {
        self.passed.len()
    }

    /// It has none.
    pub fn is_empty(&self) -> bool {
        self.passed.is_empty()
    }

    /// Some of its instructions go by the stack segment, and may raise a stack fault.
    pub fn uses_stack(&self) -> bool {
        self.uses_stack
    }

    /// How many of its first instructions retire no more than `room` of anything.
    pub fn within(&self, room: &Counts) -> usize {
        let fits = |passed: &Passed| {
            u32::from(passed.loads) <= room.loads && u32::from(passed.stores) <= room.stores
        };
        let instructions = usize::try_from(room.instructions).unwrap_or(usize::MAX);
        self.passed.partition_point(fits).min(instructions)
    }

    /// Where its first `n` instructions end, in bytes from its beginning; at most where it ends.
    pub fn end_of(&self, n: usize) -> usize {
        let last = n.min(self.passed.len()).checked_sub(1);
        last.map_or(0, |last| self.passed[last].end.into())
    }

    /// How many of its instructions are completed when the vCPU is so many bytes from its beginning. `None`:
    /// no instruction begins there.
    pub fn completed_at(&self, offset: u64) -> Option<usize> {
        if offset == 0 {
            return Some(0);
        }
        let found = self
            .passed
            .binary_search_by_key(&offset, |passed| passed.end.into());
        found.ok().map(|last| last + 1)
    }

    /// What its first `n` instructions retire.
    pub fn counts(&self, n: usize) -> Counts {
        let n = n.min(self.passed.len());
        let Some(last) = n.checked_sub(1) else {
            return Counts::default();
        };
        let Passed { loads, stores, .. } = self.passed[last];
        Counts {
            // At most `LONGEST_RUN`.
            instructions: u32::try_from(n).unwrap_or(u32::MAX),
            loads: loads.into(),
            stores: stores.into(),
            ..Counts::default()
        }
    }
}

impl StepMeter {
    /// The straight run that 64-bit `code` begins with, of [`LONGEST_RUN`] instructions and
    /// [`MOST_RUN_BYTES`] bytes at most.
    pub fn straight_run(&mut self, code: &[u8]) -> StraightRun {
        let code = &code[..code.len().min(MOST_RUN_BYTES)];
        let mut decoder = Decoder::new(CodeSize::Bits64.bits(), code, DecoderOptions::NONE);
        let mut passed: Vec<Passed> = Vec::with_capacity(LONGEST_RUN);
        let (mut loads, mut stores, mut uses_stack) = (0, 0, false);
        let mut looked_at = 0;
        while decoder.can_decode() {
            let instruction = decoder.decode();
            looked_at = decoder.position();
            if passed.len() == LONGEST_RUN || !is_straight(&instruction) {
                break;
            }
            let accesses = self.accesses(&instruction);
            loads += u8::from(accesses.loads);
            stores += u8::from(accesses.stores);
            uses_stack |= accesses.stack;
            passed.push(Passed {
                // At most `MOST_RUN_BYTES`.
                end: u16::try_from(looked_at).unwrap_or(u16::MAX),
                loads,
                stores,
            });
        }
        StraightRun {
            code: code[..looked_at].into(),
            passed: passed.into(),
            uses_stack,
        }
    }
}

/// Whether the instruction may stand in a straight run.
fn is_straight(instruction: &Instruction) -> bool {
    let registers = || {
        (0..instruction.op_count())
            .filter(|&n| instruction.op_kind(n) == OpKind::Register)
            .map(|n| instruction.op_register(n))
    };
    !instruction.is_invalid()
        && instruction.flow_control() == FlowControl::Next
        && !instruction.has_rep_prefix()
        && !instruction.has_repne_prefix()
        && is_listed(instruction.mnemonic())
        // MOV has forms for control, debug and segment registers, PUSH and POP those for segment registers.
        && registers().all(Register::is_gpr)
        && (instruction.mnemonic() == Mnemonic::Endbr64
            || instruction.cpuid_features().iter().all(|feature| is_everywhere(*feature)))
}

/// What every processor with 64-bit code has, and so raises no #UD.
fn is_everywhere(feature: CpuidFeature) -> bool {
    use CpuidFeature::*;
    matches!(
        feature,
        INTEL8086 | INTEL186 | INTEL286 | INTEL386 | INTEL486 | X64 | CMOV | MULTIBYTENOP
    )
}

fn is_listed(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    let computes = matches!(
        mnemonic,
        Adc | Add | And | Cmp | Dec | Imul | Inc | Lea | Mul | Neg | Not | Or | Sbb | Sub | Test | Xor
    );
    let shifts = matches!(
        mnemonic,
        Rcl | Rcr
            | Rol
            | Ror
            | Sal
            | Sar
            | Shl
            | Shld
            | Shr
            | Shrd
            | Bsf
            | Bsr
            | Bswap
            | Bt
            | Btc
            | Btr
            | Bts
    );
    let moves = matches!(
        mnemonic,
        Mov | Movsx
            | Movsxd
            | Movzx
            | Pop
            | Push
            | Xchg
            | Xadd
            | Cmpxchg
            | Leave
            | Cbw
            | Cdq
            | Cdqe
            | Cqo
            | Cwd
            | Cwde
    );
    let by_flags = matches!(
        mnemonic,
        Cmova
            | Cmovae
            | Cmovb
            | Cmovbe
            | Cmove
            | Cmovg
            | Cmovge
            | Cmovl
            | Cmovle
            | Cmovne
            | Cmovno
            | Cmovnp
            | Cmovns
            | Cmovo
            | Cmovp
            | Cmovs
            | Seta
            | Setae
            | Setb
            | Setbe
            | Sete
            | Setg
            | Setge
            | Setl
            | Setle
            | Setne
            | Setno
            | Setnp
            | Setns
            | Seto
            | Setp
            | Sets
    );
    computes || shifts || moves || by_flags || matches!(mnemonic, Nop | Endbr64 | Clc | Cld | Cmc | Stc | Std)
}

#[cfg(test)]
mod tests;
