//! Unwinds user stacks with DWARF call frame information (CFI).
//!
//! The unwinder uses `.eh_frame`, which nearly all programs map into memory, or `.debug_frame` from
//! the program's file. Neither requires frame pointers.
//!
//! The input consists of a copy of the top of the stack, taken with the sample, and of unwind
//! tables read from the memory of the process ([`crate::modules`]). No vCPU waits while a stack is
//! unwound. `gimli` parses the tables, and this module computes the registers of each caller.
//!
//! A call chain is complete only if unwinding reaches an outermost frame. The return address of
//! such a frame is 0 or marked as undefined, which is how C libraries mark `_start` and thread
//! entry points. If no table covers an address (for example in JIT code), the unwinder follows the
//! frame pointer if it points into the copy of the stack, and marks the chain as guessed.
//!
//! **A hostile guest controls tables and stacks.** Each frame must have a higher address than the
//! previous one, an expression executes at most `MAX_OPERATIONS` operations, an unwind entry is at
//! most `MAX_ENTRY` bytes long, and all arithmetic is checked.

use std::sync::Arc;

use gimli::{
    BaseAddresses, CfaRule, DebugFrame, EhFrame, EhFrameHdr, EhFrameOffset, EndianSlice, Evaluation,
    EvaluationResult, FrameDescriptionEntry, LittleEndian, Location, Register, RegisterRule, UnwindContext,
    UnwindExpression, UnwindSection, Value, X86_64,
};

use crate::debug_frame::DebugFrames;
use crate::modules::{LoadedModule, UnwindTables};
use crate::unwind::UnwindStop;

/// Maximum number of operations evaluated per DWARF expression.
const MAX_OPERATIONS: u32 = 256;
/// Maximum length of an FDE or CIE, in bytes. The longest entries of glibc have several hundred
/// bytes.
const MAX_ENTRY: usize = 64 << 10;
/// Number of registers that the unwinder tracks, indexed by DWARF number: 16 general-purpose
/// registers and the return address.
pub const REGISTERS: usize = 17;
const RSP: usize = 7;
const RBP: usize = 6;
const RA: usize = 16;
/// Callee-saved registers (System V ABI: rbx, rbp, r12 to r15).
const CALLEE_SAVED: [usize; 6] = [3, 6, 12, 13, 14, 15];
/// First address beyond the user address space.
const USER_END: u64 = 1 << 56;

type Slice<'t> = EndianSlice<'t, LittleEndian>;

/// An executable mapping of a process.
#[derive(Debug, Clone)]
pub struct MappedModule {
    /// First address of the executable mapping.
    pub start: u64,
    /// First address after the executable mapping.
    pub end: u64,
    /// Module that is mapped, with its load bias (run-time address minus link-time address,
    /// wrapping); `None` until the module has been read.
    pub code: Option<(u64, Arc<LoadedModule>)>,
}

/// The executable mappings of one process, sorted by address.
#[derive(Debug, Clone, Default)]
pub struct ProcessModuleMap(Vec<MappedModule>);

impl ProcessModuleMap {
    /// Creates a map from mappings in any order.
    pub fn new(mut mappings: Vec<MappedModule>) -> Self {
        mappings.sort_by_key(|mapped| mapped.start);
        Self(mappings)
    }

    /// Returns the mapping that contains `address`.
    pub fn find(&self, address: u64) -> Option<&MappedModule> {
        let after = self.0.partition_point(|mapped| mapped.start <= address);
        self.0[..after].last().filter(|mapped| address < mapped.end)
    }

    /// Sets the module and the load bias of the mapping that contains `address`.
    pub fn set(&mut self, address: u64, bias: u64, module: Arc<LoadedModule>) {
        let after = self.0.partition_point(|mapped| mapped.start <= address);
        if let Some(mapped) = self.0[..after].last_mut() {
            mapped.code = Some((bias, module));
        }
    }
}

/// User-mode state of a sampled thread: its registers and a copy of the top of its stack.
#[derive(Debug, Clone, Copy)]
pub struct UserThreadState<'s> {
    /// Registers by DWARF number, the last of which is the instruction pointer. `None` for an
    /// unknown register.
    pub registers: [Option<u64>; REGISTERS],
    /// `true` if the instruction pointer is that of the interrupted instruction, `false` if it is a
    /// return address, which follows the call instruction.
    pub exact_ip: bool,
    /// Copy of the top of the thread's user stack, from the stack pointer upwards.
    pub stack: &'s [u8],
    /// `true` if the thread's stack is larger than the copy, which then lacks the outer frames.
    pub stack_truncated: bool,
}

