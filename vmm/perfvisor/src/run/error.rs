//! Errors of `perfvisor run`.

use std::io;
use std::path::PathBuf;

use perf_core::PerfCoreConfigError;
use sandbox::{
    CgroupError, FileAccessError, HelperProcessStartError, JailError, PidNamespaceError, SandboxError,
};
use vpmu::PmuModelError;
use vpmu::filter::EventFilterFileError;

use super::consoles::ConsolesError;
use super::incoming::IncomingMigrationError;
use super::restore::RestoreFileError;
use crate::background::DaemonError;
use crate::devices::DeviceOptionError;
use control_api::socket_dir::ControlSocketError;
use sandbox::privileges::PrivilegeError;
use vmm::gdb::server::GdbError;
use vmm::kvm::host::KvmHostError;
use vmm::kvm::vpmu_probe::KvmVpmuModelError;
use vmm::pmu::backing::CounterBackingError;
use vmm::pmu::branches::BranchRecordsError;
use vmm::vm::VmError;
use vmm::vm::restore::RestoreError;

/// Error returned when a VM cannot be started or fails.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("{0}")]
    Start(&'static str, #[source] io::Error),
    #[error(transparent)]
    Model(#[from] PmuModelError),
    #[error("--pmu-filter {}", path.display())]
    Filter {
        path: PathBuf,
        #[source]
        source: EventFilterFileError,
    },
    #[error("--operator-steps: requires --backing exact")]
    OperatorSteps,
    #[error("{0} with --pmu off: the guest has no PMU; omit {0}, or choose a PMU")]
    WithoutPmu(&'static str),
    #[error(transparent)]
    Host(#[from] KvmHostError),
    #[error(transparent)]
    Backing(#[from] CounterBackingError),
    #[error(transparent)]
    BranchRecords(#[from] BranchRecordsError),
    #[error(transparent)]
    OwnModel(#[from] KvmVpmuModelError),
    #[error(
        "--mux-turn with --mux rotate: the interval is the tick of 4 ms; use --mux adaptive, or \
        omit --mux-turn"
    )]
    TurnOfRotate,
    #[error(
        "--reserve-counters {asked}: must be at most {} of this host's {free} counters, because \
        one must remain",
        free.saturating_sub(1)
    )]
    Reserve { asked: usize, free: usize },
    #[error(transparent)]
    Core(#[from] PerfCoreConfigError),
    #[error(transparent)]
    Console(#[from] ConsolesError),
    #[error(
        "--gdb with --backing exact: both need KVM's single-step mode; use another backing, or omit --gdb"
    )]
    GdbExact,
    #[error(transparent)]
    Gdb(#[from] GdbError),
    #[error(transparent)]
    Name(#[from] ControlSocketError),
    #[error("--observers")]
    Observers(#[source] ControlSocketError),
    #[error(transparent)]
    Device(#[from] DeviceOptionError),
    #[error(
        "--on-reset restart must read {} again, for which a running VM has no capabilities; make \
        the file readable for its owner or group, or use --on-reset exit",
        .0.display()
    )]
    ReadAgain(PathBuf, #[source] io::Error),
    #[error("cannot drop privileges")]
    Privileges(#[from] PrivilegeError),
    #[error("--seccomp {0}")]
    Sandbox(sandbox::SeccompMode, #[source] SandboxError),
    #[error(transparent)]
    Restore(#[from] RestoreFileError),
    #[error(transparent)]
    Incoming(#[from] IncomingMigrationError),
    #[error("--restore")]
    RestoredFilter(#[source] RestoreError),
    #[error("cannot start the process that reads the guest's kernel")]
    KernelReader(#[from] HelperProcessStartError),
    #[error("cannot start the process that connects to sockets")]
    Broker(#[source] HelperProcessStartError),
    #[error("cannot confine the process that connects to sockets")]
    Seal(#[source] io::Error),
    #[error("--jail {0}: the kernel refuses the limit; use at most the current hard limit (ulimit -H)")]
    Limit(&'static str, #[source] io::Error),
    #[error("cannot start the process that opens perf events")]
    PerfBroker(#[source] HelperProcessStartError),
    #[error("--landlock on")]
    Files(#[source] FileAccessError),
    #[error("--jail")]
    Jail(#[source] JailError),
    #[error("--jail")]
    PidNamespace(#[source] PidNamespaceError),
    #[error("--jail cgroup=")]
    Cgroup(#[source] CgroupError),
    #[error(
        "--jail: in the user namespace of an unprivileged VM the kernel denies perf events if \
        kernel.perf_event_paranoid is above 1; set it to 1 or less, start the VM as root with \
        --jail uid=N, or use --pmu off"
    )]
    JailDoesNotCount,
    #[error(transparent)]
    Daemon(DaemonError),
    #[error(transparent)]
    Vm(#[from] VmError),
    #[error("the event loop failed")]
    Loop(#[source] event_manager::Error),
}
impl RunError {
    /// Returns a closure for `map_err` that wraps an error of a step before the VM is created.
    /// `what` describes the step.
    pub(super) fn start(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Start(what, source)
    }
}
