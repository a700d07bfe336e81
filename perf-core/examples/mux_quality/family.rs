//! Random traces for the comparison of multiplexing policies, each drawn from its own seed. The
//! adaptive policy was tuned on seeds 0 to 119, and the estimator's standard error on seeds 0 to
//! 19. The seeds of [`HOLD_OUT`] were drawn after both were complete.

use std::f64::consts::TAU;
use std::ops::Range;

use fastrand::Rng;

use super::traces::{MS, STEP_NS, TICK_NS, Trace};

/// Seeds of the random traces for the published figures.
pub const HOLD_OUT: Range<u64> = 5_000_000..5_000_120;

/// Initial multiplexing interval of the adaptive policy, in ticks.
pub const PACE: f64 = 0.146;
/// Name of the trace kind that [`in_step`] creates.
pub const IN_STEP: &str = "in-step";
/// Name of the trace kind with a periodic pattern in phase with the rotation of round robin.
pub const IN_STEP_ROTATE: &str = "in-step-rotate";
/// All trace kinds that [`of_kind`] creates: the kinds of [`trace`], periodic patterns in phase
/// with the intervals of one of the two policies, and three kinds that were not used to choose a
/// policy or an estimator.
pub const ALL_KINDS: [&str; 15] = [
    "steady",
    "bursts",
    "spikes",
    "drift",
    "phases",
    "common",
    "mixture",
    "ramp",
    "long-tail",
    "rhythm",
    "rhythms",
    "near-rotation",
    "near-slice",
    IN_STEP,
    IN_STEP_ROTATE,
];

/// The trace kinds that [`trace`] creates.
const KINDS: [&str; 10] = [
    "rhythm",
    "rhythms",
    "near-rotation",
    "near-slice",
    "bursts",
    "spikes",
    "ramp",
    "drift",
    "phases",
    "mixture",
];

/// Creates the random trace of seed `seed`. The kind depends on the seed: ten consecutive seeds
/// yield each kind once.
pub fn trace(seed: u64) -> Trace {
    drawn(KINDS[(seed % KINDS.len() as u64) as usize], seed)
}

/// Creates the random trace of seed `seed` and kind `kind`, one of [`ALL_KINDS`].
pub fn of_kind(kind: &str, seed: u64) -> Trace {
    drawn(kind, seed)
}

/// Creates a random trace with a periodic pattern. The ratio of the pattern's period to the first
/// rotation of the adaptive policy is within 0.1 % of a simple fraction, so the pattern stays in
/// phase with the rotations for seconds.
pub fn in_step(seed: u64) -> Trace {
    drawn(IN_STEP, seed)
}

fn drawn(kind: &str, seed: u64) -> Trace {
    let mut rng = Rng::with_seed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let n = rng.usize(3..=16);
    let slots = rng.usize(2..=6.min(n - 1));
    let length_ns = rng.u64(4_000..12_000) * MS;
    let steps = (length_ns / STEP_NS) as usize;
    let tick_ms = TICK_NS as f64 / MS as f64;
    // The reference policy replaces one group per interval. One rotation therefore takes as many
    // intervals as there are groups, and one slice takes as many intervals as there are slots.
    let near = |rng: &mut Rng, ms: f64| {
        let ratio = f64::from(rng.u32(1..=4)) / f64::from(rng.u32(1..=4));
        let pace = [1.0, 1.0, 0.618, 0.382, 0.25, 0.236][rng.usize(0..6)];
        ms * pace * ratio * (1.0 + 0.02 * (rng.f64() - 0.5))
    };
    let period = match kind {
        "near-rotation" => near(&mut rng, tick_ms * n as f64),
        "near-slice" => near(&mut rng, tick_ms * slots as f64),
        IN_STEP => {
            let ratio = f64::from(rng.u32(1..=4)) / f64::from(rng.u32(1..=4));
            tick_ms * PACE * n as f64 * ratio * (1.0 + 0.002 * (rng.f64() - 0.5))
        }
        IN_STEP_ROTATE => {
            let ratio = f64::from(rng.u32(1..=4)) / f64::from(rng.u32(1..=4));
            tick_ms * n as f64 * ratio * (1.0 + 0.002 * (rng.f64() - 0.5))
        }
        _ => log_uniform(&mut rng, 1.0, 400.0),
    };
    // One rhythm common to all events, which are then busy and idle at the same times.
    let mut of_all = Rng::with_seed(!seed);
    let pace = log_uniform(&mut of_all, 1.0, 200.0);
    let shared = on_off(&mut of_all, steps, pace, pace, 0.2);
    let common = Rhythm::draw(&mut rng, period.max(0.5));
    let bounds = bounds(&mut rng, steps);
    let rates = |e: usize, rng: &mut Rng| -> Vec<f64> {
        let kind = if kind == "mixture" {
            KINDS[[0, 4, 5, 6, 7, 8][rng.usize(0..6)]]
        } else {
            kind
        };
        let level = log_uniform(rng, 0.2, 5.0);
        let noise = 0.3 * rng.f64().powi(2);
        let mut rates = match kind {
            "rhythm" | "near-rotation" | "near-slice" | IN_STEP | IN_STEP_ROTATE => {
                common.with_phase(rng.f64()).rates(steps)
            }
            "rhythms" => {
                let period = log_uniform(rng, 1.0, 400.0);
                Rhythm::draw(rng, period).rates(steps)
            }
            "bursts" => {
                let (on, off) = (log_uniform(rng, 2.0, 100.0), log_uniform(rng, 20.0, 500.0));
                let floor = 0.05 * rng.f64();
                on_off(rng, steps, on, off, floor)
            }
            "spikes" => {
                let (on, off) = (log_uniform(rng, 0.3, 5.0), log_uniform(rng, 20.0, 200.0));
                let floor = 0.2 * rng.f64();
                on_off(rng, steps, on, off, floor)
            }
            "ramp" => ramp(rng, steps),
            "common" => {
                let own = rng.f64();
                shared.iter().map(|rate| own + (1.0 - own) * rate).collect()
            }
            "steady" => vec![1.0; steps],
            "long-tail" => long_tail(rng, steps),
            "drift" => drift(rng, steps),
            _ => phases(rng, &bounds, steps),
        };
        for rate in &mut rates {
            *rate *= level * (1.0 + noise * (2.0 * rng.f64() - 1.0));
        }
        // About one event in five has a constant rate.
        if e > 0 && rng.u32(0..5) == 0 {
            rates.fill(level);
        }
        rates
    };
    Trace::from_rates(
        format!("{kind}-{seed}"),
        (0..n).map(|e| rates(e, &mut rng)).collect(),
        slots,
    )
}

