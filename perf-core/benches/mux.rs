//! Benchmarks of multiplexing: the end of an interval with 10, 1,000 and 100,000 groups on four
//! slots, adding a slice to an estimator, and computing an estimate. Benchmarks of the clock
//! driver: a guest entry and exit with and without a started event, and a reading of the clock.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use perf_core::attr::{Attr, EventType};
use perf_core::estimate::CountEstimator;
use perf_core::mux::{MuxGroupKey, MuxPolicy, MuxQueue, SlotOfferOutcome};
use perf_core::pmu::clock::{CYCLES, ClockPmu, VcpuRunTimeClock};
use perf_core::pmu::{Pmu, PmuEventTarget, VcpuId};

const SLOTS: usize = 4;

fn turns(c: &mut Criterion) {
    let mut group = c.benchmark_group("mux/turn");
    for policy in [MuxPolicy::Rotate, MuxPolicy::Adaptive] {
        for groups in [10_usize, 1_000, 100_000] {
            let mut queue = MuxQueue::new(policy, 1_000);
            (0..groups).for_each(|key| queue.insert(MuxGroupKey::from(key)));
            let mut step = 0.1;
            let mut turn = move || {
                let due = queue.next_turn_ns().unwrap_or(0);
                if let Some(left) = queue.rotate_if_due(due) {
                    step = (step * 1.7) % 2.0;
                    queue.slice_ended(left, Some(step));
                }
                let mut used = 0;
                queue.fill(|key| {
                    if used == SLOTS {
                        return SlotOfferOutcome::NoRoom;
                    }
                    used += 1;
                    black_box(key);
                    SlotOfferOutcome::Taken
                });
            };
            // Schedules each group at least once before the measurement, because the first interval
            // of a group is cheaper.
            (0..2 * groups).for_each(|_| turn());
            group.bench_function(BenchmarkId::new(format!("{policy:?}"), groups), |b| {
                b.iter(&mut turn);
            });
        }
    }
    group.finish();
}

fn estimates(c: &mut Criterion) {
    let mut estimator = CountEstimator::new();
    let mut at = 0;
    c.bench_function("estimate/slice", |b| {
        b.iter(|| {
            at += 10_000;
            estimator.slice(at, at + 1_000, black_box(1_234));
        });
    });
    c.bench_function("estimate/estimate", |b| {
        b.iter(|| estimator.estimate(black_box(at + 5_000), None));
    });
}

fn clock(c: &mut Criterion) {
    let clock = Arc::new(VcpuRunTimeClock::for_current_thread(2_000_000));
    let pmu = ClockPmu::new(None);
    pmu.add_vcpu(VcpuId(0), Arc::clone(&clock));
    let bracket = || {
        clock.guest_enter();
        clock.guest_exit();
    };
    c.bench_function("clock/bracket, no event on", |b| b.iter(bracket));
    let attr = Attr::counting(EventType::CLOCK, CYCLES);
    let target = PmuEventTarget::Vcpu {
        vcpu: VcpuId(0),
        tid: clock.tid(),
    };
    let mut event = pmu.open(&attr, target).expect("a clock event");
    event.start(None).expect("a started clock event");
    c.bench_function("clock/bracket, one event on", |b| b.iter(bracket));
    c.bench_function("clock/read by its own thread", |b| b.iter(|| event.read()));
    let mut ts = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    c.bench_function("clock/one clock_gettime of the thread clock", |b| {
        b.iter(|| {
            #[expect(unsafe_code, reason = "calls of the system")]
            // SAFETY: `ts` is a writable timespec.
            unsafe {
                libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut ts)
            }
        });
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(std::time::Duration::from_millis(200))
        .measurement_time(std::time::Duration::from_millis(600))
        .sample_size(30);
    targets = turns, estimates, clock
}
criterion_main!(benches);
