//! Tests of the step meter with steps that ptrace cannot produce: faults, interrupts, shadows and
//! privilege changes.

use super::*;

/// Address of the test code, and addresses of the handlers for a fault, an NMI and a device
/// interrupt.
const CODE: u64 = 0x1000;
const GP_HANDLER: u64 = 0x2000;
const NMI_HANDLER: u64 = 0x2100;
const DEVICE_HANDLER: u64 = 0x2200;
const SYSTEM_CALL: u64 = 0x3000;

struct Memory(Vec<(u64, Vec<u8>)>);

impl Memory {
    fn new(code: &[u8]) -> Self {
        Self(vec![
            (CODE, code.to_vec()),
            (GP_HANDLER, vec![0x50, 0x90]),              // push rax; nop
            (NMI_HANDLER, vec![0x48, 0xFF, 0xC0, 0x90]), // inc rax; nop
            (DEVICE_HANDLER, vec![0xEB, 0x10]),          // jmp +0x10
        ])
    }
}

impl SteppedGuestMemory for Memory {
    fn read(&mut self, linear: u64, buffer: &mut [u8]) -> usize {
        for (start, bytes) in &self.0 {
            if let Some(rest) = linear.checked_sub(*start).and_then(|at| bytes.get(at as usize..)) {
                let n = rest.len().min(buffer.len());
                buffer[..n].copy_from_slice(&rest[..n]);
                return n;
            }
        }
        0
    }

    fn gate(&mut self, vector: u8) -> Option<u64> {
        match vector {
            13 => Some(GP_HANDLER),
            2 => Some(NMI_HANDLER),
            0x40 => Some(DEVICE_HANDLER),
            _ => None,
        }
    }
}

fn at(rip: u64, cpl: u8) -> SteppedCpuState {
    SteppedCpuState {
        rip,
        rflags: 2,
        cpl,
        size: CodeSegmentMode::Bits64,
        gpr: [0; 16],
        segment_bases: [0; 6],
    }
}

/// Returns the result of a step that executes `code` at CPL 0 from [`CODE`] and stops at address
/// `to`.
fn step(code: &[u8], to: u64) -> SingleStepOutcome {
    step_from(
        &mut SingleStepMeter::new(Vendor::Intel),
        code,
        at(CODE, 0),
        at(to, 0),
    )
}

fn step_from(
    meter: &mut SingleStepMeter,
    code: &[u8],
    from: SteppedCpuState,
    to: SteppedCpuState,
) -> SingleStepOutcome {
    let mut memory = Memory::new(code);
    meter.begin(&from, &mut memory);
    assert!(meter.in_step());
    let step = meter.end(&to, &mut memory);
    assert!(!meter.in_step());
    step
}

fn kernel(instructions: u32) -> RetiredCounts {
    RetiredCounts {
        instructions,
        ..RetiredCounts::default()
    }
}

/// Returns the result of a step that executes `code` at CPL 3 from [`CODE`] and stops at address
/// `to` with CPL `cpl`.
fn user_step(vendor: Vendor, code: &[u8], to: u64, cpl: u8) -> SingleStepOutcome {
    step_from(&mut SingleStepMeter::new(vendor), code, at(CODE, 3), at(to, cpl))
}

/// Returns the expected result of a step that retires the counts `kernel` and in which an
/// interrupt, NMI or exception is delivered.
fn event(kernel: RetiredCounts) -> SingleStepOutcome {
    SingleStepOutcome {
        kernel,
        event: true,
        ..SingleStepOutcome::default()
    }
}

/// Returns the expected result of a step that retires the counts `user` at CPL 1 to 3.
fn in_user_mode(user: RetiredCounts) -> SingleStepOutcome {
    SingleStepOutcome {
        user,
        ..SingleStepOutcome::default()
    }
}

/// Returns the expected result of a step that stops at an unexpected address.
fn lost() -> SingleStepOutcome {
    SingleStepOutcome {
        event: true,
        lost: true,
        ..SingleStepOutcome::default()
    }
}

