//! Tests which single-stepping features this host's KVM supports.
//!
//! The probe runs two instructions of a small 64-bit guest at CPL 0 and again at CPL 3. A KVM that
//! runs one of these levels natively and emulates the other may support single-stepping at one of
//! them only.

use kvm_bindings::{
    KVM_CAP_SET_GUEST_DEBUG2, KVM_GUESTDBG_BLOCKIRQ, KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP,
    KVM_GUESTDBG_USE_HW_BP, kvm_guest_debug, kvm_guest_debug_arch,
};
use kvm_ioctls::{Kvm, VcpuExit};

pub use guest_patching::hwbp::BREAKPOINTS;

use super::host::{KvmHostError, LEAVE};
use super::tiny::{CODE, TinyGuest};

/// Argument of KVM_SET_GUEST_DEBUG that stops a vCPU after each instruction.
const SINGLE_STEP: kvm_guest_debug = kvm_guest_debug {
    control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP,
    pad: 0,
    arch: kvm_guest_debug_arch { debugreg: [0; 8] },
};

/// Single-stepping features of this host's KVM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct SteppingSupport {
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

/// Probes the stepping features at CPL 0. The result reports the feature at CPL 3 as unsupported.
pub(super) fn probe_kernel(kvm: &Kvm, guest: &mut TinyGuest) -> Result<SteppingSupport, KvmHostError> {
    let breakpoint = {
        let mut debug = kvm_guest_debug {
            control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP,
            ..Default::default()
        };
        debug.arch.debugreg[0] = CODE + 1;
        debug.arch.debugreg[7] = 0x402;
        debug
    };
    Ok(SteppingSupport {
        kernel: stops_after_first(guest, 0, &SINGLE_STEP)?,
        user: false,
        breakpoints: stops_after_first(guest, 0, &breakpoint)?,
        blocks_interrupts: blocks_interrupts(kvm),
    })
}

/// Returns whether single-stepping works at CPL 3. The probe shuts the guest down if it does not.
pub(super) fn probe_user(guest: &mut TinyGuest) -> Result<bool, KvmHostError> {
    stops_after_first(guest, 3, &SINGLE_STEP)
}

/// Returns whether KVM can block interrupts during a step. Runs no guest.
pub fn blocks_interrupts(kvm: &Kvm) -> bool {
    let controls = kvm.check_extension_raw(u64::from(KVM_CAP_SET_GUEST_DEBUG2));
    controls & KVM_GUESTDBG_BLOCKIRQ.cast_signed() != 0
}

/// Runs `nop; nop` and [`LEAVE`] at `cpl` in 64-bit mode, with the KVM_SET_GUEST_DEBUG argument
/// `debug`. Returns whether the vCPU stops after the first instruction.
fn stops_after_first(guest: &mut TinyGuest, cpl: u8, debug: &kvm_guest_debug) -> Result<bool, KvmHostError> {
    // OUT at CPL 3 faults. Without an interrupt table, the fault shuts the guest down.
    guest.load(cpl, &[0x90, 0x90, LEAVE[0], LEAVE[1]])?;
    let vcpu = &mut guest.vcpu;
    if vcpu.set_guest_debug(debug).is_err() {
        return Ok(false);
    }
    let stops = matches!(vcpu.run()?, VcpuExit::Debug(stop) if stop.pc == CODE + 1);
    vcpu.set_guest_debug(&kvm_guest_debug::default())?;
    Ok(stops)
}
