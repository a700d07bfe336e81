use std::sync::Arc;

use proptest::prelude::*;
use virtio_queue::QueueT as _;
use vm_memory::{Bytes as _, GuestAddress};

use super::super::testing::{BackendCall, DeviceCalls, MockDevice, MockPciBackend};
use super::*;

const WINDOW: Range<u32> = 0xE000_0000..0xF000_0000;
const HOME: u64 = 0xE000_0000;
const ACKNOWLEDGE: u8 = 1;
const DRIVER: u8 = 2;
const DRIVER_OK: u8 = 4;
const FEATURES_OK: u8 = 8;
const NEEDS_RESET: u8 = 64;

/// A guest with mock devices. The methods perform accesses of the guest's driver.
struct TestGuest {
    bus: PciBus,
    memory: GuestMemoryMmap,
    machine: Arc<MockPciBackend>,
    seen: Vec<Arc<Mutex<DeviceCalls>>>,
}

impl TestGuest {
    fn new(devices: &[&[u16]]) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let machine = Arc::new(MockPciBackend::default());
        let dynamic: Arc<dyn PciBackend> = machine.clone();
        let mut seen = Vec::new();
        let devices = devices.iter().map(|queues| {
            let (device, saw) = MockDevice::new(queues);
            seen.push(saw);
            Box::new(device) as Box<dyn VirtioDevice>
        });
        let devices = devices.collect();
        let bus = PciBus::new(devices, &memory, WINDOW, &dynamic).unwrap();
        Self {
            bus,
            memory,
            machine,
            seen,
        }
    }

    fn select(&self, place: u32, at: u32) {
        let address = 1 << 31 | place << 11 | at & 0xFC;
        self.bus.write_port(CONFIG_PORT, &address.to_le_bytes());
    }

    fn config(&self, place: u32, at: u32) -> u32 {
        self.select(place, at);
        let mut data = [0; 4];
        self.bus.read_port(DATA_PORT, &mut data);
        u32::from_le_bytes(data)
    }

    fn set_config(&self, place: u32, at: u32, value: u32) {
        self.select(place, at);
        self.bus.write_port(DATA_PORT, &value.to_le_bytes());
    }

    fn read(&self, offset: u64, len: usize) -> u64 {
        let mut data = [0; 8];
        assert!(self.bus.read_memory(HOME + offset, &mut data[..len]));
        u64::from_le_bytes(data)
    }

    fn write(&self, offset: u64, value: u64, len: usize) {
        assert!(self.bus.write_memory(HOME + offset, &value.to_le_bytes()[..len]));
    }

    fn status(&self) -> u8 {
        u8::try_from(self.read(20, 1)).unwrap()
    }

    fn set_status(&self, bits: u8) {
        self.write(20, u64::from(self.status() | bits), 1);
    }

    /// Accepts VERSION_1 and the feature bits in `features`.
    fn negotiate(&self, features: u64) {
        self.set_config(1, 4, 6);
        self.set_status(ACKNOWLEDGE);
        self.set_status(DRIVER);
        let features = features | 1 << 32;
        for half in 0..2u64 {
            self.write(8, half, 4);
            self.write(12, features >> (32 * half) & 0xFFFF_FFFF, 4);
        }
        self.set_status(FEATURES_OK);
    }

    fn set_queue(&self, n: u64, at: u64) {
        self.write(22, n, 2);
        self.write(26, n + 1, 2);
        self.write(32, at, 8);
        self.write(40, at.wrapping_add(0x1000), 8);
        self.write(48, at.wrapping_add(0x2000), 8);
        self.write(28, 1, 2);
    }
}

/// Returns the capabilities of the first device, as pairs of ID and offset.
fn capabilities(guest: &TestGuest) -> Vec<(u8, u32)> {
    let mut at = guest.config(1, 0x34) & 0xFF;
    let mut found = Vec::new();
    while at != 0 && found.len() < 48 {
        let [id, next, ..] = guest.config(1, at).to_le_bytes();
        found.push((id, at));
        at = next.into();
    }
    found
}

