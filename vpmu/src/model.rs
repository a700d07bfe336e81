//! [`PmuModel`]: vendor, generation, number and width of the counters of a guest's PMU.

use std::fmt;

use crate::events::{ArchEvent, ArchEventSet};
use crate::freeze::{DEBUGCTL_FREEZE_BRANCHES_ON_PMI, DEBUGCTL_FREEZE_ON_PMI};
use crate::host_pmu::{CpuidReader, HostPmuProperties};
use crate::index::{CounterIndex, MAX_FIXED, MAX_GENERAL};
use crate::model_name::{PmuGeneration, PmuModelError, PmuModelName, RequestedCounters, Vendor};
use crate::width::CounterWidth;

/// Vendor, generation, number and width of the counters of a guest's PMU. All values are within the
/// limits of the generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmuModel {
    generation: PmuGeneration,
    general: u8,
    /// Bitmap of fixed counters: bit n is set if fixed counter n exists.
    fixed_bitmap: u8,
    width: CounterWidth,
    /// `true` if the processor supports transactions (Intel TSX), so that event selectors have the
    /// transaction bits.
    transactions: bool,
    /// `true` if the guest has branch records.
    branch_records: bool,
}

impl PmuModel {
    /// Counter widths that `--pmu-width` accepts for Intel models, in bits.
    const INTEL_WIDTHS: std::ops::RangeInclusive<u32> = 32..=48;

    /// The `--pmu intel` model: version 2 with four general-purpose and three fixed counters of 48
    /// bits.
    pub const INTEL: Self = Self {
        generation: PmuGeneration::Intel(2),
        general: 4,
        fixed_bitmap: 0b111,
        width: CounterWidth::W48,
        transactions: false,
        branch_records: false,
    };
    /// The `--pmu amd` model: the core extension with six counters of 48 bits.
    pub const AMD: Self = Self {
        generation: PmuGeneration::AmdCore,
        general: 6,
        fixed_bitmap: 0,
        width: CounterWidth::W48,
        transactions: false,
        branch_records: false,
    };

    /// Builds the model for `--pmu`, `--pmu-counters` and `--pmu-width`.
    ///
    /// # Errors
    /// Returns a [`PmuModelError`] if the numbers do not fit the model or the host has no PMU to
    /// copy.
    pub fn resolve(
        name: PmuModelName,
        counters: Option<RequestedCounters>,
        width: Option<u32>,
        host: &mut CpuidReader<'_>,
    ) -> Result<Self, PmuModelError> {
        let plain = counters.is_none() && width.is_none();
        let generation = match name {
            PmuModelName::Generation(generation) => generation,
            PmuModelName::Auto => match HostPmuProperties::vendor(host) {
                Vendor::Intel => PmuGeneration::Intel(2),
                Vendor::Amd => PmuGeneration::AmdCore,
            },
            PmuModelName::Host if plain => return Self::host(host),
            PmuModelName::Host => return Err(PmuModelError::NotAdjustable("host")),
            PmuModelName::Off if plain => return Ok(Self::off(HostPmuProperties::vendor(host))),
            PmuModelName::Off => return Err(PmuModelError::NotAdjustable("off")),
        };
        Self::new(generation, counters, width)
    }

