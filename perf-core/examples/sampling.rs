//! Demonstrates sampling by period and by frequency, with period changes, an overflow limit and
//! throttling. Explains the period of each sample.
//!
//! The events are page faults and CPU time of this thread, counted by the host kernel, which sends
//! a signal at each overflow. `cargo run -p perf-core --example sampling`

mod shared;

use std::sync::Arc;
use std::time::Duration;

use perf_core::pmu::host::{HostPmu, ignore_sigio};
use perf_core::record::{DecodedRecord, RecordFormat};
use perf_core::ring::RingReader;
use perf_core::*;
use shared::*;

/// A sampling event, its ring, and the totals of the samples read from the ring.
struct Sampled {
    handle: EventHandle,
    reader: RingReader,
    samples: u64,
    stood_for: u64,
}

impl Sampled {
    fn new(core: &PerfCore, session: &Session, attr: Attr) -> Result<Self, Box<dyn std::error::Error>> {
        let target = EventOpenTarget::Vcpu(VcpuId(0));
        let handle = core.open(session, attr, target, None, OpenFlags::default())?;
        let reader = RingReader::of(handle.map(64, true)?);
        Ok(Self {
            handle,
            reader,
            samples: 0,
            stood_for: 0,
        })
    }

    /// Reads all records of the ring, adds up the samples, and prints throttling records.
    fn drain(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        let attr = self.handle.attr();
        let format = RecordFormat::from(attr);
        while let Some(raw) = self.reader.next_record()? {
            match DecodedRecord::decode(raw, format)? {
                DecodedRecord::Sample(sample) => {
                    self.samples += 1;
                    self.stood_for += sample.period;
                }
                DecodedRecord::Throttle(t) => println!("  throttled at {} ns", t.time_ns),
                DecodedRecord::Unthrottle(t) => println!("  goes on at {} ns", t.time_ns),
                other => println!("  {other:?}"),
            }
        }
        Ok(())
    }

    fn show(&mut self, what: &str) -> Result<(), Box<dyn std::error::Error>> {
        self.drain()?;
        let (samples, stood_for) = (std::mem::take(&mut self.samples), self.stood_for);
        let r = self.handle.read()?;
        println!(
            "{what:<44} {samples:>6} samples; all so far stand for {stood_for} of {} ({:?})",
            r.value,
            self.handle.state()
        );
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    ignore_sigio()?;
    let signal = count_signals();
    let core = PerfCore::new(PerfCoreConfig {
        tick_hz: 250,
        sample_rate_hz: 5_000,
        ..PerfCoreConfig::default()
    });
    core.register(Arc::new(HostPmu::software(Some(signal))));
    let vcpu = core.add_vcpu(VcpuId(0), tid())?;
    let session = core.session(0, SessionRole::Admin);
    vcpu.sched_in();
    let serve = || vcpu.service_overflows(&mut UserModeRegs, &mut |_| {});
    // Causes `n` page faults and handles overflows after their signal, as a VMM's run loop does.
    let faults = |n: usize| {
        for _ in 0..n / 10 {
            let before = signals();
            touch(10);
            if signals() != before {
                serve();
            }
        }
    };
    let attr = |config, period| Attr {
        sample_type: SampleType::IP | SampleType::TIME | SampleType::PERIOD,
        ..Attr {
            sample_period: period,
            exclude_host: true,
            ..software(config)
        }
    };

    let mut event = Sampled::new(&core, &session, attr(PAGE_FAULTS, 100))?;
    faults(2_000);
    event.show("page faults, one in 100, 2000 of them")?;
    core.tick();
    event.handle.set_period(500)?;
    faults(2_000);
    event.show("one in 500 from now on, 2000 more")?;
    core.tick();
    event.handle.set_period(1)?;
    faults(400);
    event.show("every one, 400 more: too many for a tick")?;
    core.tick();
    faults(10);
    event.show("after the tick, ten more")?;
    event.handle.set_period(100)?;
    event.handle.refresh(3)?;
    core.tick();
    faults(1_000);
    event.show("three overflows, then off; 1000 more")?;
    drop(event);

    let mut clock = Sampled::new(&core, &session, attr(TASK_CLOCK, 1_000).with_freq())?;
    for second in 1..=2 {
        for _ in 0..250 {
            // Polls, because this loop makes no blocking call that an overflow signal could
            // interrupt.
            for _ in 0..20 {
                spin(Duration::from_micros(200));
                serve();
            }
            core.tick();
            clock.drain()?;
        }
        clock.show(&format!("processor time, 1000 samples a second: second {second}"))?;
    }
    Ok(())
}
