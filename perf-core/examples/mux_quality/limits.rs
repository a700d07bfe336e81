//! Theoretical limits at a given number of intervals: a bound for every estimator, and two ideas
//! that were tried.
//!
//! # The bound
//! For a rate with a correlation that decreases exponentially with time, three errors are computed
//! analytically. The first is the error of linear scaling. The second assumes full knowledge of the
//! rate during every slice, of its mean, variance and correlation time, and that it is Gaussian.
//! The third assumes the same knowledge of a rate that jumps between two values. The remaining
//! error of the latter two is the variance of the integral over the gaps given both ends: no
//! estimator that sees only slices can do better.

use fastrand::Rng;

use super::traces::{TICK_NS, Trace};

/// Errors for one gap, in units of the rate's deviation and a period.
#[derive(Clone, Copy, Debug)]
pub struct GapErrors {
    /// Error of linear scaling.
    pub linear: f64,
    /// Error with full knowledge of a Gaussian rate in all slices, and of its distribution.
    pub gaussian: f64,
    /// Error with full knowledge of a rate that jumps between two values.
    pub telegraph: f64,
}

/// Computes the limit for slices that cover the fraction `on` of a period and a correlation time of
/// `time` periods.
pub fn limit(on: f64, time: f64) -> GapErrors {
    let gap = 1.0 - on;
    // Mean correlation within a slice, and between slices `by` periods apart.
    let x = on / time;
    let within = 2.0 / x * (1.0 - (1.0 - (-x).exp()) / x);
    let next =
        (2.0 / x).powi(2) * (((x - 1.0 / time) / 2.0).exp() - ((-x - 1.0 / time) / 2.0).exp()).powi(2) / 4.0;
    let linear = within + 2.0 * next / (1.0 - (-1.0 / time).exp()) - 2.0 * time;
    let gaussian = 2.0 * time * gap - 4.0 * time * time * (gap / (2.0 * time)).tanh();
    GapErrors {
        linear: linear.sqrt(),
        gaussian: gaussian.sqrt(),
        telegraph: telegraph(gap, time).sqrt(),
    }
}

/// Returns the mean, over both ends, of the variance of a telegraph process's integral over a gap,
/// between 1 and -1 with equal probability.
fn telegraph(gap: f64, time: f64) -> f64 {
    const STEPS: usize = 400;
    let dt = gap / STEPS as f64;
    let at = |step: usize| (step as f64 + 0.5) * dt;
    let correlation = |apart: f64| (-apart / time).exp();
    let ends = correlation(gap);
    let mut variance = 0.0;
    for last in [1.0, -1.0] {
        // The first end is 1 without loss of generality.
        let chance = (1.0 + last * ends) / 2.0;
        let mean = |t: f64| (correlation(t) + last * correlation(gap - t)) / (1.0 + last * ends);
        for i in 0..STEPS {
            for j in 0..STEPS {
                let (early, late) = (at(i.min(j)), at(i.max(j)));
                let apart = correlation(late - early);
                let both =
                    (apart + last * correlation(early) * correlation(gap - late)) / (1.0 + last * ends);
                variance += chance * dt * dt * (both - mean(early) * mean(late));
            }
        }
    }
    variance
}

/// An interval: its duration, and the counts of the events in it.
struct Segment {
    length: f64,
    counts: Vec<(usize, f64)>,
}

/// Mean errors over the events of a trace, with one interval per tick.
#[derive(Clone, Copy, Debug, Default)]
pub struct PolicyErrors {
    /// Round robin, linear scaling.
    pub rotate: f64,
    /// A different order in each rotation, linear scaling.
    pub shuffled: f64,
    /// Round robin; gaps are filled from correlated events that were on meanwhile.
    pub together: f64,
}

impl PolicyErrors {
    /// Adds `other` with a weight.
    pub fn add(&mut self, other: &Self, weight: f64) {
        self.rotate += weight * other.rotate;
        self.shuffled += weight * other.shuffled;
        self.together += weight * other.together;
    }
}

/// Measures both ideas on `trace`.
pub fn ideas(trace: &Trace, seed: u64) -> PolicyErrors {
    let mut rng = Rng::with_seed(seed);
    let regular = segments(trace, &mut rng, false);
    let shuffled = segments(trace, &mut rng, true);
    PolicyErrors {
        rotate: error(trace, &regular, |e| scaled(&regular.1, e)),
        shuffled: error(trace, &shuffled, |e| scaled(&shuffled.1, e)),
        together: error(trace, &regular, |e| with_others(&regular.1, e)),
    }
}

