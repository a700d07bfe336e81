//! What an event is doing, and for whom.

/// What an event is doing. The order means something: code asks for "at least inactive".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// Pinned, and it could not be put on. Only an explicit enable recovers it; reads give no bytes.
    Error,
    /// Disabled.
    Off,
    /// Enabled, waiting: for its context to run, for its group's leader, or for a slot.
    Inactive,
    /// On: it counts.
    Active,
}

/// What [`crate::Core::tick`] has to do, from nothing to much.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum TickNeed {
    /// Nothing.
    #[default]
    None,
    /// Nothing yet: events sample at a fixed period, so that one may come to be throttled. Who looks now and
    /// then lifts that late, once.
    Watch,
    /// Groups take turns or try again, periods follow frequencies, or a throttle is to be lifted: each tick.
    Work,
}

/// Whom the event counts for; decides who gets slots first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Owner {
    /// The guest: it backs a counter the guest programmed.
    Guest,
    /// The operator, for the VM as a whole.
    OperatorVm,
    /// The operator, for one vCPU.
    OperatorVcpu,
}
