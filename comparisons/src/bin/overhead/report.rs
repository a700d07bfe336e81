//! Prints the results as a table and as JSON, and compares them with the targets of the project.

use std::collections::BTreeMap;

use comparisons::{ComparisonError, write_json};

use crate::figures::{MethodCost, Ratio, Slowdown};
use crate::guest::WINDOW;
use crate::options::Options;
use crate::sampling_method::SamplingMethod;

/// Target for the maximum ratio of two slowdowns: method d to method c, and method e to method b.
/// See the crate documentation for the methods.
const MOST_D_TO_C: f64 = 1.2;
const MOST_E_TO_B: f64 = 1.5;

/// Slowdowns in one round, in percent, by the letter of the sampling method. The first value is
/// based on the time in which the guest did not run, the second on the work done.
pub(crate) type RoundSlowdowns = BTreeMap<char, [f64; 2]>;

/// Prints the results and writes them to the requested file. Returns whether the targets are met.
pub(crate) fn report(options: &Options, cycles: &[RoundSlowdowns]) -> Result<bool, ComparisonError> {
    println!(
        "Slowdown of a CPL3 loop sampled at {} Hz, {} ms with sampling against {} ms before and after; {} rounds of {} turns of each:\n",
        options.hz,
        WINDOW.as_millis(),
        WINDOW.as_millis(),
        options.rounds,
        options.cycles
    );
    println!(
        "{:<46} {:>9} {:>20} {:>9}   by work done",
        "", "median", "quartiles", "error +-"
    );
    let by = |way: SamplingMethod, which: usize| {
        let slowdowns = cycles
            .iter()
            .filter_map(|cycle| Some(cycle.get(&way.letter())?[which]));
        Slowdown::of(&mut slowdowns.collect::<Vec<_>>())
    };
    let cost = |&way: &SamplingMethod| {
        let cost = MethodCost {
            not_run: by(way, 0),
            work: by(way, 1),
        };
        (way, cost)
    };
    let costs: Vec<(SamplingMethod, MethodCost)> = options.ways.0.iter().map(cost).collect();
    for (way, MethodCost { not_run: s, work }) in &costs {
        let quartiles = format!("{:.2} to {:.2} %", s.lower_quartile, s.upper_quartile);
        println!(
            "{:<46} {:>7.2} % {quartiles:>20} {:>9.2}   {:>6.2} +-{:.2} %",
            way.name(),
            s.median,
            s.standard_error,
            work.median,
            work.standard_error
        );
    }
    let [d_to_c, e_to_b] = [
        (SamplingMethod::EveryChain, SamplingMethod::Signal),
        (SamplingMethod::Default, SamplingMethod::Perf),
    ]
    .map(|(x, y)| {
        let asked = [x, y].iter().all(|way| options.ways.0.contains(way));
        let both = |cycle: &RoundSlowdowns| Some((cycle.get(&x.letter())?[0], cycle.get(&y.letter())?[0]));
        asked.then(|| Ratio::of(&cycles.iter().filter_map(both).collect::<Vec<_>>()))
    });
    let told = |ratio: Option<Option<Ratio>>| match ratio {
        Some(Some(ratio)) => format!("{:.2} +-{:.2}", ratio.value, ratio.standard_error),
        Some(None) => "not measurable here".to_owned(),
        None => "not measured".to_owned(),
    };
    println!(
        "\nd / c = {} (at most {MOST_D_TO_C})   e / b = {} (at most {MOST_E_TO_B})",
        told(d_to_c),
        told(e_to_b)
    );
    if let Some(path) = &options.json {
        let json = serde_json::json!({
            "hz": options.hz, "rounds": options.rounds, "cycles": options.cycles, "window_ms": WINDOW.as_millis() as u64,
            "slowdown_percent": costs.iter().map(|(way, cost)| (way.letter(), cost)).collect::<BTreeMap<_, _>>(),
            "d_to_c": d_to_c.flatten(), "e_to_b": e_to_b.flatten(),
        });
        write_json(path, &json)?;
    }
    // Ignore methods that were not measured.
    let met =
        |ratio: Option<Option<Ratio>>, most: f64| ratio.is_none_or(|r| r.is_some_and(|r| r.value <= most));
    Ok(met(d_to_c, MOST_D_TO_C) && met(e_to_b, MOST_E_TO_B))
}
