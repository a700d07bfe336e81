//! Connections to the agent in a guest.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use control_api::client::ClientError;
use control_api::socket_dir;
use guest_agent::PORT;
use guest_agent::request::{AgentOperation, AgentRequest, VERSION};
use guest_agent::wire::{AgentFrameError, Frame, FrameKind, read_frame, write_frame};

use super::{NAP, connect};

/// Time limit for the guest kernel to accept a connection, and for the agent to accept a request.
const TIMEOUT: Duration = Duration::from_secs(40);

/// Error returned when a request to the guest's agent fails.
#[derive(Debug, thiserror::Error)]
pub enum GuestAgentError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("VM '{0}': vsock socket not found; start the VM with --vsock, or name the socket with --socket")]
    NoVsock(String),
    #[error("{}", path.display())]
    Socket {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "the guest of VM '{0}' does not respond over vsock: it has not booted yet, or has no \
        driver (Linux: modprobe vmw_vsock_virtio_transport)"
    )]
    NoAnswer(String),
    #[error("the guest of VM '{0}' runs no agent; start perfvisor-agent there (see docs/guide/exec.md)")]
    NoAgent(String),
    #[error("VM '{0}' ended while its agent was waited for")]
    Ended(String),
    #[error("the guest of VM '{name}': {why}")]
    Refused { name: String, why: String },
    #[error("the guest of VM '{name}'")]
    Wire {
        name: String,
        #[source]
        source: AgentFrameError,
    },
    #[error("the command and its environment exceed the limit of the agent")]
    TooLong,
}

/// A stream with a single deadline for all reads. A slow sender therefore cannot delay the reader
/// indefinitely.
struct DeadlineStream<'s> {
    stream: &'s UnixStream,
    end: Instant,
}

impl<'s> DeadlineStream<'s> {
    fn patience(stream: &'s UnixStream) -> Self {
        let end = Instant::now() + TIMEOUT;
        Self { stream, end }
    }
}

impl Read for DeadlineStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        // A timeout of zero would be rejected as invalid, so wait for at least one millisecond.
        self.stream
            .set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        self.stream.read(buffer)
    }
}

/// Address of the agent in a guest.
#[derive(Clone, Debug)]
pub struct AgentAddress {
    /// Name of the VM.
    pub name: String,
    /// Path of the vsock socket, if it differs from the default.
    pub socket: Option<PathBuf>,
    /// Time for which connecting is retried while the agent is unavailable; `None` to try only
    /// once.
    pub wait: Option<Duration>,
}

