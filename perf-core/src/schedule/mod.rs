//! Slot scheduling: a pure function from the queued groups and the available slots to the next set
//! of active groups.
//!
//! The planner walks the queues in the order of the share policy and stops at the first group that
//! does not fit, so the cost of a plan depends on the number of slots rather than on the number of
//! groups. [`counter_assignments`] assigns events to counters, which determines whether a group
//! fits. [`crate::context`] then applies the difference between the plan and the active groups to
//! the drivers.

pub(crate) mod counter_assignments;
pub(crate) mod group;

use std::ops::{Index, IndexMut};

use smallvec::SmallVec;

use crate::model::keys::{Key, MuxGroupKey, PoolId, Table};
use crate::mux::{MuxPolicy, MuxQueue, SlotOfferOutcome};
use crate::pmu::CounterMask;
use group::{Group, GroupClass, GroupQueue};

use counter_assignments::CounterAssignments;

/// Policy by which slots are assigned to events if there are not enough slots for all events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SharePolicy {
    /// Guest counters have priority. Operator events share the remaining slots.
    #[default]
    GuestFirst,
    /// Operator events have priority. The event of a guest counter without a slot enters the error
    /// state.
    OperatorFirst,
    /// Guest counters have priority, and opening an event fails if the event could not be active
    /// simultaneously with all open events of the vCPU.
    Strict,
}

/// Error of parsing the name of a share policy: the name is unknown.
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
    /// Returns the scheduling classes in order of precedence under this policy. `flexible` is the
    /// order of the flexible classes.
    fn order(self, flexible: [GroupClass; GroupClass::FLEXIBLE]) -> [GroupClass; GroupClass::COUNT] {
        use GroupClass::{Guest, PinnedVcpu, PinnedVm};
        let [first, second] = flexible;
        match self {
            Self::GuestFirst | Self::Strict => [Guest, PinnedVm, PinnedVcpu, first, second],
            Self::OperatorFirst => [PinnedVm, PinnedVcpu, first, second, Guest],
        }
    }
}

/// The slots of one hardware driver in one context, with the groups that use them or wait for them.
#[derive(Debug)]
pub(crate) struct SlotPool {
    /// Index of the driver in the core's list of drivers.
    pub driver: usize,
    /// All counters of the driver.
    pub counters: CounterMask,
    /// Counters that single-vCPU events may use. All other counters are reserved for VM-wide
    /// events.
    pub vcpu_counters: CounterMask,
    /// Number of slots that active events hold.
    pub used: usize,
    pinned: [GroupQueue; GroupClass::PINNED],
    flexible: [MuxQueue; GroupClass::FLEXIBLE],
    /// Groups that cannot become active together with the active pinned groups. Parked groups are
    /// not in a queue, because they would block the groups after them indefinitely.
    pub parked: Vec<MuxGroupKey>,
    /// Capacity that the last plan left for the flexible queues.
    remaining: RemainingCapacity,
    /// Service that the VM-wide flexible groups have received minus that of the single-vCPU
    /// flexible groups. One unit is one multiplexing interval in which an average group of the
    /// class was active. The class that has received less service is planned first.
    vm_lead: f64,
    /// Active groups, in the order of the last plan.
    pub active: SmallVec<[MuxGroupKey; 16]>,
}

impl SlotPool {
    pub fn new(driver: usize, counters: CounterMask, reserved: usize, mux: MuxConfig) -> Self {
        Self {
            driver,
            counters,
            vcpu_counters: counters.skip(reserved),
            used: 0,
            pinned: [GroupQueue::default(); GroupClass::PINNED],
            flexible: std::array::from_fn(|_| mux.queue()),
            parked: Vec::new(),
            remaining: RemainingCapacity::default(),
            vm_lead: 0.0,
            active: SmallVec::new(),
        }
    }

