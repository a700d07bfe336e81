//! Where the exporter listens, and its connections.

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

use super::access::Origin;

/// Longest path of a Unix socket, in bytes (unix(7): `sun_path` has 108, its end included).
const MAX_PATH: usize = 107;
/// Permissions of a Unix socket's file: its owner and group.
const SOCKET_MODE: u32 = 0o660;

/// What was written behind `--listen`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A port; 0 lets the host choose.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

/// No address to listen at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Neither form.
    #[error("must be an IP address with a port, as in 127.0.0.1:9465, or unix:PATH")]
    Shape,
    /// The kernel takes no such path.
    #[error("the path of a Unix socket has 1 to {MAX_PATH} bytes")]
    Path,
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        match text.strip_prefix("unix:") {
            Some(path) if (1..=MAX_PATH).contains(&path.len()) && !path.contains('\0') => {
                Ok(Self::Unix(path.into()))
            }
            Some(_) => Err(AddressError::Path),
            None => text.parse().map(Self::Tcp).map_err(|_| AddressError::Shape),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// The listening socket, nonblocking. A Unix socket's file, which its owner and group may use, goes with it.
#[derive(Debug)]
pub enum Listener {
    /// At a port.
    Tcp(TcpListener),
    /// At a path.
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// Listens. The file of a Unix socket that nobody listens at any more is replaced.
    ///
    /// # Errors
    /// That of `bind(2)` or `listen(2)`.
    pub fn bind(address: &Address) -> io::Result<Self> {
        match address {
            Address::Tcp(at) => {
                let listener = TcpListener::bind(at)?;
                listener.set_nonblocking(true)?;
                Ok(Self::Tcp(listener))
            }
            Address::Unix(path) => {
                let listener = paths::bind(path, Some(SOCKET_MODE))?;
                listener
                    .set_nonblocking(true)
                    .inspect_err(|_| paths::remove_socket(path, None))?;
                Ok(Self::Unix(listener, path.clone()))
            }
        }
    }

    /// Where it listens, with the port that the host chose.
    ///
    /// # Errors
    /// That of `getsockname(2)`.
    pub fn address(&self) -> io::Result<Address> {
        match self {
            Self::Tcp(listener) => listener.local_addr().map(Address::Tcp),
            Self::Unix(_, path) => Ok(Address::Unix(path.clone())),
        }
    }

    /// Takes a connection.
    ///
    /// # Errors
    /// That of `accept(2)`.
    pub fn accept(&self) -> io::Result<Stream> {
        let stream = match self {
            Self::Tcp(listener) => Stream::Tcp(listener.accept()?.0),
            Self::Unix(listener, _) => Stream::Unix(listener.accept()?.0),
        };
        match &stream {
            Stream::Tcp(stream) => stream.set_nonblocking(false)?,
            Stream::Unix(stream) => stream.set_nonblocking(false)?,
        }
        Ok(stream)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener, _) => listener.as_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            let _ = fs::remove_file(path);
        }
    }
}

/// A connection.
#[derive(Debug)]
pub enum Stream {
    /// To a port.
    Tcp(TcpStream),
    /// To a path.
    Unix(UnixStream),
}

impl Stream {
    /// Returns where the connection comes from.
    ///
    /// # Errors
    /// The client has gone.
    pub fn origin(&self) -> io::Result<Origin> {
        Ok(match self {
            Self::Tcp(stream) => Origin::Tcp {
                peer: stream.peer_addr()?,
                local: stream.local_addr()?,
            },
            Self::Unix(_) => Origin::Unix,
        })
    }

    /// The same connection once more.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn again(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
        })
    }

    /// Ends it, in one direction or both, under whoever waits for it.
    pub fn shut(&self, how: Shutdown) {
        let _ = match self {
            Self::Tcp(stream) => stream.shutdown(how),
            Self::Unix(stream) => stream.shutdown(how),
        };
    }

    /// Reads what there is, by `until` at the latest.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`], or that of `read(2)`.
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

    /// Writes it all, by `until` at the latest.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`], or that of `write(2)`.
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

impl AsFd for Stream {
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
    fn addresses_are_ports_or_paths() {
        let parse = Address::from_str;
        assert_eq!(parse("unix:/run/m"), Ok(Address::Unix("/run/m".into())));
        assert!(matches!(parse("[::1]:0"), Ok(Address::Tcp(_))));
        assert_eq!(parse("0.0.0.0:9465").unwrap().to_string(), "0.0.0.0:9465");
        for bad in ["", "9465", "127.0.0.1", "127.0.0.1:65536", "localhost:1"] {
            assert_eq!(parse(bad), Err(AddressError::Shape), "{bad}");
        }
        for bad in ["unix:".to_owned(), format!("unix:/{}", "x".repeat(200))] {
            assert_eq!(parse(&bad), Err(AddressError::Path), "{bad}");
        }
    }

    /// A socket that somebody listens at stays, and so does a file that is no socket.
    #[test]
    fn a_unix_socket_replaces_only_a_dead_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("e.sock");
        let address = Address::Unix(path.clone());
        let first = Listener::bind(&address).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        let in_use = Listener::bind(&address).unwrap_err();
        assert_eq!(in_use.kind(), io::ErrorKind::AddrInUse);
        drop(first);
        assert!(!path.exists());
        drop(UnixListener::bind(&path).unwrap());
        drop(Listener::bind(&address).unwrap());
        fs::write(&path, "data").unwrap();
        assert!(Listener::bind(&address).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"data");
    }

    /// A client that drips, or takes nothing, is given up at the time that was set.
    #[test]
    fn time_is_over_when_it_is() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut stream = Stream::Unix(ours);
        let soon = || Instant::now() + Duration::from_millis(50);
        let late = stream.read_until(&mut [0], soon()).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        let late = stream.write_until(&vec![0; 8 << 20], soon()).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
    }
}
