//! qcow2 images and their backing files, based on the crate `imago`.
//!
//! | module | contents |
//! |---|---|
//! | [`claims`] | validation of headers and top-level tables |
//! | [`tables`] | consistency check of all referenced clusters |
//! | this module | opening an image with its backing files, reading and writing |
//!
//! Only the synchronous half of `imago` is used, because a disk's thread processes requests
//! sequentially. `imago` never accesses guest memory, which can change at any time. Data is copied
//! through a private buffer instead. If an image causes a panic in `imago`, the disk fails but the
//! VM continues.

pub mod claims;
pub mod tables;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use imago::file::File as Storage;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder};
use thiserror::Error;
use vm_memory::{Address, Bytes, GuestMemoryMmap};

use self::claims::{Qcow2FormatError, Qcow2Header};
use super::config::{BackingFile, DiskFormat};
use super::open::{DiskOpenError, FileLock, LockedFile, open};
use super::raw::GuestMemorySegment;

/// Maximum amount of data in the buffer between `imago` and guest memory, in bytes.
const BUFFER_BYTES: usize = 1 << 20;

/// Error returned when a qcow2 image cannot be used as a disk.
#[derive(Debug, Error)]
pub enum Qcow2Error {
    /// The header or a table of the image is invalid.
    #[error("{}: not a usable qcow2 image", .0.display())]
    Qcow2Header(PathBuf, #[source] Qcow2FormatError),
    /// The image has a backing file, but the operator has named none.
    #[error(
        "{}: the backing file '{}' must be named explicitly; add backing=FILE after format=qcow2 \
        (and backing-format=qcow2 unless it is a raw image)",
        path.display(),
        name.escape_debug()
    )]
    Unnamed {
        /// Path of the qcow2 image.
        path: PathBuf,
        /// Name of the backing file in the header.
        name: String,
    },
    /// The operator named a backing file, but the image has none.
    #[error("{}: no backing file; omit backing={}", path.display(), backing.display())]
    Alone {
        /// Path of the qcow2 image.
        path: PathBuf,
        /// The backing file that the operator named.
        backing: PathBuf,
    },
    /// A backing file of the image cannot be opened.
    #[error("backing=")]
    BackingFile(#[source] DiskOpenError),
    /// `imago` rejected the image as damaged.
    #[error("{}: damaged; see qemu-img check", .0.display())]
    Damaged(PathBuf, #[source] io::Error),
}

/// A panic in `imago`, after which the image is not used again.
#[derive(Debug, Error)]
enum ReaderPanic {
    /// The current request caused the panic in `imago`.
    #[error("the image is damaged: its reader panicked; the disk is no longer changed")]
    Now,
    /// An earlier request caused a panic in `imago`.
    #[error("the image was found to be damaged before")]
    Before,
}

/// An open qcow2 image.
#[derive(Debug)]
pub struct Qcow2 {
    state: Mutex<ReaderState>,
    claims: Qcow2Header,
    /// Locks of the backing files. Declared last, because they must be dropped after the files.
    _locks: Vec<FileLock>,
}

#[derive(Debug)]
struct ReaderState {
    /// The open image, or `None` after a panic in `imago`.
    image: Option<FormatAccess<Storage>>,
    /// Buffer for data transferred between `imago` and guest memory.
    buffer: Vec<u8>,
}

impl Qcow2 {
    /// Opens the image at `path`, which is already open as `file` and has `file_bytes` bytes. The
    /// backing files in `backing` are opened read-only and locked.
    ///
    /// # Errors
    /// Returns a [`Qcow2Error`] if the image is invalid or a backing file cannot be opened.
    pub fn open(
        path: &Path,
        (file, file_bytes): (File, u64),
        read_only: bool,
        backing: &[BackingFile],
    ) -> Result<Self, Qcow2Error> {
        let claims = validate(path, &file, file_bytes, backing, !read_only)?;
        let mut locks = Vec::new();
        let behind = backing.first().map(|_| chain(backing, &mut locks)).transpose()?;
        let image = qcow2(path, file, !read_only, behind)?;
        Ok(Self {
            state: Mutex::new(ReaderState {
                image: Some(image),
                buffer: Vec::new(),
            }),
            claims,
            _locks: locks,
        })
    }

    /// Returns the size of the disk in bytes.
    pub fn bytes(&self) -> u64 {
        self.claims.bytes
    }

    /// Returns the granularity of discard requests in bytes, or `None` if the image does not
    /// support discarding.
    pub fn discard_bytes(&self) -> Option<u64> {
        // Version 2 has no type of table entry that marks a cluster as zeros.
        (self.claims.version >= 3).then_some(self.claims.cluster_bytes)
    }

    /// Reads the disk from byte offset `at` into segments of guest memory.
    ///
    /// # Errors
    /// Returns the error of the host or of the image format, or `InvalidInput` if `pieces` are
    /// outside guest RAM.
    pub fn read(&self, memory: &GuestMemoryMmap, pieces: &[GuestMemorySegment], at: u64) -> io::Result<()> {
        self.with(|image, buffer| {
            let mut guest = SegmentCursor { pieces, done: 0 };
            for (at, count) in split_range(at, length(pieces)) {
                let data = room(buffer, count);
                convert_error(image.read(&mut *data, at))?;
                guest.each(data, |data, at| memory.write_slice(data, at))?;
            }
            Ok(())
        })
    }

    /// Reads the disk from byte offset `at` into `data`, a buffer outside guest memory.
    ///
    /// # Errors
    /// Returns the same errors as [`Qcow2::read`].
    pub fn peek(&self, data: &mut [u8], at: u64) -> io::Result<()> {
        self.with(|image, _| convert_error(image.read(&mut *data, at)))
    }

    /// Writes segments of guest memory to the disk at byte offset `at`.
    ///
    /// # Errors
    /// Returns the same errors as [`Qcow2::read`].
    pub fn write(&self, memory: &GuestMemoryMmap, pieces: &[GuestMemorySegment], at: u64) -> io::Result<()> {
        self.with(|image, buffer| {
            let mut guest = SegmentCursor { pieces, done: 0 };
            for (at, count) in split_range(at, length(pieces)) {
                let data = room(buffer, count);
                guest.each(data, |data, at| memory.read_slice(data, at))?;
                convert_error(image.write(&*data, at))?;
            }
            Ok(())
        })
    }

    /// Writes cached metadata to the file and flushes it to stable storage.
    ///
    /// # Errors
    /// Returns the error of the host.
    pub fn flush(&self) -> io::Result<()> {
        self.with(|image, _| {
            convert_error(image.flush())?;
            convert_error(image.sync())
        })
    }

    /// Writes cached metadata to the file.
    ///
    /// # Errors
    /// Returns the error of the host.
    pub fn write_back(&self) -> io::Result<()> {
        self.with(|image, _| convert_error(image.flush()))
    }

    /// Deallocates the clusters that are completely within `bytes` bytes of the disk at byte offset
    /// `at`. The clusters read as zeros afterwards.
    ///
    /// # Errors
    /// Returns `Unsupported` if [`Qcow2::discard_bytes`] is `None`, otherwise the error of the
    /// host.
    pub fn discard(&self, at: u64, bytes: u64) -> io::Result<()> {
        self.with(|image, _| convert_error(image.discard_to_any(at, bytes)))
    }

    /// Writes zeros to `bytes` bytes of the disk at byte offset `at`. If `unmap` is `true`, the
    /// space may be deallocated.
    ///
    /// # Errors
    /// Returns the error of the host.
    pub fn write_zeros(&self, at: u64, bytes: u64, unmap: bool) -> io::Result<()> {
        // imago 0.2.6 zeros whole clusters correctly but underflows on partial ones, so write zeros
        // to these.
        let whole = self.whole_clusters(at, bytes);
        self.with(|image, buffer| {
            let count = whole.end - whole.start;
            let made = match count {
                0 => Ok(()),
                _ if unmap => image.discard_to_zero(whole.start, count),
                _ => image.write_zeroes(whole.start, count),
            };
            let by_hand = match made {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => [at..at + bytes, 0..0],
                made => {
                    convert_error(made)?;
                    [at..whole.start, whole.end..at + bytes]
                }
            };
            for part in by_hand {
                for (at, count) in split_range(part.start, part.end - part.start) {
                    let data = room(buffer, count);
                    data.fill(0);
                    convert_error(image.write(&*data, at))?;
                }
            }
            Ok(())
        })
    }

    /// Returns the range of whole clusters within `bytes` bytes of the disk at byte offset `at`.
    /// The last cluster of the disk may be shorter than the others. The range is empty if it
    /// contains no whole cluster.
    fn whole_clusters(&self, at: u64, bytes: u64) -> Range<u64> {
        let (cluster, end) = (self.claims.cluster_bytes, at + bytes);
        let first = at.next_multiple_of(cluster).min(end);
        let last = if end == self.claims.bytes {
            end
        } else {
            end - end % cluster
        };
        first..last.max(first)
    }

    /// Calls `work` with the image and the buffer. If `work` panics, this call and all later calls
    /// fail.
    fn with<T>(
        &self,
        work: impl FnOnce(&mut FormatAccess<Storage>, &mut Vec<u8>) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let ReaderState { image, buffer } = &mut *state;
        let Some(access) = image.as_mut() else {
            return Err(io::Error::other(ReaderPanic::Before));
        };
        catch_unwind(AssertUnwindSafe(|| work(access, buffer))).unwrap_or_else(|_| {
            // Do not drop the image, because this would write its metadata, which may be
            // inconsistent.
            std::mem::forget(image.take());
            Err(io::Error::other(ReaderPanic::Now))
        })
    }
}

impl Drop for Qcow2 {
    fn drop(&mut self) {
        // Drop the image, which writes its cached metadata.
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let image = state.image.take();
        if catch_unwind(AssertUnwindSafe(|| drop(image))).is_err() {
            log::error!("an image is damaged: the last writes may not be in it");
        }
    }
}

/// Validates the image at `path` and checks that its header matches the configured `backing` files.
/// If `written` is `true`, also repairs missing reference counts.
fn validate(
    path: &Path,
    file: &File,
    bytes: u64,
    backing: &[BackingFile],
    written: bool,
) -> Result<Qcow2Header, Qcow2Error> {
    let refused = |error| Qcow2Error::Qcow2Header(path.into(), error);
    let (claims, layout) = Qcow2Header::read(file, bytes).map_err(refused)?;
    match (&claims.backing, backing.first()) {
        (Some(name), None) => Err(Qcow2Error::Unnamed {
            path: path.into(),
            name: name.clone(),
        }),
        (None, Some(backing)) => Err(Qcow2Error::Alone {
            path: path.into(),
            backing: backing.path.clone(),
        }),
        _ => {
            let missing = tables::check(file, bytes, &layout, written).map_err(refused)?;
            if missing > 0 {
                log::warn!(
                    "{}: repaired the reference counts of {missing} clusters, which a killed VM \
                    left at zero",
                    path.display()
                );
            }
            Ok(claims)
        }
    }
}

/// Opens and locks the `backing` files as a chain, and appends their locks to `locks`.
fn chain(backing: &[BackingFile], locks: &mut Vec<FileLock>) -> Result<FormatAccess<Storage>, Qcow2Error> {
    let mut behind = None;
    for (n, image) in backing.iter().enumerate().rev() {
        let LockedFile { file, bytes, lock } = open(&image.path, true).map_err(Qcow2Error::BackingFile)?;
        locks.push(lock);
        behind = Some(match image.format {
            DiskFormat::Raw => raw(&image.path, file)?,
            DiskFormat::Qcow2 => {
                validate(&image.path, &file, bytes, &backing[n + 1..], false)?;
                qcow2(&image.path, file, false, behind)?
            }
        });
    }
    // `backing` is not empty, as the caller ensures, so `behind` is set.
    behind.ok_or_else(|| Qcow2Error::Damaged(PathBuf::new(), io::ErrorKind::NotFound.into()))
}

fn raw(path: &Path, file: File) -> Result<FormatAccess<Storage>, Qcow2Error> {
    guarded(path, || {
        let builder = imago::raw::Raw::builder(Storage::try_from(file)?).write(false);
        builder.open(DenyImplicitOpenGate::default())
    })
    .map(FormatAccess::new)
}

fn qcow2(
    path: &Path,
    file: File,
    write: bool,
    behind: Option<FormatAccess<Storage>>,
) -> Result<FormatAccess<Storage>, Qcow2Error> {
    guarded(path, || {
        let builder = imago::qcow2::Qcow2::builder(Storage::try_from(file)?)
            .write(write)
            .data_file(None)
            .backing(behind);
        // All permitted files are opened above. The image must not open any other file.
        builder.open(DenyImplicitOpenGate::default())
    })
    .map(FormatAccess::new)
}

fn guarded<T>(path: &Path, work: impl FnOnce() -> io::Result<T>) -> Result<T, Qcow2Error> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(io::Error::other(ReaderPanic::Now)))
        .map_err(|error| Qcow2Error::Damaged(path.into(), error))
}

