//! Tests of straight-line runs: fewer entries with the same counts, even if a run is interrupted.

use kvm_bindings::kvm_dtable;

use super::*;

/// Address of the guest's global descriptor table.
const GDT: u64 = 0xa000;
const IDT: u64 = 0xb000;
const HANDLER: u64 = 0xc000;
/// Lowest linear address that is not mapped.
const NO_PAGE: u32 = 0x20_0000;

/// Returns code that executes `body` `times` times and then HLT. The loop itself has three
/// instructions: one before it and two in each iteration.
fn looped(body: &[u8], times: u32) -> Vec<u8> {
    let back = -i8::try_from(body.len() + 4).unwrap();
    // mov ecx, times; body; dec ecx; jnz body; hlt
    let mut code = vec![0xb9];
    code.extend_from_slice(&times.to_le_bytes());
    code.extend_from_slice(body);
    code.extend_from_slice(&[0xff, 0xc9, 0x75, back.cast_unsigned(), HLT]);
    code
}

/// A loop of ten instructions and a branch takes two VM entries per iteration instead of eleven,
/// because the instructions form a straight-line run.
#[test]
fn loop_in_runs_takes_a_third_of_entries() {
    // mov eax, 1; add eax, ecx; lea edx, [rax+5]; mov [DATA], eax; mov eax, [DATA]; xor eax, edx;
    // push; pop; nop; dec ecx is the tenth.
    let body = [
        0xb8, 1, 0, 0, 0, 0x01, 0xc8, 0x8d, 0x50, 0x05, 0x89, 0x04, 0x25, 0, 0x90, 0, 0, 0x8b, 0x04, 0x25, 0,
        0x90, 0, 0, 0x31, 0xd0, 0x50, 0x58, 0x90,
    ];
    const TURNS: u32 = 100;
    let code = looped(&body, TURNS);
    let ways = [true, false].map(|runs| SteppedVcpu::with(&code, runs));
    let [Some(mut fast), Some(mut slow)] = ways else {
        return;
    };
    if !fast.has_runs() {
        return;
    }
    for stepped in [&mut fast, &mut slow] {
        stepped.run(KERNEL, u64::MAX);
    }
    assert_eq!(fast.retired, slow.retired);
    assert_eq!(
        fast.retired,
        counts([11 * TURNS + 2, TURNS, TURNS - 1, TURNS, 2 * TURNS, 2 * TURNS])
    );
    assert!(
        fast.entries * 3 <= slow.entries,
        "{} of {}",
        fast.entries,
        slow.entries
    );
    let tally = fast.stepper.tally();
    assert_eq!(
        (tally.runs, tally.instructions_in_runs),
        (u64::from(TURNS), u64::from(10 * TURNS + 1))
    );
    assert_eq!(
        tally.steps + tally.instructions_in_runs,
        u64::from(fast.retired.instructions)
    );
    assert_eq!(slow.stepper.tally().runs, 0);
}

/// An overflow is reported at exactly the instruction that causes it, anywhere in a straight-line
/// run.
#[test]
fn overflow_is_reported_at_its_instruction() {
    let code = [&[0x90; 20][..], &[HLT]].concat();
    for overflow in 1..=20 {
        let Some(mut stepped) = SteppedVcpu::new(&code) else {
            return;
        };
        stepped.overflow = overflow;
        stepped.run(KERNEL, u64::MAX);
        assert_eq!(stepped.overflowed_at, Some(CODE + u64::from(overflow)));
        assert_eq!(stepped.retired.instructions, 21);
    }
}

/// If a signal interrupts a straight-line run, the instructions before the vCPU's position count as
/// executed.
#[test]
fn signal_within_run_accounts_retired_instructions() {
    let code = [&[0x50; 9][..], &[HLT]].concat();
    for done in 0..9 {
        let Some(mut stepped) = SteppedVcpu::new(&code) else {
            return;
        };
        if !stepped.has_runs() {
            return;
        }
        assert_eq!(stepped.prepare(KERNEL), VcpuStepAction::Enter);
        stepped.vcpu.request_exit();
        assert_eq!(stepped.vcpu.run().exit.unwrap_err().errno(), libc::EINTR);
        stepped.vcpu.clear_exit_request();
        let mut regs = stepped.vcpu.get_regs().unwrap();
        regs.rip += done;
        regs.rsp -= 8 * done;
        stepped.vcpu.set_regs(&regs).unwrap();
        stepped.run(KERNEL, u64::MAX);
        assert_eq!(stepped.retired, counts([10, 0, 0, 0, 0, 9]), "{done}");
    }
}

