//! PCI bus with a host bridge and up to 31 other devices, each with a single PCI function. Handles
//! configuration accesses through I/O ports (mechanism 1 of PCI 3.0, 3.2.2.3.2) and routes memory
//! accesses to BARs.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use snapshot::state::SavedDevice;
use thiserror::Error;
use vm_memory::GuestMemoryMmap;

use super::function::{BAR_BYTES, MAX_QUEUES, PciFunction, vector_count};
use super::machine::PciBackend;
use super::saved::RestoreDeviceError;
use super::space::{PciConfigSpace, PciIdentity};
use crate::device::VirtioDevice;
use crate::worker;

/// First of the configuration I/O ports: four address ports, followed by four data ports.
pub const CONFIG_PORT: u16 = 0xCF8;
/// Number of configuration I/O ports.
pub const CONFIG_PORTS: u8 = 8;
/// Maximum number of devices in addition to the host bridge. The bus has 32 device numbers.
pub const MAX_DEVICES: usize = 31;

/// First of the four data ports.
const DATA_PORT: u16 = 0xCFC;
/// Enable bit of the address register. While it is clear, the data ports access no device.
const ADDRESS_ENABLE: u32 = 1 << 31;
/// Guest-writable bits of the configuration address register.
const ADDRESS_WRITABLE: u32 = 0x80FF_FFFC;
/// Value of [`PciSlot::base`] for a function that decodes no memory.
const NO_BASE: u64 = u64::MAX;

/// PCI identity of QEMU's generic host bridge, for which kernels need no driver and have no quirks.
const BRIDGE: PciIdentity = PciIdentity {
    vendor: 0x1B36,
    device: 0x0008,
    revision: 0,
    class: [0x06, 0x00, 0x00],
};

/// Error returned when a bus cannot be created.
#[derive(Debug, Error)]
pub enum VirtioBusError {
    /// The number of devices on the bus exceeds [`MAX_DEVICES`].
    #[error("{0} virtio devices: must be at most {MAX_DEVICES}; omit some")]
    TooManyDevices(usize),
    /// A device has more queues than a function can have interrupts.
    #[error("{name}: {queues} queues; must be at most {MAX_QUEUES}")]
    TooManyQueues {
        /// Name of the device with too many queues.
        name: String,
        /// Number of queues of the device.
        queues: usize,
    },
    /// The eventfds of a device could not be created.
    #[error("cannot create an eventfd for {name}; raise the limit of open files (ulimit -n)")]
    Eventfd {
        /// Name of the device that needs an eventfd.
        name: String,
        /// Error returned by the host's kernel.
        #[source]
        source: io::Error,
    },
}

/// A device number of the bus and its PCI function.
struct PciSlot {
    function: Mutex<PciFunction>,
    /// Base address of the memory that the function decodes, or [`NO_BASE`]. Updated after each
    /// configuration access.
    base: AtomicU64,
}

impl PciSlot {
    fn lock(&self) -> MutexGuard<'_, PciFunction> {
        self.function.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Updates [`PciSlot::base`]. Must be called after any change of the configuration space,
    /// before the function's lock is released.
    fn update_base(&self, function: &PciFunction) {
        self.base
            .store(function.decodes().unwrap_or(NO_BASE), Ordering::Release);
    }
}

/// The PCI bus, shared by all vCPUs.
pub struct PciBus {
    bridge: PciConfigSpace,
    places: Vec<PciSlot>,
    address: AtomicU32,
}

