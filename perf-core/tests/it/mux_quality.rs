//! The accuracy guarantee of the adaptive policy and the interpolating estimator, on the traces and
//! seeds of the `mux_quality` example: a third of the error of linear scaling under round robin,
//! and no worse on any trace.

#[allow(dead_code, reason = "each program uses its part")]
#[path = "../../examples/mux_quality/family.rs"]
mod family;
#[allow(dead_code, reason = "each program uses its part")]
#[path = "../../examples/mux_quality/measure.rs"]
mod measure;
#[allow(dead_code, reason = "each program uses its part")]
#[path = "../../examples/mux_quality/traces.rs"]
mod traces;

use measure::{Comparison, ErrorBars, runs};
use perf_core::mux::MuxPolicy;
use traces::{SEEDS, TICK_NS, Trace};

/// Compares on `traces`; `grid_ns` is the resolution of the adaptive policy's timer. No trace may
/// be worse by more than the noise of repeated seeds and `tolerance`.
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
fn third_of_the_error_and_never_worse() {
    compare(traces::all().into_iter(), 1, SEEDS.len(), 0.0);
}

/// The same with a timer that fires on whole milliseconds only: rounding makes intervals irregular,
/// which costs up to half a percent of a count.
#[test]
fn coarse_timer_is_enough() {
    compare(traces::all().into_iter(), 1_000_000, SEEDS.len(), 0.005);
}

/// The same on random traces. A rhythm that rotation happens to sample evenly may be slightly
/// worse.
#[test]
fn third_of_the_error_on_random_traces() {
    compare(family::HOLD_OUT.step_by(2).map(family::trace), 1, 4, 0.003);
}

/// Returns the error bars that a core reports on traces of `kind` under `policy`.
fn error_bars(kind: &str, policy: MuxPolicy, traces: usize) -> ErrorBars {
    let mut error_bars = ErrorBars::default();
    for seed in family::HOLD_OUT.take(traces) {
        let trace = family::of_kind(kind, seed);
        error_bars.merge(&measure::bars(
            &measure::run_core(&trace, policy, TICK_NS, SEEDS[0]).0,
        ));
    }
    error_bars
}

const POLICIES: [MuxPolicy; 2] = [MuxPolicy::Rotate, MuxPolicy::Adaptive];

/// The truth lies within two standard errors 19 times in 20, neither much less often nor always, on
/// every kind of trace with informative slices and under both policies. The share per kind is known
/// to about three percent.
#[test]
fn two_standard_errors_have_nominal_coverage() {
    for policy in POLICIES {
        let mut all = ErrorBars::default();
        for kind in [
            "steady", "bursts", "spikes", "drift", "phases", "common", "mixture", "ramp",
        ] {
            let error_bars = error_bars(kind, policy, 24);
            assert!(
                error_bars.known >= 0.5 * error_bars.events,
                "{kind}, {policy:?}: {error_bars:?} have a standard error"
            );
            let within = error_bars.within_two();
            assert!(
                (0.90..=0.99).contains(&within),
                "{kind}, {policy:?}: {:.1} % within two",
                100.0 * within
            );
            all.merge(&error_bars);
        }
        let within = all.within_two();
        assert!(
            (0.93..=0.97).contains(&within),
            "{policy:?}: {:.1} % within two",
            100.0 * within
        );
    }
}

/// A rhythm in step with the intervals looks constant. Few estimates of such rhythms get a standard
/// error, and those are correct: either the policy detected the rhythm, or the error is unknown.
#[test]
fn aliased_rhythms_have_no_error_bar_or_a_correct_one() {
    for policy in POLICIES {
        for kind in [
            "rhythm",
            "rhythms",
            "near-rotation",
            "near-slice",
            family::IN_STEP,
            family::IN_STEP_ROTATE,
        ] {
            let error_bars = error_bars(kind, policy, 24);
            let wrong = error_bars.known - error_bars.covered + error_bars.bounded - error_bars.held;
            assert!(
                wrong <= 0.05 * error_bars.events,
                "{kind}, {policy:?}: {wrong} of {} are wrong",
                error_bars.events
            );
        }
    }
}

/// With few decisive slices there is a bound, which holds.
#[test]
fn long_tails_have_bounds_that_hold() {
    for policy in POLICIES {
        for kind in ["long-tail", "phases", "spikes"] {
            let error_bars = error_bars(kind, policy, 24);
            assert!(
                error_bars.bounded == 0.0 || error_bars.within_bound() >= 0.95,
                "{kind}, {policy:?}: {error_bars:?}"
            );
        }
    }
}

/// The same on the fixed traces, which include a rhythm that plain rotation misjudges by more than
/// half.
#[test]
fn rhythm_hidden_from_rotation_has_no_error_bar() {
    for trace in traces::all() {
        for policy in POLICIES {
            let error_bars = measure::all_bars(&runs(&trace, policy, TICK_NS, 1, SEEDS.len()));
            if trace.name == "near-rotation" && policy == MuxPolicy::Rotate {
                assert_eq!(error_bars.known, 0.0, "{error_bars:?}");
            }
            let wrong = error_bars.known - error_bars.covered + error_bars.bounded - error_bars.held;
            assert!(
                wrong <= 0.16 * error_bars.events,
                "{}, {policy:?}: {wrong} of {} are wrong",
                trace.name,
                error_bars.events
            );
        }
    }
}

/// Each event is more frequent for a moment in each rotation. Some events are on at that moment,
/// always in the same part of their slices. The others never are, and their slices look constant:
/// the variation seen by the first makes all errors unknown.
#[test]
fn rhythm_detected_by_one_event_makes_other_errors_unknown() {
    let steps = TICK_NS * 4 / traces::STEP_NS;
    let moment = |step: u64| if step % steps < steps / 8 { 4.0 } else { 0.5 };
    let rates: Vec<f64> = (0..500 * steps).map(moment).collect();
    let trace = Trace::from_rates("moments".into(), vec![rates; 4], 2);
    for seed in SEEDS {
        let estimates = measure::run_core(&trace, MuxPolicy::Rotate, TICK_NS, seed).0;
        let error_bars = measure::bars(&estimates);
        assert_eq!(
            (error_bars.known, error_bars.bounded),
            (0.0, 0.0),
            "seed {seed:#x}: {estimates:?}"
        );
    }
}

/// Estimates through a core are as good as those of the queue and the estimator alone: the policy
/// receives a slice when it ends rather than a rotation later, when its test for constant rates has
/// moved on.
#[test]
fn core_estimates_match_estimator_accuracy() {
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
