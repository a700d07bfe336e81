//! The one alarm of a vCPU: takes it out of the guest for the overflows of its clock events, and for looks at its
//! privilege level.
//!
//! Each user of the alarm ([`Slot`]) says when it wants the vCPU out, in time of the wall, which passes at least as fast as
//! the guest's. The host's timer is set for the earliest of them. A user is never rung for late; it may be rung for early,
//! or for somebody else, and looks at its own clock before it believes anything.
//!
//! # When the timer is set
//! Setting it is a system call, and a needless ring is worse: it takes the vCPU out of the guest. What the vCPU's own thread
//! changes takes effect when it enters the guest next ([`VcpuAlarm::before_entry`]), because the guest's clocks stand still
//! until then. That is a guest's PMI handler, from the overflow on:
//!
//! - The counter goes on from 0, with ages to go to its next overflow. The timer has rung, and rings again by itself
//!   [`AGAIN_NS`] later, which is soon enough to see to so distant a time. Nothing is set.
//! - The handler stops the counters. Nobody wants the alarm now. It is left as it is for the next entries, because a handler
//!   will want it again soon. Not so if it is to ring before a handler could be through; and if nobody wants it
//!   within [`ENTRIES_LEFT`] entries, or when it has rung for nobody, it is stopped. After a ring for nobody it is stopped at
//!   once for the next [`STOPS_AT_ONCE`] times: this guest does not stop its counters just to handle a PMI.
//! - The handler starts them again, with a period to go: the timer is set. One system call.
//!
//! What another thread changes takes effect at once, since the guest may run meanwhile.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::timer::{Bell, Timer, monotonic_ns};
use crate::pmu::host::fd::current_tid;

/// How long after a ring the timer rings again by itself, ns.
const AGAIN_NS: u64 = 1_000_000_000;

/// A clock that is read on one processor may be this far behind what the interrupt of another one went by, ns.
const SLACK_NS: u64 = 1_000;

/// An alarm that nobody wants is not left to ring sooner than this, ns: a PMI handler may take that long.
const HANDLER_NS: u64 = 200_000;

/// Entries into the guest for which an alarm that nobody wants is left as it is. A PMI handler exits to write registers, a
/// few times for each counter.
const ENTRIES_LEFT: u32 = 32;

/// How many times an alarm that nobody wants is stopped at once after it has rung for nobody.
const STOPS_AT_ONCE: u32 = 64;

/// Nobody wants it.
const NEVER: u64 = u64::MAX;

/// The users of an alarm, and what the host's timer was told.
#[derive(Debug)]
struct Alarm<B> {
    bell: Option<B>,
    /// When each user wants it; [`NEVER`] also for entries without a user.
    wanted: Vec<u64>,
    free: Vec<usize>,
    /// When the timer rings for the first time after it was set, and then every [`AGAIN_NS`]. `None`: it is stopped.
    set_ns: Option<u64>,
    unwanted: Option<Unwanted>,
    stops_at_once: u32,
}

/// Nobody wants the alarm, and yet the timer was left as it is.
#[derive(Clone, Copy, Debug)]
struct Unwanted {
    /// Looks at it before it is stopped.
    looks: u32,
    /// It had not rung when it was left.
    was_to_ring: bool,
}

impl<B: Bell> Alarm<B> {
    const fn new() -> Self {
        Self {
            bell: None,
            wanted: Vec::new(),
            free: Vec::new(),
            set_ns: None,
            unwanted: None,
            stops_at_once: 0,
        }
    }

    /// A new user, who does not want it yet.
    fn join(&mut self) -> usize {
        let user = self.free.pop().unwrap_or_else(|| {
            self.wanted.push(NEVER);
            self.wanted.len() - 1
        });
        // So that nobody allocates when leaving.
        self.free.reserve(self.wanted.len() - self.free.len());
        user
    }

    fn leave(&mut self, user: usize) {
        self.wanted[user] = NEVER;
        self.free.push(user);
    }

