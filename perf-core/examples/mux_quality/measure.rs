//! Simulation of a multiplexing policy on a trace, with fewer slots than events, and comparison of
//! the resulting estimates with the true counts.

use std::sync::Arc;

use fastrand::Rng;
use perf_core::estimate::{CountEstimator, linear};
use perf_core::mux::{MuxGroupKey, MuxPolicy, MuxQueue, SlotOfferOutcome};
use perf_core::pmu::sim::SimPmu;
use perf_core::time::{Clock, ManualClock};
use perf_core::*;

use super::traces::{SEEDS, TICK_NS, Trace};

/// Results of the simulation of one policy on one trace with one seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Run {
    /// Mean relative error of the events' estimates (|estimate - truth| / truth) with linear
    /// scaling.
    pub linear_error: f64,
    /// Mean relative error of the events' estimates (|estimate - truth| / truth) with the
    /// interpolating estimator.
    pub error: f64,
    /// Statistics of the estimates' error bars.
    pub bars: ErrorBars,
    /// Number of group starts per second.
    pub switches_per_s: f64,
}

/// Statistics of the error bars of estimates, compared with the actual errors.
#[derive(Clone, Copy, Debug, Default)]
pub struct ErrorBars {
    /// Number of estimates in these statistics.
    pub events: f64,
    /// `known`: number of estimates with a standard error. `covered`: number of these estimates
    /// whose error is at most two standard errors.
    pub known: f64,
    pub covered: f64,
    /// `bounded`: number of estimates with an error bound but no standard error. `held`: number of
    /// these estimates whose error is within the bound.
    pub bounded: f64,
    pub held: f64,
    /// Two sums over the estimates with a standard error: the squared standard errors, and the
    /// squared actual errors. All errors are relative to the true counts.
    variance: f64,
    square_error: f64,
}

impl ErrorBars {
    /// Adds one estimate to the statistics.
    pub fn add(&mut self, truth: u64, value: u64, standard_error: Option<f64>, bound: Option<f64>) {
        let error = value as f64 - truth as f64;
        let truth = (truth as f64).max(1.0);
        self.events += 1.0;
        if let Some(sure) = standard_error {
            self.known += 1.0;
            self.covered += f64::from(u8::from(error.abs() <= 2.0 * sure));
            self.variance += (sure / truth).powi(2);
            self.square_error += (error / truth).powi(2);
        } else if let Some(bound) = bound {
            self.bounded += 1.0;
            self.held += f64::from(u8::from(error.abs() <= bound));
        }
    }

    /// Adds the statistics `other` to these.
    pub fn merge(&mut self, other: &Self) {
        self.events += other.events;
        self.known += other.known;
        self.covered += other.covered;
        self.bounded += other.bounded;
        self.held += other.held;
        self.variance += other.variance;
        self.square_error += other.square_error;
    }

    /// Returns the fraction of estimates with a standard error whose error is at most two standard
    /// errors.
    pub fn within_two(&self) -> f64 {
        self.covered / self.known
    }

    /// Returns the fraction of estimates with a bound whose error is within the bound.
    pub fn within_bound(&self) -> f64 {
        self.held / self.bounded
    }

    /// Returns the root mean square of the standard errors divided by the root mean square of the
    /// actual errors. The ideal ratio is 1. If it is smaller, the standard errors are too small.
    pub fn confidence_ratio(&self) -> f64 {
        (self.variance / self.square_error).sqrt()
    }
}

struct Event {
    curve: usize,
    on_since: Option<u64>,
    running_ns: u64,
    estimator: CountEstimator,
}

