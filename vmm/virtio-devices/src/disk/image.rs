//! A disk image of any format.

use std::io;
use std::path::PathBuf;

use libc::off_t;
use thiserror::Error;
use vm_memory::GuestMemoryMmap;

use super::config::{DiskConfig, DiskFormat};
use super::open::{DiskOpenError, FileLock, LockedFile, SECTOR_BYTES, block_bytes, open_with_lock};
use super::qcow2::{Qcow2, Qcow2Error, claims};
use super::raw::{GuestMemorySegment, RawDiskImage};

/// Default logical block size, in bytes.
const SMALL_BLOCK: u32 = 512;

/// Error returned when an image cannot be used as a disk.
#[derive(Debug, Error)]
pub enum DiskImageError {
    /// The image file cannot be opened.
    #[error(transparent)]
    Open(#[from] DiskOpenError),
    /// The file size of a raw image is not a positive multiple of the sector size.
    #[error(
        "{}: the size of {bytes} bytes must be a positive multiple of {SECTOR_BYTES} for a raw disk; {}",
        path.display(),
        if *qcow2 { "use format=qcow2, because the file starts like a qcow2 image" } else { "change \
             the size with truncate -s" }
    )]
    Size {
        /// Path of the raw image.
        path: PathBuf,
        /// Size of the image file, in bytes.
        bytes: u64,
        /// `true` if the file starts with a qcow2 header, so that the format is probably wrong.
        qcow2: bool,
    },
    /// The disk size is not a multiple of the block size.
    #[error("{}: the size of {bytes} bytes is not a multiple of the block size {block}; use \
         block-size=512", path.display())]
    Blocks {
        /// Path of the disk image.
        path: PathBuf,
        /// Size of the disk in bytes.
        bytes: u64,
        /// Logical block size, in bytes.
        block: u32,
    },
    /// The properties of the block device cannot be read.
    #[error("{}: cannot read the logical block size", .0.display())]
    BlockDevice(PathBuf, #[source] io::Error),
    /// The qcow2 image is invalid, or has an unexpected backing file.
    #[error(transparent)]
    Qcow2(#[from] Qcow2Error),
}

/// An open and locked disk image.
#[derive(Debug)]
pub struct DiskImage {
    store: ImageStore,
    sectors: u64,
    block_bytes: u32,
    read_only: bool,
    /// Lock of the image. Declared after `store`, because the lock must be dropped last.
    lock: FileLock,
    /// Number of flushes to stable storage, for tests.
    #[cfg(test)]
    pub(super) flushes: std::sync::atomic::AtomicU32,
}

/// The open image file, accessed according to its format.
#[derive(Debug)]
enum ImageStore {
    Raw(RawDiskImage),
    Qcow2(Box<Qcow2>),
}

impl DiskImage {
    /// Opens and locks the image named in `config`. A read-only image is locked shared, a writable
    /// one exclusively unless [`DiskConfig::shared_lock`] is set.
    ///
    /// # Errors
    /// Returns a [`DiskImageError`], in which case the file is unchanged.
    pub fn open(config: &DiskConfig) -> Result<Self, DiskImageError> {
        let path = &config.path;
        let shared = config.read_only || config.shared_lock;
        let LockedFile { file, bytes, lock } = open_with_lock(path, config.read_only, shared)?;
        let below = block_bytes(&file).map_err(|error| DiskImageError::BlockDevice(path.clone(), error))?;
        let (store, bytes) = match config.format {
            DiskFormat::Raw => {
                let qcow2 = claims::has_qcow2_magic(&file);
                if bytes == 0 || !bytes.is_multiple_of(SECTOR_BYTES) || off_t::try_from(bytes).is_err() {
                    let path = path.clone();
                    return Err(DiskImageError::Size { path, bytes, qcow2 });
                }
                if qcow2 {
                    let path = path.display();
                    log::warn!(
                        "{path} starts like a qcow2 image but is attached as raw; use format=qcow2 \
                        if it is one"
                    );
                }
                (ImageStore::Raw(RawDiskImage::new(file)), bytes)
            }
            DiskFormat::Qcow2 => {
                let qcow2 = Qcow2::open(path, (file, bytes), config.read_only, &config.backing)?;
                let bytes = qcow2.bytes();
                (ImageStore::Qcow2(Box::new(qcow2)), bytes)
            }
        };
        let block = config.block_bytes.or(below).unwrap_or(SMALL_BLOCK);
        if !bytes.is_multiple_of(block.into()) {
            let path = path.clone();
            return Err(DiskImageError::Blocks { path, bytes, block });
        }
        Ok(Self {
            store,
            sectors: bytes / SECTOR_BYTES,
            block_bytes: block,
            read_only: config.read_only,
            lock,
            #[cfg(test)]
            flushes: Default::default(),
        })
    }

    /// Returns the lock of the image, or `None` if the image is read-only.
    pub fn writer_lock(&self) -> Option<&FileLock> {
        (!self.read_only).then_some(&self.lock)
    }

    /// Returns the size of the disk in sectors of [`SECTOR_BYTES`].
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Returns the logical block size in bytes. Requests of the guest must consist of whole blocks.
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Returns whether the disk image is read-only.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the granularity of discard requests in bytes, or `None` if the image does not
    /// support discarding.
    pub fn discard_bytes(&self) -> Option<u64> {
        match &self.store {
            ImageStore::Raw(_) => Some(self.block_bytes.into()),
            ImageStore::Qcow2(image) => image
                .discard_bytes()
                .map(|bytes| bytes.max(self.block_bytes.into())),
        }
        .filter(|_| !self.read_only)
    }

    /// Reads the disk from byte offset `at` into segments of guest memory. Returns whether the data
    /// was in the host's page cache, or `true` if this is unknown. The caller must have checked the
    /// range against [`DiskImage::sectors`].
    ///
    /// # Errors
    /// Returns the error of the host, `UnexpectedEof` if the image has been truncated, or
    /// `InvalidInput` without an OS error code if `pieces` are outside guest RAM.
    pub fn read(&self, memory: &GuestMemoryMmap, pieces: &[GuestMemorySegment], at: u64) -> io::Result<bool> {
        match &self.store {
            ImageStore::Raw(image) => image.read(memory, pieces, at),
            ImageStore::Qcow2(image) => image.read(memory, pieces, at).map(|()| true),
        }
    }

    /// Asks the host to load `bytes` bytes of a raw image at byte offset `at` to its page cache,
    /// without waiting. Has no effect on other images.
    pub fn prefetch(&self, at: u64, bytes: u64) {
        if let ImageStore::Raw(image) = &self.store {
            image.prefetch(at, bytes);
        }
    }

    /// Writes segments of guest memory to the disk at byte offset `at`.
    ///
    /// # Errors
    /// Returns the same errors as [`DiskImage::read`].
    pub fn write(&self, memory: &GuestMemoryMmap, pieces: &[GuestMemorySegment], at: u64) -> io::Result<()> {
        match &self.store {
            ImageStore::Raw(image) => image.write(memory, pieces, at),
            ImageStore::Qcow2(image) => image.write(memory, pieces, at),
        }
    }

    /// Flushes all completed writes to stable storage.
    ///
    /// # Errors
    /// Returns the error of the host.
    pub fn flush(&self) -> io::Result<()> {
        match &self.store {
            ImageStore::Raw(image) => image.flush(),
            ImageStore::Qcow2(image) => image.flush(),
        }?;
        #[cfg(test)]
        self.flushes.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok(())
    }

    /// Passes cached writes to the host's kernel without waiting for stable storage, as required at
    /// machine shutdown.
    ///
    /// # Errors
    /// Returns the error of the host.
    pub fn write_back(&self) -> io::Result<()> {
        match &self.store {
            ImageStore::Raw(_) => Ok(()),
            ImageStore::Qcow2(_) if self.read_only => Ok(()),
            ImageStore::Qcow2(image) => image.write_back(),
        }
    }

    /// Deallocates `bytes` bytes of the disk at byte offset `at`, which read as zeros afterwards.
    /// In a qcow2 image, this applies only to whole clusters.
    ///
    /// # Errors
    /// Returns `Unsupported` if the image or the file system cannot deallocate space, otherwise the
    /// error of the host.
    pub fn discard(&self, at: u64, bytes: u64) -> io::Result<()> {
        match &self.store {
            ImageStore::Raw(image) => image.discard(at, bytes),
            ImageStore::Qcow2(image) => image.discard(at, bytes),
        }
    }

    /// Writes zeros to `bytes` bytes of the disk at byte offset `at`. If `unmap` is `true`, the
    /// space may be deallocated.
    ///
    /// # Errors
    /// Returns the error of the host.
    pub fn write_zeros(&self, at: u64, bytes: u64, unmap: bool) -> io::Result<()> {
        match &self.store {
            ImageStore::Raw(image) => image.write_zeros(at, bytes, unmap),
            ImageStore::Qcow2(image) => image.write_zeros(at, bytes, unmap),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::Path;

    use diagnostics::error_line;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::serve::testing::{BUFFERS, MEMORY_BYTES, memory};

    fn file(bytes: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(bytes).unwrap();
        file
    }

    fn open(path: impl AsRef<Path>, read_only: bool) -> Result<DiskImage, DiskImageError> {
        DiskImage::open(&DiskConfig {
            read_only,
            ..DiskConfig::raw(path.as_ref())
        })
    }

    #[test]
    fn non_disk_files_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let error = |path: &Path| error_line(&open(path, false).unwrap_err());
        assert!(error(&dir.path().join("none")).contains("makes an empty disk"));
        assert!(error(Path::new("path=none")).contains("--disk FILE"));
        assert!(error(dir.path()).contains("is a directory; must be"));
        assert!(error(Path::new("/dev/null")).contains("is a character device; must be"));
        assert!(error(file(0).path()).contains("the size of 0 bytes"));
        assert!(error(file(1000).path()).contains("the size of 1000 bytes"));
        let mut qcow2 = file(0);
        qcow2.write_all(b"QFI\xfb and so on").unwrap();
        let line = error(qcow2.path());
        assert!(
            line.contains("format=qcow2") && !line.contains("truncate"),
            "{line}"
        );
    }

    #[test]
    fn disk_size_must_be_whole_blocks() {
        let disk = |bytes, block_bytes| {
            let file = file(bytes);
            DiskImage::open(&DiskConfig {
                block_bytes,
                ..DiskConfig::raw(file.path())
            })
        };
        assert_eq!(disk(512 * 9, None).unwrap().block_bytes(), 512);
        assert_eq!(disk(8192, Some(4096)).unwrap().block_bytes(), 4096);
        let line = error_line(&disk(512 * 9, Some(4096)).unwrap_err());
        assert!(line.contains("block-size=512"), "{line}");
    }

    #[test]
    fn one_writer_or_many_readers() {
        let file = file(4096).into_temp_path();
        let writer = open(&file, false).unwrap();
        let line = error_line(&open(&file, false).unwrap_err());
        assert!(line.contains(": in use by another --disk of this VM"), "{line}");
        assert!(open(&file, true).is_err());
        drop(writer);
        let readers = [(); 2].map(|()| open(&file, true).unwrap());
        assert!(open(&file, false).is_err());
        drop(readers);
        assert!(open(&file, false).is_ok());
    }

    #[test]
    fn segments_are_written_and_read_in_order() {
        let file = file(4096);
        let image = open(file.path(), false).unwrap();
        let memory = memory();
        memory.write_slice(b"abcdefgh", GuestAddress(BUFFERS)).unwrap();
        let piece = |at, bytes| (GuestAddress(BUFFERS + at), bytes);
        image
            .write(&memory, &[piece(4, 4), piece(0, 0), piece(0, 4)], 512)
            .unwrap();
        image.flush().unwrap();
        image.read(&memory, &[piece(100, 2), piece(200, 6)], 512).unwrap();
        let mut read = [0; 6];
        memory.read_slice(&mut read, GuestAddress(BUFFERS + 200)).unwrap();
        assert_eq!(&read, b"ghabcd");
        let far = (GuestAddress(MEMORY_BYTES as u64 - 4), 8);
        assert!(
            image.write(&memory, &[far], 0).is_err(),
            "it is not RAM to its end"
        );
        image.discard(512, 512).unwrap();
        image.read(&memory, &[piece(200, 6)], 512).unwrap();
        memory.read_slice(&mut read, GuestAddress(BUFFERS + 200)).unwrap();
        assert_eq!(read, [0; 6]);
    }

    #[test]
    fn zeros_are_written_with_and_without_unmap() {
        let mut file = file(0);
        file.write_all(&[7; 200_704]).unwrap();
        let image = open(file.path(), false).unwrap();
        image.write_zeros(512, 100_000 * 2 - 64, false).unwrap();
        let bytes = std::fs::read(file.path()).unwrap();
        assert_eq!(
            (bytes.len(), bytes[511], bytes[512], bytes[200_447]),
            (200_704, 7, 0, 0)
        );
        assert_eq!(bytes[200_448], 7);
    }

    #[test]
    fn truncated_image_is_an_error() {
        let file = file(4096);
        let image = open(file.path(), false).unwrap();
        file.as_file().set_len(512).unwrap();
        let memory = memory();
        let error = image
            .read(&memory, &[(GuestAddress(BUFFERS), 1024)], 0)
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
