//! Several events of one vCPU under one lock, for a guest that stops and starts all its counters at once.

use crate::api::control::{NOT_ARMABLE, is_armable};
use crate::api::handle::Handle;
use crate::context::{Context, ContextCell};
use crate::lock::LockGuard;
use crate::model::failure::FailureCause;
use crate::model::keys::EventKey;
use crate::model::state::State;
use crate::service::error::ControlError;

/// What [`Held`] refuses events of other contexts with.
const ELSEWHERE: &str = "events of one vCPU, none of them a family";

/// The context of an event, locked: calls for events of the same vCPU, each without the cost of a lock.
///
/// While it lives no other call for these events may be made by the same thread, as it would wait for ever.
pub struct Held<'h> {
    cell: &'h ContextCell,
    context: LockGuard<'h, Context>,
}

impl std::fmt::Debug for Held<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held")
            .field("cell", &self.cell)
            .finish_non_exhaustive()
    }
}

impl Handle {
    /// Locks the context of the event.
    #[must_use]
    pub fn hold(&self) -> Held<'_> {
        let cell = &*self.inner.event.cell;
        Held {
            cell,
            context: cell.lock(),
        }
    }
}

impl Held<'_> {
    /// The event's key, if it is open and of this context.
    fn key(&mut self, handle: &Handle) -> Result<EventKey, ControlError> {
        let event = &handle.inner.event;
        if !std::ptr::eq(&raw const *event.cell, self.cell) || handle.is_family() {
            return Err(ControlError::Invalid(ELSEWHERE));
        }
        match self.context.get(event.key, &event.shared) {
            Some(_) => Ok(event.key),
            None => Err(ControlError::Closed),
        }
    }

    /// [`Handle::count`].
    ///
    /// # Errors
    /// As there, and [`ControlError::Invalid`] for an event of another vCPU.
    #[inline]
    pub fn count(&mut self, handle: &Handle) -> Result<u64, ControlError> {
        let key = self.key(handle)?;
        let event = &mut self.context.events[key];
        let count = event.count();
        if event.is_lost() {
            let now_ns = self.cell.now_ns();
            self.context.notice(key, now_ns);
        }
        Ok(count)
    }

    /// Stops the event for a moment, and returns its count. It stays on: it keeps its place, and its times
    /// go on. [`Held::go_on`] lets it count again, which together costs a fraction of [`Handle::stop`] and
    /// [`Handle::start`]. What else takes it off and puts it on ends the pause, too.
    ///
    /// # Errors
    /// As [`Held::count`].
    #[inline]
    pub fn pause(&mut self, handle: &Handle) -> Result<u64, ControlError> {
        let key = self.key(handle)?;
        Ok(self.context.pause(key))
    }

    /// Lets an event that was paused count again. `overflow_in` is told its count, and says after how many
    /// further ones it is to overflow; `None`: it is not armed anew. An event that is not on any more stays
    /// so: `Err` in the outcome says why.
    ///
    /// # Errors
    /// As [`Handle::arm`] and [`Held::count`].
    pub fn go_on(
        &mut self,
        handle: &Handle,
        overflow_in: impl FnOnce(u64) -> Option<u64>,
    ) -> Result<Result<(), FailureCause>, ControlError> {
        let key = self.key(handle)?;
        let event = &mut self.context.events[key];
        if event.state != State::Active {
            return Ok(Err(event
                .failure
                .map_or(FailureCause::NoSlot, |failure| failure.cause)));
        }
        let overflow_in = overflow_in(event.count());
        if overflow_in.is_some_and(|counts| !is_armable(counts)) {
            return Err(ControlError::Invalid(NOT_ARMABLE));
        }
        let cell = self.cell;
        let went = self.context.go_on(key, overflow_in, || cell.now_ns());
        Ok(went.map_err(|error| FailureCause::of(&error)))
    }
}