impl UserThreadState<'_> {
    /// Reads the 8 bytes at `address` from the copy of the stack.
    fn word(&self, address: u64) -> Result<u64, UnwindStop> {
        let base = self.registers[RSP].ok_or(UnwindStop::BadFrame)?;
        let offset = address.checked_sub(base).ok_or(UnwindStop::BadFrame)?;
        let offset = usize::try_from(offset).map_err(|_| UnwindStop::BadFrame)?;
        let bytes = self.stack.get(offset..).and_then(|rest| rest.first_chunk());
        match bytes {
            Some(bytes) => Ok(u64::from_le_bytes(*bytes)),
            None if self.stack_truncated => Err(UnwindStop::Full),
            None => Err(UnwindStop::Unmapped),
        }
    }
}

/// Unwinder of user stacks. Reuses its buffers for each stack.
#[derive(Debug, Default)]
pub struct Unwinder {
    context: UnwindContext<usize>,
}

/// Result of unwinding one user stack: why unwinding ended, and whether frames were guessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnwindResult {
    /// Reason why unwinding ended.
    pub end: UnwindStop,
    /// `true` if at least one frame was found by its frame pointer instead of a table.
    pub guessed: bool,
}

/// A frame whose caller is to be computed, with the addresses for the lookup in the unwind tables.
#[derive(Clone, Copy)]
struct FrameLookup<'s> {
    /// Link-time address that is looked up in the unwind tables.
    probe: u64,
    /// Load bias, which is the run-time address minus the link-time address.
    bias: u64,
    state: &'s UserThreadState<'s>,
    frame: &'s FrameRegs,
}

#[derive(Debug, Clone, Copy)]
struct FrameRegs {
    registers: [Option<u64>; REGISTERS],
    exact_ip: bool,
}

impl Unwinder {
    /// Appends at most `max_frames` addresses of the call chain of `state` to `out`, innermost
    /// first.
    pub fn unwind(
        &mut self,
        code: &ProcessModuleMap,
        state: &UserThreadState<'_>,
        max_frames: usize,
        out: &mut Vec<u64>,
    ) -> UnwindResult {
        let mut frame = FrameRegs {
            registers: state.registers,
            exact_ip: state.exact_ip,
        };
        let mut guessed = false;
        for _ in 0..max_frames {
            let Some(ip) = frame.registers[RA] else {
                return UnwindResult {
                    end: UnwindStop::BadFrame,
                    guessed,
                };
            };
            out.push(ip);
            match self.caller_of(code, state, &frame, &mut guessed) {
                Ok(Some(next)) => frame = next,
                Ok(None) => {
                    let end = UnwindStop::Complete;
                    return UnwindResult { end, guessed };
                }
                Err(end) => return UnwindResult { end, guessed },
            }
        }
        let end = UnwindStop::Full;
        UnwindResult { end, guessed }
    }

    /// Returns the frame of the caller of `frame`, or `None` if `frame` is the outermost one.
    fn caller_of(
        &mut self,
        code: &ProcessModuleMap,
        state: &UserThreadState<'_>,
        frame: &FrameRegs,
        guessed: &mut bool,
    ) -> Result<Option<FrameRegs>, UnwindStop> {
        let ip = frame.registers[RA].ok_or(UnwindStop::BadFrame)?;
        // A return address may belong to the next function, because the call may be the last
        // instruction of its function. The unwinder therefore looks up the preceding byte.
        let probe = ip.wrapping_sub(u64::from(!frame.exact_ip));
        let mapped = code.find(probe).and_then(|mapped| mapped.code.as_ref());
        let by_eh_frame = mapped.and_then(|(bias, module)| {
            let probe = probe.wrapping_sub(*bias);
            let at = FrameLookup {
                probe,
                bias: *bias,
                state,
                frame,
            };
            let loaded = module.tables().and_then(|tables| self.by_eh_frame(tables, &at));
            loaded.or_else(|| self.by_debug_frames(module.debug_frames()?, &at))
        });
        let next = match by_eh_frame {
            Some(found) => match found? {
                Some(next) => next,
                None => return Ok(None),
            },
            None => {
                *guessed = true;
                by_frame_pointer(state, frame)?
            }
        };
        let (Some(ip), Some(sp), Some(before)) =
            (next.registers[RA], next.registers[RSP], frame.registers[RSP])
        else {
            return Err(UnwindStop::BadFrame);
        };
        if ip == 0 {
            return Ok(None);
        }
        // The stack pointers of the frames must strictly ascend, or unwinding could loop forever. A
        // signal frame may switch to another stack, which the copy does not contain.
        if sp <= before || ip >= USER_END {
            return Err(UnwindStop::BadFrame);
        }
        Ok(Some(next))
    }

