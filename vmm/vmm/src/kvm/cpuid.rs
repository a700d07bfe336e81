//! Builds the CPUID table of a vCPU from the leaves that KVM supports, the vCPU topology and the
//! leaves of the PMU model.
//!
//! The order of the steps matters. The table starts with the values of the host. If the PMU model
//! is from a different vendor, vendor and family are replaced next. Then the topology is written.
//! The PMU model comes last and overrides every bit that enumerates a counter.

use std::sync::{Mutex, PoisonError};

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::Kvm;
use vpmu::{ArchEventSet, CpuidRegs, HostPmuProperties, PmuModel, Vendor};

use super::signature::CpuSignature;

/// Error when building the guest's CPUID table.
#[derive(Debug, thiserror::Error)]
pub enum CpuidError {
    /// KVM_GET_SUPPORTED_CPUID failed.
    #[error("KVM_GET_SUPPORTED_CPUID failed")]
    Supported(#[source] kvm_ioctls::Error),
    /// The table has more entries than KVM accepts.
    #[error("the guest's CPUID needs {0} entries, more than KVM accepts")]
    TooMany(usize),
    /// `--nested` was given for a guest whose PMU is from a different vendor than the host CPU.
    #[error(
        "--nested: unsupported, because the guest's processor has a different vendor than the \
        host's; choose a --pmu of the host's vendor"
    )]
    NestedVendor,
    /// `--cpu-signature host` was given for a guest whose PMU is from a different vendor than the
    /// host CPU.
    #[error(
        "--cpu-signature host: the guest's processor has a different vendor than the host's; use a \
        signature of that vendor, for example 6/94/3, or a --pmu of the host's vendor"
    )]
    SignatureVendor,
    /// `--nested` was given on a host whose KVM does not support nested virtualisation.
    #[error(
        "--nested: this host's KVM does not support nested guests; load kvm_intel or kvm_amd with \
        nested=1, or omit --nested"
    )]
    NestedRefused,
}

/// Signature (leaf 1 EAX) of a guest with an Intel PMU on a host of a different vendor: family 6
/// with a model number that Intel has not used. For such a processor, guests use generic code paths
/// instead of the event tables and errata workarounds of a model.
const GENERIC_INTEL_SIGNATURE: u32 = 0x000f_06f0;
/// Signature (leaf 1 EAX) of a guest with an AMD PMU on a host of a different vendor: family 17h,
/// model 31h, the first generation whose core counters need no errata workarounds in guests.
const GENERIC_AMD_SIGNATURE: u32 = 0x0083_0f10;

