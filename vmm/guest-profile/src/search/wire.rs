//! Messages of a search: a letter, a length, and so many bytes.

use std::io::{self, ErrorKind, Read, Write};

use serde::{Deserialize, Serialize};

use super::found::Unread;
use crate::GuestRegs;
use crate::locate::Anchors;
use crate::task::TaskLayout;
use crate::task::areas::KernelTables;

/// Most bytes of one message.
pub(super) const PIECE: usize = 1 << 20;
/// Bytes before those of a message: its letter and their number.
const HEAD: usize = 5;

/// To the reader: a [`Question`]. It is the first message.
pub(super) const ASK: u8 = b'A';
/// To the reader: guest memory that it asked for.
pub(super) const MEMORY: u8 = b'M';
/// To the reader: some of what it asked for is no memory.
pub(super) const NO_MEMORY: u8 = b'N';
/// From the reader: it asks for memory, a [`Wanted`].
pub(super) const READ: u8 = b'R';
/// From the reader: more of the symbols' text.
pub(super) const SYMBOLS: u8 = b'S';
/// From the reader: more offsets of unwind tables, 4 bytes each.
pub(super) const OFFSETS: u8 = b'O';
/// From the reader: more entries of unwind tables.
pub(super) const ENTRIES: u8 = b'E';
/// From the reader: a [`Summary`]. It is the last message.
pub(super) const FOUND: u8 = b'F';
/// From the reader: why no kernel was found. It is the last message.
pub(super) const FAILED: u8 = b'X';

/// What is looked for.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Question {
    pub(super) regs: GuestRegs,
    pub(super) anchors: Anchors,
}

/// What is known of a kernel besides symbols and unwind tables.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Summary {
    /// The first address of the unwind tables, if there are any.
    pub(super) orc_base: Option<u64>,
    pub(super) entry_text: (u64, u64),
    pub(super) tasks: Result<TaskLayout, Unread>,
    pub(super) tables: Option<KernelTables>,
    pub(super) symbols: u64,
    pub(super) release: Option<String>,
    pub(super) build_id: Option<String>,
}

/// A range of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) gpa: u64,
    pub(super) bytes: u32,
}

impl Wanted {
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

/// Sends one message of at most [`PIECE`] bytes.
pub(super) fn send(stream: &mut impl Write, letter: u8, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(|_| ErrorKind::InvalidInput)?;
    let mut head = [letter; HEAD];
    head[1..].copy_from_slice(&length.to_le_bytes());
    if bytes.is_empty() {
        return stream.write_all(&head);
    }
    if bytes.len() <= 64 {
        // One system call.
        let mut both = [0; HEAD + 64];
        both[..HEAD].copy_from_slice(&head);
        both[HEAD..HEAD + bytes.len()].copy_from_slice(bytes);
        return stream.write_all(&both[..HEAD + bytes.len()]);
    }
    stream.write_all(&head)?;
    stream.write_all(bytes)
}

/// The letter of the next message, and how many bytes follow: at most [`PIECE`].
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
