//! Debugging the guest with gdb (`run --gdb SOCKET`), through the `gdbstub` crate.
//!
//! | module | contents |
//! |---|---|
//! | [`config`] | the argument of `--gdb` |
//! | [`server`] | the socket and its thread: one client at a time |
//! | `target` | the machine as a gdbstub target: threads, breakpoints, stops |
//! | `registers` | conversion between the registers of KVM and gdb |
//! | `memory` | guest memory through a vCPU's page tables, and the INT3s in it |
//!
//! A separate thread serves the client and may block on it, so a client cannot delay the main loop.
//! The thread shares [`crate::vcpu::debugger`] with the vCPUs.
//!
//! The client has full control over the guest and none over the host. The stub's buffer limits
//! packets and `target` limits breakpoints. When the client disconnects, its breakpoints are
//! removed from guest memory and the machine resumes.

mod arch;
pub mod config;
mod memory;
mod registers;
pub mod server;
mod target;

#[cfg(test)]
mod tests;
