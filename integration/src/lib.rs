//! Runs real guests and parses their output.
//!
//! A *scenario* is a guest with a script. A scenario runs in a [`test_host::TestHost`], which is
//! this machine if its KVM supports Linux guests, or else the lab host, a QEMU that emulates a
//! processor with AMD-V. Tests are independent of this choice.
//!
//! All operations have time limits. Consoles are saved in `target/integration`.

pub mod artefacts;
pub mod debian;
pub mod footprint;
pub mod guest;
mod hang;
pub mod lab;
pub mod lease;
pub mod limit;
pub mod measure;
mod monitor;
pub mod parse;
mod pool;
pub mod process;
pub mod qemu_comparison;
mod report;
pub mod test_host;
