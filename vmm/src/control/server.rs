//! The VM's side of its control socket, a subscriber of the main loop.
//!
//! Nothing here waits for a client: sockets are nonblocking, a request is at most [`MAX_REQUEST`] bytes, a
//! connection makes at most `REQUESTS_PER_SECOND` of them, and replies a client does not fetch are kept up to
//! `MAX_UNSENT` bytes. Who goes beyond a bound loses the connection, and with it its events.

mod answer;
mod refused;

use std::collections::HashMap;
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
use perf_core::{Role, error_line};
use serde_json::Value;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::counts;
use super::exits::ExitWatch;
use super::processes::Processes;
use super::session::{EventSession, fail, role};
use crate::devices::Bus;
use crate::devices::cpu_plug::VcpuSet;
use crate::pmu::VmPmu;
use crate::vcpu::control::{RunControl, RunState};
use crate::vcpu::roster::Roster;
use crate::vcpu::seat::Seat;
use control_api::counts::VcpuCounts;
use control_api::peer;
use control_api::place::Socket;
use control_api::protocol::{
    Call, ClientRole, Failure, FailureKind, GuestViews, MAX_REQUEST, PROTOCOL, ReplyLine, RequestLine,
    SymbolsInfo, VcpuPlug, VcpuRefusal, VmInfo, VmState,
};
use kernel_images::packed::PackedSymbols;
use refused::Refused;

/// Most connections at a time.
const MAX_CONNECTIONS: usize = 32;
/// Most connections of observers, who are not to keep operators out.
const MAX_OBSERVERS: usize = 8;
/// Requests a connection may make in the long run.
const REQUESTS_PER_SECOND: f64 = 1000.0;
/// Those of an observer: each may make vCPUs leave the guest.
const REQUESTS_OF_OBSERVERS: f64 = 200.0;
/// And at once.
const REQUEST_BURST: f64 = 200.0;
/// Most bytes of replies that wait for a client.
const MAX_UNSENT: usize = 1 << 20;
/// Bytes taken from a connection before others get their turn.
const READ_CHUNK: usize = 16 << 10;
/// Epoll data of the first listener, others have those before; connections have smaller numbers.
const LISTENER: u32 = u32::MAX;
/// Most listeners.
const LISTENERS: u32 = 2;

/// What a client may learn of and do to the VM.
pub struct Controlled {
    /// Its name.
    pub name: String,
    /// Its PMU model.
    pub pmu_name: String,
    /// What runs in it.
    pub guest: String,
    /// Where its first serial port is.
    pub console: String,
    /// Where its virtio console is; empty without one.
    pub virtio_console: String,
    /// When it was started.
    pub started: Instant,
    /// Run state and end.
    pub control: Arc<RunControl>,
    /// What counts it.
    pub pmu: Arc<VmPmu>,
    /// Which vCPUs there are.
    pub roster: Arc<Roster>,
    /// Its devices.
    pub bus: Arc<Bus>,
    /// The guest kernel's text symbols, of what was loaded last.
    pub symbols: Arc<ArcSwap<PackedSymbols>>,
    /// The guest has one address space and no user programs of its own.
    pub flat: bool,
    /// Looks at the guest's counters asked for so far.
    pub looks: AtomicU64,
}

impl Controlled {
    /// What a client with that role gets to know of it.
    pub fn info(&self, role: ClientRole) -> VmInfo {
        VmInfo {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").into(),
            name: self.name.clone(),
            pid: std::process::id(),
            vcpus: self.roster.present().len(),
            max_vcpus: self.roster.max().into(),
            pmu: self.pmu_name.clone(),
            guest: self.guest.clone(),
            console: self.console.clone(),
            virtio_console: self.virtio_console.clone(),
            state: match self.control.state() {
                RunState::Resetting if self.control.is_to_pause() => VmState::Paused,
                RunState::Running | RunState::Resetting => VmState::Running,
                RunState::Paused | RunState::Held => VmState::Paused,
                RunState::Stopped => VmState::Stopped,
            },
            threads: self.roster.taken().map(|seat| seat.thread()).collect(),
            parked: u32::try_from(self.control.parked()).unwrap_or(u32::MAX),
            uptime_ms: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            role,
        }
    }

