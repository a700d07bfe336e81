//! Switching of a host thread between vCPUs without reprogramming the PMU.
//!
//! A VMM may run several vCPUs on one host thread. The driver events of all these vCPUs then count
//! that thread. If two vCPUs have the same inherited events and no other events, a switch between
//! them only swaps their contexts: running events are not stopped, and count for the next vCPU from
//! then on. The totals of the families (VM-wide events with their children) do not change. Events
//! with [`crate::Attr::inherit_stat`] also swap their counts and times, so that each vCPU keeps its
//! own.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::context::{Context, ContextCell};
use crate::model::event::Event;
use crate::model::keys::EventKey;
use crate::model::software::SoftwareEventId;
use crate::service::core::VcpuEventContext;

/// A guard that prevents a vCPU's context from being swapped with another context while the guard
/// is alive. See [`VcpuEventContext::pin`].
#[derive(Debug)]
pub struct ContextPin {
    cell: Arc<ContextCell>,
}

impl Drop for ContextPin {
    fn drop(&mut self) {
        self.cell.lock().pins -= 1;
    }
}

impl VcpuEventContext {
    /// Switches the current thread from this vCPU to `next`, like [`VcpuEventContext::sched_out`]
    /// on this vCPU followed by [`VcpuEventContext::sched_in`] on `next`.
    ///
    /// Returns `true` if the contexts were swapped without stopping or starting any event, which
    /// requires that both vCPUs run on the same thread and have the same inherited events.
    pub fn switch_to(&self, next: &VcpuEventContext) -> bool {
        self.software_event(SoftwareEventId::ContextSwitches, 1, None, &mut |_| {});
        self.record_switch(true);
        if self.exchange(next) {
            next.record_switch(false);
            return true;
        }
        self.go_out();
        next.sched_in();
        false
    }

    fn exchange(&self, next: &VcpuEventContext) -> bool {
        if self.tid() != next.tid() {
            return false;
        }
        let Some(core) = self.core.upgrade() else {
            return false;
        };
        // Contexts must not be swapped while events are opened or closed. If the topology lock is
        // held, the caller schedules the events out and in instead of waiting.
        let Some(_topology) = core.try_topology() else {
            return false;
        };
        let (mine, theirs) = (self.cell.load_full(), next.cell.load_full());
        if Arc::ptr_eq(&mine, &theirs) {
            return false;
        }
        let now_ns = mine.now_ns();
        // This is the only place that locks two contexts. Address order prevents a deadlock of two
        // threads that swap the same pair.
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
            .owner
            .swap(theirs.owner.load(Ordering::Relaxed), Ordering::Relaxed);
        theirs.owner.store(identity, Ordering::Relaxed);
        self.cell.store(Arc::clone(&theirs));
        next.cell.store(Arc::clone(&mine));
        true
    }

    /// Prevents this vCPU's context from being swapped with another context while the returned
    /// guard is alive.
    #[must_use]
    pub fn pin(&self) -> ContextPin {
        loop {
            let cell = self.cell.load_full();
            let mut context = cell.lock();
            // The context may have been swapped before the lock was acquired.
            if Arc::ptr_eq(&cell, &self.cell.load()) {
                context.pins += 1;
                drop(context);
                return ContextPin { cell };
            }
        }
    }
}

/// Returns `true` if two contexts can be swapped: they contain children of the same VM-wide events
/// and no other events, and neither context is pinned ([`ContextPin`]) or belongs to a removed
/// vCPU.
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
        let (was_a, was_b) = (a.end_history(key, now_ns), b.end_history(twin, now_ns));
        a.restore_history(key, was_b, now_ns);
        b.restore_history(twin, was_a, now_ns);
    }
}