/// CPUID.1:ECX.TSC_DEADLINE: the local APIC timer has the TSC-deadline mode.
const LEAF1_ECX_TSC_DEADLINE: u32 = 1 << 24;
/// CPUID.1:ECX.HYPERVISOR: the processor is virtual.
const LEAF1_ECX_HYPERVISOR: u32 = 1 << 31;
/// CPUID.1:EDX.HTT: the package has more than one logical processor.
const LEAF1_EDX_HTT: u32 = 1 << 28;
/// CPUID.1:ECX.VMX: the guest can use VT-x.
const LEAF1_ECX_VMX: u32 = 1 << 5;
/// CPUID.80000001:ECX.SVM: the guest can use AMD-V.
const EXT1_ECX_SVM: u32 = 1 << 2;
/// CPUID leaf of the SVM revision and features.
const SVM_LEAF: u32 = 0x8000_000a;
/// CPUID leaf of KVM's paravirtual features, one bit each in EAX.
const KVM_FEATURES_LEAF: u32 = 0x4000_0001;
/// Bits of [`KVM_FEATURES_LEAF`] for features that use hypercalls: MMU operations (bit 2), kicking
/// a halted vCPU (7), sending IPIs (11), yielding to a vCPU (13), mapping ranges of guest memory
/// (16), and control of migration (17). See Linux, Documentation/virt/kvm/x86/cpuid.rst.
const HYPERCALL_FEATURES: u32 = 1 << 2 | 1 << 7 | 1 << 11 | 1 << 13 | 1 << 16 | 1 << 17;
/// Bit 5 of [`KVM_FEATURES_LEAF`]: stolen time. KVM updates the record of stolen time in guest
/// memory at each entry after an exit to user space.
const STEAL_TIME: u32 = 1 << 5;
/// CPUID leaf of the time stamp counter and the core crystal clock. EBX/EAX is the ratio of their
/// frequencies, and ECX is the crystal frequency in Hz (Intel SDM vol. 2, CPUID).
const TSC_LEAF: u32 = 0x15;
/// CPUID leaf of the processor frequencies in MHz: base in EAX, maximum in EBX, bus in ECX.
const FREQUENCY_LEAF: u32 = 0x16;
/// Frequency of the local APIC timer in kHz. Guests assume that the crystal clock drives this
/// timer. KVM's timer ticks once per nanosecond (`APIC_BUS_CYCLE_NS`, the default of
/// `KVM_CAP_X86_APIC_BUS_CYCLES_NS`).
const APIC_TIMER_KHZ: u32 = 1_000_000;
/// Maximum denominator of the TSC ratio. Linux multiplies the crystal frequency in kHz by the
/// numerator in 32 bits (`native_calibrate_tsc`), so a larger denominator could overflow.
const MAX_DENOMINATOR: u64 = 4000;
/// Bus frequency in MHz, as processors with leaf 16H report it.
const BUS_MHZ: u32 = 100;
/// CPUID.(7,0):ECX.SHSTK: shadow stacks.
const LEAF7_ECX_SHADOW_STACKS: u32 = 1 << 7;
/// CPUID.(7,0):ECX.BUS_LOCK_DETECT: the processor detects bus locks.
const LEAF7_ECX_BUS_LOCK_DETECT: u32 = 1 << 24;
/// CPUID.(7,0):EBX bits of Intel TSX: HLE (4) and RTM (11).
const LEAF7_EBX_TRANSACTIONS: u32 = 1 << 4 | 1 << 11;
/// CPUID.(7,1):EAX.FRED: the processor delivers events without an interrupt descriptor table.
const LEAF7_1_EAX_FRED: u32 = 1 << 17;
/// CPUID.80000001:ECX.CMP_LEGACY: leaf 1 counts cores, not threads.
const EXT1_ECX_CMP_LEGACY: u32 = 1 << 1;

/// Properties of the guest's vCPUs that determine their CPUID table.
#[derive(Clone, Copy, Debug)]
pub struct GuestCpuidConfig<'a> {
    /// The PMU model. May be the model without a PMU.
    pub pmu: &'a PmuModel,
    /// Architectural events that the host can count for a guest with this PMU model.
    pub backability: ArchEventSet,
    /// Number of vCPUs that the topology leaves report.
    pub cpus: u8,
    /// TSC frequency of the guest in kHz. CPUID reports the frequency only for an Intel processor.
    pub tsc_khz: u32,
    /// `true` if KVM's local APIC supports the TSC-deadline mode of its timer.
    pub tsc_deadline: bool,
    /// `true` if the guest may use nested virtualisation.
    pub nested: bool,
    /// `true` to report stolen time to the guest. `false` for a guest that is single-stepped from
    /// its start.
    pub shows_steal_time: bool,
    /// Family, model and stepping for the guest, if the operator chose them.
    pub signature: Option<CpuSignature>,
    /// `true` if the VMM finds guest exception handlers through the interrupt descriptor table, for
    /// single-stepping or for emulating RDPMC in the #GP handler.
    pub enters_handlers: bool,
}

/// Executes CPUID on the current processor. Suitable as the CPUID reader of [`PmuModel::resolve`].
pub fn read_host(leaf: u32, subleaf: u32) -> CpuidRegs {
    let r = std::arch::x86_64::__cpuid_count(leaf, subleaf);
    CpuidRegs {
        eax: r.eax,
        ebx: r.ebx,
        ecx: r.ecx,
        edx: r.edx,
    }
}

