//! Receives a copied file tree and creates it within a target directory.
//!
//! Each path is opened with openat2(2) below the target directory, with RESOLVE_BENEATH and
//! RESOLVE_NO_SYMLINKS. A symbolic link can therefore not lead out of the directory, even if it was
//! just received or is created concurrently.
//!
//! New files have the permissions that the sender specified, restricted by the umask. Existing
//! files keep their permissions, so that a hostile sender cannot make them accessible to other
//! users.

use std::ffi::OsString;
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, symlinkat, unlinkat};

use crate::entry::{FileTreeEntry, FileTreeEntryError, FileTreeEntryType};
use crate::wire::{Frame, FrameKind};

/// Error returned when a file tree cannot be received.
#[derive(Debug, thiserror::Error)]
pub enum FileTreeReceiveError {
    /// A file, directory or link cannot be created.
    #[error("{}", path.display())]
    Target {
        /// Path of the file, directory or link.
        path: PathBuf,
        /// Error returned by the operating system.
        #[source]
        source: io::Error,
    },
    /// The target path has no file name to give to the tree.
    #[error("{}: no file name; name the copy", .0.display())]
    NoName(PathBuf),
    /// The sender sent an invalid entry.
    #[error(transparent)]
    TreeEntry(#[from] FileTreeEntryError),
    /// The sender sent the frames of the tree in an invalid order.
    #[error("protocol error: the peer sent an unexpected frame")]
    Order,
    /// The sender aborted the copy.
    #[error("{0}")]
    Refused(String),
}

/// Progress of a copy after the receiver has processed a frame.
#[derive(Debug, PartialEq, Eq)]
pub enum FileTreeCopyProgress {
    /// The received tree is still incomplete.
    More,
    /// The sender skipped the entry that the string describes, with the reason.
    Skipped(String),
    /// The received tree is complete.
    Done,
}

/// An open file or directory of the target. `new` is `true` if the receiver created it.
#[derive(Debug)]
struct CreatedEntry {
    file: File,
    new: bool,
}

/// Permission bits that a sender may set. The set-ID and sticky bits are excluded.
const PERMISSIONS: u32 = 0o777;

/// The receiving end of a file tree copy.
#[derive(Debug)]
pub struct FileTreeReceiver {
    parent: OwnedFd,
    directory: PathBuf,
    name: OsString,
    file: Option<(CreatedEntry, FileTreeEntry)>,
    /// Directories that have been started but not finished, outermost first, each with its path.
    /// The flag is `true` if the receiver created the directory.
    directories: Vec<(PathBuf, bool)>,
    begun: bool,
}

impl FileTreeReceiver {
    /// Creates a receiver for a tree at `path`. If `path` is an existing directory, the tree is
    /// created in this directory with the name `name`.
    ///
    /// # Errors
    /// Returns [`FileTreeReceiveError::Target`] if the directory does not exist, and
    /// [`FileTreeReceiveError::NoName`] if there is no file name.
    pub fn new(path: &Path, name: Option<&str>) -> Result<Self, FileTreeReceiveError> {
        let no_name = || FileTreeReceiveError::NoName(path.to_owned());
        let (directory, name) = if path.is_dir() {
            let name = name.filter(|name| !["", ".", ".."].contains(name) && !name.contains(['/', '\0']));
            (path.to_owned(), OsString::from(name.ok_or_else(no_name)?))
        } else {
            let name = path.file_name().ok_or_else(no_name)?;
            let parent = path.parent().filter(|parent| *parent != Path::new(""));
            (parent.unwrap_or(Path::new(".")).to_owned(), name.to_owned())
        };
        let parent = File::open(&directory)
            .and_then(|file| {
                if file.metadata()?.is_dir() {
                    Ok(file)
                } else {
                    Err(io::ErrorKind::NotADirectory.into())
                }
            })
            .map_err(|source| FileTreeReceiveError::Target {
                path: directory.clone(),
                source,
            })?;
        Ok(Self {
            parent: parent.into(),
            directory,
            name,
            file: None,
            directories: Vec::new(),
            begun: false,
        })
    }

