//! One process writes samples into a ring; another maps the ring's memfd and prints them.
//!
//! ```text
//! cargo run -p perf-core --example ring_two_processes
//! ```
//!
//! The program starts itself again as the reader and sends it two file descriptors over a socket:
//! the memfd and the eventfd for notifications. The samples are real: a software clock event of the
//! kernel interrupts this process, and each of its records is copied to the ring. A second thread
//! writes to the same ring meanwhile, and the reader sleeps for a while, so that records are lost
//! and the ring reports their number.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use perf_core::attr::{ReadFormat, SampleType, Wakeup};
use perf_core::record::{CommRecord, CpuMode, EncodeRecord, Record, RecordFormat, Sample};
use perf_core::ring::{PageCounter, PollState, Ring, RingError, RingMode, RingReader};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

const FORMAT: RecordFormat = RecordFormat {
    sample_type: SampleType::IP
        .union(SampleType::TID)
        .union(SampleType::TIME)
        .union(SampleType::PERIOD),
    read_format: ReadFormat::empty(),
    sample_id_all: false,
};

type Error = Box<dyn std::error::Error + Send + Sync>;

fn main() -> ExitCode {
    let result = match std::env::args().nth(1).as_deref() {
        None => write(),
        Some("read") => read(),
        Some(other) => Err(format!("unknown argument {other}: run without arguments").into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ring_two_processes: {error}");
            ExitCode::from(2)
        }
    }
}

/// Runs the writer process.
fn write() -> Result<(), Error> {
    let (ours, theirs) = UnixStream::pair()?;
    let mut reader = Command::new(std::env::current_exe()?)
        .arg("read")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .spawn()?;

    // 4 data pages: small enough to overflow visibly.
    let ring = Ring::new(4, RingMode::Writable)?;
    ring.set_wakeup(Wakeup::Events(8));
    ours.send_with_fds(
        &[b"ring".as_slice()],
        &[ring.memfd().as_raw_fd(), ring.wakeup_fd().as_raw_fd()],
    )
    .map_err(|error| format!("sending the ring failed: {error}"))?;

    CommRecord {
        pid: std::process::id(),
        tid: 1,
        name: b"example",
        ..CommRecord::default()
    }
    .write(FORMAT, &ring)?;
    let refused = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| flood(&ring, &refused));
        copy_clock_samples(&ring)
    })?;
    println!("writer: pending losses at the end: {}", ring.pending_lost());
    if !refused.load(Ordering::Relaxed) {
        println!("writer: the reader was quick enough, nothing was lost");
    }
    ring.hang_up();
    let status = reader.wait()?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("the reader ended with {status}").into())
    }
}

