//! Why there is no virtual machine.

use std::io;

use virtio_devices::transport::bus::BusError;

use crate::boot::BootError;
use crate::kvm::call::CallError;
use crate::kvm::cpuid::CpuidError;
use crate::kvm::event_filter::KvmFilterError;
use crate::kvm::host::HostError;
use crate::kvm::msr_filter::MsrFilterError;
use crate::memory::MemoryError;
use crate::rdpmc::hwbp::HwbpError;
use crate::vcpu::affinity::PinError;
use crate::vcpu::roster::RosterError;

/// Why a VM could not be made.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// KVM is missing or unusable.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Guest memory could not be had.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The guest could not be loaded.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The guest's CPUID could not be made.
    #[error(transparent)]
    Cpuid(#[from] CpuidError),
    /// PMU registers cannot be trapped.
    #[error(transparent)]
    MsrFilter(#[from] MsrFilterError),
    /// RDPMC cannot be served by breakpoints.
    #[error(transparent)]
    Hwbp(#[from] HwbpError),
    /// KVM's own vPMU cannot filter events as asked.
    #[error(transparent)]
    Filter(#[from] KvmFilterError),
    /// The host's PMU is in use by events that count guests, and KVM's mediated vPMU needs it whole.
    #[error(
        "--backing kvm: the host's PMU is taken by events that count guests, and KVM's mediated vPMU needs it whole; end them (perf on \
         the host, other VMs with --backing hardware), or use --backing auto"
    )]
    PmuTaken,
    /// A vCPU could not be made.
    #[error(transparent)]
    Vcpu(#[from] RosterError),
    /// More vCPUs than this host's KVM takes.
    #[error("{asked} vCPUs: this host's KVM takes at most {limit} vCPUs in a VM")]
    TooManyVcpus {
        /// What was asked.
        asked: u8,
        /// What KVM takes.
        limit: usize,
    },
    /// A KVM call failed.
    #[error(transparent)]
    Kvm(#[from] CallError),
    /// The kernel's file was replaced by one that needs another machine.
    #[error("the kernel is of another kind than the one that the VM began with; start a new VM for it")]
    OtherKernel,
    /// No PCI bus can be made for the devices.
    #[error(transparent)]
    Pci(#[from] BusError),
    /// vCPUs cannot be where they are to be.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// Another system call failed.
    #[error("{0} failed")]
    Os(&'static str, #[source] io::Error),
}
