//! The three index spaces of a PMU, as types that cannot be mixed up.
//!
//! See the glossary at the top of the crate for what each of them numbers.

use std::fmt;

/// Most general-purpose counters of any model (AMD PerfMonV2 can enumerate fifteen).
pub const MAX_GENERAL: usize = 15;
/// Most fixed counters of any model.
pub const MAX_FIXED: usize = 4;
/// Most counters of any model, and the size of every table indexed by [`CounterIndex::slot`].
pub const MAX_COUNTERS: usize = MAX_GENERAL + MAX_FIXED;

/// Where the fixed counters begin in a counter index and in Intel's global registers.
const FIXED_BASE: u8 = 32;

/// Address of a model-specific register, as RDMSR and WRMSR take it in ECX.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MsrAddress(pub u32);

impl fmt::Debug for MsrAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MSR {:#x}", self.0)
    }
}

/// Operand of RDPMC, as it stands in ECX.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RdpmcIndex(pub u32);

impl fmt::Debug for RdpmcIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RDPMC {:#x}", self.0)
    }
}

/// A counter of this PMU: its bit in the global control and status registers.
///
/// General-purpose counters are 0 to 14, fixed counters 32 to 35. A value of this type always lies in one of
/// these ranges, but the counter need not exist in a given model.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CounterIndex(u8);

impl CounterIndex {
    /// The `n`th general-purpose counter; `None` past [`MAX_GENERAL`].
    #[expect(clippy::cast_possible_truncation, reason = "below MAX_GENERAL")]
    pub const fn general(n: u32) -> Option<Self> {
        if n < MAX_GENERAL as u32 {
            Some(Self(n as u8))
        } else {
            None
        }
    }

    /// The `n`th fixed counter; `None` past [`MAX_FIXED`].
    #[expect(clippy::cast_possible_truncation, reason = "below MAX_FIXED")]
    pub const fn fixed(n: u32) -> Option<Self> {
        if n < MAX_FIXED as u32 {
            Some(Self(FIXED_BASE + n as u8))
        } else {
            None
        }
    }

    /// The counter whose bit in the global registers is number `bit`.
    pub const fn from_bit(bit: u32) -> Option<Self> {
        if bit < FIXED_BASE as u32 {
            Self::general(bit)
        } else {
            Self::fixed(bit - FIXED_BASE as u32)
        }
    }

    /// Bit mask of the counter in the global registers.
    pub const fn mask(self) -> u64 {
        1 << self.0
    }

    /// Bit number of the counter in the global registers.
    pub const fn bit(self) -> u32 {
        self.0 as u32
    }

    /// Number among the fixed counters, `None` for a general-purpose counter.
    pub const fn fixed_number(self) -> Option<u32> {
        if self.0 >= FIXED_BASE {
            Some((self.0 - FIXED_BASE) as u32)
        } else {
            None
        }
    }

    /// Dense number below [`MAX_COUNTERS`]: general-purpose counters first.
    pub const fn slot(self) -> usize {
        if self.0 >= FIXED_BASE {
            (self.0 - FIXED_BASE) as usize + MAX_GENERAL
        } else {
            self.0 as usize
        }
    }

    /// The counter with dense number `slot`.
    #[expect(clippy::cast_possible_truncation, reason = "nobody has 2^32 slots")]
    pub const fn from_slot(slot: usize) -> Option<Self> {
        if slot < MAX_GENERAL {
            Self::general(slot as u32)
        } else {
            Self::fixed((slot - MAX_GENERAL) as u32)
        }
    }
}

impl fmt::Debug for CounterIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// `gp3` or `fixed1`.
impl fmt::Display for CounterIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fixed_number() {
            Some(n) => write!(f, "fixed{n}"),
            None => write!(f, "gp{}", self.0),
        }
    }
}

/// The counters whose bits are set in `mask`, lowest first. Bits that name no counter are skipped.
pub fn counters_in(mut mask: u64) -> impl Iterator<Item = CounterIndex> {
    std::iter::from_fn(move || {
        while mask != 0 {
            let bit = mask.trailing_zeros();
            mask &= mask - 1;
            if let Some(counter) = CounterIndex::from_bit(bit) {
                return Some(counter);
            }
        }
        None
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_and_bits_name_the_same_counters() {
        for slot in 0..MAX_COUNTERS {
            let counter = CounterIndex::from_slot(slot).unwrap();
            assert_eq!(counter.slot(), slot);
            assert_eq!(CounterIndex::from_bit(counter.bit()), Some(counter));
        }
        assert_eq!(CounterIndex::from_slot(MAX_COUNTERS), None);
        assert_eq!(CounterIndex::from_bit(15), None);
        assert_eq!(CounterIndex::from_bit(36), None);
    }

    #[test]
    fn a_mask_with_stray_bits_yields_only_counters() {
        let all: Vec<_> = counters_in(u64::MAX).collect();
        assert_eq!(all.len(), MAX_COUNTERS);
        assert!(counters_in(0).next().is_none());
    }
}
