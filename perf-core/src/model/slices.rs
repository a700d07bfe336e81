//! The slices an event was on, fed to its [`Estimator`], and sums of estimates over a family.
//!
//! A slice lasts from when the event goes on until it goes off for another event. The axis is the event's
//! time enabled: when its vCPU pauses and nothing else had its slot meanwhile, that time stands still and the
//! slice simply goes on.

use crate::estimate::{Estimate, Estimator};
use crate::model::state::State;
use crate::model::totals::Totals;

/// The slices of one event.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Slices {
    estimator: Estimator,
    /// The slice that is not closed yet: time enabled and count at its beginning.
    open: Option<(u64, u64)>,
    /// Time enabled when the event last went off.
    off_ns: u64,
    /// Time enabled at the last reset: the estimator's zero.
    origin_ns: u64,
}

impl Slices {
    /// The event goes on with `enabled_ns` on its clock and `count` counted so far. Returns whether that
    /// closed a slice.
    pub fn on(&mut self, enabled_ns: u64, count: u64) -> bool {
        if let Some((from_ns, at)) = self.open {
            if self.off_ns == enabled_ns {
                return false;
            }
            self.close(from_ns, count.wrapping_sub(at));
        }
        self.open.replace((enabled_ns, count)).is_some()
    }

    /// It went off for another event with `count` counted so far. Returns whether that closed a slice.
    pub fn end(&mut self, count: u64) -> bool {
        let Some((from_ns, at)) = self.open.take() else {
            return false;
        };
        self.close(from_ns, count.wrapping_sub(at));
        true
    }

    fn close(&mut self, from_ns: u64, counted: u64) {
        self.estimator
            .slice(from_ns - self.origin_ns, self.off_ns - self.origin_ns, counted);
    }

    /// It is on, amid its slice, with `count` counted so far.
    pub fn amid(&mut self, enabled_ns: u64, count: u64) {
        if let Some((_, at)) = self.open {
            self.estimator
                .amid(enabled_ns - self.origin_ns, count.wrapping_sub(at));
        }
    }

    /// It goes off, perhaps for no more than a pause. What it counted is asked for later.
    pub fn off(&mut self, enabled_ns: u64) {
        self.off_ns = enabled_ns;
    }

    /// The count was set to `count`: everything begins anew here.
    pub fn reset(&mut self, enabled_ns: u64, state: State, count: u64) {
        *self = Self {
            estimator: Estimator::new(),
            open: (state == State::Active).then_some((enabled_ns, count)),
            off_ns: enabled_ns,
            origin_ns: enabled_ns,
        };
    }

    /// The last step of its rate ([`Estimator::last_step`]).
    pub fn last_step(&self) -> Option<f64> {
        self.estimator.last_step()
    }

    /// Whether a rhythm keeps step with the slices ([`Estimator::keeps_step`]).
    pub fn keeps_step(&self) -> bool {
        self.estimator.keeps_step()
    }

    /// The estimate for an event in `state` with `count` counted after `enabled_ns`.
    pub fn estimate(&self, enabled_ns: u64, state: State, count: u64) -> Option<Estimate> {
        let now_ns = enabled_ns - self.origin_ns;
        let Some((from_ns, at)) = self.open else {
            return self.estimator.estimate(now_ns, None);
        };
        let counted = count.wrapping_sub(at);
        if state == State::Active {
            return self
                .estimator
                .estimate(now_ns, Some((from_ns - self.origin_ns, counted)));
        }
        let mut all = *self;
        all.close(from_ns, counted);
        all.estimator.estimate(now_ns, None)
    }
}

/// Estimates of several events added up.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EstimateSum {
    value: u64,
    /// Sum of the squared standard errors.
    variance: f64,
    /// Some part has no standard error.
    unsure: bool,
    /// Sum of the bounds; some part has none.
    bound: f64,
    boundless: bool,
    /// Some part was estimated.
    scaled: bool,
    /// Some part was enabled and never on: nothing is known of it, and a sum without it would be short.
    missing: bool,
    /// Some part was counted.
    counted: bool,
}

impl EstimateSum {
    /// One event's part: its estimate, or, without one, its totals as they are if it was on all the time.
    pub fn of(totals: Totals, estimate: Option<Estimate>) -> Self {
        let running = totals.times.running_ns;
        match estimate {
            Some(estimate) => Self {
                value: estimate.value,
                variance: estimate.standard_error.map_or(0.0, |e| e * e),
                unsure: estimate.standard_error.is_none(),
                bound: estimate.bound.unwrap_or(0.0),
                boundless: estimate.bound.is_none(),
                scaled: !estimate.exact,
                missing: false,
                counted: true,
            },
            None if totals.times.enabled_ns == running => Self {
                value: totals.count,
                counted: running > 0 || totals.count > 0,
                ..Self::default()
            },
            // It was enabled and never on: its part is not known.
            None => Self {
                unsure: true,
                bound: 0.0,
                boundless: true,
                scaled: true,
                missing: true,
                ..Self::default()
            },
        }
    }

    pub fn add(&mut self, other: Self) {
        self.value = self.value.saturating_add(other.value);
        self.variance += other.variance;
        self.unsure |= other.unsure;
        self.bound += other.bound;
        self.boundless |= other.boundless;
        self.scaled |= other.scaled;
        self.counted |= other.counted;
        self.missing |= other.missing;
    }

    /// The sum; `None` if no part was counted, or one was enabled and not counted: the sum would be short.
    pub fn get(&self) -> Option<Estimate> {
        (self.counted && !self.missing).then(|| Estimate {
            value: self.value,
            standard_error: (!self.unsure).then(|| self.variance.sqrt()),
            bound: (!self.boundless).then_some(self.bound),
            exact: !self.scaled,
        })
    }
}
