//! Who gets the slots: a plain function from what waits and what there is to the next set.
//!
//! The plan is made by walking the queues in the share policy's order and stops as soon as the slots are used up, so
//! its cost follows the number of slots, not of groups. [`crate::context`] then tells the drivers the difference to
//! what is on.

use slab::Slab;
use smallvec::SmallVec;

use crate::group::{Class, Group, Queue};
use crate::mux::{MuxPolicy, MuxQueue, Turn};

/// Who gets slots when there are not enough.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SharePolicy {
    /// The guest's own counters first; the operator's events share what is left.
    #[default]
    GuestFirst,
    /// The operator's events first; a guest counter that finds no slot goes to the error state.
    OperatorFirst,
    /// As guest first, and an event is refused when opened if all those open on the vCPU could not be on together.
    Strict,
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
    /// Events that can be on at once.
    pub slots: usize,
    /// Slots that only events for the VM as a whole may use.
    pub reserved: usize,
    /// Slots in use.
    pub used: usize,
    pinned: [Queue; Class::PINNED],
    flexible: [MuxQueue; Class::FLEXIBLE],
    /// Groups that can not go on while the pinned ones are on that are: they wait apart, or they would hold up those
    /// behind them for ever.
    pub parked: Vec<usize>,
    /// What was left for each flexible queue at the last plan.
    left: [Left; Class::FLEXIBLE],
    /// Groups that are on, in the order of the last plan.
    pub on: SmallVec<[usize; 16]>,
}

impl Pool {
    pub fn new(driver: usize, slots: usize, reserved: usize, mux: MuxConfig) -> Self {
        Self {
            driver,
            slots,
            reserved: reserved.min(slots),
            used: 0,
            pinned: [Queue::default(); Class::PINNED],
            flexible: std::array::from_fn(|_| mux.queue()),
            parked: Vec::new(),
            left: [Left::default(); Class::FLEXIBLE],
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

    /// Puts a parked group back in line.
    pub fn unpark(&mut self, groups: &mut Slab<Group>, key: usize) {
        if std::mem::take(&mut groups[key].parked) {
            self.parked.retain(|p| *p != key);
            if let ClassQueue::Flexible(queue) = self.queue(groups[key].class) {
                queue.insert(key);
            }
        }
    }

    /// Puts all parked groups of `class` back in line.
    fn unpark_all(&mut self, groups: &mut Slab<Group>, class: Class) {
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

    /// Ends the turn of one group of each queue, if that is due.
    pub fn turn(&mut self, now_ns: u64) {
        for queue in &mut self.flexible {
            let _ = queue.turn(now_ns);
        }
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
    pub on: SmallVec<[usize; 16]>,
    /// Pinned groups for which there is no room: they go to the error state.
    pub failed: SmallVec<[usize; 4]>,
}

/// What is left for the groups of a flexible queue by those before them that are always on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Left {
    slots: usize,
    vcpu_slots: usize,
    /// All of it.
    untouched: bool,
}

impl Left {
    /// Whether a group could go on if no other flexible group were there.
    fn ever_takes(self, group: &Group) -> bool {
        let slots = if group.class.is_vcpu() {
            self.slots.min(self.vcpu_slots)
        } else {
            self.slots
        };
        group.need <= slots && (!group.exclusive || self.untouched)
    }
}

/// What the groups planned so far leave.
struct Room {
    slots: usize,
    /// Slots one vCPU's own events may use.
    vcpu_slots: usize,
    used: usize,
    used_by_vcpu: usize,
    /// An exclusive group is among them.
    exclusive: bool,
}

impl Room {
    fn offer(&mut self, group: &Group) -> Turn {
        let vcpu = group.class.is_vcpu();
        // An exclusive group that is first in line lets nobody overtake it: otherwise those that share the PMU in turns
        // would never leave it to one.
        if self.exclusive
            || (group.exclusive && self.used > 0)
            || self.used + group.need > self.slots
            || (vcpu && self.used_by_vcpu + group.need > self.vcpu_slots)
        {
            return Turn::NoRoom;
        }
        self.used += group.need;
        self.used_by_vcpu += if vcpu { group.need } else { 0 };
        self.exclusive |= group.exclusive && group.need > 0;
        Turn::Taken
    }
}

/// Plans the next set of one pool, and moves the flexible groups between on and waiting accordingly.
pub(crate) fn plan(pool: &mut Pool, groups: &mut Slab<Group>, policy: SharePolicy) -> Plan {
    let mut plan = Plan::default();
    let mut room = Room {
        slots: pool.slots,
        vcpu_slots: pool.slots - pool.reserved,
        used: 0,
        used_by_vcpu: 0,
        exclusive: false,
    };
    let mut left = Left::default();
    let mut shared = false;
    for class in policy.order() {
        match pool.queue(class) {
            ClassQueue::Pinned(queue) => {
                for key in queue.iter(groups) {
                    match room.offer(&groups[key]) {
                        Turn::Taken => plan.on.push(key),
                        Turn::NoRoom | Turn::NotNow => plan.failed.push(key),
                    }
                }
            }
            ClassQueue::Flexible(_) => {
                // Flexible groups before these are always on only if none of them has to wait.
                if !shared {
                    left.slots = if room.exclusive { 0 } else { room.slots - room.used };
                    left.vcpu_slots = room.vcpu_slots.saturating_sub(room.used_by_vcpu);
                }
                left.untouched = room.used == 0;
                let number = class as usize - Class::PINNED;
                if pool.left[number] != left {
                    pool.left[number] = left;
                    pool.unpark_all(groups, class);
                }
                let mut hopeless: SmallVec<[usize; 16]> = SmallVec::new();
                let ClassQueue::Flexible(queue) = pool.queue(class) else {
                    continue;
                };
                queue.fill(|key| {
                    if !left.ever_takes(&groups[key]) {
                        hopeless.push(key);
                        return Turn::NotNow;
                    }
                    let turn = room.offer(&groups[key]);
                    if turn == Turn::Taken {
                        plan.on.push(key);
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
    plan
}
