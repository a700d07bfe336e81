//! Sampling: periods, frequencies, throttling and event limits, as plain arithmetic.

use crate::attr::Attr;

/// One overflow report for the VMM: an event that was opened with a cookie passed its armed point.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overflowed {
    /// The cookie it was opened with.
    pub cookie: u64,
    /// How many periods have passed since the last report; at least 1.
    pub times: u32,
}

/// See [`Sampling::count_down`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct CountDown {
    pub counted: u32,
    pub last: bool,
}

/// Now: by the clock, and by how many ticks the context has had.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub ns: u64,
    pub tick: u64,
}

/// How often an event overflows.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rate {
    /// Counts from one overflow to the next.
    pub period: u64,
    /// Wanted overflows per second, which the period follows; 0: the period is fixed.
    pub freq: u64,
}

/// An event's sampling state.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sampling {
    /// Period in force; 0: a counting event that may still be armed once by hand.
    pub period: u64,
    /// Wanted overflows per second; 0: fixed period.
    pub freq: u64,
    /// It counts nanoseconds, so its frequency is a period. It does not adapt.
    is_clock: bool,
    /// Counts until the next overflow, while a driver's event is off.
    left: u64,
    /// The count at which the next overflow is due: while a driver's event is on, and always for a raised
    /// one.
    next_at: u64,
    /// The count at which the last overflow that passed was due.
    due: u64,
    /// The count up to which samples stand for it: where the last overflow that was accounted was due.
    covered: u64,
    /// Overflows that passed and were not served yet.
    pub pending: u32,
    /// Interrupts since `window_ns`: one for all overflows that were noticed together. What throttles.
    interrupts: u64,
    /// When the time began for which `interrupts` counts: with the first one after a tick, or, where ticks
    /// do not come, a tick's length ago at most.
    window_ns: u64,
    /// The tick after which that was.
    window_tick: u64,
    /// The tick that last looked at its frequency, or after which it went on.
    pub seen_tick: u64,
    /// Overflows since the last tick. What a frequency is held to.
    overflows: u64,
    /// No more overflows until the next tick.
    pub throttled: bool,
    /// Overflows until it disables itself; 0: no limit.
    pub limit: u64,
    freq_count: u64,
    freq_overflows: u64,
    freq_stamp_ns: u64,
    /// Armed by hand: overflows although `period` may be 0.
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

    /// A child that has not counted yet goes on with the period and the frequency its family has now.
    pub fn inherit_rate(&mut self, family: Rate) {
        self.freq = family.freq;
        if family.period != 0 {
            self.period = family.period;
            self.restart(0);
        }
    }

    /// The period and the frequency in force.
    pub fn rate(&self) -> Rate {
        Rate {
            period: self.period,
            freq: self.freq,
        }
    }

    /// Whether its period follows a frequency.
    pub fn adapts(&self) -> bool {
        self.freq != 0 && !self.is_clock
    }

    /// Whether it overflows at all.
    pub fn is_on(&self) -> bool {
        self.period != 0 || self.armed
    }

    /// What to arm the driver with when the event goes on.
    pub fn overflow_in(&self) -> Option<u64> {
        (self.is_on() && !self.throttled).then_some(self.left.max(1))
    }

    /// It goes on with the driver's count at `raw`.
    pub fn arm_at(&mut self, raw: u64) {
        self.next_at = raw.wrapping_add(self.left.max(1));
    }

    /// It goes off, or its overflow is switched off, with the driver's count at `raw`. Periods that passed
    /// become pending.
    pub fn disarm_at(&mut self, raw: u64) {
        if !self.throttled {
            self.pending = self.pending.saturating_add(self.passed(raw));
            self.left = self.remaining(raw);
        }
    }

    /// How many overflow points lie at or below `raw`; moves the next one beyond it.
    ///
    /// The count decides, not the number of notifications: those may be merged, late or doubled.
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

    /// Whether [`Sampling::passed`] would find an overflow point at or below `raw`.
    pub fn is_due(&self, raw: u64) -> bool {
        self.is_on() && raw.wrapping_sub(self.next_at).cast_signed() >= 0
    }

    /// `n` of its counts cannot be sampled: they bring the next overflow no nearer.
    pub fn skip(&mut self, n: u64) {
        self.next_at = self.next_at.wrapping_add(n);
    }

    /// The overflow that passed `back` periods before the last one is accounted: how many counts it stands
    /// for. That is all since the one accounted before, so what samples stand for adds up to the count,
    /// whatever happened to the period meanwhile.
    pub fn account(&mut self, back: u64) -> u64 {
        let at = self.due.wrapping_sub(back);
        at.wrapping_sub(std::mem::replace(&mut self.covered, at))
    }

    /// Counts from `raw` to the next overflow.
    pub fn remaining(&self, raw: u64) -> u64 {
        self.next_at.wrapping_sub(raw).max(1)
    }

    /// The next overflow is `overflow_in` counts away, from `raw` if the event is on.
    pub fn set_left(&mut self, overflow_in: u64, raw: u64) {
        self.armed = true;
        self.left = overflow_in;
        self.next_at = raw.wrapping_add(overflow_in);
    }

    /// Changes the period, or the frequency of an event that has one. Its period then stays, and adapts; a
    /// clock's is another at once.
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

    /// Accounts one interrupt for `times` overflows; whether the event is to be throttled: more than the
    /// limit allows in one tick's time. That is measured by the clock, because the VMM may ring its ticks
    /// late or not at all.
    pub fn interrupt(&mut self, times: u32, now: Moment, tick_hz: u64, sample_rate_hz: u64) -> bool {
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

    /// Counts `times` overflows against the limit: how many it still allowed, and whether that was the last.
    pub fn count_down(&mut self, times: u32) -> CountDown {
        if self.limit == 0 {
            return CountDown {
                counted: times,
                last: false,
            };
        }
        let counted = times.min(u32::try_from(self.limit).unwrap_or(u32::MAX));
        self.limit -= u64::from(counted);
        CountDown {
            counted,
            last: self.limit == 0,
        }
    }

    /// By frequency: adjusts the period from the time since the last overflow, if that was less than a tick
    /// ago. All `times` that were noticed together count, or a host that is slow to notice would keep the
    /// period it happens to have.
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

    /// By frequency: adjusts the period from the overflows since `tick` last looked, which need not have been
    /// the tick before. Whether there were none at all. Clears their count.
    pub fn tick(&mut self, tick: u64, tick_hz: u64, sample_rate_hz: u64) -> bool {
        let ticks = tick.saturating_sub(std::mem::replace(&mut self.seen_tick, tick));
        if !self.adapts() || ticks == 0 {
            return false;
        }
        let mut overflows = std::mem::take(&mut self.overflows);
        if self.throttled {
            // The true number is unknown; it was more than the limit.
            let at_least = ticks.saturating_mul(2 * sample_rate_hz / tick_hz.max(1));
            overflows = overflows.max(at_least);
        }
        let (mut freq, mut windows) = (tick_hz, ticks);
        // Below one overflow a tick, several ticks make one window.
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

    /// Begins a new period at `raw`. The next overflow stands for what was counted of the old one, too.
    pub fn restart(&mut self, raw: u64) {
        self.left = self.period;
        self.next_at = raw.wrapping_add(self.period);
    }
}

/// The period in ns of a clock that is to overflow at `hz`; 0: never.
fn period_of_ns(hz: u64) -> u64 {
    1_000_000_000u64.checked_div(hz).map_or(0, |ns| ns.max(1))
}

/// The next period of an event that overflowed at `events` per second with `period` and should at `freq`: an
/// eighth of the way to the ideal one, so that one odd interval does little.
///
/// Rounding is towards longer periods: an increase of 1 is made at once, and a period within 14 above the
/// ideal stays.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it was clamped to 1 and 2^63 - 1"
)]
pub(crate) fn adjusted_period(period: u64, events: u64, freq: u64) -> u64 {
    let ideal = u128::from(events) * u128::from(period) / u128::from(freq.max(1));
    let ideal = i128::try_from(ideal).unwrap_or(i128::MAX / 2);
    let delta = (ideal - i128::from(period) + 7) / 8;
    // Below 2^63, so that the period stays a valid one.
    let next = (i128::from(period) + delta).clamp(1, i128::from(i64::MAX));
    next as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attr::EventType;
    use proptest::prelude::*;

    #[test]
    fn a_clocks_frequency_is_a_period_and_does_not_adapt() {
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
        fn p25_a_period_is_at_least_1_and_shrinks_by_an_eighth_at_most(period in 1u64..1 << 62, events: u64, freq in 1u64..1 << 20) {
            let next = adjusted_period(period, events, freq);
            prop_assert!(next >= 1);
            prop_assert!(next >= period - period.div_ceil(8));
        }

        #[test]
        fn p25_without_events_it_decays_to_14(period in 1u64..1 << 62) {
            let mut p = period;
            for _ in 0..1000 {
                p = adjusted_period(p, 0, 1000);
            }
            prop_assert_eq!(p, period.min(14));
        }

        #[test]
        fn p25_a_steady_rate_reaches_a_fixed_point_near_the_ideal(rate in 1_000_000u64..4_000_000_000, freq in 1u64..10_000, start in 1u64..1 << 40) {
            let mut p = start;
            for _ in 0..2000 {
                // Counts arrive at `rate`: events per second are rate / period.
                let next = adjusted_period(p, rate / p, freq);
                if next == p {
                    break;
                }
                p = next;
            }
            let settled = adjusted_period(p, rate / p, freq);
            let ideal = rate / freq;
            // A whole number of events a second is all it sees: a step of one is a share of the period.
            let slack = 16 + 2 * ideal / (rate / ideal.max(1)).max(1) + p / freq.max(1);
            prop_assert!(settled.abs_diff(ideal) <= slack, "{settled} for {ideal}");
        }
    }

    #[test]
    fn rounding_favours_longer_periods() {
        // An increase of 1 is made at once, a period up to 14 above the ideal stays.
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
