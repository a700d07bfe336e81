//! Emulates IA32_DEBUGCTL, some of whose bits belong to the PMU and others to the processor.
//!
//! The register is trapped if the guest's PMU can freeze counters. A write passes the
//! processor's bits to KVM. A read returns the processor's bits that KVM has accepted.

use crate::kvm::call::KvmIoctlError;
use crate::kvm::vcpu_fd::VcpuFd;
use kvm_bindings::{CpuId, Msrs, kvm_msr_entry};
use vpmu::registers::IA32_DEBUGCTL;
use vpmu::{PmuModel, Vendor};

/// IA32_DEBUGCTL.LBR (bit 0): enables the branch records of the processor. Every processor accepts
/// the bit, so guests may set it, but it is dropped, because guests have no such records.
/// Forwarding it to KVM would start the branch records of the host.
const LBR: u64 = 1 << 0;
/// DebugCtl bits 5:2 of AMD processors, which once controlled pins. The bits are accepted and
/// dropped, as KVM does.
const AMD_PINS: u64 = 0b1111 << 2;
/// IA32_DEBUGCTL.BTF (bit 1): single-stepping on branches. Every processor accepts the bit. KVM
/// drops it if it does not support it.
const BTF: u64 = 1 << 1;
/// IA32_DEBUGCTL.BUS_LOCK_DETECT (bit 2), enumerated by CPUID.(07H,0):ECX\[24\].
const BUS_LOCK_DETECT: u64 = 1 << 2;
/// IA32_DEBUGCTL.RTM (bit 15): advanced debugging of transactions, enumerated by
/// CPUID.(07H,0):EBX.RTM.
const RTM: u64 = 1 << 15;

/// IA32_DEBUGCTL of one vCPU, except for the bits of the PMU. Owns an MSR list with one entry, so
/// an access does not allocate memory.
#[derive(Debug)]
pub struct DebugControl {
    /// Bits that belong to the PMU.
    pmu: u64,
    /// Bits that a guest may set but that have no effect and read as zero.
    dropped: u64,
    /// Bits that belong to the processor and are forwarded to KVM.
    processor: u64,
    /// Bits of `processor` that are set in KVM, as of the last write.
    kept: u64,
    msr: Msrs,
}

impl DebugControl {
    /// Creates the register of a vCPU with this CPUID table and PMU model. Returns `None` if memory
    /// is exhausted.
    pub fn new(cpuid: &CpuId, model: &PmuModel) -> Option<Self> {
        let entry = kvm_msr_entry {
            index: IA32_DEBUGCTL,
            ..Default::default()
        };
        Some(Self {
            pmu: model.debug_control_bits(),
            dropped: match model.vendor() {
                Vendor::Intel => LBR,
                Vendor::Amd => LBR | AMD_PINS,
            },
            processor: processor_bits(cpuid),
            kept: 0,
            msr: Msrs::from_entries(&[entry]).ok()?,
        })
    }

    /// Returns the value that RDMSR returns, without the bits of the PMU.
    pub fn read(&self) -> u64 {
        self.kept
    }

    /// Restores the bits of the processor that KVM had kept. The caller restores the MSR in KVM.
    pub fn restore(&mut self, kept: u64) {
        self.kept = kept & self.processor;
    }

    /// Returns the PMU's bits of `value`, which the guest writes with WRMSR. Returns `None` if the
    /// write must raise #GP.
    pub fn pmu_part(&self, value: u64) -> Option<u64> {
        let takes = self.processor | self.dropped | self.pmu;
        (value & !takes == 0).then_some(value & self.pmu)
    }

    /// Writes the processor's bits of `value` to KVM if they have changed.
    ///
    /// # Errors
    /// Returns an error if a KVM call fails. A guest cannot cause such a failure.
    pub fn write(&mut self, fd: &VcpuFd, value: u64) -> Result<(), KvmIoctlError> {
        let value = value & self.processor;
        if value == self.kept {
            return Ok(());
        }
        if let Some(entry) = self.msr.as_mut_slice().first_mut() {
            entry.data = value;
        }
        // If KVM rejects a bit, the register keeps its value; some versions accept the bit and drop
        // it.
        fd.set_msrs(&self.msr)?;
        self.kept = match (fd.get_msrs(&mut self.msr)?, self.msr.as_slice()) {
            (1, [entry]) => entry.data & self.processor,
            _ => 0,
        };
        Ok(())
    }
}

/// Returns the bits that a processor with this CPUID table supports, except for those of the PMU.
fn processor_bits(cpuid: &CpuId) -> u64 {
    let leaf = cpuid
        .as_slice()
        .iter()
        .find(|entry| entry.function == 7 && entry.index == 0);
    let has = |word: u32, bit: u32, control: u64| if word >> bit & 1 != 0 { control } else { 0 };
    BTF | leaf.map_or(0, |leaf| {
        has(leaf.ecx, 24, BUS_LOCK_DETECT) | has(leaf.ebx, 11, RTM)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvm_bindings::kvm_cpuid_entry2;
    use vpmu::PmuGeneration;

    fn with(ebx: u32, ecx: u32) -> DebugControl {
        of(&PmuModel::INTEL, ebx, ecx)
    }

    fn of(model: &PmuModel, ebx: u32, ecx: u32) -> DebugControl {
        let leaf = kvm_cpuid_entry2 {
            function: 7,
            ebx,
            ecx,
            ..Default::default()
        };
        DebugControl::new(&CpuId::from_entries(&[leaf]).unwrap(), model).unwrap()
    }

    /// If the guest sets a bit of IA32_DEBUGCTL that its CPUID table does not enumerate, the write
    /// raises #GP.
    #[test]
    fn debugctl_accepts_only_bits_in_cpuid() {
        let plain = with(0, 0);
        for bit in 0..64 {
            let expected = match bit {
                0 | 1 => Some(0),
                12 => Some(1 << 12),
                _ => None,
            };
            assert_eq!(plain.pmu_part(1 << bit), expected, "bit {bit}");
        }
        assert_eq!(with(0, 1 << 24).pmu_part(1 << 2 | 1 << 12), Some(1 << 12));
        assert_eq!(with(1 << 11, 0).pmu_part(1 << 15), Some(0));
    }

    /// A guest with branch records can set the bit that freezes the records at a PMI. On AMD, a
    /// guest can also set the bits that once controlled pins, without an effect.
    #[test]
    fn debugctl_accepts_freezing_of_branch_records() {
        let v2 = PmuModel::new(PmuGeneration::AmdV2, None, None).unwrap();
        for (model, dropped) in [(PmuModel::INTEL, 0b1u64), (v2, 0b11_1101)] {
            let control = of(&model.with_branch_records(), 0, 0);
            for bit in 0..64 {
                let expected = match bit {
                    11 | 12 => Some(1 << bit),
                    1 => Some(0),
                    _ => (dropped >> bit & 1 != 0).then_some(0),
                };
                assert_eq!(control.pmu_part(1 << bit), expected, "{model}: bit {bit}");
            }
        }
    }

    /// A guest cannot start branch recording on the host processor.
    #[test]
    fn debugctl_never_forwards_lbr_to_kvm() {
        assert_eq!(with(!0, !0).processor & LBR, 0);
    }
}
