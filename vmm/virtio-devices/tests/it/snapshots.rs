//! Tests that the saved queue and the disk image are consistent in a snapshot. After the snapshot,
//! the device must not write to the image until it is resumed.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use snapshot::state::SavedDevice;
use virtio_devices::device::{DeviceFailureCallback, VirtioDevice};
use virtio_devices::disk::BlockDevice;
use virtio_devices::disk::config::DiskConfig;
use virtio_devices::rate_limiter::RateLimiter;
use virtio_devices::rate_limiter::limits::RateLimits;
use virtio_devices::transport::bus::PciBus;
use virtio_devices::transport::machine::{MsiMessage, PciBackend};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

/// Guest address of the device's BAR.
const BAR: u64 = 0xE000_0000;
/// Offset of the doorbell of queue 0 in the device's BAR.
const DOORBELL: u64 = 0x3000;
const MEMORY_BYTES: usize = 4 << 20;
// Guest addresses of the queue's descriptor table, available ring and used ring.
const DESCRIPTORS: u64 = 0x1_0000;
const AVAIL: u64 = 0x1_1000;
const USED: u64 = 0x1_2000;
// Guest addresses of the request headers and of the status bytes.
const HEADERS: u64 = 0x1_3000;
const STATUS: u64 = 0x1_4000;
/// Guest address of the data of the first request.
const DATA: u64 = 0x10_0000;
/// Number of write requests in a test. Each request uses three descriptors.
const REQUESTS: u16 = 64;
const REQUEST_BYTES: u64 = 32 << 10;
const QUEUE_SIZE: u16 = 256;
// Flags of a descriptor.
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Machine without doorbells and interrupts. Queue notifications cause exits, and interrupts are
/// discarded.
struct Machine;

impl PciBackend for Machine {
    fn add_doorbell(&self, _: u64, _: &EventFd) -> io::Result<()> {
        Ok(())
    }

    fn remove_doorbell(&self, _: u64, _: &EventFd) -> io::Result<()> {
        Ok(())
    }

    fn connect(&self, _: u32, _: MsiMessage, _: &EventFd) -> io::Result<()> {
        Ok(())
    }

    fn disconnect(&self, _: u32, _: &EventFd) -> io::Result<()> {
        Ok(())
    }

    fn fatal_error_callback(&self) -> DeviceFailureCallback {
        DeviceFailureCallback::default()
    }
}

/// A guest with one disk.
struct TestGuest {
    bus: PciBus,
    memory: GuestMemoryMmap,
}

impl TestGuest {
    fn new(image: &Path) -> Self {
        Self::limited(image, RateLimits::default())
    }

    fn limited(image: &Path, limits: RateLimits) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).unwrap();
        let disk = BlockDevice::open("disk0".into(), &DiskConfig::raw(image)).unwrap();
        let disk = disk.with_limiter(RateLimiter::new(limits).unwrap());
        let machine: Arc<dyn PciBackend> = Arc::new(Machine);
        let window = 0xE000_0000..0xF000_0000;
        let devices: Vec<Box<dyn VirtioDevice>> = vec![Box::new(disk)];
        let bus = PciBus::new(devices, &memory, window, &machine).unwrap();
        Self { bus, memory }
    }

    /// Creates a guest from saved memory and devices, and starts its disk.
    fn restored(image: &Path, memory: &[u8], devices: &[SavedDevice]) -> Self {
        let guest = Self::new(image);
        guest.memory.write_slice(memory, GuestAddress(0)).unwrap();
        guest.bus.restore(0, devices).unwrap();
        guest.bus.resume();
        guest
    }

    fn write(&self, offset: u64, value: u64, bytes: usize) {
        let value = &value.to_le_bytes()[..bytes];
        assert!(self.bus.write_memory(BAR + offset, value));
    }

    /// Negotiates features, sets up the queue and sets DRIVER_OK, as a driver does.
    fn start_device(&self) {
        self.bus
            .write_port(0xCF8, &(1u32 << 31 | 1 << 11 | 4).to_le_bytes());
        self.bus.write_port(0xCFC, &6u32.to_le_bytes());
        self.write(20, 3, 1);
        // Accept the feature VERSION_1.
        self.write(8, 1, 4);
        self.write(12, 1, 4);
        self.write(20, 11, 1);
        self.write(22, 0, 2);
        for (offset, address) in [(32, DESCRIPTORS), (40, AVAIL), (48, USED)] {
            self.write(offset, address, 8);
        }
        self.write(28, 1, 2);
        self.write(20, 15, 1);
    }

    fn store<T: vm_memory::ByteValued>(&self, value: T, at: u64) {
        self.memory.write_obj(value, GuestAddress(at)).unwrap();
    }

    /// Adds write request number `number` and notifies the device. Each request fills its own 32
    /// KiB of the disk with the byte [`fill`]`(number)`.
    fn request(&self, number: u16) {
        let n = u64::from(number);
        let header = HEADERS + n * 16;
        // Request type VIRTIO_BLK_T_OUT.
        self.store(1u32, header);
        self.store(n * REQUEST_BYTES / 512, header + 8);
        let data = DATA + n * REQUEST_BYTES;
        let pattern = vec![fill(number); usize::try_from(REQUEST_BYTES).unwrap()];
        self.memory.write_slice(&pattern, GuestAddress(data)).unwrap();
        let first = number * 3;
        for (index, address, bytes, flags) in [
            (first, header, 16, NEXT),
            (first + 1, data, REQUEST_BYTES, NEXT),
            (first + 2, STATUS + n, 1, WRITE),
        ] {
            let at = DESCRIPTORS + u64::from(index) * 16;
            self.store(address, at);
            self.store(u32::try_from(bytes).unwrap(), at + 8);
            self.store(flags, at + 12);
            self.store(index + 1, at + 14);
        }
        self.store(first, AVAIL + 4 + 2 * u64::from(number % QUEUE_SIZE));
        self.store(number + 1, AVAIL + 2);
        self.write(DOORBELL, 0, 2);
    }

    /// Returns the number of requests that the device has returned to the driver.
    fn completed(&self) -> u16 {
        self.memory.read_obj(GuestAddress(USED + 2)).unwrap()
    }

    fn memory_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY_BYTES];
        self.memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
        bytes
    }
}

