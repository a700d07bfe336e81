//! Multiplexing of connections. Maps the connections of a guest to Unix sockets and determines the
//! order of packets to the guest.
//!
//! The muxer is independent of queues and the event loop. It accepts packets from the guest and
//! events of Unix sockets, and produces packets for the guest. [`DescriptorWatchChange`] values
//! describe which descriptors the event loop must add or remove.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::OsString;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use diagnostics::guest_log;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use sandbox::SocketDestination;

use super::connection::{VsockConnection, VsockConnectionKey};
use super::packet::{HOST_CID, STREAM, VsockOp, VsockPacketHeader};

/// Maximum number of simultaneous connections, including those in the handshake.
pub const MAX_CONNECTIONS: usize = 128;
/// Maximum number of reset packets queued for the guest. When it is reached, packets from the guest
/// are not read until the guest has received some of them.
const MAX_REPLIES: usize = 256;
/// Timeout for a host program to send `CONNECT PORT` after it has connected.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of the line `CONNECT PORT` with its newline, in bytes.
const MAX_CONNECT_LINE_BYTES: usize = 19;
/// Lowest host port number assigned to connections that host programs initiate. Higher than the
/// ports on which host programs listen.
const FIRST_HOST_PORT: u32 = 1 << 30;

/// A change of the descriptors that the event loop monitors. The muxer identifies each descriptor
/// by a token.
#[derive(Debug)]
pub enum DescriptorWatchChange {
    /// Start to monitor this descriptor, edge-triggered, for input, output and hang-up.
    Add(RawFd, u32),
    /// Stop monitoring this socket. The socket is closed when the value is dropped.
    Remove(UnixStream, u32),
}

/// A connection of a host program that has not sent `CONNECT PORT` yet.
#[derive(Debug)]
struct Handshake {
    stream: UnixStream,
    line: Vec<u8>,
    deadline: Instant,
}

/// What an event loop token identifies: a connection, or a handshake.
#[derive(Debug)]
enum TokenTarget {
    Handshake(Handshake),
    VsockConnection(VsockConnectionKey),
}

/// A connection with its event loop token. `queued` is `true` if it is in the queue `ready`.
#[derive(Debug)]
struct MuxedConnection {
    connection: VsockConnection,
    token: u32,
    queued: bool,
}

/// How the muxer connects to the Unix socket of a host port.
#[derive(Debug)]
pub enum VsockHostDialer {
    /// Connects directly. The path of a port's socket is this path, followed by an underscore and
    /// the port.
    Direct(PathBuf),
    /// Connects through the socket broker, a helper process, because the threads of a confined VM
    /// cannot connect.
    Broker(SocketDestination),
}

impl From<PathBuf> for VsockHostDialer {
    fn from(path: PathBuf) -> Self {
        Self::Direct(path)
    }
}

impl VsockHostDialer {
    /// Connects to the socket of host port `port`, without blocking.
    fn dial(&self, port: u32) -> io::Result<UnixStream> {
        match self {
            Self::Direct(path) => {
                let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
                let fd: OwnedFd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
                connect(fd.as_raw_fd(), &UnixAddr::new(&port_path(path, port))?)?;
                Ok(UnixStream::from(fd))
            }
            Self::Broker(destination) => destination.connect(port),
        }
    }
}

/// Multiplexer of all connections of a guest.
#[derive(Debug)]
pub struct ConnectionMuxer {
    cid: u64,
    dialer: VsockHostDialer,
    watched: HashMap<u32, TokenTarget>,
    connections: BTreeMap<VsockConnectionKey, MuxedConnection>,
    /// Connections that may have a packet for the guest, each at most once.
    ready: VecDeque<VsockConnectionKey>,
    /// Reset packets for the guest, in reply to packets that belong to no connection.
    replies: VecDeque<VsockPacketHeader>,
    watches: Vec<DescriptorWatchChange>,
    next_token: u32,
    next_port: u32,
}

