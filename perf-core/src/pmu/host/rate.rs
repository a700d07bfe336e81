//! Limit on the overflow rate of the host's clock events.
//!
//! The kernel drives `cpu-clock` and `task-clock` by a timer and accepts periods as short as 10 µs.
//! If an interrupt and its signal take as long as that, as on a virtual machine with trapped
//! timers, the CPU does nothing else: the sampled thread makes no progress and cannot even be
//! killed. The overflow rate of all clock events of a thread or CPU together is therefore limited.
//! If the limit makes the timer expire after an overflow was due, the overflow is noticed at the
//! expiry, and its sample represents all counts up to then.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::opener::HostEventTarget;

/// Minimum period of `cpu-clock` and `task-clock`, in nanoseconds. Several clock events that
/// overflow on the same thread share the limit: with two events, the minimum period of each is
/// twice this value.
pub const MIN_CLOCK_PERIOD_NS: u64 = 100_000;

/// Number of armed clock events for each thread or CPU.
#[derive(Debug, Default)]
pub(super) struct ClockRates(Mutex<HashMap<HostEventTarget, Weak<AtomicU64>>>);

impl ClockRates {
    /// Registers a clock event that counts on `counted`. The event is not armed yet.
    pub(super) fn register(&self, counted: HostEventTarget) -> ClockRate {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let together = all.get(&counted).and_then(Weak::upgrade).unwrap_or_else(|| {
            all.retain(|_, together| together.strong_count() > 0);
            let together = Arc::default();
            all.insert(counted, Arc::downgrade(&together));
            together
        });
        ClockRate {
            together: Some(together),
            rings: false,
        }
    }
}

/// Registration of a clock event, armed or not, for the limit. Empty for other types of events.
#[derive(Debug, Default)]
pub(super) struct ClockRate {
    together: Option<Arc<AtomicU64>>,
    rings: bool,
}

impl ClockRate {
    /// Records that the event is armed.
    pub(super) fn begin(&mut self) {
        if let Some(together) = &self.together
            && !std::mem::replace(&mut self.rings, true)
        {
            together.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records that the event is disarmed.
    pub(super) fn end(&mut self) {
        if let Some(together) = &self.together
            && std::mem::take(&mut self.rings)
        {
            together.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Returns the period to program for a requested period of `asked`: at least the minimum for
    /// the number of armed clock events on the same thread or CPU.
    pub(super) fn period_for(&self, asked: u64) -> u64 {
        let Some(together) = &self.together else {
            return asked;
        };
        let together = together.load(Ordering::Relaxed).max(1);
        asked.max(MIN_CLOCK_PERIOD_NS.saturating_mul(together))
    }
}

impl Drop for ClockRate {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_of_one_thread_share_the_shortest_period() {
        let clocks = ClockRates::default();
        let of = |tid| clocks.register(HostEventTarget::Thread(tid));
        let (mut first, mut second, mut other) = (of(1), of(1), of(2));
        let shortest = |clock: &ClockRate| clock.period_for(1) / MIN_CLOCK_PERIOD_NS;
        assert_eq!(shortest(&first), 1, "none rings");
        first.begin();
        first.begin();
        other.begin();
        assert_eq!((shortest(&first), shortest(&other)), (1, 1));
        second.begin();
        assert_eq!((shortest(&first), shortest(&second), shortest(&other)), (2, 2, 1));
        assert_eq!(
            second.period_for(5 * MIN_CLOCK_PERIOD_NS),
            5 * MIN_CLOCK_PERIOD_NS
        );
        first.end();
        first.end();
        assert_eq!(shortest(&second), 1);
        drop(second);
        assert_eq!(first.together.as_ref().unwrap().load(Ordering::Relaxed), 0);
        assert_eq!(ClockRate::default().period_for(1), 1, "no clock");
        drop((first, other));
        drop(of(3));
        // Entries of threads without clock events are removed.
        assert_eq!(clocks.0.lock().unwrap().len(), 1);
    }
}
