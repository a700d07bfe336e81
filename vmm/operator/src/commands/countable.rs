//! Determines which of perf's generic events this host can count for a VM.

use control_api::events::list::{PerfEventKind, parse};
use control_api::events::names::HardwareEvent;
use perf_core::pmu::host::{self, HostPerfCapabilities};

/// Text printed after the name of an event that this host cannot count.
const NOT_HERE: &str = " (not on this host)";

/// The generic events that this host can count for a VM.
pub(super) struct CountableEvents(HostPerfCapabilities);

impl CountableEvents {
    /// Determines which events this host can count. Takes a few milliseconds.
    pub(super) fn of_host() -> Self {
        Self(HostPerfCapabilities::run())
    }

    /// Returns the note to print after `event` in a list: empty if this host can count the event.
    /// `event` consists of a name and optional aliases, separated by ` OR `.
    pub(super) fn mark(&self, event: &str) -> &'static str {
        let name = event.split(" OR ").next().unwrap_or(event);
        if self.counts(name) { "" } else { NOT_HERE }
    }

    fn counts(&self, name: &str) -> bool {
        let Some(kind) = parse(name).ok().and_then(|groups| {
            let event = groups.into_iter().next()?.events.into_iter().next()?;
            Some(event.kind)
        }) else {
            return true;
        };
        match kind {
            PerfEventKind::Hardware(event) => {
                // On a host without a PMU, the clock backing estimates cycles.
                let cycles = matches!(event, HardwareEvent::Cycles | HardwareEvent::RefCycles);
                let mut generic = self.0.generic.iter();
                (cycles && self.0.software_clock)
                    || generic.any(|known| known.config == event as u64 && known.opens)
            }
            PerfEventKind::Cache(config) => host::cache_event_opens(config),
            // Software, KVM and paravirtual events do not need the host's PMU.
            _ => true,
        }
    }

    /// Returns whether the host has a PMU that counts vendor events.
    pub(super) fn has_pmu(&self) -> bool {
        self.0.hardware_pmu
    }
}

#[cfg(test)]
mod tests {
    use perf_core::pmu::host::GenericEvent;

    use super::*;

    #[test]
    fn events_without_counter_are_marked() {
        let generic = |name: &str, config, opens| GenericEvent {
            name: name.to_owned(),
            config,
            opens,
        };
        let host = CountableEvents(HostPerfCapabilities {
            software_clock: true,
            generic: vec![generic("instructions", 1, true), generic("branches", 4, false)],
            ..HostPerfCapabilities::run()
        });
        for (event, mark) in [
            ("cycles OR cpu-cycles", ""),
            ("instructions", ""),
            ("branches OR branch-instructions", NOT_HERE),
            ("cache-misses", NOT_HERE),
            ("task-clock", ""),
            ("pv/steal-ns/", ""),
            ("rNNN", ""),
        ] {
            assert_eq!(host.mark(event), mark, "{event}");
        }
    }
}