    /// Returns the queue of class `class` in this pool.
    pub fn queue(&mut self, class: GroupClass) -> ClassQueue<'_> {
        match class {
            GroupClass::FlexibleVm => ClassQueue::Flexible(&mut self.flexible[0]),
            GroupClass::FlexibleVcpu => ClassQueue::Flexible(&mut self.flexible[1]),
            GroupClass::Guest | GroupClass::PinnedVm | GroupClass::PinnedVcpu => {
                ClassQueue::Pinned(&mut self.pinned[class as usize])
            }
        }
    }

    /// Reserves `reserved` counters for VM-wide events, preferring the general-purpose counters.
    pub fn reserve(&mut self, reserved: usize) {
        self.vcpu_counters = self.counters.skip(reserved);
    }

    /// Moves a parked group back to its queue.
    pub fn unpark(&mut self, groups: &mut Table<MuxGroupKey, Group>, key: MuxGroupKey) {
        if std::mem::take(&mut groups[key].parked) {
            self.parked.retain(|p| *p != key);
            if let ClassQueue::Flexible(queue) = self.queue(groups[key].class) {
                queue.insert(key);
            }
        }
    }

    /// Moves all parked groups back to their queues.
    fn unpark_all(&mut self, groups: &mut Table<MuxGroupKey, Group>) {
        let mut parked = std::mem::take(&mut self.parked);
        for key in parked.drain(..) {
            groups[key].parked = false;
            if let ClassQueue::Flexible(queue) = self.queue(groups[key].class) {
                queue.insert(key);
            }
        }
        self.parked = parked;
    }

    /// Returns the flexible classes, with the class that has received less service first.
    fn flexible_order(&self) -> [GroupClass; GroupClass::FLEXIBLE] {
        if self.vm_lead > 0.0 {
            [GroupClass::FlexibleVcpu, GroupClass::FlexibleVm]
        } else {
            [GroupClass::FlexibleVm, GroupClass::FlexibleVcpu]
        }
    }

    /// Updates [`SlotPool::vm_lead`] at the end of a multiplexing interval. Each flexible class is
    /// credited with the fraction of its groups that were active. The difference is limited to one
    /// interval, because a class may also wait for other reasons.
    fn account_service(&mut self) {
        let [vm, vcpu] = self.flexible.each_ref().map(MuxQueue::active_share);
        self.vm_lead = match (vm, vcpu) {
            (Some(vm), Some(vcpu)) => (self.vm_lead + vm - vcpu).clamp(-1.0, 1.0),
            _ => 0.0,
        };
    }

    /// Returns the number of groups that can run, active or waiting. Parked groups are not
    /// included.
    pub fn queued(&self) -> usize {
        let pinned: usize = self.pinned.iter().map(GroupQueue::len).sum();
        pinned + self.flexible.iter().map(MuxQueue::len).sum::<usize>()
    }

    /// Returns `true` if some queued group is not active, so that groups must be multiplexed.
    pub fn is_contended(&self) -> bool {
        self.queued() > self.active.len()
    }

    /// Returns the time at which the next multiplexing interval of a flexible queue ends, in
    /// nanoseconds.
    pub fn next_turn_ns(&self) -> Option<u64> {
        self.flexible.iter().filter_map(MuxQueue::next_turn_ns).min()
    }

    /// Ends the multiplexing interval of each flexible queue if it is due. Returns the active
    /// groups that must now be read, in the middle of their slices.
    pub fn rotate(&mut self, now_ns: u64) -> [Option<MuxGroupKey>; GroupClass::FLEXIBLE] {
        if self.next_turn_ns().is_some_and(|due_ns| due_ns <= now_ns) {
            self.account_service();
        }
        let mut mid_slice = [None; GroupClass::FLEXIBLE];
        for (queue, mid_slice) in self.flexible.iter_mut().zip(&mut mid_slice) {
            if queue.rotate_if_due(now_ns).is_some() {
                *mid_slice = queue.mid_slice();
            }
        }
        mid_slice
    }
}

/// The slot pools of a context, one per hardware driver.
#[derive(Debug, Default)]
pub(crate) struct SlotPools(Vec<SlotPool>);

impl SlotPools {
    pub fn push(&mut self, pool: SlotPool) -> PoolId {
        self.0.push(pool);
        PoolId::new(self.0.len() - 1)
    }

    /// Returns the IDs of the slot pools that exist.
    pub fn ids(&self) -> impl Iterator<Item = PoolId> + use<> {
        (0..self.0.len()).map(PoolId::new)
    }

    pub fn iter(&self) -> std::slice::Iter<'_, SlotPool> {
        self.0.iter()
    }
}

impl Index<PoolId> for SlotPools {
    type Output = SlotPool;

    fn index(&self, pool: PoolId) -> &SlotPool {
        &self.0[pool.index()]
    }
}

impl IndexMut<PoolId> for SlotPools {
    fn index_mut(&mut self, pool: PoolId) -> &mut SlotPool {
        &mut self.0[pool.index()]
    }
}

/// The queue of one scheduling class.
pub(crate) enum ClassQueue<'a> {
    /// A queue of pinned groups, in the order in which they were enabled.
    Pinned(&'a mut GroupQueue),
    /// A multiplexed queue of flexible groups.
    Flexible(&'a mut MuxQueue),
}

/// Configuration of multiplexing.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MuxConfig {
    pub policy: MuxPolicy,
    /// Multiplexing interval, in nanoseconds. Under [`MuxPolicy::Rotate`], every tick ends an
    /// interval.
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

/// Result of [`plan`]: the next set of active groups.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct SlotPlan {
    /// Groups that must be active, in order of precedence.
    pub active: SmallVec<[MuxGroupKey; 16]>,
    /// Pinned groups that do not fit and must enter the error state.
    pub failed: SmallVec<[MuxGroupKey; 4]>,
}

/// Capacity that remains for the flexible queues after the pinned groups that precede them.
#[derive(Debug, Default)]
struct RemainingCapacity {
    /// For each event of the preceding pinned groups, the counters that can hold it.
    before: SmallVec<[CounterMask; 16]>,
    vcpu_counters: CounterMask,
    /// `true` if one of the preceding pinned groups is exclusive.
    exclusive: bool,
}

/// The pinned groups that precede the flexible groups in a plan and are therefore always active.
#[derive(Clone, Copy, Debug, Default)]
struct AlwaysActive {
    /// Number of events in the preceding pinned groups.
    events: usize,
    exclusive: bool,
}

