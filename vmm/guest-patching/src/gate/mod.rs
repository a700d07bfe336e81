//! Emulation of RDPMC instructions that were not patched when the kernel was loaded, because they
//! are in programs, modules or generated code.
//!
//! The processor raises #GP for RDPMC, and so does KVM if its vPMU is disabled. The VMM therefore
//! intercepts the first instruction of the guest's #GP handler: it replaces the instruction with a
//! write to the trap port, or sets a breakpoint on it with `--rdpmc hwbp`. If the faulting
//! instruction is an RDPMC that the guest may execute, the guest resumes after it with the count
//! and never observes the fault. For any other fault, the replaced instruction is emulated and the
//! handler continues.
//!
//! The interrupt descriptor table (IDT) gives the address of the handler. The VMM checks the IDT
//! when the guest writes PMU registers, because a guest writes them before it reads a counter. The
//! next write detects a change to the IDT's #GP gate or to the handler code. An IDT at a new
//! address (of another kernel) is detected only by a full check. Full checks are made
//!
//! - at the first, second, fourth, … write after a change,
//! - at the first write that is at least 1 ms after the previous full check (this interval doubles
//!   up to 64 ms),
//! - and after 1,024 writes.

mod frame;
mod handler_trap;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::exact::SteppedGuestMemory;

use crate::finder::{MAX_INSTRUCTION_BYTES, TRAP};
use crate::linear_memory::LinearMemory;
use crate::registers::VcpuState;
use frame::FaultFrame;
pub use frame::{RFLAGS_TF, rdpmc_length};
use handler_trap::HandlerInstruction;
pub use handler_trap::{GpHandlerTrap, TriggeredHandlerTrap};
use kernel_images::packed::CompressedKernelSymbols;

/// Interrupt vector of #GP, the general-protection exception (SDM vol. 3 §6.15).
const GENERAL_PROTECTION: u8 = 13;
/// Size of an IDT gate in 64-bit mode, in bytes (SDM vol. 3 §6.14.1).
const GATE_BYTES: u64 = 16;
/// Maximum number of log lines per vCPU about the #GP handler.
const MAX_LOG_LINES: u32 = 16;
/// CR4.CET: shadow stacks and indirect branch tracking (SDM vol. 3 §2.5). Handlers are not
/// intercepted if it is set, because the emulated return would not pop the shadow stack.
const CR4_CET: u64 = 1 << 23;
/// CR4.FRED: events bypass the IDT (Intel FRED specification §3.1).
const CR4_FRED: u64 = 1 << 32;

/// Reason why a vCPU stopped at the first instruction of the #GP handler.
#[derive(Clone, Copy, Debug)]
pub enum GpHandlerStopReason {
    /// An RDPMC faulted. The caller completes it with [`FaultedRdpmc::complete`].
    Rdpmc(FaultedRdpmc),
    /// Another fault occurred; the guest's handler must run.
    Handler,
}

/// An RDPMC instruction that raised #GP.
#[derive(Clone, Copy, Debug)]
pub struct FaultedRdpmc {
    frame: FaultFrame,
    /// Value of ECX, which selects the counter.
    pub index: u32,
    /// Privilege level (CPL) of the faulting code.
    pub cpl: u8,
}

impl FaultedRdpmc {
    /// Completes the RDPMC with `value` and resumes after it.
    pub fn complete(&self, value: u64, state: &mut VcpuState) {
        self.frame.resume(value, state);
    }

    /// Resumes the guest at the RDPMC with the state before the fault, so that the RDPMC is
    /// executed again.
    pub fn execute_again(&self, state: &mut VcpuState) {
        self.frame.execute_again(state);
    }

    /// Returns the RIP of the RDPMC and the RIP of the next instruction.
    pub fn rips(&self) -> (u64, u64) {
        (self.frame.rip, self.frame.next_rip())
    }

    /// Returns `true` if the faulting code is being single-stepped (RFLAGS.TF is set), in which
    /// case a #DB must follow the RDPMC.
    pub fn traps(&self) -> bool {
        self.frame.traps()
    }
}

