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
    let (ty, config, config1, config2, backing, nanoseconds) = match &spec.kind {
        PerfEventKind::Hardware(event) => {
            let way = pmu.generic_source(*event as u64).ok_or_else(|| {
                if pmu.has_hardware() {
                    UnsupportedEventError::NotOnHost(spec.name.clone())
                } else {
                    UnsupportedEventError::NoPmu
                }
            })?;
            if way.ty == EventType::VMM_PMU && !m.exclude_user() && !pmu.can_step_user_code() {
                let name = spec.name.split(':').next().unwrap_or_default();
                return Err(UnsupportedEventError::UserNotStepped(name.to_owned()));
            }
            (way.ty, way.config, 0, 0, way.backing.name(), false)
        }
        PerfEventKind::Cache(config) if pmu.has_hardware() => {
            (EventType::HW_CACHE, *config, 0, 0, "hardware", false)
        }
        PerfEventKind::Raw {
            config,
            config1,
            config2,
        } if pmu.has_hardware() => (EventType::RAW, *config, *config1, *config2, "hardware", false),
        PerfEventKind::Cache(_) | PerfEventKind::Raw { .. } => {
            return Err(UnsupportedEventError::NoPmu);
        }
        PerfEventKind::Software(event) => {
            let time = matches!(event, SoftwareEvent::CpuClock | SoftwareEvent::TaskClock);
            (EventType::SOFTWARE, *event as u64, 0, 0, "software", time)
        }
        PerfEventKind::Kvm(name) => {
            let config = pmu
                .statistic(name)
                .ok_or_else(|| UnsupportedEventError::NoStatistic(name.clone()))?;
            (EventType::KVM, config, 0, 0, "kvm-stat", false)
        }
        PerfEventKind::Paravirtual(name) => {
            let event = ParavirtualEvent::ALL.into_iter().find(|e| e.name() == *name);
            let way = event.and_then(|event| pmu.paravirtual_source(event));
            let way = way.ok_or_else(|| UnsupportedEventError::NoParavirtual((*name).to_owned()))?;
            let backing = match way.ty {
                EventType::VMM_PMU => "vmm",
                _ => way.backing.name(),
            };
            (way.ty, way.config, 0, 0, backing, name.ends_with("-ns"))
        }
    };
    let attr = Attr {
        ty,
        config,
        config1,
        config2,
        disabled: true,
        pinned: m.pinned,
        exclusive: m.exclusive,
        exclude_user: m.exclude_user(),
        exclude_kernel: m.exclude_kernel(),
        exclude_idle: m.exclude_idle,
        // Software events of the host (page faults, context switches) occur on the host; all
        // other events count the guest.
        exclude_host: ty != EventType::SOFTWARE,
        ..Attr::default()
    };
    Ok(OperatorEvent {
        estimate: ClockPmu::is_estimate(&attr),
        attr,
        backing,
        nanoseconds,
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
