//! Probes, in one VM, how this host's KVM runs guest code and which capabilities it has.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use kvm_bindings::{KVM_CAP_BINARY_STATS_FD, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Cap, Kvm, VcpuExit};
use perf_core::error_line;

use super::cpuid;
use super::host::{self, KvmHostError, LEAVE, VirtualizationMethod};
use super::stepping::{self, SteppingSupport};
use super::tiny::TinyGuest;

/// Properties of the execution of guest code by this host's KVM.
#[derive(Clone, Copy, Debug)]
pub struct KvmExecutionProperties {
    /// `true` if KVM interprets the code of guest kernels.
    pub interprets_kernels: bool,
    /// `true` if guests see Intel TSX in CPUID although their CPUID table hides it, because KVM
    /// lets guest user code execute CPUID natively.
    pub shows_hidden_transactions: bool,
    /// Single-stepping features of this host's KVM.
    pub stepping: SteppingSupport,
}

/// Probes how KVM executes guest code. The result is cached for the process, because destroying the
/// VM of the probe waits for several RCU grace periods. A caller that arrives during the probe
/// waits for its result.
///
/// # Errors
/// Returns [`KvmHostError::Probe`] if KVM rejects a call that every VM needs.
pub fn probe(kvm: &Kvm) -> Result<KvmExecutionProperties, KvmHostError> {
    static FOUND: Mutex<Option<KvmExecutionProperties>> = Mutex::new(None);
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(execution) = *found {
        return Ok(execution);
    }
    let mut guest = TinyGuest::empty(kvm)?;
    let table = guest.vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES)?;
    let interprets_kernels = interprets_x87(&mut guest)?;
    let stepping = probe_stepping(kvm, &mut guest).unwrap_or_else(|e| {
        log::debug!("this KVM does not step guests: {}", error_line(&e));
        SteppingSupport::default()
    });
    let execution = KvmExecutionProperties {
        interprets_kernels,
        shows_hidden_transactions: cpuid::has_transactions(&table),
        stepping,
    };
    *found = Some(execution);
    // Release the lock before removing the probe's VM, because removing it takes long and other
    // threads may be waiting for the result.
    drop(found);
    drop(guest);
    Ok(execution)
}

/// Returns whether KVM interprets code at CPL 0. Determined by running `fld1` there: KVM's emulator
/// lacks x87 arithmetic, so interpreting the instruction ends in `KVM_EXIT_INTERNAL_ERROR`.
fn interprets_x87(guest: &mut TinyGuest) -> Result<bool, KvmHostError> {
    guest.load(0, &[0xd9, 0xe8, LEAVE[0], LEAVE[1]])?;
    Ok(!matches!(guest.vcpu.run()?, VcpuExit::IoOut(..)))
}

fn probe_stepping(kvm: &Kvm, guest: &mut TinyGuest) -> Result<SteppingSupport, KvmHostError> {
    let kernel = stepping::probe_kernel(kvm, guest)?;
    Ok(SteppingSupport {
        user: stepping::probe_user(guest)?,
        ..kernel
    })
}

/// Capabilities of this host's KVM.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct KvmCapabilities {
    /// The method by which KVM runs guest code.
    pub flavour: VirtualizationMethod,
    /// `true` if KVM can run an unmodified Linux kernel. Determined by executing an instruction
    /// that every kernel uses and KVM's emulator lacks.
    pub runs_linux: bool,
    /// `true` if KVM can forward MSR accesses to user space (`KVM_CAP_X86_USER_SPACE_MSR` and the
    /// MSR filter).
    pub traps_msrs: bool,
    /// `true` if KVM's own vPMU can be disabled per VM (`KVM_CAP_PMU_CAPABILITY`).
    pub can_disable_own_pmu: bool,
    /// `true` if RDPMC raises #GP in a guest whose KVM vPMU is disabled. Otherwise RDPMC returns
    /// the value of a counter that does not count the guest. Determined by executing RDPMC.
    pub rdpmc_faults: bool,
    /// `true` if KVM offers binary statistics (`KVM_CAP_BINARY_STATS_FD`).
    pub binary_stats: bool,
    /// `true` if KVM can store guest registers at each exit (`KVM_CAP_SYNC_REGS`).
    pub sync_regs: bool,
    /// Maximum number of vCPUs that a VM can have.
    pub max_vcpus: usize,
}

/// Probes the capabilities of this host's KVM. Takes about one millisecond.
///
/// # Errors
/// Returns [`KvmHostError::Probe`] if KVM refuses a call that every VM needs.
pub fn facts(kvm: &Kvm) -> Result<KvmCapabilities, KvmHostError> {
    let interprets_kernels = probe(kvm)?.interprets_kernels;
    Ok(KvmCapabilities {
        flavour: flavour(interprets_kernels),
        runs_linux: !interprets_kernels,
        traps_msrs: kvm.check_extension(Cap::X86UserSpaceMsr) && kvm.check_extension(Cap::X86MsrFilter),
        can_disable_own_pmu: host::kvm_vpmu_can_be_disabled(kvm),
        rdpmc_faults: host::rdpmc_faults(kvm)?,
        binary_stats: kvm.check_extension_raw(u64::from(KVM_CAP_BINARY_STATS_FD)) > 0,
        sync_regs: host::syncs_registers(kvm),
        max_vcpus: kvm.get_max_vcpus(),
    })
}

fn flavour(interprets_kernels: bool) -> VirtualizationMethod {
    let module = |name: &str| Path::new("/sys/module").join(name).exists();
    if interprets_kernels {
        VirtualizationMethod::SoftwareOnly
    } else if module("kvm_amd") {
        VirtualizationMethod::Svm
    } else if module("kvm_intel") {
        VirtualizationMethod::Vmx
    } else if std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains("AuthenticAMD")) {
        VirtualizationMethod::Svm
    } else {
        VirtualizationMethod::Vmx
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpreting_kvm_does_not_run_linux() {
        let Ok(kvm) = host::open() else {
            eprintln!("SKIP: there is no KVM here");
            return;
        };
        let facts = facts(&kvm).unwrap();
        let interprets = probe(&kvm).unwrap().interprets_kernels;
        assert_eq!(facts.runs_linux, !interprets);
        assert_eq!(facts.flavour == VirtualizationMethod::SoftwareOnly, interprets);
    }
}
