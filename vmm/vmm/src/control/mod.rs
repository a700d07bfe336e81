//! Control of a running VM by its operator, through JSON lines on a Unix socket and events of
//! perf-core.
//!
//! | module | contents |
//! |---|---|
//! | `balloon` | state of the balloon |
//! | `counts` | statistics of a vCPU's run loop |
//! | [`server`] | the server in the VM's main loop: connections and their limits |
//! | `events` | translation of an operator's event to one of perf-core |
//! | `exits` | exit statistics of one connection |
//! | `guest_view` | the guest's PMU, as the guest programmed it |
//! | [`limits`] | rate limiters of the devices |
//! | `metadata` | the metadata service |
//! | `sampling` | sampling parameters of an operator's events |
//! | [`session`] | events of one connection |
//! | [`processes`] | processes of the guest: their code and memory, for unwinding and symbolization |
//!
//! The protocol and the client are in `control-api`.
//!
//! The VM does not trust clients. The directory mode and the peer credentials decide who may
//! connect. Each request is limited in size and rate, unsent replies are bounded, and all resources
//! of a connection are closed with it.

mod balloon;
mod counts;
mod events;
mod exits;
mod guest_view;
pub mod limits;
mod metadata;
pub mod processes;
mod rings;
mod sampling;
pub mod server;
pub mod session;
