//! What a counter is asked to count, and what that means.
//!
//! A guest names an event by numbers (event select, unit mask, or a fixed counter). [`GuestEvent`] is the
//! meaning of the numbers; the choice of a backing starts from it.

use std::fmt;
use std::str::FromStr;

use crate::names::{Vendor, printable};

/// Event select: 8 bits on Intel, 12 bits on AMD (EVNTSEL bits 35:32 and 7:0).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventSelect(pub u16);

/// Unit mask: EVNTSEL bits 15:8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitMask(pub u8);

/// Event select of the paravirtual events on an Intel model (no Intel processor uses it).
pub const PARAVIRTUAL_SELECT_INTEL: EventSelect = EventSelect(0xFF);
/// Event select of the paravirtual events on an AMD model (no AMD processor uses it).
pub const PARAVIRTUAL_SELECT_AMD: EventSelect = EventSelect(0xFFF);

/// An event whose meaning does not depend on the processor's generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ArchEvent {
    /// Core cycles while not halted.
    CoreCycles,
    /// Cycles at the frequency of the TSC while not halted.
    RefCycles,
    /// Instructions retired.
    Instructions,
    /// Last level cache references.
    CacheReferences,
    /// Last level cache misses.
    CacheMisses,
    /// Branch instructions retired.
    Branches,
    /// Mispredicted branches retired.
    BranchMisses,
    /// Branches retired that were taken.
    TakenBranches,
    /// Branches retired that go by a condition, taken or not.
    ConditionalBranches,
    /// Instructions retired that load from memory.
    Loads,
    /// Instructions retired that store to memory.
    Stores,
    /// Issue slots for the top-down method.
    TopdownSlots,
    /// Cycles at a constant frequency while not halted, of a clock that each processor chooses: the core
    /// crystal's, the bus's or the TSC's.
    BusCycles,
}

impl ArchEvent {
    /// Every event, for tables and checks.
    pub const ALL: [Self; 13] = [
        Self::CoreCycles,
        Self::RefCycles,
        Self::Instructions,
        Self::CacheReferences,
        Self::CacheMisses,
        Self::Branches,
        Self::BranchMisses,
        Self::TakenBranches,
        Self::ConditionalBranches,
        Self::Loads,
        Self::Stores,
        Self::TopdownSlots,
        Self::BusCycles,
    ];

    /// The name `perf list` users know.
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
            Self::Loads => "loads",
            Self::Stores => "stores",
            Self::TopdownSlots => "slots",
            Self::BusCycles => "bus-cycles",
        }
    }

    /// Whether a PMU of another vendor that has an event of this name counts the same.
    ///
    /// The last level cache of one vendor's events is the second level of the other's, and the clock of the
    /// bus cycles is each processor's own.
    pub const fn means_the_same_everywhere(self) -> bool {
        !matches!(self, Self::CacheReferences | Self::CacheMisses | Self::BusCycles)
    }

    const fn bit(self) -> u16 {
        1 << self as u16
    }
}

/// What the host did to a vCPU, offered to the guest as events of its own.
///
/// The number of each is its unit mask, under event select 0xFF (Intel) or 0xFFF (AMD).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ParavirtualEvent {
    /// Exits from guest mode.
    VmExits = 1,
    /// Exits to user space for port I/O.
    IoExits = 2,
    /// Exits to user space for memory-mapped I/O.
    MmioExits = 3,
    /// Times the vCPU executed HLT and left guest mode.
    Halts = 4,
    /// Page faults of the host on the guest's memory.
    HostPageFaults = 5,
    /// Context switches of the vCPU thread.
    HostContextSwitches = 6,
    /// Moves of the vCPU thread to another host CPU.
    HostMigrations = 7,
    /// Interrupts injected.
    IrqInjections = 8,
    /// NMIs injected.
    NmiInjections = 9,
    /// Exits to user space for RDMSR and WRMSR.
    MsrExits = 10,
    /// Nanoseconds the vCPU was ready to run and waited for a host CPU.
    StealNs = 11,
    /// Nanoseconds in which at least one counter that the guest has enabled was not counted.
    UncountedNs = 12,
}

impl ParavirtualEvent {
    /// Every event, in the order of the unit masks.
    pub const ALL: [Self; 12] = [
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
    ];

