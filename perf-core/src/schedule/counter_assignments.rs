//! Assignment of events to counters: a bipartite matching that grows by one group at a time.
//!
//! An event takes a free suitable counter if there is one. Otherwise other events are moved along
//! the shortest augmenting path that ends at a free counter. If there is no such path, the matching
//! is maximum and the events cannot all be assigned. The search visits each counter at most once.
//!
//! Changes are minimized: an active event keeps its counter unless an event with precedence needs
//! it, and new events prefer counters that no active event holds.

use smallvec::SmallVec;

use crate::model::keys::{EventKey, Key, MuxGroupKey};
use crate::pmu::CounterMask;

/// A group member that needs a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CounterRequest {
    /// Key of the event in its context.
    pub event: EventKey,
    /// Counters that can hold the event.
    pub suitable: CounterMask,
    /// Counter to which the last plan with this group assigned the event, or `None`.
    pub previous_counter: Option<u8>,
}

/// An event with an assigned counter.
#[derive(Clone, Copy, Debug)]
struct AssignedEvent {
    fits: CounterMask,
    seat: u8,
    group: MuxGroupKey,
    /// Index of the event's [`CounterRequest`] in its group.
    want: usize,
}

/// A set of events that cannot all be active, because they compete for fewer counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CounterConflict {
    /// Number of events that fit only the counters for which they compete.
    pub events: usize,
    /// Number of counters for which the events compete.
    pub counters: usize,
}

/// A set of events, each with an assigned counter.
#[derive(Debug)]
pub(crate) struct CounterAssignments {
    counters: CounterMask,
    free: CounterMask,
    /// Counters that active events hold at present. New events use these counters only if no other
    /// free counter fits.
    kept: CounterMask,
    events: SmallVec<[AssignedEvent; 16]>,
    /// For each counter in use, the index in `events` of the event that is assigned to it.
    sits: [u8; CounterMask::MAX_COUNTERS],
}

impl CounterAssignments {
    pub fn new(counters: CounterMask) -> Self {
        Self {
            counters,
            free: counters,
            kept: CounterMask::NONE,
            events: SmallVec::new(),
            sits: [0; CounterMask::MAX_COUNTERS],
        }
    }

    /// Marks the counter of an active event, so that new events avoid the counter if possible.
    pub fn mark_active(&mut self, seat: Option<u8>) {
        if let Some(seat) = seat {
            self.kept = self.kept | CounterMask::one(seat.into());
        }
    }

