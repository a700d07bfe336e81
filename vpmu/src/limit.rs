//! Rate limit for PMIs, which prevents a guest that requests a PMI after every count from
//! monopolizing its vCPU thread.

/// Default PMI rate limit, in PMIs per second. Chosen above the rate at which guests sample in
/// practice (Linux allows 100,000 samples per second by default and lowers this limit under load)
/// and below the rate that the cost of an exit permits.
pub const DEFAULT_PMI_LIMIT: u32 = 50_000;

const NS_PER_S: u64 = 1_000_000_000;

/// Leaky bucket that limits the rate of an event such as a PMI. The level of the bucket is a time,
/// and is stored as the time at which the bucket becomes empty.
#[derive(Clone, Debug)]
pub(crate) struct RateLimit {
    /// Time that each event adds to the level of the bucket, in nanoseconds.
    interval_ns: u64,
    /// Maximum level of the bucket at which an event is allowed immediately, in nanoseconds.
    burst_ns: u64,
    /// Time at which the bucket becomes empty, in nanoseconds on the caller's monotonic clock.
    paid_until_ns: u64,
}

impl RateLimit {
    /// Creates a limiter for `per_second` events on average (0 counts as 1) and bursts of
    /// `per_second` / 100, but at least 16.
    pub(crate) fn new(per_second: u32) -> Self {
        let interval_ns = NS_PER_S / u64::from(per_second.max(1));
        let burst = u64::from(per_second / 100).max(16);
        Self {
            interval_ns,
            burst_ns: interval_ns * (burst - 1),
            paid_until_ns: 0,
        }
    }

    /// Returns the earliest time at which the next event is allowed, in nanoseconds.
    pub(crate) fn next_ns(&self) -> u64 {
        self.paid_until_ns.saturating_sub(self.burst_ns)
    }

    /// Records an event at `now_ns`.
    pub(crate) fn take(&mut self, now_ns: u64) {
        self.paid_until_ns = self.paid_until_ns.max(now_ns).saturating_add(self.interval_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rate_limit_bounds_events_per_second(
            limit in 1u32..5_000,
            steps in proptest::collection::vec(0u64..2_000_000, 1..2_000),
        ) {
            let mut bucket = RateLimit::new(limit);
            let mut now = 0;
            let mut passed = Vec::new();
            for step in steps {
                now += step;
                if bucket.next_ns() <= now {
                    bucket.take(now);
                    passed.push(now);
                }
            }
            let most = u64::from(limit) + u64::from(limit / 100).max(16) + 1;
            for (i, &start) in passed.iter().enumerate() {
                let within = passed[i..].iter().take_while(|&&t| t < start + NS_PER_S).count() as u64;
                prop_assert!(within <= most, "{within} in one second, limit {limit}");
            }
        }

        #[test]
        fn waiting_until_next_ns_is_sufficient(limit in 1u32..100_000, n in 1usize..500) {
            let mut bucket = RateLimit::new(limit);
            let mut now = 0;
            for _ in 0..n {
                now = bucket.next_ns().max(now);
                prop_assert!(bucket.next_ns() <= now);
                bucket.take(now);
            }
        }
    }

    #[test]
    fn rate_limit_does_not_overflow() {
        let mut bucket = RateLimit::new(0);
        bucket.take(u64::MAX);
        assert!(bucket.next_ns() < u64::MAX);
    }
}
