//! Numbers of the counts that a VMM feeds to perf-core itself, for [`perf_core::pmu::fed::FedCounts`].

use crate::events::{ArchEvent, ParavirtualEvent};

/// How many selectors a vCPU's fed counts need.
pub const SELECTORS: usize = EXACT.len() + ParavirtualEvent::ALL.len();

/// What the exact backing counts, in the order of its selectors.
pub const EXACT: [ArchEvent; 6] = [
    ArchEvent::Instructions,
    ArchEvent::Branches,
    ArchEvent::TakenBranches,
    ArchEvent::ConditionalBranches,
    ArchEvent::Loads,
    ArchEvent::Stores,
];

/// Selector of what the single-stepper counts. Cycles of all kinds are retired instructions there.
pub fn exact(event: ArchEvent) -> Option<usize> {
    let counted = match event {
        ArchEvent::CoreCycles | ArchEvent::RefCycles | ArchEvent::BusCycles => ArchEvent::Instructions,
        other => other,
    };
    EXACT.iter().position(|&e| e == counted)
}

/// Selector of a paravirtual event that the VMM counts.
pub fn paravirtual(event: ParavirtualEvent) -> usize {
    EXACT.len() + usize::from(event.umask().0) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_selector_has_one_meaning() {
        let mut seen: Vec<usize> = EXACT.iter().filter_map(|&event| exact(event)).collect();
        seen.extend(ParavirtualEvent::ALL.map(paravirtual));
        assert_eq!(seen, (0..SELECTORS).collect::<Vec<_>>());
        assert_eq!(exact(ArchEvent::CoreCycles), exact(ArchEvent::Instructions));
        assert_eq!(exact(ArchEvent::CacheMisses), None);
    }
}