const NOP: &[u8] = &[0x90];
const RDMSR: &[u8] = &[0x0F, 0x32];
const UD2: &[u8] = &[0x0F, 0x0B];
const HLT: &[u8] = &[0xF4];
const SYSCALL: &[u8] = &[0x0F, 0x05];
const MOV_SS_EAX_NOP: &[u8] = &[0x8E, 0xD0, 0x90];
const REP_MOVSB: &[u8] = &[0xF3, 0xA4];

#[test]
fn completed_instruction_counts_once() {
    assert_eq!(
        step(NOP, CODE + 1),
        SingleStepOutcome {
            kernel: kernel(1),
            ..SingleStepOutcome::default()
        }
    );
    let user = user_step(Vendor::Intel, NOP, CODE + 1, 3);
    assert_eq!(user, in_user_mode(kernel(1)));
}

#[test]
fn faulting_instruction_does_not_count_but_handler_does() {
    // The vCPU stops at the handler's first instruction or after it.
    assert_eq!(step(RDMSR, GP_HANDLER), event(RetiredCounts::default()));
    let behind = step(RDMSR, GP_HANDLER + 1);
    assert_eq!(
        behind.kernel,
        RetiredCounts {
            instructions: 1,
            stores: 1,
            ..RetiredCounts::default()
        }
    );
    assert!(behind.event && !behind.lost);
    // The step over UD2 is lost if the vCPU is at no known handler, because UD2 never completes.
    assert_eq!(step(UD2, 0x9000), lost());
}

#[test]
fn interrupted_instruction_counts_after_handler() {
    let mut meter = SingleStepMeter::new(Vendor::Intel);
    let interrupted = step_from(&mut meter, NOP, at(CODE, 3), at(NMI_HANDLER + 3, 0));
    assert_eq!(interrupted, event(kernel(1)));
    // The handler returns to the interrupted instruction, which then completes.
    let later = step_from(&mut meter, NOP, at(CODE, 3), at(CODE + 1, 3));
    assert_eq!(later, in_user_mode(kernel(1)));
}

#[test]
fn handler_starting_with_jump_is_recognized() {
    let behind = step(NOP, DEVICE_HANDLER + 0x12);
    let jump = RetiredCounts {
        instructions: 1,
        branches: 1,
        taken_branches: 1,
        ..RetiredCounts::default()
    };
    assert_eq!(behind, event(jump));
}

#[test]
fn interrupt_is_a_taken_branch_on_amd() {
    let interrupted = user_step(Vendor::Amd, NOP, NMI_HANDLER, 0);
    let branch = RetiredCounts {
        branches: 1,
        taken_branches: 1,
        ..RetiredCounts::default()
    };
    assert_eq!(interrupted, event(branch));
}

#[test]
fn shadow_instruction_is_stepped_with_successor() {
    assert_eq!(step(MOV_SS_EAX_NOP, CODE + 3).kernel.instructions, 2);
    assert_eq!(step(MOV_SS_EAX_NOP, CODE + 2).kernel.instructions, 1);
    let mut meter = SingleStepMeter::new(Vendor::Intel);
    assert_eq!(
        meter.begin(&at(CODE, 0), &mut Memory::new(MOV_SS_EAX_NOP)),
        InstructionClass::Shadow
    );
}

