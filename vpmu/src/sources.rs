//! [`CounterBackingSelector`]: the table of backings (sources of counts) for each event. It is used
//! for guest requests, operator events and the availability bits of the guest's CPUID.
//!
//! For each architectural event, `row` returns the event numbers of the host kernel, the clock
//! driver and the exact backing. Only `CounterBackingSelector::candidates` reads this table. Its
//! callers differ: guest requests may have a counter mask or edge detect, operator events ignore
//! the guest's backing policy, and CPUID reports only events that are known to count.

use perf_core::pmu::{clock, sched};
use perf_core::{Attr, EventType};

use crate::dialect::EventDialect;
use crate::events::{
    ArchEvent, ArchEventSet, CounterBacking, CounterBackingPolicy, CounterEventRequest, DecodedCounterEvent,
    EventSelection, ParavirtualEvent,
};
use crate::model_name::Vendor;
use crate::vmm_counts;

/// `PERF_COUNT_SW_*` numbers of the host software events that back paravirtual events.
mod software {
    pub const PAGE_FAULTS: u64 = 2;
    pub const CONTEXT_SWITCHES: u64 = 3;
    pub const CPU_MIGRATIONS: u64 = 4;
}

/// The number by which each driver selects an architectural event; `None` if the driver cannot
/// count the event.
struct EventNumbers {
    /// Number of the host kernel's generic perf event (`PERF_COUNT_HW_*`).
    generic: Option<u64>,
    /// Event number of the clock driver.
    clock: Option<u64>,
    /// Number of the VMM-supplied count that single-stepping updates (exact backing).
    exact: Option<usize>,
}

fn row(event: ArchEvent) -> EventNumbers {
    let (generic, clock) = match event {
        ArchEvent::CoreCycles => (Some(0), Some(clock::CYCLES)),
        ArchEvent::Instructions => (Some(1), None),
        ArchEvent::CacheReferences => (Some(2), None),
        ArchEvent::CacheMisses => (Some(3), None),
        ArchEvent::Branches => (Some(4), None),
        ArchEvent::BranchMisses => (Some(5), None),
        // The SDM does not define the clock of bus cycles and lists the TSC clock as one option.
        ArchEvent::BusCycles => (Some(6), Some(clock::REF_CYCLES)),
        ArchEvent::RefCycles => (Some(9), Some(clock::REF_CYCLES)),
        ArchEvent::TakenBranches
        | ArchEvent::ConditionalBranches
        | ArchEvent::SpeculativeLocks
        | ArchEvent::Loads
        | ArchEvent::Stores
        | ArchEvent::TopdownSlots => (None, None),
    };
    EventNumbers {
        generic,
        clock,
        exact: vmm_counts::exact_selector(event),
    }
}

impl ArchEvent {
    /// Returns the generic perf event number (`PERF_COUNT_HW_*`), which is the same on every host,
    /// or `None` if there is none.
    pub fn generic_number(self) -> Option<u64> {
        row(self).generic
    }
}

/// A driver and an event number with which it can count an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostEventSource {
    /// Backing that the driver implements.
    pub backing: CounterBacking,
    /// PMU type of the driver, as in `perf_event_attr.type`.
    pub ty: EventType,
    /// Event number of the driver, as in `perf_event_attr.config`.
    pub config: u64,
    /// `true` if the driver is known to count the event. Otherwise the event must be opened to find
    /// out, because the host kernel does not report which raw event numbers exist.
    pub is_known: bool,
}

/// Up to two event sources that can count an event, best first.
type EventSourceCandidates = [Option<HostEventSource>; 2];

/// Backings that are available on this host, and the guest's backing policy.
#[derive(Clone, Debug)]
pub struct CounterBackingSelector {
    policy: CounterBackingPolicy,
    /// `true` if only CPL 0 can be single-stepped.
    kernel_only: bool,
    /// Vendor of the host PMU, or `None` if no usable host PMU exists.
    hardware: Option<Vendor>,
    /// Set of the generic events that the host kernel can open.
    opens: ArchEventSet,
    /// Meaning of the raw event numbers of the host's processor, if known.
    dialect: Option<EventDialect>,
    /// KVM statistic number of each paravirtual event, in the order of the unit masks.
    statistics: [Option<u64>; ParavirtualEvent::ALL.len()],
}

