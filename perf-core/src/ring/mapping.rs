//! The memory of a ring: a memfd and its mappings in this process.
#![expect(unsafe_code, reason = "memory shared with other processes")]

use std::io::{Error, Result};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut};

use super::page::ControlPage;

/// Page size on x86-64, the only supported architecture, in bytes.
pub const PAGE_SIZE: usize = 4096;

/// Access modes with which the control page and the data pages are mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MappingAccess {
    pub(super) control_writable: bool,
    pub(super) data_writable: bool,
}

/// The mapped control page and data pages of a ring. If `mirrored` is set, the data pages are
/// mapped twice in a row, so that a record that wraps at the end of the ring is contiguous in
/// memory.
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    data_size: usize,
    mirrored: bool,
}

// SAFETY: a mapping is memory that any thread may use; its contents are accessed through atomics,
// or through raw pointers by code that justifies its exclusive right to the bytes.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

fn check(result: libc::c_int) -> Result<libc::c_int> {
    if result < 0 {
        Err(Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Creates a memfd of `len` bytes with a sealed size. A mapping of the memfd never faults, because
/// nobody can shrink the file.
pub(super) fn sealed_memfd(len: usize) -> Result<OwnedFd> {
    // SAFETY: the name is a valid C string, and the result is checked.
    let fd = check(unsafe {
        libc::memfd_create(c"perf-ring".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
    })?;
    // SAFETY: `fd` was just created and has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let len = libc::off_t::try_from(len).map_err(|_| Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: plain system call on an open file descriptor.
    check(unsafe { libc::ftruncate(fd.as_raw_fd(), len) })?;
    add_seals(&fd, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW)?;
    Ok(fd)
}

/// `fcntl(2)` command from include/uapi/asm-generic/fcntl.h, missing in the libc crate, that
/// selects the signal of a file descriptor.
const F_SETSIG: libc::c_int = 10;

/// Reopens the memfd.
///
/// The kernel does not count the file descriptor that `memfd_create(2)` returns as a user of the
/// file. It counts the reopened file descriptor as long as any copy or mapping of this file
/// descriptor exists.
pub(super) fn reopened(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    let path = std::ffi::CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    // SAFETY: the path is a valid C string, and the result is checked.
    let fd = check(unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) })?;
    // SAFETY: `fd` was just opened and has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // The kernel sends a signal when a process opens the file while `is_open_elsewhere` holds its
    // lease. The default SIGIO ends an unprepared process; SIGURG is ignored by default.
    // SAFETY: F_SETSIG takes the signal by value.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), F_SETSIG, libc::SIGURG) })?;
    Ok(fd)
}

/// Returns `true` if the file is open or mapped other than through `fd`. Requires that `fd` is the
/// result of [`reopened`] and was not duplicated. Tries to take a write lease, which the kernel
/// grants only to the sole user of a file.
pub(super) fn is_open_elsewhere(fd: BorrowedFd<'_>) -> Result<bool> {
    let lease = |kind: libc::c_int| {
        // SAFETY: F_SETLEASE takes the lease type by value.
        check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, kind) })
    };
    match lease(libc::F_WRLCK) {
        Ok(_) => lease(libc::F_UNLCK).map(|_| false),
        Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => Ok(true),
        Err(e) => Err(e),
    }
}

pub(super) fn add_seals(fd: &OwnedFd, seals: libc::c_int) -> Result<()> {
    // SAFETY: plain system call on an open file descriptor.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) }).map(drop)
}

/// Returns the seals of the memfd `fd`, or an error if `fd` is not a memfd.
pub(super) fn seals(fd: BorrowedFd<'_>) -> Result<libc::c_int> {
    // SAFETY: plain system call on an open file descriptor.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) })
}

/// Returns the size of the file that `fd` refers to, in bytes.
pub(super) fn file_size(fd: BorrowedFd<'_>) -> Result<u64> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the pointer is valid for a `stat`, which the call fills on success.
    check(unsafe { libc::fstat(fd.as_raw_fd(), stat.as_mut_ptr()) })?;
    // SAFETY: the call succeeded.
    let size = unsafe { stat.assume_init() }.st_size;
    Ok(u64::try_from(size).unwrap_or(0))
}

impl Mapping {
    /// Maps a memfd of `PAGE_SIZE + data_size` bytes with a sealed size.
    pub(super) fn memfd(fd: BorrowedFd<'_>, data_size: usize, access: MappingAccess) -> Result<Self> {
        let len = PAGE_SIZE + 2 * data_size;
        // SAFETY: a new mapping at an address chosen by the kernel replaces nothing.
        let base = unsafe {
            libc::mmap(
                null_mut(),
                len,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(Error::last_os_error());
        }
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| Error::from_raw_os_error(libc::EINVAL))?;
        // From here on, `mapping` owns the range and unmaps it if an error is returned below.
        let mapping = Self {
            base,
            len,
            data_size,
            mirrored: true,
        };
        mapping.place(fd, 0, PAGE_SIZE, 0, access.control_writable)?;
        if data_size != 0 {
            mapping.place(fd, PAGE_SIZE, data_size, PAGE_SIZE, access.data_writable)?;
            mapping.place(
                fd,
                PAGE_SIZE + data_size,
                data_size,
                PAGE_SIZE,
                access.data_writable,
            )?;
        }
        Ok(mapping)
    }

