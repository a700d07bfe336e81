//! Control interface of a running VM. The operator sends JSON lines over a Unix socket, and
//! perf-core counts the events.
//!
//! | module | contents |
//! |---|---|
//! | `balloon` | state of the balloon |
//! | `counts` | statistics of a vCPU's run loop |
//! | [`server`] | the server in the VM's main loop: connections and their limits |
//! | `events` | translation of operator events to perf-core events |
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
//! connect. Requests are limited in size and rate, the amount of unsent replies is bounded, and
//! closing a connection releases all its resources.

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