impl CounterBackingSelector {
    /// Creates the event sources that `policy` allows on a host with a PMU of vendor `hardware`.
    /// The host PMU is assumed to support all generic events. `statistic` returns the number of the
    /// KVM statistic that the kvm driver uses for a paravirtual event.
    pub fn new(
        policy: CounterBackingPolicy,
        hardware: Option<Vendor>,
        statistic: impl FnMut(ParavirtualEvent) -> Option<u64>,
    ) -> Self {
        Self {
            policy,
            kernel_only: false,
            hardware,
            opens: ArchEventSet::ALL,
            dialect: None,
            statistics: ParavirtualEvent::ALL.map(statistic),
        }
    }

    /// Returns these sources with the generic events limited to `opens`, those that the host kernel
    /// can open.
    #[must_use]
    pub fn opening(self, opens: ArchEventSet) -> Self {
        Self { opens, ..self }
    }

    /// Returns these sources for a host whose processor has the signature `eax` (CPUID.01H:EAX).
    /// The event numbers of this processor may differ from those of the processor that the guest
    /// sees.
    #[must_use]
    pub fn on_signature(self, eax: u32) -> Self {
        let dialect = self
            .hardware
            .map(|vendor| EventDialect::of_signature(vendor, eax));
        Self { dialect, ..self }
    }

    /// Returns the raw number of a request on the host's processor, or `None` if the processor has
    /// no such event.
    fn host_number(&self, request: &CounterEventRequest) -> Option<u64> {
        let mut number = *request;
        if let Some(dialect) = self.dialect
            && let DecodedCounterEvent::Architectural(event) = request.event
            && let EventSelection::General(_, umask) = &mut number.selection
        {
            match (request.vendor, event) {
                (Vendor::Intel, ArchEvent::ConditionalBranches) => *umask = dialect.conditional_branches(),
                (Vendor::Amd, ArchEvent::SpeculativeLocks) if dialect != EventDialect::AmdZen => return None,
                _ => {}
            }
        }
        number.raw_config()
    }

    /// Returns these sources with single-stepping limited to CPL 0. Events that count only at CPL 1
    /// to 3 then have no exact source.
    #[must_use]
    pub fn stepping_kernel_only(self) -> Self {
        Self {
            kernel_only: true,
            ..self
        }
    }

    /// Returns up to two sources that can count an event under `policy`, best first. `vendor` is
    /// the vendor of the PMU model, and `raw` the raw event number on processors of this vendor.
    fn candidates(
        &self,
        policy: CounterBackingPolicy,
        vendor: Vendor,
        event: Option<ArchEvent>,
        raw: Option<u64>,
    ) -> EventSourceCandidates {
        let row = event.map(row);
        let own = self.hardware == Some(vendor);
        // Generic events may have a different meaning on another vendor's processor.
        let generic = event.filter(|event| own || self.hardware.is_some() && event.is_vendor_independent());
        let backing = match policy {
            // With KVM's vPMU, KVM opens the hardware events on the host.
            CounterBackingPolicy::Kvm => CounterBacking::Kvm,
            _ => CounterBacking::Hardware,
        };
        let hardware = match row.as_ref().and_then(|row| row.generic) {
            Some(number) => generic
                .filter(|event| self.opens.contains(*event))
                .map(|_| HostEventSource {
                    backing,
                    ty: EventType::HARDWARE,
                    config: number,
                    is_known: true,
                }),
            None => raw.filter(|_| own).map(|config| HostEventSource {
                backing,
                ty: EventType::RAW,
                config,
                is_known: false,
            }),
        };
        let by_clock = row
            .as_ref()
            .and_then(|row| row.clock)
            .map(|config| HostEventSource {
                backing: CounterBacking::Clock,
                ty: EventType::CLOCK,
                config,
                is_known: true,
            });
        let stepped = row.and_then(|row| row.exact).map(|selector| HostEventSource {
            backing: CounterBacking::Exact,
            ty: EventType::VMM_PMU,
            config: selector as u64,
            is_known: true,
        });
        match policy {
            // Bus cycles have no fallback. The clock backing counts at a different frequency than
            // the host's event, so a counter must not change from one to the other.
            CounterBackingPolicy::Auto if own && event == Some(ArchEvent::BusCycles) => [hardware, None],
            CounterBackingPolicy::Auto => [hardware, by_clock],
            CounterBackingPolicy::Hardware | CounterBackingPolicy::Kvm => [hardware, None],
            CounterBackingPolicy::Clock => [by_clock, None],
            CounterBackingPolicy::Exact => [stepped, None],
            CounterBackingPolicy::None => [None, None],
        }
    }

