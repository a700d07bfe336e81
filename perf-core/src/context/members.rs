//! Adds events to a context and its groups, and removes them. The siblings of a removed
//! leader become leaders of their own groups.

use super::Context;
use crate::model::event::{Event, Source};
use crate::model::keys::EventKey;
use crate::model::state::{EventState, Owner};
use crate::model::times::EventTimes;
use crate::schedule::group::{Group, GroupClass};

impl Context {
    /// Adds an event to the group of event `leader`, or with `None` as the leader of a new group.
    /// Schedules the event immediately if it is enabled and a slot is available.
    pub fn add(&mut self, mut event: Event, leader: Option<EventKey>, now_ns: u64) -> EventKey {
        let pool = event.pool;
        let time = self.clock.advance(now_ns);
        event.times = EventTimes::attach(time);
        let (pinned, exclusive) = (event.shared.attr.pinned, event.shared.attr.exclusive);
        let owner = event.top().owner;
        let enabled = event.state >= EventState::Inactive;
        let key = self.events.insert(event);
        let group = match leader {
            Some(leader) => self.events[leader].group,
            None => self
                .groups
                .insert(Group::new(None, class_of(owner, pinned), exclusive)),
        };
        self.events[key].group = group;
        self.groups[group].members.push(key);
        // Reserves list capacity for all events, so that the hot paths never allocate.
        let events = self.events.len();
        self.lists.reserve(events);
        self.pending.reserve(events.saturating_sub(self.pending.len()));
        self.refused
            .reserve(self.groups.len().saturating_sub(self.refused.len()));
        if let Some(pool) = pool {
            let parked = &mut self.pools[pool].parked;
            parked.reserve(events.saturating_sub(parked.len()));
        }
        let Group {
            members,
            counter_requests: wants,
            ..
        } = &mut self.groups[group];
        self.entries
            .reserve(members.len().saturating_sub(self.entries.len()));
        if pool.is_some() {
            wants.reserve(members.len().saturating_sub(wants.len()));
        }
        if matches!(self.events[key].source, Source::Raised(_)) {
            let event = &mut self.events[key];
            let raised = &mut self.raised[raised_id(event)];
            event.raised_at = raised.len();
            raised.push(key);
        }

        let mut requeue = false;
        if pool.is_some() && self.groups[group].pool.is_none() {
            requeue = self.groups[group].queued;
            // The first hardware member turns the software group into a hardware group, which
            // belongs in a different queue.
            self.sched_out_group(group, now_ns);
            self.unqueue(group);
            self.groups[group].pool = pool;
        }
        if enabled || requeue {
            self.schedule_enabled(key, now_ns);
        }
        key
    }

    /// Schedules an event out and removes it from the context. The siblings of a removed leader
    /// become leaders of their own groups and keep their states.
    pub fn remove(&mut self, key: EventKey, now_ns: u64) -> Event {
        let group = self.events[key].group;
        let pool = self.groups[group].pool;
        let was_leader = self.is_leader(key);
        self.settle_group_times(group, now_ns);
        if self.groups[group].active {
            // Removing a leader schedules out its group. Removing a sibling affects only the
            // sibling.
            if was_leader {
                self.sched_out_group(group, now_ns);
            } else {
                self.stop_event(key, now_ns);
            }
        }
        if was_leader {
            self.unqueue(group);
            let leader_off = self.events[key].state < EventState::Inactive;
            let members = std::mem::take(&mut self.groups[group].members);
            self.groups.remove(group);
            for &sibling in members.iter().skip(1) {
                self.make_singleton(sibling, leader_off, now_ns);
            }
        } else {
            self.groups[group].members.retain(|m| *m != key);
            self.update_wants(group);
            let software = self.groups[group]
                .members
                .iter()
                .all(|m| self.events[*m].pool.is_none());
            if pool.is_some() && software {
                // The last hardware member was removed, so the group needs no slot and moves to the
                // queue of software groups.
                let queued = self.groups[group].queued;
                self.sched_out_group(group, now_ns);
                self.unqueue(group);
                self.groups[group].pool = None;
                if queued {
                    self.enqueue(group);
                    self.schedule_software(group, now_ns);
                }
            }
        }
        self.pending.retain(|p| *p != key);
        if matches!(self.events[key].source, Source::Raised(_)) {
            self.remove_raised(key);
        }
        let event = self.events.remove(key);
        if let Some(pool) = pool {
            self.reschedule(pool, now_ns);
        }
        event
    }

    /// Removes an event from the context's list of events that count the same raised software
    /// event. The last event of the list moves to the free position.
    fn remove_raised(&mut self, key: EventKey) {
        let event = &self.events[key];
        let raised = &mut self.raised[raised_id(event)];
        let at = event.raised_at;
        raised.swap_remove(at);
        if let Some(&moved) = raised.get(at) {
            self.events[moved].raised_at = at;
        }
    }

    fn make_singleton(&mut self, key: EventKey, leader_was_off: bool, now_ns: u64) {
        let time = self.clock.advance(now_ns);
        let event = &mut self.events[key];
        if let Source::Driver(driver) = &mut event.source {
            driver.leave_group();
        }
        let attr = &event.shared.attr;
        let class = class_of(event.top().owner, attr.pinned);
        // The times of the sibling stopped while its former leader was off, and now continue.
        if leader_was_off && event.state >= EventState::Inactive {
            event.times.enable(time);
        }
        // A family does not count and is never active.
        let may_run = event.state >= EventState::Inactive && !matches!(event.source, Source::Family);
        let mut group = Group::new(event.pool, class, attr.exclusive);
        group.members.push(key);
        let group = self.groups.insert(group);
        self.events[key].group = group;
        if may_run {
            self.update_wants(group);
            self.enqueue(group);
            self.schedule_group(group, now_ns);
        }
    }
}

fn class_of(owner: Owner, pinned: bool) -> GroupClass {
    match (owner, pinned) {
        (Owner::Guest, true) => GroupClass::Guest,
        (Owner::OperatorVm, true) => GroupClass::PinnedVm,
        (Owner::OperatorVm, false) => GroupClass::FlexibleVm,
        (Owner::OperatorVcpu, true) => GroupClass::PinnedVcpu,
        (Owner::Guest | Owner::OperatorVcpu, false) => GroupClass::FlexibleVcpu,
    }
}

/// Returns the ID of the raised software event that this event counts.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the number was checked when the event was opened"
)]
fn raised_id(event: &Event) -> usize {
    event.shared.attr.config as usize
}
