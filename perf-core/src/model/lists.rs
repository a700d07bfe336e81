//! Lists of events that are on, by what there is to look at.

use crate::model::keys::EventKey;

/// Which list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum List {
    /// It overflows.
    Armed,
    /// It is throttled until the next tick.
    Throttled,
    /// Its period follows a frequency.
    Frequency,
}

/// The lists of a context: keys of events, in no order that means anything.
#[derive(Debug, Default)]
pub(crate) struct Lists([Vec<EventKey>; 3]);

/// Where an event stands in each list.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Places([Option<usize>; 3]);

impl Lists {
    pub fn of(&self, list: List) -> &[EventKey] {
        &self.0[list as usize]
    }

    pub fn keys(&mut self, list: List) -> &mut Vec<EventKey> {
        &mut self.0[list as usize]
    }

    /// Makes room for `events` events in each list, so that none has to grow on a hot path.
    pub fn reserve(&mut self, events: usize) {
        for list in &mut self.0 {
            list.reserve(events.saturating_sub(list.len()));
        }
    }
}

impl Places {
    /// Where it stands in `list`.
    pub fn of(&mut self, list: List) -> &mut Option<usize> {
        &mut self.0[list as usize]
    }
}
