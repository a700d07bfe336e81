//! Opening and locking of disk image files and block devices.
#![expect(unsafe_code, reason = "fcntl and ioctl")]

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use sandbox::paths;
use thiserror::Error;

/// Size of a disk sector, the unit of disk sizes and addresses, in bytes (virtio 1.2, 5.2.4).
pub const SECTOR_BYTES: u64 = 512;

/// Error returned when a disk file cannot be opened.
#[derive(Debug, Error)]
pub enum DiskOpenError {
    /// The file cannot be opened.
    #[error("cannot open {}{}", path.display(), open_remedy(path, source, *read_only))]
    Open {
        /// Path of the image.
        path: PathBuf,
        /// `true` if the file was to be opened read-only.
        read_only: bool,
        /// Error returned by the host's kernel.
        #[source]
        source: io::Error,
    },
    /// The path is neither a regular file nor a block device.
    #[error("{}: is {what}; must be a regular file or a block device", path.display())]
    Kind {
        /// Path of the image.
        path: PathBuf,
        /// Type of the file, such as a directory.
        what: &'static str,
    },
    /// Another process holds a conflicting lock on the file.
    #[error(
        "{}: in use by {}; end it first, or use ,ro for both",
        path.display(),
        by
    )]
    Locked {
        /// Path of the image.
        path: PathBuf,
        /// Description of the processes that use the file.
        by: String,
    },
    /// A system call failed unexpectedly.
    #[error("{}: {what} failed", path.display())]
    Call {
        /// Path of the image.
        path: PathBuf,
        /// Name of the system call.
        what: &'static str,
        /// Error returned by the host's kernel.
        #[source]
        source: io::Error,
    },
}

fn open_remedy(path: &Path, source: &io::Error, read_only: bool) -> &'static str {
    // Users of other VMMs may write these prefixes before the file name.
    let named = ["path=", "file="]
        .iter()
        .any(|word| path.as_os_str().as_encoded_bytes().starts_with(word.as_bytes()));
    match source.kind() {
        io::ErrorKind::NotFound if named => {
            "; the file comes first, with no word before it: --disk FILE[,ro]"
        }
        io::ErrorKind::NotFound => "; truncate -s 8G FILE makes an empty disk",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem if !read_only => {
            " to be written; ,ro behind its name attaches it to be read only"
        }
        _ => "",
    }
}

/// Describes the processes that have the file at `path` open, as far as this user may list them.
fn users(path: &Path) -> String {
    let Ok(wanted) = path.metadata() else {
        return "another program".into();
    };
    let mut users = Vec::new();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Ok(pid) = process.file_name().to_string_lossy().parse::<u32>() else {
            continue;
        };
        let files = std::fs::read_dir(process.path().join("fd"))
            .into_iter()
            .flatten()
            .flatten();
        let open = files
            .filter_map(|file| std::fs::metadata(file.path()).ok())
            .filter(|file| (file.dev(), file.ino()) == (wanted.dev(), wanted.ino()));
        // Do not count the descriptor that could not be locked, which this process still holds.
        let is_own = pid == sandbox::host_pid();
        let others = open.count() > usize::from(is_own);
        if others && is_own {
            users.push("another --disk of this VM".to_owned());
        } else if others {
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            users.push(format!("process {pid} ({})", name.trim()));
        }
    }
    if users.is_empty() {
        "another program".into()
    } else {
        users.join(", ")
    }
}

/// A disk image file that is open and locked.
#[derive(Debug)]
pub struct LockedFile {
    /// The open file.
    pub file: File,
    /// Size of the file, in bytes.
    pub bytes: u64,
    /// The lock of the file. It must be dropped after the last use of the file.
    pub lock: FileLock,
}

/// Opens and locks the file at `path`. The lock is shared if `read_only` is `true`, and otherwise
/// exclusive.
///
/// # Errors
/// Returns a [`DiskOpenError`], in which case the file is unchanged.
pub fn open(path: &Path, read_only: bool) -> Result<LockedFile, DiskOpenError> {
    open_with_lock(path, read_only, read_only)
}

/// Opens the file at `path`, and locks it shared or exclusively.
///
/// # Errors
/// Returns a [`DiskOpenError`], in which case the file is unchanged.
pub fn open_with_lock(path: &Path, read_only: bool, shared: bool) -> Result<LockedFile, DiskOpenError> {
    let file = unlocked(path, read_only)?;
    let locking = |source| DiskOpenError::Call {
        path: path.into(),
        what: "locking",
        source,
    };
    let Some(lock) = FileLock::take(&file, shared).map_err(locking)? else {
        let by = users(path);
        return Err(DiskOpenError::Locked {
            path: path.into(),
            by,
        });
    };
    let (file, bytes) = sized(path, file)?;
    Ok(LockedFile { file, bytes, lock })
}

/// Opens the file at `path` for reading, without a lock. Returns the file and its size in bytes.
///
/// # Errors
/// Returns a [`DiskOpenError`] if the file cannot be opened or has an unsupported type.
pub fn open_unlocked(path: &Path) -> Result<(File, u64), DiskOpenError> {
    sized(path, unlocked(path, true)?)
}

fn sized(path: &Path, mut file: File) -> Result<(File, u64), DiskOpenError> {
    let seeking = |source| DiskOpenError::Call {
        path: path.into(),
        what: "seeking",
        source,
    };
    let bytes = file.seek(SeekFrom::End(0)).map_err(seeking)?;
    Ok((file, bytes))
}

