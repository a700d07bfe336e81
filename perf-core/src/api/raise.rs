//! Software events raised by the VMM.

use crate::model::regs::SampleRegs;
use crate::model::software::{RecursionContext, SoftwareEventId};
use crate::sample::OverflowReport;
use crate::service::core::VcpuEventContext;
use crate::service::overflow::RaisedEvent;

impl VcpuEventContext {
    /// Raises software event `id` on this vCPU `n` times. Samples are taken only if `regs` is
    /// given.
    ///
    /// Calls `sink`, without any lock held, for each event with a cookie that overflows.
    #[inline]
    pub fn software_event(
        &self,
        id: SoftwareEventId,
        n: u64,
        regs: Option<&mut dyn SampleRegs>,
        sink: &mut dyn FnMut(OverflowReport),
    ) {
        self.software_event_at(RecursionContext::Thread, id, n, regs, sink);
    }

    /// Raises a software event like [`VcpuEventContext::software_event`], at recursion level
    /// `level`. Returns `false` if the event was dropped because this thread is already handling an
    /// event at that level.
    #[inline]
    pub fn software_event_at(
        &self,
        level: RecursionContext,
        id: SoftwareEventId,
        n: u64,
        regs: Option<&mut dyn SampleRegs>,
        sink: &mut dyn FnMut(OverflowReport),
    ) -> bool {
        // Checked in this inlined function, so that raising an event that no open event counts does
        // not cost a call.
        if !self.gates.is_open(id) {
            return true;
        }
        self.raise(RaisedEvent { level, id, n }, regs, sink)
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::api::open::{EventOpenTarget, OpenFlags};
    use crate::attr::Attr;
    use crate::attr::EventType;
    use crate::model::lists::EventList;
    use crate::model::regs::UnavailableRegs;
    use crate::pmu::VcpuId;
    use crate::pmu::sim::SimPmu;
    use crate::service::config::{PerfCoreConfig, SessionRole};
    use crate::service::core::PerfCore;

    /// A signal handler that raises an event while the VM context is locked defers the event. The
    /// next vCPU that services overflows accounts for the deferred event, because the VM context
    /// has no thread of its own.
    #[test]
    fn vcpu_services_deferred_vm_events() {
        let core = PerfCore::new(PerfCoreConfig::default());
        let vcpu = core.add_vcpu(VcpuId(0), 1).unwrap();
        vcpu.sched_in();
        let session = core.session(0, SessionRole::Admin);
        let attr = Attr::sampling(EventType::VMM, SoftwareEventId::Halts as u64, 5);
        let flags = OpenFlags::with_cookie(9);
        let halts = core
            .open(&session, attr, EventOpenTarget::Vm, None, flags)
            .unwrap();
        {
            let _somebody = core.inner.vm.lock();
            vcpu.software_event_at(
                RecursionContext::Signal,
                SoftwareEventId::Halts,
                10,
                None,
                &mut |_| {},
            );
        }
        let mut seen = Vec::new();
        assert_eq!(
            vcpu.service_overflows(&mut UnavailableRegs, &mut |o| seen.push(o)),
            1
        );
        assert_eq!(seen, [OverflowReport { cookie: 9, times: 2 }]);
        assert_eq!(vcpu.service_overflows(&mut UnavailableRegs, &mut |_| {}), 0);
        assert_eq!(halts.read().unwrap().value, 10);
    }

    /// Servicing overflows does not examine the software events that the VMM raises, because no
    /// driver reports overflows of these events.
    #[test]
    fn raised_events_are_not_searched_for_driver_overflows() {
        let core = PerfCore::new(PerfCoreConfig::default());
        core.register(Arc::new(SimPmu::with_slots(2)));
        let vcpu = core.add_vcpu(VcpuId(0), 1).unwrap();
        vcpu.sched_in();
        let session = core.session(0, SessionRole::Admin);
        let open = |ty| {
            let attr = Attr::sampling(ty, 1, 5);
            let target = EventOpenTarget::Vcpu(VcpuId(0));
            core.open(&session, attr, target, None, OpenFlags::default())
                .unwrap()
        };
        let _raised: Vec<_> = (0..10).map(|_| open(EventType::VMM)).collect();
        let armed = || vcpu.cell.load().lock().lists.of(EventList::Armed).len();
        assert_eq!(armed(), 0);
        assert!(core.needs_tick(), "a throttle requires ticks");
        let _driver = open(EventType::SIM);
        assert_eq!(armed(), 1);
    }

    /// A VM-wide event with children is counted once in the number of open events for its software
    /// event ID. After it is closed, this number is zero and its driver events are closed.
    #[test]
    fn closed_event_clears_gate_and_driver() {
        let core = PerfCore::new(PerfCoreConfig::default());
        let pmu = SimPmu::with_slots(2);
        core.register(Arc::new(pmu.clone()));
        for n in 0..3 {
            core.add_vcpu(VcpuId(n), 1).unwrap();
        }
        let session = core.session(0, SessionRole::Admin);
        let open = |ty, config| {
            let attr = Attr::counting(ty, config).with_inherit();
            core.open(&session, attr, EventOpenTarget::Vm, None, OpenFlags::default())
                .unwrap()
        };
        let halts = open(EventType::VMM, SoftwareEventId::Halts as u64);
        let counted = open(EventType::SIM, 1);
        let gate = || core.inner.gates.open(SoftwareEventId::Halts);
        assert_eq!((halts.children(), gate(), pmu.open_events()), (3, 1, 3));
        core.add_vcpu(VcpuId(3), 1).unwrap();
        core.remove_vcpu(VcpuId(0)).unwrap();
        assert_eq!((halts.children(), gate(), pmu.open_events()), (3, 1, 3));
        drop((halts, counted));
        assert_eq!((gate(), pmu.open_events()), (0, 0));
    }
}
