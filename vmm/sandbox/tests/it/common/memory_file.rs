//! Memory files, as rings and texts for operators are.
#![expect(unsafe_code, reason = "memfd_create has no wrapper here")]

use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;

/// Creates a memory file. Children that another test starts do not inherit it.
pub fn memory_file() -> File {
    // SAFETY: the name is a C string, and the call has no other conditions.
    let fd = unsafe { libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: the call returned a new descriptor, which nothing else owns.
    unsafe { File::from_raw_fd(fd) }
}
