//! What the image builder says while it works.

use std::io::{IsTerminal, Write, stderr};
use std::time::Instant;

/// Progress lines on stderr: one per step, each with the seconds since the start. On a terminal
/// the running step is rewritten in place by the next `done`.
pub struct Progress {
    start: Instant,
    what: String,
    quiet: bool,
}

impl Progress {
    /// Progress of building `what`.
    pub fn new(what: &str) -> Self {
        Self {
            start: Instant::now(),
            what: what.to_owned(),
            quiet: false,
        }
    }

    /// Progress nobody sees.
    pub fn quiet() -> Self {
        Self {
            quiet: true,
            ..Self::new("")
        }
    }

    /// A step begins.
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
        // A closed stderr must not stop the build.
        let _ = writeln!(stderr(), "{bold}{:>10}{plain} {seconds:5.1} s  {text}", self.what);
    }
}
