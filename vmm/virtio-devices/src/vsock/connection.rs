//! A connection between a guest port and a Unix socket of the host.
//!
//! Data from the guest is written to the Unix socket immediately. Data that the socket does not
//! accept is buffered, up to the credit that the device has granted to the guest. Data from the
//! host stays in the Unix socket until the guest has granted credit and provided a buffer. The
//! amount of buffered data therefore never exceeds [`BUFFER`] bytes.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::packet::{NO_RECEIVE, NO_SEND, VsockOp, VsockPacketHeader};

/// Credit that the device grants to the guest for a connection, in bytes. The guest may send this
/// amount before the host program reads it.
pub const BUFFER: u32 = 256 << 10;
/// Amount of newly available credit at which the device sends a credit update to the guest, in
/// bytes. Small enough that the guest does not have to wait.
const CREDIT_UPDATE_THRESHOLD: u32 = BUFFER / 4;
/// Timeout for the guest to answer a connection request, and to release a closed connection.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Identity of a connection: its two port numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VsockConnectionKey {
    /// Port number of the host's side.
    pub host_port: u32,
    /// Port number of the guest's side.
    pub guest_port: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionState {
    /// The host program has requested the connection, and the guest has not answered yet.
    Requested,
    /// The connection is established between the guest and the host program.
    Open,
    /// One side has terminated the connection. At most a reset packet to the guest is pending.
    Dead,
}

/// Control packets that are pending for the guest.
#[derive(Clone, Copy, Debug, Default)]
struct PendingPackets {
    request: bool,
    response: bool,
    reset: bool,
    shutdown: bool,
    credit_update: bool,
    credit_request: bool,
}

/// A vsock connection between a guest port and a Unix socket of the host.
#[derive(Debug)]
pub struct VsockConnection {
    key: VsockConnectionKey,
    stream: UnixStream,
    state: ConnectionState,
    due: PendingPackets,
    deadline: Option<Instant>,
    /// Data from the guest that the Unix socket has not accepted yet.
    to_host: VecDeque<u8>,
    /// Number of bytes at the start of `to_host` that are the device's reply to CONNECT, not guest
    /// data.
    greeting: usize,
    /// Number of guest bytes written to the Unix socket so far, modulo 2^32.
    forwarded: u32,
    /// Value of `forwarded` that was last reported to the guest.
    forwarded_told: u32,
    /// Size of the guest's receive buffer for this connection, in bytes, as reported by the guest.
    peer_buffer: u32,
    /// Number of bytes that the guest has consumed, as reported by the guest, modulo 2^32.
    peer_forwarded: u32,
    /// Number of bytes sent to the guest, modulo 2^32.
    sent: u32,
    /// `true` if the Unix socket is readable according to the last event. Cleared when a read would
    /// block.
    readable: bool,
    /// The same for writing.
    writable: bool,
    /// `true` if the host program has closed its socket completely, not only the sending side.
    hung_up: bool,
    /// Shutdown flags that have been sent to the guest.
    ended: u32,
    /// Shutdown flags that the guest has sent.
    guest_ended: u32,
    /// Shutdown flags of the guest that have been applied to the Unix socket.
    passed_on: u32,
}

impl VsockConnection {
    fn new(key: VsockConnectionKey, stream: UnixStream, state: ConnectionState) -> Self {
        Self {
            key,
            stream,
            state,
            due: PendingPackets::default(),
            deadline: None,
            to_host: VecDeque::new(),
            greeting: 0,
            forwarded: 0,
            forwarded_told: 0,
            peer_buffer: 0,
            peer_forwarded: 0,
            sent: 0,
            readable: false,
            writable: true,
            hung_up: false,
            ended: 0,
            guest_ended: 0,
            passed_on: 0,
        }
    }

    /// Creates a connection that a host program has requested. `stream` must be non-blocking.
    pub fn requested(key: VsockConnectionKey, stream: UnixStream, now: Instant) -> Self {
        let mut connection = Self::new(key, stream, ConnectionState::Requested);
        connection.due.request = true;
        connection.deadline = Some(now + ANSWER_TIMEOUT);
        connection
    }

    /// Creates a connection that the guest has requested with the packet `request`. `stream` must
    /// be connected and non-blocking.
    pub fn accepted(key: VsockConnectionKey, stream: UnixStream, request: &VsockPacketHeader) -> Self {
        let mut connection = Self::new(key, stream, ConnectionState::Open);
        connection.due.response = true;
        connection.take_credit(request);
        connection
    }

    /// Returns the identity of the connection.
    pub fn key(&self) -> VsockConnectionKey {
        self.key
    }

    /// Consumes the connection and returns its Unix socket, which stays open.
    pub fn into_stream(self) -> UnixStream {
        self.stream
    }

