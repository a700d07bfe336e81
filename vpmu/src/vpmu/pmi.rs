//! Pending PMI: when it may be delivered, the limits on its rate and on the share of PMI handlers,
//! and its withdrawal after the guest has served the overflows that requested it.

use super::Vpmu;
use crate::counter_events::{CounterEvents, VcpuTime};
use crate::index::counters_in;

/// Delivery status of the PMI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PmiReadiness {
    /// No PMI is due.
    No,
    /// A PMI is due. Deliver it as soon as LVTPC allows, then call [`Vpmu::pmi_delivered`].
    Now,
    /// A PMI is due, but the rate limit or the share of PMI handlers delays it until the given time
    /// of the caller's clock.
    NotBefore {
        /// Earliest delivery time, in nanoseconds.
        time_ns: u64,
    },
}

/// PMI statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PmiCounts {
    /// Number of PMIs delivered to the guest.
    pub delivered: u64,
    /// Number of PMIs delayed by the rate limit.
    pub throttled: u64,
    /// Number of PMIs delayed because PMI handlers had consumed their share of the vCPU's time.
    pub held: u64,
    /// Total delay, in nanoseconds, of the delivered PMIs that had been delayed by the share limit.
    pub held_ns: u64,
    /// Number of PMIs withdrawn because the guest served their overflows, or stopped their counters
    /// while the share limit delayed them, before delivery.
    pub withdrawn: u64,
}

/// A due PMI in the saved state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DuePmi {
    /// Mask of counters that requested the PMI and whose overflows the guest has not served since.
    pub(crate) sources: u64,
    /// Set if the PMI could not be delivered.
    pub(crate) deferred: bool,
}

/// A due PMI as read from a saved state.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RestoredPmi {
    /// Complete description.
    Known(DuePmi),
    /// PMI from layout version 1, which does not contain the counters that requested it.
    UnknownSources,
}

impl Vpmu {
    /// Returns whether a PMI is due, including a delayed one.
    #[inline]
    pub fn pmi_pending(&self) -> bool {
        self.pmi_due
    }

    /// Returns whether a due PMI may be delivered at `now_ns`, in nanoseconds of any monotonic
    /// clock.
    ///
    /// Overflows before the delivery are coalesced into one PMI, as they are into one NMI on a
    /// physical processor. A delayed PMI waits as described in [`Self::defer_pmi`].
    pub fn pmi_ready(&mut self, now_ns: u64) -> PmiReadiness {
        if !self.pmi_due {
            return PmiReadiness::No;
        }
        let limit_ns = self.pmi_limit.next_ns();
        let mut share_ns = self.pmi_share.next_ns();
        if share_ns > now_ns {
            let stopped = self.stopped_sources();
            if stopped != 0 && self.vendor.driver_awaits_pmi() {
                share_ns = 0;
            } else {
                self.drop_overflows(stopped);
                if !self.pmi_due {
                    return PmiReadiness::No;
                }
            }
        }
        let time_ns = limit_ns.max(share_ns);
        if time_ns <= now_ns {
            return PmiReadiness::Now;
        }
        if !self.defer_pmi() {
            return PmiReadiness::No;
        }
        if share_ns > now_ns && self.pmi_held_since_ns.is_none() {
            self.pmi_held_since_ns = Some(now_ns);
            self.pmi_counts.held += 1;
        }
        if limit_ns > now_ns && !self.pmi_throttled {
            self.pmi_throttled = true;
            self.pmi_counts.throttled += 1;
            if self
                .throttle_logged_ns
                .is_none_or(|last| now_ns.saturating_sub(last) >= 1_000_000_000)
            {
                self.throttle_logged_ns = Some(now_ns);
                perf_core::guest_log!(
                    Warn,
                    "the guest requests more PMIs than the limit allows: {} delivered, {} delayed so far",
                    self.pmi_counts.delivered,
                    self.pmi_counts.throttled
                );
            }
        }
        PmiReadiness::NotBefore { time_ns }
    }

