//! Listening sockets and connections of the exporter.

use std::fmt;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use sandbox::paths;

use super::access::HttpConnectionOrigin;

/// Maximum length of a Unix socket path, in bytes. `sun_path` has 108 bytes, including the NUL
/// (unix(7)).
const MAX_PATH: usize = 107;
/// Permissions of the Unix socket, for owner and group.
const SOCKET_MODE: u32 = 0o660;

/// A listening address, as given by `--listen`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// TCP address. With port 0, the kernel chooses a port.
    Tcp(SocketAddr),
    /// Path of a Unix socket.
    Unix(PathBuf),
}

/// Errors of parsing a [`ListenAddress`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ListenAddressError {
    #[error("must be an IP address with a port, for example 127.0.0.1:9465, or unix:PATH")]
    Shape,
    #[error("the path of a Unix socket must have between 1 and {MAX_PATH} bytes")]
    Path,
}

impl FromStr for ListenAddress {
    type Err = ListenAddressError;

    fn from_str(text: &str) -> Result<Self, ListenAddressError> {
        match text.strip_prefix("unix:") {
            Some(path) if (1..=MAX_PATH).contains(&path.len()) && !path.contains('\0') => {
                Ok(Self::Unix(path.into()))
            }
            Some(_) => Err(ListenAddressError::Path),
            None => text.parse().map(Self::Tcp).map_err(|_| ListenAddressError::Shape),
        }
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A nonblocking listening socket. The file of a Unix socket is accessible to its owner and group,
/// and is removed on drop.
#[derive(Debug)]
pub enum ExporterListener {
    /// TCP socket.
    Tcp(TcpListener),
    /// Unix socket and its path.
    Unix(UnixListener, PathBuf),
}

impl ExporterListener {
    /// Binds `address` and listens. Replaces a stale Unix socket.
    ///
    /// # Errors
    /// Returns the error of `bind(2)` or `listen(2)`.
    pub fn bind(address: &ListenAddress) -> io::Result<Self> {
        match address {
            ListenAddress::Tcp(at) => {
                let listener = TcpListener::bind(at)?;
                listener.set_nonblocking(true)?;
                Ok(Self::Tcp(listener))
            }
            ListenAddress::Unix(path) => {
                let listener = paths::bind(path, Some(SOCKET_MODE))?;
                listener
                    .set_nonblocking(true)
                    .inspect_err(|_| paths::remove_socket(path, None))?;
                Ok(Self::Unix(listener, path.clone()))
            }
        }
    }

    /// Returns the address on which the socket listens. If port 0 was requested, the address
    /// contains the port that the kernel chose.
    ///
    /// # Errors
    /// Returns the error of `getsockname(2)`.
    pub fn address(&self) -> io::Result<ListenAddress> {
        match self {
            Self::Tcp(listener) => listener.local_addr().map(ListenAddress::Tcp),
            Self::Unix(_, path) => Ok(ListenAddress::Unix(path.clone())),
        }
    }

    /// Accepts a connection.
    ///
    /// # Errors
    /// Returns the error of `accept(2)`.
    pub fn accept(&self) -> io::Result<HttpClientStream> {
        let stream = match self {
            Self::Tcp(listener) => HttpClientStream::Tcp(listener.accept()?.0),
            Self::Unix(listener, _) => HttpClientStream::Unix(listener.accept()?.0),
        };
        match &stream {
            HttpClientStream::Tcp(stream) => stream.set_nonblocking(false)?,
            HttpClientStream::Unix(stream) => stream.set_nonblocking(false)?,
        }
        Ok(stream)
    }
}

impl AsFd for ExporterListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener, _) => listener.as_fd(),
        }
    }
}

impl Drop for ExporterListener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            let _ = fs::remove_file(path);
        }
    }
}

/// A connection from an HTTP client.
#[derive(Debug)]
pub enum HttpClientStream {
    /// TCP connection.
    Tcp(TcpStream),
    /// Unix socket connection.
    Unix(UnixStream),
}

