//! The backend process of a shared directory, and the connection to it.

use std::ffi::OsString;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use sandbox::{SocketBroker, SocketDestination, paths};
use thiserror::Error;
use vhost::VhostBackend;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::config::{ShareBackendSource, VirtiofsdSandbox};
use super::keeper::{BackendKeeper, BackendKeeperCommand};

/// Number of queues of a virtio-fs device: one for high-priority requests, one for other requests.
pub(super) const QUEUES: usize = 2;
/// Paths at which distributions install virtiofsd, as a separate program or as part of QEMU before
/// 8.0.
const PROGRAM_PATHS: [&str; 5] = [
    "/usr/libexec/virtiofsd",
    "/usr/lib/virtiofsd",
    "/usr/bin/virtiofsd",
    "/usr/lib/qemu/virtiofsd",
    "/usr/lib/qemu-kvm/virtiofsd",
];
/// Timeout for a reply of the backend to a vhost-user request.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Feature bits that every backend must support, because the transport offers them to every driver.
const NEEDED: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;
/// Shell command that makes the directory `$1` read-only, and then runs the command that consists
/// of the other arguments.
const READ_ONLY: &str =
    "mount --bind \"$1\" \"$1\" && mount -o remount,bind,ro \"$1\" && shift && exec \"$@\"";

