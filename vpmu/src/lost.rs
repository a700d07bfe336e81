//! Retries of uncounted counters, and accounting of uncounted time.
//!
//! A counter is *uncounted* while the guest has it enabled and no event counts for it. The reason
//! may be that no host counter is free, that the host revoked the host counter or rejects the
//! event, that the event filter denies the event, or that no backing (source of counts) on this
//! host supports it. Temporary failures are retried after [`FIRST_WAIT_NS`] with exponential
//! back-off. Reprogramming or restarting the counter resets the back-off, but a counter whose event
//! the host rejected is never retried before [`FIRST_WAIT_NS`] has passed.

use crate::counter_events::UnavailableReason;
use crate::index::{CounterIndex, MAX_COUNTERS, counters_in};

/// Delay before the first retry of an uncounted counter, in nanoseconds.
const FIRST_WAIT_NS: u64 = 1_000_000;
/// Maximum delay between two retries of an uncounted counter, in nanoseconds.
const MAX_WAIT_NS: u64 = 256_000_000;
/// Minimum interval between two logged warnings about uncounted counters, in nanoseconds.
const LOG_EVERY_NS: u64 = 1_000_000_000;

/// Uncounted time of one counter, and the schedule of its retries.
#[derive(Clone, Copy, Debug, Default)]
struct UncountedState {
    /// Time up to which `uncounted_ns` has been updated, in nanoseconds.
    since_ns: u64,
    /// Time for which the counter was uncounted since its current event was programmed, in
    /// nanoseconds.
    uncounted_ns: u64,
    /// Time of the next retry, in nanoseconds.
    next_ns: u64,
    /// Delay between the previous attempt and the next retry, in nanoseconds.
    wait_ns: u64,
    /// Time at which the host last rejected an event of this counter, in nanoseconds. `None` if the
    /// host has since counted for the counter, or has never rejected an event.
    refused_ns: Option<u64>,
    /// `true` if the current loss needs no log message, because it has been logged or was
    /// suppressed by the log rate limit.
    logged: bool,
}

/// Uncounted counters of one vCPU. All times are in the vCPU's event time.
#[derive(Debug, Default)]
pub(crate) struct UncountedCounters {
    /// Mask of uncounted counters: those that the guest has enabled and for which nothing counts.
    uncounted: u64,
    /// Mask of counters for which a fallback backing (a source of counts other than the preferred
    /// one) is counting.
    fallback: u64,
    /// Mask of uncounted and fallback counters that wait for a retry.
    retrying: u64,
    entries: [UncountedState; MAX_COUNTERS],
    /// Time for which at least one counter was uncounted, in nanoseconds.
    total_ns: u64,
    /// Start of the current interval with uncounted counters, time up to which that interval is
    /// included in the total, and end of the previous interval, in nanoseconds.
    began_ns: u64,
    upto_ns: u64,
    ended_ns: u64,
    /// Number of times that a counter lost its host counter or failed to obtain one.
    times: u64,
    logged_ns: Option<u64>,
    /// Number of losses that were not logged since the last log message.
    unlogged: u32,
}

impl UncountedCounters {
    /// Returns whether any counter waits for a retry.
    #[inline]
    pub fn is_retrying(&self) -> bool {
        self.retrying != 0
    }

    pub fn is_uncounted(&self, counter: CounterIndex) -> bool {
        self.uncounted & counter.mask() != 0
    }

    pub fn is_fallback(&self, counter: CounterIndex) -> bool {
        self.fallback & counter.mask() != 0
    }

    /// Returns the mask of counters that are uncounted, are counted by a fallback, or wait for a
    /// retry.
    #[inline]
    pub fn affected(&self) -> u64 {
        self.uncounted | self.fallback | self.retrying
    }

    /// Returns whether the counter is uncounted and waits for its next retry.
    pub fn waits(&self, counter: CounterIndex) -> bool {
        self.retrying & self.uncounted & counter.mask() != 0
    }

    pub fn any_uncounted(&self) -> bool {
        self.uncounted != 0
    }

