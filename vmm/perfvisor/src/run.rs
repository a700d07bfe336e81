//! `perfvisor run`: builds a machine from the arguments, runs the VM, and maps its stop reason to
//! an exit status.
#![expect(unsafe_code, reason = "asks the kernel for the process's CPU time")]

mod children;
mod consoles;
mod ending;
mod error;
mod files;
mod footprint;
mod incoming;
mod jail;
pub(crate) mod machine;
mod restore;
mod start;

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use children::ChildReaper;
use consoles::{Consoles, Subscriber};
use ending::{PanicDetector, PanicMessage};
pub use error::RunError;
use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
pub use footprint::configure_malloc;
use incoming::{Arrival, Requester};
use perf_core::pmu::host::HostPerfCapabilities;
use sandbox::{ProcessConfinement, SandboxedThreadKind, SocketBroker};
use start::{Helpers, HostSetup};
use virtio_devices::device::VirtioDevice;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vpmu::CounterBackingPolicy;
use vpmu::perf_core_events::MAX_EVENTS_PER_COUNTER;

use crate::background::{DaemonStartup, ServiceNotifier};
use crate::cli::RunArgs;
use crate::cli::restore::options_of_guest;
use crate::devices::{self, VmDevices};
use crate::inherited::InheritedDescriptors;
use crate::stop_handler::StopHandler;
use control_api::socket_dir::{self, ControlSocket, ControlSocketError};
use guest_patching::rdpmc::RdpmcMode;
use operator::exit::ExitStatus;
use operator::input;
use operator::signals::StopSignals;
use perf_core::error_line;
use sandbox::privileges;
use vmm::boot::KernelFormat;
use vmm::console::RawTerminal;
use vmm::control::server::{ControlServer, ControlSocketAccess, VmControlInterface};
use vmm::gdb::server::{GdbServer, GdbSocket};
use vmm::pmu::{PmuConfig, VmPmu};
use vmm::timers::{RotationTimer, SchedulingTickTimer};
use vmm::vcpu::control::{ResetPolicy, VmRunControl, VmStopReason};
use vmm::vcpu::registry::VcpuRegistry;
use vmm::vcpu::stats;
use vmm::vm::restart::GuestResetHandler;
use vmm::vm::restore::RestoredMachine;
use vmm::vm::{BackgroundKvmSetup, RunningVm, Vm, VmBuildInputs, VmConfig};

/// Number of file descriptors that a VM needs in addition to those of its vCPUs, including a margin
/// for clients and devices.
const DESCRIPTORS: u64 = 64;
/// Number of file descriptors that each vCPU needs for KVM, statistics, timers and run time. Host
/// events need more.
const DESCRIPTORS_OF_A_VCPU: u64 = 8;
/// Description of the stop signals in an error message.
const STOP_SIGNALS: &str = "the signals that end it";
/// Time limit for writing the guest's remaining console output after the VM has stopped.
const CONSOLE_DRAIN: Duration = Duration::from_secs(2);

/// Time at which `main` started, and the CPU time that the process had consumed by then.
#[derive(Clone, Copy, Debug)]
pub struct StartTime {
    main: Instant,
    /// CPU time consumed before `main` by loading and relocation.
    before_main: Duration,
}

impl StartTime {
    /// Returns the current time. Must be the first call in `main`.
    pub fn now() -> Self {
        let mut used = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the pointer refers to a live local variable of the right type.
        unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut used) };
        Self {
            main: Instant::now(),
            before_main: Duration::new(
                u64::try_from(used.tv_sec).unwrap_or(0),
                u32::try_from(used.tv_nsec).unwrap_or(0),
            ),
        }
    }

    fn elapsed(&self) -> Duration {
        self.before_main + self.main.elapsed()
    }

    fn log_first_entry(&self) {
        log::info!(
            "first guest instruction {:.1} ms after exec ({:.1} ms of it before main)",
            self.elapsed().as_secs_f64() * 1e3,
            self.before_main.as_secs_f64() * 1e3
        );
    }
}

