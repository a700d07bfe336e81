//! Measures the accuracy of multiplexed estimates and of their error bars: round robin with linear
//! scaling and with the interpolating estimator, and the adaptive policy, on random and recorded
//! traces; and the errors at longer intervals, for hosts with expensive kicks.
//!
//! `cargo run --release -p perf-core --example mux_quality`

#[allow(dead_code, reason = "each program uses its part")]
mod family;
#[allow(dead_code, reason = "each program uses its part")]
mod measure;
mod traces;

use measure::{Run, all_bars, runs, summarise};
use perf_core::mux::MuxPolicy;
use traces::{TICK_NS, Trace};

/// Number of traces of each kind, and of seeds per trace.
const TRACES: usize = 40;
const SEEDS: usize = 2;

fn error(figure: impl Fn(&Run) -> f64, runs: &[Run]) -> f64 {
    100.0 * summarise(runs, figure).mean
}

/// Prints the columns of one policy: error, coverage of two standard errors, share of estimates
/// with a wrong error bar, with a bound only and with neither, and group starts per second.
fn print_bars(runs: &[Run]) {
    let bars = all_bars(runs);
    let share = |n: f64| 100.0 * n / bars.events;
    print!(
        " |{:>9.3} %{:>7.1}%{:>7.1}%{:>7.0}%{:>7.0}%{:>7.0}",
        error(|r| r.error, runs),
        100.0 * bars.within_two(),
        share(bars.wrong()),
        share(bars.bounded),
        share(bars.events - bars.known - bars.bounded),
        summarise(runs, |r| r.switches_per_s).mean,
    );
}

fn print_kind(name: &str, traces: &[Trace]) {
    let all = |policy| -> Vec<Run> {
        let of = |trace| runs(trace, policy, TICK_NS, 1, SEEDS);
        traces.iter().flat_map(of).collect()
    };
    let (rotate, adaptive) = (all(MuxPolicy::Rotate), all(MuxPolicy::Adaptive));
    print!("{name:<16}{:>9.3} %", error(|r| r.linear_error, &rotate));
    print_bars(&rotate);
    print_bars(&adaptive);
    println!();
}

/// Prints the error at longer intervals relative to linear scaling at the interval of Linux.
fn by_length() {
    println!("\nadaptive by the first length of its intervals, all random kinds but those in step");
    let traces: Vec<Trace> = family::HOLD_OUT.map(family::trace).collect();
    let mean = |figure: &dyn Fn(&Trace) -> f64| traces.iter().map(figure).sum::<f64>() / traces.len() as f64;
    let reference =
        mean(&|t| summarise(&runs(t, MuxPolicy::Rotate, TICK_NS, 1, SEEDS), |r| r.linear_error).mean);
    for turn_us in [300u64, 584, 1_000, 2_000, 4_000, 6_500] {
        let base_ns = (turn_us as f64 * 1e3 / family::PACE) as u64;
        let of = |t: &Trace| summarise(&runs(t, MuxPolicy::Adaptive, base_ns, 1, SEEDS), |r| r.error).mean;
        let error = mean(&of);
        println!(
            "{:>6.3} ms{:>8.2} %{:>8.2} of linear scaling with 4 ms",
            turn_us as f64 / 1e3,
            100.0 * error,
            error / reference,
        );
    }
}

fn main() {
    println!(
        "{:<16}{:>11} |{:>11}{:>8}{:>8}{:>8}{:>8}{:>7} |{:>11}",
        "", "rotate", "rotate", "", "", "", "", "", "adaptive"
    );
    let columns = format!(
        " |{:>11}{:>8}{:>8}{:>8}{:>8}{:>7}",
        "interpol.", "in 2se", "wrong", "bound", "unknown", "starts"
    );
    println!("{:<16}{:>11}{columns}{columns}", "trace", "linear");
    for kind in family::ALL_KINDS {
        let traces: Vec<Trace> = family::HOLD_OUT
            .take(TRACES)
            .map(|seed| family::of_kind(kind, seed))
            .collect();
        print_kind(kind, &traces);
    }
    for trace in traces::recorded() {
        print_kind(&trace.name.clone(), &[trace]);
    }
    by_length();
}
