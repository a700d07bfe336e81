//! Registers of the common configuration of a virtio PCI device (virtio 1.2, 4.1.4.3).
//!
//! A write of any length is handled as a sequence of writes of whole fields. Bytes of a field that
//! the write does not cover keep their values, so no field is left partially written.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use snapshot::state::{SavedDevice, SavedQueue};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};

/// Size of the common configuration structure up to `queue_device`, in bytes.
pub(super) const COMMON_BYTES: usize = 56;
/// Vector number for no interrupt (VIRTIO_MSI_NO_VECTOR).
pub(super) const NO_VECTOR: u16 = 0xFFFF;

/// Feature bits that the transport offers in addition to those of the device.
const TRANSPORT_FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;

const DRIVER_OK: u8 = bit(VIRTIO_CONFIG_S_DRIVER_OK);
const FEATURES_OK: u8 = bit(VIRTIO_CONFIG_S_FEATURES_OK);
const NEEDS_RESET: u8 = bit(VIRTIO_CONFIG_S_NEEDS_RESET);

// Size of a descriptor, and required alignments of the descriptor table and the two rings, in bytes
// (virtio 1.2, 2.7).
const DESCRIPTOR_BYTES: usize = 16;
const DESCRIPTORS_ALIGN: u64 = 16;
const AVAIL_ALIGN: u64 = 2;
const USED_ALIGN: u64 = 4;

/// Converts a constant for the device status to a byte.
#[expect(clippy::cast_possible_truncation, reason = "constants of a byte")]
const fn bit(value: u32) -> u8 {
    value as u8
}

/// A driver-writable field of the common configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DriverField {
    DeviceFeatureSelect,
    DriverFeatureSelect,
    DriverFeature,
    ConfigVector,
    Status,
    QueueSelect,
    QueueSize,
    QueueVector,
    QueueEnable,
    Descriptors(AddressHalf),
    Avail(AddressHalf),
    Used(AddressHalf),
}

/// The low or high half of a 64-bit queue address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AddressHalf {
    Low,
    High,
}

/// Driver-writable fields, each with its offset and its size in bytes.
const FIELDS: [(usize, usize, DriverField); 15] = [
    (0, 4, DriverField::DeviceFeatureSelect),
    (8, 4, DriverField::DriverFeatureSelect),
    (12, 4, DriverField::DriverFeature),
    (16, 2, DriverField::ConfigVector),
    (20, 1, DriverField::Status),
    (22, 2, DriverField::QueueSelect),
    (24, 2, DriverField::QueueSize),
    (26, 2, DriverField::QueueVector),
    (28, 2, DriverField::QueueEnable),
    (32, 4, DriverField::Descriptors(AddressHalf::Low)),
    (36, 4, DriverField::Descriptors(AddressHalf::High)),
    (40, 4, DriverField::Avail(AddressHalf::Low)),
    (44, 4, DriverField::Avail(AddressHalf::High)),
    (48, 4, DriverField::Used(AddressHalf::Low)),
    (52, 4, DriverField::Used(AddressHalf::High)),
];

/// Action that the PCI function must take after a register write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RegisterEffect {
    None,
    /// Reset the device.
    Reset,
    /// Activate the device, because the driver has set DRIVER_OK.
    Activate,
}

#[derive(Clone, Debug)]
pub(super) struct QueueRegisters {
    max_size: u16,
    size: u16,
    pub vector: u16,
    pub enabled: bool,
    descriptors: u64,
    avail: u64,
    used: u64,
}

impl QueueRegisters {
    fn new(max_size: u16) -> Self {
        Self {
            max_size,
            size: max_size,
            vector: NO_VECTOR,
            enabled: false,
            descriptors: 0,
            avail: 0,
            used: 0,
        }
    }

