//! A disk's image: opened, locked against others, and read and written with guest memory in place.
#![expect(unsafe_code, reason = "preadv, pwritev, fallocate and fcntl")]

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use libc::{c_int, iovec, off_t};
use smallvec::SmallVec;
use thiserror::Error;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// The unit of a disk's size and of its addresses, in bytes (virtio 1.2, 5.2.4).
pub const SECTOR_BYTES: u64 = 512;
/// Most pieces of guest memory in one call (`UIO_MAXIOV`).
const MAX_PIECES: usize = 1024;
/// Zeros that are written where the file system cannot make them.
static ZEROS: [u8; 65_536] = [0; 65_536];

/// A piece of guest memory: address and bytes.
pub type Piece = (GuestAddress, usize);

/// Why an image cannot be a disk.
#[derive(Debug, Error)]
pub enum ImageError {
    /// It cannot be opened.
    #[error("{} cannot be opened{}", path.display(), open_remedy(source, *read_only))]
    Open {
        /// The image.
        path: PathBuf,
        /// Whether it was to be read only.
        read_only: bool,
        /// What the host said.
        #[source]
        source: io::Error,
    },
    /// Neither a file nor a block device.
    #[error("{} is {what}: a disk is a regular file or a block device", path.display())]
    Kind {
        /// The image.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// No whole number of sectors.
    #[error(
        "{} has {bytes} bytes: a disk has a multiple of {SECTOR_BYTES}, at least one; truncate -s makes it so",
        path.display()
    )]
    Size {
        /// The image.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// Somebody else uses it.
    #[error(
        "{} is in use by {}: end it first, or give both the disk with ,ro",
        path.display(),
        by
    )]
    Locked {
        /// The image.
        path: PathBuf,
        /// Who uses it.
        by: String,
    },
    /// A call that should not fail.
    #[error("{}: {what} failed", path.display())]
    Call {
        /// The image.
        path: PathBuf,
        /// Which.
        what: &'static str,
        /// What the host said.
        #[source]
        source: io::Error,
    },
}

fn open_remedy(source: &io::Error, read_only: bool) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => "; truncate -s 8G FILE makes an empty disk",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem if !read_only => {
            " to be written; ,ro behind its name attaches it to be read only"
        }
        _ => "",
    }
}

