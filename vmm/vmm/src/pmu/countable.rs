//! Determines which of perf's generic events a guest can count, given the event numbers that the
//! guest's kernel uses for them.

use perf_core::pmu::host::{self, HostPerfCapabilities};
use std::sync::Arc;

use vpmu::{
    ArchEvent, ArchEventSet, CounterBackingPolicy, CounterBackingSelector, CounterEventRequest, EventFilter,
    EventSelection, PmuModel, Vendor,
};

use super::backing;
use guest_patching::event_tables::KernelTableEvent;
use guest_patching::uncounted::KernelEventSupport;

/// Common generic events of `perf stat`. A message names those that the guest cannot count.
const PERF_STAT_EVENTS: [ArchEvent; 7] = [
    ArchEvent::CoreCycles,
    ArchEvent::RefCycles,
    ArchEvent::Instructions,
    ArchEvent::CacheReferences,
    ArchEvent::CacheMisses,
    ArchEvent::Branches,
    ArchEvent::BranchMisses,
];

/// Number of perf's generic event for reference cycles (`PERF_COUNT_HW_REF_CPU_CYCLES`).
const REF_CPU_CYCLES: u64 = 9;
/// Fixed counter 2, `CPU_CLK_UNHALTED.REF_TSC` (SDM vol. 3B 20.2.2), as a bit in a bitmap of fixed
/// counters.
const REFERENCE_COUNTER: u8 = 1 << REFERENCE;
/// Number of the fixed counter that counts reference cycles.
const REFERENCE: u8 = 2;

/// Events that a guest can count with one PMU model and one backing policy on this host. Determines
/// which events remain in the event tables of the guest's kernel.
#[derive(Debug)]
pub struct CountableKernelEvents {
    vendor: Vendor,
    /// `true` if the model is from Intel and has the fixed counter for reference cycles.
    reference_counter: bool,
    sources: CounterBackingSelector,
    backability: ArchEventSet,
    filter: Arc<EventFilter>,
    probe: HostPerfCapabilities,
}

impl CountableKernelEvents {
    /// Creates the set for a guest with `model` under `policy`. `host` is the vendor of the host's
    /// processor.
    pub fn new(
        model: &PmuModel,
        host: Vendor,
        policy: CounterBackingPolicy,
        backability: ArchEventSet,
        probe: HostPerfCapabilities,
    ) -> Self {
        let vendor = model.vendor();
        Self {
            vendor,
            reference_counter: model.fixed_bitmap() & REFERENCE_COUNTER != 0,
            // KVM statistics are not needed, because they do not back generic events.
            sources: backing::sources(policy, &probe, host, |_| None),
            backability,
            filter: Arc::new(EventFilter::allow_all()),
            probe,
        }
    }

    /// Removes the events that `filter` denies.
    #[must_use]
    pub fn with_filter(self, filter: Arc<EventFilter>) -> Self {
        Self { filter, ..self }
    }

    /// Returns whether the host's kernel has the event in its tables of generic events and can open
    /// it. A host that is itself a guest also accepts raw event numbers that its virtual PMU does
    /// not count.
    fn host_supports(&self, event: KernelTableEvent) -> bool {
        match event {
            KernelTableEvent::Hardware(config) => {
                let mut generic = self.probe.generic.iter();
                generic.any(|g| g.config == config && g.opens)
            }
            KernelTableEvent::Cache(config) => host::cache_event_opens(config),
        }
    }
}

impl KernelEventSupport for CountableKernelEvents {
    fn can_count(&self, event: KernelTableEvent, config: u64) -> bool {
        // CPUID reports unavailable events to an Intel guest, except for reference cycles. Linux
        // uses a pseudo event number for them that only the fixed counter supports
        // (intel_pmu_event_map).
        if let (Vendor::Intel, KernelTableEvent::Hardware(number)) = (self.vendor, event) {
            let has_reference =
                self.reference_counter && self.filter.allows(EventSelection::Fixed(REFERENCE));
            return number != REF_CPU_CYCLES || has_reference;
        }
        let request = CounterEventRequest::from_raw_config(self.vendor, config);
        if !self.filter.allows(request.selection) {
            return false;
        }
        let mut ways = self.sources.of_request(&request);
        ways.any(|way| way.is_known || self.host_supports(event))
    }

