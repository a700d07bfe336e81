//! Estimation of the full count of a multiplexed event.
//!
//! A multiplexed event counts only in some slices of its time enabled. Two estimators extrapolate
//! the counts of these slices to the whole time:
//!
//! - [`linear`]: `count × enabled / running`. Unbiased if the slices are a representative sample of
//!   the whole.
//! - [`CountEstimator`]: keeps the measured counts, and fills each gap between two slices by
//!   trapezoidal interpolation of the rates on both sides. It also computes a standard error.
//!
//! Both are exact if the event was always active, and both report "not counted" if it never was.
//! Neither allocates memory. A [`CountEstimator`] consists of about four dozen numbers,
//! independent of the number of slices.
//!
//! # Standard error
//!
//! Slices are not independent, because a phase of the guest lasts longer than a slice. The error
//! from the gaps follows from the autocorrelation of the rate, and slices reveal three properties
//! of it: the mean square of steps from slice to slice, ⟨d²⟩; the mean product of two consecutive
//! steps, ⟨dd'⟩; and, for slices that were also read in the middle ([`CountEstimator::mid_slice`]),
//! the mean square of the difference between the two halves, ⟨h²⟩. With slices of length l and gaps
//! of length g, where l + g = 1:
//!
//! | rate | ⟨d²⟩ | ⟨dd'⟩ | ⟨h²⟩ | variance per gap |
//! |---|---|---|---|---|
//! | white noise | 2s² | −s² | 4s² | gs² |
//! | random walk | σ²(1 − l/3) | σ²l/6 | σ²l/3 | σ²g²/12 |
//! | linear trend | d² | d² | d²l²/4 | 0 |
//!
//! All four columns are linear in the autocorrelation of the rate. A single weighted sum of the
//! first three therefore yields the fourth exactly for the first two rates and for one rate whose
//! correlation decays exponentially with a fixed time constant. For all other time constants the
//! result is accurate to within a quarter, and the same holds for any mixture of such rates. A
//! linear trend is detected from the products of steps at greater distances, and is excluded.
//!
//! # Cases without a standard error
//!
//! - *Aliasing*: a periodic pattern in phase with the slices appears constant. No rate whose
//!   correlation only decays with time varies more within a slice than white noise: ⟨h²⟩ ≤ 4/3(⟨d²⟩
//!   − ⟨dd'⟩). No such rate has ⟨dd'⟩ below −⟨d²⟩/2, or steps that are correlated at all distances.
//!   If one of these conditions is violated, neither an error nor a bound is returned. The same
//!   applies while aliasing is detected in another event that shares slots with this one, and if
//!   slices are not read in the middle.
//! - *Long tails*: if a few steps dominate the sum of squares, the next step may exceed all
//!   previous ones. Only a bound is returned.
//! - *A periodic pattern that is sampled at all phases*: its errors cancel from period to period,
//!   and the steps do not reveal this. Only a bound is returned.

/// Returns `count × enabled_ns / running_ns`, or `None` if the event never ran. Without running
/// time the count is unknown, not zero.
///
/// Returns exactly `count` if both times are equal. Saturates at `u64::MAX`.
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

/// An estimate of an event's count, with its uncertainty.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Estimated count over the whole time enabled.
    pub value: u64,
    /// Standard error of `value`, in counts. 0 if `exact` is set. `None` if the slices do not
    /// determine the error.
    pub standard_error: Option<f64>,
    /// Approximate maximum error, in counts: four standard errors, or a bound that is known without
    /// a standard error. `None` if no bound is known.
    pub bound: Option<f64>,
    /// `true` if `value` is an exact count, because the event was always active.
    pub exact: bool,
}

impl Estimate {
    /// Returns the same estimate without a standard error and a bound. An exact estimate remains
    /// exact.
    pub(crate) fn with_unknown_uncertainty(self) -> Self {
        if self.exact {
            return self;
        }
        Self {
            standard_error: None,
            bound: None,
            ..self
        }
    }
}

/// Running mean and variance of a series of values. Updated with each value, without large sums of
/// squares that would lose precision.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RunningVariance {
    n: u64,
    mean: f64,
    m2: f64,
}

impl RunningVariance {
    /// Adds a value to the series.
    pub fn add(&mut self, value: f64) {
        self.n += 1;
        let delta = value - self.mean;
        self.mean += delta / self.n as f64;
        self.m2 += delta * (value - self.mean);
    }

