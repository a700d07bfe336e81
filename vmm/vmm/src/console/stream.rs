//! Console for clients of a Unix socket or a pseudo-terminal. Clients may connect and disconnect at
//! any time.
//!
//! The guest never waits for a client. The console appends guest output to a backlog of at most
//! [`BACKLOG_BYTES`] bytes, and the main loop writes the backlog to the client. When the backlog is
//! full, its oldest bytes are dropped. Output that is produced while no client is connected goes to
//! the next client.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use perf_core::error_line;
use sandbox::paths;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::poll::wait_for_room;
use super::pty::Pty;
use super::{ConsoleInputSink, INPUT_BUFFER_BYTES};

/// Maximum size in bytes of the output that waits for a client.
pub const BACKLOG_BYTES: usize = 64 * 1024;
/// Maximum number of bytes that one write to a client sends.
const CHUNK_BYTES: usize = 4096;
/// Maximum number of writes to a client per main-loop iteration. The limit prevents a fast client
/// from starving other subscribers.
const MAX_WRITES: usize = 16;

// ---------------------------------------------------------------- writers of guest output

#[derive(Default)]
struct BacklogState {
    bytes: VecDeque<u8>,
    lost_bytes: u64,
}

/// Output of the guest that no client has received yet.
pub(super) struct Backlog {
    waiting: Mutex<BacklogState>,
    /// Eventfd that is written when output arrives in the empty backlog.
    wake: EventFd,
}

impl Backlog {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            waiting: Mutex::default(),
            wake: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
        })
    }

    fn lock(&self) -> MutexGuard<'_, BacklogState> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a writer with which a device adds output to the backlog.
    pub(super) fn writer(self: &Arc<Self>) -> Box<dyn Write + Send> {
        Box::new(BacklogWriter(self.clone()))
    }

    /// Moves the oldest bytes of the backlog to the end of `chunk`, until `chunk` has
    /// [`CHUNK_BYTES`] bytes.
    fn take(&self, chunk: &mut VecDeque<u8>) {
        let mut waiting = self.lock();
        let count = waiting.bytes.len().min(CHUNK_BYTES.saturating_sub(chunk.len()));
        chunk.extend(waiting.bytes.drain(..count));
    }
}

struct BacklogWriter(Arc<Backlog>);

impl Write for BacklogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut waiting = self.0.lock();
        let was_empty = waiting.bytes.is_empty();
        let kept = &bytes[bytes.len().saturating_sub(BACKLOG_BYTES)..];
        let excess = (waiting.bytes.len() + kept.len()).saturating_sub(BACKLOG_BYTES);
        waiting.bytes.drain(..excess);
        waiting.bytes.extend(kept);
        waiting.lost_bytes += (excess + bytes.len() - kept.len()) as u64;
        drop(waiting);
        if was_empty {
            // The write fails only if the counter is full, and then a wake-up is already pending.
            let _ = self.0.wake.write(1);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

// ---------------------------------------------------------------- connection to the client

/// A listening Unix socket. Its socket file is removed on drop.
#[derive(Debug)]
pub(crate) struct Listener {
    /// The socket, in nonblocking mode.
    pub(crate) socket: UnixListener,
    path: PathBuf,
}

impl Listener {
    /// Creates a socket at `path` to which only the current user can connect. Replaces a socket
    /// file on which nobody listens.
    pub(crate) fn bind(path: &Path) -> io::Result<Self> {
        let listener = Self {
            socket: paths::bind(path, Some(0o600))?,
            path: path.to_owned(),
        };
        listener.socket.set_nonblocking(true)?;
        Ok(listener)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        paths::remove_socket(&self.path, None);
    }
}

/// The client connection that a console currently serves.
enum ConsolePeer {
    Client(UnixStream),
    Pty(Pty),
}

impl ConsolePeer {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Client(stream) => stream.read(into),
            Self::Pty(pty) => pty.master.read(into),
        }
    }

    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Self::Client(stream) => stream.write(from),
            Self::Pty(pty) => pty.master.write(from),
        }
    }

    fn fd(&self) -> RawFd {
        match self {
            Self::Client(stream) => stream.as_raw_fd(),
            Self::Pty(pty) => pty.master.as_raw_fd(),
        }
    }
}

