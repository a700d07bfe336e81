//! Token bucket, the mechanism behind a rate limit. The caller passes the current time to each
//! method.

use std::time::{Duration, Instant};

use super::limits::TokenBucketLimits;

/// A token bucket.
///
/// A request is admitted while the bucket contains a token, and its cost is charged afterwards. If
/// the cost exceeds the tokens in the bucket, the rest becomes a debt, which later tokens repay
/// first. A request may therefore cost more than the size of the bucket.
///
/// In any interval, the total cost of all requests except the last one is at most the size of the
/// bucket, plus the one-time burst, plus the tokens that are added in the interval.
#[derive(Clone, Debug)]
pub struct TokenBucket {
    limits: TokenBucketLimits,
    /// Remaining tokens of the one-time burst, which are used before `tokens` and never refilled.
    burst: u64,
    tokens: u64,
    /// Number of tokens owed. Greater than zero only if `burst` and `tokens` are 0.
    debt: u64,
    /// Accumulated fraction of the next token, in units of 1/`refill_ns` token.
    fraction: u64,
    /// Time up to which tokens have been added.
    updated: Instant,
}

impl TokenBucket {
    /// Creates a token bucket that is full.
    pub fn new(limits: TokenBucketLimits, now: Instant) -> Self {
        Self {
            limits,
            burst: limits.one_time_burst,
            tokens: limits.size.get(),
            debt: 0,
            fraction: 0,
            updated: now,
        }
    }

    /// Returns the limits of the bucket.
    pub fn limits(&self) -> TokenBucketLimits {
        self.limits
    }

    /// Adds the tokens for the time since the last call. Adds none if the clock stands still or
    /// goes backwards.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a remainder is below its u64 divisor"
    )]
    fn refill(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.updated);
        self.updated = self.updated.max(now);
        // Both factors are below 2^64, so the sum is below 2^128.
        let units = u128::from(saturated(elapsed.as_nanos())) * u128::from(self.limits.size.get())
            + u128::from(self.fraction);
        let refill_ns = u128::from(self.limits.refill_ns());
        let added = saturated(units / refill_ns);
        self.fraction = (units % refill_ns) as u64;
        let repaid = added.min(self.debt);
        self.debt -= repaid;
        self.tokens = self.tokens.saturating_add(added - repaid);
        if self.tokens >= self.limits.size.get() {
            self.tokens = self.limits.size.get();
            self.fraction = 0;
        }
    }

    /// Returns the time until the next request is admitted. Returns zero if a request is admitted
    /// now.
    pub fn wait(&mut self, now: Instant) -> Duration {
        self.refill(now);
        if self.burst > 0 || self.tokens > 0 {
            return Duration::ZERO;
        }
        // The product is below 2^128, and above `fraction`, which is less than one token.
        let units = (u128::from(self.debt) + 1) * u128::from(self.limits.refill_ns());
        let units = units - u128::from(self.fraction);
        Duration::from_nanos(saturated(units.div_ceil(u128::from(self.limits.size.get()))))
    }

    /// Charges the cost of an admitted request to the bucket.
    pub fn charge(&mut self, cost: u64, now: Instant) {
        self.refill(now);
        let from_burst = cost.min(self.burst);
        self.burst -= from_burst;
        let cost = cost - from_burst;
        let from_tokens = cost.min(self.tokens);
        self.tokens -= from_tokens;
        self.debt = self.debt.saturating_add(cost - from_tokens);
    }
}

