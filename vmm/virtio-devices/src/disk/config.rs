//! Configuration of a disk (`--disk`).

use std::path::PathBuf;
use std::str::FromStr;

use virtio_bindings::virtio_blk::VIRTIO_BLK_ID_BYTES;

use crate::rate_limiter::limits::{RateLimitParseError, RateLimits};

/// Maximum length of a disk's serial number, in bytes (virtio 1.2, 5.2.6).
pub const MAX_SERIAL: usize = VIRTIO_BLK_ID_BYTES as usize;
/// Maximum number of backing files of a qcow2 image.
pub const MAX_BACKING: usize = 8;
/// Syntax of the options that may follow the file name in `--disk`.
const WORDS: &str = "[,ro][,serial=TEXT][,format=raw|qcow2][,backing=FILE[,backing-format=raw|qcow2]]\
    [,block-size=512|4096][,bandwidth=BYTES/MILLISECONDS[+BURST]][,ops=N/MILLISECONDS[+BURST]]";

/// Format of a disk image.
///
/// The format is always configured and never detected from the contents, because a guest could
/// write the header of another format, which may refer to host files, to its raw disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskFormat {
    /// A raw image, which contains the data of the disk without metadata.
    #[default]
    Raw,
    /// QEMU's qcow2 format, versions 2 and 3.
    Qcow2,
}

impl FromStr for DiskFormat {
    type Err = DiskConfigError;

    fn from_str(text: &str) -> Result<Self, DiskConfigError> {
        match text {
            "raw" => Ok(Self::Raw),
            "qcow2" => Ok(Self::Qcow2),
            other => Err(DiskConfigError::DiskFormat(other.to_owned())),
        }
    }
}

/// A backing file of a qcow2 image. It provides the data that the image itself does not contain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingFile {
    /// Path of the backing file.
    pub path: PathBuf,
    /// Format of the backing file.
    pub format: DiskFormat,
}

/// Configuration of a virtio block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// Path of the image file or host block device.
    pub path: PathBuf,
    /// Format of the disk image.
    pub format: DiskFormat,
    /// Backing files of the image, in the order of the chain. The first one is the backing file of
    /// the image itself. File names in image headers are never opened.
    pub backing: Vec<BackingFile>,
    /// `true` if the guest cannot write the disk.
    pub read_only: bool,
    /// Serial number reported to the guest.
    pub serial: Option<String>,
    /// Logical block size in bytes, or `None` for the block size of the underlying device.
    pub block_bytes: Option<u32>,
    /// Rate limits for requests and data.
    pub limits: RateLimits,
    /// `true` if a writable image is locked shared until [`VirtioDevice::claim`] is called, because
    /// another process still uses the image for the same VM.
    ///
    /// [`VirtioDevice::claim`]: crate::device::VirtioDevice::claim
    pub shared_lock: bool,
}

