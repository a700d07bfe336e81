//! Demonstrates multiplexing with more events than counters: flexible groups are multiplexed,
//! pinned groups are not, and estimates have error bars.
//!
//! The counters are the host's software events, of which this example allows two at a time. `cargo
//! run -p perf-core --example multiplexing [rotate|adaptive]`

mod shared;

use std::sync::Arc;
use std::time::Duration;

use perf_core::mux::MuxPolicy;
use perf_core::pmu::host::HostPmu;
use perf_core::*;
use shared::*;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mux = match std::env::args().nth(1).as_deref() {
        None | Some("rotate") => MuxPolicy::Rotate,
        Some("adaptive") => MuxPolicy::Adaptive,
        Some(other) => {
            eprintln!("unknown policy {other:?}: give rotate or adaptive");
            std::process::exit(2);
        }
    };
    let core = PerfCore::new(PerfCoreConfig {
        clock: Arc::new(ThreadTimeClock),
        mux,
        tick_hz: 1000,
        ..PerfCoreConfig::default()
    });
    core.register(Arc::new(LimitedPmu {
        host: HostPmu::software(None),
        slots: 2,
    }));
    let vcpu = core.add_vcpu(VcpuId(0), tid())?;
    let session = core.session(0, SessionRole::Admin);
    let open = |attr, leader: Option<&EventHandle>| {
        core.open(
            &session,
            attr,
            EventOpenTarget::Vcpu(VcpuId(0)),
            leader,
            OpenFlags::default(),
        )
    };
    // Reference event, which permanently holds one of the two counters.
    let truth = open(software(PAGE_FAULTS).with_pinned(), None)?;
    let shared = (0..4)
        .map(|_| open(software(PAGE_FAULTS), None))
        .collect::<Result<Vec<_>, _>>()?;
    // A group of two events needs two counters, but the pinned event leaves only one. The group
    // therefore waits, and its reading reports that it was never counted.
    let group = open(software(TASK_CLOCK), None)?;
    let _second = open(software(CONTEXT_SWITCHES), Some(&group))?;
    group.disable(EventOrGroup::Event)?;
    vcpu.sched_in();
    // Phases with many and with few faults, some milliseconds each.
    for (phase, ms) in [47, 83, 31, 67, 59, 71, 41, 90].into_iter().enumerate() {
        let end = core.now_ns() + ms * 1_000_000;
        while core.now_ns() < end {
            touch(if phase % 2 == 0 { 20 } else { 2 });
            spin(Duration::from_micros(50));
            // Polls for the end of the interval. A VMM uses a timer instead.
            if core.next_turn_ns().is_some_and(|due| due <= core.now_ns()) {
                core.rotate();
            }
        }
    }
    vcpu.sched_out();

    let truth = truth.read()?.value;
    println!("counted all the time: {truth} page faults\n");
    println!(
        "{:>8} {:>8} {:>10} {:>22}",
        "counted", "on", "linear", "by course of the rate"
    );
    for event in &shared {
        let r = event.read()?;
        let on = 100.0 * r.time_running_ns as f64 / r.time_enabled_ns as f64;
        let off = |n: u64| 100.0 * (n as f64 / truth as f64 - 1.0);
        let linear = r
            .estimate()
            .map_or("not counted".into(), |n| format!("{:+.1} %", off(n)));
        let ours = event.estimate()?.map_or("not counted".into(), |e| {
            let percent = |n: f64| format!("{:.1} %", 100.0 * n / truth as f64);
            let error = match (e.standard_error, e.bound) {
                (Some(error), _) => format!("± {}", percent(error)),
                (None, Some(bound)) => format!("within {}", percent(bound)),
                (None, None) => "error unknown".into(),
            };
            format!("{:+.1} % ({error})", off(e.value))
        });
        println!("{:>8} {on:>6.1} % {linear:>10} {ours:>22}", r.value);
    }
    group.enable(EventOrGroup::Event)?;
    let state = group.state();
    println!(
        "\nthe group of two beside a pinned event on two counters: {state:?}, {:?}",
        group.read()?.estimate()
    );
    Ok(())
}
