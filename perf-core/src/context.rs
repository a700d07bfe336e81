//! A context: the events of one vCPU, or of the VM as a whole, and the pass that puts them on.
//!
//! Everything here runs under the context's own lock and takes the time as a parameter. A pass works in two steps:
//! [`crate::schedule::plan`] says what should be on, then only the difference to what is on is told to the drivers.
//! An event's times follow from stamps, so what waits is not touched.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use slab::Slab;
use smallvec::SmallVec;

use crate::estimate::{Estimate, linear};
use crate::event::{Event, EventShared, Owner, Source, State, Totals};
use crate::group::{Class, Group, Queue};
use crate::mux::MuxPolicy;
use crate::output::write_page;
use crate::pmu::{PmuError, Target, VcpuId};
use crate::record::ReadEntry;
use crate::schedule::{ClassQueue, MuxConfig, Pool, SharePolicy, plan};
use crate::slices::EstimateSum;
use crate::software::{Deferred, IDS};
use crate::time::{Clock, ContextClock};

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
    /// Samples that found no room in their ring so far.
    pub lost_samples: u64,
    /// How often an event's overflows were switched off until the next tick because they came too fast.
    pub throttles: u64,
}

pub(crate) struct Context {
    pub clock: ContextClock,
    pub events: Slab<Event>,
    pub groups: Slab<Group>,
    pub pools: Vec<Pool>,
    /// Groups of software events that may run.
    software: Queue,
    /// Active events that overflow. Never grows beyond the capacity reserved when events are added.
    pub armed: Vec<usize>,
    /// Events with overflows that passed while they were taken off.
    pub pending: Vec<usize>,
    /// Events the VMM raises, by id.
    pub raised: [Vec<usize>; IDS],
    /// Room for the readings of the largest group, for samples.
    pub entries: Vec<ReadEntry>,
    /// The generation of VM-wide events it was made from, while it holds nothing else.
    pub clone_of: Option<u64>,
    /// Guards that keep it from being exchanged.
    pub pins: usize,
    pub policy: SharePolicy,
    mux: MuxConfig,
    active: usize,
    /// Counts up whenever an event goes to the error state.
    pub errors: u64,
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
            events: Slab::new(),
            groups: Slab::new(),
            pools: Vec::new(),
            software: Queue::default(),
            armed: Vec::new(),
            pending: Vec::new(),
            raised: Default::default(),
            entries: Vec::new(),
            clone_of: None,
            pins: 0,
            policy,
            mux,
            active: 0,
            errors: 0,
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
    pub fn pool(&mut self, driver: usize, slots: usize, reserved: usize) -> usize {
        if let Some(at) = self.pools.iter().position(|p| p.driver == driver) {
            return at;
        }
        self.pools.push(Pool::new(driver, slots, reserved, self.mux));
        self.pools.len() - 1
    }

    /// The event `key` if it is still the one called `shared`.
    pub fn get(&mut self, key: usize, shared: &Arc<EventShared>) -> Option<&mut Event> {
        self.events
            .get_mut(key)
            .filter(|e| Arc::ptr_eq(&e.shared, shared))
    }

    fn leader_state(&self, key: usize) -> State {
        self.events[self.groups[self.events[key].group].leader()].state
    }

    /// Whether `key` leads its group.
    pub fn is_leader(&self, key: usize) -> bool {
        self.groups[self.events[key].group].leader() == key
    }

    /// The events of the group of `key`, its leader first.
    pub fn members(&self, key: usize) -> SmallVec<[usize; 4]> {
        self.groups[self.events[key].group].members.clone()
    }

    // Adding and removing.

