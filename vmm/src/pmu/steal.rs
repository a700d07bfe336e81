//! How long the vCPU thread was ready to run and waited for a host CPU, fed to the guest's counters step by
//! step. An operator's event reads the same time by itself ([`perf_core::pmu::sched`]).

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use perf_core::pmu::sched::WaitTime;

/// That the time is missing was said.
static WARNED: AtomicBool = AtomicBool::new(false);

/// The waiting time of the thread that made it, in steps.
#[derive(Debug)]
pub struct StealClock {
    /// `None` where the host shows no such time.
    time: Option<WaitTime>,
    /// Waiting time at the last step, ns; `None` while nobody counts it.
    last_ns: Option<u64>,
}

impl StealClock {
    /// The calling thread's clock, off. Where the host does not tell the time, as in a chroot without /proc,
    /// a warning says so, and the clock stands still.
    ///
    /// # Errors
    /// The error of opening its `schedstat`, if that is there.
    pub fn for_current_thread() -> io::Result<Self> {
        let time = match WaitTime::of_this_thread() {
            Ok(time) => Some(time),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                if !WARNED.swap(true, Ordering::Relaxed) {
                    log::warn!(
                        "the guest's event of steal time counts nothing: there is no schedstat in /proc here"
                    );
                }
                None
            }
            Err(e) => return Err(e),
        };
        Ok(Self { time, last_ns: None })
    }

    /// Starts or stops looking. What passed while nobody looked is never counted.
    pub fn set_on(&mut self, on: bool) {
        match (on, self.last_ns) {
            (true, None) => self.last_ns = self.read(),
            (false, Some(_)) => self.last_ns = None,
            _ => {}
        }
    }

    /// Nanoseconds since the last step; `None` while off. One `pread(2)` while on.
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

    /// Off, nothing is read; on, the clock never runs backwards and starts at the moment it is switched on.
    #[test]
    fn waiting_time_counts_only_while_on() {
        let mut clock = StealClock::for_current_thread().unwrap();
        assert_eq!(clock.advance(), None);
        clock.set_on(true);
        let total = clock.read().unwrap();
        let step = clock.advance().unwrap();
        assert!(clock.read().unwrap() >= total && step <= clock.read().unwrap());
        clock.set_on(false);
        assert_eq!(clock.advance(), None);
    }
}
