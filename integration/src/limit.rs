//! Time limits for processes. A process that makes progress gets more time than one that makes
//! none.
//!
//! Progress means output, or CPU time used by the process and its children. The CPU time
//! distinguishes a vCPU that spins or is single-stepped from a vCPU that waits for a lost
//! interrupt. A single fixed limit would be too short on a slow machine, and would detect a hang
//! too late on a fast one.

use std::fmt;
use std::time::Duration;

/// Time limits of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessTimeLimits {
    /// Maximum time in which a process neither prints nor uses CPU time.
    pub still: Duration,
    /// Maximum time in which a process prints nothing, even if it uses CPU time.
    pub silent: Duration,
    /// Maximum total run time.
    pub overall: Duration,
}

impl ProcessTimeLimits {
    /// Limits for a guest that may be single-stepped in the lab, on a slow machine under load. The
    /// longest measured time without output is 14 s on the development machine, and 42 s on a
    /// machine with a third of its speed.
    pub const GENEROUS: Self = Self {
        still: Duration::from_secs(120),
        silent: Duration::from_secs(600),
        overall: Duration::from_secs(3600),
    };

    /// Returns the limit that a process has exceeded, if any. The arguments are the times since the
    /// start of the process, since its last output (`silent`), and since its last output or use of
    /// CPU time (`still`).
    pub(crate) fn overrun(
        &self,
        since_start: Duration,
        silent: Duration,
        still: Duration,
    ) -> Option<ExceededTimeLimit> {
        if since_start >= self.overall {
            Some(ExceededTimeLimit::Overall(self.overall))
        } else if silent >= self.silent {
            Some(ExceededTimeLimit::Silent(self.silent))
        } else if still >= self.still {
            Some(ExceededTimeLimit::Still(self.still))
        } else {
            None
        }
    }

    /// Returns the remaining time until a process without further progress exceeds a limit. The
    /// arguments are those of [`ProcessTimeLimits::overrun`].
    pub(crate) fn time_left(&self, since_start: Duration, silent: Duration, still: Duration) -> Duration {
        (self.overall.saturating_sub(since_start))
            .min(self.silent.saturating_sub(silent))
            .min(self.still.saturating_sub(still))
    }
}

/// Creates limits that only restrict the total run time, for short commands and for commands that
/// must be stopped.
impl From<Duration> for ProcessTimeLimits {
    fn from(overall: Duration) -> Self {
        Self {
            still: overall,
            silent: overall,
            overall,
        }
    }
}

/// The time limit that a process exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExceededTimeLimit {
    /// [`ProcessTimeLimits::still`] was exceeded.
    Still(Duration),
    /// [`ProcessTimeLimits::silent`] was exceeded.
    Silent(Duration),
    /// [`ProcessTimeLimits::overall`] was exceeded.
    Overall(Duration),
}

impl fmt::Display for ExceededTimeLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Still(bound) => write!(f, "hung: no output and no CPU time for {bound:?}"),
            Self::Silent(bound) => write!(f, "hung: no output for {bound:?}, though it used CPU time"),
            Self::Overall(bound) => write!(f, "not done after {bound:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_is_enforced_independently() {
        let s = Duration::from_secs;
        let limit = ProcessTimeLimits {
            still: s(10),
            silent: s(60),
            overall: s(300),
        };
        assert_eq!(limit.overrun(s(299), s(59), s(9)), None);
        assert_eq!(limit.time_left(s(299), s(59), s(9)), s(1));
        assert_eq!(
            limit.overrun(s(300), s(0), s(0)),
            Some(ExceededTimeLimit::Overall(s(300)))
        );
        assert_eq!(
            limit.overrun(s(100), s(60), s(0)),
            Some(ExceededTimeLimit::Silent(s(60)))
        );
        assert_eq!(
            limit.overrun(s(100), s(11), s(10)),
            Some(ExceededTimeLimit::Still(s(10)))
        );
        assert_eq!(
            ProcessTimeLimits::from(s(5)).overrun(s(5), s(0), s(0)),
            Some(ExceededTimeLimit::Overall(s(5)))
        );
    }
}