    /// Returns whether top-down events can be counted, which requires a host PMU of the same
    /// vendor.
    fn can_count_topdown(&self) -> bool {
        // UOPS_ISSUED.ANY, which the kernel lists as topdown-slots-issued.
        let issued = CounterEventRequest::from_raw_config(self.vendor, 0x010E);
        self.filter.allows(issued.selection) && self.sources.of_request(&issued).next().is_some()
    }

    /// Returns the names of the common events of `perf stat` that the guest cannot count. For an
    /// AMD model, reference cycles are not included, because processors before Zen 4 have no such
    /// event.
    fn missing_events(&self) -> Vec<&'static str> {
        let asked = PERF_STAT_EVENTS.into_iter();
        let asked = asked.filter(|event| self.vendor == Vendor::Intel || *event != ArchEvent::RefCycles);
        asked
            .filter(|event| !self.backability.contains(*event))
            .map(ArchEvent::name)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perf_core::pmu::host::{GenericEvent, HostCounters};
    use vpmu::{PmuGeneration, RequestedCounters};

    /// Returns a host whose PMU can open the generic events `opens`. If `opens` is empty, the host
    /// has no PMU.
    fn probe(opens: &[(&str, u64)]) -> HostPerfCapabilities {
        HostPerfCapabilities {
            hardware_pmu: !opens.is_empty(),
            counters: HostCounters {
                general: opens.len(),
                ..HostCounters::default()
            },
            generic: opens
                .iter()
                .map(|&(name, config)| GenericEvent {
                    name: name.into(),
                    config,
                    opens: true,
                })
                .collect(),
            ..HostPerfCapabilities::run()
        }
    }

    fn amd() -> PmuModel {
        PmuModel::off(Vendor::Amd)
    }

    fn check(
        policy: CounterBackingPolicy,
        probe: &HostPerfCapabilities,
        event: KernelTableEvent,
        config: u64,
    ) -> bool {
        let backability = crate::pmu::backing::countable_events(policy, probe, Vendor::Amd, Vendor::Amd);
        CountableKernelEvents::new(&amd(), Vendor::Amd, policy, backability, probe.clone())
            .can_count(event, config)
    }

    const CYCLES: (KernelTableEvent, u64) = (KernelTableEvent::Hardware(0), 0x76);
    const INSTRUCTIONS: (KernelTableEvent, u64) = (KernelTableEvent::Hardware(1), 0xC0);
    const STALLED: (KernelTableEvent, u64) = (KernelTableEvent::Hardware(7), 0x287);
    const BRANCH_LOADS: (KernelTableEvent, u64) = (KernelTableEvent::Cache(5), 0xC2);
    const L1_LOADS: (KernelTableEvent, u64) = (KernelTableEvent::Cache(0), 0x40);

    #[test]
    fn backings_count_documented_events() {
        let none = probe(&[]);
        for (policy, counted) in [
            (CounterBackingPolicy::Auto, [true, false, false, false, false]),
            (CounterBackingPolicy::Clock, [true, false, false, false, false]),
            (CounterBackingPolicy::Exact, [true, true, false, true, false]),
            (CounterBackingPolicy::None, [false; 5]),
        ] {
            let found = [CYCLES, INSTRUCTIONS, STALLED, BRANCH_LOADS, L1_LOADS]
                .map(|(event, config)| check(policy, &none, event, config));
            assert_eq!(found, counted, "{policy:?}");
        }
    }

    /// With a host PMU, an event is countable only if it is among the events that the host's kernel
    /// supports. Acceptance of its raw number is not sufficient.
    #[test]
    fn hardware_event_requires_host_support() {
        let some = probe(&[("cycles", 0), ("instructions", 1), ("stalled-cycles-frontend", 7)]);
        for (event, expected) in [
            (CYCLES, true),
            (INSTRUCTIONS, true),
            (STALLED, true),
            (BRANCH_LOADS, false),
            ((KernelTableEvent::Hardware(8), 0x187), false),
        ] {
            assert_eq!(
                check(CounterBackingPolicy::Auto, &some, event.0, event.1),
                expected,
                "{event:?}"
            );
        }
        let foreign = CountableKernelEvents::new(
            &PmuModel::off(Vendor::Intel),
            Vendor::Amd,
            CounterBackingPolicy::Auto,
            ArchEventSet::CLOCK,
            some,
        );
        assert!(!foreign.can_count(KernelTableEvent::Cache(0), 0x81D0));
    }

