//! What tests of the program share.
#![allow(dead_code, missing_docs)]

#[path = "../../../../perf-core/tests/common/skip.rs"]
pub mod skip;
pub mod vm;