impl AgentAddress {
    /// Connects to the agent and requests `job`. Returns after the agent has accepted the request.
    ///
    /// # Errors
    /// Returns [`GuestAgentError`] if the agent is unreachable or refuses the request.
    pub fn request_job(&self, job: AgentOperation) -> Result<UnixStream, GuestAgentError> {
        let until = self.wait.map(|wait| Instant::now() + wait);
        let mut before = None;
        let stream = loop {
            // Retry until the deadline, because the VM, its sockets, the guest kernel or the agent
            // may become available later.
            match (self.connect(until), until) {
                (Ok(stream), _) => break stream,
                (Err(error), Some(_)) if has_ended(before.as_ref(), &error) => {
                    return Err(GuestAgentError::Ended(self.name.clone()));
                }
                (Err(error), Some(until)) if Instant::now() < until => {
                    before = Some(error);
                    std::thread::sleep(10 * NAP);
                }
                (Err(error), _) => return Err(last(before, error)),
            }
        };
        let version = VERSION;
        let request =
            serde_json::to_vec(&AgentRequest { version, job }).map_err(|_| GuestAgentError::TooLong)?;
        write_frame(&mut &stream, FrameKind::Request, &request).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => GuestAgentError::TooLong,
            _ => self.wire(error.into()),
        })?;
        match self.next(&mut DeadlineStream::patience(&stream))? {
            Frame {
                kind: FrameKind::Accepted,
                ..
            } => {}
            frame => return Err(self.refused(&frame)),
        }
        stream
            .set_read_timeout(None)
            .map_err(|error| self.wire(error.into()))?;
        Ok(stream)
    }

    /// Connects to the agent. Fails at `until` or after the default timeout, whichever is earlier.
    fn connect(&self, until: Option<Instant>) -> Result<UnixStream, GuestAgentError> {
        let path = match &self.socket {
            Some(path) => path.clone(),
            None => {
                // Connect to the control socket first, because its error lists the running VMs if
                // the VM does not exist.
                let name = connect(Some(&self.name), None)?.info().name.clone();
                socket_dir::vsock_path(&socket_dir::directory_of(&name), &name)
            }
        };
        let connected = UnixStream::connect(&path).and_then(|stream| {
            (&stream).write_all(format!("CONNECT {PORT}\n").as_bytes())?;
            Ok(stream)
        });
        let stream = match connected {
            Ok(stream) => stream,
            Err(_) if self.socket.is_none() => return Err(GuestAgentError::NoVsock(self.name.clone())),
            Err(source) => return Err(GuestAgentError::Socket { path, source }),
        };
        let mut reader = DeadlineStream::patience(&stream);
        reader.end = until.map_or(reader.end, |until| until.min(reader.end));
        let mut line = Vec::new();
        loop {
            let mut byte = [0];
            match reader.read(&mut byte) {
                Ok(1) if byte == *b"\n" => break,
                Ok(1) if line.len() < 64 => line.extend(byte),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(GuestAgentError::NoAnswer(self.name.clone()));
                }
                _ => return Err(GuestAgentError::NoAgent(self.name.clone())),
            }
        }
        if line.starts_with(b"OK ") {
            Ok(stream)
        } else {
            Err(GuestAgentError::NoAgent(self.name.clone()))
        }
    }

    /// Reads the next frame from the agent.
    ///
    /// # Errors
    /// Returns an error if the connection fails or ends.
    pub fn next(&self, stream: &mut impl Read) -> Result<Frame, GuestAgentError> {
        match read_frame(stream) {
            Ok(Some(frame)) => Ok(frame),
            Ok(None) => Err(self.wire(io::Error::from(io::ErrorKind::UnexpectedEof).into())),
            Err(source) => Err(self.wire(source)),
        }
    }

    /// Converts a rejection or an unexpected frame to an error.
    pub fn refused(&self, frame: &Frame) -> GuestAgentError {
        let why = match frame.kind {
            FrameKind::Refused => frame.text(),
            kind => format!("its agent sent an unexpected frame ({kind:?})"),
        };
        let name = self.name.clone();
        GuestAgentError::Refused { name, why }
    }

    fn wire(&self, source: AgentFrameError) -> GuestAgentError {
        let name = self.name.clone();
        GuestAgentError::Wire { name, source }
    }
}

/// Returns whether the VM has terminated since the previous connection attempt. `before` is the
/// error of that attempt, which shows whether the VM existed, and `error` is the error of the last
/// attempt. A VM that did not exist may be about to start.
fn has_ended(before: Option<&GuestAgentError>, error: &GuestAgentError) -> bool {
    let existed = matches!(
        before,
        Some(GuestAgentError::NoAnswer(_) | GuestAgentError::NoAgent(_))
    );
    existed && matches!(error, GuestAgentError::Client(ClientError::NoSuchVm { .. }))
}

