//! The atomics the ring's protocol is written over, so that a model checker can run the very same code.

use std::sync::atomic::{AtomicU64, Ordering};

/// A 64-bit atomic word. Implemented for [`AtomicU64`], and for loom's own under `cfg(loom)`.
pub trait Word: Send + Sync {
    /// A word holding `value`.
    fn new(value: u64) -> Self;
    /// Loads.
    fn load(&self, order: Ordering) -> u64;
    /// Stores.
    fn store(&self, value: u64, order: Ordering);
    /// Replaces `current` by `new` with `AcqRel`; an `Err` holds the value found (an `Acquire` load).
    fn swap_if(&self, current: u64, new: u64) -> Result<u64, u64>;
    /// Adds and returns the value before.
    fn fetch_add(&self, value: u64, order: Ordering) -> u64;
    /// Stores the maximum of itself and `value`, and returns the value before.
    fn fetch_max(&self, value: u64, order: Ordering) -> u64;
    /// Stores `value` and returns the value before.
    fn swap(&self, value: u64, order: Ordering) -> u64;
}

macro_rules! word {
    ($ty:ty) => {
        impl Word for $ty {
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
