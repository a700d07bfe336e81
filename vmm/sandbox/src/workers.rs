//! Processes that handle guest-controlled data (workers). The VM can continue without the results
//! of a worker. Each worker performs one task and exits. Its seccomp filter and its limits on
//! memory and CPU time are strict, and its only descriptor is one socket.
//!
//! | file | contents |
//! |---|---|
//! | `keeper` | the process that starts workers one at a time and reports how each exited |
//! | `worker_exit` | termination status of a worker |
//!
//! A running VM may not start processes. The keeper, which starts the workers, is therefore forked
//! before the VM is confined, with the privileges that the VM has at that time, and drops them
//! immediately. The keeper never reads guest data.

pub(crate) mod keeper;
mod worker_exit;

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use seccompiler::{BackendError, BpfProgram, SeccompAction};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

pub use keeper::WorkerLimits;
use keeper::{KeeperConfig, KeeperMessage, START_WORKER, TERMINATE_WORKER};
pub use worker_exit::WorkerExit;

use crate::start::{SandboxError, SeccompMode};
use crate::{SandboxedThreadKind, filter, lists};

/// Timeout for an answer from the keeper and for a message from a worker.
const PATIENCE: Duration = Duration::from_secs(180);

/// Restrictions of a helper process of the VM.
#[derive(Clone, Copy, Debug)]
pub struct ProcessConfinement {
    /// Action of the process's seccomp filter for a forbidden system call.
    pub seccomp: SeccompMode,
    /// `true` if landlock denies the process access to all files. Has no effect on kernels without
    /// landlock.
    pub landlock: bool,
}

impl ProcessConfinement {
    /// Returns the seccomp action for a call that is not on the list of a process, or `None` if the
    /// process has no filter.
    pub(crate) fn otherwise(self) -> Option<SeccompAction> {
        match self.seccomp {
            SeccompMode::Off => None,
            // The process has no handler that could log a violation.
            SeccompMode::On => Some(SeccompAction::KillProcess),
            SeccompMode::Log => Some(SeccompAction::Log),
        }
    }
}

/// Error returned when a helper process of the VM cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum HelperProcessStartError {
    /// A system call failed.
    #[error("{0} failed")]
    Os(&'static str, #[source] io::Error),
    /// The seccomp filters could not be created.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
}

