//! Measurements of time, which a machine that does other things may spoil, and tests that cannot be run.
//!
//! Nothing else is tried again: a guest that dies, a count that is not there and a kernel that complains fail
//! at once.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::artefacts;

/// How often a measurement of time is taken.
const TRIES: usize = 3;

/// A time, or a rate, is not what it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Off(pub String);

/// [`Off`] unless `right`.
///
/// # Errors
/// As said.
pub fn in_time(right: bool, what: impl FnOnce() -> String) -> Result<(), Off> {
    if right { Ok(()) } else { Err(Off(what())) }
}

/// Takes a measurement of time until it is right, at most three times. Further tries are part of the result:
/// they are printed, and added to `target/integration/tries.txt`. `once` gets the number of its try, from 0.
///
/// # Panics
/// When it was never right, with what was measured each time.
#[track_caller]
pub fn measured(name: &str, once: impl FnMut(usize) -> Result<(), Off>) {
    measured_into(tries_file().as_deref(), name, once);
}

#[track_caller]
fn measured_into(file: Option<&Path>, name: &str, mut once: impl FnMut(usize) -> Result<(), Off>) {
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
            Err(Off(what)) => {
                _ = write!(offs, " [{}] {what};", n + 1);
            }
        }
    }
    panic!("{name}: off in {TRIES} of {TRIES} tries:{offs}");
}

/// How often a measurement of several parts is taken. What spoils one part of it seldom spoils the same
/// again.
const TRIES_OF_PARTS: usize = 15;

/// Takes a measurement of several times until each of them could be told once, at most fifteen times. `once`
/// gets the number of its try, from 0, and returns the name of each part and whether it could be told; what
/// is wrong with a part it asserts itself. Further tries are part of the result, as with [`measured`].
///
/// # Panics
/// When a part was never told, with its name.
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

/// Where results of more than one try are added.
fn tries_file() -> Option<PathBuf> {
    Some(artefacts::log_dir().ok()?.join("tries.txt"))
}

/// A result that is only printed is not seen of a test that passes.
fn keep(file: Option<&Path>, line: &str) {
    let file = file.and_then(|path| OpenOptions::new().create(true).append(true).open(path).ok());
    if let Some(mut file) = file {
        let _ = writeln!(file, "{line}");
    }
}

/// Says that a test is not run, and why. `able` is whether this machine could run it, if something were there
/// that is not.
///
/// # Panics
/// When it is able and the environment has `CI`: there a test that does not run has failed.
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
    fn only_what_is_off_is_measured_again_and_three_times_is_a_failure() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("tries.txt");
        let mut tries = 0;
        measured_into(Some(&file), "unit test", |n| {
            tries = n + 1;
            in_time(n == 1, || format!("{n} is early"))
        });
        assert_eq!(tries, 2);
        let kept = std::fs::read_to_string(&file).unwrap();
        assert_eq!(kept, "unit test: right at try 2 of 3; before: [1] 0 is early;\n");
        let failed =
            std::panic::catch_unwind(|| measured_into(None, "unit test", |n| Err(Off(format!("try {n}")))));
        let message = *failed.unwrap_err().downcast::<String>().unwrap();
        assert!(message.contains("[1] try 0; [2] try 1; [3] try 2;"), "{message}");
    }

    #[test]
    fn each_part_is_told_once_and_one_that_never_is_fails() {
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
