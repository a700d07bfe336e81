//! What a host and the agent in its guest say to each other, and how both copy files.
//!
//! | module | story |
//! |---|---|
//! | [`wire`] | frames: a kind, a length, a payload |
//! | [`request`] | what the host asks for, as JSON in the first frame |
//! | [`entry`] | a file, directory or link of a tree on its way |
//! | [`send`] | reads a tree and sends it |
//! | [`receive`] | makes a tree of what comes, and nothing outside of its target |
//!
//! The program `perfvisor-agent` serves in the guest; `perfvisor exec` and `perfvisor cp` ask on the host.
//! One connection is one command or one copy. Each side takes the other for hostile: the guest may send
//! anything to the host, and must not make it write outside of what the user named.
//!
//! **Dependencies.** None of ours. Start with [`request::Request`].
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
pub mod wire;

/// The vsock port the agent listens on.
pub const PORT: u32 = 20_566;
