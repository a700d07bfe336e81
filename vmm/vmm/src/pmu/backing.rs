//! Determines which backings (sources of the guest's counts) this host supports, and which events
//! they can count. The policy is chosen once per VM.

use crate::kvm::cpuid::read_host;
use crate::kvm::host::Kvm;
use crate::kvm::stepping::SteppingSupport;
use crate::kvm::vpmu_probe::{self, KvmPmuCapabilities, KvmVpmuUnavailable};
use guest_patching::rdpmc::RdpmcMode;
use perf_core::pmu::host::HostPerfCapabilities;
use vpmu::{
    ArchEvent, ArchEventSet, CounterBackingPolicy, CounterBackingSelector, ParavirtualEvent, PmiShare, Vendor,
};

/// Message for an event that cannot be counted because the host's kernel denies perf events to the
/// VM's user.
pub const EVENT_DENIED: &str = "this host does not let the VM's user count it; set kernel.perf_event_paranoid to 1 or less, \
    or start the VM with CAP_PERFMON";

/// Error when the chosen backing (source of the guest's counts) cannot be used on this host or with
/// other options.
#[derive(Debug, thiserror::Error)]
pub enum CounterBackingError {
    /// `--backing hardware` was given on a host without a usable PMU.
    #[error("--backing hardware: {0}; use --backing auto, which derives cycles from the vCPU's run time{1}")]
    NoHardware(String, &'static str),
    /// KVM cannot single-step guests.
    #[error(
        "--backing exact: unsupported, because this host's KVM cannot single-step guests; use \
         --backing auto"
    )]
    NoSteps,
    /// KVM cannot block interrupts during a single step, which the exact backing requires.
    #[error(
        "--backing exact: unsupported, because this host's KVM cannot block interrupts during a \
        step; use Linux 5.14 or later"
    )]
    NoBlocking,
    /// KVM's own vPMU is unavailable, with the reason.
    #[error("--backing kvm")]
    NoOwn(#[source] KvmVpmuUnavailable),
    /// `--rdpmc hwbp` was given for KVM's own vPMU, which handles RDPMC itself.
    #[error("--rdpmc hwbp with --backing kvm: KVM handles RDPMC itself; omit --rdpmc")]
    OwnAnswers,
    /// `--pmi-limit` was given for KVM's own vPMU, which delivers PMIs itself.
    #[error("--pmi-limit with --backing kvm: KVM delivers PMIs itself, without a limit; omit --pmi-limit")]
    OwnPmis,
    /// `--pmi-share` was given for KVM's own vPMU, which delivers PMIs itself.
    #[error("--pmi-share with --backing kvm: KVM delivers PMIs itself, without a bound; omit --pmi-share")]
    OwnShare,
}

/// Checks that KVM's own vPMU is available and supports the RDPMC and PMI options in use. Returns
/// the capabilities of the vPMU.
///
/// # Errors
/// Returns [`CounterBackingError::OwnAnswers`], [`CounterBackingError::OwnPmis`] or
/// [`CounterBackingError::OwnShare`] for an unsupported option, and [`CounterBackingError::NoOwn`]
/// if KVM offers no vPMU.
pub fn check_own(
    kvm: &Kvm,
    probe: &HostPerfCapabilities,
    rdpmc: RdpmcMode,
    pmi_limit: Option<u32>,
    pmi_share: Option<PmiShare>,
) -> Result<KvmPmuCapabilities, CounterBackingError> {
    if rdpmc == RdpmcMode::Hwbp {
        return Err(CounterBackingError::OwnAnswers);
    }
    if pmi_limit.is_some() {
        return Err(CounterBackingError::OwnPmis);
    }
    if pmi_share.is_some() {
        return Err(CounterBackingError::OwnShare);
    }
    let own = vpmu_probe::probe(kvm, probe).map_err(CounterBackingError::NoOwn)?;
    if own.mediated {
        log::warn!(
            "--backing kvm: the vPMU is mediated: the host's hardware events cannot count this guest (cycles by the clock and software events can)"
        );
    }
    Ok(own)
}

