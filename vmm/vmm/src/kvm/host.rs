//! Opens the KVM of this host, and probes the properties that the vPMU depends on.

use std::fmt;
use std::io;
use std::sync::Arc;

use kvm_bindings::{KVM_CAP_PMU_CAPABILITY, KVM_CAP_SPLIT_IRQCHIP, KVM_PMU_CAP_DISABLE, kvm_enable_cap};
pub use kvm_ioctls::Kvm;
use kvm_ioctls::{Cap, VcpuExit};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::call::KvmIoctlError;
use super::memslot::{MemorySlotError, MemorySlots};
use super::vm_fd::VmFd;

/// `out 0x10, al`, the last instruction of probe code. No device in the kernel handles the port, so
/// `KVM_RUN` returns.
pub(super) const LEAVE: [u8; 2] = [0xe6, 0x10];
/// Number of pins that KVM reserves in its routing table for a user-space I/O APIC.
const IOAPIC_PINS: u64 = 24;

/// Error when opening or probing KVM.
#[derive(Debug, thiserror::Error)]
pub enum KvmHostError {
    /// /dev/kvm does not exist.
    #[error(
        "/dev/kvm: not found; load kvm_intel or kvm_amd, enable virtualisation in the firmware, or \
        use `make lab`"
    )]
    NoKvm,
    /// Opening /dev/kvm failed with EACCES or EPERM.
    #[error("/dev/kvm: permission denied; join its group (usually `kvm`) or run as root")]
    Permission,
    /// Opening /dev/kvm failed with an error other than ENOENT, EACCES and EPERM.
    #[error("cannot open /dev/kvm")]
    Open(#[source] io::Error),
    /// KVM has an unsupported API version.
    #[error("/dev/kvm: unsupported API version {0}; must be 12")]
    ApiVersion(i32),
    /// A KVM call that a probe made failed.
    #[error("probing KVM failed")]
    Probe(#[from] KvmIoctlError),
    /// KVM rejected the memory slot of a probe's guest.
    #[error("probing KVM failed")]
    Slot(#[from] MemorySlotError),
    /// Allocating the memory of a probe's guest failed.
    #[error("cannot allocate memory to probe KVM")]
    Memory,
    /// The host rejected the perf event that a probe needs.
    #[error("cannot open a perf event to measure the cost of a rotation")]
    Event(#[source] perf_core::pmu::PmuError),
    /// The guest that measures the cost of a rotation did not run.
    #[error("the guest that measures the cost of a rotation did not run")]
    Silent,
}

/// The method by which KVM runs guest code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum VirtualizationMethod {
    /// Hardware virtualisation with Intel VT-x.
    Vmx,
    /// Hardware virtualisation with AMD-V.
    Svm,
    /// No hardware virtualisation. KVM emulates guest kernel code.
    SoftwareOnly,
}

impl fmt::Display for VirtualizationMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Vmx => "Intel VT-x",
            Self::Svm => "AMD-V",
            Self::SoftwareOnly => "software only (no VT-x or AMD-V)",
        })
    }
}

/// Opens `/dev/kvm`, the interface to the host's KVM.
///
/// # Errors
/// Returns a [`KvmHostError`] whose message names the remedy.
pub fn open() -> Result<Kvm, KvmHostError> {
    let kvm = Kvm::new().map_err(|e| match e.errno() {
        libc::ENOENT => KvmHostError::NoKvm,
        libc::EACCES | libc::EPERM => KvmHostError::Permission,
        errno => KvmHostError::Open(io::Error::from_raw_os_error(errno)),
    })?;
    match kvm.get_api_version() {
        12 => Ok(kvm),
        version => Err(KvmHostError::ApiVersion(version)),
    }
}

/// Returns the TSC frequency in Hz that guests have by default (KVM_GET_TSC_KHZ).
///
/// # Errors
/// Returns an error if the KVM call fails.
pub fn tsc_hz(kvm: &Kvm) -> Result<u64, KvmHostError> {
    let khz = probe_vm(kvm)?.create_vcpu(0)?.get_tsc_khz()?;
    Ok(u64::from(khz) * 1000)
}

/// Creates a VM for a probe. Local APICs are in the kernel if KVM supports a split irqchip, and
/// KVM's own vPMU is disabled if KVM can disable it.
///
/// With the local APICs, the probe does not disturb other VMs of the host: when the first vCPU
/// without a local APIC is created and the last one is destroyed, the kernel patches its code on
/// all processors (`kvm_has_noapic_vcpu`). A halted vCPU with a local APIC does not return from
/// `KVM_RUN`, so probe code ends with [`LEAVE`].
///
/// With its vPMU enabled, the VM could have a mediated vPMU. KVM would reject its vCPUs with
/// `EBUSY` while hardware events of another VM or the NMI watchdog exist, and would reject events
/// of other VMs while the probe runs.
///
/// # Errors
/// Returns an error if a KVM call fails.
pub(super) fn probe_vm(kvm: &Kvm) -> Result<VmFd, KvmIoctlError> {
    let vm = VmFd::new(kvm)?;
    if kvm.check_extension(Cap::SplitIrqchip) {
        let mut cap = kvm_enable_cap {
            cap: KVM_CAP_SPLIT_IRQCHIP,
            ..Default::default()
        };
        cap.args[0] = IOAPIC_PINS;
        vm.raw()
            .enable_cap(&cap)
            .map_err(KvmIoctlError::of("KVM_ENABLE_CAP(KVM_CAP_SPLIT_IRQCHIP)"))?;
    }
    disable_kvm_vpmu(kvm, &vm)?;
    Ok(vm)
}

