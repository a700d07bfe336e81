//! Reports tests that cannot run on this machine.

/// Reports that a test is skipped for the reason `why`. `able` is `true` if this machine should be
/// able to run the test.
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