    /// Returns the source of a paravirtual event for the guest, which is independent of the policy.
    fn paravirtual(&self, event: ParavirtualEvent) -> Option<HostEventSource> {
        let (backing, ty, config) = match event {
            ParavirtualEvent::VmExits
            | ParavirtualEvent::Halts
            | ParavirtualEvent::IrqInjections
            | ParavirtualEvent::NmiInjections => {
                let number = self.statistics[usize::from(event.umask().0) - 1]?;
                (CounterBacking::KvmStat, EventType::KVM, number)
            }
            ParavirtualEvent::HostPageFaults => (
                CounterBacking::Software,
                EventType::SOFTWARE,
                software::PAGE_FAULTS,
            ),
            ParavirtualEvent::HostContextSwitches => (
                CounterBacking::Software,
                EventType::SOFTWARE,
                software::CONTEXT_SWITCHES,
            ),
            ParavirtualEvent::HostMigrations => (
                CounterBacking::Software,
                EventType::SOFTWARE,
                software::CPU_MIGRATIONS,
            ),
            // KVM's io_exits and mmio_exits do not include accesses by emulated code.
            ParavirtualEvent::IoExits
            | ParavirtualEvent::MmioExits
            | ParavirtualEvent::MsrExits
            | ParavirtualEvent::StealNs
            | ParavirtualEvent::UncountedNs
            | ParavirtualEvent::BackingChanges => (
                CounterBacking::Exact,
                EventType::VMM_PMU,
                vmm_counts::paravirtual(event) as u64,
            ),
        };
        Some(HostEventSource {
            backing,
            ty,
            config,
            is_known: true,
        })
    }

    /// Returns the event sources that can count a guest request, best first.
    pub fn of_request(&self, request: &CounterEventRequest) -> impl Iterator<Item = HostEventSource> + use<> {
        let plain = !request.is_modified();
        let candidates = match request.event {
            // Paravirtual events support neither privilege levels nor counter masks.
            DecodedCounterEvent::Paravirtual(event) => [self.paravirtual(event).filter(|_| plain), None],
            // Counter masks, edge detect and transaction filters require a hardware event with raw
            // numbers.
            DecodedCounterEvent::Architectural(event) if plain => self.candidates(
                self.policy,
                request.vendor,
                Some(event),
                self.host_number(request),
            ),
            DecodedCounterEvent::Architectural(_) | DecodedCounterEvent::Raw => {
                self.candidates(self.policy, request.vendor, None, self.host_number(request))
            }
        };
        let steps = request.kernel || !self.kernel_only;
        let steppable = move |source: &HostEventSource| source.ty != EventType::VMM_PMU || steps;
        let paravirtual = matches!(request.event, DecodedCounterEvent::Paravirtual(_));
        candidates
            .into_iter()
            .flatten()
            .filter(move |source| paravirtual || steppable(source))
    }

    /// Returns pinned, initially disabled perf-core events that can count a guest request, best
    /// first, each with its backing.
    pub fn choose(
        &self,
        request: &CounterEventRequest,
    ) -> impl Iterator<Item = (CounterBacking, Attr)> + use<> {
        let has_levels = !matches!(request.event, DecodedCounterEvent::Paravirtual(_));
        let base = Attr {
            pinned: true,
            disabled: true,
            exclude_host: true,
            exclude_user: has_levels && !request.user,
            exclude_kernel: has_levels && !request.kernel,
            ..Attr::default()
        };
        // Excludes sources of KVM's vPMU, which opens its events itself.
        let ours = self
            .of_request(request)
            .filter(|source| source.backing != CounterBacking::Kvm);
        ours.map(move |source| {
            let attr = Attr {
                ty: source.ty,
                config: source.config,
                ..base.clone()
            };
            (source.backing, attr)
        })
    }

