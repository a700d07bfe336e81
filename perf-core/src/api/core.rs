//! Methods of [`PerfCore`] for drivers, timer ticks and statistics.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use crate::context::ContextStats;
use crate::model::state::PendingTickWork;
use crate::pmu::{Pmu, VcpuId};
use crate::schedule::SharePolicy;
use crate::service::core::{Driver, PerfCore, VcpuEventContext};

impl PerfCore {
    /// Registers a driver. If several drivers serve the same event type, the core uses the one that
    /// was registered first.
    pub fn register(&self, pmu: Arc<dyn Pmu>) {
        let capacity = pmu.capacity();
        log::info!("driver {}: {capacity:?}", pmu.name());
        self.inner
            .drivers
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Driver { pmu, capacity });
    }

    /// Returns the current time of the core clock, in nanoseconds. Records contain this time.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.inner.config.clock.now_ns()
    }

    /// Returns the context of `vcpu`, or `None` if there is no such vCPU.
    #[must_use]
    pub fn vcpu(&self, vcpu: VcpuId) -> Option<Arc<VcpuEventContext>> {
        self.inner.vcpus.load().iter().find(|v| v.id() == vcpu).cloned()
    }

    /// Performs the periodic work of the core: rotates waiting groups, adjusts frequencies,
    /// unthrottles events, and checks periodically that running events still count.
    ///
    /// The VM timer calls this method [`crate::PerfCoreConfig::tick_hz`] times per second while
    /// [`PerfCore::needs_tick`] returns `true`. Holds at most one context lock at a time and takes
    /// no other lock.
    pub fn tick(&self) {
        self.tick_after(1);
    }

    /// Performs [`PerfCore::tick`] after `expirations` expirations of the timer, for a timer thread
    /// that missed some of them.
    ///
    /// Rotates the groups once. Frequencies are adjusted by the elapsed time, because treating the
    /// overflows of several ticks as those of one tick would make the period too long.
    pub fn tick_after(&self, expirations: u64) {
        self.inner.tick(&self.inner.vm, expirations);
        for vcpu in self.inner.vcpus.load().iter() {
            self.inner.tick(&vcpu.cell.load(), expirations);
        }
    }

    /// Returns `true` if an event of some vCPU has entered the error state and the vCPU's thread
    /// has not called [`VcpuEventContext::take_errors`] since. The VMM then kicks the vCPU, because
    /// its thread may stay in the guest for a long time.
    #[must_use]
    pub fn has_unhandled_errors(&self) -> bool {
        let vcpus = self.inner.vcpus.load();
        vcpus
            .iter()
            .any(|v| v.errors() != v.handled_errors.load(Ordering::Relaxed))
    }

    /// Returns `true` if [`PerfCore::tick`] has work to do or may have work later without another
    /// call, apart from checking whether hardware events still count. Otherwise the VMM may disarm
    /// its timer until the next call of [`TickTimer::request`](crate::TickTimer::request).
    #[must_use]
    pub fn needs_tick(&self) -> bool {
        self.tick_need() >= PendingTickWork::Watch
    }

    /// Returns how much work [`PerfCore::tick`] has to do. A VMM timer may expire less often when
    /// there is little work.
    #[must_use]
    pub fn tick_need(&self) -> PendingTickWork {
        // Each lock is released before the next one is acquired.
        let vm = self.inner.vm.lock().tick_need();
        let vcpus = self.inner.vcpus.load();
        let needs = vcpus.iter().map(|v| v.cell.load().lock().tick_need());
        needs.max().unwrap_or_default().max(vm)
    }

    /// Returns the time, on [`crate::PerfCoreConfig::clock`], at which [`PerfCore::rotate`] is due,
    /// or `None` if no groups share slots. Under [`crate::mux::MuxPolicy::Adaptive`] the intervals
    /// are irregular. Under [`crate::mux::MuxPolicy::Rotate`], a rotation is always due, because
    /// every tick rotates.
    #[must_use]
    pub fn next_turn_ns(&self) -> Option<u64> {
        let vcpus = self.inner.vcpus.load();
        let turns = vcpus.iter().filter_map(|v| v.cell.load().lock().next_turn_ns());
        let first = turns.min();
        // A separate statement, because a single expression would hold the VM context lock while it
        // waits for vCPU locks.
        let vm = self.inner.vm.lock().next_turn_ns();
        first.into_iter().chain(vm).min()
    }

    /// Rotates the groups that share slots, as [`PerfCore::tick`] does. For a VMM with a separate
    /// timer that expires at [`PerfCore::next_turn_ns`].
    pub fn rotate(&self) {
        for vcpu in self.inner.vcpus.load().iter() {
            let cell = vcpu.cell.load();
            let now_ns = cell.now_ns();
            cell.lock().rotate(now_ns);
        }
        let now_ns = self.inner.vm.now_ns();
        self.inner.vm.lock().rotate(now_ns);
    }

    /// Changes the slot sharing policy, for existing vCPUs immediately and for vCPUs that are added
    /// later. Under [`crate::SharePolicy::Strict`], open events stay open and only new events are
    /// rejected.
    pub fn set_share(&self, share: SharePolicy) {
        let _topology = self.inner.topology();
        self.inner.limits.set_share(share);
        for vcpu in self.inner.vcpus.load().iter() {
            let cell = vcpu.cell.load();
            let now_ns = cell.now_ns();
            cell.lock().set_policy(share, now_ns);
        }
        let now_ns = self.inner.vm.now_ns();
        self.inner.vm.lock().set_policy(share, now_ns);
    }

    /// Returns the current slot sharing policy.
    #[must_use]
    pub fn share(&self) -> SharePolicy {
        self.inner.limits.share()
    }

    /// Returns the statistics of the context of `vcpu`, or `None` if there is no such vCPU.
    #[must_use]
    pub fn vcpu_stats(&self, vcpu: VcpuId) -> Option<ContextStats> {
        let vcpus = self.inner.vcpus.load();
        vcpus.iter().find(|v| v.id() == vcpu).map(|v| v.stats())
    }

    /// Returns the statistics of the VM context.
    #[must_use]
    pub fn vm_stats(&self) -> ContextStats {
        self.inner.vm.lock().stats()
    }
}
