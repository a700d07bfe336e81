//! Searches for a running kernel with two processes. The *requester* holds guest memory. The
//! *reader* parses tables that the guest controls. It is sandboxed and may crash without
//! consequences.
//!
//! | file | contents |
//! |---|---|
//! | `wire` | messages between the processes, and their maximum lengths |
//! | `reader` | the process that parses tables: requests guest memory and sends its result |
//! | `requester` | the process that holds guest memory: serves reads and validates the result |
//! | `found_kernel` | a kernel that was found |
//!
//! Both processes run the same program, so the messages need no version. The reader is still
//! treated as hostile, because a guest may have compromised it.

mod found_kernel;
mod reader;
mod requester;
mod wire;

pub use found_kernel::{FoundKernel, KernelTableReadError};
pub use reader::serve;
pub use requester::{KernelSearchRequestError, search_kernel};

#[cfg(test)]
mod tests;
