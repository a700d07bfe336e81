//! Tests of well-formed and malformed disk requests.

use std::path::Path;
use std::sync::Arc;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES,
};
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::image::DiskImage;
use super::request::{BlockRequestError, DiskBackend, MAX_REQUEST_BYTES};
use super::*;
use crate::rate_limiter::RateLimitUpdate;
use crate::serve::serve_queue;
use crate::serve::testing::{BUFFERS, Driver, MEMORY_BYTES, activate, memory};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const HEADER: u64 = BUFFERS;
const STATUS: u64 = BUFFERS + 0x100;
const DATA: u64 = BUFFERS + 0x1000;
/// Initial value of a status byte, which the device never writes.
const NO_STATUS: u8 = 0xEE;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

struct DiskTest {
    memory: GuestMemoryMmap,
    disk: DiskBackend,
    _file: tempfile::NamedTempFile,
}

impl DiskTest {
    fn new(sectors: u64, read_only: bool) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(sectors * 512).unwrap();
        Self {
            memory: memory(),
            disk: disk(file.path(), read_only),
            _file: file,
        }
    }

    /// Executes a request that consists of `descriptors`. Returns the status byte, the number of
    /// bytes written according to the used ring, and the result.
    fn raw(&self, descriptors: &[Descriptor]) -> (u8, u32, Result<(), BlockRequestError>) {
        self.memory.write_obj(NO_STATUS, GuestAddress(STATUS)).unwrap();
        let mut driver = Driver::new(&self.memory, 256);
        driver.offer_chain(0, descriptors);
        let mut outcome = None;
        serve_queue(&mut driver.active, &self.memory, |chain| {
            let request = self.disk.serve(&self.memory, chain);
            assert!(outcome.replace(request.outcome).is_none());
            request.written
        })
        .unwrap();
        let status = self.memory.read_obj(GuestAddress(STATUS)).unwrap();
        (status, driver.used()[0].1, outcome.unwrap())
    }

    fn header(&self, kind: u32, sector: u64) -> Descriptor {
        self.memory.write_obj(kind, GuestAddress(HEADER)).unwrap();
        self.memory.write_obj(sector, GuestAddress(HEADER + 8)).unwrap();
        Descriptor::new(HEADER, 16, NEXT, 1)
    }

    fn request(&self, kind: u32, sector: u64, data: u32, to_guest: bool) -> (u8, u32) {
        let flags = if to_guest { NEXT | WRITE } else { NEXT };
        let chain = [
            self.header(kind, sector),
            Descriptor::new(DATA, data, flags, 2),
            Descriptor::new(STATUS, 1, WRITE, 0),
        ];
        let (status, written, _) = self.raw(&chain);
        (status, written)
    }

    fn range(&self, kind: u32, sector: u64, sectors: u32, flags: u32) -> u8 {
        self.memory.write_obj(sector, GuestAddress(DATA)).unwrap();
        self.memory.write_obj(sectors, GuestAddress(DATA + 8)).unwrap();
        self.memory.write_obj(flags, GuestAddress(DATA + 12)).unwrap();
        self.request(kind, 0, 16, false).0
    }
}

fn disk(path: &Path, read_only: bool) -> DiskBackend {
    let mut serial = [0; MAX_SERIAL];
    serial[..5].copy_from_slice(b"disk7");
    let config = DiskConfig {
        read_only,
        ..DiskConfig::raw(path)
    };
    DiskBackend {
        image: Arc::new(DiskImage::open(&config).unwrap()),
        serial,
        write_through: false,
    }
}

