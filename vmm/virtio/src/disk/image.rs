//! A disk's image, whatever its format.

use std::io;
use std::path::PathBuf;

use libc::off_t;
use thiserror::Error;
use vm_memory::GuestMemoryMmap;

use super::config::{DiskConfig, Format};
use super::open::{Lock, OpenError, Opened, SECTOR_BYTES, block_bytes, open};
use super::qcow2::{Qcow2, Qcow2Error, claims};
use super::raw::{Piece, Raw};

/// Bytes of a block where nobody says otherwise.
const SMALL_BLOCK: u32 = 512;

/// Why an image cannot be a disk.
#[derive(Debug, Error)]
pub enum ImageError {
    /// Its file cannot be had.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// No whole number of sectors.
    #[error(
        "{} has {bytes} bytes: a raw disk has a multiple of {SECTOR_BYTES}, at least one; {}",
        path.display(),
        if *qcow2 { "this one begins as a qcow2 image: format=qcow2" } else { "truncate -s makes it so" }
    )]
    Size {
        /// The image.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// It begins as an image of the other format.
        qcow2: bool,
    },
    /// No whole number of blocks.
    #[error("{}: a disk of {bytes} bytes has no whole number of blocks of {block}; block-size=512 does", path.display())]
    Blocks {
        /// The image.
        path: PathBuf,
        /// The disk's size.
        bytes: u64,
        /// That of a block.
        block: u32,
    },
    /// A block device that does not say what it is.
    #[error("{}: its logical block size cannot be read", .0.display())]
    BlockDevice(PathBuf, #[source] io::Error),
    /// A qcow2 image that is none, or leads where it must not.
    #[error(transparent)]
    Qcow2(#[from] Qcow2Error),
}

/// An open image with a lock on it.
#[derive(Debug)]
pub struct Image {
    store: Store,
    sectors: u64,
    block_bytes: u32,
    read_only: bool,
    /// Behind the store, so that it is dropped after it.
    _lock: Lock,
    /// How often it was flushed.
    #[cfg(test)]
    pub(super) flushes: std::sync::atomic::AtomicU32,
}

/// Where the disk is in the image.
#[derive(Debug)]
enum Store {
    Raw(Raw),
    Qcow2(Box<Qcow2>),
}

impl Image {
    /// Opens and locks the image that `config` names: to be read only, or to be written by nobody else.
    ///
    /// # Errors
    /// [`ImageError`]; the file is as it was.
    pub fn open(config: &DiskConfig) -> Result<Self, ImageError> {
        let path = &config.path;
        let Opened { file, bytes, lock } = open(path, config.read_only)?;
        let below = block_bytes(&file).map_err(|error| ImageError::BlockDevice(path.clone(), error))?;
        let (store, bytes) = match config.format {
            Format::Raw => {
                let qcow2 = claims::begins_as_one(&file);
                if bytes == 0 || !bytes.is_multiple_of(SECTOR_BYTES) || off_t::try_from(bytes).is_err() {
                    let path = path.clone();
                    return Err(ImageError::Size { path, bytes, qcow2 });
                }
                if qcow2 {
                    let path = path.display();
                    log::warn!(
                        "{path} begins as a qcow2 image and is attached as a raw one, as long as format=qcow2 \
                         does not say what it is"
                    );
                }
                (Store::Raw(Raw::new(file)), bytes)
            }
            Format::Qcow2 => {
                let qcow2 = Qcow2::open(path, (file, bytes), config.read_only, &config.backing)?;
                let bytes = qcow2.bytes();
                (Store::Qcow2(Box::new(qcow2)), bytes)
            }
        };
        let block = config.block_bytes.or(below).unwrap_or(SMALL_BLOCK);
        if !bytes.is_multiple_of(block.into()) {
            let path = path.clone();
            return Err(ImageError::Blocks { path, bytes, block });
        }
        Ok(Self {
            store,
            sectors: bytes / SECTOR_BYTES,
            block_bytes: block,
            read_only: config.read_only,
            _lock: lock,
            #[cfg(test)]
            flushes: Default::default(),
        })
    }

    /// Its size, in sectors.
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Bytes of a block: the guest reads and writes whole ones.
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Whether it cannot be written.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// The unit in which space can be given back, in bytes; `None`: it cannot.
    pub fn discard_bytes(&self) -> Option<u64> {
        match &self.store {
            Store::Raw(_) => Some(self.block_bytes.into()),
            Store::Qcow2(image) => image
                .discard_bytes()
                .map(|bytes| bytes.max(self.block_bytes.into())),
        }
        .filter(|_| !self.read_only)
    }

    /// Reads the disk from byte `at` into `pieces` of guest memory. The caller has checked the range against
    /// [`Image::sectors`].
    ///
    /// # Errors
    /// That of the host; `UnexpectedEof` if somebody has truncated the image; `InvalidInput` that is not the
    /// host's for `pieces` that are not RAM.
    pub fn read(&self, memory: &GuestMemoryMmap, pieces: &[Piece], at: u64) -> io::Result<()> {
        match &self.store {
            Store::Raw(image) => image.read(memory, pieces, at),
            Store::Qcow2(image) => image.read(memory, pieces, at),
        }
    }

    /// Writes `pieces` of guest memory to the disk from byte `at` on.
    ///
    /// # Errors
    /// As [`Image::read`].
    pub fn write(&self, memory: &GuestMemoryMmap, pieces: &[Piece], at: u64) -> io::Result<()> {
        match &self.store {
            Store::Raw(image) => image.write(memory, pieces, at),
            Store::Qcow2(image) => image.write(memory, pieces, at),
        }
    }

    /// Waits until all that was written is on the disk.
    ///
    /// # Errors
    /// What the host says.
    pub fn flush(&self) -> io::Result<()> {
        match &self.store {
            Store::Raw(image) => image.flush(),
            Store::Qcow2(image) => image.flush(),
        }?;
        #[cfg(test)]
        self.flushes.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok(())
    }

    /// Has the host know all that was written, without waiting for its disk: what is left when a machine
    /// ends.
    ///
    /// # Errors
    /// What the host says.
    pub fn write_back(&self) -> io::Result<()> {
        match &self.store {
            Store::Raw(_) => Ok(()),
            Store::Qcow2(_) if self.read_only => Ok(()),
            Store::Qcow2(image) => image.write_back(),
        }
    }

    /// Gives the space of `bytes` from byte `at` on back to the host; what was given back reads zeros.
    ///
    /// # Errors
    /// `Unsupported` if the image or the file system cannot; what else the host says.
    pub fn discard(&self, at: u64, bytes: u64) -> io::Result<()> {
        match &self.store {
            Store::Raw(image) => image.discard(at, bytes),
            Store::Qcow2(image) => image.discard(at, bytes),
        }
    }

    /// Makes `bytes` from byte `at` on read zeros. `unmap`: the space may be given back.
    ///
    /// # Errors
    /// What the host says.
    pub fn write_zeros(&self, at: u64, bytes: u64, unmap: bool) -> io::Result<()> {
        match &self.store {
            Store::Raw(image) => image.write_zeros(at, bytes, unmap),
            Store::Qcow2(image) => image.write_zeros(at, bytes, unmap),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::Path;

    use perf_core::error_line;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::serve::testing::{BUFFERS, MEMORY_BYTES, memory};

    fn file(bytes: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(bytes).unwrap();
        file
    }

    fn open(path: impl AsRef<Path>, read_only: bool) -> Result<Image, ImageError> {
        Image::open(&DiskConfig {
            read_only,
            ..DiskConfig::raw(path.as_ref())
        })
    }

    #[test]
    fn what_is_no_disk_is_refused_with_what_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let error = |path: &Path| error_line(&open(path, false).unwrap_err());
        assert!(error(&dir.path().join("none")).contains("makes an empty disk"));
        assert!(error(Path::new("path=none")).contains("--disk FILE"));
        assert!(error(dir.path()).contains("is a directory"));
        assert!(error(Path::new("/dev/null")).contains("is a character device"));
        assert!(error(file(0).path()).contains("has 0 bytes"));
        assert!(error(file(1000).path()).contains("has 1000 bytes"));
        let mut qcow2 = file(0);
        qcow2.write_all(b"QFI\xfb and so on").unwrap();
        let line = error(qcow2.path());
        assert!(
            line.contains("format=qcow2") && !line.contains("truncate"),
            "{line}"
        );
    }

    #[test]
    fn a_disk_has_whole_blocks() {
        let disk = |bytes, block_bytes| {
            let file = file(bytes);
            Image::open(&DiskConfig {
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
        assert!(line.contains("is in use by another --disk of this VM"), "{line}");
        assert!(open(&file, true).is_err());
        drop(writer);
        let readers = [(); 2].map(|()| open(&file, true).unwrap());
        assert!(open(&file, false).is_err());
        drop(readers);
        assert!(open(&file, false).is_ok());
    }

    #[test]
    fn pieces_are_written_and_read_in_order() {
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
    fn zeros_are_made_with_and_without_the_space() {
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
    fn an_image_that_was_truncated_is_an_error() {
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
