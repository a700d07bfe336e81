//! Client for the control socket of a VM.

mod error;

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use crate::budget::{ControlReplyLimits, ReservedReplyBytes};
use crate::peer;
use crate::protocol::{
    KernelSymbolsReply, MAX_PROCESS_MEMORY, MAX_REPLY, PROTOCOL, ProcessMemory, RequestError, RequestLine,
    VmInfo,
};
use crate::request::{self, Request};
use crate::socket_dir;

pub use error::ClientError;

/// Default time that a client waits for a reply.
pub const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Time without a reply after which the client checks whether the VM's process is stopped.
const SILENCE_CHECK: Duration = Duration::from_millis(500);
/// Minimum average number of reply bytes per object or array. A client with [`ControlReplyLimits`]
/// rejects a reply with a lower average, because the parsed form of `{}` may need hundreds of
/// bytes.
const MIN_OBJECT_BYTES: usize = 32;
/// Number of objects and arrays that any reply may contain. A longer reply may contain one more per
/// [`MIN_OBJECT_BYTES`].
const FREE_OBJECTS: usize = 64;
/// Maximum number of file descriptors that a client keeps from received messages. Further
/// descriptors are closed.
const MAX_FILES: usize = 8;
/// Size of the receive buffer on the stack, in bytes. The buffer is small because a metrics
/// exporter has many threads, and thus many stacks.
const RECEIVE_BYTES: usize = 4096;
/// Maximum accepted size of the guest kernel's symbols, in bytes.
const MAX_SYMBOLS: u64 = 512 << 20;

/// A connection to the control socket of a VM.
#[derive(Debug)]
pub struct Client {
    line: Connection,
    info: VmInfo,
}

/// A connection to a control socket, used both before and after the handshake.
#[derive(Debug)]
struct Connection {
    stream: UnixStream,
    next: u64,
    incoming: Vec<u8>,
    files: VecDeque<File>,
    /// Maximum time to wait for a reply.
    patience: Duration,
    /// Time by which all requests must be answered. Each reply is also limited by `patience`.
    deadline: Option<Instant>,
    /// Maximum length of a reply, in bytes.
    max_reply: usize,
    /// Bytes of the reply budget that the received replies occupy; `None` without a budget.
    held: Option<ReservedReplyBytes>,
}

/// Descriptor of the socket, for polling whether the VM has closed the connection.
impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.line.stream.as_fd()
    }
}

/// A reply that contains a value of type `T`.
#[derive(Deserialize)]
#[serde(bound = "T: DeserializeOwned")]
struct TypedReply<T> {
    id: u64,
    #[serde(default)]
    ok: Option<T>,
    #[serde(default)]
    error: Option<RequestError>,
}

impl Client {
    /// Connects to the VM `name` of this user, whose socket may be in any of the user's socket
    /// directories. Without a name, connects to the only VM in the default directory.
    ///
    /// # Errors
    /// Returns a [`ClientError`] if no such VM exists, the choice is ambiguous, or the handshake
    /// fails.
    pub fn connect(name: Option<&str>) -> Result<Self, ClientError> {
        let dir = name.map_or_else(socket_dir::directory, socket_dir::directory_of);
        Self::connect_in(&dir, name)
    }

    /// Connects to the VM that listens on the socket `path`, with the reply timeout `patience`. If
    /// `owner` is given, the listening process must belong to that user.
    ///
    /// # Errors
    /// Returns a [`ClientError`] if the connection or the handshake fails.
    pub fn connect_at(path: &Path, owner: Option<u32>, patience: Duration) -> Result<Self, ClientError> {
        Self::over_within(stream_at(path, owner)?, patience)
    }

    /// Connects to the VM of user `owner` that listens on the socket `path`, with the given limits.
    /// All requests must be answered by `deadline` ([`Client::set_deadline`]).
    ///
    /// # Errors
    /// Returns a [`ClientError`] if the connection or the handshake fails.
    pub fn connect_limited(
        path: &Path,
        owner: u32,
        limits: &ControlReplyLimits,
        deadline: Instant,
    ) -> Result<Self, ClientError> {
        let mut line = Connection::new(stream_at(path, Some(owner))?, limits.timeout)?;
        line.deadline = Some(deadline);
        line.max_reply = limits.max_bytes;
        line.held = Some(ReservedReplyBytes::none_of(&limits.budget));
        line.greet()
    }

