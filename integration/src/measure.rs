//! Repeats and evaluates time measurements on machines with other load, and reports skipped tests.
//!
//! Each measurement is repeated a fixed number of times, regardless of the results, and all
//! repetitions are evaluated, because other load disturbs single measurements.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use crate::artefacts;

/// Number of repetitions of a time or rate measurement.
pub const MEASUREMENTS: usize = 3;

/// A measured time or rate: name, value and accepted range.
pub type Figure = (&'static str, f64, RangeInclusive<f64>);

/// Takes [`MEASUREMENTS`] measurements and checks their medians and deviations.
///
/// `once` takes one measurement. Its argument is the number of the measurement, starting from 0,
/// and it returns the same figures each time. For each figure, the median must be in the accepted
/// range, and the median absolute deviation must not exceed the width of this range. A single
/// disturbed measurement therefore does not cause a failure. Median, deviation and range of the
/// values are printed and appended to `target/integration/measurements.txt`.
///
/// # Panics
/// Panics with all figures if a median or a deviation is not accepted, or a value is NaN.
#[track_caller]
pub fn measured(name: &str, once: impl FnMut(usize) -> Vec<Figure>) {
    measured_into(log_file().as_deref(), name, once);
}

#[track_caller]
fn measured_into(file: Option<&Path>, name: &str, once: impl FnMut(usize) -> Vec<Figure>) {
    let all: Vec<Vec<Figure>> = (0..MEASUREMENTS).map(once).collect();
    let mut off = Vec::new();
    for (n, (figure, _, tolerance)) in all[0].iter().enumerate() {
        let mut values: Vec<f64> = all.iter().map(|figures| figures[n].1).collect();
        values.sort_by(f64::total_cmp);
        let median = values[MEASUREMENTS / 2];
        let mut deviations: Vec<f64> = values.iter().map(|value| (value - median).abs()).collect();
        deviations.sort_by(f64::total_cmp);
        let deviation = deviations[MEASUREMENTS / 2];
        let (least, most) = (tolerance.start(), tolerance.end());
        let result = format!(
            "{name}: {figure}: {median:.4} ± {deviation:.4} ({:.4} to {:.4}), wanted {least} to {most}",
            values[0],
            values[MEASUREMENTS - 1]
        );
        eprintln!("{result}");
        keep(file, &result);
        let is_complete = values.iter().all(|value| !value.is_nan());
        if !(is_complete && tolerance.contains(&median) && deviation <= most - least) {
            off.push(result);
        }
    }
    assert!(off.is_empty(), "{}", off.join("; "));
}

/// Number of repetitions of a measurement with several parts. Other load can make a part
/// inconclusive, but rarely the same part in every repetition.
const MEASUREMENTS_OF_PARTS: usize = 5;

/// Repeats a measurement that has several parts, and returns the names of the parts that were
/// conclusive in no repetition.
///
/// `once` takes one measurement, asserts that its results are correct, and returns the name of each
/// part and whether the part was conclusive.
pub fn measured_in_parts(mut once: impl FnMut() -> Vec<(String, bool)>) -> Vec<String> {
    let mut parts = BTreeMap::new();
    for (part, conclusive) in (0..MEASUREMENTS_OF_PARTS).flat_map(|_| once()) {
        *parts.entry(part).or_insert(false) |= conclusive;
    }
    let untold = parts.into_iter().filter(|(_, conclusive)| !conclusive);
    untold.map(|(part, _)| part).collect()
}

/// Returns the file to which measurements are appended.
fn log_file() -> Option<PathBuf> {
    Some(artefacts::log_dir().ok()?.join("measurements.txt"))
}

/// Appends `line` to the file of measurements. The output of a passing test is not shown by the
/// test harness.
fn keep(file: Option<&Path>, line: &str) {
    let file = file.and_then(|path| OpenOptions::new().create(true).append(true).open(path).ok());
    if let Some(mut file) = file {
        let _ = writeln!(file, "{line}");
    }
}

/// Reports that a test is skipped for the reason `why`. `able` is `true` if this machine could run
/// the test with additional packages or files.
///
/// # Panics
/// Panics if `able` is `true` and the environment variable `CI` is set, because tests must not be
/// skipped in CI.
#[track_caller]
pub fn skipped(why: &str, able: bool) {
    let ci = std::env::var_os("CI").is_some_and(|value| !["", "0", "false"].iter().any(|no| value == *no));
    assert!(!(able && ci), "SKIP in CI, where it could run: {why}");
    eprintln!("SKIP: {why}");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `measured` takes the same number of measurements regardless of their results, and checks the
    /// median and the deviation.
    #[test]
    fn median_and_deviation_must_fit_the_tolerance() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("measurements.txt");
        let judged = |values: [f64; 3]| {
            let mut taken = 0;
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                measured_into(Some(&file), "unit test", |n| {
                    taken += 1;
                    vec![("ratio", values[n], 0.5..=1.5)]
                });
            }));
            assert_eq!(taken, 3, "{values:?}");
            result.is_ok()
        };
        assert!(judged([1.0, 1.7, 0.75]));
        let kept = std::fs::read_to_string(&file).unwrap();
        assert_eq!(
            kept,
            "unit test: ratio: 1.0000 ± 0.2500 (0.7500 to 1.7000), wanted 0.5 to 1.5\n"
        );
        assert!(!judged([1.6, 1.0, 1.7]) && !judged([-0.5, 1.0, 2.5]) && !judged([1.0, f64::NAN, 1.0]));
    }

    #[test]
    fn parts_are_conclusive_in_any_of_five_measurements() {
        let mut taken = 0;
        let untold = measured_in_parts(|| {
            taken += 1;
            let part = |name: &str, conclusive| (name.to_owned(), conclusive);
            vec![part("a", taken == 1), part("b", taken == 5), part("c", false)]
        });
        assert_eq!((taken, untold), (5, vec!["c".to_owned()]));
    }
}
