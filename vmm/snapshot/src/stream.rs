//! Frames of a VM that moves to another host as a stream of bytes.
//!
//! The source begins with [`PREAMBLE`]. Then both sides send frames. All numbers are little-endian:
//!
//! | offset | bytes | contents |
//! |---|---|---|
//! | 0 | 4 | kind of the frame |
//! | 4 | 4 | length of the payload |
//! | 8 | 4 | CRC-32 of the first eight bytes and the payload |
//! | 12 | length | payload |
//!
//! The receiver trusts nothing: the length is bounded by the kind before anything is allocated, and
//! memory ranges are whole pages within guest memory.

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::format::MAX_STATE_BYTES;
use crate::memory::CHUNK_BYTES;

/// First bytes of a stream: magic, version of this protocol, and two zeros.
pub const PREAMBLE: [u8; 8] = *b"PVMG\x01\0\0\0";
/// Optional field of the state file in [`Message::State`]: the document of the metadata service.
pub const METADATA_FIELD: &str = "_metadata";
/// Maximum number of rounds in which memory is sent.
pub const MAX_ROUNDS: u32 = 64;
/// Maximum number of bytes of memory in a frame.
pub const MAX_PAGES_BYTES: u64 = CHUNK_BYTES;
/// Maximum length of a JSON payload in bytes.
const MAX_TEXT_BYTES: usize = 4096;
/// Size of a page in bytes.
const PAGE_BYTES: u64 = 4096;
/// Length of a frame without payload, in bytes.
const HEADER_BYTES: usize = 12;
/// Length of the offset in front of the contents of pages, in bytes.
const OFFSET_BYTES: usize = 8;

/// Description of a VM that is to move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamHello {
    /// Name of the VM.
    pub name: String,
    /// ID of its process.
    pub pid: u32,
    /// ID of the boot of its host (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// Size of guest memory in bytes.
    pub memory_bytes: u64,
}

/// The process in which a VM has arrived.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamArrival {
    /// Name of the VM.
    pub name: String,
    /// ID of its process on its host.
    pub pid: u32,
}

/// A message of either side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// Source: the first message.
    Hello(StreamHello),
    /// Source: the state of the VM without registers, for checks before the VM is paused.
    Machine(&'a [u8]),
    /// Source: contents of pages.
    Pages {
        /// Offset in guest memory.
        offset: u64,
        /// Contents.
        data: &'a [u8],
    },
    /// Source: pages that consist of zeros and did not before.
    Zeros {
        /// Offset in guest memory.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// Source: all pages that were dirty at the beginning of the round have been sent.
    RoundEnd,
    /// Source: the state of the paused VM, after the last round.
    State(&'a [u8]),
    /// Source: the VM does not run there any more.
    Run {
        /// The vCPUs were paused by an operator.
        paused: bool,
    },
    /// Destination: the machine can be built here.
    Accepted,
    /// Destination: the round has been received.
    Received,
    /// Destination: the machine is built and waits.
    Ready,
    /// Destination: the VM runs here.
    Running(StreamArrival),
    /// Destination: the VM does not run here, and never will.
    Failed(String),
}

/// Reason for rejecting a stream.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The other side does not send a stream.
    #[error("the other side does not send a VM: its stream does not begin with PVMG")]
    Preamble,
    /// The version is not supported.
    #[error("the other side speaks version {0} of the protocol, this program version 1")]
    Version(u16),
    /// The connection has ended.
    #[error("the connection was closed by the other side")]
    Closed,
    /// The time limit is exceeded.
    #[error("the other side does not respond")]
    Silent,
    /// The kind of a frame is unknown.
    #[error("the stream has a frame of the unknown kind {0}")]
    Kind(u32),
    /// The length is invalid for the kind.
    #[error("the stream has a frame of kind {kind} with {length} bytes, which is impossible")]
    Length {
        /// Kind of the frame.
        kind: u32,
        /// Length of the payload in bytes.
        length: u32,
    },
    /// The checksum does not match.
    #[error("the stream is damaged: the checksum of a frame does not match")]
    Checksum,
    /// Pages are not whole or outside guest memory.
    #[error("the stream has {bytes} bytes of memory at {offset:#x}, where the VM has none")]
    Range {
        /// Offset in guest memory.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// A JSON payload is invalid.
    #[error("the stream has an invalid message")]
    Text(#[source] serde_json::Error),
    /// The connection is broken.
    #[error("the connection")]
    Io(#[source] io::Error),
}

impl From<io::Error> for StreamError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                Self::Closed
            }
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Silent,
            _ => Self::Io(error),
        }
    }
}

