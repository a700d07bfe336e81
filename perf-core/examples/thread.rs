//! Counts and samples this thread with a software clock event of the host kernel, and reads the
//! ring. Runs on any Linux on which this user may call `perf_event_open(2)`.
//!
//! `cargo run -p perf-core --example thread`

use std::sync::Arc;

use perf_core::pmu::host::HostPmu;
use perf_core::record::{Record, RecordFormat};
use perf_core::ring::RingReader;
use perf_core::*;

/// `PERF_COUNT_SW_TASK_CLOCK`: CPU time in nanoseconds.
const TASK_CLOCK: u64 = 1;
const PERIOD_NS: u64 = 1_000_000;

/// Registers without an instruction pointer, which only a signal handler could provide. Samples
/// have a time and a period only.
struct UnavailableRegs;

impl SampleRegs for UnavailableRegs {
    fn mode(&mut self) -> CpuMode {
        CpuMode::User
    }
    fn ip(&mut self) -> u64 {
        0
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Overflows are polled below, so the overflow signal may be one that is ignored by default.
    let core = PerfCore::builder()
        .driver(Arc::new(HostPmu::software(Some(libc::SIGURG))))
        .build()?;
    // 0 is the calling thread.
    let thread = core.add_thread(0)?;
    thread.sched_in();

    let session = core.session(0, Role::Admin);
    let attr = Attr {
        sample_type: SampleType::TIME | SampleType::PERIOD,
        ..Attr::sampling(EventType::SOFTWARE, TASK_CLOCK, PERIOD_NS)
    };
    let target = OpenTarget::Vcpu(thread.id());
    let clock = match core.open(&session, attr, target, None, OpenFlags::default()) {
        Ok(clock) => clock,
        Err(error) => {
            println!("nothing can be counted here: {error}");
            return Ok(());
        }
    };
    let mut ring = RingReader::of(clock.map(4, true)?);

    let mut sum = 0u64;
    for n in 0..20_000_000u64 {
        sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(n));
        if n % 100_000 == 0 {
            thread.service_overflows(&mut UnavailableRegs, &mut |_| {});
        }
    }
    clock.disable(ControlScope::Event)?;
    thread.service_overflows(&mut UnavailableRegs, &mut |_| {});

    let format = RecordFormat {
        sample_type: clock.attr().sample_type,
        ..RecordFormat::default()
    };
    let (mut samples, mut stand_for_ns) = (0, 0);
    while let Some(raw) = ring.next_record()? {
        if let Record::Sample(sample) = Record::decode(raw, format)? {
            samples += 1;
            stand_for_ns += sample.period;
        }
    }
    let reading = clock.read()?;
    println!(
        "{} ns on a processor, of {} ns; {samples} samples stand for {stand_for_ns} ns of them",
        reading.value, reading.time_enabled_ns
    );
    Ok(())
}
