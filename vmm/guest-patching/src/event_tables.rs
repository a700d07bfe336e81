//! Hides uncountable events in the tables in which a Linux kernel keeps the encodings of perf's
//! generic events.
//!
//! If perf requests a generic event such as `instructions` or `L1-dcache-loads`, the kernel looks
//! up its encoding in a table for the processor's vendor and generation, and returns ENOENT if the
//! table entry is 0. CPUID can mark seven events as unavailable to an Intel guest and none to an
//! AMD guest, and does not describe cache events. Events that cannot be counted are therefore
//! removed from the tables before the guest starts, so that perf in the guest prints
//! `<not supported>` instead of a misleading 0.
//!
//! The tables are found by their contents, because the kernel's symbol table may lack data symbols.
//! A table is accepted only if every entry is a plausible encoding. Any other table is left
//! unchanged. See Linux, arch/x86/events/amd/core.c and arch/x86/events/intel/core.c.

use std::fmt;

use memchr::memmem;
use perf_core::guest_log;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::Vendor;

use kernel_images::elf::LoadSegment;

/// Number of generic hardware events (`PERF_COUNT_HW_*`).
const HARDWARE_EVENTS: usize = 10;
/// Number of cache events: caches × operations × results (`PERF_COUNT_HW_CACHE_*`).
const CACHE_EVENTS: usize = 7 * 3 * 2;
/// Table entry of an invalid combination of cache, operation and result, such as a write to the
/// instruction cache. The kernel returns EINVAL for such an event.
const INVALID: u64 = u64::MAX;
/// Table entry of an event that the processor cannot count. The kernel returns ENOENT for such an
/// event.
const ABSENT: u64 = 0;
/// Bits that may be set in a table entry. AMD event selects extend to bit 35 and Intel event
/// selects to bit 31.
const CONFIG_BITS: u64 = 0xF_FFFF_FFFF;
/// Indices of cache table entries whose combination is invalid on every processor: writes to the
/// instruction cache, writes and prefetches of the instruction TLB and of the branch unit.
const INVALID_INDICES: [usize; 10] = [8, 9, 26, 27, 28, 29, 32, 33, 34, 35];
/// Index of the first of the four invalid entries for writes and prefetches of the instruction TLB
/// in a cache table. The entries for branch unit reads follow these entries.
const ITLB_INDEX: usize = 26;
/// Index of the first cache table entry for branch unit reads, which count branches.
const BRANCHES_INDEX: usize = 30;
/// Linux's pseudo-encoding of reference cycles in Intel's table. General-purpose counters cannot
/// count this event.
const INTEL_REF_CYCLES: u64 = 0x300;
/// Maximum number of tables of one type and vendor that are searched for in one segment. Linux 6.1
/// has two AMD and eleven Intel tables.
const MAX_TABLES: usize = 64;

/// Generic event of perf that is listed in the kernel's event tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelTableEvent {
    /// Generic hardware event (`PERF_TYPE_HARDWARE`), given by its `config`.
    Hardware(u64),
    /// Generic cache event (`PERF_TYPE_HW_CACHE`), given by its `config`: cache, operation << 8,
    /// result << 16.
    Cache(u64),
}

/// Formats the event by the name that `perf` uses for it.
impl fmt::Display for KernelTableEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const HARDWARE: [&str; HARDWARE_EVENTS] = [
            "cycles",
            "instructions",
            "cache-references",
            "cache-misses",
            "branches",
            "branch-misses",
            "bus-cycles",
            "stalled-cycles-frontend",
            "stalled-cycles-backend",
            "ref-cycles",
        ];
        const CACHES: [&str; 7] = ["L1-dcache", "L1-icache", "LLC", "dTLB", "iTLB", "branch", "node"];
        const OPERATIONS: [[&str; 2]; 3] = [
            ["loads", "load-misses"],
            ["stores", "store-misses"],
            ["prefetches", "prefetch-misses"],
        ];
        let at = |value: u64, shift: u32| usize::from((value >> shift).to_le_bytes()[0]);
        match *self {
            Self::Hardware(n) => f.write_str(HARDWARE.get(at(n, 0)).unwrap_or(&"an unknown event")),
            Self::Cache(config) => {
                let cache = CACHES.get(at(config, 0)).unwrap_or(&"?");
                let name = OPERATIONS.get(at(config, 8)).and_then(|o| o.get(at(config, 16)));
                write!(f, "{cache}-{}", name.unwrap_or(&"?"))
            }
        }
    }
}

/// Type of a kernel's event table: hardware events or cache events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EventTableKind {
    Hardware,
    Cache,
}