/// Kinds of frames.
mod kind {
    pub(super) const HELLO: u32 = 1;
    pub(super) const MACHINE: u32 = 2;
    pub(super) const PAGES: u32 = 3;
    pub(super) const ZEROS: u32 = 4;
    pub(super) const ROUND_END: u32 = 5;
    pub(super) const STATE: u32 = 6;
    pub(super) const RUN: u32 = 7;
    pub(super) const ACCEPTED: u32 = 16;
    pub(super) const RECEIVED: u32 = 17;
    pub(super) const READY: u32 = 18;
    pub(super) const RUNNING: u32 = 19;
    pub(super) const FAILED: u32 = 20;
}

/// Returns whether a payload of this kind may have this length.
fn is_valid_length(frame: u32, length: usize) -> Option<bool> {
    let max_pages = usize::try_from(MAX_PAGES_BYTES).unwrap_or(0) + OFFSET_BYTES;
    Some(match frame {
        kind::HELLO | kind::RUNNING | kind::FAILED => length <= MAX_TEXT_BYTES,
        kind::MACHINE | kind::STATE => length <= MAX_STATE_BYTES,
        kind::PAGES => (OFFSET_BYTES + 1..=max_pages).contains(&length),
        kind::ZEROS => length == 2 * OFFSET_BYTES,
        kind::RUN => length == 1,
        kind::ROUND_END | kind::ACCEPTED | kind::RECEIVED | kind::READY => length == 0,
        _ => return None,
    })
}

/// Checks that a range consists of at most [`MAX_PAGES_BYTES`] of whole pages within memory.
fn check_range(offset: u64, bytes: u64, memory_bytes: u64) -> Result<(), StreamError> {
    let end = offset.checked_add(bytes);
    let fits = offset.is_multiple_of(PAGE_BYTES)
        && bytes.is_multiple_of(PAGE_BYTES)
        && (1..=MAX_PAGES_BYTES).contains(&bytes)
        && end.is_some_and(|end| end <= memory_bytes);
    fits.then_some(()).ok_or(StreamError::Range { offset, bytes })
}

/// Reads the rest of [`PREAMBLE`] after its first `read` bytes, which were as expected.
///
/// # Errors
/// Returns [`StreamError::Preamble`] or [`StreamError::Version`] for something else, and the errors of
/// the connection.
pub fn read_preamble(stream: &mut impl Read, read: usize) -> Result<(), StreamError> {
    let mut bytes = PREAMBLE;
    stream.read_exact(bytes.get_mut(read..).unwrap_or_default())?;
    match bytes {
        PREAMBLE => Ok(()),
        [b'P', b'V', b'M', b'G', low, high, ..] => Err(StreamError::Version(u16::from_le_bytes([low, high]))),
        _ => Err(StreamError::Preamble),
    }
}

/// Sends a message.
///
/// # Errors
/// Returns [`StreamError::Text`] if it cannot be encoded, and the errors of the connection.
pub fn send(stream: &mut impl Write, message: &Message<'_>) -> Result<(), StreamError> {
    match message {
        Message::Hello(hello) => send_frame(stream, kind::HELLO, &[], &to_text(hello)?),
        Message::Machine(state) => send_frame(stream, kind::MACHINE, &[], state),
        Message::Pages { offset, data } => send_frame(stream, kind::PAGES, &offset.to_le_bytes(), data),
        Message::Zeros { offset, bytes } => {
            send_frame(stream, kind::ZEROS, &offset.to_le_bytes(), &bytes.to_le_bytes())
        }
        Message::RoundEnd => send_frame(stream, kind::ROUND_END, &[], &[]),
        Message::State(state) => send_frame(stream, kind::STATE, &[], state),
        Message::Run { paused } => send_frame(stream, kind::RUN, &[], &[u8::from(*paused)]),
        Message::Accepted => send_frame(stream, kind::ACCEPTED, &[], &[]),
        Message::Received => send_frame(stream, kind::RECEIVED, &[], &[]),
        Message::Ready => send_frame(stream, kind::READY, &[], &[]),
        Message::Running(arrival) => send_frame(stream, kind::RUNNING, &[], &to_text(arrival)?),
        Message::Failed(why) => {
            let end = why.floor_char_boundary(MAX_TEXT_BYTES);
            send_frame(stream, kind::FAILED, &[], &why.as_bytes()[..end])
        }
    }
}

