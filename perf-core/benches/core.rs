//! What the core itself costs: a tick, a read, scheduling a vCPU in and out.
//!
//! The driver here does nothing, so that the times are the core's alone; the reads of the kernel beside them are what an
//! application pays today. Ratios are printed at the end, since they and not the times compare across machines.
#![allow(unsafe_code)]

#[path = "../tests/machine/steps.rs"]
mod steps;

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use perf_core::pmu::{Capacity, PmuError, Target};
use perf_core::time::{Clock, ManualClock};
use perf_core::*;
use perf_event_open_sys::bindings::perf_event_attr;

/// A driver that does nothing, with `slots` slots.
#[derive(Debug)]
struct Nothing {
    slots: usize,
}

#[derive(Debug)]
struct NoEvent(u64);

impl Pmu for Nothing {
    fn name(&self) -> &'static str {
        "nothing"
    }
    fn serves(&self, ty: EventType) -> bool {
        ty == EventType::SIM
    }
    fn capacity(&self) -> Capacity {
        Capacity::Slots(self.slots)
    }
    fn open(&self, _: &Attr, _: Target) -> Result<Box<dyn PmuEvent>, PmuError> {
        Ok(Box::new(NoEvent(0)))
    }
}

impl PmuEvent for NoEvent {
    fn start(&mut self, _: Option<u64>) -> Result<(), PmuError> {
        Ok(())
    }
    fn stop(&mut self) {}
    fn read(&mut self) -> u64 {
        self.0 += 1;
        self.0
    }
    fn arm(&mut self, _: u64) -> Result<(), PmuError> {
        Ok(())
    }
    fn take_overflows(&mut self) -> u32 {
        0
    }
}

struct Setup {
    core: Core,
    vcpu: Arc<VcpuContext>,
    session: Session,
}

fn setup(slots: usize, clock: Option<Arc<dyn Clock>>) -> Setup {
    let mut config = CoreConfig::default();
    if let Some(clock) = clock {
        config.clock = clock;
    }
    let core = Core::new(config);
    core.register(Arc::new(Nothing { slots }));
    let vcpu = core.add_vcpu(VcpuId(0), 1).unwrap();
    vcpu.sched_in();
    let session = core.session(0, Role::Admin);
    Setup { core, vcpu, session }
}

impl Setup {
    fn open(&self, leader: Option<&Handle>) -> Handle {
        let attr = Attr::counting(EventType::SIM, 0);
        self.core
            .open(
                &self.session,
                attr,
                OpenTarget::Vcpu(VcpuId(0)),
                leader,
                OpenFlags::default(),
            )
            .unwrap()
    }
}

fn tick(c: &mut Criterion) {
    let mut group = c.benchmark_group("tick_4_slots");
    for n in [10usize, 1_000, 100_000] {
        let clock = Arc::new(ManualClock::new());
        let s = setup(4, Some(Arc::clone(&clock) as Arc<dyn Clock>));
        let _events: Vec<_> = (0..n).map(|_| s.open(None)).collect();
        group.bench_function(BenchmarkId::from_parameter(n), |b| {
            b.iter(|| {
                clock.advance(10_000_000);
                s.vcpu.tick();
            });
        });
    }
    group.finish();
}

/// Opens a kernel software event on this thread.
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
    // Reads with the count only are what a guest's RDPMC takes.
    let mut group = c.benchmark_group("read");
    group.bench_function("one", |b| b.iter(|| black_box(one.read().unwrap())));
    group.bench_function("one_count_only", |b| b.iter(|| black_box(one.count().unwrap())));
    let s8 = setup(8, None);
    let leader = s8.open(None);
    let _members: Vec<_> = (0..7).map(|_| s8.open(Some(&leader))).collect();
    group.bench_function("group_of_8", |b| {
        b.iter(|| black_box(leader.read_group().unwrap()))
    });

    // PERF_FORMAT_TOTAL_TIME_ENABLED | RUNNING | ID, and GROUP.
    let fd = kernel_event(2, -1, 7);
    let mut buf = [0u64; 32];
    group.bench_function("kernel_one", |b| b.iter(|| black_box(kernel_read(fd, &mut buf))));
    let kernel_leader = kernel_event(2, -1, 15);
    // Page faults, switches, migrations, minor and major faults, alignment and emulation faults, dummy.
    let _kernel_members: Vec<_> = [3, 4, 5, 6, 7, 8, 9]
        .map(|config| kernel_event(config, kernel_leader, 15))
        .into();
    group.bench_function("kernel_group_of_8", |b| {
        b.iter(|| assert_eq!(black_box(kernel_read(kernel_leader, &mut buf)), 8 * (3 + 16)));
    });
    group.finish();
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
        b.iter(|| halted(black_box(SoftwareId::Halts), 1))
    });
}

