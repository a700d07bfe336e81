//! What /dev/kvm is on this host: hardware virtualisation or software only, and the capabilities the vPMU
//! needs.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use kvm_bindings::{
    KVM_CAP_BINARY_STATS_FD, KVM_CAP_PMU_CAPABILITY, KVM_CAP_SPLIT_IRQCHIP, KVM_PMU_CAP_DISABLE,
    kvm_enable_cap,
};
pub use kvm_ioctls::Kvm;
use kvm_ioctls::{Cap, VcpuExit};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::call::CallError;
use super::memslot::{MemorySlots, SlotError};
use super::vm_fd::VmFd;

/// `out 0x10, al`: how a probe's code ends. No chip in the kernel has the port, so `KVM_RUN` returns.
pub(super) const LEAVE: [u8; 2] = [0xe6, 0x10];
/// What KVM keeps of its routing table for the I/O APIC that would be in user space.
const IOAPIC_PINS: u64 = 24;

/// Why KVM cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// There is no /dev/kvm.
    #[error(
        "/dev/kvm does not exist: this host has no KVM; load kvm_intel or kvm_amd, enable virtualisation in the \
         firmware, or use `make lab`"
    )]
    NoKvm,
    /// /dev/kvm may not be opened.
    #[error("no permission to open /dev/kvm: join its group (usually `kvm`) or run as root")]
    Permission,
    /// /dev/kvm could not be opened for another reason.
    #[error("/dev/kvm cannot be opened")]
    Open(#[source] io::Error),
    /// KVM speaks another API.
    #[error("/dev/kvm speaks API version {0}, but version 12 is needed")]
    ApiVersion(i32),
    /// A probe failed.
    #[error("probing KVM failed")]
    Probe(#[from] CallError),
    /// The probe's memory.
    #[error("probing KVM failed")]
    Slot(#[from] SlotError),
    /// No memory for the probe.
    #[error("no memory to probe KVM with")]
    Memory,
    /// The host refused the event that was to go off and on.
    #[error("an event for measuring what turns cost could not be opened")]
    Event(#[source] perf_core::pmu::PmuError),
    /// A guest of three instructions did not run.
    #[error("a guest for measuring what turns cost did not run")]
    Silent,
}

/// How this KVM runs guest code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Flavour {
    /// Intel VT-x.
    Vmx,
    /// AMD-V.
    Svm,
    /// No hardware virtualisation: guest kernel code is emulated.
    SoftwareOnly,
}

impl fmt::Display for Flavour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Vmx => "Intel VT-x",
            Self::Svm => "AMD-V",
            Self::SoftwareOnly => "software only (no VT-x or AMD-V)",
        })
    }
}

/// Opens /dev/kvm.
///
/// # Errors
/// [`HostError`] that names what to do.
pub fn open() -> Result<Kvm, HostError> {
    let kvm = Kvm::new().map_err(|e| match e.errno() {
        libc::ENOENT => HostError::NoKvm,
        libc::EACCES | libc::EPERM => HostError::Permission,
        errno => HostError::Open(io::Error::from_raw_os_error(errno)),
    })?;
    match kvm.get_api_version() {
        12 => Ok(kvm),
        version => Err(HostError::ApiVersion(version)),
    }
}

/// What is known of this host's KVM.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct KvmFacts {
    /// How guest code is run.
    pub flavour: Flavour,
    /// Whether an unmodified Linux kernel can run, found out by running an instruction that every kernel
    /// uses and that KVM's emulator lacks.
    pub runs_linux: bool,
    /// MSR accesses can be handed to user space (`KVM_CAP_X86_USER_SPACE_MSR` and the filter).
    pub traps_msrs: bool,
    /// KVM's own vPMU can be switched off per VM (`KVM_CAP_PMU_CAPABILITY`).
    pub can_disable_own_pmu: bool,
    /// RDPMC that nothing stands in for raises #GP while KVM's own vPMU is off, found out by executing it.
    /// Else KVM answers it with a count of its own, which is no guest's.
    pub rdpmc_faults: bool,
    /// Binary statistics (`KVM_CAP_BINARY_STATS_FD`).
    pub binary_stats: bool,
    /// Guest registers come with each exit (`KVM_CAP_SYNC_REGS`).
    pub sync_regs: bool,
    /// Most vCPUs a VM can have.
    pub max_vcpus: usize,
}

