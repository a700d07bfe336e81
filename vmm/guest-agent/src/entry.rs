//! Wire format of a file, directory or symbolic link in a copied tree.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Maximum length of a path and of a link target, in bytes (PATH_MAX).
const MAX_PATH: usize = 4096;
/// Permission bits that are copied. Set-user-ID and set-group-ID are excluded, because user IDs
/// differ on the receiving side.
const MODE: u32 = 0o777;

/// Type of an entry in a copied file tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileTreeEntryType {
    /// A directory. Its entries follow.
    Directory,
    /// End of a directory.
    DirectoryEnd,
    /// A file. Its contents follow.
    File,
    /// A symbolic link with this target.
    Link(PathBuf),
}

/// Header of one entry of a copied tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileTreeEntry {
    /// Path below the root of the tree, empty for the root itself.
    pub path: PathBuf,
    /// Type of the entry, with the target of a symbolic link.
    pub what: FileTreeEntryType,
    /// Permission bits of the entry.
    pub mode: u32,
    /// Modification time of the entry, as seconds and nanoseconds since the Unix epoch.
    pub modified: (u64, u32),
}

/// Reason why a received tree entry is invalid.
#[derive(Debug, thiserror::Error)]
pub enum FileTreeEntryError {
    /// The entry is too short, or its type is unknown.
    #[error("protocol error: the peer sent an invalid tree entry")]
    Malformed,
    /// The path is not below the root of the tree.
    #[error("protocol error: the peer sent {:?}, which is outside the copied tree", .0)]
    Outside(PathBuf),
}

impl FileTreeEntry {
    /// Returns the modification time of the entry.
    pub fn modified(&self) -> SystemTime {
        let (seconds, nanoseconds) = self.modified;
        let since = Duration::new(seconds, nanoseconds);
        UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
    }

    /// Encodes the entry as the payload of a frame. Returns `None` if the path or link target is
    /// too long.
    pub fn to_bytes(&self) -> Option<Vec<u8>> {
        let path = self.path.as_os_str().as_bytes();
        let (what, target) = match &self.what {
            FileTreeEntryType::Directory => (0, None),
            FileTreeEntryType::DirectoryEnd => (1, None),
            FileTreeEntryType::File => (2, None),
            FileTreeEntryType::Link(target) => (3, Some(target.as_os_str().as_bytes())),
        };
        let target = target.unwrap_or_default();
        if path.len() > MAX_PATH || target.len() > MAX_PATH {
            return None;
        }
        let mut bytes = vec![what];
        bytes.extend((self.mode & MODE).to_le_bytes());
        bytes.extend(self.modified.0.to_le_bytes());
        bytes.extend(self.modified.1.to_le_bytes());
        bytes.extend(u16::try_from(path.len()).ok()?.to_le_bytes());
        bytes.extend(path);
        bytes.extend(target);
        Some(bytes)
    }

    /// Decodes an untrusted frame payload.
    ///
    /// # Errors
    /// Returns [`FileTreeEntryError::Malformed`] or [`FileTreeEntryError::Outside`] if the entry is
    /// invalid.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, FileTreeEntryError> {
        let bad = || FileTreeEntryError::Malformed;
        let (what, rest) = bytes.split_first().ok_or_else(bad)?;
        let (mode, rest) = rest.split_first_chunk().ok_or_else(bad)?;
        let (seconds, rest) = rest.split_first_chunk().ok_or_else(bad)?;
        let (nanoseconds, rest) = rest.split_first_chunk().ok_or_else(bad)?;
        let (length, rest) = rest.split_first_chunk().ok_or_else(bad)?;
        let length = usize::from(u16::from_le_bytes(*length));
        let (path, target) = rest.split_at_checked(length).ok_or_else(bad)?;
        let nanoseconds = u32::from_le_bytes(*nanoseconds);
        if path.len() > MAX_PATH || target.len() > MAX_PATH || nanoseconds >= 1_000_000_000 {
            return Err(bad());
        }
        let what = match (what, target.is_empty()) {
            (0, true) => FileTreeEntryType::Directory,
            (1, true) => FileTreeEntryType::DirectoryEnd,
            (2, true) => FileTreeEntryType::File,
            (3, false) if !target.contains(&0) => {
                FileTreeEntryType::Link(OsString::from_vec(target.to_vec()).into())
            }
            _ => return Err(bad()),
        };
        let path = PathBuf::from(OsString::from_vec(path.to_vec()));
        if !stays_below(&path) {
            return Err(FileTreeEntryError::Outside(path));
        }
        Ok(Self {
            path,
            what,
            mode: u32::from_le_bytes(*mode) & MODE,
            modified: (u64::from_le_bytes(*seconds), nanoseconds),
        })
    }
}

/// Returns whether a relative path cannot lead out of its directory, because it consists only of
/// normal components.
fn stays_below(path: &Path) -> bool {
    !path.as_os_str().as_bytes().contains(&0)
        && path.components().all(|part| matches!(part, Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(path: &str, what: FileTreeEntryType) -> FileTreeEntry {
        FileTreeEntry {
            path: path.into(),
            what,
            mode: 0o640,
            modified: (1_700_000_000, 5),
        }
    }

    #[test]
    fn entry_round_trips() {
        for entry in [
            entry("", FileTreeEntryType::Directory),
            entry("a/b", FileTreeEntryType::File),
            entry("a", FileTreeEntryType::DirectoryEnd),
            entry("l", FileTreeEntryType::Link("../../anywhere".into())),
        ] {
            assert_eq!(
                FileTreeEntry::from_bytes(&entry.to_bytes().unwrap()).unwrap(),
                entry
            );
        }
        assert!(
            entry(&"x".repeat(5000), FileTreeEntryType::File)
                .to_bytes()
                .is_none()
        );
    }

    #[test]
    fn entry_outside_tree_is_rejected() {
        for path in ["/etc/passwd", "..", "a/../../b", "../x", "a/\0"] {
            let bytes = entry(path, FileTreeEntryType::File).to_bytes().unwrap();
            assert!(
                matches!(
                    FileTreeEntry::from_bytes(&bytes),
                    Err(FileTreeEntryError::Outside(_))
                ),
                "{path}"
            );
        }
    }

    #[test]
    fn set_id_bits_are_not_copied() {
        let mut bytes = entry("a", FileTreeEntryType::File).to_bytes().unwrap();
        bytes[1..5].copy_from_slice(&0o104_755_u32.to_le_bytes());
        assert_eq!(FileTreeEntry::from_bytes(&bytes).unwrap().mode, 0o755);
    }

    proptest! {
        #[test]
        fn arbitrary_entry_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(entry) = FileTreeEntry::from_bytes(&bytes) {
                prop_assert!(stays_below(&entry.path));
                let _ = entry.modified();
            }
        }
    }
}
