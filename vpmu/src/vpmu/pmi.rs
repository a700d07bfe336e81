//! The pending PMI: when it may be delivered, how long it waits, and when the guest has served what asked for
//! it.

use super::Vpmu;
use crate::index::counters_in;
use crate::source::CounterEvents;

/// Whether a PMI can be delivered now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PmiReady {
    /// None is due.
    No,
    /// Deliver one as soon as LVTPC allows it, then call [`Vpmu::pmi_delivered`].
    Now,
    /// One is due, but the rate limit holds it back until this time of the clock that was asked with.
    NotBefore {
        /// Nanoseconds.
        time_ns: u64,
    },
}

/// What happened to PMIs so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PmiCounts {
    /// Delivered to the guest.
    pub delivered: u64,
    /// Held back by the rate limit before they were delivered.
    pub throttled: u64,
    /// Forgotten, because the guest had served what asked for them while they waited.
    pub withdrawn: u64,
}

impl Vpmu {
    /// Whether a PMI is due, be it held back or not.
    #[inline]
    pub fn pmi_pending(&self) -> bool {
        self.pmi_due
    }

    /// Whether a due PMI may be delivered at `now_ns`, nanoseconds of any monotonic clock.
    ///
    /// Overflows that come before the delivery share one PMI, as they share one NMI on a processor. One that
    /// the limit holds back waits as [`Self::pmi_must_wait`] says.
    pub fn pmi_ready(&mut self, now_ns: u64) -> PmiReady {
        if !self.pmi_due {
            return PmiReady::No;
        }
        let time_ns = self.pmi_limit.next_ns();
        if time_ns <= now_ns {
            return PmiReady::Now;
        }
        if !self.pmi_must_wait() {
            return PmiReady::No;
        }
        if !self.pmi_held {
            self.pmi_held = true;
            self.pmi_counts.throttled += 1;
            if self
                .throttle_logged_ns
                .is_none_or(|last| now_ns.saturating_sub(last) >= 1_000_000_000)
            {
                self.throttle_logged_ns = Some(now_ns);
                perf_core::guest_log!(
                    Warn,
                    "the guest asks for more PMIs than the limit allows: {} delivered, {} delayed so far",
                    self.pmi_counts.delivered,
                    self.pmi_counts.throttled
                );
            }
        }
        PmiReady::NotBefore { time_ns }
    }

    /// The due PMI cannot be delivered now: LVTPC is masked, or the local APIC is off. Returns whether it is
    /// still due.
    ///
    /// A local APIC latches nothing behind a mask (SDM vol. 3, "Local Vector Table"; KVM's
    /// `kvm_apic_local_deliver` drops such an interrupt). But here an overflow may be noticed later than it
    /// would be on a processor, and so behind a mask that it would have come before. What makes both right is
    /// the status: as long as a counter that asked for the PMI shows its overflow, the interrupt is still to
    /// come; once the guest has served all of them it would be one for nothing, and is forgotten. A counter
    /// is served when its bit of the global status is cleared, or, where the model has no global status, when
    /// the counter is written: what handlers there look at is the top bit of its value, and until it is
    /// written that says "overflowed". Stopping a counter serves nothing.
    pub fn pmi_must_wait(&mut self) -> bool {
        self.pmi_waits = self.pmi_due;
        self.withdraw_if_served();
        self.pmi_due
    }

    /// The guest has served the overflows of these counters.
    pub(super) fn served(&mut self, counters: u64, events: &mut dyn CounterEvents) {
        if self.pmi_waits {
            // Others may have overflowed, too, and are not served by this.
            self.fold_all(events);
        }
        self.pmi_sources &= !counters;
        self.withdraw_if_served();
    }

    /// A PMI that waits and has no source left is forgotten. One that was never made to wait is delivered
    /// whatever the guest has cleared meanwhile: on a processor it would have come before.
    fn withdraw_if_served(&mut self) {
        if self.pmi_waits && self.pmi_sources == 0 {
            self.pmi_counts.withdrawn += 1;
            self.forget_pmi();
        }
    }

    pub(super) fn forget_pmi(&mut self) {
        self.pmi_due = false;
        self.pmi_sources = 0;
        self.pmi_waits = false;
        self.pmi_held = false;
    }

    /// Takes over a PMI that was due when the state was saved. Who asked for it is not in there, so it is
    /// everyone who can have: better one too many than one too few.
    pub(crate) fn restore_pmi(&mut self, due: bool) {
        self.forget_pmi();
        if due {
            self.pmi_due = true;
            self.pmi_sources = if self.vendor.has_status(&self.model) {
                self.registers.global_status & self.model.counters_mask()
            } else {
                counters_in(self.model.counters_mask())
                    .filter(|&counter| self.vendor.interrupts(&self.registers, counter))
                    .fold(0, |mask, counter| mask | counter.mask())
            };
        }
    }

    /// The due PMI was delivered. Where [`Self::delivery_masks_lvtpc`] says so, the caller also masks LVTPC.
    pub fn pmi_delivered(&mut self, now_ns: u64) {
        if self.pmi_due {
            self.forget_pmi();
            self.pmi_counts.delivered += 1;
            self.pmi_limit.take(now_ns);
        }
    }

    /// Whether delivering a PMI masks the local APIC's LVT entry: Intel's does, AMD's does not.
    pub fn delivery_masks_lvtpc(&self) -> bool {
        self.vendor.delivery_masks_lvtpc()
    }

    /// PMIs delivered, held back and withdrawn so far.
    pub fn pmi_counts(&self) -> PmiCounts {
        self.pmi_counts
    }
}
