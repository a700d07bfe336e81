//! Sockets between the guest and programs of the host (virtio 1.2, 5.10), by Firecracker's convention for
//! Unix sockets.
//!
//! | module | story |
//! |---|---|
//! | `packet` | the header, and what it can be for |
//! | `chains` | packets in chains of descriptors |
//! | `connection` | one connection: credit both ways, half closes |
//! | `muxer` | all of them, and those that are being made |
//! | `queues` | the device's thread: queues and Unix sockets |
//!
//! A program of the host connects to the device's Unix socket, writes `CONNECT PORT` and a newline, and reads
//! `OK PORT` and a newline once a program of the guest has accepted; if none does, the socket is closed. A
//! program of the guest that connects to address 2, port P, reaches the Unix socket whose path has `_P`
//! behind it.

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
use sandbox::{Destination, SocketBroker, ThreadKind};
use thiserror::Error;
use vmm_sys_util::timerfd::TimerFd;

use crate::device::{ActivateError, Activation, VirtioDevice, read_config_bytes};
use crate::worker::Worker;

use self::muxer::{Dialer, Muxer};
use self::queues::{FIRST_TOKEN, Queues};

/// The device's number (virtio 1.2, section 5).
const VIRTIO_ID_VSOCK: u32 = 19;
/// Of the queues to the guest, from the guest, and of events.
const QUEUE_SIZES: [u16; 3] = [256, 256, 16];
/// The address of the guest when none is given: the first that can be one.
pub const DEFAULT_CID: u32 = 3;
/// Longest path of a Unix socket with the longest `_PORT` behind it (unix(7), sun_path).
const MAX_PATH: usize = 107 - "_4294967295".len();

/// How often the lock of a directory is tried for. Who has it looks at one path and makes one socket.
const LOCK_TRIES: usize = 300;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// What `--vsock` asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VsockConfig {
    /// Address of the guest.
    pub cid: u32,
    /// Path of the Unix socket; without it the program chooses.
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

/// What is wrong with the words that ask for a device.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum VsockConfigError {
    /// No such word.
    #[error("'{0}' is unknown: use cid=N,socket=PATH, either or both")]
    Unknown(String),
    /// No address of a guest.
    #[error("cid={0}: must be from 3 to 4294967294")]
    Cid(String),
    /// No path.
    #[error("socket= needs a path")]
    NoPath,
}

impl FromStr for VsockConfig {
    type Err = VsockConfigError;

    /// `cid=N`, `socket=PATH` or both in this order; a path may hold commas.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut config = Self::default();
        let mut rest = text;
        if let Some(after) = rest.strip_prefix("cid=") {
            let (number, behind) = after.split_once(',').unwrap_or((after, ""));
            // 0xFFFFFFFF means anyone (virtio 1.2, 5.10.4).
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

/// Why there is no device.
#[derive(Debug, Error)]
pub enum VsockError {
    /// A path that Unix sockets cannot have.
    #[error("{}: longer than {MAX_PATH} bytes; choose a shorter path", .0.display())]
    TooLong(PathBuf),
    /// Somebody listens there, or it is no socket.
    #[error("{}: there is a file already, or a VM that uses it; choose another path or remove it", .0.display())]
    Taken(PathBuf),
    /// Somebody holds the lock under which paths are looked at and taken.
    #[error("{}: another program has locked this directory; choose another for socket=", .0.display())]
    Locked(PathBuf),
    /// The host refuses.
    #[error("{}", path.display())]
    Host {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// The device.
#[derive(Debug)]
pub struct VsockDevice {
    cid: u32,
    path: PathBuf,
    listener: Arc<UnixListener>,
    /// The file of our socket, which another process may have replaced by the end.
    file: FileIdentity,
    /// The sockets of the host's ports, if a broker connects to them.
    ports: Option<Destination>,
    worker: Option<Worker>,
}

impl VsockDevice {
    /// A device that listens at `path`, which only the user of this process can connect to.
    ///
    /// # Errors
    /// [`VsockError`].
    pub fn new(cid: u32, path: &Path) -> Result<Self, VsockError> {
        if path.as_os_str().len() > MAX_PATH {
            return Err(VsockError::TooLong(path.to_owned()));
        }
        let host = |source| VsockError::Host {
            path: path.to_owned(),
            source,
        };
        // Two VMs that find the socket of a third that is dead: one takes its path, the other finds it taken.
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

    /// The same device, whose guest reaches the sockets of the host's ports by `broker`.
    ///
    /// # Errors
    /// [`VsockError::Host`] if the broker does not take the path.
    pub fn with_broker(mut self, broker: &Arc<SocketBroker>) -> Result<Self, VsockError> {
        let ports = broker.add_numbered(&self.path);
        self.ports = Some(ports.map_err(|source| VsockError::Host {
            path: self.path.clone(),
            source,
        })?);
        Ok(self)
    }
}

/// Locks the directory of `path` against others who look at a path in it and take it. `None`: its file system
/// has no locks.
fn lock_directory(path: &Path) -> Result<Option<Flock<File>>, VsockError> {
    let directory = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let host = |source| VsockError::Host {
        path: directory.to_owned(),
        source,
    };
    let mut file = File::open(directory).map_err(host)?;
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
        // guest_cid (5.10.4).
        read_config_bytes(&u64::from(self.cid).to_le_bytes(), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let host = |what| move |source| ActivateError::Host { what, source };
        // The third is for events, of which there are none: this device is not moved to another host.
        let mut queues = activation.queues.into_iter();
        let (Some(Some(rx)), Some(Some(tx))) = (queues.next(), queues.next()) else {
            return Err(ActivateError::Driver(
                "a vsock device without its first two queues",
            ));
        };
        let timer = TimerFd::new().map_err(|error| ActivateError::Host {
            what: "making a timer",
            source: error.into(),
        })?;
        let dialer = match &self.ports {
            Some(ports) => Dialer::Broker(ports.clone()),
            None => Dialer::Direct(self.path.clone()),
        };
        let muxer = Muxer::new(self.cid.into(), dialer, FIRST_TOKEN);
        let queues = Queues::new(activation.memory, rx, tx, self.listener.clone(), muxer, timer);
        let queues = queues.telling(activation.config_change);
        let worker = Worker::spawn(ThreadKind::Socket, self.name(), queues, activation.last_resort);
        self.worker = Some(worker.map_err(host("starting a thread"))?);
        Ok(())
    }

    fn reset(&mut self) {
        // Its connections end with the thread.
        self.worker = None;
    }
}
