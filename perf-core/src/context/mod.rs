//! Event contexts, one per vCPU and one for the whole VM.
//!
//! All code of this module runs under the lock of the context and takes the current time as a
//! parameter. Event times are computed from timestamps, so events that wait for a slot need no
//! updates. This file contains event states, queues and control operations. Submodule `members`
//! adds and removes events, `pass` schedules them, `reading` reads them, and `cell` contains the
//! lock.

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
use crate::model::failure::{PinnedEventFailure, PinnedEventFailureCause};
use crate::model::keys::{EventKey, MuxGroupKey, PoolId, Table};
use crate::model::lists::{EventList, EventLists};
use crate::model::slices::Slices;
use crate::model::software::IDS;
use crate::model::state::{EventState, PendingTickWork, TickTimer};
use crate::model::times::ContextClock;
use crate::model::totals::Totals;
use crate::pmu::{CounterMask, PmuError};
use crate::record::ReadFormatEntry;
use crate::schedule::counter_assignments::CounterRequest;
use crate::schedule::group::{Group, GroupQueue};
use crate::schedule::{ClassQueue, MuxConfig, SharePolicy, SlotPool, SlotPools};

/// Statistics of an event context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextStats {
    /// Number of open events in the context, including inherited ones.
    pub events: usize,
    /// Number of active events in the context.
    pub active: usize,
    /// Number of active hardware events in the context.
    pub active_hardware: usize,
    /// Number of groups in the context that wait for a slot.
    pub waiting_groups: usize,
    /// Number of samples that events of the context wrote to rings.
    pub samples: u64,
    /// Number of samples of the context that were lost, because the ring was full or because the
    /// vCPU was removed before they were written.
    pub lost_samples: u64,
    /// Number of times that an event of the context was throttled until the next tick because it
    /// overflowed too frequently.
    pub throttles: u64,
}

/// The count and time slices of an event so far. Two events exchange their histories when their
/// contexts are swapped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EventHistory {
    totals: Totals,
    slices: Option<Slices>,
}

#[derive(Default)]
pub(crate) struct Context {
    pub clock: ContextClock,
    pub events: Table<EventKey, Event>,
    pub groups: Table<MuxGroupKey, Group>,
    pub pools: SlotPools,
    /// Queue of the enabled groups that contain only software events.
    software: GroupQueue,
    /// Software groups that could not be scheduled last time because their driver rejected them.
    refused: VecDeque<MuxGroupKey>,
    /// Lists of the active events that can overflow, are throttled or have a target frequency.
    /// Their capacity is reserved when events are added, so the lists do not grow on a hot path.
    pub lists: EventLists,
    /// Number of ticks that this context has received.
    pub ticks: u64,
    /// Index into the frequency list at which the next tick continues to adjust periods.
    pub next_frequency: usize,
    /// Events whose overflows are pending and not yet serviced, for example because the events were
    /// scheduled out.
    pub pending: Vec<EventKey>,
    /// `true` if overflows are pending, or if a driver event is armed and may overflow at any time.
    /// Can be read without the lock, so that a vCPU locks the VM context only if necessary.
    pub to_serve: Arc<AtomicBool>,
    /// For each software event ID, the events that count this raised event.
    pub raised: [Vec<EventKey>; IDS],
    /// Buffer for the group readings in samples, large enough for the largest group.
    pub entries: Vec<ReadFormatEntry>,
    /// Buffer for the branch stack in a sample.
    pub branch_words: Vec<u64>,
    /// Value of `Topology::generation` (the number of VM-wide families) when the context was
    /// created, or `None` if the context must not be swapped, for example because it contains other
    /// events.
    pub clone_of: Option<u64>,
    /// Number of [`crate::VcpuEventContext::pin`] guards that prevent this context from being
    /// swapped.
    pub pins: usize,
    pub policy: SharePolicy,
    mux: MuxConfig,
    tick_timer: Option<Arc<dyn TickTimer>>,
    active: usize,
    /// Number of times that an event entered the error state. Read without the lock. The value
    /// belongs to the vCPU, which keeps it when contexts are swapped.
    pub errors: Arc<AtomicU64>,
    /// Core clock value at the last check for lost counters, in nanoseconds.
    pub looked_ns: u64,
    pub samples: u64,
    pub lost_samples: u64,
    pub throttles: u64,
    /// `true` after the vCPU of the context was removed. Its events are then no longer scheduled.
    pub dead: bool,
}

impl Context {
    pub fn new(policy: SharePolicy, mux: MuxConfig, tick_timer: Option<Arc<dyn TickTimer>>) -> Self {
        Self {
            policy,
            mux,
            tick_timer,
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
                .map(|p| p.queued() + p.parked.len() - p.active.len())
                .sum(),
            samples: self.samples,
            lost_samples: self.lost_samples,
            throttles: self.throttles,
        }
    }

