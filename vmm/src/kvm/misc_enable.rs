//! IA32_MISC_ENABLE, which says once more whether there is a PMU. KVM keeps it; its PMU bits are told to KVM
//! at the start.

use kvm_bindings::{Msrs, kvm_msr_entry};

use super::call::CallError;
use super::vcpu_fd::VcpuFd;

/// IA32_MISC_ENABLE (SDM vol. 4).
const IA32_MISC_ENABLE: u32 = 0x1a0;
/// Performance monitoring is available (bit 7, read-only: KVM keeps it whatever the guest writes).
const PERFMON_AVAILABLE: u64 = 1 << 7;
/// Branch trace store (11) and PEBS (12) are unavailable.
const NO_BRANCH_TRACE_NO_PEBS: u64 = 1 << 11 | 1 << 12;

/// Says in IA32_MISC_ENABLE of a new vCPU that there is a PMU, without PEBS and BTS. Whether KVM has the
/// register.
///
/// # Errors
/// KVM's.
pub fn announce_pmu(vcpu: &VcpuFd) -> Result<bool, CallError> {
    let entry = kvm_msr_entry {
        index: IA32_MISC_ENABLE,
        ..Default::default()
    };
    let Ok(mut msr) = Msrs::from_entries(&[entry]) else {
        return Err(CallError::with_errno("making an MSR list", libc::ENOMEM));
    };
    if vcpu.get_msrs(&mut msr)? != 1 {
        return Ok(false);
    }
    if let Some(entry) = msr.as_mut_slice().first_mut() {
        entry.data |= PERFMON_AVAILABLE | NO_BRANCH_TRACE_NO_PEBS;
    }
    Ok(vcpu.set_msrs(&msr)? == 1)
}
