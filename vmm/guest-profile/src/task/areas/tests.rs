//! Tests with a small synthetic guest. The tests write the kernel's data structures to its memory.

use super::super::{ListLayout, MapsLayout, SingleStepLayout, VM_EXEC, single_step_bit};
use super::*;
use crate::task::cache::CacheLayout;
use crate::testing::TestGuest;
use proptest::prelude::*;

/// Start of the kernel's direct map of guest memory. The tests place the kernel's data there.
const DIRECT: u64 = 0xffff_8880_0000_0000;
const RAM: usize = 0x4_0000;
const CODE: u64 = 0x5555_0000_0000;
const INIT: u64 = DIRECT + 0x1000;
const TASK: u64 = DIRECT + 0x1100;
const MM: u64 = DIRECT + 0x1200;
const FILE: u64 = DIRECT + 0x1300;
const ADDRESS_SPACE: u64 = DIRECT + 0x1400;
const AREAS: [u64; 3] = [DIRECT + 0x1500, DIRECT + 0x1600, DIRECT + 0x1700];
/// Address of the kernel's array of page structures (`struct page`), and address of the kernel
/// variable that contains this address.
const PAGES: u64 = DIRECT + 0x2000;
const VMEMMAP: u64 = DIRECT + 0x1800;
/// Guest-physical address of a page that the process has accessed, and of a page that is only in
/// the page cache.
const MAPPED: u64 = 0x8000;
const CACHED: u64 = 0x9000;
const PID: u32 = 77;

fn layout() -> TaskLayout {
    TaskLayout {
        current: 0,
        comm: 0,
        pid: 0,
        tgid: 8,
        mm: 16,
        maps: Some(MapsLayout {
            areas: AreaLayout::List { first: 0, next: 0 },
            vm_start: 8,
            vm_end: 16,
            vm_pgoff: 24,
            vm_flags: 32,
            vm_file: 40,
            vdso: None,
            files: None,
            cache: Some(CacheLayout::fixed(VMEMMAP)),
        }),
        list: Some(ListLayout {
            first: INIT,
            tasks: 24,
            pgd: 8,
        }),
        single_step: None,
    }
}

fn guest() -> (TestGuest, KernelPageTables) {
    let mut g = TestGuest::new(RAM, false);
    for page in 0..(RAM as u64 / PAGE) {
        g.map(DIRECT + page * PAGE, page * PAGE, 1);
    }
    g.map(CODE, MAPPED, 1);
    let mut put = |at: u64, words: &[u64]| {
        for (n, word) in (0u64..).zip(words) {
            g.put(at - DIRECT + 8 * n, *word);
        }
    };
    put(INIT, &[0, 0, 0, TASK + 24]);
    put(TASK, &[0, PID.into(), MM, INIT + 24]);
    let root = DIRECT + RAM as u64 - PAGE;
    put(MM, &[AREAS[0], root]);
    // Mappings of the process: the file's headers, two pages of code, and one that is not
    // executable.
    put(AREAS[0], &[AREAS[1], CODE - PAGE, CODE, 0, 1, FILE]);
    put(AREAS[1], &[AREAS[2], CODE, CODE + 2 * PAGE, 1, VM_EXEC, FILE]);
    put(AREAS[2], &[0, CODE + 0x10_0000, CODE + 0x10_1000, 0, 3, 0]);
    put(FILE, &[0, ADDRESS_SPACE]);
    // The page cache contains only page 2 of the file. In this tree, an entry at the root would be
    // page 0.
    let folio = PAGES + 64 * (CACHED / PAGE);
    let node = DIRECT + 0x3000;
    put(ADDRESS_SPACE, &[0, node + 2]);
    put(node, &[0, 0, 0, 0, folio]);
    put(folio, &[0, 0, 0, 0, 2]);
    put(VMEMMAP, &[PAGES]);
    g.ram[MAPPED as usize] = 0xaa;
    g.ram[CACHED as usize] = 0xbb;
    let tables = KernelPageTables {
        root: g.root,
        la57: false,
    };
    (g, tables)
}

/// A task counts as single-stepped if it is traced and has the single-step flag, whose bit number
/// depends on the guest's kernel version.
#[test]
fn task_of_a_stepping_debugger_is_recognized() {
    let (mut g, tables) = guest();
    let per_cpu_base = DIRECT + 0x3800;
    g.put(per_cpu_base - DIRECT, TASK);
    let mut layout = layout();
    let mut stepped = |layout: &TaskLayout, flags: u64, ptrace: u64| {
        g.put(TASK - DIRECT + 32, flags);
        g.put(TASK - DIRECT + 40, ptrace);
        TaskReader::under(layout, &g.ram[..], tables.root, tables.la57)
            .is_single_stepped(per_cpu_base, &mut budget())
    };
    assert_eq!(stepped(&layout, 1 << 4, 1), None, "an unknown kernel");
    layout.single_step = Some(SingleStepLayout {
        flags: 32,
        bit: 4,
        ptrace: 40,
    });
    for (flags, ptrace, is_stepped) in [
        (1 << 4, 1, true),
        (1 << 4, 0, false),
        (!(1 << 4), 1, false),
        (0, 0, false),
    ] {
        assert_eq!(
            stepped(&layout, flags, ptrace),
            Some(is_stepped),
            "{flags:#x}, {ptrace}"
        );
    }
}

