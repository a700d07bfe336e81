//! Where metrics are served: a loopback port, or a Unix socket.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use sandbox::paths;

/// Longest path of a Unix socket, in bytes (unix(7): `sun_path` has 108, its end included).
const MAX_PATH: usize = 107;

/// What was written behind `--metrics`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// A port of a loopback address; port 0 lets the host choose.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix {
        /// Its path.
        path: PathBuf,
        /// The permissions of its file; without them those that the umask leaves.
        mode: Option<u32>,
    },
}

/// No address that metrics may be served at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Neither form.
    #[error("must be 127.0.0.1:PORT or unix:PATH[,mode=MODE]")]
    Shape,
    /// No permissions of a socket.
    #[error("mode= takes the permissions of a file in octal, 0600 to 0777, as in mode=0660")]
    Mode,
    /// Nothing behind `unix:`.
    #[error("the path of a socket is missing")]
    NoPath,
    /// The kernel takes no such path.
    #[error("the path of a Unix socket has at most {MAX_PATH} bytes")]
    Path,
    /// Whoever can connect can read, and there is no encryption.
    #[error("must be a loopback address, because anybody who reaches it can read it; put a proxy before it")]
    NotLoopback,
}

impl FromStr for MetricsAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Some(path) = text.strip_prefix("unix:") {
            let (path, mode) = path_and_mode(path)?;
            return Ok(Self::Unix { path, mode });
        }
        let address: SocketAddr = text.parse().map_err(|_| AddressError::Shape)?;
        if !address.ip().is_loopback() {
            return Err(AddressError::NotLoopback);
        }
        Ok(Self::Tcp(address))
    }
}

/// What `PATH[,mode=MODE]` says of a Unix socket.
///
/// # Errors
/// [`AddressError`].
pub fn path_and_mode(text: &str) -> Result<(PathBuf, Option<u32>), AddressError> {
    let (path, mode) = match text.rsplit_once(",mode=") {
        Some((path, mode)) => (path, Some(mode_of(mode).ok_or(AddressError::Mode)?)),
        None => (text, None),
    };
    match path.len() {
        0 => Err(AddressError::NoPath),
        1..=MAX_PATH if !path.contains('\0') => Ok((path.into(), mode)),
        _ => Err(AddressError::Path),
    }
}

/// Permissions in octal, with all that the owner needs to connect.
fn mode_of(text: &str) -> Option<u32> {
    let octal = (3..=4).contains(&text.len()) && text.bytes().all(|digit| (b'0'..=b'7').contains(&digit));
    let mode = octal.then(|| u32::from_str_radix(text, 8).ok())??;
    (mode & !0o777 == 0 && mode & 0o600 == 0o600).then_some(mode)
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix { path, mode } => {
                write!(f, "unix:{}", path.display())?;
                mode.map_or(Ok(()), |mode| write!(f, ",mode={mode:04o}"))
            }
        }
    }
}

/// Why nothing can be served there.
#[derive(Debug, thiserror::Error)]
#[error("--metrics {address}: nothing can be served there{}", remedy(.source))]
pub struct ListenError {
    address: MetricsAddress,
    #[source]
    source: io::Error,
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "; choose another, or end what listens there",
        io::ErrorKind::PermissionDenied => "; choose a place that this user may use, a port above 1023 say",
        _ => "",
    }
}

/// The listening socket, nonblocking. A Unix socket's file goes with it.
#[derive(Debug)]
pub enum Listener {
    /// At a port.
    Tcp(TcpListener),
    /// At a path.
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// Listens at `address`. The file of a Unix socket that nobody listens at any more is replaced.
    ///
    /// # Errors
    /// [`ListenError`], one line.
    pub fn bind(address: &MetricsAddress) -> Result<Self, ListenError> {
        let bound = match address {
            MetricsAddress::Tcp(at) => {
                TcpListener::bind(at).and_then(|l| l.set_nonblocking(true).map(|()| Self::Tcp(l)))
            }
            MetricsAddress::Unix { path, mode } => {
                bind_unix(path, *mode).map(|l| Self::Unix(l, path.clone()))
            }
        };
        bound.map_err(|source| ListenError {
            address: address.clone(),
            source,
        })
    }

    /// Where it listens, with the port that the host chose.
    pub fn address(&self) -> MetricsAddress {
        match self {
            Self::Tcp(listener) => MetricsAddress::Tcp(
                listener
                    .local_addr()
                    .unwrap_or_else(|_| SocketAddr::from(([127, 0, 0, 1], 0))),
            ),
            Self::Unix(_, path) => MetricsAddress::Unix {
                path: path.clone(),
                mode: None,
            },
        }
    }