impl HttpClientStream {
    /// Returns the transport of the connection and, for TCP, the addresses of both ends.
    ///
    /// # Errors
    /// Returns an error if the client has disconnected.
    pub fn origin(&self) -> io::Result<HttpConnectionOrigin> {
        Ok(match self {
            Self::Tcp(stream) => HttpConnectionOrigin::Tcp {
                peer: stream.peer_addr()?,
                local: stream.local_addr()?,
            },
            Self::Unix(_) => HttpConnectionOrigin::Unix,
        })
    }

    /// Duplicates the descriptor of the connection.
    ///
    /// # Errors
    /// Returns an error if the process has no free descriptor.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
        })
    }

    /// Shuts the connection down in one or both directions, which wakes threads blocked on it.
    pub fn shut(&self, how: Shutdown) {
        let _ = match self {
            Self::Tcp(stream) => stream.shutdown(how),
            Self::Unix(stream) => stream.shutdown(how),
        };
    }

    /// Reads available bytes until the deadline `until`.
    ///
    /// # Errors
    /// Returns [`io::ErrorKind::TimedOut`] at the deadline, or the error of `read(2)`.
    pub fn read_until(&mut self, into: &mut [u8], until: Instant) -> io::Result<usize> {
        loop {
            let left = Some(time_left(until)?);
            let read = match self {
                Self::Tcp(stream) => stream.set_read_timeout(left).and_then(|()| stream.read(into)),
                Self::Unix(stream) => stream.set_read_timeout(left).and_then(|()| stream.read(into)),
            };
            match read {
                Err(e) if is_transient(&e) => {}
                other => return other,
            }
        }
    }

    /// Writes all bytes until the deadline `until`.
    ///
    /// # Errors
    /// Returns [`io::ErrorKind::TimedOut`] at the deadline, or the error of `write(2)`.
    pub fn write_until(&mut self, mut bytes: &[u8], until: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            let left = Some(time_left(until)?);
            let written = match self {
                Self::Tcp(stream) => stream.set_write_timeout(left).and_then(|()| stream.write(bytes)),
                Self::Unix(stream) => stream.set_write_timeout(left).and_then(|()| stream.write(bytes)),
            };
            match written {
                Err(e) if is_transient(&e) => {}
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                other => bytes = &bytes[other?..],
            }
        }
        Ok(())
    }
}

fn is_transient(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

fn time_left(until: Instant) -> io::Result<Duration> {
    match until.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
        left => Ok(left),
    }
}

impl AsFd for HttpClientStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn listen_addresses_are_ports_or_paths() {
        let parse = ListenAddress::from_str;
        assert_eq!(parse("unix:/run/m"), Ok(ListenAddress::Unix("/run/m".into())));
        assert!(matches!(parse("[::1]:0"), Ok(ListenAddress::Tcp(_))));
        assert_eq!(parse("0.0.0.0:9465").unwrap().to_string(), "0.0.0.0:9465");
        for bad in ["", "9465", "127.0.0.1", "127.0.0.1:65536", "localhost:1"] {
            assert_eq!(parse(bad), Err(ListenAddressError::Shape), "{bad}");
        }
        for bad in ["unix:".to_owned(), format!("unix:/{}", "x".repeat(200))] {
            assert_eq!(parse(&bad), Err(ListenAddressError::Path), "{bad}");
        }
    }

    /// Binding replaces a stale socket. It keeps a socket with a listener, and any file that is not
    /// a socket.
    #[test]
    fn unix_socket_replaces_only_stale_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("e.sock");
        let address = ListenAddress::Unix(path.clone());
        let first = ExporterListener::bind(&address).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        let in_use = ExporterListener::bind(&address).unwrap_err();
        assert_eq!(in_use.kind(), io::ErrorKind::AddrInUse);
        drop(first);
        assert!(!path.exists());
        drop(UnixListener::bind(&path).unwrap());
        drop(ExporterListener::bind(&address).unwrap());
        fs::write(&path, "data").unwrap();
        assert!(ExporterListener::bind(&address).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"data");
    }

    /// The deadline also terminates the connection of a client that sends or reads slowly.
    #[test]
    fn deadline_ends_slow_clients() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut stream = HttpClientStream::Unix(ours);
        let soon = || Instant::now() + Duration::from_millis(50);
        let late = stream.read_until(&mut [0], soon()).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        let late = stream.write_until(&vec![0; 8 << 20], soon()).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
    }
}
