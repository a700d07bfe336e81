//! Translates the arguments of `run` into a machine configuration for this host.

use std::sync::Arc;
use std::time::Duration;

use perf_core::mux::MuxPolicy;
use perf_core::pmu::host::HostPerfCapabilities;
use vpmu::{
    ArchEvent, ArchEventSet, CounterBackingPolicy, EventFilter, EventSelect, EventSelection,
    HostPmuProperties, PmiShare, PmuModel, UnitMask, Vendor,
};

use super::error::RunError;
use crate::cli::RunArgs;
use crate::cli::restore::saved_backing;
use crate::values::SecurityProfile;
use guest_patching::rdpmc::RdpmcMode;
use operator::input;
use snapshot::state::SavedMachine;
use vmm::boot::KernelSource;
use vmm::kvm::cpuid;
use vmm::kvm::execution;
use vmm::kvm::host::Kvm;
use vmm::kvm::stepping::SteppingSupport;
use vmm::kvm::vpmu_probe::{self, KvmPmuCapabilities};
use vmm::memory::MemoryBackingConfig;
use vmm::pmu::branches::{self, BranchRecordsError};
use vmm::pmu::fit::{FittedPmuModel, fit};
use vmm::pmu::{OperatorResourceLimits, PmuConfig, backing};
use vmm::timers::MuxPolicyChoice;
use vmm::vm::restore::{announced_events, event_filter};
use vmm::vm::{DebuggerConfig, VmConfig};

/// Default command line of a Linux kernel: serial console, and settings for a machine without
/// legacy hardware.
pub(crate) const DEFAULT_LINUX_CMDLINE: &str = "console=ttyS0 reboot=k panic=-1 tsc=reliable no_timer_check";

/// The guest's PMU and the host facilities that count its events.
struct BackedPmu {
    model: PmuModel,
    has_pmu: bool,
    own: Option<KvmPmuCapabilities>,
    stepping: SteppingSupport,
    backability: ArchEventSet,
}

/// Returns the machine configuration for `args` on this host. Logs features that are reduced on
/// this host, and automatic choices that may surprise the user.
///
/// # Errors
/// Returns [`RunError`] if an option is unsupported on this host.
pub(super) fn build_config(
    args: &RunArgs,
    kvm: &Kvm,
    probe: &HostPerfCapabilities,
) -> Result<VmConfig, RunError> {
    let free = probe.slots();
    if args.reserve_counters > free.saturating_sub(1) {
        let asked = args.reserve_counters;
        return Err(RunError::Reserve { asked, free });
    }
    let tenant = args.profile == SecurityProfile::Tenant;
    let backed = backed_pmu(args, kvm, probe)?;
    let filter = guest_filter(args, backed.model.vendor())?;
    let backed = if tenant {
        announced(backed, &filter)
    } else {
        backed
    };
    let (mux, turn) = turns(args, kvm, probe)?;
    Ok(VmConfig {
        kernel: kernel_source(args),
        boot_protocol: args.boot_protocol,
        initrd: args.initrd.clone(),
        cmdline: command_line(args) + &builtin_guest_args(args, probe, &backed, &filter),
        cpus: args.cpus,
        memory_bytes: args.memory,
        memory_kind: MemoryBackingConfig {
            // Share the memory with virtiofsd, a separate process that maps it.
            shared: !args.share_dir.is_empty(),
            huge_pages: args.hugepages,
            prealloc: args.prealloc,
        },
        backability: backed.backability,
        own_pmu: backed.own,
        pmu: pmu_config(args, &backed, filter, mux, turn),
        rdpmc: args.rdpmc,
        hide_uncounted: args.hide_uncounted,
        nested: args.nested,
        on_reset: args.on_reset,
        halt_polling: args.halt_poll_ns,
        debugger: args.gdb.as_ref().map(|gdb| DebuggerConfig { wait: gdb.wait }),
        pins: args.pin.clone().unwrap_or_default(),
        cpu_signature: args.cpu_signature,
        debug_exit: !tenant,
        kernel_reader: None,
    })
}

/// Returns the event filter of the guest, from the user's file or the default of the profile.
fn guest_filter(args: &RunArgs, vendor: Vendor) -> Result<EventFilter, RunError> {
    let tenant = args.profile == SecurityProfile::Tenant;
    let filter = match &args.pmu_filter {
        Some(path) => {
            EventFilter::from_open_result(path, input::open(path)).map_err(|source| RunError::Filter {
                path: path.clone(),
                source,
            })?
        }
        None if tenant => EventFilter::architectural(vendor),
        None => EventFilter::allow_all(),
    };
    Ok(if tenant {
        filter.without_paravirtual(vendor)
    } else {
        filter
    })
}