    /// Connects like [`Client::connect`], but only to a socket in the directory `dir`.
    ///
    /// # Errors
    /// Returns the same errors as [`Client::connect`].
    pub fn connect_in(dir: &Path, name: Option<&str>) -> Result<Self, ClientError> {
        Self::connect_within(dir, name, REPLY_TIMEOUT)
    }

    /// Connects like [`Client::connect_in`], with the reply timeout `patience`.
    ///
    /// # Errors
    /// Returns the same errors as [`Client::connect`].
    pub fn connect_within(dir: &Path, name: Option<&str>, patience: Duration) -> Result<Self, ClientError> {
        let name = match name {
            Some(name) => {
                socket_dir::check_name(name)?;
                name.to_owned()
            }
            None => {
                let mut names = socket_dir::names(dir)?;
                match names.pop() {
                    Some(only) if names.is_empty() => only,
                    last => {
                        names.extend(last);
                        return Err(ClientError::Which(names));
                    }
                }
            }
        };
        let stream = match socket_dir::connect(dir, &name) {
            Ok(stream) => stream,
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                ) =>
            {
                let others = socket_dir::names(dir)?;
                return Err(ClientError::NoSuchVm { name, others });
            }
            // The listener's backlog is full, so the VM does not accept connections.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                return Err(ClientError::Silent(SILENCE_CHECK));
            }
            Err(e) => return Err(e.into()),
        };
        Self::over_within(stream, patience)
    }

    /// Performs the handshake on a connected `stream`.
    ///
    /// # Errors
    /// Returns a [`ClientError`] if the handshake fails.
    pub fn from_stream(stream: UnixStream) -> Result<Self, ClientError> {
        Self::over_within(stream, REPLY_TIMEOUT)
    }

    fn over_within(stream: UnixStream, patience: Duration) -> Result<Self, ClientError> {
        Connection::new(stream, patience)?.greet()
    }

    /// Sets the deadline of all later requests.
    pub fn set_deadline(&mut self, deadline: Instant) {
        self.line.deadline = Some(deadline);
    }

    /// Returns the bytes of the reply budget that replies have used since the previous call. The
    /// caller must keep the returned value for as long as it uses data from these replies. Returns
    /// `None` without [`ControlReplyLimits`].
    pub fn take_held(&mut self) -> Option<ReservedReplyBytes> {
        let held = self.line.held.as_mut()?;
        let none = held.same_budget();
        Some(std::mem::replace(held, none))
    }

    /// Returns the user ID that the VM's process had when it began to listen on the socket.
    ///
    /// # Errors
    /// Returns the error of `getsockopt(2)`.
    pub fn peer_uid(&self) -> io::Result<u32> {
        peer::peer_uid(&self.line.stream)
    }

    /// Returns the underlying stream, to be passed to another process.
    pub fn into_stream(self) -> UnixStream {
        self.line.stream
    }

    /// Returns the VM's description from the handshake.
    pub fn info(&self) -> &VmInfo {
        &self.info
    }

    /// Sends a request and waits for its reply.
    ///
    /// # Errors
    /// Returns a [`ClientError`] if the VM refuses the request, exits, times out or sends a
    /// malformed reply.
    pub fn call<R: Request>(&mut self, request: R) -> Result<R::Reply, ClientError> {
        self.line.request(request)
    }

    /// Sends a request whose reply includes a file descriptor.
    ///
    /// # Errors
    /// Returns the same errors as [`Client::call`].
    pub fn call_with_file<R: Request>(&mut self, request: R) -> Result<(R::Reply, File), ClientError> {
        self.line.files.clear();
        let reply = self.line.request(request)?;
        let file = self.line.files.pop_front();
        Ok((
            reply,
            file.ok_or(ClientError::Reply("no descriptor came with it"))?,
        ))
    }

    /// Returns the guest kernel's symbols as text.
    ///
    /// # Errors
    /// Returns the same errors as [`Client::call`].
    pub fn symbols(&mut self) -> Result<(KernelSymbolsReply, Vec<u8>), ClientError> {
        let (info, mut file) = self.call_with_file(request::Symbols)?;
        file.seek(SeekFrom::Start(0))?;
        let mut text = Vec::new();
        file.take(MAX_SYMBOLS).read_to_end(&mut text)?;
        Ok((info, text))
    }

    /// Reads memory of the guest process `pid`. The [`ProcessMemory`] lists the ranges that are not
    /// in guest memory.
    ///
    /// # Errors
    /// Returns the same errors as [`Client::call`].
    pub fn process_memory(
        &mut self,
        pid: u32,
        address: u64,
        bytes: u32,
    ) -> Result<(ProcessMemory, Vec<u8>), ClientError> {
        let (info, mut file) = self.call_with_file(request::ProcessMemory { pid, address, bytes })?;
        file.seek(SeekFrom::Start(0))?;
        let mut memory = Vec::new();
        file.take(MAX_PROCESS_MEMORY.into()).read_to_end(&mut memory)?;
        Ok((info, memory))
    }
}