/// Probes KVM; takes about a millisecond.
///
/// # Errors
/// [`HostError::Probe`] when KVM refuses what every VM needs.
pub fn facts(kvm: &Kvm) -> Result<KvmFacts, HostError> {
    let interprets_kernels = interprets_kernels(kvm)?;
    Ok(KvmFacts {
        flavour: flavour(interprets_kernels),
        runs_linux: !interprets_kernels,
        traps_msrs: kvm.check_extension(Cap::X86UserSpaceMsr) && kvm.check_extension(Cap::X86MsrFilter),
        can_disable_own_pmu: own_pmu_can_be_disabled(kvm),
        rdpmc_faults: rdpmc_faults(kvm)?,
        binary_stats: kvm.check_extension_raw(u64::from(KVM_CAP_BINARY_STATS_FD)) > 0,
        sync_regs: syncs_registers(kvm),
        max_vcpus: kvm.get_max_vcpus(),
    })
}

/// Frequency of a guest's TSC in Hz, as KVM_GET_TSC_KHZ says.
///
/// # Errors
/// KVM's.
pub fn tsc_hz(kvm: &Kvm) -> Result<u64, HostError> {
    let khz = probe_vm(kvm)?.create_vcpu(0)?.get_tsc_khz()?;
    Ok(u64::from(khz) * 1000)
}

/// A VM for a probe, with its local APICs in the kernel where KVM can split them off. KVM takes a static
/// branch for vCPUs without one (`kvm_has_noapic_vcpu`): the first such vCPU of a host and the end of the
/// last each make the kernel patch its own code on all processors, which every VM of the host would feel.
/// A vCPU of it that halts does not come back from `KVM_RUN`, so its code ends with [`LEAVE`].
///
/// # Errors
/// KVM's.
pub(super) fn probe_vm(kvm: &Kvm) -> Result<VmFd, CallError> {
    let vm = VmFd::new(kvm)?;
    if kvm.check_extension(Cap::SplitIrqchip) {
        let mut cap = kvm_enable_cap {
            cap: KVM_CAP_SPLIT_IRQCHIP,
            ..Default::default()
        };
        cap.args[0] = IOAPIC_PINS;
        vm.raw()
            .enable_cap(&cap)
            .map_err(CallError::of("KVM_ENABLE_CAP(KVM_CAP_SPLIT_IRQCHIP)"))?;
    }
    Ok(vm)
}

/// Whether registers can come with exits and go with entries, by the `kvm_run` page (`KVM_CAP_SYNC_REGS`).
pub fn syncs_registers(kvm: &Kvm) -> bool {
    kvm.check_extension(Cap::SyncRegs)
}

/// Most vCPUs that one VM can have.
pub fn most_vcpus(kvm: &Kvm) -> usize {
    kvm.get_max_vcpus()
}

/// Whether `KVM_PMU_CAP_DISABLE` is offered (Linux 5.18 and later).
pub fn own_pmu_can_be_disabled(kvm: &Kvm) -> bool {
    kvm.check_extension_raw(u64::from(KVM_CAP_PMU_CAPABILITY)) & KVM_PMU_CAP_DISABLE.cast_signed() != 0
}

/// Switches KVM's own vPMU off for `vm`. False: that is not offered, as before Linux 5.18 or with
/// kvm.enable_pmu=0. What our CPUID does not announce KVM does not enable then, and the MSR filter catches
/// every register.
///
/// # Errors
/// KVM's.
pub fn disable_own_pmu(kvm: &Kvm, vm: &VmFd) -> Result<bool, CallError> {
    if !own_pmu_can_be_disabled(kvm) {
        return Ok(false);
    }
    let mut cap = kvm_enable_cap {
        cap: KVM_CAP_PMU_CAPABILITY,
        ..Default::default()
    };
    cap.args[0] = u64::from(KVM_PMU_CAP_DISABLE);
    let done = vm.raw().enable_cap(&cap);
    done.map_err(CallError::of("KVM_ENABLE_CAP(KVM_CAP_PMU_CAPABILITY)"))?;
    Ok(true)
}

