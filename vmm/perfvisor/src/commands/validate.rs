//! `perfvisor validate`: the command line of the crate `validate`.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use perf_core::pmu::host::HostPerfCapabilities;
use vpmu::{
    ArchEvent, CounterBackingPolicy, HostPmuProperties, PmuGeneration, PmuModel, PmuModelError, PmuModelName,
};

use crate::values::{ValidatedCounterBackings, parse_tolerance, parse_validated};
use ::validate::child::VmMeasurementError;
use ::validate::report::{ValidationReportFormatter, ValidationRow};
use ::validate::{HostProperties, KvmSummary, LinuxFiles, StopRequestedCheck, ValidateOptions};
use guest_patching::rdpmc::RdpmcMode;
use operator::commands::{CommandOutputError, print};
use operator::exit::ExitStatus;
use operator::input;
use operator::signals::StopSignals;
use perf_core::error_line;
use vmm::kvm::execution;
use vmm::kvm::host::KvmHostError;
use vmm::kvm::vpmu_probe::{KvmPmuCapabilities, KvmVpmuModelError};
use vmm::kvm::{cpuid, host};
use vmm::pmu::backing::{self, CounterBackingError};
use vmm::pmu::fit::{self, fit};

const EXIT_STATUS_HELP: &str = "\
Exit status:
  0   all checks passed
  1   a check failed
  2   invalid option or file, or a host that cannot run guests
  10  SIGTERM or SIGINT

Example: perfvisor validate --backing all";

