//! Helpers shared by several test modules.

pub mod child;
pub mod memory_file;