    /// The event with this unit mask.
    pub fn from_umask(umask: UnitMask) -> Option<Self> {
        Self::ALL.into_iter().find(|event| event.umask() == umask)
    }

    /// Its unit mask.
    pub const fn umask(self) -> UnitMask {
        UnitMask(self as u8)
    }

    /// What it counts, in one line.
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
        }
    }

    /// Its name in our `perf` event files.
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
        }
    }
}

/// The paravirtual events as an argument of `perf stat -e` in a guest whose model is `vendor`'s.
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

/// The paravirtual events in the format of perf's own event tables (JSON).
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

/// Event select of the paravirtual events on a model of `vendor`.
pub const fn paravirtual_select(vendor: Vendor) -> EventSelect {
    match vendor {
        Vendor::Intel => PARAVIRTUAL_SELECT_INTEL,
        Vendor::Amd => PARAVIRTUAL_SELECT_AMD,
    }
}

/// The meaning of the numbers in a selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GuestEvent {
    /// One of the events every backing knows by name.
    Architectural(ArchEvent),
    /// One of our own.
    Paravirtual(ParavirtualEvent),
    /// Anything else: only a host PMU of the same vendor can count it.
    Raw,
}

impl fmt::Display for GuestEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Architectural(event) => f.write_str(event.name()),
            Self::Paravirtual(event) => f.write_str(event.name()),
            Self::Raw => f.write_str("raw"),
        }
    }
}

/// Which event, as the guest wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Selection {
    /// A general-purpose counter's event select and unit mask.
    General(EventSelect, UnitMask),
    /// The fixed counter of this number, whose event cannot be chosen.
    Fixed(u8),
}

/// Everything a backing must know to count for a counter. Two equal requests count the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventRequest {
    /// Whose numbers `selection` are.
    pub vendor: Vendor,
    /// The numbers.
    pub selection: Selection,
    /// Their meaning.
    pub event: GuestEvent,
    /// Count at CPL 1 to 3.
    pub user: bool,
    /// Count at CPL 0.
    pub kernel: bool,
    /// Count rising edges of the condition instead of the cycles it lasts.
    pub edge: bool,
    /// Invert the comparison with `cmask`.
    pub invert: bool,
    /// Count cycles in which at least this many events happened; 0: count the events.
    pub cmask: u8,
    /// Count inside transactions only (Intel).
    pub in_transaction: bool,
    /// Count what happened in transactions that were aborted not at all (Intel).
    pub checkpointed: bool,
}

impl EventRequest {
    /// The request of a general-purpose counter whose selector is `config`, as `perf_event_attr.config` of a
    /// raw event has it, at every privilege level: the reverse of [`EventRequest::raw_config`].
    #[expect(clippy::cast_possible_truncation, reason = "the fields are that wide")]
    pub fn from_raw_config(vendor: Vendor, config: u64) -> Self {
        let select = match vendor {
            Vendor::Intel => config & 0xFF,
            Vendor::Amd => config & 0xFF | config >> 24 & 0xF00,
        };
        let (select, umask) = (EventSelect(select as u16), UnitMask((config >> 8) as u8));
        Self {
            vendor,
            selection: Selection::General(select, umask),
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

    /// The selector as `perf_event_attr.config` of a raw event has it on a host of the same vendor; `None`
    /// for a fixed counter.
    pub const fn raw_config(&self) -> Option<u64> {
        let Selection::General(select, umask) = self.selection else {
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
                // Bits of AMD's event select, whose requests have neither.
                | (self.in_transaction as u64) << 32
                | (self.checkpointed as u64) << 33,
        )
    }

    /// Whether the request changes *how* its event is counted: an edge, an inversion, a threshold, or by
    /// transactions. Only hardware can do that, cycle by cycle.
    pub const fn is_modified(&self) -> bool {
        self.edge || self.invert || self.cmask > 0 || self.in_transaction || self.checkpointed
    }
}

/// The event selects of [`decode`] that have architectural events, of either vendor.
pub(crate) const ARCHITECTURAL_SELECTS: [u16; 13] = [
    0x29, 0x2E, 0x3C, 0x76, 0xA4, 0xC0, 0xC2, 0xC3, 0xC4, 0xC5, 0xD0, 0xD1, 0x120,
];

/// Meaning of an event select and unit mask.
///
/// Intel: SDM vol. 3 "Pre-defined Architectural Performance Events"; taken branches, loads and stores
/// are BR_INST_RETIRED.NEAR_TAKEN and MEM_INST_RETIRED.ALL_LOADS/ALL_STORES, the same numbers since Haswell.
/// Conditional branches are BR_INST_RETIRED.COND since Ice Lake: both of those that were taken (0x01) and
/// those that were not (0x10). Before Ice Lake 0x01 alone was all of them, so the two together are as well.
/// AMD: PPR "Core Performance Monitor Counters", PMCx076, PMCx0C0, PMCx0C2 to PMCx0C4, PMCx0D1, PMCx029,
/// PMCx120.
pub fn decode(vendor: Vendor, select: EventSelect, umask: UnitMask) -> GuestEvent {
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
                Some(event) if select == paravirtual_select(vendor) => GuestEvent::Paravirtual(event),
                _ => GuestEvent::Raw,
            };
        }
    };
    GuestEvent::Architectural(arch)
}

