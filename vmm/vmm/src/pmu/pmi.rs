//! PMIs of a vCPU: determines when a PMI is due, and records its delivery.

use vpmu::{CounterEvents as _, PmiCounts, PmiReadiness, VcpuTime};

use super::VcpuPmu;

impl VcpuPmu {
    /// Returns `true` if a PMI is due and not delivered yet.
    #[inline]
    pub fn pmi_pending(&self) -> bool {
        self.vpmu.pmi_pending()
    }

    /// Returns the vCPU's event time in nanoseconds, on which the limits of PMIs are based. Does
    /// not advance while the vCPU is paused.
    fn now_ns(&mut self) -> u64 {
        self.attached
            .as_mut()
            .map_or(0, |attached| attached.events.now_ns())
    }

    fn time(&mut self) -> VcpuTime {
        self.attached
            .as_mut()
            .map_or_else(VcpuTime::default, |attached| attached.events.time())
    }

    /// Returns whether the due PMI may be delivered now, or when a limit permits its delivery.
    pub fn pmi_ready(&mut self) -> PmiReadiness {
        let now_ns = self.now_ns();
        self.vpmu.pmi_ready(now_ns)
    }

    /// Returns `true` if [`VcpuPmu::observe_handler`] must be called before the next entry.
    #[inline]
    pub fn needs_handler_state(&mut self) -> bool {
        self.attached
            .as_mut()
            .is_some_and(|attached| self.vpmu.needs_handler_state(&mut attached.events))
    }

    /// Records whether the guest is still executing the handler of the last PMI.
    pub fn observe_handler(&mut self, executes: bool) {
        let now = self.time();
        self.vpmu.observe_handler(executes, now);
    }

    /// Records that the due PMI cannot be delivered now. Returns `false` if the PMI is no longer
    /// due, because the guest has cleared its cause.
    pub fn defer_pmi(&mut self) -> bool {
        self.vpmu.defer_pmi()
    }

    /// Returns the number of overflows of guest counters; see [`vpmu::Vpmu::overflow_count`].
    pub fn overflow_count(&self) -> u64 {
        self.vpmu.overflow_count()
    }

    /// Returns the PMI statistics.
    pub fn pmi_counts(&self) -> PmiCounts {
        self.vpmu.pmi_counts()
    }

    /// Starts to collect the guest's branch records for the due PMI.
    pub fn begin_branch_records(&mut self) {
        let now = self.time();
        self.vpmu.begin_branches(now);
    }

    /// Records that the due PMI was delivered.
    pub fn pmi_delivered(&mut self) {
        let now = self.time();
        self.vpmu.pmi_delivered(now);
    }

    /// Returns the nanoseconds until `time_ns`, a time on the event clock of the vCPU, which stops
    /// while the vCPU is paused. Returns 0 for a time in the past.
    pub fn nanoseconds_until(&mut self, time_ns: u64) -> u64 {
        time_ns.saturating_sub(self.now_ns())
    }
}