impl ConnectionMuxer {
    /// Creates the connection muxer of the guest with address `cid`. `dialer` connects to host
    /// ports. `first_token` is the first event loop token that the muxer may assign.
    pub fn new(cid: u64, dialer: impl Into<VsockHostDialer>, first_token: u32) -> Self {
        Self {
            cid,
            dialer: dialer.into(),
            watched: HashMap::new(),
            connections: BTreeMap::new(),
            ready: VecDeque::new(),
            replies: VecDeque::new(),
            watches: Vec::new(),
            next_token: first_token,
            next_port: FIRST_HOST_PORT,
        }
    }

    /// Returns the pending changes of monitored descriptors. The event loop must apply them before
    /// it calls any other method of the muxer.
    pub fn take_watches(&mut self) -> Vec<DescriptorWatchChange> {
        std::mem::take(&mut self.watches)
    }

    /// Returns whether [`ConnectionMuxer::from_guest`] may be called. The caller must wait while
    /// too many reset packets are queued for the guest.
    pub fn can_accept_packets(&self) -> bool {
        self.replies.len() < MAX_REPLIES
    }

    /// Returns whether [`ConnectionMuxer::next`] may return a packet.
    pub fn has_packets(&self) -> bool {
        !self.replies.is_empty() || !self.ready.is_empty()
    }

    /// Returns whether a timeout is pending, in which case [`ConnectionMuxer::tick`] must be called
    /// every second.
    pub fn has_deadlines(&self) -> bool {
        // Established connections have no deadline, and few other connections exist.
        self.watched
            .values()
            .any(|watched| matches!(watched, TokenTarget::Handshake(_)))
            || self
                .connections
                .values()
                .any(|entry| entry.connection.deadline().is_some())
    }

    /// Handles a new connection of a host program to the device's Unix socket.
    pub fn accepted(&mut self, stream: UnixStream, now: Instant) {
        // Above the limit the stream is dropped, so the program sees the connection close.
        if self.watched.len() < MAX_CONNECTIONS && stream.set_nonblocking(true).is_ok() {
            let token = self.token();
            self.watches
                .push(DescriptorWatchChange::Add(stream.as_raw_fd(), token));
            let handshake = Handshake {
                stream,
                line: Vec::new(),
                deadline: now + HANDSHAKE_TIMEOUT,
            };
            self.watched.insert(token, TokenTarget::Handshake(handshake));
        }
    }

    /// Handles an event that the event loop reports for the Unix socket with the token `token`.
    pub fn host_event(&mut self, token: u32, readable: bool, writable: bool, hung_up: bool, now: Instant) {
        match self.watched.get_mut(&token) {
            Some(TokenTarget::Handshake(handshake)) => {
                let port = match read_line(handshake) {
                    Ok(None) if !hung_up => return,
                    Ok(Some(line)) => port_of(&line),
                    _ => None,
                };
                self.finish_handshake(token, port, now);
            }
            Some(TokenTarget::VsockConnection(key)) => {
                let key = *key;
                if let Some(entry) = self.connections.get_mut(&key) {
                    entry.connection.host_event(readable, writable, hung_up, now);
                }
                self.settle(key);
            }
            // The socket was closed earlier in the same batch of events.
            None => {}
        }
    }

    /// Drops the connection identified by `token`, because the event loop cannot monitor its
    /// socket.
    pub fn lost(&mut self, token: u32) {
        match self.watched.get(&token) {
            Some(TokenTarget::VsockConnection(key)) => {
                let key = *key;
                if let Some(entry) = self.connections.get_mut(&key) {
                    entry.connection.reset();
                }
                self.settle(key);
            }
            Some(TokenTarget::Handshake(_)) => {
                self.watched.remove(&token);
            }
            None => {}
        }
    }

