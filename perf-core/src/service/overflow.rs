//! Service of overflows: from the overflow signal of a driver to accounting, records and reports.

use std::sync::atomic::Ordering;

use crate::context::{ContextCell, OverflowSearch, ReportBatch, ServicePass};
use crate::model::regs::{RegsCache, RegsRequest, SampleRegs, SampledRegs};
use crate::model::software::{LevelGuard, RecursionContext, SoftwareEventId};
use crate::sample::OverflowReport;
use crate::service::core::{CoreInner, VcpuEventContext};

/// Services the overflows of the vCPU with context `cell`, and those of the VM context.
pub(crate) fn service(
    core: &CoreInner,
    cell: &ContextCell,
    regs: &mut dyn SampleRegs,
    sink: &mut dyn FnMut(OverflowReport),
) -> u32 {
    let mut service = OverflowService {
        core,
        origin: cell,
        regs,
        known: RegsCache::default(),
        wants: RegsRequest::default(),
    };
    let mut served = service.serve(cell, sink);
    // Checked without the lock, so that vCPUs do not contend for the VM context lock.
    if core.vm.to_serve.swap(false, Ordering::Acquire) || core.vm.deferred.is_waiting() {
        served += service.serve(&core.vm, sink);
        core.vm.lock().request_service_if_armed();
    }
    served
}

/// The state of one call that services overflows, including the registers of the vCPU.
struct OverflowService<'a> {
    core: &'a CoreInner,
    /// Context of the vCPU that services the overflows.
    origin: &'a ContextCell,
    regs: &'a mut dyn SampleRegs,
    known: RegsCache,
    wants: RegsRequest,
}

impl OverflowService<'_> {
    /// Services the overflows in the context of `cell`.
    ///
    /// The context is locked twice, first to find the overflowed events and then to account for
    /// them. In between, no lock is held while the registers for the samples are read. The
    /// registers belong to a single point in time, so they are not read again for further events.
    /// If no sample needs registers, the context is locked only once.
    fn serve(&mut self, cell: &ContextCell, sink: &mut dyn FnMut(OverflowReport)) -> u32 {
        let mut noticed = OverflowSearch::default();
        loop {
            let mut batch = ReportBatch::new();
            {
                // Marks the level as being handled. An event that `regs` raises while the registers
                // are read is then dropped, like an event that is raised while another is handled.
                let Some(_level) = LevelGuard::enter(RecursionContext::Thread) else {
                    return noticed.served;
                };
                let seen = self.known.read(self.regs, self.wants);
                let now_ns = cell.now_ns();
                let mut context = cell.lock();
                context.notice_overflows(&mut noticed);
                let wants = context.regs_request(&noticed);
                if !seen.request.covers(wants) {
                    self.wants.join(wants);
                    continue;
                }
                let mut pass = self.core.pass(self.origin, now_ns, Some(seen), &mut batch);
                context.account_overflows(&mut noticed, &mut pass);
            }
            batch.iter().copied().for_each(&mut *sink);
            if !noticed.more {
                return noticed.served;
            }
        }
    }
}

impl CoreInner {
    fn pass<'a>(
        &self,
        origin: &ContextCell,
        now_ns: u64,
        seen: Option<SampledRegs<'a>>,
        batch: &'a mut ReportBatch,
    ) -> ServicePass<'a> {
        ServicePass {
            by: self.record_origin(origin, now_ns),
            tick_hz: self.config.tick_hz.max(1),
            sample_rate_hz: self.limits.sample_rate_hz(),
            regs: seen,
            batch,
        }
    }
}

/// A software event to raise on a vCPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RaisedEvent {
    pub level: RecursionContext,
    pub id: SoftwareEventId,
    pub n: u64,
}

impl VcpuEventContext {
    /// Raises a software event on this vCPU. See [`VcpuEventContext::software_event_at`].
    pub(crate) fn raise(
        &self,
        RaisedEvent { level, id, n }: RaisedEvent,
        mut regs: Option<&mut dyn SampleRegs>,
        sink: &mut dyn FnMut(OverflowReport),
    ) -> bool {
        if self.removed.load(Ordering::Relaxed) {
            return true;
        }
        let Some(core) = self.core.upgrade() else {
            return true;
        };
        let Some(guard) = LevelGuard::enter(level) else {
            return false;
        };
        // Only the run loop may block on a context lock. A signal handler or nested call may have
        // interrupted the code that holds it.
        let may_wait = level == RecursionContext::Thread && guard.is_outermost();
        let mut batch = ReportBatch::new();
        let (mut known, mut wants) = (RegsCache::default(), RegsRequest::default());
        let own = self.cell.load();
        // A context that is not a vCPU does not raise events for the VM context.
        let vm = own.is_vcpu().then_some(&*core.vm);
        for target in vm.into_iter().chain([&**own]) {
            // Checked without the lock, so that vCPUs do not contend for the VM context lock.
            if target.raised_events.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mode = regs.as_mut().map(|regs| known.mode(*regs));
            loop {
                let seen = regs.as_mut().map(|regs| known.read(*regs, wants));
                let now_ns = target.now_ns();
                let context = if may_wait {
                    Some(target.lock())
                } else {
                    target.try_lock()
                };
                let Some(mut context) = context else {
                    target.deferred.add(id, n);
                    break;
                };
                // Checked again, because the vCPU may have been removed while this thread waited
                // for the lock. The EXIT record, written under the same lock, must be the last
                // record of a vCPU.
                if self.removed.load(Ordering::Relaxed) {
                    break;
                }
                if let (Some(seen), Some(mode)) = (&seen, mode) {
                    let more = context.raise_regs_request(id, n, mode);
                    if !seen.request.covers(more) {
                        // Requests more registers and repeats the loop, which reads them without
                        // any lock held.
                        wants.join(more);
                        continue;
                    }
                }
                let mut pass = core.pass(&own, now_ns, seen, &mut batch);
                context.raise(&mut pass, id, n, mode);
                break;
            }
        }
        drop(guard);
        // Called after the level was released, because the sink may raise events itself.
        batch.iter().copied().for_each(sink);
        true
    }
}
