//! Initial and maximum number of vCPUs of a VM.

use std::str::FromStr;

/// Maximum number of vCPUs of a guest.
pub const MAX_CPUS: u8 = 64;

/// Initial and maximum number of vCPUs of a VM, as in `--cpus N` or `--cpus N,max=M`. vCPU numbers
/// range from 0 to `max - 1`. vCPUs with the number `present` or a higher one are initially absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VcpuCountRange {
    present: u8,
    max: u8,
}

/// Error when parsing the initial and maximum number of vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VcpuNumbersError {
    /// The number of vCPUs is zero, too large, or not a number.
    #[error(
        "the number of vCPUs must be between 1 and {MAX_CPUS}, or N,max=M to add some later, for \
        example 1,max=4"
    )]
    OutOfRange,
    /// The maximum is less than the initial number.
    #[error(
        "max={max} is less than the {present} vCPUs at the start; must be between {present} \
         and {MAX_CPUS}"
    )]
    MaxTooSmall {
        /// Requested initial number of vCPUs.
        present: u8,
        /// Requested maximum number of vCPUs.
        max: u8,
    },
}

impl Default for VcpuCountRange {
    /// Returns the range of a VM with one vCPU and without CPU hot-plug.
    fn default() -> Self {
        Self { present: 1, max: 1 }
    }
}

impl VcpuCountRange {
    /// Creates the range of a VM with initially `present` and at most `max` vCPUs.
    ///
    /// # Errors
    /// Returns a [`VcpuNumbersError`] if a number is out of range.
    pub fn new(present: u8, max: u8) -> Result<Self, VcpuNumbersError> {
        if present == 0 || present > MAX_CPUS || max > MAX_CPUS {
            return Err(VcpuNumbersError::OutOfRange);
        }
        if max < present {
            return Err(VcpuNumbersError::MaxTooSmall { present, max });
        }
        Ok(Self { present, max })
    }

    /// Creates the range of a VM without CPU hot-plug, which always has `vcpus` vCPUs.
    ///
    /// # Errors
    /// Returns [`VcpuNumbersError::OutOfRange`] if the number is zero or too large.
    pub fn fixed(vcpus: u8) -> Result<Self, VcpuNumbersError> {
        Self::new(vcpus, vcpus)
    }

    /// Returns the initial number of vCPUs.
    pub fn present(self) -> u8 {
        self.present
    }

    /// Returns the maximum number of vCPUs.
    pub fn max(self) -> u8 {
        self.max
    }

    /// Returns whether vCPUs can be plugged and unplugged.
    pub fn can_change(self) -> bool {
        self.max > self.present
    }
}

impl FromStr for VcpuCountRange {
    type Err = VcpuNumbersError;

    fn from_str(text: &str) -> Result<Self, VcpuNumbersError> {
        let number = |text: &str| text.parse().map_err(|_| VcpuNumbersError::OutOfRange);
        match text.split_once(',') {
            None => Self::fixed(number(text)?),
            Some((present, max)) => {
                let max = max.strip_prefix("max=").ok_or(VcpuNumbersError::OutOfRange)?;
                Self::new(number(present)?, number(max)?)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vcpu_numbers_parse_within_range() {
        let read = |text: &str| text.parse::<VcpuCountRange>().map(|n| (n.present(), n.max()));
        assert_eq!(read("2"), Ok((2, 2)));
        assert_eq!(read("1,max=64"), Ok((1, 64)));
        assert_eq!(read("3,max=3"), Ok((3, 3)));
        assert!(!"3,max=3".parse::<VcpuCountRange>().unwrap().can_change());
        assert_eq!(
            read("3,max=2"),
            Err(VcpuNumbersError::MaxTooSmall { present: 3, max: 2 })
        );
        for bad in [
            "0",
            "65",
            "",
            "1,",
            "1,max=",
            "1,max=65",
            "0,max=2",
            "1,2",
            "1,max=300",
            "-1",
            "1,max=2,",
        ] {
            assert_eq!(read(bad), Err(VcpuNumbersError::OutOfRange), "{bad}");
        }
    }
}