    /// Handles a packet from the guest, which consists of a header and data.
    pub fn from_guest(&mut self, header: &VsockPacketHeader, data: &[u8], now: Instant) {
        if header.src_cid != self.cid || header.dst_cid != HOST_CID {
            // Drop the packet, because its source or destination CID does not exist.
            return;
        }
        let key = VsockConnectionKey {
            host_port: header.dst_port,
            guest_port: header.src_port,
        };
        let op = VsockOp::from_number(header.op);
        if header.kind != STREAM {
            self.refuse(header);
        } else if let Some(entry) = self.connections.get_mut(&key) {
            entry.connection.guest_packet(header, data, now);
            self.settle(key);
        } else if op == Some(VsockOp::Request) {
            match self.connect(key.host_port) {
                Ok(stream) => {
                    let token = self.token();
                    self.watches
                        .push(DescriptorWatchChange::Add(stream.as_raw_fd(), token));
                    let connection = VsockConnection::accepted(key, stream, header);
                    self.add(connection, token);
                    self.settle(key);
                }
                Err(error) => {
                    guest_log!(Debug, "vsock: port {} of the host: {error}", key.host_port);
                    self.refuse(header);
                }
            }
        } else {
            self.refuse(header);
        }
    }

    /// Returns the header of the next packet for the guest, if any, and writes the packet's data to
    /// `buffer`.
    pub fn next(&mut self, buffer: &mut [u8], now: Instant) -> Option<VsockPacketHeader> {
        if let Some(reply) = self.replies.pop_front() {
            return Some(reply);
        }
        // Visit each connection once. A connection with data stays ready if the guest's buffer has
        // no space for data.
        for _ in 0..self.ready.len() {
            let Some(key) = self.ready.pop_front() else {
                break;
            };
            let Some(entry) = self.connections.get_mut(&key) else {
                continue;
            };
            entry.queued = false;
            let packet = entry.connection.next(buffer, now);
            self.settle(key);
            if let Some(packet) = packet {
                return Some(VsockPacketHeader {
                    src_cid: HOST_CID,
                    dst_cid: self.cid,
                    kind: STREAM,
                    ..packet
                });
            }
        }
        None
    }

    /// Ends connections and handshakes whose timeouts have expired.
    pub fn tick(&mut self, now: Instant) {
        let late = |deadline: Option<Instant>| deadline.is_some_and(|deadline| deadline <= now);
        let handshakes: Vec<u32> = self
            .watched
            .iter()
            .filter(|(_, watched)| matches!(watched, TokenTarget::Handshake(h) if late(Some(h.deadline))))
            .map(|(token, _)| *token)
            .collect();
        for token in handshakes {
            self.finish_handshake(token, None, now);
        }
        let connections: Vec<VsockConnectionKey> = self
            .connections
            .iter()
            .filter(|(_, entry)| late(entry.connection.deadline()))
            .map(|(key, _)| *key)
            .collect();
        for key in connections {
            if let Some(entry) = self.connections.get_mut(&key) {
                entry.connection.reset();
            }
            self.settle(key);
        }
    }

    /// Updates the muxer after an operation on the connection `key`. Removes the connection if it
    /// is over, or adds it to `ready` if it has a packet.
    fn settle(&mut self, key: VsockConnectionKey) {
        let Some(entry) = self.connections.get_mut(&key) else {
            return;
        };
        if entry.connection.is_over() {
            if let Some(entry) = self.connections.remove(&key) {
                if entry.queued {
                    self.ready.retain(|ready| *ready != key);
                }
                self.watched.remove(&entry.token);
                self.watches.push(DescriptorWatchChange::Remove(
                    entry.connection.into_stream(),
                    entry.token,
                ));
            }
        } else if entry.connection.has_packet() && !entry.queued {
            entry.queued = true;
            self.ready.push_back(key);
        }
    }

    fn refuse(&mut self, header: &VsockPacketHeader) {
        if header.op != VsockOp::Reset as u16 {
            self.replies.push_back(header.reset());
        }
    }

    fn add(&mut self, connection: VsockConnection, token: u32) {
        let key = connection.key();
        self.watched.insert(token, TokenTarget::VsockConnection(key));
        let entry = MuxedConnection {
            connection,
            token,
            queued: false,
        };
        self.connections.insert(key, entry);
    }

