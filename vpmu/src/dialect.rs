//! Meanings of the event numbers that differ between processor generations.
//!
//! Event C4H of Intel processors has unit masks for branch types, which have changed between
//! generations. Software such as rr chooses the event number of conditional branches by family and
//! model (CPUID.01H:EAX), so the vPMU decodes the number according to the processor signature in
//! the guest's CPUID. Event 025H of AMD processors has, since Zen, a unit mask for the speculative
//! lock map, which rr checks when it starts.

use crate::events::{
    ArchEvent, CounterEventRequest, DecodedCounterEvent, EventSelect, EventSelection, UnitMask,
};
use crate::model_name::Vendor;

/// BR_INST_RETIRED: event select of retired branches on Intel processors.
const BR_INST_RETIRED: EventSelect = EventSelect(0xC4);
/// Unit mask of BR_INST_RETIRED.COND since Ice Lake.
const COND: UnitMask = UnitMask(0x11);
/// Unit mask of BR_INST_RETIRED.CONDITIONAL from Nehalem to Cascade Lake, and of COND_TAKEN since
/// Ice Lake.
const CONDITIONAL: UnitMask = UnitMask(0x01);
/// Unit mask of BR_INST_RETIRED.JCC from Silvermont to Goldmont Plus and Tremont.
const JCC: UnitMask = UnitMask(0x7E);

/// Models of family 6 from Nehalem to Comet Lake, before Ice Lake.
const CORE_MODELS: [u8; 31] = [
    0x1A, 0x1E, 0x1F, 0x2E, // Nehalem
    0x25, 0x2C, 0x2F, // Westmere
    0x2A, 0x2D, // Sandy Bridge
    0x3A, 0x3E, // Ivy Bridge
    0x3C, 0x3F, 0x45, 0x46, // Haswell
    0x3D, 0x47, 0x4F, 0x56, // Broadwell
    0x4E, 0x5E, 0x55, // Skylake, Cascade Lake, Cooper Lake
    0x8E, 0x9E, // Kaby Lake, Coffee Lake
    0xA5, 0xA6, // Comet Lake
    0x66, // Cannon Lake
    0x57, 0x85, // Knights Landing, Knights Mill
    0x17, 0x1D, // Penryn
];
/// Models of family 6 with JCC: Silvermont, Airmont, Goldmont, Goldmont Plus, Tremont.
const ATOM_MODELS: [u8; 14] = [
    0x37, 0x4A, 0x4D, 0x5A, 0x5D, 0x75, 0x4C, 0x5C, 0x5F, 0x7A, 0x86, 0x96, 0x9C, 0x65,
];

/// Event select of retired lock instructions on AMD processors (PPR, PMCx025).
const RETIRED_LOCKS: EventSelect = EventSelect(0x25);
/// Unit mask of PMCx025 for SpecLockMapCommit. The mask has another meaning on families before Zen.
const SPECULATIVE: UnitMask = UnitMask(0x08);
/// Family number of the first AMD Zen processors.
const ZEN_FAMILY: u32 = 0x17;

/// Meaning of the event numbers that differ between processor generations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum EventDialect {
    /// Only event numbers that have the same meaning on all processors.
    #[default]
    Common,
    /// Intel Core before Ice Lake: C4H/01H counts conditional branches.
    IntelCore,
    /// Intel Atom: C4H/7EH counts conditional branches.
    IntelAtom,
    /// AMD since Zen: 025H/08H counts locked instructions of the speculative lock map.
    AmdZen,
}

impl EventDialect {
    /// Returns the dialect (meaning of event numbers) of a processor of `vendor` with the signature
    /// `eax` (CPUID.01H:EAX).
    pub(crate) fn of_signature(vendor: Vendor, eax: u32) -> Self {
        let base_family = eax >> 8 & 0xF;
        let family = match base_family {
            0xF => base_family + (eax >> 20 & 0xFF),
            _ => base_family,
        };
        let [low, high] = [eax >> 4 & 0xF, eax >> 16 & 0xF];
        let Ok(model) = u8::try_from(high << 4 | low) else {
            return Self::Common;
        };
        match vendor {
            Vendor::Intel if family == 6 && CORE_MODELS.contains(&model) => Self::IntelCore,
            Vendor::Intel if family == 6 && ATOM_MODELS.contains(&model) => Self::IntelAtom,
            Vendor::Amd if family >= ZEN_FAMILY => Self::AmdZen,
            _ => Self::Common,
        }
    }

