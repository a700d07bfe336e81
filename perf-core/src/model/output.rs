//! Where an event's records go.

use std::sync::Arc;

use crate::model::totals::Totals;
use crate::ring::{Counter, Ring};

/// A ring in use by events.
#[derive(Debug)]
pub(crate) struct Output {
    pub ring: Arc<Ring>,
    /// The event that owns the ring.
    pub owner: u64,
}

/// Brings the control page of an event that owns a ring up to date: count and times.
///
/// The index is always 0 (not directly readable): who maps the ring runs on another CPU than the vCPU, and a
/// counter read there would be another's.
pub(crate) fn write_page(output: &Output, totals: Totals) {
    let counter = Counter {
        index: 0,
        offset: totals.count.cast_signed(),
        time_enabled_ns: totals.times.enabled_ns,
        time_running_ns: totals.times.running_ns,
    };
    // A page that another thread is updating right now gets that thread's values, which are as fresh.
    let _ = output.ring.control().update(counter);
}