fn segments(trace: &Trace, rng: &mut Rng, shuffle: bool) -> (u64, Vec<Segment>) {
    let n = trace.events.len();
    let mut order: Vec<usize> = (0..n).collect();
    rng.shuffle(&mut order);
    let start = rng.u64(0..TICK_NS * n as u64);
    let mut on: Vec<usize> = order[..trace.slots].to_vec();
    let mut line: Vec<usize> = order[trace.slots..].to_vec();
    line.reverse();
    let (mut now, mut list) = (start, Vec::new());
    while now < trace.length_ns {
        let next = (now + TICK_NS).min(trace.length_ns);
        let count = |e: usize| (trace.events[e].until(next) - trace.events[e].until(now)) as f64;
        list.push(Segment {
            length: (next - now) as f64,
            counts: on.iter().map(|&e| (e, count(e))).collect(),
        });
        let left = on.remove(0);
        if line.is_empty() {
            line.extend((0..n).filter(|e| !on.contains(e)));
            rng.shuffle(&mut line);
        }
        if shuffle {
            // A round ends when every event has been on in it.
            on.extend(line.pop());
        } else {
            line.insert(0, left);
            on.extend(line.pop());
        }
        now = next;
    }
    (start, list)
}

fn error(trace: &Trace, run: &(u64, Vec<Segment>), estimate: impl Fn(usize) -> f64) -> f64 {
    let of = |e: usize| {
        let curve = &trace.events[e];
        let truth = (curve.until(trace.length_ns) - curve.until(run.0)) as f64;
        (estimate(e) - truth).abs() / truth.max(1.0)
    };
    (0..trace.events.len()).map(of).sum::<f64>() / trace.events.len() as f64
}

fn count_of(segment: &Segment, event: usize) -> Option<f64> {
    segment.counts.iter().find(|c| c.0 == event).map(|c| c.1)
}

fn mean_rate(run: &[Segment], event: usize) -> f64 {
    let (mut counted, mut time) = (0.0, 0.0);
    for segment in run {
        if let Some(count) = count_of(segment, event) {
            counted += count;
            time += segment.length;
        }
    }
    if time > 0.0 { counted / time } else { 0.0 }
}

fn scaled(run: &[Segment], event: usize) -> f64 {
    mean_rate(run, event) * run.iter().map(|s| s.length).sum::<f64>()
}

/// Estimates an event's rate as its mean plus a fraction of the deviation of the other events that
/// were on. The fraction is a regression over the intervals in which the event itself was on.
fn with_others(run: &[Segment], event: usize) -> f64 {
    let events = 1 + run.iter().flat_map(|s| &s.counts).map(|c| c.0).max().unwrap_or(0);
    let means: Vec<f64> = (0..events).map(|e| mean_rate(run, e)).collect();
    let own = means[event];
    let others = |segment: &Segment| {
        let mut list = segment
            .counts
            .iter()
            .filter(|c| c.0 != event && means[c.0] > 0.0)
            .peekable();
        list.peek()?;
        let (mut n, mut sum) = (0.0, 0.0);
        for (e, count) in list {
            n += 1.0;
            sum += count / segment.length / means[*e];
        }
        Some(sum / n)
    };
    if own == 0.0 {
        return 0.0;
    }
    let pairs: Vec<(f64, f64)> = run
        .iter()
        .filter_map(|s| Some((others(s)?, count_of(s, event)? / s.length / own)))
        .collect();
    let n = pairs.len() as f64;
    let (x0, y0) = pairs
        .iter()
        .fold((0.0, 0.0), |m, p| (m.0 + p.0 / n, m.1 + p.1 / n));
    let (mut xx, mut xy, mut yy) = (0.0, 0.0, 0.0);
    for (x, y) in &pairs {
        xx += (x - x0) * (x - x0);
        xy += (x - x0) * (y - y0);
        yy += (y - y0) * (y - y0);
    }
    // Insignificant correlations are ignored.
    let telling = xx > 0.0 && yy > 0.0 && xy * xy / (xx * yy) * n > 4.0;
    let part = if telling { xy / xx } else { 0.0 };
    run.iter()
        .map(|s| match (count_of(s, event), others(s)) {
            (Some(count), _) => count,
            (None, Some(x)) => own * s.length * (1.0 + part * (x - x0)),
            (None, None) => own * s.length,
        })
        .sum()
}
