//! Detection of counters whose event has lost its slot, and their uncounted time.

use super::Vpmu;
use crate::counter_events::CounterEvents;
use crate::index::counters_in;

impl Vpmu {
    /// Marks counters whose event has lost its slot as uncounted since the time of the loss.
    #[cold]
    pub(super) fn detect_losses(&mut self, events: &mut dyn CounterEvents) {
        for counter in counters_in(self.running | self.paused.counters) {
            let Some(loss) = events.event_loss(counter) else {
                continue;
            };
            if self.running & counter.mask() == 0 {
                self.end_pause(counter, events);
                continue;
            }
            self.stop(counter, events);
            let now_ns = events.now_ns();
            self.lost.begin(counter, loss.since_ns, now_ns);
            log::debug!("counter {counter}: {}", loss.cause);
            // Retries immediately, because another slot or a fallback backing may be available.
            self.dirty |= counter.mask();
        }
    }

    /// Returns the time in which at least one enabled counter was uncounted, in nanoseconds of the
    /// vCPU's event time.
    #[inline]
    pub fn uncounted_ns(&mut self, events: &mut dyn CounterEvents) -> u64 {
        self.lost.total_ns(|| events.now_ns())
    }

    /// Adds the last `duration_ns` nanoseconds to the uncounted time, because the number of events
    /// in this time is unknown.
    pub fn lose_time(&mut self, duration_ns: u64, events: &mut dyn CounterEvents) {
        let now_ns = events.now_ns();
        self.lost.add_interval(now_ns.saturating_sub(duration_ns), now_ns);
    }

    /// Returns whether any enabled counter is currently uncounted.
    pub fn has_uncounted(&self) -> bool {
        self.lost.any_uncounted()
    }

    /// Returns the number of times that a counter lost its slot or failed to get one when it was
    /// enabled.
    pub fn slot_losses(&self) -> u64 {
        self.lost.times()
    }

    /// Returns the time until [`Self::reconcile`] must be called to retry a counter that waits for
    /// a slot, in nanoseconds of event time, or `None` if no counter is waiting.
    #[inline]
    pub fn retry_in_ns(&self, events: &mut dyn CounterEvents) -> Option<u64> {
        let next_ns = self.lost.is_retrying().then(|| self.lost.next_try_ns())??;
        Some(next_ns.saturating_sub(events.now_ns()))
    }
}
