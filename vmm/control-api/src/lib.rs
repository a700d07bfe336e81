//! How an operator speaks to a running VM: what both ends of a control socket share, and the operator's end.
//!
//! | module | story |
//! |---|---|
//! | [`protocol`] | what is said: JSON lines, version 1 |
//! | [`request`] | the same, typed: each request names its reply |
//! | `schema` | the same as a JSON Schema, for clients in other languages |
//! | [`client`] | the operator's end |
//! | [`counts`] | what a VM's loops have counted, for its metrics |
//! | [`place`] | where the sockets are and which VMs they lead to |
//! | [`peer`] | who is at the other end; sealed memory files |
//! | [`events`] | lists of events in perf's syntax, and numbers as perf prints them |
//!
//! Start with [`client::Client`] and [`request`]. The VM's end, the server, is in the machine crate. The
//! protocol is documented for other programs in docs/reference/control.md, and `tests/it/protocol_1.rs` pins
//! each of its lines. `docs/reference/control-schema.json` is its JSON Schema, which [`schema()`] makes.
//!
//! **Dependencies.** `perf-core` for the names of policies. This crate links neither KVM nor the machine: an
//! operator's tool that depends on it is small.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
    )
)]
// A library prints nothing: what there is to say goes to the log or to the caller.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod budget;
pub mod client;
pub mod counts;
pub mod events;
pub mod nearest;
pub mod peer;
pub mod place;
pub mod protocol;
pub mod request;
mod schema;

pub use schema::schema;
