//! Tests of readers with corrupted rings. Each type of corruption is reported with its position,
//! everything up to the head is skipped, and reading continues. Also tests which file descriptors
//! are accepted as rings.

#![expect(unsafe_code, reason = "system calls")]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::sync::Arc;

use perf_core::ring::{PAGE_SIZE, PollState, RawRecord, Ring, RingFullPolicy, RingReadError, RingReader};

use crate::common::ring::{DATA_HEAD, DATA_TAIL, TAGGED, foreign, peek, poke, ring_and_reader, write};

/// Byte offset of `data_offset` in the control page.
const DATA_OFFSET: u64 = 1040;
/// Byte offset of `data_size` in the control page.
const DATA_SIZE: u64 = 1048;
const PAGE: u64 = PAGE_SIZE as u64;

/// Writes the header of a record with size `size` to the ring at position `position`.
fn header(ring: &File, position: u64, size: u64) {
    poke(ring, PAGE + position % PAGE, u64::from(TAGGED) | size << 48);
}

/// Returns the position and the description of the corruption that `error` reports.
fn corrupt(error: RingReadError) -> (u64, &'static str) {
    match error {
        RingReadError::Corrupt { position, what } => (position, what),
        other => panic!("{other}"),
    }
}

const SMALL: &str = "the record is smaller than its header";
const ODD: &str = "the size of the record is not a multiple of 8";
const BEYOND: &str = "the record ends beyond the head";
const HEAD: &str = "the head is behind the tail or beyond the ring";

/// Writes a record of 16 bytes and a second record whose header claims `size` bytes. Sets the head
/// so that the second record has `there` available bytes.
fn one_good_one_bad(size: u64, there: u64) -> (Ring, File) {
    let ring = Ring::new(1, RingFullPolicy::Writable).expect("a ring");
    let memory = foreign(&ring);
    header(&memory, 0, 16);
    header(&memory, 16, size);
    poke(&memory, DATA_HEAD, 16 + there);
    (ring, memory)
}

fn size_of_record(record: RawRecord<'_>) -> u64 {
    record.bytes().len() as u64
}

/// Reads the next record and returns its size in bytes, or `None` if the ring is empty.
fn next_size(reader: &mut RingReader) -> Option<u64> {
    reader.next_record().expect("sound").map(size_of_record)
}

const BAD: [(u64, u64, &str); 6] = [
    (0, 24, SMALL),
    (7, 24, SMALL),
    (9, 24, ODD),
    (12, 24, ODD),
    (32, 24, BEYOND),
    (0xfff8, 24, BEYOND),
];

#[test]
fn corrupt_records_are_reported_and_skipped() {
    for (size, there, what) in BAD {
        let (ring, memory) = one_good_one_bad(size, there);
        let mut reader = RingReader::map(ring.memfd()).expect("maps");
        let record = reader.next_record().expect("sound").expect("one");
        assert_eq!((record.ty(), record.bytes().len()), (TAGGED, 16));
        let error = reader.next_record().expect_err("nonsense");
        assert_eq!(corrupt(error), (16, what), "{size} bytes of {there}");
        // The corrupt space was returned to the writer, and reading continues with the next record.
        assert_eq!(peek(&memory, DATA_TAIL), 16 + there);
        assert!(reader.next_record().expect("nothing").is_none());
        header(&memory, 16 + there, 24);
        poke(&memory, DATA_HEAD, 16 + there + 24);
        assert_eq!(next_size(&mut reader), Some(24));
    }
}

#[test]
fn batch_ends_before_corrupt_record() {
    for (size, there, what) in BAD {
        let (ring, memory) = one_good_one_bad(size, there);
        let mut reader = RingReader::map(ring.memfd()).expect("maps");
        let sizes: Vec<_> = reader.batch().expect("sound").map(size_of_record).collect();
        assert_eq!(sizes, [16], "{size} bytes of {there}");
        let error = reader.batch().err().expect("nonsense");
        assert_eq!(corrupt(error), (16, what), "{size} bytes of {there}");
        assert_eq!(peek(&memory, DATA_TAIL), 16 + there);
        assert_eq!(reader.batch().expect("nothing").count(), 0);
    }
}

