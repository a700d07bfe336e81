//! Guest events: decoding of event selectors, and the backings (sources of counts) that can count
//! them.
//!
//! A guest selects an event by number (event select and unit mask, or a fixed counter).
//! [`DecodedCounterEvent`] is the decoded event, for which a backing is then chosen.

use std::fmt;
use std::str::FromStr;

use crate::model_name::{Vendor, printable};

/// Event select in a guest's event selector register: 8 bits on Intel, 12 bits on AMD (EVNTSEL bits
/// 35:32 and 7:0).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventSelect(pub u16);

/// Unit mask in a guest's event selector register (EVNTSEL bits 15:8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitMask(pub u8);

/// Event select of the paravirtual events on Intel models. Unused by Intel processors.
pub const PARAVIRTUAL_SELECT_INTEL: EventSelect = EventSelect(0xFF);
/// Event select of the paravirtual events on AMD models. Unused by AMD processors.
pub const PARAVIRTUAL_SELECT_AMD: EventSelect = EventSelect(0xFFF);

/// Event with the same meaning on every processor generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ArchEvent {
    /// Core clock cycles while the processor is not halted.
    CoreCycles,
    /// Cycles at the frequency of the TSC while the processor is not halted.
    RefCycles,
    /// Instructions that retired.
    Instructions,
    /// References to the last-level cache.
    CacheReferences,
    /// Misses in the last-level cache.
    CacheMisses,
    /// Branch instructions that retired.
    Branches,
    /// Branch instructions that retired and were mispredicted.
    BranchMisses,
    /// Branch instructions that retired and were taken.
    TakenBranches,
    /// Conditional branch instructions that retired, taken or not.
    ConditionalBranches,
    /// Locked instructions that retired through the speculative lock map of AMD Zen processors.
    SpeculativeLocks,
    /// Retired instructions that load from memory.
    Loads,
    /// Retired instructions that store to memory.
    Stores,
    /// Issue slots, the unit of the top-down analysis method.
    TopdownSlots,
    /// Cycles at a constant frequency while the processor is not halted. The clock is
    /// model-specific: the core crystal clock, the bus clock or the TSC.
    BusCycles,
}

impl ArchEvent {
    /// All architectural events.
    pub const ALL: [Self; 14] = [
        Self::CoreCycles,
        Self::RefCycles,
        Self::Instructions,
        Self::CacheReferences,
        Self::CacheMisses,
        Self::Branches,
        Self::BranchMisses,
        Self::TakenBranches,
        Self::ConditionalBranches,
        Self::SpeculativeLocks,
        Self::Loads,
        Self::Stores,
        Self::TopdownSlots,
        Self::BusCycles,
    ];

    /// Returns the event name used by `perf list`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::CoreCycles => "cycles",
            Self::RefCycles => "ref-cycles",
            Self::Instructions => "instructions",
            Self::CacheReferences => "cache-references",
            Self::CacheMisses => "cache-misses",
            Self::Branches => "branches",
            Self::BranchMisses => "branch-misses",
            Self::TakenBranches => "branches-taken",
            Self::ConditionalBranches => "branches-conditional",
            Self::SpeculativeLocks => "speculative-locks",
            Self::Loads => "loads",
            Self::Stores => "stores",
            Self::TopdownSlots => "slots",
            Self::BusCycles => "bus-cycles",
        }
    }

    /// Returns whether the host kernel's generic event counts the same event on processors of all
    /// vendors.
    ///
    /// Generic cache events count last-level cache accesses on Intel processors and second-level
    /// cache accesses on AMD processors. The clock of bus cycles is model-specific.
    pub const fn is_vendor_independent(self) -> bool {
        !matches!(self, Self::CacheReferences | Self::CacheMisses | Self::BusCycles)
    }

    const fn bit(self) -> u16 {
        1 << self as u16
    }
}