/// Fences and SWAPGS count once each, with and without an interrupt shadow. If KVM emulates them,
/// they have a shadow, and one step may execute several of them.
#[test]
fn fences_count_with_and_without_shadow() {
    for fence in [
        [0x0F, 0xAE, 0xE8],
        [0x0F, 0xAE, 0xF0],
        [0x0F, 0xAE, 0xF8],
        [0x0F, 0x01, 0xF8],
    ] {
        let code = [&fence[..], NOP].concat();
        assert_eq!(step(&code, CODE + 3).kernel, kernel(1), "{fence:x?}");
        assert_eq!(step(&code, CODE + 4).kernel, kernel(2), "{fence:x?}");
        let row = [&fence[..], &fence[..], NOP].concat();
        assert_eq!(step(&row, CODE + 6).kernel, kernel(2), "{fence:x?}");
        assert_eq!(step(&row, CODE + 7).kernel, kernel(3), "{fence:x?}");
        // If an NMI arrives within the sequence, the step stops in the NMI handler.
        let interrupted = step(&row, NMI_HANDLER);
        assert!(interrupted.event && interrupted.kernel.instructions == 0);
    }
    // A step over more shadow instructions than the maximum is not counted.
    let many = [[0x0F, 0xAE, 0xE8]; MAX_SHADOWS + 2].concat();
    assert!(step(&many, CODE + many.len() as u64).lost);
}

/// The step meter counts a long sequence of fences that one step executes. The step stops either
/// after the sequence, or in the handler of a fault or interrupt within it.
#[test]
fn long_row_of_fences_counts_up_to_stop_or_fault() {
    const STACK: u64 = 0x8000;
    let fences = [[0x0F, 0xAE, 0xF0]; 20].concat();
    let row = [&fences[..], RDMSR].concat();
    let end = CODE + row.len() as u64;
    assert_eq!(step(&row, end).kernel, kernel(21));
    // RDMSR raises #GP, whose frame has an error code. An NMI's frame has none.
    for (handler, frame, completed) in [
        (GP_HANDLER, [0, end - 2], 20),
        (NMI_HANDLER, [CODE + 15, 0x10], 5),
        (NMI_HANDLER, [end, 0x10], 21),
        (NMI_HANDLER, [CODE, 0x10], 0),
        (NMI_HANDLER, [0x7777, 0x10], 0),
    ] {
        let mut memory = Memory::new(&row);
        let bytes = frame.into_iter().flat_map(u64::to_le_bytes).collect();
        memory.0.push((STACK, bytes));
        let mut meter = SingleStepMeter::new(Vendor::Intel);
        meter.begin(&at(CODE, 0), &mut memory);
        let mut stop = at(handler, 0);
        stop.gpr[4] = STACK;
        let step = meter.end(&stop, &mut memory);
        assert!(step.event && !step.lost, "{frame:x?}");
        assert_eq!(step.kernel, kernel(completed), "{frame:x?}");
    }
    // The vCPU stops after the handler's first instruction, a PUSH.
    let mut memory = Memory::new(&row);
    let frame = [0, end - 2].into_iter().flat_map(u64::to_le_bytes).collect();
    memory.0.push((STACK, frame));
    let mut meter = SingleStepMeter::new(Vendor::Intel);
    meter.begin(&at(CODE, 0), &mut memory);
    let mut stop = at(GP_HANDLER + 1, 0);
    stop.gpr[4] = STACK - 8;
    assert_eq!(meter.end(&stop, &mut memory).kernel.instructions, 21);
}

#[test]
fn hlt_counts_only_if_it_halts() {
    assert_eq!(step(HLT, CODE + 1).kernel.instructions, 1);
    // An interrupt wakes the vCPU, and the handler's first instruction has executed.
    let woken = step(HLT, NMI_HANDLER + 3);
    assert_eq!(woken, event(kernel(2)));
    let denied = user_step(Vendor::Intel, HLT, GP_HANDLER, 0);
    assert_eq!(denied, event(RetiredCounts::default()));
}

