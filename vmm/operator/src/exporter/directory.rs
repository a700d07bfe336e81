//! Temporary directories for profiles in progress.
//!
//! A directory is private to the user. Its exporter holds a lock on the directory (`flock(2)`),
//! which the kernel releases if the exporter is killed. The user's next exporter then removes the
//! directory.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use control_api::peer;
use perf_core::error_line;
use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

/// Prefix of the names of profile directories.
const PREFIX: &str = "perfvisor-exporter-";
/// Maximum number of directory entries examined for stale directories. Any user can fill /tmp.
const MAX_ENTRIES: usize = 1 << 16;

/// A temporary directory for a profile, removed on drop.
#[derive(Debug)]
pub struct ProfileDirectory {
    directory: TempDir,
    /// Open file that holds the lock on the directory.
    _locked: File,
}

impl ProfileDirectory {
    /// Creates a directory in `parent`.
    ///
    /// # Errors
    /// Returns the error of creating or locking the directory.
    pub fn create(parent: &Path) -> io::Result<Self> {
        let directory = tempfile::Builder::new()
            .prefix(PREFIX)
            .permissions(fs::Permissions::from_mode(0o700))
            .tempdir_in(parent)?;
        let locked = File::open(directory.path())?;
        flock(&locked, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Self {
            directory,
            _locked: locked,
        })
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Removes stale directories of this user in `parent`.
pub fn remove_left_behind(parent: &Path) {
    let entries = fs::read_dir(parent)
        .into_iter()
        .flatten()
        .take(MAX_ENTRIES)
        .flatten();
    for entry in entries {
        let is_ours = entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.starts_with(PREFIX));
        if is_ours && let Err(e) = remove_if_left_behind(&entry.path()) {
            log::debug!("{}: {}", entry.path().display(), error_line(&e));
        }
    }
}

/// Removes the directory at `path` if this user owns it and no exporter holds its lock.
fn remove_if_left_behind(path: &Path) -> io::Result<()> {
    // Do not follow symbolic links.
    let directory = File::options()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
        .open(path)?;
    if directory.metadata()?.uid() != peer::own_uid() {
        return Ok(());
    }
    flock(&directory, FlockOperation::NonBlockingLockExclusive)?;
    fs::remove_dir_all(path)?;
    log::info!("removed {}, left over from an earlier exporter", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_directories_are_private_and_removed() {
        let temp = tempfile::tempdir().unwrap();
        let directory = ProfileDirectory::create(temp.path()).unwrap();
        let mode = fs::metadata(directory.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        let path = directory.path().to_owned();
        drop(directory);
        assert!(!path.exists());
    }

    /// The directory of a killed exporter is removed. Locked directories and other files are kept.
    #[test]
    fn only_stale_directories_are_removed() {
        let temp = tempfile::tempdir().unwrap();
        let at = |name: &str| temp.path().join(name);
        let used = ProfileDirectory::create(temp.path()).unwrap();
        let left = at("perfvisor-exporter-left");
        fs::create_dir(&left).unwrap();
        fs::write(left.join("perf.data"), "samples").unwrap();
        let precious = at("precious");
        fs::create_dir(&precious).unwrap();
        fs::write(precious.join("file"), "mine").unwrap();
        std::os::unix::fs::symlink(&precious, left.join("link")).unwrap();
        std::os::unix::fs::symlink(&precious, at("perfvisor-exporter-link")).unwrap();
        fs::write(at("perfvisor-exporter-file"), "").unwrap();
        remove_left_behind(temp.path());
        assert!(!left.exists() && used.path().exists());
        assert!(precious.join("file").exists() && at("perfvisor-exporter-link").exists());
        assert!(at("perfvisor-exporter-file").exists());
    }
}
