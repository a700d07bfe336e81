//! A qcow2 image and those behind it, by the crate `imago`.
//!
//! | module | story |
//! |---|---|
//! | [`claims`] | what an image says of itself, before it is believed |
//! | [`tables`] | the clusters that its tables lead to |
//! | this one | opening it and what the operator named behind it, reading and writing |
//!
//! `imago` is used without its asynchronous half: a disk's thread serves one request after the other and
//! would do nothing else while it waits. Its code never sees guest memory, which changes while it is looked
//! at: data goes through a buffer of ours. What an image makes it stumble over (a panic) ends the disk, not
//! the VM.

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

use self::claims::{ClaimError, Claims};
use super::config::{Backing, Format};
use super::open::{Lock, OpenError, Opened, open};
use super::raw::Piece;

/// The most data that is in the buffer at once.
const BUFFER_BYTES: usize = 1 << 20;

/// Why an image cannot be a disk.
#[derive(Debug, Error)]
pub enum Qcow2Error {
    /// What it says of itself.
    #[error("{} cannot be used as a qcow2 image", .0.display())]
    Claims(PathBuf, #[source] ClaimError),
    /// It names a file that the operator has not named.
    #[error(
        "{} is based on '{}', and no file is opened because an image says so; type backing=FILE behind \
         format=qcow2 (and backing-format=qcow2 if it is no raw image)",
        path.display(),
        name.escape_debug()
    )]
    Unnamed {
        /// The image.
        path: PathBuf,
        /// What it names.
        name: String,
    },
    /// The operator names a file that it does not ask for.
    #[error("{} has no backing file; leave backing={} out", path.display(), backing.display())]
    Alone {
        /// The image.
        path: PathBuf,
        /// What was named.
        backing: PathBuf,
    },
    /// A file behind it.
    #[error("backing=")]
    Backing(#[source] OpenError),
    /// What is in it makes no sense.
    #[error("{} is damaged; qemu-img check says how", .0.display())]
    Damaged(PathBuf, #[source] io::Error),
}

/// What `imago` did that it should not have done.
#[derive(Debug, Error)]
enum Stumble {
    /// Just now.
    #[error("the image is damaged: its reader panicked, and the disk stays as it is")]
    Now,
    /// Before.
    #[error("the image was found to be damaged before")]
    Before,
}

/// An open image.
#[derive(Debug)]
pub struct Qcow2 {
    state: Mutex<State>,
    claims: Claims,
    /// Those of the files behind it; dropped after them.
    _locks: Vec<Lock>,
}

#[derive(Debug)]
struct State {
    /// `None`: it stumbled.
    image: Option<FormatAccess<Storage>>,
    /// Data on its way.
    buffer: Vec<u8>,
}

impl Qcow2 {
    /// The image at `path`, in `file` of `file_bytes` bytes, and those in `backing` behind it, which are
    /// opened and locked to be read only.
    ///
    /// # Errors
    /// [`Qcow2Error`].
    pub fn open(
        path: &Path,
        (file, file_bytes): (File, u64),
        read_only: bool,
        backing: &[Backing],
    ) -> Result<Self, Qcow2Error> {
        let claims = believed(path, &file, file_bytes, backing, !read_only)?;
        let mut locks = Vec::new();
        let behind = backing.first().map(|_| chain(backing, &mut locks)).transpose()?;
        let image = qcow2(path, file, !read_only, behind)?;
        Ok(Self {
            state: Mutex::new(State {
                image: Some(image),
                buffer: Vec::new(),
            }),
            claims,
            _locks: locks,
        })
    }

    /// Bytes of the disk.
    pub fn bytes(&self) -> u64 {
        self.claims.bytes
    }

    /// The unit in which space can be given back, in bytes; `None`: it cannot.
    pub fn discard_bytes(&self) -> Option<u64> {
        // Version 2 has no entry that reads as zeros.
        (self.claims.version >= 3).then_some(self.claims.cluster_bytes)
    }

    /// Reads the disk from byte `at` into `pieces` of guest memory.
    ///
    /// # Errors
    /// That of the host or of what is in the image; `InvalidInput` for `pieces` that are not RAM.
    pub fn read(&self, memory: &GuestMemoryMmap, pieces: &[Piece], at: u64) -> io::Result<()> {
        self.with(|image, buffer| {
            let mut guest = Cursor { pieces, done: 0 };
            for (at, count) in steps(at, length(pieces)) {
                let data = room(buffer, count);
                foreign(image.read(&mut *data, at))?;
                guest.each(data, |data, at| memory.write_slice(data, at))?;
            }
            Ok(())
        })
    }

    /// Reads the disk from byte `at` into `data`, which is no guest memory.
    ///
    /// # Errors
    /// As [`Qcow2::read`].
    pub fn look(&self, data: &mut [u8], at: u64) -> io::Result<()> {
        self.with(|image, _| foreign(image.read(&mut *data, at)))
    }

    /// Writes `pieces` of guest memory to the disk from byte `at` on.
    ///
    /// # Errors
    /// As [`Qcow2::read`].
    pub fn write(&self, memory: &GuestMemoryMmap, pieces: &[Piece], at: u64) -> io::Result<()> {
        self.with(|image, buffer| {
            let mut guest = Cursor { pieces, done: 0 };
            for (at, count) in steps(at, length(pieces)) {
                let data = room(buffer, count);
                guest.each(data, |data, at| memory.read_slice(data, at))?;
                foreign(image.write(&*data, at))?;
            }
            Ok(())
        })
    }

    /// Writes what is known of the image and not in its file yet, and waits until all is on the disk.
    ///
    /// # Errors
    /// That of the host.
    pub fn flush(&self) -> io::Result<()> {
        self.with(|image, _| {
            foreign(image.flush())?;
            foreign(image.sync())
        })
    }

    /// Writes what is known of the image and not in its file yet.
    ///
    /// # Errors
    /// That of the host.
    pub fn write_back(&self) -> io::Result<()> {
        self.with(|image, _| foreign(image.flush()))
    }

    /// Gives the space of whole clusters in these `bytes` from byte `at` on back to the image; they read
    /// zeros afterwards.
    ///
    /// # Errors
    /// `Unsupported` where [`Qcow2::discard_bytes`] is `None`; what else the host says.
    pub fn discard(&self, at: u64, bytes: u64) -> io::Result<()> {
        self.with(|image, _| foreign(image.discard_to_any(at, bytes)))
    }

    /// Makes `bytes` from byte `at` on read zeros. `unmap`: the space may be given back.
    ///
    /// # Errors
    /// What the host says.
    pub fn write_zeros(&self, at: u64, bytes: u64, unmap: bool) -> io::Result<()> {
        // imago 0.2.6 zeros whole clusters well, and computes past zero with parts of one.
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
                    foreign(made)?;
                    [at..whole.start, whole.end..at + bytes]
                }
            };
            for part in by_hand {
                for (at, count) in steps(part.start, part.end - part.start) {
                    let data = room(buffer, count);
                    data.fill(0);
                    foreign(image.write(&*data, at))?;
                }
            }
            Ok(())
        })
    }

    /// The whole clusters in the `bytes` from `at` on; the last of the disk may be shorter. Where there are
    /// none, an empty range in between.
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

    /// Does `work` with the image. If that panics, the image is left as it is from then on.
    fn with<T>(
        &self,
        work: impl FnOnce(&mut FormatAccess<Storage>, &mut Vec<u8>) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { image, buffer } = &mut *state;
        let Some(access) = image.as_mut() else {
            return Err(io::Error::other(Stumble::Before));
        };
        catch_unwind(AssertUnwindSafe(|| work(access, buffer))).unwrap_or_else(|_| {
            // To drop it would write to the file what it has in mind, which may be half done.
            std::mem::forget(image.take());
            Err(io::Error::other(Stumble::Now))
        })
    }
}

