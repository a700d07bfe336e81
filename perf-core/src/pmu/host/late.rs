//! Polling for overflows that the host cannot announce in time.
//!
//! If the distance to an overflow is below the minimum period of the host (see [`PeriodFloor`]),
//! the event is armed with the minimum period instead. A frequent event reaches the end of this
//! longer period within the skid of an ordinary overflow. For a rare event, a timer makes the vCPU
//! exit repeatedly, and the driver compares the event's count with the overflow point.
//!
//! [`PeriodFloor`]: crate::pmu::period_floor::PeriodFloor

use std::io;

use crate::pmu::timer::Timer;

/// First polling interval, in nanoseconds. Each further interval is twice as long, up to
/// [`MAX_INTERVAL_NS`].
const FIRST_INTERVAL_NS: u64 = 100_000;
/// Maximum interval at which an overflow is polled for, in nanoseconds.
const MAX_INTERVAL_NS: u64 = 10_000_000;

/// The state of the polling for a late overflow of one event.
#[derive(Debug, Default)]
pub(super) struct LateOverflowPoll {
    /// Polling timer, which is created on first use.
    timer: Option<Timer>,
    interval_ns: u64,
    on: bool,
}

impl LateOverflowPoll {
    /// Returns `true` while the event's overflow is polled for.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// Starts polling. A timer sends `signal` to thread `tid` after the first interval.
    pub(super) fn begin(&mut self, tid: i32, signal: i32) -> io::Result<()> {
        if self.timer.is_none() {
            self.timer = Some(Timer::open(tid, signal)?);
        }
        self.interval_ns = FIRST_INTERVAL_NS;
        self.on = true;
        self.set()
    }

    /// Arms the polling timer for the next interval. Call this method after a signal. Has no effect
    /// if the polling timer has not expired, because the signal then came from another source.
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

    /// Stops polling for the overflow.
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