/// Returns whether KVM can exchange registers through the `kvm_run` page (`KVM_CAP_SYNC_REGS`).
pub fn syncs_registers(kvm: &Kvm) -> bool {
    kvm.check_extension(Cap::SyncRegs)
}

/// Returns the maximum number of vCPUs of a VM.
pub fn max_vcpu_count(kvm: &Kvm) -> usize {
    kvm.get_max_vcpus()
}

/// Returns whether KVM supports `KVM_PMU_CAP_DISABLE` (Linux 5.18 and later).
pub fn kvm_vpmu_can_be_disabled(kvm: &Kvm) -> bool {
    kvm.check_extension_raw(u64::from(KVM_CAP_PMU_CAPABILITY)) & KVM_PMU_CAP_DISABLE.cast_signed() != 0
}

/// Disables KVM's own vPMU for `vm`. Returns `false` if KVM cannot disable it (before Linux 5.18,
/// or with kvm.enable_pmu=0). In this case, KVM does not enable counters that the guest's CPUID
/// does not enumerate, and the MSR filter traps every PMU register.
///
/// # Errors
/// Returns an error if the KVM call fails.
pub fn disable_kvm_vpmu(kvm: &Kvm, vm: &VmFd) -> Result<bool, KvmIoctlError> {
    if !kvm_vpmu_can_be_disabled(kvm) {
        return Ok(false);
    }
    let mut cap = kvm_enable_cap {
        cap: KVM_CAP_PMU_CAPABILITY,
        ..Default::default()
    };
    cap.args[0] = u64::from(KVM_PMU_CAP_DISABLE);
    let done = vm.raw().enable_cap(&cap);
    done.map_err(KvmIoctlError::of("KVM_ENABLE_CAP(KVM_CAP_PMU_CAPABILITY)"))?;
    Ok(true)
}

/// Returns whether RDPMC raises #GP in a guest whose KVM vPMU is disabled. On AMD-V, KVM of Linux
/// 6.1 instead returns the counters of an idle vPMU; Linux 6.12 raises #GP.
///
/// # Errors
/// Returns [`KvmHostError::Probe`] if KVM rejects a call that every VM needs.
pub fn rdpmc_faults(kvm: &Kvm) -> Result<bool, KvmHostError> {
    // RDPMC reads counter 0, because ECX is 0.
    reaches_next_instruction(kvm, [0x0f, 0x33]).map(|goes_on| !goes_on)
}

/// Runs a two-byte instruction in a real-mode guest without an interrupt vector table. Returns
/// `true` if the next instruction is reached, and `false` if the instruction faults, which ends the
/// guest.
fn reaches_next_instruction(kvm: &Kvm, [first, second]: [u8; 2]) -> Result<bool, KvmHostError> {
    const ADDRESS: u64 = 0x1000;
    const SIZE: usize = 0x1000;
    let vm = probe_vm(kvm)?;
    // VT-x without unrestricted guest mode needs guest memory for a TSS. Other hosts ignore the
    // address.
    let _ = vm.raw().set_tss_address(0xfffb_d000);
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(ADDRESS), SIZE)])
        .map_err(|_| KvmHostError::Memory)?;
    memory
        .write_slice(&[first, second, LEAVE[0], LEAVE[1]], GuestAddress(ADDRESS))
        .map_err(|_| KvmHostError::Memory)?;
    let vm = Arc::new(vm);
    let _slots = MemorySlots::new(vm.clone(), memory)?;
    let mut vcpu = vm.create_vcpu(0)?;
    let mut sregs = vcpu.get_sregs()?;
    sregs.cs.base = 0;
    sregs.cs.selector = 0;
    sregs.idt.limit = 0;
    vcpu.set_sregs(&sregs)?;
    let mut regs = vcpu.get_regs()?;
    (regs.rip, regs.rcx, regs.rflags) = (ADDRESS, 0, 2);
    vcpu.set_regs(&regs)?;
    Ok(matches!(vcpu.run()?, VcpuExit::IoOut(..)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A probe distinguishes an instruction that faults from one that does not.
    #[test]
    fn probe_distinguishes_fault_from_completion() {
        let Ok(kvm) = open() else {
            eprintln!("SKIP: there is no KVM here");
            return;
        };
        assert!(reaches_next_instruction(&kvm, [0x90, 0x90]).unwrap(), "two NOPs");
        assert!(!reaches_next_instruction(&kvm, [0x0f, 0x0b]).unwrap(), "UD2");
    }
}
