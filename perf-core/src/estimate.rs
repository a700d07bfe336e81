//! What an event would have counted had it been on all the time.
//!
//! An event that shares its slot was on for some slices of the time it was enabled. Two estimators turn what it
//! counted in them into an estimate for the whole:
//!
//! - [`linear`]: `count × enabled / running`. Right when the slices are a fair sample of the whole.
//! - [`Estimator`]: keeps what was counted as it is, and fills each gap between two slices from the rates on its two
//!   sides, the area of a trapezoid. It also says how sure it is, as a standard error. For rates that follow no
//!   course from one slice to the next, a gap tells nothing about itself; the more that is so, the more it is filled
//!   at the mean rate instead.
//!
//! Both are exact when the event was on all the time, and both say "not counted" when it never was. Neither
//! allocates; an [`Estimator`] is a dozen numbers, whatever the number of slices.

/// `count × enabled_ns / running_ns`; `None` if the event never was on: it was not counted, and no number may be shown.
///
/// Exactly `count` when the two times are equal. Saturates at `u64::MAX`.
#[must_use]
pub fn linear(count: u64, enabled_ns: u64, running_ns: u64) -> Option<u64> {
    if running_ns == 0 {
        return None;
    }
    if running_ns >= enabled_ns {
        return Some(count);
    }
    let scaled = u128::from(count) * u128::from(enabled_ns) / u128::from(running_ns);
    Some(u64::try_from(scaled).unwrap_or(u64::MAX))
}

/// An estimate and how sure it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The estimated count.
    pub value: u64,
    /// Standard error of `value`, in counts; 0 when `exact`. `None` when one slice is all there is: nothing is known
    /// about how much the rate varies.
    pub standard_error: Option<f64>,
    /// The event was on all the time: `value` was counted, not estimated.
    pub exact: bool,
}

/// Mean and variance of a series, updated one value at a time (Welford's method: no sum of large squares that cancel).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Welford {
    n: u64,
    mean: f64,
    m2: f64,
}

impl Welford {
    /// Takes in one value.
    pub fn add(&mut self, value: f64) {
        self.n += 1;
        let delta = value - self.mean;
        self.mean += delta / self.n as f64;
        self.m2 += delta * (value - self.mean);
    }

    /// How many values there were.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.n
    }

    /// Their mean; 0 if there were none.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// Their sample variance; 0 for fewer than two.
    #[must_use]
    pub fn variance(&self) -> f64 {
        if self.n < 2 {
            0.0
        } else {
            self.m2 / (self.n - 1) as f64
        }
    }
}

/// The running estimate of one event.
///
/// Times are nanoseconds of the event's *time enabled*: they stand still while the event is disabled. Rates are counts
/// per nanosecond.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimator {
    /// Counted in slices.
    counted: u64,
    running_ns: u64,
    /// End of the last slice.
    end_ns: u64,
    /// Rate at the end of the last slice.
    last_rate: f64,
    last_step: f64,
    /// Length of all gaps between slices, and of the one before the first.
    gap_ns: u64,
    first_gap_ns: u64,
    /// What the gaps hold if each is a trapezoid.
    trapezoids: f64,
    rates: Welford,
    /// Steps of the rate from one slice to the next: how many, and the sum of their squares.
    steps: u64,
    steps_squared: f64,
    /// Squares of the gaps, of gaps times the mean slice, each times the squared step across: what the error is made
    /// of.
    gap_square_steps: f64,
    gap_slice_steps: f64,
}