#[test]
fn guest_enumerates_bridge_and_devices() {
    let guest = TestGuest::new(&[&[16], &[16, 16]]);
    assert_eq!(guest.config(0, 0), 0x0008_1B36);
    assert_eq!(guest.config(0, 8) >> 16, 0x0600);
    assert_eq!(guest.config(1, 0), 0x1044_1AF4);
    assert_eq!(guest.config(2, 0x10), WINDOW.start + BAR_BYTES);
    assert_eq!(guest.config(1, 0x3C), 0, "no interrupt pin");
    for place in 3..32 {
        assert_eq!(guest.config(place, 0), u32::MAX);
    }
    // Addresses of another bus, of another function, and with a clear enable bit.
    for address in [1u32 << 31 | 1 << 16, 1 << 31 | 1 << 8, 1 << 11] {
        guest.bus.write_port(CONFIG_PORT, &address.to_le_bytes());
        let mut data = [0; 4];
        guest.bus.read_port(DATA_PORT, &mut data);
        assert_eq!(data, [0xFF; 4], "{address:#x}");
    }
    let ids: Vec<u8> = capabilities(&guest).iter().map(|(id, _)| *id).collect();
    assert_eq!(ids, [0x11, 9, 9, 9, 9, 9]);
}

#[test]
fn bar_can_be_sized_and_moved() {
    let guest = TestGuest::new(&[&[16]]);
    assert!(
        !guest.bus.read_memory(HOME, &mut [0; 4]),
        "it decodes nothing yet"
    );
    guest.set_config(1, 0x10, u32::MAX);
    assert_eq!(guest.config(1, 0x10), !(BAR_BYTES - 1));
    guest.set_config(1, 0x10, 0xE123_4567);
    guest.set_config(1, 4, 2);
    assert_eq!(guest.config(1, 0x10), 0xE123_0000);
    assert!(guest.bus.read_memory(0xE123_0000, &mut [0; 4]));
    assert!(guest.bus.read_memory(0xE123_7FFF, &mut [0; 4]));
    assert!(!guest.bus.read_memory(0xE123_8000, &mut [0; 4]));
    assert!(!guest.bus.write_memory(HOME, &[0; 4]));
}

#[test]
fn driver_activates_and_resets_device() {
    let guest = TestGuest::new(&[&[16, 32]]);
    guest.negotiate(1 << 5 | 1 << 29);
    assert_eq!(guest.status(), ACKNOWLEDGE | DRIVER | FEATURES_OK);
    assert_eq!(guest.read(18, 2), 2, "queues");
    guest.set_queue(1, 0x8000);
    assert_eq!(guest.read(24, 2), 32);
    guest.set_status(DRIVER_OK);
    {
        let seen = guest.seen[0].lock().unwrap();
        let activation = seen.activation.as_ref().unwrap();
        assert_eq!(activation.features, 1 << 5 | 1 << 29 | 1 << 32);
        assert!(activation.queues[0].is_none());
        let queue = activation.queues[1].as_ref().unwrap();
        assert!(virtio_queue::QueueT::event_idx_enabled(&queue.queue));
        // A doorbell write that exits to the VMM signals the queue's eventfd, like an ioeventfd.
        guest.write(0x3004, 1, 2);
        assert_eq!(queue.kick.read().unwrap(), 1);
    }
    assert_eq!(guest.machine.take(), [BackendCall::AddDoorbell(HOME + 0x3004)]);
    // The doorbell moves with the BAR and is removed when memory decoding is disabled.
    guest.set_config(1, 0x10, 0xE800_0000);
    guest.set_config(1, 4, 0);
    guest.set_config(1, 0x10, 0xE000_0000);
    guest.set_config(1, 4, 2);
    let moved = [HOME + 0x3004, 0xE800_3004, 0xE800_3004, HOME + 0x3004];
    let [first, then, off, on] = moved;
    assert_eq!(
        guest.machine.take(),
        [
            BackendCall::RemoveDoorbell(first),
            BackendCall::AddDoorbell(then),
            BackendCall::RemoveDoorbell(off),
            BackendCall::AddDoorbell(on)
        ]
    );
    guest.write(20, 0, 1);
    assert_eq!(guest.status(), 0);
    assert_eq!(guest.machine.take(), [BackendCall::RemoveDoorbell(HOME + 0x3004)]);
    assert_eq!(guest.seen[0].lock().unwrap().resets, 1);
    guest.negotiate(0);
    guest.set_queue(0, 0x4000);
    guest.set_status(DRIVER_OK);
    assert_eq!(guest.seen[0].lock().unwrap().activations, 2);
    drop(guest.bus);
    assert_eq!(guest.seen[0].lock().unwrap().resets, 2);
}