/// Console that exchanges input and output with clients of a socket or a pseudo-terminal. Driven by
/// the main loop.
pub struct StreamConsole {
    backlog: Arc<Backlog>,
    listener: Option<Listener>,
    peer: Option<ConsolePeer>,
    guest: Option<Arc<dyn ConsoleInputSink>>,
    /// Output taken from the backlog that is being written to the client.
    chunk: VecDeque<u8>,
    /// Input that the guest has not accepted yet.
    input: VecDeque<u8>,
    /// `true` if the client has shut down its writing side, so there is no more input. The client
    /// may still read.
    input_ended: bool,
    /// `true` if the client's connection accepts no output at the moment.
    full: bool,
    /// `true` if the client has disconnected and [`StreamConsole::watch`] has not removed it yet.
    gone: bool,
    /// Descriptor in the epoll set and the events that are watched: those of the client or, while
    /// no client is connected, those of the listener.
    watched: Option<(RawFd, EventSet)>,
}

impl StreamConsole {
    pub(super) fn on_socket(listener: Listener, backlog: Arc<Backlog>) -> Self {
        Self::new(Some(listener), None, backlog)
    }

    pub(super) fn on_pty(pty: Pty, backlog: Arc<Backlog>) -> Self {
        Self::new(None, Some(ConsolePeer::Pty(pty)), backlog)
    }

    fn new(listener: Option<Listener>, peer: Option<ConsolePeer>, backlog: Arc<Backlog>) -> Self {
        Self {
            backlog,
            listener,
            peer,
            guest: None,
            chunk: VecDeque::new(),
            input: VecDeque::new(),
            input_ended: false,
            full: false,
            gone: false,
            watched: None,
        }
    }

    /// Sets the guest device that receives the clients' input.
    pub(super) fn connect(&mut self, guest: Arc<dyn ConsoleInputSink>) {
        self.guest = Some(guest);
    }