/// Shortest of several runs of `work`, per iteration.
fn best(iterations: u32, mut work: impl FnMut()) -> Duration {
    let run = |work: &mut dyn FnMut()| {
        let start = Instant::now();
        for _ in 0..iterations {
            work();
        }
        start.elapsed() / iterations
    };
    (0..15).map(|_| run(&mut work)).min().unwrap_or_default()
}

/// The ratios that matter, from one run, as JSON in `target/criterion/core-ratios.json` and on the terminal.
fn ratios(_: &mut Criterion) {
    let tick_ns = |n: usize| {
        let clock = Arc::new(ManualClock::new());
        let s = setup(4, Some(Arc::clone(&clock) as Arc<dyn Clock>));
        let _events: Vec<_> = (0..n).map(|_| s.open(None)).collect();
        let work = || {
            clock.advance(10_000_000);
            s.vcpu.tick();
        };
        best(20_000, work).as_nanos() as f64
    };
    let tick_instructions = |n: usize| {
        let clock = Arc::new(ManualClock::new());
        let s = setup(4, Some(Arc::clone(&clock) as Arc<dyn Clock>));
        let _events: Vec<_> = (0..n).map(|_| s.open(None)).collect();
        let ticks = |n| {
            for _ in 0..n {
                clock.advance(10_000_000);
                s.vcpu.tick();
            }
        };
        ticks(100);
        steps::instructions(|| ticks(64)).map(|n| n / 64)
    };
    let counted = [10, 1_000, 100_000].map(tick_instructions);
    let (t10, t1k, t100k) = (tick_ns(10), tick_ns(1_000), tick_ns(100_000));
    let s = setup(8, None);
    let leader = s.open(None);
    let _members: Vec<_> = (0..7).map(|_| s.open(Some(&leader))).collect();
    let mut buf = [0u64; 32];
    let kernel_leader = kernel_event(2, -1, 15);
    let _kernel: Vec<_> = [3, 4, 5, 6, 7, 8, 9]
        .map(|config| kernel_event(config, kernel_leader, 15))
        .into();
    let one = best(20_000, || {
        black_box(leader.read().unwrap());
    });
    let ours = best(20_000, || {
        black_box(leader.read_group().unwrap());
    });
    let fd = kernel_event(2, -1, 7);
    let kernel_one = best(20_000, || {
        black_box(kernel_read(fd, &mut buf));
    });
    let kernel = best(20_000, || {
        black_box(kernel_read(kernel_leader, &mut buf));
    });
    let ns = |d: Duration| d.as_nanos() as f64;
    let json = serde_json::json!({
        "tick_ns": { "10": t10, "1000": t1k, "100000": t100k },
        "tick_100000_over_10": t100k / t10,
        "tick_instructions": { "10": counted[0], "1000": counted[1], "100000": counted[2] },
        "read_one_ns": ns(one),
        "read_one_over_kernel": ns(one) / ns(kernel_one),
        "read_group_of_8_ns": ns(ours),
        "read_group_of_8_over_kernel": ns(ours) / ns(kernel),
    });
    println!("{json:#}");
    // Beside what criterion measured: the executable is in target/release/deps.
    let Ok(exe) = std::env::current_exe() else { return };
    if let Some(target) = exe.ancestors().nth(3) {
        let dir = target.join("criterion");
        if std::fs::create_dir_all(&dir).is_ok() {
            let _ = std::fs::write(dir.join("core-ratios.json"), format!("{json:#}\n"));
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1)).sample_size(30);
    targets = tick, read, switch, ratios
}
criterion_main!(benches);
