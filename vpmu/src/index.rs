//! Types for the three ways in which a PMU numbers its counters: by MSR address, by RDPMC operand,
//! and by bit in the global registers. The crate documentation explains them.

use std::fmt;

/// Maximum number of general-purpose counters of any model (AMD PerfMonV2 can enumerate fifteen).
pub const MAX_GENERAL: usize = 15;
/// Maximum number of fixed counters of any model.
pub const MAX_FIXED: usize = 4;
/// Maximum number of counters of any model, and the size of every table indexed by
/// [`CounterIndex::slot`].
pub const MAX_COUNTERS: usize = MAX_GENERAL + MAX_FIXED;

/// Bit number of fixed counter 0 in a counter index and in Intel's global registers.
const FIXED_BASE: u8 = 32;

/// Address of a model-specific register, as passed in ECX to RDMSR and WRMSR.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MsrAddress(pub u32);

impl fmt::Debug for MsrAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MSR {:#x}", self.0)
    }
}

/// Operand of RDPMC, as passed in ECX.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RdpmcIndex(pub u32);

impl fmt::Debug for RdpmcIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RDPMC {:#x}", self.0)
    }
}

/// Counter number, which is the counter's bit in the global control and status registers.
///
/// General-purpose counters are 0 to 14, fixed counters 32 to 35. A value is always in one of these
/// ranges, but a given model may not have the counter.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CounterIndex(u8);

impl CounterIndex {
    /// Returns general-purpose counter `n`, or `None` if `n` is not below [`MAX_GENERAL`].
    #[expect(clippy::cast_possible_truncation, reason = "below MAX_GENERAL")]
    pub const fn general(n: u32) -> Option<Self> {
        if n < MAX_GENERAL as u32 {
            Some(Self(n as u8))
        } else {
            None
        }
    }

    /// Returns fixed counter `n`, or `None` if `n` is not below [`MAX_FIXED`].
    #[expect(clippy::cast_possible_truncation, reason = "below MAX_FIXED")]
    pub const fn fixed(n: u32) -> Option<Self> {
        if n < MAX_FIXED as u32 {
            Some(Self(FIXED_BASE + n as u8))
        } else {
            None
        }
    }

    /// Returns the counter with bit number `bit` in the global registers, or `None` if there is
    /// none.
    pub const fn from_bit(bit: u32) -> Option<Self> {
        if bit < FIXED_BASE as u32 {
            Self::general(bit)
        } else {
            Self::fixed(bit - FIXED_BASE as u32)
        }
    }

    /// Returns the bit mask of the counter in the global registers.
    pub const fn mask(self) -> u64 {
        1 << self.0
    }

    /// Returns the bit number of the counter in the global registers.
    pub const fn bit(self) -> u32 {
        self.0 as u32
    }

    /// Returns the number of a fixed counter, or `None` for a general-purpose counter.
    pub const fn fixed_number(self) -> Option<u32> {
        if self.0 >= FIXED_BASE {
            Some((self.0 - FIXED_BASE) as u32)
        } else {
            None
        }
    }

    /// Returns the index of the counter in tables of [`MAX_COUNTERS`] entries. General-purpose
    /// counters come first.
    pub const fn slot(self) -> usize {
        if self.0 >= FIXED_BASE {
            (self.0 - FIXED_BASE) as usize + MAX_GENERAL
        } else {
            self.0 as usize
        }
    }

    /// Returns the counter with the table index `slot` ([`Self::slot`]).
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

/// Formats the counter as `gp3` or `fixed1`.
impl fmt::Display for CounterIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fixed_number() {
            Some(n) => write!(f, "fixed{n}"),
            None => write!(f, "gp{}", self.0),
        }
    }
}

/// Iterates over the counters whose bits are set in `mask`, in ascending order. Ignores bits that
/// belong to no counter.
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
    fn slot_and_bit_numbers_round_trip() {
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
    fn counters_in_ignores_invalid_bits() {
        let all: Vec<_> = counters_in(u64::MAX).collect();
        assert_eq!(all.len(), MAX_COUNTERS);
        assert!(counters_in(0).next().is_none());
    }
}
