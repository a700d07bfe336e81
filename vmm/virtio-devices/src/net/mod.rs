//! Network device backed by a host tap device (virtio 1.2, 5.1).
//!
//! | module | contents |
//! |---|---|
//! | [`config`] | configuration: `tap=NAME,mac=...` |
//! | [`tap`] | system calls on a tap device and on guest memory |
//! | [`frames`] | the receive and transmit queues |
//! | [`link`] | link status of the guest's device |
//! | [`metadata`] | frames between the guest and the metadata service |
//! | [`vhost`] | frame transfer by vhost-net |
//!
//! A thread of the VMM, or vhost-net, moves frames in both directions. Feature bits let the kernels
//! of host and guest negotiate checksum and segmentation offloads. If the tap device is removed,
//! the guest's link goes down and the VM continues to run.

pub mod config;
pub mod frames;
pub mod link;
pub mod metadata;
pub mod tap;
pub mod vhost;

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use diagnostics::{error_line, guest_log};
use event_manager::{EventOps, Events, MutEventSubscriber};
use mmds::service::MetadataService;
use sandbox::SandboxedThreadKind;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_UFO, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_UFO, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF,
    VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS,
};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::EventFd;

use crate::device::{
    ActivateError, ActiveQueue, DeviceActivation, DeviceInterrupt, VirtioDevice, read_config_bytes,
};
use crate::rate_limiter::RateLimiter;
use crate::worker::{DeviceWorker, watch_readable};
use config::MacAddress;
use frames::{FrameBatchEnd, FrameQueueError, NetFrameReceiver, NetFrameTransmitter};
use link::{LINK_UP, LinkStatus};
use metadata::{MetadataNetPort, MetadataTimer};
use tap::{Tap, TapOffloads};
use vhost::{VhostHandler, VhostNetBackend};

/// Maximum sizes of the receive and transmit queues, in entries.
const QUEUE_SIZES: [u16; 2] = [256, 256];

/// Receive offloads that the guest may accept, each with its feature bit.
const OFFLOADS: [(TapOffloads, u32); 5] = [
    (TapOffloads::CSUM, VIRTIO_NET_F_GUEST_CSUM),
    (TapOffloads::TSO4, VIRTIO_NET_F_GUEST_TSO4),
    (TapOffloads::TSO6, VIRTIO_NET_F_GUEST_TSO6),
    (TapOffloads::TSO_ECN, VIRTIO_NET_F_GUEST_ECN),
    (TapOffloads::UFO, VIRTIO_NET_F_GUEST_UFO),
];

/// Feature bits that are always offered: transmit offloads, which every tap device supports, and
/// features of the device model.
const FIXED_FEATURES: [u32; 9] = [
    VIRTIO_NET_F_CSUM,
    VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_HOST_ECN,
    VIRTIO_NET_F_HOST_UFO,
    VIRTIO_NET_F_MRG_RXBUF,
    VIRTIO_NET_F_MAC,
    VIRTIO_NET_F_MTU,
    VIRTIO_NET_F_STATUS,
];

/// A virtio network device.
#[derive(Debug)]
pub struct NetDevice {
    name: String,
    tap: Arc<Tap>,
    mac: MacAddress,
    mtu: u16,
    offered: u64,
    /// The link status in the device configuration.
    status: Arc<AtomicU16>,
    /// The vhost-net backend that transfers the frames, or `None` if a thread does so.
    kernel: Option<VhostNetBackend>,
    limiters: DirectionLimiters,
    metadata: Option<MetadataAccess>,
    worker: Option<DeviceWorker>,
}

/// Access of the guest to the metadata service through a network device.
#[derive(Clone, Debug)]
struct MetadataAccess {
    service: Arc<MetadataService>,
    /// Timer of the metadata port. Created together with the device, because the thread that
    /// activates the device may not be permitted to create one.
    timer: Arc<MetadataTimer>,
}

/// Rate limiters of a network device, one for each direction.
#[derive(Clone, Debug, Default)]
struct DirectionLimiters {
    rx: Option<Arc<RateLimiter>>,
    tx: Option<Arc<RateLimiter>>,
}