/// Runs a guest until it stops. `log_file` receives log messages in addition to standard error.
///
/// # Errors
/// Returns [`RunError`] if the VM cannot start or fails. The program then exits with the status for
/// bad input.
pub fn run(args: &RunArgs, start: StartTime, log_file: Option<&File>) -> Result<ExitStatus, RunError> {
    let requester = Requester::default();
    let ended = run_for(args, start, log_file, &requester);
    if let Err(e) = &ended {
        requester.report_failure(&error_line(e));
    }
    ended
}

/// Runs a guest until it stops. With `--incoming`, `requester` is set to the process that waits for
/// the result of the migration.
fn run_for(
    args: &RunArgs,
    start: StartTime,
    log_file: Option<&File>,
    requester: &Requester,
) -> Result<ExitStatus, RunError> {
    let helpers = Helpers::start(args, requester)?;
    // Dropped last, so that the broker then removes the VM's sockets.
    let _finish = FinishBroker(helpers.broker.clone());
    let host = HostSetup::of(args, helpers.opener, log_file)?;
    let (broker, manager) = (helpers.broker, helpers.manager);
    // Child processes of a daemon must not hold the streams of its starter, which may wait for them
    // to be closed.
    let log = log_file.or(helpers.starting.as_ref().map(DaemonStartup::null));
    // Receive the memory after starting the helpers, so that they do not share it and the VM is
    // paused only briefly.
    let (saved, mut arrival) = match helpers.incoming {
        Some(incoming) => {
            let (args, machine, arrival) =
                incoming.receive(args, &host.kvm, &host.probe, &host.stop_signals)?;
            (Some((args, machine)), Some(arrival))
        }
        None => (helpers.snapshot, None),
    };
    let (restored_args, saved) = saved.unzip();
    let args = restored_args.as_ref().unwrap_or(args);
    let state = saved.as_ref().map(|saved| &*saved.state);
    let mut config = machine::restored_config(args, &host.kvm, &host.probe, state)?;
    config.kernel_reader = Some(helpers.kernel_reader);
    warn_if_few_descriptors(helpers.descriptors, &config, &host.probe);

    // Detect configuration errors before any thread runs.
    config.pmu.core_config().check()?;
    let (name, sockets) = ServerSockets::open(args)?;
    let devices = devices::create_devices(args, &name, log, &broker)?;
    if let Some(arrival) = &mut arrival {
        arrival.restore_metadata(devices.metadata.as_deref());
    }
    let resources = VmResources {
        args,
        name: &name,
        config: &config,
        host,
        saved: saved.map(|saved| restore::with_own_addresses(saved, args, &name)),
        arrival: arrival.as_ref(),
        sockets,
        devices,
        broker: &broker,
        manager: &manager,
        inherited: helpers.inherited,
    };
    let started = resources.start_vm(start)?;
    if let Some(arrival) = arrival {
        arrival.take_over(&started.running, &name, requester)?;
    }
    if let Some(starting) = helpers.starting {
        starting.runs().map_err(RunError::Daemon)?;
    }
    manager.ready();
    // All threads have been started, so the code that starts them is no longer needed in memory.
    footprint::drop_startup_pages();
    started.run_until_stopped(args, &manager)
}

/// The resources of a VM that this process opens before it enters a jail and starts threads.
struct VmResources<'a> {
    args: &'a RunArgs,
    name: &'a str,
    config: &'a VmConfig,
    host: HostSetup,
    saved: Option<RestoredMachine>,
    arrival: Option<&'a Arrival>,
    sockets: ServerSockets,
    devices: VmDevices,
    broker: &'a Arc<SocketBroker>,
    manager: &'a Arc<ServiceNotifier>,
    inherited: InheritedDescriptors,
}

