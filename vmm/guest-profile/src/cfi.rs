//! User stacks by unwind tables: `.eh_frame`, which nearly all programs have in memory, frame pointers or
//! not, and `.debug_frame`, which some have in their file instead.
//!
//! It works on a copy of the stack's top that came with a sample, and on tables that were read out of the
//! process's memory ([`crate::modules`]), so no vCPU waits for it. `gimli` reads the tables; which registers
//! a frame's caller had is worked out here.
//!
//! A chain is complete only if it reached an outermost frame: one whose return address the tables say is
//! undefined, as C libraries say of `_start` and of where threads begin, or is 0. Where no table covers an
//! address, as in code made at run time, the frame pointer is taken for one if it points into the copy, and
//! the chain is marked as guessed.
//!
//! **Tables and stacks are a hostile guest's.** Each frame is above the one before, an expression has at most
//! `MAX_OPERATIONS` operations, an entry `MAX_ENTRY` bytes, and all arithmetic is checked.

use std::sync::Arc;

use gimli::{
    BaseAddresses, CfaRule, DebugFrame, EhFrame, EhFrameHdr, EhFrameOffset, EndianSlice, Evaluation,
    EvaluationResult, FrameDescriptionEntry, LittleEndian, Location, Register, RegisterRule, UnwindContext,
    UnwindExpression, UnwindSection, Value, X86_64,
};

use crate::debug_frame::DebugFrames;
use crate::modules::{Module, Tables};
use crate::unwind::End;

/// Most operations of one expression.
const MAX_OPERATIONS: u32 = 256;
/// Most bytes of one function's entry, and of what several have in common. The longest of glibc has some
/// hundred.
const MAX_ENTRY: usize = 64 << 10;
/// Registers by their DWARF numbers: 16 general ones and the return address.
pub const REGISTERS: usize = 17;
const RSP: usize = 7;
const RBP: usize = 6;
const RA: usize = 16;
/// Which of them a function keeps for its caller (System V ABI: rbx, rbp, r12 to r15).
const KEPT: [usize; 6] = [3, 6, 12, 13, 14, 15];
/// Addresses from here up are none of a program.
const USER_END: u64 = 1 << 56;

type Slice<'t> = EndianSlice<'t, LittleEndian>;

/// A mapping of code of a process.
#[derive(Debug, Clone)]
pub struct Mapped {
    /// First address.
    pub start: u64,
    /// The address behind it.
    pub end: u64,
    /// What is mapped, and what its addresses have over linked ones, wrapping; `None` until it was read.
    pub code: Option<(u64, Arc<Module>)>,
}

/// The code of one process, by ascending addresses.
#[derive(Debug, Clone, Default)]
pub struct CodeMap(Vec<Mapped>);

impl CodeMap {
    /// Of these mappings, in any order.
    pub fn new(mut mappings: Vec<Mapped>) -> Self {
        mappings.sort_by_key(|mapped| mapped.start);
        Self(mappings)
    }

    /// The mapping that `address` is in.
    pub fn find(&self, address: u64) -> Option<&Mapped> {
        let after = self.0.partition_point(|mapped| mapped.start <= address);
        self.0[..after].last().filter(|mapped| address < mapped.end)
    }

    /// Says what is mapped at `address`.
    pub fn set(&mut self, address: u64, bias: u64, module: Arc<Module>) {
        let after = self.0.partition_point(|mapped| mapped.start <= address);
        if let Some(mapped) = self.0[..after].last_mut() {
            mapped.code = Some((bias, module));
        }
    }
}

/// Where a thread was in its program: registers, and the top of its stack.
#[derive(Debug, Clone, Copy)]
pub struct UserState<'s> {
    /// By DWARF number; the last is the instruction pointer. `None`: not known.
    pub registers: [Option<u64>; REGISTERS],
    /// The registers are those of an interrupted instruction, not of one after a call.
    pub exact_ip: bool,
    /// From the stack pointer up.
    pub stack: &'s [u8],
    /// The stack goes on: it was cut at what was asked for.
    pub cut: bool,
}

impl UserState<'_> {
    /// The 8 bytes at `address`.
    fn word(&self, address: u64) -> Result<u64, End> {
        let base = self.registers[RSP].ok_or(End::BadFrame)?;
        let offset = address.checked_sub(base).ok_or(End::BadFrame)?;
        let offset = usize::try_from(offset).map_err(|_| End::BadFrame)?;
        let bytes = self.stack.get(offset..).and_then(|rest| rest.first_chunk());
        match bytes {
            Some(bytes) => Ok(u64::from_le_bytes(*bytes)),
            None if self.cut => Err(End::Full),
            None => Err(End::Unmapped),
        }
    }
}

/// What an unwinder keeps from one stack to the next.
#[derive(Default)]
pub struct Unwinder {
    context: UnwindContext<usize>,
}

