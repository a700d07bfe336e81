//! Polling for overflows that the host can only announce late.
//!
//! An overflow distance below the minimum period of the host (see [`PeriodFloor`]) is armed with
//! the minimum. A frequent event exceeds it within the skid of an ordinary overflow. For a rare
//! event, a timer makes the vCPU exit and compares the count.
//!
//! [`PeriodFloor`]: crate::pmu::period_floor::PeriodFloor

use std::io;

use crate::pmu::timer::Timer;

/// First polling interval, in nanoseconds. It doubles up to [`MAX_INTERVAL_NS`].
const FIRST_INTERVAL_NS: u64 = 100_000;
/// Maximum polling interval, in nanoseconds.
const MAX_INTERVAL_NS: u64 = 10_000_000;

/// Polls for the overflow of one event.
#[derive(Debug, Default)]
pub(super) struct LateOverflowPoll {
    /// Created on first use.
    timer: Option<Timer>,
    interval_ns: u64,
    on: bool,
}

impl LateOverflowPoll {
    /// Returns whether polling for an overflow is active.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// Starts polling. `signal` is sent to thread `tid` after the first interval.
    pub(super) fn begin(&mut self, tid: i32, signal: i32) -> io::Result<()> {
        if self.timer.is_none() {
            self.timer = Some(Timer::open(tid, signal)?);
        }
        self.interval_ns = FIRST_INTERVAL_NS;
        self.on = true;
        self.set()
    }

    /// Continues polling after a signal, unless the signal came from another source than the timer.
    pub(super) fn continue_after_signal(&mut self) -> io::Result<()> {
        if !self.on || self.timer.as_ref().is_some_and(|timer| !timer.has_expired()) {
            return Ok(());
        }
        self.interval_ns = self.interval_ns.saturating_mul(2).min(MAX_INTERVAL_NS);
        self.set()
    }

    fn set(&mut self) -> io::Result<()> {
        let interval_ns = self.interval_ns;
        self.timer.as_mut().map_or(Ok(()), |timer| timer.set(interval_ns))
    }

    /// Stops polling. Costs one check if polling is not active.
    #[inline]
    pub(super) fn end(&mut self) {
        if std::mem::take(&mut self.on)
            && let Some(timer) = &self.timer
            && let Err(e) = timer.stop()
        {
            log::debug!(
                "cannot stop the timer of a late overflow: {}",
                crate::error_line(&e)
            );
        }
    }
}
