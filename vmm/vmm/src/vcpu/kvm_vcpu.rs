//! A vCPU of KVM, created once with the VM and reused when the vCPU is hot-plugged.

use std::fmt;

use kvm_bindings::CpuId;

use crate::kvm::call::KvmIoctlError;
use crate::kvm::initial_state::InitialVcpuState;
use crate::kvm::vcpu_fd::VcpuFd;

/// A KVM vCPU whose CPUID and initial state are set.
pub struct KvmVcpu {
    fd: VcpuFd,
    kept: KvmVcpuParts,
}

/// Properties of a KVM vCPU other than its file descriptor.
pub(super) struct KvmVcpuParts {
    id: u8,
    tsc_khz: u32,
    cpuid: CpuId,
    /// Initial state of the vCPU, to be restored when it is added again. `None` if the vCPU is
    /// never removed.
    first: Option<Box<InitialVcpuState>>,
}

impl KvmVcpuParts {
    /// Returns the CPUID table of the vCPU.
    pub(super) fn cpuid(&self) -> &CpuId {
        &self.cpuid
    }
}

impl KvmVcpu {
    /// Creates the KVM vCPU `id` with the CPUID table `cpuid`. `first` is the initial state to
    /// restore when the vCPU is added again; `None` if the vCPU is never removed.
    pub fn new(id: u8, fd: VcpuFd, tsc_khz: u32, cpuid: CpuId, first: Option<InitialVcpuState>) -> Self {
        let kept = KvmVcpuParts {
            id,
            tsc_khz,
            cpuid,
            first: first.map(Box::new),
        };
        Self { fd, kept }
    }

    pub(super) fn into_parts(self) -> (VcpuFd, KvmVcpuParts) {
        (self.fd, self.kept)
    }

    pub(super) fn from_parts(fd: VcpuFd, kept: KvmVcpuParts) -> Self {
        Self { fd, kept }
    }

    /// Returns the file descriptor.
    pub(crate) fn fd(&self) -> &VcpuFd {
        &self.fd
    }

    /// Returns the frequency of the time-stamp counter, in kHz.
    pub(crate) fn tsc_khz(&self) -> u32 {
        self.kept.tsc_khz
    }

    /// Returns the CPUID table of the vCPU.
    pub(crate) fn cpuid(&self) -> &CpuId {
        &self.kept.cpuid
    }

    /// Returns the vCPU number.
    pub fn id(&self) -> u8 {
        self.kept.id
    }

    /// Writes the initial state of the vCPU to KVM.
    ///
    /// # Errors
    /// Returns a [`KvmIoctlError`] if a KVM call fails.
    pub fn restore(&self) -> Result<(), KvmIoctlError> {
        self.kept
            .first
            .as_ref()
            .map_or(Ok(()), |first| first.restore(&self.fd))
    }
}

impl fmt::Debug for KvmVcpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvmVcpu")
            .field("id", &self.kept.id)
            .finish_non_exhaustive()
    }
}
