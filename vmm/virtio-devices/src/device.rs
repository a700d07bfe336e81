//! The interface between a virtio device and its transport.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use thiserror::Error;
use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

use crate::rate_limiter::RateLimiter;

/// Error returned when a device cannot be activated. The transport then logs the error and sets
/// DEVICE_NEEDS_RESET.
#[derive(Debug, Error)]
pub enum ActivateError {
    /// The host failed to provide a resource that the device's thread needs.
    #[error("{what} failed")]
    Host {
        /// Name of the operation that failed.
        what: &'static str,
        /// Error returned by the host's kernel.
        #[source]
        source: io::Error,
    },
    /// The driver configured the device in an unsupported way, which the string describes.
    #[error("the driver requested an unsupported feature: {0}")]
    Driver(&'static str),
}

/// An interrupt of a device: the MSI-X vector that the guest has assigned to a queue or to
/// configuration changes. If the guest has assigned none, raising the interrupt has no effect.
#[derive(Clone, Debug, Default)]
pub struct DeviceInterrupt(Option<Arc<EventFd>>);

impl DeviceInterrupt {
    /// Creates an interrupt that is raised by writing to `vector`. The machine attaches the eventfd
    /// to KVM.
    pub fn new(vector: Option<Arc<EventFd>>) -> Self {
        Self(vector)
    }

    /// Raises the interrupt. Multiple calls are coalesced until the guest handles it.
    pub fn raise(&self) {
        if let Some(vector) = &self.0 {
            // The write fails only if the counter is full, in which case an interrupt is already
            // pending.
            let _ = vector.write(1);
        }
    }

    /// Returns the eventfd that raises the interrupt, for backends in the kernel or in another
    /// process.
    pub fn eventfd(&self) -> Option<&Arc<EventFd>> {
        self.0.as_ref()
    }
}

/// Notifies the driver that the device configuration has changed (virtio 1.2, 2.5), or that the
/// device needs a reset (2.1.2).
#[derive(Clone, Debug, Default)]
pub struct ConfigChangeNotifier {
    generation: Arc<AtomicU8>,
    broken: Arc<AtomicBool>,
    interrupt: DeviceInterrupt,
}

impl ConfigChangeNotifier {
    /// Creates a notifier. A configuration change increments `generation`, which the driver reads
    /// before and after the configuration to detect a concurrent change. `broken` is set to report
    /// DEVICE_NEEDS_RESET.
    pub fn new(generation: Arc<AtomicU8>, broken: Arc<AtomicBool>, interrupt: DeviceInterrupt) -> Self {
        Self {
            generation,
            broken,
            interrupt,
        }
    }

    /// Sets DEVICE_NEEDS_RESET and notifies the driver. The device is unusable until the driver
    /// resets it.
    pub fn needs_reset(&self) {
        self.broken.store(true, Ordering::Release);
        self.notify();
    }

    /// Increments the configuration generation and raises the configuration-change interrupt. The
    /// caller must have changed the configuration before.
    pub fn notify(&self) {
        self.generation.fetch_add(1, Ordering::Release);
        self.interrupt.raise();
    }
}

/// A callback that terminates the machine when a device thread ends unexpectedly. The guest would
/// otherwise wait forever for the device.
#[derive(Clone, Default)]
pub struct DeviceFailureCallback(Option<Arc<dyn Fn() + Send + Sync>>);

impl DeviceFailureCallback {
    /// Creates a callback that calls `end`. Device threads invoke it, so `end` must not wait for
    /// them.
    pub fn new(end: Arc<dyn Fn() + Send + Sync>) -> Self {
        Self(Some(end))
    }

    /// Calls the function that terminates the machine.
    pub fn take(&self) {
        if let Some(end) = &self.0 {
            end();
        }
    }
}

impl fmt::Debug for DeviceFailureCallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LastResort").finish_non_exhaustive()
    }
}

/// A queue that the driver has configured and enabled.
#[derive(Debug)]
pub struct ActiveQueue {
    /// The virtqueue, validated with `Queue::is_valid`.
    pub queue: Queue,
    /// Eventfd that is signalled when the driver adds buffers to the queue.
    pub kick: Arc<EventFd>,
    /// Interrupt to raise after the device has used buffers, unless `QueueT::needs_notification`
    /// returns `false`.
    pub interrupt: DeviceInterrupt,
}