/// Meaning of Intel's fixed counter `n` (SDM vol. 3, "Association of Fixed-Function Performance Counters with
/// Architectural Performance Events").
pub const fn decode_fixed(n: u32) -> GuestEvent {
    match n {
        0 => GuestEvent::Architectural(ArchEvent::Instructions),
        1 => GuestEvent::Architectural(ArchEvent::CoreCycles),
        2 => GuestEvent::Architectural(ArchEvent::RefCycles),
        3 => GuestEvent::Architectural(ArchEvent::TopdownSlots),
        _ => GuestEvent::Raw,
    }
}

/// Which architectural events the chosen backing can count on this host. The VMM finds it out; the guest's
/// CPUID says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backability(u16);

impl Backability {
    /// Nothing can be counted.
    pub const NONE: Self = Self(0);
    /// Everything can be counted.
    pub const ALL: Self = Self((1 << ArchEvent::ALL.len()) - 1);
    /// What the clock backing counts.
    pub const CLOCK: Self = Self::NONE
        .with(ArchEvent::CoreCycles)
        .with(ArchEvent::RefCycles)
        .with(ArchEvent::BusCycles);
    /// What the exact backing counts. Cycles are its retired instructions.
    pub const EXACT: Self = Self::CLOCK
        .with(ArchEvent::Instructions)
        .with(ArchEvent::Branches)
        .with(ArchEvent::TakenBranches)
        .with(ArchEvent::ConditionalBranches)
        .with(ArchEvent::Loads)
        .with(ArchEvent::Stores);

    /// The same and `event`.
    #[must_use]
    pub const fn with(self, event: ArchEvent) -> Self {
        Self(self.0 | event.bit())
    }

    /// What both have.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Whether `event` can be counted.
    pub const fn has(self, event: ArchEvent) -> bool {
        self.0 & event.bit() != 0
    }
}

impl FromIterator<ArchEvent> for Backability {
    fn from_iter<I: IntoIterator<Item = ArchEvent>>(events: I) -> Self {
        events.into_iter().fold(Self::NONE, Self::with)
    }
}

/// `--backing`: who may count for the guest's counters. The paravirtual events work with every policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BackingPolicy {
    /// The host's PMU where it has one, else the clock.
    #[default]
    Auto,
    /// The host's PMU only.
    Hardware,
    /// The clock only, also where the host has a PMU.
    Clock,
    /// The single-stepper.
    Exact,
    /// KVM's own vPMU: its registers are KVM's, and nothing here counts.
    Kvm,
    /// Nothing: registers only.
    None,
}

impl FromStr for BackingPolicy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Ok(match name {
            "auto" => Self::Auto,
            "hardware" => Self::Hardware,
            "clock" => Self::Clock,
            "exact" => Self::Exact,
            "kvm" => Self::Kvm,
            "none" => Self::None,
            _ => return Err(UnknownPolicy(printable(name))),
        })
    }
}

/// `--backing` names no policy.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("unknown backing \"{0}\": choose auto, hardware, clock, exact, kvm or none")]
pub struct UnknownPolicy(String);

/// Who counts for a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backing {
    /// A hardware event of the host.
    Hardware,
    /// The vCPU's run time scaled to cycles.
    Clock,
    /// The single-stepper, which decodes each instruction.
    Exact,
    /// A software event of the host's kernel.
    Software,
    /// A KVM statistic.
    KvmStat,
    /// KVM's own vPMU.
    Kvm,
    /// Nobody: the counter stays where it is.
    None,
}

