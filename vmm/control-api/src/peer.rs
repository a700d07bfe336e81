//! Peer credentials of sockets, connection attempts with a timeout, and sealed memory files.
#![expect(unsafe_code, reason = "asks who is at the other end, and seals memory files")]

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Returns the user ID of the peer, as recorded by the kernel when the connection was made
/// (`SO_PEERCRED`, unix(7)).
///
/// # Errors
/// Returns the error of `getsockopt(2)`.
pub fn peer_uid(stream: &UnixStream) -> io::Result<u32> {
    peer(stream).map(|peer| peer.uid)
}

/// Returns the process ID of the peer if it is stopped (`SIGSTOP`, or by a debugger). Returns
/// `None` for a process in another PID namespace.
pub fn stopped(stream: &UnixStream) -> Option<u32> {
    let pid = u32::try_from(peer(stream).ok()?.pid)
        .ok()
        .filter(|pid| *pid != 0)?;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The state follows the program name, which may contain any character (proc(5)).
    let state = stat.rsplit_once(") ")?.1.chars().next()?;
    matches!(state, 'T' | 't').then_some(pid)
}

#[expect(clippy::cast_possible_truncation, reason = "the size of a small struct")]
fn peer(stream: &UnixStream) -> io::Result<libc::ucred> {
    let mut cred = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `cred` and `len` are live locals. `len` is the size of `cred`, and the kernel does
    // not write beyond it.
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
        Ok(cred)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Connects like [`UnixStream::connect`], but waits up to `patience` while the listener's backlog
/// is full.
///
/// # Errors
/// Returns the error of `connect(2)`, or [`io::ErrorKind::WouldBlock`] on timeout.
#[expect(clippy::cast_possible_truncation, reason = "the size of a small struct")]
pub fn connect_within(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    let bytes = path.as_os_str().as_bytes();
    let mut address = libc::sockaddr_un {
        sun_family: libc::AF_UNIX as libc::sa_family_t,
        sun_path: [0; 108],
    };
    // The path must be NUL-terminated.
    if bytes.len() >= address.sun_path.len() || bytes.contains(&0) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = from.cast_signed();
    }
    // SAFETY: `socket` takes integers only.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created and has no other owner.
    let stream = unsafe { UnixStream::from_raw_fd(fd) };
    stream.set_write_timeout(Some(patience))?;
    let size = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: `address` is a live local, `size` is its size, and its path is NUL-terminated.
    if unsafe { libc::connect(stream.as_raw_fd(), (&raw const address).cast(), size) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(stream)
}

/// Returns a copy of the inherited descriptor `number`, which must be a connected stream socket of any
/// family.
///
/// # Errors
/// Returns the error of the system call, [`io::ErrorKind::InvalidInput`] for a socket of another type,
/// and [`io::ErrorKind::NotConnected`].
#[expect(clippy::cast_possible_truncation, reason = "the size of an integer")]
pub fn inherited_stream(number: RawFd) -> io::Result<UnixStream> {
    // SAFETY: the call takes integers, and fails unless the descriptor is open.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created and has no other owner.
    let stream = unsafe { UnixStream::from_raw_fd(copy) };
    let mut kind: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `kind` and `len` are live locals, and `len` is the size of `kind`.
    let result = unsafe {
        libc::getsockopt(
            copy,
            libc::SOL_SOCKET,
            libc::SO_TYPE,
            (&raw mut kind).cast(),
            &mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    if kind != libc::SOCK_STREAM {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut address = [0u8; 128];
    let mut len = address.len() as libc::socklen_t;
    // SAFETY: `address` and `len` are live locals, and `len` is the size of `address`.
    match unsafe { libc::getpeername(copy, address.as_mut_ptr().cast(), &mut len) } {
        0 => Ok(stream),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the effective user ID of this process.
pub fn own_uid() -> u32 {
    // SAFETY: `geteuid` has no parameters and cannot fail.
    unsafe { libc::geteuid() }
}

/// Creates a sealed memory file with the contents `text`, which no recipient can modify.
///
/// # Errors
/// Returns the error of `memfd_create(2)`, of the write, or of the sealing.
pub fn sealed_text(name: &str, text: &[u8]) -> io::Result<File> {
    let name = CString::new(name)?;
    // SAFETY: `name` is a live, NUL-terminated C string.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created and has no other owner.
    let mut file = unsafe { File::from_raw_fd(fd) };
    file.write_all(text)?;
    let seals = libc::F_SEAL_WRITE | libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
    // SAFETY: the descriptor is open, and F_ADD_SEALS takes an integer.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

/// Reopens a file read-only, with a file offset of its own.
///
/// # Errors
/// Returns the error of `open(2)`.
pub fn reopen_read_only(file: &File) -> io::Result<File> {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// Clients that share a text can neither change it nor move each other's file offset.
    #[test]
    fn sealed_text_is_immutable_and_has_separate_offsets() {
        let file = sealed_text("t", b"abc").unwrap();
        let (mut a, mut b) = (reopen_read_only(&file).unwrap(), reopen_read_only(&file).unwrap());
        let mut text = String::new();
        a.read_to_string(&mut text).unwrap();
        b.read_to_string(&mut text).unwrap();
        assert_eq!(text, "abcabc");
        let path = format!("/proc/self/fd/{}", a.as_raw_fd());
        let written = File::options()
            .write(true)
            .open(path)
            .and_then(|mut f| f.write_all(b"x"));
        assert!(written.is_err());
    }

    #[test]
    fn only_connected_stream_sockets_are_inherited() {
        let (a, mut b) = UnixStream::pair().unwrap();
        let mut copy = inherited_stream(a.as_raw_fd()).unwrap();
        b.write_all(b"x").unwrap();
        let mut byte = [0];
        copy.read_exact(&mut byte).unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let kind = |fd: RawFd| inherited_stream(fd).unwrap_err();
        assert_eq!(kind(listener.as_raw_fd()).kind(), io::ErrorKind::NotConnected);
        let tcp = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        inherited_stream(tcp.as_raw_fd()).unwrap();
        let (datagram, _other) = std::os::unix::net::UnixDatagram::pair().unwrap();
        assert_eq!(kind(datagram.as_raw_fd()).kind(), io::ErrorKind::InvalidInput);
        let file = sealed_text("t", b"").unwrap();
        assert_eq!(kind(file.as_raw_fd()).raw_os_error(), Some(libc::ENOTSOCK));
        assert_eq!(kind(i32::MAX).raw_os_error(), Some(libc::EBADF));
    }

    /// Both ends of a local socket pair belong to this user.
    #[test]
    fn peer_uid_is_reported() {
        let (a, b) = UnixStream::pair().unwrap();
        assert_eq!(peer_uid(&a).unwrap(), own_uid());
        assert_eq!(peer_uid(&b).unwrap(), own_uid());
    }
}