/// Error returned when a disk configuration is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskConfigError {
    /// The file name of the disk is missing.
    #[error("the file is missing; must be FILE{WORDS}")]
    NoFile,
    /// The configuration contains an unknown option.
    #[error(
        "unknown option '{0}'; FILE may be followed by {WORDS} (file names with commas are \
         unsupported)"
    )]
    Unknown(String),
    /// The serial number is empty, too long, or contains unsupported characters.
    #[error("serial={0}: must have between 1 and {MAX_SERIAL} letters, digits, '-', '_' and '.'")]
    Serial(String),
    /// The image format is unsupported.
    #[error("unknown format '{0}'; must be raw or qcow2; convert other formats with qemu-img convert")]
    DiskFormat(String),
    /// The option `backing=` has no value.
    #[error("backing= without a file")]
    NoBacking,
    /// The option for the backing format is given without a backing file.
    #[error("backing-format= must follow the backing=FILE to which it applies")]
    BackingFormat,
    /// A backing file is given for a raw image.
    #[error("backing={}: a raw image has no backing file; use format=qcow2 for a qcow2 image", .0.display())]
    RawBacking(PathBuf),
    /// The number of backing files exceeds [`MAX_BACKING`].
    #[error("more than {MAX_BACKING} backing files; merge some with qemu-img rebase or convert")]
    Deep,
    /// The block size is invalid.
    #[error("block-size={0}: must be 512 or 4096")]
    BlockSize(String),
    /// The named option is repeated.
    #[error("'{0}' is given twice")]
    Twice(&'static str),
    /// A rate limit is invalid.
    #[error(transparent)]
    Limits(#[from] RateLimitParseError),
}

impl DiskConfig {
    /// Creates the configuration of a writable raw disk at `path` with default options.
    pub fn raw(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            format: DiskFormat::Raw,
            backing: Vec::new(),
            read_only: false,
            serial: None,
            block_bytes: None,
            limits: RateLimits::default(),
            shared_lock: false,
        }
    }

    /// Checks that backing files are configured for qcow2 images only.
    fn check_backing(&self) -> Result<(), DiskConfigError> {
        let mut format = self.format;
        for backing in &self.backing {
            if format == DiskFormat::Raw {
                return Err(DiskConfigError::RawBacking(backing.path.clone()));
            }
            format = backing.format;
        }
        Ok(())
    }
}

impl FromStr for DiskConfig {
    type Err = DiskConfigError;

