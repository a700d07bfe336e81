//! Measures the accuracy of the estimates of multiplexed events. Compares the adaptive policy with
//! interpolation to round robin with linear scaling, on fixed traces and on random traces.
//!
//! `cargo run --release --example mux_quality`

mod family;
mod measure;
mod traces;

use std::collections::BTreeMap;

use measure::{Comparison, ErrorBars, all_bars, bars, mean_error, run_core, runs, summarise};
use perf_core::mux::MuxPolicy;
use traces::{EVENTS, SEEDS, SLOTS, TICK_NS, Trace};

/// Number of seeds with which each random trace is measured.
const FAMILY_SEEDS: usize = 8;
/// Number of traces of each kind that are measured with a core.
const CORE_TRACES: usize = 40;

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
            100.0 * all_bars(&c.adaptive).within_two(),
            all_bars(&c.adaptive).confidence_ratio(),
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

/// Sums of the results of all random traces of one kind.
#[derive(Default)]
struct KindTotals {
    traces: u32,
    base: f64,
    ours: f64,
    hasty: f64,
    bars: ErrorBars,
    worse: u32,
    worst: f64,
}

impl KindTotals {
    fn add(&mut self, other: &Self) {
        self.traces += other.traces;
        self.base += other.base;
        self.ours += other.ours;
        self.hasty += other.hasty;
        self.bars.merge(&other.bars);
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
            100.0 * self.bars.within_two(),
            self.bars.confidence_ratio(),
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
    let mut kinds = BTreeMap::<String, KindTotals>::new();
    let mut add = |trace: Trace| {
        let c = Comparison::new(&trace, 1, FAMILY_SEEDS);
        let fast = runs(&trace, MuxPolicy::Rotate, hasty_ns(), 1, FAMILY_SEEDS);
        kinds
            .entry(family::kind(&trace.name).to_owned())
            .or_default()
            .add(&KindTotals {
                traces: 1,
                base: c.base.mean,
                ours: c.ours.mean,
                hasty: summarise(&fast, |r| r.linear_error).mean,
                bars: all_bars(&c.adaptive),
                worse: u32::from(c.excess() > 0.0),
                worst: c.ours.mean - c.base.mean,
            });
    };
    family::HOLD_OUT.map(family::trace).for_each(&mut add);
    // The in-step traces are adversarial for the adaptive policy, so they are excluded from the
    // totals and reported separately.
    family::HOLD_OUT.map(family::in_step).for_each(&mut add);
    let in_step = kinds.remove(family::IN_STEP).unwrap_or_default();
    let mut all = KindTotals::default();
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

/// Measures traces of all kinds with a core under both policies, and prints statistics of the error
/// bars that users of the core see.
fn through_a_core() {
    println!("\nthrough a core, interpolating, {CORE_TRACES} traces of each kind, one seed each");
    println!(
        "{:<16}{:>9}{:>12}{:>12} |{:>8}{:>8}{:>8} |{:>8}{:>8} |{:>9}",
        "kind",
        "policy",
        "mean error",
        "switches/s",
        "with se",
        "in 2se",
        "se/err",
        "bounded",
        "within",
        "unknown"
    );
    for policy in [MuxPolicy::Rotate, MuxPolicy::Adaptive] {
        for kind in family::ALL_KINDS {
            let (mut error_bars, mut error, mut switches) = (ErrorBars::default(), 0.0, 0.0);
            for seed in family::HOLD_OUT.take(CORE_TRACES) {
                let trace = family::of_kind(kind, seed);
                let (estimates, starts) = run_core(&trace, policy, TICK_NS, SEEDS[0]);
                error_bars.merge(&bars(&estimates));
                error += mean_error(&estimates) / CORE_TRACES as f64;
                switches += starts as f64 / (trace.length_ns as f64 / 1e9) / CORE_TRACES as f64;
            }
            let share = |n: f64| 100.0 * n / error_bars.events;
            println!(
                "{kind:<16}{:>9}{:>10.3} %{switches:>12.0} |{:>7.0}%{:>7.0}%{:>8.2} |{:>7.0}%{:>7.0}% |{:>8.0}%",
                format!("{policy:?}").to_lowercase(),
                100.0 * error,
                share(error_bars.known),
                100.0 * error_bars.within_two(),
                error_bars.confidence_ratio(),
                share(error_bars.bounded),
                100.0 * error_bars.within_bound(),
                share(error_bars.events - error_bars.known - error_bars.bounded),
            );
        }
    }
}

fn main() {
    fixed();
    random();
    through_a_core();
}
