//! Fuzzes the PMU against the reference model with a hostile guest and a busy host: MSRs, RDPMC,
//! CPUID, overflows, PMIs, filter changes, save and restore. Periodically prints the number of
//! operations.
#![no_main]

use std::sync::atomic::{AtomicU64, Ordering};

#[path = "../../testing/mod.rs"]
mod testing;

/// Number of operations between progress messages.
const STEP: u64 = 1_000_000;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    static OPERATIONS: AtomicU64 = AtomicU64::new(0);
    let new = testing::stream::run::<vpmu::sim::SimCounterEvents>(bytes);
    let before = OPERATIONS.fetch_add(new, Ordering::Relaxed);
    if before / STEP != (before + new) / STEP {
        eprintln!("{} million operations", (before + new) / 1_000_000);
    }
});
