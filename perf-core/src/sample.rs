//! Sampling arithmetic: periods, frequencies, throttling and overflow limits.

use crate::attr::Attr;

const NS_PER_S: u64 = 1_000_000_000;
/// Maximum sampling period. Differences between counts then fit a signed 64-bit integer.
const PERIOD_MAX: u64 = u64::MAX >> 1;

/// A report that an event with a cookie has overflowed, which the VMM receives when it services
/// overflows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OverflowReport {
    /// Cookie with which the event was opened ([`crate::OpenFlags::cookie`]).
    pub cookie: u64,
    /// Number of overflows of the event since the last report, at least 1.
    pub times: u32,
}

/// Result of [`Sampling::count_down`]: number of overflows that the limit allowed, and whether the
/// limit is now exhausted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LimitCount {
    pub counted: u32,
    pub last: bool,
}

/// The current time: clock time in nanoseconds, and number of ticks of the context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TickTime {
    pub ns: u64,
    pub tick: u64,
}

/// Sampling rate of an event: its current period and its target frequency.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SamplingRate {
    /// Number of counts between two overflows.
    pub period: u64,
    /// Target number of overflows per second, or 0 for an event with a fixed period.
    pub freq: u64,
}

/// Sampling state of an event: periods, pending overflows, throttling and overflow limit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sampling {
    /// Current number of counts between two overflows. 0 for a counting event, which can still be
    /// armed once with [`Sampling::set_left`].
    pub period: u64,
    /// Target number of overflows per second, or 0 for an event with a fixed period.
    pub freq: u64,
    /// `true` if the event counts nanoseconds. A target frequency then determines a fixed period.
    is_clock: bool,
    /// Number of counts until the next overflow. Valid while the driver event is stopped.
    remaining: u64,
    /// Count at which the next overflow is due. Valid while the driver event is started, and always
    /// for a software event raised by the VMM.
    next_at: u64,
    /// Count at which the most recent overflow was due.
    due: u64,
    /// Count up to which all counts are included in the periods of samples.
    covered: u64,
    /// Number of overflows of the event that have not been serviced yet.
    pub pending: u32,
    /// Number of interrupts of the event since `window_ns`, for throttling. Overflows that are
    /// noticed together count as one interrupt.
    interrupts: u64,
    /// Clock time at which the interval starts that `interrupts` covers. An interval starts with
    /// the first interrupt after a tick. If no ticks arrive, an interval lasts for one tick length.
    window_ns: u64,
    /// Number of the context's tick at `window_ns`.
    window_tick: u64,
    /// `true` if the event is throttled: its overflows are suppressed until the next tick.
    pub throttled: bool,
    /// Number of further overflows until the event disables itself, or 0 for no limit.
    pub limit: u64,
    /// `overflow_ns`: clock time of the last overflow that was accounted for. `overflow_at`: count
    /// at which that overflow was due.
    overflow_ns: u64,
    overflow_at: u64,
    /// `measured_ns` and `measured_at`: time running in nanoseconds and count at the last
    /// measurement of the event's rate.
    measured_ns: u64,
    measured_at: u64,
    /// `true` if an overflow point was set with [`Sampling::set_left`]. The event then overflows
    /// even if `period` is 0.
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
            remaining: period,
            next_at: period,
            ..Self::default()
        }
    }

    /// Copies the current period and frequency of the parent event (`family`) to a child that has
    /// not counted yet.
    pub fn inherit_rate(&mut self, family: SamplingRate) {
        self.freq = family.freq;
        if family.period != 0 {
            self.period = family.period;
            self.restart(0);
        }
    }

    /// Returns the current period and target frequency of the event.
    pub fn rate(&self) -> SamplingRate {
        SamplingRate {
            period: self.period,
            freq: self.freq,
        }
    }

    /// Returns `true` if the period adapts to a target frequency.
    pub fn is_adaptive(&self) -> bool {
        self.freq != 0 && !self.is_clock
    }

    /// Returns `true` if the event can overflow, because it has a period or an overflow point was
    /// set.
    pub fn can_overflow(&self) -> bool {
        self.period != 0 || self.armed
    }

    /// Returns the number of counts until the next overflow, or `None` if the event cannot
    /// overflow or is throttled. The driver event is started with this number.
    pub fn overflow_in(&self) -> Option<u64> {
        (self.can_overflow() && !self.throttled).then_some(self.remaining.max(1))
    }

    /// Continues the current sampling period when the driver event starts at driver count `raw`.
    pub fn arm_at(&mut self, raw: u64) {
        self.next_at = raw.wrapping_add(self.remaining.max(1));
    }

    /// Suspends the current sampling period at driver count `raw`, when the driver event stops or
    /// is disarmed. Periods that have elapsed become pending overflows.
    pub fn disarm_at(&mut self, raw: u64) {
        if !self.throttled {
            self.pending = self.pending.saturating_add(self.passed(raw));
            self.remaining = self.remaining(raw);
        }
    }

    /// Returns the number of overflow points at or below `raw`, and moves the next one beyond
    /// `raw`.
    ///
    /// The count is authoritative rather than the number of notifications, because notifications
    /// can be coalesced, late or duplicated.
    pub fn passed(&mut self, raw: u64) -> u32 {
        let over = raw.wrapping_sub(self.next_at);
        if !self.can_overflow() || over.cast_signed() < 0 {
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

    /// Returns `true` if the next overflow point is at or below driver count `raw`.
    pub fn is_due(&self, raw: u64) -> bool {
        self.can_overflow() && raw.wrapping_sub(self.next_at).cast_signed() >= 0
    }

    /// Delays the next overflow by `n` counts that cannot be sampled.
    pub fn skip(&mut self, n: u64) {
        self.next_at = self.next_at.wrapping_add(n);
    }

    /// Accounts for one overflow, `back` counts before the most recent overflow point. Returns the
    /// period of its sample.
    ///
    /// The period covers all counts since the overflow that was accounted for previously, so the
    /// periods of all samples add up to the count even if the period has changed.
    pub fn account(&mut self, back: u64) -> u64 {
        let at = self.due.wrapping_sub(back);
        at.wrapping_sub(std::mem::replace(&mut self.covered, at))
    }

    /// Returns the number of counts from driver count `raw` to the next overflow.
    pub fn remaining(&self, raw: u64) -> u64 {
        self.next_at.wrapping_sub(raw).max(1)
    }

    /// Sets the next overflow point to `overflow_in` counts after the current driver count `raw`.
    pub fn set_left(&mut self, overflow_in: u64, raw: u64) {
        self.armed = true;
        self.remaining = overflow_in;
        self.next_at = raw.wrapping_add(overflow_in);
    }

    /// Changes the period, or the frequency of an event that has one. The period of an event with a
    /// frequency adapts later, except that the period of a clock event changes immediately.
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

    /// Accounts for one interrupt of the event. Returns `true` if the event must be throttled
    /// because it exceeded the maximum number of interrupts per tick interval.
    ///
    /// The interval is measured with the clock, because the VMM may deliver ticks late or not at
    /// all.
    pub fn interrupt(&mut self, now: TickTime, tick_hz: u64, sample_rate_hz: u64) -> bool {
        if self.throttled {
            return true;
        }
        let late = now.ns.saturating_sub(self.window_ns) >= NS_PER_S / tick_hz.max(1);
        if late || self.window_tick != now.tick {
            self.window_ns = now.ns;
            self.window_tick = now.tick;
            self.interrupts = 0;
        }
        self.interrupts += 1;
        self.interrupts.saturating_mul(tick_hz) > sample_rate_hz
    }

    /// Subtracts `times` overflows from the event's overflow limit. Returns the number of overflows
    /// that the limit allowed, and whether the limit is now exhausted.
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

    /// Adjusts the period of a frequency-based event at an overflow, at time running `running_ns`.
    ///
    /// If the frequency is at least one overflow per tick, the counts since the last overflow
    /// determine the period, provided that this overflow occurred less than a tick ago. At lower
    /// frequencies, an interval of less than a tick says little about the mean rate. Each overflow
    /// then at most doubles the period, and only the counts in at least a quarter of the target
    /// interval determine the period.
    pub fn note_overflow(&mut self, now_ns: u64, running_ns: u64, tick_ns: u64) {
        if !self.is_adaptive() {
            return;
        }
        let since = now_ns.saturating_sub(std::mem::replace(&mut self.overflow_ns, now_ns));
        let counted = self
            .due
            .wrapping_sub(std::mem::replace(&mut self.overflow_at, self.due));
        let is_slow = self.freq.saturating_mul(tick_ns) < NS_PER_S;
        if is_slow && self.unmeasured_ns(running_ns) >= period_of_ns(self.freq) / 4 {
            self.measure(self.due, running_ns);
        } else if since > 0 && since < tick_ns {
            let next = adjusted_period(self.period, ideal_period(counted, since, self.freq));
            if is_slow {
                self.period = next.min(self.period.saturating_mul(2)).min(PERIOD_MAX);
            } else {
                self.period = next;
                (self.measured_at, self.measured_ns) = (self.due, running_ns);
            }
        }
    }

    /// Returns `true` if the event must be read to adjust its period to the target frequency: it
    /// has run for the target interval, and for at least `min_ns`, since the last adjustment.
    pub fn needs_measurement(&self, running_ns: u64, min_ns: u64) -> bool {
        self.is_adaptive() && self.unmeasured_ns(running_ns) >= period_of_ns(self.freq).max(min_ns)
    }

    /// Returns the time running since the last measurement of the event's rate, in nanoseconds.
    fn unmeasured_ns(&self, running_ns: u64) -> u64 {
        // `abs_diff`, because the time running of an event may decrease when contexts are
        // exchanged.
        running_ns.abs_diff(self.measured_ns)
    }

    /// Adjusts the period of a frequency-based event from the counts since the last measurement and
    /// the time running in which they occurred. Returns `true` if the new period is so much shorter
    /// than the current one that the caller must start a new period, because the event would
    /// otherwise stall until the next overflow.
    ///
    /// Counts are measured rather than overflows, because the overflows since the last measurement
    /// may have had different periods. An event that counted nothing keeps its period, and its next
    /// measurement includes the idle time.
    pub fn measure(&mut self, raw: u64, running_ns: u64) -> bool {
        let counted = raw.wrapping_sub(self.measured_at);
        // An overflow that is serviced late may have been due before the last measurement.
        if counted.cast_signed() <= 0 {
            return false;
        }
        let since = running_ns.saturating_sub(self.measured_ns);
        (self.measured_at, self.measured_ns) = (raw, running_ns);
        if since == 0 {
            return false;
        }
        self.period = adjusted_period(self.period, ideal_period(counted, since, self.freq));
        !self.is_due(raw) && self.remaining(raw) > self.period.saturating_mul(8)
    }

    /// Starts a new period at driver count `raw`. The period of the next sample includes the counts
    /// of the unfinished period.
    pub fn restart(&mut self, raw: u64) {
        self.remaining = self.period;
        self.next_at = raw.wrapping_add(self.period);
    }
}

/// Returns the period in nanoseconds of a clock event with frequency `hz`, or 0 if `hz` is 0.
fn period_of_ns(hz: u64) -> u64 {
    NS_PER_S.checked_div(hz).map_or(0, |ns| ns.max(1))
}

/// Returns the period at which an event with `counted` counts in `since_ns` nanoseconds overflows
/// `freq` times per second.
fn ideal_period(counted: u64, since_ns: u64, freq: u64) -> u64 {
    let interval = u128::from(since_ns) * u128::from(freq);
    let ideal = (u128::from(counted) * u128::from(NS_PER_S)).checked_div(interval);
    u64::try_from(ideal.unwrap_or_default()).unwrap_or(u64::MAX)
}

/// Returns the next period of an event with period `period` whose ideal period is `ideal`. The
/// period moves an eighth of the way towards the ideal one, which limits the effect of a single
/// outlier.
///
/// Rounding favors longer periods: an increase of 1 is applied immediately, and a period of up to
/// 14 above the ideal stays unchanged.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it was clamped to 1 and 2^63 - 1"
)]
pub(crate) fn adjusted_period(period: u64, ideal: u64) -> u64 {
    let delta = (i128::from(ideal) - i128::from(period) + 7) / 8;
    let next = (i128::from(period) + delta).clamp(1, i128::from(PERIOD_MAX));
    next as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attr::EventType;
    use proptest::prelude::*;

    #[test]
    fn clock_frequency_is_fixed_period() {
        let attr = |config, hz| Attr::sampling(EventType::SOFTWARE, config, hz).with_freq();
        let mut clock = Sampling::new(&attr(1, 4000));
        assert_eq!((clock.period, clock.is_adaptive()), (250_000, false));
        clock.note_overflow(10, 10, 1_000_000);
        clock.note_overflow(20, 20, 1_000_000);
        assert!(!clock.needs_measurement(u64::MAX, 0));
        assert_eq!(clock.rate().period, 250_000);
        clock.set_rate(1000);
        assert_eq!((clock.rate().period, clock.rate().freq), (1_000_000, 1000));
        assert!(!Sampling::new(&attr(0, 0)).can_overflow());
        let faults = Sampling::new(&attr(2, 4000));
        assert_eq!((faults.period, faults.is_adaptive()), (1, true));
    }

    proptest! {
        #[test]
        fn p25_period_is_at_least_1_and_shrinks_by_at_most_an_eighth(period in 1u64..1 << 62, ideal: u64) {
            let next = adjusted_period(period, ideal);
            prop_assert!(next >= 1);
            prop_assert!(next >= period - period.div_ceil(8));
        }

        #[test]
        fn p25_period_decays_to_14_without_events(period in 1u64..1 << 62) {
            let mut p = period;
            for _ in 0..1000 {
                p = adjusted_period(p, 0);
            }
            prop_assert_eq!(p, period.min(14));
        }

        #[test]
        fn p25_steady_rate_converges_near_ideal_period(rate in 1_000_000u64..4_000_000_000, freq in 1u64..10_000, start in 1u64..1 << 40) {
            let ideal = ideal_period(rate, NS_PER_S, freq);
            let mut p = start;
            for _ in 0..2000 {
                p = adjusted_period(p, ideal);
            }
            prop_assert!((ideal.max(1)..=ideal + 14).contains(&p), "{p} for {ideal}");
        }
    }

    fn at_frequency(hz: u64) -> Sampling {
        Sampling::new(&Attr::sampling(EventType::SIM, 1, hz).with_freq())
    }

    /// A tick does not read an event whose period was adjusted at a recent overflow, because the
    /// read of a host event interrupts the guest.
    #[test]
    fn ticks_read_only_events_without_recent_overflow() {
        let tick_ns = 4_000_000;
        for (hz, interval_ns) in [(4000, tick_ns), (10, 100_000_000)] {
            let mut event = at_frequency(hz);
            let mut now_ns = 0;
            for _ in 0..1000 {
                now_ns += NS_PER_S / hz;
                event.passed(event.next_at);
                event.note_overflow(now_ns, now_ns, tick_ns);
            }
            assert!(
                !event.needs_measurement(now_ns + interval_ns - 1, tick_ns),
                "{hz} Hz"
            );
            assert!(event.needs_measurement(now_ns + interval_ns, tick_ns), "{hz} Hz");
        }
    }

    /// An overflow that was due before the last measurement of the rate does not change the period.
    /// A tick may read an event, and so measure the rate, before the event's last overflow is
    /// serviced.
    #[test]
    fn overflow_before_last_measurement_keeps_period() {
        let mut event = at_frequency(10);
        assert!(!event.measure(1_000_000, NS_PER_S));
        let period = event.period;
        event.passed(event.next_at);
        event.note_overflow(2 * NS_PER_S, 2 * NS_PER_S, 4_000_000);
        assert_eq!(event.period, period);
    }

    #[test]
    fn rounding_favours_longer_periods() {
        assert_eq!(adjusted_period(100, 101), 101);
        assert_eq!(adjusted_period(114, 100), 114);
        assert_eq!(adjusted_period(1000, 0), 876);
        assert_eq!(
            adjusted_period(u64::MAX >> 1, ideal_period(u64::MAX, 1, 1)),
            u64::MAX >> 1,
            "it saturates below 2^63"
        );
    }
}