    /// Returns the mask of counters that requested the due PMI and that the guest has stopped
    /// since, outside the last PMI's handler. Linux stops and restarts a sampled event at every
    /// tick.
    ///
    /// If the driver awaits the PMI, it does so after it has stopped the counters globally.
    /// Otherwise a counter is only considered stopped once its own control register disables it.
    /// Freeze-on-PMI stops the counters without an action of the guest.
    fn stopped_sources(&self) -> u64 {
        if self.pmi_share.is_running() {
            return 0;
        }
        let enabled = if self.vendor.driver_awaits_pmi() && !self.registers.freezes_counters() {
            self.vendor.globally_enabled(&self.registers)
        } else {
            u64::MAX
        };
        counters_in(self.pmi_sources)
            .filter(|&counter| {
                enabled & counter.mask() == 0 || !self.vendor.is_selected(&self.registers, counter)
            })
            .fold(0, |mask, counter| mask | counter.mask())
    }

    /// Drops the overflows of `counters`, and withdraws the due PMI if no other overflow requested
    /// it.
    ///
    /// A PMI delivered while the counter is stopped would attribute its sample to the code that
    /// stops it. A later PMI would find a counter with a new period. Its handler may even stop the
    /// event again, about which Linux warns (`x86_pmu_stop`).
    fn drop_overflows(&mut self, counters: u64) {
        if counters == 0 {
            return;
        }
        self.pmi_sources &= !counters;
        if self.pmi_sources == 0 {
            self.pmi_counts.withdrawn += 1;
            self.forget_pmi();
        }
    }

    /// Records that the due PMI cannot be delivered because LVTPC is masked or the local APIC is
    /// disabled. Returns whether the PMI is still due.
    ///
    /// A local APIC does not latch masked interrupts (SDM vol. 3, "Local Vector Table"; KVM's
    /// `kvm_apic_local_deliver` drops such an interrupt). However, an emulated overflow may be
    /// detected later than on a physical processor, and therefore after the guest has set the mask.
    /// The overflow status resolves both cases. The PMI remains due while the overflow of any
    /// counter that requested it is still set, and is withdrawn once the guest has served all of
    /// these counters. A counter is served when its bit of the global status is cleared or, on
    /// models without a global status, when the counter is written, because handlers there examine
    /// the top bit of the counter value. Stopping a counter does not serve it.
    pub fn defer_pmi(&mut self) -> bool {
        self.pmi_deferred = self.pmi_due;
        self.withdraw_if_served();
        self.pmi_due
    }

    /// Marks the overflows of these counters as served by the guest.
    pub(super) fn served(&mut self, counters: u64, events: &mut dyn CounterEvents) {
        if self.pmi_deferred {
            // Other counters may also have overflowed, and this write does not serve them.
            self.fold_all(events);
        }
        self.pmi_sources &= !counters;
        self.pmi_share.served(counters);
        self.withdraw_if_served();
    }

    /// Returns whether the caller must call [`Self::observe_handler`] before [`Self::pmi_ready`],
    /// because the registers do not show whether the handler of the last PMI has returned. Must be
    /// called before every guest entry if the share of PMI handlers is limited.
    #[inline]
    pub fn needs_handler_state(&self, events: &mut dyn CounterEvents) -> bool {
        self.pmi_share.is_uncertain(self.pmi_due, || events.now_ns())
    }

    /// Records whether the guest still executes the handler of the last delivered PMI. `executes`
    /// must be `true` if the PMI was an NMI that has not been followed by an IRET yet, or if its
    /// interrupt vector is requested or in service in the local APIC.
    pub fn observe_handler(&mut self, executes: bool, now: impl Into<VcpuTime>) {
        self.pmi_share.observe(executes, now.into());
    }