/// The processes that have the file at `path` open, as far as this user may see.
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
        // The descriptor that could not be locked is ours, and open still.
        let others = open.count() > usize::from(pid == std::process::id());
        if others && pid == std::process::id() {
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

/// An open image with a lock on it.
#[derive(Debug)]
pub struct Image {
    file: File,
    sectors: u64,
    read_only: bool,
    /// How often it was flushed.
    #[cfg(test)]
    pub(super) flushes: std::sync::atomic::AtomicU32,
}

impl Image {
    /// Opens and locks the image at `path`: to be read only, or to be written by nobody else.
    ///
    /// # Errors
    /// [`ImageError`]; the file is as it was.
    pub fn open(path: &Path, read_only: bool) -> Result<Self, ImageError> {
        let open = |source| ImageError::Open {
            path: path.into(),
            read_only,
            source,
        };
        let call = |what| {
            move |source| ImageError::Call {
                path: path.into(),
                what,
                source,
            }
        };
        // Looked at before it is opened: opening a pipe or a tape may wait, or do something.
        let kind = path.metadata().map_err(open)?.file_type();
        let what = match () {
            () if kind.is_file() || kind.is_block_device() => None,
            () if kind.is_dir() => Some("a directory"),
            () if kind.is_char_device() => Some("a character device"),
            () => Some("a pipe or socket"),
        };
        if let Some(what) = what {
            let path = path.into();
            return Err(ImageError::Kind { path, what });
        }
        let mut file = OpenOptions::new()
            .read(true)
            .write(!read_only)
            .open(path)
            .map_err(open)?;
        if !lock(&file, read_only).map_err(call("locking"))? {
            let by = users(path);
            return Err(ImageError::Locked {
                path: path.into(),
                by,
            });
        }
        let bytes = file.seek(SeekFrom::End(0)).map_err(call("seeking"))?;
        if bytes == 0 || !bytes.is_multiple_of(SECTOR_BYTES) || off_t::try_from(bytes).is_err() {
            let path = path.into();
            return Err(ImageError::Size { path, bytes });
        }
        Ok(Self {
            file,
            sectors: bytes / SECTOR_BYTES,
            read_only,
            #[cfg(test)]
            flushes: Default::default(),
        })
    }

    /// Its size, in sectors.
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Whether it cannot be written.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Reads the disk from byte `at` into `pieces` of guest memory. The caller has checked the range against
    /// [`Image::sectors`].
    ///
    /// # Errors
    /// That of the host; `UnexpectedEof` if somebody has truncated the image; `InvalidInput` that is not the
    /// host's for `pieces` that are not RAM.
    pub fn read(&self, memory: &GuestMemoryMmap, pieces: &[Piece], at: u64) -> io::Result<()> {
        // SAFETY: `transfer` gives pieces of guest memory, which stay mapped during the call.
        self.transfer(memory, pieces, at, |fd, vecs, count, at| unsafe {
            libc::preadv(fd, vecs, count, at)
        })
    }

    /// Writes `pieces` of guest memory to the disk from byte `at` on.
    ///
    /// # Errors
    /// As [`Image::read`].
    pub fn write(&self, memory: &GuestMemoryMmap, pieces: &[Piece], at: u64) -> io::Result<()> {
        // SAFETY: as above.
        self.transfer(memory, pieces, at, |fd, vecs, count, at| unsafe {
            libc::pwritev(fd, vecs, count, at)
        })
    }

    fn transfer(
        &self,
        memory: &GuestMemoryMmap,
        pieces: &[Piece],
        mut at: u64,
        call: impl Fn(c_int, *const iovec, c_int, off_t) -> libc::ssize_t,
    ) -> io::Result<()> {
        let mut vecs: SmallVec<[iovec; 32]> = SmallVec::new();
        for &(address, bytes) in pieces {
            for slice in GuestMemoryBackend::get_slices(memory, address, bytes) {
                let slice = slice.map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
                vecs.push(iovec {
                    iov_base: slice.ptr_guard_mut().as_ptr().cast(),
                    iov_len: slice.len(),
                });
            }
        }
        let mut rest = vecs.as_mut_slice();
        while let Some(first) = rest.first_mut() {
            if first.iov_len == 0 {
                rest = &mut rest[1..];
                continue;
            }
            let count = c_int::try_from(rest.len().min(MAX_PIECES)).map_err(io::Error::other)?;
            let offset = off_t::try_from(at).map_err(io::Error::other)?;
            let done = call(self.file.as_raw_fd(), rest.as_ptr(), count, offset);
            let Ok(mut done) = usize::try_from(done) else {
                let error = io::Error::last_os_error();
                if error.kind() == io::ErrorKind::Interrupted {
                    continue;
                }
                return Err(error);
            };
            if done == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            at += done as u64;
            while let Some(first) = rest.first_mut()
                && done > 0
            {
                let step = done.min(first.iov_len);
                first.iov_base = first.iov_base.wrapping_byte_add(step);
                first.iov_len -= step;
                done -= step;
                if first.iov_len == 0 {
                    rest = &mut rest[1..];
                }
            }
        }
        Ok(())
    }

    /// Waits until all that was written is on the disk.
    ///
    /// # Errors
    /// That of `fdatasync(2)`.
    pub fn flush(&self) -> io::Result<()> {
        self.file.sync_data()?;
        #[cfg(test)]
        self.flushes.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok(())
    }

    /// Gives the space of `bytes` from byte `at` on back to the host; it reads zeros afterwards.
    ///
    /// # Errors
    /// `Unsupported` if the file system cannot; what else the host says.
    pub fn discard(&self, at: u64, bytes: u64) -> io::Result<()> {
        self.allocate(libc::FALLOC_FL_PUNCH_HOLE, at, bytes)
    }

    /// Makes `bytes` from byte `at` on read zeros. `unmap`: the space may be given back.
    ///
    /// # Errors
    /// What the host says.
    pub fn write_zeros(&self, at: u64, bytes: u64, unmap: bool) -> io::Result<()> {
        let mode = if unmap {
            libc::FALLOC_FL_PUNCH_HOLE
        } else {
            libc::FALLOC_FL_ZERO_RANGE
        };
        match self.allocate(mode, at, bytes) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                use std::os::unix::fs::FileExt;
                let (mut at, mut left) = (at, bytes);
                while left > 0 {
                    let count = usize::try_from(left).map_or(ZEROS.len(), |left| left.min(ZEROS.len()));
                    self.file.write_all_at(&ZEROS[..count], at)?;
                    at += count as u64;
                    left -= count as u64;
                }
                Ok(())
            }
            other => other,
        }
    }

    fn allocate(&self, mode: c_int, at: u64, bytes: u64) -> io::Result<()> {
        let at = off_t::try_from(at).map_err(io::Error::other)?;
        let bytes = off_t::try_from(bytes).map_err(io::Error::other)?;
        loop {
            let fd = self.file.as_raw_fd();
            // SAFETY: no memory is passed; the descriptor is ours.
            if unsafe { libc::fallocate(fd, mode | libc::FALLOC_FL_KEEP_SIZE, at, bytes) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EOPNOTSUPP | libc::ENOSYS) => return Err(io::ErrorKind::Unsupported.into()),
                _ => return Err(error),
            }
        }
    }
}