#[test]
fn out_of_order_status_bits_are_ignored() {
    let guest = TestGuest::new(&[&[16]]);
    guest.set_config(1, 4, 2);
    guest.set_status(DRIVER_OK);
    assert_eq!(guest.status(), 0, "no features were agreed on");
    guest.set_status(FEATURES_OK);
    assert_eq!(guest.status(), 0, "VERSION_1 was not accepted");
    guest.negotiate(1 << 40);
    assert_eq!(guest.status() & FEATURES_OK, 0, "more than was offered");
    guest.negotiate(0);
    // Status bits cannot be cleared, features cannot change, and a second DRIVER_OK has no
    // effect.
    guest.write(20, ACKNOWLEDGE.into(), 1);
    guest.write(8, 0, 4);
    guest.write(12, 1 << 5, 4);
    assert_eq!(
        (guest.status() & FEATURES_OK, guest.read(12, 4)),
        (FEATURES_OK, 0)
    );
    for _ in 0..1000 {
        guest.set_status(DRIVER_OK);
    }
    assert_eq!(guest.seen[0].lock().unwrap().activations, 1);
    for _ in 0..1000 {
        guest.write(20, 0, 1);
    }
    assert_eq!(guest.seen[0].lock().unwrap().resets, 1);
}

#[test]
fn queue_outside_ram_sets_needs_reset() {
    for at in [0xF_F000, 1 << 20, !0xF, 0x8001, 0] {
        let guest = TestGuest::new(&[&[16]]);
        guest.negotiate(0);
        guest.set_queue(0, at);
        guest.set_status(DRIVER_OK);
        assert_eq!(guest.status() & NEEDS_RESET, NEEDS_RESET, "{at:#x}");
        assert!(guest.seen[0].lock().unwrap().activation.is_none());
        assert_eq!(guest.machine.take(), []);
        guest.write(20, 0, 1);
        assert_eq!(guest.status(), 0);
    }
}

#[test]
fn failed_activation_sets_needs_reset() {
    let guest = TestGuest::new(&[&[16]]);
    guest.seen[0].lock().unwrap().refuses = true;
    guest.negotiate(0);
    guest.write(16, 0, 2);
    guest.set_status(DRIVER_OK);
    assert_eq!(guest.status() & NEEDS_RESET, NEEDS_RESET);
    // The configuration-change interrupt is pending in its masked vector.
    assert_eq!(guest.read(0x5000, 1), 1);
}

/// A device that detects a broken queue sets DEVICE_NEEDS_RESET. The bit remains set until the
/// driver resets the device.
#[test]
fn failed_device_sets_needs_reset() {
    let guest = TestGuest::new(&[&[16]]);
    guest.negotiate(0);
    guest.write(16, 0, 2);
    guest.set_queue(0, 0x8000);
    guest.set_status(DRIVER_OK);
    assert_eq!(guest.status() & NEEDS_RESET, 0);
    let change = |seen: &DeviceCalls| seen.activation.as_ref().unwrap().config_change.clone();
    change(&guest.seen[0].lock().unwrap()).needs_reset();
    assert_eq!(guest.status() & NEEDS_RESET, NEEDS_RESET);
    assert_eq!(guest.read(0x5000, 1), 1, "the interrupt");
    // Only a reset clears DEVICE_NEEDS_RESET.
    guest.set_status(DRIVER_OK);
    assert_eq!(guest.status() & NEEDS_RESET, NEEDS_RESET);
    guest.write(20, 0, 1);
    assert_eq!(guest.status(), 0);
    guest.negotiate(0);
    assert_eq!(guest.status() & NEEDS_RESET, 0);
}

#[test]
fn device_receives_fatal_error_callback() {
    let guest = TestGuest::new(&[&[16]]);
    guest.negotiate(0);
    guest.set_status(DRIVER_OK);
    assert!(!guest.machine.ended.load(Ordering::Relaxed));
    let seen = guest.seen[0].lock().unwrap();
    seen.activation.as_ref().unwrap().fatal_error_callback.take();
    assert!(guest.machine.ended.load(Ordering::Relaxed));
}

