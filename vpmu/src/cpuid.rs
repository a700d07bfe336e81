//! CPUID leaves that describe the PMU to a guest.

use crate::amd::LBR_RECORDS;
use crate::events::{ArchEvent, ArchEventSet};
use crate::host_pmu::{CpuidRegs, EXT1_ECX_PERFCTR_CORE, EXT22_EAX_PERFMON_V2};
use crate::model::PmuModel;
use crate::model_name::PmuGeneration;

pub use crate::host_pmu::{LEAF_AMD_PERFMON_V2, LEAF_ARCH_PERFMON};

/// CPUID.01H:ECX.PDCM: IA32_PERF_CAPABILITIES (0x345) exists.
const LEAF1_ECX_PDCM: u32 = 1 << 15;
/// Debug store features in CPUID.01H:ECX: DTES64 (bit 2) and DS-CPL (bit 4).
const LEAF1_ECX_DEBUG_STORE: u32 = 1 << 2 | 1 << 4;
/// Debug store bit in CPUID.01H:EDX (DS). PEBS and BTS use the debug store.
const LEAF1_EDX_DS: u32 = 1 << 21;
/// Processor trace bit (25) in CPUID.(07H,0):EBX.
const LEAF7_EBX_TRACE: u32 = 1 << 25;
/// Hybrid processor bit (15) in CPUID.(07H,0):EDX.
const LEAF7_EDX_HYBRID: u32 = 1 << 15;
/// Architectural LBR bit (19) in CPUID.(07H,0):EDX.
const LEAF7_EDX_ARCH_LBR: u32 = 1 << 19;
/// CPUID leaf that describes architectural LBRs (Intel SDM vol. 2, CPUID).
const LEAF_ARCH_LBR: u32 = 0x1C;
/// CPUID.1CH: depths of 8, 16 and 32 records (EAX), CPL and branch filtering (EBX), and branch
/// types (ECX). IP values are effective IPs (EAX\[31\] is clear).
const ARCH_LBR: CpuidRegs = CpuidRegs {
    eax: 1 << 0 | 1 << 1 | 1 << 3,
    ebx: 1 << 0 | 1 << 1,
    ecx: 1 << 2,
    edx: 0,
};
/// CPUID.80000022H:EAX: LBR version 2 (1), freezing of branch records and counters on PMI (2).
const EXT22_EAX_LBR_V2: u32 = 1 << 1 | 1 << 2;
/// Lowest bit of the number of branch records in CPUID.80000022H:EBX.
const EXT22_EBX_LBR_SHIFT: u32 = 4;
/// CPUID.(07H,1):EAX: leaf 23H (extended performance monitoring) exists.
const LEAF7_1_EAX_PERFMON_EXT: u32 = 1 << 8;
/// CPUID.80000001H:ECX: instruction-based sampling (10), lightweight profiling (15), northbridge
/// counters (24), performance timestamp (27) and last-level-cache counters (28).
const EXT1_ECX_OTHER_PMU: u32 = 1 << 10 | 1 << 15 | 1 << 24 | 1 << 27 | 1 << 28;
/// CPUID.80000008H:ECX: size of the performance timestamp.
const EXT8_ECX_PERF_TSC_SIZE: u32 = 0b11 << 16;

/// Architectural events in the order of their bits in CPUID.0AH:EBX, bit 0 first.
const EBX_EVENTS: [ArchEvent; 8] = [
    ArchEvent::CoreCycles,
    ArchEvent::Instructions,
    // Event 3CH/01H. Fixed counter 2 counts a different event.
    ArchEvent::BusCycles,
    ArchEvent::CacheReferences,
    ArchEvent::CacheMisses,
    ArchEvent::Branches,
    ArchEvent::BranchMisses,
    ArchEvent::TopdownSlots,
];

impl ArchEventSet {
    /// Decodes the available events from CPUID leaf 0AH. EAX\[31:24\] is the length of the event
    /// vector; a set bit in EBX marks an unavailable event.
    pub fn of_leaf_a(leaf: CpuidRegs) -> Self {
        EBX_EVENTS
            .into_iter()
            .take((leaf.eax >> 24) as usize)
            .enumerate()
            .filter(|(n, _)| leaf.ebx >> n & 1 == 0)
            .map(|(_, event)| event)
            .collect()
    }
}