impl PciBus {
    /// Creates a bus with `devices` at device numbers 1 and up. Their BARs are initially in the
    /// address range `window`.
    ///
    /// # Errors
    /// Returns a [`VirtioBusError`] if there are too many devices or queues, or if no eventfd can
    /// be created.
    pub fn new(
        devices: Vec<Box<dyn VirtioDevice>>,
        memory: &GuestMemoryMmap,
        window: Range<u32>,
        machine: &Arc<dyn PciBackend>,
    ) -> Result<Self, VirtioBusError> {
        worker::record_worker_cpus();
        let room = usize::try_from((window.end - window.start) / BAR_BYTES).unwrap_or(0);
        if devices.len() > MAX_DEVICES.min(room) {
            return Err(VirtioBusError::TooManyDevices(devices.len()));
        }
        let mut home = window.start;
        let mut line = 0;
        let mut places = Vec::new();
        for device in devices {
            let name = device.name().to_owned();
            let queues = device.queue_max_sizes().len();
            if queues > MAX_QUEUES {
                return Err(VirtioBusError::TooManyQueues { name, queues });
            }
            let function = PciFunction::new(device, memory.clone(), machine.clone(), home, line)
                .map_err(|source| VirtioBusError::Eventfd { name, source })?;
            places.push(PciSlot {
                function: Mutex::new(function),
                base: AtomicU64::new(NO_BASE),
            });
            home += BAR_BYTES;
            line += u32::from(vector_count(queues));
        }
        Ok(Self {
            bridge: PciConfigSpace::new(BRIDGE),
            places,
            address: AtomicU32::new(0),
        })
    }

    /// Handles a guest read from the configuration I/O port `port`.
    pub fn read_port(&self, port: u16, data: &mut [u8]) {
        data.fill(0xFF);
        if port == CONFIG_PORT && data.len() == 4 {
            data.copy_from_slice(&self.address.load(Ordering::Relaxed).to_le_bytes());
        } else if let Some((place, at)) = self.selected(port) {
            let count = data.len().min(ports_from(port));
            match place {
                ConfigTarget::Bridge => self.bridge.read(at, &mut data[..count]),
                ConfigTarget::PciSlot(place) => place.lock().read_config(at, &mut data[..count]),
            }
        }
    }

    /// Handles a guest write to the configuration I/O port `port`.
    pub fn write_port(&self, port: u16, data: &[u8]) {
        if port == CONFIG_PORT {
            if let Ok(address) = <[u8; 4]>::try_from(data) {
                self.address
                    .store(u32::from_le_bytes(address) & ADDRESS_WRITABLE, Ordering::Relaxed);
            }
        } else if let Some((ConfigTarget::PciSlot(place), at)) = self.selected(port) {
            let count = data.len().min(ports_from(port));
            let mut function = place.lock();
            function.write_config(at, &data[..count]);
            place.update_base(&function);
        }
    }

    /// Handles a guest read of memory at `address`. Returns `false` if no function decodes the
    /// address.
    pub fn read_memory(&self, address: u64, data: &mut [u8]) -> bool {
        let Some((place, offset)) = self.decoder(address) else {
            return false;
        };
        place.lock().read_bar(offset, data);
        true
    }

    /// Handles a guest write to memory at `address`. Returns `false` if no function decodes the
    /// address.
    pub fn write_memory(&self, address: u64, data: &[u8]) -> bool {
        let Some((place, offset)) = self.decoder(address) else {
            return false;
        };
        place.lock().write_bar(offset, data);
        true
    }

    /// Returns the number of devices, without the host bridge.
    pub fn device_count(&self) -> usize {
        self.places.len()
    }

    /// Returns the value of the configuration address register.
    pub fn address(&self) -> u32 {
        self.address.load(Ordering::Relaxed)
    }

