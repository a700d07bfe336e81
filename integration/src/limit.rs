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
pub struct ProgressLimit {
    /// Maximum time in which a process neither prints nor uses CPU time.
    pub still: Duration,
    /// Maximum time in which a process prints nothing, even if it uses CPU time.
    pub silent: Duration,
    /// Maximum total run time.
    pub overall: Duration,
}

impl ProgressLimit {
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
    ) -> Option<ExceededProgressLimit> {
        if since_start >= self.overall {
            Some(ExceededProgressLimit::Overall(self.overall))
        } else if silent >= self.silent {
            Some(ExceededProgressLimit::Silent(self.silent))
        } else if still >= self.still {
            Some(ExceededProgressLimit::Still(self.still))
        } else {
            None
        }
    }

    /// Returns the remaining time until a process without further progress exceeds a limit. The
    /// arguments are those of [`ProgressLimit::overrun`].
    pub(crate) fn left(&self, since_start: Duration, silent: Duration, still: Duration) -> Duration {
        (self.overall.saturating_sub(since_start))
            .min(self.silent.saturating_sub(silent))
            .min(self.still.saturating_sub(still))
    }
}

/// Creates limits that only restrict the total run time, for short commands and for commands that
/// must be stopped.
impl From<Duration> for ProgressLimit {
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
pub enum ExceededProgressLimit {
    /// [`ProgressLimit::still`] was exceeded.
    Still(Duration),
    /// [`ProgressLimit::silent`] was exceeded.
    Silent(Duration),
    /// [`ProgressLimit::overall`] was exceeded.
    Overall(Duration),
}

impl fmt::Display for ExceededProgressLimit {
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
        let limit = ProgressLimit {
            still: s(10),
            silent: s(60),
            overall: s(300),
        };
        assert_eq!(limit.overrun(s(299), s(59), s(9)), None);
        assert_eq!(limit.left(s(299), s(59), s(9)), s(1));
        assert_eq!(
            limit.overrun(s(300), s(0), s(0)),
            Some(ExceededProgressLimit::Overall(s(300)))
        );
        assert_eq!(
            limit.overrun(s(100), s(60), s(0)),
            Some(ExceededProgressLimit::Silent(s(60)))
        );
        assert_eq!(
            limit.overrun(s(100), s(11), s(10)),
            Some(ExceededProgressLimit::Still(s(10)))
        );
        assert_eq!(
            ProgressLimit::from(s(5)).overrun(s(5), s(0), s(0)),
            Some(ExceededProgressLimit::Overall(s(5)))
        );
    }
}
