//! Privileges of the process that runs the tests.

use std::fs;
use std::os::unix::fs::MetadataExt;

use test_support::skip::skipped;

/// Returns whether the test runs as root. Otherwise prints that the test is skipped.
pub fn is_root() -> bool {
    let own = fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0);
    if !own {
        skipped(
            "only root has a jail without a user namespace and with a PID namespace",
            false,
        );
    }
    own
}