    /// Returns the mask of counters whose retry is due, and clears their scheduled retries.
    pub fn take_due(&mut self, now_ns: u64) -> u64 {
        let due = counters_in(self.retrying)
            .filter(|counter| self.entries[counter.slot()].next_ns <= now_ns)
            .fold(0, |due, counter| due | counter.mask());
        self.retrying &= !due;
        due
    }

    /// Returns the time of the next retry of any counter, in nanoseconds, or `None` if none waits.
    pub fn next_try_ns(&self) -> Option<u64> {
        counters_in(self.retrying)
            .map(|counter| self.entries[counter.slot()].next_ns)
            .min()
    }

    /// Marks the counter as uncounted since `since_ns`. Returns `true` if the counter was not
    /// uncounted before.
    pub fn begin(&mut self, counter: CounterIndex, since_ns: u64, now_ns: u64) -> bool {
        self.account(now_ns);
        self.fallback &= !counter.mask();
        if self.is_uncounted(counter) {
            return false;
        }
        let since_ns = since_ns.min(now_ns);
        let entry = &mut self.entries[counter.slot()];
        // Excludes time that the counter's previous uncounted interval already includes.
        entry.uncounted_ns += now_ns - since_ns.max(entry.since_ns).min(now_ns);
        entry.since_ns = now_ns;
        (entry.wait_ns, entry.logged) = (0, false);
        if self.uncounted == 0 {
            (self.began_ns, self.upto_ns) = (now_ns, now_ns);
        }
        // The loss of this counter may precede losses that were detected earlier.
        let from_ns = since_ns.max(self.ended_ns);
        self.total_ns += self.began_ns.saturating_sub(from_ns);
        self.began_ns = self.began_ns.min(from_ns);
        self.uncounted |= counter.mask();
        self.times += 1;
        true
    }

    /// Marks the counter as no longer uncounted, because it is counted again or disabled. Returns
    /// whether it was uncounted.
    pub fn end(&mut self, counter: CounterIndex, now_ns: impl FnOnce() -> u64) -> bool {
        let mask = counter.mask();
        self.retrying &= !mask;
        self.fallback &= !mask;
        if self.uncounted & mask == 0 {
            return false;
        }
        let now_ns = now_ns();
        self.account(now_ns);
        self.uncounted &= !mask;
        if self.uncounted == 0 {
            self.ended_ns = now_ns;
        }
        true
    }

    /// Marks the counter as counted by a fallback backing (a source of counts other than the
    /// preferred one).
    pub fn fall_back(&mut self, counter: CounterIndex, now_ns: u64) {
        let new = !self.is_fallback(counter);
        if new {
            self.times += u64::from(!self.end(counter, || now_ns));
            let entry = &mut self.entries[counter.slot()];
            (entry.wait_ns, entry.logged) = (0, false);
        }
        self.fallback |= counter.mask();
    }

    /// Schedules a retry for the counter after [`FIRST_WAIT_NS`], or after twice the previous
    /// delay.
    pub fn retry(&mut self, counter: CounterIndex, now_ns: u64) {
        let entry = &mut self.entries[counter.slot()];
        entry.wait_ns = match entry.wait_ns {
            0 => FIRST_WAIT_NS,
            wait_ns => (wait_ns * 2).min(MAX_WAIT_NS),
        };
        entry.next_ns = now_ns.saturating_add(entry.wait_ns);
        self.retrying |= counter.mask();
    }

    /// Records that the host rejected the counter's event, and schedules a retry like
    /// [`Self::retry`].
    pub fn record_rejection(&mut self, counter: CounterIndex, now_ns: u64) {
        self.entries[counter.slot()].refused_ns = Some(now_ns);
        self.retry(counter, now_ns);
    }

    /// Records that the host counts for the counter. An earlier rejection then no longer delays the
    /// counter's retries.
    pub fn clear_refusal(&mut self, counter: CounterIndex) {
        self.entries[counter.slot()].refused_ns = None;
    }

