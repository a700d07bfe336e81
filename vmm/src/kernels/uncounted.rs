//! Events that nobody counts here, taken out of the tables of a guest's kernels, so that perf there says
//! `<not supported>` and shows no 0 that nobody counted.

use std::sync::Arc;

use perf_core::guest_log;
use perf_core::pmu::host::HostProbe;
use vm_memory::GuestMemoryMmap;
use vpmu::{Backability, BackingPolicy, EventFilter, Model, Vendor};

use crate::boot::event_tables::{self, EventTable, Hidden};
use crate::kvm::cpuid;
use crate::pmu::countable::Countable;

/// What of a guest's kernels' tables cannot be counted on this host.
#[derive(Debug)]
pub struct Uncounted {
    vendor: Vendor,
    countable: Countable,
    hides: bool,
}

impl Uncounted {
    /// For guests with `model`; `probe` says what the host's perf events can do. Without `hides` the tables
    /// stay as they are.
    pub fn new(
        model: &Model,
        policy: BackingPolicy,
        backability: Backability,
        probe: HostProbe,
        hides: bool,
    ) -> Self {
        let host = vpmu::HostPmu::vendor(&mut cpuid::read_host);
        Self {
            vendor: model.vendor(),
            countable: Countable::new(model, host, policy, backability, probe),
            hides,
        }
    }

    /// The same for guests that may count what `filter` allows only.
    #[must_use]
    pub fn within(self, filter: Arc<EventFilter>) -> Self {
        Self {
            countable: self.countable.within(filter),
            ..self
        }
    }

    /// Takes what cannot be counted out of `tables`, if that is asked for.
    pub fn hide(&self, memory: &GuestMemoryMmap, tables: &[EventTable]) -> Vec<Hidden> {
        if !self.hides {
            return Vec::new();
        }
        let countable = &self.countable;
        event_tables::hide(memory, tables, self.vendor, |event, n| {
            countable.can_count(event, n)
        })
    }

    /// The same in a kernel that runs, whose memory from `start` on is `bytes`. `physical` translates.
    pub fn hide_running(
        &self,
        memory: &GuestMemoryMmap,
        start: u64,
        bytes: &[u8],
        physical: impl FnMut(u64) -> Option<u64>,
    ) -> Vec<Hidden> {
        if !self.hides {
            return Vec::new();
        }
        self.hide(memory, &event_tables::find_in_memory(start, bytes, physical))
    }

    /// Says in one line what the guest will not count, and where that was taken out.
    pub fn tell(&self, hidden: &[Hidden]) {
        tell_hidden(hidden);
        let missing = self.countable.missing();
        if !missing.is_empty() {
            // What CPUID says an Intel guest needs no table for.
            let shown = if !hidden.is_empty() || self.vendor == Vendor::Intel && self.hides {
                "perf there says <not supported>"
            } else if self.hides {
                "this kernel's tables are not known, so perf there reads 0"
            } else {
                "perf there may read 0 (--hide-uncounted off)"
            };
            log::warn!(
                "the guest cannot count {} here: {shown}; raw events that cannot be counted read 0, and uncounted-ns tells for how long",
                missing.join(", ")
            );
        }
    }
}

/// Says what was taken out of which table.
pub fn tell_hidden(hidden: &[Hidden]) {
    for table in hidden {
        guest_log!(
            Info,
            "the kernel's table of events at {:#x}: {} taken out that cannot be counted here, {} left",
            table.virt,
            table.hidden.len(),
            table.left
        );
        let names: Vec<String> = table.hidden.iter().map(ToString::to_string).collect();
        guest_log!(Debug, "taken out at {:#x}: {}", table.virt, names.join(", "));
    }
}
