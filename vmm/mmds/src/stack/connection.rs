//! A TCP connection between the guest and the metadata service. The requests on a connection are
//! answered sequentially.

use std::time::{Duration, Instant};

use smoltcp::iface::{SocketHandle, SocketSet};
use smoltcp::socket::tcp::{Socket, SocketBuffer};

use crate::http::{self, MAX_REQUEST, MetadataParseOutcome};
use crate::service::MetadataService;

/// TCP port of the metadata service.
const PORT: u16 = 80;
/// Time after which an inactive connection is reset.
pub(super) const IDLE_TIME: Duration = Duration::from_secs(30);
/// Size of a connection's receive buffer, in bytes.
const RECEIVE_BYTES: usize = 2 << 10;
/// Size of a connection's transmit buffer, in bytes.
const TRANSMIT_BYTES: usize = 8 << 10;

/// A connection, or a socket that listens for a connection.
pub(super) struct Connection {
    handle: SocketHandle,
    /// Received bytes of requests that have not been answered, at most [`MAX_REQUEST`].
    request: Vec<u8>,
    /// Length of `request` when the last attempt to parse it found an incomplete request. The next
    /// attempt waits for more bytes.
    incomplete: usize,
    /// Current response, of which the socket has accepted `sent` bytes. Empty if there is none.
    response: Vec<u8>,
    sent: usize,
    /// `true` if the connection closes after the response.
    closes: bool,
    last_active: Instant,
}

impl Connection {
    pub(super) fn new(sockets: &mut SocketSet<'static>, now: Instant) -> Self {
        let buffer = |bytes| SocketBuffer::new(vec![0; bytes]);
        let socket = Socket::new(buffer(RECEIVE_BYTES), buffer(TRANSMIT_BYTES));
        Self {
            handle: sockets.add(socket),
            request: Vec::new(),
            incomplete: 0,
            response: Vec::new(),
            sent: 0,
            closes: false,
            last_active: now,
        }
    }

    pub(super) fn handle(&self) -> SocketHandle {
        self.handle
    }

    /// Returns the time at which the guest last sent or acknowledged a byte.
    pub(super) fn last_active(&self) -> Instant {
        self.last_active
    }

    /// Returns the time at which the connection is reset if it remains inactive.
    pub(super) fn deadline(&self, socket: &Socket<'_>) -> Option<Instant> {
        let is_connected = socket.is_open() && !socket.is_listening();
        is_connected.then(|| self.last_active + IDLE_TIME)
    }

    /// Makes the socket listen for a new connection if it has no connection.
    pub(super) fn listen(&mut self, socket: &mut Socket<'_>, now: Instant) {
        if !socket.is_open() {
            // Free the buffers, which may be large after a long request or response.
            (self.request, self.response) = (Vec::new(), Vec::new());
            (self.incomplete, self.sent, self.closes, self.last_active) = (0, 0, false, now);
            // The call cannot fail, because the socket is closed and the port is not 0.
            let _ = socket.listen(PORT);
        }
    }

    /// Receives and answers requests until the socket would block.
    pub(super) fn serve(&mut self, socket: &mut Socket<'_>, service: &MetadataService, now: Instant) {
        if socket.is_listening() {
            self.last_active = now;
            return;
        }
        if self.deadline(socket).is_some_and(|deadline| now >= deadline) {
            return socket.abort();
        }
        // The loop ends, because each iteration consumes bytes from the guest, which cannot send
        // more in the meantime.
        while self.send(socket, now) && !self.closes && self.answer(socket, service, now) {}
        let is_done = self.response.is_empty();
        if is_done && (self.closes || !socket.may_recv() && socket.may_send()) {
            socket.close();
        }
    }

    /// Passes the rest of the response to the socket. Returns `true` if the socket has accepted all
    /// of it.
    fn send(&mut self, socket: &mut Socket<'_>, now: Instant) -> bool {
        let rest = self.response.get(self.sent..).unwrap_or_default();
        if !rest.is_empty() && socket.can_send() {
            let sent = socket.send_slice(rest).unwrap_or(0);
            self.sent += sent;
            if sent > 0 {
                self.last_active = now;
            }
        }
        if self.sent < self.response.len() {
            return false;
        }
        self.response.clear();
        self.sent = 0;
        true
    }

    /// Reads from the socket, and answers the next request. Returns `false` if the request is
    /// incomplete.
    fn answer(&mut self, socket: &mut Socket<'_>, service: &MetadataService, now: Instant) -> bool {
        while socket.can_recv() && self.request.len() < MAX_REQUEST {
            let room = MAX_REQUEST - self.request.len();
            let read = socket.recv(|bytes| {
                let count = bytes.len().min(room);
                self.request.extend(bytes.iter().take(count));
                (count, count)
            });
            if read.is_err() {
                break;
            }
            self.last_active = now;
        }
        if self.request.len() == self.incomplete {
            return false;
        }
        self.incomplete = 0;
        match http::parse(&self.request) {
            MetadataParseOutcome::Incomplete => {
                self.incomplete = self.request.len();
                false
            }
            MetadataParseOutcome::Complete(request, taken) => {
                self.request.drain(..taken);
                self.closes = !request.keep_alive;
                self.response = service.answer(&request, now).encode(request.keep_alive);
                true
            }
            MetadataParseOutcome::Rejected(response) => {
                self.request.clear();
                self.closes = true;
                self.response = response.encode(false);
                true
            }
        }
    }
}
