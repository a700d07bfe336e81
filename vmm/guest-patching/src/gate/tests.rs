use super::frame::{CR4_LA57, is_canonical};
use super::handler_trap::{InstructionEffect, RFLAGS_AC, RFLAGS_DF};
use super::*;
use crate::finder::RDPMC;
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

/// Returns a vCPU in 64-bit code at CPL 0 with identity-mapped memory, a GDT and an IDT.
fn kernel(memory: &GuestMemoryMmap) -> VcpuState {
    let mut state = VcpuState {
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
    // Descriptors of a 64-bit code segment and a data segment, both with DPL 3.
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

/// Changes `state` to that of a vCPU that enters the #GP handler after a fault at `cs:rip`.
fn fault(memory: &GuestMemoryMmap, state: &mut VcpuState, cs: u16, ss: u16, rip: u64) {
    let frame = [0, rip, cs.into(), 0xffc3_0246, 0x7ff0, ss.into()];
    state.regs.rsp = STACK;
    state.regs.rip = GATE;
    for (n, quad) in frame.iter().enumerate() {
        memory
            .write_obj(*quad, GuestAddress(STACK + 8 * n as u64))
            .unwrap();
    }
}

/// The first instructions of Linux's #GP handler are decoded: ENDBR64 (if built with indirect
/// branch tracking), CLAC or the padding in its place, and CLD.
#[test]
fn handler_prologues_are_decoded() {
    let of = |code: &[u8]| {
        HandlerInstruction::of(GATE, code).map(|head| (head.address - GATE, head.length, head.does))
    };
    assert_eq!(
        of(&[0x0f, 0x01, 0xca, 0xfc]),
        Some((0, 3, InstructionEffect::Clear(RFLAGS_AC)))
    );
    assert_eq!(
        of(&[0xf3, 0x0f, 0x1e, 0xfa, 0x0f, 0x1f, 0x00, 0xfc]),
        Some((4, 3, InstructionEffect::Clear(0)))
    );
    assert_eq!(of(&[0x90, 0x90, 0x90]), Some((0, 1, InstructionEffect::Clear(0))));
    assert_eq!(
        of(&[0xfc, 0xe8]),
        Some((0, 1, InstructionEffect::Clear(RFLAGS_DF)))
    );
    assert_eq!(
        of(&[0x6a, 0x0d, 0xeb, 0]),
        Some((0, 2, InstructionEffect::Push(13)))
    );
    assert_eq!(of(&[0x6a, 0xff]), Some((0, 2, InstructionEffect::Push(-1))));
    assert_eq!(
        of(&[0x68, 0, 0, 0, 0x80]),
        Some((0, 5, InstructionEffect::Push(i32::MIN)))
    );
    // The handler starts with CALL, PUSH RAX or SUB RSP, or its code cannot be read.
    for unfit in [&[0xe8, 0, 0, 0, 0][..], &[0x50], &[0x48, 0x83, 0xec, 8], &[]] {
        assert_eq!(of(unfit), None, "{unfit:x?}");
    }
}

/// The trap is installed again after the guest has rewritten its #GP handler, and replaces exactly
/// one instruction. A trap that is still in place is not replaced by a second one.
#[test]
fn trap_is_reinstalled_after_code_is_rewritten() {
    let memory = memory();
    let state = kernel(&memory);
    let planted = Arc::new(GpHandlerTrap::default());
    let mut gate = GpHandlerInterception::new(Some(planted.clone()), memory.clone(), Arc::default());
    let clac = [0xf3, 0x0f, 0x1e, 0xfa, 0x0f, 0x01, 0xca, 0xfc];
    for _ in 0..2 {
        memory.write_slice(&clac, GuestAddress(GATE)).unwrap();
        for _ in 0..2 {
            gate.intercept(&state);
            assert!(!gate.has_changed());
            let code: [u8; 8] = memory.read_obj(GuestAddress(GATE)).unwrap();
            assert_eq!(code, [0xf3, 0x0f, 0x1e, 0xfa, TRAP[0], TRAP[1], 0xca, 0xfc]);
        }
    }
    let here = Some(TriggeredHandlerTrap::Installed(GATE + 4));
    assert_eq!([GATE + 4, GATE + 6].map(|rip| gate.planted_at(rip)), [here, here]);
    assert_eq!(
        [GATE, GATE + 5, GATE + 7].map(|rip| gate.planted_at(rip)),
        [None; 3]
    );
    let mut at = state;
    at.regs.rflags = RFLAGS_AC | 2;
    gate.enter_handler(GATE + 4, &mut at).unwrap();
    assert_eq!((at.regs.rip, at.regs.rflags), (GATE + 7, 2));
    // When a vCPU with a different handler moves the trap there, the code of the first handler is
    // restored.
    memory
        .write_slice(&[0x6a, 13, 0x90], GuestAddress(0x6000))
        .unwrap();
    let entry = u128::from(0x6000u16) | u128::from(KERNEL_CS) << 16 | 0x8e << 40;
    memory
        .write_obj(entry, GuestAddress(IDT + 16 * u64::from(GENERAL_PROTECTION)))
        .unwrap();
    GpHandlerInterception::new(Some(planted), memory.clone(), Arc::default()).intercept(&state);
    assert_eq!(memory.read_obj::<[u8; 8]>(GuestAddress(GATE)).unwrap(), clac);
    assert_eq!(
        gate.planted_at(0x6000),
        Some(TriggeredHandlerTrap::Installed(0x6000))
    );
    // A vCPU that executed the former trap returns to the restored instruction.
    assert_eq!(
        gate.planted_at(GATE + 6),
        Some(TriggeredHandlerTrap::Removed(GATE + 4))
    );
    gate.enter_handler(GATE + 4, &mut at).unwrap();
    assert_eq!(at.regs.rip, GATE + 4);
    at.regs.rsp = STACK;
    gate.enter_handler(0x6000, &mut at).unwrap();
    assert_eq!((at.regs.rip, at.regs.rsp), (0x6002, STACK - 8));
    assert_eq!(memory.read_obj::<u64>(GuestAddress(STACK - 8)).unwrap(), 13);
}

/// A handler that starts with a one-byte instruction gets no trap, because the trap would also
/// replace part of the next instruction, which other vCPUs may be executing. A breakpoint does not
/// replace code and is used for such a handler.
#[test]
fn trap_does_not_replace_two_instructions() {
    let memory = memory();
    let state = kernel(&memory);
    let code = [0x90, 0x90, 0x90, 0x90];
    memory.write_slice(&code, GuestAddress(GATE)).unwrap();
    let mut gate = GpHandlerInterception::new(Some(Arc::default()), memory.clone(), Arc::default());
    assert_eq!(gate.intercept(&state), GpHandlerCheckResult::Changed(None));
    assert_eq!(memory.read_obj::<[u8; 4]>(GuestAddress(GATE)).unwrap(), code);
    assert_eq!(gate.planted_at(GATE), None);
    let mut gate = GpHandlerInterception::new(None, memory.clone(), Arc::default());
    assert_eq!(gate.intercept(&state), GpHandlerCheckResult::Changed(Some(GATE)));
    assert_eq!(
        gate.intercept(&state),
        GpHandlerCheckResult::Unchanged,
        "it is there already"
    );
    assert!(gate.breaks_at(GATE) && !gate.breaks_at(GATE + 2));
    assert_eq!(memory.read_obj::<[u8; 4]>(GuestAddress(GATE)).unwrap(), code);
}

const CLAC: [u8; 4] = [0x0f, 0x01, 0xca, 0xfc];

/// The #GP handler of a kexec kernel, at the same linear address in different physical memory, is
/// replaced by a trap. The handler code of the previous kernel is restored unless the guest
/// overwrote it.
#[test]
fn kexec_kernel_at_same_address_gets_trap() {
    for overwritten in [false, true] {
        let memory = memory();
        let mut state = kernel(&memory);
        let page = |state: &mut VcpuState, code: u64| {
            // Page tables at 0xa000 to 0xd000 with identity mapping, except for the handler's page.
            for (table, next) in [(0xa000u64, 0xb003u64), (0xb000, 0xc003), (0xc000, 0xd003)] {
                memory.write_obj(next, GuestAddress(table)).unwrap();
            }
            for n in 0..16u64 {
                let to = if n == GATE >> 12 { code } else { n << 12 };
                memory.write_obj(to | 3, GuestAddress(0xd000 + 8 * n)).unwrap();
            }
            state.sregs.cr0 |= 1 << 31;
            state.sregs.cr4 = 1 << 5;
            state.sregs.cr3 = 0xa000;
        };
        for at in [GATE, 0x7000] {
            memory.write_slice(&CLAC, GuestAddress(at)).unwrap();
        }
        page(&mut state, GATE);
        let mut gate = GpHandlerInterception::new(Some(Arc::default()), memory.clone(), Arc::default());
        assert_eq!(gate.intercept(&state), GpHandlerCheckResult::Changed(None));
        assert_eq!(memory.read_obj::<[u8; 2]>(GuestAddress(GATE)).unwrap(), TRAP);
        page(&mut state, 0x7000);
        if overwritten {
            memory.write_obj(0x1234u16, GuestAddress(GATE + 8)).unwrap();
        }
        assert_eq!(gate.intercept(&state), GpHandlerCheckResult::Changed(None));
        assert_eq!(memory.read_obj::<[u8; 2]>(GuestAddress(0x7000)).unwrap(), TRAP);
        let left: [u8; 2] = memory.read_obj(GuestAddress(GATE)).unwrap();
        assert_eq!(left == TRAP, overwritten);
    }
}

/// Points the #GP gate to a handler at `at` that begins with CLAC.
fn move_handler(memory: &GuestMemoryMmap, at: u64) {
    memory.write_slice(&CLAC, GuestAddress(at)).unwrap();
    let entry = u128::from(at & 0xffff) | u128::from(KERNEL_CS) << 16 | 0x8e << 40;
    memory
        .write_obj(entry, GuestAddress(IDT + 16 * u64::from(GENERAL_PROTECTION)))
        .unwrap();
}

/// A vCPU that has executed a trap that is then removed returns to the restored instruction, even
/// if the handler has moved several times.
#[test]
fn vcpu_at_removed_trap_resumes_original_instruction() {
    let memory = memory();
    let state = kernel(&memory);
    let mut gate = GpHandlerInterception::new(Some(Arc::default()), memory.clone(), Arc::default());
    let places = [GATE, 0x6000, 0x6100, 0x6200];
    for at in places {
        move_handler(&memory, at);
        gate.intercept(&state);
        assert_eq!(gate.planted_at(at), Some(TriggeredHandlerTrap::Installed(at)));
    }
    for at in &places[..3] {
        assert_eq!(gate.planted_at(at + 2), Some(TriggeredHandlerTrap::Removed(*at)));
        let mut on_its_way = state;
        gate.enter_handler(*at, &mut on_its_way).unwrap();
        assert_eq!(on_its_way.regs.rip, *at);
    }
    // The handler moves back to the first address, where the trap is then installed again.
    move_handler(&memory, GATE);
    gate.intercept(&state);
    assert_eq!(gate.planted_at(GATE), Some(TriggeredHandlerTrap::Installed(GATE)));
    assert_eq!(
        gate.planted_at(0x6200),
        Some(TriggeredHandlerTrap::Removed(0x6200))
    );
}

/// A snapshot contains the original #GP handler without the trap. `remove_for_snapshot` returns
/// `false` if a trap cannot be removed.
#[test]
fn no_trap_is_left_in_memory() {
    let memory = memory();
    let state = kernel(&memory);
    let planted = Arc::new(GpHandlerTrap::default());
    let mut gate = GpHandlerInterception::new(Some(planted.clone()), memory.clone(), Arc::default());
    let clac = [0x0f, 0x01, 0xca, 0xfc];
    memory.write_slice(&clac, GuestAddress(GATE)).unwrap();
    gate.intercept(&state);
    assert_ne!(memory.read_obj::<[u8; 4]>(GuestAddress(GATE)).unwrap(), clac);
    assert!(planted.remove_for_snapshot(&memory));
    assert_eq!(memory.read_obj::<[u8; 4]>(GuestAddress(GATE)).unwrap(), clac);
    // The source VM continues to run, so the trap is installed again.
    gate.intercept(&state);
    assert_eq!(gate.planted_at(GATE), Some(TriggeredHandlerTrap::Installed(GATE)));
    memory.write_obj(0x1234u16, GuestAddress(GATE + 8)).unwrap();
    assert!(!planted.remove_for_snapshot(&memory), "it stays in memory");
}

/// A trap that could not be removed from the #GP handler, because the code after it has changed, is
/// still emulated. Otherwise, the guest would resume in the middle of an instruction. The number of
/// remembered traps is bounded.
#[test]
fn trap_left_in_memory_is_still_emulated() {
    let memory = memory();
    let state = kernel(&memory);
    let planted = Arc::new(GpHandlerTrap::default());
    let mut gate = GpHandlerInterception::new(Some(planted), memory.clone(), Arc::default());
    let places: Vec<u64> = (0..50).map(|n| 0x6000 + 0x20 * n).collect();
    for at in &places {
        move_handler(&memory, *at);
        gate.intercept(&state);
        memory.write_obj(0x1234u16, GuestAddress(at + 8)).unwrap();
    }
    let last = places.len() - 1;
    for at in &places[last - 3..last] {
        assert_eq!(memory.read_obj::<[u8; 2]>(GuestAddress(*at)).unwrap(), TRAP);
        assert_eq!(
            gate.planted_at(at + 2),
            Some(TriggeredHandlerTrap::Installed(*at))
        );
        let mut there = state;
        there.regs.rflags = RFLAGS_AC | 2;
        gate.enter_handler(*at, &mut there).unwrap();
        assert_eq!((there.regs.rip, there.regs.rflags), (at + 3, 2), "CLAC was done");
    }
    let known = places.iter().filter(|at| gate.planted_at(**at).is_some());
    assert!(known.count() < 12, "places are forgotten");
}

/// The two bytes of the trap are replaced atomically within an aligned 8-byte word. A handler whose
/// first instruction crosses a word boundary is not modified.
#[test]
fn trap_is_installed_atomically_at_any_alignment() {
    for at in 0x6000..0x6010u64 {
        let memory = memory();
        let state = kernel(&memory);
        let mut gate = GpHandlerInterception::new(Some(Arc::default()), memory.clone(), Arc::default());
        memory.write_slice(&[0xAA; 32], GuestAddress(0x5ff8)).unwrap();
        move_handler(&memory, at);
        let whole = at % 8 != 7;
        assert_eq!(gate.intercept(&state), GpHandlerCheckResult::Changed(None));
        assert_eq!(
            gate.planted_at(at),
            whole.then_some(TriggeredHandlerTrap::Installed(at))
        );
        let code: [u8; 6] = memory.read_obj(GuestAddress(at - 1)).unwrap();
        let first = if whole { TRAP } else { [CLAC[0], CLAC[1]] };
        assert_eq!(
            code,
            [0xAA, first[0], first[1], CLAC[2], CLAC[3], 0xAA],
            "{at:#x}"
        );
        move_handler(&memory, 0x7000);
        gate.intercept(&state);
        assert_eq!(memory.read_obj::<[u8; 4]>(GuestAddress(at)).unwrap(), CLAC);
    }
}

/// A change to the #GP gate or to the handler code is detected at the next check. Kernels with FRED
/// or shadow stacks are not intercepted.
#[test]
fn gate_and_handler_changes_are_detected() {
    let memory = memory();
    let mut state = kernel(&memory);
    memory.write_slice(&CLAC, GuestAddress(GATE)).unwrap();
    let mut gate = GpHandlerInterception::new(Some(Arc::default()), memory.clone(), Arc::default());
    assert!(!gate.has_changed());
    gate.intercept(&state);
    assert!(!gate.has_changed());
    memory.write_slice(&CLAC, GuestAddress(GATE)).unwrap();
    assert!(gate.has_changed());
    gate.intercept(&state);
    memory
        .write_obj(0x60u8, GuestAddress(IDT + 16 * u64::from(GENERAL_PROTECTION) + 1))
        .unwrap();
    assert!(gate.has_changed());
    memory
        .write_slice(&[0x6a, 13, 0x90], GuestAddress(0x6000))
        .unwrap();
    assert_eq!(gate.intercept(&state), GpHandlerCheckResult::Changed(None));
    for bit in [CR4_CET, CR4_FRED] {
        state.sregs.cr4 = bit;
        gate.intercept(&state);
        assert_eq!(
            memory.read_obj::<[u8; 3]>(GuestAddress(0x6000)).unwrap(),
            [0x6a, 13, 0x90]
        );
        assert_eq!(
            gate.planted_at(0x6000),
            Some(TriggeredHandlerTrap::Removed(0x6000))
        );
        state.sregs.cr4 = 0;
        gate.intercept(&state);
        assert_eq!(
            gate.planted_at(0x6000),
            Some(TriggeredHandlerTrap::Installed(0x6000))
        );
    }
}

/// vCPUs that install the trap concurrently save the guest's original code. None saves the trap of
/// another vCPU as the original code.
#[test]
fn concurrent_trap_installation_keeps_original_code() {
    for _ in 0..200 {
        let memory = memory();
        let state = kernel(&memory);
        memory.write_slice(&CLAC, GuestAddress(GATE)).unwrap();
        let planted = Arc::new(GpHandlerTrap::default());
        let together = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut gate =
                        GpHandlerInterception::new(Some(planted.clone()), memory.clone(), Arc::default());
                    together.wait();
                    gate.intercept(&state);
                    assert_eq!(gate.planted_at(GATE), Some(TriggeredHandlerTrap::Installed(GATE)));
                });
            }
        });
        assert_eq!(memory.read_obj::<[u8; 2]>(GuestAddress(GATE)).unwrap(), TRAP);
        planted.remove(&memory);
        assert_eq!(memory.read_obj::<[u8; 4]>(GuestAddress(GATE)).unwrap(), CLAC);
    }
}

