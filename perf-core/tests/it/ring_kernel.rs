//! Tests that ring layout, ring protocol and record encoding match those of the kernel: records are
//! read from a kernel ring, decoded and encoded again.

#![expect(unsafe_code, reason = "calls of the system")]

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use perf_core::attr::{Attr, EventType, ReadFormat, SampleType};
use perf_core::record::{DecodedRecord, EncodeRecord, RecordFormat};
use perf_core::ring::{Ring, RingFullPolicy, RingReader};
use perf_event::events::Software;
use perf_event::{Builder, SampleFlag};

use crate::common::memory::fault;
use test_support::skip;

/// All sample types that a kernel event in these tests can request.
const ALL: SampleType = SampleType::all()
    .difference(SampleType::REGS_USER)
    .difference(SampleType::STACK_USER)
    .difference(SampleType::BRANCH_STACK);

const PAGE: usize = 4096;

#[test]
fn kernel_samples_are_read_in_place_and_across_wrap() {
    use SampleType as S;
    let format = RecordFormat::of_samples(S::IP | S::TID | S::TIME | S::ADDR | S::PERIOD);
    let flags = SampleFlag::IP | SampleFlag::TID | SampleFlag::TIME | SampleFlag::ADDR | SampleFlag::PERIOD;
    let mut counter = match Builder::new(Software::PAGE_FAULTS)
        .sample_period(1)
        .sample(flags)
        .build()
    {
        Ok(counter) => counter,
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            skip::skipped(&format!("this user may not open perf events ({error})"), false);
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let fd = borrow(&counter);
    let mut reader = RingReader::map_perf(fd, 1).expect("a ring of one page");
    let (mut samples, mut last_time, mut bytes) = (0, 0, 0);
    // Each record has 56 bytes, which does not divide the ring size of 4096, so some records wrap.
    for round in 0..50 {
        counter.enable().expect("can be enabled");
        fault(40);
        counter.disable().expect("can be disabled");
        let mut check = |record: DecodedRecord<'_>| match record {
            DecodedRecord::Sample(sample) => {
                assert_eq!(sample.pid, std::process::id());
                assert!(sample.time_ns >= last_time, "in order");
                assert_eq!(sample.period, 1);
                assert!(sample.ip != 0 && sample.addr != 0);
                last_time = sample.time_ns;
                samples += 1;
            }
            DecodedRecord::Throttle(_) | DecodedRecord::Unthrottle(_) | DecodedRecord::Lost(_) => {}
            other => panic!("{other:?}"),
        };
        if round % 2 == 0 {
            while let Some(raw) = reader.next_record().expect("the kernel's rings are sound") {
                bytes += raw.bytes().len();
                check(DecodedRecord::decode(raw, format).expect("the kernel's records are whole"));
            }
        } else {
            for raw in reader.batch().expect("the kernel's rings are sound") {
                bytes += raw.bytes().len();
                check(DecodedRecord::decode(raw, format).expect("the kernel's records are whole"));
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
    // SAFETY: the file descriptor is open as long as the borrowed counter.
    unsafe { BorrowedFd::borrow_raw(counter.as_raw_fd()) }
}

/// Opens a kernel event with the given attributes. Returns `None` if this user may not open it.
fn kernel_event(attr: &Attr, group: i32) -> Option<OwnedFd> {
    kernel_event_on(attr, -1, group)
}

/// Opens a kernel event for this thread, which counts only while the thread runs on `cpu` (-1 means
/// any CPU). Returns `None` if this user may not open it.
fn kernel_event_on(attr: &Attr, cpu: i32, group: i32) -> Option<OwnedFd> {
    match open_event(attr, cpu, group) {
        Ok(event) => Some(event),
        Err(error) => {
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "{error}");
            skip::skipped(&format!("this user may not open perf events ({error})"), false);
            None
        }
    }
}

fn open_event(attr: &Attr, cpu: i32, group: i32) -> std::io::Result<OwnedFd> {
    let bytes = attr.to_bytes();
    // SAFETY: the attribute is readable for its stated size.
    let fd = unsafe { libc::syscall(libc::SYS_perf_event_open, bytes.as_ptr(), 0, cpu, group, 0) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the file descriptor was just opened here.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Reads every record in the kernel's ring, decodes it, encodes it into a ring of this crate and
/// compares the bytes. Returns the number of records by type.
fn check_reencoded_records(reader: &mut RingReader, format: RecordFormat) -> BTreeMap<u32, u32> {
    let ring = Arc::new(Ring::new(4, RingFullPolicy::Writable).unwrap());
    let mut ours = RingReader::of(Arc::clone(&ring));
    let mut types = BTreeMap::new();
    while let Some(raw) = reader.next_record().expect("the kernel's rings are sound") {
        match DecodedRecord::decode(raw, format).expect("the kernel's records are whole") {
            DecodedRecord::Sample(r) => r.write(format, &ring),
            DecodedRecord::Fork(r) | DecodedRecord::Exit(r) => r.write(format, &ring),
            DecodedRecord::Comm(r) => r.write(format, &ring),
            DecodedRecord::Mmap(r) => r.write(format, &ring),
            DecodedRecord::Lost(r) => r.write(format, &ring),
            DecodedRecord::Throttle(r) | DecodedRecord::Unthrottle(r) => r.write(format, &ring),
            DecodedRecord::Read(r) => r.write(format, &ring),
            other => panic!("{other:?}"),
        }
        .expect("there is room for one");
        let again = ours.next_record().unwrap().expect("it was written");
        assert_eq!(again.bytes(), raw.bytes(), "{format:?}");
        *types.entry(raw.ty()).or_insert(0) += 1;
    }
    types
}

const MMAP: u32 = 1;
const LOST: u32 = 2;
const COMM: u32 = 3;
const EXIT: u32 = 4;
const FORK: u32 = 7;
const SAMPLE: u32 = 9;

/// Returns the read formats that this host's kernel supports. Kernels before Linux 6.0 lack LOST.
fn read_formats() -> u64 {
    let attr = Attr {
        sample_period: 0,
        ..faults(SampleType::empty(), ReadFormat::LOST)
    };
    if open_event(&attr, -1, -1).is_ok() { 32 } else { 16 }
}

/// Returns attributes that sample every page fault of this thread in user mode.
fn faults(sample_type: SampleType, read_format: ReadFormat) -> Attr {
    Attr {
        sample_type,
        read_format,
        exclude_kernel: true,
        disabled: true,
        ..Attr::sampling(EventType::SOFTWARE, 2, 1)
    }
}

/// Checks that the number of records of each type is at least the one in `minimum`.
fn check_numbers(types: &BTreeMap<u32, u32>, minimum: &[(u32, u32)]) {
    for (ty, least) in minimum {
        assert!(types.get(ty).is_some_and(|n| n >= least), "type {ty}: {types:?}");
    }
}

fn enable(fd: &OwnedFd, on: bool) {
    const ENABLE: u64 = 0x2400;
    // SAFETY: the call takes a number.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), ENABLE + u64::from(!on), 0) };
    assert_eq!(result, 0);
}

/// Samples match the kernel's encoding for each field alone, all fields together, and random
/// subsets, with single and group readings in every format.
#[test]
fn samples_match_kernel_encoding() {
    let mut rng = fastrand::Rng::with_seed(7);
    let all = ALL.bits();
    let masks = (0..11).chain([16]).map(|bit| 1 << bit).chain([0, all]);
    let drawn: Vec<u64> = (0..40).map(|_| rng.u64(..) & all).collect();
    for (n, mask) in masks.chain(drawn).enumerate() {
        let read_format = ReadFormat::from_bits_truncate(n as u64 * 3 % read_formats());
        let attr = faults(SampleType::from_bits_truncate(mask), read_format);
        let Some(leader) = kernel_event(&attr, -1) else {
            return;
        };
        let counting = Attr {
            sample_period: 0,
            disabled: false,
            ..attr.clone()
        };
        let _members: Vec<_> = (0..n % 3)
            .map(|_| kernel_event(&counting, leader.as_raw_fd()))
            .collect();
        let mut reader = RingReader::map_perf(leader.as_fd(), 8).expect("a ring");
        enable(&leader, true);
        fault(20);
        enable(&leader, false);
        let format = RecordFormat::from(&attr);
        let types = check_reencoded_records(&mut reader, format);
        assert!(types[&SAMPLE] >= 20, "{types:?}");
    }
}

#[test]
fn side_band_records_match_kernel_encoding() {
    // Selects large samples, so that the ring is full before the kernel throttles the event.
    let all = ALL - SampleType::CALLCHAIN - SampleType::READ;
    for (sample_type, sample_id_all) in [
        (all, false),
        (all, true),
        (all - SampleType::IDENTIFIER - SampleType::TIME, true),
        (SampleType::ADDR | SampleType::RAW | SampleType::IDENTIFIER, true),
        (SampleType::ADDR | SampleType::RAW, true),
    ] {
        let attr = Attr {
            task: true,
            comm: true,
            mmap: true,
            sample_id_all,
            ..faults(sample_type, ReadFormat::empty())
        };
        let Some(event) = kernel_event(&attr, -1) else {
            return;
        };
        let mut reader = RingReader::map_perf(event.as_fd(), 1).expect("a ring");
        let format = RecordFormat::from(&attr);
        enable(&event, true);
        std::thread::spawn(|| ()).join().unwrap();
        for name in [c"a", c"seven b", c"eight by", c"fifteen letters"] {
            // SAFETY: a NUL-terminated name for this thread.
            assert_eq!(unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) }, 0);
        }
        // SAFETY: new memory that nothing else uses and that is unmapped immediately.
        unsafe {
            let (prot, flags) = (
                libc::PROT_READ | libc::PROT_EXEC,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            );
            let memory = libc::mmap(std::ptr::null_mut(), PAGE, prot, flags, -1, 0);
            assert_ne!(memory, libc::MAP_FAILED);
            libc::munmap(memory, PAGE);
        }
        // Causes more samples than fit the ring. A LOST record then precedes the next record that
        // fits.
        fault(200);
        let mut types = check_reencoded_records(&mut reader, format);
        fault(4);
        enable(&event, false);
        for (ty, n) in check_reencoded_records(&mut reader, format) {
            *types.entry(ty).or_insert(0) += n;
        }
        check_numbers(
            &types,
            &[(FORK, 1), (COMM, 4), (MMAP, 1), (LOST, 1), (SAMPLE, 30)],
        );
    }
}

/// If a thread with an inherited event exits, the records of the event match the kernel's encoding.
/// Linux does not write READ records in this case, because the thread's perf context is already
/// released.
#[test]
fn thread_exit_records_match_kernel_encoding() {
    // SAFETY: sched_getcpu takes no arguments.
    let cpu = unsafe { libc::sched_getcpu() };
    // SAFETY: an empty set is valid, and the CPU belongs to this machine.
    let result = unsafe {
        let mut set = std::mem::zeroed();
        libc::CPU_SET(cpu as usize, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set)
    };
    assert_eq!(result, 0);
    for sample_type in [
        SampleType::TID | SampleType::TIME | SampleType::ID,
        SampleType::CPU | SampleType::STREAM_ID | SampleType::IDENTIFIER,
        ALL - SampleType::CALLCHAIN - SampleType::READ,
    ] {
        let attr = Attr {
            inherit: true,
            task: true,
            sample_id_all: true,
            ..faults(sample_type, ReadFormat::empty())
        };
        let Some(event) = kernel_event_on(&attr, cpu, -1) else {
            return;
        };
        let mut reader = RingReader::map_perf(event.as_fd(), 64).expect("a ring");
        let format = RecordFormat::from(&attr);
        enable(&event, true);
        let task = std::thread::spawn(|| {
            fault(3);
            // SAFETY: gettid takes no arguments.
            unsafe { libc::gettid() }
        })
        .join()
        .unwrap();
        // The kernel writes the exit record shortly after the join returns.
        while std::path::Path::new(&format!("/proc/self/task/{task}")).exists() {
            std::thread::yield_now();
        }
        enable(&event, false);
        let types = check_reencoded_records(&mut reader, format);
        check_numbers(&types, &[(FORK, 1), (EXIT, 1), (SAMPLE, 3)]);
    }
}