/// Samples this thread's CPU time for a fifth of a second and copies the samples into `ring`.
fn copy_clock_samples(ring: &Ring) -> Result<(), Error> {
    use perf_event::events::Software;
    use perf_event::{Builder, SampleFlag};
    let mut clock = Builder::new(Software::CPU_CLOCK)
        .sample_period(1_000_000)
        .sample(SampleFlag::IP | SampleFlag::TID | SampleFlag::TIME | SampleFlag::PERIOD)
        .build()
        .map_err(|error| format!("the kernel opens no clock event: {error}"))?;
    let mut samples = RingReader::map_perf(borrow(&clock), 8)?;
    clock.enable()?;
    let end = Instant::now() + Duration::from_millis(200);
    let mut count = 0;
    while Instant::now() < end {
        while let Some(raw) = samples.next_record()? {
            // Kernel samples and samples of this crate have the same format, so decode and encode.
            if let Record::Sample(sample) = Record::decode(raw, FORMAT)? {
                count += 1;
                match sample.write(FORMAT, ring) {
                    Ok(()) | Err(RingError::Full) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        let now = PageCounter {
            offset: count,
            ..PageCounter::default()
        };
        ring.control().update(now)?;
    }
    clock.disable()?;
    println!("writer: {count} samples of the kernel's clock event copied");
    Ok(())
}

#[expect(unsafe_code, reason = "calls of the system")]
fn borrow(counter: &perf_event::Counter) -> BorrowedFd<'_> {
    // SAFETY: the file descriptor is open as long as the borrowed counter.
    unsafe { BorrowedFd::borrow_raw(counter.as_raw_fd()) }
}

/// Writes 2,000 more samples at once, as a second writer on the same ring.
fn flood(ring: &Ring, refused: &AtomicBool) {
    for n in 0..2000 {
        let sample = Sample {
            misc: CpuMode::GuestKernel.into(),
            ip: 0xffff_ffff_8100_0000 + 16 * n,
            pid: std::process::id(),
            tid: 2,
            time_ns: n,
            period: 1,
            ..Sample::default()
        };
        if sample.write(FORMAT, ring).is_err() {
            refused.store(true, Ordering::Relaxed);
        }
    }
}

/// Runs the reader process, whose standard input is the socket.
fn read() -> Result<(), Error> {
    let [memfd, wakeup] = receive()?;
    let mut reader = RingReader::map(borrow_owned(&memfd))?;
    let mut wakeup = std::fs::File::from(wakeup);
    let epoll = Epoll::new()?;
    epoll.ctl(
        ControlOperation::Add,
        wakeup.as_raw_fd(),
        EpollEvent::new(EventSet::IN, 0),
    )?;

    let (mut samples, mut of_the_guest, mut lost) = (0u64, 0u64, 0u64);
    loop {
        epoll.wait(10_000, &mut [EpollEvent::default()])?;
        let mut count = [0; 8];
        // Nonblocking: the wakeup may concern records that were already read.
        let state = match wakeup.read(&mut count) {
            Ok(_) => PollState::from_count(u64::from_ne_bytes(count)),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error.into()),
        };
        while let Some(raw) = reader.next_record()? {
            match Record::decode(raw, FORMAT)? {
                Record::Sample(sample) => {
                    if samples < 3 || samples % 500 == 0 {
                        let (mode, ip, tid) = (sample.misc.cpu_mode(), sample.ip, sample.tid);
                        println!("reader: sample {samples}: {mode:?} ip {ip:#018x} tid {tid}");
                    }
                    of_the_guest += u64::from(sample.misc.cpu_mode() == CpuMode::GuestKernel);
                    samples += 1;
                }
                Record::Lost(report) => {
                    println!("reader: {} records were lost before this point", report.lost);
                    lost += report.lost;
                }
                Record::Comm(comm) => {
                    println!(
                        "reader: {} is called {:?}",
                        comm.pid,
                        String::from_utf8_lossy(comm.name)
                    );
                }
                other => println!("reader: {other:?}"),
            }
        }
        if state.hang_up {
            break;
        }
    }
    println!("reader: {samples} samples ({of_the_guest} of the second writer), {lost} reported as lost");
    if let Some(counter) = reader.counter() {
        println!(
            "reader: the control page counts {} samples of the clock",
            counter.offset
        );
    }
    std::io::stdout().flush()?;
    Ok(())
}

#[expect(unsafe_code, reason = "calls of the system")]
fn receive() -> Result<[OwnedFd; 2], Error> {
    // SAFETY: standard input is the socket that the parent placed there, and nothing else uses it.
    let socket = unsafe { UnixStream::from_raw_fd(0) };
    let mut text = [0u8; 4];
    let mut fds = [-1; 2];
    let mut parts = [libc::iovec {
        iov_base: text.as_mut_ptr().cast(),
        iov_len: text.len(),
    }];
    // SAFETY: the iovec describes `text`, which outlives the call.
    let (_, received) = unsafe { socket.recv_with_fds(&mut parts, &mut fds) }
        .map_err(|error| format!("receiving the ring failed: {error}"))?;
    if received != 2 {
        return Err(format!("{received} descriptors came instead of 2").into());
    }
    // SAFETY: the kernel just created these file descriptors for this process.
    Ok(fds.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }))
}

fn borrow_owned(fd: &OwnedFd) -> BorrowedFd<'_> {
    use std::os::fd::AsFd;
    fd.as_fd()
}
