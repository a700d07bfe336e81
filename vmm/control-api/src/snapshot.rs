//! Replies to the requests that take a snapshot.
//!
//! A client repeats [`Call::Snapshot`](crate::protocol::Call::Snapshot) until the state of the VM
//! is known, reads memory with `SnapshotMemory` from offset 0 to the end, then reads the state with
//! `SnapshotState`, and finishes with `SnapshotEnd`. The VM is paused meanwhile. It resumes at the
//! end, or when the connection closes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Progress of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SnapshotProgress {
    /// `true` if the state of the VM is known and its memory can be read.
    pub ready: bool,
    /// Size of guest memory in bytes.
    pub memory_bytes: u64,
}

/// A piece of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SnapshotPiece {
    /// Offset of the piece in memory.
    pub offset: u64,
    /// Number of bytes in the file sent with the reply; 0 if the piece consists of zeros.
    pub bytes: u64,
    /// Offset of the next piece, or the size of memory after the last piece.
    pub next: u64,
}

/// Description of a VM's state. The state is in the file sent with the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SnapshotState {
    /// Size in bytes.
    pub bytes: u64,
}
