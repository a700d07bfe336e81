//! Counters that the guest has stopped, whose event keeps its place for a while.
//!
//! A guest's driver stops all counters before it looks at some, and starts them again a few exits later: at
//! each of its interrupts, and at each switch between two tasks that have events. Such a stop is a *pause* of
//! the counters' events, all of them together: nothing is planned anew, and no event changes its state.
//!
//! To stop and start an event of the host's takes three or four system calls. So it counts on, is only read
//! when its counter stops, and read again when it starts: what it counted between is left out. The host has
//! to be told of a counter that the guest wrote meanwhile, and of no other. Other events stop counting.
//!
//! An event in a pause holds its place, and its times go on. So the pause ends, and the event is stopped,
//! [`PASSES`] passes after the first of those that pause now began, when its armed overflow comes, when its
//! counter is to count something else, and as soon as another counter wants a place.

use super::Vpmu;
use crate::index::{CounterIndex, counters_in};
use crate::source::CounterEvents;

/// Passes after which a pause ends. Linux makes some ten exits at a switch with four events, and two more for
/// each further one.
const PASSES: u32 = 64;
/// What an event counts in pauses lets its armed overflow come early, which costs a kick. Up to this part of
/// the way to the overflow that is let be, for arming anew costs a system call.
const EARLY_PART: u64 = 8;

impl Vpmu {
    /// Stops and lets go on, all together, those of `counters` that ask for nothing else. Returns the others.
    pub(super) fn toggle(&mut self, counters: u64, events: &mut dyn CounterEvents) -> u64 {
        let plain = counters & !self.stale & !self.lost.concerned();
        let running = plain & self.running;
        let off = running & !self.enabled(running);
        if off != 0 {
            self.halt(off, events);
        }
        // What stopped may have overflowed, and that may have frozen the others.
        let on = self.enabled(plain & self.paused.counters & !off);
        if on != 0 {
            self.go_on(on, events);
        }
        // Those that count on are still to be armed, if the guest wrote them; those that could not go on, to
        // be started.
        counters & !off & !(on & self.running & !self.rearm)
    }

    /// Which of these the guest has enabled.
    fn enabled(&self, counters: u64) -> u64 {
        let counters = counters & self.vendor.globally_enabled(&self.registers);
        counters_in(counters)
            .filter(|&counter| self.vendor.is_selected(&self.registers, counter))
            .fold(0, |mask, counter| mask | counter.mask())
    }

    /// Stops running counters, with their values brought up to date. What is to be counted has not changed,
    /// so that the guest may well go on soon.
    pub(super) fn halt(&mut self, counters: u64, events: &mut dyn CounterEvents) {
        self.running &= !counters;
        self.misses_exits &= !counters;
        // All pauses end together: one that others prolonged would have no end.
        if self.paused.counters == 0 {
            self.paused.passes_left = PASSES;
        }
        self.paused.counters |= counters;
        events.pause(counters, &mut |counter, count| self.fold_to(counter, count));
    }

    /// [`Self::halt`] of one, unless it counts something else from now on, or somebody counts for it whom
    /// another is to follow.
    pub(super) fn halt_or_stop(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) {
        if (self.stale | self.lost.concerned()) & counter.mask() != 0 {
            self.stop(counter, events);
        } else {
            self.halt(counter.mask(), events);
        }
    }

    /// Whether the counter pauses and stays where it is: a pass has nothing to do for it.
    pub(super) fn rests(&self, counter: CounterIndex) -> bool {
        self.paused.counters & counter.mask() != 0 && !self.is_enabled(counter)
    }

    /// Ends the pause of a counter, if it has one, because it counts again what it counted before.
    #[inline]
    pub(super) fn resume(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) {
        if self.paused.counters & counter.mask() != 0 {
            self.go_on(counter.mask(), events);
        }
    }

    /// Ends the pause of counters that count again what they counted before.
    fn go_on(&mut self, counters: u64, events: &mut dyn CounterEvents) {
        self.paused.counters &= !counters;
        self.running |= counters;
        let stopped = events.go_on(counters, &mut |counter, count| self.goes_on(counter, count));
        for counter in counters_in(stopped) {
            self.running &= !counter.mask();
            self.misses_exits &= !counter.mask();
            self.stay_stopped(counter, events);
        }
    }

    /// The event of a counter that goes on has counted `count`. What to arm it with, if it has stopped.
    fn goes_on(&mut self, counter: CounterIndex, count: u64) -> Option<u64> {
        let mask = counter.mask();
        let interrupts = self.vendor.interrupts(&self.registers, counter);
        let until_overflow = self
            .model
            .width()
            .until_overflow(self.counters[counter.slot()].value);
        let held = &mut self.counters[counter.slot()];
        held.left_out += count.saturating_sub(held.base);
        held.base = count;
        let programmed = held.programmed?;
        if super::misses_exits(programmed) {
            self.misses_exits |= mask;
        }
        if programmed.1.counts_through_pauses() {
            if held.left_out > held.armed / EARLY_PART {
                self.rearm |= mask;
            }
            return None;
        }
        held.armed_for(until_overflow);
        self.rearm &= !mask;
        interrupts.then_some(until_overflow)
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
