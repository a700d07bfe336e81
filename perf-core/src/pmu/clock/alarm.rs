//! The one timer of a vCPU that announces the overflows of all its clock events.
//!
//! Each armed event has a deadline in guest time. What is armed, stopped and armed again outside the guest,
//! as a guest's interrupt handler does, changes deadlines only. The timer is brought in line with the
//! earliest right before the guest is entered, so it does not run while the VMM works, and several changes
//! are one system call, or none:
//!
//! - A timer that rings a little before the earliest deadline stays. So does one that was put off already and
//!   has not rung since, however early it is: a guest that stops and starts its counters all the time costs
//!   one call for each ring, not one for each start.
//! - Stopping an event stops no timer. It may ring once for nothing.
//! - Until it is set anew the timer rings every [`AGAIN_NS`]. So after a ring nothing needs to be set for a
//!   deadline that is farther off than that, as the next overflow of a guest's counter is until its handler
//!   has written the counter. The first of these rings sets the timer for what there is by then. If there is
//!   nothing, it is stopped.
//!
//! Wall time passes at least as fast as guest time. So the timer may ring early. It rings late only for a
//! deadline nearer than [`MIN_TIMER_NS`], and by no more than that.

use std::io;

use super::timer::{MIN_TIMER_NS, Timer, wall_ns};

/// From ring to ring of a timer that nobody sets anew, ns.
const AGAIN_NS: u64 = 64_000_000;

/// A deadline so far off, ns, that the next ring of a timer that rang lately comes well before it.
const FAR_NS: u64 = 2 * AGAIN_NS;

/// A timer that rings by this much too early, ns, is not set anew: the shortest time it is set to is as long.
const NEAR_NS: u64 = MIN_TIMER_NS;

/// No deadline.
const NEVER: u64 = u64::MAX;

/// Time on both clocks, ns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Now {
    pub wall_ns: u64,
    pub guest_ns: u64,
}

/// An event's place in the alarm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(usize);

/// Deadlines, and what the timer is set to.
#[derive(Debug, Default)]
struct Plan {
    /// One for each place, by guest time; [`NEVER`]: not armed.
    deadlines: Vec<u64>,
    /// Places that no event has.
    free: Vec<usize>,
    /// When the timer rings, by the wall's clock, or before that by no more than the call took that set it.
    /// 0: it is not set. Past: it has rung, and rings again.
    rings_ns: u64,
    /// The deadline it rings for.
    rings_for_ns: u64,
    /// It was put off since its last ring.
    put_off: bool,
}

impl Plan {
    fn has_rung(&self, wall_ns: u64) -> bool {
        self.rings_ns <= wall_ns
    }

    /// It is the first ring since it was set that has come, if any, and the next is [`AGAIN_NS`] behind it.
    fn rang_lately(&self, wall_ns: u64) -> bool {
        self.rings_ns != 0 && wall_ns.saturating_sub(self.rings_ns) < AGAIN_NS / 2
    }

    fn earliest(&self) -> u64 {
        self.deadlines.iter().copied().min().unwrap_or(NEVER)
    }

    /// The guest is entered next. What to set the timer to, if it must be set.
    fn at_entry(&mut self, now: Now) -> Option<u64> {
        let earliest = self.earliest();
        if earliest == NEVER {
            return None;
        }
        let wait_ns = earliest.saturating_sub(now.guest_ns).max(MIN_TIMER_NS);
        let wanted_ns = now.wall_ns.saturating_add(wait_ns);
        if self.has_rung(now.wall_ns) {
            if wait_ns >= FAR_NS && self.rang_lately(now.wall_ns) {
                // The next ring is nobody's.
                self.rings_for_ns = 0;
                return None;
            }
            self.put_off = false;
        } else if let Some(early_ns) = wanted_ns.checked_sub(self.rings_ns) {
            if early_ns <= NEAR_NS || self.put_off {
                self.rings_for_ns = earliest;
                return None;
            }
            self.put_off = true;
        }
        (self.rings_ns, self.rings_for_ns) = (wanted_ns, earliest);
        Some(wait_ns)
    }

