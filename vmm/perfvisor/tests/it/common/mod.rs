//! What tests of the program share.
#![allow(dead_code, missing_docs, reason = "each test program uses its part")]

pub mod host;
pub mod machine;
pub mod nobody;
pub mod operator;
#[path = "../../../../perf-core/tests/common/skip.rs"]
pub mod skip;
pub mod vm;
