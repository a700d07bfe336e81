//! The single timer of a vCPU, which announces the overflows of all its clock events.
//!
//! Each armed event has a deadline in guest time. Arming and disarming outside the guest, for
//! example on behalf of a guest's interrupt handler, only changes deadlines. The timer is updated
//! to the earliest deadline immediately before guest entry. Several changes between two guest
//! entries therefore take at most one system call:
//!
//! - A timer that expires slightly before the earliest deadline is kept. A timer that was postponed
//!   and has not expired since is also kept, regardless of how early it is. A guest that stops and
//!   starts its counters continuously therefore costs one call per expiry rather than one per
//!   start.
//! - Stopping an event does not disarm the timer. It may expire once without effect.
//! - Until it is re-armed, the timer repeats every [`REPEAT_NS`]. After an expiry it need not be
//!   armed for a deadline farther away than that. For example, the next overflow of a guest's
//!   counter is that far away until the guest's handler has written the counter. The first
//!   repetition arms the timer for the deadlines at that time, or disarms it if there are none.
//!
//! Wall-clock time advances at least as fast as guest time, so the timer may expire early. It
//! expires late only for a deadline nearer than [`MIN_TIMER_NS`], and by no more than that.

use std::io;

use crate::pmu::clock::MIN_TIMER_NS;
use crate::pmu::timer::{Timer, wall_ns};

/// Period at which the timer repeats after it has expired, until it is re-armed, in nanoseconds.
const REPEAT_NS: u64 = 64_000_000;

/// Minimum time until a deadline, in nanoseconds, for which a recently expired timer is not
/// re-armed, because its next repetition is early enough.
const FAR_DEADLINE_NS: u64 = 2 * REPEAT_NS;

/// Maximum time before the earliest deadline at which the timer may expire without being re-armed,
/// in nanoseconds. Equal to the minimum timer duration.
const EARLY_TOLERANCE_NS: u64 = MIN_TIMER_NS;

/// Deadline value of a disarmed event.
const NEVER: u64 = u64::MAX;

/// The current time on the monotonic clock and on the guest clock, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClockTimes {
    pub wall_ns: u64,
    pub guest_ns: u64,
}

/// Index of an event in the deadline list of its vCPU's [`Alarm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AlarmSlot(usize);

/// The overflow deadlines of a vCPU's clock events, and the state of the timer that serves them.
#[derive(Debug, Default)]
struct AlarmSchedule {
    /// Deadline of each event in guest time, in nanoseconds; [`NEVER`] if the event is disarmed.
    deadlines: Vec<u64>,
    /// Indices in `deadlines` that no event uses.
    free: Vec<usize>,
    /// Expiry time of the timer on the monotonic clock, in nanoseconds. The timer may expire early
    /// by at most the duration of the call that armed it. 0 means disarmed; a time in the past
    /// means that the timer has expired and repeats.
    expiry_ns: u64,
    /// Deadline for which the timer is armed, in nanoseconds of guest time.
    armed_for_ns: u64,
    /// Set if the timer was re-armed for a later time and has not expired since.
    is_postponed: bool,
}

impl AlarmSchedule {
    fn has_expired(&self, wall_ns: u64) -> bool {
        self.expiry_ns <= wall_ns
    }

    /// Returns `true` if the timer has expired at most once since it was armed, and the next expiry
    /// is about [`REPEAT_NS`] away.
    fn expired_recently(&self, wall_ns: u64) -> bool {
        self.expiry_ns != 0 && wall_ns.saturating_sub(self.expiry_ns) < REPEAT_NS / 2
    }

    fn earliest(&self) -> u64 {
        self.deadlines.iter().copied().min().unwrap_or(NEVER)
    }

    /// Updates the schedule before a guest entry. Returns the duration for which the timer must be
    /// armed, or `None` if the timer need not be changed.
    fn update_at_entry(&mut self, now: ClockTimes) -> Option<u64> {
        let earliest = self.earliest();
        if earliest == NEVER {
            return None;
        }
        let wait_ns = earliest.saturating_sub(now.guest_ns).max(MIN_TIMER_NS);
        let wanted_ns = now.wall_ns.saturating_add(wait_ns);
        if self.has_expired(now.wall_ns) {
            if wait_ns >= FAR_DEADLINE_NS && self.expired_recently(now.wall_ns) {
                // The deadline is so distant that the timer is left unchanged. Its next repetition
                // belongs to no event.
                self.armed_for_ns = 0;
                return None;
            }
            self.is_postponed = false;
        } else if let Some(early_ns) = wanted_ns.checked_sub(self.expiry_ns) {
            if early_ns <= EARLY_TOLERANCE_NS || self.is_postponed {
                self.armed_for_ns = earliest;
                return None;
            }
            self.is_postponed = true;
        }
        (self.expiry_ns, self.armed_for_ns) = (wanted_ns, earliest);
        Some(wait_ns)
    }