/// Locks the file against other open file descriptions, also in this process; whether that was possible.
/// It is unlocked when it is closed, however the process ends.
fn lock(file: &File, read_only: bool) -> io::Result<bool> {
    let kind = if read_only { libc::F_RDLCK } else { libc::F_WRLCK };
    // SAFETY: a plain C struct for which all zeros is a value: the whole file.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = i16::try_from(kind).map_err(io::Error::other)?;
    // SAFETY: `lock` lives during the call, which only reads it.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use perf_core::error_line;
    use vm_memory::Bytes;

    use super::*;
    use crate::serve::testing::{BUFFERS, MEMORY_BYTES, memory};

    fn file(bytes: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(bytes).unwrap();
        file
    }

    #[test]
    fn what_is_no_disk_is_refused_with_what_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let error = |path: &Path| error_line(&Image::open(path, false).unwrap_err());
        assert!(error(&dir.path().join("none")).contains("makes an empty disk"));
        assert!(error(dir.path()).contains("is a directory"));
        assert!(error(Path::new("/dev/null")).contains("is a character device"));
        assert!(error(file(0).path()).contains("has 0 bytes"));
        assert!(error(file(1000).path()).contains("has 1000 bytes"));
    }

    #[test]
    fn one_writer_or_many_readers() {
        let file = file(4096).into_temp_path();
        let writer = Image::open(&file, false).unwrap();
        let line = error_line(&Image::open(&file, false).unwrap_err());
        assert!(line.contains("is in use by another --disk of this VM"), "{line}");
        assert!(Image::open(&file, true).is_err());
        drop(writer);
        let readers = [(); 2].map(|()| Image::open(&file, true).unwrap());
        assert!(Image::open(&file, false).is_err());
        drop(readers);
        assert!(Image::open(&file, false).is_ok());
    }

    #[test]
    fn pieces_are_written_and_read_in_order() {
        let file = file(4096);
        let image = Image::open(file.path(), false).unwrap();
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
        let image = Image::open(file.path(), false).unwrap();
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
        let image = Image::open(file.path(), false).unwrap();
        file.as_file().set_len(512).unwrap();
        let memory = memory();
        let error = image
            .read(&memory, &[(GuestAddress(BUFFERS), 1024)], 0)
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
