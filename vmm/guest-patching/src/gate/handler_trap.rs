//! Replaces the first instruction of the guest's #GP handler with a trap, which is a write to the
//! trap port.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use iced_x86::{Code, Decoder, DecoderOptions, Mnemonic};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileMemory};

use crate::finder::{MAX_INSTRUCTION_BYTES, TRAP};
use crate::linear_memory::LinearMemory;
use crate::registers::VcpuState;

pub(super) const RFLAGS_DF: u64 = 1 << 10;
pub(super) const RFLAGS_AC: u64 = 1 << 18;

/// First instruction of the guest's #GP handler, which a trap replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandlerInstruction {
    /// Guest linear address of the instruction. If the handler starts with ENDBR64, this is the
    /// address of the next instruction, because indirect branch tracking needs the ENDBR64.
    pub address: u64,
    pub(super) length: u8,
    /// Effect of the instruction, which the VMM emulates.
    pub(super) does: InstructionEffect,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InstructionEffect {
    /// The instruction clears the RFLAGS bits in this mask.
    Clear(u64),
    /// The instruction pushes this value onto the stack.
    Push(i32),
}

impl HandlerInstruction {
    /// Decodes the first instruction of the handler `code` at address `gate`. Returns `None` if the
    /// instruction cannot be emulated.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the decoder has extended what has 8 or 32 bits; an instruction has at most 15 bytes"
    )]
    pub(super) fn of(gate: u64, code: &[u8]) -> Option<Self> {
        let mut decoder = Decoder::with_ip(64, code, gate, DecoderOptions::NONE);
        let mut first = decoder.decode();
        if first.code() == Code::Endbr64 {
            first = decoder.decode();
        }
        let does = match first.mnemonic() {
            Mnemonic::Nop => InstructionEffect::Clear(0),
            Mnemonic::Clac => InstructionEffect::Clear(RFLAGS_AC),
            Mnemonic::Cld => InstructionEffect::Clear(RFLAGS_DF),
            Mnemonic::Push if first.code() == Code::Pushq_imm8 => {
                InstructionEffect::Push(first.immediate8to64() as i32)
            }
            Mnemonic::Push if first.code() == Code::Pushq_imm32 => {
                InstructionEffect::Push(first.immediate32to64() as i32)
            }
            _ => return None,
        };
        Some(Self {
            address: first.ip(),
            length: first.len() as u8,
            does,
        })
    }

    /// Emulates the instruction on `state`. Returns `None` if the instruction pushes a value and
    /// the stack is not writable.
    pub(super) fn execute(self, state: &mut VcpuState, memory: &GuestMemoryMmap) -> Option<()> {
        match self.does {
            InstructionEffect::Clear(flags) => state.regs.rflags &= !flags,
            InstructionEffect::Push(value) => {
                let rsp = state.regs.rsp.wrapping_sub(8);
                let value = i64::from(value).cast_unsigned();
                let gpa = LinearMemory::new(memory, &*state)
                    .physical(rsp)
                    .filter(|_| rsp.is_multiple_of(8))?;
                memory.write_obj(value, GuestAddress(gpa)).ok()?;
                state.regs.rsp = rsp;
            }
        }
        state.regs.rip = self.address.wrapping_add(self.length.into());
        Some(())
    }
}

/// Number of bytes, starting with the trap, that must be unchanged in guest memory before the trap
/// is removed. The guest may have reused the memory for other contents.
const COMPARED_BYTES: usize = MAX_INSTRUCTION_BYTES + 1;
/// Number of former trap addresses that are remembered. A kernel normally has one handler. If a
/// guest relocates its handler more often, port writes by older traps are treated as port writes of
/// the guest itself.
const MAX_FORMER_TRAPS: usize = 8;
/// Maximum number of attempts to replace the code bytes atomically while adjacent bytes are
/// changing.
const MAX_EXCHANGE_ATTEMPTS: u32 = 64;

/// Trap in the #GP handler of a VM. All vCPUs share the trap, because they share the handler code.
#[derive(Debug, Default)]
pub struct GpHandlerTrap {
    /// Guest linear address of the trap, or 0 if none is installed. Read on each port write that
    /// the trap may have caused, and written once or twice per kernel.
    at: AtomicU64,
    /// Guest linear addresses of former traps. Copied from [`TrapLocations`] for lookups without a
    /// lock.
    former_addresses: [AtomicU64; MAX_FORMER_TRAPS],
    places: Mutex<TrapLocations>,
}