    /// Writes pending output to the client, in at most `most` writes. Stops early if all output is
    /// written, or the client accepts no more or disconnects.
    fn write_out(&mut self, most: usize) {
        for _ in 0..most {
            let Some(peer) = self.peer.as_mut().filter(|_| !self.gone) else {
                return;
            };
            self.backlog.take(&mut self.chunk);
            if self.chunk.is_empty() {
                return;
            }
            match peer.write(self.chunk.make_contiguous()) {
                Ok(count) => _ = self.chunk.drain(..count),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.full = true;
                    return;
                }
                Err(e) => {
                    log::debug!("a console's client is gone: {e}");
                    self.gone = true;
                    return;
                }
            }
        }
        // More output may be pending. It is written in the next loop iteration, after other
        // subscribers were served.
        self.full = true;
    }

    /// Reads input from the client while the input buffer has space.
    fn read_in(&mut self) {
        let mut bytes = [0; 256];
        loop {
            let room = INPUT_BUFFER_BYTES
                .saturating_sub(self.input.len())
                .min(bytes.len());
            let Some(peer) = self.peer.as_mut().filter(|_| room > 0) else {
                return;
            };
            match peer.read(&mut bytes[..room]) {
                Ok(0) => {
                    self.input_ended = true;
                    return;
                }
                Ok(count) => self.input.extend(&bytes[..count]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) => {
                    log::debug!("a console's client is gone: {e}");
                    self.gone = true;
                    return;
                }
            }
        }
    }

    /// Passes buffered input to the guest device.
    fn deliver(&mut self) {
        let Some(guest) = &self.guest else { return };
        while !self.input.is_empty() {
            match guest.send(self.input.make_contiguous()) {
                0 => return,
                taken => _ = self.input.drain(..taken),
            }
        }
    }

    /// Accepts the next client, if one is waiting.
    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        match listener.socket.accept() {
            Ok((stream, _)) => {
                if let Err(e) = stream.set_nonblocking(true) {
                    log::warn!("cannot accept a client of a console: {e}");
                    return;
                }
                self.peer = Some(ConsolePeer::Client(stream));
                self.input_ended = false;
                self.full = false;
            }
            Err(e) => log::debug!("no client for a console: {e}"),
        }
    }

    /// Returns the descriptor to watch and its events. While a client is connected, this is the
    /// client's connection, so other clients wait; otherwise it is the listener.
    fn wanted(&self) -> Option<(RawFd, EventSet)> {
        match (&self.peer, &self.listener) {
            (Some(peer), _) if !self.gone => {
                let mut events = EventSet::empty();
                events.set(
                    EventSet::IN,
                    !self.input_ended && self.input.len() < INPUT_BUFFER_BYTES,
                );
                events.set(EventSet::OUT, self.full);
                Some((peer.fd(), events))
            }
            (_, Some(listener)) => Some((listener.socket.as_raw_fd(), EventSet::IN)),
            (_, None) => None,
        }
    }

    /// Closes the connection of a disconnected client, and updates the descriptor in the epoll set.
    fn watch(&mut self, ops: &mut EventOps) {
        let wanted = self.wanted();
        if wanted != self.watched {
            let result = match (self.watched.take(), wanted) {
                (Some((old, _)), Some((new, events))) if old == new => {
                    ops.modify(Events::new_raw(new, events))
                }
                (old, new) => {
                    let removed = old.map_or(Ok(()), |(fd, events)| ops.remove(Events::new_raw(fd, events)));
                    removed.and(new.map_or(Ok(()), |(fd, events)| ops.add(Events::new_raw(fd, events))))
                }
            };
            match result {
                Ok(()) => self.watched = wanted,
                Err(e) => log::warn!("a console can no longer serve its clients: {}", error_line(&e)),
            }
        }
        // Close the descriptor only after it has left the epoll set.
        if std::mem::take(&mut self.gone) {
            self.peer = None;
        }
    }

    /// Writes the remaining output to the client for up to `limit`. Returns the number of bytes
    /// that a connected client has not received by then.
    pub(super) fn finish(&mut self, limit: Duration) -> u64 {
        let end = Instant::now() + limit;
        loop {
            self.write_out(usize::MAX);
            let left = end.saturating_duration_since(Instant::now());
            let rest = self.chunk.len() + self.backlog.lock().bytes.len();
            match &self.peer {
                Some(peer) if rest > 0 && !self.gone && !left.is_zero() => {
                    wait_for_room(peer.fd(), Some(left))
                }
                // Possibly nobody has opened the pseudo-terminal, so no output counts as lost.
                Some(ConsolePeer::Client(_)) => return rest as u64,
                _ => return 0,
            }
        }
    }

    /// Returns the number of bytes of output that were dropped because the backlog was full.
    pub(super) fn lost_bytes(&self) -> u64 {
        self.backlog.lock().lost_bytes
    }
}

