//! Connections to the metrics, and their bounds.
//!
//! Nothing here waits for a client, and a client gets nothing done but a reply: a request's head is at most
//! [`MAX_HEAD`] bytes and must be there in `HEAD_TIME`, a reply must be fetched in `REPLY_TIME`, there are at
//! most `MAX_CONNECTIONS`, and the oldest unfinished one makes room for a new one. vCPUs are asked what their
//! guests count at most ten times a second; scrapes in between get what was found last.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use perf_core::pmu::VcpuId;
use vmm_sys_util::timerfd::TimerFd;

use super::address::{Listener, MetricsAddress, Stream};
use super::http::{self, MAX_HEAD, Refusal, Request};
use super::snapshot::{self, Served, Snapshot};
use crate::control::server::Controlled;
use crate::control::session::{self, EventSession, On};
use control_api::peer;
use control_api::protocol::{ClientRole, Opened};

/// Most connections at a time.
const MAX_CONNECTIONS: usize = 32;
/// How long a request's head may take to come.
const HEAD_TIME: Duration = Duration::from_secs(5);
/// How long a client may take to fetch its reply.
const REPLY_TIME: Duration = Duration::from_secs(10);
/// How long what a client still sends is read after the reply, so that the reply is not lost to a reset.
const LINGER_TIME: Duration = Duration::from_secs(1);
/// How much of it.
const LINGER_BYTES: usize = 256 << 10;
/// How long vCPUs may take to say what their guests count.
const VIEW_TIME: Duration = Duration::from_millis(500);
/// Between two looks whether they have.
const VIEW_LOOK: Duration = Duration::from_millis(2);
/// How long a scrape's text serves others too.
const FRESH: Duration = Duration::from_millis(100);
/// Between two looks for connections that took too long, and after a failed accept.
const SWEEP: Duration = Duration::from_millis(250);
/// Between two attempts to open the events, while vCPUs are still starting.
const OPEN_AGAIN: Duration = Duration::from_millis(20);
/// Epoll data of the listener and the timer; connections have smaller numbers.
const LISTENER: u32 = u32::MAX;
const TIMER: u32 = u32::MAX - 1;

/// Where a connection is.
#[derive(Debug)]
enum State {
    /// Its request is coming.
    Head(Vec<u8>),
    /// It waits for the vCPUs.
    Waits { head_only: bool },
    /// Its reply is going.
    Reply { bytes: Vec<u8>, sent: usize },
    /// All is said.
    Lingers { read: usize },
}

#[derive(Debug)]
struct Connection {
    stream: Stream,
    state: State,
    until: Instant,
    /// What the loop watches for it.
    watched: EventSet,
}

/// What a step came to.
enum Step {
    /// Later.
    Blocked,
    /// At once again.
    Again,
    /// It is over.
    Over,
}

/// The operator events.
enum OwnEvents {
    /// Not all vCPUs are there yet.
    NotYet,
    Open {
        session: EventSession,
        opened: Vec<Opened>,
    },
    /// None: they were refused.
    None,
}

/// The metrics of a VM.
pub struct MetricsServer {
    vm: Arc<Controlled>,
    listener: Listener,
    timer: TimerFd,
    events: OwnEvents,
    event_list: String,
    /// What guests have programmed is served too.
    guest_counters: bool,
    connections: HashMap<u32, Connection>,
    next: u32,
    /// The listener is out of the loop for want of descriptors.
    deaf: bool,
    /// A look at the guests' counters that is under way, and when it is given up.
    look: Option<(u64, Instant)>,
    /// The last text and when it was made.
    text: Option<(Instant, String)>,
    scrapes: u64,
    refused: u64,
}

