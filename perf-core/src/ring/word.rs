//! The atomic operations that the ring's protocol uses, as a trait, so that a model checker can run
//! the same code.

use std::sync::atomic::{AtomicU64, Ordering};

/// A 64-bit atomic word. Implemented for [`AtomicU64`], and for loom's type under `cfg(loom)`.
pub trait AtomicWord: Send + Sync {
    /// Creates a word with value `value`.
    fn new(value: u64) -> Self;
    /// Returns the value.
    fn load(&self, order: Ordering) -> u64;
    /// Sets the value to `value`.
    fn store(&self, value: u64, order: Ordering);
    /// Replaces the value `current` with `new`, with `AcqRel` ordering. If the word has another
    /// value, returns that value as `Err`, loaded with `Acquire` ordering.
    fn swap_if(&self, current: u64, new: u64) -> Result<u64, u64>;
    /// Adds `value` to the word and returns the previous value.
    fn fetch_add(&self, value: u64, order: Ordering) -> u64;
    /// Stores the maximum of the current value and `value`, and returns the previous value.
    fn fetch_max(&self, value: u64, order: Ordering) -> u64;
    /// Sets the value to `value` and returns the previous value.
    fn swap(&self, value: u64, order: Ordering) -> u64;
}

macro_rules! word {
    ($ty:ty) => {
        impl AtomicWord for $ty {
            #[inline]
            fn new(value: u64) -> Self {
                <$ty>::new(value)
            }
            #[inline]
            fn load(&self, order: Ordering) -> u64 {
                self.load(order)
            }
            #[inline]
            fn store(&self, value: u64, order: Ordering) {
                self.store(value, order)
            }
            #[inline]
            fn swap_if(&self, current: u64, new: u64) -> Result<u64, u64> {
                self.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
            }
            #[inline]
            fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
                self.fetch_add(value, order)
            }
            #[inline]
            fn fetch_max(&self, value: u64, order: Ordering) -> u64 {
                self.fetch_max(value, order)
            }
            #[inline]
            fn swap(&self, value: u64, order: Ordering) -> u64 {
                self.swap(value, order)
            }
        }
    };
}

word!(AtomicU64);
#[cfg(loom)]
word!(loom::sync::atomic::AtomicU64);
