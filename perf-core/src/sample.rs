//! Sampling arithmetic: periods, frequencies, throttling and event limits.

use crate::attr::Attr;

/// An overflow report for the VMM, sent when an event with a cookie reaches its armed overflow
/// point.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OverflowReport {
    /// Cookie that the event was opened with.
    pub cookie: u64,
    /// Number of overflows since the last report, at least 1.
    pub times: u32,
}

/// Result of [`Sampling::count_down`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct LimitCount {
    pub counted: u32,
    pub last: bool,
}

/// Current time, as clock time and as number of ticks of the context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TickTime {
    pub ns: u64,
    pub tick: u64,
}

/// Overflow rate of an event.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SamplingRate {
    /// Number of counts between two overflows.
    pub period: u64,
    /// Target number of overflows per second, or 0 for a fixed period.
    pub freq: u64,
}

/// Sampling state of an event.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sampling {
    /// Current period. 0 for a counting event, which can still be armed once with
    /// [`Sampling::set_left`].
    pub period: u64,
    /// Target number of overflows per second, or 0 for a fixed period.
    pub freq: u64,
    /// `true` if the event counts nanoseconds. Its frequency then determines a fixed period.
    is_clock: bool,
    /// Number of counts until the next overflow. Valid while the driver event is off.
    left: u64,
    /// Count at which the next overflow is due. Valid while the driver event is on, and always for
    /// a software event raised by the VMM.
    next_at: u64,
    /// Count at which the most recent overflow was due.
    due: u64,
    /// Count up to which overflows have been accounted to samples.
    covered: u64,
    /// Number of overflows that have not been serviced yet.
    pub pending: u32,
    /// Number of interrupts since `window_ns`, used for throttling. Overflows that are noticed
    /// together count as one interrupt.
    interrupts: u64,
    /// Start of the interval that `interrupts` covers. The interval starts with the first interrupt
    /// after a tick. Without ticks, it lasts at most one tick length.
    window_ns: u64,
    /// Tick number at `window_ns`.
    window_tick: u64,
    /// Tick at which the frequency was last adjusted or the event was last scheduled in.
    pub seen_tick: u64,
    /// Number of overflows since the last tick, compared with the target frequency.
    overflows: u64,
    /// `true` if overflows are suppressed until the next tick.
    pub throttled: bool,
    /// Number of overflows until the event disables itself, or 0 for no limit.
    pub limit: u64,
    freq_count: u64,
    freq_overflows: u64,
    freq_stamp_ns: u64,
    /// `true` if an explicit overflow point was set. The event then overflows even if `period` is
    /// 0.
    armed: bool,
}

impl Sampling {
    pub fn new(attr: &Attr) -> Self {
        let freq = if attr.freq { attr.sample_period } else { 0 };
        let is_clock = attr.freq && attr.is_host_clock();
        let period = match attr.sample_period {
            hz if is_clock => period_of_ns(hz),
            _ if attr.freq => u64::from(freq != 0),
            period => period,
        };
        Self {
            period,
            freq,
            is_clock,
            left: period,
            next_at: period,
            ..Self::default()
        }
    }

    /// Adopts the current period and frequency of the family, for a child that has not counted yet.
    pub fn inherit_rate(&mut self, family: SamplingRate) {
        self.freq = family.freq;
        if family.period != 0 {
            self.period = family.period;
            self.restart(0);
        }
    }

    /// Returns the current period and frequency.
    pub fn rate(&self) -> SamplingRate {
        SamplingRate {
            period: self.period,
            freq: self.freq,
        }
    }

    /// Returns `true` if the period adapts to a target frequency.
    pub fn adapts(&self) -> bool {
        self.freq != 0 && !self.is_clock
    }

    /// Returns `true` if the event can overflow.
    pub fn is_on(&self) -> bool {
        self.period != 0 || self.armed
    }

    /// Returns the number of counts until overflow to arm the driver with when the event is
    /// scheduled in.
    pub fn overflow_in(&self) -> Option<u64> {
        (self.is_on() && !self.throttled).then_some(self.left.max(1))
    }

    /// Resumes at driver count `raw` when the event is scheduled in.
    pub fn arm_at(&mut self, raw: u64) {
        self.next_at = raw.wrapping_add(self.left.max(1));
    }

    /// Stops at driver count `raw` when the event is scheduled out or its overflow is disarmed.
    /// Elapsed periods become pending overflows.
    pub fn disarm_at(&mut self, raw: u64) {
        if !self.throttled {
            self.pending = self.pending.saturating_add(self.passed(raw));
            self.left = self.remaining(raw);
        }
    }

