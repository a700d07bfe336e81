//! Where counts come from, as the register file sees it.

use crate::events::{Backing, EventRequest};
use crate::index::CounterIndex;

/// How long a counter's event was wanted and how long it counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CounterTimes {
    /// Nanoseconds of vCPU time during which the event was enabled.
    pub time_enabled_ns: u64,
    /// Nanoseconds during which it counted.
    pub time_running_ns: u64,
}

/// One vCPU's counting events, one for each counter.
///
/// Every call comes from the vCPU's own thread while the vCPU is out of guest mode. An event that is stopped costs
/// its owner nothing and is kept until another request takes its place, so that a guest which disables and enables a
/// counter opens nothing.
pub trait CounterEvents {
    /// Makes `request` the event of `counter`, stopped; `None` releases what the counter holds. Returns who will count
    /// it; [`Backing::None`] when nobody can.
    fn program(&mut self, counter: CounterIndex, request: Option<&EventRequest>) -> Backing;

    /// Starts counting. `overflow_in` asks for a notification, through [`crate::Vpmu::overflowed`], after that many
    /// further counts; `None`: nobody waits for the overflow. Returns whether the event counts now.
    fn enable(&mut self, counter: CounterIndex, overflow_in: Option<u64>) -> bool;

    /// Stops counting; the count is kept.
    fn disable(&mut self, counter: CounterIndex);

    /// Counts collected by the counter's present event. Never decreases while the event is the same.
    fn count(&mut self, counter: CounterIndex) -> u64;

    /// Asks a running event for a notification after `overflow_in` further counts from now, instead of what was asked
    /// before.
    fn arm(&mut self, counter: CounterIndex, overflow_in: u64);

    /// Times of the counter's present event.
    fn times(&mut self, counter: CounterIndex) -> CounterTimes;
}
