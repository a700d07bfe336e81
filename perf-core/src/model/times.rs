//! Context time, and the event times derived from it.

use crate::model::state::EventState;
use crate::time::EventTimeTotals;

/// Time of a context, which advances only while the context is scheduled in.
///
/// For a vCPU context this is the time of the core clock between
/// [`crate::VcpuEventContext::sched_in`] and [`crate::VcpuEventContext::sched_out`]. The VM context
/// is always scheduled in. Context time includes periods in which the vCPU's thread waits for a CPU
/// or the guest is halted, if the core clock advances in these periods.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ContextClock {
    /// Context time at clock value `stamp_ns`, in nanoseconds.
    time_ns: u64,
    /// Clock value at which `time_ns` was last updated, in nanoseconds.
    stamp_ns: u64,
    active: bool,
}

impl ContextClock {
    pub fn is_active(&self) -> bool {
        self.active
    }

    /// Starts the context time when the context is scheduled in.
    pub fn start(&mut self, now_ns: u64) {
        self.stamp_ns = now_ns;
        self.active = true;
    }

    /// Stops the context time when the context is scheduled out.
    pub fn stop(&mut self, now_ns: u64) {
        self.time_ns = self.time_at(now_ns);
        self.stamp_ns = now_ns;
        self.active = false;
    }

    /// Returns the context time at clock value `now_ns`.
    ///
    /// The difference saturates at zero, because two threads may read the monotonic clock in one
    /// order and acquire the lock in the opposite order.
    pub fn time_at(&self, now_ns: u64) -> u64 {
        if self.active {
            // Also saturates at the end of the range, because a broken clock may return any value.
            self.time_ns.saturating_add(now_ns.saturating_sub(self.stamp_ns))
        } else {
            self.time_ns
        }
    }

    /// Advances the context time to clock value `now_ns` and returns it. Never decreases.
    pub fn advance(&mut self, now_ns: u64) -> u64 {
        if self.active {
            self.time_ns = self.time_at(now_ns);
            self.stamp_ns = self.stamp_ns.max(now_ns);
        }
        self.time_ns
    }
}

/// The values from which the time enabled and the time running of an event are computed.
///
/// While the event is off or in the error state, `total` contains its times. While the event is
/// inactive or active, its times follow from the timestamps, and `total` is a copy from the last
/// update. `stopped` is valid only while the event is inactive.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EventTimes {
    total: EventTimeTotals,
    enabled_stamp: u64,
    running_stamp: u64,
    stopped_stamp: u64,
}

impl EventTimes {
    /// Creates the times of an event that is added to a context at context time `time`.
    pub fn attach(time: u64) -> Self {
        Self {
            total: EventTimeTotals::default(),
            enabled_stamp: time,
            running_stamp: time,
            stopped_stamp: time,
        }
    }

    /// Enables the event at context time `time`, from which its times continue to advance.
    pub fn enable(&mut self, time: u64) {
        self.enabled_stamp = time.wrapping_sub(self.total.enabled_ns);
        self.running_stamp = time.wrapping_sub(self.total.running_ns);
        self.stopped_stamp = time;
    }

    /// Schedules the event in at a context time. The time since the event was scheduled out is not
    /// added to the time running.
    pub fn resume(&mut self, time: u64) {
        self.running_stamp = self
            .running_stamp
            .wrapping_add(time.wrapping_sub(self.stopped_stamp));
    }

    /// Schedules the event out at a context time.
    pub fn sched_out(&mut self, time: u64) {
        self.stopped_stamp = time;
    }

    /// Computes the times of the event. `leader` is the state of the group leader, because the
    /// times of a member do not advance while its leader is off.
    pub fn at(&self, state: EventState, leader: EventState, time: u64) -> EventTimeTotals {
        if state < EventState::Inactive || leader < EventState::Inactive {
            return self.total;
        }
        let end = if state == EventState::Inactive {
            self.stopped_stamp
        } else {
            time
        };
        EventTimeTotals {
            enabled_ns: time.wrapping_sub(self.enabled_stamp),
            running_ns: end.wrapping_sub(self.running_stamp),
        }
    }

