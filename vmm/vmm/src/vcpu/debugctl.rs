//! Emulation of IA32_DEBUGCTL, whose bits are shared between the PMU and the processor.
//!
//! For a guest whose PMU can freeze counters, the whole register is trapped. Writes to bits outside
//! the PMU are forwarded to KVM, and reads return the bits that KVM retained.

use crate::kvm::call::KvmIoctlError;
use crate::kvm::vcpu_fd::VcpuFd;
use kvm_bindings::{CpuId, Msrs, kvm_msr_entry};
use vpmu::registers::IA32_DEBUGCTL;
use vpmu::{PmuModel, Vendor};

/// IA32_DEBUGCTL.LBR (bit 0): enables model-specific branch records, on AMD the record of the last
/// branch. Every processor accepts the bit. Guests have neither kind of record, so the bit is
/// dropped. Forwarding it to KVM would start the branch records of the host.
const LBR: u64 = 1 << 0;
/// DebugCtl bits 5:2 of AMD processors: control of pins that do not exist. KVM drops them, too.
const AMD_PINS: u64 = 0b1111 << 2;
/// IA32_DEBUGCTL.BTF (bit 1): single-step on branches. Every processor accepts the bit; KVM drops
/// it where unsupported.
const BTF: u64 = 1 << 1;
/// IA32_DEBUGCTL.BUS_LOCK_DETECT (bit 2), enumerated by CPUID.(07H,0):ECX\[24\].
const BUS_LOCK_DETECT: u64 = 1 << 2;
/// IA32_DEBUGCTL.RTM (bit 15): advanced debugging of transactions, enumerated by
/// CPUID.(07H,0):EBX.RTM.
const RTM: u64 = 1 << 15;

/// IA32_DEBUGCTL of one vCPU, without the PMU's bits. Owns a one-entry MSR list, so an access does
/// not allocate.
#[derive(Debug)]
pub struct DebugControl {
    /// Bits that the PMU uses.
    pmu: u64,
    /// Bits that a write may set and that are then dropped.
    dropped: u64,
    /// Bits that are forwarded to KVM.
    processor: u64,
    /// Bits of `processor` that KVM retained from the last write.
    kept: u64,
    msr: Msrs,
}

impl DebugControl {
    /// Creates the register for a vCPU with this CPUID and PMU. Returns `None` if memory is
    /// exhausted.
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

    /// Returns the bits of IA32_DEBUGCTL that RDMSR returns, except for those of the PMU.
    pub fn read(&self) -> u64 {
        self.kept
    }

    /// Restores the record of the bits that KVM retains. The MSR itself is restored separately.
    pub fn restore(&mut self, kept: u64) {
        self.kept = kept & self.processor;
    }

    /// Returns the PMU's bits of a value written by WRMSR, or `None` if the write must raise #GP.
    pub fn pmu_part(&self, value: u64) -> Option<u64> {
        let takes = self.processor | self.dropped | self.pmu;
        (value & !takes == 0).then_some(value & self.pmu)
    }

    /// Forwards the processor's bits of `value` to KVM if they changed.
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

/// Returns the bits outside the PMU that a processor with this CPUID supports.
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

    /// A write to a bit of IA32_DEBUGCTL that CPUID does not enumerate raises #GP, as on a
    /// processor without the feature.
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

    /// A guest with branch records can set the bit that freezes them at a PMI. AMD processors
    /// ignore the bits that once controlled pins.
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
