//! How good the estimates of multiplexed events are: the adaptive policy with the interpolating estimator beside linear
//! scaling under round robin, on fixed traces.
//!
//! `cargo run --release --example mux_quality`

mod measure;
mod traces;

use measure::{Run, run, summarise};
use perf_core::mux::MuxPolicy;
use traces::{SEEDS, TICK_NS, Trace};

fn runs(trace: &Trace, policy: MuxPolicy, turn_ns: u64) -> Vec<Run> {
    SEEDS
        .iter()
        .map(|&seed| run(trace, policy, turn_ns, 1, seed))
        .collect()
}

fn main() {
    println!(
        "{} events on {} slots; error of the estimated count, mean over events and {} seeds (± deviation over seeds)",
        traces::EVENTS,
        measure::SLOTS,
        SEEDS.len()
    );
    println!(
        "{:<14}{:>17}{:>17}{:>7}{:>8}{:>7} |{:>9}{:>9}{:>9}",
        "trace",
        "rotate, linear",
        "adaptive, interp.",
        "ratio",
        "in 2se",
        "sw/s",
        "rot,int",
        "ada,lin",
        "rot/4,lin"
    );
    let (mut reference, mut ours, mut fast) = (0.0, 0.0, 0.0);
    let traces = traces::all();
    for trace in &traces {
        let rotate = runs(trace, MuxPolicy::Rotate, TICK_NS);
        let quarter = runs(trace, MuxPolicy::Rotate, TICK_NS / 4);
        let adaptive = runs(trace, MuxPolicy::Adaptive, TICK_NS);
        let base = summarise(&rotate, |r| r.linear_error);
        let best = summarise(&adaptive, |r| r.error);
        let fast_linear = summarise(&quarter, |r| r.linear_error).mean;
        reference += base.mean;
        ours += best.mean;
        fast += fast_linear;
        println!(
            "{:<14}{:>7.2} % ±{:>5.2}{:>9.2} % ±{:>5.2}{:>7.2}{:>7.0}%{:>7.0} |{:>8.2}%{:>8.2}%{:>8.2}%",
            trace.name,
            100.0 * base.mean,
            100.0 * base.deviation,
            100.0 * best.mean,
            100.0 * best.deviation,
            best.mean / base.mean,
            100.0 * summarise(&adaptive, |r| r.covered).mean,
            summarise(&adaptive, |r| r.switches_per_s).mean,
            100.0 * summarise(&rotate, |r| r.error).mean,
            100.0 * summarise(&adaptive, |r| r.linear_error).mean,
            100.0 * fast_linear,
        );
    }
    let n = traces.len() as f64;
    println!(
        "mean over the traces: {:.2} % -> {:.2} %, ratio {:.3}; rotate with turns of a quarter, linear: {:.2} %",
        100.0 * reference / n,
        100.0 * ours / n,
        ours / reference,
        100.0 * fast / n,
    );
    println!(
        "sw/s: groups put on per second, adaptive; rotate puts on {:.0}.",
        1e9 / TICK_NS as f64
    );
}