    /// Returns the queue, or `None` if its descriptor table or a ring is misaligned or outside
    /// guest RAM. Checking this first avoids a log line of the queue crate for each invalid
    /// address.
    pub(super) fn queue(&self, memory: &GuestMemoryMmap, event_idx: bool) -> Option<Queue> {
        let size = usize::from(self.size);
        let parts = [
            (self.descriptors, DESCRIPTORS_ALIGN, DESCRIPTOR_BYTES * size),
            (self.avail, AVAIL_ALIGN, 6 + 2 * size),
            (self.used, USED_ALIGN, 6 + 8 * size),
        ];
        let usable = parts.iter().all(|&(at, align, bytes)| {
            // The queue crate treats an available ring at address 0 as unset.
            at != 0
                && at.is_multiple_of(align)
                && at.checked_add(bytes as u64).is_some()
                && GuestMemory::check_range(memory, GuestAddress(at), bytes, Permissions::ReadWrite)
        });
        if !usable {
            return None;
        }
        let mut queue = Queue::new(self.max_size).ok()?;
        queue.try_set_size(self.size).ok()?;
        queue
            .try_set_desc_table_address(GuestAddress(self.descriptors))
            .ok()?;
        queue.try_set_avail_ring_address(GuestAddress(self.avail)).ok()?;
        queue.try_set_used_ring_address(GuestAddress(self.used)).ok()?;
        queue.set_event_idx(event_idx);
        queue.set_ready(true);
        queue.is_valid(memory).then_some(queue)
    }
}

#[derive(Debug)]
pub(super) struct CommonConfig {
    offered: u64,
    accepted: u64,
    device_feature_select: u32,
    driver_feature_select: u32,
    pub config_vector: u16,
    status: u8,
    pub generation: Arc<AtomicU8>,
    /// DEVICE_NEEDS_RESET bit of the device status, which the device's thread sets.
    pub broken: Arc<AtomicBool>,
    queue_select: u16,
    pub queues: Vec<QueueRegisters>,
    /// Number of interrupt vectors of the device.
    vectors: usize,
}

impl CommonConfig {
    pub(super) fn new(device_features: u64, queue_max_sizes: &[u16], vectors: usize) -> Self {
        Self {
            offered: device_features | TRANSPORT_FEATURES,
            accepted: 0,
            device_feature_select: 0,
            driver_feature_select: 0,
            config_vector: NO_VECTOR,
            status: 0,
            generation: Arc::new(AtomicU8::new(0)),
            broken: Arc::new(AtomicBool::new(false)),
            queue_select: 0,
            queues: queue_max_sizes.iter().copied().map(QueueRegisters::new).collect(),
            vectors,
        }
    }

    /// Restores the power-on values of all registers. The device's thread must have ended. The
    /// configuration generation keeps its value, because a driver may be comparing two reads of it.
    pub(super) fn reset(&mut self) {
        self.broken.store(false, Ordering::Release);
        self.accepted = 0;
        self.device_feature_select = 0;
        self.driver_feature_select = 0;
        self.config_vector = NO_VECTOR;
        self.status = 0;
        self.queue_select = 0;
        for queue in &mut self.queues {
            *queue = QueueRegisters::new(queue.max_size);
        }
    }

    /// Writes the registers to `saved`, for a snapshot.
    pub(super) fn save(&self, saved: &mut SavedDevice) {
        saved.offered = self.offered;
        saved.accepted = self.accepted;
        saved.feature_selects = [self.device_feature_select, self.driver_feature_select];
        saved.config_vector = self.config_vector;
        saved.status = self.status();
        saved.generation = self.generation.load(Ordering::Acquire);
        saved.queue_select = self.queue_select;
        let queues = self.queues.iter().map(|queue| SavedQueue {
            size: queue.size,
            vector: queue.vector,
            enabled: queue.enabled,
            descriptors: queue.descriptors,
            avail: queue.avail,
            used: queue.used,
        });
        saved.queues = queues.collect();
    }