/// Returns the kernel to boot, by default the first built-in guest.
fn kernel_source(args: &RunArgs) -> KernelSource {
    match &args.kernel {
        Some(path) => KernelSource::File(path.clone()),
        None => KernelSource::Packed(
            args.builtin
                .unwrap_or(&guest_images::bare_metal::GUESTS[0])
                .packed,
        ),
    }
}

/// Returns the command line of the guest, without the words that only built-in guests receive.
fn command_line(args: &RunArgs) -> String {
    match (&args.cmdline, &args.kernel) {
        (Some(line), _) => line.clone(),
        (None, Some(_)) => DEFAULT_LINUX_CMDLINE.to_owned(),
        (None, None) => String::new(),
    }
}

/// Returns the configuration of the guest's PMU. `turn` is the length of a multiplexing interval.
fn pmu_config(
    args: &RunArgs,
    backed: &BackedPmu,
    filter: EventFilter,
    mux: MuxPolicy,
    turn: Option<Duration>,
) -> PmuConfig {
    let tenant = args.profile == SecurityProfile::Tenant;
    PmuConfig {
        model: backed.model,
        policy: args.backing,
        saved_policy: None,
        filter: Arc::new(filter),
        paravirtual: !tenant,
        hides_denied: tenant,
        pmi_limit: match args.pmi_limit {
            None => vpmu::DEFAULT_PMI_LIMIT,
            Some(0) => u32::MAX,
            Some(limit) => limit,
        },
        pmi_share: args
            .pmi_share
            .unwrap_or_else(|| PmiShare::default_of(backed.model.vendor())),
        share: args.share,
        mux,
        turn,
        stepping: backed.stepping,
        steps_for_operators: args.operator_steps,
        has_rdpmc_breakpoints: args.rdpmc == RdpmcMode::Hwbp,
        limits: OperatorResourceLimits {
            sample_rate_hz: args.sample_limit,
            ring_bytes: args.ring_memory,
            reserved_slots: args.reserve_counters,
        },
    }
}

/// Returns the guest's PMU and what counts its events. Logs reduced features and conflicts.
fn backed_pmu(args: &RunArgs, kvm: &Kvm, probe: &HostPerfCapabilities) -> Result<BackedPmu, RunError> {
    let policy = args.backing;
    let width = args.pmu_width.map(u32::from);
    let mut model = PmuModel::resolve(args.pmu, args.pmu_counters, width, &mut cpuid::read_host)?;
    let has_pmu = !model.is_off();
    check_pmu_options(args, has_pmu, probe)?;
    let own = if has_pmu && policy == CounterBackingPolicy::Kvm {
        let own = backing::check_own(kvm, probe, args.rdpmc, args.pmi_limit, args.pmi_share)?;
        model = own.model(args.pmu, args.pmu_counters, width)?;
        Some(own)
    } else {
        None
    };
    let is_counters_given = args.pmu_counters.is_some();
    let unreserved = without_reserved(probe, args.reserve_counters);
    let FittedPmuModel {
        model: fitted,
        competition,
    } = fit(model, is_counters_given, policy, own.as_ref(), &unreserved);
    if let Some(line) = competition {
        log::warn!("{line}");
    }
    if has_pmu {
        let fallback = backing::clock_fallback(policy, probe);
        let conflict = backing::mediated_conflict(policy, probe, vpmu_probe::is_mediated());
        for line in [fallback.as_deref(), conflict].into_iter().flatten() {
            log::warn!("{line}");
        }
    }
    let stepping = execution::probe(kvm)?.stepping;
    if has_pmu && policy == CounterBackingPolicy::Exact {
        backing::check_stepping(stepping, args.cpus.max())?;
    }
    let backability = match own {
        Some(own) if fitted.vendor() == Vendor::Intel => own.events,
        _ => {
            let host = HostPmuProperties::vendor(&mut cpuid::read_host);
            backing::countable_events(policy, probe, fitted.vendor(), host)
        }
    };
    // Keep the features that KVM has determined for its own vPMU.
    let model = match own {
        Some(_) => fitted,
        None => fitted.without_uncountable_slots(backability),
    };
    let model = with_branch_records(args, model, stepping)?;
    if model.fixed() != fitted.fixed() {
        log::warn!("fixed counter 3 is omitted, because no backing counts top-down slots");
    }
    Ok(BackedPmu {
        model,
        has_pmu,
        own,
        stepping,
        backability,
    })
}