    fn from_str(text: &str) -> Result<Self, DiskConfigError> {
        let mut words = text.split(',');
        let path = words.next().filter(|path| !path.is_empty());
        let mut config = Self::raw(path.ok_or(DiskConfigError::NoFile)?);
        let (mut format, mut backing_format) = (None, None);
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
                Some(("format", text)) => {
                    if format.replace(text.parse()?).is_some() {
                        return Err(DiskConfigError::Twice("format"));
                    }
                }
                Some(("block-size", text)) => {
                    let bytes = match text {
                        "512" => 512,
                        "4096" | "4K" | "4k" => 4096,
                        _ => return Err(DiskConfigError::BlockSize(text.to_owned())),
                    };
                    if config.block_bytes.replace(bytes).is_some() {
                        return Err(DiskConfigError::Twice("block-size"));
                    }
                }
                Some(("backing", path)) => {
                    if path.is_empty() {
                        return Err(DiskConfigError::NoBacking);
                    }
                    if config.backing.len() == MAX_BACKING {
                        return Err(DiskConfigError::Deep);
                    }
                    backing_format = None;
                    config.backing.push(BackingFile {
                        path: path.into(),
                        format: DiskFormat::Raw,
                    });
                }
                Some(("backing-format", text)) => {
                    let last = config.backing.last_mut().ok_or(DiskConfigError::BackingFormat)?;
                    last.format = text.parse()?;
                    if backing_format.replace(last.format).is_some() {
                        return Err(DiskConfigError::Twice("backing-format"));
                    }
                }
                Some(("bandwidth", value)) => config.limits.set_bandwidth("bandwidth", value)?,
                Some(("ops", value)) => config.limits.set_ops("ops", value)?,
                _ => return Err(DiskConfigError::Unknown(word.to_owned())),
            }
        }
        config.format = format.unwrap_or_default();
        config.check_backing()?;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_options_are_parsed() {
        let disk: DiskConfig = "/a/b.img,serial=root-1,ro".parse().unwrap();
        assert_eq!(disk.path, PathBuf::from("/a/b.img"));
        assert_eq!((disk.read_only, disk.serial.as_deref()), (true, Some("root-1")));
        let plain: DiskConfig = "x=y.img".parse().unwrap();
        assert!(!plain.read_only && plain.serial.is_none());
    }

    #[test]
    fn mistakes_are_named() {
        let error = |text: &str| text.parse::<DiskConfig>().unwrap_err().to_string();
        assert!(error(",ro").contains("the file is missing"));
        assert!(error("a,rw").contains("unknown option 'rw'"));
        assert!(error("a,serial=").contains("between 1 and 20"));
        assert!(error("a,serial=123456789012345678901").contains("between 1 and 20"));
        assert!(error("a,serial=a b").contains("between 1 and 20"));
        assert!(error("a,ro,ro").contains("twice"));
        assert!(error("a,serial=1,serial=2").contains("twice"));
        assert!(error("a,format=vmdk").contains("unknown format 'vmdk'"));
        assert!(error("a,format=raw,format=qcow2").contains("'format' is given twice"));
    }

    #[test]
    fn rate_limits_are_parsed() {
        let disk: DiskConfig = "a,ops=100/1000,ro,bandwidth=10M/1000+1M".parse().unwrap();
        let bandwidth = disk.limits.bandwidth.unwrap();
        assert_eq!(
            (bandwidth.size.get(), bandwidth.one_time_burst),
            (10 << 20, 1 << 20)
        );
        assert_eq!(disk.limits.ops.unwrap().refill_ms.get(), 1000);
        let error = |text: &str| text.parse::<DiskConfig>().unwrap_err().to_string();
        assert!(error("a,bandwidth=10M").starts_with("bandwidth=10M: must be SIZE/MILLISECONDS"));
        assert!(error("a,ops=1/1,ops=1/1").contains("'ops' is given twice"));
    }

    #[test]
    fn block_size_must_be_512_or_4096() {
        let blocks = |text: &str| text.parse::<DiskConfig>().unwrap().block_bytes;
        assert_eq!(blocks("a"), None);
        assert_eq!(
            (blocks("a,block-size=4096"), blocks("a,block-size=4K")),
            (Some(4096), Some(4096))
        );
        assert_eq!(blocks("a,block-size=512"), Some(512));
        let error = |text: &str| text.parse::<DiskConfig>().unwrap_err();
        for bad in ["", "1024", "4097", "-1"] {
            let text = format!("a,block-size={bad}");
            assert_eq!(error(&text), DiskConfigError::BlockSize(bad.into()));
        }
        assert_eq!(
            error("a,block-size=512,block-size=512"),
            DiskConfigError::Twice("block-size")
        );
    }

    /// The qcow2 format is selected only by an explicit option.
    #[test]
    fn image_format_defaults_to_raw() {
        let format = |text: &str| text.parse::<DiskConfig>().unwrap().format;
        assert_eq!(format("a.qcow2"), DiskFormat::Raw);
        assert_eq!(format("a.img,format=raw"), DiskFormat::Raw);
        assert_eq!(format("a.img,ro,format=qcow2"), DiskFormat::Qcow2);
    }

    #[test]
    fn backing_files_are_parsed_with_formats() {
        let text = "a,backing=b,backing-format=qcow2,format=qcow2,backing=c,ro";
        let disk: DiskConfig = text.parse().unwrap();
        let backing = |path: &str, format| BackingFile {
            path: path.into(),
            format,
        };
        assert_eq!(
            disk.backing,
            [backing("b", DiskFormat::Qcow2), backing("c", DiskFormat::Raw)]
        );
        assert!(disk.read_only);

        let error = |text: &str| text.parse::<DiskConfig>().unwrap_err();
        assert_eq!(
            error("a,backing=b"),
            DiskConfigError::RawBacking("b".into()),
            "the image itself is raw"
        );
        assert_eq!(
            error("a,format=qcow2,backing=b,backing=c"),
            DiskConfigError::RawBacking("c".into()),
            "the first behind it is raw"
        );
        assert_eq!(
            error("a,format=qcow2,backing-format=raw"),
            DiskConfigError::BackingFormat
        );
        assert_eq!(error("a,format=qcow2,backing="), DiskConfigError::NoBacking);
        assert_eq!(
            error("a,format=qcow2,backing=b,backing-format=raw,backing-format=qcow2"),
            DiskConfigError::Twice("backing-format")
        );
        let deep = ",backing=b,backing-format=qcow2".repeat(MAX_BACKING + 1);
        assert_eq!(error(&format!("a,format=qcow2{deep}")), DiskConfigError::Deep);
    }
}
