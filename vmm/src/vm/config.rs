//! What a virtual machine is to be.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use vpmu::{Backability, BackingPolicy};

use crate::boot::{BootProtocol, KernelSource};
use crate::kvm::own_pmu::OwnPmu;
use crate::kvm::signature::CpuSignature;
use crate::memory::MemoryKind;
use crate::numbers::VcpuNumbers;
use crate::pmu::PmuConfig;
use crate::pmu::kernel_reader::KernelReader;
use crate::rdpmc::RdpmcMode;
use crate::vcpu::affinity::Pinning;
use crate::vcpu::control::OnReset;

/// What to run.
#[derive(Clone, Debug)]
pub struct VmConfig {
    /// The kernel.
    pub kernel: KernelSource,
    /// How the kernel is entered.
    pub boot_protocol: BootProtocol,
    /// Its initrd.
    pub initrd: Option<PathBuf>,
    /// Its command line.
    pub cmdline: String,
    /// vCPUs at the start and at most.
    pub cpus: VcpuNumbers,
    /// RAM in bytes.
    pub memory_bytes: u64,
    /// How it is had from the host.
    pub memory_kind: MemoryKind,
    /// The PMU.
    pub pmu: PmuConfig,
    /// What the PMU's backing can count.
    pub backability: Backability,
    /// KVM's own vPMU, if the guest is to have that.
    pub own_pmu: Option<OwnPmu>,
    /// How RDPMC in the kernel's text is served.
    pub rdpmc: RdpmcMode,
    /// Whether perf in the guest is told what cannot be counted, by its kernel's own tables.
    pub hide_uncounted: bool,
    /// Whether a debugger may come, and whether the guest waits for it.
    pub debugger: Option<DebuggerWanted>,
    /// vCPUs that stay on one CPU of the host.
    pub pins: Pinning,
    /// Whether the guest may run guests of its own.
    pub nested: bool,
    /// What a reset of the machine by its guest leads to.
    pub on_reset: OnReset,
    /// How long a halted vCPU polls.
    pub halt_polling: HaltPolling,
    /// Whether the guest can end the VM by the debug-exit port.
    pub debug_exit: bool,
    /// Who reads the kernel that runs in the guest, for operators.
    pub kernel_reader: Option<Arc<KernelReader>>,
    /// Family, model and stepping of its processors, if not the usual ones.
    pub cpu_signature: Option<CpuSignature>,
}

/// How long KVM has a halted vCPU poll for a wake-up before its thread sleeps. Polling takes the CPU time of
/// the vCPU's thread, which the clock counts as the guest's cycles, and answers a device sooner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HaltPolling {
    /// As the host does it where the host's PMU alone counts, else not at all.
    #[default]
    Auto,
    /// As KVM's module is set (`/sys/module/kvm/parameters/halt_poll_ns`).
    Host,
    /// So many nanoseconds at most.
    AtMost(u32),
}

/// Longest time that a halted vCPU may poll, in nanoseconds.
const MOST_POLLING_NS: u32 = 1_000_000;

/// No way to poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be auto, host, or nanoseconds from 0 to {MOST_POLLING_NS}")]
pub struct NotHaltPolling;

impl FromStr for HaltPolling {
    type Err = NotHaltPolling;

    fn from_str(text: &str) -> Result<Self, NotHaltPolling> {
        match text {
            "auto" => Ok(Self::Auto),
            "host" => Ok(Self::Host),
            _ => {
                let ns = text.parse().ok().filter(|ns| *ns <= MOST_POLLING_NS);
                ns.map(Self::AtMost).ok_or(NotHaltPolling)
            }
        }
    }
}

impl HaltPolling {
    /// What KVM is to be told, in nanoseconds; `None`: nothing.
    pub(super) fn most_ns(self, policy: BackingPolicy) -> Option<u32> {
        match self {
            Self::AtMost(ns) => Some(ns),
            Self::Host => None,
            // The host's PMU counts nothing while the host runs.
            Self::Auto if matches!(policy, BackingPolicy::Hardware | BackingPolicy::Kvm) => None,
            Self::Auto => Some(0),
        }
    }
}

/// That a debugger may come.
#[derive(Clone, Copy, Debug)]
pub struct DebuggerWanted {
    /// No vCPU runs before.
    pub wait: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What polls counts as guest cycles where the clock counts, so nothing polls there unless it is asked.
    #[test]
    fn a_halted_vcpu_polls_where_the_clock_does_not_count_or_the_user_says_so() {
        for (text, policy, told) in [
            ("auto", BackingPolicy::Auto, Some(0)),
            ("auto", BackingPolicy::Clock, Some(0)),
            ("auto", BackingPolicy::Hardware, None),
            ("auto", BackingPolicy::Kvm, None),
            ("host", BackingPolicy::Clock, None),
            ("0", BackingPolicy::Hardware, Some(0)),
            ("200000", BackingPolicy::Auto, Some(200_000)),
        ] {
            let polling: HaltPolling = text.parse().unwrap();
            assert_eq!(polling.most_ns(policy), told, "{text} {policy:?}");
        }
        for wrong in ["", "on", "-1", "1000001", "1ms"] {
            assert_eq!(wrong.parse::<HaltPolling>(), Err(NotHaltPolling), "{wrong}");
        }
    }
}