    /// Returns `true` if no event of the vCPU is armed.
    fn has_no_deadline(&self) -> bool {
        self.earliest() == NEVER
    }

    /// Returns `true` if the timer has expired at least twice since it was armed, or if its second
    /// expiry is imminent.
    fn has_repeated(&self, wall_ns: u64) -> bool {
        self.has_expired(wall_ns) && !self.expired_recently(wall_ns)
    }
}

/// The timer of a vCPU, with the overflow deadlines of the vCPU's clock events.
#[derive(Debug, Default)]
pub(super) struct Alarm {
    plan: AlarmSchedule,
    /// The timer, which is created when the first event is armed.
    timer: Option<Timer>,
    /// Set once the vCPU's thread has ended or is about to end. No event can then be added.
    ended: bool,
}

impl Alarm {
    /// Reserves an index for an event that sends `signal` to thread `tid` on overflow. The first
    /// call takes one system call.
    pub(super) fn add(&mut self, tid: i32, signal: i32) -> io::Result<AlarmSlot> {
        if self.ended {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        if self.timer.is_none() {
            self.timer = Some(Timer::open(tid, signal)?);
        }
        let plan = &mut self.plan;
        Ok(AlarmSlot(plan.free.pop().unwrap_or_else(|| {
            plan.deadlines.push(NEVER);
            plan.deadlines.len() - 1
        })))
    }

    /// Releases the index of a closed event.
    pub(super) fn remove(&mut self, place: AlarmSlot) {
        self.disarm(place);
        self.plan.free.push(place.0);
    }

    /// Arms the event to overflow no earlier than `deadline_ns` of guest time. Takes effect at the
    /// next call of [`Alarm::update_at_entry`].
    pub(super) fn arm(&mut self, place: AlarmSlot, deadline_ns: u64) {
        self.put(place, deadline_ns.min(NEVER - 1));
    }

    pub(super) fn disarm(&mut self, place: AlarmSlot) {
        self.put(place, NEVER);
    }

    fn put(&mut self, place: AlarmSlot, deadline_ns: u64) {
        if let Some(deadline) = self.plan.deadlines.get_mut(place.0) {
            *deadline = deadline_ns;
        }
    }

    /// Returns `true` if the timer has expired or is about to expire.
    pub(super) fn has_expired(&self, wall_ns: u64) -> bool {
        self.plan.has_expired(wall_ns)
    }

    /// Returns `true` if the timer was last armed for the deadline of the event at index `place` or
    /// for a later deadline.
    pub(super) fn expired_for(&self, place: AlarmSlot) -> bool {
        self.plan
            .deadlines
            .get(place.0)
            .is_some_and(|&deadline| deadline <= self.plan.armed_for_ns)
    }

    /// Updates the timer before a guest entry. Takes at most one system call.
    pub(super) fn update_at_entry(&mut self, now: ClockTimes) -> io::Result<()> {
        let Some(timer) = &self.timer else { return Ok(()) };
        match self.plan.update_at_entry(now) {
            Some(wait_ns) => timer.set_repeating(wait_ns, REPEAT_NS),
            None => Ok(()),
        }
    }

    /// Handles a signal that the thread has received. Disarms the timer if it has repeated and no
    /// event is armed.
    pub(super) fn after_signal(&mut self) {
        if self.plan.has_no_deadline() && self.plan.has_repeated(wall_ns()) {
            self.stop();
        }
    }

    /// Disarms the timer. It stays disarmed until an event is armed. Takes at most one system call.
    pub(super) fn stop(&mut self) {
        let was_set = std::mem::take(&mut self.plan.expiry_ns) != 0;
        if was_set
            && let Some(timer) = &self.timer
            && let Err(e) = timer.stop()
        {
            log::debug!("cannot stop an overflow timer: {}", crate::error_line(&e));
        }
    }

    /// Deletes the timer because the vCPU's thread is about to end.
    pub(super) fn end(&mut self) {
        self.ended = true;
        self.plan.expiry_ns = 0;
        self.timer = None;
    }

    /// Returns `true` if the timer was armed and has not been disarmed since.
    pub(super) fn is_set(&self) -> bool {
        self.plan.expiry_ns != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;
    /// Duration of the system call that arms the timer, in nanoseconds.
    const CALL_NS: u64 = 700;

    /// A vCPU with several events on simulated clocks, and a timer that behaves like the kernel's.
    #[derive(Default)]
    struct SimulatedVcpu {
        plan: AlarmSchedule,
        wall_ns: u64,
        guest_ns: u64,
        stale: bool,
        /// Expiry time; `None` if disarmed.
        expires_ns: Option<u64>,
        signalled: bool,
        sets: u32,
        rings: u32,
        /// Number of overflows of each event.
        overflows: Vec<usize>,
    }

    impl SimulatedVcpu {
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

        /// Lets `ns` nanoseconds pass in the VMM, outside the guest.
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
                // Like the kernel's timer, advances when the signal is delivered and skips all
                // periods that have elapsed.
                let passed = (self.wall_ns - at) / REPEAT_NS + 1;
                self.expires_ns = Some(at + passed * REPEAT_NS);
            }
        }

        /// Runs the guest for `ns`, of which `stolen_ns` are stolen time, or until a signal
        /// arrives.
        ///
        /// Checks that no deadline passes unnoticed: a signal is pending or follows within the
        /// minimum timer duration.
        fn run(&mut self, ns: u64, stolen_ns: u64) {
            if std::mem::take(&mut self.stale) {
                let now = ClockTimes {
                    wall_ns: self.wall_ns,
                    guest_ns: self.guest_ns,
                };
                if let Some(wait_ns) = self.plan.update_at_entry(now) {
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
                } else if self.plan.has_expired(self.wall_ns) {
                    self.stale = true;
                    if deadline <= self.plan.armed_for_ns {
                        self.arm(place, deadline - self.guest_ns);
                    }
                }
            }
        }
    }

