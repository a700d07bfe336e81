//! What a vCPU's thread calls.

use std::sync::atomic::Ordering;

use crate::context::ContextStats;
use crate::model::regs::SampleRegs;
use crate::model::software::SoftwareId;
use crate::pmu::VcpuId;
use crate::sample::Overflowed;
use crate::service::core::VcpuContext;
use crate::service::overflow;

impl VcpuContext {
    /// Which vCPU.
    #[must_use]
    pub fn id(&self) -> VcpuId {
        self.vcpu
    }

    /// The host thread that runs it.
    #[must_use]
    pub fn tid(&self) -> i32 {
        self.tid
    }

    /// The vCPU starts or resumes: its time goes on and its events go on the PMU. Nothing if it is in
    /// already.
    pub fn sched_in(&self) {
        let cell = self.cell.load();
        let now_ns = cell.now_ns();
        cell.lock().sched_in(now_ns);
    }

    /// The vCPU pauses: its events go off and its time stands still. Their counts are final, so
    /// overflows that passed and were not notified yet are known, too:
    /// [`VcpuContext::service_overflows`] serves them.
    ///
    /// Raises [`SoftwareId::ContextSwitches`] first, so that events see it while they are on.
    pub fn sched_out(&self) {
        self.software_event(SoftwareId::ContextSwitches, 1, None, &mut |_| {});
        self.go_out();
    }

    pub(crate) fn go_out(&self) {
        let cell = self.cell.load();
        let now_ns = cell.now_ns();
        cell.lock().sched_out(now_ns);
    }

    /// [`crate::Core::tick`] for this context alone.
    pub fn tick(&self) {
        if let Some(core) = self.core.upgrade() {
            core.tick(&self.cell.load(), 1);
        }
    }

    /// What the context holds.
    #[must_use]
    pub fn stats(&self) -> ContextStats {
        self.cell.load().lock().stats()
    }

    /// Counts up whenever an event of this vCPU goes to the error state, and stays the vCPU's when contexts
    /// are exchanged. The VMM compares it at entry to learn that a guest counter has lost its place
    /// ([`VcpuContext::see_errors`]); one load.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Acquire)
    }

    /// Whether an event went to the error state since the last call. For the vCPU's thread, at each entry and
    /// after it enabled something itself.
    pub fn see_errors(&self) -> bool {
        let errors = self.errors();
        let unseen = self.seen_errors.load(Ordering::Relaxed) != errors;
        if unseen {
            self.seen_errors.store(errors, Ordering::Relaxed);
        }
        unseen
    }

    /// The context's time: nanoseconds for which it was in. Times of events are of it.
    #[must_use]
    pub fn time_ns(&self) -> u64 {
        let cell = self.cell.load();
        let now_ns = cell.now_ns();
        cell.lock().clock.advance(now_ns)
    }

    /// Asks the drivers whether the events that are on have their counters still: a system call for each
    /// hardware event at most. Those that have not go to the error state, or wait for their next turn.
    /// [`crate::Core::tick`] does it now and then.
    pub fn look(&self) {
        let cell = self.cell.load();
        let now_ns = cell.now_ns();
        cell.lock().look(now_ns);
    }

    /// Serves the overflows of this context: accounts them, writes SAMPLE records, and reports those of
    /// events that were opened with a cookie. To be called when an overflow's signal was seen; calling it
    /// without one costs one driver call per armed event. Allocates nothing.
    ///
    /// `sink` is called with no lock held and may use handles.
    ///
    /// Returns how many events had overflowed. 0 says that the signal was not for us, and someone else may
    /// want it.
    pub fn service_overflows(&self, regs: &mut dyn SampleRegs, sink: &mut dyn FnMut(Overflowed)) -> u32 {
        let Some(core) = self.core.upgrade() else { return 0 };
        overflow::service(&core, &self.cell.load(), regs, sink)
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::thread;

    use super::*;
    use crate::api::open::{OpenFlags, OpenTarget};
    use crate::attr::{Attr, EventType};
    use crate::pmu::Pmu;
    use crate::pmu::sim::SimPmu;
    use crate::record::CpuMode;
    use crate::service::config::{CoreConfig, Role};
    use crate::service::core::Core;

    struct Regs;

    impl SampleRegs for Regs {
        fn mode(&mut self) -> CpuMode {
            CpuMode::GuestUser
        }
        fn ip(&mut self) -> u64 {
            0
        }
    }

    /// Tick, read, overflow, ring write and switching of one vCPU go on while somebody else holds every lock
    /// that vCPUs share, and those of all other contexts.
    #[test]
    fn hot_paths_take_no_shared_lock() {
        let core = Core::new(CoreConfig::default());
        let pmu = Arc::new(SimPmu::with_slots(2));
        core.register(Arc::clone(&pmu) as Arc<dyn Pmu>);
        let [hot, other] = [0, 1].map(|id| core.add_vcpu(VcpuId(id), 1 + id as i32).unwrap());
        let session = core.session(0, Role::Admin);
        let open = |attr| {
            let flags = OpenFlags {
                cookie: Some(7),
                ..OpenFlags::default()
            };
            core.open(&session, attr, OpenTarget::Vcpu(VcpuId(0)), None, flags)
                .unwrap()
        };
        let sampled = open(Attr::sampling(EventType::SIM, 1, 10));
        let _ring = sampled.map(1, false).unwrap();
        // More than there are slots, so that a tick rotates.
        let _others: Vec<_> = (2..6).map(|n| open(Attr::counting(EventType::SIM, n))).collect();
        let (done, finished) = mpsc::channel();
        let shared = (
            core.inner.topology(),
            core.inner.drivers.write().unwrap(),
            core.inner.vm.lock(),
        );
        let cell = other.cell.load_full();
        // Tried for, as the order of contexts is that of their addresses.
        let neighbour = cell.try_lock().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut overflows = 0;
                for _ in 0..20 {
                    hot.sched_in();
                    hot.tick();
                    pmu.advance(VcpuId(0), |_| 25);
                    hot.service_overflows(&mut Regs, &mut |o| overflows += o.times);
                    sampled.read().unwrap();
                    sampled.count().unwrap();
                    hot.sched_out();
                }
                done.send(overflows).unwrap();
            });
            let overflows = finished.recv_timeout(std::time::Duration::from_secs(60));
            // Before the assertion, which would leave the scope waiting for the thread for ever.
            drop((shared, neighbour));
            assert!(
                overflows.is_ok_and(|n| n > 0),
                "a hot path waits for a shared lock"
            );
        });
        assert!(hot.stats().samples > 0, "rings were written to");
    }
}