    /// Stores the computed times in the accumulated totals. Call this method before the event or
    /// its leader becomes off or enters the error state.
    pub fn settle(&mut self, state: EventState, leader: EventState, time: u64) {
        self.total = self.at(state, leader, time);
    }

    /// Sets the accumulated times, in any state of the event. Adjusts the timestamps too, because
    /// the times of an enabled event are computed from them.
    pub fn set(&mut self, times: EventTimeTotals, time: u64) {
        self.total = times;
        self.enable(time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn context_time_stops_while_scheduled_out() {
        let mut clock = ContextClock::default();
        assert!(!clock.is_active());
        clock.start(100);
        assert!(clock.is_active());
        assert_eq!(clock.time_at(150), 50);
        clock.stop(150);
        assert!(!clock.is_active());
        assert_eq!(clock.time_at(1000), 50);
        clock.start(1000);
        assert_eq!(clock.advance(1010), 60);
        assert_eq!(clock.advance(1005), 60, "a late reader never takes time back");
        assert_eq!(clock.advance(1011), 61);
    }

    #[test]
    fn clock_at_end_of_range_does_not_overflow() {
        let mut clock = ContextClock::default();
        clock.start(1000);
        assert_eq!(clock.advance(2000), 1000);
        clock.stop(2000);
        clock.start(0);
        assert_eq!(clock.advance(u64::MAX), u64::MAX);
        assert_eq!(clock.advance(5), u64::MAX);
    }

    #[test]
    fn waiting_event_is_enabled_but_not_running() {
        let mut times = EventTimes::attach(10);
        let on = EventState::Inactive;
        assert_eq!(
            times.at(EventState::Inactive, on, 30),
            EventTimeTotals {
                enabled_ns: 20,
                running_ns: 0
            }
        );
        times.resume(30);
        assert_eq!(
            times.at(EventState::Active, on, 35),
            EventTimeTotals {
                enabled_ns: 25,
                running_ns: 5
            }
        );
        times.sched_out(40);
        assert_eq!(
            times.at(EventState::Inactive, on, 50),
            EventTimeTotals {
                enabled_ns: 40,
                running_ns: 10
            }
        );
        times.settle(EventState::Inactive, on, 50);
        assert_eq!(
            times.at(EventState::Off, on, 99),
            EventTimeTotals {
                enabled_ns: 40,
                running_ns: 10
            }
        );
        assert_eq!(
            times.at(EventState::Inactive, EventState::Off, 99),
            EventTimeTotals {
                enabled_ns: 40,
                running_ns: 10
            }
        );
        times.enable(100);
        assert_eq!(
            times.at(EventState::Inactive, on, 100),
            EventTimeTotals {
                enabled_ns: 40,
                running_ns: 10
            }
        );
        times.resume(105);
        assert_eq!(
            times.at(EventState::Active, on, 107),
            EventTimeTotals {
                enabled_ns: 47,
                running_ns: 12
            }
        );
    }

    proptest! {
        #[test]
        fn set_times_survive_recomputation(time in 0u64..1000, on in 0u64..500, later in 0u64..100, enabled in 500u64..900, running in 0u64..500) {
            let mut times = EventTimes::attach(0);
            times.resume(on.min(time));
            let new = EventTimeTotals { enabled_ns: enabled, running_ns: running };
            times.set(new, time);
            let at = |state| times.at(state, EventState::Inactive, time + later);
            prop_assert_eq!(at(EventState::Active), EventTimeTotals { enabled_ns: enabled + later, running_ns: running + later });
            prop_assert_eq!(at(EventState::Inactive), EventTimeTotals { enabled_ns: enabled + later, running_ns: running });
            prop_assert_eq!(at(EventState::Off), new);
        }
    }
}