/// Reason why the backend of a shared directory is unavailable.
#[derive(Debug, Error)]
pub enum VhostUserBackendError {
    /// virtiofsd is not installed.
    #[error(
        "virtiofsd is not installed; install Debian's package virtiofsd, or qemu-system-common before Debian 13"
    )]
    NoProgram,
    /// The shared directory cannot be opened.
    #[error("{0}: cannot share; must be a directory that this user may read")]
    Directory(PathBuf, #[source] io::Error),
    /// A system call, which the first field names, failed.
    #[error("{0} failed")]
    Host(&'static str, #[source] io::Error),
    /// No process listens at the backend's socket.
    #[error("{0}: no vhost-user back end listens on this socket")]
    Connect(PathBuf, #[source] io::Error),
    /// The backend violates the vhost-user protocol or has exited. Its output is in the log.
    #[error("the back end of the shared directory does not respond")]
    Protocol(#[source] vhost::Error),
    /// The backend lacks required virtio features.
    #[error("the back end of the shared directory lacks VERSION_1, EVENT_IDX or INDIRECT_DESC")]
    Features,
}

/// The backend of a shared directory: its socket and, if the VMM started it, its supervisor.
#[derive(Clone, Debug)]
pub(super) struct Backend {
    socket: PathBuf,
    /// How the socket broker, a helper process, connects to the backend's socket. `None` if this
    /// process connects directly.
    destination: Option<SocketDestination>,
    /// The supervisor and the socket of a virtiofsd that the VMM started. `None` for an external
    /// backend.
    own: Option<Arc<OwnedBackend>>,
}

/// A virtiofsd started by the VMM. Dropping this value stops virtiofsd and removes its socket.
#[derive(Debug)]
struct OwnedBackend {
    keeper: BackendKeeper,
    socket: PathBuf,
}

impl Drop for OwnedBackend {
    fn drop(&mut self) {
        paths::remove_socket(&self.socket, None);
    }
}

impl Backend {
    /// Prepares the backend. If `source` is a directory, starts a virtiofsd that listens at
    /// `socket`, under the supervision of the program `keeper`. `socket` must be in a directory
    /// that only this user can access.
    pub(super) fn start(
        source: &ShareBackendSource,
        socket: &Path,
        keeper: &BackendKeeperCommand,
    ) -> Result<Self, VhostUserBackendError> {
        match source {
            ShareBackendSource::Socket(path) => Ok(Self {
                socket: path.clone(),
                destination: None,
                own: None,
            }),
            ShareBackendSource::Directory {
                path,
                read_only,
                sandbox,
            } => {
                let sandbox = sandbox.map(VirtiofsdSandbox::word);
                let command = command(path, *read_only, sandbox)?;
                let host = |what| move |e| VhostUserBackendError::Host(what, e);
                paths::remove_socket(socket, None);
                let listener =
                    paths::bind(socket, Some(0o600)).map_err(host("making a socket for virtiofsd"))?;
                let keeper =
                    BackendKeeper::start(keeper, &command, listener).map_err(host("starting virtiofsd"))?;
                let socket = socket.to_owned();
                let own = OwnedBackend {
                    keeper,
                    socket: socket.clone(),
                };
                Ok(Self {
                    socket,
                    destination: None,
                    own: Some(Arc::new(own)),
                })
            }
        }
    }

    /// Makes this process use `broker` for later connections to the backend. The threads of a
    /// confined VM cannot connect themselves.
    pub(super) fn set_broker(&mut self, broker: &Arc<SocketBroker>) -> Result<(), VhostUserBackendError> {
        let destination = broker.add(&self.socket);
        self.destination =
            Some(destination.map_err(|e| VhostUserBackendError::Host("naming its socket to the broker", e))?);
        Ok(())
    }

    /// Connects to the backend and completes the handshake.
    pub(super) fn connect(&self) -> Result<BackendConnection, VhostUserBackendError> {
        let stream = match &self.destination {
            // The backend's answers are read synchronously, so the socket must be blocking.
            Some(destination) => destination
                .connect(0)
                .and_then(|stream| stream.set_nonblocking(false).map(|()| stream)),
            None => paths::connect(&self.socket),
        };
        let stream = stream.map_err(|e| VhostUserBackendError::Connect(self.socket.clone(), e))?;
        BackendConnection::negotiate(stream)
    }

    /// Connects to the backend for the first time, and reports to the supervisor that it works.
    pub(super) fn first(&self) -> Result<BackendConnection, VhostUserBackendError> {
        let first = self.connect()?;
        if let Some(own) = &self.own {
            own.keeper.report_ready();
        }
        Ok(first)
    }
}

/// A connection to a backend, after the handshake. virtiofsd exits when its connection is closed.
pub(super) struct BackendConnection {
    pub(super) frontend: Frontend,
    features: u64,
}

impl BackendConnection {
    fn negotiate(stream: UnixStream) -> Result<Self, VhostUserBackendError> {
        stream
            .set_read_timeout(Some(ANSWER_LIMIT))
            .and_then(|()| stream.set_write_timeout(Some(ANSWER_LIMIT)))
            .map_err(|e| VhostUserBackendError::Host("setsockopt", e))?;
        let mut frontend = Frontend::from_stream(stream, QUEUES as u64);
        let mut negotiate = || {
            let features = frontend.get_features()?;
            if features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0 {
                let known = frontend.get_protocol_features()?;
                frontend.set_protocol_features(known & VhostUserProtocolFeatures::MQ)?;
            }
            frontend.set_owner()?;
            Ok(features)
        };
        let features = negotiate().map_err(VhostUserBackendError::Protocol)?;
        if features & NEEDED != NEEDED {
            return Err(VhostUserBackendError::Features);
        }
        Ok(Self { frontend, features })
    }

    /// Returns the features to enable in the backend: those in `features`, which the driver
    /// accepted, that the backend also offers, and the vhost-user protocol features.
    pub(super) fn accepted(&self, features: u64) -> u64 {
        self.features & (features | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits())
    }
}

/// Negotiates features with the backend at the other end of `stream` and returns the features that
/// it offers. No guest resource has been passed to the backend at this point.
///
/// # Errors
/// Returns [`VhostUserBackendError::Protocol`] if the backend violates the protocol or does not
/// answer, and [`VhostUserBackendError::Features`] if it lacks required features.
pub fn negotiate(stream: UnixStream) -> Result<u64, VhostUserBackendError> {
    BackendConnection::negotiate(stream).map(|connection| connection.features)
}

/// Returns the command line of a virtiofsd that exports the directory `path`. Its standard input
/// must be a listening socket, on which it accepts clients.
fn command(
    path: &Path,
    read_only: bool,
    sandbox: Option<&str>,
) -> Result<Vec<OsString>, VhostUserBackendError> {
    let directory = sandbox::paths::resolve_directory(path);
    let directory = directory.map_err(|e| VhostUserBackendError::Directory(path.into(), e))?;
    let program = PROGRAM_PATHS
        .into_iter()
        .find(|place| Path::new(place).exists())
        .ok_or(VhostUserBackendError::NoProgram)?;
    let itself = read_only && has_read_only(program);
    let mut command: Vec<OsString> = Vec::new();
    if read_only && !itself {
        command.extend(["unshare", "-m", "sh", "-c", READ_ONLY, "sh"].map(Into::into));
        command.push(directory.clone().into());
    }
    command.extend([program, "-f", "--fd=0", "-o", "log_level=err", "-o"].map(Into::into));
    let mut source = OsString::from("source=");
    source.push(&directory);
    command.push(source);
    if let Some(sandbox) = sandbox {
        command.extend(["-o".into(), format!("sandbox={sandbox}").into()]);
    }
    if itself {
        command.push("--readonly".into());
    }
    Ok(command)
}

/// Returns whether the virtiofsd `program` has a read-only option. The one of QEMU has none.
fn has_read_only(program: &str) -> bool {
    let help = Command::new(program)
        .arg("--help")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    help.is_ok_and(|help| String::from_utf8_lossy(&help.stdout).contains("--readonly"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::Shutdown;

    use proptest::prelude::*;

    use super::*;

    /// Returns the reply of a backend to the vhost-user request `number`, with the 64-bit payload
    /// `value`.
    fn answer(number: u32, value: u64) -> Vec<u8> {
        // Header flags: protocol version 1 and the reply bit.
        let header = [number, 0x5, 8].map(u32::to_le_bytes).concat();
        [header, value.to_le_bytes().to_vec()].concat()
    }

    /// Returns the result of a handshake in which the backend sends `bytes`.
    fn said(bytes: &[u8]) -> Result<u64, VhostUserBackendError> {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(bytes).unwrap();
        theirs.shutdown(Shutdown::Write).unwrap();
        negotiate(ours)
    }

    const PROTOCOL: u64 = 1 << 30;

    #[test]
    fn backend_must_offer_required_features() {
        assert_eq!(said(&answer(1, NEEDED)).unwrap(), NEEDED);
        let both = [answer(1, NEEDED | PROTOCOL), answer(15, u64::MAX)].concat();
        assert_eq!(said(&both).unwrap(), NEEDED | PROTOCOL);
        assert!(matches!(
            said(&answer(1, NEEDED >> 1)),
            Err(VhostUserBackendError::Features)
        ));
        // Invalid answers: to another request, truncated, without a second answer, and empty.
        for bytes in [
            &answer(2, NEEDED)[..],
            &answer(1, NEEDED)[..15],
            &answer(1, NEEDED | PROTOCOL),
            b"",
        ] {
            assert!(
                matches!(said(bytes), Err(VhostUserBackendError::Protocol(_))),
                "{bytes:x?}"
            );
        }
    }

    proptest! {
        /// If the backend sends arbitrary bytes, feature negotiation fails or returns all required
        /// features.
        #[test]
        fn arbitrary_handshakes_are_validated(
            number in prop_oneof![Just(1), any::<u32>()],
            flags in prop_oneof![Just(5), any::<u32>()],
            size in prop_oneof![Just(8), any::<u32>()],
            rest in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            let header = [number, flags, size].map(u32::to_le_bytes).concat();
            if let Ok(features) = said(&[header, rest].concat()) {
                prop_assert_eq!(features & NEEDED, NEEDED);
            }
        }
    }
}
