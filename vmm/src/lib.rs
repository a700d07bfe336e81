//! The Perfvisor VMM.

pub mod boot;
pub mod cli;
pub mod console;
pub mod devices;
pub mod memory;
pub mod profile;
pub mod rdpmc;
