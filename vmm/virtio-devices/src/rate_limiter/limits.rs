//! Rate limiter configuration, as given in device options.

use std::num::NonZeroU64;
use std::str::FromStr;

/// Number of nanoseconds in a millisecond.
const NS_PER_MS: u64 = 1_000_000;

/// Limits of a token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBucketLimits {
    /// Capacity of the token bucket, in tokens.
    pub size: NonZeroU64,
    /// Number of initial tokens in addition to `size`. These tokens are never refilled.
    pub one_time_burst: u64,
    /// Time in which an empty bucket is filled, in milliseconds.
    pub refill_ms: NonZeroU64,
}

impl TokenBucketLimits {
    /// Returns the time in which an empty bucket is filled, in nanoseconds. Saturates at 584 years.
    pub(super) fn refill_ns(self) -> u64 {
        self.refill_ms.get().saturating_mul(NS_PER_MS)
    }

    /// Parses `SIZE/REFILL_MS[+BURST]`, where sizes may end in K, M or G.
    fn parse(text: &str) -> Option<Self> {
        let (size, rest) = text.split_once('/')?;
        let (refill, burst) = match rest.split_once('+') {
            Some((refill, burst)) => (refill, parse_tokens(burst)?),
            None => (rest, 0),
        };
        Some(Self {
            size: NonZeroU64::new(parse_tokens(size)?)?,
            one_time_burst: burst,
            refill_ms: NonZeroU64::new(parse_number(refill)?)?,
        })
    }
}

fn parse_number(text: &str) -> Option<u64> {
    // Accept only digits, because the standard library also parses a plus sign.
    let is_number = text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|_| is_number)
}

fn parse_tokens(text: &str) -> Option<u64> {
    let units = [('K', 1 << 10), ('M', 1 << 20), ('G', 1 << 30)];
    for (unit, factor) in units {
        if let Some(number) = text.strip_suffix(unit) {
            return parse_number(number)?.checked_mul(factor);
        }
    }
    parse_number(text)
}

/// Rate limits of a device or of one direction. `None` means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Limit on the number of transferred bytes.
    pub bandwidth: Option<TokenBucketLimits>,
    /// Limit on the number of operations. An operation is a request or a frame.
    pub ops: Option<TokenBucketLimits>,
}

/// Error returned when a rate limiter option is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RateLimitParseError {
    /// The value of a rate limit is malformed, zero or out of range.
    #[error(
        "{0}={1}: must be SIZE/MILLISECONDS[+BURST] with a size and a time of at least 1, for \
         example 10M/1000"
    )]
    Value(&'static str, String),
    /// The named option is repeated.
    #[error("'{0}' is given twice")]
    Twice(&'static str),
    /// The rate limit contains an unknown option.
    #[error("unknown option '{0}'; must be bandwidth=BYTES/MILLISECONDS[+BURST], ops=N/MILLISECONDS[+BURST]")]
    Unknown(String),
}

impl RateLimits {
    /// Returns whether there is neither a limit on bytes nor one on operations.
    pub fn is_unlimited(&self) -> bool {
        *self == Self::default()
    }

    /// Sets the limit on bytes (`bandwidth=`) to `value`. Error messages call the option `name`.
    ///
    /// # Errors
    /// Returns a [`RateLimitParseError`] if the value is invalid or the limit is already set.
    pub fn set_bandwidth(&mut self, name: &'static str, value: &str) -> Result<(), RateLimitParseError> {
        set(&mut self.bandwidth, name, value)
    }

    /// Sets the limit on operations (`ops=`) to `value`. Error messages call the option `name`.
    ///
    /// # Errors
    /// Returns a [`RateLimitParseError`] if the value is invalid or the limit is already set.
    pub fn set_ops(&mut self, name: &'static str, value: &str) -> Result<(), RateLimitParseError> {
        set(&mut self.ops, name, value)
    }
}

/// Parses the options `bandwidth=` and `ops=`, separated by a comma.
impl FromStr for RateLimits {
    type Err = RateLimitParseError;

    fn from_str(text: &str) -> Result<Self, RateLimitParseError> {
        let mut limits = Self::default();
        for word in text.split(',') {
            match word.split_once('=') {
                Some(("bandwidth", value)) => limits.set_bandwidth("bandwidth", value)?,
                Some(("ops", value)) => limits.set_ops("ops", value)?,
                _ => return Err(RateLimitParseError::Unknown(word.to_owned())),
            }
        }
        Ok(limits)
    }
}

fn set(
    limit: &mut Option<TokenBucketLimits>,
    name: &'static str,
    value: &str,
) -> Result<(), RateLimitParseError> {
    let limits =
        TokenBucketLimits::parse(value).ok_or_else(|| RateLimitParseError::Value(name, value.to_owned()))?;
    match limit.replace(limits) {
        None => Ok(()),
        Some(_) => Err(RateLimitParseError::Twice(name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_parsed() {
        let of = |text| {
            TokenBucketLimits::parse(text).map(|of| (of.size.get(), of.refill_ms.get(), of.one_time_burst))
        };
        assert_eq!(of("1000/100"), Some((1000, 100, 0)));
        assert_eq!(of("10M/1000+1G"), Some((10 << 20, 1000, 1 << 30)));
        assert_eq!(of("4K/1+0"), Some((4096, 1, 0)));
        let largest = format!("{0}/{0}+{0}", u64::MAX);
        assert_eq!(of(&largest), Some((u64::MAX, u64::MAX, u64::MAX)));
        for bad in [
            "",
            "1",
            "1/",
            "/1",
            "0/1",
            "1/0",
            "1/1+",
            "+1/1",
            "1/+1",
            "1/1+1+1",
            "1/1K",
            "-1/1",
            "1k/1",
            "17179869184G/1",
            "18446744073709551616/1",
        ] {
            assert_eq!(of(bad), None, "{bad}");
        }
    }

    #[test]
    fn repeated_limit_is_rejected() {
        assert!(RateLimits::default().is_unlimited());
        let limits: RateLimits = "ops=1/1,bandwidth=2/1".parse().unwrap();
        assert_eq!(limits.ops.unwrap().size.get(), 1);
        let error = |text: &str| text.parse::<RateLimits>().unwrap_err();
        assert_eq!(error("ops=1/1,ops=2/1"), RateLimitParseError::Twice("ops"));
        assert_eq!(error("ops=1/1,"), RateLimitParseError::Unknown(String::new()));
    }
}
