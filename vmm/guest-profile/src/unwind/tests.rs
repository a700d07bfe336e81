//! Tests of call chains in small synthetic guests, both valid and hostile.

use super::context::SampledUserRegs;
use super::parts::{USER_DS, USER64_CS};
use super::*;
use crate::testing::{TestGuest, orc_sections as sections};
use proptest::prelude::*;

const TEXT: u64 = 0xffff_ffff_8100_0000;
const KSTACK: u64 = 0xffff_c900_0001_0000; // 16 KiB, aligned to its size
const USTACK: u64 = 0x7fff_ffff_0000;
const UTEXT: u64 = 0x40_0000;
const ORC_AT: u64 = 0xffff_ffff_8200_0000;

/// Creates a guest with the kernel stack at guest-physical addresses 0x4000 to 0x8000, the user
/// stack at 0x8000 to 0xa000, and user code at 0xa000.
fn guest() -> TestGuest {
    let mut g = TestGuest::new(0x4_0000, false);
    for page in 0..4 {
        g.map(KSTACK + page * 4096, 0x4000 + page * 4096, 1);
    }
    for page in 0..2 {
        g.map(USTACK + page * 4096, 0x8000 + page * 4096, 1);
    }
    g.map(UTEXT, 0xa000, 1);
    g
}

fn regs(g: &TestGuest, cpl: u8, rip: u64, rsp: u64, rbp: u64) -> GuestRegs {
    GuestRegs {
        rip,
        rsp,
        rbp,
        cr0: 1 << 31,
        cr3: g.root,
        cr4: 1 << 5,
        efer: 1 << 10,
        cpl,
        code64: true,
        ..Default::default()
    }
}

fn kput(g: &mut TestGuest, gva: u64, v: u64) {
    g.put(gva - KSTACK + 0x4000, v);
}

fn uput(g: &mut TestGuest, gva: u64, v: u64) {
    g.put(gva - USTACK + 0x8000, v);
}

/// Writes two frames to the user stack: the callers of a leaf function that has rbp = `USTACK +
/// 0x100`.
fn user_frames(g: &mut TestGuest) {
    uput(g, USTACK + 0x100, USTACK + 0x200);
    uput(g, USTACK + 0x108, UTEXT + 0x111);
    uput(g, USTACK + 0x200, 0);
    uput(g, USTACK + 0x208, UTEXT + 0x222);
    for b in &mut g.ram[0xa000..0xb000] {
        *b = 0x90;
    }
}

fn run(
    g: &TestGuest,
    regs: &GuestRegs,
    kernel: Option<KernelUnwinder<'_>>,
    slots: usize,
) -> (CallChain, Vec<u64>) {
    let mut out = vec![0xAA; slots];
    let limits = UnwindLimits {
        max_time: None,
        ..UnwindLimits::default()
    };
    let chain = walk(&g.ram[..], regs, kernel, &limits, &mut out);
    out.truncate(chain.len);
    (chain, out)
}

fn orc() -> OrcTable {
    // Function f: sub 0x10 (cfa rsp+0x18). Function g: push rbp (cfa rsp+0x10, bp at cfa-0x10).
    // Then the entry code with a pt_regs, an end entry and an undefined entry.
    let (i, e) = sections(
        ORC_AT,
        &[
            (TEXT, 0x18, 0, 5),
            (TEXT + 0x100, 0x10, -0x10, 0x15),
            (TEXT + 0x200, 0, 0, 5 | 0x100),
            (TEXT + 0x300, 0, 0, 0x400), // end
            (TEXT + 0x400, 0, 0, 0),     // undefined
        ],
    );
    OrcTable::parse(&i, ORC_AT, &e).unwrap()
}

/// Returns data for unwinding a kernel that runs at its link-time addresses, with the ORC tables
/// `table`.
fn by_orc(table: &OrcTable) -> KernelUnwinder<'_> {
    KernelUnwinder {
        orc: Some(table),
        slide: 0,
        entry_text: (0, 0),
    }
}

