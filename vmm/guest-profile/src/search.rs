//! The search for a running kernel, in two processes: one that has the guest, and one that reads tables of
//! the guest's making and can be done without.
//!
//! | file | story |
//! |---|---|
//! | `wire` | messages between the two, and how long they may be |
//! | `reader` | the process that reads: asks for guest memory, sends what it found |
//! | `asker` | the process that has the guest: lends memory, believes nothing |
//! | `found` | a kernel that was found |
//!
//! Both ends are of one program, so the messages have no version. The reader is taken for hostile all the
//! same: a guest may have taken it over.

mod asker;
mod found;
mod reader;
mod wire;

pub use asker::{AskError, ask};
pub use found::{FoundKernel, Unread};
pub use reader::serve;

#[cfg(test)]
mod tests;
