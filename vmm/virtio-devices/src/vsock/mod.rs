//! Vsock device: sockets between the guest and host programs (virtio 1.2, 5.10), with Firecracker's
//! convention for Unix sockets.
//!
//! | module | contents |
//! |---|---|
//! | `packet` | packet header and operations |
//! | `chains` | packets in descriptor chains |
//! | `connection` | one connection: credit in both directions, half-closes |
//! | `muxer` | all connections and handshakes |
//! | `queues` | the device's thread: queues and Unix sockets |
//!
//! To reach a guest port, a host program connects to the device's Unix socket and writes `CONNECT
//! PORT` and a newline. Once a guest program has accepted the connection, the host program reads
//! `OK PORT` and a newline; otherwise, the socket is closed. A guest program that connects to CID
//! 2, port P, reaches the Unix socket at the device's path with the suffix `_P`.

mod chains;
mod connection;
#[cfg(test)]
mod limits;
pub mod muxer;
pub mod packet;
pub mod queues;
#[cfg(test)]
mod rings;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::unix::net::UnixListener;
#[cfg(test)]
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use sandbox::paths::{self, FileIdentity};
use sandbox::{SandboxedThreadKind, SocketBroker, SocketDestination};
use thiserror::Error;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes as _, GuestMemoryMmap};
use vmm_sys_util::timerfd::TimerFd;

use crate::device::{ActivateError, ActiveQueue, DeviceActivation, VirtioDevice, read_config_bytes};
use crate::serve::{log_driver_error, serve_queue_while};
use crate::worker::DeviceWorker;

use self::muxer::{ConnectionMuxer, VsockHostDialer};
use self::queues::{FIRST_TOKEN, VsockQueues};

/// Virtio device ID of a vsock device (virtio 1.2, section 5).
const VIRTIO_ID_VSOCK: u32 = 19;
/// Maximum sizes of the receive, transmit and event queues, in entries.
const QUEUE_SIZES: [u16; 3] = [256, 256, 16];
/// ID of the transport reset event, `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET` (5.10.6.7).
const TRANSPORT_RESET: u32 = 0;
/// Length of an event in the event queue, in bytes (5.10.6.7).
const EVENT_BYTES: u32 = 4;
/// Default guest CID, the lowest valid one.
pub const DEFAULT_CID: u32 = 3;
/// Maximum length of the socket path, in bytes. Leaves space for the longest `_PORT` suffix
/// (unix(7), sun_path).
const MAX_PATH: usize = 107 - "_4294967295".len();

/// Maximum number of attempts to lock the directory of a socket. A process holds the lock only
/// while it checks one path and creates one socket.
const LOCK_TRIES: usize = 300;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Configuration of a vsock device (`--vsock`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VsockConfig {
    /// Context ID (CID) of the guest.
    pub cid: u32,
    /// Path of the Unix socket, or `None` for a path that the VMM chooses.
    pub socket: Option<PathBuf>,
}

impl Default for VsockConfig {
    fn default() -> Self {
        Self {
            cid: DEFAULT_CID,
            socket: None,
        }
    }
}

/// Error returned when a vsock configuration is invalid.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum VsockConfigError {
    /// The configuration contains an unknown option.
    #[error("unknown option '{0}'; use cid=N, socket=PATH or both")]
    Unknown(String),
    /// The value of `cid=` is not a valid guest CID.
    #[error("cid={0}: must be between 3 and 4294967294")]
    Cid(String),
    /// The value of `socket=` is empty.
    #[error("socket= without a path")]
    NoPath,
}

impl FromStr for VsockConfig {
    type Err = VsockConfigError;

    /// Parses `cid=N`, `socket=PATH` or both in this order. The path may contain commas.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut config = Self::default();
        let mut rest = text;
        if let Some(after) = rest.strip_prefix("cid=") {
            let (number, behind) = after.split_once(',').unwrap_or((after, ""));
            // 0xFFFFFFFF is VMADDR_CID_ANY (virtio 1.2, 5.10.4).
            config.cid = number
                .parse()
                .ok()
                .filter(|cid| (DEFAULT_CID..u32::MAX).contains(cid))
                .ok_or_else(|| VsockConfigError::Cid(number.to_owned()))?;
            rest = behind;
            if rest.is_empty() && !after.ends_with(',') {
                return Ok(config);
            }
        }
        match rest.strip_prefix("socket=") {
            Some("") => Err(VsockConfigError::NoPath),
            Some(path) => {
                config.socket = Some(path.into());
                Ok(config)
            }
            None => Err(VsockConfigError::Unknown(rest.to_owned())),
        }
    }
}

/// Error returned when a vsock device cannot be created.
#[derive(Debug, Error)]
pub enum VsockError {
    /// The socket path exceeds the length limit of Unix sockets.
    #[error("{}: longer than {MAX_PATH} bytes; choose a shorter path", .0.display())]
    TooLong(PathBuf),
    /// Another process listens at the socket path, or the file at the path is not a socket.
    #[error("{}: the file exists or is in use by a VM; choose another path or remove it", .0.display())]
    Taken(PathBuf),
    /// Another process holds the lock of the socket's directory for too long.
    #[error("{}: the directory is locked by another program; choose another one for socket=", .0.display())]
    Locked(PathBuf),
    /// An operation on the socket's path failed.
    #[error("{}", path.display())]
    Host {
        /// Path of the device's socket, or of its directory.
        path: PathBuf,
        /// Error returned by the host's kernel.
        #[source]
        source: io::Error,
    },
}

/// A virtio vsock device.
#[derive(Debug)]
pub struct VsockDevice {
    cid: u32,
    path: PathBuf,
    listener: Arc<UnixListener>,
    /// Identity of the socket file that this device created. Checked before the file is removed,
    /// because another process may have replaced it.
    file: FileIdentity,
    /// How the socket broker, a helper process, connects to the sockets of host ports. `None` if
    /// this process connects to them directly.
    ports: Option<SocketDestination>,
    worker: Option<DeviceWorker>,
}

