//! Methods of [`EventReading`] that compute the change between two readings and the reading of a
//! single vCPU.

use crate::protocol::EventReading;

/// Change of the count and the times of an event between two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventReadingDelta {
    /// Increase of the count between the readings, scaled to the enabled time.
    pub count: u64,
    /// Time for which the event was enabled between the readings, in nanoseconds.
    pub enabled_ns: u64,
    /// Time for which the event was running between the readings, in nanoseconds.
    pub running_ns: u64,
}

impl EventReading {
    /// Returns the change since the reading `before` or, without it, since the event was opened.
    /// Returns `None` if the event was not counted in this interval.
    ///
    /// If the event did not run all the time during the interval, its count is the increase of the
    /// estimated total. Scaling by the interval's own share of running time would be wrong, because
    /// the adaptive policy runs an event less while its rate is steady. The counts of the intervals
    /// add up to the estimated total, except that an interval in which the event ran all the time
    /// has an exact count.
    pub fn since(&self, before: Option<&Self>) -> Option<EventReadingDelta> {
        if self.failed {
            return None;
        }
        if self.gone && before.is_some_and(|before| before.running_ns == self.running_ns) {
            // The vCPU was not present in the interval.
            return Some(EventReadingDelta::default());
        }
        let of = |r: &Self| (r.value, r.enabled_ns, r.running_ns, r.estimate);
        growth(of(self), before.map(of))
    }

    /// Returns the reading of the event on vCPU `vcpu`, or `None` if there is none.
    pub fn for_vcpu(&self, vcpu: u32) -> Option<Self> {
        let part = self.vcpus.iter().find(|part| part.vcpu == vcpu)?;
        Some(Self {
            handle: self.handle,
            value: part.value,
            enabled_ns: part.enabled_ns,
            running_ns: part.running_ns,
            estimate: part.estimate,
            standard_error: part.standard_error,
            bound: part.bound,
            failed: self.failed,
            gone: self.gone,
            vcpus: Vec::new(),
        })
    }
}

/// Computes the change between two readings, each given as value, time enabled, time running and
/// estimate.
fn growth(
    now: (u64, u64, u64, Option<u64>),
    before: Option<(u64, u64, u64, Option<u64>)>,
) -> Option<EventReadingDelta> {
    let (value, enabled_ns, running_ns, estimate) = before.unwrap_or_default();
    let counted = now.0.saturating_sub(value);
    let grown = EventReadingDelta {
        count: counted,
        enabled_ns: now.1.saturating_sub(enabled_ns),
        running_ns: now.2.saturating_sub(running_ns),
    };
    let now_estimate = now.3?;
    if before.is_some() && grown.running_ns == 0 {
        return None;
    }
    if grown.running_ns >= grown.enabled_ns {
        return Some(EventReadingDelta {
            count: if before.is_some() { counted } else { now_estimate },
            ..grown
        });
    }
    // A correction of the earlier estimate must not make the result smaller than the exact count.
    let estimated = now_estimate.saturating_sub(estimate.unwrap_or(value));
    Some(EventReadingDelta {
        count: estimated.max(counted),
        ..grown
    })
}
