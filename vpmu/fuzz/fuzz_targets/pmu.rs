//! A hostile guest and a busy host against the reference model: MSRs, RDPMC, CPUID, overflows, PMIs, filter changes,
//! saving and restoring.
#![no_main]

#[path = "../../testing/mod.rs"]
mod testing;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    testing::stream::run::<vpmu::sim::SimEvents>(bytes);
});
