//! What an event would have counted had it been on all the time.
//!
//! An event that shares its slot was on for some slices of the time it was enabled. Two estimators turn what it
//! counted in them into an estimate for the whole:
//!
//! - [`linear`]: `count × enabled / running`. Right when the slices are a fair sample of the whole.
//! - [`Estimator`]: keeps what was counted as it is, and fills each gap between two slices from the rates on its two
//!   sides, the area of a trapezoid. It also says how sure it is, as a standard error.
//!
//! Both are exact when the event was on all the time, and both say "not counted" when it never was. Neither
//! allocates; an [`Estimator`] is two dozen numbers, whatever the number of slices.
//!
//! # The standard error
//!
//! Slices are not independent: a phase of the guest is longer than a turn. So what a gap hides is told from the steps of
//! the rate from one slice to the next, and from how much one step has to do with the one before. With slices of length
//! l, gaps of length g and steps d:
//!
//! - A rate that is new in every slice, with variance s²: ⟨d²⟩ is 2s², and ⟨dd'⟩ of two steps in a row is −s², because the
//!   slice between them is in both. A gap hides (g² + gl)s².
//! - A rate that walks at random, by σ² per unit of time: ⟨d²⟩ is σ²(g + 2l/3) and ⟨dd'⟩ is σ²l/6. A gap adds g²σ²(g + l)/12 to
//!   the error of the sum: an error made on one side of a slice is partly made good on its other side.
//! - A rate that keeps its course: ⟨dd'⟩ is nearly ⟨d²⟩, and trapezoids are nearly exact.
//!
//! Two averages do not tell three things apart, but they bound them: the new part is as large as ⟨dd'⟩ demands, the walking
//! part as large as both allow. Rare jumps from phase to phase are steps so large that the noise between them drowns in
//! ⟨dd'⟩. So the new part is also looked for with jumps cut down to size, and the larger result counts.

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

/// A step more than so many times the usual one is a jump.
const JUMP: f64 = 3.0;
/// The usual step is the mean of about so many.
const LATELY: f64 = 8.0;

/// Squares of steps, and products of each with the one before, weighted with the gaps they span.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Moments {
    last: f64,
    squares: f64,
    products: f64,
}

impl Moments {
    const NONE: Self = Self {
        last: 0.0,
        squares: 0.0,
        products: 0.0,
    };

    fn add(&mut self, step: f64, gap: f64, last_gap: f64) {
        self.squares += gap * gap * step * step;
        self.products += gap * last_gap * step * self.last;
        self.last = step;
    }

    /// The part that is new in every slice: the s² for which squares and products (times `even`, had all gaps been equal) are
    /// those of a random walk and it. `on` is the share of the time in slices, l / (g + l).
    fn fresh(&self, on: f64, even: f64) -> f64 {
        (on * self.squares / 6.0 - (1.0 - on / 3.0) * even * self.products).clamp(0.0, self.squares / 2.0)
    }
}

/// How the rate changes from one slice to the next.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Steps {
    n: u64,
    last_gap: f64,
    /// What weighs the squares and the products.
    gap_squares: f64,
    gap_products: f64,
    all: Moments,
    /// The usual size of a step, and the moments with jumps cut to [`JUMP`] times that.
    usual: f64,
    cut: Moments,
}

/// What the gaps hide, summed over them: squares of gaps times variances of the rate.
struct Hidden {
    /// σ²(g + l): what changes more slowly than slices come.
    walk: f64,
    /// s²: what is new in every slice.
    fresh: f64,
}

impl Steps {
    const NONE: Self = Self {
        n: 0,
        last_gap: 0.0,
        gap_squares: 0.0,
        gap_products: 0.0,
        all: Moments::NONE,
        usual: 0.0,
        cut: Moments::NONE,
    };

    /// A step across `gap`; one count more in the slice would have made it larger by `one`.
    fn add(&mut self, step: f64, gap: f64, one: f64) {
        let size = step.abs();
        if self.n == 0 {
            self.usual = size;
        }
        let cut = size.min((JUMP * self.usual).max(one));
        self.usual += (cut - self.usual) / LATELY;
        self.all.add(step, gap, self.last_gap);
        self.cut.add(cut.copysign(step), gap, self.last_gap);
        self.gap_squares += gap * gap;
        self.gap_products += gap * self.last_gap;
        self.last_gap = gap;
        self.n += 1;
    }