    /// Returns the source of an architectural event for a model of `vendor`, if the event is known
    /// to count.
    pub fn known_source(&self, event: ArchEvent, vendor: Vendor) -> Option<HostEventSource> {
        let candidates = self.candidates(self.policy, vendor, Some(event), None);
        candidates.into_iter().flatten().find(|source| source.is_known)
    }

    /// Returns the events that the CPUID of a model of `vendor` may report as available.
    pub fn available_events(&self, vendor: Vendor) -> ArchEventSet {
        let counted = |event: &ArchEvent| self.known_source(*event, vendor).is_some();
        ArchEvent::ALL.into_iter().filter(counted).collect()
    }

    /// Returns the source with which an operator can count a generic perf event, regardless of the
    /// guest's policy. The event has the meaning that it has on processors of the host's vendor.
    pub fn for_operator(&self, event: ArchEvent) -> Option<HostEventSource> {
        let vendor = self.hardware.unwrap_or(Vendor::Intel);
        let candidates = self.candidates(CounterBackingPolicy::Auto, vendor, Some(event), None);
        candidates.into_iter().flatten().next()
    }

    /// Returns the source that counts an instruction or branch event by single-stepping, for an
    /// operator.
    pub fn exact_for_operator(&self, event: ArchEvent) -> Option<HostEventSource> {
        let counts = matches!(event, ArchEvent::Instructions | ArchEvent::Branches);
        let candidates = self.candidates(CounterBackingPolicy::Exact, Vendor::Intel, Some(event), None);
        candidates.into_iter().flatten().find(|_| counts)
    }