impl NetDevice {
    /// Creates a network device with the name `name` on the tap device `tap`, whose MTU is `mtu`
    /// bytes. Frames are transferred by the vhost-net backend `kernel` if given, otherwise by a
    /// thread.
    pub fn new(name: String, tap: Tap, mac: MacAddress, mtu: u16, kernel: Option<VhostNetBackend>) -> Self {
        let offered = offered(|offloads| tap.set_offloads(offloads).is_ok());
        Self {
            name,
            tap: Arc::new(tap),
            mac,
            mtu,
            offered,
            status: Arc::new(AtomicU16::new(LINK_UP)),
            kernel,
            limiters: DirectionLimiters::default(),
            metadata: None,
            worker: None,
        }
    }

    /// Sets the rate limiters of frames that the guest receives (`rx`) and sends (`tx`). vhost-net
    /// ignores them.
    #[must_use]
    pub fn with_limiters(mut self, rx: RateLimiter, tx: RateLimiter) -> Self {
        self.limiters = DirectionLimiters {
            rx: Some(Arc::new(rx)),
            tx: Some(Arc::new(tx)),
        };
        self
    }

    /// Makes the metadata service available to the guest through this device. Has no effect with
    /// vhost-net.
    ///
    /// # Errors
    /// Returns the error of `timerfd_create(2)`.
    pub fn with_metadata(mut self, service: Arc<MetadataService>) -> io::Result<Self> {
        let timer = Arc::new(MetadataTimer::new()?);
        self.metadata = Some(MetadataAccess { service, timer });
        Ok(self)
    }
}

/// Returns the feature bits that the device offers. `known` returns whether the host kernel accepts
/// a set of offloads.
///
/// The kernel rejects a whole set if it does not know one of the offloads (`set_offload` in
/// drivers/net/tun.c). Each offload is therefore probed together with only its prerequisites.
fn offered(known: impl Fn(TapOffloads) -> bool) -> u64 {
    let guest = OFFLOADS
        .iter()
        .filter(|(offload, _)| {
            let segments = match *offload {
                TapOffloads::TSO_ECN => TapOffloads::TSO4,
                _ => TapOffloads::empty(),
            };
            known(*offload | segments | TapOffloads::CSUM)
        })
        .map(|(_, bit)| *bit);
    FIXED_FEATURES
        .into_iter()
        .chain(guest)
        .fold(0, |all, bit| all | 1 << bit)
}

/// Returns the offloads to enable on the tap device if the driver accepted `features`.
fn offloads(features: u64) -> TapOffloads {
    let accepted = OFFLOADS
        .iter()
        .filter(|(_, bit)| features & (1 << bit) != 0)
        .fold(TapOffloads::empty(), |all, (offload, _)| all | *offload);
    // Enable the ECN offload only with segmentation, because the kernel otherwise rejects the set.
    if accepted.intersects(TapOffloads::TSO4 | TapOffloads::TSO6) {
        accepted
    } else {
        accepted - TapOffloads::TSO_ECN
    }
}

impl VirtioDevice for NetDevice {
    fn id(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn features(&self) -> u64 {
        self.offered
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    /// Reads from `struct virtio_net_config`: mac, status, max_virtqueue_pairs and mtu.
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0; 12];
        config[..6].copy_from_slice(&self.mac.bytes());
        config[6..8].copy_from_slice(&self.status.load(Ordering::Relaxed).to_le_bytes());
        config[8..10].copy_from_slice(&1_u16.to_le_bytes());
        config[10..].copy_from_slice(&self.mtu.to_le_bytes());
        read_config_bytes(&config, offset, data);
    }

