//! Processes for work on bytes of a guest's making, which a VM can do without: each does one piece of work
//! and ends, with a system-call filter, limits of memory and of time, and no descriptor but one socket.
//!
//! | file | story |
//! |---|---|
//! | `keeper` | the process that starts one worker after the other, and says how each ended |
//! | `ended` | how a worker ended |
//!
//! A VM that runs may start no process. So the keeper is started before, by a fork, with the rights that the
//! VM has then, and gives them up at once. It reads nothing of a guest's.

mod ended;
pub(crate) mod keeper;

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use seccompiler::{BackendError, BpfProgram, SeccompAction};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

pub use ended::Ended;
pub use keeper::Limits;
use keeper::{BEGIN, GIVE_UP, Job, Said};

use crate::start::{Mode, SandboxError};
use crate::{ThreadKind, filter, lists};

/// How long the keeper may take to answer, and a worker for a message.
const PATIENCE: Duration = Duration::from_secs(180);

/// What workers may do.
#[derive(Clone, Copy, Debug)]
pub struct Confinement {
    /// With a filter, or not.
    pub seccomp: Mode,
    /// Without any file, where the kernel has landlock.
    pub landlock: bool,
}

impl Confinement {
    /// What happens to a call that is not on a process's list; `None`: it has no filter.
    pub(crate) fn otherwise(self) -> Option<SeccompAction> {
        match self.seccomp {
            Mode::Off => None,
            // There is nobody to write a line.
            Mode::On => Some(SeccompAction::KillProcess),
            Mode::Log => Some(SeccompAction::Log),
        }
    }
}

/// There are no workers.
#[derive(Debug, thiserror::Error)]
pub enum WorkersError {
    /// The keeper cannot be started.
    #[error("{0} failed")]
    Os(&'static str, #[source] io::Error),
    /// There are no filters for it.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
}

/// There is no worker.
#[derive(Debug, thiserror::Error)]
pub enum BeginError {
    /// The keeper has ended, or does not answer: there will be none any more.
    #[error("the process that starts it has ended")]
    NoKeeper(#[source] io::Error),
    /// The keeper cannot start one now.
    #[error("it cannot be started")]
    Refused(#[source] io::Error),
}

/// Who has workers started. The keeper and the worker that is there end with this.
#[derive(Debug)]
pub struct Workers {
    /// `None`: the keeper is gone.
    control: Mutex<Option<UnixStream>>,
}

impl Workers {
    /// Starts the keeper: a copy of this process, in which no thread but the calling one may exist. `give_up`
    /// gives up its rights; `work` is what each worker does, with its socket and its number, from 0.
    ///
    /// # Errors
    /// [`WorkersError`].
    pub fn start(
        confinement: Confinement,
        limits: Limits,
        give_up: fn() -> bool,
        work: fn(UnixStream, u32),
    ) -> Result<Self, WorkersError> {
        let (ours, its) = UnixStream::pair().map_err(|e| WorkersError::Os("socketpair", e))?;
        ours.set_read_timeout(Some(PATIENCE))
            .map_err(|e| WorkersError::Os("setsockopt", e))?;
        let otherwise = confinement.otherwise();
        let filters = filters(otherwise.as_ref());
        let job = Job {
            filters: filters.map_err(|e| SandboxError::Compile(ThreadKind::Profiler, e))?,
            otherwise,
            landlock: confinement.landlock,
            limits,
            patience: PATIENCE,
            give_up,
            work,
        };
        keeper::start(its, job).map_err(|e| WorkersError::Os("fork", e))?;
        Ok(Self {
            control: Mutex::new(Some(ours)),
        })
    }

    /// Has a worker started. There is one at a time: who asks for another waits until the first is let go.
    ///
    /// # Errors
    /// [`BeginError`].
    pub fn begin(&self) -> Result<Worker<'_>, BeginError> {
        let mut control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        match with_keeper(&mut control, begun) {
            Ok(Ok(socket)) => Ok(Worker {
                control,
                socket,
                ended: false,
            }),
            Ok(Err(refused)) => Err(BeginError::Refused(refused)),
            Err(e) => Err(BeginError::NoKeeper(e)),
        }
    }
}

/// The socket of a new worker, or why the keeper starts none.
///
/// # Errors
/// The keeper does not answer.
fn begun(control: &mut UnixStream) -> io::Result<io::Result<UnixStream>> {
    control.write_all(&[BEGIN])?;
    let mut word = [0; Said::BYTES];
    let (count, socket) = control
        .recv_with_fd(&mut word)
        .map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
    let rest = word.get_mut(count..).unwrap_or_default();
    control.read_exact(rest)?;
    match Said::from_bytes(word) {
        Said::Begun => {
            let socket = socket.ok_or(ErrorKind::InvalidData)?;
            Ok(Ok(UnixStream::from(OwnedFd::from(socket))))
        }
        Said::Failed(errno) => Ok(Err(io::Error::from_raw_os_error(errno))),
        Said::Ended { .. } => Err(ErrorKind::InvalidData.into()),
    }
}

/// Asks the keeper. One that does not answer is let go, and ends: what it says later would be taken for
/// another answer. The socket is closed, which any thread may do.
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

/// The last word on a worker.
fn ended(control: &mut UnixStream) -> io::Result<Ended> {
    control.write_all(&[GIVE_UP])?;
    let mut word = [0; Said::BYTES];
    control.read_exact(&mut word)?;
    match Said::from_bytes(word) {
        Said::Ended { status, text } => {
            let mut words = vec![0; text.into()];
            control.read_exact(&mut words)?;
            Ok(Ended::of(status, &words))
        }
        Said::Begun | Said::Failed(_) => Err(ErrorKind::InvalidData.into()),
    }
}

/// A worker, and the socket to it. One that is dropped is ended.
#[derive(Debug)]
pub struct Worker<'a> {
    control: MutexGuard<'a, Option<UnixStream>>,
    socket: UnixStream,
    ended: bool,
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // The keeper waits for this before it starts another one. Nobody asks how it ended.
            let _ = with_keeper(&mut self.control, ended);
        }
    }
}

impl Worker<'_> {
    /// The socket.
    pub fn socket(&mut self) -> &mut UnixStream {
        &mut self.socket
    }

    /// Ends it, if it has not ended, and says how it ended. Who wants to know why nothing comes any more
    /// reads up to the end of the socket first.
    ///
    /// # Errors
    /// The keeper does not say: it has ended, and the worker with it.
    pub fn end(mut self) -> io::Result<Ended> {
        self.ended = true;
        with_keeper(&mut self.control, ended)
    }
}

/// The keeper's filters, if others do `otherwise`.
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