    /// Processes a frame from the sender.
    ///
    /// # Errors
    /// Returns a [`FileTreeReceiveError`] if the frame is invalid or an entry cannot be created.
    /// Entries that were created before remain.
    pub fn take(&mut self, frame: &Frame) -> Result<FileTreeCopyProgress, FileTreeReceiveError> {
        match (frame.kind, &mut self.file) {
            (FrameKind::TreeEntry, None) => {
                let entry = FileTreeEntry::from_bytes(&frame.payload)?;
                // The root must be the first entry.
                if self.begun == entry.path.as_os_str().is_empty()
                    && entry.what != FileTreeEntryType::DirectoryEnd
                {
                    return Err(FileTreeReceiveError::Order);
                }
                // The sender follows a link at the root. A link created here would redirect the
                // next copy.
                if !self.begun && matches!(entry.what, FileTreeEntryType::Link(_)) {
                    return Err(FileTreeReceiveError::Order);
                }
                self.begun = true;
                self.make(entry)?;
            }
            (FrameKind::Data, Some((made, entry))) => {
                let written = made.file.write_all(&frame.payload);
                let path = entry.path.clone();
                written.map_err(|source| self.target(&path, source))?;
            }
            (FrameKind::FileEnd, Some(_)) => {
                if let Some((made, entry)) = self.file.take() {
                    Self::finish(&made, &entry).map_err(|source| self.target(&entry.path, source))?;
                }
            }
            (FrameKind::Skipped, _) => return Ok(FileTreeCopyProgress::Skipped(frame.text())),
            (FrameKind::Done, None) if self.begun => return Ok(FileTreeCopyProgress::Done),
            (FrameKind::Refused, _) => return Err(FileTreeReceiveError::Refused(frame.text())),
            _ => return Err(FileTreeReceiveError::Order),
        }
        Ok(FileTreeCopyProgress::More)
    }

    fn target(&self, path: &Path, source: io::Error) -> FileTreeReceiveError {
        FileTreeReceiveError::Target {
            path: self.directory.join(self.below(path)),
            source,
        }
    }

    /// Returns the path of an entry relative to the directory that contains the tree: the name of
    /// the tree, followed by `path`.
    fn below(&self, path: &Path) -> PathBuf {
        if path.as_os_str().is_empty() {
            self.name.clone().into()
        } else {
            Path::new(&self.name).join(path)
        }
    }

    fn make(&mut self, entry: FileTreeEntry) -> Result<(), FileTreeReceiveError> {
        let path = self.below(&entry.path);
        let made = match &entry.what {
            FileTreeEntryType::Directory => self
                .make_directory(&path, entry.mode)
                .map(|new| self.directories.push((path, new))),
            FileTreeEntryType::DirectoryEnd => {
                let last = self.directories.pop();
                let Some((_, new)) = last.filter(|(last, _)| *last == path) else {
                    return Err(FileTreeReceiveError::Order);
                };
                let directory = self.open(&path, OFlag::O_RDONLY | OFlag::O_DIRECTORY, 0);
                directory.and_then(|file| Self::finish(&CreatedEntry { file, new }, &entry))
            }
            FileTreeEntryType::File => self
                .make_file(&path, entry.mode)
                .map(|made| self.file = Some((made, entry.clone()))),
            FileTreeEntryType::Link(target) => self.make_link(&path, target),
        };
        made.map_err(|source| self.target(&entry.path, source))
    }

