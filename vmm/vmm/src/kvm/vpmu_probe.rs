//! Probes KVM's own vPMU: whether this host offers one, and which PMU models it can present to a
//! guest.
//!
//! KVM emulates its vPMU with host perf events. With Linux 7.0 and later and the right module
//! parameter, KVM passes the hardware counters through to the guest instead (*mediated*).
//! `KVM_GET_SUPPORTED_CPUID` describes the vPMU in the same leaves as a processor describes its
//! PMU.

use std::fs;
use std::path::Path;

use kvm_bindings::{
    CpuId, KVM_CAP_PMU_CAPABILITY, KVM_CAP_PMU_EVENT_FILTER, KVM_CAP_PMU_EVENT_MASKED_EVENTS,
    KVM_CPUID_FLAG_SIGNIFCANT_INDEX, Msrs, kvm_msr_entry,
};
use kvm_ioctls::Kvm;
use perf_core::pmu::host::HostPerfCapabilities;
use serde::Serialize;
use vpmu::cpuid::LEAF_ARCH_PERFMON;
use vpmu::registers::IA32_PERF_CAPABILITIES;
use vpmu::{
    ArchEventSet, CpuidRegs, HostPmuProperties, PmuGeneration, PmuModel, PmuModelError, PmuModelName,
    RequestedCounters, Vendor,
};

use super::call::KvmIoctlError;
use super::cpuid::{self, CpuidError};
use super::vcpu_fd::VcpuFd;

/// IA32_PERF_CAPABILITIES.FW_WRITE: full-width counter writes (SDM vol. 3, "Full-Width Writes to
/// Performance Counter Registers").
const FW_WRITE: u64 = 1 << 13;

/// Reason why KVM's own vPMU is unavailable.
#[derive(Clone, Debug, thiserror::Error)]
pub enum KvmVpmuUnavailable {
    /// KVM does not report whether it has a vPMU, because it lacks `KVM_CAP_PMU_CAPABILITY` (Linux
    /// 5.18 and later).
    #[error(
        "this host's KVM does not report whether it has a vPMU (KVM_CAP_PMU_CAPABILITY, Linux 5.18 \
        and later); use --backing auto"
    )]
    Untold,
    /// The host has no PMU, which KVM's vPMU requires.
    #[error(
        "KVM's own vPMU needs a host PMU, and {0} (kvm.enable_pmu is N); use --backing auto, which counts without one"
    )]
    NoHostPmu(String),
    /// KVM's own vPMU is disabled by a module parameter of KVM.
    #[error(
        "KVM's own vPMU is disabled on this host (kvm.enable_pmu is N); load the module kvm with \
        enable_pmu=1, or use --backing auto"
    )]
    SwitchedOff,
    /// KVM's supported CPUID leaves report no PMU.
    #[error("this host's KVM does not support a vPMU in its guests' CPUID; use --backing auto")]
    NotInCpuid,
    /// KVM_GET_SUPPORTED_CPUID failed.
    #[error("KVM_GET_SUPPORTED_CPUID failed; use --backing auto")]
    Cpuid(#[source] kvm_ioctls::Error),
}

/// Reason why KVM's own vPMU cannot provide the requested model.
#[derive(Debug, thiserror::Error)]
pub enum KvmVpmuModelError {
    /// The requested model is from a different vendor than the host CPU.
    #[error(
        "--backing kvm: KVM's own vPMU is {host}'s on this host and cannot be --pmu {asked}; use \
        --pmu auto, or --backing auto, which supports both"
    )]
    Vendor {
        /// Requested PMU generation.
        asked: PmuGeneration,
        /// Vendor of the host CPU.
        host: Vendor,
    },
    /// The requested PMU generation is later than that of KVM's own vPMU.
    #[error(
        "--backing kvm: --pmu {asked} is unsupported by KVM's own vPMU, which is at most {offered} \
        on this host; use --pmu {offered} or --pmu auto"
    )]
    Generation {
        /// Requested PMU generation.
        asked: PmuGeneration,
        /// Latest PMU generation that KVM provides.
        offered: PmuGeneration,
    },
    /// More counters are requested than KVM provides.
    #[error(
        "--backing kvm: {asked} {kind} counters requested, but KVM's own vPMU has {offered} on \
        this host; use fewer with --pmu-counters, or --pmu auto"
    )]
    Counters {
        /// Requested number of counters.
        asked: u32,
        /// Counter type, `general-purpose` or `fixed`.
        kind: &'static str,
        /// Number of counters that KVM provides.
        offered: u32,
    },
    /// The requested counters are wider than those that KVM provides.
    #[error(
        "--backing kvm: counters of {asked} bits requested, but KVM's own vPMU has {offered} bits \
        on this host; use --pmu-width {offered}"
    )]
    Width {
        /// Requested counter width in bits.
        asked: u32,
        /// Counter width of KVM's vPMU in bits.
        offered: u32,
    },
    /// The requested model is invalid on any host.
    #[error(transparent)]
    PmuModel(#[from] PmuModelError),
}

