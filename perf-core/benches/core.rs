//! Benchmarks of the core itself: a tick, a read, and scheduling a vCPU in and out.
//!
//! The driver does nothing, so the times are those of the core alone. Reads of a kernel event are
//! measured for comparison. The results are printed at the end with their targets. Results are
//! ratios where possible, because ratios can be compared across machines.
#![expect(unsafe_code, reason = "calls of the system")]

mod nothing;

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use nothing::NoopPmu;
use perf_core::time::{Clock, ManualClock};
use perf_core::*;
use perf_event_open_sys::bindings::perf_event_attr;
use test_support::figures::{self, BenchmarkFigure, BenchmarkTarget as Goal};
use test_support::steps;

struct Setup {
    core: PerfCore,
    vcpu: Arc<VcpuEventContext>,
    session: Session,
}

fn setup(slots: usize, clock: Option<Arc<dyn Clock>>) -> Setup {
    let mut config = PerfCoreConfig::default();
    if let Some(clock) = clock {
        config.clock = clock;
    }
    let core = PerfCore::new(config);
    core.register(Arc::new(NoopPmu { slots }));
    let vcpu = core.add_vcpu(VcpuId(0), 1).unwrap();
    vcpu.sched_in();
    let session = core.session(0, SessionRole::Admin);
    Setup { core, vcpu, session }
}

impl Setup {
    fn open(&self, leader: Option<&EventHandle>) -> EventHandle {
        let attr = Attr::counting(EventType::SIM, 0);
        self.core
            .open(
                &self.session,
                attr,
                EventOpenTarget::Vcpu(VcpuId(0)),
                leader,
                OpenFlags::default(),
            )
            .unwrap()
    }
}

/// Numbers of groups for which the cost of a tick is compared.
const GROUPS: [usize; 3] = [10, 1_000, 100_000];

/// Opens a software event of the kernel on this thread.
fn kernel_event(config: u64, leader: i32, read_format: u64) -> i32 {
    let mut attr = perf_event_attr {
        type_: 1,
        size: size_of::<perf_event_attr>() as u32,
        config,
        read_format,
        ..perf_event_attr::default()
    };
    attr.set_exclude_hv(1);
    // SAFETY: the attribute is valid for the duration of the call.
    let fd = unsafe { perf_event_open_sys::perf_event_open(&raw mut attr, 0, -1, leader, 0) };
    assert!(fd >= 0, "perf_event_open: {}", std::io::Error::last_os_error());
    fd
}

fn kernel_read(fd: i32, buf: &mut [u64]) -> isize {
    // SAFETY: the buffer is writable for its length.
    unsafe { libc::read(fd, buf.as_mut_ptr().cast(), size_of_val(buf)) }
}

fn read(c: &mut Criterion) {
    let s = setup(8, None);
    let one = s.open(None);
    // A guest's RDPMC reads only the count, which `one_count_only` measures.
    let mut group = c.benchmark_group("read");
    group.bench_function("one", |b| b.iter(|| black_box(one.read().unwrap())));
    group.bench_function("one_count_only", |b| b.iter(|| black_box(one.count().unwrap())));
    let s8 = setup(8, None);
    let leader = s8.open(None);
    let _members: Vec<_> = (0..7).map(|_| s8.open(Some(&leader))).collect();
    group.bench_function("group_of_8", |b| {
        b.iter(|| black_box(leader.read_group().unwrap()))
    });

    // Read format 7 is PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING |
    // PERF_FORMAT_ID. Read format 15 adds PERF_FORMAT_GROUP.
    let fd = kernel_event(2, -1, 7);
    let mut buf = [0u64; 32];
    group.bench_function("kernel_one", |b| b.iter(|| black_box(kernel_read(fd, &mut buf))));
    let kernel_leader = kernel_event(2, -1, 15);
    // Page faults, switches, migrations, minor and major faults, alignment and emulation faults,
    // dummy.
    let _kernel_members: Vec<_> = [3, 4, 5, 6, 7, 8, 9]
        .map(|config| kernel_event(config, kernel_leader, 15))
        .into();
    group.bench_function("kernel_group_of_8", |b| {
        b.iter(|| assert_eq!(black_box(kernel_read(kernel_leader, &mut buf)), 8 * (3 + 16)));
    });
    group.finish();
}

fn kernel_close(fd: i32) {
    // SAFETY: the caller owns the file descriptor and does not use it again.
    assert_eq!(unsafe { libc::close(fd) }, 0);
}

