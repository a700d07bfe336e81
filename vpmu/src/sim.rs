//! Simulated counter events for tests, fuzzing and benchmarks. Guest execution is simulated by
//! explicit calls.

use crate::counter_events::{
    CounterEnableOutcome, CounterEventLoss, CounterEvents, CounterTimes, UnavailableReason,
};
use crate::events::{ArchEvent, CounterBacking, CounterEventRequest, DecodedCounterEvent};
use crate::index::{CounterIndex, MAX_COUNTERS, counters_in};

#[derive(Clone, Copy, Debug, Default)]
struct SimEvent {
    request: Option<CounterEventRequest>,
    count: u64,
    /// Number of further counts until the armed overflow; `None` if no overflow is armed.
    armed: Option<u64>,
    /// Tick at which the event lost its slot (simulated hardware counter).
    lost: Option<u64>,
    /// Number of ticks for which the event was enabled.
    ran: u64,
    /// `true` if the clock backing counts for the event. The clock also counts while no slot
    /// (simulated hardware counter) is available.
    on_clock: bool,
    clock_count: u64,
}

impl SimEvent {
    fn counted(&self) -> u64 {
        if self.on_clock {
            self.clock_count
        } else {
            self.count
        }
    }
}

/// Simulated events that each count once per tick while enabled.
#[derive(Clone, Debug)]
pub struct SimCounterEvents {
    events: [SimEvent; MAX_COUNTERS],
    running: u64,
    notified: u64,
    now: u64,
    /// `true` if an event has lost its slot and [`CounterEvents::may_have_lost`] has not yet
    /// reported this.
    unseen: bool,
    /// Number of slots for hardware events, or `None` for no limit. The counters with the highest
    /// numbers lose their slots first.
    slots: Option<usize>,
    /// Reason that is reported for an event without a slot (simulated hardware counter).
    pub lack: UnavailableReason,
    /// `true` if the clock backing counts for cycle events that have no slot.
    pub clock: bool,
    /// Number of method calls for which a real backing would execute system calls.
    pub calls: u64,
    /// Number of those method calls in `calls` that request a slot (simulated hardware counter).
    pub enables: u64,
    /// Function that selects the backing of a request. By default, every request has the hardware
    /// backing.
    pub backing_of: fn(&CounterEventRequest) -> CounterBacking,
}

impl Default for SimCounterEvents {
    fn default() -> Self {
        Self {
            events: [SimEvent::default(); MAX_COUNTERS],
            running: 0,
            notified: 0,
            now: 0,
            unseen: false,
            slots: None,
            lack: UnavailableReason::Busy,
            clock: false,
            calls: 0,
            enables: 0,
            backing_of: |_| CounterBacking::Hardware,
        }
    }
}

impl SimCounterEvents {
    /// Runs the guest for up to `ticks` ticks, but only until an armed overflow occurs. Returns the
    /// number of ticks run.
    pub fn run(&mut self, ticks: u64) -> u64 {
        let passed = counters_in(self.running)
            .filter_map(|counter| self.events[counter.slot()].armed)
            .fold(ticks, u64::min);
        self.now += passed;
        for counter in counters_in(self.running) {
            let event = &mut self.events[counter.slot()];
            event.ran += passed;
            let count = if event.on_clock {
                &mut event.clock_count
            } else {
                &mut event.count
            };
            *count = count.wrapping_add(passed);
            if let Some(left) = &mut event.armed {
                *left -= passed;
                if *left == 0 {
                    event.armed = None;
                    self.notified |= counter.mask();
                }
            }
        }
        passed
    }

    /// Advances the event time by `ticks` ticks while the guest does not run.
    pub fn wait(&mut self, ticks: u64) {
        self.now += ticks;
    }

    /// Runs the guest for `ticks` ticks without stopping at an overflow, so that overflow
    /// notifications are delivered late.
    pub fn run_through(&mut self, ticks: u64) {
        let mut left = ticks;
        while left > 0 {
            left -= self.run(left);
        }
    }

    /// Sets the number of slots for hardware events; `None` means no limit. If there are fewer
    /// slots than running events, the surplus events lose their slots immediately.
    pub fn set_slots(&mut self, slots: Option<usize>) {
        self.slots = slots;
        let on: Vec<CounterIndex> = counters_in(self.running)
            .filter(|counter| !self.events[counter.slot()].on_clock)
            .collect();
        for counter in on.into_iter().skip(slots.unwrap_or(MAX_COUNTERS)) {
            self.running &= !counter.mask();
            self.events[counter.slot()].lost = Some(self.now);
            self.unseen = true;
        }
    }

    /// Returns whether the clock backing counts for the counter `counter`.
    pub fn is_on_clock(&self, counter: CounterIndex) -> bool {
        self.is_running(counter) && self.events[counter.slot()].on_clock
    }

