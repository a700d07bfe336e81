//! Handles of open events.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::attr::Attr;
use crate::model::failure::PinnedEventFailure;
use crate::model::state::EventState;
use crate::service::config::User;
use crate::service::core::CoreInner;
use crate::service::open_events::EventRef;

/// A handle of an open event. Dropping it closes the event and its children. If the event is a
/// group leader, its siblings become leaders of their own groups.
#[derive(Debug)]
pub struct EventHandle {
    pub(crate) inner: Arc<HandleInner>,
}

pub(crate) struct HandleInner {
    pub core: Arc<CoreInner>,
    pub user: User,
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
    pub fn new(core: Arc<CoreInner>, user: User, event: EventRef) -> Self {
        core.gates.add(&event.shared.attr);
        core.record_demand.add(&event.shared.attr);
        Self {
            core,
            user,
            event,
            closed: AtomicBool::new(false),
        }
    }

    /// Closes the event. Further calls have no effect.
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
        self.core.record_demand.remove(&self.event.shared.attr);
        self.core.opened.remove(self.event.shared.id);
    }

    /// Closes the event like [`HandleInner::close`], but for a caller that already holds the
    /// topology lock: a [`crate::PerfCore::open`] that fails.
    pub fn undo_open(&self) {
        self.closed.store(true, Ordering::Release);
        self.release();
    }
}

impl EventHandle {
    /// Returns the ID of the event, which readings and records contain.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.inner.event.shared.id
    }

    /// Returns the attributes with which the event was opened.
    #[must_use]
    pub fn attr(&self) -> &Attr {
        &self.inner.event.shared.attr
    }

    /// Returns the state of the event. A closed event is [`EventState::Off`]. The state of an
    /// enabled family (a VM-wide event with children) is inactive, although its children may be
    /// active.
    #[must_use]
    pub fn state(&self) -> EventState {
        let event = &self.inner.event;
        let mut context = event.cell.lock();
        context
            .get(event.key, &event.shared)
            .map_or(EventState::Off, |e| e.state)
    }

    /// Closes the event while the handle still exists. Later calls through the handle return
    /// [`crate::PerfEventControlError::Closed`].
    pub fn close(&self) {
        self.inner.close();
    }

    /// Returns the number of live children of the event: one per vCPU that a VM-wide event covers,
    /// and 0 for all other events.
    #[must_use]
    pub fn children(&self) -> usize {
        self.inner.event.family().map_or(0, |f| f.live().len())
    }

    pub(crate) fn is_family(&self) -> bool {
        self.inner.event.shared.is_family
    }
}

impl EventHandle {
    /// Returns the reason and time of the event's failure if the event is in the error state,
    /// otherwise `None`.
    #[must_use]
    pub fn failure(&self) -> Option<PinnedEventFailure> {
        let event = &self.inner.event;
        let mut context = event.cell.lock();
        let event = context.get(event.key, &event.shared)?;
        event.failure.filter(|_| event.state == EventState::Error)
    }
}
