//! What an event would have counted had it been on all the time.
//!
//! An event that shares its slot was on for some slices of the time it was enabled. Two estimators turn what
//! it counted in them into an estimate for the whole:
//!
//! - [`linear`]: `count × enabled / running`. Right when the slices are a fair sample of the whole.
//! - [`Estimator`]: keeps what was counted as it is, and fills each gap between two slices from the rates on
//!   its two sides, the area of a trapezoid. It also says how sure it is, as a standard error.
//!
//! Both are exact when the event was on all the time, and both say "not counted" when it never was. Neither
//! allocates; an [`Estimator`] is four dozen numbers, whatever the number of slices.
//!
//! # The standard error
//!
//! Slices are not independent: a phase of the guest is longer than a turn. What gaps hide follows from the
//! rate's correlation over time, and slices show three things of it: the mean square of steps from slice to
//! slice, ⟨d²⟩; the mean product of two steps in a row, ⟨dd'⟩; and, for slices that were looked into halfway
//! ([`Estimator::amid`]), the mean square of the difference between halves, ⟨h²⟩. With slices of length l and
//! gaps of length g, l + g = 1:
//!
//! | the rate | ⟨d²⟩ | ⟨dd'⟩ | ⟨h²⟩ | what a gap hides |
//! |---|---|---|---|---|
//! | is new at every moment | 2s² | −s² | 4s² | gs² |
//! | walks at random | σ²(1 − l/3) | σ²l/6 | σ²l/3 | σ²g²/12 |
//! | keeps its course | d² | d² | d²l²/4 | nothing |
//!
//! All four are sums over the rate's correlation. So one weighted sum of the first three gives the fourth for
//! the first two rates and for one whose correlation falls exponentially, in a given time. For all other such
//! times it is right within a quarter, and so it is for any mixture of such rates. What keeps its course is
//! known from the products of steps further apart, and left out.
//!
//! # When there is none
//!
//! - *A rhythm in step with the slices* looks like calm. No rate whose correlation only falls with time
//!   varies more within a slice than new noise would: ⟨h²⟩ ≤ 4/3(⟨d²⟩ − ⟨dd'⟩). None has ⟨dd'⟩ below −⟨d²⟩/2.
//!   And the steps of none go together at all distances. Where one of these does not hold, neither error nor
//!   bound is given. Nor is it while a rhythm in step is seen in another event that takes turns with this
//!   one, and where slices are not looked into.
//! - *Long tails*: where a few steps make most of the sum of squares, the next may be larger than all before.
//!   There is a bound and no error.
//! - *A rhythm that is seen from all sides*: its errors cancel from beat to beat, which steps do not tell.
//!   There is a bound.

/// `count × enabled_ns / running_ns`; `None` if the event never was on: it was not counted, and no number may
/// be shown.
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
    /// Standard error of `value`, in counts; 0 when `exact`. `None` when slices cannot tell it.
    pub standard_error: Option<f64>,
    /// The error is hardly more than this, in counts: four standard errors, or what is known without one.
    /// `None` when nothing is.
    pub bound: Option<f64>,
    /// The event was on all the time: `value` was counted, not estimated.
    pub exact: bool,
}

impl Estimate {
    /// The same number of which nobody knows how far it is off; an exact one stays exact.
    pub(crate) fn unsure(self) -> Self {
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

/// Mean and variance of a series, updated one value at a time (Welford's method: no sum of large squares that
/// cancel).
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

/// Steps before a standard error can be given, and slices of which two halves must be known.
const ENOUGH: u64 = 4;
/// How far the steps of one slice are compared with later ones.
const LAGS: usize = 8;
/// The correlation time of the middle one of the three rates the standard error is exact for, in periods.
const MIDDLE: f64 = 0.27;
/// Rates whose variance is known no better than that of so few independent values have long tails: there is a
/// bound and no error.
const FEW: f64 = 20.0;
/// Of squared steps, this part in later ones makes a rhythm.
const RHYTHM: f64 = 0.3;
/// So many times more within slices than between them is no chance.
const IN_STEP: f64 = 10.0;
/// Variation within slices of a thousandth of the rate hides nothing.
const CALM: f64 = 1e-3;

/// How the rate changes from one slice to the next, and within slices.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Steps {
    n: u64,
    last_gap: f64,
    /// Squares of steps, and products of each with the one before, weighted with the gaps they span; and the
    /// weights.
    squares: f64,
    products: f64,
    gap_squares: f64,
    gap_products: f64,
    /// Not weighted: squares, fourth powers, the largest.
    second: f64,
    fourth: f64,
    largest: f64,
    /// The last steps, and sums of products of each with the one so many before.
    last: [f64; LAGS],
    lags: [f64; LAGS],
    /// Squared differences between the halves of slices, and how many.
    halves: f64,
    halved: u64,
}

/// What slices say about the error.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Doubt {
    Unknown,
    /// Variance of what the gaps hide, for each square of a period; and of steps.
    Variance {
        between: f64,
        walk: f64,
        fresh: f64,
    },
    /// As `Variance`, but no more than a hint.
    LongTail {
        between: f64,
        walk: f64,
        fresh: f64,
    },
}

