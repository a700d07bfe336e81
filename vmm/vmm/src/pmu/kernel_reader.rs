//! Finds the symbols and tables of the guest's kernel in guest memory. Each search runs in a new
//! unprivileged worker process.
//!
//! The tables (kallsyms, BTF, ORC) are large, have many versions, and are controlled by the guest,
//! so the process of the VM never parses them itself.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use guest_profile::locate::KernelAnchorRegisters;
use guest_profile::search::{self, FoundKernel, KernelSearchRequestError};
use guest_profile::{GuestPhys, GuestRegs};
use sandbox::{
    HelperProcessStartError, ProcessConfinement, WorkerExit, WorkerKeeper, WorkerLimits, WorkerStartError,
    privileges,
};

/// Resource limits of the worker process. For a distribution kernel, a search needs 150 MiB and
/// half a second of CPU time; thirty times as long on a fully emulated host.
const LIMITS: WorkerLimits = WorkerLimits {
    memory_bytes: 512 << 20,
    cpu_seconds: 120,
};
/// Maximum duration of one search. Sufficient even on a loaded host.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Reads the kernels of one VM's guest.
#[derive(Debug)]
pub struct KernelReader {
    workers: WorkerKeeper,
}

/// Error when reading the guest's kernel.
#[derive(Debug, thiserror::Error)]
pub enum GuestKernelReadError {
    /// The search failed in the worker, or the worker sent an invalid response.
    #[error(transparent)]
    Ask(#[from] KernelSearchRequestError),
    /// The worker exited without a response.
    #[error(
        "cannot read the guest's kernel: the reader process failed: {0}; the next request starts it again"
    )]
    WorkerExit(WorkerExit),
    /// No worker process could be started.
    #[error("cannot read the guest's kernel: cannot start the reader process")]
    NoWorker(#[source] io::Error),
    /// The process from which workers are started has exited. A running VM cannot start another
    /// one.
    #[error(
        "the guest's kernel is no longer read: the process that starts its reader (worker-keeper) \
        was killed by a signal; samples of the guest's kernel have no symbols, tasks and stacks \
        until the VM is restarted"
    )]
    NoKeeper(#[source] io::Error),
}

impl From<WorkerStartError> for GuestKernelReadError {
    fn from(e: WorkerStartError) -> Self {
        match e {
            WorkerStartError::NoKeeper(e) => Self::NoKeeper(e),
            WorkerStartError::Refused(e) => Self::NoWorker(e),
        }
    }
}

impl KernelReader {
    /// Starts the process from which workers are started. The calling thread must be the only
    /// thread of the process.
    ///
    /// # Errors
    /// Returns [`HelperProcessStartError`] if the process cannot be started.
    pub fn start(confinement: ProcessConfinement) -> Result<Self, HelperProcessStartError> {
        Self::within(confinement, LIMITS)
    }

    fn within(
        confinement: ProcessConfinement,
        limits: WorkerLimits,
    ) -> Result<Self, HelperProcessStartError> {
        let workers = WorkerKeeper::start(confinement, limits, privileges::drop_all_privileges, work)?;
        Ok(Self { workers })
    }

    /// Finds the guest's kernel in `memory` and reads its symbols and tables. `regs` and `anchors`
    /// are registers of a vCPU, which contain the page table address and addresses in the kernel.
    ///
    /// # Errors
    /// Returns a [`GuestKernelReadError`] if the kernel cannot be read. Except after
    /// [`GuestKernelReadError::NoKeeper`], a later attempt may succeed.
    pub fn read<M: GuestPhys + ?Sized>(
        &self,
        memory: &M,
        regs: &GuestRegs,
        anchors: &KernelAnchorRegisters,
    ) -> Result<FoundKernel, GuestKernelReadError> {
        let mut worker = self.workers.begin()?;
        let found = search::search_kernel(worker.socket(), memory, regs, anchors, Instant::now() + TIMEOUT);
        let ended = worker.end().map_err(GuestKernelReadError::NoKeeper)?;
        match found {
            Err(KernelSearchRequestError::Lost(_)) => Err(GuestKernelReadError::WorkerExit(ended)),
            found => Ok(found?),
        }
    }
}

/// Handles one search for a guest's kernel, in the worker process.
fn work(socket: UnixStream, number: u32) {
    sandbox::worker_fault(number);
    // An error means that the VM has closed the socket, so there is no receiver for a report.
    let _ = search::serve(socket);
}

#[cfg(test)]
mod tests;
