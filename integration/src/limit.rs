//! Time limits that depend on progress. A process that makes progress has a long limit, and a
//! process without progress a shorter one.
//!
//! A fixed limit is too short on a slow machine, and wastes time on a hang on a fast one. Progress
//! means output, or CPU time used by the process and its children. A vCPU that is single-stepped or
//! spins uses CPU time, but a vCPU that waits for a lost interrupt does not.

use std::fmt;
use std::time::Duration;

/// Time limits of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProgressLimit {
    /// Maximum time without output and without CPU use.
    pub still: Duration,
    /// Maximum time without output, regardless of CPU use.
    pub silent: Duration,
    /// Maximum total run time.
    pub overall: Duration,
}

impl ProgressLimit {
    /// Limits for a guest that may be single-stepped in the lab, on a slow machine under load. The
    /// longest measured time without output is 14 s on the development machine and 42 s on a
    /// machine that is one third as fast.
    pub const GENEROUS: Self = Self {
        still: Duration::from_secs(120),
        silent: Duration::from_secs(600),
        overall: Duration::from_secs(3600),
    };

    /// Returns the limit that is exceeded after `since_start`, given the time since the last output
    /// and the time since the last progress of any type.
    pub(crate) fn overrun(
        &self,
        since_start: Duration,
        silent: Duration,
        still: Duration,
    ) -> Option<ExceededLimit> {
        if since_start >= self.overall {
            Some(ExceededLimit::Overall(self.overall))
        } else if silent >= self.silent {
            Some(ExceededLimit::Silent(self.silent))
        } else if still >= self.still {
            Some(ExceededLimit::Still(self.still))
        } else {
            None
        }
    }

    /// Returns the minimum time until any limit can be exceeded.
    pub(crate) fn left(&self, since_start: Duration, silent: Duration, still: Duration) -> Duration {
        (self.overall.saturating_sub(since_start))
            .min(self.silent.saturating_sub(silent))
            .min(self.still.saturating_sub(still))
    }
}

/// Converts a total run time to limits, for short commands and for commands that must be stopped.
impl From<Duration> for ProgressLimit {
    fn from(overall: Duration) -> Self {
        Self {
            still: overall,
            silent: overall,
            overall,
        }
    }
}

/// The limit that was exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExceededLimit {
    /// [`ProgressLimit::still`] was exceeded.
    Still(Duration),
    /// [`ProgressLimit::silent`] was exceeded.
    Silent(Duration),
    /// [`ProgressLimit::overall`] was exceeded.
    Overall(Duration),
}

impl fmt::Display for ExceededLimit {
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
            Some(ExceededLimit::Overall(s(300)))
        );
        assert_eq!(
            limit.overrun(s(100), s(60), s(0)),
            Some(ExceededLimit::Silent(s(60)))
        );
        assert_eq!(
            limit.overrun(s(100), s(11), s(10)),
            Some(ExceededLimit::Still(s(10)))
        );
        assert_eq!(
            ProgressLimit::from(s(5)).overrun(s(5), s(0), s(0)),
            Some(ExceededLimit::Overall(s(5)))
        );
    }
}
