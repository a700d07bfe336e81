//! What events of a context have counted.

use std::sync::atomic::Ordering;

use crate::attr::ReadFormat;
use crate::context::{Context, Past};
use crate::estimate::{Estimate, linear};
use crate::model::event::Source;
use crate::model::keys::EventKey;
use crate::model::output::write_page;
use crate::model::slices::EstimateSum;
use crate::model::state::State;
use crate::model::totals::Totals;
use crate::pmu;
use crate::record::{Entries, ReadEntry, ReadValues};
use crate::schedule::ClassQueue;
use crate::time::Times;

impl Context {
    /// The event's own count and times, refreshed first, so that the two belong together.
    #[inline]
    pub fn totals(&mut self, key: EventKey, now_ns: u64) -> Totals {
        let time = self.clock.advance(now_ns);
        let leader = self.leader_state(key);
        let event = &mut self.events[key];
        if matches!(event.source, Source::Family) {
            // It counts nothing itself; the times of its children are the times.
            return Totals::default();
        }
        let count = event.count();
        self.notice(key, now_ns);
        // Whether it is on, and its leader's state, may have changed just now.
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

    /// What the event would have counted had it been on whenever it was enabled.
    pub fn estimate(&mut self, key: EventKey, now_ns: u64) -> EstimateSum {
        let totals = self.totals(key, now_ns);
        let rhythm = self.has_rhythm(key);
        let event = &mut self.events[key];
        if matches!(event.source, Source::Family) {
            return EstimateSum::default();
        }
        let estimate = match &event.slices {
            _ if totals.times.enabled_ns == totals.times.running_ns => None,
            Some(slices) => slices
                .estimate(totals.times.enabled_ns, event.state, totals.count)
                .map(|estimate| if rhythm { estimate.unsure() } else { estimate }),
            None => {
                linear(totals.count, totals.times.enabled_ns, totals.times.running_ns).map(|value| Estimate {
                    value,
                    standard_error: None,
                    bound: None,
                    exact: false,
                })
            }
        };
        EstimateSum::of(totals, estimate)
    }

    /// What members that join the group of `leader` are opened with ([`pmu::PmuEvent::group`]).
    pub fn driver_group(&mut self, leader: EventKey) -> Option<pmu::Group> {
        match &mut self.events.get_mut(leader)?.source {
            Source::Driver(driver) => driver.group(),
            Source::Raised(_) | Source::Family => None,
        }
    }

    /// Whether a rhythm was seen of late in an event that takes turns with this one.
    fn has_rhythm(&mut self, key: EventKey) -> bool {
        let group = &self.groups[self.events[key].group];
        let Some(pool) = group.pool else { return false };
        match self.pools[pool].queue(group.class) {
            ClassQueue::Flexible(queue) => queue.has_rhythm(),
            ClassQueue::Pinned(_) => false,
        }
    }

    /// Makes the event's count `count` from now on. Its times are left alone.
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

    /// What the event has counted until now, with the slices it did that in. The last one ends here if it is
    /// on.
    pub fn leave_off(&mut self, key: EventKey, now_ns: u64) -> Past {
        let totals = self.totals(key, now_ns);
        let event = &mut self.events[key];
        let mut slices = event.slices;
        if event.state == State::Active
            && let Some(slices) = &mut slices
        {
            slices.off(totals.times.enabled_ns);
        }
        Past { totals, slices }
    }

    /// Makes `past` what the event has counted until now, whatever it did.
    pub fn go_on_from(&mut self, key: EventKey, past: Past, now_ns: u64) {
        let time = self.clock.advance(now_ns);
        let event = &mut self.events[key];
        event.times.set(past.totals.times, time);
        event.set_count(past.totals.count);
        event.slices = past.slices;
        if event.state == State::Active
            && let Some(slices) = &mut event.slices
        {
            let _ = slices.on(past.totals.times.enabled_ns, past.totals.count);
        }
        self.update_page(key, now_ns);
    }

    /// Brings the control page of an event that owns a ring up to date. A family's is written when it is
    /// read: its children have locks of their own.
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

    /// The reading a record carries: own and exited children's totals, not those of live ones, whose contexts
    /// have locks of their own.
    pub(crate) fn read_values<'a>(
        &mut self,
        key: EventKey,
        now_ns: u64,
        entries: &'a mut Vec<ReadEntry>,
    ) -> ReadValues<'a> {
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
        let mut times = Times::default();
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
            entries.push(ReadEntry {
                value: totals.count,
                id: event.top().id,
                lost: event.top().lost.load(Ordering::Relaxed),
            });
        }
        ReadValues {
            time_enabled_ns: times.enabled_ns,
            time_running_ns: times.running_ns,
            entries: Entries::List(entries),
        }
    }
}
