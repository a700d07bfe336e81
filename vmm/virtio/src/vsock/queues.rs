//! The queues of the device, between the guest's driver and the muxer, on the device's thread.

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use event_manager::{EventOps, Events, MutEventSubscriber};
use perf_core::{error_line, guest_log};
use virtio_queue::{DescriptorChain, Queue};
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::timerfd::TimerFd;

use super::chains::{self, Room};
use super::muxer::{Muxer, Watch};
use super::packet::{Header, MAX_DATA};
use crate::device::{ActiveQueue, ConfigChange};
use crate::serve::{QueueError, tell_of_driver};

/// Tokens of the event loop; those of the muxer are above.
const RX: u32 = 0;
const TX: u32 = 1;
const LISTENER: u32 = 2;
const TIMER: u32 = 3;
/// The first token for the muxer.
pub const FIRST_TOKEN: u32 = 16;

/// Between two looks at what takes too long.
const TICK: Duration = Duration::from_secs(1);
/// Packets each way before other events get their turn.
const BUDGET: usize = 512;
/// No number of an operation (virtio 1.2, 5.10.6).
const NO_OPERATION: u16 = 0;
/// Programs of the host that are let in before other events get their turn.
const ACCEPTS: usize = 16;

/// What the device's thread serves.
pub struct Queues {
    memory: GuestMemoryMmap,
    rx: ActiveQueue,
    tx: ActiveQueue,
    listener: Arc<UnixListener>,
    muxer: Muxer,
    timer: TimerFd,
    ticking: bool,
    /// The listener is watched: not for a while after the host had no descriptor for a program.
    listening: bool,
    /// That was told.
    told: bool,
    /// Data on its way, so that a packet is taken out of the guest's memory once.
    buffer: Vec<u8>,
    /// A driver that breaks the rules was told of.
    complained: bool,
    /// Its rings make no sense: nothing is moved before the driver has reset the device.
    broken: bool,
    config_change: ConfigChange,
}

impl Queues {
    /// For a driver that is ready.
    pub fn new(
        memory: GuestMemoryMmap,
        rx: ActiveQueue,
        tx: ActiveQueue,
        listener: Arc<UnixListener>,
        muxer: Muxer,
        timer: TimerFd,
    ) -> Self {
        Self {
            memory,
            rx,
            tx,
            listener,
            muxer,
            timer,
            ticking: false,
            listening: false,
            told: false,
            buffer: vec![0; MAX_DATA],
            complained: false,
            broken: false,
            config_change: ConfigChange::default(),
        }
    }

    /// The driver is told by `config_change` when the device is to be reset.
    pub fn telling(self, config_change: ConfigChange) -> Self {
        Self {
            config_change,
            ..self
        }
    }

    /// Whether the driver has broken a ring, so that nothing is moved any more.
    #[cfg(test)]
    pub(super) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Moves packets both ways until neither side has any, or the budget is spent.
    pub fn pump(&mut self, now: Instant) {
        if self.broken {
            return;
        }
        let mut budget = BUDGET;
        let (mut sent, mut received) = (false, false);
        loop {
            let before = budget;
            received |= self.take(&mut budget, now);
            sent |= self.give(&mut budget, now);
            if budget == 0 {
                // The rest comes behind what else is waiting; only a full counter fails.
                let _ = self.tx.kick.write(1);
                break;
            }
            if budget == before {
                break;
            }
        }
        for (used, queue) in [(sent, &mut self.rx), (received, &mut self.tx)] {
            if used && queue.queue.needs_notification(&self.memory).unwrap_or(true) {
                queue.interrupt.raise();
            }
        }
    }

    /// Packets of the guest. Whether a buffer was used.
    fn take(&mut self, budget: &mut usize, now: Instant) -> bool {
        let mut used = false;
        while *budget > 0 && self.muxer.takes_packets() {
            let chain = match next_chain(&mut self.tx.queue, &self.memory) {
                Next::Chain(chain) => chain,
                Next::None => break,
                Next::Broken(error) => {
                    self.give_up(&error);
                    break;
                }
            };
            *budget -= 1;
            let head = chain.head_index();
            match chains::take(&self.memory, chain, &mut self.buffer) {
                Ok((header, Ok(count))) => self.muxer.from_guest(&header, &self.buffer[..count], now),
                Ok((header, Err(error))) => {
                    self.complain(&error);
                    // Its stream lacks these bytes from now on: the connection ends.
                    let broken = Header {
                        op: NO_OPERATION,
                        len: 0,
                        ..header
                    };
                    self.muxer.from_guest(&broken, &[], now);
                }
                Err(error) => self.complain(&error),
            }
            if let Err(error) = self.tx.queue.add_used(&self.memory, head, 0) {
                self.give_up(&error);
                break;
            }
            used = true;
        }
        used
    }

    /// Packets for the guest. Whether a buffer was used.
    fn give(&mut self, budget: &mut usize, now: Instant) -> bool {
        let mut used = false;
        while *budget > 0 && self.muxer.has_packets() {
            let chain = match next_chain(&mut self.rx.queue, &self.memory) {
                Next::Chain(chain) => chain,
                Next::None => break,
                Next::Broken(error) => {
                    self.give_up(&error);
                    break;
                }
            };
            let head = chain.head_index();
            let written = match Room::of(chain) {
                Ok(room) => {
                    let most = room.data().min(MAX_DATA);
                    let Some(header) = self.muxer.next(&mut self.buffer[..most], now) else {
                        // Nobody had anything after all: the buffer stays the driver's.
                        self.rx.queue.go_to_previous_position();
                        break;
                    };
                    let len = usize::try_from(header.len).unwrap_or(most).min(most);
                    room.put(&self.memory, &header, &self.buffer[..len])
                }
                Err(error) => Err(error),
            };
            let written = written.unwrap_or_else(|error| {
                self.complain(&error);
                0
            });
            *budget -= 1;
            let written = u32::try_from(written).unwrap_or(0);
            if let Err(error) = self.rx.queue.add_used(&self.memory, head, written) {
                self.give_up(&error);
                break;
            }
            used = true;
        }
        used
    }