impl VmResources<'_> {
    /// Starts the threads of the VM, after this process has dropped its privileges. From here on,
    /// the VM opens no socket of the host's network and no file of another process.
    fn start_vm(self, start: StartTime) -> Result<StartedVm, RunError> {
        let (args, host) = (self.args, self.host);
        // A process to be jailed still has a single thread.
        let jail = jail::separate(args, self.config)?;
        let begun = host.begun.unwrap_or_else(BackgroundKvmSetup::now);
        let stop_signals = host.stop_signals.wait().map_err(RunError::start(STOP_SIGNALS))?;
        let (consoles, virtio_console) = Consoles::open(args)?;
        let mut devices = self.devices.all;
        let limiters = devices.iter().flat_map(|device| device.rate_limiters()).collect();
        // Appended last, so that the other devices keep their addresses.
        devices.extend(virtio_console.map(|device| Box::new(device) as Box<dyn VirtioDevice>));
        let (console, panic) = PanicDetector::new(consoles.serial().writer());
        let inputs = VmBuildInputs {
            begun,
            kvm: &host.kvm,
            config: self.config,
            devices,
            probe: &host.probe,
            console: Box::new(console),
        };
        let mut vm = build_vm(inputs, self.saved, args, self.arrival.is_some())?;
        vm.on_first_entry(Box::new(move || start.log_first_entry()));
        let terminal = raw_terminal(&consoles)?;
        let paths = self.sockets.socket_paths();
        files::register_sockets_for_removal(args, self.name, &paths, self.broker)?;
        jail::close(jail, args, self.inherited)?;
        confine(args)?;
        let running = vm.start()?;
        let controlled = VmControlInterface {
            balloon: self.devices.balloon,
            metadata: self.devices.metadata,
            limiters,
            ..controlled(self.name, self.config, args, &consoles, &running, self.arrival)
        };
        let (mut servers, gdb) = self.sockets.serve(controlled, &running)?;
        let signals = SignalHandlers::new(stop_signals, args, &running, self.manager, &mut servers)?;
        Ok(StartedVm {
            signals,
            gdb,
            servers,
            running,
            terminal,
            consoles,
            panic,
        })
    }
}

/// Builds the VM, from a kernel or from `saved`. A VM that is to be taken over from another process
/// (`is_arrival`) stays held until then.
fn build_vm(
    inputs: VmBuildInputs<'_>,
    saved: Option<RestoredMachine>,
    args: &RunArgs,
    is_arrival: bool,
) -> Result<Vm, RunError> {
    let config = inputs.config;
    let mut vm = match saved {
        None => Vm::boot(inputs)?,
        Some(saved) => Vm::restore(inputs, saved)?,
    };
    if is_arrival {
        vm.start_held();
    } else if args.restore_paused {
        vm.start_paused();
    }
    report_loaded(&vm, config);
    Ok(vm)
}

/// Handlers of the signals of the main thread.
struct SignalHandlers {
    stopping: StopHandler,
    /// Readable after the size of the terminal has changed.
    resized: EventFd,
}

impl SignalHandlers {
    /// Creates the handlers of `signals`. Adds the handler of ended child processes to `servers`.
    fn new(
        signals: StopSignals,
        args: &RunArgs,
        running: &RunningVm,
        manager: &Arc<ServiceNotifier>,
        servers: &mut Vec<Subscriber>,
    ) -> Result<Self, RunError> {
        let (control, bus) = (running.control().clone(), running.bus().clone());
        let resized = signals.resized().map_err(RunError::start("dup failed"))?;
        let child_ended = signals.child_ended().map_err(RunError::start("dup failed"))?;
        servers.push(Arc::new(Mutex::new(ChildReaper::new(child_ended))));
        let stopping = StopHandler::new(signals, args.stop_timeout, control, bus, manager.clone())
            .map_err(RunError::start("timerfd_create failed"))?;
        Ok(Self { stopping, resized })
    }
}

