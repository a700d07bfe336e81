//! Fits the guest's counters to those of the host.
//!
//! A guest may use all its counters simultaneously, and a general-purpose counter for any event. A
//! model with a default number of counters is reduced until the host has a counter for each guest
//! counter. If the user chose the number, competing counters are reported in one line.

use perf_core::pmu::host::{HostCounters, HostPerfCapabilities};
use vpmu::{ArchEvent, CounterBackingPolicy, PmuModel};

use crate::kvm::vpmu_probe::KvmPmuCapabilities;

/// Generic events that Intel's fixed counters count, by counter number.
const FIXED: [ArchEvent; 3] = [
    ArchEvent::Instructions,
    ArchEvent::CoreCycles,
    ArchEvent::RefCycles,
];

/// Result of fitting a PMU model to the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FittedPmuModel {
    /// PMU model for the guest.
    pub model: PmuModel,
    /// Description, in one line, of the guest counters that compete for host counters. `None` if
    /// the host has a counter for each guest counter.
    pub competition: Option<String>,
}

/// Adapts the number of counters of `model` to the host, unless `asked` states that the user chose
/// the number. `own` describes KVM's own vPMU if the guest uses it ([`CounterBackingPolicy::Kvm`]).
pub fn fit(
    model: PmuModel,
    asked: bool,
    policy: CounterBackingPolicy,
    own: Option<&KvmPmuCapabilities>,
    probe: &HostPerfCapabilities,
) -> FittedPmuModel {
    let by_host_events = match policy {
        CounterBackingPolicy::Auto | CounterBackingPolicy::Hardware => true,
        // An emulated KVM vPMU opens the same pinned events as Perfvisor; a mediated one owns the
        // hardware counters.
        CounterBackingPolicy::Kvm => own.is_some_and(|own| !own.mediated),
        CounterBackingPolicy::Clock | CounterBackingPolicy::Exact | CounterBackingPolicy::None => false,
    };
    if model.is_off() || !by_host_events || !probe.hardware_pmu {
        return FittedPmuModel {
            model,
            competition: None,
        };
    }
    let holds = |model: &PmuModel| {
        probe
            .counters
            .can_schedule(model.general() as usize, &fixed_events(model, probe))
    };
    let lowered = model.lowered(holds);
    let given = if asked { model } else { lowered };
    let competition = (!holds(&given)).then(|| competition(&given, &lowered, holds(&lowered), probe));
    FittedPmuModel {
        model: given,
        competition,
    }
}

/// Returns the generic events for which the fixed counters of `model` use the host's PMU. Events
/// that the host cannot count are omitted.
fn fixed_events(model: &PmuModel, probe: &HostPerfCapabilities) -> Vec<u64> {
    let counted = |config: u64| probe.generic.iter().any(|e| e.config == config && e.opens);
    FIXED
        .iter()
        .enumerate()
        .filter(|(n, _)| model.fixed_bitmap() & (1 << n) != 0)
        .filter_map(|(_, event)| event.generic_number().filter(|&config| counted(config)))
        .collect()
}

fn competition(model: &PmuModel, lowered: &PmuModel, enough: bool, probe: &HostPerfCapabilities) -> String {
    let counters = &probe.counters;
    // A fixed counter competes if the host has no free fixed counter for its event.
    let fixed: Vec<&str> = fixed_events(model, probe)
        .into_iter()
        .filter(|&config| !counters.fixed.iter().any(|f| f.config == config && f.free))
        .filter_map(|config| FIXED.iter().find(|event| event.generic_number() == Some(config)))
        .map(|event| event.name())
        .collect();
    let also = match fixed.as_slice() {
        [] => String::new(),
        names => format!(" and the fixed ones for {}", names.join(", ")),
    };
    let remedy = if enough {
        let fixed = match lowered.fixed() {
            0 => String::new(),
            n => format!("+{n}"),
        };
        format!("--pmu-counters {}{fixed} has one for each", lowered.general())
    } else {
        "this model has no fewer".to_owned()
    };
    format!(
        "the guest's {} general counters{also} compete for the {} general ones that this host has free: what is enabled when \
         all are taken is not counted until one is free; {remedy}",
        model.general(),
        counters.general,
    )
}

/// Describes the number of host counters that a vCPU can use.
pub fn slots(counters: &HostCounters) -> String {
    let fixed = counters.free() - counters.general;
    format!("{} general and {fixed} fixed counters per vCPU", counters.general)
}

