//! Migration of a VM to another process, on this host or over a stream.
//!
//! For a migration on this host, `perfvisor run --incoming unix:PATH` (the destination process)
//! waits at the socket PATH. `perfvisor ctl NAME migrate unix:PATH` connects to the VM and to PATH,
//! and passes the connection to the VM to the destination process. The destination process takes a
//! snapshot over this connection, and terminates the VM after building its own. If the process that
//! holds the connection dies before that, the connection closes and the VM continues. The
//! destination process answers `ctl` with one line that contains a [`MigrationResult`].
//!
//! With `--stream` or an inherited socket, `ctl` keeps the connection to the VM and sends the
//! memory and state of the VM as a byte stream (crate `snapshot`, module `stream`).

use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vmm_sys_util::sock_ctrl_msg::ScmSocket as _;

/// Returns the boot ID of this host, which is the same for all of its processes, or an empty string
/// if the ID cannot be read.
#[must_use]
pub fn boot_id() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

use crate::peer;

/// Prefix of a migration address that is a Unix socket.
const UNIX: &str = "unix:";
/// Prefix of a migration address that is an inherited descriptor.
const FD: &str = "fd:";
/// First byte that `ctl` sends to the destination process if a VM follows as a byte stream. Another
/// crate defines the format of the stream.
const STREAM: u8 = b'P';
/// Version of the migration protocol. Sent as the byte that accompanies the descriptor of the
/// connection to the VM.
const VERSION: u8 = 1;
/// Timeout for receiving the byte that accompanies the descriptor of the connection to the VM.
const OFFER_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum length of the destination process's answer, in bytes.
const MAX_ANSWER: u64 = 64 << 10;

/// Address of a process that waits for an incoming VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MigrationAddress {
    /// `unix:PATH`: a Unix socket.
    Unix(PathBuf),
    /// `fd:N`: an inherited descriptor of a connected stream socket.
    Fd(RawFd),
}

/// Error returned when a migration address is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "must be unix:PATH with the path of a Unix socket, or fd:N with the number of an inherited, connected \
     socket; forward a Unix socket to reach another host (ssh -L)"
)]
pub struct MigrationAddressError;

impl std::str::FromStr for MigrationAddress {
    type Err = MigrationAddressError;

    fn from_str(text: &str) -> Result<Self, MigrationAddressError> {
        if let Some(number) = text.strip_prefix(FD) {
            let number = number.parse().ok().filter(|number| *number >= 0);
            return number.map(Self::Fd).ok_or(MigrationAddressError);
        }
        match text.strip_prefix(UNIX) {
            Some(path) if !path.is_empty() => Ok(Self::Unix(path.into())),
            _ => Err(MigrationAddressError),
        }
    }
}

impl fmt::Display for MigrationAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{UNIX}{}", path.display()),
            Self::Fd(number) => write!(f, "{FD}{number}"),
        }
    }
}

/// Reply to the request that starts tracking memory writes. The file sent with the reply contains
/// the description of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationStart {
    /// Size of guest memory in bytes.
    pub memory_bytes: u64,
    /// Size of the description in bytes.
    pub bytes: u64,
}

/// A piece of a migration round, which transfers the memory written since the preceding round. The
/// file sent with the reply contains the contents of `pages`, one range after another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationPiece {
    /// Ranges of pages with contents: offset in memory and length, in bytes.
    pub pages: Vec<(u64, u64)>,
    /// Ranges of pages that now contain only zeros.
    pub zeros: Vec<(u64, u64)>,
    /// Offset of the next piece, or the size of memory after the last piece of the round.
    pub next: u64,
}

/// Answer of the destination process of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MigrationResult {
    /// The VM runs in the answering process.
    Moved(MigratedVm),
    /// Reason the VM has not moved.
    Failed(String),
}

/// A VM that has moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigratedVm {
    /// Name of the VM.
    pub name: String,
    /// Process ID of the VM.
    pub pid: u32,
    /// Time during which the VM was paused, in nanoseconds.
    pub downtime_ns: u64,
}

/// Source process of a VM that has moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationSource {
    /// Name of the VM in the source process.
    pub name: String,
    /// ID of the source process.
    pub pid: u32,
}

/// Offers a VM to the process at the other end of `stream`, and waits for the answer. `vm` is a
/// connection to the VM. Returns `None` if the process exits without an answer.
///
/// # Errors
/// Returns any socket error, and [`io::ErrorKind::InvalidData`] for an invalid answer.
pub fn offer(mut stream: &UnixStream, vm: UnixStream) -> io::Result<Option<MigrationResult>> {
    stream
        .send_with_fd(&[VERSION][..], vm.as_raw_fd())
        .map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
    // Leave the receiver with the only descriptor, so that the connection closes if the receiver
    // dies.
    drop(vm);
    let mut answer = String::new();
    let read = io::Read::by_ref(&mut stream)
        .take(MAX_ANSWER)
        .read_to_string(&mut answer);
    match read {
        Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
        other => other?,
    };
    match answer.strip_suffix('\n') {
        None => Ok(None),
        Some(line) => Ok(Some(serde_json::from_str(line)?)),
    }
}