/// `perfvisor validate`.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXIT_STATUS_HELP)]
pub struct ValidateArgs {
    /// Boot this Linux kernel [default: that of `make guest`, if it exists]
    #[arg(long, value_name = "FILE", requires = "initrd")]
    pub kernel: Option<PathBuf>,
    /// Boot with this initial RAM disk, as made by `make guest`.
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub initrd: Option<PathBuf>,
    /// Run the built-in guest only.
    #[arg(long, conflicts_with = "kernel")]
    pub no_linux: bool,
    /// Select the virtual PMU of the guests, as for perfvisor run; off is not allowed.
    #[arg(long, value_name = "MODEL", default_value = "auto", value_parser = parse_pmu)]
    pub pmu: String,
    /// Select the backings to validate: all (all that this host has, except KVM's own vPMU) or kvm
    /// (KVM's own vPMU).
    #[arg(long, value_name = "BACKING", default_value = "all", value_parser = parse_validated)]
    pub backing: ValidatedCounterBackings,
    /// Set the tolerance for counts of time, in percent.
    #[arg(long, value_name = "PERCENT", default_value = "2", value_parser = parse_tolerance)]
    pub tolerance: f64,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// Error returned when the value of `perfvisor validate --pmu` is invalid.
#[derive(Debug, thiserror::Error)]
pub enum PmuOptionError {
    #[error(transparent)]
    PmuModel(#[from] PmuModelError),
    #[error("there is nothing to validate without a PMU; choose intel or amd")]
    Off,
}

fn parse_pmu(text: &str) -> Result<String, PmuOptionError> {
    let model = PmuModel::resolve(text.parse()?, None, None, &mut cpuid::read_host)?;
    match model.generation() {
        PmuGeneration::Off(_) => Err(PmuOptionError::Off),
        _ => Ok(text.to_owned()),
    }
}

/// Error returned when `perfvisor validate` fails.
#[derive(Debug, thiserror::Error)]
pub enum ValidateError {
    #[error("signal handling")]
    Signals(#[source] io::Error),
    #[error("{}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Host(#[from] KvmHostError),
    #[error(transparent)]
    Backing(#[from] CounterBackingError),
    #[error(transparent)]
    PmuModel(#[from] PmuModelError),
    #[error(transparent)]
    OwnModel(#[from] KvmVpmuModelError),
    #[error(
        "--backing kvm: the vPMU is mediated, and the host cannot count for comparison at the same \
        time; load the module with enable_mediated_pmu=0"
    )]
    Mediated,
    #[error(
        "this host's KVM emulates guest kernels and cannot run Linux; omit --kernel, or use the lab (make lab)"
    )]
    NoLinux,
    #[error(transparent)]
    Child(#[from] VmMeasurementError),
    #[error(transparent)]
    Output(#[from] CommandOutputError),
}

/// Validates the counts of the selected backings on this host, and prints a report.
///
/// # Errors
/// Returns [`ValidateError`] if the input is invalid or a guest cannot be measured.
pub fn validate(args: &ValidateArgs) -> Result<ExitStatus, ValidateError> {
    let signals = StopSignals::block().map_err(ValidateError::Signals)?;
    let stop: StopRequestedCheck = Arc::new(move || signals.take().is_some());
    for file in [&args.kernel, &args.initrd].into_iter().flatten() {
        input::can_be_read(file).map_err(|source| ValidateError::File {
            path: file.clone(),
            source,
        })?;
    }
    // Report a rejected KVM vPMU before warnings about the other backings.
    let own_pmu = match args.backing {
        ValidatedCounterBackings::All => None,
        ValidatedCounterBackings::Kvm => Some(own_pmu(args)?),
    };
    let (host, runs_linux) = probe_host(&args.pmu, own_pmu.as_ref())?;
    let (linux, linux_skipped) = linux_guest(args, runs_linux)?;
    let options = ValidateOptions {
        pmu: args.pmu.clone(),
        tolerance_percent: args.tolerance,
        linux,
        linux_skipped,
        own_pmu: own_pmu.is_some(),
    };
    let mut text = ValidationReportFormatter::default();
    let mut printed = Ok(());
    // Print rows as soon as they are measured, because a complete run takes minutes.
    let mut on_row = |row: &ValidationRow| {
        if !args.json && printed.is_ok() {
            printed = print(&text.row(row));
        }
    };
    let report = match ::validate::run(&options, &host, &stop, &mut on_row) {
        Ok(report) => report,
        Err(VmMeasurementError::Interrupted) => return Ok(ExitStatus::Terminated),
        Err(e) => return Err(e.into()),
    };
    printed?;
    if args.json {
        let text = serde_json::to_string_pretty(&report).map_err(CommandOutputError::from)?;
        print(&(text + "\n"))?;
    } else {
        print(&text.end(&report))?;
    }
    Ok(if report.is_good() {
        ExitStatus::PoweredOff
    } else {
        ExitStatus::CheckFailed
    })
}

/// Returns the properties of the host, and whether it can run Linux guests with a PMU.
fn probe_host(pmu: &str, own: Option<&KvmPmuCapabilities>) -> Result<(HostProperties, bool), ValidateError> {
    let kvm = host::open()?;
    let facts = execution::facts(&kvm)?;
    let tsc_hz = host::tsc_hz(&kvm)?;
    let probe = HostPerfCapabilities::run();
    let stepping = execution::probe(&kvm)?.stepping;
    let refused = |policy| {
        backing::check_policy(policy, &probe)
            .err()
            .map(|e| error_line(&e))
    };
    let vendor = HostPmuProperties::vendor(&mut cpuid::read_host);
    let hardware = backing::countable_events(CounterBackingPolicy::Hardware, &probe, vendor, vendor);
    let model = guest_pmu(pmu, own, &probe).unwrap_or_else(|| pmu.to_owned());
    let host = HostProperties {
        kvm: KvmSummary {
            facts: serde_json::to_value(facts).map_err(CommandOutputError::from)?,
            flavour: facts.flavour.to_string(),
        },
        guest_pmu: model,
        slots: fit::slots(&probe.counters),
        no_hardware: probe.no_slots_because.clone().filter(|_| !probe.hardware_pmu),
        no_clock: refused(CounterBackingPolicy::Clock),
        no_exact: backing::check_stepping(stepping, 1).err().map(|e| error_line(&e)),
        tsc_hz,
        steps_user: stepping.user,
        hardware_events: ArchEvent::ALL
            .into_iter()
            .filter(|e| hardware.contains(*e))
            .collect(),
        probe,
    };
    Ok((host, facts.runs_linux))
}

/// Returns the description of the PMU that guests have on this host.
fn guest_pmu(pmu: &str, own: Option<&KvmPmuCapabilities>, probe: &HostPerfCapabilities) -> Option<String> {
    let name = pmu.parse::<PmuModelName>().ok()?;
    let model = match own {
        Some(own) => fit(
            own.model(name, None, None).ok()?,
            false,
            CounterBackingPolicy::Kvm,
            Some(own),
            probe,
        ),
        None => {
            let model = PmuModel::resolve(name, None, None, &mut cpuid::read_host).ok()?;
            fit(model, false, CounterBackingPolicy::Auto, None, probe)
        }
    };
    Some(model.model.to_string())
}

/// Returns the capabilities of KVM's own vPMU.
///
/// # Errors
/// Returns [`ValidateError`] if KVM has no vPMU, its vPMU is mediated, or it does not support the
/// model given by `--pmu`.
fn own_pmu(args: &ValidateArgs) -> Result<KvmPmuCapabilities, ValidateError> {
    let kvm = host::open()?;
    let probe = HostPerfCapabilities::run();
    let own = backing::check_own(&kvm, &probe, RdpmcMode::Trap, None, None)?;
    let name: PmuModelName = args.pmu.parse()?;
    own.model(name, None, None)?;
    if own.mediated {
        return Err(ValidateError::Mediated);
    }
    Ok(own)
}

/// Returns the Linux guest to run, or the reason no Linux guest is run.
fn linux_guest(
    args: &ValidateArgs,
    runs_linux: bool,
) -> Result<(Option<LinuxFiles>, Option<String>), ValidateError> {
    if args.no_linux {
        return Ok((None, Some("--no-linux".into())));
    }
    if let (Some(kernel), Some(initrd)) = (&args.kernel, &args.initrd) {
        if !runs_linux {
            return Err(ValidateError::NoLinux);
        }
        let (kernel, initrd) = (kernel.clone(), initrd.clone());
        return Ok((Some(LinuxFiles { kernel, initrd }), None));
    }
    if !runs_linux {
        return Ok((None, Some("this host's KVM cannot run Linux".into())));
    }
    Ok(match found_images() {
        Some(files) => (Some(files), None),
        None => (
            None,
            Some("no images: make guest, or --kernel and --initrd".into()),
        ),
    })
}

/// Returns the images created by `make guest`, located below the build directory of this program or
/// below the current directory.
fn found_images() -> Option<LinuxFiles> {
    let program = std::env::current_exe().ok();
    let build = program.as_deref().and_then(Path::parent).and_then(Path::parent);
    let places = [build.map(Path::to_owned), Some(PathBuf::from("target"))];
    places.into_iter().flatten().find_map(|target| {
        let dir = target.join("guest/cloud");
        let files = LinuxFiles {
            kernel: dir.join("vmlinux"),
            initrd: dir.join("initrd"),
        };
        (files.kernel.is_file() && files.initrd.is_file()).then_some(files)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_pmu_cannot_be_validated() {
        assert!(parse_pmu("intel").is_ok() && parse_pmu("amd-v2").is_ok());
        assert!(parse_pmu("off").unwrap_err().to_string().contains("intel or amd"));
        assert!(parse_pmu("sparc").is_err());
    }
}
