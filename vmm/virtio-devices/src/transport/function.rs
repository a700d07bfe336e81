//! PCI function of a virtio device (virtio 1.2, 4.1.3 and 4.1.4).
//!
//! The function has one memory BAR:
//!
//! | offset | contents |
//! |---|---|
//! | 0x0000 | common configuration |
//! | 0x1000 | interrupt status, always 0 because only MSI-X is supported |
//! | 0x2000 | device configuration |
//! | 0x3000 | doorbells, four bytes for each queue |
//! | 0x4000 | MSI-X table |
//! | 0x5000 | MSI-X Pending Bit Array |

use std::io;
use std::sync::Arc;

use diagnostics::error_line;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::common::{CommonConfig, RegisterEffect};
use super::machine::PciBackend;
use super::msix::{self, MsixTable};
use super::space::{self, PciConfigSpace, PciIdentity};
use crate::device::{
    ActivateError, ActiveQueue, ConfigChangeNotifier, DeviceActivation, DeviceInterrupt, VirtioDevice,
};
use crate::serve::continue_at_used_ring;

/// Size of the memory BAR, in bytes.
pub(super) const BAR_BYTES: u32 = 0x8000;
const COMMON: u64 = 0x0000;
const ISR: u64 = 0x1000;
const DEVICE: u64 = 0x2000;
const DOORBELLS: u64 = 0x3000;
const TABLE: u64 = 0x4000;
const PENDING: u64 = 0x5000;
const REGION_BYTES: u32 = 0x1000;
/// Distance between the doorbells of two queues, in bytes.
const DOORBELL_BYTES: u32 = 4;

/// Maximum number of queues of a device. One interrupt per queue and one for configuration changes
/// fill the region of the MSI-X table.
pub(super) const MAX_QUEUES: usize = 255;

/// PCI vendor ID of virtio devices (virtio 1.2, 4.1.2).
const VENDOR: u16 = 0x1AF4;
const FIRST_DEVICE: u16 = 0x1040;
/// Revision ID of a non-transitional device.
const REVISION: u8 = 1;

// IDs of the PCI capabilities: vendor-specific and MSI-X.
const CAP_VENDOR: u8 = 0x09;
const CAP_MSIX: u8 = 0x11;
// Types of the virtio capabilities (4.1.4).
const CFG_COMMON: u8 = 1;
const CFG_NOTIFY: u8 = 2;
const CFG_ISR: u8 = 3;
const CFG_DEVICE: u8 = 4;
const CFG_ACCESS: u8 = 5;
// Offsets of the fields in the PCI configuration access capability, in bytes.
const ACCESS_BAR: usize = 4;
const ACCESS_OFFSET: usize = 8;
const ACCESS_LENGTH: usize = 12;
const ACCESS_DATA: usize = 16;

/// A virtio device as a PCI function, with its PCI and virtio registers.
pub(super) struct PciFunction {
    pub(super) space: PciConfigSpace,
    msix_at: usize,
    access_at: usize,
    pub(super) common: CommonConfig,
    pub(super) msix: MsixTable,
    pub(super) device: Box<dyn VirtioDevice>,
    pub(super) kicks: Vec<Arc<EventFd>>,
    memory: GuestMemoryMmap,
    machine: Arc<dyn PciBackend>,
    /// Address of the BAR after a reset.
    home: u32,
    /// Indices of the queues that the driver has enabled, or `None` if the device is not active.
    pub(super) active: Option<Vec<usize>>,
    /// Doorbells that are registered with the machine, as pairs of address and queue index.
    doorbells: Vec<(u64, usize)>,
    /// `true` if the device is stopped for a snapshot, or restored but not yet started.
    pub(super) quiesced: bool,
    said: LoggedErrors,
}

/// Position at which a device starts to process its queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueStart {
    /// Start at the beginning of the rings, which the driver has just set up.
    Zero,
    /// Continue at the position of the used ring. Chains that the device had taken but not returned
    /// when it was stopped are taken again.
    UsedRing,
}

/// For each message that the guest can trigger, `true` if this function has already logged it.
#[derive(Debug, Default)]
struct LoggedErrors {
    doorbell: bool,
    activation: bool,
}