    /// Adds an event: to the group of event `leader`, or as the leader of a group of its own. It goes on at once if
    /// it may and there is room.
    pub fn add(&mut self, mut event: Event, leader: Option<usize>, now_ns: u64) -> usize {
        let pool = event.pool;
        let time = self.clock.advance(now_ns);
        event.times = crate::time::EventTimes::attach(time);
        let (pinned, exclusive) = (event.shared.attr.pinned, event.shared.attr.exclusive);
        let owner = event.top().owner;
        let enabled = event.state >= State::Inactive;
        let key = self.events.insert(event);
        let group = match leader {
            Some(leader) => self.events[leader].group,
            None => self
                .groups
                .insert(Group::new(None, class_of(owner, pinned), exclusive)),
        };
        self.events[key].group = group;
        self.groups[group].members.push(key);
        // Room for every event, so that the hot paths never allocate.
        let events = self.events.len();
        self.armed.reserve(events.saturating_sub(self.armed.len()));
        self.pending.reserve(events.saturating_sub(self.pending.len()));
        if let Some(pool) = pool {
            let parked = &mut self.pools[pool].parked;
            parked.reserve(events.saturating_sub(parked.len()));
        }
        self.entries.reserve(
            self.groups[group]
                .members
                .len()
                .saturating_sub(self.entries.len()),
        );
        if matches!(self.events[key].source, Source::Raised(_)) {
            self.raised[self.events[key].shared.attr.config as usize].push(key);
        }

        let mut requeue = false;
        if pool.is_some() && self.groups[group].pool.is_none() {
            requeue = self.groups[group].queued;
            // A software group becomes a hardware group: it leaves the list of those that need no slot.
            self.take_off(group, now_ns);
            self.unqueue(group);
            self.groups[group].pool = pool;
        }
        if enabled || requeue {
            self.became_enabled(key, now_ns);
        }
        key
    }

    /// Removes an event, off. The siblings of a removed leader become leaders of groups of their own, in the states
    /// they are in.
    pub fn remove(&mut self, key: usize, now_ns: u64) -> Event {
        let group = self.events[key].group;
        let pool = self.groups[group].pool;
        let was_leader = self.is_leader(key);
        self.settle_group_times(group, now_ns);
        if self.groups[group].on {
            // A leader takes its group off; a sibling leaves alone.
            if was_leader {
                self.take_off(group, now_ns);
            } else {
                self.stop_event(key, now_ns);
            }
        }
        if was_leader {
            self.unqueue(group);
            let leader_off = self.events[key].state < State::Inactive;
            let members = std::mem::take(&mut self.groups[group].members);
            self.groups.remove(group);
            for &sibling in members.iter().skip(1) {
                self.make_singleton(sibling, leader_off, now_ns);
            }
        } else {
            self.groups[group].members.retain(|m| *m != key);
            self.recount(group);
            let software = self.groups[group]
                .members
                .iter()
                .all(|m| self.events[*m].pool.is_none());
            if pool.is_some() && software {
                // Its last hardware member is gone: it needs no slot and waits no more.
                let queued = self.groups[group].queued;
                self.take_off(group, now_ns);
                self.unqueue(group);
                self.groups[group].pool = None;
                if queued {
                    self.enqueue(group);
                    self.go_software(group, now_ns);
                }
            }
        }
        self.pending.retain(|p| *p != key);
        if matches!(self.events[key].source, Source::Raised(_)) {
            self.raised[self.events[key].shared.attr.config as usize].retain(|r| *r != key);
        }
        let event = self.events.remove(key);
        if let Some(pool) = pool {
            self.reschedule(pool, now_ns);
        }
        event
    }

    fn make_singleton(&mut self, key: usize, leader_was_off: bool, now_ns: u64) {
        let time = self.clock.advance(now_ns);
        let event = &mut self.events[key];
        let attr = &event.shared.attr;
        let class = class_of(event.top().owner, attr.pinned);
        // Under a leader that was off its times stood still; they go on from here.
        if leader_was_off && event.state >= State::Inactive {
            event.times.enable(time);
        }
        let enabled = event.state >= State::Inactive;
        let mut group = Group::new(event.pool, class, attr.exclusive);
        group.members.push(key);
        let group = self.groups.insert(group);
        self.events[key].group = group;
        if enabled {
            self.recount(group);
            self.enqueue(group);
            self.go(group, now_ns);
        }
    }