#[test]
fn config_access_capability_reaches_bar() {
    let guest = TestGuest::new(&[&[16]]);
    let at = capabilities(&guest)
        .into_iter()
        .find(|(_, at)| guest.config(1, *at) >> 24 == 5)
        .unwrap()
        .1;
    guest.set_config(1, at + 8, 0x2000);
    guest.set_config(1, at + 12, 4);
    assert_eq!(guest.config(1, at + 16), 0x4433_2211);
    guest.set_config(1, at + 8, 0x2002);
    guest.set_config(1, at + 12, 1);
    guest.set_config(1, at + 16, 0xAB);
    guest.set_config(1, at + 8, 0x2000);
    guest.set_config(1, at + 12, 4);
    assert_eq!(guest.config(1, at + 16), 0x44AB_2211);
    // Accesses of an unsupported length or to another BAR are ignored.
    for (bar, length) in [(0, 3), (0, 0), (0, 1 << 20), (1, 4)] {
        guest.set_config(1, at + 4, bar);
        guest.set_config(1, at + 12, length);
        guest.set_config(1, at + 16, 0x5555_5555);
        guest.set_config(1, at + 4, 0);
        guest.set_config(1, at + 12, 4);
        assert_eq!(guest.config(1, at + 16), 0x44AB_2211);
    }
}

#[test]
fn reset_restores_power_on_state() {
    let guest = TestGuest::new(&[&[16]]);
    guest.negotiate(0);
    guest.set_queue(0, 0x8000);
    guest.set_status(DRIVER_OK);
    guest.set_config(1, 0x10, 0xE800_0000);
    guest.bus.reset();
    assert_eq!(guest.config(1, 0x10), WINDOW.start);
    assert_eq!(guest.config(1, 4) & 0xFFFF, 0);
    guest.set_config(1, 4, 2);
    assert_eq!((guest.status(), guest.read(28, 2)), (0, 0));
    assert_eq!(guest.seen[0].lock().unwrap().resets, 1);
}

#[test]
fn too_many_devices_or_queues_are_rejected() {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    let machine: Arc<dyn PciBackend> = Arc::new(MockPciBackend::default());
    let make = |devices: usize, queues: usize| {
        let devices = (0..devices).map(|_| {
            let (device, _) = MockDevice::new(&vec![16; queues]);
            Box::new(device) as Box<dyn VirtioDevice>
        });
        PciBus::new(devices.collect(), &memory, WINDOW, &machine).map(|_| ())
    };
    assert!(make(31, 1).is_ok());
    assert!(make(1, 255).is_ok());
    assert!(matches!(make(32, 1), Err(VirtioBusError::TooManyDevices(32))));
    assert!(matches!(make(1, 256), Err(VirtioBusError::TooManyQueues { .. })));
}

/// Creates a guest with a running device. The device has returned 7 chains in its second queue.
fn running_guest() -> TestGuest {
    let guest = TestGuest::new(&[&[16, 32]]);
    guest.negotiate(1 << 29);
    guest.set_queue(1, 0x8000);
    guest.set_status(DRIVER_OK);
    let memory = guest.seen[0]
        .lock()
        .unwrap()
        .activation
        .as_ref()
        .unwrap()
        .memory
        .clone();
    memory.write_obj(7u16, GuestAddress(0xA002)).unwrap();
    guest
}

fn positions(guest: &TestGuest) -> (u16, u16) {
    let seen = guest.seen[0].lock().unwrap();
    let queue = &seen.activation.as_ref().unwrap().queues[1]
        .as_ref()
        .unwrap()
        .queue;
    (queue.next_avail(), queue.next_used())
}

#[test]
fn no_device_activates_from_position_zero() {
    let guest = running_guest();
    guest.bus.quiesce();
    assert!(
        guest.seen[0].lock().unwrap().activation.is_none(),
        "it is stopped"
    );
    let saved = guest.bus.save();
    guest.bus.resume();
    assert_eq!(positions(&guest), (7, 7), "on the source");

    let restored = TestGuest::new(&[&[16, 32]]);
    restored.memory.write_obj(7u16, GuestAddress(0xA002)).unwrap();
    restored.bus.restore(guest.bus.address(), &saved).unwrap();
    assert!(restored.seen[0].lock().unwrap().activation.is_none(), "not yet");
    restored.bus.resume();
    assert_eq!(positions(&restored), (7, 7), "where it is restored");
    assert_eq!(restored.status(), guest.status());
    restored.bus.quiesce();
    let mut again = restored.bus.save();
    // The restored VM has notified the driver of the queue once, so an interrupt is pending.
    again[0].msix_pending = saved[0].msix_pending.clone();
    assert_eq!(again, saved);
}

