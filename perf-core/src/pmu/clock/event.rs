//! An event of the `clock` driver.

use std::sync::Arc;

use super::alarm::AlarmSlot;
use super::cpl::{PrivilegeLevel, TICK_PERIOD_NS};
use super::vcpu::VcpuRunTimeClock;
use crate::pmu::clock::MIN_TIMER_NS;
use crate::pmu::{PmuError, PmuEvent};

/// Maximum timer duration while the VMM is too slow to re-enter the guest before its timer expires,
/// in nanoseconds.
const MAX_BACKOFF_NS: u64 = 10_000_000;

/// Minimum duration of a re-armed timer of an event that counts one privilege level, in
/// nanoseconds. The count of such an event changes only when the level is sampled, so an earlier
/// expiry would be useless.
const MIN_LEVEL_REARM_NS: u64 = TICK_PERIOD_NS / 8;

/// A timer is extended by at most its duration divided by this number, to compensate for time that
/// the guest does not receive.
const SLACK_DIVISOR: u64 = 16;

/// Recent shortfall of guest time: the part of a timer's duration that the guest did not receive
/// because the VMM ran instead.
///
/// A timer that expires early costs a second exit for the same overflow. The next timer is
/// therefore extended by slightly more than the recent shortfall. If an overflow is late as a
/// result, the extra counts are included in its sample and shorten the next period.
#[derive(Clone, Copy, Debug, Default)]
struct TimerSlack {
    ns: u64,
}

impl TimerSlack {
    /// Returns the duration of a timer that is likely to give the guest `need_ns` of run time.
    fn timer_duration(self, need_ns: u64) -> u64 {
        need_ns.saturating_add(self.ns.min(need_ns / SLACK_DIVISOR))
    }

    /// Records that a timer for `need_ns` expired when the guest still had to run for `rest_ns`.
    /// Ignores a shortfall above the maximum extension.
    fn record_early_expiry(&mut self, need_ns: u64, rest_ns: u64) {
        let short_ns = (self.timer_duration(need_ns) - need_ns).saturating_add(rest_ns);
        if short_ns <= need_ns / SLACK_DIVISOR {
            self.ns = short_ns + short_ns / 4;
        }
    }

    /// Records that a timer expired `over_ns` after the guest had run long enough. An excess above
    /// a quarter of the slack gradually reduces the slack.
    fn record_late_expiry(&mut self, over_ns: u64) {
        if over_ns > self.ns / 4 {
            self.ns -= self.ns.div_ceil(64);
        }
    }
}

/// The part of the guest's run time that an event counts.
#[derive(Clone, Copy, Debug)]
pub(super) enum CountedTime {
    All,
    One(PrivilegeLevel),
    Nothing,
}

/// The unit of an event's count: cycles or nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(super) enum ClockUnit {
    Cycles,
    Nanoseconds,
}

#[derive(Debug)]
pub(super) struct ClockEvent {
    clock: Arc<VcpuRunTimeClock>,
    signal: Option<i32>,
    share: CountedTime,
    unit: ClockUnit,
    /// Reading of the clock at the start of the current span, in nanoseconds, or `None` while the
    /// event is stopped. A span lasts from a start of the event to its next stop.
    span_start_ns: Option<u64>,
    /// Total length of all finished spans, in nanoseconds.
    spans_ns: u64,
    /// `last_count`: count that was last returned. `last_ns`: total length of the spans for which
    /// that count was computed. Both are constant while the vCPU is outside the guest.
    last_count: u64,
    last_ns: u64,
    /// Count at which the next overflow is due, or `None` if the event is not armed.
    armed_at: Option<u64>,
    /// Count at which the alarm was last armed for this event.
    set_at: u64,
    /// Duration for which the alarm was last armed for this event, in nanoseconds of guest time.
    wait_ns: u64,
    /// Guest time from the arming of the alarm to the overflow, in nanoseconds, or `None` once the
    /// alarm has expired.
    need_ns: Option<u64>,
    /// Set if the guest made no progress during the last wait for the alarm.
    stalled: bool,
    slack: TimerSlack,
    /// Slot of this event in the vCPU's alarm, reserved when the event is first armed.
    alarm_slot: Option<AlarmSlot>,
}

impl ClockEvent {
    pub(super) fn new(
        clock: Arc<VcpuRunTimeClock>,
        signal: Option<i32>,
        share: CountedTime,
        unit: ClockUnit,
    ) -> Self {
        Self {
            clock,
            signal,
            share,
            unit,
            span_start_ns: None,
            spans_ns: 0,
            last_count: 0,
            last_ns: 0,
            armed_at: None,
            set_at: 0,
            wait_ns: MIN_TIMER_NS,
            need_ns: None,
            stalled: false,
            slack: TimerSlack::default(),
            alarm_slot: None,
        }
    }

