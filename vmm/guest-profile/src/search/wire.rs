//! Format of the messages between the reader process and the requester process of a kernel search.
//! A message consists of a letter (its type), the length of the payload, and the payload.

use std::io::{self, ErrorKind, Read, Write};

use serde::{Deserialize, Serialize};

use super::found_kernel::KernelTableReadError;
use crate::GuestRegs;
use crate::locate::KernelAnchorRegisters;
use crate::task::TaskLayout;
use crate::task::areas::KernelPageTables;

/// Maximum payload of a message, in bytes.
pub(super) const PIECE: usize = 1 << 20;
/// Size of a message header, in bytes. The header consists of the letter (message type) and the
/// payload length.
const HEAD: usize = 5;

/// To the reader: a [`SearchRequest`], which is the first message.
pub(super) const ASK: u8 = b'A';
/// To the reader: the contents of the requested guest memory.
pub(super) const MEMORY: u8 = b'M';
/// To the reader: the guest memory range requested last is not completely RAM.
pub(super) const NO_MEMORY: u8 = b'N';
/// From the reader: a [`MemoryRequest`] for guest memory.
pub(super) const READ: u8 = b'R';
/// From the reader: a part of the kernel's symbols, as text in the format of `/proc/kallsyms`.
pub(super) const SYMBOLS: u8 = b'S';
/// From the reader: a part of the unwind table's address offsets, 4 bytes each.
pub(super) const OFFSETS: u8 = b'O';
/// From the reader: a part of the unwind table's entries.
pub(super) const ENTRIES: u8 = b'E';
/// From the reader: a [`KernelSummary`], which is the last message.
pub(super) const FOUND: u8 = b'F';
/// From the reader: the reason why no kernel was found. This is the last message.
pub(super) const FAILED: u8 = b'X';

/// First message to the reader process: registers that point into the kernel to be found.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SearchRequest {
    pub(super) regs: GuestRegs,
    pub(super) anchors: KernelAnchorRegisters,
}

/// Result that the reader process sends after the symbols and unwind tables of a kernel.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct KernelSummary {
    /// Run-time address to which the first unwind table entry applies; `None` if the kernel has no
    /// unwind tables.
    pub(super) orc_base: Option<u64>,
    pub(super) entry_text: (u64, u64),
    pub(super) tasks: Result<TaskLayout, KernelTableReadError>,
    pub(super) tables: Option<KernelPageTables>,
    pub(super) symbols: u64,
    pub(super) release: Option<String>,
    pub(super) build_id: Option<String>,
}

/// A range of guest memory that the reader requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemoryRequest {
    pub(super) gpa: u64,
    pub(super) bytes: u32,
}

impl MemoryRequest {
    pub(super) fn to_bytes(self) -> [u8; 12] {
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&self.gpa.to_le_bytes());
        bytes[8..].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (gpa, rest) = bytes.split_first_chunk()?;
        Some(Self {
            gpa: u64::from_le_bytes(*gpa),
            bytes: u32::from_le_bytes(rest.try_into().ok()?),
        })
    }
}

/// Sends one message with a payload of at most [`PIECE`] bytes.
pub(super) fn send(stream: &mut impl Write, letter: u8, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(|_| ErrorKind::InvalidInput)?;
    let mut head = [letter; HEAD];
    head[1..].copy_from_slice(&length.to_le_bytes());
    if bytes.is_empty() {
        return stream.write_all(&head);
    }
    if bytes.len() <= 64 {
        // Send header and payload with a single system call.
        let mut both = [0; HEAD + 64];
        both[..HEAD].copy_from_slice(&head);
        both[HEAD..HEAD + bytes.len()].copy_from_slice(bytes);
        return stream.write_all(&both[..HEAD + bytes.len()]);
    }
    stream.write_all(&head)?;
    stream.write_all(bytes)
}

/// Receives a message header. Returns the letter (message type) and the payload length, which is at
/// most [`PIECE`].
pub(super) fn head(stream: &mut impl Read) -> io::Result<(u8, usize)> {
    let mut head = [0; HEAD];
    stream.read_exact(&mut head)?;
    let [letter, length @ ..] = head;
    let length = u32::from_le_bytes(length) as usize;
    if length > PIECE {
        return Err(ErrorKind::InvalidData.into());
    }
    Ok((letter, length))
}