/// Connects to the socket `path`. If `owner` is given, the listening process must belong to that
/// user.
fn stream_at(path: &Path, owner: Option<u32>) -> Result<UnixStream, ClientError> {
    match socket_dir::connect_at(path, owner) {
        Ok(stream) => Ok(stream),
        // The listener's backlog is full, so the VM does not accept connections.
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Err(ClientError::Silent(SILENCE_CHECK)),
        Err(source) => Err(ClientError::Socket {
            path: path.to_owned(),
            source,
        }),
    }
}

/// Returns whether `reply` is long enough for the number of objects and arrays that it contains.
fn is_dense(reply: &[u8]) -> bool {
    let opened = memchr::memchr2_iter(b'{', b'[', reply).count();
    opened <= FREE_OBJECTS + reply.len() / MIN_OBJECT_BYTES
}

impl Connection {
    fn new(stream: UnixStream, patience: Duration) -> io::Result<Self> {
        stream.set_read_timeout(Some(SILENCE_CHECK))?;
        stream.set_write_timeout(Some(patience))?;
        Ok(Self {
            stream,
            next: 1,
            incoming: Vec::new(),
            files: VecDeque::new(),
            patience,
            deadline: None,
            max_reply: MAX_REPLY,
            held: None,
        })
    }

    fn greet(mut self) -> Result<Client, ClientError> {
        let info = self.request(request::Hello { protocol: PROTOCOL })?;
        Ok(Client { line: self, info })
    }

    /// Returns an error if the request sent at `asked` has timed out.
    fn check_time(&self, asked: Instant) -> Result<(), ClientError> {
        let now = Instant::now();
        let over = self.deadline.is_some_and(|deadline| now >= deadline);
        if over || now.saturating_duration_since(asked) >= self.patience {
            return Err(ClientError::Silent(self.patience));
        }
        Ok(())
    }

    /// Returns an error if the VM's process is stopped or the request sent at `asked` has timed
    /// out.
    fn check_alive(&self, asked: Instant) -> Result<(), ClientError> {
        if let Some(pid) = peer::stopped_peer_pid(&self.stream) {
            return Err(ClientError::Stopped(pid));
        }
        self.check_time(asked)
    }

    fn request<R: Request>(&mut self, request: R) -> Result<R::Reply, ClientError> {
        let id = self.next;
        self.next += 1;
        let call = request.into();
        let max_reply = call.max_reply().min(self.max_reply);
        let mut line =
            serde_json::to_vec(&RequestLine { id, call }).map_err(|_| ClientError::Reply("request"))?;
        line.push(b'\n');
        let reply = match self.stream.write_all(&line) {
            Ok(()) => self.read(max_reply)?,
            // A VM that rejects a connection sends the reason without waiting for a request.
            Err(closed) if closed.kind() == io::ErrorKind::BrokenPipe => {
                self.read(max_reply).map_err(|_| closed)?
            }
            Err(e) => return Err(e.into()),
        };
        if self.held.is_some() && !is_dense(&reply) {
            return Err(ClientError::Reply("too many parts"));
        }
        parse_reply(&reply, id)
    }

