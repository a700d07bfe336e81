//! Test utilities shared by several modules.

pub mod host;
#[allow(dead_code, reason = "the tests of the machine use the rest")]
#[path = "../../../../tests/it/common/kernels.rs"]
pub mod kernels;
pub mod machine;
pub mod operator;
pub mod pty;
#[path = "../../../../../perf-core/tests/common/skip.rs"]
pub mod skip;
pub mod test_lock;
pub mod unprivileged;
pub mod vm;