    /// Returns the names of the devices that a snapshot cannot include.
    pub fn unsupported_in_snapshot(&self) -> Vec<&'static str> {
        let names = self.places.iter();
        names
            .filter_map(|place| place.lock().device.unsupported_in_snapshot())
            .collect()
    }

    /// Stops the threads of all devices for a snapshot. No vCPU may run before [`PciBus::resume`].
    pub fn quiesce(&self) {
        for place in &self.places {
            place.lock().quiesce();
        }
    }

    /// Starts the devices that [`PciBus::quiesce`] has stopped, or that [`PciBus::restore`] has
    /// restored.
    pub fn resume(&self) {
        for place in &self.places {
            place.lock().resume();
        }
    }

    /// Allows the destination process of a migration to open the host resources of all devices,
    /// which must be stopped.
    ///
    /// # Errors
    /// Returns the error of the host.
    pub fn share(&self) -> io::Result<()> {
        let mut places = self.places.iter();
        places.try_for_each(|place| place.lock().device.share())
    }

    /// Acquires exclusive access to the host resources of all devices. Returns the names of the
    /// devices whose resources another process is using.
    ///
    /// # Errors
    /// Returns the error of the host.
    pub fn claim(&self) -> io::Result<Vec<String>> {
        let mut used = Vec::new();
        for place in &self.places {
            let mut function = place.lock();
            if !function.device.claim()? {
                used.push(function.device.name().to_owned());
            }
        }
        Ok(used)
    }

    /// Releases the host resources of all devices, which must be stopped. They must not be started
    /// again in this process before [`PciBus::claim`].
    ///
    /// # Errors
    /// Returns the error of the host.
    pub fn release(&self) -> io::Result<()> {
        let mut places = self.places.iter();
        places.try_for_each(|place| place.lock().device.release())
    }

    /// Returns the state of all devices, which must be stopped, for a snapshot.
    pub fn save(&self) -> Vec<SavedDevice> {
        self.places.iter().map(|place| place.lock().save()).collect()
    }

    /// Restores the state of all devices, which must be unused. Call [`PciBus::resume`] to start
    /// them.
    ///
    /// # Errors
    /// Returns a [`RestoreDeviceError`] if a device differs from the saved one.
    pub fn restore(&self, address: u32, devices: &[SavedDevice]) -> Result<(), RestoreDeviceError> {
        self.address.store(address & ADDRESS_WRITABLE, Ordering::Relaxed);
        for (place, saved) in self.places.iter().zip(devices) {
            let mut function = place.lock();
            function.restore(saved)?;
            place.update_base(&function);
        }
        Ok(())
    }

    /// Stops all devices and restores the power-on values of all registers.
    pub fn reset(&self) {
        self.address.store(0, Ordering::Relaxed);
        for place in &self.places {
            let mut function = place.lock();
            function.reset();
            place.update_base(&function);
        }
    }

    /// Returns the function that the address register selects, and the offset in its configuration
    /// space for an access to data port `port`. Returns `None` if no device responds.
    fn selected(&self, port: u16) -> Option<(ConfigTarget<'_>, usize)> {
        let inside = port.checked_sub(DATA_PORT).filter(|inside| *inside < 4)?;
        let address = self.address.load(Ordering::Relaxed);
        // Ignore other addresses, because only bus 0 and function 0 exist.
        if address & ADDRESS_ENABLE == 0 || address & 0x00FF_0700 != 0 {
            return None;
        }
        let place = usize::try_from(address >> 11 & 0x1F).ok()?;
        let at = usize::try_from(address & 0xFC).ok()? + usize::from(inside);
        let selected = match place.checked_sub(1) {
            None => ConfigTarget::Bridge,
            Some(n) => ConfigTarget::PciSlot(self.places.get(n)?),
        };
        Some((selected, at))
    }

    /// Returns the function whose BAR contains `address`, and the offset in the BAR.
    fn decoder(&self, address: u64) -> Option<(&PciSlot, u64)> {
        self.places.iter().find_map(|place| {
            let base = place.base.load(Ordering::Acquire);
            let offset = address.checked_sub(base)?;
            (base != NO_BASE && offset < u64::from(BAR_BYTES)).then_some((place, offset))
        })
    }
}

/// Returns the number of configuration ports from `port` to the last one, inclusive.
fn ports_from(port: u16) -> usize {
    usize::from(CONFIG_PORT + u16::from(CONFIG_PORTS) - port)
}

/// The PCI function that a configuration access selects.
enum ConfigTarget<'a> {
    Bridge,
    PciSlot(&'a PciSlot),
}

#[cfg(test)]
mod tests;
