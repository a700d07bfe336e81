//! Connections on a Unix socket.
//!
//! One thread serves all connections and answers one request at a time. Each connection buffers at
//! most one request and one response. If [`MAX_CONNECTIONS`] are open, a new connection replaces
//! the one that has been inactive for the longest time. A request must be complete within
//! [`REQUEST_TIME`] after its first byte, and the client must read the response within the same
//! time.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::fault::ApiFault;
use crate::http::{self, CONTINUE, HttpParseOutcome, MAX_HEAD, Request, Response};

/// Maximum number of open connections to the API socket.
pub const MAX_CONNECTIONS: usize = 32;
/// Maximum time from the first byte of a request until the request is complete, and maximum time
/// until the client has read the response.
pub const REQUEST_TIME: Duration = Duration::from_secs(10);
/// Maximum number of connections accepted between two polls.
const ACCEPT_BATCH: usize = 16;
/// Pause after a failed `accept(2)` before it is retried.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Maximum size of one read from a connection, in bytes.
const READ_BYTES: usize = 4096;

/// The listening socket of the API and its open connections.
#[derive(Debug)]
pub struct ApiServer {
    /// Listening socket; `None` for a VM without an API socket.
    listener: Option<UnixListener>,
    connections: Vec<Connection>,
    max_body: usize,
    /// Time before which no new connections are accepted, because `accept(2)` has failed for lack
    /// of a resource.
    accept_after: Option<Instant>,
}

#[derive(Debug)]
struct Connection {
    stream: UnixStream,
    /// Received bytes of requests that have not been answered.
    received: Vec<u8>,
    /// Bytes of the response that have not been sent.
    unsent: Vec<u8>,
    last_active: Instant,
    /// Time at which the current request or response is aborted; `None` if the connection is idle.
    deadline: Option<Instant>,
    /// `true` if the connection is closed once its response has been sent.
    closes: bool,
    /// `true` if the client has received an interim response for the current request.
    continued: bool,
}

impl ApiServer {
    /// Creates a server for the connections of `listener`, if any. A request body may be at most
    /// `max_body` bytes long.
    ///
    /// # Errors
    /// Returns an error if `fcntl(2)` fails.
    pub fn new(listener: Option<UnixListener>, max_body: usize) -> io::Result<Self> {
        if let Some(listener) = &listener {
            listener.set_nonblocking(true)?;
        }
        Ok(Self {
            listener,
            connections: Vec::new(),
            max_body,
            accept_after: None,
        })
    }

    /// Returns the number of open connections.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Waits until a request or a connection arrives, or one of the descriptors in `others` becomes
    /// readable. Answers all complete requests with `answer`, and returns which of `others` are
    /// readable.
    ///
    /// # Errors
    /// Returns an error if `poll(2)` fails.
    pub fn turn(
        &mut self,
        others: &[BorrowedFd<'_>],
        answer: &mut dyn FnMut(&Request) -> Response,
    ) -> io::Result<Vec<bool>> {
        let (ready, others) = self.wait(others)?;
        let now = Instant::now();
        let max_body = self.max_body;
        for (connection, ready) in self.connections.iter_mut().zip(&ready) {
            if *ready {
                connection.serve(max_body, now, answer);
            }
            connection.check_deadline(now);
        }
        self.connections.retain(|connection| !connection.is_finished());
        self.accept(now);
        Ok(others)
    }

    /// Waits until a connection, a new client or a descriptor in `others` is ready, or a deadline
    /// passes. Returns which connections and which of `others` are ready.
    fn wait(&mut self, others: &[BorrowedFd<'_>]) -> io::Result<(Vec<bool>, Vec<bool>)> {
        let now = Instant::now();
        let accepts = self.accept_after.is_none_or(|after| now >= after);
        let deadlines = self.connections.iter().filter_map(|c| c.deadline);
        let until = deadlines.chain(self.accept_after.filter(|_| !accepts)).min();
        let timeout = until.map(|until| {
            // Wait one additional millisecond, so that the deadline has passed after the wait.
            let left = until.saturating_duration_since(now) + Duration::from_millis(1);
            Timespec::try_from(left).unwrap_or(Timespec {
                tv_sec: 1,
                tv_nsec: 0,
            })
        });
        let mut fds: Vec<PollFd<'_>> = others
            .iter()
            .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN))
            .collect();
        for connection in &self.connections {
            let events = if connection.unsent.is_empty() {
                PollFlags::IN
            } else {
                PollFlags::OUT
            };
            fds.push(PollFd::from_borrowed_fd(connection.stream.as_fd(), events));
        }
        if accepts && let Some(listener) = &self.listener {
            fds.push(PollFd::new(listener, PollFlags::IN));
        }
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let (others, connections) = ready.split_at(others.len());
        Ok((connections.to_vec(), others.to_vec()))
    }