/// Host-side vCPU event that is offered to the guest as a PMU event.
///
/// The discriminant is the unit mask, under event select 0xFF (Intel) or 0xFFF (AMD).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ParavirtualEvent {
    /// Exits of the vCPU from guest mode.
    VmExits = 1,
    /// Exits to user space for port I/O.
    IoExits = 2,
    /// Exits to user space for memory-mapped I/O.
    MmioExits = 3,
    /// Exits caused by HLT.
    Halts = 4,
    /// Host page faults on guest memory.
    HostPageFaults = 5,
    /// Context switches of the vCPU thread.
    HostContextSwitches = 6,
    /// Migrations of the vCPU thread to another host CPU.
    HostMigrations = 7,
    /// Interrupts injected into the vCPU.
    IrqInjections = 8,
    /// NMIs injected into the vCPU.
    NmiInjections = 9,
    /// Exits to user space for RDMSR and WRMSR.
    MsrExits = 10,
    /// Steal time in nanoseconds: the time in which the vCPU was runnable but waited for a host
    /// CPU.
    StealNs = 11,
    /// Time in nanoseconds in which at least one counter that the guest has enabled was uncounted.
    UncountedNs = 12,
    /// Number of times that a restore of the VM changed the backing (source of counts) of a counter
    /// that the guest has enabled.
    BackingChanges = 13,
}

impl ParavirtualEvent {
    /// All paravirtual events, ordered by unit mask.
    pub const ALL: [Self; 13] = [
        Self::VmExits,
        Self::IoExits,
        Self::MmioExits,
        Self::Halts,
        Self::HostPageFaults,
        Self::HostContextSwitches,
        Self::HostMigrations,
        Self::IrqInjections,
        Self::NmiInjections,
        Self::MsrExits,
        Self::StealNs,
        Self::UncountedNs,
        Self::BackingChanges,
    ];

    /// Returns the paravirtual event with the unit mask `umask`.
    pub fn from_umask(umask: UnitMask) -> Option<Self> {
        Self::ALL.into_iter().find(|event| event.umask() == umask)
    }

    /// Returns the unit mask of the event.
    pub const fn umask(self) -> UnitMask {
        UnitMask(self as u8)
    }

    /// Returns a one-line description of the event.
    pub const fn description(self) -> &'static str {
        match self {
            Self::VmExits => "Exits from guest mode",
            Self::IoExits => "Exits for port I/O",
            Self::MmioExits => "Exits for memory-mapped I/O",
            Self::Halts => "HLT instructions that left guest mode",
            Self::HostPageFaults => "Page faults of the host on the vCPU's thread",
            Self::HostContextSwitches => "Context switches of the vCPU's thread",
            Self::HostMigrations => "Moves of the vCPU's thread to another host CPU",
            Self::IrqInjections => "Interrupts injected",
            Self::NmiInjections => "NMIs injected",
            Self::MsrExits => "Exits to the VMM for RDMSR and WRMSR",
            Self::StealNs => "Nanoseconds the vCPU was ready and waited for a host CPU",
            Self::UncountedNs => "Nanoseconds in which an enabled counter of the vCPU was not counted",
            Self::BackingChanges => {
                "Enabled counters of the vCPU that another backing counts since a restore"
            }
        }
    }

    /// Returns the event name used in the `perf` event files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::VmExits => "vm-exits",
            Self::IoExits => "io-exits",
            Self::MmioExits => "mmio-exits",
            Self::Halts => "halts",
            Self::HostPageFaults => "host-page-faults",
            Self::HostContextSwitches => "host-context-switches",
            Self::HostMigrations => "host-migrations",
            Self::IrqInjections => "irq-injections",
            Self::NmiInjections => "nmi-injections",
            Self::MsrExits => "msr-exits",
            Self::StealNs => "steal-ns",
            Self::UncountedNs => "uncounted-ns",
            Self::BackingChanges => "backing-changes",
        }
    }
}

/// Formats the paravirtual events as an argument of `perf stat -e` for a guest PMU of `vendor`.
pub fn perf_event_list(vendor: Vendor) -> String {
    let select = paravirtual_select(vendor).0;
    let terms = ParavirtualEvent::ALL.map(|event| {
        format!(
            "cpu/event={select:#x},umask={:#04x},name={}/",
            event.umask().0,
            event.name()
        )
    });
    terms.join(",") + "\n"
}

