//! Traces on which estimators and multiplexing policies are measured: the true rates of several
//! events over time.

use std::sync::Arc;

/// Resolution of a trace, in nanoseconds.
pub const STEP_NS: u64 = 100_000;
/// Nanoseconds per millisecond.
pub const MS: u64 = 1_000_000;
/// Number of events of a recorded trace, and of slots that they share.
const EVENTS: usize = 8;
const SLOTS: usize = 2;
/// Interval of the reference policy's rotation, in nanoseconds.
pub const TICK_NS: u64 = 4 * MS;
/// Seeds of the measurements of each trace. They vary the start of the trace relative to the tick,
/// the order of the events, and the random choices of the policy.
pub const SEEDS: [u64; 16] = [
    0x9e37, 0x79b9, 0x7f4a, 0x7c15, 0xf39c, 0xc060, 0x5ced, 0xc834, 0x1082, 0x276b, 0xf3a2, 0x7251, 0xf86c,
    0x6a11, 0xd0c1, 0x8e95,
];

/// The true counts of one event over time.
#[derive(Clone, Debug)]
pub struct Curve {
    /// Cumulative counts at each step; one more entry than there are steps.
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

    /// Returns the counts in the first `ns` nanoseconds.
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

/// Counts per step at a rate of 1: 10^8 per second.
const COUNTS_PER_STEP: f64 = 10_000.0;

/// Several events of one program.
#[derive(Clone, Debug)]
pub struct Trace {
    pub name: String,
    pub events: Vec<Curve>,
    pub length_ns: u64,
    /// Number of slots that the events share.
    pub slots: usize,
}

impl Trace {
    /// Creates a trace of events with the given rates per step.
    pub fn from_rates(name: String, rates: Vec<Vec<f64>>, slots: usize) -> Self {
        Self {
            name: name.to_owned(),
            length_ns: rates.first().map_or(0, |r| r.len() as u64 * STEP_NS),
            events: rates.into_iter().map(|r| Curve::new(r.into_iter())).collect(),
            slots,
        }
    }
}

/// Returns the traces of real processes, recorded by `record.sh`: one row per millisecond, one column
/// per event.
pub fn recorded() -> [Trace; 2] {
    let cc1 = ("real-cc1", include_str!("data/cc1.csv"));
    let python = ("real-python", include_str!("data/python.csv"));
    [cc1, python].map(|(name, csv)| {
        let row = |line: &str| -> Vec<f64> { line.split(',').filter_map(|n| n.parse().ok()).collect() };
        let rows: Vec<Vec<f64>> = csv.lines().map(row).collect();
        let per_row = (MS / STEP_NS) as usize;
        let rates = |e: usize| {
            let steps = rows.iter().map(|r| std::iter::repeat_n(r[e] / 10.0, per_row));
            steps.flatten().collect()
        };
        Trace::from_rates(name.to_owned(), (0..EVENTS).map(rates).collect(), SLOTS)
    })
}