    /// Returns the number of overflow points at or below `raw`, and moves the next one beyond
    /// `raw`.
    ///
    /// The count is authoritative rather than the number of notifications, because notifications
    /// can be coalesced, late or duplicated.
    pub fn passed(&mut self, raw: u64) -> u32 {
        let over = raw.wrapping_sub(self.next_at);
        if !self.is_on() || over.cast_signed() < 0 {
            return 0;
        }
        if self.period == 0 {
            self.armed = false;
            self.due = self.next_at;
            return 1;
        }
        let more = over / self.period;
        self.due = self.next_at.wrapping_add(more * self.period);
        self.next_at = self.due.wrapping_add(self.period);
        u32::try_from(more + 1).unwrap_or(u32::MAX)
    }

    /// Returns `true` if [`Sampling::passed`] would find an overflow point at or below `raw`.
    pub fn is_due(&self, raw: u64) -> bool {
        self.is_on() && raw.wrapping_sub(self.next_at).cast_signed() >= 0
    }

    /// Delays the next overflow by `n` counts, for counts that cannot be sampled.
    pub fn skip(&mut self, n: u64) {
        self.next_at = self.next_at.wrapping_add(n);
    }

    /// Accounts the overflow `back` periods before the most recent one and returns the number of
    /// counts that its sample represents.
    ///
    /// This number covers all counts since the last accounted overflow, so the periods of all
    /// samples add up to the count even if the period has changed.
    pub fn account(&mut self, back: u64) -> u64 {
        let at = self.due.wrapping_sub(back);
        at.wrapping_sub(std::mem::replace(&mut self.covered, at))
    }

    /// Returns the number of counts from `raw` to the next overflow.
    pub fn remaining(&self, raw: u64) -> u64 {
        self.next_at.wrapping_sub(raw).max(1)
    }

    /// Sets the next overflow to `overflow_in` counts from now, with `raw` as the current driver
    /// count.
    pub fn set_left(&mut self, overflow_in: u64, raw: u64) {
        self.armed = true;
        self.left = overflow_in;
        self.next_at = raw.wrapping_add(overflow_in);
    }

    /// Changes the period, or the frequency of an event that has one. The period of a
    /// frequency-based event adapts later, except for a clock event, which changes its period
    /// immediately.
    pub fn set_rate(&mut self, value: u64) {
        if self.freq != 0 {
            self.freq = value;
            if self.is_clock {
                self.period = period_of_ns(value);
            }
        } else {
            self.period = value;
        }
    }

    /// Accounts one interrupt for `times` overflows. Returns `true` if the event must be throttled
    /// because it exceeded the limit of one tick interval.
    ///
    /// The interval is measured by the clock, because the VMM may deliver ticks late or not at all.
    pub fn interrupt(&mut self, times: u32, now: TickTime, tick_hz: u64, sample_rate_hz: u64) -> bool {
        self.overflows += u64::from(times);
        if self.throttled {
            return true;
        }
        let late = now.ns.saturating_sub(self.window_ns) >= 1_000_000_000 / tick_hz.max(1);
        if late || self.window_tick != now.tick {
            self.window_ns = now.ns;
            self.window_tick = now.tick;
            self.interrupts = 0;
        }
        self.interrupts += 1;
        self.interrupts.saturating_mul(tick_hz) > sample_rate_hz
    }

    /// Counts `times` overflows against the limit. Returns the number that the limit allowed and
    /// whether the limit is now exhausted.
    pub fn count_down(&mut self, times: u32) -> LimitCount {
        if self.limit == 0 {
            return LimitCount {
                counted: times,
                last: false,
            };
        }
        let counted = times.min(u32::try_from(self.limit).unwrap_or(u32::MAX));
        self.limit -= u64::from(counted);
        LimitCount {
            counted,
            last: self.limit == 0,
        }
    }

    /// Adjusts the period of a frequency-based event from the time since the last overflow, if this
    /// is less than one tick. All `times` overflows that were noticed together count, because
    /// otherwise a host that notices overflows slowly would never change its period.
    pub fn note_overflow_time(&mut self, times: u32, now_ns: u64, tick_ns: u64) {
        if !self.adapts() {
            return;
        }
        let since = now_ns.saturating_sub(self.freq_stamp_ns);
        self.freq_stamp_ns = now_ns;
        if since > 0 && since < tick_ns {
            let rate = u64::from(times) * 1_000_000_000 / since;
            self.period = adjusted_period(self.period, rate, self.freq);
        }
    }

    /// Adjusts the period of a frequency-based event from the overflows since its last adjustment,
    /// which may be several ticks ago, and clears their count. Returns `true` if there was no
    /// overflow.
    pub fn tick(&mut self, tick: u64, tick_hz: u64, sample_rate_hz: u64) -> bool {
        let ticks = tick.saturating_sub(std::mem::replace(&mut self.seen_tick, tick));
        if !self.adapts() || ticks == 0 {
            return false;
        }
        let mut overflows = std::mem::take(&mut self.overflows);
        if self.throttled {
            // The true number is unknown, but it exceeded the limit.
            let at_least = ticks.saturating_mul(2 * sample_rate_hz / tick_hz.max(1));
            overflows = overflows.max(at_least);
        }
        let (mut freq, mut windows) = (tick_hz, ticks);
        // At less than one overflow per tick, a window spans several ticks.
        if self.freq < tick_hz {
            self.freq_count = self.freq_count.saturating_add(self.freq.saturating_mul(ticks));
            self.freq_overflows += overflows;
            if self.freq_count < tick_hz {
                return false;
            }
            overflows = std::mem::take(&mut self.freq_overflows);
            (freq, windows) = (self.freq, self.freq_count / tick_hz);
            self.freq_count %= tick_hz;
        }
        let a_second = freq.saturating_mul(overflows) / windows;
        self.period = adjusted_period(self.period, a_second, self.freq);
        overflows == 0
    }

