//! Peer credentials of sockets, connection attempts with a timeout, and sealed memory files.
#![expect(unsafe_code, reason = "takes over an inherited descriptor by its number")]

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrStorage, UnixAddr, UnixCredentials};
use nix::sys::socket::{getsockopt, sockopt};
use nix::unistd::Uid;

/// Returns the user ID of the peer, as recorded by the kernel when the connection was made
/// (`SO_PEERCRED`, unix(7)).
///
/// # Errors
/// Returns the error of `getsockopt(2)`.
pub fn peer_uid(stream: &UnixStream) -> io::Result<u32> {
    peer(stream).map(|peer| peer.uid())
}

/// Returns the process ID of the peer if it is stopped (`SIGSTOP`, or by a debugger). Returns
/// `None` for a process in another PID namespace.
pub fn stopped_peer_pid(stream: &UnixStream) -> Option<u32> {
    let pid = u32::try_from(peer(stream).ok()?.pid())
        .ok()
        .filter(|pid| *pid != 0)?;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The state follows the program name, which may contain any character (proc(5)).
    let state = stat.rsplit_once(") ")?.1.chars().next()?;
    matches!(state, 'T' | 't').then_some(pid)
}

fn peer(stream: &UnixStream) -> io::Result<UnixCredentials> {
    Ok(getsockopt(stream, sockopt::PeerCredentials)?)
}

/// Connects like [`UnixStream::connect`], but waits up to `patience` while the listener's backlog
/// is full.
///
/// # Errors
/// Returns the error of `connect(2)`, or [`io::ErrorKind::WouldBlock`] on timeout.
pub fn connect_within(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    let address = UnixAddr::new(path)?;
    let socket = socket::socket(
        AddressFamily::Unix,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    let stream = UnixStream::from(socket);
    stream.set_write_timeout(Some(patience))?;
    socket::connect(stream.as_raw_fd(), &address)?;
    Ok(stream)
}

/// Returns a copy of the inherited descriptor `number`, which must be a connected stream socket of
/// any family.
///
/// # Errors
/// Returns the error of the system call, [`io::ErrorKind::InvalidInput`] for a socket of another
/// type, and [`io::ErrorKind::NotConnected`] for an unconnected socket.
pub fn inherited_stream(number: RawFd) -> io::Result<UnixStream> {
    // SAFETY: the call takes integers, and fails unless the descriptor is open.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created and has no other owner.
    let stream = unsafe { UnixStream::from_raw_fd(copy) };
    if getsockopt(&stream, sockopt::SockType)? != SockType::Stream {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    socket::getpeername::<SockaddrStorage>(copy)?;
    Ok(stream)
}

/// Returns the effective user ID of this process.
pub fn own_uid() -> u32 {
    Uid::effective().as_raw()
}

/// Creates a sealed memory file with the contents `text`, which no recipient can modify.
///
/// # Errors
/// Returns the error of `memfd_create(2)`, of the write, or of the sealing.
pub fn sealed_text(name: &str, text: &[u8]) -> io::Result<File> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let mut file = File::from(memfd_create(name, flags)?);
    file.write_all(text)?;
    let seals =
        SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(file)
}

/// Reopens a file read-only, with a separate file offset.
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

    /// Clients that share a sealed text can neither change it nor move each other's file offset.
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

    /// Both ends of a local socket pair report this user as their peer.
    #[test]
    fn peer_uid_is_reported() {
        let (a, b) = UnixStream::pair().unwrap();
        assert_eq!(peer_uid(&a).unwrap(), own_uid());
        assert_eq!(peer_uid(&b).unwrap(), own_uid());
    }
}
