//! Takes a snapshot of a running VM: `perfvisor ctl NAME snapshot DIR`, and snapshots in two files
//! for Firecracker's API.
//!
//! The VM itself writes no file, but sends its memory and state to this command in memory files.
//! The command writes them to a temporary directory next to DIR, and renames the directory to DIR
//! at the end. If the snapshot fails, for example because the disk is full, the directory is
//! removed and the VM continues.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use control_api::client::{Client, ClientError};
use control_api::request;
use control_api::snapshot::{SnapshotPiece, SnapshotProgress, SnapshotState};
use serde_json::Value;
use snapshot::diff::{SnapshotDiffError, SnapshotDiffWriter};
use snapshot::format::MAX_STATE_BYTES;
use snapshot::memory::CHUNK_BYTES;
use snapshot::{MEMORY_FILE, STATE_FILE, SnapshotFormatError};
use tempfile::NamedTempFile;

use crate::snapshot_files::{self, OpenBaseError};

/// Timeout for the vCPUs to stop running the guest.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which a paused VM is polled until its state is known.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Size of a memory page, in bytes. A page of zeros is not written.
const PAGE_BYTES: usize = 4096;

/// Error returned when a snapshot cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotCommandError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("{}: it exists already; name a new directory", .0.display())]
    Exists(PathBuf),
    #[error("{}: it has no name of its own", .0.display())]
    NoName(PathBuf),
    #[error("the snapshot cannot be written to {}; the VM goes on", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} cannot be written", path.display())]
    WriteFile {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the memory of the VM cannot be copied; the VM goes on")]
    Transfer(#[source] io::Error),
    #[error("--diff")]
    OpenBase(#[from] OpenBaseError),
    #[error("--diff {}", path.display())]
    Base {
        path: PathBuf,
        #[source]
        source: SnapshotDiffError,
    },
    #[error("the state of the VM")]
    State(#[from] SnapshotFormatError),
    #[error("the vCPUs have not left the guest after {} s; the VM goes on", TIMEOUT.as_secs())]
    NotPaused,
    #[error("the VM sends a piece of memory that was not asked for")]
    WrongPiece,
}

/// A directory that is removed with its files unless it is renamed.
struct PartialDirectory {
    path: PathBuf,
    is_renamed: bool,
}

impl PartialDirectory {
    /// Creates a temporary directory next to `dir`, to be renamed to `dir` when complete.
    fn beside(dir: &Path) -> Result<Self, SnapshotCommandError> {
        let name = dir
            .file_name()
            .ok_or_else(|| SnapshotCommandError::NoName(dir.to_owned()))?;
        let mut partial = std::ffi::OsString::from(".");
        partial.push(name);
        partial.push(format!(".partial-{}", std::process::id()));
        let path = dir.with_file_name(partial);
        // Guest memory must not be accessible to other users.
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.map_err(write_error(dir))?;
        Ok(Self {
            path,
            is_renamed: false,
        })
    }

    /// Creates a file in the directory.
    fn create(&self, name: &str) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        options.open(self.path.join(name))
    }

    /// Gives the directory its final name. Replaces an existing directory only if it is empty.
    fn rename(mut self, dir: &Path) -> io::Result<()> {
        File::open(&self.path)?.sync_all()?;
        fs::rename(&self.path, dir)?;
        self.is_renamed = true;
        if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            File::open(parent)?.sync_all()?;
        }
        Ok(())
    }
}

impl Drop for PartialDirectory {
    fn drop(&mut self) {
        if !self.is_renamed {
            let _ = fs::remove_file(self.path.join(MEMORY_FILE));
            let _ = fs::remove_file(self.path.join(STATE_FILE));
            let _ = fs::remove_dir(&self.path);
        }
    }
}

fn write_error(dir: &Path) -> impl Fn(io::Error) -> SnapshotCommandError {
    move |source| SnapshotCommandError::Write {
        path: dir.to_owned(),
        source,
    }
}

fn write_file_error(path: &Path) -> impl Fn(io::Error) -> SnapshotCommandError {
    move |source| SnapshotCommandError::WriteFile {
        path: path.to_owned(),
        source,
    }
}

fn base_error(dir: &Path) -> impl Fn(SnapshotDiffError) -> SnapshotCommandError {
    move |source| SnapshotCommandError::Base {
        path: dir.to_owned(),
        source,
    }
}

/// Size of a completed snapshot, for messages.
#[derive(Clone, Copy, Debug)]
pub(super) struct SnapshotSize {
    memory_bytes: u64,
    /// Number of bytes that differ from the base, for a diff snapshot.
    changed_bytes: Option<u64>,
}

impl fmt::Display for SnapshotSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(bytes) = self.changed_bytes {
            write!(f, "{} KiB changed of ", bytes >> 10)?;
        }
        write!(f, "{} MiB of memory", self.memory_bytes >> 20)
    }
}