/// Describes the fixed counters of the host, and which of them other events have taken.
pub fn fixed(counters: &HostCounters) -> String {
    if counters.fixed.is_empty() {
        return "none".to_owned();
    }
    let names: Vec<String> = counters
        .fixed
        .iter()
        .map(|f| match f.free {
            true => f.event.clone(),
            false => format!("{} (taken)", f.event),
        })
        .collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use perf_core::pmu::host::{FixedCounter, GenericEvent};
    use vpmu::{ArchEventSet, HostPmuProperties, PmuGeneration, RequestedCounters};

    /// Returns a host with `general` free general-purpose counters and the fixed counters `fixed`,
    /// each with its event and whether it is free.
    fn host(general: usize, fixed: &[(&str, bool)]) -> HostPerfCapabilities {
        let number = |event: &ArchEvent| event.generic_number().unwrap();
        let config = |name: &str| number(FIXED.iter().find(|f| f.name() == name).unwrap());
        let fixed = fixed.iter().map(|&(event, free)| FixedCounter {
            event: event.to_owned(),
            config: config(event),
            free,
            general_too: event != "ref-cycles",
        });
        let generic = FIXED.iter().map(|event| GenericEvent {
            name: event.name().to_owned(),
            config: number(event),
            opens: true,
        });
        HostPerfCapabilities {
            hardware_pmu: true,
            counters: HostCounters {
                general,
                general_there: general,
                fixed: fixed.collect(),
            },
            no_slots_because: None,
            hybrid: false,
            paranoid: Some(1),
            nmi_watchdog: false,
            mediated: false,
            user_read: true,
            software_clock: true,
            pmus: vec!["cpu".to_owned()],
            generic: generic.collect(),
        }
    }

    const INTEL: [(&str, bool); 3] = [("instructions", true), ("cycles", true), ("ref-cycles", true)];
    const WATCHED: [(&str, bool); 3] = [("instructions", true), ("cycles", false), ("ref-cycles", true)];

    fn model(name: PmuGeneration, numbers: Option<&str>) -> PmuModel {
        let numbers = numbers.map(|text| text.parse::<RequestedCounters>().unwrap());
        PmuModel::new(name, numbers, None).unwrap()
    }

    fn default_on(generation: PmuGeneration, host: &HostPerfCapabilities) -> (u32, u32) {
        let fitted = fit(
            model(generation, None),
            false,
            CounterBackingPolicy::Auto,
            None,
            host,
        );
        assert_eq!(fitted.competition, None);
        (fitted.model.general(), fitted.model.fixed())
    }

    /// The default model has no more counters than the host can back at the same time.
    #[test]
    fn default_model_fits_host_counters() {
        assert_eq!(default_on(PmuGeneration::Intel(2), &host(4, &INTEL)), (4, 3));
        assert_eq!(default_on(PmuGeneration::Intel(2), &host(4, &WATCHED)), (3, 3));
        assert_eq!(default_on(PmuGeneration::Intel(2), &host(6, &[])), (3, 3));
        assert_eq!(default_on(PmuGeneration::Intel(2), &host(5, &[])), (2, 3));
        assert_eq!(default_on(PmuGeneration::AmdCore, &host(6, &[])), (6, 0));
        assert_eq!(default_on(PmuGeneration::AmdCore, &host(5, &[])), (4, 0));
        assert_eq!(default_on(PmuGeneration::AmdV2, &host(5, &[])), (5, 0));
        assert_eq!(default_on(PmuGeneration::AmdCore, &host(4, &INTEL)), (4, 0));
    }

    #[test]
    fn counter_competition_reports_remedy() {
        let asked = model(PmuGeneration::AmdV2, Some("15"));
        let fitted = fit(asked, true, CounterBackingPolicy::Auto, None, &host(6, &[]));
        assert_eq!(fitted.model, asked, "the user's choice stays");
        let line = fitted.competition.unwrap();
        for part in [
            "15 general counters compete",
            "the 6 general ones",
            "--pmu-counters 6 ",
        ] {
            assert!(line.contains(part) && !line.contains('\n'), "{part}: {line}");
        }
        let asked = model(PmuGeneration::Intel(4), Some("4+3"));
        let line = fit(
            asked,
            true,
            CounterBackingPolicy::Hardware,
            None,
            &host(4, &WATCHED),
        )
        .competition
        .unwrap();
        assert!(line.contains("and the fixed ones for cycles compete"), "{line}");
        assert!(line.contains("--pmu-counters 3+3 "), "{line}");
        let asked = model(PmuGeneration::Intel(4), Some("4+3"));
        assert_eq!(
            fit(asked, true, CounterBackingPolicy::Auto, None, &host(4, &INTEL)).competition,
            None
        );
    }

    /// Even a default model may have too many counters for the host, which is reported: AMD models
    /// have at least four.
    #[test]
    fn minimal_model_reports_competition() {
        let fitted = fit(
            model(PmuGeneration::AmdCore, None),
            false,
            CounterBackingPolicy::Auto,
            None,
            &host(3, &[]),
        );
        assert_eq!(fitted.model.general(), 4);
        let line = fitted.competition.unwrap();
        assert!(line.contains("this model has no fewer"), "{line}");
    }

    /// Backings that do not use the host's PMU do not limit the number of counters.
    #[test]
    fn software_backings_do_not_limit_counters() {
        let asked = model(PmuGeneration::AmdV2, Some("15"));
        for policy in [
            CounterBackingPolicy::Clock,
            CounterBackingPolicy::Exact,
            CounterBackingPolicy::None,
        ] {
            assert_eq!(fit(asked, true, policy, None, &host(6, &[])).competition, None);
        }
        let without = HostPerfCapabilities {
            hardware_pmu: false,
            ..host(0, &[])
        };
        let fitted = fit(asked, true, CounterBackingPolicy::Auto, None, &without);
        assert_eq!((fitted.model, fitted.competition), (asked, None));
    }

    /// KVM's emulated vPMU competes with other events for host counters, as Perfvisor's emulated
    /// PMU does. A mediated vPMU does not compete.
    #[test]
    fn emulated_kvm_vpmu_competes_for_counters() {
        let own = |mediated| KvmPmuCapabilities {
            mediated,
            masked_filter: true,
            filter: true,
            pmu: HostPmuProperties {
                generation: PmuGeneration::AmdCore,
                general: 6,
                fixed_bitmap: 0,
                width: 48,
            },
            events: ArchEventSet::NONE,
        };
        let watched = host(5, &[]);
        let on = |asked, numbers, own: &KvmPmuCapabilities| {
            let model = model(PmuGeneration::AmdCore, numbers);
            fit(model, asked, CounterBackingPolicy::Kvm, Some(own), &watched)
        };
        let default = on(false, None, &own(false));
        assert_eq!((default.model.general(), default.competition), (4, None));
        let line = on(true, Some("6"), &own(false)).competition.unwrap();
        assert!(line.contains("6 general counters compete for the 5"), "{line}");
        let mediated = on(false, None, &own(true));
        assert_eq!((mediated.model.general(), mediated.competition), (6, None));
    }
}
