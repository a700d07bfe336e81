//! What is to be validated, and on what.

use std::path::PathBuf;
use std::sync::Arc;

use perf_core::pmu::host::HostProbe;
use serde::Serialize;
use vpmu::ArchEvent;

/// Whether the user has asked to end.
pub type Stop = Arc<dyn Fn() -> bool + Send + Sync>;

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
    /// What is validated is KVM's own vPMU.
    pub own_pmu: bool,
}

/// The Linux guest's files.
#[derive(Clone, Debug)]
pub struct LinuxFiles {
    /// vmlinux or bzImage.
    pub kernel: PathBuf,
    /// An initrd of `make guest`.
    pub initrd: PathBuf,
}

/// What is known of the host's KVM, as far as the report shows it.
#[derive(Clone, Debug, Serialize)]
pub struct KvmSeen {
    /// All that is known, for programs.
    #[serde(flatten)]
    pub facts: serde_json::Value,
    /// How guest code is run, in words.
    #[serde(skip)]
    pub flavour: String,
}

/// What this host has, as the caller found out.
#[derive(Debug)]
pub struct Host {
    /// KVM.
    pub kvm: KvmSeen,
    /// The guests' PMU, as it comes out here, in words.
    pub guest_pmu: String,
    /// The slots of the host's PMU, in words.
    pub slots: String,
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
    /// Nanoseconds as ticks of a guest's TSC.
    pub(crate) fn ticks(&self, ns: u64) -> u64 {
        let ticks = u128::from(ns) * u128::from(self.tsc_hz) / 1_000_000_000;
        u64::try_from(ticks).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
pub(crate) mod tests;
