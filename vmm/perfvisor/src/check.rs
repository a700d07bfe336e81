//! `perfvisor check`: reports the capabilities of this host as text or as JSON.

use std::error::Error;
use std::fmt::Write as _;

use perf_core::PerfCoreConfig;
use perf_core::pmu::MEDIATED_NEIGHBOUR;
use perf_core::pmu::host::HostPerfCapabilities;
use serde::{Serialize, Serializer};
use vpmu::{
    ArchEvent, CounterBacking, CounterBackingPolicy, HostPmuProperties, PmuModel, PmuModelError,
    PmuModelName, RequestedCounters, Vendor,
};

use crate::cli::CheckArgs;
use operator::commands::{CommandOutputError, print};
use operator::exit::ExitStatus;
use perf_core::error_line;
use virtio_devices::net::vhost::{VhostError, VhostNetBackend};
use vmm::kvm::cpuid;
use vmm::kvm::execution::{self, KvmCapabilities};
use vmm::kvm::host::{self, KvmHostError};
use vmm::kvm::rotation_cost::{self, RotationCost};
use vmm::kvm::stepping::SteppingSupport;
use vmm::kvm::vpmu_probe::{self, KvmPmuCapabilities, KvmVpmuModelError, KvmVpmuUnavailable};
use vmm::pmu::backing;
use vmm::pmu::fit::{self, FittedPmuModel, fit};

/// The complete report of `perfvisor check`.
#[derive(Debug, Serialize)]
struct HostReport {
    perfvisor: &'static str,
    kernel: String,
    #[serde(serialize_with = "serialize_result")]
    kvm: Result<KvmCapabilities, KvmHostError>,
    /// Capabilities of KVM's own vPMU, or the reason it is unavailable.
    #[serde(serialize_with = "serialize_result")]
    own_pmu: Result<KvmPmuCapabilities, CheckError>,
    /// `true` if KVM's own vPMUs are mediated (`enable_mediated_pmu`).
    mediated_vpmus: bool,
    /// Capabilities of this host's KVM to single-step guests, as `--backing exact` requires.
    stepping: Option<SteppingSupport>,
    /// Availability of vhost-net, or the reason it is unavailable.
    #[serde(serialize_with = "serialize_result")]
    vhost_net: Result<bool, VhostError>,
    perf: HostPerfCapabilities,
    /// `true` if the limits of perf_event_paranoid apply to this process.
    paranoid_applies: bool,
    /// PMU model that `--pmu auto` selects on this host.
    pmu_auto: String,
    /// Description of the PMU model given by `--pmu`.
    pmu_asked: Option<String>,
    /// One-line summary of how the counters of the guest's PMU model compete for the host's
    /// counters.
    pmu_competition: Option<String>,
    /// PMU model that `--pmu auto` selects with `--backing kvm`; `None` if KVM has no vPMU.
    own_pmu_auto: Option<String>,
    /// Description of the model given by `--pmu` with `--backing kvm`, or the reason KVM cannot
    /// provide it.
    #[serde(serialize_with = "serialize_optional_result")]
    own_pmu_asked: Option<Result<String, KvmVpmuModelError>>,
    /// One-line summary of how the counters of KVM's vPMU compete for the host's counters.
    own_pmu_competition: Option<String>,
    /// Cost of one multiplexing rotation for a guest; `None` without hardware counters.
    #[serde(serialize_with = "serialize_optional_result")]
    turns: Option<Result<RotationCost, KvmHostError>>,
    /// Default limits of `perfvisor run` on the users who observe a VM.
    limits: DefaultLimits,
    /// Description of how each guest event is counted under `--backing auto`.
    events: Vec<EventBacking>,
}

/// Default limits of `perfvisor run` on the users who observe a VM (operators).
#[derive(Debug, Serialize)]
struct DefaultLimits {
    samples_per_second: u64,
    /// Default of `--ring-memory` for a user other than root, in bytes.
    ring_bytes: u64,
    /// Default value of `--reserve-counters`, the number of host counters per vCPU that the guest
    /// does not get.
    reserved_counters: usize,
    /// Maximum value of `--reserve-counters` on this host.
    reservable_counters: usize,
}

