//! Tests that a straight-line run retires the same counts as single steps, and that excluded
//! instructions end a run.

use perf_core::pmu::vmm_pmu::VmmPmuCounts;
use proptest::prelude::*;

use super::super::*;
use super::*;

const CODE: u64 = 0x1000;
const UNLIMITED: RetiredCounts = RetiredCounts {
    instructions: u32::MAX,
    branches: u32::MAX,
    taken_branches: u32::MAX,
    conditional_branches: u32::MAX,
    loads: u32::MAX,
    stores: u32::MAX,
};

struct Code<'c>(&'c [u8]);

impl SteppedGuestMemory for Code<'_> {
    fn read(&mut self, linear: u64, buffer: &mut [u8]) -> usize {
        let rest = linear.checked_sub(CODE).and_then(|at| self.0.get(at as usize..));
        let rest = rest.unwrap_or_default();
        let n = rest.len().min(buffer.len());
        buffer[..n].copy_from_slice(&rest[..n]);
        n
    }

    fn gate(&mut self, _: u8) -> Option<u64> {
        None
    }
}

fn at(offset: usize) -> SteppedCpuState {
    SteppedCpuState {
        rip: CODE + offset as u64,
        rflags: 2,
        cpl: 0,
        size: CodeSegmentMode::Bits64,
        gpr: [0; 16],
        segment_bases: [0; 6],
    }
}

fn run_of(code: &[u8]) -> StraightLineCode {
    SingleStepMeter::new(Vendor::Intel).straight_run(code)
}

/// Returns the counts that single steps through the first `n` instructions of `run` retire.
fn stepped(run: &StraightLineCode, code: &[u8], n: usize, vendor: Vendor) -> RetiredCounts {
    let mut meter = SingleStepMeter::new(vendor);
    let mut sum = RetiredCounts::default();
    for instruction in 0..n {
        let (from, to) = (run.end_of(instruction), run.end_of(instruction + 1));
        let mut memory = Code(code);
        assert_eq!(meter.begin(&at(from), &mut memory), InstructionClass::Plain);
        let step = meter.end(&at(to), &mut memory);
        assert!(!step.lost && !step.event, "{step:?}");
        sum.add(step.kernel);
    }
    sum
}

/// Machine code of instructions that may be part of a straight-line run.
const STRAIGHT: [&[u8]; 16] = [
    &[0x90],                                     // nop
    &[0xf3, 0x0f, 0x1e, 0xfa],                   // endbr64
    &[0x0f, 0x1f, 0x40, 0x00],                   // nop dword [rax]
    &[0xb8, 1, 0, 0, 0],                         // mov eax, 1
    &[0x50],                                     // push rax
    &[0x58],                                     // pop rax
    &[0xff, 0x30],                               // push [rax]
    &[0x48, 0x8d, 0x50, 0x05],                   // lea rdx, [rax+5]
    &[0x48, 0x8b, 0x45, 0x08],                   // mov rax, [rbp+8]
    &[0x01, 0x42, 0x28],                         // add [rdx+0x28], eax
    &[0xf0, 0x0f, 0xb1, 0x0a],                   // lock cmpxchg [rdx], ecx
    &[0x65, 0x48, 0x8b, 0x04, 0x25, 0, 0, 0, 0], // mov rax, gs:[0]
    &[0x0f, 0x44, 0x02],                         // cmove eax, [rdx]
    &[0x0f, 0x94, 0x02],                         // sete [rdx]
    &[0xc9],                                     // leave
    &[0x48, 0xf7, 0x22],                         // mul qword [rdx]
];

/// Machine code of instructions that end a straight-line run: branches, instructions that exit or
/// have an interrupt shadow, instructions that can raise other faults, and changes of the flags
/// that control stepping.
const ENDS: [&[u8]; 36] = [
    &[0xeb, 0],                // jmp
    &[0x74, 0],                // jz
    &[0xe8, 0, 0, 0, 0],       // call
    &[0xff, 0xd0],             // call rax
    &[0xc3],                   // ret
    &[0x0f, 0x05],             // syscall
    &[0x48, 0x0f, 0x07],       // sysretq
    &[0x48, 0xcf],             // iretq
    &[0xcc],                   // int3
    &[0xcd, 0x80],             // int 0x80
    &[0x0f, 0x0b],             // ud2
    &[0xf4],                   // hlt
    &[0xfa],                   // cli
    &[0xfb],                   // sti
    &[0x9c],                   // pushf
    &[0x9d],                   // popf
    &[0x8e, 0xd0],             // mov ss, eax
    &[0x8e, 0xd8],             // mov ds, eax
    &[0x0f, 0xa0],             // push fs
    &[0x0f, 0x22, 0xd8],       // mov cr3, rax
    &[0x0f, 0x23, 0xf8],       // mov dr7, rax
    &[0x0f, 0x01, 0xf8],       // swapgs
    &[0x0f, 0xae, 0xf0],       // mfence
    &[0x0f, 0xa2],             // cpuid
    &[0x0f, 0x30],             // wrmsr
    &[0x0f, 0x32],             // rdmsr
    &[0x0f, 0x33],             // rdpmc
    &[0x0f, 0x31],             // rdtsc
    &[0xe6, 0x10],             // out 0x10, al
    &[0xe4, 0x10],             // in al, 0x10
    &[0xf3, 0xa4],             // rep movsb
    &[0xf3, 0x90],             // pause
    &[0x48, 0xf7, 0xf1],       // div rcx, which may raise #DE
    &[0x0f, 0x10, 0x02],       // movups xmm0, [rdx], which may raise #NM
    &[0xd9, 0xe8],             // fld1
    &[0xf3, 0x0f, 0xb8, 0xc1], // popcnt, which not every processor has
];

