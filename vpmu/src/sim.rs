//! Counting events without a host: a guest's work is a number of calls. For tests, fuzzing and benchmarks.

use crate::events::{Backing, EventRequest};
use crate::index::{CounterIndex, MAX_COUNTERS, counters_in};
use crate::source::{CounterEvents, CounterTimes};

#[derive(Clone, Copy, Debug, Default)]
struct SimEvent {
    request: Option<EventRequest>,
    count: u64,
    /// Counts left to the armed overflow.
    armed: Option<u64>,
}

/// Events of which each counts every tick while it is enabled.
#[derive(Clone, Debug)]
pub struct SimEvents {
    events: [SimEvent; MAX_COUNTERS],
    running: u64,
    notified: u64,
    /// Calls that a real backing would turn into system calls, for tests of what a pass costs.
    pub calls: u64,
    /// Answers a request; by default everything is counted by hardware.
    pub backing_of: fn(&EventRequest) -> Backing,
}

impl Default for SimEvents {
    fn default() -> Self {
        Self {
            events: [SimEvent::default(); MAX_COUNTERS],
            running: 0,
            notified: 0,
            calls: 0,
            backing_of: |_| Backing::Hardware,
        }
    }
}

impl SimEvents {
    /// Lets the guest run for at most `ticks`, up to and including the first tick at which an armed overflow comes.
    /// Returns how many ticks passed.
    pub fn run(&mut self, ticks: u64) -> u64 {
        let passed = counters_in(self.running)
            .filter_map(|counter| self.events[counter.slot()].armed)
            .fold(ticks, u64::min);
        for counter in counters_in(self.running) {
            let event = &mut self.events[counter.slot()];
            event.count = event.count.wrapping_add(passed);
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

    /// Lets the guest run for `ticks` on end; overflows on the way are notified late.
    pub fn run_through(&mut self, ticks: u64) {
        let mut left = ticks;
        while left > 0 {
            left -= self.run(left);
        }
    }

    /// Counters whose armed overflow came and was not taken yet.
    pub fn take_notified(&mut self) -> impl Iterator<Item = CounterIndex> + use<> {
        counters_in(std::mem::take(&mut self.notified))
    }

    /// What the counter's event counts, `None` while it has no event.
    pub fn request(&self, counter: CounterIndex) -> Option<EventRequest> {
        self.events[counter.slot()].request
    }

    /// Whether the counter's event is counting.
    pub fn is_running(&self, counter: CounterIndex) -> bool {
        self.running & counter.mask() != 0
    }
}

impl CounterEvents for SimEvents {
    fn program(&mut self, counter: CounterIndex, request: Option<&EventRequest>) -> Backing {
        self.calls += 1;
        self.running &= !counter.mask();
        self.events[counter.slot()] = SimEvent {
            request: request.copied(),
            ..SimEvent::default()
        };
        request.map_or(Backing::None, self.backing_of)
    }

    fn enable(&mut self, counter: CounterIndex, overflow_in: Option<u64>) -> bool {
        self.calls += 1;
        self.events[counter.slot()].armed = overflow_in;
        self.running |= counter.mask();
        true
    }

    fn disable(&mut self, counter: CounterIndex) {
        self.calls += 1;
        self.events[counter.slot()].armed = None;
        self.running &= !counter.mask();
    }

    fn count(&mut self, counter: CounterIndex) -> u64 {
        self.calls += 1;
        self.events[counter.slot()].count
    }

    fn arm(&mut self, counter: CounterIndex, overflow_in: u64) {
        self.calls += 1;
        self.events[counter.slot()].armed = Some(overflow_in);
    }

    fn times(&mut self, counter: CounterIndex) -> CounterTimes {
        let count = self.events[counter.slot()].count;
        CounterTimes {
            time_enabled_ns: count,
            time_running_ns: count,
        }
    }
}