/// Prefixes belong to the faulting instruction. RDPMC with LOCK is not accepted.
#[test]
fn rdpmc_prefixes_are_part_of_instruction() {
    let memory = memory();
    let gate = GpHandlerInterception::new(None, memory.clone(), Arc::default());
    for (code, length) in [
        (&[0x66, 0x0f, 0x33][..], Some(3)),
        (&[0x67, 0xf3, 0x48, 0x0f, 0x33], Some(5)),
        (&[0x65, 0xf2, 0x66, 0x0f, 0x33], Some(5)),
        (&[0xf0, 0x0f, 0x33], None),
        (&[0x0f, 0x32], None),
    ] {
        let mut state = kernel(&memory);
        memory.write_slice(&[0x90; 16], GuestAddress(USER_CODE)).unwrap();
        memory.write_slice(code, GuestAddress(USER_CODE)).unwrap();
        fault(&memory, &mut state, USER_CS, USER_SS, USER_CODE);
        let behind = match gate.stop_reason(&state, |_| None) {
            GpHandlerStopReason::Rdpmc(answer) => {
                assert_eq!(answer.rips().0, USER_CODE);
                answer.complete(7, &mut state);
                assert_eq!((state.regs.rip, state.regs.rax), (answer.rips().1, 7));
                Some(state.regs.rip - USER_CODE)
            }
            GpHandlerStopReason::Handler => None,
        };
        assert_eq!(behind, length, "{code:x?}");
    }
}

