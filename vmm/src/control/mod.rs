//! Control of a running VM by its operator: a Unix socket, JSON lines, events of perf-core.
//!
//! | module | story |
//! |---|---|
//! | `counts` | what a vCPU's loop counted, as it is told |
//! | [`server`] | the VM's side, in its main loop: connections and their bounds |
//! | `exits` | one connection's view of the vCPUs' exits |
//! | [`session`] | one connection's events |
//! | [`processes`] | the guest's processes: their code and memory, for unwinding and names |
//!
//! What is said, and the operator's end, are in `control-api`.
//!
//! The VM trusts no client: who may connect is decided by the directory's mode and the peer's credentials,
//! every request is bounded in size and rate, replies wait in bounded buffers, and what a connection opened
//! is closed with it.

mod counts;
mod exits;
pub mod processes;
pub mod server;
pub mod session;
