//! Counters that the guest has stopped, whose event of the host's counts on for a while.
//!
//! A guest's driver stops all counters before it looks at some, and starts them again a few exits later: at
//! each of its interrupts, and at each switch between two tasks that have events. To stop and start an event
//! of the host's takes three or four system calls. Such an event is only read when its counter stops, and
//! read again when it starts: what it counted between is left out. The host has to be told of a counter that
//! the guest wrote meanwhile, and of no other.
//!
//! An event that counts on holds a place among the host's counters. So a pause ends, and the event is
//! stopped, [`PASSES`] passes after the first of those that pause now began, when its armed overflow comes,
//! when its counter is to count something else, and as soon as another counter wants a place.

use super::Vpmu;
use crate::events::Backing;
use crate::index::{CounterIndex, counters_in};
use crate::source::CounterEvents;

/// Passes after which a pause ends. Linux makes some ten exits at a switch with four events, and two more for
/// each further one.
const PASSES: u32 = 64;
/// What an event counts in pauses lets its armed overflow come early, which costs a kick. Up to this part of
/// the way to the overflow that is let be, for arming anew costs a system call.
const EARLY_PART: u64 = 8;

impl Vpmu {
    /// Stops a running counter, with its value brought up to date. What is to be counted has not changed, so
    /// that the guest may well go on soon.
    pub(super) fn halt(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) {
        let programmed = self.counters[counter.slot()].programmed;
        if self.stale & counter.mask() != 0
            || programmed.is_none_or(|(_, backing)| backing != Backing::Hardware)
        {
            self.stop(counter, events);
            return;
        }
        let count = events.count(counter);
        self.fold_to(counter, count);
        self.running &= !counter.mask();
        self.misses_exits &= !counter.mask();
        // All pauses end together: one that others prolonged would have no end.
        if self.paused.counters == 0 {
            self.paused.passes_left = PASSES;
        }
        self.paused.counters |= counter.mask();
    }

    /// Ends the pause of a counter, if it has one, because it counts again what it counted before.
    #[inline]
    pub(super) fn resume(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) {
        if self.paused.counters & counter.mask() != 0 {
            self.go_on(counter, events);
        }
    }

    #[inline(never)]
    fn go_on(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) {
        let count = events.count(counter);
        let held = &mut self.counters[counter.slot()];
        held.left_out += count.saturating_sub(held.base);
        held.base = count;
        let early = held.left_out > held.armed / EARLY_PART;
        let misses_exits = held.programmed.is_some_and(super::misses_exits);
        let mask = counter.mask();
        self.paused.counters &= !mask;
        self.running |= mask;
        if misses_exits {
            self.misses_exits |= mask;
        }
        if early {
            self.rearm |= mask;
        }
    }

    /// Ends the pause of a counter, if it has one, by stopping its event.
    #[inline]
    pub(super) fn end_pause(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) {
        if self.paused.counters & counter.mask() != 0 {
            self.stay_stopped(counter, events);
        }
    }

    #[cold]
    fn stay_stopped(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) {
        self.paused.counters &= !counter.mask();
        self.rearm &= !counter.mask();
        self.counters[counter.slot()].base = events.disable(counter);
    }

    /// Another counter is about to want a place: whoever does not go on now gives back what he holds.
    #[inline]
    pub(super) fn make_room(&mut self, events: &mut dyn CounterEvents) {
        if self.paused.counters != 0 {
            self.give_back(events);
        }
    }

    #[cold]
    fn give_back(&mut self, events: &mut dyn CounterEvents) {
        for counter in counters_in(self.paused.counters) {
            if !matches!(self.wanted(counter), super::Wanted::Same) {
                self.end_pause(counter, events);
            }
        }
    }

    /// A pass has gone by.
    #[inline]
    pub(super) fn passed(&mut self, events: &mut dyn CounterEvents) {
        if self.paused.counters == 0 {
            return;
        }
        self.paused.passes_left -= 1;
        if self.paused.passes_left == 0 {
            for counter in counters_in(self.paused.counters) {
                self.end_pause(counter, events);
            }
        }
    }
}