    /// Ends the measurement of the PMI handler if the handler has served all counters that
    /// requested the PMI and these counters are enabled again.
    #[cold]
    pub(super) fn detect_handler_end(&mut self, events: &mut dyn CounterEvents) {
        let is_enabled = |counter| self.vendor.is_selected(&self.registers, counter);
        if self.pmi_share.all_served()
            && self.vendor.globally_enabled(&self.registers) != 0
            && counters_in(self.pmi_share.sources()).all(is_enabled)
        {
            self.pmi_share.rearmed(events.time());
        }
    }

    /// Withdraws a PMI that had to wait for delivery if the guest has served all counters that
    /// requested it. A PMI that never had to wait is delivered even if the guest has cleared the
    /// status in the meantime, because a physical processor would have delivered it earlier.
    fn withdraw_if_served(&mut self) {
        if self.pmi_deferred && self.pmi_sources == 0 {
            self.pmi_counts.withdrawn += 1;
            self.forget_pmi();
        }
    }

    pub(super) fn forget_pmi(&mut self) {
        self.pmi_due = false;
        self.pmi_sources = 0;
        self.pmi_deferred = false;
        self.pmi_throttled = false;
        self.pmi_held_since_ns = None;
        self.forget_branches();
    }

    /// Returns the due PMI as part of the saved state.
    pub(crate) fn due_pmi(&self) -> Option<DuePmi> {
        self.pmi_due.then_some(DuePmi {
            sources: self.pmi_sources,
            deferred: self.pmi_deferred,
        })
    }

    /// Restores the PMI that was due when the state was saved. If the counters that requested it
    /// are unknown, every counter that could have requested it is assumed to have done so, because
    /// a spurious PMI is better than a lost PMI.
    pub(crate) fn restore_pmi(&mut self, pmi: Option<RestoredPmi>) {
        self.forget_pmi();
        let Some(pmi) = pmi else { return };
        self.pmi_due = true;
        match pmi {
            RestoredPmi::Known(DuePmi { sources, deferred }) => {
                self.pmi_sources = sources;
                self.pmi_deferred = deferred;
            }
            RestoredPmi::UnknownSources if self.vendor.has_status(&self.model) => {
                self.pmi_sources = self.registers.global_status & self.model.counters_mask();
            }
            RestoredPmi::UnknownSources => {
                self.pmi_sources = counters_in(self.model.counters_mask())
                    .filter(|&counter| self.vendor.interrupts(&self.registers, counter))
                    .fold(0, |mask, counter| mask | counter.mask());
            }
        }
    }

    /// Records the delivery of the due PMI. If [`Self::delivery_masks_lvtpc`] returns `true`, the
    /// caller must also mask LVTPC.
    pub fn pmi_delivered(&mut self, now: impl Into<VcpuTime>) {
        if self.pmi_due {
            let now = now.into();
            let now_ns = now.event_ns;
            if let Some(since_ns) = self.pmi_held_since_ns {
                self.pmi_counts.held_ns += now_ns.saturating_sub(since_ns);
            }
            // Steps that collect branches delay the guest as the handler does.
            self.pmi_share.begin(self.pmi_sources, self.pmi_began_run_ns(now));
            self.forget_pmi();
            self.pmi_counts.delivered += 1;
            self.pmi_limit.take(now_ns);
        }
    }

    /// Returns whether the delivery of a PMI masks the LVT performance entry of the local APIC, as
    /// on Intel but not on AMD.
    pub fn delivery_masks_lvtpc(&self) -> bool {
        self.vendor.delivery_masks_lvtpc()
    }

    /// Returns the number of counter overflows, with or without a PMI, regardless of how they were
    /// detected. Several overflows may share one PMI.
    pub fn overflow_count(&self) -> u64 {
        self.overflows
    }

    /// Returns the PMI statistics.
    pub fn pmi_counts(&self) -> PmiCounts {
        self.pmi_counts
    }
}
