//! Fuzzes the stack walk with the page tables and stacks of a hostile guest. The walk must stay
//! within its limits.
//!
//! Input: 11 registers, flags, then RAM from guest-physical address 0.
#![no_main]

use libfuzzer_sys::fuzz_target;
use guest_profile::GuestRegs;
use kernel_images::orc::OrcTable;
use guest_profile::unwind::{KernelUnwinder, UnwindLimits, walk};

const REGISTERS: usize = 11;

fn orc() -> OrcTable {
    let text = 0xffff_ffff_8100_0000u64;
    let at = 0xffff_ffff_8200_0000u64;
    let (mut ips, mut entries) = (Vec::new(), Vec::new());
    // Vary the registers, offsets and types of the entries. Some combinations of flags are
    // undefined.
    for i in 0..512u64 {
        let slot = at + 4 * i;
        ips.extend_from_slice(&(((text + 16 * i).wrapping_sub(slot)) as i32).to_le_bytes());
        entries.extend_from_slice(&((i as i16 % 9 - 2) * 8).to_le_bytes());
        entries.extend_from_slice(&(-16i16).to_le_bytes());
        entries.extend_from_slice(&((i * 37) as u16 & 0x7ff).to_le_bytes());
    }
    OrcTable::parse(&ips, at, &entries).expect("the table is well formed")
}

fuzz_target!(|data: &[u8]| {
    thread_local!(static ORC: OrcTable = orc());
    if data.len() < 8 * REGISTERS + 1 {
        return;
    }
    let (head, rest) = data.split_at(8 * REGISTERS);
    let word = |i: usize| u64::from_le_bytes(head[8 * i..8 * i + 8].try_into().expect("eight bytes"));
    let (flags, ram) = (rest[0], &rest[1..]);
    let regs = GuestRegs {
        rip: word(0),
        rsp: word(1),
        rbp: word(2),
        rcx: word(3),
        rdx: word(3),
        rdi: word(4),
        r10: word(5),
        r11: word(8) & 0x3f_ffff | 0x202,
        r13: word(6),
        rflags: 0x202,
        cr0: 1 << 31,
        cr3: word(7),
        cr4: 1 << 5 | u64::from(flags & 1) << 12,
        efer: 1 << 10,
        cpl: if flags & 2 == 0 { 0 } else { 3 },
        code64: flags & 4 == 0,
        gs_base: word(8),
        kernel_gs_base: word(9),
        tss_base: word(9),
        idt_base: word(2),
        ..GuestRegs::default()
    };
    let limits = UnwindLimits {
        max_frames: 64,
        max_reads: 600,
        max_time: None,
    };
    let mut out = [0; 80];
    ORC.with(|orc| {
        let kernel = KernelUnwinder {
            orc: (flags & 8 == 0).then_some(orc),
            slide: word(10),
            entry_text: (0, if flags & 16 == 0 { 0 } else { u64::MAX }),
        };
        let chain = walk(ram, &regs, Some(kernel), &limits, &mut out);
        assert!(chain.len <= out.len());
        assert!(chain.kernel_frames + chain.user_frames <= limits.max_frames);
        assert!(chain.reads <= limits.max_reads);
    });
});
