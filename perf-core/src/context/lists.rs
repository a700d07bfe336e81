//! Lists of events that are on, by what there is to look at: overflows whenever a signal was seen, throttles
//! and frequencies at each tick. Entering and leaving a list costs the same however long it is.

use std::sync::atomic::Ordering;

use super::Context;
use crate::model::event::Source;
use crate::model::keys::EventKey;
use crate::model::lists::List;
use crate::model::state::State;

impl Context {
    /// Puts an event into a list, once.
    pub fn enlist(&mut self, list: List, key: EventKey) {
        let keys = self.lists.keys(list);
        self.events[key].places.of(list).get_or_insert_with(|| {
            keys.push(key);
            keys.len() - 1
        });
    }

    /// Takes an event out of a list, if it is there. The last one takes its place.
    pub fn unlist(&mut self, list: List, key: EventKey) {
        let Some(at) = self.events[key].places.of(list).take() else {
            return;
        };
        let keys = self.lists.keys(list);
        keys.swap_remove(at);
        if let Some(&moved) = keys.get(at) {
            *self.events[moved].places.of(list) = Some(at);
        }
    }

    /// Puts an event that is on into the lists it belongs to.
    pub fn enlist_active(&mut self, key: EventKey) {
        let event = &mut self.events[key];
        if event.state != State::Active || !event.sampling.is_on() {
            return;
        }
        event.sampling.seen_tick = self.ticks;
        let (throttled, frequency) = (event.sampling.throttled, event.sampling.adapts());
        let notifies = matches!(event.source, Source::Driver(_));
        self.enlist(List::Armed, key);
        if notifies {
            self.to_serve.store(true, Ordering::Release);
        }
        if throttled {
            self.enlist(List::Throttled, key);
        }
        if frequency {
            self.enlist(List::Frequency, key);
        }
    }

    /// Puts an event by whose overflows passed and were not served.
    pub fn put_by(&mut self, key: EventKey) {
        if !self.pending.contains(&key) {
            self.pending.push(key);
        }
        self.to_serve.store(true, Ordering::Release);
    }

    /// The overflows of drivers' events that are on are noticed by looking.
    pub fn look_again_if_armed(&self) {
        let armed = self.lists.of(List::Armed).iter();
        if armed
            .map(|key| &self.events[*key])
            .any(|event| matches!(event.source, Source::Driver(_)))
        {
            self.to_serve.store(true, Ordering::Release);
        }
    }

    /// Takes an event that goes off out of all lists.
    pub fn unlist_all(&mut self, key: EventKey) {
        for list in [List::Armed, List::Throttled, List::Frequency] {
            self.unlist(list, key);
        }
    }

    /// The event's overflows are switched off until the next tick that finds it on.
    pub fn mark_throttled(&mut self, key: EventKey) {
        self.events[key].sampling.throttled = true;
        if self.events[key].state == State::Active {
            self.enlist(List::Throttled, key);
        }
    }
}