    /// Top-down events can be counted only with a host PMU of the model's vendor, because they have
    /// no architectural number.
    #[test]
    fn topdown_events_require_host_pmu_of_same_vendor() {
        let some = probe(&[("cycles", 0), ("instructions", 1)]);
        let intel = PmuModel::off(Vendor::Intel);
        for (policy, host, probe, counted) in [
            (CounterBackingPolicy::Auto, Vendor::Intel, &some, true),
            (CounterBackingPolicy::Hardware, Vendor::Intel, &some, true),
            (CounterBackingPolicy::Auto, Vendor::Amd, &some, false),
            (CounterBackingPolicy::Clock, Vendor::Intel, &some, false),
            (CounterBackingPolicy::Exact, Vendor::Intel, &some, false),
            (
                CounterBackingPolicy::Auto,
                Vendor::Intel,
                &self::probe(&[]),
                false,
            ),
        ] {
            let countable =
                CountableKernelEvents::new(&intel, host, policy, ArchEventSet::NONE, probe.clone());
            assert_eq!(countable.can_count_topdown(), counted, "{policy:?} {host:?}");
        }
    }

    /// An event that the filter denies counts as uncountable, so it is hidden in the event tables
    /// of the guest's kernel. AMD's CPUID cannot hide individual events.
    #[test]
    fn filtered_event_is_not_countable() {
        let some = probe(&[("cycles", 0), ("instructions", 1), ("cache-misses", 3)]);
        let cache_misses = (KernelTableEvent::Hardware(3), 0x964);
        let policy = CounterBackingPolicy::Auto;
        let countable = |filter| {
            let all =
                CountableKernelEvents::new(&amd(), Vendor::Amd, policy, ArchEventSet::ALL, some.clone());
            all.with_filter(Arc::new(filter))
        };
        let open = countable(EventFilter::allow_all());
        let tenant = countable(EventFilter::architectural(Vendor::Amd));
        for ((event, config), denied) in [(CYCLES, false), (INSTRUCTIONS, false), (cache_misses, true)] {
            assert!(open.can_count(event, config), "{config:#x}");
            assert_eq!(tenant.can_count(event, config), !denied, "{config:#x}");
        }
    }

    /// A PMU model without fixed counter 2 cannot count the event number that Linux uses for
    /// reference cycles.
    #[test]
    fn reference_cycles_require_fixed_counter() {
        let none = probe(&[]);
        for (generation, fixed, counted) in [
            (PmuGeneration::Intel(1), None, false),
            (PmuGeneration::Intel(2), Some(2), false),
            (PmuGeneration::Intel(2), Some(3), true),
        ] {
            let numbers = fixed.map(|fixed| RequestedCounters {
                general: 4,
                fixed: Some(fixed),
            });
            let model = PmuModel::new(generation, numbers, None).unwrap();
            let policy = CounterBackingPolicy::Clock;
            let backability =
                crate::pmu::backing::countable_events(policy, &none, Vendor::Intel, Vendor::Intel);
            let countable =
                CountableKernelEvents::new(&model, Vendor::Intel, policy, backability, none.clone());
            let of = |number, config| countable.can_count(KernelTableEvent::Hardware(number), config);
            assert_eq!(of(REF_CPU_CYCLES, 0x300), counted, "{generation:?} {fixed:?}");
            assert!(of(1, 0xC0), "CPUID says that there are no instructions");
        }
    }

