//! What a virtio device is to its transport.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use thiserror::Error;
use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

/// Why a device could not start to serve its driver. The transport sets DEVICE_NEEDS_RESET, and says it.
#[derive(Debug, Error)]
pub enum ActivateError {
    /// The host refused what the device's thread needs.
    #[error("{what} failed")]
    Host {
        /// What was tried.
        what: &'static str,
        /// What the host said.
        #[source]
        source: io::Error,
    },
    /// The driver set the device up in a way the device cannot serve.
    #[error("the driver asks for what this device has not: {0}")]
    Driver(&'static str),
}

/// Raises one interrupt of the device: a vector of MSI-X that the guest has given to a queue or to changes of
/// the configuration. Where the guest gave none, nothing is raised.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Option<Arc<EventFd>>);

impl Interrupt {
    /// An interrupt raised by writing to `vector`, which the machine leads to KVM.
    pub fn new(vector: Option<Arc<EventFd>>) -> Self {
        Self(vector)
    }

    /// Raises it. More than one before the guest takes it are one.
    pub fn raise(&self) {
        if let Some(vector) = &self.0 {
            // It fails when the counter is full: then an interrupt is pending already.
            let _ = vector.write(1);
        }
    }

    /// The descriptor to raise it by, for back ends in the kernel or in another process.
    pub fn eventfd(&self) -> Option<&Arc<EventFd>> {
        self.0.as_ref()
    }
}

/// Tells the driver that the device's configuration has changed (virtio 1.2, 2.5), or that the device is to
/// be reset (2.1.2).
#[derive(Clone, Debug, Default)]
pub struct ConfigChange {
    generation: Arc<AtomicU8>,
    broken: Arc<AtomicBool>,
    interrupt: Interrupt,
}

impl ConfigChange {
    /// Of a transport whose driver reads `generation` around each look at the configuration, and finds
    /// DEVICE_NEEDS_RESET in the status while `broken` is set.
    pub fn new(generation: Arc<AtomicU8>, broken: Arc<AtomicBool>, interrupt: Interrupt) -> Self {
        Self {
            generation,
            broken,
            interrupt,
        }
    }

    /// The device cannot go on before the driver has reset it: sets DEVICE_NEEDS_RESET, and tells.
    pub fn needs_reset(&self) {
        self.broken.store(true, Ordering::Release);
        self.tell();
    }

    /// To be called after the configuration has changed.
    pub fn tell(&self) {
        self.generation.fetch_add(1, Ordering::Release);
        self.interrupt.raise();
    }
}

/// Ends the machine, for a device's thread that ends although nobody has stopped it: a guest that waits for a
/// device for ever helps nobody.
#[derive(Clone, Default)]
pub struct LastResort(Option<Arc<dyn Fn() + Send + Sync>>);

impl LastResort {
    /// `end` is called by threads of devices, and must not wait for them.
    pub fn new(end: Arc<dyn Fn() + Send + Sync>) -> Self {
        Self(Some(end))
    }

    /// Ends the machine.
    pub fn take(&self) {
        if let Some(end) = &self.0 {
            end();
        }
    }
}

impl fmt::Debug for LastResort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LastResort").finish_non_exhaustive()
    }
}

/// A queue that the driver has set up and enabled.
#[derive(Debug)]
pub struct ActiveQueue {
    /// The queue, ready and checked (`Queue::is_valid`).
    pub queue: Queue,
    /// Signalled when the driver has put buffers in.
    pub kick: Arc<EventFd>,
    /// To be raised when buffers were used and the driver wants to know
    /// (`QueueT::needs_notification`).
    pub interrupt: Interrupt,
}

/// What a device gets when its driver is ready.
#[derive(Debug)]
pub struct Activation {
    /// The guest's memory. Everything in it may change at any time.
    pub memory: GuestMemoryMmap,
    /// Feature bits that the driver has accepted, all of them offered.
    pub features: u64,
    /// One for each of [`VirtioDevice::queue_max_sizes`]; `None`: the driver left it disabled.
    pub queues: Vec<Option<ActiveQueue>>,
    /// To tell of a new configuration.
    pub config_change: ConfigChange,
    /// For [`crate::worker::Worker::spawn`].
    pub last_resort: LastResort,
}

/// A virtio device behind a transport, which calls it with the device's lock held.
pub trait VirtioDevice: Send {
    /// The device's number (virtio 1.2, section 5): `virtio_bindings::virtio_ids`.
    fn id(&self) -> u32;

    /// Name for messages and threads, such as `disk0`; at most 15 bytes.
    fn name(&self) -> &str;

    /// Feature bits of the device. The transport adds those of the transport and of queues
    /// (VERSION_1, EVENT_IDX, INDIRECT_DESC).
    fn features(&self) -> u64;

    /// The most entries of each queue, powers of two.
    fn queue_max_sizes(&self) -> &[u16];

    /// Reads the device's configuration. What lies behind its end reads 0.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes the device's configuration, where it can be written.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// The driver is ready (DRIVER_OK): the device starts its thread and returns.
    ///
    /// # Errors
    /// [`ActivateError`]; nothing of the device runs then.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;

    /// The driver resets the device, or the machine ends: the device's thread is stopped before this returns,
    /// and the device can be activated again.
    fn reset(&mut self);
}

/// Fills `data` from the configuration space `config` at `offset`; zeros behind its end.
pub fn read_config_bytes(config: &[u8], offset: u64, data: &mut [u8]) {
    data.fill(0);
    let rest = usize::try_from(offset)
        .ok()
        .and_then(|offset| config.get(offset..))
        .unwrap_or_default();
    let count = rest.len().min(data.len());
    data[..count].copy_from_slice(&rest[..count]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_of_the_configuration_ends_where_it_ends() {
        let mut data = [0xff; 4];
        read_config_bytes(&[1, 2, 3], 1, &mut data);
        assert_eq!(data, [2, 3, 0, 0]);
        for far in [3, 4, u64::MAX] {
            let mut data = [0xff; 2];
            read_config_bytes(&[1, 2, 3], far, &mut data);
            assert_eq!(data, [0, 0]);
        }
    }

    #[test]
    fn a_change_is_told_with_a_new_generation() {
        let vector = Arc::new(EventFd::new(0).unwrap());
        let generation = Arc::new(AtomicU8::new(255));
        let broken = Arc::new(AtomicBool::new(false));
        let interrupt = Interrupt::new(Some(vector.clone()));
        let change = ConfigChange::new(generation.clone(), broken.clone(), interrupt);
        change.tell();
        assert_eq!(generation.load(Ordering::Acquire), 0);
        assert_eq!(vector.read().unwrap(), 1);
        assert!(!broken.load(Ordering::Acquire));
        change.needs_reset();
        assert!(broken.load(Ordering::Acquire));
        assert_eq!(vector.read().unwrap(), 1, "and the driver is told");
    }
}