    /// Completes a handshake: creates a connection to guest port `port`, or drops the socket if
    /// `port` is `None`.
    fn finish_handshake(&mut self, token: u32, port: Option<u32>, now: Instant) {
        let Some(TokenTarget::Handshake(handshake)) = self.watched.remove(&token) else {
            return;
        };
        let Some(guest_port) = port else {
            self.watches
                .push(DescriptorWatchChange::Remove(handshake.stream, token));
            return;
        };
        let key = VsockConnectionKey {
            host_port: self.host_port(guest_port),
            guest_port,
        };
        self.add(VsockConnection::requested(key, handshake.stream, now), token);
        // The program may have sent data after the line. Edge-triggered polling does not report
        // that data again.
        self.host_event(token, true, true, false, now);
    }

    /// Allocates a host port that has no connection to `guest_port`.
    fn host_port(&mut self, guest_port: u32) -> u32 {
        loop {
            let host_port = self.next_port;
            self.next_port = self.next_port.checked_add(1).unwrap_or(FIRST_HOST_PORT);
            // The loop terminates, because there are far more ports than connections.
            if !self.connections.contains_key(&VsockConnectionKey {
                host_port,
                guest_port,
            }) {
                return host_port;
            }
        }
    }

    fn token(&mut self) -> u32 {
        loop {
            let token = self.next_token;
            self.next_token = self.next_token.checked_add(1).unwrap_or(1 << 16);
            if !self.watched.contains_key(&token) {
                return token;
            }
        }
    }

    /// Connects the guest to the program that listens on host port `port`, without blocking.
    fn connect(&self, port: u32) -> io::Result<UnixStream> {
        if self.watched.len() >= MAX_CONNECTIONS {
            return Err(io::Error::other("too many connections"));
        }
        self.dialer.dial(port)
    }
}

/// Returns the path of the Unix socket for host port `port`.
pub fn port_path(path: &Path, port: u32) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(format!("_{port}"));
    name.into()
}

/// Reads up to a newline, and nothing after it. Returns `None` if the line is still incomplete.
fn read_line(handshake: &mut Handshake) -> io::Result<Option<Vec<u8>>> {
    loop {
        let mut byte = [0];
        match handshake.stream.read(&mut byte) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) if byte == *b"\n" => return Ok(Some(std::mem::take(&mut handshake.line))),
            Ok(_) if handshake.line.len() == MAX_CONNECT_LINE_BYTES => {
                return Err(io::ErrorKind::InvalidData.into());
            }
            Ok(_) => handshake.line.extend(byte),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Parses the line `CONNECT PORT` and returns the port.
fn port_of(line: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(line).ok()?;
    let port = text.strip_prefix("CONNECT ")?;
    port.bytes()
        .all(|b| b.is_ascii_digit())
        .then(|| port.parse().ok())?
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    const CID: u64 = 3;

    /// Memory use does not grow if a guest opens and resets connections without receiving packets.
    #[test]
    fn reset_connections_leave_no_packets() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("v");
        let listener = UnixListener::bind(port_path(&path, 9)).unwrap();
        let mut muxer = ConnectionMuxer::new(CID, path, 16);
        for guest_port in 0..1000 {
            let mut packet = VsockPacketHeader {
                src_cid: CID,
                dst_cid: HOST_CID,
                src_port: guest_port,
                dst_port: 9,
                kind: STREAM,
                op: VsockOp::Request as u16,
                ..VsockPacketHeader::default()
            };
            muxer.from_guest(&packet, &[], Instant::now());
            let _program = listener.accept().unwrap();
            assert_eq!((muxer.connections.len(), muxer.ready.len()), (1, 1));
            packet.op = VsockOp::Reset as u16;
            muxer.from_guest(&packet, &[], Instant::now());
            assert_eq!((muxer.connections.len(), muxer.ready.len()), (0, 0));
            let _ = muxer.take_watches();
        }
        assert!(!muxer.has_packets());
    }
}
