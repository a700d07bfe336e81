//! The startup steps before the machine is built: starting the helper processes while this process
//! has a single thread, and probing the host.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use operator::exit::ExitStatus;
use operator::signals::BlockedSignals;
use perf_core::pmu::host::{HostPerfCapabilities, ignore_sigio};
use sandbox::{PerfEventAccess, SandboxedThreadKind, SeccompTerminationActions, SocketBroker, privileges};
use vmm::console::restore_terminal;
use vmm::kvm::host::{self, Kvm};
use vmm::pmu::event_opener::VmEventOpener;
use vmm::pmu::kernel_reader::KernelReader;
use vmm::pmu::overflow_signal;
use vmm::vcpu::kick;
use vmm::vm::BackgroundKvmSetup;
use vmm::vm::restore::RestoredMachine;

use super::incoming::{Incoming, Requester};
use super::{RunError, STOP_SIGNALS, confinement, files, footprint, jail, restore};
use crate::background::{self, DaemonStartup, ServiceNotifier};
use crate::cli::RunArgs;
use crate::inherited::{self, InheritedDescriptors};

/// The helper processes of a VM, and the resources that this process opened before it dropped its
/// privileges.
pub(super) struct Helpers {
    /// Startup state of a daemon, with its connection to the process that started it.
    pub(super) starting: Option<DaemonStartup>,
    pub(super) inherited: InheritedDescriptors,
    /// Snapshot to restore, with the options of its guest.
    pub(super) snapshot: Option<(RunArgs, RestoredMachine)>,
    /// VM to take over from another process (`--incoming`).
    pub(super) incoming: Option<Incoming>,
    pub(super) broker: Arc<SocketBroker>,
    pub(super) manager: Arc<ServiceNotifier>,
    /// Starter of unprivileged processes that parse the guest's kernel for operators.
    pub(super) kernel_reader: Arc<KernelReader>,
    pub(super) opener: VmEventOpener,
    /// Maximum number of open file descriptors; `None` if unlimited.
    pub(super) descriptors: Option<u64>,
}

impl Helpers {
    /// Starts the helper processes. Must be called before this process starts a thread, installs a
    /// signal handler or opens a descriptor.
    ///
    /// # Errors
    /// Returns [`RunError`] if an option cannot be satisfied or a process cannot be started.
    pub(super) fn start(args: &RunArgs, requester: &Requester) -> Result<Self, RunError> {
        let starting = args
            .daemonize
            .then(background::daemonize)
            .transpose()
            .map_err(RunError::Daemon)?;
        let inherited = InheritedDescriptors::mark();
        inherited::clear_environment();
        jail::join_cgroup(args)?;
        jail::become_user(args)?;
        background::survive_job_control();
        // Open the files of the snapshot with the rights of the VM's user.
        let snapshot = restore::open(args)?;
        let incoming = Incoming::wait(args, requester)?;
        footprint::configure_malloc();
        // Start the broker outside the jail's PID namespace, so that it outlives the VM and can
        // remove the sockets.
        let broker = SocketBroker::start(confinement(args), privileges::drop_all_privileges)
            .map_err(RunError::Broker)?;
        let manager = Arc::new(jail::enter_pid_namespace(args)?);
        let kernel_reader = Arc::new(KernelReader::start(confinement(args))?);
        let opener = VmEventOpener::start(confinement(args), overflow_signal(), kick::kick_signal())
            .map_err(RunError::PerfBroker)?;
        Ok(Self {
            starting,
            inherited,
            snapshot,
            incoming,
            broker,
            manager,
            kernel_reader,
            opener,
            descriptors: jail::limit_descriptors(args)?,
        })
    }
}

/// Properties of the host that a VM needs, and setup operations that are already running on the
/// host.
pub(super) struct HostSetup {
    pub(super) kvm: Kvm,
    pub(super) probe: HostPerfCapabilities,
    /// Slow KVM setup that runs on other threads; `None` for a jailed VM, which must have a single
    /// thread until it has entered the jail.
    pub(super) begun: Option<BackgroundKvmSetup>,
    pub(super) stop_signals: BlockedSignals,
}

impl HostSetup {
    /// Probes the host, prepares the sandbox, and installs `opener`, through which this process
    /// opens perf events.
    ///
    /// # Errors
    /// Returns [`RunError`] if KVM or a system call is not available.
    pub(super) fn of(
        args: &RunArgs,
        opener: VmEventOpener,
        log_file: Option<&File>,
    ) -> Result<Self, RunError> {
        // Block signals before the first thread starts, so that all threads inherit the mask.
        let stop_signals = BlockedSignals::of_vm().map_err(RunError::start(STOP_SIGNALS))?;
        kick::install_handlers().map_err(RunError::start("sigaction failed"))?;
        ignore_sigio().map_err(RunError::start("sigaction failed"))?;
        let kvm = host::open()?;
        let begun = args.jail.is_none().then(BackgroundKvmSetup::now);
        // The probe runs with the capabilities that will be available for opening events later.
        // With more capabilities, it would find more events. The filters are compiled concurrently.
        let (probe, sandbox) = privileges::with_perfmon_capability(HostPerfCapabilities::run, || {
            begin_sandbox(args, opener.counting(), log_file)
        });
        sandbox?;
        opener.install();
        Ok(Self {
            kvm,
            probe,
            begun,
            stop_signals,
        })
    }
}

/// Installs the handlers that terminate the process with one line after a fault, a panic or a
/// forbidden system call, and prepares the filters and rules that [`super::confine`] activates.
fn begin_sandbox(args: &RunArgs, counting: PerfEventAccess, log_file: Option<&File>) -> Result<(), RunError> {
    let will = SeccompTerminationActions {
        first: restore_terminal,
        log: log_file.map(AsRawFd::as_raw_fd),
        status: ExitStatus::Internal.code(),
    };
    sandbox::watch_faults(will).map_err(RunError::start("sigaction failed"))?;
    sandbox::begin(args.seccomp, counting, will).map_err(|e| RunError::Sandbox(args.seccomp, e))?;
    files::begin(args).map_err(RunError::Files)?;
    install_panic_hook(will);
    Ok(())
}

/// Installs a panic hook that logs one line and terminates the VM. A panic in a thread with an
/// orderly shutdown path terminates the VM through that path, and any other panic terminates it
/// immediately.
fn install_panic_hook(will: SeccompTerminationActions) {
    std::panic::set_hook(Box::new(move |info| {
        let kind = sandbox::kind();
        if matches!(
            kind,
            Some(SandboxedThreadKind::Device | SandboxedThreadKind::Socket | SandboxedThreadKind::Balloon)
        ) {
            // The device to which the thread belongs reports the panic.
            return;
        }
        let place = info.location().map(ToString::to_string).unwrap_or_default();
        let said = info.payload_as_str().unwrap_or("nothing").replace('\n', " ");
        if kind == Some(SandboxedThreadKind::Profiler) {
            // Only the search fails, and the operator who waits for its result receives an error.
            log::error!("the search for the guest's kernel panicked at {place}: {said}; please report this");
            return;
        }
        if kind != Some(SandboxedThreadKind::Vcpu) {
            restore_terminal();
        }
        let thread = std::thread::current();
        log::error!(
            "the thread {} panicked at {place}, which terminates the VM: {said}; please report this",
            thread.name().unwrap_or("main")
        );
        if kind != Some(SandboxedThreadKind::Vcpu) {
            sandbox::end_now(will);
        }
    }));
}