/// Formats the paravirtual events as a perf event table (JSON) for a guest PMU of `vendor`.
pub fn perf_event_table(vendor: Vendor) -> String {
    let select = paravirtual_select(vendor).0;
    let entries = ParavirtualEvent::ALL.map(|event| {
        format!(
            "    {{\n        \"EventName\": \"{}\",\n        \"EventCode\": \"{select:#X}\",\n        \"UMask\": \"{:#04x}\",\n        \"BriefDescription\": \"{}\"\n    }}",
            event.name(),
            event.umask().0,
            event.description()
        )
        .replace("0XF", "0xF")
    });
    format!("[\n{}\n]\n", entries.join(",\n"))
}

/// Returns the event select of the paravirtual events on models of `vendor`.
pub const fn paravirtual_select(vendor: Vendor) -> EventSelect {
    match vendor {
        Vendor::Intel => PARAVIRTUAL_SELECT_INTEL,
        Vendor::Amd => PARAVIRTUAL_SELECT_AMD,
    }
}

/// Event that a guest counter counts, decoded from its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DecodedCounterEvent {
    /// Architectural event, which has the same meaning on every processor generation.
    Architectural(ArchEvent),
    /// Paravirtual event: an event of the vCPU on the host.
    Paravirtual(ParavirtualEvent),
    /// Any other event. Only a host PMU of the same vendor can count a raw event.
    Raw,
}

impl fmt::Display for DecodedCounterEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Architectural(event) => f.write_str(event.name()),
            Self::Paravirtual(event) => f.write_str(event.name()),
            Self::Raw => f.write_str("raw"),
        }
    }
}

/// Event number as programmed by the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventSelection {
    /// Event select and unit mask of a general-purpose counter.
    General(EventSelect, UnitMask),
    /// Number of a fixed counter, whose event is not programmable.
    Fixed(u8),
}

/// Event and modifiers that a counter counts. Counters with equal requests count the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CounterEventRequest {
    /// Vendor that defines the event numbers in `selection`.
    pub vendor: Vendor,
    /// Event number as programmed by the guest.
    pub selection: EventSelection,
    /// Decoded event, which `selection` selects.
    pub event: DecodedCounterEvent,
    /// `true` to count at CPL 1 to 3.
    pub user: bool,
    /// `true` to count at CPL 0.
    pub kernel: bool,
    /// Edge detect: `true` to count how often the condition becomes true instead of the cycles in
    /// which it is true.
    pub edge: bool,
    /// `true` to invert the comparison with `cmask`.
    pub invert: bool,
    /// Counter mask: if not 0, counts the cycles with at least this number of events instead of the
    /// events.
    pub cmask: u8,
    /// `true` to count inside transactions only (Intel IN_TX).
    pub in_transaction: bool,
    /// `true` to exclude the counts of aborted transactions (Intel IN_TXCP).
    pub checkpointed: bool,
}

impl CounterEventRequest {
    /// Creates the request of a general-purpose counter from the `perf_event_attr.config` value of
    /// a raw event, at all privilege levels. Inverse of [`CounterEventRequest::raw_config`].
    #[expect(clippy::cast_possible_truncation, reason = "the fields are that wide")]
    pub fn from_raw_config(vendor: Vendor, config: u64) -> Self {
        let select = match vendor {
            Vendor::Intel => config & 0xFF,
            Vendor::Amd => config & 0xFF | config >> 24 & 0xF00,
        };
        let (select, umask) = (EventSelect(select as u16), UnitMask((config >> 8) as u8));
        Self {
            vendor,
            selection: EventSelection::General(select, umask),
            event: decode(vendor, select, umask),
            user: true,
            kernel: true,
            edge: config & 1 << 18 != 0,
            invert: config & 1 << 23 != 0,
            cmask: (config >> 24) as u8,
            in_transaction: vendor == Vendor::Intel && config & 1 << 32 != 0,
            checkpointed: vendor == Vendor::Intel && config & 1 << 33 != 0,
        }
    }

    /// Returns the request as the `perf_event_attr.config` value of a raw event on a host of the
    /// same vendor. Returns `None` for a fixed counter.
    pub const fn raw_config(&self) -> Option<u64> {
        let EventSelection::General(select, umask) = self.selection else {
            return None;
        };
        let select = select.0 as u64;
        Some(
            select & 0xFF
                | (select >> 8) << 32
                | (umask.0 as u64) << 8
                | (self.edge as u64) << 18
                | (self.invert as u64) << 23
                | (self.cmask as u64) << 24
                // AMD uses bits 33:32 for the event select. AMD requests set neither flag.
                | (self.in_transaction as u64) << 32
                | (self.checkpointed as u64) << 33,
        )
    }

