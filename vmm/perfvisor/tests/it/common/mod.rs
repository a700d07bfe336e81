//! Test utilities shared by several modules.

pub mod host;
pub mod machine;
pub mod operator;
pub mod process;
pub mod pty;
pub mod test_lock;
pub mod unprivileged;
pub mod vm;
