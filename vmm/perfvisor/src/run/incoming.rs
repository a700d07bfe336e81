//! Takes over a VM from another process: `run --incoming unix:PATH`.
//!
//! A process on another host sends the VM as a byte stream ([`stream`]). Within this host:
//!
//! 1. [`Incoming::wait`] waits for the connection to the VM, before this process has helpers and
//!    blocks signals.
//! 2. [`Incoming::receive`] pauses the VM and copies its memory and state. The source process keeps
//!    all of its resources.
//! 3. The machine is built, and its threads wait.
//! 4. [`Arrival::take_over`] terminates the VM in the source process, and starts it here.
//!
//! If this process fails or dies before the last step, the connection to the VM closes, and the VM
//! continues in the source process.

mod stream;

use std::cell::Cell;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use control_api::client::{Client, ClientError};
use control_api::migration::{
    self, MigratedVm, MigrationAddress, MigrationOffer, MigrationResult, MigrationSource,
};
use control_api::peer;
use control_api::protocol::{VmInfo, VmState};
use control_api::request;
use control_api::socket_dir::{ControlSocket, ControlSocketError};
use mmds::service::MetadataService;
use operator::commands::snapshot::{self as source, SnapshotCommandError};
use operator::signals::BlockedSignals;
use perf_core::error_line;
use perf_core::pmu::host::HostPerfCapabilities;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::Value;
use snapshot::SnapshotFormatError;
use snapshot::state::SavedMachine;
use snapshot::stream::MigrationStreamError;
use stream::IncomingStream;
use vmm::kvm::host::Kvm;
use vmm::memory::{GuestRam, MemoryError};
use vmm::vm::restore::{RestoredMachine, RestoredMemory};
use vmm::vm::{RunningVm, VmError};

use super::error::RunError;
use super::restore::{machine_args, saved_addresses};
use crate::cli::RunArgs;
use crate::cli::restore::MachineOptionsError;

/// File permissions of the socket: access only for the user who starts the VM.
const SOCKET_MODE: u32 = 0o600;
/// Virtio device ID of disks.
const VIRTIO_BLOCK: u32 = 2;
/// Maximum time to wait for the source process to exit after it has closed its connection.
const END_TIMEOUT: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

