//! IA32_DEBUGCTL: one bit of it is the PMU's, and the others are the processor's, which is KVM's business.
//!
//! A guest whose PMU can freeze its counters has this register trapped whole. What it writes into the others'
//! bits goes to KVM, and what KVM keeps of them is what it reads back.

use crate::kvm::call::CallError;
use crate::kvm::vcpu_fd::VcpuFd;
use kvm_bindings::{CpuId, Msrs, kvm_msr_entry};
use vpmu::registers::{DEBUGCTL_PMU, IA32_DEBUGCTL};

/// IA32_DEBUGCTL.LBR (0): branch records. Every processor takes it. No model has records, so it is dropped
/// and never asked of KVM, whose host's own records it would start.
const LBR: u64 = 1 << 0;
/// IA32_DEBUGCTL.BTF (1): single-step on branches. Every processor takes it; KVM drops it where it cannot do
/// it.
const BTF: u64 = 1 << 1;
/// IA32_DEBUGCTL.BUS_LOCK_DETECT (2): CPUID.(07H,0):ECX\[24\].
const BUS_LOCK_DETECT: u64 = 1 << 2;
/// IA32_DEBUGCTL.RTM (15): advanced debugging of transactions. CPUID.(07H,0):EBX.RTM.
const RTM: u64 = 1 << 15;

/// The register, without the PMU's bits. Owns the one-entry MSR list KVM is asked with, so that an access
/// allocates nothing.
#[derive(Debug)]
pub struct DebugControl {
    /// Bits that go to KVM.
    processor: u64,
    /// What KVM has kept of the last write.
    kept: u64,
    msr: Msrs,
}

impl DebugControl {
    /// The register of a vCPU that shows this CPUID. `None`: no memory.
    pub fn new(cpuid: &CpuId) -> Option<Self> {
        let entry = kvm_msr_entry {
            index: IA32_DEBUGCTL,
            ..Default::default()
        };
        Some(Self {
            processor: processor_bits(cpuid),
            kept: 0,
            msr: Msrs::from_entries(&[entry]).ok()?,
        })
    }

    /// RDMSR, without the PMU's bits.
    pub fn read(&self) -> u64 {
        self.kept
    }

    /// The part of a WRMSR's value that the PMU must take. `None`: #GP.
    pub fn pmu_part(&self, value: u64) -> Option<u64> {
        let takes = self.processor | LBR | DEBUGCTL_PMU;
        (value & !takes == 0).then_some(value & DEBUGCTL_PMU)
    }

    /// Gives KVM its part of a value that was taken, if it is another than KVM has.
    ///
    /// # Errors
    /// KVM's, which no guest can cause.
    pub fn write(&mut self, fd: &VcpuFd, value: u64) -> Result<(), CallError> {
        let value = value & self.processor;
        if value == self.kept {
            return Ok(());
        }
        if let Some(entry) = self.msr.as_mut_slice().first_mut() {
            entry.data = value;
        }
        // A KVM that refuses a bit keeps what it had. Some take it and drop it.
        fd.set_msrs(&self.msr)?;
        self.kept = match (fd.get_msrs(&mut self.msr)?, self.msr.as_slice()) {
            (1, [entry]) => entry.data & self.processor,
            _ => 0,
        };
        Ok(())
    }
}

/// The bits that a processor with this CPUID has, and which are not the PMU's.
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

    fn with(ebx: u32, ecx: u32) -> DebugControl {
        let leaf = kvm_cpuid_entry2 {
            function: 7,
            ebx,
            ecx,
            ..Default::default()
        };
        DebugControl::new(&CpuId::from_entries(&[leaf]).unwrap()).unwrap()
    }

    /// A guest gets #GP for what its CPUID does not announce, as on a processor without it.
    #[test]
    fn bits_are_taken_that_cpuid_announces() {
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

    /// The host's processor must not begin to record the host's branches because a guest asks.
    #[test]
    fn branch_records_are_never_asked_of_kvm() {
        assert_eq!(with(!0, !0).processor & LBR, 0);
    }
}