/// Takes a snapshot of the VM in the new directory `dir`, and returns its size. With `stop`, the VM
/// terminates when the snapshot is on disk.
///
/// With `bases`, takes a diff snapshot, which contains only the memory that differs from the
/// snapshot in the first directory of `bases`. The other directories contain, in any order, the
/// snapshots on which that snapshot is based.
///
/// # Errors
/// Returns a [`SnapshotCommandError`]. In this case `dir` does not exist, and the VM continues.
pub(super) fn take(
    client: &mut Client,
    dir: &Path,
    bases: &[PathBuf],
    stop: bool,
) -> Result<SnapshotSize, SnapshotCommandError> {
    if dir.symlink_metadata().is_ok() {
        return Err(SnapshotCommandError::Exists(dir.to_owned()));
    }
    let failed = write_error(dir);
    let opened = snapshot_files::open_first(bases)?;
    let partial = PartialDirectory::beside(dir)?;
    let memory_bytes = pause(client)?;
    let memory = partial.create(MEMORY_FILE).map_err(&failed)?;
    memory.set_len(memory_bytes).map_err(&failed)?;
    let of_base = base_error(bases.first().map_or(dir, PathBuf::as_path));
    let diff = opened.map(|base| SnapshotDiffWriter::new(base, memory_bytes));
    let mut diff = diff.transpose().map_err(&of_base)?;
    let mut buffer = copy(client, memory_bytes, |piece, data| match &mut diff {
        None => write_sparse(&memory, data, piece.offset).map_err(&failed),
        Some(diff) => write_changes(diff, &memory, piece, data, &of_base, &failed),
    })?;
    let mut changed_bytes = None;
    if let Some(diff) = diff {
        let (state, changed) = diff.finish(&buffer).map_err(&of_base)?;
        (buffer, changed_bytes) = (state, Some(changed));
    }
    if !stop {
        // Resume the VM before waiting until the data is on disk.
        client.call(request::SnapshotEnd { stop: false })?;
    }
    let state = partial.create(STATE_FILE).map_err(&failed)?;
    state.write_all_at(&buffer, 0).map_err(&failed)?;
    memory
        .sync_all()
        .and_then(|()| state.sync_all())
        .map_err(&failed)?;
    partial.rename(dir).map_err(&failed)?;
    if stop {
        client.call(request::SnapshotEnd { stop: true })?;
    }
    Ok(SnapshotSize {
        memory_bytes,
        changed_bytes,
    })
}

/// Takes a snapshot of the VM in the files `state` and `memory`, replacing existing files. A paused
/// VM stays paused. `change` converts the VM's state file to the state file to write.
///
/// # Errors
/// Returns a [`SnapshotCommandError`]. Existing files are then unchanged, unless renaming the new
/// files has failed, which is the last step.
pub fn save(
    client: &mut Client,
    state: &Path,
    memory: &Path,
    change: impl FnOnce(Vec<u8>) -> Result<Vec<u8>, SnapshotFormatError>,
) -> Result<(), SnapshotCommandError> {
    let of_state = write_file_error(state);
    let of_memory = write_file_error(memory);
    let mut state_file = file_beside(state).map_err(&of_state)?;
    let memory_file = file_beside(memory).map_err(&of_memory)?;
    let memory_bytes = pause(client)?;
    let file = memory_file.as_file();
    file.set_len(memory_bytes).map_err(&of_memory)?;
    let saved = copy(client, memory_bytes, |piece, data| {
        write_sparse(file, data, piece.offset).map_err(&of_memory)
    })?;
    client.call(request::SnapshotEnd { stop: false })?;
    let written = state_file.write_all(&change(saved)?);
    written.map_err(&of_state)?;
    for (file, path, failed) in [(memory_file, memory, of_memory), (state_file, state, of_state)] {
        file.as_file().sync_all().map_err(&failed)?;
        file.persist(path).map_err(|e| failed(e.error))?;
        File::open(parent(path))
            .and_then(|dir| dir.sync_all())
            .map_err(&failed)?;
    }
    Ok(())
}

