//! Removal of uncountable events from the event tables of a guest's kernels, so that perf in the
//! guest shows `<not supported>` instead of a misleading zero.

use std::sync::Arc;

use perf_core::guest_log;
use perf_core::pmu::host::HostProbe;
use vm_memory::GuestMemoryMmap;
use vpmu::{BackingPolicy, CountableEvents, EventFilter, PmuModel, Vendor};

use crate::boot::event_tables::{self, EventTable, HiddenEvents};
use crate::kvm::cpuid;
use crate::pmu::countable::CountableKernelEvents;

/// Filter for events in guest kernel tables that cannot be counted on this host.
#[derive(Debug)]
pub struct UncountableEvents {
    vendor: Vendor,
    countable: CountableKernelEvents,
    hides: bool,
}

impl UncountableEvents {
    /// Creates the filter for guests with `model`. `probe` describes the perf events of the host.
    /// Without `hides` the tables are not modified.
    pub fn new(
        model: &PmuModel,
        policy: BackingPolicy,
        backability: CountableEvents,
        probe: HostProbe,
        hides: bool,
    ) -> Self {
        let host = vpmu::HostPmuProperties::vendor(&mut cpuid::read_host);
        Self {
            vendor: model.vendor(),
            countable: CountableKernelEvents::new(model, host, policy, backability, probe),
            hides,
        }
    }

    /// Restricts the countable events to those that `filter` allows.
    #[must_use]
    pub fn within(self, filter: Arc<EventFilter>) -> Self {
        Self {
            countable: self.countable.within(filter),
            ..self
        }
    }

    /// Removes uncountable events from `tables`, if enabled.
    pub fn hide(&self, memory: &GuestMemoryMmap, tables: &[EventTable]) -> Vec<HiddenEvents> {
        if !self.hides {
            return Vec::new();
        }
        let countable = &self.countable;
        event_tables::hide(memory, tables, self.vendor, |event, n| {
            countable.can_count(event, n)
        })
    }

    /// Removes uncountable events from a running kernel whose memory `bytes` begins at `start`.
    /// `physical` translates linear addresses.
    pub fn hide_running(
        &self,
        memory: &GuestMemoryMmap,
        start: u64,
        bytes: &[u8],
        physical: impl FnMut(u64) -> Option<u64>,
    ) -> Vec<HiddenEvents> {
        if !self.hides {
            return Vec::new();
        }
        self.hide(memory, &event_tables::find_in_memory(start, bytes, physical))
    }

    /// Logs the events that the guest cannot count and the tables from which they were removed.
    pub fn tell(&self, hidden: &[HiddenEvents]) {
        log_hidden(hidden);
        let missing = self.countable.missing();
        if !missing.is_empty() {
            // CPUID reports unavailable events to an Intel guest, so no table is needed.
            let shown = if !hidden.is_empty() || self.vendor == Vendor::Intel && self.hides {
                "perf there says <not supported>"
            } else if self.hides {
                "this kernel's tables are not known, so perf there reads 0"
            } else {
                "perf there may read 0 (--hide-uncounted off)"
            };
            log::warn!(
                "the guest cannot count {} on this host: {shown}; uncounted raw events read 0, and \
                uncounted-ns reports for how long",
                missing.join(", ")
            );
        }
    }
}

/// Logs the events that were removed from each table.
pub fn log_hidden(hidden: &[HiddenEvents]) {
    for table in hidden {
        guest_log!(
            Info,
            "the kernel's event table at {:#x}: {} uncounted events removed, {} kept",
            table.virt,
            table.hidden.len(),
            table.left
        );
        let names: Vec<String> = table.hidden.iter().map(ToString::to_string).collect();
        guest_log!(Debug, "removed at {:#x}: {}", table.virt, names.join(", "));
    }
}
