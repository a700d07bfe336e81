//! `perfvisor validate`: the command around the crate `validate`.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use perf_core::pmu::host::HostProbe;
use vpmu::{ArchEvent, BackingPolicy, Generation, HostPmu, ModelError, PmuModel, PmuModelName};

use super::{OutputError, print};
use crate::exit::ExitStatus;
use crate::input;
use crate::signals::StopSignals;
use crate::values::{ValidatedBacking, parse_tolerance, parse_validated};
use ::validate::child::ChildError;
use ::validate::report::{ReportRow, ReportText};
use ::validate::{Host, KvmSummary, LinuxFiles, Options, Stop};
use perf_core::error_line;
use perfvisor_vmm::kvm::host::HostError;
use perfvisor_vmm::kvm::own_pmu::{KvmPmuOffer, KvmVpmuModelError};
use perfvisor_vmm::kvm::stepping;
use perfvisor_vmm::kvm::{cpuid, host};
use perfvisor_vmm::pmu::backing::{self, BackingError};
use perfvisor_vmm::pmu::fit::{self, fit};
use perfvisor_vmm::rdpmc::RdpmcMode;

const EXIT_STATUS_HELP: &str = "\
Exit status:
  0   nothing failed
  1   something failed
  2   bad input: an option, a file, or a host that cannot run guests
  10  SIGTERM or SIGINT";