fn unlocked(path: &Path, read_only: bool) -> Result<File, DiskOpenError> {
    let open = |source| DiskOpenError::Open {
        path: path.into(),
        read_only,
        source,
    };
    // Check the type first, because opening a pipe or a tape may block or have side effects.
    let kind = paths::open(path, libc::O_PATH)
        .and_then(|file| file.metadata())
        .map_err(open)?
        .file_type();
    let what = match () {
        () if kind.is_file() || kind.is_block_device() => None,
        () if kind.is_dir() => Some("a directory"),
        () if kind.is_char_device() => Some("a character device"),
        () => Some("a pipe or socket"),
    };
    if let Some(what) = what {
        let path = path.into();
        return Err(DiskOpenError::Kind { path, what });
    }
    let flags = if read_only { libc::O_RDONLY } else { libc::O_RDWR };
    paths::open(path, flags).map_err(open)
}

/// Returns the logical block size of a host block device in bytes, or `None` for a regular file.
///
/// # Errors
/// Returns the error of the ioctl.
pub fn block_bytes(file: &File) -> io::Result<Option<u32>> {
    /// The ioctl BLKSSZGET, `_IO(0x12, 104)` of linux/fs.h.
    const BLKSSZGET: libc::c_ulong = 0x1268;
    if !file.metadata()?.file_type().is_block_device() {
        return Ok(None);
    }
    let mut bytes: libc::c_int = 0;
    // SAFETY: the call writes one int, and `bytes` is an int that outlives the call.
    if unsafe { libc::ioctl(file.as_raw_fd(), BLKSSZGET, &raw mut bytes) } != 0 {
        return Err(io::Error::last_os_error());
    }
    u32::try_from(bytes).map(Some).map_err(io::Error::other)
}

/// Lock of a file.
///
/// The lock belongs to an open file description (`F_OFD_SETLK`). It therefore also conflicts with
/// other opens of the file in this process. The lock is released when this value is dropped or the
/// process exits.
///
/// Closing the file would not release the lock reliably, because a child process that another
/// thread is starting has a copy of the descriptor until it calls exec. An explicit unlock is
/// effective despite such a copy.
#[derive(Debug)]
pub struct FileLock {
    /// A duplicate of the locked file's descriptor, which shares the open file description.
    file: File,
}

impl FileLock {
    /// Locks a file, shared or exclusively. Returns `None` if there is a conflicting lock.
    fn take(file: &File, shared: bool) -> io::Result<Option<Self>> {
        let lock = Self {
            file: file.try_clone()?,
        };
        let kind = if shared { libc::F_RDLCK } else { libc::F_WRLCK };
        Ok(lock.try_set(kind)?.then_some(lock))
    }

    /// Changes the lock to shared, so that the process that will resume the VM can also lock the
    /// file.
    ///
    /// # Errors
    /// Returns the error of fcntl(2).
    pub fn share(&self) -> io::Result<()> {
        set(&self.file, libc::F_RDLCK)
    }

    /// Changes the lock to exclusive. Returns `false` if another process holds a lock; the lock
    /// then stays shared.
    ///
    /// # Errors
    /// Returns the error of fcntl(2).
    pub fn claim(&self) -> io::Result<bool> {
        self.try_set(libc::F_WRLCK)
    }

    /// Releases the lock although the file stays open. The file must not be used again before
    /// [`FileLock::claim`].
    ///
    /// # Errors
    /// Returns the error of fcntl(2).
    pub fn release(&self) -> io::Result<()> {
        set(&self.file, libc::F_UNLCK)
    }

    /// Sets the lock type. Returns `false` if there is a conflicting lock.
    fn try_set(&self, kind: libc::c_int) -> io::Result<bool> {
        match set(&self.file, kind) {
            Ok(()) => Ok(true),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Unlocking fails only if there is no lock, in which case closing the file is sufficient.
        let _ = set(&self.file, libc::F_UNLCK);
    }
}

/// Sets the lock type of a whole file with `F_OFD_SETLK`.
fn set(file: &File, kind: libc::c_int) -> io::Result<()> {
    // SAFETY: flock is a plain C struct for which all zeroes is a valid value, which describes the
    // whole file.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = i16::try_from(kind).map_err(io::Error::other)?;
    // SAFETY: `lock` outlives the call, which only reads it.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Dropping a file lock releases it even if a copy of the descriptor exists, as in a child
    /// process between fork and exec.
    #[test]
    fn descriptor_copy_does_not_keep_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let first = open(file.path(), false).unwrap();
        let copy = first.file.try_clone().unwrap();
        assert!(matches!(
            open(file.path(), false),
            Err(DiskOpenError::Locked { .. })
        ));
        drop(first);
        open(file.path(), false).unwrap();
        drop(copy);
    }

    /// The image of a VM that is being migrated is locked at all times, so a third process cannot
    /// write to it.
    #[test]
    fn image_of_a_moving_vm_is_always_locked() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let third_is_refused = || matches!(open(file.path(), false), Err(DiskOpenError::Locked { .. }));
        let source = open(file.path(), false).unwrap();
        assert!(
            open_with_lock(file.path(), false, true).is_err(),
            "it is not shared yet"
        );
        source.lock.share().unwrap();
        let target = open_with_lock(file.path(), false, true).unwrap();
        assert!(third_is_refused());
        assert!(!target.lock.claim().unwrap(), "the source has it, too");
        assert!(!source.lock.claim().unwrap());
        source.lock.release().unwrap();
        assert!(third_is_refused());
        assert!(target.lock.claim().unwrap());
        assert!(third_is_refused());
        // The source process exits later.
        drop(source);
        assert!(third_is_refused());
    }
}
