//! Rate limiters of disks, network devices and the entropy device.
//!
//! | module | contents |
//! |---|---|
//! | [`bucket`] | the token bucket |
//! | [`limits`] | configuration: `bandwidth=`, `ops=` |
//!
//! A device asks its [`RateLimiter`] before each request ([`RateLimiter::admit`]) and charges the
//! request afterwards ([`RateLimiter::charge`]). If a request is not admitted, the device does not
//! process its queue until the limiter's timer fires. The timer is in the epoll set of the device's
//! thread.

pub mod bucket;
pub mod limits;

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use diagnostics::guest_log;
use vmm_sys_util::timerfd::TimerFd;

use self::bucket::TokenBucket;
use self::limits::{RateLimits, TokenBucketLimits};

/// Minimum time for which a device pauses when a limit is reached.
///
/// Without this pause, a limit that admits many small requests would wake the device's thread for
/// each of them. No bucket becomes full in less than this time, so the pause itself loses no
/// tokens. A bucket that becomes full in a millisecond loses tokens while the timer is late.
const MIN_PAUSE: Duration = Duration::from_millis(1);

/// Change of the limit on bytes or on operations of a running device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RateLimitUpdate {
    /// Keep the limit and the state of its bucket.
    #[default]
    Keep,
    /// Remove the rate limit.
    Remove,
    /// Set a new limit, with a full bucket.
    Replace(TokenBucketLimits),
}

/// A rate limiter for bytes and operations, shared by a device, its thread and the control socket.
/// A device reset does not refill the buckets, so a guest cannot evade the limits with a reset.
#[derive(Debug)]
pub struct RateLimiter {
    /// `true` if at least one limit is set. If `false`, requests are admitted without taking a
    /// lock.
    limited: AtomicBool,
    throttled: AtomicU64,
    timer_fd: RawFd,
    state: Mutex<LimiterState>,
}

#[derive(Debug)]
struct LimiterState {
    bandwidth: Option<TokenBucket>,
    ops: Option<TokenBucket>,
    timer: TimerFd,
    /// Time at which the timer fires, or `None` if it is not armed.
    due: Option<Instant>,
}

impl LimiterState {
    /// Returns the time until both limits admit the next request.
    fn wait(&mut self, now: Instant) -> Duration {
        let buckets = [&mut self.bandwidth, &mut self.ops].into_iter().flatten();
        buckets.map(|bucket| bucket.wait(now)).max().unwrap_or_default()
    }

    /// Arms the timer to fire after `wait`. Returns `false` if the host rejects the timer.
    fn arm(&mut self, wait: Duration, now: Instant) -> bool {
        match self.timer.reset(wait, None) {
            Ok(()) => {
                self.due = Some(now + wait);
                true
            }
            Err(e) => {
                guest_log!(Error, "timerfd_settime: {e}; a rate limit is exceeded");
                false
            }
        }
    }
}

impl RateLimiter {
    /// Creates a rate limiter with full buckets.
    ///
    /// # Errors
    /// Returns the error of `timerfd_create(2)`.
    pub fn new(limits: RateLimits) -> io::Result<Self> {
        let timer = TimerFd::new().map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
        let now = Instant::now();
        let bucket = |limits: Option<TokenBucketLimits>| limits.map(|limits| TokenBucket::new(limits, now));
        Ok(Self {
            limited: AtomicBool::new(!limits.is_unlimited()),
            throttled: AtomicU64::new(0),
            timer_fd: timer.as_raw_fd(),
            state: Mutex::new(LimiterState {
                bandwidth: bucket(limits.bandwidth),
                ops: bucket(limits.ops),
                timer,
                due: None,
            }),
        })
    }

    fn state(&self) -> MutexGuard<'_, LimiterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the next request is admitted. If not, arms the timer, and the caller must
    /// call this function again when the timer fires.
    pub fn admit(&self) -> bool {
        !self.limited.load(Ordering::Acquire) || self.admit_at(Instant::now())
    }

    fn admit_at(&self, now: Instant) -> bool {
        let mut state = self.state();
        if state.due.is_some_and(|due| now < due) {
            return false;
        }
        state.due = None;
        let wait = state.wait(now);
        if wait.is_zero() || !state.arm(wait.max(MIN_PAUSE), now) {
            return true;
        }
        self.throttled.fetch_add(1, Ordering::Relaxed);
        false
    }

    /// Charges an operation that has transferred `bytes` bytes to both limits.
    pub fn charge(&self, bytes: u64) {
        if self.limited.load(Ordering::Acquire) {
            let now = Instant::now();
            let state = &mut *self.state();
            for (bucket, cost) in [(&mut state.bandwidth, bytes), (&mut state.ops, 1)] {
                if let Some(bucket) = bucket {
                    bucket.charge(cost, now);
                }
            }
        }
    }