    /// Returns whether the host refused the counter less than [`FIRST_WAIT_NS`] ago. If so, marks
    /// the counter as uncounted and schedules a retry. Reads the clock only after a refusal.
    pub fn must_back_off(&mut self, counter: CounterIndex, now_ns: impl FnOnce() -> u64) -> bool {
        let Some(refused_ns) = self.entries[counter.slot()].refused_ns else {
            return false;
        };
        let now_ns = now_ns();
        let soonest_ns = refused_ns.saturating_add(FIRST_WAIT_NS);
        if now_ns >= soonest_ns {
            return false;
        }
        self.begin(counter, now_ns, now_ns);
        self.entries[counter.slot()].next_ns = soonest_ns;
        self.retrying |= counter.mask();
        true
    }

    /// Adds the interval from `since_ns` to `now_ns`, in which the count of an enabled counter is
    /// unknown, to the total uncounted time. Nanoseconds that the total already includes are not
    /// added again, but the total grows by at least 1 ns if no counter is uncounted.
    pub fn add_interval(&mut self, since_ns: u64, now_ns: u64) {
        self.account(now_ns);
        if self.uncounted == 0 {
            let from_ns = since_ns.max(self.ended_ns).min(now_ns);
            self.total_ns += (now_ns - from_ns).max(1);
            self.ended_ns = now_ns;
        } else {
            let from_ns = since_ns.max(self.ended_ns);
            self.total_ns += self.began_ns.saturating_sub(from_ns);
            self.began_ns = self.began_ns.min(from_ns);
        }
    }

    /// Adds the uncounted time up to `now_ns` to the counters and to the total.
    fn account(&mut self, now_ns: u64) {
        for counter in counters_in(self.uncounted) {
            let entry = &mut self.entries[counter.slot()];
            entry.uncounted_ns += now_ns.saturating_sub(entry.since_ns);
            entry.since_ns = entry.since_ns.max(now_ns);
        }
        if self.uncounted != 0 {
            self.total_ns += now_ns.saturating_sub(self.upto_ns);
            self.upto_ns = self.upto_ns.max(now_ns);
        }
    }

    /// Returns the time for which at least one counter was uncounted, in nanoseconds. Reads the
    /// clock only while a counter is uncounted.
    pub fn total_ns(&mut self, now_ns: impl FnOnce() -> u64) -> u64 {
        if self.uncounted != 0 {
            self.account(now_ns());
        }
        self.total_ns
    }

    /// Returns the time for which the counter's current event was uncounted, in nanoseconds. Time
    /// after the last call of [`UncountedCounters::total_ns`] may be missing.
    pub fn of(&self, counter: CounterIndex) -> u64 {
        self.entries[counter.slot()].uncounted_ns
    }

    /// Returns the number of times that a counter lost its host counter or failed to obtain one.
    pub fn times(&self) -> u64 {
        self.times
    }

    /// Resets the counter's uncounted time and retries, because another event is programmed.
    pub fn reset_counter(&mut self, counter: CounterIndex, now_ns: impl FnOnce() -> u64) {
        if self.uncounted & counter.mask() != 0 {
            self.account(now_ns());
        }
        let entry = &mut self.entries[counter.slot()];
        *entry = UncountedState {
            since_ns: entry.since_ns,
            refused_ns: entry.refused_ns,
            ..UncountedState::default()
        };
    }

    /// Logs a warning that a counter is uncounted or uses a fallback, once per loss and at most
    /// once per second.
    pub fn warn(
        &mut self,
        counter: CounterIndex,
        what: &dyn std::fmt::Display,
        lack: UnavailableReason,
        instead: bool,
        now_ns: u64,
    ) {
        if std::mem::replace(&mut self.entries[counter.slot()].logged, true) {
            return;
        }
        if self
            .logged_ns
            .is_some_and(|last| now_ns.saturating_sub(last) < LOG_EVERY_NS)
        {
            self.unlogged = self.unlogged.saturating_add(1);
            return;
        }
        self.logged_ns = Some(now_ns);
        let more = match std::mem::take(&mut self.unlogged) {
            0 => String::new(),
            n => format!(" ({n} more since the last such line)"),
        };
        let so = if instead {
            "the vCPU's clock counts for it meanwhile"
        } else {
            "it is not counted meanwhile, which the event uncounted-ns shows"
        };
        perf_core::guest_log!(
            Warn,
            "counter {counter} ({what}): {lack}; {so}{}{more}",
            remedy(lack)
        );
    }
}