/// Converts an error of `imago`. Replaces `InvalidInput`, with which `imago` reports an invalid
/// image, because callers interpret it as an invalid request of the guest.
fn convert_error<T>(done: io::Result<T>) -> io::Result<T> {
    done.map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput if error.raw_os_error().is_none() => io::Error::other(error),
        _ => error,
    })
}

fn length(pieces: &[GuestMemorySegment]) -> u64 {
    pieces.iter().map(|(_, bytes)| *bytes as u64).sum()
}

/// Returns the first `count` bytes of `buffer`, which is enlarged if needed.
fn room(buffer: &mut Vec<u8>, count: usize) -> &mut [u8] {
    if buffer.len() < count {
        buffer.resize(count, 0);
    }
    &mut buffer[..count]
}

/// Splits a range of `bytes` bytes at offset `at` into parts that fit into the buffer. The parts
/// end at multiples of the buffer size, so that no cluster of up to this size is modified in two
/// parts.
fn split_range(mut at: u64, bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    let end = at.saturating_add(bytes);
    std::iter::from_fn(move || {
        let whole = BUFFER_BYTES as u64;
        let count = (whole - at % whole).min(end - at);
        let step = (at, usize::try_from(count).unwrap_or(BUFFER_BYTES));
        at += count;
        (count > 0).then_some(step)
    })
}

/// Cursor over a list of guest memory segments.
struct SegmentCursor<'p> {
    pieces: &'p [GuestMemorySegment],
    /// Number of bytes that have been consumed from the first segment.
    done: usize,
}

impl SegmentCursor<'_> {
    /// Advances over `data.len()` bytes of guest memory. Calls `copy` for each contiguous part,
    /// with the part of `data` and its guest address.
    fn each<'d, E>(
        &mut self,
        mut data: &'d mut [u8],
        copy: impl Fn(&mut [u8], vm_memory::GuestAddress) -> Result<(), E>,
    ) -> io::Result<()> {
        let no_ram = || io::Error::new(io::ErrorKind::InvalidInput, "not RAM");
        while !data.is_empty() {
            let &(at, bytes) = self.pieces.first().ok_or_else(no_ram)?;
            let (now, later): (&'d mut [u8], _) = data.split_at_mut(data.len().min(bytes - self.done));
            let at = at.checked_add(self.done as u64).ok_or_else(no_ram)?;
            copy(now, at).map_err(|_| no_ram())?;
            self.done += now.len();
            if self.done == bytes {
                self.pieces = &self.pieces[1..];
                self.done = 0;
            }
            data = later;
        }
        Ok(())
    }
}
