//! Methods of [`VcpuEventContext`] that the thread of a vCPU calls.

use std::sync::atomic::Ordering;

use crate::context::ContextStats;
use crate::model::regs::SampleRegs;
use crate::model::software::SoftwareEventId;
use crate::pmu::VcpuId;
use crate::sample::OverflowReport;
use crate::service::core::VcpuEventContext;
use crate::service::overflow;

impl VcpuEventContext {
    /// Returns the ID of the vCPU.
    #[must_use]
    pub fn id(&self) -> VcpuId {
        self.vcpu
    }

    /// Returns the ID of the host thread that runs the vCPU.
    #[must_use]
    pub fn tid(&self) -> i32 {
        self.tid
    }

    /// Schedules the context in: starts its time and schedules its events on the PMU. Has no effect
    /// if the context is already scheduled in.
    pub fn sched_in(&self) {
        let cell = self.cell.load();
        let now_ns = cell.now_ns();
        let came = cell.lock().sched_in(now_ns);
        if came {
            self.record_switch(false);
        }
    }

    /// Schedules the context out: stops its events and its time.
    /// [`VcpuEventContext::service_overflows`] afterwards handles all overflows, including those
    /// for which no signal has arrived yet.
    ///
    /// Raises [`SoftwareEventId::ContextSwitches`] first, so that the events of this context still
    /// count the context switch.
    pub fn sched_out(&self) {
        self.software_event(SoftwareEventId::ContextSwitches, 1, None, &mut |_| {});
        self.record_switch(true);
        self.go_out();
    }

    /// Writes a SWITCH record for the events that request such records
    /// ([`crate::Attr::context_switch`]), if the context is scheduled in.
    pub(crate) fn record_switch(&self, out: bool) {
        if !self.gates.wants_switches() {
            return;
        }
        let cell = self.cell.load();
        let active = cell.lock().clock.is_active();
        if active && let Some(core) = self.core.upgrade() {
            core.switch_record(self, &cell, out);
        }
    }

    pub(crate) fn go_out(&self) {
        let cell = self.cell.load();
        let now_ns = cell.now_ns();
        cell.lock().sched_out(now_ns);
    }

    /// Performs the work of [`crate::PerfCore::tick`] for this context only.
    pub fn tick(&self) {
        if let Some(core) = self.core.upgrade() {
            core.tick(&self.cell.load(), 1);
        }
    }

    /// Returns the statistics of this context.
    #[must_use]
    pub fn stats(&self) -> ContextStats {
        self.cell.load().lock().stats()
    }

    /// Returns the number of times that an event of this vCPU entered the error state.
    /// [`VcpuEventContext::switch_to`] does not move this number to another vCPU. The VMM compares
    /// it with the previous value at each VM entry to detect that a guest counter has lost its slot
    /// (see [`VcpuEventContext::take_errors`]). Costs one load.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Acquire)
    }

    /// Returns `true` if an event of this vCPU entered the error state since the last call. The
    /// vCPU's thread calls this method at each VM entry and after it enables an event.
    pub fn take_errors(&self) -> bool {
        let errors = self.errors();
        let unseen = self.handled_errors.load(Ordering::Relaxed) != errors;
        if unseen {
            self.handled_errors.store(errors, Ordering::Relaxed);
        }
        unseen
    }

    /// Returns the context time: the time for which the context was scheduled in, in nanoseconds.
    /// The time enabled and time running of events are measured in context time.
    #[must_use]
    pub fn time_ns(&self) -> u64 {
        let cell = self.cell.load();
        let now_ns = cell.now_ns();
        cell.lock().clock.advance(now_ns)
    }

    /// Checks whether running events still hold their hardware counters. Takes at most one system
    /// call per hardware event. Events that lost their counter enter the error state or wait for
    /// the next rotation. [`crate::PerfCore::tick`] calls this method periodically.
    pub fn check_lost_counters(&self) {
        let cell = self.cell.load();
        let now_ns = cell.now_ns();
        cell.lock().check_lost_slots(now_ns);
    }

    /// Services the overflows of this context and of the VM context: accounts for them, writes
    /// SAMPLE records, and calls `sink` for each event with a cookie that overflowed. Call this
    /// method after an overflow signal. A call without a signal costs one driver call per armed
    /// event. Does not allocate.
    ///
    /// No lock is held while `sink` is called, so `sink` may call methods of event handles.
    ///
    /// Returns the number of events that overflowed. 0 means that the signal had a different cause.
    pub fn service_overflows(&self, regs: &mut dyn SampleRegs, sink: &mut dyn FnMut(OverflowReport)) -> u32 {
        let Some(core) = self.core.upgrade() else { return 0 };
        overflow::service(&core, &self.cell.load(), regs, sink)
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::thread;

    use super::*;
    use crate::api::open::{EventOpenTarget, OpenFlags};
    use crate::attr::{Attr, EventType};
    use crate::model::regs::UnavailableRegs;
    use crate::pmu::Pmu;
    use crate::pmu::sim::SimPmu;
    use crate::service::config::{PerfCoreConfig, SessionRole};
    use crate::service::core::PerfCore;

    /// Ticks, reads, overflows, ring writes and context switches of a vCPU make progress while
    /// another thread holds all shared locks and the locks of all other contexts.
    #[test]
    fn vcpu_hot_paths_take_no_shared_lock() {
        let core = PerfCore::new(PerfCoreConfig::default());
        let pmu = Arc::new(SimPmu::with_slots(2));
        core.register(Arc::clone(&pmu) as Arc<dyn Pmu>);
        let [hot, other] = [0, 1].map(|id| core.add_vcpu(VcpuId(id), 1 + id as i32).unwrap());
        let session = core.session(0, SessionRole::Admin);
        let open = |attr| {
            let flags = OpenFlags::with_cookie(7);
            core.open(&session, attr, EventOpenTarget::Vcpu(VcpuId(0)), None, flags)
                .unwrap()
        };
        let sampled = open(Attr::sampling(EventType::SIM, 1, 10));
        let _ring = sampled.map(1, false).unwrap();
        // Opens more events than slots, so that a tick rotates.
        let _others: Vec<_> = (2..6).map(|n| open(Attr::counting(EventType::SIM, n))).collect();
        let (done, finished) = mpsc::channel();
        let shared = (
            core.inner.topology(),
            core.inner.drivers.write().unwrap(),
            core.inner.vm.lock(),
        );
        let cell = other.cell.load_full();
        // Uses `try_lock`, because blocking acquisitions of two context locks must follow the
        // address order.
        let neighbour = cell.try_lock().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut overflows = 0;
                for _ in 0..20 {
                    hot.sched_in();
                    hot.tick();
                    pmu.advance(VcpuId(0), |_| 25);
                    hot.service_overflows(&mut UnavailableRegs, &mut |o| overflows += o.times);
                    sampled.read().unwrap();
                    sampled.count().unwrap();
                    hot.sched_out();
                }
                done.send(overflows).unwrap();
            });
            let overflows = finished.recv_timeout(std::time::Duration::from_secs(60));
            // Releases the locks before the assertion. Otherwise a failed assertion would block the
            // end of the scope indefinitely.
            drop((shared, neighbour));
            // The timeout expires if a hot path waits for a shared lock.
            assert!(overflows.is_ok_and(|n| n > 0));
        });
        assert!(hot.stats().samples > 0, "rings were written to");
    }
}