fn send_frame(stream: &mut impl Write, kind: u32, first: &[u8], rest: &[u8]) -> Result<(), StreamError> {
    let length = u32::try_from(first.len() + rest.len()).unwrap_or(u32::MAX);
    if is_valid_length(kind, first.len() + rest.len()) != Some(true) {
        return Err(StreamError::Length { kind, length });
    }
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[4..8].copy_from_slice(&length.to_le_bytes());
    let mut crc = crc32fast::Hasher::new();
    for part in [&header[..8], first, rest] {
        crc.update(part);
    }
    header[8..].copy_from_slice(&crc.finalize().to_le_bytes());
    stream.write_all(&[&header, first].concat())?;
    stream.write_all(rest)?;
    Ok(())
}

/// Receives messages.
#[derive(Debug)]
pub struct MessageReader<R> {
    stream: R,
    /// Size of guest memory in bytes; 0 until it is known.
    memory_bytes: u64,
    payload: Vec<u8>,
}

impl<R: Read> MessageReader<R> {
    /// Creates a reader that rejects all memory until [`MessageReader::set_memory_bytes`].
    pub fn new(stream: R) -> Self {
        Self {
            stream,
            memory_bytes: 0,
            payload: Vec::new(),
        }
    }

    /// Sets the size of guest memory.
    pub fn set_memory_bytes(&mut self, bytes: u64) {
        self.memory_bytes = bytes;
    }

    /// Returns the connection.
    pub fn stream(&mut self) -> &mut R {
        &mut self.stream
    }

    /// Receives a message.
    ///
    /// # Errors
    /// Returns a [`StreamError`] if the connection ends or the message is invalid.
    pub fn receive(&mut self) -> Result<Message<'_>, StreamError> {
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header)?;
        let number = |at: usize| {
            header[at..]
                .first_chunk()
                .map_or(0, |bytes| u32::from_le_bytes(*bytes))
        };
        let (frame, length, crc) = (number(0), number(4), number(8));
        let size = usize::try_from(length).unwrap_or(usize::MAX);
        match is_valid_length(frame, size) {
            None => return Err(StreamError::Kind(frame)),
            Some(false) => return Err(StreamError::Length { kind: frame, length }),
            Some(true) => {}
        }
        self.payload.resize(size, 0);
        self.stream.read_exact(&mut self.payload)?;
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&header[..8]);
        hasher.update(&self.payload);
        if hasher.finalize() != crc {
            return Err(StreamError::Checksum);
        }
        let payload = &self.payload[..];
        let number = |at: usize| {
            let bytes = payload.get(at..).and_then(<[u8]>::first_chunk);
            bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
        };
        Ok(match frame {
            kind::HELLO => Message::Hello(text(payload)?),
            kind::MACHINE => Message::Machine(payload),
            kind::PAGES => {
                let (offset, data) = (number(0), &payload[OFFSET_BYTES..]);
                check_range(offset, data.len() as u64, self.memory_bytes)?;
                Message::Pages { offset, data }
            }
            kind::ZEROS => {
                let (offset, bytes) = (number(0), number(OFFSET_BYTES));
                check_range(offset, bytes, self.memory_bytes)?;
                Message::Zeros { offset, bytes }
            }
            kind::ROUND_END => Message::RoundEnd,
            kind::STATE => Message::State(payload),
            kind::RUN => Message::Run {
                paused: payload != [0],
            },
            kind::ACCEPTED => Message::Accepted,
            kind::RECEIVED => Message::Received,
            kind::READY => Message::Ready,
            kind::RUNNING => Message::Running(text(payload)?),
            kind::FAILED => Message::Failed(String::from_utf8_lossy(payload).into_owned()),
            other => return Err(StreamError::Kind(other)),
        })
    }
}

fn text<T: DeserializeOwned>(payload: &[u8]) -> Result<T, StreamError> {
    serde_json::from_slice(payload).map_err(StreamError::Text)
}

fn to_text(value: &impl Serialize) -> Result<Vec<u8>, StreamError> {
    serde_json::to_vec(value).map_err(StreamError::Text)
}
