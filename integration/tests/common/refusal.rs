//! Checks the format of an error for invalid input: one line on standard error, exit status 2, and
//! no standard output.

use integration::process::ProcessOutput;

/// Checks that the command `what` rejected invalid input. Its output must have the format described
/// in the module documentation and contain all of `words`.
#[track_caller]
pub fn check_refusal(output: &ProcessOutput, what: &str, words: &[&str]) {
    let stderr = output.stderr_text();
    assert_eq!(output.code(), Some(2), "{what}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{what}: not one line:\n{stderr}");
    assert!(
        output.stdout.is_empty(),
        "{what}: printed {}",
        output.stdout_text()
    );
    for word in words {
        assert!(stderr.contains(word), "{what}: no \"{word}\" in {stderr}");
    }
    assert!(!stderr.contains("panicked"), "{what}: {stderr}");
}
