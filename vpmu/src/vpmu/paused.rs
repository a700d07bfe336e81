//! Paused counters: counters that the guest has stopped but whose event temporarily keeps its slot.
//!
//! On each interrupt and on each switch between tasks with events, guest drivers stop all counters,
//! access some of them, and restart them a few exits later. Such a stop only *pauses* the counters'
//! events, without rescheduling and without changing any event's state.
//!
//! Stopping and starting a host event takes three or four system calls. A paused host event
//! therefore continues to count. Its count is read when its counter stops and again when the
//! counter restarts, and the difference is ignored. The host event is only re-armed if the guest
//! has written the counter in the meantime. Events of other backings stop counting during a pause.
//!
//! A paused event occupies its slot, and its time enabled and time running continue to advance. A
//! pause must therefore end. It ends, and the event is stopped, [`PASSES`] reconcile passes after
//! the first of the current pauses began, when the armed overflow occurs, when the counter is
//! reprogrammed, or when another counter needs a slot.

use super::Vpmu;
use crate::counter_events::CounterEvents;
use crate::index::{CounterIndex, counters_in};

/// Number of reconcile passes after which a pause ends. Linux causes about ten exits per task
/// switch with four events, and two more for each additional event.
const PASSES: u32 = 64;
/// Divisor that determines by how much an overflow notification may be early. A host event also
/// counts during a pause, so its armed overflow occurs too early and kicks the vCPU unnecessarily.
/// Re-arming the event costs a system call, so it is done only when the counts during pauses exceed
/// the armed period divided by this number.
const MAX_EARLY_DIVISOR: u64 = 8;

impl Vpmu {
    /// Pauses the counters in the mask `counters` that the guest has stopped, and resumes those
    /// that it has restarted, if they need no other change. Returns the mask of the remaining
    /// counters.
    pub(super) fn pause_and_resume(&mut self, counters: u64, events: &mut dyn CounterEvents) -> u64 {
        let plain = counters & !self.stale & !self.lost.affected();
        let running = plain & self.running;
        let off = running & !self.enabled(running);
        if off != 0 {
            self.pause(off, events);
        }
        // Pausing detects overflows, which may have frozen other counters.
        let on = self.enabled(plain & self.paused.counters & !off);
        if on != 0 {
            self.resume_counters(on, events);
        }
        // The caller handles counters that the guest has written, which must be re-armed, and
        // counters that failed to resume, which must be started.
        counters & !off & !(on & self.running & !self.rearm)
    }

    /// Returns the mask of those counters in the mask `counters` that the guest has enabled.
    fn enabled(&self, counters: u64) -> u64 {
        let counters = counters & self.vendor.globally_enabled(&self.registers);
        counters_in(counters)
            .filter(|&counter| self.vendor.is_selected(&self.registers, counter))
            .fold(0, |mask, counter| mask | counter.mask())
    }

    /// Pauses the running counters in the mask `counters` and brings their values up to date (folds
    /// them). Only for counters whose events are unchanged and which the guest is likely to restart
    /// soon.
    pub(super) fn pause(&mut self, counters: u64, events: &mut dyn CounterEvents) {
        self.running &= !counters;
        self.misses_emulated &= !counters;
        // All pauses end together. Otherwise new pauses could extend old ones indefinitely.
        if self.paused.counters == 0 {
            self.paused.passes_left = PASSES;
        }
        self.paused.counters |= counters;
        events.pause(counters, &mut |counter, count| self.fold_to(counter, count));
    }

    /// Pauses a counter as [`Self::pause`] does, or stops it if its event has changed or a fallback
    /// backing counts for it.
    pub(super) fn pause_or_stop(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) {
        if (self.stale | self.lost.affected()) & counter.mask() != 0 {
            self.stop(counter, events);
        } else {
            self.pause(counter.mask(), events);
        }
    }