/// Simulates `policy` with multiplexing intervals of `turn_ns` nanoseconds on `trace`, and measures
/// the errors of the estimates. Intervals end only at multiples of `grid_ns` nanoseconds.
pub fn run(trace: &Trace, policy: MuxPolicy, turn_ns: u64, grid_ns: u64, seed: u64) -> Run {
    let mut rng = Rng::with_seed(seed);
    let n = trace.events.len();
    let mut order: Vec<usize> = (0..n).collect();
    rng.shuffle(&mut order);
    let start = rng.u64(0..TICK_NS * n as u64);
    let mut events: Vec<Event> = order
        .into_iter()
        .map(|curve| Event {
            curve,
            on_since: None,
            running_ns: 0,
            estimator: CountEstimator::new(),
        })
        .collect();
    let counts = |e: usize, from: u64, to: u64| trace.events[e].until(to) - trace.events[e].until(from);
    let mut queue = MuxQueue::new(policy, turn_ns);
    (0..n).for_each(|key| queue.insert(MuxGroupKey::from(key)));

    // Simulates the trace from `start` to its end. All times are positions in the trace, in
    // nanoseconds.
    let mut now = start;
    let mut switches = 0u64;
    let mut left = None;
    loop {
        let mut used = 0;
        let mut on = vec![None; trace.slots];
        queue.fill(|key| {
            if used == trace.slots {
                return SlotOfferOutcome::NoRoom;
            }
            on[used] = Some(key);
            used += 1;
            SlotOfferOutcome::Taken
        });
        for (key, event) in events.iter_mut().enumerate() {
            match (event.on_since, on.contains(&Some(MuxGroupKey::from(key)))) {
                (Some(since), false) => {
                    let count = counts(event.curve, since, now);
                    event.estimator.slice(since - start, now - start, count);
                    event.running_ns += now - since;
                    event.on_since = None;
                }
                (None, true) => {
                    event.on_since = Some(now);
                    switches += 1;
                }
                _ => {}
            }
        }
        if let Some(key) = left {
            let event: &Event = &events[usize::from(key)];
            queue.slice_ended(key, event.estimator.last_step());
            if event.estimator.detects_aliasing() {
                queue.record_aliasing();
            }
        }
        let due = queue.next_turn_ns().unwrap_or(u64::MAX).max(now + 1);
        now = due.div_ceil(grid_ns).saturating_mul(grid_ns);
        if now >= trace.length_ns {
            break;
        }
        left = queue.rotate_if_due(now);
        if left.is_some()
            && let Some(key) = queue.mid_slice()
        {
            let event = &mut events[usize::from(key)];
            let since = event.on_since.unwrap_or(now);
            event
                .estimator
                .mid_slice(now - start, counts(event.curve, since, now));
        }
    }

    let end = trace.length_ns;
    let mut result = Run {
        switches_per_s: switches as f64 / ((end - start) as f64 / 1e9),
        ..Run::default()
    };
    for event in &events {
        let truth = counts(event.curve, start, end) as f64;
        let open = event
            .on_since
            .map(|since| (since - start, counts(event.curve, since, end)));
        let running = event.running_ns + event.on_since.map_or(0, |since| end - since);
        let counted = event.estimator.counted() + open.map_or(0, |o| o.1);
        let error = |value: f64| (value - truth).abs() / truth.max(1.0) / n as f64;
        result.linear_error += error(linear(counted, end - start, running).unwrap_or(0) as f64);
        match event.estimator.estimate(end - start, open) {
            Some(estimate) => {
                result.error += error(estimate.value as f64);
                let known =
                    |confidence_ratio: Option<f64>| confidence_ratio.filter(|_| !queue.has_aliasing());
                result.bars.add(
                    truth as u64,
                    estimate.value,
                    known(estimate.standard_error),
                    known(estimate.bound),
                );
            }
            None => result.error += error(0.0),
        }
    }
    result
}

/// Runs the simulation of [`run`] with a [`PerfCore`] and a simulated PMU. Returns the estimate of
/// each event, in the order of the trace's events, and the number of group starts.
pub fn run_core(trace: &Trace, policy: MuxPolicy, turn_ns: u64, seed: u64) -> (Vec<CoreEstimate>, u64) {
    let mut rng = Rng::with_seed(seed);
    let n = trace.events.len();
    let mut order: Vec<usize> = (0..n).collect();
    rng.shuffle(&mut order);
    let start = rng.u64(0..TICK_NS * n as u64);
    let clock = Arc::new(ManualClock::new());
    clock.advance(start);
    let core = PerfCore::new(PerfCoreConfig {
        clock: Arc::clone(&clock) as Arc<dyn Clock>,
        mux: policy,
        tick_hz: 1_000_000_000 / turn_ns,
        ..PerfCoreConfig::default()
    });
    let pmu = Arc::new(SimPmu::with_slots(trace.slots));
    core.register(Arc::clone(&pmu) as Arc<dyn Pmu>);
    let vcpu = core.add_vcpu(VcpuId(0), 1).expect("the first vCPU");
    let session = core.session(0, SessionRole::Admin);
    let handles: Vec<(usize, EventHandle)> = order
        .into_iter()
        .map(|curve| {
            let attr = Attr::counting(EventType::SIM, curve as u64);
            let target = EventOpenTarget::Vcpu(VcpuId(0));
            let opened = core.open(&session, attr, target, None, OpenFlags::default());
            (curve, opened.expect("a simulated event"))
        })
        .collect();
    vcpu.sched_in();
    let mut now = start;
    while now < trace.length_ns {
        let due = core.next_turn_ns().unwrap_or(u64::MAX).max(now + 1);
        // Under the rotation policy, an interval lasts one tick.
        let due = match policy {
            MuxPolicy::Rotate if now == start => now + 1,
            MuxPolicy::Rotate => now + turn_ns,
            MuxPolicy::Adaptive => due,
        };
        let next = due.min(trace.length_ns);
        pmu.advance(VcpuId(0), |curve| {
            let curve = &trace.events[curve as usize];
            curve.until(next) - curve.until(now)
        });
        clock.advance(next - now);
        now = next;
        if now < trace.length_ns {
            core.rotate();
        }
    }
    let mut estimates: Vec<_> = handles
        .iter()
        .map(|(curve, handle)| {
            let estimate = handle.estimate().expect("an open event");
            let truth = trace.events[*curve].until(now) - trace.events[*curve].until(start);
            let estimate = CoreEstimate {
                truth,
                value: estimate.map(|e| e.value),
                standard_error: estimate.and_then(|e| e.standard_error),
                bound: estimate.and_then(|e| e.bound),
            };
            (*curve, estimate)
        })
        .collect();
    estimates.sort_by_key(|(curve, _)| *curve);
    (
        estimates.into_iter().map(|(_, e)| e).collect(),
        pmu.calls().starts,
    )
}

