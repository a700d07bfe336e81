//! States and owners of events.

/// The state of an event. States are ordered, so that comparisons such as "at least inactive" can
/// be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EventState {
    /// Pinned event that could not be scheduled. Only an explicit enable recovers it, and reads
    /// return 0 bytes.
    Error,
    /// Disabled event.
    Off,
    /// Enabled event that waits for its context to be scheduled in, for its group leader, or for a
    /// slot.
    Inactive,
    /// Event that counts.
    Active,
}

/// Work that [`crate::PerfCore::tick`] has to do, in increasing order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum PendingTickWork {
    /// No work.
    #[default]
    None,
    /// No work yet, but events with a fixed sampling period may be throttled. A timer that ticks
    /// less often delays only the first unthrottling.
    Watch,
    /// Work at each tick: groups rotate or are retried, periods are adjusted to frequencies, or
    /// throttled events exist.
    Work,
}

/// Owner of an event, which determines its priority for slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Owner {
    /// The guest: the event implements a counter that the guest has programmed.
    Guest,
    /// Operator, for the whole VM.
    OperatorVm,
    /// Operator, for one vCPU.
    OperatorVcpu,
}
