//! Control calls on a handle: what `ioctl(2)` does to a kernel event.

use crate::api::handle::Handle;
use crate::model::failure::FailureCause;
use crate::model::state::State;
use crate::service::error::ControlError;
use crate::service::opened::EventRef;

/// Whether a control call concerns the event or all of its group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// The event and its children.
    #[default]
    Event,
    /// Every member of its group, with their children; any member's handle will do.
    Group,
}

/// What [`is_armable`] and families are refused with.
pub(super) const NOT_ARMABLE: &str = "armed for at least 1 and below 2^63 counts, and not on a family";

/// Whether an overflow can come after so many counts.
pub(super) const fn is_armable(overflow_in: u64) -> bool {
    overflow_in != 0 && overflow_in >> 63 == 0
}

impl Handle {
    /// Starts counting, or recovers from the error state.
    ///
    /// # Errors
    /// [`ControlError::Closed`]. That it cannot be put on now is none: see [`Handle::state`].
    pub fn enable(&self, scope: Scope) -> Result<(), ControlError> {
        self.set(scope, true)
    }

    /// Stops counting; count and times are kept.
    ///
    /// # Errors
    /// [`ControlError::Closed`].
    pub fn disable(&self, scope: Scope) -> Result<(), ControlError> {
        self.set(scope, false)
    }

    /// [`Handle::arm`] and [`Handle::enable`] of the event alone, and [`Handle::count`] of before, in one go:
    /// what a guest's counter is started with. Without `overflow_in` it is not armed anew. That it cannot be
    /// on now is no error: `Err` in the outcome says why.
    ///
    /// # Errors
    /// As [`Handle::arm`], and [`ControlError::Closed`].
    pub fn start(&self, overflow_in: Option<u64>) -> Result<Result<u64, FailureCause>, ControlError> {
        if overflow_in.is_some_and(|counts| !is_armable(counts)) || self.is_family() {
            return Err(ControlError::Invalid(NOT_ARMABLE));
        }
        let inner = &self.inner.event;
        let now_ns = inner.cell.now_ns();
        let mut context = inner.cell.lock();
        let event = context
            .get(inner.key, &inner.shared)
            .ok_or(ControlError::Closed)?;
        let count = event.count();
        if let Some(overflow_in) = overflow_in {
            context.arm(inner.key, overflow_in)?;
        }
        context.enable(inner.key, now_ns);
        let event = &context.events[inner.key];
        let failure = || event.failure.filter(|_| event.state == State::Error);
        Ok(match event.state {
            State::Active => Ok(count),
            _ => Err(failure().map_or(FailureCause::NoSlot, |failure| failure.cause)),
        })
    }

    /// [`Handle::disable`] of the event alone, and [`Handle::count`] of then.
    ///
    /// # Errors
    /// [`ControlError::Closed`], and [`ControlError::Invalid`] for families.
    pub fn stop(&self) -> Result<u64, ControlError> {
        if self.is_family() {
            return Err(ControlError::Invalid("a family is stopped by disabling it"));
        }
        let inner = &self.inner.event;
        let now_ns = inner.cell.now_ns();
        let mut context = inner.cell.lock();
        if context.get(inner.key, &inner.shared).is_none() {
            return Err(ControlError::Closed);
        }
        context.disable(inner.key, now_ns);
        Ok(context.events[inner.key].count())
    }

    fn set(&self, scope: Scope, on: bool) -> Result<(), ControlError> {
        self.for_scope(scope, |event| event.set_enabled(on))
    }

    /// Sets the count to zero, and what exited children left behind. Times are not reset.
    ///
    /// # Errors
    /// [`ControlError::Closed`].
    pub fn reset(&self, scope: Scope) -> Result<(), ControlError> {
        self.for_scope(scope, EventRef::reset)
    }

    fn for_scope(&self, scope: Scope, op: impl Fn(&EventRef) -> Option<()>) -> Result<(), ControlError> {
        let event = &self.inner.event;
        match scope {
            Scope::Event => op(event).ok_or(ControlError::Closed),
            Scope::Group => {
                // No event joins or leaves meanwhile.
                let _topology = self.inner.core.topology();
                for member in event.group(&self.inner.core.opened).ok_or(ControlError::Closed)? {
                    let _ = op(&member);
                }
                Ok(())
            }
        }
    }

    /// Allows `overflows` further overflows and enables the event, which disables itself after the last one.
    /// 0 only enables it.
    ///
    /// # Errors
    /// [`ControlError::Invalid`] for inherited and for counting events, [`ControlError::Closed`].
    pub fn refresh(&self, overflows: u32) -> Result<(), ControlError> {
        if !self.attr().is_sampling() {
            return Err(ControlError::Invalid(
                "a counting event has no overflows to limit",
            ));
        }
        if self.inner.event.shared.attr.inherit || self.is_family() {
            return Err(ControlError::Invalid("an inherited event has no overflow limit"));
        }
        let result = self.inner.event.for_each(|context, key, now_ns| {
            let sampling = &mut context.events[key].sampling;
            sampling.limit = sampling.limit.saturating_add(u64::from(overflows));
            context.enable(key, now_ns);
        });
        result.ok_or(ControlError::Closed)
    }

    /// Changes the period, or for an event that samples by frequency the frequency in Hz. A VM-wide event
    /// changes it in the vCPUs there are and in those to come.
    ///
    /// An event that is on begins a new period at once, or a long old one would first have to end. What was
    /// counted of the old one is the next sample's: periods of samples add up to the count. An event that is
    /// off begins it when it is on again, a throttled one when the throttle ends: a change is no way around
    /// the limit. A frequency's period is not changed by this; it approaches the new frequency step by step.
    /// That of the host's `cpu-clock` and `task-clock` is the new one at once.
    ///
    /// # Errors
    /// [`ControlError::Invalid`] for a counting event, for 0, and for a frequency above the limit;
    /// [`ControlError::Driver`] if a driver refuses (what it refused keeps its period),
    /// [`ControlError::Closed`].
    pub fn set_period(&self, period: u64) -> Result<(), ControlError> {
        let inner = &self.inner.event;
        if !inner.shared.attr.is_sampling() {
            return Err(ControlError::Invalid("a counting event has no period"));
        }
        if period == 0 || period >> 63 != 0 {
            return Err(ControlError::Invalid("a period is at least 1 and below 2^63"));
        }
        if inner.shared.attr.freq && period > self.inner.core.limits.sample_rate_hz() {
            return Err(ControlError::Invalid(
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
            .ok_or(ControlError::Closed)?;
        Ok(refused?)
    }

    /// Lets the next overflow come after exactly `overflow_in` further counts, at once, also while the event
    /// runs. Later ones follow at the event's period; without one there are none. Returns the count from
    /// which they are counted.
    ///
    /// # Errors
    /// [`ControlError::Invalid`] for 0 and for families, [`ControlError::Driver`] if the driver refuses (the
    /// event then stays armed as it was), [`ControlError::Closed`].
    #[inline]
    pub fn arm(&self, overflow_in: u64) -> Result<u64, ControlError> {
        if !is_armable(overflow_in) || self.is_family() {
            return Err(ControlError::Invalid(NOT_ARMABLE));
        }
        let inner = &self.inner.event;
        let mut context = inner.cell.lock();
        if context.get(inner.key, &inner.shared).is_none() {
            return Err(ControlError::Closed);
        }
        Ok(context.arm(inner.key, overflow_in)?)
    }
}