    /// Returns the time at which the connection's pending timeout expires, or `None` if no timeout
    /// is pending.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Returns whether the connection can be removed because it is terminated and no packet is
    /// pending.
    pub fn is_over(&self) -> bool {
        self.state == ConnectionState::Dead && !self.due.reset
    }

    /// Terminates the connection immediately and makes a reset packet pending.
    pub fn reset(&mut self) {
        self.state = ConnectionState::Dead;
        self.due = PendingPackets {
            reset: true,
            ..PendingPackets::default()
        };
        self.deadline = None;
        self.to_host = VecDeque::new();
        // The host program must be notified of the termination regardless of when the guest
        // receives its packets. The call fails only if the program has already exited.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Returns whether [`VsockConnection::next`] may return a packet.
    pub fn has_packet(&self) -> bool {
        let due = self.due;
        due.request
            || due.response
            || due.reset
            || due.shutdown
            || due.credit_update
            || due.credit_request
            || self.may_read() && self.credit() > 0
    }

    /// Handles an event that the event loop reports for the Unix socket.
    pub fn host_event(&mut self, readable: bool, writable: bool, hung_up: bool, now: Instant) {
        self.readable |= readable || hung_up;
        self.hung_up |= hung_up;
        if writable || hung_up {
            self.writable = true;
            self.flush(now);
        }
        if self.hung_up && self.ended == NO_SEND {
            self.end(NO_SEND | NO_RECEIVE, now);
        }
        self.request_credit();
    }

    /// Handles a packet from the guest, which consists of a header and data.
    pub fn guest_packet(&mut self, header: &VsockPacketHeader, data: &[u8], now: Instant) {
        if self.state == ConnectionState::Dead {
            return;
        }
        self.take_credit(header);
        match (VsockOp::from_number(header.op), self.state) {
            (Some(VsockOp::Response), ConnectionState::Requested) => {
                self.state = ConnectionState::Open;
                self.deadline = None;
                let greeting = format!("OK {}\n", self.key.host_port);
                self.greeting = greeting.len();
                self.to_host.extend(greeting.as_bytes());
                self.flush(now);
            }
            (Some(VsockOp::Data), ConnectionState::Open) => self.data(data, now),
            (Some(VsockOp::Shutdown), ConnectionState::Open) => {
                self.guest_ended |= header.flags & (NO_RECEIVE | NO_SEND);
                self.flush(now);
            }
            (Some(VsockOp::CreditUpdate), ConnectionState::Open) => {}
            (Some(VsockOp::CreditRequest), ConnectionState::Open) => self.due.credit_update = true,
            (Some(VsockOp::Reset), _) => {
                // The guest initiated the reset, so no packet is sent.
                self.reset();
                self.due.reset = false;
            }
            _ => self.reset(),
        }
        self.request_credit();
    }

    /// Returns the header of the next packet for the guest, if any, and writes the packet's data to
    /// `buffer`.
    pub fn next(&mut self, buffer: &mut [u8], now: Instant) -> Option<VsockPacketHeader> {
        if std::mem::take(&mut self.due.reset) {
            return Some(self.header(VsockOp::Reset, 0, 0));
        }
        if std::mem::take(&mut self.due.request) {
            return Some(self.header(VsockOp::Request, 0, 0));
        }
        if std::mem::take(&mut self.due.response) {
            return Some(self.header(VsockOp::Response, 0, 0));
        }
        if let Some(len) = self.read(buffer, now) {
            return Some(self.header(VsockOp::Data, len, 0));
        }
        if std::mem::take(&mut self.due.reset) {
            return Some(self.header(VsockOp::Reset, 0, 0));
        }
        if std::mem::take(&mut self.due.shutdown) {
            return Some(self.header(VsockOp::Shutdown, 0, self.ended));
        }
        if std::mem::take(&mut self.due.credit_request) {
            return Some(self.header(VsockOp::CreditRequest, 0, 0));
        }
        if std::mem::take(&mut self.due.credit_update) {
            return Some(self.header(VsockOp::CreditUpdate, 0, 0));
        }
        None
    }

    fn header(&mut self, op: VsockOp, len: u32, flags: u32) -> VsockPacketHeader {
        self.forwarded_told = self.forwarded;
        // Every packet carries the current credit, so a separate credit update is not needed.
        self.due.credit_update = false;
        VsockPacketHeader {
            src_port: self.key.host_port,
            dst_port: self.key.guest_port,
            len,
            op: op as u16,
            flags,
            buf_alloc: BUFFER,
            fwd_cnt: self.forwarded,
            ..VsockPacketHeader::default()
        }
    }

    fn take_credit(&mut self, header: &VsockPacketHeader) {
        self.peer_buffer = header.buf_alloc;
        self.peer_forwarded = header.fwd_cnt;
    }

    /// Returns the number of bytes that the guest can still receive. Returns 0 if the credit values
    /// of the guest are contradictory.
    fn credit(&self) -> u32 {
        let on_the_way = self.sent.wrapping_sub(self.peer_forwarded);
        self.peer_buffer.saturating_sub(on_the_way)
    }

    fn may_read(&self) -> bool {
        self.state == ConnectionState::Open
            && self.readable
            && self.ended & NO_SEND == 0
            && self.guest_ended & NO_RECEIVE == 0
    }

    /// Makes a credit request to the guest pending if data can be read but the guest has granted no
    /// credit. Linux sends credit updates without a request, but other drivers do not.
    fn request_credit(&mut self) {
        self.due.credit_request = self.may_read() && self.credit() == 0;
    }

    /// Reads data from the Unix socket into `buffer`, within the guest's credit. Returns the number
    /// of bytes, or `None` if there are none.
    fn read(&mut self, buffer: &mut [u8], now: Instant) -> Option<u32> {
        if !self.may_read() {
            return None;
        }
        let most = usize::try_from(self.credit()).map_or(buffer.len(), |credit| credit.min(buffer.len()));
        if most == 0 {
            return None;
        }
        loop {
            return match self.stream.read(&mut buffer[..most]) {
                Ok(0) => {
                    let both = if self.hung_up { NO_RECEIVE } else { 0 };
                    self.end(NO_SEND | both, now);
                    None
                }
                Ok(count) => {
                    // The count is at most `most`, which was converted from a u32.
                    let count = u32::try_from(count).unwrap_or(u32::MAX);
                    self.sent = self.sent.wrapping_add(count);
                    self.request_credit();
                    Some(count)
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.readable = false;
                    self.due.credit_request = false;
                    None
                }
                Err(_) => {
                    self.reset();
                    None
                }
            };
        }
    }

    /// Makes a SHUTDOWN packet pending, after the host program has shut down the directions in
    /// `flags`.
    fn end(&mut self, flags: u32, now: Instant) {
        if self.state == ConnectionState::Open && self.ended | flags != self.ended {
            self.ended |= flags;
            self.due.shutdown = true;
            self.start_close_timeout(now);
        }
    }

    fn data(&mut self, data: &[u8], now: Instant) {
        let waits = self.to_host.len().saturating_sub(self.greeting);
        // Reset the connection if the guest exceeds its credit or sends data after its shutdown.
        let allowed = usize::try_from(BUFFER).is_ok_and(|most| data.len() <= most.saturating_sub(waits));
        if !allowed || self.guest_ended & NO_SEND != 0 {
            self.reset();
            return;
        }
        self.to_host.extend(data);
        self.flush(now);
    }

    /// Writes buffered guest data to the Unix socket, and applies the guest's shutdown: that of
    /// receiving at once, that of sending when all data is written.
    fn flush(&mut self, now: Instant) {
        while self.writable && !self.to_host.is_empty() && self.state == ConnectionState::Open {
            let (first, _) = self.to_host.as_slices();
            match self.stream.write(first) {
                Ok(count) if count > 0 => {
                    self.to_host.drain(..count);
                    let ours = self.greeting.min(count);
                    self.greeting -= ours;
                    // The conversion does not fail, because at most BUFFER bytes are buffered.
                    let theirs = u32::try_from(count - ours).unwrap_or(u32::MAX);
                    self.forwarded = self.forwarded.wrapping_add(theirs);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable = false,
                // The peer has closed the socket.
                _ => self.reset(),
            }
        }
        if self.state != ConnectionState::Open {
            return;
        }
        if self.forwarded.wrapping_sub(self.forwarded_told) >= CREDIT_UPDATE_THRESHOLD {
            self.due.credit_update = true;
        }
        let fresh = self.guest_ended & !self.passed_on;
        if fresh & NO_RECEIVE != 0 {
            self.apply_shutdown(NO_RECEIVE, Shutdown::Read);
        }
        if self.to_host.is_empty() {
            self.to_host.shrink_to(0);
            if fresh & NO_SEND != 0 {
                self.apply_shutdown(NO_SEND, Shutdown::Write);
            }
            if self.guest_ended == NO_RECEIVE | NO_SEND {
                // A full shutdown ends the connection for the guest (virtio 1.2, 5.10.6.5).
                self.reset();
                return;
            }
        }
        self.start_close_timeout(now);
    }

    fn apply_shutdown(&mut self, flag: u32, how: Shutdown) {
        self.passed_on |= flag;
        // The call fails only if the host program has exited.
        let _ = self.stream.shutdown(how);
    }

    /// Starts the timeout for the release of the connection if both sides have stopped sending or
    /// the guest has closed the connection.
    fn start_close_timeout(&mut self, now: Instant) {
        let quiet = self.ended & NO_SEND != 0 && self.guest_ended & NO_SEND != 0;
        let closed = self.guest_ended == NO_RECEIVE | NO_SEND;
        if (quiet || closed) && self.deadline.is_none() {
            self.deadline = Some(now + ANSWER_TIMEOUT);
        }
    }
}