/// Returns the CPUID leaves that this host's KVM supports. Only the first call asks KVM. KVM
/// executes CPUID for each leaf, which takes half a millisecond in total if the host is itself a
/// guest.
///
/// # Errors
/// Returns [`CpuidError::Supported`] if KVM_GET_SUPPORTED_CPUID fails.
pub fn supported(kvm: &Kvm) -> Result<CpuId, CpuidError> {
    static SUPPORTED: Mutex<Option<CpuId>> = Mutex::new(None);
    let mut known = SUPPORTED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(leaves) = &*known {
        return Ok(leaves.clone());
    }
    let leaves = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(CpuidError::Supported)?;
    *known = Some(leaves.clone());
    Ok(leaves)
}

/// Returns the CPUID table of vCPU `id` for a guest with the properties `guest`. `supported`
/// contains the leaves that KVM supports.
///
/// # Errors
/// Returns [`CpuidError::TooMany`] if the PMU leaves exceed KVM's limit, or an error of the
/// `--nested` and `--cpu-signature` options.
pub fn for_vcpu(supported: &CpuId, guest: GuestCpuidConfig<'_>, id: u8) -> Result<CpuId, CpuidError> {
    let mut entries: Vec<kvm_cpuid_entry2> = supported.as_slice().to_vec();
    let vendor = guest.pmu.vendor();
    let foreign = HostPmuProperties::vendor(&mut read_host) != vendor;
    if foreign {
        set_identity(&mut entries, vendor);
        hide_hypercalls(&mut entries);
        hide_bus_lock_detection(&mut entries);
    }
    if guest.enters_handlers {
        hide_fred_and_shadow_stacks(&mut entries);
    }
    match guest.signature {
        None => {}
        Some(CpuSignature::Host) if foreign => return Err(CpuidError::SignatureVendor),
        Some(CpuSignature::Host) => set_signature(&mut entries, vendor, read_host(1, 0).eax),
        Some(CpuSignature::Eax(eax)) => set_signature(&mut entries, vendor, eax),
    }
    if !guest.shows_steal_time {
        hide_stolen_time(&mut entries);
    }
    if !guest.nested {
        hide_virtualisation(&mut entries);
    } else if foreign {
        return Err(CpuidError::NestedVendor);
    } else if !has_virtualisation(&entries) {
        return Err(CpuidError::NestedRefused);
    }
    if vendor == Vendor::Intel {
        set_frequencies(&mut entries, guest.tsc_khz);
    }
    for entry in &mut entries {
        set_topology(entry, guest, id);
        // Hide APERF and MPERF, which would count host execution.
        if entry.function == 6 {
            entry.ecx &= !1;
        }
    }
    apply_pmu(&mut entries, guest.pmu, guest.backability);
    let count = entries.len();
    CpuId::from_entries(&entries).map_err(|_| CpuidError::TooMany(count))
}

/// Hides VT-x and AMD-V, which KVM reports as supported if its `nested` parameter is on.
fn hide_virtualisation(entries: &mut [kvm_cpuid_entry2]) {
    for entry in entries {
        match entry.function {
            1 => entry.ecx &= !LEAF1_ECX_VMX,
            0x8000_0001 => entry.ecx &= !EXT1_ECX_SVM,
            SVM_LEAF => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
            _ => {}
        }
    }
}

/// Hides the features that use hypercalls. A guest uses the hypercall instruction of the vendor
/// that it detects (VMCALL or VMMCALL). If this is not the host's vendor, KVM rewrites the
/// instruction in guest memory, and a kernel with write-protected code crashes.
fn hide_hypercalls(entries: &mut [kvm_cpuid_entry2]) {
    for entry in entries {
        if entry.function == KVM_FEATURES_LEAF {
            entry.eax &= !HYPERCALL_FEATURES;
        }
    }
}