    /// Builds a model of `generation` with the given counters and counter width in bits.
    ///
    /// `None` selects the default: 4 general-purpose and 3 fixed counters on Intel (no fixed
    /// counters in version 1), 4 counters on AMD K7 and 6 on other AMD generations, 48 bits.
    ///
    /// # Errors
    /// Returns a [`PmuModelError`] if a number is outside the limits of the generation.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "checked above to be at most 15, and 4"
    )]
    pub fn new(
        generation: PmuGeneration,
        counters: Option<RequestedCounters>,
        width: Option<u32>,
    ) -> Result<Self, PmuModelError> {
        let default = Self::default_numbers(generation);
        let general = counters.map_or(default.general, |c| c.general);
        let fixed = counters
            .and_then(|c| c.fixed)
            .unwrap_or(default.fixed.unwrap_or(0));

        check_numbers(generation, general, fixed)?;
        let bits = width.unwrap_or(48);
        let (may_have, limit) = match generation {
            PmuGeneration::Intel(_) => (Self::INTEL_WIDTHS.contains(&bits), "32 to 48"),
            // Only 48 bits, because AMD's CPUID does not report the counter width to the guest.
            _ => (bits == 48, "48 only"),
        };
        let width = match CounterWidth::new(bits) {
            Some(width) if may_have => width,
            _ => {
                return Err(PmuModelError::Width {
                    given: bits,
                    generation,
                    limit,
                });
            }
        };

        // With four counters the core extension's CPUID bit must stay clear, which makes the model
        // a K7.
        let generation = match (generation, general) {
            (PmuGeneration::AmdCore, 4) => PmuGeneration::AmdK7,
            _ => generation,
        };
        Ok(Self {
            generation,
            general: general as u8,
            fixed_bitmap: ((1u32 << fixed) - 1) as u8,
            width,
            transactions: false,
            branch_records: false,
        })
    }

    /// Returns a model without a PMU, for a processor of `vendor`.
    pub const fn off(vendor: Vendor) -> Self {
        Self {
            generation: PmuGeneration::Off(vendor),
            general: 0,
            fixed_bitmap: 0,
            width: CounterWidth::W48,
            transactions: false,
            branch_records: false,
        }
    }

    /// Builds a model from the host's CPUID, limited to version 5 with eight general-purpose and
    /// four fixed counters on Intel, and to six counters, or the number that version 2 reports, on
    /// AMD.
    ///
    /// # Errors
    /// Returns [`PmuModelError::HostHasNone`] if the host's CPUID reports no PMU.
    #[expect(clippy::cast_possible_truncation, reason = "constants, and at most four bits")]
    pub fn host(host: &mut CpuidReader<'_>) -> Result<Self, PmuModelError> {
        let pmu = HostPmuProperties::read(host).ok_or(PmuModelError::HostHasNone)?;
        let generation = pmu.generation;
        let general = match generation {
            PmuGeneration::Intel(_) => pmu.general.min(8),
            _ => pmu.general.min(MAX_GENERAL as u32),
        };
        let bits = match generation {
            PmuGeneration::Intel(_) => pmu.width.min(*Self::INTEL_WIDTHS.end()),
            _ => 48,
        };
        let model = Self::new(
            generation,
            Some(RequestedCounters {
                general,
                fixed: Some(0),
            }),
            Some(bits),
        )
        .map_err(|_| PmuModelError::HostHasNone)?;
        let fixed_bitmap = match generation {
            PmuGeneration::Intel(2..=4) => {
                // Before version 5, CPUID can only enumerate a contiguous range of fixed counters
                // from 0.
                ((1u32 << pmu.fixed_bitmap.trailing_ones().min(MAX_FIXED as u32)) - 1) as u8
            }
            PmuGeneration::Intel(5) => (pmu.fixed_bitmap & 0xF) as u8,
            _ => 0,
        };
        Ok(Self {
            fixed_bitmap,
            ..model
        })
    }

    const fn default_numbers(generation: PmuGeneration) -> RequestedCounters {
        let (general, fixed) = match generation {
            PmuGeneration::Off(_) => (0, 0),
            PmuGeneration::Intel(1) => (4, 0),
            PmuGeneration::Intel(_) => (4, 3),
            PmuGeneration::AmdK7 => (4, 0),
            PmuGeneration::AmdCore | PmuGeneration::AmdV2 => (6, 0),
        };
        RequestedCounters {
            general,
            fixed: Some(fixed),
        }
    }

    /// Returns the largest model, starting with this one, for which `holds` returns `true`. Removes
    /// general-purpose counters first and fixed counters second. Returns the smallest model if
    /// `holds` accepts none.
    ///
    /// At least two general-purpose counters remain (four on AMD), the minimum that every guest
    /// driver supports. Fixed counters are removed last because a fixed counter may be the only one
    /// that supports its event.
    #[must_use]
    pub fn lowered(self, mut holds: impl FnMut(&Self) -> bool) -> Self {
        let mut model = self;
        while !holds(&model) {
            match model.one_less() {
                Some(less) => model = less,
                None => break,
            }
        }
        model
    }

    fn one_less(self) -> Option<Self> {
        let with = |general: u32| {
            let numbers = RequestedCounters {
                general,
                fixed: Some(0),
            };
            Self::new(self.generation, Some(numbers), Some(self.width.bits()))
                .ok()?
                .with_fixed_bitmap(self.fixed_bitmap)
        };
        let least = match self.vendor() {
            Vendor::Intel => 2,
            Vendor::Amd => 4,
        };
        let general = (least..self.general()).rev().find_map(with);
        general.or_else(|| {
            let highest = self.fixed_bitmap.checked_ilog2()?;
            self.with_fixed_bitmap(self.fixed_bitmap & !(1 << highest))
        })
    }

    /// Returns this model with exactly the fixed counters of `bitmap`, for restoring a saved state.
    /// Returns `None` if the generation does not support these fixed counters.
    pub(crate) fn with_fixed_bitmap(self, bitmap: u8) -> Option<Self> {
        let run_from_zero = bitmap & bitmap.wrapping_add(1) == 0;
        let possible = match self.generation {
            PmuGeneration::Intel(5) => bitmap < 1 << MAX_FIXED,
            PmuGeneration::Intel(2..=4) => bitmap < 1 << MAX_FIXED && run_from_zero,
            _ => bitmap == 0,
        };
        possible.then_some(Self {
            fixed_bitmap: bitmap,
            ..self
        })
    }

    /// Returns this model with the selector bits for transactional memory, which exist if the
    /// guest's CPUID reports it (CPUID.(07H,0):EBX.RTM or HLE). Has no effect on AMD models or
    /// without a PMU.
    #[must_use]
    pub const fn with_transactions(self) -> Self {
        Self {
            transactions: matches!(self.generation, PmuGeneration::Intel(_)),
            ..self
        }
    }

    /// Returns whether the event selectors have the transaction bits (IN_TX and IN_TXCP).
    pub const fn has_transactions(&self) -> bool {
        self.transactions
    }

    /// Returns this model with branch records: architectural LBRs on Intel models from version 2
    /// on, LBR version 2 on `amd-v2`. Returns other models unchanged.
    #[must_use]
    pub const fn with_branch_records(self) -> Self {
        Self {
            branch_records: matches!(self.generation, PmuGeneration::Intel(2..) | PmuGeneration::AmdV2),
            ..self
        }
    }

    /// Returns whether the guest has branch records.
    pub const fn has_branch_records(&self) -> bool {
        self.branch_records
    }

    /// Returns the bits of IA32_DEBUGCTL that belong to the PMU of this model.
    pub const fn debug_control_bits(&self) -> u64 {
        match (self.generation, self.branch_records) {
            (PmuGeneration::Intel(2..), false) => DEBUGCTL_FREEZE_ON_PMI,
            (_, true) => DEBUGCTL_FREEZE_ON_PMI | DEBUGCTL_FREEZE_BRANCHES_ON_PMI,
            (_, false) => 0,
        }
    }

    /// Returns this model without fixed counter 3 (top-down slots) if `backability` does not
    /// include its event. CPUID has no other way to report this event as unavailable. The other
    /// fixed counters remain, because Linux uses the first three regardless of CPUID.0AH:EBX.
    #[must_use]
    pub const fn without_uncountable_slots(self, backability: ArchEventSet) -> Self {
        let slots = if backability.contains(ArchEvent::TopdownSlots) {
            0
        } else {
            1 << 3
        };
        Self {
            fixed_bitmap: self.fixed_bitmap & !slots,
            ..self
        }
    }

    /// Returns the generation of the PMU.
    pub const fn generation(&self) -> PmuGeneration {
        self.generation
    }

    /// Returns the vendor of the PMU. CPUID leaf 0 must report the same vendor.
    pub const fn vendor(&self) -> Vendor {
        self.generation.vendor()
    }

    /// Returns whether the guest has no PMU.
    pub const fn is_off(&self) -> bool {
        matches!(self.generation, PmuGeneration::Off(_))
    }

    /// Returns the version of Intel architectural performance monitoring, or 0 on AMD models and
    /// without a PMU.
    pub const fn intel_version(&self) -> u8 {
        match self.generation {
            PmuGeneration::Intel(version) => version,
            _ => 0,
        }
    }

    /// Returns the number of general-purpose counters of the model.
    pub const fn general(&self) -> u32 {
        self.general as u32
    }

    /// Returns the number of fixed counters of the model.
    pub const fn fixed(&self) -> u32 {
        self.fixed_bitmap.count_ones()
    }

    /// Returns the bitmap of fixed counters: bit n is set if fixed counter n exists.
    pub const fn fixed_bitmap(&self) -> u8 {
        self.fixed_bitmap
    }

    /// Returns the width of the model's counters.
    pub const fn width(&self) -> CounterWidth {
        self.width
    }

    /// Returns the mask of all existing counters in the global registers.
    pub const fn counters_mask(&self) -> u64 {
        ((1 << self.general) - 1) | ((self.fixed_bitmap as u64) << 32)
    }

    /// Returns whether the model has the counter `counter`.
    pub const fn has_counter(&self, counter: CounterIndex) -> bool {
        self.counters_mask() & counter.mask() != 0
    }
}

