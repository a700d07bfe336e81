//! RDPMC that was not there when the guest was loaded: in programs, in modules, in code made at run time.
//!
//! The processor answers it with #GP, as does KVM whose own PMU is off. So the guest's handler of #GP gets an
//! exit at its beginning: the port write that stands for RDPMC, in place of the first instruction, or with
//! `--rdpmc hwbp` a breakpoint. If what faulted is an RDPMC that the guest may execute, the guest goes on
//! behind it with the count and never sees the fault. Any other fault goes on in the handler, the instruction
//! at its beginning done here.
//!
//! Where the handler is, the interrupt descriptor table says. It is looked at when the guest writes PMU
//! registers, which it does before it reads a counter: at once if its gate or the code there has changed, and
//! where the table itself may have moved (another kernel's) at the first, second, fourth … write after a
//! change, and at each that comes a millisecond or more after the last look, then two, four, up to 64,
//! and after 1,024 writes.

mod frame;
mod planted;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::exact::GuestMemory;

use super::step::state::{Linear, State};
use frame::Frame;
pub(super) use frame::{RFLAGS_TF, rdpmc_length};
use kernel_images::packed::PackedSymbols;
use kernel_images::rdpmc::{LONGEST, TRAP};
use planted::Head;
pub use planted::{Planted, PlantedGate};

/// #GP (SDM vol. 3 §6.15).
const GENERAL_PROTECTION: u8 = 13;
/// Bytes of a gate of the interrupt descriptor table in 64-bit mode (SDM vol. 3 §6.14.1).
const GATE_BYTES: u64 = 16;
/// Lines a vCPU writes to the log about it.
const MOST_LINES: u32 = 16;
/// CR4.CET: shadow stacks and branch tracking (SDM vol. 3 §2.5). The way back would leave the shadow stack
/// behind.
const CR4_CET: u64 = 1 << 23;
/// CR4.FRED: events do not go through the interrupt descriptor table (Intel FRED specification §3.1).
const CR4_FRED: u64 = 1 << 32;

/// What a vCPU that stopped at the handler goes on with.
#[derive(Clone, Copy, Debug)]
pub enum Stopped {
    /// An RDPMC faulted: ECX and CPL, to be answered by [`Answer`].
    Rdpmc(Answer),
    /// Something else did; the handler runs.
    Handler,
}

/// A faulted RDPMC.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    frame: Frame,
    /// ECX.
    pub index: u32,
    /// The privilege level of the code it is in.
    pub cpl: u8,
}

impl Answer {
    /// Goes on behind it with `value`.
    pub fn give(&self, value: u64, state: &mut State) {
        self.frame.resume(value, state);
    }

    /// Goes back to it.
    pub fn execute_again(&self, state: &mut State) {
        self.frame.execute_again(state);
    }

    /// RIP at it and behind it.
    pub fn place(&self) -> (u64, u64) {
        (self.frame.rip, self.frame.behind())
    }

    /// #DB follows it: the code single-steps.
    pub fn traps(&self) -> bool {
        self.frame.traps()
    }
}

/// What was seen at the last look, where it can be compared without asking KVM.
#[derive(Clone, Copy, Debug)]
struct Seen {
    entry: (GuestAddress, u128),
    code: (GuestAddress, u16),
}

impl Seen {
    fn is_there(&self, memory: &GuestMemoryMmap) -> bool {
        memory
            .read_obj::<u128>(self.entry.0)
            .is_ok_and(|now| now == self.entry.1)
            && memory
                .read_obj::<u16>(self.code.0)
                .is_ok_and(|now| now == self.code.1)
    }
}

/// One vCPU's look at its handler of #GP.
#[derive(Debug)]
pub struct Gate {
    memory: GuestMemoryMmap,
    symbols: Arc<PackedSymbols>,
    /// `None`: by a breakpoint.
    planted: Option<Arc<PlantedGate>>,
    /// Where the breakpoint is.
    breakpoint: Option<Head>,
    seen: Option<Seen>,
    /// A handler that was found unfit, so that it is said once.
    unfit: Option<u64>,
    /// Lines written to the log.
    said: u32,
}

/// What a look found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Looked {
    /// All is as it was, or there is nothing to be served at.
    AsBefore,
    /// The handler is another one. With a breakpoint it is to be here.
    Changed(Option<u64>),
}

impl Gate {
    /// By an exit that all vCPUs share, or (`None`) by a breakpoint of this one.
    pub fn new(
        planted: Option<Arc<PlantedGate>>,
        memory: GuestMemoryMmap,
        symbols: Arc<PackedSymbols>,
    ) -> Self {
        Self {
            memory,
            symbols,
            planted,
            breakpoint: None,
            seen: None,
            unfit: None,
            said: 0,
        }
    }

    /// Whether the guest has changed the gate or the code at the handler since the last look, as far as
    /// memory tells.
    #[inline]
    pub fn has_changed(&self) -> bool {
        self.seen.is_some_and(|seen| !seen.is_there(&self.memory))
    }

    /// Which exit of ours a port write with the vCPU at `rip` is of.
    #[inline]
    pub fn planted_at(&self, rip: u64) -> Option<Planted> {
        self.planted.as_ref()?.of(rip)
    }