    /// Brings the timer in line with what is wanted; `now_ns` is the time. At most one system call. `at_once`: another look
    /// may be far away. Returns whether there must be one before the guest is entered next.
    fn look(&mut self, now_ns: u64, at_once: bool) -> bool {
        let wanted = self.wanted.iter().copied().min().unwrap_or(NEVER);
        if wanted == NEVER {
            return self.look_unwanted(now_ns, at_once);
        }
        let left = self.unwanted.take();
        let leave = match self.set_ns {
            None => false,
            Some(set) if now_ns + SLACK_NS < set => wanted == set || wanted > set && set - now_ns >= AGAIN_NS,
            Some(set) => {
                if left.is_some_and(|left| left.was_to_ring) {
                    self.stops_at_once = STOPS_AT_ONCE;
                }
                // The ring that comes by itself does, but only once: then the distance is known to be kept.
                !at_once
                    && wanted.saturating_sub(now_ns) >= AGAIN_NS
                    && now_ns + SLACK_NS < set.saturating_add(AGAIN_NS)
            }
        };
        if !leave {
            self.set(wanted);
        }
        false
    }

    fn look_unwanted(&mut self, now_ns: u64, at_once: bool) -> bool {
        let Some(set) = self.set_ns else {
            self.unwanted = None;
            return false;
        };
        let to_ring = now_ns + SLACK_NS < set;
        let stop = match &mut self.unwanted {
            None => {
                self.unwanted = Some(Unwanted {
                    looks: ENTRIES_LEFT,
                    was_to_ring: to_ring,
                });
                let spare = to_ring && self.stops_at_once > 0;
                self.stops_at_once -= u32::from(spare);
                spare
            }
            Some(left) => {
                let in_vain = left.was_to_ring && !to_ring;
                if in_vain {
                    self.stops_at_once = STOPS_AT_ONCE;
                }
                left.looks -= 1;
                in_vain || left.looks == 0
            }
        };
        let rings_soon = if to_ring {
            set - now_ns < HANDLER_NS
        } else {
            now_ns.saturating_add(HANDLER_NS) >= set.saturating_add(AGAIN_NS)
        };
        if stop || rings_soon || at_once {
            self.stop();
            return false;
        }
        true
    }

    fn set(&mut self, at_ns: u64) {
        let Some(bell) = &mut self.bell else { return };
        match bell.set(at_ns, AGAIN_NS) {
            Ok(()) => self.set_ns = Some(at_ns),
            Err(e) => log::warn!("an overflow timer could not be set: {e}"),
        }
    }

    fn stop(&mut self) {
        self.unwanted = None;
        let Some(bell) = &mut self.bell else { return };
        match bell.stop() {
            Ok(()) => self.set_ns = None,
            Err(e) => log::debug!("an overflow timer could not be stopped: {e}"),
        }
    }
}

/// The alarm of one vCPU.
#[derive(Debug)]
pub(super) struct VcpuAlarm {
    tid: i32,
    /// There is something to do before the guest is entered. Written under the lock.
    changed: AtomicBool,
    alarm: Mutex<(Option<i32>, Alarm<Timer>)>,
}

impl VcpuAlarm {
    /// The alarm of the vCPU that thread `tid` runs. It takes its signal from its first user.
    pub(super) fn new(tid: i32) -> Self {
        Self {
            tid,
            changed: AtomicBool::new(false),
            alarm: Mutex::new((None, Alarm::new())),
        }
    }

    /// The vCPU's thread is about to enter the guest. A load where nothing was changed.
    #[inline]
    pub(super) fn before_entry(&self) {
        if self.changed.load(Ordering::Relaxed) {
            self.look();
        }
    }

    #[cold]
    fn look(&self) {
        let (_, alarm) = &mut *self.lock();
        let again = alarm.look(monotonic_ns(), false);
        self.changed.store(again, Ordering::Relaxed);
    }

    /// The guest is not entered for a while: nothing rings until it is.
    pub(super) fn rest(&self) {
        let (_, alarm) = &mut *self.lock();
        if alarm.set_ns.is_some() {
            alarm.stop();
        }
        self.changed.store(true, Ordering::Relaxed);
    }