/// An event table that was found in a kernel image or in the memory of a running kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelEventTable {
    vendor: Vendor,
    kind: EventTableKind,
    /// Link-time address of the table.
    virt: u64,
    /// Guest-physical address of the table.
    phys: u64,
    entries: Vec<u64>,
}

impl KernelEventTable {
    /// Returns the processor vendor of the table.
    pub fn vendor(&self) -> Vendor {
        self.vendor
    }

    /// Returns the events that the table lists as countable, each with its index in the table and
    /// its encoding.
    fn events(&self) -> impl Iterator<Item = (usize, KernelTableEvent, u64)> {
        let numbered = self.entries.iter().copied().enumerate();
        let numbered = numbered.filter(|(_, config)| !matches!(*config, ABSENT | INVALID));
        numbered.map(|(at, config)| (at, self.event(at as u64), config))
    }

    /// Returns the guest-physical address of the entry with index `at`.
    fn entry(&self, at: usize) -> GuestAddress {
        GuestAddress(self.phys.wrapping_add(8 * at as u64))
    }

    /// Returns the guest-physical address of the first byte after the table.
    fn end(&self) -> u64 {
        self.phys.saturating_add(8 * self.entries.len() as u64)
    }

    fn event(&self, at: u64) -> KernelTableEvent {
        match self.kind {
            EventTableKind::Hardware => KernelTableEvent::Hardware(at),
            EventTableKind::Cache => {
                KernelTableEvent::Cache((at / 6) | ((at / 2 % 3) << 8) | ((at % 2) << 16))
            }
        }
    }
}

/// Result of hiding events in one table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HiddenKernelEvents {
    /// Link-time address of the event table.
    pub virt: u64,
    /// Events that were removed from the table.
    pub hidden: Vec<KernelTableEvent>,
    /// Number of countable events that remain in the table.
    pub left: usize,
}