#[test]
fn data_is_read_back_unchanged() {
    let rig = DiskTest::new(8, false);
    rig.memory.write_slice(&[0x5A; 1024], GuestAddress(DATA)).unwrap();
    assert_eq!(rig.request(VIRTIO_BLK_T_OUT, 6, 1024, false), (OK, 1));
    assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, 0, false), (OK, 1));
    rig.memory.write_slice(&[0; 2048], GuestAddress(DATA)).unwrap();
    assert_eq!(rig.request(VIRTIO_BLK_T_IN, 5, 1536, true), (OK, 1537));
    let mut read = [0; 1536];
    rig.memory.read_slice(&mut read, GuestAddress(DATA)).unwrap();
    assert!(read[..512].iter().all(|b| *b == 0) && read[512..].iter().all(|b| *b == 0x5A));
}

#[test]
fn descriptor_layout_is_arbitrary() {
    let rig = DiskTest::new(8, false);
    rig.header(VIRTIO_BLK_T_IN, 1);
    // Split the header into three descriptors, and use one descriptor for data and status.
    let chain = [
        Descriptor::new(HEADER, 1, NEXT, 1),
        Descriptor::new(HEADER + 1, 14, NEXT, 2),
        Descriptor::new(HEADER + 15, 1, NEXT, 3),
        Descriptor::new(STATUS - 512, 513, WRITE, 0),
    ];
    let (status, written, outcome) = rig.raw(&chain);
    assert_eq!((status, written), (OK, 513));
    assert!(outcome.is_ok());
}

#[test]
fn access_beyond_disk_is_a_guest_error() {
    let rig = DiskTest::new(8, false);
    for (sector, bytes) in [
        (8, 512),
        (7, 1024),
        (u64::MAX, 512),
        (u64::MAX / 512, 512),
        (0, 100),
    ] {
        assert_eq!(
            rig.request(VIRTIO_BLK_T_IN, sector, bytes, true),
            (IOERR, 1),
            "{sector}"
        );
        assert_eq!(
            rig.request(VIRTIO_BLK_T_OUT, sector, bytes, false),
            (IOERR, 1),
            "{sector}"
        );
    }
    assert_eq!(rig.request(99, 0, 512, true), (UNSUPP, 1));
}

#[test]
fn serial_number_and_read_only_disk() {
    let rig = DiskTest::new(8, true);
    assert_eq!(rig.request(VIRTIO_BLK_T_GET_ID, 0, 20, true), (OK, 21));
    let mut serial = [1; 20];
    rig.memory.read_slice(&mut serial, GuestAddress(DATA)).unwrap();
    assert_eq!(&serial[..6], b"disk7\0");
    assert_eq!(rig.request(VIRTIO_BLK_T_OUT, 0, 512, false), (IOERR, 1));
    assert_eq!(rig.range(VIRTIO_BLK_T_DISCARD, 0, 1, 0), IOERR);
    assert_eq!(rig.range(VIRTIO_BLK_T_WRITE_ZEROES, 0, 1, 0), IOERR);
    assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, 0, false), (OK, 1));
}

#[test]
fn discard_and_write_zeroes_are_bounded() {
    let rig = DiskTest::new(65_536 * 2, false);
    rig.memory.write_slice(&[0x5A; 1024], GuestAddress(DATA)).unwrap();
    for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
        rig.memory.write_slice(&[0x5A; 1024], GuestAddress(DATA)).unwrap();
        assert_eq!(rig.request(VIRTIO_BLK_T_OUT, 1, 1024, false), (OK, 1));
        assert_eq!(rig.range(kind, 1, 1, 0), OK);
        assert_eq!(rig.request(VIRTIO_BLK_T_IN, 1, 1024, true), (OK, 1025));
        let byte = |at| rig.memory.read_obj::<u8>(GuestAddress(DATA + at)).unwrap();
        assert_eq!((byte(0), byte(511), byte(512)), (0, 0, 0x5A), "{kind}");
        assert_eq!(rig.range(kind, 0, 0, 0), OK);
        assert_eq!(rig.range(kind, 65_536 * 2, 1, 0), IOERR);
        assert_eq!(rig.range(kind, u64::MAX, u32::MAX, 0), IOERR);
        assert_eq!(rig.range(kind, 0, 65_537, 0), IOERR);
        assert_eq!(rig.range(kind, 0, 1, 2), UNSUPP);
        assert_eq!(rig.request(kind, 0, 0, false), (IOERR, 1));
        assert_eq!(rig.request(kind, 0, 17, false), (IOERR, 1));
        assert_eq!(rig.request(kind, 0, 17 * 16, false), (IOERR, 1));
    }
    assert_eq!(rig.range(VIRTIO_BLK_T_WRITE_ZEROES, 0, 1, 1), OK);
    assert_eq!(rig.range(VIRTIO_BLK_T_DISCARD, 0, 1, 1), UNSUPP);
}