/// Hides bus lock detection, which KVM reports on AMD hosts although it does not emulate the
/// feature for guests there.
fn hide_bus_lock_detection(entries: &mut [kvm_cpuid_entry2]) {
    for entry in entries {
        if (entry.function, entry.index) == (7, 0) {
            entry.ecx &= !LEAF7_ECX_BUS_LOCK_DETECT;
        }
    }
}

/// Hides FRED and shadow stacks, which conflict with the VMM's use of guest exception handlers.
/// With FRED, the interrupt descriptor table does not give the addresses of the handlers. With
/// shadow stacks, the VMM cannot return from a handler by setting registers, because the handler's
/// frame would stay on the shadow stack.
fn hide_fred_and_shadow_stacks(entries: &mut [kvm_cpuid_entry2]) {
    for entry in entries {
        match (entry.function, entry.index) {
            (7, 0) => entry.ecx &= !LEAF7_ECX_SHADOW_STACKS,
            (7, 1) => entry.eax &= !LEAF7_1_EAX_FRED,
            _ => {}
        }
    }
}

/// Returns whether Intel TSX is among the CPUID leaves `supported`.
pub fn has_transactions(supported: &CpuId) -> bool {
    supported
        .as_slice()
        .iter()
        .any(|e| (e.function, e.index) == (7, 0) && e.ebx & LEAF7_EBX_TRANSACTIONS != 0)
}

/// Hides Intel TSX, which KVM reports although XBEGIN does not work in a guest kernel that KVM
/// interprets. A kernel that uses XBEGIN would crash with #UD.
pub fn hide_transactions(supported: &mut CpuId) {
    for entry in supported.as_mut_slice() {
        if (entry.function, entry.index) == (7, 0) {
            entry.ebx &= !LEAF7_EBX_TRANSACTIONS;
        }
    }
}

/// Hides stolen time from a guest that is single-stepped. A guest reads the record of stolen time
/// again until the version of the record has not changed. KVM may change the version at each entry,
/// and a single-stepped guest is entered for every instruction, so it would loop forever.
fn hide_stolen_time(entries: &mut [kvm_cpuid_entry2]) {
    for entry in entries {
        if entry.function == KVM_FEATURES_LEAF {
            entry.eax &= !STEAL_TIME;
        }
    }
}

/// Returns `true` if the CPUID leaves of a saved vCPU enumerate stolen time.
pub(crate) fn shows_stolen_time(leaves: &[[u32; 7]]) -> bool {
    leaves
        .iter()
        .any(|[function, _, _, eax, ..]| *function == KVM_FEATURES_LEAF && eax & STEAL_TIME != 0)
}

fn has_virtualisation(entries: &[kvm_cpuid_entry2]) -> bool {
    entries.iter().any(|entry| match entry.function {
        1 => entry.ecx & LEAF1_ECX_VMX != 0,
        0x8000_0001 => entry.ecx & EXT1_ECX_SVM != 0,
        _ => false,
    })
}

/// Sets the family, model and stepping in the table. An AMD processor reports them in two leaves.
fn set_signature(entries: &mut [kvm_cpuid_entry2], vendor: Vendor, signature: u32) {
    for entry in entries {
        match entry.function {
            1 => entry.eax = signature,
            0x8000_0001 if vendor == Vendor::Amd => entry.eax = signature,
            _ => {}
        }
    }
}

fn set_identity(entries: &mut [kvm_cpuid_entry2], vendor: Vendor) {
    let (name, signature) = match vendor {
        Vendor::Intel => (b"GenuineIntel", GENERIC_INTEL_SIGNATURE),
        Vendor::Amd => (b"AuthenticAMD", GENERIC_AMD_SIGNATURE),
    };
    let word = |i: usize| u32::from_le_bytes([name[i], name[i + 1], name[i + 2], name[i + 3]]);
    for entry in &mut *entries {
        if matches!(entry.function, 0 | 0x8000_0000) {
            (entry.ebx, entry.edx, entry.ecx) = (word(0), word(4), word(8));
        }
    }
    set_signature(entries, vendor, signature);
}

