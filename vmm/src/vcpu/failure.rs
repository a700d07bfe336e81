//! What can go wrong with a vCPU: when it is made, when its thread begins, and while it runs.

use std::io;

use super::internal_error::InternalError;
use super::pmi;
use super::step::StepError;
use crate::boot::BootError;
use crate::kvm::call::CallError;
use crate::pmu::PmuSetupError;

/// Why a vCPU thread could not be started.
#[derive(Debug, thiserror::Error)]
pub enum VcpuError {
    /// The thread was not made.
    #[error("cannot start the thread of vCPU {0}")]
    Spawn(u8, #[source] io::Error),
    /// The LVTPC access could not be prepared.
    #[error(transparent)]
    Pmi(#[from] pmi::PmiError),
    /// Something else could not be had.
    #[error("{0} failed")]
    Os(&'static str, #[source] io::Error),
}

/// Why a vCPU's thread cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum BeginError {
    /// It did not enter the perf core.
    #[error(transparent)]
    Pmu(#[from] PmuSetupError),
    /// Nothing would wake it.
    #[error("timer_create failed")]
    Timer(#[source] io::Error),
}

/// Why a vCPU does not start again.
#[derive(Debug, thiserror::Error)]
pub(super) enum RestartError {
    #[error(transparent)]
    State(#[from] CallError),
    #[error(transparent)]
    Boot(#[from] BootError),
    #[error(transparent)]
    Make(#[from] VcpuError),
}

/// Why a vCPU cannot go on.
#[derive(Debug, thiserror::Error)]
pub(super) enum VcpuFailure {
    #[error(transparent)]
    Pmi(#[from] pmi::PmiError),
    #[error(transparent)]
    Step(#[from] StepError),
    #[error("serving a breakpoint failed")]
    Debug(#[source] CallError),
    #[error("serving RDPMC failed")]
    Read(#[source] CallError),
    #[error("looking which kernel the guest runs failed")]
    Gate(#[source] CallError),
    #[error("writing IA32_DEBUGCTL failed")]
    DebugControl(#[source] CallError),
    #[error(transparent)]
    Run(CallError),
    #[error("{0}")]
    Internal(InternalError),
    #[error("nothing serves the exit {0}")]
    Unserved(String),
}