impl PciFunction {
    /// Creates a function for `device`. `home` is the initial address of its BAR, and `first_line`
    /// is the bus-wide number of its first interrupt.
    pub(super) fn new(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemoryMmap,
        machine: Arc<dyn PciBackend>,
        home: u32,
        first_line: u32,
    ) -> io::Result<Self> {
        let sizes = device.queue_max_sizes();
        let vectors = vector_count(sizes.len());
        let kicks = sizes
            .iter()
            .map(|_| EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map(Arc::new));
        let kicks = kicks.collect::<io::Result<Vec<_>>>()?;
        let msix = MsixTable::new(machine.clone(), first_line, vectors)?;
        let common = CommonConfig::new(device.features(), sizes, msix.count());
        let (space, msix_at, access_at) = config_space(&*device, vectors, home);
        Ok(Self {
            space,
            msix_at,
            access_at,
            common,
            msix,
            device,
            kicks,
            memory,
            machine,
            home,
            active: None,
            doorbells: Vec::new(),
            quiesced: false,
            said: LoggedErrors::default(),
        })
    }

    /// Returns the base address of the BAR, or `None` if memory decoding is disabled.
    pub(super) fn decodes(&self) -> Option<u64> {
        let on = self.space.u16(space::COMMAND) & space::COMMAND_MEMORY != 0;
        on.then(|| self.space.u32(space::BAR0).into())
    }

    /// Handles a guest read of the function's configuration space.
    pub(super) fn read_config(&mut self, at: usize, data: &mut [u8]) {
        if let Some((offset, length)) = self.window(at, data.len()) {
            let mut value = [0; 4];
            self.read_bar(offset, &mut value[..length]);
            self.space.set(self.access_at + ACCESS_DATA, &value);
        }
        self.space.read(at, data);
    }

    /// Handles a guest write to the function's configuration space.
    pub(super) fn write_config(&mut self, at: usize, data: &[u8]) {
        self.space.write(at, data);
        if let Some((offset, length)) = self.window(at, data.len()) {
            let mut value = [0; 4];
            self.space.read(self.access_at + ACCESS_DATA, &mut value);
            self.write_bar(offset, &value[..length]);
        }
        self.msix.set_control(self.space.u16(self.msix_at + 2));
        self.update_doorbells();
    }

    /// Translates an access to the data window of the PCI configuration access capability (4.1.4.9)
    /// to an access to the BAR.
    ///
    /// The access has `len` bytes at offset `at` in the configuration space. Returns the offset in
    /// the BAR and the length, or `None` if the access is not to the data window.
    fn window(&self, at: usize, len: usize) -> Option<(u64, usize)> {
        let cap = self.access_at;
        let length = usize::try_from(self.space.u32(cap + ACCESS_LENGTH)).ok()?;
        let offset = self.space.u32(cap + ACCESS_OFFSET);
        let bar = self.space.u32(cap + ACCESS_BAR) & 0xFF;
        let fits =
            matches!(length, 1 | 2 | 4) && bar == 0 && offset.is_multiple_of(u32::try_from(length).ok()?);
        (fits && at == cap + ACCESS_DATA && len >= length).then(|| (offset.into(), length))
    }

    /// Handles a guest read of the function's memory BAR.
    pub(super) fn read_bar(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let (region, inside) = split(offset);
        match region {
            COMMON => self.common.read(inside, data),
            DEVICE => self.device.read_config(offset - DEVICE, data),
            TABLE => self.msix.read_table(inside, data),
            PENDING => self.msix.read_pending(inside, data),
            // The interrupt status, doorbells and unused offsets read as 0.
            _ => {}
        }
    }

    /// Handles a guest write to the function's memory BAR.
    pub(super) fn write_bar(&mut self, offset: u64, data: &[u8]) {
        let (region, inside) = split(offset);
        match region {
            COMMON => match self.common.write(inside, data) {
                RegisterEffect::None => {}
                RegisterEffect::Reset => self.reset_device(),
                RegisterEffect::Activate => self.activate(),
            },
            DEVICE => self.device.write_config(offset - DEVICE, data),
            // Doorbell writes exit to the VMM only while no ioeventfd is registered for them.
            DOORBELLS => {
                if let Some(kick) = self.kicks.get(inside / DOORBELL_BYTES as usize) {
                    let _ = kick.write(1);
                }
            }
            TABLE => self.msix.write_table(inside, data),
            _ => {}
        }
    }