impl MetricsServer {
    /// Serves `vm` at `listener`; `event_list` is counted for it on every vCPU. `guest_counters`: what the
    /// guest has programmed is served too, under labels that it chooses.
    ///
    /// # Errors
    /// That of `timerfd_create(2)`.
    pub fn new(
        vm: Arc<Controlled>,
        listener: Listener,
        event_list: String,
        guest_counters: bool,
    ) -> io::Result<Self> {
        let guest_counters = guest_counters && vm.pmu.is_for_guest();
        Ok(Self {
            vm,
            listener,
            timer: TimerFd::new().map_err(|e| io::Error::from_raw_os_error(e.errno()))?,
            events: OwnEvents::NotYet,
            event_list,
            guest_counters,
            connections: HashMap::new(),
            next: 0,
            deaf: false,
            look: None,
            text: None,
            scrapes: 0,
            refused: 0,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> MetricsAddress {
        self.listener.address()
    }

    /// Opens the events once every vCPU is in the perf core.
    fn open_events(&mut self) {
        let pmu = &self.vm.pmu;
        let mut there = self.vm.roster.taken();
        if there.any(|seat| pmu.core().vcpu_stats(VcpuId(seat.id().into())).is_none()) {
            return;
        }
        let uid = peer::own_uid();
        let mut session = EventSession::new(pmu.clone(), uid, session::role(uid), self.vm.roster.clone());
        self.events = match session.open(&snapshot::with_steal(&self.event_list), On::Whole, None) {
            Ok(mut opened) => {
                for (name, why) in snapshot::each_once(&mut opened) {
                    log::warn!("metrics: '{name}' cannot be counted and is left out: {why}");
                }
                session.set_enabled(true);
                OwnEvents::Open { session, opened }
            }
            Err(refused) => {
                log::warn!("metrics: the events are not counted: {refused}");
                OwnEvents::None
            }
        };
    }

    fn accept(&mut self, ops: &mut EventOps) {
        // Some at a time: the loop has others to serve.
        for _ in 0..MAX_CONNECTIONS {
            match self.listener.accept() {
                Ok(stream) => self.admit(stream, ops),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e)
                    if matches!(
                        e.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(e) => {
                    // Most likely no descriptors are left. The listener would stay ready, and the loop busy.
                    log::warn!("metrics: accept: {e}; no new connections for a moment");
                    let _ = ops.remove(Events::empty(&self.listener));
                    self.deaf = true;
                    return;
                }
            }
        }
    }

    fn admit(&mut self, stream: Stream, ops: &mut EventOps) {
        if self.connections.len() >= MAX_CONNECTIONS {
            self.refused += 1;
            let unfinished = self
                .connections
                .iter()
                .filter(|(_, c)| !matches!(c.state, State::Waits { .. }));
            match unfinished.min_by_key(|(_, c)| c.until).map(|(id, _)| *id) {
                Some(oldest) => self.end(oldest, ops),
                None => return,
            }
        }
        while self.next >= TIMER || self.connections.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let id = self.next;
        self.next = self.next.wrapping_add(1);
        let watched = EventSet::IN;
        if let Err(e) = ops.add(Events::with_data(&stream, id, watched)) {
            log::warn!("metrics: {e}");
            return;
        }
        let connection = Connection {
            stream,
            state: State::Head(Vec::new()),
            until: Instant::now() + HEAD_TIME,
            watched,
        };
        self.connections.insert(id, connection);
    }

    fn end(&mut self, id: u32, ops: &mut EventOps) {
        if let Some(connection) = self.connections.remove(&id) {
            let _ = ops.remove(Events::empty(&connection.stream));
        }
    }

    /// Does what can be done for a connection without waiting.
    fn serve(&mut self, id: u32, ops: &mut EventOps) {
        let Some(mut connection) = self.connections.remove(&id) else {
            return;
        };
        loop {
            match self.step(&mut connection) {
                Step::Again => {}
                Step::Over => {
                    let _ = ops.remove(Events::empty(&connection.stream));
                    return;
                }
                Step::Blocked => break,
            }
        }
        let wanted = match connection.state {
            State::Head(_) | State::Lingers { .. } => EventSet::IN,
            State::Waits { .. } => EventSet::empty(),
            State::Reply { .. } => EventSet::OUT,
        };
        if wanted != connection.watched {
            connection.watched = wanted;
            if let Err(e) = ops.modify(Events::with_data(&connection.stream, id, wanted)) {
                log::warn!("metrics: {e}");
                return;
            }
        }
        self.connections.insert(id, connection);
    }

    fn step(&mut self, connection: &mut Connection) -> Step {
        match &mut connection.state {
            State::Head(head) => {
                let mut chunk = [0; 4096];
                let room = (MAX_HEAD - head.len()).min(chunk.len());
                match connection.stream.read(&mut chunk[..room]) {
                    Ok(0) => {
                        self.refused += 1;
                        return Step::Over;
                    }
                    Ok(n) => head.extend_from_slice(&chunk[..n]),
                    Err(e) => return blocked(&e),
                }
                match http::parse(head) {
                    None => {}
                    Some(Request::Metrics { head_only }) => {
                        connection.state = State::Waits { head_only };
                        connection.until = Instant::now() + REPLY_TIME;
                    }
                    Some(Request::Refused(why)) => self.refuse(connection, why),
                }
                Step::Again
            }
            State::Waits { head_only } => {
                let head_only = *head_only;
                match self.fresh_text() {
                    None => Step::Blocked,
                    Some(text) => {
                        let bytes = http::metrics(text, head_only);
                        connection.state = State::Reply { bytes, sent: 0 };
                        Step::Again
                    }
                }
            }
            State::Reply { bytes, sent } => match connection.stream.write(&bytes[*sent..]) {
                Ok(0) => Step::Over,
                Ok(n) => {
                    *sent += n;
                    if *sent < bytes.len() {
                        return Step::Again;
                    }
                    if connection.stream.end_writing().is_err() {
                        return Step::Over;
                    }
                    connection.state = State::Lingers { read: 0 };
                    connection.until = Instant::now() + LINGER_TIME;
                    Step::Again
                }
                Err(e) => blocked(&e),
            },
            State::Lingers { read } => {
                let mut chunk = [0; 4096];
                match connection.stream.read(&mut chunk) {
                    Ok(0) => Step::Over,
                    Ok(n) => {
                        *read += n;
                        if *read > LINGER_BYTES {
                            Step::Over
                        } else {
                            Step::Again
                        }
                    }
                    Err(e) => blocked(&e),
                }
            }
        }
    }

    fn refuse(&mut self, connection: &mut Connection, why: Refusal) {
        self.refused += 1;
        let bytes = http::refusal(why);
        connection.state = State::Reply { bytes, sent: 0 };
        connection.until = Instant::now() + REPLY_TIME;
    }

    /// A text that is new enough; without one the vCPUs are asked, and it is there when they have answered.
    fn fresh_text(&mut self) -> Option<&str> {
        let now = Instant::now();
        let is_fresh = self
            .text
            .as_ref()
            .is_some_and(|(made, _)| now.duration_since(*made) < FRESH);
        if is_fresh {
            self.scrapes += 1;
        } else {
            if self.guest_counters {
                let (generation, until) = *self
                    .look
                    .get_or_insert_with(|| (self.vm.ask_views(), now + VIEW_TIME));
                let answered = self.vm.views(generation).complete;
                if !answered && now < until {
                    return None;
                }
                self.look = None;
                let text = self.snapshot(Some(generation)).encode();
                self.text = Some((now, text));
            } else {
                let text = self.snapshot(None).encode();
                self.text = Some((now, text));
            }
        }
        self.text.as_ref().map(|(_, text)| text.as_str())
    }

    fn snapshot(&mut self, generation: Option<u64>) -> Snapshot {
        self.scrapes += 1;
        let vm = &self.vm;
        let (events, steal_ns) = match &self.events {
            OwnEvents::Open { session, opened } => snapshot::by_vcpu(opened, &session.read()),
            OwnEvents::NotYet | OwnEvents::None => Default::default(),
        };
        Snapshot {
            label: vm.name.clone(),
            vm: vm.info(ClientRole::Operator),
            vcpus: vm.vcpu_counts(),
            views: generation.map_or_else(Vec::new, |g| vm.views(g).vcpus),
            events,
            steal_ns,
            served: Some(Served {
                scrapes: self.scrapes,
                refused: self.refused,
            }),
        }
    }

    /// What the timer is for: vCPUs that answer, clients that took too long, a listener that was taken out.
    fn tick(&mut self, ops: &mut EventOps) {
        if matches!(self.events, OwnEvents::NotYet) {
            self.open_events();
        }
        let now = Instant::now();
        let ids = |which: fn(&Connection, Instant) -> bool| -> Vec<u32> {
            let found = self.connections.iter().filter(|(_, c)| which(c, now));
            found.map(|(id, _)| *id).collect()
        };
        let waiting = ids(|c, _| matches!(c.state, State::Waits { .. }));
        let late = ids(|c, now| now >= c.until);
        for id in waiting {
            self.serve(id, ops);
        }
        for id in late {
            let asks = match self.connections.get_mut(&id) {
                Some(c) if matches!(&c.state, State::Head(head) if !head.is_empty()) => true,
                Some(_) => false,
                None => continue,
            };
            if asks && let Some(mut connection) = self.connections.remove(&id) {
                self.refuse(&mut connection, Refusal::TooSlow);
                self.connections.insert(id, connection);
                self.serve(id, ops);
            } else {
                self.end(id, ops);
            }
        }
        if self.deaf {
            match ops.add(Events::with_data(&self.listener, LISTENER, EventSet::IN)) {
                Ok(()) => self.deaf = false,
                Err(e) => log::debug!("metrics: {e}"),
            }
        }
    }

    /// Sets the timer to when something has to be looked at.
    fn set_timer(&mut self) {
        let wanted = if self.look.is_some() {
            Some(VIEW_LOOK)
        } else if matches!(self.events, OwnEvents::NotYet) {
            Some(OPEN_AGAIN)
        } else if self.deaf || !self.connections.is_empty() {
            Some(SWEEP)
        } else {
            None
        };
        let set = match wanted {
            Some(after) => self.timer.reset(after, None),
            None => self.timer.clear(),
        };
        if let Err(e) = set {
            log::error!("metrics: timerfd_settime: {e}");
        }
    }
}

fn blocked(e: &io::Error) -> Step {
    match e.kind() {
        io::ErrorKind::WouldBlock => Step::Blocked,
        io::ErrorKind::Interrupted => Step::Again,
        _ => Step::Over,
    }
}

impl MutEventSubscriber for MetricsServer {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        match events.data() {
            LISTENER => self.accept(ops),
            // Setting the timer again takes its expiry; reading it could block after that.
            TIMER => self.tick(ops),
            id => {
                let gone = events.event_set().intersects(EventSet::HANG_UP | EventSet::ERROR);
                let waits = self
                    .connections
                    .get(&id)
                    .is_some_and(|c| matches!(c.state, State::Waits { .. }));
                if gone && waits {
                    self.end(id, ops);
                } else {
                    self.serve(id, ops);
                }
            }
        }
        self.set_timer();
    }

    fn init(&mut self, ops: &mut EventOps) {
        let added = ops
            .add(Events::with_data(&self.listener, LISTENER, EventSet::IN))
            .and_then(|()| ops.add(Events::with_data_raw(self.timer.as_raw_fd(), TIMER, EventSet::IN)));
        if let Err(e) = added {
            log::error!("metrics: {e}; nothing is served");
        }
        self.open_events();
        self.set_timer();
    }
}

#[cfg(test)]
mod tests;
