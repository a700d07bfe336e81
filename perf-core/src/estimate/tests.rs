use super::*;
use proptest::prelude::*;

/// Creates an estimator of an event that has a constant rate and is active in the given slices.
fn constant(rate: f64, slices: &[(u64, u64)]) -> CountEstimator {
    let mut estimator = CountEstimator::new();
    for &(from, to) in slices {
        estimator.slice(from, to, (rate * (to - from) as f64) as u64);
    }
    estimator
}

#[test]
fn p9_linear_is_exact_if_always_active_and_none_if_never() {
    assert_eq!(linear(1_234, 500, 500), Some(1_234));
    assert_eq!(linear(u64::MAX, 7, 7), Some(u64::MAX));
    assert_eq!(linear(0, 500, 0), None);
    assert_eq!(linear(100, 400, 100), Some(400));
    assert_eq!(linear(u64::MAX, 2, 1), Some(u64::MAX));
}

#[test]
fn p9_inactive_event_has_no_estimate() {
    let estimator = CountEstimator::new();
    assert_eq!(estimator.estimate(1_000, None), None);
    assert_eq!(estimator.estimate(1_000, Some((1_000, 0))), None);
}

#[test]
fn linear_ramp_is_interpolated_exactly() {
    // A rate of 2t, measured in the first 10 of every 50 units of time. Linear scaling of the early
    // slices would be far off.
    let count = |from: u64, to: u64| to * to - from * from;
    let mut estimator = CountEstimator::new();
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
fn single_slice_has_no_standard_error() {
    let estimate = constant(2.0, &[(100, 200)]).estimate(400, None).unwrap();
    assert_eq!((estimate.value, estimate.exact), (800, false));
    assert_eq!(estimate.standard_error, None);
}

/// Estimates the count of an event `runs` times, with random rates from `rates` (one rate per unit
/// of time). The event is active in 2 of every 8 units. Returns the fraction of errors within two
/// standard errors, and the mean standard error relative to the standard deviation of the error.
fn quality(runs: u64, rates: impl Fn(&mut fastrand::Rng) -> Vec<f64>) -> (f64, f64) {
    const UNIT_NS: u64 = 1_000;
    let (mut covered, mut squares, mut errors) = (0.0, 0.0, 0.0);
    for seed in 0..runs {
        let counts: Vec<u64> = rates(&mut fastrand::Rng::with_seed(seed))
            .iter()
            .map(|rate| (rate * 1e6) as u64)
            .collect();
        let mut estimator = CountEstimator::new();
        for from in (3..counts.len() - 2).step_by(8) {
            let ns = |at: usize| at as u64 * UNIT_NS;
            estimator.mid_slice(ns(from + 1), counts[from]);
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

/// Returns one rate per unit of time. The rate changes with probability 1/2 per unit, so that its
/// correlation decays exponentially.
fn new_by_chance(rng: &mut fastrand::Rng) -> Vec<f64> {
    let mut level = 1.0;
    let mut draw = || {
        if rng.bool() {
            level = 1.0 + rng.f64();
        }
        level
    };
    (0..UNITS).map(|_| draw()).collect()
}

fn walking(rng: &mut fastrand::Rng) -> Vec<f64> {
    let mut rate = 100.0;
    let mut step = || {
        rate += rng.f64() - 0.5;
        rate
    };
    (0..UNITS).map(|_| step()).collect()
}

/// Returns one rate per unit of time. The rate is constant for about 200 units at a time, with a
/// noise of a tenth of its level.
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

/// The estimated standard error matches the actual deviation of estimates from the true count, for
/// white noise, for a random walk, and for noise between rare jumps.
#[test]
fn standard_error_matches_error_deviation() {
    for (name, (covered, ratio)) in [
        ("new by chance", quality(200, new_by_chance)),
        ("walking", quality(200, walking)),
        ("in phases", quality(200, in_phases)),
    ] {
        assert!(covered >= 0.92, "{name}: {covered}");
        assert!((0.8..=1.3).contains(&ratio), "{name}: {ratio}");
    }
}

/// The standard error is small for a rate that changes linearly, and large for the same rates in
/// random order.
#[test]
fn linear_trend_has_small_error() {
    let doubt = |order: &[u64]| {
        let mut estimator = CountEstimator::new();
        for (slice, rate) in order.iter().enumerate() {
            let (from, count) = (slice as u64 * 40, 1_000 * rate);
            estimator.mid_slice(from + 5, count / 2);
            estimator.slice(from, from + 10, count);
        }
        let estimate = estimator.estimate(order.len() as u64 * 40, None).unwrap();
        estimate.standard_error.unwrap()
    };
    let mut rates: Vec<u64> = (0..500).collect();
    let course = doubt(&rates);
    fastrand::Rng::with_seed(1).shuffle(&mut rates);
    let disorder = doubt(&rates);
    assert!(100.0 * course < disorder, "{course} {disorder}");
}

/// Estimates an event with rate `rate(ns)`. The event is active for 8 ms out of every 32 ms, and
/// each slice is read in the middle.
fn rotated(rate: impl Fn(u64) -> u64, rotations: u64) -> CountEstimator {
    let mut estimator = CountEstimator::new();
    for from_ms in (0..rotations).map(|r| 32 * r) {
        let sum = |range: std::ops::Range<u64>| range.map(&rate).sum::<u64>();
        estimator.mid_slice(1_000_000 * (from_ms + 4), sum(from_ms..from_ms + 4));
        estimator.slice(
            1_000_000 * from_ms,
            1_000_000 * (from_ms + 8),
            sum(from_ms..from_ms + 8),
        );
    }
    estimator
}

/// If the rate has the period of the rotation, the estimate has no standard error: all slices have
/// equal counts, although their rate is far from the true mean.
#[test]
fn aliasing_pattern_has_no_standard_error() {
    let estimator = rotated(|ms| if ms % 32 < 5 { 10_000 } else { 100 }, 200);
    assert!(estimator.detects_aliasing());
    let estimate = estimator.estimate(200 * 32_000_000, None).unwrap();
    assert_eq!((estimate.standard_error, estimate.bound), (None, None));
    // The same rates with a period that does not alias with the slices are not detected.
    let estimator = rotated(|ms| if ms % 37 < 5 { 10_000 } else { 100 }, 200);
    assert!(!estimator.detects_aliasing());
}

/// An estimate has neither a standard error nor a bound if no slice was read in the middle, because
/// such slices may hide a pattern.
#[test]
fn no_mid_slice_read_gives_no_standard_error() {
    let estimate = constant(
        2.0,
        &[(0, 100), (400, 500), (800, 900), (1_200, 1_300), (1_600, 1_700)],
    )
    .estimate(2_000, None)
    .unwrap();
    assert_eq!((estimate.standard_error, estimate.bound), (None, None));
}

/// If the rate has a single large jump, the estimate has an error bound but no standard error.
#[test]
fn few_dominant_slices_give_only_a_bound() {
    let estimator = rotated(|ms| if ms < 3_000 { 10_000 } else { 100 }, 200);
    let estimate = estimator.estimate(200 * 32_000_000, None).unwrap();
    let truth = 10_000 * 3_000 + 100 * (200 * 32 - 3_000);
    assert_eq!(estimate.standard_error, None);
    assert!(estimate.value.abs_diff(truth) as f64 <= estimate.bound.unwrap());
}

/// The weighted sum with the results of `weights` is the exact variance from the gaps for the three
/// reference rates, and is accurate to within a quarter for the rates between them.
#[test]
fn weights_predict_gap_variance() {
    for on in [0.1, 0.25, 0.5] {
        let [a, b, c] = weights(on);
        for time in [
            0.001,
            0.01,
            0.03,
            0.1,
            REFERENCE_CORRELATION_TIME,
            0.6,
            1.0,
            3.0,
            300.0,
        ] {
            let [squares, products, halves, hidden] = exponential(on, time);
            let ratio = ((a * squares + b * products + c * halves) / hidden).sqrt();
            let slack = if [0.001, REFERENCE_CORRELATION_TIME, 300.0].contains(&time) {
                0.02
            } else {
                0.25
            };
            assert!((ratio - 1.0).abs() < slack, "on {on}, time {time}: {ratio}");
        }
    }
}

/// A very short first slice is extended with the rate of the second one.
#[test]
fn short_first_slice_is_extended() {
    let estimate = constant(2.0, &[(100, 101), (1_000, 2_000), (3_000, 4_000)]);
    let mut odd = CountEstimator::new();
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
    let mut estimator = CountEstimator::new();
    assert_eq!(estimator.last_step(), None);
    estimator.slice(0, 10, 10);
    estimator.slice(20, 30, 30);
    assert_eq!(estimator.last_step(), Some(1.0));
}

#[test]
fn running_variance_matches_two_pass_result() {
    let values = [4.0, 7.0, 13.0, 16.0, 1e9 + 4.0, 1e9 + 7.0];
    let mut welford = RunningVariance::default();
    values.iter().for_each(|&v| welford.add(v));
    let mean = values.iter().sum::<f64>() / 6.0;
    let variance = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / 5.0;
    assert_eq!(welford.count(), 6);
    assert!((welford.mean() / mean - 1.0).abs() < 1e-12);
    assert!((welford.variance() / variance - 1.0).abs() < 1e-12);
}

proptest! {
    #[test]
    fn p9_scaling_is_exact_if_always_active_and_undefined_if_never(count: u64, enabled in 1u64.., running: u64) {
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

    /// The estimate of an event that is always active equals its count and is exact, for any number
    /// of slices (behavior P9).
    #[test]
    fn p9_always_active_is_exact(slices in prop::collection::vec((1u64..1_000_000, 0u64..1_000_000), 1..50)) {
        let (mut estimator, mut at, mut total) = (CountEstimator::new(), 0, 0);
        for (length, count) in slices {
            estimator.slice(at, at + length, count);
            at += length;
            total += count;
        }
        let estimate = estimator.estimate(at, None).unwrap();
        prop_assert_eq!(estimate, Estimate { value: total, standard_error: Some(0.0), bound: Some(0.0), exact: true });
    }

    /// Estimates are finite and never below the measured count, for any sequence of slices.
    #[test]
    fn estimates_are_finite_and_at_least_the_count(
        slices in prop::collection::vec((0u64..1 << 40, 0u64..1 << 40, 0u64..1 << 50), 0..50),
        tail in 0u64..1 << 40,
    ) {
        let (mut estimator, mut at) = (CountEstimator::new(), 0);
        for (gap, length, count) in slices {
            estimator.slice(at + gap, at + gap + length, count);
            at += gap + length;
        }
        if let Some(estimate) = estimator.estimate(at + tail, None) {
            prop_assert!(estimate.value >= estimator.counted());
            prop_assert!(estimate.standard_error.is_none_or(|e| e.is_finite() && e >= 0.0));
        }
    }

    /// A constant rate is estimated correctly with a small error, for any positions of the slices.
    #[test]
    fn constant_rate_is_estimated(slices in prop::collection::vec((0u64..100_000, 1_000u64..100_000), 2..50)) {
        let (mut list, mut at) = (Vec::new(), 0);
        for (gap, length) in slices {
            list.push((at + gap, at + gap + length));
            at += gap + length;
        }
        let estimate = constant(1_000.0, &list).estimate(at, None).unwrap();
        let truth = at as f64 * 1_000.0;
        prop_assert!((estimate.value as f64 / truth - 1.0).abs() < 1e-6);
    }

    /// Slices that overlap or are out of order do not corrupt the estimate.
    #[test]
    fn overlapping_slices_are_clipped(slices in prop::collection::vec((0u64..1_000, 0u64..1_000, 0u64..1_000), 0..50)) {
        let mut estimator = CountEstimator::new();
        for (from, length, count) in slices {
            estimator.slice(from, from + length, count);
        }
        prop_assert!(estimator.running_ns <= estimator.end_ns);
    }
}