    /// Returns the number of values added.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.n
    }

    /// Returns the mean of the values, or 0 without values.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// Returns the sample variance of the values, or 0 for fewer than two values.
    #[must_use]
    pub fn variance(&self) -> f64 {
        if self.n < 2 {
            0.0
        } else {
            self.m2 / (self.n - 1) as f64
        }
    }
}

/// Minimum number of steps (rate changes between slices), and minimum number of slices with a
/// mid-slice read, for a standard error.
const SLICES_MIN: u64 = 4;
/// Maximum distance between two steps, in slices, for which their autocorrelation is computed.
const LAGS: usize = 8;
/// Time constant of the exponentially correlated rate for which the standard error is exact, in
/// periods. A period is a slice and the gap after it.
const REFERENCE_CORRELATION_TIME: f64 = 0.27;
/// Minimum effective number of independent values for a standard error. Rates with fewer values
/// have long tails, and only a bound is returned for them.
const EFFECTIVE_VALUES_MIN: f64 = 20.0;
/// Sum of the squared autocorrelations of steps above which a rate is considered periodic.
const PERIODIC_MIN: f64 = 0.3;
/// Aliasing is considered certain if the variation within slices exceeds the maximum that is
/// possible without aliasing by this factor.
const ALIASING_FACTOR: f64 = 10.0;
/// Variation within slices, relative to the mean rate, below which the slices are considered free
/// of aliasing.
const CALM: f64 = 1e-3;

/// Statistics of the rate changes between slices (steps) and within slices.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
struct StepStatistics {
    n: u64,
    last_gap: f64,
    /// `squares` and `products`: sums of the squares of steps, and of the products of consecutive
    /// steps, both weighted with the gaps that the steps span. `gap_squares` and `gap_products`:
    /// sums of the weights.
    squares: f64,
    products: f64,
    gap_squares: f64,
    gap_products: f64,
    /// Unweighted statistics of the steps. `second`: sum of the squares. `fourth`: sum of the
    /// fourth powers. `largest`: largest absolute value.
    second: f64,
    fourth: f64,
    largest: f64,
    /// `last`: most recent steps. `lags`: for each lag (a distance in slices), the sum of the
    /// products of two steps with this distance.
    last: [f64; LAGS],
    lags: [f64; LAGS],
    /// `halves`: sum of the squared differences between the rates of the two halves of a slice.
    /// `halved`: number of slices in this sum.
    halves: f64,
    halved: u64,
}

/// The uncertainty of an estimate, derived from the time slices of the event.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Uncertainty {
    Unknown,
    /// An uncertainty from which a standard error is computed. `between`: variance from the gaps,
    /// in units of the squared period. `walk` and `fresh`: random-walk and white-noise components
    /// of the steps.
    Variance {
        between: f64,
        walk: f64,
        fresh: f64,
    },
    /// An uncertainty from which only an error bound is computed, because the rate has a long tail
    /// or is periodic. The fields have the same meaning as in `Variance`.
    LongTail {
        between: f64,
        walk: f64,
        fresh: f64,
    },
}

/// Returns four statistics of a rate whose correlation decays exponentially with time constant
/// `time`. Slices cover the fraction `on` of each period. The four statistics are the mean square
/// of steps, the mean product of two consecutive steps, the mean square of the difference between
/// the halves of a slice, and the variance from one gap.
fn exponential(on: f64, time: f64) -> [f64; 4] {
    let mean = |length: f64| {
        let x = length / time;
        2.0 / x * (1.0 - (1.0 - (-x).exp()) / x)
    };
    let apart = |length: f64, by: f64| {
        let x = length / time;
        (2.0 / x * (x / 2.0).sinh()).powi(2) * (-by / time).exp()
    };
    let (c0, c1, c2) = (mean(on), apart(on, 1.0), apart(on, 2.0));
    let half = on / 2.0;
    [
        2.0 * (c0 - c1),
        2.0 * c1 - c0 - c2,
        2.0 * (mean(half) - apart(half, half)),
        c0 + 2.0 * c1 / (1.0 - (-1.0 / time).exp()) - 2.0 * time,
    ]
}

