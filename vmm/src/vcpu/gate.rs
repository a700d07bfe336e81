//! RDPMC that was not there when the guest was loaded: in programs, in modules, in code made at run time.
//!
//! The processor answers it with #GP, as does KVM whose own PMU is off. So the guest's handler of #GP gets an exit at its
//! beginning: the port write that stands for RDPMC, in place of the first instruction, or with `--rdpmc hwbp` a breakpoint. If what
//! faulted is an RDPMC that the guest may execute, the guest goes on behind it with the count and never sees the fault. Any other fault
//! goes on in the handler, the instruction at its beginning done here.
//!
//! Where the handler is, the interrupt descriptor table says. It is looked at when the guest writes PMU registers: at the first, second,
//! fourth, eighth … write of a vCPU, and at each 4,096th.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use iced_x86::{Code, Decoder, DecoderOptions, Mnemonic};
use kvm_bindings::{kvm_segment, kvm_sregs};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::exact::GuestMemory;

use super::step::state::{Linear, State};
use crate::boot::SymbolTable;
use crate::rdpmc::{RDPMC, TRAP};

/// #GP (SDM vol. 3 §6.15).
const GENERAL_PROTECTION: u8 = 13;
/// After as many writes of PMU registers the gate is looked at again.
const LOOKS_EVERY: u32 = 4096;
/// How often the exit is moved to another handler. A kernel has one while it starts and another later; more are a game.
const MOST_MOVES: u32 = 64;
/// Lines a vCPU writes to the log about it.
const MOST_LINES: u32 = 16;
/// Longest instruction (SDM vol. 2 §2.3.11).
const LONGEST: usize = 15;
const RFLAGS_DF: u64 = 1 << 10;
const RFLAGS_AC: u64 = 1 << 18;
/// The flags that 64-bit code may return to: all that are defined but RF and VM (SDM vol. 3 §2.3). Bit 1 is always set.
const RFLAGS_RETURNED: u64 = 0x3c_7fd5;
const RFLAGS_ONE: u64 = 1 << 1;
/// CR4.LA57: linear addresses of 57 bits (SDM vol. 3 §2.5).
const CR4_LA57: u64 = 1 << 12;

/// The instruction at the beginning of a handler whose place an exit takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Linear address. Behind an ENDBR64, which stays for indirect branch tracking.
    pub at: u64,
    /// Its bytes.
    length: u8,
    /// What it does.
    does: Does,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    /// Clears these flags.
    Clear(u64),
    /// Pushes this value.
    Push(i32),
}