    /// Makes the vCPUs look into their mailboxes.
    fn deliver(&self) {
        self.control.wake_parked();
        self.roster.kicker().kick();
    }

    /// Asks every vCPU what its guest has programmed. The mailboxes get the answers, under the number
    /// returned.
    pub fn ask_views(&self) -> u64 {
        let generation = self.looks.fetch_add(1, Ordering::Relaxed) + 1;
        for seat in self.roster.taken() {
            seat.mailbox().ask_view(generation);
        }
        self.deliver();
        generation
    }

    /// What the vCPUs have seen under this number, and whether all have that were asked and are still there.
    pub fn views(&self, generation: u64) -> GuestViews {
        let asked = || {
            self.roster
                .taken()
                .filter(|seat| seat.mailbox().was_asked(generation))
        };
        let vcpus: Vec<_> = asked()
            .filter_map(|seat| seat.mailbox().view(generation))
            .collect();
        GuestViews {
            complete: vcpus.len() == asked().count(),
            vcpus,
        }
    }

    /// What the loops of the vCPUs counted. What that of one that has left counted stays.
    pub fn vcpu_counts(&self) -> Vec<VcpuCounts> {
        let present = self.roster.present();
        let known = |seat: &&Arc<Seat>| present.has(seat.id()) || seat.stats().exits.get() > 0;
        let seats = self.roster.seats().iter().filter(known);
        let counts = seats.map(|seat| {
            let vcpu = u32::from(seat.id());
            let context = self.pmu.core().vcpu_stats(VcpuId(vcpu));
            counts::told(vcpu, seat.stats(), context)
        });
        counts.collect()
    }

    /// Which vCPUs come and go.
    fn vcpu_plug(&self) -> VcpuPlug {
        let list = |vcpus: VcpuSet| vcpus.numbers().map(u32::from).collect();
        let present = self.roster.present();
        let state = self.roster.plug_state().unwrap_or_default();
        VcpuPlug {
            present: list(present),
            max: self.roster.max().into(),
            unnoticed: list(state.unnoticed),
            asked_for: list(state.asked_for),
            leaving: self
                .roster
                .plug()
                .map_or_else(Vec::new, |_| list(present.without(state.shown))),
            refused: state
                .refused
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
        // Writing to a Vec does not fail.
        let _ = self.symbols.load().unpack().write_text(&mut text);
        text
    }
}

/// Who may come in at a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The VM's user and root, to do everything.
    Operators,
    /// Who may write the socket's file, to look on.
    Observers,
}

struct Connection {
    stream: UnixStream,
    uid: u32,
    access: Access,
    greeted: bool,
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
    waits_for_room: bool,
    /// Nothing more is read: what waits is sent, and then the connection ends.
    ending: bool,
    tokens: f64,
    refilled: Instant,
    events: Option<EventSession>,
    /// Once it has asked for exits.
    exits: Option<ExitWatch>,
}

/// Whether a connection stays.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Stays,
    Ends,
}

/// What a request came to, with a descriptor to go with the reply.
enum Done {
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

/// The control socket of a VM.
pub struct ControlServer {
    vm: Arc<Controlled>,
    sockets: Vec<(Access, Socket)>,
    connections: HashMap<u32, Connection>,
    next: u32,
    /// The listeners are out of the loop for want of descriptors.
    deaf: bool,
    /// A descriptor to give up when there is none left for a connection that is to be refused.
    spare: Option<EventFd>,
    /// The symbols' text and what is said of it, once somebody asked: it is long. With whether it is the
    /// running kernel's.
    symbols: Option<(bool, Arc<PackedSymbols>, SymbolsInfo, File)>,
    processes: Processes,
}

impl ControlServer {
    /// Serves `vm` at these sockets, one for each access at most.
    pub fn new(vm: Arc<Controlled>, sockets: Vec<(Access, Socket)>) -> Self {
        Self {
            vm,
            sockets,
            connections: HashMap::new(),
            next: 0,
            deaf: false,
            spare: spare(),
            symbols: None,
            processes: Processes::default(),
        }
    }