    /// Nothing is armed.
    fn is_vacant(&self) -> bool {
        self.earliest() == NEVER
    }

    /// Its first ring since it was set is so long ago that another has come or is about to.
    fn repeats(&self, wall_ns: u64) -> bool {
        self.has_rung(wall_ns) && !self.rang_lately(wall_ns)
    }
}

/// The timer and whom it rings for.
#[derive(Debug, Default)]
pub(super) struct Alarm {
    plan: Plan,
    /// Made for the first event that is armed.
    timer: Option<Timer>,
    /// The vCPU's thread has left or is about to.
    ended: bool,
}

impl Alarm {
    /// A place for an event whose overflows send `signal` to thread `tid`. One system call for the first.
    pub(super) fn add(&mut self, tid: i32, signal: i32) -> io::Result<Place> {
        if self.ended {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        if self.timer.is_none() {
            self.timer = Some(Timer::open(tid, signal)?);
        }
        let plan = &mut self.plan;
        Ok(Place(plan.free.pop().unwrap_or_else(|| {
            plan.deadlines.push(NEVER);
            plan.deadlines.len() - 1
        })))
    }

    /// The event is gone.
    pub(super) fn remove(&mut self, place: Place) {
        self.disarm(place);
        self.plan.free.push(place.0);
    }

    /// The event overflows at `deadline_ns` of guest time, or later. [`Alarm::at_entry`] is to follow.
    pub(super) fn arm(&mut self, place: Place, deadline_ns: u64) {
        self.put(place, deadline_ns.min(NEVER - 1));
    }

    pub(super) fn disarm(&mut self, place: Place) {
        self.put(place, NEVER);
    }

    fn put(&mut self, place: Place, deadline_ns: u64) {
        if let Some(deadline) = self.plan.deadlines.get_mut(place.0) {
            *deadline = deadline_ns;
        }
    }

    /// Whether it has rung, or is about to.
    pub(super) fn has_rung(&self, wall_ns: u64) -> bool {
        self.plan.has_rung(wall_ns)
    }

    /// Whether its last ring was for this place, and not for one with an earlier deadline.
    pub(super) fn was_for(&self, place: Place) -> bool {
        self.plan
            .deadlines
            .get(place.0)
            .is_some_and(|&deadline| deadline <= self.plan.rings_for_ns)
    }

    /// The guest is entered next: sets the timer if it must be set. At most one system call.
    pub(super) fn at_entry(&mut self, now: Now) -> io::Result<()> {
        let Some(timer) = &self.timer else { return Ok(()) };
        match self.plan.at_entry(now) {
            Some(wait_ns) => timer.set_repeating(wait_ns, AGAIN_NS),
            None => Ok(()),
        }
    }

    /// The thread had a signal: stops a timer that has rung for nobody and does so again.
    pub(super) fn after_signal(&mut self) {
        if self.plan.is_vacant() && self.plan.repeats(wall_ns()) {
            self.stop();
        }
    }

    /// Does not ring any more until something is armed. One system call at most.
    pub(super) fn stop(&mut self) {
        let was_set = std::mem::take(&mut self.plan.rings_ns) != 0;
        if was_set
            && let Some(timer) = &self.timer
            && let Err(e) = timer.stop()
        {
            log::debug!("cannot stop an overflow timer: {}", crate::error_line(&e));
        }
    }

    /// The vCPU's thread is about to end: so does the timer.
    pub(super) fn end(&mut self) {
        self.ended = true;
        self.plan.rings_ns = 0;
        self.timer = None;
    }

    /// Whether it has been set and not stopped since.
    pub(super) fn is_set(&self) -> bool {
        self.plan.rings_ns != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;
    /// What the call takes that sets the timer.
    const CALL_NS: u64 = 700;

    /// A vCPU with some events on made-up clocks, and a timer as the kernel's is.
    #[derive(Default)]
    struct Vcpu {
        plan: Plan,
        wall_ns: u64,
        guest_ns: u64,
        stale: bool,
        /// When the timer expires; `None`: stopped.
        expires_ns: Option<u64>,
        signalled: bool,
        sets: u32,
        rings: u32,
        /// Overflows, by place.
        overflows: Vec<usize>,
    }

    impl Vcpu {
        fn with(events: usize) -> Self {
            let mut vcpu = Self {
                wall_ns: 1_000,
                ..Self::default()
            };
            vcpu.plan.deadlines = vec![NEVER; events];
            vcpu
        }

        fn arm(&mut self, place: usize, wait_ns: u64) {
            self.plan.deadlines[place] = self.guest_ns + wait_ns.max(MIN_TIMER_NS);
            self.stale = true;
        }

        /// Time in the VMM.
        fn out(&mut self, ns: u64) {
            self.pass(ns);
        }

        fn pass(&mut self, ns: u64) {
            self.wall_ns += ns;
            if let Some(at) = self.expires_ns
                && at <= self.wall_ns
            {
                self.signalled = true;
                self.rings += 1;
                // The kernel's timer goes on when its signal is taken, and skips what has passed meanwhile.
                let passed = (self.wall_ns - at) / AGAIN_NS + 1;
                self.expires_ns = Some(at + passed * AGAIN_NS);
            }
        }

        /// In the guest for `ns`, of which the guest gets all but `stolen_ns`, or until a signal. No deadline
        /// may pass unseen: the signal is there, or comes within the shortest time that the timer is set to.
        fn run(&mut self, ns: u64, stolen_ns: u64) {
            if std::mem::take(&mut self.stale) {
                let now = Now {
                    wall_ns: self.wall_ns,
                    guest_ns: self.guest_ns,
                };
                if let Some(wait_ns) = self.plan.at_entry(now) {
                    self.wall_ns += CALL_NS;
                    self.expires_ns = Some(self.wall_ns + wait_ns);
                    self.sets += 1;
                }
            }
            if !self.signalled {
                let left = self
                    .expires_ns
                    .map_or(u64::MAX, |at| at.saturating_sub(self.wall_ns));
                let stolen = stolen_ns.min(left);
                let ran = ns.min(left - stolen);
                self.guest_ns += ran;
                self.pass(ran + stolen);
                if let Some(late_ns) = self.guest_ns.checked_sub(self.plan.earliest()) {
                    let most_ns = MIN_TIMER_NS + CALL_NS;
                    let until = |at: u64| at.saturating_sub(self.wall_ns);
                    let signal_ns = if self.signalled {
                        Some(0)
                    } else {
                        self.expires_ns.map(until)
                    };
                    let signal_ns = signal_ns.expect("no signal, and none to come");
                    assert!(
                        late_ns + signal_ns <= most_ns,
                        "{late_ns} ns late, signal in {signal_ns} ns"
                    );
                }
            }
            if std::mem::take(&mut self.signalled) {
                self.look();
            }
        }

        fn look(&mut self) {
            for place in 0..self.plan.deadlines.len() {
                let deadline = self.plan.deadlines[place];
                if deadline == NEVER {
                    continue;
                }
                if deadline <= self.guest_ns {
                    self.overflows.push(place);
                    self.plan.deadlines[place] = NEVER;
                } else if self.plan.has_rung(self.wall_ns) {
                    self.stale = true;
                    if deadline <= self.plan.rings_for_ns {
                        self.arm(place, deadline - self.guest_ns);
                    }
                }
            }
        }
    }

    #[derive(Clone, Debug)]
    enum Do {
        Arm(usize, u64),
        Stop(usize),
        Out(u64),
        Run(u64, u64),
    }

    fn anything() -> impl Strategy<Value = Do> {
        let wait = prop_oneof![0..50_000u64, 0..5 * MS, 0..300 * MS, Just(1 << 50)];
        let some = prop_oneof![0..20_000u64, 0..3 * MS, 0..200 * MS];
        let stolen = prop_oneof![Just(0), 0..10_000u64, 0..50 * MS];
        prop_oneof![
            (0..4usize, wait).prop_map(|(place, ns)| Do::Arm(place, ns)),
            (0..4usize).prop_map(Do::Stop),
            some.clone().prop_map(Do::Out),
            (some, stolen).prop_map(|(ns, stolen)| Do::Run(ns, stolen)),
        ]
    }

    proptest! {
        /// Whatever is armed, stopped and armed again, and however little of the time the guest gets: it does
        /// not run past a deadline without a signal ([`Vcpu::run`]), and each overflow comes.
        #[test]
        fn no_deadline_passes_without_a_ring(all in prop::collection::vec(anything(), 1..200)) {
            let mut vcpu = Vcpu::with(4);
            for one in all {
                match one {
                    Do::Arm(place, ns) => vcpu.arm(place, ns),
                    Do::Stop(place) => vcpu.plan.deadlines[place] = NEVER,
                    Do::Out(ns) => vcpu.out(ns),
                    Do::Run(ns, stolen) => vcpu.run(ns, stolen),
                }
            }
            let near: Vec<_> = (0..4).filter(|&at| vcpu.plan.deadlines[at] < vcpu.guest_ns + FAR_NS).collect();
            vcpu.overflows.clear();
            let end = vcpu.guest_ns + 2 * FAR_NS;
            while vcpu.guest_ns < end {
                vcpu.run(20 * MS, 0);
            }
            for place in near {
                prop_assert!(vcpu.overflows.contains(&place), "the overflow of {} did not come", place);
            }
        }
    }

    /// What is left of a deadline may be less than the shortest time that the timer is set to: another event
    /// is armed right before it, and the timer has rung early for time that was not the guest's.
    #[test]
    fn a_deadline_nearer_than_the_shortest_time_is_rung_for_so_much_later() {
        let mut vcpu = Vcpu::with(2);
        vcpu.arm(0, 20_000);
        vcpu.run(19_000, 0);
        vcpu.out(10_000);
        vcpu.arm(1, MS);
        vcpu.run(0, 0);
        assert_eq!(vcpu.plan.deadlines[0], 20_000);
        vcpu.run(2_000, 0);
        assert_eq!((vcpu.guest_ns, &vcpu.overflows[..]), (21_000, &[][..]));
        vcpu.run(MS / 2, 0);
        assert_eq!(vcpu.overflows, [0]);
        assert!(vcpu.guest_ns <= 20_000 + MIN_TIMER_NS, "{}", vcpu.guest_ns);
    }

    /// The guest's interrupt: the counter goes on with an overflow that is out of sight, and its handler
    /// stops it, writes it and starts it, with exits in between.
    #[test]
    fn an_overflow_of_a_guests_counter_sets_the_timer_once() {
        let mut vcpu = Vcpu::with(1);
        vcpu.arm(0, MS);
        for _ in 0..100 {
            let before = vcpu.overflows.len();
            while vcpu.overflows.len() == before {
                vcpu.run(MS / 4, 0);
                vcpu.out(20_000);
            }
            vcpu.arm(0, 1 << 48);
            for _ in 0..3 {
                vcpu.run(15_000, 0);
                vcpu.out(20_000);
                vcpu.plan.deadlines[0] = NEVER;
            }
            vcpu.arm(0, MS);
        }
        let early = vcpu.rings - 100;
        assert_eq!(
            vcpu.sets,
            100 + early,
            "one for each overflow, and one for each early ring"
        );
    }

    /// Four events that overflow apart from each other have the timer set for each, and one signal each.
    #[test]
    fn events_with_different_deadlines_are_rung_for_one_by_one() {
        let mut vcpu = Vcpu::with(4);
        for place in 0..4 {
            vcpu.arm(place, (4 - place as u64) * MS);
        }
        while vcpu.overflows.len() < 4 {
            vcpu.run(10 * MS, 0);
        }
        assert_eq!(vcpu.overflows, [3, 2, 1, 0]);
        assert_eq!((vcpu.sets, vcpu.rings), (4, 4));
    }

    /// A guest that stops and starts its counter all the time pays for the first start, and for one that puts
    /// the ring off.
    #[test]
    fn many_starts_between_two_rings_set_the_timer_twice() {
        let mut vcpu = Vcpu::with(1);
        let mut left = 100 * MS;
        for _ in 0..50 {
            vcpu.arm(0, left);
            vcpu.run(MS / 2, 0);
            left -= MS / 2;
            vcpu.plan.deadlines[0] = NEVER;
            vcpu.run(MS / 2, 0);
            vcpu.out(MS / 4);
        }
        assert_eq!((vcpu.sets, vcpu.rings), (2, 0));
    }

    /// An overflow nobody arms for again: the timer is not set for what is far, its next ring is the net, and
    /// then it is set for good.
    #[test]
    fn a_far_deadline_is_set_when_the_timer_repeats() {
        let mut vcpu = Vcpu::with(1);
        vcpu.arm(0, MS);
        vcpu.run(2 * MS, 0);
        assert_eq!(vcpu.overflows, [0]);
        vcpu.arm(0, 1 << 50);
        vcpu.run(MS, 0);
        assert_eq!((vcpu.sets, vcpu.rings), (1, 1));
        vcpu.run(2 * AGAIN_NS, 0);
        vcpu.run(20 * AGAIN_NS, 0);
        vcpu.run(20 * AGAIN_NS, 0);
        assert_eq!((vcpu.sets, vcpu.rings), (2, 2));
    }

    /// With nothing armed any more the timer rings twice at most.
    #[test]
    fn a_timer_nobody_needs_is_stopped_when_it_repeats() {
        let mut plan = Plan {
            deadlines: vec![5 * MS, NEVER],
            ..Plan::default()
        };
        let now = Now {
            wall_ns: MS,
            guest_ns: 0,
        };
        assert_eq!(plan.at_entry(now), Some(5 * MS));
        plan.deadlines[0] = NEVER;
        assert_eq!(plan.at_entry(now), None);
        assert!(plan.is_vacant());
        assert!(!plan.repeats(2 * MS), "it has yet to ring");
        assert!(!plan.repeats(7 * MS), "the guest may arm something at once");
        assert!(plan.repeats(6 * MS + AGAIN_NS));
        plan.deadlines[1] = 1;
        assert!(!plan.is_vacant());
    }

    /// The ring for one event is not the early ring of another, which would then wait for longer.
    #[test]
    fn a_ring_is_for_the_earliest() {
        let mut alarm = Alarm::default();
        let tid = crate::pmu::host::fd::current_tid();
        let [first, second] = [0; 2].map(|_| alarm.add(tid, libc::SIGCONT).unwrap());
        alarm.arm(first, 10 * MS);
        alarm.arm(second, 20 * MS);
        let now = Now {
            wall_ns: wall_ns(),
            guest_ns: 0,
        };
        alarm.at_entry(now).unwrap();
        assert!(!alarm.has_rung(now.wall_ns + 9 * MS) && alarm.has_rung(now.wall_ns + 10 * MS));
        assert!(alarm.was_for(first) && !alarm.was_for(second));
        alarm.remove(first);
        assert!(alarm.is_set());
        assert_eq!(
            alarm.add(tid, libc::SIGCONT).unwrap(),
            first,
            "places are used again"
        );
        alarm.end();
        assert!(!alarm.is_set());
        assert!(
            alarm.add(tid, libc::SIGCONT).is_err(),
            "its thread is about to end"
        );
    }
}
