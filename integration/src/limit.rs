//! How long something may take: long while it gets on, not so long when nothing happens any more.
//!
//! A fixed time is too short on a slow machine, and on a fast one it lets a hang wait. What is watched
//! instead is whether the process prints, and whether it and its children use CPU time: a vCPU that is
//! stepped or that spins does, one that waits for an interrupt that was lost does not.

use std::fmt;
use std::time::Duration;

/// Bounds for a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// Without output and without CPU time.
    pub still: Duration,
    /// Without output, though it uses CPU time.
    pub silent: Duration,
    /// From the start, whatever it does.
    pub overall: Duration,
}

impl Limit {
    /// For a guest that may be single-stepped in the lab, on a slow machine that does other things as well.
    /// What takes longest in silence there, 14 s where these tests were written, took 42 s on a machine a
    /// third as fast.
    pub const GENEROUS: Self = Self {
        still: Duration::from_secs(120),
        silent: Duration::from_secs(600),
        overall: Duration::from_secs(3600),
    };

    /// Which bound is passed after `since_start`, so long after the last output and after the last sign of
    /// life of any kind.
    pub(crate) fn overrun(
        &self,
        since_start: Duration,
        silent: Duration,
        still: Duration,
    ) -> Option<Overrun> {
        if since_start >= self.overall {
            Some(Overrun::Overall(self.overall))
        } else if silent >= self.silent {
            Some(Overrun::Silent(self.silent))
        } else if still >= self.still {
            Some(Overrun::Still(self.still))
        } else {
            None
        }
    }

    /// How long none of the bounds can be passed, from what is known now.
    pub(crate) fn left(&self, since_start: Duration, silent: Duration, still: Duration) -> Duration {
        (self.overall.saturating_sub(since_start))
            .min(self.silent.saturating_sub(silent))
            .min(self.still.saturating_sub(still))
    }
}

/// So long in all, for commands that are known to be short and for those that must not go on.
impl From<Duration> for Limit {
    fn from(overall: Duration) -> Self {
        Self {
            still: overall,
            silent: overall,
            overall,
        }
    }
}

/// The bound that was passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overrun {
    /// [`Limit::still`].
    Still(Duration),
    /// [`Limit::silent`].
    Silent(Duration),
    /// [`Limit::overall`].
    Overall(Duration),
}

impl fmt::Display for Overrun {
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
    fn each_bound_is_passed_by_what_it_bounds() {
        let s = Duration::from_secs;
        let limit = Limit {
            still: s(10),
            silent: s(60),
            overall: s(300),
        };
        assert_eq!(limit.overrun(s(299), s(59), s(9)), None);
        assert_eq!(limit.left(s(299), s(59), s(9)), s(1));
        assert_eq!(limit.overrun(s(300), s(0), s(0)), Some(Overrun::Overall(s(300))));
        assert_eq!(limit.overrun(s(100), s(60), s(0)), Some(Overrun::Silent(s(60))));
        assert_eq!(limit.overrun(s(100), s(11), s(10)), Some(Overrun::Still(s(10))));
        assert_eq!(
            Limit::from(s(5)).overrun(s(5), s(0), s(0)),
            Some(Overrun::Overall(s(5)))
        );
    }
}
