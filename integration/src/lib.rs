//! Running real guests and reading what they print.
//!
//! A *scenario* is a guest with a script in it. It runs in a [`place::Place`]: directly on this
//! machine's KVM where that can run Linux, else in the lab host, a QEMU that emulates a processor
//! with AMD-V and boots in seconds. Tests do not know the difference.
//!
//! Everything has a time limit. Consoles are kept in `target/integration`.

pub mod artefacts;
pub mod beside;
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
pub mod place;
mod pool;
pub mod process;
mod report;