/// Returns the vCPU registers in a leaf function whose callers are the frames of [`user_frames`].
fn user_regs(g: &TestGuest) -> GuestRegs {
    regs(g, 3, UTEXT + 0x50, USTACK + 0x80, USTACK + 0x100)
}

/// Writes the user registers of [`user_regs`] as a `pt_regs` to the address `at`.
fn put_user_regs(g: &mut TestGuest, at: u64) {
    put_pt_regs(g, at, UTEXT + 0x50, USER64_CS, USTACK + 0x80, USTACK + 0x100);
}

fn put_pt_regs(g: &mut TestGuest, at: u64, ip: u64, cs: u64, sp: u64, bp: u64) {
    kput(g, at + pt_regs::BP, bp);
    let ss = if cs & 3 == 3 { USER_DS } else { 0x18 };
    kput_all(g, at + pt_regs::IP, [ip, cs, 0x202, sp, ss]);
}

/// Writes `words` to consecutive guest-virtual addresses from `gva` on.
fn kput_all(g: &mut TestGuest, gva: u64, words: impl IntoIterator<Item = u64>) {
    for (at, word) in (gva..).step_by(8).zip(words) {
        kput(g, at, word);
    }
}

#[test]
fn user_sample_follows_frame_pointers() {
    let mut g = guest();
    user_frames(&mut g);
    let r = user_regs(&g);
    let (chain, out) = run(&g, &r, None, 16);
    assert_eq!(
        out,
        [CONTEXT_GUEST_USER, UTEXT + 0x50, UTEXT + 0x111, UTEXT + 0x222]
    );
    assert_eq!(
        (chain.user_end, chain.kernel_end),
        (Some(UnwindStop::Complete), None)
    );
}

#[test]
fn caller_is_found_in_prologue_and_at_ret() {
    for (code, pushed) in [
        (&[0x55][..], false),
        (&[0xC3][..], false),
        (&[0x48, 0x89, 0xE5][..], true),
    ] {
        let mut g = guest();
        user_frames(&mut g);
        g.ram[0xa050..0xa050 + code.len()].copy_from_slice(code);
        let sp = USTACK + 0x80;
        if pushed {
            uput(&mut g, sp, USTACK + 0x100);
            uput(&mut g, sp + 8, UTEXT + 0x77);
        } else {
            uput(&mut g, sp, UTEXT + 0x77);
        }
        let (chain, out) = run(&g, &regs(&g, 3, UTEXT + 0x50, sp, USTACK + 0x100), None, 16);
        assert_eq!(
            out[1..],
            [UTEXT + 0x50, UTEXT + 0x77, UTEXT + 0x111, UTEXT + 0x222]
        );
        assert!(!chain.guessed);
    }
}

#[test]
fn frameless_leaf_caller_needs_matching_call() {
    for (target, found) in [(UTEXT + 0x40, true), (UTEXT + 0x60, false)] {
        let mut g = guest();
        user_frames(&mut g);
        let ret = UTEXT + 0x77;
        g.ram[0xa072] = 0xE8;
        g.ram[0xa073..0xa077].copy_from_slice(&((target.wrapping_sub(ret)) as i32).to_le_bytes());
        uput(&mut g, USTACK + 0x80, ret);
        let (chain, out) = run(&g, &user_regs(&g), None, 16);
        assert_eq!(out.contains(&ret), found);
        assert_eq!(chain.guessed, found);
    }
}

