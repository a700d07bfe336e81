//! Batched access to several events of one vCPU under a single lock, for a guest that stops and
//! starts all its counters together.

use crate::api::control::{NOT_ARMABLE, is_armable};
use crate::api::handle::EventHandle;
use crate::context::{Context, ContextCell};
use crate::lock::LockGuard;
use crate::model::failure::PinnedEventFailureCause;
use crate::model::keys::EventKey;
use crate::model::state::EventState;
use crate::service::error::PerfEventControlError;

/// Error text for an event of another context, or for a family (a VM-wide event with children).
const FOREIGN_EVENT: &str = "events of one vCPU, none of them a family";

/// The locked context of an event. Calls through this guard for events of the same context do not
/// acquire the lock again.
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
    /// Locks the context that contains the event.
    #[must_use]
    pub fn lock_context(&self) -> LockedContext<'_> {
        let cell = &*self.inner.event.cell;
        LockedContext {
            cell,
            context: cell.lock(),
        }
    }
}

impl LockedContext<'_> {
    /// Returns the key of the event of `handle`, or an error if the event is closed, is a family or
    /// belongs to another context.
    fn key(&mut self, handle: &EventHandle) -> Result<EventKey, PerfEventControlError> {
        let event = &handle.inner.event;
        if !std::ptr::eq(&raw const *event.cell, self.cell) || handle.is_family() {
            return Err(PerfEventControlError::Invalid(FOREIGN_EVENT));
        }
        match self.context.get(event.key, &event.shared) {
            Some(_) => Ok(event.key),
            None => Err(PerfEventControlError::Closed),
        }
    }

    /// Reads the count of an event, like [`EventHandle::count`].
    ///
    /// # Errors
    ///
    /// Returns the errors of [`EventHandle::count`], and [`PerfEventControlError::Invalid`] for an
    /// event of another vCPU.
    #[inline]
    pub fn count(&mut self, handle: &EventHandle) -> Result<u64, PerfEventControlError> {
        let key = self.key(handle)?;
        let event = &mut self.context.events[key];
        let count = event.count();
        if event.is_lost() {
            let now_ns = self.cell.now_ns();
            self.context.handle_lost_slot(key, now_ns);
        }
        Ok(count)
    }

    /// Pauses counting of the event and returns its count.
    ///
    /// A paused event remains scheduled: it keeps its slot, and its times advance. Pausing an event
    /// and resuming it with [`LockedContext::resume`] is much cheaper than [`EventHandle::stop`]
    /// and [`EventHandle::start`]. The event also resumes when the core schedules it out and in
    /// again.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`LockedContext::count`].
    #[inline]
    pub fn pause(&mut self, handle: &EventHandle) -> Result<u64, PerfEventControlError> {
        let key = self.key(handle)?;
        Ok(self.context.pause(key))
    }

    /// Resumes an event that was paused with [`LockedContext::pause`].
    ///
    /// `overflow_in` is called with the event's count. The function returns the number of further
    /// counts until the next overflow, or `None` to keep the current overflow point. If the event
    /// is no longer scheduled, it is not resumed, and the inner result is `Err` with the cause.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`EventHandle::arm`] and [`LockedContext::count`].
    pub fn resume(
        &mut self,
        handle: &EventHandle,
        overflow_in: impl FnOnce(u64) -> Option<u64>,
    ) -> Result<Result<(), PinnedEventFailureCause>, PerfEventControlError> {
        let key = self.key(handle)?;
        let event = &mut self.context.events[key];
        if event.state != EventState::Active {
            return Ok(Err(event
                .failure
                .map_or(PinnedEventFailureCause::NoSlot, |failure| failure.cause)));
        }
        let overflow_in = overflow_in(event.count());
        if overflow_in.is_some_and(|counts| !is_armable(counts)) {
            return Err(PerfEventControlError::Invalid(NOT_ARMABLE));
        }
        let cell = self.cell;
        let went = self.context.resume(key, overflow_in, || cell.now_ns());
        Ok(went.map_err(|error| PinnedEventFailureCause::of(&error)))
    }
}