    /// Handles an event of the timer. The event may be stale, because the timer may have been armed
    /// again since it fired.
    pub fn handle_timer(&self) {
        let mut state = self.state();
        if state.due.is_none_or(|due| Instant::now() >= due) {
            state.due = None;
            // Clear the timer instead of reading it, because a read may block.
            if let Err(e) = state.timer.clear() {
                guest_log!(Error, "timerfd_settime: {e}");
            }
        }
    }

    /// Changes the limits. A device that has paused because of the old limits immediately checks
    /// the new ones.
    pub fn change(&self, bandwidth: RateLimitUpdate, ops: RateLimitUpdate) {
        let now = Instant::now();
        let state = &mut *self.state();
        for (change, bucket) in [(bandwidth, &mut state.bandwidth), (ops, &mut state.ops)] {
            match change {
                RateLimitUpdate::Keep => {}
                RateLimitUpdate::Remove => *bucket = None,
                RateLimitUpdate::Replace(limits) => *bucket = Some(TokenBucket::new(limits, now)),
            }
        }
        let limited = state.bandwidth.is_some() || state.ops.is_some();
        self.limited.store(limited, Ordering::Release);
        if state.due.is_some() {
            // Arm the timer with 1 ns, because zero would disarm it.
            state.arm(Duration::from_nanos(1), now);
        }
    }

    /// Returns the current limits.
    pub fn limits(&self) -> RateLimits {
        let state = self.state();
        RateLimits {
            bandwidth: state.bandwidth.as_ref().map(TokenBucket::limits),
            ops: state.ops.as_ref().map(TokenBucket::limits),
        }
    }

    /// Returns the number of times that the device has paused because of a limit.
    pub fn throttled(&self) -> u64 {
        self.throttled.load(Ordering::Relaxed)
    }
}

/// Provides the timer's file descriptor for the epoll set of the device's thread.
impl AsRawFd for RateLimiter {
    fn as_raw_fd(&self) -> RawFd {
        self.timer_fd
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

    use super::*;

    fn limiter(limits: &str) -> RateLimiter {
        RateLimiter::new(limits.parse().unwrap()).unwrap()
    }

    /// Waits for the timer in the same way as the device's thread. Returns whether the timer fires
    /// in time.
    fn fires(limiter: &RateLimiter, within: Duration) -> bool {
        let epoll = Epoll::new().unwrap();
        let event = EpollEvent::new(EventSet::IN, 0);
        let add = ControlOperation::Add;
        epoll.ctl(add, limiter.as_raw_fd(), event).unwrap();
        let timeout = within.as_millis().try_into().unwrap();
        epoll.wait(timeout, &mut [event]).unwrap() == 1
    }

    #[test]
    fn exhausted_bucket_arms_the_timer_once() {
        let limiter = limiter("ops=2/100");
        for _ in 0..2 {
            assert!(limiter.admit());
            limiter.charge(u64::MAX);
        }
        for _ in 0..1000 {
            assert!(!limiter.admit());
        }
        assert_eq!(
            limiter.throttled(),
            1,
            "the queue is paused, not asked repeatedly"
        );
        assert!(fires(&limiter, Duration::from_secs(10)));
        limiter.handle_timer();
        assert!(
            !fires(&limiter, Duration::ZERO),
            "a handled timer does not fire again"
        );
        assert!(limiter.admit());
    }

    /// A stale event does not disarm the timer. An event is stale if the timer has expired and been
    /// armed again before the event is handled.
    #[test]
    fn stale_timer_event_does_not_disarm() {
        let limiter = limiter("bandwidth=1000000/1000");
        limiter.charge(1_001_000);
        assert!(!limiter.admit());
        assert!(fires(&limiter, Duration::from_secs(10)));
        assert!(limiter.admit());
        limiter.charge(100_000);
        assert!(!limiter.admit());
        limiter.handle_timer();
        assert!(fires(&limiter, Duration::from_secs(10)));
    }

    #[test]
    fn changed_limit_wakes_a_paused_device() {
        let limiter = limiter("bandwidth=1/86400000,ops=5/1000");
        limiter.charge(1_000_000);
        assert!(!limiter.admit());
        let limits = TokenBucketLimits {
            size: 10.try_into().unwrap(),
            one_time_burst: 0,
            refill_ms: 1000.try_into().unwrap(),
        };
        limiter.change(RateLimitUpdate::Replace(limits), RateLimitUpdate::Keep);
        assert!(fires(&limiter, Duration::from_secs(10)));
        limiter.handle_timer();
        assert!(limiter.admit());
        let now = limiter.limits();
        assert_eq!(now.bandwidth, Some(limits));
        assert_eq!(now.ops.map(|ops| ops.size.get()), Some(5));
        limiter.change(RateLimitUpdate::Remove, RateLimitUpdate::Remove);
        limiter.charge(u64::MAX);
        assert!(limiter.admit() && limiter.limits().is_unlimited());
    }

    #[test]
    fn unlimited_device_is_never_paused() {
        let limiter = RateLimiter::new(RateLimits::default()).unwrap();
        for _ in 0..1000 {
            limiter.charge(u64::MAX);
            assert!(limiter.admit());
        }
        assert_eq!(limiter.throttled(), 0);
    }
}