/// Whether RDPMC raises #GP while KVM's own vPMU is off. KVM on AMD-V answered it with the counters of a vPMU
/// that counts nothing, in Linux 6.1 for one; in 6.12 it does not.
///
/// # Errors
/// [`HostError::Probe`] when KVM refuses what every VM needs.
pub fn rdpmc_faults(kvm: &Kvm) -> Result<bool, HostError> {
    // ECX is 0.
    goes_on_behind(kvm, [0x0f, 0x33]).map(|goes_on| !goes_on)
}

fn flavour(interprets_kernels: bool) -> Flavour {
    let module = |name: &str| Path::new("/sys/module").join(name).exists();
    if interprets_kernels {
        Flavour::SoftwareOnly
    } else if module("kvm_amd") {
        Flavour::Svm
    } else if module("kvm_intel") {
        Flavour::Vmx
    } else if std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains("AuthenticAMD")) {
        Flavour::Svm
    } else {
        Flavour::Vmx
    }
}

/// Whether this KVM interprets the code of guest kernels, found out by running `fld1`. KVM's emulator has no
/// x87 arithmetic, so where guest kernels are interpreted this ends in `KVM_EXIT_INTERNAL_ERROR`; on hardware
/// the next instruction follows. Found out once: a probe makes and ends a VM, for which KVM waits several
/// times until no processor looks at what was. Who asks meanwhile waits for the same probe.
///
/// # Errors
/// [`HostError::Probe`] when KVM refuses what every VM needs.
pub fn interprets_kernels(kvm: &Kvm) -> Result<bool, HostError> {
    static FOUND: Mutex<Option<bool>> = Mutex::new(None);
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(interprets) = *found {
        return Ok(interprets);
    }
    let interprets = !goes_on_behind(kvm, [0xd9, 0xe8])?;
    *found = Some(interprets);
    Ok(interprets)
}

/// Runs an instruction in real mode, without a table of interrupts. Whether the next one is reached; a fault
/// is the end.
fn goes_on_behind(kvm: &Kvm, [first, second]: [u8; 2]) -> Result<bool, HostError> {
    const ADDRESS: u64 = 0x1000;
    const SIZE: usize = 0x1000;
    let vm = probe_vm(kvm)?;
    disable_own_pmu(kvm, &vm)?;
    // VT-x without unrestricted guests needs a place for its own task state; elsewhere this has no effect.
    let _ = vm.raw().set_tss_address(0xfffb_d000);
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(ADDRESS), SIZE)])
        .map_err(|_| HostError::Memory)?;
    memory
        .write_slice(&[first, second, LEAVE[0], LEAVE[1]], GuestAddress(ADDRESS))
        .map_err(|_| HostError::Memory)?;
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

    /// A probe tells an instruction that completes from one that faults.
    #[test]
    fn a_probe_can_say_either() {
        let Ok(kvm) = open() else {
            eprintln!("SKIP: there is no KVM here");
            return;
        };
        assert!(goes_on_behind(&kvm, [0x90, 0x90]).unwrap(), "two NOPs");
        assert!(!goes_on_behind(&kvm, [0x0f, 0x0b]).unwrap(), "UD2");
    }

    /// What the self-description says of a host comes from one probe.
    #[test]
    fn a_kvm_that_interprets_kernels_runs_no_linux() {
        let Ok(kvm) = open() else {
            eprintln!("SKIP: there is no KVM here");
            return;
        };
        let facts = facts(&kvm).unwrap();
        let interprets = interprets_kernels(&kvm).unwrap();
        assert_eq!(facts.runs_linux, !interprets);
        assert_eq!(facts.flavour == Flavour::SoftwareOnly, interprets);
    }
}