impl PmuModel {
    /// Returns the CPUID leaves (subleaf 0 of each) from which a guest detects this model. The
    /// guest's CPUID table must contain these leaves. If the host lacks a leaf, the VMM adds an
    /// all-zero entry and passes the entry through [`PmuModel::adjust_cpuid`].
    pub fn required_leaves(&self) -> &'static [u32] {
        match self.generation() {
            PmuGeneration::Off(_) => &[],
            PmuGeneration::Intel(_) if self.has_branch_records() => &[LEAF_ARCH_PERFMON, LEAF_ARCH_LBR],
            PmuGeneration::Intel(_) => &[LEAF_ARCH_PERFMON],
            PmuGeneration::AmdK7 | PmuGeneration::AmdCore => &[0x8000_0001],
            PmuGeneration::AmdV2 => &[0x8000_0001, LEAF_AMD_PERFMON_V2],
        }
    }

    /// Adjusts one host CPUID entry for the guest. The entry then describes this model's PMU and
    /// hides all other performance monitoring features.
    ///
    /// The VMM sets the vendor string in leaf 0 from [`PmuModel::vendor`]. Events that are missing
    /// from `backability` are reported as unavailable if the vendor's CPUID can express this.
    pub fn adjust_cpuid(&self, leaf: u32, subleaf: u32, regs: &mut CpuidRegs, backability: ArchEventSet) {
        let version = self.intel_version();
        match (leaf, subleaf) {
            (0, _) if version > 0 => {
                let last = self.required_leaves().iter().copied().max();
                regs.eax = regs.eax.max(last.unwrap_or_default());
            }
            (1, _) => {
                regs.ecx &= !(LEAF1_ECX_PDCM | LEAF1_ECX_DEBUG_STORE);
                regs.edx &= !LEAF1_EDX_DS;
                if version >= 2 {
                    regs.ecx |= LEAF1_ECX_PDCM;
                }
            }
            (7, 0) => {
                regs.ebx &= !LEAF7_EBX_TRACE;
                regs.edx &= !(LEAF7_EDX_HYBRID | LEAF7_EDX_ARCH_LBR);
                if version > 0 && self.has_branch_records() {
                    regs.edx |= LEAF7_EDX_ARCH_LBR;
                }
            }
            (7, 1) => regs.eax &= !LEAF7_1_EAX_PERFMON_EXT,
            (LEAF_ARCH_PERFMON, _) => *regs = self.arch_perfmon_leaf(backability),
            (LEAF_ARCH_LBR, 0) if version > 0 && self.has_branch_records() => *regs = ARCH_LBR,
            // Hides processor trace, architectural LBRs and extended performance monitoring.
            (0x14 | LEAF_ARCH_LBR | 0x23, _) => *regs = CpuidRegs::default(),
            (0x8000_0000, _) => {
                let last = self.required_leaves().iter().copied().max().unwrap_or(0);
                if last >= 0x8000_0000 {
                    regs.eax = regs.eax.max(last);
                }
            }
            (0x8000_0001, _) => {
                regs.ecx &= !(EXT1_ECX_OTHER_PMU | EXT1_ECX_PERFCTR_CORE);
                if matches!(self.generation(), PmuGeneration::AmdCore | PmuGeneration::AmdV2) {
                    regs.ecx |= EXT1_ECX_PERFCTR_CORE;
                }
            }
            (0x8000_0008, _) => regs.ecx &= !EXT8_ECX_PERF_TSC_SIZE,
            // Hides instruction-based sampling and lightweight profiling.
            (0x8000_001B | 0x8000_001C, _) => *regs = CpuidRegs::default(),
            (LEAF_AMD_PERFMON_V2, _) => {
                *regs = CpuidRegs::default();
                if self.generation() == PmuGeneration::AmdV2 {
                    regs.eax = EXT22_EAX_PERFMON_V2;
                    regs.ebx = self.general();
                    if self.has_branch_records() {
                        regs.eax |= EXT22_EAX_LBR_V2;
                        regs.ebx |= LBR_RECORDS << EXT22_EBX_LBR_SHIFT;
                    }
                }
            }
            _ => {}
        }
    }

    /// Fills CPUID.0AH. EAX: version, number and width of general-purpose counters, length of the
    /// event vector. EBX: 1 for each unavailable event. ECX: bitmap of fixed counters (version 5).
    /// EDX (from version 2): number of contiguous fixed counters, their width, AnyThread
    /// deprecation.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "one bit for each of a handful of events"
    )]
    fn arch_perfmon_leaf(&self, backability: ArchEventSet) -> CpuidRegs {
        let version = u32::from(self.intel_version());
        if version == 0 {
            return CpuidRegs::default();
        }
        // The eighth architectural event was introduced with version 5's fixed counter 3.
        let vector_length = if self.fixed_bitmap() & 0b1000 != 0 { 8 } else { 7 };
        let unavailable = EBX_EVENTS[..vector_length]
            .iter()
            .enumerate()
            .filter(|&(_, &event)| !backability.contains(event))
            .fold(0, |bits, (n, _)| bits | 1 << n);
        let width = self.width().bits();
        let bitmap = u32::from(self.fixed_bitmap());
        let (ecx, edx) = match version {
            1 => (0, 0),
            2..=4 => (0, bitmap.trailing_ones() | width << 5 | 1 << 15),
            _ => (bitmap, bitmap.trailing_ones() | width << 5 | 1 << 15),
        };
        CpuidRegs {
            eax: version | self.general() << 8 | width << 16 | (vector_length as u32) << 24,
            ebx: unavailable,
            ecx,
            edx,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model_name::RequestedCounters;

    fn intel(version: u8, general: u32, fixed: u32) -> PmuModel {
        let numbers = RequestedCounters {
            general,
            fixed: Some(fixed),
        };
        PmuModel::new(PmuGeneration::Intel(version), Some(numbers), None).unwrap()
    }

    const fn regs(eax: u32, ebx: u32, ecx: u32, edx: u32) -> CpuidRegs {
        CpuidRegs { eax, ebx, ecx, edx }
    }

    /// Returns the CPUID leaf `number` of a guest with the PMU `model` on a host that cannot count
    /// any event. `from` contains the host's values of the leaf.
    fn uncounted(model: &PmuModel, number: u32, from: CpuidRegs) -> CpuidRegs {
        leaf(model, number, 0, ArchEventSet::NONE, from)
    }

    fn leaf(
        model: &PmuModel,
        leaf: u32,
        subleaf: u32,
        backability: ArchEventSet,
        from: CpuidRegs,
    ) -> CpuidRegs {
        let mut regs = from;
        model.adjust_cpuid(leaf, subleaf, &mut regs, backability);
        regs
    }

    const ONES: CpuidRegs = regs(!0, !0, !0, !0);

    #[test]
    fn leaf_a_has_the_fields_of_its_version() {
        let clock = ArchEventSet::CLOCK;
        // For the clock backing, instructions, cache events and branches are unavailable.
        let v2 = leaf(&PmuModel::INTEL, 0xA, 0, clock, ONES);
        assert_eq!(v2, regs(0x0730_0402, 0x7A, 0, 3 | 48 << 5 | 1 << 15));
        let v1 = leaf(&intel(1, 8, 0), 0xA, 0, clock, ONES);
        assert_eq!(v1, regs(0x0730_0801, 0x7A, 0, 0));
        let v5 = leaf(&intel(5, 8, 4), 0xA, 0, ArchEventSet::EXACT, ONES);
        assert_eq!(v5, regs(0x0830_0805, 0xD8, 0xF, 4 | 48 << 5 | 1 << 15));
        assert_eq!(leaf(&PmuModel::AMD, 0xA, 0, clock, ONES), CpuidRegs::default());
    }

    #[test]
    fn perf_capabilities_require_version_two() {
        let pdcm = |model: &PmuModel| uncounted(model, 1, CpuidRegs::default()).ecx >> 15 & 1;
        assert_eq!(pdcm(&intel(1, 4, 0)), 0);
        assert_eq!(pdcm(&intel(2, 4, 3)), 1);
        assert_eq!(pdcm(&PmuModel::AMD), 0);
    }

    #[test]
    fn unsupported_cpuid_features_are_hidden() {
        let hidden = uncounted(&PmuModel::INTEL, 1, ONES);
        assert_eq!(hidden.edx, !(1 << 21));
        assert_eq!(hidden.ecx, !(1 << 2 | 1 << 4));
        let ext = uncounted(&PmuModel::AMD, 0x8000_0001, ONES);
        assert_eq!(ext.ecx, !EXT1_ECX_OTHER_PMU);
        let k7 = PmuModel::new(PmuGeneration::AmdK7, None, None).unwrap();
        assert_eq!(
            uncounted(&k7, 0x8000_0001, ONES).ecx,
            !(EXT1_ECX_OTHER_PMU | EXT1_ECX_PERFCTR_CORE)
        );
        for number in [0x14, 0x1C, 0x23, 0x8000_001B, 0x8000_0022] {
            assert_eq!(uncounted(&PmuModel::AMD, number, ONES), CpuidRegs::default());
        }
    }

    #[test]
    fn amd_v2_reports_counters_and_maximum_leaf() {
        let numbers = RequestedCounters {
            general: 15,
            fixed: None,
        };
        let model = PmuModel::new(PmuGeneration::AmdV2, Some(numbers), None).unwrap();
        let v2 = uncounted(&model, LEAF_AMD_PERFMON_V2, CpuidRegs::default());
        assert_eq!(v2, regs(1, 15, 0, 0));
        let last = regs(0x8000_0008, 0, 0, 0);
        assert_eq!(uncounted(&model, 0x8000_0000, last).eax, LEAF_AMD_PERFMON_V2);
        let basic = regs(7, 0, 0, 0);
        assert_eq!(uncounted(&PmuModel::INTEL, 0, basic).eax, 0xA);
    }

    #[test]
    fn unrelated_cpuid_leaves_are_unchanged() {
        for number in [2, 4, 0xB, 0xD, 0x15, 0x4000_0000, 0x8000_0002] {
            assert_eq!(uncounted(&PmuModel::INTEL, number, ONES), ONES);
        }
    }

    #[test]
    fn adjusted_cpuid_reads_back_as_same_model() {
        for model in [
            PmuModel::INTEL,
            intel(1, 3, 0),
            intel(4, 8, 4),
            intel(5, 2, 1),
            intel(5, 8, 0).with_fixed_bitmap(0b1010).unwrap(),
            PmuModel::AMD,
            PmuModel::new(PmuGeneration::AmdK7, None, None).unwrap(),
            PmuModel::new(
                PmuGeneration::AmdV2,
                Some(RequestedCounters {
                    general: 11,
                    fixed: None,
                }),
                None,
            )
            .unwrap(),
        ] {
            let mut host = |number: u32, subleaf: u32| {
                let mut leaf = CpuidRegs::default();
                if number == 0 {
                    let name = model.vendor().cpuid_name().as_bytes();
                    let word = |n: usize| u32::from_le_bytes(name[n..n + 4].try_into().unwrap());
                    leaf = regs(0, word(0), word(8), word(4));
                }
                model.adjust_cpuid(number, subleaf, &mut leaf, ArchEventSet::CLOCK);
                leaf
            };
            assert_eq!(PmuModel::host(&mut host), Ok(model));
        }
    }

    #[test]
    fn host_model_is_limited_to_supported_counters() {
        let mut host = |number: u32, _| match number {
            0 => regs(0x20, 0x756E_6547, 0x6C65_746E, 0x4965_6E69),
            0xA => regs(0x0839_1006, 0, 0xFF, 0x31F),
            _ => CpuidRegs::default(),
        };
        let model = PmuModel::host(&mut host).unwrap();
        assert_eq!(model.to_string(), "intel-v5 with 8+4 counters of 48 bits");
    }
}
