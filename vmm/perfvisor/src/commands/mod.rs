//! Commands of the program itself. Those for running VMs and for recordings are in the crate
//! `operator`.

pub mod generate;
pub mod statistics;
pub mod validate;
mod vm_completions;