    /// Restores registers from a snapshot. Returns `false` if a driver could not have written them.
    pub(super) fn restore(&mut self, saved: &SavedDevice) -> bool {
        let sizes = saved.queues.iter().zip(&self.queues);
        let possible = saved.offered == self.offered
            && (saved.accepted & !self.offered == 0 || saved.status & FEATURES_OK == 0)
            && (saved.status & DRIVER_OK == 0 || saved.status & FEATURES_OK != 0)
            && saved.queues.len() == self.queues.len()
            && sizes
                .clone()
                .all(|(saved, here)| saved.size.is_power_of_two() && saved.size <= here.max_size);
        if !possible {
            return false;
        }
        self.accepted = saved.accepted;
        [self.device_feature_select, self.driver_feature_select] = saved.feature_selects;
        self.config_vector = self.valid_vector(saved.config_vector);
        self.status = saved.status & !NEEDS_RESET;
        self.broken
            .store(saved.status & NEEDS_RESET != 0, Ordering::Release);
        self.generation.store(saved.generation, Ordering::Release);
        self.queue_select = saved.queue_select;
        for (n, saved) in saved.queues.iter().enumerate() {
            let vector = self.valid_vector(saved.vector);
            let queue = &mut self.queues[n];
            *queue = QueueRegisters {
                max_size: queue.max_size,
                size: saved.size,
                vector,
                enabled: saved.enabled,
                descriptors: saved.descriptors,
                avail: saved.avail,
                used: saved.used,
            };
        }
        true
    }

    /// Returns the feature bits offered to the driver.
    pub(super) fn offered(&self) -> u64 {
        self.offered
    }

    /// Returns whether DEVICE_NEEDS_RESET is set in the device status.
    pub(super) fn needs_reset(&self) -> bool {
        self.status() & NEEDS_RESET != 0
    }

    /// Returns the feature bits that the driver accepted.
    pub(super) fn accepted(&self) -> u64 {
        self.accepted
    }

    /// Returns whether the driver accepted VIRTIO_F_EVENT_IDX.
    pub(super) fn event_idx(&self) -> bool {
        self.accepted & 1 << VIRTIO_RING_F_EVENT_IDX != 0
    }

    /// Returns the device status, including DEVICE_NEEDS_RESET.
    fn status(&self) -> u8 {
        if self.broken.load(Ordering::Acquire) {
            self.status | NEEDS_RESET
        } else {
            self.status
        }
    }

    /// Handles a driver read of any length at any offset of the common configuration.
    pub(super) fn read(&self, at: usize, data: &mut [u8]) {
        let image = self.image();
        for (i, byte) in data.iter_mut().enumerate() {
            *byte = image.get(at + i).copied().unwrap_or(0);
        }
    }

    /// Handles a driver write of any length at any offset of the common configuration.
    pub(super) fn write(&mut self, at: usize, data: &[u8]) -> RegisterEffect {
        let mut effect = RegisterEffect::None;
        let end = at + data.len();
        for (start, len, field) in FIELDS {
            let covered = start.max(at)..(start + len).min(end);
            if covered.is_empty() {
                continue;
            }
            let mut value = [0; 4];
            value[..len].copy_from_slice(&self.image()[start..start + len]);
            value[covered.start - start..covered.end - start]
                .copy_from_slice(&data[covered.start - at..covered.end - at]);
            match self.write_field(field, u32::from_le_bytes(value)) {
                RegisterEffect::None => {}
                other => effect = other,
            }
        }
        effect
    }

