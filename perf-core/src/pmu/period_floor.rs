//! The minimum period that a host kernel accepts for an event.
//!
//! Linux rejects some short periods with `EINVAL` (`x86_pmu_check_period`). The driver programs the
//! shortest accepted period instead, and the overflow is announced with a short delay.

use std::io;

/// Minimum periods that Linux uses for some events, in ascending order: 2 for branch instructions,
/// whose period 1 selects the branch trace store (`intel_pmu_check_period`), and 32 and 128 for
/// events of Nehalem to Broadwell (`nhm_limit_period`, `hsw_limit_period`, `bdw_limit_period`).
const MINIMUMS: [u64; 3] = [2, 32, 128];

/// The minimum period of one event, raised when the host rejects a period and accepts a longer one.
#[derive(Debug)]
pub(super) struct PeriodFloor {
    minimum: u64,
}

impl Default for PeriodFloor {
    fn default() -> Self {
        Self { minimum: 1 }
    }
}

impl PeriodFloor {
    /// Returns the period to program for a requested period of `asked`: at least the known minimum
    /// of the event.
    #[inline]
    pub(super) fn period_for(&self, asked: u64) -> u64 {
        asked.max(self.minimum)
    }

    /// Calls `set` with the shortest period of at least `asked` that the host may accept, then with
    /// longer ones until the host accepts one. Returns the accepted period.
    ///
    /// # Errors
    /// Returns the error of `set` if it is not `EINVAL`, or if all known minimum periods have been
    /// tried.
    pub(super) fn set(&mut self, asked: u64, mut set: impl FnMut(u64) -> io::Result<()>) -> io::Result<u64> {
        let mut period = self.period_for(asked);
        loop {
            let Err(error) = set(period) else {
                if period > asked {
                    self.minimum = period;
                }
                return Ok(period);
            };
            let longer = MINIMUMS.into_iter().find(|&minimum| minimum > period);
            match longer.filter(|_| error.raw_os_error() == Some(libc::EINVAL)) {
                Some(minimum) => period = minimum,
                None => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(minimum: u64, calls: &mut Vec<u64>) -> impl FnMut(u64) -> io::Result<()> {
        move |period| {
            calls.push(period);
            if period < minimum {
                Err(io::Error::from_raw_os_error(libc::EINVAL))
            } else {
                Ok(())
            }
        }
    }

    #[test]
    fn shortest_accepted_period_is_found_once() {
        for (minimum, tried) in [
            (1, &[1][..]),
            (2, &[1, 2]),
            (32, &[1, 2, 32]),
            (128, &[1, 2, 32, 128]),
        ] {
            let mut floor = PeriodFloor::default();
            let mut calls = Vec::new();
            assert_eq!(floor.set(1, host(minimum, &mut calls)).unwrap(), minimum);
            assert_eq!(calls, tried);
            calls.clear();
            assert_eq!(floor.set(1, host(minimum, &mut calls)).unwrap(), minimum);
            assert_eq!(floor.set(500, host(minimum, &mut calls)).unwrap(), 500);
            assert_eq!(calls, [minimum, 500], "the minimum is remembered");
        }
    }

    #[test]
    fn other_refusals_are_returned() {
        let mut floor = PeriodFloor::default();
        let mut calls = Vec::new();
        let error = floor.set(1, host(1000, &mut calls)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        assert_eq!(calls, [1, 2, 32, 128]);
        let busy = |_| Err(io::Error::from_raw_os_error(libc::EBUSY));
        assert!(floor.set(1, busy).is_err());
        assert_eq!(floor.period_for(1), 1);
    }
}
