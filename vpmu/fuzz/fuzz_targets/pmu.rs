//! Fuzzes the PMU against the reference model with a hostile guest and a busy host: MSRs, RDPMC,
<<<<<<< HEAD
//! CPUID, overflows, PMIs, filter changes, save and restore. Periodically reports the number of
=======
//! CPUID, overflows, PMIs, filter changes, save and restore. Periodically prints the number of
>>>>>>> 84b1550992e147be686d6d1bbe4ec3f61188cb7a
//! operations.
#![no_main]

use std::sync::atomic::{AtomicU64, Ordering};

#[path = "../../testing/mod.rs"]
mod testing;

<<<<<<< HEAD
/// Number of operations between two progress reports.
=======
/// Number of operations between progress messages.
>>>>>>> 84b1550992e147be686d6d1bbe4ec3f61188cb7a
const STEP: u64 = 1_000_000;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    static OPERATIONS: AtomicU64 = AtomicU64::new(0);
    let new = testing::stream::run::<vpmu::sim::SimEvents>(bytes);
    let before = OPERATIONS.fetch_add(new, Ordering::Relaxed);
    if before / STEP != (before + new) / STEP {
        eprintln!("{} million operations", (before + new) / 1_000_000);
    }
});
