//! Control calls of an event handle, equivalent to `ioctl(2)` on a kernel event.

use crate::api::handle::EventHandle;
use crate::model::failure::PinnedEventFailureCause;
use crate::model::state::EventState;
use crate::service::error::PerfEventControlError;
use crate::service::open_events::EventRef;

/// The scope of a control call: an event or its whole group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventOrGroup {
    /// The event and its children.
    #[default]
    Event,
    /// All members of the event's group and their children. The call may be made on the handle of
    /// any member.
    Group,
}

/// Error text of a rejected attempt to arm an event: the event is a family (a VM-wide event and its
/// children), or [`is_armable`] rejects the number of counts.
pub(super) const NOT_ARMABLE: &str = "armed for at least 1 and below 2^63 counts, and not on a family";

/// Returns `true` if an event can be armed to overflow after `overflow_in` counts: at least 1 and
/// below 2^63.
pub(super) const fn is_armable(overflow_in: u64) -> bool {
    overflow_in != 0 && overflow_in >> 63 == 0
}

impl EventHandle {
    /// Enables the event if it is off or in the error state. Succeeds even if the event cannot be
    /// scheduled now; see [`EventHandle::state`].
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventControlError::Closed`] if the event is closed.
    pub fn enable(&self, scope: EventOrGroup) -> Result<(), PerfEventControlError> {
        self.set(scope, true)
    }

    /// Disables the event. The count and times of the event do not change.
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventControlError::Closed`] if the event is closed.
    pub fn disable(&self, scope: EventOrGroup) -> Result<(), PerfEventControlError> {
        self.set(scope, false)
    }

    /// Arms and enables a single event in one step and returns the count at which the event was
    /// armed. Equivalent to [`EventHandle::arm`] followed by [`EventHandle::enable`], with a single
    /// lock of the context. Intended for guest counters.
    ///
    /// With `None` as `overflow_in`, the event is not armed, and an earlier overflow point remains
    /// set. If the event is not active afterwards, the inner result is `Err` with the cause.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`EventHandle::arm`], and [`PerfEventControlError::Closed`] if
    /// the event is closed.
    pub fn start(
        &self,
        overflow_in: Option<u64>,
    ) -> Result<Result<u64, PinnedEventFailureCause>, PerfEventControlError> {
        if overflow_in.is_some_and(|counts| !is_armable(counts)) || self.is_family() {
            return Err(PerfEventControlError::Invalid(NOT_ARMABLE));
        }
        let inner = &self.inner.event;
        let now_ns = inner.cell.now_ns();
        let mut context = inner.cell.lock();
        let event = context
            .get(inner.key, &inner.shared)
            .ok_or(PerfEventControlError::Closed)?;
        let count = event.count();
        if let Some(overflow_in) = overflow_in {
            context.arm(inner.key, overflow_in)?;
        }
        context.enable(inner.key, now_ns);
        let event = &context.events[inner.key];
        let failure = || event.failure.filter(|_| event.state == EventState::Error);
        Ok(match event.state {
            EventState::Active => Ok(count),
            _ => Err(failure().map_or(PinnedEventFailureCause::NoSlot, |failure| failure.cause)),
        })
    }

    /// Disables a single event and returns its final count. Equivalent to [`EventHandle::disable`]
    /// followed by [`EventHandle::count`].
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventControlError::Closed`] if the event is closed, and
    /// [`PerfEventControlError::Invalid`] for a family (a VM-wide event with children).
    pub fn stop(&self) -> Result<u64, PerfEventControlError> {
        if self.is_family() {
            return Err(PerfEventControlError::Invalid(
                "a family is stopped by disabling it",
            ));
        }
        let inner = &self.inner.event;
        let now_ns = inner.cell.now_ns();
        let mut context = inner.cell.lock();
        if context.get(inner.key, &inner.shared).is_none() {
            return Err(PerfEventControlError::Closed);
        }
        context.disable(inner.key, now_ns);
        Ok(context.events[inner.key].count())
    }

    fn set(&self, scope: EventOrGroup, on: bool) -> Result<(), PerfEventControlError> {
        self.for_scope(scope, |event| event.set_enabled(on))
    }

    /// Resets the event's count to zero, including the counts of exited children. Does not reset
    /// the times, and does not change a package count (a driver's single count for the whole VM).
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventControlError::Closed`] if the event is closed.
    pub fn reset(&self, scope: EventOrGroup) -> Result<(), PerfEventControlError> {
        self.for_scope(scope, EventRef::reset)
    }

    fn for_scope(
        &self,
        scope: EventOrGroup,
        op: impl Fn(&EventRef) -> Option<()>,
    ) -> Result<(), PerfEventControlError> {
        let event = &self.inner.event;
        match scope {
            EventOrGroup::Event => op(event).ok_or(PerfEventControlError::Closed),
            EventOrGroup::Group => {
                // No event may join or leave the group during the reset.
                let _topology = self.inner.core.topology();
                for member in event
                    .group(&self.inner.core.opened)
                    .ok_or(PerfEventControlError::Closed)?
                {
                    let _ = op(&member);
                }
                Ok(())
            }
        }
    }

    /// Enables the event for `overflows` further overflows. The event disables itself after the
    /// last of them. With 0, the event is enabled and its limit does not change.
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventControlError::Invalid`] for inherited events and counting events, and
    /// [`PerfEventControlError::Closed`] if the event is closed.
    pub fn refresh(&self, overflows: u32) -> Result<(), PerfEventControlError> {
        if !self.attr().is_sampling() {
            return Err(PerfEventControlError::Invalid(
                "a counting event has no overflows to limit",
            ));
        }
        if self.inner.event.shared.attr.inherit || self.is_family() {
            return Err(PerfEventControlError::Invalid(
                "an inherited event has no overflow limit",
            ));
        }
        let result = self.inner.event.for_each(|context, key, now_ns| {
            let sampling = &mut context.events[key].sampling;
            sampling.limit = sampling.limit.saturating_add(u64::from(overflows));
            context.enable(key, now_ns);
        });
        result.ok_or(PerfEventControlError::Closed)
    }

    /// Changes the sampling period, or the frequency in hertz of an event that samples by
    /// frequency. For a VM-wide event, the change applies to existing and future vCPUs.
    ///
    /// A running event starts the new period immediately, even if its old period was long. The
    /// counts of the unfinished period are attributed to the next sample, so the sample periods add
    /// up to the count. An event that is not running starts the new period when it is scheduled in,
    /// and a throttled event starts it when it is unthrottled, so that a change cannot bypass the
    /// limit. With a frequency, the period approaches its new value gradually, except for
    /// `cpu-clock` and `task-clock` of the host, whose period changes immediately.
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventControlError::Invalid`] for a counting event, for a period of 0 or of at
    /// least 2^63, and for a frequency above [`crate::PerfCoreConfig::sample_rate_hz`],
    /// [`PerfEventControlError::Driver`] if a driver rejects the period (the rejected period is not
    /// applied), and [`PerfEventControlError::Closed`] if the event is closed.
    pub fn set_period(&self, period: u64) -> Result<(), PerfEventControlError> {
        let inner = &self.inner.event;
        if !inner.shared.attr.is_sampling() {
            return Err(PerfEventControlError::Invalid("a counting event has no period"));
        }
        if period == 0 || period >> 63 != 0 {
            return Err(PerfEventControlError::Invalid(
                "a period is at least 1 and below 2^63",
            ));
        }
        if inner.shared.attr.freq && period > self.inner.core.limits.sample_rate_hz() {
            return Err(PerfEventControlError::Invalid(
                "the frequency is above the sample rate limit",
            ));
        }
        let mut refused = Ok(());
        inner
            .for_each(|context, key, _| {
                if let Err(error) = context.events[key].set_period(period) {
                    refused = Err(error);
                }
            })
            .ok_or(PerfEventControlError::Closed)?;
        Ok(refused?)
    }

    /// Arms the event to overflow after exactly `overflow_in` further counts, effective immediately
    /// even while the event runs. After this overflow, the event overflows at its period, or not at
    /// all if it has no period. Returns the count at which the event was armed.
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventControlError::Invalid`] for 0, for 2^63 and above, and for families
    /// (VM-wide events with children), [`PerfEventControlError::Driver`] if the driver rejects the
    /// request (the previous overflow point then remains armed), and
    /// [`PerfEventControlError::Closed`] if the event is closed.
    #[inline]
    pub fn arm(&self, overflow_in: u64) -> Result<u64, PerfEventControlError> {
        if !is_armable(overflow_in) || self.is_family() {
            return Err(PerfEventControlError::Invalid(NOT_ARMABLE));
        }
        let inner = &self.inner.event;
        let mut context = inner.cell.lock();
        if context.get(inner.key, &inner.shared).is_none() {
            return Err(PerfEventControlError::Closed);
        }
        Ok(context.arm(inner.key, overflow_in)?)
    }
}