    /// Whether a stop at `rip` is at the breakpoint in the handler.
    #[inline]
    pub fn breaks_at(&self, rip: u64) -> bool {
        self.breakpoint.is_some_and(|head| head.at == rip)
    }

    /// Looks where the handler is.
    pub fn look(&mut self, state: &State) -> Looked {
        self.seen = None;
        if !state.is_64bit() {
            return Looked::AsBefore;
        }
        let mut memory = Linear::new(&self.memory, state);
        let Some(gate) = memory.gate(GENERAL_PROTECTION) else {
            return Looked::AsBefore;
        };
        let mut code = [0; 2 * LONGEST];
        let readable = memory.read(gate, &mut code);
        let code = &code[..readable];
        let other_ways = state.sregs.cr4 & (CR4_CET | CR4_FRED) != 0;
        let served = if other_ways {
            None
        } else {
            self.serve(gate, code, state)
        };
        let entry = state
            .sregs
            .idt
            .base
            .wrapping_add(GATE_BYTES * u64::from(GENERAL_PROTECTION));
        let at = served.map_or(gate, |(head, _)| head.at);
        let mut memory = Linear::new(&self.memory, state);
        let places = memory.physical(at).zip(memory.physical(entry));
        self.seen = places.and_then(|(code, entry)| {
            let (code, entry) = (GuestAddress(code), GuestAddress(entry));
            Some(Seen {
                code: (code, self.memory.read_obj(code).ok()?),
                entry: (entry, self.memory.read_obj(entry).ok()?),
            })
        });
        let looked = match served {
            Some((_, false)) => return Looked::AsBefore,
            Some((head, true)) => Looked::Changed(self.planted.is_none().then_some(head.at)),
            None => {
                if let Some(planted) = &self.planted {
                    planted.remove(&self.memory);
                }
                if self.unfit.replace(gate) == Some(gate) {
                    return Looked::AsBefore;
                }
                Looked::Changed(None)
            }
        };
        if self.said < MOST_LINES && log::log_enabled!(log::Level::Info) {
            self.said += 1;
            let place = self.place(gate);
            if served.is_some() {
                log::info!(
                    "rdpmc in user mode and in modules: served at the guest's handler of #GP, {place}"
                );
            } else if other_ways {
                log::info!(
                    "rdpmc in user mode and in modules raises #GP: the guest has shadow stacks or FRED on"
                );
            } else {
                log::info!(
                    "rdpmc in user mode and in modules raises #GP: the guest's handler of it, {place}, begins with {:02x?}",
                    &code[..code.len().min(8)]
                );
            }
        }
        looked
    }

    fn place(&self, gate: u64) -> String {
        let symbols = self.symbols.unpack();
        match symbols.resolve_flat(gate) {
            Some((symbol, offset)) => format!("{}+{offset:#x}", symbol.name),
            None => format!("{gate:#x}"),
        }
    }

    /// Serves RDPMC at the handler at `gate`. Returns its first instruction, and whether it is another one
    /// than before.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "x86-64 only: usize has 64 bits; four at most"
    )]
    fn serve(&mut self, gate: u64, code: &[u8], state: &State) -> Option<(Head, bool)> {
        let Some(planted) = &self.planted else {
            let head = Head::of(gate, code)?;
            return Some((head, self.breakpoint.replace(head) != Some(head)));
        };
        let mut memory = Linear::new(&self.memory, state);
        // Behind an ENDBR64 or at the beginning.
        for at in [gate, gate.wrapping_add(4)] {
            if code
                .get((at - gate) as usize..)
                .is_some_and(|c| c.starts_with(&TRAP))
                && let Some(gpa) = memory.physical(at).map(GuestAddress)
                && let Some(head) = planted.is_planted(gpa, &self.memory)
                && head.at == at
            {
                return Some((head, false));
            }
        }
        let head = Head::of(gate, code)?;
        let gpa = memory.physical(head.at).map(GuestAddress)?;
        let code = code.get((head.at - gate) as usize..)?;
        planted
            .plant(head, code, gpa, &self.memory)
            .then_some((head, true))
    }

    /// What a vCPU that stopped at the handler is there for. `replaced`: the length of the replaced RDPMC at
    /// a physical address.
    #[expect(clippy::cast_possible_truncation, reason = "ECX")]
    pub fn stopped(&self, state: &State, replaced: impl FnOnce(u64) -> Option<u8>) -> Stopped {
        match Frame::of_rdpmc(state, &mut Linear::new(&self.memory, state), replaced) {
            Some(frame) => Stopped::Rdpmc(Answer {
                frame,
                index: state.regs.rcx as u32,
                cpl: frame.cpl(),
            }),
            None => Stopped::Handler,
        }
    }

    /// Does the instruction at `at` that the exit or breakpoint stopped before. If the exit has gone from
    /// there meanwhile, the guest does it itself. `None`: it cannot be done, and the guest has lost its
    /// stack.
    pub fn enter_handler(&self, at: u64, state: &mut State) -> Option<()> {
        let head = match &self.planted {
            Some(planted) => planted.head(at),
            None => self.breakpoint.filter(|head| head.at == at),
        };
        match head {
            Some(head) => head.execute(state, &self.memory),
            None => {
                state.regs.rip = at;
                Some(())
            }
        }
    }
}