impl MutEventSubscriber for StreamConsole {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        let fd = events.fd();
        if fd == self.backlog.wake.as_raw_fd() {
            let _ = self.backlog.wake.read();
        } else if let Some(guest) = self
            .guest
            .as_ref()
            .filter(|guest| fd == guest.space_event().as_raw_fd())
        {
            let _ = guest.space_event().read();
        } else if self.peer.as_ref().is_some_and(|peer| fd == peer.fd()) {
            let set = events.event_set();
            self.read_in();
            if set.contains(EventSet::OUT) {
                self.full = false;
            }
            self.gone |= set.intersects(EventSet::HANG_UP | EventSet::ERROR);
        } else if self.peer.is_none() {
            self.accept();
        }
        self.deliver();
        if !self.full {
            self.write_out(MAX_WRITES);
        }
        self.watch(ops);
    }

    fn init(&mut self, ops: &mut EventOps) {
        self.watched = None;
        let guest = self
            .guest
            .as_ref()
            .map(|guest| Events::new(guest.space_event(), EventSet::IN));
        let wake = Events::new(&self.backlog.wake, EventSet::IN);
        for events in guest.into_iter().chain([wake]) {
            if let Err(e) = ops.add(events) {
                log::warn!("a console can no longer serve the guest: {}", error_line(&e));
            }
        }
        self.watch(ops);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::PermissionsExt;

    use event_manager::{EventManager, SubscriberOps};
    use tempfile::TempDir;

    use super::*;
    use crate::console::{Console, ConsoleTarget};

    /// A console device whose input buffer has an adjustable size.
    struct Device {
        taken: Mutex<Vec<u8>>,
        room: EventFd,
        left: Mutex<usize>,
    }

    impl ConsoleInputSink for Device {
        fn send(&self, bytes: &[u8]) -> usize {
            let mut left = self.left.lock().unwrap();
            let count = bytes.len().min(*left);
            *left -= count;
            self.taken.lock().unwrap().extend(&bytes[..count]);
            count
        }

        fn space_event(&self) -> &EventFd {
            &self.room
        }
    }

    struct StreamConsoleTest {
        console: Console,
        device: Arc<Device>,
        manager: EventManager<Arc<Mutex<dyn MutEventSubscriber>>>,
        path: PathBuf,
        _dir: TempDir,
    }

    fn rig(pty: bool) -> StreamConsoleTest {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console");
        let target = if pty {
            ConsoleTarget::Pty
        } else {
            ConsoleTarget::Socket(path.clone())
        };
        let console = Console::open(&target).unwrap();
        let device = Arc::new(Device {
            taken: Mutex::default(),
            room: EventFd::new(EFD_NONBLOCK).unwrap(),
            left: Mutex::new(usize::MAX),
        });
        let mut manager = EventManager::new().unwrap();
        let quit = EventFd::new(EFD_NONBLOCK).unwrap();
        manager.add_subscriber(console.subscriber(device.clone(), quit).unwrap());
        let path = console.location().split_once('=').unwrap().1.into();
        StreamConsoleTest {
            console,
            device,
            manager,
            path,
            _dir: dir,
        }
    }

    impl StreamConsoleTest {
        fn client(&self) -> UnixStream {
            let client = UnixStream::connect(&self.path).unwrap();
            client.set_nonblocking(true).unwrap();
            client
        }

        fn write(&self, bytes: &[u8]) {
            self.console.writer().write_all(bytes).unwrap();
        }

        /// Runs the main loop until no event is pending.
        fn settle(&mut self) {
            let mut rounds = 0;
            while self.manager.run_with_timeout(0).unwrap() > 0 {
                rounds += 1;
                assert!(rounds < 100_000, "the main loop spins");
            }
        }

        /// Runs the main loop until it is idle, and returns the bytes that `client` has received.
        fn read(&mut self, client: &mut impl Read) -> Vec<u8> {
            let mut all = Vec::new();
            loop {
                self.settle();
                let mut bytes = [0; 8192];
                match client.read(&mut bytes) {
                    Ok(0) => return all,
                    Ok(count) => all.extend(&bytes[..count]),
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => return all,
                    Err(e) => panic!("{e}"),
                }
            }
        }

        fn taken(&self) -> Vec<u8> {
            self.device.taken.lock().unwrap().clone()
        }
    }

    fn numbers(count: u32) -> Vec<u8> {
        (0..count).flat_map(u32::to_le_bytes).collect()
    }

    #[test]
    fn socket_console_keeps_order_in_both_directions() {
        let mut rig = rig(false);
        let mut client = rig.client();
        rig.settle();
        rig.write(&numbers(10_000));
        assert_eq!(rig.read(&mut client), numbers(10_000));
        client.write_all(b"typed").unwrap();
        rig.settle();
        assert_eq!(rig.taken(), b"typed");
        let mode = fs::metadata(&rig.path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn next_client_receives_newest_backlog() {
        let mut rig = rig(false);
        let all = numbers(100_000);
        for part in all.chunks(1000) {
            rig.write(part);
        }
        rig.settle();
        let mut client = rig.client();
        assert_eq!(rig.read(&mut client), all[all.len() - BACKLOG_BYTES..]);
        drop(client);
        rig.settle();
        rig.write(b"later");
        let mut next = rig.client();
        assert_eq!(rig.read(&mut next), b"later");
    }

    #[test]
    fn stalled_client_does_not_block_guest() {
        let mut rig = rig(false);
        let mut client = rig.client();
        for part in numbers(2_000_000).chunks(4096) {
            rig.write(part);
            rig.manager.run_with_timeout(0).unwrap();
        }
        rig.settle();
        // The client receives the contents of its socket buffer, followed by the newest output.
        let got = rig.read(&mut client);
        let last: Vec<u8> = numbers(2_000_000).split_off(8_000_000 - BACKLOG_BYTES);
        assert!(got.len() < 8_000_000 && got.ends_with(&last));
    }

    #[test]
    fn second_client_waits_for_first_disconnect() {
        let mut rig = rig(false);
        let mut first = rig.client();
        rig.settle();
        let mut second = rig.client();
        second.write_all(b"2").unwrap();
        rig.write(b"to the first");
        assert_eq!(rig.read(&mut second), b"");
        assert_eq!(rig.read(&mut first), b"to the first");
        assert_eq!(rig.taken(), b"");
        drop(first);
        rig.settle();
        assert_eq!(rig.taken(), b"2");
        rig.write(b"to the second");
        assert_eq!(rig.read(&mut second), b"to the second");
    }

    #[test]
    fn half_closed_client_still_receives_output() {
        let mut rig = rig(false);
        let mut client = rig.client();
        client.write_all(b"poweroff\n").unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        rig.settle();
        assert_eq!(rig.taken(), b"poweroff\n");
        rig.write(b"bye");
        assert_eq!(rig.read(&mut client), b"bye");
    }

    #[test]
    fn console_input_applies_back_pressure() {
        let mut rig = rig(false);
        *rig.device.left.lock().unwrap() = 10;
        let mut client = rig.client();
        let mut sent = 0;
        while let Ok(count) = client.write(&[b'i'; 1000]) {
            sent += count;
            rig.settle();
        }
        assert_eq!(rig.taken().len(), 10);
        *rig.device.left.lock().unwrap() = usize::MAX;
        rig.device.room.write(1).unwrap();
        rig.settle();
        assert_eq!(rig.taken().len(), sent);
    }

    #[test]
    fn finish_flushes_to_connected_client() {
        let rig = rig(false);
        let mut client = rig.client();
        let mut rig = rig;
        rig.settle();
        let reader = std::thread::spawn(move || {
            client.set_nonblocking(false).unwrap();
            let mut all = Vec::new();
            client.read_to_end(&mut all).unwrap();
            all.len()
        });
        rig.write(&[b'x'; BACKLOG_BYTES]);
        assert_eq!(rig.console.finish(Duration::from_secs(60)), 0);
        let path = rig.path.clone();
        drop(rig);
        assert_eq!(reader.join().unwrap(), BACKLOG_BYTES);
        assert!(!path.exists());
    }

    #[test]
    fn stale_socket_file_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        Listener::bind(&path).unwrap();
    }

    /// A console on a pseudo-terminal passes data before and after a user opens the terminal. Guest
    /// output is not echoed as input.
    #[test]
    fn pty_console_works_before_and_after_open() {
        let mut rig = rig(true);
        rig.write(b"login: \n");
        rig.settle();
        assert_eq!(rig.taken(), b"");
        for round in 0..2 {
            let mut terminal = File::options().read(true).write(true).open(&rig.path).unwrap();
            if round == 0 {
                let mut line = [0; 8];
                terminal.read_exact(&mut line).unwrap();
                assert_eq!(&line, b"login: \n");
            }
            terminal.write_all(b"root\n").unwrap();
            // The kernel passes input through the pseudo-terminal asynchronously.
            while rig.taken().len() < 5 * (round + 1) {
                rig.manager.run_with_timeout(10).unwrap();
            }
        }
        assert_eq!(rig.taken(), b"root\nroot\n");
    }

    #[test]
    fn unopened_pty_console_finishes_at_once() {
        let mut rig = rig(true);
        for part in numbers(300_000).chunks(4096) {
            rig.write(part);
            rig.manager.run_with_timeout(0).unwrap();
        }
        rig.settle();
        assert_eq!(rig.console.finish(Duration::ZERO), 0);
    }
}
