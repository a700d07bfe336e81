//! Parsers of option values, and their error messages.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use guest_profile::export::pprof::SampleLabel;
use guest_profile::export::report::SortKey;

/// Minimum interval of `stat -I`, in milliseconds.
const MIN_INTERVAL_MS: u64 = 10;
/// Maximum interval of `stat -I`, in milliseconds (one day).
const MAX_INTERVAL_MS: u64 = 86_400_000;
/// Exclusive upper bound of vCPU indices in a list.
const MAX_VCPU: u32 = 1024;

/// Error returned when an option value is invalid. The caller prefixes the message with the option
/// and the value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseValueError {
    #[error("must be a number of bytes, or a number followed by K, M, G or T, for example 512M")]
    Size,
    #[error("does not fit into 64 bits")]
    SizeTooLarge,
    #[error("must be a whole number between {from} and {to}", to = format_limit(*to))]
    Whole { from: i128, to: i128 },
    #[error("must be vCPU numbers and ranges, for example 0,2-3")]
    Vcpus,
    #[error("must be a number of seconds above 0, for example 2.5")]
    Seconds,
    #[error("must be a number of milliseconds between {MIN_INTERVAL_MS} and {MAX_INTERVAL_MS}")]
    Interval,
    #[error("must not be empty")]
    Empty,
    #[error("must be a percentage between 0 and 100")]
    Percent,
    #[error("unknown column '{0}'; known are {known}", known = SortKey::NAMES)]
    SortKey(String),
    #[error("unknown label '{0}'; known are task, event, vcpu and pid")]
    Label(String),
    #[error(
        "cannot write a recording to standard output, because it is not written sequentially; name a file"
    )]
    RecordingOnStdout,
}

/// Formats a limit of an option value. A large limit just below a power of two is formatted as `2^N
/// - 1`.
fn format_limit(limit: i128) -> String {
    let power = limit.cast_unsigned() + 1;
    if limit > 9_999_999 && power.is_power_of_two() {
        format!("2^{} - 1", power.trailing_zeros())
    } else {
        limit.to_string()
    }
}

/// Returns a parser of integers in a range.
pub fn integer_in_range<T>(
    range: RangeInclusive<T>,
) -> impl Fn(&str) -> Result<T, ParseValueError> + Clone + Send + Sync + 'static
where
    T: FromStr + PartialOrd + Copy + TryInto<i128> + Send + Sync + 'static,
{
    let limit = |limit: T| limit.try_into().unwrap_or(i128::MAX);
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        number.ok_or(ParseValueError::Whole {
            from: limit(*range.start()),
            to: limit(*range.end()),
        })
    }
}

/// Parses a size in bytes: a number with an optional suffix K, M, G or T.
pub fn parse_bytes(text: &str) -> Result<u64, ParseValueError> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        _ => return Err(ParseValueError::Size),
    };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(ParseValueError::Size);
    }
    let number = digits.parse::<u64>().ok();
    let bytes = number.and_then(|n| n.checked_mul(1u64 << shift));
    bytes.ok_or(ParseValueError::SizeTooLarge)
}

/// A list of vCPU indices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VcpuList(pub Vec<u32>);

/// Parses a list of vCPU indices and ranges, such as `0,2-3`.
pub fn parse_vcpus(text: &str) -> Result<VcpuList, ParseValueError> {
    let number = |t: &str| t.trim().parse::<u32>().ok().filter(|n| *n < MAX_VCPU);
    let mut list = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        match (number(first), number(last)) {
            (Some(first), Some(last)) if first <= last => list.extend(first..=last),
            _ => return Err(ParseValueError::Vcpus),
        }
    }
    list.sort_unstable();
    list.dedup();
    Ok(VcpuList(list))
}

/// Parses a duration in seconds.
pub fn parse_seconds(text: &str) -> Result<Duration, ParseValueError> {
    match text.parse::<f64>() {
        Ok(s) if s > 0.0 && s <= 1e8 => Ok(Duration::from_secs_f64(s)),
        _ => Err(ParseValueError::Seconds),
    }
}

/// Parses an interval in milliseconds.
pub fn parse_interval(text: &str) -> Result<Duration, ParseValueError> {
    match text.parse::<u64>() {
        Ok(ms) if (MIN_INTERVAL_MS..=MAX_INTERVAL_MS).contains(&ms) => Ok(Duration::from_millis(ms)),
        _ => Err(ParseValueError::Interval),
    }
}

/// Parses a downtime in milliseconds.
pub fn parse_downtime(text: &str) -> Result<Duration, ParseValueError> {
    integer_in_range(1..=600_000u64)(text).map(Duration::from_millis)
}

/// Parses the field separator of the output. As in perf, `\t` stands for a tab.
pub fn parse_separator(text: &str) -> Result<String, ParseValueError> {
    match text {
        "" => Err(ParseValueError::Empty),
        "\\t" => Ok("\t".into()),
        _ => Ok(text.into()),
    }
}

/// Parses a number within `range`.
pub fn parse_number(text: &str, range: RangeInclusive<f64>) -> Option<f64> {
    text.parse().ok().filter(|number| range.contains(number))
}

/// Parses a percentage.
pub fn parse_percent(text: &str) -> Result<f64, ParseValueError> {
    parse_number(text, 0.0..=100.0).ok_or(ParseValueError::Percent)
}

/// Sort keys of a report.
#[derive(Clone, Debug)]
pub struct SortKeys(pub Vec<SortKey>);

/// Parses the sort keys of a report, such as `comm,dso`.
pub fn parse_sort(text: &str) -> Result<SortKeys, ParseValueError> {
    let key =
        |key: &str| SortKey::from_name(key.trim()).ok_or_else(|| ParseValueError::SortKey(key.to_owned()));
    text.split(',').map(key).collect::<Result<_, _>>().map(SortKeys)
}

/// Labels that a pprof profile attaches to its samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProfileLabels(pub Vec<SampleLabel>);

/// Parses the labels of a profile's samples, such as `task,event`.
pub fn parse_labels(text: &str) -> Result<ProfileLabels, ParseValueError> {
    let label = |name: &str| {
        let found = SampleLabel::ALL
            .into_iter()
            .find(|label| label.name() == name.trim());
        found.ok_or_else(|| ParseValueError::Label(name.to_owned()))
    };
    let named: Vec<SampleLabel> = text.split(',').map(label).collect::<Result<_, _>>()?;
    // Remove duplicate labels.
    Ok(ProfileLabels(
        SampleLabel::ALL
            .into_iter()
            .filter(|label| named.contains(label))
            .collect(),
    ))
}

/// Parses the path of a recording.
pub fn parse_output(text: &str) -> Result<PathBuf, ParseValueError> {
    match text {
        "-" => Err(ParseValueError::RecordingOnStdout),
        _ => Ok(text.into()),
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