/// If the vCPU leaves a straight-line run at an address where none of its instructions starts,
/// nothing is counted.
#[test]
fn stop_outside_run_counts_nothing() {
    for (offset, cpl) in [(1, 0), (400, 0), (u64::MAX, 0), (3, 3)] {
        // lea rdx, [rax+5], three times; hlt
        let code = [&[0x48, 0x8d, 0x50, 0x05].repeat(3)[..], &[HLT]].concat();
        let Some(mut stepped) = SteppedVcpu::new(&code) else {
            return;
        };
        if !stepped.has_runs() {
            return;
        }
        assert_eq!(stepped.prepare(KERNEL), VcpuStepAction::Enter);
        let mut state = VcpuState::read(&stepped.vcpu).unwrap();
        state.regs.rip = CODE.wrapping_add(offset);
        state.sregs.ss.dpl = cpl;
        let step = stepped.stepper.end(&state);
        assert!(
            step.lost && step.kernel == RetiredCounts::default() && step.user == RetiredCounts::default()
        );
        assert_eq!(stepped.stepper.tally().lost, 1);
    }
}

/// Code that modifies itself in a straight-line run is reported once as lost, and single-stepped
/// from then on.
#[test]
fn self_modifying_code_is_lost_once() {
    // inc eax; mov [changed], al; nop; changed: mov ebx, 0
    let changed = CODE as u32 + 5 + 2 + 7 + 1 + 1;
    let mut body = vec![0xff, 0xc0, 0x88, 0x04, 0x25];
    body.extend_from_slice(&changed.to_le_bytes());
    body.extend_from_slice(&[0x90, 0xbb, 0, 0, 0, 0]);
    let Some(mut stepped) = SteppedVcpu::new(&looped(&body, 4)) else {
        return;
    };
    if !stepped.has_runs() {
        return;
    }
    stepped.may_lose = true;
    stepped.run(KERNEL, u64::MAX);
    assert_eq!(stepped.stepper.tally().lost, 1);
    assert_eq!(
        stepped.vcpu.get_regs().unwrap().rbx,
        4,
        "the guest is none the wiser"
    );
    // The first straight-line run has an unknown outcome and is not counted: `mov ecx` and the
    // first iteration except its branch.
    let in_first_run = 6;
    assert_eq!(stepped.retired.instructions, 1 + 4 * 6 + 1 - in_first_run);
}

/// A straight-line run extends across a page boundary.
#[test]
fn run_extends_across_page_boundary() {
    const PAGE: usize = 4096;
    const IN_FRONT: usize = 10;
    // jmp to the end of the page; there mov eax, 1 across the boundary, and as much code after it
    let mut code = vec![0xe9];
    code.extend_from_slice(&((PAGE - IN_FRONT - 2 - 5) as u32).to_le_bytes());
    code.resize(PAGE - IN_FRONT - 2, 0xcc);
    code.extend_from_slice(&[0x90; IN_FRONT]);
    code.extend_from_slice(&[0xb8, 1, 0, 0, 0]);
    code.extend_from_slice(&[0x90; IN_FRONT]);
    code.push(HLT);
    let Some(mut stepped) = SteppedVcpu::new(&code) else {
        return;
    };
    stepped.run(KERNEL, u64::MAX);
    let right = (2 * IN_FRONT + 3) as u32;
    assert_eq!(stepped.retired, counts([right, 1, 1, 0, 0, 0]));
    if stepped.has_runs() {
        let tally = stepped.stepper.tally();
        assert_eq!(
            (tally.runs, tally.instructions_in_runs),
            (1, 2 * IN_FRONT as u64 + 1)
        );
    }
}

/// Gives each exception of the guest its own handler, which skips RBX bytes of code and resumes. A
/// handler executes seven instructions. They include one branch (IRET), three loads (INC, ADD and
/// IRET) and two stores (INC and ADD).
fn give_handlers(stepped: &SteppedVcpu) {
    let write = |at: u64, bytes: &[u8]| stepped.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    for (n, descriptor) in [0u64, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff]
        .iter()
        .enumerate()
    {
        write(GDT + 8 * n as u64, &descriptor.to_le_bytes());
    }
    for vector in [12u64, 13, 14] {
        let handler = HANDLER + 0x40 * vector;
        // Interrupt gate, present, code selector 8.
        let gate = (handler & 0xffff) | 8 << 16 | 0x8e00 << 32 | (handler >> 16) << 48;
        write(IDT + 16 * vector, &gate.to_le_bytes());
        // nop; inc qword [DATA]; nop; nop; add rsp, 8; add [rsp], rbx; iretq
        let code = [
            &[0x90, 0x48, 0xff, 0x04, 0x25, 0, 0x90, 0, 0, 0x90, 0x90][..],
            &[0x48, 0x83, 0xc4, 0x08, 0x48, 0x01, 0x1c, 0x24, 0x48, 0xcf],
        ];
        write(handler, &code.concat());
    }
    let mut sregs = stepped.vcpu.get_sregs().unwrap();
    let table = |base, limit| kvm_dtable {
        base,
        limit,
        ..Default::default()
    };
    (sregs.gdt, sregs.idt) = (table(GDT, 23), table(IDT, 0xfff));
    stepped.vcpu.set_sregs(&sregs).unwrap();
}