impl DefaultLimits {
    fn of(perf: &HostPerfCapabilities) -> Self {
        let core = PerfCoreConfig::default();
        let cpus = u64::try_from(core.host_cpus).unwrap_or(u64::MAX);
        Self {
            samples_per_second: core.sample_rate_hz,
            ring_bytes: core.mlock_kb.saturating_mul(cpus).saturating_add(core.memlock_kb) << 10,
            reserved_counters: core.reserved_slots,
            reservable_counters: perf.slots().saturating_sub(1),
        }
    }
}

/// Description of how one guest event is counted on this host.
#[derive(Debug, Serialize)]
struct EventBacking {
    event: &'static str,
    backing: &'static str,
    /// Hint for the interpretation of the event's count.
    note: &'static str,
}

/// Error returned when a part of `perfvisor check` fails.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    #[error(transparent)]
    Host(#[from] KvmHostError),
    #[error("KVM is unavailable")]
    NoKvm,
    #[error(transparent)]
    KvmVpmuUnavailable(#[from] KvmVpmuUnavailable),
    #[error(transparent)]
    PmuModel(#[from] PmuModelError),
    #[error(transparent)]
    Output(#[from] CommandOutputError),
}

/// Serializes a result, with the error as a one-line string.
fn serialize_result<T: Serialize, E: Error, S: Serializer>(
    result: &Result<T, E>,
    to: S,
) -> Result<S::Ok, S::Error> {
    result.as_ref().map_err(|e| error_line(e)).serialize(to)
}

/// Serializes an optional result like [`serialize_result`].
fn serialize_optional_result<T: Serialize, E: Error, S: Serializer>(
    result: &Option<Result<T, E>>,
    to: S,
) -> Result<S::Ok, S::Error> {
    result
        .as_ref()
        .map(|result| result.as_ref().map_err(|e| error_line(e)))
        .serialize(to)
}

/// Prints the report of `perfvisor check`.
///
/// # Errors
/// Returns [`CheckError`] if the host cannot run any guest or the output is incomplete.
pub fn check(args: &CheckArgs) -> Result<ExitStatus, CheckError> {
    let report = HostReport::collect(args)?;
    if args.json {
        let text = serde_json::to_string_pretty(&report).map_err(CommandOutputError::from)?;
        print(&(text + "\n"))?;
    } else {
        print(&report.text())?;
    }
    match report.kvm {
        Ok(_) => Ok(ExitStatus::PoweredOff),
        Err(error) => Err(error.into()),
    }
}

impl HostReport {
    fn collect(args: &CheckArgs) -> Result<Self, PmuModelError> {
        let perf = HostPerfCapabilities::run();
        let opened = host::open();
        let own_pmu = match &opened {
            Ok(kvm) => vpmu_probe::probe(kvm, &perf).map_err(CheckError::from),
            Err(_) => Err(CheckError::NoKvm),
        };
        let probed = opened.as_ref().ok().and_then(|kvm| execution::probe(kvm).ok());
        let stepping = probed.map(|execution| execution.stepping);
        let turns = opened
            .as_ref()
            .ok()
            .filter(|_| perf.slots() > 0)
            .map(|kvm| rotation_cost::probe(kvm, &perf));
        let kvm = opened.and_then(|kvm| execution::facts(&kvm));
        let pmu_auto = fit_emulated(PmuModelName::Auto, None, &perf)
            .map_or_else(|e| error_line(&e), |fitted| fitted.model.to_string());
        let is_asked = args.pmu != PmuModelName::Auto || args.pmu_counters.is_some();
        let asked = is_asked
            .then(|| fit_emulated(args.pmu, args.pmu_counters, &perf))
            .transpose()?;
        let own = own_pmu.as_ref().ok();
        let own_auto = own.map(|own| fit_own(own, PmuModelName::Auto, None, &perf));
        let own_asked = own
            .filter(|_| is_asked)
            .map(|own| fit_own(own, args.pmu, args.pmu_counters, &perf));
        Ok(Self {
            perfvisor: env!("CARGO_PKG_VERSION"),
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")
                .map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned()),
            kvm,
            own_pmu,
            mediated_vpmus: vpmu_probe::is_mediated(),
            stepping,
            vhost_net: VhostNetBackend::open().map(|_| true),
            turns,
            paranoid_applies: !has_perfmon_capability(),
            pmu_auto,
            pmu_asked: asked.as_ref().map(|fitted| fitted.model.to_string()),
            pmu_competition: asked.and_then(|fitted| fitted.competition),
            own_pmu_auto: own_auto
                .map(|model| model.map_or_else(|e| error_line(&e), |fitted| fitted.model.to_string())),
            own_pmu_competition: match &own_asked {
                Some(Ok(fitted)) => fitted.competition.clone(),
                _ => None,
            },
            own_pmu_asked: own_asked.map(|model| model.map(|fitted| fitted.model.to_string())),
            limits: DefaultLimits::of(&perf),
            events: event_backings(&perf, HostPmuProperties::vendor(&mut cpuid::read_host)),
            perf,
        })
    }

    /// Adds the capabilities of KVM to the report.
    fn report_kvm(&self, kvm: &KvmCapabilities, line: &mut dyn FnMut(&str, &str)) {
        line("KVM", &kvm.flavour.to_string());
        line(
            "  Linux guests",
            if kvm.runs_linux {
                "yes"
            } else {
                "no: guest kernels run in KVM's instruction emulator; use the lab (make lab, make demo)"
            },
        );
        line("  PMU registers trapped", yes(kvm.traps_msrs));
        line(
            "  --backing kvm",
            &match &self.own_pmu {
                Ok(own) => format!("KVM's own vPMU: {own}"),
                Err(why) => {
                    let why = error_line(why);
                    format!("no: {}", why.split("; ").next().unwrap_or(&why))
                }
            },
        );
        if let Some(auto) = &self.own_pmu_auto {
            line("    --pmu auto", auto);
        }
        if let Some(asked) = &self.own_pmu_asked {
            line(
                "    --pmu as asked",
                &asked.as_ref().map_or_else(|e| error_line(e), String::clone),
            );
        }
        if let Some(competition) = &self.own_pmu_competition {
            line("      counters", competition);
        }
        line(
            "  RDPMC in programs",
            if kvm.rdpmc_faults {
                "is served"
            } else {
                "is not served: KVM answers it with counters that do not count (AMD-V in Linux 6.1; fixed in 6.12)"
            },
        );
        line("  binary statistics", yes(kvm.binary_stats));
        line("  --backing exact", exact(self.stepping));
        line("  --lbr", branch_records(self.stepping));
        line(
            "  --rdpmc hwbp",
            if self.stepping.is_some_and(|s| s.breakpoints) {
                "yes"
            } else {
                "no: hardware breakpoints in guests do not stop here"
            },
        );
        line("  vCPUs per VM", &kvm.max_vcpus.to_string());
    }

    /// Adds the host's PMU and its perf events to the report.
    fn report_perf(&self, line: &mut dyn FnMut(&str, &str)) {
        let perf = &self.perf;
        match &perf.no_slots_because {
            None => {
                let counters = &perf.counters;
                line("host PMU", &fit::slots(counters));
                line(
                    "  general counters",
                    &format!("{} of {} free", counters.general, counters.general_there),
                );
                line("  fixed counters", &fit::fixed(counters));
            }
            Some(reason) => line("host PMU", &format!("none ({reason})")),
        }
        line(
            "  --mux auto",
            &match &self.turns {
                None => "no turns: there are no counters to share".to_owned(),
                Some(Ok(cost)) => cost.in_words(),
                Some(Err(why)) => format!("turns of a tick, as --mux rotate: {}", error_line(why)),
            },
        );
        line(
            "  NMI watchdog",
            match (perf.nmi_watchdog, self.mediated_vpmus) {
                (false, _) => "off",
                (true, false) => "on: it holds one counter of each CPU",
                (true, true) => {
                    "on: it holds one counter of each CPU, and --backing kvm may fail beside it; sysctl kernel.nmi_watchdog=0"
                }
            },
        );
        line("  mediated vPMUs", mediated_vpmus(perf, self.mediated_vpmus));
        line("  user-space reads", yes(perf.user_read));
        let paranoid = match perf.paranoid {
            Some(level) if self.paranoid_applies => format!("{level}"),
            Some(level) => format!("{level} (this process is exempt)"),
            None => "unknown: no /proc/sys/kernel/perf_event_paranoid".to_owned(),
        };
        line("perf_event_paranoid", &paranoid);
        line("software clock events", yes(perf.software_clock));
    }

    /// Adds the default limits of operators to the report.
    fn report_limits(&self, line: &mut dyn FnMut(&str, &str)) {
        let limits = &self.limits;
        line(
            "--sample-limit",
            &format!("{} samples a second of an event", limits.samples_per_second),
        );
        line(
            "--ring-memory",
            &format!("{}K for a user who is not root", limits.ring_bytes >> 10),
        );
        line(
            "--reserve-counters",
            &match limits.reservable_counters {
                0 => "0; there are none to reserve".to_owned(),
                most => format!("{}; up to {most} here", limits.reserved_counters),
            },
        );
    }

    /// Returns the report as text.
    fn text(&self) -> String {
        let mut out = String::new();
        let mut line = |name: &str, value: &str| {
            let _ = writeln!(out, "{name:<24}{value}");
        };
        line("perfvisor", self.perfvisor);
        line("host kernel", &self.kernel);
        match &self.kvm {
            Ok(kvm) => self.report_kvm(kvm, &mut line),
            Err(e) => line("KVM", &format!("unusable: {}", error_line(e))),
        }
        line(
            "vhost-net",
            &match &self.vhost_net {
                Ok(_) => "yes".to_owned(),
                Err(why) => format!("no: {}", error_line(why)),
            },
        );
        self.report_perf(&mut line);
        self.report_limits(&mut line);
        line("--pmu auto", &self.pmu_auto);
        if let Some(asked) = &self.pmu_asked {
            line("--pmu as asked", asked);
        }
        if let Some(competition) = &self.pmu_competition {
            line("  counters", competition);
        }
        let _ = writeln!(out, "\n{:<24}{:<12}note", "guest event", "backing");
        for event in &self.events {
            let _ = writeln!(out, "{:<24}{:<12}{}", event.event, event.backing, event.note);
        }
        out
    }
}

/// Returns the emulated PMU of a guest with `--pmu name` and `--pmu-counters numbers`.
fn fit_emulated(
    name: PmuModelName,
    numbers: Option<RequestedCounters>,
    perf: &HostPerfCapabilities,
) -> Result<FittedPmuModel, PmuModelError> {
    let model = PmuModel::resolve(name, numbers, None, &mut cpuid::read_host)?;
    let policy = CounterBackingPolicy::Auto;
    Ok(fit(model, numbers.is_some(), policy, None, perf))
}

/// Returns the PMU that KVM's own vPMU provides to a guest with `--pmu name` and `--pmu-counters
/// numbers`.
fn fit_own(
    own: &KvmPmuCapabilities,
    name: PmuModelName,
    numbers: Option<RequestedCounters>,
    perf: &HostPerfCapabilities,
) -> Result<FittedPmuModel, KvmVpmuModelError> {
    let model = own.model(name, numbers, None)?;
    let policy = CounterBackingPolicy::Kvm;
    Ok(fit(model, numbers.is_some(), policy, Some(own), perf))
}

/// Describes whether VMs with KVM's mediated vPMU exist or can be created. While such a VM exists,
/// the host cannot count events of guests, and vice versa.
fn mediated_vpmus(perf: &HostPerfCapabilities, offered: bool) -> &'static str {
    match (perf.mediated, offered) {
        (true, _) => MEDIATED_NEIGHBOUR,
        (false, true) => {
            "none now; while a VM counts with --backing hardware or auto, none can be created (EBUSY)"
        }
        (false, false) => "none",
    }
}

fn exact(stepping: Option<SteppingSupport>) -> &'static str {
    match stepping {
        Some(SteppingSupport {
            kernel: true,
            user: true,
            blocks_interrupts: true,
            ..
        }) => "counts CPL 0 and CPL 3",
        Some(SteppingSupport {
            kernel: true,
            user: false,
            ..
        }) => "counts CPL 0; CPL 3 is not counted, because this KVM cannot single-step it",
        Some(SteppingSupport { kernel: true, .. }) => {
            "no: interrupts cannot be held back during a step (needs Linux 5.14)"
        }
        _ => "no: this KVM does not single-step guests",
    }
}

