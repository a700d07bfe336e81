//! Scheduling passes over a context. In each pass, [`crate::schedule::plan`] computes the set of
//! groups that should be active. The pass then starts and stops only those events whose groups
//! change.

use smallvec::SmallVec;

use super::Context;
use crate::model::event::Event;
use crate::model::failure::PinnedEventFailureCause;
use crate::model::keys::{EventKey, MuxGroupKey, PoolId};
use crate::model::lists::EventList;
use crate::model::slices::Slices;
use crate::model::state::{EventState, Owner, PendingTickWork};
use crate::mux::MuxPolicy;
use crate::pmu::PmuError;
use crate::schedule::{ClassQueue, SharePolicy, SlotPool, plan};

/// Maximum number of rejected software groups that a tick retries.
const REFUSED_PER_TICK: usize = 8;

impl Context {
    /// Replans the active groups of a slot pool and starts and stops events accordingly. Has no
    /// effect while the context is scheduled out.
    pub fn reschedule(&mut self, pool: PoolId, now_ns: u64) {
        if !self.clock.is_active() {
            return;
        }
        let plan = plan(&mut self.pools[pool], &mut self.groups, self.policy);
        let leaving: SmallVec<[MuxGroupKey; 16]> = self.pools[pool]
            .active
            .iter()
            .copied()
            .filter(|g| !plan.active.contains(g))
            .collect();
        for group in leaving {
            self.sched_out_group(group, now_ns);
            self.end_turn(group);
        }
        let time = self.clock.advance(now_ns);
        for &group in &plan.failed {
            self.fail(group, PinnedEventFailureCause::NoSlot, time, now_ns);
        }
        let mut room = true;
        for &group in &plan.active {
            let class = self.groups[group].class;
            if !room && !class.is_pinned() {
                break;
            }
            match self.activate(group, now_ns) {
                Ok(()) => {}
                Err(error) if class.is_pinned() => {
                    self.fail(group, PinnedEventFailureCause::of(&error), time, now_ns);
                }
                Err(_) => room = false,
            }
        }
        if self.pools[pool].is_contended() {
            self.request_ticks(PendingTickWork::Work);
        } else if !self.pools[pool].active.is_empty() {
            self.request_ticks(PendingTickWork::CheckCounters);
        }
    }

    /// Schedules the context in when its vCPU starts to run. Returns `false` if the context is
    /// already scheduled in or its vCPU was removed.
    pub fn sched_in(&mut self, now_ns: u64) -> bool {
        if self.clock.is_active() || self.dead {
            return false;
        }
        self.clock.start(now_ns);
        for pool in self.pools.ids() {
            self.reschedule(pool, now_ns);
        }
        let mut next = self.software.first();
        while let Some(group) = next {
            next = self.software.after(&self.groups, group);
            self.schedule_software(group, now_ns);
        }
        true
    }

    /// Schedules the context out: stops all events and the context time.
    pub fn sched_out(&mut self, now_ns: u64) {
        if !self.clock.is_active() {
            return;
        }
        for pool in self.pools.ids() {
            while let Some(&group) = self.pools[pool].active.last() {
                self.sched_out_group(group, now_ns);
            }
        }
        let mut next = self.software.first();
        while let Some(group) = next {
            next = self.software.after(&self.groups, group);
            self.sched_out_group(group, now_ns);
        }
        // Clears the list of rejected groups, because scheduling the context in retries all groups.
        for group in self.refused.drain(..) {
            self.groups[group].rejected = false;
        }
        self.clock.stop(now_ns);
    }

    /// Ends the multiplexing interval of each slot pool if it is due, and gives slots to the next
    /// waiting groups.
    pub fn rotate(&mut self, now_ns: u64) {
        if !self.clock.is_active() {
            return;
        }
        for pool in self.pools.ids() {
            if !self.pools[pool].is_contended() {
                continue;
            }
            let mid_slice = self.pools[pool].rotate(now_ns);
            for group in mid_slice.into_iter().flatten() {
                self.read_mid_slice(group, now_ns);
            }
            self.reschedule(pool, now_ns);
        }
    }

    /// Reserves `reserved` slots of each slot pool for VM-wide events.
    pub fn reserve(&mut self, reserved: usize, now_ns: u64) {
        for pool in self.pools.ids() {
            self.pools[pool].reserve(reserved);
            self.reschedule(pool, now_ns);
        }
    }

    /// Changes the slot sharing policy and replans the context.
    pub fn set_policy(&mut self, policy: SharePolicy, now_ns: u64) {
        self.policy = policy;
        for pool in self.pools.ids() {
            self.reschedule(pool, now_ns);
        }
    }

