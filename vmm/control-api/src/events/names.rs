//! Names of perf's events and of events that only Perfvisor counts.

use crate::nearest::did_you_mean;

/// A generic hardware event (`PERF_COUNT_HW_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "perf's names")]
pub enum HardwareEvent {
    Cycles = 0,
    Instructions = 1,
    CacheReferences = 2,
    CacheMisses = 3,
    Branches = 4,
    BranchMisses = 5,
    BusCycles = 6,
    StalledCyclesFrontend = 7,
    StalledCyclesBackend = 8,
    RefCycles = 9,
}

/// A host software event (`PERF_COUNT_SW_*`) of the vCPU's thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "perf's names")]
pub enum SoftwareEvent {
    CpuClock = 0,
    TaskClock = 1,
    PageFaults = 2,
    ContextSwitches = 3,
    CpuMigrations = 4,
    MinorFaults = 5,
    MajorFaults = 6,
    AlignmentFaults = 7,
    EmulationFaults = 8,
    Dummy = 9,
    BpfOutput = 10,
    CgroupSwitches = 11,
}

/// Names of the PMUs that are valid in `pmu/…/` events.
pub(super) const PMUS: [&str; 4] = ["cpu", "software", "kvm", "pv"];

/// Names of the generic hardware events. If an event has several names, the usual one comes first.
pub const HARDWARE: [(&str, HardwareEvent); 14] = [
    ("cycles", HardwareEvent::Cycles),
    ("cpu-cycles", HardwareEvent::Cycles),
    ("instructions", HardwareEvent::Instructions),
    ("cache-references", HardwareEvent::CacheReferences),
    ("cache-misses", HardwareEvent::CacheMisses),
    ("branches", HardwareEvent::Branches),
    ("branch-instructions", HardwareEvent::Branches),
    ("branch-misses", HardwareEvent::BranchMisses),
    ("bus-cycles", HardwareEvent::BusCycles),
    ("stalled-cycles-frontend", HardwareEvent::StalledCyclesFrontend),
    ("idle-cycles-frontend", HardwareEvent::StalledCyclesFrontend),
    ("stalled-cycles-backend", HardwareEvent::StalledCyclesBackend),
    ("idle-cycles-backend", HardwareEvent::StalledCyclesBackend),
    ("ref-cycles", HardwareEvent::RefCycles),
];

/// Names of the software events of a vCPU thread. If an event has several names, the usual one
/// comes first.
pub const SOFTWARE: [(&str, SoftwareEvent); 15] = [
    ("cpu-clock", SoftwareEvent::CpuClock),
    ("task-clock", SoftwareEvent::TaskClock),
    ("page-faults", SoftwareEvent::PageFaults),
    ("faults", SoftwareEvent::PageFaults),
    ("context-switches", SoftwareEvent::ContextSwitches),
    ("cs", SoftwareEvent::ContextSwitches),
    ("cpu-migrations", SoftwareEvent::CpuMigrations),
    ("migrations", SoftwareEvent::CpuMigrations),
    ("minor-faults", SoftwareEvent::MinorFaults),
    ("major-faults", SoftwareEvent::MajorFaults),
    ("alignment-faults", SoftwareEvent::AlignmentFaults),
    ("emulation-faults", SoftwareEvent::EmulationFaults),
    ("dummy", SoftwareEvent::Dummy),
    ("bpf-output", SoftwareEvent::BpfOutput),
    ("cgroup-switches", SoftwareEvent::CgroupSwitches),
];

/// Names of the paravirtual events.
pub const PARAVIRTUAL: [&str; 13] = [
    "vm-exits",
    "io-exits",
    "mmio-exits",
    "halts",
    "host-page-faults",
    "host-context-switches",
    "host-migrations",
    "irq-injections",
    "nmi-injections",
    "msr-exits",
    "steal-ns",
    "uncounted-ns",
    "backing-changes",
];

/// Cache names and their numbers in perf.
const CACHES: [(&str, u64); 8] = [
    ("L1-dcache", 0),
    ("L1-icache", 1),
    ("LLC", 2),
    ("dTLB", 3),
    ("iTLB", 4),
    ("branch", 5),
    ("bpu", 5),
    ("node", 6),
];
/// Suffixes of the names of cache events, with perf's numbers of the operation and the result.
const OPERATIONS: [(&str, u64, u64); 9] = [
    ("-load-misses", 0, 1),
    ("-loads", 0, 0),
    ("-load", 0, 0),
    ("-store-misses", 1, 1),
    ("-stores", 1, 0),
    ("-store", 1, 0),
    ("-prefetch-misses", 2, 1),
    ("-prefetches", 2, 0),
    ("-prefetch", 2, 0),
];

const NAMES_FOR_HELP: &str = "cycles, instructions, ref-cycles, branches, branch-misses, cache-references, cache-misses, bus-cycles, \
     task-clock, cpu-clock, page-faults, context-switches, cpu-migrations, L1-dcache-load-misses and the like, pv/vm-exits/ and the like";

pub(super) fn hardware(name: &str) -> Option<HardwareEvent> {
    HARDWARE.iter().find(|(n, _)| *n == name).map(|(_, event)| *event)
}

pub(super) fn software(name: &str) -> Option<SoftwareEvent> {
    SOFTWARE.iter().find(|(n, _)| *n == name).map(|(_, event)| *event)
}

pub(super) fn paravirtual(name: &str) -> Option<&'static str> {
    PARAVIRTUAL.into_iter().find(|n| *n == name)
}

/// Parses the name of a cache event, such as `L1-dcache-load-misses`, which consists of cache,
/// operation and result.
pub(super) fn cache(name: &str) -> Option<u64> {
    let (cache, rest) = CACHES
        .iter()
        .find_map(|(n, id)| Some((*id, name.strip_prefix(n)?)))?;
    let (_, operation, result) = OPERATIONS.iter().find(|(n, ..)| *n == rest)?;
    Some(cache | operation << 8 | result << 16)
}

/// Returns the names of the cache events, one per distinct event.
pub fn caches() -> Vec<String> {
    let mut seen = std::collections::HashSet::new();
    let all = CACHES.iter().flat_map(|(cache, _)| {
        OPERATIONS
            .iter()
            .map(move |(operation, ..)| format!("{cache}{operation}"))
    });
    all.filter(|name| cache(name).is_some_and(|config| seen.insert(config)))
        .collect()
}

/// Returns a hint for an unknown event name: the most similar name or, if there is none, the known
/// events.
pub(super) fn known(name: &str) -> String {
    let name = name.split([':', '/']).next().unwrap_or(name);
    let caches = caches();
    let hardware = HARDWARE.iter().map(|(name, _)| *name);
    let software = SOFTWARE.iter().map(|(name, _)| *name);
    let all = hardware.chain(software).chain(PARAVIRTUAL);
    let meant = did_you_mean(name, all.chain(caches.iter().map(String::as_str)));
    if meant.is_empty() {
        format!("; known are {NAMES_FOR_HELP}, kvm:STATISTIC, rNNN and cpu/event=N,umask=N/")
    } else {
        format!("{meant} (perfvisor list shows all)")
    }
}
