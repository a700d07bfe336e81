//! PMUs as they are built: general counters, and fixed ones that hold one event each.

use std::collections::BTreeMap;

use super::SimConfig;
use crate::pmu::CounterMask;

/// A host to simulate. Its general counters come first, its fixed ones behind them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimHost {
    /// Number of general counters.
    pub general: usize,
    /// Fixed counters.
    pub fixed: Vec<SimFixed>,
    /// Counters that somebody else holds.
    pub taken: CounterMask,
}

/// A fixed counter of a [`SimHost`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimFixed {
    /// The `config` of the event it holds.
    pub config: u64,
    /// General counters can hold it too.
    pub general_too: bool,
}

impl SimHost {
    /// `config` of cycles, as perf numbers it.
    pub const CYCLES: u64 = 0;
    /// `config` of instructions, as perf numbers it.
    pub const INSTRUCTIONS: u64 = 1;
    /// `config` of branches, as perf numbers it: an event that no fixed counter holds.
    pub const BRANCHES: u64 = 4;
    /// `config` of reference cycles, as perf numbers it.
    pub const REF_CYCLES: u64 = 9;

    /// An Intel PMU with fixed counters for instructions, cycles and reference cycles; the last counts on
    /// none of the general ones in Linux.
    #[must_use]
    pub fn intel(general: usize) -> Self {
        let fixed = |config| SimFixed {
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

    /// An AMD PMU.
    #[must_use]
    pub fn amd(general: usize) -> Self {
        Self {
            general,
            ..Self::default()
        }
    }

    /// With the NMI watchdog on, which counts cycles: on the fixed counter for it, else on a general one.
    #[must_use]
    pub fn with_watchdog(self) -> Self {
        let held = match self.fixed.iter().position(|f| f.config == Self::CYCLES) {
            Some(n) => self.general + n,
            None => 0,
        };
        self.taking(held)
    }

    /// With counter `n` in somebody else's hands.
    #[must_use]
    pub fn taking(self, n: usize) -> Self {
        Self {
            taken: self.taken | CounterMask::one(n),
            ..self
        }
    }

    /// Without anybody else.
    #[must_use]
    pub fn untouched(self) -> Self {
        Self {
            taken: CounterMask::NONE,
            ..self
        }
    }

    /// The simulated PMU of such a host.
    #[must_use]
    pub fn config(&self) -> SimConfig {
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
        SimConfig {
            slots: Some(self.general + self.fixed.len()),
            allowed_slots,
            general: Some(general.bits()),
            taken: self.taken.bits(),
            ..SimConfig::default()
        }
    }
}
