//! The requester process of a kernel search, which holds guest memory. It serves the memory
//! requests of the reader process and validates its result, without parsing guest tables itself.

use std::io::{self, ErrorKind, Read, Write};
use std::time::Instant;

use kernel_images::build_id::BuildId;
use kernel_images::orc::{ENTRY_SIZE, OrcError, OrcTable};
use kernel_images::packed::PackedText;

use super::found_kernel::{FoundKernel, KernelTableReadError};
use super::reader::{MAX_ENTRIES, MAX_SYMBOL_BYTES};
use super::wire::{self, KernelSummary, MemoryRequest, PIECE, SearchRequest};
use crate::locate::KernelAnchorRegisters;
use crate::{GuestPhys, GuestRegs};

/// Maximum number of memory ranges that the reader process may request in one search. For a kernel
/// that is mapped with small pages, a search requests 2,000.
const MAX_RANGES: u32 = 1 << 18;
/// Maximum number of bytes of guest memory that the reader process may request in one search. The
/// largest kernel, mapped with scattered small pages and read once for each of two registers in two
/// address spaces, stays below this limit.
const MAX_SERVED_BYTES: u64 = 4 << 30;
/// Maximum number of characters of a message from the reader process that are shown to the user.
const MAX_TEXT: usize = 400;