    fn unsupported_in_snapshot(&self) -> Option<&'static str> {
        let by_kernel = "--net with vhost-net (use vhost=off)";
        self.kernel.as_ref().map(|_| by_kernel)
    }

    fn rate_limiters(&self) -> Vec<(String, Arc<RateLimiter>)> {
        let DirectionLimiters { rx, tx } = &self.limiters;
        let limiters = [("rx", rx), ("tx", tx)].into_iter();
        limiters
            .filter(|_| self.kernel.is_none())
            .filter_map(|(direction, limiter)| Some((format!("{}-{direction}", self.name), limiter.clone()?)))
            .collect()
    }

    fn identity(&self) -> Vec<u8> {
        [&self.mac.bytes()[..], &self.mtu.to_le_bytes()].concat()
    }

    fn activate(&mut self, activation: DeviceActivation) -> Result<(), ActivateError> {
        let DeviceActivation {
            memory,
            features,
            queues,
            config_change,
            fatal_error_callback,
            ..
        } = activation;
        let mut queues = queues.into_iter();
        let (Some(Some(receive)), Some(Some(transmit))) = (queues.next(), queues.next()) else {
            return Err(ActivateError::Driver(
                "a network device without both of its queues",
            ));
        };
        let offloads = offloads(features);
        if self.status.load(Ordering::Relaxed) == LINK_UP
            && let Err(source) = self.tap.set_offloads(offloads)
        {
            return Err(ActivateError::Host {
                what: "TUNSETOFFLOAD",
                source,
            });
        }
        let link = LinkStatus {
            name: self.name.clone(),
            status: self.status.clone(),
            config_change,
        };
        // Use vhost-net only if the tap device has not been removed.
        let kernel = self.kernel.as_ref().filter(|_| link.is_up());
        let spawned = if let Some(kernel) = kernel {
            let watch = kernel
                .start(&memory, features, [&receive, &transmit], &self.tap)
                .map_err(|e| ActivateError::Host {
                    what: "vhost-net",
                    source: io::Error::other(e),
                })?;
            let tap = Some(self.tap.clone());
            let handler = VhostHandler { watch, tap, link };
            DeviceWorker::spawn(
                SandboxedThreadKind::Device,
                &self.name,
                handler,
                fatal_error_callback,
            )
        } else {
            let merges = features & (1 << VIRTIO_NET_F_MRG_RXBUF) != 0;
            let tap = link.is_up().then(|| self.tap.clone());
            let handler = FrameHandler::new(memory, tap, link, [receive, transmit], merges, &self.limiters);
            let handler = handler.with_metadata(self.metadata.as_ref());
            DeviceWorker::spawn(
                SandboxedThreadKind::Device,
                &self.name,
                handler,
                fatal_error_callback,
            )
        };
        self.worker = Some(spawned.inspect_err(|_| self.reset())?);
        Ok(())
    }

    fn reset(&mut self) {
        self.worker = None;
        if let Some(kernel) = &self.kernel {
            kernel.stop();
        }
    }
}

/// Event handler of the network device's thread. It transfers frames in both directions.
struct FrameHandler {
    memory: GuestMemoryMmap,
    /// The tap device, or `None` after its removal.
    tap: Option<Arc<Tap>>,
    link: LinkStatus,
    receiver: Direction<NetFrameReceiver>,
    sender: Direction<NetFrameTransmitter>,
    limiters: DirectionLimiters,
    metadata: Option<MetadataNetPort>,
    /// `true` while the event loop monitors the tap device. The tap device is not monitored while
    /// the driver has no buffers for received frames.
    watching: bool,
}

/// A queue of the network device and its events. `queue` is `None` after the driver has broken the
/// queue.
struct Direction<Q> {
    queue: Option<Q>,
    kick: Arc<EventFd>,
    interrupt: DeviceInterrupt,
}

impl<Q> Direction<Q> {
    fn new(active: ActiveQueue, queue: impl FnOnce(virtio_queue::Queue) -> Q) -> Self {
        Self {
            queue: Some(queue(active.queue)),
            kick: active.kick,
            interrupt: active.interrupt,
        }
    }

