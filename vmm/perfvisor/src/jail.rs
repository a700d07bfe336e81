//! `--jail`: the user, control group and resource limits of a VM's process.

use std::path::PathBuf;
use std::str::FromStr;

use operator::values::{ParseValueError, integer_in_range, parse_bytes};

/// Maximum user or group ID. The kernel reserves the next value as an invalid ID.
const MAX_ID: u64 = u32::MAX as u64 - 1;

/// Valid range of the descriptor limit. The minimum suffices for a VM with a few devices, and the
/// maximum is the kernel's default of `fs.nr_open`.
const DESCRIPTORS: std::ops::RangeInclusive<u64> = 64..=1 << 20;

/// The parsed value of `--jail`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JailConfig {
    /// User ID of the VM's process.
    pub uid: Option<u32>,
    /// Group ID of the process; the default is the user ID.
    pub gid: Option<u32>,
    /// Control group to join, an existing cgroup v2 directory.
    pub cgroup: Option<PathBuf>,
    /// Maximum size of a file that the VM writes, in bytes (`RLIMIT_FSIZE`).
    pub file_size: Option<u64>,
    /// Maximum number of open descriptors of the VM's process (`RLIMIT_NOFILE`).
    pub descriptors: Option<u64>,
}

/// Error returned when the value of `--jail` is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JailConfigError {
    #[error(
        "unknown option '{0}'; known are uid=N, gid=N, cgroup=DIR, fsize=SIZE and no-file=N, \
        separated by commas"
    )]
    Unknown(String),
    #[error("{0}= is given twice")]
    Twice(&'static str),
    #[error("{0}=")]
    Number(&'static str, #[source] ParseValueError),
    #[error("cgroup= without a directory; name a cgroup v2 directory, for example /sys/fs/cgroup/vms/web")]
    NoDirectory,
    #[error("gid= without uid= does not change the user; use both")]
    GroupAlone,
}

impl FromStr for JailConfig {
    type Err = JailConfigError;

    fn from_str(text: &str) -> Result<Self, JailConfigError> {
        let mut config = Self::default();
        for word in text.split(',').filter(|_| !text.is_empty()) {
            let unknown = || JailConfigError::Unknown(word.to_owned());
            let (key, value) = word.split_once('=').ok_or_else(unknown)?;
            let (name, place) = match key {
                "fsize" | "no-file" => {
                    config.set_limit(key, value)?;
                    continue;
                }
                "cgroup" => {
                    if value.is_empty() {
                        return Err(JailConfigError::NoDirectory);
                    }
                    if config.cgroup.replace(value.into()).is_some() {
                        return Err(JailConfigError::Twice("cgroup"));
                    }
                    continue;
                }
                "uid" => ("uid", &mut config.uid),
                "gid" => ("gid", &mut config.gid),
                _ => return Err(unknown()),
            };
            let id = parse_id(value).map_err(|e| JailConfigError::Number(name, e))?;
            if place.replace(id).is_some() {
                return Err(JailConfigError::Twice(name));
            }
        }
        if config.gid.is_some() && config.uid.is_none() {
            return Err(JailConfigError::GroupAlone);
        }
        Ok(config)
    }
}

impl JailConfig {
    fn set_limit(&mut self, key: &str, value: &str) -> Result<(), JailConfigError> {
        let (name, limit, parsed) = match key {
            "fsize" => ("fsize", &mut self.file_size, parse_bytes(value)),
            _ => (
                "no-file",
                &mut self.descriptors,
                integer_in_range(DESCRIPTORS)(value),
            ),
        };
        let parsed = parsed.map_err(|e| JailConfigError::Number(name, e))?;
        match limit.replace(parsed) {
            Some(_) => Err(JailConfigError::Twice(name)),
            None => Ok(()),
        }
    }
}

fn parse_id(text: &str) -> Result<u32, ParseValueError> {
    let id: u64 = integer_in_range(0..=MAX_ID)(text)?;
    u32::try_from(id).map_err(|_| ParseValueError::Whole {
        from: 0,
        to: MAX_ID.into(),
    })
}