    fn change(&self, user: usize, at_ns: u64) {
        let (_, alarm) = &mut *self.lock();
        alarm.wanted[user] = at_ns;
        self.has_changed(alarm);
    }

    fn has_changed(&self, alarm: &mut Alarm<Timer>) {
        if current_tid() == self.tid {
            self.changed.store(true, Ordering::Relaxed);
        } else {
            alarm.look(monotonic_ns(), true);
        }
    }

    fn lock(&self) -> MutexGuard<'_, (Option<i32>, Alarm<Timer>)> {
        self.alarm.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One user of a vCPU's alarm.
#[derive(Debug)]
pub(super) struct Slot {
    alarm: Arc<VcpuAlarm>,
    user: usize,
    at_ns: Option<u64>,
}

impl Slot {
    /// A new user of `alarm`, who does not want it yet. `signal` is what the vCPU's thread is taken out of the guest with.
    pub(super) fn open(alarm: &Arc<VcpuAlarm>, signal: i32) -> io::Result<Self> {
        let mut inner = alarm.lock();
        let (known, users) = &mut *inner;
        if *known.get_or_insert(signal) != signal {
            return Err(io::Error::other("the vCPU's alarm has another signal"));
        }
        if users.bell.is_none() {
            users.bell = Some(Timer::open(alarm.tid, signal)?);
        }
        let user = users.join();
        drop(inner);
        Ok(Self {
            alarm: Arc::clone(alarm),
            user,
            at_ns: None,
        })
    }

    /// Wants the vCPU out of the guest `wait_ns` from now, instead of when it wanted that before.
    pub(super) fn set(&mut self, wait_ns: u64) {
        // Never NEVER, and no more than the kernel's signed nanoseconds hold.
        let at_ns = monotonic_ns().saturating_add(wait_ns).min(i64::MAX as u64);
        self.at_ns = Some(at_ns);
        self.alarm.change(self.user, at_ns);
    }

    /// Does not want it any more.
    pub(super) fn cancel(&mut self) {
        if self.at_ns.take().is_some() {
            self.alarm.change(self.user, NEVER);
        }
    }

    /// As [`Slot::cancel`]; what was left of the wait, ns, 0 if that is over.
    pub(super) fn take(&mut self) -> u64 {
        let left_ns = self.at_ns.map_or(0, |at| at.saturating_sub(monotonic_ns()));
        self.cancel();
        left_ns
    }

