//! A virtio device in a snapshot.
//!
//! For a snapshot, the device's thread is stopped after it has completed the chain in progress. A
//! device returns chains in the order in which it takes them, so the index of the used ring in
//! guest memory is the device's position. The device continues from this position, both in the
//! source VM and in the restored VM. A chain that the device had taken but not returned is taken
//! again.
//!
//! The driver may have added chains while the device was stopped. It may also be waiting for an
//! interrupt whose condition (`VIRTIO_F_EVENT_IDX`) the device no longer knows. The device and the
//! driver are therefore notified once for each queue.

use snapshot::state::SavedDevice;

use super::function::{PciFunction, QueueStart};
use super::space::SPACE_BYTES;
use crate::device::{ActivateError, DeviceInterrupt};

/// Reason why a device cannot be restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreDeviceError {
    /// The bus has a different device at this device number.
    #[error("the snapshot has {saved} where this machine has {here}; give the devices in the same order")]
    OtherDevice {
        /// Name of the saved device.
        saved: String,
        /// Name of the device on this machine.
        here: String,
    },
    /// The properties of the device differ, such as its size.
    #[error("{0} is not the one of the snapshot: its size, serial number, address or access differs")]
    OtherIdentity(String),
    /// A driver could not have written the register values, or the saved state is invalid for the
    /// device.
    #[error("the saved registers of {0} are not ones that it can have")]
    Registers(String),
    /// The saved queues are unusable.
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

    /// Starts the device again if [`PciFunction::quiesce`] has stopped it.
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

    /// Returns the state of the stopped device.
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

    /// Restores the registers of an unused device. [`PciFunction::resume`] starts it.
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