    /// Returns the current contents of the common configuration structure.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "halves of 64-bit values; queues are at most 255"
    )]
    fn image(&self) -> [u8; COMMON_BYTES] {
        let half = |value: u64, select: u32| match select {
            0 => value as u32,
            1 => (value >> 32) as u32,
            _ => 0,
        };
        let mut image = [0; COMMON_BYTES];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.device_feature_select.to_le_bytes());
        put(4, &half(self.offered, self.device_feature_select).to_le_bytes());
        put(8, &self.driver_feature_select.to_le_bytes());
        put(12, &half(self.accepted, self.driver_feature_select).to_le_bytes());
        put(16, &self.config_vector.to_le_bytes());
        put(18, &(self.queues.len() as u16).to_le_bytes());
        put(20, &[self.status(), self.generation.load(Ordering::Acquire)]);
        put(22, &self.queue_select.to_le_bytes());
        // A queue that does not exist has size 0 (4.1.4.3.1).
        let Some(queue) = self.queues.get(usize::from(self.queue_select)) else {
            return image;
        };
        put(24, &queue.size.to_le_bytes());
        put(26, &queue.vector.to_le_bytes());
        put(28, &u16::from(queue.enabled).to_le_bytes());
        put(30, &self.queue_select.to_le_bytes());
        put(32, &queue.descriptors.to_le_bytes());
        put(40, &queue.avail.to_le_bytes());
        put(48, &queue.used.to_le_bytes());
        image
    }

    #[expect(clippy::cast_possible_truncation, reason = "the field has as many bits")]
    fn write_field(&mut self, field: DriverField, value: u32) -> RegisterEffect {
        match field {
            DriverField::DeviceFeatureSelect => self.device_feature_select = value,
            DriverField::DriverFeatureSelect => self.driver_feature_select = value,
            DriverField::DriverFeature => self.accept(value),
            DriverField::ConfigVector => {
                if !self.is_active() {
                    self.config_vector = self.valid_vector(value as u16);
                }
            }
            DriverField::Status => return self.write_status(value as u8),
            DriverField::QueueSelect => self.queue_select = value as u16,
            _ => self.write_queue(field, value),
        }
        RegisterEffect::None
    }

    /// Handles a driver write to the selected 32 bits of its accepted features. Ignored after the
    /// driver has set FEATURES_OK.
    fn accept(&mut self, value: u32) {
        if self.status & FEATURES_OK != 0 {
            return;
        }
        let (shift, keep) = match self.driver_feature_select {
            0 => (0, !0 << 32),
            1 => (32, u64::from(u32::MAX)),
            _ => return,
        };
        self.accepted = (self.accepted & keep) | u64::from(value) << shift;
    }

    /// Returns `vector` if the device has this interrupt vector, otherwise [`NO_VECTOR`]. The
    /// driver reads [`NO_VECTOR`] back as a failure (4.1.5.1.2).
    fn valid_vector(&self, vector: u16) -> u16 {
        if usize::from(vector) < self.vectors {
            vector
        } else {
            NO_VECTOR
        }
    }

    /// Returns whether the driver has set DRIVER_OK. Writes to queue registers are then ignored,
    /// because the device would not notice them.
    pub(super) fn is_active(&self) -> bool {
        self.status & DRIVER_OK != 0
    }

    #[expect(clippy::cast_possible_truncation, reason = "the field has as many bits")]
    fn write_queue(&mut self, field: DriverField, value: u32) {
        let vector = self.valid_vector(value as u16);
        let driving = self.is_active();
        let Some(queue) = self.queues.get_mut(usize::from(self.queue_select)) else {
            return;
        };
        if driving || queue.enabled {
            return;
        }
        let set = |address: &mut u64, half: AddressHalf| {
            *address = match half {
                AddressHalf::Low => *address & !0 << 32 | u64::from(value),
                AddressHalf::High => *address & u64::from(u32::MAX) | u64::from(value) << 32,
            };
        };
        match field {
            DriverField::QueueSize => {
                let size = value as u16;
                if size.is_power_of_two() && size <= queue.max_size {
                    queue.size = size;
                }
            }
            DriverField::QueueVector => queue.vector = vector,
            // The driver cannot disable a queue. Only a reset does so.
            DriverField::QueueEnable => queue.enabled = value == 1,
            DriverField::Descriptors(half) => set(&mut queue.descriptors, half),
            DriverField::Avail(half) => set(&mut queue.avail, half),
            DriverField::Used(half) => set(&mut queue.used, half),
            _ => {}
        }
    }

    /// Handles a driver write to the device status, which sets status bits or resets the device
    /// (3.1.1). Bits set out of order are ignored; the driver detects this when it reads the status
    /// back.
    fn write_status(&mut self, value: u8) -> RegisterEffect {
        if value == 0 {
            return RegisterEffect::Reset;
        }
        // The driver can set status bits, but not clear them.
        let mut added = value & !self.status & !NEEDS_RESET;
        if added & FEATURES_OK != 0
            && (self.accepted & !self.offered != 0 || self.accepted & 1 << VIRTIO_F_VERSION_1 == 0)
        {
            added &= !FEATURES_OK;
        }
        let ready = added & DRIVER_OK != 0;
        if ready && (self.status | added) & FEATURES_OK == 0 {
            added &= !DRIVER_OK;
        }
        self.status |= added;
        if added & DRIVER_OK != 0 && self.status() & NEEDS_RESET == 0 {
            RegisterEffect::Activate
        } else {
            RegisterEffect::None
        }
    }
}