    /// Opens the file or directory `path` below the target directory, or creates a file with
    /// `O_CREAT`. `mode` applies only to a new file.
    fn open(&self, path: &Path, flags: OFlag, mode: u32) -> io::Result<File> {
        let how = OpenHow::new()
            .flags(flags | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)
            .mode(Mode::from_bits_truncate(mode))
            .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
        match openat2(&self.parent, path, how) {
            Ok(fd) => Ok(File::from(fd)),
            Err(Errno::ELOOP) => Err(io::Error::other("a symbolic link is in the way")),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Opens the parent directory of `path`. Returns the directory and the file name of `path`.
    fn parent_of(&self, path: &Path) -> io::Result<(File, OsString)> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let parent = path.parent().filter(|parent| *parent != Path::new(""));
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        Ok((
            self.open(parent.unwrap_or(Path::new(".")), flags, 0)?,
            name.to_owned(),
        ))
    }

    /// Creates the directory `path` below the target directory. Returns `true` if the directory did
    /// not exist.
    fn make_directory(&self, path: &Path, mode: u32) -> io::Result<bool> {
        let (parent, name) = self.parent_of(path)?;
        // Grant the owner all rights, because the receiver must be able to fill the directory.
        let mode = Mode::from_bits_truncate(mode & PERMISSIONS) | Mode::S_IRWXU;
        match mkdirat(&parent, name.as_os_str(), mode) {
            // An existing directory is reused.
            Err(Errno::EEXIST) => {
                self.open(path, OFlag::O_RDONLY | OFlag::O_DIRECTORY, 0)?;
                Ok(false)
            }
            result => Ok(result.map(|()| true)?),
        }
    }

    fn make_file(&self, path: &Path, mode: u32) -> io::Result<CreatedEntry> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT;
        let new = self.open(path, flags | OFlag::O_EXCL, mode & PERMISSIONS);
        let (file, new) = match new {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => (self.open(path, flags, 0)?, false),
            file => (file?, true),
        };
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("something that is no file is in the way"));
        }
        file.set_len(0)?;
        Ok(CreatedEntry { file, new })
    }

    fn make_link(&self, path: &Path, target: &Path) -> io::Result<()> {
        let (parent, name) = self.parent_of(path)?;
        match symlinkat(target, &parent, name.as_os_str()) {
            Err(Errno::EEXIST) => {
                // The call fails for a directory, which is kept.
                unlinkat(&parent, name.as_os_str(), UnlinkatFlags::NoRemoveDir)?;
                Ok(symlinkat(target, &parent, name.as_os_str())?)
            }
            result => Ok(result?),
        }
    }

    /// Sets the permissions and the modification time of a completed entry. This must be the last
    /// step, because writing the contents changes the time and may require the initial permissions.
    fn finish(made: &CreatedEntry, entry: &FileTreeEntry) -> io::Result<()> {
        let CreatedEntry { file, new } = made;
        if *new {
            let granted = file.metadata()?.permissions().mode() & PERMISSIONS;
            file.set_permissions(Permissions::from_mode(granted & entry.mode))?;
        }
        file.set_modified(entry.modified())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;
    use crate::send::{send_stream, send_tree};

    fn frames(root: &Path) -> Vec<Frame> {
        let mut frames = Vec::new();
        send_tree(root, &mut |kind, payload| {
            let payload = payload.to_vec();
            frames.push(Frame { kind, payload });
            Ok(())
        })
        .unwrap();
        frames
    }

    fn receive(frames: &[Frame], target: &Path, name: &str) -> Result<Vec<String>, FileTreeReceiveError> {
        let mut receiver = FileTreeReceiver::new(target, Some(name))?;
        let mut skipped = Vec::new();
        for frame in frames {
            match receiver.take(frame)? {
                FileTreeCopyProgress::Skipped(what) => skipped.push(what),
                FileTreeCopyProgress::Done => return Ok(skipped),
                FileTreeCopyProgress::More => {}
            }
        }
        panic!("it does not end")
    }

    fn entry(path: &str, what: FileTreeEntryType) -> Frame {
        let entry = FileTreeEntry {
            path: path.into(),
            what,
            mode: 0o755,
            modified: (0, 0),
        };
        Frame {
            kind: FrameKind::TreeEntry,
            payload: entry.to_bytes().unwrap(),
        }
    }

    fn frame(kind: FrameKind) -> Frame {
        Frame {
            kind,
            payload: Vec::new(),
        }
    }

    #[test]
    fn tree_is_copied_unchanged() {
        let temp = tempfile::tempdir().unwrap();
        let (from, to) = (temp.path().join("from"), temp.path().join("to"));
        fs::create_dir_all(from.join("d/e")).unwrap();
        fs::create_dir(&to).unwrap();
        fs::write(from.join("d/big"), vec![5; 300_000]).unwrap();
        fs::write(from.join("empty"), "").unwrap();
        fs::set_permissions(from.join("empty"), Permissions::from_mode(0o400)).unwrap();
        symlink("../nowhere", from.join("d/link")).unwrap();
        nix::unistd::mkfifo(&from.join("pipe"), Mode::S_IRWXU).unwrap();
        let old = std::time::UNIX_EPOCH + std::time::Duration::new(1_000_000_000, 7);
        File::open(from.join("d/big")).unwrap().set_modified(old).unwrap();
        File::open(from.join("d")).unwrap().set_modified(old).unwrap();

        let skipped = receive(&frames(&from), &to, "copy").unwrap();
        assert!(skipped.len() == 1 && skipped[0].contains("pipe"), "{skipped:?}");
        let copy = to.join("copy");
        assert_eq!(fs::read(copy.join("d/big")).unwrap(), vec![5; 300_000]);
        assert_eq!(fs::metadata(copy.join("d/big")).unwrap().modified().unwrap(), old);
        assert_eq!(fs::metadata(copy.join("d")).unwrap().modified().unwrap(), old);
        assert_eq!(fs::metadata(copy.join("empty")).unwrap().mode() & 0o777, 0o400);
        assert_eq!(
            fs::read_link(copy.join("d/link")).unwrap(),
            Path::new("../nowhere")
        );
        assert!(copy.join("d/e").is_dir() && !copy.join("pipe").exists());
    }

    /// The umask restricts the permissions of a received file, and existing files keep their
    /// permissions.
    #[test]
    fn received_files_respect_umask_and_existing_modes() {
        let temp = tempfile::tempdir().unwrap();
        let umask = {
            fs::write(temp.path().join("probe"), "").unwrap();
            0o666 & !fs::metadata(temp.path().join("probe")).unwrap().mode()
        };
        let open = |path: &str, what| {
            let entry = FileTreeEntry {
                path: path.into(),
                what,
                mode: 0o6777,
                modified: (0, 0),
            };
            Frame {
                kind: FrameKind::TreeEntry,
                payload: entry.to_bytes().unwrap(),
            }
        };
        let sent = [
            open("", FileTreeEntryType::Directory),
            open("old", FileTreeEntryType::File),
            frame(FrameKind::FileEnd),
            open("new", FileTreeEntryType::File),
            frame(FrameKind::FileEnd),
            open("d", FileTreeEntryType::Directory),
            open("d", FileTreeEntryType::DirectoryEnd),
            open("", FileTreeEntryType::DirectoryEnd),
            frame(FrameKind::Done),
        ];
        let target = temp.path().join("t");
        fs::create_dir(&target).unwrap();
        fs::set_permissions(&target, Permissions::from_mode(0o700)).unwrap();
        fs::write(target.join("old"), "mine").unwrap();
        fs::set_permissions(target.join("old"), Permissions::from_mode(0o600)).unwrap();
        receive(&sent, temp.path(), "t").unwrap();
        let mode = |path: &str| fs::metadata(target.join(path)).unwrap().mode() & 0o7777;
        assert_eq!((mode(""), mode("old")), (0o700, 0o600));
        assert_eq!((mode("new"), mode("d")), (0o777 & !umask, 0o777 & !umask));
    }

    #[test]
    fn file_is_named_by_target_or_source() {
        let temp = tempfile::tempdir().unwrap();
        let (from, new) = (temp.path().join("from"), temp.path().join("new"));
        fs::write(&from, "text, longer").unwrap();
        let sent = frames(&from);
        receive(&sent, &new, "from").unwrap();
        fs::write(&from, "text").unwrap();
        // The file is overwritten and truncated.
        receive(&frames(&from), &new, "from").unwrap();
        assert_eq!(fs::read(&new).unwrap(), b"text");
        fs::create_dir(temp.path().join("d")).unwrap();
        receive(&sent, &temp.path().join("d"), "from").unwrap();
        assert_eq!(fs::read(temp.path().join("d/from")).unwrap(), b"text, longer");
        for name in ["..", "", "a/b"] {
            assert!(matches!(
                receive(&sent, temp.path(), name),
                Err(FileTreeReceiveError::NoName(_))
            ));
        }
        assert!(receive(&sent, &temp.path().join("not/there"), "x").is_err());
    }

    #[test]
    fn stream_is_received_as_file() {
        let temp = tempfile::tempdir().unwrap();
        let mut sent = Vec::new();
        send_stream(&b"piped"[..], 0o600, (1, 2), &mut |kind, payload| {
            let payload = payload.to_vec();
            sent.push(Frame { kind, payload });
            Ok(())
        })
        .unwrap();
        receive(&sent, &temp.path().join("f"), "-").unwrap();
        assert_eq!(fs::read(temp.path().join("f")).unwrap(), b"piped");
    }

    #[test]
    fn symbolic_links_cannot_escape_target() {
        let temp = tempfile::tempdir().unwrap();
        let (target, outside) = (temp.path().join("target"), temp.path().join("outside"));
        fs::create_dir(&target).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("secret"), "mine").unwrap();
        // Receive a link, followed by an entry below it.
        for last in [
            entry("l/new", FileTreeEntryType::File),
            entry("l/d", FileTreeEntryType::Directory),
            entry("l/x", FileTreeEntryType::Link("y".into())),
        ] {
            let link = entry("l", FileTreeEntryType::Link(outside.clone()));
            let sent = [entry("", FileTreeEntryType::Directory), link, last];
            assert!(receive(&sent, &target, "t").is_err());
            assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
        }
        // Receive a link, followed by a file with the same path.
        let link = entry("f", FileTreeEntryType::Link(outside.join("secret")));
        let sent = [
            entry("", FileTreeEntryType::Directory),
            link,
            entry("f", FileTreeEntryType::File),
        ];
        let error = receive(&sent, &target, "t").unwrap_err();
        assert!(matches!(error, FileTreeReceiveError::Target { .. }), "{error}");
        assert_eq!(fs::read(outside.join("secret")).unwrap(), b"mine");
    }

    #[test]
    fn root_entry_cannot_be_a_link() {
        let temp = tempfile::tempdir().unwrap();
        let (target, outside) = (temp.path().join("target"), temp.path().join("outside"));
        fs::create_dir(&outside).unwrap();
        let sent = [entry("", FileTreeEntryType::Link(outside))];
        let error = receive(&sent, &target, "t").unwrap_err();
        assert!(matches!(error, FileTreeReceiveError::Order), "{error}");
        assert!(target.symlink_metadata().is_err(), "there is nothing");
        fs::write(&target, "mine").unwrap();
        receive(&sent, &target, "t").unwrap_err();
        assert!(!target.is_symlink());
        assert_eq!(fs::read(&target).unwrap(), b"mine");
    }

    #[test]
    fn frames_in_wrong_order_are_rejected() {
        let temp = tempfile::tempdir().unwrap();
        let root = || entry("", FileTreeEntryType::Directory);
        for sent in [
            vec![frame(FrameKind::Data)],
            vec![frame(FrameKind::Done)],
            vec![frame(FrameKind::Stdout)],
            vec![entry("a", FileTreeEntryType::File)],
            vec![root(), root()],
            vec![root(), frame(FrameKind::FileEnd)],
            vec![
                root(),
                entry("a", FileTreeEntryType::File),
                frame(FrameKind::Done),
            ],
            vec![
                root(),
                entry("a", FileTreeEntryType::File),
                entry("b", FileTreeEntryType::File),
            ],
        ] {
            assert!(
                matches!(receive(&sent, temp.path(), "t"), Err(FileTreeReceiveError::Order)),
                "{sent:?}"
            );
        }
    }
}
