//! From "the driver's signal was seen" to accounts, records and reports.

use std::sync::atomic::Ordering;

use crate::context::{Batch, ContextCell, Noticed, Pass};
use crate::model::regs::{Known, SampleRegs, Seen, Wants};
use crate::model::software::{Level, LevelGuard, SoftwareId};
use crate::sample::Overflowed;
use crate::service::core::{CoreInner, VcpuContext};

/// Serves what overflowed on the vCPU of `cell`, and in the VM context.
pub(crate) fn service(
    core: &CoreInner,
    cell: &ContextCell,
    regs: &mut dyn SampleRegs,
    sink: &mut dyn FnMut(Overflowed),
) -> u32 {
    let mut service = Service {
        core,
        origin: cell,
        regs,
        known: Known::default(),
        wants: Wants::default(),
    };
    let mut served = service.serve(cell, sink);
    // Looked at without its lock: the VM context must not be a lock that all vCPUs share.
    if core.vm.to_serve.swap(false, Ordering::Acquire) || core.vm.deferred.is_waiting() {
        served += service.serve(&core.vm, sink);
        core.vm.lock().look_again_if_armed();
    }
    served
}

/// What overflowed at one moment, and where the vCPU was then.
struct Service<'a> {
    core: &'a CoreInner,
    /// The vCPU that noticed it.
    origin: &'a ContextCell,
    regs: &'a mut dyn SampleRegs,
    known: Known,
    wants: Wants,
}

impl Service<'_> {
    /// Serves what overflowed in the context of `cell`.
    ///
    /// The context's lock is taken to notice what overflowed and taken anew to account it: in between, with
    /// no lock held, the registers are read that its samples want. They are of one moment, so nothing is
    /// read again for a second event, and if no sample wants any the lock is taken once.
    fn serve(&mut self, cell: &ContextCell, sink: &mut dyn FnMut(Overflowed)) -> u32 {
        let mut noticed = Noticed::default();
        loop {
            let mut batch = Batch::new();
            {
                // What the registers raise is dropped, as it is while a raised event is served.
                let Some(_level) = LevelGuard::enter(Level::Thread) else {
                    return noticed.served;
                };
                let seen = self.known.read(self.regs, self.wants);
                let now_ns = cell.now_ns();
                let mut context = cell.lock();
                context.notice_overflows(&mut noticed);
                let wants = context.wants_of(&noticed);
                if !seen.wants.covers(wants) {
                    self.wants.join(wants);
                    continue;
                }
                let mut pass = self.core.pass(self.origin, now_ns, Some(seen), &mut batch);
                context.account_overflows(&mut noticed, &mut pass);
            }
            batch.into_iter().for_each(&mut *sink);
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
        seen: Option<Seen<'a>>,
        batch: &'a mut Batch,
    ) -> Pass<'a> {
        Pass {
            by: self.written_by(origin, now_ns),
            tick_hz: self.config.tick_hz.max(1),
            sample_rate_hz: self.limits.sample_rate_hz(),
            seen,
            batch,
        }
    }
}

/// Something that happened to a vCPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Raised {
    pub level: Level,
    pub id: SoftwareId,
    pub n: u64,
}

impl VcpuContext {
    /// See [`VcpuContext::software_event_at`].
    pub(crate) fn raise(
        &self,
        Raised { level, id, n }: Raised,
        mut regs: Option<&mut dyn SampleRegs>,
        sink: &mut dyn FnMut(Overflowed),
    ) -> bool {
        if self.gone.load(Ordering::Relaxed) {
            return true;
        }
        let Some(core) = self.core.upgrade() else {
            return true;
        };
        let Some(guard) = LevelGuard::enter(level) else {
            return false;
        };
        // What was interrupted may hold the lock: only the run loop itself may wait for it.
        let may_wait = level == Level::Thread && guard.is_outermost();
        let mut batch = Batch::new();
        let (mut known, mut wants) = (Known::default(), Wants::default());
        let own = self.cell.load();
        for target in [&*core.vm, &**own] {
            // Looked at without its lock: the VM context must not be a lock that all vCPUs share.
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
                // Looked at again: the vCPU may have gone while the lock was waited for, and its EXIT record,
                // which is written under this lock, is the last that is said of it.
                if self.gone.load(Ordering::Relaxed) {
                    break;
                }
                if let (Some(seen), Some(mode)) = (&seen, mode) {
                    let more = context.wants_of_raise(id, n, mode);
                    if !seen.wants.covers(more) {
                        // Read with no lock held.
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
        // The sink may raise events itself.
        batch.into_iter().for_each(sink);
        true
    }
}
