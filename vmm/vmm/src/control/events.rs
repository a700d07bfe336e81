//! Translation of an operator's event specification (`-e`) to a perf-core event.

use control_api::events::list::{EventListEntry, PerfEventKind, SoftwareEvent};
use perf_core::pmu::clock::ClockPmu;
use perf_core::{Attr, EventType};
use vpmu::ParavirtualEvent;

use crate::pmu::VmPmu;

/// An event that an operator requested, translated for perf-core.
#[derive(Clone, Debug)]
pub(super) struct OperatorEvent {
    /// Attributes of the perf-core event, initially disabled.
    pub(super) attr: Attr,
    /// Name of the source that counts the event ("backing"), for example `clock`.
    pub(super) backing: &'static str,
    /// `true` if the count is a time in nanoseconds.
    pub(super) nanoseconds: bool,
    /// `true` if the counts of this event are always estimates. Without this flag, only a
    /// multiplexed event is an estimate.
    pub(super) estimate: bool,
}

/// Reason why an operator's event cannot be counted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum UnsupportedEventError {
    /// The event has the modifier `h` without `G`, which selects code of the host only.
    #[error("events count the guest only; for the host, use perf on the VMM's threads")]
    HostOnly,
    /// The event has the modifier `p` or `P`, which requests precise samples.
    #[error("precise sampling of a guest is unsupported")]
    Precise,
    /// The event counts user code, which KVM on this host cannot single-step. The exact backing
    /// counts by single-stepping.
    #[error(
        "this host's KVM cannot single-step user code, so only the guest's kernel can be counted exactly: use '{0}:k'"
    )]
    UserNotStepped(String),
    /// The event requires a hardware PMU, which this host lacks.
    #[error("this host has no hardware PMU")]
    NoPmu,
    /// The host's PMU does not support the event, and the VMM has no other source that counts it.
    #[error("this host's PMU does not support '{0}'")]
    NotOnHost(String),
    /// KVM has no statistic of this name.
    #[error("statistic '{0}' not found in this host's KVM")]
    NoStatistic(String),
    /// The host does not provide the paravirtual event.
    #[error("this host cannot count '{0}' for operators")]
    NoParavirtual(String),
}

/// Translates `spec`, the event that an operator requested, to a perf-core event on this host.
///
/// # Errors
///
/// Returns the [`UnsupportedEventError`] that tells why the event cannot be counted.
pub(super) fn operator_event(
    pmu: &VmPmu,
    spec: &EventListEntry,
) -> Result<OperatorEvent, UnsupportedEventError> {
    let m = &spec.modifiers;
    if m.host && !m.guest {
        return Err(UnsupportedEventError::HostOnly);
    }
    if m.precise > 0 || m.precise_max {
        return Err(UnsupportedEventError::Precise);
    }
    let source = event_source(pmu, spec)?;
    let attr = Attr {
        ty: source.ty,
        config: source.config,
        config1: source.config1,
        config2: source.config2,
        disabled: true,
        pinned: m.pinned,
        exclusive: m.exclusive,
        exclude_user: m.exclude_user(),
        exclude_kernel: m.exclude_kernel(),
        exclude_idle: m.exclude_idle,
        // Software events of the host (page faults, context switches) occur on the host; all
        // other events count the guest.
        exclude_host: source.ty != EventType::SOFTWARE,
        ..Attr::default()
    };
    Ok(OperatorEvent {
        estimate: ClockPmu::is_estimate(&attr),
        attr,
        backing: source.backing,
        nanoseconds: source.nanoseconds,
    })
}

/// A perf-core event that counts an operator's event.
struct EventSource {
    ty: EventType,
    config: u64,
    config1: u64,
    config2: u64,
    backing: &'static str,
    nanoseconds: bool,
}

impl EventSource {
    fn new(ty: EventType, config: u64, backing: &'static str) -> Self {
        Self {
            ty,
            config,
            config1: 0,
            config2: 0,
            backing,
            nanoseconds: false,
        }
    }
}

/// Returns the perf-core event that counts `spec` on this host.
fn event_source(pmu: &VmPmu, spec: &EventListEntry) -> Result<EventSource, UnsupportedEventError> {
    match &spec.kind {
        PerfEventKind::Hardware(event) => hardware_event_source(pmu, spec, *event as u64),
        PerfEventKind::Cache(_) | PerfEventKind::Raw { .. } if !pmu.has_hardware() => {
            Err(UnsupportedEventError::NoPmu)
        }
        PerfEventKind::Cache(config) => Ok(EventSource::new(EventType::HW_CACHE, *config, "hardware")),
        PerfEventKind::Raw {
            config,
            config1,
            config2,
        } => Ok(EventSource {
            config1: *config1,
            config2: *config2,
            ..EventSource::new(EventType::RAW, *config, "hardware")
        }),
        PerfEventKind::Software(event) => Ok(EventSource {
            nanoseconds: matches!(event, SoftwareEvent::CpuClock | SoftwareEvent::TaskClock),
            ..EventSource::new(EventType::SOFTWARE, *event as u64, "software")
        }),
        PerfEventKind::Kvm(name) => match pmu.statistic(name) {
            Some(config) => Ok(EventSource::new(EventType::KVM, config, "kvm-stat")),
            None => Err(UnsupportedEventError::NoStatistic(name.clone())),
        },
        PerfEventKind::Paravirtual(name) => paravirtual_event_source(pmu, name),
    }
}