/// Capabilities of KVM's own vPMU.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct KvmPmuCapabilities {
    /// `true` if the guest accesses hardware counters directly (mediated vPMU), `false` if KVM
    /// emulates the registers with host perf events.
    pub mediated: bool,
    /// `true` if the event filter accepts masked entries (`KVM_PMU_EVENT_FLAG_MASKED_EVENTS`, Linux
    /// 6.3 and later).
    pub masked_filter: bool,
    /// `true` if KVM supports event filters.
    pub filter: bool,
    /// The PMU that KVM's CPUID leaves enumerate.
    #[serde(serialize_with = "in_words")]
    pub pmu: HostPmuProperties,
    /// Architectural events that KVM's own vPMU counts (Intel only).
    #[serde(skip)]
    pub events: ArchEventSet,
}

fn in_words<S: serde::Serializer>(pmu: &HostPmuProperties, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&words(pmu))
}

fn words(pmu: &HostPmuProperties) -> String {
    let fixed = match pmu.fixed_bitmap.count_ones() {
        0 => String::new(),
        fixed => format!("+{fixed}"),
    };
    format!(
        "{} with {}{fixed} counters of {} bits",
        pmu.generation, pmu.general, pmu.width
    )
}

impl std::fmt::Display for KvmPmuCapabilities {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let how = if self.mediated { "mediated" } else { "emulated" };
        write!(f, "{how}, {}", words(&self.pmu))
    }
}

/// Probes whether this host offers KVM's own vPMU, and which capabilities the vPMU has.
///
/// # Errors
/// Returns a [`KvmVpmuUnavailable`] if the vPMU is unavailable.
pub fn probe(kvm: &Kvm, host: &HostPerfCapabilities) -> Result<KvmPmuCapabilities, KvmVpmuUnavailable> {
    if kvm.check_extension_raw(u64::from(KVM_CAP_PMU_CAPABILITY)) <= 0 {
        return Err(match parameter("kvm", "enable_pmu") {
            Some(false) => match &host.no_slots_because {
                Some(why) if !host.hardware_pmu && !host.mediated => {
                    KvmVpmuUnavailable::NoHostPmu(why.clone())
                }
                _ => KvmVpmuUnavailable::SwitchedOff,
            },
            _ => KvmVpmuUnavailable::Untold,
        });
    }
    let supported = cpuid::supported(kvm).map_err(|e| match e {
        CpuidError::Supported(e) => KvmVpmuUnavailable::Cpuid(e),
        _ => KvmVpmuUnavailable::NotInCpuid,
    })?;
    let pmu = in_cpuid(&supported).ok_or(KvmVpmuUnavailable::NotInCpuid)?;
    let has = |cap| kvm.check_extension_raw(u64::from(cap)) > 0;
    Ok(KvmPmuCapabilities {
        mediated: is_mediated(),
        masked_filter: has(KVM_CAP_PMU_EVENT_MASKED_EVENTS),
        filter: has(KVM_CAP_PMU_EVENT_FILTER),
        pmu,
        events: ArchEventSet::of_leaf_a(table(&supported)(LEAF_ARCH_PERFMON, 0)),
    })
}

/// Returns `true` if KVM's own vPMU is mediated.
pub fn is_mediated() -> bool {
    ["kvm_intel", "kvm_amd", "kvm"]
        .iter()
        .any(|module| parameter(module, "enable_mediated_pmu") == Some(true))
}

/// Returns the value of a boolean module parameter, or `None` if the module lacks the parameter.
fn parameter(module: &str, name: &str) -> Option<bool> {
    let path = Path::new("/sys/module")
        .join(module)
        .join("parameters")
        .join(name);
    match fs::read_to_string(path).ok()?.trim() {
        "Y" | "1" => Some(true),
        "N" | "0" => Some(false),
        _ => None,
    }
}

