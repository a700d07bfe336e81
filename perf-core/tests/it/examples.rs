//! Examples of behavior that no product uses. Each asserts its claims, and runs here as it does
//! manually.
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
use perf_core::pmu::{Target, VcpuId};

use crate::common::skip;

fn run(example: fn() -> Result<(), Box<dyn Error>>) {
    let result = example();
    assert!(result.is_ok(), "{result:?}");
}

/// Returns `true` if this user may call `perf_event_open(2)`.
fn can_count() -> bool {
    let target = Target::Vcpu {
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
fn raised_events_levels_names_and_settings_are_as_the_example_says() {
    run(raised::main);
}

#[test]
fn group_readings_shared_outputs_pauses_and_ends_are_as_the_example_says() {
    if can_count() {
        run(groups::main);
    }
}

#[test]
fn a_thread_that_runs_two_vcpus_takes_its_events_along_as_the_example_says() {
    if can_count() {
        run(exchange::main);
    }
}