#[test]
fn malformed_chain_fails_alone() {
    let rig = DiskTest::new(8, false);
    let header = rig.header(VIRTIO_BLK_T_IN, 0);
    let status = Descriptor::new(STATUS, 1, WRITE, 0);
    let short = Descriptor::new(HEADER, 15, NEXT, 1);
    let chains: [&[Descriptor]; 7] = [
        &[status],
        &[Descriptor::new(HEADER, 16, 0, 0)],
        &[short, status],
        &[header, Descriptor::new(STATUS, 0, WRITE, 0)],
        // Requests whose header or status is outside RAM.
        &[Descriptor::new(u64::MAX - 8, 16, NEXT, 1), status],
        &[header, Descriptor::new(MEMORY_BYTES as u64, 1, WRITE, 0)],
        &[header, Descriptor::new(u64::MAX, u32::MAX, WRITE, 0)],
    ];
    for chain in chains {
        let (status, written, outcome) = rig.raw(chain);
        assert_eq!((status, written), (NO_STATUS, 0), "{chain:?}");
        assert!(matches!(outcome, Err(BlockRequestError::Guest)));
    }
    // A request whose data is outside RAM, which the status reports.
    let data = Descriptor::new(MEMORY_BYTES as u64 - 256, 512, NEXT | WRITE, 2);
    assert_eq!(rig.raw(&[header, data, status]).0, IOERR);
}

#[test]
fn looped_and_nested_chains_terminate() {
    let rig = DiskTest::new(8, false);
    let header = rig.header(VIRTIO_BLK_T_IN, 0);
    // A request with a descriptor loop. The chain has as many descriptors as the queue has entries,
    // and the status is the last byte.
    let round = Descriptor::new(DATA, 512, NEXT | WRITE, 1);
    assert_eq!(rig.raw(&[header, round]).1, 1);
    assert_eq!(
        rig.memory.read_obj::<u8>(GuestAddress(DATA + 511)).unwrap(),
        IOERR
    );
    assert_eq!(rig.raw(&[Descriptor::new(HEADER, 16, NEXT, 0)]).1, 0);
    // A request in an indirect table of 65,535 chained descriptors.
    let table = BUFFERS + 0x1_0000;
    for n in 0..65_535u16 {
        let descriptor = Descriptor::new(DATA, 512, NEXT | WRITE, n.wrapping_add(1));
        let at = GuestAddress(table + u64::from(n) * 16);
        rig.memory.write_obj(RawDescriptor::from(descriptor), at).unwrap();
    }
    rig.memory
        .write_obj(RawDescriptor::from(header), GuestAddress(table))
        .unwrap();
    assert_eq!(rig.raw(&[Descriptor::new(table, 65_535 * 16, INDIRECT, 0)]).1, 0);
    // A request in a nested indirect table.
    let inner = RawDescriptor::from(Descriptor::new(table, 160, INDIRECT, 0));
    rig.memory.write_obj(inner, GuestAddress(table)).unwrap();
    for bytes in [0, 8, 16, 160, u32::MAX, 16 * 65_536] {
        assert_eq!(
            rig.raw(&[Descriptor::new(table, bytes, INDIRECT, 0)]).1,
            0,
            "{bytes}"
        );
    }
}