#[test]
fn orc_unwinds_from_kernel_to_user_space() {
    let slide = 0x1400_0000;
    let mut g = guest();
    user_frames(&mut g);
    let table = orc();
    let sp = KSTACK + 0x3000;
    kput(&mut g, sp + 0x10, TEXT + slide + 0x110); // f's return address, into g
    kput(&mut g, sp + 0x18, 0xdead); // g's saved rbp
    kput(&mut g, sp + 0x20, TEXT + slide + 0x201); // g's return address, into the entry
    put_user_regs(&mut g, sp + 0x28);
    let r = regs(&g, 0, TEXT + slide + 0x20, sp, 0);
    let (chain, out) = run(
        &g,
        &r,
        Some(KernelUnwinder {
            slide,
            ..by_orc(&table)
        }),
        16,
    );
    let k = TEXT + slide;
    assert_eq!(
        out,
        [
            CONTEXT_GUEST_KERNEL,
            k + 0x20,
            k + 0x110,
            k + 0x201,
            CONTEXT_GUEST_USER,
            UTEXT + 0x50,
            UTEXT + 0x111,
            UTEXT + 0x222
        ]
    );
    assert_eq!(chain.kernel_end, Some(UnwindStop::Complete));
    assert!(!chain.guessed);
}

#[test]
fn orc_unwinds_through_interrupt_frame() {
    let mut g = guest();
    let table = orc();
    let sp = KSTACK + 0x2000;
    put_pt_regs(&mut g, sp, TEXT + 0x30, 0x10, KSTACK + 0x3000, 0);
    kput(&mut g, KSTACK + 0x3010, TEXT + 0x301);
    let r = regs(&g, 0, TEXT + 0x210, sp, 0);
    let (chain, out) = run(&g, &r, Some(by_orc(&table)), 16);
    assert_eq!(
        out,
        [CONTEXT_GUEST_KERNEL, TEXT + 0x210, TEXT + 0x30, TEXT + 0x301]
    );
    assert_eq!(
        (chain.kernel_end, chain.user_end),
        (Some(UnwindStop::Complete), None)
    );
}

#[test]
fn user_part_is_found_at_stack_top_without_tables() {
    let mut g = guest();
    user_frames(&mut g);
    let table = orc();
    let top = KSTACK + THREAD_SIZE - pt_regs::SIZE;
    put_user_regs(&mut g, top);
    let r = regs(&g, 0, TEXT + 0x410, KSTACK + 0x3000, 0);
    let (chain, out) = run(&g, &r, Some(by_orc(&table)), 16);
    assert_eq!(chain.kernel_end, Some(UnwindStop::NoTable));
    assert_eq!(out[2..4], [CONTEXT_GUEST_USER, UTEXT + 0x50]);
    assert!(chain.guessed);
    // A `pt_regs` with a kernel code segment selector contains no user registers.
    put_pt_regs(&mut g, top, UTEXT + 0x50, 0x10, USTACK + 0x80, USTACK + 0x100);
    assert_eq!(run(&g, &r, Some(by_orc(&table)), 16).0.user_frames, 0);
}

#[test]
fn frame_pointer_kernel_is_unwound() {
    let mut g = guest();
    user_frames(&mut g);
    let sp = KSTACK + 0x2000;
    kput(&mut g, sp + 0x20, (sp + 0x100) | 1); // address of a pt_regs with bit 0 set
    kput(&mut g, sp + 0x28, TEXT + 0x51);
    put_user_regs(&mut g, sp + 0x100);
    let r = regs(&g, 0, TEXT + 0x20, sp, sp + 0x20);
    let (chain, out) = run(
        &g,
        &r,
        Some(KernelUnwinder {
            orc: None,
            ..by_orc(&orc())
        }),
        16,
    );
    assert_eq!(
        out[..5],
        [
            CONTEXT_GUEST_KERNEL,
            TEXT + 0x20,
            TEXT + 0x51,
            CONTEXT_GUEST_USER,
            UTEXT + 0x50
        ]
    );
    assert_eq!(chain.kernel_end, Some(UnwindStop::Complete));
}

/// Address range of the kernel's entry code, which no unwind table covers. The tests place its
/// stack and the TSS in the first page of the kernel stack.
const ENTRY: (u64, u64) = (TEXT + 0x400, TEXT + 0x500);
const TSS: u64 = KSTACK;
const ENTRY_STACK: u64 = KSTACK + 0x1000;

