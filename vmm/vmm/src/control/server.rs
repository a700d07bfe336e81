//! The server of a VM's control socket, a subscriber of the main loop.
//!
//! The server never waits for a client. Sockets are nonblocking. A request may be at most
//! [`MAX_REQUEST`] bytes long, a connection may make `REQUESTS_PER_SECOND` requests per second, and
//! at most `MAX_UNSENT` bytes of unsent replies are kept. A client that exceeds a limit loses its
//! connection and its events.

mod answer;
mod refused;
mod snapshot;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use arc_swap::ArcSwap;
use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use perf_core::pmu::VcpuId;
use perf_core::{SessionRole, error_line};
use serde_json::Value;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::balloon;
use super::counts;
use super::exits::ExitWatch;
use super::guest_view::vcpu_view;
use super::limits::NamedLimiters;
use super::processes::GuestProcesses;
use super::session::{ControlClientEvents, fail, role};
use crate::devices::DeviceBus;
use crate::devices::cpu_plug::VcpuSet;
use crate::pmu::VmPmu;
use crate::vcpu::control::{VmRunControl, VmRunState};
use crate::vcpu::registry::VcpuRegistry;
use crate::vcpu::slot::VcpuSlot;
use crate::vm::migrate::OutgoingMigration;
use crate::vm::save::{VmSnapshot, VmSnapshotInputs};
use control_api::counts::VcpuCounts;
use control_api::migration::MigrationSource;
use control_api::peer;
use control_api::protocol::{
    Call, ClientRole, KernelSymbolsReply, MAX_REQUEST, PROTOCOL, ReplyLine, RequestError, RequestErrorKind,
    RequestLine, VcpuPlugStatus, VcpuRefusal, VmGuestCounters, VmInfo, VmSettings, VmState,
};
use control_api::socket_dir::ControlSocket;
use kernel_images::packed::CompressedKernelSymbols;
use mmds::service::MetadataService;
use refused::ConnectionRefusal;
use virtio_devices::balloon::control::BalloonControl;

/// Maximum number of open operator connections.
const MAX_CONNECTIONS: usize = 32;
/// Maximum number of open observer connections. Observers are counted separately, so they cannot
/// use up the connections of operators.
const MAX_OBSERVERS: usize = 8;
/// Sustained request rate limit of an operator connection, in requests per second.
const REQUESTS_PER_SECOND: f64 = 1000.0;
/// Sustained request rate limit of an observer connection, in requests per second. Lower than that
/// of an operator, because each request may force vCPU exits.
const REQUESTS_OF_OBSERVERS: f64 = 200.0;
/// Maximum number of requests that a connection may send at once.
const REQUEST_BURST: f64 = 200.0;
/// Maximum number of unsent bytes of replies per connection.
const MAX_UNSENT: usize = 1 << 20;
/// Maximum number of bytes read from one connection before other connections are served.
const READ_CHUNK: usize = 16 << 10;
/// Value that identifies the first listener in epoll events. Further listeners have the next lower
/// values, and connections are numbered from 0 up.
const LISTENER: u32 = u32::MAX;
/// Maximum number of listening sockets of the server.
const LISTENERS: u32 = 2;

