//! Time measurements on machines with other load, and skipped tests.
//!
//! Other load disturbs measurements that depend on time. They are taken a fixed number of times,
//! whatever the results are, and all of them are judged.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::artefacts;

/// Number of measurements of a time or rate.
pub const MEASUREMENTS: usize = 3;

/// A measured time or rate is outside its tolerance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutOfTolerance(pub String);

/// Returns [`OutOfTolerance`] unless `right` is `true`.
///
/// # Errors
/// Returns [`OutOfTolerance`] with the text of `what`.
pub fn within_tolerance(right: bool, what: impl FnOnce() -> String) -> Result<(), OutOfTolerance> {
    if right {
        Ok(())
    } else {
        Err(OutOfTolerance(what()))
    }
}

/// Takes [`MEASUREMENTS`] measurements, of which one at least must be within the tolerance: other load
/// takes time from a guest and gives it none, so that the product is judged by the least disturbed
/// one. The others are printed and appended to `target/integration/measurements.txt`. `once` receives
/// the number of the measurement, starting from 0.
///
/// # Panics
/// Panics with the values of all measurements if all are out of tolerance.
#[track_caller]
pub fn measured(name: &str, once: impl FnMut(usize) -> Result<(), OutOfTolerance>) {
    measured_into(log_file().as_deref(), name, once);
}

#[track_caller]
fn measured_into(file: Option<&Path>, name: &str, mut once: impl FnMut(usize) -> Result<(), OutOfTolerance>) {
    let measured = (0..MEASUREMENTS).map(|n| (n + 1, once(n)));
    let off: Vec<String> = measured
        .filter_map(|(n, result)| Some(format!("[{n}] {}", result.err()?.0)))
        .collect();
    let result = format!("{name}: {} of {MEASUREMENTS} off: {}", off.len(), off.join("; "));
    if !off.is_empty() {
        eprintln!("{result}");
        keep(file, &result);
    }
    assert!(off.len() < MEASUREMENTS, "{result}");
}

/// Number of measurements whose parts may be inconclusive because of other load. Interference rarely
/// affects the same part each time.
const MEASUREMENTS_OF_PARTS: usize = 5;

/// Takes five measurements of several parts. `once` returns the name of each part and whether it was
/// conclusive; `once` itself asserts that a part is correct, in each measurement. Returns the parts
/// that were never conclusive.
pub fn measured_in_parts(mut once: impl FnMut() -> Vec<(String, bool)>) -> Vec<String> {
    let mut parts = BTreeMap::new();
    for (part, conclusive) in (0..MEASUREMENTS_OF_PARTS).flat_map(|_| once()) {
        *parts.entry(part).or_insert(false) |= conclusive;
    }
    let untold = parts.into_iter().filter(|(_, conclusive)| !conclusive);
    untold.map(|(part, _)| part).collect()
}

/// Returns the file that records measurements that were out of tolerance.
fn log_file() -> Option<PathBuf> {
    Some(artefacts::log_dir().ok()?.join("measurements.txt"))
}

/// Appends a line to the file, because printed output of a passing test is not shown.
fn keep(file: Option<&Path>, line: &str) {
    let file = file.and_then(|path| OpenOptions::new().create(true).append(true).open(path).ok());
    if let Some(mut file) = file {
        let _ = writeln!(file, "{line}");
    }
}

/// Reports that a test is skipped and why. `able` tells whether this machine could run the test if
/// the missing prerequisite were installed.
///
/// # Panics
/// Panics if `able` is `true` and `CI` is set, where tests must not be skipped.
#[track_caller]
pub fn skipped(why: &str, able: bool) {
    let ci = std::env::var_os("CI").is_some_and(|value| !["", "0", "false"].iter().any(|no| value == *no));
    assert!(!(able && ci), "SKIP in CI, where it could run: {why}");
    eprintln!("SKIP: {why}");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of measurements does not depend on their results, and the best one decides.
    #[test]
    fn one_of_three_measurements_must_be_within_tolerance() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("measurements.txt");
        let judged = |off: [bool; 3]| {
            let mut taken = 0;
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                measured_into(Some(&file), "unit test", |n| {
                    taken += 1;
                    within_tolerance(!off[n], || format!("{n} is early"))
                });
            }));
            assert_eq!(taken, 3, "{off:?}");
            result.is_ok()
        };
        assert!(judged([false; 3]) && !file.exists());
        assert!(judged([true, false, false]));
        let kept = std::fs::read_to_string(&file).unwrap();
        assert_eq!(kept, "unit test: 1 of 3 off: [1] 0 is early\n");
        assert!(judged([true, false, true]) && !judged([true; 3]));
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