/// A VM whose vCPU threads run, with its consoles and servers. The threads are stopped on drop.
struct StartedVm {
    signals: SignalHandlers,
    gdb: Option<GdbServer>,
    servers: Vec<Subscriber>,
    running: RunningVm,
    terminal: Option<RawTerminal>,
    consoles: Consoles,
    panic: PanicMessage,
}

impl StartedVm {
    /// Runs the event loop until the VM stops, and returns the exit status of the program.
    fn run_until_stopped(
        mut self,
        args: &RunArgs,
        manager: &ServiceNotifier,
    ) -> Result<ExitStatus, RunError> {
        let restarter = self.running.take_restarter();
        let served = serve(
            &self.running,
            restarter,
            self.signals,
            &self.consoles,
            self.servers,
        );
        manager.stopping();
        drop(self.gdb);
        stop(&mut self.running, self.consoles, self.terminal);
        if args.stats {
            report_stats(&self.running, args.cpus.present());
        }
        served.map_err(RunError::Loop)?;
        ending::log_end(self.running.control().reason(), &self.panic);
        Ok(exit_status(self.running.control()))
    }
}

/// Makes the terminal raw if a console uses it.
fn raw_terminal(consoles: &Consoles) -> Result<Option<RawTerminal>, RunError> {
    if !consoles.has_terminal() {
        return Ok(None);
    }
    consoles::print_keys();
    RawTerminal::enter().map_err(RunError::start("the terminal cannot be made raw"))
}

/// Stops the VM and writes the rest of its console output.
fn stop(running: &mut RunningVm, consoles: Consoles, terminal: Option<RawTerminal>) {
    // No vCPU may continue waiting for console space, regardless of why the loop ended.
    consoles.stop();
    running.stop_and_join();
    let lost = consoles.finish(CONSOLE_DRAIN);
    drop(terminal);
    if lost > 0 {
        log::warn!("{lost} bytes of guest output were not written");
    }
}

/// Returns the seccomp and landlock settings for the VM's helper processes.
fn confinement(args: &RunArgs) -> ProcessConfinement {
    ProcessConfinement {
        seccomp: args.seccomp,
        landlock: args.landlock && sandbox::has_landlock(),
    }
}

/// A guard that terminates the process of the socket broker on drop.
struct FinishBroker(Arc<SocketBroker>);

impl Drop for FinishBroker {
    fn drop(&mut self) {
        self.0.finish();
    }
}

/// Drops all remaining privileges. Called when every host resource of the VM is open.
fn confine(args: &RunArgs) -> Result<(), RunError> {
    jail::limit_file_size(args)?;
    privileges::drop_privileges()?;
    if args.on_reset == ResetPolicy::Restart {
        check_restart_files([&args.kernel, &args.initrd].into_iter().flatten())?;
    }
    files::restrict(args).map_err(RunError::Files)?;
    sandbox::confine().map_err(|e| RunError::Sandbox(args.seccomp, e))
}

/// Sockets for operators, observers and debuggers, before the servers start.
struct ServerSockets {
    sockets: Vec<(ControlSocketAccess, ControlSocket)>,
    gdb: Option<GdbSocket>,
}

impl ServerSockets {
    /// Returns the paths of the control sockets.
    fn socket_paths(&self) -> Vec<PathBuf> {
        let sockets = self.sockets.iter();
        sockets.map(|(_, socket)| socket.path().to_owned()).collect()
    }

    /// Opens the requested sockets, and returns them with the VM's name.
    fn open(args: &RunArgs) -> Result<(String, Self), RunError> {
        let (name, socket) = control_socket(args.name.as_deref())?;
        let observed = args
            .observers
            .as_ref()
            .map(|at| ControlSocket::bind_at(&at.path, at.mode));
        let observed = observed.transpose().map_err(RunError::Observers)?;
        let sockets = [
            (ControlSocketAccess::Operators, socket),
            (ControlSocketAccess::Observers, observed),
        ];
        let gdb = args.gdb.as_ref();
        let ends = Self {
            sockets: sockets
                .into_iter()
                .filter_map(|(access, socket)| Some((access, socket?)))
                .collect(),
            gdb: gdb.map(|gdb| GdbSocket::bind(&gdb.socket)).transpose()?,
        };
        Ok((name, ends))
    }