    /// Receives a reply of at most `max_reply` bytes.
    fn read(&mut self, max_reply: usize) -> Result<Vec<u8>, ClientError> {
        let mut seen = 0;
        let asked = Instant::now();
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.incoming[seen..]) {
                let rest = self.incoming.split_off(seen + end + 1);
                return Ok(std::mem::replace(&mut self.incoming, rest));
            }
            seen = self.incoming.len();
            if seen > max_reply {
                return Err(ClientError::Reply("too long"));
            }
            let mut chunk = [0; RECEIVE_BYTES];
            let received = self.stream.recv_with_fd(&mut chunk);
            let (n, file) = match received.map_err(|e| io::Error::from_raw_os_error(e.errno())) {
                Ok(received) => received,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.check_alive(asked)?;
                    continue;
                }
                // A signal can interrupt the read, because `SA_RESTART` has no effect on a socket
                // with a timeout.
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {
                    self.check_time(asked)?;
                    continue;
                }
                Err(e) => return Err(e.into()),
            };
            // A reply has at most one descriptor. Drop unexpected descriptors, so that they cannot
            // exhaust the descriptor table.
            self.files.extend(file.filter(|_| self.files.len() < MAX_FILES));
            // A VM that trickles single bytes must time out, too.
            self.check_time(asked)?;
            if n == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the VM closed it").into());
            }
            if self.held.as_mut().is_some_and(|held| !held.grow(n)) {
                return Err(ClientError::Reply(
                    "more than all VMs of this user may send at a time",
                ));
            }
            self.incoming.extend_from_slice(&chunk[..n]);
        }
    }
}