    fn complain(&mut self, error: &dyn std::error::Error) {
        if !std::mem::replace(&mut self.complained, true) {
            tell_of_driver("vsock", "the driver breaks the rules", error);
        }
    }

    /// The rings make no sense.
    fn give_up(&mut self, error: &dyn std::error::Error) {
        self.complain(error);
        if !std::mem::replace(&mut self.broken, true) {
            self.config_change.needs_reset();
        }
    }

    fn accept(&mut self, now: Instant, ops: &mut EventOps) {
        for _ in 0..ACCEPTS {
            match self.listener.accept() {
                Ok((stream, _)) => self.muxer.accepted(stream, now),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    // The program has gone again, or a signal came.
                    io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => {}
                    _ => return self.wait_for_descriptors(&error, ops),
                },
            }
        }
    }

    /// The host has no descriptor or no memory for a program that has connected. It would be told of that
    /// program again at once and without end, so the listener is left alone until the next tick.
    fn wait_for_descriptors(&mut self, error: &io::Error, ops: &mut EventOps) {
        if !std::mem::replace(&mut self.told, true) {
            guest_log!(
                Warn,
                "vsock: programs of the host have to wait: {error}; raise the limit of open files (ulimit -n)"
            );
        }
        let events = Events::with_data(&*self.listener, LISTENER, EventSet::IN);
        self.listening = ops.remove(events).is_err();
    }

    fn listen(&mut self, ops: &mut EventOps) -> Result<(), event_manager::Error> {
        ops.add(Events::with_data(&*self.listener, LISTENER, EventSet::IN))?;
        self.listening = true;
        Ok(())
    }

    /// Tells the event loop what the muxer waits for, and a deadline if anything must happen in time.
    fn watch(&mut self, ops: &mut EventOps) {
        // What is lost makes new watches, each of which takes a connection away.
        loop {
            let watches = self.muxer.take_watches();
            if watches.is_empty() {
                break;
            }
            for watch in watches {
                match watch {
                    Watch::Add(fd, token) => {
                        let events =
                            EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
                        if ops.add(Events::with_data_raw(fd, token, events)).is_err() {
                            self.muxer.lost(token);
                        }
                    }
                    Watch::Remove(stream, token) => {
                        // It fails for those that were never watched.
                        let _ = ops.remove(Events::with_data(&stream, token, EventSet::empty()));
                    }
                }
            }
        }
        let wanted = self.muxer.has_deadlines() || !self.listening;
        if wanted != self.ticking {
            let set = if wanted {
                self.timer.reset(TICK, Some(TICK))
            } else {
                self.timer.clear()
            };
            self.ticking = wanted && set.is_ok();
        }
    }
}

/// What a queue has.
enum Next<'m> {
    Chain(DescriptorChain<&'m GuestMemoryMmap>),
    /// Nothing, and the driver is to tell when it has.
    None,
    /// Nothing that makes sense: another look would find the same.
    Broken(QueueError),
}

fn next_chain<'m>(queue: &mut Queue, memory: &'m GuestMemoryMmap) -> Next<'m> {
    let size = queue.size();
    // The driver may add some before it knows that it has to tell: a second look after asking.
    for asked in [false, true] {
        match queue.iter(memory) {
            Ok(mut chains) => {
                if let Some(chain) = chains.next() {
                    let head = chain.head_index();
                    // The queue cannot give such a chain back to the driver.
                    if head >= size {
                        return Next::Broken(QueueError::Head { head, size });
                    }
                    return Next::Chain(chain);
                }
            }
            Err(error) => return Next::Broken(error.into()),
        }
        if !asked && let Err(error) = queue.enable_notification(memory) {
            return Next::Broken(error.into());
        }
    }
    Next::None
}

impl MutEventSubscriber for Queues {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        let now = Instant::now();
        match events.data() {
            RX => drop(self.rx.kick.read()),
            TX => drop(self.tx.kick.read()),
            LISTENER => self.accept(now, ops),
            TIMER => {
                let _ = self.timer.wait();
                self.muxer.tick(now);
                if !self.listening && self.listen(ops).is_err() {
                    guest_log!(Debug, "vsock: programs of the host have to wait longer");
                }
            }
            token => {
                let set = events.event_set();
                let hung_up = set.intersects(EventSet::HANG_UP | EventSet::ERROR);
                let readable = set.intersects(EventSet::IN | EventSet::READ_HANG_UP);
                self.muxer
                    .host_event(token, readable, set.contains(EventSet::OUT), hung_up, now);
            }
        }
        self.pump(now);
        self.watch(ops);
    }

    fn init(&mut self, ops: &mut EventOps) {
        let watched = [
            Events::with_data(&*self.rx.kick, RX, EventSet::IN),
            Events::with_data(&*self.tx.kick, TX, EventSet::IN),
            Events::with_data(&self.timer, TIMER, EventSet::IN),
        ];
        let added = watched.into_iter().try_for_each(|events| ops.add(events));
        if let Err(error) = added.and_then(|()| self.listen(ops)) {
            guest_log!(Error, "vsock: the device does not work: {}", error_line(&error));
            self.config_change.needs_reset();
        }
    }
}