/// Describes the support for branch records in guests.
fn branch_records(stepping: Option<SteppingSupport>) -> &'static str {
    match stepping {
        Some(SteppingSupport {
            kernel: true,
            user: true,
            blocks_interrupts: true,
            ..
        }) => "on by default, with intel-v2 to intel-v5 and amd-v2",
        Some(SteppingSupport {
            kernel: true,
            user: false,
            ..
        }) => "off by default; on records CPL 0 only, because this KVM cannot single-step CPL 3",
        Some(SteppingSupport { kernel: true, .. }) => {
            "no: interrupts cannot be held back during a step (needs Linux 5.14)"
        }
        _ => "no: this KVM does not single-step guests",
    }
}

fn yes(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

/// Returns how each event is counted under `--backing auto` on a host with a processor of `vendor`.
fn event_backings(perf: &HostPerfCapabilities, vendor: Vendor) -> Vec<EventBacking> {
    let (other, refused) = match vendor {
        Vendor::Intel => (
            Vendor::Amd,
            "models of the host's vendor only: with --pmu amd it is not supported, as it counts another thing there",
        ),
        Vendor::Amd => (
            Vendor::Intel,
            "models of the host's vendor only: with --pmu intel it is not supported, as it counts another thing there",
        ),
    };
    let auto = backing::sources(CounterBackingPolicy::Auto, perf, vendor, |_| None);
    ArchEvent::ALL
        .into_iter()
        .map(|event| {
            let (backing, note) = match auto.known_source(event, vendor).map(|way| way.backing) {
                None => ("none", "not supported in the guest"),
                Some(CounterBacking::Clock) => (
                    "clock",
                    "vCPU run time x TSC frequency; :u or :k alone is an estimate",
                ),
                // Generic cache events refer to the last-level cache on Intel and to the L2 cache
                // on AMD.
                Some(backing) if auto.known_source(event, other).is_none() => (backing.name(), refused),
                Some(backing) => (backing.name(), ""),
            };
            EventBacking {
                event: event.name(),
                backing,
                note,
            }
        })
        .collect()
}

/// Returns whether CAP_PERFMON or CAP_SYS_ADMIN is in the effective set (capabilities(7)).
fn has_perfmon_capability() -> bool {
    const CAP_SYS_ADMIN: u32 = 21;
    const CAP_PERFMON: u32 = 38;
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| {
        status
            .lines()
            .find_map(|line| line.strip_prefix("CapEff:"))
            .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
            .is_some_and(|set| set & (1 << CAP_SYS_ADMIN | 1 << CAP_PERFMON) != 0)
    })
}