    /// Returns the time of the next rotation in this context, or `None` if no groups share slots or
    /// the context is scheduled out.
    pub fn next_turn_ns(&self) -> Option<u64> {
        if !self.clock.is_active() {
            return None;
        }
        self.pools.iter().filter_map(SlotPool::next_turn_ns).min()
    }

    /// Returns how much work a tick has to do for this context. A sampling event of an operator may
    /// be throttled, and then needs a tick. Guest counters are never throttled.
    pub fn tick_need(&self) -> PendingTickWork {
        if !self.clock.is_active() {
            return PendingTickWork::None;
        }
        let waits = self.pools.iter().any(SlotPool::is_contended) || !self.refused.is_empty();
        let has = |list| !self.lists.of(list).is_empty();
        if waits || has(EventList::Throttled) || has(EventList::Frequency) {
            return PendingTickWork::Work;
        }
        if self.tick_timer.is_none() && self.may_throttle() {
            PendingTickWork::Watch
        } else if self.pools.iter().any(|pool| !pool.active.is_empty()) {
            PendingTickWork::CheckCounters
        } else {
            PendingTickWork::None
        }
    }

    /// Returns `true` if a sampling event of an operator is active, which may be throttled.
    fn may_throttle(&self) -> bool {
        let armed = [EventList::Armed, EventList::ArmedRaised].map(|list| self.lists.of(list));
        let mut armed = armed.into_iter().flatten().map(|k| &self.events[*k]);
        armed.any(|event| event.sampling.period != 0 && event.shared.owner != Owner::Guest)
    }

    /// Requests ticks from the VMM's timer, because this context has begun to need them.
    #[inline]
    pub fn request_ticks(&self, need: PendingTickWork) {
        if let Some(timer) = &self.tick_timer {
            timer.request(need);
        }
    }

    /// Schedules a queued group if possible. A group that needs slots is scheduled by replanning
    /// its slot pool.
    pub(super) fn schedule_group(&mut self, group: MuxGroupKey, now_ns: u64) {
        match self.groups[group].pool {
            Some(pool) => self.reschedule(pool, now_ns),
            None => self.schedule_software(group, now_ns),
        }
    }

    pub(super) fn schedule_software(&mut self, group: MuxGroupKey, now_ns: u64) {
        if self.clock.is_active()
            && let Err(error) = self.activate(group, now_ns)
        {
            let time = self.clock.advance(now_ns);
            self.handle_unschedulable(group, PinnedEventFailureCause::of(&error), time, now_ns);
        }
    }

    /// Handles a group that could not be scheduled. A pinned group enters the error state. A
    /// flexible hardware group is retried at each rotation, and a flexible software group at one of
    /// the next ticks.
    pub fn handle_unschedulable(
        &mut self,
        group: MuxGroupKey,
        cause: PinnedEventFailureCause,
        since_ns: u64,
        now_ns: u64,
    ) {
        if self.groups[group].class.is_pinned() {
            self.fail(group, cause, since_ns, now_ns);
        } else if self.groups[group].pool.is_none() && !self.groups[group].rejected {
            self.groups[group].rejected = true;
            self.refused.push_back(group);
            self.request_ticks(PendingTickWork::Work);
        }
    }

    /// Retries software groups that their driver rejected. One call retries at most
    /// [`REFUSED_PER_TICK`] groups.
    pub fn retry_refused(&mut self, now_ns: u64) {
        for _ in 0..self.refused.len().min(REFUSED_PER_TICK) {
            if let Some(group) = self.refused.pop_front() {
                self.groups[group].rejected = false;
                self.schedule_software(group, now_ns);
            }
        }
    }

    /// Starts all inactive members of a group, or none of them.
    pub(super) fn activate(&mut self, group: MuxGroupKey, now_ns: u64) -> Result<(), PmuError> {
        let time = self.clock.advance(now_ns);
        let mut closed = false;
        // The leader is started last. If the host supports groups, this starts all members
        // simultaneously.
        for i in (0..self.groups[group].members.len()).rev() {
            let key = self.groups[group].members[i];
            if self.events[key].state != EventState::Inactive {
                continue;
            }
            match self.start_event(key, time) {
                Ok(known) => closed |= known,
                Err(error) => {
                    self.sched_out_group(group, now_ns);
                    return Err(error);
                }
            }
        }
        if closed {
            self.report_step(group);
        }
        let on = &mut self.groups[group].active;
        if !*on {
            *on = true;
            if let Some(pool) = self.groups[group].pool {
                self.pools[pool].active.push(group);
            }
        }
        Ok(())
    }