    /// Returns whether the request has modifiers: edge detect, inversion, a counter mask or
    /// transaction filters. Only a hardware event can evaluate modifiers, because they apply to
    /// individual cycles.
    pub const fn is_modified(&self) -> bool {
        self.edge || self.invert || self.cmask > 0 || self.in_transaction || self.checkpointed
    }
}

/// Event selects with which [`decode`] returns an architectural event for at least one vendor.
pub(crate) const ARCHITECTURAL_SELECTS: [u16; 13] = [
    0x29, 0x2E, 0x3C, 0x76, 0xA4, 0xC0, 0xC2, 0xC3, 0xC4, 0xC5, 0xD0, 0xD1, 0x120,
];

/// Decodes an event select and unit mask.
///
/// Intel: SDM vol. 3 "Pre-defined Architectural Performance Events". Taken branches, loads and
/// stores are BR_INST_RETIRED.NEAR_TAKEN and MEM_INST_RETIRED.ALL_LOADS/ALL_STORES, with unchanged
/// numbers since Haswell. Conditional branches are BR_INST_RETIRED.COND since Ice Lake, the sum of
/// taken (0x01) and not taken (0x10). Before Ice Lake, 0x01 alone counted all conditional branches,
/// so the union of both masks has the same meaning there. [`crate::Vpmu::set_signature`] selects
/// the numbers that differ between generations.
///
/// AMD: PPR "Core Performance Monitor Counters", PMCx076, PMCx0C0, PMCx0C2 to PMCx0C4, PMCx0D1,
/// PMCx029, PMCx120.
pub fn decode(vendor: Vendor, select: EventSelect, umask: UnitMask) -> DecodedCounterEvent {
    use ArchEvent::*;
    let arch = match (vendor, select.0, umask.0) {
        (Vendor::Intel, 0x3C, 0x00) | (Vendor::Amd, 0x76, 0x00) => CoreCycles,
        (Vendor::Amd, 0x120, 0x01) => RefCycles,
        (Vendor::Intel, 0x3C, 0x01) => BusCycles,
        (_, 0xC0, 0x00) => Instructions,
        (Vendor::Intel, 0x2E, 0x4F) => CacheReferences,
        (Vendor::Intel, 0x2E, 0x41) => CacheMisses,
        (Vendor::Intel, 0xC4, 0x00) | (Vendor::Amd, 0xC2, 0x00) => Branches,
        (Vendor::Intel, 0xC5, 0x00) | (Vendor::Amd, 0xC3, 0x00) => BranchMisses,
        (Vendor::Intel, 0xC4, 0x20) | (Vendor::Amd, 0xC4, 0x00) => TakenBranches,
        (Vendor::Intel, 0xC4, 0x11) | (Vendor::Amd, 0xD1, 0x00) => ConditionalBranches,
        (Vendor::Intel, 0xD0, 0x81) | (Vendor::Amd, 0x29, 0x01) => Loads,
        (Vendor::Intel, 0xD0, 0x82) | (Vendor::Amd, 0x29, 0x02) => Stores,
        (Vendor::Intel, 0xA4, 0x01) => TopdownSlots,
        _ => {
            return match ParavirtualEvent::from_umask(umask) {
                Some(event) if select == paravirtual_select(vendor) => {
                    DecodedCounterEvent::Paravirtual(event)
                }
                _ => DecodedCounterEvent::Raw,
            };
        }
    };
    DecodedCounterEvent::Architectural(arch)
}

/// Returns the event of Intel's fixed counter `n` (SDM vol. 3, "Association of Fixed-Function
/// Performance Counters with Architectural Performance Events").
pub const fn decode_fixed(n: u32) -> DecodedCounterEvent {
    match n {
        0 => DecodedCounterEvent::Architectural(ArchEvent::Instructions),
        1 => DecodedCounterEvent::Architectural(ArchEvent::CoreCycles),
        2 => DecodedCounterEvent::Architectural(ArchEvent::RefCycles),
        3 => DecodedCounterEvent::Architectural(ArchEvent::TopdownSlots),
        _ => DecodedCounterEvent::Raw,
    }
}

