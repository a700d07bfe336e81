//! Sends a VM as a byte stream, with `perfvisor ctl NAME migrate --stream unix:PATH` or with
//! `fd:N`.
//!
//! This process is a client of the VM. It sends memory in rounds while the guest runs. When a round
//! is short enough, it pauses the VM and sends the last round and the state. docs/architecture.md
//! explains which process has the VM when a message is lost.

use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use control_api::client::{Client, ClientError};
use control_api::migration::{MigrationPiece, MigrationStart, boot_id};
use control_api::protocol::VmState;
use control_api::request;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use snapshot::SnapshotFormatError;
use snapshot::format::{MAX_STATE_BYTES, with_optional_field};
use snapshot::memory::CHUNK_BYTES;
use snapshot::stream::{
    self, METADATA_FIELD, MigrationDestination, MigrationHello, MigrationMessageReader, MigrationStreamError,
    MigrationStreamMessage,
};

use super::super::snapshot::{SnapshotCommandError, pause, read_metadata, read_state};

/// Maximum number of rounds in which memory is sent while the guest runs.
const MAX_ROUNDS: u32 = 30;
/// Timeout for receiving a message from the destination, and for sending one.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(60);
/// Minimum interval between requests for memory. A VM accepts 1000 requests per second.
const REQUEST_INTERVAL: Duration = Duration::from_millis(1);
/// Size of the buffer for the connection to the destination, in bytes.
const BUFFER_BYTES: usize = 256 << 10;
/// Maximum accepted size of one piece of memory from a VM, in bytes.
const MAX_PIECE_BYTES: u64 = 2 * CHUNK_BYTES;

/// Error returned when a VM cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum SendVmError {
    /// A request to the VM failed.
    #[error("the VM")]
    Vm(#[from] ClientError),
    /// The VM cannot be paused or saved.
    #[error(transparent)]
    Snapshot(#[from] SnapshotCommandError),
    /// The memory file that the VM sent with a reply cannot be read.
    #[error("the VM's memory cannot be received")]
    Transfer(#[source] io::Error),
    /// The VM sent a range of memory that was not requested.
    #[error("the VM sends other memory than requested; use the same version of Perfvisor as the VM")]
    WrongPiece,
    /// The VM's state is invalid.
    #[error("the state of the VM")]
    State(#[source] SnapshotFormatError),
    /// The connection to the destination failed.
    #[error(transparent)]
    Stream(#[from] MigrationStreamError),
    /// The destination refused the VM.
    #[error("{0}")]
    Refused(String),
    /// The destination sent an unexpected message.
    #[error("the other side sends an unexpected message")]
    Unexpected,
    /// The guest writes memory faster than it can be sent.
    #[error(
        "the guest writes memory faster than it can be sent: round {rounds} still took {} ms; use a \
        longer --downtime, or --force, which pauses the VM for about that time",
        round.as_millis()
    )]
    NotConverging {
        /// Number of rounds that were sent.
        rounds: u32,
        /// Duration of the last round.
        round: Duration,
    },
}

/// Error of a migration, with the process that can continue the VM.
#[derive(Debug)]
pub enum MigrationSendFailure {
    /// The VM continues in the source process.
    Stays(SendVmError),
    /// The VM may be running at the destination and stays paused here.
    Undecided(SendVmError),
}

impl<E: Into<SendVmError>> From<E> for MigrationSendFailure {
    fn from(error: E) -> Self {
        Self::Stays(error.into())
    }
}

/// Limit on the time for which the VM is paused to send its last round.
#[derive(Clone, Copy, Debug)]
pub struct DowntimeLimit {
    /// Maximum duration of the last round, during which the VM is paused.
    pub downtime: Duration,
    /// `true` to pause the VM even if no round was short enough.
    pub force: bool,
}

/// Result of sending a VM to another process.
#[derive(Debug)]
pub struct MigrationReport {
    /// The destination process, in which the VM now runs.
    pub arrival: MigrationDestination,
    /// Number of rounds, including the round in which the VM was paused.
    pub rounds: u32,
    /// Number of bytes of memory that were sent.
    pub bytes: u64,
    /// Duration of the whole migration.
    pub duration: Duration,
    /// Time for which the VM was paused.
    pub downtime: Duration,
    /// Error of the request to terminate the source process, if it failed. The VM nevertheless runs
    /// at the destination.
    pub left_over: Option<ClientError>,
}

/// The connection to the destination process.
struct Destination<'s> {
    socket: &'s UnixStream,
    writer: BufWriter<&'s UnixStream>,
    reader: MigrationMessageReader<&'s UnixStream>,
}

impl<'s> Destination<'s> {
    fn new(socket: &'s UnixStream) -> io::Result<Self> {
        socket.set_read_timeout(Some(MESSAGE_TIMEOUT))?;
        socket.set_write_timeout(Some(MESSAGE_TIMEOUT))?;
        Ok(Self {
            socket,
            writer: BufWriter::with_capacity(BUFFER_BYTES, socket),
            reader: MigrationMessageReader::new(socket),
        })
    }

    /// Sends a message. The message may stay in the buffer until the next flush.
    fn send(&mut self, message: &MigrationStreamMessage<'_>) -> Result<(), SendVmError> {
        stream::send(&mut self.writer, message).map_err(|e| self.reason(e))
    }

    fn flush(&mut self) -> Result<(), SendVmError> {
        self.writer.flush().map_err(|e| self.reason(e.into()))
    }

    /// Returns the reason that the destination sent before it closed the connection, or `error` if
    /// there is none.
    fn reason(&mut self, error: MigrationStreamError) -> SendVmError {
        match self.reader.receive() {
            Ok(MigrationStreamMessage::Failed(why)) => SendVmError::Refused(why),
            _ => error.into(),
        }
    }

    /// Flushes the buffer and waits for the message `expected` from the destination.
    fn expect(&mut self, expected: &MigrationStreamMessage<'_>) -> Result<(), SendVmError> {
        self.flush()?;
        match self.reader.receive()? {
            MigrationStreamMessage::Failed(why) => Err(SendVmError::Refused(why)),
            other if other == *expected => Ok(()),
            _ => Err(SendVmError::Unexpected),
        }
    }

    /// Checks that the destination only receives. Returns an error if the destination has sent a
    /// message or closed the connection, which it must not do during a round.
    fn check_waits(&mut self) -> Result<(), SendVmError> {
        let mut fds = [PollFd::new(self.socket, PollFlags::IN)];
        if poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0) {
            return match self.reader.receive()? {
                MigrationStreamMessage::Failed(why) => Err(SendVmError::Refused(why)),
                _ => Err(SendVmError::Unexpected),
            };
        }
        Ok(())
    }
}