#[test]
fn indirect_request_is_served() {
    let rig = DiskTest::new(8, false);
    let table = BUFFERS + 0x1_0000;
    let chain = [
        rig.header(VIRTIO_BLK_T_IN, 0),
        Descriptor::new(DATA, 512, NEXT | WRITE, 2),
        Descriptor::new(STATUS, 1, WRITE, 0),
    ];
    for (n, descriptor) in (0u64..).zip(chain) {
        rig.memory
            .write_obj(RawDescriptor::from(descriptor), GuestAddress(table + n * 16))
            .unwrap();
    }
    let (status, written, _) = rig.raw(&[Descriptor::new(table, 48, INDIRECT, 0)]);
    assert_eq!((status, written), (OK, 513));
}

/// A disk request whose data exceeds the limit is rejected before any data is transferred. Buffers
/// may overlap, so a chain can describe a terabyte.
#[test]
fn request_size_is_bounded() {
    let rig = DiskTest::new(1 << 26, false);
    let pieces = |count: u16, bytes: u32| {
        let mut chain = vec![rig.header(VIRTIO_BLK_T_IN, 0)];
        chain.extend((2..2 + count).map(|next| Descriptor::new(DATA, bytes, NEXT | WRITE, next)));
        chain.push(Descriptor::new(STATUS, 1, WRITE, 0));
        chain
    };
    let most = u32::try_from(MAX_REQUEST_BYTES / 254).unwrap();
    let (status, _, outcome) = rig.raw(&pieces(254, most));
    assert_eq!(status, OK, "{outcome:?}");
    for bytes in [most + 512, 2 << 20] {
        rig.memory.write_obj(7u8, GuestAddress(DATA)).unwrap();
        let (status, written, outcome) = rig.raw(&pieces(254, bytes));
        assert_eq!((status, written), (IOERR, 1));
        assert!(matches!(outcome, Err(BlockRequestError::Guest)), "{outcome:?}");
        let untouched: u8 = rig.memory.read_obj(GuestAddress(DATA)).unwrap();
        assert_eq!(untouched, 7);
    }
}

/// A disk request with a data buffer outside RAM fails as an error of the guest and is not reported
/// to the operator.
#[test]
fn data_outside_ram_is_a_guest_error() {
    let rig = DiskTest::new(8, false);
    for at in [
        MEMORY_BYTES as u64,
        MEMORY_BYTES as u64 - 256,
        1 << 40,
        u64::MAX - 511,
    ] {
        let chain = [
            rig.header(VIRTIO_BLK_T_OUT, 0),
            Descriptor::new(at, 512, NEXT, 2),
            Descriptor::new(STATUS, 1, WRITE, 0),
        ];
        let (status, _, outcome) = rig.raw(&chain);
        assert_eq!(status, IOERR, "{at:#x}");
        assert!(
            matches!(outcome, Err(BlockRequestError::Guest)),
            "{at:#x}: {outcome:?}"
        );
    }
}

/// A guest cannot increase the rate of messages about failed disk requests by resetting the device.
#[test]
fn host_failure_messages_are_rate_limited() {
    let said = LastFailureMessage::default();
    assert!(is_due(&said));
    assert!(!is_due(&said.clone()), "the next server of the same disk");
    *said.lock().unwrap() = Instant::now().checked_sub(MIN_MESSAGE_INTERVAL);
    assert!(is_due(&said));
}