    /// Starts the servers on the sockets, in the main loop and in the debugger thread.
    fn serve(
        self,
        controlled: VmControlInterface,
        running: &RunningVm,
    ) -> Result<(Vec<Subscriber>, Option<GdbServer>), RunError> {
        let mut servers: Vec<Subscriber> = Vec::new();
        if !self.sockets.is_empty() {
            let server = ControlServer::new(Arc::new(controlled), self.sockets);
            servers.push(Arc::new(Mutex::new(server)));
        }
        let gdb = self.gdb.map(|socket| socket.serve(running)).transpose()?;
        Ok((servers, gdb))
    }
}

/// Checks that a restart of the guest can read its files without the capabilities that this process
/// had at its start.
fn check_restart_files<'a>(files: impl Iterator<Item = &'a PathBuf>) -> Result<(), RunError> {
    for path in files {
        input::can_be_read(path).map_err(|e| RunError::ReadAgain(path.clone(), e))?;
    }
    Ok(())
}

/// Logs a warning if `limit` is less than the number of descriptors that a VM with this `config`
/// may need.
fn warn_if_few_descriptors(limit: Option<u64>, config: &VmConfig, probe: &HostPerfCapabilities) {
    let PmuConfig { model, policy, .. } = &config.pmu;
    let cpus = config.cpus.max();
    let hardware = probe.slots() > 0
        && matches!(
            policy,
            CounterBackingPolicy::Auto | CounterBackingPolicy::Hardware
        );
    let counters = u64::from(model.general() + model.fixed());
    let events = if hardware {
        counters * MAX_EVENTS_PER_COUNTER as u64
    } else {
        0
    };
    let need = DESCRIPTORS + u64::from(cpus) * (DESCRIPTORS_OF_A_VCPU + events);
    if let Some(limit) = limit.filter(|limit| *limit < need) {
        log::warn!(
            "{cpus} vCPUs with {counters} counters each can need {need} file descriptors, but the \
            limit is {limit}; raise it (ulimit -Hn, LimitNOFILE=), or use fewer counters \
            (--pmu-counters)"
        );
    }
}

/// Returns the VM's name and opens its control socket. A VM without a user-supplied name may run
/// without a control socket.
fn control_socket(name: Option<&str>) -> Result<(String, Option<ControlSocket>), ControlSocketError> {
    let dir = socket_dir::directory();
    match name {
        Some(name) => {
            let socket = ControlSocket::bind(&dir, name)?;
            Ok((name.to_owned(), Some(socket)))
        }
        None => {
            let name = format!("vm-{}", sandbox::starter_pid());
            let socket = ControlSocket::bind(&dir, &name)
                .inspect_err(|e| {
                    let why = error_line(e);
                    log::warn!(
                        "no control socket; ctl, stat and record are unavailable for this \
                         VM: {why}"
                    );
                })
                .ok();
            Ok((name, socket))
        }
    }
}

