//! Who gets the slots: a plain function from what waits and what there is to the next set.
//!
//! The plan is made by walking the queues in the share policy's order and stops as soon as a group finds no
//! room, so its cost follows the number of slots, not of groups. Whether there is room is a question of which
//! event may sit on which counter: [`seats`] answers it. [`crate::context`] then tells the drivers the
//! difference to what is on.

pub(crate) mod group;
pub(crate) mod seats;

use std::ops::{Index, IndexMut};

use smallvec::SmallVec;

use crate::model::keys::{GroupKey, Key, PoolId, Table};
use crate::mux::{MuxPolicy, MuxQueue, Turn};
use crate::pmu::CounterMask;
use group::{Class, Group, Queue};

use seats::Seats;

/// Who gets slots when there are not enough.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SharePolicy {
    /// The guest's own counters first; the operator's events share what is left.
    #[default]
    GuestFirst,
    /// The operator's events first; a guest counter that finds no slot goes to the error state.
    OperatorFirst,
    /// As guest first, and an event is refused when opened if all those open on the vCPU could not be on
    /// together.
    Strict,
}

/// No such policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be guest-first, operator-first or strict")]
pub struct UnknownSharePolicy;

impl std::str::FromStr for SharePolicy {
    type Err = UnknownSharePolicy;

    fn from_str(name: &str) -> Result<Self, UnknownSharePolicy> {
        match name {
            "guest-first" => Ok(Self::GuestFirst),
            "operator-first" => Ok(Self::OperatorFirst),
            "strict" => Ok(Self::Strict),
            _ => Err(UnknownSharePolicy),
        }
    }
}

impl std::fmt::Display for SharePolicy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::GuestFirst => "guest-first",
            Self::OperatorFirst => "operator-first",
            Self::Strict => "strict",
        })
    }
}

impl SharePolicy {
    fn order(self) -> [Class; Class::COUNT] {
        use Class::{FlexibleVcpu, FlexibleVm, Guest, PinnedVcpu, PinnedVm};
        match self {
            Self::GuestFirst | Self::Strict => [Guest, PinnedVm, PinnedVcpu, FlexibleVm, FlexibleVcpu],
            Self::OperatorFirst => [PinnedVm, PinnedVcpu, FlexibleVm, FlexibleVcpu, Guest],
        }
    }
}

/// The slots of one hardware driver in one context.
#[derive(Debug)]
pub(crate) struct Pool {
    /// Index of the driver in the core's registry.
    pub driver: usize,
    /// Its counters.
    pub counters: CounterMask,
    /// Those that one vCPU's own events may use. The others are for events for the VM as a whole.
    pub vcpu_counters: CounterMask,
    /// Slots in use.
    pub used: usize,
    pinned: [Queue; Class::PINNED],
    flexible: [MuxQueue; Class::FLEXIBLE],
    /// Groups that can not go on while the pinned ones are on that are: they wait apart, or they would hold
    /// up those behind them for ever.
    pub parked: Vec<GroupKey>,
    /// What was left for each flexible queue at the last plan.
    left: [Left; Class::FLEXIBLE],
    /// Groups that are on, in the order of the last plan.
    pub on: SmallVec<[GroupKey; 16]>,
}

impl Pool {
    pub fn new(driver: usize, counters: CounterMask, reserved: usize, mux: MuxConfig) -> Self {
        Self {
            driver,
            counters,
            vcpu_counters: counters.skip(reserved),
            used: 0,
            pinned: [Queue::default(); Class::PINNED],
            flexible: std::array::from_fn(|_| mux.queue()),
            parked: Vec::new(),
            left: Default::default(),
            on: SmallVec::new(),
        }
    }

