//! Log lines that a guest can cause, limited in their rate.
//!
//! A guest may break the same rule of a device again and again, for ever.
//! [`guest_log!`](crate::guest_log!) writes the first `BURST` lines at once. After that it waits
//! before each line, first `FIRST_PAUSE` and then twice as long each time, up to
//! `LONGEST_PAUSE`, and says how many lines it left out. All sites of the process share one
//! limit, so a guest gains nothing by alternating between devices.

use std::fmt::Arguments;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

pub use log::Level;

/// Number of lines that are written without a pause.
const BURST: u32 = 20;
/// Pause before the first line after a burst.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Maximum pause between two lines, and the silence after which a guest has a burst again.
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

/// Limits log lines whose rate an untrusted party controls.
#[derive(Debug)]
pub struct LogLimiter {
    /// Lines that may still be written without a pause.
    burst_left: u32,
    pause: Duration,
    /// When the last line was written.
    last_written: Option<Instant>,
    /// When a line was last asked for, written or not.
    last_asked: Option<Instant>,
    /// Number of lines left out since the last one was written.
    suppressed: u64,
}

/// A line that a [`LogLimiter`] admits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// Number of lines left out before this one.
    pub suppressed: u64,
    /// Returns whether later lines have to wait.
    pub last_of_burst: bool,
}

impl Default for LogLimiter {
    fn default() -> Self {
        Self::new()
    }
}

impl LogLimiter {
    /// Creates a limiter that admits a burst.
    pub const fn new() -> Self {
        Self {
            burst_left: BURST,
            pause: FIRST_PAUSE,
            last_written: None,
            last_asked: None,
            suppressed: 0,
        }
    }

    /// Decides whether a line may be written at `now`.
    pub fn admit(&mut self, now: Instant) -> Option<Admitted> {
        let silent_since = self.last_asked.replace(now);
        if silent_since.is_some_and(|asked| now.saturating_duration_since(asked) >= LONGEST_PAUSE) {
            self.burst_left = BURST;
            self.pause = FIRST_PAUSE;
        }
        let last_of_burst = self.burst_left == 1;
        if self.burst_left > 0 {
            self.burst_left -= 1;
        } else {
            let since = |written| now.saturating_duration_since(written);
            if self
                .last_written
                .is_some_and(|written| since(written) < self.pause)
            {
                self.suppressed += 1;
                return None;
            }
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        }
        self.last_written = Some(now);
        Some(Admitted {
            suppressed: std::mem::take(&mut self.suppressed),
            last_of_burst,
        })
    }
}

/// The limit that all sites of the process share.
static SHARED: Mutex<LogLimiter> = Mutex::new(LogLimiter::new());

/// Writes a line that a guest caused, if the limit of the process admits it. Use
/// [`guest_log!`](crate::guest_log!).
pub fn write(level: Level, target: &str, line: Arguments<'_>) {
    if !log::log_enabled!(target: target, level) {
        return;
    }
    let admitted = SHARED
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .admit(Instant::now());
    match admitted {
        None => {}
        Some(admitted) if admitted.suppressed > 0 => {
            log::log!(target: target, level, "{line} (suppressed {} lines about the guest)", admitted.suppressed);
        }
        Some(admitted) if admitted.last_of_burst => {
            log::log!(target: target, level, "{line} (further lines about the guest are rate-limited)");
        }
        Some(_) => log::log!(target: target, level, "{line}"),
    }
}

/// Writes a log line that a guest can cause: `guest_log!(Warn, "{name}: the queue is broken")`.
///
/// Lines of a level that is off do not count. See [`guest_log`](mod@crate::guest_log) for the limit.
#[macro_export]
macro_rules! guest_log {
    ($level:ident, $($line:tt)+) => {
        $crate::guest_log::write($crate::guest_log::Level::$level, module_path!(), format_args!($($line)+))
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of lines that a guest gets which asks for one each millisecond.
    fn lines(limiter: &mut LogLimiter, begin: Instant, seconds: u64) -> u64 {
        let ask = |ms| limiter.admit(begin + Duration::from_millis(ms));
        (0..seconds * 1000).filter_map(ask).count() as u64
    }

    #[test]
    fn a_guest_that_never_stops_gets_ever_fewer_lines() {
        let begin = Instant::now();
        let mut limiter = LogLimiter::new();
        assert_eq!(lines(&mut limiter, begin, 1), u64::from(BURST));
        // Pauses of 1, 2, 4 ... seconds.
        let in_an_hour = lines(&mut limiter, begin + Duration::from_secs(1), 3600);
        assert!((8..=12).contains(&in_an_hour), "{in_an_hour}");
    }

    #[test]
    fn suppressed_lines_are_counted_once() {
        let begin = Instant::now();
        let mut limiter = LogLimiter::new();
        let burst: Vec<_> = (0..BURST).map(|_| limiter.admit(begin).unwrap()).collect();
        assert!(burst.iter().all(|line| line.suppressed == 0));
        assert!(burst[BURST as usize - 1].last_of_burst && !burst[0].last_of_burst);
        for _ in 0..7 {
            assert_eq!(limiter.admit(begin), None);
        }
        let next = limiter.admit(begin + FIRST_PAUSE).unwrap();
        assert_eq!((next.suppressed, next.last_of_burst), (7, false));
        let next = limiter.admit(begin + 10 * FIRST_PAUSE).unwrap();
        assert_eq!(next.suppressed, 0);
    }

    #[test]
    fn a_burst_comes_back_after_a_silence() {
        let begin = Instant::now();
        let mut limiter = LogLimiter::new();
        assert_eq!(lines(&mut limiter, begin, 1), u64::from(BURST));
        let later = begin + Duration::from_secs(1) + LONGEST_PAUSE;
        assert_eq!(lines(&mut limiter, later, 1), u64::from(BURST));
    }
}