    /// Returns whether the counter is paused and still disabled. A reconcile pass can skip it.
    pub(super) fn stays_paused(&self, counter: CounterIndex) -> bool {
        self.paused.counters & counter.mask() != 0 && !self.is_enabled(counter)
    }

    /// Resumes the counter with its current event. Has no effect if the counter is not paused.
    #[inline]
    pub(super) fn resume(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) {
        if self.paused.counters & counter.mask() != 0 {
            self.resume_counters(counter.mask(), events);
        }
    }

    /// Resumes the paused counters in the mask `counters` with their current events.
    fn resume_counters(&mut self, counters: u64, events: &mut dyn CounterEvents) {
        self.paused.counters &= !counters;
        self.running |= counters;
        let rearmed = self.rearm_written(counters, events);
        if rearmed == counters {
            return;
        }
        let stopped = events.resume(counters & !rearmed, &mut |counter, count| {
            self.on_resume(counter, count)
        });
        for counter in counters_in(stopped) {
            self.running &= !counter.mask();
            self.misses_emulated &= !counter.mask();
            self.stop_paused(counter, events);
        }
    }

    /// Re-arms those of the resumed counters in the mask `counters` that the guest has written and
    /// whose events have counted through the pause. Returns their mask. Re-arming returns the
    /// count, so the event is not read twice.
    fn rearm_written(&mut self, counters: u64, events: &mut dyn CounterEvents) -> u64 {
        let mut rearmed = 0;
        for counter in counters_in(counters & self.rearm) {
            let held = &self.counters[counter.slot()];
            let counts_on = held
                .programmed
                .is_some_and(|(_, backing)| backing.counts_through_pauses());
            if !counts_on || !self.vendor.interrupts(&self.registers, counter) {
                continue;
            }
            let until_overflow = self.model.width().until_overflow(held.value);
            let count = events.arm(counter, until_overflow);
            self.on_resume(counter, count);
            self.counters[counter.slot()].armed_for(until_overflow);
            rearmed |= counter.mask();
        }
        self.rearm &= !rearmed;
        rearmed
    }

    /// Updates the state of a resumed counter whose event now has the count `count`. Counts during
    /// the pause are ignored. Returns the number of counts for which the event must be armed, or
    /// `None` if it is still armed or the counter does not interrupt on overflow.
    fn on_resume(&mut self, counter: CounterIndex, count: u64) -> Option<u64> {
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
        if super::misses_emulated(programmed) {
            self.misses_emulated |= mask;
        }
        if programmed.1.counts_through_pauses() {
            if held.left_out > held.armed / MAX_EARLY_DIVISOR {
                self.rearm |= mask;
            }
            return None;
        }
        held.armed_for(until_overflow);
        self.rearm &= !mask;
        interrupts.then_some(until_overflow)
    }

    /// Stops the event of a counter if the counter is paused.
    #[inline]
    pub(super) fn end_pause(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) {
        if self.paused.counters & counter.mask() != 0 {
            self.stop_paused(counter, events);
        }
    }

    #[cold]
    fn stop_paused(&mut self, counter: CounterIndex, events: &mut dyn CounterEvents) {
        self.paused.counters &= !counter.mask();
        self.rearm &= !counter.mask();
        self.counters[counter.slot()].base = events.disable(counter);
    }

    /// Stops the events of paused counters that the guest has not restarted, to free their slots
    /// for another counter.
    #[inline]
    pub(super) fn free_slots(&mut self, events: &mut dyn CounterEvents) {
        if self.paused.counters != 0 {
            self.stop_unneeded(events);
        }
    }

    #[cold]
    fn stop_unneeded(&mut self, events: &mut dyn CounterEvents) {
        for counter in counters_in(self.paused.counters) {
            if !matches!(self.target_event(counter), super::TargetEvent::Same) {
                self.end_pause(counter, events);
            }
        }
    }

    /// Counts one reconcile pass, and ends the current pauses after [`PASSES`] passes.
    #[inline]
    pub(super) fn count_pass(&mut self, events: &mut dyn CounterEvents) {
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
