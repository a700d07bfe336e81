//! Artificial measurements for tests of the verdicts.

use control_api::protocol::{GuestCounter, VcpuView};

use crate::guest::{GuestCpuResult, Measurement};
use crate::procfs::ThreadAccounting;

/// Returns a stopped counter with the value `value` that ran for half of its enabled time.
pub(super) fn counter(name: &str, value: u64) -> GuestCounter {
    GuestCounter {
        counter: name.into(),
        backing: Some("clock".into()),
        value,
        enabled_ns: Some(2_000_000),
        running_ns: Some(1_000_000),
        overflows: Some(0),
        ..GuestCounter::default()
    }
}

fn view(counters: Vec<GuestCounter>) -> VcpuView {
    VcpuView {
        counters,
        ..VcpuView::default()
    }
}

/// Returns a measurement on one CPU in which the general-purpose counters have the values `counts`,
/// both in the guest and in the host's view.
pub(super) fn outcome(counts: &[u64]) -> Measurement {
    let names = (0..counts.len()).map(|n| format!("gp{n}"));
    let after = names.zip(counts).map(|(name, count)| counter(&name, *count));
    Measurement {
        cpus: vec![GuestCpuResult {
            tsc: 3_000_000,
            c: counts.to_vec(),
            f: Vec::new(),
            pmis: 0,
            late: 0,
            spurious: 0,
            struck: Vec::new(),
        }],
        before: vec![view(Vec::new())],
        after: vec![view(after.collect())],
        facts: vec![ThreadAccounting::default()],
        overhead_ns: 0,
        operator: None,
    }
}
