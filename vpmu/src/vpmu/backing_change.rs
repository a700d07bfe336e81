//! Determines for which counters a restore changes the backing (source of counts).

use super::Vpmu;
use crate::events::{CounterBacking, DecodedCounterEvent};
use crate::index::{CounterIndex, counters_in};
use crate::sources::CounterBackingSelector;

/// A guest-enabled counter for which a restore changes the backing (source of counts).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterBackingChange {
    /// Number of the counter.
    pub counter: CounterIndex,
    /// Event with which the guest has programmed the counter.
    pub event: DecodedCounterEvent,
    /// Preferred backing of the event before the restore.
    pub before: CounterBacking,
    /// Preferred backing of the event after the restore, or [`CounterBacking::None`] if the event
    /// is no longer counted.
    pub after: CounterBacking,
}

impl Vpmu {
    /// Returns the enabled counters whose preferred backing (source of counts) differs between the
    /// sources `before` and `after` a restore. Counters with an event that the filter denies are
    /// skipped.
    pub fn backing_changes<'a>(
        &'a self,
        before: &'a CounterBackingSelector,
        after: &'a CounterBackingSelector,
    ) -> impl Iterator<Item = CounterBackingChange> + 'a {
        counters_in(self.model.counters_mask()).filter_map(|counter| {
            let request = self.request(counter).filter(|_| self.is_enabled(counter))?;
            let backing = |sources: &CounterBackingSelector| {
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
