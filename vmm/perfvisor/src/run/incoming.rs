//! Takes a VM over from another process of this host: `run --incoming unix:PATH`.
//!
//! 1. [`Incoming::wait`], before this process has helpers and blocks signals, waits for the connection
//!    to the VM.
//! 2. [`Incoming::receive`] pauses the VM and copies its memory and state. The other process keeps all
//!    that it has.
//! 3. The machine is built, and its threads wait.
//! 4. [`Arrival::take_over`] ends the VM in the other process, and starts it here.
//!
//! If this process fails or dies before the last step, the connection to the VM closes, and the VM
//! goes on where it was.

use std::cell::Cell;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use control_api::client::{Client, ClientError};
use control_api::migration::{self, MigrationResult, MovedVm, VmOrigin};
use control_api::protocol::{VmInfo, VmState};
use control_api::request;
use control_api::socket_dir::{Socket, SocketError};
use operator::commands::snapshot::{self as source, SnapshotCommandError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use snapshot::FormatError;
use vmm::memory::{GuestRam, MemoryError};
use vmm::vm::RunningVm;
use vmm::vm::restore::{RestoredMachine, RestoredMemory};

use super::restore::{machine_args, saved_addresses};
use crate::cli::RunArgs;
use crate::cli::restore::MachineOptionsError;

/// File permissions of the socket: its user only.
const SOCKET_MODE: u32 = 0o600;
/// Time limit for the end of a process whose connection has closed.
const END_TIMEOUT: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

/// Error of taking a VM over.
#[derive(Debug, thiserror::Error)]
pub enum IncomingError {
    #[error("--incoming")]
    Listen(#[from] SocketError),
    #[error("--incoming unix:{}", path.display())]
    Accept {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("--incoming: the VM to be moved")]
    Source(#[from] ClientError),
    #[error("--incoming: the VM to be moved")]
    Snapshot(#[from] SnapshotCommandError),
    #[error("--incoming: the state of the VM")]
    State(#[from] FormatError),
    #[error("--incoming: the options of the VM")]
    Options(#[from] MachineOptionsError),
    #[error("--incoming")]
    Ram(#[from] MemoryError),
    #[error("--incoming: the memory of the VM cannot be received")]
    Memory(#[source] io::Error),
    #[error("--incoming: {0} network devices are given, the VM has {1}; give a --net for each")]
    Networks(usize, usize),
    #[error("--incoming: `perfvisor ctl migrate` was ended, and the VM goes on where it was")]
    Cancelled,
}

/// The process that waits for the result of a migration.
#[derive(Default)]
pub(super) struct Requester(Cell<Option<UnixStream>>);

impl Requester {
    /// Reports that the VM has not moved, unless it has.
    pub(super) fn report_failure(&self, why: &str) {
        self.answer(&MigrationResult::Failed(why.to_owned()));
    }

    fn answer(&self, result: &MigrationResult) {
        if let Some(stream) = self.0.take()
            && let Err(e) = migration::answer(&stream, result)
        {
            log::warn!("nobody waits for the result of the migration: {e}");
        }
    }

    /// Returns whether the process has ended.
    fn has_ended(&self) -> bool {
        let Some(stream) = self.0.take() else {
            return false;
        };
        let mut fds = [PollFd::new(&stream, PollFlags::RDHUP)];
        let ended = poll(&mut fds, Some(&Timespec::default())).is_ok_and(|count| count > 0);
        self.0.set(Some(stream));
        ended
    }
}

/// A VM that another process runs and that is to move here.
#[derive(Debug)]
pub(super) struct Incoming {
    client: Client,
    /// The other process, if this process can see it.
    process: Option<OwnedFd>,
}

impl Incoming {
    /// Waits for a VM. Returns `None` without `--incoming`.
    ///
    /// # Errors
    /// Returns an [`IncomingError`] if the socket cannot be created, or if the VM does not answer.
    pub(super) fn wait(args: &RunArgs, requester: &Requester) -> Result<Option<Self>, IncomingError> {
        let Some(address) = &args.incoming else {
            return Ok(None);
        };
        let failed = |source| IncomingError::Accept {
            path: address.path().to_owned(),
            source,
        };
        let socket = Socket::bind_at(address.path(), SOCKET_MODE)?;
        socket.listener.set_nonblocking(false).map_err(failed)?;
        log::info!("waiting for a VM at unix:{}", address.path().display());
        let vm = loop {
            let (stream, _) = socket.listener.accept().map_err(failed)?;
            match migration::receive_offer(&stream) {
                Ok(vm) => {
                    requester.0.set(Some(stream));
                    break vm;
                }
                Err(e) => log::warn!("unix:{}: an offer is refused: {e}", address.path().display()),
            }
        };
        let client = Client::over(vm)?;
        let pid = i32::try_from(client.info().pid).ok().and_then(Pid::from_raw);
        let process = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Ok(Some(Self { client, process }))
    }

    /// Pauses the VM and receives it. Returns `args` with the options of its machine.
    ///
    /// # Errors
    /// Returns an [`IncomingError`], in which case the VM goes on where it was.
    pub(super) fn receive(
        self,
        args: &RunArgs,
    ) -> Result<(RunArgs, RestoredMachine, Arrival), IncomingError> {
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
            read.map_err(IncomingError::Memory)
        })?;
        let state = snapshot::decode(&source::read_state(&mut client)?)?;
        client.call(request::SnapshotShareDisks)?;
        let mut restored = machine_args(args, &state)?;
        for disk in &mut restored.disk {
            disk.shared_lock = true;
        }
        let addresses: Vec<_> = saved_addresses(&state).collect();
        if addresses.len() != restored.net.len() {
            return Err(IncomingError::Networks(restored.net.len(), addresses.len()));
        }
        // The default address follows from the name of the VM and of the tap device.
        for (net, address) in restored.net.iter_mut().zip(addresses) {
            net.mac = net.mac.or(Some(address));
        }
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
        let arrival = Arrival {
            client,
            process,
            paused_at,
            stays_paused,
        };
        Ok((restored, machine, arrival))
    }
}

/// A VM that has been received, and that the other process still has.
#[derive(Debug)]
pub(super) struct Arrival {
    client: Client,
    process: Option<OwnedFd>,
    paused_at: Instant,
    stays_paused: bool,
}

impl Arrival {
    /// Returns a description of the guest.
    pub(super) fn description(&self) -> String {
        format!("moved from {}", self.client.info().name)
    }

    /// Returns the other process.
    pub(super) fn origin(&self) -> VmOrigin {
        let VmInfo { name, pid, .. } = self.client.info().clone();
        VmOrigin { name, pid }
    }

    /// Ends the VM in the other process, and starts it here as VM `name`.
    ///
    /// # Errors
    /// Returns an [`IncomingError`], in which case the VM goes on where it was.
    pub(super) fn take_over(
        mut self,
        running: &RunningVm,
        name: &str,
        requester: &Requester,
    ) -> Result<(), IncomingError> {
        if requester.has_ended() {
            return Err(IncomingError::Cancelled);
        }
        match self.client.call(request::SnapshotEnd { stop: true }) {
            Ok(()) => {}
            // A process that has died cannot run the VM, whether it has read the request or not.
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
        requester.answer(&MigrationResult::Moved(MovedVm {
            name: name.to_owned(),
            pid: sandbox::host_pid(),
            downtime_ns: nanoseconds(downtime),
        }));
        Ok(())
    }

    /// Returns whether the other process has ended, for which it gets some time.
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

    /// Ctrl-C in `ctl migrate` must cancel the migration.
    #[test]
    fn end_of_the_requester_is_noticed() {
        let (mut end, stream) = UnixStream::pair().unwrap();
        let requester = Requester(Cell::new(Some(stream)));
        assert!(!requester.has_ended());
        requester.report_failure("no");
        let mut answer = String::new();
        end.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "{\"failed\":\"no\"}\n");

        let (end, stream) = UnixStream::pair().unwrap();
        let requester = Requester(Cell::new(Some(stream)));
        drop(end);
        assert!(requester.has_ended());
        requester.report_failure("nobody hears it");
        assert!(!Requester::default().has_ended());
    }
}
