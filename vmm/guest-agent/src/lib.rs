//! Protocol between the host and the agent in its guest, and copying of files in both directions.
//!
//! | module | contents |
//! |---|---|
//! | [`wire`] | frames: type, length, payload |
//! | [`request`] | requests from the host, sent as JSON in the first frame |
//! | [`entry`] | wire format of a file, directory or link in a tree |
//! | [`send`] | reads a tree and sends it |
//! | [`receive`] | receives a tree and creates it within a target directory |
//! | [`terminal`] | pseudoterminal of a command in the guest |
//!
//! The program `perfvisor-agent` is the server in the guest; `perfvisor exec` and `perfvisor cp`
//! are clients on the host. Each connection carries one command or one copy.
//!
//! Each side treats the other as hostile. A hostile guest must not be able to make the host write
//! outside the path that the user specified.
//!
//! **Dependencies.** No other crate of this workspace. Start with [`request::AgentRequest`].
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
    )
)]

pub mod entry;
pub mod receive;
pub mod request;
pub mod send;
pub mod terminal;
pub mod wire;

/// Vsock port on which the agent listens.
pub const PORT: u32 = 20_566;