    /// Returns the number of assigned events.
    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Returns the counters that can hold each event, in the order in which the events were
    /// assigned.
    pub fn suitable_counters(&self) -> impl Iterator<Item = CounterMask> + '_ {
        self.events.iter().map(|e| e.fits)
    }

    /// Returns each assignment: the group, the index of the request in the group, and the counter.
    pub fn seated(&self) -> impl Iterator<Item = (MuxGroupKey, usize, u8)> + '_ {
        self.events.iter().map(|e| (e.group, e.want, e.seat))
    }

    /// Returns a copy that contains only the first `len` events, with their current counters.
    pub fn truncated(&self, len: usize) -> Self {
        let mut base = Self::new(self.counters);
        for event in &self.events[..len] {
            base.push(*event);
        }
        base
    }

    /// Assigns a counter in `allowed` to each member of a group, or to none of them. With `on`, the
    /// group is active and keeps its counters if possible.
    pub fn take(
        &mut self,
        group: MuxGroupKey,
        wants: &[CounterRequest],
        allowed: CounterMask,
        on: bool,
    ) -> Result<(), CounterConflict> {
        let before: SmallVec<[u8; 16]> = match wants {
            // A group of at most one event need not be undone, because an event that cannot be
            // assigned moves no other event.
            [] | [_] => SmallVec::new(),
            _ => self.events.iter().map(|e| e.seat).collect(),
        };
        let len = self.events.len();
        for (want, w) in wants.iter().enumerate() {
            let fits = w.suitable & allowed & self.counters;
            let hint = w.previous_counter.filter(|_| on);
            match self.seat(fits, hint) {
                Ok(seat) => self.push(AssignedEvent {
                    fits,
                    seat,
                    group,
                    want,
                }),
                Err(conflict) => {
                    if want > 0 {
                        self.restore(len, &before);
                    }
                    return Err(conflict);
                }
            }
        }
        Ok(())
    }

    /// Assigns a counter in `fits` to one event.
    pub fn take_one(&mut self, fits: CounterMask) -> Result<(), CounterConflict> {
        let want = CounterRequest {
            event: EventKey::new(0),
            suitable: fits,
            previous_counter: None,
        };
        self.take(MuxGroupKey::new(0), &[want], CounterMask::ALL, false)
    }

    #[expect(clippy::cast_possible_truncation, reason = "there are at most 64 counters")]
    fn push(&mut self, event: AssignedEvent) {
        self.free = self.free.without(CounterMask::one(event.seat.into()));
        self.sits[usize::from(event.seat)] = self.events.len() as u8;
        self.events.push(event);
    }

    /// Removes all but the first `len` events, and moves these events back to the counters `seats`.
    #[expect(clippy::cast_possible_truncation, reason = "there are at most 64 counters")]
    fn restore(&mut self, len: usize, seats: &[u8]) {
        self.events.truncate(len);
        self.free = self.counters;
        for (n, (event, &seat)) in self.events.iter_mut().zip(seats).enumerate() {
            event.seat = seat;
            self.free = self.free.without(CounterMask::one(seat.into()));
            self.sits[usize::from(seat)] = n as u8;
        }
    }

    /// Returns a free counter in `fits`. Moves other events to free one, if necessary.
    fn seat(&mut self, fits: CounterMask, hint: Option<u8>) -> Result<u8, CounterConflict> {
        let open = fits & self.free;
        if let Some(seat) = hint.filter(|&seat| open.contains(seat.into())) {
            return Ok(seat);
        }
        match self.best(open) {
            Some(seat) => Ok(seat),
            None => self.make_room(fits),
        }
    }

    /// Returns the highest-numbered counter in `open` (free counters), preferring counters that no
    /// active event holds.
    #[expect(clippy::cast_possible_truncation, reason = "there are at most 64 counters")]
    fn best(&self, open: CounterMask) -> Option<u8> {
        let seat = open.without(self.kept).last().or(open.last())?;
        Some(seat as u8)
    }

    /// Frees a counter in `fits`, all of which are in use, by moving events along the shortest
    /// augmenting path.
    #[expect(clippy::cast_possible_truncation, reason = "there are at most 64 counters")]
    fn make_room(&mut self, fits: CounterMask) -> Result<u8, CounterConflict> {
        // For each counter that the search reaches outside `fits`: the counter whose event may move
        // there.
        let mut from = [0u8; CounterMask::MAX_COUNTERS];
        let mut reached = fits;
        let mut edge = fits;
        while !edge.is_empty() && !self.free.is_empty() {
            let mut next = CounterMask::NONE;
            for counter in edge.iter() {
                let event = &self.events[usize::from(self.sits[counter])];
                let more = event.fits.without(reached);
                for other in more.iter() {
                    from[other] = counter as u8;
                }
                if let Some(end) = self.best(more & self.free) {
                    return Ok(self.shift(fits, &from, end));
                }
                reached = reached | more;
                next = next | more;
            }
            edge = next;
        }
        Err(self.conflict(reached))
    }

    /// Moves each event of an augmenting path, which ends at the free counter `end`, to the next
    /// counter of the path. Returns the counter that becomes free.
    fn shift(&mut self, fits: CounterMask, from: &[u8; CounterMask::MAX_COUNTERS], end: u8) -> u8 {
        let mut to = end;
        self.free = self.free.without(CounterMask::one(end.into()));
        while !fits.contains(to.into()) {
            let seat = from[usize::from(to)];
            let event = self.sits[usize::from(seat)];
            self.events[usize::from(event)].seat = to;
            self.sits[usize::from(to)] = event;
            to = seat;
        }
        self.free = self.free | CounterMask::one(to.into());
        to
    }

    /// Returns the conflict of the events that compete for the counters in `reached`.
    fn conflict(&self, mut reached: CounterMask) -> CounterConflict {
        // Completes the set of competing counters, because the search ends early if no counter is
        // free.
        loop {
            let more = reached.iter().fold(reached, |all, counter| {
                all | self.events[usize::from(self.sits[counter])].fits
            });
            if more == reached {
                return CounterConflict {
                    events: reached.len() + 1,
                    counters: reached.len(),
                };
            }
            reached = more;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn want(bits: u64) -> CounterRequest {
        CounterRequest {
            event: EventKey::new(0),
            suitable: CounterMask::from_bits(bits),
            previous_counter: None,
        }
    }

    /// Returns `true` if each event can be assigned its own counter in `free`. `masks` contains the
    /// suitable counters of each event. Tries all assignments.
    fn possible(masks: &[u64], free: u64) -> bool {
        match masks.split_first() {
            None => true,
            Some((&mask, rest)) => CounterMask::from_bits(mask & free)
                .iter()
                .any(|c| possible(rest, free & !(1 << c))),
        }
    }

    fn seats_of(seats: &CounterAssignments) -> Vec<u8> {
        seats.events.iter().map(|e| e.seat).collect()
    }

    #[test]
    fn fixed_counter_is_preferred_over_general_purpose() {
        // Four general-purpose and three fixed-function counters. Cycles fit any general-purpose
        // counter and the second fixed-function counter.
        let mut seats = CounterAssignments::new(CounterMask::first(7));
        seats
            .take(MuxGroupKey::new(0), &[want(0b010_1111)], CounterMask::ALL, false)
            .unwrap();
        assert_eq!(seats_of(&seats), [5]);
        for _ in 0..4 {
            seats.take_one(CounterMask::first(4)).unwrap();
        }
        let refused = seats.take_one(CounterMask::first(4)).unwrap_err();
        assert_eq!(
            refused,
            CounterConflict {
                events: 5,
                counters: 4
            }
        );
    }

    #[test]
    fn shortest_augmenting_path_is_used() {
        let mut seats = CounterAssignments::new(CounterMask::first(4));
        // Counters 3, 2 and 1 hold events that also fit lower-numbered counters. The new event fits
        // only counter 3.
        for bits in [0b1111, 0b0110, 0b0011] {
            seats.take_one(CounterMask::from_bits(bits)).unwrap();
        }
        assert_eq!(seats_of(&seats), [3, 2, 1]);
        seats.take_one(CounterMask::from_bits(0b1000)).unwrap();
        assert_eq!(seats_of(&seats), [0, 2, 1, 3], "one moved, not three");
    }

    /// A new event takes the highest-numbered counter that no active event holds. It takes the
    /// counter of an active event only if there is no other.
    #[test]
    fn new_event_avoids_counters_of_active_events() {
        let mut seats = CounterAssignments::new(CounterMask::first(4));
        for seat in [Some(3), None, Some(2)] {
            seats.mark_active(seat);
        }
        for _ in 0..4 {
            seats.take_one(CounterMask::first(4)).unwrap();
        }
        assert_eq!(seats_of(&seats)[..2], [1, 0]);
    }

    proptest! {
        /// A group is accepted if and only if an exhaustive search finds an assignment for it and
        /// the previously accepted groups. Each event has its own suitable counter, a rejected
        /// group moves no event, and each reported conflict exists.
        #[test]
        fn groups_are_assigned_exactly_if_possible(
            counters in 0u64..128,
            groups in prop::collection::vec(prop::collection::vec(0u64..128, 0..4), 0..8),
        ) {
            let mut seats = CounterAssignments::new(CounterMask::from_bits(counters));
            let mut taken: Vec<u64> = Vec::new();
            for (key, group) in groups.iter().enumerate() {
                let wants: Vec<CounterRequest> = group.iter().map(|&bits| want(bits)).collect();
                let with: Vec<u64> = taken.iter().chain(group).copied().collect();
                let before = seats_of(&seats);
                match seats.take(MuxGroupKey::new(key), &wants, CounterMask::ALL, false) {
                    Ok(()) => {
                        prop_assert!(possible(&with, counters));
                        taken = with;
                    }
                    Err(conflict) => {
                        prop_assert!(!possible(&with, counters));
                        prop_assert_eq!(seats_of(&seats), before);
                        prop_assert!(conflict.events == conflict.counters + 1);
                    }
                }
                let mut used = 0;
                for (event, mask) in seats.events.iter().zip(&taken) {
                    let bit = 1u64 << event.seat;
                    prop_assert!(mask & counters & bit != 0 && used & bit == 0);
                    used |= bit;
                }
                prop_assert_eq!(seats.free.bits(), counters & !used);
            }
        }

        /// Active events keep their counters if they are assigned again, in any order, before new
        /// events.
        #[test]
        fn active_events_with_precedence_keep_counters(masks in prop::collection::vec(1u64..128, 1..7), new in prop::collection::vec(0u64..128, 0..4), swap: bool) {
            let mut seats = CounterAssignments::new(CounterMask::first(7));
            let mut on: Vec<CounterRequest> = Vec::new();
            for mask in masks {
                if seats.take_one(CounterMask::from_bits(mask)).is_ok() {
                    on.push(want(mask));
                }
            }
            for (w, seat) in on.iter_mut().zip(seats_of(&seats)) {
                w.previous_counter = Some(seat);
            }
            if swap {
                on.reverse();
            }
            let mut next = CounterAssignments::new(CounterMask::first(7));
            on.iter().for_each(|w| next.mark_active(w.previous_counter));
            for w in &on {
                prop_assert!(next.take(MuxGroupKey::new(0), &[*w], CounterMask::ALL, true).is_ok());
            }
            prop_assert_eq!(seats_of(&next), on.iter().map(|w| w.previous_counter.unwrap()).collect::<Vec<_>>());
            // A new event that finds a free counter or is rejected moves no other event.
            for mask in new {
                let free = !(next.free & CounterMask::from_bits(mask)).is_empty();
                let before = seats_of(&next);
                let taken = next.take_one(CounterMask::from_bits(mask)).is_ok();
                if free || !taken {
                    prop_assert_eq!(&seats_of(&next)[..before.len()], &before[..]);
                }
            }
        }
    }
}