/// Finds the event tables in the segments of an image.
pub fn find(segments: &[LoadSegment<'_>]) -> Vec<KernelEventTable> {
    let mut tables = Vec::new();
    for segment in segments {
        // Each table begins with the encodings of cycles and instructions.
        for (vendor, cycles) in [(Vendor::Amd, 0x76u64), (Vendor::Intel, 0x3C)] {
            let first: Vec<u8> = [cycles, 0xC0].into_iter().flat_map(u64::to_le_bytes).collect();
            for at in memmem::find_iter(segment.data, &first).take(MAX_TABLES) {
                tables.extend(hardware_table(segment, at, vendor));
            }
        }
        for (vendor, branches) in [(Vendor::Amd, 0xC2u64), (Vendor::Intel, 0xC4)] {
            let mut inside = [0xFF; 40];
            inside[32..].copy_from_slice(&branches.to_le_bytes());
            for at in memmem::find_iter(segment.data, &inside).take(MAX_TABLES) {
                let start = at.checked_sub(8 * ITLB_INDEX);
                tables.extend(start.and_then(|start| cache_table(segment, start, vendor, branches)));
            }
        }
    }
    tables
}

/// Finds the event tables in the memory of a running kernel. A table must be contiguous in physical
/// memory.
///
/// `bytes` are the contents of the memory at the page-aligned linear address `start`, and
/// `physical` translates a linear address to a guest-physical one.
pub fn find_in_memory(
    start: u64,
    bytes: &[u8],
    mut physical: impl FnMut(u64) -> Option<u64>,
) -> Vec<KernelEventTable> {
    let mut tables = find(&[LoadSegment {
        index: 0,
        virt: start,
        phys: start,
        mem_bytes: bytes.len() as u64,
        data: bytes,
        executable: false,
    }]);
    tables.retain_mut(|table| {
        let behind_first = 8 * (table.entries.len() as u64 - 1);
        let ends = [table.virt, table.virt.wrapping_add(behind_first)].map(&mut physical);
        let [Some(first), Some(last)] = ends else {
            return false;
        };
        table.phys = first;
        first.checked_add(behind_first) == Some(last)
    });
    tables
}

fn hardware_table(segment: &LoadSegment<'_>, at: usize, vendor: Vendor) -> Option<KernelEventTable> {
    let entries = entries(segment, at, HARDWARE_EVENTS)?;
    let known = match vendor {
        // The encodings of branches and branch misses have been the same since the K7.
        Vendor::Amd => entries[4] == 0xC2 && entries[5] == 0xC3,
        // The encodings of the architectural events, and Linux's pseudo-encoding of reference
        // cycles.
        Vendor::Intel => entries[4] == 0xC4 && entries[5] == 0xC5 && entries[9] == INTEL_REF_CYCLES,
    };
    let sound = entries.iter().all(|config| config & !CONFIG_BITS == 0);
    (known && sound).then(|| table(segment, at, vendor, EventTableKind::Hardware, entries))
}

fn cache_table(
    segment: &LoadSegment<'_>,
    at: usize,
    vendor: Vendor,
    branches: u64,
) -> Option<KernelEventTable> {
    let entries = entries(segment, at, CACHE_EVENTS)?;
    let known =
        entries[BRANCHES_INDEX] == branches && INVALID_INDICES.iter().all(|at| entries[*at] == INVALID);
    let sound = |config: &u64| *config == INVALID || config & !CONFIG_BITS == 0;
    (known && entries.iter().all(sound)).then(|| table(segment, at, vendor, EventTableKind::Cache, entries))
}

fn entries(segment: &LoadSegment<'_>, at: usize, count: usize) -> Option<Vec<u64>> {
    if !segment.phys.wrapping_add(at as u64).is_multiple_of(8) {
        return None;
    }
    let bytes = segment.data.get(at..at.checked_add(8 * count)?)?;
    let (words, _) = bytes.as_chunks::<8>();
    Some(words.iter().map(|w| u64::from_le_bytes(*w)).collect())
}

fn table(
    segment: &LoadSegment<'_>,
    at: usize,
    vendor: Vendor,
    kind: EventTableKind,
    entries: Vec<u64>,
) -> KernelEventTable {
    KernelEventTable {
        vendor,
        kind,
        virt: segment.virt.wrapping_add(at as u64),
        phys: segment.phys.wrapping_add(at as u64),
        entries,
    }
}

/// Removes the events for which `can_count` returns `false` from the tables of `vendor` in guest
/// memory.
///
/// A table that overlaps another table, or that has other contents in guest memory than in the
/// kernel file, is left unchanged and reported in the log.
pub fn hide(
    memory: &GuestMemoryMmap,
    tables: &[KernelEventTable],
    vendor: Vendor,
    mut can_count: impl FnMut(KernelTableEvent, u64) -> bool,
) -> Vec<HiddenKernelEvents> {
    // Compares all tables with the kernel file first, because hiding an event changes a table.
    let known: Vec<bool> = tables
        .iter()
        .map(|table| is_unchanged_in_memory(memory, tables, table))
        .collect();
    let mut done = Vec::new();
    for (table, _) in tables
        .iter()
        .zip(known)
        .filter(|(table, known)| *known && table.vendor == vendor)
    {
        let mut result = HiddenKernelEvents {
            virt: table.virt,
            hidden: Vec::new(),
            left: 0,
        };
        for (at, event, config) in table.events() {
            let counted = can_count(event, config);
            if !counted && memory.write_obj(ABSENT, table.entry(at)).is_ok() {
                result.hidden.push(event);
            } else {
                result.left += 1;
            }
        }
        done.push(result);
    }
    done
}

/// Returns whether `table` overlaps no other table and its contents in guest memory match the
/// kernel file.
fn is_unchanged_in_memory(
    memory: &GuestMemoryMmap,
    tables: &[KernelEventTable],
    table: &KernelEventTable,
) -> bool {
    let shared = tables
        .iter()
        .any(|other| !std::ptr::eq(other, table) && other.phys < table.end() && table.phys < other.end());
    let as_in_file = || {
        table.entries.iter().enumerate().all(|(at, config)| {
            memory
                .read_obj::<u64>(table.entry(at))
                .is_ok_and(|there| there == *config)
        })
    };
    let why = if shared {
        "shares memory with another"
    } else if !as_in_file() {
        "is not in memory as it is in the file"
    } else {
        return true;
    };
    guest_log!(
        Warn,
        "the likely event table of the kernel at {:#x} {why}; it is not changed",
        table.virt
    );
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LOAD_AT: u64 = 0x10_0000;

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 32 << 20)]).unwrap()
    }

    fn bytes(words: &[u64]) -> Vec<u8> {
        words.iter().copied().flat_map(u64::to_le_bytes).collect()
    }

    fn segment(data: &[u8]) -> LoadSegment<'_> {
        LoadSegment {
            index: 0,
            virt: 0xFFFF_FFFF_8100_0000,
            phys: LOAD_AT,
            mem_bytes: data.len() as u64,
            data,
            executable: false,
        }
    }

    /// Intel's table of generic events, as in Linux 6.1.
    const INTEL_HARDWARE: [u64; HARDWARE_EVENTS] = [
        0x3C,
        0xC0,
        0x4F2E,
        0x412E,
        0xC4,
        0xC5,
        0x13C,
        0,
        0,
        INTEL_REF_CYCLES,
    ];

    /// Returns the table of generic events for AMD family 17h.
    fn hardware() -> Vec<u64> {
        vec![0x76, 0xC0, 0xFF60, 0x964, 0xC2, 0xC3, 0, 0x287, 0x187, 0]
    }

    /// Returns a table of cache events that lists data loads, instruction fetches and branches.
    /// `branches` is the encoding of branches.
    fn cache(branches: u64) -> Vec<u64> {
        let mut words = vec![0; CACHE_EVENTS];
        for at in INVALID_INDICES {
            words[at] = INVALID;
        }
        (words[0], words[1], words[6]) = (0x40, 0xC860, 0x80);
        (words[BRANCHES_INDEX], words[BRANCHES_INDEX + 1]) = (branches, branches + 1);
        words
    }

    fn kernel() -> Vec<u8> {
        let mut data = vec![0x90; 64];
        data.extend(bytes(&hardware()));
        data.extend(bytes(&[7, 8]));
        data.extend(bytes(&cache(0xC2)));
        data.extend(bytes(&cache(0xC4)));
        data.extend(bytes(&INTEL_HARDWARE));
        data
    }

    #[test]
    fn hide_zeroes_only_uncountable_events() {
        let data = kernel();
        let tables = find(&[segment(&data)]);
        assert_eq!(tables.len(), 4, "{tables:?}");
        let memory = memory();
        memory.write_slice(&data, GuestAddress(LOAD_AT)).unwrap();
        // On this host, only cycles can be counted.
        let done = hide(&memory, &tables, Vendor::Amd, |_, config| config == 0x76);
        let names: Vec<Vec<String>> = done
            .iter()
            .map(|d| d.hidden.iter().map(ToString::to_string).collect())
            .collect();
        assert_eq!(
            names,
            [
                vec![
                    "instructions",
                    "cache-references",
                    "cache-misses",
                    "branches",
                    "branch-misses",
                    "stalled-cycles-frontend",
                    "stalled-cycles-backend"
                ],
                vec![
                    "L1-dcache-loads",
                    "L1-dcache-load-misses",
                    "L1-icache-loads",
                    "branch-loads",
                    "branch-load-misses"
                ]
            ]
        );
        assert_eq!((done[0].left, done[1].left), (1, 0));
        let mut expected = data.clone();
        let mut hidden = cache(0xC2);
        for word in &mut hidden {
            if *word != INVALID {
                *word = 0;
            }
        }
        let only_cycles = bytes(&[0x76, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        expected[64..64 + 80].copy_from_slice(&only_cycles);
        expected[160..160 + 336].copy_from_slice(&bytes(&hidden));
        let mut there = vec![0; data.len()];
        memory.read_slice(&mut there, GuestAddress(LOAD_AT)).unwrap();
        assert_eq!(there, expected);
    }

    /// The event tables of a running kernel are found in guest memory. A table that is not
    /// contiguous in physical memory is ignored.
    #[test]
    fn tables_of_running_kernel_are_found_by_page_tables() {
        const START: u64 = 0xFFFF_FFFF_8100_0000;
        let data = kernel();
        let in_one_piece = |linear: u64| Some(linear - START + LOAD_AT);
        let found = find_in_memory(START, &data, in_one_piece);
        assert_eq!(found, find(&[segment(&data)]));
        // The last entries of AMD's cache table, and all following data, are mapped to other
        // physical memory.
        let apart = |linear: u64| {
            let offset = linear - START;
            Some(offset + if offset < 480 { LOAD_AT } else { 2 * LOAD_AT })
        };
        let found = find_in_memory(START, &data, apart);
        let places: Vec<_> = found
            .iter()
            .map(|table| (table.vendor, table.kind, table.phys))
            .collect();
        assert_eq!(
            places,
            [
                (Vendor::Amd, EventTableKind::Hardware, LOAD_AT + 64),
                (Vendor::Intel, EventTableKind::Hardware, 2 * LOAD_AT + 832),
                (Vendor::Intel, EventTableKind::Cache, 2 * LOAD_AT + 496),
            ]
        );
        assert_eq!(find_in_memory(START, &data, |_| None), []);
    }

    #[test]
    fn hide_removes_reference_cycles_of_intel() {
        let data = kernel();
        let memory = memory();
        memory.write_slice(&data, GuestAddress(LOAD_AT)).unwrap();
        let done = hide(&memory, &find(&[segment(&data)]), Vendor::Intel, |event, _| {
            event != KernelTableEvent::Hardware(9)
        });
        let hidden: Vec<_> = done.iter().flat_map(|d| d.hidden.clone()).collect();
        assert_eq!(hidden, [KernelTableEvent::Hardware(9)]);
        let mut there = vec![0; data.len()];
        memory.read_slice(&mut there, GuestAddress(LOAD_AT)).unwrap();
        let changed: Vec<_> = (0..data.len()).filter(|at| there[*at] != data[*at]).collect();
        // Only the byte 03H of the encoding 300H (reference cycles) in the last table entry
        // changes.
        assert_eq!(changed, [data.len() - 7]);
    }

    #[test]
    fn malformed_event_table_is_ignored() {
        let mut other = hardware();
        other[4] = 0xC1;
        assert_eq!(find(&[segment(&bytes(&other))]), []);
        let mut other = hardware();
        other[7] = 0xFFFF_FFFF_8123_4567;
        assert_eq!(find(&[segment(&bytes(&other))]), []);
        let mut other = cache(0xC2);
        other[33] = 0;
        assert_eq!(find(&[segment(&bytes(&other))]), []);
        let mut other = cache(0xC4);
        other[3] = 1 << 36;
        assert_eq!(find(&[segment(&bytes(&other))]), []);
        // A misaligned or truncated table is ignored.
        let mut shifted = vec![0; 4];
        shifted.extend(bytes(&cache(0xC4)));
        assert_eq!(find(&[segment(&shifted)]), []);
        let whole = bytes(&cache(0xC4));
        assert_eq!(find(&[segment(&whole[..whole.len() - 1])]), []);
        assert_eq!(find(&[segment(&whole[8..])]), []);
    }

    /// An event table that overlaps another one, or whose contents in guest memory differ from the
    /// kernel file, is skipped. The other tables are still processed.
    #[test]
    fn overlapping_or_modified_tables_are_unchanged() {
        let data = kernel();
        let tables = find(&[segment(&data)]);
        let memory = memory();
        let there = |memory: &GuestMemoryMmap| {
            let mut there = vec![0; data.len()];
            memory.read_slice(&mut there, GuestAddress(LOAD_AT)).unwrap();
            there
        };
        // Nothing is hidden if guest memory does not contain the tables.
        assert_eq!(hide(&memory, &tables, Vendor::Intel, |_, _| false), []);
        // Guest memory contains another encoding than the kernel file in the last entry of AMD's
        // cache table.
        memory.write_slice(&data, GuestAddress(LOAD_AT)).unwrap();
        let last = tables[2].entry(CACHE_EVENTS - 1);
        memory.write_obj(0x1234u64, last).unwrap();
        let before = there(&memory);
        let done = hide(&memory, &tables, Vendor::Amd, |_, _| false);
        assert_eq!(done.iter().map(|d| d.virt).collect::<Vec<_>>(), [tables[0].virt]);
        assert_eq!(there(&memory)[160..], before[160..], "that table as it was");
        assert_ne!(there(&memory)[..160], before[..160], "and the other changed");
        // Nothing is hidden if two segments are loaded to the same or overlapping memory.
        memory.write_slice(&data, GuestAddress(LOAD_AT)).unwrap();
        for shift in [0, 8] {
            let mut other = segment(&data);
            other.phys += shift;
            let overlapping = find(&[segment(&data), other]);
            assert_eq!(hide(&memory, &overlapping, Vendor::Amd, |_, _| false), []);
            assert_eq!(there(&memory), data);
        }
    }

    #[test]
    fn cache_event_has_the_config_that_perf_passes() {
        let data = bytes(&cache(0xC2));
        let table = &find(&[segment(&data)])[0];
        let event = |at| table.event(at);
        assert_eq!(event(1), KernelTableEvent::Cache(1 << 16));
        assert_eq!(event(41), KernelTableEvent::Cache(6 | 2 << 8 | 1 << 16));
        assert_eq!(event(23).to_string(), "dTLB-prefetch-misses");
        assert_eq!(event(14).to_string(), "LLC-stores");
    }

    proptest! {
        #[test]
        fn damaged_kernel_does_not_panic_table_search(at in 0usize..800, value: u8, cut in 0usize..900) {
            let mut data = kernel();
            let at = at % data.len();
            data[at] = value;
            data.truncate(cut);
            for table in find(&[segment(&data)]) {
                prop_assert!(table.phys + 8 * table.entries.len() as u64 <= LOAD_AT + data.len() as u64);
            }
        }
    }
}