#[test]
fn system_calls_count_at_calling_level() {
    let call = user_step(Vendor::Intel, SYSCALL, SYSTEM_CALL, 0);
    assert_eq!(
        call.user,
        RetiredCounts {
            instructions: 1,
            branches: 1,
            ..RetiredCounts::default()
        }
    );
    assert_eq!(call.kernel, RetiredCounts::default());
    let int = user_step(Vendor::Amd, &[0xCD, 0x02], NMI_HANDLER + 3, 0);
    assert_eq!(
        (int.user.instructions, int.user.branches, int.user.taken_branches),
        (1, 1, 1)
    );
    assert_eq!(int.kernel, kernel(1), "and the handler's first instruction");
    // INT n through a gate that CPL 3 is not permitted to use.
    let denied = user_step(Vendor::Intel, &[0xCD, 0x02], GP_HANDLER, 0);
    assert_eq!(denied, event(RetiredCounts::default()));
}

#[test]
fn iret_returns_to_stack_address_or_faults() {
    let iretq = &[0x48, 0xCF];
    let mut stack = [0; 40];
    stack[..8].copy_from_slice(&0x7777u64.to_le_bytes());
    let mut from = at(CODE, 0);
    from.gpr[4] = 0x8000;
    for (to, counted) in [(0x7777, 1), (GP_HANDLER, 0)] {
        let mut memory = Memory::new(iretq);
        memory.0.push((0x8000, stack.to_vec()));
        let mut meter = SingleStepMeter::new(Vendor::Intel);
        assert_eq!(meter.begin(&from, &mut memory), InstructionClass::InterruptReturn);
        assert_eq!(meter.end(&at(to, 3), &mut memory).kernel.instructions, counted);
    }
}

/// Returns a vCPU state at CPL 0 with RIP and RCX set to `rip` and `rcx`.
fn count(rip: u64, rcx: u64) -> SteppedCpuState {
    let mut state = at(rip, 0);
    state.gpr[1] = rcx;
    state
}

/// After a snapshot, a new step meter continues with a repeated string instruction of which some
/// iterations have been executed, whether or not the old meter had ended its step.
#[test]
fn unfinished_repeated_instruction_continues_in_another_meter() {
    let whole = count(CODE, 3);
    let mut meter = SingleStepMeter::new(Vendor::Intel);
    meter.begin(&whole, &mut Memory::new(REP_MOVSB));
    assert_eq!(meter.unfinished_at(&whole), None);
    let unfinished = meter.unfinished_at(&count(CODE, 0));
    assert_eq!(unfinished, Some((CODE, 0)));
    meter.end(&count(CODE, 0), &mut Memory::new(REP_MOVSB));
    assert_eq!(meter.unfinished_at(&count(CODE, 0)), unfinished);

    let mut other = SingleStepMeter::new(Vendor::Intel);
    other.restore_unfinished(unfinished);
    let end = step_from(&mut other, REP_MOVSB, count(CODE, 0), count(CODE + 2, 0));
    assert_eq!((end.kernel.loads, end.kernel.stores), (1, 1));
}

#[test]
fn repeated_instruction_counts_once_despite_interrupts() {
    let mut meter = SingleStepMeter::new(Vendor::Intel);
    let mut step = |from, to| step_from(&mut meter, REP_MOVSB, from, to);
    assert_eq!(step(count(CODE, 3), count(CODE, 2)), SingleStepOutcome::default());
    let interrupted = step(count(CODE, 2), count(NMI_HANDLER, 1));
    assert_eq!(interrupted, event(RetiredCounts::default()));
    assert_eq!(
        step(count(NMI_HANDLER, 1), count(NMI_HANDLER + 3, 1)).kernel,
        kernel(1)
    );
    // The vCPU resumes with one iteration left, which leaves RIP at the instruction. The last step
    // only detects that RCX is 0.
    assert_eq!(step(count(CODE, 1), count(CODE, 0)), SingleStepOutcome::default());
    let end = step(count(CODE, 0), count(CODE + 2, 0));
    assert_eq!(
        end.kernel,
        RetiredCounts {
            instructions: 1,
            loads: 1,
            stores: 1,
            ..RetiredCounts::default()
        }
    );
    // A repeated instruction with RCX = 0 counts once.
    let idle = step(count(CODE, 0), count(CODE + 2, 0));
    assert_eq!(idle.kernel, kernel(1));
}

