//! `perfvisor validate`: the command around the crate `validate`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use perf_core::pmu::host::HostProbe;
use vpmu::{ArchEvent, BackingPolicy, Generation, HostPmu, Model, ModelName};

use super::print;
use crate::exit::ExitStatus;
use crate::signals::StopSignals;
use ::validate::child::ChildError;
use ::validate::{Host, KvmSeen, LinuxFiles, Options, Stop};
use perfvisor_vmm::kvm::own_pmu::OwnPmu;
use perfvisor_vmm::kvm::stepping;
use perfvisor_vmm::kvm::{cpuid, host};
use perfvisor_vmm::pmu::backing;
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
    #[arg(long, value_name = "BACKING", default_value = "all", value_parser = parse_backing)]
    pub backing: ValidatedBacking,
    /// How far counts of time may be off.
    #[arg(long, value_name = "PERCENT", default_value = "2", value_parser = parse_tolerance)]
    pub tolerance: f64,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

fn parse_pmu(text: &str) -> Result<String, String> {
    let name: ModelName = text.parse().map_err(|e: vpmu::ModelError| e.to_string())?;
    let model = Model::resolve(name, None, None, &mut cpuid::read_host).map_err(|e| e.to_string())?;
    match model.generation() {
        Generation::Off(_) => Err("there is nothing to validate without a PMU; choose intel or amd".into()),
        _ => Ok(text.to_owned()),
    }
}

/// What is validated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValidatedBacking {
    /// All that Perfvisor counts with on this host.
    All,
    /// KVM's own vPMU.
    Kvm,
}

fn parse_backing(text: &str) -> Result<ValidatedBacking, String> {
    match text {
        "all" => Ok(ValidatedBacking::All),
        "kvm" => Ok(ValidatedBacking::Kvm),
        _ => Err("must be all or kvm".into()),
    }
}

fn parse_tolerance(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(percent) if (0.0..=50.0).contains(&percent) => Ok(percent),
        _ => Err("must be a number of percent, 0 to 50".into()),
    }
}

/// Validates.
///
/// # Errors
/// One line for the user: bad input, or a guest that could not be measured.
pub fn validate(args: &ValidateArgs) -> Result<ExitStatus, String> {
    let signals = StopSignals::block().map_err(|e| format!("the signals that end it: {e}"))?;
    let stop: Stop = Arc::new(move || signals.take().is_some());
    for file in [&args.kernel, &args.initrd].into_iter().flatten() {
        std::fs::File::open(file).map_err(|e| format!("{}: {e}", file.display()))?;
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
    let report = match ::validate::run(&options, &host, &stop) {
        Ok(report) => report,
        Err(ChildError::Interrupted) => return Ok(ExitStatus::Terminated),
        Err(e) => return Err(e.to_string()),
    };
    if args.json {
        let text = serde_json::to_string_pretty(&report).map_err(|e| e.to_string())?;
        print(&(text + "\n"))?;
    } else {
        print(&report.text())?;
    }
    Ok(if report.is_good() {
        ExitStatus::PoweredOff
    } else {
        ExitStatus::CheckFailed
    })
}

/// What this host has, found out by trying, and whether it runs Linux.
fn probe_host(pmu: &str, own: Option<&OwnPmu>) -> Result<(Host, bool), String> {
    let kvm = host::open().map_err(|e| e.to_string())?;
    let facts = host::facts(&kvm).map_err(|e| e.to_string())?;
    let tsc_hz = host::tsc_hz(&kvm).map_err(|e| format!("KVM does not tell the TSC's frequency: {e}"))?;
    let probe = HostProbe::run();
    let stepping = stepping::probe(&kvm).map_err(|e| e.to_string())?;
    let refused = |policy| backing::check_policy(policy, &probe).err().map(|e| e.to_string());
    let vendor = HostPmu::vendor(&mut cpuid::read_host);
    let hardware = backing::backability(BackingPolicy::Hardware, &probe, vendor, vendor);
    let model = guest_pmu(pmu, own, &probe).unwrap_or_else(|| pmu.to_owned());
    let host = Host {
        kvm: KvmSeen {
            facts: serde_json::to_value(facts).map_err(|e| e.to_string())?,
            flavour: facts.flavour.to_string(),
        },
        guest_pmu: model,
        slots: fit::slots(&probe.counters),
        no_hardware: probe.no_slots_because.clone().filter(|_| !probe.hardware_pmu),
        no_clock: refused(BackingPolicy::Clock),
        no_exact: backing::check_stepping(stepping, 1).err().map(|e| e.to_string()),
        tsc_hz,
        steps_user: stepping.user,
        hardware_events: ArchEvent::ALL.into_iter().filter(|e| hardware.has(*e)).collect(),
        probe,
    };
    Ok((host, facts.runs_linux))
}

/// The guests' PMU as it comes out on this host.
fn guest_pmu(pmu: &str, own: Option<&OwnPmu>, probe: &HostProbe) -> Option<String> {
    let name = pmu.parse::<ModelName>().ok()?;
    let model = match own {
        Some(own) => fit(
            own.model(name, None, None).ok()?,
            false,
            BackingPolicy::Kvm,
            Some(own),
            probe,
        ),
        None => {
            let model = Model::resolve(name, None, None, &mut cpuid::read_host).ok()?;
            fit(model, false, BackingPolicy::Auto, None, probe)
        }
    };
    Some(model.model.to_string())
}

/// KVM's own vPMU, if this host has it and it can be what is asked for.
fn own_pmu(args: &ValidateArgs) -> Result<OwnPmu, String> {
    let kvm = host::open().map_err(|e| e.to_string())?;
    let probe = HostProbe::run();
    let own = backing::check_own(&kvm, &probe, RdpmcMode::Trap, None).map_err(|e| e.to_string())?;
    let name: ModelName = args.pmu.parse().map_err(|e: vpmu::ModelError| e.to_string())?;
    own.model(name, None, None).map_err(|e| e.to_string())?;
    if own.mediated {
        return Err(
            "--backing kvm: the vPMU is mediated, and the host's own counts that it would be compared with are refused beside it; \
             load the module with enable_mediated_pmu=0"
                .into(),
        );
    }
    Ok(own)
}

/// The Linux guest that is to run, or why none does.
fn linux_guest(
    args: &ValidateArgs,
    runs_linux: bool,
) -> Result<(Option<LinuxFiles>, Option<String>), String> {
    if args.no_linux {
        return Ok((None, Some("--no-linux".into())));
    }
    if let (Some(kernel), Some(initrd)) = (&args.kernel, &args.initrd) {
        if !runs_linux {
            return Err(
                "this host's KVM emulates guest kernels and cannot run Linux: leave --kernel out, or use the lab (make lab)"
                    .into(),
            );
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
    fn a_tolerance_is_a_percentage() {
        assert_eq!(parse_tolerance("0.5"), Ok(0.5));
        for bad in ["", "-1", "51", "x", "NaN", "inf"] {
            assert!(parse_tolerance(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_pmu_that_is_none_cannot_be_validated() {
        assert!(parse_pmu("intel").is_ok() && parse_pmu("amd-v2").is_ok());
        assert!(parse_pmu("off").unwrap_err().contains("intel or amd"));
        assert!(parse_pmu("sparc").is_err());
    }
}
