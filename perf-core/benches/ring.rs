//! Benchmarks of ring records: writing 40-byte records one by one or in batches, with and without a
//! concurrent writer, and reading them. Reading is compared with the crates perf-event2 and
//! perf-event-open on the same bytes.
//!
//! These two crates can only read rings of the kernel. For each of them, the benchmark opens a
//! kernel perf event with a ring of the same size, and then maps the memfd of this crate's ring,
//! which has the same layout, over the kernel ring.
//!
//! All times are CPU times of the thread, so that other load on the machine does not distort them.
#![expect(unsafe_code, reason = "calls of the system")]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use perf_core::attr::{ReadFormat, SampleType};
use perf_core::record::{DecodedRecord, EncodeRecord, RecordFormat, Sample};
use perf_core::ring::{PAGE_SIZE, Ring, RingFullPolicy, RingReader};
use test_support::figures::{self, BenchmarkFigure, BenchmarkTarget};

/// Number of data pages of the ring: 256 KiB, which fit in the second-level cache of most machines.
const DATA_PAGES: usize = 64;
/// Size of a benchmark record with format [`FORMAT`], in bytes.
const RECORD: usize = 40;
const FORMAT: RecordFormat = RecordFormat {
    sample_type: SampleType::IP
        .union(SampleType::TID)
        .union(SampleType::TIME)
        .union(SampleType::PERIOD),
    read_format: ReadFormat::empty(),
    sample_id_all: false,
};

fn sample(n: u64) -> Sample<'static> {
    Sample {
        ip: 0xffff_ffff_8100_0000 + n,
        pid: 1,
        tid: 2,
        time_ns: n,
        period: 1000,
        ..Sample::default()
    }
}

/// Measured times in nanoseconds per record, by benchmark name. Each sample of criterion has one
/// entry.
static SEEN: Mutex<BTreeMap<String, Vec<f64>>> = Mutex::new(BTreeMap::new());
/// Number of criterion samples per benchmark, after the warm-up.
const SAMPLES: usize = 20;

fn note(name: String, time: Duration, records: u64) {
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    let of_this = seen.entry(name).or_default();
    of_this.push(time.as_nanos() as f64 / records.max(1) as f64);
}

/// Returns the median time of benchmark `name`, in nanoseconds per record, or `None` if it was not
/// measured.
fn median(name: &str) -> Option<f64> {
    let seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    let all = seen.get(name)?;
    let mut last = all[all.len().saturating_sub(SAMPLES)..].to_vec();
    last.sort_by(f64::total_cmp);
    last.get(last.len() / 2).copied()
}

/// Pins this thread to the CPU with index `nth` in its list of allowed CPUs, so that competing
/// threads run in parallel. Returns `false` if there are too few CPUs.
fn run_on_processor(nth: usize) -> bool {
    // SAFETY: a CPU set is a bit field for which zero bits are valid.
    let mut allowed: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    let bytes = size_of_val(&allowed);
    // SAFETY: the pointer is valid for `bytes`, which the call writes.
    let result = unsafe { libc::sched_getaffinity(0, bytes, &raw mut allowed) };
    assert_eq!(result, 0, "a thread may ask where it may run");
    // SAFETY: the numbers are inside the set.
    let mut known = (0..8 * bytes).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &allowed) });
    let Some(cpu) = known.nth(nth) else { return false };
    // SAFETY: as above.
    let mut one: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `cpu` is inside the set.
    unsafe { libc::CPU_SET(cpu, &mut one) };
    // SAFETY: the pointer is valid for `bytes`, which the call reads.
    unsafe { libc::sched_setaffinity(0, bytes, &raw const one) == 0 }
}

/// Returns the CPU time that this thread has used.
fn thread_time() -> Duration {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is valid for the duration of the call.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) };
    assert_eq!(result, 0, "every thread has a clock");
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Fills the ring with records and returns the number of records.
fn fill(ring: &Ring) -> u64 {
    (0..)
        .take_while(|&n| sample(n).write(FORMAT, ring).is_ok())
        .count() as u64
}

/// Returns the address ranges at which this process has mapped kernel rings.
fn perf_mappings() -> Vec<(usize, usize)> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc is mounted");
    maps.lines()
        .filter(|line| line.contains("[perf_event]"))
        .filter_map(|line| {
            let (start, end) = line.split_whitespace().next()?.split_once('-')?;
            let start = usize::from_str_radix(start, 16).ok()?;
            Some((start, usize::from_str_radix(end, 16).ok()? - start))
        })
        .collect()
}

