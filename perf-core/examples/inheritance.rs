//! Demonstrates a VM-wide event that follows vCPUs as they are added and removed. The vCPUs of this
//! example are threads that run for a short time.
//!
//! `cargo run -p perf-core --example inheritance`

mod shared;

use std::sync::{Arc, Barrier};
use std::time::Duration;

use perf_core::pmu::host::HostPmu;
use perf_core::record::{DecodedRecord, RecordFormat};
use perf_core::ring::RingReader;
use perf_core::*;
use shared::*;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let core = PerfCore::new(PerfCoreConfig::default());
    core.register(Arc::new(HostPmu::software(None)));
    let session = core.session(0, SessionRole::Admin);
    let wide = |config| {
        let attr = Attr {
            inherit: true,
            inherit_stat: true,
            task: true,
            ..software(config)
        };
        core.open(&session, attr, EventOpenTarget::Vm, None, OpenFlags::default())
    };
    let events = [
        ("task-clock ns", TASK_CLOCK),
        ("page-faults", PAGE_FAULTS),
        ("context-switches", CONTEXT_SWITCHES),
    ];
    let events = events
        .into_iter()
        .map(|(name, config)| Ok((name, wide(config)?)))
        .collect::<Result<Vec<_>, PerfEventOpenError>>()?;
    let faults = &events[1].1;
    let ring = faults.map(4, true)?;
    let print = |when: &str| -> Result<(), PerfEventControlError> {
        println!("{when}:");
        for (name, event) in &events {
            println!(
                "  {:>14} {name}  ({} live children)",
                event.read()?.value,
                event.children()
            );
        }
        Ok(())
    };

    print("no vCPU yet")?;
    // All three vCPUs exist before the second reading starts and until it is complete.
    let meet = Barrier::new(4);
    std::thread::scope(|s| {
        for n in 0..3u32 {
            let (core, meet) = (&core, &meet);
            s.spawn(move || {
                let vcpu = core.add_vcpu(VcpuId(n), tid()).expect("a new vCPU");
                vcpu.sched_in();
                touch(100 * (n as usize + 1));
                meet.wait();
                meet.wait();
                spin(Duration::from_millis(20));
                vcpu.sched_out();
                core.remove_vcpu(VcpuId(n)).expect("it is there");
            });
        }
        meet.wait();
        let result = print("while they run");
        meet.wait();
        result
    })?;
    print("all have gone, nothing is lost")?;

    println!("what the page-faults ring tells of each:");
    let format = RecordFormat::from(faults.attr());
    let mut reader = RingReader::map(ring.memfd())?;
    while let Some(raw) = reader.next_record()? {
        match DecodedRecord::decode(raw, format)? {
            DecodedRecord::Fork(task) => println!("  vCPU thread {} came", task.tid),
            DecodedRecord::Exit(task) => println!("  vCPU thread {} went", task.tid),
            DecodedRecord::Read(read) => {
                let value = read.values.entries.iter().next().map_or(0, |e| e.value);
                println!("  vCPU thread {} had {value} page faults", read.tid);
            }
            _ => {}
        }
    }
    Ok(())
}