/// Sets the leaves that give the TSC frequency, which KVM leaves at zero. perf in the guest would
/// otherwise read `#system_tsc_freq` as 0 and divide by it.
fn set_frequencies(entries: &mut Vec<kvm_cpuid_entry2>, tsc_khz: u32) {
    let Some((crystal_khz, numerator, denominator)) = crystal(tsc_khz) else {
        return;
    };
    entries.retain(|entry| !matches!(entry.function, TSC_LEAF | FREQUENCY_LEAF));
    let mhz = (tsc_khz.saturating_add(500) / 1000) & 0xffff;
    entries.push(kvm_cpuid_entry2 {
        function: TSC_LEAF,
        eax: denominator,
        ebx: numerator,
        ecx: crystal_khz * 1000,
        ..Default::default()
    });
    entries.push(kvm_cpuid_entry2 {
        function: FREQUENCY_LEAF,
        eax: mhz,
        ebx: mhz,
        ecx: BUS_MHZ,
        ..Default::default()
    });
    for entry in entries.iter_mut().filter(|entry| entry.function == 0) {
        entry.eax = entry.eax.max(FREQUENCY_LEAF);
    }
}

/// Returns the crystal frequency in kHz, and the numerator and denominator of the ratio between the
/// TSC and the crystal. Returns `None` if no valid ratio exists.
///
/// The crystal frequency is as close to the local APIC timer frequency as a ratio permits. The
/// rounding error is in the crystal frequency, because a timer error of a few ppm is harmless and a
/// TSC error is not.
fn crystal(tsc_khz: u32) -> Option<(u32, u32, u32)> {
    let tsc = u64::from(tsc_khz);
    let timer = u64::from(APIC_TIMER_KHZ);
    let ratios = (1..=MAX_DENOMINATOR).filter_map(|denominator| {
        let numerator = (tsc * denominator + timer / 2) / timer;
        let crystal = (tsc * denominator + numerator / 2).checked_div(numerator)?;
        (crystal * numerator <= u64::from(u32::MAX)).then_some((crystal, numerator, denominator))
    });
    let (crystal, numerator, denominator) = ratios.min_by_key(|(crystal, ..)| crystal.abs_diff(timer))?;
    // Reject crystal frequencies that differ from that of the APIC timer by more than 0.1 %.
    (crystal.abs_diff(timer) <= timer / 1000).then_some(())?;
    Some((
        u32::try_from(crystal).ok()?,
        u32::try_from(numerator).ok()?,
        u32::try_from(denominator).ok()?,
    ))
}

fn set_topology(entry: &mut kvm_cpuid_entry2, guest: GuestCpuidConfig<'_>, id: u8) {
    let cpus = u32::from(guest.cpus);
    let id = u32::from(id);
    // Number of APIC ID bits below the package ID: one core with one thread for each vCPU.
    let core_bits = 32 - (cpus - 1).leading_zeros().min(32);
    match entry.function {
        1 => {
            entry.ebx = entry.ebx & 0xffff | id << 24 | (1u32 << core_bits).min(255) << 16;
            entry.ecx |= LEAF1_ECX_HYPERVISOR;
            set_bit(&mut entry.ecx, LEAF1_ECX_TSC_DEADLINE, guest.tsc_deadline);
            set_bit(&mut entry.edx, LEAF1_EDX_HTT, cpus > 1);
        }
        // Deterministic cache parameters: cores per package in EAX[31:26], threads sharing in
        // EAX[25:14].
        4 if entry.eax & 0x1f != 0 => {
            let shared = if entry.eax >> 5 & 7 >= 3 {
                (1u32 << core_bits) - 1
            } else {
                0
            };
            entry.eax = entry.eax & 0x3fff | shared << 14 | ((1u32 << core_bits) - 1).min(63) << 26;
        }
        0xb | 0x1f => {
            entry.edx = id;
            (entry.eax, entry.ebx, entry.ecx) = match entry.index {
                0 => (0, 1, 1 << 8),
                1 => (core_bits, cpus, 1 | 2 << 8),
                n => (0, 0, n & 0xff),
            };
        }
        0x8000_0001 => set_bit(&mut entry.ecx, EXT1_ECX_CMP_LEGACY, cpus > 1),
        0x8000_0008 => entry.ecx = core_bits << 12 | (cpus - 1),
        0x8000_001d if entry.eax & 0x1f != 0 => {
            let shared = if entry.eax >> 5 & 7 >= 3 { cpus - 1 } else { 0 };
            entry.eax = entry.eax & 0x3fff | shared << 14;
        }
        0x8000_001e => {
            entry.eax = id;
            entry.ebx = id;
            entry.ecx = 0;
        }
        _ => {}
    }
}

