//! Sending end of a copy, which reads a tree of files and sends it.

use std::fs::{self, File, Metadata, ReadDir};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::entry::{FileTreeEntry, FileTreeEntryType};
use crate::wire::{FrameKind, MAX_PAYLOAD};

/// Maximum depth of nested directories. Deeper directories are skipped.
const MAX_DEPTH: usize = 64;

/// Error returned when a file tree cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum FileTreeSendError {
    /// The root of the tree cannot be read.
    #[error("{}", path.display())]
    Source {
        /// Path of the tree's root.
        path: PathBuf,
        /// Error returned by the operating system.
        #[source]
        source: io::Error,
    },
    /// The root of the tree is neither a file nor a directory.
    #[error("{}: neither a file nor a directory", .0.display())]
    Special(PathBuf),
    /// The connection to the receiver failed.
    #[error("the connection was lost")]
    Connection(#[source] io::Error),
}

/// Callback that sends a frame with the given type and payload.
pub type AgentFrameSink<'a> = &'a mut dyn FnMut(FrameKind, &[u8]) -> io::Result<()>;

/// Sends the file tree at `root`, followed by [`FrameKind::Done`].
///
/// If `root` is a symbolic link, the tree that it points to is sent. Symbolic links below `root`
/// are sent as links. Unreadable entries are skipped and reported.
///
/// # Errors
/// Returns a [`FileTreeSendError`] if the root cannot be read or the connection fails.
pub fn send_tree(root: &Path, out: AgentFrameSink<'_>) -> Result<(), FileTreeSendError> {
    let source = |source| FileTreeSendError::Source {
        path: root.to_owned(),
        source,
    };
    let meta = fs::metadata(root).map_err(source)?;
    if meta.is_dir() {
        let list = fs::read_dir(root).map_err(source)?;
        directory(root, &meta, list, out)?;
    } else if meta.is_file() {
        let file = open(root, true).map_err(source)?;
        let entry = entry(
            PathBuf::new(),
            FileTreeEntryType::File,
            &file.metadata().map_err(source)?,
        );
        send_file(file, &entry, root, out)?;
    } else {
        return Err(FileTreeSendError::Special(root.to_owned()));
    }
    out(FrameKind::Done, &[]).map_err(FileTreeSendError::Connection)
}

/// Sends the contents of `input` as a file tree that consists of a single file.
///
/// # Errors
/// Returns [`FileTreeSendError::Connection`] if the connection fails, or an error if `input` cannot
/// be read.
pub fn send_stream(
    mut input: impl Read,
    mode: u32,
    modified: (u64, u32),
    out: AgentFrameSink<'_>,
) -> Result<(), FileTreeSendError> {
    let entry = FileTreeEntry {
        path: PathBuf::new(),
        what: FileTreeEntryType::File,
        mode,
        modified,
    };
    send_entry(&entry, out)?;
    copy(&mut input, out)?.map_err(|source| FileTreeSendError::Source {
        path: "standard input".into(),
        source,
    })?;
    out(FrameKind::FileEnd, &[])
        .and_then(|()| out(FrameKind::Done, &[]))
        .map_err(FileTreeSendError::Connection)
}

fn open(path: &Path, follow: bool) -> io::Result<File> {
    // Opening a pipe must not block, and the file may have been replaced by a link.
    let no_follow = if follow { 0 } else { libc::O_NOFOLLOW };
    let file = fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | no_follow)
        .open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other("no file any more"))
    }
}

fn entry(path: PathBuf, what: FileTreeEntryType, meta: &Metadata) -> FileTreeEntry {
    FileTreeEntry {
        path,
        what,
        mode: meta.mode() & 0o777,
        // Earlier times are clamped to 1970.
        modified: (
            u64::try_from(meta.mtime()).unwrap_or(0),
            u32::try_from(meta.mtime_nsec()).unwrap_or(0),
        ),
    }
}

/// A directory whose entries are being sent.
struct OpenDirectory {
    entry: FileTreeEntry,
    list: ReadDir,
}

