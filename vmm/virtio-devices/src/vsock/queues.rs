//! Event handler of the vsock device's thread. It transfers packets between the driver's queues and
//! the muxer.

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use diagnostics::{error_line, guest_log};
use event_manager::{EventOps, Events, MutEventSubscriber};
use virtio_queue::{DescriptorChain, Queue};
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::timerfd::TimerFd;

use super::chains::{self, VsockPacketBuffer};
use super::muxer::{ConnectionMuxer, DescriptorWatchChange};
use super::packet::{MAX_DATA, VsockPacketHeader};
use crate::device::{ActiveQueue, ConfigChangeNotifier};
use crate::serve::{VirtqueueError, log_driver_error};

// Event loop tokens of this module. The muxer's tokens are greater.
const RX: u32 = 0;
const TX: u32 = 1;
const LISTENER: u32 = 2;
const TIMER: u32 = 3;
/// First event loop token that the muxer may assign.
pub const FIRST_TOKEN: u32 = 16;

/// Interval at which the vsock thread checks timeouts.
const TICK: Duration = Duration::from_secs(1);
/// Maximum number of packets that the vsock thread transfers before it handles other events.
const BUDGET: usize = 512;
/// Operation number that is never valid (virtio 1.2, 5.10.6).
const NO_OPERATION: u16 = 0;
/// Maximum number of host programs' connections accepted before other events are handled.
const ACCEPTS: usize = 16;

/// Event handler of the vsock device's thread, with the driver's queues and the muxer.
pub struct VsockQueues {
    memory: GuestMemoryMmap,
    rx: ActiveQueue,
    tx: ActiveQueue,
    listener: Arc<UnixListener>,
    muxer: ConnectionMuxer,
    timer: TimerFd,
    ticking: bool,
    /// `true` while the event loop monitors the listening socket. `false` from a failure to accept
    /// a connection until the next tick.
    listening: bool,
    /// `true` after a shortage of file descriptors has been logged.
    shortage_logged: bool,
    /// Buffer to which packet data is copied from guest memory, exactly once.
    buffer: Vec<u8>,
    /// `true` after a protocol violation by the driver has been logged.
    complained: bool,
    /// `true` if the rings are invalid. No packets are then transferred until the driver resets the
    /// device.
    broken: bool,
    config_change: ConfigChangeNotifier,
}