#[cfg(test)]
mod tests {
    use perf_core::pmu::host::GenericEvent;

    use super::*;

    /// The report tells users how to disable mediated vPMUs that exist, and that none can be
    /// created while a VM counts with host events.
    #[test]
    fn mediated_vpmus_are_explained() {
        let with = |mediated| HostPerfCapabilities {
            mediated,
            ..HostPerfCapabilities::run()
        };
        assert!(mediated_vpmus(&with(true), true).contains("enable_mediated_pmu=0"));
        assert!(mediated_vpmus(&with(false), true).contains("EBUSY"));
        assert_eq!(mediated_vpmus(&with(false), false), "none");
    }

    /// On a host that counts cache events, the report names the vendor whose PMU models do not
    /// support these events.
    #[test]
    fn refused_cache_events_of_another_vendor_are_mentioned() {
        let opens = |name: &str| GenericEvent {
            name: name.to_owned(),
            config: 0,
            opens: true,
        };
        let perf = HostPerfCapabilities {
            hardware_pmu: true,
            generic: ["cycles", "cache-references", "cache-misses"].map(opens).into(),
            ..HostPerfCapabilities::run()
        };
        for (vendor, other) in [(Vendor::Intel, "--pmu amd "), (Vendor::Amd, "--pmu intel ")] {
            let rows = event_backings(&perf, vendor);
            let row = |event: ArchEvent| rows.iter().find(|row| row.event == event.name()).unwrap();
            for event in [ArchEvent::CacheReferences, ArchEvent::CacheMisses] {
                assert!(
                    row(event).backing == "hardware" && row(event).note.contains(other),
                    "{event:?}"
                );
            }
            assert_eq!(row(ArchEvent::CoreCycles).note, "");
            assert_eq!(row(ArchEvent::Branches).backing, "none");
        }
    }
}