    /// `on` is the share of the time in slices, `variance` that of their rates.
    fn hidden(&self, on: f64, variance: f64) -> Hidden {
        let even = if self.gap_products > 0.0 {
            self.gap_squares / self.gap_products
        } else {
            0.0
        };
        let Moments {
            squares, products, ..
        } = self.all;
        let seen = self.all.fresh(on, even).max(self.cut.fresh(on, even));
        // After few steps all may be new; what is new cannot vary more than the rates do.
        let unknown = (squares / 2.0 - seen) / self.n as f64;
        let fresh = (seen + unknown).min(variance * self.gap_squares);
        let by_squares = (squares - 2.0 * fresh) / (1.0 - on / 3.0);
        let by_products = (squares - even * products - 3.0 * fresh) / (1.0 - on / 2.0);
        Hidden {
            walk: by_squares.min(by_products).max(0.0),
            fresh,
        }
    }
}

/// The running estimate of one event.
///
/// Times are nanoseconds of the event's *time enabled*: they stand still while the event is disabled. Rates are counts
/// per nanosecond.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimator {
    /// Counted in slices.
    counted: u64,
    running_ns: u64,
    /// End of the last slice.
    end_ns: u64,
    /// Rate at the end of the last slice.
    last_rate: f64,
    last_step: f64,
    /// Length of the last slice.
    last_ns: u64,
    /// Length of all gaps between slices, and of the one before the first.
    gap_ns: u64,
    first_gap_ns: u64,
    /// What the gaps hold if each is a trapezoid.
    trapezoids: f64,
    rates: Welford,
    steps: Steps,
}

