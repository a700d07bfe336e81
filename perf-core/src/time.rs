//! Time: the clock, a context's own time, and the two times of an event.
//!
//! Each event has a *time enabled* and a *time running*, in nanoseconds of its context's time. Their ratio
//! says which part of the enabled time the event was really on the PMU, so `count × enabled / running`
//! estimates what it would have counted had it always been on, and `running == 0` says that it was not
//! counted at all.
//!
//! The times follow from a few stamps that change only when the event itself changes. Nothing walks over the
//! events to keep them up to date: an event that waits for its turn costs nothing however long it waits.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A monotonic clock in nanoseconds. A parameter of the core, so that schedules and times can be tested to
/// the nanosecond.
pub trait Clock: Send + Sync {
    /// Nanoseconds since some fixed instant. Never decreases, on any thread.
    fn now_ns(&self) -> u64;
}

/// The host's monotonic clock.
#[derive(Debug)]
pub struct MonotonicClock {
    origin: Instant,
}

impl MonotonicClock {
    /// A clock that starts near zero.
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
        // 2^64 ns are 584 years: the truncation is never seen.
        self.origin.elapsed().as_nanos() as u64
    }
}

/// A clock that moves only when told to.
#[derive(Debug, Default)]
pub struct ManualClock {
    now_ns: AtomicU64,
}

impl ManualClock {
    /// A clock at zero.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Moves it forward by `ns` nanoseconds.
    pub fn advance(&self, ns: u64) {
        self.now_ns.fetch_add(ns, Ordering::Relaxed);
    }
}

impl Clock for ManualClock {
    fn now_ns(&self) -> u64 {
        self.now_ns.load(Ordering::Relaxed)
    }
}

/// Time enabled and time running, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// How long the event was enabled while its context was in.
    pub enabled_ns: u64,
    /// How long of that it was on the PMU.
    pub running_ns: u64,
}

impl Times {
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
        let times = |enabled_ns, running_ns| Times {
            enabled_ns,
            running_ns,
        };
        let mut sum = times(1, 2);
        sum.add(times(10, 20));
        assert_eq!(sum, times(11, 22));
    }

    #[test]
    fn a_manual_clock_moves_when_told_to_and_the_hosts_by_itself() {
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
