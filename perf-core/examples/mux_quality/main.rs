//! How good the estimates of multiplexed events are: the adaptive policy with the interpolating estimator beside linear
//! scaling under round robin, on fixed traces and on a family of random ones.
//!
//! `cargo run --release --example mux_quality`

mod family;
mod measure;
mod traces;

use std::collections::BTreeMap;

use measure::{Comparison, doubt, mean_error, run_core, runs, summarise, within_two};
use perf_core::mux::MuxPolicy;
use traces::{EVENTS, SEEDS, SLOTS, TICK_NS, Trace};

/// Seeds each trace of the family is measured with.
const FAMILY_SEEDS: usize = 8;

fn hasty_ns() -> u64 {
    (TICK_NS as f64 * family::PACE) as u64
}

fn fixed() {
    println!(
        "{EVENTS} events on {SLOTS} slots; error of the estimated count, mean over events and {} seeds (± deviation over seeds)",
        SEEDS.len()
    );
    println!(
        "{:<14}{:>17}{:>18}{:>7}{:>8}{:>8}{:>7} |{:>9}{:>10}{:>11}",
        "trace",
        "rotate, linear",
        "adaptive, interp.",
        "ratio",
        "in 2se",
        "se/err",
        "sw/s",
        "rot,int",
        "ada,lin",
        "hasty,lin"
    );
    let (mut reference, mut ours, mut hasty) = (0.0, 0.0, 0.0);
    let traces = traces::all();
    for trace in &traces {
        let c = Comparison::new(trace, 1, SEEDS.len());
        let fast = runs(trace, MuxPolicy::Rotate, hasty_ns(), 1, SEEDS.len());
        let fast = summarise(&fast, |r| r.linear_error).mean;
        reference += c.base.mean;
        ours += c.ours.mean;
        hasty += fast;
        println!(
            "{:<14}{:>7.3} % ±{:>6.3}{:>9.3} % ±{:>6.3}{:>7.2}{:>7.0}%{:>8.2}{:>7.0} |{:>8.3}%{:>9.3}%{:>10.3}%{}",
            trace.name,
            100.0 * c.base.mean,
            100.0 * c.base.deviation,
            100.0 * c.ours.mean,
            100.0 * c.ours.deviation,
            c.ours.mean / c.base.mean,
            100.0 * summarise(&c.adaptive, |r| r.covered).mean,
            doubt(&c.adaptive),
            summarise(&c.adaptive, |r| r.switches_per_s).mean,
            100.0 * summarise(&c.rotate, |r| r.error).mean,
            100.0 * summarise(&c.adaptive, |r| r.linear_error).mean,
            100.0 * fast,
            if c.excess() > 0.0 { "  WORSE" } else { "" },
        );
    }
    let n = traces.len() as f64;
    println!(
        "mean over the traces: {:.2} % -> {:.2} %, ratio {:.3}; rotation as hasty, linear: {:.2} %",
        100.0 * reference / n,
        100.0 * ours / n,
        ours / reference,
        100.0 * hasty / n,
    );
    println!("se/err: standard error over error, root mean squares of both, adaptive.");
    println!(
        "sw/s: groups put on per second, adaptive; rotate puts on {:.0}, rotate as hasty {:.0}.",
        1e9 / TICK_NS as f64,
        1e9 / hasty_ns() as f64,
    );
}

/// Sums over the traces of one kind.
#[derive(Default)]
struct Kind {
    traces: u32,
    base: f64,
    ours: f64,
    hasty: f64,
    covered: f64,
    variance: f64,
    square_error: f64,
    worse: u32,
    worst: f64,
}

impl Kind {
    fn add(&mut self, other: &Self) {
        self.traces += other.traces;
        self.base += other.base;
        self.ours += other.ours;
        self.hasty += other.hasty;
        self.covered += other.covered;
        self.variance += other.variance;
        self.square_error += other.square_error;
        self.worse += other.worse;
        self.worst = self.worst.max(other.worst);
    }

