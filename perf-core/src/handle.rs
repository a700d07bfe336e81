//! Handles: how an opened event is used.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use crate::context::{Context, ContextCell};
use crate::core::CoreInner;
use crate::event::{EventShared, State};
use crate::inherit::Family;
use crate::limits::SessionInner;
use crate::lock::LockGuard;

/// An open event. Closes it when dropped; its children go with it, and the siblings of a leader become
/// leaders of groups of their own.
#[derive(Debug)]
pub struct Handle {
    pub(crate) inner: Arc<HandleInner>,
}

/// Where an event is.
#[derive(Clone, Debug)]
pub(crate) struct EventRef {
    pub cell: Arc<ContextCell>,
    pub key: usize,
    pub shared: Arc<EventShared>,
}

pub(crate) struct HandleInner {
    pub core: Arc<CoreInner>,
    pub session: Arc<SessionInner>,
    pub event: EventRef,
    closed: AtomicBool,
}

impl std::fmt::Debug for HandleInner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HandleInner")
            .field("event", &self.event)
            .finish_non_exhaustive()
    }
}

impl Drop for HandleInner {
    fn drop(&mut self) {
        self.close();
    }
}

impl HandleInner {
    pub fn new(core: Arc<CoreInner>, session: Arc<SessionInner>, event: EventRef) -> Self {
        core.gates.add(&event.shared.attr);
        core.wanted.add(&event.shared.attr);
        Self {
            core,
            session,
            event,
            closed: AtomicBool::new(false),
        }
    }

    /// Closes the event, once.
    pub fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            let _topology = self.core.topology();
            self.release();
        }
    }

    fn release(&self) {
        self.event.release_output();
        self.event.remove();
        self.core.gates.remove(&self.event.shared.attr);
        self.core.wanted.remove(&self.event.shared.attr);
    }

    /// As [`HandleInner::close`], for an open that fails half-way and holds the topology lock.
    pub fn undo_open(&self) {
        self.closed.store(true, Ordering::Release);
        self.release();
    }
}

impl EventRef {
    pub fn family(&self) -> Option<LockGuard<'_, Family>> {
        Some(self.shared.family.as_ref()?.lock())
    }

    /// The key of this event's child in `cell`.
    pub fn child_in(&self, cell: &Arc<ContextCell>) -> Option<usize> {
        self.family()?
            .live()
            .iter()
            .find(|c| Arc::ptr_eq(&c.cell, cell))
            .map(|c| c.key)
    }

    /// Runs `op` on the event and then on each child, each under its context's lock; `None` if the event is
    /// closed.
    pub fn for_each<R>(&self, mut op: impl FnMut(&mut Context, usize, u64) -> R) -> Option<R> {
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

    /// Zeroes the count, and what exited children left behind.
    pub fn reset(&self) -> Option<()> {
        // All under the family's lock: an exit comes wholly before or wholly after.
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

    /// The members of the event's group, its leader first.
    pub fn group(&self) -> Option<SmallVec<[EventRef; 8]>> {
        let mut context = self.cell.lock();
        context.get(self.key, &self.shared)?;
        let members = context.members(self.key);
        let member = |key: &usize| Self {
            cell: Arc::clone(&self.cell),
            key: *key,
            shared: Arc::clone(&context.events[*key].shared),
        };
        Some(members.iter().map(member).collect())
    }

    /// Takes the event and its children out of their contexts. Under the topology lock.
    fn remove(&self) {
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
            // The driver's half may close descriptors: not under the lock.
            drop(context);
            drop(event);
        }
    }
}

impl Handle {
    /// The id readings and records carry.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.inner.event.shared.id
    }

    /// The attributes it was opened with.
    #[must_use]
    pub fn attr(&self) -> &crate::attr::Attr {
        &self.inner.event.shared.attr
    }

    /// What the event is doing; [`State::Off`] once it is closed. A family that is enabled is inactive
    /// itself, its children may be on.
    #[must_use]
    pub fn state(&self) -> State {
        let event = &self.inner.event;
        let mut context = event.cell.lock();
        context
            .get(event.key, &event.shared)
            .map_or(State::Off, |e| e.state)
    }

    /// Closes the event before the handle goes away. Later calls give [`crate::ControlError::Closed`].
    pub fn close(&self) {
        self.inner.close();
    }

    /// How many live children the event has: one for each vCPU that a VM-wide event covers.
    #[must_use]
    pub fn children(&self) -> usize {
        self.inner.event.family().map_or(0, |f| f.live().len())
    }

    pub(crate) fn is_family(&self) -> bool {
        self.inner.event.shared.family.is_some()
    }
}