/// Unwinds a sample in the kernel's entry code, with the stack pointer `sp` and the registers that
/// SYSCALL leaves. `change` modifies guest memory and registers before.
fn in_entry_code(sp: u64, change: impl FnOnce(&mut TestGuest, &mut GuestRegs)) -> (CallChain, Vec<u64>) {
    let mut g = guest();
    user_frames(&mut g);
    kput(&mut g, TSS + 4, ENTRY_STACK);
    kput(&mut g, TSS + 20, USTACK + 0x80);
    let mut r = regs(&g, 0, TEXT + 0x410, sp, USTACK + 0x100);
    (r.rcx, r.r11, r.tss_base) = (UTEXT + 0x50, 0x246, TSS);
    change(&mut g, &mut r);
    let table = orc();
    let kernel = KernelUnwinder {
        orc: Some(&table),
        slide: 0,
        entry_text: ENTRY,
    };
    run(&g, &r, Some(kernel), 16)
}

const FROM_ENTRY: [u64; 6] = [
    CONTEXT_GUEST_KERNEL,
    TEXT + 0x410,
    CONTEXT_GUEST_USER,
    UTEXT + 0x50,
    UTEXT + 0x111,
    UTEXT + 0x222,
];

#[test]
fn syscall_entry_and_exit_have_user_chain() {
    // The stack pointer is on the user stack, on the task stack, or on the entry stack after the
    // page-table switch.
    for sp in [USTACK + 0x80, KSTACK + 0x3fd8, ENTRY_STACK - 8] {
        let (chain, out) = in_entry_code(sp, |g, _| kput(g, ENTRY_STACK - 8, USTACK + 0x80));
        assert_eq!(out, FROM_ENTRY, "{sp:#x}");
        assert!(chain.guessed);
        assert_eq!(chain.kernel_end, Some(UnwindStop::Complete));
    }
}

#[test]
fn exit_path_has_user_chain_from_return_frame() {
    let frame = |g: &mut TestGuest, at: u64| {
        kput_all(g, at, [UTEXT + 0x50, USER64_CS, 0x202, USTACK + 0x80, USER_DS]);
    };
    let old = KSTACK + 0x3000;
    for used in [0, 8, 40, 48] {
        let (chain, out) = in_entry_code(ENTRY_STACK - used, |g, r| {
            frame(g, old + 16);
            (r.rdi, r.rcx, r.r11) = (old, 0x1234, 0);
        });
        assert_eq!(out, FROM_ENTRY, "{used}");
        assert!(!chain.guessed);
    }
    // The address of the old stack is unknown or unmapped, but the copied frame is complete.
    let (chain, out) = in_entry_code(ENTRY_STACK - 40, |g, r| {
        frame(g, ENTRY_STACK - 40);
        (r.rdi, r.rcx, r.r11) = (USTACK, 0x1234, 0);
    });
    assert_eq!(out, FROM_ENTRY);
    assert!(!chain.guessed);
}

#[test]
fn entry_code_without_user_registers_has_no_user_part() {
    let none = |what: &str, (chain, out): (CallChain, Vec<u64>)| {
        assert_eq!(out, [CONTEXT_GUEST_KERNEL, TEXT + 0x410], "{what}");
        assert_eq!(chain.user_frames, 0, "{what}");
    };
    none("flags", in_entry_code(USTACK, |_, r| r.r11 = 0x46));
    none("high flags", in_entry_code(USTACK, |_, r| r.r11 = 0x1_0000_0246));
    none("address", in_entry_code(USTACK, |_, r| r.rcx = TEXT));
    none(
        "stack",
        in_entry_code(KSTACK + 0x3fd8, |g, _| kput(g, TSS + 20, 7 << 60)),
    );
    none(
        "no TSS",
        in_entry_code(KSTACK + 0x3fd8, |_, r| r.tss_base = 0x1000),
    );
}