/// Returns the weights with which three statistics add up to the variance from the gaps: the mean
/// square of steps, the product of two consecutive steps, and the difference between halves. Exact
/// for white noise, for a random walk and for one exponentially correlated rate.
fn weights(on: f64) -> [f64; 3] {
    let gap = 1.0 - on;
    let rows = [
        [2.0, -1.0, 4.0, gap],
        [1.0 - on / 3.0, on / 6.0, on / 3.0, gap * gap / 12.0],
        exponential(on, REFERENCE_CORRELATION_TIME),
    ];
    let minor = |a: [f64; 4], b: [f64; 4], i: usize, j: usize| a[i] * b[j] - a[j] * b[i];
    let [x, y, z] = rows;
    let determinant = |i: usize, j: usize, k: usize| {
        x[i] * minor(y, z, j, k) - x[j] * minor(y, z, i, k) + x[k] * minor(y, z, i, j)
    };
    let all = determinant(0, 1, 2);
    [
        determinant(3, 1, 2) / all,
        determinant(0, 3, 2) / all,
        determinant(0, 1, 3) / all,
    ]
}

impl StepStatistics {
    /// Adds the rate change `step` between two slices with a gap of length `gap` between them.
    fn add(&mut self, step: f64, gap: f64) {
        let square = step * step;
        self.squares += gap * gap * square;
        self.products += gap * self.last_gap * step * self.last[0];
        self.gap_squares += gap * gap;
        self.gap_products += gap * self.last_gap;
        self.second += square;
        self.fourth += square * square;
        self.largest = self.largest.max(step.abs());
        for (lag, last) in self.lags.iter_mut().zip(self.last) {
            *lag += step * last;
        }
        self.last.copy_within(..LAGS - 1, 1);
        self.last[0] = step;
        self.last_gap = gap;
        self.n += 1;
    }

    /// Adds the difference between the rates of the two halves of a slice: `first` counts in time
    /// `before`, and `second` counts in time `after`.
    fn halves(&mut self, (first, before): (f64, f64), (second, after): (f64, f64)) {
        let difference = first / before - second / after;
        // Corrects for halves of unequal length, which differ more, and for the rounding of both
        // counts.
        let even = 4.0 * before * after / (before + after).powi(2);
        let rounding = (1.0 / (before * before) + 1.0 / (after * after)) / 6.0;
        self.halves += even * (difference * difference - rounding);
        self.halved += 1;
    }

    /// Returns the effective number of independent values in the mean square of steps, which is
    /// small if a few steps dominate.
    fn values(&self) -> f64 {
        let n = self.n as f64;
        2.0 / (self.fourth / (self.second * self.second) - 1.0 / n).max(1.0 / n)
    }

    /// Returns the mean square of steps and the mean product of two consecutive steps.
    fn moments(&self) -> (f64, f64) {
        (self.squares / self.gap_squares, self.products / self.gap_products)
    }

    /// Returns `true` if the variation within slices exceeds `times` times the maximum that is
    /// possible without aliasing. `mean` is the mean rate.
    fn detects_aliasing(&self, mean: f64, times: f64) -> bool {
        if self.n < SLICES_MIN || self.halved < SLICES_MIN || self.gap_products <= 0.0 {
            return false;
        }
        let (squares, products) = self.moments();
        // Upper limit of the variation within slices for all rates without aliasing: rates whose
        // correlation only decays with time, and linear trends.
        let most = 4.0 / 3.0 * (squares - products) + squares / 4.0;
        self.halves / self.halved as f64 > times * most + (CALM * mean).powi(2)
    }