/// Stops and restarts a kernel event with PERF_EVENT_IOC_DISABLE and PERF_EVENT_IOC_ENABLE
/// (perf_event_open(2)).
fn kernel_off_and_on(fd: i32) {
    // SAFETY: both requests take the file descriptor of an event and a flag word by value.
    let results = unsafe {
        [
            perf_event_open_sys::ioctls::DISABLE(fd, 0),
            perf_event_open_sys::ioctls::ENABLE(fd, 0),
        ]
    };
    assert_eq!(results, [0, 0]);
}

/// Returns the minimum times, in nanoseconds, of opening and closing an event and of disabling and
/// enabling it. The measurement alternates between perf-core and the kernel's system calls, while
/// two other events of the context are active.
fn open_and_enable() -> [[f64; 2]; 2] {
    let s = setup(8, None);
    let _others = [s.open(None), s.open(None)];
    let ours = s.open(None);
    let _kernel_others = [kernel_event(2, -1, 7), kernel_event(2, -1, 7)];
    let kernels = kernel_event(2, -1, 7);
    let mut least = [[f64::INFINITY; 2]; 2];
    for _ in 0..RUNS {
        let times = [
            [
                once(&mut || drop(black_box(s.open(None)))),
                once(&mut || kernel_close(black_box(kernel_event(2, -1, 7)))),
            ],
            [
                once(&mut || {
                    ours.disable(EventOrGroup::Event).unwrap();
                    ours.enable(EventOrGroup::Event).unwrap();
                }),
                once(&mut || kernel_off_and_on(kernels)),
            ],
        ];
        for (least, time) in least.as_flattened_mut().iter_mut().zip(times.as_flattened()) {
            *least = least.min(*time);
        }
    }
    assert_eq!(ours.state(), EventState::Active);
    least
}

fn switch(c: &mut Criterion) {
    let s = setup(8, None);
    let _events: Vec<_> = (0..8).map(|_| s.open(None)).collect();
    c.bench_function("sched_out_in_8_events", |b| {
        b.iter(|| {
            s.vcpu.sched_out();
            s.vcpu.sched_in();
        });
    });
    let halted = |id, n| s.vcpu.software_event(id, n, None, &mut |_| {});
    c.bench_function("software_event_unused", |b| {
        b.iter(|| halted(black_box(SoftwareEventId::Halts), 1))
    });
}

/// Number of measurements, of which the fastest one is reported.
const RUNS: usize = 15;

/// Runs `work` repeatedly and returns the mean time of one run, in nanoseconds.
fn once(work: &mut dyn FnMut()) -> f64 {
    let iterations = if figures::is_dry_run() { 10 } else { 20_000 };
    let start = Instant::now();
    for _ in 0..iterations {
        work();
    }
    start.elapsed().as_nanos() as f64 / f64::from(iterations)
}

/// Measures `work` several times and returns the shortest time of one run, in nanoseconds.
fn best(mut work: impl FnMut()) -> f64 {
    (0..RUNS).map(|_| once(&mut work)).fold(f64::INFINITY, f64::min)
}

/// A vCPU whose groups are multiplexed on four slots, and the clock that the tick benchmarks
/// advance.
struct Ticking {
    clock: Arc<ManualClock>,
    setup: Setup,
    events: Vec<EventHandle>,
}

impl Ticking {
    fn new(groups: usize) -> Self {
        let clock = Arc::new(ManualClock::new());
        let setup = setup(4, Some(Arc::clone(&clock) as Arc<dyn Clock>));
        let events = (0..groups).map(|_| setup.open(None)).collect();
        let new = Self { clock, setup, events };
        // Schedules each group at least once before the measurement, because the first interval of
        // a group ends no slice and is therefore cheaper.
        (0..groups + 10).for_each(|_| new.tick());
        new
    }

    fn tick(&self) {
        self.clock.advance(10_000_000);
        self.setup.vcpu.tick();
    }

    /// Checks that the ticks multiplexed the groups: four groups are active now, and each of the
    /// first ten groups was active at some time.
    fn check(&self) {
        assert_eq!(self.setup.vcpu.stats().active, 4);
        for event in self.events.iter().take(10) {
            assert!(event.read().unwrap().time_running_ns > 0);
        }
    }
}

