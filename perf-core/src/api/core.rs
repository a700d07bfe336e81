//! A core's drivers, its timer's calls, and what it holds.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use crate::context::ContextStats;
use crate::model::state::TickNeed;
use crate::pmu::{Pmu, VcpuId};
use crate::schedule::SharePolicy;
use crate::service::core::{Core, Driver, VcpuContext};

impl Core {
    /// Adds a driver. Of several that serve a type the first registered is asked.
    pub fn register(&self, pmu: Arc<dyn Pmu>) {
        let capacity = pmu.capacity();
        log::info!("driver {}: {capacity:?}", pmu.name());
        self.inner
            .drivers
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Driver { pmu, capacity });
    }

    /// The time that records carry, now, in ns of the core's clock.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.inner.config.clock.now_ns()
    }

    /// The context of a vCPU.
    #[must_use]
    pub fn vcpu(&self, vcpu: VcpuId) -> Option<Arc<VcpuContext>> {
        self.inner.vcpus.load().iter().find(|v| v.id() == vcpu).cloned()
    }

    /// To be called by the VM's timer, [`crate::CoreConfig::tick_hz`] times a second while
    /// [`Core::needs_tick`]: rotates waiting groups, adjusts frequencies, lifts throttles, and looks now and
    /// then whether what is on counts. Takes each context's lock in turn and no other.
    pub fn tick(&self) {
        self.tick_after(1);
    }

    /// [`Core::tick`] for a timer that has expired `expirations` times since the last call, because
    /// its thread was late. Groups rotate once. A frequency is adjusted by the time that has
    /// passed: overflows of several ticks taken for those of one would make its period too long.
    pub fn tick_after(&self, expirations: u64) {
        self.inner.tick(&self.inner.vm, expirations);
        for vcpu in self.inner.vcpus.load().iter() {
            self.inner.tick(&vcpu.cell.load(), expirations);
        }
    }

    /// Whether an event of some vCPU went to the error state and its thread has not seen that yet: it may be
    /// in the guest for long, and wants to be interrupted.
    #[must_use]
    pub fn has_unseen_errors(&self) -> bool {
        let vcpus = self.inner.vcpus.load();
        vcpus
            .iter()
            .any(|v| v.errors() != v.seen_errors.load(Ordering::Relaxed))
    }

    /// Whether [`Core::tick`] has anything to do, or may come to have. While not, the VMM may stop its timer
    /// and ask again after each call that opens or enables.
    #[must_use]
    pub fn needs_tick(&self) -> bool {
        self.tick_need() != TickNeed::None
    }

    /// What [`Core::tick`] has to do, for timers that ring less often where it is little.
    #[must_use]
    pub fn tick_need(&self) -> TickNeed {
        // Each lock is let go before the next is taken.
        let vm = self.inner.vm.lock().tick_need();
        let vcpus = self.inner.vcpus.load();
        let needs = vcpus.iter().map(|v| v.cell.load().lock().tick_need());
        needs.max().unwrap_or_default().max(vm)
    }

    /// The time of [`crate::CoreConfig::clock`] at which [`Core::rotate`] is due, if groups share slots.
    /// Under [`crate::mux::MuxPolicy::Adaptive`] that is an irregular one; under rotation it is the next
    /// tick.
    #[must_use]
    pub fn next_turn_ns(&self) -> Option<u64> {
        let vcpus = self.inner.vcpus.load();
        let turns = vcpus.iter().filter_map(|v| v.cell.load().lock().next_turn_ns());
        let first = turns.min();
        // Not in one expression: it would hold the VM's lock while it waits for those of vCPUs.
        let vm = self.inner.vm.lock().next_turn_ns();
        first.into_iter().chain(vm).min()
    }

    /// The rotation half of [`Core::tick`], for timers that follow [`Core::next_turn_ns`].
    pub fn rotate(&self) {
        for vcpu in self.inner.vcpus.load().iter() {
            let cell = vcpu.cell.load();
            let now_ns = cell.now_ns();
            cell.lock().rotate(now_ns);
        }
        let now_ns = self.inner.vm.now_ns();
        self.inner.vm.lock().rotate(now_ns);
    }

    /// Changes who gets slots, at once and for vCPUs added later. Under [`crate::SharePolicy::Strict`] what
    /// is open stays open; only new events are refused.
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

    /// Who gets slots now.
    #[must_use]
    pub fn share(&self) -> SharePolicy {
        self.inner.limits.share()
    }

    /// What a vCPU's context holds; `None` when there is no such vCPU.
    #[must_use]
    pub fn vcpu_stats(&self, vcpu: VcpuId) -> Option<ContextStats> {
        let vcpus = self.inner.vcpus.load();
        vcpus.iter().find(|v| v.id() == vcpu).map(|v| v.stats())
    }

    /// What the VM context holds.
    #[must_use]
    pub fn vm_stats(&self) -> ContextStats {
        self.inner.vm.lock().stats()
    }
}
