//! Counters for which a different backing (source of counts) counts after a restore.

use super::Vpmu;
use crate::events::{CounterBacking, GuestEvent};
use crate::index::{CounterIndex, counters_in};
use crate::sources::EventSources;

/// A guest-enabled counter for which a restore changes the backing (source of counts).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterBackingChange {
    /// Counter number.
    pub counter: CounterIndex,
    /// Event of the counter.
    pub event: GuestEvent,
    /// Preferred backing before.
    pub before: CounterBacking,
    /// Preferred backing after the change, or [`CounterBacking::None`] if the event is no longer
    /// counted.
    pub after: CounterBacking,
}

impl Vpmu {
    /// Returns the enabled counters for which the sources `after` provide another backing than the
    /// sources `before`. The event filter is taken into account.
    pub fn backing_changes<'a>(
        &'a self,
        before: &'a EventSources,
        after: &'a EventSources,
    ) -> impl Iterator<Item = CounterBackingChange> + 'a {
        counters_in(self.model.counters_mask()).filter_map(|counter| {
            let request = self.request(counter).filter(|_| self.is_enabled(counter))?;
            let backing = |sources: &EventSources| {
                let source = sources.of_request(&request).next();
                source.map_or(CounterBacking::None, |source| source.backing)
            };
            let change = CounterBackingChange {
                counter,
                event: request.event,
                before: backing(before),
                after: backing(after),
            };
            let changes = change.before != change.after && self.filter.allows(request.selection);
            changes.then_some(change)
        })
    }
}
