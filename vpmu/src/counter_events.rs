//! [`CounterEvents`]: the interface between the register file and the events that count for it.

use crate::events::{CounterBacking, CounterEventRequest};
use crate::index::CounterIndex;

pub use perf_core::PinnedEventFailureCause as UnavailableReason;

/// Result of [`CounterEvents::enable`]: whether the counter counts, and from which source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterEnableOutcome {
    /// The preferred backing (source of counts) counts for the counter.
    Counting(CounterBacking),
    /// Another backing counts for the counter, because the preferred backing (source of counts) is
    /// unavailable for the given reason.
    Fallback(CounterBacking, UnavailableReason),
    /// Nothing counts for the counter, because every backing (source of counts) is unavailable. The
    /// value is the reason.
    Refused(UnavailableReason),
}

/// Loss of a counter's event: when and why the event stopped counting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterEventLoss {
    /// Time of the loss, in nanoseconds of the vCPU's event time.
    pub since_ns: u64,
    /// Reason why the event stopped counting.
    pub cause: UnavailableReason,
}

/// Time enabled and time running of a counter's event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CounterTimes {
    /// Time for which the event was enabled, in nanoseconds of vCPU time.
    pub time_enabled_ns: u64,
    /// Time for which the event was counting, in nanoseconds of vCPU time.
    pub time_running_ns: u64,
}

/// A time on both clocks of a vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VcpuTime {
    /// Event time of the vCPU, in nanoseconds. The clock stops while the vCPU is paused.
    pub event_ns: u64,
    /// CPU time of the vCPU's thread, in nanoseconds. Excludes the time in which the thread waited
    /// for a CPU or the guest was halted.
    pub run_ns: u64,
}

/// Converts the event time of a vCPU whose thread never waits for a CPU.
impl From<u64> for VcpuTime {
    fn from(event_ns: u64) -> Self {
        Self {
            event_ns,
            run_ns: event_ns,
        }
    }
}

/// Events that back the counters of one vCPU, one event per counter.
///
/// All methods are called by the vCPU thread while the vCPU is outside guest mode. A stopped event
/// is kept until the counter is programmed with another request, so disabling and re-enabling a
/// counter opens no event.
pub trait CounterEvents {
    /// Programs `counter` with `request` and leaves it stopped. `None` releases the counter's
    /// events. Returns the backing that counts when the counter is enabled, or
    /// [`CounterBacking::None`] if no backing can ever count the request.
    fn program(&mut self, counter: CounterIndex, request: Option<&CounterEventRequest>) -> CounterBacking;

    /// Starts the counter's event. Returns which backing counts, and the current count of the
    /// event.
    ///
    /// `overflow_in` requests a notification ([`crate::Vpmu::overflowed`]) after this number of
    /// further counts. `None` requests no notification. Each call tries the best backing first. If
    /// the backing changes, the returned count is that of the new backing.
    fn enable(&mut self, counter: CounterIndex, overflow_in: Option<u64>) -> (CounterEnableOutcome, u64);

    /// Stops counting and returns the final count, which [`Self::count`] then continues to return.
    fn disable(&mut self, counter: CounterIndex) -> u64;

    /// Pauses the running counters in the mask `counters`, which the guest is expected to restart
    /// soon. Their events keep their hardware counters. Calls `each` with each counter and its
    /// count.
    ///
    /// An event whose backing satisfies [`CounterBacking::counts_through_pauses`] continues to
    /// count.
    fn pause(&mut self, counters: u64, each: &mut dyn FnMut(CounterIndex, u64));

    /// Resumes the paused counters in the mask `counters`. Calls `each` with each counter and its
    /// count. Returns the mask of the counters whose events failed to resume; the caller must stop
    /// them.
    ///
    /// If the event stopped during the pause, `each` returns the number of further counts after
    /// which to notify an overflow, like `overflow_in` of [`Self::enable`]. If the event continued
    /// to count, it is still armed.
    fn resume(&mut self, counters: u64, each: &mut dyn FnMut(CounterIndex, u64) -> Option<u64>) -> u64;

    /// Returns the count of the counter's current event. Does not decrease while the event stays
    /// the same.
    fn count(&mut self, counter: CounterIndex) -> u64;

    /// Re-arms the overflow notification of a running event to `overflow_in` further counts.
    /// Returns the current count, as [`Self::count`] does.
    fn arm(&mut self, counter: CounterIndex, overflow_in: u64) -> u64;

    /// Returns whether an event may have lost its slot (its hardware counter) since the last call.
    /// The PMU calls this method before every guest entry, so the implementation must be cheap.
    fn may_have_lost(&mut self) -> bool;

    /// Returns when and why the counter's enabled event stopped counting, or `None` if the event is
    /// counting.
    fn event_loss(&mut self, counter: CounterIndex) -> Option<CounterEventLoss>;

    /// Returns the vCPU's event time, in nanoseconds. The clock stops while the vCPU is paused.
    fn now_ns(&mut self) -> u64;

    /// Returns the current time on both clocks of the vCPU. By default, the vCPU's thread never
    /// waits for a CPU.
    fn time(&mut self) -> VcpuTime {
        self.now_ns().into()
    }

    /// Returns the time enabled and time running of the counter's current event, each summed over
    /// all backings that have counted for the event.
    fn times(&mut self, counter: CounterIndex) -> CounterTimes;
}