/// Returns the error to report after the last connection attempt, which failed with `error`. If
/// this attempt timed out after the guest had refused an earlier connection, the refusal `before`
/// is returned, because it shows that the guest has booted and has the vsock driver.
fn last(before: Option<GuestAgentError>, error: GuestAgentError) -> GuestAgentError {
    match (before, error) {
        (Some(refused @ GuestAgentError::NoAgent(_)), GuestAgentError::NoAnswer(_)) => refused,
        (_, error) => error,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use guest_agent::request::ExecRequest;

    use super::*;

    fn way(socket: &Path, wait: Duration) -> AgentAddress {
        AgentAddress {
            name: "vm".into(),
            socket: Some(socket.into()),
            wait: Some(wait),
        }
    }

    fn job() -> AgentOperation {
        AgentOperation::Exec(ExecRequest {
            argv: vec!["true".into()],
            env: vec![],
            cwd: None,
            terminal: None,
        })
    }

    /// Simulates an agent that accepts every request.
    fn accept(listener: &UnixListener) {
        let (mut stream, _) = listener.accept().unwrap();
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            line.extend(byte);
        }
        stream.write_all(b"OK 1\n").unwrap();
        let request = read_frame(&mut stream).unwrap().unwrap();
        assert_eq!(request.kind, FrameKind::Request);
        write_frame(&mut stream, FrameKind::Accepted, &[]).unwrap();
    }

    /// A command may start to wait for an agent before the guest or even the VM exists.
    #[test]
    fn wait_may_precede_vm_start() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("vsock");
        let late = socket.clone();
        let agent = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            accept(&UnixListener::bind(late).unwrap());
        });
        way(&socket, Duration::from_secs(600)).request_job(job()).unwrap();
        agent.join().unwrap();
        let error = way(&dir.path().join("none"), Duration::from_millis(100)).request_job(job());
        assert!(matches!(error, Err(GuestAgentError::Socket { .. })), "{error:?}");
    }

    /// The wait for an agent ends when the VM terminates. Regression test: the wait for the agent
    /// of a terminated VM lasted until the deadline.
    #[test]
    fn ended_vm_is_not_waited_for() {
        let missing = || {
            GuestAgentError::Client(ClientError::NoSuchVm {
                name: "g".into(),
                others: Vec::new(),
            })
        };
        assert!(has_ended(
            Some(&GuestAgentError::NoAnswer("g".into())),
            &missing()
        ));
        assert!(!has_ended(None, &missing()));
        assert!(!has_ended(Some(&missing()), &missing()));
        assert!(!has_ended(
            Some(&GuestAgentError::NoAgent("g".into())),
            &GuestAgentError::NoAnswer("g".into())
        ));
    }

    /// The user's deadline also limits the wait for an unresponsive guest kernel.
    #[test]
    fn user_deadline_bounds_wait_for_silent_guest() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("vsock");
        let listener = UnixListener::bind(&socket).unwrap();
        let began = Instant::now();
        let error = way(&socket, Duration::from_millis(300)).request_job(job());
        assert!(matches!(error, Err(GuestAgentError::NoAnswer(_))), "{error:?}");
        assert!(began.elapsed() < TIMEOUT, "{:?}", began.elapsed());
        drop(listener);
    }

    #[test]
    fn slow_agent_hits_deadline() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let drips = std::thread::spawn(move || {
            while theirs.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let mut reader = DeadlineStream {
            stream: &ours,
            end: Instant::now() + Duration::from_millis(200),
        };
        let error = std::iter::from_fn(|| Some(reader.read_exact(&mut [0; 64]))).find_map(Result::err);
        assert_eq!(error.unwrap().kind(), io::ErrorKind::WouldBlock);
        drop(ours);
        drips.join().unwrap();
    }

    /// A timeout of the last attempt does not hide that the guest refused an earlier connection.
    /// Regression test: a guest without an agent was reported as lacking the driver if the last
    /// attempt began just before the deadline.
    #[test]
    fn refused_connection_is_reported_at_deadline() {
        let (refused, silent) = (
            GuestAgentError::NoAgent("g".into()),
            GuestAgentError::NoAnswer("g".into()),
        );
        assert!(matches!(last(Some(refused), silent), GuestAgentError::NoAgent(_)));
        let (refused, silent) = (
            GuestAgentError::NoAgent("g".into()),
            GuestAgentError::NoAnswer("g".into()),
        );
        assert!(matches!(last(None, silent), GuestAgentError::NoAnswer(_)));
        assert!(matches!(
            last(Some(GuestAgentError::NoAnswer("g".into())), refused),
            GuestAgentError::NoAgent(_)
        ));
    }
}
