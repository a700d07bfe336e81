//! Clocks and event times.
//!
//! Each event has a *time enabled* and a *time running*, in nanoseconds of its context time. The
//! event was on the PMU for the fraction running / enabled of its time enabled, so `count × enabled
//! / running` estimates the count of an event that was always on the PMU. `running == 0` means that
//! the event was not counted at all.
//!
//! The times are computed from a few timestamps, which change only when the event changes state. An
//! event that waits for a counter therefore needs no periodic updates.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A monotonic clock in nanoseconds. The core gets its clock from the configuration, so that tests
/// can control scheduling and times exactly.
pub trait Clock: Send + Sync {
    /// Returns the time since a fixed instant, in nanoseconds. The time never decreases, on any
    /// thread.
    fn now_ns(&self) -> u64;
}

/// The monotonic clock of the host, relative to the creation of the [`MonotonicClock`].
#[derive(Debug)]
pub struct MonotonicClock {
    origin: Instant,
}

impl MonotonicClock {
    /// Creates a clock whose time starts at 0 now.
    #[must_use]
    pub fn new() -> Self {
        Self {
            origin: Instant::now(),
        }
    }
}

impl Default for MonotonicClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for MonotonicClock {
    #[expect(clippy::cast_possible_truncation, reason = "2^64 ns are 584 years")]
    fn now_ns(&self) -> u64 {
        // 2^64 ns are 584 years, so the conversion does not truncate in practice.
        self.origin.elapsed().as_nanos() as u64
    }
}

/// A clock for tests, whose time advances only through [`ManualClock::advance`].
#[derive(Debug, Default)]
pub struct ManualClock {
    now_ns: AtomicU64,
}

impl ManualClock {
    /// Creates a clock whose time is 0.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Advances the clock by `ns` nanoseconds.
    pub fn advance(&self, ns: u64) {
        self.now_ns.fetch_add(ns, Ordering::Relaxed);
    }
}

impl Clock for ManualClock {
    fn now_ns(&self) -> u64 {
        self.now_ns.load(Ordering::Relaxed)
    }
}

/// Time enabled and time running of an event, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventTimeTotals {
    /// Time for which the event was enabled while its context was scheduled in, in nanoseconds.
    pub enabled_ns: u64,
    /// Time for which the event was on the PMU, in nanoseconds.
    pub running_ns: u64,
}

impl EventTimeTotals {
    pub(crate) fn add(&mut self, other: Self) {
        self.enabled_ns = self.enabled_ns.wrapping_add(other.enabled_ns);
        self.running_ns = self.running_ns.wrapping_add(other.running_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_add_up() {
        let times = |enabled_ns, running_ns| EventTimeTotals {
            enabled_ns,
            running_ns,
        };
        let mut sum = times(1, 2);
        sum.add(times(10, 20));
        assert_eq!(sum, times(11, 22));
    }

    #[test]
    fn manual_clock_advances_only_on_request() {
        let clock = ManualClock::new();
        assert_eq!(clock.now_ns(), 0);
        clock.advance(5);
        clock.advance(2);
        assert_eq!(clock.now_ns(), 7);
        let clock = MonotonicClock::new();
        let first = clock.now_ns();
        std::thread::sleep(std::time::Duration::from_millis(1));
        assert!(clock.now_ns() >= first + 1_000_000);
    }
}