    /// The listeners, by the numbers that they have in the loop.
    fn listeners(&self) -> impl Iterator<Item = (u32, &UnixListener)> {
        let numbers = (0..LISTENERS).map(|n| LISTENER - n);
        numbers.zip(self.sockets.iter().map(|(_, socket)| &socket.listener))
    }

    fn accept(&mut self, door: u32, ops: &mut EventOps) {
        // Some at a time: the loop has others to serve, and those who come may be many.
        for _ in 0..MAX_CONNECTIONS {
            let index = usize::try_from(LISTENER - door).unwrap_or(usize::MAX);
            let Some((access, socket)) = self.sockets.get(index) else {
                return;
            };
            let access = *access;
            match socket.listener.accept() {
                Ok((stream, _)) => {
                    if let Err((stream, refused)) = self.admit(stream, access, ops) {
                        refused.tell(&stream);
                        // Observers must not fill the log.
                        let level = match access {
                            Access::Operators => log::Level::Warn,
                            Access::Observers => log::Level::Debug,
                        };
                        log::log!(level, "control socket: {}", error_line(&refused));
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if no_descriptors(&e) && self.spare.take().is_some() => {
                    // The place of the spare one takes the connection, which is closed at once.
                    let came = socket.listener.accept();
                    let why = Refused::NoDescriptor(e);
                    if let Ok((stream, _)) = &came {
                        why.tell(stream);
                        log::warn!("control socket: {}", error_line(&why));
                    }
                    let came = came.map(drop);
                    self.spare = spare();
                    // The kernel looks for a descriptor before it looks for a connection: there was none.
                    if came.is_err() {
                        return;
                    }
                }
                Err(e) => {
                    // The listener would stay ready, and the loop busy.
                    log::warn!("control socket: accept: {e}; no new connections until one ends");
                    self.deaf = true;
                    for (_, listener) in self.listeners() {
                        let _ = ops.remove(Events::empty(listener));
                    }
                    return;
                }
            }
        }
    }

    /// Takes a connection in. One that is turned away comes back with the reason.
    fn admit(
        &mut self,
        stream: UnixStream,
        access: Access,
        ops: &mut EventOps,
    ) -> Result<(), (UnixStream, Refused)> {
        match self.place(&stream, access, ops) {
            Ok((uid, id)) => {
                self.connections.insert(id, Connection::new(stream, uid, access));
                Ok(())
            }
            Err(why) => Err((stream, why)),
        }
    }

    /// A place among the connections and in the loop, with its client's user.
    fn place(
        &mut self,
        stream: &UnixStream,
        access: Access,
        ops: &mut EventOps,
    ) -> Result<(u32, u32), Refused> {
        let uid = peer::peer_uid(stream)?;
        if access == Access::Operators && uid != 0 && uid != peer::own_uid() {
            return Err(Refused::NotOwner(uid));
        }
        let most = match access {
            Access::Operators => MAX_CONNECTIONS,
            Access::Observers => MAX_OBSERVERS,
        };
        if self.of_access(access).count() >= most {
            // Who has not even said hello makes room.
            let silent = self.of_access(access).filter(|(_, c)| !c.greeted);
            if let Some(id) = silent.min_by_key(|(_, c)| c.refilled).map(|(id, _)| *id)
                && let Some(connection) = self.connections.remove(&id)
            {
                if !connection.ending {
                    Refused::MadeRoom(most).tell(&connection.stream);
                }
                let _ = ops.remove(Events::empty(&connection.stream));
            }
        }
        if self.of_access(access).count() >= most {
            return Err(Refused::Full(most));
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

    fn of_access(&self, access: Access) -> impl Iterator<Item = (&u32, &Connection)> {
        self.connections.iter().filter(move |(_, c)| c.access == access)
    }

    fn serve(&mut self, id: u32, set: EventSet, ops: &mut EventOps) {
        let Some(mut connection) = self.connections.remove(&id) else {
            return;
        };
        if connection.ending {
            let gone = set.intersects(EventSet::HANG_UP | EventSet::ERROR);
            if connection.flush() == Fate::Stays && !connection.outgoing.is_empty() && !gone {
                self.connections.insert(id, connection);
            } else {
                self.end(connection, ops);
            }
            return;
        }
        let mut fate = Fate::Stays;
        if set.contains(EventSet::OUT) {
            fate = connection.flush();
        }
        if fate == Fate::Stays && set.intersects(EventSet::IN | EventSet::HANG_UP | EventSet::ERROR) {
            fate = self.receive(&mut connection);
        }
        if fate == Fate::Stays {
            let waits = !connection.outgoing.is_empty();
            if waits != connection.waits_for_room {
                connection.waits_for_room = waits;
                // Requests wait while replies do.
                let wanted = if waits { EventSet::OUT } else { EventSet::IN };
                if let Err(e) = ops.modify(Events::with_data(&connection.stream, id, wanted)) {
                    log::warn!("control socket: {e}");
                    fate = Fate::Ends;
                }
            }
        }
        match fate {
            Fate::Stays => {
                self.connections.insert(id, connection);
            }
            Fate::Ends => {
                if connection.begin_to_end()
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

    fn end(&mut self, connection: Connection, ops: &mut EventOps) {
        let _ = ops.remove(Events::empty(&connection.stream));
        drop(connection);
        if std::mem::take(&mut self.deaf) {
            self.listen(ops);
        }
    }

    /// Takes new connections from now on.
    fn listen(&self, ops: &mut EventOps) {
        for (number, listener) in self.listeners() {
            if let Err(e) = ops.add(Events::with_data(listener, number, EventSet::IN)) {
                log::error!("control socket: {e}; nobody can connect there");
            }
        }
    }

    fn receive(&mut self, connection: &mut Connection) -> Fate {
        let mut chunk = [0; READ_CHUNK];
        match connection.stream.read(&mut chunk) {
            Ok(0) => return Fate::Ends,
            Ok(n) => connection.incoming.extend_from_slice(&chunk[..n]),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => return Fate::Ends,
        }
        while let Some(end) = memchr::memchr(b'\n', &connection.incoming) {
            let rest = connection.incoming.split_off(end + 1);
            let line = std::mem::replace(&mut connection.incoming, rest);
            if self.request(connection, &line[..end]) == Fate::Ends {
                return Fate::Ends;
            }
        }
        if connection.incoming.len() >= MAX_REQUEST {
            let message = format!("a request is longer than {MAX_REQUEST} bytes");
            connection.refuse(0, FailureKind::Protocol, message);
            return Fate::Ends;
        }
        Fate::Stays
    }

    fn request(&mut self, connection: &mut Connection, line: &[u8]) -> Fate {
        if !connection.may_ask() {
            let message = format!("more than {} requests a second", connection.rate());
            connection.refuse(0, FailureKind::Rate, message);
            return Fate::Ends;
        }
        let request: RequestLine = match serde_json::from_slice(line) {
            Ok(request) => request,
            Err(e) => {
                connection.refuse(0, FailureKind::Protocol, format!("no request: {e}"));
                return Fate::Ends;
            }
        };
        let first = matches!(request.call, Call::Hello { .. });
        if !connection.greeted && !first {
            let message = "the first request must be hello";
            connection.refuse(request.id, FailureKind::Protocol, message.into());
            return Fate::Ends;
        }
        match self.answer(connection, request.call) {
            Ok(Done::Value(value)) => connection.reply(request.id, value),
            Ok(Done::WithFd(value, fd)) => connection.reply_with(request.id, value, &fd),
            Err(failure) => {
                let fatal = failure.kind == FailureKind::Protocol;
                let fate = connection.send(&ReplyLine {
                    id: request.id,
                    ok: None,
                    error: Some(failure),
                });
                if fatal { Fate::Ends } else { fate }
            }
        }
    }
}

/// A descriptor that is good for nothing but to be given up.
fn spare() -> Option<EventFd> {
    EventFd::new(EFD_CLOEXEC).ok()
}

/// Whether a call failed because this process, or the host, has no more descriptors.
fn no_descriptors(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

impl Connection {
    fn new(stream: UnixStream, uid: u32, access: Access) -> Self {
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
        }
    }

    /// Whether the connection stays until its client has read why it ends. Its events end now, and it makes
    /// room for others like one that has not said hello.
    fn begin_to_end(&mut self) -> bool {
        self.ending = true;
        self.events = None;
        self.exits = None;
        self.greeted = false;
        (1..=MAX_UNSENT).contains(&self.outgoing.len())
    }

    /// Requests a second.
    fn rate(&self) -> f64 {
        match self.access {
            Access::Operators => REQUESTS_PER_SECOND,
            Access::Observers => REQUESTS_OF_OBSERVERS,
        }
    }

    /// What its client may do.
    fn role(&self) -> ClientRole {
        match (self.access, role(self.uid)) {
            (Access::Observers, _) => ClientRole::Observer,
            (Access::Operators, Role::Operator) => ClientRole::Operator,
            (Access::Operators, Role::Admin | Role::Guest) => ClientRole::Admin,
        }
    }

    /// Takes one request out of the rate.
    fn may_ask(&mut self) -> bool {
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

    fn opened(&self) -> Result<&EventSession, Failure> {
        match &self.events {
            Some(events) => Ok(events),
            None => fail(FailureKind::Invalid, "no event is open"),
        }
    }

    fn refuse(&mut self, id: u64, kind: FailureKind, message: String) {
        let error = Some(Failure { kind, message });
        // The connection ends anyway.
        let _ = self.send(&ReplyLine { id, ok: None, error });
    }

    fn reply(&mut self, id: u64, ok: Value) -> Fate {
        self.send(&ReplyLine {
            id,
            ok: Some(ok),
            error: None,
        })
    }

    fn send(&mut self, reply: &ReplyLine) -> Fate {
        if serde_json::to_writer(&mut self.outgoing, reply).is_err() {
            return Fate::Ends;
        }
        self.outgoing.push(b'\n');
        self.flush()
    }

    fn flush(&mut self) -> Fate {
        while !self.outgoing.is_empty() {
            match self.stream.write(&self.outgoing) {
                Ok(0) => return Fate::Ends,
                Ok(n) => {
                    self.outgoing.drain(..n);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Fate::Ends,
            }
        }
        if self.outgoing.len() > MAX_UNSENT {
            Fate::Ends
        } else {
            Fate::Stays
        }
    }

    /// A reply with a descriptor, which comes with its first byte.
    fn reply_with(&mut self, id: u64, ok: Value, source: &FdSource) -> Fate {
        if !self.outgoing.is_empty() {
            // A client that waits for a descriptor has read what came before.
            return Fate::Ends;
        }
        let reply = ReplyLine {
            id,
            ok: Some(ok),
            error: None,
        };
        let Ok(mut line) = serde_json::to_vec(&reply) else {
            return Fate::Ends;
        };
        line.push(b'\n');
        match self.stream.send_with_fd(line.as_slice(), source.fd().as_raw_fd()) {
            Ok(sent) => {
                self.outgoing.extend_from_slice(&line[sent.min(line.len())..]);
                self.flush()
            }
            Err(_) => Fate::Ends,
        }
    }
}

impl MutEventSubscriber for ControlServer {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        // Before anybody reads what is counted there.
        for vcpu in self.vm.roster.take_came_back().numbers() {
            for events in self.connections.values_mut().filter_map(|c| c.events.as_mut()) {
                events.vcpu_came(vcpu.into());
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
