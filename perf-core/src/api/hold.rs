//! Batched access to several events of one vCPU under a single lock, for a guest that stops and
//! starts all its counters together.

use crate::api::control::{NOT_ARMABLE, is_armable};
use crate::api::handle::EventHandle;
use crate::context::{Context, ContextCell};
use crate::lock::LockGuard;
use crate::model::failure::EventFailureCause;
use crate::model::keys::EventKey;
use crate::model::state::EventState;
use crate::service::error::ControlError;

/// Error text for events that belong to another context, and for families (VM-wide events with
/// children).
const FOREIGN_EVENT: &str = "events of one vCPU, none of them a family";

/// A locked event context. Calls through this guard for events of that context need no further
/// locking.
///
/// While this guard is alive, the same thread must not call methods of these events' handles,
/// because such a call would deadlock.
pub struct LockedContext<'h> {
    cell: &'h ContextCell,
    context: LockGuard<'h, Context>,
}

impl std::fmt::Debug for LockedContext<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held")
            .field("cell", &self.cell)
            .finish_non_exhaustive()
    }
}

impl EventHandle {
    /// Locks the context of the event.
    #[must_use]
    pub fn hold(&self) -> LockedContext<'_> {
        let cell = &*self.inner.event.cell;
        LockedContext {
            cell,
            context: cell.lock(),
        }
    }
}

impl LockedContext<'_> {
    /// Returns the key of an event that is open and belongs to this context.
    fn key(&mut self, handle: &EventHandle) -> Result<EventKey, ControlError> {
        let event = &handle.inner.event;
        if !std::ptr::eq(&raw const *event.cell, self.cell) || handle.is_family() {
            return Err(ControlError::Invalid(FOREIGN_EVENT));
        }
        match self.context.get(event.key, &event.shared) {
            Some(_) => Ok(event.key),
            None => Err(ControlError::Closed),
        }
    }

    /// Reads the count of an event, like [`EventHandle::count`].
    ///
    /// # Errors
    ///
    /// Returns the errors of [`EventHandle::count`], and [`ControlError::Invalid`] for an event of
    /// another vCPU.
    #[inline]
    pub fn count(&mut self, handle: &EventHandle) -> Result<u64, ControlError> {
        let key = self.key(handle)?;
        let event = &mut self.context.events[key];
        let count = event.count();
        if event.is_lost() {
            let now_ns = self.cell.now_ns();
            self.context.notice(key, now_ns);
        }
        Ok(count)
    }

    /// Pauses the event and returns its count.
    ///
    /// The event remains scheduled: it keeps its slot and its times advance. A pair of `pause` and
    /// [`LockedContext::go_on`] costs a fraction of [`EventHandle::stop`] and
    /// [`EventHandle::start`]. The pause also ends when the event is scheduled out and in again for
    /// another reason.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`LockedContext::count`].
    #[inline]
    pub fn pause(&mut self, handle: &EventHandle) -> Result<u64, ControlError> {
        let key = self.key(handle)?;
        Ok(self.context.pause(key))
    }

    /// Resumes a paused event.
    ///
    /// `overflow_in` receives the count and returns the number of further counts until the next
    /// overflow, or `None` to leave the overflow point unchanged. An event that is no longer
    /// scheduled is not resumed, and the inner `Err` contains the cause.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`EventHandle::arm`] and [`LockedContext::count`].
    pub fn go_on(
        &mut self,
        handle: &EventHandle,
        overflow_in: impl FnOnce(u64) -> Option<u64>,
    ) -> Result<Result<(), EventFailureCause>, ControlError> {
        let key = self.key(handle)?;
        let event = &mut self.context.events[key];
        if event.state != EventState::Active {
            return Ok(Err(event
                .failure
                .map_or(EventFailureCause::NoSlot, |failure| failure.cause)));
        }
        let overflow_in = overflow_in(event.count());
        if overflow_in.is_some_and(|counts| !is_armable(counts)) {
            return Err(ControlError::Invalid(NOT_ARMABLE));
        }
        let cell = self.cell;
        let went = self.context.go_on(key, overflow_in, || cell.now_ns());
        Ok(went.map_err(|error| EventFailureCause::of(&error)))
    }
}
