//! Test utilities shared by several modules.

pub mod console_vm;
pub mod host;
pub mod operator;
pub mod process;
pub mod pty;
pub mod stepping;
pub mod test_lock;
pub mod unprivileged;
pub mod vm;
