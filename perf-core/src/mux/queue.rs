//! [`MuxQueue`]: the multiplexing queue of the flexible groups of one context.

use super::list::{GroupList, ListLink};
use super::{MuxGroupKey, MuxPolicy};

/// Maximum number of groups that one search for the next group skips: groups that conflict with
/// active groups ([`SlotOfferOutcome::NotNow`]), or steady groups that yield their turns.
const SKIP_MAX: usize = 8;

/// Candidate multiplexing intervals, in units of the interval of [`MuxPolicy::Rotate`]. Powers of
/// the golden ratio (1/φ⁴, 1/φ³, 1/φ²), because rotations of these lengths have the fewest
/// frequencies in common. Shorter intervals resolve more detail. The next interval is selected when
/// a periodic guest pattern aliases with the current one.
const INTERVALS: [f64; 3] = [0.146, 0.236, 0.382];
/// Converts `first_ns`, the initial interval of [`MuxPolicy::Adaptive`], to the interval of
/// [`MuxPolicy::Rotate`] that it belongs to, in nanoseconds.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "lengths of turns are rounded and saturate"
)]
pub(crate) fn base_interval_ns(first_ns: u64) -> u64 {
    (first_ns as f64 / INTERVALS[0]) as u64
}

/// Factor by which the intervals of a stretched rotation are longer than regular ones. A factor of
/// φ shifts the phase of later intervals by 0.618 of a rotation.
const STRETCH: f64 = 1.618;

/// Weight of the newest squared rate change in a group's running mean, once the mean contains
/// enough rate changes.
const NEWEST_STEP_WEIGHT: f32 = 0.01;
/// Maximum squared rate change that enters a group's running mean, so that a single very short
/// slice has no lasting effect.
const SQUARE_MAX: f64 = 16.0;
/// Minimum number of rate changes (steps) of a group before its rate is classified.
const STEPS_MIN: u16 = 8;
/// Maximum mean square rate change of a steady group (rates within 3 %). Steady groups yield their
/// turn every other time.
const STEADY: f32 = 1e-3;
/// Maximum mean square rate change of a calm group (rates within 25 %). The rate of such a group
/// either varies little or aliases with the intervals.
const CALM: f32 = 0.06;
/// A phase shift reveals a pattern in a group if the squared rate change across the shift exceeds
/// this factor times the group's mean square rate change, plus [`SHIFT_THRESHOLD_MIN`] (the square
/// of a tenth of the rate).
const SHIFT_THRESHOLD: f64 = 8.0;
const SHIFT_THRESHOLD_MIN: f64 = 0.01;
/// Number of consecutive phase shifts that must reveal a pattern in the same group before the
/// pattern is confirmed. A single shift that reveals a pattern in most groups also confirms the
/// pattern.
const CONFIRMING_SHIFTS: u8 = 2;
/// Number of rotations before the first phase shift. The number of rotations before each later
/// shift grows by the factor [`NEXT_SHIFT`], because a shift slightly reduces the precision of
/// regular intervals.
const FIRST_SHIFT: RotationCount = RotationCount(8);
const NEXT_SHIFT: u64 = 4;

/// Index into [`INTERVALS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
struct IntervalIndex(usize);

impl IntervalIndex {
    /// Returns the multiplexing interval at this index, in units of the interval of
    /// [`MuxPolicy::Rotate`].
    fn turn(self) -> f64 {
        INTERVALS[self.0]
    }

    /// Returns the interval that replaces this one when a guest pattern aliases with this one.
    fn next(self) -> Self {
        Self((self.0 + 1) % INTERVALS.len())
    }
}

/// Number of a period in which the length of the multiplexing interval does not change. Incremented
/// at each change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
struct IntervalEra(u32);

impl IntervalEra {
    const FIRST: Self = Self(0);

    fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}

/// A number of rotations. In one rotation each group is scheduled once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
struct RotationCount(u64);

impl RotationCount {
    const NONE: Self = Self(0);
    const ONE: Self = Self(1);

    /// Converts this number of rotations of `groups` groups to a number of multiplexing intervals.
    fn turns(self, groups: usize) -> IntervalCount {
        IntervalCount(self.0.saturating_mul(groups as u64))
    }

    fn times(self, n: u64) -> Self {
        Self(self.0.saturating_mul(n))
    }
}

/// A number of multiplexing intervals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Default)]
struct IntervalCount(u64);

impl IntervalCount {
    const NONE: Self = Self(0);
}

