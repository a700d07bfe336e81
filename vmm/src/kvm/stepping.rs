//! What this host's KVM can do for single-stepping a guest, found out by doing it.
//!
//! Two instructions of a tiny 64-bit guest are run at either privilege level. No module's name is looked at:
//! a KVM that runs code natively at one level and emulates it at the other steps at one of them only.

use kvm_bindings::{
    KVM_CAP_SET_GUEST_DEBUG2, KVM_GUESTDBG_BLOCKIRQ, KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP,
    KVM_GUESTDBG_USE_HW_BP, kvm_guest_debug,
};
use kvm_ioctls::{Kvm, VcpuExit};

use super::host::{HostError, LEAVE};
use super::tiny::{CODE, TinyGuest};

/// How many hardware breakpoints a processor has.
pub const BREAKPOINTS: usize = 4;

/// What works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Stepping {
    /// Single steps at CPL 0.
    pub kernel: bool,
    /// Single steps at CPL 3.
    pub user: bool,
    /// Hardware breakpoints (`KVM_GUESTDBG_USE_HW_BP`) at CPL 0.
    pub breakpoints: bool,
    /// Interrupts can be held back during a step (`KVM_GUESTDBG_BLOCKIRQ`, Linux 5.14 and later).
    pub blocks_interrupts: bool,
}

/// Probes; takes a few milliseconds.
///
/// # Errors
/// [`HostError::Probe`] when KVM refuses what every VM needs.
pub fn probe(kvm: &Kvm) -> Result<Stepping, HostError> {
    let mut step = kvm_guest_debug {
        control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP,
        ..Default::default()
    };
    let kernel = stops_behind_first(kvm, 0, &step)?;
    let user = stops_behind_first(kvm, 3, &step)?;
    step.control = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP;
    step.arch.debugreg[0] = CODE + 1;
    step.arch.debugreg[7] = 0x402;
    Ok(Stepping {
        kernel,
        user,
        breakpoints: stops_behind_first(kvm, 0, &step)?,
        blocks_interrupts: blocks_interrupts(kvm),
    })
}

/// Whether interrupts can be held back during a step; this runs nothing.
pub fn blocks_interrupts(kvm: &Kvm) -> bool {
    let controls = kvm.check_extension_raw(u64::from(KVM_CAP_SET_GUEST_DEBUG2));
    controls & KVM_GUESTDBG_BLOCKIRQ.cast_signed() != 0
}

/// Runs `nop; nop` and [`LEAVE`] in 64-bit mode at `cpl` under `debug`. Whether it stops behind the first
/// instruction.
fn stops_behind_first(kvm: &Kvm, cpl: u8, debug: &kvm_guest_debug) -> Result<bool, HostError> {
    // OUT at CPL 3 faults; without an interrupt table that is the end.
    let mut guest = TinyGuest::new(kvm, cpl, &[0x90, 0x90, LEAVE[0], LEAVE[1]])?;
    let vcpu = &mut guest.vcpu;
    if vcpu.set_guest_debug(debug).is_err() {
        return Ok(false);
    }
    Ok(matches!(vcpu.run()?, VcpuExit::Debug(stop) if stop.pc == CODE + 1))
}
