//! Configuration of a balloon device (`--balloon`).

use std::str::FromStr;

use super::PAGES_PER_MIB;

/// Maximum size of a balloon, in MiB. The virtio configuration contains the size as a 32-bit number
/// of pages.
pub const MAX_SIZE_MIB: u32 = u32::MAX / PAGES_PER_MIB;

/// Configuration of a virtio balloon device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BalloonConfig {
    /// Initial target size of the balloon, in MiB.
    pub size_mib: u32,
    /// `true` if the guest may deflate the balloon when it would otherwise kill a process for lack
    /// of memory.
    pub deflate_on_oom: bool,
    /// Interval between two updates of the guest's memory statistics, in seconds. 0 disables
    /// statistics.
    pub statistics_interval_s: u16,
    /// `true` if the guest reports free pages, which are released to the host.
    pub free_page_reporting: bool,
}

impl BalloonConfig {
    /// Returns whether the device offers memory statistics to the driver.
    pub fn has_statistics(&self) -> bool {
        self.statistics_interval_s > 0
    }
}

/// Error returned when a balloon configuration is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BalloonConfigError {
    /// The configuration contains an unknown option.
    #[error(
        "unknown option '{0}'; known are size=MIB, deflate-on-oom=on|off, stats=SECONDS and \
        free-page-reporting=on|off"
    )]
    Option(String),
    /// The named option is repeated.
    #[error("{0}= must be given once")]
    Repeated(&'static str),
    /// The value of the named on/off option is invalid.
    #[error("{0} must be on or off")]
    Switch(&'static str),
    /// The balloon size is invalid.
    #[error(transparent)]
    Size(#[from] BalloonSizeError),
    /// The value of the statistics interval is invalid.
    #[error(
        "stats must be a number of seconds between 0 (no statistics) and {}",
        u16::MAX
    )]
    Interval,
}

/// Error returned when the size of a balloon is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the size of a balloon must be between 0 and {MAX_SIZE_MIB} MiB, for example 256, 256M or 1G")]
pub struct BalloonSizeError;

/// Parses the size of a balloon: a number of MiB, or a number with the suffix M, G or T. Returns
/// MiB.
///
/// # Errors
/// Returns [`BalloonSizeError`] if the size is malformed or too large.
pub fn parse_size_mib(text: &str) -> Result<u32, BalloonSizeError> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "M" | "MIB" => 0,
        "G" | "GIB" => 10,
        "T" | "TIB" => 20,
        _ => return Err(BalloonSizeError),
    };
    let number = digits.bytes().all(|byte| byte.is_ascii_digit());
    let number = number.then(|| digits.parse::<u32>().ok()).flatten();
    let size = number.and_then(|number| number.checked_mul(1 << shift));
    size.filter(|size| *size <= MAX_SIZE_MIB).ok_or(BalloonSizeError)
}

impl FromStr for BalloonConfig {
    type Err = BalloonConfigError;

    fn from_str(text: &str) -> Result<Self, BalloonConfigError> {
        let (mut size, mut oom, mut interval, mut reporting) = (None, None, None, None);
        for part in text.split(',') {
            match part.split_once('=') {
                Some(("size", value)) => set(&mut size, "size", parse_size_mib(value)?)?,
                Some(("deflate-on-oom", value)) => {
                    set(&mut oom, "deflate-on-oom", switch("deflate-on-oom", value)?)?;
                }
                Some(("stats", value)) => {
                    let seconds = value.parse().map_err(|_| BalloonConfigError::Interval)?;
                    set(&mut interval, "stats", seconds)?;
                }
                Some(("free-page-reporting", value)) => {
                    let on = switch("free-page-reporting", value)?;
                    set(&mut reporting, "free-page-reporting", on)?;
                }
                _ => return Err(BalloonConfigError::Option(part.to_owned())),
            }
        }
        Ok(Self {
            size_mib: size.unwrap_or_default(),
            deflate_on_oom: oom.unwrap_or_default(),
            statistics_interval_s: interval.unwrap_or_default(),
            free_page_reporting: reporting.unwrap_or_default(),
        })
    }
}

fn set<T>(option: &mut Option<T>, name: &'static str, value: T) -> Result<(), BalloonConfigError> {
    match option.replace(value) {
        None => Ok(()),
        Some(_) => Err(BalloonConfigError::Repeated(name)),
    }
}

fn switch(name: &'static str, value: &str) -> Result<bool, BalloonConfigError> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(BalloonConfigError::Switch(name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn balloon_options_parse() {
        let full = "size=256,deflate-on-oom=on,stats=5,free-page-reporting=on";
        let config = BalloonConfig {
            size_mib: 256,
            deflate_on_oom: true,
            statistics_interval_s: 5,
            free_page_reporting: true,
        };
        assert_eq!(full.parse(), Ok(config));
        let small = BalloonConfig {
            size_mib: 1024,
            ..BalloonConfig::default()
        };
        assert_eq!("size=1G,deflate-on-oom=off".parse(), Ok(small));
    }

    #[test]
    fn invalid_balloon_options_are_named() {
        use BalloonConfigError::{Interval, Option, Repeated, Size, Switch};
        let refused = |text: &str| text.parse::<BalloonConfig>().unwrap_err();
        assert_eq!(refused("size=1,size=2"), Repeated("size"));
        assert_eq!(refused("stats=0,stats=0"), Repeated("stats"));
        assert_eq!(refused("deflate-on-oom=yes"), Switch("deflate-on-oom"));
        assert_eq!(
            refused("free-page-reporting"),
            Option("free-page-reporting".into())
        );
        assert_eq!(refused(""), Option(String::new()));
        assert_eq!(refused("stats=65536"), Interval);
        for size in ["", "-1", "1.5", "1K", "16T", "x", "4294967296", "+1"] {
            assert_eq!(refused(&format!("size={size}")), Size(BalloonSizeError), "{size}");
        }
        assert_eq!(parse_size_mib("16777215"), Ok(MAX_SIZE_MIB));
        assert_eq!(parse_size_mib("15T"), Ok(15 << 20));
    }
}