impl Head {
    /// In `code`, which lies at `gate`, the first instruction that can be done without the processor.
    fn of(gate: u64, code: &[u8]) -> Option<Self> {
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
    fn execute(self, state: &mut State, memory: &GuestMemoryMmap) -> Option<()> {
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

/// What the processor pushed when it entered the handler of #GP from 64-bit or compatibility mode (SDM vol. 3 §6.14.2).
#[derive(Clone, Copy, Debug)]
struct Frame {
    rip: u64,
    rflags: u64,
    rsp: u64,
    /// Those of the code that faulted.
    cs: kvm_segment,
    ss: kvm_segment,
}

impl Frame {
    /// The frame of a fault at an RDPMC, with the vCPU at the first instruction of the handler. `None`: of another fault, or of code
    /// whose segments are not what they should be.
    fn of_rdpmc(state: &State, memory: &mut Linear<'_>) -> Option<Self> {
        if !state.is_64bit() || state.cpl() != 0 {
            return None;
        }
        let mut pushed = [0u64; 6];
        for (n, quad) in pushed.iter_mut().enumerate() {
            *quad = memory.quad(state.regs.rsp.wrapping_add(8 * n as u64))?;
        }
        let [error, rip, cs, rflags, rsp, ss] = pushed;
        if error != 0 {
            return None;
        }
        let (cs, ss) = match cs as u16 {
            same if same == state.sregs.cs.selector => (state.sregs.cs, state.sregs.ss),
            cs if cs & 3 == 3 => (
                segment(&state.sregs, cs, memory).filter(is_user_code)?,
                segment(&state.sregs, ss as u16, memory).filter(is_user_data)?,
            ),
            _ => return None,
        };
        let linear = if cs.l == 0 { cs.base.wrapping_add(rip) } else { rip };
        let behind = rip.wrapping_add(RDPMC.len() as u64);
        let mut code = [0; RDPMC.len()];
        let is_rdpmc = memory.read(linear, &mut code) == code.len() && code == RDPMC;
        // Going on at no address at all would be the end of the VM, and a program must not bring that about.
        (is_rdpmc && (cs.l == 0 || is_canonical(behind, &state.sregs))).then_some(Self {
            rip,
            rflags,
            rsp,
            cs,
            ss,
        })
    }

    fn cpl(&self) -> u8 {
        self.cs.selector as u8 & 3
    }

    /// Goes on behind the RDPMC, which gave `value`.
    fn resume(&self, value: u64, state: &mut State) {
        let behind = self.rip.wrapping_add(RDPMC.len() as u64);
        state.regs.rip = if self.cs.l == 0 {
            behind & 0xffff_ffff
        } else {
            behind
        };
        state.regs.rflags = self.rflags & RFLAGS_RETURNED | RFLAGS_ONE;
        state.regs.rsp = self.rsp;
        state.regs.rax = value & 0xffff_ffff;
        state.regs.rdx = value >> 32;
        state.sregs.cs = self.cs;
        state.sregs.ss = self.ss;
    }
}

/// The upper bits repeat the highest one that is translated (SDM vol. 1 §3.3.7.1).
fn is_canonical(address: u64, sregs: &kvm_sregs) -> bool {
    let unused = if sregs.cr4 & CR4_LA57 != 0 {
        64 - 57
    } else {
        64 - 48
    };
    ((address << unused) as i64) >> unused == address as i64
}

/// L and D together are reserved (SDM vol. 3 §5.2.1).
fn is_user_code(segment: &kvm_segment) -> bool {
    segment.dpl == 3 && segment.type_ & 8 != 0 && (segment.l == 0 || segment.db == 0)
}

fn is_user_data(segment: &kvm_segment) -> bool {
    segment.dpl == 3 && segment.selector & 3 == 3 && segment.type_ & 0xa == 2
}

/// The code or data segment that `selector` names (SDM vol. 3 §3.4.5).
fn segment(sregs: &kvm_sregs, selector: u16, memory: &mut Linear<'_>) -> Option<kvm_segment> {
    let (base, limit) = if selector & 4 == 0 {
        (sregs.gdt.base, u32::from(sregs.gdt.limit))
    } else {
        (sregs.ldt.base, sregs.ldt.limit)
    };
    let offset = u32::from(selector & !7);
    if offset == 0 && selector & 4 == 0 || offset + 7 > limit {
        return None;
    }
    let raw = memory.quad(base.wrapping_add(offset.into()))?;
    let bit = |n: u32| (raw >> n & 1) as u8;
    if bit(44) == 0 || bit(47) == 0 {
        return None;
    }
    let limit = (raw & 0xffff | raw >> 32 & 0xf_0000) as u32;
    Some(kvm_segment {
        base: raw >> 16 & 0xff_ffff | raw >> 32 & 0xff00_0000,
        limit: if bit(55) == 1 { limit << 12 | 0xfff } else { limit },
        selector,
        // A segment in use has been accessed.
        type_: (raw >> 40 & 0xf) as u8 | 1,
        present: 1,
        dpl: (raw >> 45 & 3) as u8,
        db: bit(54),
        s: 1,
        l: bit(53),
        g: bit(55),
        avl: bit(52),
        ..Default::default()
    })
}

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
}

/// The exit in a VM's handler of #GP: one for all vCPUs, which share the code.
#[derive(Debug, Default)]
pub struct PlantedGate {
    /// Where it is; 0 for nowhere. Read at each RDPMC, written once or twice in the life of a guest.
    at: AtomicU64,
    place: Mutex<Place>,
}

#[derive(Debug, Default)]
struct Place {
    head: Option<Head>,
    gpa: GuestAddress,
    /// What stood there.
    code: u16,
    moves: u32,
}

impl PlantedGate {
    /// Whether a port write that left the vCPU at `rip` is the handler's. Some KVMs have stepped over it by then.
    #[inline]
    fn is_at(&self, rip: u64) -> bool {
        let at = self.at.load(Ordering::Acquire);
        at != 0 && rip.wrapping_sub(at) <= TRAP.len() as u64
    }

    fn head(&self) -> Option<Head> {
        self.place().head
    }

    fn place(&self) -> std::sync::MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts the exit in the place of `head` at `gpa`. False: it cannot be there.
    fn plant(&self, head: Head, gpa: GuestAddress, memory: &GuestMemoryMmap) -> bool {
        // Other vCPUs may execute this code: they see the old instruction or the exit, both whole.
        if usize::from(head.length) < TRAP.len() {
            return false;
        }
        let mut place = self.place();
        let Ok(code) = memory.load::<u16>(gpa, Ordering::Relaxed) else {
            return false;
        };
        let trap = u16::from_le_bytes(TRAP);
        if let Some(old) = place.head
            && old.at != head.at
        {
            if place.moves == MOST_MOVES {
                return false;
            }
            place.moves += 1;
            if memory
                .load::<u16>(place.gpa, Ordering::Relaxed)
                .is_ok_and(|code| code == trap)
            {
                let _ = memory.store(place.code, place.gpa, Ordering::Relaxed);
            }
        }
        *place = Place {
            head: Some(head),
            gpa,
            code,
            moves: place.moves,
        };
        self.at.store(head.at, Ordering::Release);
        memory.store(trap, gpa, Ordering::SeqCst).is_ok()
    }
}

/// One vCPU's look at its handler of #GP.
#[derive(Debug)]
pub struct Gate {
    memory: GuestMemoryMmap,
    symbols: Arc<SymbolTable>,
    /// `None`: by a breakpoint.
    planted: Option<Arc<PlantedGate>>,
    /// Where the breakpoint is.
    breakpoint: Option<Head>,
    writes: u32,
    due: bool,
    /// A handler that was found unfit, so that it is said once.
    unfit: Option<u64>,
    /// Lines written to the log.
    said: u32,
}

impl Gate {
    /// By an exit that all vCPUs share, or (`None`) by a breakpoint of this one.
    pub fn new(
        planted: Option<Arc<PlantedGate>>,
        memory: GuestMemoryMmap,
        symbols: Arc<SymbolTable>,
    ) -> Self {
        Self {
            memory,
            symbols,
            planted,
            breakpoint: None,
            writes: 0,
            due: false,
            unfit: None,
            said: 0,
        }
    }

    /// The guest has written a PMU register.
    #[inline]
    pub fn wrote(&mut self) {
        self.writes = self.writes.wrapping_add(1);
        self.due |= self.writes.is_power_of_two() || self.writes.is_multiple_of(LOOKS_EVERY);
    }

    /// Whether it is time for [`Gate::look`].
    #[inline]
    pub fn is_due(&self) -> bool {
        self.due
    }

    /// Whether an exit or a breakpoint with the vCPU at `rip` is that in the handler.
    #[inline]
    pub fn is_at(&self, rip: u64) -> bool {
        match &self.planted {
            Some(planted) => planted.is_at(rip),
            None => self.breakpoint.is_some_and(|head| head.at == rip),
        }
    }

    /// Looks where the handler is. Returns where a breakpoint is to be from now on, if that is new.
    pub fn look(&mut self, state: &State) -> Option<u64> {
        self.due = false;
        if !state.is_64bit() {
            return None;
        }
        let mut memory = Linear::new(&self.memory, state);
        let gate = memory.gate(GENERAL_PROTECTION)?;
        let mut code = [0; 2 * LONGEST];
        let readable = memory.read(gate, &mut code);
        if let Some(planted) = &self.planted
            && let Some(head) = planted.head()
            && (gate..gate.saturating_add(8)).contains(&head.at)
            && code[..readable]
                .get((head.at - gate) as usize..)
                .is_some_and(|c| c.starts_with(&TRAP))
        {
            return None;
        }
        let fit = Head::of(gate, &code[..readable]).and_then(|head| match &self.planted {
            Some(planted) => {
                let gpa = memory.physical(head.at).map(GuestAddress)?;
                planted.plant(head, gpa, &self.memory).then_some(head)
            }
            None => Some(head),
        });
        let place = || match self.symbols.lookup(gate) {
            Some((name, offset)) => format!("{name}+{offset:#x}"),
            None => format!("{gate:#x}"),
        };
        let may_say = self.said < MOST_LINES;
        let Some(head) = fit else {
            if self.unfit.replace(gate) != Some(gate) && may_say {
                self.said += 1;
                log::info!(
                    "rdpmc in user mode and in modules raises #GP: the guest's handler of it, {}, begins with {:02x?}",
                    place(),
                    &code[..readable.min(8)]
                );
            }
            return None;
        };
        if self.planted.is_none() && self.breakpoint.replace(head) == Some(head) {
            return None;
        }
        if may_say {
            self.said += 1;
            log::info!(
                "rdpmc in user mode and in modules: served at the guest's handler of #GP, {}",
                place()
            );
        }
        self.planted.is_none().then_some(head.at)
    }

    /// What a vCPU that stopped at the handler is there for.
    pub fn stopped(&self, state: &State) -> Stopped {
        match Frame::of_rdpmc(state, &mut Linear::new(&self.memory, state)) {
            Some(frame) => Stopped::Rdpmc(Answer {
                frame,
                index: state.regs.rcx as u32,
                cpl: frame.cpl(),
            }),
            None => Stopped::Handler,
        }
    }

    /// Does the instruction that the exit or breakpoint stopped before. `None`: it cannot be done, and the guest has lost its stack.
    pub fn enter_handler(&self, state: &mut State) -> Option<()> {
        let head = match &self.planted {
            Some(planted) => planted.head(),
            None => self.breakpoint,
        };
        head?.execute(state, &self.memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GATE: u64 = 0x3000;
    const IDT: u64 = 0x1000;
    const GDT: u64 = 0x2000;
    const USER_CODE: u64 = 0x5000;
    const STACK: u64 = 0x8000;
    const KERNEL_CS: u16 = 0x10;
    const USER_CS: u16 = 0x33;
    const USER_SS: u16 = 0x2b;

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap()
    }

    /// A vCPU in 64-bit code at CPL 0, with linear addresses as physical ones, and the tables of a kernel.
    fn kernel(memory: &GuestMemoryMmap) -> State {
        let mut state = State {
            regs: Default::default(),
            sregs: Default::default(),
        };
        state.sregs.cr0 = 1;
        state.sregs.efer = 1 << 10;
        state.sregs.cs.l = 1;
        state.sregs.cs.selector = KERNEL_CS;
        (state.sregs.idt.base, state.sregs.idt.limit) = (IDT, 0xfff);
        (state.sregs.gdt.base, state.sregs.gdt.limit) = (GDT, 0x7f);
        let gate = u128::from(GATE) & 0xffff | u128::from(KERNEL_CS) << 16 | 0x8e << 40;
        memory
            .write_obj(gate, GuestAddress(IDT + 16 * u64::from(GENERAL_PROTECTION)))
            .unwrap();
        // 64-bit code and data of CPL 3.
        memory
            .write_obj(
                0x00af_fb00_0000_ffffu64,
                GuestAddress(GDT + u64::from(USER_CS & !7)),
            )
            .unwrap();
        memory
            .write_obj(
                0x00cf_f300_0000_ffffu64,
                GuestAddress(GDT + u64::from(USER_SS & !7)),
            )
            .unwrap();
        state
    }

    /// Enters the handler for a fault of `cs:rip`.
    fn fault(memory: &GuestMemoryMmap, state: &mut State, cs: u16, ss: u16, rip: u64) {
        let frame = [0, rip, cs.into(), 0xffc3_0246, 0x7ff0, ss.into()];
        state.regs.rsp = STACK;
        state.regs.rip = GATE;
        for (n, quad) in frame.iter().enumerate() {
            memory
                .write_obj(*quad, GuestAddress(STACK + 8 * n as u64))
                .unwrap();
        }
    }

    /// As Linux's: ENDBR64 where the kernel is built with indirect branch tracking, CLAC or the padding in its place, CLD.
    #[test]
    fn beginnings_of_handlers_are_known() {
        let of = |code: &[u8]| Head::of(GATE, code).map(|head| (head.at - GATE, head.length, head.does));
        assert_eq!(
            of(&[0x0f, 0x01, 0xca, 0xfc]),
            Some((0, 3, Does::Clear(RFLAGS_AC)))
        );
        assert_eq!(
            of(&[0xf3, 0x0f, 0x1e, 0xfa, 0x0f, 0x1f, 0x00, 0xfc]),
            Some((4, 3, Does::Clear(0)))
        );
        assert_eq!(of(&[0x90, 0x90, 0x90]), Some((0, 1, Does::Clear(0))));
        assert_eq!(of(&[0xfc, 0xe8]), Some((0, 1, Does::Clear(RFLAGS_DF))));
        assert_eq!(of(&[0x6a, 0x0d, 0xeb, 0]), Some((0, 2, Does::Push(13))));
        assert_eq!(of(&[0x6a, 0xff]), Some((0, 2, Does::Push(-1))));
        assert_eq!(of(&[0x68, 0, 0, 0, 0x80]), Some((0, 5, Does::Push(i32::MIN))));
        // call; push rax; sub rsp, 8; nothing.
        for unfit in [&[0xe8, 0, 0, 0, 0][..], &[0x50], &[0x48, 0x83, 0xec, 8], &[]] {
            assert_eq!(of(unfit), None, "{unfit:x?}");
        }
    }

    /// The exit takes the place of one whole instruction, is found again, and is not put over itself.
    #[test]
    fn the_exit_is_planted_once_and_again_when_the_guest_rewrites_its_code() {
        let memory = memory();
        let state = kernel(&memory);
        let planted = Arc::new(PlantedGate::default());
        let mut gate = Gate::new(Some(planted.clone()), memory.clone(), Arc::default());
        let clac = [0xf3, 0x0f, 0x1e, 0xfa, 0x0f, 0x01, 0xca, 0xfc];
        for _ in 0..2 {
            memory.write_slice(&clac, GuestAddress(GATE)).unwrap();
            for _ in 0..2 {
                assert_eq!(gate.look(&state), None);
                let code: [u8; 8] = memory.read_obj(GuestAddress(GATE)).unwrap();
                assert_eq!(code, [0xf3, 0x0f, 0x1e, 0xfa, TRAP[0], TRAP[1], 0xca, 0xfc]);
            }
        }
        assert!(gate.is_at(GATE + 4) && gate.is_at(GATE + 6));
        assert!(!gate.is_at(GATE) && !gate.is_at(GATE + 7));
        let mut at = state;
        at.regs.rflags = RFLAGS_AC | 2;
        gate.enter_handler(&mut at).unwrap();
        assert_eq!((at.regs.rip, at.regs.rflags), (GATE + 7, 2));
        // Another vCPU, another handler: the code of the first is whole again.
        memory
            .write_slice(&[0x6a, 13, 0x90], GuestAddress(0x6000))
            .unwrap();
        let entry = u128::from(0x6000u16) | u128::from(KERNEL_CS) << 16 | 0x8e << 40;
        memory
            .write_obj(entry, GuestAddress(IDT + 16 * u64::from(GENERAL_PROTECTION)))
            .unwrap();
        Gate::new(Some(planted), memory.clone(), Arc::default()).look(&state);
        assert_eq!(memory.read_obj::<[u8; 8]>(GuestAddress(GATE)).unwrap(), clac);
        assert!(gate.is_at(0x6000));
        at.regs.rsp = STACK;
        gate.enter_handler(&mut at).unwrap();
        assert_eq!((at.regs.rip, at.regs.rsp), (0x6002, STACK - 8));
        assert_eq!(memory.read_obj::<u64>(GuestAddress(STACK - 8)).unwrap(), 13);
    }

    /// Code that other vCPUs may be in the middle of is not replaced; a breakpoint needs no room.
    #[test]
    fn two_instructions_are_not_replaced_by_one() {
        let memory = memory();
        let state = kernel(&memory);
        let code = [0x90, 0x90, 0x90, 0x90];
        memory.write_slice(&code, GuestAddress(GATE)).unwrap();
        let mut gate = Gate::new(Some(Arc::default()), memory.clone(), Arc::default());
        assert_eq!(gate.look(&state), None);
        assert_eq!(memory.read_obj::<[u8; 4]>(GuestAddress(GATE)).unwrap(), code);
        assert!(!gate.is_at(GATE));
        let mut gate = Gate::new(None, memory.clone(), Arc::default());
        assert_eq!(gate.look(&state), Some(GATE));
        assert_eq!(gate.look(&state), None, "it is there already");
        assert!(gate.is_at(GATE) && !gate.is_at(GATE + 2));
        assert_eq!(memory.read_obj::<[u8; 4]>(GuestAddress(GATE)).unwrap(), code);
    }

    /// A guest that has its handlers dance is served no more, and nothing grows.
    #[test]
    fn moves_are_bounded() {
        let memory = memory();
        let planted = PlantedGate::default();
        let head = |at| Head {
            at,
            length: 2,
            does: Does::Clear(0),
        };
        let fits = (0..1000)
            .filter(|n| {
                planted.plant(
                    head(GATE + 16 * (n % 2)),
                    GuestAddress(GATE + 16 * (n % 2)),
                    &memory,
                )
            })
            .count();
        assert_eq!(
            fits as u32,
            MOST_MOVES + 1 + (1000 - MOST_MOVES - 1).div_ceil(2) - 1
        );
    }

    /// A program gets its count and goes on with its own segments, flags and stack.
    #[test]
    fn a_program_goes_on_behind_its_rdpmc() {
        let memory = memory();
        let mut state = kernel(&memory);
        let gate = Gate::new(Some(Arc::default()), memory.clone(), Arc::default());
        memory.write_slice(&RDPMC, GuestAddress(USER_CODE)).unwrap();
        fault(&memory, &mut state, USER_CS, USER_SS, USER_CODE);
        state.regs.rcx = 0x1_4000_0001;
        let Stopped::Rdpmc(answer) = gate.stopped(&state) else {
            panic!("not seen")
        };
        assert_eq!((answer.index, answer.cpl), (0x4000_0001, 3));
        answer.give(0x1234_5678_9abc, &mut state);
        assert_eq!((state.regs.rax, state.regs.rdx), (0x5678_9abc, 0x1234));
        assert_eq!((state.regs.rip, state.regs.rsp), (USER_CODE + 2, 0x7ff0));
        assert_eq!(state.regs.rflags, 0x246);
        assert_eq!(
            (state.sregs.cs.selector, state.sregs.ss.selector),
            (USER_CS, USER_SS)
        );
        assert_eq!((state.cpl(), state.is_64bit()), (3, true));
        assert_eq!((state.sregs.cs.type_, state.sregs.ss.type_), (11, 3));
        assert_eq!((state.sregs.ss.limit, state.sregs.ss.db), (u32::MAX, 1));
    }

    /// A module's RDPMC is the kernel's: its segments stay.
    #[test]
    fn a_module_goes_on_behind_its_rdpmc() {
        let memory = memory();
        let mut state = kernel(&memory);
        let gate = Gate::new(None, memory.clone(), Arc::default());
        memory.write_slice(&RDPMC, GuestAddress(USER_CODE)).unwrap();
        fault(&memory, &mut state, KERNEL_CS, 0, USER_CODE);
        let Stopped::Rdpmc(answer) = gate.stopped(&state) else {
            panic!("not seen")
        };
        assert_eq!(answer.cpl, 0);
        let segments = state.sregs;
        answer.give(7, &mut state);
        assert_eq!((state.regs.rip, state.regs.rax), (USER_CODE + 2, 7));
        assert_eq!(state.sregs, segments);
    }

    /// All other faults are the handler's: of other instructions, with an error code, out of segments that no program has.
    #[test]
    fn other_faults_reach_the_handler() {
        let memory = memory();
        let mut state = kernel(&memory);
        let gate = Gate::new(Some(Arc::default()), memory.clone(), Arc::default());
        let handler = |state: &State| matches!(gate.stopped(state), Stopped::Handler);
        fault(&memory, &mut state, USER_CS, USER_SS, USER_CODE);
        assert!(handler(&state), "no RDPMC");
        memory.write_slice(&RDPMC, GuestAddress(USER_CODE)).unwrap();
        assert!(!handler(&state));
        memory.write_obj(1u64, GuestAddress(STACK)).unwrap();
        assert!(handler(&state), "an error code");
        for (cs, ss, why) in [
            (0x83, USER_SS, "beyond the table"),
            (USER_SS, USER_SS, "data as code"),
            (USER_CS, USER_CS, "code as stack"),
            (USER_CS, 0x28, "stack of another level"),
            (0x37, USER_SS, "a local table that is not there"),
            (0x3b, USER_SS, "a segment that is not present"),
            (0x31, USER_SS, "level 1"),
        ] {
            fault(&memory, &mut state, cs, ss, USER_CODE);
            assert!(handler(&state), "{why}");
        }
        fault(&memory, &mut state, USER_CS, USER_SS, 0xffff_ffff_ffff_ffff);
        assert!(handler(&state), "the end of the address space");
        let last = 0x7fff_ffff_fffe;
        assert!(is_canonical(last, &state.sregs) && !is_canonical(last + 2, &state.sregs));
        assert!(
            is_canonical(u64::MAX << 47, &state.sregs)
                && !is_canonical(u64::MAX << 48 ^ 1 << 63, &state.sregs)
        );
        state.sregs.cr4 = CR4_LA57;
        assert!(is_canonical(last + 2, &state.sregs) && !is_canonical(1 << 56, &state.sregs));
        state.sregs.cr4 = 0;
        // A segment with L and D.
        memory
            .write_obj(0x00ef_fb00_0000_ffffu64, GuestAddress(GDT + 0x38))
            .unwrap();
        fault(&memory, &mut state, 0x3b, USER_SS, USER_CODE);
        assert!(handler(&state), "reserved bits of a segment");
        fault(&memory, &mut state, USER_CS, USER_SS, USER_CODE);
        state.regs.rsp = 0xffff_ffff_ffff_fff8;
        assert!(handler(&state), "no stack");
    }

    proptest! {
        /// Whatever is in memory and in the registers, nothing panics, and only an RDPMC is answered.
        #[test]
        fn hostile_frames_and_tables(
            bytes in proptest::collection::vec(any::<u8>(), 64),
            frame in any::<[u16; 6]>(),
            rsp in any::<u16>(),
            base in any::<u64>(),
            limit in any::<u16>(),
        ) {
            let memory = memory();
            let mut state = kernel(&memory);
            memory.write_slice(&bytes, GuestAddress(GATE)).unwrap();
            memory.write_slice(&bytes, GuestAddress(GDT)).unwrap();
            for (n, word) in frame.iter().enumerate() {
                let _ = memory.write_obj(u64::from(*word), GuestAddress(u64::from(rsp) + 8 * n as u64));
            }
            state.regs.rsp = rsp.into();
            for (base, limit) in [(GDT, 0x3f), (base, limit)] {
                (state.sregs.gdt.base, state.sregs.gdt.limit) = (base, limit);
                (state.sregs.idt.base, state.sregs.idt.limit) = (if base == GDT { IDT } else { base }, limit | 0xff);
                let mut gate = Gate::new(Some(Arc::default()), memory.clone(), Arc::default());
                gate.look(&state);
                if let Stopped::Rdpmc(answer) = gate.stopped(&state) {
                    let at = answer.frame.cs.base.wrapping_add(answer.frame.rip) & 0xffff_ffff;
                    prop_assert_eq!(memory.read_obj::<[u8; 2]>(GuestAddress(at)).unwrap(), RDPMC);
                }
                let _ = gate.enter_handler(&mut { state });
            }
        }
    }
}
