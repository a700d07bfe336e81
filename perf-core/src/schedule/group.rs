//! Groups, and the queues of pinned and software groups. Multiplexed groups wait in [`crate::mux`].
//!
//! A [`GroupQueue`] is an intrusive ring list of groups, so insertion, removal and rotation take
//! constant time. Only groups that can run are queued: a group whose leader is off or in the error
//! state is not queued.

use smallvec::SmallVec;

use super::counter_assignments::CounterRequest;
use crate::model::keys::{EventKey, MuxGroupKey, PoolId, Table};

/// A group leader and its siblings, scheduled together or not at all.
#[derive(Debug)]
pub(crate) struct Group {
    /// Keys of the group's events, leader first.
    pub members: SmallVec<[EventKey; 4]>,
    /// Slot pool of the group's hardware events, or `None` for a group of software events.
    pub pool: Option<PoolId>,
    /// Scheduling class, which selects the queue of the pool that contains the group.
    pub class: GroupClass,
    /// Counters that the group requires: one for each hardware event that is neither off nor in the
    /// error state.
    pub counter_requests: SmallVec<[CounterRequest; 4]>,
    pub exclusive: bool,
    /// `true` if the group is active.
    pub active: bool,
    /// `true` if the group is parked: it is not in its queue, because it cannot become active
    /// together with the active pinned groups.
    pub parked: bool,
    /// `true` if the driver rejected the group and a tick will retry it.
    pub rejected: bool,
    /// `true` if the group can run and is in its queue or parked.
    pub queued: bool,
    link: Option<Link>,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    prev: MuxGroupKey,
    next: MuxGroupKey,
}

impl Group {
    pub fn new(pool: Option<PoolId>, class: GroupClass, exclusive: bool) -> Self {
        Self {
            members: SmallVec::new(),
            pool,
            class,
            counter_requests: SmallVec::new(),
            exclusive,
            active: false,
            parked: false,
            rejected: false,
            queued: false,
            link: None,
        }
    }

    pub fn leader(&self) -> EventKey {
        self.members[0]
    }
}

/// Scheduling class of a group, which selects its queue in a pool. The share policy defines the
/// order of the classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum GroupClass {
    /// Pinned events of the guest, which back its counters.
    Guest,
    /// Pinned events of an operator that are VM-wide.
    PinnedVm,
    /// Pinned events of an operator for this vCPU only.
    PinnedVcpu,
    /// Flexible events of an operator that are VM-wide.
    FlexibleVm,
    /// Flexible events of an operator for this vCPU only.
    FlexibleVcpu,
}

impl GroupClass {
    pub const COUNT: usize = Self::PINNED + Self::FLEXIBLE;
    /// Number of pinned classes, which precede the flexible classes.
    pub const PINNED: usize = 3;
    /// Number of flexible classes, which are multiplexed.
    pub const FLEXIBLE: usize = 2;

    pub fn is_pinned(self) -> bool {
        self <= Self::PinnedVcpu
    }

    /// Returns `true` for a class of single-vCPU events, which may not use the slots reserved for
    /// VM-wide events.
    pub fn is_vcpu(self) -> bool {
        !matches!(self, Self::PinnedVm | Self::FlexibleVm)
    }
}

/// A queue of groups that are scheduled in order.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GroupQueue {
    head: Option<MuxGroupKey>,
    len: usize,
}

impl GroupQueue {
    pub fn len(&self) -> usize {
        self.len
    }

    /// Appends group `key`, which must not be in any queue.
    pub fn push_back(&mut self, groups: &mut Table<MuxGroupKey, Group>, key: MuxGroupKey) {
        debug_assert!(groups[key].link.is_none());
        let link = match self.head {
            None => {
                self.head = Some(key);
                Link { prev: key, next: key }
            }
            Some(head) => {
                let tail = links(groups, head).prev;
                set(groups, tail, |l| l.next = key);
                set(groups, head, |l| l.prev = key);
                Link {
                    prev: tail,
                    next: head,
                }
            }
        };
        groups[key].link = Some(link);
        self.len += 1;
    }

    /// Removes group `key`. Has no effect on a group that is in no queue.
    pub fn remove(&mut self, groups: &mut Table<MuxGroupKey, Group>, key: MuxGroupKey) {
        let Some(link) = groups[key].link.take() else {
            return;
        };
        self.len -= 1;
        if link.next == key {
            self.head = None;
            return;
        }
        set(groups, link.prev, |l| l.next = link.next);
        set(groups, link.next, |l| l.prev = link.prev);
        if self.head == Some(key) {
            self.head = Some(link.next);
        }
    }

    /// Returns the first group in the queue, or `None` if the queue is empty.
    pub fn first(&self) -> Option<MuxGroupKey> {
        self.head
    }

    /// Returns the group after `key` in the queue, or `None` if `key` is the last one.
    pub fn after(&self, groups: &Table<MuxGroupKey, Group>, key: MuxGroupKey) -> Option<MuxGroupKey> {
        let next = groups[key].link?.next;
        (Some(next) != self.head).then_some(next)
    }

    /// Returns an iterator over the groups, from the first to the last.
    pub fn iter<'a>(&self, groups: &'a Table<MuxGroupKey, Group>) -> impl Iterator<Item = MuxGroupKey> + 'a {
        let mut next = self.head;
        let mut left = self.len;
        std::iter::from_fn(move || {
            let key = next?;
            left = left.checked_sub(1)?;
            next = Some(links(groups, key).next);
            Some(key)
        })
    }
}

fn links(groups: &Table<MuxGroupKey, Group>, key: MuxGroupKey) -> Link {
    groups[key]
        .link
        .expect("a group reached through a queue is linked")
}

fn set(groups: &mut Table<MuxGroupKey, Group>, key: MuxGroupKey, change: impl FnOnce(&mut Link)) {
    change(
        groups[key]
            .link
            .as_mut()
            .expect("a group reached through a queue is linked"),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn order(queue: &GroupQueue, groups: &Table<MuxGroupKey, Group>) -> Vec<MuxGroupKey> {
        queue.iter(groups).collect()
    }

    proptest! {
        #[test]
        fn group_queue_matches_deque(ops in prop::collection::vec((0u8..2, any::<prop::sample::Index>()), 0..60)) {
            let (mut groups, mut queue) = (Table::default(), GroupQueue::default());
            let mut model = std::collections::VecDeque::new();
            for (op, index) in ops {
                match op {
                    0 => {
                        let key = groups.insert(Group::new(None, GroupClass::FlexibleVcpu, false));
                        queue.push_back(&mut groups, key);
                        model.push_back(key);
                    }
                    1 if !model.is_empty() => {
                        let key = model.remove(index.index(model.len())).unwrap();
                        queue.remove(&mut groups, key);
                        queue.remove(&mut groups, key); // a second removal changes nothing
                        groups.remove(key);
                    }
                    _ => {}
                }
                prop_assert_eq!(order(&queue, &groups), Vec::from(model.clone()));
                prop_assert_eq!(queue.len(), model.len());
            }
        }
    }
}
