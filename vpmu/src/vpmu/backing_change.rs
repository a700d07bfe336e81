//! Counters whose counts come from another backing after a restore.

use super::Vpmu;
use crate::events::{Backing, GuestEvent};
use crate::index::{CounterIndex, counters_in};
use crate::sources::EventSources;

/// A counter that the guest has enabled, and whose backing changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackingChange {
    /// Counter number.
    pub counter: CounterIndex,
    /// Event of the counter.
    pub event: GuestEvent,
    /// Preferred backing before.
    pub before: Backing,
    /// Preferred backing from now on, [`Backing::None`] if the event is not counted anymore.
    pub after: Backing,
}

impl Vpmu {
    /// Returns the enabled counters that the sources `before` and `after` count by different
    /// backings, as the filter allows.
    pub fn backing_changes<'a>(
        &'a self,
        before: &'a EventSources,
        after: &'a EventSources,
    ) -> impl Iterator<Item = BackingChange> + 'a {
        counters_in(self.model.counters_mask()).filter_map(|counter| {
            let request = self.request(counter).filter(|_| self.is_enabled(counter))?;
            let backing = |sources: &EventSources| {
                let source = sources.of_request(&request).next();
                source.map_or(Backing::None, |source| source.backing)
            };
            let change = BackingChange {
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
