//! `perfvisor validate`: proves on this host that what guests count is true.
//!
//! Guests run in processes of their own and do work whose counts are known, or are measured apart. Each count is read three
//! ways: by the guest, by the host of the same counter, and as what it must be. The judge compares them.
//!
//! | module | story |
//! |---|---|
//! | [`judge`] | from numbers to a verdict |
//! | [`report`] | rows, their table, the summary |
//! | [`child`] | a VM in a process of its own |
//! | [`procfs`] | what the host's kernel says of vCPU threads |
//! | [`guest`] | the built-in guest that measures |
//! | `builtin` | what is measured with it |
//! | `linux` | what is measured with perf in a Linux guest |

mod builtin;
pub mod child;
pub mod guest;
pub mod judge;
mod linux;
pub mod procfs;
pub mod report;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use kvm_ioctls::Kvm;
use perf_core::pmu::host::HostProbe;
use vpmu::{ArchEvent, BackingPolicy, HostPmu, Model, ModelName};

use crate::kvm::cpuid;
use crate::kvm::host::{self, KvmFacts};
use crate::kvm::own_pmu::OwnPmu;
use crate::kvm::stepping;
use crate::pmu::backing;
use crate::pmu::fit::{self, fit};
use crate::signals::StopSignals;
use child::ChildError;
use report::{Report, Summary};

/// What is to be validated.
#[derive(Clone, Debug)]
pub struct Options {
    /// The guest's PMU, as for `--pmu`.
    pub pmu: String,
    /// How far counts of time may be off, in percent.
    pub tolerance_percent: f64,
    /// A Linux kernel and its initrd, if the Linux guest is to run.
    pub linux: Option<LinuxFiles>,
    /// Why it is not.
    pub linux_skipped: Option<String>,
    /// With this, what is validated is KVM's own vPMU.
    pub own_pmu: Option<OwnPmu>,
}

/// The Linux guest's files.
#[derive(Clone, Debug)]
pub struct LinuxFiles {
    /// vmlinux or bzImage.
    pub kernel: PathBuf,
    /// An initrd of `make guest`.
    pub initrd: PathBuf,
}

/// What this host has.
#[derive(Debug)]
pub struct Host {
    /// KVM.
    pub kvm: KvmFacts,
    /// perf events.
    pub probe: HostProbe,
    /// Why there is no hardware backing.
    pub no_hardware: Option<String>,
    /// Why there is no clock backing.
    pub no_clock: Option<String>,
    /// Why there is no exact backing.
    pub no_exact: Option<String>,
    /// Frequency of a guest's TSC, as KVM gives it.
    pub tsc_hz: u64,
    /// CPL 3 can be stepped.
    pub steps_user: bool,
    /// What the host's PMU counts.
    pub hardware_events: Vec<ArchEvent>,
}

impl Host {
    /// Found out by trying.
    ///
    /// # Errors
    /// One line when no guest can run.
    pub fn probe() -> Result<Self, String> {
        let kvm = host::open().map_err(|e| e.to_string())?;
        let facts = host::facts(&kvm).map_err(|e| e.to_string())?;
        let tsc_hz = tsc_hz(&kvm).map_err(|e| format!("KVM does not tell the TSC's frequency: {e}"))?;
        let probe = HostProbe::run();
        let stepping = stepping::probe(&kvm).map_err(|e| e.to_string())?;
        let refused = |policy| backing::check_policy(policy, &probe).err().map(|e| e.to_string());
        let vendor = HostPmu::vendor(&mut cpuid::read_host);
        let hardware = backing::backability(BackingPolicy::Hardware, &probe, vendor, vendor);
        Ok(Self {
            kvm: facts,
            no_hardware: probe.no_slots_because.clone().filter(|_| !probe.hardware_pmu),
            no_clock: refused(BackingPolicy::Clock),
            no_exact: backing::check_stepping(stepping, 1).err().map(|e| e.to_string()),
            tsc_hz,
            steps_user: stepping.user,
            hardware_events: ArchEvent::ALL.into_iter().filter(|e| hardware.has(*e)).collect(),
            probe,
        })
    }
}

/// Measures everything.
///
/// # Errors
/// When a guest could not be measured at all.
pub fn run(options: &Options, host: &Host, signals: &Arc<StopSignals>) -> Result<Report, ChildError> {
    let start = Instant::now();
    let builtin = builtin::Builtin {
        options,
        host,
        signals,
    };
    let mut rows = builtin.rows()?;
    let mut summary = summary(options, host);
    if let Some(files) = &options.linux {
        let linux = linux::Linux {
            options,
            host,
            signals,
            files,
        };
        rows.extend(linux.rows(&mut summary)?);
    }
    summary.guest_tsc_hz = host.tsc_hz;
    summary.linux_guest_skipped = options.linux_skipped.clone();
    summary.seconds = start.elapsed().as_secs_f64();
    Ok(Report::new(rows, summary))
}

/// What KVM_GET_TSC_KHZ says.
fn tsc_hz(kvm: &Kvm) -> Result<u64, kvm_ioctls::Error> {
    let khz = kvm.create_vm()?.create_vcpu(0)?.get_tsc_khz()?;
    Ok(u64::from(khz) * 1000)
}

fn summary(options: &Options, host: &Host) -> Summary {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let pmu = options.pmu.parse::<ModelName>().ok().and_then(|name| {
        let model = match &options.own_pmu {
            Some(own) => {
                let model = own.model(name, None, None).ok()?;
                fit(model, false, BackingPolicy::Kvm, Some(own), &host.probe).model
            }
            None => {
                let model = Model::resolve(name, None, None, &mut cpuid::read_host).ok()?;
                fit(model, false, BackingPolicy::Auto, None, &host.probe).model
            }
        };
        Some(model.to_string())
    });
    let pmu = pmu.unwrap_or_else(|| options.pmu.clone());
    Summary {
        perfvisor: env!("CARGO_PKG_VERSION").into(),
        host_kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        host_cpu: field("model name").unwrap_or_else(|| "unknown processor".into()),
        host_cpus: std::thread::available_parallelism().map_or(1, usize::from),
        host_is_virtual: field("flags")
            .is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
        kvm: Some(host.kvm),
        host_pmu: match &host.no_hardware {
            Some(why) => format!("none ({why})"),
            None => fit::slots(&host.probe.counters),
        },
        perf_event_paranoid: host.probe.paranoid,
        pmu,
        ..Summary::default()
    }
}
