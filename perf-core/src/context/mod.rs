//! A context: the events of one vCPU, or of the VM as a whole.
//!
//! Everything here runs under the context's own lock and takes the time as a parameter. An event's times
//! follow from stamps, so what waits is not touched. The states of events, the queues and the readings are in
//! this file; events come and go in `members`, go on and off in `pass`, and the lock is in `cell`.

mod cell;
mod lists;
mod look;
mod members;
mod overflow;
mod pass;
mod raise;
mod reading;

pub(crate) use cell::{ContextCell, Whose};
pub(crate) use overflow::{Batch, Noticed, Pass};

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use smallvec::SmallVec;

use crate::model::event::{Event, EventShared, Source};
use crate::model::failure::{Failure, FailureCause};
use crate::model::keys::{EventKey, GroupKey, PoolId, Table};
use crate::model::lists::{List, Lists};
use crate::model::slices::Slices;
use crate::model::software::IDS;
use crate::model::state::State;
use crate::model::times::ContextClock;
use crate::model::totals::Totals;
use crate::pmu::{CounterMask, PmuError};
use crate::record::ReadEntry;
use crate::schedule::group::{Group, Queue};
use crate::schedule::seats::Want;
use crate::schedule::{ClassQueue, MuxConfig, Pool, Pools, SharePolicy};

/// What a context holds, for statistics and tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextStats {
    /// Events attached, inherited ones included.
    pub events: usize,
    /// Events that are on.
    pub active: usize,
    /// Hardware events that are on.
    pub active_hardware: usize,
    /// Groups waiting for a slot.
    pub waiting_groups: usize,
    /// Samples written to rings so far.
    pub samples: u64,
    /// Samples so far that found no room in their ring, or that nobody took before their vCPU was
    /// removed.
    pub lost_samples: u64,
    /// How often an event's overflows were switched off until the next tick because they came too fast.
    pub throttles: u64,
}

/// What an event has counted, and in which slices: what goes along when two events exchange their pasts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Past {
    totals: Totals,
    slices: Option<Slices>,
}

pub(crate) struct Context {
    pub clock: ContextClock,
    pub events: Table<EventKey, Event>,
    pub groups: Table<GroupKey, Group>,
    pub pools: Pools,
    /// Groups of software events that may run.
    software: Queue,
    /// Those of them whose driver refused when they were last put on.
    refused: VecDeque<GroupKey>,
    /// Active events that overflow, are throttled, or follow a frequency. Never grow beyond the capacity
    /// reserved when events are added.
    pub lists: Lists,
    /// Ticks so far.
    pub ticks: u64,
    /// Where in the list of those that follow a frequency the next tick goes on.
    pub next_frequency: usize,
    /// Events with overflows that passed while they were taken off.
    pub pending: Vec<EventKey>,
    /// Overflows passed, or may pass at any time in a driver. Read without the lock, so that a vCPU need not
    /// take the VM context's to find nothing.
    pub to_serve: Arc<AtomicBool>,
    /// Events the VMM raises, by id.
    pub raised: [Vec<EventKey>; IDS],
    /// Room for the readings of the largest group, for samples.
    pub entries: Vec<ReadEntry>,
    /// The generation of VM-wide events it was made from, while it holds nothing else.
    pub clone_of: Option<u64>,
    /// Guards that keep it from being exchanged.
    pub pins: usize,
    pub policy: SharePolicy,
    mux: MuxConfig,
    active: usize,
    /// Counts up whenever an event goes to the error state. Read without the lock, and the vCPU's: it goes
    /// along when contexts are exchanged.
    pub errors: Arc<AtomicU64>,
    /// When the drivers were last asked whether what is on counts.
    pub looked_ns: u64,
    pub samples: u64,
    pub lost_samples: u64,
    pub throttles: u64,
    /// Its vCPU is gone; nothing goes on any more.
    pub dead: bool,
}