    /// Computes the caller's frame from `.eh_frame`. Returns `None` if no entry covers the address.
    fn by_eh_frame(
        &mut self,
        tables: &UnwindTables,
        at: &FrameLookup<'_>,
    ) -> Option<Result<Option<FrameRegs>, UnwindStop>> {
        let bases = BaseAddresses::default()
            .set_eh_frame_hdr(tables.index_at)
            .set_eh_frame(tables.frames_at);
        let frames = EhFrame::new(&tables.frames, LittleEndian);
        let entry = entry(tables, &frames, &bases, at.probe)?;
        self.by_entry(&frames, &bases, &entry, at)
    }

    /// Computes the caller's frame from `.debug_frame`. Returns `None` if no entry covers the
    /// address.
    fn by_debug_frames(
        &mut self,
        frames: &DebugFrames,
        at: &FrameLookup<'_>,
    ) -> Option<Result<Option<FrameRegs>, UnwindStop>> {
        let (section, bases) = (frames.section(), BaseAddresses::default());
        let entry = section
            .fde_from_offset(&bases, frames.find(at.probe)?, DebugFrame::cie_from_offset)
            .ok()?;
        self.by_entry(&section, &bases, if_covering(&entry, at.probe)?, at)
    }

    /// Computes the caller's frame from the given unwind entry (FDE).
    fn by_entry<'t, S: UnwindSection<Slice<'t>>>(
        &mut self,
        frames: &S,
        bases: &BaseAddresses,
        entry: &FrameDescriptionEntry<Slice<'t>>,
        at: &FrameLookup<'_>,
    ) -> Option<Result<Option<FrameRegs>, UnwindStop>> {
        let FrameLookup {
            probe,
            bias,
            state,
            frame,
        } = *at;
        let row = entry
            .unwind_info_for_address(frames, bases, &mut self.context, probe)
            .ok()?;
        let eval = Evaluator {
            frames,
            entry,
            state,
            frame,
            bias,
        };
        let cfa = match eval.cfa(row.cfa()) {
            Ok(cfa) => cfa,
            Err(end) => return Some(Err(end)),
        };
        if matches!(row.register(X86_64::RA), None | Some(RegisterRule::Undefined)) {
            return Some(Ok(None));
        }
        let mut registers = [None; REGISTERS];
        for kept in CALLEE_SAVED {
            registers[kept] = frame.registers[kept];
        }
        registers[RSP] = Some(cfa);
        for (register, rule) in row.registers() {
            let number = usize::from(register.0);
            let Some(own) = frame.registers.get(number).copied() else {
                continue;
            };
            let value = match rule {
                RegisterRule::Undefined | RegisterRule::Architectural => Ok(None),
                RegisterRule::SameValue => Ok(own),
                RegisterRule::Offset(offset) => address(cfa, *offset).and_then(|at| state.word(at)).map(Some),
                RegisterRule::ValOffset(offset) => address(cfa, *offset).map(Some),
                RegisterRule::Register(other) => Ok(frame.register(*other)),
                RegisterRule::Expression(expression) => eval
                    .value(expression, Some(cfa))
                    .and_then(|at| state.word(at))
                    .map(Some),
                RegisterRule::ValExpression(expression) => eval.value(expression, Some(cfa)).map(Some),
                RegisterRule::Constant(value) => Ok(Some(*value)),
            };
            registers[number] = match value {
                Ok(value) => value,
                // Unwinding cannot continue without the return address and rsp, but can without
                // other registers.
                Err(end) if matches!(number, RA | RSP) => return Some(Err(end)),
                // The value cannot be read. A callee-saved register keeps its current value,
                // because a register that has been popped is stored below the stack pointer,
                // outside the copy of the stack.
                Err(_) => own.filter(|_| CALLEE_SAVED.contains(&number)),
            };
        }
        Some(Ok(Some(FrameRegs {
            registers,
            exact_ip: entry.is_signal_trampoline(),
        })))
    }
}

impl FrameRegs {
    fn register(&self, register: Register) -> Option<u64> {
        self.registers.get(usize::from(register.0)).copied().flatten()
    }
}

fn address(cfa: u64, offset: i64) -> Result<u64, UnwindStop> {
    cfa.checked_add_signed(offset).ok_or(UnwindStop::BadFrame)
}