/// A flush request completes only after earlier writes are on the disk. The same applies to every
/// write if the driver does not support flush requests. Other requests do not wait for the disk.
#[test]
fn disk_is_flushed_only_when_required() {
    for write_through in [false, true] {
        let mut rig = DiskTest::new(64, false);
        rig.disk.write_through = write_through;
        let flushes = |rig: &DiskTest| {
            rig.disk
                .image
                .flushes
                .swap(0, std::sync::atomic::Ordering::Relaxed)
        };
        let changes = u32::from(write_through);
        assert_eq!(rig.request(VIRTIO_BLK_T_IN, 0, 512, true).0, OK);
        assert_eq!(rig.request(VIRTIO_BLK_T_GET_ID, 0, 20, true).0, OK);
        assert_eq!(flushes(&rig), 0, "reads");
        assert_eq!(rig.request(VIRTIO_BLK_T_OUT, 0, 512, false).0, OK);
        assert_eq!(flushes(&rig), changes, "a write");
        assert_eq!(rig.range(VIRTIO_BLK_T_WRITE_ZEROES, 0, 8, 0), OK);
        assert_eq!(flushes(&rig), changes, "zeros");
        if rig.range(VIRTIO_BLK_T_DISCARD, 0, 8, 0) == OK {
            assert_eq!(flushes(&rig), changes, "a discard");
        }
        assert_eq!(rig.request(VIRTIO_BLK_T_OUT, 64, 512, false).0, IOERR);
        assert_eq!(flushes(&rig), 0, "what is refused");
        assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, 0, false).0, OK);
        assert_eq!(flushes(&rig), 1, "a flush");
    }
}

/// Requests must cover whole blocks. Their addresses are in sectors of 512 bytes regardless of the
/// block size (5.2.6.4).
#[test]
fn requests_must_cover_whole_blocks() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(65_536).unwrap();
    let config = DiskConfig {
        block_bytes: Some(4096),
        ..DiskConfig::raw(file.path())
    };
    let block = BlockDevice::open("disk7".into(), &config).unwrap();
    let mut word = [0; 4];
    block.read_config(20, &mut word);
    assert_eq!(u32::from_le_bytes(word), 4096, "blk_size");
    block.read_config(44, &mut word);
    assert_eq!(u32::from_le_bytes(word), 8, "discard_sector_alignment");
    drop(block);

    let mut rig = DiskTest::new(128, false);
    rig.disk.image = Arc::new(DiskImage::open(&config).unwrap());
    for (sector, bytes, status) in [(8, 4096, OK), (0, 65_536, OK), (1, 4096, IOERR), (8, 512, IOERR)] {
        assert_eq!(rig.request(VIRTIO_BLK_T_OUT, sector, bytes, false).0, status);
        assert_eq!(rig.request(VIRTIO_BLK_T_IN, sector, bytes, true).0, status);
    }
    assert_eq!(rig.range(VIRTIO_BLK_T_WRITE_ZEROES, 8, 8, 0), OK);
    assert_eq!(rig.range(VIRTIO_BLK_T_WRITE_ZEROES, 8, 7, 0), IOERR);
    assert_eq!(rig.range(VIRTIO_BLK_T_DISCARD, 4, 8, 0), IOERR);
}

/// Returns a block device of 8 sectors and its image file.
fn device() -> (BlockDevice, tempfile::NamedTempFile) {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(8 * 512).unwrap();
    let block = BlockDevice::open("disk7".into(), &DiskConfig::raw(file.path())).unwrap();
    (block, file)
}

#[test]
fn disk_works_after_broken_ring_and_reset() {
    let memory = memory();
    let (mut block, _file) = device();
    for breaks in [true, false] {
        let mut driver = Driver::new(&memory, 16);
        driver.write(0, &[Descriptor::new(STATUS, 1, WRITE, 0)]);
        // The queue has 16 descriptors, so index 16 is invalid.
        driver.offer(if breaks { 16 } else { 0 });
        let seen = activate(&mut block, &driver);
        driver.kick();
        if breaks {
            seen.changed.read().unwrap();
        }
        // Requests in progress complete before the device stops.
        driver.wait_until_used(usize::from(!breaks));
        block.reset();
        let needs_reset = seen.needs_reset();
        assert_eq!((needs_reset, driver.used().len()), (breaks, usize::from(!breaks)));
    }
}

