//! Probes which single-stepping features this host's KVM supports.
//!
//! The probe runs two instructions of a small 64-bit guest at CPL 0 and CPL 3. Each level needs its
//! own probe, because a KVM that runs one level natively and emulates the other may step at one of
//! them only.

use kvm_bindings::{
    KVM_CAP_SET_GUEST_DEBUG2, KVM_GUESTDBG_BLOCKIRQ, KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP,
    KVM_GUESTDBG_USE_HW_BP, kvm_guest_debug,
};
use kvm_ioctls::{Kvm, VcpuExit};

pub use guest_patching::hwbp::BREAKPOINTS;

use super::host::{HostError, LEAVE};
use super::tiny::{CODE, TinyGuest};

/// Single-stepping features of this host's KVM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Stepping {
    /// `true` if single-stepping works at CPL 0.
    pub kernel: bool,
    /// `true` if single-stepping works at CPL 3.
    pub user: bool,
    /// `true` if hardware breakpoints (`KVM_GUESTDBG_USE_HW_BP`) work at CPL 0.
    pub breakpoints: bool,
    /// `true` if KVM can block interrupts during a step (`KVM_GUESTDBG_BLOCKIRQ`, Linux 5.14 and
    /// later).
    pub blocks_interrupts: bool,
}

/// Probes the features. Takes a few milliseconds.
///
/// # Errors
/// Returns [`HostError::Probe`] if KVM refuses a call that every VM needs.
pub fn probe(kvm: &Kvm) -> Result<Stepping, HostError> {
    let mut step = kvm_guest_debug {
        control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP,
        ..Default::default()
    };
    let kernel = stops_after_first(kvm, 0, &step)?;
    let user = stops_after_first(kvm, 3, &step)?;
    step.control = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP;
    step.arch.debugreg[0] = CODE + 1;
    step.arch.debugreg[7] = 0x402;
    Ok(Stepping {
        kernel,
        user,
        breakpoints: stops_after_first(kvm, 0, &step)?,
        blocks_interrupts: blocks_interrupts(kvm),
    })
}

/// Returns whether KVM can block interrupts during a step, without running a guest.
pub fn blocks_interrupts(kvm: &Kvm) -> bool {
    let controls = kvm.check_extension_raw(u64::from(KVM_CAP_SET_GUEST_DEBUG2));
    controls & KVM_GUESTDBG_BLOCKIRQ.cast_signed() != 0
}

/// Runs `nop; nop` and [`LEAVE`] in 64-bit mode at `cpl` under `debug`. Returns whether the guest
/// stops after the first instruction.
fn stops_after_first(kvm: &Kvm, cpl: u8, debug: &kvm_guest_debug) -> Result<bool, HostError> {
    // OUT at CPL 3 faults. Without an interrupt table the fault ends the guest.
    let mut guest = TinyGuest::new(kvm, cpl, &[0x90, 0x90, LEAVE[0], LEAVE[1]])?;
    let vcpu = &mut guest.vcpu;
    if vcpu.set_guest_debug(debug).is_err() {
        return Ok(false);
    }
    Ok(matches!(vcpu.run()?, VcpuExit::Debug(stop) if stop.pc == CODE + 1))
}