/// Returns the directory that contains `path`.
fn parent(path: &Path) -> &Path {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

/// Creates a private file next to `path`. The file is removed unless it is renamed.
fn file_beside(path: &Path) -> io::Result<NamedTempFile> {
    let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
    let mut prefix = std::ffi::OsString::from(".");
    prefix.push(name);
    prefix.push(".partial-");
    tempfile::Builder::new().prefix(&prefix).tempfile_in(parent(path))
}

/// Copies the memory of a paused VM in pieces, and returns the VM's state. Calls `write` with each
/// piece and the bytes of the piece, which are empty for zeros.
fn copy(
    client: &mut Client,
    memory_bytes: u64,
    mut write: impl FnMut(SnapshotPiece, &[u8]) -> Result<(), SnapshotCommandError>,
) -> Result<Vec<u8>, SnapshotCommandError> {
    let failed = SnapshotCommandError::Transfer;
    let mut buffer = Vec::new();
    copy_memory(client, memory_bytes, |piece, data| {
        buffer.resize(usize::try_from(piece.bytes).unwrap_or(usize::MAX), 0);
        data.read_exact_at(&mut buffer, 0).map_err(failed)?;
        write(piece, &buffer)
    })?;
    Ok(read_state(client)?)
}

/// Writes the parts of a piece of memory that differ from the base snapshot of `diff`.
fn write_changes(
    diff: &mut SnapshotDiffWriter,
    memory: &File,
    piece: SnapshotPiece,
    data: &[u8],
    of_base: impl Fn(SnapshotDiffError) -> SnapshotCommandError,
    failed: impl Fn(io::Error) -> SnapshotCommandError,
) -> Result<(), SnapshotCommandError> {
    let mut zeros = Vec::new();
    let mut at = piece.offset;
    while at < piece.next {
        let len = usize::try_from(CHUNK_BYTES.min(piece.next - at)).unwrap_or(usize::MAX);
        if data.is_empty() && diff.skip_hole(at).map_err(&of_base)? {
            at += len as u64;
            continue;
        }
        let chunk = if data.is_empty() {
            zeros.resize(len, 0);
            &zeros
        } else {
            data
        };
        for range in diff.compare(at, chunk).map_err(&of_base)? {
            let from = at + range.start as u64;
            write_sparse(memory, &chunk[range], from).map_err(&failed)?;
        }
        at += len as u64;
    }
    Ok(())
}

/// Reads all `memory_bytes` bytes of a paused VM's memory in pieces. Passes each piece to `take`,
/// with a file that contains the bytes of the piece unless they are zeros.
///
/// # Errors
/// Returns a [`SnapshotCommandError`] if the VM sends an invalid piece, and the errors of `take`.
pub fn copy_memory<E: From<SnapshotCommandError>>(
    client: &mut Client,
    memory_bytes: u64,
    mut take: impl FnMut(SnapshotPiece, &File) -> Result<(), E>,
) -> Result<(), E> {
    let mut offset = 0;
    while offset < memory_bytes {
        let piece: (SnapshotPiece, File) = client
            .call_with_file(request::SnapshotMemory { offset })
            .map_err(SnapshotCommandError::from)?;
        let (piece, data) = check_piece(piece, offset, memory_bytes)?;
        take(piece, &data)?;
        offset = piece.next;
    }
    Ok(())
}

/// Returns the state file of a paused VM. The caller must have read the VM's memory before.
///
/// # Errors
/// Returns a [`ClientError`] if the VM does not send the state.
pub fn read_state(client: &mut Client) -> Result<Vec<u8>, ClientError> {
    let (info, data): (SnapshotState, File) = client.call_with_file(request::SnapshotState)?;
    let bytes = usize::try_from(info.bytes).unwrap_or(usize::MAX);
    let mut state = vec![0; bytes.min(MAX_STATE_BYTES)];
    data.read_exact_at(&mut state, 0)?;
    Ok(state)
}

/// Returns the document of the VM's metadata service, or `None` if the VM has no such service.
///
/// # Errors
/// Returns a [`ClientError`] if the VM does not answer.
pub fn read_metadata(client: &mut Client) -> Result<Option<Value>, ClientError> {
    match client.call(request::MmdsGet) {
        Ok(document) => Ok(Some(document).filter(|document| !document.is_null())),
        // The VM refuses the request if it has no metadata service.
        Err(ClientError::Refused(_)) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Pauses the VM, waits until its state is known, and returns the size of guest memory in bytes.
///
/// # Errors
/// Returns [`SnapshotCommandError::NotPaused`] if a vCPU does not stop running the guest, and a
/// [`ClientError`] if the VM refuses the request.
pub fn pause(client: &mut Client) -> Result<u64, SnapshotCommandError> {
    let until = Instant::now() + TIMEOUT;
    loop {
        let progress: SnapshotProgress = client.call(request::Snapshot)?;
        if progress.ready {
            return Ok(progress.memory_bytes);
        }
        if Instant::now() > until {
            return Err(SnapshotCommandError::NotPaused);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Checks that a piece of memory starts at `offset` and ends within guest memory.
fn check_piece(
    (piece, file): (SnapshotPiece, File),
    offset: u64,
    memory_bytes: u64,
) -> Result<(SnapshotPiece, File), SnapshotCommandError> {
    let fits = piece.offset == offset
        && piece.next > offset
        && piece.next <= memory_bytes
        && piece.bytes <= CHUNK_BYTES
        && (piece.bytes == 0 || piece.bytes == piece.next - offset);
    fits.then_some((piece, file))
        .ok_or(SnapshotCommandError::WrongPiece)
}

/// Writes the pages of `data` that are not zero to the new file at `offset`.
fn write_sparse(file: &File, data: &[u8], offset: u64) -> io::Result<()> {
    let is_zero = |page: &[u8]| *page == [0; PAGE_BYTES][..page.len()];
    let mut at = 0;
    while at < data.len() {
        let mut pages = data[at..].chunks(PAGE_BYTES);
        let zeros = pages.clone().take_while(|page| is_zero(page)).count();
        at = data.len().min(at + zeros * PAGE_BYTES);
        pages = data[at..].chunks(PAGE_BYTES);
        let used = pages.take_while(|page| !is_zero(page)).count();
        let end = data.len().min(at + used * PAGE_BYTES);
        file.write_all_at(&data[at..end], offset + at as u64)?;
        at = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn zero_pages_are_holes() {
        let file = tempfile::tempfile().unwrap();
        let mut data = vec![0; 64 * PAGE_BYTES + 100];
        data[3 * PAGE_BYTES] = 1;
        data[10 * PAGE_BYTES..12 * PAGE_BYTES].fill(2);
        data[64 * PAGE_BYTES + 99] = 3;
        file.set_len(1 << 20).unwrap();
        write_sparse(&file, &data, 8192).unwrap();
        let mut back = vec![0xFF; data.len()];
        file.read_exact_at(&mut back, 8192).unwrap();
        assert_eq!(back, data);
        assert!(file.metadata().unwrap().blocks() * 512 <= 8 * PAGE_BYTES as u64);
    }

    /// An untrusted VM cannot make this command allocate or write an unbounded amount of data by
    /// sending invalid pieces of memory.
    #[test]
    fn wrong_pieces_are_refused() {
        let memory = 32 << 20;
        let check = |offset, bytes, next| {
            let piece = SnapshotPiece { offset, bytes, next };
            let file = tempfile::tempfile().unwrap();
            check_piece((piece, file), 2 << 20, memory).is_ok()
        };
        assert!(check(2 << 20, 2 << 20, 4 << 20));
        assert!(check(2 << 20, 0, memory));
        for (offset, bytes, next) in [
            (0, 0, memory),
            (2 << 20, 0, 2 << 20),
            (2 << 20, 0, memory + 1),
            (2 << 20, (2 << 20) + 1, memory),
            (2 << 20, 4097, (2 << 20) + 4096),
            (2 << 20, u64::MAX, u64::MAX),
        ] {
            assert!(!check(offset, bytes, next), "{offset} {bytes} {next}");
        }
    }

    #[test]
    fn partial_directory_is_removed_unless_renamed() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("one");
        let partial = PartialDirectory::beside(&dir).unwrap();
        partial.create(STATE_FILE).unwrap();
        drop(partial);
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
        let partial = PartialDirectory::beside(&dir).unwrap();
        partial.create(MEMORY_FILE).unwrap();
        partial.rename(&dir).unwrap();
        assert!(dir.join(MEMORY_FILE).is_file());
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1);
        let nameless = PartialDirectory::beside(Path::new("/"));
        assert!(matches!(nameless, Err(SnapshotCommandError::NoName(_))));
    }
}
