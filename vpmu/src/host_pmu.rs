//! CPUID register values and detection of the host PMU from CPUID.

use crate::model_name::{PmuGeneration, Vendor};

/// Output registers of the CPUID instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuidRegs {
    /// Value of EAX.
    pub eax: u32,
    /// Value of EBX.
    pub ebx: u32,
    /// Value of ECX.
    pub ecx: u32,
    /// Value of EDX.
    pub edx: u32,
}

/// Function that executes CPUID for a leaf and a subleaf.
pub type CpuidReader<'a> = dyn FnMut(u32, u32) -> CpuidRegs + 'a;

/// CPUID leaf of architectural performance monitoring (Intel SDM vol. 2, CPUID).
pub const LEAF_ARCH_PERFMON: u32 = 0xA;
/// CPUID leaf of extended performance monitoring and debug (AMD APM vol. 3, appendix E).
pub const LEAF_AMD_PERFMON_V2: u32 = 0x8000_0022;

/// CPUID.80000001H:ECX: PERFCTR_CORE, six counters at 0xC0010200.
pub(crate) const EXT1_ECX_PERFCTR_CORE: u32 = 1 << 23;
/// CPUID.80000022H:EAX: performance monitoring version 2.
pub(crate) const EXT22_EAX_PERFMON_V2: u32 = 1;

/// Properties of the host PMU as reported by CPUID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostPmuProperties {
    /// PMU generation. Versions above 5 are reported as 5, because they are compatible with version
    /// 5.
    pub generation: PmuGeneration,
    /// Number of the host's general-purpose counters.
    pub general: u32,
    /// Bitmap of the host's fixed counters: bit n is set if fixed counter n exists.
    pub fixed_bitmap: u32,
    /// Width of the host's counters, in bits.
    pub width: u32,
}

impl HostPmuProperties {
    /// Returns the vendor whose PMU the host implements. Processors of vendors other than AMD and
    /// Hygon are treated as Intel processors.
    pub fn vendor(host: &mut CpuidReader<'_>) -> Vendor {
        let leaf = host(0, 0);
        let mut name = [0; 12];
        for (bytes, reg) in name.chunks_exact_mut(4).zip([leaf.ebx, leaf.edx, leaf.ecx]) {
            bytes.copy_from_slice(&reg.to_le_bytes());
        }
        if &name == b"AuthenticAMD" || &name == b"HygonGenuine" {
            Vendor::Amd
        } else {
            Vendor::Intel
        }
    }

    /// Reads the host PMU properties, or returns `None` if CPUID reports no PMU.
    pub fn read(host: &mut CpuidReader<'_>) -> Option<Self> {
        match Self::vendor(host) {
            Vendor::Intel => {
                if host(0, 0).eax < LEAF_ARCH_PERFMON {
                    return None;
                }
                let leaf = host(LEAF_ARCH_PERFMON, 0);
                let version = leaf.eax & 0xFF;
                let general = leaf.eax >> 8 & 0xFF;
                // A PMU with a single counter is treated as absent, because Linux does not support
                // it either.
                if version == 0 || general < 2 {
                    return None;
                }
                let run = (1u32 << (leaf.edx & 0x1F)) - 1;
                let fixed_bitmap = match version {
                    1 => 0,
                    2..=4 => run,
                    _ => run | leaf.ecx,
                };
                Some(Self {
                    generation: PmuGeneration::Intel(version.min(5) as u8),
                    general,
                    fixed_bitmap,
                    width: leaf.eax >> 16 & 0xFF,
                })
            }
            Vendor::Amd => {
                let last = host(0x8000_0000, 0).eax;
                if last < 0x8000_0001 {
                    return None;
                }
                let core = host(0x8000_0001, 0).ecx & EXT1_ECX_PERFCTR_CORE != 0;
                let v2 = if last >= LEAF_AMD_PERFMON_V2 {
                    Some(host(LEAF_AMD_PERFMON_V2, 0)).filter(|leaf| leaf.eax & EXT22_EAX_PERFMON_V2 != 0)
                } else {
                    None
                };
                let (generation, general) = match v2 {
                    Some(leaf) if core => (PmuGeneration::AmdV2, leaf.ebx & 0xF),
                    _ if core => (PmuGeneration::AmdCore, 6),
                    _ => (PmuGeneration::AmdK7, 4),
                };
                Some(Self {
                    generation,
                    general,
                    fixed_bitmap: 0,
                    width: 48,
                })
            }
        }
    }
}