/// Capacity that the groups planned so far leave free.
struct FreeCapacity {
    seats: CounterAssignments,
    /// Counters that single-vCPU events may use.
    vcpu_counters: CounterMask,
    /// `true` if one of the planned groups is exclusive.
    exclusive: bool,
}

impl FreeCapacity {
    /// Returns the capacity of a pool before any group is planned. New events avoid the counters of
    /// the events that are currently active.
    fn new(pool: &SlotPool, groups: &Table<MuxGroupKey, Group>) -> Self {
        let mut seats = CounterAssignments::new(pool.counters);
        for &key in &pool.active {
            groups[key]
                .counter_requests
                .iter()
                .for_each(|want| seats.mark_active(want.previous_counter));
        }
        Self {
            seats,
            vcpu_counters: pool.vcpu_counters,
            exclusive: false,
        }
    }

    fn allowed(&self, class: GroupClass) -> CounterMask {
        if class.is_vcpu() {
            self.vcpu_counters
        } else {
            CounterMask::ALL
        }
    }

    fn offer(&mut self, key: MuxGroupKey, group: &Group) -> SlotOfferOutcome {
        // An exclusive group at the head of the queue is not overtaken by groups that fit.
        // Otherwise the multiplexed groups would always occupy the PMU.
        if self.exclusive || (group.exclusive && self.seats.len() > 0) {
            return SlotOfferOutcome::NoRoom;
        }
        let allowed = self.allowed(group.class);
        if self
            .seats
            .take(key, &group.counter_requests, allowed, group.active)
            .is_err()
        {
            return SlotOfferOutcome::NoRoom;
        }
        self.exclusive |= group.exclusive && !group.counter_requests.is_empty();
        SlotOfferOutcome::Taken
    }

    /// Returns `true` if a group would fit if only the always active groups were active too.
    fn can_ever_fit(&self, always: AlwaysActive, key: MuxGroupKey, group: &Group) -> bool {
        if group.exclusive && always.events > 0 {
            return false;
        }
        if group.counter_requests.is_empty() {
            return true;
        }
        let allowed = self.allowed(group.class);
        !always.exclusive
            && self
                .seats
                .truncated(always.events)
                .take(key, &group.counter_requests, allowed, false)
                .is_ok()
    }
}

impl RemainingCapacity {
    /// Replaces the remaining capacity. Returns `true` if it changed.
    fn update(&mut self, room: &FreeCapacity, always: AlwaysActive) -> bool {
        let before = || room.seats.suitable_counters().take(always.events);
        let same = self.vcpu_counters == room.vcpu_counters
            && self.exclusive == always.exclusive
            && self.before.iter().copied().eq(before());
        if !same {
            self.before.clear();
            self.before.extend(before());
            self.vcpu_counters = room.vcpu_counters;
            self.exclusive = always.exclusive;
        }
        !same
    }
}

/// Computes the next set of active groups of one slot pool, and updates the pool's flexible queues
/// accordingly.
pub(crate) fn plan(
    pool: &mut SlotPool,
    groups: &mut Table<MuxGroupKey, Group>,
    policy: SharePolicy,
) -> SlotPlan {
    let mut plan = SlotPlan::default();
    let mut room = FreeCapacity::new(pool, groups);
    let mut always = None;
    for class in policy.order(pool.flexible_order()) {
        match pool.queue(class) {
            ClassQueue::Pinned(queue) => {
                for key in queue.iter(groups) {
                    match room.offer(key, &groups[key]) {
                        SlotOfferOutcome::Taken => plan.active.push(key),
                        SlotOfferOutcome::NoRoom | SlotOfferOutcome::NotNow => plan.failed.push(key),
                    }
                }
            }
            ClassQueue::Flexible(_) => {
                let always = *always.get_or_insert_with(|| {
                    let always = AlwaysActive {
                        events: room.seats.len(),
                        exclusive: room.exclusive,
                    };
                    if pool.remaining.update(&room, always) {
                        pool.unpark_all(groups);
                    }
                    always
                });
                let mut hopeless: SmallVec<[MuxGroupKey; 16]> = SmallVec::new();
                let ClassQueue::Flexible(queue) = pool.queue(class) else {
                    continue;
                };
                queue.fill(|key| {
                    let group = &groups[key];
                    let turn = room.offer(key, group);
                    if turn == SlotOfferOutcome::Taken {
                        plan.active.push(key);
                    } else if !room.can_ever_fit(always, key, group) {
                        hopeless.push(key);
                        return SlotOfferOutcome::NotNow;
                    }
                    turn
                });
                for key in hopeless {
                    // Parks the group only once, even if it was offered twice.
                    if !std::mem::replace(&mut groups[key].parked, true) {
                        if let ClassQueue::Flexible(queue) = pool.queue(class) {
                            queue.remove(key);
                        }
                        pool.parked.push(key);
                    }
                }
            }
        }
    }
    for (group, want, seat) in room.seats.seated() {
        groups[group].counter_requests[want].previous_counter = Some(seat);
    }
    plan
}

#[cfg(test)]
mod tests;