    /// Maps the ring of a kernel perf event. The mapping cannot be mirrored, because the kernel
    /// maps such a ring only from offset 0.
    pub(super) fn perf(fd: BorrowedFd<'_>, data_size: usize) -> Result<Self> {
        let len = PAGE_SIZE + data_size;
        // SAFETY: a new mapping at an address chosen by the kernel replaces nothing.
        let base = unsafe {
            libc::mmap(
                null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(Error::last_os_error());
        }
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| Error::from_raw_os_error(libc::EINVAL))?;
        Ok(Self {
            base,
            len,
            data_size,
            mirrored: false,
        })
    }

    #[expect(clippy::cast_possible_wrap, reason = "rings have at most 2^31 bytes")]
    fn place(&self, fd: BorrowedFd<'_>, at: usize, len: usize, offset: usize, writable: bool) -> Result<()> {
        debug_assert!(at + len <= self.len);
        let prot = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        // Populated now, so that writing a record never takes a page fault.
        let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_POPULATE;
        // SAFETY: [at, at + len) lies in the range that this mapping reserved and owns, so
        // MAP_FIXED replaces nothing else.
        let placed = unsafe {
            libc::mmap(
                self.base.as_ptr().add(at).cast(),
                len,
                prot,
                flags,
                fd.as_raw_fd(),
                offset as libc::off_t,
            )
        };
        if placed == libc::MAP_FAILED {
            Err(Error::last_os_error())
        } else {
            Ok(())
        }
    }

    #[inline]
    pub(super) fn control(&self) -> &ControlPage {
        // SAFETY: the first page stays mapped readable for the lifetime of `self`, is page aligned
        // and larger than a ControlPage. All its fields are atomics, so changes through other
        // mappings are allowed. Stores through a read-only page would fault, but only writable
        // mappings are stored to (see the callers).
        unsafe { self.base.cast::<ControlPage>().as_ref() }
    }

    /// Returns the address of the first data page.
    #[inline]
    pub(super) fn data(&self) -> *mut u8 {
        // SAFETY: the mapping is longer than a page, or (without data pages) this is one past its
        // end.
        unsafe { self.base.as_ptr().add(PAGE_SIZE) }
    }

    #[inline]
    pub(super) fn data_size(&self) -> usize {
        self.data_size
    }

    #[inline]
    pub(super) fn mirrored(&self) -> bool {
        self.mirrored
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value mapped the range, and no borrow from it outlives this value.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    const F_GETSIG: libc::c_int = 11;

    /// A client may open a ring's memory while this process holds a lease to check for other users.
    /// The signal that breaks the lease does not terminate this process.
    #[test]
    fn client_open_during_lease_check_is_harmless() {
        let memory = sealed_memfd(PAGE_SIZE).unwrap();
        let fd = reopened(memory.as_fd()).unwrap();
        // SAFETY: F_SETLEASE takes the lease type by value.
        check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) }).unwrap();
        let path = std::ffi::CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
        // SAFETY: the path is a valid C string.
        let opened = unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_NONBLOCK) };
        let error = Error::last_os_error().raw_os_error();
        // The signal was sent because the lease was broken. SIGIO would have terminated the process
        // before this line.
        assert_eq!((opened, error), (-1, Some(libc::EWOULDBLOCK)));
        // SAFETY: F_GETSIG takes no argument.
        let signal = check(unsafe { libc::fcntl(fd.as_raw_fd(), F_GETSIG) }).unwrap();
        assert_eq!(signal, libc::SIGURG);
    }

    /// Returns the number of mappings of the memfd in this process.
    fn mapping_count(fd: &OwnedFd) -> usize {
        use std::os::unix::fs::MetadataExt;
        let inode = std::fs::File::from(fd.try_clone().unwrap())
            .metadata()
            .unwrap()
            .ino()
            .to_string();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let is = |line: &&str| line.split_whitespace().nth(4) == Some(&inode) && line.contains("perf-ring");
        maps.lines().filter(is).count()
    }

    /// Dropping a ring unmaps its memory. Rings are created and dropped with clients, so mappings
    /// that remain would accumulate until the VM exits.
    #[test]
    fn dropped_rings_are_unmapped() {
        let memory = sealed_memfd(2 * PAGE_SIZE).unwrap();
        let access = MappingAccess {
            control_writable: true,
            data_writable: true,
        };
        let mapping = Mapping::memfd(memory.as_fd(), PAGE_SIZE, access).unwrap();
        // The kernel lists the control page and the data that follows it as one mapping, and the
        // mirrored data as another.
        assert!(mapping_count(&memory) >= 2);
        drop(mapping);
        assert_eq!(mapping_count(&memory), 0);
    }

    #[test]
    fn own_descriptor_is_not_open_elsewhere() {
        let memory = sealed_memfd(PAGE_SIZE).unwrap();
        let fd = reopened(memory.as_fd()).unwrap();
        assert!(!is_open_elsewhere(fd.as_fd()).unwrap());
        let other = reopened(memory.as_fd()).unwrap();
        assert!(is_open_elsewhere(fd.as_fd()).unwrap());
        drop(other);
        // Checks twice, because a check takes a lease that it must release again.
        assert!(!is_open_elsewhere(fd.as_fd()).unwrap());
        assert!(!is_open_elsewhere(fd.as_fd()).unwrap());
        // A file that cannot be checked returns an error.
        let null = std::fs::File::open("/dev/null").unwrap();
        is_open_elsewhere(null.as_fd()).unwrap_err();
    }
}