    /// Stops the device and restores the power-on values of all registers.
    pub(super) fn reset(&mut self) {
        self.reset_device();
        self.msix.reset();
        let (space, ..) = config_space(&*self.device, vector_count(self.kicks.len()), self.home);
        self.space = space;
        self.update_doorbells();
    }

    fn reset_device(&mut self) {
        self.quiesced = false;
        if self.active.take().is_some() {
            self.device.reset();
        }
        self.update_doorbells();
        self.common.reset();
        for kick in &self.kicks {
            let _ = kick.read();
        }
    }

    /// Activates the device after the driver has set DRIVER_OK.
    fn activate(&mut self) {
        if self.active.is_some() {
            return;
        }
        self.start_device(QueueStart::Zero);
    }

    /// Starts the device with the queues that the driver has enabled.
    pub(super) fn start_device(&mut self, start: QueueStart) {
        let result = self.activation(start).and_then(|activation| {
            let active = activation.queues.iter().enumerate();
            let active = active
                .filter_map(|(n, queue)| queue.as_ref().map(|_| n))
                .collect();
            self.device.activate(activation)?;
            Ok(active)
        });
        match result {
            Ok(queues) => {
                self.active = Some(queues);
                self.update_doorbells();
            }
            Err(error) => {
                if !std::mem::replace(&mut self.said.activation, true) {
                    log::warn!(
                        "{} must be reset by the guest's driver: {}",
                        self.device.name(),
                        error_line(&error)
                    );
                }
                self.config_change().needs_reset();
            }
        }
    }

    pub(super) fn activation(&self, start: QueueStart) -> Result<DeviceActivation, ActivateError> {
        let queues = self
            .common
            .queues
            .iter()
            .zip(&self.kicks)
            .map(|(registers, kick)| {
                if !registers.enabled {
                    return Ok(None);
                }
                let mut queue = registers
                    .queue(&self.memory, self.common.event_idx())
                    .ok_or(ActivateError::Driver("a queue that is not in RAM"))?;
                if start == QueueStart::UsedRing {
                    continue_at_used_ring(&mut queue, &self.memory)
                        .map_err(|_| ActivateError::Driver("a used ring that is not in RAM"))?;
                }
                Ok(Some(ActiveQueue {
                    queue,
                    kick: kick.clone(),
                    interrupt: DeviceInterrupt::new(self.msix.vector(registers.vector)),
                }))
            });
        Ok(DeviceActivation {
            memory: self.memory.clone(),
            features: self.common.accepted(),
            queues: queues.collect::<Result<_, _>>()?,
            resumed: start == QueueStart::UsedRing,
            config_change: self.config_change(),
            fatal_error_callback: self.machine.fatal_error_callback(),
        })
    }

    pub(super) fn config_change(&self) -> ConfigChangeNotifier {
        let interrupt = DeviceInterrupt::new(self.msix.vector(self.common.config_vector));
        let CommonConfig {
            generation, broken, ..
        } = &self.common;
        ConfigChangeNotifier::new(generation.clone(), broken.clone(), interrupt)
    }

    /// Registers the doorbells of the active queues at the current BAR address.
    pub(super) fn update_doorbells(&mut self) {
        let wanted: Vec<(u64, usize)> = match (&self.active, self.decodes()) {
            (Some(queues), Some(base)) => queues
                .iter()
                .map(|&n| (base + DOORBELLS + n as u64 * u64::from(DOORBELL_BYTES), n))
                .collect(),
            _ => Vec::new(),
        };
        if wanted == self.doorbells {
            return;
        }
        for (address, n) in std::mem::take(&mut self.doorbells) {
            // Ignore the error for a doorbell that the machine did not accept.
            let _ = self.machine.remove_doorbell(address, &self.kicks[n]);
        }
        for &(address, n) in &wanted {
            if let Err(error) = self.machine.add_doorbell(address, &self.kicks[n])
                && !std::mem::replace(&mut self.said.doorbell, true)
            {
                let why = error_line(&error);
                log::info!("{}: each kick of queue {n} is an exit: {why}", self.device.name());
            }
        }
        self.doorbells = wanted;
    }
}