/// Copy of the IDT's #GP gate and of the handler code at the last check, with their physical
/// addresses. Later checks compare guest memory with this copy, which needs no KVM call.
#[derive(Clone, Copy, Debug)]
struct HandlerSnapshot {
    entry: (GuestAddress, u128),
    code: (GuestAddress, u16),
}

impl HandlerSnapshot {
    fn is_there(&self, memory: &GuestMemoryMmap) -> bool {
        memory
            .read_obj::<u128>(self.entry.0)
            .is_ok_and(|now| now == self.entry.1)
            && memory
                .read_obj::<u16>(self.code.0)
                .is_ok_and(|now| now == self.code.1)
    }
}

/// Interception of the #GP handler for one vCPU, by a shared trap or by a breakpoint.
#[derive(Debug)]
pub struct GpHandlerInterception {
    memory: GuestMemoryMmap,
    symbols: Arc<CompressedKernelSymbols>,
    /// Trap shared by all vCPUs. `None` if a breakpoint is used instead.
    planted: Option<Arc<GpHandlerTrap>>,
    /// Instruction at which the breakpoint is set.
    breakpoint: Option<HandlerInstruction>,
    seen: Option<HandlerSnapshot>,
    /// Address of the last handler that could not be intercepted. Prevents a second log line for
    /// the same handler.
    rejected_handler: Option<u64>,
    /// Number of log lines written about the #GP handler, at most [`MAX_LOG_LINES`].
    log_lines: u32,
}

/// Result of [`GpHandlerInterception::intercept`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpHandlerCheckResult {
    /// The handler is unchanged, or there is no handler to intercept.
    Unchanged,
    /// The handler has changed. The value is the new breakpoint address if a breakpoint is used,
    /// otherwise `None`.
    Changed(Option<u64>),
}

impl GpHandlerInterception {
    /// Creates the interception with a trap shared by all vCPUs, or with a breakpoint of this vCPU
    /// if `planted` is `None`.
    pub fn new(
        planted: Option<Arc<GpHandlerTrap>>,
        memory: GuestMemoryMmap,
        symbols: Arc<CompressedKernelSymbols>,
    ) -> Self {
        Self {
            memory,
            symbols,
            planted,
            breakpoint: None,
            seen: None,
            rejected_handler: None,
            log_lines: 0,
        }
    }

    /// Returns `true` if the IDT's #GP gate or the handler code in memory has changed since the
    /// last check.
    #[inline]
    pub fn has_changed(&self) -> bool {
        self.seen.is_some_and(|seen| !seen.is_there(&self.memory))
    }

    /// Returns the trap that caused a port write, given the vCPU's `rip` at the exit.
    #[inline]
    pub fn planted_at(&self, rip: u64) -> Option<TriggeredHandlerTrap> {
        self.planted.as_ref()?.of(rip)
    }

    /// Returns `true` if a stop at `rip` is the breakpoint at the #GP handler.
    #[inline]
    pub fn breaks_at(&self, rip: u64) -> bool {
        self.breakpoint.is_some_and(|head| head.address == rip)
    }

    /// Locates the guest's #GP handler and intercepts it.
    pub fn intercept(&mut self, state: &VcpuState) -> GpHandlerCheckResult {
        self.seen = None;
        if !state.is_64bit() {
            return GpHandlerCheckResult::Unchanged;
        }
        let mut memory = LinearMemory::new(&self.memory, state);
        let Some(gate) = memory.gate(GENERAL_PROTECTION) else {
            return GpHandlerCheckResult::Unchanged;
        };
        let mut code = [0; 2 * MAX_INSTRUCTION_BYTES];
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
        let at = served.map_or(gate, |(head, _)| head.address);
        self.seen = self.snapshot(at, entry, state);
        let looked = match served {
            Some((_, false)) => return GpHandlerCheckResult::Unchanged,
            Some((head, true)) => {
                GpHandlerCheckResult::Changed(self.planted.is_none().then_some(head.address))
            }
            None => {
                if let Some(planted) = &self.planted {
                    planted.remove(&self.memory);
                }
                if self.rejected_handler.replace(gate) == Some(gate) {
                    return GpHandlerCheckResult::Unchanged;
                }
                GpHandlerCheckResult::Changed(None)
            }
        };
        if self.log_lines < MAX_LOG_LINES && log::log_enabled!(log::Level::Info) {
            self.log_lines += 1;
            let place = self.place(gate);
            if served.is_some() {
                log::info!("rdpmc in user mode and in modules: emulated at the guest's #GP handler, {place}");
            } else if other_ways {
                log::info!(
                    "rdpmc in user mode and in modules raises #GP: the guest uses shadow stacks or FRED"
                );
            } else {
                log::info!(
                    "rdpmc in user mode and in modules raises #GP: the guest's #GP handler, \
                    {place}, starts with {:02x?}",
                    &code[..code.len().min(8)]
                );
            }
        }
        looked
    }