/// Returns the part of a log message that suggests a remedy to the operator. `lack` is the reason
/// why the counter is uncounted. Returns an empty string if there is no remedy.
fn remedy(lack: UnavailableReason) -> &'static str {
    match lack {
        UnavailableReason::NoSlot => {
            "; events of the operator that share the counters can be closed, or put behind the guest's by 'share guest-first'"
        }
        UnavailableReason::Busy | UnavailableReason::Taken => {
            "; pinned events of perf on the host, or its NMI watchdog (sysctl kernel.nmi_watchdog), may hold it"
        }
        UnavailableReason::Refused(libc::EMFILE | libc::ENFILE) => {
            "; raise the limit of open files (ulimit -n)"
        }
        UnavailableReason::Refused(libc::EACCES | libc::EPERM) => {
            "; lower kernel.perf_event_paranoid to 1, or grant CAP_PERFMON"
        }
        UnavailableReason::Refused(libc::EOPNOTSUPP | libc::EBUSY) => {
            "; a VM with KVM's mediated vPMU may hold the host's PMU: end it, or load kvm_intel or kvm_amd with enable_mediated_pmu=0"
        }
        UnavailableReason::Refused(libc::ENODEV | libc::ENOENT) => {
            "; the host's PMU has no such event any more"
        }
        UnavailableReason::Refused(libc::ENOMEM | libc::ENOSPC) => {
            "; the host's kernel is short of memory or counters"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn counter(n: u32) -> CounterIndex {
        CounterIndex::from_bit(n).unwrap()
    }

    /// Intervals with an unknown count may overlap. Each nanosecond is added to the total uncounted
    /// time only once.
    #[test]
    fn interval_with_unknown_count_is_added_once() {
        let mut lost = UncountedCounters::default();
        lost.add_interval(100, 150);
        lost.add_interval(120, 170);
        assert_eq!(lost.total_ns(|| 200), 70);
        // An uncounted counter covers the interval, except for the part before it became uncounted.
        assert!(lost.begin(counter(0), 300, 300));
        lost.add_interval(290, 340);
        assert_eq!(lost.total_ns(|| 400), 70 + 10 + 100);
        assert!(lost.end(counter(0), || 400));
        // An interval of length 0 still adds 1 ns, so the loss is visible.
        lost.add_interval(400, 400);
        assert_eq!(lost.total_ns(|| 500), 181);
    }

    /// Time in which two counters are uncounted is added to the total uncounted time only once.
    #[test]
    fn time_with_any_counter_uncounted_is_counted_once() {
        let mut lost = UncountedCounters::default();
        assert!(lost.begin(counter(0), 100, 100));
        assert!(!lost.begin(counter(0), 150, 150));
        assert!(lost.begin(counter(1), 180, 200));
        assert!(lost.end(counter(0), || 300));
        assert_eq!(lost.total_ns(|| 400), 300);
        assert_eq!((lost.of(counter(0)), lost.of(counter(1))), (200, 220));
        assert!(lost.end(counter(1), || 400) && !lost.end(counter(1), || 500));
        assert_eq!(lost.total_ns(|| 900), 300);
    }

    /// A loss that is detected late counts as uncounted time from the time of the loss. No
    /// nanosecond is counted twice.
    #[test]
    fn late_notices_are_backdated() {
        let mut lost = UncountedCounters::default();
        lost.begin(counter(0), 100, 500);
        assert_eq!(lost.total_ns(|| 500), 400);
        lost.begin(counter(1), 50, 600);
        assert_eq!(lost.total_ns(|| 600), 550);
        lost.end(counter(0), || 700);
        lost.end(counter(1), || 700);
        lost.begin(counter(0), 650, 800);
        assert_eq!((lost.total_ns(|| 800), lost.of(counter(0))), (750, 700));
    }

    #[test]
    fn retry_delay_doubles_up_to_maximum() {
        let mut lost = UncountedCounters::default();
        let mut now_ns = 0;
        let mut waits = Vec::new();
        for _ in 0..12 {
            lost.begin(counter(3), now_ns, now_ns);
            lost.retry(counter(3), now_ns);
            let next_ns = lost.next_try_ns().unwrap();
            assert_eq!(lost.take_due(next_ns - 1), 0);
            assert_eq!(lost.take_due(next_ns), counter(3).mask());
            assert!(!lost.is_retrying());
            waits.push((next_ns - now_ns) / 1_000_000);
            now_ns = next_ns;
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 256, 256, 256, 256]);
    }

    /// Each loss is logged once, and at most one line is logged per second.
    #[test]
    fn loss_warnings_are_rate_limited() {
        let mut lost = UncountedCounters::default();
        let mut logged = |n: u32, now_ns: u64, anew: bool| {
            if anew {
                lost.reset_counter(counter(n), || now_ns);
            }
            lost.warn(counter(n), &"cycles", UnavailableReason::NoSlot, false, now_ns);
            (lost.logged_ns, lost.unlogged)
        };
        assert_eq!(logged(0, 5, false), (Some(5), 0));
        assert_eq!(logged(0, LOG_EVERY_NS * 2, false), (Some(5), 0), "it was told");
        assert_eq!(logged(1, LOG_EVERY_NS + 4, false), (Some(5), 1));
        assert_eq!(logged(0, LOG_EVERY_NS + 4, true), (Some(5), 2));
        // The next line also reports the suppressed losses.
        assert_eq!(logged(2, LOG_EVERY_NS + 5, false), (Some(LOG_EVERY_NS + 5), 0));
    }

    /// The message about a counter whose event the host rejects suggests a fix.
    #[test]
    fn refusal_message_includes_remedy() {
        for (lack, word) in [
            (UnavailableReason::NoSlot, "guest-first"),
            (UnavailableReason::Busy, "nmi_watchdog"),
            (UnavailableReason::Taken, "nmi_watchdog"),
            (UnavailableReason::Refused(libc::EMFILE), "ulimit -n"),
            (UnavailableReason::Refused(libc::EACCES), "perf_event_paranoid"),
            (UnavailableReason::Refused(libc::EOPNOTSUPP), "mediated"),
            (UnavailableReason::Refused(libc::ENODEV), "no such event"),
        ] {
            assert!(remedy(lack).contains(word), "{lack:?}: {}", remedy(lack));
        }
        let said = UnavailableReason::Refused(libc::EMFILE).to_string();
        assert!(said.contains("open files"), "{said}");
    }

    proptest! {
        /// The total uncounted time is the number of nanoseconds in which at least one counter is
        /// uncounted.
        #[test]
        fn total_is_the_union(steps in prop::collection::vec((0u32..4, any::<bool>(), 0u64..50), 0..60)) {
            let mut lost = UncountedCounters::default();
            let (mut now_ns, mut on, mut any, mut own) = (0u64, [false; 4], 0u64, [0u64; 4]);
            for (n, begin, passes) in steps {
                if begin {
                    lost.begin(counter(n), now_ns, now_ns);
                } else {
                    lost.end(counter(n), || now_ns);
                }
                on[n as usize] = begin;
                now_ns += passes;
                any += if on.contains(&true) { passes } else { 0 };
                for (own, on) in own.iter_mut().zip(on) {
                    *own += if on { passes } else { 0 };
                }
                prop_assert_eq!(lost.total_ns(|| now_ns), any);
                for (n, own) in own.iter().enumerate() {
                    prop_assert_eq!(lost.of(counter(n as u32)), *own);
                }
            }
        }
    }
}
