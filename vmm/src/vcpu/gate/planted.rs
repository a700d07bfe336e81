//! The exit at the beginning of the guest's handler of #GP: in the place of its first instruction.

use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use iced_x86::{Code, Decoder, DecoderOptions, Mnemonic};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileMemory};

use super::super::step::state::{Linear, State};
use kernel_images::rdpmc::{LONGEST, TRAP};

pub(super) const RFLAGS_DF: u64 = 1 << 10;
pub(super) const RFLAGS_AC: u64 = 1 << 18;

/// The instruction at the beginning of a handler whose place an exit takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Linear address. Behind an ENDBR64, which stays for indirect branch tracking.
    pub at: u64,
    /// Its length in bytes.
    pub(super) length: u8,
    /// What it does.
    pub(super) does: Does,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Does {
    /// Clears these flags.
    Clear(u64),
    /// Pushes this value.
    Push(i32),
}

impl Head {
    /// In `code`, which lies at `gate`, the first instruction that can be done without the processor.
    pub(super) fn of(gate: u64, code: &[u8]) -> Option<Self> {
        let mut decoder = Decoder::with_ip(64, code, gate, DecoderOptions::NONE);
        let mut first = decoder.decode();
        if first.code() == Code::Endbr64 {
            first = decoder.decode();
        }
        let does = match first.mnemonic() {
            Mnemonic::Nop => Does::Clear(0),
            Mnemonic::Clac => Does::Clear(RFLAGS_AC),
            Mnemonic::Cld => Does::Clear(RFLAGS_DF),
            Mnemonic::Push if first.code() == Code::Pushq_imm8 => Does::Push(first.immediate8to64() as i32),
            Mnemonic::Push if first.code() == Code::Pushq_imm32 => Does::Push(first.immediate32to64() as i32),
            _ => return None,
        };
        Some(Self {
            at: first.ip(),
            length: first.len() as u8,
            does,
        })
    }

    /// Does it. `None`: there is no memory to push to.
    pub(super) fn execute(self, state: &mut State, memory: &GuestMemoryMmap) -> Option<()> {
        match self.does {
            Does::Clear(flags) => state.regs.rflags &= !flags,
            Does::Push(value) => {
                let rsp = state.regs.rsp.wrapping_sub(8);
                let value = i64::from(value) as u64;
                let gpa = Linear::new(memory, state)
                    .physical(rsp)
                    .filter(|_| rsp.is_multiple_of(8))?;
                memory.write_obj(value, GuestAddress(gpa)).ok()?;
                state.regs.rsp = rsp;
            }
        }
        state.regs.rip = self.at.wrapping_add(self.length.into());
        Some(())
    }
}

/// Code at the place of an exit by which it is known again: the guest may have made other use of the memory meanwhile.
const WITNESS: usize = LONGEST + 1;

/// The exit in a VM's handler of #GP: one for all vCPUs, which share the code.
#[derive(Debug, Default)]
pub struct PlantedGate {
    /// Where it is; 0 for nowhere. Read at each port write that could be it, written once or twice in the life of a kernel.
    at: AtomicU64,
    /// Where it was before.
    left: AtomicU64,
    place: Mutex<Option<Place>>,
}

#[derive(Debug)]
struct Place {
    head: Head,
    gpa: GuestAddress,
    /// What stood there.
    code: u16,
    /// What stands there now, the exit and what follows it.
    with_exit: [u8; WITNESS],
}

/// Which exit a port write is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// The one in the handler, at this address.
    Here(u64),
    /// One that is gone: this address has its instruction again.
    Gone(u64),
}

impl PlantedGate {
    /// Which exit a port write that left the vCPU at `rip` is of. Some KVMs have stepped over it by then.
    #[inline]
    pub(super) fn of(&self, rip: u64) -> Option<Planted> {
        let is = |at: u64| at != 0 && (rip == at || rip == at.wrapping_add(TRAP.len() as u64));
        let at = self.at.load(Ordering::Acquire);
        if is(at) {
            return Some(Planted::Here(at));
        }
        let left = self.left.load(Ordering::Acquire);
        is(left).then_some(Planted::Gone(left))
    }

    /// The instruction whose place it takes.
    pub(super) fn head(&self) -> Option<Head> {
        self.place().as_ref().map(|place| place.head)
    }

    fn place(&self) -> std::sync::MutexGuard<'_, Option<Place>> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the exit is at `gpa`, and where in the handler.
    pub(super) fn is_planted(&self, gpa: GuestAddress, memory: &GuestMemoryMmap) -> Option<Head> {
        let place = self.place();
        let there = place.as_ref().filter(|place| place.gpa == gpa)?;
        memory
            .read_obj::<[u8; 2]>(gpa)
            .is_ok_and(|code| code == TRAP)
            .then_some(there.head)
    }

    /// Puts the exit in the place of `head`, whose bytes are `code`, at `gpa`; takes it away from where it was. False: it cannot be
    /// there.
    pub(super) fn plant(&self, head: Head, code: &[u8], gpa: GuestAddress, memory: &GuestMemoryMmap) -> bool {
        // Other vCPUs may execute this code: they see the old instruction or the exit, both whole.
        if usize::from(head.length) < TRAP.len() {
            return false;
        }
        // One vCPU at a time; what another has planted since `code` was read is not taken for the guest's.
        let mut place = self.place();
        let trap = u16::from_le_bytes(TRAP);
        if let Some(old) = place.as_ref()
            && old.head == head
            && old.gpa == gpa
            && memory
                .load::<u16>(gpa, Ordering::Acquire)
                .is_ok_and(|code| code == trap)
        {
            return true;
        }
        let mut there = [0; LONGEST];
        let there = &mut there[..usize::from(head.length)];
        if memory.read_slice(there, gpa).is_err() || !code.starts_with(there) {
            return false;
        }
        let was = u16::from_le_bytes([there[0], there[1]]);
        self.take_away(&mut place, memory);
        // Known before it can be executed.
        self.at.store(head.at, Ordering::Release);
        if !exchange(memory, gpa, was, trap) {
            self.at.store(0, Ordering::Release);
            return false;
        }
        let mut with_exit = [0; WITNESS];
        let _ = memory.read(&mut with_exit, gpa);
        *place = Some(Place {
            head,
            gpa,
            code: was,
            with_exit,
        });
        true
    }

    /// The guest's code is as it was before.
    pub(super) fn remove(&self, memory: &GuestMemoryMmap) {
        self.take_away(&mut self.place(), memory);
    }

    fn take_away(&self, place: &mut Option<Place>, memory: &GuestMemoryMmap) {
        let Some(old) = place.take() else { return };
        // A vCPU may be on its way from the exit to us.
        self.left.store(old.head.at, Ordering::Release);
        self.at.store(0, Ordering::Release);
        let mut there = [0; WITNESS];
        let _ = memory.read(&mut there, old.gpa);
        if there == old.with_exit {
            exchange(memory, old.gpa, u16::from_le_bytes(TRAP), old.code);
        }
    }
}

/// Replaces two bytes of code at once, if they are `from` still.
fn exchange(memory: &GuestMemoryMmap, gpa: GuestAddress, from: u16, to: u16) -> bool {
    memory.get_slice(gpa, TRAP.len()).is_ok_and(|slice| {
        slice.get_atomic_ref::<AtomicU16>(0).is_ok_and(|code| {
            code.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst)
                .is_ok()
        })
    })
}