#[test]
fn flag_of_single_steps_depends_on_the_release() {
    for (release, bit) in [
        ("6.1.0-56-cloud-amd64", Some(4)),
        ("5.10.0-8-amd64", Some(4)),
        ("6.12.57+deb13-amd64", Some(4)),
        ("6.16.3", Some(5)),
        ("6.12.57+deb13-rt-amd64", None),
        ("7.0.0", None),
        ("6", None),
        ("", None),
    ] {
        assert_eq!(single_step_bit(release), bit, "{release}");
    }
}

fn budget() -> GuestMemoryReadBudget {
    GuestMemoryReadBudget::new(10_000, None)
}

#[test]
fn process_is_found_by_pid_with_executable_mappings() {
    let (g, tables) = guest();
    let layout = layout();
    let find = |pid| GuestProcess::find(&layout, &g.ram[..], tables, pid, &mut budget());
    let process = find(PID).unwrap();
    assert_eq!((process.mm, process.root), (MM, g.root));
    assert_eq!(find(PID + 1), None);
    assert_eq!(
        process.reread(&layout, &g.ram[..], tables, &mut budget()),
        Some(process)
    );
    let mut reader = process.reader(&layout, &g.ram[..], tables);
    let mut found = Vec::new();
    let all = reader.code(process.mm, &mut budget(), |_, code, _| {
        found.push((code.mapping.start, code.mapping.end, code.base));
        true
    });
    assert!(all);
    assert_eq!(found, [(CODE, CODE + 2 * PAGE, Some(CODE - PAGE))]);
}

/// Memory of a process is read page by page. A page that the process has accessed is read through
/// its page tables, the next page from the page cache, and the following page is reported as
/// missing.
#[test]
fn untouched_memory_is_read_from_page_cache() {
    let (g, tables) = guest();
    let layout = layout();
    let process = GuestProcess::find(&layout, &g.ram[..], tables, PID, &mut budget()).unwrap();
    let mut reader = process.reader(&layout, &g.ram[..], tables);
    let mut bytes = [0xff; 3 * PAGE as usize];
    let mut missing = Vec::new();
    reader.memory(process.mm, CODE, &mut bytes, &mut budget(), |at, len| {
        missing.push((at, len))
    });
    assert_eq!((bytes[0], bytes[0x1000], bytes[0x2000]), (0xaa, 0xbb, 0));
    assert_eq!(missing, [(0x2000, 0x1000)]);
    // Process memory is not read through the kernel's own page tables.
    missing.clear();
    reader.memory(process.mm, DIRECT, &mut bytes[..16], &mut budget(), |at, len| {
        missing.push((at, len))
    });
    assert_eq!(
        (missing.as_slice(), bytes[..16].iter().max()),
        (&[(0, 16)][..], Some(&0))
    );
}

#[test]
fn exited_process_is_not_found_again() {
    let (mut g, tables) = guest();
    let layout = layout();
    let process = GuestProcess::find(&layout, &g.ram[..], tables, PID, &mut budget()).unwrap();
    g.put(TASK - DIRECT + 8, 78);
    assert_eq!(process.reread(&layout, &g.ram[..], tables, &mut budget()), None);
}

proptest! {
    /// Reading the tasks and mappings of a guest terminates even if its lists point to arbitrary
    /// addresses or form cycles.
    #[test]
    fn hostile_task_lists_terminate(
        changes in prop::collection::vec(
            (0x1000u64..0x1900, prop_oneof![any::<u64>(), (0u64..0x3000).prop_map(|at| DIRECT + (at & !7)), 0u64..4096]),
            1..30,
        ),
        pid in prop_oneof![Just(PID), any::<u32>()],
    ) {
        let (mut g, tables) = guest();
        for (at, value) in changes {
            g.put(at & !7, value);
        }
        let layout = layout();
        let mut budget = budget();
        if let Some(process) = GuestProcess::find(&layout, &g.ram[..], tables, pid, &mut budget) {
            let mut reader = process.reader(&layout, &g.ram[..], tables);
            let mut count = 0;
            reader.code(process.mm, &mut budget, |_, _, _| {
                count += 1;
                count < 5000
            });
            prop_assert!(count <= 2 * MAX_AREAS as usize);
            let mut bytes = [0; 256];
            reader.memory(process.mm, CODE, &mut bytes, &mut budget, |_, _| {});
        }
        prop_assert!(budget.reads_used() <= 10_000);
    }
}