    /// Completes a batch of frame transfers and returns why it ended. Raises the interrupt if the
    /// driver requested it. If the driver has broken the queue, stops using the queue and requests
    /// a device reset.
    fn end_batch(
        &mut self,
        link: &LinkStatus,
        result: Result<(FrameBatchEnd, bool), FrameQueueError>,
    ) -> FrameBatchEnd {
        match result {
            Ok((pause, wanted)) => {
                if wanted {
                    self.interrupt.raise();
                }
                pause
            }
            Err(e) => {
                // This message is logged once per device activation, because the queue is not used
                // afterwards.
                guest_log!(
                    Info,
                    "{}: a queue is no longer processed: {}",
                    link.name,
                    error_line(&e)
                );
                self.queue = None;
                link.needs_reset();
                FrameBatchEnd::NoBuffer
            }
        }
    }
}

impl FrameHandler {
    /// Creates a handler of the receive and transmit queues. `merges` is `true` if the driver
    /// accepts frames that span several buffers.
    fn new(
        memory: GuestMemoryMmap,
        tap: Option<Arc<Tap>>,
        link: LinkStatus,
        [receive, transmit]: [ActiveQueue; 2],
        merges: bool,
        limiters: &DirectionLimiters,
    ) -> Self {
        let (rx, tx) = (limiters.rx.clone(), limiters.tx.clone());
        Self {
            memory,
            tap,
            link,
            receiver: Direction::new(receive, |queue| {
                NetFrameReceiver::new(queue, merges).with_limiter(rx)
            }),
            sender: Direction::new(transmit, |queue| NetFrameTransmitter::new(queue).with_limiter(tx)),
            limiters: limiters.clone(),
            metadata: None,
            watching: false,
        }
    }

    /// Enables the metadata service if `access` is given.
    fn with_metadata(mut self, access: Option<&MetadataAccess>) -> Self {
        self.metadata =
            access.map(|access| MetadataNetPort::new(access.service.clone(), access.timer.clone()));
        self
    }

    /// Sends the guest's frames, and then delivers the responses of the metadata service.
    fn send(&mut self, ops: &mut EventOps) {
        self.send_batch();
        if self.metadata.as_ref().is_some_and(MetadataNetPort::has_frames) {
            self.receive(ops);
        }
    }

    fn send_batch(&mut self) {
        let Some(sender) = &mut self.sender.queue else {
            return;
        };
        let result = sender.run(&self.memory, self.tap.as_deref(), self.metadata.as_mut());
        if let FrameBatchEnd::More = self.sender.end_batch(&self.link, result) {
            // Continue after the other direction has been served. The write fails only if the
            // counter is full, in which case a notification is already pending.
            let _ = self.sender.kick.write(1);
        }
    }

    fn arm_metadata_timer(&mut self) {
        if let Some(port) = &mut self.metadata {
            port.arm_timer();
        }
    }

    /// Handles an event of the metadata timer: lets the TCP/IP stack run and delivers its frames.
    fn serve_metadata(&mut self, ops: &mut EventOps) {
        if let Some(port) = &mut self.metadata {
            port.handle_timer();
        }
        self.receive(ops);
    }

    fn receive(&mut self, ops: &mut EventOps) {
        let (Some(receiver), Some(tap)) = (&mut self.receiver.queue, self.tap.clone()) else {
            return;
        };
        let result = receiver.run(&self.memory, &tap, self.metadata.as_mut());
        match self.receiver.end_batch(&self.link, result) {
            // Monitor the tap device while it may have frames.
            pause @ (FrameBatchEnd::More | FrameBatchEnd::Idle) => {
                self.watch(&tap, true, ops);
                // Kick the queue for frames of the metadata service, which the tap device does not
                // announce.
                let has_frames = self.metadata.as_ref().is_some_and(MetadataNetPort::has_frames);
                if has_frames && let FrameBatchEnd::More = pause {
                    let _ = self.receiver.kick.write(1);
                }
            }
            // Stop monitoring until the driver adds buffers, or the limiter's timer fires.
            FrameBatchEnd::NoBuffer | FrameBatchEnd::Throttled => self.watch(&tap, false, ops),
            FrameBatchEnd::Gone(e) => self.lose(&tap, &e, ops),
        }
    }