/// Set of the architectural events that the backings (sources of counts) of a VM can count on this
/// host. The VMM determines the set and reports it in the guest's CPUID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArchEventSet(u16);

impl ArchEventSet {
    /// Set without any event.
    pub const NONE: Self = Self(0);
    /// Set of all architectural events.
    pub const ALL: Self = Self((1 << ArchEvent::ALL.len()) - 1);
    /// Set of the events that the clock backing can count.
    pub const CLOCK: Self = Self::NONE
        .with(ArchEvent::CoreCycles)
        .with(ArchEvent::RefCycles)
        .with(ArchEvent::BusCycles);
    /// Set of the events that the exact backing (single-stepping) can count. For cycle events, it
    /// counts retired instructions.
    pub const EXACT: Self = Self::CLOCK
        .with(ArchEvent::Instructions)
        .with(ArchEvent::Branches)
        .with(ArchEvent::TakenBranches)
        .with(ArchEvent::ConditionalBranches)
        .with(ArchEvent::SpeculativeLocks)
        .with(ArchEvent::Loads)
        .with(ArchEvent::Stores);

    /// Returns the set with `event` added.
    #[must_use]
    pub const fn with(self, event: ArchEvent) -> Self {
        Self(self.0 | event.bit())
    }

    /// Returns the intersection of this set and `other`.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns whether the set contains `event`.
    pub const fn contains(self, event: ArchEvent) -> bool {
        self.0 & event.bit() != 0
    }
}

impl FromIterator<ArchEvent> for ArchEventSet {
    fn from_iter<I: IntoIterator<Item = ArchEvent>>(events: I) -> Self {
        events.into_iter().fold(Self::NONE, Self::with)
    }
}

/// Value of `--backing`, which selects the backings (sources of counts) that may count for guest
/// counters. Paravirtual events are available with every policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CounterBackingPolicy {
    /// The host PMU counts if it is available, otherwise the clock.
    #[default]
    Auto,
    /// Only the host PMU counts.
    Hardware,
    /// Only the clock counts, even if the host has a PMU.
    Clock,
    /// The vCPU is single-stepped, which gives exact counts.
    Exact,
    /// KVM's own vPMU counts. KVM emulates the registers instead of this crate.
    Kvm,
    /// Nothing counts, but the registers are emulated.
    None,
}

impl FromStr for CounterBackingPolicy {
    type Err = UnknownCounterBackingPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownCounterBackingPolicy> {
        Ok(match name {
            "auto" => Self::Auto,
            "hardware" => Self::Hardware,
            "clock" => Self::Clock,
            "exact" => Self::Exact,
            "kvm" => Self::Kvm,
            "none" => Self::None,
            _ => return Err(UnknownCounterBackingPolicy(printable(name))),
        })
    }
}

/// Error returned for an unknown `--backing` value. Contains the value.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("unknown backing \"{0}\"; must be auto, hardware, clock, exact, kvm or none")]
pub struct UnknownCounterBackingPolicy(String);

/// Mechanism that provides the count of a guest counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CounterBacking {
    /// Hardware event of the host.
    Hardware,
    /// Run time of the vCPU, scaled to cycles.
    Clock,
    /// Single-stepping of the vCPU with instruction decoding.
    Exact,
    /// Software event of the host kernel.
    Software,
    /// Statistic that KVM maintains for the vCPU.
    KvmStat,
    /// KVM's own vPMU, which emulates the PMU registers.
    Kvm,
    /// No mechanism. The value of the counter does not change.
    None,
}

impl CounterBacking {
    /// Returns whether events of this backing keep counting while their counter is paused. Stopping
    /// and restarting such an event would cost system calls, so its counts during a pause are
    /// ignored instead. Events of other backings stop during a pause.
    #[inline]
    pub const fn counts_through_pauses(self) -> bool {
        matches!(self, Self::Hardware)
    }

    /// Returns the backing's name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hardware => "hardware",
            Self::Clock => "clock",
            Self::Exact => "exact",
            Self::Software => "software",
            Self::KvmStat => "kvm-stat",
            Self::Kvm => "kvm",
            Self::None => "none",
        }
    }
}

