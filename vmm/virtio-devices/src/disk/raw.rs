//! Raw images, with direct transfers from and to guest memory.
#![expect(unsafe_code, reason = "preadv, preadv2, pwritev and fallocate")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{c_int, iovec, off_t};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use smallvec::SmallVec;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// Maximum number of guest memory segments in one system call (`UIO_MAXIOV`).
const MAX_PIECES: usize = 1024;
/// Maximum number of zero bytes per write on a file system that cannot zero a range.
const ZEROS_AT_ONCE: u64 = 65_536;

/// A segment of guest memory: guest-physical address and length in bytes.
pub type GuestMemorySegment = (GuestAddress, usize);

/// A raw disk image. Methods do not check ranges against the size of the disk.
#[derive(Debug)]
pub struct RawDiskImage {
    file: File,
    /// `true` if the file system can read without waiting for the disk (`RWF_NOWAIT`), as far as
    /// known.
    reads_nowait: AtomicBool,
}

impl RawDiskImage {
    /// Creates a raw disk image from the open file `file`.
    pub fn new(file: File) -> Self {
        Self {
            file,
            reads_nowait: AtomicBool::new(true),
        }
    }

    /// Reads the disk from byte offset `at` into segments of guest memory. Returns whether the data
    /// was in the host's page cache, or `true` if this is unknown.
    ///
    /// # Errors
    /// Returns the error of the host, `UnexpectedEof` if the image has been truncated, or
    /// `InvalidInput` without an OS error code if `pieces` are outside guest RAM.
    pub fn read(&self, memory: &GuestMemoryMmap, pieces: &[GuestMemorySegment], at: u64) -> io::Result<bool> {
        if self.reads_nowait.load(Ordering::Relaxed) {
            // SAFETY: `transfer` passes segments of guest memory, which stay mapped during the call.
            let cached = self.transfer(memory, pieces, at, |fd, vecs, count, at| unsafe {
                libc::preadv2(fd, vecs, count, at, libc::RWF_NOWAIT)
            });
            match cached {
                Ok(()) => return Ok(true),
                // For example tmpfs.
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                    self.reads_nowait.store(false, Ordering::Relaxed);
                }
                // The data is not in the page cache, or the call below reports the error.
                Err(_) => {}
            }
        }
        // SAFETY: as above.
        self.transfer(memory, pieces, at, |fd, vecs, count, at| unsafe {
            libc::preadv(fd, vecs, count, at)
        })?;
        Ok(!self.reads_nowait.load(Ordering::Relaxed))
    }

    /// Asks the host to load `bytes` bytes at byte offset `at` to its page cache, without waiting.
    pub fn prefetch(&self, at: u64, bytes: u64) {
        if let (Ok(at), Ok(bytes)) = (off_t::try_from(at), off_t::try_from(bytes)) {
            // Errors are ignored, because the call is only a hint.
            let _ = posix_fadvise(&self.file, at, bytes, PosixFadviseAdvice::POSIX_FADV_WILLNEED);
        }
    }

    /// Writes segments of guest memory to the disk at byte offset `at`.
    ///
    /// # Errors
    /// Returns the same errors as [`RawDiskImage::read`].
    pub fn write(&self, memory: &GuestMemoryMmap, pieces: &[GuestMemorySegment], at: u64) -> io::Result<()> {
        // SAFETY: as for `read`.
        self.transfer(memory, pieces, at, |fd, vecs, count, at| unsafe {
            libc::pwritev(fd, vecs, count, at)
        })
    }

    fn transfer(
        &self,
        memory: &GuestMemoryMmap,
        pieces: &[GuestMemorySegment],
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

    /// Flushes all completed writes to stable storage.
    ///
    /// # Errors
    /// Returns the error of `fdatasync(2)`.
    pub fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Deallocates `bytes` bytes at byte offset `at`. The range reads as zeros afterwards.
    ///
    /// # Errors
    /// Returns `Unsupported` if the file system cannot deallocate space, otherwise the error of the
    /// host.
    pub fn discard(&self, at: u64, bytes: u64) -> io::Result<()> {
        self.allocate(libc::FALLOC_FL_PUNCH_HOLE, at, bytes)
    }

    /// Writes zeros to `bytes` bytes of the disk at byte offset `at`. If `unmap` is `true`, the
    /// space may be deallocated.
    ///
    /// # Errors
    /// Returns the error of the host.
    pub fn write_zeros(&self, at: u64, bytes: u64, unmap: bool) -> io::Result<()> {
        let mode = if unmap {
            libc::FALLOC_FL_PUNCH_HOLE
        } else {
            libc::FALLOC_FL_ZERO_RANGE
        };
        match self.allocate(mode, at, bytes) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                use std::os::unix::fs::FileExt;
                let zeros = vec![0; usize::try_from(bytes.min(ZEROS_AT_ONCE)).map_err(io::Error::other)?];
                let (mut at, mut left) = (at, bytes);
                while left > 0 {
                    let count = usize::try_from(left).map_or(zeros.len(), |left| left.min(zeros.len()));
                    self.file.write_all_at(&zeros[..count], at)?;
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
            // SAFETY: no memory is passed, and the descriptor is owned by this image.
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