/// `perfvisor validate`.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXIT_STATUS_HELP)]
pub struct ValidateArgs {
    /// Kernel of the Linux guest. Without it that of `make guest` is taken, if there is one.
    #[arg(long, value_name = "FILE", requires = "initrd")]
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk of the Linux guest, as `make guest` makes it.
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub initrd: Option<PathBuf>,
    /// The built-in guest only.
    #[arg(long, conflicts_with = "kernel")]
    pub no_linux: bool,
    /// Virtual PMU of the guests: as for perfvisor run, but not off.
    #[arg(long, value_name = "MODEL", default_value = "auto", value_parser = parse_pmu)]
    pub pmu: String,
    /// What is to count for the guests' counters: all (each that this host has, but for KVM's own vPMU), or
    /// kvm (KVM's own vPMU).
    #[arg(long, value_name = "BACKING", default_value = "all", value_parser = parse_validated)]
    pub backing: ValidatedBacking,
    /// How far counts of time may be off.
    #[arg(long, value_name = "PERCENT", default_value = "2", value_parser = parse_tolerance)]
    pub tolerance: f64,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// A virtual PMU that cannot be validated.
#[derive(Debug, thiserror::Error)]
pub enum PmuError {
    /// No such model.
    #[error(transparent)]
    PmuModel(#[from] ModelError),
    /// None.
    #[error("there is nothing to validate without a PMU; choose intel or amd")]
    Off,
}

fn parse_pmu(text: &str) -> Result<String, PmuError> {
    let model = PmuModel::resolve(text.parse()?, None, None, &mut cpuid::read_host)?;
    match model.generation() {
        Generation::Off(_) => Err(PmuError::Off),
        _ => Ok(text.to_owned()),
    }
}

/// Why nothing was validated, or not all.
#[derive(Debug, thiserror::Error)]
pub enum ValidateError {
    /// Signals cannot be waited for.
    #[error("the signals that end it")]
    Signals(#[source] io::Error),
    /// A file that was named.
    #[error("{}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: io::Error,
    },
    /// KVM cannot be used.
    #[error(transparent)]
    Host(#[from] HostError),
    /// KVM's own vPMU cannot be had.
    #[error(transparent)]
    Backing(#[from] BackingError),
    /// No such model.
    #[error(transparent)]
    PmuModel(#[from] ModelError),
    /// KVM's own vPMU is another.
    #[error(transparent)]
    OwnModel(#[from] KvmVpmuModelError),
    /// The host's own counts are refused beside it.
    #[error(
        "--backing kvm: the vPMU is mediated, and the host's own counts that it would be compared with are refused \
         beside it; load the module with enable_mediated_pmu=0"
    )]
    Mediated,
    /// No Linux on this KVM.
    #[error(
        "this host's KVM emulates guest kernels and cannot run Linux: leave --kernel out, or use the lab (make lab)"
    )]
    NoLinux,
    /// A guest could not be measured.
    #[error(transparent)]
    Child(#[from] ChildError),
    /// What was printed is not complete.
    #[error(transparent)]
    Output(#[from] OutputError),
}

/// Validates.
///
/// # Errors
/// [`ValidateError`]: bad input, or a guest that could not be measured.
pub fn validate(args: &ValidateArgs) -> Result<ExitStatus, ValidateError> {
    let signals = StopSignals::block().map_err(ValidateError::Signals)?;
    let stop: Stop = Arc::new(move || signals.take().is_some());
    for file in [&args.kernel, &args.initrd].into_iter().flatten() {
        input::can_be_read(file).map_err(|source| ValidateError::File {
            path: file.clone(),
            source,
        })?;
    }
    // A refusal comes alone, before what the other backings are warned about.
    let own_pmu = match args.backing {
        ValidatedBacking::All => None,
        ValidatedBacking::Kvm => Some(own_pmu(args)?),
    };
    let (host, runs_linux) = probe_host(&args.pmu, own_pmu.as_ref())?;
    let (linux, linux_skipped) = linux_guest(args, runs_linux)?;
    let options = Options {
        pmu: args.pmu.clone(),
        tolerance_percent: args.tolerance,
        linux,
        linux_skipped,
        own_pmu: own_pmu.is_some(),
    };
    let mut text = ReportText::default();
    let mut printed = Ok(());
    // Each row as soon as it is measured: all of them take minutes.
    let mut on_row = |row: &ReportRow| {
        if !args.json && printed.is_ok() {
            printed = print(&text.row(row));
        }
    };
    let report = match ::validate::run(&options, &host, &stop, &mut on_row) {
        Ok(report) => report,
        Err(ChildError::Interrupted) => return Ok(ExitStatus::Terminated),
        Err(e) => return Err(e.into()),
    };
    printed?;
    if args.json {
        let text = serde_json::to_string_pretty(&report).map_err(OutputError::from)?;
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

/// What this host has, found out by trying, and whether it runs Linux.
fn probe_host(pmu: &str, own: Option<&KvmPmuOffer>) -> Result<(Host, bool), ValidateError> {
    let kvm = host::open()?;
    let facts = host::facts(&kvm)?;
    let tsc_hz = host::tsc_hz(&kvm)?;
    let probe = HostProbe::run();
    let stepping = stepping::probe(&kvm)?;
    let refused = |policy| {
        backing::check_policy(policy, &probe)
            .err()
            .map(|e| error_line(&e))
    };
    let vendor = HostPmu::vendor(&mut cpuid::read_host);
    let hardware = backing::backability(BackingPolicy::Hardware, &probe, vendor, vendor);
    let model = guest_pmu(pmu, own, &probe).unwrap_or_else(|| pmu.to_owned());
    let host = Host {
        kvm: KvmSummary {
            facts: serde_json::to_value(facts).map_err(OutputError::from)?,
            flavour: facts.flavour.to_string(),
        },
        guest_pmu: model,
        slots: fit::slots(&probe.counters),
        no_hardware: probe.no_slots_because.clone().filter(|_| !probe.hardware_pmu),
        no_clock: refused(BackingPolicy::Clock),
        no_exact: backing::check_stepping(stepping, 1).err().map(|e| error_line(&e)),
        tsc_hz,
        steps_user: stepping.user,
        hardware_events: ArchEvent::ALL.into_iter().filter(|e| hardware.has(*e)).collect(),
        probe,
    };
    Ok((host, facts.runs_linux))
}

/// The guests' PMU as it comes out on this host.
fn guest_pmu(pmu: &str, own: Option<&KvmPmuOffer>, probe: &HostProbe) -> Option<String> {
    let name = pmu.parse::<PmuModelName>().ok()?;
    let model = match own {
        Some(own) => fit(
            own.model(name, None, None).ok()?,
            false,
            BackingPolicy::Kvm,
            Some(own),
            probe,
        ),
        None => {
            let model = PmuModel::resolve(name, None, None, &mut cpuid::read_host).ok()?;
            fit(model, false, BackingPolicy::Auto, None, probe)
        }
    };
    Some(model.model.to_string())
}

/// KVM's own vPMU, if this host has it and it can be what is asked for.
fn own_pmu(args: &ValidateArgs) -> Result<KvmPmuOffer, ValidateError> {
    let kvm = host::open()?;
    let probe = HostProbe::run();
    let own = backing::check_own(&kvm, &probe, RdpmcMode::Trap, None)?;
    let name: PmuModelName = args.pmu.parse()?;
    own.model(name, None, None)?;
    if own.mediated {
        return Err(ValidateError::Mediated);
    }
    Ok(own)
}

/// The Linux guest that is to run, or why none does.
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

/// The images of `make guest`: below the directory of the build this program is from, or below the current
/// one.
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
    fn a_pmu_that_is_none_cannot_be_validated() {
        assert!(parse_pmu("intel").is_ok() && parse_pmu("amd-v2").is_ok());
        assert!(parse_pmu("off").unwrap_err().to_string().contains("intel or amd"));
        assert!(parse_pmu("sparc").is_err());
    }
}