/// Error returned when a VM cannot be taken over.
#[derive(Debug, thiserror::Error)]
pub enum IncomingMigrationError {
    #[error("--incoming")]
    Listen(#[from] ControlSocketError),
    #[error("--incoming {address}")]
    Accept {
        address: MigrationAddress,
        #[source]
        source: io::Error,
    },
    #[error("--incoming fd:{number}: it must be an inherited descriptor of a connected stream socket")]
    Inherited {
        number: i32,
        #[source]
        source: io::Error,
    },
    #[error("--incoming: the VM cannot be received")]
    Stream(#[from] MigrationStreamError),
    #[error("--incoming: the source sends something else than a VM")]
    Unexpected,
    #[error("--incoming: the receiving process was ended by a signal")]
    Stopped,
    #[error("--incoming")]
    Config(#[source] Box<RunError>),
    #[error("--incoming")]
    Host(#[source] VmError),
    #[error("--incoming: the VM to be moved")]
    Source(#[from] ClientError),
    #[error("--incoming: the VM to be moved")]
    Snapshot(#[from] SnapshotCommandError),
    #[error("--incoming: the state of the VM")]
    State(#[from] SnapshotFormatError),
    #[error("--incoming: the options of the VM")]
    Options(#[from] MachineOptionsError),
    #[error("--incoming")]
    Ram(#[from] MemoryError),
    #[error("--incoming: the memory of the VM cannot be received")]
    Memory(#[source] io::Error),
    #[error("--incoming: {0} network devices are given, the VM has {1}; give a --net for each")]
    Networks(usize, usize),
    #[error("--incoming: {0} disks are given, the VM has {1}; give a --disk for each")]
    Disks(usize, usize),
    #[error("--incoming: `perfvisor ctl migrate` was ended, and the VM goes on where it was")]
    Cancelled,
}

/// Connection over which the result of a migration is reported.
#[derive(Debug)]
enum Reply {
    /// The process waits for an answer of one line.
    Line(UnixStream),
    /// The process has sent the VM as a byte stream, and waits for a message of that stream.
    Stream(UnixStream),
}

/// The process that waits for the result of a migration, if any.
#[derive(Default)]
pub(super) struct Requester(Cell<Option<Reply>>);

impl Requester {
    /// Reports to the waiting process that the VM has not moved, unless a result has already been
    /// reported.
    pub(super) fn report_failure(&self, why: &str) {
        let reported = match self.0.take() {
            None => Ok(()),
            Some(Reply::Line(stream)) => migration::answer(&stream, &MigrationResult::Failed(why.to_owned()))
                .map_err(MigrationStreamError::from),
            Some(Reply::Stream(mut stream)) => stream::refuse(&mut stream, why),
        };
        report_absence(reported);
    }

    /// Reports to the waiting process that a VM from this host has moved.
    fn report_move(&self, moved: MigratedVm) {
        if let Some(Reply::Line(stream)) = self.0.take() {
            let answered = migration::answer(&stream, &MigrationResult::Moved(moved));
            report_absence(answered.map_err(MigrationStreamError::from));
        }
    }

    /// Returns whether the process that requested the migration has exited. Always `false` for a
    /// byte stream.
    fn has_ended(&self) -> bool {
        let Some(reply) = self.0.take() else {
            return false;
        };
        let ended = match &reply {
            Reply::Line(stream) => {
                let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
                poll(&mut fds, Some(&Timespec::default())).is_ok_and(|count| count > 0)
            }
            Reply::Stream(_) => false,
        };
        self.0.set(Some(reply));
        ended
    }
}

fn report_absence(reported: Result<(), MigrationStreamError>) {
    if let Err(e) = reported {
        log::warn!("nobody waits for the result of the migration: {}", error_line(&e));
    }
}

/// Checks that the command line has as many disks and network devices as a saved machine.
fn check_devices(args: &RunArgs, saved: &SavedMachine) -> Result<(), IncomingMigrationError> {
    let networks = saved_addresses(saved).count();
    if networks != args.net.len() {
        return Err(IncomingMigrationError::Networks(args.net.len(), networks));
    }
    let disks = saved.devices.iter().filter(|device| device.id == VIRTIO_BLOCK);
    let disks = disks.count();
    if disks != args.disk.len() {
        return Err(IncomingMigrationError::Disks(args.disk.len(), disks));
    }
    Ok(())
}

/// A VM that is moving to this process.
#[derive(Debug)]
pub(super) enum Incoming {
    /// The VM runs in another process on this host.
    Local(Box<LocalVm>),
    /// The VM arrives as a byte stream.
    Stream(Box<IncomingStream>),
}

/// A VM that runs in another process on this host.
#[derive(Debug)]
pub(super) struct LocalVm {
    client: Client,
    /// The source process, if it is visible to this process.
    process: Option<OwnedFd>,
}

impl Incoming {
    /// Waits for a VM. Returns `None` without `--incoming`.
    ///
    /// # Errors
    /// Returns an [`IncomingMigrationError`] if the socket cannot be created, or if the VM does not
    /// answer.
    pub(super) fn wait(
        args: &RunArgs,
        requester: &Requester,
    ) -> Result<Option<Self>, IncomingMigrationError> {
        let Some(address) = &args.incoming else {
            return Ok(None);
        };
        let path = match address {
            MigrationAddress::Unix(path) => path,
            MigrationAddress::Fd(number) => {
                let socket =
                    peer::inherited_stream(*number).map_err(|source| IncomingMigrationError::Inherited {
                        number: *number,
                        source,
                    })?;
                log::info!("waiting for a VM at {address}");
                let vm = IncomingStream::open(socket, 0, requester)?;
                return Ok(Some(Self::Stream(Box::new(vm))));
            }
        };
        let failed = |source| IncomingMigrationError::Accept {
            address: address.clone(),
            source,
        };
        let socket = ControlSocket::bind_at(path, SOCKET_MODE)?;
        socket.listener.set_nonblocking(false).map_err(failed)?;
        log::info!("waiting for a VM at {address}");
        loop {
            let (stream, _) = socket.listener.accept().map_err(failed)?;
            let offered = match migration::receive_offer(&stream) {
                Ok(MigrationOffer::Connection(vm)) => {
                    requester.0.set(Some(Reply::Line(stream)));
                    return Ok(Some(Self::Local(Box::new(LocalVm::new(vm)?))));
                }
                Ok(MigrationOffer::Stream) => IncomingStream::open(stream, 1, requester),
                Err(e) => Err(e.into()),
            };
            match offered {
                Ok(vm) => return Ok(Some(Self::Stream(Box::new(vm)))),
                Err(e) => log::warn!("{address}: an offer is refused: {}", error_line(&e)),
            }
        }
    }

    /// Receives the VM. Returns `args` with the VM's machine options, the saved machine, and the
    /// arrival.
    ///
    /// # Errors
    /// Returns an [`IncomingMigrationError`]. In this case the VM continues in the source process.
    pub(super) fn receive(
        self,
        args: &RunArgs,
        kvm: &Kvm,
        probe: &HostPerfCapabilities,
        signals: &BlockedSignals,
    ) -> Result<(RunArgs, RestoredMachine, Arrival), IncomingMigrationError> {
        let (mut restored, machine, arrival) = match self {
            Self::Local(vm) => vm.receive(args)?,
            Self::Stream(vm) => vm.receive(args, kvm, probe, signals)?,
        };
        for disk in &mut restored.disk {
            disk.shared_lock = true;
        }
        check_devices(&restored, &machine.state)?;
        // Keep the addresses of the saved machine. A default address depends on the names of the VM
        // and the tap device, which may differ here.
        for (net, address) in restored.net.iter_mut().zip(saved_addresses(&machine.state)) {
            net.mac = net.mac.or(Some(address));
        }
        Ok((restored, machine, arrival))
    }
}

impl LocalVm {
    fn new(vm: UnixStream) -> Result<Self, IncomingMigrationError> {
        let client = Client::from_stream(vm)?;
        let pid = i32::try_from(client.info().pid).ok().and_then(Pid::from_raw);
        let process = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Ok(Self { client, process })
    }

    /// Pauses the VM and receives its memory and state.
    fn receive(self, args: &RunArgs) -> Result<(RunArgs, RestoredMachine, Arrival), IncomingMigrationError> {
        let Self { mut client, process } = self;
        let stays_paused = client.info().state == VmState::Paused;
        let paused_at = Instant::now();
        let memory_bytes = source::pause(&mut client)?;
        let ram = GuestRam::new(memory_bytes)?;
        source::copy_memory(&mut client, memory_bytes, |piece, file| {
            if piece.bytes == 0 {
                return Ok(());
            }
            let read = ram.read_from(piece.offset, file, piece.bytes);
            read.map_err(IncomingMigrationError::Memory)
        })?;
        let state = snapshot::decode(&source::read_state(&mut client)?)?;
        let metadata = source::read_metadata(&mut client)?;
        client.call(request::SnapshotShareDisks)?;
        let restored = machine_args(args, &state)?;
        log::info!(
            "received {} from process {}",
            client.info().name,
            client.info().pid
        );
        let machine = RestoredMachine {
            state: Box::new(state),
            memory: RestoredMemory::Moved(ram),
            accepts_losses: args.restore_loses,
        };
        let arrival = LocalArrival {
            client,
            process,
            paused_at,
            stays_paused,
            metadata,
        };
        Ok((restored, machine, Arrival::Local(Box::new(arrival))))
    }
}

/// A VM that has been received but is still owned by the source process.
#[derive(Debug)]
pub(super) enum Arrival {
    /// The source process is on this host.
    Local(Box<LocalArrival>),
    /// The VM arrived as a byte stream.
    Stream(Box<IncomingStream>),
}

/// A VM that has been received from another process on this host.
#[derive(Debug)]
pub(super) struct LocalArrival {
    client: Client,
    process: Option<OwnedFd>,
    paused_at: Instant,
    stays_paused: bool,
    /// Data of the VM's metadata service, a JSON document.
    metadata: Option<Value>,
}

impl Arrival {
    /// Returns a one-line description of the guest for operators: "moved from" and the name of the
    /// source VM.
    pub(super) fn description(&self) -> String {
        let name = match self {
            Self::Local(vm) => &vm.client.info().name,
            Self::Stream(vm) => vm.name(),
        };
        format!("moved from {name}")
    }

    /// Returns the source process, if it is on this host.
    pub(super) fn origin(&self) -> Option<MigrationSource> {
        match self {
            Self::Local(vm) => {
                let VmInfo { name, pid, .. } = vm.client.info().clone();
                Some(MigrationSource { name, pid })
            }
            Self::Stream(vm) => vm.origin(),
        }
    }

    /// Copies the data of the VM's metadata service to `service`.
    pub(super) fn restore_metadata(&mut self, service: Option<&MetadataService>) {
        let document = match self {
            Self::Local(vm) => vm.metadata.take(),
            Self::Stream(vm) => vm.take_metadata(),
        };
        match (document, service) {
            (None, _) => {}
            (Some(_), None) => log::warn!("the VM's metadata document is lost; use --mmds to keep it"),
            (Some(document), Some(service)) => {
                if let Err(e) = service.put(document) {
                    log::warn!("the VM's metadata document is lost: {}", error_line(&e));
                }
            }
        }
    }

    /// Starts the VM in this process as VM `name`, after the VM has terminated or stopped for good
    /// in the source process.
    ///
    /// # Errors
    /// Returns an [`IncomingMigrationError`]. In this case the VM continues in the source process.
    pub(super) fn take_over(
        self,
        running: &RunningVm,
        name: &str,
        requester: &Requester,
    ) -> Result<(), IncomingMigrationError> {
        match self {
            Self::Local(vm) => vm.take_over(running, name, requester),
            Self::Stream(mut vm) => {
                let stays_paused = vm.wait_for_run()?;
                // From this point on, the VM runs in this process even if an error occurs, so no
                // failure is reported to the requester.
                requester.0.take();
                running.take_over(stays_paused);
                vm.report_run(name);
                log::info!("{} runs here", vm.name());
                Ok(())
            }
        }
    }
}

impl LocalArrival {
    fn take_over(
        mut self,
        running: &RunningVm,
        name: &str,
        requester: &Requester,
    ) -> Result<(), IncomingMigrationError> {
        if requester.has_ended() {
            return Err(IncomingMigrationError::Cancelled);
        }
        match self.client.call(request::SnapshotEnd { stop: true }) {
            Ok(()) => {}
            // A process that has died cannot run the VM, regardless of whether it has read the
            // request.
            Err(e) if e.is_gone() && self.has_ended() => {}
            Err(e) => return Err(e.into()),
        }
        running.take_over(self.stays_paused);
        let downtime = self.paused_at.elapsed();
        log::info!(
            "{} runs here after a pause of {:.1} ms",
            self.client.info().name,
            downtime.as_secs_f64() * 1e3
        );
        requester.report_move(MigratedVm {
            name: name.to_owned(),
            pid: sandbox::host_pid(),
            downtime_ns: nanoseconds(downtime),
        });
        Ok(())
    }

    /// Returns whether the source process has exited. Waits for a limited time.
    fn has_ended(&self) -> bool {
        self.process.as_ref().is_some_and(|process| {
            let mut fds = [PollFd::new(process, PollFlags::IN)];
            poll(&mut fds, Some(&END_TIMEOUT)).is_ok_and(|count| count > 0)
        })
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    /// The VM's new process notices if the process that requested the migration exits. Ctrl-C in
    /// `ctl migrate` must cancel the migration.
    #[test]
    fn end_of_the_requester_is_noticed() {
        let (mut end, stream) = UnixStream::pair().unwrap();
        let requester = Requester(Cell::new(Some(Reply::Line(stream))));
        assert!(!requester.has_ended());
        requester.report_failure("no");
        let mut answer = String::new();
        end.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "{\"failed\":\"no\"}\n");

        let (end, stream) = UnixStream::pair().unwrap();
        let requester = Requester(Cell::new(Some(Reply::Line(stream))));
        drop(end);
        assert!(requester.has_ended());
        requester.report_failure("nobody hears it");
        assert!(!Requester::default().has_ended());
    }
}