/// Checks that the exact backing, which counts by single-stepping, works for a VM with `cpus`
/// vCPUs. Logs what it cannot count on this host.
///
/// # Errors
/// Returns [`CounterBackingError::NoSteps`] if KVM cannot single-step guests, and
/// [`CounterBackingError::NoBlocking`] if it cannot block interrupts during a step.
pub fn check_stepping(host: SteppingSupport, cpus: u8) -> Result<(), CounterBackingError> {
    if !host.kernel {
        return Err(CounterBackingError::NoSteps);
    }
    if !host.user {
        log::warn!(
            "--backing exact: this host's KVM can single-step guest code at CPL 0 only; user-mode \
            instructions are not counted"
        );
    } else if !host.blocks_interrupts {
        return Err(CounterBackingError::NoBlocking);
    } else if cpus > 1 && !host.breakpoints {
        log::warn!(
            "--backing exact: hardware breakpoints in guests do not trigger on this host's KVM; \
            with several vCPUs, kernel code after an interrupt or a fault is not counted (with one \
            vCPU, all code is counted)"
        );
    }
    Ok(())
}

/// Checks that this host supports the backing (source of the guest's counts) that `policy`
/// requests. The clock backing works on every host, because it reads the CPU time of the vCPU
/// thread and uses POSIX timers.
///
/// # Errors
/// Returns [`CounterBackingError::NoHardware`] with the reason and a remedy.
pub fn check_policy(
    policy: CounterBackingPolicy,
    probe: &HostPerfCapabilities,
) -> Result<(), CounterBackingError> {
    match policy {
        CounterBackingPolicy::Hardware if !probe.hardware_pmu => Err(CounterBackingError::NoHardware(
            probe
                .no_slots_because
                .clone()
                .unwrap_or_else(|| "this host has no hardware PMU".to_owned()),
            paranoid_remedy(probe.paranoid),
        )),
        _ => Ok(()),
    }
}

/// Returns a message with the reason why `--backing auto` counts with the clock on a host that has
/// a PMU. Returns `None` if another policy was chosen, or the PMU can be used or does not exist.
pub fn clock_fallback(policy: CounterBackingPolicy, probe: &HostPerfCapabilities) -> Option<String> {
    let has_unusable_pmu = probe.hybrid || probe.mediated;
    let reason = probe.no_slots_because.as_ref().filter(|_| has_unusable_pmu)?;
    (policy == CounterBackingPolicy::Auto).then(|| format!("cycles are counted by the clock: {reason}"))
}

/// Returns a message if a VM with this policy conflicts with VMs that use KVM's mediated vPMU, and
/// `None` otherwise. `mediated` states whether this host offers the mediated vPMU. VMs with a
/// mediated vPMU and host events that count guests exclude each other (`perf_create_mediated_pmu`,
/// Linux 7.0).
pub fn mediated_conflict(
    policy: CounterBackingPolicy,
    probe: &HostPerfCapabilities,
    mediated: bool,
) -> Option<&'static str> {
    let opens_events = matches!(
        policy,
        CounterBackingPolicy::Auto | CounterBackingPolicy::Hardware
    ) && probe.hardware_pmu;
    (mediated && opens_events).then_some(
        "this host's KVM offers mediated vPMUs (enable_mediated_pmu=1): while this guest counts with the host's PMU, no VM with such \
         a vPMU can be created (EBUSY); --backing clock leaves the PMU to them",
    )
}

/// Returns a one-line message with the remedy and the events that a VM cannot count, if the host
/// denies perf events to the VM's user. Returns `None` if the host allows perf events.
pub fn denied_events(probe: &HostPerfCapabilities) -> Option<String> {
    if probe.software_clock {
        return None;
    }
    let paranoid = probe
        .paranoid
        .map_or_else(|| "unknown".to_owned(), |level| level.to_string());
    Some(format!(
        "this host does not let this user count (kernel.perf_event_paranoid is {paranoid}): the clock counts cycles, but hardware \
         events and the software events of stat are not counted; set it to 1 or less, give the program CAP_PERFMON (setcap \
         cap_perfmon=ep), or let it call perf_event_open if it is in a container whose filter forbids that{}",
        paranoid_remedy(probe.paranoid)
    ))
}

/// Returns the additional remedy for a `kernel.perf_event_paranoid` above 2, a level of Debian's
/// kernels. Counting then needs `CAP_SYS_ADMIN`, which no process of a VM retains.
fn paranoid_remedy(paranoid: Option<i32>) -> &'static str {
    match paranoid {
        Some(3..) => {
            "; above 2 CAP_PERFMON does not suffice, nor does root: run sysctl kernel.perf_event_paranoid=2"
        }
        _ => "",
    }
}