/// Resources that the transport passes to a device when the driver sets DRIVER_OK.
#[derive(Debug)]
pub struct DeviceActivation {
    /// Guest memory. The guest may modify its contents at any time.
    pub memory: GuestMemoryMmap,
    /// Feature bits that the driver has accepted, a subset of the offered bits.
    pub features: u64,
    /// The device's queues, one element per entry of [`VirtioDevice::queue_max_sizes`]. `None` for
    /// a queue that the driver has not enabled.
    pub queues: Vec<Option<ActiveQueue>>,
    /// `true` if the device continues after a snapshot with a driver that was already using it.
    pub resumed: bool,
    /// Notifier for changes of the device configuration.
    pub config_change: ConfigChangeNotifier,
    /// Callback to pass to [`crate::worker::DeviceWorker::spawn`], which calls it when the device's
    /// thread ends unexpectedly.
    pub fatal_error_callback: DeviceFailureCallback,
}

/// A virtio device. The transport calls all methods with the device's lock held.
pub trait VirtioDevice: Send {
    /// Returns the virtio device ID (virtio 1.2, section 5), such as
    /// `virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK`.
    fn id(&self) -> u32;

    /// Returns the name of this device for messages and threads, such as `disk0`, with at most 15
    /// bytes.
    fn name(&self) -> &str;

    /// Returns the feature bits specific to this device. The transport adds VERSION_1, EVENT_IDX
    /// and INDIRECT_DESC.
    fn features(&self) -> u64;

    /// Returns the maximum size of each queue, in entries. Sizes are powers of two.
    fn queue_max_sizes(&self) -> &[u16];

    /// Handles a driver read of the device configuration. Bytes beyond its end read as 0.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Handles a driver write to the device configuration. Does nothing by default.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// Starts the device's thread after the driver has set DRIVER_OK.
    ///
    /// # Errors
    /// Returns an [`ActivateError`], in which case no part of the device is running.
    fn activate(&mut self, activation: DeviceActivation) -> Result<(), ActivateError>;

    /// Stops the device's thread and resets the device, at the driver's request or at machine
    /// shutdown. The device can be activated again.
    fn reset(&mut self);

    /// Stops the device's thread for a snapshot. The transport activates the device again
    /// afterwards.
    fn quiesce(&mut self) {
        self.reset();
    }

    /// Allows the destination process of a migration to open the host resources of this device. The
    /// device must be stopped.
    ///
    /// # Errors
    /// Returns the error of the host.
    fn share(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Reacquires exclusive access to the host resources of this device. Must be called before the
    /// device starts. Returns `false` if another process is using the resources.
    ///
    /// # Errors
    /// Returns the error of the host.
    fn claim(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    /// Releases the host resources of this device. The device must be stopped, and must not be
    /// started again in this process before [`VirtioDevice::claim`].
    ///
    /// # Errors
    /// Returns the error of the host.
    fn release(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Returns the name of this device for the error message of a rejected snapshot, or `None` if a
    /// snapshot may include the device.
    ///
    /// For a snapshot, the transport quiesces the device. It then activates the device again, with
    /// each queue at the position of its used ring. A device may be included in a snapshot if it
    /// returns chains in the order in which it takes them, and if the driver depends on no state of
    /// the device other than its queues and [`VirtioDevice::save_state`].
    fn unsupported_in_snapshot(&self) -> Option<&'static str> {
        Some("a device of this kind")
    }

    /// Returns the rate limiters of this device with their names. The name of a limiter is the
    /// device name, followed by the direction if each direction has its own limiter.
    fn rate_limiters(&self) -> Vec<(String, Arc<RateLimiter>)> {
        Vec::new()
    }

    /// Returns the properties of this device that must be the same in the VM that restores a
    /// snapshot.
    fn identity(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Returns the device-specific state for a snapshot. The transport saves the registers and
    /// queues.
    fn save_state(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Restores a state returned by [`VirtioDevice::save_state`]. Returns `false` if the state is
    /// invalid for this device.
    fn restore_state(&mut self, state: &[u8]) -> bool {
        state.is_empty()
    }
}

/// Copies bytes of a device configuration from `config` at `offset` to `data`. Bytes beyond the end
/// read as 0.
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
    fn config_read_beyond_end_is_zero() {
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
    fn config_change_increments_generation() {
        let vector = Arc::new(EventFd::new(0).unwrap());
        let generation = Arc::new(AtomicU8::new(255));
        let broken = Arc::new(AtomicBool::new(false));
        let interrupt = DeviceInterrupt::new(Some(vector.clone()));
        let change = ConfigChangeNotifier::new(generation.clone(), broken.clone(), interrupt);
        change.notify();
        assert_eq!(generation.load(Ordering::Acquire), 0);
        assert_eq!(vector.read().unwrap(), 1);
        assert!(!broken.load(Ordering::Acquire));
        change.needs_reset();
        assert!(broken.load(Ordering::Acquire));
        assert_eq!(vector.read().unwrap(), 1, "and the driver is told");
    }
}
