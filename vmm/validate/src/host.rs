//! Validation options and host properties.

use std::path::PathBuf;
use std::sync::Arc;

use perf_core::pmu::host::HostPerfCapabilities;
use serde::Serialize;
use vpmu::ArchEvent;

/// Callback that returns `true` once the user has requested to stop.
pub type StopRequestedCheck = Arc<dyn Fn() -> bool + Send + Sync>;

/// Options of a validation run.
#[derive(Clone, Debug)]
pub struct ValidateOptions {
    /// PMU model of the guests, as for `--pmu`.
    pub pmu: String,
    /// Tolerance of time-dependent counts, in percent.
    pub tolerance_percent: f64,
    /// Kernel and initrd of the Linux guest, or `None` to skip it.
    pub linux: Option<LinuxFiles>,
    /// Reason for skipping the Linux guest.
    pub linux_skipped: Option<String>,
    /// `true` to validate KVM's own vPMU.
    pub own_pmu: bool,
}

/// Files of the Linux guest.
#[derive(Clone, Debug)]
pub struct LinuxFiles {
    /// Path of the vmlinux or bzImage.
    pub kernel: PathBuf,
    /// Path of an initrd from `make guest`.
    pub initrd: PathBuf,
}

/// Properties of the host's KVM for the report.
#[derive(Clone, Debug, Serialize)]
pub struct KvmSummary {
    /// Properties of KVM, in JSON.
    #[serde(flatten)]
    pub facts: serde_json::Value,
    /// Description of how KVM runs guest code.
    #[serde(skip)]
    pub flavour: String,
}

/// Properties of this host, as probed by the caller.
#[derive(Debug)]
pub struct HostProperties {
    /// Properties of the host's KVM.
    pub kvm: KvmSummary,
    /// Description of the guests' PMU on this host.
    pub guest_pmu: String,
    /// Number of general-purpose and fixed counters of the host that are available per vCPU
    /// (slots).
    pub slots: String,
    /// Properties of the host's perf events, as probed.
    pub probe: HostPerfCapabilities,
    /// Reason the host's PMU cannot count for guests (hardware backing).
    pub no_hardware: Option<String>,
    /// Reason the clock cannot be used to estimate counts for guests (clock backing).
    pub no_clock: Option<String>,
    /// Reason guests cannot be single-stepped to count for them (exact backing).
    pub no_exact: Option<String>,
    /// TSC frequency of a guest in Hz, as reported by KVM.
    pub tsc_hz: u64,
    /// `true` if KVM can single-step CPL 3.
    pub steps_user: bool,
    /// Architectural events that the host's PMU counts.
    pub hardware_events: Vec<ArchEvent>,
}

impl HostProperties {
    /// Converts nanoseconds to ticks of a guest's TSC.
    pub(crate) fn ticks(&self, ns: u64) -> u64 {
        let ticks = u128::from(ns) * u128::from(self.tsc_hz) / 1_000_000_000;
        u64::try_from(ticks).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
pub(crate) mod tests;
