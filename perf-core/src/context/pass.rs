//! Passes over a context: what goes on and what goes off. A pass works in two steps:
//! [`crate::schedule::plan`] says what should be on, then only the difference to what is on is told to the
//! drivers.

use smallvec::SmallVec;

use super::Context;
use crate::model::event::Event;
use crate::model::failure::FailureCause;
use crate::model::keys::{EventKey, GroupKey, PoolId};
use crate::model::lists::List;
use crate::model::slices::Slices;
use crate::model::state::{Owner, State, TickNeed};
use crate::mux::MuxPolicy;
use crate::pmu::PmuError;
use crate::schedule::{ClassQueue, Pool, SharePolicy, plan};

/// Groups without a slot that a tick tries to put on again after their driver refused.
const REFUSED_PER_TICK: usize = 8;

impl Context {
    // Passes.

    /// Plans a pool anew and tells the drivers the difference. Nothing while the context is out.
    pub fn reschedule(&mut self, pool: PoolId, now_ns: u64) {
        if !self.clock.is_active() {
            return;
        }
        let plan = plan(&mut self.pools[pool], &mut self.groups, self.policy);
        let leaving: SmallVec<[GroupKey; 16]> = self.pools[pool]
            .on
            .iter()
            .copied()
            .filter(|g| !plan.on.contains(g))
            .collect();
        for group in leaving {
            self.take_off(group, now_ns);
            self.end_turn(group);
        }
        let time = self.clock.advance(now_ns);
        for &group in &plan.failed {
            self.fail(group, FailureCause::NoSlot, time, now_ns);
        }
        let mut room = true;
        for &group in &plan.on {
            let class = self.groups[group].class;
            if !room && !class.is_pinned() {
                break;
            }
            match self.put_on(group, now_ns) {
                Ok(()) => {}
                Err(error) if class.is_pinned() => {
                    self.fail(group, FailureCause::of(&error), time, now_ns);
                }
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
        for pool in self.pools.ids() {
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
        for pool in self.pools.ids() {
            while let Some(&group) = self.pools[pool].on.last() {
                self.take_off(group, now_ns);
            }
        }
        let mut next = self.software.first();
        while let Some(group) = next {
            next = self.software.after(&self.groups, group);
            self.take_off(group, now_ns);
        }
        // All are tried when it goes in again.
        for group in self.refused.drain(..) {
            self.groups[group].refused = false;
        }
        self.clock.stop(now_ns);
    }

    /// Gives the slots to the next groups, if there are any waiting.
    pub fn rotate(&mut self, now_ns: u64) {
        if !self.clock.is_active() {
            return;
        }
        for pool in self.pools.ids() {
            if !self.pools[pool].is_contended() {
                continue;
            }
            let amid = self.pools[pool].turn(now_ns);
            for group in amid.into_iter().flatten() {
                self.read_amid(group, now_ns);
            }
            self.reschedule(pool, now_ns);
        }
    }

    /// Keeps `reserved` slots of each pool for VM-wide events from now on.
    pub fn reserve(&mut self, reserved: usize, now_ns: u64) {
        for pool in self.pools.ids() {
            self.pools[pool].reserve(reserved);
            self.reschedule(pool, now_ns);
        }
    }

    /// Who gets slots from now on.
    pub fn set_policy(&mut self, policy: SharePolicy, now_ns: u64) {
        self.policy = policy;
        for pool in self.pools.ids() {
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

    /// What a periodic tick has to do here. Whatever an operator samples may come to be throttled, and a tick
    /// lifts that; a guest's counters, which are armed one overflow at a time, are not.
    pub fn tick_need(&self) -> TickNeed {
        if !self.clock.is_active() {
            return TickNeed::None;
        }
        let waits = self.pools.iter().any(Pool::is_contended) || !self.refused.is_empty();
        let has = |list| !self.lists.of(list).is_empty();
        if waits || has(List::Throttled) || has(List::Frequency) {
            return TickNeed::Work;
        }
        let mut armed = self.lists.of(List::Armed).iter().map(|k| &self.events[*k]);
        if armed.any(|event| event.sampling.period != 0 && event.shared.owner != Owner::Guest) {
            TickNeed::Watch
        } else {
            TickNeed::None
        }
    }

    // Groups and events, on and off.

    /// Lets a queued group go on if it may: at once when it needs no slot, else by planning its pool anew.
    pub(super) fn go(&mut self, group: GroupKey, now_ns: u64) {
        match self.groups[group].pool {
            Some(pool) => self.reschedule(pool, now_ns),
            None => self.go_software(group, now_ns),
        }
    }

    pub(super) fn go_software(&mut self, group: GroupKey, now_ns: u64) {
        if self.clock.is_active()
            && let Err(error) = self.put_on(group, now_ns)
        {
            let time = self.clock.advance(now_ns);
            self.cannot_be_on(group, FailureCause::of(&error), time, now_ns);
        }
    }

    /// A group that is off could not be on: a pinned one fails, the others try again. Those that want a slot
    /// do so at each turn; the rest is kept in mind for the next ticks.
    pub fn cannot_be_on(&mut self, group: GroupKey, cause: FailureCause, since_ns: u64, now_ns: u64) {
        if self.groups[group].class.is_pinned() {
            self.fail(group, cause, since_ns, now_ns);
        } else if self.groups[group].pool.is_none() && !self.groups[group].refused {
            self.groups[group].refused = true;
            self.refused.push_back(group);
        }
    }

    /// Puts groups on that need no slot and that their driver refused. A few of them, so that a tick's work
    /// has a bound.
    pub fn try_refused_again(&mut self, now_ns: u64) {
        for _ in 0..self.refused.len().min(REFUSED_PER_TICK) {
            if let Some(group) = self.refused.pop_front() {
                self.groups[group].refused = false;
                self.go_software(group, now_ns);
            }
        }
    }

    /// Puts the members of a group on that are not on yet, all or none.
    pub(super) fn put_on(&mut self, group: GroupKey, now_ns: u64) -> Result<(), PmuError> {
        let time = self.clock.advance(now_ns);
        let mut closed = false;
        // The leader last: where the host has groups of its own, that puts all on at one moment.
        for i in (0..self.groups[group].members.len()).rev() {
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
    pub fn take_off(&mut self, group: GroupKey, now_ns: u64) {
        for i in 0..self.groups[group].members.len() {
            self.stop_event(self.groups[group].members[i], now_ns);
        }
        if std::mem::take(&mut self.groups[group].on)
            && let Some(pool) = self.groups[group].pool
        {
            self.pools[pool].on.retain(|on| *on != group);
        }
    }

    /// Reads a group that is on, about halfway through its slice.
    fn read_amid(&mut self, group: GroupKey, now_ns: u64) {
        let time = self.clock.advance(now_ns);
        let leader = self.events[self.groups[group].leader()].state;
        for i in 0..self.groups[group].members.len() {
            self.events[self.groups[group].members[i]].note_amid(leader, time);
        }
    }

    /// A group was taken off for another. How its rates went is told at once: a rotation later the policy
    /// would take it for what a later slice said.
    fn end_turn(&mut self, group: GroupKey) {
        let mut closed = false;
        for i in 0..self.groups[group].members.len() {
            closed |= self.events[self.groups[group].members[i]].end_slice();
        }
        if closed {
            self.tell_step(group);
        }
    }

    /// Tells the queue by how much the rates of a group's members last changed, and of a rhythm in step with
    /// their slices.
    fn tell_step(&mut self, group: GroupKey) {
        let g = &self.groups[group];
        if g.class.is_pinned() {
            return;
        }
        let Some(pool) = g.pool else { return };
        let slices = || g.members.iter().filter_map(|m| self.events[*m].slices.as_ref());
        let most = slices()
            .filter_map(Slices::last_step)
            .max_by(|a: &f64, b| a.abs().total_cmp(&b.abs()));
        let rhythm = slices().any(Slices::keeps_step);
        if let ClassQueue::Flexible(queue) = self.pools[pool].queue(g.class) {
            if self.mux.policy == MuxPolicy::Adaptive {
                queue.slice_ended(group, most);
            }
            if rhythm {
                queue.rhythm_seen();
            }
        }
    }

    /// Returns whether what the event counted in its last slice is known now.
    fn start_event(&mut self, key: EventKey, time: u64) -> Result<bool, PmuError> {
        // As it is before the event starts: it may be the leader itself.
        let takes_turns = self.events[key].slices.is_some();
        let leader = takes_turns.then(|| self.leader_state(key));
        let event = &mut self.events[key];
        event.start(time)?;
        let closed = leader.is_some_and(|leader| event.note_on(leader, time));
        self.active += 1;
        if let Some(pool) = event.pool {
            self.pools[pool].used += 1;
        }
        self.enlist_active(key);
        Ok(closed)
    }

    pub(super) fn stop_event(&mut self, key: EventKey, now_ns: u64) {
        if self.events[key].state == State::Active {
            self.goes_off(key, Event::stop, now_ns);
        }
    }

    /// The driver's half of an event that was on is stopped and could not be started again: its group goes
    /// off.
    pub fn fell_off(&mut self, key: EventKey, error: &PmuError, now_ns: u64) {
        log::warn!(
            "event {} could not go on after its overflow was switched: {error}",
            self.events[key].shared.id
        );
        let group = self.events[key].group;
        self.goes_off(key, Event::stopped, now_ns);
        self.take_off(group, now_ns);
        let time = self.clock.advance(now_ns);
        self.cannot_be_on(group, FailureCause::of(error), time, now_ns);
    }

    /// An event that is on goes off by `stop`.
    fn goes_off(&mut self, key: EventKey, stop: impl FnOnce(&mut Event, u64), now_ns: u64) {
        let time = self.clock.advance(now_ns);
        if self.events[key].slices.is_some() {
            let leader = self.leader_state(key);
            self.events[key].note_off(leader, time);
        }
        let event = &mut self.events[key];
        stop(event, time);
        self.active -= 1;
        if let Some(pool) = event.pool {
            self.pools[pool].used -= 1;
        }
        if event.sampling.pending > 0 {
            self.put_by(key);
        }
        self.unlist_all(key);
        self.update_page(key, now_ns);
    }
}
