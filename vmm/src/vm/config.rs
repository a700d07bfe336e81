//! What a virtual machine is to be.

use std::path::PathBuf;

use vpmu::Backability;

use crate::boot::{BootProtocol, KernelSource};
use crate::kvm::own_pmu::OwnPmu;
use crate::kvm::signature::CpuSignature;
use crate::memory::MemoryKind;
use crate::numbers::VcpuNumbers;
use crate::pmu::PmuConfig;
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
    /// Whether the guest can end the VM by the debug-exit port.
    pub debug_exit: bool,
    /// Family, model and stepping of its processors, if not the usual ones.
    pub cpu_signature: Option<CpuSignature>,
}

/// That a debugger may come.
#[derive(Clone, Copy, Debug)]
pub struct DebuggerWanted {
    /// No vCPU runs before.
    pub wait: bool,
}
