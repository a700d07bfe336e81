//! The `sim` driver: a PMU with two slots, one of which a constrained event requires, and a skid of
//! three counts.
//!
//! `cargo run --example driver_sim`

use std::collections::BTreeMap;

use perf_core::attr::{Attr, EventType};
use perf_core::pmu::sim::{SimConfig, SimPmu};
use perf_core::pmu::{Pmu, PmuError, PmuEvent, PmuTarget, VcpuId};

const PICKY: u64 = 9;

fn main() -> Result<(), PmuError> {
    let pmu = SimPmu::new(SimConfig {
        slots: Some(2),
        allowed_slots: BTreeMap::from([(PICKY, 0b01)]),
        skid: 3,
        ..SimConfig::default()
    });
    let open = |config| -> Result<Box<dyn PmuEvent>, PmuError> {
        let attr = Attr {
            ty: EventType::SIM,
            config,
            ..Attr::default()
        };
        let target = PmuTarget::Vcpu {
            vcpu: VcpuId(0),
            tid: 0,
        };
        pmu.open(&attr, target)
    };
    let (mut a, mut picky, mut b) = (open(1)?, open(PICKY)?, open(2)?);
    a.start(None)?;
    picky.start(Some(10))?;
    println!(
        "indexes: a {}, picky {}; a third event: {:?}",
        a.user_index(),
        picky.user_index(),
        b.start(None).map_err(|e| e.to_string())
    );
    for step in 1..=20 {
        pmu.advance(VcpuId(0), |config| u64::from(config == PICKY));
        if picky.take_overflows() > 0 {
            println!("armed for 10, noticed at step {step}");
        }
    }
    println!("calls: {:?}", pmu.calls());
    Ok(())
}
