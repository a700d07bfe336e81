//! Registry of open events, with the children and the output of each event.

use std::collections::HashMap;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::context::{Context, ContextCell};
use crate::lock::{Lock, LockGuard, LockRank};
use crate::model::children::{Children, FamilyMember};
use crate::model::event::EventShared;
use crate::model::keys::EventKey;
use crate::model::output::Output;
use crate::model::slices::EstimateSum;
use crate::model::totals::Totals;
use crate::pmu::VcpuId;

/// The children and the output of an open event.
#[derive(Debug)]
pub(crate) struct EventLinks {
    /// Children of a VM-wide event, or `None` for an event without children.
    pub family: Option<Lock<Family>>,
    /// Output of the event and its children. Hot paths do not use this field.
    pub output: Lock<OutputState>,
}

impl EventLinks {
    pub fn new(family: bool) -> Self {
        Self {
            family: family.then(|| Lock::new(LockRank::Family, Family::default())),
            output: Lock::new(LockRank::Output, OutputState::default()),
        }
    }
}

/// The children and the output ([`EventLinks`]) of each open event, by event ID.
#[derive(Debug)]
pub(crate) struct OpenEvents(Lock<HashMap<u64, Arc<EventLinks>>>);

impl Default for OpenEvents {
    fn default() -> Self {
        Self(Lock::new(LockRank::Opened, HashMap::new()))
    }
}

impl OpenEvents {
    pub fn add(&self, id: u64, links: &Arc<EventLinks>) {
        self.0.lock().insert(id, Arc::clone(links));
    }

    pub fn remove(&self, id: u64) {
        self.0.lock().remove(&id);
    }

    pub fn get(&self, id: u64) -> Option<Arc<EventLinks>> {
        self.0.lock().get(&id).map(Arc::clone)
    }
}

/// A reference to an open event: its context, and its key in the context.
#[derive(Clone, Debug)]
pub(crate) struct EventRef {
    pub cell: Arc<ContextCell>,
    pub key: EventKey,
    pub shared: Arc<EventShared>,
    pub links: Arc<EventLinks>,
}

pub(crate) type Family = Children<Child>;

/// A child event: the context of its vCPU, and its key in the context.
#[derive(Clone, Debug)]
pub(crate) struct Child {
    pub cell: Arc<ContextCell>,
    pub key: EventKey,
}

/// The output of an open event: its own ring, the event to which it is redirected, and the events
/// that are redirected to it.
#[derive(Debug, Default)]
pub(crate) struct OutputState {
    pub own: Option<Arc<Output>>,
    /// Number of calls of [`crate::EventHandle::map`] that were not reverted by `unmap`.
    pub mappings: usize,
    /// Event to whose ring the output of this event is redirected. That event may be closed.
    pub redirect: Option<EventRef>,
    /// Events whose outputs are redirected to the ring of this event.
    pub sources: Vec<EventRef>,
    /// `true` after the event was closed. The event's ring is kept while other events write to the
    /// ring.
    pub closed: bool,
}

impl OutputState {
    /// Takes the ring of a closed event if no other event writes to the ring any longer. The caller
    /// must drop it without holding any lock.
    #[must_use]
    pub fn take_unused(&mut self) -> Option<Arc<Output>> {
        if self.closed && self.sources.is_empty() {
            self.own.take()
        } else {
            None
        }
    }
}

impl Child {
    pub fn is(&self, cell: &Arc<ContextCell>, key: EventKey) -> bool {
        self.key == key && Arc::ptr_eq(&self.cell, cell)
    }
}

impl FamilyMember for Child {
    fn totals(&self) -> Totals {
        let now_ns = self.cell.now_ns();
        self.cell.lock().totals(self.key, now_ns)
    }

    fn totals_and_estimate(&self) -> (Totals, EstimateSum) {
        let now_ns = self.cell.now_ns();
        self.cell.lock().totals_and_estimate(self.key, now_ns)
    }

