//! Directories for the files of profiles while they are made.
//!
//! A directory is for this user only. Its exporter holds a lock on it (`flock(2)`), which the kernel releases
//! when the exporter is killed. The next exporter of the user then removes the directory.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use control_api::peer;
use perf_core::error_line;
use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

/// Beginning of the directories' names.
const PREFIX: &str = "perfvisor-exporter-";
/// Maximum number of entries that are looked at for directories left behind: anybody can fill /tmp.
const MAX_ENTRIES: usize = 1 << 16;

/// A directory, removed when this is dropped.
#[derive(Debug)]
pub struct ProfileDirectory {
    directory: TempDir,
    /// Holds the lock.
    _locked: File,
}

impl ProfileDirectory {
    /// Creates a directory in `parent`.
    ///
    /// # Errors
    /// That of making or locking it.
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

    /// Its path.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Removes the directories in `parent` that exporters of this user left behind.
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

/// Removes the directory at `path` if it is this user's and no exporter holds its lock.
fn remove_if_left_behind(path: &Path) -> io::Result<()> {
    // No link is followed.
    let directory = File::options()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
        .open(path)?;
    if directory.metadata()?.uid() != peer::own_uid() {
        return Ok(());
    }
    flock(&directory, FlockOperation::NonBlockingLockExclusive)?;
    fs::remove_dir_all(path)?;
    log::info!("removed {}, which an exporter left behind", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_private_and_go() {
        let temp = tempfile::tempdir().unwrap();
        let directory = ProfileDirectory::create(temp.path()).unwrap();
        let mode = fs::metadata(directory.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        let path = directory.path().to_owned();
        drop(directory);
        assert!(!path.exists());
    }

    /// What an exporter that was killed left behind is removed; what is in use, or is none of these
    /// directories, stays.
    #[test]
    fn only_what_was_left_behind_is_removed() {
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