    /// The queue of `class`.
    pub fn queue(&mut self, class: Class) -> ClassQueue<'_> {
        match class {
            Class::FlexibleVm => ClassQueue::Flexible(&mut self.flexible[0]),
            Class::FlexibleVcpu => ClassQueue::Flexible(&mut self.flexible[1]),
            Class::Guest | Class::PinnedVm | Class::PinnedVcpu => {
                ClassQueue::Pinned(&mut self.pinned[class as usize])
            }
        }
    }

    /// Keeps `reserved` counters for events for the VM as a whole, those first that hold most.
    pub fn reserve(&mut self, reserved: usize) {
        self.vcpu_counters = self.counters.skip(reserved);
    }

    /// Puts a parked group back in line.
    pub fn unpark(&mut self, groups: &mut Table<GroupKey, Group>, key: GroupKey) {
        if std::mem::take(&mut groups[key].parked) {
            self.parked.retain(|p| *p != key);
            if let ClassQueue::Flexible(queue) = self.queue(groups[key].class) {
                queue.insert(key);
            }
        }
    }

    /// Puts all parked groups of `class` back in line.
    fn unpark_all(&mut self, groups: &mut Table<GroupKey, Group>, class: Class) {
        let mut parked = std::mem::take(&mut self.parked);
        parked.retain(|&key| {
            let back = groups[key].class == class;
            if back {
                groups[key].parked = false;
                if let ClassQueue::Flexible(queue) = self.queue(class) {
                    queue.insert(key);
                }
            }
            !back
        });
        self.parked = parked;
    }

    /// Groups that may run, on or not, but for those that are parked.
    pub fn queued(&self) -> usize {
        let pinned: usize = self.pinned.iter().map(Queue::len).sum();
        pinned + self.flexible.iter().map(MuxQueue::len).sum::<usize>()
    }

    /// Whether some queued group is not on: then time must be shared.
    pub fn is_contended(&self) -> bool {
        self.queued() > self.on.len()
    }

    /// When the next turn of the groups that share slots is due.
    pub fn next_turn_ns(&self) -> Option<u64> {
        self.flexible.iter().filter_map(MuxQueue::next_turn_ns).min()
    }

    /// Ends the turn of one group of each queue, if that is due. Returns groups that stay on and are to be
    /// read amid their slice.
    pub fn turn(&mut self, now_ns: u64) -> [Option<GroupKey>; Class::FLEXIBLE] {
        let mut amid = [None; Class::FLEXIBLE];
        for (queue, amid) in self.flexible.iter_mut().zip(&mut amid) {
            if queue.turn(now_ns).is_some() {
                *amid = queue.amid();
            }
        }
        amid
    }
}

/// The pools of a context.
#[derive(Debug, Default)]
pub(crate) struct Pools(Vec<Pool>);

impl Pools {
    pub fn push(&mut self, pool: Pool) -> PoolId {
        self.0.push(pool);
        PoolId::new(self.0.len() - 1)
    }

    /// Those there are now.
    pub fn ids(&self) -> impl Iterator<Item = PoolId> + use<> {
        (0..self.0.len()).map(PoolId::new)
    }

    pub fn iter(&self) -> std::slice::Iter<'_, Pool> {
        self.0.iter()
    }
}

impl Index<PoolId> for Pools {
    type Output = Pool;

    fn index(&self, pool: PoolId) -> &Pool {
        &self.0[pool.index()]
    }
}

impl IndexMut<PoolId> for Pools {
    fn index_mut(&mut self, pool: PoolId) -> &mut Pool {
        &mut self.0[pool.index()]
    }
}

/// A queue of either kind.
pub(crate) enum ClassQueue<'a> {
    /// In the order of enabling.
    Pinned(&'a mut Queue),
    /// By turns.
    Flexible(&'a mut MuxQueue),
}

/// How flexible groups share slots over time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MuxConfig {
    pub policy: MuxPolicy,
    /// Length of a turn; under rotation every tick is one.
    pub turn_ns: u64,
}

impl MuxConfig {
    fn queue(self) -> MuxQueue {
        let turn_ns = match self.policy {
            MuxPolicy::Rotate => 1,
            MuxPolicy::Adaptive => self.turn_ns,
        };
        MuxQueue::new(self.policy, turn_ns)
    }
}

/// What should be on next.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// In order of precedence.
    pub on: SmallVec<[GroupKey; 16]>,
    /// Pinned groups for which there is no room: they go to the error state.
    pub failed: SmallVec<[GroupKey; 4]>,
}

/// What is left for the groups of a flexible queue by those before them that are always on.
#[derive(Debug, Default)]
struct Left {
    /// The counters that each event of those before them may sit on.
    before: SmallVec<[CounterMask; 16]>,
    vcpu_counters: CounterMask,
    /// One of those before them is exclusive.
    exclusive: bool,
    /// All of it.
    untouched: bool,
}

/// The first groups of a plan: those that are always on.
#[derive(Clone, Copy, Debug, Default)]
struct Always {
    /// How many events they are.
    events: usize,
    exclusive: bool,
}

/// What the groups planned so far leave.
struct Room {
    seats: Seats,
    /// The counters one vCPU's own events may use.
    vcpu_counters: CounterMask,
    /// An exclusive group is among them.
    exclusive: bool,
}

