//! Limit on the share of a vCPU's time that PMI handlers consume.
//!
//! If a PMI handler takes longer than the period of the counter that it re-arms, every handler
//! returns into the next PMI and the interrupted program makes no progress. [`ShareLimit`] measures
//! each handler and delays the next PMI until the guest has run long enough outside the handler.

use std::str::FromStr;

use crate::Vendor;
use crate::counter_events::VcpuTime;

/// Maximum share of a vCPU's time for PMI handlers, in percent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmiShare(u8);

/// Error returned when a [`PmiShare`] cannot be parsed.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
#[error("must be between 1% and 100%, or off")]
pub struct PmiShareError;

impl PmiShare {
    /// Default for Intel models. If the PMI handler takes longer than the sampling interval,
    /// `perf record -e cycles` of a Linux guest then takes 1.2 times as long as `-e cpu-clock`
    /// (2.1 times with 50 percent).
    const INTEL_DEFAULT: Self = Self(25);
    /// Default for AMD models. Linux waits for a delayed PMI at each of its ticks. With a lower
    /// share, the ticks receive most PMIs, so most samples belong to the kernel.
    const AMD_DEFAULT: Self = Self(50);
    /// No limit. Handlers may consume all of the time.
    pub const UNLIMITED: Self = Self(100);

    /// Returns the default for models of a vendor: 25 percent for Intel and 50 percent for AMD.
    pub fn default_of(vendor: Vendor) -> Self {
        match vendor {
            Vendor::Intel => Self::INTEL_DEFAULT,
            Vendor::Amd => Self::AMD_DEFAULT,
        }
    }

    /// Returns the share for 1 to 100 percent.
    pub fn from_percent(percent: u8) -> Option<Self> {
        (1..=100).contains(&percent).then_some(Self(percent))
    }

    /// Returns whether PMIs are never delayed.
    pub fn is_unlimited(self) -> bool {
        self == Self::UNLIMITED
    }

    /// Returns the minimum time that the guest must run outside its handler after a handler that
    /// took `handler_ns`. Both times are in nanoseconds.
    fn gap_ns(self, handler_ns: u64) -> u64 {
        let percent = u64::from(self.0);
        (handler_ns.min(MAX_HANDLER_NS) * (100 - percent) / percent).min(MAX_GAP_NS)
    }
}

/// No limit, as in a new [`Vpmu`](crate::Vpmu).
impl Default for PmiShare {
    fn default() -> Self {
        Self::UNLIMITED
    }
}

/// Parses `50%`, `50` or `off`.
impl FromStr for PmiShare {
    type Err = PmiShareError;

    fn from_str(text: &str) -> Result<Self, PmiShareError> {
        if text == "off" {
            return Ok(Self::UNLIMITED);
        }
        let number = text.strip_suffix('%').unwrap_or(text);
        let percent = number.parse().map_err(|_| PmiShareError)?;
        Self::from_percent(percent).ok_or(PmiShareError)
    }
}

/// Maximum measured duration of a handler, in nanoseconds. A longer duration indicates that the VMM
/// process was stopped.
const MAX_HANDLER_NS: u64 = 1_000_000_000;
/// Maximum delay of a PMI, in nanoseconds.
const MAX_GAP_NS: u64 = 1_000_000_000;

/// Progress of the guest's last PMI handler, as far as the VMM can tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum HandlerPhase {
    /// The handler has returned, or no PMI has been delivered yet.
    #[default]
    Returned,
    /// The handler has re-enabled its counters, but the guest may still be executing the handler's
    /// last instructions.
    Rearmed,
    /// The handler has not re-enabled its counters yet.
    Running,
}

/// Saved state of the measurement of the last PMI handler. All times are relative to the time of
/// saving.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SavedHandler {
    pub(crate) phase: HandlerPhase,
    /// Masks of the counters that requested the PMI, and of those whose overflow the handler has
    /// not served yet. A handler serves a counter by clearing its overflow status or, on models
    /// without a status register, by writing it.
    pub(crate) sources: u64,
    pub(crate) unserved: u64,
    /// CPU time of the vCPU's thread since the PMI was delivered, in nanoseconds.
    pub(crate) elapsed_ns: u64,
    /// Time until the next PMI may be delivered, in nanoseconds.
    pub(crate) remaining_ns: u64,
}