/// Result of offering a slot to a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotOfferOutcome {
    /// The group fits and was scheduled.
    Taken,
    /// The group does not fit. The group stays at the head of the queue, and no other group may
    /// overtake it.
    NoRoom,
    /// The group conflicts with an active group. Other groups may fit.
    NotNow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueState {
    Absent,
    Waiting,
    On,
}

/// Confidence that a group whose rate appears nearly constant really has such a rate, rather than a
/// pattern that aliases with the current interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Confidence {
    /// There are too few rate changes for a conclusion, or the rate varies so much that it cannot
    /// hide a pattern.
    Open,
    /// The rate appears nearly constant. No phase shift has verified the rate yet.
    Suspect,
    /// The rate appears nearly constant before and after a phase shift.
    Cleared,
}

#[derive(Clone, Copy, Debug)]
struct QueueEntry {
    /// Links in the list of active groups or in the list of waiting groups.
    age: ListLink,
    state: QueueState,
    trust: Confidence,
    /// Phase of the queue in which the last slice of the group ended.
    phase: Phase,
    /// Value of [`MuxQueue::era`] for which the following fields are valid.
    era: IntervalEra,
    /// Mean square of the rate changes between consecutive regular slices, relative to the mean
    /// rate of the group.
    steps: f32,
    /// Number of rate changes in the mean [`QueueEntry::steps`].
    known: u16,
    /// `true` if the next rate change compares slices of different length and must be ignored.
    skip: bool,
    /// Rate change from the last regular slice of the group to its slice in the stretched rotation,
    /// or `None` if the group has had no such slice in the current phase shift.
    into_shift: Option<f32>,
    /// Number of consecutive phase shifts that revealed a pattern in this group.
    revealed: u8,
    /// `true` if the group has yielded a turn since it was last active.
    passed: bool,
}

impl QueueEntry {
    const ABSENT: Self = Self {
        age: ListLink::NONE,
        state: QueueState::Absent,
        trust: Confidence::Open,
        phase: Phase::Regular,
        era: IntervalEra::FIRST,
        steps: 0.0,
        known: 0,
        skip: true,
        into_shift: None,
        revealed: 0,
        passed: false,
    };

    fn is_steady(&self) -> bool {
        self.trust == Confidence::Cleared && self.steps < STEADY
    }
}

/// Phase of the queue's sequence of multiplexing intervals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    /// Intervals of equal length.
    #[default]
    Regular,
    /// One rotation with longer intervals, which shifts the phase of all later intervals.
    Stretched,
    /// First rotation after a stretched one, with intervals of regular length.
    Shifted,
}

/// A queue that multiplexes the flexible groups of one context.
///
/// Memory use is proportional to the largest [`MuxGroupKey`].
#[derive(Debug, Default)]
pub struct MuxQueue {
    policy: MuxPolicy,
    /// Multiplexing interval under [`MuxPolicy::Rotate`], in nanoseconds.
    turn_ns: u64,
    entries: Vec<QueueEntry>,
    /// Active groups, in the order in which they became active.
    on: GroupList,
    /// Waiting groups, in the order in which they started to wait.
    waiting: GroupList,
    /// Group that did not fit into the free slots. No other group is scheduled before this one.
    held: Option<MuxGroupKey>,
    /// End of the current interval, on the caller's clock in nanoseconds, or 0 if there is none.
    next_turn_ns: u64,
    pace: IntervalIndex,
    era: IntervalEra,
    phase: Phase,
    /// Number of intervals left in the current phase.
    intervals_left: IntervalCount,
    /// Number of rotations before the next phase shift. The shift is postponed while no group has
    /// [`Confidence::Suspect`].
    run: RotationCount,
    /// Number of groups that have [`Confidence::Suspect`] in the current era.
    suspects: usize,
    /// Results of the current phase shift. `checked`: number of groups with [`Confidence::Suspect`]
    /// that were checked. `revealed`: number of these groups in which the shift revealed a pattern.
    /// `pattern_confirmed`: `true` if consecutive shifts confirmed a pattern.
    checked: usize,
    revealed: usize,
    pattern_confirmed: bool,
    /// State of the pseudo-random generator that selects groups to read in the middle of a slice.
    draw: u32,
    /// `turns`: number of multiplexing intervals so far. `aliased_at`: value of `turns` at the last
    /// call of [`MuxQueue::record_aliasing`].
    turns: IntervalCount,
    aliased_at: Option<IntervalCount>,
}