/// Checks that the options about the PMU go together, and that the host supports the backing. Logs
/// the events that the host denies.
fn check_pmu_options(args: &RunArgs, has_pmu: bool, probe: &HostPerfCapabilities) -> Result<(), RunError> {
    let policy = args.backing;
    if !has_pmu && let Some(option) = option_that_requires_pmu(args) {
        return Err(RunError::WithoutPmu(option));
    }
    if has_pmu {
        backing::check_policy(policy, probe)?;
        if let Some(line) = backing::denied_events(probe) {
            log::warn!("{line}");
        }
    }
    if args.operator_steps && policy != CounterBackingPolicy::Exact {
        return Err(RunError::OperatorSteps);
    }
    if has_pmu && policy == CounterBackingPolicy::Exact && args.gdb.is_some() {
        return Err(RunError::GdbExact);
    }
    Ok(())
}

/// Returns the PMU model with or without branch records, according to `--lbr`. A restored guest
/// keeps its branch records.
fn with_branch_records(
    args: &RunArgs,
    model: PmuModel,
    stepping: SteppingSupport,
) -> Result<PmuModel, BranchRecordsError> {
    let has_breakpoints = args.rdpmc == RdpmcMode::Hwbp;
    let with = if args.backing == CounterBackingPolicy::Kvm {
        model
    } else {
        model.with_branch_records()
    };
    let works = branches::check_records(with, stepping, has_breakpoints);
    match args.lbr {
        Some(false) => Ok(model),
        Some(true) if args.takes_saved_machine() => {
            if let Err(e) = works {
                log::warn!("{e}; the guest's branch records stay empty");
            }
            Ok(with)
        }
        Some(true) => {
            works?;
            if !stepping.user {
                log::warn!(
                    "--lbr on: this host's KVM cannot single-step CPL 3, so the records of user code \
                    stay empty"
                );
            }
            Ok(with)
        }
        // Branch records require decoding of guest code, which the tenant profile enables only on
        // request.
        None if args.profile == SecurityProfile::Tenant => Ok(model),
        None => Ok(if works.is_ok() && stepping.user {
            with
        } else {
            model
        }),
    }
}

/// Removes the events that `filter` denies from the PMU features that are announced to the guest.
fn announced(backed: BackedPmu, filter: &EventFilter) -> BackedPmu {
    let vendor = backed.model.vendor();
    if backed.has_pmu && vendor == Vendor::Amd {
        log::info!(
            "--profile tenant: AMD's CPUID cannot report events that the filter denies; they are \
            removed from Linux's event tables if these are found (--hide-uncounted), and read 0 \
            otherwise"
        );
    }
    BackedPmu {
        backability: backed.backability.and(filter.allowed_events(vendor)),
        ..backed
    }
}

/// Returns an option that has no effect for a guest without a PMU.
fn option_that_requires_pmu(args: &RunArgs) -> Option<&'static str> {
    [
        ("--pmu-filter", args.pmu_filter.is_some()),
        ("--pmi-limit", args.pmi_limit.is_some()),
        ("--pmi-share", args.pmi_share.is_some()),
        ("--lbr", args.lbr.is_some() && !args.takes_saved_machine()),
        ("--backing", args.backing != CounterBackingPolicy::Auto),
        ("--operator-steps", args.operator_steps),
        ("--rdpmc", !matches!(args.rdpmc, RdpmcMode::Auto | RdpmcMode::Off)),
    ]
    .into_iter()
    .find_map(|(option, given)| given.then_some(option))
}

/// Returns `probe` with `reserved` fewer general-purpose counters. The omitted counters remain
/// available for VM-wide events.
fn without_reserved(probe: &HostPerfCapabilities, reserved: usize) -> HostPerfCapabilities {
    let mut probe = probe.clone();
    probe.counters.general = probe.counters.general.saturating_sub(reserved);
    probe
}