impl Drop for Qcow2 {
    fn drop(&mut self) {
        // It writes what is not in the file yet.
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let image = state.image.take();
        if catch_unwind(AssertUnwindSafe(|| drop(image))).is_err() {
            log::error!("an image is damaged: its last changes may not be in it");
        }
    }
}

/// What the image at `path` says, if it may be used with this `backing`, and perhaps `written`.
fn believed(
    path: &Path,
    file: &File,
    bytes: u64,
    backing: &[Backing],
    written: bool,
) -> Result<Claims, Qcow2Error> {
    let refused = |error| Qcow2Error::Claims(path.into(), error);
    let (claims, layout) = Claims::read(file, bytes).map_err(refused)?;
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
                    "{}: {missing} clusters were in use and not counted, as a VM that is killed leaves them; \
                     they are counted now",
                    path.display()
                );
            }
            Ok(claims)
        }
    }
}

/// The images of `backing`, each in front of the next, and their `locks`.
fn chain(backing: &[Backing], locks: &mut Vec<Lock>) -> Result<FormatAccess<Storage>, Qcow2Error> {
    let mut behind = None;
    for (n, image) in backing.iter().enumerate().rev() {
        let Opened { file, bytes, lock } = open(&image.path, true).map_err(Qcow2Error::Backing)?;
        locks.push(lock);
        behind = Some(match image.format {
            Format::Raw => raw(&image.path, file)?,
            Format::Qcow2 => {
                believed(&image.path, &file, bytes, &backing[n + 1..], false)?;
                qcow2(&image.path, file, false, behind)?
            }
        });
    }
    // Whoever calls has looked that there is one.
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
        // All that it may use is named above: whatever else the image says, nothing is opened.
        builder.open(DenyImplicitOpenGate::default())
    })
    .map(FormatAccess::new)
}

fn guarded<T>(path: &Path, work: impl FnOnce() -> io::Result<T>) -> Result<T, Qcow2Error> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(io::Error::other(Stumble::Now)))
        .map_err(|error| Qcow2Error::Damaged(path.into(), error))
}

/// An error of `imago`. What it calls invalid input is the image's fault, never the guest's.
fn foreign<T>(done: io::Result<T>) -> io::Result<T> {
    done.map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput if error.raw_os_error().is_none() => io::Error::other(error),
        _ => error,
    })
}

fn length(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|(_, bytes)| *bytes as u64).sum()
}

/// The first `count` bytes of the buffer, which grows for them.
fn room(buffer: &mut Vec<u8>, count: usize) -> &mut [u8] {
    if buffer.len() < count {
        buffer.resize(count, 0);
    }
    &mut buffer[..count]
}

/// Parts of the `bytes` from `at` on, each in the buffer at once: none goes over a multiple of its size, so
/// that no cluster is changed in two parts.
fn steps(mut at: u64, bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    let end = at.saturating_add(bytes);
    std::iter::from_fn(move || {
        let whole = BUFFER_BYTES as u64;
        let count = (whole - at % whole).min(end - at);
        let step = (at, usize::try_from(count).unwrap_or(BUFFER_BYTES));
        at += count;
        (count > 0).then_some(step)
    })
}

/// Goes through pieces of guest memory.
struct Cursor<'p> {
    pieces: &'p [Piece],
    /// Bytes of the first that were passed.
    done: usize,
}

impl Cursor<'_> {
    /// Hands each part of `data` to `copy` with the place in guest memory that it belongs to.
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
