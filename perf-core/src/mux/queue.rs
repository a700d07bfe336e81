//! [`MuxQueue`]: the flexible groups of one context, and whose turn it is.

use super::list::{Link, List};
use super::{GroupKey, MuxPolicy};

/// Groups that cannot go on now although there is room (exclusive ones) are stepped over, this many at most.
/// And as many steady ones are passed over at most to find one whose turn it is.
const STEP_OVER: usize = 8;

/// Lengths of turns to choose from, in turns of [`MuxPolicy::Rotate`]: powers of the golden ratio (1/φ⁴,
/// 1/φ³, 1/φ²), because rotations of such lengths have the fewest rhythms in common. Short turns see more;
/// the next length is taken when a rhythm of the guest keeps step with one.
const PACES: [f64; 3] = [0.146, 0.236, 0.382];
/// The turn of [`MuxPolicy::Rotate`] for which those of [`MuxPolicy::Adaptive`] are `first_ns` long at first.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "lengths of turns are rounded and saturate"
)]
pub(crate) fn measure_of(first_ns: u64) -> u64 {
    (first_ns as f64 / PACES[0]) as u64
}

/// How much longer the turns of a shifting rotation are: φ, so that what follows is 0.618 of a rotation off
/// the beat.
const STRETCH: f64 = 1.618;

/// Weight of the newest step in what is remembered of a group, once there are enough.
const FORGET: f32 = 0.01;
/// Squared steps count for no more than this: one slice of next to nothing must not decide for long.
const MOST_SQUARE: f64 = 16.0;
/// Steps that say something about a group.
const ENOUGH_STEPS: u16 = 8;
/// Mean square step of a steady group, whose rates are within 3 %. It is passed over every other time.
const STEADY: f32 = 1e-3;
/// Below this mean square step (rates within 25 %) a group either is that calm or keeps step with the turns.
const CALM: f32 = 0.06;
/// A shift shows a rhythm when the rate then changes by this many times the mean square step and a tenth of
/// the rate.
const TELLING: f64 = 8.0;
const NOTICEABLE: f64 = 0.01;
/// Shifts in a row that must tell on the same group, if they do not tell on most.
const TELLING_SHIFTS: u8 = 2;
/// The wait before the first shift, and by how much longer each wait is than the one before: a shift costs a
/// little of the precision that regular turns have.
const FIRST_SHIFT: Rotations = Rotations(8);
const NEXT_SHIFT: u64 = 4;

/// One of [`PACES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pace(usize);

impl Pace {
    const FIRST: Self = Self(0);

    /// Length of its turns, in turns of [`MuxPolicy::Rotate`].
    fn turn(self) -> f64 {
        PACES[self.0]
    }

    /// The one that is taken when a rhythm keeps step with this.
    fn next(self) -> Self {
        Self((self.0 + 1) % PACES.len())
    }
}

/// The time between two changes of pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Era(u32);

impl Era {
    const FIRST: Self = Self(0);

    fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}

/// Rounds in which each group has its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rotations(u64);

impl Rotations {
    const NONE: Self = Self(0);
    const ONE: Self = Self(1);

    /// How many turns these are of so many groups.
    fn turns(self, groups: usize) -> Turns {
        Turns(self.0.saturating_mul(groups as u64))
    }

    fn times(self, n: u64) -> Self {
        Self(self.0.saturating_mul(n))
    }
}

/// Turns, each of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
struct Turns(u64);

impl Turns {
    const NONE: Self = Self(0);
}

/// What became of a group that was offered a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It is on.
    Taken,
    /// There is no room for it; it stays first in line, and nobody overtakes it.
    NoRoom,
    /// It cannot be on together with what is on; others may.
    NotNow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Absent,
    Waiting,
    On,
}

/// What is known of a group's rhythm at the present pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trust {
    /// Too little is known, or its rate varies so much that nothing can hide.
    Open,
    /// Calm, and no shift has shown yet that it really is.
    Suspect,
    /// Calm before and after a shift.
    Cleared,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// In `waiting` or `on`.
    age: Link,
    place: Place,
    trust: Trust,
    /// During which its last slice ended.
    phase: Phase,
    /// The [`MuxQueue::era`] of what follows.
    era: Era,
    /// Mean square of the relative steps of the rate between regular slices.
    steps: f32,
    /// How many that is the mean of.
    known: u16,
    /// The next step compares slices of different length and says nothing.
    skip: bool,
    /// The step into the stretched rotation.
    into_shift: Option<f32>,
    /// Shifts in a row that told on it.
    told: u8,
    /// It was passed over since it last was on.
    passed: bool,
}

