//! Tests that cannot be run.

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