/// Validates the numbers of general-purpose and fixed counters for a generation.
fn check_numbers(generation: PmuGeneration, general: u32, fixed: u32) -> Result<(), PmuModelError> {
    check_general(generation, general)?;
    check_fixed(generation, fixed)
}

/// Validates the number of general-purpose counters for a generation.
#[expect(clippy::cast_possible_truncation, reason = "constants")]
fn check_general(generation: PmuGeneration, general: u32) -> Result<(), PmuModelError> {
    let (may_have, limit, remedy) = match generation {
        PmuGeneration::Off(_) => (
            general == 0,
            "none",
            "choose a model by name, for example --pmu intel",
        ),
        // Linux ignores the PMU of a processor with a single counter (X86_FEATURE_ARCH_PERFMON
        // stays clear).
        PmuGeneration::Intel(_) => (
            (2..=8).contains(&general),
            "2 to 8",
            "choose a number in this range",
        ),
        PmuGeneration::AmdK7 => (
            general == 4,
            "4",
            "choose --pmu amd for 6, or --pmu amd-v2 for 4 to 15",
        ),
        // CPUID enumerates the core extension with one bit that means six counters. Four counters
        // without the bit are a K7; five counters cannot be enumerated.
        PmuGeneration::AmdCore => (
            general == 4 || general == 6,
            "4 (without the core extension) or 6",
            "choose --pmu amd-v2, whose CPUID can report any number from 4 to 15",
        ),
        PmuGeneration::AmdV2 => (
            (4..=MAX_GENERAL as u32).contains(&general),
            "4 to 15",
            "choose a number in this range",
        ),
    };
    if !may_have {
        return Err(PmuModelError::General {
            given: general,
            generation,
            limit,
            remedy,
        });
    }
    Ok(())
}

