//! Frames of the byte stream that moves a VM to another host.
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
//! The receiver does not trust the stream. Before it allocates memory, it checks the length against
//! the limit for this kind of frame. Memory ranges must be whole pages within guest memory.

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::format::MAX_STATE_BYTES;
use crate::memory::CHUNK_BYTES;

/// First bytes of a stream: magic, version of this protocol, and two zeros.
pub const PREAMBLE: [u8; 8] = *b"PVMG\x01\0\0\0";
/// Name of the optional field of the state file in [`MigrationStreamMessage::State`] that contains
/// the data of the metadata service.
pub const METADATA_FIELD: &str = "_metadata";
/// Maximum number of rounds in which memory is sent.
pub const MAX_ROUNDS: u32 = 64;
/// Maximum number of bytes of memory in a frame.
pub const MAX_PAGES_BYTES: u64 = CHUNK_BYTES;
/// Maximum length of a JSON payload in bytes.
const MAX_TEXT_BYTES: usize = 4096;
/// Size of a page in bytes.
const PAGE_BYTES: u64 = 4096;
/// Length of a frame header in bytes.
const HEADER_BYTES: usize = 12;
/// Length of the offset that precedes page contents, in bytes.
const OFFSET_BYTES: usize = 8;

/// Description of the VM that is to be moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrationHello {
    /// Name of the VM.
    pub name: String,
    /// Process ID of the VM.
    pub pid: u32,
    /// Boot ID of the VM's host (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// Size of guest memory in bytes.
    pub memory_bytes: u64,
}

/// The destination process of a moved VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrationDestination {
    /// Name of the VM.
    pub name: String,
    /// Process ID of the VM on the destination host.
    pub pid: u32,
}