impl Default for Estimator {
    fn default() -> Self {
        Self::new()
    }
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
            last_ns: 0,
            gap_ns: 0,
            first_gap_ns: 0,
            trapezoids: 0.0,
            rates: Welford {
                n: 0,
                mean: 0.0,
                m2: 0.0,
            },
            steps: Steps::NONE,
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
            self.steps.add(self.last_step, gap, 1.0 / length);
        }
        self.gap_ns += gap_ns;
        self.running_ns += length_ns;
        self.end_ns = to_ns;
        self.last_rate = rate;
        self.last_ns = length_ns;
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

    /// The first slice may have been the short one: then it is completed with what the second says.
    fn complete_first(&mut self, rate: f64, length: f64) {
        let (first, enough) = (self.last_ns as f64, length / 2.0);
        if first >= enough {
            return;
        }
        let completed = (self.last_rate * first + rate * (enough - first)) / enough;
        self.trapezoids += self.first_gap_ns as f64 * (completed - self.last_rate);
        self.last_rate = completed;
        self.rates = Welford::default();
        self.rates.add(completed);
    }

    /// By how much the rate of the last slice is higher than the one before, relative to the mean rate: 1 means by as much
    /// as the mean, a negative number that it is lower. `None` with fewer than two slices or nothing counted.
    #[must_use]
    pub fn last_step(&self) -> Option<f64> {
        let mean = self.rates.mean();
        (self.steps.n > 0 && mean > 0.0).then(|| self.last_step / mean)
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
        if self.gap_ns + tail_ns == 0 {
            return Some(Estimate {
                value: self.counted,
                standard_error: Some(0.0),
                exact: true,
            });
        }
        let tail = tail_ns as f64;
        let missing = self.trapezoids + tail * self.last_rate;
        Some(Estimate {
            value: self.counted.saturating_add(missing.round() as u64),
            standard_error: self.standard_error(tail),
            exact: false,
        })
    }

    /// See the module's text. `tail` is the time since the last slice.
    fn standard_error(&self, tail: f64) -> Option<f64> {
        let steps = &self.steps;
        if steps.n == 0 {
            return None;
        }
        let (slices, running) = (self.rates.count() as f64, self.running_ns as f64);
        let first = self.first_gap_ns as f64;
        let gaps = self.gap_ns as f64 - first;
        let on = running / (running + gaps);
        let (mut between, mut ends) = (0.0, 0.0);
        if steps.gap_squares > 0.0 {
            let hidden = steps.hidden(on, self.rates.variance());
            between = hidden.walk / 12.0 + hidden.fresh / (1.0 - on);
            // The ends have one side only, and a course helps them less: all that is not new walks.
            let fresh = hidden.fresh / steps.gap_squares;
            let walk = (steps.all.squares / steps.gap_squares - 2.0 * fresh).max(0.0);
            let length = running / slices;
            let period = length + gaps / steps.n as f64;
            for end in [first, tail] {
                ends += end * (end + length) * (end / period * walk / 3.0 + fresh);
            }
        }
        // Counts are whole: both ends of a slice round, which makes a variance of 1/6, and each gap repeats that.
        let unseen = (gaps + first + tail) / running;
        let rounding = slices * unseen * (1.0 + unseen) / 6.0;
        Some((between + ends + rounding).sqrt())
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

    /// Errors and standard errors of `runs` estimates of a rate that `rates` draws, one per unit of time, seen 2 units of 8. Returns
    /// the part within two standard errors, and the mean standard error in deviations of the error.
    fn quality(runs: u64, rates: impl Fn(&mut fastrand::Rng) -> Vec<f64>) -> (f64, f64) {
        const UNIT_NS: u64 = 1_000;
        let (mut covered, mut squares, mut errors) = (0.0, 0.0, 0.0);
        for seed in 0..runs {
            let counts: Vec<u64> = rates(&mut fastrand::Rng::with_seed(seed))
                .iter()
                .map(|rate| (rate * 1e6) as u64)
                .collect();
            let mut estimator = Estimator::new();
            for from in (3..counts.len() - 2).step_by(8) {
                let ns = |at: usize| at as u64 * UNIT_NS;
                estimator.slice(ns(from), ns(from + 2), counts[from..from + 2].iter().sum());
            }
            let truth: u64 = counts.iter().sum();
            let estimate = estimator.estimate(counts.len() as u64 * UNIT_NS, None).unwrap();
            let (error, sure) = (
                estimate.value as f64 - truth as f64,
                estimate.standard_error.unwrap(),
            );
            covered += f64::from(u8::from(error.abs() <= 2.0 * sure));
            squares += error * error;
            errors += sure;
        }
        let runs = runs as f64;
        (covered / runs, errors / runs / (squares / runs).sqrt())
    }

    const UNITS: usize = 4_000;

    fn new_every_time(rng: &mut fastrand::Rng) -> Vec<f64> {
        // Constant over the length of a slice, at whatever offset.
        let offset = rng.usize(0..2);
        let levels: Vec<f64> = (0..UNITS).map(|_| 1.0 + rng.f64()).collect();
        (0..UNITS).map(|at| levels[(at + offset) / 2]).collect()
    }

    fn walking(rng: &mut fastrand::Rng) -> Vec<f64> {
        let mut rate = 100.0;
        let mut step = || {
            rate += rng.f64() - 0.5;
            rate
        };
        (0..UNITS).map(|_| step()).collect()
    }

    /// Phases of some 200 units, and within them noise that is a tenth of the level.
    fn in_phases(rng: &mut fastrand::Rng) -> Vec<f64> {
        let mut level = 1.0;
        let mut draw = || {
            if rng.usize(0..200) == 0 {
                level = 0.5 + rng.f64();
            }
            level * (0.9 + 0.2 * rng.f64())
        };
        (0..UNITS).map(|_| draw()).collect()
    }

    /// The standard error is that of the estimates, whether what a gap hides is new, a walk, or noise between rare jumps.
    #[test]
    fn the_standard_error_is_the_deviation_of_the_error() {
        for (name, (covered, ratio)) in [
            ("new every time", quality(200, new_every_time)),
            ("walking", quality(200, walking)),
            ("in phases", quality(200, in_phases)),
        ] {
            assert!(covered >= 0.92, "{name}: {covered}");
            assert!((0.8..=1.3).contains(&ratio), "{name}: {ratio}");
        }
    }

    /// What keeps its course leaves no doubt but about its ends; the same rates in another order leave much.
    #[test]
    fn a_course_leaves_little_doubt() {
        let doubt = |order: fn(u64) -> u64| {
            let mut estimator = Estimator::new();
            for slice in 0..500 {
                estimator.slice(slice * 40, slice * 40 + 10, 1_000 * order(slice));
            }
            estimator
                .estimate(500 * 40, None)
                .unwrap()
                .standard_error
                .unwrap()
        };
        let (course, disorder) = (doubt(|slice| slice), doubt(|slice| slice * 203 % 500));
        assert!(100.0 * course < disorder, "{course} {disorder}");
    }

    /// A first slice of next to nothing is completed with the second.
    #[test]
    fn a_first_slice_of_next_to_nothing_says_nothing() {
        let estimate = constant(2.0, &[(100, 101), (1_000, 2_000), (3_000, 4_000)]);
        let mut odd = Estimator::new();
        odd.slice(100, 101, 0);
        odd.slice(1_000, 2_000, 2_000);
        odd.slice(3_000, 4_000, 2_000);
        let (even, odd) = (
            estimate.estimate(4_000, None).unwrap(),
            odd.estimate(4_000, None).unwrap(),
        );
        assert!(
            even.value.abs_diff(odd.value) <= 10,
            "{} {}",
            even.value,
            odd.value
        );
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
