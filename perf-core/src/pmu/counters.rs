//! Sets of hardware counters.

use std::fmt;
use std::ops::{BitAnd, BitOr};

/// A set of up to 64 counters of one PMU, numbered from 0.
///
/// A driver numbers its counters from those that hold most events to those that hold few: general counters
/// first, fixed ones behind them. An event that may sit on several is put on the last of them, so that the
/// general ones stay free for what fits nowhere else.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct CounterMask(u64);

impl CounterMask {
    /// No counter.
    pub const NONE: Self = Self(0);
    /// All there can be.
    pub const ALL: Self = Self(u64::MAX);
    /// The most counters a PMU may have.
    pub const MOST: usize = 64;

    /// Counters 0 to `n - 1`; all 64 for any larger `n`.
    #[must_use]
    pub const fn first(n: usize) -> Self {
        if n >= Self::MOST {
            Self::ALL
        } else {
            Self((1 << n) - 1)
        }
    }

    /// Counter `n` alone; none for an `n` there cannot be.
    #[must_use]
    pub const fn one(n: usize) -> Self {
        if n >= Self::MOST { Self::NONE } else { Self(1 << n) }
    }

    /// One bit for each counter.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// One bit for each counter.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// How many counters these are.
    #[must_use]
    pub const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Whether there is no counter in it.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether counter `n` is in it.
    #[must_use]
    pub const fn contains(self, n: usize) -> bool {
        !Self(self.0 & Self::one(n).0).is_empty()
    }

    /// These counters without those of `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The last counter.
    #[must_use]
    pub const fn last(self) -> Option<usize> {
        match self.0.checked_ilog2() {
            Some(n) => Some(n as usize),
            None => None,
        }
    }

    /// These counters without the first `n`.
    #[must_use]
    pub fn skip(self, n: usize) -> Self {
        self.iter()
            .take(n)
            .fold(self, |left, c| left.without(Self::one(c)))
    }

    /// The counters, in order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let n = (left != 0).then(|| left.trailing_zeros() as usize)?;
            left &= left - 1;
            Some(n)
        })
    }
}

impl BitAnd for CounterMask {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl BitOr for CounterMask {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Debug for CounterMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn no_number_is_too_large() {
        assert_eq!(CounterMask::first(64), CounterMask::ALL);
        assert_eq!(CounterMask::first(1000), CounterMask::ALL);
        assert_eq!(CounterMask::one(64), CounterMask::NONE);
        assert!(!CounterMask::ALL.contains(64));
        assert_eq!(CounterMask::NONE.last(), None);
    }

    proptest! {
        #[test]
        fn a_mask_is_the_set_of_its_counters(bits: u64, skip in 0usize..70) {
            let mask = CounterMask::from_bits(bits);
            let list: Vec<usize> = mask.iter().collect();
            prop_assert!(list.is_sorted() && list.iter().all(|&n| mask.contains(n)));
            prop_assert_eq!(list.len(), mask.len());
            prop_assert_eq!(list.last().copied(), mask.last());
            let rest: Vec<usize> = mask.skip(skip).iter().collect();
            prop_assert_eq!(rest, list.into_iter().skip(skip).collect::<Vec<_>>());
        }
    }
}