    /// The vCPU's thread was taken out of the guest: whether that may have been for this user, whose wait is over.
    pub(super) fn rang(&self) -> bool {
        let rang = self.at_ns.is_some_and(|at| monotonic_ns() + SLACK_NS >= at);
        if !rang {
            // It may have rung for nobody.
            self.alarm.has_changed(&mut self.alarm.lock().1);
        }
        rang
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let (_, users) = &mut *self.alarm.lock();
        users.leave(self.user);
        self.alarm.has_changed(users);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;
    /// Further away than anything is soon: a counter of 48 bits that has just overflowed.
    const AGES: u64 = 100_000 * 1_000 * MS;

    /// A host's timer, and how it was used.
    #[derive(Debug, Default)]
    struct Model {
        next_ns: Option<u64>,
        again_ns: u64,
        calls: u32,
    }

    impl Bell for Model {
        fn set(&mut self, at_ns: u64, again_ns: u64) -> io::Result<()> {
            (self.next_ns, self.again_ns) = (Some(at_ns), again_ns);
            self.calls += 1;
            Ok(())
        }
        fn stop(&mut self) -> io::Result<()> {
            self.next_ns = None;
            self.calls += 1;
            Ok(())
        }
    }

    /// A vCPU's thread and its alarm.
    struct Vcpu {
        alarm: Alarm<Model>,
        now_ns: u64,
        changed: bool,
        /// Rings, and those of them while nobody's wait was over.
        rings: u32,
        in_vain: u32,
    }

    impl Vcpu {
        fn new(users: usize) -> Self {
            let mut alarm = Alarm::new();
            alarm.bell = Some(Model::default());
            for user in 0..users {
                assert_eq!(alarm.join(), user);
            }
            Self {
                alarm,
                now_ns: 5 * MS,
                changed: false,
                rings: 0,
                in_vain: 0,
            }
        }

        fn calls(&self) -> u32 {
            self.alarm.bell.as_ref().unwrap().calls
        }

        fn next_ring(&self) -> Option<u64> {
            self.alarm.bell.as_ref().unwrap().next_ns
        }

        fn want(&mut self, user: usize, wait_ns: u64) {
            self.alarm.wanted[user] = self.now_ns + wait_ns;
            self.changed = true;
        }

        fn cancel(&mut self, user: usize) {
            self.alarm.wanted[user] = NEVER;
            self.changed = true;
        }

        /// The guest is entered and leaves again after at most `ns`; whether the alarm took it out before that.
        fn enter(&mut self, ns: u64) -> bool {
            let before = self.calls();
            if self.changed {
                self.changed = self.alarm.look(self.now_ns, false);
            }
            assert!(
                self.calls() <= before + 1,
                "more than one system call in an entry"
            );
            self.must_not_be_late();
            let until = self.now_ns + ns;
            let Some(at) = self.next_ring().filter(|at| *at <= until) else {
                self.now_ns = until;
                return false;
            };
            self.now_ns = self.now_ns.max(at);
            self.ring();
            true
        }

        /// Time passes outside the guest.
        fn work(&mut self, ns: u64) {
            self.now_ns += ns;
            if self.next_ring().is_some_and(|at| at <= self.now_ns) {
                self.ring();
            }
        }

        /// The timer has rung, and its signal is delivered, whereupon its interval begins as often as it takes to be ahead.
        fn ring(&mut self) {
            let bell = self.alarm.bell.as_mut().unwrap();
            let at = bell.next_ns.unwrap();
            let times = (self.now_ns - at) / bell.again_ns + 1;
            bell.next_ns = Some(at + times * bell.again_ns);
            self.rings += 1;
            let earliest = self.alarm.wanted.iter().min().copied().unwrap_or(NEVER);
            self.in_vain += u32::from(earliest > self.now_ns);
            // Whose wait is not over is asked all the same, and says so.
            self.changed |= earliest != NEVER;
        }

        /// Whatever was left out: the timer rings no later than anybody wants it to.
        fn must_not_be_late(&self) {
            let earliest = self.alarm.wanted.iter().min().copied().unwrap_or(NEVER);
            if earliest != NEVER {
                let next = self
                    .next_ring()
                    .expect("somebody waits, and the timer is stopped");
                assert!(
                    next <= earliest.max(self.now_ns),
                    "{next} is later than {earliest}"
                );
            }
        }
    }

    /// A PMI handler: counters off, five more accesses to registers, counters on with `left` to go for each.
    fn handle_pmi(vcpu: &mut Vcpu, left: &[u64]) {
        (0..left.len()).for_each(|user| vcpu.cancel(user));
        for _ in 0..6 {
            assert!(!vcpu.enter(8_000));
        }
        for (user, left) in left.iter().enumerate() {
            vcpu.want(user, *left);
        }
    }

    /// Intel's and PerfMonV2's drivers stop all counters around the handler.
    #[test]
    fn an_overflow_of_a_guest_that_stops_its_counters_meanwhile_is_one_system_call() {
        let mut vcpu = Vcpu::new(1);
        vcpu.want(0, MS);
        for overflows in 1..=1_000 {
            assert!(vcpu.enter(AGES));
            vcpu.want(0, AGES);
            assert!(!vcpu.enter(8_000), "into the handler");
            handle_pmi(&mut vcpu, &[MS]);
            assert_eq!(vcpu.calls(), overflows);
        }
        assert_eq!(vcpu.in_vain, 0);
    }

    /// AMD's driver for the core counters writes the counter while it counts.
    #[test]
    fn an_overflow_of_a_guest_that_leaves_its_counter_on_is_one_system_call() {
        let mut vcpu = Vcpu::new(1);
        vcpu.want(0, MS);
        for overflows in 1..=1_000 {
            assert!(vcpu.enter(AGES));
            vcpu.want(0, AGES);
            assert!(!vcpu.enter(30_000), "into the handler");
            vcpu.want(0, MS);
            assert_eq!(vcpu.calls(), overflows);
        }
        assert_eq!(vcpu.in_vain, 0);
    }

    /// One call for the others while the handler is on its way to stop them, and one when it starts them again, however many
    /// there are.
    #[test]
    fn other_counters_cost_an_overflow_one_system_call_more() {
        for others in [1, 4, 14] {
            let mut vcpu = Vcpu::new(1 + others);
            let rest: Vec<u64> = (0..=others as u64).map(|n| MS + n * 1_700_000).collect();
            rest.iter()
                .enumerate()
                .for_each(|(user, left)| vcpu.want(user, *left));
            for overflows in 1..=1_000 {
                assert!(vcpu.enter(AGES));
                vcpu.want(0, AGES);
                assert!(!vcpu.enter(8_000), "into the handler");
                handle_pmi(&mut vcpu, &rest);
                assert!(vcpu.calls() <= 2 * overflows, "{} for {overflows}", vcpu.calls());
            }
            assert_eq!(vcpu.in_vain, 0);
        }
    }

    /// Linux lets every event that it only counts interrupt when its counter is full, which takes hours.
    #[test]
    fn counters_with_ages_to_go_are_stopped_and_started_without_a_system_call() {
        let mut vcpu = Vcpu::new(2);
        for _ in 0..1_000 {
            vcpu.want(0, AGES);
            vcpu.want(1, AGES);
            assert!(!vcpu.enter(MS));
            vcpu.cancel(0);
            vcpu.cancel(1);
            assert!(!vcpu.enter(20_000));
        }
        assert_eq!((vcpu.calls(), vcpu.rings), (1, 0));
    }

    /// One that overflows now and then is not taken out of the guest every second.
    #[test]
    fn a_counter_that_goes_on_with_ages_to_go_is_left_alone() {
        let mut vcpu = Vcpu::new(1);
        vcpu.want(0, MS);
        assert!(vcpu.enter(AGES));
        vcpu.want(0, AGES);
        assert!(vcpu.enter(AGAIN_NS), "the ring that comes by itself");
        assert!(!vcpu.enter(AGES / 2), "and no other");
        assert_eq!((vcpu.calls(), vcpu.in_vain), (2, 1));
    }

    /// A guest that switches to a task whose events are not counted, for longer than is left of a period, as often as it
    /// likes.
    #[test]
    fn a_guest_that_stops_for_long_is_hardly_ever_rung_for_nothing() {
        let mut vcpu = Vcpu::new(1);
        for _ in 0..1_000 {
            vcpu.want(0, 3 * MS);
            assert!(!vcpu.enter(MS));
            vcpu.cancel(0);
            while vcpu.enter(5 * MS) {}
        }
        assert!(vcpu.in_vain <= 1 + 1_000 / STOPS_AT_ONCE, "{}", vcpu.in_vain);
        assert!(vcpu.calls() <= 2_000);
    }

    #[test]
    fn what_nobody_wants_does_not_ring_for_long() {
        for rung in [false, true] {
            let mut vcpu = Vcpu::new(1);
            vcpu.want(0, 500 * MS);
            assert_eq!(vcpu.enter(if rung { AGES } else { MS }), rung);
            vcpu.cancel(0);
            // No handler takes that many exits.
            for _ in 0..=ENTRIES_LEFT {
                assert!(!vcpu.enter(1_000));
            }
            assert_eq!(vcpu.next_ring(), None);
            assert!(!vcpu.changed, "and then costs an entry nothing");
            assert!(!vcpu.enter(AGES));
            // A guest that does not leave by itself is taken out, once.
            vcpu.want(0, 500 * MS);
            assert_eq!(vcpu.enter(if rung { AGES } else { MS }), rung);
            vcpu.cancel(0);
            vcpu.rings = 0;
            while vcpu.enter(AGES) {}
            assert!(vcpu.rings <= 1, "{}", vcpu.rings);
            assert_eq!(vcpu.next_ring(), None);
        }
    }

    /// Another thread cannot wait for the next entry.
    #[test]
    fn what_another_thread_changes_takes_effect_at_once() {
        let mut vcpu = Vcpu::new(2);
        let now = vcpu.now_ns;
        for (at, rings) in [
            (now + 9 * MS, Some(now + 9 * MS)),
            (now + MS, Some(now + MS)),
            (now + AGES, Some(now + AGES)),
            (NEVER, None),
        ] {
            vcpu.alarm.wanted[1] = at;
            assert!(!vcpu.alarm.look(vcpu.now_ns, true));
            assert_eq!(vcpu.next_ring(), rings);
        }
        // Rung, and wanted long after it rings by itself: nobody may come by to look then.
        vcpu.alarm.wanted[1] = now + MS;
        vcpu.alarm.look(now, true);
        vcpu.alarm.wanted[1] = now + AGES;
        vcpu.alarm.look(now + 2 * MS, true);
        assert_eq!(vcpu.next_ring(), Some(now + AGES));
    }

    #[test]
    fn places_of_those_who_left_are_used_again() {
        let mut alarm = Alarm::<Model>::new();
        assert_eq!([alarm.join(), alarm.join(), alarm.join()], [0, 1, 2]);
        alarm.wanted[1] = 7;
        alarm.leave(1);
        assert_eq!(alarm.wanted[1], NEVER);
        assert_eq!([alarm.join(), alarm.join()], [1, 3]);
        let room = alarm.free.capacity();
        (0..4).for_each(|user| alarm.leave(user));
        assert_eq!(alarm.free.capacity(), room, "leaving allocated");
    }

    #[derive(Clone, Debug)]
    enum Step {
        Want(usize, u64),
        Cancel(usize),
        Enter(u64),
        Work(u64),
        Rest,
        /// By another thread, while the guest is out or runs.
        Other(usize, Option<u64>),
    }

    fn wait() -> impl Strategy<Value = u64> {
        prop_oneof![
            0u64..300_000,
            0u64..5 * MS,
            0..3 * AGAIN_NS,
            AGAIN_NS - 2_000..AGAIN_NS + 2_000,
            Just(AGES)
        ]
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0usize..3, wait()).prop_map(|(user, ns)| Step::Want(user, ns)),
            2 => (0usize..3).prop_map(Step::Cancel),
            6 => wait().prop_map(Step::Enter),
            1 => wait().prop_map(Step::Work),
            1 => Just(Step::Rest),
            1 => (0usize..3, prop::option::of(wait())).prop_map(|(user, ns)| Step::Other(user, ns)),
        ]
    }

