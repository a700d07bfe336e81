//! Helpers that several modules use.

pub mod child;
pub mod memory_file;