impl SavedHandler {
    /// Returns whether [`ShareLimit::save`] could have returned this value.
    pub(crate) fn is_possible(&self) -> bool {
        let is_active = self.phase == HandlerPhase::Running || self.remaining_ns > 0;
        self.remaining_ns <= MAX_GAP_NS && (is_active || *self == Self::default())
    }
}

/// Measurement of PMI handlers, and the time of the next PMI.
#[derive(Clone, Debug, Default)]
pub(crate) struct ShareLimit {
    share: PmiShare,
    phase: HandlerPhase,
    /// Masks of the counters that requested the PMI, and of those whose overflow the handler has
    /// not served yet.
    sources: u64,
    unserved: u64,
    /// CPU time of the vCPU's thread at which the PMI was delivered. The duration of a handler
    /// excludes the time in which the host ran other threads. Time differences are computed with
    /// wrapping arithmetic, because a restored time may precede the start of the clock.
    began_run_ns: u64,
    /// Event time from which the next PMI may be delivered.
    next_ns: u64,
}

impl ShareLimit {
    pub(crate) fn new(share: PmiShare) -> Self {
        Self {
            share,
            ..Self::default()
        }
    }

    /// Returns the earliest time at which the next PMI may be delivered.
    #[inline]
    pub(crate) fn next_ns(&self) -> u64 {
        if self.share.is_unlimited() {
            0
        } else {
            self.next_ns
        }
    }

    /// Changes the share and keeps the measurement.
    pub(crate) fn set_share(&mut self, share: PmiShare) {
        self.share = share;
    }

