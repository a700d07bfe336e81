//! A limit on the rate of PMIs, so that a guest which asks for one after every count cannot occupy its vCPU
//! thread.

/// PMIs per second when the user does not say: more than any guest's own limit (Linux samples at most 100,000
/// times a second by default and reduces that itself), less than what an exit costs allows.
pub const DEFAULT_PMI_LIMIT: u32 = 50_000;

const NS_PER_S: u64 = 1_000_000_000;

/// A leaky bucket over nanoseconds of a monotonic clock.
#[derive(Clone, Debug)]
pub(crate) struct RateLimit {
    /// Nanoseconds one event uses up.
    interval_ns: u64,
    /// How far ahead of the clock the bucket may be filled.
    burst_ns: u64,
    /// The bucket: when all that has passed will have been paid for.
    paid_until_ns: u64,
}

impl RateLimit {
    /// At most `per_second` events in the long run (0 counts as 1), and a hundredth of that, at least 16, at
    /// once.
    pub(crate) fn new(per_second: u32) -> Self {
        let interval_ns = NS_PER_S / u64::from(per_second.max(1));
        let burst = u64::from(per_second / 100).max(16);
        Self {
            interval_ns,
            burst_ns: interval_ns * (burst - 1),
            paid_until_ns: 0,
        }
    }

    /// When the next event may pass; not after `now_ns` means now.
    pub(crate) fn next_ns(&self) -> u64 {
        self.paid_until_ns.saturating_sub(self.burst_ns)
    }

    /// An event passes.
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
        fn no_second_lets_more_through_than_the_limit_and_one_burst(
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
        fn whoever_waits_until_told_always_passes(limit in 1u32..100_000, n in 1usize..500) {
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
    fn the_end_of_time_does_not_overflow() {
        let mut bucket = RateLimit::new(0);
        bucket.take(u64::MAX);
        assert!(bucket.next_ns() < u64::MAX);
    }
}