    /// Takes a connection, nonblocking.
    ///
    /// # Errors
    /// That of `accept(2)`.
    pub fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                Ok(Stream::Tcp(stream))
            }
            Self::Unix(listener, _) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                Ok(Stream::Unix(stream))
            }
        }
    }
}

/// A nonblocking socket that listens at `path`, whose file has the permissions `mode`; without them those
/// that the umask leaves. The file of a socket that nobody listens at any more is replaced, and no other.
///
/// # Errors
/// Those of [`paths::bind`] and `fcntl(2)`; no file is left behind.
pub fn bind_unix(path: &Path, mode: Option<u32>) -> io::Result<UnixListener> {
    let listener = paths::bind(path, mode)?;
    listener
        .set_nonblocking(true)
        .inspect_err(|_| paths::remove_socket(path, None))?;
    Ok(listener)
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Self::Tcp(listener) => listener.as_raw_fd(),
            Self::Unix(listener, _) => listener.as_raw_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            paths::remove_socket(path, None);
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
    /// Says that nothing more will be written.
    pub fn end_writing(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Self::Unix(stream) => stream.shutdown(Shutdown::Write),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(into),
            Self::Unix(stream) => stream.read(into),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(from),
            Self::Unix(stream) => stream.write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsRawFd for Stream {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Self::Tcp(stream) => stream.as_raw_fd(),
            Self::Unix(stream) => stream.as_raw_fd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use perf_core::error_line;

    use super::*;

    #[test]
    fn addresses_are_loopback_ports_or_paths() {
        let parse = MetricsAddress::from_str;
        assert_eq!(
            parse("127.0.0.1:9464").unwrap(),
            MetricsAddress::Tcp(SocketAddr::from(([127, 0, 0, 1], 9464)))
        );
        assert!(parse("[::1]:0").is_ok());
        assert_eq!(
            parse("unix:/run/m").unwrap(),
            MetricsAddress::Unix {
                path: "/run/m".into(),
                mode: None
            }
        );
        let with_mode = parse("unix:/run/a,b,mode=0660").unwrap();
        assert_eq!(
            with_mode,
            MetricsAddress::Unix {
                path: "/run/a,b".into(),
                mode: Some(0o660)
            }
        );
        assert_eq!(with_mode.to_string(), "unix:/run/a,b,mode=0660");
        for (bad, why) in [
            ("", "127.0.0.1:PORT"),
            ("9464", "127.0.0.1:PORT"),
            ("127.0.0.1", "127.0.0.1:PORT"),
            ("127.0.0.1:65536", "127.0.0.1:PORT"),
            ("localhost:1", "127.0.0.1:PORT"),
            ("0.0.0.0:9464", "loopback"),
            ("[::]:9464", "loopback"),
            ("192.0.2.1:80", "loopback"),
            ("unix:", "path"),
            ("unix:,mode=0660", "path"),
            ("unix:/run/m,mode=", "octal"),
            ("unix:/run/m,mode=rw", "octal"),
            ("unix:/run/m,mode=0668", "octal"),
            ("unix:/run/m,mode=1777", "octal"),
            ("unix:/run/m,mode=0060", "octal"),
        ] {
            assert!(parse(bad).unwrap_err().to_string().contains(why), "{bad}");
        }
        assert!(
            parse(&format!("unix:/{}", "x".repeat(200)))
                .unwrap_err()
                .to_string()
                .contains("107")
        );
    }

    #[test]
    fn an_address_in_use_is_said_in_one_line() {
        let first = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let line = error_line(&Listener::bind(&first.address()).unwrap_err());
        assert!(
            line.starts_with(&format!("--metrics {}: ", first.address())) && line.contains("choose another"),
            "{line}"
        );
        assert!(!line.contains('\n'));
    }

    /// A socket that somebody listens at stays, and so does a file that is no socket. A dead socket is taken
    /// over.
    #[test]
    fn a_unix_socket_replaces_only_a_dead_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.sock");
        let address = MetricsAddress::Unix {
            path: path.clone(),
            mode: None,
        };
        let first = Listener::bind(&address).unwrap();
        assert!(
            Listener::bind(&address)
                .unwrap_err()
                .to_string()
                .to_string()
                .contains("choose another")
        );
        drop(first);
        assert!(!path.exists());
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        drop(Listener::bind(&address).unwrap());
        fs::write(&path, "data").unwrap();
        assert!(Listener::bind(&address).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"data");
    }

    #[test]
    fn the_file_of_a_socket_has_the_permissions_that_were_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        for mode in [0o600, 0o660, 0o666] {
            let path = dir.path().join(format!("{mode:o}"));
            let listener = Listener::bind(&MetricsAddress::Unix {
                path: path.clone(),
                mode: Some(mode),
            })
            .unwrap();
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
            drop(listener);
            assert!(!path.exists());
        }
    }
}
