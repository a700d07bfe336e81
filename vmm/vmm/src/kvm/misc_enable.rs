//! Initialises the bits of IA32_MISC_ENABLE that describe the PMU. KVM stores the register for the
//! guest but does not act on it.

use kvm_bindings::{Msrs, kvm_msr_entry};

use super::call::KvmIoctlError;
use super::vcpu_fd::VcpuFd;

/// MSR number of IA32_MISC_ENABLE (SDM vol. 4).
const IA32_MISC_ENABLE: u32 = 0x1a0;
/// IA32_MISC_ENABLE bit 7: performance monitoring is available. Read-only for the guest.
const PERFMON_AVAILABLE: u64 = 1 << 7;
/// IA32_MISC_ENABLE bits 11 and 12: branch trace store and PEBS are unavailable.
const NO_BRANCH_TRACE_NO_PEBS: u64 = 1 << 11 | 1 << 12;

/// Sets IA32_MISC_ENABLE of a new vCPU to report a PMU without PEBS and BTS. Returns whether KVM
/// supports the register.
///
/// # Errors
/// Returns an error if the KVM call fails.
pub fn announce_pmu(vcpu: &VcpuFd) -> Result<bool, KvmIoctlError> {
    let entry = kvm_msr_entry {
        index: IA32_MISC_ENABLE,
        ..Default::default()
    };
    let Ok(mut msr) = Msrs::from_entries(&[entry]) else {
        return Err(KvmIoctlError::with_errno("making an MSR list", libc::ENOMEM));
    };
    if vcpu.get_msrs(&mut msr)? != 1 {
        return Ok(false);
    }
    if let Some(entry) = msr.as_mut_slice().first_mut() {
        entry.data |= PERFMON_AVAILABLE | NO_BRANCH_TRACE_NO_PEBS;
    }
    Ok(vcpu.set_msrs(&msr)? == 1)
}