/// Disk requests are not processed until the driver notifies the device, and a device without
/// notifications can be stopped.
#[test]
fn device_without_kicks_can_be_stopped() {
    let memory = memory();
    let (mut block, _file) = device();
    let mut driver = Driver::new(&memory, 16);
    driver.offer_chain(0, &[Descriptor::new(STATUS, 1, WRITE, 0)]);
    let seen = activate(&mut block, &driver);
    block.reset();
    assert_eq!(driver.used(), []);
    assert!(!seen.needs_reset());
}

/// A driver that notifies the disk continuously does not keep the disk's thread from stopping, even
/// if the queue is broken. Notifications are coalesced.
#[test]
fn continuous_kicks_do_not_block_stop() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let memory = memory();
    for breaks in [false, true] {
        let (mut block, _file) = device();
        let mut driver = Driver::new(&memory, 16);
        driver.offer_chain(0, &[Descriptor::new(STATUS, 1, WRITE, 0)]);
        if breaks {
            driver.offer(16);
        }
        let (kick, end) = (driver.active.kick.clone(), Arc::new(AtomicBool::new(false)));
        let kicks = std::thread::spawn({
            let end = end.clone();
            move || {
                let mut kicks = 0u64;
                while !end.load(Ordering::Relaxed) {
                    kicks += u64::from(kick.write(1).is_ok());
                }
                kicks
            }
        });
        let _seen = activate(&mut block, &driver);
        driver.wait_until_used(1);
        block.reset();
        end.store(true, Ordering::Relaxed);
        assert!(kicks.join().unwrap() > 0);
        assert_eq!(driver.used().len(), 1);
    }
}

/// Sends `count` read requests of one sector each, waits until the device has completed them, and
/// returns the elapsed time.
fn read_sectors(driver: &mut Driver<'_>, memory: &GuestMemoryMmap, count: usize) -> Duration {
    let start = Instant::now();
    let first = driver.used().len();
    memory.write_obj(VIRTIO_BLK_T_IN, GuestAddress(HEADER)).unwrap();
    memory.write_obj(0_u64, GuestAddress(HEADER + 8)).unwrap();
    let chain = [
        Descriptor::new(HEADER, 16, NEXT, 1),
        Descriptor::new(DATA, 512, NEXT | WRITE, 2),
        Descriptor::new(STATUS, 1, WRITE, 0),
    ];
    for _ in 0..count {
        driver.offer_chain(0, &chain);
    }
    driver.kick();
    driver.wait_until_used(first + count);
    start.elapsed()
}

fn limited(limits: &str) -> (BlockDevice, tempfile::NamedTempFile) {
    let (block, file) = device();
    let config: DiskConfig = format!("x,{limits}").parse().unwrap();
    (block.with_limiter(RateLimiter::new(config.limits).unwrap()), file)
}

/// With a limit on bytes or on operations, one driver notification is sufficient for all disk
/// requests. The disk's thread sleeps while requests are throttled.
#[test]
fn throttled_requests_are_served_by_the_timer() {
    let memory = memory();
    for limits in ["ops=10/100", "bandwidth=5120/100"] {
        let (mut block, _file) = limited(limits);
        let mut driver = Driver::new(&memory, 256);
        let _seen = activate(&mut block, &driver);
        // The bucket holds the tokens of 10 requests and is refilled at 100 requests per second.
        let took = read_sectors(&mut driver, &memory, 40);
        assert!(took >= Duration::from_millis(290), "{limits}: {took:?}");
        let throttled = block.rate_limiters()[0].1.throttled();
        assert!(
            (1..=40).contains(&throttled),
            "{limits}: paused {throttled} times"
        );
        block.reset();
    }
}

