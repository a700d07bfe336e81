//! Time slices of multiplexed events, as input of a [`CountEstimator`], and sums of estimates over
//! a family.
//!
//! A slice starts when the event is scheduled in and ends when another event replaces it. Slices
//! are measured in time enabled, which stops while the vCPU is paused. A pause in which no other
//! event uses the slot therefore does not end the slice.

use crate::estimate::{CountEstimator, Estimate};
use crate::model::state::EventState;
use crate::model::totals::Totals;

/// The time slices of one multiplexed event, and the estimator to which they are added.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Slices {
    estimator: CountEstimator,
    /// Time enabled (in nanoseconds) and count at the start of the current slice, or `None` between
    /// slices.
    open: Option<(u64, u64)>,
    /// Time enabled when the event was last scheduled out, in nanoseconds.
    off_ns: u64,
    /// Time enabled at the last reset, in nanoseconds. The estimator starts at this time.
    origin_ns: u64,
}

impl Slices {
    /// Records that the event is scheduled in at time enabled `enabled_ns`, with count `count`.
    /// Returns `true` if this ends the previous slice.
    pub fn sched_in(&mut self, enabled_ns: u64, count: u64) -> bool {
        if let Some((from_ns, at)) = self.open {
            if self.off_ns == enabled_ns {
                return false;
            }
            self.close(from_ns, count.wrapping_sub(at));
        }
        self.open.replace((enabled_ns, count)).is_some()
    }

    /// Ends the slice of an event whose slot was given to another event, at count `count`. Returns
    /// `true` if there was a slice to end.
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

    /// Records the count `count` of an active event at a read in the middle of its slice.
    pub fn mid_slice(&mut self, enabled_ns: u64, count: u64) {
        if let Some((_, at)) = self.open {
            self.estimator
                .mid_slice(enabled_ns - self.origin_ns, count.wrapping_sub(at));
        }
    }

    /// Records that the event is scheduled out at time enabled `enabled_ns`, possibly only because
    /// its vCPU pauses. The count at that time is not known yet.
    pub fn off(&mut self, enabled_ns: u64) {
        self.off_ns = enabled_ns;
    }

    /// Discards all slices after the event's count was set to `count`.
    pub fn reset(&mut self, enabled_ns: u64, state: EventState, count: u64) {
        *self = Self {
            estimator: CountEstimator::new(),
            open: (state == EventState::Active).then_some((enabled_ns, count)),
            off_ns: enabled_ns,
            origin_ns: enabled_ns,
        };
    }

    /// Returns the change of the event's rate between its last two slices, relative to the mean
    /// rate ([`CountEstimator::last_step`]).
    pub fn last_step(&self) -> Option<f64> {
        self.estimator.last_step()
    }

    /// Returns `true` if a periodic guest pattern aliases with the slices
    /// ([`CountEstimator::detects_aliasing`]).
    pub fn detects_aliasing(&self) -> bool {
        self.estimator.detects_aliasing()
    }

    /// Returns an estimate of the event's count at time enabled `enabled_ns`. `state` and `count`
    /// are the event's current state and count.
    pub fn estimate(&self, enabled_ns: u64, state: EventState, count: u64) -> Option<Estimate> {
        let now_ns = enabled_ns - self.origin_ns;
        let Some((from_ns, at)) = self.open else {
            return self.estimator.estimate(now_ns, None);
        };
        let counted = count.wrapping_sub(at);
        if state == EventState::Active {
            return self
                .estimator
                .estimate(now_ns, Some((from_ns - self.origin_ns, counted)));
        }
        let mut all = *self;
        all.close(from_ns, counted);
        all.estimator.estimate(now_ns, None)
    }
}

/// Sum of the estimates of several events.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EstimateSum {
    value: u64,
    /// Sum of the squared standard errors of the estimates.
    variance: f64,
    /// `true` if at least one of the estimates has no standard error.
    unsure: bool,
    /// Sum of the error bounds of the estimates. Valid if every estimate has a bound.
    bound: f64,
    boundless: bool,
    /// `true` if at least one of the counts is estimated rather than exact.
    scaled: bool,
    /// `true` if some event was enabled but never active. The sum is then unknown, because the
    /// count of that event is missing.
    missing: bool,
    /// `true` if at least one of the events was counted.
    counted: bool,
}

impl EstimateSum {
    /// Creates the sum for one event: its estimate or, if there is no estimate and the event was
    /// always active, its exact count.
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
            // The event was enabled but never active, so its count is unknown.
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

    /// Returns the estimate 0, for an event whose count is known to be zero.
    pub fn zero(counted: bool) -> Self {
        Self {
            counted,
            ..Self::default()
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

    /// Returns the sum. Returns `None` if none of the events was counted, or if one of them was
    /// enabled but never active.
    pub fn get(&self) -> Option<Estimate> {
        (self.counted && !self.missing).then(|| Estimate {
            value: self.value,
            standard_error: (!self.unsure).then(|| self.variance.sqrt()),
            bound: (!self.boundless).then_some(self.bound),
            exact: !self.scaled,
        })
    }
}