/// Returns the unwind entry (FDE) that covers the link-time address `probe`.
fn entry<'t>(
    tables: &'t UnwindTables,
    frames: &EhFrame<Slice<'t>>,
    bases: &BaseAddresses,
    probe: u64,
) -> Option<FrameDescriptionEntry<Slice<'t>>> {
    let index = EhFrameHdr::new(&tables.index, LittleEndian)
        .parse(bases, 8)
        .ok()?;
    let rows = index.table()?;
    // The guest controls the number of rows in the index, and `gimli` multiplies it without an
    // overflow check.
    if rows.iter(bases).size_hint().0 > tables.index.len() {
        return None;
    }
    let at = rows.lookup(probe, bases).ok()?.direct().ok()?;
    let offset = usize::try_from(at.checked_sub(tables.frames_at)?).ok()?;
    let entry = frames
        .fde_from_offset(bases, EhFrameOffset(offset), EhFrame::cie_from_offset)
        .ok()?;
    if_covering(&entry, probe)?;
    Some(entry)
}

/// Returns `entry` if it covers the link-time address `probe` and is at most [`MAX_ENTRY`] bytes
/// long.
fn if_covering<'e, 't>(
    entry: &'e FrameDescriptionEntry<Slice<'t>>,
    probe: u64,
) -> Option<&'e FrameDescriptionEntry<Slice<'t>>> {
    let short = entry.entry_len() <= MAX_ENTRY && entry.cie().entry_len() <= MAX_ENTRY;
    (short && entry.contains(probe)).then_some(entry)
}

/// Computes the caller's frame from the frame pointer, for code that no unwind table covers.
fn by_frame_pointer(state: &UserThreadState<'_>, frame: &FrameRegs) -> Result<FrameRegs, UnwindStop> {
    let (Some(bp), Some(sp)) = (frame.registers[RBP], frame.registers[RSP]) else {
        return Err(UnwindStop::NoTable);
    };
    if bp < sp || bp % 8 != 0 {
        return Err(UnwindStop::NoTable);
    }
    let mut registers = [None; REGISTERS];
    registers[RBP] = Some(state.word(bp)?);
    registers[RA] = Some(state.word(bp.checked_add(8).ok_or(UnwindStop::NoTable)?)?);
    registers[RSP] = bp.checked_add(16);
    Ok(FrameRegs {
        registers,
        exact_ip: false,
    })
}

/// Evaluator for the DWARF expressions of one unwind entry and one frame.
struct Evaluator<'e, 't, S> {
    frames: &'e S,
    entry: &'e FrameDescriptionEntry<Slice<'t>>,
    state: &'e UserThreadState<'e>,
    frame: &'e FrameRegs,
    bias: u64,
}

impl<'t, S: UnwindSection<Slice<'t>>> Evaluator<'_, 't, S> {
    /// Returns the canonical frame address, which `rule` defines.
    fn cfa(&self, rule: &CfaRule<usize>) -> Result<u64, UnwindStop> {
        match rule {
            CfaRule::RegisterAndOffset { register, offset } => self
                .frame
                .register(*register)
                .and_then(|value| value.checked_add_signed(*offset))
                .ok_or(UnwindStop::BadFrame),
            CfaRule::Expression(expression) => self.value(expression, None),
        }
    }

    /// Returns the value of a DWARF expression. `first` is the value with which the evaluation
    /// stack starts.
    fn value(&self, expression: &UnwindExpression<usize>, first: Option<u64>) -> Result<u64, UnwindStop> {
        let expression = expression.get(self.frames).map_err(|_| UnwindStop::NoTable)?;
        let mut eval = Evaluation::new(expression.0, self.entry.cie().encoding());
        eval.set_max_iterations(MAX_OPERATIONS);
        if let Some(first) = first {
            eval.set_initial_value(first);
        }
        let mut result = eval.evaluate();
        for _ in 0..MAX_OPERATIONS {
            result = match result.map_err(|_| UnwindStop::BadFrame)? {
                EvaluationResult::Complete => {
                    return match eval.as_result().last().map(|piece| &piece.location) {
                        Some(Location::Address { address }) => Ok(*address),
                        _ => Err(UnwindStop::BadFrame),
                    };
                }
                EvaluationResult::RequiresRegister { register, .. } => {
                    let value = self.frame.register(register).ok_or(UnwindStop::BadFrame)?;
                    eval.resume_with_register(Value::Generic(value))
                }
                EvaluationResult::RequiresMemory { address, size: 8, .. } => {
                    eval.resume_with_memory(Value::Generic(self.state.word(address)?))
                }
                EvaluationResult::RequiresRelocatedAddress(linked) => {
                    eval.resume_with_relocated_address(linked.wrapping_add(self.bias))
                }
                _ => return Err(UnwindStop::BadFrame),
            };
        }
        Err(UnwindStop::BadFrame)
    }
}

#[cfg(test)]
mod tests;
