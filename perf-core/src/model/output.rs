//! Output of events to rings.

use std::sync::Arc;

use crate::model::totals::Totals;
use crate::ring::{ControlPageCounter, Ring};

/// A ring that events write to, and the event that owns the ring.
#[derive(Debug)]
pub(crate) struct Output {
    pub ring: Arc<Ring>,
    /// ID of the event that owns this ring.
    pub owner: u64,
}

/// Updates count and times in the control page of an event that owns a ring.
///
/// The `index` field is always 0, which tells readers not to use `rdpmc`: they run on a different
/// CPU than the vCPU and would read a different counter.
pub(crate) fn write_page(output: &Output, totals: Totals) {
    let counter = ControlPageCounter {
        index: 0,
        offset: totals.count.cast_signed(),
        time_enabled_ns: totals.times.enabled_ns,
        time_running_ns: totals.times.running_ns,
    };
    // Skips the update if another thread is updating the page, because the values of that thread
    // are equally recent.
    let _ = output.ring.control().update(counter);
}
