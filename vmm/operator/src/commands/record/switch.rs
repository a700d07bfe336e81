//! `--switch-output`: continues a recording in a new file on a signal, at a size or after a time.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::args::RecordArgs;
use crate::signals::StopSignals;
use crate::values::parse_bytes;

/// Minimum file size for `--switch-output`, in bytes, which leaves room for the header and a few
/// samples.
const MIN_SIZE: u64 = 16 << 10;

/// The event after which a recording continues in a new file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputSwitchTrigger {
    /// The recorder has received SIGUSR2.
    Signal,
    /// The file has reached the given size, in bytes.
    Size(u64),
    /// The given time has passed since the file was started.
    Time(Duration),
}

/// Errors of parsing `--switch-output`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OutputSwitchTriggerError {
    #[error("must be signal, a size as in 100M (at least {}K) or a time as in 30s, 5m, 2h or 1d", MIN_SIZE >> 10)]
    Form,
}

impl FromStr for OutputSwitchTrigger {
    type Err = OutputSwitchTriggerError;

    fn from_str(text: &str) -> Result<Self, OutputSwitchTriggerError> {
        if text == "signal" {
            return Ok(Self::Signal);
        }
        // As in perf, time units are lowercase and size units are uppercase.
        let seconds = match text.chars().last() {
            Some('s') => 1,
            Some('m') => 60,
            Some('h') => 3600,
            Some('d') => 86_400,
            _ => {
                let bytes = text
                    .strip_suffix('B')
                    .map_or_else(|| parse_bytes(text), parse_bytes);
                let bytes = bytes.ok().filter(|bytes| *bytes >= MIN_SIZE);
                return bytes.map(Self::Size).ok_or(OutputSwitchTriggerError::Form);
            }
        };
        let number = text[..text.len() - 1].parse::<u32>().ok().filter(|n| *n > 0);
        let time = number.map(|n| Duration::from_secs(u64::from(n) * seconds));
        time.map(Self::Time).ok_or(OutputSwitchTriggerError::Form)
    }
}

/// Trigger and completed files of `--switch-output`.
pub(super) struct OutputSwitch {
    trigger: OutputSwitchTrigger,
    /// Time at which the current file was started.
    since: Instant,
    /// Names of the completed files, the oldest first.
    completed: VecDeque<PathBuf>,
    /// Maximum number of completed files that are kept.
    max_files: Option<usize>,
}

impl OutputSwitch {
    pub(super) fn of(args: &RecordArgs) -> Option<Self> {
        Some(Self {
            trigger: args.switch_output?,
            since: Instant::now(),
            completed: VecDeque::new(),
            max_files: args.switch_max_files,
        })
    }

    /// Returns whether the recording is to continue in a new file. `bytes` is the size of the
    /// current file.
    pub(super) fn is_due(&self, bytes: u64, signals: &StopSignals) -> bool {
        match self.trigger {
            OutputSwitchTrigger::Signal => signals.take_user_signal(),
            OutputSwitchTrigger::Size(limit) => bytes >= limit,
            OutputSwitchTrigger::Time(limit) => self.since.elapsed() >= limit,
        }
    }

    /// Returns the name of a completed file, which is the output name followed by the time in
    /// milliseconds since 1970.
    pub(super) fn name_of_completed(output: &Path) -> PathBuf {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut name = output.as_os_str().to_owned();
        name.push(format!(".{}", now.unwrap_or_default().as_millis()));
        name.into()
    }

    /// Records that `completed` is complete, and removes the oldest files above the limit.
    pub(super) fn add_completed(&mut self, completed: PathBuf) {
        self.since = Instant::now();
        self.completed.push_back(completed);
        while self.max_files.is_some_and(|most| self.completed.len() > most)
            && let Some(oldest) = self.completed.pop_front()
        {
            if let Err(e) = std::fs::remove_file(&oldest) {
                log::warn!("{} cannot be removed: {e}", oldest.display());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn triggers_are_parsed_like_perf() {
        for (text, trigger) in [
            ("signal", OutputSwitchTrigger::Signal),
            ("100M", OutputSwitchTrigger::Size(100 << 20)),
            ("16384B", OutputSwitchTrigger::Size(16 << 10)),
            ("30s", OutputSwitchTrigger::Time(Duration::from_secs(30))),
            ("5m", OutputSwitchTrigger::Time(Duration::from_secs(300))),
            ("1d", OutputSwitchTrigger::Time(Duration::from_secs(86_400))),
        ] {
            assert_eq!(text.parse(), Ok(trigger), "{text}");
        }
        for bad in ["", "0s", "s", "-1s", "15K", "x", "1.5s", "99999999999d", "é"] {
            let parsed = bad.parse::<OutputSwitchTrigger>();
            assert_eq!(parsed, Err(OutputSwitchTriggerError::Form), "{bad}");
        }
    }

    #[test]
    fn oldest_files_above_limit_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let mut switch = OutputSwitch {
            trigger: OutputSwitchTrigger::Signal,
            since: Instant::now(),
            completed: VecDeque::new(),
            max_files: Some(2),
        };
        let files = ["a", "b", "c"].map(|name| dir.path().join(name));
        for file in &files {
            std::fs::write(file, "x").unwrap();
            switch.add_completed(file.clone());
        }
        assert_eq!(files.map(|file| file.exists()), [false, true, true]);
    }
}