#[test]
fn chain_end_reasons_round_trip() {
    let ends = || UnwindStop::ALL.into_iter().map(Some).chain([None]);
    for (kernel, user) in ends().flat_map(|k| ends().map(move |u| (k, u))) {
        for guessed in [false, true] {
            let ends = UnwindStopReasons {
                kernel,
                user,
                guessed,
            };
            assert_eq!(UnwindStopReasons::from_bytes(ends.to_bytes()), ends);
            let cut = [kernel, user]
                .iter()
                .any(|e| matches!(e, Some(UnwindStop::Full | UnwindStop::Spent)));
            assert_eq!(ends.truncation_reason().is_some(), cut);
        }
    }
    assert_eq!(
        UnwindStopReasons::from_bytes([0xFF, 0xFE]),
        UnwindStopReasons::default()
    );
}

#[test]
fn cyclic_or_descending_frames_end_walk() {
    let mut g = guest();
    uput(&mut g, USTACK + 0x100, USTACK + 0x100);
    uput(&mut g, USTACK + 0x108, UTEXT + 1);
    let (chain, _) = run(&g, &regs(&g, 3, UTEXT, USTACK, USTACK + 0x100), None, 64);
    assert_eq!(
        (chain.user_end, chain.user_frames),
        (Some(UnwindStop::BadFrame), 2)
    );
    // A hostile kernel frame restores a lower stack pointer within the same stack.
    let table = orc();
    let sp = KSTACK + 0x2000;
    put_pt_regs(&mut g, sp, TEXT + 0x210, 0x10, sp, 0);
    let r = regs(&g, 0, TEXT + 0x210, sp, 0);
    let (chain, _) = run(&g, &r, Some(by_orc(&table)), 64);
    assert_eq!(
        (chain.kernel_end, chain.kernel_frames),
        (Some(UnwindStop::BadFrame), 1)
    );
}

#[test]
fn walk_stops_at_end_of_slice() {
    let mut g = guest();
    user_frames(&mut g);
    let r = user_regs(&g);
    for slots in 0..5 {
        let (chain, out) = run(&g, &r, None, slots);
        assert!(out.len() <= slots);
        // The chain does not end with a context marker, because each marker is followed by a frame.
        assert_ne!(out.last(), Some(&CONTEXT_GUEST_USER));
        assert_eq!(chain.user_end == Some(UnwindStop::Complete), slots >= 4);
    }
}

#[test]
fn chain_without_paging_is_interrupted_address() {
    let g = guest();
    let mut r = regs(&g, 0, 0x7c00, 0, 0);
    r.cr0 = 0;
    let (chain, out) = run(&g, &r, None, 16);
    assert_eq!(out, [CONTEXT_GUEST_KERNEL, 0x7c00]);
    assert_eq!(chain.kernel_end, Some(UnwindStop::Unsupported));
}

