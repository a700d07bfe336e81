//! Types that describe the rate limiters of a VM's devices.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A limit of a rate limiter, as a token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TokenBucketLimit {
    /// Capacity, in bytes or operations; 0 for no limit.
    pub size: u64,
    /// Additional tokens at the start, which are never refilled.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub one_time_burst: u64,
    /// Time in which an empty bucket is refilled, in milliseconds; 0 for no limit.
    pub refill_ms: u64,
}

/// A rate limiter of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RateLimiterInfo {
    /// Name of the device, followed by the direction for network devices, such as `disk0` or
    /// `net0-rx`.
    pub name: String,
    /// Limit on bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<TokenBucketLimit>,
    /// Limit on operations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ops: Option<TokenBucketLimit>,
    /// Number of times the limits have paused the device.
    pub throttled: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}
