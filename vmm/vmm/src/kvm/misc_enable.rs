//! Initialises the bits of IA32_MISC_ENABLE that describe the PMU. KVM only stores the value of
//! this register.

use kvm_bindings::{Msrs, kvm_msr_entry};

use super::call::KvmIoctlError;
use super::vcpu_fd::VcpuFd;

/// IA32_MISC_ENABLE (SDM vol. 4).
const IA32_MISC_ENABLE: u32 = 0x1a0;
/// Performance monitoring available (bit 7). Read-only for the guest.
const PERFMON_AVAILABLE: u64 = 1 << 7;
/// Branch trace store unavailable (bit 11) and PEBS unavailable (bit 12).
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