#[test]
fn unexplained_step_is_lost_and_not_counted() {
    assert_eq!(step(NOP, 0x5555), lost());
    // Code that cannot be read raises a fault.
    let mut meter = SingleStepMeter::new(Vendor::Intel);
    let unreadable = step_from(&mut meter, NOP, at(0x9999_0000, 0), at(GP_HANDLER, 0));
    assert_eq!(unreadable, event(RetiredCounts::default()));
    // A step that leaves RIP unchanged retires nothing.
    assert_eq!(step(NOP, CODE), SingleStepOutcome::default());
}

/// An instruction on a page that is not present faults. After the handler has mapped the page, the
/// instruction is read again, completes, and counts.
#[test]
fn unreadable_instruction_counts_after_page_is_mapped() {
    let mut meter = SingleStepMeter::new(Vendor::Intel);
    assert_eq!(
        meter.begin(&at(CODE, 3), &mut Memory(Vec::new())),
        InstructionClass::Unreadable
    );
    assert_eq!(meter.next_ip(), None);
    let mut memory = Memory::new(&[0xEB, 0x0E]);
    assert_eq!(meter.begin(&at(CODE, 3), &mut memory), InstructionClass::Plain);
    assert_eq!(meter.next_ip(), Some(CODE + 2));
    let step = meter.end(&at(CODE + 0x10, 3), &mut memory);
    assert_eq!((step.user.instructions, step.user.taken_branches), (1, 1));
    assert!(!step.lost && !step.event);
}

#[test]
fn abandoned_step_counts_nothing() {
    let mut meter = SingleStepMeter::new(Vendor::Intel);
    let mut memory = Memory::new(NOP);
    assert_eq!(
        meter.end(&at(CODE + 1, 0), &mut memory),
        SingleStepOutcome::default()
    );
    meter.begin(&at(CODE, 0), &mut memory);
    meter.abandon();
    assert_eq!(
        meter.end(&at(CODE + 1, 0), &mut memory),
        SingleStepOutcome::default()
    );
}

#[test]
fn retired_counts_are_fed_at_their_level() {
    let counts = VmmPmuCounts::new(vmm_counts::SELECTORS);
    let step = SingleStepOutcome {
        user: RetiredCounts {
            instructions: 2,
            branches: 1,
            taken_branches: 0,
            conditional_branches: 1,
            loads: 1,
            stores: 2,
        },
        kernel: kernel(1),
        ..SingleStepOutcome::default()
    };
    assert!(!step.feed(&counts));
    for (event, total) in [
        (ArchEvent::Instructions, 3),
        (ArchEvent::Branches, 1),
        (ArchEvent::TakenBranches, 0),
        (ArchEvent::ConditionalBranches, 1),
        (ArchEvent::Loads, 1),
        (ArchEvent::Stores, 2),
    ] {
        assert_eq!(
            counts.total(vmm_counts::exact_selector(event).unwrap()),
            total,
            "{event:?}"
        );
    }
}

