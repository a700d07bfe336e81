//! Counters whose event has lost its place with the host, and how long they were not counted.

use super::Vpmu;
use crate::index::counters_in;
use crate::source::CounterEvents;

impl Vpmu {
    /// Counters whose event has lost its place are not counted since then.
    #[cold]
    pub(super) fn look_for_losses(&mut self, events: &mut dyn CounterEvents) {
        for counter in counters_in(self.running | self.paused.counters) {
            let Some(loss) = events.lost(counter) else {
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
            // It may have another place at once, or somebody else to count for it.
            self.dirty |= counter.mask();
        }
    }

    /// Time in which at least one counter that the guest has enabled was not counted, in ns of the vCPU's
    /// event time.
    #[inline]
    pub fn uncounted_ns(&mut self, events: &mut dyn CounterEvents) -> u64 {
        self.lost.total_ns(|| events.now_ns())
    }

    /// Whether some counter that the guest has enabled is not counted now.
    pub fn has_uncounted(&self) -> bool {
        self.lost.any_uncounted()
    }

    /// How often a counter lost its place, or was enabled and found none.
    pub fn places_lost(&self) -> u64 {
        self.lost.times()
    }

    /// In how many nanoseconds of event time [`Self::reconcile`] is wanted for a counter that waits for a
    /// place; `None` while none does.
    #[inline]
    pub fn retry_in_ns(&self, events: &mut dyn CounterEvents) -> Option<u64> {
        let next_ns = self.lost.is_retrying().then(|| self.lost.next_try_ns())??;
        Some(next_ns.saturating_sub(events.now_ns()))
    }
}
