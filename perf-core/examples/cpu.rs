//! Counts context switches, migrations and page faults on each CPU of the host for a second.
//! Requires root, `CAP_PERFMON`, or a `kernel.perf_event_paranoid` of 0 or less.
//!
//! `cargo run -p perf-core --example cpu`

use std::sync::Arc;
use std::time::Duration;

use perf_core::pmu::host::HostPmu;
use perf_core::*;

/// `PERF_COUNT_SW_CONTEXT_SWITCHES`, `_CPU_MIGRATIONS`, `_PAGE_FAULTS`.
const EVENTS: [(&str, u64); 3] = [("switches", 3), ("migrations", 4), ("page faults", 2)];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let core = PerfCore::builder()
        .driver(Arc::new(HostPmu::software(None)))
        .build()?;
    let session = core.session(0, Role::Admin);
    let cpus = u32::try_from(std::thread::available_parallelism()?.get())?;
    let mut counted = Vec::new();
    for cpu in 0..cpus {
        let target = OpenTarget::Vcpu(core.add_cpu(cpu)?.id());
        for (name, config) in EVENTS {
            let attr = Attr::counting(EventType::SOFTWARE, config);
            match core.open(&session, attr, target, None, OpenFlags::default()) {
                Ok(event) => counted.push((cpu, name, event)),
                Err(error) => {
                    println!("CPU {cpu} cannot be counted: {error}");
                    return Ok(());
                }
            }
        }
    }
    std::thread::sleep(Duration::from_secs(1));
    for (cpu, name, event) in counted {
        println!("CPU {cpu}: {} {name}", event.read()?.value);
    }
    Ok(())
}
