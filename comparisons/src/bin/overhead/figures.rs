//! Statistics of repeated comparisons: medians, ratios and their uncertainty.

fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share).round() as usize]
}

/// Slowdown of the guest caused by a sampling method, in percent, over all comparisons.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub(crate) struct Slowdown {
    pub(crate) median: f64,
    pub(crate) lower_quartile: f64,
    pub(crate) upper_quartile: f64,
    /// Standard error of the median, assuming normally distributed values.
    pub(crate) standard_error: f64,
}

impl Slowdown {
    pub(crate) fn of(rounds: &mut [f64]) -> Self {
        let [lower_quartile, median, upper_quartile] = [0.25, 0.5, 0.75].map(|share| quantile(rounds, share));
        Self {
            median,
            lower_quartile,
            upper_quartile,
            // The quartiles of a normal distribution are 1.349 standard deviations apart. The
            // standard error of the median is 1.253 times that of the mean.
            standard_error: 1.253 * (upper_quartile - lower_quartile) / 1.349 / (rounds.len() as f64).sqrt(),
        }
    }

    /// Returns whether the slowdown is significant, which means that its median is greater than two
    /// standard errors.
    fn is_clear(self) -> bool {
        self.median > 2.0 * self.standard_error
    }
}

/// Ratio of the slowdowns of two sampling methods.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub(crate) struct Ratio {
    pub(crate) value: f64,
    pub(crate) standard_error: f64,
}

impl Ratio {
    /// Computes the ratio of the first to the second slowdown in each pair, and returns the median
    /// ratio. Noise that affects both slowdowns of a pair cancels. Returns `None` if the second
    /// slowdowns are not significantly above zero.
    pub(crate) fn of(pairs: &[(f64, f64)]) -> Option<Self> {
        let mut seconds: Vec<f64> = pairs.iter().map(|&(_, second)| second).collect();
        if pairs.is_empty() || !Slowdown::of(&mut seconds).is_clear() {
            return None;
        }
        let mut ratios: Vec<f64> = pairs
            .iter()
            .map(|&(first, second)| match second > 0.0 {
                true => first / second,
                // Without a positive divisor, the ratio counts as greater or less than every finite
                // ratio.
                false => f64::INFINITY.copysign(first - second),
            })
            .collect();
        // The number of ratios above the median is binomially distributed, with a standard
        // deviation of half the square root of the number of pairs.
        let off = 0.5 / (pairs.len() as f64).sqrt();
        let (lower, upper) = (
            quantile(&mut ratios, 0.5 - off),
            quantile(&mut ratios, (0.5 + off).min(1.0)),
        );
        Some(Self {
            value: quantile(&mut ratios, 0.5),
            standard_error: (upper - lower) / 2.0,
        })
    }
}

/// Slowdowns of the guest by one sampling method. One slowdown is based on the time in which the
/// guest did not run, the other on the work done.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub(crate) struct MethodCost {
    pub(crate) not_run: Slowdown,
    pub(crate) work: Slowdown,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `Ratio::of` returns `None` if the divisor is not significantly above zero.
    #[test]
    fn ratio_needs_a_clear_slowdown() {
        let clear: Vec<f64> = (0..12).map(|i| 4.0 + f64::from(i % 3) * 0.1).collect();
        let noise: Vec<f64> = (0..12).map(|i| f64::from(i % 5) - 1.9).collect();
        let pairs = |x: &[f64], y: &[f64]| x.iter().copied().zip(y.iter().copied()).collect::<Vec<_>>();
        let same = Ratio::of(&pairs(&clear, &clear)).unwrap();
        assert!(same.value == 1.0 && same.standard_error == 0.0, "{same:?}");
        assert!(Ratio::of(&pairs(&noise, &clear)).is_some());
        assert_eq!(Ratio::of(&pairs(&clear, &noise)), None);
        assert_eq!(Ratio::of(&[]), None);
    }

    /// `Ratio::of` is accurate even if the machine runs at half speed for every third pair, and one
    /// pair in ten is an outlier or has a negative second slowdown.
    #[test]
    fn ratio_is_insensitive_to_common_noise() {
        let pairs: Vec<(f64, f64)> = (0..90)
            .map(|i| {
                let mood = if i % 3 == 0 { 2.0 } else { 1.0 };
                let noise = 1.0 + 0.02 * f64::from(i % 5 - 2);
                match i % 20 {
                    7 => (60.0, 10.0),
                    13 => (12.0, -0.5),
                    _ => (12.0 * mood * noise, 10.0 * mood),
                }
            })
            .collect();
        let ratio = Ratio::of(&pairs).unwrap();
        assert!((ratio.value - 1.2).abs() < 0.03, "{ratio:?}");
        assert!((0.0..0.05).contains(&ratio.standard_error), "{ratio:?}");
    }
}
