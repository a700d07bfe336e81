//! Metadata service of a VM, compatible with Firecracker's MMDS: a JSON document that the host
//! writes and the guest reads over HTTP at a link-local address.
//!
//! | module | contents |
//! |---|---|
//! | [`config`] | configuration of the service |
//! | [`store`] | the document, merge patches and the formats of its values |
//! | [`token`] | session tokens of version 2 |
//! | [`http`] | HTTP/1.1 of the guest's requests and the responses |
//! | [`service`] | answers to requests |
//! | [`stack`] | TCP/IP for the frames of one network device |
//!
//! The guest sends the frames and requests, so everything here is bounded and no input may cause a
//! panic. Start with [`service::MetadataService`], which the devices of a VM share. A network
//! device passes the frames for the service to a [`stack::MetadataStack`].
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
    )
)]
// A library must not print. Messages go to the log or to the caller.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod config;
pub mod http;
pub mod service;
pub mod stack;
pub mod store;
pub mod token;