impl VsockQueues {
    /// Creates the event handler for a driver that has activated the device.
    pub fn new(
        memory: GuestMemoryMmap,
        rx: ActiveQueue,
        tx: ActiveQueue,
        listener: Arc<UnixListener>,
        muxer: ConnectionMuxer,
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
            shortage_logged: false,
            buffer: vec![0; MAX_DATA],
            complained: false,
            broken: false,
            config_change: ConfigChangeNotifier::default(),
        }
    }

    /// Sets the notifier with which the handler requests a device reset from the driver.
    pub fn with_config_notifier(self, config_change: ConfigChangeNotifier) -> Self {
        Self {
            config_change,
            ..self
        }
    }

    /// Returns whether the driver has broken a ring, so that no packets are transferred.
    #[cfg(test)]
    pub(super) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Transfers packets in both directions until none are left or `BUDGET` packets have been
    /// transferred.
    pub fn pump(&mut self, now: Instant) {
        if self.broken {
            return;
        }
        let mut budget = BUDGET;
        let (mut sent, mut received) = (false, false);
        loop {
            let before = budget;
            received |= self.take(&mut budget, now);
            sent |= self.deliver_packets(&mut budget, now);
            if budget == 0 {
                // Continue after other pending events. The write fails only if the counter is full.
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

    /// Handles packets from the guest, at most `budget`, and subtracts their number from `budget`.
    /// Returns `true` if a buffer was returned to the driver.
    fn take(&mut self, budget: &mut usize, now: Instant) -> bool {
        let mut used = false;
        while *budget > 0 && self.muxer.can_accept_packets() {
            let chain = match next_chain(&mut self.tx.queue, &self.memory) {
                NextChain::Chain(chain) => chain,
                NextChain::None => break,
                NextChain::Broken(error) => {
                    self.mark_broken(&error);
                    break;
                }
            };
            *budget -= 1;
            let head = chain.head_index();
            match chains::take(&self.memory, chain, &mut self.buffer) {
                Ok((header, Ok(count))) => self.muxer.from_guest(&header, &self.buffer[..count], now),
                Ok((header, Err(error))) => {
                    self.log_once(&error);
                    // The stream has lost these bytes, so the connection is reset.
                    let broken = VsockPacketHeader {
                        op: NO_OPERATION,
                        len: 0,
                        ..header
                    };
                    self.muxer.from_guest(&broken, &[], now);
                }
                Err(error) => self.log_once(&error),
            }
            if let Err(error) = self.tx.queue.add_used(&self.memory, head, 0) {
                self.mark_broken(&error);
                break;
            }
            used = true;
        }
        used
    }

    /// Delivers packets to the guest, at most `budget`, and subtracts their number from `budget`.
    /// Returns `true` if a buffer was returned to the driver.
    fn deliver_packets(&mut self, budget: &mut usize, now: Instant) -> bool {
        let mut used = false;
        while *budget > 0 && self.muxer.has_packets() {
            let chain = match next_chain(&mut self.rx.queue, &self.memory) {
                NextChain::Chain(chain) => chain,
                NextChain::None => break,
                NextChain::Broken(error) => {
                    self.mark_broken(&error);
                    break;
                }
            };
            let head = chain.head_index();
            let written = match VsockPacketBuffer::of(chain) {
                Ok(room) => {
                    let most = room.data().min(MAX_DATA);
                    let Some(header) = self.muxer.next(&mut self.buffer[..most], now) else {
                        // No packet was available, so the buffer stays in the queue.
                        self.rx.queue.go_to_previous_position();
                        break;
                    };
                    let len = usize::try_from(header.len).unwrap_or(most).min(most);
                    room.put(&self.memory, &header, &self.buffer[..len])
                }
                Err(error) => Err(error),
            };
            let written = written.unwrap_or_else(|error| {
                self.log_once(&error);
                0
            });
            *budget -= 1;
            let written = u32::try_from(written).unwrap_or(0);
            if let Err(error) = self.rx.queue.add_used(&self.memory, head, written) {
                self.mark_broken(&error);
                break;
            }
            used = true;
        }
        used
    }

    fn log_once(&mut self, error: &dyn std::error::Error) {
        if !std::mem::replace(&mut self.complained, true) {
            log_driver_error("vsock", "the driver breaks the rules", error);
        }
    }

    /// Stops all transfers and requests a device reset from the driver.
    fn mark_broken(&mut self, error: &dyn std::error::Error) {
        self.log_once(error);
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
                    // The program has already disconnected, or a signal arrived.
                    io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => {}
                    _ => return self.wait_for_descriptors(&error, ops),
                },
            }
        }
    }

    /// Stops monitoring the listening socket until the next tick, because the host has no
    /// descriptor or memory for a new connection. Otherwise, the event loop would report the same
    /// connection indefinitely.
    fn wait_for_descriptors(&mut self, error: &io::Error, ops: &mut EventOps) {
        if !std::mem::replace(&mut self.shortage_logged, true) {
            guest_log!(
                Warn,
                "vsock: connections of host programs are delayed: {error}; raise the limit of open \
                files (ulimit -n)"
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

    /// Applies the muxer's pending changes to the descriptors that the event loop monitors.
    /// Schedules a tick if a timeout is pending or the listening socket is not monitored.
    fn watch(&mut self, ops: &mut EventOps) {
        // A descriptor that cannot be monitored causes a further change, which removes its
        // connection.
        loop {
            let watches = self.muxer.take_watches();
            if watches.is_empty() {
                break;
            }
            for watch in watches {
                match watch {
                    DescriptorWatchChange::Add(fd, token) => {
                        let events =
                            EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
                        if ops.add(Events::with_data_raw(fd, token, events)).is_err() {
                            self.muxer.lost(token);
                        }
                    }
                    DescriptorWatchChange::Remove(stream, token) => {
                        // Removal fails for sockets that were never monitored.
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

/// Result of taking the next chain from a queue.
enum NextChain<'m> {
    Chain(DescriptorChain<&'m GuestMemoryMmap>),
    /// The queue contains no available chain, and the driver's notifications are enabled.
    None,
    /// The queue is broken. Another attempt would have the same result.
    Broken(VirtqueueError),
}

fn next_chain<'m>(queue: &mut Queue, memory: &'m GuestMemoryMmap) -> NextChain<'m> {
    let size = queue.size();
    // The driver may add a chain before it sees that notifications are enabled, so check again.
    for asked in [false, true] {
        match queue.iter(memory) {
            Ok(mut chains) => {
                if let Some(chain) = chains.next() {
                    let head = chain.head_index();
                    // The used ring cannot hold a head index beyond the queue size.
                    if head >= size {
                        return NextChain::Broken(VirtqueueError::Head { head, size });
                    }
                    return NextChain::Chain(chain);
                }
            }
            Err(error) => return NextChain::Broken(error.into()),
        }
        if !asked && let Err(error) = queue.enable_notification(memory) {
            return NextChain::Broken(error.into());
        }
    }
    NextChain::None
}

impl MutEventSubscriber for VsockQueues {
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
                    guest_log!(Debug, "vsock: connections of host programs are delayed further");
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
            guest_log!(Error, "vsock: the device failed: {}", error_line(&error));
            self.config_change.needs_reset();
        }
    }
}