/// A reader accepts a record of the minimum size and a record that ends exactly at the head.
#[test]
fn records_of_limit_sizes_are_valid() {
    for (size, there) in [(8, 8), (24, 24), (PAGE - 16, PAGE - 16)] {
        let (ring, _) = one_good_one_bad(size, there);
        let mut reader = RingReader::map(ring.memfd()).expect("maps");
        let sizes: Vec<_> = reader.batch().expect("sound").map(size_of_record).collect();
        assert_eq!(sizes, [16, size]);
        let (ring, _) = one_good_one_bad(size, there);
        let mut reader = RingReader::map(ring.memfd()).expect("maps");
        let sizes = [(); 3].map(|()| next_size(&mut reader));
        assert_eq!(sizes, [Some(16), Some(size), None]);
    }
}

#[test]
fn invalid_head_is_reported() {
    for (tail, head, sound) in [
        (0, PAGE, true),
        (0, PAGE + 8, false),
        (64, 64 + PAGE, true),
        (64, 72 + PAGE, false),
        (64, 56, false),
        (64, 1 << 63, false),
        (u64::MAX - 7, 8, true),
        // A head that is not a multiple of 8 is rounded down.
        (0, PAGE + 7, true),
    ] {
        let ring = Ring::new(1, RingFullPolicy::Writable).expect("a ring");
        let memory = foreign(&ring);
        poke(&memory, DATA_TAIL, tail);
        let mut reader = RingReader::map(ring.memfd()).expect("maps");
        header(&memory, tail, 8);
        poke(&memory, DATA_HEAD, head);
        match reader.next_record() {
            Ok(record) => assert!(sound && record.is_some(), "{tail} {head}"),
            Err(error) => {
                assert!(!sound, "{tail} {head}: {error}");
                assert_eq!(corrupt(error), (tail, HEAD));
                assert!(reader.next_record().expect("skipped").is_none());
                assert_eq!(peek(&memory, DATA_TAIL), head);
            }
        }
    }
}

#[test]
fn ring_without_data_has_no_head() {
    let ring = Ring::new(0, RingFullPolicy::Writable).expect("a ring");
    let mut reader = RingReader::map(ring.memfd()).expect("maps");
    assert!(reader.next_record().expect("nothing").is_none());
    poke(&foreign(&ring), DATA_HEAD, 8);
    assert_eq!(corrupt(reader.next_record().expect_err("nowhere")), (0, HEAD));
}

/// A reader that maps an overwrite ring after some writes begins at the first record if and only if
/// a reader that existed before the writes is not overrun.
#[test]
fn late_and_early_overwrite_readers_trust_equal_ranges() {
    let mut early_least = None;
    for records in 1..=PAGE / 24 + 1 {
        let (ring, mut early) = ring_and_reader(1, RingFullPolicy::Overwrite);
        for n in 0..records {
            write(&ring, 24, 0, n).expect("overwrites");
        }
        let mut late = RingReader::map(ring.memfd()).expect("maps");
        let read = |reader: &mut RingReader| {
            let mut read = 0;
            while reader.next_record()?.is_some() {
                read += 1;
            }
            Ok::<u64, RingReadError>(read)
        };
        let late = read(&mut late).expect("sound");
        match read(&mut early) {
            Ok(all) => {
                assert_eq!((all, late), (records, records));
                assert_eq!(early_least, None, "more was there before");
            }
            Err(RingReadError::Overrun { bytes }) => {
                let rest = read(&mut early).expect("resynchronised");
                assert_eq!(bytes + 24 * rest, 24 * records, "{records} records");
                // An overrun reader skips to the newer half of the ring, whereas a late reader
                // begins at the oldest known record.
                assert!(late >= rest && late < records);
                assert!(24 * rest > PAGE / 2 - PAGE / 16 - 24);
                assert!(24 * late > PAGE * 3 / 4 - PAGE / 16 - 24);
                early_least.get_or_insert(records);
            }
            Err(error) => panic!("{error}"),
        }
    }
    // The early reader is overrun once less than a quarter of the ring is left for writers.
    let least = early_least.expect("a full ring has overwritten something");
    assert_eq!(least, PAGE * 3 / 4 / 24 + 1);
}