    /// Returns the counters whose armed overflow has occurred since the last call.
    pub fn take_notified(&mut self) -> impl Iterator<Item = CounterIndex> + use<> {
        counters_in(std::mem::take(&mut self.notified))
    }

    /// Returns the request that the counter is programmed with.
    pub fn request(&self, counter: CounterIndex) -> Option<CounterEventRequest> {
        self.events[counter.slot()].request
    }

    /// Returns whether the counter's event continues to count while the counter is paused.
    fn counts_on(&self, counter: CounterIndex) -> bool {
        let event = &self.events[counter.slot()];
        !event.on_clock
            && event
                .request
                .is_some_and(|request| (self.backing_of)(&request).counts_through_pauses())
    }

    /// Returns whether the counter's event is counting.
    pub fn is_running(&self, counter: CounterIndex) -> bool {
        self.running & counter.mask() != 0
    }
}

impl CounterEvents for SimCounterEvents {
    fn program(&mut self, counter: CounterIndex, request: Option<&CounterEventRequest>) -> CounterBacking {
        self.calls += 1;
        self.running &= !counter.mask();
        self.events[counter.slot()] = SimEvent {
            request: request.copied(),
            ..SimEvent::default()
        };
        request.map_or(CounterBacking::None, self.backing_of)
    }

    fn enable(&mut self, counter: CounterIndex, overflow_in: Option<u64>) -> (CounterEnableOutcome, u64) {
        self.calls += 1;
        self.enables += 1;
        let backing = self.events[counter.slot()]
            .request
            .map_or(CounterBacking::None, |request| (self.backing_of)(&request));
        let on = counters_in(self.running & !counter.mask())
            .filter(|other| !self.events[other.slot()].on_clock)
            .count();
        let fits = backing != CounterBacking::Hardware || self.slots.is_none_or(|slots| on < slots);
        let event = &mut self.events[counter.slot()];
        let falls_back = !fits
            && self.clock
            && event
                .request
                .is_some_and(|r| r.event == DecodedCounterEvent::Architectural(ArchEvent::CoreCycles));
        (event.on_clock, event.lost) = (falls_back, None);
        if !fits && !falls_back {
            event.armed = None;
            return (CounterEnableOutcome::Refused(self.lack), 0);
        }
        event.armed = overflow_in;
        self.running |= counter.mask();
        let count = event.counted();
        if falls_back {
            return (
                CounterEnableOutcome::Fallback(CounterBacking::Clock, self.lack),
                count,
            );
        }
        (CounterEnableOutcome::Counting(backing), count)
    }

    fn disable(&mut self, counter: CounterIndex) -> u64 {
        self.calls += 1;
        let event = &mut self.events[counter.slot()];
        (event.armed, event.lost) = (None, None);
        self.running &= !counter.mask();
        event.counted()
    }

    /// Pauses the counters in the mask `counters`. Hardware events continue to count, and all other
    /// events stop.
    fn pause(&mut self, counters: u64, each: &mut dyn FnMut(CounterIndex, u64)) {
        for counter in counters_in(counters) {
            self.calls += 1;
            if !self.counts_on(counter) {
                self.events[counter.slot()].armed = None;
                self.running &= !counter.mask();
            }
            each(counter, self.events[counter.slot()].counted());
        }
    }

    fn resume(&mut self, counters: u64, each: &mut dyn FnMut(CounterIndex, u64) -> Option<u64>) -> u64 {
        for counter in counters_in(counters) {
            self.calls += 1;
            let armed = each(counter, self.events[counter.slot()].counted());
            if !self.counts_on(counter) {
                self.events[counter.slot()].armed = armed;
                self.running |= counter.mask();
            }
        }
        0
    }

    fn count(&mut self, counter: CounterIndex) -> u64 {
        self.calls += 1;
        self.events[counter.slot()].counted()
    }

    fn arm(&mut self, counter: CounterIndex, overflow_in: u64) -> u64 {
        self.calls += 1;
        self.events[counter.slot()].armed = Some(overflow_in);
        self.events[counter.slot()].counted()
    }

    fn may_have_lost(&mut self) -> bool {
        std::mem::take(&mut self.unseen)
    }

    fn event_loss(&mut self, counter: CounterIndex) -> Option<CounterEventLoss> {
        let since_ns = self.events[counter.slot()].lost?;
        Some(CounterEventLoss {
            since_ns,
            cause: UnavailableReason::Taken,
        })
    }

    fn now_ns(&mut self) -> u64 {
        self.now
    }

    fn times(&mut self, counter: CounterIndex) -> CounterTimes {
        let ran = self.events[counter.slot()].ran;
        CounterTimes {
            time_enabled_ns: ran,
            time_running_ns: ran,
        }
    }
}