/// Validates the number of fixed counters for a generation.
#[expect(clippy::cast_possible_truncation, reason = "constants")]
fn check_fixed(generation: PmuGeneration, fixed: u32) -> Result<(), PmuModelError> {
    let (may_have, limit, remedy) = match generation {
        PmuGeneration::Intel(2..) => (
            fixed <= MAX_FIXED as u32,
            "0 to 4",
            "choose a number in this range, or omit it for 3",
        ),
        PmuGeneration::Intel(_) => (
            fixed == 0,
            "none",
            "fixed counters exist from --pmu intel-v2; omit +FIXED",
        ),
        _ => (
            fixed == 0,
            "none",
            "fixed counters exist on Intel models only; omit +FIXED",
        ),
    };
    if !may_have {
        return Err(PmuModelError::Fixed {
            given: fixed,
            generation,
            limit,
            remedy,
        });
    }
    Ok(())
}

/// Formats the model, for example `intel-v2 with 4+3 counters of 48 bits`.
impl fmt::Display for PmuModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_off() {
            return f.write_str("off");
        }
        write!(f, "{} with {}", self.generation, self.general)?;
        if self.fixed_bitmap != 0 {
            write!(f, "+{}", self.fixed())?;
        }
        write!(f, " counters of {} bits", self.width.bits())?;
        if self.branch_records {
            f.write_str(" and branch records")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(name: &str, counters: Option<&str>, width: Option<u32>) -> Result<PmuModel, PmuModelError> {
        let counters = counters.map(str::parse).transpose()?;
        PmuModel::resolve(name.parse()?, counters, width, &mut |_, _| Default::default())
    }

    #[test]
    fn plain_names_give_the_documented_numbers() {
        for (name, shown) in [
            ("intel", "intel-v2 with 4+3 counters of 48 bits"),
            ("intel-v1", "intel-v1 with 4 counters of 48 bits"),
            ("intel-v5", "intel-v5 with 4+3 counters of 48 bits"),
            ("amd-k7", "amd-k7 with 4 counters of 48 bits"),
            ("amd", "amd with 6 counters of 48 bits"),
            ("amd-v2", "amd-v2 with 6 counters of 48 bits"),
            ("off", "off"),
        ] {
            assert_eq!(build(name, None, None).unwrap().to_string(), shown);
        }
        assert_eq!(build("intel", None, None).unwrap(), PmuModel::INTEL);
        assert_eq!(build("amd", None, None).unwrap(), PmuModel::AMD);
    }

    #[test]
    fn numbers_at_the_limits_are_taken() {
        for (name, counters) in [
            ("intel-v1", "8"),
            ("intel-v1", "2+0"),
            ("intel-v2", "8+4"),
            ("intel-v5", "2+0"),
            ("amd-k7", "4"),
            ("amd", "4"),
            ("amd", "6"),
            ("amd-v2", "4"),
            ("amd-v2", "15"),
        ] {
            build(name, Some(counters), None).unwrap_or_else(|e| panic!("{name} {counters}: {e}"));
        }
        assert_eq!(build("intel", None, Some(32)).unwrap().width().bits(), 32);
    }

    #[test]
    fn four_counter_amd_model_lacks_core_extension() {
        assert_eq!(
            build("amd", Some("4"), None).unwrap().generation(),
            PmuGeneration::AmdK7
        );
    }

    #[test]
    fn model_errors_name_input_limit_and_remedy() {
        // Each input consists of the values of `--pmu`, `--pmu-counters` and `--pmu-width`.
        for (options, message) in [
            (
                "intel-v9 - -",
                "unknown PMU model \"intel-v9\"; must be auto, host, off, intel, intel-v1 to intel-v5, amd, amd-k7 or amd-v2",
            ),
            (
                "intel four -",
                "invalid counter numbers \"four\"; must be GP or GP+FIXED, for example 4 or 4+3",
            ),
            (
                "intel 9 -",
                "9 general-purpose counters: intel-v2 supports 2 to 8; choose a number in this range",
            ),
            (
                "intel-v4 1+3 -",
                "1 general-purpose counters: intel-v4 supports 2 to 8; choose a number in this range",
            ),
            (
                "amd 5 -",
                "5 general-purpose counters: amd supports 4 (without the core extension) or 6; choose --pmu amd-v2, whose CPUID can report any number from 4 to 15",
            ),
            (
                "intel-v1 4+3 -",
                "3 fixed counters: intel-v1 supports none; fixed counters exist from --pmu intel-v2; omit +FIXED",
            ),
            (
                "intel-v3 4+5 -",
                "5 fixed counters: intel-v3 supports 0 to 4; choose a number in this range, or omit it for 3",
            ),
            (
                "amd - 40",
                "a counter width of 40 bits: amd supports 48 only; omit --pmu-width for 48",
            ),
            (
                "intel - 64",
                "a counter width of 64 bits: intel-v2 supports 32 to 48; omit --pmu-width for 48",
            ),
            (
                "off 4 -",
                "--pmu off does not support --pmu-counters and --pmu-width; choose a model by name, for example --pmu intel-v2",
            ),
            (
                "host - -",
                "--pmu host: no PMU found in this host's CPUID; choose a model by name, for example --pmu intel",
            ),
        ] {
            let [name, counters, width] = options.split(' ').collect::<Vec<_>>()[..] else {
                panic!("three options");
            };
            let counters = (counters != "-").then_some(counters);
            assert_eq!(
                build(name, counters, width.parse().ok()).unwrap_err().to_string(),
                message
            );
        }
    }

    #[test]
    fn counter_numbers_are_digits_only() {
        for text in [
            "",
            "+",
            "4+",
            "+3",
            "4++3",
            "4+3+1",
            "-4",
            " 4",
            "4 ",
            "0x4",
            "9999999999",
            "4+
3",
        ] {
            assert!(text.parse::<RequestedCounters>().is_err(), "{text:?} was taken");
        }
        assert_eq!(
            "8+4".parse(),
            Ok(RequestedCounters {
                general: 8,
                fixed: Some(4)
            })
        );
    }

    #[test]
    fn model_error_escapes_and_truncates_name() {
        let name = "\x1b[2J\n".repeat(1000);
        let message = name.parse::<PmuModelName>().unwrap_err().to_string();
        assert!(
            message.len() < 500 && !message.contains(['\n', '\x1b']),
            "{message:?}"
        );
    }

    /// `lowered` removes counters one by one until the caller accepts the model. Each model on the
    /// way is valid for its generation.
    #[test]
    fn lowered_finds_largest_acceptable_model() {
        let numbers = |m: PmuModel| (m.generation(), m.general(), m.fixed_bitmap());
        let new = |generation| PmuModel::new(generation, None, None).unwrap();
        let at_most = |n| move |m: &PmuModel| m.general() + m.fixed() <= n;
        let intel = new(PmuGeneration::Intel(2));
        assert_eq!(intel.lowered(|_| true), intel);
        assert_eq!(
            numbers(intel.lowered(at_most(6))),
            (PmuGeneration::Intel(2), 3, 0b111)
        );
        assert_eq!(
            numbers(intel.lowered(at_most(3))),
            (PmuGeneration::Intel(2), 2, 0b001)
        );
        assert_eq!(numbers(intel.lowered(|_| false)), (PmuGeneration::Intel(2), 2, 0));
        // The core extension's CPUID bit cannot express five counters; four are expressed by a
        // clear bit.
        let amd = new(PmuGeneration::AmdCore);
        assert_eq!(numbers(amd.lowered(at_most(5))), (PmuGeneration::AmdK7, 4, 0));
        let v2 = new(PmuGeneration::AmdV2);
        assert_eq!(numbers(v2.lowered(at_most(5))), (PmuGeneration::AmdV2, 5, 0));
        assert_eq!(numbers(v2.lowered(|_| false)), (PmuGeneration::AmdV2, 4, 0));
        let off = PmuModel::off(Vendor::Intel);
        assert_eq!(off.lowered(|_| false), off);
    }
}
