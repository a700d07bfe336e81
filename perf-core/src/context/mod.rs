//! Event contexts, one per vCPU and one for the whole VM.
//!
//! All code of this module runs under the lock of the context and takes the time as a parameter.
//! Event times are computed from timestamps, so waiting events need no updates. This file contains
//! event states, queues and control operations; `members` adds and removes events, `pass` schedules
//! them, `reading` reads them, and `cell` contains the lock.

mod cell;
mod lists;
mod lost_slots;
mod members;
mod overflow;
mod pass;
mod raise;
mod reading;

pub(crate) use cell::{ContextCell, ContextOwner};
pub(crate) use overflow::{OverflowSearch, ReportBatch, ServicePass};

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use smallvec::SmallVec;

use crate::model::event::{Event, EventShared, Source};
use crate::model::failure::{EventFailure, EventFailureCause};
use crate::model::keys::{EventKey, GroupKey, PoolId, Table};
use crate::model::lists::{EventList, EventLists};
use crate::model::slices::Slices;
use crate::model::software::IDS;
use crate::model::state::EventState;
use crate::model::times::ContextClock;
use crate::model::totals::Totals;
use crate::pmu::{CounterMask, PmuError};
use crate::record::ReadEntry;
use crate::schedule::counter_assignments::CounterRequest;
use crate::schedule::group::{Group, GroupQueue};
use crate::schedule::{ClassQueue, MuxConfig, SharePolicy, SlotPool, SlotPools};

/// Statistics of a context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextStats {
    /// Number of events, including inherited ones.
    pub events: usize,
    /// Number of active events.
    pub active: usize,
    /// Number of active hardware events.
    pub active_hardware: usize,
    /// Number of groups that wait for a slot.
    pub waiting_groups: usize,
    /// Number of samples written to rings.
    pub samples: u64,
    /// Number of samples lost because the ring was full, or because they were pending when the vCPU
    /// was removed.
    pub lost_samples: u64,
    /// Number of times that an event was throttled until the next tick because it overflowed too
    /// frequently.
    pub throttles: u64,
}

/// Count and time slices of an event, exchanged when two contexts are swapped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EventHistory {
    totals: Totals,
    slices: Option<Slices>,
}

#[derive(Default)]
pub(crate) struct Context {
    pub clock: ContextClock,
    pub events: Table<EventKey, Event>,
    pub groups: Table<GroupKey, Group>,
    pub pools: SlotPools,
    /// Groups of software events that are enabled.
    software: GroupQueue,
    /// Software groups that their driver rejected when they were last scheduled.
    refused: VecDeque<GroupKey>,
    /// Active events that overflow, are throttled, or follow a frequency. Never grow beyond the
    /// capacity that is reserved when events are added.
    pub lists: EventLists,
    /// Number of ticks.
    pub ticks: u64,
    /// Position in the frequency list at which the next tick continues.
    pub next_frequency: usize,
    /// Events with pending overflows that were found when the events were scheduled out.
    pub pending: Vec<EventKey>,
    /// `true` if overflows are pending or may occur in a driver at any time. Read without the lock,
    /// so that a vCPU does not lock the VM context unnecessarily.
    pub to_serve: Arc<AtomicBool>,
    /// Events that count software events raised by the VMM, by ID.
    pub raised: [Vec<EventKey>; IDS],
    /// Buffer for the readings that samples contain, large enough for the largest group.
    pub entries: Vec<ReadEntry>,
    /// Buffer for the branch stack of a sample.
    pub branch_words: Vec<u64>,
    /// Generation of VM-wide events from which the context was created, as long as it contains no
    /// other events.
    pub clone_of: Option<u64>,
    /// Number of guards that prevent a context swap.
    pub pins: usize,
    pub policy: SharePolicy,
    mux: MuxConfig,
    active: usize,
    /// Number of times that an event entered the error state. Read without the lock. The value
    /// belongs to the vCPU and moves with it when contexts are swapped.
    pub errors: Arc<AtomicU64>,
    /// Time at which active events were last checked for the loss of their counters.
    pub looked_ns: u64,
    pub samples: u64,
    pub lost_samples: u64,
    pub throttles: u64,
    /// `true` after the vCPU was removed. Events are then no longer scheduled.
    pub dead: bool,
}

