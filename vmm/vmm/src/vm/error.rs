//! Errors that occur when creating a virtual machine.

use std::io;

use virtio_devices::transport::bus::VirtioBusError;

use super::restore::RestoreError;
use crate::boot::BootError;
use crate::kvm::call::KvmIoctlError;
use crate::kvm::cpuid::CpuidError;
use crate::kvm::event_filter::KvmEventFilterError;
use crate::kvm::host::KvmHostError;
use crate::kvm::msr_filter::MsrFilterError;
use crate::memory::MemoryError;
use crate::vcpu::affinity::VcpuPinningError;
use crate::vcpu::registry::VcpuRegistryError;
use guest_patching::hwbp::HardwareBreakpointError;

/// Error when creating a VM.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// KVM is missing on this host or cannot be used.
    #[error(transparent)]
    Host(#[from] KvmHostError),
    /// Guest memory cannot be allocated.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The guest cannot be loaded.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The guest's CPUID table cannot be built.
    #[error(transparent)]
    Cpuid(#[from] CpuidError),
    /// PMU registers cannot be trapped.
    #[error(transparent)]
    MsrFilter(#[from] MsrFilterError),
    /// RDPMC cannot be emulated with breakpoints.
    #[error(transparent)]
    Hwbp(#[from] HardwareBreakpointError),
    /// `--rdpmc off` was given for a Linux kernel with a PMU that the VMM emulates.
    #[error(
        "--rdpmc off: a Linux kernel crashes if its RDPMC is not emulated; omit the option, or use \
        --pmu off or --backing kvm"
    )]
    RdpmcOff,
    /// KVM's own vPMU does not support the event filter.
    #[error(transparent)]
    Filter(#[from] KvmEventFilterError),
    /// KVM's mediated vPMU needs the host's PMU exclusively, but events that count guests use it.
    #[error(
        "--backing kvm: KVM's mediated vPMU needs the host's PMU exclusively, but other events \
         count guests; end them (the NMI watchdog: sysctl kernel.nmi_watchdog=0; perf on the host; \
         other VMs with --backing hardware or auto), or use --backing auto"
    )]
    PmuTaken,
    /// A vCPU cannot be created.
    #[error(transparent)]
    Vcpu(#[from] VcpuRegistryError),
    /// The configuration has more vCPUs than this host's KVM supports.
    #[error("{asked} vCPUs: must be at most {limit} on this host's KVM")]
    TooManyVcpus {
        /// Maximum number of vCPUs in the configuration.
        asked: u8,
        /// Maximum number of vCPUs that this host's KVM supports.
        limit: usize,
    },
    /// A KVM call of the VM's setup failed.
    #[error(transparent)]
    Kvm(#[from] KvmIoctlError),
    /// After a reset, the kernel file has a different format than at the start of the VM.
    #[error("the kernel has a different format than at the start of the VM; start a new VM")]
    OtherKernel,
    /// The PCI bus cannot be created for the devices.
    #[error(transparent)]
    Pci(#[from] VirtioBusError),
    /// vCPUs cannot be pinned as configured.
    #[error(transparent)]
    Pin(#[from] VcpuPinningError),
    /// The VM cannot be restored from a snapshot.
    #[error("--restore")]
    Restore(#[from] RestoreError),
    /// A system call of the VM's setup failed.
    #[error("{0} failed")]
    Os(&'static str, #[source] io::Error),
}
