//! The process that reads the guest's kernel: a worker for each search, which has nothing to lose.
//!
//! Tables of a guest's kernel (kallsyms, BTF, ORC) are long, old and of many forms, and all of it is of the
//! guest's making. So none of it is read in the VM's process.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use guest_profile::locate::Anchors;
use guest_profile::search::{self, AskError, FoundKernel};
use guest_profile::{GuestPhys, GuestRegs};
use sandbox::{BeginError, Confinement, Ended, Limits, Workers, WorkersError};

use crate::privileges;

/// What one search may take. A distribution's kernel takes 150 MiB and half a second, and thirty times as
/// long where all of this is emulated.
const LIMITS: Limits = Limits {
    memory_bytes: 512 << 20,
    cpu_seconds: 120,
};
/// How long one search may take, on a machine that has other things to do.
const PATIENCE: Duration = Duration::from_secs(600);

/// Reads kernels for one VM.
#[derive(Debug)]
pub struct KernelReader {
    workers: Workers,
}

/// Why a kernel was not read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The reader says why, or sends what is wrong.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// The reader ended before it had said anything.
    #[error(
        "the guest's kernel could not be read: the process that reads it has failed: {0}; it is tried again when somebody asks"
    )]
    Ended(Ended),
    /// No process can be started for it now.
    #[error("the guest's kernel cannot be read: no process for that")]
    NoWorker(#[source] io::Error),
    /// None can be started for it any more: a VM that runs may start no process, not even the one that
    /// starts them.
    #[error(
        "the guest's kernel can be read no more: the process that starts its reader (worker-keeper) has ended, \
         which only a signal of somebody's does; samples of the guest's kernel have no names, tasks and stacks \
         until the VM is started again"
    )]
    NoKeeper(#[source] io::Error),
}

impl From<BeginError> for ReadError {
    fn from(e: BeginError) -> Self {
        match e {
            BeginError::NoKeeper(e) => Self::NoKeeper(e),
            BeginError::Refused(e) => Self::NoWorker(e),
        }
    }
}

impl KernelReader {
    /// Starts what starts those processes. No thread but the calling one may exist yet.
    ///
    /// # Errors
    /// [`WorkersError`].
    pub fn start(confinement: Confinement) -> Result<Self, WorkersError> {
        Self::within(confinement, LIMITS)
    }

    fn within(confinement: Confinement, limits: Limits) -> Result<Self, WorkersError> {
        let workers = Workers::start(confinement, limits, privileges::give_up_all, work)?;
        Ok(Self { workers })
    }

    /// Reads the kernel that `regs` and `anchors` point into out of `memory`.
    ///
    /// # Errors
    /// [`ReadError`]; another try may succeed.
    pub fn read<M: GuestPhys + ?Sized>(
        &self,
        memory: &M,
        regs: &GuestRegs,
        anchors: &Anchors,
    ) -> Result<FoundKernel, ReadError> {
        let mut worker = self.workers.begin()?;
        let found = search::ask(worker.socket(), memory, regs, anchors, Instant::now() + PATIENCE);
        let ended = worker.end().map_err(ReadError::NoKeeper)?;
        match found {
            Err(AskError::Lost(_)) => Err(ReadError::Ended(ended)),
            found => Ok(found?),
        }
    }
}

/// What a worker does.
fn work(socket: UnixStream, number: u32) {
    sandbox::worker_fault(number);
    // Who asked is gone, if this fails, and nobody is left to tell.
    let _ = search::serve(socket);
}

#[cfg(test)]
mod tests;