    /// Starts a new period at `raw`. The next overflow also accounts for the counts of the
    /// unfinished period.
    pub fn restart(&mut self, raw: u64) {
        self.left = self.period;
        self.next_at = raw.wrapping_add(self.period);
    }
}

/// Returns the period in nanoseconds of a clock event with frequency `hz`, or 0 if `hz` is 0.
fn period_of_ns(hz: u64) -> u64 {
    1_000_000_000u64.checked_div(hz).map_or(0, |ns| ns.max(1))
}

/// Returns the next period of an event that overflowed `events` times per second with `period` and
/// has target frequency `freq`. Moves an eighth of the way to the ideal period, which limits the
/// effect of a single outlier.
///
/// Rounding favors longer periods: an increase of 1 is applied immediately, and a period of up to
/// 14 above the ideal stays unchanged.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it was clamped to 1 and 2^63 - 1"
)]
pub(crate) fn adjusted_period(period: u64, events: u64, freq: u64) -> u64 {
    let ideal = u128::from(events) * u128::from(period) / u128::from(freq.max(1));
    let ideal = i128::try_from(ideal).unwrap_or(i128::MAX / 2);
    let delta = (ideal - i128::from(period) + 7) / 8;
    // The upper bound keeps the period below 2^63.
    let next = (i128::from(period) + delta).clamp(1, i128::from(i64::MAX));
    next as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attr::EventType;
    use proptest::prelude::*;

    #[test]
    fn clock_frequency_is_fixed_period() {
        let attr = |config, hz| Attr {
            freq: true,
            ..Attr::sampling(EventType::SOFTWARE, config, hz)
        };
        let mut clock = Sampling::new(&attr(1, 4000));
        assert_eq!((clock.period, clock.adapts()), (250_000, false));
        clock.note_overflow_time(1, 10, 1_000_000);
        clock.note_overflow_time(1, 20, 1_000_000);
        assert!(!clock.tick(1, 250, 100_000) && !clock.tick(2, 250, 100_000));
        assert_eq!(clock.rate().period, 250_000);
        clock.set_rate(1000);
        assert_eq!((clock.rate().period, clock.rate().freq), (1_000_000, 1000));
        assert!(!Sampling::new(&attr(0, 0)).is_on());
        let faults = Sampling::new(&attr(2, 4000));
        assert_eq!((faults.period, faults.adapts()), (1, true));
    }

    proptest! {
        #[test]
        fn p25_period_is_at_least_1_and_shrinks_by_at_most_an_eighth(period in 1u64..1 << 62, events: u64, freq in 1u64..1 << 20) {
            let next = adjusted_period(period, events, freq);
            prop_assert!(next >= 1);
            prop_assert!(next >= period - period.div_ceil(8));
        }

        #[test]
        fn p25_period_decays_to_14_without_events(period in 1u64..1 << 62) {
            let mut p = period;
            for _ in 0..1000 {
                p = adjusted_period(p, 0, 1000);
            }
            prop_assert_eq!(p, period.min(14));
        }

        #[test]
        fn p25_steady_rate_converges_near_ideal_period(rate in 1_000_000u64..4_000_000_000, freq in 1u64..10_000, start in 1u64..1 << 40) {
            let mut p = start;
            for _ in 0..2000 {
                // Counts arrive at `rate` per second, so there are `rate / period` overflows per
                // second.
                let next = adjusted_period(p, rate / p, freq);
                if next == p {
                    break;
                }
                p = next;
            }
            let settled = adjusted_period(p, rate / p, freq);
            let ideal = rate / freq;
            // The adjustment sees whole overflows per second only. A step of one is a fraction of
            // the period.
            let slack = 16 + 2 * ideal / (rate / ideal.max(1)).max(1) + p / freq.max(1);
            prop_assert!(settled.abs_diff(ideal) <= slack, "{settled} for {ideal}");
        }
    }

    #[test]
    fn rounding_favours_longer_periods() {
        assert_eq!(adjusted_period(100, 101, 100), 101);
        assert_eq!(adjusted_period(114, 100, 114), 114);
        assert_eq!(adjusted_period(1000, 1, 1_000_000), 876);
        assert_eq!(
            adjusted_period(u64::MAX >> 1, u64::MAX, 1),
            u64::MAX >> 1,
            "it saturates below 2^63"
        );
    }
}
