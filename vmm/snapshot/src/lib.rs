//! The format of a saved virtual machine. This crate does not use KVM.
//!
//! A snapshot is a directory of two files:
//!
//! | file | contents |
//! |---|---|
//! | `state` | registers of the processors, devices and virtual PMUs, as a [`SavedMachine`] |
//! | `memory` | guest RAM at its offset in RAM; zero pages are holes |
//!
//! | module | contents |
//! |---|---|
//! | [`format`](mod@format) | frame of the state file: magic, version, length, checksum |
//! | [`state`] | types of the saved state |
//! | [`memory`] | checksums of the memory file |
//! | [`stream`] | frames of a VM that moves to another host |
//! | [`diff`] | snapshots that contain the changes since another one |
//!
//! Start with [`format::encode`] and [`format::decode`].
//!
//! A snapshot is untrusted input. The reader bounds sizes, rejects unknown fields by name, and
//! takes no path from a snapshot. Each crate that restores a part of a snapshot validates its
//! values.
//!
//! The body is JSON, which is self-describing. Fields have names, a newer version can add fields,
//! and a person can read a state without this program. Registers that KVM defines are stored as the
//! bytes of KVM's structures, whose layout is part of the kernel's ABI.
#![warn(missing_docs)]

mod bytes;
pub mod diff;
pub mod format;
pub mod memory;
pub mod state;
pub mod stream;

pub use bytes::Base64Bytes;
pub use format::{SnapshotFormatError, decode, encode};
pub use state::SavedMachine;

/// Name of the state file in the directory of a snapshot.
pub const STATE_FILE: &str = "state";
/// Name of the memory file in the directory of a snapshot.
pub const MEMORY_FILE: &str = "memory";
