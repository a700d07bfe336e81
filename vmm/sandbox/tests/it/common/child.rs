//! A process of its own for a test that shuts its process in: the test program, started again for one test.

use std::ffi::OsStr;
use std::process::Command;

/// The test program again, to run its test `as_a_child` alone, which others leave out (`#[ignore]`) and which
/// finds by `variable` what it is to do.
pub fn as_a_child(variable: &str, value: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "as_a_child", "--ignored", "--nocapture"])
        .args(["--test-threads", "1"])
        .env(variable, value);
    command
}