/// Error returned when no worker was started.
#[derive(Debug, thiserror::Error)]
pub enum WorkerStartError {
    /// The keeper has exited or timed out, and no further workers can be started.
    #[error("the process that starts workers has exited")]
    NoKeeper(#[source] io::Error),
    /// The keeper failed to start a worker.
    #[error("cannot start the worker")]
    Refused(#[source] io::Error),
}

/// The connection to the worker keeper. The keeper and its current worker exit when this value is
/// dropped.
#[derive(Debug)]
pub struct WorkerKeeper {
    /// Connection to the keeper, `None` after the keeper has exited.
    control: Mutex<Option<UnixStream>>,
}

impl WorkerKeeper {
    /// Forks the keeper from this process, which must have no thread other than the calling one.
    /// The keeper calls `give_up` to drop its privileges. Each worker calls `work` with its socket
    /// and its number, counted from 0.
    ///
    /// # Errors
    /// Returns a [`HelperProcessStartError`] if the keeper cannot be started or its filters cannot
    /// be created.
    pub fn start(
        confinement: ProcessConfinement,
        limits: WorkerLimits,
        give_up: fn() -> bool,
        work: fn(UnixStream, u32),
    ) -> Result<Self, HelperProcessStartError> {
        let (ours, its) = UnixStream::pair().map_err(|e| HelperProcessStartError::Os("socketpair", e))?;
        ours.set_read_timeout(Some(PATIENCE))
            .map_err(|e| HelperProcessStartError::Os("setsockopt", e))?;
        let otherwise = confinement.otherwise();
        let filters = filters(otherwise.as_ref());
        let job = KeeperConfig {
            filters: filters.map_err(|e| SandboxError::Compile(SandboxedThreadKind::Profiler, e))?,
            otherwise,
            landlock: confinement.landlock,
            limits,
            timeout: PATIENCE,
            give_up,
            work,
        };
        keeper::start(its, job).map_err(|e| HelperProcessStartError::Os("fork", e))?;
        Ok(Self {
            control: Mutex::new(Some(ours)),
        })
    }

    /// Starts a worker. Only one worker exists at a time: if there is one, the call blocks until
    /// its `WorkerProcess` is dropped.
    ///
    /// # Errors
    /// Returns a [`WorkerStartError`] if the keeper is unavailable or cannot start a worker.
    pub fn begin(&self) -> Result<WorkerProcess<'_>, WorkerStartError> {
        let mut control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        match with_keeper(&mut control, begun) {
            Ok(Ok(socket)) => Ok(WorkerProcess {
                control,
                socket,
                ended: false,
            }),
            Ok(Err(refused)) => Err(WorkerStartError::Refused(refused)),
            Err(e) => Err(WorkerStartError::NoKeeper(e)),
        }
    }
}

/// Receives the keeper's response to the request for a worker: the socket of the new worker, or the
/// keeper's error if no worker was started.
///
/// # Errors
/// Returns an error if the keeper does not answer.
fn begun(control: &mut UnixStream) -> io::Result<io::Result<UnixStream>> {
    control.write_all(&[START_WORKER])?;
    let mut word = [0; KeeperMessage::BYTES];
    let (count, socket) = loop {
        match control.recv_with_fd(&mut word) {
            Ok(received) => break received,
            Err(e) if e.errno() == libc::EINTR => {}
            Err(e) => return Err(io::Error::from_raw_os_error(e.errno())),
        }
    };
    let rest = word.get_mut(count..).unwrap_or_default();
    control.read_exact(rest)?;
    match KeeperMessage::from_bytes(word) {
        KeeperMessage::StartedWorker => {
            let socket = socket.ok_or(ErrorKind::InvalidData)?;
            Ok(Ok(UnixStream::from(OwnedFd::from(socket))))
        }
        KeeperMessage::Failed(errno) => Ok(Err(io::Error::from_raw_os_error(errno))),
        KeeperMessage::WorkerExit { .. } => Err(ErrorKind::InvalidData.into()),
    }
}

/// Performs the exchange `ask` with the keeper. Closes the connection after an error such as a
/// timeout, because a late response would be mistaken for the response to another request. The
/// keeper exits when the connection closes. The filters of every thread permit closing a socket.
fn with_keeper<T>(
    control: &mut Option<UnixStream>,
    ask: impl FnOnce(&mut UnixStream) -> io::Result<T>,
) -> io::Result<T> {
    let asked = control
        .as_mut()
        .ok_or_else(|| ErrorKind::NotConnected.into())
        .and_then(ask);
    asked.inspect_err(|_| *control = None)
}

/// Receives the termination status of a worker.
fn ended(control: &mut UnixStream) -> io::Result<WorkerExit> {
    control.write_all(&[TERMINATE_WORKER])?;
    let mut word = [0; KeeperMessage::BYTES];
    control.read_exact(&mut word)?;
    match KeeperMessage::from_bytes(word) {
        KeeperMessage::WorkerExit { status, text } => {
            let mut words = vec![0; text.into()];
            control.read_exact(&mut words)?;
            Ok(WorkerExit::of(status, &words))
        }
        KeeperMessage::StartedWorker | KeeperMessage::Failed(_) => Err(ErrorKind::InvalidData.into()),
    }
}

/// A running worker process. Dropping this value terminates the worker.
#[derive(Debug)]
pub struct WorkerProcess<'a> {
    control: MutexGuard<'a, Option<UnixStream>>,
    socket: UnixStream,
    ended: bool,
}

impl Drop for WorkerProcess<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // The keeper waits for this message before it starts another worker. The status is not
            // needed.
            let _ = with_keeper(&mut self.control, ended);
        }
    }
}

impl WorkerProcess<'_> {
    /// Returns the socket that is connected to the worker.
    pub fn socket(&mut self) -> &mut UnixStream {
        &mut self.socket
    }

    /// Terminates the worker, unless it has already exited, and returns its termination status. To
    /// determine why a worker has stopped sending, read the socket until end of file before this
    /// call.
    ///
    /// # Errors
    /// Returns an error if the keeper has exited, which also terminates the worker.
    pub fn end(mut self) -> io::Result<WorkerExit> {
        self.ended = true;
        with_keeper(&mut self.control, ended)
    }
}

/// Compiles the filters of the keeper. Calls that are not on the keeper's list cause the action
/// `otherwise`.
fn filters(otherwise: Option<&SeccompAction>) -> Result<Vec<BpfProgram>, BackendError> {
    let mut filters = Vec::new();
    if let Some(SeccompAction::KillProcess) = otherwise {
        filters.push(filter::refuse(&lists::refused_to_workers())?);
    }
    if let Some(otherwise) = otherwise {
        filters.push(filter::compile(&lists::of_keeper(), otherwise.clone())?);
    }
    Ok(filters)
}
