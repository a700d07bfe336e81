//! Arithmetic on counters narrower than 64 bits. All additions to counter values in this crate use
//! this module.

/// Counter width, 32 to 63 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterWidth(u8);

/// Result of adding counts to the value of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterAdvance {
    /// New value of the counter, truncated to its width.
    pub value: u64,
    /// Number of overflows that the addition caused.
    pub overflows: u64,
}

impl CounterWidth {
    /// 48 bits, the counter width of current processors.
    pub const W48: Self = Self(48);

    /// Creates a width of `bits`, or returns `None` if `bits` is not between 32 and 63. Below 32
    /// bits, the sign extension of a legacy write is undefined.
    #[expect(clippy::cast_possible_truncation, reason = "at most 63")]
    pub const fn new(bits: u32) -> Option<Self> {
        if bits >= 32 && bits <= 63 {
            Some(Self(bits as u8))
        } else {
            None
        }
    }

    /// Returns the width of the counter, in bits.
    pub const fn bits(self) -> u32 {
        self.0 as u32
    }

    /// Returns a mask of all bits of the counter's value.
    pub const fn mask(self) -> u64 {
        (1 << self.0) - 1
    }

    /// Truncates `value` to the counter width.
    pub const fn truncate(self, value: u64) -> u64 {
        value & self.mask()
    }

    /// Returns the value that a legacy 32-bit counter write stores: bits 31:0 of `value`,
    /// sign-extended to the width.
    #[expect(clippy::cast_possible_truncation, reason = "bits 31:0 are what is stored")]
    pub const fn sign_extend_32(self, value: u64) -> u64 {
        self.truncate(((value as u32).cast_signed() as i64).cast_unsigned())
    }

    /// Returns the number of further counts until a counter with `value` overflows, which is
    /// between 1 and 2^width.
    pub const fn until_overflow(self, value: u64) -> u64 {
        (1 << self.0) - self.truncate(value)
    }

    /// Adds `counts` counts to the counter value `value`.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "truncated to the width; and of two 64-bit numbers' sum the carry is what is above it"
    )]
    pub const fn advance(self, value: u64, counts: u64) -> CounterAdvance {
        let sum = self.truncate(value) as u128 + counts as u128;
        CounterAdvance {
            value: self.truncate(sum as u64),
            overflows: (sum >> self.0) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn width() -> impl Strategy<Value = CounterWidth> {
        (32u32..=63).prop_map(|bits| CounterWidth::new(bits).unwrap())
    }

    proptest! {
        #[test]
        fn overflow_occurs_at_until_overflow(w in width(), value: u64) {
            let left = w.until_overflow(value);
            prop_assert_eq!(w.advance(value, left - 1).overflows, 0);
            prop_assert_eq!(w.advance(value, left), CounterAdvance { value: 0, overflows: 1 });
        }

        #[test]
        fn split_advance_equals_single_advance(w in width(), value: u64, a in 0u64..1 << 62, b in 0u64..1 << 62) {
            let first = w.advance(value, a);
            let second = w.advance(first.value, b);
            let at_once = w.advance(value, a + b);
            prop_assert_eq!(second.value, at_once.value);
            prop_assert_eq!(first.overflows + second.overflows, at_once.overflows);
        }

        #[test]
        fn legacy_write_is_sign_extended_from_bit_31(w in width(), value: u64) {
            let stored = w.sign_extend_32(value);
            prop_assert_eq!(stored as u32, value as u32);
            prop_assert_eq!(stored & !w.mask(), 0);
            let high = stored >> 31;
            prop_assert!(high == 0 || high == w.mask() >> 31);
        }

        #[test]
        fn advance_handles_maximum_count(w in width(), value: u64) {
            let a = w.advance(value, u64::MAX);
            prop_assert!(a.value <= w.mask());
            prop_assert!(a.overflows >= 1);
        }
    }

    #[test]
    fn widths_outside_32_to_63_are_rejected() {
        assert_eq!(CounterWidth::new(31), None);
        assert_eq!(CounterWidth::new(64), None);
        assert_eq!(CounterWidth::new(48), Some(CounterWidth::W48));
    }
}