/// A message from the source or the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MigrationStreamMessage<'a> {
    /// First message from the source, which describes the VM.
    Hello(MigrationHello),
    /// State of the VM without registers, from the source, for checks before the VM is paused.
    Machine(&'a [u8]),
    /// Page contents, from the source.
    Pages {
        /// Offset of the first page in guest memory, in bytes.
        offset: u64,
        /// Contents of the pages.
        data: &'a [u8],
    },
    /// Message from the source: pages that now consist of zeros and previously did not.
    Zeros {
        /// Offset of the first page in guest memory, in bytes.
        offset: u64,
        /// Total size of the pages in bytes.
        bytes: u64,
    },
    /// Message from the source: all pages that were dirty at the beginning of the round have been
    /// sent.
    RoundEnd,
    /// State of the paused VM, from the source, after the last round.
    State(&'a [u8]),
    /// Message from the source: the VM no longer runs on the source host, and the destination may
    /// run it.
    Run {
        /// `true` if an operator had paused the vCPUs.
        paused: bool,
    },
    /// Message from the destination: the saved machine is acceptable, and the destination can build
    /// it.
    Accepted,
    /// Message from the destination: all frames of the round have been received.
    Received,
    /// Message from the destination: the machine is built and ready to run.
    Ready,
    /// Message from the destination: the VM is running on the destination host.
    Running(MigrationDestination),
    /// Message from the destination: the VM is not running on the destination host and never will.
    Failed(String),
}

/// Reason for rejecting a migration stream.
#[derive(Debug, thiserror::Error)]
pub enum MigrationStreamError {
    /// The peer does not send a stream of this protocol.
    #[error("the other side does not send a VM: its stream does not begin with PVMG")]
    Preamble,
    /// The protocol version of the stream is not supported.
    #[error("the other side speaks version {0} of the protocol, this program version 1")]
    Version(u16),
    /// The peer has closed the connection.
    #[error("the connection was closed by the other side")]
    Closed,
    /// The peer has not sent or accepted a message within the time limit.
    #[error("the other side does not respond")]
    Silent,
    /// The frame type is unknown.
    #[error("the stream has a frame of the unknown kind {0}")]
    Kind(u32),
    /// The length is invalid for the frame type.
    #[error("the stream has a frame of kind {kind} with {length} bytes, which is impossible")]
    Length {
        /// Type of the frame.
        kind: u32,
        /// Length of the payload in bytes.
        length: u32,
    },
    /// The checksum of a frame does not match.
    #[error("the stream is damaged: the checksum of a frame does not match")]
    Checksum,
    /// The range does not consist of whole pages or lies outside guest memory.
    #[error("the stream has {bytes} bytes of memory at {offset:#x}, where the VM has none")]
    Range {
        /// Offset of the range in guest memory, in bytes.
        offset: u64,
        /// Length of the range in bytes.
        bytes: u64,
    },
    /// A JSON payload is invalid.
    #[error("the stream has an invalid message")]
    Text(#[source] serde_json::Error),
    /// The connection is broken.
    #[error("the connection")]
    Io(#[source] io::Error),
}

impl From<io::Error> for MigrationStreamError {
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

/// Numbers of the frame types.
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

/// Returns whether the payload of a frame of type `frame` may have `length` bytes, or `None` for an
/// unknown type.
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
fn check_range(offset: u64, bytes: u64, memory_bytes: u64) -> Result<(), MigrationStreamError> {
    let end = offset.checked_add(bytes);
    let fits = offset.is_multiple_of(PAGE_BYTES)
        && bytes.is_multiple_of(PAGE_BYTES)
        && (1..=MAX_PAGES_BYTES).contains(&bytes)
        && end.is_some_and(|end| end <= memory_bytes);
    fits.then_some(())
        .ok_or(MigrationStreamError::Range { offset, bytes })
}

/// Reads and checks the remainder of [`PREAMBLE`]. The caller has already checked the first `read`
/// bytes.
///
/// # Errors
/// Returns [`MigrationStreamError::Preamble`] or [`MigrationStreamError::Version`] if the remainder
/// does not match, and an error if reading from the connection fails.
pub fn read_preamble(stream: &mut impl Read, read: usize) -> Result<(), MigrationStreamError> {
    let mut bytes = PREAMBLE;
    stream.read_exact(bytes.get_mut(read..).unwrap_or_default())?;
    match bytes {
        PREAMBLE => Ok(()),
        [b'P', b'V', b'M', b'G', low, high, ..] => {
            Err(MigrationStreamError::Version(u16::from_le_bytes([low, high])))
        }
        _ => Err(MigrationStreamError::Preamble),
    }
}

/// Sends a message.
///
/// # Errors
/// Returns [`MigrationStreamError::Text`] if the message cannot be encoded, and an error if writing
/// to the connection fails.
pub fn send(
    stream: &mut impl Write,
    message: &MigrationStreamMessage<'_>,
) -> Result<(), MigrationStreamError> {
    match message {
        MigrationStreamMessage::Hello(hello) => send_frame(stream, kind::HELLO, &[], &to_text(hello)?),
        MigrationStreamMessage::Machine(state) => send_frame(stream, kind::MACHINE, &[], state),
        MigrationStreamMessage::Pages { offset, data } => {
            send_frame(stream, kind::PAGES, &offset.to_le_bytes(), data)
        }
        MigrationStreamMessage::Zeros { offset, bytes } => {
            send_frame(stream, kind::ZEROS, &offset.to_le_bytes(), &bytes.to_le_bytes())
        }
        MigrationStreamMessage::RoundEnd => send_frame(stream, kind::ROUND_END, &[], &[]),
        MigrationStreamMessage::State(state) => send_frame(stream, kind::STATE, &[], state),
        MigrationStreamMessage::Run { paused } => send_frame(stream, kind::RUN, &[], &[u8::from(*paused)]),
        MigrationStreamMessage::Accepted => send_frame(stream, kind::ACCEPTED, &[], &[]),
        MigrationStreamMessage::Received => send_frame(stream, kind::RECEIVED, &[], &[]),
        MigrationStreamMessage::Ready => send_frame(stream, kind::READY, &[], &[]),
        MigrationStreamMessage::Running(arrival) => {
            send_frame(stream, kind::RUNNING, &[], &to_text(arrival)?)
        }
        MigrationStreamMessage::Failed(why) => {
            let end = why.floor_char_boundary(MAX_TEXT_BYTES);
            send_frame(stream, kind::FAILED, &[], &why.as_bytes()[..end])
        }
    }
}

fn send_frame(
    stream: &mut impl Write,
    kind: u32,
    first: &[u8],
    rest: &[u8],
) -> Result<(), MigrationStreamError> {
    let length = u32::try_from(first.len() + rest.len()).unwrap_or(u32::MAX);
    if is_valid_length(kind, first.len() + rest.len()) != Some(true) {
        return Err(MigrationStreamError::Length { kind, length });
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

/// Receiver of the messages from the other host.
#[derive(Debug)]
pub struct MigrationMessageReader<R> {
    stream: R,
    /// Size of guest memory in bytes; 0 until set.
    memory_bytes: u64,
    payload: Vec<u8>,
}

impl<R: Read> MigrationMessageReader<R> {
    /// Creates a reader that rejects all memory until [`MigrationMessageReader::set_memory_bytes`]
    /// is called.
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

    /// Returns the connection to the other host.
    pub fn stream(&mut self) -> &mut R {
        &mut self.stream
    }

    /// Receives a message.
    ///
    /// # Errors
    /// Returns a [`MigrationStreamError`] if the connection is closed or the message is invalid.
    pub fn receive(&mut self) -> Result<MigrationStreamMessage<'_>, MigrationStreamError> {
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
            None => return Err(MigrationStreamError::Kind(frame)),
            Some(false) => return Err(MigrationStreamError::Length { kind: frame, length }),
            Some(true) => {}
        }
        self.payload.resize(size, 0);
        self.stream.read_exact(&mut self.payload)?;
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&header[..8]);
        hasher.update(&self.payload);
        if hasher.finalize() != crc {
            return Err(MigrationStreamError::Checksum);
        }
        let payload = &self.payload[..];
        let number = |at: usize| {
            let bytes = payload.get(at..).and_then(<[u8]>::first_chunk);
            bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
        };
        Ok(match frame {
            kind::HELLO => MigrationStreamMessage::Hello(text(payload)?),
            kind::MACHINE => MigrationStreamMessage::Machine(payload),
            kind::PAGES => {
                let (offset, data) = (number(0), &payload[OFFSET_BYTES..]);
                check_range(offset, data.len() as u64, self.memory_bytes)?;
                MigrationStreamMessage::Pages { offset, data }
            }
            kind::ZEROS => {
                let (offset, bytes) = (number(0), number(OFFSET_BYTES));
                check_range(offset, bytes, self.memory_bytes)?;
                MigrationStreamMessage::Zeros { offset, bytes }
            }
            kind::ROUND_END => MigrationStreamMessage::RoundEnd,
            kind::STATE => MigrationStreamMessage::State(payload),
            kind::RUN => MigrationStreamMessage::Run {
                paused: payload != [0],
            },
            kind::ACCEPTED => MigrationStreamMessage::Accepted,
            kind::RECEIVED => MigrationStreamMessage::Received,
            kind::READY => MigrationStreamMessage::Ready,
            kind::RUNNING => MigrationStreamMessage::Running(text(payload)?),
            kind::FAILED => MigrationStreamMessage::Failed(String::from_utf8_lossy(payload).into_owned()),
            other => return Err(MigrationStreamError::Kind(other)),
        })
    }
}

fn text<T: DeserializeOwned>(payload: &[u8]) -> Result<T, MigrationStreamError> {
    serde_json::from_slice(payload).map_err(MigrationStreamError::Text)
}

fn to_text(value: &impl Serialize) -> Result<Vec<u8>, MigrationStreamError> {
    serde_json::to_vec(value).map_err(MigrationStreamError::Text)
}