    /// Returns the reading of the clock that this event counts, in nanoseconds.
    fn clock_ns(&self) -> u64 {
        match self.share {
            CountedTime::All => self.clock.guest_ns(),
            CountedTime::One(level) => self.clock.level_ns(level),
            CountedTime::Nothing => 0,
        }
    }

    /// Returns the count of the event after a total span length of `ns` nanoseconds.
    fn count_at(&mut self, ns: u64) -> u64 {
        // Keeps the previous count if the clock could read only the finished intervals, because
        // such a reading may be lower than the previous one.
        if ns > self.last_ns {
            self.last_ns = ns;
            self.last_count = match self.unit {
                ClockUnit::Cycles => cycles_of_ns(ns, self.clock.tsc_khz()),
                ClockUnit::Nanoseconds => ns,
            };
        }
        self.last_count
    }

    /// Returns the timer duration for the last `rest` counts after an early expiry.
    ///
    /// The timer also runs while the VMM works. A VMM that needs longer than the timer to re-enter
    /// the guest would be interrupted indefinitely before the guest makes progress. Therefore,
    /// after two consecutive waits with almost no guest time, the next wait is twice as long as the
    /// last one. The overflow is then late by at most that wait.
    ///
    /// A single wait with almost no guest time does not extend the next one. A wait with almost no
    /// guest time also occurs if the vCPU thread loses its CPU for longer than a period. Doubling
    /// the wait would then delay the overflow by a whole period, and the guest's driver drops a
    /// period that ends so late.
    fn wait_for_rest(&mut self, now: u64, rest: u64) -> u64 {
        let had_ns = self.ns_for(now - self.set_at);
        let least_ns = match self.share {
            CountedTime::One(_) => MIN_LEVEL_REARM_NS,
            CountedTime::All | CountedTime::Nothing => MIN_TIMER_NS,
        };
        let stalled = had_ns < self.wait_ns / 8;
        let stalled_before = std::mem::replace(&mut self.stalled, stalled);
        let at_least_ns = if stalled && stalled_before {
            (self.wait_ns * 2).clamp(least_ns, MAX_BACKOFF_NS)
        } else {
            least_ns
        };
        self.ns_for(rest).max(at_least_ns)
    }

    /// Arms the alarm for the time when the guest has run for `wait_ns`. `now` is the current
    /// count.
    fn wait(&mut self, now: u64, wait_ns: u64) -> Result<(), PmuError> {
        let wait_ns = wait_ns.max(MIN_TIMER_NS);
        if let Some(place) = self.alarm_slot {
            self.clock
                .arm_alarm(place, wait_ns)
                .map_err(|source| PmuError::Os {
                    what: "setting the vCPU's overflow timer",
                    source,
                })?;
        }
        self.set_at = now;
        self.wait_ns = wait_ns;
        Ok(())
    }

    /// Disarms the vCPU's alarm for this event.
    fn disarm(&mut self) {
        self.armed_at = None;
        if let Some(place) = self.alarm_slot {
            self.clock.disarm_alarm(place);
        }
    }

    fn ns_for(&self, counts: u64) -> u64 {
        match self.unit {
            ClockUnit::Cycles => ns_for_cycles(counts, self.clock.tsc_khz()),
            ClockUnit::Nanoseconds => counts,
        }
    }
}

impl PmuEvent for ClockEvent {
    fn start(&mut self, overflow_in: Option<u64>) -> Result<(), PmuError> {
        if self.span_start_ns.is_none() {
            match self.share {
                CountedTime::All => self.clock.add_user(),
                CountedTime::One(_) => {
                    self.clock
                        .start_levels(self.signal)
                        .map_err(|source| PmuError::Os {
                            what: "starting the privilege level ticks",
                            source,
                        })?;
                }
                CountedTime::Nothing => {}
            }
            self.span_start_ns = Some(self.clock_ns());
        }
        let armed = match overflow_in {
            Some(n) => self.arm(n),
            None => {
                self.disarm();
                Ok(())
            }
        };
        if armed.is_err() {
            self.stop();
        }
        armed
    }

    fn stop(&mut self) {
        let Some(start) = self.span_start_ns.take() else {
            return;
        };
        self.spans_ns += self.clock_ns().saturating_sub(start);
        match self.share {
            CountedTime::All => self.clock.remove_user(),
            CountedTime::One(_) => self.clock.stop_levels(),
            CountedTime::Nothing => {}
        }
        self.disarm();
    }

    fn read(&mut self) -> u64 {
        let span = self
            .span_start_ns
            .map_or(0, |start| self.clock_ns().saturating_sub(start));
        self.count_at(self.spans_ns + span)
    }