/// Writes the leaves that describe the PMU model to the table, and adds those that the host lacks.
fn apply_pmu(entries: &mut Vec<kvm_cpuid_entry2>, model: &PmuModel, backability: ArchEventSet) {
    for &leaf in model.required_leaves() {
        if !entries.iter().any(|e| e.function == leaf) {
            entries.push(kvm_cpuid_entry2 {
                function: leaf,
                ..Default::default()
            });
        }
    }
    for e in entries {
        let mut regs = CpuidRegs {
            eax: e.eax,
            ebx: e.ebx,
            ecx: e.ecx,
            edx: e.edx,
        };
        model.adjust_cpuid(e.function, e.index, &mut regs, backability);
        (e.eax, e.ebx, e.ecx, e.edx) = (regs.eax, regs.ebx, regs.ecx, regs.edx);
    }
}

fn set_bit(word: &mut u32, bit: u32, on: bool) {
    if on {
        *word |= bit;
    } else {
        *word &= !bit;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host_model() -> PmuModel {
        match HostPmuProperties::vendor(&mut read_host) {
            Vendor::Intel => PmuModel::INTEL,
            Vendor::Amd => PmuModel::AMD,
        }
    }

    fn other_model() -> PmuModel {
        match HostPmuProperties::vendor(&mut read_host) {
            Vendor::Intel => PmuModel::AMD,
            Vendor::Amd => PmuModel::INTEL,
        }
    }

    fn guest(pmu: &PmuModel, nested: bool) -> GuestCpuidConfig<'_> {
        GuestCpuidConfig {
            pmu,
            backability: ArchEventSet::NONE,
            cpus: 1,
            tsc_khz: 2_595_124,
            tsc_deadline: true,
            nested,
            shows_steal_time: true,
            signature: None,
            enters_handlers: false,
        }
    }

    fn supported(virtualisation: bool) -> CpuId {
        let leaf = |function, ecx: u32, eax| kvm_cpuid_entry2 {
            function,
            ecx: if virtualisation { ecx } else { 0 },
            eax,
            ..Default::default()
        };
        let svm = u32::from(virtualisation);
        CpuId::from_entries(&[
            leaf(0, 0, 0xd),
            leaf(1, LEAF1_ECX_VMX, 0),
            leaf(0x8000_0001, EXT1_ECX_SVM, 0),
            leaf(SVM_LEAF, 0, svm),
        ])
        .unwrap()
    }

    /// The guest's CPUID table reports VT-x or AMD-V only if the operator requested nested
    /// virtualisation.
    #[test]
    fn nested_cpuid_requires_option() {
        let model = host_model();
        let shown = for_vcpu(&supported(true), guest(&model, true), 0).unwrap();
        assert!(has_virtualisation(shown.as_slice()));
        let hidden = for_vcpu(&supported(true), guest(&model, false), 0).unwrap();
        assert!(!has_virtualisation(hidden.as_slice()));
        let svm = hidden.as_slice().iter().find(|e| e.function == SVM_LEAF).unwrap();
        assert_eq!(svm.eax, 0);
    }

    #[test]
    fn hide_transactions_clears_only_tsx() {
        let leaf7 = kvm_cpuid_entry2 {
            function: 7,
            ebx: u32::MAX,
            edx: u32::MAX,
            ..Default::default()
        };
        let subleaf = kvm_cpuid_entry2 { index: 1, ..leaf7 };
        let mut table = CpuId::from_entries(&[leaf7, subleaf]).unwrap();
        assert!(has_transactions(&table));
        hide_transactions(&mut table);
        assert!(!has_transactions(&table));
        assert_eq!(table.as_slice()[0].ebx, !(1 << 4 | 1 << 11));
        assert_eq!(
            (table.as_slice()[0].edx, table.as_slice()[1]),
            (u32::MAX, subleaf)
        );
    }

    /// Features that use hypercalls are hidden from a guest that detects a different vendor than
    /// the host's. Such a guest would execute a hypercall instruction that the host's processor
    /// lacks.
    #[test]
    fn hypercall_features_require_host_vendor() {
        let all = CpuId::from_entries(&[kvm_cpuid_entry2 {
            function: KVM_FEATURES_LEAF,
            eax: !0,
            ..Default::default()
        }])
        .unwrap();
        let features = |model: &PmuModel| for_vcpu(&all, guest(model, false), 0).unwrap().as_slice()[0].eax;
        assert_eq!(features(&host_model()), !0);
        // Features without hypercalls remain, for example the clock and stolen time.
        assert_eq!(features(&other_model()), !0x3_2884);
    }

    /// Stolen time is hidden from a single-stepped guest, because Linux reads it in a loop that
    /// never ends if every instruction is a separate VM entry.
    #[test]
    fn stepped_guest_has_no_steal_time() {
        let all = CpuId::from_entries(&[kvm_cpuid_entry2 {
            function: KVM_FEATURES_LEAF,
            eax: !0,
            ..Default::default()
        }])
        .unwrap();
        let model = host_model();
        let stepped = GuestCpuidConfig {
            shows_steal_time: false,
            ..guest(&model, false)
        };
        assert_eq!(for_vcpu(&all, stepped, 0).unwrap().as_slice()[0].eax, !(1 << 5));
    }

    /// Linux and perf derive the right frequencies from leaves 15H and 16H. This includes the
    /// product that Linux computes in 32 bits.
    #[test]
    fn intel_cpuid_reports_tsc_frequency() {
        for tsc_khz in [
            1_000_000, 2_595_124, 2_000_000, 2_100_003, 3_699_997, 4_294_000, 999_983, 800_001,
        ] {
            let guest = GuestCpuidConfig {
                tsc_khz,
                ..guest(&PmuModel::INTEL, false)
            };
            let table = for_vcpu(&supported(false), guest, 0).unwrap();
            let leaf = |n| *table.as_slice().iter().find(|e| e.function == n).unwrap();
            assert_eq!(leaf(0).eax, FREQUENCY_LEAF);
            let tsc = leaf(TSC_LEAF);
            let product = (tsc.ecx / 1000)
                .checked_mul(tsc.ebx)
                .expect("Linux multiplies in 32 bits");
            assert!((product / tsc.eax).abs_diff(tsc_khz) <= 2, "{tsc_khz}: {tsc:?}");
            // The crystal must have the frequency of the timer of KVM's local APIC, 1 GHz.
            assert!(tsc.ecx.abs_diff(1_000_000_000) < 100_000, "{tsc:?}");
            assert!(leaf(FREQUENCY_LEAF).eax.abs_diff(tsc_khz / 1000) <= 1);
        }
        let amd = for_vcpu(&supported(false), guest(&PmuModel::AMD, false), 0).unwrap();
        assert!(amd.as_slice().iter().all(|e| e.function != TSC_LEAF));
    }

    proptest::proptest! {
        #[test]
        fn every_tsc_frequency_has_a_crystal_ratio(khz in 100_000u32..4_200_000_000) {
            match crystal(khz) {
                Some((crystal, numerator, denominator)) => {
                    let product = crystal.checked_mul(numerator).unwrap();
                    // Maximum error: rounding of the crystal frequency to a kilohertz, plus the
                    // remainder of the division.
                    proptest::prop_assert!((product / denominator).abs_diff(khz) <= khz / 2_000_000 + 1);
                    proptest::prop_assert!(crystal.abs_diff(APIC_TIMER_KHZ) <= APIC_TIMER_KHZ / 1000);
                }
                None => proptest::prop_assert!(khz > 10_000_000),
            }
        }
    }

    /// The guest's CPUID has the requested signature, by which guests select event tables and
    /// errata workarounds.
    #[test]
    fn cpuid_has_requested_signature() {
        let (own, other) = (host_model(), other_model());
        let eax = |model, signature| {
            let guest = GuestCpuidConfig {
                signature,
                ..guest(model, false)
            };
            for_vcpu(&supported(false), guest, 0).map(|table| table.as_slice()[1].eax)
        };
        let skylake = CpuSignature::Eax(0x506e3);
        assert_eq!(eax(&own, Some(skylake)).unwrap(), 0x506e3);
        assert_eq!(eax(&other, Some(skylake)).unwrap(), 0x506e3);
        assert_ne!(eax(&other, None).unwrap(), 0x506e3);
        assert_eq!(eax(&own, Some(CpuSignature::Host)).unwrap(), read_host(1, 0).eax);
        let error = eax(&other, Some(CpuSignature::Host)).unwrap_err();
        assert!(matches!(error, CpuidError::SignatureVendor), "{error}");
    }

    /// FRED and shadow stacks are hidden if RDPMC is emulated at the #GP handler. The VMM finds the
    /// handler in the interrupt descriptor table and returns from it by setting registers.
    #[test]
    fn entering_handlers_hides_fred_and_shadow_stacks() {
        let leaf = |index, eax, ecx| kvm_cpuid_entry2 {
            function: 7,
            index,
            eax,
            ecx,
            ..Default::default()
        };
        let all = CpuId::from_entries(&[leaf(0, 2, 1 << 7), leaf(1, 1 << 17 | 1 << 18, 0)]).unwrap();
        let model = host_model();
        for enters_handlers in [false, true] {
            let guest = GuestCpuidConfig {
                enters_handlers,
                ..guest(&model, false)
            };
            let shown = for_vcpu(&all, guest, 0).unwrap();
            let [first, second] = [shown.as_slice()[0], shown.as_slice()[1]];
            assert_eq!(first.ecx >> 7 & 1 == 0, enters_handlers);
            assert_eq!(second.eax >> 17 & 1 == 0, enters_handlers);
            // LKGS remains enumerated, because it does not depend on FRED.
            assert_eq!(second.eax >> 18 & 1, 1);
        }
    }

    /// Bus lock detection is hidden on an AMD host. If CPUID reported it, Linux would set a bit of
    /// IA32_DEBUGCTL that KVM accepts only on an Intel host.
    #[test]
    fn bus_lock_detection_requires_intel_host() {
        let all = CpuId::from_entries(&[kvm_cpuid_entry2 {
            function: 7,
            ecx: 1 << 24,
            ..Default::default()
        }])
        .unwrap();
        let shown =
            |model: &PmuModel| for_vcpu(&all, guest(model, false), 0).unwrap().as_slice()[0].ecx >> 24 & 1;
        assert_eq!((shown(&host_model()), shown(&other_model())), (1, 0));
    }

    #[test]
    fn nested_error_names_reason() {
        let error = for_vcpu(&supported(false), guest(&host_model(), true), 0).unwrap_err();
        assert!(matches!(error, CpuidError::NestedRefused), "{error}");
        let error = for_vcpu(&supported(true), guest(&other_model(), true), 0).unwrap_err();
        assert!(matches!(error, CpuidError::NestedVendor), "{error}");
    }
}
