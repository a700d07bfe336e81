//! Where counts come from, as the register file sees it.

use crate::events::{Backing, EventRequest};
use crate::index::CounterIndex;

pub use perf_core::FailureCause as Lack;

/// What came of enabling a counter's event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enabled {
    /// It counts.
    Counting(Backing),
    /// Who should count has no place for it or refuses; this backing counts meanwhile.
    Fallback(Backing, Lack),
    /// Nobody counts: there is no place, or it is refused.
    Refused(Lack),
}

/// An event that was counting and no longer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Since when, in the vCPU's event time.
    pub since_ns: u64,
    /// Why.
    pub cause: Lack,
}

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
/// Every call comes from the vCPU's own thread while the vCPU is out of guest mode. An event that is stopped
/// costs its owner nothing and is kept until another request takes its place, so that a guest which disables
/// and enables a counter opens nothing.
pub trait CounterEvents {
    /// Makes `request` the event of `counter`, stopped; `None` releases what the counter holds. Returns who
    /// will count it, or will when it is enabled; [`Backing::None`] when nobody ever can.
    fn program(&mut self, counter: CounterIndex, request: Option<&EventRequest>) -> Backing;

    /// Starts counting. `overflow_in` asks for a notification, through [`crate::Vpmu::overflowed`], after
    /// that many further counts; `None`: nobody waits for the overflow. Each call begins with the best
    /// backing there is for the event. When another backing than before counts now, the counter's count is
    /// that one's own. If it counts, the count from which it goes on comes with it.
    fn enable(&mut self, counter: CounterIndex, overflow_in: Option<u64>) -> (Enabled, u64);

    /// Stops counting. The count is kept, and returned: what [`Self::count`] says from now on.
    fn disable(&mut self, counter: CounterIndex) -> u64;

    /// Stops running counters that are likely to go on soon. Each event keeps its place, and one whose
    /// backing [`Backing::counts_through_pauses`] counts on. `each` is told the counter and its count.
    fn pause(&mut self, counters: u64, each: &mut dyn FnMut(CounterIndex, u64));

    /// Lets paused counters go on. `each` is told the counter and the count from which it goes on, and says
    /// as for [`Self::enable`] what to arm an event with that has stopped; one that has counted on is still
    /// armed. Returns those whose event does not count: they are to be stopped.
    fn go_on(&mut self, counters: u64, each: &mut dyn FnMut(CounterIndex, u64) -> Option<u64>) -> u64;

    /// Counts collected by the counter's present event. Never decreases while the event is the same.
    fn count(&mut self, counter: CounterIndex) -> u64;

    /// Asks a running event for a notification after `overflow_in` further counts from now, instead of what
    /// was asked before. Returns what [`Self::count`] says now.
    fn arm(&mut self, counter: CounterIndex, overflow_in: u64) -> u64;

    /// Whether an event may have lost its place since the last call. Asked at every entry: it must cost next
    /// to nothing.
    fn may_have_lost(&mut self) -> bool;

    /// Since when and why the counter's event, which was enabled, no longer counts; `None` while it does.
    fn lost(&mut self, counter: CounterIndex) -> Option<Loss>;

    /// The vCPU's event time in ns: it stands still while the vCPU is paused.
    fn now_ns(&mut self) -> u64;

    /// Times of the counter's present event, with all backings that counted for it.
    fn times(&mut self, counter: CounterIndex) -> CounterTimes;
}
