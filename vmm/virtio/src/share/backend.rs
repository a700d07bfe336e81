//! The process that serves a shared directory, and the connection to it.

use std::ffi::OsString;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use sandbox::{Destination, SocketBroker, paths};
use thiserror::Error;
use vhost::VhostBackend;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::config::{Sandbox, Source};
use super::keeper::{Keeper, Program};

/// Queues: one for what cannot wait, one for requests.
pub(super) const QUEUES: usize = 2;
/// Where distributions put virtiofsd: a program of its own, and that of QEMU before 8.0.
const PLACES: [&str; 5] = [
    "/usr/libexec/virtiofsd",
    "/usr/lib/virtiofsd",
    "/usr/bin/virtiofsd",
    "/usr/lib/qemu/virtiofsd",
    "/usr/lib/qemu-kvm/virtiofsd",
];
/// How long a back end may take for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// What the transport offers to every driver, so what each back end must have.
const NEEDED: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;
/// Makes a directory read-only for what it starts: `$1` is the directory, the command follows.
const READ_ONLY: &str =
    "mount --bind \"$1\" \"$1\" && mount -o remount,bind,ro \"$1\" && shift && exec \"$@\"";

/// Why there is no back end.
#[derive(Debug, Error)]
pub enum BackendError {
    /// No program.
    #[error(
        "virtiofsd is not installed; install Debian's package virtiofsd, or qemu-system-common before Debian 13"
    )]
    NoProgram,
    /// No directory.
    #[error("{0}: not a directory that this user can share")]
    Directory(PathBuf, #[source] io::Error),
    /// A system call failed.
    #[error("{0} failed")]
    Host(&'static str, #[source] io::Error),
    /// Nobody listens.
    #[error("{0}: no back end of vhost-user listens there")]
    Connect(PathBuf, #[source] io::Error),
    /// It does not speak the protocol, or has ended: what it said is in the log.
    #[error("the back end of the shared directory does not answer")]
    Protocol(#[source] vhost::Error),
    /// It cannot do what every driver may ask for.
    #[error("the back end of the shared directory lacks VERSION_1, EVENT_IDX or INDIRECT_DESC")]
    Features,
}

/// Where a back end is found, and whoever keeps it running.
#[derive(Clone, Debug)]
pub(super) struct Backend {
    socket: PathBuf,
    /// Unless this process connects itself.
    destination: Option<Destination>,
    /// For one that is ours.
    own: Option<Arc<Own>>,
}

/// A back end that is ours: it ends with this, and its socket goes.
#[derive(Debug)]
struct Own {
    keeper: Keeper,
    socket: PathBuf,
}

impl Drop for Own {
    fn drop(&mut self) {
        paths::remove_socket(&self.socket, None);
    }
}

impl Backend {
    /// Starts the back end if it is ours; `socket` is then where it listens, in a directory of this user
    /// only, and `keeper` the program that keeps it running.
    pub(super) fn start(source: &Source, socket: &Path, keeper: &Program) -> Result<Self, BackendError> {
        match source {
            Source::Socket(path) => Ok(Self {
                socket: path.clone(),
                destination: None,
                own: None,
            }),
            Source::Directory {
                path,
                read_only,
                sandbox,
            } => {
                let sandbox = sandbox.map(Sandbox::word);
                let command = command(path, *read_only, sandbox)?;
                let host = |what| move |e| BackendError::Host(what, e);
                paths::remove_socket(socket, None);
                let listener =
                    paths::bind(socket, Some(0o600)).map_err(host("making a socket for virtiofsd"))?;
                let keeper = Keeper::start(keeper, &command, listener).map_err(host("starting virtiofsd"))?;
                let socket = socket.to_owned();
                let own = Own {
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

    /// Has `broker` connect from now on: the threads of a confined VM cannot.
    pub(super) fn connect_by(&mut self, broker: &Arc<SocketBroker>) -> Result<(), BackendError> {
        let destination = broker.add(&self.socket);
        self.destination =
            Some(destination.map_err(|e| BackendError::Host("naming its socket to the broker", e))?);
        Ok(())
    }

    /// Connects to it.
    pub(super) fn connect(&self) -> Result<Connection, BackendError> {
        let stream = match &self.destination {
            // Its answers are waited for.
            Some(destination) => destination
                .connect(0)
                .and_then(|stream| stream.set_nonblocking(false).map(|()| stream)),
            None => UnixStream::connect(&self.socket),
        };
        let stream = stream.map_err(|e| BackendError::Connect(self.socket.clone(), e))?;
        Connection::greet(stream)
    }

    /// The first connection, after which the back end is one that serves.
    pub(super) fn first(&self) -> Result<Connection, BackendError> {
        let first = self.connect()?;
        if let Some(own) = &self.own {
            own.keeper.serves();
        }
        Ok(first)
    }
}

/// A back end that answers. virtiofsd ends with its connection.
pub(super) struct Connection {
    pub(super) frontend: Frontend,
    features: u64,
}

impl Connection {
    fn greet(stream: UnixStream) -> Result<Self, BackendError> {
        stream
            .set_read_timeout(Some(ANSWER_LIMIT))
            .and_then(|()| stream.set_write_timeout(Some(ANSWER_LIMIT)))
            .map_err(|e| BackendError::Host("setsockopt", e))?;
        let mut frontend = Frontend::from_stream(stream, QUEUES as u64);
        let mut greet = || {
            let features = frontend.get_features()?;
            if features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0 {
                let known = frontend.get_protocol_features()?;
                frontend.set_protocol_features(known & VhostUserProtocolFeatures::MQ)?;
            }
            frontend.set_owner()?;
            Ok(features)
        };
        let features = greet().map_err(BackendError::Protocol)?;
        if features & NEEDED != NEEDED {
            return Err(BackendError::Features);
        }
        Ok(Self { frontend, features })
    }

    /// What of the driver's features goes to the back end, with the protocol's own.
    pub(super) fn accepted(&self, features: u64) -> u64 {
        self.features & (features | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits())
    }
}

/// What the back end at the other end of `stream` offers: how each connection begins, before anything of the
/// guest's is handed over.
///
/// # Errors
/// It does not speak the protocol, does not answer, or lacks what every driver may ask for.
pub fn greet(stream: UnixStream) -> Result<u64, BackendError> {
    Connection::greet(stream).map(|connection| connection.features)
}

/// The command of a virtiofsd that serves `path` to who connects to its standard input.
fn command(path: &Path, read_only: bool, sandbox: Option<&str>) -> Result<Vec<OsString>, BackendError> {
    let directory = std::fs::canonicalize(path).and_then(|whole| std::fs::read_dir(&whole).map(|_| whole));
    let directory = directory.map_err(|e| BackendError::Directory(path.into(), e))?;
    let program = PLACES
        .into_iter()
        .find(|place| Path::new(place).exists())
        .ok_or(BackendError::NoProgram)?;
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

/// Whether this virtiofsd can be told not to write: QEMU's cannot.
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

    /// An answer to request `number` that carries one number.
    fn answer(number: u32, value: u64) -> Vec<u8> {
        // Version 1, and that it is an answer.
        let header = [number, 0x5, 8].map(u32::to_le_bytes).concat();
        [header, value.to_le_bytes().to_vec()].concat()
    }

    /// What comes of a back end that says `bytes` and no more.
    fn said(bytes: &[u8]) -> Result<u64, BackendError> {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(bytes).unwrap();
        theirs.shutdown(Shutdown::Write).unwrap();
        greet(ours)
    }

    const PROTOCOL: u64 = 1 << 30;

    #[test]
    fn a_back_end_is_taken_with_what_drivers_need_only() {
        assert_eq!(said(&answer(1, NEEDED)).unwrap(), NEEDED);
        let both = [answer(1, NEEDED | PROTOCOL), answer(15, u64::MAX)].concat();
        assert_eq!(said(&both).unwrap(), NEEDED | PROTOCOL);
        assert!(matches!(
            said(&answer(1, NEEDED >> 1)),
            Err(BackendError::Features)
        ));
        // The answer to another request, half of one, and one that ends before the second.
        for bytes in [
            &answer(2, NEEDED)[..],
            &answer(1, NEEDED)[..15],
            &answer(1, NEEDED | PROTOCOL),
            b"",
        ] {
            assert!(
                matches!(said(bytes), Err(BackendError::Protocol(_))),
                "{bytes:x?}"
            );
        }
    }

    proptest! {
        /// Whatever a back end says, the connection is refused, or it is one with all that drivers need.
        #[test]
        fn no_answer_is_taken_for_more_than_it_says(
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
