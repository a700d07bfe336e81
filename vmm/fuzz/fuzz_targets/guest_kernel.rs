//! Fuzzes the analysis of a hostile guest's kernel memory as performed by `record`: page tables,
//! symbols, types, unwind tables.
//!
//! Input: one byte. If this byte is odd, it is followed by 4 words with register values (base of
//! the page tables, and addresses that point into the kernel) and by RAM from address 0. Otherwise,
//! it is followed by the contents of the kernel, which the target maps at the kernel's usual
//! address with page tables of its own.
#![no_main]

use guest_profile::GuestRegs;
use guest_profile::locate::{KernelAnchorRegisters, read_kernel};
use guest_profile::task::TaskLayout;
use guest_profile::task::areas::KernelPageTables;
use libfuzzer_sys::fuzz_target;

const PAGE: usize = 4096;
/// Virtual address of the kernel.
const START: u64 = 0xffff_ffff_8100_0000;
/// Size of the page tables that the target builds, in bytes: one table on each of three levels, and
/// one table whose entries map the pages.
const TABLES: usize = 4 * PAGE;

/// Builds RAM with page tables that map up to 512 pages of `kernel` at [`START`].
fn mapped(kernel: &[u8]) -> Vec<u8> {
    let kernel = &kernel[..kernel.len().min(512 * PAGE)];
    let pages = kernel.len().div_ceil(PAGE);
    let mut ram = vec![0; TABLES + pages * PAGE];
    let mut put = |table: usize, entry: usize, to: usize| {
        let at = table * PAGE + 8 * entry;
        ram[at..at + 8].copy_from_slice(&(to as u64 | 3).to_le_bytes());
    };
    for (level, shift) in [39, 30, 21].into_iter().enumerate() {
        put(level, (START >> shift) as usize & 511, (level + 1) * PAGE);
    }
    for page in 0..pages {
        put(3, page, TABLES + page * PAGE);
    }
    ram[TABLES..TABLES + kernel.len()].copy_from_slice(kernel);
    ram
}

fuzz_target!(|data: &[u8]| {
    let Some((how, data)) = data.split_first() else {
        return;
    };
    let (ram, cr3, anchors) = if how & 1 == 0 {
        let anchors = KernelAnchorRegisters {
            lstar: START + 0x40,
            idt_base: START,
        };
        (mapped(data), 0, anchors)
    } else {
        let Some((words, ram)) = data.split_at_checked(32) else {
            return;
        };
        let word = |n: usize| u64::from_le_bytes(words[8 * n..8 * n + 8].try_into().expect("eight bytes"));
        let anchors = KernelAnchorRegisters {
            lstar: word(1),
            idt_base: word(2),
        };
        (ram.to_vec(), word(0), anchors)
    };
    let regs = GuestRegs {
        cr0: 1 << 31 | 1,
        cr3,
        cr4: 1 << 5 | u64::from(how & 2 != 0) << 12,
        efer: 1 << 10 | 1 << 8,
        ..GuestRegs::default()
    };
    if let Ok(image) = read_kernel(ram.as_slice(), &regs, &anchors) {
        let _ = TaskLayout::new(&image, 0);
        let _ = KernelPageTables::find(ram.as_slice(), &regs, &image, 0);
        let _ = (image.release(), image.build_id(), image.entry_text());
        let mut text = Vec::new();
        if let Some(symbols) = image.symbols() {
            symbols.write_text(&mut text).expect("a Vec takes it");
        }
    }
});
