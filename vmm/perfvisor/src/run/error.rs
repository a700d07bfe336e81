//! Errors of `perfvisor run`.

use std::io;
use std::path::PathBuf;

use perf_core::ConfigError;
use sandbox::{CgroupError, FileAccessError, JailError, PidNamespaceError, SandboxError, ServiceStartError};
use vpmu::ModelError;
use vpmu::filter::FilterError;

use super::consoles::ConsolesError;
use super::restore::RestoreFileError;
use crate::background::DaemonError;
use crate::devices::DeviceError;
use control_api::socket_dir::SocketError;
use sandbox::privileges::PrivilegeError;
use vmm::gdb::server::GdbError;
use vmm::kvm::host::HostError;
use vmm::kvm::vpmu_probe::KvmVpmuModelError;
use vmm::pmu::backing::BackingError;
use vmm::vm::VmError;
use vmm::vm::restore::RestoreError;

/// Errors of starting or running a VM.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("{0}")]
    Start(&'static str, #[source] io::Error),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("--pmu-filter {}", path.display())]
    Filter {
        path: PathBuf,
        #[source]
        source: FilterError,
    },
    #[error("{0} with --pmu off: the guest has no PMU for it; leave {0} out, or choose a PMU")]
    WithoutPmu(&'static str),
    #[error(transparent)]
    Host(#[from] HostError),
    #[error(transparent)]
    Backing(#[from] BackingError),
    #[error(transparent)]
    OwnModel(#[from] KvmVpmuModelError),
    #[error(
        "--mux-turn with --mux rotate: turns are ticks of 4 ms there; use --mux adaptive, or leave --mux-turn out"
    )]
    TurnOfRotate,
    #[error(
        "--reserve-counters {asked}: this host has {free} counters to share, and one of them has to stay; reserve {} at most",
        free.saturating_sub(1)
    )]
    Reserve { asked: usize, free: usize },
    #[error(transparent)]
    Core(#[from] ConfigError),
    #[error(transparent)]
    Console(#[from] ConsolesError),
    #[error(
        "--gdb with --backing exact: both step the guest, and KVM has one step for both; use another backing, or leave \
         --gdb out"
    )]
    GdbExact,
    #[error(transparent)]
    Gdb(#[from] GdbError),
    #[error(transparent)]
    Name(#[from] SocketError),
    #[error("--observers")]
    Observers(#[source] SocketError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(
        "--on-reset restart reads {} again, which takes capabilities that a running VM does not have; let its owner \
         or its group read it, or use --on-reset exit",
        .0.display()
    )]
    ReadAgain(PathBuf, #[source] io::Error),
    #[error("the VM's process cannot give up its rights")]
    Privileges(#[from] PrivilegeError),
    #[error("--seccomp {0}")]
    Sandbox(sandbox::SeccompMode, #[source] SandboxError),
    #[error(transparent)]
    Restore(#[from] RestoreFileError),
    #[error("--restore")]
    RestoredFilter(#[source] RestoreError),
    #[error("no process to read the guest's kernel")]
    KernelReader(#[from] ServiceStartError),
    #[error("no process to connect to sockets")]
    Broker(#[source] ServiceStartError),
    #[error("the process that connects to sockets cannot be confined")]
    Seal(#[source] io::Error),
    #[error(
        "--jail {0}: the kernel refuses the limit; choose one that is not above the present one (ulimit -H)"
    )]
    Limit(&'static str, #[source] io::Error),
    #[error("no process to open perf events")]
    PerfBroker(#[source] ServiceStartError),
    #[error("--landlock on")]
    Files(#[source] FileAccessError),
    #[error("--jail")]
    Jail(#[source] JailError),
    #[error("--jail")]
    PidNamespace(#[source] PidNamespaceError),
    #[error("--jail cgroup=")]
    Cgroup(#[source] CgroupError),
    #[error(
        "--jail: a user's VM gets a user namespace, in which the host's kernel lets it count nothing while \
         kernel.perf_event_paranoid is more than 1: set it to 1 or less, start the VM as root with --jail uid=N, or \
         give the guest no PMU (--pmu off)"
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
    /// Returns a closure for `map_err` that marks errors before the creation of the VM.
    pub(super) fn start(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Start(what, source)
    }
}
