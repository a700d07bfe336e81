//! What a user writes behind `--disk`.

use std::path::PathBuf;
use std::str::FromStr;

use virtio_bindings::virtio_blk::VIRTIO_BLK_ID_BYTES;

/// Longest serial number, in bytes (virtio 1.2, 5.2.6).
pub const MAX_SERIAL: usize = VIRTIO_BLK_ID_BYTES as usize;

/// A disk to be attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// The image, or a block device of the host.
    pub path: PathBuf,
    /// The guest cannot write it.
    pub read_only: bool,
    /// What the guest reads as its serial number.
    pub serial: Option<String>,
}

/// What is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskConfigError {
    /// Nothing before the first comma.
    #[error("a disk needs a file first: FILE[,ro][,serial=TEXT]")]
    NoFile,
    /// A word that is none of ours.
    #[error(
        "'{0}' is not known: FILE may be followed by ,ro and ,serial=TEXT (a file's name cannot have a comma)"
    )]
    Unknown(String),
    /// A serial number that a guest cannot be told.
    #[error("serial={0}: a serial number has 1 to {MAX_SERIAL} letters, digits, '-', '_' and '.'")]
    Serial(String),
    /// The same word again.
    #[error("'{0}' is there twice")]
    Twice(&'static str),
}

impl FromStr for DiskConfig {
    type Err = DiskConfigError;

    fn from_str(text: &str) -> Result<Self, DiskConfigError> {
        let mut words = text.split(',');
        let path = words.next().filter(|path| !path.is_empty());
        let mut config = Self {
            path: path.ok_or(DiskConfigError::NoFile)?.into(),
            read_only: false,
            serial: None,
        };
        for word in words {
            match word.split_once('=') {
                None if word == "ro" => {
                    if std::mem::replace(&mut config.read_only, true) {
                        return Err(DiskConfigError::Twice("ro"));
                    }
                }
                Some(("serial", serial)) => {
                    let fits = (1..=MAX_SERIAL).contains(&serial.len())
                        && serial
                            .bytes()
                            .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
                    if !fits {
                        return Err(DiskConfigError::Serial(serial.to_owned()));
                    }
                    if config.serial.replace(serial.to_owned()).is_some() {
                        return Err(DiskConfigError::Twice("serial"));
                    }
                }
                _ => return Err(DiskConfigError::Unknown(word.to_owned())),
            }
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_a_file_and_what_is_to_be_known_of_it() {
        let disk: DiskConfig = "/a/b.img,serial=root-1,ro".parse().unwrap();
        assert_eq!(disk.path, PathBuf::from("/a/b.img"));
        assert_eq!((disk.read_only, disk.serial.as_deref()), (true, Some("root-1")));
        let plain: DiskConfig = "x=y.img".parse().unwrap();
        assert!(!plain.read_only && plain.serial.is_none());
    }

    #[test]
    fn mistakes_are_named() {
        let error = |text: &str| text.parse::<DiskConfig>().unwrap_err().to_string();
        assert!(error(",ro").contains("needs a file"));
        assert!(error("a,rw").contains("'rw' is not known"));
        assert!(error("a,serial=").contains("1 to 20"));
        assert!(error("a,serial=123456789012345678901").contains("1 to 20"));
        assert!(error("a,serial=a b").contains("1 to 20"));
        assert!(error("a,ro,ro").contains("twice"));
        assert!(error("a,serial=1,serial=2").contains("twice"));
    }
}