    /// Returns the source with which an operator can count a paravirtual event.
    pub fn paravirtual_for_operator(&self, event: ParavirtualEvent) -> Option<HostEventSource> {
        match event {
            // For the guest's counter, the VMM adds steal time in steps. An operator's event reads
            // the host's counter directly.
            ParavirtualEvent::StealNs => Some(HostEventSource {
                backing: CounterBacking::Software,
                ty: EventType::SCHED,
                config: sched::WAIT_NS,
                is_known: true,
            }),
            _ => self.paravirtual(event),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{EventSelect, UnitMask, decode};

    fn request(vendor: Vendor, select: u16, umask: u8) -> CounterEventRequest {
        let (select, umask) = (EventSelect(select), UnitMask(umask));
        CounterEventRequest {
            vendor,
            selection: EventSelection::General(select, umask),
            event: decode(vendor, select, umask),
            user: true,
            kernel: false,
            edge: false,
            invert: false,
            cmask: 0,
            in_transaction: false,
            checkpointed: false,
        }
    }

    fn chosen(
        policy: CounterBackingPolicy,
        hardware: Option<Vendor>,
        request: &CounterEventRequest,
    ) -> Vec<(CounterBacking, u32, u64)> {
        let statistic = |event| (event == ParavirtualEvent::VmExits).then_some(42);
        CounterBackingSelector::new(policy, hardware, statistic)
            .choose(request)
            .map(|(backing, attr)| (backing, attr.ty.0, attr.config))
            .collect()
    }

    /// Returns the sources that the automatic policy chooses for `request` on a host with the PMU
    /// `hardware`: backing, PMU type and event number of each.
    fn auto(
        hardware: impl Into<Option<Vendor>>,
        request: &CounterEventRequest,
    ) -> Vec<(CounterBacking, u32, u64)> {
        chosen(CounterBackingPolicy::Auto, hardware.into(), request)
    }

    const fn hardware(ty: EventType, config: u64) -> (CounterBacking, u32, u64) {
        (CounterBacking::Hardware, ty.0, config)
    }

    /// Tests each architectural event under each policy, on hosts without a PMU and with a PMU of
    /// either vendor that opens all, some or no generic events. CPUID reports an event if and only
    /// if the guest's request for it is known to count, and an operator's event uses the same
    /// source.
    #[test]
    fn guest_operator_and_cpuid_agree_on_sources() {
        let some = ArchEventSet::NONE
            .with(ArchEvent::CoreCycles)
            .with(ArchEvent::Instructions);
        let vendors = [Vendor::Intel, Vendor::Amd];
        use CounterBackingPolicy::{Auto, Clock, Exact, Hardware, Kvm};
        for policy in [Auto, Hardware, Clock, Exact, Kvm, CounterBackingPolicy::None] {
            for hardware in [None, Some(Vendor::Intel), Some(Vendor::Amd)] {
                for opens in [ArchEventSet::ALL, some, ArchEventSet::NONE] {
                    let sources = CounterBackingSelector::new(policy, hardware, |_| None).opening(opens);
                    for vendor in vendors {
                        for event in ArchEvent::ALL {
                            agree(&sources, vendor, event);
                        }
                    }
                }
            }
        }
    }

    fn agree(sources: &CounterBackingSelector, vendor: Vendor, event: ArchEvent) {
        let case = format!("{event:?} of a model of {vendor:?} with {sources:?}");
        let promised = sources.available_events(vendor).contains(event);
        for selection in [
            EventSelection::General(EventSelect(0x12), UnitMask(0x34)),
            EventSelection::Fixed(0),
        ] {
            let asked = CounterEventRequest {
                selection,
                event: DecodedCounterEvent::Architectural(event),
                kernel: true,
                ..request(vendor, 0, 0)
            };
            let candidates: Vec<HostEventSource> = sources.of_request(&asked).collect();
            let counted = candidates.iter().find(|source| source.is_known);
            assert_eq!(promised, counted.is_some(), "{case}");
            assert_eq!(sources.known_source(event, vendor), counted.copied(), "{case}");
            // An event that CPUID does not report can only be tried with its raw number, on a host
            // of the same vendor.
            let tried = |source: &HostEventSource| {
                source.is_known || source.ty == EventType::RAW && sources.hardware == Some(vendor)
            };
            assert!(candidates.iter().all(tried), "{case}");
            let ours = sources
                .choose(&asked)
                .map(|(backing, attr)| (backing, attr.ty, attr.config));
            let kvms = candidates
                .iter()
                .filter(|source| source.backing == CounterBacking::Kvm)
                .count();
            assert_eq!(ours.count() + kvms, candidates.len(), "{case}");
            let own = sources.hardware.is_none_or(|host| host == vendor);
            if sources.policy == CounterBackingPolicy::Auto && own {
                assert_eq!(sources.for_operator(event), counted.copied(), "{case}");
            }
        }
        // An operator's event does not depend on the guest's policy.
        let auto = CounterBackingSelector {
            policy: CounterBackingPolicy::Auto,
            ..sources.clone()
        };
        assert_eq!(sources.for_operator(event), auto.for_operator(event), "{case}");
    }

    /// No two architectural events have the same generic event number.
    #[test]
    fn generic_event_numbers_are_unique() {
        let mut numbers: Vec<u64> = ArchEvent::ALL
            .into_iter()
            .filter_map(ArchEvent::generic_number)
            .collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5, 6, 9]);
    }

    /// If the host kernel cannot open a generic event, no hardware source is offered for it. The
    /// clock counts the event if it can.
    #[test]
    fn unsupported_host_events_fall_back_to_clock() {
        let cycles_only = ArchEventSet::NONE.with(ArchEvent::CoreCycles);
        let sources = CounterBackingSelector::new(CounterBackingPolicy::Auto, Some(Vendor::Amd), |_| None)
            .opening(cycles_only);
        let candidates = |select, umask| -> Vec<CounterBacking> {
            let request = request(Vendor::Amd, select, umask);
            sources.choose(&request).map(|(backing, _)| backing).collect()
        };
        assert_eq!(
            candidates(0x76, 0),
            [CounterBacking::Hardware, CounterBacking::Clock]
        );
        assert_eq!(candidates(0x120, 1), [CounterBacking::Clock]);
        assert_eq!(candidates(0xC0, 0), []);
    }

    /// The exact source of an operator counts only instructions and branches. Other operator events
    /// have better sources, or none.
    #[test]
    fn operators_count_instructions_and_branches_exactly() {
        let sources = CounterBackingSelector::new(CounterBackingPolicy::Exact, Some(Vendor::Amd), |_| None);
        for event in ArchEvent::ALL {
            let source = sources
                .exact_for_operator(event)
                .map(|source| (source.ty, source.config));
            let selector = match event {
                ArchEvent::Instructions | ArchEvent::Branches => vmm_counts::exact_selector(event),
                _ => None,
            };
            let expected = selector.map(|selector| (EventType::VMM_PMU, selector as u64));
            assert_eq!(source, expected, "{event:?}");
        }
    }