/// Parts and properties of the VM that the control server serves.
pub struct VmControlInterface {
    /// Name of the VM.
    pub name: String,
    /// Name of the PMU model.
    pub pmu_name: String,
    /// Origin of the guest, for clients: for example the path of its kernel file, or the snapshot
    /// from which it was restored.
    pub guest: String,
    /// Process from which the VM has moved to this one; `None` if it has not moved.
    pub moved_from: Option<MigrationSource>,
    /// Target of the serial port's console, in the syntax of the command line.
    pub console: String,
    /// Target of the virtio console, in the syntax of the command line. Empty if the VM has no
    /// virtio console.
    pub virtio_console: String,
    /// Start time of the VM.
    pub started: Instant,
    /// Run state and stop reason of the VM.
    pub control: Arc<VmRunControl>,
    /// The PMU of the VM, with the perf core that counts the events of clients.
    pub pmu: Arc<VmPmu>,
    /// Registry of the VM's vCPUs.
    pub registry: Arc<VcpuRegistry>,
    /// Device bus of the VM.
    pub bus: Arc<DeviceBus>,
    /// Rate limiters of the devices.
    pub limiters: NamedLimiters,
    /// Text symbols of the guest kernel that was loaded last.
    pub symbols: Arc<ArcSwap<CompressedKernelSymbols>>,
    /// `true` if the guest kernel runs in a single address space without user processes.
    pub flat: bool,
    /// Size of the guest's memory, in bytes.
    pub memory_bytes: u64,
    /// The balloon, if the VM has one.
    pub balloon: Option<Arc<BalloonControl>>,
    /// The metadata service, if the VM has one.
    pub metadata: Option<Arc<MetadataService>>,
    /// Parts of the VM that a snapshot needs.
    pub snapshots: Arc<VmSnapshotInputs>,
    /// Command-line options that determine the machine, for the state file of a snapshot.
    pub options: BTreeMap<String, String>,
    /// Number of requests for the guest's counters so far. Each request uses the next number as its
    /// generation.
    pub view_requests: AtomicU64,
}

impl VmControlInterface {
    /// Returns the description of the VM that a client with `role` receives.
    pub fn info(&self, role: ClientRole) -> VmInfo {
        VmInfo {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").into(),
            name: self.name.clone(),
            pid: sandbox::host_pid(),
            vcpus: self.registry.present().len(),
            max_vcpus: self.registry.max().into(),
            pmu: self.pmu_name.clone(),
            guest: self.guest.clone(),
            console: self.console.clone(),
            virtio_console: self.virtio_console.clone(),
            state: match self.control.state() {
                VmRunState::Resetting if self.control.is_pause_requested() => VmState::Paused,
                VmRunState::Running | VmRunState::Resetting => VmState::Running,
                VmRunState::Paused | VmRunState::Held => VmState::Paused,
                VmRunState::Stopped => VmState::Stopped,
            },
            threads: self.registry.present_slots().map(|slot| slot.thread()).collect(),
            parked: u32::try_from(self.control.parked()).unwrap_or(u32::MAX),
            uptime_ms: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            role,
            settings: Some(self.settings()),
            moved_from: self.moved_from.clone(),
        }
    }

    fn settings(&self) -> VmSettings {
        VmSettings {
            backing: self.pmu.backing_name().into(),
            share: self.pmu.core().share().to_string(),
            filter: self.pmu.filter_summary(),
            memory_bytes: self.memory_bytes,
            balloon: self.balloon.as_deref().map(balloon::info),
        }
    }

    /// Wakes parked vCPUs and kicks the others out of KVM_RUN, so that all process their requests.
    fn deliver(&self) {
        self.control.wake_parked();
        self.registry.kicker().kick();
    }

    /// Asks every vCPU for the counter configuration of the guest. Returns the generation number
    /// with which [`Self::views`] returns the replies.
    pub fn request_views(&self) -> u64 {
        let generation = self.view_requests.fetch_add(1, Ordering::Relaxed) + 1;
        for slot in self.registry.present_slots() {
            slot.request_queue().request_view(generation);
        }
        self.deliver();
        generation
    }

    /// Returns the replies of the vCPUs to the request with this generation number. The result is
    /// complete if every vCPU that was asked and is still present has replied.
    pub fn views(&self, generation: u64) -> VmGuestCounters {
        let asked = || {
            self.registry
                .present_slots()
                .filter(|slot| slot.request_queue().is_view_requested(generation))
        };
        let vcpus: Vec<_> = asked()
            .filter_map(|slot| slot.request_queue().view(generation))
            .map(|view| vcpu_view(&view))
            .collect();
        VmGuestCounters {
            complete: vcpus.len() == asked().count(),
            vcpus,
        }
    }

