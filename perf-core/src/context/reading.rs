//! Counts, times and estimates of the events of a context.

use std::sync::atomic::Ordering;

use crate::attr::ReadFormat;
use crate::context::{Context, EventHistory};
use crate::estimate::{Estimate, linear};
use crate::model::event::Source;
use crate::model::keys::EventKey;
use crate::model::output::write_page;
use crate::model::slices::EstimateSum;
use crate::model::state::EventState;
use crate::model::totals::Totals;
use crate::pmu;
use crate::record::{ReadFormatEntries, ReadFormatEntry, ReadFormatValues};
use crate::schedule::ClassQueue;
use crate::time::EventTimeTotals;

impl Context {
    /// Returns the count and times of one event, excluding its children. Reads the count first,
    /// because the read may detect a lost counter, which changes the times.
    #[inline]
    pub fn totals(&mut self, key: EventKey, now_ns: u64) -> Totals {
        let time = self.clock.advance(now_ns);
        let leader = self.leader_state(key);
        let event = &mut self.events[key];
        if matches!(event.source, Source::Family) {
            // The parent of a family does not count. Its count and times are those of its children.
            return Totals::default();
        }
        let count = event.count();
        self.handle_lost_slot(key, now_ns);
        // Detecting a lost counter may have changed the state of the event, which may be its own
        // leader.
        let leader = if self.is_leader(key) {
            self.events[key].state
        } else {
            leader
        };
        let event = &self.events[key];
        Totals {
            count,
            times: event.times.at(event.state, leader, time),
        }
    }

    /// Returns [`Context::totals`], and an estimate of the event's count over its whole time
    /// enabled.
    pub fn totals_and_estimate(&mut self, key: EventKey, now_ns: u64) -> (Totals, EstimateSum) {
        let totals = self.totals(key, now_ns);
        let rhythm = self.has_aliasing(key);
        let event = &mut self.events[key];
        if matches!(event.source, Source::Family) {
            return (totals, EstimateSum::default());
        }
        let estimate = match &event.slices {
            _ if totals.times.enabled_ns == totals.times.running_ns => None,
            Some(slices) => slices
                .estimate(totals.times.enabled_ns, event.state, totals.count)
                .map(|estimate| {
                    if rhythm {
                        estimate.with_unknown_uncertainty()
                    } else {
                        estimate
                    }
                }),
            None => {
                linear(totals.count, totals.times.enabled_ns, totals.times.running_ns).map(|value| Estimate {
                    value,
                    standard_error: None,
                    bound: None,
                    exact: false,
                })
            }
        };
        (totals, EstimateSum::of(totals, estimate))
    }

    /// Returns the driver group ([`pmu::PmuEvent::group`]) of `leader`, which new members of its
    /// group join.
    pub fn driver_group(&mut self, leader: EventKey) -> Option<pmu::PmuGroup> {
        match &mut self.events.get_mut(leader)?.source {
            Source::Driver(driver) => driver.group(),
            Source::Raised(_) | Source::Family => None,
        }
    }

    /// Returns `true` if a guest pattern that aliases with the time slices was recently detected in
    /// an event that shares slots with this one.
    fn has_aliasing(&mut self, key: EventKey) -> bool {
        let group = &self.groups[self.events[key].group];
        let Some(pool) = group.pool else { return false };
        match self.pools[pool].queue(group.class) {
            ClassQueue::Flexible(queue) => queue.has_aliasing(),
            ClassQueue::Pinned(_) => false,
        }
    }

    /// Sets the count of the event to `count`. The event's times do not change.
    pub fn set_count(&mut self, key: EventKey, count: u64, now_ns: u64) {
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

    /// Ends the current time slice of an active event. Returns the event's count and time slices so
    /// far.
    pub fn end_history(&mut self, key: EventKey, now_ns: u64) -> EventHistory {
        let totals = self.totals(key, now_ns);
        let event = &mut self.events[key];
        let mut slices = event.slices;
        if event.state == EventState::Active
            && let Some(slices) = &mut slices
        {
            slices.off(totals.times.enabled_ns);
        }
        EventHistory { totals, slices }
    }

    /// Replaces the event's count and time slices with `past`.
    pub fn restore_history(&mut self, key: EventKey, past: EventHistory, now_ns: u64) {
        let time = self.clock.advance(now_ns);
        let event = &mut self.events[key];
        event.times.set(past.totals.times, time);
        event.set_count(past.totals.count);
        event.slices = past.slices;
        if event.state == EventState::Active
            && let Some(slices) = &mut event.slices
        {
            let _ = slices.sched_in(past.totals.times.enabled_ns, past.totals.count);
        }
        self.update_page(key, now_ns);
    }

    /// Updates the control page of an event that owns a ring. Has no effect on a family, whose page
    /// is updated when the family is read, because its children have their own locks.
    pub fn update_page(&mut self, key: EventKey, now_ns: u64) {
        let event = &self.events[key];
        if matches!(event.source, Source::Family) {
            return;
        }
        if let Some(output) = event.output.clone().filter(|o| o.owner == event.shared.id) {
            let totals = self.totals(key, now_ns);
            write_page(&output, totals);
        }
    }

    /// Returns the reading for a record. The reading contains the totals of the event and of its
    /// exited children. Live children are not included, because their contexts have their own
    /// locks.
    pub(crate) fn read_values<'a>(
        &mut self,
        key: EventKey,
        now_ns: u64,
        entries: &'a mut Vec<ReadFormatEntry>,
    ) -> ReadFormatValues<'a> {
        let group = self.events[key].group;
        let is_group = self.events[key]
            .shared
            .attr
            .read_format
            .contains(ReadFormat::GROUP);
        let n = if is_group {
            self.groups[group].members.len()
        } else {
            1
        };
        let mut times = EventTimeTotals::default();
        for i in 0..n.min(entries.capacity()) {
            let member = if is_group {
                self.groups[group].members[i]
            } else {
                key
            };
            let mut totals = self.totals(member, now_ns);
            let event = &self.events[member];
            if event.parent.is_none() {
                totals.add(event.shared.folded.load());
            }
            if i == 0 {
                times = totals.times;
            }
            entries.push(ReadFormatEntry {
                value: totals.count,
                id: event.top().id,
                lost: event.top().lost.load(Ordering::Relaxed),
            });
        }
        ReadFormatValues {
            time_enabled_ns: times.enabled_ns,
            time_running_ns: times.running_ns,
            entries: ReadFormatEntries::List(entries),
        }
    }
}