/// Calls `open`, which maps a kernel ring, and replaces that mapping with a mapping of this crate's
/// `ring`.
fn over_the_kernels<T>(ring: &Ring, open: impl FnOnce() -> T) -> T {
    let before = perf_mappings();
    let reader = open();
    let mapped: Vec<_> = perf_mappings()
        .into_iter()
        .filter(|mapping| !before.contains(mapping))
        .collect();
    let &[(start, len)] = mapped.as_slice() else {
        panic!("one new ring was expected: {mapped:x?}")
    };
    assert_eq!(len, (1 + DATA_PAGES) * PAGE_SIZE, "the rings are equally large");
    // SAFETY: the range is the other reader's mapping of a ring, which it treats as memory shared
    // with an uncontrolled writer. The new mapping has the same size and access.
    let placed = unsafe {
        libc::mmap(
            start as *mut _,
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_POPULATE,
            ring.memfd().as_raw_fd(),
            0,
        )
    };
    assert_eq!(placed as usize, start);
    reader
}

fn perf_event2_reader(ring: &Ring) -> perf_event::Sampler {
    use perf_event::events::Software;
    use perf_event::{Builder, SampleFlag};
    over_the_kernels(ring, || {
        Builder::new(Software::DUMMY)
            .sample(SampleFlag::IP | SampleFlag::TID | SampleFlag::TIME | SampleFlag::PERIOD)
            .build()
            .and_then(|counter| counter.sampled(DATA_PAGES * PAGE_SIZE))
            .expect("a software event can be opened")
    })
}

fn perf_event_open_reader(ring: &Ring) -> perf_event_open::sample::Sampler {
    use perf_event_open::config::{Cpu, Opts, Proc};
    let mut opts = Opts::default();
    opts.sample_format.code_addr = true;
    opts.sample_format.period = true;
    opts.record_id_format.task = true;
    opts.record_id_format.time = true;
    over_the_kernels(ring, || {
        let event = perf_event_open::event::sw::Software::Dummy;
        perf_event_open::count::Counter::new(event, (Proc::CURRENT, Cpu::ALL), &opts)
            .and_then(|counter| counter.sampler(DATA_PAGES.trailing_zeros() as u8))
            .expect("a software event can be opened")
    })
}

/// Measures the time in which `drain` reads all records of a full ring. `drain` returns the number
/// of records.
fn reading(
    (group, kind): (&mut BenchmarkGroup<'_, WallTime>, &str),
    name: &str,
    ring: &Ring,
    mut drain: impl FnMut() -> u64,
) {
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|iterations| {
            let (mut time, mut records) = (Duration::ZERO, 0);
            for _ in 0..iterations {
                let written = fill(ring);
                let start = thread_time();
                let read = drain();
                time += thread_time() - start;
                // The LOST record for the attempt that found the ring full appears in the next
                // read.
                assert!(read == written || read == written + 1, "{read} of {written}");
                records += read;
            }
            note(format!("{kind}/{name}"), time, records);
            time
        });
    });
}

fn bench_read(criterion: &mut Criterion) {
    let ring = Arc::new(Ring::new(DATA_PAGES, RingFullPolicy::Writable).expect("a ring"));
    let records = (DATA_PAGES * PAGE_SIZE / RECORD) as u64;

    let mut group = criterion.benchmark_group("ring read, 40-byte records, bytes only");
    group.throughput(Throughput::Elements(records));
    let mut ours = RingReader::of(Arc::clone(&ring));
    reading((&mut group, "bytes"), "perf-core, one at a time", &ring, || {
        let mut n = 0;
        while let Some(record) = ours.next_record().expect("sound") {
            black_box(record.bytes());
            n += 1;
        }
        n
    });
    reading((&mut group, "bytes"), "perf-core, in a batch", &ring, || {
        let mut n = 0;
        for record in ours.batch().expect("sound") {
            black_box(record.bytes());
            n += 1;
        }
        ours.release();
        n
    });
    let mut theirs = perf_event2_reader(&ring);
    reading((&mut group, "bytes"), "perf-event2", &ring, || {
        let mut n = 0;
        while let Some(record) = theirs.next_record() {
            black_box(record.data());
            n += 1;
        }
        n
    });
    let open = perf_event_open_reader(&ring);
    let mut open_iter = open.iter().expect("the only iterator").into_cow();
    reading((&mut group, "bytes"), "perf-event-open", &ring, || {
        let mut n = 0;
        while let Some(record) = open_iter.lending_next() {
            black_box(record.as_raw().as_bytes());
            n += 1;
        }
        n
    });
    group.finish();

    let mut group = criterion.benchmark_group("ring read, 40-byte records, decoded");
    group.throughput(Throughput::Elements(records));
    // A reader caches its position, so a new reader is needed after other readers have read.
    drop(ours);
    let mut ours = RingReader::of(Arc::clone(&ring));
    reading((&mut group, "decoded"), "perf-core", &ring, || {
        let mut n = 0;
        while let Some(record) = ours.next_record().expect("sound") {
            black_box(&DecodedRecord::decode(record, FORMAT).expect("whole"));
            n += 1;
        }
        n
    });
    reading((&mut group, "decoded"), "perf-event2", &ring, || {
        let mut n = 0;
        while let Some(record) = theirs.next_record() {
            black_box(&record.parse_record().expect("whole"));
            n += 1;
        }
        n
    });
    reading((&mut group, "decoded"), "perf-event-open", &ring, || {
        let mut n = 0;
        while let Some(record) = open_iter.lending_next() {
            black_box(&record.parse());
            n += 1;
        }
        n
    });
    group.finish();
}

