//! Fuzzes the reader of a guest's tasks, mappings, paths and program memory, with arbitrary lists,
//! trees and structure member offsets.
//!
//! Input: 32 member offsets of 2 bytes each, 4 words (per-CPU base, an address, the first task,
//! flags), then memory. The page tables map this memory repeatedly over the whole address space,
//! with holes.
#![no_main]

use guest_profile::mappings::{MappingGeneration, MAX_PATH, SampleMappingReporter, name_of};
use guest_profile::task::areas::{KernelPageTables, GuestProcess};
use guest_profile::task::{TaskLayout, TaskReader};
use guest_profile::{GuestMemoryReadBudget, GuestRegs};
use libfuzzer_sys::fuzz_target;
use serde_json::json;

const PAGE: usize = 4096;
const TABLES: usize = 4 * PAGE;
const OFFSETS: usize = 32;
const HEAD: usize = 2 * OFFSETS + 32;
/// Maximum number of guest memory reads for one reply. The VM applies the same limit.
const READS: u32 = 1 << 17;
const MOST_PAGES: usize = 64;

/// Builds RAM whose page tables map both halves of the address space to pages of `memory`. Every
/// 16th page is unmapped.
fn mapped_everywhere(memory: &[u8]) -> Vec<u8> {
    let memory = &memory[..memory.len().min(MOST_PAGES * PAGE)];
    let pages = memory.len().div_ceil(PAGE).max(1);
    let mut ram = vec![0; TABLES + pages * PAGE];
    for entry in 0..512 {
        for table in 0..4 {
            let to = match table {
                3 if entry % 16 == 15 => continue,
                3 => TABLES + entry % pages * PAGE,
                _ => (table + 1) * PAGE,
            };
            let at = table * PAGE + 8 * entry;
            ram[at..at + 8].copy_from_slice(&(to as u64 | 7).to_le_bytes());
        }
    }
    ram[TABLES..TABLES + memory.len()].copy_from_slice(memory);
    ram
}

fn layout(at: impl Fn(usize) -> u64, first: u64, flags: u64) -> Option<TaskLayout> {
    let areas = if flags & 1 == 0 {
        json!({"Maple": {"root": at(5), "range_pivot": at(6), "range_slot": at(7), "arange_pivot": at(8),
            "arange_slot": at(9)}})
    } else {
        json!({"List": {"first": at(5), "next": at(6)}})
    };
    let cache = json!({"mapping": at(10), "root": at(11), "node_shift": at(12), "node_slots": at(13),
        "index": at(14), "page_struct_bytes": at(15).max(1),
        "vmemmap_base": if flags & 2 == 0 { json!(null) } else { json!(first ^ at(16)) }});
    let layout = json!({"current": at(0), "comm": at(1), "pid": at(2), "tgid": at(3), "mm": at(4),
        "maps": {"areas": areas, "vm_start": at(17), "vm_end": at(18), "vm_pgoff": at(19),
            "vm_flags": at(20), "vm_file": at(21), "vdso": at(22),
            "files": {"dentry": at(23), "mnt": at(24), "parent": at(25), "name": at(26), "name_len": at(27),
                "mount_mnt": at(28), "mount_parent": at(29), "mount_point": at(30)},
            "cache": cache},
        "list": {"first": first, "tasks": at(31), "pgd": at(16)}});
    // The kernel reader process sends the layout in the same JSON encoding.
    serde_json::from_value(layout).ok()
}

fuzz_target!(|data: &[u8]| {
    let Some((head, memory)) = data.split_at_checked(HEAD) else {
        return;
    };
    let at = |n: usize| u64::from(u16::from_le_bytes([head[2 * n], head[2 * n + 1]]));
    let word = |n: usize| {
        let from = 2 * OFFSETS + 8 * n;
        u64::from_le_bytes(head[from..from + 8].try_into().expect("eight bytes"))
    };
    let (base, address, flags) = (word(0) | 1 << 63, word(1), word(3));
    let layout = layout(at, word(2), flags).expect("numbers in their places");
    let ram = mapped_everywhere(memory);
    let ram = ram.as_slice();
    let regs = GuestRegs {
        cr0: 1 << 31 | 1,
        cr4: 1 << 5,
        efer: 1 << 10 | 1 << 8,
        ..GuestRegs::default()
    };
    let budget = || GuestMemoryReadBudget::new(READS, None);

    // Walk the guest's data structures as `record` does for a sample.
    let mut reader = TaskReader::new(&layout, ram, &regs).expect("four levels");
    let mut samples = budget();
    if let Some(task) = reader.current(base, &mut samples) {
        assert!(!task.comm().to_string().contains(|c: char| c.is_control()));
        let _ = reader.vdso(task.mm, &mut samples);
        let mut told = [0; 1 << 16];
        let addresses = [address, address ^ 0x5000];
        let bytes = SampleMappingReporter::new().report(&mut reader, (task.pid, task.mm), &addresses, &MappingGeneration::default(), &mut told);
        for mapping in guest_profile::mappings::read(&told[..bytes]) {
            assert!(mapping.path.len() <= MAX_PATH);
        }
    }

    // Walk the guest's data structures as the VM does for an operator's request.
    let tables: KernelPageTables = serde_json::from_value(json!({"root": 0, "la57": false})).expect("tables");
    let mut asked = budget();
    let Some(process) = GuestProcess::find(&layout, ram, tables, address as u32, &mut asked) else {
        return;
    };
    let _ = process.reread(&layout, ram, tables, &mut asked);
    let mut reader = process.reader(&layout, ram, tables);
    let mut found = 0;
    reader.code(process.mm, &mut asked, |reader, code, budget| {
        found += 1;
        let mut path = [0; MAX_PATH];
        let _ = name_of(reader, process.mm, &code.mapping, &mut path, budget);
        let _ = reader.build_id(process.mm, &code.mapping, budget);
        found < 4096
    });
    let mut bytes = vec![0; 3 * PAGE];
    reader.memory(process.mm, address, &mut bytes, &mut asked, |from, length| {
        assert!(from + length <= 3 * PAGE);
    });
});