impl Estimator {
    /// An estimate of nothing yet.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            counted: 0,
            running_ns: 0,
            end_ns: 0,
            last_rate: 0.0,
            last_step: 0.0,
            gap_ns: 0,
            first_gap_ns: 0,
            trapezoids: 0.0,
            rates: Welford {
                n: 0,
                mean: 0.0,
                m2: 0.0,
            },
            steps: 0,
            steps_squared: 0.0,
            gap_square_steps: 0.0,
            gap_slice_steps: 0.0,
        }
    }

    /// Counts of all slices so far.
    #[must_use]
    pub fn counted(&self) -> u64 {
        self.counted
    }

    /// The event was on from `from_ns` to `to_ns` and counted `count`. Slices come in order; a part that lies before
    /// the end of the last one is ignored.
    pub fn slice(&mut self, from_ns: u64, to_ns: u64, count: u64) {
        self.counted = self.counted.wrapping_add(count);
        let from_ns = from_ns.max(self.end_ns);
        if to_ns <= from_ns {
            return;
        }
        let length = (to_ns - from_ns) as f64;
        let gap_ns = from_ns - self.end_ns;
        let gap = gap_ns as f64;
        let rate = self.edge_rate(count as f64, length);
        if self.rates.count() == 0 {
            self.trapezoids += gap * rate;
            self.first_gap_ns = gap_ns;
        } else {
            self.trapezoids += gap * (self.last_rate + rate) / 2.0;
            self.last_step = rate - self.last_rate;
            let step = self.last_step * self.last_step;
            self.steps += 1;
            self.steps_squared += step;
            self.gap_square_steps += gap * gap * step;
            self.gap_slice_steps += gap * length * step;
        }
        self.gap_ns += gap_ns;
        self.running_ns += to_ns - from_ns;
        self.end_ns = to_ns;
        self.last_rate = rate;
        self.rates.add(rate);
    }

    /// The rate a slice stands for at its ends. A slice much shorter than usual says little: it is completed to half the
    /// usual length with what was known before.
    fn edge_rate(&self, count: f64, length: f64) -> f64 {
        let n = self.rates.count();
        if n == 0 {
            return count / length;
        }
        let enough = self.running_ns as f64 / n as f64 / 2.0;
        if length >= enough {
            count / length
        } else {
            (count + self.last_rate * (enough - length)) / enough
        }
    }

    /// By how much the rate of the last slice is higher than the one before, relative to the mean rate: 1 means by as much
    /// as the mean, a negative number that it is lower. `None` with fewer than two slices or nothing counted.
    #[must_use]
    pub fn last_step(&self) -> Option<f64> {
        let mean = self.rates.mean();
        (self.steps > 0 && mean > 0.0).then(|| self.last_step / mean)
    }

    /// How much a slice's rate says about the next one's, 0 (nothing) to 1 (everything).
    fn persistence(&self) -> f64 {
        let variance = self.rates.variance();
        if self.steps < 4 || variance <= 0.0 {
            return 1.0;
        }
        let seen = 1.0 - self.steps_squared / self.steps as f64 / (2.0 * variance);
        // Without any persistence as much as this is seen by chance.
        let chance = 1.0 / (self.steps as f64).sqrt();
        ((seen - chance) / (1.0 - chance)).clamp(0.0, 1.0)
    }

    /// The estimate at `now_ns` of the event's time enabled. `open` is the slice it is in, if it is on: since when,
    /// and what it counted in it. `None` if it never was on.
    #[must_use]
    pub fn estimate(&self, now_ns: u64, open: Option<(u64, u64)>) -> Option<Estimate> {
        let mut all = *self;
        if let Some((since_ns, count)) = open {
            all.slice(since_ns, now_ns, count);
        }
        all.close(now_ns)
    }

    fn close(&self, now_ns: u64) -> Option<Estimate> {
        if self.running_ns == 0 {
            return None;
        }
        let tail_ns = now_ns.saturating_sub(self.end_ns);
        let gaps = (self.gap_ns + tail_ns) as f64;
        if gaps == 0.0 {
            return Some(Estimate {
                value: self.counted,
                standard_error: Some(0.0),
                exact: true,
            });
        }
        let tail = tail_ns as f64;
        let persistence = self.persistence();
        let interpolated = self.trapezoids + tail * self.last_rate;
        let at_mean = gaps * self.counted as f64 / self.running_ns as f64;
        let missing = persistence * interpolated + (1.0 - persistence) * at_mean;
        Some(Estimate {
            value: self.counted.saturating_add(missing as u64),
            standard_error: self.standard_error(tail, persistence),
            exact: false,
        })
    }

    /// Two limits, mixed by persistence. A rate that wanders between its ends like a random walk leaves, in a gap g with step d
    /// across it, a variance of g²d²/12 in the area; one that is new in every slice of length l leaves (g² + gl)d²/2, of
    /// which d²/2 is the variance of a rate. The ends, where there is one side only, count three times a gap between.
    fn standard_error(&self, tail: f64, persistence: f64) -> Option<f64> {
        if self.steps == 0 {
            return None;
        }
        let step = self.steps_squared / self.steps as f64;
        let first = self.first_gap_ns as f64;
        let ends = (tail * tail + first * first) * step;
        let wander = (self.gap_square_steps + 4.0 * ends) / 12.0;
        let fresh = (self.gap_square_steps + self.gap_slice_steps + ends) / 2.0;
        Some((persistence * wander + (1.0 - persistence) * fresh).sqrt())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A signal of constant rate, seen in the given slices.
    fn constant(rate: f64, slices: &[(u64, u64)]) -> Estimator {
        let mut estimator = Estimator::new();
        for &(from, to) in slices {
            estimator.slice(from, to, (rate * (to - from) as f64) as u64);
        }
        estimator
    }

    #[test]
    fn p9_linear_is_exact_when_always_on_and_nothing_when_never() {
        assert_eq!(linear(1_234, 500, 500), Some(1_234));
        assert_eq!(linear(u64::MAX, 7, 7), Some(u64::MAX));
        assert_eq!(linear(0, 500, 0), None);
        assert_eq!(linear(100, 400, 100), Some(400));
        assert_eq!(linear(u64::MAX, 2, 1), Some(u64::MAX));
    }

    #[test]
    fn p9_never_on_is_not_counted() {
        let estimator = Estimator::new();
        assert_eq!(estimator.estimate(1_000, None), None);
        assert_eq!(estimator.estimate(1_000, Some((1_000, 0))), None);
    }

    #[test]
    fn a_ramp_is_interpolated_exactly() {
        // Rate 2t, counted in every fifth piece of ten: linear scaling of early slices would be far off.
        let count = |from: u64, to: u64| to * to - from * from;
        let mut estimator = Estimator::new();
        for k in 0..20u64 {
            let from = k * 50;
            estimator.slice(from, from + 10, count(from, from + 10));
        }
        let now = 20 * 50 - 40;
        let estimate = estimator.estimate(now, None).unwrap();
        let truth = count(0, now);
        assert!(
            estimate.value.abs_diff(truth) <= truth / 200,
            "{} for {truth}",
            estimate.value
        );
    }

    #[test]
    fn one_slice_gives_a_number_but_no_error() {
        let estimate = constant(2.0, &[(100, 200)]).estimate(400, None).unwrap();
        assert_eq!((estimate.value, estimate.exact), (800, false));
        assert_eq!(estimate.standard_error, None);
    }

    #[test]
    fn steps_are_relative_to_the_mean() {
        let mut estimator = Estimator::new();
        assert_eq!(estimator.last_step(), None);
        estimator.slice(0, 10, 10);
        estimator.slice(20, 30, 30);
        assert_eq!(estimator.last_step(), Some(1.0));
    }

    #[test]
    fn welford_agrees_with_two_passes() {
        let values = [4.0, 7.0, 13.0, 16.0, 1e9 + 4.0, 1e9 + 7.0];
        let mut welford = Welford::default();
        values.iter().for_each(|&v| welford.add(v));
        let mean = values.iter().sum::<f64>() / 6.0;
        let variance = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / 5.0;
        assert_eq!(welford.count(), 6);
        assert!((welford.mean() / mean - 1.0).abs() < 1e-12);
        assert!((welford.variance() / variance - 1.0).abs() < 1e-12);
    }

    proptest! {
        #[test]
        fn p9_scaling_is_exact_when_always_on_and_undefined_when_never(count: u64, enabled in 1u64.., running: u64) {
            let running = running % (enabled + 1);
            match linear(count, enabled, running) {
                None => prop_assert_eq!(running, 0),
                Some(estimate) => {
                    prop_assert!(estimate >= count);
                    if running == enabled {
                        prop_assert_eq!(estimate, count);
                    }
                }
            }
        }

        /// P9: on all the time, in however many slices, is what was counted, and exact.
        #[test]
        fn p9_always_on_is_exact(slices in prop::collection::vec((1u64..1_000_000, 0u64..1_000_000), 1..50)) {
            let (mut estimator, mut at, mut total) = (Estimator::new(), 0, 0);
            for (length, count) in slices {
                estimator.slice(at, at + length, count);
                at += length;
                total += count;
            }
            let estimate = estimator.estimate(at, None).unwrap();
            prop_assert_eq!(estimate, Estimate { value: total, standard_error: Some(0.0), exact: true });
        }

        /// No slices whatever give a number that is not one, or less than was counted.
        #[test]
        fn estimates_are_finite_and_no_less_than_the_count(
            slices in prop::collection::vec((0u64..1 << 40, 0u64..1 << 40, 0u64..1 << 50), 0..50),
            tail in 0u64..1 << 40,
        ) {
            let (mut estimator, mut at) = (Estimator::new(), 0);
            for (gap, length, count) in slices {
                estimator.slice(at + gap, at + gap + length, count);
                at += gap + length;
            }
            if let Some(estimate) = estimator.estimate(at + tail, None) {
                prop_assert!(estimate.value >= estimator.counted());
                prop_assert!(estimate.standard_error.is_none_or(|e| e.is_finite() && e >= 0.0));
            }
        }

        /// A constant rate is estimated as such, wherever the slices are, and the error is called small.
        #[test]
        fn a_constant_rate_is_found(slices in prop::collection::vec((0u64..100_000, 1_000u64..100_000), 2..50)) {
            let (mut list, mut at) = (Vec::new(), 0);
            for (gap, length) in slices {
                list.push((at + gap, at + gap + length));
                at += gap + length;
            }
            let estimate = constant(1_000.0, &list).estimate(at, None).unwrap();
            let truth = at as f64 * 1_000.0;
            prop_assert!((estimate.value as f64 / truth - 1.0).abs() < 1e-6);
        }

        /// Order and overlap of what a caller says do no harm.
        #[test]
        fn overlapping_slices_are_clipped(slices in prop::collection::vec((0u64..1_000, 0u64..1_000, 0u64..1_000), 0..50)) {
            let mut estimator = Estimator::new();
            for (from, length, count) in slices {
                estimator.slice(from, from + length, count);
            }
            prop_assert!(estimator.running_ns <= estimator.end_ns);
        }
    }
}
