//! Frame transfer by the host kernel (vhost-net), which owns the two queues, their eventfds and the
//! tap device. No VMM thread handles frames.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use diagnostics::{error_line, guest_log};
use event_manager::{EventOps, Events, MutEventSubscriber};
use nix::sys::socket::{AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, socket};
use nix::unistd::read;
use thiserror::Error;
use vhost::net::VhostNet;
use vhost::vhost_kern::net::Net as Device;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;
use virtio_queue::QueueT;
use vm_memory::{GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::link::LinkStatus;
use super::tap::Tap;
use crate::device::ActiveQueue;

/// Netlink multicast group of network device changes (`RTMGRP_LINK`).
const LINK_GROUP: u32 = 1;
/// Feature bits that vhost-net must support, because every tap device offers them to the driver.
const NEEDED: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_NET_F_MRG_RXBUF;

/// Error returned when vhost-net cannot be used.
#[derive(Debug, Error)]
pub enum VhostError {
    /// The vhost-net device cannot be opened.
    #[error("cannot open /dev/vhost-net; load the module vhost_net, or give this user access")]
    Open(#[source] vhost::Error),
    /// The kernel's vhost-net lacks required features.
    #[error("this host's vhost-net lacks required features (it has {0:#x})")]
    Old(u64),
    /// A call of vhost-net, which the string names, failed.
    #[error("vhost-net: {0} failed")]
    Call(&'static str, #[source] vhost::Error),
    /// The netlink socket that reports the removal of the tap device cannot be created.
    #[error("cannot watch changes of network devices")]
    VhostEventDescriptors(#[source] io::Error),
}

/// A vhost-net instance for one network device.
pub struct VhostNetBackend {
    device: Device<GuestMemoryAtomic<GuestMemoryMmap>>,
    memory: GuestMemoryAtomic<GuestMemoryMmap>,
    features: u64,
    /// Eventfd that vhost-net signals instead of an interrupt for a queue without an interrupt
    /// vector.
    unused_call: EventFd,
    /// For the receive and the transmit queue, `true` while vhost-net serves the queue.
    has: [AtomicBool; 2],
    /// Netlink socket that receives network device changes. Created together with the backend,
    /// because the vCPU thread that later starts the transfer may not create sockets.
    changes: OwnedFd,
}

impl VhostNetBackend {
    /// Opens a vhost-net instance.
    ///
    /// This must not be called on a vCPU thread, because the kernel's worker thread inherits the
    /// CPU affinity and control group of the calling thread.
    ///
    /// # Errors
    /// Returns a [`VhostError`] whose message includes the remedy.
    pub fn open() -> Result<Self, VhostError> {
        let memory = GuestMemoryAtomic::new(GuestMemoryMmap::default());
        let device = Device::new(memory.clone()).map_err(VhostError::Open)?;
        let features = device
            .get_features()
            .map_err(|e| VhostError::Call("VHOST_GET_FEATURES", e))?;
        if features & NEEDED != NEEDED {
            return Err(VhostError::Old(features));
        }
        device
            .set_owner()
            .map_err(|e| VhostError::Call("VHOST_SET_OWNER", e))?;
        let unused_call =
            EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(VhostError::VhostEventDescriptors)?;
        Ok(Self {
            device,
            memory,
            features,
            unused_call,
            has: Default::default(),
            changes: open_link_socket().map_err(VhostError::VhostEventDescriptors)?,
        })
    }

    /// Starts the transfer of frames between `tap` and the driver's queues. `features` are the
    /// feature bits that the driver accepted.
    ///
    /// # Errors
    /// Returns an error if a vhost-net call fails, in which case no frames are transferred.
    pub fn start(
        &self,
        memory: &GuestMemoryMmap,
        features: u64,
        queues: [&ActiveQueue; 2],
        tap: &Tap,
    ) -> Result<VhostEventDescriptors, VhostError> {
        let started = self.set_up(memory, features, queues, tap);
        if started.is_err() {
            self.stop();
        }
        started
    }

    fn set_up(
        &self,
        memory: &GuestMemoryMmap,
        features: u64,
        queues: [&ActiveQueue; 2],
        tap: &Tap,
    ) -> Result<VhostEventDescriptors, VhostError> {
        let call = |what| move |e| VhostError::Call(what, e);
        if let Ok(guard) = self.memory.lock() {
            guard.replace(memory.clone());
        }
        let device = &self.device;
        let accepted = features & self.features;
        device
            .set_features(accepted)
            .map_err(call("VHOST_SET_FEATURES"))?;
        let regions: Vec<_> = memory
            .iter()
            .map(|region| VhostUserMemoryRegionInfo {
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
                mmap_offset: 0,
                mmap_handle: -1,
            })
            .collect();
        device
            .set_mem_table(&regions)
            .map_err(call("VHOST_SET_MEM_TABLE"))?;
        let watch = VhostEventDescriptors::new(&self.changes)?;
        for (n, (active, broken)) in queues.into_iter().zip(&watch.broken).enumerate() {
            self.set_up_queue(n, active, broken)?;
        }
        for (n, active) in queues.into_iter().enumerate() {
            device
                .set_backend(n, Some(tap.file()))
                .map_err(call("VHOST_NET_SET_BACKEND"))?;
            if let Some(has) = self.has.get(n) {
                has.store(true, Ordering::Relaxed);
            }
            // Notify vhost-net of buffers that the driver added earlier. The write fails only if
            // the counter is full, in which case a notification is already pending.
            let _ = active.kick.write(1);
        }
        Ok(watch)
    }

    /// Passes the rings and eventfds of queue `n` to the kernel. `broken` signals that the kernel
    /// cannot use the rings.
    fn set_up_queue(&self, n: usize, active: &ActiveQueue, broken: &EventFd) -> Result<(), VhostError> {
        let call = |what| move |e| VhostError::Call(what, e);
        let (device, queue) = (&self.device, &active.queue);
        device
            .set_vring_num(n, queue.size())
            .map_err(call("VHOST_SET_VRING_NUM"))?;
        device
            .set_vring_base(n, queue.next_avail())
            .map_err(call("VHOST_SET_VRING_BASE"))?;
        let rings = VringConfigData {
            queue_max_size: queue.max_size(),
            queue_size: queue.size(),
            flags: 0,
            desc_table_addr: queue.desc_table(),
            used_ring_addr: queue.used_ring(),
            avail_ring_addr: queue.avail_ring(),
            log_addr: None,
        };
        device
            .set_vring_addr(n, &rings)
            .map_err(call("VHOST_SET_VRING_ADDR"))?;
        let vector = active
            .interrupt
            .eventfd()
            .map_or(&self.unused_call, |vector| vector);
        device
            .set_vring_call(n, vector)
            .map_err(call("VHOST_SET_VRING_CALL"))?;
        device
            .set_vring_err(n, broken)
            .map_err(call("VHOST_SET_VRING_ERR"))?;
        device
            .set_vring_kick(n, &active.kick)
            .map_err(call("VHOST_SET_VRING_KICK"))
    }

    /// Stops the transfer of frames. The kernel does not access guest memory after this returns.
    pub fn stop(&self) {
        let taken = self.has.iter().enumerate();
        for (n, _) in taken.filter(|(_, has)| has.swap(false, Ordering::Relaxed)) {
            if let Err(e) = self.device.set_backend(n, None) {
                guest_log!(Error, "cannot detach a queue from vhost-net: {}", error_line(&e));
            }
        }
    }
}

impl Drop for VhostNetBackend {
    fn drop(&mut self) {
        self.stop();
    }
}

impl std::fmt::Debug for VhostNetBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Kernel({:#x})", self.features)
    }
}

/// Creates a netlink socket that receives network device changes.
fn open_link_socket() -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let changes = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        flags,
        SockProtocol::NetlinkRoute,
    )?;
    bind(changes.as_raw_fd(), &NetlinkAddr::new(0, LINK_GROUP))?;
    Ok(changes)
}

/// Descriptors with which the device's thread detects that the tap device has been removed or that
/// the driver has broken a queue.
pub struct VhostEventDescriptors {
    /// Netlink socket that receives changes of all network devices.
    changes: OwnedFd,
    /// Eventfds that the kernel signals when the driver has broken a queue, one per queue.
    broken: [EventFd; 2],
}

impl VhostEventDescriptors {
    fn new(changes: &OwnedFd) -> Result<Self, VhostError> {
        let event = || EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(VhostError::VhostEventDescriptors);
        Ok(Self {
            changes: changes.try_clone().map_err(VhostError::VhostEventDescriptors)?,
            broken: [event()?, event()?],
        })
    }

    /// Discards all pending netlink messages, because only their arrival matters. Uses `read(2)`,
    /// because the seccomp filter of device threads forbids receiving from sockets (crate
    /// `sandbox`).
    fn drain(&self) {
        let mut message = [0; 64];
        // The number of reads is limited. Remaining messages cause another event.
        for _ in 0..1000 {
            match read(&self.changes, &mut message) {
                Err(e) if io::Error::from(e).kind() == ErrorKind::WouldBlock => return,
                _ => {}
            }
        }
    }
}

/// Event handler of the device's thread while vhost-net transfers the frames.
pub struct VhostHandler {
    /// Descriptors that the thread monitors.
    pub watch: VhostEventDescriptors,
    /// The tap device, or `None` after its removal.
    pub tap: Option<Arc<Tap>>,
    /// The link of the guest's network device.
    pub link: LinkStatus,
}

impl VhostHandler {
    fn check_tap(&mut self) {
        if let Some(tap) = &self.tap
            && let Err(e) = tap.check_exists()
        {
            self.link.lose(&e);
            self.tap = None;
        }
    }
}

impl MutEventSubscriber for VhostHandler {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        if events.fd() == self.watch.changes.as_raw_fd() {
            self.watch.drain();
            self.check_tap();
            return;
        }
        // Logged once per device activation, because the driver can trigger this with every
        // notification.
        for broken in &self.watch.broken {
            if events.fd() == broken.as_raw_fd() {
                guest_log!(Info, "{}: the driver broke a queue of vhost-net", self.link.name);
                let _ = ops.remove(Events::new(broken, EventSet::IN));
                self.link.needs_reset();
            }
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        let changes = self.watch.changes.as_fd();
        let mut added = ops.add(Events::new(&changes, EventSet::IN));
        for broken in &self.watch.broken {
            added = added.and(ops.add(Events::new(broken, EventSet::IN)));
        }
        if let Err(e) = added {
            guest_log!(
                Error,
                "{}: cannot watch for the removal of the tap device: {}",
                self.link.name,
                error_line(&e)
            );
        }
        // The tap device may have been removed before the socket was monitored.
        self.check_tap();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_vhost_net_error_names_module() {
        match VhostNetBackend::open() {
            Ok(_) => eprintln!("SKIP: this host has vhost-net"),
            Err(e) => {
                let line = error_line(&e);
                assert!(matches!(e, VhostError::Open(_)), "{line}");
                assert!(line.contains("load the module vhost_net"), "{line}");
            }
        }
    }

    #[test]
    fn empty_link_socket_is_drained_at_once() {
        let watch = VhostEventDescriptors::new(&open_link_socket().unwrap()).unwrap();
        watch.drain();
        let mut byte = [0; 1];
        let now = read(&watch.changes, &mut byte);
        assert_eq!(now, Err(nix::errno::Errno::EAGAIN));
    }
}
