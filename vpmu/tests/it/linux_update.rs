//! Tests of how Linux's AMD driver updates sampling events, and of the effect of a PMI between its
//! accesses.
//!
//! `Linux` follows the driver's order of register accesses for two events with different periods. A
//! count is the sum of differences between readings, each of which loads the last value, executes
//! RDPMC, and replaces the last value by compare-and-exchange. The handler restarts the period of
//! every counter that has passed zero. Between any two instructions the guest may run further and,
//! if the VMM allows it, take its PMI.

use proptest::prelude::*;
use vpmu::registers::*;

use crate::common::Guest;

const BITS: u32 = 48;
const MASK: u64 = (1 << BITS) - 1;

/// State of a sampling event in Linux's driver, like `hw_perf_event`.
#[derive(Clone, Copy, Debug, Default)]
struct SamplingEvent {
    period: i64,
    left: i64,
    previous: u64,
    count: u64,
    /// Largest difference between two successive readings of the event's counter.
    worst: u64,
}

struct Linux {
    guest: Guest,
    events: [SamplingEvent; 2],
    /// Numbers of ticks for which the guest runs between two instructions of the driver. Used in
    /// turn, again from the first one after the last one.
    turns: Vec<u64>,
    turn: usize,
    ran: u64,
    handling: bool,
}

impl Linux {
    fn new(periods: [i64; 2], turns: Vec<u64>) -> Self {
        let event = |period| SamplingEvent {
            period,
            ..SamplingEvent::default()
        };
        let mut linux = Self {
            guest: Guest::of("amd", None),
            events: periods.map(event),
            turns,
            turn: 0,
            ran: 0,
            handling: false,
        };
        for n in 0..2 {
            linux.set_period(n);
            linux.guest.write(PERF_CTL0 + 2 * n as u32, 0x53_0076);
        }
        linux
    }

    /// Runs the guest's program for the next number of ticks in `turns`, without taking a PMI.
    fn go_on(&mut self) {
        let ticks = self.turns[self.turn % self.turns.len()];
        self.turn += 1;
        self.guest.run(ticks);
        self.ran += ticks;
    }

    /// Takes a due PMI, unless the handler is already running.
    fn may_be_interrupted(&mut self) {
        if self.guest.vpmu.pmi_pending() && !self.handling {
            self.guest.vpmu.pmi_delivered(self.ran);
            self.handle();
        }
    }

    /// Updates the count of event `n`: loads the last value, executes RDPMC, and replaces the last
    /// value by compare-and-exchange. The VMM may deliver a PMI after the RDPMC if `behind` is
    /// `true`, otherwise before it.
    fn update(&mut self, n: usize, behind: bool) -> u64 {
        // Linux throttles an event that interrupts it on every attempt.
        for attempt in 0.. {
            let previous = self.events[n].previous;
            if attempt < 3 {
                self.go_on();
                if !behind {
                    self.may_be_interrupted();
                }
            }
            let now = self.guest.rdpmc(n as u32).unwrap();
            if behind && attempt < 3 {
                self.may_be_interrupted();
            }
            let event = &mut self.events[n];
            if event.previous != previous {
                continue;
            }
            event.previous = now;
            let delta = now.wrapping_sub(previous) & MASK;
            event.worst = event.worst.max(delta);
            event.count = event.count.wrapping_add(delta);
            event.left = event.left.wrapping_sub(delta as i64);
            return now;
        }
        unreachable!("an update that never ends")
    }

    fn set_period(&mut self, n: usize) {
        let event = &mut self.events[n];
        if event.left <= -event.period {
            event.left = event.period;
        } else if event.left <= 0 {
            event.left += event.period;
        }
        let start = (event.left.max(2) as u64).wrapping_neg() & MASK;
        event.previous = start;
        self.guest.write(PERF_CTR0 + 2 * n as u32, start);
    }

    fn handle(&mut self) {
        self.handling = true;
        for n in 0..2 {
            if self.update(n, false) >> (BITS - 1) == 0 {
                self.set_period(n);
            }
        }
        self.handling = false;
    }

    /// Reads both events repeatedly. Returns the largest difference between two successive readings
    /// of an event. See [`Self::update`] for `behind`.
    fn read_often(mut self, behind: bool) -> u64 {
        for _ in 0..50 {
            for n in 0..2 {
                self.update(n, behind);
            }
        }
        // The handler misses the counts between its read of the counter and the restart, so Linux's
        // count may be too low, but not too high.
        for event in &self.events {
            assert!(behind || event.count <= self.ran, "{event:?} of {}", self.ran);
        }
        self.events.iter().map(|event| event.worst).max().unwrap_or(0)
    }
}

proptest! {
    /// If no PMI is delivered between an RDPMC and the use of its value, Linux's count does not
    /// jump. The test includes periods that expire before the restart completes, and two counters
    /// that overflow in each other's handler.
    #[test]
    fn linux_count_is_stable_with_pmi_before_read(
        periods in [2i64..2_000, 2i64..2_000],
        turns in prop::collection::vec(1u64..3_000, 1..40),
    ) {
        let most = turns.iter().max().unwrap() * 40;
        let worst = Linux::new(periods, turns).read_often(false);
        prop_assert!(worst <= most.max(4_000), "a step of {worst}");
    }
}

/// If a PMI is delivered between the RDPMC and the use of its value, Linux's count jumps by 2^48. A
/// short period restarts at its initial value, so the compare-and-exchange succeeds. The VMM's
/// delivery order prevents this.
#[test]
fn linux_count_jumps_with_pmi_after_read() {
    let mut turns = vec![10; 1000];
    turns[..3].copy_from_slice(&[250, 1, 1]);
    let worst = Linux::new([100, 1 << 40], turns).read_often(true);
    assert!(worst > 1 << 47, "{worst}");
}