impl Context {
    pub fn new(policy: SharePolicy, mux: MuxConfig) -> Self {
        Self {
            policy,
            mux,
            ..Self::default()
        }
    }

    pub fn stats(&self) -> ContextStats {
        ContextStats {
            events: self.events.len(),
            active: self.active,
            active_hardware: self.pools.iter().map(|p| p.used).sum(),
            waiting_groups: self
                .pools
                .iter()
                .map(|p| p.queued() + p.parked.len() - p.on.len())
                .sum(),
            samples: self.samples,
            lost_samples: self.lost_samples,
            throttles: self.throttles,
        }
    }

    /// Returns the slot pool of hardware driver `driver`, and creates the pool on first use.
    pub fn pool(&mut self, driver: usize, counters: CounterMask, reserved: usize) -> PoolId {
        let pool = self.pools.ids().find(|pool| self.pools[*pool].driver == driver);
        pool.unwrap_or_else(|| {
            self.pools
                .push(SlotPool::new(driver, counters, reserved, self.mux))
        })
    }

    /// Returns the event at `key`, or `None` if the event of `shared` was removed and its key is
    /// unused or reused.
    pub fn get(&mut self, key: EventKey, shared: &Arc<EventShared>) -> Option<&mut Event> {
        self.events
            .get_mut(key)
            .filter(|e| Arc::ptr_eq(&e.shared, shared))
    }

    #[inline]
    pub fn leader_state(&self, key: EventKey) -> EventState {
        self.events[self.groups[self.events[key].group].leader()].state
    }

    /// Returns `true` if `key` is a group leader.
    pub fn is_leader(&self, key: EventKey) -> bool {
        self.groups[self.events[key].group].leader() == key
    }

    /// Returns the members of the group of `key`, leader first.
    pub fn members(&self, key: EventKey) -> SmallVec<[EventKey; 4]> {
        self.groups[self.events[key].group].members.clone()
    }

    /// Arms an event to overflow after `overflow_in` further counts, and returns its count.
    pub fn arm(&mut self, key: EventKey, overflow_in: u64) -> Result<u64, PmuError> {
        let event = &mut self.events[key];
        let count = event.arm(overflow_in)?;
        // An active event that is armed for the first time can now overflow.
        if event.places.of(EventList::Armed).is_none() {
            self.add_to_lists(key);
        }
        Ok(count)
    }

    /// Pauses counting of an active event without scheduling it out, and returns its count.
    pub fn pause(&mut self, key: EventKey) -> u64 {
        let event = &mut self.events[key];
        if event.state != EventState::Active {
            return event.count();
        }
        let count = event.pause();
        if event.sampling.pending > 0 {
            self.queue_pending(key);
        }
        count
    }

    /// Reverts [`Context::pause`] for an event that is still active. If this fails, the event is no
    /// longer active.
    pub fn go_on(
        &mut self,
        key: EventKey,
        overflow_in: Option<u64>,
        now_ns: impl FnOnce() -> u64,
    ) -> Result<(), PmuError> {
        let event = &mut self.events[key];
        if let Err(error) = event.go_on(overflow_in) {
            self.handle_restart_failure(key, &error, now_ns());
            return Err(error);
        }
        if overflow_in.is_some() && event.places.of(EventList::Armed).is_none() {
            self.add_to_lists(key);
        }
        Ok(())
    }

    /// Enables an event that is off or in the error state, and schedules it if possible. Has no
    /// effect on an enabled event.
    pub fn enable(&mut self, key: EventKey, now_ns: u64) {
        if self.events[key].state >= EventState::Inactive {
            return;
        }
        let time = self.clock.advance(now_ns);
        let leader = self.is_leader(key);
        let event = &mut self.events[key];
        event.state = EventState::Inactive;
        event.times.enable(time);
        if leader {
            let group = self.events[key].group;
            for i in 1..self.groups[group].members.len() {
                let sibling = &mut self.events[self.groups[group].members[i]];
                if sibling.state >= EventState::Inactive {
                    sibling.times.enable(time);
                }
            }
        }
        self.schedule_enabled(key, now_ns);
    }