    fn print(&self, name: &str) {
        let n = f64::from(self.traces);
        println!(
            "{name:<14}{:>8}{:>13.3} %{:>16.3} %{:>8.2}{:>8.0}%{:>8.2}{:>10.3} %{:>7}{:>16.3} %",
            self.traces,
            100.0 * self.base / n,
            100.0 * self.ours / n,
            self.ours / self.base,
            100.0 * self.covered / n,
            (self.variance / self.square_error).sqrt(),
            100.0 * self.hasty / n,
            self.worse,
            100.0 * self.worst,
        );
    }
}

fn random() {
    println!("\nrandom traces, 3 to 16 events on 2 to 6 slots, 4 to 12 s; seeds that were not tuned on");
    println!(
        "{:<14}{:>8}{:>15}{:>18}{:>8}{:>9}{:>8}{:>12}{:>7}{:>18}",
        "kind",
        "traces",
        "rotate, linear",
        "adaptive, interp.",
        "ratio",
        "in 2se",
        "se/err",
        "hasty,lin",
        "worse",
        "worst difference"
    );
    let mut kinds = BTreeMap::<String, Kind>::new();
    let mut add = |trace: Trace| {
        let c = Comparison::new(&trace, 1, FAMILY_SEEDS);
        let fast = runs(&trace, MuxPolicy::Rotate, hasty_ns(), 1, FAMILY_SEEDS);
        kinds
            .entry(family::kind(&trace.name).to_owned())
            .or_default()
            .add(&Kind {
                traces: 1,
                base: c.base.mean,
                ours: c.ours.mean,
                hasty: summarise(&fast, |r| r.linear_error).mean,
                covered: summarise(&c.adaptive, |r| r.covered).mean,
                variance: summarise(&c.adaptive, |r| r.variance).mean,
                square_error: summarise(&c.adaptive, |r| r.square_error).mean,
                worse: u32::from(c.excess() > 0.0),
                worst: c.ours.mean - c.base.mean,
            });
    };
    family::HOLD_OUT.map(family::trace).for_each(&mut add);
    // Apart from the others, which do not know the policy: these are made against it.
    family::HOLD_OUT.map(family::in_step).for_each(&mut add);
    let in_step = kinds.remove(family::IN_STEP).unwrap_or_default();
    let mut all = Kind::default();
    for (name, kind) in &kinds {
        kind.print(name);
        all.add(kind);
    }
    all.print("all");
    in_step.print(family::IN_STEP);
    println!(
        "worse: traces on which the adaptive policy is worse by more than two deviations over the seeds; worst difference: \
         the largest by which its mean error exceeds the other."
    );
}

/// What users get: the same traces through a core, under both policies.
fn through_a_core() {
    println!("\nthrough a core, interpolating, the first seed of each trace");
    println!(
        "{:<14}{:>10}{:>14}{:>9}{:>12}",
        "kind", "policy", "mean error", "in 2se", "switches/s"
    );
    for policy in [MuxPolicy::Rotate, MuxPolicy::Adaptive] {
        // Of each kind: traces, errors, shares within two standard errors, switches a second.
        let mut kinds = BTreeMap::<String, [f64; 4]>::new();
        let random = family::HOLD_OUT.map(family::trace);
        for trace in random.chain(family::HOLD_OUT.map(family::in_step)) {
            let (estimates, starts) = run_core(&trace, policy, TICK_NS, SEEDS[0]);
            let sums = kinds.entry(family::kind(&trace.name).to_owned()).or_default();
            sums[0] += 1.0;
            sums[1] += mean_error(&estimates);
            sums[2] += within_two(&estimates);
            sums[3] += starts as f64 / (trace.length_ns as f64 / 1e9);
        }
        for (kind, [n, error, within, switches]) in kinds {
            println!(
                "{kind:<14}{:>10}{:>12.3} %{:>8.0}%{:>12.0}",
                format!("{policy:?}").to_lowercase(),
                100.0 * error / n,
                100.0 * within / n,
                switches / n,
            );
        }
    }
}

fn main() {
    fixed();
    random();
    through_a_core();
}
