//! [`MuxQueue`]: the flexible groups of one context, and whose turn it is.

use fastrand::Rng;

use super::MuxPolicy;
use super::list::{Link, List};

/// Weight classes of the adaptive policy.
const CLASSES: usize = 7;
/// How much longer than a group of class `c` one of class 0 has to wait to be as much overdue: powers of the square root of 2.
const URGENCY: [f64; CLASSES] = [
    1.0,
    std::f64::consts::SQRT_2,
    2.0,
    2.0 * std::f64::consts::SQRT_2,
    4.0,
    4.0 * std::f64::consts::SQRT_2,
    8.0,
];
/// The class of a group nothing is known about yet.
const UNKNOWN_CLASS: u8 = 4;
/// A group whose rate makes steps of its own mean is in this class, and one class is this part of a doubling of the mean
/// square step. A power below one: with what is known of a group from a few slices, following it closely starves others.
const CLASS_OF_ONE: f64 = 4.0;
const CLASS_PER_DOUBLING: f64 = 0.25;
/// Weight of the newest step in what is remembered of a group, once there are enough. A long memory: a group that is given
/// less while it is quiet is seen less when it wakes up.
const FORGET: f64 = 0.01;
/// The same in what is remembered of a pace, once there are enough.
const FORGET_PACE: f64 = 0.02;
/// Squared steps count for no more than this: one slice of next to nothing must not decide for long.
const MOST_SQUARE: f64 = 16.0;
/// Groups that cannot go on now although there is room (exclusive ones) are stepped over, this many at most.
const STEP_OVER: usize = 8;

/// Lengths of turns to choose from, in turns of [`MuxPolicy::Rotate`].
const PACES: [f64; 3] = [0.25, 0.5, 1.0];
/// The pace at which nobody is visited less often than under `Rotate`: every other turn goes by age.
const FAIR_PACE: usize = 1;
/// Slices of one pace that say something about it.
const ENOUGH_SLICES: u32 = 4;
/// A pace is kept for this many turns per group, so that a group's slices can be compared.
const TURNS_PER_GROUP: u64 = 3;
/// Short turns are taken unless they are worse than long ones by this factor.
const MUCH_WORSE: f64 = 1.3;
/// Below this mean square step (rates within 1 % of each other) there is nothing to gain by hurrying.
const CALM: f64 = 1e-4;
/// One choice of pace in so many tries a neighbour of the best.
const EXPLORE: u32 = 32;
/// Turns vary in length by up to this part, up and down.
const JITTER: f64 = 0.25;
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

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// In `waiting` or `on`.
    age: Link,
    /// In `lines[class]` while waiting.
    peer: Link,
    /// Index in `classes[class]` while waiting.
    seat: u32,
    /// The turn at which it began to wait.
    since: u64,
    place: Place,
    class: u8,
    /// Pace at which the last slice was taken.
    pace: u8,
    /// Mean square of the relative steps of the rate.
    steps: f32,
    /// Slices that is the mean of.
    slices: u16,
}

impl Entry {
    const ABSENT: Self = Self {
        age: Link::NONE,
        peer: Link::NONE,
        seat: 0,
        since: 0,
        place: Place::Absent,
        class: UNKNOWN_CLASS,
        pace: u8::MAX,
        steps: 0.0,
        slices: 0,
    };
}

/// The flexible groups of one context.
///
/// Groups are known by small numbers of the caller's choosing (a slab's keys): memory is proportional to the largest.
#[derive(Debug)]
pub struct MuxQueue {
    policy: MuxPolicy,
    /// Length of a turn under [`MuxPolicy::Rotate`].
    turn_ns: u64,
    rng: Rng,
    entries: Vec<Entry>,
    /// On, longest first.
    on: List,
    /// Waiting, longest first.
    waiting: List,
    /// The same groups by weight class, in no order.
    classes: [Vec<u32>; CLASSES],
    /// And once more, longest first.
    lines: [List; CLASSES],
    /// Offered a slot that was too small, so first when there is more room.
    held: Option<u32>,
    next_turn_ns: u64,
    turns: u64,
    /// Index in [`PACES`], and how many more turns it is kept.
    pace: usize,
    pace_left: u64,
    /// Mean square step seen at each pace.
    scores: [f64; PACES.len()],
    /// Slices these means are of.
    seen: [u32; PACES.len()],
}