    /// Returns whether register writes of the guest must be attributed to the measured handler.
    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        self.phase == HandlerPhase::Running
    }

    /// Returns whether the caller must determine if the guest has left its PMI handler, because
    /// this affects when a due PMI is delivered. `is_due` is `true` if another PMI is due.
    #[inline]
    pub(crate) fn is_uncertain(&self, is_due: bool, now_ns: impl FnOnce() -> u64) -> bool {
        match self.phase {
            HandlerPhase::Returned => false,
            HandlerPhase::Rearmed => is_due && now_ns() < self.next_ns(),
            HandlerPhase::Running => is_due && !self.share.is_unlimited(),
        }
    }

    /// Starts the measurement of a handler when a PMI that the counters in the mask `sources`
    /// requested is delivered, at a CPU time of the vCPU's thread.
    #[inline]
    pub(crate) fn begin(&mut self, sources: u64, began_run_ns: u64) {
        if self.share.is_unlimited() {
            return;
        }
        self.phase = HandlerPhase::Running;
        (self.sources, self.unserved) = (sources, sources);
        self.began_run_ns = began_run_ns;
    }

    /// Records that the handler has served the counters in the mask `counters`, by clearing their
    /// overflow status or, on models without a status register, by writing them.
    #[inline]
    pub(crate) fn served(&mut self, counters: u64) {
        self.unserved &= !counters;
    }

    /// Returns the mask of counters that requested the PMI.
    pub(crate) fn sources(&self) -> u64 {
        self.sources
    }

    /// Returns whether the handler has served all counters that requested the PMI.
    pub(crate) fn all_served(&self) -> bool {
        self.unserved == 0
    }

    /// Records that the handler has re-enabled its counters.
    pub(crate) fn rearmed(&mut self, now: VcpuTime) {
        self.phase = HandlerPhase::Rearmed;
        self.extend(now);
    }

    /// Records whether the guest is still executing the handler (`executes`) at `now`.
    pub(crate) fn observe(&mut self, executes: bool, now: VcpuTime) {
        if executes {
            self.extend(now);
        } else {
            self.phase = HandlerPhase::Returned;
        }
    }

    /// Extends the measured duration of the handler to `now`, and updates the earliest time of the
    /// next PMI accordingly.
    fn extend(&mut self, now: VcpuTime) {
        let gap_ns = self.share.gap_ns(now.run_ns.wrapping_sub(self.began_run_ns));
        self.next_ns = now.event_ns.saturating_add(gap_ns);
    }

    pub(crate) fn save(&self, now: VcpuTime) -> SavedHandler {
        if self.phase != HandlerPhase::Running && self.next_ns <= now.event_ns {
            return SavedHandler::default();
        }
        SavedHandler {
            phase: self.phase,
            sources: self.sources,
            unserved: self.unserved,
            elapsed_ns: now.run_ns.wrapping_sub(self.began_run_ns),
            remaining_ns: self.next_ns.saturating_sub(now.event_ns),
        }
    }

    pub(crate) fn restore(&mut self, saved: SavedHandler, now: VcpuTime) {
        self.reset();
        if saved == SavedHandler::default() {
            return;
        }
        self.phase = saved.phase;
        self.sources = saved.sources;
        self.unserved = saved.unserved;
        self.began_run_ns = now.run_ns.wrapping_sub(saved.elapsed_ns);
        self.next_ns = now.event_ns.saturating_add(saved.remaining_ns);
    }

    /// Discards the measurement of the last handler.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.share);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pmi_share_parses_percent_and_off() {
        assert_eq!("50%".parse(), Ok(PmiShare(50)));
        assert_eq!("50".parse(), Ok(PmiShare(50)));
        for text in ["off", "100%"] {
            assert!(text.parse::<PmiShare>().unwrap().is_unlimited(), "{text}");
        }
        for text in ["", "%", "0%", "101%", "300%", "-1%", "5 %", "on"] {
            assert_eq!(text.parse::<PmiShare>(), Err(PmiShareError), "{text}");
        }
    }

    #[test]
    fn stopped_process_delays_pmi_by_one_second_at_most() {
        let mut limit = ShareLimit::new(PmiShare(1));
        limit.begin(1, 0);
        limit.rearmed((3600 * 1_000_000_000).into());
        assert_eq!(limit.next_ns(), 3601 * 1_000_000_000);
        limit.rearmed(u64::MAX.into());
        assert_eq!(limit.next_ns(), u64::MAX);
    }

    /// While the host runs other threads, the handler makes no progress. This time does not delay
    /// the next PMI.
    #[test]
    fn wait_for_cpu_is_not_part_of_handler() {
        let mut limit = ShareLimit::new(PmiShare(25));
        limit.begin(1, 1_000);
        limit.rearmed(VcpuTime {
            event_ns: 50_000_000,
            run_ns: 3_000,
        });
        assert_eq!(limit.next_ns(), 50_000_000 + 3 * 2_000);
    }

    proptest! {
        /// Handlers take at most the configured share, for any sequence of handlers and requests.
        #[test]
        fn handlers_take_at_most_the_share(
            percent in 1u8..=100,
            handlers in proptest::collection::vec((1u64..1_000_000, 0u64..500_000, any::<bool>()), 1..200),
        ) {
            let mut limit = ShareLimit::new(PmiShare(percent));
            let (mut now_ns, mut inside, mut outside) = (0u64, 0u64, 0u64);
            for (handler_ns, asks_after_ns, is_observed) in handlers {
                limit.begin(1, now_ns);
                now_ns += handler_ns;
                inside += handler_ns;
                if is_observed {
                    // The handler has returned without serving its counter.
                    limit.observe(true, now_ns.into());
                    limit.observe(false, now_ns.into());
                } else {
                    limit.served(1);
                    limit.rearmed(now_ns.into());
                }
                // The next PMI becomes due, and is delayed until the limit permits it.
                let due_ns = now_ns + asks_after_ns;
                let next_ns = due_ns.max(limit.next_ns());
                outside += next_ns - now_ns;
                let p = u64::from(percent);
                // Each gap is rounded down by less than one nanosecond.
                prop_assert!(inside * (100 - p) < (outside + 200) * p);
                prop_assert!(next_ns == due_ns || next_ns - now_ns <= handler_ns * (100 - p) / p);
                now_ns = next_ns;
            }
        }
    }
}