#[test]
fn gates_are_read_in_each_format_of_the_table() {
    // Handler of vector 1: offset 0x1122 in real mode, 0x3344_1122 in protected mode,
    // 0x5566_7788_3344_1122 in long mode.
    let real = [0, 0, 0, 0, 0x22, 0x11, 0x00, 0xF0];
    let gate = [
        0x22, 0x11, 0x08, 0x00, 0x00, 0x8E, 0x44, 0x33, 0x88, 0x77, 0x66, 0x55, 0, 0, 0, 0,
    ];
    let find = |format, table: Vec<u8>, limit, vector| {
        let mut memory = Memory(vec![(0x4000, table)]);
        gate_in_table(format, 0x4000, limit, vector, &mut memory)
    };
    let protected = [&[0; 8], &gate[..8]].concat();
    let long = [&[0; 16], &gate[..]].concat();
    assert_eq!(find(IdtGateFormat::Real, real.to_vec(), 7, 1), Some(0x1122));
    assert_eq!(
        find(IdtGateFormat::Protected, protected.clone(), 15, 1),
        Some(0x3344_1122)
    );
    assert_eq!(
        find(IdtGateFormat::Long, long.clone(), 31, 1),
        Some(0x5566_7788_3344_1122)
    );
    // Finds no handler if the gate is not present, beyond the limit of the table, or unreadable.
    assert_eq!(find(IdtGateFormat::Long, long.clone(), 31, 0), None);
    assert_eq!(find(IdtGateFormat::Long, long.clone(), 30, 1), None);
    assert_eq!(find(IdtGateFormat::Long, long, 0xFFF, 2), None);
    // A task gate contains no handler address.
    let mut task = protected;
    task[8 + 5] = 0x85;
    assert_eq!(find(IdtGateFormat::Protected, task, 15, 1), None);
}

/// Returns the branches recorded in a step over `code` at [`CODE`] that changes the vCPU state from
/// `from` to `to`.
fn branches_of(code: &[u8], from: SteppedCpuState, to: SteppedCpuState) -> Vec<(u64, u64, BranchKind)> {
    let mut meter = SingleStepMeter::new(Vendor::Intel);
    meter.set_branch_recording(true);
    step_from(&mut meter, code, from, to);
    let branches: Vec<_> = meter.take_branches().map(|b| (b.from, b.to, b.kind)).collect();
    assert_eq!(meter.take_branches().count(), 0);
    branches
}

/// Taken branches are recorded with their type. Other instructions, and branches that are not
/// taken, are not recorded.
#[test]
fn taken_branches_are_recorded() {
    let kernel = |code: &[u8], to| branches_of(code, at(CODE, 0), at(to, 0));
    for (code, to, kind) in [
        (&[0xEB, 0x10][..], CODE + 0x12, BranchKind::Unconditional),
        (&[0x75, 0x10][..], CODE + 0x12, BranchKind::Conditional),
        (&[0xE8, 1, 0, 0, 0][..], CODE + 6, BranchKind::Call),
        (&[0xFF, 0xE0][..], 0, BranchKind::Indirect),
        (&[0xFF, 0xD0][..], 0, BranchKind::IndirectCall),
    ] {
        assert_eq!(kernel(code, to), [(CODE, to, kind)], "{code:x?}");
    }
    assert_eq!(kernel(NOP, CODE + 1), []);
    assert_eq!(kernel(&[0x74, 0x10], CODE + 2), [], "ZF is clear");
    let called = branches_of(SYSCALL, at(CODE, 3), at(SYSTEM_CALL, 0));
    assert_eq!(called, [(CODE, SYSTEM_CALL, BranchKind::SystemCall)]);
}

/// An interrupt is recorded as a branch to its handler. If the vCPU stops after the first
/// instruction of the handler and this instruction is a jump, the jump is recorded as a separate
/// branch.
#[test]
fn interrupts_are_recorded_as_branches() {
    let fault = branches_of(RDMSR, at(CODE, 0), at(GP_HANDLER, 0));
    assert_eq!(fault, [(CODE, GP_HANDLER, BranchKind::Interrupt)]);
    let jumped = DEVICE_HANDLER + 0x12;
    let interrupt = branches_of(NOP, at(CODE, 0), at(jumped, 0));
    let expected = [
        (CODE, DEVICE_HANDLER, BranchKind::Interrupt),
        (DEVICE_HANDLER, jumped, BranchKind::Unconditional),
    ];
    assert_eq!(interrupt, expected);
    let mut meter = SingleStepMeter::new(Vendor::Intel);
    step_from(&mut meter, &[0xEB, 0x10], at(CODE, 0), at(CODE + 0x12, 0));
    assert_eq!(meter.take_branches().count(), 0, "recording is off");
}