/// Measures ring writes by one or several writers, in writable mode with a reader that empties the
/// ring, and in overwrite mode without a reader.
fn bench_write(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("ring write, 40-byte records");
    group.throughput(Throughput::Elements(1));
    let ring = Arc::new(Ring::new(DATA_PAGES, RingFullPolicy::Writable).expect("a ring"));
    let mut reader = RingReader::of(Arc::clone(&ring));
    let batch = (DATA_PAGES * PAGE_SIZE / RECORD - 2) as u64;
    group.bench_function("one writer", |bencher| {
        bencher.iter_custom(|iterations| {
            let (mut time, mut left) = (Duration::ZERO, iterations);
            while left > 0 {
                let now = left.min(batch);
                let start = thread_time();
                for n in 0..now {
                    let written = sample(black_box(n)).write(FORMAT, &ring);
                    debug_assert!(written.is_ok());
                }
                time += thread_time() - start;
                while reader.next_record().expect("sound").is_some() {}
                left -= now;
            }
            note("one writer".into(), time, iterations);
            time
        });
    });
    assert_eq!(ring.pending_lost(), 0);
    let ring = Arc::new(Ring::new(DATA_PAGES, RingFullPolicy::Overwrite).expect("a ring"));
    group.bench_function("one writer, overwriting", |bencher| {
        bencher.iter_custom(|iterations| {
            let start = thread_time();
            for n in 0..iterations {
                let _ = sample(black_box(n)).write(FORMAT, &ring);
            }
            thread_time() - start
        });
    });
    assert_eq!(ring.pending_lost(), 0);

    let ring = [Arc::new(
        Ring::new(DATA_PAGES, RingFullPolicy::Overwrite).expect("a ring"),
    )];
    side_by_side(&mut group, ("one writer, 16 at a time", 1, TOGETHER), &ring);
    let rings = [(); 2].map(|()| Arc::new(Ring::new(DATA_PAGES, RingFullPolicy::Overwrite).expect("a ring")));
    side_by_side(&mut group, ("two writers, a ring each", 2, 1), &rings);
    side_by_side(&mut group, ("two writers, one ring", 2, 1), &ring);
    side_by_side(
        &mut group,
        ("two writers, one ring, 16 at a time", 2, TOGETHER),
        &ring,
    );
    group.finish();
}

/// Number of records that are written per batch.
const TOGETHER: u64 = 16;