/// Computes and prints the ratios between measurements of this run.
fn ratios(_: &mut Criterion) {
    if std::env::args().any(|a| a == "--list") {
        return;
    }
    let instructions = GROUPS.map(|n| {
        let s = Ticking::new(n);
        steps::instructions(|| (0..64).for_each(|_| s.tick())).map(|n| n as f64 / 64.0)
    });
    // The runs alternate, so that a temporary slowdown of the CPU affects all of them equally. A
    // virtual machine's CPU may run at half speed for a second, for example while its core's
    // sibling thread is busy. Criterion measures each benchmark for a second in sequence and
    // therefore cannot compare them.
    let ticking = GROUPS.map(Ticking::new);
    let mut tick_ns = [f64::INFINITY; GROUPS.len()];
    for _ in 0..RUNS {
        for (s, ns) in ticking.iter().zip(&mut tick_ns) {
            *ns = ns.min(once(&mut || s.tick()));
        }
    }
    ticking.iter().for_each(Ticking::check);
    let most = |of: &[f64]| of.iter().copied().fold(0.0, f64::max);
    let least = |of: &[f64]| of.iter().copied().fold(f64::INFINITY, f64::min);
    let spread = instructions
        .iter()
        .copied()
        .collect::<Option<Vec<_>>>()
        .map(|all| 100.0 * (most(&all) / least(&all) - 1.0));

    let s = setup(8, None);
    let leader = s.open(None);
    let _members: Vec<_> = (0..7).map(|_| s.open(Some(&leader))).collect();
    let mut buf = [0u64; 32];
    let kernel_leader = kernel_event(2, -1, 15);
    let _kernel: Vec<_> = [3, 4, 5, 6, 7, 8, 9]
        .map(|config| kernel_event(config, kernel_leader, 15))
        .into();
    let one = best(|| {
        black_box(leader.read().unwrap());
    });
    let group = best(|| {
        black_box(leader.read_group().unwrap());
    });
    let fd = kernel_event(2, -1, 7);
    let kernel_one = best(|| {
        black_box(kernel_read(fd, &mut buf));
    });
    let kernel_group = best(|| {
        black_box(kernel_read(kernel_leader, &mut buf));
    });
    let s8 = setup(8, None);
    let _events: Vec<_> = (0..8).map(|_| s8.open(None)).collect();
    let switch = best(|| {
        s8.vcpu.sched_out();
        s8.vcpu.sched_in();
    });
    let [[open, kernel_open], [off_on, kernel_off_on]] = open_and_enable();
    let figures = [
        BenchmarkFigure::new(
            "a tick's instructions with 10, 1,000 and 100,000 groups, most over least",
            spread,
            "% more",
            Goal::AtMost(10.0),
        ),
        BenchmarkFigure::new(
            "a tick's time with 10, 1,000 and 100,000 groups, most over least",
            Some(most(&tick_ns) / least(&tick_ns)),
            "times",
            Goal::AtMost(4.0),
        ),
        BenchmarkFigure::new("a tick with 10 groups", Some(tick_ns[0]), "ns", Goal::None),
        BenchmarkFigure::new("a tick with 1,000 groups", Some(tick_ns[1]), "ns", Goal::None),
        BenchmarkFigure::new("a tick with 100,000 groups", Some(tick_ns[2]), "ns", Goal::None),
        BenchmarkFigure::new(
            "read of one event over read(2) of a kernel event",
            Some(one / kernel_one),
            "times",
            Goal::AtMost(1.0),
        ),
        BenchmarkFigure::new(
            "read of a group of 8 over read(2) of a kernel group of 8",
            Some(group / kernel_group),
            "times",
            Goal::AtMost(1.0),
        ),
        BenchmarkFigure::new(
            "an event opened and closed over perf_event_open(2) and close(2) of a kernel event",
            Some(open / kernel_open),
            "times",
            Goal::AtMost(2.0),
        ),
        BenchmarkFigure::new(
            "an event disabled and enabled over the ioctl(2)s of a kernel event",
            Some(off_on / kernel_off_on),
            "times",
            Goal::AtMost(2.0),
        ),
        BenchmarkFigure::new(
            "sched-out and sched-in of a context with 8 events",
            Some(switch),
            "ns",
            Goal::None,
        ),
    ];
    let more = serde_json::json!({
        "tick_ns": { "10": tick_ns[0], "1000": tick_ns[1], "100000": tick_ns[2] },
        "tick_instructions": { "10": instructions[0], "1000": instructions[1], "100000": instructions[2] },
        "read_one_ns": one,
        "read_group_of_8_ns": group,
        "kernel_read_one_ns": kernel_one,
        "kernel_read_group_of_8_ns": kernel_group,
        "open_close_ns": open,
        "kernel_open_close_ns": kernel_open,
        "disable_enable_ns": off_on,
        "kernel_disable_enable_ns": kernel_off_on,
        "sched_out_in_8_events_ns": switch,
    });
    let serde_json::Value::Object(more) = more else {
        unreachable!("an object above")
    };
    figures::report("core", &figures, false, more);
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1)).sample_size(30);
    targets = read, switch, ratios
}
criterion_main!(benches);