/// Returns a function that reads CPUID leaves from the table `entries`, for [`PmuModel::resolve`].
/// The index of an entry is compared only if the entry's flag marks it as significant.
fn table(entries: &CpuId) -> impl Fn(u32, u32) -> CpuidRegs {
    move |leaf, subleaf| {
        let found = entries.as_slice().iter().find(|e| {
            e.function == leaf && (e.index == subleaf || e.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX == 0)
        });
        found.map_or_else(CpuidRegs::default, |e| CpuidRegs {
            eax: e.eax,
            ebx: e.ebx,
            ecx: e.ecx,
            edx: e.edx,
        })
    }
}

fn in_cpuid(supported: &CpuId) -> Option<HostPmuProperties> {
    let read = table(supported);
    HostPmuProperties::read(&mut |leaf, subleaf| read(leaf, subleaf))
}

impl KvmPmuCapabilities {
    /// Resolves the PMU model that the operator requested, for a guest with KVM's own vPMU. `--pmu
    /// host` selects everything that KVM provides. `--pmu auto` selects the features that it would
    /// select for an emulated PMU, as far as KVM provides them.
    ///
    /// # Errors
    /// Returns [`KvmVpmuModelError`] with the limit and a remedy in one line.
    pub fn model(
        &self,
        name: PmuModelName,
        counters: Option<RequestedCounters>,
        width: Option<u32>,
    ) -> Result<PmuModel, KvmVpmuModelError> {
        let offered = &self.pmu;
        let (generation, default, bits) = match (offered.generation, name) {
            (PmuGeneration::Intel(version), PmuModelName::Auto) => (
                PmuGeneration::Intel(version.min(2)),
                RequestedCounters {
                    general: offered.general.min(4),
                    fixed: Some(offered.fixed_bitmap.trailing_ones().min(3)).filter(|_| version >= 2),
                },
                Some(offered.width.min(48)),
            ),
            (generation, PmuModelName::Auto | PmuModelName::Host) => {
                let generation = match (generation, name) {
                    (PmuGeneration::AmdV2, PmuModelName::Auto) => PmuGeneration::AmdCore,
                    _ => generation,
                };
                let intel = matches!(generation, PmuGeneration::Intel(_));
                (
                    generation,
                    RequestedCounters {
                        general: match generation {
                            PmuGeneration::Intel(_) => offered.general.min(8),
                            PmuGeneration::AmdCore => 6,
                            _ => offered.general,
                        },
                        fixed: intel.then_some(offered.fixed_bitmap.trailing_ones().min(4)),
                    },
                    intel.then_some(offered.width.min(48)),
                )
            }
            (_, PmuModelName::Off) => {
                return Ok(PmuModel::resolve(name, counters, width, &mut cpuid::read_host)?);
            }
            (_, PmuModelName::Generation(generation)) => {
                let model = PmuModel::new(generation, counters, width)?;
                self.can_be(&model)?;
                return Ok(model);
            }
        };
        if name == PmuModelName::Host && (counters.is_some() || width.is_some()) {
            return Err(PmuModelError::NotAdjustable("host").into());
        }
        let numbers = counters.map_or(default, |asked| RequestedCounters {
            fixed: asked.fixed.or(default.fixed),
            ..asked
        });
        let model = PmuModel::new(generation, Some(numbers), width.or(bits))?;
        self.can_be(&model)?;
        Ok(model)
    }

    /// Returns an error unless KVM's vPMU provides everything that `model` has.
    fn can_be(&self, model: &PmuModel) -> Result<(), KvmVpmuModelError> {
        let offered = &self.pmu;
        let (asked, host) = (model.generation(), offered.generation);
        if asked.vendor() != host.vendor() {
            return Err(KvmVpmuModelError::Vendor {
                asked,
                host: host.vendor(),
            });
        }
        let rank = |generation| match generation {
            PmuGeneration::Off(_) | PmuGeneration::AmdK7 => 0,
            PmuGeneration::Intel(version) => version,
            PmuGeneration::AmdCore => 1,
            PmuGeneration::AmdV2 => 2,
        };
        if rank(asked) > rank(host) {
            return Err(KvmVpmuModelError::Generation { asked, offered: host });
        }
        // The four counters of a K7 are the first four of any AMD PMU. The core extension has six.
        if model.general() > offered.general {
            return Err(KvmVpmuModelError::Counters {
                asked: model.general(),
                kind: "general-purpose",
                offered: offered.general,
            });
        }
        if u32::from(model.fixed_bitmap()) & !offered.fixed_bitmap != 0 {
            return Err(KvmVpmuModelError::Counters {
                asked: model.fixed_bitmap().count_ones(),
                kind: "fixed",
                offered: offered.fixed_bitmap.trailing_ones(),
            });
        }
        if model.width().bits() > offered.width {
            return Err(KvmVpmuModelError::Width {
                asked: model.width().bits(),
                offered: offered.width,
            });
        }
        Ok(())
    }
}

