//! Memory files (memfd_create(2)), which the VM uses for rings and for texts sent by operators.
#![expect(unsafe_code, reason = "memfd_create has no wrapper here")]

use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;

/// Creates a memory file with the close-on-exec flag.
pub fn memory_file() -> File {
    // SAFETY: the name is a C string, and the call has no other preconditions.
    let fd = unsafe { libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: the call returned a new descriptor, which is not owned elsewhere.
    unsafe { File::from_raw_fd(fd) }
}
