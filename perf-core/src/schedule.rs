//! Who gets the slots: a plain function from what waits and what there is to the next set.
//!
//! The plan is made by walking the queues in the share policy's order and stops as soon as the slots are used up, so
//! its cost follows the number of slots, not of groups. [`crate::context`] then tells the drivers the difference to
//! what is on.

use slab::Slab;
use smallvec::SmallVec;

use crate::group::{Class, Group, Queue};

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

/// Exclusive groups that cannot go on now are stepped over, but no more than this many in a row: the cost of a plan
/// stays bounded.
const STEP_OVER: usize = 8;

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
    pub queues: [Queue; Class::COUNT],
    /// Groups that are on, in the order of the last plan.
    pub on: SmallVec<[usize; 16]>,
}

impl Pool {
    pub fn new(driver: usize, slots: usize, reserved: usize) -> Self {
        Self {
            driver,
            slots,
            reserved: reserved.min(slots),
            used: 0,
            queues: [Queue::default(); Class::COUNT],
            on: SmallVec::new(),
        }
    }

    /// Whether some queued group is not on: then time must be shared.
    pub fn is_contended(&self) -> bool {
        self.queues.iter().map(Queue::len).sum::<usize>() > self.on.len()
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

/// Plans the next set of one pool.
pub(crate) fn plan(pool: &Pool, groups: &Slab<Group>, policy: SharePolicy) -> Plan {
    let mut plan = Plan::default();
    let (mut used, mut used_by_vcpu) = (0, 0);
    let mut exclusive = false;
    let mut can_add = true;
    for class in policy.order() {
        let mut stepped_over = 0;
        for key in pool.queues[class as usize].iter(groups) {
            if !class.is_pinned() && (!can_add || used >= pool.slots) {
                break;
            }
            let group = &groups[key];
            let alone = exclusive || (group.exclusive && used > 0);
            let reserve_hit =
                class.is_vcpu() && used_by_vcpu + group.need > pool.slots.saturating_sub(pool.reserved);
            if !alone && used + group.need <= pool.slots && !reserve_hit {
                used += group.need;
                if class.is_vcpu() {
                    used_by_vcpu += group.need;
                }
                exclusive |= group.exclusive && group.need > 0;
                plan.on.push(key);
            } else if class.is_pinned() {
                plan.failed.push(key);
            } else if alone {
                stepped_over += 1;
                if exclusive || stepped_over == STEP_OVER {
                    break;
                }
            } else if reserve_hit {
                // The slots left are for others: this queue is done, the next may not be.
                break;
            } else {
                can_add = false;
            }
        }
    }
    plan
}
