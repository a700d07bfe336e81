//! The tables in which a Linux kernel keeps the processor's numbers for perf's generic events.
//!
//! perf asks the kernel for `instructions` or `L1-dcache-loads`; the kernel looks the numbers up in a table
//! of the processor's vendor and generation, and answers ENOENT where it finds 0. CPUID can tell an Intel
//! guest which of seven events are not there, an AMD guest none, and neither says a word on cache events. So
//! what cannot be counted is taken out of the tables before the guest starts: its perf then says
//! `<not supported>`, where it would show a 0 that nobody counted.
//!
//! The tables are found by what is in them, because a kernel's own symbols need not name its data, and only
//! where every entry is one the kernel could have. A table that is not recognised is left alone. Linux,
//! arch/x86/events/amd/core.c and arch/x86/events/intel/core.c.

use std::fmt;

use memchr::memmem;
use perf_core::guest_log;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::Vendor;

use kernel_images::elf::Segment;

/// Generic hardware events (`PERF_COUNT_HW_*`), one entry each.
const HARDWARE_EVENTS: usize = 10;
/// Caches × operations × results (`PERF_COUNT_HW_CACHE_*`).
const CACHE_EVENTS: usize = 7 * 3 * 2;
/// An entry for what makes no sense, such as a write to the instruction cache: EINVAL.
const SENSELESS: u64 = u64::MAX;
/// An entry for what the processor cannot count: ENOENT.
const ABSENT: u64 = 0;
/// Bits an entry can have: AMD's event select reaches bit 35, Intel's selector ends with bit 31.
const CONFIG_BITS: u64 = 0xF_FFFF_FFFF;
/// Entries of a cache table that are senseless for every processor: writes to the instruction cache, writes
/// and prefetches of the instruction TLB and of the branch unit.
const SENSELESS_AT: [usize; 10] = [8, 9, 26, 27, 28, 29, 32, 33, 34, 35];
/// The four senseless ones before the branch unit's reads.
const ITLB_AT: usize = 26;
/// Reads of the branch unit: branches.
const BRANCHES_AT: usize = 30;
/// Linux's number for reference cycles in Intel's table, which is no event of a general-purpose counter.
const INTEL_REF_CYCLES: u64 = 0x300;
/// Tables of one kind looked at; Linux 6.1 has two of AMD's and eleven of Intel's.
const MAX_TABLES: usize = 64;

/// One of perf's generic events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableEvent {
    /// `PERF_TYPE_HARDWARE` with this `config`.
    Hardware(u64),
    /// `PERF_TYPE_HW_CACHE` with this `config`: cache, operation << 8, result << 16.
    Cache(u64),
}

/// perf's name of the event.
impl fmt::Display for TableEvent {
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

/// What a table has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Hardware,
    Cache,
}

/// A table found in a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventTable {
    vendor: Vendor,
    kind: Kind,
    /// Link-time address.
    virt: u64,
    /// Guest-physical address.
    phys: u64,
    entries: Vec<u64>,
}

impl EventTable {
    /// Whose processors the table is for.
    pub fn vendor(&self) -> Vendor {
        self.vendor
    }

    /// The events that have numbers, with their place and those numbers.
    fn events(&self) -> impl Iterator<Item = (usize, TableEvent, u64)> {
        let numbered = self.entries.iter().copied().enumerate();
        let numbered = numbered.filter(|(_, config)| !matches!(*config, ABSENT | SENSELESS));
        numbered.map(|(at, config)| (at, self.event(at as u64), config))
    }

    /// Guest-physical address of entry `at`.
    fn entry(&self, at: usize) -> GuestAddress {
        GuestAddress(self.phys.wrapping_add(8 * at as u64))
    }

    /// Guest-physical address behind it.
    fn end(&self) -> u64 {
        self.phys.saturating_add(8 * self.entries.len() as u64)
    }