/// Returns the perf-core event that counts the generic hardware event `number`.
fn hardware_event_source(
    pmu: &VmPmu,
    spec: &EventListEntry,
    number: u64,
) -> Result<EventSource, UnsupportedEventError> {
    let source = pmu.generic_source(number).ok_or_else(|| {
        if pmu.has_hardware() {
            UnsupportedEventError::NotOnHost(spec.name.clone())
        } else {
            UnsupportedEventError::NoPmu
        }
    })?;
    if source.ty == EventType::VMM_PMU && !spec.modifiers.exclude_user() && !pmu.can_step_user_code() {
        let name = spec.name.split(':').next().unwrap_or_default();
        return Err(UnsupportedEventError::UserNotStepped(name.to_owned()));
    }
    Ok(EventSource::new(source.ty, source.config, source.backing.name()))
}

/// Returns the perf-core event that counts the paravirtual event `name`.
fn paravirtual_event_source(pmu: &VmPmu, name: &str) -> Result<EventSource, UnsupportedEventError> {
    let event = ParavirtualEvent::ALL.into_iter().find(|e| e.name() == name);
    let source = event
        .and_then(|event| pmu.paravirtual_source(event))
        .ok_or_else(|| UnsupportedEventError::NoParavirtual(name.to_owned()))?;
    let backing = match source.ty {
        EventType::VMM_PMU => "vmm",
        _ => source.backing.name(),
    };
    Ok(EventSource {
        nanoseconds: name.ends_with("-ns"),
        ..EventSource::new(source.ty, source.config, backing)
    })
}

#[cfg(test)]
mod tests {
    use control_api::events::list;

    use super::*;
    use crate::testing::pmu;

    fn event(vm: &VmPmu, text: &str) -> Result<OperatorEvent, UnsupportedEventError> {
        let groups = list::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"));
        operator_event(vm, &groups[0].events[0])
    }

    /// On a host without a hardware PMU, an operator can count events with the clock and in
    /// software, and each event reports the source ("backing") that counts it.
    #[test]
    fn operator_events_without_pmu_use_clock_and_software() {
        let vm = pmu(None, false);
        for (text, backing, nanoseconds) in [
            ("cycles", "clock", false),
            ("ref-cycles", "clock", false),
            ("task-clock", "software", true),
            ("page-faults", "software", false),
            ("io-exits", "vmm", false),
            ("steal-ns", "software", true),
        ] {
            let event = event(&vm, text).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(
                (event.backing, event.nanoseconds),
                (backing, nanoseconds),
                "{text}"
            );
            assert!(event.attr.disabled && !event.estimate, "{text}");
        }
        for (text, why) in [
            ("instructions", UnsupportedEventError::NoPmu),
            ("stalled-cycles-frontend", UnsupportedEventError::NoPmu),
            ("r1a8", UnsupportedEventError::NoPmu),
            ("L1-dcache-load-misses", UnsupportedEventError::NoPmu),
            ("kvm:exits", UnsupportedEventError::NoStatistic("exits".into())),
            (
                "vm-exits",
                UnsupportedEventError::NoParavirtual("vm-exits".into()),
            ),
        ] {
            assert_eq!(event(&vm, text).unwrap_err(), why, "{text}");
        }
    }

    #[test]
    fn operator_event_not_on_host_is_named() {
        let vm = pmu(Some(&["cycles", "instructions"]), false);
        for (text, ty, config) in [
            ("cycles", EventType::HARDWARE, 0),
            ("instructions", EventType::HARDWARE, 1),
            ("r1a8", EventType::RAW, 0x1A8),
            ("L1-dcache-load-misses", EventType::HW_CACHE, 0x1_0000),
        ] {
            let event = event(&vm, text).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!((event.attr.ty, event.attr.config), (ty, config), "{text}");
            assert_eq!(event.backing, "hardware");
        }
        assert_eq!(
            event(&vm, "branch-misses").unwrap_err(),
            UnsupportedEventError::NotOnHost("branch-misses".into())
        );
    }

    /// An operator's event that counts guest code never counts host code.
    #[test]
    fn modifiers_select_levels_and_exclude_host() {
        let vm = pmu(None, false);
        let user = event(&vm, "cycles:uD").unwrap();
        assert!(user.attr.exclude_kernel && !user.attr.exclude_user && user.attr.exclude_host);
        assert!(user.attr.pinned && user.estimate, "the clock does not see levels");
        assert!(!event(&vm, "page-faults").unwrap().attr.exclude_host);
        assert_eq!(
            event(&vm, "cycles:H").unwrap_err(),
            UnsupportedEventError::HostOnly
        );
        assert_eq!(
            event(&vm, "cycles:pp").unwrap_err(),
            UnsupportedEventError::Precise
        );
    }
}
