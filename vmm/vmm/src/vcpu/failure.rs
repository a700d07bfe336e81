//! Errors of a vCPU at creation, at thread start, and while running.

use std::io;

use super::internal_error::InternalError;
use super::pmi;
use super::step::SingleStepError;
use crate::boot::BootError;
use crate::kvm::call::KvmIoctlError;
use crate::pmu::PmuSetupError;

/// Error when creating or starting a vCPU.
#[derive(Debug, thiserror::Error)]
pub enum VcpuError {
    /// The vCPU thread could not be spawned.
    #[error("cannot start the thread of vCPU {0}")]
    Spawn(u8, #[source] io::Error),
    /// The saved PMU state is not valid for this PMU.
    #[error(transparent)]
    Saved(#[from] vpmu::VpmuStateError),
    /// Preparing the delivery of PMIs failed.
    #[error(transparent)]
    Pmi(#[from] pmi::PmiError),
    /// A resource of the operating system, such as memory, could not be allocated.
    #[error("{0} failed")]
    Os(&'static str, #[source] io::Error),
}

/// Error when initializing a vCPU on its thread.
#[derive(Debug, thiserror::Error)]
pub enum VcpuStartError {
    /// The vCPU could not be attached to the perf core.
    #[error(transparent)]
    Pmu(#[from] PmuSetupError),
    /// The kick timer could not be created.
    #[error("timer_create failed")]
    Timer(#[source] io::Error),
}

/// Error when restarting a vCPU after a reset.
#[derive(Debug, thiserror::Error)]
pub(super) enum RestartError {
    #[error(transparent)]
    State(#[from] KvmIoctlError),
    #[error(transparent)]
    Boot(#[from] BootError),
    #[error(transparent)]
    Make(#[from] VcpuError),
}

/// Fatal error of a running vCPU.
#[derive(Debug, thiserror::Error)]
pub(super) enum VcpuFailure {
    #[error(transparent)]
    Pmi(#[from] pmi::PmiError),
    #[error(transparent)]
    Step(#[from] SingleStepError),
    #[error("failed to handle a breakpoint")]
    Debug(#[source] KvmIoctlError),
    #[error("failed to handle RDPMC")]
    Read(#[source] KvmIoctlError),
    #[error("failed to identify the guest's kernel")]
    Gate(#[source] KvmIoctlError),
    #[error("failed to write IA32_DEBUGCTL")]
    DebugControl(#[source] KvmIoctlError),
    #[error(transparent)]
    Run(KvmIoctlError),
    #[error("{0}")]
    Internal(InternalError),
    #[error("unhandled exit {0}")]
    Unserved(String),
}
