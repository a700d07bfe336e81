//! The promise of the adaptive policy and the interpolating estimator, on the traces and seeds of the `mux_quality` example: a
//! third of the error of linear scaling under round robin, and no worse on any trace.

#[allow(dead_code)]
#[path = "../examples/mux_quality/family.rs"]
mod family;
#[allow(dead_code)]
#[path = "../examples/mux_quality/measure.rs"]
mod measure;
#[allow(dead_code)]
#[path = "../examples/mux_quality/traces.rs"]
mod traces;

use std::collections::BTreeMap;

use measure::{Comparison, runs, summarise};
use perf_core::mux::MuxPolicy;
use traces::{SEEDS, TICK_NS, Trace};

/// Compares on `traces`; `grid_ns` is the resolution of the adaptive policy's timer. No trace may be worse by more than the
/// noise of repeated seeds and `tolerance`.
fn compare(traces: impl Iterator<Item = Trace>, grid_ns: u64, seeds: usize, tolerance: f64) {
    let (mut reference, mut ours) = (0.0, 0.0);
    for trace in traces {
        let c = Comparison::new(&trace, grid_ns, seeds);
        assert!(
            c.excess() <= tolerance,
            "{}: {:?} against {:?}",
            trace.name,
            c.ours,
            c.base
        );
        reference += c.base.mean;
        ours += c.ours.mean;
    }
    assert!(
        ours <= reference / 3.0,
        "mean error {ours:.4} against {reference:.4}"
    );
}

#[test]
fn a_third_of_the_error_and_never_worse() {
    compare(traces::all().into_iter(), 1, SEEDS.len(), 0.0);
}

/// The same with a timer that only rings on whole milliseconds: rounding makes turns irregular, which costs up to half a
/// percent of a count.
#[test]
fn a_coarse_timer_is_enough() {
    compare(traces::all().into_iter(), 1_000_000, SEEDS.len(), 0.005);
}

/// And on traces nobody chose. A rhythm that rotation happens to see all sides of may be seen a little worse.
#[test]
fn a_third_of_the_error_on_random_traces() {
    compare(family::HOLD_OUT.step_by(2).map(family::trace), 1, 4, 0.003);
}

/// The standard error means something: the truth lies within two of them nine times in ten.
#[test]
fn the_standard_error_covers_the_truth() {
    let mut all = 0.0;
    let traces = traces::all();
    for trace in &traces {
        let runs = runs(trace, MuxPolicy::Adaptive, TICK_NS, 1, SEEDS.len());
        let covered = summarise(&runs, |r| r.covered).mean;
        assert!(
            covered >= 0.85,
            "{}: {:.0} % within two standard errors",
            trace.name,
            100.0 * covered
        );
        all += covered;
    }
    assert!(all / traces.len() as f64 >= 0.9);
}

/// Nor on random traces is any kind much worse.
#[test]
fn the_standard_error_covers_the_truth_of_random_traces() {
    let mut kinds = BTreeMap::<String, Vec<f64>>::new();
    for trace in family::HOLD_OUT.map(family::trace) {
        let runs = runs(&trace, MuxPolicy::Adaptive, TICK_NS, 1, 4);
        kinds
            .entry(family::kind(&trace.name).to_owned())
            .or_default()
            .push(summarise(&runs, |r| r.covered).mean);
    }
    let mut all = 0.0;
    for (kind, covered) in &kinds {
        let mean = covered.iter().sum::<f64>() / covered.len() as f64;
        assert!(mean >= 0.85, "{kind}: {:.0} %", 100.0 * mean);
        all += mean;
    }
    assert!(all / kinds.len() as f64 >= 0.9);
}

/// And it is no cheap promise: on most traces it is about as large as the errors are. Rhythms are an exception: their errors
/// cancel, which slices alone do not tell.
#[test]
fn the_standard_error_is_about_as_large_as_the_errors() {
    for trace in traces::all() {
        let rhythm = ["near-tick", "near-rotation", "two-rotations"].contains(&trace.name.as_str());
        let runs = runs(&trace, MuxPolicy::Adaptive, TICK_NS, 1, SEEDS.len());
        let ratio = measure::doubt(&runs);
        assert!(
            ratio >= 0.75 && (ratio <= 3.0 || rhythm),
            "{}: {ratio:.2} of the error",
            trace.name
        );
    }
}

/// What users get goes through a core, and is as good as the queue and the estimator alone: the policy learns of a slice when it
/// ends, not a rotation later, when its test of calm has gone on.
#[test]
fn through_a_core_estimates_are_as_good() {
    let (mut alone, mut through) = (0.0, 0.0);
    for trace in family::HOLD_OUT.step_by(4).map(family::in_step) {
        for &seed in &SEEDS[..2] {
            alone += measure::run(&trace, MuxPolicy::Adaptive, TICK_NS, 1, seed).error;
            let (estimates, starts) = measure::run_core(&trace, MuxPolicy::Adaptive, TICK_NS, seed);
            assert!(starts > 0);
            through += measure::mean_error(&estimates);
        }
    }
    assert!(
        (through - alone).abs() <= 1e-4 * alone,
        "mean error {through:.4} through a core, {alone:.4} without"
    );
}
