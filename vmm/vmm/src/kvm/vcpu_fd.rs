//! File descriptor of a vCPU, with methods whose errors name the failed ioctl.

use std::os::fd::{AsRawFd, RawFd};

use kvm_bindings::{
    CpuId, Msrs, kvm_debugregs, kvm_fpu, kvm_guest_debug, kvm_lapic_state, kvm_mp_state, kvm_regs, kvm_sregs,
    kvm_vcpu_events, kvm_xcrs,
};

use super::call::KvmIoctlError;

/// File descriptor of a vCPU. [`KickableVcpu`](super::kickable_vcpu::KickableVcpu) takes ownership
/// of it to run the vCPU.
#[derive(Debug)]
pub struct VcpuFd(kvm_ioctls::VcpuFd);

/// Defines the methods of [`VcpuFd`] for ioctls that read or write one structure.
macro_rules! calls {
    ($($(#[doc = $doc:literal])* $method:ident($($arg:ident: $of:ty)?) -> $gives:ty, $call:literal;)*) => {
        impl VcpuFd {
            $(
                $(#[doc = $doc])*
                ///
                /// # Errors
                #[doc = concat!("[`KvmIoctlError`] of ", $call, ".")]
                #[inline]
                pub fn $method(&self $(, $arg: $of)?) -> Result<$gives, KvmIoctlError> {
                    self.0.$method($($arg)?).map_err(KvmIoctlError::of($call))
                }
            )*
        }
    };
}

calls! {
    /// Reads the general registers, RIP and RFLAGS.
    get_regs() -> kvm_regs, "KVM_GET_REGS";
    /// Writes the general registers, RIP and RFLAGS. Discards a pending exception.
    set_regs(regs: &kvm_regs) -> (), "KVM_SET_REGS";
    /// Reads the segment and control registers.
    get_sregs() -> kvm_sregs, "KVM_GET_SREGS";
    /// Writes the segment and control registers.
    set_sregs(sregs: &kvm_sregs) -> (), "KVM_SET_SREGS";
    /// Reads the FPU and SSE registers.
    get_fpu() -> kvm_fpu, "KVM_GET_FPU";
    /// Writes the FPU and SSE registers.
    set_fpu(fpu: &kvm_fpu) -> (), "KVM_SET_FPU";
    /// Reads DR0 to DR3, DR6 and DR7.
    get_debug_regs() -> kvm_debugregs, "KVM_GET_DEBUGREGS";
    /// Writes DR0 to DR3, DR6 and DR7.
    set_debug_regs(registers: &kvm_debugregs) -> (), "KVM_SET_DEBUGREGS";
    /// Reads the register page of the in-kernel local APIC.
    get_lapic() -> kvm_lapic_state, "KVM_GET_LAPIC";
    /// Writes the register page of the in-kernel local APIC.
    set_lapic(page: &kvm_lapic_state) -> (), "KVM_SET_LAPIC";
    /// Reads the extended control registers.
    get_xcrs() -> kvm_xcrs, "KVM_GET_XCRS";
    /// Writes the extended control registers.
    set_xcrs(xcrs: &kvm_xcrs) -> (), "KVM_SET_XCRS";
    /// Reads the exceptions, interrupts, NMIs and SMIs that are pending or are being injected.
    get_vcpu_events() -> kvm_vcpu_events, "KVM_GET_VCPU_EVENTS";
    /// Writes the exception, and the other pending events that the flags of `events` select.
    set_vcpu_events(events: &kvm_vcpu_events) -> (), "KVM_SET_VCPU_EVENTS";
    /// Reads the multiprocessing state: running, halted or waiting for SIPI.
    get_mp_state() -> kvm_mp_state, "KVM_GET_MP_STATE";
    /// Writes the multiprocessing state: running, halted or waiting for SIPI.
    set_mp_state(state: kvm_mp_state) -> (), "KVM_SET_MP_STATE";
    /// Reads MSRs in the given order. Stops at the first one that cannot be read, and returns the
    /// number of MSRs that were read.
    get_msrs(msrs: &mut Msrs) -> usize, "KVM_GET_MSRS";
    /// Writes MSRs in the given order. Stops at the first one that cannot be written, and returns
    /// the number of MSRs that were written.
    set_msrs(msrs: &Msrs) -> usize, "KVM_SET_MSRS";
    /// Reads up to `entries` leaves of the CPUID table that the guest sees. Some versions of KVM
    /// return other values than KVM_SET_CPUID2 has set.
    get_cpuid2(entries: usize) -> CpuId, "KVM_GET_CPUID2";
    /// Sets the CPUID table of the vCPU.
    set_cpuid2(cpuid: &CpuId) -> (), "KVM_SET_CPUID2";
    /// Returns the TSC frequency of the vCPU in kHz.
    get_tsc_khz() -> u32, "KVM_GET_TSC_KHZ";
    /// Sets single-stepping and hardware breakpoints.
    set_guest_debug(debug: &kvm_guest_debug) -> (), "KVM_SET_GUEST_DEBUG";
    /// Queues an NMI for the vCPU.
    nmi() -> (), "KVM_NMI";
    /// Tells the guest through kvmclock that it was paused. Fails with `EINVAL` if the guest does
    /// not use kvmclock.
    kvmclock_ctrl() -> (), "KVM_KVMCLOCK_CTRL";
}

impl VcpuFd {
    /// Calls KVM_RUN for a probe. A signal that arrives just before the call does not end it.
    pub(super) fn run(&mut self) -> Result<kvm_ioctls::VcpuExit<'_>, KvmIoctlError> {
        self.0.run().map_err(KvmIoctlError::of("KVM_RUN"))
    }

    pub(super) fn of(fd: kvm_ioctls::VcpuFd) -> Self {
        Self(fd)
    }

    /// Returns the kvm-ioctls descriptor, for the ioctls of other files of this module.
    #[inline]
    pub(super) fn raw(&self) -> &kvm_ioctls::VcpuFd {
        &self.0
    }

    /// Returns the kvm-ioctls descriptor, for the ioctls of other files of this module.
    #[inline]
    pub(super) fn raw_mut(&mut self) -> &mut kvm_ioctls::VcpuFd {
        &mut self.0
    }
}

impl AsRawFd for VcpuFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
