//! The reader over rings that the kernel writes: the layout and the protocol really are the kernel's.

#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};

use perf_core::attr::{ReadFormat, SampleType};
use perf_core::record::{Format, Record};
use perf_core::ring::RingReader;
use perf_event::events::Software;
use perf_event::{Builder, SampleFlag};

const PAGE: usize = 4096;

/// Takes `pages` page faults.
fn fault(pages: usize) {
    let len = pages * PAGE;
    // SAFETY: memory of its own, used within its bounds, one page at a time, and unmapped at the end.
    unsafe {
        let (prot, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        let memory = libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0);
        assert_ne!(memory, libc::MAP_FAILED);
        libc::madvise(memory, len, libc::MADV_NOHUGEPAGE);
        for page in 0..pages {
            memory.cast::<u8>().add(page * PAGE).write_volatile(1);
        }
        libc::munmap(memory, len);
    }
}

#[test]
fn samples_that_the_kernel_wrote_are_read_in_place_and_over_the_wrap() {
    let format = Format {
        sample_type: SampleType::IP
            | SampleType::TID
            | SampleType::TIME
            | SampleType::ADDR
            | SampleType::PERIOD,
        read_format: ReadFormat::empty(),
    };
    let flags = SampleFlag::IP | SampleFlag::TID | SampleFlag::TIME | SampleFlag::ADDR | SampleFlag::PERIOD;
    let mut counter = match Builder::new(Software::PAGE_FAULTS)
        .sample_period(1)
        .sample(flags)
        .build()
    {
        Ok(counter) => counter,
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            eprintln!("skipped: this user may not open perf events ({error})");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let fd = borrow(&counter);
    let mut reader = RingReader::map_perf(fd, 1).expect("a ring of one page");
    let (mut samples, mut last_time, mut bytes) = (0, 0, 0);
    // A record is 56 bytes, and 4096 is no multiple of that: records wrap.
    for round in 0..50 {
        counter.enable().expect("can be enabled");
        fault(40);
        counter.disable().expect("can be disabled");
        let mut check = |record: Record<'_>| match record {
            Record::Sample(sample) => {
                assert_eq!(sample.pid, std::process::id());
                assert!(sample.time_ns >= last_time, "in order");
                assert_eq!(sample.period, 1);
                assert!(sample.ip != 0 && sample.addr != 0);
                last_time = sample.time_ns;
                samples += 1;
            }
            Record::Throttle(_) | Record::Unthrottle(_) | Record::Lost(_) => {}
            other => panic!("{other:?}"),
        };
        if round % 2 == 0 {
            while let Some(raw) = reader.next_record().expect("the kernel's rings are sound") {
                bytes += raw.bytes().len();
                check(Record::decode(raw, format).expect("the kernel's records are whole"));
            }
        } else {
            for raw in reader.batch().expect("the kernel's rings are sound") {
                bytes += raw.bytes().len();
                check(Record::decode(raw, format).expect("the kernel's records are whole"));
            }
        }
    }
    assert!(bytes > 4 * PAGE, "{bytes} bytes: it wrapped");
    let counted = counter.read().expect("can be read");
    assert!(
        samples <= counted && samples >= counted / 2,
        "{samples} samples of {counted} faults"
    );
    let now = reader
        .counter()
        .expect("the kernel is not in the middle of an update");
    assert!(now.time_enabled_ns >= now.time_running_ns);
}

fn borrow(counter: &perf_event::Counter) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open as long as the counter it is borrowed from.
    unsafe { BorrowedFd::borrow_raw(counter.as_raw_fd()) }
}

#[test]
fn rings_that_cannot_be_mapped_are_refused() {
    let ring = perf_core::ring::Ring::new(1, perf_core::ring::RingMode::Writable).expect("a ring");
    for pages in [0, 3, 1 << 20] {
        assert!(
            RingReader::map_perf(ring.memfd(), pages).is_err(),
            "{pages} pages"
        );
    }
}