/// What a rate with an exponential correlation makes of slices of the part `on` of a period: the mean square
/// of steps, the mean product of two in a row, the mean square of differences between halves, and the
/// variance of what gaps hide in a period.
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

/// The weights of the mean square of steps, of the product of two, and of the halves' differences with which
/// they make up what gaps hide: right for a rate that is new at every moment, one that walks at random, and
/// one in between.
fn weights(on: f64) -> [f64; 3] {
    let gap = 1.0 - on;
    let rows = [
        [2.0, -1.0, 4.0, gap],
        [1.0 - on / 3.0, on / 6.0, on / 3.0, gap * gap / 12.0],
        exponential(on, MIDDLE),
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

impl Steps {
    const NONE: Self = Self {
        n: 0,
        last_gap: 0.0,
        squares: 0.0,
        products: 0.0,
        gap_squares: 0.0,
        gap_products: 0.0,
        second: 0.0,
        fourth: 0.0,
        largest: 0.0,
        last: [0.0; LAGS],
        lags: [0.0; LAGS],
        halves: 0.0,
        halved: 0,
    };

    /// A step across `gap`.
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

    /// A slice counted `first` in `before` and the rest, `second`, in `after`.
    fn halves(&mut self, (first, before): (f64, f64), (second, after): (f64, f64)) {
        let difference = first / before - second / after;
        // Two parts that are not halves differ by more; and both round.
        let even = 4.0 * before * after / (before + after).powi(2);
        let rounding = (1.0 / (before * before) + 1.0 / (after * after)) / 6.0;
        self.halves += even * (difference * difference - rounding);
        self.halved += 1;
    }

    /// Of how many independent values the mean square of steps is made: few, if few steps are most of it.
    fn values(&self) -> f64 {
        let n = self.n as f64;
        2.0 / (self.fourth / (self.second * self.second) - 1.0 / n).max(1.0 / n)
    }

    /// The mean square of steps and the mean product of two in a row.
    fn moments(&self) -> (f64, f64) {
        (self.squares / self.gap_squares, self.products / self.gap_products)
    }

    /// More goes on within slices, by `times`, than from slice to slice: a rhythm keeps step with them.
    fn keeps_step(&self, mean: f64, times: f64) -> bool {
        if self.n < ENOUGH || self.halved < ENOUGH || self.gap_products <= 0.0 {
            return false;
        }
        let (squares, products) = self.moments();
        // No rate whose correlation only falls with time, or that keeps its course, varies more within
        // slices.
        let most = 4.0 / 3.0 * (squares - products) + squares / 4.0;
        self.halves / self.halved as f64 > times * most + (CALM * mean).powi(2)
    }

    fn doubt(&self, on: f64, mean: f64) -> Doubt {
        if self.n < ENOUGH || self.halved < ENOUGH || self.gap_products <= 0.0 {
            return Doubt::Unknown;
        }
        let (n, halved) = (self.n as f64, self.halved as f64);
        let (squares, products) = self.moments();
        let halves = (self.halves / halved).max(0.0);
        let fresh = (-products).clamp(0.0, squares / 2.0);
        let walk = (squares - 2.0 * fresh).max(0.0);
        let calm = squares.max(halves) <= (CALM * mean).powi(2);
        let values = if self.second > 0.0 { self.values() } else { n };
        // By how much means of so few may be off by chance.
        if !calm {
            let chance = 1.0 + 2.0 * (8.0 * n / (values.min(n) * halved)).sqrt();
            let alternates = -products > squares * (0.5 + 2.25 / values.min(n).sqrt());
            if self.keeps_step(mean, chance) || alternates {
                return Doubt::Unknown;
            }
        }
        // What keeps its course is in all products alike, and trapezoids hold it.
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
        if !calm && values < FEW {
            return Doubt::LongTail { between, walk, fresh };
        }
        let later = (2..=LAGS).map(|by| (lag(by) - course).powi(2)).sum::<f64>();
        if !calm && later > RHYTHM + 30.0 / n {
            if products < squares / 2.0 {
                return Doubt::Unknown;
            }
            // Seen from all sides. Its errors cancel from beat to beat, which steps do not tell.
            return Doubt::LongTail {
                between: of(walk, 0.0, walk * on / 3.0),
                walk,
                fresh,
            };
        }
        Doubt::Variance { between, walk, fresh }
    }
}

/// The running estimate of one event.
///
/// Times are nanoseconds of the event's *time enabled*: they stand still while the event is disabled. Rates
/// are counts per nanosecond.
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
    /// Amid the slice that is going on: when, and what it had counted.
    amid: Option<(u64, u64)>,
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
            amid: None,
        }
    }

    /// A rhythm keeps step with the slices, without doubt: more goes on within them than from one to the
    /// next. It may hide from other events that take turns with this one, where it is of their vCPU too.
    #[must_use]
    pub fn keeps_step(&self) -> bool {
        self.steps.keeps_step(self.rates.mean(), IN_STEP)
    }

    /// The event that is on had counted `count` of its slice at `at_ns`, somewhere in the middle. What goes
    /// on within slices is how a rhythm shows that keeps step with them.
    pub fn amid(&mut self, at_ns: u64, count: u64) {
        self.amid = Some((at_ns, count));
    }

    /// Counts of all slices so far.
    #[must_use]
    pub fn counted(&self) -> u64 {
        self.counted
    }

    /// The event was on from `from_ns` to `to_ns` and counted `count`. Slices come in order; a part that lies
    /// before the end of the last one is ignored.
    pub fn slice(&mut self, from_ns: u64, to_ns: u64, count: u64) {
        self.counted = self.counted.wrapping_add(count);
        if let Some((at_ns, first)) = self.amid.take()
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

    /// The rate a slice stands for at its ends. A slice much shorter than usual says little: it is completed
    /// to half the usual length with what was known before.
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

    /// By how much the rate of the last slice is higher than the one before, relative to the mean rate: 1
    /// means by as much as the mean, a negative number that it is lower. `None` with fewer than two
    /// slices or nothing counted.
    #[must_use]
    pub fn last_step(&self) -> Option<f64> {
        let mean = self.rates.mean();
        (self.steps.n > 0 && mean > 0.0).then(|| self.last_step / mean)
    }

    /// The estimate at `now_ns` of the event's time enabled. `open` is the slice it is in, if it is on: since
    /// when, and what it counted in it. `None` if it never was on.
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

    /// The standard error and the bound. See the module's text. `tail` is the time since the last slice.
    fn doubt(&self, tail: f64) -> (Option<f64>, Option<f64>) {
        let steps = &self.steps;
        let (slices, running) = (self.rates.count() as f64, self.running_ns as f64);
        let first = self.first_gap_ns as f64;
        let gaps = self.gap_ns as f64 - first;
        let on = running / (running + gaps);
        let (known, between, walk, fresh) = match steps.doubt(on, self.rates.mean()) {
            Doubt::Unknown => return (None, None),
            Doubt::Variance { between, walk, fresh } => (true, between, walk, fresh),
            Doubt::LongTail { between, walk, fresh } => (false, between, walk, fresh),
        };
        let mut variance = between * steps.gap_squares / (1.0 - on).powi(2);
        // The ends have one side only.
        let length = running / slices;
        let period = length + gaps / steps.n as f64;
        for end in [first, tail] {
            variance += end * (end + length) * (end / period * walk / 3.0 + fresh);
        }
        // Counts are whole: both ends of a slice round, which makes a variance of 1/6, and each gap repeats
        // that.
        let unseen = (gaps + first + tail) / running;
        variance += slices * unseen * (1.0 + unseen) / 6.0;
        let error = variance.sqrt();
        if known {
            return (Some(error), Some(4.0 * error));
        }
        // Of what made the variance there may be some more, or less, than the slices' share.
        (None, Some(4.0 * error + steps.largest * period))
    }
}

#[cfg(test)]
mod tests;