#[test]
fn excluded_instructions_end_a_run() {
    for end in ENDS {
        let run = run_of(&[&[0x90; 3], end, &[0x90; 9]].concat());
        assert_eq!(run.len(), 3, "{end:x?}");
        assert_eq!(run.code(), [&[0x90; 3], end].concat(), "{end:x?}");
        assert!(run_of(end).is_empty(), "{end:x?}");
    }
}

#[test]
fn run_reports_stack_accesses() {
    for (code, uses) in [
        (&[0x50][..], true),
        (&[0x48, 0x8b, 0x45, 0x08], true),
        (&[0x48, 0x8b, 0x04, 0x24], true),
        (&[0x48, 0x8b, 0x02], false),
        (&[0x90], false),
    ] {
        assert_eq!(run_of(code).uses_stack(), uses, "{code:x?}");
    }
}

#[test]
fn run_length_is_limited_and_may_be_zero() {
    assert_eq!(run_of(&[0x90; 400]).len(), MAX_RUN_INSTRUCTIONS);
    // The instruction has nine bytes. A run contains only whole instructions.
    let long = STRAIGHT[11].repeat(40);
    assert_eq!(run_of(&long).len(), MAX_RUN_BYTES / 9);
    assert!(run_of(&[]).is_empty());
    assert!(run_of(&[0x48, 0x8b]).is_empty(), "cut off");
    let none = run_of(&[]);
    assert_eq!((none.end_of(7), none.counts(7)), (0, RetiredCounts::default()));
    assert_eq!((none.completed_at(0), none.completed_at(1)), (Some(0), None));
}

/// A straight-line run ends before the earliest armed overflow.
#[test]
fn run_ends_before_armed_overflow() {
    // push, pop, nop, push
    let run = run_of(&[0x50, 0x58, 0x90, 0x50]);
    let cut = |remaining: RetiredCounts| run.instructions_within(&remaining);
    assert_eq!(cut(UNLIMITED), 4);
    assert_eq!(
        cut(RetiredCounts {
            instructions: 2,
            ..UNLIMITED
        }),
        2
    );
    for (stores, expected) in [(1, 3), (0, 0)] {
        assert_eq!(cut(RetiredCounts { stores, ..UNLIMITED }), expected);
    }
    assert_eq!(
        cut(RetiredCounts {
            loads: 0,
            ..UNLIMITED
        }),
        1
    );
    assert_eq!(
        cut(RetiredCounts {
            branches: 0,
            ..UNLIMITED
        }),
        4
    );
    let vmm_counts = VmmPmuCounts::new(vmm_counts::SELECTORS);
    assert_eq!(RetiredCounts::remaining(&vmm_counts, 0), UNLIMITED);
}

proptest! {
    /// A run of arbitrary straight-line instructions retires the same counts as single steps.
    #[test]
    fn run_retires_same_counts_as_single_steps(
        pieces in prop::collection::vec(prop::sample::select(&STRAIGHT[..]), 0..20),
        end in prop::sample::select(&ENDS[..]),
        amd: bool,
    ) {
        let code = [&pieces.concat()[..], end].concat();
        let run = run_of(&code);
        prop_assert_eq!(run.len(), pieces.len());
        let vendor = if amd { Vendor::Amd } else { Vendor::Intel };
        for n in 0..=pieces.len() {
            let offset = pieces[..n].concat().len();
            prop_assert_eq!(run.end_of(n), offset);
            prop_assert_eq!(run.completed_at(offset as u64), Some(n));
            prop_assert_eq!(run.counts(n), stepped(&run, &code, n, vendor));
        }
    }

    /// Random bytes also decode to a finite run, and offsets inside an instruction are rejected.
    #[test]
    fn random_bytes_decode_to_finite_run(code in prop::collection::vec(any::<u8>(), 0..300)) {
        let run = run_of(&code);
        prop_assert!(run.len() <= MAX_RUN_INSTRUCTIONS && run.code().len() <= MAX_RUN_BYTES);
        prop_assert!(code.starts_with(run.code()));
        prop_assert_eq!(run.counts(run.len()), stepped(&run, &code, run.len(), Vendor::Intel));
        let places = (0..=300).filter(|&offset| run.completed_at(offset).is_some()).count();
        prop_assert_eq!(places, run.len() + 1);
        // Equal bytes decode to the same run, regardless of the bytes that follow.
        prop_assert_eq!(run_of(run.code()), run);
    }
}