    fn watch(&mut self, tap: &Tap, wanted: bool, ops: &mut EventOps) {
        if wanted == self.watching {
            return;
        }
        let events = Events::new_raw(tap.as_raw_fd(), EventSet::IN);
        let result = if wanted {
            ops.add(events)
        } else {
            ops.remove(events)
        };
        match result {
            Ok(()) => self.watching = wanted,
            Err(e) => guest_log!(
                Error,
                "{}: cannot watch the tap device: {}",
                self.link.name,
                error_line(&e)
            ),
        }
    }

    fn lose(&mut self, tap: &Tap, error: &io::Error, ops: &mut EventOps) {
        self.watch(tap, false, ops);
        self.tap = None;
        self.link.lose(error);
    }
}

impl MutEventSubscriber for FrameHandler {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        let fd = events.fd();
        let timer = |limiter: &Option<Arc<RateLimiter>>| {
            let limiter = limiter.as_ref().filter(|limiter| limiter.as_raw_fd() == fd);
            limiter.map(|limiter| limiter.handle_timer()).is_some()
        };
        let metadata = self.metadata.as_ref().map(AsRawFd::as_raw_fd);
        if metadata == Some(fd) {
            self.serve_metadata(ops);
        } else if timer(&self.limiters.tx) {
            self.send(ops);
        } else if timer(&self.limiters.rx) {
            self.receive(ops);
        } else if fd == self.sender.kick.as_raw_fd() {
            let _ = self.sender.kick.read();
            self.send(ops);
        } else {
            if fd == self.receiver.kick.as_raw_fd() {
                let _ = self.receiver.kick.read();
            }
            self.receive(ops);
        }
        self.arm_metadata_timer();
    }

    fn init(&mut self, ops: &mut EventOps) {
        let kicks = [&self.receiver.kick, &self.sender.kick];
        let kicks = kicks.into_iter().map(|kick| kick.as_raw_fd());
        let timers = [&self.limiters.rx, &self.limiters.tx].into_iter().flatten();
        let timers = timers.map(|limiter| limiter.as_raw_fd());
        let metadata = self.metadata.as_ref().map(AsRawFd::as_raw_fd);
        watch_readable(ops, &self.link.name, kicks.chain(timers).chain(metadata));
        self.send(ops);
        self.receive(ops);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;
    use std::time::{Duration, Instant};

    use virtio_queue::QueueT;
    use virtio_queue::desc::split::Descriptor;

    use super::*;
    use crate::rate_limiter::limits::RateLimits;
    use crate::serve::testing::{BUFFERS, Driver, activation, memory};

    /// Returns whether Linux would accept a set of offloads, like `set_offload` in
    /// drivers/net/tun.c.
    fn linux(offloads: TapOffloads) -> bool {
        let mut known = TapOffloads::CSUM | TapOffloads::TSO4 | TapOffloads::TSO6 | TapOffloads::UFO;
        if offloads.intersects(TapOffloads::TSO4 | TapOffloads::TSO6) {
            known |= TapOffloads::TSO_ECN;
        }
        offloads.contains(TapOffloads::CSUM) && known.contains(offloads)
    }

    #[test]
    fn all_supported_offloads_are_offered() {
        let all = offered(linux);
        for (_, bit) in OFFLOADS {
            assert_ne!(all & (1 << bit), 0, "bit {bit}");
        }
        // A kernel without one offload still supports the others.
        let some = offered(|offloads| linux(offloads) && !offloads.contains(TapOffloads::UFO));
        assert_eq!(some, all & !(1 << VIRTIO_NET_F_GUEST_UFO));
    }

    #[test]
    fn accepted_offloads_are_valid_for_kernel() {
        for features in 0..1 << OFFLOADS.len() {
            let bits = OFFLOADS.iter().enumerate();
            let features = bits
                .filter(|(n, _)| features & (1 << n) != 0)
                .fold(1u64 << VIRTIO_NET_F_GUEST_CSUM, |all, (_, (_, bit))| {
                    all | 1 << bit
                });
            assert!(linux(offloads(features)), "{features:#x}");
        }
        assert_eq!(offloads(0), TapOffloads::empty());
    }

    #[test]
    fn broken_ring_requests_reset() {
        let memory = memory();
        let driver = Driver::new(&memory, 16);
        let (activation, seen) = activation(&memory, vec![]);
        let link = LinkStatus {
            name: "net7".into(),
            status: Arc::default(),
            config_change: activation.config_change,
        };
        let mut lane = Direction::new(driver.active(), |queue| queue.size());
        let pause = lane.end_batch(&link, Err(FrameQueueError::Head(16)));
        assert!(matches!(pause, FrameBatchEnd::NoBuffer) && lane.queue.is_none());
        assert!(seen.needs_reset());
        assert_eq!(seen.changed.read().unwrap(), 1);
    }
    /// Number of frames in a test. The socket pair that replaces the tap device can hold all of
    /// them.
    const FRAMES: u16 = 8;
    const FRAME_BYTES: u32 = 512;

    /// Starts the thread of a network device with rate limiters that admit one frame every 20 ms in
    /// each direction. Also returns the other end of the socket pair that replaces the tap device.
    fn limited_device(
        memory: &GuestMemoryMmap,
        queues: [ActiveQueue; 2],
    ) -> (DeviceWorker, DirectionLimiters, UnixDatagram) {
        let limits: RateLimits = "bandwidth=500/20".parse().unwrap();
        let limiter = || Some(Arc::new(RateLimiter::new(limits).unwrap()));
        let limiters = DirectionLimiters {
            rx: limiter(),
            tx: limiter(),
        };
        let (near, far) = UnixDatagram::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        far.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let (activation, _seen) = activation(memory, vec![]);
        let tap = Some(Arc::new(Tap::on(near.into())));
        let link = LinkStatus {
            name: "net7".into(),
            status: Arc::new(AtomicU16::new(LINK_UP)),
            config_change: activation.config_change,
        };
        let handler = FrameHandler::new(memory.clone(), tap, link, queues, false, &limiters);
        let callback = activation.fatal_error_callback;
        let worker = DeviceWorker::spawn(SandboxedThreadKind::Device, "net7", handler, callback).unwrap();
        (worker, limiters, far)
    }

    /// Throttled frames are transferred without another driver notification or tap event, and no
    /// frame is lost.
    #[test]
    fn throttled_frames_are_transferred_by_the_timer() {
        let memory = memory();
        let mut receive = Driver::at(&memory, 32, 0x1000);
        let mut transmit = Driver::at(&memory, 32, 0x10_000);
        let (mut worker, limiters, far) = limited_device(&memory, [receive.active(), transmit.active()]);
        let start = Instant::now();
        for head in 0..FRAMES {
            let at = BUFFERS + 0x1000 * u64::from(head);
            transmit.offer_chain(head, &[Descriptor::new(at, FRAME_BYTES, 0, 0)]);
            receive.offer_chain(head, &[Descriptor::new(at + 0x800, 2048, 2, 0)]);
            far.send(&[0; FRAME_BYTES as usize]).unwrap();
        }
        transmit.active.kick.write(1).unwrap();
        receive.active.kick.write(1).unwrap();
        for _ in 0..FRAMES {
            assert_eq!(far.recv(&mut [0; 2048]).unwrap(), FRAME_BYTES as usize);
        }
        receive.wait_until_used(FRAMES.into());
        // 500 bytes of each frame are charged. The second frame waits for one token, and each later
        // frame waits for all of its tokens.
        let took = start.elapsed();
        assert!(
            took >= Duration::from_millis(20) * u32::from(FRAMES - 2),
            "{took:?}"
        );
        for limiter in [limiters.rx, limiters.tx] {
            let throttled = limiter.unwrap().throttled();
            let all = u64::from(FRAMES);
            assert!(
                (all - 2..=all + 1).contains(&throttled),
                "paused {throttled} times"
            );
        }
        worker.stop();
    }
}
