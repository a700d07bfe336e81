//! [`MuxQueue`]: the flexible groups of one context, and whose turn it is.

use super::MuxPolicy;
use super::list::{Link, List};

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
/// Rotations before the first shift, and by how much longer each wait is than the one before: a shift costs a
/// little of the precision that regular turns have.
const FIRST_SHIFT: u64 = 8;
const NEXT_SHIFT: u64 = 4;

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
    era: u32,
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
        era: 0,
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
/// Groups are known by small numbers of the caller's choosing (a slab's keys): memory is proportional to the
/// largest.
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
    held: Option<u32>,
    /// 0 while no turn is planned.
    next_turn_ns: u64,
    /// Index in [`PACES`].
    pace: usize,
    /// Counts changes of pace.
    era: u32,
    phase: Phase,
    /// Turns left of the phase.
    left: u64,
    /// Rotations until the next shift, if somebody is suspect by then.
    run: u64,
    /// Groups that are [`Trust::Suspect`] in this era.
    suspects: usize,
    /// Of those seen in this shift: how many, on how many it told, and whether on one again.
    looked_at: usize,
    told: usize,
    told_again: bool,
    /// Decides whose slice is looked at amid.
    draw: u32,
    /// Turns so far, and which was the last with [`MuxQueue::rhythm_seen`].
    turns: u64,
    rhythm_at: Option<u64>,
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
            pace: 0,
            era: 0,
            phase: Phase::Regular,
            left: 0,
            run: 0,
            suspects: 0,
            looked_at: 0,
            told: 0,
            told_again: false,
            draw: 0,
            turns: 0,
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
    pub fn insert(&mut self, key: usize) {
        let Ok(at) = u32::try_from(key) else { return };
        if key >= self.entries.len() {
            self.entries.resize(key + 1, Entry::ABSENT);
        }
        if self.entries[key].place == Place::Absent {
            self.entries[key] = Entry::ABSENT;
            if self.waiting.len() == 0 {
                // Turns begin anew.
                self.next_turn_ns = 0;
            }
            self.wait(at);
        }
    }

    /// Removes group `key`, on or waiting. One that is not there is left alone.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "keys are inserted as numbers of 32 bits"
    )]
    pub fn remove(&mut self, key: usize) {
        let Some(place) = self.entries.get(key).map(|e| e.place) else {
            return;
        };
        match place {
            Place::Absent => return,
            Place::Waiting => self.unwait(key as u32),
            Place::On => self.on.remove(&mut self.entries, key as u32, |e| &mut e.age),
        }
        self.trust(key, Trust::Open);
        self.entries[key] = Entry::ABSENT;
    }

    fn wait(&mut self, at: u32) {
        self.entries[at as usize].place = Place::Waiting;
        self.waiting.push_back(&mut self.entries, at, |e| &mut e.age);
    }

    fn unwait(&mut self, at: u32) {
        self.waiting.remove(&mut self.entries, at, |e| &mut e.age);
        if self.held == Some(at) {
            self.held = None;
        }
    }

    fn trust(&mut self, key: usize, trust: Trust) {
        let entry = &mut self.entries[key];
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
    pub fn slice_ended(&mut self, key: usize, step: Option<f64>) {
        let Some(entry) = self.entries.get_mut(key) else {
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
    fn regular(&mut self, key: usize, step: f64) {
        let square = (step * step).min(MOST_SQUARE) as f32;
        let entry = &mut self.entries[key];
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
    fn shifted(&mut self, key: usize, step: f64) {
        let entry = &mut self.entries[key];
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
            entry.passed = key.is_multiple_of(2);
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
    pub fn turn(&mut self, now_ns: u64) -> Option<usize> {
        if self.waiting.len() == 0 || now_ns < self.next_turn_ns {
            return None;
        }
        let (planned, phase) = (self.next_turn_ns > 0, self.phase);
        self.next_turn_ns = now_ns + self.turn_length_ns();
        if !planned && self.policy == MuxPolicy::Adaptive {
            // Those that are on have only just begun.
            return None;
        }
        let at = self.on.front()?;
        self.turns += 1;
        self.on.remove(&mut self.entries, at, |e| &mut e.age);
        self.wait(at);
        self.entries[at as usize].phase = phase;
        Some(at as usize)
    }

    /// To be called when a group has left and the slots are not filled anew yet: in one turn of four a group
    /// that is on and about halfway through its slice, for [`crate::estimate::Estimator::amid`]. All
    /// groups are drawn equally often. `None` where slices are one turn long: there is no middle.
    pub fn amid(&mut self) -> Option<usize> {
        // Steps of the golden ratio keep step with no number of groups.
        self.draw = self.draw.wrapping_add(0x9e37_79b9);
        if self.draw >= 1 << 30 {
            return None;
        }
        let mut at = self.on.front()?;
        for _ in 0..self.on.len() / 2 {
            at = self.on.after(&self.entries, at, |e| &e.age)?;
        }
        Some(at as usize)
    }

    /// A rhythm keeps step with the slices of some group ([`crate::estimate::Estimator::keeps_step`]): others
    /// may have it and see one side of it only, which looks like calm. To be told when a slice ends.
    pub fn rhythm_seen(&mut self) {
        self.rhythm_at = Some(self.turns);
    }

    /// Whether a rhythm was in step with some group's slices during the last rotations.
    #[must_use]
    pub fn has_rhythm(&self) -> bool {
        let lately = 4 * self.len() as u64;
        self.rhythm_at.is_some_and(|at| self.turns - at <= lately)
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
        if self.left == 0 {
            self.next_phase();
        }
        self.left -= 1;
        let stretch = if self.phase == Phase::Stretched {
            STRETCH
        } else {
            1.0
        };
        ((self.turn_ns as f64 * PACES[self.pace] * stretch) as u64).max(1)
    }

    /// Regular turns are the most precise there are, unless a rhythm of the guest keeps step with them: then
    /// every slice sees the same side of it, and that looks like calm. So calm is put to the test by a
    /// shift.
    fn next_phase(&mut self) {
        let rotation = self.len() as u64;
        self.left = rotation;
        self.phase = match self.phase {
            Phase::Regular if self.run == 0 => {
                self.run = FIRST_SHIFT;
                self.left = self.run * rotation;
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
                    self.pace = (self.pace + 1) % PACES.len();
                    self.era = self.era.wrapping_add(1);
                    self.suspects = 0;
                }
                self.run = if self.told > 0 {
                    FIRST_SHIFT
                } else {
                    self.run.saturating_mul(NEXT_SHIFT)
                };
                self.left = self.run.saturating_mul(rotation);
                Phase::Regular
            }
        };
    }

    /// Fills the slots: offers each group that is on its slot again, in the order they went on, then waiting
    /// groups, until `offer` finds no room. A group that is on and is not `Taken` goes back to wait.
    pub fn fill(&mut self, mut offer: impl FnMut(usize) -> Turn) {
        let mut next = self.on.front();
        let mut room = true;
        while let Some(at) = next {
            next = self.on.after(&self.entries, at, |e| &e.age);
            let turn = offer(at as usize);
            room &= turn != Turn::NoRoom;
            if turn != Turn::Taken {
                self.on.remove(&mut self.entries, at, |e| &mut e.age);
                self.wait(at);
            }
        }
        let mut stepped_over = 0;
        while room && stepped_over < STEP_OVER {
            let Some(at) = self.pick(stepped_over) else {
                break;
            };
            match offer(at as usize) {
                Turn::Taken => {
                    self.unwait(at);
                    self.entries[at as usize].place = Place::On;
                    self.on.push_back(&mut self.entries, at, |e| &mut e.age);
                }
                Turn::NoRoom => {
                    self.held = Some(at);
                    room = false;
                }
                Turn::NotNow => stepped_over += 1,
            }
        }
    }

    /// The next group to offer a slot to, after `skip` that could not take it.
    fn pick(&mut self, skip: usize) -> Option<u32> {
        if skip > 0 {
            let mut at = self.waiting.front()?;
            for _ in 1..skip {
                at = self.waiting.after(&self.entries, at, |e| &e.age)?;
            }
            return Some(at);
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
            let Some(at) = self.waiting.front() else { return };
            let entry = &mut self.entries[at as usize];
            entry.passed = entry.is_steady() && !entry.passed;
            if !entry.passed {
                return;
            }
            self.waiting.remove(&mut self.entries, at, |e| &mut e.age);
            self.waiting.push_back(&mut self.entries, at, |e| &mut e.age);
        }
    }
}

#[cfg(test)]
mod tests;