/// Limits IA32_PERF_CAPABILITIES, which KVM initialises with all features that it supports.
/// Full-width writes remain if KVM supports them; branch records and PEBS are removed. Has no
/// effect on AMD models and on version 1 of Intel's PMU.
///
/// # Errors
/// Returns an error if the KVM call fails.
pub fn set_capabilities(kvm: &Kvm, vcpu: &VcpuFd, model: &PmuModel) -> Result<(), KvmIoctlError> {
    if !matches!(model.generation(), PmuGeneration::Intel(2..)) {
        return Ok(());
    }
    let entry = kvm_msr_entry {
        index: IA32_PERF_CAPABILITIES,
        ..Default::default()
    };
    let one = |entry| {
        Msrs::from_entries(&[entry])
            .map_err(|_| KvmIoctlError::with_errno("making an MSR list", libc::ENOMEM))
    };
    let mut supported = one(entry)?;
    // KVM reports the register as a system-wide feature MSR. A KVM that does not report it lacks
    // the register.
    if kvm
        .get_msrs(&mut supported)
        .map_err(KvmIoctlError::of("KVM_GET_MSRS"))?
        != 1
    {
        return Ok(());
    }
    let data = supported.as_slice()[0].data & FW_WRITE;
    vcpu.set_msrs(&one(kvm_msr_entry { data, ..entry })?).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offers(generation: PmuGeneration, general: u32, fixed: u32, width: u32) -> KvmPmuCapabilities {
        KvmPmuCapabilities {
            mediated: false,
            masked_filter: true,
            filter: true,
            pmu: HostPmuProperties {
                generation,
                general,
                fixed_bitmap: (1 << fixed) - 1,
                width,
            },
            events: ArchEventSet::NONE,
        }
    }

    fn asked(
        own: &KvmPmuCapabilities,
        name: &str,
        counters: Option<&str>,
        width: Option<u32>,
    ) -> Result<String, KvmVpmuModelError> {
        let counters = counters.map(|text| text.parse().unwrap());
        own.model(name.parse().unwrap(), counters, width)
            .map(|model| model.to_string())
    }

    /// A lookup returns the requested subleaf, whatever the order of the entries in the table.
    #[test]
    fn cpuid_table_selects_requested_subleaf() {
        let entry = |index, flags, eax| kvm_bindings::kvm_cpuid_entry2 {
            function: 7,
            index,
            flags,
            eax,
            ..Default::default()
        };
        let indexed = KVM_CPUID_FLAG_SIGNIFCANT_INDEX;
        let entries = CpuId::from_entries(&[entry(0, indexed, 10), entry(1, indexed, 11)]).unwrap();
        assert_eq!(
            [0, 1, 2].map(|subleaf| table(&entries)(7, subleaf).eax),
            [10, 11, 0]
        );
        let entries = CpuId::from_entries(&[entry(0, 0, 10)]).unwrap();
        assert_eq!([0, 1].map(|subleaf| table(&entries)(7, subleaf).eax), [10, 10]);
    }

    #[test]
    fn auto_model_is_limited_by_kvm_vpmu() {
        let intel = offers(PmuGeneration::Intel(2), 8, 3, 48);
        assert_eq!(
            asked(&intel, "auto", None, None).unwrap(),
            PmuModel::INTEL.to_string()
        );
        let small = offers(PmuGeneration::Intel(2), 2, 3, 40);
        assert_eq!(
            asked(&small, "auto", None, None).unwrap(),
            "intel-v2 with 2+3 counters of 40 bits"
        );
        assert_eq!(
            asked(&intel, "host", None, None).unwrap(),
            "intel-v2 with 8+3 counters of 48 bits"
        );
        for amd in [
            offers(PmuGeneration::AmdCore, 6, 0, 48),
            offers(PmuGeneration::AmdV2, 6, 0, 48),
        ] {
            assert_eq!(
                asked(&amd, "auto", None, None).unwrap(),
                PmuModel::AMD.to_string()
            );
        }
        let k7 = offers(PmuGeneration::AmdK7, 4, 0, 48);
        assert!(asked(&k7, "auto", None, None).unwrap().starts_with("amd-k7"));
        // PMU version 1 has no fixed counters.
        let first = offers(PmuGeneration::Intel(1), 4, 0, 40);
        assert!(asked(&first, "auto", None, None).unwrap().starts_with("intel-v1"));
        assert_eq!(
            asked(&intel, "auto", Some("2"), None).unwrap(),
            "intel-v2 with 2+3 counters of 48 bits"
        );
    }

    #[test]
    fn unsupported_kvm_vpmu_model_is_rejected() {
        let intel = offers(PmuGeneration::Intel(2), 4, 3, 48);
        let amd = offers(PmuGeneration::AmdCore, 6, 0, 48);
        for (own, name, counters, width, words) in [
            (
                &amd,
                "intel",
                None,
                None,
                &["AMD's", "--pmu intel-v2", "--pmu auto"][..],
            ),
            (&intel, "amd", None, None, &["Intel's", "--pmu amd"]),
            (&intel, "intel-v5", None, None, &["at most intel-v2", "intel-v5"]),
            (&intel, "intel", Some("8"), None, &["8 general-purpose", "has 4"]),
            (&intel, "intel", Some("4+4"), None, &["4 fixed", "has 3"]),
            (&amd, "amd-v2", None, None, &["at most amd ", "amd-v2"]),
            (
                &offers(PmuGeneration::Intel(2), 4, 3, 40),
                "intel",
                None,
                None,
                &["48 bits", "--pmu-width 40"],
            ),
        ] {
            let line = asked(own, name, counters, width).unwrap_err().to_string();
            assert!(!line.contains('\n'), "{line}");
            for word in words {
                assert!(line.contains(word), "{name}: no {word:?} in {line}");
            }
        }
        // A guest may have fewer and narrower counters than KVM provides.
        assert!(asked(&intel, "intel", Some("2+1"), Some(40)).is_ok());
        assert!(asked(&intel, "intel-v1", None, None).is_ok());
        assert!(asked(&amd, "amd-k7", None, None).is_ok());
        assert!(asked(&intel, "off", None, None).is_ok());
    }

    /// The properties of KVM's own vPMU are read correctly from KVM's CPUID entries. Only entries
    /// of leaves with several subleaves have an index.
    #[test]
    fn kvm_vpmu_is_read_from_supported_cpuid() {
        let leaf = |function, eax, ebx, ecx, edx| kvm_bindings::kvm_cpuid_entry2 {
            function,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        };
        let name = |vendor: Vendor| {
            let name = vendor.cpuid_name().as_bytes();
            let word = |n: usize| u32::from_le_bytes(name[n..n + 4].try_into().unwrap());
            leaf(0, 0x10, word(0), word(8), word(4))
        };
        let intel = CpuId::from_entries(&[name(Vendor::Intel), leaf(0xA, 0x0730_0802, 0x7a, 0, 3 | 48 << 5)])
            .unwrap();
        assert_eq!(
            in_cpuid(&intel),
            Some(offers(PmuGeneration::Intel(2), 8, 3, 48).pmu)
        );
        // Without a vPMU, CPUID leaf 0AH is zero.
        let none = CpuId::from_entries(&[name(Vendor::Intel), leaf(0xA, 0, 0, 0, 0)]).unwrap();
        assert_eq!(in_cpuid(&none), None);
        let amd = CpuId::from_entries(&[
            name(Vendor::Amd),
            leaf(0x8000_0000, 0x8000_0022, 0, 0, 0),
            leaf(0x8000_0001, 0, 0, 1 << 23, 0),
            leaf(0x8000_0022, 1, 6, 0, 0),
        ])
        .unwrap();
        assert_eq!(in_cpuid(&amd), Some(offers(PmuGeneration::AmdV2, 6, 0, 48).pmu));
    }
}
