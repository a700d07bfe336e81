//! [`MuxQueue`]: the flexible groups of one context, and whose turn it is.

use fastrand::Rng;

use super::MuxPolicy;
use super::list::{Link, List};

/// Weight classes of the adaptive policy: class `c` gets 2^c times the turns of class 0.
const CLASSES: usize = 7;
/// The class of a group nothing is known about yet.
const UNKNOWN_CLASS: u8 = 4;
/// Groups that cannot go on now although there is room (exclusive ones) are stepped over, this many at most.
const STEP_OVER: usize = 8;

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
    /// In `classes[class]` while waiting.
    peer: Link,
    place: Place,
    class: u8,
    variability: f32,
}

impl Entry {
    const ABSENT: Self = Self {
        age: Link::NONE,
        peer: Link::NONE,
        place: Place::Absent,
        class: UNKNOWN_CLASS,
        variability: 1.0,
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
    classes: [List; CLASSES],
    /// Offered a slot that was too small, so first when there is more room.
    held: Option<u32>,
    next_turn_ns: u64,
    turns: u64,
    /// Sum of the variability of all groups.
    variability: f64,
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
            classes: [List::EMPTY; CLASSES],
            held: None,
            next_turn_ns: 0,
            turns: 0,
            variability: 0.0,
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
            self.variability += f64::from(self.entries[key].variability);
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
        self.variability -= f64::from(self.entries[key].variability);
        self.entries[key] = Entry::ABSENT;
    }

    fn wait(&mut self, at: u32) {
        let entry = &mut self.entries[at as usize];
        entry.place = Place::Waiting;
        let class = usize::from(entry.class);
        self.waiting.push_back(&mut self.entries, at, |e| &mut e.age);
        self.classes[class].push_back(&mut self.entries, at, |e| &mut e.peer);
    }

    fn unwait(&mut self, at: u32) {
        let class = usize::from(self.entries[at as usize].class);
        self.waiting.remove(&mut self.entries, at, |e| &mut e.age);
        self.classes[class].remove(&mut self.entries, at, |e| &mut e.peer);
        if self.held == Some(at) {
            self.held = None;
        }
    }

    /// How much the rates of group `key` lately varied, the most variable member deciding
    /// ([`crate::estimate::Estimator::variability`]). Best told when its turn ends.
    pub fn set_variability(&mut self, key: usize, variability: Option<f64>) {
        let Some(entry) = self.entries.get(key) else {
            return;
        };
        let place = entry.place;
        if place == Place::Absent {
            return;
        }
        let new = variability.map_or(1.0, |v| v.clamp(0.0, 1e3)) as f32;
        self.variability += f64::from(new) - f64::from(entry.variability);
        let class = variability.map_or(UNKNOWN_CLASS, class_of);
        if place == Place::Waiting {
            self.unwait_class(key as u32, class);
        }
        let entry = &mut self.entries[key];
        entry.variability = new;
        entry.class = class;
    }

    fn unwait_class(&mut self, at: u32, class: u8) {
        let old = usize::from(self.entries[at as usize].class);
        self.classes[old].remove(&mut self.entries, at, |e| &mut e.peer);
        self.classes[usize::from(class)].push_back(&mut self.entries, at, |e| &mut e.peer);
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
        let mean = self.variability / self.len() as f64;
        let scale = (TURN_AT / mean).clamp(TURN_MIN, TURN_MAX);
        (self.turn_ns as f64 * scale * (0.5 + self.rng.f64())) as u64
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
        if self.policy == MuxPolicy::Rotate || self.turns.is_multiple_of(2) {
            return self.waiting.front();
        }
        self.draw()
    }

    /// A group from a class drawn by weight, the one there that waits longest.
    fn draw(&mut self) -> Option<u32> {
        let weight = |(class, list): (usize, &List)| (list.len() as u64) << class;
        let total: u64 = self.classes.iter().enumerate().map(weight).sum();
        if total == 0 {
            return None;
        }
        let mut left = self.rng.u64(0..total);
        for (class, list) in self.classes.iter().enumerate() {
            let here = weight((class, list));
            if left < here {
                return list.front();
            }
            left -= here;
        }
        None
    }
}

const TURN_AT: f64 = 0.1;
const TURN_MIN: f64 = 0.25;
const TURN_MAX: f64 = 2.0;

fn class_of(variability: f64) -> u8 {
    let class = (variability.max(1e-6).log2() * 2.0 / 3.0 + 4.0).round();
    class.clamp(0.0, (CLASSES - 1) as f64) as u8
}