impl MuxQueue {
    /// Creates an empty queue. `turn_ns` is the interval of [`MuxPolicy::Rotate`], in nanoseconds.
    /// [`MuxPolicy::Adaptive`] uses fractions of `turn_ns`.
    #[must_use]
    pub fn new(policy: MuxPolicy, turn_ns: u64) -> Self {
        Self {
            policy,
            turn_ns: turn_ns.max(1),
            ..Self::default()
        }
    }

    /// Returns the number of groups in the queue, active and waiting.
    #[must_use]
    pub fn len(&self) -> usize {
        self.on.len() + self.waiting.len()
    }

    /// Returns `true` if the queue contains no groups.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the fraction of the groups that are active, or `None` if the queue is empty.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a queue has few groups")]
    pub fn active_share(&self) -> Option<f64> {
        (!self.is_empty()).then(|| self.on.len() as f64 / self.len() as f64)
    }

    /// Appends group `key` to the queue. Has no effect if the group is already present.
    pub fn insert(&mut self, key: MuxGroupKey) {
        let at = usize::from(key);
        if u32::try_from(at).is_err() {
            return;
        }
        if at >= self.entries.len() {
            self.entries.resize(at + 1, QueueEntry::ABSENT);
        }
        if self.entries[at].state == QueueState::Absent {
            self.entries[at] = QueueEntry::ABSENT;
            if self.waiting.len() == 0 {
                // No groups waited before, so a new sequence of intervals starts at the next call
                // of `rotate_if_due`.
                self.next_turn_ns = 0;
            }
            self.wait(key);
        }
    }

    /// Removes group `key`, active or waiting. Has no effect if the group is not present.
    pub fn remove(&mut self, key: MuxGroupKey) {
        let Some(place) = self.entries.get(usize::from(key)).map(|e| e.state) else {
            return;
        };
        match place {
            QueueState::Absent => return,
            QueueState::Waiting => self.unwait(key),
            QueueState::On => self.on.remove(&mut self.entries, key, |e| &mut e.age),
        }
        self.trust(key, Confidence::Open);
        self.entries[usize::from(key)] = QueueEntry::ABSENT;
    }

    fn wait(&mut self, key: MuxGroupKey) {
        self.entries[usize::from(key)].state = QueueState::Waiting;
        self.waiting.push_back(&mut self.entries, key, |e| &mut e.age);
    }

    fn unwait(&mut self, key: MuxGroupKey) {
        self.waiting.remove(&mut self.entries, key, |e| &mut e.age);
        if self.held == Some(key) {
            self.held = None;
        }
    }

    fn trust(&mut self, key: MuxGroupKey, trust: Confidence) {
        let entry = &mut self.entries[usize::from(key)];
        if entry.era == self.era {
            self.suspects -= usize::from(entry.trust == Confidence::Suspect);
            self.suspects += usize::from(trust == Confidence::Suspect);
        }
        entry.trust = trust;
    }

