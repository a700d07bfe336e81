//! Injection of `perf_event_open(2)` failures for tests. Not compiled into releases.
//!
//! An environment variable names a file. If the file contains an error number, each call fails with
//! that error. An optional second number n, after a blank, lets every nth call succeed: with `4 3`,
//! every third call. No call fails while the file is empty, so a test controls when failures begin.

#[cfg(debug_assertions)]
use std::{
    fs::File,
    os::unix::fs::FileExt,
    sync::OnceLock,
    sync::atomic::{AtomicI32, AtomicU32, Ordering},
};

/// Name of the environment variable that names the file.
#[cfg(debug_assertions)]
const FILE: &str = "PERFVISOR_TEST_PERF_OPEN";

/// Returns the error with which this call of `perf_event_open(2)` must fail, or `None` if the call
/// must proceed.
#[cfg(debug_assertions)]
pub(super) fn injected_open_error() -> Option<i32> {
    // Opened at the first call, before the process restricts its access to files and system calls.
    static WANTED: OnceLock<Option<File>> = OnceLock::new();
    static CALLS: AtomicU32 = AtomicU32::new(0);
    static LAST: AtomicI32 = AtomicI32::new(0);
    let file = WANTED.get_or_init(|| File::open(std::env::var_os(FILE)?).ok());
    let mut bytes = [0; 16];
    let count = file.as_ref()?.read_at(&mut bytes, 0).ok()?;
    let mut words = std::str::from_utf8(&bytes[..count]).ok()?.split_whitespace();
    let error: i32 = words.next()?.parse().ok()?;
    let passes: Option<u32> = words.next().and_then(|word| word.parse().ok());
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let passes = passes.is_some_and(|passes| call % passes.max(1) == passes.max(1) - 1);
    if passes {
        return None;
    }
    if LAST.swap(error, Ordering::Relaxed) != error {
        log::info!("a test makes perf_event_open fail with error {error}");
    }
    Some(error)
}

/// Returns `None`, because release builds inject no errors.
#[cfg(not(debug_assertions))]
pub(super) const fn injected_open_error() -> Option<i32> {
    None
}