/// Returns the kind of the trace with name `name`, that is, the name without its seed.
pub fn kind(name: &str) -> &str {
    name.rsplit_once('-').map_or(name, |(kind, _)| kind)
}

fn log_uniform(rng: &mut Rng, least: f64, most: f64) -> f64 {
    least * (most / least).powf(rng.f64())
}

#[derive(Clone, Copy)]
enum Shape {
    Square,
    Sine,
    Saw,
}

#[derive(Clone, Copy)]
struct Rhythm {
    period_ms: f64,
    phase: f64,
    duty: f64,
    depth: f64,
    shape: Shape,
}

impl Rhythm {
    fn draw(rng: &mut Rng, period_ms: f64) -> Self {
        Self {
            period_ms,
            phase: rng.f64(),
            duty: 0.1 + 0.8 * rng.f64(),
            depth: 0.3 + 0.69 * rng.f64(),
            shape: [Shape::Square, Shape::Sine, Shape::Saw][rng.usize(0..3)],
        }
    }

    fn with_phase(self, phase: f64) -> Self {
        Self { phase, ..self }
    }

    fn rates(self, steps: usize) -> Vec<f64> {
        let at = |step: usize| {
            let t_ms = step as f64 * STEP_NS as f64 / MS as f64;
            let x = (t_ms / self.period_ms + self.phase).fract();
            let wave = match self.shape {
                Shape::Square => f64::from(u8::from(x < self.duty)),
                Shape::Sine => 0.5 + 0.5 * (TAU * x).sin(),
                Shape::Saw => x,
            };
            1.0 - self.depth + self.depth * wave
        };
        (0..steps).map(at).collect()
    }
}

fn on_off(rng: &mut Rng, steps: usize, on_ms: f64, off_ms: f64, floor: f64) -> Vec<f64> {
    let mut rates = Vec::with_capacity(steps);
    let mut on = rng.bool();
    while rates.len() < steps {
        let mean_ms = if on { on_ms } else { off_ms };
        let n = (-mean_ms * (1.0 - rng.f64()).ln() * MS as f64 / STEP_NS as f64) as usize;
        rates.extend(std::iter::repeat_n(if on { 1.0 } else { floor }, n.max(1)));
        on = !on;
    }
    rates.truncate(steps);
    rates
}

fn ramp(rng: &mut Rng, steps: usize) -> Vec<f64> {
    let (from, to) = (0.05 + rng.f64(), 0.05 + rng.f64());
    (0..steps)
        .map(|s| from + (to - from) * s as f64 / steps as f64)
        .collect()
}

/// Creates rates whose logarithm is a random walk. A rate changes by a factor of two in 50 to 1,000
/// ms.
fn drift(rng: &mut Rng, steps: usize) -> Vec<f64> {
    let ms = log_uniform(rng, 50.0, 1_000.0);
    let step = std::f64::consts::LN_2 / (ms * MS as f64 / STEP_NS as f64).sqrt();
    let mut log = 0.0f64;
    (0..steps)
        .map(|_| {
            log += if rng.bool() { step } else { -step };
            // Pulls the walk towards its mean, so that no section of the trace dominates.
            log *= 1.0 - step * step / 2.0;
            log.exp()
        })
        .collect()
}

fn bounds(rng: &mut Rng, steps: usize) -> Vec<usize> {
    let mean_ms = log_uniform(rng, 30.0, 1_500.0);
    let mut bounds = vec![0];
    let mut at = 0;
    while at < steps {
        at += (mean_ms * (0.2 + 1.6 * rng.f64()) * MS as f64 / STEP_NS as f64) as usize + 1;
        bounds.push(at.min(steps));
    }
    bounds
}

fn phases(rng: &mut Rng, bounds: &[usize], steps: usize) -> Vec<f64> {
    let mut rates = Vec::with_capacity(steps);
    for pair in bounds.windows(2) {
        let level = (3.0 * (rng.f64() - 0.5)).exp();
        rates.extend(std::iter::repeat_n(level, pair[1] - pair[0]));
    }
    rates.truncate(steps);
    rates
}

/// Creates rates with rare bursts. The sizes of the bursts have infinite variance.
fn long_tail(rng: &mut Rng, steps: usize) -> Vec<f64> {
    let alpha = 1.1 + 0.7 * rng.f64();
    let off = log_uniform(rng, 20.0, 300.0);
    let mut rates = Vec::with_capacity(steps);
    while rates.len() < steps {
        let quiet = (-off * (1.0 - rng.f64()).ln() * 10.0) as usize + 1;
        rates.extend(std::iter::repeat_n(0.1, quiet));
        let size = (1.0 - rng.f64()).powf(-1.0 / alpha);
        let long = (size.sqrt() * 5.0).min(1e5) as usize + 1;
        rates.extend(std::iter::repeat_n(size.sqrt(), long));
    }
    rates.truncate(steps);
    rates
}
