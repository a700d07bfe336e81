//! Runs a test in a process of its own, for tests that measure their whole process.

use std::process::Command;

/// Environment variable of the process in which a test runs alone.
const ALONE: &str = "PERFVISOR_TEST_ALONE";

/// Returns `true` in a process in which only the calling test runs. In any other process, runs the
/// test program again with only the test `name` (its path in the crate) and returns `false`.
///
/// # Panics
/// Panics if the test fails in the other process, or if that process runs no test.
pub fn runs_alone(name: &str) -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let program = std::env::current_exe().expect("the path of the test program");
    let output = Command::new(program)
        .args(["--exact", name])
        .env(ALONE, "1")
        .output()
        .expect("a new process");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    false
}
