//! Numbers (selectors) of the counts that the VMM adds for a vCPU with
//! [`perf_core::pmu::vmm_pmu::VmmPmuCounts`].

use crate::events::{ArchEvent, ParavirtualEvent};

/// Number of selectors for the counts that the VMM supplies for one vCPU.
pub const SELECTORS: usize = EXACT.len() + ParavirtualEvent::ALL.len();

/// Architectural events that the exact backing counts. The index of an event is its selector.
pub const EXACT: [ArchEvent; 7] = [
    ArchEvent::Instructions,
    ArchEvent::Branches,
    ArchEvent::TakenBranches,
    ArchEvent::ConditionalBranches,
    ArchEvent::SpeculativeLocks,
    ArchEvent::Loads,
    ArchEvent::Stores,
];

/// Returns the selector of an event that the exact backing counts, or `None` for other events. The
/// exact backing counts retired instructions for every cycle event.
pub fn exact_selector(event: ArchEvent) -> Option<usize> {
    let counted = match event {
        ArchEvent::CoreCycles | ArchEvent::RefCycles | ArchEvent::BusCycles => ArchEvent::Instructions,
        other => other,
    };
    EXACT.iter().position(|&e| e == counted)
}

/// Returns the selector of a paravirtual event that the VMM counts.
pub fn paravirtual(event: ParavirtualEvent) -> usize {
    EXACT.len() + usize::from(event.umask().0) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_selector_has_one_meaning() {
        let mut seen: Vec<usize> = EXACT.iter().filter_map(|&event| exact_selector(event)).collect();
        seen.extend(ParavirtualEvent::ALL.map(paravirtual));
        assert_eq!(seen, (0..SELECTORS).collect::<Vec<_>>());
        assert_eq!(
            exact_selector(ArchEvent::CoreCycles),
            exact_selector(ArchEvent::Instructions)
        );
        assert_eq!(exact_selector(ArchEvent::CacheMisses), None);
    }
}