    fn arm(&mut self, overflow_in: u64) -> Result<(), PmuError> {
        let now = self.read();
        self.rearm(now, overflow_in)
    }

    /// Combines [`PmuEvent::take_overflows`] and [`PmuEvent::read`]. Both results belong to the
    /// same count, because the guest does not run between the two steps.
    fn overflowed(&mut self) -> Option<u64> {
        (self.take_overflows() > 0).then_some(self.last_count)
    }

    fn forget_overflows(&mut self) {}

    fn rearm(&mut self, count: u64, overflow_in: u64) -> Result<(), PmuError> {
        let Some(signal) = self.signal else {
            return Err(PmuError::Unsupported(
                "the clock driver was made without an overflow signal",
            ));
        };
        // An event that excludes both privilege levels never overflows and needs no alarm.
        if self.alarm_slot.is_none() && !matches!(self.share, CountedTime::Nothing) {
            let place = self.clock.join_alarm(signal).map_err(|source| PmuError::Os {
                what: "making the vCPU's overflow timer",
                source,
            })?;
            self.alarm_slot = Some(place);
        }
        let need_ns = self.ns_for(overflow_in);
        self.stalled = false;
        self.wait(count, self.slack.timer_duration(need_ns))?;
        self.need_ns = Some(need_ns);
        self.armed_at = Some(count.saturating_add(overflow_in.max(1)));
        Ok(())
    }

    fn take_overflows(&mut self) -> u32 {
        let Some(at) = self.armed_at else {
            return 0;
        };
        let now = self.read();
        if now >= at {
            self.disarm();
            if self.need_ns.take().is_some() {
                self.slack.record_late_expiry(self.ns_for(now - at));
            }
            return 1;
        }
        if !self
            .alarm_slot
            .is_some_and(|place| self.clock.alarm_expired_for(place))
        {
            // The signal was sent for another event.
            return 0;
        }
        if let Some(need_ns) = self.need_ns.take() {
            self.slack.record_early_expiry(need_ns, self.ns_for(at - now));
        }
        let wait_ns = self.wait_for_rest(now, at - now);
        if let Err(e) = self.wait(now, wait_ns) {
            log::warn!(
                "cannot arm an overflow timer for the rest of its period: {}",
                crate::error_line(&e)
            );
        }
        0
    }
}

impl Drop for ClockEvent {
    fn drop(&mut self) {
        self.stop();
        if let Some(place) = self.alarm_slot.take() {
            self.clock.leave_alarm(place);
        }
    }
}

/// Returns the number of whole cycles in `ns` nanoseconds of a clock with frequency `khz`.
fn cycles_of_ns(ns: u64, khz: u32) -> u64 {
    saturate(u128::from(ns) * u128::from(khz) / 1_000_000)
}

/// Returns the time in nanoseconds in which a clock with frequency `khz` completes at least
/// `cycles` cycles.
fn ns_for_cycles(cycles: u64, khz: u32) -> u64 {
    saturate((u128::from(cycles) * 1_000_000).div_ceil(u128::from(khz.max(1))))
}