/// Sends the VM of `client` as a byte stream over `socket`.
///
/// # Errors
/// Returns [`MigrationSendFailure::Stays`] if the VM continues here, and
/// [`MigrationSendFailure::Undecided`] if it is unknown whether it runs at the destination.
pub fn send_vm(
    client: &mut Client,
    socket: &UnixStream,
    limit: DowntimeLimit,
) -> Result<MigrationReport, MigrationSendFailure> {
    let started = Instant::now();
    let mut to = Destination::new(socket).map_err(|e| SendVmError::Stream(e.into()))?;
    let memory_bytes = introduce(client, &mut to)?;
    let (rounds, mut bytes) = send_rounds(client, &mut to, memory_bytes, limit)?;
    let paused = client.call(request::Status)?.state == VmState::Paused;
    let paused_at = Instant::now();
    pause(client)?;
    bytes += send_round(client, &mut to, memory_bytes)?;
    client.call(request::SnapshotShareDisks)?;
    let mut state = read_state(client)?;
    if let Some(document) = read_metadata(client)? {
        state = with_optional_field(&state, METADATA_FIELD, document).map_err(SendVmError::State)?;
    }
    to.send(&MigrationStreamMessage::State(&state))?;
    to.expect(&MigrationStreamMessage::Ready)?;
    to.check_waits()?;
    client.call(request::MigrationCommit)?;
    let arrival = match run(&mut to, paused) {
        Ok(arrival) => arrival,
        Err(MigrationSendFailure::Stays(error)) => {
            client
                .call(request::SnapshotEnd { stop: false })
                .map_err(|e| MigrationSendFailure::Undecided(e.into()))?;
            return Err(MigrationSendFailure::Stays(error));
        }
        Err(undecided) => return Err(undecided),
    };
    let downtime = paused_at.elapsed();
    let ended = client.call(request::SnapshotEnd { stop: true });
    Ok(MigrationReport {
        arrival,
        rounds: rounds + 1,
        bytes,
        duration: started.elapsed(),
        downtime,
        left_over: ended.err().filter(|e| !e.is_gone()),
    })
}

