//! Control calls on a handle: what `ioctl(2)` does to a kernel event.

use crate::api::handle::Handle;
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
    /// runs. Later ones follow at the event's period; without one there are none.
    ///
    /// # Errors
    /// [`ControlError::Invalid`] for 0 and for families, [`ControlError::Driver`] if the driver refuses (the
    /// event then stays armed as it was), [`ControlError::Closed`].
    pub fn arm(&self, overflow_in: u64) -> Result<(), ControlError> {
        if overflow_in == 0 || overflow_in >> 63 != 0 || self.is_family() {
            return Err(ControlError::Invalid(
                "armed for at least 1 and below 2^63 counts, and not on a family",
            ));
        }
        let inner = &self.inner.event;
        let mut context = inner.cell.lock();
        let event = context
            .get(inner.key, &inner.shared)
            .ok_or(ControlError::Closed)?;
        event.arm(overflow_in)?;
        context.enlist_active(inner.key);
        Ok(())
    }
}
