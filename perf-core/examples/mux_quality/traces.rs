//! Traces on which estimators and multiplexing policies are measured: the true rates of several
//! events over time. Formulas, lengths and seeds are fixed.

use std::sync::Arc;

use fastrand::Rng;

/// Length of a step of a trace, in nanoseconds. The rates are constant within a step.
pub const STEP_NS: u64 = 100_000;
/// Number of nanoseconds in a millisecond.
pub const MS: u64 = 1_000_000;
/// Length of the synthetic traces, in nanoseconds.
const LENGTH_NS: u64 = 10_000 * MS;
/// Number of events of a fixed trace, synthetic or recorded.
pub const EVENTS: usize = 8;
/// Number of slots on which the events of a trace are multiplexed.
pub const SLOTS: usize = 2;
/// Multiplexing interval of round robin, the reference policy, in nanoseconds.
pub const TICK_NS: u64 = 4 * MS;
/// Seeds with which each trace is measured. A seed determines the start of the trace relative to
/// the tick, the order of the events, and the random choices of the policy.
pub const SEEDS: [u64; 16] = [
    0x9e37, 0x79b9, 0x7f4a, 0x7c15, 0xf39c, 0xc060, 0x5ced, 0xc834, 0x1082, 0x276b, 0xf3a2, 0x7251, 0xf86c,
    0x6a11, 0xd0c1, 0x8e95,
];

/// The true counts of one event over time.
#[derive(Clone, Debug)]
pub struct Curve {
    /// Total count at the start of each step, and at the end of the last step.
    sums: Arc<[f64]>,
}

impl Curve {
    fn new(rates: impl Iterator<Item = f64>) -> Self {
        let mut sum = 0.0;
        let mut sums = vec![0.0];
        sums.extend(rates.map(|rate| {
            sum += rate.max(0.0) * COUNTS_PER_STEP;
            sum
        }));
        Self { sums: sums.into() }
    }

    /// Returns the number of counts of the event in the first `ns` nanoseconds.
    pub fn until(&self, ns: u64) -> u64 {
        let steps = self.sums.len() - 1;
        let at = (ns / STEP_NS) as usize;
        if at >= steps {
            return self.sums[steps] as u64;
        }
        let part = (ns % STEP_NS) as f64 / STEP_NS as f64;
        (self.sums[at] + (self.sums[at + 1] - self.sums[at]) * part) as u64
    }
}

/// Number of counts per step at a rate of 1, which is 10^8 counts per second.
const COUNTS_PER_STEP: f64 = 10_000.0;

/// The true counts of several events of one program over time.
#[derive(Clone, Debug)]
pub struct Trace {
    pub name: String,
    pub events: Vec<Curve>,
    pub length_ns: u64,
    /// Number of slots on which the events are multiplexed.
    pub slots: usize,
}

impl Trace {
    /// Creates a trace from the rates of each event, one rate per step.
    pub fn from_rates(name: String, rates: Vec<Vec<f64>>, slots: usize) -> Self {
        Self {
            name: name.to_owned(),
            length_ns: rates.first().map_or(0, |r| r.len() as u64 * STEP_NS),
            events: rates.into_iter().map(|r| Curve::new(r.into_iter())).collect(),
            slots,
        }
    }
}

fn steps() -> u64 {
    LENGTH_NS / STEP_NS
}

/// Creates a trace whose event `e` has rate `rate(e, t)`, with `t` in milliseconds.
fn formula(name: &'static str, rate: impl Fn(usize, f64) -> f64) -> Trace {
    let ms_of = |step: u64| step as f64 * STEP_NS as f64 / MS as f64;
    Trace {
        name: name.to_owned(),
        events: (0..EVENTS)
            .map(|e| Curve::new((0..steps()).map(|s| rate(e, ms_of(s)))))
            .collect(),
        length_ns: LENGTH_NS,
        slots: SLOTS,
    }
}

/// Creates a trace of random events. `rates(e, rng)` returns the rates of event `e`, one per step.
fn drawn(name: &'static str, seed: u64, rates: impl Fn(usize, &mut Rng) -> Vec<f64>) -> Trace {
    Trace {
        name: name.to_owned(),
        events: (0..EVENTS)
            .map(|e| Curve::new(rates(e, &mut Rng::with_seed(seed + e as u64)).into_iter()))
            .collect(),
        length_ns: LENGTH_NS,
        slots: SLOTS,
    }
}

/// Returns a random number of steps with an exponential distribution, at least 1.
fn exponential_steps(rng: &mut Rng, mean_ms: f64) -> usize {
    let ms = -mean_ms * (1.0 - rng.f64()).ln();
    ((ms * MS as f64 / STEP_NS as f64) as usize).max(1)
}

/// Returns rates that alternate between `on` and `off` for random times, with means of `on_ms` and
/// `off_ms` milliseconds.
fn on_off(rng: &mut Rng, on_ms: f64, off_ms: f64, on: f64, off: f64) -> Vec<f64> {
    let mut rates = Vec::new();
    while rates.len() < steps() as usize {
        let n = exponential_steps(rng, off_ms);
        rates.extend(std::iter::repeat_n(off, n));
        let n = exponential_steps(rng, on_ms);
        rates.extend(std::iter::repeat_n(on, n));
    }
    rates.truncate(steps() as usize);
    rates
}