impl fmt::Display for CounterBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linux_generic_events_decode_on_both_vendors() {
        let decode = |vendor, select, umask| decode(vendor, EventSelect(select), UnitMask(umask));
        for (intel, amd, event) in [
            ((0x3C, 0), (0x76, 0), ArchEvent::CoreCycles),
            ((0xC0, 0), (0xC0, 0), ArchEvent::Instructions),
            ((0xC4, 0), (0xC2, 0), ArchEvent::Branches),
            ((0xC5, 0), (0xC3, 0), ArchEvent::BranchMisses),
        ] {
            assert_eq!(
                decode(Vendor::Intel, intel.0, intel.1),
                DecodedCounterEvent::Architectural(event)
            );
            assert_eq!(
                decode(Vendor::Amd, amd.0, amd.1),
                DecodedCounterEvent::Architectural(event)
            );
        }
        assert_eq!(decode(Vendor::Intel, 0x76, 0), DecodedCounterEvent::Raw);
        assert_eq!(decode(Vendor::Amd, 0x3C, 0), DecodedCounterEvent::Raw);
    }

    #[test]
    fn paravirtual_events_have_unique_umasks() {
        for (n, event) in ParavirtualEvent::ALL.into_iter().enumerate() {
            assert_eq!(event.umask().0 as usize, n + 1);
            let expected = DecodedCounterEvent::Paravirtual(event);
            assert_eq!(decode(Vendor::Intel, EventSelect(0xFF), event.umask()), expected);
            assert_eq!(decode(Vendor::Amd, EventSelect(0xFFF), event.umask()), expected);
            assert_eq!(
                decode(Vendor::Amd, EventSelect(0xFF), event.umask()),
                DecodedCounterEvent::Raw
            );
        }
        assert_eq!(
            decode(Vendor::Intel, EventSelect(0xFF), UnitMask(0)),
            DecodedCounterEvent::Raw
        );
        assert_eq!(
            decode(Vendor::Intel, EventSelect(0xFF), UnitMask(14)),
            DecodedCounterEvent::Raw
        );
    }

    #[test]
    fn raw_config_matches_selector_layout() {
        let request = CounterEventRequest {
            vendor: Vendor::Amd,
            selection: EventSelection::General(EventSelect(0xABC), UnitMask(0x12)),
            event: DecodedCounterEvent::Raw,
            user: true,
            kernel: false,
            edge: true,
            invert: true,
            cmask: 0x34,
            in_transaction: false,
            checkpointed: false,
        };
        assert_eq!(request.raw_config(), Some(0xA_3484_12BC));
        let both = CounterEventRequest {
            kernel: true,
            ..request
        };
        assert_eq!(
            CounterEventRequest::from_raw_config(Vendor::Amd, 0xA_3484_12BC),
            both
        );
        let cycles = CounterEventRequest::from_raw_config(Vendor::Intel, 0x3C);
        assert_eq!(
            cycles.event,
            DecodedCounterEvent::Architectural(ArchEvent::CoreCycles)
        );
        assert!(!cycles.is_modified());
        assert_eq!(
            CounterEventRequest {
                selection: EventSelection::Fixed(1),
                ..request
            }
            .raw_config(),
            None
        );
    }

    #[test]
    fn unknown_backing_error_lists_valid_names() {
        assert_eq!("exact".parse(), Ok(CounterBackingPolicy::Exact));
        let error = "best".parse::<CounterBackingPolicy>().unwrap_err().to_string();
        assert_eq!(
            error,
            "unknown backing \"best\"; must be auto, hardware, clock, exact, kvm or none"
        );
    }

    #[test]
    fn countable_events_match_backing() {
        assert!(ArchEventSet::CLOCK.contains(ArchEvent::CoreCycles));
        assert!(!ArchEventSet::CLOCK.contains(ArchEvent::Instructions));
        assert!(ArchEventSet::EXACT.contains(ArchEvent::Stores));
        assert!(!ArchEventSet::EXACT.contains(ArchEvent::CacheMisses));
        let all: ArchEventSet = ArchEvent::ALL.into_iter().collect();
        assert!(ArchEvent::ALL.into_iter().all(|event| all.contains(event)));
    }
}