/// Requests the destination to run the VM. The VM does not run at the destination if the request
/// cannot be sent or the destination reports a failure.
fn run(to: &mut Destination<'_>, paused: bool) -> Result<MigrationDestination, MigrationSendFailure> {
    to.flush()?;
    // Bypass the buffer, which would be written again on drop. After an error, the destination
    // receives at most a part of the frame.
    if let Err(e) = stream::send(&mut &*to.socket, &MigrationStreamMessage::Run { paused }) {
        return Err(to.reason(e).into());
    }
    match to.reader.receive() {
        Ok(MigrationStreamMessage::Running(arrival)) => Ok(arrival),
        Ok(MigrationStreamMessage::Failed(why)) => {
            Err(MigrationSendFailure::Stays(SendVmError::Refused(why)))
        }
        Ok(_) => Err(MigrationSendFailure::Undecided(SendVmError::Unexpected)),
        Err(e) => Err(MigrationSendFailure::Undecided(e.into())),
    }
}

/// Starts tracking the VM's memory writes, and describes the VM to the destination. Returns the
/// size of memory in bytes after the destination has accepted the description.
fn introduce(client: &mut Client, to: &mut Destination<'_>) -> Result<u64, SendVmError> {
    let (start, file): (MigrationStart, _) = client.call_with_file(request::MigrationStart)?;
    let size = usize::try_from(start.bytes).unwrap_or(usize::MAX);
    let mut machine = vec![0; size.min(MAX_STATE_BYTES)];
    file.read_exact_at(&mut machine, 0)
        .map_err(SendVmError::Transfer)?;
    let info = client.info();
    let hello = MigrationHello {
        name: info.name.clone(),
        pid: info.pid,
        boot_id: boot_id(),
        memory_bytes: start.memory_bytes,
    };
    let begun = to.writer.write_all(&stream::PREAMBLE);
    begun.map_err(MigrationStreamError::from)?;
    to.send(&MigrationStreamMessage::Hello(hello))?;
    to.send(&MigrationStreamMessage::Machine(&machine))?;
    to.expect(&MigrationStreamMessage::Accepted)?;
    Ok(start.memory_bytes)
}

/// Sends rounds of memory while the guest runs, until one round is short enough. Returns the number
/// of rounds and the number of bytes.
///
/// Pages written during a round are sent in the next round. The duration of the last round is used
/// as the estimate for the next round, which takes less time if the rounds become shorter.
fn send_rounds(
    client: &mut Client,
    to: &mut Destination<'_>,
    memory_bytes: u64,
    limit: DowntimeLimit,
) -> Result<(u32, u64), SendVmError> {
    let mut sent = 0;
    for rounds in 1.. {
        let began = Instant::now();
        let bytes = send_round(client, to, memory_bytes)?;
        let round = began.elapsed();
        sent += bytes;
        log::info!("round {rounds}: {} KiB in {} ms", bytes >> 10, round.as_millis());
        if round <= limit.downtime {
            return Ok((rounds, sent));
        }
        if rounds == MAX_ROUNDS {
            if limit.force {
                return Ok((rounds, sent));
            }
            return Err(SendVmError::NotConverging { rounds, round });
        }
    }
    Ok((0, sent))
}

/// Sends the memory written since the preceding round, and waits until the destination has received
/// the memory. Returns the number of bytes sent.
fn send_round(client: &mut Client, to: &mut Destination<'_>, memory_bytes: u64) -> Result<u64, SendVmError> {
    let (mut offset, mut sent) = (0, 0);
    let mut buffer = Vec::new();
    while offset < memory_bytes {
        let asked = Instant::now();
        let (piece, file): (MigrationPiece, _) =
            client.call_with_file(request::MigrationMemory { offset })?;
        let bytes = check_piece(&piece, offset, memory_bytes).ok_or(SendVmError::WrongPiece)?;
        buffer.resize(usize::try_from(bytes).unwrap_or(usize::MAX), 0);
        file.read_exact_at(&mut buffer, 0)
            .map_err(SendVmError::Transfer)?;
        let mut rest = &buffer[..];
        for &(offset, bytes) in &piece.pages {
            let (data, after) = rest.split_at(usize::try_from(bytes).unwrap_or(usize::MAX).min(rest.len()));
            to.send(&MigrationStreamMessage::Pages { offset, data })?;
            rest = after;
        }
        for &(offset, bytes) in &piece.zeros {
            to.send(&MigrationStreamMessage::Zeros { offset, bytes })?;
        }
        to.check_waits()?;
        offset = piece.next;
        sent += bytes;
        if offset < memory_bytes {
            std::thread::sleep(REQUEST_INTERVAL.saturating_sub(asked.elapsed()));
        }
    }
    to.send(&MigrationStreamMessage::RoundEnd)?;
    to.expect(&MigrationStreamMessage::Received)?;
    Ok(sent)
}

