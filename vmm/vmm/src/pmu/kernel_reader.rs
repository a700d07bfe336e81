//! Worker process that reads the symbols and tables of the guest's kernel. Each search uses a new,
//! unprivileged worker.
//!
//! The tables of a guest's kernel (kallsyms, BTF, ORC) are large, have many versions, and are
//! controlled by the guest, so the VM process never parses them.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use guest_profile::locate::KernelAnchorRegisters;
use guest_profile::search::{self, FoundKernel, SearchError};
use guest_profile::{GuestPhys, GuestRegs};
use sandbox::{
    ProcessConfinement, ServiceStartError, WorkerExit, WorkerKeeper, WorkerLimits, WorkerStartError,
    privileges,
};

/// Resource limits of one search. A distribution kernel needs 150 MiB and half a second, and thirty
/// times as long on a fully emulated host.
const LIMITS: WorkerLimits = WorkerLimits {
    memory_bytes: 512 << 20,
    cpu_seconds: 120,
};
/// Time limit of one search, sufficient on a loaded host.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Reader of the guest kernels of one VM.
#[derive(Debug)]
pub struct KernelReader {
    workers: WorkerKeeper,
}

/// Error when reading a kernel.
#[derive(Debug, thiserror::Error)]
pub enum KernelReadError {
    /// The worker reported an error or sent an invalid response.
    #[error(transparent)]
    Ask(#[from] SearchError),
    /// The worker exited without a response.
    #[error(
        "cannot read the guest's kernel: the reader process failed: {0}; the next request starts it again"
    )]
    WorkerExit(WorkerExit),
    /// No worker process could be started.
    #[error("cannot read the guest's kernel: cannot start the reader process")]
    NoWorker(#[source] io::Error),
    /// The process that starts workers has exited. A running VM cannot start another one.
    #[error(
        "the guest's kernel is no longer read: the process that starts its reader (worker-keeper) \
        was killed by a signal; samples of the guest's kernel have no symbols, tasks and stacks \
        until the VM is restarted"
    )]
    NoKeeper(#[source] io::Error),
}

impl From<WorkerStartError> for KernelReadError {
    fn from(e: WorkerStartError) -> Self {
        match e {
            WorkerStartError::NoKeeper(e) => Self::NoKeeper(e),
            WorkerStartError::Refused(e) => Self::NoWorker(e),
        }
    }
}

impl KernelReader {
    /// Starts the process that starts workers. The calling thread must be the only thread of the
    /// process.
    ///
    /// # Errors
    /// Returns [`ServiceStartError`] if the process cannot be started.
    pub fn start(confinement: ProcessConfinement) -> Result<Self, ServiceStartError> {
        Self::within(confinement, LIMITS)
    }

    fn within(confinement: ProcessConfinement, limits: WorkerLimits) -> Result<Self, ServiceStartError> {
        let workers = WorkerKeeper::start(confinement, limits, privileges::drop_all_privileges, work)?;
        Ok(Self { workers })
    }

    /// Reads the guest's kernel from `memory`. The registers `regs` and `anchors` of a vCPU give
    /// the page tables and addresses in the kernel.
    ///
    /// # Errors
    /// Returns a [`KernelReadError`] if the kernel cannot be read. Except after
    /// [`KernelReadError::NoKeeper`], a later attempt may succeed.
    pub fn read<M: GuestPhys + ?Sized>(
        &self,
        memory: &M,
        regs: &GuestRegs,
        anchors: &KernelAnchorRegisters,
    ) -> Result<FoundKernel, KernelReadError> {
        let mut worker = self.workers.begin()?;
        let found = search::ask(worker.socket(), memory, regs, anchors, Instant::now() + TIMEOUT);
        let ended = worker.end().map_err(KernelReadError::NoKeeper)?;
        match found {
            Err(SearchError::Lost(_)) => Err(KernelReadError::WorkerExit(ended)),
            found => Ok(found?),
        }
    }
}

/// Serves one search for a guest kernel in the worker process.
fn work(socket: UnixStream, number: u32) {
    sandbox::worker_fault(number);
    // An error means that the VM has closed the socket, so there is no receiver for a report.
    let _ = search::serve(socket);
}

#[cfg(test)]
mod tests;
