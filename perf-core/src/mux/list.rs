//! Doubly linked lists of multiplexed groups. The links are stored in the groups' entries in a
//! table, so insertion and removal take constant time and do not allocate.

use super::MuxGroupKey;

/// Link value that marks the end of a list.
const NIL: u32 = u32::MAX;

/// Converts `key` to the 32-bit form that is stored in links.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the queue takes in keys of 32 bits only"
)]
fn short(key: MuxGroupKey) -> u32 {
    usize::from(key) as u32
}

/// Converts the 32-bit form of a link to a key, or to `None` at the end of the list.
fn key(short: u32) -> Option<MuxGroupKey> {
    (short != NIL).then(|| (short as usize).into())
}

/// The keys of the previous and of the next entry in a list.
#[derive(Clone, Copy, Debug)]
pub(super) struct ListLink {
    prev: u32,
    next: u32,
}

impl ListLink {
    pub(super) const NONE: Self = Self { prev: NIL, next: NIL };
}

/// A linked list of groups. The links are stored in the entries of the groups. An entry may contain
/// links of several lists, and the `link` argument of each method selects those of this list.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupList {
    head: u32,
    tail: u32,
    len: usize,
}

impl Default for GroupList {
    fn default() -> Self {
        Self {
            head: NIL,
            tail: NIL,
            len: 0,
        }
    }
}

impl GroupList {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn front(&self) -> Option<MuxGroupKey> {
        key(self.head)
    }

    pub(super) fn after<E>(
        &self,
        entries: &[E],
        group: MuxGroupKey,
        link: impl Fn(&E) -> &ListLink,
    ) -> Option<MuxGroupKey> {
        key(link(&entries[usize::from(group)]).next)
    }

    /// Appends `group`, which must not be in this list yet.
    pub(super) fn push_back<E>(
        &mut self,
        entries: &mut [E],
        group: MuxGroupKey,
        link: impl Fn(&mut E) -> &mut ListLink,
    ) {
        *link(&mut entries[usize::from(group)]) = ListLink {
            prev: self.tail,
            next: NIL,
        };
        if self.tail == NIL {
            self.head = short(group);
        } else {
            link(&mut entries[self.tail as usize]).next = short(group);
        }
        self.tail = short(group);
        self.len += 1;
    }

    /// Removes `group`, which must be in this list.
    pub(super) fn remove<E>(
        &mut self,
        entries: &mut [E],
        group: MuxGroupKey,
        link: impl Fn(&mut E) -> &mut ListLink,
    ) {
        let ListLink { prev, next } =
            std::mem::replace(link(&mut entries[usize::from(group)]), ListLink::NONE);
        if prev == NIL {
            self.head = next;
        } else {
            link(&mut entries[prev as usize]).next = next;
        }
        if next == NIL {
            self.tail = prev;
        } else {
            link(&mut entries[next as usize]).prev = prev;
        }
        self.len -= 1;
    }
}
