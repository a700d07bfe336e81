//! Commands that are not in the crate `operator`, which contains the commands for running VMs and
//! for recordings.

pub mod generate;
pub mod statistics;
pub mod validate;
mod vm_completions;