    /// An operator's event for steal time reads the host's scheduler statistics. (A guest counter
    /// for steal time is advanced by the VMM instead.)
    #[test]
    fn operator_steal_time_comes_from_host() {
        let sources = CounterBackingSelector::new(CounterBackingPolicy::None, None, |_| Some(7));
        let source = |event| {
            sources
                .paravirtual_for_operator(event)
                .map(|source| (source.ty, source.config))
        };
        assert_eq!(
            source(ParavirtualEvent::StealNs),
            Some((EventType::SCHED, sched::WAIT_NS))
        );
        assert_eq!(source(ParavirtualEvent::VmExits), Some((EventType::KVM, 7)));
    }

    #[test]
    fn auto_prefers_the_hosts_pmu_and_falls_back_to_the_clock() {
        let cycles = request(Vendor::Intel, 0x3C, 0);
        let host = hardware(EventType::HARDWARE, 0);
        let clock = (CounterBacking::Clock, EventType::CLOCK.0, 0);
        assert_eq!(auto(Vendor::Amd, &cycles), [host, clock]);
        assert_eq!(auto(None, &cycles), [clock]);
        assert_eq!(
            chosen(CounterBackingPolicy::Hardware, Some(Vendor::Amd), &cycles),
            [host]
        );
        assert_eq!(
            chosen(CounterBackingPolicy::Clock, Some(Vendor::Amd), &cycles),
            [clock]
        );
        assert_eq!(chosen(CounterBackingPolicy::None, Some(Vendor::Amd), &cycles), []);
    }

    #[test]
    fn raw_events_require_same_vendor() {
        let raw = request(Vendor::Intel, 0xD1, 0x20);
        assert_eq!(auto(Vendor::Intel, &raw), [hardware(EventType::RAW, 0x20D1)]);
        assert_eq!(auto(Vendor::Amd, &raw), []);
        let modified = CounterEventRequest {
            cmask: 16,
            invert: true,
            ..request(Vendor::Intel, 0xC0, 0)
        };
        assert_eq!(
            auto(Vendor::Intel, &modified),
            [hardware(EventType::RAW, 0x1080_00C0)]
        );
        assert_eq!(chosen(CounterBackingPolicy::Exact, None, &modified), []);
    }

    /// On a host of the guest's vendor, the host's event counts bus cycles at a frequency that
    /// differs from the TSC frequency. All other backings count bus cycles at the TSC frequency.
    #[test]
    fn bus_cycles_never_mix_clocks() {
        let bus = request(Vendor::Intel, 0x3C, 1);
        let clock = (CounterBacking::Clock, EventType::CLOCK.0, clock::REF_CYCLES);
        assert_eq!(auto(Vendor::Intel, &bus), [hardware(EventType::HARDWARE, 6)]);
        assert_eq!(auto(Vendor::Amd, &bus), [clock]);
        assert_eq!(auto(None, &bus), [clock]);
        assert_eq!(
            chosen(CounterBackingPolicy::Clock, Some(Vendor::Intel), &bus),
            [clock]
        );
        assert_eq!(
            chosen(CounterBackingPolicy::Hardware, Some(Vendor::Amd), &bus),
            []
        );
    }

    /// Cache events of an Intel guest are not counted on an AMD host, because Linux's generic cache
    /// events refer to the second-level cache there.
    #[test]
    fn cache_events_require_same_vendor() {
        for umask in [0x4F, 0x41] {
            let cache = request(Vendor::Intel, 0x2E, umask);
            assert_eq!(auto(Vendor::Amd, &cache), []);
            assert_eq!(auto(Vendor::Intel, &cache).len(), 1);
        }
        let misses = request(Vendor::Intel, 0xC5, 0);
        assert_eq!(auto(Vendor::Amd, &misses), [hardware(EventType::HARDWARE, 5)]);
    }