impl Entry {
    const ABSENT: Self = Self {
        age: Link::NONE,
        place: Place::Absent,
        trust: Trust::Open,
        phase: Phase::Regular,
        era: Era::FIRST,
        steps: 0.0,
        known: 0,
        skip: true,
        into_shift: None,
        told: 0,
        passed: false,
    };

    fn is_steady(&self) -> bool {
        self.trust == Trust::Cleared && self.steps < STEADY
    }
}

/// What the turns are doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// All of the same length.
    Regular,
    /// One rotation of longer turns, which shifts all that follow by 0.618 of a rotation.
    Stretched,
    /// The rotation after it.
    Shifted,
}

/// The flexible groups of one context.
///
/// Memory is proportional to the largest [`GroupKey`].
#[derive(Debug)]
pub struct MuxQueue {
    policy: MuxPolicy,
    /// Length of a turn under [`MuxPolicy::Rotate`].
    turn_ns: u64,
    entries: Vec<Entry>,
    /// On, longest first.
    on: List,
    /// Waiting, longest first.
    waiting: List,
    /// Offered a slot that was too small, so first when there is more room.
    held: Option<GroupKey>,
    /// 0 while no turn is planned.
    next_turn_ns: u64,
    pace: Pace,
    era: Era,
    phase: Phase,
    /// What is left of the phase.
    left: Turns,
    /// Until the next shift, if somebody is suspect by then.
    run: Rotations,
    /// Groups that are [`Trust::Suspect`] in this era.
    suspects: usize,
    /// Of those seen in this shift: how many, on how many it told, and whether on one again.
    looked_at: usize,
    told: usize,
    told_again: bool,
    /// Decides whose slice is looked at amid.
    draw: u32,
    /// Those so far, and which was the last with [`MuxQueue::rhythm_seen`].
    turns: Turns,
    rhythm_at: Option<Turns>,
}

impl MuxQueue {
    /// A queue without groups. `turn_ns` is the length of a turn under `Rotate` and the measure for
    /// `Adaptive`.
    #[must_use]
    pub fn new(policy: MuxPolicy, turn_ns: u64) -> Self {
        Self {
            policy,
            turn_ns: turn_ns.max(1),
            entries: Vec::new(),
            on: List::EMPTY,
            waiting: List::EMPTY,
            held: None,
            next_turn_ns: 0,
            pace: Pace::FIRST,
            era: Era::FIRST,
            phase: Phase::Regular,
            left: Turns::NONE,
            run: Rotations::NONE,
            suspects: 0,
            looked_at: 0,
            told: 0,
            told_again: false,
            draw: 0,
            turns: Turns::NONE,
            rhythm_at: None,
        }
    }

    /// Groups there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.on.len() + self.waiting.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Groups that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Adds group `key`, last in line. One that is there already is left alone.
    pub fn insert(&mut self, key: GroupKey) {
        let at = usize::from(key);
        if u32::try_from(at).is_err() {
            return;
        }
        if at >= self.entries.len() {
            self.entries.resize(at + 1, Entry::ABSENT);
        }
        if self.entries[at].place == Place::Absent {
            self.entries[at] = Entry::ABSENT;
            if self.waiting.len() == 0 {
                // Turns begin anew.
                self.next_turn_ns = 0;
            }
            self.wait(key);
        }
    }

    /// Removes group `key`, on or waiting. One that is not there is left alone.
    pub fn remove(&mut self, key: GroupKey) {
        let Some(place) = self.entries.get(usize::from(key)).map(|e| e.place) else {
            return;
        };
        match place {
            Place::Absent => return,
            Place::Waiting => self.unwait(key),
            Place::On => self.on.remove(&mut self.entries, key, |e| &mut e.age),
        }
        self.trust(key, Trust::Open);
        self.entries[usize::from(key)] = Entry::ABSENT;
    }