/// Returns the byte with which request number `number` fills its 32 KiB of the disk.
fn fill(number: u16) -> u8 {
    u8::try_from(number + 1).unwrap()
}

fn image(dir: &Path) -> std::path::PathBuf {
    let path = dir.join("disk");
    let bytes = u64::from(REQUESTS) * REQUEST_BYTES;
    fs::File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

/// Checks that the image contains the data of the first `count` requests, and no other data.
#[track_caller]
fn assert_written(image: &Path, count: u16) {
    let bytes = fs::read(image).unwrap();
    let parts = bytes.chunks(usize::try_from(REQUEST_BYTES).unwrap());
    for (number, part) in (0..).zip(parts) {
        let expected = if number < count { fill(number) } else { 0 };
        let is_equal = part.iter().all(|byte| *byte == expected);
        assert!(is_equal, "request {number} of {count} is {}", part[0]);
    }
}

/// After a snapshot, the disk image contains exactly the requests that the saved queue shows as
/// completed. The restored device executes the others.
#[test]
fn a_snapshot_and_its_disk_are_of_one_moment() {
    let dir = tempfile::tempdir().unwrap();
    let image = image(dir.path());
    for first in [1, 7, 20, REQUESTS] {
        fs::write(&image, []).unwrap();
        let guest = TestGuest::new(&self::image(dir.path()));
        guest.start_device();
        for number in 0..first {
            guest.request(number);
        }
        while guest.completed() < first / 2 {
            std::hint::spin_loop();
        }
        guest.bus.quiesce();
        let (memory, devices) = (guest.memory_bytes(), guest.bus.save());
        assert_written(&image, guest.completed());
        drop(guest);

        let restored = TestGuest::restored(&image, &memory, &devices);
        for number in first..REQUESTS {
            restored.request(number);
        }
        while restored.completed() < REQUESTS {
            std::thread::sleep(Duration::from_micros(100));
        }
        drop(restored);
        assert_written(&image, REQUESTS);
    }
}

/// Requests that wait for a rate limiter are pending in a snapshot. They are executed after the VM
/// resumes, and in a restored VM with another limiter or none.
#[test]
fn throttled_requests_are_executed_after_a_pause_and_a_restore() {
    const BEFORE: u16 = REQUESTS;
    let dir = tempfile::tempdir().unwrap();
    let image = image(dir.path());
    // Limit the disk to 32 KiB every 10 ms.
    let guest = TestGuest::limited(&image, "bandwidth=327680/100,ops=10/1".parse().unwrap());
    guest.start_device();
    for number in 0..BEFORE {
        guest.request(number);
    }
    while guest.completed() < 11 {
        std::thread::sleep(Duration::from_millis(1));
    }
    guest.bus.quiesce();
    let paused_at = guest.completed();
    assert!(paused_at < BEFORE, "the limiter lets all requests pass");
    // Sleep longer than the limiter's timer.
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(guest.completed(), paused_at);
    let (memory, devices) = (guest.memory_bytes(), guest.bus.save());
    guest.bus.resume();
    while guest.completed() < BEFORE {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(guest);
    assert_written(&image, BEFORE);

    fs::write(&image, []).unwrap();
    let restored = TestGuest::restored(&self::image(dir.path()), &memory, &devices);
    while restored.completed() < BEFORE {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// After a migration, the source does not write to the disk image, because the restored VM may
/// already be writing to it.
#[test]
fn the_source_writes_no_image_after_the_move() {
    let dir = tempfile::tempdir().unwrap();
    let image = image(dir.path());
    let guest = TestGuest::new(&image);
    guest.start_device();
    guest.request(0);
    guest.bus.quiesce();
    let completed = guest.completed();
    // Requests and notifications after the move, and the shutdown of the machine, must not change
    // the image.
    for number in 1..REQUESTS {
        guest.request(number);
    }
    let modified = fs::metadata(&image).unwrap().modified().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(guest.completed(), completed);
    guest.bus.reset();
    drop(guest);
    assert_written(&image, completed);
    assert_eq!(fs::metadata(&image).unwrap().modified().unwrap(), modified);
}