fn square(t_ms: f64, period_ms: f64, duty: f64) -> f64 {
    if (t_ms / period_ms).fract() < duty {
        1.0
    } else {
        0.05
    }
}

fn steady() -> Trace {
    drawn("steady", 100, |e, rng| {
        let level = 0.2 + e as f64 / 4.0;
        (0..steps()).map(|_| level * (0.98 + 0.04 * rng.f64())).collect()
    })
}

/// Creates a trace in which every event has independent bursts.
fn bursty() -> Trace {
    drawn("bursty", 200, |_, rng| on_off(rng, 25.0, 225.0, 2.0, 0.02))
}

/// Creates a trace with two bursty events and six steady ones.
fn bursty_few() -> Trace {
    drawn("bursty-few", 300, |e, rng| {
        if e < 2 {
            on_off(rng, 20.0, 180.0, 3.0, 0.02)
        } else {
            (0..steps()).map(|_| 0.9 + 0.2 * rng.f64()).collect()
        }
    })
}

/// Creates a trace with short, rare and high spikes, such as those of a garbage collector or a
/// timer.
fn spikes() -> Trace {
    drawn("spikes", 400, |e, rng| {
        on_off(rng, 3.0, 100.0 + 20.0 * e as f64, 10.0, 0.3)
    })
}

/// Creates a trace with a periodic pattern whose period is close to [`TICK_NS`].
fn near_tick() -> Trace {
    formula("near-tick", |e, t| square(t + e as f64 * 0.4, 4.04, 0.3))
}

/// Creates a trace with a periodic pattern whose period is close to a whole rotation of the
/// reference policy (eight groups for one tick each).
fn near_rotation() -> Trace {
    formula("near-rotation", |e, t| square(t + e as f64 * 3.0, 32.05, 0.25))
}

/// Creates a trace with sinusoidal rates whose period is exactly two whole rotations of the
/// reference policy.
fn two_rotations() -> Trace {
    formula("two-rotations", |e, t| {
        1.0 + 0.9 * (std::f64::consts::TAU * (t + e as f64 * 7.0) / 64.0).sin()
    })
}

/// Creates a trace in which the rates of half the events increase and those of the other half
/// decrease.
fn ramp() -> Trace {
    formula("ramp", |e, t| {
        let x = t / (LENGTH_NS / MS) as f64;
        let x = if e % 2 == 0 { x } else { 1.0 - x };
        0.05 + x * (1.0 + e as f64 / 4.0)
    })
}

/// Creates a trace of a program with phases of 0.1 to 0.9 s that affect all events simultaneously.
fn phases() -> Trace {
    let mut bounds = vec![0usize];
    let mut rng = Rng::with_seed(500);
    while *bounds.last().unwrap_or(&0) < steps() as usize {
        bounds.push(bounds.last().unwrap_or(&0) + 1_000 + rng.usize(0..8_000));
    }
    drawn("phases", 510, |_, rng| {
        let mut rates = Vec::new();
        for pair in bounds.windows(2) {
            let level = (3.0 * (rng.f64() - 0.5)).exp();
            rates.extend((pair[0]..pair[1]).map(|_| level * (0.9 + 0.2 * rng.f64())));
        }
        rates.truncate(steps() as usize);
        rates
    })
}

/// Creates a trace of events that occur in only one section of the trace each.
fn part_time() -> Trace {
    formula("part-time", |e, t| {
        let begin = 900.0 * e as f64;
        if (begin..begin + 2_500.0).contains(&t) {
            1.0
        } else {
            0.001
        }
    })
}

/// Parses a trace of a real process, recorded by `record.sh`: one row per millisecond, one column
/// per event.
fn recorded(name: &'static str, csv: &str) -> Trace {
    let rows: Vec<Vec<f64>> = csv
        .lines()
        .map(|line| line.split(',').filter_map(|n| n.parse().ok()).collect())
        .collect();
    let per_row = (MS / STEP_NS) as usize;
    Trace {
        name: name.to_owned(),
        events: (0..EVENTS)
            .map(|e| {
                Curve::new(
                    rows.iter()
                        .flat_map(|r| std::iter::repeat_n(r[e] / 10.0, per_row)),
                )
            })
            .collect(),
        length_ns: rows.len() as u64 * MS,
        slots: SLOTS,
    }
}

/// Returns all fixed traces.
pub fn all() -> Vec<Trace> {
    vec![
        steady(),
        bursty(),
        bursty_few(),
        spikes(),
        near_tick(),
        near_rotation(),
        two_rotations(),
        ramp(),
        phases(),
        part_time(),
        recorded("real-cc1", include_str!("data/cc1.csv")),
        recorded("real-python", include_str!("data/python.csv")),
    ]
}