/// Error returned when a kernel search fails.
#[derive(Debug, thiserror::Error)]
pub enum KernelSearchRequestError {
    /// The reader found no kernel, or a kernel that it does not support. Contains the reader's
    /// message.
    #[error("{0}")]
    NotFound(String),
    /// The reader process has exited or cannot be reached.
    #[error("the kernel reader process does not respond")]
    Lost(#[source] io::Error),
    /// The kernel search timed out.
    #[error("the kernel reader process timed out")]
    Slow,
    /// The reader process has requested or sent more than permitted. The value names the exceeded
    /// resource.
    #[error("the kernel reader process requested too many {0}")]
    TooMuch(&'static str),
    /// The reader process has sent an invalid message. The value names the type of message.
    #[error("the kernel reader process sent no {0}")]
    Nonsense(&'static str),
    /// The reader process has sent invalid unwind tables.
    #[error("the kernel reader process sent invalid unwind tables")]
    Orc(#[from] OrcError),
}

impl From<io::Error> for KernelSearchRequestError {
    fn from(e: io::Error) -> Self {
        match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Self::Slow,
            ErrorKind::InvalidData => Self::Nonsense("message"),
            _ => Self::Lost(e),
        }
    }
}

/// Searches guest memory for the kernel into which `regs` and `anchors` point. The reader process
/// ([`super::serve`]) at the other end of `stream` parses the kernel's tables, and this function
/// serves its requests for `memory`.
///
/// The search times out when the timeout of `stream` (if it has one) expires, or with the first
/// message that is received after `until`.
///
/// # Errors
/// Returns a [`KernelSearchRequestError`] if the reader finds no kernel, fails, times out, exceeds
/// a limit or sends an invalid message.
pub fn search_kernel<M: GuestPhys + ?Sized>(
    stream: &mut (impl Read + Write),
    memory: &M,
    regs: &GuestRegs,
    anchors: &KernelAnchorRegisters,
    until: Instant,
) -> Result<FoundKernel, KernelSearchRequestError> {
    let question = SearchRequest {
        regs: *regs,
        anchors: *anchors,
    };
    let question =
        serde_json::to_vec(&question).map_err(|_| KernelSearchRequestError::Nonsense("question"))?;
    wire::send(stream, wire::ASK, &question)?;
    let mut got = ReceivedParts::default();
    let mut lender = MemoryServer::default();
    let mut bytes = Vec::new();
    loop {
        if Instant::now() >= until {
            return Err(KernelSearchRequestError::Slow);
        }
        let (letter, length) = wire::head(stream)?;
        bytes.resize(length, 0);
        stream.read_exact(&mut bytes)?;
        match letter {
            wire::READ => lender.lend(stream, memory, &bytes)?,
            wire::FOUND => return got.kernel(&bytes),
            wire::FAILED => return Err(KernelSearchRequestError::NotFound(printable(&bytes))),
            _ => got.add(letter, &bytes)?,
        }
    }
}

/// Serves memory requests of the reader and counts them against the limits of the search.
#[derive(Default)]
struct MemoryServer {
    ranges: u32,
    bytes: u64,
    buffer: Vec<u8>,
}

impl MemoryServer {
    fn lend<M: GuestPhys + ?Sized>(
        &mut self,
        stream: &mut impl Write,
        memory: &M,
        wanted: &[u8],
    ) -> Result<(), KernelSearchRequestError> {
        let MemoryRequest { gpa, bytes } =
            MemoryRequest::from_bytes(wanted).ok_or(KernelSearchRequestError::Nonsense("range"))?;
        let length = bytes as usize;
        if length > PIECE {
            return Err(KernelSearchRequestError::TooMuch("bytes of memory at once"));
        }
        self.ranges += 1;
        self.bytes += u64::from(bytes);
        if self.ranges > MAX_RANGES || self.bytes > MAX_SERVED_BYTES {
            return Err(KernelSearchRequestError::TooMuch("bytes of memory"));
        }
        self.buffer.resize(length, 0);
        if memory.read(gpa, &mut self.buffer) {
            wire::send(stream, wire::MEMORY, &self.buffer)?;
        } else {
            wire::send(stream, wire::NO_MEMORY, &[])?;
        }
        Ok(())
    }
}

/// Symbols and unwind tables of a kernel, as far as the reader process has sent them.
#[derive(Default)]
struct ReceivedParts {
    symbols: Vec<u8>,
    offsets: Vec<u32>,
    entries: Vec<[u8; ENTRY_SIZE]>,
}

impl ReceivedParts {
    fn add(&mut self, letter: u8, bytes: &[u8]) -> Result<(), KernelSearchRequestError> {
        match letter {
            wire::SYMBOLS if self.symbols.len() + bytes.len() <= MAX_SYMBOL_BYTES => {
                self.symbols.extend_from_slice(bytes);
                Ok(())
            }
            wire::SYMBOLS => Err(KernelSearchRequestError::TooMuch("symbols")),
            wire::OFFSETS => {
                let (offsets, rest) = bytes.as_chunks::<4>();
                self.offsets
                    .extend(offsets.iter().map(|offset| u32::from_le_bytes(*offset)));
                self.check_entries(rest)
            }
            wire::ENTRIES => {
                let (entries, rest) = bytes.as_chunks::<ENTRY_SIZE>();
                self.entries.extend_from_slice(entries);
                self.check_entries(rest)
            }
            _ => Err(KernelSearchRequestError::Nonsense("message")),
        }
    }

    /// Checks that the number of unwind table entries is within its limit, and that no incomplete
    /// entry (`rest`) is left over.
    fn check_entries(&self, rest: &[u8]) -> Result<(), KernelSearchRequestError> {
        if self.offsets.len().max(self.entries.len()) > MAX_ENTRIES {
            return Err(KernelSearchRequestError::TooMuch("unwind tables"));
        }
        if rest.is_empty() {
            Ok(())
        } else {
            Err(KernelSearchRequestError::Nonsense("unwind tables"))
        }
    }

    fn kernel(self, summary: &[u8]) -> Result<FoundKernel, KernelSearchRequestError> {
        let summary: KernelSummary =
            serde_json::from_slice(summary).map_err(|_| KernelSearchRequestError::Nonsense("summary"))?;
        let orc = summary.orc_base.map(|base| {
            let mut parts = (self.offsets, self.entries);
            parts.0.shrink_to_fit();
            parts.1.shrink_to_fit();
            OrcTable::from_parts(base, parts.0, parts.1)
        });
        Ok(FoundKernel {
            orc: orc.transpose()?,
            entry_text: summary.entry_text,
            tasks: summary
                .tasks
                .map_err(|KernelTableReadError(why)| KernelTableReadError(printable(why.as_bytes()))),
            tables: summary.tables,
            symbols: PackedText::new(&self.symbols),
            symbol_count: summary.symbols,
            release: summary.release.map(|release| printable(release.as_bytes())),
            build_id: summary.build_id.as_deref().and_then(BuildId::from_hex),
        })
    }
}

/// Makes untrusted text printable. The result has at most [`MAX_TEXT`] characters, with `?` for
/// bytes that are not printable ASCII.
fn printable(text: &[u8]) -> String {
    let shown = |byte: &u8| match byte {
        b' ' | b'!'..=b'~' => char::from(*byte),
        _ => '?',
    };
    text.iter().take(MAX_TEXT).map(shown).collect()
}
