//! Helpers shared by the test modules.

pub mod kernels;
#[path = "../../../../perf-core/tests/common/skip.rs"]
pub mod skip;