impl VsockDevice {
    /// Creates a device with a Unix socket at `path`. Only processes of the same user can connect
    /// to it.
    ///
    /// # Errors
    /// Returns a [`VsockError`] if the path is invalid, in use or locked, or if an operation on the
    /// path fails.
    pub fn new(cid: u32, path: &Path) -> Result<Self, VsockError> {
        if path.as_os_str().len() > MAX_PATH {
            return Err(VsockError::TooLong(path.to_owned()));
        }
        let host = |source| VsockError::Host {
            path: path.to_owned(),
            source,
        };
        // Two VMs may find the stale socket of a third. With the lock, one VM takes the path and
        // the other VM finds the path in use.
        let _lock = lock_directory(path)?;
        let listener = paths::bind(path, Some(0o600)).map_err(|e| match e.kind() {
            io::ErrorKind::AddrInUse => VsockError::Taken(path.to_owned()),
            _ => host(e),
        })?;
        let file = FileIdentity::of(path).map_err(host)?;
        listener.set_nonblocking(true).map_err(host)?;
        Ok(Self {
            cid,
            path: path.to_owned(),
            listener: Arc::new(listener),
            file,
            ports: None,
            worker: None,
        })
    }

    /// Makes the device use `broker`, the socket broker, to connect to the sockets of host ports.
    ///
    /// # Errors
    /// Returns [`VsockError::Host`] if the broker does not accept the path.
    pub fn with_broker(mut self, broker: &Arc<SocketBroker>) -> Result<Self, VsockError> {
        let ports = broker.add_numbered(&self.path);
        self.ports = Some(ports.map_err(|source| VsockError::Host {
            path: self.path.clone(),
            source,
        })?);
        Ok(self)
    }
}

/// Locks the directory of `path`, so that only one process at a time creates sockets in it. Returns
/// `None` if the file system does not support locks.
fn lock_directory(path: &Path) -> Result<Option<Flock<File>>, VsockError> {
    let directory = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let host = |source| VsockError::Host {
        path: directory.to_owned(),
        source,
    };
    let mut file = paths::open(directory, libc::O_RDONLY | libc::O_DIRECTORY).map_err(host)?;
    for _ in 0..LOCK_TRIES {
        file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(Some(lock)),
            Err((file, Errno::EAGAIN | Errno::EINTR)) => file,
            Err((_, Errno::ENOLCK | Errno::EOPNOTSUPP)) => return Ok(None),
            Err((_, error)) => return Err(host(error.into())),
        };
        std::thread::sleep(LOCK_PAUSE);
    }
    Err(VsockError::Locked(directory.to_owned()))
}

/// Notifies the driver that all connections have ended and that the guest CID may differ
/// (5.10.6.7). The event queue has no other use.
///
/// If the driver has provided no buffer in the event queue, it instead receives a reset for each
/// connection when it next uses the connection.
fn send_transport_reset(events: &mut ActiveQueue, memory: &GuestMemoryMmap) {
    let event = TRANSPORT_RESET.to_le_bytes();
    let sent = Cell::new(0);
    let served = serve_queue_while(
        events,
        memory,
        || sent.get() == 0,
        |chain| {
            let buffer = chain.writable().next();
            let fits = |buffer: &Descriptor| buffer.len() >= EVENT_BYTES;
            if let Some(buffer) = buffer.filter(fits)
                && memory.write_slice(&event, buffer.addr()).is_ok()
            {
                sent.set(EVENT_BYTES);
            }
            sent.get()
        },
    );
    if let Err(error) = served {
        log_driver_error(
            "vsock",
            "it does not learn that its connections have ended",
            &error,
        );
    }
}

impl Drop for VsockDevice {
    fn drop(&mut self) {
        self.reset();
        paths::remove_socket(&self.path, Some(self.file));
    }
}

impl VirtioDevice for VsockDevice {
    fn id(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn name(&self) -> &str {
        "vsock"
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        // The configuration consists of guest_cid (5.10.4).
        read_config_bytes(&u64::from(self.cid).to_le_bytes(), offset, data);
    }

    fn activate(&mut self, activation: DeviceActivation) -> Result<(), ActivateError> {
        let mut queues = activation.queues.into_iter();
        let (Some(Some(rx)), Some(Some(tx))) = (queues.next(), queues.next()) else {
            return Err(ActivateError::Driver(
                "a vsock device without its first two queues",
            ));
        };
        if activation.resumed
            && let Some(Some(mut events)) = queues.next()
        {
            send_transport_reset(&mut events, &activation.memory);
        }
        let timer = TimerFd::new().map_err(|error| ActivateError::Host {
            what: "making a timer",
            source: error.into(),
        })?;
        let dialer = match &self.ports {
            Some(ports) => VsockHostDialer::Broker(ports.clone()),
            None => VsockHostDialer::Direct(self.path.clone()),
        };
        let muxer = ConnectionMuxer::new(self.cid.into(), dialer, FIRST_TOKEN);
        let queues = VsockQueues::new(activation.memory, rx, tx, self.listener.clone(), muxer, timer);
        let queues = queues.with_config_notifier(activation.config_change);
        let callback = activation.fatal_error_callback;
        self.worker = Some(DeviceWorker::spawn(
            SandboxedThreadKind::Socket,
            "vsock",
            queues,
            callback,
        )?);
        Ok(())
    }

    fn unsupported_in_snapshot(&self) -> Option<&'static str> {
        None
    }

    fn reset(&mut self) {
        // Connections end when the thread exits.
        self.worker = None;
    }
}
