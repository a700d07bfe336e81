//! Checksums of the memory file.
//!
//! Restoring maps the memory file and does not read it, so damage is detected only if the user
//! requests verification. Damage affects the guest, never the VMM.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use crate::state::SavedMemoryFile;

/// Size of a chunk of the memory file, in bytes. Each chunk has its own checksum.
pub const CHUNK_BYTES: u64 = 2 << 20;
/// Maximum size of one read from a memory file, in bytes.
const READ_BYTES: usize = 1 << 20;

/// Reason for rejecting a memory file.
#[derive(Debug, thiserror::Error)]
pub enum MemoryFileError {
    /// The memory file cannot be read.
    #[error("it cannot be read")]
    Read(#[from] io::Error),
    /// The file is shorter or longer than the guest's memory.
    #[error("it has {have} bytes, expected {need}: it was truncated, extended, or belongs to another state")]
    Length {
        /// Size of the memory file in bytes.
        have: u64,
        /// Size of guest memory in bytes.
        need: u64,
    },
    /// The state does not have one checksum per chunk.
    #[error("the state has {have} checksums of memory, expected {need}")]
    Checksums {
        /// Number of checksums in the state.
        have: usize,
        /// Number of chunks of guest memory, each of which needs a checksum.
        need: u64,
    },
    /// A chunk of the memory file does not match its checksum.
    #[error("it is damaged between bytes {start:#x} and {end:#x}: the checksum does not match")]
    Damaged {
        /// Offset of the first byte of the damaged chunk.
        start: u64,
        /// Offset of the first byte after the damaged chunk.
        end: u64,
    },
}

/// Checks the sizes of a memory file and of its checksums.
///
/// # Errors
/// Returns [`MemoryFileError::Length`] or [`MemoryFileError::Checksums`] if they do not match
/// `memory`, and [`MemoryFileError::Read`] if the size of the file cannot be determined.
pub fn check_size(file: &File, memory: &SavedMemoryFile) -> Result<(), MemoryFileError> {
    let have = file.metadata()?.len();
    if have != memory.bytes {
        return Err(MemoryFileError::Length {
            have,
            need: memory.bytes,
        });
    }
    let need = memory.bytes.div_ceil(CHUNK_BYTES);
    if u64::try_from(memory.crcs.len()) != Ok(need) {
        return Err(MemoryFileError::Checksums {
            have: memory.crcs.len(),
            need,
        });
    }
    Ok(())
}

/// Reads the whole memory file and verifies its checksums.
///
/// # Errors
/// Returns an error if [`check_size`] fails, and [`MemoryFileError::Damaged`] for the first chunk
/// that does not match.
pub fn verify(file: &File, memory: &SavedMemoryFile) -> Result<(), MemoryFileError> {
    check_size(file, memory)?;
    verify_by(memory, |_, _| false, |buffer, at| file.read_exact_at(buffer, at))
}

/// Verifies the checksums in `memory` against the contents that `read` returns for an offset. Skips
/// chunks for which `is_verified` returns `true`; its arguments are the chunk number and the
/// chunk's range in memory.
pub(crate) fn verify_by(
    memory: &SavedMemoryFile,
    is_verified: impl Fn(usize, &Range<u64>) -> bool,
    read: impl Fn(&mut [u8], u64) -> io::Result<()>,
) -> Result<(), MemoryFileError> {
    let mut buffer = vec![0; READ_BYTES];
    let mut start = 0;
    for (chunk, &crc) in memory.crcs.iter().enumerate() {
        let end = memory.bytes.min(start + CHUNK_BYTES);
        if is_verified(chunk, &(start..end)) {
            start = end;
            continue;
        }
        let mut hasher = crc32fast::Hasher::new();
        let mut at = start;
        while at < end {
            let count = usize::try_from(end - at).unwrap_or(READ_BYTES).min(READ_BYTES);
            read(&mut buffer[..count], at)?;
            hasher.update(&buffer[..count]);
            at += count as u64;
        }
        if hasher.finalize() != crc {
            return Err(MemoryFileError::Damaged { start, end });
        }
        start = end;
    }
    Ok(())
}

/// Returns the checksum of a chunk.
#[must_use]
pub fn checksum(chunk: &[u8]) -> u32 {
    crc32fast::hash(chunk)
}