/// Runs several writers concurrently, each on its own ring or all on a common ring. Each writer
/// writes its share of the records, `together` at a time. The measured time is that of the slowest
/// writer. A sample in which a writer was descheduled is discarded, because the writers then did
/// not compete all the time.
fn side_by_side(
    group: &mut BenchmarkGroup<'_, WallTime>,
    (name, writers, together): (&str, usize, u64),
    rings: &[Arc<Ring>],
) {
    let (refused, tried) = (AtomicU64::new(0), AtomicU64::new(0));
    let mut disturbed = 0;
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|iterations| {
            let ready = AtomicUsize::new(0);
            let undisturbed = AtomicBool::new(true);
            let each = iterations.div_ceil(writers as u64 * together) * together;
            let all = writers as u64 * each;
            let before = refused.load(Ordering::Relaxed);
            tried.fetch_add(all, Ordering::Relaxed);
            std::thread::scope(|scope| {
                let threads: Vec<_> = (0..writers)
                    .map(|writer| {
                        let ring = &rings[writer % rings.len()];
                        let (ready, refused, undisturbed) = (&ready, &refused, &undisturbed);
                        scope.spawn(move || {
                            undisturbed.fetch_and(run_on_processor(writer), Ordering::Relaxed);
                            ready.fetch_add(1, Ordering::AcqRel);
                            while ready.load(Ordering::Acquire) != writers {
                                std::hint::spin_loop();
                            }
                            let (start, wall) = (thread_time(), Instant::now());
                            let mut written = 0;
                            for n in (0..each).step_by(together as usize) {
                                let n = black_box(n);
                                written += if together == 1 {
                                    u64::from(sample(n).write(FORMAT, ring).is_ok())
                                } else {
                                    Sample::write_all((n..n + together).map(sample), FORMAT, ring).written
                                };
                            }
                            let time = thread_time() - start;
                            undisturbed.fetch_and(time.mul_f64(1.1) > wall.elapsed(), Ordering::Relaxed);
                            refused.fetch_add(each - written, Ordering::Relaxed);
                            time
                        })
                    })
                    .collect();
                let times = threads.into_iter().map(|thread| thread.join().expect("no panic"));
                let slowest = times.max().expect("at least one");
                let written = all - (refused.load(Ordering::Relaxed) - before);
                if undisturbed.load(Ordering::Relaxed) {
                    note(name.into(), slowest, written);
                } else {
                    disturbed += 1;
                }
                slowest.mul_f64(iterations as f64 / written.max(1) as f64)
            })
        });
    });
    println!(
        "    no figures, because a writer was kept from running: {disturbed}; records refused: {} of {}",
        refused.into_inner(),
        tried.into_inner()
    );
}

/// Computes and prints the ratios between measurements of this run.
fn ratios(_: &mut Criterion) {
    let over = |a: Option<f64>, b: Option<f64>| Some(a? / b?);
    let one = median("one writer");
    let best = |kind: &str, who: &[&str]| {
        let all = who.iter().map(|name| median(&format!("{kind}/{name}")));
        all.collect::<Option<Vec<_>>>()?
            .into_iter()
            .min_by(f64::total_cmp)
    };
    let ours = ["perf-core, one at a time", "perf-core, in a batch"];
    let peers = ["perf-event2", "perf-event-open"];
    let figures = [
        BenchmarkFigure::new(
            "ring write of a 40-byte record, one writer",
            one.map(|ns| 1000.0 / ns),
            "million/s",
            BenchmarkTarget::AtLeast(20.0),
        ),
        BenchmarkFigure::new(
            "two writers on one ring, records written together over those of one writer",
            over(one, median("two writers, one ring")),
            "times",
            BenchmarkTarget::Above(1.0),
        ),
        BenchmarkFigure::new(
            "ring write of 16 records at a time, one writer",
            median("one writer, 16 at a time").map(|ns| 1000.0 / ns),
            "million/s",
            BenchmarkTarget::AtLeast(20.0),
        ),
        BenchmarkFigure::new(
            "two writers on one ring, 16 records at a time, over one writer with one at a time",
            over(one, median("two writers, one ring, 16 at a time")),
            "times",
            BenchmarkTarget::Above(1.0),
        ),
        BenchmarkFigure::new(
            "two writers on one ring, 16 records at a time, over one writer with 16 at a time",
            over(
                median("one writer, 16 at a time"),
                median("two writers, one ring, 16 at a time"),
            ),
            "times",
            BenchmarkTarget::None,
        ),
        BenchmarkFigure::new(
            "two writers on a ring each, records written together over those of one writer",
            over(one, median("two writers, a ring each")),
            "times",
            BenchmarkTarget::Above(1.0),
        ),
        BenchmarkFigure::new(
            "ring read, bytes only, over the best peer's",
            over(best("bytes", &peers), best("bytes", &ours)),
            "times",
            BenchmarkTarget::AtLeast(2.0),
        ),
        BenchmarkFigure::new(
            "ring read, decoded, over the best peer's",
            over(best("decoded", &peers), median("decoded/perf-core")),
            "times",
            BenchmarkTarget::AtLeast(2.0),
        ),
    ];
    let partial = figures.iter().any(|f| f.value.is_none());
    figures::report("ring", &figures, partial, serde_json::Map::new());
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1)).sample_size(SAMPLES);
    targets = bench_write, bench_read, ratios
}
criterion_main!(benches);