    proptest! {
        /// Against the simplest reference: whoever waits is rung for by the time it said, in whatever order users come and
        /// go, by whichever thread. And no entry takes more than one system call.
        #[test]
        fn nobody_is_rung_for_late(steps in prop::collection::vec(step(), 0..200)) {
            let mut vcpu = Vcpu::new(3);
            for step in steps {
                match step {
                    Step::Want(user, ns) => vcpu.want(user, ns),
                    Step::Cancel(user) => vcpu.cancel(user),
                    Step::Enter(ns) => {
                        let rung = vcpu.enter(ns);
                        for user in 0..3 {
                            if vcpu.alarm.wanted[user] <= vcpu.now_ns {
                                prop_assert!(rung, "the guest ran past what user {user} wanted");
                                vcpu.cancel(user);
                            }
                        }
                    }
                    Step::Work(ns) => vcpu.work(ns),
                    Step::Rest => {
                        vcpu.alarm.stop();
                        vcpu.changed = true;
                    }
                    Step::Other(user, ns) => {
                        vcpu.alarm.wanted[user] = ns.map_or(NEVER, |ns| vcpu.now_ns + ns);
                        let before = vcpu.calls();
                        prop_assert!(!vcpu.alarm.look(vcpu.now_ns, true));
                        prop_assert!(vcpu.calls() <= before + 1);
                        vcpu.must_not_be_late();
                        let wanted = vcpu.alarm.wanted.iter().any(|at| *at != NEVER);
                        prop_assert!(wanted || vcpu.next_ring().is_none());
                    }
                }
            }
        }
    }
}