    fn event(&self, at: u64) -> TableEvent {
        match self.kind {
            Kind::Hardware => TableEvent::Hardware(at),
            Kind::Cache => TableEvent::Cache((at / 6) | ((at / 2 % 3) << 8) | ((at % 2) << 16)),
        }
    }
}

/// What came of taking events out of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hidden {
    /// Link-time address of the table.
    pub virt: u64,
    /// Events taken out.
    pub hidden: Vec<TableEvent>,
    /// Events left in.
    pub left: usize,
}

/// Finds the tables in an image's segments.
pub(crate) fn find(segments: &[Segment<'_>]) -> Vec<EventTable> {
    let mut tables = Vec::new();
    for segment in segments {
        // Cycles and instructions stand first.
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
                let start = at.checked_sub(8 * ITLB_AT);
                tables.extend(start.and_then(|start| cache_table(segment, start, vendor, branches)));
            }
        }
    }
    tables
}

/// Finds the tables in the memory of a kernel that runs: `bytes` are at `start`, a page's first address, and
/// `physical` translates. A table that is not in one piece in physical memory is none.
pub(crate) fn find_in_memory(
    start: u64,
    bytes: &[u8],
    mut physical: impl FnMut(u64) -> Option<u64>,
) -> Vec<EventTable> {
    let mut tables = find(&[Segment {
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

fn hardware_table(segment: &Segment<'_>, at: usize, vendor: Vendor) -> Option<EventTable> {
    let entries = entries(segment, at, HARDWARE_EVENTS)?;
    let known = match vendor {
        // Instructions, branches and mispredicted ones have had the same numbers since the K7.
        Vendor::Amd => entries[4] == 0xC2 && entries[5] == 0xC3,
        // The architectural events, and what Linux calls reference cycles.
        Vendor::Intel => entries[4] == 0xC4 && entries[5] == 0xC5 && entries[9] == INTEL_REF_CYCLES,
    };
    let sound = entries.iter().all(|config| config & !CONFIG_BITS == 0);
    (known && sound).then(|| table(segment, at, vendor, Kind::Hardware, entries))
}

fn cache_table(segment: &Segment<'_>, at: usize, vendor: Vendor, branches: u64) -> Option<EventTable> {
    let entries = entries(segment, at, CACHE_EVENTS)?;
    let known = entries[BRANCHES_AT] == branches && SENSELESS_AT.iter().all(|at| entries[*at] == SENSELESS);
    let sound = |config: &u64| *config == SENSELESS || config & !CONFIG_BITS == 0;
    (known && entries.iter().all(sound)).then(|| table(segment, at, vendor, Kind::Cache, entries))
}

fn entries(segment: &Segment<'_>, at: usize, count: usize) -> Option<Vec<u64>> {
    if !segment.phys.wrapping_add(at as u64).is_multiple_of(8) {
        return None;
    }
    let bytes = segment.data.get(at..at.checked_add(8 * count)?)?;
    let (words, _) = bytes.as_chunks::<8>();
    Some(words.iter().map(|w| u64::from_le_bytes(*w)).collect())
}

fn table(segment: &Segment<'_>, at: usize, vendor: Vendor, kind: Kind, entries: Vec<u64>) -> EventTable {
    EventTable {
        vendor,
        kind,
        virt: segment.virt.wrapping_add(at as u64),
        phys: segment.phys.wrapping_add(at as u64),
        entries,
    }
}

/// Takes the events that `can_count` denies out of the tables of `vendor` in guest memory. A table that
/// shares memory with another one, or is not in memory as the file has it, is not what it looks like: it is
/// left alone, and the log says so.
pub fn hide(
    memory: &GuestMemoryMmap,
    tables: &[EventTable],
    vendor: Vendor,
    mut can_count: impl FnMut(TableEvent, u64) -> bool,
) -> Vec<Hidden> {
    // Before anything is changed.
    let known: Vec<bool> = tables
        .iter()
        .map(|table| is_known(memory, tables, table))
        .collect();
    let mut done = Vec::new();
    for (table, _) in tables
        .iter()
        .zip(known)
        .filter(|(table, known)| *known && table.vendor == vendor)
    {
        let mut result = Hidden {
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

/// Whether `table` has its memory for itself, and what it has in the file is there.
fn is_known(memory: &GuestMemoryMmap, tables: &[EventTable], table: &EventTable) -> bool {
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
        "what looks like a table of the kernel's events at {:#x} {why}: it is left alone",
        table.virt
    );
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::GuestRam;
    use proptest::prelude::*;

    const LOAD_AT: u64 = 0x10_0000;

    fn bytes(words: &[u64]) -> Vec<u8> {
        words.iter().copied().flat_map(u64::to_le_bytes).collect()
    }

    fn segment(data: &[u8]) -> Segment<'_> {
        Segment {
            index: 0,
            virt: 0xFFFF_FFFF_8100_0000,
            phys: LOAD_AT,
            mem_bytes: data.len() as u64,
            data,
            executable: false,
        }
    }

    /// Intel's generic events, as in Linux 6.1.
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

    /// Generic events as on family 17h.
    fn hardware() -> Vec<u64> {
        vec![0x76, 0xC0, 0xFF60, 0x964, 0xC2, 0xC3, 0, 0x287, 0x187, 0]
    }

    /// A cache table with loads, instruction fetches and branches.
    fn cache(branches: u64) -> Vec<u64> {
        let mut words = vec![0; CACHE_EVENTS];
        for at in SENSELESS_AT {
            words[at] = SENSELESS;
        }
        (words[0], words[1], words[6]) = (0x40, 0xC860, 0x80);
        (words[BRANCHES_AT], words[BRANCHES_AT + 1]) = (branches, branches + 1);
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
    fn what_cannot_be_counted_is_zero_in_the_guest_and_the_rest_is_as_it_was() {
        let data = kernel();
        let tables = find(&[segment(&data)]);
        assert_eq!(tables.len(), 4, "{tables:?}");
        let ram = GuestRam::new(32 << 20).unwrap();
        ram.memory().write_slice(&data, GuestAddress(LOAD_AT)).unwrap();
        // As on the clock: cycles only.
        let done = hide(ram.memory(), &tables, Vendor::Amd, |_, config| config == 0x76);
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
            if *word != SENSELESS {
                *word = 0;
            }
        }
        let only_cycles = bytes(&[0x76, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        expected[64..64 + 80].copy_from_slice(&only_cycles);
        expected[160..160 + 336].copy_from_slice(&bytes(&hidden));
        let mut there = vec![0; data.len()];
        ram.memory()
            .read_slice(&mut there, GuestAddress(LOAD_AT))
            .unwrap();
        assert_eq!(there, expected);
    }

    /// In the memory of a kernel that runs a table is where the page tables say; one that lies in two pieces
    /// is none.
    #[test]
    fn tables_of_a_kernel_that_runs_are_where_its_pages_are() {
        const START: u64 = 0xFFFF_FFFF_8100_0000;
        let data = kernel();
        let in_one_piece = |linear: u64| Some(linear - START + LOAD_AT);
        let found = find_in_memory(START, &data, in_one_piece);
        assert_eq!(found, find(&[segment(&data)]));
        // The last entries of AMD's cache events and what follows lie in another page.
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
                (Vendor::Amd, Kind::Hardware, LOAD_AT + 64),
                (Vendor::Intel, Kind::Hardware, 2 * LOAD_AT + 832),
                (Vendor::Intel, Kind::Cache, 2 * LOAD_AT + 496),
            ]
        );
        assert_eq!(find_in_memory(START, &data, |_| None), []);
    }

    #[test]
    fn reference_cycles_can_be_taken_out_of_intels_table() {
        let data = kernel();
        let ram = GuestRam::new(32 << 20).unwrap();
        ram.memory().write_slice(&data, GuestAddress(LOAD_AT)).unwrap();
        let done = hide(
            ram.memory(),
            &find(&[segment(&data)]),
            Vendor::Intel,
            |event, _| event != TableEvent::Hardware(9),
        );
        let hidden: Vec<_> = done.iter().flat_map(|d| d.hidden.clone()).collect();
        assert_eq!(hidden, [TableEvent::Hardware(9)]);
        let mut there = vec![0; data.len()];
        ram.memory()
            .read_slice(&mut there, GuestAddress(LOAD_AT))
            .unwrap();
        let changed: Vec<_> = (0..data.len()).filter(|at| there[*at] != data[*at]).collect();
        // The byte 03H of its entry, the last of the table.
        assert_eq!(changed, [data.len() - 7]);
    }

    /// A kernel that is not known is left alone.
    #[test]
    fn what_is_not_quite_a_table_is_none() {
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
        // Not where a table of u64 can be, and cut off.
        let mut shifted = vec![0; 4];
        shifted.extend(bytes(&cache(0xC4)));
        assert_eq!(find(&[segment(&shifted)]), []);
        let whole = bytes(&cache(0xC4));
        assert_eq!(find(&[segment(&whole[..whole.len() - 1])]), []);
        assert_eq!(find(&[segment(&whole[8..])]), []);
    }

    /// What does not look in memory as in the file, or lies over another table, is no table; the others are
    /// still seen to.
    #[test]
    fn tables_that_are_not_what_they_look_like_are_left_alone() {
        let data = kernel();
        let tables = find(&[segment(&data)]);
        let ram = GuestRam::new(32 << 20).unwrap();
        let there = |ram: &GuestRam| {
            let mut there = vec![0; data.len()];
            ram.memory()
                .read_slice(&mut there, GuestAddress(LOAD_AT))
                .unwrap();
            there
        };
        // Nothing was loaded.
        assert_eq!(hide(ram.memory(), &tables, Vendor::Intel, |_, _| false), []);
        // The kernel has another number in the last entry of AMD's cache events.
        ram.memory().write_slice(&data, GuestAddress(LOAD_AT)).unwrap();
        let last = tables[2].entry(CACHE_EVENTS - 1);
        ram.memory().write_obj(0x1234u64, last).unwrap();
        let before = there(&ram);
        let done = hide(ram.memory(), &tables, Vendor::Amd, |_, _| false);
        assert_eq!(done.iter().map(|d| d.virt).collect::<Vec<_>>(), [tables[0].virt]);
        assert_eq!(there(&ram)[160..], before[160..], "that table as it was");
        assert_ne!(there(&ram)[..160], before[..160], "and the other changed");
        // Two segments with the same memory, and two that share a part of it.
        ram.memory().write_slice(&data, GuestAddress(LOAD_AT)).unwrap();
        for shift in [0, 8] {
            let mut other = segment(&data);
            other.phys += shift;
            let overlapping = find(&[segment(&data), other]);
            assert_eq!(hide(ram.memory(), &overlapping, Vendor::Amd, |_, _| false), []);
            assert_eq!(there(&ram), data);
        }
    }

    #[test]
    fn a_cache_event_has_the_config_that_perf_passes() {
        let data = bytes(&cache(0xC2));
        let table = &find(&[segment(&data)])[0];
        let event = |at| table.event(at);
        assert_eq!(event(1), TableEvent::Cache(1 << 16));
        assert_eq!(event(41), TableEvent::Cache(6 | 2 << 8 | 1 << 16));
        assert_eq!(event(23).to_string(), "dTLB-prefetch-misses");
        assert_eq!(event(14).to_string(), "LLC-stores");
    }

    proptest! {
        #[test]
        fn any_damage_to_a_kernel_never_panics(at in 0usize..800, value: u8, cut in 0usize..900) {
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
