//! Control of a running VM by its operator: a Unix socket, JSON lines, events of perf-core.
//!
//! | module | story |
//! |---|---|
//! | [`place`] | where the sockets are and which VMs they lead to |
//! | [`protocol`] | what is said |
//! | [`server`] | the VM's side, in its main loop: connections and their bounds |
//! | [`session`] | one connection's events |
//! | [`mailbox`] | requests to a vCPU's own thread |
//! | [`client`] | the operator's side |
//!
//! The VM trusts no client: who may connect is decided by the directory's mode and the peer's credentials, every request
//! is bounded in size and rate, replies wait in bounded buffers, and what a connection opened is closed with it.

pub mod client;
pub mod peer;
pub mod place;
pub mod protocol;
pub mod server;
pub mod session;