impl Context {
    pub fn new(policy: SharePolicy, mux: MuxConfig) -> Self {
        Self {
            clock: ContextClock::default(),
            events: Table::default(),
            groups: Table::default(),
            pools: Pools::default(),
            software: Queue::default(),
            refused: VecDeque::new(),
            lists: Lists::default(),
            ticks: 0,
            next_frequency: 0,
            pending: Vec::new(),
            to_serve: Arc::default(),
            raised: Default::default(),
            entries: Vec::new(),
            clone_of: None,
            pins: 0,
            policy,
            mux,
            active: 0,
            errors: Arc::default(),
            looked_ns: 0,
            samples: 0,
            lost_samples: 0,
            throttles: 0,
            dead: false,
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

    /// The pool of hardware driver `driver`, made when first needed.
    pub fn pool(&mut self, driver: usize, counters: CounterMask, reserved: usize) -> PoolId {
        let pool = self.pools.ids().find(|pool| self.pools[*pool].driver == driver);
        pool.unwrap_or_else(|| self.pools.push(Pool::new(driver, counters, reserved, self.mux)))
    }

    /// The event `key` if it is still the one called `shared`.
    pub fn get(&mut self, key: EventKey, shared: &Arc<EventShared>) -> Option<&mut Event> {
        self.events
            .get_mut(key)
            .filter(|e| Arc::ptr_eq(&e.shared, shared))
    }

    #[inline]
    pub fn leader_state(&self, key: EventKey) -> State {
        self.events[self.groups[self.events[key].group].leader()].state
    }

    /// Whether `key` leads its group.
    pub fn is_leader(&self, key: EventKey) -> bool {
        self.groups[self.events[key].group].leader() == key
    }

    /// The events of the group of `key`, its leader first.
    pub fn members(&self, key: EventKey) -> SmallVec<[EventKey; 4]> {
        self.groups[self.events[key].group].members.clone()
    }

    // States.

    /// Lets the next overflow of an event come after `overflow_in` further counts. Returns its count.
    pub fn arm(&mut self, key: EventKey, overflow_in: u64) -> Result<u64, PmuError> {
        let event = &mut self.events[key];
        let count = event.arm(overflow_in)?;
        // One that is on overflows from now on, if it did not before.
        if event.places.of(List::Armed).is_none() {
            self.enlist_active(key);
        }
        Ok(count)
    }

    /// Stops what an event that is on counts, and nothing else. Returns its count.
    pub fn pause(&mut self, key: EventKey) -> u64 {
        let event = &mut self.events[key];
        if event.state != State::Active {
            return event.count();
        }
        let count = event.pause();
        if event.sampling.pending > 0 {
            self.put_by(key);
        }
        count
    }

    /// Takes back [`Context::pause`] of an event that is still on. After an error it is not.
    pub fn go_on(
        &mut self,
        key: EventKey,
        overflow_in: Option<u64>,
        now_ns: impl FnOnce() -> u64,
    ) -> Result<(), PmuError> {
        let event = &mut self.events[key];
        if let Err(error) = event.go_on(overflow_in) {
            self.fell_off(key, &error, now_ns());
            return Err(error);
        }
        if overflow_in.is_some() && event.places.of(List::Armed).is_none() {
            self.enlist_active(key);
        }
        Ok(())
    }

    /// Marks an event enabled that is off or in error, and puts it on if it may. Nothing if it is enabled
    /// already.
    pub fn enable(&mut self, key: EventKey, now_ns: u64) {
        if self.events[key].state >= State::Inactive {
            return;
        }
        let time = self.clock.advance(now_ns);
        let leader = self.is_leader(key);
        let event = &mut self.events[key];
        event.state = State::Inactive;
        event.times.enable(time);
        if leader {
            let group = self.events[key].group;
            for i in 1..self.groups[group].members.len() {
                let sibling = &mut self.events[self.groups[group].members[i]];
                if sibling.state >= State::Inactive {
                    sibling.times.enable(time);
                }
            }
        }
        self.became_enabled(key, now_ns);
    }

    /// Queues the group of an event that became enabled and puts on what may go on.
    fn became_enabled(&mut self, key: EventKey, now_ns: u64) {
        let group = self.events[key].group;
        self.recount(group);
        let leader = self.groups[group].leader();
        if self.events[leader].state < State::Inactive {
            return;
        }
        if matches!(self.events[leader].source, Source::Family) {
            return;
        }
        self.enqueue(group);
        self.go(group, now_ns);
    }

    /// Disables an event. A leader takes its whole group off the PMU but only it becomes off; an event in
    /// error stays in error.
    pub fn disable(&mut self, key: EventKey, now_ns: u64) {
        if self.events[key].state < State::Inactive {
            return;
        }
        let group = self.events[key].group;
        let pool = self.groups[group].pool;
        self.settle_group_times(group, now_ns);
        if self.is_leader(key) {
            self.take_off(group, now_ns);
            self.unqueue(group);
        } else {
            self.stop_event(key, now_ns);
        }
        self.events[key].state = State::Off;
        self.recount(group);
        if let Some(pool) = pool {
            self.reschedule(pool, now_ns);
        }
    }

    /// A pinned group that is off goes to the error state: it does not count since `since_ns` of the
    /// context's time.
    pub fn fail(&mut self, group: GroupKey, cause: FailureCause, since_ns: u64, now_ns: u64) {
        let leader = self.groups[group].leader();
        self.settle_group_times(group, now_ns);
        self.unqueue(group);
        let event = &mut self.events[leader];
        event.state = State::Error;
        event.failure = Some(Failure { since_ns, cause });
        log::debug!("pinned event {} does not count: {cause}", event.shared.id);
        self.recount(group);
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

    /// Without a pool none of its members wants a slot.
    #[inline]
    fn recount(&mut self, group: GroupKey) {
        if self.groups[group].pool.is_some() {
            self.recount_wants(group);
        }
    }

    fn recount_wants(&mut self, group: GroupKey) {
        let Group { members, wants, .. } = &mut self.groups[group];
        let events = &self.events;
        let wanting = |key: EventKey| events[key].pool.is_some() && events[key].state >= State::Inactive;
        let before = wants.len();
        // A member that left is no event any more.
        wants.retain(|want| members.contains(&want.event) && wanting(want.event));
        let mut changed = wants.len() != before;
        for &event in members.iter().filter(|m| wanting(**m)) {
            if !wants.iter().any(|want| want.event == event) {
                changed = true;
                wants.push(Want {
                    event,
                    fits: events[event].fits,
                    seat: None,
                });
            }
        }
        if changed && let Some(pool) = self.groups[group].pool {
            // It may fit now.
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