/// Returns the description and the handles of the running VM for the control socket's server.
fn controlled(
    name: &str,
    config: &VmConfig,
    args: &RunArgs,
    consoles: &Consoles,
    running: &RunningVm,
    arrival: Option<&Arrival>,
) -> VmControlInterface {
    let loaded = running.loaded();
    VmControlInterface {
        name: name.to_owned(),
        pmu_name: config.pmu.model.generation().to_string(),
        guest: match (arrival, &args.kernel, &args.restore) {
            (Some(arrival), ..) => arrival.description(),
            (None, Some(path), _) => path.display().to_string(),
            (None, None, Some(dir)) => format!("restored from {}", dir.display()),
            (None, None, None) => "built-in guest".into(),
        },
        moved_from: arrival.and_then(Arrival::origin),
        // A daemon has no terminal, because its standard streams are `/dev/null`.
        console: match consoles.serial().location() {
            "tty" if args.daemonize => "none".to_owned(),
            place => place.to_owned(),
        },
        virtio_console: consoles.virtio_location().unwrap_or_default().to_owned(),
        started: Instant::now(),
        control: running.control().clone(),
        pmu: running.pmu().clone(),
        registry: running.registry().clone(),
        view_requests: AtomicU64::new(0),
        bus: running.bus().clone(),
        limiters: Vec::new(),
        metadata: None,
        symbols: running.symbols().clone(),
        flat: loaded.kind == KernelFormat::Multiboot,
        memory_bytes: args.memory,
        balloon: None,
        snapshots: running.snapshots().clone(),
        options: options_of_guest(args, running.pmu().has_branch_records()),
    }
}

fn report_loaded(vm: &Vm, config: &VmConfig) {
    let loaded = vm.loaded();
    log::info!(
        "{} at {:#x}-{:#x}, {} vCPUs, {} MiB, PMU {}",
        loaded.kind,
        loaded.kernel.start,
        loaded.kernel.end,
        config.cpus.present(),
        config.memory_bytes >> 20,
        config.pmu.model.generation()
    );
    for site in &loaded.rdpmc_sites {
        let what = match config.rdpmc {
            _ if config.own_pmu.is_some() => "KVM's own vPMU answers it",
            RdpmcMode::Auto | RdpmcMode::Trap => "replaced by a trap",
            RdpmcMode::Hwbp => "a hardware breakpoint",
            RdpmcMode::Off => "left as it is",
        };
        log::info!("rdpmc at {}: {what}", site.location());
    }
}

fn report_stats(running: &RunningVm, at_start: u8) {
    let mut all: Vec<_> = running
        .registry()
        .slots()
        .iter()
        .map(|slot| slot.stats())
        .collect();
    // Omit exit reasons that never occurred.
    while all.len() > usize::from(at_start) && all.last().is_some_and(|stats| stats.exits.get() == 0) {
        all.pop();
    }
    operator::commands::print_stderr(&format!("perfvisor: vPMU statistics\n{}", stats::table(&all)));
}

fn exit_status(control: &VmRunControl) -> ExitStatus {
    match control.reason() {
        Some(VmStopReason::PowerOff | VmStopReason::Operator) => ExitStatus::PoweredOff,
        Some(VmStopReason::DebugExit(status)) => ExitStatus::Guest(status),
        Some(VmStopReason::Reset) => ExitStatus::Reset,
        Some(VmStopReason::NotRestarted) => ExitStatus::BadInput,
        Some(VmStopReason::TripleFault) => ExitStatus::TripleFault,
        Some(VmStopReason::Signal(_)) => ExitStatus::Terminated,
        Some(VmStopReason::Failed) | None => ExitStatus::Internal,
    }
}

/// Runs the event loop of the main thread, which handles console input, signals, operators,
/// perf-core ticks, and the end of the VM.
fn serve(
    running: &RunningVm,
    restarter: Option<GuestResetHandler>,
    signals: SignalHandlers,
    consoles: &Consoles,
    servers: Vec<Subscriber>,
) -> Result<(), event_manager::Error> {
    let quit = EventFd::new(EFD_NONBLOCK).map_err(io_error)?;
    let mut manager: EventManager<Subscriber> = EventManager::new()?;
    let serial = running.bus().serial().clone();
    let SignalHandlers { stopping, resized } = signals;
    for part in consoles.subscribers(serial, resized, &quit).map_err(io_error)? {
        manager.add_subscriber(part);
    }
    let housekeeping = Arc::new(Mutex::new(Housekeeping {
        control: running.control().clone(),
        pmu: running.pmu().clone(),
        quit,
        stopping,
        ticks: SchedulingTickTimer::new(running.pmu().tick_requests()).map_err(io_error)?,
        turns: RotationTimer::new(running.pmu().mux()).map_err(io_error)?,
        registry: running.registry().clone(),
        restarter,
    }));
    manager.add_subscriber(housekeeping.clone());
    for server in servers {
        manager.add_subscriber(server);
    }
    sandbox::fault_point(SandboxedThreadKind::Main);
    while running.control().reason().is_none() {
        manager.run()?;
        housekeeping
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .follow_perf_core();
    }
    Ok(())
}

