//! Repeated time measurements on machines with other load, and skipped tests.
//!
//! Nothing else is retried: a crashed guest, a missing count and a kernel complaint fail at once.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::artefacts;

/// Maximum number of attempts of a time measurement.
const TRIES: usize = 3;

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

/// Repeats a time measurement until it is within its tolerance, at most three times. Repetitions
/// are part of the result: they are printed and appended to `target/integration/tries.txt`. `once`
/// receives the number of the attempt, starting from 0.
///
/// # Panics
/// Panics with all measured values if no attempt was within the tolerance.
#[track_caller]
pub fn measured(name: &str, once: impl FnMut(usize) -> Result<(), OutOfTolerance>) {
    measured_into(tries_file().as_deref(), name, once);
}

#[track_caller]
fn measured_into(file: Option<&Path>, name: &str, mut once: impl FnMut(usize) -> Result<(), OutOfTolerance>) {
    let mut offs = String::new();
    for n in 0..TRIES {
        match once(n) {
            Ok(()) if n == 0 => return,
            Ok(()) => {
                let result = format!("{name}: right at try {} of {TRIES}; before:{offs}", n + 1);
                eprintln!("{result}");
                keep(file, &result);
                return;
            }
            Err(OutOfTolerance(what)) => {
                _ = write!(offs, " [{}] {what};", n + 1);
            }
        }
    }
    panic!("{name}: off in {TRIES} of {TRIES} tries:{offs}");
}

/// Maximum number of attempts of a measurement of several parts. Interference rarely affects the
/// same part again.
const TRIES_OF_PARTS: usize = 15;

/// Repeats a measurement of several parts until each part has been conclusive once, at most fifteen
/// times. `once` receives the number of the attempt, starting from 0, and returns the name of each
/// part and whether it was conclusive; `once` itself asserts that a part is correct. Repetitions
/// are recorded as in [`measured`].
///
/// # Panics
/// Panics with the name of the part if a part was never conclusive.
#[track_caller]
pub fn measured_in_parts(name: &str, once: impl FnMut(usize) -> Vec<(String, bool)>) {
    measured_in_parts_into(tries_file().as_deref(), name, once);
}

#[track_caller]
fn measured_in_parts_into(
    file: Option<&Path>,
    name: &str,
    mut once: impl FnMut(usize) -> Vec<(String, bool)>,
) {
    let mut parts = BTreeMap::new();
    let mut offs = String::new();
    for n in 0..TRIES_OF_PARTS {
        for (part, told) in once(n) {
            *parts.entry(part).or_insert(false) |= told;
        }
        let untold: Vec<&str> = parts
            .iter()
            .filter(|(_, told)| !**told)
            .map(|(part, _)| part.as_str())
            .collect();
        if untold.is_empty() && !parts.is_empty() {
            if n > 0 {
                let result = format!(
                    "{name}: each part told after try {} of {TRIES_OF_PARTS}; before:{offs}",
                    n + 1
                );
                eprintln!("{result}");
                keep(file, &result);
            }
            return;
        }
        _ = write!(offs, " [{}] not told: {untold:?};", n + 1);
    }
    panic!("{name}: not all told in {TRIES_OF_PARTS} tries:{offs}");
}

/// Returns the file that records measurements with more than one attempt.
fn tries_file() -> Option<PathBuf> {
    Some(artefacts::log_dir().ok()?.join("tries.txt"))
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

    #[test]
    fn measurement_is_repeated_up_to_three_times() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("tries.txt");
        let mut tries = 0;
        measured_into(Some(&file), "unit test", |n| {
            tries = n + 1;
            within_tolerance(n == 1, || format!("{n} is early"))
        });
        assert_eq!(tries, 2);
        let kept = std::fs::read_to_string(&file).unwrap();
        assert_eq!(kept, "unit test: right at try 2 of 3; before: [1] 0 is early;\n");
        let failed = std::panic::catch_unwind(|| {
            measured_into(None, "unit test", |n| Err(OutOfTolerance(format!("try {n}"))))
        });
        let message = *failed.unwrap_err().downcast::<String>().unwrap();
        assert!(message.contains("[1] try 0; [2] try 1; [3] try 2;"), "{message}");
    }

    #[test]
    fn measurement_requires_each_part_once() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("tries.txt");
        let part = |name: &str, told| (name.to_owned(), told);
        let mut asked = 0;
        measured_in_parts_into(Some(&file), "x", |n| {
            asked += 1;
            vec![part("a", n == 0), part("b", n == 2)]
        });
        assert_eq!(asked, 3, "told as soon as each part was");
        assert!(
            std::fs::read_to_string(&file)
                .unwrap()
                .contains("[2] not told: [\"b\"]")
        );
        for never in [vec![part("a", true), part("b", false)], vec![]] {
            let told = std::panic::catch_unwind(|| measured_in_parts_into(None, "x", |_| never.clone()));
            assert!(told.is_err(), "{never:?}");
        }
    }
}
