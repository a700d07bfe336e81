//! Opens the files of snapshots, and the snapshots on which a diff is based, at paths specified by
//! the user.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use snapshot::diff::{BaseSnapshot, BaseSnapshotError, MAX_DIFFS, SnapshotBaseChain};
use snapshot::format::MAX_STATE_BYTES;
use snapshot::{MEMORY_FILE, STATE_FILE};

use crate::input;

/// Error returned when the bases of a diff cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenBaseError {
    /// A file cannot be read.
    #[error("{}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// A given snapshot cannot be used as a base of the diff.
    #[error(transparent)]
    Unusable(#[from] BaseSnapshotError),
    /// More directories are given than a diff can have bases.
    #[error("{0} bases are given; a diff has at most {MAX_DIFFS}")]
    TooMany(usize),
}

/// Reads a state file of limited size. The file may be a pipe.
///
/// # Errors
/// Returns the error of opening or reading the file.
pub fn read_state(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let limit = MAX_STATE_BYTES as u64 + 1;
    input::open(path)?.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Opens a memory file, which must be a regular file because it is mapped.
///
/// # Errors
/// Returns the error of opening the file, or an error if it is not a regular file.
pub fn open_memory(path: &Path) -> io::Result<File> {
    // Check before opening, because the open would wait for the writer of a pipe.
    if !path.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    File::open(path)
}

/// Opens the snapshots on which the diff snapshot in `diff` is based. `bases` contains the
/// directories of these snapshots, in any order. `need` is the checksum of the snapshot on which
/// the diff is directly based.
///
/// # Errors
/// Returns an [`OpenBaseError`] that names the directory of a snapshot that is missing, unusable or
/// not needed.
pub fn open(diff: &Path, need: u32, bases: &[PathBuf]) -> Result<SnapshotBaseChain, OpenBaseError> {
    Ok(SnapshotBaseChain::new(diff, need, open_all(bases)?)?)
}

/// Opens the snapshots in `bases` to take a new diff. The first snapshot is the base of the diff,
/// and the others are the snapshots on which this base depends. Returns `None` if `bases` is empty.
///
/// # Errors
/// Returns the errors of [`open`].
pub fn open_first(bases: &[PathBuf]) -> Result<Option<SnapshotBaseChain>, OpenBaseError> {
    let opened = open_all(bases)?;
    let Some((path, base)) = bases.first().zip(opened.first()) else {
        return Ok(None);
    };
    let need = base.state_crc();
    Ok(Some(SnapshotBaseChain::new(path, need, opened)?))
}

fn open_all(bases: &[PathBuf]) -> Result<Vec<BaseSnapshot>, OpenBaseError> {
    if bases.len() > MAX_DIFFS {
        return Err(OpenBaseError::TooMany(bases.len()));
    }
    bases.iter().map(|dir| open_snapshot(dir)).collect()
}

fn open_snapshot(dir: &Path) -> Result<BaseSnapshot, OpenBaseError> {
    let failed = |path: &Path, source| OpenBaseError::Read {
        path: path.to_owned(),
        source,
    };
    let (path, memory) = (dir.join(STATE_FILE), dir.join(MEMORY_FILE));
    let state = read_state(&path).map_err(|e| failed(&path, e))?;
    let file = open_memory(&memory).map_err(|e| failed(&memory, e))?;
    Ok(BaseSnapshot::new(dir, &state, file)?)
}