    /// Queues the group of an event that was enabled and schedules the groups that can run.
    fn schedule_enabled(&mut self, key: EventKey, now_ns: u64) {
        let group = self.events[key].group;
        self.update_wants(group);
        let leader = self.groups[group].leader();
        if self.events[leader].state < EventState::Inactive {
            return;
        }
        if matches!(self.events[leader].source, Source::Family) {
            return;
        }
        self.enqueue(group);
        self.go(group, now_ns);
    }

    /// Disables an event. Disabling a leader schedules out its whole group, but changes only the
    /// state of the leader to off. An event in the error state remains in that state.
    pub fn disable(&mut self, key: EventKey, now_ns: u64) {
        if self.events[key].state < EventState::Inactive {
            return;
        }
        let group = self.events[key].group;
        let pool = self.groups[group].pool;
        self.settle_group_times(group, now_ns);
        if self.is_leader(key) {
            self.sched_out_group(group, now_ns);
            self.unqueue(group);
        } else {
            self.stop_event(key, now_ns);
        }
        self.events[key].state = EventState::Off;
        self.update_wants(group);
        if let Some(pool) = pool {
            self.reschedule(pool, now_ns);
        }
    }

    /// Moves a pinned group that is not active to the error state. The group has not counted since
    /// `since_ns` of the context time.
    pub fn fail(&mut self, group: GroupKey, cause: EventFailureCause, since_ns: u64, now_ns: u64) {
        let leader = self.groups[group].leader();
        self.settle_group_times(group, now_ns);
        self.unqueue(group);
        let event = &mut self.events[leader];
        event.state = EventState::Error;
        event.failure = Some(EventFailure { since_ns, cause });
        log::debug!("pinned event {} does not count: {cause}", event.shared.id);
        self.update_wants(group);
        self.errors.fetch_add(1, Ordering::Release);
    }

    fn settle_group_times(&mut self, group: GroupKey, now_ns: u64) {
        let time = self.clock.advance(now_ns);
        let leader_state = self.events[self.groups[group].leader()].state;
        for i in 0..self.groups[group].members.len() {
            let event = &mut self.events[self.groups[group].members[i]];
            event.times.settle(event.state, leader_state, time);
        }
    }

    /// Updates the slot requirements of a group. A group without a slot pool has no member that
    /// needs a slot.
    #[inline]
    fn update_wants(&mut self, group: GroupKey) {
        if self.groups[group].pool.is_some() {
            self.recount_wants(group);
        }
    }

    fn recount_wants(&mut self, group: GroupKey) {
        let Group { members, wants, .. } = &mut self.groups[group];
        let events = &self.events;
        let wanting = |key: EventKey| events[key].pool.is_some() && events[key].state >= EventState::Inactive;
        let before = wants.len();
        // Drops counter requests of members that were removed or disabled.
        wants.retain(|want| members.contains(&want.event) && wanting(want.event));
        let mut changed = wants.len() != before;
        for &event in members.iter().filter(|m| wanting(**m)) {
            if !wants.iter().any(|want| want.event == event) {
                changed = true;
                wants.push(CounterRequest {
                    event,
                    fits: events[event].fits,
                    seat: None,
                });
            }
        }
        if changed && let Some(pool) = self.groups[group].pool {
            // A parked group may fit with its new requirements.
            self.pools[pool].unpark(&mut self.groups, group);
        }
    }

    fn enqueue(&mut self, group: GroupKey) {
        if self.groups[group].queued {
            return;
        }
        self.groups[group].queued = true;
        match self.groups[group].pool {
            Some(pool) => match self.pools[pool].queue(self.groups[group].class) {
                ClassQueue::Pinned(queue) => queue.push_back(&mut self.groups, group),
                ClassQueue::Flexible(queue) => queue.insert(group),
            },
            None => self.software.push_back(&mut self.groups, group),
        }
    }

    fn unqueue(&mut self, group: GroupKey) {
        self.groups[group].queued = false;
        if std::mem::take(&mut self.groups[group].refused) {
            self.refused.retain(|refused| *refused != group);
        }
        if let Some(pool) = self.groups[group].pool {
            self.pools[pool].unpark(&mut self.groups, group);
        }
        match self.groups[group].pool {
            Some(pool) => match self.pools[pool].queue(self.groups[group].class) {
                ClassQueue::Pinned(queue) => queue.remove(&mut self.groups, group),
                ClassQueue::Flexible(queue) => queue.remove(group),
            },
            None => self.software.remove(&mut self.groups, group),
        }
    }
}
