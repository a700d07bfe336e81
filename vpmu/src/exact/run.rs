//! Straight-line runs: sequences of instructions without control flow, which a VMM can execute with
//! a single stop at the end.
//!
//! The vCPU's RIP within a run shows which instructions have completed, because each instruction
//! before this address has completed exactly once. A run contains only instructions from an
//! allowlist. Other instructions end the run: branches, instructions that change the privilege
//! level or the flags that control stepping, instructions that cause exits, repeated instructions,
//! and instructions that can raise exceptions other than #PF, #GP and #SS.

use iced_x86::{CpuidFeature, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register};

use super::cpu::CodeSegmentMode;
use super::{RetiredCounts, SingleStepMeter};

/// Maximum number of instructions in a straight-line run.
pub const MAX_RUN_INSTRUCTIONS: usize = 64;
/// Maximum number of code bytes that are decoded for a straight-line run.
pub const MAX_RUN_BYTES: usize = 256;

/// State after an instruction of a straight-line run: the end of the instruction, and the numbers
/// of memory accesses so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RunPosition {
    /// End of the instruction, as an offset from the start of the run in bytes.
    end: u16,
    /// Number of loads, and number of stores, from the start of the run to this position.
    loads: u8,
    stores: u8,
}

/// A sequence of instructions without control flow, which may be empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StraightLineCode {
    /// Code bytes of the run, including the instruction that ends it.
    code: Box<[u8]>,
    passed: Box<[RunPosition]>,
    uses_stack: bool,
}

impl StraightLineCode {
    /// Returns the code bytes of the run, including the instruction that ends it. Equal bytes
    /// always decode to the same run.
    pub fn code(&self) -> &[u8] {
        &self.code
    }

    /// Returns the number of instructions in the run.
    pub fn len(&self) -> usize {
        self.passed.len()
    }

    /// Returns whether the run is empty.
    pub fn is_empty(&self) -> bool {
        self.passed.is_empty()
    }

    /// Returns whether any instruction of the run accesses the stack segment, and therefore may
    /// raise a stack fault.
    pub fn uses_stack(&self) -> bool {
        self.uses_stack
    }

    /// Returns the number of instructions, from the start of the run, that the vCPU can retire
    /// before a count exceeds its value in `remaining`.
    pub fn instructions_within(&self, remaining: &RetiredCounts) -> usize {
        let fits = |passed: &RunPosition| {
            u32::from(passed.loads) <= remaining.loads && u32::from(passed.stores) <= remaining.stores
        };
        let instructions = usize::try_from(remaining.instructions).unwrap_or(usize::MAX);
        self.passed.partition_point(fits).min(instructions)
    }

    /// Returns the offset from the start of the run to the end of its first `n` instructions, in
    /// bytes. If the run has fewer instructions, returns the offset of its end.
    pub fn end_of(&self, n: usize) -> usize {
        let last = n.min(self.passed.len()).checked_sub(1);
        last.map_or(0, |last| self.passed[last].end.into())
    }

    /// Returns the number of completed instructions when the vCPU is at `offset` bytes from the
    /// start of the run, or `None` if no instruction starts at this offset.
    pub fn completed_at(&self, offset: u64) -> Option<usize> {
        if offset == 0 {
            return Some(0);
        }
        let found = self
            .passed
            .binary_search_by_key(&offset, |passed| passed.end.into());
        found.ok().map(|last| last + 1)
    }

    /// Returns the counts that the first `n` instructions of the run retire.
    pub fn counts(&self, n: usize) -> RetiredCounts {
        let n = n.min(self.passed.len());
        let Some(last) = n.checked_sub(1) else {
            return RetiredCounts::default();
        };
        let RunPosition { loads, stores, .. } = self.passed[last];
        RetiredCounts {
            // `n` is at most `MAX_RUN_INSTRUCTIONS`.
            instructions: u32::try_from(n).unwrap_or(u32::MAX),
            loads: loads.into(),
            stores: stores.into(),
            ..RetiredCounts::default()
        }
    }
}

impl SingleStepMeter {
    /// Decodes the straight-line run at the start of 64-bit `code`, limited to
    /// [`MAX_RUN_INSTRUCTIONS`] instructions and [`MAX_RUN_BYTES`] bytes.
    pub fn straight_run(&mut self, code: &[u8]) -> StraightLineCode {
        let code = &code[..code.len().min(MAX_RUN_BYTES)];
        let mut decoder = Decoder::new(CodeSegmentMode::Bits64.bits(), code, DecoderOptions::NONE);
        let mut passed: Vec<RunPosition> = Vec::with_capacity(MAX_RUN_INSTRUCTIONS);
        let (mut loads, mut stores, mut uses_stack) = (0, 0, false);
        let mut looked_at = 0;
        while decoder.can_decode() {
            let instruction = decoder.decode();
            looked_at = decoder.position();
            if passed.len() == MAX_RUN_INSTRUCTIONS || !is_straight(&instruction) {
                break;
            }
            let accesses = self.accesses(&instruction);
            loads += u8::from(accesses.loads);
            stores += u8::from(accesses.stores);
            uses_stack |= accesses.stack;
            passed.push(RunPosition {
                // `looked_at` is at most `MAX_RUN_BYTES`.
                end: u16::try_from(looked_at).unwrap_or(u16::MAX),
                loads,
                stores,
            });
        }
        StraightLineCode {
            code: code[..looked_at].into(),
            passed: passed.into(),
            uses_stack,
        }
    }
}

/// Returns whether the instruction may be part of a straight-line run.
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
        // MOV has forms for control, debug and segment registers, PUSH and POP have forms for
        // segment registers.
        && registers().all(Register::is_gpr)
        && (instruction.mnemonic() == Mnemonic::Endbr64
            || instruction.cpuid_features().iter().all(|feature| is_baseline_feature(*feature)))
}

/// Returns whether every 64-bit processor supports the feature, so that the instruction cannot
/// raise #UD.
fn is_baseline_feature(feature: CpuidFeature) -> bool {
    use CpuidFeature::*;
    matches!(
        feature,
        INTEL8086 | INTEL186 | INTEL286 | INTEL386 | INTEL486 | X64 | CMOV | MULTIBYTENOP
    )
}

/// Returns whether the instruction is one of those that a run may contain.
#[expect(clippy::too_many_lines, reason = "a list of mnemonics")]
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
