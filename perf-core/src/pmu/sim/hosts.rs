//! Descriptions of real PMUs that [`super::SimPmu`] can simulate: general-purpose counters, and
//! fixed-function counters that hold one event each.

use std::collections::BTreeMap;

use super::SimPmuConfig;
use crate::pmu::CounterMask;

/// A host PMU to simulate. Its general-purpose counters are numbered first, then its fixed-function
/// counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimHostPmu {
    /// Number of general-purpose counters of the PMU.
    pub general: usize,
    /// Fixed-function counters of the PMU.
    pub fixed: Vec<SimFixedCounter>,
    /// Counters that another user of the PMU holds.
    pub taken: CounterMask,
}

/// A fixed-function counter of a [`SimHostPmu`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimFixedCounter {
    /// Value of `config` for the event that the counter holds.
    pub config: u64,
    /// `true` if general-purpose counters can hold the event of this counter too.
    pub general_too: bool,
}

impl SimHostPmu {
    /// Value of `config` for cycles, as in perf.
    pub const CYCLES: u64 = 0;
    /// Value of `config` for instructions, as in perf.
    pub const INSTRUCTIONS: u64 = 1;
    /// Value of `config` for branches, as in perf. No fixed-function counter holds this event.
    pub const BRANCHES: u64 = 4;
    /// Value of `config` for reference cycles, as in perf.
    pub const REF_CYCLES: u64 = 9;

    /// Returns an Intel PMU with fixed-function counters for instructions, cycles and reference
    /// cycles. As in Linux, no general-purpose counter holds reference cycles.
    #[must_use]
    pub fn intel(general: usize) -> Self {
        let fixed = |config| SimFixedCounter {
            config,
            general_too: config != Self::REF_CYCLES,
        };
        Self {
            general,
            fixed: [Self::INSTRUCTIONS, Self::CYCLES, Self::REF_CYCLES]
                .map(fixed)
                .into(),
            taken: CounterMask::NONE,
        }
    }

    /// Returns an AMD PMU, which has only general-purpose counters.
    #[must_use]
    pub fn amd(general: usize) -> Self {
        Self {
            general,
            ..Self::default()
        }
    }

    /// Returns this host with an active NMI watchdog. The watchdog holds the fixed-function counter
    /// of cycles or, if there is none, a general-purpose counter.
    #[must_use]
    pub fn with_watchdog(self) -> Self {
        let held = match self.fixed.iter().position(|f| f.config == Self::CYCLES) {
            Some(n) => self.general + n,
            None => 0,
        };
        self.with_taken(held)
    }

    /// Returns this host with counter `n` in use by another user.
    #[must_use]
    pub fn with_taken(self, n: usize) -> Self {
        Self {
            taken: self.taken | CounterMask::one(n),
            ..self
        }
    }

    /// Returns this host with all counters free, none in use by another user.
    #[must_use]
    pub fn without_taken(self) -> Self {
        Self {
            taken: CounterMask::NONE,
            ..self
        }
    }

    /// Returns the configuration of a [`super::SimPmu`] that simulates this host.
    #[must_use]
    pub fn config(&self) -> SimPmuConfig {
        let general = CounterMask::first(self.general);
        let allowed_slots: BTreeMap<u64, u64> = self
            .fixed
            .iter()
            .enumerate()
            .map(|(n, fixed)| {
                let own = CounterMask::one(self.general + n);
                let also = if fixed.general_too {
                    general
                } else {
                    CounterMask::NONE
                };
                (fixed.config, (own | also).bits())
            })
            .collect();
        SimPmuConfig {
            slots: Some(self.general + self.fixed.len()),
            allowed_slots,
            general: Some(general.bits()),
            taken: self.taken.bits(),
            ..SimPmuConfig::default()
        }
    }
}
