//! Why a VM does not run.

use std::io;
use std::path::PathBuf;

use perf_core::ConfigError;
use sandbox::{CgroupError, FileAccessError, JailError, SandboxError, ServiceStartError};
use vpmu::ModelError;
use vpmu::filter::FilterError;

use super::consoles::ConsolesError;
use crate::background::DaemonError;
use crate::devices::DeviceError;
use control_api::place::PlaceError;
use perfvisor_vmm::gdb::server::GdbError;
use perfvisor_vmm::kvm::host::HostError;
use perfvisor_vmm::kvm::own_pmu::KvmVpmuModelError;
use perfvisor_vmm::pmu::backing::BackingError;
use perfvisor_vmm::privileges::PrivilegeError;
use perfvisor_vmm::vm::VmError;

/// Why a guest does not run, or the VM did not end as it should.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Something that is needed before anything of the guest's is there.
    #[error("{0}")]
    Start(&'static str, #[source] io::Error),
    /// No such virtual PMU.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// No event filter.
    #[error("--pmu-filter {}", path.display())]
    Filter {
        /// Its file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: FilterError,
    },
    /// An option is about a PMU that the guest does not have.
    #[error("{0} with --pmu off: the guest has no PMU for it; leave {0} out, or choose a PMU")]
    WithoutPmu(&'static str),
    /// KVM cannot be used.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Nothing counts as it was asked for.
    #[error(transparent)]
    Backing(#[from] BackingError),
    /// KVM's own vPMU is another.
    #[error(transparent)]
    OwnModel(#[from] KvmVpmuModelError),
    /// Turns that are ticks have no length of their own.
    #[error(
        "--mux-turn with --mux rotate: turns are ticks of 4 ms there; use --mux adaptive, or leave --mux-turn out"
    )]
    TurnOfRotate,
    /// More counters than there are to be shared.
    #[error(
        "--reserve-counters {asked}: this host has {free} counters to share, and one of them has to stay; reserve {} at most",
        free.saturating_sub(1)
    )]
    Reserve {
        /// What was asked.
        asked: usize,
        /// How many there are.
        free: usize,
    },
    /// A setting that the perf core does not take.
    #[error(transparent)]
    Core(#[from] ConfigError),
    /// A console of the guest's cannot be where it is to be.
    #[error(transparent)]
    Console(#[from] ConsolesError),
    /// Both need KVM's single steps.
    #[error(
        "--gdb with --backing exact: both step the guest, and KVM has one step for both; use another backing, or leave \
         --gdb out"
    )]
    GdbExact,
    /// No debugger can come.
    #[error(transparent)]
    Gdb(#[from] GdbError),
    /// The VM cannot be controlled by that name.
    #[error(transparent)]
    Name(#[from] PlaceError),
    /// Nobody can look on.
    #[error("--observers")]
    Observers(#[source] PlaceError),
    /// A device cannot be had.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Only capabilities that are given up could read a file.
    #[error(
        "--on-reset restart reads {} again, which takes capabilities that a running VM does not have; let its owner \
         or its group read it, or use --on-reset exit",
        .0.display()
    )]
    ReadAgain(PathBuf, #[source] io::Error),
    /// The process keeps rights that it does not need.
    #[error("the VM's process cannot give up its rights")]
    Privileges(#[from] PrivilegeError),
    /// What its threads may do cannot be bounded.
    #[error("--seccomp {0}")]
    Sandbox(sandbox::Mode, #[source] SandboxError),
    /// No process can be had that reads the guest's kernel.
    #[error("no process to read the guest's kernel")]
    KernelReader(#[from] ServiceStartError),
    /// No process that connects to sockets.
    #[error("no process to connect to sockets")]
    Broker(#[source] ServiceStartError),
    /// The broker cannot be confined.
    #[error("the process that connects to sockets cannot be confined")]
    Seal(#[source] io::Error),
    /// A limit of the jail is refused.
    #[error(
        "--jail {0}: the kernel refuses the limit; choose one that is not above the present one (ulimit -H)"
    )]
    Limit(&'static str, #[source] io::Error),
    /// No process can be had that opens perf events.
    #[error("no process to open perf events")]
    PerfBroker(#[source] ServiceStartError),
    /// The files that it does not need cannot be shut off.
    #[error("--landlock on")]
    Files(#[source] FileAccessError),
    /// No jail.
    #[error("--jail")]
    Jail(#[source] JailError),
    /// The jail's control group is not to be had.
    #[error("--jail cgroup=")]
    Cgroup(#[source] CgroupError),
    /// The kernel takes capabilities in a user namespace for none.
    #[error(
        "--jail: a user's VM gets a user namespace, in which the host's kernel lets it count nothing while \
         kernel.perf_event_paranoid is more than 1: set it to 1 or less, start the VM as root with --jail uid=N, or \
         give the guest no PMU (--pmu off)"
    )]
    JailDoesNotCount,
    /// No process for it in the background.
    #[error(transparent)]
    Daemon(DaemonError),
    /// No machine, or it does not start.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The main loop ended.
    #[error("the event loop failed")]
    Loop(#[source] event_manager::Error),
}
impl RunError {
    /// For `map_err` behind what is needed before anything of the guest's is there.
    pub(super) fn start(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Start(what, source)
    }
}