    // States.

    /// Marks an event enabled that is off or in error, and puts it on if it may. Nothing if it is enabled already.
    pub fn enable(&mut self, key: usize, now_ns: u64) {
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
    fn became_enabled(&mut self, key: usize, now_ns: u64) {
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

    /// Disables an event. A leader takes its whole group off the PMU but only it becomes off; an event in error stays
    /// in error.
    pub fn disable(&mut self, key: usize, now_ns: u64) {
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

    fn fail(&mut self, group: usize, now_ns: u64) {
        let leader = self.groups[group].leader();
        self.settle_group_times(group, now_ns);
        self.unqueue(group);
        self.events[leader].state = State::Error;
        self.recount(group);
        self.errors += 1;
        log::debug!("pinned event {} finds no slot", self.events[leader].shared.id);
    }

    fn settle_group_times(&mut self, group: usize, now_ns: u64) {
        let time = self.clock.advance(now_ns);
        let leader_state = self.events[self.groups[group].leader()].state;
        for i in 0..self.groups[group].members.len() {
            let event = &mut self.events[self.groups[group].members[i]];
            event.times.settle(event.state, leader_state, time);
        }
    }

    fn recount(&mut self, group: usize) {
        let need = {
            let g = &self.groups[group];
            let wants =
                |m: &&usize| self.events[**m].pool.is_some() && self.events[**m].state >= State::Inactive;
            g.members.iter().filter(wants).count()
        };
        if std::mem::replace(&mut self.groups[group].need, need) != need
            && let Some(pool) = self.groups[group].pool
        {
            // It may fit now.
            self.pools[pool].unpark(&mut self.groups, group);
        }
    }

    fn enqueue(&mut self, group: usize) {
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

    fn unqueue(&mut self, group: usize) {
        self.groups[group].queued = false;
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

    // Going on and off.

    /// Lets a queued group go on if it may: at once when it needs no slot, else by planning its pool anew.
    fn go(&mut self, group: usize, now_ns: u64) {
        match self.groups[group].pool {
            Some(pool) => self.reschedule(pool, now_ns),
            None => self.go_software(group, now_ns),
        }
    }

    fn go_software(&mut self, group: usize, now_ns: u64) {
        if self.clock.is_active()
            && self.put_on(group, now_ns).is_err()
            && self.groups[group].class.is_pinned()
        {
            self.fail(group, now_ns);
        }
    }

    /// Puts the members of a group on that are not on yet, all or none.
    fn put_on(&mut self, group: usize, now_ns: u64) -> Result<(), PmuError> {
        let time = self.clock.advance(now_ns);
        let mut closed = false;
        for i in 0..self.groups[group].members.len() {
            let key = self.groups[group].members[i];
            if self.events[key].state != State::Inactive {
                continue;
            }
            match self.start_event(key, time) {
                Ok(known) => closed |= known,
                Err(error) => {
                    self.take_off(group, now_ns);
                    return Err(error);
                }
            }
        }
        if closed {
            self.tell_step(group);
        }
        let on = &mut self.groups[group].on;
        if !*on {
            *on = true;
            if let Some(pool) = self.groups[group].pool {
                self.pools[pool].on.push(group);
            }
        }
        Ok(())
    }

    /// Takes a group off.
    fn take_off(&mut self, group: usize, now_ns: u64) {
        for i in 0..self.groups[group].members.len() {
            self.stop_event(self.groups[group].members[i], now_ns);
        }
        if std::mem::take(&mut self.groups[group].on)
            && let Some(pool) = self.groups[group].pool
        {
            self.pools[pool].on.retain(|on| *on != group);
        }
    }

    /// Tells the queue by how much the rates of a group's members last changed.
    fn tell_step(&mut self, group: usize) {
        let g = &self.groups[group];
        if self.mux.policy != MuxPolicy::Adaptive || g.class.is_pinned() {
            return;
        }
        let Some(pool) = g.pool else { return };
        let most = g
            .members
            .iter()
            .filter_map(|m| self.events[*m].slices.as_ref()?.last_step())
            .max_by(|a: &f64, b| a.abs().total_cmp(&b.abs()));
        if let ClassQueue::Flexible(queue) = self.pools[pool].queue(g.class) {
            queue.slice_ended(group, most);
        }
    }

    /// Returns whether what the event counted in its last slice is known now.
    fn start_event(&mut self, key: usize, time: u64) -> Result<bool, PmuError> {
        let leader = self.leader_state(key);
        let event = &mut self.events[key];
        event.start(time)?;
        let closed = event.note_on(leader, time);
        self.active += 1;
        if let Some(pool) = event.pool {
            self.pools[pool].used += 1;
        }
        if event.sampling.is_on() && event.armed_at.is_none() {
            event.armed_at = Some(self.armed.len());
            self.armed.push(key);
        }
        Ok(closed)
    }

    fn stop_event(&mut self, key: usize, now_ns: u64) {
        if self.events[key].state != State::Active {
            return;
        }
        let time = self.clock.advance(now_ns);
        let leader = self.leader_state(key);
        let event = &mut self.events[key];
        event.note_off(leader, time);
        event.stop(time);
        self.active -= 1;
        if let Some(pool) = event.pool {
            self.pools[pool].used -= 1;
        }
        if event.sampling.pending > 0 && !self.pending.contains(&key) {
            self.pending.push(key);
        }
        self.disarm(key);
        self.update_page(key, now_ns);
    }

    /// Takes an event out of the list of armed ones.
    fn disarm(&mut self, key: usize) {
        if let Some(at) = self.events[key].armed_at.take() {
            self.armed.swap_remove(at);
            if let Some(&moved) = self.armed.get(at) {
                self.events[moved].armed_at = Some(at);
            }
        }
    }

    /// Puts an active event that was armed by hand into the list of armed ones.
    pub fn note_armed(&mut self, key: usize) {
        if self.events[key].state == State::Active && self.events[key].armed_at.is_none() {
            self.events[key].armed_at = Some(self.armed.len());
            self.armed.push(key);
        }
    }

    // Passes.

    /// Plans a pool anew and tells the drivers the difference. Nothing while the context is out.
    pub fn reschedule(&mut self, pool: usize, now_ns: u64) {
        if !self.clock.is_active() {
            return;
        }
        let plan = plan(&mut self.pools[pool], &mut self.groups, self.policy);
        let leaving: SmallVec<[usize; 16]> = self.pools[pool]
            .on
            .iter()
            .copied()
            .filter(|g| !plan.on.contains(g))
            .collect();
        for group in leaving {
            self.take_off(group, now_ns);
        }
        for &group in &plan.failed {
            self.fail(group, now_ns);
        }
        let mut room = true;
        for &group in &plan.on {
            let class = self.groups[group].class;
            if !room && !class.is_pinned() {
                break;
            }
            match self.put_on(group, now_ns) {
                Ok(()) => {}
                Err(_) if class.is_pinned() => self.fail(group, now_ns),
                Err(_) => room = false,
            }
        }
    }

    /// The context goes in: its vCPU starts to run.
    pub fn sched_in(&mut self, now_ns: u64) {
        if self.clock.is_active() || self.dead {
            return;
        }
        self.clock.start(now_ns);
        for pool in 0..self.pools.len() {
            self.reschedule(pool, now_ns);
        }
        let mut next = self.software.first();
        while let Some(group) = next {
            next = self.software.after(&self.groups, group);
            self.go_software(group, now_ns);
        }
    }

    /// The context goes out: everything is taken off and its time stops.
    pub fn sched_out(&mut self, now_ns: u64) {
        if !self.clock.is_active() {
            return;
        }
        for pool in 0..self.pools.len() {
            while let Some(&group) = self.pools[pool].on.last() {
                self.take_off(group, now_ns);
            }
        }
        let mut next = self.software.first();
        while let Some(group) = next {
            next = self.software.after(&self.groups, group);
            self.take_off(group, now_ns);
        }
        self.clock.stop(now_ns);
    }

    /// Gives the slots to the next groups, if there are any waiting.
    pub fn rotate(&mut self, now_ns: u64) {
        if !self.clock.is_active() {
            return;
        }
        for pool in 0..self.pools.len() {
            if !self.pools[pool].is_contended() {
                continue;
            }
            self.pools[pool].turn(now_ns);
            self.reschedule(pool, now_ns);
        }
    }

    /// Keeps `reserved` slots of each pool for VM-wide events from now on.
    pub fn reserve(&mut self, reserved: usize, now_ns: u64) {
        for pool in 0..self.pools.len() {
            self.pools[pool].reserved = reserved.min(self.pools[pool].slots);
            self.reschedule(pool, now_ns);
        }
    }

    /// Who gets slots from now on.
    pub fn set_policy(&mut self, policy: SharePolicy, now_ns: u64) {
        self.policy = policy;
        for pool in 0..self.pools.len() {
            self.reschedule(pool, now_ns);
        }
    }

    /// When the next turn of groups that share slots is due.
    pub fn next_turn_ns(&self) -> Option<u64> {
        if !self.clock.is_active() {
            return None;
        }
        self.pools.iter().filter_map(Pool::next_turn_ns).min()
    }

    /// Whether a periodic tick has anything to do here.
    pub fn needs_tick(&self) -> bool {
        self.clock.is_active()
            && (self.pools.iter().any(Pool::is_contended)
                || self.armed.iter().any(|k| {
                    let sampling = &self.events[*k].sampling;
                    sampling.freq != 0 || sampling.throttled
                }))
    }

    // Reading.

    /// The event's own count and times, refreshed first, so that the two belong together.
    pub fn totals(&mut self, key: usize, now_ns: u64) -> Totals {
        let time = self.clock.advance(now_ns);
        let leader = self.leader_state(key);
        let event = &mut self.events[key];
        if matches!(event.source, Source::Family) {
            // It counts nothing itself; the times of its children are the times.
            return Totals::default();
        }
        Totals {
            count: event.count(),
            times: event.times.at(event.state, leader, time),
        }
    }

    /// What the event would have counted had it been on whenever it was enabled.
    pub fn estimate(&mut self, key: usize, now_ns: u64) -> EstimateSum {
        let totals = self.totals(key, now_ns);
        let event = &mut self.events[key];
        if matches!(event.source, Source::Family) {
            return EstimateSum::default();
        }
        let estimate = match &event.slices {
            _ if totals.times.enabled_ns == totals.times.running_ns => None,
            Some(slices) => slices.estimate(totals.times.enabled_ns, event.state, totals.count),
            None => {
                linear(totals.count, totals.times.enabled_ns, totals.times.running_ns).map(|value| Estimate {
                    value,
                    standard_error: None,
                    exact: false,
                })
            }
        };
        EstimateSum::of(totals, estimate)
    }

    /// Makes the event's count `count` from now on. Its times are left alone.
    pub fn set_count(&mut self, key: usize, count: u64, now_ns: u64) {
        let time = self.clock.advance(now_ns);
        let leader = self.leader_state(key);
        let event = &mut self.events[key];
        event.set_count(count);
        let enabled_ns = event.times.at(event.state, leader, time).enabled_ns;
        if let Some(slices) = &mut event.slices {
            slices.reset(enabled_ns, event.state, count);
        }
        self.update_page(key, now_ns);
    }

    /// Makes `totals` what the event has counted until now.
    pub fn set_totals(&mut self, key: usize, totals: Totals, now_ns: u64) {
        let time = self.clock.advance(now_ns);
        self.events[key].times.set(totals.times, time);
        self.set_count(key, totals.count, now_ns);
    }

    /// Brings the control page of an event that owns a ring up to date. A family's is written when it is read: its
    /// children have locks of their own.
    pub fn update_page(&mut self, key: usize, now_ns: u64) {
        let event = &self.events[key];
        if matches!(event.source, Source::Family) {
            return;
        }
        if let Some(output) = event.output.clone().filter(|o| o.owner == event.shared.id) {
            let totals = self.totals(key, now_ns);
            write_page(&output, totals);
        }
    }
}

fn class_of(owner: Owner, pinned: bool) -> Class {
    match (owner, pinned) {
        (Owner::Guest, true) => Class::Guest,
        (Owner::OperatorVm, true) => Class::PinnedVm,
        (Owner::OperatorVm, false) => Class::FlexibleVm,
        (Owner::OperatorVcpu, true) => Class::PinnedVcpu,
        (Owner::Guest | Owner::OperatorVcpu, false) => Class::FlexibleVcpu,
    }
}

/// [`ContextCell::who`] of the VM context; no vCPU has the highest number and thread -1.
const VM: u64 = u64::MAX;

/// A context with its lock, its clock and whom it belongs to.
///
/// There is no message to an owning thread: whoever wants something of a context takes its lock. A vCPU's thread finds
/// it free on its hot path; readers and the timer hold it for as long as a driver call takes.
pub(crate) struct ContextCell {
    inner: Mutex<Context>,
    clock: Arc<dyn Clock>,
    /// Whose context it is: [`VM`], or the vCPU in the upper and its thread in the lower half.
    pub who: AtomicU64,
    /// How many raised events the context holds, readable without its lock.
    pub raised_events: AtomicUsize,
    /// What was raised while the lock was taken.
    pub deferred: Deferred,
}

impl ContextCell {
    pub fn new(
        policy: SharePolicy,
        mux: MuxConfig,
        clock: Arc<dyn Clock>,
        vcpu: Option<(VcpuId, i32)>,
    ) -> Self {
        Self {
            inner: Mutex::new(Context::new(policy, mux)),
            clock,
            who: AtomicU64::new(
                vcpu.map_or(VM, |(vcpu, tid)| u64::from(vcpu.0) << 32 | u64::from(tid as u32)),
            ),
            raised_events: AtomicUsize::new(0),
            deferred: Deferred::default(),
        }
    }

    /// The vCPU and the host thread that runs it; `None` for the VM.
    pub fn vcpu(&self) -> Option<(VcpuId, i32)> {
        match self.who.load(Ordering::Relaxed) {
            VM => None,
            who => Some((VcpuId((who >> 32) as u32), who as u32 as i32)),
        }
    }

    pub fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    pub fn lock(&self) -> MutexGuard<'_, Context> {
        // A panic of another thread under the lock must not take this vCPU with it.
        let mut context = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        context.take_deferred(&self.deferred);
        context
    }

    /// The lock if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, Context>> {
        match self.inner.try_lock() {
            Ok(context) => Some(context),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// To be called after events were added or removed.
    pub fn publish_raised(&self, context: &Context) {
        let n = context.raised.iter().map(Vec::len).sum();
        self.raised_events.store(n, Ordering::Relaxed);
    }

    pub fn target(&self) -> Target {
        match self.vcpu() {
            Some((vcpu, tid)) => Target::Vcpu { vcpu, tid },
            None => Target::Vm,
        }
    }
}

impl std::fmt::Debug for ContextCell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ContextCell")
            .field("vcpu", &self.vcpu())
            .finish_non_exhaustive()
    }
}
