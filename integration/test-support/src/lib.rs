//! Helpers for the tests and benchmarks of several crates.
#![allow(missing_docs, reason = "names of fields and constants that tests use")]

pub mod alone;
pub mod child;
pub mod figures;
pub mod kernels;
pub mod skip;
pub mod steps;