    /// Returns the slot pool of hardware driver `driver`. Creates the pool on first use.
    pub fn pool(&mut self, driver: usize, counters: CounterMask, reserved: usize) -> PoolId {
        let pool = self.pools.ids().find(|pool| self.pools[*pool].driver == driver);
        pool.unwrap_or_else(|| {
            self.pools
                .push(SlotPool::new(driver, counters, reserved, self.mux))
        })
    }

    /// Returns the event of `shared`, which was stored at `key`, or `None` if this event was
    /// removed. The key may meanwhile belong to another event.
    pub fn get(&mut self, key: EventKey, shared: &Arc<EventShared>) -> Option<&mut Event> {
        self.events
            .get_mut(key)
            .filter(|e| Arc::ptr_eq(&e.shared, shared))
    }

    #[inline]
    pub fn leader_state(&self, key: EventKey) -> EventState {
        self.events[self.groups[self.events[key].group].leader()].state
    }

    /// Returns `true` if the event at `key` is a group leader.
    pub fn is_leader(&self, key: EventKey) -> bool {
        self.groups[self.events[key].group].leader() == key
    }

    /// Returns the members of the group of event `key`, leader first.
    pub fn members(&self, key: EventKey) -> SmallVec<[EventKey; 4]> {
        self.groups[self.events[key].group].members.clone()
    }

    /// Arms an event to overflow after `overflow_in` further counts, and returns its count.
    pub fn arm(&mut self, key: EventKey, overflow_in: u64) -> Result<u64, PmuError> {
        let event = &mut self.events[key];
        let count = event.arm(overflow_in)?;
        // An active event that is armed for the first time can now overflow.
        if event.list_positions.of(EventList::Armed).is_none() {
            self.add_to_lists(key);
        }
        Ok(count)
    }

    /// Pauses an active event, which stays scheduled but does not count, and returns its count.
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

    /// Resumes an event that [`Context::pause`] paused. The event must still be active. On failure,
    /// its group is scheduled out.
    pub fn resume(
        &mut self,
        key: EventKey,
        overflow_in: Option<u64>,
        now_ns: impl FnOnce() -> u64,
    ) -> Result<(), PmuError> {
        let event = &mut self.events[key];
        if let Err(error) = event.resume(overflow_in) {
            self.handle_restart_failure(key, &error, now_ns());
            return Err(error);
        }
        if overflow_in.is_some() && event.list_positions.of(EventList::Armed).is_none() {
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

    /// Queues the group of an enabled event and schedules it if possible. Has no effect while the
    /// leader is off or in the error state.
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
        self.schedule_group(group, now_ns);
    }

    /// Disables an event. Disabling a group leader schedules out the whole group, but only the
    /// leader becomes off. An event in the error state stays in the error state.
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

    /// Moves a pinned group that is not active to the error state. `since_ns` is the context time
    /// since which the group has not counted.
    pub fn fail(&mut self, group: MuxGroupKey, cause: PinnedEventFailureCause, since_ns: u64, now_ns: u64) {
        let leader = self.groups[group].leader();
        self.settle_group_times(group, now_ns);
        self.unqueue(group);
        let event = &mut self.events[leader];
        event.state = EventState::Error;
        event.failure = Some(PinnedEventFailure { since_ns, cause });
        log::debug!("pinned event {} does not count: {cause}", event.shared.id);
        self.update_wants(group);
        self.errors.fetch_add(1, Ordering::Release);
        // The thread that performs ticks also kicks vCPUs with unhandled errors.
        self.request_ticks(PendingTickWork::Work);
    }

    fn settle_group_times(&mut self, group: MuxGroupKey, now_ns: u64) {
        let time = self.clock.advance(now_ns);
        let leader_state = self.events[self.groups[group].leader()].state;
        for i in 0..self.groups[group].members.len() {
            let event = &mut self.events[self.groups[group].members[i]];
            event.times.settle(event.state, leader_state, time);
        }
    }

    /// Updates the list of counters that a group requires. Has no effect on a group of software
    /// events.
    #[inline]
    fn update_wants(&mut self, group: MuxGroupKey) {
        if self.groups[group].pool.is_some() {
            self.recount_wants(group);
        }
    }

    fn recount_wants(&mut self, group: MuxGroupKey) {
        let Group {
            members,
            counter_requests: wants,
            ..
        } = &mut self.groups[group];
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
                    suitable: events[event].suitable_counters,
                    previous_counter: None,
                });
            }
        }
        if changed && let Some(pool) = self.groups[group].pool {
            // A parked group may fit with its new requirements.
            self.pools[pool].unpark(&mut self.groups, group);
        }
    }

    fn enqueue(&mut self, group: MuxGroupKey) {
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

    fn unqueue(&mut self, group: MuxGroupKey) {
        self.groups[group].queued = false;
        if std::mem::take(&mut self.groups[group].rejected) {
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
