//! A network device on a tap device of the host (virtio 1.2, 5.1).
//!
//! | module | story |
//! |---|---|
//! | [`config`] | what the user asks for: `tap=NAME,mac=...` |
//! | [`tap`] | system calls on a tap device and on guest memory |
//! | [`frames`] | the two queues: frames in, frames out |
//! | [`link`] | the guest's link, up or down |
//! | [`vhost`] | the host's kernel in their place |
//!
//! One thread moves frames both ways, or the host's kernel does. Checksums and segmentation are left to whom
//! they cost least: the host's kernel and the guest's agree on them by the feature bits. When the tap device
//! goes away the guest sees its link go down, and lives on.

pub mod config;
pub mod frames;
pub mod link;
pub mod tap;
pub mod vhost;

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use event_manager::{EventOps, Events, MutEventSubscriber};
use perf_core::{error_line, guest_log};
use sandbox::ThreadKind;
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

use crate::device::{ActivateError, Activation, ActiveQueue, Interrupt, VirtioDevice, read_config_bytes};
use crate::worker::Worker;
use config::Mac;
use frames::{FramesError, Pause, Receiver, Sender};
use link::{LINK_UP, Link};
use tap::{Offloads, Tap};
use vhost::{Kernel, Watcher};

/// Entries of the receive and the transmit queue.
const QUEUE_SIZES: [u16; 2] = [256, 256];

/// What the guest may have the tap device leave unfinished, with the bit for each.
const OFFLOADS: [(Offloads, u32); 5] = [
    (Offloads::CSUM, VIRTIO_NET_F_GUEST_CSUM),
    (Offloads::TSO4, VIRTIO_NET_F_GUEST_TSO4),
    (Offloads::TSO6, VIRTIO_NET_F_GUEST_TSO6),
    (Offloads::TSO_ECN, VIRTIO_NET_F_GUEST_ECN),
    (Offloads::UFO, VIRTIO_NET_F_GUEST_UFO),
];

