//! Helpers shared by several test modules.

pub mod memory_file;