impl std::fmt::Debug for Unwinder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unwinder").finish_non_exhaustive()
    }
}

/// How a stack ended, and whether a step of it is likely and not certain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unwound {
    /// How it ended.
    pub end: End,
    /// See there.
    pub guessed: bool,
}

/// Whose caller is looked for.
#[derive(Clone, Copy)]
struct At<'s> {
    /// The linked address whose entry says so.
    probe: u64,
    /// What running addresses have over linked ones.
    bias: u64,
    state: &'s UserState<'s>,
    frame: &'s Frame,
}

/// The registers of a frame.
#[derive(Debug, Clone, Copy)]
struct Frame {
    registers: [Option<u64>; REGISTERS],
    exact_ip: bool,
}

impl Unwinder {
    /// Appends the addresses of the stack of `state` to `out`, innermost first, `max_frames` of them at most.
    pub fn unwind(
        &mut self,
        code: &CodeMap,
        state: &UserState<'_>,
        max_frames: usize,
        out: &mut Vec<u64>,
    ) -> Unwound {
        let mut frame = Frame {
            registers: state.registers,
            exact_ip: state.exact_ip,
        };
        let mut guessed = false;
        for _ in 0..max_frames {
            let Some(ip) = frame.registers[RA] else {
                return Unwound {
                    end: End::BadFrame,
                    guessed,
                };
            };
            out.push(ip);
            match self.above(code, state, &frame, &mut guessed) {
                Ok(Some(next)) => frame = next,
                Ok(None) => {
                    let end = End::Complete;
                    return Unwound { end, guessed };
                }
                Err(end) => return Unwound { end, guessed },
            }
        }
        let end = End::Full;
        Unwound { end, guessed }
    }

    /// The frame above `frame`; `None`: that is the outermost one.
    fn above(
        &mut self,
        code: &CodeMap,
        state: &UserState<'_>,
        frame: &Frame,
        guessed: &mut bool,
    ) -> Result<Option<Frame>, End> {
        let ip = frame.registers[RA].ok_or(End::BadFrame)?;
        // A return address may belong to the next function when the call was the last instruction.
        let probe = ip.wrapping_sub(u64::from(!frame.exact_ip));
        let mapped = code.find(probe).and_then(|mapped| mapped.code.as_ref());
        let by_tables = mapped.and_then(|(bias, module)| {
            let probe = probe.wrapping_sub(*bias);
            let at = At {
                probe,
                bias: *bias,
                state,
                frame,
            };
            let loaded = module.tables().and_then(|tables| self.by_tables(tables, &at));
            loaded.or_else(|| self.by_debug_frames(module.debug_frames()?, &at))
        });
        let next = match by_tables {
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
            return Err(End::BadFrame);
        };
        if ip == 0 {
            return Ok(None);
        }
        // Strictly upwards, or it could go round for ever. A signal's frame may lead to another stack, which
        // is not in the copy.
        if sp <= before || ip >= USER_END {
            return Err(End::BadFrame);
        }
        Ok(Some(next))
    }

    /// As [`Self::above`], by `.eh_frame`. `None`: no entry covers the address.
    fn by_tables(&mut self, tables: &Tables, at: &At<'_>) -> Option<Result<Option<Frame>, End>> {
        let bases = BaseAddresses::default()
            .set_eh_frame_hdr(tables.index_at)
            .set_eh_frame(tables.frames_at);
        let frames = EhFrame::new(&tables.frames, LittleEndian);
        let entry = entry(tables, &frames, &bases, at.probe)?;
        self.by_entry(&frames, &bases, &entry, at)
    }

    /// The same by `.debug_frame`.
    fn by_debug_frames(&mut self, frames: &DebugFrames, at: &At<'_>) -> Option<Result<Option<Frame>, End>> {
        let (section, bases) = (frames.section(), BaseAddresses::default());
        let entry = section
            .fde_from_offset(&bases, frames.find(at.probe)?, DebugFrame::cie_from_offset)
            .ok()?;
        self.by_entry(&section, &bases, fits(&entry, at.probe)?, at)
    }

    /// The same by this entry of a section.
    fn by_entry<'t, S: UnwindSection<Slice<'t>>>(
        &mut self,
        frames: &S,
        bases: &BaseAddresses,
        entry: &FrameDescriptionEntry<Slice<'t>>,
        at: &At<'_>,
    ) -> Option<Result<Option<Frame>, End>> {
        let At {
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
        let cfa = match row.cfa() {
            CfaRule::RegisterAndOffset { register, offset } => frame
                .register(*register)
                .and_then(|value| value.checked_add_signed(*offset))
                .ok_or(End::BadFrame),
            CfaRule::Expression(expression) => eval.value(expression, None),
        };
        let cfa = match cfa {
            Ok(cfa) => cfa,
            Err(end) => return Some(Err(end)),
        };
        if matches!(row.register(X86_64::RA), None | Some(RegisterRule::Undefined)) {
            return Some(Ok(None));
        }
        let mut registers = [None; REGISTERS];
        for kept in KEPT {
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
                // Without one of them the stack goes on, but for these.
                Err(end) if matches!(number, RA | RSP) => return Some(Err(end)),
                // A register that has been popped already is below the stack pointer.
                Err(_) => own.filter(|_| KEPT.contains(&number)),
            };
        }
        Some(Ok(Some(Frame {
            registers,
            exact_ip: entry.is_signal_trampoline(),
        })))
    }
}