impl Room {
    /// An empty one, that knows where sits what is on.
    fn new(pool: &Pool, groups: &Table<GroupKey, Group>) -> Self {
        let mut seats = Seats::new(pool.counters);
        for &key in &pool.on {
            groups[key].wants.iter().for_each(|want| seats.keep(want.seat));
        }
        Self {
            seats,
            vcpu_counters: pool.vcpu_counters,
            exclusive: false,
        }
    }

    fn allowed(&self, class: Class) -> CounterMask {
        if class.is_vcpu() {
            self.vcpu_counters
        } else {
            CounterMask::ALL
        }
    }

    fn offer(&mut self, key: GroupKey, group: &Group) -> Turn {
        // An exclusive group that is first in line lets nobody overtake it: otherwise those that share the
        // PMU in turns would never leave it to one.
        if self.exclusive || (group.exclusive && self.seats.len() > 0) {
            return Turn::NoRoom;
        }
        let allowed = self.allowed(group.class);
        if self.seats.take(key, &group.wants, allowed, group.on).is_err() {
            return Turn::NoRoom;
        }
        self.exclusive |= group.exclusive && !group.wants.is_empty();
        Turn::Taken
    }

    /// Whether a group that finds no room now could go on with those alone that are always on.
    fn ever_takes(&self, always: Always, untouched: bool, key: GroupKey, group: &Group) -> bool {
        if group.exclusive && !untouched {
            return false;
        }
        if group.wants.is_empty() {
            return true;
        }
        let allowed = self.allowed(group.class);
        !always.exclusive
            && self
                .seats
                .truncated(always.events)
                .take(key, &group.wants, allowed, false)
                .is_ok()
    }
}

impl Left {
    /// Notes what is left now. Returns whether it was something else before.
    fn update(&mut self, room: &Room, always: Always, untouched: bool) -> bool {
        let before = || room.seats.fits().take(always.events);
        let same = self.vcpu_counters == room.vcpu_counters
            && self.exclusive == always.exclusive
            && self.untouched == untouched
            && self.before.iter().copied().eq(before());
        if !same {
            self.before.clear();
            self.before.extend(before());
            self.vcpu_counters = room.vcpu_counters;
            self.exclusive = always.exclusive;
            self.untouched = untouched;
        }
        !same
    }
}

/// Plans the next set of one pool, and moves the flexible groups between on and waiting accordingly.
pub(crate) fn plan(pool: &mut Pool, groups: &mut Table<GroupKey, Group>, policy: SharePolicy) -> Plan {
    let mut plan = Plan::default();
    let mut room = Room::new(pool, groups);
    let mut always = Always::default();
    let mut shared = false;
    for class in policy.order() {
        match pool.queue(class) {
            ClassQueue::Pinned(queue) => {
                for key in queue.iter(groups) {
                    match room.offer(key, &groups[key]) {
                        Turn::Taken => plan.on.push(key),
                        Turn::NoRoom | Turn::NotNow => plan.failed.push(key),
                    }
                }
            }
            ClassQueue::Flexible(_) => {
                // Flexible groups before these are always on only if none of them has to wait.
                if !shared {
                    always = Always {
                        events: room.seats.len(),
                        exclusive: room.exclusive,
                    };
                }
                let untouched = room.seats.len() == 0;
                if pool.left[class as usize - Class::PINNED].update(&room, always, untouched) {
                    pool.unpark_all(groups, class);
                }
                let mut hopeless: SmallVec<[GroupKey; 16]> = SmallVec::new();
                let ClassQueue::Flexible(queue) = pool.queue(class) else {
                    continue;
                };
                queue.fill(|key| {
                    let group = &groups[key];
                    let turn = room.offer(key, group);
                    if turn == Turn::Taken {
                        plan.on.push(key);
                    } else if !room.ever_takes(always, untouched, key, group) {
                        hopeless.push(key);
                        return Turn::NotNow;
                    }
                    turn
                });
                for key in hopeless {
                    // It may have been offered twice.
                    if !std::mem::replace(&mut groups[key].parked, true) {
                        if let ClassQueue::Flexible(queue) = pool.queue(class) {
                            queue.remove(key);
                        }
                        pool.parked.push(key);
                    }
                }
                if let ClassQueue::Flexible(queue) = pool.queue(class) {
                    shared |= queue.waiting() > 0;
                }
            }
        }
    }
    for (group, want, seat) in room.seats.seated() {
        groups[group].wants[want].seat = Some(seat);
    }
    plan
}

#[cfg(test)]
mod tests;
