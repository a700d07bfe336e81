//! Saves and restores a virtio device for a snapshot.
//!
//! For a snapshot, the device's thread is stopped after it has completed the chain in progress. A
//! device returns chains in the order in which it takes them. The index of the used ring in guest
//! memory is therefore the device's position, from which the device continues in the source VM and
//! in the restored VM. A chain that it had taken but not returned is taken again.
//!
//! After resuming, the device and the driver are notified once for each queue. The driver may have
//! added chains while the device was stopped, or may wait for an interrupt whose condition
//! (`VIRTIO_F_EVENT_IDX`) the device no longer knows.

use snapshot::state::SavedDevice;

use super::function::{PciFunction, QueueStart};
use super::space::SPACE_BYTES;
use crate::device::{ActivateError, DeviceInterrupt};

/// Reason why a device cannot be restored from a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum RestoreDeviceError {
    /// The restored VM has a different device at this device number.
    #[error("the snapshot has {saved} where this machine has {here}; give the devices in the same order")]
    OtherDevice {
        /// Name of the saved device.
        saved: String,
        /// Name of the device in the restored VM.
        here: String,
    },
    /// The device has different properties than the saved one, such as another size.
    #[error("{0} is not the one of the snapshot: its size, serial number, address or access differs")]
    OtherIdentity(String),
    /// The saved registers have values that a driver cannot write, or the saved device-specific
    /// state is invalid.
    #[error("the saved registers of {0} are not ones that it can have")]
    Registers(String),
    /// The device cannot use the saved queues.
    #[error("{0} cannot work with its saved queues")]
    Queues(String, #[source] ActivateError),
}

impl PciFunction {
    /// Stops the device's thread for a snapshot.
    pub(super) fn quiesce(&mut self) {
        if !self.quiesced && self.active.is_some() {
            self.device.quiesce();
            self.quiesced = true;
        }
    }

    /// Starts the device after [`PciFunction::quiesce`] or [`PciFunction::restore`], and notifies
    /// the device and the driver once for each queue.
    pub(super) fn resume(&mut self) {
        if !std::mem::take(&mut self.quiesced) || self.common.needs_reset() {
            return;
        }
        self.start_device(QueueStart::UsedRing);
        for &queue in self.active.iter().flatten() {
            let _ = self.kicks[queue].write(1);
            let vector = self.common.queues[queue].vector;
            DeviceInterrupt::new(self.msix.vector(vector)).raise();
        }
    }

    /// Returns the state of the device, which must be stopped, for a snapshot.
    pub(super) fn save(&self) -> SavedDevice {
        let mut space = vec![0; SPACE_BYTES];
        self.space.read(0, &mut space);
        let mut saved = SavedDevice {
            id: self.device.id(),
            name: self.device.name().to_owned(),
            config: self.device.identity().into(),
            state: self.device.save_state().into(),
            config_space: space.into(),
            active: self.active.is_some(),
            ..SavedDevice::default()
        };
        self.common.save(&mut saved);
        self.msix.save(&mut saved);
        saved
    }

    /// Restores the state of the device, which must be unused. Call [`PciFunction::resume`] to
    /// start it.
    ///
    /// # Errors
    /// Returns a [`RestoreDeviceError`] if the device differs, or if its registers or queues are
    /// invalid.
    pub(super) fn restore(&mut self, saved: &SavedDevice) -> Result<(), RestoreDeviceError> {
        let name = self.device.name().to_owned();
        if saved.id != self.device.id() || saved.name != name {
            return Err(RestoreDeviceError::OtherDevice {
                // Make the name printable, because it comes from the snapshot and is part of a
                // message.
                saved: saved
                    .name
                    .chars()
                    .filter(char::is_ascii_graphic)
                    .take(15)
                    .collect(),
                here: name,
            });
        }
        if saved.config.0 != self.device.identity() || saved.offered != self.common.offered() {
            return Err(RestoreDeviceError::OtherIdentity(name));
        }
        let active = saved.active;
        if saved.config_space.0.len() != SPACE_BYTES
            || !self.common.restore(saved)
            || active != self.common.is_active() && !self.common.needs_reset()
            || !self.device.restore_state(&saved.state.0)
        {
            return Err(RestoreDeviceError::Registers(name));
        }
        // The write changes only bits that a driver can write.
        self.space.write(0, &saved.config_space.0);
        if !self.msix.restore(saved) {
            return Err(RestoreDeviceError::Registers(name));
        }
        if active {
            let enabled = self.common.queues.iter().enumerate();
            let enabled = enabled.filter_map(|(n, queue)| queue.enabled.then_some(n));
            self.active = Some(enabled.collect());
            self.quiesced = true;
            if !self.common.needs_reset() {
                self.activation(QueueStart::UsedRing)
                    .map_err(|e| RestoreDeviceError::Queues(name, e))?;
            }
        }
        self.update_doorbells();
        Ok(())
    }
}
