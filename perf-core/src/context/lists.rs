//! Lists of events that are on, by what there is to look at: overflows whenever a signal was seen, throttles
//! and frequencies at each tick. Entering and leaving a list costs the same however long it is.

use std::sync::atomic::Ordering;

use super::Context;
use crate::event::{Source, State};

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
pub(crate) struct Lists([Vec<usize>; 3]);

/// Where an event stands in each list.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Places([Option<usize>; 3]);

impl Lists {
    pub fn of(&self, list: List) -> &[usize] {
        &self.0[list as usize]
    }

    /// Makes room for `events` events in each list, so that none has to grow on a hot path.
    pub fn reserve(&mut self, events: usize) {
        for list in &mut self.0 {
            list.reserve(events.saturating_sub(list.len()));
        }
    }
}

impl Context {
    /// Puts an event into a list, once.
    pub fn enlist(&mut self, list: List, key: usize) {
        let keys = &mut self.lists.0[list as usize];
        self.events[key].places.0[list as usize].get_or_insert_with(|| {
            keys.push(key);
            keys.len() - 1
        });
    }

    /// Takes an event out of a list, if it is there. The last one takes its place.
    pub fn unlist(&mut self, list: List, key: usize) {
        let Some(at) = self.events[key].places.0[list as usize].take() else {
            return;
        };
        let keys = &mut self.lists.0[list as usize];
        keys.swap_remove(at);
        if let Some(&moved) = keys.get(at) {
            self.events[moved].places.0[list as usize] = Some(at);
        }
    }

    /// Puts an event that is on into the lists it belongs to.
    pub fn enlist_active(&mut self, key: usize) {
        let event = &mut self.events[key];
        if event.state != State::Active || !event.sampling.is_on() {
            return;
        }
        event.sampling.seen_tick = self.ticks;
        let (throttled, frequency) = (event.sampling.throttled, event.sampling.freq != 0);
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
    pub fn put_by(&mut self, key: usize) {
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
    pub fn unlist_all(&mut self, key: usize) {
        for list in [List::Armed, List::Throttled, List::Frequency] {
            self.unlist(list, key);
        }
    }

    /// The event's overflows are switched off until the next tick that finds it on.
    pub fn mark_throttled(&mut self, key: usize) {
        self.events[key].sampling.throttled = true;
        if self.events[key].state == State::Active {
            self.enlist(List::Throttled, key);
        }
    }
}
