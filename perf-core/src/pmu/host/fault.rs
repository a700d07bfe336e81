//! Failures of `perf_event_open(2)` that a test asks for: nothing of this is in a release.
//!
//! The environment names a file. Its text is the number of an error, which each call fails with from then on,
//! and behind a blank, if not each is to fail, which one is made: `4 3` lets every third pass. As long as the
//! file is empty all are made. So a test chooses the moment.

#[cfg(debug_assertions)]
use std::{
    fs::File,
    os::unix::fs::FileExt,
    sync::OnceLock,
    sync::atomic::{AtomicI32, AtomicU32, Ordering},
};

/// Names the file.
#[cfg(debug_assertions)]
const FILE: &str = "PERFVISOR_TEST_PERF_OPEN";

/// The error that this call of `perf_event_open(2)` is to fail with.
#[cfg(debug_assertions)]
pub(super) fn of_open() -> Option<i32> {
    // Opened at the first call, before files and system calls are shut off.
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
        log::info!("a test has perf_event_open fail with error {error}");
    }
    Some(error)
}

/// None in a release.
#[cfg(not(debug_assertions))]
pub(super) const fn of_open() -> Option<i32> {
    None
}
