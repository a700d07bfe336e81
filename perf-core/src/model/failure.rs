//! Why an event that should count does not.

use std::fmt;
use std::io;

use crate::pmu::PmuError;

/// Why a pinned event does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FailureCause {
    /// Others have the slots.
    NoSlot,
    /// The host has no counter for it now.
    Busy,
    /// The host took away the counter it was on.
    Taken,
    /// The driver refused to start it, with this error number.
    Refused(i32),
}

impl FailureCause {
    pub(crate) fn of(error: &PmuError) -> Self {
        match error {
            PmuError::Busy => Self::Busy,
            _ => Self::Refused(error.errno()),
        }
    }
}

impl fmt::Display for FailureCause {
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

/// A pinned event in the error state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Since when it does not count, in the time of its context ([`crate::VcpuContext::time_ns`]).
    pub since_ns: u64,
    /// Why.
    pub cause: FailureCause,
}