fn io_error(e: io::Error) -> event_manager::Error {
    event_manager::Error::Epoll(vmm_sys_util::errno::Error::new(
        e.raw_os_error().unwrap_or(libc::EIO),
    ))
}

/// Handler of the main thread's signals and timers, which stop the VM, reset it, or drive perf-core
/// scheduling.
struct Housekeeping {
    control: Arc<VmRunControl>,
    pmu: Arc<VmPmu>,
    quit: EventFd,
    stopping: StopHandler,
    ticks: SchedulingTickTimer,
    turns: RotationTimer,
    registry: Arc<VcpuRegistry>,
    /// Handler of guest resets; `None` if a guest reset stops the VM.
    restarter: Option<GuestResetHandler>,
}

impl Housekeeping {
    /// Adjusts the timers of the tick and of the rotation to the open events. Called after each
    /// iteration of the loop.
    fn follow_perf_core(&mut self) {
        self.ticks.serve_requests();
        self.turns.follow(self.pmu.core());
    }

    fn fds(&self) -> Vec<RawFd> {
        let ejected = self.registry.plug().map(|plug| plug.ejected().as_raw_fd());
        let own = [
            self.control.stopped_event().as_raw_fd(),
            self.quit.as_raw_fd(),
            self.ticks.as_raw_fd(),
            self.ticks.wakeup().as_raw_fd(),
            self.turns.as_raw_fd(),
        ];
        let reset = self
            .restarter
            .as_ref()
            .map(|restarter| restarter.event().as_raw_fd());
        let own = own.into_iter().chain(self.stopping.fds());
        own.chain(ejected).chain(reset).collect()
    }
}

impl MutEventSubscriber for Housekeeping {
    fn process(&mut self, events: Events, _: &mut EventOps) {
        let fd = events.fd();
        if fd == self.quit.as_raw_fd() {
            let _ = self.quit.read();
            self.control.stop(VmStopReason::Operator);
        } else if self.stopping.serve(fd) {
        } else if fd == self.ticks.as_raw_fd() {
            self.ticks.handle_expiration(self.pmu.core());
            if self.pmu.core().has_unhandled_errors() {
                // Kick the vCPU, because its counter has lost the hardware slot and it may stay in
                // guest mode for a long time.
                self.registry.kicker().kick();
            }
        } else if fd == self.ticks.wakeup().as_raw_fd() {
            let _ = self.ticks.wakeup().read();
        } else if fd == self.turns.as_raw_fd() {
            self.turns.handle_expiration(self.pmu.core());
        } else if let Some(restarter) = &mut self.restarter
            && fd == restarter.event().as_raw_fd()
        {
            restarter.serve();
        } else if self
            .registry
            .plug()
            .is_some_and(|plug| fd == plug.ejected().as_raw_fd())
        {
            self.registry.stop_ejected();
        }
        // The stop event needs no handler, because the loop checks the stop reason after each
        // event.
    }

    fn init(&mut self, ops: &mut EventOps) {
        for fd in self.fds() {
            if let Err(e) = ops.add(Events::new_raw(fd, EventSet::IN)) {
                log::error!("event loop: {}", error_line(&e));
                self.control.stop(VmStopReason::Failed);
            }
        }
    }
}
