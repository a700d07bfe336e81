//! Helpers that several modules use.

pub mod kernels;
#[path = "../../../../perf-core/tests/common/skip.rs"]
pub mod skip;
