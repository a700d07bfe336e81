//! Sets of hardware counters, for capacities and counter constraints.

use std::fmt;
use std::ops::{BitAnd, BitOr};

/// A set of up to 64 hardware counters of one PMU, numbered from 0.
///
/// A driver numbers its counters from the most general to the most specialized: general-purpose
/// counters first, then fixed-function counters. An event with several allowed counters is assigned
/// to the highest-numbered one, which leaves the general-purpose counters free for other events.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct CounterMask(u64);

impl CounterMask {
    /// The empty set.
    pub const NONE: Self = Self(0);
    /// The set of all 64 counters.
    pub const ALL: Self = Self(u64::MAX);
    /// Maximum number of counters in a set.
    pub const MAX_COUNTERS: usize = 64;

    /// Returns the set of counters 0 to `n - 1`, or all 64 counters if `n` is larger than 64.
    #[must_use]
    pub const fn first(n: usize) -> Self {
        if n >= Self::MAX_COUNTERS {
            Self::ALL
        } else {
            Self((1 << n) - 1)
        }
    }

    /// Returns the set that contains only counter `n`, or the empty set if `n` is 64 or larger.
    #[must_use]
    pub const fn one(n: usize) -> Self {
        if n >= Self::MAX_COUNTERS {
            Self::NONE
        } else {
            Self(1 << n)
        }
    }

    /// Creates a set from a mask with one bit per counter.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns the set as a mask with one bit per counter.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Returns the number of counters in the set.
    #[must_use]
    pub const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Returns `true` if the set is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns `true` if the set contains counter `n`.
    #[must_use]
    pub const fn contains(self, n: usize) -> bool {
        !Self(self.0 & Self::one(n).0).is_empty()
    }

    /// Returns the counters of this set that are not in `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns the highest-numbered counter in the set, or `None` if the set is empty.
    #[must_use]
    pub const fn last(self) -> Option<usize> {
        match self.0.checked_ilog2() {
            Some(n) => Some(n as usize),
            None => None,
        }
    }

    /// Returns the set without its `n` lowest-numbered counters.
    #[must_use]
    pub fn skip(self, n: usize) -> Self {
        self.iter()
            .take(n)
            .fold(self, |left, c| left.without(Self::one(c)))
    }

    /// Returns an iterator over the counters in the set, in ascending order.
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
    fn counter_numbers_above_63_are_ignored() {
        assert_eq!(CounterMask::first(64), CounterMask::ALL);
        assert_eq!(CounterMask::first(1000), CounterMask::ALL);
        assert_eq!(CounterMask::one(64), CounterMask::NONE);
        assert!(!CounterMask::ALL.contains(64));
        assert_eq!(CounterMask::NONE.last(), None);
    }

    proptest! {
        #[test]
        fn mask_is_the_set_of_its_counters(bits: u64, skip in 0usize..70) {
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
