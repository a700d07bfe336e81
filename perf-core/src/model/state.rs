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
