//! One connection between a port of the guest and a Unix socket of the host.
//!
//! What the guest sends goes to the Unix socket at once, and what that does not take waits in a buffer as
//! large as the credit the guest was given. What the host sends stays in the Unix socket until the guest has
//! both credit and a buffer for it. So neither side makes this process hold more than [`BUFFER`] bytes.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::packet::{Header, NO_RECEIVE, NO_SEND, Op};

/// Bytes that the guest may send before the host's program has read them: the credit of a connection.
pub const BUFFER: u32 = 256 << 10;
/// The guest is told of new credit when this much of it has come: often enough that it need not wait.
const TELL_CREDIT: u32 = BUFFER / 4;
/// How long the guest may take to answer a request, and to let go of a connection that has ended.
const PATIENCE: Duration = Duration::from_secs(30);

/// Who a connection is between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Port of the host's side.
    pub host_port: u32,
    /// Port of the guest's side.
    pub guest_port: u32,
}

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The host's program asked for it, and the guest has not answered.
    Requested,
    /// Both sides agreed.
    Open,
    /// One side broke off: what is left to do is to tell the guest, if it does not know.
    Dead,
}

/// Packets to be sent that carry no data.
#[derive(Clone, Copy, Debug, Default)]
struct Due {
    request: bool,
    response: bool,
    reset: bool,
    shutdown: bool,
    credit_update: bool,
    credit_request: bool,
}

/// A connection.
#[derive(Debug)]
pub struct Connection {
    key: Key,
    stream: UnixStream,
    state: State,
    due: Due,
    deadline: Option<Instant>,
    /// What the Unix socket has not taken yet.
    to_host: VecDeque<u8>,
    /// Bytes of `to_host` that are ours and not the guest's: the answer to CONNECT.
    greeting: usize,
    /// Bytes of the guest that the Unix socket has taken, and how many of them the guest knows of.
    forwarded: u32,
    forwarded_told: u32,
    /// What the guest can hold, what it has passed on, what it was sent; modulo 2^32 as in the headers.
    peer_buffer: u32,
    peer_forwarded: u32,
    sent: u32,
    /// What the last event said of the Unix socket; false after it would have blocked.
    readable: bool,
    writable: bool,
    /// The host's program has closed its socket and not only its sending side.
    hung_up: bool,
    /// What we said in a SHUTDOWN, what the guest said in its own, and what of it the Unix socket knows.
    ended: u32,
    guest_ended: u32,
    passed_on: u32,
}

