//! Handing a host thread from one vCPU to another without touching the PMU.
//!
//! A VMM may run several vCPUs on one host thread. Their events count that thread, so when it goes from one
//! vCPU to the next and both have nothing but the same inherited events, it is enough to exchange the two
//! contexts: what is on stays on and now counts for the other vCPU. The sums of the families do not change.
//! Events opened with [`crate::Attr::inherit_stat`] exchange their counts and times too, so that those stay
//! with their vCPU.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::context::{Context, ContextCell};
use crate::model::event::Event;
use crate::model::keys::EventKey;
use crate::model::software::SoftwareId;
use crate::service::core::VcpuContext;

/// Keeps a context where it is while it lives: see [`VcpuContext::pin`].
#[derive(Debug)]
pub struct Pin {
    cell: Arc<ContextCell>,
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.cell.lock().pins -= 1;
    }
}

impl VcpuContext {
    /// The thread that runs this vCPU goes over to `next`: as [`VcpuContext::sched_out`] here and
    /// [`VcpuContext::sched_in`] there. Where both run on the same thread and hold the same inherited events
    /// nothing is stopped or started. Whether that was so.
    pub fn switch_to(&self, next: &VcpuContext) -> bool {
        self.software_event(SoftwareId::ContextSwitches, 1, None, &mut |_| {});
        if self.exchange(next) {
            return true;
        }
        self.go_out();
        next.sched_in();
        false
    }

    fn exchange(&self, next: &VcpuContext) -> bool {
        if self.tid() != next.tid() {
            return false;
        }
        let Some(core) = self.core.upgrade() else {
            return false;
        };
        // While events are opened and closed contexts stay where they are; nobody waits here for that.
        let Some(_topology) = core.try_topology() else {
            return false;
        };
        let (mine, theirs) = (self.cell.load_full(), next.cell.load_full());
        if Arc::ptr_eq(&mine, &theirs) {
            return false;
        }
        let now_ns = mine.now_ns();
        // Two contexts are locked nowhere else at once; by address, in case two threads exchange the same
        // two.
        let (mut a, mut b) = if mine.is_before(&theirs) {
            let a = mine.lock();
            (a, theirs.lock())
        } else {
            let b = theirs.lock();
            (mine.lock(), b)
        };
        if !a.clock.is_active() || b.clock.is_active() || !equivalent(&a, &b) {
            return false;
        }
        exchange_stats(&mut a, &mut b, now_ns);
        std::mem::swap(&mut a.errors, &mut b.errors);
        let identity = mine
            .who
            .swap(theirs.who.load(Ordering::Relaxed), Ordering::Relaxed);
        theirs.who.store(identity, Ordering::Relaxed);
        self.cell.store(Arc::clone(&theirs));
        next.cell.store(Arc::clone(&mine));
        true
    }

    /// Keeps this vCPU's context from being exchanged while the returned guard lives.
    #[must_use]
    pub fn pin(&self) -> Pin {
        loop {
            let cell = self.cell.load_full();
            let mut context = cell.lock();
            // It may have been exchanged while we waited for its lock.
            if Arc::ptr_eq(&cell, &self.cell.load()) {
                context.pins += 1;
                drop(context);
                return Pin { cell };
            }
        }
    }
}

/// Whether two contexts hold children of the same events and nothing else: both were made from the same
/// generation of VM-wide events, and neither has had anything of its own since.
fn equivalent(a: &Context, b: &Context) -> bool {
    a.clone_of.is_some() && a.clone_of == b.clone_of && a.pins == 0 && b.pins == 0 && !a.dead && !b.dead
}

fn exchange_stats(a: &mut Context, b: &mut Context, now_ns: u64) {
    let stats: Vec<EventKey> = a
        .events
        .iter()
        .filter(|(_, e)| e.shared.attr.inherit_stat)
        .map(|(key, _)| key)
        .collect();
    for key in stats {
        let Some(parent) = a.events[key].parent.clone() else {
            continue;
        };
        let is_twin = |e: &Event| e.parent.as_ref().is_some_and(|p| Arc::ptr_eq(p, &parent));
        let Some(twin) = b.events.iter().find(|(_, e)| is_twin(e)).map(|(key, _)| key) else {
            continue;
        };
        let (was_a, was_b) = (a.leave_off(key, now_ns), b.leave_off(twin, now_ns));
        a.go_on_from(key, was_b, now_ns);
        b.go_on_from(twin, was_a, now_ns);
    }
}