/// A device reset does not grant the guest a new burst, because the disk keeps the state of its
/// rate limiter.
#[test]
fn limit_outlives_a_reset() {
    let memory = memory();
    let (mut block, _file) = limited("ops=1/200+9");
    let mut driver = Driver::new(&memory, 256);
    for count in [10, 1, 1] {
        let _seen = activate(&mut block, &driver);
        let took = read_sectors(&mut driver, &memory, count);
        assert!(count > 1 || took >= Duration::from_millis(100), "{took:?}");
        block.reset();
    }
}

#[test]
fn removed_limit_releases_waiting_requests() {
    let memory = memory();
    let (mut block, _file) = limited("ops=1/86400000");
    let mut driver = Driver::new(&memory, 256);
    let _seen = activate(&mut block, &driver);
    read_sectors(&mut driver, &memory, 1);
    let limiter = block.rate_limiters()[0].1.clone();
    let change = std::thread::spawn(move || {
        while limiter.throttled() == 0 {
            std::thread::yield_now();
        }
        limiter.change(RateLimitUpdate::Keep, RateLimitUpdate::Remove);
    });
    read_sectors(&mut driver, &memory, 20);
    change.join().unwrap();
    block.reset();
}

/// After the driver has broken the queue, the limiter's timer does not keep the thread busy.
#[test]
fn broken_queue_ignores_the_timer() {
    let memory = memory();
    let (mut block, _file) = limited("ops=1/50");
    let mut driver = Driver::new(&memory, 16);
    driver.offer_chain(0, &[Descriptor::new(STATUS, 1, WRITE, 0)]);
    driver.offer(16);
    let seen = activate(&mut block, &driver);
    driver.kick();
    seen.changed.read().unwrap();
    assert_eq!(
        driver.used().len(),
        1,
        "the first request, then the invalid one after a pause"
    );
    block.reset();
}

/// The transferred bytes of a disk request include its data and the zeros that the host may have to
/// write, but neither headers nor rejected data.
#[test]
fn transferred_bytes_are_those_of_the_request() {
    let rig = DiskTest::new(128, false);
    let transferred = |chain: &[Descriptor]| {
        let mut driver = Driver::new(&rig.memory, 256);
        driver.offer_chain(0, chain);
        let mut bytes = 0;
        serve_queue(&mut driver.active, &rig.memory, |chain| {
            let request = rig.disk.serve(&rig.memory, chain);
            bytes = request.transferred;
            request.written
        })
        .unwrap();
        bytes
    };
    let status = Descriptor::new(STATUS, 1, WRITE, 0);
    for (kind, flags, sector, bytes, expected) in [
        (VIRTIO_BLK_T_IN, WRITE, 0, 1024, 1024),
        (VIRTIO_BLK_T_OUT, 0, 0, 4096, 4096),
        (VIRTIO_BLK_T_FLUSH, 0, 0, 0, 0),
        (VIRTIO_BLK_T_GET_ID, WRITE, 0, 20, 0),
        // Requests beyond the end of the disk, and one longer than the maximum length of a request.
        (VIRTIO_BLK_T_OUT, 0, 128, 512, 0),
        (VIRTIO_BLK_T_OUT, 0, 0, u32::MAX, 0),
    ] {
        let data = Descriptor::new(DATA, bytes, NEXT | flags, 2);
        let chain = [rig.header(kind, sector), data, status];
        assert_eq!(transferred(&chain), expected, "{kind} {sector} {bytes}");
    }
    let range = Descriptor::new(DATA, 16, NEXT, 2);
    for (kind, expected) in [(VIRTIO_BLK_T_WRITE_ZEROES, 2048), (VIRTIO_BLK_T_DISCARD, 0)] {
        rig.memory.write_obj(0_u64, GuestAddress(DATA)).unwrap();
        rig.memory.write_obj([4_u32, 0], GuestAddress(DATA + 8)).unwrap();
        let chain = [rig.header(kind, 0), range, status];
        assert_eq!(transferred(&chain), expected, "{kind}");
    }
}
