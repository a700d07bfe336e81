//! Shows and changes the rate limiters of the devices for control clients.

use std::num::NonZeroU64;
use std::sync::Arc;

use control_api::protocol::{RequestError, RequestErrorKind};
use control_api::rate_limit::{RateLimiterInfo, TokenBucketLimit};
use virtio_devices::rate_limiter::limits::TokenBucketLimits;
use virtio_devices::rate_limiter::{RateLimitUpdate, RateLimiter};

use super::session::fail;

/// Rate limiters of a VM's devices, each with its name.
pub type NamedLimiters = Vec<(String, Arc<RateLimiter>)>;

/// Returns descriptions of all rate limiters.
pub(super) fn describe(limiters: &NamedLimiters) -> Vec<RateLimiterInfo> {
    let limit = |limits: TokenBucketLimits| TokenBucketLimit {
        size: limits.size.get(),
        one_time_burst: limits.one_time_burst,
        refill_ms: limits.refill_ms.get(),
    };
    let infos = limiters.iter().map(|(name, limiter)| {
        let limits = limiter.limits();
        RateLimiterInfo {
            name: name.clone(),
            bandwidth: limits.bandwidth.map(limit),
            ops: limits.ops.map(limit),
            throttled: limiter.throttled(),
        }
    });
    infos.collect()
}

/// Changes the limits of the rate limiter `name`.
pub(super) fn change(
    limiters: &NamedLimiters,
    name: &str,
    bandwidth: Option<TokenBucketLimit>,
    ops: Option<TokenBucketLimit>,
) -> Result<(), RequestError> {
    let Some((_, limiter)) = limiters.iter().find(|(other, _)| other == name) else {
        let names: Vec<&str> = limiters.iter().map(|(name, _)| name.as_str()).collect();
        let names = if names.is_empty() {
            "none".to_owned()
        } else {
            names.join(", ")
        };
        let name: String = name.chars().filter(char::is_ascii_graphic).take(40).collect();
        return fail(
            RequestErrorKind::Invalid,
            format!("no rate limiter '{name}'; the VM has: {names} (vhost-net has none)"),
        );
    };
    limiter.change(limit_change(bandwidth), limit_change(ops));
    Ok(())
}

fn limit_change(limit: Option<TokenBucketLimit>) -> RateLimitUpdate {
    let Some(limit) = limit else {
        return RateLimitUpdate::Keep;
    };
    match (NonZeroU64::new(limit.size), NonZeroU64::new(limit.refill_ms)) {
        (Some(size), Some(refill_ms)) => RateLimitUpdate::Replace(TokenBucketLimits {
            size,
            one_time_burst: limit.one_time_burst,
            refill_ms,
        }),
        _ => RateLimitUpdate::Remove,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_replaced_removed_and_kept() {
        let limiter = RateLimiter::new("bandwidth=1/1,ops=2/2+2".parse().unwrap()).unwrap();
        let limiters = vec![("disk0".to_owned(), Arc::new(limiter))];
        let limit = |size, refill_ms| {
            Some(TokenBucketLimit {
                size,
                one_time_burst: 0,
                refill_ms,
            })
        };
        change(&limiters, "disk0", limit(10, 100), None).unwrap();
        let info = describe(&limiters).remove(0);
        assert_eq!((info.name.as_str(), info.throttled), ("disk0", 0));
        assert_eq!(
            (info.bandwidth, info.ops.unwrap().one_time_burst),
            (limit(10, 100), 2)
        );
        for nothing in [limit(0, 100), limit(10, 0)] {
            change(&limiters, "disk0", limit(1, 1), nothing).unwrap();
            let info = describe(&limiters).remove(0);
            assert_eq!((info.bandwidth, info.ops), (limit(1, 1), None));
        }
        let refused = change(&limiters, "disk1", None, None).unwrap_err();
        assert_eq!(refused.kind, RequestErrorKind::Invalid);
        assert!(refused.message.contains("the VM has: disk0"), "{refused}");
    }
}
