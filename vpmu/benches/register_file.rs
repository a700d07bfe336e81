//! Cost of the register file on the exit path, with events that cost nothing.

use criterion::{Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use vpmu::registers::*;
use vpmu::sim::SimEvents;
use vpmu::*;

fn running() -> (Vpmu, SimEvents) {
    let (mut vpmu, mut events) = (Vpmu::new(PmuModel::INTEL), SimEvents::default());
    for n in 0..4 {
        vpmu.write_msr(MsrAddress(IA32_PERFEVTSEL0 + n), 0x53_003C, &mut events);
    }
    vpmu.reconcile(&mut events);
    (vpmu, events)
}

fn register_file(c: &mut Criterion) {
    let mut group = c.benchmark_group("register_file");
    group.bench_function("reconcile, nothing changed", |b| {
        let (mut vpmu, mut events) = running();
        b.iter(|| vpmu.reconcile(black_box(&mut events)));
    });
    group.bench_function("write a running counter, reconcile", |b| {
        let (mut vpmu, mut events) = running();
        let mut value = 0u64;
        b.iter(|| {
            value = value.wrapping_add(1) & 0xFFFF;
            vpmu.write_msr(black_box(MsrAddress(IA32_PMC0)), value, &mut events);
            vpmu.reconcile(&mut events);
        });
    });
    group.bench_function("stop four counters and start them, reconcile each", |b| {
        let (mut vpmu, mut events) = running();
        b.iter(|| {
            for value in [0, 0xF] {
                vpmu.write_msr(black_box(MsrAddress(IA32_PERF_GLOBAL_CTRL)), value, &mut events);
                vpmu.reconcile(&mut events);
            }
        });
    });
    group.bench_function("read a running counter", |b| {
        let (mut vpmu, mut events) = running();
        b.iter(|| vpmu.read_msr(black_box(MsrAddress(IA32_PMC0)), &mut events));
    });
    group.bench_function("rdpmc of a running counter", |b| {
        let (mut vpmu, mut events) = running();
        b.iter(|| vpmu.rdpmc(black_box(RdpmcIndex(1)), Cpl(0), false, &mut events));
    });
    group.bench_function("overflow, reconcile, deliver", |b| {
        let (mut vpmu, mut events) = running();
        let counter = CounterIndex::general(0).expect("counter 0");
        b.iter(|| {
            vpmu.write_msr(MsrAddress(IA32_A_PMC0), (1 << 48) - 1, &mut events);
            vpmu.reconcile(&mut events);
            events.run(1);
            events.take_notified().for_each(drop);
            vpmu.overflowed(counter, &mut events);
            vpmu.reconcile(&mut events);
            vpmu.pmi_delivered(0);
        });
    });
    group.finish();
}

criterion_group!(benches, register_file);
criterion_main!(benches);
