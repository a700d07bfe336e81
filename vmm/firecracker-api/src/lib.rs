//! Firecracker's HTTP API (specification 1.17): its requests, the states in which they are valid,
//! and the options of `perfvisor run` that they configure.
//!
//! | module | contents |
//! |---|---|
//! | [`types`] | bodies of requests and responses |
//! | [`fault`] | errors with their status |
//! | [`http`] | HTTP/1.1: parsing of requests, encoding of responses |
//! | [`server`] | connections on a Unix socket, with their limits |
//! | [`routes`] | conversion of method, path and body to a typed call |
//! | [`resources`] | the configuration, its validation, and the options of `perfvisor run` |
//! | [`session`] | the states of a VM, and the responses to calls |
//! | [`openapi`] | the OpenAPI description of the supported API |
//!
//! Start with [`session::ApiSession`]. The crate itself does not start VMs. The program implements
//! [`session::VmBackend`] for this purpose, with `perfvisor run` and the control socket.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
    )
)]
// Libraries do not print. Messages are logged or returned to the caller.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod fault;
pub mod http;
pub mod openapi;
pub mod resources;
pub mod routes;
pub mod server;
pub mod session;
pub mod types;

/// Version of Firecracker's API specification that this crate implements.
pub const API_VERSION: &str = "1.17.0";
