//! Maintenance of a context's lists of active events: those that can overflow, those that are
//! throttled and those with a target frequency. Adding and removing an event takes constant time.

use std::sync::atomic::Ordering;

use super::Context;
use crate::model::event::Source;
use crate::model::keys::EventKey;
use crate::model::lists::EventList;
use crate::model::state::{EventState, PendingTickWork};

impl Context {
    /// Adds an event to a list, unless the list already contains the event.
    pub fn add_to_list(&mut self, list: EventList, key: EventKey) {
        let keys = self.lists.keys(list);
        self.events[key].list_positions.of(list).get_or_insert_with(|| {
            keys.push(key);
            keys.len() - 1
        });
    }

    /// Removes an event from a list, if present. The last event of the list moves to the free
    /// position.
    pub fn remove_from_list(&mut self, list: EventList, key: EventKey) {
        let Some(at) = self.events[key].list_positions.of(list).take() else {
            return;
        };
        let keys = self.lists.keys(list);
        keys.swap_remove(at);
        if let Some(&moved) = keys.get(at) {
            *self.events[moved].list_positions.of(list) = Some(at);
        }
    }

    /// Adds an active event that can overflow to the list of armed events, to the list of throttled
    /// events if it is throttled, and to the list of frequencies if its period adapts to a
    /// frequency. Has no effect on any other event.
    pub fn add_to_lists(&mut self, key: EventKey) {
        let event = &mut self.events[key];
        if event.state != EventState::Active || !event.sampling.can_overflow() {
            return;
        }
        let (throttled, frequency) = (event.sampling.throttled, event.sampling.is_adaptive());
        // Keeps raised events in a separate list, because only drivers signal overflows, so
        // overflow servicing need not visit raised events.
        if matches!(event.source, Source::Driver(_)) {
            self.add_to_list(EventList::Armed, key);
            self.to_serve.store(true, Ordering::Release);
        } else {
            self.add_to_list(EventList::ArmedRaised, key);
        }
        if throttled {
            self.add_to_list(EventList::Throttled, key);
        }
        if frequency {
            self.add_to_list(EventList::Frequency, key);
        }
        if throttled || frequency {
            self.request_ticks(PendingTickWork::Work);
        }
    }

    /// Adds an event to the list of events with unserviced overflows.
    pub fn queue_pending(&mut self, key: EventKey) {
        if !self.pending.contains(&key) {
            self.pending.push(key);
        }
        self.to_serve.store(true, Ordering::Release);
    }

    /// Requests another search for overflows if a driver event is armed. The core detects driver
    /// overflows only by such a search.
    pub fn request_service_if_armed(&self) {
        if !self.lists.of(EventList::Armed).is_empty() {
            self.to_serve.store(true, Ordering::Release);
        }
    }

    /// Removes an event from all lists when it is scheduled out.
    pub fn remove_from_lists(&mut self, key: EventKey) {
        let armed = match self.events[key].source {
            Source::Driver(_) => EventList::Armed,
            Source::Raised(_) | Source::Family => EventList::ArmedRaised,
        };
        for list in [armed, EventList::Throttled, EventList::Frequency] {
            self.remove_from_list(list, key);
        }
    }

    /// Marks an event as throttled: its overflows are suppressed until the next tick at which it is
    /// active.
    pub fn mark_throttled(&mut self, key: EventKey) {
        self.events[key].sampling.throttled = true;
        if self.events[key].state == EventState::Active {
            self.add_to_list(EventList::Throttled, key);
            self.request_ticks(PendingTickWork::Work);
        }
    }
}