    fn doubt(&self, on: f64, mean: f64) -> Uncertainty {
        if self.n < SLICES_MIN || self.halved < SLICES_MIN || self.gap_products <= 0.0 {
            return Uncertainty::Unknown;
        }
        let (n, halved) = (self.n as f64, self.halved as f64);
        let (squares, products) = self.moments();
        let halves = (self.halves / halved).max(0.0);
        let fresh = (-products).clamp(0.0, squares / 2.0);
        let walk = (squares - 2.0 * fresh).max(0.0);
        let calm = squares.max(halves) <= (CALM * mean).powi(2);
        let values = if self.second > 0.0 { self.values() } else { n };
        // Raises the thresholds for small samples, whose means deviate randomly.
        if !calm {
            let chance = 1.0 + 2.0 * (8.0 * n / (values.min(n) * halved)).sqrt();
            let alternates = -products > squares * (0.5 + 2.25 / values.min(n).sqrt());
            if self.detects_aliasing(mean, chance) || alternates {
                return Uncertainty::Unknown;
            }
        }
        // A linear trend contributes equally to the products at all lags. It is subtracted, because
        // trapezoids interpolate it without error.
        let lag = |by: usize| self.lags[by - 1] / self.second.max(f64::MIN_POSITIVE);
        let course = ((lag(2) + lag(3)) / 2.0).clamp(0.0, 1.0);
        let course_squares = course * squares;
        let [a, b, c] = weights(on);
        let of = |squares: f64, products: f64, halves: f64| {
            (a * squares + b * products + c * halves).max(0.0) * (1.0 + 8.0 / values)
        };
        let between = of(
            (squares - course_squares).max(0.0),
            products - course_squares,
            (halves - course_squares * on * on / 4.0).max(0.0),
        );
        if !calm && values < EFFECTIVE_VALUES_MIN {
            return Uncertainty::LongTail { between, walk, fresh };
        }
        let later = (2..=LAGS).map(|by| (lag(by) - course).powi(2)).sum::<f64>();
        if !calm && later > PERIODIC_MIN + 30.0 / n {
            if products < squares / 2.0 {
                return Uncertainty::Unknown;
            }
            // A periodic pattern that is sampled at all phases: its errors cancel from period to
            // period, so only a bound is known.
            return Uncertainty::LongTail {
                between: of(walk, 0.0, walk * on / 3.0),
                walk,
                fresh,
            };
        }
        Uncertainty::Variance { between, walk, fresh }
    }
}

/// Estimator of the count of one event, updated with each time slice.
///
/// All times are nanoseconds of the event's *time enabled* and do not advance while the event is
/// disabled. Rates are counts per nanosecond.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct CountEstimator {
    /// Number of counts of the event in all slices.
    counted: u64,
    running_ns: u64,
    /// End of the last slice, in nanoseconds of time enabled.
    end_ns: u64,
    /// Rate of the event at the end of the last slice, in counts per nanosecond.
    last_rate: f64,
    last_step: f64,
    /// Length of the last slice, in nanoseconds of time enabled.
    last_ns: u64,
    /// `gap_ns`: total length of all gaps before slices, in nanoseconds. `first_gap_ns`: length
    /// of the gap before the first slice, in nanoseconds.
    gap_ns: u64,
    first_gap_ns: u64,
    /// Interpolated number of counts in all gaps before slices, including the first gap.
    trapezoids: f64,
    rates: RunningVariance,
    steps: StepStatistics,
    /// Time enabled and count at the read in the middle of the current slice, if there was one.
    mid_slice: Option<(u64, u64)>,
}

impl CountEstimator {
    /// Creates an estimator without slices.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns `true` if a periodic guest pattern certainly aliases with the slices, that is, if
    /// the rate varies more within slices than between them. The pattern may then also affect other
    /// events that share slots with this one, even if their own slices do not reveal it.
    #[must_use]
    pub fn detects_aliasing(&self) -> bool {
        self.steps.detects_aliasing(self.rates.mean(), ALIASING_FACTOR)
    }

    /// Records the number of counts `count` in the current slice at time `at_ns`, near the middle
    /// of the slice. The variation within slices reveals aliasing.
    pub fn mid_slice(&mut self, at_ns: u64, count: u64) {
        self.mid_slice = Some((at_ns, count));
    }

    /// Returns the number of counts of the event in all slices.
    #[must_use]
    pub fn counted(&self) -> u64 {
        self.counted
    }

    /// Adds a slice from `from_ns` to `to_ns` with `count` counts. Slices must be added in
    /// chronological order. If a slice begins before the end of the previous one, the overlap is
    /// ignored.
    pub fn slice(&mut self, from_ns: u64, to_ns: u64, count: u64) {
        self.counted = self.counted.wrapping_add(count);
        if let Some((at_ns, first)) = self.mid_slice.take()
            && (from_ns + 1..to_ns).contains(&at_ns)
            && first <= count
        {
            let (before, after) = ((at_ns - from_ns) as f64, (to_ns - at_ns) as f64);
            self.steps
                .halves((first as f64, before), ((count - first) as f64, after));
        }
        let from_ns = from_ns.max(self.end_ns);
        if to_ns <= from_ns {
            return;
        }
        let length_ns = to_ns - from_ns;
        let length = length_ns as f64;
        let gap_ns = from_ns - self.end_ns;
        let gap = gap_ns as f64;
        let rate = self.edge_rate(count as f64, length);
        if self.rates.count() == 0 {
            self.trapezoids += gap * rate;
            self.first_gap_ns = gap_ns;
        } else {
            if self.rates.count() == 1 {
                self.complete_first(rate, length);
            }
            self.trapezoids += gap * (self.last_rate + rate) / 2.0;
            self.last_step = rate - self.last_rate;
            self.steps.add(self.last_step, gap);
        }
        self.gap_ns += gap_ns;
        self.running_ns += length_ns;
        self.end_ns = to_ns;
        self.last_rate = rate;
        self.last_ns = length_ns;
        self.rates.add(rate);
    }

