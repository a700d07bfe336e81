//! Configuration of a virtual machine.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use vpmu::{ArchEventSet, CounterBackingPolicy};

use crate::boot::{BootProtocol, KernelSource};
use crate::kvm::signature::CpuSignature;
use crate::kvm::vpmu_probe::KvmPmuCapabilities;
use crate::memory::MemoryBackingConfig;
use crate::numbers::VcpuCountRange;
use crate::pmu::PmuConfig;
use crate::pmu::kernel_reader::KernelReader;
use crate::vcpu::affinity::VcpuPinning;
use crate::vcpu::control::ResetPolicy;
use guest_patching::rdpmc::RdpmcMode;

/// Configuration of a VM.
#[derive(Clone, Debug)]
pub struct VmConfig {
    /// Source of the kernel image.
    pub kernel: KernelSource,
    /// Boot protocol of the kernel.
    pub boot_protocol: BootProtocol,
    /// Path of the initrd.
    pub initrd: Option<PathBuf>,
    /// Command line of the kernel.
    pub cmdline: String,
    /// Initial and maximum number of vCPUs.
    pub cpus: VcpuCountRange,
    /// RAM size in bytes.
    pub memory_bytes: u64,
    /// Allocation options of guest memory.
    pub memory_kind: MemoryBackingConfig,
    /// Configuration of the PMU.
    pub pmu: PmuConfig,
    /// Events that can be counted with the backing (source of the counts) of the guest's PMU.
    pub backability: ArchEventSet,
    /// Properties of KVM's own vPMU, if the guest uses it.
    pub own_pmu: Option<KvmPmuCapabilities>,
    /// Handling of RDPMC instructions in the kernel's code.
    pub rdpmc: RdpmcMode,
    /// `true` to remove events that cannot be counted from the event tables of the guest's kernel,
    /// so that perf in the guest does not offer them.
    pub hide_uncounted: bool,
    /// Parameters of debugger support; `None` if no debugger may connect.
    pub debugger: Option<DebuggerConfig>,
    /// Pinning of vCPUs to host CPUs.
    pub pins: VcpuPinning,
    /// `true` if the guest may use nested virtualisation.
    pub nested: bool,
    /// Policy for a reset of the machine by its guest.
    pub on_reset: ResetPolicy,
    /// Policy for polling while a vCPU is halted.
    pub halt_polling: HaltPolling,
    /// `true` if the guest can terminate the VM through the debug-exit port.
    pub debug_exit: bool,
    /// Reader of the guest kernel's symbols and tables, for operators; `None` if they are never
    /// read.
    pub kernel_reader: Option<Arc<KernelReader>>,
    /// Family, model and stepping in the guest's CPUID; `None` for the default.
    pub cpu_signature: Option<CpuSignature>,
}

impl VmConfig {
    /// Creates a configuration with one vCPU, a debug-exit port and the clock backing, which counts
    /// by CPU time. RDPMC is not replaced.
    pub fn new(kernel: KernelSource, memory_bytes: u64, pmu: PmuConfig) -> Self {
        Self {
            kernel,
            boot_protocol: BootProtocol::Auto,
            initrd: None,
            cmdline: String::new(),
            cpus: VcpuCountRange::default(),
            memory_bytes,
            memory_kind: MemoryBackingConfig::default(),
            pmu,
            backability: ArchEventSet::CLOCK,
            own_pmu: None,
            rdpmc: RdpmcMode::Off,
            hide_uncounted: false,
            debugger: None,
            pins: VcpuPinning::default(),
            nested: false,
            on_reset: ResetPolicy::Exit,
            halt_polling: HaltPolling::default(),
            debug_exit: true,
            kernel_reader: None,
            cpu_signature: None,
        }
    }
}

/// Time that a halted vCPU polls for a wake-up before its thread sleeps. Polling reduces the
/// latency of device interrupts, but uses CPU time of the vCPU thread, which the clock backing
/// counts as guest cycles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HaltPolling {
    /// The host's default if only the host's PMU counts for the guest, and no polling otherwise.
    #[default]
    Auto,
    /// The default of KVM on this host (`/sys/module/kvm/parameters/halt_poll_ns`).
    Host,
    /// Maximum polling time in nanoseconds.
    AtMost(u32),
}

/// Maximum polling time that [`HaltPolling::AtMost`] accepts, in nanoseconds.
const MAX_POLLING_NS: u32 = 1_000_000;

/// Error when parsing [`HaltPolling`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be auto, host, or nanoseconds between 0 and {MAX_POLLING_NS}")]
pub struct ParseHaltPollingError;

impl FromStr for HaltPolling {
    type Err = ParseHaltPollingError;

    fn from_str(text: &str) -> Result<Self, ParseHaltPollingError> {
        match text {
            "auto" => Ok(Self::Auto),
            "host" => Ok(Self::Host),
            _ => {
                let ns = text.parse().ok().filter(|ns| *ns <= MAX_POLLING_NS);
                ns.map(Self::AtMost).ok_or(ParseHaltPollingError)
            }
        }
    }
}

impl HaltPolling {
    /// Returns the maximum polling time to set in KVM, in nanoseconds, or `None` to keep KVM's
    /// default.
    pub(super) fn limit_ns(self, policy: CounterBackingPolicy) -> Option<u32> {
        match self {
            Self::AtMost(ns) => Some(ns),
            Self::Host => None,
            // KVM's polling is host execution, which the host's PMU does not count for the guest.
            Self::Auto if matches!(policy, CounterBackingPolicy::Hardware | CounterBackingPolicy::Kvm) => {
                None
            }
            Self::Auto => Some(0),
        }
    }
}

/// Parameters of debugger support.
#[derive(Clone, Copy, Debug)]
pub struct DebuggerConfig {
    /// `true` if no vCPU runs before a debugger connects.
    pub wait: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Polling is off with the clock backing, which would count it as guest cycles, unless the
    /// operator requests polling.
    #[test]
    fn halt_polling_is_off_with_clock_backing() {
        for (text, policy, told) in [
            ("auto", CounterBackingPolicy::Auto, Some(0)),
            ("auto", CounterBackingPolicy::Clock, Some(0)),
            ("auto", CounterBackingPolicy::Hardware, None),
            ("auto", CounterBackingPolicy::Kvm, None),
            ("host", CounterBackingPolicy::Clock, None),
            ("0", CounterBackingPolicy::Hardware, Some(0)),
            ("200000", CounterBackingPolicy::Auto, Some(200_000)),
        ] {
            let polling: HaltPolling = text.parse().unwrap();
            assert_eq!(polling.limit_ns(policy), told, "{text} {policy:?}");
        }
        for wrong in ["", "on", "-1", "1000001", "1ms"] {
            assert_eq!(
                wrong.parse::<HaltPolling>(),
                Err(ParseHaltPollingError),
                "{wrong}"
            );
        }
    }
}
