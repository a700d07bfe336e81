//! Inheritance of VM-wide events when vCPUs are added and removed.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::context::ContextCell;
use crate::model::event::{Event, EventShared, Source};
use crate::model::keys::EventKey;
use crate::model::state::EventState;
use crate::notify::PollState;
use crate::sample::SamplingRate;
use crate::service::core::CoreInner;
use crate::service::error::PerfEventOpenError;
use crate::service::open_events::{Child, EventLinks};

impl CoreInner {
    /// Returns `true` if a new vCPU inherits every family (a VM-wide event with children).
    pub fn inherits_all(&self) -> bool {
        let vm = self.vm.lock();
        vm.groups.iter().all(|(_, g)| {
            let leader = &vm.events[g.leader()];
            leader.shared.attr.inherit || !matches!(leader.source, Source::Family)
        })
    }

    /// Returns the groups that a new vCPU inherits: those whose leader has `inherit`, regardless of
    /// the siblings' own `inherit` flags.
    pub fn inherited_groups(&self) -> Vec<Vec<(EventKey, Arc<EventShared>)>> {
        let vm = self.vm.lock();
        let mut groups: Vec<Vec<(EventKey, Arc<EventShared>)>> = vm
            .groups
            .iter()
            .filter(|(_, g)| {
                let leader = &vm.events[g.leader()];
                leader.shared.attr.inherit && matches!(leader.source, Source::Family)
            })
            .map(|(_, g)| {
                g.members
                    .iter()
                    .map(|m| (*m, Arc::clone(&vm.events[*m].shared)))
                    .collect()
            })
            .collect();
        // Sorts the groups by the time of opening, so that contexts with the same events have the
        // same layout.
        groups.sort_by_key(|members| members[0].1.id);
        groups
    }

    /// Creates the children of all events of a group in context `cell`.
    pub fn inherit_group(
        &self,
        members: &[(EventKey, Arc<EventShared>)],
        cell: &Arc<ContextCell>,
    ) -> Result<(), PerfEventOpenError> {
        let mut leader = None;
        for (parent_key, parent) in members {
            self.check_child(&parent.attr, cell, leader)?;
            // Always found, because the caller holds the topology lock and the event is open.
            let Some(links) = self.opened.get(parent.id) else {
                continue;
            };
            let key = self.inherit(*parent_key, parent, &links, cell, leader)?;
            leader.get_or_insert(key);
        }
        Ok(())
    }

    /// Creates a child of `parent` in context `cell`, with the current state of the parent, and
    /// adds the child to the family.
    pub fn inherit(
        &self,
        parent_key: EventKey,
        parent: &Arc<EventShared>,
        links: &EventLinks,
        cell: &Arc<ContextCell>,
        leader: Option<EventKey>,
    ) -> Result<EventKey, PerfEventOpenError> {
        let shared = Arc::new(EventShared::new(
            parent.attr.clone(),
            parent.owner,
            parent.cookie,
            false,
        ));
        let (source, hardware) = self.source(&parent.attr, cell, leader)?;
        let family = links.family.as_ref().expect("only families are inherited");
        // The family lock is held, so that an enable or disable of the family takes effect either
        // entirely before or entirely after this child is linked.
        let mut family = family.lock();
        let (enabled, mut rate, output, enable_on_exec) = {
            let mut vm = self.vm.lock();
            let found = vm.get(parent_key, parent);
            found.map_or((false, SamplingRate::default(), None, false), |e| {
                (
                    e.state >= EventState::Inactive,
                    e.sampling.rate(),
                    e.output.clone(),
                    e.enable_on_exec,
                )
            })
        };
        if rate.freq != 0
            && let Some(sibling) = family.live().first()
        {
            // The parent of a family does not count, so its period stays at the initial value of 1.
            // The adapted period of a sibling is a better start.
            rate.period = sibling.cell.lock().events[sibling.key].sampling.period;
        }
        let now_ns = cell.now_ns();
        let mut context = cell.lock();
        let reserved = self.limits.reserved_slots.load(Ordering::Relaxed);
        let place = hardware.map(|h| (context.pool(h.driver, h.counters, reserved), h.suitable_counters));
        let mut event = Event::new(shared, Some(Arc::clone(parent)), place, source, enabled);
        event.sampling.inherit_rate(rate);
        event.output = output;
        event.enable_on_exec = enable_on_exec;
        let key = context.add(event, leader, now_ns);
        cell.publish_raised(&context);
        drop(context);
        family.add(Child {
            cell: Arc::clone(cell),
            key,
        });
        Ok(key)
    }

    /// Reverts a failed hot-add: removes the children in context `cell` from their families.
    /// Discards the counts of these children.
    pub fn abandon(&self, cell: &Arc<ContextCell>) {
        for (key, parent) in self.children_in(cell) {
            let links = self.opened.get(parent.id);
            if let Some(family) = links.as_ref().and_then(|links| links.family.as_ref()) {
                let mut family = family.lock();
                let _ = family.unlink(|child| child.is(cell, key));
            }
        }
    }

    fn children_in(&self, cell: &ContextCell) -> Vec<(EventKey, Arc<EventShared>)> {
        let context = cell.lock();
        context
            .events
            .iter()
            .filter_map(|(key, e)| Some((key, Arc::clone(e.parent.as_ref()?))))
            .collect()
    }

    /// Handles the removal of a vCPU: stops its events, writes its last records, and adds the
    /// totals of the children to their parents.
    pub fn exit(&self, cell: &Arc<ContextCell>) {
        let now_ns = cell.now_ns();
        {
            let mut context = cell.lock();
            context.sched_out(now_ns);
            context.dead = true;
            context.discard_pending(self.record_origin(cell, now_ns));
        }
        // The EXIT record follows all samples of the vCPU, because all events are stopped and
        // serviced now. Only READ records may follow it.
        if cell.is_vcpu() {
            self.task_record(cell, false);
        }
        let children = self.children_in(cell);
        for (key, _) in &children {
            self.read_record(cell, *key);
        }
        for (key, parent) in children {
            let links = self.opened.get(parent.id);
            let Some(family) = links.as_ref().and_then(|links| links.family.as_ref()) else {
                continue;
            };
            let mut family = family.lock();
            if family.fold(&parent.folded, |child| child.is(cell, key)).is_some() {
                let mut context = cell.lock();
                let event = context.remove(key, now_ns);
                cell.publish_raised(&context);
                // Releases the lock before the event is dropped, because dropping it may close file
                // descriptors.
                drop(context);
                drop(event);
            }
        }
        // Events that were opened on the vCPU itself remain readable through their handles and
        // never count again.
        for (_, event) in cell.lock().events.iter() {
            event.shared.notify.signal(PollState::HUP);
            if let Some(output) = event.output.as_ref().filter(|o| o.owner == event.shared.id) {
                output.ring.hang_up();
            }
        }
    }
}