    /// Returns the run-loop statistics of all vCPUs. The statistics of an unplugged vCPU are
    /// included.
    pub fn vcpu_counts(&self) -> Vec<VcpuCounts> {
        let present = self.registry.present();
        let known = |slot: &&Arc<VcpuSlot>| present.contains(slot.id()) || slot.stats().exits.get() > 0;
        let slots = self.registry.slots().iter().filter(known);
        let counts = slots.map(|slot| {
            let vcpu = u32::from(slot.id());
            let context = self.pmu.core().vcpu_stats(VcpuId(vcpu));
            counts::vcpu_run_counts(vcpu, slot.stats(), context)
        });
        counts.collect()
    }

    /// Returns the hot-plug state of the vCPUs.
    fn vcpu_plug(&self) -> VcpuPlugStatus {
        let list = |vcpus: VcpuSet| vcpus.numbers().map(u32::from).collect();
        let present = self.registry.present();
        let state = self.registry.plug_state().unwrap_or_default();
        VcpuPlugStatus {
            present: list(present),
            max: self.registry.max().into(),
            unnoticed: list(state.unnoticed),
            asked_for: list(state.ejecting),
            leaving: self
                .registry
                .plug()
                .map_or_else(Vec::new, |_| list(present.difference(state.present))),
            refused: state
                .rejected
                .iter()
                .map(|&(vcpu, status)| VcpuRefusal {
                    vcpu: vcpu.into(),
                    status,
                })
                .collect(),
        }
    }

    fn symbol_text(&self) -> Vec<u8> {
        let mut text = Vec::new();
        // Writing to a Vec cannot fail.
        let _ = self.symbols.load().unpack().write_text(&mut text);
        text
    }
}

/// Permissions of clients of a control socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlSocketAccess {
    /// Access for root and the VM's user, to all requests.
    Operators,
    /// Read-only access, for every user who has write permission for the socket file.
    Observers,
}

struct Connection {
    stream: UnixStream,
    uid: u32,
    access: ControlSocketAccess,
    greeted: bool,
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
    waits_for_room: bool,
    /// `true` if the connection is closing. The server reads no more requests and closes the
    /// connection when all replies are sent.
    ending: bool,
    tokens: f64,
    refilled: Instant,
    events: Option<ControlClientEvents>,
    /// Watch that the client's first request for exits has started; `None` before that request.
    exits: Option<ExitWatch>,
    /// Snapshot that this client is taking, if any.
    snapshot: Option<VmSnapshot>,
    /// Tracking of written memory, while this client moves the VM to another process.
    migration: Option<OutgoingMigration>,
}

/// Decision about a connection after it was served.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ConnectionFate {
    Stays,
    Ends,
}

/// Result of a request: the value for the reply and, for some requests, a file descriptor.
enum RequestOutcome {
    Value(Value),
    WithFd(Value, FdSource),
}

enum FdSource {
    Ring(Arc<perf_core::ring::Ring>),
    File(File),
    Event(std::os::fd::OwnedFd),
}

impl FdSource {
    fn fd(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        match self {
            FdSource::Ring(ring) => ring.memfd(),
            FdSource::File(file) => file.as_fd(),
            FdSource::Event(event) => event.as_fd(),
        }
    }
}

/// Server of a VM's control sockets.
pub struct ControlServer {
    vm: Arc<VmControlInterface>,
    sockets: Vec<(ControlSocketAccess, ControlSocket)>,
    connections: HashMap<u32, Connection>,
    next: u32,
    /// `true` while no connections are accepted and the listeners are not in the epoll set, because
    /// the process has no free descriptors.
    listeners_removed: bool,
    /// Reserve descriptor. When the process has no free descriptor, the server closes this one to
    /// accept and refuse a waiting connection.
    spare: Option<EventFd>,
    /// Symbol text of the guest kernel, cached after the first request because it is long. Contains
    /// whether the symbols are those of the running kernel, the symbols, their description, and the
    /// file with the text.
    symbols: Option<(bool, Arc<CompressedKernelSymbols>, KernelSymbolsReply, File)>,
    processes: GuestProcesses,
    /// Snapshot of a VM that a client was moving when it disconnected. Keeps the VM paused, because
    /// the VM may already run at the destination.
    undecided: Option<VmSnapshot>,
}

