//! Receives a VM as a byte stream from `perfvisor ctl NAME migrate --stream`, on this host or
//! another.
//!
//! The stream is untrusted. [`snapshot::stream`] limits frames and ranges, the state is validated
//! like that of a snapshot, and the VM does not run before it has been received completely.

use std::io::{BufReader, Read as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use control_api::migration::{MigrationSource, boot_id};
use operator::commands::one_line;
use operator::signals::BlockedSignals;
use perf_core::pmu::host::HostPerfCapabilities;
use serde_json::Value;
use snapshot::format::optional_field;
use snapshot::state::SavedMachine;
use snapshot::stream::{
    self, MAX_ROUNDS, METADATA_FIELD, MigrationDestination, MigrationHello, MigrationMessageReader,
    MigrationStreamError, MigrationStreamMessage, read_preamble,
};
use vmm::kvm::host::Kvm;
use vmm::memory::GuestRam;
use vmm::vm::host_check::check_host;
use vmm::vm::restore::{RestoredMachine, RestoredMemory};

use super::super::machine::restored_config;
use super::super::restore::machine_args;
use super::{Arrival, IncomingMigrationError, Reply, Requester, check_devices};
use crate::cli::RunArgs;

/// Timeout for each message from the source process.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for the source to notice that the VM is rejected.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of bytes that are read and ignored after a rejection.
const MAX_IGNORED_BYTES: u64 = 1 << 30;
/// Size of the read buffer of the connection, in bytes.
const BUFFER_BYTES: usize = 256 << 10;
/// Number of frames between checks for stop signals.
const SIGNAL_CHECK_FRAMES: u64 = 64;

/// A VM that arrives as a byte stream.
#[derive(Debug)]
pub(in crate::run) struct IncomingStream {
    reader: MigrationMessageReader<BufReader<UnixStream>>,
    hello: MigrationHello,
    metadata: Option<Value>,
}

impl IncomingStream {
    /// Reads the greeting of the source, whose first `read` bytes the caller has already read. From
    /// then on, `requester` reports failures to the source.
    ///
    /// # Errors
    /// Returns a [`MigrationStreamError`] if the source sends anything but a greeting.
    pub(super) fn open(
        stream: UnixStream,
        read: usize,
        requester: &Requester,
    ) -> Result<Self, MigrationStreamError> {
        let refusal = stream.try_clone()?;
        stream.set_read_timeout(Some(MESSAGE_TIMEOUT))?;
        stream.set_write_timeout(Some(MESSAGE_TIMEOUT))?;
        let mut buffered = BufReader::with_capacity(BUFFER_BYTES, stream);
        read_preamble(&mut buffered, read)?;
        let mut reader = MigrationMessageReader::new(buffered);
        let mut hello = match reader.receive()? {
            MigrationStreamMessage::Hello(hello) => hello,
            _ => return Err(MigrationStreamError::Preamble),
        };
        // Remove control characters from the name, because it is used in one-line messages.
        hello.name = one_line(&hello.name);
        requester.0.set(Some(Reply::Stream(refusal)));
        Ok(Self {
            reader,
            hello,
            metadata: None,
        })
    }

    /// Receives the VM, whose memory the source sends while the VM is still running.
    ///
    /// # Errors
    /// Returns an [`IncomingMigrationError`]. In this case the VM continues in the source process.
    pub(super) fn receive(
        mut self,
        args: &RunArgs,
        kvm: &Kvm,
        probe: &HostPerfCapabilities,
        signals: &BlockedSignals,
    ) -> Result<(RunArgs, RestoredMachine, Arrival), IncomingMigrationError> {
        let machine = self.receive_machine()?;
        let restored = machine_args(args, &machine)?;
        if restored.memory != self.hello.memory_bytes {
            return Err(IncomingMigrationError::Unexpected);
        }
        check_devices(&restored, &machine)?;
        let config = restored_config(&restored, kvm, probe, Some(&machine));
        let config = config.map_err(|e| IncomingMigrationError::Config(Box::new(e)))?;
        check_host(kvm, &config, &machine).map_err(IncomingMigrationError::Host)?;
        let ram = GuestRam::new(self.hello.memory_bytes)?;
        self.reader.set_memory_bytes(ram.size_bytes());
        self.send(&MigrationStreamMessage::Accepted)?;
        let received_at = Instant::now();
        let (state, bytes) = self.receive_rounds(&ram, signals)?;
        log::info!(
            "received {}: {} MiB of memory in {:.2} s",
            self.hello.name,
            bytes >> 20,
            received_at.elapsed().as_secs_f64()
        );
        if state.memory.bytes != ram.size_bytes() {
            return Err(IncomingMigrationError::Unexpected);
        }
        let restored = machine_args(args, &state)?;
        let machine = RestoredMachine {
            state: Box::new(state),
            memory: RestoredMemory::Moved(ram),
            accepts_losses: args.restore_loses,
        };
        Ok((restored, machine, Arrival::Stream(Box::new(self))))
    }

    fn receive_machine(&mut self) -> Result<SavedMachine, IncomingMigrationError> {
        match self.reader.receive()? {
            MigrationStreamMessage::Machine(state) => Ok(snapshot::decode(state)?),
            _ => Err(IncomingMigrationError::Unexpected),
        }
    }

    /// Receives memory until the state arrives. Returns the state and the number of received bytes
    /// of memory.
    fn receive_rounds(
        &mut self,
        ram: &GuestRam,
        signals: &BlockedSignals,
    ) -> Result<(SavedMachine, u64), IncomingMigrationError> {
        let write = |offset, data: &[u8]| ram.write_at(offset, data).map_err(IncomingMigrationError::Memory);
        let (mut rounds, mut in_round, mut all) = (0, 0u64, 0u64);
        for frames in 1u64.. {
            if frames.is_multiple_of(SIGNAL_CHECK_FRAMES) && signals.is_stop_pending() {
                return Err(IncomingMigrationError::Stopped);
            }
            let bytes = match self.reader.receive()? {
                MigrationStreamMessage::Pages { offset, data } => {
                    write(offset, data)?;
                    data.len() as u64
                }
                MigrationStreamMessage::Zeros { offset, bytes } => {
                    write(offset, &vec![0; usize::try_from(bytes).unwrap_or(0)])?;
                    bytes
                }
                MigrationStreamMessage::RoundEnd => {
                    (rounds, in_round) = (rounds + 1, 0);
                    if rounds > MAX_ROUNDS {
                        return Err(IncomingMigrationError::Unexpected);
                    }
                    self.send(&MigrationStreamMessage::Received)?;
                    0
                }
                MigrationStreamMessage::State(state) => {
                    self.metadata = optional_field(state, METADATA_FIELD)?;
                    return Ok((snapshot::decode(state)?, all));
                }
                _ => return Err(IncomingMigrationError::Unexpected),
            };
            in_round += bytes;
            all += bytes;
            if in_round > ram.size_bytes() {
                return Err(IncomingMigrationError::Unexpected);
            }
        }
        Err(IncomingMigrationError::Unexpected)
    }

    fn send(&mut self, message: &MigrationStreamMessage<'_>) -> Result<(), MigrationStreamError> {
        stream::send(self.reader.stream().get_mut(), message)
    }

    /// Takes the data of the VM's metadata service, a JSON document.
    pub(super) fn take_metadata(&mut self) -> Option<Value> {
        self.metadata.take()
    }

    /// Returns the name of the VM in the source process.
    pub(super) fn name(&self) -> &str {
        &self.hello.name
    }

    /// Returns the source process, if it is on this host.
    pub(super) fn origin(&self) -> Option<MigrationSource> {
        let own = boot_id();
        let is_own_host = !own.is_empty() && own == self.hello.boot_id;
        is_own_host.then(|| MigrationSource {
            name: self.hello.name.clone(),
            pid: self.hello.pid,
        })
    }

    /// Waits until the VM no longer runs in the source process. Returns whether the VM was paused
    /// in the source process.
    ///
    /// # Errors
    /// Returns an [`IncomingMigrationError`]. In this case the VM must not run here.
    pub(super) fn wait_for_run(&mut self) -> Result<bool, IncomingMigrationError> {
        self.send(&MigrationStreamMessage::Ready)?;
        match self.reader.receive()? {
            MigrationStreamMessage::Run { paused } => Ok(paused),
            _ => Err(IncomingMigrationError::Unexpected),
        }
    }

    /// Reports that the VM runs here as `name`.
    pub(super) fn report_run(&mut self, name: &str) {
        let arrival = MigrationDestination {
            name: name.to_owned(),
            pid: sandbox::host_pid(),
        };
        if let Err(e) = self.send(&MigrationStreamMessage::Running(arrival)) {
            log::warn!(
                "the other side does not know that {} runs here, and keeps it paused: {}",
                self.hello.name,
                perf_core::error_line(&e)
            );
        }
    }
}

/// Reports to the source, over `stream`, that this process does not run the VM, with the reason
/// `why`.
pub(super) fn refuse(stream: &mut UnixStream, why: &str) -> Result<(), MigrationStreamError> {
    stream::send(stream, &MigrationStreamMessage::Failed(why.to_owned()))?;
    // Close only the sending direction, because closing a connection with unread data may lose the
    // message.
    stream.shutdown(Shutdown::Write)?;
    stream.set_read_timeout(Some(REFUSAL_TIMEOUT))?;
    let until = Instant::now() + REFUSAL_TIMEOUT;
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut ignored = 0;
    while ignored < MAX_IGNORED_BYTES && Instant::now() < until {
        match stream.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(count) => ignored += count as u64,
        }
    }
    Ok(())
}