#[derive(Debug, Default)]
struct TrapLocations {
    here: Option<TrapLocation>,
    former: [Option<FormerTrap>; MAX_FORMER_TRAPS],
    /// Index of the oldest entry of `former`. A former trap at a new address overwrites this entry.
    oldest: usize,
}

#[derive(Debug)]
struct TrapLocation {
    head: HandlerInstruction,
    gpa: GuestAddress,
    /// Original code bytes that the trap replaces.
    code: [u8; TRAP.len()],
    /// Code bytes after the trap was installed: the trap and the bytes after it.
    with_exit: [u8; COMPARED_BYTES],
}

/// A trap that was installed earlier and has since been removed, replaced or left behind.
#[derive(Clone, Copy, Debug)]
struct FormerTrap {
    head: HandlerInstruction,
    /// `true` if the trap is still in memory, because the bytes after it had changed when it was to
    /// be removed.
    is_in_memory: bool,
}

/// Trap in the #GP handler that caused a port write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TriggeredHandlerTrap {
    /// The installed trap at this address, or a former one that could not be removed.
    Installed(u64),
    /// A removed trap. The original instruction at this address has been restored.
    Removed(u64),
}

impl GpHandlerTrap {
    /// Returns the trap that caused a port write, given the vCPU's `rip` at the exit. Some KVM
    /// versions have already advanced RIP past the OUT instruction.
    #[inline]
    pub(super) fn of(&self, rip: u64) -> Option<TriggeredHandlerTrap> {
        let is = |at: u64| at != 0 && (rip == at || rip == at.wrapping_add(TRAP.len() as u64));
        let at = self.at.load(Ordering::Acquire);
        if is(at) {
            return Some(TriggeredHandlerTrap::Installed(at));
        }
        let mut left = self
            .former_addresses
            .iter()
            .map(|left| left.load(Ordering::Acquire));
        let at = left.find(|left| is(*left))?;
        let stands = self.places().former(at).is_some_and(|former| former.is_in_memory);
        Some(if stands {
            TriggeredHandlerTrap::Installed(at)
        } else {
            TriggeredHandlerTrap::Removed(at)
        })
    }

    /// Returns the instruction that the trap at `at` replaces, or `None` if the trap was removed.
    pub(super) fn head(&self, at: u64) -> Option<HandlerInstruction> {
        let places = self.places();
        let here = places.here.as_ref().map(|place| place.head);
        here.filter(|head| head.address == at)
            .or_else(|| Some(places.former(at).filter(|former| former.is_in_memory)?.head))
    }

    fn places(&self) -> std::sync::MutexGuard<'_, TrapLocations> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the replaced instruction if the trap is installed at `gpa`.
    pub(super) fn is_planted(
        &self,
        gpa: GuestAddress,
        memory: &GuestMemoryMmap,
    ) -> Option<HandlerInstruction> {
        let places = self.places();
        let there = places.here.as_ref().filter(|place| place.gpa == gpa)?;
        memory
            .read_obj::<[u8; 2]>(gpa)
            .is_ok_and(|code| code == TRAP)
            .then_some(there.head)
    }

    /// Installs the trap at `gpa` in place of the handler instruction `head`, and removes the
    /// previous trap. `code` is the handler's code from `head` on. Returns `false` if the trap
    /// cannot be installed.
    pub(super) fn plant(
        &self,
        head: HandlerInstruction,
        code: &[u8],
        gpa: GuestAddress,
        memory: &GuestMemoryMmap,
    ) -> bool {
        // Other vCPUs may execute this code concurrently. The trap must lie within one instruction,
        // so that each vCPU sees either the whole instruction or the whole trap.
        if usize::from(head.length) < TRAP.len() {
            return false;
        }
        // The lock ensures that no vCPU saves the trap of another vCPU as the guest's code.
        let mut places = self.places();
        if let Some(old) = &places.here
            && old.head == head
            && old.gpa == gpa
            && memory.read_obj::<[u8; 2]>(gpa).is_ok_and(|code| code == TRAP)
        {
            return true;
        }
        let mut there = [0; MAX_INSTRUCTION_BYTES];
        let there = &mut there[..usize::from(head.length)];
        if memory.read_slice(there, gpa).is_err() || !code.starts_with(there) {
            return false;
        }
        let was = [there[0], there[1]];
        self.remove_locked(&mut places, memory);
        // The address must be visible before a vCPU can execute the trap.
        self.at.store(head.address, Ordering::Release);
        if !exchange(memory, gpa, was, TRAP) {
            self.at.store(0, Ordering::Release);
            return false;
        }
        let mut with_exit = [0; COMPARED_BYTES];
        let _ = memory.read(&mut with_exit, gpa);
        places.here = Some(TrapLocation {
            head,
            gpa,
            code: was,
            with_exit,
        });
        true
    }