    #[derive(Clone, Debug)]
    enum AlarmOperation {
        Arm(usize, u64),
        Stop(usize),
        Out(u64),
        Run(u64, u64),
    }

    fn any_operation() -> impl Strategy<Value = AlarmOperation> {
        let wait = prop_oneof![0..50_000u64, 0..5 * MS, 0..300 * MS, Just(1 << 50)];
        let some = prop_oneof![0..20_000u64, 0..3 * MS, 0..200 * MS];
        let stolen = prop_oneof![Just(0), 0..10_000u64, 0..50 * MS];
        prop_oneof![
            (0..4usize, wait).prop_map(|(place, ns)| AlarmOperation::Arm(place, ns)),
            (0..4usize).prop_map(AlarmOperation::Stop),
            some.clone().prop_map(AlarmOperation::Out),
            (some, stolen).prop_map(|(ns, stolen)| AlarmOperation::Run(ns, stolen)),
        ]
    }

    proptest! {
        /// For any sequence of arming and disarming, and for any amount of stolen time, the guest
        /// does not run past a deadline without a signal ([`SimulatedVcpu::run`]), and each
        /// overflow occurs.
        #[test]
        fn no_deadline_passes_without_expiry(all in prop::collection::vec(any_operation(), 1..200)) {
            let mut vcpu = SimulatedVcpu::with(4);
            for one in all {
                match one {
                    AlarmOperation::Arm(place, ns) => vcpu.arm(place, ns),
                    AlarmOperation::Stop(place) => vcpu.plan.deadlines[place] = NEVER,
                    AlarmOperation::Out(ns) => vcpu.out(ns),
                    AlarmOperation::Run(ns, stolen) => vcpu.run(ns, stolen),
                }
            }
            let near: Vec<_> = (0..4).filter(|&at| vcpu.plan.deadlines[at] < vcpu.guest_ns + FAR_DEADLINE_NS).collect();
            vcpu.overflows.clear();
            let end = vcpu.guest_ns + 2 * FAR_DEADLINE_NS;
            while vcpu.guest_ns < end {
                vcpu.run(20 * MS, 0);
            }
            for place in near {
                prop_assert!(vcpu.overflows.contains(&place), "the overflow of {} did not come", place);
            }
        }
    }

