//! KVM's vCPU, which is made once with the VM and stays, whoever comes and goes.

use std::fmt;

use kvm_bindings::CpuId;

use crate::kvm::call::CallError;
use crate::kvm::first_state::FirstState;
use crate::kvm::vcpu_fd::VcpuFd;

/// KVM's vCPU, configured.
pub struct KvmVcpu {
    fd: VcpuFd,
    kept: Kept,
}

/// What is known of it beside its descriptor.
pub(super) struct Kept {
    id: u8,
    tsc_khz: u32,
    cpuid: CpuId,
    /// What it held when it was made; `None` for one that never goes.
    first: Option<Box<FirstState>>,
}

impl KvmVcpu {
    /// vCPU `id`, which shows this CPUID. `first`: what it holds now, if it may come and go.
    pub fn new(id: u8, fd: VcpuFd, tsc_khz: u32, cpuid: CpuId, first: Option<FirstState>) -> Self {
        let kept = Kept {
            id,
            tsc_khz,
            cpuid,
            first: first.map(Box::new),
        };
        Self { fd, kept }
    }

    pub(super) fn into_parts(self) -> (VcpuFd, Kept) {
        (self.fd, self.kept)
    }

    pub(super) fn from_parts(fd: VcpuFd, kept: Kept) -> Self {
        Self { fd, kept }
    }

    /// Its descriptor.
    pub(super) fn fd(&self) -> &VcpuFd {
        &self.fd
    }

    /// The frequency of its time stamp counter.
    pub(super) fn tsc_khz(&self) -> u32 {
        self.kept.tsc_khz
    }

    /// What it shows of itself.
    pub(super) fn cpuid(&self) -> &CpuId {
        &self.kept.cpuid
    }

    /// Its number.
    pub fn id(&self) -> u8 {
        self.kept.id
    }

    /// Makes it what it was when it was made.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn restore(&self) -> Result<(), CallError> {
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
