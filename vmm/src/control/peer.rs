//! Who is at the other end of a socket, and who we are.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::net::UnixStream;

/// The user at the other end, as the kernel recorded it when the connection was made (`SO_PEERCRED`, unix(7)).
///
/// # Errors
/// The error of `getsockopt(2)`.
pub fn peer_uid(stream: &UnixStream) -> io::Result<u32> {
    let mut cred = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `cred` and `len` are live locals, and `len` is the size of `cred`, beyond which the kernel does not write.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &mut len,
        )
    };
    if result == 0 && len as usize == size_of::<libc::ucred>() {
        Ok(cred.uid)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The user this process acts as.
pub fn own_uid() -> u32 {
    // SAFETY: geteuid takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// An empty memory file to hand over to a client.
///
/// # Errors
/// The error of `memfd_create(2)`.
pub fn memfd(name: &str) -> io::Result<File> {
    let name = CString::new(name)?;
    // SAFETY: `name` is a live C string.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made, and nothing else owns it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ends of a pair made here are ours.
    #[test]
    fn a_peer_is_known_by_its_user() {
        let (a, b) = UnixStream::pair().unwrap();
        assert_eq!(peer_uid(&a).unwrap(), own_uid());
        assert_eq!(peer_uid(&b).unwrap(), own_uid());
    }
}