/// If an instruction in a straight-line run faults, the instructions before it and those of the
/// handler are counted, but not the instruction itself. The counts are the same without
/// straight-line runs.
#[test]
fn fault_within_run_retires_preceding_instructions() {
    // mov eax, [NO_PAGE]
    let page_fault = [&[0x8b, 0x04, 0x25][..], &NO_PAGE.to_le_bytes()].concat();
    // mov eax, [r8] with a non-canonical address in R8; push [r8]; mov eax, [rbp], of the stack
    // segment
    let protection: &[u8] = &[0x41, 0x8b, 0x00];
    let pushed: &[u8] = &[0x41, 0xff, 0x30];
    let stack: &[u8] = &[0x8b, 0x45, 0x00];
    for fault in [&page_fault[..], protection, pushed, stack] {
        for before in 0..8 {
            let skip = [&[0xbb][..], &(fault.len() as u32).to_le_bytes()].concat();
            let parts = [&skip[..], &[0x90; 8][..before], fault, &[0x50; 5], &[HLT]];
            let results = [true, false].map(|runs| {
                let mut stepped = SteppedVcpu::with(&parts.concat(), runs)?;
                give_handlers(&stepped);
                let mut regs = stepped.vcpu.get_regs().unwrap();
                (regs.r8, regs.rbp) = (1 << 62, 1 << 62);
                stepped.vcpu.set_regs(&regs).unwrap();
                stepped.run(KERNEL, u64::MAX);
                let handled: u64 = stepped.memory.read_obj(GuestAddress(DATA)).unwrap();
                assert_eq!(handled, 1, "{fault:x?}");
                Some((stepped.retired, stepped.stepper.tally().runs, stepped.has_runs()))
            });
            let [Some((fast, runs, has_runs)), Some((slow, none, _))] = results else {
                return;
            };
            let right = counts([1 + before as u32 + 7 + 5 + 1, 1, 0, 0, 3, 2 + 5]);
            assert_eq!((fast, slow), (right, right), "{fault:x?} behind {before}");
            assert_eq!(none, 0);
            assert!(!has_runs || runs > 0);
        }
    }
}

/// Straight-line runs are not used if the guest has set its trap flag or breakpoints, or if too few
/// breakpoint registers are free.
#[test]
fn guest_debug_state_disables_runs() {
    let code = [&[0x90; 9][..], &[HLT]].concat();
    let ways: [fn(&mut SteppedVcpu); 3] = [
        |stepped| stepped.debug.set_sites(&[0x7000]),
        |stepped| {
            let mut registers = stepped.vcpu.get_debug_regs().unwrap();
            (registers.db[0], registers.dr7) = (0x7000, 0x402);
            stepped.vcpu.set_debug_regs(&registers).unwrap();
        },
        |stepped| {
            let mut events = stepped.vcpu.get_vcpu_events().unwrap();
            events.flags = kvm_bindings::KVM_VCPUEVENT_VALID_SHADOW;
            events.interrupt.shadow = 2;
            stepped.vcpu.set_vcpu_events(&events).unwrap();
        },
    ];
    for (n, prepare) in ways.into_iter().enumerate() {
        let Some(mut stepped) = SteppedVcpu::new(&code) else {
            return;
        };
        if !stepped.has_runs() {
            return;
        }
        prepare(&mut stepped);
        stepped.prepare(KERNEL);
        assert!(stepped.stepper.current_run.is_none(), "{n}");
        assert!(stepped.stepper.present.is_some(), "{n}");
    }
}

/// The number of cached straight-line runs is limited.
#[test]
fn decode_cache_is_bounded() {
    let memory = vm_memory::GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
    memory.write_slice(&[0x90; 0x10000], GuestAddress(0)).unwrap();
    let mut runs = decoded::RunCache::default();
    let mut meter = vpmu::exact::SingleStepMeter::new(Vendor::Intel);
    let state = VcpuState {
        regs: Default::default(),
        sregs: Default::default(),
    };
    for at in 0x8000..0xa000 {
        let found = runs.find(at, &mut meter, &mut LinearMemory::new(&memory, &state));
        assert_eq!(
            found.map(|run| run.len()),
            Some(vpmu::exact::MAX_RUN_INSTRUCTIONS)
        );
    }
    assert_eq!(runs.entries.len(), decoded::CACHE_SLOTS);
    // Changed code at the same address is decoded again.
    memory
        .write_slice(&[0x50, 0x50, 0xc3], GuestAddress(0x100))
        .unwrap();
    let found = runs.find(0x100, &mut meter, &mut LinearMemory::new(&memory, &state));
    assert_eq!(found, None, "too short");
    memory
        .write_slice(&[0x50, 0x50, 0x50, 0xc3], GuestAddress(0x100))
        .unwrap();
    let found = runs.find(0x100, &mut meter, &mut LinearMemory::new(&memory, &state));
    assert_eq!(found.map(|run| run.len()), Some(3));
}
