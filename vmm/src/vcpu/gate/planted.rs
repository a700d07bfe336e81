//! The exit at the beginning of the guest's handler of #GP: in the place of its first instruction.

use std::sync::atomic::{AtomicU64, Ordering};
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
                let value = i64::from(value).cast_unsigned();
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

/// Code at the place of an exit by which it is known again: the guest may have made other use of the memory
/// meanwhile.
const WITNESS: usize = LONGEST + 1;
/// Former places that are remembered. A kernel has one handler for its life; a guest that moves it all the
/// time has to do with its own port writes beyond that.
const FORMER: usize = 8;
/// Times an exchange is tried again because the bytes beside it have changed meanwhile.
const EXCHANGES: u32 = 64;

/// The exit in a VM's handler of #GP: one for all vCPUs, which share the code.
#[derive(Debug, Default)]
pub struct PlantedGate {
    /// Where it is; 0 for nowhere. Read at each port write that could be it, written once or twice in the
    /// life of a kernel.
    at: AtomicU64,
    /// Where it was before, of which [`Places`] has more.
    left: [AtomicU64; FORMER],
    places: Mutex<Places>,
}

#[derive(Debug, Default)]
struct Places {
    here: Option<Place>,
    former: [Option<Former>; FORMER],
    /// Which of these is the oldest.
    oldest: usize,
}

#[derive(Debug)]
struct Place {
    head: Head,
    gpa: GuestAddress,
    /// What stood there.
    code: [u8; TRAP.len()],
    /// What stands there now, the exit and what follows it.
    with_exit: [u8; WITNESS],
}

/// Where an exit was.
#[derive(Clone, Copy, Debug)]
struct Former {
    head: Head,
    /// It still stands there, because what follows it has changed: that may be code or not.
    stands: bool,
}

/// Which exit a port write is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// One in a handler, at this address: where it is planted, or where it had to be left.
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
        let mut left = self.left.iter().map(|left| left.load(Ordering::Acquire));
        let at = left.find(|left| is(*left))?;
        let stands = self.places().former(at).is_some_and(|former| former.stands);
        Some(if stands {
            Planted::Here(at)
        } else {
            Planted::Gone(at)
        })
    }

    /// The instruction whose place the exit at `at` takes. `None`: there is none any more.
    pub(super) fn head(&self, at: u64) -> Option<Head> {
        let places = self.places();
        let here = places.here.as_ref().map(|place| place.head);
        here.filter(|head| head.at == at)
            .or_else(|| Some(places.former(at).filter(|former| former.stands)?.head))
    }

    fn places(&self) -> std::sync::MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the exit is at `gpa`, and where in the handler.
    pub(super) fn is_planted(&self, gpa: GuestAddress, memory: &GuestMemoryMmap) -> Option<Head> {
        let places = self.places();
        let there = places.here.as_ref().filter(|place| place.gpa == gpa)?;
        memory
            .read_obj::<[u8; 2]>(gpa)
            .is_ok_and(|code| code == TRAP)
            .then_some(there.head)
    }

    /// Puts the exit in the place of `head`, whose bytes are `code`, at `gpa`; takes it away from where it
    /// was. False: it cannot be there.
    pub(super) fn plant(&self, head: Head, code: &[u8], gpa: GuestAddress, memory: &GuestMemoryMmap) -> bool {
        // Other vCPUs may execute this code: they see the old instruction or the exit, both whole.
        if usize::from(head.length) < TRAP.len() {
            return false;
        }
        // One vCPU at a time; what another has planted since `code` was read is not taken for the guest's.
        let mut places = self.places();
        if let Some(old) = &places.here
            && old.head == head
            && old.gpa == gpa
            && memory.read_obj::<[u8; 2]>(gpa).is_ok_and(|code| code == TRAP)
        {
            return true;
        }
        let mut there = [0; LONGEST];
        let there = &mut there[..usize::from(head.length)];
        if memory.read_slice(there, gpa).is_err() || !code.starts_with(there) {
            return false;
        }
        let was = [there[0], there[1]];
        self.take_away(&mut places, memory);
        // Known before it can be executed.
        self.at.store(head.at, Ordering::Release);
        if !exchange(memory, gpa, was, TRAP) {
            self.at.store(0, Ordering::Release);
            return false;
        }
        let mut with_exit = [0; WITNESS];
        let _ = memory.read(&mut with_exit, gpa);
        places.here = Some(Place {
            head,
            gpa,
            code: was,
            with_exit,
        });
        true
    }

    /// The guest's code is as it was before.
    pub(super) fn remove(&self, memory: &GuestMemoryMmap) {
        self.take_away(&mut self.places(), memory);
    }

    /// Where what follows the exit has changed, memory may have other contents than code by now, and the exit
    /// is left as it is. If it is code all the same, as when a guest rewrites its handler behind the first
    /// instruction, the exit goes on to be served.
    fn take_away(&self, places: &mut Places, memory: &GuestMemoryMmap) {
        let Some(old) = places.here.take() else { return };
        let mut there = [0; WITNESS];
        let _ = memory.read(&mut there, old.gpa);
        let stands = if there == old.with_exit {
            !exchange(memory, old.gpa, TRAP, old.code)
        } else {
            there.starts_with(&TRAP)
        };
        // A vCPU may be on its way from the exit to us.
        let slot = places.leave(Former {
            head: old.head,
            stands,
        });
        self.left[slot].store(old.head.at, Ordering::Release);
        self.at.store(0, Ordering::Release);
    }
}

impl Places {
    fn former(&self, at: u64) -> Option<Former> {
        self.former
            .into_iter()
            .flatten()
            .find(|former| former.head.at == at)
    }

    /// Remembers it, in the place of the same address or of the oldest.
    fn leave(&mut self, place: Former) -> usize {
        let same = |former: &Option<Former>| former.is_some_and(|former| former.head.at == place.head.at);
        let slot = self.former.iter().position(same).unwrap_or_else(|| {
            let oldest = self.oldest;
            self.oldest = (oldest + 1) % FORMER;
            oldest
        });
        self.former[slot] = Some(place);
        slot
    }
}

/// Replaces two bytes of code at once, if they are `from` still. False also where they lie in two words of
/// eight bytes: no processor writes those at once for sure.
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
            for _ in 0..EXCHANGES {
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