    /// Accepts waiting connections. If the maximum number of connections is open, a new connection
    /// replaces the one that has been inactive for the longest time.
    fn accept(&mut self, now: Instant) {
        let Some(listener) = &self.listener else { return };
        if self.accept_after.is_some_and(|after| now < after) {
            return;
        }
        self.accept_after = None;
        for _ in 0..ACCEPT_BATCH {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionAborted) => return,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => {
                    log::warn!("API socket: accept failed: {e}");
                    self.accept_after = Some(now + ACCEPT_PAUSE);
                    return;
                }
            };
            if self.connections.len() >= MAX_CONNECTIONS {
                let oldest = self.connections.iter().enumerate();
                let oldest = oldest.min_by_key(|(_, connection)| connection.last_active);
                if let Some((index, _)) = oldest {
                    self.connections.remove(index);
                }
            }
            if stream.set_nonblocking(true).is_ok() {
                self.connections.push(Connection::new(stream, now));
            }
        }
    }
}

impl Connection {
    fn new(stream: UnixStream, now: Instant) -> Self {
        Self {
            stream,
            received: Vec::new(),
            unsent: Vec::new(),
            last_active: now,
            deadline: None,
            closes: false,
            continued: false,
        }
    }

    fn is_finished(&self) -> bool {
        self.closes && self.unsent.is_empty()
    }

    /// Closes the connection without a response.
    fn abandon(&mut self) {
        self.unsent.clear();
        self.closes = true;
    }

    /// Sends and receives as much as possible without blocking, and answers complete requests.
    fn serve(&mut self, max_body: usize, now: Instant, answer: &mut dyn FnMut(&Request) -> Response) {
        self.last_active = now;
        self.flush();
        // Answer requests that arrived together with an earlier one whose response had not been
        // sent then.
        self.answer_requests(max_body, now, answer);
        if !self.unsent.is_empty() || self.closes {
            return;
        }
        let mut chunk = [0; READ_BYTES];
        match self.stream.read(&mut chunk) {
            Ok(0) => return self.abandon(),
            Ok(count) => self.received.extend(chunk.iter().take(count)),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return,
            Err(_) => return self.abandon(),
        }
        // The parser accepts or rejects a head at MAX_HEAD, and the body is bounded, so `received`
        // is bounded too.
        debug_assert!(self.received.len() <= MAX_HEAD + max_body + READ_BYTES);
        self.answer_requests(max_body, now, answer);
    }

    fn answer_requests(
        &mut self,
        max_body: usize,
        now: Instant,
        answer: &mut dyn FnMut(&Request) -> Response,
    ) {
        while self.unsent.is_empty() && !self.received.is_empty() && !self.closes {
            match http::parse(&self.received, max_body) {
                HttpParseOutcome::Incomplete(expects_continue) => {
                    self.deadline.get_or_insert(now + REQUEST_TIME);
                    if expects_continue && !self.continued {
                        self.continued = true;
                        self.unsent = CONTINUE.to_vec();
                        self.flush();
                    }
                    return;
                }
                HttpParseOutcome::Complete(request, taken) => {
                    self.received.drain(..taken);
                    self.continued = false;
                    let response = answer(&request);
                    self.send(&response, request.keep_alive);
                }
                HttpParseOutcome::Rejected(fault) => self.send(&Response::from(&fault), false),
            }
        }
    }

    fn send(&mut self, response: &Response, keep_alive: bool) {
        self.unsent = response.encode(keep_alive);
        self.closes = !keep_alive;
        self.deadline = Some(Instant::now() + REQUEST_TIME);
        self.flush();
    }

    /// Sends as much of the response as the socket accepts.
    fn flush(&mut self) {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(count) if count > 0 => {
                    self.unsent.drain(..count);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                _ => return self.abandon(),
            }
        }
        if self.received.is_empty() {
            self.deadline = None;
        }
    }

    /// Aborts a request or response that exceeds its time limit.
    fn check_deadline(&mut self, now: Instant) {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return;
        }
        if self.unsent.is_empty() && !self.closes {
            let fault = ApiFault {
                status: 408,
                message: format!("the request was not complete after {} s", REQUEST_TIME.as_secs()),
            };
            self.unsent = Response::from(&fault).encode(false);
            self.flush();
        }
        self.abandon();
    }
}
