//! Reporting of tests that cannot run.

/// Reports that a test is skipped, and why. `able` is set if this machine should be able to run it.
///
/// # Panics
/// Panics if `able` is set and the environment contains `CI`, where a skipped test is a failure.
#[track_caller]
pub fn skipped(why: &str, able: bool) {
    let ci = std::env::var_os("CI").is_some_and(|value| !["", "0", "false"].iter().any(|no| value == *no));
    assert!(!(able && ci), "SKIP in CI, where it could run: {why}");
    eprintln!("SKIP: {why}");
}