/// Returns the multiplexing policy, and the rotation interval if it differs from the tick.
fn turns(
    args: &RunArgs,
    kvm: &Kvm,
    probe: &HostPerfCapabilities,
) -> Result<(MuxPolicy, Option<Duration>), RunError> {
    match (args.mux, args.mux_turn) {
        (MuxPolicyChoice::Fixed(MuxPolicy::Rotate), Some(_)) => Err(RunError::TurnOfRotate),
        (_, Some(turn)) => Ok((MuxPolicy::Adaptive, Some(turn))),
        (choice, None) => Ok(choice.resolve_policy(kvm, probe)),
    }
}

/// Returns the command line words that describe the PMU to a built-in guest; empty for other
/// guests.
fn builtin_guest_args(
    args: &RunArgs,
    probe: &HostPerfCapabilities,
    backed: &BackedPmu,
    filter: &EventFilter,
) -> String {
    if args.kernel.is_some() || !backed.has_pmu {
        return String::new();
    }
    let has = |event| backed.backability.contains(event);
    let by_clock = match args.backing {
        CounterBackingPolicy::Clock => true,
        CounterBackingPolicy::Auto => probe.slots() == 0,
        _ => false,
    };
    [
        // Events without backing are announced as unsupported, so that the guest's test does not
        // fail.
        (
            " no-user",
            args.backing == CounterBackingPolicy::Exact && !backed.stepping.user,
        ),
        // With the clock backing, the guest's test compares cycles with the TSC frequency.
        (" clock", by_clock),
        // CPUID announces available events to Intel guests only, so other guests need these words.
        (" has-instructions", has(ArchEvent::Instructions)),
        (" has-branches", has(ArchEvent::Branches)),
        (" no-cycles", !has(ArchEvent::CoreCycles)),
    ]
    .into_iter()
    .filter_map(|(word, holds)| holds.then_some(word))
    .chain(denied_event_words(backed.model.vendor(), filter))
    .collect()
}

/// Returns the command line words that tell the built-in guest which events of its table `filter`
/// denies.
fn denied_event_words(vendor: Vendor, filter: &EventFilter) -> impl Iterator<Item = &'static str> {
    let general = |select, umask| EventSelection::General(EventSelect(select), UnitMask(umask));
    let (cycles, branches, paravirtual) = match vendor {
        Vendor::Intel => (0x3C, 0xC4, 0xFF),
        Vendor::Amd => (0x76, 0xC2, 0xFFF),
    };
    let steal_ns = 11;
    [
        (" denied-cycles", general(cycles, 0)),
        (" denied-instructions", general(0xC0, 0)),
        (" denied-branches", general(branches, 0)),
        (" denied-cycles-fixed", EventSelection::Fixed(1)),
        (" denied-ref-cycles-fixed", EventSelection::Fixed(2)),
        (" denied-steal-ns", general(paravirtual, steal_ns)),
    ]
    .into_iter()
    .filter_map(move |(word, selection)| (!filter.allows(selection)).then_some(word))
}

/// Returns the configuration of a machine that is restored from `saved`, or of a new machine.
///
/// # Errors
/// Returns the errors of [`build_config`], and [`RunError::RestoredFilter`] for an invalid event
/// filter.
pub(super) fn restored_config(
    args: &RunArgs,
    kvm: &Kvm,
    probe: &HostPerfCapabilities,
    saved: Option<&SavedMachine>,
) -> Result<VmConfig, RunError> {
    let mut config = build_config(args, kvm, probe)?;
    if let Some(saved) = saved {
        let filter = event_filter(&saved.filter).map_err(RunError::RestoredFilter)?;
        config.pmu.filter = Arc::new(filter);
        config.pmu.saved_policy = Some(saved_backing(&saved.options));
        config.backability = announced_events(saved).unwrap_or(config.backability);
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_guest_reports_denied_events() {
        let words = |filter: &EventFilter, vendor| denied_event_words(vendor, filter).collect::<String>();
        assert_eq!(words(&EventFilter::allow_all(), Vendor::Intel), "");
        let toml = "action = \"allow\"\nfixed-counters = 2\nevents = [{ select = 0x3C, umask = 0 }]";
        let filter = EventFilter::from_toml(toml).unwrap();
        assert_eq!(
            words(&filter, Vendor::Intel),
            " denied-instructions denied-branches denied-ref-cycles-fixed denied-steal-ns"
        );
        let tenant = EventFilter::architectural(Vendor::Amd).without_paravirtual(Vendor::Amd);
        assert_eq!(words(&tenant, Vendor::Amd), " denied-steal-ns");
    }
}
