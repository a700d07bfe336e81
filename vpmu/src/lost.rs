//! Counters that the guest has enabled and that are not counted: since when, when it is tried again, and how
//! long it was in all.
//!
//! A counter is *uncounted* while the guest has it enabled and nothing counts for it: the host has no counter
//! free, took one away or refuses, the event filter forbids it, or there is nobody on this host who could
//! count such an event. What may pass is tried again, at first after [`FIRST_WAIT_NS`], then after twice as
//! long each time. A guest that programs the counter anew, or stops and starts it, makes that wait short
//! again, but no refusal is followed by another try before [`FIRST_WAIT_NS`] have passed.

use crate::index::{CounterIndex, MAX_COUNTERS, counters_in};
use crate::source::Lack;

/// How soon it is tried for the first time whether a lost place is back.
const FIRST_WAIT_NS: u64 = 1_000_000;
/// The longest time between two such tries.
const LONGEST_WAIT_NS: u64 = 256_000_000;
/// Least time between two warnings.
const LOG_EVERY_NS: u64 = 1_000_000_000;

/// One counter's part.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// While uncounted: accounted up to here.
    since_ns: u64,
    /// Time uncounted since the present event was programmed.
    uncounted_ns: u64,
    /// When it is tried again, and how long it was waited for that.
    next_ns: u64,
    wait_ns: u64,
    /// When the host last had no place for this counter, whatever it was programmed for; `None` since it
    /// counts.
    refused_ns: Option<u64>,
    /// It was said, or would have been but for too many such lines.
    told: bool,
}

/// The uncounted counters of a vCPU. All times are the vCPU's event time.
#[derive(Debug, Default)]
pub(crate) struct Lost {
    /// Counters that are uncounted.
    uncounted: u64,
    /// Counters that somebody else counts than who should.
    fallback: u64,
    /// Counters of either kind that are tried again.
    retrying: u64,
    entries: [Entry; MAX_COUNTERS],
    /// Time in which at least one counter was uncounted.
    total_ns: u64,
    /// When the present stretch of that began, up to where it is in the total, and when the one before
    /// ended.
    began_ns: u64,
    upto_ns: u64,
    ended_ns: u64,
    /// How often a counter lost its place or found none.
    times: u64,
    logged_ns: Option<u64>,
    /// Changes that were not logged since.
    unlogged: u32,
}

impl Lost {
    /// Whether there is anything to try again.
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

    /// Counters of which there is anything to be said.
    #[inline]
    pub fn concerned(&self) -> u64 {
        self.uncounted | self.fallback | self.retrying
    }

    /// Whether the counter waits for a try whose time has not come.
    pub fn waits(&self, counter: CounterIndex) -> bool {
        self.retrying & self.uncounted & counter.mask() != 0
    }

    pub fn any_uncounted(&self) -> bool {
        self.uncounted != 0
    }

    /// Counters whose next try is due. They no longer wait.
    pub fn take_due(&mut self, now_ns: u64) -> u64 {
        let due = counters_in(self.retrying)
            .filter(|counter| self.entries[counter.slot()].next_ns <= now_ns)
            .fold(0, |due, counter| due | counter.mask());
        self.retrying &= !due;
        due
    }

    /// When the next try is due.
    pub fn next_try_ns(&self) -> Option<u64> {
        counters_in(self.retrying)
            .map(|counter| self.entries[counter.slot()].next_ns)
            .min()
    }

    /// The counter is uncounted since `since_ns`, or still. Returns whether that is new.
    pub fn begin(&mut self, counter: CounterIndex, since_ns: u64, now_ns: u64) -> bool {
        self.account(now_ns);
        self.fallback &= !counter.mask();
        if self.is_uncounted(counter) {
            return false;
        }
        let since_ns = since_ns.min(now_ns);
        let entry = &mut self.entries[counter.slot()];
        // Never before the end of its last stretch.
        entry.uncounted_ns += now_ns - since_ns.max(entry.since_ns).min(now_ns);
        entry.since_ns = now_ns;
        (entry.wait_ns, entry.told) = (0, false);
        if self.uncounted == 0 {
            (self.began_ns, self.upto_ns) = (now_ns, now_ns);
        }
        // It may have been lost before those that were found to be lost before it.
        let from_ns = since_ns.max(self.ended_ns);
        self.total_ns += self.began_ns.saturating_sub(from_ns);
        self.began_ns = self.began_ns.min(from_ns);
        self.uncounted |= counter.mask();
        self.times += 1;
        true
    }