/// After a snapshot, the device and the driver of a queue with VIRTIO_F_EVENT_IDX are both notified
/// once. While the device was stopped, the driver may have added chains, or may have begun to wait
/// for an interrupt.
#[test]
fn an_event_idx_queue_is_not_left_unnotified() {
    let guest = running_guest();
    let (kick, interrupt) = {
        let seen = guest.seen[0].lock().unwrap();
        let queue = seen.activation.as_ref().unwrap().queues[1].as_ref().unwrap();
        (queue.kick.clone(), queue.interrupt.eventfd().unwrap().clone())
    };
    assert!(kick.read().is_err());
    guest.bus.quiesce();
    guest.bus.resume();
    assert_eq!(kick.read().unwrap(), 1);
    assert_eq!(interrupt.read().unwrap(), 1);
}

#[test]
fn masked_vectors_keep_what_is_pending() {
    let guest = running_guest();
    let interrupt = {
        let seen = guest.seen[0].lock().unwrap();
        let queue = seen.activation.as_ref().unwrap().queues[1].as_ref().unwrap();
        queue.interrupt.clone()
    };
    interrupt.raise();
    guest.bus.quiesce();
    let saved = guest.bus.save();
    let restored = TestGuest::new(&[&[16, 32]]);
    restored.bus.restore(guest.bus.address(), &saved).unwrap();
    assert_eq!(restored.read(0x5000, 1), 1 << 2);
}

#[test]
fn other_devices_are_refused_by_name() {
    let guest = running_guest();
    guest.bus.quiesce();
    let saved = guest.bus.save();
    let refused = |change: fn(&mut SavedDevice)| {
        let mut changed = saved.clone();
        change(&mut changed[0]);
        let restored = TestGuest::new(&[&[16, 32]]);
        let error = restored.bus.restore(0, &changed).unwrap_err();
        restored.bus.resume();
        diagnostics::error_line(&error)
    };
    for (words, change) in [
        (
            "has disk0 where this machine has fake0",
            (|d| d.name = "disk0".into()) as fn(&mut SavedDevice),
        ),
        ("fake0 is not the one", |d| d.config.0[0] ^= 1),
        ("fake0 is not the one", |d| d.offered ^= 1),
        ("registers of fake0", |d| d.queues[1].size = 3),
        ("registers of fake0", |d| d.queues[1].size = 64),
        ("registers of fake0", |d| d.queues.truncate(1)),
        ("registers of fake0", |d| d.accepted |= 1 << 40),
        ("registers of fake0", |d| d.status &= !FEATURES_OK),
        ("registers of fake0", |d| d.msix_table.0.truncate(16)),
        ("registers of fake0", |d| d.config_space.0.truncate(64)),
        ("a queue that is not in RAM", |d| d.queues[1].used = u64::MAX - 3),
    ] {
        let line = refused(change);
        assert!(line.contains(words), "{words}: {line}");
    }
}

proptest! {
    /// Arbitrary sequences of accesses neither panic nor activate a device twice without a reset in
    /// between.
    #[test]
    fn any_access_is_safe(accesses in proptest::collection::vec(
        (0u8..4, any::<u16>(), 1usize..9, any::<u64>()), 0..400
    )) {
        let guest = TestGuest::new(&[&[16, 4], &[16]]);
        guest.negotiate(0);
        guest.set_queue(0, 0x8000);
        for (what, at, len, value) in accesses {
            let mut data = value.to_le_bytes();
            let data = &mut data[..len];
            match what {
                0 => guest.bus.write_port(CONFIG_PORT + at % 8, data),
                1 => guest.bus.read_port(CONFIG_PORT + at % 8, data),
                2 => { guest.bus.write_memory(HOME + u64::from(at % 0x6100), data); }
                _ => { guest.bus.read_memory(HOME + u64::from(at % 0x6100), data); }
            }
        }
    }

    /// Arbitrary writes to the common configuration registers cause no panic.
    #[test]
    fn arbitrary_register_writes_are_safe(writes in proptest::collection::vec((0u64..60, 1usize..9, any::<u64>()), 0..200)) {
        let guest = TestGuest::new(&[&[16, 4]]);
        guest.negotiate(0);
        for (at, len, value) in writes {
            // Small values reach more states.
            guest.write(at, value & 0xFFF7, len);
            guest.read(at, len);
        }
    }
}