    /// Schedules out all members of a group.
    pub fn sched_out_group(&mut self, group: MuxGroupKey, now_ns: u64) {
        for i in 0..self.groups[group].members.len() {
            self.stop_event(self.groups[group].members[i], now_ns);
        }
        if std::mem::take(&mut self.groups[group].active)
            && let Some(pool) = self.groups[group].pool
        {
            self.pools[pool].active.retain(|on| *on != group);
        }
    }

    /// Reads the members of an active group in the middle of the group's time slice.
    fn read_mid_slice(&mut self, group: MuxGroupKey, now_ns: u64) {
        let time = self.clock.advance(now_ns);
        let leader = self.events[self.groups[group].leader()].state;
        for i in 0..self.groups[group].members.len() {
            self.events[self.groups[group].members[i]].record_mid_slice(leader, time);
        }
    }

    /// Ends the time slice of a group whose slot was given to another group. Reports the change of
    /// the group's rate to the multiplexing queue immediately, because after the next rotation the
    /// queue would attribute it to a later slice.
    fn end_turn(&mut self, group: MuxGroupKey) {
        let mut closed = false;
        for i in 0..self.groups[group].members.len() {
            closed |= self.events[self.groups[group].members[i]].end_slice();
        }
        if closed {
            self.report_step(group);
        }
    }

    /// Reports the last slice of a group to its multiplexing queue: the largest rate change of any
    /// member, and whether a periodic guest pattern aliases with the slices.
    fn report_step(&mut self, group: MuxGroupKey) {
        let g = &self.groups[group];
        if g.class.is_pinned() {
            return;
        }
        let Some(pool) = g.pool else { return };
        let slices = || g.members.iter().filter_map(|m| self.events[*m].slices.as_ref());
        let most = slices()
            .filter_map(Slices::last_step)
            .max_by(|a: &f64, b| a.abs().total_cmp(&b.abs()));
        let rhythm = slices().any(Slices::detects_aliasing);
        if let ClassQueue::Flexible(queue) = self.pools[pool].queue(g.class) {
            if self.mux.policy == MuxPolicy::Adaptive {
                queue.slice_ended(group, most);
            }
            if rhythm {
                queue.record_aliasing();
            }
        }
    }

    /// Starts an event. Returns `true` if this ends the previous time slice of a multiplexed event.
    fn start_event(&mut self, key: EventKey, time: u64) -> Result<bool, PmuError> {
        // Reads the leader's state before the event starts, because the event may be the leader.
        let takes_turns = self.events[key].slices.is_some();
        let leader = takes_turns.then(|| self.leader_state(key));
        let event = &mut self.events[key];
        event.start(time)?;
        let closed = leader.is_some_and(|leader| event.record_sched_in(leader, time));
        self.active += 1;
        if let Some(pool) = event.pool {
            self.pools[pool].used += 1;
        }
        self.add_to_lists(key);
        Ok(closed)
    }

    pub(super) fn stop_event(&mut self, key: EventKey, now_ns: u64) {
        if self.events[key].state == EventState::Active {
            self.deactivate(key, Event::stop, now_ns);
        }
    }

    /// Schedules out the group of an active event whose driver event was stopped and could not be
    /// restarted.
    pub fn handle_restart_failure(&mut self, key: EventKey, error: &PmuError, now_ns: u64) {
        log::warn!(
            "cannot restart event {} after a change of its overflow: {error}",
            self.events[key].shared.id
        );
        let group = self.events[key].group;
        self.deactivate(key, Event::complete_stop, now_ns);
        self.sched_out_group(group, now_ns);
        let time = self.clock.advance(now_ns);
        self.handle_unschedulable(group, PinnedEventFailureCause::of(error), time, now_ns);
    }

    /// Schedules an active event out. `stop` is [`Event::stop`] or [`Event::complete_stop`] and
    /// receives the context time.
    fn deactivate(&mut self, key: EventKey, stop: impl FnOnce(&mut Event, u64), now_ns: u64) {
        let time = self.clock.advance(now_ns);
        if self.events[key].slices.is_some() {
            let leader = self.leader_state(key);
            self.events[key].record_sched_out(leader, time);
        }
        let event = &mut self.events[key];
        stop(event, time);
        self.active -= 1;
        if let Some(pool) = event.pool {
            self.pools[pool].used -= 1;
        }
        if event.sampling.pending > 0 {
            self.queue_pending(key);
        }
        self.remove_from_lists(key);
        self.update_page(key, now_ns);
    }
}