    /// The counter is counted, or disabled. Returns whether it was uncounted until now.
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

    /// Somebody else counts for the counter from now on, or still.
    pub fn fall_back(&mut self, counter: CounterIndex, now_ns: u64) {
        let new = !self.is_fallback(counter);
        if new {
            self.times += u64::from(!self.end(counter, || now_ns));
            let entry = &mut self.entries[counter.slot()];
            (entry.wait_ns, entry.told) = (0, false);
        }
        self.fallback |= counter.mask();
    }

    /// Tries the counter again some time: soon, if it has not been tried yet, else after twice the last wait.
    pub fn retry(&mut self, counter: CounterIndex, now_ns: u64) {
        let entry = &mut self.entries[counter.slot()];
        entry.wait_ns = match entry.wait_ns {
            0 => FIRST_WAIT_NS,
            wait_ns => (wait_ns * 2).min(LONGEST_WAIT_NS),
        };
        entry.next_ns = now_ns.saturating_add(entry.wait_ns);
        self.retrying |= counter.mask();
    }

    /// The host has no place for the counter: it is tried again as [`Self::retry`] says.
    pub fn refused(&mut self, counter: CounterIndex, now_ns: u64) {
        self.entries[counter.slot()].refused_ns = Some(now_ns);
        self.retry(counter, now_ns);
    }

    /// The host has a place for the counter.
    pub fn placed(&mut self, counter: CounterIndex) {
        self.entries[counter.slot()].refused_ns = None;
    }

