//! Lists of the active events that overflow servicing or a tick must visit.

use crate::model::keys::EventKey;

/// Identifies one of the event lists of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventList {
    /// Driver events that can overflow.
    Armed,
    /// Events that are throttled until the next tick.
    Throttled,
    /// Events whose periods adapt to a frequency.
    Frequency,
    /// Events that can overflow and that count software events raised by the VMM.
    ArmedRaised,
}

/// The event lists of a context. Each list is an unordered list of event keys.
#[derive(Debug, Default)]
pub(crate) struct EventLists([Vec<EventKey>; 4]);

/// Positions of one event in the event lists of its context.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ListPositions([Option<usize>; 4]);

impl EventLists {
    pub fn of(&self, list: EventList) -> &[EventKey] {
        &self.0[list as usize]
    }

    pub fn keys(&mut self, list: EventList) -> &mut Vec<EventKey> {
        &mut self.0[list as usize]
    }

    /// Reserves capacity for `events` events in each list, so that adding an event does not
    /// allocate.
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
