//! States and owners of events.

/// The state of an event. The states are ordered from error to active.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EventState {
    /// Pinned event that could not be scheduled. A `read(2)` of the event returns 0 bytes. The
    /// event leaves this state only when it is enabled again.
    Error,
    /// Disabled event.
    Off,
    /// Enabled event that waits for its context to be scheduled in, for its group leader, or for a
    /// slot.
    Inactive,
    /// Event that is scheduled in and counts.
    Active,
}

/// Amount of work that [`crate::PerfCore::tick`] has to do, from the least to the most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum PendingTickWork {
    /// No ticks are needed.
    #[default]
    None,
    /// Hardware events are active, and the host may take their counters away. If nobody reads the
    /// events, only ticks detect this.
    CheckCounters,
    /// No work at present, but events with a fixed sampling period may be throttled later. The
    /// timer may tick less often, which only delays the first unthrottling. Does not occur with a
    /// [`TickTimer`], because throttling an event requests ticks.
    Watch,
    /// Work at each tick: groups rotate or are retried, periods adapt to a frequency, or events are
    /// throttled.
    Work,
}

/// The VMM's timer, whose expirations call [`crate::PerfCore::tick`].
pub trait TickTimer: Send + Sync {
    /// Requests ticks because the core has begun to need them. The timer may stop once
    /// [`crate::PerfCore::tick_need`] returns [`PendingTickWork::None`].
    ///
    /// Called on any thread and in signal handlers, with the lock of a context held. The call must
    /// not block and must not call the core. Repeated requests are frequent.
    fn request(&self, need: PendingTickWork);
}

/// Owner of an event, which determines its priority for slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Owner {
    /// The guest. The event backs a counter that the guest has programmed.
    Guest,
    /// An operator, for a VM-wide event.
    OperatorVm,
    /// An operator, for an event of one vCPU.
    OperatorVcpu,
}