impl MuxQueue {
    /// A queue without groups. `turn_ns` is the length of a turn under `Rotate` and the measure for `Adaptive`; `seed`
    /// decides what `Adaptive` draws.
    #[must_use]
    pub fn new(policy: MuxPolicy, turn_ns: u64, seed: u64) -> Self {
        Self {
            policy,
            turn_ns: turn_ns.max(1),
            rng: Rng::with_seed(seed),
            entries: Vec::new(),
            on: List::EMPTY,
            waiting: List::EMPTY,
            classes: [const { Vec::new() }; CLASSES],
            lines: [List::EMPTY; CLASSES],
            held: None,
            next_turn_ns: 0,
            turns: 0,
            pace: FAIR_PACE,
            pace_left: 0,
            scores: [0.0; PACES.len()],
            seen: [0; PACES.len()],
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
            // Room for every group in every class, so that nothing is allocated later.
            let groups = self.len() + 1;
            for class in &mut self.classes {
                class.reserve(groups - class.len());
            }
            self.entries[key] = Entry::ABSENT;
            self.wait(at);
        }
    }

    /// Removes group `key`, on or waiting. One that is not there is left alone.
    pub fn remove(&mut self, key: usize) {
        let Some(place) = self.entries.get(key).map(|e| e.place) else {
            return;
        };
        match place {
            Place::Absent => return,
            Place::Waiting => self.unwait(key as u32),
            Place::On => self.on.remove(&mut self.entries, key as u32, |e| &mut e.age),
        }
        self.entries[key] = Entry::ABSENT;
    }

    fn wait(&mut self, at: u32) {
        self.entries[at as usize].place = Place::Waiting;
        self.entries[at as usize].since = self.turns;
        self.waiting.push_back(&mut self.entries, at, |e| &mut e.age);
        self.sit(at);
    }

    fn unwait(&mut self, at: u32) {
        self.waiting.remove(&mut self.entries, at, |e| &mut e.age);
        self.stand(at);
        if self.held == Some(at) {
            self.held = None;
        }
    }

    /// Adds a waiting group to its class.
    fn sit(&mut self, at: u32) {
        let entry = &mut self.entries[at as usize];
        let class = &mut self.classes[usize::from(entry.class)];
        entry.seat = class.len() as u32;
        class.push(at);
        let line = usize::from(entry.class);
        self.lines[line].push_back(&mut self.entries, at, |e| &mut e.peer);
    }

    /// Takes a waiting group out of its class.
    fn stand(&mut self, at: u32) {
        let Entry { class, seat, .. } = self.entries[at as usize];
        self.lines[usize::from(class)].remove(&mut self.entries, at, |e| &mut e.peer);
        let class = &mut self.classes[usize::from(class)];
        class.swap_remove(seat as usize);
        if let Some(&moved) = class.get(seat as usize) {
            self.entries[moved as usize].seat = seat;
        }
    }

    /// A slice of group `key` has ended, and its rate differed from the slice before by `step`, relative to its mean rate
    /// ([`crate::estimate::Estimator::last_step`]; of several members the largest). `None`: not known yet.
    pub fn slice_ended(&mut self, key: usize, step: Option<f64>) {
        let Some(entry) = self.entries.get_mut(key) else {
            return;
        };
        if entry.place == Place::Absent {
            return;
        }
        let last_pace = std::mem::replace(&mut entry.pace, self.pace as u8);
        let Some(step) = step else { return };
        let square = (step * step).min(MOST_SQUARE);
        entry.slices = entry.slices.saturating_add(1);
        entry.steps =
            entry.steps + (square as f32 - entry.steps) * (FORGET as f32).max(1.0 / f32::from(entry.slices));
        let (place, class) = (entry.place, class_of(f64::from(entry.steps)));
        if usize::from(last_pace) == self.pace {
            // Both slices were taken at this pace, so the step says something about it.
            let seen = &mut self.seen[self.pace];
            *seen = seen.saturating_add(1);
            let score = &mut self.scores[self.pace];
            *score += (square - *score) * FORGET_PACE.max(1.0 / f64::from(*seen));
        }
        if place == Place::Waiting {
            self.stand(key as u32);
        }
        self.entries[key].class = class;
        if place == Place::Waiting {
            self.sit(key as u32);
        }
    }

    /// When the next turn is due; `None` while nobody waits.
    #[must_use]
    pub fn next_turn_ns(&self) -> Option<u64> {
        (self.waiting.len() > 0).then_some(self.next_turn_ns)
    }

    /// If a turn is due at `now_ns`, sends the group that is on longest back to wait and sets the time of the next turn.
    /// The caller then fills the slots anew. `None` if no turn is due or nobody waits.
    pub fn turn(&mut self, now_ns: u64) -> Option<usize> {
        if self.waiting.len() == 0 || now_ns < self.next_turn_ns {
            return None;
        }
        self.turns += 1;
        self.next_turn_ns = now_ns + self.turn_length_ns();
        let at = self.on.front()?;
        self.on.remove(&mut self.entries, at, |e| &mut e.age);
        self.wait(at);
        Some(at as usize)
    }

