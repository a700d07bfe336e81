//! The descriptor of a vCPU: each call that the machine makes on it, with an error that names the call.

use std::os::fd::{AsRawFd, RawFd};

use kvm_bindings::{
    CpuId, Msrs, kvm_debugregs, kvm_fpu, kvm_guest_debug, kvm_lapic_state, kvm_mp_state, kvm_regs, kvm_sregs,
    kvm_vcpu_events,
};

use super::call::CallError;

/// A vCPU of KVM. Who runs it takes it into an [`ArmedVcpu`](super::armed::ArmedVcpu).
#[derive(Debug)]
pub struct VcpuFd(kvm_ioctls::VcpuFd);

/// Methods for calls that take or give one structure.
macro_rules! calls {
    ($($(#[doc = $doc:literal])* $method:ident($($arg:ident: $of:ty)?) -> $gives:ty, $call:literal;)*) => {
        impl VcpuFd {
            $(
                $(#[doc = $doc])*
                ///
                /// # Errors
                #[doc = concat!("[`CallError`] of ", $call, ".")]
                #[inline]
                pub fn $method(&self $(, $arg: $of)?) -> Result<$gives, CallError> {
                    self.0.$method($($arg)?).map_err(CallError::of($call))
                }
            )*
        }
    };
}

calls! {
    /// General registers, RIP and RFLAGS.
    get_regs() -> kvm_regs, "KVM_GET_REGS";
    /// Writes general registers, RIP and RFLAGS; an exception that waits to be injected is gone.
    set_regs(regs: &kvm_regs) -> (), "KVM_SET_REGS";
    /// Segment and control registers.
    get_sregs() -> kvm_sregs, "KVM_GET_SREGS";
    /// Writes segment and control registers.
    set_sregs(sregs: &kvm_sregs) -> (), "KVM_SET_SREGS";
    /// Registers of the FPU and of SSE.
    get_fpu() -> kvm_fpu, "KVM_GET_FPU";
    /// Writes registers of the FPU and of SSE.
    set_fpu(fpu: &kvm_fpu) -> (), "KVM_SET_FPU";
    /// DR0 to DR3, DR6 and DR7.
    get_debug_regs() -> kvm_debugregs, "KVM_GET_DEBUGREGS";
    /// Writes DR0 to DR3, DR6 and DR7.
    set_debug_regs(registers: &kvm_debugregs) -> (), "KVM_SET_DEBUGREGS";
    /// The page of the local APIC, which KVM emulates.
    get_lapic() -> kvm_lapic_state, "KVM_GET_LAPIC";
    /// Writes the page of the local APIC.
    set_lapic(page: &kvm_lapic_state) -> (), "KVM_SET_LAPIC";
    /// Exceptions, interrupts, NMIs and SMIs that wait or are being delivered.
    get_vcpu_events() -> kvm_vcpu_events, "KVM_GET_VCPU_EVENTS";
    /// Writes those that the flags of `events` name, and the exception.
    set_vcpu_events(events: &kvm_vcpu_events) -> (), "KVM_SET_VCPU_EVENTS";
    /// Whether it runs, is halted or waits for its SIPI.
    get_mp_state() -> kvm_mp_state, "KVM_GET_MP_STATE";
    /// Makes it run, be halted or wait for its SIPI.
    set_mp_state(state: kvm_mp_state) -> (), "KVM_SET_MP_STATE";
    /// Reads registers until one cannot be read; says how many were.
    get_msrs(msrs: &mut Msrs) -> usize, "KVM_GET_MSRS";
    /// Writes registers until one cannot be written; says how many were.
    set_msrs(msrs: &Msrs) -> usize, "KVM_SET_MSRS";
    /// What the guest reads by CPUID.
    set_cpuid2(cpuid: &CpuId) -> (), "KVM_SET_CPUID2";
    /// The frequency of its time stamp counter in kHz.
    get_tsc_khz() -> u32, "KVM_GET_TSC_KHZ";
    /// Who stops the guest, and where.
    set_guest_debug(debug: &kvm_guest_debug) -> (), "KVM_SET_GUEST_DEBUG";
    /// Queues an NMI.
    nmi() -> (), "KVM_NMI";
    /// Tells the guest by its paravirtual clock that it was paused. `EINVAL`: it does not use that clock.
    kvmclock_ctrl() -> (), "KVM_KVMCLOCK_CTRL";
}

impl VcpuFd {
    /// KVM_RUN, for probes, which no signal is to stop.
    pub(super) fn run(&mut self) -> Result<kvm_ioctls::VcpuExit<'_>, CallError> {
        self.0.run().map_err(CallError::of("KVM_RUN"))
    }

    pub(super) fn of(fd: kvm_ioctls::VcpuFd) -> Self {
        Self(fd)
    }

    /// For calls of this room alone.
    #[inline]
    pub(super) fn raw(&self) -> &kvm_ioctls::VcpuFd {
        &self.0
    }

    /// For calls of this room alone.
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
