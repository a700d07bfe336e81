//! Removal of uncountable events from the event tables of a guest's kernels, so that perf in the
//! guest shows `<not supported>` instead of a misleading zero.

use std::fmt::Debug;

use perf_core::guest_log;
use vm_memory::GuestMemoryMmap;
use vpmu::Vendor;

use crate::event_tables::{self, HiddenKernelEvents, KernelEventTable, KernelTableEvent};
use crate::topdown_events::{self, TopdownList};

/// Determines which events in a guest kernel's tables can be counted on this host for this guest.
pub trait KernelEventSupport: Debug + Send + Sync {
    /// Returns `true` if `event` can be counted. `config` is its encoding in the kernel's table.
    fn can_count(&self, event: KernelTableEvent, config: u64) -> bool;

    /// Returns `true` if the guest may count the top-down events that Linux lists by processor
    /// family and model.
    fn can_count_topdown(&self) -> bool;

    /// Returns the names of the common `perf stat` events that cannot be counted.
    fn missing_events(&self) -> Vec<&'static str>;
}

/// Removes events from guest kernel tables that cannot be counted on this host.
#[derive(Debug)]
pub struct UncountableEventSet {
    vendor: Vendor,
    countable: Box<dyn KernelEventSupport>,
    hides: bool,
}

impl UncountableEventSet {
    /// Creates the filter for guests with a PMU of `vendor`. If `hides` is `false`, the tables are
    /// not modified.
    pub fn new(vendor: Vendor, countable: Box<dyn KernelEventSupport>, hides: bool) -> Self {
        Self {
            vendor,
            countable,
            hides,
        }
    }

    /// Removes uncountable events from `tables`, if hiding is enabled.
    pub fn hide(&self, memory: &GuestMemoryMmap, tables: &[KernelEventTable]) -> Vec<HiddenKernelEvents> {
        if !self.hides {
            return Vec::new();
        }
        let countable = &self.countable;
        event_tables::hide(memory, tables, self.vendor, |event, n| {
            countable.can_count(event, n)
        })
    }

    /// Removes the top-down events from `lists` if hiding is enabled and they are uncountable.
    pub fn hide_topdown(&self, memory: &GuestMemoryMmap, lists: &[TopdownList]) {
        if self.hides && self.vendor == Vendor::Intel && !self.countable.can_count_topdown() {
            let hidden = topdown_events::hide(memory, lists);
            log::debug!("{hidden} lists of the kernel's top-down events taken out");
        }
    }

    /// Removes uncountable events from the tables of a running kernel. `bytes` are the contents of
    /// the kernel's memory from address `start`, and `physical` translates linear addresses.
    pub fn hide_running(
        &self,
        memory: &GuestMemoryMmap,
        start: u64,
        bytes: &[u8],
        physical: impl FnMut(u64) -> Option<u64>,
    ) -> Vec<HiddenKernelEvents> {
        if !self.hides {
            return Vec::new();
        }
        self.hide(memory, &event_tables::find_in_memory(start, bytes, physical))
    }

    /// Logs which default events of `perf stat` the guest cannot count, and from which tables
    /// events were removed.
    pub fn log(&self, hidden: &[HiddenKernelEvents]) {
        log_hidden(hidden);
        let missing = self.countable.missing_events();
        if !missing.is_empty() {
            // An Intel guest finds unavailable events in CPUID, even if no table was changed.
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

/// Logs the events that were removed from each event table.
pub fn log_hidden(hidden: &[HiddenKernelEvents]) {
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