    fn turn_length_ns(&mut self) -> u64 {
        if self.policy == MuxPolicy::Rotate {
            return self.turn_ns;
        }
        if self.pace_left == 0 {
            self.pace = self.choose_pace();
            self.pace_left = TURNS_PER_GROUP * self.len() as u64;
        }
        self.pace_left -= 1;
        let jitter = 1.0 - JITTER + 2.0 * JITTER * self.rng.f64();
        ((self.turn_ns as f64 * PACES[self.pace] * jitter) as u64).max(1)
    }

    /// The length of turns that makes the smallest error, as far as it shows in the steps between slices.
    ///
    /// The error's variance goes with the mean square step over the number of slices, so with step² × length. Where bursts
    /// last longer than a slice, steps are as high in short slices as in long ones, and short ones win. Where the rate is
    /// new every moment they are equal. A rhythm shorter than a slice makes short slices much worse.
    fn choose_pace(&mut self) -> usize {
        let unseen = (0..PACES.len()).find(|&pace| self.seen[pace] < ENOUGH_SLICES);
        if let Some(pace) = unseen {
            return pace;
        }
        if self.scores[self.pace] < CALM {
            return FAIR_PACE;
        }
        let cost = |pace: usize| self.scores[pace] * PACES[pace];
        let mut best = PACES.len() - 1;
        for pace in (0..best).rev() {
            if cost(pace) < MUCH_WORSE * cost(best) {
                best = pace;
            }
        }
        if self.rng.u32(0..EXPLORE) == 0 {
            best = if self.rng.bool() {
                best.saturating_sub(1)
            } else {
                (best + 1).min(PACES.len() - 1)
            };
        }
        best
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
        if self.policy == MuxPolicy::Rotate {
            return self.waiting.front();
        }
        if self.pace == 0 {
            return self.most_overdue();
        }
        // Visits are far apart here, and regular ones could keep step with the guest.
        if self.turns.is_multiple_of(2) {
            self.waiting.front()
        } else {
            self.draw()
        }
    }

    /// Of the groups that wait longest in each class, the one whose wait is longest for its class. Visits are then regular,
    /// and everybody's turn comes.
    fn most_overdue(&self) -> Option<u32> {
        let due = |(line, urgency): (&List, &f64)| {
            let at = line.front()?;
            let waits = self.turns - self.entries[at as usize].since + 1;
            Some((at, waits as f64 * urgency))
        };
        self.lines
            .iter()
            .zip(&URGENCY)
            .filter_map(due)
            .max_by(|a, b| a.1.total_cmp(&b.1))
            .map(|(at, _)| at)
    }

    /// Any group, those of urgent classes more likely.
    fn draw(&mut self) -> Option<u32> {
        let weights = self.classes.iter().zip(&URGENCY);
        let total: f64 = weights.clone().map(|(c, urgency)| c.len() as f64 * urgency).sum();
        let mut left = self.rng.f64() * total;
        let mut last = None;
        for (class, urgency) in weights {
            let at = (left / urgency) as usize;
            if let Some(&group) = class.get(at) {
                return Some(group);
            }
            left -= class.len() as f64 * urgency;
            last = class.last().copied().or(last);
        }
        // Rounding may leave a little.
        last
    }
}

