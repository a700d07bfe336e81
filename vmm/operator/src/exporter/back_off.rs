//! Back-off for VMs that fail to answer scrapes.
//!
//! A VM that fails to answer is skipped for a time that doubles with each failure. The next scrape
//! after this time queries the VM again, but does not wait for the answer.
//!
//! After a VM has stalled, scrapes do not wait for other VMs of the same user either. Otherwise, a
//! user who owns many sockets could stall every scrape with a different one. This rule does not
//! apply to the VMs of root and of the exporter's own user.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use perf_core::guest_log::LogLimiter;

/// Minimum and maximum time for which a VM is skipped after a failure.
const BACK_OFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Minimum and maximum time for which scrapes do not wait for the VMs of a user after one of these
/// VMs has stalled.
const USER_BACK_OFF: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(3600));
/// Maximum number of users whose back-off state is stored.
const MAX_USERS: usize = 4096;
/// Maximum length of a log message about a VM, in characters.
const MAX_LINE: usize = 200;

/// A delay that doubles with each failure.
#[derive(Clone, Copy, Debug, Default)]
struct BackOff {
    failures: u32,
    until: Option<Instant>,
}

impl BackOff {
    fn fail(&mut self, now: Instant, (shortest, longest): (Duration, Duration)) {
        let factor = 1_u32.checked_shl(self.failures).unwrap_or(u32::MAX);
        self.failures = self.failures.saturating_add(1).min(31);
        self.until = Some(now + shortest.saturating_mul(factor).min(longest));
    }

    fn is_over(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now >= until)
    }
}

/// The back-off state of one VM.
#[derive(Debug, Default)]
pub struct ScrapeBackOff(Mutex<BackOff>);

impl ScrapeBackOff {
    /// Returns whether the VM may be queried at `now`.
    pub fn is_due(&self, now: Instant) -> bool {
        lock(&self.0).is_over(now)
    }

    /// Returns whether the last query failed.
    pub fn has_failed(&self) -> bool {
        lock(&self.0).failures > 0
    }

    /// Records that the VM has sent a valid answer.
    pub fn succeeded(&self) {
        *lock(&self.0) = BackOff::default();
    }

    /// Records that the VM has sent no valid answer.
    pub fn failed(&self, now: Instant) {
        lock(&self.0).fail(now, BACK_OFF);
    }
}

/// The back-off state of one user.
#[derive(Debug, Default)]
struct UserBackOff {
    impatience: BackOff,
    log: LogLimiter,
}

/// Back-off states of the users whose VMs the exporter serves.
#[derive(Debug, Default)]
pub struct UserBackOffs(Mutex<HashMap<u32, UserBackOff>>);

impl UserBackOffs {
    /// Records a stall of a VM of user `uid` at `now`.
    pub fn stalled(&self, uid: u32, now: Instant) {
        let mut users = lock(&self.0);
        if let Some(user) = entry(&mut users, uid) {
            // Several stalls within one scrape count as one failure.
            if user.impatience.is_over(now) {
                user.impatience.fail(now, USER_BACK_OFF);
            }
        }
    }

    /// Returns whether a scrape at `now` waits for the VMs of user `uid`.
    pub fn is_waited_for(&self, uid: u32, now: Instant) -> bool {
        lock(&self.0)
            .get(&uid)
            .is_none_or(|user| user.impatience.is_over(now))
    }

    /// Logs a message about a VM of user `uid`. Limits the length, removes control characters and
    /// applies a rate limit per user.
    pub fn warn(&self, uid: u32, label: &str, what: &str) {
        let admitted = {
            let mut users = lock(&self.0);
            entry(&mut users, uid).and_then(|user| user.log.admit(Instant::now()))
        };
        if let Some(admitted) = admitted {
            let more = match admitted.suppressed {
                0 => String::new(),
                lines => format!(" (suppressed {lines} lines about VMs of user {uid})"),
            };
            log::warn!("{label}: {}{more}", shown(what));
        }
    }
}

fn entry(users: &mut HashMap<u32, UserBackOff>, uid: u32) -> Option<&mut UserBackOff> {
    if users.len() >= MAX_USERS && !users.contains_key(&uid) {
        return None;
    }
    Some(users.entry(uid).or_default())
}

/// Returns `text` for a log line: control characters are replaced, and long text is truncated.
pub fn shown(text: &str) -> String {
    let mut characters = text.chars();
    let mut shown: String = characters
        .by_ref()
        .take(MAX_LINE)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    if characters.next().is_some() {
        shown.push('…');
    }
    shown
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failing_vm_backs_off_until_it_answers() {
        let (vm, now) = (ScrapeBackOff::default(), Instant::now());
        assert!(vm.is_due(now) && !vm.has_failed());
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            vm.failed(now);
            assert!(!vm.is_due(now + Duration::from_secs(seconds) - Duration::from_millis(1)));
            assert!(vm.is_due(now + Duration::from_secs(seconds)));
        }
        for _ in 0..100 {
            vm.failed(now);
        }
        assert!(vm.is_due(now + BACK_OFF.1));
        assert!(vm.has_failed());
        vm.succeeded();
        assert!(vm.is_due(now) && !vm.has_failed());
        vm.failed(now);
        assert!(vm.is_due(now + BACK_OFF.0));
    }

    #[test]
    fn stalling_user_is_not_waited_for() {
        let (users, begin) = (UserBackOffs::default(), Instant::now());
        // One scrape every 15 s for an hour. In each, a different VM of the user stalls if the
        // scrape waits for the user's VMs.
        let scrapes = (0..240).map(|n| begin + Duration::from_secs(15 * n));
        let delayed = scrapes.filter(|now| {
            let waited = users.is_waited_for(1000, *now);
            if waited {
                users.stalled(1000, *now);
            }
            waited
        });
        assert!(delayed.count() <= 7);
        assert!(users.is_waited_for(1001, begin));
    }

    #[test]
    fn vm_messages_are_truncated_to_one_line() {
        assert_eq!(shown("a\nb\u{1b}[31m"), "a b [31m");
        let long = shown(&"\u{fc}".repeat(15_000_000));
        assert_eq!(long.chars().count(), MAX_LINE + 1);
    }
}