    /// Returns the rate that interpolation uses at both ends of a slice. A slice much shorter than
    /// average carries little information and is extended to half the average length with the
    /// previous rate.
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

    /// Corrects the rate of a short first slice: extends the slice to half the length `length` of
    /// the second slice, at the second slice's rate `rate`.
    fn complete_first(&mut self, rate: f64, length: f64) {
        let (first, enough) = (self.last_ns as f64, length / 2.0);
        if first >= enough {
            return;
        }
        let completed = (self.last_rate * first + rate * (enough - first)) / enough;
        self.trapezoids += self.first_gap_ns as f64 * (completed - self.last_rate);
        self.last_rate = completed;
        self.rates = RunningVariance::default();
        self.rates.add(completed);
    }

    /// Returns the rate change between the last two slices, divided by the mean rate. Negative
    /// values are decreases. Returns `None` with fewer than two slices or a count of zero.
    #[must_use]
    pub fn last_step(&self) -> Option<f64> {
        let mean = self.rates.mean();
        (self.steps.n > 0 && mean > 0.0).then(|| self.last_step / mean)
    }

    /// Returns the estimate at time enabled `now_ns`, or `None` if the event was never active.
    /// `open` contains the start and the count of the current slice, or `None` if the event is not
    /// active.
    #[must_use]
    pub fn estimate(&self, now_ns: u64, open: Option<(u64, u64)>) -> Option<Estimate> {
        let mut all = *self;
        if let Some((since_ns, count)) = open {
            all.slice(since_ns, now_ns, count);
        }
        all.close(now_ns)
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an estimate is rounded and saturates"
    )]
    fn close(&self, now_ns: u64) -> Option<Estimate> {
        if self.running_ns == 0 {
            return None;
        }
        let tail_ns = now_ns.saturating_sub(self.end_ns);
        if self.gap_ns + tail_ns == 0 {
            return Some(Estimate {
                value: self.counted,
                standard_error: Some(0.0),
                bound: Some(0.0),
                exact: true,
            });
        }
        let tail = tail_ns as f64;
        let missing = self.trapezoids + tail * self.last_rate;
        let (standard_error, bound) = self.doubt(tail);
        Some(Estimate {
            value: self.counted.saturating_add(missing.round() as u64),
            standard_error,
            bound,
            exact: false,
        })
    }

    /// Returns the standard error and the error bound of the estimate, as described in the module
    /// documentation. `tail` is the time since the last slice.
    fn doubt(&self, tail: f64) -> (Option<f64>, Option<f64>) {
        let steps = &self.steps;
        let (slices, running) = (self.rates.count() as f64, self.running_ns as f64);
        let first = self.first_gap_ns as f64;
        let gaps = self.gap_ns as f64 - first;
        let on = running / (running + gaps);
        let (known, between, walk, fresh) = match steps.doubt(on, self.rates.mean()) {
            Uncertainty::Unknown => return (None, None),
            Uncertainty::Variance { between, walk, fresh } => (true, between, walk, fresh),
            Uncertainty::LongTail { between, walk, fresh } => (false, between, walk, fresh),
        };
        let mut variance = between * steps.gap_squares / (1.0 - on).powi(2);
        // The gaps before the first and after the last slice are extrapolated from a single slice.
        let length = running / slices;
        let period = length + gaps / steps.n as f64;
        for end in [first, tail] {
            variance += end * (end + length) * (end / period * walk / 3.0 + fresh);
        }
        // Counts are integers. Rounding at both ends of a slice adds a variance of 1/6, which the
        // extrapolation to the gaps multiplies.
        let unseen = (gaps + first + tail) / running;
        variance += slices * unseen * (1.0 + unseen) / 6.0;
        let error = variance.sqrt();
        if known {
            return (Some(error), Some(4.0 * error));
        }
        // The slices may contain too many or too few of the dominant steps, so the largest step is
        // added to the bound.
        (None, Some(4.0 * error + steps.largest * period))
    }
}

#[cfg(test)]
mod tests;