fn class_of(mean_square_step: f64) -> u8 {
    let class = CLASS_OF_ONE + CLASS_PER_DOUBLING * mean_square_step.max(1e-9).log2();
    class.round().clamp(0.0, (CLASSES - 1) as f64) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Fills `slots` slots with groups that need one each.
    fn fill(queue: &mut MuxQueue, slots: usize) -> Vec<usize> {
        let mut on = Vec::new();
        queue.fill(|key| {
            if on.len() == slots {
                return Turn::NoRoom;
            }
            on.push(key);
            Turn::Taken
        });
        on
    }

    fn queue(policy: MuxPolicy, groups: usize) -> MuxQueue {
        let mut queue = MuxQueue::new(policy, 1_000, 7);
        (0..groups).for_each(|key| queue.insert(key));
        queue
    }

    /// Turns until `until_ns`; how long each group was on.
    fn play(queue: &mut MuxQueue, slots: usize, until_ns: u64, groups: usize) -> Vec<u64> {
        let mut on_ns = vec![0; groups];
        let mut now = 0;
        let mut on = fill(queue, slots);
        while now < until_ns {
            let next = queue.next_turn_ns().unwrap().max(now + 1);
            on.iter().for_each(|&key| on_ns[key] += next - now);
            now = next;
            queue.turn(now);
            on = fill(queue, slots);
        }
        on_ns
    }

    /// P8: equal groups get equal shares under rotation, within one turn.
    #[test]
    fn p8_rotation_is_fair_to_a_turn() {
        for (groups, slots) in [(2, 1), (5, 2), (8, 3), (7, 6)] {
            let mut queue = queue(MuxPolicy::Rotate, groups);
            let total = 1_000 * 840;
            let shares = play(&mut queue, slots, total, groups);
            let fair = total * slots as u64 / groups as u64;
            for share in shares {
                assert!(share.abs_diff(fair) <= 1_000 * slots as u64, "{share} of {fair}");
            }
        }
    }

    /// The variable group gets more, and the steady ones still no less than half a fair share.
    #[test]
    fn adaptive_gives_more_to_the_variable_and_starves_nobody() {
        let groups = 8;
        let mut queue = queue(MuxPolicy::Adaptive, groups);
        for _ in 0..100 {
            for key in 0..groups {
                queue.slice_ended(key, Some(if key == 3 { 2.0 } else { 0.001 }));
            }
        }
        let total = 4_000_000;
        let shares = play(&mut queue, 2, total, groups);
        let fair = total / 4;
        assert!(shares[3] > fair * 3 / 2, "{shares:?}");
        assert!(shares.iter().all(|&s| s > fair / 2), "{shares:?}");
    }

    #[test]
    fn turns_come_at_irregular_times_within_bounds() {
        let mut queue = queue(MuxPolicy::Adaptive, 4);
        let mut lengths = BTreeSet::new();
        let mut now = 0;
        fill(&mut queue, 1);
        for _ in 0..100 {
            queue.turn(now);
            fill(&mut queue, 1);
            let next = queue.next_turn_ns().unwrap();
            assert!((1_000 / 8..=1_250).contains(&(next - now)));
            lengths.insert(next - now);
            now = next;
        }
        assert!(lengths.len() > 20);
    }

    #[test]
    fn no_turn_is_due_while_everybody_is_on() {
        let mut queue = queue(MuxPolicy::Adaptive, 3);
        assert_eq!(fill(&mut queue, 4).len(), 3);
        assert_eq!(queue.next_turn_ns(), None);
        assert_eq!(queue.turn(u64::MAX), None);
        assert_eq!(fill(&mut queue, 4).len(), 3);
    }

    /// A group too large for what is left is next as soon as there is room, and nobody overtakes it.
    #[test]
    fn a_large_group_is_not_overtaken_for_ever() {
        for policy in [MuxPolicy::Rotate, MuxPolicy::Adaptive] {
            let mut queue = queue(policy, 6);
            let need = |key: usize| if key == 5 { 3 } else { 1 };
            let mut turns_on = 0;
            let mut now = 0;
            for _ in 0..200 {
                let mut used = 0;
                queue.fill(|key| {
                    if used + need(key) > 3 {
                        return Turn::NoRoom;
                    }
                    used += need(key);
                    turns_on += u32::from(key == 5);
                    Turn::Taken
                });
                now = queue.next_turn_ns().unwrap().max(now);
                queue.turn(now);
            }
            assert!(turns_on >= 10, "{policy:?}: on {turns_on} times in 200");
        }
    }

    proptest! {
        /// Whatever is called in whatever order: groups are neither lost nor doubled, and what is on was taken.
        #[test]
        fn groups_are_neither_lost_nor_doubled(
            adaptive in any::<bool>(),
            ops in prop::collection::vec((0u8..6, 0usize..12, 0u64..4_000), 0..200),
        ) {
            let policy = if adaptive { MuxPolicy::Adaptive } else { MuxPolicy::Rotate };
            let mut queue = MuxQueue::new(policy, 1_000, 1);
            let mut there = BTreeSet::new();
            let mut now = 0;
            for (op, key, n) in ops {
                match op {
                    0 => {
                        queue.insert(key);
                        there.insert(key);
                    }
                    1 => {
                        queue.remove(key);
                        there.remove(&key);
                    }
                    2 => queue.slice_ended(key, Some(n as f64 / 1_000.0)),
                    3 => {
                        now += n;
                        if let Some(left) = queue.turn(now) {
                            prop_assert!(there.contains(&left));
                        }
                    }
                    4 => {
                        // Some refuse: too large, or exclusive.
                        let mut room = 3;
                        queue.fill(|key| {
                            if key % 5 == 4 {
                                Turn::NotNow
                            } else if room == 0 {
                                Turn::NoRoom
                            } else {
                                room -= 1;
                                Turn::Taken
                            }
                        });
                    }
                    _ => {
                        let on = fill(&mut queue, 2);
                        let distinct: BTreeSet<_> = on.iter().copied().collect();
                        prop_assert_eq!(distinct.len(), on.len());
                        prop_assert!(distinct.is_subset(&there));
                        prop_assert_eq!(on.len(), there.len().min(2));
                    }
                }
                prop_assert_eq!(queue.len(), there.len());
                prop_assert_eq!(queue.classes.iter().map(Vec::len).sum::<usize>(), queue.waiting());
            }
        }
    }
}