/// A VM that is offered to a waiting process.
#[derive(Debug)]
pub enum MigrationOffer {
    /// Connection to the offered VM, which runs on this host.
    Connection(UnixStream),
    /// The VM is sent as a byte stream. The first byte of the stream has already been read.
    Stream,
}

/// Receives the offer of a VM. Only this user and root may offer a VM.
///
/// # Errors
/// Returns any socket error, [`io::ErrorKind::PermissionDenied`] if the peer is another user, and
/// [`io::ErrorKind::InvalidData`] if the received data is not an offer.
pub fn receive_offer(stream: &UnixStream) -> io::Result<MigrationOffer> {
    let uid = peer::peer_uid(stream)?;
    if uid != 0 && uid != peer::own_uid() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    stream.set_read_timeout(Some(OFFER_TIMEOUT))?;
    let mut version = [0];
    let received = stream.recv_with_fd(&mut version);
    let (count, file) = received.map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
    if count == 1 && version == [STREAM] && file.is_none() {
        return Ok(MigrationOffer::Stream);
    }
    let file = file.filter(|_| count == 1 && version == [VERSION]);
    let vm: std::os::fd::OwnedFd = file.ok_or(io::ErrorKind::InvalidData)?.into();
    let vm = UnixStream::from(vm);
    // Fails unless the descriptor is a Unix socket.
    vm.peer_addr()?;
    Ok(MigrationOffer::Connection(vm))
}

/// Sends the result of a migration to the process that offered the VM. An error means that this
/// process no longer waits for the answer.
///
/// # Errors
/// Returns any socket error.
pub fn answer(mut stream: &UnixStream, result: &MigrationResult) -> io::Result<()> {
    let mut line = serde_json::to_vec(result)?;
    line.push(b'\n');
    stream.write_all(&line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_name_a_socket() {
        for text in ["unix:/run/a", "fd:3"] {
            let address: MigrationAddress = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
        }
        for text in ["", "unix:", "/run/a", "tcp:1.2.3.4:5", "fd:", "fd:-1", "fd:x"] {
            assert_eq!(
                text.parse::<MigrationAddress>(),
                Err(MigrationAddressError),
                "{text}"
            );
        }
    }

    #[test]
    fn stream_is_recognized_by_its_first_byte() {
        let (mut client, server) = UnixStream::pair().unwrap();
        client.write_all(b"PVMG").unwrap();
        assert!(matches!(receive_offer(&server).unwrap(), MigrationOffer::Stream));
        let mut rest = [0; 3];
        (&server).read_exact(&mut rest).unwrap();
        assert_eq!(&rest, b"VMG");
    }

    #[test]
    fn connection_and_answer_pass_over_the_socket() {
        let (client, server) = UnixStream::pair().unwrap();
        let (vm, other_end) = UnixStream::pair().unwrap();
        let moved = MigrationResult::Moved(MigratedVm {
            name: "b".to_owned(),
            pid: 7,
            downtime_ns: 1_000_000,
        });
        let expected = moved.clone();
        let receiver = std::thread::spawn(move || {
            let MigrationOffer::Connection(mut received) = receive_offer(&server).unwrap() else {
                panic!("no connection");
            };
            received.write_all(b"x").unwrap();
            answer(&server, &moved).unwrap();
        });
        assert_eq!(offer(&client, vm).unwrap(), Some(expected));
        receiver.join().unwrap();
        let mut byte = [0];
        (&other_end).read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
    }

    #[test]
    fn other_offers_are_refused() {
        let refusal = |send: &dyn Fn(&UnixStream)| {
            let (client, server) = UnixStream::pair().unwrap();
            send(&client);
            drop(client);
            receive_offer(&server).unwrap_err().kind()
        };
        let file = tempfile::tempfile().unwrap();
        let (vm, _) = UnixStream::pair().unwrap();
        let send = |byte: u8, fd: i32| {
            move |stream: &UnixStream| {
                stream.send_with_fd(&[byte][..], fd).unwrap();
            }
        };
        assert_eq!(refusal(&|_| ()), io::ErrorKind::InvalidData);
        assert_eq!(
            refusal(&|mut s| s.write_all(&[VERSION]).unwrap()),
            io::ErrorKind::InvalidData
        );
        assert_eq!(refusal(&send(2, vm.as_raw_fd())), io::ErrorKind::InvalidData);
        // The error is ENOTSOCK, which has no `io::ErrorKind`, so its kind is not checked.
        refusal(&send(VERSION, file.as_raw_fd()));
    }

    #[test]
    fn receiver_that_ends_gives_no_answer() {
        let (client, server) = UnixStream::pair().unwrap();
        let (vm, _) = UnixStream::pair().unwrap();
        let receiver = std::thread::spawn(move || drop(receive_offer(&server)));
        assert_eq!(offer(&client, vm).unwrap(), None);
        receiver.join().unwrap();
    }
}