    /// Reports the result of the last slice of group `key`. `step` is the change of the group's
    /// rate since the previous slice, relative to the mean rate
    /// ([`crate::estimate::CountEstimator::last_step`]; for several members the largest change), or
    /// `None` if the change is not known yet.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a step of a rate is a rough number"
    )]
    pub fn slice_ended(&mut self, key: MuxGroupKey, step: Option<f64>) {
        let Some(entry) = self.entries.get_mut(usize::from(key)) else {
            return;
        };
        let (false, Some(step)) = (entry.state == QueueState::Absent, step) else {
            return;
        };
        if entry.era != self.era {
            // Discards results that were measured with a different interval.
            *entry = QueueEntry {
                age: entry.age,
                state: entry.state,
                phase: entry.phase,
                passed: entry.passed,
                era: self.era,
                ..QueueEntry::ABSENT
            };
        }
        match (entry.phase, entry.into_shift) {
            (Phase::Stretched, _) => entry.into_shift = Some(step as f32),
            // The sum of the changes into and out of the stretched rotation is the rate change
            // between two regular slices whose phases differ by 0.618 of a rotation.
            (Phase::Shifted, Some(before)) => {
                entry.into_shift = None;
                entry.skip = false;
                self.shifted(key, f64::from(before) + step);
            }
            (Phase::Regular | Phase::Shifted, _) => {
                let stale = std::mem::take(&mut entry.skip) || entry.into_shift.take().is_some();
                if !stale {
                    self.regular(key, step);
                }
            }
        }
    }

    /// Records the rate change `step` of group `key` between two regular slices, with no phase
    /// shift between them.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a step of a rate is a rough number"
    )]
    fn regular(&mut self, key: MuxGroupKey, step: f64) {
        let square = (step * step).min(SQUARE_MAX) as f32;
        let entry = &mut self.entries[usize::from(key)];
        entry.known = entry.known.saturating_add(1);
        entry.steps += (square - entry.steps) * NEWEST_STEP_WEIGHT.max(1.0 / f32::from(entry.known));
        if entry.steps >= CALM {
            self.trust(key, Confidence::Open);
        } else if entry.trust == Confidence::Open && entry.known >= STEPS_MIN {
            self.trust(key, Confidence::Suspect);
        }
    }

    /// Evaluates the rate change `step` of group `key` across a phase shift. The rate of a group
    /// changes considerably only if a guest pattern aliases with the intervals, because the slices
    /// after the shift see a different phase of the pattern.
    fn shifted(&mut self, key: MuxGroupKey, step: f64) {
        let entry = &mut self.entries[usize::from(key)];
        if entry.trust != Confidence::Suspect {
            return;
        }
        self.checked += 1;
        if (step * step).min(SQUARE_MAX) > SHIFT_THRESHOLD * f64::from(entry.steps) + SHIFT_THRESHOLD_MIN {
            entry.revealed = entry.revealed.saturating_add(1);
            self.revealed += 1;
            self.pattern_confirmed |= entry.revealed >= CONFIRMING_SHIFTS;
        } else {
            entry.revealed = 0;
            // Makes every second cleared group yield first, so that half of the steady groups yield
            // in each rotation and all rotations have the same length.
            entry.passed = usize::from(key).is_multiple_of(2);
            self.trust(key, Confidence::Cleared);
        }
    }

    /// Returns the end of the current multiplexing interval, or `None` if no group waits.
    #[must_use]
    pub fn next_turn_ns(&self) -> Option<u64> {
        (self.waiting.len() > 0).then_some(self.next_turn_ns)
    }

    /// Ends the interval if it is due at `now_ns`. Moves the group that has been active longest to
    /// the waiting list and schedules the next interval. Returns the moved group, or `None` if no
    /// interval ended or no group waits. The caller then refills the slots.
    pub fn rotate_if_due(&mut self, now_ns: u64) -> Option<MuxGroupKey> {
        if self.waiting.len() == 0 || now_ns < self.next_turn_ns {
            return None;
        }
        let (planned, phase) = (self.next_turn_ns > 0, self.phase);
        self.next_turn_ns = now_ns + self.turn_length_ns();
        if !planned && self.policy == MuxPolicy::Adaptive {
            // This call only starts the first interval. The active groups were scheduled just now.
            return None;
        }
        let key = self.on.front()?;
        self.turns.0 += 1;
        self.on.remove(&mut self.entries, key, |e| &mut e.age);
        self.wait(key);
        self.entries[usize::from(key)].phase = phase;
        Some(key)
    }

    /// Returns `true` if group `key` is active.
    #[cfg(test)]
    pub(crate) fn is_active(&self, key: MuxGroupKey) -> bool {
        let entry = self.entries.get(usize::from(key));
        entry.is_some_and(|entry| entry.state == QueueState::On)
    }

    /// Selects a group to read in the middle of its slice
    /// ([`crate::estimate::CountEstimator::mid_slice`]). In a quarter of the intervals, returns an
    /// active group that is about halfway through its slice. All groups are selected equally often.
    /// Returns `None` if slices are one interval long and have no middle.
    ///
    /// Call this method between [`MuxQueue::rotate_if_due`] and [`MuxQueue::fill`].
    pub fn mid_slice(&mut self) -> Option<MuxGroupKey> {
        // Steps of the golden ratio select groups evenly, whatever the number of groups.
        self.draw = self.draw.wrapping_add(0x9e37_79b9);
        if self.draw >= 1 << 30 {
            return None;
        }
        let mut key = self.on.front()?;
        for _ in 0..self.on.len() / 2 {
            key = self.on.after(&self.entries, key, |e| &e.age)?;
        }
        Some(key)
    }

    /// Records a pattern that aliases with the slices of some group
    /// ([`crate::estimate::CountEstimator::detects_aliasing`]). Groups with apparently steady rates
    /// may have the same pattern, because all their slices see the same phase of it. Call this
    /// method at the end of a slice.
    pub fn record_aliasing(&mut self) {
        self.aliased_at = Some(self.turns);
    }

    /// Returns `true` if a pattern aliased with the slices of some group during the last rotations.
    #[must_use]
    pub fn has_aliasing(&self) -> bool {
        let lately = RotationCount(4).turns(self.len());
        self.aliased_at
            .is_some_and(|at| IntervalCount(self.turns.0 - at.0) <= lately)
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "lengths of turns are rounded and saturate"
    )]
    fn turn_length_ns(&mut self) -> u64 {
        if self.policy == MuxPolicy::Rotate {
            return self.turn_ns;
        }
        if self.intervals_left == IntervalCount::NONE {
            self.next_phase();
        }
        self.intervals_left.0 -= 1;
        let stretch = if self.phase == Phase::Stretched {
            STRETCH
        } else {
            1.0
        };
        ((self.turn_ns as f64 * self.pace.turn() * stretch) as u64).max(1)
    }

    /// Selects the next phase of the interval sequence.
    ///
    /// Regular intervals are the most precise, unless a periodic guest pattern aliases with them.
    /// In this case, all slices of a group see the same phase of the pattern, and the rate of the
    /// group appears nearly constant (the group is calm). Calm groups are therefore verified by a
    /// phase shift.
    fn next_phase(&mut self) {
        let groups = self.len();
        self.intervals_left = RotationCount::ONE.turns(groups);
        self.phase = match self.phase {
            Phase::Regular if self.run == RotationCount::NONE => {
                self.run = FIRST_SHIFT;
                self.intervals_left = self.run.turns(groups);
                Phase::Regular
            }
            Phase::Regular if self.suspects == 0 => Phase::Regular,
            Phase::Regular => {
                (self.checked, self.revealed, self.pattern_confirmed) = (0, 0, false);
                Phase::Stretched
            }
            Phase::Stretched => Phase::Shifted,
            Phase::Shifted => {
                if self.pattern_confirmed || (self.checked > 2 && 2 * self.revealed > self.checked) {
                    self.pace = self.pace.next();
                    self.era = self.era.next();
                    self.suspects = 0;
                }
                self.run = if self.revealed > 0 {
                    FIRST_SHIFT
                } else {
                    self.run.times(NEXT_SHIFT)
                };
                self.intervals_left = self.run.turns(groups);
                Phase::Regular
            }
        };
    }

    /// Fills the slots. Offers active groups their slots again in the order in which they became
    /// active, then offers free slots to waiting groups until one does not fit. An active group
    /// that does not take its offer returns to the waiting list.
    pub fn fill(&mut self, mut offer: impl FnMut(MuxGroupKey) -> SlotOfferOutcome) {
        let mut next = self.on.front();
        while let Some(key) = next {
            next = self.on.after(&self.entries, key, |e| &e.age);
            if offer(key) != SlotOfferOutcome::Taken {
                self.on.remove(&mut self.entries, key, |e| &mut e.age);
                self.wait(key);
            }
        }
        let (mut room, mut skipped) = (true, 0);
        while room && skipped < SKIP_MAX {
            let Some(key) = self.pick(skipped) else {
                break;
            };
            match offer(key) {
                SlotOfferOutcome::Taken => {
                    self.unwait(key);
                    self.entries[usize::from(key)].state = QueueState::On;
                    self.on.push_back(&mut self.entries, key, |e| &mut e.age);
                }
                SlotOfferOutcome::NoRoom => {
                    self.held = Some(key);
                    room = false;
                }
                SlotOfferOutcome::NotNow => skipped += 1,
            }
        }
    }

    /// Returns the next group to which a slot is offered. `skip` is the number of offers so far to
    /// groups that conflict with active groups.
    fn pick(&mut self, skip: usize) -> Option<MuxGroupKey> {
        if skip > 0 {
            let mut key = self.waiting.front()?;
            for _ in 1..skip {
                key = self.waiting.after(&self.entries, key, |e| &e.age)?;
            }
            return Some(key);
        }
        if self.held.is_some() {
            return self.held;
        }
        if self.policy == MuxPolicy::Adaptive {
            self.yield_steady_groups();
        }
        self.waiting.front()
    }

    /// Lets steady groups at the head of the waiting list yield to groups with varying rates: moves
    /// each of them to the end of the list every other time.
    fn yield_steady_groups(&mut self) {
        for _ in 0..SKIP_MAX.min(self.waiting.len()) {
            let Some(key) = self.waiting.front() else { return };
            let entry = &mut self.entries[usize::from(key)];
            entry.passed = entry.is_steady() && !entry.passed;
            if !entry.passed {
                return;
            }
            self.waiting.remove(&mut self.entries, key, |e| &mut e.age);
            self.waiting.push_back(&mut self.entries, key, |e| &mut e.age);
        }
    }
}

#[cfg(test)]
mod tests;