/// The estimate that a core returns for an event, and the event's true count.
#[derive(Clone, Copy, Debug)]
pub struct CoreEstimate {
    pub truth: u64,
    pub value: Option<u64>,
    pub standard_error: Option<f64>,
    pub bound: Option<f64>,
}

/// Returns the mean relative error of the estimates.
pub fn mean_error(estimates: &[CoreEstimate]) -> f64 {
    let error = |e: &CoreEstimate| {
        let truth = e.truth as f64;
        (e.value.unwrap_or(0) as f64 - truth).abs() / truth.max(1.0)
    };
    estimates.iter().map(error).sum::<f64>() / estimates.len() as f64
}

/// Returns statistics of the error bars of the estimates.
pub fn bars(estimates: &[CoreEstimate]) -> ErrorBars {
    let mut bars = ErrorBars::default();
    for e in estimates {
        bars.add(e.truth, e.value.unwrap_or(0), e.standard_error, e.bound);
    }
    bars
}

/// Simulates one policy on one trace, with each of the first `seeds` seeds.
pub fn runs(trace: &Trace, policy: MuxPolicy, turn_ns: u64, grid_ns: u64, seeds: usize) -> Vec<Run> {
    SEEDS
        .iter()
        .take(seeds)
        .map(|&seed| run(trace, policy, turn_ns, grid_ns, seed))
        .collect()
}

/// Returns the sum of the error bar statistics of all runs.
pub fn all_bars(runs: &[Run]) -> ErrorBars {
    let mut all = ErrorBars::default();
    runs.iter().for_each(|run| all.merge(&run.bars));
    all
}

/// A comparison of two methods on one trace: the adaptive policy with the interpolating estimator,
/// and round robin with linear scaling.
#[derive(Clone, Debug)]
pub struct Comparison {
    pub rotate: Vec<Run>,
    pub adaptive: Vec<Run>,
    pub base: Summary,
    pub ours: Summary,
}

impl Comparison {
    /// Measures and compares both methods on `trace`. Intervals of the adaptive policy end only at
    /// multiples of `grid_ns` nanoseconds.
    pub fn new(trace: &Trace, grid_ns: u64, seeds: usize) -> Self {
        let rotate = runs(trace, MuxPolicy::Rotate, TICK_NS, 1, seeds);
        let adaptive = runs(trace, MuxPolicy::Adaptive, TICK_NS, grid_ns, seeds);
        Self::of(rotate, adaptive)
    }

    /// Compares the runs of both methods, which must have the same trace and seeds.
    pub fn of(rotate: Vec<Run>, adaptive: Vec<Run>) -> Self {
        Self {
            base: summarise(&rotate, |r| r.linear_error),
            ours: summarise(&adaptive, |r| r.error),
            rotate,
            adaptive,
        }
    }

    /// Returns the amount by which the mean error of the adaptive policy exceeds that of round
    /// robin, minus the expected noise. The noise is two standard deviations of the difference over
    /// the seeds.
    pub fn excess(&self) -> f64 {
        let noise = 2.0 * self.base.deviation.hypot(self.ours.deviation);
        (self.ours.mean - self.base.mean - noise).max(0.0)
    }
}

/// Mean and standard deviation of a value over runs with different seeds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Summary {
    pub mean: f64,
    pub deviation: f64,
}

/// Returns the mean and the standard deviation of `figure` over several runs.
pub fn summarise(runs: &[Run], figure: impl Fn(&Run) -> f64) -> Summary {
    let n = runs.len() as f64;
    let mean = runs.iter().map(&figure).sum::<f64>() / n;
    let variance = runs.iter().map(|r| (figure(r) - mean).powi(2)).sum::<f64>() / (n - 1.0);
    Summary {
        mean,
        deviation: variance.sqrt(),
    }
}