#[test]
fn trap_flag_in_frame_is_detected() {
    let memory = memory();
    let gate = GpHandlerInterception::new(None, memory.clone(), Arc::default());
    memory.write_slice(&RDPMC, GuestAddress(USER_CODE)).unwrap();
    for (rflags, traps) in [(0x246u64, false), (0x346, true)] {
        let mut state = kernel(&memory);
        fault(&memory, &mut state, USER_CS, USER_SS, USER_CODE);
        memory.write_obj(rflags, GuestAddress(STACK + 24)).unwrap();
        let GpHandlerStopReason::Rdpmc(answer) = gate.stop_reason(&state, |_| None) else {
            panic!("not seen")
        };
        assert_eq!(answer.traps(), traps);
        answer.complete(0, &mut state);
        assert_eq!(state.regs.rflags, rflags);
    }
}

/// After an emulated RDPMC, a program resumes with the count and with its own segments, flags and
/// stack.
#[test]
fn program_resumes_after_rdpmc() {
    let memory = memory();
    let mut state = kernel(&memory);
    let gate = GpHandlerInterception::new(Some(Arc::default()), memory.clone(), Arc::default());
    memory.write_slice(&RDPMC, GuestAddress(USER_CODE)).unwrap();
    fault(&memory, &mut state, USER_CS, USER_SS, USER_CODE);
    state.regs.rcx = 0x1_4000_0001;
    let GpHandlerStopReason::Rdpmc(answer) = gate.stop_reason(&state, |_| None) else {
        panic!("not seen")
    };
    assert_eq!((answer.index, answer.cpl), (0x4000_0001, 3));
    answer.complete(0x1234_5678_9abc, &mut state);
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

/// If a program's RDPMC must be executed again, its segments, flags, stack and general registers
/// are those before the fault.
#[test]
fn program_repeats_rdpmc() {
    let memory = memory();
    let mut state = kernel(&memory);
    let gate = GpHandlerInterception::new(Some(Arc::default()), memory.clone(), Arc::default());
    memory.write_slice(&RDPMC, GuestAddress(USER_CODE)).unwrap();
    fault(&memory, &mut state, USER_CS, USER_SS, USER_CODE);
    (state.regs.rax, state.regs.rcx, state.regs.rdx) = (11, 1, 22);
    let GpHandlerStopReason::Rdpmc(answer) = gate.stop_reason(&state, |_| None) else {
        panic!("not seen")
    };
    answer.execute_again(&mut state);
    assert_eq!((state.regs.rip, state.regs.rsp), (USER_CODE, 0x7ff0));
    assert_eq!(state.regs.rflags, 0x246);
    assert_eq!((state.regs.rax, state.regs.rcx, state.regs.rdx), (11, 1, 22));
    assert_eq!((state.cpl(), state.is_64bit()), (3, true));
    assert_eq!(
        (state.sregs.cs.selector, state.sregs.ss.selector),
        (USER_CS, USER_SS)
    );
}

#[test]
fn module_resumes_after_rdpmc() {
    let memory = memory();
    let mut state = kernel(&memory);
    let gate = GpHandlerInterception::new(None, memory.clone(), Arc::default());
    memory.write_slice(&RDPMC, GuestAddress(USER_CODE)).unwrap();
    fault(&memory, &mut state, KERNEL_CS, 0, USER_CODE);
    let GpHandlerStopReason::Rdpmc(answer) = gate.stop_reason(&state, |_| None) else {
        panic!("not seen")
    };
    assert_eq!(answer.cpl, 0);
    let segments = state.sregs;
    answer.complete(7, &mut state);
    assert_eq!((state.regs.rip, state.regs.rax), (USER_CODE + 2, 7));
    assert_eq!(state.sregs, segments);
}

/// The guest's #GP handler runs for all faults other than RDPMC: other instructions, a nonzero
/// error code, or invalid segments.
#[test]
fn other_faults_reach_the_handler() {
    let memory = memory();
    let mut state = kernel(&memory);
    let gate = GpHandlerInterception::new(Some(Arc::default()), memory.clone(), Arc::default());
    let handler =
        |state: &VcpuState| matches!(gate.stop_reason(state, |_| None), GpHandlerStopReason::Handler);
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
        is_canonical(u64::MAX << 47, &state.sregs) && !is_canonical(u64::MAX << 48 ^ 1 << 63, &state.sregs)
    );
    state.sregs.cr4 = CR4_LA57;
    assert!(is_canonical(last + 2, &state.sregs) && !is_canonical(1 << 56, &state.sregs));
    state.sregs.cr4 = 0;
    // A code segment descriptor with L and D both set is reserved.
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
    /// Arbitrary memory and registers at a stop at the #GP handler cause no panic, and no
    /// instruction other than RDPMC is emulated.
    #[test]
    fn hostile_frames_never_panic(
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
            let mut gate = GpHandlerInterception::new(Some(Arc::default()), memory.clone(), Arc::default());
            gate.intercept(&state);
            if let GpHandlerStopReason::Rdpmc(answer) = gate.stop_reason(&state, |_| None) {
                let behind = answer.frame.cs.base.wrapping_add(answer.rips().1) & 0xffff_ffff;
                prop_assert_eq!(memory.read_obj::<[u8; 2]>(GuestAddress(behind - 2)).unwrap(), RDPMC);
            }
            let _ = gate.enter_handler(GATE, &mut { state });
        }
    }
}