    /// Returns the unit mask that selects conditional branches with event select C4H.
    pub(crate) const fn conditional_branches(self) -> UnitMask {
        match self {
            Self::Common | Self::AmdZen => COND,
            Self::IntelCore => CONDITIONAL,
            Self::IntelAtom => JCC,
        }
    }

    /// Returns `request` with its event decoded according to this dialect (meaning of event
    /// numbers).
    #[inline]
    pub(crate) fn decode(self, request: CounterEventRequest) -> CounterEventRequest {
        let (number, event) = match self {
            Self::Common => return request,
            Self::IntelCore | Self::IntelAtom => (
                EventSelection::General(BR_INST_RETIRED, self.conditional_branches()),
                ArchEvent::ConditionalBranches,
            ),
            Self::AmdZen => (
                EventSelection::General(RETIRED_LOCKS, SPECULATIVE),
                ArchEvent::SpeculativeLocks,
            ),
        };
        if request.selection == number {
            let event = DecodedCounterEvent::Architectural(event);
            CounterEventRequest { event, ..request }
        } else {
            request
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The event numbers that rr programs are decoded according to the guest's family and model.
    #[test]
    fn events_of_rr_are_decoded_by_signature() {
        let conditional = DecodedCounterEvent::Architectural(ArchEvent::ConditionalBranches);
        let locks = DecodedCounterEvent::Architectural(ArchEvent::SpeculativeLocks);
        for (vendor, signature, config, expected) in [
            (Vendor::Intel, 0x0005_0657, 0x51_01C4, conditional), // Cascade Lake
            (Vendor::Intel, 0x0003_06C3, 0x51_01C4, conditional), // Haswell
            (Vendor::Intel, 0x0005_0657, 0x51_7EC4, DecodedCounterEvent::Raw),
            (Vendor::Intel, 0x0003_0678, 0x51_7EC4, conditional), // Silvermont
            (Vendor::Intel, 0x0005_06C9, 0x51_7EC4, conditional), // Goldmont
            (Vendor::Intel, 0x0003_0678, 0x51_01C4, DecodedCounterEvent::Raw),
            (Vendor::Intel, 0x0006_06A6, 0x51_11C4, conditional), // Ice Lake
            (Vendor::Intel, 0x0006_06A6, 0x51_01C4, DecodedCounterEvent::Raw),
            (Vendor::Intel, 0x0000_0611, 0x51_01C4, DecodedCounterEvent::Raw),
            (Vendor::Amd, 0x0083_0F10, 0x51_00D1, conditional), // Zen 2
            (Vendor::Amd, 0x0083_0F10, 0x51_01C4, DecodedCounterEvent::Raw),
            (Vendor::Amd, 0x0083_0F10, 0x51_0825, locks),
            (Vendor::Amd, 0x00B4_0F40, 0x51_0825, locks), // Zen 5
            (Vendor::Amd, 0x0083_0F10, 0x51_0F25, DecodedCounterEvent::Raw),
            (Vendor::Amd, 0x0060_0F20, 0x51_0825, DecodedCounterEvent::Raw), // Piledriver
            (Vendor::Intel, 0x0006_06A6, 0x51_0825, DecodedCounterEvent::Raw),
        ] {
            let request = CounterEventRequest::from_raw_config(vendor, config);
            let decoded = EventDialect::of_signature(vendor, signature).decode(request);
            assert_eq!(decoded.event, expected, "{signature:#x}, {config:#x}");
            // Decoding does not change the event number.
            assert_eq!(decoded.raw_config(), request.raw_config());
        }
    }
}