/// Returns the sources that can count events under `policy` on this host. `host` is the vendor of
/// the host's processor. `statistic` returns the event config with which the KVM driver counts the
/// named KVM statistic.
pub fn sources(
    policy: CounterBackingPolicy,
    probe: &HostPerfCapabilities,
    host: Vendor,
    statistic: impl FnMut(&'static str) -> Option<u64>,
) -> CounterBackingSelector {
    sources_of(
        policy,
        probe.hardware_pmu.then_some(host),
        generic_events(probe),
        statistic,
    )
}

/// Returns the sources that can count events under `policy`. `hardware` is the vendor of the host's
/// PMU if it can be used, and `opens` contains the generic events that the host can open.
pub(super) fn sources_of(
    policy: CounterBackingPolicy,
    hardware: Option<Vendor>,
    opens: ArchEventSet,
    mut statistic: impl FnMut(&'static str) -> Option<u64>,
) -> CounterBackingSelector {
    CounterBackingSelector::new(policy, hardware, |event| statistic(statistic_of(event)?))
        .opening(opens)
        .on_signature(read_host(1, 0).eax)
}

/// Returns the architectural events that the host's kernel can open as generic events.
pub(super) fn generic_events(probe: &HostPerfCapabilities) -> ArchEventSet {
    let opens = |event: &ArchEvent| {
        let generic = probe.generic.iter().find(|generic| generic.name == event.name());
        probe.hardware_pmu && generic.is_some_and(|generic| generic.opens)
    };
    ArchEvent::ALL.into_iter().filter(opens).collect()
}

/// Returns the name of the KVM statistic that counts a paravirtual event.
fn statistic_of(event: ParavirtualEvent) -> Option<&'static str> {
    match event {
        ParavirtualEvent::VmExits => Some("exits"),
        ParavirtualEvent::Halts => Some("halt_exits"),
        ParavirtualEvent::IrqInjections => Some("irq_injections"),
        ParavirtualEvent::NmiInjections => Some("nmi_injections"),
        _ => None,
    }
}

/// Returns the architectural events of vendor `model` that can be counted under `policy` on this
/// host. `host` is the vendor of the host's processor.
pub fn countable_events(
    policy: CounterBackingPolicy,
    probe: &HostPerfCapabilities,
    model: Vendor,
    host: Vendor,
) -> ArchEventSet {
    sources(policy, probe, host, |_| None).available_events(model)
}

#[cfg(test)]
mod tests {
    use super::*;
    use perf_core::pmu::MEDIATED_NEIGHBOUR;
    use perf_core::pmu::host::{GenericEvent, HostCounters};

    fn no_pmu() -> HostPerfCapabilities {
        HostPerfCapabilities {
            hardware_pmu: false,
            counters: HostCounters::default(),
            no_slots_because: Some("the host opens no hardware event: No such file or directory".into()),
            hybrid: false,
            paranoid: Some(2),
            nmi_watchdog: false,
            mediated: false,
            user_read: false,
            software_clock: true,
            pmus: vec!["software".into()],
            generic: vec![],
        }
    }

    /// On a host without a PMU, cycles are still counted with the clock. Backings that need a PMU
    /// are rejected with the reason.
    #[test]
    fn host_without_pmu_counts_only_by_clock() {
        let probe = no_pmu();
        assert_eq!(
            countable_events(CounterBackingPolicy::Auto, &probe, Vendor::Intel, Vendor::Amd),
            ArchEventSet::CLOCK
        );
        assert!(check_policy(CounterBackingPolicy::Auto, &probe).is_ok());
        let line = check_policy(CounterBackingPolicy::Hardware, &probe)
            .unwrap_err()
            .to_string();
        assert!(
            line.contains("opens no hardware event") && line.contains("--backing auto"),
            "{line}"
        );
    }

    /// On an AMD host, Intel's last-level cache events cannot be counted, because AMD's generic
    /// cache events count something else. CPUID reports the events as unavailable.
    #[test]
    fn cache_events_of_other_vendor_are_not_backable() {
        let opens = |name: &str| GenericEvent {
            name: name.into(),
            config: 0,
            opens: true,
        };
        let probe = HostPerfCapabilities {
            hardware_pmu: true,
            generic: [
                "cycles",
                "cache-references",
                "cache-misses",
                "bus-cycles",
                "branch-misses",
            ]
            .map(opens)
            .into(),
            ..no_pmu()
        };
        let of = |host| countable_events(CounterBackingPolicy::Auto, &probe, Vendor::Intel, host);
        for event in [ArchEvent::CacheReferences, ArchEvent::CacheMisses] {
            assert!(
                of(Vendor::Intel).contains(event) && !of(Vendor::Amd).contains(event),
                "{event:?}"
            );
        }
        assert!(of(Vendor::Amd).contains(ArchEvent::BranchMisses));
        // An Intel guest counts bus cycles with the clock; an AMD guest uses the host's event.
        assert!(
            of(Vendor::Amd).contains(ArchEvent::BusCycles)
                && of(Vendor::Intel).contains(ArchEvent::BusCycles)
        );
        let hardware = |host| countable_events(CounterBackingPolicy::Hardware, &probe, Vendor::Intel, host);
        assert!(
            hardware(Vendor::Intel).contains(ArchEvent::BusCycles)
                && !hardware(Vendor::Amd).contains(ArchEvent::BusCycles)
        );
    }

    /// While a VM with a mediated vPMU exists, the host rejects events that count guests.
    /// `--backing auto` then uses the clock, and every message names the mediated vPMU and the
    /// remedy.
    #[test]
    fn mediated_neighbour_leaves_clock_and_report_remedy() {
        let probe = HostPerfCapabilities {
            mediated: true,
            no_slots_because: Some(MEDIATED_NEIGHBOUR.to_owned()),
            ..no_pmu()
        };
        let auto = countable_events(CounterBackingPolicy::Auto, &probe, Vendor::Intel, Vendor::Intel);
        assert_eq!(auto, ArchEventSet::CLOCK);
        let hardware = check_policy(CounterBackingPolicy::Hardware, &probe).unwrap_err();
        let auto = clock_fallback(CounterBackingPolicy::Auto, &probe).unwrap();
        for line in [hardware.to_string(), auto] {
            assert!(line.contains("KVM's mediated vPMU"), "{line}");
            assert!(line.contains("enable_mediated_pmu=0"), "{line}");
        }
        assert_eq!(clock_fallback(CounterBackingPolicy::Clock, &probe), None);
        assert_eq!(clock_fallback(CounterBackingPolicy::Auto, &no_pmu()), None);
    }

    /// A message reports that no VM with a mediated vPMU can be created while a VM counts with the
    /// host's PMU.
    #[test]
    fn hardware_backing_reports_conflict_with_mediated_vms() {
        let with_pmu = HostPerfCapabilities {
            hardware_pmu: true,
            ..no_pmu()
        };
        for policy in [CounterBackingPolicy::Auto, CounterBackingPolicy::Hardware] {
            let line = mediated_conflict(policy, &with_pmu, true).unwrap();
            assert!(
                line.contains("EBUSY") && line.contains("--backing clock"),
                "{line}"
            );
            assert_eq!(mediated_conflict(policy, &with_pmu, false), None);
            assert_eq!(mediated_conflict(policy, &no_pmu(), true), None);
        }
        assert_eq!(
            mediated_conflict(CounterBackingPolicy::Clock, &with_pmu, true),
            None
        );
    }

    /// On a host that denies perf events, cycles are still counted with the clock, which needs no
    /// perf events. A message names the remedy.
    #[test]
    fn denied_perf_events_leave_clock_and_report_remedy() {
        let probe = HostPerfCapabilities {
            software_clock: false,
            paranoid: Some(4),
            ..no_pmu()
        };
        for policy in [CounterBackingPolicy::Auto, CounterBackingPolicy::Clock] {
            assert!(check_policy(policy, &probe).is_ok());
            assert_eq!(
                countable_events(policy, &probe, Vendor::Amd, Vendor::Amd),
                ArchEventSet::CLOCK
            );
        }
        let line = denied_events(&probe).unwrap();
        assert!(line.contains("perf_event_paranoid is 4"), "{line}");
        assert!(line.contains("sysctl kernel.perf_event_paranoid=2"), "{line}");
        assert_eq!(denied_events(&no_pmu()), None);
    }
}
