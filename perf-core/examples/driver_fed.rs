//! The `fed` driver: a VMM that single-steps instructions counts them exactly, and stops exactly at
//! an overflow.
//!
//! `cargo run --example driver_fed`

use std::sync::Arc;

use perf_core::attr::{Attr, EventType};
use perf_core::pmu::fed::{FedCounts, FedPmu};
use perf_core::pmu::{Pmu, PmuError, PmuTarget, VcpuId};

const INSTRUCTIONS: usize = 0;

fn main() -> Result<(), PmuError> {
    let counts = Arc::new(FedCounts::new(1));
    let pmu = FedPmu::new();
    pmu.add_vcpu(VcpuId(0), Arc::clone(&counts));
    let attr = Attr {
        ty: EventType::FED,
        config: INSTRUCTIONS as u64,
        exclude_kernel: true,
        ..Attr::default()
    };
    let target = PmuTarget::Vcpu {
        vcpu: VcpuId(0),
        tid: 0,
    };
    let mut user = pmu.open(&attr, target)?;
    user.start(Some(100))?;
    for step in 1u64.. {
        // A guest that enters its kernel for every tenth instruction.
        let cpl = if step % 10 == 0 { 0 } else { 3 };
        if counts.add(INSTRUCTIONS, cpl, 1) {
            println!(
                "overflow at step {step}: {} user instructions of {}, taken: {}",
                user.read(),
                counts.total(INSTRUCTIONS),
                user.take_overflows()
            );
            break;
        }
    }
    Ok(())
}
