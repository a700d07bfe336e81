//! Reasons for the error state of pinned events.

use std::fmt;
use std::io;

use crate::pmu::PmuError;

/// Reason why a pinned event is in the error state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PinnedEventFailureCause {
    /// Other events of the core hold all slots that can hold the event.
    NoSlot,
    /// Other users of the host hold all counters that can hold the event.
    Busy,
    /// The host took the counter of the running event away.
    Taken,
    /// The driver failed to start the event, with this errno.
    Refused(i32),
}

impl PinnedEventFailureCause {
    pub(crate) fn of(error: &PmuError) -> Self {
        match error {
            PmuError::Busy => Self::Busy,
            _ => Self::Refused(error.errno()),
        }
    }
}

impl fmt::Display for PinnedEventFailureCause {
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

/// Reason and time of the failure of a pinned event that is in the error state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinnedEventFailure {
    /// Context time since which the event has not counted, in nanoseconds
    /// ([`crate::VcpuEventContext::time_ns`]).
    pub since_ns: u64,
    /// Reason why the event failed.
    pub cause: PinnedEventFailureCause,
}