/// What every tap device finishes for the guest, and what this device has besides.
const ALWAYS: [u32; 9] = [
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

/// A network device.
#[derive(Debug)]
pub struct Net {
    name: String,
    tap: Arc<Tap>,
    mac: Mac,
    mtu: u16,
    offered: u64,
    /// `status` of the configuration.
    status: Arc<AtomicU16>,
    /// Moves the frames, if there is one.
    kernel: Option<Kernel>,
    worker: Option<Worker>,
}

impl Net {
    /// A device `name` on `tap`, whose longest packet is `mtu` bytes. Frames are moved by `kernel`, or by a
    /// thread of its own.
    pub fn new(name: String, tap: Tap, mac: Mac, mtu: u16, kernel: Option<Kernel>) -> Self {
        let offered = offered(|offloads| tap.set_offloads(offloads).is_ok());
        Self {
            name,
            tap: Arc::new(tap),
            mac,
            mtu,
            offered,
            status: Arc::new(AtomicU16::new(LINK_UP)),
            kernel,
            worker: None,
        }
    }
}

/// The device's feature bits, where the host's kernel takes offloads that are `known`. Each is asked for with
/// no more than what it builds upon (`set_offload` in drivers/net/tun.c): one that the kernel does not know
/// would have it refuse all.
fn offered(known: impl Fn(Offloads) -> bool) -> u64 {
    let guest = OFFLOADS
        .iter()
        .filter(|(offload, _)| {
            let segments = match *offload {
                Offloads::TSO_ECN => Offloads::TSO4,
                _ => Offloads::empty(),
            };
            known(*offload | segments | Offloads::CSUM)
        })
        .map(|(_, bit)| *bit);
    ALWAYS.into_iter().chain(guest).fold(0, |all, bit| all | 1 << bit)
}

/// What the tap device may leave unfinished for a driver that has accepted `features`.
fn offloads(features: u64) -> Offloads {
    let accepted = OFFLOADS
        .iter()
        .filter(|(_, bit)| features & (1 << bit) != 0)
        .fold(Offloads::empty(), |all, (offload, _)| all | *offload);
    // Without segments there is no congestion bit in them, and the kernel would refuse all.
    if accepted.intersects(Offloads::TSO4 | Offloads::TSO6) {
        accepted
    } else {
        accepted - Offloads::TSO_ECN
    }
}

impl VirtioDevice for Net {
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

    /// `struct virtio_net_config`: mac, status, max_virtqueue_pairs, mtu.
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0; 12];
        config[..6].copy_from_slice(&self.mac.bytes());
        config[6..8].copy_from_slice(&self.status.load(Ordering::Relaxed).to_le_bytes());
        config[8..10].copy_from_slice(&1_u16.to_le_bytes());
        config[10..].copy_from_slice(&self.mtu.to_le_bytes());
        read_config_bytes(&config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation {
            memory,
            features,
            queues,
            config_change,
            last_resort,
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
        let link = Link {
            name: self.name.clone(),
            status: self.status.clone(),
            config_change,
        };
        // Without a tap device there is nothing for the kernel to do.
        let kernel = self.kernel.as_ref().filter(|_| link.is_up());
        let spawned = if let Some(kernel) = kernel {
            let watch = kernel
                .start(&memory, features, [&receive, &transmit], &self.tap)
                .map_err(|e| ActivateError::Host {
                    what: "vhost-net",
                    source: io::Error::other(e),
                })?;
            let tap = Some(self.tap.clone());
            Worker::spawn(
                ThreadKind::Device,
                &self.name,
                Watcher { watch, tap, link },
                last_resort,
            )
        } else {
            let merges = features & (1 << VIRTIO_NET_F_MRG_RXBUF) != 0;
            let tap = link.is_up().then(|| self.tap.clone());
            Worker::spawn(
                ThreadKind::Device,
                &self.name,
                Lanes {
                    memory,
                    tap,
                    link,
                    receiver: Lane::new(receive, |queue| Receiver::new(queue, merges)),
                    sender: Lane::new(transmit, Sender::new),
                    watching: false,
                },
                last_resort,
            )
        };
        match spawned {
            Ok(worker) => {
                self.worker = Some(worker);
                Ok(())
            }
            Err(source) => {
                self.reset();
                Err(ActivateError::Host {
                    what: "the thread of a network device",
                    source,
                })
            }
        }
    }

    fn reset(&mut self) {
        self.worker = None;
        if let Some(kernel) = &self.kernel {
            kernel.stop();
        }
    }
}

/// Both directions, on the device's thread.
struct Lanes {
    memory: GuestMemoryMmap,
    /// `None` once it is gone.
    tap: Option<Arc<Tap>>,
    link: Link,
    receiver: Lane<Receiver>,
    sender: Lane<Sender>,
    /// The tap device is in the epoll set: not while the driver has no buffers for what it has.
    watching: bool,
}

/// A queue; `None` once the driver has broken it.
struct Lane<Q> {
    queue: Option<Q>,
    kick: Arc<EventFd>,
    interrupt: Interrupt,
}

impl<Q> Lane<Q> {
    fn new(active: ActiveQueue, queue: impl FnOnce(virtio_queue::Queue) -> Q) -> Self {
        Self {
            queue: Some(queue(active.queue)),
            kick: active.kick,
            interrupt: active.interrupt,
        }
    }

    /// The end of a run: raises the interrupt, or gives up a queue that is broken.
    fn settle(&mut self, link: &Link, result: Result<(Pause, bool), FramesError>) -> Pause {
        match result {
            Ok((pause, wanted)) => {
                if wanted {
                    self.interrupt.raise();
                }
                pause
            }
            Err(e) => {
                // Once for each time that the driver sets the device up.
                guest_log!(
                    Info,
                    "{}: a queue is served no more: {}",
                    link.name,
                    error_line(&e)
                );
                self.queue = None;
                link.needs_reset();
                Pause::NoBuffer
            }
        }
    }
}

impl Lanes {
    fn send(&mut self) {
        let Some(sender) = &mut self.sender.queue else {
            return;
        };
        let result = sender.run(&self.memory, self.tap.as_deref());
        if let Pause::More = self.sender.settle(&self.link, result) {
            // After the other direction had its turn. Only a full counter fails, and then it comes anyway.
            let _ = self.sender.kick.write(1);
        }
    }

    fn receive(&mut self, ops: &mut EventOps) {
        let (Some(receiver), Some(tap)) = (&mut self.receiver.queue, self.tap.clone()) else {
            return;
        };
        let result = receiver.run(&self.memory, &tap);
        match self.receiver.settle(&self.link, result) {
            // The tap device is asked again as long as it has something.
            Pause::More | Pause::Idle => self.watch(&tap, true, ops),
            // Until the driver kicks.
            Pause::NoBuffer => self.watch(&tap, false, ops),
            Pause::Gone(e) => self.lose(&tap, &e, ops),
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
                "{}: the tap device cannot be watched: {}",
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

impl MutEventSubscriber for Lanes {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        let fd = events.fd();
        if fd == self.sender.kick.as_raw_fd() {
            let _ = self.sender.kick.read();
            self.send();
        } else {
            if fd == self.receiver.kick.as_raw_fd() {
                let _ = self.receiver.kick.read();
            }
            self.receive(ops);
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        for kick in [&self.receiver.kick, &self.sender.kick] {
            if let Err(e) = ops.add(Events::new(&**kick, EventSet::IN)) {
                guest_log!(
                    Error,
                    "{}: a queue is not served: {}",
                    self.link.name,
                    error_line(&e)
                );
            }
        }
        self.send();
        self.receive(ops);
    }
}

#[cfg(test)]
mod tests {
    use virtio_queue::QueueT;

    use super::*;
    use crate::serve::testing::{Driver, activation, memory};

    /// As Linux takes them (`set_offload` in drivers/net/tun.c): what is left over refuses all.
    fn linux(offloads: Offloads) -> bool {
        let mut known = Offloads::CSUM | Offloads::TSO4 | Offloads::TSO6 | Offloads::UFO;
        if offloads.intersects(Offloads::TSO4 | Offloads::TSO6) {
            known |= Offloads::TSO_ECN;
        }
        offloads.contains(Offloads::CSUM) && known.contains(offloads)
    }

    #[test]
    fn a_guest_is_offered_all_that_the_kernel_has() {
        let all = offered(linux);
        for (_, bit) in OFFLOADS {
            assert_ne!(all & (1 << bit), 0, "bit {bit}");
        }
        // A kernel without one of them still has the others.
        let some = offered(|offloads| linux(offloads) && !offloads.contains(Offloads::UFO));
        assert_eq!(some, all & !(1 << VIRTIO_NET_F_GUEST_UFO));
    }

    #[test]
    fn whatever_a_driver_accepts_is_taken_by_the_kernel() {
        for features in 0..1 << OFFLOADS.len() {
            let bits = OFFLOADS.iter().enumerate();
            let features = bits
                .filter(|(n, _)| features & (1 << n) != 0)
                .fold(1u64 << VIRTIO_NET_F_GUEST_CSUM, |all, (_, (_, bit))| {
                    all | 1 << bit
                });
            assert!(linux(offloads(features)), "{features:#x}");
        }
        assert_eq!(offloads(0), Offloads::empty());
    }

    #[test]
    fn a_broken_ring_asks_for_a_reset() {
        let memory = memory();
        let driver = Driver::new(&memory, 16);
        let (activation, seen) = activation(&memory, vec![]);
        let link = Link {
            name: "net7".into(),
            status: Arc::default(),
            config_change: activation.config_change,
        };
        let mut lane = Lane::new(driver.active(), |queue| queue.size());
        let pause = lane.settle(&link, Err(FramesError::Head(16)));
        assert!(matches!(pause, Pause::NoBuffer) && lane.queue.is_none());
        assert!(seen.needs_reset.load(Ordering::Acquire));
        assert_eq!(seen.changed.read().unwrap(), 1);
    }
}