impl Frame {
    fn register(&self, register: Register) -> Option<u64> {
        self.registers.get(usize::from(register.0)).copied().flatten()
    }
}

fn address(cfa: u64, offset: i64) -> Result<u64, End> {
    cfa.checked_add_signed(offset).ok_or(End::BadFrame)
}

/// The entry that covers linked address `probe`.
fn entry<'t>(
    tables: &'t Tables,
    frames: &EhFrame<Slice<'t>>,
    bases: &BaseAddresses,
    probe: u64,
) -> Option<FrameDescriptionEntry<Slice<'t>>> {
    let index = EhFrameHdr::new(&tables.index, LittleEndian)
        .parse(bases, 8)
        .ok()?;
    let rows = index.table()?;
    // The search multiplies their number, which a guest may have made up.
    if rows.iter(bases).size_hint().0 > tables.index.len() {
        return None;
    }
    let at = rows.lookup(probe, bases).ok()?.direct().ok()?;
    let offset = usize::try_from(at.checked_sub(tables.frames_at)?).ok()?;
    let entry = frames
        .fde_from_offset(bases, EhFrameOffset(offset), EhFrame::cie_from_offset)
        .ok()?;
    fits(&entry, probe)?;
    Some(entry)
}

/// The entry, if it covers linked address `probe` and is no longer than a function's.
fn fits<'e, 't>(
    entry: &'e FrameDescriptionEntry<Slice<'t>>,
    probe: u64,
) -> Option<&'e FrameDescriptionEntry<Slice<'t>>> {
    let short = entry.entry_len() <= MAX_ENTRY && entry.cie().entry_len() <= MAX_ENTRY;
    (short && entry.contains(probe)).then_some(entry)
}

/// The caller by the frame pointer, where no table says anything.
fn by_frame_pointer(state: &UserState<'_>, frame: &Frame) -> Result<Frame, End> {
    let (Some(bp), Some(sp)) = (frame.registers[RBP], frame.registers[RSP]) else {
        return Err(End::NoTable);
    };
    if bp < sp || bp % 8 != 0 {
        return Err(End::NoTable);
    }
    let mut registers = [None; REGISTERS];
    registers[RBP] = Some(state.word(bp)?);
    registers[RA] = Some(state.word(bp.checked_add(8).ok_or(End::NoTable)?)?);
    registers[RSP] = bp.checked_add(16);
    Ok(Frame {
        registers,
        exact_ip: false,
    })
}

/// Evaluates the expressions of one entry for one frame.
struct Evaluator<'e, 't, S> {
    frames: &'e S,
    entry: &'e FrameDescriptionEntry<Slice<'t>>,
    state: &'e UserState<'e>,
    frame: &'e Frame,
    bias: u64,
}

impl<'t, S: UnwindSection<Slice<'t>>> Evaluator<'_, 't, S> {
    /// What an expression comes to, which begins with `first` on its stack.
    fn value(&self, expression: &UnwindExpression<usize>, first: Option<u64>) -> Result<u64, End> {
        let expression = expression.get(self.frames).map_err(|_| End::NoTable)?;
        let mut eval = Evaluation::new(expression.0, self.entry.cie().encoding());
        eval.set_max_iterations(MAX_OPERATIONS);
        if let Some(first) = first {
            eval.set_initial_value(first);
        }
        let mut result = eval.evaluate();
        for _ in 0..MAX_OPERATIONS {
            result = match result.map_err(|_| End::BadFrame)? {
                EvaluationResult::Complete => {
                    return match eval.as_result().last().map(|piece| &piece.location) {
                        Some(Location::Address { address }) => Ok(*address),
                        _ => Err(End::BadFrame),
                    };
                }
                EvaluationResult::RequiresRegister { register, .. } => {
                    let value = self.frame.register(register).ok_or(End::BadFrame)?;
                    eval.resume_with_register(Value::Generic(value))
                }
                EvaluationResult::RequiresMemory { address, size: 8, .. } => {
                    eval.resume_with_memory(Value::Generic(self.state.word(address)?))
                }
                EvaluationResult::RequiresRelocatedAddress(linked) => {
                    eval.resume_with_relocated_address(linked.wrapping_add(self.bias))
                }
                _ => return Err(End::BadFrame),
            };
        }
        Err(End::BadFrame)
    }
}

#[cfg(test)]
mod tests;