    /// Reads the code at the linear address `at` and the IDT entry at `entry`.
    fn snapshot(&self, at: u64, entry: u64, state: &VcpuState) -> Option<HandlerSnapshot> {
        let mut memory = LinearMemory::new(&self.memory, state);
        let (code, entry) = memory.physical(at).zip(memory.physical(entry))?;
        let (code, entry) = (GuestAddress(code), GuestAddress(entry));
        Some(HandlerSnapshot {
            code: (code, self.memory.read_obj(code).ok()?),
            entry: (entry, self.memory.read_obj(entry).ok()?),
        })
    }

    fn place(&self, gate: u64) -> String {
        let symbols = self.symbols.unpack();
        match symbols.resolve_flat(gate) {
            Some((symbol, offset)) => format!("{}+{offset:#x}", symbol.name),
            None => format!("{gate:#x}"),
        }
    }

    /// Intercepts the handler at address `gate`, whose code is `code`. Returns the intercepted
    /// instruction and whether it differs from the previous one. Returns `None` if the handler
    /// cannot be intercepted.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "x86-64 only: usize has 64 bits; four at most"
    )]
    fn serve(&mut self, gate: u64, code: &[u8], state: &VcpuState) -> Option<(HandlerInstruction, bool)> {
        let Some(planted) = &self.planted else {
            let head = HandlerInstruction::of(gate, code)?;
            return Some((head, self.breakpoint.replace(head) != Some(head)));
        };
        let mut memory = LinearMemory::new(&self.memory, state);
        // The trap is placed on the first instruction, or on the second if the first is an ENDBR64
        // (4 bytes).
        for at in [gate, gate.wrapping_add(4)] {
            if code
                .get((at - gate) as usize..)
                .is_some_and(|c| c.starts_with(&TRAP))
                && let Some(gpa) = memory.physical(at).map(GuestAddress)
                && let Some(head) = planted.is_planted(gpa, &self.memory)
                && head.address == at
            {
                return Some((head, false));
            }
        }
        let head = HandlerInstruction::of(gate, code)?;
        let gpa = memory.physical(head.address).map(GuestAddress)?;
        let code = code.get((head.address - gate) as usize..)?;
        planted
            .plant(head, code, gpa, &self.memory)
            .then_some((head, true))
    }

    /// Determines why a vCPU stopped at the first instruction of the #GP handler. `replaced`
    /// returns the length of the RDPMC that a trap has replaced at a guest-physical address.
    #[expect(clippy::cast_possible_truncation, reason = "ECX")]
    pub fn stop_reason(
        &self,
        state: &VcpuState,
        replaced: impl FnOnce(u64) -> Option<u8>,
    ) -> GpHandlerStopReason {
        match FaultFrame::of_rdpmc(state, &mut LinearMemory::new(&self.memory, state), replaced) {
            Some(frame) => GpHandlerStopReason::Rdpmc(FaultedRdpmc {
                frame,
                index: state.regs.rcx as u32,
                cpl: frame.cpl(),
            }),
            None => GpHandlerStopReason::Handler,
        }
    }

    /// Emulates the handler instruction at `at` that the trap or breakpoint intercepted. Returns
    /// `None` if the instruction cannot be emulated because the guest's stack is not writable. If
    /// the trap has been removed in the meantime, the guest executes the restored instruction
    /// instead.
    pub fn enter_handler(&self, at: u64, state: &mut VcpuState) -> Option<()> {
        let head = match &self.planted {
            Some(planted) => planted.head(at),
            None => self.breakpoint.filter(|head| head.address == at),
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
