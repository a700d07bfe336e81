//! Errors as one line ([`error_line()`]), and rate-limited log lines that a guest can trigger
//! ([`guest_log!`]).
//!
//! **Dependencies.** No other crate of this workspace. `perf-core` exports both items again.

mod error_line;
pub mod guest_log;

pub use crate::error_line::error_line;