/// A batch of an overwrite ring is empty, because the records of such a ring can only be trusted
/// one at a time.
#[test]
fn overwrite_ring_yields_no_batch() {
    let (ring, mut reader) = ring_and_reader(1, RingFullPolicy::Overwrite);
    write(&ring, 24, 0, 0).expect("room");
    assert_eq!(reader.batch().expect("sound").count(), 0);
    assert!(reader.next_record().expect("sound").is_some());
}

/// A head that moves backwards is reported as corruption, not as an overrun, even in an overwrite
/// ring.
#[test]
fn backward_head_of_overwrite_ring_is_reported() {
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_FUTURE_WRITE;
    for (back, sound) in [(0, true), (8, false), (PAGE, false)] {
        // A ring of zeros, mapped before it is sealed, so that its head can still be changed.
        let file = memfd(2 * PAGE, libc::F_SEAL_GROW, PAGE, PAGE);
        poke(&file, DATA_HEAD, 2 * PAGE);
        let page = shared(&file);
        // SAFETY: plain system call on an open file descriptor.
        let sealed = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
        assert_eq!(sealed, 0);
        let mut reader = RingReader::map(file.as_fd()).expect("a ring");
        assert_eq!(reader.mode(), RingFullPolicy::Overwrite);
        // SAFETY: the mapping exists until the end of this iteration, and the head is an aligned
        // word in it.
        unsafe { page.byte_add(DATA_HEAD as usize).write_volatile(2 * PAGE - back) };
        match reader.next_record() {
            Ok(record) => assert!(sound && record.is_none(), "{back}"),
            Err(error) => {
                assert!(!sound, "{back}: {error}");
                assert_eq!(corrupt(error), (2 * PAGE, HEAD));
                assert!(reader.next_record().expect("skipped").is_none());
            }
        }
        // SAFETY: mapped by `shared` with this length and not used again.
        unsafe { libc::munmap(page.cast(), PAGE_SIZE) };
    }
}

/// Maps the first page of `file`. The mapping stays writable after the file is sealed.
fn shared(file: &File) -> *mut u64 {
    // SAFETY: a new mapping of the file's first page; the result is checked.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            PAGE_SIZE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    assert_ne!(page, libc::MAP_FAILED);
    page.cast()
}

/// A reader releases space after each quarter of the ring, and when it has read all records.
#[test]
fn space_is_released_per_quarter() {
    let ring = Arc::new(Ring::new(1, RingFullPolicy::Writable).expect("a ring"));
    let memory = foreign(&ring);
    let mut reader = RingReader::of(Arc::clone(&ring));
    for n in 0..100 {
        write(&ring, 32, 0, n).expect("room");
    }
    let mut tails = Vec::new();
    for n in 1..=100u64 {
        assert!(reader.next_record().expect("sound").is_some());
        let tail = peek(&memory, DATA_TAIL);
        if tails.last().is_none_or(|(_, last)| *last != tail) {
            tails.push((n, tail));
        }
    }
    // A quarter of the ring holds 32 records. Reading the 33rd record releases the first 32.
    assert_eq!(tails, [(1, 0), (33, 1024), (65, 2048), (97, 3072)]);
    assert!(reader.next_record().expect("nothing").is_none());
    assert_eq!(peek(&memory, DATA_TAIL), 3200);
}

/// Creates a memfd of `len` bytes with `seals`, whose control page describes `data_size` bytes at
/// `data_offset`.
fn memfd(len: u64, seals: libc::c_int, data_offset: u64, data_size: u64) -> File {
    // SAFETY: the name is a valid C string; the result is checked.
    let fd = unsafe { libc::memfd_create(c"test".as_ptr(), libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC) };
    assert!(fd >= 0);
    // SAFETY: the file descriptor is new and has no other owner.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len).expect("sparse");
    if len >= PAGE {
        poke(&file, DATA_OFFSET, data_offset);
        poke(&file, DATA_SIZE, data_size);
    }
    // SAFETY: plain system call on an open file descriptor.
    let sealed = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
    assert_eq!(sealed, 0);
    file
}

