//! Tests of the accuracy guarantee of the adaptive policy with the interpolating estimator, on the
//! traces and seeds of the `mux_quality` example. The mean error is at most a third of the error of
//! round robin with linear scaling, and no trace has a greater error.

#[allow(dead_code, reason = "each program uses its part")]
#[path = "../../examples/mux_quality/family.rs"]
mod family;
#[allow(dead_code, reason = "each program uses its part")]
#[path = "../../examples/mux_quality/measure.rs"]
mod measure;
#[allow(dead_code, reason = "each program uses its part")]
#[path = "../../examples/mux_quality/traces.rs"]
mod traces;

use std::sync::OnceLock;
use std::thread;

use measure::{Comparison, ErrorBars, runs};
use perf_core::mux::MuxPolicy;
use traces::{SEEDS, TICK_NS, Trace};

/// Calls `measure` for each item on a separate thread. Returns the results in the order of the
/// items.
fn in_parallel<T: Sync, R: Send>(items: &[T], measure: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let measure = &measure;
    thread::scope(|scope| {
        let threads: Vec<_> = items
            .iter()
            .map(|item| scope.spawn(move || measure(item)))
            .collect();
        let results = threads.into_iter().map(|thread| thread.join());
        results.map(|result| result.expect("a measurement")).collect()
    })
}

/// Returns each fixed trace with a comparison of both policies under a precise timer. The
/// comparisons are measured once for all tests.
fn fixed_traces() -> &'static [(Trace, Comparison)] {
    static FIXED: OnceLock<Vec<(Trace, Comparison)>> = OnceLock::new();
    FIXED.get_or_init(|| {
        in_parallel(&traces::all(), |trace| {
            (trace.clone(), Comparison::new(trace, 1, SEEDS.len()))
        })
    })
}

/// Checks the accuracy guarantee for comparisons of named traces. On no trace may the adaptive
/// policy be worse by more than the noise between seeds and `tolerance`.
fn check<'a>(comparisons: impl Iterator<Item = (&'a str, &'a Comparison)>, tolerance: f64) {
    let (mut reference, mut ours) = (0.0, 0.0);
    for (name, c) in comparisons {
        assert!(
            c.excess() <= tolerance,
            "{name}: {:?} against {:?}",
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
    let fixed = fixed_traces().iter();
    check(fixed.map(|(trace, c)| (trace.name.as_str(), c)), 0.0);
}

/// The accuracy guarantee also holds for a timer that fires only on whole milliseconds. Rounding to
/// milliseconds makes the intervals irregular, which adds an error of up to half a percent.
#[test]
fn coarse_timer_is_enough() {
    let coarse = in_parallel(fixed_traces(), |(trace, precise)| {
        let adaptive = runs(trace, MuxPolicy::Adaptive, TICK_NS, 1_000_000, SEEDS.len());
        Comparison::of(precise.rotate.clone(), adaptive)
    });
    let names = fixed_traces().iter().map(|(trace, _)| trace.name.as_str());
    check(names.zip(&coarse), 0.005);
}

/// The accuracy guarantee also holds on random traces. Only for periodic patterns that round robin
/// happens to sample evenly, the estimates may be slightly worse.
#[test]
fn third_of_the_error_on_random_traces() {
    let random: Vec<_> = family::HOLD_OUT
        .step_by(2)
        .map(family::trace)
        .map(|trace| (Comparison::new(&trace, 1, 4), trace.name))
        .collect();
    check(random.iter().map(|(c, name)| (name.as_str(), c)), 0.003);
}

const POLICIES: [MuxPolicy; 2] = [MuxPolicy::Rotate, MuxPolicy::Adaptive];

/// Returns statistics of the error bars that a core reports on 24 traces of `kind`, under each
/// policy. The traces are measured once for all tests.
fn error_bars(kind: &str) -> [(MuxPolicy, ErrorBars); 2] {
    static MEASURED: [OnceLock<[ErrorBars; 2]>; family::ALL_KINDS.len()] =
        [const { OnceLock::new() }; family::ALL_KINDS.len()];
    let index = family::ALL_KINDS.iter().position(|known| *known == kind);
    let measured = MEASURED[index.expect("a kind of traces")].get_or_init(|| {
        let mut all = [ErrorBars::default(); 2];
        for seed in family::HOLD_OUT.take(24) {
            let trace = family::of_kind(kind, seed);
            for (policy, all) in POLICIES.into_iter().zip(&mut all) {
                let (estimates, _) = measure::run_core(&trace, policy, TICK_NS, SEEDS[0]);
                all.merge(&measure::bars(&estimates));
            }
        }
        all
    });
    [(POLICIES[0], measured[0]), (POLICIES[1], measured[1])]
}

/// The true count lies within two standard errors of the estimate 19 times out of 20, neither much
/// less often nor always. This holds under both policies for every kind of trace whose slices
/// determine a standard error.
#[test]
fn two_standard_errors_have_nominal_coverage() {
    let mut all = [ErrorBars::default(); 2];
    for kind in [
        "steady", "bursts", "spikes", "drift", "phases", "common", "mixture", "ramp",
    ] {
        for ((policy, error_bars), all) in error_bars(kind).into_iter().zip(&mut all) {
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
    }
    for (policy, all) in POLICIES.into_iter().zip(&all) {
        let within = all.within_two();
        assert!(
            (0.93..=0.97).contains(&within),
            "{policy:?}: {:.1} % within two",
            100.0 * within
        );
    }
}

/// A periodic pattern in phase with the intervals (a rhythm) appears constant in all slices. At
/// most 5 % of the estimates of such patterns have an incorrect error bar. All others have a
/// correct one or none.
#[test]
fn aliased_rhythms_have_no_error_bar_or_a_correct_one() {
    for kind in [
        "rhythm",
        "rhythms",
        "near-rotation",
        "near-slice",
        family::IN_STEP,
        family::IN_STEP_ROTATE,
    ] {
        for (policy, error_bars) in error_bars(kind) {
            let wrong = error_bars.known - error_bars.covered + error_bars.bounded - error_bars.held;
            assert!(
                wrong <= 0.05 * error_bars.events,
                "{kind}, {policy:?}: {wrong} of {} are wrong",
                error_bars.events
            );
        }
    }
}

/// If a few slices dominate the count, the estimate has an error bound, and the actual error is
/// within this bound.
#[test]
fn long_tails_have_bounds_that_hold() {
    for kind in ["long-tail", "phases", "spikes"] {
        for (policy, error_bars) in error_bars(kind) {
            assert!(
                error_bars.bounded == 0.0 || error_bars.within_bound() >= 0.95,
                "{kind}, {policy:?}: {error_bars:?}"
            );
        }
    }
}

/// At most 16 % of the estimates of each fixed trace have an incorrect error bar. On the trace with
/// a periodic pattern that round robin misjudges by more than half, no estimate under round robin
/// has a standard error.
#[test]
fn rhythm_hidden_from_rotation_has_no_error_bar() {
    for (trace, c) in fixed_traces() {
        for (policy, runs) in POLICIES.into_iter().zip([&c.rotate, &c.adaptive]) {
            let error_bars = measure::all_bars(runs);
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

/// If the slices of one event reveal a periodic pattern in phase with the intervals, the errors of
/// all events are unknown. In this test, all events have a brief peak in each rotation. Some events
/// are active during the peak, and the variation within their slices reveals the pattern. All other
/// events are never active during the peak, so their slices look constant.
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

/// Estimates of a core are as accurate as those of the multiplexing queue and the estimator alone.
/// This requires that the core reports each slice to the queue as soon as the slice ends.
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
