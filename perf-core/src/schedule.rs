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
            flexible: std::array::from_fn(|i| mux.queue((driver + 1) as u64 * 2 + i as u64)),
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

    /// Groups that may run, on or not.
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
    pub seed: u64,
}

impl MuxConfig {
    fn queue(self, number: u64) -> MuxQueue {
        let turn_ns = match self.policy {
            MuxPolicy::Rotate => 1,
            MuxPolicy::Adaptive => self.turn_ns,
        };
        MuxQueue::new(self.policy, turn_ns, self.seed.wrapping_add(number))
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
        if self.exclusive || (group.exclusive && self.used > 0) {
            return Turn::NotNow;
        }
        if self.used + group.need > self.slots || (vcpu && self.used_by_vcpu + group.need > self.vcpu_slots) {
            return Turn::NoRoom;
        }
        self.used += group.need;
        self.used_by_vcpu += if vcpu { group.need } else { 0 };
        self.exclusive |= group.exclusive && group.need > 0;
        Turn::Taken
    }
}

/// Plans the next set of one pool, and moves the flexible groups between on and waiting accordingly.
pub(crate) fn plan(pool: &mut Pool, groups: &Slab<Group>, policy: SharePolicy) -> Plan {
    let mut plan = Plan::default();
    let mut room = Room {
        slots: pool.slots,
        vcpu_slots: pool.slots - pool.reserved,
        used: 0,
        used_by_vcpu: 0,
        exclusive: false,
    };
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
            ClassQueue::Flexible(queue) => queue.fill(|key| {
                let turn = room.offer(&groups[key]);
                if turn == Turn::Taken {
                    plan.on.push(key);
                }
                turn
            }),
        }
    }
    plan
}
