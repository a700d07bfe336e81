//! The virtio devices of a machine, as the arguments of `perfvisor run` ask for them.

use virtio_devices::device::VirtioDevice;

use crate::cli::RunArgs;

/// Why a device cannot be had: bad input of the user.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {}

/// The devices that `args` ask for, in the order in which the guest finds them.
///
/// # Errors
/// [`DeviceError`]; nothing of the guest's has been touched.
pub fn wanted(_args: &RunArgs) -> Result<Vec<Box<dyn VirtioDevice>>, DeviceError> {
    Ok(Vec::new())
}
