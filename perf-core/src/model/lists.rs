//! Lists of active events that require processing at overflow signals or ticks.

use crate::model::keys::EventKey;

/// Identifier of an event list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventList {
    /// Driver events that overflow.
    Armed,
    /// Events that are throttled until the next tick.
    Throttled,
    /// Events with a period that follows a frequency.
    Frequency,
    /// Events that count software events raised by the VMM, and that overflow.
    ArmedRaised,
}

/// Event lists of a context, as unordered event keys.
#[derive(Debug, Default)]
pub(crate) struct EventLists([Vec<EventKey>; 4]);

/// Position of an event in each list.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ListPositions([Option<usize>; 4]);

impl EventLists {
    pub fn of(&self, list: EventList) -> &[EventKey] {
        &self.0[list as usize]
    }

    pub fn keys(&mut self, list: EventList) -> &mut Vec<EventKey> {
        &mut self.0[list as usize]
    }

    /// Reserves capacity for `events` events in each list, so that no list grows on a hot path.
    pub fn reserve(&mut self, events: usize) {
        for list in &mut self.0 {
            list.reserve(events.saturating_sub(list.len()));
        }
    }
}

impl ListPositions {
    /// Returns the position of the event in `list`.
    pub fn of(&mut self, list: EventList) -> &mut Option<usize> {
        &mut self.0[list as usize]
    }
}
