//! Measures the time for which a vCPU thread was runnable but waited for a host CPU, for the
//! guest's counters. Events of operators read the same time through [`perf_core::pmu::sched`].

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use perf_core::pmu::sched::RunQueueWaitTime;

/// `true` if a warning was logged that this host does not provide the wait time.
static WARNED: AtomicBool = AtomicBool::new(false);

/// Time for which the thread that created this clock was runnable but waited for a host CPU.
#[derive(Debug)]
pub struct StealTimeClock {
    /// Source of the wait time; `None` if the host does not provide it.
    time: Option<RunQueueWaitTime>,
    /// Wait time at the last read, in nanoseconds; `None` while the clock is off.
    last_ns: Option<u64>,
}

impl StealTimeClock {
    /// Creates the clock of the calling thread, initially off. If the host does not provide the
    /// time, for example in a chroot without /proc, logs a warning and returns a clock that does
    /// not advance.
    ///
    /// # Errors
    /// Returns an error if an existing `schedstat` file cannot be opened.
    pub fn for_current_thread() -> io::Result<Self> {
        let time = match RunQueueWaitTime::of_this_thread() {
            Ok(time) => Some(time),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                if !WARNED.swap(true, Ordering::Relaxed) {
                    log::warn!("the guest's steal time event does not count: /proc/self/schedstat not found");
                }
                None
            }
            Err(e) => return Err(e),
        };
        Ok(Self { time, last_ns: None })
    }

    /// Turns the clock on or off. Time that passes while it is off is not counted.
    pub fn set_on(&mut self, on: bool) {
        match (on, self.last_ns) {
            (true, None) => self.last_ns = self.read(),
            (false, Some(_)) => self.last_ns = None,
            _ => {}
        }
    }

    /// Returns the wait time since the last call, in nanoseconds, or `None` while the clock is off.
    /// Calls `pread(2)` once while the clock is on.
    pub fn advance(&mut self) -> Option<u64> {
        let last = self.last_ns?;
        let now = self.read()?;
        self.last_ns = Some(now);
        Some(now.saturating_sub(last))
    }

    fn read(&self) -> Option<u64> {
        self.time.as_ref()?.read_ns()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The clock starts at zero when it is turned on, and never goes back. While it is off, the
    /// time of the host is not read.
    #[test]
    fn waiting_time_counts_only_while_on() {
        let mut clock = StealTimeClock::for_current_thread().unwrap();
        assert_eq!(clock.advance(), None);
        clock.set_on(true);
        let total = clock.read().unwrap();
        let step = clock.advance().unwrap();
        assert!(clock.read().unwrap() >= total && step <= clock.read().unwrap());
        clock.set_on(false);
        assert_eq!(clock.advance(), None);
    }
}