    /// Whether the host refused the counter just now, so that it is not tried before some time has passed. It
    /// is uncounted until then. The clock is looked at only after a refusal.
    pub fn is_too_soon(&mut self, counter: CounterIndex, now_ns: impl FnOnce() -> u64) -> bool {
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

    /// Brings all sums up to `now_ns`.
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

    /// Time in which at least one counter was uncounted. The clock is looked at only while one is.
    pub fn total_ns(&mut self, now_ns: impl FnOnce() -> u64) -> u64 {
        if self.uncounted != 0 {
            self.account(now_ns());
        }
        self.total_ns
    }

    /// Time the counter's present event was uncounted, as of the last [`Lost::total_ns`].
    pub fn of(&self, counter: CounterIndex) -> u64 {
        self.entries[counter.slot()].uncounted_ns
    }

    /// How often a counter lost its place, or found none.
    pub fn times(&self) -> u64 {
        self.times
    }

    /// The counter is programmed for another event.
    pub fn forget(&mut self, counter: CounterIndex, now_ns: impl FnOnce() -> u64) {
        if self.uncounted & counter.mask() != 0 {
            self.account(now_ns());
        }
        let entry = &mut self.entries[counter.slot()];
        *entry = Entry {
            since_ns: entry.since_ns,
            refused_ns: entry.refused_ns,
            ..Entry::default()
        };
    }

    /// Warns, once for each time and at most once a second, that a counter is not counted, or by somebody
    /// else.
    pub fn warn(
        &mut self,
        counter: CounterIndex,
        what: &dyn std::fmt::Display,
        lack: Lack,
        instead: bool,
        now_ns: u64,
    ) {
        if std::mem::replace(&mut self.entries[counter.slot()].told, true) {
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

/// What the operator can do, if anything.
fn remedy(lack: Lack) -> &'static str {
    match lack {
        Lack::NoSlot => {
            "; events of the operator that share the counters can be closed, or put behind the guest's by 'share guest-first'"
        }
        Lack::Busy | Lack::Taken => {
            "; pinned events of perf on the host, or its NMI watchdog (sysctl kernel.nmi_watchdog), may hold it"
        }
        Lack::Refused(libc::EMFILE | libc::ENFILE) => "; raise the limit of open files (ulimit -n)",
        Lack::Refused(libc::EACCES | libc::EPERM) => {
            "; lower kernel.perf_event_paranoid to 1, or grant CAP_PERFMON"
        }
        Lack::Refused(libc::EOPNOTSUPP | libc::EBUSY) => {
            "; a mediated virtual PMU of another VM may hold the host's"
        }
        Lack::Refused(libc::ENODEV | libc::ENOENT) => "; the host's PMU has no such event any more",
        Lack::Refused(libc::ENOMEM | libc::ENOSPC) => "; the host's kernel is short of memory or counters",
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

    /// Two counters at once are one time, not two; each has its own besides.
    #[test]
    fn time_with_any_counter_uncounted_is_counted_once() {
        let mut lost = Lost::default();
        assert!(lost.begin(counter(0), 100, 100));
        assert!(!lost.begin(counter(0), 150, 150));
        assert!(lost.begin(counter(1), 180, 200));
        assert!(lost.end(counter(0), || 300));
        assert_eq!(lost.total_ns(|| 400), 300);
        assert_eq!((lost.of(counter(0)), lost.of(counter(1))), (200, 220));
        assert!(lost.end(counter(1), || 400) && !lost.end(counter(1), || 500));
        assert_eq!(lost.total_ns(|| 900), 300);
    }

    /// A loss that is noticed late counts from when it was; never twice.
    #[test]
    fn late_notices_are_backdated() {
        let mut lost = Lost::default();
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
    fn waits_double_up_to_the_longest() {
        let mut lost = Lost::default();
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

    /// A counter is warned of once for each time that it has no place, and a second has one line.
    #[test]
    fn a_warning_comes_once_a_second_and_once_for_each_time() {
        let mut lost = Lost::default();
        let mut logged = |n: u32, now_ns: u64, anew: bool| {
            if anew {
                lost.forget(counter(n), || now_ns);
            }
            lost.warn(counter(n), &"cycles", Lack::NoSlot, false, now_ns);
            (lost.logged_ns, lost.unlogged)
        };
        assert_eq!(logged(0, 5, false), (Some(5), 0));
        assert_eq!(logged(0, LOG_EVERY_NS * 2, false), (Some(5), 0), "it was told");
        assert_eq!(logged(1, LOG_EVERY_NS + 4, false), (Some(5), 1));
        assert_eq!(logged(0, LOG_EVERY_NS + 4, true), (Some(5), 2));
        assert_eq!(
            logged(2, LOG_EVERY_NS + 5, false),
            (Some(LOG_EVERY_NS + 5), 0),
            "those left out are in this line"
        );
    }

    /// What the host says is told with what helps.
    #[test]
    fn a_refusal_comes_with_its_meaning() {
        for (lack, word) in [
            (Lack::NoSlot, "guest-first"),
            (Lack::Busy, "nmi_watchdog"),
            (Lack::Taken, "nmi_watchdog"),
            (Lack::Refused(libc::EMFILE), "ulimit -n"),
            (Lack::Refused(libc::EACCES), "perf_event_paranoid"),
            (Lack::Refused(libc::EOPNOTSUPP), "mediated"),
            (Lack::Refused(libc::ENODEV), "no such event"),
        ] {
            assert!(remedy(lack).contains(word), "{lack:?}: {}", remedy(lack));
        }
        let said = Lack::Refused(libc::EMFILE).to_string();
        assert!(said.contains("open files"), "{said}");
    }

    proptest! {
        /// The time with any counter uncounted is what a clock with a tick for each nanosecond would say.
        #[test]
        fn total_is_the_union(steps in prop::collection::vec((0u32..4, any::<bool>(), 0u64..50), 0..60)) {
            let mut lost = Lost::default();
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