/// Checks a piece of memory that a VM has sent. Returns the number of bytes in the file of the
/// piece, or `None` if the piece is invalid.
fn check_piece(piece: &MigrationPiece, offset: u64, memory_bytes: u64) -> Option<u64> {
    let mut ranges = piece.pages.iter().chain(&piece.zeros);
    let fits = ranges.all(|(start, bytes)| {
        *start >= offset
            && *bytes <= CHUNK_BYTES
            && start.checked_add(*bytes).is_some_and(|end| end <= piece.next)
    });
    let bytes = piece
        .pages
        .iter()
        .try_fold(0u64, |sum, (_, bytes)| sum.checked_add(*bytes))?;
    (fits && piece.next > offset && piece.next <= memory_bytes && bytes <= MAX_PIECE_BYTES).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An untrusted VM cannot make this command allocate an unbounded amount of memory or loop
    /// forever by sending invalid pieces of memory.
    #[test]
    fn impossible_pieces_are_refused() {
        const MEMORY: u64 = 32 << 20;
        let check = |pages: &[(u64, u64)], zeros: &[(u64, u64)], next| {
            let piece = MigrationPiece {
                pages: pages.to_vec(),
                zeros: zeros.to_vec(),
                next,
            };
            check_piece(&piece, 2 << 20, MEMORY)
        };
        assert_eq!(check(&[(2 << 20, 4096)], &[(3 << 20, 4096)], 4 << 20), Some(4096));
        assert_eq!(check(&[], &[], MEMORY), Some(0));
        for (pages, next) in [
            (vec![(0, 4096)], 4 << 20),
            (vec![(4 << 20, 4096)], 4 << 20),
            (vec![(2 << 20, u64::MAX)], 4 << 20),
            (vec![(2 << 20, (2 << 20) + 4096)], 8 << 20),
            (vec![(2 << 20, 2 << 20); 3], 8 << 20),
            (vec![], 2 << 20),
            (vec![], MEMORY + 1),
        ] {
            assert_eq!(check(&pages, &[], next), None, "{pages:?} {next}");
        }
        assert_eq!(check(&[], &[(0, 4096)], 4 << 20), None);
    }

    /// The VM continues at the source only if the destination cannot have received the request to
    /// run the VM, or has rejected the request.
    #[test]
    fn vm_goes_on_only_if_the_other_side_cannot_run_it() {
        let outcome = |answer: &dyn Fn(UnixStream)| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            answer(theirs);
            run(&mut Destination::new(&ours).unwrap(), false)
        };
        assert!(matches!(outcome(&drop), Err(MigrationSendFailure::Stays(_))));
        let said = |message: MigrationStreamMessage<'static>| {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            stream::send(&mut theirs, &message).unwrap();
            run(&mut Destination::new(&ours).unwrap(), true)
        };
        let refused = said(MigrationStreamMessage::Failed("no".to_owned()));
        assert!(
            matches!(refused, Err(MigrationSendFailure::Stays(SendVmError::Refused(why))) if why == "no")
        );
        let arrival = MigrationDestination {
            name: "a".to_owned(),
            pid: 7,
        };
        assert!(said(MigrationStreamMessage::Running(arrival)).is_ok());
        assert!(matches!(
            said(MigrationStreamMessage::Ready),
            Err(MigrationSendFailure::Undecided(_))
        ));
        // The request is received but not answered.
        let (ours, theirs) = UnixStream::pair().unwrap();
        let other = std::thread::spawn(move || {
            let mut reader = MigrationMessageReader::new(&theirs);
            assert_eq!(
                reader.receive().unwrap(),
                MigrationStreamMessage::Run { paused: true }
            );
        });
        let silent = run(&mut Destination::new(&ours).unwrap(), true);
        assert!(matches!(
            silent,
            Err(MigrationSendFailure::Undecided(SendVmError::Stream(
                MigrationStreamError::Closed
            )))
        ));
        other.join().unwrap();
    }
}
