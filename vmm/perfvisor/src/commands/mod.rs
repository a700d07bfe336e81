//! The operator's commands: those that speak to running VMs, and those that show what was recorded.

pub mod ctl;
pub mod files;
pub mod ps;
pub mod record;
pub mod stat;
pub mod top;
pub mod validate;

use std::io::{self, Write};
use std::time::{Duration, Instant};

use crate::exit::ExitStatus;
use crate::signals::StopSignals;

/// How long a command sleeps before it looks for Ctrl-C again.
const NAP: Duration = Duration::from_millis(20);

/// Why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Woken {
    /// The time is over.
    Time,
    /// Ctrl-C or another signal to end.
    Signal,
}

/// Waits until `until`, or until a signal asks to end.
pub(crate) fn wait_until(until: Instant, signals: &StopSignals) -> Woken {
    loop {
        if signals.take().is_some() {
            return Woken::Signal;
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Woken::Time;
        }
        std::thread::sleep(left.min(NAP));
    }
}

/// Prints to standard output. A reader that has gone away is no error.
///
/// # Errors
/// One line for the user: what was printed is not complete.
pub fn print(text: &str) -> Result<(), String> {
    written(
        io::stdout()
            .write_all(text.as_bytes())
            .and_then(|()| io::stdout().flush()),
    )
}

/// Prints to standard error, whose reader may have gone away: what is said there is not worth ending for.
pub fn say(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

/// `text` with its control characters as spaces, for a message of one line: values come from the user and may
/// hold anything.
pub fn one_line(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// The result of writing to standard output.
pub(crate) fn written(result: io::Result<()>) -> Result<(), String> {
    match result {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(format!("standard output: {e}")),
        _ => Ok(()),
    }
}

/// The end of a command that did what it was asked.
pub(crate) const DONE: ExitStatus = ExitStatus::PoweredOff;

/// A list of vCPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VcpuList(pub Vec<u32>);

/// A list of vCPUs: numbers and ranges, as in 0,2-3.
pub(crate) fn parse_vcpus(text: &str) -> Result<VcpuList, String> {
    let shape = || "must be vCPU numbers and ranges, as in 0,2-3".to_owned();
    let mut list = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |t: &str| t.trim().parse::<u32>().ok().filter(|n| *n < 1024);
        let (Some(first), Some(last)) = (number(first), number(last)) else {
            return Err(shape());
        };
        if first > last {
            return Err(shape());
        }
        list.extend(first..=last);
    }
    list.sort_unstable();
    list.dedup();
    Ok(VcpuList(list))
}

/// A duration in seconds.
pub(crate) fn parse_seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(s) if s > 0.0 && s <= 1e8 => Ok(Duration::from_secs_f64(s)),
        _ => Err("must be a number of seconds above 0, as in 2.5".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vcpu_lists_are_numbers_and_ranges() {
        assert_eq!(parse_vcpus("2-3,0,2").unwrap().0, [0, 2, 3]);
        for bad in ["", "a", "3-1", "1,", "-", "99999999999", "0-4294967295"] {
            assert!(parse_vcpus(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn durations_are_positive_and_finite() {
        assert_eq!(parse_seconds("0.5").unwrap(), Duration::from_millis(500));
        for bad in ["", "0", "-1", "inf", "NaN", "1e300", "x"] {
            assert!(parse_seconds(bad).is_err(), "{bad}");
        }
    }
}