impl Drop for PciFunction {
    fn drop(&mut self) {
        self.reset_device();
    }
}

/// Returns the number of interrupts of a virtio device: one per queue and one for configuration
/// changes.
pub(super) fn vector_count(queues: usize) -> u16 {
    u16::try_from(queues.min(MAX_QUEUES) + 1).unwrap_or(1)
}

/// Splits an offset in the BAR into the start of its region and the offset in this region.
#[expect(clippy::cast_possible_truncation, reason = "less than a region's size")]
fn split(offset: u64) -> (u64, usize) {
    let inside = offset % u64::from(REGION_BYTES);
    (offset - inside, inside as usize)
}

/// Builds the configuration space. Also returns the offsets of the MSI-X capability and the PCI
/// configuration access capability.
fn config_space(device: &dyn VirtioDevice, vectors: u16, home: u32) -> (PciConfigSpace, usize, usize) {
    let id = FIRST_DEVICE.saturating_add(u16::try_from(device.id()).unwrap_or(0));
    let mut space = PciConfigSpace::new(PciIdentity {
        vendor: VENDOR,
        device: id,
        revision: REVISION,
        class: class_of(device.id()),
    });
    space.set(space::SUBSYSTEM_VENDOR_ID, &VENDOR.to_le_bytes());
    space.set(space::SUBSYSTEM_ID, &id.to_le_bytes());
    let command = space::COMMAND_MEMORY | space::COMMAND_MASTER | space::COMMAND_NO_INTX;
    space.set_writable(space::COMMAND, &command.to_le_bytes());
    space.set(space::BAR0, &home.to_le_bytes());
    space.set_writable(space::BAR0, &(!(BAR_BYTES - 1)).to_le_bytes());

    let mut cap = |kind: u8, offset: u64, length: u32, rest: &[u8]| {
        let len = u8::try_from(16 + rest.len()).unwrap_or(16);
        // Capability length, type, BAR 0, ID among capabilities of this type, padding.
        let mut body = vec![len, kind, 0, 0, 0, 0];
        body.extend_from_slice(&u32::try_from(offset).unwrap_or(0).to_le_bytes());
        body.extend_from_slice(&length.to_le_bytes());
        body.extend_from_slice(rest);
        space.add_capability(CAP_VENDOR, &body)
    };
    // A driver uses the first capability of a type, and the capability that was added last is first
    // in the list.
    let access_at = cap(CFG_ACCESS, 0, 0, &[0; 4]);
    cap(CFG_NOTIFY, DOORBELLS, REGION_BYTES, &DOORBELL_BYTES.to_le_bytes());
    cap(CFG_DEVICE, DEVICE, REGION_BYTES, &[]);
    cap(CFG_ISR, ISR, REGION_BYTES, &[]);
    cap(CFG_COMMON, COMMON, REGION_BYTES, &[]);
    space.set_writable(access_at + ACCESS_BAR, &[0xFF]);
    space.set_writable(access_at + ACCESS_OFFSET, &[0xFF; 12]);

    let mut body = (vectors - 1).to_le_bytes().to_vec();
    for region in [TABLE, PENDING] {
        body.extend_from_slice(&u32::try_from(region).unwrap_or(0).to_le_bytes());
    }
    let msix_at = space.add_capability(CAP_MSIX, &body);
    space.set_writable(msix_at + 2, &msix::CONTROL_WRITABLE.to_le_bytes());
    (space, msix_at, access_at)
}

/// Returns the PCI class code of a virtio device type (PCI code and ID assignment, 1.11). Only
/// tools use it; drivers match the device ID.
fn class_of(id: u32) -> [u8; 3] {
    use virtio_bindings::virtio_ids::{VIRTIO_ID_BLOCK, VIRTIO_ID_CONSOLE, VIRTIO_ID_FS, VIRTIO_ID_NET};
    match id {
        VIRTIO_ID_NET => [0x02, 0x00, 0x00],
        VIRTIO_ID_BLOCK | VIRTIO_ID_FS => [0x01, 0x80, 0x00],
        VIRTIO_ID_CONSOLE => [0x07, 0x80, 0x00],
        _ => [0xFF, 0x00, 0x00],
    }
}
