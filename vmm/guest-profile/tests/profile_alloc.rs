//! Tests that unwinding does not allocate, because a vCPU thread unwinds a chain for every sample.
//!
//! The test is a separate binary, because `allocation-counter` replaces the global allocator.

use allocation_counter::measure;
use guest_profile::unwind::{KernelUnwinder, UnwindLimits, walk};
use guest_profile::{GuestMemoryReadBudget, GuestRegs};
use kernel_images::orc::OrcTable;

/// Start of the upper half of the address space. The lower and the upper half both map
/// guest-physical address 0 with a 1-GiB page.
const UPPER: u64 = 0xffff_8000_0000_0000;

fn guest() -> Vec<u8> {
    let mut ram = vec![0u8; 0x1_0000];
    let mut put = |at: usize, v: u64| ram[at..at + 8].copy_from_slice(&v.to_le_bytes());
    put(0x1000, 0x2007);
    put(0x1000 + 8 * 256, 0x2007);
    put(0x2000, 0x87);
    // The kernel stack at 0x8000 contains one frame and the saved user registers. The user stack at
    // 0x4000 has two frames.
    put(0x8010, UPPER + 0x9021);
    for (i, v) in [0x5050, 0x33, 0x202, 0x4000, 0x2b].into_iter().enumerate() {
        put(0x8018 + 128 + 8 * i, v);
    }
    put(0x8018 + 32, 0x4100);
    put(0x4100, 0x4200);
    put(0x4108, 0x5111);
    put(0x4208, 0x5222);
    ram
}

fn orc() -> OrcTable {
    let (at, text) = (UPPER + 0xa000, UPPER + 0x9000);
    let (mut ips, mut entries) = (Vec::new(), Vec::new());
    for (i, (ip, sp, flags)) in [
        (text, 0x18i16, 5u16),
        (text + 0x20, 0, 0x105),
        (text + 0x40, 0, 0x400),
    ]
    .into_iter()
    .enumerate()
    {
        ips.extend_from_slice(&(ip.wrapping_sub(at + 4 * i as u64) as i32).to_le_bytes());
        entries.extend_from_slice(&sp.to_le_bytes());
        entries.extend_from_slice(&0i16.to_le_bytes());
        entries.extend_from_slice(&flags.to_le_bytes());
    }
    OrcTable::parse(&ips, at, &entries).unwrap()
}

#[test]
fn chain_walk_does_not_allocate() {
    let (ram, orc) = (guest(), orc());
    let regs = GuestRegs {
        rip: UPPER + 0x9010,
        rsp: UPPER + 0x8000,
        cr0: 1 << 31,
        cr3: 0x1000,
        cr4: 1 << 5,
        efer: 1 << 10,
        code64: true,
        ..Default::default()
    };
    let mut out = [0; 32];
    let (mut chain, mut budget) = (None, None);
    let made = measure(|| {
        chain = Some(walk(
            &ram[..],
            &regs,
            Some(KernelUnwinder {
                orc: Some(&orc),
                slide: 0,
                entry_text: (0, 0),
            }),
            &UnwindLimits::default(),
            &mut out,
        ));
        budget = Some(GuestMemoryReadBudget::new(10, None));
    });
    let (chain, budget) = (chain.unwrap(), budget.unwrap());
    assert_eq!(made.count_total, 0);
    assert_eq!(budget.reads_used(), 0);
    assert_eq!(
        (chain.kernel_frames, chain.user_frames),
        (2, 3),
        "{chain:?} {out:x?}"
    );
}
