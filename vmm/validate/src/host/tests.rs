//! Hosts and options for tests.

use perf_core::pmu::host::{GenericEvent, HostCounters};

use super::*;

/// Returns a host on which guests can count only with `--backing clock`. One TSC tick of its guests
/// takes one nanosecond.
pub(crate) fn clock_host() -> HostProperties {
    HostProperties {
        kvm: KvmSummary {
            facts: serde_json::json!({}),
            flavour: "test".into(),
        },
        guest_pmu: "intel".into(),
        slots: "none".into(),
        probe: HostPerfCapabilities {
            hardware_pmu: false,
            counters: HostCounters::default(),
            no_slots_because: Some("no PMU".into()),
            hybrid: false,
            paranoid: Some(1),
            nmi_watchdog: false,
            mediated: false,
            user_read: false,
            software_clock: true,
            pmus: vec!["software".into()],
            generic: Vec::new(),
        },
        no_hardware: Some("no PMU".into()),
        no_clock: None,
        no_exact: None,
        tsc_hz: 1_000_000_000,
        steps_user: true,
        hardware_events: Vec::new(),
    }
}

/// Returns a host like [`clock_host`], with a PMU that supports the generic perf events `generic`.
pub(crate) fn hardware_host(generic: &[&str]) -> HostProperties {
    let event = |name: &&str| GenericEvent {
        name: (*name).into(),
        config: 0,
        opens: true,
    };
    let mut host = clock_host();
    host.no_hardware = None;
    host.probe.hardware_pmu = true;
    host.probe.generic = generic.iter().map(event).collect();
    host
}

/// Returns options with a tolerance of two percent.
pub(crate) fn options() -> ValidateOptions {
    ValidateOptions {
        pmu: "intel".into(),
        tolerance_percent: 2.0,
        linux: None,
        linux_skipped: None,
        own_pmu: false,
    }
}

/// The conversion is exact for long times and high TSC frequencies.
#[test]
fn ticks_neither_wrap_nor_panic() {
    let ticks = |ns, tsc_hz| {
        HostProperties {
            tsc_hz,
            ..clock_host()
        }
        .ticks(ns)
    };
    assert_eq!(ticks(1_500_000_000, 2_000_000_000), 3_000_000_000);
    assert_eq!(ticks(u64::MAX, 1_000_000_000), u64::MAX);
    assert_eq!(ticks(u64::MAX, u64::MAX), u64::MAX, "beyond what fits");
    assert_eq!(ticks(u64::MAX, 0), 0);
    assert_eq!(
        ticks(3_600_000_000_000 * 24 * 365, 5_000_000_000),
        157_680_000_000_000_000
    );
}
