//! Debugging the guest with gdb (`run --gdb SOCKET`), by the `gdbstub` crate.
//!
//! | module | story |
//! |---|---|
//! | [`config`] | what a user writes behind `--gdb` |
//! | [`server`] | the socket and its thread: one client at a time |
//! | `target` | the machine as the stub sees it: threads, breakpoints, stops |
//! | `registers` | registers as KVM has them and as gdb wants them |
//! | `memory` | guest memory through a vCPU's page tables, and the INT3s in it |
//!
//! A thread of its own serves the client, and may block on it: what a client does or leaves undone never
//! keeps the main loop. What it shares with the vCPUs is [`crate::vcpu::debugger`].
//!
//! The client is a user who may do anything to the guest. It may not do more: packets are bounded by the
//! stub's buffer, breakpoints by `target`'s limits, and whatever it sends, the machine goes on when it has
//! gone, with nothing of it in the guest's memory.

mod arch;
pub mod config;
mod memory;
mod registers;
pub mod server;
mod target;

#[cfg(test)]
mod tests;