impl ControlServer {
    /// Creates a server for `vm` that listens on at most one socket per access class.
    pub fn new(vm: Arc<VmControlInterface>, sockets: Vec<(ControlSocketAccess, ControlSocket)>) -> Self {
        Self {
            vm,
            sockets,
            connections: HashMap::new(),
            next: 0,
            listeners_removed: false,
            spare: spare(),
            symbols: None,
            processes: GuestProcesses::default(),
            undecided: None,
        }
    }

    /// Returns the listeners, each with the value that identifies it in epoll events.
    fn listeners(&self) -> impl Iterator<Item = (u32, &UnixListener)> {
        let numbers = (0..LISTENERS).map(|n| LISTENER - n);
        numbers.zip(self.sockets.iter().map(|(_, socket)| &socket.listener))
    }

    fn accept(&mut self, door: u32, ops: &mut EventOps) {
        // Bound the batch so that a flood of connections does not starve other subscribers.
        for _ in 0..MAX_CONNECTIONS {
            let index = usize::try_from(LISTENER - door).unwrap_or(usize::MAX);
            let Some((access, socket)) = self.sockets.get(index) else {
                return;
            };
            let access = *access;
            match socket.listener.accept() {
                Ok((stream, _)) => {
                    if let Err((stream, refused)) = self.admit(stream, access, ops) {
                        refused.send_to(&stream);
                        // Log refused observers at a lower level, so that observers cannot flood
                        // the log.
                        let level = match access {
                            ControlSocketAccess::Operators => log::Level::Warn,
                            ControlSocketAccess::Observers => log::Level::Debug,
                        };
                        log::log!(level, "control socket: {}", error_line(&refused));
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if is_out_of_descriptors(&e) && self.spare.take().is_some() => {
                    // Closing the reserve descriptor frees one for the connection, which is
                    // accepted and then closed immediately.
                    let came = socket.listener.accept();
                    let why = ConnectionRefusal::NoDescriptor(e);
                    if let Ok((stream, _)) = &came {
                        why.send_to(stream);
                        log::warn!("control socket: {}", error_line(&why));
                    }
                    let came = came.map(drop);
                    self.spare = spare();
                    // accept(2) needs a free descriptor even if no connection is pending, which was
                    // the case here.
                    if came.is_err() {
                        return;
                    }
                }
                Err(e) => {
                    // Stop watching the listeners, which would otherwise remain readable and keep
                    // the loop busy.
                    log::warn!("control socket: accept: {e}; no new connections until one ends");
                    self.listeners_removed = true;
                    for (_, listener) in self.listeners() {
                        let _ = ops.remove(Events::empty(listener));
                    }
                    return;
                }
            }
        }
    }

    /// Accepts `stream` as a connection. If the connection is refused, returns the stream and the
    /// reason.
    fn admit(
        &mut self,
        stream: UnixStream,
        access: ControlSocketAccess,
        ops: &mut EventOps,
    ) -> Result<(), (UnixStream, ConnectionRefusal)> {
        match self.add_connection(&stream, access, ops) {
            Ok((uid, id)) => {
                self.connections.insert(id, Connection::new(stream, uid, access));
                Ok(())
            }
            Err(why) => Err((stream, why)),
        }
    }

    /// Assigns a slot to a new connection and adds it to the epoll set.
    fn add_connection(
        &mut self,
        stream: &UnixStream,
        access: ControlSocketAccess,
        ops: &mut EventOps,
    ) -> Result<(u32, u32), ConnectionRefusal> {
        let uid = peer::peer_uid(stream)?;
        if access == ControlSocketAccess::Operators && uid != 0 && uid != peer::own_uid() {
            return Err(ConnectionRefusal::NotOwner(uid));
        }
        let most = match access {
            ControlSocketAccess::Operators => MAX_CONNECTIONS,
            ControlSocketAccess::Observers => MAX_OBSERVERS,
        };
        if self.of_access(access).count() >= most {
            // A connection without a hello is closed to make room.
            let silent = self.of_access(access).filter(|(_, c)| !c.greeted);
            if let Some(id) = silent.min_by_key(|(_, c)| c.refilled).map(|(id, _)| *id)
                && let Some(connection) = self.connections.remove(&id)
            {
                if !connection.ending {
                    ConnectionRefusal::MadeRoom(most).send_to(&connection.stream);
                }
                let _ = ops.remove(Events::empty(&connection.stream));
            }
        }
        if self.of_access(access).count() >= most {
            return Err(ConnectionRefusal::Full(most));
        }
        stream.set_nonblocking(true)?;
        while self.next > LISTENER - LISTENERS || self.connections.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let id = self.next;
        self.next = self.next.wrapping_add(1);
        ops.add(Events::with_data(stream, id, EventSet::IN))
            .map_err(|e| io::Error::other(e.to_string()))?;
        Ok((uid, id))
    }

    fn of_access(&self, access: ControlSocketAccess) -> impl Iterator<Item = (&u32, &Connection)> {
        self.connections.iter().filter(move |(_, c)| c.access == access)
    }

    fn serve(&mut self, id: u32, set: EventSet, ops: &mut EventOps) {
        let Some(mut connection) = self.connections.remove(&id) else {
            return;
        };
        if connection.ending {
            let gone = set.intersects(EventSet::HANG_UP | EventSet::ERROR);
            if connection.flush() == ConnectionFate::Stays && !connection.outgoing.is_empty() && !gone {
                self.connections.insert(id, connection);
            } else {
                self.end(connection, ops);
            }
            return;
        }
        let mut fate = ConnectionFate::Stays;
        if set.contains(EventSet::OUT) {
            fate = connection.flush();
        }
        if fate == ConnectionFate::Stays && set.intersects(EventSet::IN | EventSet::HANG_UP | EventSet::ERROR)
        {
            fate = self.receive(&mut connection);
        }
        if fate == ConnectionFate::Stays {
            let waits = !connection.outgoing.is_empty();
            if waits != connection.waits_for_room {
                connection.waits_for_room = waits;
                // Requests are not read while replies of this connection are unsent.
                let wanted = if waits { EventSet::OUT } else { EventSet::IN };
                if let Err(e) = ops.modify(Events::with_data(&connection.stream, id, wanted)) {
                    log::warn!("control socket: {e}");
                    fate = ConnectionFate::Ends;
                }
            }
        }
        match fate {
            ConnectionFate::Stays => {
                self.connections.insert(id, connection);
            }
            ConnectionFate::Ends => {
                self.keep_undecided(&mut connection);
                if connection.start_closing()
                    && ops
                        .modify(Events::with_data(&connection.stream, id, EventSet::OUT))
                        .is_ok()
                {
                    self.connections.insert(id, connection);
                } else {
                    self.end(connection, ops);
                }
            }
        }
    }

    fn end(&mut self, mut connection: Connection, ops: &mut EventOps) {
        self.keep_undecided(&mut connection);
        let _ = ops.remove(Events::empty(&connection.stream));
        drop(connection);
        if std::mem::take(&mut self.listeners_removed) {
            self.listen(ops);
        }
    }

    /// Adds the listeners to the epoll set.
    fn listen(&self, ops: &mut EventOps) {
        for (number, listener) in self.listeners() {
            if let Err(e) = ops.add(Events::with_data(listener, number, EventSet::IN)) {
                log::error!("control socket: {e}; clients can no longer connect");
            }
        }
    }

    fn receive(&mut self, connection: &mut Connection) -> ConnectionFate {
        let mut chunk = [0; READ_CHUNK];
        match connection.stream.read(&mut chunk) {
            Ok(0) => return ConnectionFate::Ends,
            Ok(n) => connection.incoming.extend_from_slice(&chunk[..n]),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => return ConnectionFate::Ends,
        }
        while let Some(end) = memchr::memchr(b'\n', &connection.incoming) {
            let rest = connection.incoming.split_off(end + 1);
            let line = std::mem::replace(&mut connection.incoming, rest);
            if self.request(connection, &line[..end]) == ConnectionFate::Ends {
                return ConnectionFate::Ends;
            }
        }
        if connection.incoming.len() >= MAX_REQUEST {
            let message = format!("a request is longer than {MAX_REQUEST} bytes");
            connection.refuse(0, RequestErrorKind::Protocol, message);
            return ConnectionFate::Ends;
        }
        ConnectionFate::Stays
    }

    fn request(&mut self, connection: &mut Connection, line: &[u8]) -> ConnectionFate {
        if !connection.take_request_token() {
            let message = format!("more than {} requests a second", connection.rate());
            connection.refuse(0, RequestErrorKind::Rate, message);
            return ConnectionFate::Ends;
        }
        let request: RequestLine = match serde_json::from_slice(line) {
            Ok(request) => request,
            Err(e) => {
                connection.refuse(0, RequestErrorKind::Protocol, format!("no request: {e}"));
                return ConnectionFate::Ends;
            }
        };
        let first = matches!(request.call, Call::Hello { .. });
        if !connection.greeted && !first {
            let message = "the first request must be hello";
            connection.refuse(request.id, RequestErrorKind::Protocol, message.into());
            return ConnectionFate::Ends;
        }
        match self.answer(connection, request.call) {
            Ok(RequestOutcome::Value(value)) => connection.reply(request.id, value),
            Ok(RequestOutcome::WithFd(value, fd)) => connection.reply_with(request.id, value, &fd),
            Err(failure) => {
                let fatal = failure.kind == RequestErrorKind::Protocol;
                let fate = connection.send(&ReplyLine {
                    id: request.id,
                    ok: None,
                    error: Some(failure),
                });
                if fatal { ConnectionFate::Ends } else { fate }
            }
        }
    }
}

/// Opens a descriptor to hold in reserve, or returns `None` if no descriptor is free.
fn spare() -> Option<EventFd> {
    EventFd::new(EFD_CLOEXEC).ok()
}

/// Returns whether a call failed because the process or the host has no free file descriptors.
fn is_out_of_descriptors(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

impl Connection {
    fn new(stream: UnixStream, uid: u32, access: ControlSocketAccess) -> Self {
        Self {
            stream,
            uid,
            access,
            greeted: false,
            incoming: Vec::new(),
            outgoing: Vec::new(),
            waits_for_room: false,
            ending: false,
            tokens: REQUEST_BURST,
            refilled: Instant::now(),
            events: None,
            exits: None,
            snapshot: None,
            migration: None,
        }
    }

    /// Stops serving the connection and closes its events. Returns `true` if at most [`MAX_UNSENT`]
    /// bytes of replies are still unsent. The connection then stays open until the client has read
    /// them, but a new client may take its slot.
    fn start_closing(&mut self) -> bool {
        self.ending = true;
        self.events = None;
        self.exits = None;
        self.snapshot = None;
        self.migration = None;
        self.greeted = false;
        (1..=MAX_UNSENT).contains(&self.outgoing.len())
    }

    /// Returns the sustained request rate limit of the connection, in requests per second.
    fn rate(&self) -> f64 {
        match self.access {
            ControlSocketAccess::Operators => REQUESTS_PER_SECOND,
            ControlSocketAccess::Observers => REQUESTS_OF_OBSERVERS,
        }
    }

    /// Returns the role of the client, which determines its permissions.
    fn role(&self) -> ClientRole {
        match (self.access, role(self.uid)) {
            (ControlSocketAccess::Observers, _) => ClientRole::Observer,
            (ControlSocketAccess::Operators, SessionRole::Operator) => ClientRole::Operator,
            (ControlSocketAccess::Operators, SessionRole::Admin | SessionRole::Guest) => ClientRole::Admin,
        }
    }

    /// Uses one request of the connection's rate limit. Returns `false` if the limit is exceeded.
    fn take_request_token(&mut self) -> bool {
        let now = Instant::now();
        let passed = now.duration_since(self.refilled).as_secs_f64();
        self.refilled = now;
        self.tokens = (self.tokens + passed * self.rate()).min(REQUEST_BURST);
        if self.tokens < 1.0 {
            return false;
        }
        self.tokens -= 1.0;
        true
    }

    fn opened(&self) -> Result<&ControlClientEvents, RequestError> {
        match &self.events {
            Some(events) => Ok(events),
            None => fail(RequestErrorKind::Invalid, "no event is open"),
        }
    }

    fn refuse(&mut self, id: u64, kind: RequestErrorKind, message: String) {
        let error = Some(RequestError { kind, message });
        // A failed send is ignored, because the connection is closed in any case.
        let _ = self.send(&ReplyLine { id, ok: None, error });
    }

    fn reply(&mut self, id: u64, ok: Value) -> ConnectionFate {
        self.send(&ReplyLine {
            id,
            ok: Some(ok),
            error: None,
        })
    }

    fn send(&mut self, reply: &ReplyLine) -> ConnectionFate {
        if serde_json::to_writer(&mut self.outgoing, reply).is_err() {
            return ConnectionFate::Ends;
        }
        self.outgoing.push(b'\n');
        self.flush()
    }

    fn flush(&mut self) -> ConnectionFate {
        while !self.outgoing.is_empty() {
            match self.stream.write(&self.outgoing) {
                Ok(0) => return ConnectionFate::Ends,
                Ok(n) => {
                    self.outgoing.drain(..n);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return ConnectionFate::Ends,
            }
        }
        if self.outgoing.len() > MAX_UNSENT {
            ConnectionFate::Ends
        } else {
            ConnectionFate::Stays
        }
    }

    /// Sends a reply with the file descriptor of `source`, which is attached to the first byte of
    /// the reply.
    fn reply_with(&mut self, id: u64, ok: Value, source: &FdSource) -> ConnectionFate {
        if !self.outgoing.is_empty() {
            // A client must have read all previous replies before it waits for a descriptor.
            return ConnectionFate::Ends;
        }
        let reply = ReplyLine {
            id,
            ok: Some(ok),
            error: None,
        };
        let Ok(mut line) = serde_json::to_vec(&reply) else {
            return ConnectionFate::Ends;
        };
        line.push(b'\n');
        match self.stream.send_with_fd(line.as_slice(), source.fd().as_raw_fd()) {
            Ok(sent) => {
                self.outgoing.extend_from_slice(&line[sent.min(line.len())..]);
                self.flush()
            }
            Err(_) => ConnectionFate::Ends,
        }
    }
}

impl MutEventSubscriber for ControlServer {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        // Attach events before any client reads their counts.
        for vcpu in self.vm.registry.take_restarted().numbers() {
            for events in self.connections.values_mut().filter_map(|c| c.events.as_mut()) {
                events.open_on_new_vcpu(vcpu.into());
            }
        }
        match events.data() {
            door if door > LISTENER - LISTENERS => self.accept(door, ops),
            id => self.serve(id, events.event_set(), ops),
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        self.listen(ops);
    }
}

#[cfg(test)]
mod tests;
