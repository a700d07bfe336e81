//! Errors as one line ([`error_line()`]), rate-limited log lines that a guest can trigger
//! ([`guest_log!`]), and vCPU numbers as text ([`vcpu_names()`]).
//!
//! **Dependencies.** No other crate of this workspace. `perf-core` re-exports the first two.

mod error_line;
pub mod guest_log;
mod vcpu_names;

pub use crate::error_line::error_line;
pub use crate::vcpu_names::vcpu_names;
