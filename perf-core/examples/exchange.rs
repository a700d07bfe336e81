//! Demonstrates one host thread that alternates between two vCPUs. Both vCPUs have the same
//! inherited events, so a switch swaps their contexts: no event is stopped or started, and each
//! vCPU keeps its counts.
//!
//! `cargo run -p perf-core --example exchange`

mod shared;

use std::sync::Arc;
use std::time::{Duration, Instant};

use perf_core::pmu::host::HostPmu;
use perf_core::*;
use shared::*;

/// Switches back and forth between the two vCPUs `n` times. Returns the duration, and the number of
/// switches that swapped the contexts.
fn switch(a: &VcpuEventContext, b: &VcpuEventContext, n: u32) -> (Duration, u32) {
    let (began, mut exchanged) = (Instant::now(), 0);
    for _ in 0..n {
        exchanged += u32::from(a.switch_to(b)) + u32::from(b.switch_to(a));
    }
    (began.elapsed(), exchanged)
}

/// Runs the example.
///
/// # Errors
/// Returns the error of any event, ring or setting.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let core = PerfCore::builder()
        .driver(Arc::new(HostPmu::software(None)))
        .build()?;
    let session = core.session(0, SessionRole::Admin);
    let open = |config| {
        let attr = Attr {
            inherit: true,
            // Keeps each vCPU's counts and times, even when the contexts are exchanged.
            inherit_stat: true,
            ..software(config)
        };
        core.open(&session, attr, EventOpenTarget::Vm, None, OpenFlags::default())
    };
    let faults = open(PAGE_FAULTS)?;
    let _clock = open(TASK_CLOCK)?;
    // Both vCPUs run on this thread.
    let [first, second] = [core.add_vcpu(VcpuId(0), tid())?, core.add_vcpu(VcpuId(1), tid())?];

    first.sched_in();
    touch(100);
    assert!(first.switch_to(&second), "the contexts were exchanged");
    touch(10);
    assert!(second.switch_to(&first), "and back again");
    touch(100);
    let parts = faults.read_by_vcpu()?;
    for part in &parts {
        println!("vCPU {}: {} page faults", part.vcpu.0, part.reading.value);
    }
    assert!(parts[0].reading.value >= 200 && (10..100).contains(&parts[1].reading.value));

    let (with, exchanged) = switch(&first, &second, 1_000);
    assert_eq!(exchanged, 2_000);
    // A pinned context is not exchanged.
    let looking = first.pin();
    let (without, exchanged) = switch(&first, &second, 1_000);
    assert_eq!(exchanged, 0);
    drop(looking);
    println!(
        "a switch takes {} ns; {} ns where the events go off and on",
        with.as_nanos() / 2_000,
        without.as_nanos() / 2_000
    );

    // An event that only one of the two vCPUs has makes their contexts different, so they are no
    // longer exchanged.
    let target = EventOpenTarget::Vcpu(VcpuId(1));
    let own = core.open(
        &session,
        software(PAGE_FAULTS),
        target,
        None,
        OpenFlags::default(),
    )?;
    assert!(!first.switch_to(&second), "it stays with its vCPU");
    touch(10);
    second.sched_out();
    println!("an event of vCPU 1 alone: {} page faults", own.read()?.value);
    Ok(())
}
