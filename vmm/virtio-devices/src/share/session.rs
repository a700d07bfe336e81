//! Passes a shared directory's queues to its backend while the driver is active.
//!
//! When the backend exits, the session reconnects with increasing delays, and guest requests wait.
//! A new backend continues the queues at the first unanswered request. It does not know which files
//! the guest has open, so the guest must mount the directory again.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use diagnostics::{error_line, guest_log};
use event_manager::{EventOps, Events, MutEventSubscriber};
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_queue::QueueT;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use vmm_sys_util::timerfd::TimerFd;

use super::backend::{Backend, BackendConnection, VhostUserBackendError};
use crate::device::{ActiveQueue, DeviceActivation};

/// Delay between the exit of a backend and the first reconnection attempt.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Maximum delay between two attempts to reconnect to a backend.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);

/// A queue that is passed to the backend.
struct BackendQueue {
    active: ActiveQueue,
    /// Eventfd that the backend signals to interrupt the driver. It has no effect if the guest has
    /// assigned no MSI-X vector to the queue.
    call: Arc<EventFd>,
}

/// Event handler that passes the queues to a backend, and to a new backend after each exit.
pub(super) struct BackendSession {
    name: String,
    backend: Backend,
    memory: GuestMemoryMmap,
    features: u64,
    /// The device's queues by index. `None` for a queue that the driver has not enabled.
    rings: Vec<Option<BackendQueue>>,
    connection: Option<BackendConnection>,
    since: Instant,
    pause: Duration,
    timer: TimerFd,
}

impl BackendSession {
    pub(super) fn new(
        name: String,
        backend: Backend,
        connection: Option<BackendConnection>,
        activation: DeviceActivation,
    ) -> io::Result<Self> {
        let ring = |active: ActiveQueue| {
            let call = match active.interrupt.eventfd() {
                Some(vector) => vector.clone(),
                None => Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?),
            };
            Ok(BackendQueue { active, call })
        };
        let rings = activation
            .queues
            .into_iter()
            .map(|queue| queue.map(ring).transpose());
        Ok(Self {
            name,
            backend,
            memory: activation.memory,
            features: activation.features,
            rings: rings.collect::<io::Result<_>>()?,
            connection,
            since: Instant::now(),
            pause: MIN_RETRY_DELAY,
            timer: TimerFd::new()?,
        })
    }

    /// Connects to a backend, passes the queues to it and monitors the connection.
    fn connect(&mut self, ops: &mut EventOps) -> Result<(), VhostUserBackendError> {
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.backend.connect()?,
        };
        self.hand_over(&connection)
            .map_err(VhostUserBackendError::Protocol)?;
        let events = Events::new(&connection.frontend, EventSet::IN | EventSet::READ_HANG_UP);
        if let Err(e) = ops.add(events) {
            guest_log!(
                Error,
                "{}: cannot watch for the exit of the back end: {}",
                self.name,
                error_line(&e)
            );
        }
        self.since = Instant::now();
        self.connection = Some(connection);
        Ok(())
    }

    fn hand_over(&self, connection: &BackendConnection) -> Result<(), vhost::Error> {
        let frontend = &connection.frontend;
        frontend.set_features(connection.accepted(self.features))?;
        let regions = self
            .memory
            .iter()
            .map(VhostUserMemoryRegionInfo::from_guest_region);
        frontend.set_mem_table(&regions.collect::<Result<Vec<_>, _>>()?)?;
        for (index, ring) in self.rings.iter().enumerate() {
            let Some(ring) = ring else { continue };
            let queue = &ring.active.queue;
            let host = |address| {
                let pointer = self.memory.get_host_address(GuestAddress(address));
                pointer
                    .map(|pointer| pointer as u64)
                    .map_err(|_| vhost::Error::InvalidQueue)
            };
            frontend.set_vring_num(index, queue.size())?;
            // All requests before the used index are answered. The index is initially 0, because
            // the driver has just configured the ring.
            let answered = queue.used_idx(&self.memory, Ordering::Acquire);
            frontend.set_vring_base(index, answered.map_err(|_| vhost::Error::InvalidQueue)?.0)?;
            frontend.set_vring_addr(
                index,
                &VringConfigData {
                    queue_max_size: queue.max_size(),
                    queue_size: queue.size(),
                    flags: 0,
                    desc_table_addr: host(queue.desc_table())?,
                    used_ring_addr: host(queue.used_ring())?,
                    avail_ring_addr: host(queue.avail_ring())?,
                    log_addr: None,
                },
            )?;
            frontend.set_vring_call(index, &ring.call)?;
            frontend.set_vring_kick(index, &ring.active.kick)?;
        }
        let mut enabler = frontend.clone();
        for (index, ring) in self.rings.iter().enumerate() {
            if let Some(ring) = ring {
                enabler.set_vring_enable(index, true)?;
                // Kick the backend, because requests may have been added while there was none.
                let _ = ring.active.kick.write(1);
            }
        }
        Ok(())
    }

    /// Handles the exit of the backend and schedules an attempt to reconnect.
    fn handle_exit(&mut self, ops: &mut EventOps) {
        if let Some(connection) = self.connection.take() {
            if let Err(e) = ops.remove(Events::new(&connection.frontend, EventSet::empty())) {
                log::debug!("{}: {}", self.name, error_line(&e));
            }
            guest_log!(
                Warn,
                "{}: the back end has exited; the guest's requests wait for a new one",
                self.name
            );
        }
        if self.since.elapsed() > MAX_RETRY_DELAY {
            self.pause = MIN_RETRY_DELAY;
        }
        self.schedule_retry();
    }

    fn schedule_retry(&mut self) {
        if let Err(e) = self.timer.reset(self.pause, None) {
            guest_log!(
                Error,
                "{}: cannot retry the connection to the back end: {e}",
                self.name
            );
        }
        self.pause = (self.pause * 2).min(MAX_RETRY_DELAY);
    }
}

impl MutEventSubscriber for BackendSession {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        if events.fd() != self.timer.as_raw_fd() {
            // The backend sends no unsolicited messages, so the connection has ended.
            self.handle_exit(ops);
            return;
        }
        let _ = self.timer.wait();
        match self.connect(ops) {
            Ok(()) => guest_log!(
                Warn,
                "{}: connected to a new back end; the guest must mount again",
                self.name
            ),
            Err(e) => {
                guest_log!(Info, "{}: no new back end yet: {}", self.name, error_line(&e));
                self.schedule_retry();
            }
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        if let Err(e) = ops.add(Events::new(&self.timer, EventSet::IN)) {
            guest_log!(
                Error,
                "{}: the connection to the back end is not retried: {}",
                self.name,
                error_line(&e)
            );
        }
        if let Err(e) = self.connect(ops) {
            guest_log!(Warn, "{}: {}", self.name, error_line(&e));
            self.schedule_retry();
        }
    }
}