#[test]
fn non_ring_is_rejected_with_reason() {
    const LARGE: u64 = (1 << 17) * PAGE;
    let sealed = libc::F_SEAL_SHRINK;
    for (len, seals, data_offset, data_size, why) in [
        (2 * PAGE, libc::F_SEAL_GROW, PAGE, PAGE, "not sealed"),
        (2 * PAGE + 1, sealed, PAGE, PAGE + 1, "1 + 2^n pages"),
        (4 * PAGE, sealed, PAGE, 3 * PAGE, "1 + 2^n pages"),
        (PAGE - 1, sealed, PAGE, 0, "1 + 2^n pages"),
        (0, sealed, PAGE, 0, "1 + 2^n pages"),
        // A sparse file above the maximum ring size.
        (PAGE + LARGE, sealed, PAGE, LARGE, "1 + 2^n pages"),
        (2 * PAGE, sealed, 2 * PAGE, PAGE, "control page"),
        (2 * PAGE, sealed, PAGE, 2 * PAGE, "control page"),
    ] {
        let file = memfd(len, seals, data_offset, data_size);
        let error = RingReader::map(file.as_fd()).expect_err(why).to_string();
        assert!(error.contains(why), "{len} bytes, seals {seals:#x}: {error}");
    }
    let null = File::open("/dev/null").expect("exists");
    let error = RingReader::map(null.as_fd()).expect_err("a device").to_string();
    assert!(error.contains("not a memfd"), "{error}");
}

/// The control page contains the supported fields for readers of kernel rings. Bit 0 of the
/// capabilities, which older kernels used for two purposes, is cleared.
#[test]
fn control_page_reports_supported_fields() {
    let ring = Ring::new(1, RingFullPolicy::Writable).expect("a ring");
    let memory = foreign(&ring);
    let (version, capabilities, size) = (peek(&memory, 0), peek(&memory, 40), peek(&memory, 72));
    assert_eq!((version, capabilities, size), (0, 1 << 1, 96));
    assert_eq!(
        (peek(&memory, DATA_OFFSET), peek(&memory, DATA_SIZE)),
        (PAGE, PAGE)
    );
}

/// A kernel ring of the maximum size can be mapped. Larger sizes and sizes that are not powers of
/// two are rejected.
#[test]
fn kernel_ring_page_count_is_limited() {
    let no_event = File::open("/dev/null").expect("there is one");
    for (pages, asked) in [
        (0, false),
        (1, true),
        (3, false),
        (1 << 16, true),
        (1 << 17, false),
    ] {
        let error = RingReader::map_perf(no_event.as_fd(), pages).expect_err("no event");
        assert_eq!(
            matches!(error, RingReadError::Os { .. }),
            asked,
            "{pages} pages: {error}"
        );
    }
}

/// A ring whose memfd is sealed against writing is in overwrite mode, because the reader cannot
/// advance the tail.
#[test]
fn ring_mode_is_derived_from_seals() {
    let size = libc::F_SEAL_SHRINK;
    for (seals, data_size, mode) in [
        (size, PAGE, RingFullPolicy::Writable),
        (size | libc::F_SEAL_GROW, PAGE, RingFullPolicy::Writable),
        (size | libc::F_SEAL_FUTURE_WRITE, PAGE, RingFullPolicy::Overwrite),
        (size | libc::F_SEAL_WRITE, PAGE, RingFullPolicy::Overwrite),
        (size, 0, RingFullPolicy::Writable),
    ] {
        let file = memfd(PAGE + data_size, seals, PAGE, data_size);
        let reader = RingReader::map(file.as_fd()).expect("a ring");
        assert_eq!(reader.mode(), mode, "seals {seals:#x}");
    }
}

#[test]
fn count_of_the_eventfd_is_notifications_and_a_hang_up() {
    let state = |count| {
        let state = PollState::from_count(count);
        (state.readable, state.hang_up)
    };
    let ring = Ring::new(1, RingFullPolicy::Writable).expect("a ring");
    ring.hang_up();
    let mut count = [0; 8];
    // SAFETY: the buffer has the 8 bytes that reading an eventfd fills.
    let n = unsafe { libc::read(ring.wakeup_fd().as_raw_fd(), count.as_mut_ptr().cast(), 8) };
    assert_eq!(n, 8);
    let hang_up = u64::from_ne_bytes(count);
    assert_eq!(state(0), (false, false));
    assert_eq!(state(1), (true, false));
    assert_eq!(state(hang_up - 1), (true, false));
    assert_eq!(state(hang_up), (false, true));
    assert_eq!(state(hang_up + 1), (true, true));
}