    fn vcpu(&self) -> Option<VcpuId> {
        self.cell.vcpu().map(|(vcpu, _)| vcpu)
    }
}

impl EventRef {
    pub fn family(&self) -> Option<LockGuard<'_, Family>> {
        Some(self.links.family.as_ref()?.lock())
    }

    /// Returns the key of this event's child in context `cell`, or `None` if there is no such
    /// child.
    pub fn child_in(&self, cell: &Arc<ContextCell>) -> Option<EventKey> {
        self.family()?
            .live()
            .iter()
            .find(|c| Arc::ptr_eq(&c.cell, cell))
            .map(|c| c.key)
    }

    /// Runs `op` on the event and on each of its children, under the lock of the context of each.
    /// Returns `None` if the event is closed.
    pub fn for_each<R>(&self, mut op: impl FnMut(&mut Context, EventKey, u64) -> R) -> Option<R> {
        let family = self.family();
        let result = {
            let now_ns = self.cell.now_ns();
            let mut context = self.cell.lock();
            context.get(self.key, &self.shared)?;
            op(&mut context, self.key, now_ns)
        };
        for child in family.iter().flat_map(|f| f.live()) {
            let now_ns = child.cell.now_ns();
            op(&mut child.cell.lock(), child.key, now_ns);
        }
        Some(result)
    }

    pub fn set_enabled(&self, on: bool) -> Option<()> {
        self.for_each(|context, key, now_ns| {
            if on {
                context.enable(key, now_ns);
            } else {
                context.disable(key, now_ns);
            }
        })
    }

    /// Resets the count of the event and its children, including exited ones, to zero.
    pub fn reset(&self) -> Option<()> {
        // The family lock is held throughout, so that a child exits either entirely before or
        // entirely after the reset.
        let mut family = self.family();
        {
            let now_ns = self.cell.now_ns();
            let mut context = self.cell.lock();
            context.get(self.key, &self.shared)?;
            context.set_count(self.key, 0, now_ns);
        }
        for child in family.iter().flat_map(|f| f.live()) {
            let now_ns = child.cell.now_ns();
            child.cell.lock().set_count(child.key, 0, now_ns);
        }
        if let Some(family) = &mut family {
            family.reset(&self.shared.folded);
        }
        Some(())
    }

    /// Returns the members of the event's group, leader first.
    pub fn group(&self, opened: &OpenEvents) -> Option<SmallVec<[EventRef; 8]>> {
        let members: SmallVec<[_; 8]> = {
            let mut context = self.cell.lock();
            context.get(self.key, &self.shared)?;
            let members = context.members(self.key);
            let shared = |key: &EventKey| Arc::clone(&context.events[*key].shared);
            members.iter().map(|key| (*key, shared(key))).collect()
        };
        let member = |(key, shared): (EventKey, Arc<EventShared>)| {
            let links = opened.get(shared.id)?;
            Some(Self {
                cell: Arc::clone(&self.cell),
                key,
                shared,
                links,
            })
        };
        Some(members.into_iter().filter_map(member).collect())
    }

    /// Removes the event and its children from their contexts. The caller must hold the topology
    /// lock.
    pub fn remove(&self) {
        let children = self.family().map(|mut f| f.drain()).unwrap_or_default();
        for child in children {
            let now_ns = child.cell.now_ns();
            let mut context = child.cell.lock();
            let event = context.remove(child.key, now_ns);
            child.cell.publish_raised(&context);
            drop(context);
            drop(event);
        }
        let now_ns = self.cell.now_ns();
        let mut context = self.cell.lock();
        if context.get(self.key, &self.shared).is_some() {
            let event = context.remove(self.key, now_ns);
            self.cell.publish_raised(&context);
            // Dropping the driver event may close file descriptors, which must not happen under the
            // lock.
            drop(context);
            drop(event);
        }
    }
}