    /// Condition under which an event remains in the event table of the guest's kernel.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Requirement {
        /// No condition: the VMM can count the event with any backing, if necessary with a clock.
        Clock,
        /// The exact backing, which single-steps every instruction.
        Steps,
        /// The host's kernel must support the event.
        Host,
        /// No condition: CPUID tells the guest whether it can count the event, so the event always
        /// remains in the table.
        Cpuid,
        /// The PMU model must have fixed counter 2, which counts reference cycles.
        Reference,
    }

    /// An event remains in the guest kernel's table if and only if it can be counted. Tested for
    /// each model and backing, on a host without a PMU and on a host that counts cycles and
    /// instructions.
    #[test]
    fn model_tables_keep_countable_events() {
        use Requirement::{Clock, Cpuid, Host, Reference, Steps};
        let amd = [
            (CYCLES, Clock),
            (INSTRUCTIONS, Steps),
            ((KernelTableEvent::Hardware(4), 0xC2), Steps),
            ((KernelTableEvent::Hardware(5), 0xC3), Host),
            (STALLED, Host),
            (BRANCH_LOADS, Steps),
            (L1_LOADS, Host),
        ];
        let intel = [
            ((KernelTableEvent::Hardware(0), 0x3C), Cpuid),
            ((KernelTableEvent::Hardware(1), 0xC0), Cpuid),
            ((KernelTableEvent::Hardware(9), 0x300), Reference),
            ((KernelTableEvent::Cache(0), 0x81D0), Steps),
            ((KernelTableEvent::Cache(1 << 16), 0x151), Host),
            ((KernelTableEvent::Cache(5), 0xC4), Steps),
        ];
        let models: [(PmuGeneration, &[_]); 8] = [
            (PmuGeneration::Intel(1), &intel),
            (PmuGeneration::Intel(2), &intel),
            (PmuGeneration::Intel(3), &intel),
            (PmuGeneration::Intel(4), &intel),
            (PmuGeneration::Intel(5), &intel),
            (PmuGeneration::AmdK7, &amd),
            (PmuGeneration::AmdCore, &amd),
            (PmuGeneration::AmdV2, &amd),
        ];
        let policies = [
            CounterBackingPolicy::Auto,
            CounterBackingPolicy::Clock,
            CounterBackingPolicy::Exact,
            CounterBackingPolicy::Hardware,
            CounterBackingPolicy::None,
        ];
        let hosts = [probe(&[]), probe(&[("cycles", 0), ("instructions", 1)])];
        for (generation, events) in models {
            let model = PmuModel::new(generation, None, None).unwrap();
            let vendor = model.vendor();
            for (host, policy) in hosts
                .iter()
                .flat_map(|host| policies.map(|policy| (host, policy)))
            {
                let backability = crate::pmu::backing::countable_events(policy, host, vendor, vendor);
                let countable = CountableKernelEvents::new(&model, vendor, policy, backability, host.clone());
                let uses_host = host.hardware_pmu
                    && matches!(
                        policy,
                        CounterBackingPolicy::Auto | CounterBackingPolicy::Hardware
                    );
                for ((event, config), by) in events.iter().copied() {
                    let known = matches!(event, KernelTableEvent::Hardware(0 | 1));
                    let expected = match by {
                        Cpuid => true,
                        Reference => model.fixed_bitmap() & REFERENCE_COUNTER != 0,
                        _ if policy == CounterBackingPolicy::None => false,
                        _ if uses_host && known => true,
                        Clock => policy != CounterBackingPolicy::Hardware,
                        Steps => policy == CounterBackingPolicy::Exact,
                        Host => false,
                    };
                    let found = countable.can_count(event, config);
                    assert_eq!(
                        found, expected,
                        "{generation:?} {policy:?} {event} {config:#x}, hardware: {}",
                        host.hardware_pmu
                    );
                }
            }
        }
    }

    #[test]
    fn missing_events_use_perf_names() {
        let none = probe(&[]);
        let clock = CountableKernelEvents::new(
            &amd(),
            Vendor::Amd,
            CounterBackingPolicy::Clock,
            ArchEventSet::CLOCK,
            none,
        );
        assert_eq!(
            clock.missing_events(),
            [
                "instructions",
                "cache-references",
                "cache-misses",
                "branches",
                "branch-misses"
            ]
        );
    }
}
