//! The `host` driver: the capabilities of this host, and a software event.
//!
//! `cargo run --example driver_host`

use perf_core::attr::{Attr, EventType};
use perf_core::pmu::host::{HostPmu, HostProbe};
use perf_core::pmu::{Pmu, PmuError, PmuTarget, VcpuId};

const PAGE_FAULTS: u64 = 2;

fn main() -> Result<(), PmuError> {
    let probe = HostProbe::run();
    println!("{probe:#?}");
    let hardware = HostPmu::hardware(None, &probe);
    println!("hardware counters: {:?}", hardware.capacity());

    let attr = Attr {
        ty: EventType::SOFTWARE,
        config: PAGE_FAULTS,
        ..Attr::default()
    };
    // A thread id of 0 is the calling thread.
    let here = PmuTarget::Vcpu {
        vcpu: VcpuId(0),
        tid: 0,
    };
    let mut faults = HostPmu::software(None).open(&attr, here)?;
    faults.start(None)?;
    let pages = 1_000;
    let mut memory = vec![0u8; pages * 4096];
    memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    faults.stop();
    println!(
        "touching {pages} fresh pages: {} page faults{}",
        faults.read(),
        if memory[0] == 1 { "" } else { "?" }
    );
    Ok(())
}