    /// An overflow whose deadline is nearer than the minimum timer duration is late by at most that
    /// duration. The delay occurs if stolen time makes the timer expire early, and another event is
    /// then armed immediately before the deadline.
    #[test]
    fn deadline_below_minimum_timer_is_late_by_at_most_the_minimum() {
        let mut vcpu = SimulatedVcpu::with(2);
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

    /// An overflow of a guest counter arms the timer only once. The counter then continues towards
    /// a distant overflow, and the guest's interrupt handler stops, writes and starts the counter,
    /// with vCPU exits between these steps.
    #[test]
    fn guest_counter_overflow_arms_timer_once() {
        let mut vcpu = SimulatedVcpu::with(1);
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
        // The timer is armed once for each overflow and once for each early expiry.
        assert_eq!(vcpu.sets, 100 + early);
    }

    /// If four events have different deadlines, the timer is armed and sends a signal once for each
    /// of them.
    #[test]
    fn distinct_deadlines_expire_separately() {
        let mut vcpu = SimulatedVcpu::with(4);
        for place in 0..4 {
            vcpu.arm(place, (4 - place as u64) * MS);
        }
        while vcpu.overflows.len() < 4 {
            vcpu.run(10 * MS, 0);
        }
        assert_eq!(vcpu.overflows, [3, 2, 1, 0]);
        assert_eq!((vcpu.sets, vcpu.rings), (4, 4));
    }

    /// A guest that stops and starts its counter continuously causes two system calls: one for the
    /// first start, and one that postpones the timer.
    #[test]
    fn repeated_starts_between_expirations_arm_timer_twice() {
        let mut vcpu = SimulatedVcpu::with(1);
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

    /// After an overflow, the timer is not armed for a deadline that is far away. The timer's next
    /// repetition detects this deadline and arms the timer for it.
    #[test]
    fn distant_deadline_is_armed_at_next_repetition() {
        let mut vcpu = SimulatedVcpu::with(1);
        vcpu.arm(0, MS);
        vcpu.run(2 * MS, 0);
        assert_eq!(vcpu.overflows, [0]);
        vcpu.arm(0, 1 << 50);
        vcpu.run(MS, 0);
        assert_eq!((vcpu.sets, vcpu.rings), (1, 1));
        vcpu.run(2 * REPEAT_NS, 0);
        vcpu.run(20 * REPEAT_NS, 0);
        vcpu.run(20 * REPEAT_NS, 0);
        assert_eq!((vcpu.sets, vcpu.rings), (2, 2));
    }

    /// If no event is armed, the timer expires at most twice.
    #[test]
    fn unused_timer_is_disarmed_at_repetition() {
        let mut plan = AlarmSchedule {
            deadlines: vec![5 * MS, NEVER],
            ..AlarmSchedule::default()
        };
        let now = ClockTimes {
            wall_ns: MS,
            guest_ns: 0,
        };
        assert_eq!(plan.update_at_entry(now), Some(5 * MS));
        plan.deadlines[0] = NEVER;
        assert_eq!(plan.update_at_entry(now), None);
        assert!(plan.has_no_deadline());
        assert!(!plan.has_repeated(2 * MS), "it has yet to ring");
        assert!(!plan.has_repeated(7 * MS), "the guest may arm something at once");
        assert!(plan.has_repeated(6 * MS + REPEAT_NS));
        plan.deadlines[1] = 1;
        assert!(!plan.has_no_deadline());
    }

    /// An expiry of the timer is attributed only to the event with the earliest deadline. An event
    /// with a later deadline does not treat the expiry as its own and extend its next timer.
    #[test]
    fn expiry_is_attributed_to_earliest_deadline() {
        let mut alarm = Alarm::default();
        let tid = crate::pmu::host::fd::current_tid();
        let [first, second] = [0; 2].map(|_| alarm.add(tid, libc::SIGCONT).unwrap());
        alarm.arm(first, 10 * MS);
        alarm.arm(second, 20 * MS);
        let now = ClockTimes {
            wall_ns: wall_ns(),
            guest_ns: 0,
        };
        alarm.update_at_entry(now).unwrap();
        assert!(!alarm.has_expired(now.wall_ns + 9 * MS) && alarm.has_expired(now.wall_ns + 10 * MS));
        assert!(alarm.expired_for(first) && !alarm.expired_for(second));
        alarm.remove(first);
        assert!(alarm.is_set());
        // The index of the removed event is reused.
        assert_eq!(alarm.add(tid, libc::SIGCONT).unwrap(), first);
        alarm.end();
        assert!(!alarm.is_set());
        // No event can be added after `end`.
        assert!(alarm.add(tid, libc::SIGCONT).is_err());
    }
}