fn saturated(value: u128) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use proptest::prelude::*;

    use super::*;

    fn bucket(size: u64, burst: u64, refill_ms: u64) -> (TokenBucket, Instant) {
        let now = Instant::now();
        let limits = TokenBucketLimits {
            size: NonZeroU64::new(size).unwrap(),
            one_time_burst: burst,
            refill_ms: NonZeroU64::new(refill_ms).unwrap(),
        };
        (TokenBucket::new(limits, now), now)
    }

    #[test]
    fn burst_is_spent_once_and_before_the_tokens() {
        let (mut bucket, start) = bucket(10, 5, 1000);
        bucket.charge(15, start);
        assert_eq!(bucket.wait(start), Duration::from_millis(100));
        let later = start + Duration::from_secs(3600);
        bucket.charge(10, later);
        assert_eq!(bucket.wait(later), Duration::from_millis(100));
    }

    /// A request of ten times the bucket size is admitted, and the next request waits until the
    /// debt is repaid.
    #[test]
    fn request_larger_than_the_bucket_delays_the_next_one() {
        let (mut bucket, start) = bucket(100, 0, 1000);
        assert_eq!(bucket.wait(start), Duration::ZERO);
        bucket.charge(1000, start);
        assert_eq!(bucket.wait(start), Duration::from_millis(9010));
    }

    #[test]
    fn clock_that_stands_still_adds_no_tokens() {
        let (mut bucket, start) = bucket(3, 0, 1);
        bucket.charge(3, start);
        let earlier = start.checked_sub(Duration::from_nanos(1)).unwrap();
        for now in [start, earlier, start] {
            assert_ne!(bucket.wait(now), Duration::ZERO);
        }
    }

    /// A token bucket does not lose fractions of tokens. The sustained rate equals the configured
    /// rate, regardless of how often the bucket is refilled.
    #[test]
    fn fractions_of_tokens_are_kept() {
        let (mut bucket, start) = bucket(7, 0, 1000);
        bucket.charge(7, start);
        let mut admitted = 0;
        for tick in 1..=1_000_000_u64 {
            let now = start + Duration::from_micros(10 * tick);
            if bucket.wait(now).is_zero() {
                bucket.charge(1, now);
                admitted += 1;
            }
        }
        assert_eq!(admitted, 70, "7 per second for 10 s");
    }

    #[test]
    fn extreme_values_do_not_overflow() {
        let (mut bucket, start) = bucket(u64::MAX, u64::MAX, u64::MAX);
        for _ in 0..5 {
            bucket.charge(u64::MAX, start);
        }
        assert!(bucket.wait(start) > Duration::from_secs(1 << 33));
        let mut now = start;
        for _ in 0..2 {
            now += Duration::from_secs(1 << 40);
            bucket.wait(now);
        }
        assert!(bucket.wait(now).is_zero(), "the debt is at most u64::MAX");
    }

    fn any_size() -> impl Strategy<Value = u64> {
        prop_oneof![1..10_u64, 1..1_000_000_u64, 1..=u64::MAX, Just(u64::MAX)]
    }

    fn any_cost() -> impl Strategy<Value = u64> {
        prop_oneof![0..10_u64, 0..1_000_000_u64, any::<u64>(), Just(u64::MAX)]
    }

    /// Generates intervals between requests, in nanoseconds. They are at most four years, so that
    /// products in the test fit into 128 bits.
    fn any_pause_ns() -> impl Strategy<Value = u64> {
        prop_oneof![Just(0), 0..1_000_u64, 0..10_000_000_000_u64, 0..u64::MAX / 128]
    }

    proptest! {
        /// Between two admitted requests, the total cost of all requests except the last one is at
        /// most the bucket size, plus the one-time burst, plus the tokens added in this time.
        #[test]
        fn no_interval_exceeds_the_limit(
            size in any_size(),
            burst in any_cost(),
            refill_ms in any_size(),
            requests in proptest::collection::vec((any_pause_ns(), any_cost(), any::<bool>()), 1..40),
        ) {
            let (mut bucket, start) = bucket(size, burst, refill_ms);
            let mut now = start;
            let mut admitted: Vec<(Instant, u64)> = Vec::new();
            for (pause, cost, patient) in requests {
                now += Duration::from_nanos(pause);
                let wait = bucket.wait(now);
                if !wait.is_zero() && patient && wait < Duration::from_secs(1 << 28) {
                    let early = now + wait - Duration::from_nanos(1);
                    prop_assert!(!bucket.clone().wait(early).is_zero(), "the wait is the shortest");
                    now += wait;
                    prop_assert!(bucket.wait(now).is_zero(), "the wait is enough");
                } else if !wait.is_zero() {
                    continue;
                }
                bucket.charge(cost, now);
                admitted.push((now, cost));
            }
            let refill_ns = u128::from(refill_ms.saturating_mul(1_000_000));
            for (first, (begin, _)) in admitted.iter().enumerate() {
                let mut before = 0_u128;
                for (end, cost) in &admitted[first..] {
                    let elapsed = end.duration_since(*begin).as_nanos();
                    let refilled = elapsed.saturating_mul(size.into()) / refill_ns;
                    // A token that was partially refilled before the interval may be completed in
                    // it.
                    let limit = u128::from(size) + u128::from(burst) + refilled.saturating_add(1);
                    prop_assert!(before <= limit, "{before} in {elapsed} ns, limit {limit}");
                    before += u128::from(*cost);
                }
            }
        }
    }
}