    /// Conditional branches of a guest are counted with the event number of the host's processor,
    /// even if the guest's CPUID signature is that of another generation.
    #[test]
    fn conditional_branches_use_the_hosts_number() {
        let conditional = |umask| CounterEventRequest {
            event: DecodedCounterEvent::Architectural(ArchEvent::ConditionalBranches),
            ..request(Vendor::Intel, 0xC4, umask)
        };
        let (skylake, ice_lake, silvermont) = (0x0005_0657, 0x0006_06A6, 0x0003_0678);
        for (host, number) in [(skylake, 0x01C4), (ice_lake, 0x11C4), (silvermont, 0x7EC4)] {
            let sources =
                CounterBackingSelector::new(CounterBackingPolicy::Auto, Some(Vendor::Intel), |_| None)
                    .on_signature(host);
            for umask in [0x01, 0x11, 0x7E] {
                let found: Vec<u64> = sources
                    .choose(&conditional(umask))
                    .map(|(_, attr)| attr.config)
                    .collect();
                assert_eq!(found, [number], "{host:#x}, {umask:#x}");
            }
            // Events other than conditional branches keep their numbers.
            let raw = request(Vendor::Intel, 0xC4, 0x40);
            let mut found = sources.choose(&raw).map(|(_, attr)| attr.config);
            assert_eq!(found.next(), Some(0x40C4));
        }
    }

    /// A Zen host counts the event with which rr checks the speculative lock map. The exact backing
    /// accepts the event with a count of 0. Other hosts have no source for it.
    #[test]
    fn speculative_locks_require_zen_or_exact_backing() {
        let locks = CounterEventRequest {
            event: DecodedCounterEvent::Architectural(ArchEvent::SpeculativeLocks),
            ..request(Vendor::Amd, 0x25, 0x08)
        };
        let (zen2, piledriver) = (0x0083_0F10, 0x0060_0F20);
        let found = |policy, hardware, host| -> Vec<(EventType, u64)> {
            let sources = CounterBackingSelector::new(policy, hardware, |_| None).on_signature(host);
            let chosen = sources.choose(&locks);
            chosen.map(|(_, attr)| (attr.ty, attr.config)).collect()
        };
        let auto = CounterBackingPolicy::Auto;
        assert_eq!(found(auto, Some(Vendor::Amd), zen2), [(EventType::RAW, 0x0825)]);
        assert_eq!(found(auto, Some(Vendor::Amd), piledriver), []);
        assert_eq!(found(auto, Some(Vendor::Intel), 0x0006_06A6), []);
        assert_eq!(found(CounterBackingPolicy::Clock, None, zen2), []);
        let vmm_counts = vmm_counts::exact_selector(ArchEvent::SpeculativeLocks).unwrap() as u64;
        assert_eq!(
            found(CounterBackingPolicy::Exact, None, zen2),
            [(EventType::VMM_PMU, vmm_counts)]
        );
    }

    #[test]
    fn transaction_filters_require_raw_events() {
        let in_transaction = CounterEventRequest {
            in_transaction: true,
            checkpointed: true,
            ..request(Vendor::Intel, 0x3C, 0)
        };
        assert_eq!(
            auto(Vendor::Intel, &in_transaction),
            [hardware(EventType::RAW, 0x3_0000_003C)]
        );
        assert_eq!(auto(None, &in_transaction), []);
    }

    #[test]
    fn guest_events_exclude_host_and_keep_levels() {
        for policy in [
            CounterBackingPolicy::Auto,
            CounterBackingPolicy::Clock,
            CounterBackingPolicy::Exact,
        ] {
            let sources = CounterBackingSelector::new(policy, Some(Vendor::Intel), |_| None);
            for (_, attr) in sources.choose(&request(Vendor::Intel, 0x3C, 0)) {
                assert!(attr.exclude_host && attr.pinned && attr.disabled);
                assert!(attr.exclude_kernel && !attr.exclude_user);
            }
        }
    }

    #[test]
    fn paravirtual_events_need_no_pmu_and_no_counter_mask() {
        let exits = request(Vendor::Amd, 0xFFF, 1);
        assert_eq!(
            chosen(CounterBackingPolicy::None, None, &exits),
            [(CounterBacking::KvmStat, EventType::KVM.0, 42)]
        );
        let masked = CounterEventRequest { cmask: 1, ..exits };
        assert_eq!(auto(Vendor::Amd, &masked), []);
        // This host's KVM lacks the statistic.
        assert_eq!(auto(None, &request(Vendor::Amd, 0xFFF, 4)), []);
    }
}
