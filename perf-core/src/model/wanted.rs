//! Number of open events that request each type of side-band record.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::attr::Attr;

/// Number of open events that request each type of side-band record. Records that no event requests
/// are not generated.
#[derive(Debug, Default)]
pub(crate) struct RecordDemand {
    comm: AtomicU32,
    mmap: AtomicU32,
    task: AtomicU32,
}

impl RecordDemand {
    pub fn add(&self, attr: &Attr) {
        self.each(attr, |n| {
            n.fetch_add(1, Ordering::Relaxed);
        });
    }

    pub fn remove(&self, attr: &Attr) {
        self.each(attr, |n| {
            n.fetch_sub(1, Ordering::Relaxed);
        });
    }

    fn each(&self, attr: &Attr, change: impl Fn(&AtomicU32)) {
        for (on, n) in [
            (attr.comm, &self.comm),
            (attr.mmap, &self.mmap),
            (attr.task, &self.task),
        ] {
            if on {
                change(n);
            }
        }
    }

    pub fn comm(&self) -> bool {
        self.comm.load(Ordering::Relaxed) != 0
    }

    pub fn mmap(&self) -> bool {
        self.mmap.load(Ordering::Relaxed) != 0
    }

    pub fn task(&self) -> bool {
        self.comm() || self.mmap() || self.task.load(Ordering::Relaxed) != 0
    }
}
