//! Runs the examples that demonstrate features which no other program of the workspace uses. Each
//! example checks its own results.
#![allow(clippy::duplicate_mod, reason = "each example has what they share")]

#[path = "../../examples/exchange.rs"]
mod exchange;
#[path = "../../examples/groups.rs"]
mod groups;
#[path = "../../examples/raised.rs"]
mod raised;

use std::error::Error;

use perf_core::Pmu;
use perf_core::attr::{Attr, EventType};
use perf_core::pmu::host::HostPmu;
use perf_core::pmu::{PmuEventTarget, VcpuId};

use test_support::skip;

fn run(example: fn() -> Result<(), Box<dyn Error>>) {
    let result = example();
    assert!(result.is_ok(), "{result:?}");
}

/// Returns `true` if this user may open kernel events with `perf_event_open(2)`.
fn can_count() -> bool {
    let target = PmuEventTarget::Vcpu {
        vcpu: VcpuId(0),
        tid: 0,
    };
    let may = HostPmu::software(None)
        .open(&Attr::counting(EventType::SOFTWARE, 2), target)
        .is_ok();
    if !may {
        skip::skipped("this user may not open perf events", false);
    }
    may
}

#[test]
fn raised_example_runs() {
    run(raised::main);
}

#[test]
fn groups_example_runs() {
    if can_count() {
        run(groups::main);
    }
}

#[test]
fn exchange_example_runs() {
    if can_count() {
        run(exchange::main);
    }
}