fn saturate(value: u128) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn event(counted: CountedTime) -> ClockEvent {
        let clock = Arc::new(VcpuRunTimeClock::for_current_thread(1_000_000));
        ClockEvent::new(clock, None, counted, ClockUnit::Nanoseconds)
    }

    proptest! {
        /// The time computed for n cycles is long enough for n cycles.
        #[test]
        fn time_for_n_cycles_contains_n_cycles(cycles in 0u64..1 << 48, khz in 1u32..6_000_000) {
            prop_assert!(cycles_of_ns(ns_for_cycles(cycles, khz), khz) >= cycles);
        }

        #[test]
        fn more_time_is_never_fewer_cycles(ns in 0u64..1 << 60, more in 0u64..1 << 40, khz in 0u32..6_000_000) {
            prop_assert!(cycles_of_ns(ns + more, khz) >= cycles_of_ns(ns, khz));
        }
    }

    /// If the guest occasionally receives less of a timer's duration than usual, the next timer is
    /// extended. The timer therefore expires early a few times rather than every time, and its
    /// duration never grows much.
    #[test]
    fn timer_is_extended_by_recent_shortfall() {
        const NEED_NS: u64 = 28_000_000;
        let early = |short_ns: &dyn Fn(u64) -> u64| {
            let mut slack = TimerSlack::default();
            (0..1000)
                .filter(|&turn| {
                    let short = short_ns(turn);
                    let added = slack.timer_duration(NEED_NS) - NEED_NS;
                    assert!(added <= NEED_NS / SLACK_DIVISOR);
                    let early = short > added;
                    if early {
                        slack.record_early_expiry(NEED_NS, short - added);
                    } else {
                        slack.record_late_expiry(added - short);
                    }
                    early
                })
                .count()
        };
        assert_eq!(early(&|_| 0), 0);
        assert_eq!(early(&|_| 700_000), 1);
        assert!((1..100).contains(&early(&|turn| 700_000 * (turn % 2))));
        // A shortfall of the whole duration is too large to predict. The timer is not extended, and
        // each expiry is early.
        assert_eq!(early(&|_| NEED_NS), 1000);
        // A shortfall that no longer occurs does not extend the timer indefinitely.
        assert!(early(&|turn| if turn < 100 { 700_000 } else { 0 }) < 10);
    }

    /// The timer of an event that counts a single privilege level does not expire before the next
    /// level sample, because the count does not change before that sample.
    #[test]
    fn single_level_event_is_not_rearmed_before_next_sample() {
        let mut one = event(CountedTime::One(PrivilegeLevel::User));
        let mut all = event(CountedTime::All);
        let rings = |event: &mut ClockEvent| {
            let mut waited_ns = 0;
            (0..)
                .take_while(|_| {
                    let before_ns = waited_ns;
                    event.wait_ns = event.wait_for_rest(0, 1);
                    waited_ns += event.wait_ns;
                    before_ns < TICK_PERIOD_NS
                })
                .count()
        };
        assert_eq!((rings(&mut one), rings(&mut all)), (4, 7));
    }

    /// Returns the delays of the overflows of a guest with a sampling period of `period_ns`, in
    /// guest time. Each element of `turns` contains the time for which the vCPU's thread has a CPU
    /// and the time for which it then waits for a CPU, in nanoseconds.
    fn lateness(period_ns: u64, turns: &[(u64, u64)]) -> Vec<u64> {
        let mut event = event(CountedTime::All);
        let (mut wall_ns, mut guest_ns, mut late) = (0, 0, Vec::new());
        let (mut due_ns, mut expires_ns) = (period_ns, period_ns);
        event.wait(guest_ns, period_ns).unwrap();
        for &(run_ns, off_ns) in turns {
            let end_ns = wall_ns + run_ns;
            while expires_ns < end_ns {
                // Handles a timer that expired while another thread had the CPU as soon as the vCPU
                // thread runs again.
                guest_ns += expires_ns.saturating_sub(wall_ns);
                wall_ns = wall_ns.max(expires_ns);
                let wait_ns = if guest_ns >= due_ns {
                    late.push(guest_ns - due_ns);
                    // Same as Linux's `x86_perf_event_set_period`.
                    due_ns = if guest_ns - due_ns < period_ns {
                        due_ns
                    } else {
                        guest_ns
                    } + period_ns;
                    event.stalled = false;
                    due_ns - guest_ns
                } else {
                    event.wait_for_rest(guest_ns, due_ns - guest_ns)
                };
                event.wait(guest_ns, wait_ns).unwrap();
                expires_ns = wall_ns + event.wait_ns;
            }
            guest_ns += end_ns - wall_ns;
            wall_ns = end_ns + off_ns;
        }
        late
    }

    proptest! {
        /// On a shared CPU, the guest may make no progress during a timer's wait, because another
        /// thread runs. Overflows are on time nevertheless, so the guest receives a sample for each
        /// period.
        #[test]
        fn overflows_are_on_time_on_shared_cpu(
            period_ns in 200_000u64..20_000_000,
            turns in prop::collection::vec((256u64..3_000, 0u64..20_000), 1..100),
        ) {
            let part = |n| period_ns / 1_000 * n;
            let turns: Vec<_> = turns.iter().map(|&(run, off)| (part(run), part(off))).collect();
            let latest = lateness(period_ns, &turns).into_iter().max();
            prop_assert!(latest.is_none_or(|ns| ns <= MIN_TIMER_NS), "{latest:?} ns late");
        }
    }

    /// If the VMM needs longer than the timer to re-enter the guest, the waits grow until the guest
    /// makes progress.
    #[test]
    fn waits_grow_without_guest_progress() {
        let mut event = event(CountedTime::All);
        event.wait(0, 1_000_000).unwrap();
        let waits = [(); 6].map(|()| {
            let wait_ns = event.wait_for_rest(0, 1_000_000);
            event.wait(0, wait_ns).unwrap();
            wait_ns / 1_000_000
        });
        assert_eq!(waits, [1, 2, 4, 8, 10, 10]);
        // The wait is not extended after the guest has made progress.
        assert_eq!(event.wait_for_rest(2_000_000, 300_000), 300_000);
    }

    #[test]
    fn waits_respect_minimum_duration() {
        let mut event = event(CountedTime::All);
        for (asked, set) in [(0, 10_000), (1, 10_000), (9_999, 10_000), (10_001, 10_001)] {
            event.wait(0, asked).unwrap();
            assert_eq!(event.wait_ns, set, "{asked} ns");
        }
    }
}
