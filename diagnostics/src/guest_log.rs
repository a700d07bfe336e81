//! Rate-limited log lines that a guest can trigger.
//!
//! A guest can trigger the same error of a device indefinitely. [`guest_log!`](crate::guest_log!)
//! writes the first `BURST` lines immediately. Later lines are separated by a pause that starts at
//! `FIRST_PAUSE` and doubles with each line, up to `LONGEST_PAUSE`. Each of these later lines
//! reports the number of suppressed lines. All call sites of the process share one limiter, so a
//! guest gains nothing by alternating between devices.

use std::fmt::Arguments;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

pub use log::Level;

/// Number of log lines that are written without a pause.
const BURST: u32 = 20;
/// Pause before the first log line after a burst.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Maximum pause between two log lines. If no line is attempted for this long, a new burst is
/// allowed.
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

/// A rate limiter for log lines that an untrusted party can trigger.
#[derive(Debug)]
pub struct LogLimiter {
    /// Number of log lines that may still be written without a pause.
    burst_left: u32,
    pause: Duration,
    last_written: Option<Instant>,
    /// Time of the last call to [`LogLimiter::admit`], whether or not it admitted a line.
    last_asked: Option<Instant>,
    /// Number of log lines suppressed since the last one was written.
    suppressed: u64,
}

/// Permission from a [`LogLimiter`] to write a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogPermit {
    /// Number of log lines that were suppressed before this one.
    pub suppressed: u64,
    /// `true` if this is the last log line of a burst, after which lines are delayed.
    pub last_of_burst: bool,
}

impl Default for LogLimiter {
    fn default() -> Self {
        Self::new()
    }
}

impl LogLimiter {
    /// Creates a limiter that admits one burst.
    pub const fn new() -> Self {
        Self {
            burst_left: BURST,
            pause: FIRST_PAUSE,
            last_written: None,
            last_asked: None,
            suppressed: 0,
        }
    }

    /// Returns a permit if a log line may be written at `now`. Otherwise, counts the line as
    /// suppressed and returns `None`.
    pub fn admit(&mut self, now: Instant) -> Option<LogPermit> {
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
        Some(LogPermit {
            suppressed: std::mem::take(&mut self.suppressed),
            last_of_burst,
        })
    }
}

/// Limiter shared by all call sites of the process.
static SHARED: Mutex<LogLimiter> = Mutex::new(LogLimiter::new());

/// Writes a log line triggered by a guest if the process-wide limiter admits it. Call
/// [`guest_log!`](crate::guest_log!) instead.
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

/// Writes a rate-limited log line that a guest can trigger, such as
/// `guest_log!(Warn, "{name}: the queue is broken")`.
///
/// A line does not count against the limit if its log level is disabled. See
/// [`guest_log`](mod@crate::guest_log) for the limit.
#[macro_export]
macro_rules! guest_log {
    ($level:ident, $($line:tt)+) => {
        $crate::guest_log::write($crate::guest_log::Level::$level, module_path!(), format_args!($($line)+))
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of log lines that the limiter admits in `seconds` seconds if a line is
    /// attempted every millisecond.
    fn lines(limiter: &mut LogLimiter, begin: Instant, seconds: u64) -> u64 {
        let ask = |ms| limiter.admit(begin + Duration::from_millis(ms));
        (0..seconds * 1000).filter_map(ask).count() as u64
    }

    #[test]
    fn repeated_lines_are_increasingly_delayed() {
        let begin = Instant::now();
        let mut limiter = LogLimiter::new();
        assert_eq!(lines(&mut limiter, begin, 1), u64::from(BURST));
        // The pauses are 1 s, 2 s, 4 s, and so on.
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
    fn burst_is_restored_after_silence() {
        let begin = Instant::now();
        let mut limiter = LogLimiter::new();
        assert_eq!(lines(&mut limiter, begin, 1), u64::from(BURST));
        let later = begin + Duration::from_secs(1) + LONGEST_PAUSE;
        assert_eq!(lines(&mut limiter, later, 1), u64::from(BURST));
    }
}