/// Sends a directory with all its descendants. Uses a stack instead of recursion.
fn directory(
    root: &Path,
    meta: &Metadata,
    list: ReadDir,
    out: AgentFrameSink<'_>,
) -> Result<(), FileTreeSendError> {
    let first = entry(PathBuf::new(), FileTreeEntryType::Directory, meta);
    send_entry(&first, out)?;
    let mut open_ones = vec![OpenDirectory { entry: first, list }];
    while let Some(top) = open_ones.last_mut() {
        let Some(next) = top.list.next() else {
            let mut entry = top.entry.clone();
            entry.what = FileTreeEntryType::DirectoryEnd;
            send_entry(&entry, out)?;
            open_ones.pop();
            continue;
        };
        let Ok(next) = next else { continue };
        let path = top.entry.path.join(next.file_name());
        let here = root.join(&path);
        let depth = open_ones.len();
        match child(&here, path, depth, out)? {
            Ok(Some(open)) => open_ones.push(open),
            Ok(None) => {}
            Err(why) => skipped(&here, &why, out)?,
        }
    }
    Ok(())
}

/// Sends an entry of a directory. If the entry is a subdirectory, sends its header and returns it
/// open.
/// Returns an inner error with the reason if the entry is skipped.
fn child(
    here: &Path,
    path: PathBuf,
    depth: usize,
    out: AgentFrameSink<'_>,
) -> Result<io::Result<Option<OpenDirectory>>, FileTreeSendError> {
    let meta = match fs::symlink_metadata(here) {
        Ok(meta) => meta,
        Err(error) => return Ok(Err(error)),
    };
    let kind = meta.file_type();
    if kind.is_dir() {
        if depth >= MAX_DEPTH {
            return Ok(Err(io::Error::other("too many directories within each other")));
        }
        let list = match fs::read_dir(here) {
            Ok(list) => list,
            Err(error) => return Ok(Err(error)),
        };
        let entry = entry(path, FileTreeEntryType::Directory, &meta);
        send_entry(&entry, out)?;
        return Ok(Ok(Some(OpenDirectory { entry, list })));
    }
    if kind.is_symlink() {
        let target = match fs::read_link(here) {
            Ok(target) => target,
            Err(error) => return Ok(Err(error)),
        };
        send_entry(&entry(path, FileTreeEntryType::Link(target), &meta), out)?;
        return Ok(Ok(None));
    }
    if !kind.is_file() {
        return Ok(Err(io::Error::other("neither a file, a directory nor a link")));
    }
    match open(here, false) {
        Ok(file) => {
            send_file(file, &entry(path, FileTreeEntryType::File, &meta), here, out).map(|()| Ok(None))
        }
        Err(error) => Ok(Err(error)),
    }
}

fn send_entry(entry: &FileTreeEntry, out: AgentFrameSink<'_>) -> Result<(), FileTreeSendError> {
    match entry.to_bytes() {
        Some(bytes) => out(FrameKind::TreeEntry, &bytes).map_err(FileTreeSendError::Connection),
        None => skipped(&entry.path, &io::Error::other("its path is too long"), out),
    }
}

fn send_file(
    mut file: File,
    entry: &FileTreeEntry,
    here: &Path,
    out: AgentFrameSink<'_>,
) -> Result<(), FileTreeSendError> {
    send_entry(entry, out)?;
    if let Err(error) = copy(&mut file, out)? {
        skipped(here, &error, out)?;
    }
    out(FrameKind::FileEnd, &[]).map_err(FileTreeSendError::Connection)
}

/// Sends the contents of `input` until end of file or the first read error.
fn copy(input: &mut impl Read, out: AgentFrameSink<'_>) -> Result<io::Result<()>, FileTreeSendError> {
    let mut buffer = vec![0; MAX_PAYLOAD];
    loop {
        match input.read(&mut buffer) {
            Ok(0) => return Ok(Ok(())),
            Ok(count) => out(FrameKind::Data, &buffer[..count]).map_err(FileTreeSendError::Connection)?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Ok(Err(error)),
        }
    }
}

fn skipped(path: &Path, why: &io::Error, out: AgentFrameSink<'_>) -> Result<(), FileTreeSendError> {
    let text = format!("{}: {why}", path.display());
    let bytes = text.as_bytes();
    out(FrameKind::Skipped, &bytes[..bytes.len().min(MAX_PAYLOAD)]).map_err(FileTreeSendError::Connection)
}