    /// Removes the trap and restores the guest's code.
    pub(super) fn remove(&self, memory: &GuestMemoryMmap) {
        self.remove_locked(&mut self.places(), memory);
    }

    /// Removes the trap for a snapshot, because the memory of a snapshot must not contain VMM code.
    /// No vCPU may be running. Returns `false` if a trap remains in memory.
    pub fn remove_for_snapshot(&self, memory: &GuestMemoryMmap) -> bool {
        let mut places = self.places();
        self.remove_locked(&mut places, memory);
        let former = places.former.iter().flatten();
        former.filter(|former| former.is_in_memory).count() == 0
    }

    /// Removes the trap, unless the bytes after it have changed and the memory may no longer
    /// contain code. A trap that remains in memory is still emulated when a vCPU executes it.
    fn remove_locked(&self, places: &mut TrapLocations, memory: &GuestMemoryMmap) {
        let Some(old) = places.here.take() else { return };
        let mut there = [0; COMPARED_BYTES];
        let _ = memory.read(&mut there, old.gpa);
        let stands = if there == old.with_exit {
            !exchange(memory, old.gpa, TRAP, old.code)
        } else {
            there.starts_with(&TRAP)
        };
        // Remembers the trap, because a vCPU may have executed it but not yet exited.
        let slot = places.leave(FormerTrap {
            head: old.head,
            is_in_memory: stands,
        });
        self.former_addresses[slot].store(old.head.address, Ordering::Release);
        self.at.store(0, Ordering::Release);
    }
}

impl TrapLocations {
    fn former(&self, at: u64) -> Option<FormerTrap> {
        self.former
            .into_iter()
            .flatten()
            .find(|former| former.head.address == at)
    }

    /// Records a former trap in the entry with the same address, or else in the oldest entry.
    /// Returns the index of the entry.
    fn leave(&mut self, place: FormerTrap) -> usize {
        let same = |former: &Option<FormerTrap>| {
            former.is_some_and(|former| former.head.address == place.head.address)
        };
        let slot = self.former.iter().position(same).unwrap_or_else(|| {
            let oldest = self.oldest;
            self.oldest = (oldest + 1) % MAX_FORMER_TRAPS;
            oldest
        });
        self.former[slot] = Some(place);
        slot
    }
}

/// Atomically replaces the two code bytes `from` by `to`. Returns `false` if memory contains other
/// bytes, or if the two bytes cross an 8-byte boundary, where no processor guarantees an atomic
/// write.
fn exchange(memory: &GuestMemoryMmap, gpa: GuestAddress, from: [u8; 2], to: [u8; 2]) -> bool {
    let at = (gpa.0 % 8) as usize;
    let pair = at..at + TRAP.len();
    if pair.end > 8 {
        return false;
    }
    let word = GuestAddress(gpa.0 - at as u64);
    memory.get_slice(word, 8).is_ok_and(|slice| {
        slice.get_atomic_ref::<AtomicU64>(0).is_ok_and(|word| {
            let mut there = word.load(Ordering::SeqCst);
            for _ in 0..MAX_EXCHANGE_ATTEMPTS {
                let mut bytes = there.to_le_bytes();
                if bytes[pair.clone()] != from {
                    return false;
                }
                bytes[pair.clone()].copy_from_slice(&to);
                let new = u64::from_le_bytes(bytes);
                match word.compare_exchange(there, new, Ordering::SeqCst, Ordering::SeqCst) {
                    Ok(_) => return true,
                    Err(now) => there = now,
                }
            }
            false
        })
    })
}
