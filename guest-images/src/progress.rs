//! Progress messages for operations that take more than a few seconds: builds, downloads, booting
//! the lab.

use std::io::{IsTerminal, Write, stderr};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Interval between two messages about a step in progress.
const INTERVAL: Duration = Duration::from_secs(10);

/// Progress messages of an operation, on standard error. Each message contains the elapsed time in
/// seconds.
#[derive(Clone)]
pub struct ProgressLog {
    start: Instant,
    what: String,
    quiet: bool,
}

impl ProgressLog {
    /// Starts the clock of an operation. Each message begins with `what`.
    pub fn new(what: &str) -> Self {
        Self {
            start: Instant::now(),
            what: what.to_owned(),
            quiet: false,
        }
    }

    /// Creates a log that prints nothing.
    pub fn quiet() -> Self {
        Self {
            quiet: true,
            ..Self::new("")
        }
    }

    /// Prints `text` immediately and then every ten seconds, until the returned [`ProgressTicker`]
    /// is dropped.
    #[must_use]
    pub fn begin(&self, text: &str) -> ProgressTicker {
        self.step(text);
        self.tick(format!("{text} …"))
    }

    /// Prints `text` every ten seconds until the returned [`ProgressTicker`] is dropped. Steps
    /// shorter than ten seconds print nothing.
    #[must_use]
    pub fn tick(&self, text: impl Into<String>) -> ProgressTicker {
        let text = text.into();
        self.tick_with(move || text.clone())
    }

    /// Calls `text` every ten seconds and prints the result, until the returned [`ProgressTicker`]
    /// is dropped.
    #[must_use]
    pub fn tick_with(&self, text: impl Fn() -> String + Send + 'static) -> ProgressTicker {
        self.tick_every(INTERVAL, text)
    }

    fn tick_every(&self, interval: Duration, text: impl Fn() -> String + Send + 'static) -> ProgressTicker {
        if self.quiet {
            return ProgressTicker(None);
        }
        let (stop, stopped) = channel();
        let progress = self.clone();
        let thread = thread::spawn(move || {
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                progress.step(&text());
            }
        });
        ProgressTicker(Some((stop, thread)))
    }

    /// Prints `text` as one line immediately.
    pub fn step(&self, text: &str) {
        if self.quiet {
            return;
        }
        let (bold, plain) = if stderr().is_terminal() {
            ("\x1b[1m", "\x1b[0m")
        } else {
            ("", "")
        };
        let seconds = self.start.elapsed().as_secs_f64();
        // A closed standard error must not abort the build.
        let _ = writeln!(stderr(), "{bold}{:>10}{plain} {seconds:5.1} s  {text}", self.what);
    }
}

/// A step that is in progress. Dropping the ticker stops the messages about the step.
pub struct ProgressTicker(Option<(Sender<()>, JoinHandle<()>)>);

impl Drop for ProgressTicker {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.0.take() {
            drop(stop);
            // Wait for the thread, so that no message about this step appears after the next step's
            // message.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn ticker_prints_until_it_is_dropped() {
        let count = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&count);
        let ticker = ProgressLog::new("test").tick_every(Duration::from_millis(1), move || {
            counted.fetch_add(1, Ordering::Relaxed);
            "a tick of a test".to_owned()
        });
        while count.load(Ordering::Relaxed) < 3 {
            thread::yield_now();
        }
        drop(ticker);
        // The closure is dropped with its thread.
        assert_eq!(Arc::strong_count(&count), 1);
    }

    #[test]
    fn quiet_progress_has_no_ticker() {
        assert!(ProgressLog::quiet().begin("nothing").0.is_none());
    }
}