#[test]
fn user_walk_supports_32_bit_frames() {
    let mut g = guest();
    g.map(0x1000, 0x8000, 1);
    let put = |g: &mut TestGuest, at: u64, v: u32| {
        g.ram[at as usize + 0x7000..][..4].copy_from_slice(&v.to_le_bytes());
    };
    put(&mut g, 0x1100, 0x1200);
    put(&mut g, 0x1104, 0x40_0111);
    put(&mut g, 0x1200, 0);
    put(&mut g, 0x1204, 0x40_0222);
    let mut r = regs(&g, 3, UTEXT + 0x50, 0x1080, 0x1100);
    r.code64 = false;
    let (_, out) = run(&g, &r, None, 16);
    assert_eq!(out[1..], [UTEXT + 0x50, UTEXT + 0x111, UTEXT + 0x222]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn hostile_stacks_stay_within_limits(
        stack in proptest::collection::vec(any::<u64>(), 3072),
        pointers in proptest::collection::vec((0usize..3072, 0u64..0x6000), 0..200),
        rip: u64, rsp_off in 0u64..0x4000, rbp_off in 0u64..0x4000, wild: bool,
        cpl in 0u8..4, use_orc: bool, slots in 0usize..140, slide: u32, in_entry: bool, tss_off in 0u64..0x4000, flags: u32, reads in 0u32..3000,
    ) {
        let mut g = guest();
        for (i, &word) in stack.iter().enumerate() {
            g.put(0x4000 + 8 * i as u64, word);
        }
        // Many words point to the stacks and the text, so that walks do not end immediately.
        for &(slot, to) in &pointers {
            let v = match to % 3 { 0 => KSTACK + to, 1 => USTACK + to % 0x2000, _ => TEXT + to % 0x500 };
            g.put(0x4000 + 8 * slot as u64, v);
        }
        let stack = if cpl == 3 { USTACK } else { KSTACK };
        let ip = if wild { rip } else { TEXT + rip % 0x500 };
        let mut r = regs(&g, cpl, ip, stack + rsp_off, stack + rbp_off);
        (r.tss_base, r.rcx, r.r11, r.rdi) = (KSTACK + tss_off, rip >> 17, u64::from(flags), KSTACK + tss_off);
        let table = orc();
        let kernel = KernelUnwinder { orc: use_orc.then_some(&table), slide: if wild { u64::from(slide) } else { 0 }, entry_text: (TEXT, TEXT + if in_entry { 0x1000 } else { 0 }) };
        let mut out = vec![0; slots];
        let limits = UnwindLimits { max_frames: 100, max_reads: reads, max_time: None };
        let chain = walk(&g.ram[..], &r, Some(kernel), &limits, &mut out);
        prop_assert!(chain.len <= slots);
        prop_assert!(chain.kernel_frames + chain.user_frames <= 100);
        prop_assert!(chain.reads <= reads);
    }
}

/// The copied user registers of a sample in user mode are the vCPU's registers. Those of a sample
/// in a system call are the registers saved on kernel entry. The stack is copied up to the
/// requested size or the end of its mapping.
#[test]
fn user_context_copies_registers_and_stack() {
    let mut g = guest();
    user_frames(&mut g);
    uput(&mut g, USTACK + 0x80, 0x1122_3344);
    let top = KSTACK + THREAD_SIZE - pt_regs::SIZE;
    kput_all(&mut g, top, 0x100..0x10f);
    put_user_regs(&mut g, top);
    let in_kernel = regs(&g, 0, TEXT + 0x10, KSTACK + 0x2000, 0);
    let in_program = GuestRegs {
        rax: 0x10a,
        rbx: 0x105,
        rcx: 0x10b,
        rdx: 0x10c,
        rsi: 0x10d,
        rdi: 0x10e,
        r8: 0x109,
        r9: 0x108,
        r10: 0x107,
        r11: 0x106,
        r12: 0x103,
        r13: 0x102,
        r14: 0x101,
        r15: 0x100,
        ..user_regs(&g)
    };
    let pointers = [USTACK + 0x100, USTACK + 0x80, UTEXT + 0x50];
    let low = [&[0x10a, 0x105, 0x10b, 0x10c, 0x10d, 0x10e][..], &pointers].concat();
    let high = [0x109, 0x108, 0x107, 0x106, 0x103, 0x102, 0x101, 0x100];
    for regs in [in_kernel, in_program] {
        let (chain, _) = run(&g, &regs, None, 127);
        let context = SampledUserRegs::of(&g.ram[..], &regs, &chain).unwrap();
        assert!(context.wide);
        assert_eq!(context.registers[..9], low, "{}", regs.cpl);
        assert_eq!(context.registers[10..12], [USER64_CS, USER_DS]);
        assert_eq!(context.registers[12..], high, "{}", regs.cpl);
        let mut stack = [0; 0x4000];
        assert_eq!(context.stack(&g.ram[..], &regs, &mut stack), 0x1f80);
        assert_eq!(stack[..4], 0x1122_3344u32.to_le_bytes());
        assert_eq!(stack[0x188..0x190], (UTEXT + 0x222).to_le_bytes());
        assert_eq!(context.stack(&g.ram[..], &regs, &mut stack[..1001]), 1000);
    }
    // A sample of a kernel thread has no user registers.
    let nowhere = regs(&guest(), 0, TEXT + 0x10, KSTACK + 0x2000, 0);
    let (chain, _) = run(&guest(), &nowhere, None, 127);
    assert_eq!(SampledUserRegs::of(&g.ram[..], &nowhere, &chain), None);
}
