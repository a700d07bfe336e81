//! Event counts together with their time enabled and time running.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::time::EventTimeTotals;

/// Sum of the totals of the exited children of an event. Can be read without a lock.
#[derive(Debug, Default)]
pub(crate) struct ExitedTotals {
    pub count: AtomicU64,
    pub enabled_ns: AtomicU64,
    pub running_ns: AtomicU64,
}

impl ExitedTotals {
    pub fn load(&self) -> Totals {
        Totals {
            count: self.count.load(Ordering::Relaxed),
            times: EventTimeTotals {
                enabled_ns: self.enabled_ns.load(Ordering::Relaxed),
                running_ns: self.running_ns.load(Ordering::Relaxed),
            },
        }
    }

    pub fn store(&self, totals: Totals) {
        self.count.store(totals.count, Ordering::Relaxed);
        self.enabled_ns.store(totals.times.enabled_ns, Ordering::Relaxed);
        self.running_ns.store(totals.times.running_ns, Ordering::Relaxed);
    }
}

/// The count of an event, with its time enabled and time running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub count: u64,
    pub times: EventTimeTotals,
}

impl Totals {
    pub fn add(&mut self, other: Self) {
        self.count = self.count.wrapping_add(other.count);
        self.times.add(other.times);
    }
}