impl Connection {
    fn new(key: Key, stream: UnixStream, state: State) -> Self {
        Self {
            key,
            stream,
            state,
            due: Due::default(),
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

    /// One that a program of the host asks for. `stream` must not block.
    pub fn requested(key: Key, stream: UnixStream, now: Instant) -> Self {
        let mut connection = Self::new(key, stream, State::Requested);
        connection.due.request = true;
        connection.deadline = Some(now + PATIENCE);
        connection
    }

    /// One that the guest asked for by `request`, and that has been made. `stream` must not block.
    pub fn accepted(key: Key, stream: UnixStream, request: &Header) -> Self {
        let mut connection = Self::new(key, stream, State::Open);
        connection.due.response = true;
        connection.take_credit(request);
        connection
    }

    /// Whose it is.
    pub fn key(&self) -> Key {
        self.key
    }

    /// The host's side, when the connection is not needed any more.
    pub fn into_stream(self) -> UnixStream {
        self.stream
    }

    /// When something must have happened.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether nothing is left to be done for it.
    pub fn is_over(&self) -> bool {
        self.state == State::Dead && !self.due.reset
    }

    /// Ends it at once, and has the guest told.
    pub fn reset(&mut self) {
        self.state = State::Dead;
        self.due = Due {
            reset: true,
            ..Due::default()
        };
        self.deadline = None;
        self.to_host = VecDeque::new();
        // The program hears of it now, however late the guest takes its packets. One that has gone already
        // is no news.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Whether [`Connection::next`] may have a packet.
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

    /// What the event loop says of the Unix socket.
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
        self.ask_for_credit();
    }

    /// A packet of the guest for this connection, with its data.
    pub fn guest_packet(&mut self, header: &Header, data: &[u8], now: Instant) {
        if self.state == State::Dead {
            return;
        }
        self.take_credit(header);
        match (Op::from_number(header.op), self.state) {
            (Some(Op::Response), State::Requested) => {
                self.state = State::Open;
                self.deadline = None;
                let greeting = format!("OK {}\n", self.key.host_port);
                self.greeting = greeting.len();
                self.to_host.extend(greeting.as_bytes());
                self.flush(now);
            }
            (Some(Op::Data), State::Open) => self.data(data, now),
            (Some(Op::Shutdown), State::Open) => {
                self.guest_ended |= header.flags & (NO_RECEIVE | NO_SEND);
                self.flush(now);
            }
            (Some(Op::CreditUpdate), State::Open) => {}
            (Some(Op::CreditRequest), State::Open) => self.due.credit_update = true,
            (Some(Op::Reset), _) => {
                // The guest knows: nothing is to be sent.
                self.reset();
                self.due.reset = false;
            }
            _ => self.reset(),
        }
        self.ask_for_credit();
    }

    /// The next packet for the guest, its data in `buffer`.
    pub fn next(&mut self, buffer: &mut [u8], now: Instant) -> Option<Header> {
        if std::mem::take(&mut self.due.reset) {
            return Some(self.header(Op::Reset, 0, 0));
        }
        if std::mem::take(&mut self.due.request) {
            return Some(self.header(Op::Request, 0, 0));
        }
        if std::mem::take(&mut self.due.response) {
            return Some(self.header(Op::Response, 0, 0));
        }
        if let Some(len) = self.read(buffer, now) {
            return Some(self.header(Op::Data, len, 0));
        }
        if std::mem::take(&mut self.due.reset) {
            return Some(self.header(Op::Reset, 0, 0));
        }
        if std::mem::take(&mut self.due.shutdown) {
            return Some(self.header(Op::Shutdown, 0, self.ended));
        }
        if std::mem::take(&mut self.due.credit_request) {
            return Some(self.header(Op::CreditRequest, 0, 0));
        }
        if std::mem::take(&mut self.due.credit_update) {
            return Some(self.header(Op::CreditUpdate, 0, 0));
        }
        None
    }

    fn header(&mut self, op: Op, len: u32, flags: u32) -> Header {
        self.forwarded_told = self.forwarded;
        // Each packet tells it.
        self.due.credit_update = false;
        Header {
            src_port: self.key.host_port,
            dst_port: self.key.guest_port,
            len,
            op: op as u16,
            flags,
            buf_alloc: BUFFER,
            fwd_cnt: self.forwarded,
            ..Header::default()
        }
    }

    fn take_credit(&mut self, header: &Header) {
        self.peer_buffer = header.buf_alloc;
        self.peer_forwarded = header.fwd_cnt;
    }

    /// Bytes the guest can still take. One that contradicts itself can take none.
    fn credit(&self) -> u32 {
        let on_the_way = self.sent.wrapping_sub(self.peer_forwarded);
        self.peer_buffer.saturating_sub(on_the_way)
    }

    fn may_read(&self) -> bool {
        self.state == State::Open
            && self.readable
            && self.ended & NO_SEND == 0
            && self.guest_ended & NO_RECEIVE == 0
    }

    /// Linux tells of its credit by itself, others wait to be asked.
    fn ask_for_credit(&mut self) {
        self.due.credit_request = self.may_read() && self.credit() == 0;
    }

    /// Takes data from the host's program; the number of bytes, if there were any.
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
                    // At most `most`, which came from an u32.
                    let count = u32::try_from(count).unwrap_or(u32::MAX);
                    self.sent = self.sent.wrapping_add(count);
                    self.ask_for_credit();
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

    /// Says in a SHUTDOWN what the host's program does no more.
    fn end(&mut self, flags: u32, now: Instant) {
        if self.state == State::Open && self.ended | flags != self.ended {
            self.ended |= flags;
            self.due.shutdown = true;
            self.let_go_in_time(now);
        }
    }

    fn data(&mut self, data: &[u8], now: Instant) {
        let waits = self.to_host.len().saturating_sub(self.greeting);
        // More than its credit, or more although it said there would be none.
        let allowed = usize::try_from(BUFFER).is_ok_and(|most| data.len() <= most.saturating_sub(waits));
        if !allowed || self.guest_ended & NO_SEND != 0 {
            self.reset();
            return;
        }
        self.to_host.extend(data);
        self.flush(now);
    }

    /// Gives the Unix socket what it takes, and then what the guest said of its end.
    fn flush(&mut self, now: Instant) {
        while self.writable && !self.to_host.is_empty() && self.state == State::Open {
            let (first, _) = self.to_host.as_slices();
            match self.stream.write(first) {
                Ok(count) if count > 0 => {
                    self.to_host.drain(..count);
                    let ours = self.greeting.min(count);
                    self.greeting -= ours;
                    // No more than BUFFER bytes are ever held.
                    let theirs = u32::try_from(count - ours).unwrap_or(u32::MAX);
                    self.forwarded = self.forwarded.wrapping_add(theirs);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable = false,
                // Nobody will read it.
                _ => self.reset(),
            }
        }
        if self.state != State::Open {
            return;
        }
        if self.forwarded.wrapping_sub(self.forwarded_told) >= TELL_CREDIT {
            self.due.credit_update = true;
        }
        let fresh = self.guest_ended & !self.passed_on;
        if fresh & NO_RECEIVE != 0 {
            self.pass_on(NO_RECEIVE, Shutdown::Read);
        }
        if self.to_host.is_empty() {
            self.to_host.shrink_to(0);
            if fresh & NO_SEND != 0 {
                self.pass_on(NO_SEND, Shutdown::Write);
            }
            if self.guest_ended == NO_RECEIVE | NO_SEND {
                // That ends it for the guest (virtio 1.2, 5.10.6.5).
                self.reset();
                return;
            }
        }
        self.let_go_in_time(now);
    }

    fn pass_on(&mut self, flag: u32, how: Shutdown) {
        self.passed_on |= flag;
        // It fails when the host's program is gone, and then needs not to know.
        let _ = self.stream.shutdown(how);
    }

    /// When neither side sends any more, or the guest has closed, the rest must not take for ever.
    fn let_go_in_time(&mut self, now: Instant) {
        let quiet = self.ended & NO_SEND != 0 && self.guest_ended & NO_SEND != 0;
        let closed = self.guest_ended == NO_RECEIVE | NO_SEND;
        if (quiet || closed) && self.deadline.is_none() {
            self.deadline = Some(now + PATIENCE);
        }
    }
}