impl Backing {
    /// Whether an event of this backing counts on while its counter pauses: to stop and start it costs system
    /// calls, and to let it count nothing.
    #[inline]
    pub const fn counts_through_pauses(self) -> bool {
        matches!(self, Self::Hardware)
    }

    /// The word used in reports.
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

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_events_linux_asks_for_first_are_known_on_both_vendors() {
        let decode = |vendor, select, umask| decode(vendor, EventSelect(select), UnitMask(umask));
        for (intel, amd, event) in [
            ((0x3C, 0), (0x76, 0), ArchEvent::CoreCycles),
            ((0xC0, 0), (0xC0, 0), ArchEvent::Instructions),
            ((0xC4, 0), (0xC2, 0), ArchEvent::Branches),
            ((0xC5, 0), (0xC3, 0), ArchEvent::BranchMisses),
        ] {
            assert_eq!(
                decode(Vendor::Intel, intel.0, intel.1),
                GuestEvent::Architectural(event)
            );
            assert_eq!(
                decode(Vendor::Amd, amd.0, amd.1),
                GuestEvent::Architectural(event)
            );
        }
        assert_eq!(decode(Vendor::Intel, 0x76, 0), GuestEvent::Raw);
        assert_eq!(decode(Vendor::Amd, 0x3C, 0), GuestEvent::Raw);
    }

    #[test]
    fn paravirtual_events_have_one_umask_each_and_the_vendors_own_select() {
        for (n, event) in ParavirtualEvent::ALL.into_iter().enumerate() {
            assert_eq!(event.umask().0 as usize, n + 1);
            let expected = GuestEvent::Paravirtual(event);
            assert_eq!(decode(Vendor::Intel, EventSelect(0xFF), event.umask()), expected);
            assert_eq!(decode(Vendor::Amd, EventSelect(0xFFF), event.umask()), expected);
            assert_eq!(
                decode(Vendor::Amd, EventSelect(0xFF), event.umask()),
                GuestEvent::Raw
            );
        }
        assert_eq!(
            decode(Vendor::Intel, EventSelect(0xFF), UnitMask(0)),
            GuestEvent::Raw
        );
        assert_eq!(
            decode(Vendor::Intel, EventSelect(0xFF), UnitMask(13)),
            GuestEvent::Raw
        );
    }

    #[test]
    fn a_raw_config_has_each_field_where_the_register_has_it() {
        let request = EventRequest {
            vendor: Vendor::Amd,
            selection: Selection::General(EventSelect(0xABC), UnitMask(0x12)),
            event: GuestEvent::Raw,
            user: true,
            kernel: false,
            edge: true,
            invert: true,
            cmask: 0x34,
            in_transaction: false,
            checkpointed: false,
        };
        assert_eq!(request.raw_config(), Some(0xA_3484_12BC));
        let both = EventRequest {
            kernel: true,
            ..request
        };
        assert_eq!(EventRequest::from_raw_config(Vendor::Amd, 0xA_3484_12BC), both);
        let cycles = EventRequest::from_raw_config(Vendor::Intel, 0x3C);
        assert_eq!(cycles.event, GuestEvent::Architectural(ArchEvent::CoreCycles));
        assert!(!cycles.is_modified());
        assert_eq!(
            EventRequest {
                selection: Selection::Fixed(1),
                ..request
            }
            .raw_config(),
            None
        );
    }

    #[test]
    fn an_unknown_backing_is_answered_with_the_known_ones() {
        assert_eq!("exact".parse(), Ok(BackingPolicy::Exact));
        let error = "best".parse::<BackingPolicy>().unwrap_err().to_string();
        assert_eq!(
            error,
            "unknown backing \"best\": choose auto, hardware, clock, exact, kvm or none"
        );
    }

    #[test]
    fn each_backability_names_what_its_backing_counts() {
        assert!(Backability::CLOCK.has(ArchEvent::CoreCycles));
        assert!(!Backability::CLOCK.has(ArchEvent::Instructions));
        assert!(Backability::EXACT.has(ArchEvent::Stores));
        assert!(!Backability::EXACT.has(ArchEvent::CacheMisses));
        let all: Backability = ArchEvent::ALL.into_iter().collect();
        assert!(ArchEvent::ALL.into_iter().all(|event| all.has(event)));
    }
}
