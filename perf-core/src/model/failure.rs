//! Error state of events.

use std::fmt;
use std::io;

use crate::pmu::PmuError;

/// Reason why a pinned event does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventFailureCause {
    /// Other events hold all suitable slots.
    NoSlot,
    /// The host has no free counter for the event.
    Busy,
    /// The host took the counter of the event away.
    Taken,
    /// The driver could not start the event and returned this errno.
    Refused(i32),
}

impl EventFailureCause {
    pub(crate) fn of(error: &PmuError) -> Self {
        match error {
            PmuError::Busy => Self::Busy,
            _ => Self::Refused(error.errno()),
        }
    }
}

impl fmt::Display for EventFailureCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSlot => {
                f.write_str("other events have all the host's counters that there are for this vCPU")
            }
            Self::Busy => f.write_str("the host has no counter free for it"),
            Self::Taken => f.write_str("the host took its counter away"),
            Self::Refused(errno) => write!(f, "{}", io::Error::from_raw_os_error(*errno)),
        }
    }
}

/// Description of the error state of a pinned event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventFailure {
    /// Context time since which the event has not counted, in nanoseconds
    /// ([`crate::VcpuContext::time_ns`]).
    pub since_ns: u64,
    /// Cause of the failure.
    pub cause: EventFailureCause,
}
