//! Time enabled and time running: a count must be interpreted relative to the time for which it was
//! counted.
//!
//! `cargo run -p perf-core --example times`

mod shared;

use std::sync::Arc;
use std::time::Duration;

use perf_core::pmu::host::HostPmu;
use perf_core::*;
use shared::*;

fn show(what: &str, handle: &Handle) -> Result<(), ControlError> {
    let r = handle.read()?;
    let ms = |ns: u64| ns as f64 / 1e6;
    let estimate = r.estimate().map_or("not counted".into(), |n| n.to_string());
    println!(
        "{what:<44} {:>6} faults  enabled {:>6.1} ms  running {:>6.1} ms  estimate {estimate}",
        r.value,
        ms(r.time_enabled_ns),
        ms(r.time_running_ns)
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let core = PerfCore::new(PerfCoreConfig {
        clock: Arc::new(ThreadTimeClock),
        ..PerfCoreConfig::default()
    });
    // A single counter, so that two events must share it.
    core.register(Arc::new(LimitedPmu {
        host: HostPmu::software(None),
        slots: 1,
    }));
    let vcpu = core.add_vcpu(VcpuId(0), tid())?;
    let session = core.session(0, Role::Admin);
    let open = || {
        core.open(
            &session,
            software(PAGE_FAULTS),
            OpenTarget::Vcpu(VcpuId(0)),
            None,
            OpenFlags::default(),
        )
    };
    let faults = open()?;
    show("opened, its vCPU does not run yet", &faults)?;
    vcpu.sched_in();
    touch(200);
    spin(Duration::from_millis(10));
    show("ran alone: every fault was seen", &faults)?;
    vcpu.sched_out();
    touch(200);
    spin(Duration::from_millis(10));
    show("vCPU paused: neither counts nor time", &faults)?;
    vcpu.sched_in();
    faults.disable(ControlScope::Event)?;
    touch(200);
    spin(Duration::from_millis(10));
    show("disabled: the same", &faults)?;
    faults.enable(ControlScope::Event)?;

    let second = open()?;
    show("a second event that waits", &second)?;
    for _ in 0..20 {
        touch(50);
        spin(Duration::from_millis(1));
        core.tick();
    }
    show("both by turns: the first", &faults)?;
    show("both by turns: the second", &second)?;
    if let Some(e) = second.estimate()? {
        let error = e.standard_error.map_or("unknown".into(), |e| format!("{e:.0}"));
        println!(
            "the second by the course of its rate: {} ± {error} (1000 pages were touched)",
            e.value
        );
    }
    Ok(())
}