/// Parses the reply to request `id` as a value of the expected type, without an intermediate JSON
/// tree.
fn parse_reply<T: DeserializeOwned>(line: &[u8], id: u64) -> Result<T, ClientError> {
    let reply = serde_json::from_slice::<TypedReply<T>>(line);
    let wrong_type = reply.as_ref().is_err_and(|e| e.is_data());
    let (head, value) = match reply {
        Ok(TypedReply { id, ok, error }) => (TypedReply::<IgnoredAny> { id, ok: None, error }, ok),
        Err(_) if wrong_type => {
            let head = serde_json::from_slice(line).map_err(|_| ClientError::Reply("not JSON"))?;
            (head, None)
        }
        Err(_) => return Err(ClientError::Reply("not JSON")),
    };
    if let Some(failure) = head.error {
        return Err(failure.into());
    }
    if head.id != id {
        return Err(ClientError::Reply("out of order"));
    }
    match value {
        Some(value) => Ok(value),
        None if wrong_type => Err(ClientError::Reply("fields")),
        // A reply without a result is that of a request whose reply type is `()`.
        None => serde_json::from_value(serde_json::Value::Null).map_err(|_| ClientError::Reply("fields")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::fd::AsRawFd;
    use std::thread;

    use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

    use crate::protocol::RequestErrorKind;
    use crate::socket_dir::ControlSocket;

    use super::*;

    fn info(name: &str) -> VmInfo {
        VmInfo {
            protocol: PROTOCOL,
            name: name.into(),
            ..VmInfo::default()
        }
    }

    fn ok(id: u64, value: &impl serde::Serialize) -> Vec<u8> {
        let mut line = serde_json::to_vec(&serde_json::json!({ "id": id, "ok": value })).unwrap();
        line.push(b'\n');
        line
    }

    /// Simulates a VM: receives one request from `stream` and returns its ID.
    fn heard(stream: &UnixStream) -> u64 {
        let mut line = String::new();
        BufReader::with_capacity(1, stream).read_line(&mut line).unwrap();
        serde_json::from_str::<RequestLine>(&line).unwrap().id
    }

    /// Creates a client of a simulated VM, which answers the handshake and then runs `vm`.
    fn client(vm: impl FnOnce(UnixStream) + Send + 'static) -> Client {
        let (ours, theirs) = UnixStream::pair().unwrap();
        thread::spawn(move || {
            let id = heard(&theirs);
            (&theirs).write_all(&ok(id, &info("vm"))).unwrap();
            vm(theirs);
        });
        Client::from_stream(ours).unwrap()
    }

    /// Sends a request to a simulated VM that answers with `reply`, and returns the client's error.
    /// The request has ID 2.
    fn made_of(reply: &'static [u8]) -> ClientError {
        let mut client = client(|stream| {
            heard(&stream);
            (&stream).write_all(reply).unwrap();
        });
        client.call(request::Status).unwrap_err()
    }

    #[test]
    fn signal_does_not_interrupt_request() {
        extern "C" fn ignore(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
        register_signal_handler(SIGRTMIN(), ignore).unwrap();
        let (sent, all_sent) = std::sync::mpsc::channel::<()>();
        let mut client = client(move |stream| {
            let id = heard(&stream);
            all_sent.recv().unwrap();
            (&stream).write_all(&ok(id, &info("vm"))).unwrap();
        });
        let asking = thread::spawn(move || client.call(request::Status));
        for _ in 0..50 {
            asking.kill(SIGRTMIN()).unwrap();
            thread::sleep(Duration::from_millis(2));
        }
        sent.send(()).unwrap();
        asking.join().unwrap().unwrap();
    }

    /// A message that the VM sent before closing the connection is reported, even if the request
    /// could not be sent.
    #[test]
    fn rejected_connection_reports_reason() {
        let said = b"{\"id\":0,\"error\":{\"kind\":\"limit\",\"message\":\"32 connections are open\"}}\n";
        for hears_first in [false, true] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            (&theirs).write_all(said).unwrap();
            let vm = thread::spawn(move || {
                if hears_first {
                    heard(&theirs);
                }
            });
            if !hears_first {
                vm.join().unwrap();
            }
            match Client::from_stream(ours) {
                Err(ClientError::Refused(why)) => assert_eq!(why.message, "32 connections are open"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn replies_may_be_split_or_coalesced() {
        let mut client = client(|mut stream| {
            let id = heard(&stream);
            for byte in ok(id, &info("first")) {
                stream.write_all(&[byte]).unwrap();
            }
            let id = heard(&stream);
            let both = [ok(id, &info("second")), ok(id + 1, &info("third"))].concat();
            stream.write_all(&both).unwrap();
            heard(&stream);
        });
        assert_eq!(client.info().name, "vm");
        for name in ["first", "second", "third"] {
            assert_eq!(client.call(request::Status).unwrap().name, name);
        }
    }

    #[test]
    fn malformed_reply_is_rejected() {
        for (reply, why) in [
            (&b"hello\n"[..], "not JSON"),
            (b"\xff\n", "not JSON"),
            (b"{}\n", "not JSON"),
            (br#"{"id":1,"ok":{}}"#, "closed"),
            (b"{\"id\":1,\"ok\":{}}\n", "out of order"),
            (b"{\"id\":3}\n", "out of order"),
            (b"{\"id\":2,\"ok\":{\"protocol\":1}}\n", "fields"),
            (b"{\"id\":2}\n", "fields"),
        ] {
            let error = made_of(reply);
            match &error {
                ClientError::Reply(what) => assert_eq!(*what, why),
                ClientError::Io(_) => assert_eq!(why, "closed"),
                other => panic!("{other:?}"),
            }
            assert_eq!(error.is_gone(), why == "closed", "{error:?}");
        }
    }

    #[test]
    fn vm_refusal_is_returned_unchanged() {
        let error = made_of(
            b"{\"id\":2,\"error\":{\"kind\":\"protocol\",\"message\":\"the guest does not listen\"}}\n",
        );
        let ClientError::Refused(failure) = &error else {
            panic!("{error:?}");
        };
        assert_eq!(failure.kind, RequestErrorKind::Protocol);
        assert_eq!(error.to_string(), "the guest does not listen");
        assert!(!error.is_gone());
    }

    /// A VM cannot make its client allocate an unbounded amount of memory.
    #[test]
    fn endless_reply_is_rejected() {
        let mut client = client(|mut stream| {
            heard(&stream);
            while stream.write_all(&[b' '; 64 << 10]).is_ok() {}
        });
        let error = client.call(request::Status).unwrap_err();
        assert!(matches!(error, ClientError::Reply("too long")), "{error:?}");
    }

    /// A descriptor is returned only with the reply that carried it.
    #[test]
    fn descriptor_belongs_to_its_reply() {
        let mut client = client(|stream| {
            let symbols = KernelSymbolsReply {
                bytes: 3,
                flat: false,
                source: "test".into(),
                build_id: None,
                release: None,
            };
            for text in [&b"old"[..], b"new", b""] {
                let id = heard(&stream);
                let reply = match text {
                    b"old" => ok(id, &info("vm")),
                    _ => ok(id, &symbols),
                };
                if text.is_empty() {
                    (&stream).write_all(&reply).unwrap();
                    continue;
                }
                let file = peer::sealed_text("t", text).unwrap();
                stream.send_with_fd(&reply[..], file.as_raw_fd()).unwrap();
            }
        });
        client.call(request::Status).unwrap();
        let (said, text) = client.symbols().unwrap();
        assert_eq!((said.bytes, &text[..]), (3, &b"new"[..]));
        let missing = client.symbols().unwrap_err();
        assert!(matches!(
            missing,
            ClientError::Reply("no descriptor came with it")
        ));
    }

    /// A request to a VM that does not reply fails after the timeout and not earlier. The error
    /// message states that the VM exists.
    #[test]
    fn silent_vm_times_out() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let asked = Instant::now();
        let error = Client::over_within(ours, 2 * SILENCE_CHECK).unwrap_err();
        assert!(
            error.is_silence() && !error.is_gone(),
            "{error:?}, not one that is gone"
        );
        assert!(asked.elapsed() >= 2 * SILENCE_CHECK);
        assert!(error.to_string().contains("does not respond"), "{error}");
    }

    /// A VM cannot extend the timeout by sending its reply slowly, byte by byte.
    #[test]
    fn trickling_vm_times_out() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let drips = thread::spawn(move || {
            while theirs.write_all(b" ").is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        let error = Client::over_within(ours, Duration::from_millis(200)).unwrap_err();
        assert!(matches!(error, ClientError::Silent(_)), "{error:?}");
        drips.join().unwrap();
    }

    #[test]
    fn vm_is_reached_by_its_socket() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("gone.sock");
        let error = Client::connect_at(&path, None, SILENCE_CHECK)
            .unwrap_err()
            .to_string();
        assert!(error.contains("gone.sock"), "{error}");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let id = heard(&stream);
            (&stream).write_all(&ok(id, &info("there"))).unwrap();
        });
        let client = Client::connect_at(&path, Some(peer::own_uid()), REPLY_TIMEOUT).unwrap();
        assert_eq!(client.info().name, "there");
    }

    /// Connecting to a listener with a full backlog times out.
    #[test]
    fn full_backlog_times_out() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("sockets");
        let _socket = ControlSocket::bind(&dir, "a").unwrap();
        let mut waiting = Vec::new();
        let error = loop {
            match socket_dir::connect(&dir, "a") {
                Ok(stream) => waiting.push(stream),
                Err(e) => break e,
            }
            assert!(waiting.len() < 100_000, "there is room for all");
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        let error = Client::connect_in(&dir, Some("a")).unwrap_err();
        assert!(error.is_silence(), "{error:?}");
        assert_eq!(
            socket_dir::names(&dir).unwrap(),
            ["a"],
            "it is there all the same"
        );
    }

    #[test]
    fn client_finds_vm_by_name_or_only_vm() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("sockets");
        crate::socket_dir::make_directory(&dir).unwrap();
        let refused = |name: Option<&str>| Client::connect_in(&dir, name).unwrap_err().to_string();
        assert_eq!(refused(None), "no VM is running; start one with perfvisor run");
        assert_eq!(refused(Some("a")), "no VM named 'a' is running; no VM is");
        assert!(refused(Some("../a")).contains("invalid VM name"));

        let serve = |name: &'static str| {
            let socket = ControlSocket::bind(&dir, name).unwrap();
            let listener = socket.listener.try_clone().unwrap();
            listener.set_nonblocking(false).unwrap();
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let mut line = String::new();
                    if BufReader::new(&stream).read_line(&mut line).is_ok_and(|n| n > 0) {
                        let id = serde_json::from_str::<RequestLine>(&line).unwrap().id;
                        (&stream).write_all(&ok(id, &info(name))).unwrap();
                    }
                }
            });
            socket
        };
        let _a = serve("a");
        assert_eq!(Client::connect_in(&dir, None).unwrap().info().name, "a");
        assert_eq!(refused(Some("b")), "no VM named 'b' is running; running are a");
        let _b = serve("b");
        assert_eq!(Client::connect_in(&dir, Some("b")).unwrap().info().name, "b");
        assert_eq!(refused(None), "more than one VM is running, name one: a, b");
    }
}