    fn wait(&mut self, key: GroupKey) {
        self.entries[usize::from(key)].place = Place::Waiting;
        self.waiting.push_back(&mut self.entries, key, |e| &mut e.age);
    }

    fn unwait(&mut self, key: GroupKey) {
        self.waiting.remove(&mut self.entries, key, |e| &mut e.age);
        if self.held == Some(key) {
            self.held = None;
        }
    }

    fn trust(&mut self, key: GroupKey, trust: Trust) {
        let entry = &mut self.entries[usize::from(key)];
        if entry.era == self.era {
            self.suspects -= usize::from(entry.trust == Trust::Suspect);
            self.suspects += usize::from(trust == Trust::Suspect);
        }
        entry.trust = trust;
    }

    /// What the last slice of group `key` counted is known, and its rate was higher or lower than in the
    /// slice before by `step`, relative to its mean rate ([`crate::estimate::Estimator::last_step`]; of
    /// several members the largest). `None`: not known yet.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a step of a rate is a rough number"
    )]
    pub fn slice_ended(&mut self, key: GroupKey, step: Option<f64>) {
        let Some(entry) = self.entries.get_mut(usize::from(key)) else {
            return;
        };
        let (false, Some(step)) = (entry.place == Place::Absent, step) else {
            return;
        };
        if entry.era != self.era {
            // What was seen at another pace says nothing about this one.
            *entry = Entry {
                age: entry.age,
                place: entry.place,
                phase: entry.phase,
                passed: entry.passed,
                era: self.era,
                ..Entry::ABSENT
            };
        }
        match (entry.phase, entry.into_shift) {
            (Phase::Stretched, _) => entry.into_shift = Some(step as f32),
            // These two steps together lead from one regular slice to another, 0.618 of a rotation off the
            // beat.
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

    /// A step between two regular slices.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a step of a rate is a rough number"
    )]
    fn regular(&mut self, key: GroupKey, step: f64) {
        let square = (step * step).min(MOST_SQUARE) as f32;
        let entry = &mut self.entries[usize::from(key)];
        entry.known = entry.known.saturating_add(1);
        entry.steps += (square - entry.steps) * FORGET.max(1.0 / f32::from(entry.known));
        if entry.steps >= CALM {
            self.trust(key, Trust::Open);
        } else if entry.trust == Trust::Open && entry.known >= ENOUGH_STEPS {
            self.trust(key, Trust::Suspect);
        }
    }

    /// The step across a shift. A rate that goes its own way hardly notices; one in step with the turns shows
    /// another side.
    fn shifted(&mut self, key: GroupKey, step: f64) {
        let entry = &mut self.entries[usize::from(key)];
        if entry.trust != Trust::Suspect {
            return;
        }
        self.looked_at += 1;
        if (step * step).min(MOST_SQUARE) > TELLING * f64::from(entry.steps) + NOTICEABLE {
            entry.told = entry.told.saturating_add(1);
            self.told += 1;
            self.told_again |= entry.told >= TELLING_SHIFTS;
        } else {
            entry.told = 0;
            // Half of the steady ones are passed over in each rotation, so that all rotations are equally
            // long.
            entry.passed = usize::from(key).is_multiple_of(2);
            self.trust(key, Trust::Cleared);
        }
    }

    /// When the next turn is due; `None` while nobody waits.
    #[must_use]
    pub fn next_turn_ns(&self) -> Option<u64> {
        (self.waiting.len() > 0).then_some(self.next_turn_ns)
    }

    /// If a turn is due at `now_ns`, sends the group that is on longest back to wait and sets the time of the
    /// next turn. The caller then fills the slots anew. `None` if no turn is due or nobody waits.
    pub fn turn(&mut self, now_ns: u64) -> Option<GroupKey> {
        if self.waiting.len() == 0 || now_ns < self.next_turn_ns {
            return None;
        }
        let (planned, phase) = (self.next_turn_ns > 0, self.phase);
        self.next_turn_ns = now_ns + self.turn_length_ns();
        if !planned && self.policy == MuxPolicy::Adaptive {
            // Those that are on have only just begun.
            return None;
        }
        let key = self.on.front()?;
        self.turns.0 += 1;
        self.on.remove(&mut self.entries, key, |e| &mut e.age);
        self.wait(key);
        self.entries[usize::from(key)].phase = phase;
        Some(key)
    }

    /// To be called when a group has left and the slots are not filled anew yet: in one turn of four a group
    /// that is on and about halfway through its slice, for [`crate::estimate::Estimator::amid`]. All
    /// groups are drawn equally often. `None` where slices are one turn long: there is no middle.
    pub fn amid(&mut self) -> Option<GroupKey> {
        // Steps of the golden ratio keep step with no number of groups.
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

    /// A rhythm keeps step with the slices of some group ([`crate::estimate::Estimator::keeps_step`]): others
    /// may have it and see one side of it only, which looks like calm. To be told when a slice ends.
    pub fn rhythm_seen(&mut self) {
        self.rhythm_at = Some(self.turns);
    }

    /// Whether a rhythm was in step with some group's slices during the last rotations.
    #[must_use]
    pub fn has_rhythm(&self) -> bool {
        let lately = Rotations(4).turns(self.len());
        self.rhythm_at
            .is_some_and(|at| Turns(self.turns.0 - at.0) <= lately)
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
        if self.left == Turns::NONE {
            self.next_phase();
        }
        self.left.0 -= 1;
        let stretch = if self.phase == Phase::Stretched {
            STRETCH
        } else {
            1.0
        };
        ((self.turn_ns as f64 * self.pace.turn() * stretch) as u64).max(1)
    }

    /// Regular turns are the most precise there are, unless a rhythm of the guest keeps step with them: then
    /// every slice sees the same side of it, and that looks like calm. So calm is put to the test by a
    /// shift.
    fn next_phase(&mut self) {
        let groups = self.len();
        self.left = Rotations::ONE.turns(groups);
        self.phase = match self.phase {
            Phase::Regular if self.run == Rotations::NONE => {
                self.run = FIRST_SHIFT;
                self.left = self.run.turns(groups);
                Phase::Regular
            }
            Phase::Regular if self.suspects == 0 => Phase::Regular,
            Phase::Regular => {
                (self.looked_at, self.told, self.told_again) = (0, 0, false);
                Phase::Stretched
            }
            Phase::Stretched => Phase::Shifted,
            Phase::Shifted => {
                if self.told_again || (self.looked_at > 2 && 2 * self.told > self.looked_at) {
                    self.pace = self.pace.next();
                    self.era = self.era.next();
                    self.suspects = 0;
                }
                self.run = if self.told > 0 {
                    FIRST_SHIFT
                } else {
                    self.run.times(NEXT_SHIFT)
                };
                self.left = self.run.turns(groups);
                Phase::Regular
            }
        };
    }

    /// Fills the slots: offers each group that is on its slot again, in the order they went on, then waiting
    /// groups, until `offer` finds no room. A group that is on and is not `Taken` goes back to wait.
    pub fn fill(&mut self, mut offer: impl FnMut(GroupKey) -> Turn) {
        let mut next = self.on.front();
        let mut room = true;
        while let Some(key) = next {
            next = self.on.after(&self.entries, key, |e| &e.age);
            let turn = offer(key);
            room &= turn != Turn::NoRoom;
            if turn != Turn::Taken {
                self.on.remove(&mut self.entries, key, |e| &mut e.age);
                self.wait(key);
            }
        }
        let mut stepped_over = 0;
        while room && stepped_over < STEP_OVER {
            let Some(key) = self.pick(stepped_over) else {
                break;
            };
            match offer(key) {
                Turn::Taken => {
                    self.unwait(key);
                    self.entries[usize::from(key)].place = Place::On;
                    self.on.push_back(&mut self.entries, key, |e| &mut e.age);
                }
                Turn::NoRoom => {
                    self.held = Some(key);
                    room = false;
                }
                Turn::NotNow => stepped_over += 1,
            }
        }
    }

    /// The next group to offer a slot to, after `skip` that could not take it.
    fn pick(&mut self, skip: usize) -> Option<GroupKey> {
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
            self.pass_over_steady();
        }
        self.waiting.front()
    }

    /// Sends steady groups at the head of the line to its end, each every other time. Those that vary get the
    /// time.
    fn pass_over_steady(&mut self) {
        for _ in 0..STEP_OVER.min(self.waiting.len()) {
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
