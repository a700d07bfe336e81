//! The promise of the adaptive policy and the interpolating estimator, on the fixed traces and seeds of the `mux_quality`
//! example: a third of the error of linear scaling under round robin, and no worse on any trace.

#[allow(dead_code)]
#[path = "../examples/mux_quality/measure.rs"]
mod measure;
#[allow(dead_code)]
#[path = "../examples/mux_quality/traces.rs"]
mod traces;

use measure::{Run, run, summarise};
use perf_core::mux::MuxPolicy;
use traces::{SEEDS, TICK_NS, Trace};

/// Errors below this are not told apart: half a percent of a count.
const NEGLIGIBLE: f64 = 0.005;

fn runs(trace: &Trace, policy: MuxPolicy, grid_ns: u64) -> Vec<Run> {
    SEEDS
        .iter()
        .map(|&seed| run(trace, policy, TICK_NS, grid_ns, seed))
        .collect()
}

/// Compares on all traces; `grid_ns` is the resolution of the adaptive policy's timer.
fn compare(grid_ns: u64, negligible: f64) {
    let (mut reference, mut ours) = (0.0, 0.0);
    for trace in traces::all() {
        let rotate = runs(&trace, MuxPolicy::Rotate, 1);
        let adaptive = runs(&trace, MuxPolicy::Adaptive, grid_ns);
        let base = summarise(&rotate, |r| r.linear_error);
        let best = summarise(&adaptive, |r| r.error);
        // Noise of the comparison of two means over the seeds, twice over.
        let n = SEEDS.len() as f64;
        let noise = 2.0 * ((base.deviation.powi(2) + best.deviation.powi(2)) / n).sqrt();
        assert!(
            best.mean <= base.mean + noise.max(negligible),
            "{}: {:.4} against {:.4}, noise {noise:.4}",
            trace.name,
            best.mean,
            base.mean,
        );
        reference += base.mean;
        ours += best.mean;
    }
    assert!(
        ours <= reference / 3.0,
        "mean error {ours:.4} against {reference:.4}"
    );
}

#[test]
fn a_third_of_the_error_and_never_worse() {
    compare(1, NEGLIGIBLE);
}

/// The same with a timer that only rings on whole milliseconds, within twice the tolerance.
#[test]
fn a_coarse_timer_is_enough() {
    compare(1_000_000, 2.0 * NEGLIGIBLE);
}

/// The standard error means something: the truth lies within two of them nine times in ten.
#[test]
fn the_standard_error_covers_the_truth() {
    for trace in traces::all() {
        let covered = summarise(&runs(&trace, MuxPolicy::Adaptive, 1), |r| r.covered).mean;
        assert!(
            covered >= 0.85,
            "{}: {:.0} % within two standard errors",
            trace.name,
            100.0 * covered
        );
    }
}
